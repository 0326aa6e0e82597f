//! A sequence beside its steps: its growth before decoding, its entry into a lane, and its roll-back.

use crate::cache::Cache;
use crate::cache::record::State;
use crate::cache::share::Names;
use crate::device::{Join, PoolOp, Raise, Slice, Stream, Ticket, Truncate, Warm};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer, Sequence};
use crate::sparse::{BringUp, Stretches, WarmUp};

/// How long a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Committed tokens, as far as retired steps and host-issued work tell.
    pub committed: u32,
    /// Rows that the last retired step wrote behind them, to be accepted or rejected.
    pub landed: u32,
    /// Tokens in published pages: what [`Cache::publish`] goes on behind.
    pub published: u32,
}

impl Cache {
    /// The length of a sequence.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn length(&self, sequence: Sequence) -> Result<Length> {
        let record = self.record(sequence)?;
        let published = record.owned.names.as_ref().map_or(0, Names::pages) * self.geometry.page_tokens();
        Ok(Length { committed: record.rows.committed, landed: record.rows.landed, published })
    }

    /// Appends prompt rows in one layer: `rows` packed, `[n][row bytes]`. Layers fill independently, each
    /// in order, so that a transfer may go layer by layer.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfRange`] for an unknown layer, bytes that are no whole rows, or rows
    /// beyond the prompt; [`Kind::InvalidConfig`] once the sequence has joined. Nothing is written then.
    pub fn append(&mut self, sequence: Sequence, layer: Layer, rows: &[u8]) -> Result<()> {
        let row_bytes = self.geometry.row_bytes() as usize;
        if !rows.len().is_multiple_of(row_bytes) {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("bytes of whole rows")
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

    /// Declares that `count` prompt rows of every layer are in their place already ([`Cache::rows`]): written there by
    /// a transfer, or not needed because only the residency is replayed.
    ///
    /// # Errors
    /// As [`Cache::append`].
    pub fn append_in_place(&mut self, sequence: Sequence, count: u32) -> Result<()> {
        let layers = self.geometry.layers();
        (0..layers).try_for_each(|layer| self.claimable(sequence, Layer(layer), count).map(|_| ()))?;
        (0..layers).try_for_each(|layer| self.claim(sequence, Layer(layer), count).map(|_| ()))
    }

    /// Counts `count` more rows of a layer as filled; answers the first one's position.
    fn claim(&mut self, sequence: Sequence, layer: Layer, count: u32) -> Result<u32> {
        let first = self.claimable(sequence, layer, count)?;
        self.record_mut(sequence)?.rows.filled[layer.index()] = first + count;
        Ok(first)
    }

    /// Where the next `count` rows of a layer begin, if they fit.
    fn claimable(&self, sequence: Sequence, layer: Layer, count: u32) -> Result<u32> {
        self.check_layer(layer)?;
        let record = self.record(sequence)?;
        record.check_state(&[State::Filling], "append")?;
        let filled = record.rows.filled[layer.index()];
        if count > record.admitted.prompt - filled {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("rows beyond the prompt")
                .with("rows", count)
                .with("filled", filled)
                .with("prompt", record.admitted.prompt));
        }
        Ok(filled)
    }

    /// Enters the sequence into its lane once its prompt is complete: brings rows up as it was opened for,
    /// replays the warm-up's selections, and gathers what is resident then. All of it is enqueued on
    /// `stream`; steps wait for it by an edge. With a bound on bytes, [`Cache::join_more`] gathers the
    /// rest.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidConfig`] while a layer's prompt is incomplete or when it has
    /// joined; [`Kind::OutOfRange`] for selections of another size than `[layers][steps][k]`. What the device
    /// refuses half-way may be tried again, on any stream: by [`Cache::join_more`] where this answers that the
    /// warm-up is not complete.
    pub fn join(&mut self, sequence: Sequence, stream: Stream, warm_up: WarmUp) -> Result<Ticket> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Filling], "join")?;
        if let Some(layer) = record.rows.filled.iter().position(|f| *f != record.admitted.prompt) {
            return Err(Error::new(Kind::InvalidState, "join")
                .at("the prompt of a layer is incomplete")
                .with("layer", layer as u64)
                .with("filled", record.rows.filled[layer])
                .with("prompt", record.admitted.prompt));
        }
        let lane = Lane(record.lane());
        let steps = u64::from(warm_up.steps) * u64::from(self.geometry.layers());
        let words = steps * u64::from(self.config.shape.top_k);
        let fits = |s: &Slice| s.bytes() == 4 * words && s.address().is_multiple_of(4) && self.device.owns(s);
        if warm_up.selections.as_ref().is_some_and(|s| !fits(s)) {
            return Err(Error::new(Kind::OutOfRange, "join")
                .at("warm-up selections")
                .with("wanted words", words));
        }
        self.take_over(sequence.index as usize, stream)?;
        // The lane's last tenant must be gone from the tables, and what a refused join has put there.
        self.device.wait(stream, self.left)?;
        if self.record(sequence)?.work.entered {
            self.empty_lane(lane, stream)?;
        }
        self.record_mut(sequence)?.work.entered = true;
        self.device.enqueue(self.pools, stream, PoolOp::Join(self.join_of(sequence)?))?;
        let whole = self.record(sequence)?.admitted.bring_up == BringUp::Whole;
        let warm = Warm { lane, whole, selections: warm_up.selections, steps: warm_up.steps };
        self.device.enqueue(self.pools, stream, PoolOp::Warm(warm))?;
        let row_bytes = self.geometry.row_bytes();
        let residency_only = self.config.residency_only;
        let record = self.record_mut(sequence)?;
        let idle = residency_only || (!whole && warm_up.selections.is_none());
        record.work.stretches = Some(match idle {
            true => Stretches::none(),
            false => Stretches::new(&record.owned.slots.budgets, row_bytes, warm_up.bytes_a_call),
        });
        record.state = State::Joining;
        record.rows.committed = record.admitted.prompt;
        record.rows.stored = record.admitted.prompt;
        record.rows.upper = record.admitted.prompt;
        self.raise_next(sequence, stream)
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

    /// Gathers the next stretch of a bounded warm-up. The sequence may decode once none is left:
    /// [`Cache::is_running`].
    ///
    /// # Errors
    /// [`Kind::Closed`], [`Kind::InvalidConfig`] for a sequence that is not joining.
    pub fn join_more(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?.check_state(&[State::Joining], "join_more")?;
        self.hear();
        // What follows a stretch that failed must not look done.
        self.record(sequence)?.check_ticket("join_more")?;
        self.take_over(sequence.index as usize, stream)?;
        self.raise_next(sequence, stream)
    }

    /// Gathers the next stretch on a stream that has taken the sequence over.
    fn raise_next(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        let record = self.record(sequence)?;
        let lane = Lane(record.lane());
        let mut stretches = record.work.stretches.unwrap_or(Stretches::none());
        if let Some((first, count)) = stretches.take() {
            self.device.enqueue(self.pools, stream, PoolOp::Raise(Raise { lane, first, count }))?;
        }
        let ticket = self.settle(sequence.index as usize, stream)?;
        // Only now has the stretch been given out.
        let record = self.record_mut(sequence)?;
        record.work.stretches = Some(stretches);
        if stretches.is_over() {
            record.state = State::Running;
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

    /// Cuts a sequence to `length` tokens: rejected drafts beyond those that `length` accepts, and any
    /// committed tokens beyond it, are gone from every layer's residency. A page that others share is
    /// replaced before it can be written again, its remaining rows copied. Clears a failed step. One that the
    /// device refuses half-way may be tried again, to the same length or less, on any stream.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::Busy`] while work of the sequence is in flight; [`Kind::OutOfRange`] for
    /// a length beyond committed and landed rows; [`Kind::Exhausted`] when shared pages cannot be
    /// replaced. Nothing has changed then. What the device refuses later leaves the sequence to this call or to
    /// [`Cache::close`].
    pub fn truncate(&mut self, sequence: Sequence, length: u32, stream: Stream) -> Result<Ticket> {
        let index = sequence.index as usize;
        self.record(sequence)?;
        self.release_held(index)?;
        let record = self.record(sequence)?;
        record.check_state(&[State::Running, State::Cutting, State::Failed], "roll back")?;
        record.check_idle("roll back")?;
        // What a failed step has landed cannot be accepted.
        let landed = if record.state == State::Failed { 0 } else { record.rows.landed };
        let (again, committed) = (record.state == State::Cutting, record.rows.committed);
        let settle = length.saturating_sub(committed);
        if settle > landed {
            return Err(Error::new(Kind::OutOfRange, "roll back")
                .at("length")
                .with("length", length)
                .with("committed", committed)
                .with("landed", landed));
        }
        self.order_behind(index, stream)?;
        let copy = self.own_pages_from(sequence, length)?;
        // Until all of it is enqueued, nothing beyond `length` is there any more, and fresh pages are not filled.
        let record = self.record_mut(sequence)?;
        (record.state, record.work.unsettled) = (State::Cutting, Some(stream));
        (record.rows.committed, record.rows.stored) = (committed.min(length), record.rows.stored.min(length));
        record.rows.landed = if length < committed { 0 } else { landed };
        // A cut that was refused before may have left its copies out.
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
        Ok(ticket)
    }
}
