//! A KV cache for serving large language models with sparse attention.
//!
//! Pinned host memory holds every row of every sequence, in pages: the *total pool*. The device holds the rows
//! that attention read last, in slots: the *sparse pool*, an exact LRU cache of the total pool. The library
//! decides which rows move and when. The engine computes.
//!
//! **What happens to one row.** Prefill [appends](Cache::append) the row to the total pool. [Joining](Cache::join)
//! the batch may load it into a slot. In each step, [resolve](Cache::resolve) finds that a selected row is a hit or
//! a miss, [gather](Cache::gather) copies a missed row into a slot, and attention reads the slot. The engine writes
//! a new row to its [landing slot](Cache::landing_slot). [Scatter](Cache::scatter) stores it in the total pool.
//! If the row is accepted, [preparing](Cache::prepare) the next step copies it to a slot. An eviction writes
//! nothing back, because the total pool already has the row.
//!
//! **What the library promises.**
//!
//! - A read never returns the row of another token, layer or sequence.
//! - One [rule](residency) decides which rows are resident, on every rank and device and for every number of
//!   threads. Ranks compare the outcome by digest.
//! - An open sequence has all the memory that it will need, and a step allocates nothing.
//! - The resources that a step names are freed when the last step that names them is retired, whether that step
//!   succeeded or failed.
//! - A caller's mistake is an [`Error`] or a failed step.
//!
//! `docs/testing.md` names the test for each promise.
//!
//! **Words.**
//!
//! | word | meaning |
//! |---|---|
//! | row | the data that attention reads for one token in one layer |
//! | page | 64 consecutive tokens |
//! | slot | the place of one row on the device |
//! | lane | a sequence's index in the device's tables |
//! | selection | the top-k indices: the positions that one query row reads in one layer |
//! | budget | the number of slots of one sequence in one layer |
//!
//! `docs/design.md` explains all words and the modules of the source. `examples/decode_loop.rs` is a complete
//! program.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("forebay needs Linux on x86-64: it maps, locks and binds host memory by Linux system calls");

mod cache;
#[cfg(feature = "check")]
pub mod check;
pub mod dense;
pub mod device;
mod error;
mod fallible;
mod geometry;
mod ids;
#[cfg(all(feature = "measure", not(loom)))]
pub mod measure;
pub mod os;
pub mod overlap;
pub mod peer;
#[cfg(feature = "predict")]
pub mod predict;
pub mod residency;
mod sequence;
mod sparse;
mod stats;
mod step;
#[cfg(feature = "study")]
pub mod study;
mod sync;
pub mod text;
#[doc(hidden)]
pub mod total;
#[cfg(feature = "trace")]
pub mod trace;
#[cfg(feature = "transfer")]
pub mod transfer;
pub mod weights;

pub use cache::{Cache, Capture, Captured, Config, Footprint, Layers, Open, Slots};
pub use error::{Error, Kind, Result};
pub use geometry::{GROUP_MAX, Geometries, Geometry, IndexGroup, LINE, Piece, SLOT_BLOCK, Shape};
pub use ids::{HostPage, IndexPage, Lane, Layer, MicroBatch, Sequence};
pub use sequence::{Accepted, BatchRow, Length, Tokens};
pub use sparse::{BringUp, Budget, MissCurve, Share, ShareBy, Want, WarmUp, ages};
pub use stats::Stats;
pub use step::{Buffers, LayerCall, Retired, Step, Streams, Unretired};
pub use total::memory::Memory;
pub use total::withheld::Withheld;
