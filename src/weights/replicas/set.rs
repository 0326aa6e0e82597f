//! The segments of replicas, and from which memory a rank reads which pages.
//!
//! A replica is cut as its layer is: one *segment* for each rank that owns some of its pages, with memory of its own.
//! So a segment lies in one part, and its digest can be compared with its owner's.

use std::ops::Range;

use crate::device::Mapped;
use crate::weights::layer::Placed;
use crate::weights::plan::{LayerPlan, Plan};

/// The pages of a replica that one rank owns. In order of layers, and of pages in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::weights) struct Segment {
    pub ordinal: usize,
    /// Its place among the chosen tensors of the layer.
    pub tensor: usize,
    pub owner: u32,
    pub holder: u32,
}

/// A segment and its memory: this rank's own if it is the holder, else imported.
#[derive(Clone, Copy, Debug)]
pub(in crate::weights) struct Held {
    pub segment: Segment,
    pub memory: Mapped,
}

/// Pages of a part, and the rank whose memory they are read from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub from: u32,
    pub memory: Mapped,
}

/// The whole pages inside a tensor.
fn inside(tensor: &Placed, grain: u64) -> Range<u64> {
    tensor.offset.div_ceil(grain)..(tensor.offset + tensor.bytes) / grain
}

impl Segment {
    /// Its layer's plan, and its pages in the window.
    pub fn of(self, plan: &Plan) -> Option<(&LayerPlan, Range<u64>)> {
        let layer = plan.layers().get(self.ordinal)?;
        let pages = inside(layer.layout.tensors().get(self.tensor)?, plan.grain());
        let part = layer.cut.part(self.owner);
        Some((layer, pages.start.max(part.start)..pages.end.min(part.end)))
    }

    pub fn bytes(self, plan: &Plan) -> u64 {
        self.of(plan).map_or(0, |(_, pages)| pages.end.saturating_sub(pages.start) * plan.grain())
    }

    /// Its first byte in its owner's part.
    pub fn offset(self, plan: &Plan) -> u64 {
        self.of(plan)
            .map_or(0, |(layer, pages)| (pages.start - layer.cut.part(self.owner).start) * plan.grain())
    }

    /// Whether it is of this part.
    pub fn is_of(self, ordinal: usize, owner: u32) -> bool {
        (self.ordinal, self.owner) == (ordinal, owner)
    }
}

/// The segments of a layer, of all in order.
pub(super) fn of_layer(held: &[Held], ordinal: usize) -> &[Held] {
    let start = held.partition_point(|one| one.segment.ordinal < ordinal);
    let end = held.partition_point(|one| one.segment.ordinal <= ordinal);
    held.get(start..end).unwrap_or_default()
}

/// How a rank reads the part of another one, whose memory is `own`: its pages in order. `held` are all segments that
/// there are, in order; `lost` are ranks that are not read where another one has the pages.
///
/// A rank reads its own replica. The others take owner and holders in turn, by their places among the ranks that have
/// no copy, beginning with another one in each layer. So no two sources of a range differ by more than one reader.
pub(super) fn reads(
    plan: &Plan,
    (ordinal, owner): (usize, u32),
    own: Mapped,
    held: &[Held],
    lost: &[u32],
) -> Vec<Read> {
    let (mut all, mut at) = (Vec::new(), 0);
    let owned = |from: u64, to: u64| {
        let memory = Mapped { offset: own.offset + from, bytes: to.saturating_sub(from), ..own };
        Read { from: owner, memory }
    };
    let of_part: Vec<Held> =
        of_layer(held, ordinal).iter().filter(|one| one.segment.is_of(ordinal, owner)).copied().collect();
    for copies in of_part.chunk_by(|one, next| one.segment.tensor == next.segment.tensor) {
        let Some(first) = copies.first() else { continue };
        let (start, bytes) = (first.segment.offset(plan), first.memory.bytes);
        let mut sources = vec![owned(start, start + bytes)];
        sources.extend(copies.iter().map(|one| Read { from: one.segment.holder, memory: one.memory }));
        all.push(owned(at, start));
        all.extend(source(&sources, plan.group().rank, ordinal, lost));
        at = start + bytes;
    }
    all.push(owned(at, own.bytes));
    all.retain(|read| read.memory.bytes > 0);
    all
}

/// The one of these that a rank reads, the first of which is the owner.
fn source(sources: &[Read], reader: u32, ordinal: usize, lost: &[u32]) -> Option<Read> {
    if let Some(own) = sources.iter().find(|source| source.from == reader) {
        return Some(*own);
    }
    let living: Vec<&Read> = sources.iter().filter(|source| !lost.contains(&source.from)).collect();
    let before = (0..reader).filter(|rank| sources.iter().all(|source| source.from != *rank)).count();
    let turn = (before + ordinal).checked_rem(living.len());
    // If all have ended, it goes on reading the owner, and says so.
    turn.and_then(|turn| living.get(turn).copied()).or(sources.first()).copied()
}

/// Bytes of a rank's own replicas.
pub(in crate::weights) fn bytes_of(held: &[Held], rank: u32) -> u64 {
    held.iter().filter(|one| one.segment.holder == rank).map(|one| one.memory.bytes).sum()
}
