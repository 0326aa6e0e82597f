//! A step's layers, enqueued in an order that hides the gather: see [`crate::overlap`].
//!
//! **Abandoned steps.** A step counts as abandoned while its layers are being enqueued. Only a call that succeeds
//! removes that mark, so a callback that fails or panics leaves an abandoned step. The operations that were enqueued
//! still run, but the step's tokens must be discarded. [`Cache::finish`] orders the step's end after all of these
//! operations and marks the step's sequences as failed. No other step can use them meanwhile, because they belong to
//! this micro-batch. The engine truncates or closes them. Retiring the step returns an error.

use crate::cache::Cache;
use crate::device::{StepRange, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Engine, Overlap, OverlapStreams, Run, enqueue_layer, enqueue_step};
use crate::residency::QueryRange;
use crate::step::{Buffers, Step};

/// The streams and buffers of a step's layers.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    /// The micro-batch's streams, the same for all layers of a step. The step must have been prepared on `compute`.
    pub streams: OverlapStreams,
    /// The number of batch rows to enqueue, at least the step's. A captured batch may have more; its other rows are
    /// inert: they select nothing and get no slots.
    pub batch: u32,
    /// The first batch row of DBA's second half.
    pub half: u32,
    /// The selection, which the engine's top-k writes, and the slots. The buffers have room for `batch` rows or more;
    /// the layers use their beginning.
    pub buffers: Buffers,
}

