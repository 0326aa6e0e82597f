//! A sequence outside its steps: appending its prompt, joining its lane, and truncating it.

use crate::cache::Cache;
use crate::cache::budgets::Takes;
use crate::cache::record::{Record, State};
use crate::device::{Join, PoolOp, Slice, Stream, Ticket, Truncate, Warm, WarmGather};
use crate::error::{Error, Kind, Result};
use crate::geometry::Geometry;
use crate::ids::{Lane, Layer, Sequence};
use crate::sequence::{BlockHashes, Length};
use crate::sparse::{BringUp, Stretches, WarmUp};

impl Cache {
    /// The length of a sequence.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn length(&self, sequence: Sequence) -> Result<Length> {
        let record = self.record(sequence)?;
        let published =
            record.owned.hashes.as_ref().map_or(0, BlockHashes::pages) * self.geometry.page_tokens();
        let filled = record.filled.iter().min().copied().unwrap_or(0);
        Ok(Length { committed: record.rows.committed, landed: record.rows.landed, published, filled })
    }

    /// Appends prompt rows in one layer. `rows` is packed: `[n][row bytes]`. Each layer fills in order and
    /// independently of the others, so a transfer may send layer by layer.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfRange`] for an unknown layer, bytes that are not whole rows, or rows
    /// beyond the prompt; [`Kind::InvalidState`] once the sequence has joined. An error writes nothing.
    pub fn append(&mut self, sequence: Sequence, layer: Layer, rows: &[u8]) -> Result<()> {
        let row_bytes = self.geometry.of(layer.index()).row_bytes() as usize;
        if !rows.len().is_multiple_of(row_bytes) {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("bytes that are not whole rows")
                .with("bytes", rows.len() as u64)
                .with("row", row_bytes as u64));
        }
        let count = (rows.len() / row_bytes).try_into().unwrap_or(u32::MAX);
        let first = self.claim(sequence, layer, count)?;
        let table = &self.record(sequence)?.owned.table;
        for (position, row) in (first..).zip(rows.chunks_exact(row_bytes)) {
            let page = (position / self.geometry.page_tokens()) as usize;
            if let Some((host, _)) = table.get(page) {
                self.total.write_row(layer.index(), host.0, position % self.geometry.page_tokens(), row)?;
            }
        }
        Ok(())
    }

    /// Declares that `count` prompt rows of every layer are already in place ([`Cache::rows`]). A transfer wrote them
    /// there, or the program replays residency only and needs no bytes.
    ///
    /// # Errors
    /// As [`Cache::append`].
    pub fn append_in_place(&mut self, sequence: Sequence, count: u32) -> Result<()> {
        let layers = self.geometry.layers();
        (0..layers).try_for_each(|layer| self.claimable(sequence, Layer(layer), count).map(|_| ()))?;
        (0..layers).try_for_each(|layer| self.claim(sequence, Layer(layer), count).map(|_| ()))
    }

    /// Declares that `count` prompt rows of one layer are already in place, as [`Cache::append_in_place`] does for
    /// every layer: for a transfer that brings a sequence layer by layer.
    ///
    /// # Errors
    /// As [`Cache::append`].
    pub fn append_layer_in_place(&mut self, sequence: Sequence, layer: Layer, count: u32) -> Result<()> {
        self.claim(sequence, layer, count).map(|_| ())
    }

    /// Counts `count` more rows of a layer as filled. Returns the position of the first one.
    fn claim(&mut self, sequence: Sequence, layer: Layer, count: u32) -> Result<u32> {
        let first = self.claimable(sequence, layer, count)?;
        self.record_mut(sequence)?.filled[layer.index()] = first + count;
        Ok(first)
    }

    /// The position of the first of the next `count` rows of a layer, if they fit.
    fn claimable(&self, sequence: Sequence, layer: Layer, count: u32) -> Result<u32> {
        self.check_layer(layer)?;
        let record = self.record(sequence)?;
        record.check_state(&State::FILLED, "append")?;
        let filled = record.filled[layer.index()];
        if count > record.admitted.prompt - filled {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("rows beyond the prompt")
                .with("rows", count)
                .with("filled", filled)
                .with("prompt", record.admitted.prompt));
        }
        Ok(filled)
    }

    /// Adds the sequence to the batch: enters it into its lane, once its prompt is complete. The call decides which
    /// rows are resident, from [`Open::bring_up`](crate::Open::bring_up) and the warm-up's selections, and gathers
    /// those rows. It enqueues all of this on `stream`; steps wait for it by an event. If the warm-up limits the bytes
    /// of a call, [`Cache::join_more`] gathers the remaining rows.
    ///
    /// With [`Config::share`](crate::Config::share) the call may also shrink other sequences on `stream`, and their
    /// next steps wait for that. So pass a stream that is not behind a long prefill.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] while a layer's prompt is incomplete, while a layer's index keys are
    /// incomplete of a sequence that arrived, or if the sequence has already joined; [`Kind::Exhausted`] names
    /// lanes or slot blocks for a sequence that is arriving; [`Kind::DeviceFailed`] if a copy of its index keys failed;
    /// [`Kind::OutOfRange`] for selections whose size is not `[index groups][steps][k]`; [`Kind::Busy`], with
    /// [`Config::share`](crate::Config::share), while its slots belong to sequences that cannot shrink now: that are in
    /// open steps, joining or failed, that are closed with steps in flight, or whose last resize is in flight. These
    /// errors change nothing. If the device refuses the call half-way, try again on any stream. If that returns the
    /// error that the warm-up is not complete, call [`Cache::join_more`] instead.
    pub fn join(&mut self, sequence: Sequence, stream: Stream, warm_up: WarmUp) -> Result<Ticket> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Filling, State::Arriving], "join")?;
        self.check_complete(record, "join")?;
        self.check_selections("join", &warm_up, self.geometry.groups().len())?;
        let lane = self.enter_lane(sequence, Takes::Share, stream)?;
        let whole = self.record(sequence)?.admitted.bring_up == BringUp::Whole;
        let warm_up = self.warm_up_of(sequence.index as usize, warm_up)?;
        let warm = Warm { lane, group: None, whole, selections: warm_up.selections, steps: warm_up.steps };
        self.device.enqueue(self.pools, stream, PoolOp::Warm(warm))?;
        self.leave_place(sequence.index as usize, stream)?;
        let largest = self.geometry.formats().iter().map(Geometry::row_bytes).max().unwrap_or(0);
        let groups = self.geometry.groups().iter().zip(&self.record(sequence)?.owned.slots.budgets);
        let slots = groups.map(|(group, budget)| u64::from(group.layers) * u64::from(*budget)).sum();
        let residency_only = self.config.residency_only;
        let record = self.record_mut(sequence)?;
        let idle = residency_only || (!whole && warm_up.selections.is_none());
        record.work.stretches = Some(match idle {
            true => Stretches::none(),
            false => Stretches::new(slots, largest, warm_up.bytes_a_call),
        });
        record.state = State::Joining;
        record.has_prompt();
        self.gather_next(sequence, stream)
    }

    /// Checks that a prompt is whole: its rows, the index keys that are counted, and no copy of them failed.
    pub(super) fn check_complete(&self, record: &Record, operation: &'static str) -> Result<()> {
        record.check_prompt(operation)?;
        (0..self.geometry.groups().len())
            .try_for_each(|group| record.check_keys(operation, group, self.geometry.members(group).start))?;
        record.check_ticket(operation)
    }

    /// Checks the selections of a warm-up of `groups` index groups.
    pub(super) fn check_selections(
        &self,
        operation: &'static str,
        warm_up: &WarmUp,
        groups: usize,
    ) -> Result<()> {
        let steps = u64::from(warm_up.steps) * groups as u64;
        let words = steps * u64::from(self.config.shape.top_k);
        let fits = |s: &Slice| s.bytes() == 4 * words && s.address().is_multiple_of(4) && self.device.owns(s);
        match warm_up.selections.as_ref().is_some_and(|s| !fits(s)) {
            true => Err(Error::new(Kind::OutOfRange, operation)
                .at("warm-up selections")
                .with("wanted words", words)),
            false => Ok(()),
        }
    }

    /// Enters a prompt that has not joined into a lane on `stream`. An arriving one takes the lane and slots first.
    pub(super) fn enter_lane(&mut self, sequence: Sequence, takes: Takes, stream: Stream) -> Result<Lane> {
        match self.record(sequence)?.state {
            State::Arriving => self.take_lane(sequence, takes, stream)?,
            _ => self.take_share(sequence, takes, stream)?,
        }
        self.take_over(sequence.index as usize, stream)?;
        let lane = Lane(self.record(sequence)?.lane());
        // The residency tables must no longer hold the lane's previous sequence, nor entries of a refused join.
        self.device.wait(stream, self.left)?;
        if self.record(sequence)?.work.entered {
            self.empty_lane(lane, stream)?;
        }
        self.record_mut(sequence)?.work.entered = true;
        self.device.enqueue(self.pools, stream, PoolOp::Join(self.join_of(sequence)?))?;
        Ok(lane)
    }

    fn join_of(&self, sequence: Sequence) -> Result<Join<'_>> {
        let record = self.record(sequence)?;
        Ok(Join {
            lane: Lane(record.lane()),
            length: record.admitted.prompt,
            pages: &record.owned.table.host,
            blocks: &record.owned.slots.blocks,
            budgets: &record.owned.slots.budgets,
        })
    }

    /// Gathers the next stretch of a warm-up whose bytes for each call are limited. The sequence may decode after the
    /// last stretch: [`Cache::is_running`].
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not joining.
    pub fn join_more(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?.check_state(&[State::Joining], "join_more")?;
        self.hear();
        // A stretch after a failed one must not look done.
        self.record(sequence)?.check_ticket("join_more")?;
        self.take_over(sequence.index as usize, stream)?;
        self.gather_next(sequence, stream)
    }

    /// Gathers the next stretch on a stream that waits for all earlier work of the sequence.
    fn gather_next(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        let record = self.record(sequence)?;
        let lane = Lane(record.lane());
        let mut stretches = record.work.stretches.unwrap_or(Stretches::none());
        if let Some((first, count)) = stretches.take() {
            self.device.enqueue(self.pools, stream, PoolOp::WarmGather(WarmGather { lane, first, count }))?;
        }
        let ticket = self.settle(sequence.index as usize, stream)?;
        // The stretch counts as gathered only now.
        let record = self.record_mut(sequence)?;
        record.work.stretches = Some(stretches);
        if stretches.is_over() {
            record.run();
        }
        Ok(ticket)
    }

    /// Whether a sequence has joined and may take part in steps.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn is_running(&self, sequence: Sequence) -> Result<bool> {
        Ok(self.record(sequence)?.state == State::Running)
    }

    /// Whether a sequence is parked ([`Cache::park`]).
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn is_parked(&self, sequence: Sequence) -> Result<bool> {
        Ok(self.record(sequence)?.state == State::Parked)
    }

    /// Truncates a sequence to `length` tokens. It removes rejected drafts and committed tokens beyond `length` from
    /// the residency tables of every layer. Landed rows below `length` are accepted, except that those of a failed step
    /// cannot be: a length beyond the committed one is then rejected. The call replaces a page that other sequences
    /// share before the page can be written again, and copies its remaining rows. After the call a sequence whose step
    /// failed may take part in steps again. Before a sequence has joined, the call shortens its prompt, enqueues
    /// nothing, and rejects a length whose page other sequences share. If the device refuses the call half-way, try
    /// again on any stream, with the same length or a smaller one.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is joining, and for a prompt's rows in pages that
    /// others share (a fork shares the page that it copied until its next step or [`Cache::reap`]); [`Kind::Busy`]
    /// while work of the sequence is in flight; [`Kind::OutOfRange`] for a length beyond committed and landed rows, or
    /// beyond a prompt that has not joined; [`Kind::Exhausted`] when shared pages cannot be replaced. These errors
    /// change nothing. If the device refuses later operations, only this call and [`Cache::close`] accept the sequence.
    pub fn truncate(&mut self, sequence: Sequence, length: u32, stream: Stream) -> Result<Ticket> {
        let index = sequence.index as usize;
        if self.record(sequence)?.is_prompt() {
            self.truncate_prompt(sequence, length)?;
            return Ok(Ticket::done());
        }
        self.release_held(index)?;
        let record = self.record(sequence)?;
        record.check_state(&[State::Running, State::Truncating, State::Failed], "truncate")?;
        record.check_idle("truncate")?;
        self.check_staged(index, "truncate")?;
        let record = self.record(sequence)?;
        // Landed rows of a failed step cannot be accepted.
        let landed = if record.state == State::Failed { 0 } else { record.rows.landed };
        let (again, committed) = (record.state == State::Truncating, record.rows.committed);
        let settle = length.saturating_sub(committed);
        if settle > landed {
            return Err(Error::new(Kind::OutOfRange, "truncate")
                .at("length")
                .with("length", length)
                .with("committed", committed)
                .with("landed", landed));
        }
        self.order_behind(index, stream)?;
        let copy = self.own_pages_from(sequence, length)?;
        // Until the whole truncation is enqueued, rows beyond `length` are gone and fresh pages are not filled.
        let record = self.record_mut(sequence)?;
        (record.state, record.work.unsettled) = (State::Truncating, Some(stream));
        (record.rows.committed, record.rows.stored) = (committed.min(length), record.rows.stored.min(length));
        record.rows.landed = if length < committed { 0 } else { landed };
        // Rows that come later go to pages of its own: from `length` on it shares none.
        record.shared = record.shared.min(length);
        // An earlier truncation that the device refused may not have made its copies.
        let copies = if again { &self.records[index].owned.copied[..] } else { copy.as_slice() };
        copies.iter().try_for_each(|copy| self.copy_page(*copy, stream))?;
        let record = &self.records[index];
        let (lane, pages) = (Lane(record.lane()), &record.owned.table.host);
        self.device.enqueue(
            self.pools,
            stream,
            PoolOp::Truncate(Truncate { lane, settle, length, pages }),
        )?;
        let record = &mut self.records[index];
        (record.rows.committed, record.rows.landed, record.rows.upper) = (length, 0, length);
        let ticket = self.settle(index, stream)?;
        let record = &mut self.records[index];
        (record.rows.stored, record.state) = (length, State::Running);
        record.owned.asks_at = 0;
        Ok(ticket)
    }
}
