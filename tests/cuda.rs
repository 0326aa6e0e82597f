//! The CUDA device on the stand-in driver, or on a named one: features that may be missing, its memory, streams and
//! graphs, that it leaves nothing behind, and that a step has the same result as on the host device.
//! `src/device/cuda/tests.rs` has the tests that also make driver calls of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "cuda/failing.rs"]
mod failing;
#[path = "support/faulty.rs"]
mod faulty;
#[path = "cuda/graphs.rs"]
mod graphs;
#[path = "cuda/hosted.rs"]
mod hosted;
#[path = "cuda/mappings.rs"]
mod mapped;
#[path = "support/mappings.rs"]
mod mappings;
#[path = "cuda/memory.rs"]
mod memory;
#[path = "cuda/missing.rs"]
mod missing;
#[path = "cuda/newest.rs"]
mod newest;
#[path = "cuda/pages.rs"]
mod pages;
#[path = "cuda/prefetch.rs"]
mod prefetch;
#[path = "cuda/probe.rs"]
mod probe;
#[path = "cuda/replicas.rs"]
mod replicas;
#[path = "cuda/resizes.rs"]
mod resizes;
#[path = "cuda/rig.rs"]
mod rig;
#[path = "cuda/ring.rs"]
mod ring;
#[path = "cuda/ring_cached.rs"]
mod ring_cached;
#[path = "cuda/windows.rs"]
mod sharded;
#[path = "cuda/shared.rs"]
mod shared;
#[path = "support/skip.rs"]
mod skip;
#[path = "cuda/steps.rs"]
mod steps;
#[path = "cuda/streams.rs"]
mod streams;
#[path = "cuda/updates.rs"]
mod updates;
#[path = "support/windows.rs"]
mod windows;
