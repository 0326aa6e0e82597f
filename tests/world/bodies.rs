//! The body of the fuzz target `cache_ops`, which `tests/world.rs` replays.

use super::ops::ops_from_bytes;
use super::run::run;

/// Any bytes are operations, and every run of them ends with everything freed.
pub fn cache_ops(bytes: &[u8]) {
    run(&ops_from_bytes(bytes));
}