impl Cache {
    /// Enqueues one layer of a step, or one draft pass of a draft layer, in the order `overlap`: the engine's work,
    /// through its callbacks, and R, G and S between the callbacks. [`Cache::finish`] orders the step's end after all
    /// of it.
    ///
    /// For an engine that wants the gather hidden and runs its layers one by one, or has draft passes left to enqueue.
    /// If attention may wait for the gather, [`Cache::layer`] is simpler.
    ///
    /// If a callback or the device refuses, so that the layer is not enqueued completely, the step is abandoned. The
    /// engine must still finish and retire it; retiring returns [`Kind::Cancelled`]. Its sequences then need
    /// [`Cache::truncate`] or [`Cache::close`].
    ///
    /// # Errors
    /// Before anything is enqueued: [`Kind::OutOfRange`] for a layer, draft pass, batch or buffers that do not fit the
    /// step; [`Kind::InvalidState`] for a finished or abandoned step, for other streams than the step's earlier
    /// layers had, for a compute stream on which the step was not prepared, and for a layer that another one selects
    /// for, in another order than none, if the step's last resolve was not that one's, by this call, or wrote no index
    /// lists that the order needs; [`Kind::InvalidConfig`] for an
    /// order that needs index lists without them, and for the order ahead in a layer that selects for itself. Later,
    /// with the step abandoned: [`Kind::InvalidConfig`] for a callback that enqueued on another stream, if the device
    /// can see it; [`Kind::OutOfRange`] for streams of another device; the callback's own error.
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
        run.check(&*self.device, layer, overlap)?;
        self.check_led(step, layer, overlap)?;
        if let Some(draft_pass) = draft_pass {
            self.check_draft_passes(step.query_rows, draft_pass.saturating_add(1))?;
            if layer.0 < self.geometry.shape().layers {
                return Err(Error::new(Kind::OutOfRange, "overlap")
                    .at("a draft pass of a layer that is no draft layer")
                    .with("layer", layer.0));
            }
        }
        step.begin_layers(layers.streams);
        enqueue_layer(&*self.device, self.pools, &run, layer, draft_pass, overlap, engine)?;
        let all = QueryRange { first: 0, count: step.query_rows };
        let rows = draft_pass.map_or(all, |draft_pass| QueryRange { first: draft_pass, count: 1 });
        let enqueued = &self.ring.slot(step)?.enqueued;
        enqueued.scheduled(layer.0, rows);
        let members = self.geometry.members(self.geometry.group_of(layer.index()));
        if members.start == layer.index() {
            enqueued.led(Some((layer.0, layers.buffers.split_indices.is_some())));
            // Its resolve is also that of the layers that it selects for.
            for layer in members.skip(1).map(|member| Layer(member as u32)) {
                let range =
                    StepRange { micro_batch: step.micro_batch, layer, first: 0, count: step.rows, rows };
                enqueued.resolved(&range, step.rows);
            }
        }
        step.end_layers();
        Ok(())
    }

    /// Enqueues all layers of the open steps, at most one step of each micro-batch: each layer once, then
    /// `draft_passes` draft passes of the draft layers. In each layer and each draft pass, the steps take turns.
    /// `by_layer` gives the order of every layer, draft layers last. Every query row needs a draft pass in every draft
    /// layer. Draft passes that this call does not enqueue must be enqueued with [`Cache::overlap`] before the step is
    /// finished.
    ///
    /// For an engine that wants the gather hidden and can enqueue all layers at once. With two micro-batches, one
    /// computes while the rows of the other are fetched.
    ///
    /// # Errors
    /// As [`Cache::overlap`]. An error abandons all the steps.
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
            self.check_each(&run, by_layer)?;
            self.check_draft_passes(step.query_rows, draft_passes)?;
            self.runs.push(run);
        }
        for (step, layers) in steps.iter_mut() {
            step.begin_layers(layers.streams);
        }
        let draft_layers = self.geometry.shape().draft_layers;
        enqueue_step(&*self.device, self.pools, &self.runs, by_layer, draft_layers, draft_passes, engine)?;
        if let Some(run) = self.runs.first() {
            engine.end(run.streams.compute)?;
        }
        for (step, _) in steps.iter_mut() {
            self.schedule_layers(step, draft_passes)?;
            step.end_layers();
        }
        Ok(())
    }

    /// Checks that a layer that another one selects for finds what its order needs: the schedule's own event after the
    /// last resolve, and index lists to split attention by.
    fn check_led(&self, step: &Step, layer: Layer, overlap: Overlap) -> Result<()> {
        let first = self.geometry.first_of(layer.index()) as u32;
        if overlap == Overlap::None || first == layer.0 {
            return Ok(());
        }
        let refuse = |place, hint| {
            let error = Error::new(Kind::InvalidState, "overlap").at(place).hint(hint);
            Err(error.with("layer", layer.0).with("selects", first))
        };
        match self.ring.slot(step)?.enqueued.is_led() {
            Some((led, lists)) if led == first => match lists || overlap == Overlap::Ahead {
                true => Ok(()),
                false => refuse(
                    "the layer that selects for this one has written no index lists",
                    "pass the index lists to that layer's call as well",
                ),
            },
            _ => refuse(
                "the schedule has not resolved the layer that selects for this one",
                "call `overlap` for that layer first, or pass the order none",
            ),
        }
    }

    /// Notes that every layer of a step is enqueued, and `draft_passes` draft passes.
    pub(super) fn schedule_layers(&self, step: &Step, draft_passes: u32) -> Result<()> {
        let enqueued = &self.ring.slot(step)?.enqueued;
        let (once, all) = (self.geometry.shape().layers, self.geometry.layers());
        (0..once)
            .for_each(|layer| enqueued.scheduled(layer, QueryRange { first: 0, count: step.query_rows }));
        (once..all).for_each(|layer| enqueued.scheduled(layer, QueryRange { first: 0, count: draft_passes }));
        Ok(())
    }

    /// Abandons an open step. For an engine that fails between layers. The engine must still finish and retire the
    /// step.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidState`] for a finished step.
    pub fn abandon(&mut self, step: &mut Step) -> Result<()> {
        self.check_step(step, Layer(0))?;
        step.abandon();
        Ok(())
    }

    /// Checks each layer's order.
    pub(super) fn check_each(&self, run: &Run, by_layer: &[Overlap]) -> Result<()> {
        let mut layers = (0..).map(Layer).zip(by_layer);
        layers.try_for_each(|(layer, overlap)| run.check(&*self.device, layer, *overlap))
    }

    /// Checks that there is one order for each layer.
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

    /// The data that is the same for all layers of an open step.
    fn run(&self, step: &Step, layer: Layer, layers: &Layers) -> Result<Run> {
        self.check_step(step, layer)?;
        self.check_layers(step, layers)?;
        self.check_prepared("overlap", step, layers)?;
        self.layers_run(step.micro_batch, step.rows, step.query_rows, layers)
    }

    /// Checks that an open step's layers may be enqueued on these streams, for this number of batch rows.
    pub(super) fn check_layers(&self, step: &Step, layers: &Layers) -> Result<()> {
        let refuse = |place, hint| Err(Error::new(Kind::InvalidState, "overlap").at(place).hint(hint));
        if step.is_abandoned() {
            return refuse("the step was abandoned", "finish and retire it");
        }
        if step.work.layers.is_some_and(|streams| streams != layers.streams) {
            let hint = "pass the same streams for all layers of a step";
            return refuse("other streams than the step's earlier layers had", hint);
        }
        self.check_rows(step.rows, layers)
    }

    /// Checks that the compute stream is the one that the step was prepared on, so that the layers run after the
    /// step's begin.
    pub(super) fn check_prepared(&self, operation: &'static str, step: &Step, layers: &Layers) -> Result<()> {
        let prepared = self.ring.slot(step)?.prepared;
        if prepared == layers.streams.compute {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidState, operation)
            .at("the step was prepared on another stream than the compute stream")
            .with("prepared", prepared.0)
            .with("compute", layers.streams.compute.0)
            .hint("prepare a step on the compute stream of its layers"))
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

    /// The data that is the same for all layers, for at least `rows` batch rows with `query_rows` query rows.
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
            geometry: self.geometry.clone(),
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

    /// Orders `stream` after all work that the layers of a step have enqueued.
    pub(super) fn join_layers(&self, step: &Step, stream: Stream) -> Result<()> {
        let schedule = self.schedules[step.micro_batch.index()];
        if let Some(beside) = step.work.beside {
            but_unknown(schedule.fork(&*self.device, beside, stream))?;
        }
        if let Some(prefetches) = self.ring.slot(step)?.prefetches {
            but_unknown(schedule.fork(&*self.device, prefetches, stream))?;
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

/// Ignores the error for a stream of another device: it holds no work to wait for.
fn but_unknown(joined: Result<()>) -> Result<()> {
    joined.or_else(|error| if error.kind() == Kind::OutOfRange { Ok(()) } else { Err(error) })
}
