//! The steps of a cache: prepare, layers, finish, retire. `sequence::rows` explains how drafts are accepted.

use crate::cache::Cache;
use crate::cache::record::State;
use crate::device::descriptor::{self, Entry};
use crate::device::{Begin, PoolOp, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Layer, MicroBatch};
use crate::sequence::BatchRow;
use crate::step::{Buffers, Due, Enqueued, LayerCall, LayerCalls, Retired, Step, Streams, Unretired};

impl Cache {
    /// Begins a step of `micro_batch`. `query_rows` is the number of query rows of the step. The call enqueues on
    /// `stream`:
    ///
    /// - with [`Config::share`](crate::Config::share), resizes of the micro-batch's sequences, if there is cause;
    /// - the wait for the micro-batch's previous step and for the last host-issued work of every sequence;
    /// - the copy of the step descriptor;
    /// - the commit of the rows that the sequences' previous steps wrote to their landing slots.
    ///
    /// **This call accepts drafts**, one step late. Of the rows that a sequence's previous step wrote, it commits the
    /// first [`BatchRow::accepted`] rows and forgets the others.
    ///
    /// For rows with [`Accepted::OnDevice`], `accepted` is a tensor with one u32 for each batch row (`batch` of them).
    /// The device reads it in stream order.
    ///
    /// # Errors
    /// [`Kind::Busy`] if every step descriptor is in flight, the micro-batch's last step is not finished, or a sequence
    /// has as many steps in flight as configured; [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not
    /// running or belongs to another micro-batch; [`Kind::InvalidConfig`] for a sequence that is named twice, and for
    /// [`Accepted::OnDevice`] without a tensor; [`Kind::OutOfRange`] for too many rows, query rows or accepted rows, a
    /// tensor of another size, and a sequence that would outgrow its admitted tokens; [`Kind::DeviceFailed`] if the
    /// warm-up of a sequence failed. An error begins no step. If the device refuses the call half-way, the step
    /// descriptor stays in flight until the stream has passed the enqueued operations; the next call of `prepare` or
    /// [`Cache::reap`] then frees it.
    ///
    /// [`Accepted::OnDevice`]: crate::Accepted::OnDevice
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
            self.record_mut(row.sequence)?.steps.check_named(attempt, index)?;
        }
        self.share_at_prepare(micro_batch, stream)?;
        let entries = rows.iter().map(|row| Entry {
            lane: self.records[row.sequence.index as usize].lane(),
            accepted: row.accepted.word(),
            query_rows: row.query_rows,
        });
        let encode = |number, words: &mut [u32]| descriptor::step::encode(number, entries, words);
        let step = self.ring.prepare(micro_batch, query_rows, rows.len() as u32, encode, stream)?;
        if let Err(error) = self.order_prepare(&step, rows, stream) {
            self.ring.release(&step);
            return Err(error);
        }
        let descriptor = self.ring.slot(&step)?.descriptor;
        if let Err(error) = self.device.enqueue(
            self.pools,
            stream,
            PoolOp::Begin(Begin { micro_batch, descriptor, accepted }),
        ) {
            match error.kind() {
                Kind::OutOfRange => self.ring.release(&step),
                _ => self.ring.give_up(&step),
            }
            return Err(error);
        }
        for row in rows {
            let index = row.sequence.index as usize;
            // The step's event comes after all work that was enqueued earlier.
            self.records[index].work.unsettled = None;
            self.release_held(index)?;
            let record = &mut self.records[row.sequence.index as usize];
            let flight = record.steps.begin_flight(&mut record.rows, row, micro_batch);
            self.ring.add_row(&step, flight);
            self.outgrows(index);
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
        record.steps.check_next(micro, self.config.steps_in_flight)?;
        if row.query_rows == 0 || row.query_rows > query_rows {
            return Err(Error::new(Kind::OutOfRange, "prepare")
                .at("query rows of a batch row")
                .with("value", row.query_rows));
        }
        record.rows.check_accepted(row.accepted, tensor.is_some())?;
        let admitted = record.admitted.tokens;
        let most = self.config.reach(admitted)?;
        record.rows.check_reach(row.accepted, row.query_rows, most, admitted)
    }

    /// Orders the begin of a step after the micro-batch's last step, and after later work of each row's sequence.
    fn order_prepare(&self, step: &Step, rows: &[BatchRow], stream: Stream) -> Result<()> {
        self.device.wait(stream, self.stepped[step.micro_batch.index()])?;
        let sequences = rows.iter().map(|row| row.sequence.index as usize);
        let follows = |index: &usize| {
            let work = &self.records[*index].work;
            !work.stepped || work.unsettled.is_some()
        };
        sequences.filter(follows).try_for_each(|index| self.order_behind(index, stream))
    }

    /// Resolve (R) of one layer: maps the selection to slots, and decides misses and victims. It is for an engine that
    /// orders R and the gather (G) itself: by its own events, in halves of the batch, or in several attention waves.
    /// For all other engines, [`Cache::layer`] does both. In an index group only the first layer is resolved; the other
    /// layers read the same slots, and have a gather each.
    ///
    /// The engine must call [`Cache::gather`] next and order it after R. G must run before the layer's attention, and
    /// before the next R of the same rows in any layer. A step with a missed row that was not gathered fails. Only one
    /// thread at a time may make the calls of a step.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer, rows or buffers that do not fit the step, and for a layer that another one
    /// selects for; [`Kind::InvalidState`] for a finished step.
    pub fn resolve(&self, step: &Step, call: LayerCall, stream: Stream, buffers: Buffers) -> Result<()> {
        let calls = self.calls(step, call.layer)?;
        self.check_first("resolve", call.layer)?;
        let members = self.geometry.members(self.geometry.group_of(call.layer.index()));
        calls.resolve(call, members.len() as u32, stream, buffers)
    }

    /// Gather (G) of one layer, for an engine that called [`Cache::resolve`]: copies the rows that the last resolve
    /// of these batch rows missed into their slots. In a layer that another one selects for, G may run at any
    /// time between that layer's R and its own attention: the layers of a group have scratch slots of their own. With
    /// several attention waves ([`Config::attention_waves`](crate::Config)) it copies only the rows of wave `wave`.
    /// Attention may read the slots after G. With [`Config::residency_only`](crate::Config) the call does nothing.
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn gather(&self, step: &Step, call: LayerCall, wave: u32, stream: Stream) -> Result<()> {
        let calls = self.calls(step, call.layer)?;
        if self.config.residency_only { Ok(()) } else { calls.gather(call, wave, stream) }
    }

    /// Scatter (S) of one layer: stores the step's new rows in the total pool. The engine calls it after
    /// [`Cache::layer`] or [`Cache::resolve`], and orders it after its own write of the new rows to their landing slots
    /// (P). A scatter that runs before that write stores the old bytes of the landing slots. The cache cannot detect
    /// this; `check::watch` finds it in a test. With [`Config::residency_only`](crate::Config) the call does nothing.
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn scatter(&self, step: &Step, call: LayerCall, stream: Stream) -> Result<()> {
        let calls = self.calls(step, call.layer)?;
        if self.config.residency_only { Ok(()) } else { calls.scatter(call, stream) }
    }

    /// Resolve (R), then gather (G), of one layer, each on its stream, with an event between them. Call
    /// [`Cache::scatter`] after the engine has written the new rows (P). This is the usual way to run a layer;
    /// `examples/decode_loop.rs` uses it. In a layer that another one selects for, it gathers only, and `buffers` are
    /// not used: the slots are those of the group's first layer. Pass the streams of that layer's call: G must follow
    /// its R. [`Cache::prefetch`] brings what the next layer reads into L2. For special needs see [`Cache::resolve`],
    /// [`Cache::overlap`], [`Cache::overlap_steps`], [`Cache::capture`], [`Cache::capture_into`] and [`Cache::layers`].
    ///
    /// # Errors
    /// As [`Cache::resolve`].
    pub fn layer(&self, step: &Step, call: LayerCall, streams: Streams, buffers: Buffers) -> Result<()> {
        match self.geometry.first_of(call.layer.index()) == call.layer.index() {
            true => self.resolve(step, call, streams.resolve, buffers)?,
            // Nothing below may be enqueued for a layer or a step that does not exist.
            false => self.check_step(step, call.layer).map(drop)?,
        }
        let schedule = &self.schedules[step.micro_batch.index()];
        schedule.by_hand(&*self.device, streams.resolve, streams.gather)?;
        self.gather(step, call, 0, streams.gather)
    }

    /// Calls [`Cache::layer`] for every layer, draft layers last. For replays and tests, which have all selections
    /// beforehand. `selection` and `slots` are `[index groups][rows of the step][query rows][top_k]` i32: for each
    /// layer, if none share a selection.
    ///
    /// All layers share the scratch slots, so after this call the scratch slots hold rows of the last layer only; where
    /// layers share a selection, of the last group's. The call rejects a step in which an earlier layer might need a
    /// scratch slot, and enqueues nothing then. A layer needs none if each sequence has a budget of at least
    /// `query_rows x top_k` slots or of one slot per token, or if [`Config::residency_only`](crate::Config) is set.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] if an earlier layer might need scratch slots: call layer by layer instead. Otherwise as
    /// [`Cache::resolve`]; then the layers before the rejected one are enqueued.
    pub fn layers(&self, step: &Step, streams: Streams, selection: Slice, slots: Slice) -> Result<()> {
        self.check_step(step, Layer(0))?;
        self.check_scratch(step)?;
        let groups = self.geometry.groups().len() as u64;
        let row = u64::from(step.query_rows).saturating_mul(4 * u64::from(self.geometry.shape().top_k));
        let bytes = row.saturating_mul(step.rows.into());
        for (place, given) in [("selection", selection.bytes()), ("slots", slots.bytes())] {
            let wanted = bytes.saturating_mul(groups);
            if given != wanted {
                let error = Error::new(Kind::OutOfRange, "layers").at(place);
                return Err(error.with("bytes", given).with("wanted", wanted));
            }
        }
        // A group's slots must not be another group's selection either.
        if selection.overlaps(&slots) {
            return Err(Error::new(Kind::OutOfRange, "layers").at("selection and slots overlap"));
        }
        for layer in 0..self.geometry.layers() {
            let group = self.geometry.group_of(layer as usize) as u64;
            let range = |of: Slice| of.part(bytes * group, bytes);
            let buffers = Buffers { selection: range(selection)?, slots: range(slots)?, split_indices: None };
            if layer > 0 && self.geometry.first_of(layer as usize) == layer as usize {
                // R overwrites the lists of fetches that the layers before read.
                let schedule = &self.schedules[step.micro_batch.index()];
                schedule.by_hand(&*self.device, streams.gather, streams.resolve)?;
            }
            self.layer(step, LayerCall::whole(Layer(layer)), streams, buffers)?;
        }
        Ok(())
    }

    /// Checks that only the last group may need scratch slots in this step: each of its layers has its own.
    fn check_scratch(&self, step: &Step) -> Result<()> {
        if self.config.residency_only {
            return Ok(());
        }
        let earlier = self.geometry.groups().len().saturating_sub(1);
        for (index, row) in self.ring.slot(step)?.rows.iter().enumerate() {
            let record = &self.records[row.sequence as usize];
            let selected = u64::from(row.query_rows) * u64::from(self.geometry.shape().top_k);
            // A sequence that fits its budget never needs a scratch slot.
            let rows = selected.min(self.config.reach(record.admitted.tokens)?.into());
            let budgets = record.owned.slots.budgets.iter().take(earlier);
            if let Some((group, budget)) = budgets.enumerate().find(|(_, budget)| u64::from(**budget) < rows)
            {
                return Err(Error::new(Kind::InvalidConfig, "layers")
                    .at("all layers share the scratch slots, and no attention runs between them")
                    .with("layer", self.geometry.members(group).start as u64)
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

    /// Checks that a layer of an open step may be enqueued. Returns the step's record of enqueued calls.
    pub(super) fn check_step(&self, step: &Step, layer: Layer) -> Result<&Enqueued> {
        self.check_layer(layer)?;
        let slot = self.ring.slot(step)?;
        if step.is_finished() {
            return Err(Error::new(Kind::InvalidState, "layer")
                .at("the step is finished")
                .hint("retire the step"));
        }
        Ok(&slot.enqueued)
    }

    /// Ends the enqueueing of a step: enqueues its report and then its event on `stream`. `stream` waits for layers
    /// that [`Cache::overlap`] or [`Cache::overlap_steps`] enqueued. For layers that the engine orders itself, the
    /// engine must already have made `stream` wait.
    ///
    /// A step is complete if every query row of its batch rows was resolved, gathered (in each attention wave) and
    /// scattered in every layer, draft layers included. With [`Config::residency_only`](crate::Config) it is complete
    /// if every query row was resolved. The call does not end an incomplete step: if a row is never stored, a later
    /// step that misses it reads the old bytes of its page.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidState`] for a finished step, and while a call is
    /// missing, with its layer, batch row and query row. These errors enqueue nothing; the step stays open, and the
    /// engine completes it or abandons it with [`Cache::abandon`]. If the device refuses the call, call `finish`
    /// again.
    pub fn finish(&mut self, step: &mut Step, stream: Stream) -> Result<()> {
        let slot = self.ring.slot(step)?;
        if step.is_finished() {
            return Err(Error::new(Kind::InvalidState, "finish")
                .at("the step is finished")
                .hint("retire the step"));
        }
        if !step.is_abandoned() {
            let bytes = !self.config.residency_only;
            let waves = if bytes { self.attention_waves() } else { 0 };
            slot.enqueued.check(&slot.rows, Due { waves, scatter: bytes })?;
        }
        self.join_layers(step, stream)?;
        // If the device refuses an operation below, the engine may call again on another stream.
        step.work.beside = Some(stream);
        let report = PoolOp::Report { micro_batch: step.micro_batch, slot: slot.report };
        self.device.enqueue(self.pools, stream, report)?;
        self.device.record(slot.event, stream)?;
        self.device.record(self.stepped[step.micro_batch.index()], stream)?;
        for row in &slot.rows {
            let record = &mut self.records[row.sequence as usize];
            record.work.stepped = true;
            record.steps.open = false;
            // Rows of an abandoned step are missing, so no step may build on them. The next step of these
            // sequences can only be prepared after this.
            if step.is_abandoned() && record.state == State::Running {
                record.state = State::Failed;
            }
        }
        self.ring.finish(step);
        Ok(())
    }

    /// Ends a step that the device has finished: reads its report, and frees the resources that only this step still
    /// named.
    ///
    /// # Errors
    /// [`Kind::Busy`] returns the step: it is in flight, or was not finished. Any other error ends the step, and all of
    /// its tokens must be discarded: [`Kind::DeviceFailed`] if the device failed or the report contains an error,
    /// [`Kind::Cancelled`] if a layer was not enqueued completely. The engine then calls [`Cache::truncate`] or
    /// [`Cache::close`] for the step's sequences. A step that was enqueued after a failed one fails too: retire it,
    /// then truncate to at most the length that was committed before the failed step.
    pub fn retire(&mut self, step: Step, stream: Stream) -> Result<Retired<'_>, Unretired> {
        let ended = match self.ring.end(&*self.device, &step) {
            crate::step::Ended::Not(error) => return Err(Unretired { error, step: Some(step) }),
            crate::step::Ended::With(ended) => ended,
        };
        if ended.is_ok() {
            self.note_misses(&step);
        }
        let released = self.release_rows(&step, ended.is_ok(), stream);
        self.ring.release(&step);
        self.stats.steps += 1;
        match ended.and(released) {
            Err(error) => Err(Unretired { error, step: None }),
            Ok(()) => {
                self.stats.moved_rows += u64::from(self.ring.report().moved);
                for (layer, format) in self.ring.report().layers.iter().zip(self.geometry.formats()) {
                    self.stats.hits += u64::from(layer.hits);
                    self.stats.misses += u64::from(layer.misses);
                    self.stats.scratch += u64::from(layer.scratch);
                    self.stats.bytes_up += u64::from(layer.misses) * u64::from(format.row_bytes());
                }
                Ok(Retired { report: self.ring.report() })
            }
        }
    }

    /// Removes an ended step from its sequences, and releases the sequences that were closed meanwhile.
    fn release_rows(&mut self, step: &Step, sound: bool, stream: Stream) -> Result<()> {
        let (mut first_error, mut covers) = (Ok(()), false);
        for row in 0..step.rows as usize {
            let Some((row, length)) = self.ring.row(step, row) else { continue };
            let record = &mut self.records[row.sequence as usize];
            if let Some(length) = length {
                record.rows.end_step(&row, length);
            }
            let covered = record.work.covered;
            record.end_flight(row, length.filter(|_| sound));
            covers |= record.work.covered && !covered;
            if !sound && record.state == State::Running {
                record.state = State::Failed;
            }
            if record.state == State::Closing {
                first_error = first_error.and(self.release_closed(row.sequence as usize, stream));
            }
        }
        // Its budget may change again.
        if covers {
            self.share_is_due();
        }
        first_error
    }
}
