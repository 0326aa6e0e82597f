//! Feeds any bytes to a process's sessions with three others, over sockets: each rank is lost at most once, by an error
//! that names it.
#![no_main]

#[path = "../../tests/support/links_bytes.rs"]
mod body;
#[path = "../../tests/support/frames.rs"]
mod frames;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::links_bytes(bytes);
});
