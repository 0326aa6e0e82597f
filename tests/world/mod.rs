//! A world around a cache: an engine with its streams, rows that identify themselves, and a naive model that predicts
//! every read. `tests/world.rs` and the fuzz target `cache_ops` share it.

pub mod bodies;
pub mod check;
pub mod config;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "../support/device.rs"]
pub mod device;
pub mod engine;
pub mod model;
pub mod ops;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "../support/oracle.rs"]
pub mod oracle;
pub mod parking;
pub mod prefix;
pub mod resize;
pub mod run;
pub mod share;
pub mod steps;
