//! The cache's record of one sequence.
//!
//! The cache makes a table with one record for each lane, each parked and each arriving sequence. A record is reused
//! after its sequence is gone; the generation distinguishes the handles. The parts of a record change at different
//! times:
//!
//! - `admitted` changes with `extend` and, while the prompt is not complete, with `truncate`; its slots with `resize`.
//! - The resources in `owned` are freed when the last work that names them has ended.
//! - The counts in `filled` and `keys` change with the prompt, and `shared` when the sequence becomes shorter.
//! - The counts in `rows` change with each step and with each retirement.
//! - `steps` and `work` record which work may still run: that of steps, and that of other calls.

use crate::cache::places::Place;
use crate::device::{Outcome, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::ids::{MicroBatch, Sequence};
use crate::sequence::{BlockHashes, RowCounts, SequenceSteps};
use crate::sparse::{BringUp, Holding, Stretches};
use crate::step::RowInFlight;
use crate::total::PageTable;

/// The state of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Free,
    Arriving,
    Filling,
    Parked,
    Warming,
    Joining,
    Running,
    Truncating,
    Failed,
    Closing,
}

impl State {
    /// The states in which a sequence is a prompt.
    pub(super) const PROMPTS: [State; 3] = [State::Arriving, State::Filling, State::Parked];
    /// The states in which rows of a prompt come.
    pub(super) const FILLED: [State; 4] = [State::Arriving, State::Filling, State::Parked, State::Warming];
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) state: State,
    pub(super) generation: u32,
    /// How many sequences the cache had opened before it.
    pub(super) opened: u64,
    pub(super) admitted: Admitted,
    pub(super) owned: Owned,
    /// The number of prompt rows appended, for each layer.
    pub(super) filled: Vec<u32>,
    /// The number of the prompt's index keys in place, for each index group. Empty where the cache does not count them:
    /// if the sequence did not arrive, and in a model without index keys. While it runs they stay behind.
    pub(super) keys: Vec<u32>,
    /// The leading tokens whose pages it shares since it was opened. Nothing may write there.
    pub(super) shared: u32,
    pub(super) rows: RowCounts,
    /// Its steps between prepare and retire.
    pub(super) steps: SequenceSteps,
    pub(super) work: HostWork,
}

/// The sizes that a sequence was admitted with.
#[derive(Clone, Debug, Default)]
pub(super) struct Admitted {
    /// Tokens of the prompt: those that it has before it joins.
    pub(super) prompt: u32,
    /// Prompt and promised tokens.
    pub(super) tokens: u32,
    pub(super) bring_up: BringUp,
    /// The slots of each index group that the engine asked for, also those beyond the tokens.
    pub(super) asked: Vec<u32>,
    /// The ratio that gave them, if it was one.
    pub(super) ratio: Option<f64>,
}

/// The pool memory that a sequence holds until its end.
#[derive(Debug, Default)]
pub(super) struct Owned {
    pub(super) table: PageTable,
    /// Its lane, and its slots in each layer.
    pub(super) slots: Holding,
    /// With shared budgets, the slots of each layer that it was promised; else empty.
    pub(super) least: Vec<u32>,
    /// With shared budgets, the length from which on it asks for slots again.
    pub(super) asks_at: u32,
    /// The block hashes of its published pages; none if its token ids are unknown.
    pub(super) hashes: Option<BlockHashes>,
    /// Pages (rows, index keys) that its work copies from. The sequence owns them until that work has ended, so that
    /// no other sequence writes to them meanwhile.
    pub(super) copied: Vec<PageCopy>,
    /// The place in which its newest rows are noted, from a park to the end of the next join.
    pub(super) place: Option<Place>,
}

/// A copy of one page's rows and index keys to another page, in every layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCopy {
    pub(super) from: (u32, u32),
    pub(super) to: (u32, u32),
}

/// How far a layer's warm-up is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Warmed {
    #[default]
    Cold,
    /// The device decides which rows are resident. Nothing gathers them yet.
    Decided,
    Gathered,
}

