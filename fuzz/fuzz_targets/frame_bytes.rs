//! Feeds any bytes to the reader of a transfer's frames: a frame that is the same again, or a bad format.
#![no_main]

#[path = "../../tests/support/frame_bytes.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::frame_bytes(bytes);
});
