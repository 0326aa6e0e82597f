//! One layer of a step: its operations and their streams.
//!
//! | letter | operation | done by |
//! |---|---|---|
//! | R | resolve: maps the selection (top-k indices) to slots, and decides misses and victims | forebay |
//! | G | gather: copies missed rows from the total pool to their slots | forebay |
//! | P | preparation: writes the step's new rows to their landing slots | the engine |
//! | A | attention over the slots | the engine |
//! | S | scatter: copies the new rows from the landing slots to the total pool | forebay |
//!
//! These calls only enqueue. [`crate::overlap`] has the letters of the engine's other work.

use crate::device::{Device, PoolOp, Pools, ResolveOutput, Slice, SplitIndices, StepRange, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::residency::QueryRange;
use crate::step::enqueued::Enqueued;
use crate::step::phase::Step;

/// The layer, batch rows and query rows of a step that a call works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCall {
    /// The layer.
    pub layer: Layer,
    /// The first batch row and the number of batch rows; `None` for all of the step. A half of DBA is such a range.
    pub batch_rows: Option<(u32, u32)>,
    /// The draft pass of a draft layer, which works on one query row. `None` for all query rows of the step.
    pub draft_pass: Option<u32>,
}

impl LayerCall {
    /// All rows of the step in `layer`.
    pub const fn whole(layer: Layer) -> Self {
        LayerCall { layer, batch_rows: None, draft_pass: None }
    }

    /// All batch rows in draft pass `draft_pass` of a draft layer.
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

/// The buffers of a call: it reads the selection and writes the slots. Both are `[batch rows][query rows][k]` i32 for
/// the rows of the call. They must not overlap.
#[derive(Clone, Copy, Debug)]
pub struct Buffers {
    /// Selected token positions, -1 for none.
    pub selection: Slice,
    /// Slots in the layer's slab, -1 for none.
    pub slots: Slice,
    /// The index lists of split attention, for all batch rows of the step: the same slots, divided into index lists.
    /// `None` if attention is not split.
    pub split_indices: Option<SplitIndices>,
}

/// The calls of an open step. Each enqueues one operation of a layer, and records it once the device has accepted it.
#[derive(Debug)]
pub(crate) struct LayerCalls<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) pools: Pools,
    pub(crate) step: &'a Step,
    /// The ring's record of the step's enqueued calls.
    pub(crate) enqueued: &'a Enqueued,
}

impl LayerCalls<'_> {
    /// R: selection to slots, misses and victims, for `members` layers from the call's on.
    pub(crate) fn resolve(
        &self,
        call: LayerCall,
        members: u32,
        stream: Stream,
        buffers: Buffers,
    ) -> Result<()> {
        let range = call.range(self.step)?;
        let output = ResolveOutput { slots: buffers.slots, split_indices: buffers.split_indices };
        let selection = buffers.selection;
        self.device.enqueue(self.pools, stream, PoolOp::Resolve { range, selection, output })?;
        self.enqueued.led(None);
        for layer in (0..members).map(|member| Layer(range.layer.0 + member)) {
            self.enqueued.resolved(&StepRange { layer, ..range }, self.step.rows);
        }
        Ok(())
    }

    /// G: copies the rows that the last resolve of this range missed, for one attention wave.
    pub(crate) fn gather(&self, call: LayerCall, wave: u32, stream: Stream) -> Result<()> {
        let range = call.range(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Gather { range, wave })?;
        self.enqueued.gathered(&range, wave, self.step.rows);
        Ok(())
    }

    /// S: stores the step's new rows, after the engine has written them to their landing slots.
    pub(crate) fn scatter(&self, call: LayerCall, stream: Stream) -> Result<()> {
        let range = call.range(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Scatter(range))?;
        self.enqueued.scattered(&range, self.step.rows);
        Ok(())
    }
}
