//! The operations of a step on a cache's pools, as data.
//!
//! An engine's call becomes one [`PoolOp`], and [`Device::enqueue`](crate::device::Device::enqueue) takes it. Every
//! device has one `match` over it: the host and CUDA devices run the operation, the clock device prices it, and the
//! watching device lists the memory that it touches. `device/checks.rs` checks an operation when it is enqueued, for
//! all devices. A new operation is therefore one variant here and one arm in each `match`.
//!
//! An operation is a few words long and `Copy`. A join, a truncation and a resize borrow their lists (pages, slot
//! blocks, budgets). A device that runs them later keeps a copy for each lane in a [`Staged`], so the caller brings no
//! new lists for a lane until the previous such operation has run.

use crate::device::Slice;
use crate::error::Result;
use crate::fallible::vector;
use crate::geometry::SLOT_BLOCK;
use crate::ids::{Lane, Layer, MicroBatch};
use crate::residency::QueryRange;

/// An operation on a cache's pools. It runs in its stream's order.
#[derive(Clone, Copy, Debug)]
pub enum PoolOp<'a> {
    /// Assigns a lane to a sequence.
    Join(Join<'a>),
    /// Accepts landed rows, then replaces a lane's page table and shortens its sequence to a length: rows beyond it
    /// leave their slots.
    Truncate(Truncate<'a>),
    /// Changes a lane's budgets, layer by layer. A smaller budget keeps the newest rows of the rule's order, and moves
    /// those of them whose slots go; a larger one adds empty slots. It copies nothing over the link. A stream that is
    /// being captured rejects it ([`Kind::InvalidState`](crate::Kind::InvalidState)).
    Resize(Resize<'a>),
    /// Empties a lane.
    Leave(Lane),
    /// Decides which rows of a lane are resident before its first step, in every layer or in those of one index group:
    /// first all rows, if that is asked for and they fit, then the rows of the given selections (top-k indices), step
    /// by step. It moves no bytes; [`PoolOp::WarmGather`] gathers them. It is a hint: a position at or beyond the
    /// length loads nothing. A stream that is being captured rejects it ([`Kind::InvalidState`]).
    ///
    /// [`Kind::InvalidState`]: crate::Kind::InvalidState
    Warm(Warm),
    /// Writes the positions of a lane's newest rows: what a later [`PoolOp::Warm`] takes as one step's selection to
    /// make these rows resident again. It changes nothing in the lane. A stream that is being captured rejects it
    /// ([`Kind::InvalidState`]).
    ///
    /// [`Kind::InvalidState`]: crate::Kind::InvalidState
    Newest(Newest),
    /// Gathers the rows that a warm-up made resident, for a range of the lane's slots.
    WarmGather(WarmGather),
    /// Begins a step: copies the step descriptor to the micro-batch's memory on the device, then commits, in every
    /// layer, the landed rows that the previous steps of these lanes left. If it is rejected as out of range, nothing
    /// was enqueued; after any other error the copy may have been enqueued.
    Begin(Begin),
    /// Translates a selection (top-k indices) into slots, and writes the list of fetches. It decides for all layers of
    /// an index group; a layer that is not its group's first rejects it.
    Resolve {
        /// The batch rows and the layer.
        range: StepRange,
        /// `[count][rows.count][k]` i32 positions, -1 for none.
        selection: Slice,
        /// The buffers that it fills.
        output: ResolveOutput,
    },
    /// Fetches the missed rows that attention wave `wave` reads. The last resolve must have been of the same layer (or
    /// its index group's first), query rows and step, and the earlier waves must have been gathered. Otherwise the step
    /// fails, rather than copying rows into slots that were meant for others. A wave without missed rows fetches
    /// nothing.
    Gather {
        /// The batch rows and the layer.
        range: StepRange,
        /// The attention wave, from 0.
        wave: u32,
    },
    /// Stores the step's new rows from their landing slots in the total pool.
    Scatter(StepRange),
    /// Ends a step: writes its counters, lengths and sticky error word to `slot` as a
    /// [`descriptor::Report`](crate::device::descriptor::Report). Until the next step begins, the micro-batch has no
    /// rows and its operations do nothing.
    Report {
        /// The micro-batch.
        micro_batch: MicroBatch,
        /// The pinned memory of the report.
        slot: Slice,
    },
}

impl Warm {
    /// The index groups that it decides about, of `groups` in all: the first and their number.
    pub(crate) fn range(&self, groups: usize) -> (usize, usize) {
        self.group.map_or((0, groups), |group| (group as usize, 1))
    }
}

impl PoolOp<'_> {
    /// The operation's name in errors and timelines.
    pub const fn name(&self) -> &'static str {
        match self {
            PoolOp::Join(_) => "join",
            PoolOp::Truncate(_) => "truncate",
            PoolOp::Resize(_) => "resize",
            PoolOp::Leave(_) => "leave",
            PoolOp::Warm(_) => "warm",
            PoolOp::Newest(_) => "newest",
            PoolOp::WarmGather(_) => "warm gather",
            PoolOp::Begin(_) => "begin",
            PoolOp::Resolve { .. } => "resolve",
            PoolOp::Gather { .. } => "gather",
            PoolOp::Scatter(_) => "scatter",
            PoolOp::Report { .. } => "report",
        }
    }

    /// The lane whose lists it borrows: of a join, a truncation or a resize.
    pub(crate) const fn staged_lane(&self) -> Option<Lane> {
        match self {
            PoolOp::Join(Join { lane, .. })
            | PoolOp::Truncate(Truncate { lane, .. })
            | PoolOp::Resize(Resize { lane, .. }) => Some(*lane),
            _ => None,
        }
    }

    /// The batch rows and layer that it works on, for operations on a layer.
    pub const fn range(&self) -> Option<&StepRange> {
        match self {
            PoolOp::Resolve { range, .. } | PoolOp::Gather { range, .. } | PoolOp::Scatter(range) => {
                Some(range)
            }
            _ => None,
        }
    }

    /// The operation without its borrowed lists, which a [`Staged`] has copied.
    pub(super) fn detached(self) -> PoolOp<'static> {
        match self {
            PoolOp::Join(Join { lane, length, .. }) => {
                PoolOp::Join(Join { lane, length, pages: &[], blocks: &[], budgets: &[] })
            }
            PoolOp::Truncate(Truncate { lane, settle, length, .. }) => {
                PoolOp::Truncate(Truncate { lane, settle, length, pages: &[] })
            }
            PoolOp::Resize(Resize { lane, .. }) => PoolOp::Resize(Resize { lane, blocks: &[], budgets: &[] }),
            PoolOp::Leave(lane) => PoolOp::Leave(lane),
            PoolOp::Warm(warm) => PoolOp::Warm(warm),
            PoolOp::Newest(newest) => PoolOp::Newest(newest),
            PoolOp::WarmGather(range) => PoolOp::WarmGather(range),
            PoolOp::Begin(begin) => PoolOp::Begin(begin),
            PoolOp::Resolve { range, selection, output } => PoolOp::Resolve { range, selection, output },
            PoolOp::Gather { range, wave } => PoolOp::Gather { range, wave },
            PoolOp::Scatter(range) => PoolOp::Scatter(range),
            PoolOp::Report { micro_batch, slot } => PoolOp::Report { micro_batch, slot },
        }
    }
}

