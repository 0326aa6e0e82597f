//! The operations of a step on a cache's pools, as data.
//!
//! An engine's call becomes one [`PoolOp`], and [`Device::enqueue`](crate::device::Device::enqueue) takes it. Every
//! device has one `match` over it: the host device and the CUDA device say how it runs, the clock device what it costs,
//! the watching device what it touches. What can be known of it when it is enqueued is checked in one place
//! (`device/checks.rs`). So a new operation is a variant here, and an arm in each of these.
//!
//! An operation is a few words and can be copied. The lists that a join and a truncation bring (pages, slot blocks,
//! budgets) are borrowed: a device that runs an operation later keeps them by lane in a [`Staged`], and the caller
//! leaves a lane alone until what was staged for it has run.

use crate::device::Slice;
use crate::error::Result;
use crate::fallible::{filled, vector};
use crate::ids::{Lane, Layer, MicroBatch};
use crate::residency::QueryRange;

/// An operation on a cache's pools, in a stream's order.
#[derive(Clone, Copy, Debug)]
pub enum PoolOp<'a> {
    /// Gives a lane to a sequence.
    Join(Join<'a>),
    /// Replaces a lane's page table and cuts its residency, after some landed rows were accepted.
    Truncate(Truncate<'a>),
    /// Empties a lane.
    Leave(Lane),
    /// Computes what is resident in every layer of a lane before its first step: all rows if they fit and it is asked
    /// for, then what the selections touched, step by step. Moves nothing. It is a hint: a position at or beyond the
    /// length warms nothing. A stream that is being captured refuses it ([`Kind::InvalidConfig`]).
    ///
    /// [`Kind::InvalidConfig`]: crate::Kind::InvalidConfig
    Warm(Warm),
    /// Gathers the rows that a warm-up made resident, in a stretch of the lane's slots.
    Raise(Raise),
    /// Begins a step: copies its block to the micro-batch's block on the device, then commits, in every layer, what the
    /// previous steps of the block's lanes have landed. Refused as out of range it has enqueued nothing; after any
    /// other refusal the copy may be enqueued.
    Begin(Begin),
    /// Turns a selection into slots, and lists what is missing.
    Resolve {
        /// The rows.
        range: StepRange,
        /// `[count][rows.count][k]` i32 positions, -1 for none.
        selection: Slice,
        /// Where the answer goes.
        answer: Answer,
    },
    /// Fetches what wave `wave` of attention reads of the rows that the last resolve missed, which must have been of
    /// the same layer, query rows and step, and whose earlier waves must have been gathered before: otherwise the step
    /// fails, rather than copy rows into slots that were not meant for them. A wave that a row does not need fetches
    /// nothing.
    Gather {
        /// The rows.
        range: StepRange,
        /// The wave of attention, from 0.
        wave: u32,
    },
    /// Stores the new rows, from their landing slots to the total pool.
    Scatter(StepRange),
    /// Ends a step: writes its counters, lengths and sticky word to `slot`, see
    /// [`descriptor::Report`](crate::device::descriptor::Report). Until the next one begins, operations of the micro-batch find
    /// no rows: all of theirs are inert.
    Report {
        /// The micro-batch.
        micro_batch: MicroBatch,
        /// The pinned slot.
        slot: Slice,
    },
}

impl PoolOp<'_> {
    /// What errors and timelines call it.
    pub const fn name(&self) -> &'static str {
        match self {
            PoolOp::Join(_) => "join",
            PoolOp::Truncate(_) => "truncate",
            PoolOp::Leave(_) => "leave",
            PoolOp::Warm(_) => "warm",
            PoolOp::Raise(_) => "raise",
            PoolOp::Begin(_) => "begin",
            PoolOp::Resolve { .. } => "resolve",
            PoolOp::Gather { .. } => "gather",
            PoolOp::Scatter(_) => "scatter",
            PoolOp::Report { .. } => "report",
        }
    }

    /// The part of a step that it works on.
    pub const fn range(&self) -> Option<&StepRange> {
        match self {
            PoolOp::Resolve { range, .. } | PoolOp::Gather { range, .. } | PoolOp::Scatter(range) => {
                Some(range)
            }
            _ => None,
        }
    }

    /// The same without the lists that it borrows, which [`Staged`] has kept.
    pub(super) fn detached(self) -> PoolOp<'static> {
        match self {
            PoolOp::Join(Join { lane, length, .. }) => {
                PoolOp::Join(Join { lane, length, pages: &[], blocks: &[], budgets: &[] })
            }
            PoolOp::Truncate(Truncate { lane, settle, length, .. }) => {
                PoolOp::Truncate(Truncate { lane, settle, length, pages: &[] })
            }
            PoolOp::Leave(lane) => PoolOp::Leave(lane),
            PoolOp::Warm(warm) => PoolOp::Warm(warm),
            PoolOp::Raise(raise) => PoolOp::Raise(raise),
            PoolOp::Begin(begin) => PoolOp::Begin(begin),
            PoolOp::Resolve { range, selection, answer } => PoolOp::Resolve { range, selection, answer },
            PoolOp::Gather { range, wave } => PoolOp::Gather { range, wave },
            PoolOp::Scatter(range) => PoolOp::Scatter(range),
            PoolOp::Report { micro_batch, slot } => PoolOp::Report { micro_batch, slot },
        }
    }
}

