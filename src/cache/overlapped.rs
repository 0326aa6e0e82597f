//! A step's layers in an order that hides the gather: see [`crate::overlap`].
//!
//! **Abandoned steps.** While layers are enqueued their step counts as abandoned, and only a call that ends
//! well takes that back: a callback that fails or panics leaves a step whose tokens are worth nothing. What was
//! enqueued of it runs. [`Cache::finish`] orders its end behind all of that and fails its sequences, which belong
//! to its micro-batch and so to no other step meanwhile: they are rolled back or closed. Its retirement fails.

use crate::cache::Cache;
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Engine, Overlap, OverlapStreams, Run, enqueue_layer, enqueue_step};
use crate::residency::QueryRange;
use crate::step::{Buffers, Step};

/// Where the layers of a step are enqueued and what they share.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    /// The micro-batch's streams, the same for all layers of a step. `compute` is the one that the step was
    /// prepared on.
    pub streams: OverlapStreams,
    /// Batch rows that are enqueued: at least the step's. More in a captured batch, whose other rows are
    /// inert: they select nothing and are answered with nothing.
    pub batch: u32,
    /// The first batch row of DBA's second half.
    pub half: u32,
    /// The selection, which the engine's top-k writes, and the answer: for `batch` rows or more, of which the
    /// beginning is taken.
    pub buffers: Buffers,
}

impl Cache {
    /// Enqueues one layer of a step, or one pass of a draft layer, in the order `overlap`: the engine's work
    /// by its callbacks, R, G and S between them. [`Cache::finish`] orders the step's end behind them.
    ///
    /// For an engine that wants the gather hidden and goes through its layers by itself, or has passes of a draft layer
    /// left; [`Cache::layer`] is simpler where attention may wait for the gather.
    ///
    /// A layer that was not enqueued whole, because a callback or the device refused, abandons the step: it
    /// is still to be finished and retired, which then fails with [`Kind::Cancelled`], and its sequences need
    /// [`Cache::truncate`] or [`Cache::close`].
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer, draft_pass, batch or buffers that do not fit the step and
    /// [`Kind::InvalidConfig`] for a finished or abandoned step, other streams than its layers had before, a
    /// compute stream that it was not prepared on, or an order that needs index lists without them: nothing has
    /// been enqueued then. Afterwards, and with the step abandoned, [`Kind::InvalidConfig`] for a callback that
    /// enqueued on another stream, where the device sees it; [`Kind::OutOfRange`] for streams that are not the
    /// device's; the callback's own.
    pub fn overlap(
        &mut self,
        step: &mut Step,
        layer: Layer,
        draft_pass: Option<u32>,
        overlap: Overlap,
        layers: &Layers,
        engine: &mut dyn Engine,
    ) -> Result<()> {
        let run = self.run(step, layer, layers)?;
        run.check(&*self.device, overlap)?;
        if let Some(draft_pass) = draft_pass {
            self.check_draft_passes(step.query_rows, draft_pass.saturating_add(1))?;
            if layer.0 < self.geometry.shape().layers {
                return Err(Error::new(Kind::OutOfRange, "overlap")
                    .at("a pass of a layer that is no draft layer")
                    .with("layer", layer.0));
            }
        }
        step.begin_layers(layers.streams);
        enqueue_layer(&*self.device, self.pools, &run, layer, draft_pass, overlap, engine)?;
        let all = QueryRange { first: 0, count: step.query_rows };
        let rows = draft_pass.map_or(all, |draft_pass| QueryRange { first: draft_pass, count: 1 });
        self.ring.slot(step)?.enqueued.scheduled(layer.0, rows);
        step.end_layers();
        Ok(())
    }

    /// Enqueues all layers of the open steps, at most one of each micro-batch: each layer once, then
    /// `draft_passes` passes of the draft layers, the steps in turn. `by_layer` says the order of every layer,
    /// draft layers last. A draft layer has the rows that its passes wrote, and each query row is due there:
    /// passes that are not enqueued here are by [`Cache::overlap`], before the step is finished.
    ///
    /// For an engine that wants the gather hidden and can hand over all layers at once, and for two micro-batches, of
    /// which one computes while the other's rows are fetched.
    ///
    /// # Errors
    /// As [`Cache::overlap`]; all the steps are abandoned then.
    pub fn overlap_steps(
        &mut self,
        steps: &mut [(&mut Step, Layers)],
        by_layer: &[Overlap],
        draft_passes: u32,
        engine: &mut dyn Engine,
    ) -> Result<()> {
        self.check_orders(by_layer)?;
        self.runs.clear();
        for (step, layers) in steps.iter() {
            let run = self.run(step, Layer(0), layers)?;
            by_layer.iter().try_for_each(|overlap| run.check(&*self.device, *overlap))?;
            self.check_draft_passes(step.query_rows, draft_passes)?;
            self.runs.push(run);
        }
        for (step, layers) in steps.iter_mut() {
            step.begin_layers(layers.streams);
        }
        let draft_layers = self.geometry.shape().draft_layers;
        enqueue_step(&*self.device, self.pools, &self.runs, by_layer, draft_layers, draft_passes, engine)?;
        for (step, _) in steps.iter_mut() {
            self.schedule_layers(step, draft_passes)?;
            step.end_layers();
        }
        Ok(())
    }

