//! The steps of a cache: prepare, layers, finish, retire. How drafts are accepted stands in `accept`.

use crate::cache::Cache;
use crate::cache::accept::Accepted;
use crate::cache::record::State;
use crate::device::descriptor::Entry;
use crate::device::{Begin, PoolOp, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch, Sequence};
use crate::step::{
    Buffers, Due, Enqueued, LayerCall, LayerCalls, Retired, RowInFlight, Step, Streams, Unretired,
};

/// A row of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRow {
    /// The sequence.
    pub sequence: Sequence,
    /// Rows of its previous step that were accepted.
    pub accepted: Accepted,
    /// Its query rows in this step, at most the step's.
    pub query_rows: u32,
}

impl Cache {
    /// Begins a step of `micro_batch`: enqueues, on `stream`, the wait for the micro-batch's previous step
    /// and for every sequence's last host-issued work, the copy of the step descriptor, and the commit of what
    /// the sequences' previous steps left in their landing slots. `query_rows` is the width of the step.
    ///
    /// **Drafts are accepted here**, one step late: of the rows that a sequence's previous step wrote, the first
    /// [`BatchRow::accepted`] are committed and the others forgotten.
    ///
    /// `accepted` is a tensor of one u32 a batch row (`batch` of them) for rows with
    /// [`Accepted::OnDevice`]; it is read in the stream's order.
    ///
    /// # Errors
    /// [`Kind::Busy`] when every step descriptor is in flight, the micro-batch's last step is not finished, or
    /// a sequence has as many steps in flight as configured; [`Kind::Closed`]; [`Kind::InvalidConfig`] for
    /// a sequence that is not running, named twice, or of another micro-batch; [`Kind::OutOfRange`] for
    /// too many rows, query rows or accepted rows, a tensor of another size, and a sequence that would
    /// outgrow what was admitted; [`Kind::DeviceFailed`] when its warm-up failed. No step is begun then. Where the
    /// device refused it half-way, its step descriptor stays in flight until the stream has come past what was enqueued,
    /// as the next call here or [`Cache::reap`] finds.
    pub fn prepare(
        &mut self,
        micro_batch: MicroBatch,
        query_rows: u32,
        rows: &[BatchRow],
        accepted: Option<Slice>,
        stream: Stream,
    ) -> Result<Step> {
        self.ring.reclaim(&*self.device, &self.stepped)?;
        self.check_batch(micro_batch, query_rows, rows.len())?;
        self.attempt += 1;
        for (index, row) in rows.iter().enumerate() {
            self.check_row(micro_batch, query_rows, row, accepted)?;
            let attempt = self.attempt;
            if std::mem::replace(&mut self.record_mut(row.sequence)?.steps.attempt, attempt) == attempt {
                return Err(Error::new(Kind::InvalidConfig, "prepare")
                    .at("a sequence is named twice")
                    .with("batch row", index as u64));
            }
        }
        let entries = rows.iter().map(|row| Entry {
            lane: self.records[row.sequence.index as usize].lane(),
            accepted: row.accepted.word(),
            query_rows: row.query_rows,
        });
        let step = self.ring.prepare(micro_batch, query_rows, entries, stream)?;
        if let Err(error) = self.order_prepare(&step, rows, stream) {
            self.ring.release(&step);
            return Err(error);
        }
        let block = self.ring.slot(&step)?.block;
        if let Err(error) =
            self.device.enqueue(self.pools, stream, PoolOp::Begin(Begin { micro_batch, block, accepted }))
        {
            match error.kind() {
                Kind::OutOfRange => self.ring.release(&step),
                _ => self.ring.give_up(&step),
            }
            return Err(error);
        }
        for row in rows {
            let index = row.sequence.index as usize;
            // The step's event and end stand behind whatever was enqueued before.
            self.records[index].work.unsettled = None;
            self.release_held(index)?;
            let record = &mut self.records[row.sequence.index as usize];
            let before = record.rows.begin_step(row.accepted, row.query_rows);
            record.steps.in_flight.push_back(before);
            record.steps.micro_batch = Some(micro_batch);
            let sequence = row.sequence.index;
            let query_rows = row.query_rows;
            self.ring.add_row(&step, RowInFlight { sequence, enqueued_before: before, query_rows });
        }
        Ok(step)
    }