/// How a sequence enters a lane.
#[derive(Clone, Copy, Debug)]
pub struct Join<'a> {
    /// The lane.
    pub lane: Lane,
    /// Committed tokens.
    pub length: u32,
    /// Host pages, in the order of the sequence.
    pub pages: &'a [u32],
    /// For each layer the slot blocks, counted from the first budget block.
    pub blocks: &'a [Vec<u32>],
    /// For each layer the budget in slots.
    pub budgets: &'a [u32],
}

/// Which part of a step an operation works on: batch rows `first..first + count` of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRange {
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The layer.
    pub layer: Layer,
    /// The first batch row.
    pub first: u32,
    /// How many batch rows; rows beyond the real batch are inert.
    pub count: u32,
    /// The query rows of each batch row: all of the step's, or a draft layer's pass.
    pub rows: QueryRange,
}

/// Where a resolve puts its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// `[count][rows.count][k]` i32: each selected position's slot in the layer's slab, -1 for none. Where
    /// attention takes several waves, rows of different waves may share a scratch slot.
    pub slots: Slice,
    /// The same, divided for attention in parts.
    pub split_indices: Option<SplitIndices>,
}

/// The index lists of attention in parts, of all batch rows of a step: a call for some of them fills those.
/// Larger buffers are taken from their beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitIndices {
    /// `[1 + waves][batch][rows.count][k]` i32: in list 0 the slots of what was resident or is born
    /// in this step, in list `1 + j` of what wave `j` fetches. Each row's valid entries come first, in the
    /// order of the selection; the rest is -1.
    pub lists: Slice,
    /// `[1 + waves][batch][rows.count]` u32: how many entries are valid.
    pub counts: Slice,
    /// Batch rows of a list.
    pub batch: u32,
}

/// The beginning of a step: see [`PoolOp::Begin`].
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The pinned step descriptor, see [`descriptor::step`](crate::device::descriptor::step).
    pub block: Slice,
    /// Accepted counts: one u32 a batch row, as many as a batch has, for the rows whose entry leaves the count to the
    /// device.
    pub accepted: Option<Slice>,
}

/// A lane's cut: see [`PoolOp::Truncate`].
#[derive(Clone, Copy, Debug)]
pub struct Truncate<'a> {
    /// The lane.
    pub lane: Lane,
    /// Landed rows to accept first.
    pub settle: u32,
    /// The length afterwards.
    pub length: u32,
    /// Host pages, in the order of the sequence.
    pub pages: &'a [u32],
}

/// A lane's warm-up: see [`PoolOp::Warm`].
#[derive(Clone, Copy, Debug)]
pub struct Warm {
    /// The lane.
    pub lane: Lane,
    /// Bring up every row first, if they fit.
    pub whole: bool,
    /// `[layers][steps][k]` i32 positions.
    pub selections: Option<Slice>,
    /// Steps to replay.
    pub steps: u32,
}

/// A stretch of a warm-up's gather: see [`PoolOp::Raise`]. The slots of all layers are numbered through,
/// layer by layer, each layer's budget slots in the lane's order.
#[derive(Clone, Copy, Debug)]
pub struct Raise {
    /// The lane.
    pub lane: Lane,
    /// The first slot.
    pub first: u64,
    /// How many slots; empty ones cost nothing.
    pub count: u64,
}

/// What a device keeps of a lane's last join or truncation until that has run.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) pages: Vec<u32>,
    /// By layer the slot blocks.
    pub(super) blocks: Vec<Vec<u32>>,
    pub(super) budgets: Vec<u32>,
}

impl Staged {
    /// Nothing is staged; room for so many pages and for a budget of each layer.
    pub(super) fn new(layers: usize, pages: usize, name: &'static str) -> Result<Staged> {
        Ok(Staged {
            pages: vector(pages, name, "pages of a lane")?,
            blocks: filled(layers, Vec::new(), name, "blocks of a lane")?,
            budgets: vector(layers, name, "budgets of a lane")?,
        })
    }

    /// Keeps the lists that an operation borrows, which was checked.
    pub(super) fn take(&mut self, op: &PoolOp<'_>) {
        let keep = |kept: &mut Vec<u32>, list: &[u32]| {
            kept.clear();
            kept.extend_from_slice(list);
        };
        match op {
            PoolOp::Join(join) => {
                keep(&mut self.pages, join.pages);
                keep(&mut self.budgets, join.budgets);
                self.blocks.iter_mut().zip(join.blocks).for_each(|(kept, blocks)| keep(kept, blocks));
            }
            PoolOp::Truncate(cut) => keep(&mut self.pages, cut.pages),
            _ => {}
        }
    }

    /// The operation with the lists that it borrowed.
    pub(super) fn attached<'a>(&'a self, op: PoolOp<'a>) -> PoolOp<'a> {
        let Staged { pages, blocks, budgets } = self;
        match op {
            PoolOp::Join(join) => PoolOp::Join(Join { pages, blocks, budgets, ..join }),
            PoolOp::Truncate(cut) => PoolOp::Truncate(Truncate { pages, ..cut }),
            other => other,
        }
    }
}
