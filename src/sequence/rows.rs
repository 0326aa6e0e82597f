//! Accepting drafts: the prepare of a sequence's next step says how many rows of its last step count.
//!
//! The next step's prepare accepts a step's drafts for two reasons. The engine has the count only then. And nothing
//! needs to happen earlier: the rows stay in landing slots, and in the total pool, until the next step overwrites the
//! landing slots. So the next step carries the count. Its first operation on the device, the commit in
//! [`PoolOp::Begin`](crate::device::PoolOp::Begin), copies the accepted rows from landing slots to slots and forgets
//! the others. Retiring a step reports its results and accepts nothing.
//!
//! | call | the host, here | the device |
//! |---|---|---|
//! | prepare of the next step | [`RowCounts::check_accepted`], [`RowCounts::begin_step`] | commits, expects new rows |
//! | retire of the next step | [`RowCounts::end_step`] takes the length that the step began with | has reported it |
//!
//! **An upper bound.** If only the device has the count ([`Accepted::OnDevice`]), every landed row may turn out to be
//! accepted until a report says otherwise. So `upper` is at least the length that steps in flight may commit, and
//! admission has reserved pages for it ([`RowCounts::check_reach`]).
//!
//! For a sequence without a next step, [`Cache::truncate`](crate::Cache::truncate) accepts the last rows up to the
//! given length.

use crate::device::descriptor::ACCEPTED_ON_DEVICE;
use crate::error::{Error, Kind, Result};
use crate::step::RowInFlight;

/// How many rows of a sequence's previous step were accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// The first this many rows; 0 for a sequence without a previous step.
    Rows(u32),
    /// The device's tensor of accepted counts has the number, at the index of the batch row. For a sequence
    /// without a previous step, or one that was truncated since, it must be 0; a dense cache does not read it then.
    OnDevice,
}

impl Accepted {
    /// The word in a step descriptor.
    pub(crate) const fn word(self) -> u32 {
        match self {
            Accepted::Rows(count) => count,
            Accepted::OnDevice => ACCEPTED_ON_DEVICE,
        }
    }
}

/// The counts of a sequence's rows. The module's head explains how they change while it decodes.
#[derive(Debug, Default)]
pub(crate) struct RowCounts {
    /// Committed tokens, as of the last report or truncation.
    pub(crate) committed: u32,
    /// Committed tokens that are stored: all steps and other work that wrote them succeeded. The work of the last
    /// ticket may still run.
    pub(crate) stored: u32,
    /// Rows that the last step wrote after the committed ones.
    pub(crate) landed: u32,
    /// An upper bound of committed and landed tokens, whatever the steps in flight accept.
    pub(crate) upper: u32,
    /// Rows enqueued over the whole life of the sequence.
    pub(crate) enqueued: u64,
}

impl RowCounts {
    /// Checks that enough rows have landed, or, for a count on the device, that there is a tensor (`is_tensor`).
    ///
    /// # Errors
    /// [`Kind::OutOfRange`], [`Kind::InvalidConfig`].
    pub(crate) fn check_accepted(&self, accepted: Accepted, is_tensor: bool) -> Result<()> {
        let error = |kind, place: &'static str, value: u32| {
            Err(Error::new(kind, "prepare").at(place).with("value", value))
        };
        match accepted {
            Accepted::Rows(count) if count > self.landed => error(Kind::OutOfRange, "accepted rows", count),
            Accepted::OnDevice if !is_tensor => error(Kind::InvalidConfig, "no tensor of accepted counts", 0),
            Accepted::Rows(_) | Accepted::OnDevice => Ok(()),
        }
    }

    /// The number of landed rows that the host can already count as rejected.
    fn rejected(&self, accepted: Accepted) -> u32 {
        match accepted {
            Accepted::Rows(count) => self.landed.saturating_sub(count),
            Accepted::OnDevice => 0,
        }
    }

    /// Checks that the sequence cannot outgrow `most` tokens in a step of `query_rows` rows: the tokens that it was
    /// `admitted` with, and the rows in flight.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub(crate) fn check_reach(
        &self,
        accepted: Accepted,
        query_rows: u32,
        most: u32,
        admitted: u32,
    ) -> Result<()> {
        let reach = self.reach(accepted, query_rows);
        if reach > u64::from(most) {
            return Err(Error::new(Kind::OutOfRange, "prepare")
                .at("the sequence outgrows its admitted tokens")
                .with("tokens", reach)
                .with("admitted", admitted)
                .hint("close it, or open it with more promised tokens"));
        }
        Ok(())
    }

    /// The most tokens that the sequence may have after a step of `query_rows` rows.
    pub(crate) fn reach(&self, accepted: Accepted, query_rows: u32) -> u64 {
        u64::from(self.upper) - u64::from(self.rejected(accepted)) + u64::from(query_rows)
    }

    /// Notes that a step of `query_rows` rows has begun, which commits the accepted rows. Returns the number of rows
    /// enqueued before it.
    pub(super) fn begin_step(&mut self, accepted: Accepted, query_rows: u32) -> u64 {
        let before = self.enqueued;
        self.enqueued += u64::from(query_rows);
        self.upper = self.upper - self.rejected(accepted) + query_rows;
        self.landed = query_rows;
        before
    }

    /// Notes that a step was retired. `length` is the number of committed tokens with which it began, from its report.
    pub(crate) fn end_step(&mut self, row: &RowInFlight, length: u32) {
        let since = (self.enqueued - row.enqueued_before).try_into().unwrap_or(u32::MAX);
        self.upper = self.upper.min(length.saturating_add(since));
        // Steps may be retired in any order; the step enqueued last determines the length of the sequence.
        if since == row.query_rows {
            self.committed = length;
            self.landed = row.query_rows;
        }
    }
}
