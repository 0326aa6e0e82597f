//! A world around a cache: an engine with its streams, rows that say who they are, and a naive model that
//! knows what every read must answer. Shared by `tests/world.rs` and the fuzz target `cache_ops`.

pub mod bodies;
pub mod check;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "../support/device.rs"]
pub mod device;
pub mod engine;
pub mod model;
pub mod ops;
#[path = "../support/oracle.rs"]
pub mod oracle;
pub mod run;
pub mod share;
pub mod steps;
