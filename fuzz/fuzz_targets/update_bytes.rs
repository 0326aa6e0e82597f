//! Drives the other rank of a group of two while a rank shares its parts, those of an update, and commits: no weight is
//! wrong, and no descriptor stays open.
#![no_main]

#[path = "../../tests/support/update_bytes.rs"]
mod body;
#[expect(dead_code, reason = "what other tests use of it")]
#[path = "../../tests/support/frames.rs"]
mod frames;
#[expect(dead_code, reason = "what other tests use of it")]
#[path = "../../tests/support/windows.rs"]
mod windows;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::update_bytes(bytes);
});