/// A sequence's entry into a lane: see [`PoolOp::Join`].
#[derive(Clone, Copy, Debug)]
pub struct Join<'a> {
    /// The lane.
    pub lane: Lane,
    /// The number of committed tokens.
    pub length: u32,
    /// Host pages, in the order of the sequence.
    pub pages: &'a [u32],
    /// For each index group, the slot blocks, numbered from the first budget block.
    pub blocks: &'a [Vec<u32>],
    /// For each index group, the budget in slots.
    pub budgets: &'a [u32],
}

/// The part of a step that an operation works on: batch rows `first..first + count` of a micro-batch, in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRange {
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The layer.
    pub layer: Layer,
    /// The first batch row.
    pub first: u32,
    /// The number of batch rows. Rows beyond the step's batch do nothing, so a captured graph can serve a smaller
    /// batch.
    pub count: u32,
    /// The query rows of each batch row: all of the step's, or those of one draft pass.
    pub rows: QueryRange,
}

/// The buffers that a resolve fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolveOutput {
    /// `[count][rows.count][k]` i32: each selected position's slot in the layer's slab, -1 for none. Where attention
    /// takes several waves, rows of different waves may have the same scratch slot, so attention needs `split_indices`
    /// then.
    pub slots: Slice,
    /// The same slots as index lists for split attention.
    pub split_indices: Option<SplitIndices>,
}

/// The index lists of split attention, sized for all batch rows of a step. A call for some batch rows fills only their
/// parts. A buffer may be larger than needed; its beginning is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitIndices {
    /// `[1 + waves][batch][rows.count][k]` i32. Index list 0 holds the slots of rows that were resident or are new in
    /// this step; index list `1 + j` holds the slots of the rows that wave `j` fetches. Each query row's valid slots
    /// come first, in the order of the selection; the rest is -1.
    pub lists: Slice,
    /// `[1 + waves][batch][rows.count]` u32: the number of valid slots.
    pub counts: Slice,
    /// Batch rows of each index list.
    pub batch: u32,
}

/// The beginning of a step: see [`PoolOp::Begin`].
#[derive(Clone, Copy, Debug)]
pub struct Begin {
    /// The micro-batch.
    pub micro_batch: MicroBatch,
    /// The pinned step descriptor, see [`descriptor::step`](crate::device::descriptor::step).
    pub descriptor: Slice,
    /// Accepted counts on the device, one u32 for each row of the largest batch. The device reads a row's count where
    /// its entry is [`ACCEPTED_ON_DEVICE`](crate::device::descriptor::ACCEPTED_ON_DEVICE).
    pub accepted: Option<Slice>,
}

