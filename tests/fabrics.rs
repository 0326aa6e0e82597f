//! The fabrics over sockets, TCP and shared memory: the suite for fabrics; what strangers, silent ends and bad memory
//! do to them; aborts over slow ones, lost messages, and ends whose process is killed or stopped.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "fabrics/aborts.rs"]
mod aborts;
#[path = "fabrics/bad.rs"]
mod bad;
#[path = "fabrics/dying.rs"]
mod dying;
#[path = "fabrics/large.rs"]
mod large;
#[path = "fabrics/naive.rs"]
mod naive;
#[path = "fabrics/processes.rs"]
mod processes;
#[path = "fabrics/ranks.rs"]
mod ranks;
#[path = "fabrics/rig.rs"]
mod rig;
#[path = "fabrics/slowed.rs"]
mod slowed;
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
