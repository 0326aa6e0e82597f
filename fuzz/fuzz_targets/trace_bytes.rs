//! Feeds any bytes to the trace reader: the result is a trace or an error.
#![no_main]

#[path = "../../tests/support/trace_bytes.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::trace_bytes(bytes);
    body::trace_parts(bytes);
});