    /// Notes that every layer of a step is enqueued, and `draft_passes` passes of the draft layers.
    pub(super) fn schedule_layers(&self, step: &Step, draft_passes: u32) -> Result<()> {
        let enqueued = &self.ring.slot(step)?.enqueued;
        let (once, all) = (self.geometry.shape().layers, self.geometry.layers());
        (0..once)
            .for_each(|layer| enqueued.scheduled(layer, QueryRange { first: 0, count: step.query_rows }));
        (once..all).for_each(|layer| enqueued.scheduled(layer, QueryRange { first: 0, count: draft_passes }));
        Ok(())
    }

    /// Gives an open step up, as a layer that could not be enqueued whole does: for an engine that fails between
    /// layers. The step is still to be finished and retired.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidConfig`] for a finished one.
    pub fn abandon(&mut self, step: &mut Step) -> Result<()> {
        self.check_step(step, Layer(0))?;
        step.abandon();
        Ok(())
    }

    /// An order for each layer.
    pub(super) fn check_orders(&self, by_layer: &[Overlap]) -> Result<()> {
        if by_layer.len() == self.geometry.layers() as usize {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidConfig, "overlap")
            .at("orders by layer")
            .with("given", by_layer.len() as u64)
            .with("wanted", self.geometry.layers()))
    }

    pub(super) fn check_draft_passes(&self, query_rows: u32, draft_passes: u32) -> Result<()> {
        if draft_passes <= query_rows {
            return Ok(());
        }
        Err(Error::new(Kind::OutOfRange, "overlap")
            .at("draft passes")
            .with("draft_passes", draft_passes)
            .with("query rows", query_rows))
    }

    /// What the layers of an open step share.
    fn run(&self, step: &Step, layer: Layer, layers: &Layers) -> Result<Run> {
        self.check_step(step, layer)?;
        self.check_layers(step, layers)?;
        self.check_prepared(step, layers)?;
        self.layers_run(step.micro_batch, step.rows, step.query_rows, layers)
    }

    /// Whether an open step's layers may be enqueued on these streams, for so many batch rows.
    pub(super) fn check_layers(&self, step: &Step, layers: &Layers) -> Result<()> {
        let refuse = |place| Err(Error::new(Kind::InvalidState, "overlap").at(place));
        if step.is_abandoned() {
            return refuse("the step was abandoned");
        }
        if step.work.layers.is_some_and(|streams| streams != layers.streams) {
            return refuse("other streams than the step's layers had before");
        }
        self.check_rows(step.rows, layers)
    }

    /// The layers begin on the stream that orders them behind the step's begin.
    pub(super) fn check_prepared(&self, step: &Step, layers: &Layers) -> Result<()> {
        let prepared = self.ring.slot(step)?.prepared;
        if prepared == layers.streams.compute {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidConfig, "overlap")
            .at("another compute stream than the one that the step was prepared on")
            .with("prepared", prepared.0)
            .with("compute", layers.streams.compute.0))
    }

    fn check_rows(&self, rows: u32, layers: &Layers) -> Result<()> {
        if (rows..=self.config.batch).contains(&layers.batch) {
            return Ok(());
        }
        Err(Error::new(Kind::OutOfRange, "overlap")
            .at("batch rows")
            .with("rows", layers.batch)
            .with("least", rows)
            .with("most", self.config.batch))
    }

    /// What layers of `rows` batch rows at least, and so many query rows, share.
    pub(super) fn layers_run(
        &self,
        micro_batch: MicroBatch,
        rows: u32,
        query_rows: u32,
        layers: &Layers,
    ) -> Result<Run> {
        self.check_rows(rows, layers)?;
        let Buffers { selection, slots, split_indices } = layers.buffers;
        Ok(Run {
            moves: !self.config.residency_only,
            schedule: self.schedules[micro_batch.index()],
            micro_batch,
            batch: layers.batch,
            half: layers.half,
            query_rows,
            top_k: self.geometry.shape().top_k,
            waves: self.attention_waves(),
            streams: layers.streams,
            selection,
            slots,
            split_indices,
        })
    }

    /// Orders `stream` behind everything that the layers of a step have enqueued.
    pub(super) fn join_layers(&self, step: &Step, stream: Stream) -> Result<()> {
        let schedule = self.schedules[step.micro_batch.index()];
        if let Some(beside) = step.work.beside {
            but_unknown(schedule.fork(&*self.device, beside, stream))?;
        }
        match step.work.layers {
            None => Ok(()),
            Some(streams) if step.is_abandoned() => {
                but_unknown(schedule.join_all(&*self.device, &streams, stream))
            }
            Some(streams) => schedule.join(&*self.device, &streams, stream),
        }
    }
}

/// A stream that the device does not know has nothing to wait for.
fn but_unknown(joined: Result<()>) -> Result<()> {
    joined.or_else(|error| if error.kind() == Kind::OutOfRange { Ok(()) } else { Err(error) })
}
