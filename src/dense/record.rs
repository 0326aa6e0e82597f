//! The cache's record of one sequence.
//!
//! The cache makes a table with one record for each sequence that may be open. A record is reused after its sequence is
//! gone; the generation distinguishes the handles. The index of the record is the sequence's lane: its row in the
//! pinned page tables, and its place in the device's table of lengths.
//!
//! **Lengths.** `rows` counts what steps and truncations commit (`sequence::rows` explains accepted drafts). Two more
//! numbers depend on it:
//!
//! - `start` is the committed length with which the last step began, if the host knows it. Then the next step's
//!   descriptor states a length, whatever the device holds. It is unknown from a count on the device to the next
//!   retirement.
//! - `floor` is a position that every later query is at or beyond. The pages before its window can be given back.

use crate::dense::held::Held;
use crate::dense::line::Coming;
use crate::dense::named::Named;
use crate::dense::pool::Need;
use crate::device::{Outcome, Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::ids::Sequence;
use crate::sequence::{Accepted, RowCounts, SequenceSteps};
use crate::step::RowInFlight;

/// The state of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Free,
    Arriving,
    Running,
    Truncating,
    Parked,
    Failed,
    Closing,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) state: State,
    pub(super) generation: u32,
    /// How many sequences the cache had opened before it.
    pub(super) opened: u64,
    /// Tokens of the prompt.
    pub(super) prompt: u32,
    /// Prompt and promised tokens.
    pub(super) tokens: u32,
    /// Its pages in each group.
    pub(super) held: Vec<Held>,
    /// How often its page tables have changed other than at their ends.
    pub(super) epoch: u32,
    /// Pages that a copy for this sequence reads, with their groups. It owns them until the copy has ended, so that no
    /// other sequence writes to them meanwhile.
    pub(super) copied: Vec<Copied>,
    /// What has come of it, while it arrives.
    pub(super) arriving: Arriving,
    /// Its pages while it is parked, by group and block.
    pub(super) parked: Vec<Parked>,
    /// The block hashes of its published pages; none if its token ids are unknown.
    pub(super) names: Option<Named>,
    /// Whether it may hold pages that no query reads any more.
    pub(super) leaves: bool,
    /// The number of the last copy down that touched a page which it took, or whose rows change: its work comes after
    /// that.
    pub(super) after: u64,
    /// The copies up with which its last pages come; none once a step waits for them. They are then the last work that
    /// the host has issued for the sequence.
    pub(super) coming: Coming,
    pub(super) rows: RowCounts,
    pub(super) start: Option<u32>,
    pub(super) floor: u32,
    pub(super) steps: SequenceSteps,
    /// The rows that were enqueued before its first failed step; the steps behind that one fail too.
    pub(super) failed_at: Option<u64>,
    pub(super) work: HostWork,
}

/// How the rows of a sequence that arrives come to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The transfer writes them to the device pages of the sequence.
    #[default]
    Direct,
    /// The transfer writes them to pages of the host's tier, and the cache copies each layer up
    /// ([`Cache::bring_layer`](crate::dense::Cache::bring_layer)).
    Host,
}

/// What has come of a sequence that arrives.
#[derive(Debug, Default)]
pub(super) struct Arriving {
    pub(super) way: Way,
    /// Leading pages that the cache had: nothing is written to them.
    pub(super) shared: u32,
    /// Of each layer how many rows are in place.
    pub(super) filled: Vec<u32>,
    /// Through the host, of each layer the number of the copy that brings it up, once that is enqueued; 0 for one
    /// without pages.
    pub(super) brought: Vec<Option<u64>>,
    /// Through the host, for each group its host pages and the device pages that they are copied to, by block.
    pub(super) pairs: Vec<Vec<(u32, u32)>>,
}

impl Arriving {
    /// How many host pages it has in a group.
    pub(super) fn host_pages(&self, group: usize) -> u32 {
        self.pairs.get(group).map_or(0, |pairs| pairs.len() as u32)
    }

    /// Rows that every layer has.
    pub(super) fn whole(&self) -> u32 {
        self.filled.iter().copied().min().unwrap_or(0)
    }
}

/// A page that is copied to another page of its group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copied {
    pub(super) group: usize,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// Where a page of a parked sequence is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parked {
    pub(super) group: usize,
    pub(super) block: u32,
    pub(super) host: u32,
    /// Whether the host page is the sequence's own. Otherwise it is that of the published block, and kept.
    pub(super) own: bool,
}

/// The work that the host has issued for it outside its steps.
#[derive(Debug, Default)]
pub(super) struct HostWork {
    /// The ticket of the last work.
    pub(super) ticket: Option<Ticket>,
    /// A stream that may hold work without a ticket or an event after it: see `settle`.
    pub(super) unsettled: Option<Stream>,
    /// Whether its last work is a step. Then the `stepped` event of its micro-batch comes after that work.
    pub(super) stepped: bool,
}

