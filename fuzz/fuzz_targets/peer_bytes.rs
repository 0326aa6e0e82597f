//! Feeds any bytes to a session between processes: the result is events, or one error that stays.
#![no_main]

#[path = "../../tests/support/peer_bytes.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::peer_bytes(bytes);
});
