//! One layer of a step: which operations, on which streams. Enqueues only.

use crate::device::{Answer, Device, PoolOp, Pools, Slice, SplitIndices, StepRange, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::residency::QueryRange;
use crate::step::{Enqueued, Step};

/// Which part of a step's layer a call works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCall {
    /// The layer.
    pub layer: Layer,
    /// The first batch row, and how many; `None` for the whole step. A half of DBA is a range.
    pub batch_rows: Option<(u32, u32)>,
    /// A draft layer's draft_pass: its one query row. `None` for all query rows of the step.
    pub draft_pass: Option<u32>,
}

impl LayerCall {
    /// All rows of the step in `layer`.
    pub const fn whole(layer: Layer) -> Self {
        LayerCall { layer, batch_rows: None, draft_pass: None }
    }

    /// Pass `draft_pass` of a draft layer, all batch rows.
    pub const fn draft_pass(layer: Layer, draft_pass: u32) -> Self {
        LayerCall { layer, batch_rows: None, draft_pass: Some(draft_pass) }
    }

    fn range(&self, step: &Step) -> Result<StepRange> {
        let (first, count) = self.batch_rows.unwrap_or((0, step.rows));
        let rows = match self.draft_pass {
            None => QueryRange { first: 0, count: step.query_rows },
            Some(draft_pass) => QueryRange { first: draft_pass, count: 1 },
        };
        let fits = first.checked_add(count).is_some_and(|end| end <= step.rows);
        let reach = rows.first.checked_add(rows.count);
        if !fits || reach.is_none_or(|end| end > step.query_rows) {
            return Err(Error::new(Kind::OutOfRange, "layer")
                .at("rows of the step")
                .with("first", first)
                .with("count", count)
                .with("query row", rows.first));
        }
        Ok(StepRange { micro_batch: step.micro_batch, layer: self.layer, first, count, rows })
    }
}

/// Where a call finds the selection and puts the slots: both `[batch rows][query rows][k]` i32 of the
/// rows it works on. They must not overlap.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Selected token positions, -1 for none.
    pub selection: Slice,
    /// Slots in the layer's slab, -1 for none.
    pub slots: Slice,
    /// The slots again, as the index lists of attention in parts, of all rows of the step; nothing where
    /// attention runs in one.
    pub split_indices: Option<SplitIndices>,
}

/// The streams of R and G; they may be the same.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// R.
    pub resolve: Stream,
    /// G.
    pub gather: Stream,
}

/// The streams of one micro-batch. Any of them may be the same: what one stream orders needs no edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlapStreams {
    /// The engine's work.
    pub compute: Stream,
    /// R, where it runs beside P.
    pub resolve: Stream,
    /// G.
    pub gather: Stream,
    /// S.
    pub scatter: Stream,
}

/// The calls of an open step: each enqueues one operation of a layer, and marks it once the device has taken it.
#[derive(Debug)]
pub(crate) struct LayerCalls<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) pools: Pools,
    pub(crate) step: &'a Step,
    /// Where the ring notes what of the step is enqueued.
    pub(crate) enqueued: &'a Enqueued,
}

impl LayerCalls<'_> {
    /// R: selection to slots, misses and victims.
    pub(crate) fn resolve(&self, call: LayerCall, stream: Stream, buffers: Buffers) -> Result<()> {
        let range = call.range(self.step)?;
        let answer = Answer { slots: buffers.slots, split_indices: buffers.split_indices };
        let selection = buffers.selection;
        self.device.enqueue(self.pools, stream, PoolOp::Resolve { range, selection, answer })?;
        self.enqueued.resolved(&range, self.step.rows);
        Ok(())
    }

    /// G: the rows that the last resolve of this part missed, for one draft_pass of attention.
    pub(crate) fn gather(&self, call: LayerCall, wave: u32, stream: Stream) -> Result<()> {
        let range = call.range(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Gather { range, wave })?;
        self.enqueued.gathered(&range, wave, self.step.rows);
        Ok(())
    }

    /// S: the step's new rows, once the engine has written them to their landing slots.
    pub(crate) fn scatter(&self, call: LayerCall, stream: Stream) -> Result<()> {
        let range = call.range(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Scatter(range))?;
        self.enqueued.scattered(&range, self.step.rows);
        Ok(())
    }
}