/// The truncation of a lane's sequence: see [`PoolOp::Truncate`].
#[derive(Clone, Copy, Debug)]
pub struct Truncate<'a> {
    /// The lane.
    pub lane: Lane,
    /// The number of landed rows to accept first.
    pub settle: u32,
    /// The sequence's length afterwards, in tokens.
    pub length: u32,
    /// Host pages, in the order of the sequence.
    pub pages: &'a [u32],
}

/// New budgets of a lane: see [`PoolOp::Resize`].
#[derive(Clone, Copy, Debug)]
pub struct Resize<'a> {
    /// The lane.
    pub lane: Lane,
    /// For each index group, the slot blocks afterwards, numbered from the first budget block. The blocks that the lane
    /// keeps come first, in their present order: a smaller budget gives up the last blocks, a larger one appends
    /// blocks. The operation does not read blocks beyond those that the budget needs.
    pub blocks: &'a [Vec<u32>],
    /// For each index group, the budget afterwards, in slots.
    pub budgets: &'a [u32],
}

impl Resize<'_> {
    /// The blocks of a group that its new budget needs.
    pub(crate) fn needed(&self) -> impl Iterator<Item = &[u32]> {
        self.blocks.iter().zip(self.budgets).map(|(blocks, budget)| {
            let needed = budget.div_ceil(SLOT_BLOCK) as usize;
            blocks.get(..needed).unwrap_or(blocks)
        })
    }
}

/// A lane's warm-up: see [`PoolOp::Warm`].
#[derive(Clone, Copy, Debug)]
pub struct Warm {
    /// The lane.
    pub lane: Lane,
    /// The index group whose rows it decides about; all groups if none is named.
    pub group: Option<u32>,
    /// Loads every row first, if all of them fit.
    pub whole: bool,
    /// Selections to replay: `[index groups][steps][k]` i32 positions, or `[steps][k]` for one group.
    pub selections: Option<Slice>,
    /// The number of steps in `selections`.
    pub steps: u32,
}

/// The newest rows of a lane: see [`PoolOp::Newest`].
#[derive(Clone, Copy, Debug)]
pub struct Newest {
    /// The lane.
    pub lane: Lane,
    /// `[index groups][k]` i32: of each group the positions of the newest rows that have a budget slot, by the rule's
    /// order, at most k. They are in the order of the lane's slots, the same on every device. The rest is -1; so is
    /// everything for a lane without a sequence. Landed rows are not among them.
    pub positions: Slice,
}

/// A range of slots that a warm-up gathers: see [`PoolOp::WarmGather`]. The slots of all layers have one numbering:
/// layer by layer, each layer's budget slots in the lane's order.
#[derive(Clone, Copy, Debug)]
pub struct WarmGather {
    /// The lane.
    pub lane: Lane,
    /// The first slot.
    pub first: u64,
    /// The number of slots. Empty slots cost nothing.
    pub count: u64,
}

/// A lane's copy of the lists that its last join, truncation or resize borrowed, until the operation has run.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) pages: Vec<u32>,
    /// For each index group, the slot blocks.
    pub(super) blocks: Vec<Vec<u32>>,
    pub(super) budgets: Vec<u32>,
}

impl Staged {
    /// An empty copy with room for `pages` pages, and for a budget and `blocks` slot blocks of each index group.
    pub(super) fn new(groups: usize, blocks: usize, pages: usize, name: &'static str) -> Result<Staged> {
        let mut staged = Staged {
            pages: vector(pages, name, "pages of a lane")?,
            blocks: vector(groups, name, "blocks of a lane")?,
            budgets: vector(groups, name, "budgets of a lane")?,
        };
        for _ in 0..groups {
            staged.blocks.push(vector(blocks, name, "blocks of a lane")?);
        }
        Ok(staged)
    }

    /// Copies the lists that a checked operation borrows.
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
            PoolOp::Truncate(truncate) => keep(&mut self.pages, truncate.pages),
            PoolOp::Resize(resize) => {
                keep(&mut self.budgets, resize.budgets);
                self.blocks.iter_mut().zip(resize.needed()).for_each(|(kept, blocks)| keep(kept, blocks));
            }
            _ => {}
        }
    }

    /// The operation with the copied lists in place of the borrowed ones.
    pub(super) fn attached<'a>(&'a self, op: PoolOp<'a>) -> PoolOp<'a> {
        let Staged { pages, blocks, budgets } = self;
        match op {
            PoolOp::Join(join) => PoolOp::Join(Join { pages, blocks, budgets, ..join }),
            PoolOp::Truncate(truncate) => PoolOp::Truncate(Truncate { pages, ..truncate }),
            PoolOp::Resize(resize) => PoolOp::Resize(Resize { blocks, budgets, ..resize }),
            other => other,
        }
    }
}
