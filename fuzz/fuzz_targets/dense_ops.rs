//! Runs operation sequences on a dense cache: any bytes are a run of the world that `tests/dense.rs`
//! checks, or calls with any numbers.
#![no_main]

#[path = "../../tests/dense/bodies.rs"]
mod bodies;
#[path = "../../tests/dense/calls.rs"]
mod calls;
#[path = "../../tests/dense/configs.rs"]
mod configs;
#[expect(
    dead_code,
    reason = "what only the tests use: the CUDA device, held streams, waits that are left out"
)]
#[path = "../../tests/support/device.rs"]
mod device;
#[expect(dead_code, reason = "what only the tests use: threads")]
#[path = "../../tests/dense/devices.rs"]
mod devices;
#[expect(dead_code, reason = "what only the tests use: other ways to enqueue")]
#[path = "../../tests/dense/engine.rs"]
mod engine;
#[expect(dead_code, reason = "what only the tests use: operations by a seed")]
#[path = "../../tests/dense/world.rs"]
mod world;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| bodies::dense_ops(bytes));
