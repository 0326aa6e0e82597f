//! The steps of a sequence between prepare and retire.
//!
//! | call | what changes |
//! |---|---|
//! | prepare, while it checks | [`SequenceSteps::check_next`] and [`SequenceSteps::check_named`]: a mark of the call |
//! | prepare, once begun | [`SequenceSteps::begin_flight`]: the step is in flight; its rows are counted |
//! | finish | `open`: the next step of the micro-batch may be prepared |
//! | retire | [`SequenceSteps::end_flight`]: it is not in flight; more rows count as stored |
//!
//! **Order.** Steps may be retired in any order, so a list holds them, oldest first, by the rows enqueued before each.
//! The oldest alone shows that the rows before it are stored. An older step that is still in flight may yet fail, and
//! then the rows of later steps are invalid.

use std::collections::VecDeque;

use crate::error::{Error, Kind, Result};
use crate::ids::MicroBatch;
use crate::sequence::BatchRow;
use crate::sequence::rows::RowCounts;
use crate::step::RowInFlight;

/// The steps of a sequence between prepare and retire.
#[derive(Debug, Default)]
pub(crate) struct SequenceSteps {
    /// For each step, oldest first, the number of rows enqueued before it.
    in_flight: VecDeque<u64>,
    /// Its micro-batch, which never changes after the first step.
    pub(crate) micro_batch: Option<MicroBatch>,
    /// Whether a step of it is prepared and not finished. Its micro-batch has at most one such step.
    pub(crate) open: bool,
    /// The number of the last `prepare` call that named it.
    attempt: u64,
}

impl SequenceSteps {
    /// No steps, with room for `most`.
    pub(crate) fn with_room(most: u32) -> SequenceSteps {
        SequenceSteps { in_flight: VecDeque::with_capacity(most as usize), ..SequenceSteps::default() }
    }

    /// The number of steps in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether no earlier step of the sequence is in flight.
    pub(crate) fn is_oldest(&self, row: &RowInFlight) -> bool {
        self.in_flight.front().is_none_or(|before| *before == row.enqueued_before)
    }

    /// Checks that the sequence may be in one more step of `micro_batch`, with `most` in flight at the same time.
    ///
    /// # Errors
    /// [`Kind::InvalidState`], [`Kind::Busy`].
    pub(crate) fn check_next(&self, micro_batch: MicroBatch, most: u32) -> Result<()> {
        if self.micro_batch.is_some_and(|own| own != micro_batch) {
            return Err(Error::new(Kind::InvalidState, "prepare")
                .at("a sequence of another micro-batch")
                .with("value", micro_batch.0)
                .hint("a sequence keeps the micro-batch of its first step"));
        }
        if self.in_flight.len() >= most as usize {
            return Err(Error::new(Kind::Busy, "prepare")
                .at("steps of one sequence in flight")
                .with("value", most));
        }
        Ok(())
    }

    /// Checks that the `prepare` call number `attempt` has not named the sequence before its batch row `row`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`].
    pub(crate) fn check_named(&mut self, attempt: u64, row: usize) -> Result<()> {
        if std::mem::replace(&mut self.attempt, attempt) == attempt {
            return Err(Error::new(Kind::InvalidConfig, "prepare")
                .at("a sequence is named twice")
                .with("batch row", row as u64));
        }
        Ok(())
    }

    /// Notes that a step of `micro_batch` has begun, in which the sequence is the batch row `row`.
    // A prepare calls this for each batch row. Not inlined, it added about 0.9 us to a step of 160 rows (bench `host`).
    #[inline]
    pub(crate) fn begin_flight(
        &mut self,
        rows: &mut RowCounts,
        row: &BatchRow,
        micro_batch: MicroBatch,
    ) -> RowInFlight {
        let enqueued_before = rows.begin_step(row.accepted, row.query_rows);
        self.in_flight.push_back(enqueued_before);
        self.micro_batch = Some(micro_batch);
        self.open = true;
        RowInFlight { sequence: row.sequence.index, enqueued_before, query_rows: row.query_rows }
    }

    /// Notes that a step is retired. `length` is the committed length that the step began with, if it succeeded.
    /// `running` says that no step of the sequence has failed.
    pub(crate) fn end_flight(
        &mut self,
        rows: &mut RowCounts,
        row: RowInFlight,
        length: Option<u32>,
        running: bool,
    ) {
        let place = self.in_flight.iter().position(|before| *before == row.enqueued_before);
        place.and_then(|place| self.in_flight.remove(place));
        let Some(length) = length else { return };
        if place == Some(0) {
            rows.stored = rows.stored.max(length);
        }
        if self.in_flight.is_empty() && running {
            rows.stored = rows.committed;
        }
    }
}