impl Record {
    /// A sequence that was just opened.
    pub(super) fn new(generation: u32, opened: u64, tokens: (u32, u32), steps_in_flight: u32) -> Record {
        Record {
            state: State::Running,
            generation,
            opened,
            prompt: tokens.0,
            tokens: tokens.1,
            start: Some(0),
            steps: SequenceSteps::with_room(steps_in_flight),
            ..Record::default()
        }
    }

    pub(super) fn is_open(&self, sequence: Sequence) -> bool {
        self.generation == sequence.generation && !matches!(self.state, State::Free | State::Closing)
    }

    /// Whether it is parked and has no device pages.
    pub(super) fn is_away(&self) -> bool {
        self.state == State::Parked && self.held.iter().all(|held| held.need() == Need::default())
    }

    pub(super) fn is_taken(&self) -> bool {
        self.state != State::Free
    }

    /// Whether work that the host issued for it may still run.
    pub(super) fn has_ticket(&self) -> bool {
        self.work.ticket.as_ref().is_some_and(|ticket| ticket.poll().is_none())
    }

    /// Whether such work, or the work of a call that was refused half-way, may still run.
    pub(super) fn is_working(&self) -> bool {
        self.has_ticket() || self.work.unsettled.is_some()
    }

    /// The committed length with which its next step begins, if the host knows it. Without landed rows there is nothing
    /// to accept, whatever a count on the device says.
    pub(super) fn next_start(&self, accepted: Accepted) -> Option<u32> {
        match (self.rows.landed, accepted) {
            (0, _) => self.start,
            (_, Accepted::Rows(count)) => self.start.and_then(|start| start.checked_add(count)),
            (_, Accepted::OnDevice) => None,
        }
    }

    /// The lowest position of its next step's queries and of the queries in flight.
    pub(super) fn next_floor(&self, accepted: Accepted) -> u32 {
        match self.next_start(accepted) {
            Some(start) if self.steps.in_flight() == 0 => self.floor.max(start),
            _ => self.floor,
        }
    }

    /// Notes that a step has been retired that began with `length` committed tokens, if its report was read. `sound`
    /// says whether it succeeded. A step of more than `query_rows` rows is a chunk of a prompt, all of whose rows are
    /// accepted.
    pub(super) fn end_step(&mut self, row: RowInFlight, length: Option<u32>, sound: bool, query_rows: u32) {
        // The rows of a step behind a failed one are as wrong as those of the failed one.
        let length = length.filter(|_| !self.failed_before(&row));
        if let Some(length) = length {
            let last = self.rows.enqueued == row.enqueued_before + u64::from(row.query_rows);
            self.rows.end_step(&row, length);
            let chunk = if sound && row.query_rows > query_rows { row.query_rows } else { 0 };
            self.floor = self.floor.max(length.saturating_add(chunk));
            if last {
                self.start = Some(length);
            }
            if !sound {
                (self.rows.committed, self.floor) = (length, self.floor.min(length));
            }
        }
        let running = self.state == State::Running;
        self.steps.end_flight(&mut self.rows, row, length.filter(|_| sound), running);
        if let Some(chunk) = length.filter(|_| sound && row.query_rows > query_rows) {
            self.rows.stored = self.rows.stored.max(chunk.saturating_add(row.query_rows));
        }
        if !sound {
            self.fail(row);
        }
    }

    /// Notes that a step has failed, or was abandoned: no step may build on its rows.
    pub(super) fn fail(&mut self, row: RowInFlight) {
        if self.state == State::Running {
            self.state = State::Failed;
        }
        let before = row.enqueued_before;
        self.failed_at = Some(self.failed_at.map_or(before, |first| first.min(before)));
    }

    /// Whether a step before this one has failed.
    pub(super) fn failed_before(&self, row: &RowInFlight) -> bool {
        self.failed_at.is_some_and(|first| first < row.enqueued_before)
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

    /// Checks that the sequence is in one of the states that a call allows.
    pub(super) fn check_state(&self, states: &[State], operation: &'static str) -> Result<()> {
        if states.contains(&self.state) {
            return Ok(());
        }
        let (place, hint) = match self.state {
            State::Running => (
                "the sequence is running",
                "only one that arrives joins or is aborted, and only a parked one is resumed",
            ),
            State::Arriving => (
                "the sequence is arriving",
                "join it when all layers have all rows; abort it if others may still write to its pages, else close it",
            ),
            State::Parked => ("the sequence is parked", "resume it, or close it"),
            State::Truncating => ("the device refused a truncate half-way", "truncate it again, or close it"),
            State::Failed => {
                ("a step of the sequence failed", "truncate it to a committed length, or close it")
            }
            State::Free | State::Closing => ("the sequence is closed", "open a new sequence"),
        };
        Err(Error::new(Kind::InvalidState, operation).at(place).hint(hint))
    }
}
