//! What the cache knows of one sequence, and its growth before decoding.

use std::collections::VecDeque;

use crate::cache::Cache;
use crate::cache::admit::PageCopy;
use crate::cache::share::Names;
use crate::device::{Cut, Join, Outcome, PoolOp, Raise, Slice, Stream, Ticket, Warm};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer, MicroBatch, Sequence};
use crate::sparse::{BringUp, Holding, Stretches, WarmUp};
use crate::step::RowInFlight;
use crate::total::PageTable;

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Free,
    Filling,
    Joining,
    Running,
    Cutting,
    Failed,
    Closing,
}

/// A sequence's record. It is reused when the sequence is gone; the generation tells handles apart.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) state: State,
    pub(super) generation: u32,
    pub(super) table: PageTable,
    pub(super) holding: Holding,
    pub(super) bring_up: BringUp,
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    /// Tokens that were admitted: prompt and promised.
    pub(super) admitted: u32,
    /// What its sealed pages are called; none when its tokens are not known.
    pub(super) names: Option<Names>,
    /// By layer the prompt rows that are there.
    pub(super) filled: Vec<u32>,
    /// Committed tokens, as of the last report or cut.
    pub(super) committed: u32,
    /// Committed tokens that are stored: all steps and other work that wrote them have ended well, but for
    /// the last ticket.
    pub(super) stored: u32,
    /// Rows that the last step landed behind them.
    pub(super) landed: u32,
    /// No more tokens than this can be committed or landed, whatever the steps in flight accept.
    pub(super) upper: u32,
    /// Rows enqueued over the sequence's life.
    pub(super) enqueued: u64,
    /// Steps between prepare and retire that name it, oldest first: rows enqueued before each.
    pub(super) flights: VecDeque<u64>,
    /// For life, from its first step on.
    pub(super) micro_batch: Option<MicroBatch>,
    /// What is left of a warm-up's gather.
    pub(super) stretches: Option<Stretches>,
    /// The last work that the host issued for it.
    pub(super) ticket: Option<Ticket>,
    /// The stream on which work may stand that no ticket and no event tells the end of: see `settle`.
    pub(super) unsettled: Option<Stream>,
    /// Its lane is not empty on the device, or may not be.
    pub(super) entered: bool,
    /// Pages (rows, index keys) that this work copies from: owned until it has ended, so that nobody writes to
    /// them meanwhile.
    pub(super) held: Vec<PageCopy>,
    /// The last call of prepare that named it.
    pub(super) attempt: u64,
}

/// How long a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Committed tokens, as far as retired steps and host-issued work tell.
    pub committed: u32,
    /// Rows that the last retired step wrote behind them, to be accepted or rejected.
    pub landed: u32,
    /// Tokens in sealed pages: what [`Cache::seal`] goes on behind.
    pub sealed: u32,
}

impl Record {
    pub(super) fn is_open(&self, sequence: Sequence) -> bool {
        self.generation == sequence.generation && !matches!(self.state, State::Free | State::Closing)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.state != State::Free
    }

    /// Whether work that the host issued for it may still run.
    pub(super) fn has_ticket(&self) -> bool {
        self.ticket.as_ref().is_some_and(|t| t.poll().is_none())
    }

    /// The same, or work of a call that was refused half-way may.
    pub(super) fn is_working(&self) -> bool {
        self.has_ticket() || self.unsettled.is_some()
    }

    /// Nothing that names the sequence may be in flight.
    pub(super) fn check_idle(&self, operation: &'static str) -> Result<()> {
        if !self.flights.is_empty() || self.has_ticket() {
            return Err(Error::new(Kind::Busy, operation)
                .at("work of the sequence is in flight")
                .with("steps", self.flights.len() as u64));
        }
        Ok(())
    }

    /// Its last host-issued work, if it ended, ended well.
    pub(super) fn check_ticket(&self, operation: &'static str) -> Result<()> {
        let failed = |kind: Kind| Err(Error::new(Kind::DeviceFailed, operation).at(kind.describe()));
        match self.ticket.as_ref().and_then(Ticket::poll) {
            None | Some(Outcome::Done) => Ok(()),
            Some(Outcome::Failed(kind)) => failed(kind),
            Some(Outcome::Cancelled) => failed(Kind::Cancelled),
        }
    }

    /// A step of the sequence is retired; `length` is what it began with, if it was sound. What an older step
    /// has written that is still in flight may turn out to be worth nothing.
    pub(super) fn end_flight(&mut self, row: RowInFlight, length: Option<u32>) {
        let place = self.flights.iter().position(|before| *before == row.enqueued_before);
        place.and_then(|place| self.flights.remove(place));
        let Some(length) = length else { return };
        if place == Some(0) {
            self.stored = self.stored.max(length);
        }
        if self.flights.is_empty() && self.state == State::Running {
            self.stored = self.committed;
        }
    }

    pub(super) fn expect(&self, states: &[State], operation: &'static str) -> Result<()> {
        if states.contains(&self.state) {
            return Ok(());
        }
        let place = match self.state {
            State::Filling => "the prompt is not complete, or the sequence has not joined",
            State::Joining => "the warm-up is not complete",
            State::Running => "the sequence is decoding",
            State::Cutting => "a roll-back was refused half-way",
            State::Failed => "a step of the sequence failed",
            State::Free | State::Closing => "the sequence is closed",
        };
        let hint = match self.state {
            State::Filling => "append the prompt in every layer, then join",
            State::Joining => "call join_more until nothing is left",
            State::Running => "append before joining",
            State::Cutting => "roll it back again, or close it",
            State::Failed => "roll it back to a committed length, or close it",
            State::Free | State::Closing => "open a new sequence",
        };
        Err(Error::new(Kind::InvalidConfig, operation).at(place).hint(hint))
    }
}

