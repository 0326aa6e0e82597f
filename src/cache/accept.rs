//! Accepting drafts: how many rows of a sequence's last step count is said when its next step is prepared.
//!
//! A step's drafts are accepted by the next step's prepare, because only then is it known how many they are, and
//! because there is nothing to do before: its rows stand in landing slots, and in the total pool, until the next step
//! writes the landing slots anew. So the count travels with the next step, and its first operation on the device, the
//! commit in [`PoolOp::Begin`](crate::device::PoolOp::Begin), copies what was accepted from landing slots to slots and
//! forgets the rest. A retirement tells the tokens of its own step and accepts nothing.
//!
//! | | the host, here | the device |
//! |---|---|---|
//! | prepare of the next | [`RowCounts::check_accepted`], [`RowCounts::begin_step`] | commits, expects new rows |
//! | retire of that one | [`RowCounts::end_step`]: the length that it began with | has reported it |
//!
//! **What the host does not know it bounds.** Where the device has the count ([`Accepted::OnDevice`]), every landed
//! row may be accepted as long as no report says otherwise. So `upper` never falls short of what steps in flight may
//! commit, and admission has reserved pages for it ([`RowCounts::reach`]).
//!
//! A sequence that makes no further step has its last rows accepted by [`Cache::truncate`](crate::Cache::truncate)
//! to the length that is meant.

use crate::cache::record::RowCounts;
use crate::device::descriptor::ACCEPTED_ON_DEVICE;
use crate::error::{Error, Kind, Result};
use crate::step::RowInFlight;

/// How many rows of a sequence's previous step were accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// So many; 0 for a sequence without a previous step.
    Rows(u32),
    /// The device's tensor of accepted counts says it, in the batch row's place: 0 for a sequence without
    /// a previous step, or one that was rolled back since.
    OnDevice,
}

impl Accepted {
    /// As a step descriptor has it.
    pub(super) const fn word(self) -> u32 {
        match self {
            Accepted::Rows(count) => count,
            Accepted::OnDevice => ACCEPTED_ON_DEVICE,
        }
    }
}

impl RowCounts {
    /// Whether so many rows have landed, or the device will be asked and there `is_tensor` to ask.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`], [`Kind::InvalidConfig`].
    pub(super) fn check_accepted(&self, accepted: Accepted, is_tensor: bool) -> Result<()> {
        let error = |kind, place: &'static str, value: u32| {
            Err(Error::new(kind, "prepare").at(place).with("value", value))
        };
        match accepted {
            Accepted::Rows(count) if count > self.landed => error(Kind::OutOfRange, "accepted rows", count),
            Accepted::OnDevice if !is_tensor => error(Kind::InvalidConfig, "no tensor of accepted counts", 0),
            Accepted::Rows(_) | Accepted::OnDevice => Ok(()),
        }
    }

    /// Landed rows of which the host knows that they were rejected.
    fn rejected(&self, accepted: Accepted) -> u32 {
        match accepted {
            Accepted::Rows(count) => self.landed.saturating_sub(count),
            Accepted::OnDevice => 0,
        }
    }

    /// How many tokens the sequence may have behind a step of `query_rows` rows.
    pub(super) fn reach(&self, accepted: Accepted, query_rows: u32) -> u64 {
        u64::from(self.upper) - u64::from(self.rejected(accepted)) + u64::from(query_rows)
    }

    /// A step of `query_rows` rows has begun, which commits what was accepted. Answers the rows that were enqueued
    /// before it.
    pub(super) fn begin_step(&mut self, accepted: Accepted, query_rows: u32) -> u64 {
        let before = self.enqueued;
        self.enqueued += u64::from(query_rows);
        self.upper = self.upper - self.rejected(accepted) + query_rows;
        self.landed = query_rows;
        before
    }

    /// A step was retired whose report says with how many committed tokens it began.
    pub(super) fn end_step(&mut self, row: &RowInFlight, length: u32) {
        let since = (self.enqueued - row.enqueued_before).try_into().unwrap_or(u32::MAX);
        self.upper = self.upper.min(length.saturating_add(since));
        // Steps may be retired in any order; the last one enqueued says how long the sequence is.
        if since == row.query_rows {
            self.committed = length;
            self.landed = row.query_rows;
        }
    }
}
