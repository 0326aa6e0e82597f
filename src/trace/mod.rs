//! Reads, checks and writes trace files of a model's selections.
//!
//! A *selection trace* holds, for every decode step and layer of one sequence, the selection (top-k indices): the
//! token positions that attention read. A trace recorded once from an engine can be replayed at any budget, on any
//! machine, so a pool's size can be chosen before memory is bought.
//!
//! **Format TOPKTRC1** (one zstd frame, or the same bytes uncompressed), little-endian; `docs/trace-format.md`
//! describes it for authors of such files:
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
//! Both lists ascend strictly and are coded as gaps: value = previous value + 1 + gap, with -1 before the first
//! value; a gap is an unsigned LEB128 varint of at most five bytes. Step s is the query at position
//! `first_position + s` and selects exactly min(k, position + 1) positions, which may include its own.
//!
//! **Malformed input can only cause an error.** A trace comes from elsewhere, so every count is
//! checked before it is used, and memory grows only with sets that were decoded and found valid. The
//! decompressed content is never in memory as a whole: it passes through a fixed buffer, so a frame
//! that unpacks to terabytes is an error at its first wrong set. The decoded trace takes four bytes per member. A
//! file that declares more than [`MEMBERS_MAX`] members (1 GiB) is refused from its header, and a failed
//! allocation is an error. A frame that requires a window above 128 MiB is refused, too.
//!
//! While an engine serves, [`TraceWriter`] records the same sets in the format TOPKTRC2, which is readable at every
//! moment and which [`SelectionTrace::read`] reads as well.
//!
//! Request traces are a separate format: [`requests`].
//!
//! This module has no notion of budgets, residency or costs; the caller stores the bytes of
//! [`SelectionTrace::encode`].

mod body;
mod compact;
mod header;
mod magic;
mod read;
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
