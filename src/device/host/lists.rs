//! The output of a resolve: index lists for split attention, and lists of fetches for the gather.

use crate::device::descriptor::Cause;
use crate::device::host::pools::{HostPools, NAME};
use crate::device::host::words::Words;
use crate::device::{SplitIndices, StepRange};
use crate::error::Result;
use crate::fallible::filled;
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
    /// The number of waves that were gathered.
    pub(super) gathered: usize,
    pub(super) lane: u32,
    pub(super) layer: usize,
    rows: QueryRange,
    step: u64,
}

impl List {
    /// An empty list with room for `selected` rows.
    pub(super) fn with_room(selected: usize) -> Result<List> {
        let fetches = filled(selected, Fetch { position: 0, slot: 0 }, NAME, "a batch row's list")?;
        let rows = QueryRange { first: 0, count: 0 };
        Ok(List { fetches, count: 0, scratch: 0, share: 0, gathered: 0, lane: 0, layer: 0, rows, step: 0 })
    }

    /// Starts the list of a resolve of `range`, with no misses yet.
    pub(super) fn begin(&mut self, range: &StepRange, step: u64) {
        (self.count, self.scratch, self.gathered) = (0, 0, 0);
        (self.layer, self.rows, self.step) = (range.layer.index(), range.rows, step);
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

    pub(super) fn is_of(&self, range: &StepRange, step: u64) -> bool {
        (self.layer, self.rows, self.step) == (range.layer.index(), range.rows, step)
    }

    /// The error of step `step` if it ends now, if its rows were not all gathered.
    pub(super) fn missing(&self, step: u64) -> Option<Cause> {
        let waves = self.scratch.div_ceil(self.share.max(1)).max(1);
        (self.step == step && self.count > 0 && self.gathered < waves).then(|| self.ungathered())
    }

    /// The error of a list that was not fully gathered. The first wave fetches all rows that stay resident.
    pub(super) fn ungathered(&self) -> Cause {
        if self.gathered == 0 { Cause::NotGathered } else { Cause::WaveNotGathered }
    }

    /// The rows that wave `wave` fetches: its part of the rows in scratch slots and, in the first wave, all others.
    pub(super) fn of_wave(&self, wave: usize) -> [&[Fetch]; 2] {
        let share = wave.saturating_mul(self.share).min(self.scratch);
        let away = &self.fetches[share..share.saturating_add(self.share).min(self.scratch)];
        let kept = if wave == 0 { self.scratch..self.count } else { 0..0 };
        [away, &self.fetches[kept]]
    }
}

/// The index lists of a step's batch rows, see [`SplitIndices`].
pub(super) struct Lists<'a> {
    entries: Words<'a, i32>,
    counts: Words<'a, u32>,
    lists: usize,
    batch: usize,
    rows: usize,
    k: usize,
}

impl<'a> Lists<'a> {
    /// The lists of a call for `range`.
    pub(super) fn new(pools: &'a HostPools, range: &StepRange, split_indices: SplitIndices) -> Lists<'a> {
        Lists {
            entries: pools.words(split_indices.lists),
            counts: pools.words(split_indices.counts),
            lists: 1 + pools.layout.tables[range.layer.index()].waves as usize,
            batch: split_indices.batch as usize,
            rows: range.rows.count as usize,
            k: pools.layout.geometry.shape().top_k as usize,
        }
    }

    /// Clears a batch row's lists.
    pub(super) fn clear(&self, row: usize) {
        for number in 0..self.lists {
            let first = (number * self.batch + row) * self.rows;
            self.counts.fill(first, self.rows, 0);
            self.entries.fill(first * self.k, self.rows * self.k, -1);
        }
    }

    /// Appends a slot to an index list of a query row. Even if another thread changes the count meanwhile, no write
    /// reaches beyond the index lists.
    pub(super) fn push(&self, row: usize, query: usize, number: usize, slot: i32) {
        let at = (number * self.batch + row) * self.rows + query;
        let count = self.counts.get(at).unwrap_or(0);
        self.entries.set((at * self.k).saturating_add(count as usize), slot);
        self.counts.set(at, count.wrapping_add(1));
    }
}
