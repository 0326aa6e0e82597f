//! What the cache knows of one sequence.
//!
//! A record stands in a table made with the cache, one for each lane. It is used again when its sequence is gone, and
//! the generation tells handles apart. Its parts have different lives: what was *admitted* never changes; what is
//! *owned* comes back when the last work that names it has ended; *rows* move on with the prompt, with each step and
//! with each retirement; *steps* and *work* say what may still run, on behalf of steps and of calls beside them.

use std::collections::VecDeque;

use crate::cache::admit::PageCopy;
use crate::cache::share::Names;
use crate::device::{Outcome, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::ids::{MicroBatch, Sequence};
use crate::sparse::{BringUp, Holding, Stretches};
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

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) state: State,
    pub(super) generation: u32,
    pub(super) admitted: Admitted,
    pub(super) owned: Owned,
    pub(super) rows: RowCounts,
    pub(super) steps: SequenceSteps,
    pub(super) work: HostWork,
}

/// What a sequence was opened for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Admitted {
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    /// Prompt and promised tokens.
    pub(super) tokens: u32,
    pub(super) bring_up: BringUp,
}

/// What a sequence has of the pools, and gives back at its end.
#[derive(Debug, Default)]
pub(super) struct Owned {
    pub(super) table: PageTable,
    /// Its lane, and its slots in each layer.
    pub(super) slots: Holding,
    /// What its published pages are called; none when its tokens are not known.
    pub(super) names: Option<Names>,
    /// Pages (rows, index keys) that its work copies from: owned until that has ended, so that nobody writes to
    /// them meanwhile.
    pub(super) copied: Vec<PageCopy>,
}

/// How far its rows have come: see `accept` for what moves them on while it decodes.
#[derive(Debug, Default)]
pub(super) struct RowCounts {
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
}

/// Its steps between prepare and retire.
#[derive(Debug, Default)]
pub(super) struct SequenceSteps {
    /// Oldest first: the rows that it had enqueued before each.
    pub(super) in_flight: VecDeque<u64>,
    /// For life, from its first step on.
    pub(super) micro_batch: Option<MicroBatch>,
    /// The last call of prepare that named it.
    pub(super) attempt: u64,
}

/// What the host has issued for it beside its steps.
#[derive(Debug, Default)]
pub(super) struct HostWork {
    /// Its lane is not empty on the device, or may not be.
    pub(super) entered: bool,
    /// What is left of a warm-up's gather.
    pub(super) stretches: Option<Stretches>,
    /// The end of the last work.
    pub(super) ticket: Option<Ticket>,
    /// The stream on which work may stand that no ticket and no event tells the end of: see `settle`.
    pub(super) unsettled: Option<Stream>,
    /// Its last work is a step: the end of its micro-batch's last one stands behind it, and no event of its own.
    pub(super) stepped: bool,
}

impl Record {
    /// Its place in the device's tables.
    pub(super) fn lane(&self) -> u32 {
        self.owned.slots.lane
    }

    pub(super) fn is_open(&self, sequence: Sequence) -> bool {
        self.generation == sequence.generation && !matches!(self.state, State::Free | State::Closing)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.state != State::Free
    }

    /// Whether work that the host issued for it may still run.
    pub(super) fn has_ticket(&self) -> bool {
        self.work.ticket.as_ref().is_some_and(|t| t.poll().is_none())
    }

    /// The same, or work of a call that was refused half-way may.
    pub(super) fn is_working(&self) -> bool {
        self.has_ticket() || self.work.unsettled.is_some()
    }

    /// Nothing that names the sequence may be in flight.
    pub(super) fn check_idle(&self, operation: &'static str) -> Result<()> {
        if !self.steps.in_flight.is_empty() || self.has_ticket() {
            return Err(Error::new(Kind::Busy, operation)
                .at("work of the sequence is in flight")
                .with("steps", self.steps.in_flight.len() as u64));
        }
        Ok(())
    }

    /// Its last host-issued work, if it ended, ended well.
    pub(super) fn check_ticket(&self, operation: &'static str) -> Result<()> {
        let failed = |kind: Kind| Err(Error::new(Kind::DeviceFailed, operation).at(kind.describe()));
        match self.work.ticket.as_ref().and_then(Ticket::poll) {
            None | Some(Outcome::Done) => Ok(()),
            Some(Outcome::Failed(kind)) => failed(kind),
            Some(Outcome::Cancelled) => failed(Kind::Cancelled),
        }
    }

    /// A step of the sequence is retired; `length` is what it began with, if it was sound. What an older step
    /// has written that is still in flight may turn out to be worth nothing.
    pub(super) fn end_flight(&mut self, row: RowInFlight, length: Option<u32>) {
        let place = self.steps.in_flight.iter().position(|before| *before == row.enqueued_before);
        place.and_then(|place| self.steps.in_flight.remove(place));
        let Some(length) = length else { return };
        if place == Some(0) {
            self.rows.stored = self.rows.stored.max(length);
        }
        if self.steps.in_flight.is_empty() && self.state == State::Running {
            self.rows.stored = self.rows.committed;
        }
    }

    /// Whether the sequence is in one of these states, for a call that asks for them.
    pub(super) fn check_state(&self, states: &[State], operation: &'static str) -> Result<()> {
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
        Err(Error::new(Kind::InvalidState, operation).at(place).hint(hint))
    }
}