/// The work that the host has issued for it outside its steps.
#[derive(Debug, Default)]
pub(super) struct HostWork {
    /// Whether its lane may hold rows on the device.
    pub(super) entered: bool,
    /// The remaining stretches of a warm-up's gather.
    pub(super) stretches: Option<Stretches>,
    /// How far each layer's warm-up is, of a sequence that joined early; else empty.
    pub(super) warmed: Vec<Warmed>,
    /// The ticket of the last work.
    pub(super) ticket: Option<Ticket>,
    /// A stream that may hold work without a ticket or an event after it: see `settle`.
    pub(super) unsettled: Option<Stream>,
    /// Whether the host has staged lists for a resize that may not have run: see `resize`.
    pub(super) staged: bool,
    /// The rows that were enqueued before the last work outside its steps.
    pub(super) issued_at: u64,
    /// Whether a step that was prepared after that work has been retired. Then the device has run the work.
    pub(super) covered: bool,
    /// Whether its last work is a step. Then the `stepped` event of its micro-batch comes after that work, and the
    /// sequence has no event of its own.
    pub(super) stepped: bool,
}

impl Admitted {
    /// The slots of each index group for at most `reach` tokens: more would never be used.
    pub(super) fn budgets(&self, reach: u32) -> Vec<u32> {
        self.asked.iter().map(|slots| (*slots).min(reach)).collect()
    }
}

impl Record {
    /// Its index in the device's residency tables.
    pub(super) fn lane(&self) -> u32 {
        self.owned.slots.lane
    }

    pub(super) fn is_open(&self, sequence: Sequence) -> bool {
        self.generation == sequence.generation && self.is_alive()
    }

