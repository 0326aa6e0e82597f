//! The CUDA device on the stand-in driver, or on the one that is named: what may be missing, its memory, streams and
//! graphs, what it leaves behind, and a step that comes out as on the host device. What needs the driver's own calls
//! beside it is tested in `src/device/cuda/tests.rs`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "cuda/failing.rs"]
mod failing;
#[path = "cuda/graphs.rs"]
mod graphs;
#[path = "cuda/hosted.rs"]
mod hosted;
#[path = "cuda/memory.rs"]
mod memory;
#[path = "cuda/missing.rs"]
mod missing;
#[path = "cuda/probe.rs"]
mod probe;
#[path = "cuda/rig.rs"]
mod rig;
#[path = "cuda/shared.rs"]
mod shared;
#[path = "support/skip.rs"]
mod skip;
#[path = "cuda/steps.rs"]
mod steps;
#[path = "cuda/streams.rs"]
mod streams;
