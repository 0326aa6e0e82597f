//! Feeds any bytes to a session between processes: the result is events, or one error that stays.
#![no_main]

#[path = "../../tests/support/peer_bytes.rs"]
mod body;
#[path = "../../tests/support/frames.rs"]
mod frames;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::peer_bytes(bytes);
});