    /// Whether it is taken and not closed.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.state, State::Free | State::Closing)
    }

    pub(super) fn is_taken(&self) -> bool {
        self.state != State::Free
    }

    /// Whether it is a prompt: it has not joined, or not since it was parked.
    pub(super) fn is_prompt(&self) -> bool {
        State::PROMPTS.contains(&self.state)
    }

    /// Whether others than forebay may be writing rows or index keys of its prompt.
    pub(super) fn is_filled(&self) -> bool {
        State::FILLED.contains(&self.state)
    }

    /// Notes that every row of its prompt is there, and that the lane has them or gathers them.
    pub(super) fn has_prompt(&mut self) {
        let prompt = self.admitted.prompt;
        (self.rows.committed, self.rows.stored, self.rows.upper) = (prompt, prompt, prompt);
    }

    /// Notes that it has joined.
    pub(super) fn run(&mut self) {
        self.state = State::Running;
        self.work.warmed.clear();
    }

    /// Whether it takes one of the places of arriving sequences: it has neither a lane nor a place of a parked one.
    pub(super) fn is_arrival(&self) -> bool {
        self.is_taken() && !self.owned.slots.has_lane() && self.owned.place.is_none()
    }

    /// Whether it has slots. With shared budgets it has none before it joins.
    pub(super) fn has_slots(&self) -> bool {
        self.owned.slots.budgets.iter().any(|budget| *budget > 0)
    }

    /// Whether a share may change its budgets: it runs, and the device has run its last work outside of steps.
    pub(super) fn takes_share(&self) -> bool {
        self.state == State::Running && self.work.covered
    }

    /// Whether its budgets may change, by a call for `micro_batch` or for all. It depends on calls alone.
    pub(super) fn takes_resizes(&self, micro_batch: Option<MicroBatch>) -> bool {
        let other = self.steps.micro_batch.zip(micro_batch).is_some_and(|(own, asked)| own != asked);
        self.state == State::Running && !self.steps.open && !other && self.has_slots()
    }

    /// Whether work that the host issued for it may still run.
    pub(super) fn has_ticket(&self) -> bool {
        self.work.ticket.as_ref().is_some_and(|t| t.poll().is_none())
    }

    /// Whether such work, or the work of a call that was refused half-way, may still run.
    pub(super) fn is_working(&self) -> bool {
        self.has_ticket() || self.work.unsettled.is_some()
    }

    /// Notes that work outside its steps is enqueued and ordered: a later step, and work on other streams, follows it.
    pub(super) fn note_work(&mut self) {
        (self.work.unsettled, self.work.stepped) = (None, false);
        self.note_issued();
    }

    /// Notes that work outside its steps is enqueued.
    pub(super) fn note_issued(&mut self) {
        (self.work.covered, self.work.issued_at) = (false, self.rows.enqueued);
    }

    /// Checks that every layer has the whole prompt.
    pub(super) fn check_prompt(&self, operation: &'static str) -> Result<()> {
        (0..self.filled.len()).try_for_each(|layer| self.check_rows(operation, layer))
    }

    /// Checks that a layer has the whole prompt.
    pub(super) fn check_rows(&self, operation: &'static str, layer: usize) -> Result<()> {
        let (filled, prompt) = (self.filled.get(layer).copied().unwrap_or(0), self.admitted.prompt);
        if filled == prompt {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidState, operation)
            .at("the prompt of a layer is incomplete")
            .with("layer", layer as u64)
            .with("filled", filled)
            .with("prompt", prompt))
    }

    /// Checks that an index group has the index keys of the whole prompt, if the cache counts them. `layer` is the
    /// group's first.
    pub(super) fn check_keys(&self, operation: &'static str, group: usize, layer: usize) -> Result<()> {
        let prompt = self.admitted.prompt;
        match self.keys.get(group).filter(|placed| **placed != prompt) {
            Some(placed) => Err(Error::new(Kind::InvalidState, operation)
                .at("the index keys of a layer are incomplete")
                .with("layer", layer as u64)
                .with("placed", *placed)
                .with("prompt", prompt)
                .hint("an indexer that reads keys which never came selects nonsense: place them first")),
            None => Ok(()),
        }
    }

    /// Checks that the sequence has a lane.
    pub(super) fn check_lane(&self, operation: &'static str) -> Result<()> {
        if self.owned.slots.has_lane() { Ok(()) } else { self.check_state(&[], operation) }
    }

    /// Checks that no work that names the sequence is in flight.
    pub(super) fn check_idle(&self, operation: &'static str) -> Result<()> {
        if self.steps.in_flight() > 0 || self.has_ticket() {
            return Err(Error::new(Kind::Busy, operation)
                .at("work of the sequence is in flight")
                .with("steps", self.steps.in_flight() as u64));
        }
        Ok(())
    }

    /// Checks that its last host-issued work did not fail.
    pub(super) fn check_ticket(&self, operation: &'static str) -> Result<()> {
        let failed = |kind: Kind| Err(Error::new(Kind::DeviceFailed, operation).at(kind.describe()));
        match self.work.ticket.as_ref().and_then(Ticket::poll) {
            None | Some(Outcome::Done) => Ok(()),
            Some(Outcome::Failed(kind)) => failed(kind),
            Some(Outcome::Cancelled) => failed(Kind::Cancelled),
        }
    }

    /// Notes that a step of the sequence is retired: see [`SequenceSteps::end_flight`].
    pub(super) fn end_flight(&mut self, row: RowInFlight, length: Option<u32>) {
        if row.enqueued_before >= self.work.issued_at {
            (self.work.covered, self.work.staged) = (true, false);
        }
        self.steps.end_flight(&mut self.rows, row, length, self.state == State::Running);
    }

    /// Checks that the sequence is in one of the states that a call allows.
    pub(super) fn check_state(&self, states: &[State], operation: &'static str) -> Result<()> {
        if states.contains(&self.state) {
            return Ok(());
        }
        let place = match self.state {
            State::Arriving => "the sequence is arriving",
            State::Filling => "the prompt is not complete, or the sequence has not joined",
            State::Parked => "the sequence is parked",
            State::Warming => "the sequence joined early, and some layers are not warmed up",
            State::Joining => "the warm-up is not complete",
            State::Running => "the sequence is decoding",
            State::Truncating => "the device refused a truncate half-way",
            State::Failed => "a step of the sequence failed",
            State::Free | State::Closing => "the sequence is closed",
        };
        let hint = match self.state {
            State::Arriving => "join it when rows and index keys of every layer are in place",
            State::Filling => "append the prompt in every layer, then join",
            State::Parked => "resume it",
            State::Warming => "call warm_layer for every layer",
            State::Joining => "call join_more until the warm-up is complete",
            State::Running => "append and extend before it joins, or while it is parked",
            State::Truncating => "truncate it again, or close it",
            State::Failed => "truncate it to a committed length, or close it",
            State::Free | State::Closing => "open a new sequence",
        };
        Err(Error::new(Kind::InvalidState, operation).at(place).hint(hint))
    }
}
