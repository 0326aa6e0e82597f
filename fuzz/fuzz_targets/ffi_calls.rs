//! Makes calls of the C interface in any order, with any numbers.
#![no_main]

use forebay_c::{
    arrive, budget, cache, config, dense, dense_config, dense_prefix, dense_sequence, dense_step, device, layer, prefix,
    sequence, status, step, ticket,
};

#[path = "../../ffi/tests/support/calls.rs"]
mod calls;
#[path = "../../ffi/tests/support/dense_calls.rs"]
mod dense_calls;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| dense_calls::any_calls(bytes));
