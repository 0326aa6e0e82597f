//! Files of what a model selected: read, checked, written.
//!
//! A *selection trace* holds, for every decode step and layer of one sequence, the token positions that
//! attention read. Recorded once from an engine, it can be replayed at any budget, on any machine; that
//! is how a pool's size is chosen before memory is bought.
//!
//! **Format TOPKTRC1** (one zstd frame, or the same bytes uncompressed), little-endian; the page
//! `docs/trace-format.md` is for those who write such files:
//!
//! ```text
//! 8 bytes   "TOPKTRC1"
//! u32       length of the header
//! JSON      header, see [`Header`]; fields that it does not name are ignored
//! body      for each step, for each layer:
//!             u16 added, u16 dropped
//!             added varints:   positions that were not in this layer's set of the step before
//!             dropped varints: ranks, in the ascending set of the step before, of those that left it
//! ```
//!
//! Both lists ascend strictly and are coded as gaps: value = previous value + 1 + gap, before the first
//! one -1; a gap is an unsigned LEB128 varint of at most five bytes. Step s is the query at position
//! `first_position + s` and selects exactly min(k, position + 1) positions, its own allowed.
//!
//! **What bad bytes can do: nothing but an error.** A trace comes from elsewhere, so every count is
//! checked before it is used, and memory grows only with sets that were decoded and found right. The
//! decompressed content never stands in memory as a whole: it passes through a fixed buffer, so a frame
//! that unfolds to terabytes is an error at its first wrong set. What is kept is four bytes a member; a
//! file that promises more than [`MEMBERS_MAX`] members (1 GiB) is refused from its header, and memory that
//! cannot be had is an error. A frame that demands a window above 128 MiB is refused too.
//!
//! While an engine serves, [`TraceWriter`] records the same sets in a format that is good at every moment,
//! TOPKTRC2, which [`SelectionTrace::read`] reads as well.
//!
//! Request traces are a matter of their own: [`requests`].
//!
//! What this room does not do: it knows no budget, no residency and no cost; the bytes of
//! [`SelectionTrace::encode`] are the caller's to store.

mod compact;
mod header;
mod recording;
pub mod requests;
mod selection;
mod source;
mod stamp;
mod unknown;
mod writer;

pub use header::{CONTEXT_MAX, Header, K_MAX, LAYERS_MAX, MEMBERS_MAX};
pub use recording::{Frames, Recording, TraceWriter};
pub use selection::{Promise, SelectionTrace};
