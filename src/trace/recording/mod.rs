//! Traces that grow while an engine serves: recorded step by step, and readable even if the recorder fails.
//!
//! A finished trace states its number of steps at the beginning. A recorder does not know that number, so its
//! format, TOPKTRC2, is a chain of pieces, each valid by itself:
//!
//! ```text
//! frame     "TOPKTRC2", u32 length of the header, the header (JSON), see [`Recording`]
//! groups    u32 steps before it, u32 its own steps (at least 1), then their sets as in TOPKTRC1
//! end       u32 all steps, u32 0
//! ```
//!
//! The first piece is a zstd frame, and so is every group and the end, each with a checksum and preceded by a *mark*:
//! a skippable frame of 16 bytes with the next frame's length. Any zstd tool can unpack the whole. A set is coded as
//! the difference from the set of the previous step, also across groups.
//!
//! **What a crash costs.** A group goes to the file in one append when it is full ([`Frames`]) or flushed. A truncated
//! file is read up to its last whole group, and [`Header::unfinished`](super::Header) counts the bytes after it. The
//! marks make truncation certain: a length is written twice, so damage cannot look like a longer frame that covers the
//! following ones. A damaged mark or frame is ignored only if no mark follows it; otherwise it is an error. A frame
//! with a valid checksum that contradicts the pieces before it is always an error.
//!
//! **What recording costs.** Memory is taken at creation: two steps' sets, one group's bytes, packed and
//! unpacked, and two bits for every possible position; only the compressor allocates its tables with the first
//! groups. A step costs a few passes over k numbers and the context's bits in each layer, and writes nothing
//! until a group is full.
//!
//! **What it does not do.** It records one sequence in each file, and accepted positions only: selections of drafts
//! are recorded once the draft is accepted, and dropped otherwise. The engine splits a batch, `[batch][k]` per layer:
//! each sequence's rows, layer after layer, go to its own writer. A full file is not continued automatically: the next
//! one begins with its own warm steps. [`RequestWriter`](super::requests::RequestWriter) records requests.

mod bits;
mod reader;
mod writer;

use serde::{Deserialize, Serialize};

pub use writer::TraceWriter;

pub(super) use reader::{packed, plain};

use super::header::{FORMAT, Header, object};
use crate::error::{Error, Kind, Result};

/// The name of the format.
pub(super) const RECORDING: &str = "TOPKTRC2";

/// The beginning of a mark: the magic of a skippable frame, and its length, 8.
const MARK: [u8; 8] = [0x5A, 0x2A, 0x4D, 0x18, 8, 0, 0, 0];

/// Bytes of a mark.
const MARK_BYTES: usize = 16;

/// The mark before a frame of `length` bytes: the length, and its bitwise complement.
fn mark(length: u32) -> [u8; MARK_BYTES] {
    let mut mark = [0; MARK_BYTES];
    let bytes = MARK.into_iter().chain(length.to_le_bytes()).chain((!length).to_le_bytes());
    mark.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    mark
}

/// The description at the beginning of a recording. The numbers are checked; the texts are only shown. Created by
/// [`Recording::default`] and set field by field, because fields may be added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recording {
    /// Recorded layers, 1 to [`LAYERS_MAX`](super::LAYERS_MAX).
    pub layers: u32,
    /// The model's own numbers of the recorded layers, ascending; 0, 1, 2... if empty.
    #[serde(default)]
    pub layer_ids: Vec<u32>,
    /// For each layer the index (from 0) of the layer whose sets it uses, or its own index if it has sets of its own.
    /// If empty, every layer has its own. A layer with sets comes before the layers that use them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<u32>,
    /// Positions that one query selects, 1 to [`K_MAX`](super::K_MAX); fewer while the context is shorter.
    pub k: u32,
    /// Position of the query of the first recorded step.
    pub first_position: u32,
    /// Position of the first decode step; the steps before it are warm ones of the prompt.
    pub decode_start: u32,
    /// The longest context in tokens; by default the recorded positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
    /// A short name of the recording.
    #[serde(default)]
    pub label: String,
    /// The model that runs.
    #[serde(default)]
    pub model: String,
    /// Its architecture.
    #[serde(default)]
    pub arch: String,
    /// The score by which the selector ranks positions.
    #[serde(default)]
    pub score: String,
    /// How the steps are generated: teacher-forced, sampled.
    #[serde(default)]
    pub mode: String,
    /// The text that the model reads.
    #[serde(default)]
    pub text: String,
}

impl Recording {
    /// Reads and checks the JSON text of a header.
    pub(super) fn parse(json: &[u8]) -> Result<Recording> {
        let recording: Recording = object(json)?;
        recording.check()?;
        Ok(recording)
    }

    /// The header of a trace of the first `steps` steps. If these end within the prompt, all are warm.
    fn header(&self, steps: u32) -> Header {
        let warm_steps = self.decode_start.saturating_sub(self.first_position).min(steps);
        let end = self.first_position.saturating_add(steps);
        Header {
            format: FORMAT.to_owned(),
            label: self.label.clone(),
            model: self.model.clone(),
            arch: self.arch.clone(),
            layers: self.layers,
            layer_ids: match self.layer_ids.is_empty() && self.layers <= super::LAYERS_MAX {
                true => (0..self.layers).collect(),
                false => self.layer_ids.clone(),
            },
            k: self.k,
            steps,
            warm_steps,
            first_position: self.first_position,
            decode_start: self.first_position.saturating_add(warm_steps),
            context: self.context.unwrap_or(end),
            score: self.score.clone(),
            mode: self.mode.clone(),
            text: self.text.clone(),
            unfinished: None,
        }
    }

    /// Checks that a recording can begin with this description.
    fn check(&self) -> Result<()> {
        let bad = |place| Err(Error::new(Kind::BadFormat, "read trace").at(place));
        self.header(1).check(u64::MAX)?;
        if self.decode_start < self.first_position || self.decode_start > self.end() {
            return bad("header: decode_start is before first_position, or beyond the context");
        }
        if self.shares.is_empty() {
            return Ok(());
        }
        if self.shares.len() != self.layers as usize {
            return bad("header: shares and layers disagree");
        }
        let own = |place: u32| self.shares.get(place as usize) == Some(&place);
        match (0_u32..).zip(&self.shares).all(|(layer, from)| *from <= layer && own(*from)) {
            true => Ok(()),
            false => bad("header: a layer shares the sets of a later layer, or of one without sets"),
        }
    }

    /// The layer whose sets `layer` uses.
    fn source(&self, layer: u32) -> u32 {
        self.shares.get(layer as usize).copied().unwrap_or(layer)
    }

    /// Layers with sets of their own.
    fn own_layers(&self) -> u32 {
        (0..self.layers).filter(|layer| self.source(*layer) == *layer).count() as u32
    }

    /// The position from which on nothing is recorded.
    fn end(&self) -> u32 {
        self.context.unwrap_or(super::CONTEXT_MAX)
    }
}

/// When a group is closed, which limits the loss in a crash, and the memory held until then. Created by
/// [`Frames::default`] and set field by field, because fields may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frames {
    /// The most steps of a group; at least 1.
    pub steps: u32,
    /// The unpacked size in bytes at which a step closes the group; at least 1, at most
    /// [`Frames::BYTES_MAX`].
    pub bytes: u32,
}

impl Frames {
    /// The largest [`Frames::bytes`]: 256 MiB.
    pub const BYTES_MAX: u32 = 1 << 28;
}

impl Default for Frames {
    /// 64 steps or 256 KiB.
    fn default() -> Self {
        Frames { steps: 64, bytes: 1 << 18 }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
