//! Feeds any bytes to the reader of a transfer's side: a side, or an error that says why not.
#![no_main]

#[path = "../../tests/support/side_bytes.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::side_bytes(bytes);
});
