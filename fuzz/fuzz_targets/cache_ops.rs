//! Runs operation sequences on the cache: any bytes are a run of the world that `tests/world.rs` checks.
#![no_main]

#[expect(dead_code, reason = "what only the tests use of the world: controls, held streams, random bytes")]
#[path = "../../tests/world/mod.rs"]
mod world;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| world::bodies::cache_ops(bytes));
