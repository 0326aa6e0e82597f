//! Feeds any bytes to the readers of request traces: the result is a trace or an error. The first byte chooses an
//! option.
#![no_main]

#[path = "../../tests/support/request_bytes.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some((first, bytes)) = bytes.split_first() {
        body::request_bytes(bytes, first % 2 == 1);
    }
});
