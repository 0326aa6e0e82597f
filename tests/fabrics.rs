//! The fabrics over sockets, TCP and shared memory: the suite for fabrics, and what strangers, silent ends and bad
//! memory do to them.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "fabrics/bad.rs"]
mod bad;
#[path = "fabrics/large.rs"]
mod large;
#[path = "fabrics/rig.rs"]
mod rig;
#[path = "fabrics/stalls.rs"]
mod stalls;
#[path = "fabrics/stranger.rs"]
mod stranger;
#[path = "fabrics/strangers.rs"]
mod strangers;
#[path = "fabrics/suite.rs"]
mod suite;
#[path = "fabrics/threads.rs"]
mod threads;