    fn check_batch(&self, micro_batch: MicroBatch, query_rows: u32, rows: usize) -> Result<()> {
        let range = |place: &'static str, value: u64, most: u32| {
            Err(Error::new(Kind::OutOfRange, "prepare").at(place).with("value", value).with("most", most))
        };
        if micro_batch.0 >= self.config.micro_batches {
            return range("micro-batch", micro_batch.0.into(), self.config.micro_batches - 1);
        }
        if rows == 0 || rows > self.config.batch as usize {
            return range("rows of the batch", rows as u64, self.config.batch);
        }
        if query_rows == 0 || query_rows > self.config.query_rows {
            return range("query rows", query_rows.into(), self.config.query_rows);
        }
        self.ring.check_room(micro_batch)
    }

    fn check_row(
        &self,
        micro: MicroBatch,
        query_rows: u32,
        row: &BatchRow,
        tensor: Option<Slice>,
    ) -> Result<()> {
        let record = self.record(row.sequence)?;
        record.check_state(&[State::Running], "prepare")?;
        record.check_ticket("prepare")?;
        let error = |kind, place: &'static str, value: u32| {
            Err(Error::new(kind, "prepare").at(place).with("value", value))
        };
        if record.steps.micro_batch.is_some_and(|own| own != micro) {
            return error(Kind::InvalidConfig, "a sequence of another micro-batch", micro.0);
        }
        if record.steps.in_flight.len() >= self.config.steps_in_flight as usize {
            return error(Kind::Busy, "steps of one sequence in flight", self.config.steps_in_flight);
        }
        if row.query_rows == 0 || row.query_rows > query_rows {
            return error(Kind::OutOfRange, "query rows of a batch row", row.query_rows);
        }
        record.rows.check_accepted(row.accepted, tensor.is_some())?;
        let reach = record.rows.reach(row.accepted, row.query_rows);
        let most = self.config.reach(record.admitted.tokens)?;
        if reach > u64::from(most) {
            return Err(Error::new(Kind::OutOfRange, "prepare")
                .at("the sequence outgrows what was admitted")
                .with("tokens", reach)
                .with("admitted", record.admitted.tokens)
                .hint("close it, or open it with more promised tokens"));
        }
        Ok(())
    }

    /// Orders a step's begin behind what it follows: the micro-batch's last step, and of each row what came behind
    /// that.
    fn order_prepare(&self, step: &Step, rows: &[BatchRow], stream: Stream) -> Result<()> {
        self.device.wait(stream, self.stepped[step.micro_batch.index()])?;
        let sequences = rows.iter().map(|row| row.sequence.index as usize);
        let follows = |index: &usize| {
            let work = &self.records[*index].work;
            !work.stepped || work.unsettled.is_some()
        };
        sequences.filter(follows).try_for_each(|index| self.order_behind(index, stream))
    }

    /// R of one layer, for an engine that orders R and G by itself: by its own events, in halves of the batch, or in
    /// several waves of attention. Otherwise [`Cache::layer`] does both.
    ///
    /// G must follow, ordered behind it, before the layer's attention and before the next R of the same rows, of
    /// whichever layer: a step in which something missed was not gathered fails. The calls of one step come from one
    /// thread at a time.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer, rows or buffers that do not fit the step.
    pub fn resolve(&self, step: &Step, call: LayerCall, stream: Stream, buffers: Buffers) -> Result<()> {
        self.calls(step, call.layer)?.resolve(call, stream, buffers)
    }

    /// G of one layer, for an engine that called [`Cache::resolve`]: fetches what the last resolve of these rows
    /// missed, or what wave `wave` of attention reads of it ([`Config::attention_waves`](crate::Config)). Attention
    /// may read the slots behind it. Nothing, where rows have no bytes.
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn gather(&self, step: &Step, call: LayerCall, wave: u32, stream: Stream) -> Result<()> {
        let calls = self.calls(step, call.layer)?;
        if self.config.residency_only { Ok(()) } else { calls.gather(call, wave, stream) }
    }

    /// S of one layer, behind [`Cache::layer`] or [`Cache::resolve`] and the engine's P: stores the step's new rows,
    /// which the engine has written to their landing slots: it must be ordered behind that write. A scatter that comes
    /// before it stores what stood there before, and nobody but the engine can know;
    /// `check::watch` finds it in a test. Nothing, where rows have no bytes.
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn scatter(&self, step: &Step, call: LayerCall, stream: Stream) -> Result<()> {
        let calls = self.calls(step, call.layer)?;
        if self.config.residency_only { Ok(()) } else { calls.scatter(call, stream) }
    }

    /// R then G of one layer, each on its stream, with the edge between them; [`Cache::scatter`] is for after the
    /// engine's P. This is how a layer is run unless something else is wanted, and what `examples/decode_loop.rs`
    /// does. The others say what they are for: [`Cache::resolve`], [`Cache::overlap`], [`Cache::overlap_steps`],
    /// [`Cache::capture`], [`Cache::capture_into`], [`Cache::layers`].
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn layer(&self, step: &Step, call: LayerCall, streams: Streams, buffers: Buffers) -> Result<()> {
        self.resolve(step, call, streams.resolve, buffers)?;
        let schedule = &self.schedules[step.micro_batch.index()];
        schedule.resolved(&*self.device, streams.resolve, streams.gather)?;
        self.gather(step, call, 0, streams.gather)
    }

    /// [`Cache::layer`] of every layer, draft layers last, in one call: for replays and tests, which know all
    /// selections beforehand. `selection` and `slots` are `[layers][rows of the step][query rows][top_k]` i32.
    ///
    /// Layers share the scratch slots, so behind this call these hold rows of the last layer alone. A step in which an
    /// earlier layer might need one is refused, before anything is enqueued. It needs none where the budget of each of
    /// its sequences holds `query_rows x top_k` rows, or the whole sequence; nor does a cache whose rows have no bytes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] where scratch slots might be needed: call layer by layer. Otherwise as
    /// [`Cache::resolve`]; layers in front of the one that was refused are enqueued then.
    pub fn layers(&self, step: &Step, streams: Streams, selection: Slice, slots: Slice) -> Result<()> {
        self.check_step(step, Layer(0))?;
        self.check_scratch(step)?;
        let layers = self.geometry.layers();
        let row = u64::from(step.query_rows).saturating_mul(4 * u64::from(self.geometry.shape().top_k));
        let bytes = row.saturating_mul(step.rows.into());
        for (place, given) in [("selection", selection.bytes()), ("slots", slots.bytes())] {
            let wanted = bytes.saturating_mul(layers.into());
            if given != wanted {
                let error = Error::new(Kind::OutOfRange, "layers").at(place);
                return Err(error.with("bytes", given).with("wanted", wanted));
            }
        }
        for layer in 0..layers {
            let range = |of: Slice| of.part(bytes * u64::from(layer), bytes);
            let buffers = Buffers { selection: range(selection)?, slots: range(slots)?, split_indices: None };
            self.layer(step, LayerCall::whole(Layer(layer)), streams, buffers)?;
        }
        Ok(())
    }

    /// Whether no layer but the last may put a row of this step into a scratch slot.
    fn check_scratch(&self, step: &Step) -> Result<()> {
        if self.config.residency_only {
            return Ok(());
        }
        let earlier = self.geometry.layers() as usize - 1;
        for (index, row) in self.ring.slot(step)?.rows.iter().enumerate() {
            let record = &self.records[row.sequence as usize];
            let selected = u64::from(row.query_rows) * u64::from(self.geometry.shape().top_k);
            // A sequence that is held whole has never more rows than its budget.
            let rows = selected.min(self.config.reach(record.admitted.tokens)?.into());
            let budgets = record.owned.slots.budgets.iter().take(earlier);
            if let Some((layer, budget)) = budgets.enumerate().find(|(_, budget)| u64::from(**budget) < rows)
            {
                return Err(Error::new(Kind::InvalidConfig, "layers")
                    .at("all layers share the scratch slots, and attention of none comes between")
                    .with("layer", layer as u64)
                    .with("batch row", index as u64)
                    .with("selected", selected)
                    .with("budget", *budget)
                    .hint("call layer by layer, each layer's attention before the next, or open with larger budgets"));
            }
        }
        Ok(())
    }

    /// The calls of an open step, for one of its layers.
    fn calls<'a>(&'a self, step: &'a Step, layer: Layer) -> Result<LayerCalls<'a>> {
        let enqueued = self.check_step(step, layer)?;
        Ok(LayerCalls { device: &*self.device, pools: self.pools, step, enqueued })
    }

    /// Whether a layer of an open step may be enqueued; answers what of the step is.
    pub(super) fn check_step(&self, step: &Step, layer: Layer) -> Result<&Enqueued> {
        self.check_layer(layer)?;
        let slot = self.ring.slot(step)?;
        if step.is_finished() {
            return Err(Error::new(Kind::InvalidState, "layer").at("the step is finished"));
        }
        Ok(&slot.enqueued)
    }

    /// Ends the enqueueing of a step: its report, then its event, on `stream`. Layers that were enqueued by
    /// [`Cache::overlap`] or [`Cache::overlap_steps`] are joined there; behind what an engine orders itself,
    /// `stream` must be ordered already.
    ///
    /// A step is whole when every query row of its batch rows was resolved, gathered (in each wave of attention) and
    /// scattered in every layer, draft layers included; where rows have no bytes
    /// ([`Config::residency_only`](crate::Config)), when it was resolved. A step that is not whole is not ended:
    /// what was never stored would be read, after an eviction, as whatever its page held before.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidConfig`] for a finished one, and while a call is
    /// missing, with its layer, batch row and query row: nothing is enqueued then, and the step stays open, to be
    /// completed or given up by [`Cache::abandon`]. After a refusal of the device's the step is still to be finished.
    pub fn finish(&mut self, step: &mut Step, stream: Stream) -> Result<()> {
        let slot = self.ring.slot(step)?;
        if step.is_finished() {
            return Err(Error::new(Kind::InvalidState, "finish").at("the step is finished"));
        }
        if !step.is_abandoned() {
            let bytes = !self.config.residency_only;
            let waves = if bytes { self.attention_waves() } else { 0 };
            slot.enqueued.check(&slot.rows, Due { waves, scatter: bytes })?;
        }
        self.join_layers(step, stream)?;
        // What is refused from here on may be tried again on another stream.
        step.work.beside = Some(stream);
        let report = PoolOp::Report { micro_batch: step.micro_batch, slot: slot.report };
        self.device.enqueue(self.pools, stream, report)?;
        self.device.record(slot.event, stream)?;
        self.device.record(self.stepped[step.micro_batch.index()], stream)?;
        for row in &slot.rows {
            let record = &mut self.records[row.sequence as usize];
            record.work.stepped = true;
            // What it was to write is missing: nothing may be built on it. The next step of these sequences
            // can only be prepared after this.
            if step.is_abandoned() && record.state == State::Running {
                record.state = State::Failed;
            }
        }
        self.ring.finish(step);
        Ok(())
    }

    /// Ends a step whose event has been reached: reads its report, gives back what only it still named.
    ///
    /// # Errors
    /// [`Kind::Busy`] gives the step back: it is in flight, or was not finished. Any other error ends it:
    /// [`Kind::DeviceFailed`] when the device failed or the sticky word reports an error,
    /// [`Kind::Cancelled`] when a layer was not enqueued whole, so that none of
    /// the step's tokens may be published; its sequences wait for [`Cache::truncate`] or
    /// [`Cache::close`]. A step that was enqueued behind a failed one has committed rows of it: retire it
    /// too, then roll back to a length before the failed step.
    pub fn retire(&mut self, step: Step, stream: Stream) -> Result<Retired<'_>, Unretired> {
        let ended = match self.ring.end(&*self.device, &step) {
            crate::step::Ended::Not(error) => return Err(Unretired { error, step: Some(step) }),
            crate::step::Ended::With(ended) => ended,
        };
        let released = self.release_rows(&step, ended.is_ok(), stream);
        self.ring.release(&step);
        self.stats.steps += 1;
        let row_bytes = u64::from(self.geometry.row_bytes());
        match ended.and(released) {
            Err(error) => Err(Unretired { error, step: None }),
            Ok(()) => {
                for layer in &self.ring.report().layers {
                    self.stats.hits += u64::from(layer.hits);
                    self.stats.misses += u64::from(layer.misses);
                    self.stats.scratch += u64::from(layer.scratch);
                    self.stats.bytes_up += u64::from(layer.misses) * row_bytes;
                }
                Ok(Retired { report: self.ring.report() })
            }
        }
    }

    /// Takes an ended step off its sequences; those that were closed meanwhile are released.
    fn release_rows(&mut self, step: &Step, sound: bool, stream: Stream) -> Result<()> {
        let mut first_error = Ok(());
        for row in 0..step.rows as usize {
            let Some((row, length)) = self.ring.row(step, row) else { continue };
            let record = &mut self.records[row.sequence as usize];
            if let Some(length) = length {
                record.rows.end_step(&row, length);
            }
            record.end_flight(row, length.filter(|_| sound));
            if !sound && record.state == State::Running {
                record.state = State::Failed;
            }
            if record.state == State::Closing {
                first_error = first_error.and(self.release_closed(row.sequence as usize, stream));
            }
        }
        first_error
    }
}
