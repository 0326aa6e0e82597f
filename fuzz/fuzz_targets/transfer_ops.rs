//! Drives a sender and a receiver of a transfer by any bytes: calls, frames that are lost, changed and forged, time.
#![no_main]

#[path = "../../tests/support/transfer_ops.rs"]
mod body;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    body::transfer_ops(bytes);
});
