//! A step's layers in an order that hides the gather: see [`crate::overlap`].

use crate::cache::Cache;
use crate::cache::sequence::State;
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::overlap::{Engine, Overlap, OverlapStreams, Run, enqueue_step};
use crate::step::{Buffers, Step};

/// Where the layers of a step are enqueued and what they share.
#[derive(Clone, Copy, Debug)]
pub struct Layers {
    /// The micro-batch's streams. `compute` is the one that the step was prepared on, and is to be finished
    /// on.
    pub streams: OverlapStreams,
    /// The first batch row of DBA's second half.
    pub half: u32,
    /// The selection, which the engine's top-k writes, and the answer: for all rows of the step, or more.
    pub buffers: Buffers,
}

impl Cache {
    /// Enqueues one layer of a step, or one pass of a draft layer, in the order `overlap`: the engine's work
    /// by its callbacks, R, G and S between them. [`Cache::overlap_join`] comes before [`Cache::finish`].
    ///
    /// A layer that was not enqueued whole, because a callback or the device refused, abandons the step:
    /// its sequences need [`Cache::roll_back`] or [`Cache::close`], the step is to be finished, and its
    /// retirement fails.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer or buffers that do not fit the step; [`Kind::InvalidConfig`] for a
    /// finished or abandoned step, an order that needs index lists without them, or a callback that
    /// enqueued on another stream, where the device sees it; the callback's own.
    pub fn overlap(
        &mut self,
        step: &mut Step,
        (layer, pass): (Layer, Option<u32>),
        overlap: Overlap,
        layers: &Layers,
        engine: &mut dyn Engine,
    ) -> Result<()> {
        self.check_open(step, layer)?;
        let run = self.run(step, layers);
        run.check(overlap)?;
        let schedule = self.schedules[step.micro_batch.index()];
        let done = schedule.layer(&*self.device, self.pools, &run, (layer, pass), overlap, engine);
        done.inspect_err(|_| self.abandon(step, &run))
    }

    /// Orders the compute stream behind all that the layers of a step have enqueued.
    ///
    /// # Errors
    /// As [`Cache::overlap`].
    pub fn overlap_join(&mut self, step: &Step, layers: &Layers) -> Result<()> {
        self.check_step(step, Layer(0))?;
        let schedule = self.schedules[step.micro_batch.index()];
        schedule.join(&*self.device, &self.run(step, layers))
    }

    /// Enqueues all layers of the open steps, at most one of each micro-batch: each layer once, then
    /// `draft_passes` passes of the draft layers, the steps in turn; then joins them. `by_layer` says the
    /// order of every layer, draft layers last. A draft layer has the rows that its passes wrote: a query
    /// row without its pass is not to be accepted, unless nothing will select it there.
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
        if by_layer.len() != self.geometry.layers() as usize {
            return Err(Error::new(Kind::InvalidConfig, "overlap")
                .at("orders by layer")
                .with("given", by_layer.len() as u64)
                .with("wanted", self.geometry.layers()));
        }
        for (step, layers) in steps.iter() {
            self.check_open(step, Layer(0))?;
            let run = self.run(step, layers);
            by_layer.iter().try_for_each(|overlap| run.check(*overlap))?;
            if draft_passes > step.query_rows {
                return Err(Error::new(Kind::OutOfRange, "overlap")
                    .at("passes of the draft layers")
                    .with("passes", draft_passes)
                    .with("query rows", step.query_rows));
            }
        }
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        runs.extend(
            steps
                .iter()
                .map(|(step, layers)| (self.schedules[step.micro_batch.index()], self.run(step, layers))),
        );
        let drafts = (self.geometry.shape().draft_layers, draft_passes);
        let done = enqueue_step(&*self.device, self.pools, &runs, by_layer, drafts, engine);
        if done.is_err() {
            for ((step, _), (_, run)) in steps.iter_mut().zip(&runs) {
                self.abandon(step, run);
            }
        }
        self.runs = runs;
        done
    }

    fn check_open(&self, step: &Step, layer: Layer) -> Result<()> {
        self.check_step(step, layer)?;
        match step.abandoned {
            true => Err(Error::new(Kind::InvalidConfig, "overlap").at("the step was abandoned")),
            false => Ok(()),
        }
    }

    fn run(&self, step: &Step, layers: &Layers) -> Run {
        let Buffers { selection, slots, parts } = layers.buffers;
        Run {
            micro_batch: step.micro_batch,
            batch: step.rows,
            half: layers.half,
            query_rows: step.query_rows,
            top_k: self.geometry.shape().top_k,
            passes: self.config.attention_passes,
            streams: layers.streams,
            selection,
            slots,
            parts,
        }
    }

    /// Notes that a step's tokens are worth nothing, and that nothing of its sequences may follow it. What
    /// was enqueued of it still runs: the compute stream is ordered behind that.
    fn abandon(&mut self, step: &mut Step, run: &Run) {
        step.abandoned = true;
        let schedule = self.schedules[step.micro_batch.index()];
        // A device that refuses even this has failed, and says so when the step is retired.
        let _ = schedule.abandon(&*self.device, run);
        let rows = self.ring.slot(step).map_or(&[][..], |slot| &slot.rows);
        for row in rows {
            if let Some(record) = self.records.get_mut(row.sequence as usize)
                && record.state == State::Running
            {
                record.state = State::Failed;
            }
        }
    }
}