impl Cache {
    /// The length of a sequence.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn length(&self, sequence: Sequence) -> Result<Length> {
        let record = self.record(sequence)?;
        let sealed = record.names.as_ref().map_or(0, Names::pages) * self.geometry.page_tokens();
        Ok(Length { committed: record.committed, landed: record.landed, sealed })
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
        let table = &self.record(sequence)?.table;
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
        self.record_mut(sequence)?.filled[layer.index()] = first + count;
        Ok(first)
    }

    /// Where the next `count` rows of a layer begin, if they fit.
    fn claimable(&self, sequence: Sequence, layer: Layer, count: u32) -> Result<u32> {
        self.check_layer(layer)?;
        let record = self.record(sequence)?;
        record.expect(&[State::Filling], "append")?;
        let filled = record.filled[layer.index()];
        if count > record.prompt - filled {
            return Err(Error::new(Kind::OutOfRange, "append")
                .at("rows beyond the prompt")
                .with("rows", count)
                .with("filled", filled)
                .with("prompt", record.prompt));
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
        record.expect(&[State::Filling], "join")?;
        if let Some(layer) = record.filled.iter().position(|f| *f != record.prompt) {
            return Err(Error::new(Kind::InvalidConfig, "join")
                .at("the prompt of a layer is incomplete")
                .with("layer", layer as u64)
                .with("filled", record.filled[layer])
                .with("prompt", record.prompt));
        }
        let lane = Lane(record.holding.lane);
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
        if self.record(sequence)?.entered {
            self.empty_lane(lane, stream)?;
        }
        self.record_mut(sequence)?.entered = true;
        self.device.enqueue(self.pools, stream, PoolOp::Join(self.join_of(sequence)?))?;
        let whole = self.record(sequence)?.bring_up == BringUp::Whole;
        let warm = Warm { lane, whole, selections: warm_up.selections, steps: warm_up.steps };
        self.device.enqueue(self.pools, stream, PoolOp::Warm(warm))?;
        let row_bytes = self.geometry.row_bytes();
        let residency_only = self.config.residency_only;
        let record = self.record_mut(sequence)?;
        let idle = residency_only || (!whole && warm_up.selections.is_none());
        record.stretches = Some(match idle {
            true => Stretches::none(),
            false => Stretches::new(&record.holding.budgets, row_bytes, warm_up.bytes_a_call),
        });
        record.state = State::Joining;
        record.committed = record.prompt;
        record.stored = record.prompt;
        record.upper = record.prompt;
        self.raise_next(sequence, stream)
    }

    fn join_of(&self, sequence: Sequence) -> Result<Join<'_>> {
        let record = self.record(sequence)?;
        Ok(Join {
            lane: Lane(record.holding.lane),
            length: record.prompt,
            pages: &record.table.host,
            blocks: &record.holding.blocks,
            budgets: &record.holding.budgets,
        })
    }

    /// Gathers the next stretch of a bounded warm-up. The sequence may decode once none is left:
    /// [`Cache::is_running`].
    ///
    /// # Errors
    /// [`Kind::Closed`], [`Kind::InvalidConfig`] for a sequence that is not joining.
    pub fn join_more(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?.expect(&[State::Joining], "join_more")?;
        self.hear();
        // What follows a stretch that failed must not look done.
        self.record(sequence)?.check_ticket("join_more")?;
        self.take_over(sequence.index as usize, stream)?;
        self.raise_next(sequence, stream)
    }

    /// Gathers the next stretch on a stream that has taken the sequence over.
    fn raise_next(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        let record = self.record(sequence)?;
        let lane = Lane(record.holding.lane);
        let mut stretches = record.stretches.unwrap_or(Stretches::none());
        if let Some((first, count)) = stretches.take() {
            self.device.enqueue(self.pools, stream, PoolOp::Raise(Raise { lane, first, count }))?;
        }
        let ticket = self.settle(sequence.index as usize, stream)?;
        // Only now has the stretch been given out.
        let record = self.record_mut(sequence)?;
        record.stretches = Some(stretches);
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
    pub fn roll_back(&mut self, sequence: Sequence, length: u32, stream: Stream) -> Result<Ticket> {
        let index = sequence.index as usize;
        self.record(sequence)?;
        self.release_held(index)?;
        let record = self.record(sequence)?;
        record.expect(&[State::Running, State::Cutting, State::Failed], "roll back")?;
        record.check_idle("roll back")?;
        // What a failed step has landed cannot be accepted.
        let landed = if record.state == State::Failed { 0 } else { record.landed };
        let (again, committed) = (record.state == State::Cutting, record.committed);
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
        (record.state, record.unsettled) = (State::Cutting, Some(stream));
        (record.committed, record.stored) = (committed.min(length), record.stored.min(length));
        record.landed = if length < committed { 0 } else { landed };
        // A cut that was refused before may have left its copies out.
        let copies = if again { &self.records[index].held[..] } else { copy.as_slice() };
        copies.iter().try_for_each(|copy| self.copy_page(*copy, stream))?;
        let record = &self.records[index];
        let (lane, pages) = (Lane(record.holding.lane), &record.table.host);
        self.device.enqueue(self.pools, stream, PoolOp::Truncate(Cut { lane, settle, length, pages }))?;
        let record = &mut self.records[index];
        (record.committed, record.landed, record.upper) = (length, 0, length);
        let ticket = self.settle(index, stream)?;
        let record = &mut self.records[index];
        (record.stored, record.state) = (length, State::Running);
        Ok(ticket)
    }
}
