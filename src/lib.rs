//! The KV and latent cache of large-language-model serving, for models with sparse attention.
//!
//! All rows of all sequences stand in a paged pool of pinned host memory, the truth; those that attention is
//! about to read stand in a small pool on the device, a cache of the truth. The library decides what moves
//! and when; the engine computes.
//!
//! **One row's walk.** Prefill [appends](Cache::append) it to the total pool. [Joining](Cache::join) may bring
//! it up. A step's [resolve](Cache::resolve) finds it hit or missed, [gather](Cache::gather) brings a missed
//! row into its slot, attention reads the slot. A new row is written to its
//! [landing slot](Cache::landing_slot), [scattered](Cache::scatter) to the total pool and, if accepted, copied
//! to a slot when the next step is [prepared](Cache::prepare). Nothing flows back: a victim is simply
//! forgotten.
//!
//! **What is promised.** A read never returns another token's, layer's or sequence's row. What is resident is
//! decided by one [rule](residency), the same on every rank, device and thread count, and compared by digest.
//! A sequence that was opened has all the memory it will need; a step allocates nothing. What a step names
//! comes back when the last step that names it is retired, whatever became of it. A caller's mistake is an
//! [`Error`] or a failed step. `docs/testing.md` names the test behind each promise.
//!
//! **The words** are the field's: a *row* is what attention reads for one token in one layer, a *page* 64
//! consecutive tokens, a *slot* one row's place on the device, a *lane* a sequence's place in the device's
//! tables, a *selection* the positions that one query row reads in one layer, a *budget* the slots of a
//! sequence in a layer. `docs/design.md` has them all, and the rooms of the source.
//!
//! `examples/decode_loop.rs` is a whole program.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("forebay needs Linux on x86-64: it maps, locks and binds host memory by Linux system calls");

mod cache;
#[cfg(feature = "check")]
pub mod check;
pub mod device;
mod error;
mod fallible;
mod geometry;
mod ids;
#[cfg(all(feature = "measure", not(loom)))]
pub mod measure;
pub mod os;
pub mod overlap;
#[cfg(feature = "predict")]
pub mod predict;
pub mod residency;
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

pub use cache::{
    Accepted, BatchRow, Cache, Capture, Captured, Config, Footprint, Layers, Length, Memory, Open, Slots,
    Tokens,
};
pub use error::{Error, Kind, Result};
pub use geometry::{Geometry, LINE, Piece, SLOT_BLOCK, Shape};
pub use ids::{HostPage, IndexPage, Lane, Layer, MicroBatch, Sequence};
pub use sparse::{BringUp, Budget, WarmUp};
pub use stats::Stats;
pub use step::{Buffers, LayerCall, Retired, Step, Streams, Unretired};
