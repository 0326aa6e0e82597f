//! The steps of a dense cache: prepare, finish, retire. `sequence` explains how drafts are accepted.
//!
//! A step's begin on the device fills the micro-batch's tensors (`tables`). Attention and the writes of new rows are
//! the engine's. So a step is three calls, whatever the number of layers.

use crate::dense::pool::NULL_PAGE;
use crate::dense::record::{Record, State};
use crate::dense::{Cache, Tensors};
use crate::device::descriptor::Cause;
use crate::device::pages::descriptor::{self, Entry, FROM_DEVICE};
use crate::device::{BeginPages, PageOp, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::MicroBatch;
use crate::sequence::{Accepted, BatchRow};
use crate::step::{Ended, Retired, Step, Unretired};

impl Cache {
    /// Begins a step of `micro_batch`. The call enqueues on `stream`:
    ///
    /// - the wait for the micro-batch's previous step and for the last host-issued work of every sequence; pages that
    ///   come back layer by layer are waited for later, by [`Cache::arrived`];
    /// - the begin, which fills the micro-batch's tensors ([`Cache::tensors`]).
    ///
    /// `stream` must not be captured: the begin belongs to one step.
    ///
    /// The engine's kernels then write the new rows to their slots, and attention reads the pages. A batch row is a
    /// decoding sequence with its drafts, or a chunk of a prompt; the query rows of all of them together are at most
    /// [`Config::step_tokens`](crate::dense::Config::step_tokens).
    ///
    /// **This call accepts rows**, one step late. Of the rows that a sequence's previous step wrote, it commits the
    /// first [`BatchRow::accepted`] rows and forgets the others. Of a prompt's chunk all rows are accepted. For rows
    /// with [`Accepted::OnDevice`], `accepted` is a tensor with one u32 for each batch row (`batch` of them). The
    /// device reads it in stream order, except for sequences without a previous step, or that were truncated since.
    ///
    /// # Errors
    /// [`Kind::Busy`] if every step descriptor is in flight, the micro-batch's last step is not finished, a sequence
    /// has as many steps in flight as configured, or, in a model with windows, steps behind a failed one are in flight;
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence whose step failed, that is parked, or that belongs to
    /// another micro-batch; [`Kind::InvalidConfig`] for a sequence that is named twice, and for [`Accepted::OnDevice`]
    /// without a tensor; [`Kind::OutOfRange`] for too many rows, query rows or accepted rows, a tensor of another size,
    /// and a sequence that would outgrow its admitted tokens; [`Kind::DeviceFailed`] if the last copy of a sequence
    /// failed. An error begins no step.
    pub fn prepare(
        &mut self,
        micro_batch: MicroBatch,
        rows: &[BatchRow],
        accepted: Option<Slice>,
        stream: Stream,
    ) -> Result<Step> {
        let query_rows = self.check_batch(micro_batch, rows)?;
        self.attempt += 1;
        for (index, row) in rows.iter().enumerate() {
            self.check_row(micro_batch, row, accepted)?;
            let record = &mut self.records[row.sequence.index as usize];
            record.steps.check_named(self.attempt, index)?;
        }
        let begun = self.begin(micro_batch, query_rows, rows, accepted, stream);
        let step = match begun {
            Ok(step) => step,
            Err(error) => {
                for (at, row) in rows.iter().enumerate() {
                    self.sent.forget((micro_batch.index(), at));
                    let index = row.sequence.index as usize;
                    self.cut_pages(index, self.records[index].rows.upper)?;
                }
                return Err(error);
            }
        };
        let arrivals = &mut self.arrivals[micro_batch.index()];
        arrivals.clear();
        // In one part, the begin has waited for it.
        for row in rows.iter().filter(|_| self.config.parts() > 1) {
            arrivals.add(&self.records[row.sequence.index as usize].coming);
        }
        for (at, row) in rows.iter().enumerate() {
            let index = row.sequence.index as usize;
            // The step's event comes after all work that was enqueued earlier.
            self.records[index].work.unsettled = None;
            self.release_held(index)?;
            let record = &mut self.records[index];
            record.coming.clear();
            record.floor = record.next_floor(row.accepted);
            record.start = record.next_start(row.accepted);
            let in_flight = record.steps.begin_flight(&mut record.rows, row, micro_batch);
            let floor = record.floor;
            self.sent.note((micro_batch.index(), at), record.opened, record.epoch, &record.held);
            self.ring.add_row(&step, in_flight);
            // Not before: a step that is refused has accepted nothing.
            self.leave_pages(index, floor)?;
        }
        Ok(step)
    }

    /// Takes the pages of a checked step, and enqueues its begin. After an error the pages are still taken.
    fn begin(
        &mut self,
        micro_batch: MicroBatch,
        query_rows: u32,
        rows: &[BatchRow],
        accepted: Option<Slice>,
        stream: Stream,
    ) -> Result<Step> {
        self.leave_windows()?;
        rows.iter().try_for_each(|row| self.slide(row))?;
        // Pages that the step takes may have been noted for a copy.
        self.flush(stream)?;
        let step = self.write_descriptor(micro_batch, query_rows, rows, stream)?;
        if let Err(error) = self.order_prepare(&step, rows, stream) {
            self.ring.release(&step);
            return Err(error);
        }
        // A begin is one operation: a device that refuses it has not enqueued it.
        match self.enqueue_begin(&step, accepted, stream) {
            Err(error) => {
                self.ring.release(&step);
                Err(error)
            }
            Ok(()) => Ok(step),
        }
    }

    /// Checks the numbers of a step. Returns the most query rows of a batch row.
    fn check_batch(&self, micro_batch: MicroBatch, rows: &[BatchRow]) -> Result<u32> {
        let range = |place: &'static str, value: u64, most: u32| {
            Err(Error::new(Kind::OutOfRange, "prepare").at(place).with("value", value).with("most", most))
        };
        if micro_batch.0 >= self.config.micro_batches {
            return range("micro-batch", micro_batch.0.into(), self.config.micro_batches - 1);
        }
        if rows.is_empty() || rows.len() > self.config.batch as usize {
            return range("rows of the batch", rows.len() as u64, self.config.batch);
        }
        let tokens = rows.iter().fold(0, |sum, row| sum + u64::from(row.query_rows));
        if tokens > u64::from(self.config.step_tokens) {
            return range("query rows of all batch rows", tokens, self.config.step_tokens);
        }
        self.ring.check_room(micro_batch)?;
        if self.draining {
            return Err(Error::new(Kind::Busy, "prepare")
                .at("steps behind a failed one are in flight, and hold pages")
                .hint("retire them first"));
        }
        Ok(rows.iter().map(|row| row.query_rows).max().unwrap_or(0))
    }

    fn check_row(&self, micro: MicroBatch, row: &BatchRow, tensor: Option<Slice>) -> Result<()> {
        let record = self.record(row.sequence)?;
        record.check_state(&[State::Running], "prepare")?;
        record.check_ticket("prepare")?;
        record.steps.check_next(micro, self.config.steps_in_flight)?;
        if row.query_rows == 0 {
            return Err(Error::new(Kind::OutOfRange, "prepare")
                .at("query rows of a batch row")
                .with("value", 0_u32));
        }
        record.rows.check_accepted(row.accepted, tensor.is_some())?;
        let most = self.config.reach(record.tokens)?;
        record.rows.check_reach(row.accepted, row.query_rows, most, record.tokens)?;
        self.check_chunk(record, row.accepted)
    }

    /// Checks that all rows of a prompt's chunk are accepted. Admission counts on it.
    fn check_chunk(&self, record: &Record, accepted: Accepted) -> Result<()> {
        let landed = record.rows.landed;
        match landed > self.config.query_rows && accepted != Accepted::Rows(landed) {
            true => Err(Error::new(Kind::OutOfRange, "prepare")
                .at("accepted rows of a chunk of a prompt")
                .with("rows", landed)
                .with("query rows", self.config.query_rows)
                .hint("accept all rows of a step with more rows than Config::query_rows, or truncate the sequence")),
            false => Ok(()),
        }
    }

    /// The end of the blocks that a sequence has rows in after a step.
    fn end_block(&self, record: &Record, row: &BatchRow) -> u32 {
        let reach = record.rows.reach(row.accepted, row.query_rows);
        // Checked: the reach is at most the sequence's admitted tokens and its rows in flight.
        self.config.pages(u32::try_from(reach).unwrap_or(u32::MAX))
    }

    /// In the groups with a sliding window, takes the pages that the step writes to. The promise covers them.
    fn slide(&mut self, row: &BatchRow) -> Result<()> {
        let index = row.sequence.index as usize;
        let end = self.end_block(&self.records[index], row);
        for group in 0..self.pools.len() {
            if self.config.slides(group) {
                self.take_pages(index, group, end)?;
            }
        }
        Ok(())
    }

    /// Gives back the pages that no query reads any more, of the sequences whose steps were retired since the last
    /// prepare. Between the two the engine may publish them.
    fn leave_windows(&mut self) -> Result<()> {
        while let Some(index) = self.leaving.pop() {
            let record = &mut self.records[index as usize];
            record.leaves = false;
            let floor = record.floor;
            if record.is_taken() {
                self.leave_pages(index as usize, floor)?;
            }
        }
        Ok(())
    }

    /// Gives back the pages that no query at or beyond `floor` reads.
    pub(super) fn leave_pages(&mut self, index: usize, floor: u32) -> Result<()> {
        for (group, pool) in self.pools.iter_mut().enumerate() {
            let first = self.config.first_block(group, floor);
            let Record { held, names, .. } = &mut self.records[index];
            while let Some(block) = held[group].leave(first, pool)? {
                self.tables.write(group, index, block, &[NULL_PAGE])?;
                if let Some(block) = names.as_mut().and_then(|names| names.leave(group, block)) {
                    pool.leave_block(&block)?;
                }
            }
        }
        Ok(())
    }

    /// In the groups with a sliding window, gives back the pages behind the first `length` tokens. No work may be in
    /// flight that names them.
    pub(super) fn cut_pages(&mut self, index: usize, length: u32) -> Result<()> {
        let Record { held, epoch, copied, .. } = &mut self.records[index];
        for (group, pool) in self.pools.iter_mut().enumerate() {
            // A copy that a refused call left may still write to its page.
            let target = |to: u32| (0..).zip(held[group].pages()).find(|(_, page)| **page == to);
            let targets = copied.iter().filter(|copy| copy.group == group).filter_map(|copy| target(copy.to));
            let end = targets.map(|(block, _)| block + 1).fold(self.config.pages(length), u32::max);
            if self.config.slides(group) && held[group].end() > end {
                self.tables.clear(group, index, end, held[group].end())?;
                held[group].cut(end, pool)?;
                *epoch = epoch.wrapping_add(1);
            }
        }
        Ok(())
    }

    /// Takes a slot of the ring and writes the step's descriptor.
    fn write_descriptor(
        &mut self,
        micro_batch: MicroBatch,
        query_rows: u32,
        rows: &[BatchRow],
        stream: Stream,
    ) -> Result<Step> {
        let Cache { ring, records, sent, pools, .. } = self;
        let entries = rows.iter().enumerate().map(|(at, row)| {
            let record = &records[row.sequence.index as usize];
            let at = (micro_batch.index(), at);
            Entry {
                lane: row.sequence.index,
                length: record.next_start(row.accepted).unwrap_or(FROM_DEVICE),
                accepted: row.accepted.word(),
                query_rows: row.query_rows,
                changed: sent.changes(at, record.opened, record.epoch, &record.held),
            }
        });
        let encode = |number, words: &mut [u32]| descriptor::encode(number, pools.len(), entries, words);
        ring.prepare(micro_batch, query_rows, rows.len() as u32, encode, stream)
    }

    /// Orders the begin of a step after the micro-batch's last step, after later work of each row's sequence, and after
    /// the last use of pages that were given back.
    fn order_prepare(&mut self, step: &Step, rows: &[BatchRow], stream: Stream) -> Result<()> {
        self.device.wait(stream, self.stepped[step.micro_batch.index()])?;
        self.device.wait(stream, self.left)?;
        let after = rows.iter().map(|row| self.records[row.sequence.index as usize].after).max().unwrap_or(0);
        self.moves.down.wait(after, stream, &*self.device)?;
        let sequences = rows.iter().map(|row| row.sequence.index as usize);
        if self.config.parts() == 1 {
            let coming = sequences.clone().map(|index| self.records[index].coming.last).max().unwrap_or(0);
            self.moves.up.wait(coming, stream, &*self.device)?;
        }
        let follows = |index: &usize| {
            let Record { work, coming, .. } = &self.records[*index];
            work.unsettled.is_some() || !work.stepped && coming.last == 0
        };
        sequences.filter(follows).try_for_each(|index| self.order_behind(index, stream))
    }

    fn enqueue_begin(&self, step: &Step, accepted: Option<Slice>, stream: Stream) -> Result<()> {
        let slot = self.ring.slot(step)?;
        let micro_batch = step.micro_batch.index();
        let Tensors { lengths, starts, positions, .. } = self.tensors[micro_batch];
        let begin = BeginPages {
            descriptor: slot.descriptor,
            lanes: self.lanes,
            accepted,
            lengths,
            starts,
            positions,
            wide: self.config.width == crate::dense::Width::I64,
            groups: &self.page_tables[micro_batch],
            report: slot.report,
        };
        self.device.enqueue_pages(stream, PageOp::Begin(begin))
    }

    /// Abandons an open step whose work the engine cannot enqueue. The engine must still finish and retire it; its
    /// sequences then have to be truncated or closed.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidState`] for a finished step.
    pub fn abandon(&self, step: &mut Step) -> Result<()> {
        self.check_unfinished(step, "abandon")?;
        step.abandon();
        Ok(())
    }

    pub(super) fn check_unfinished(&self, step: &Step, operation: &'static str) -> Result<()> {
        self.ring.slot(step)?;
        match step.is_finished() {
            true => Err(Error::new(Kind::InvalidState, operation)
                .at("the step is finished")
                .hint("retire the step")),
            false => Ok(()),
        }
    }

    /// Ends the enqueueing of a step. `stream` must be ordered after everything that the engine has enqueued for the
    /// step: pages and tensors may be used for other rows once the stream has passed this point.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another cache's step; [`Kind::InvalidState`] for a finished step, and, where pages come
    /// back layer by layer, for one that did not call [`Cache::arrived`] for all layers. If the device refuses
    /// the call, call `finish` again.
    pub fn finish(&mut self, step: &mut Step, stream: Stream) -> Result<()> {
        self.check_unfinished(step, "finish")?;
        self.check_arrived(step)?;
        let slot = self.ring.slot(step)?;
        self.device.record(slot.event, stream)?;
        self.device.record(self.stepped[step.micro_batch.index()], stream)?;
        for row in &slot.rows {
            let record = &mut self.records[row.sequence as usize];
            record.work.stepped = true;
            record.steps.open = false;
            if step.is_abandoned() {
                record.fail(*row);
            }
        }
        self.ring.finish(step);
        Ok(())
    }

    /// Ends a step that the device has finished: reads its report, and frees the resources that only this step still
    /// named. `stream` is as for [`Cache::close`].
    ///
    /// # Errors
    /// [`Kind::Busy`] returns the step: it is in flight, was not finished, or an earlier step of one of its sequences
    /// is not retired. Any other error ends the step, and all of
    /// its tokens must be discarded: [`Kind::DeviceFailed`] if the device failed or the report contains an error,
    /// [`Kind::Cancelled`] if the step was abandoned. The engine then calls [`Cache::truncate`] or [`Cache::close`] for
    /// the step's sequences. A step that was enqueued after a failed one fails too: retire it, then truncate to at most
    /// the length that was committed before the failed step.
    pub fn retire(&mut self, step: Step, stream: Stream) -> Result<Retired<'_>, Unretired> {
        if let Err(error) = self.check_order(&step) {
            return Err(Unretired { error, step: Some(step) });
        }
        let ended = match self.ring.end(&*self.device, &step) {
            Ended::Not(error) => return Err(Unretired { error, step: Some(step) }),
            Ended::With(ended) => ended.and_then(|()| self.check_earlier(&step)),
        };
        let released = self.release_rows(&step, ended.is_ok(), stream);
        self.ring.release(&step);
        self.steps += 1;
        match ended.and(released) {
            Err(error) => Err(Unretired { error, step: None }),
            Ok(()) => Ok(Retired { report: self.ring.report() }),
        }
    }

    /// Checks that no earlier step of the step's sequences is in flight: only in order can a step know whether one
    /// failed.
    fn check_order(&self, step: &Step) -> Result<()> {
        let mut rows = self.ring.slot(step)?.rows.iter().enumerate();
        match rows.find(|(_, row)| !self.records[row.sequence as usize].steps.is_oldest(row)) {
            Some((row, _)) => Err(Error::new(Kind::Busy, "retire")
                .at("an earlier step of a sequence is not retired")
                .with("batch row", row as u64)
                .hint("retire the steps of a sequence in their order")),
            None => Ok(()),
        }
    }

    /// Checks that no earlier step of the step's sequences has failed: its rows would be those of the step too.
    fn check_earlier(&self, step: &Step) -> Result<()> {
        let mut rows = self.ring.slot(step)?.rows.iter().enumerate();
        match rows.find(|(_, row)| self.records[row.sequence as usize].failed_before(row)) {
            Some((row, _)) => Err(Error::new(Kind::DeviceFailed, "retire")
                .at(Cause::Earlier.describe())
                .with("batch row", row as u64)
                .hint("truncate its sequences to a committed length, or close them")),
            None => Ok(()),
        }
    }

    /// Removes an ended step from its sequences, and releases the sequences that were closed meanwhile.
    fn release_rows(&mut self, step: &Step, sound: bool, stream: Stream) -> Result<()> {
        let mut first_error = Ok(());
        for row in 0..step.rows as usize {
            let Some((row, length)) = self.ring.row(step, row) else { continue };
            let index = row.sequence as usize;
            let record = &mut self.records[index];
            record.end_step(row, length, sound, self.config.query_rows);
            if !std::mem::replace(&mut record.leaves, true) {
                self.leaving.push(row.sequence);
            }
            let (closing, committed) = (record.state == State::Closing, record.rows.committed);
            if record.failed_at.is_some() && record.steps.in_flight() == 0 {
                first_error = first_error.and(self.cut_pages(index, committed));
            }
            if closing {
                first_error = first_error.and(self.release_closed(index, stream));
            }
        }
        if !sound || self.draining {
            let drains = |record: &Record| record.failed_at.is_some() && record.steps.in_flight() > 0;
            // Without a window no chunk has pages of its own.
            let slides = (0..self.pools.len()).any(|group| self.config.slides(group));
            self.draining = slides && self.records.iter().any(drains);
        }
        first_error
    }
}
