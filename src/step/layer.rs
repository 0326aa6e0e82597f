//! One layer of a step: which operations, on which streams. Enqueues only.

use crate::device::{Answer, Device, Part, Parts, PoolOp, Pools, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::residency::Rows;
use crate::step::{Enqueued, Step};

/// Which part of a step's layer a call works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerCall {
    /// The layer.
    pub layer: Layer,
    /// The first batch row, and how many; `None` for the whole step. A half of DBA is a range.
    pub batch_rows: Option<(u32, u32)>,
    /// A draft layer's pass: its one query row. `None` for all query rows of the step.
    pub pass: Option<u32>,
}

impl LayerCall {
    /// All rows of the step in `layer`.
    pub const fn whole(layer: Layer) -> Self {
        LayerCall { layer, batch_rows: None, pass: None }
    }

    /// Pass `pass` of a draft layer, all batch rows.
    pub const fn pass(layer: Layer, pass: u32) -> Self {
        LayerCall { layer, batch_rows: None, pass: Some(pass) }
    }

    fn part(&self, step: &Step) -> Result<Part> {
        let (first, count) = self.batch_rows.unwrap_or((0, step.rows));
        let rows = match self.pass {
            None => Rows { first: 0, count: step.query_rows },
            Some(pass) => Rows { first: pass, count: 1 },
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
        Ok(Part { micro_batch: step.micro_batch, layer: self.layer, first, count, rows })
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
    pub parts: Option<Parts>,
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
        let part = call.part(self.step)?;
        let answer = Answer { slots: buffers.slots, parts: buffers.parts };
        let selection = buffers.selection;
        self.device.enqueue(self.pools, stream, PoolOp::Resolve { part, selection, answer })?;
        self.enqueued.resolved(&part, self.step.rows);
        Ok(())
    }

    /// G: the rows that the last resolve of this part missed, for one pass of attention.
    pub(crate) fn gather(&self, call: LayerCall, pass: u32, stream: Stream) -> Result<()> {
        let part = call.part(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Gather { part, pass })?;
        self.enqueued.gathered(&part, pass, self.step.rows);
        Ok(())
    }

    /// S: the step's new rows, once the engine has written them to their landing slots.
    pub(crate) fn scatter(&self, call: LayerCall, stream: Stream) -> Result<()> {
        let part = call.part(self.step)?;
        self.device.enqueue(self.pools, stream, PoolOp::Scatter(part))?;
        self.enqueued.scattered(&part, self.step.rows);
        Ok(())
    }
}
