//! Traces that grow while an engine serves: recorded step by step, readable whatever happens to the recorder.
//!
//! A finished trace says how many steps it has before the first of them. A recorder cannot know, so its
//! format, TOPKTRC2, is a chain of pieces, each good by itself:
//!
//! ```text
//! frame     "TOPKTRC2", u32 length of the header, the header (JSON), see [`Recording`]
//! groups    u32 steps before it, u32 its own steps (at least 1), then their sets as in TOPKTRC1
//! end       u32 all steps, u32 0
//! ```
//!
//! The first piece is a zstd frame, and so is every group and the end, each with a checksum and behind a
//! *mark*: a skippable frame of 16 bytes that tells the next frame's length. Whatever unpacks zstd unpacks
//! the whole. A set is the difference from the set of the step before, also across groups.
//!
//! **What a crash costs.** A group goes to the file in one append when it is full ([`Frames`]) or flushed. A
//! file that ends anywhere is read up to its last whole group, and [`Header::unfinished`](super::Header)
//! counts the bytes behind it. The marks make a cut certain: a length is written twice, so damage cannot
//! pass for a longer frame that swallows its followers. Damage, of a mark or of a frame, is left off only
//! where no mark follows it; with one behind it, it is an error. So is a frame that is as it was written (its
//! checksum is right) and contradicts what stands before it, wherever it stands.
//!
//! **What it costs to record.** Memory is taken at creation: two steps' sets, one group's bytes packed and
//! not, one bit for every position there can be (twice); only the compressor takes its tables with the first
//! groups. A step costs some passes over k numbers and the context's bits in each layer, and writes nothing
//! until a group is full.
//!
//! **What it does not do.** It records one sequence a file, and accepted positions only: selections of drafts
//! are recorded once the draft is accepted, and dropped otherwise. A batch, `[batch][k]` a layer, is taken apart
//! by the engine: each sequence's rows, layer behind layer, go to its own writer. A full file is not continued
//! by itself: the next one begins with warm steps of its own. Requests are recorded by
//! [`RequestWriter`](super::requests::RequestWriter).

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

/// How a mark begins: the magic of a skippable frame, and its length, 8.
const MARK: [u8; 8] = [0x5A, 0x2A, 0x4D, 0x18, 8, 0, 0, 0];

/// Bytes of a mark.
const MARK_BYTES: usize = 16;

/// The mark before a frame of `length` bytes: the length, and the same with every bit turned.
fn mark(length: u32) -> [u8; MARK_BYTES] {
    let mut mark = [0; MARK_BYTES];
    let bytes = MARK.into_iter().chain(length.to_le_bytes()).chain((!length).to_le_bytes());
    mark.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    mark
}

/// What a recording says about itself at its beginning. The numbers are checked, the texts are shown and
/// nothing else. Made by [`Recording::default`], field by field: more may come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recording {
    /// Recorded layers, 1 to [`LAYERS_MAX`](super::LAYERS_MAX).
    pub layers: u32,
    /// The model's own numbers of the recorded layers, ascending; 0, 1, 2... when empty.
    #[serde(default)]
    pub layer_ids: Vec<u32>,
    /// For each layer the place (from 0) of the layer whose sets it shares, its own where it has sets; when
    /// empty, every layer has its own. A set stands before the layers that share it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<u32>,
    /// Positions that one query selects, 1 to [`K_MAX`](super::K_MAX); fewer while the context is shorter.
    pub k: u32,
    /// Position of the query of the first recorded step.
    pub first_position: u32,
    /// Position of the first decode step; the steps before it are warm ones of the prompt.
    pub decode_start: u32,
    /// The longest context in tokens; what was recorded, where nothing is said.
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
    /// What the selector ranks positions by.
    #[serde(default)]
    pub score: String,
    /// How the steps come about: teacher-forced, sampled.
    #[serde(default)]
    pub mode: String,
    /// Which text the model reads.
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

    /// The header of a trace of the first `steps` steps. Where that is less than the prompt's, all are warm.
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

    /// Whether a recording can begin like this.
    fn check(&self) -> Result<()> {
        let bad = |place| Err(Error::new(Kind::BadFormat, "read trace").at(place));
        self.header(1).check(u64::MAX)?;
        if self.decode_start < self.first_position || self.decode_start > self.end() {
            return bad("header: decode_start lies before first_position, or behind the context");
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
            false => bad("header: a layer shares the sets of one that has none, or stands behind it"),
        }
    }

    /// The layer whose sets `layer` has.
    fn source(&self, layer: u32) -> u32 {
        self.shares.get(layer as usize).copied().unwrap_or(layer)
    }

    /// Layers with sets of their own.
    fn own_layers(&self) -> u32 {
        (0..self.layers).filter(|layer| self.source(*layer) == *layer).count() as u32
    }

    /// Positions from which on nothing is recorded.
    fn end(&self) -> u32 {
        self.context.unwrap_or(super::CONTEXT_MAX)
    }
}

/// When a group is closed: what a crash can cost, and what is held in memory until then. Made by
/// [`Frames::default`], field by field: more may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Frames {
    /// Steps of a group at most; at least 1.
    pub steps: u32,
    /// A group is closed by the step that brings it to so many bytes, unpacked; at least 1, at most
    /// [`Frames::BYTES_MAX`].
    pub bytes: u32,
}

impl Frames {
    /// The most that [`Frames::bytes`] may say: 256 MiB.
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
