//! The list of rows to fetch: what a batch row's last resolve missed, and how much of it was gathered.
//!
//! A resolve fills it, each gather takes one attention wave's part, and the report checks that nothing is left. It
//! holds positions and slots and moves no bytes. All layers of an index group read the same list, each with a count of
//! its own of gathered waves.

use crate::device::StepRange;
use crate::device::descriptor::Cause;
use crate::device::host::errors::NAME;
use crate::error::Result;
use crate::fallible::filled;
use crate::geometry::GROUP_MAX;
use crate::residency::{Counts, Fetch, QueryRange, TableShape};

/// The rows that a batch row's last resolve missed. `range` and the step say which call they belong to. A gather for
/// another layer, or without a resolve in its step, must not copy rows into slots that were meant for others; and a
/// list that was never gathered must not count as resident rows.
#[derive(Debug)]
pub(super) struct List {
    pub(super) fetches: Vec<Fetch>,
    count: usize,
    /// The number of rows in scratch slots, which come first in the list.
    scratch: usize,
    /// Scratch slots of a lane: the rows in scratch slots that one wave fetches.
    share: usize,
    /// For each layer of the group, the number of waves that were gathered.
    gathered: [usize; GROUP_MAX as usize],
    pub(super) lane: u32,
    /// The layer that was resolved, and the layers of its group.
    layer: usize,
    members: usize,
    rows: QueryRange,
    step: u64,
}

impl List {
    /// An empty list with room for `selected` rows.
    pub(super) fn with_room(selected: usize) -> Result<List> {
        let fetches = filled(selected, Fetch { position: 0, slot: 0 }, NAME, "a batch row's list")?;
        let rows = QueryRange { first: 0, count: 0 };
        Ok(List {
            fetches,
            count: 0,
            scratch: 0,
            share: 0,
            gathered: [0; GROUP_MAX as usize],
            lane: 0,
            layer: 0,
            members: 1,
            rows,
            step: 0,
        })
    }

    /// Starts the list of a resolve of `range`, for `members` layers, with no misses yet.
    pub(super) fn begin(&mut self, range: &StepRange, members: usize, step: u64) {
        (self.count, self.scratch, self.gathered) = (0, 0, [0; GROUP_MAX as usize]);
        (self.layer, self.members) = (range.layer.index(), members.min(GROUP_MAX as usize));
        (self.rows, self.step) = (range.rows, step);
    }

    /// Sets the number of rows to fetch.
    pub(super) fn missed(&mut self, counts: &Counts, shape: &TableShape) {
        self.count = counts.misses as usize;
        (self.scratch, self.share) = (counts.scratch as usize, shape.scratch as usize);
    }

    /// The rows to fetch, and how many of them are in scratch slots (these come first).
    pub(super) fn fetched(&self) -> (&[Fetch], usize) {
        (&self.fetches[..self.count], self.scratch)
    }

    /// Checks that a gather of wave `wave` in `range` may take its part: that the list is that of the layer's group,
    /// and that the earlier waves were gathered. If so, notes that this one is.
    pub(super) fn take(&mut self, range: &StepRange, wave: usize, step: u64) -> Result<(), Cause> {
        let place = range.layer.index().checked_sub(self.layer).filter(|place| *place < self.members);
        let same = (self.rows, self.step) == (range.rows, step);
        match place.and_then(|place| self.gathered.get_mut(place)).filter(|_| same) {
            None => Err(Cause::NotGathered),
            Some(gathered) if wave > *gathered => Err(ungathered(*gathered)),
            Some(gathered) => {
                *gathered = (*gathered).max(wave + 1);
                Ok(())
            }
        }
    }

    /// The error of step `step` if it ends now, if a layer's rows were not all gathered, and the first such layer. A
    /// layer of which nothing was gathered comes before one that only lacks a wave, since it has rows by its tables
    /// that have no bytes.
    pub(super) fn missing(&self, step: u64) -> Option<(usize, Cause)> {
        let waves = self.scratch.div_ceil(self.share.max(1)).max(1);
        let is_due = self.step == step && self.count > 0;
        let layers = (self.layer..).zip(&self.gathered).take(if is_due { self.members } else { 0 });
        let lacks = |least: usize| layers.clone().find(|(_, gathered)| **gathered < least);
        lacks(1).or_else(|| lacks(waves)).map(|(layer, gathered)| (layer, ungathered(*gathered)))
    }

    /// The rows that wave `wave` fetches: its part of the rows in scratch slots and, in the first wave, all others.
    pub(super) fn of_wave(&self, wave: usize) -> [&[Fetch]; 2] {
        let share = wave.saturating_mul(self.share).min(self.scratch);
        let away = &self.fetches[share..share.saturating_add(self.share).min(self.scratch)];
        let kept = if wave == 0 { self.scratch..self.count } else { 0..0 };
        [away, &self.fetches[kept]]
    }
}

/// The error of a list that was not fully gathered. The first wave fetches all rows that stay resident.
fn ungathered(gathered: usize) -> Cause {
    if gathered == 0 { Cause::NotGathered } else { Cause::WaveNotGathered }
}
