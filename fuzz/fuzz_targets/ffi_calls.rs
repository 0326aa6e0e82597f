//! Makes calls of the C interface in any order, with any numbers.
#![no_main]

use forebay_c::{budget, cache, config, device, layer, prefix, sequence, status, step};

#[path = "../../ffi/tests/support/calls.rs"]
mod calls;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    calls::ffi_calls(bytes);
});
