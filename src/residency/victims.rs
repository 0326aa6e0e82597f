//! Eviction: choosing a lane's oldest slots by scanning stamps.
//!
//! The oldest slots are those whose stamp is below a bound and, among the slots with the bound's stamp, those with the
//! lowest positions. The oldest stamp rises by about one in each step, so the first guess for the bound is the stamp
//! after the oldest one. One scan splits the lane there. Only if that gives too few slots, further scans search the
//! bound, with four candidates in each scan, and then split the lane again.

use crate::geometry::SLOT_BLOCK;
use crate::residency::scan::{At, Scan, Split, Stamped, Tied};
use crate::residency::tables::{EMPTY, FREE, LaneHead, LayerTables};
use crate::residency::workspace::Workspace;

/// A lane split near its oldest slots; the sets are in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Oldest {
    pub(super) at: At,
    pub(super) split: Split,
}

/// Where the oldest slots of a lane end and the newer rows begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edge {
    /// The stamp of the newest of these slots.
    pub(super) bound: u32,
    /// The lowest position of the rows with this stamp that are not among them; [`EMPTY`] if there is none.
    pub(super) next_victim: u32,
}

impl LayerTables {
    /// Splits the slots of `lane` at the stamp after its oldest one, and counts the slots stamped `now`.
    pub(super) fn oldest<S: Scan>(&self, scan: &S, lane: u32, now: u32, work: &mut Workspace) -> Oldest {
        let bound = self.heads[lane as usize].min_stamp.saturating_add(1).min(now - 1);
        self.split(scan, lane, At { bound, now }, work)
    }

    /// Splits the slots of `lane` at a bound.
    pub(super) fn split<S: Scan>(&self, scan: &S, lane: u32, at: At, work: &mut Workspace) -> Oldest {
        let blocks = self.lane_blocks(lane);
        Oldest { at, split: scan.split(self.stamps(), blocks, at, &mut work.older, &mut work.tied) }
    }

    /// Finds victims as [`LayerTables::find_victims`], and notes in the lane's head what remains behind them.
    pub(super) fn choose_victims<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        oldest: Oldest,
        need: usize,
        work: &mut Workspace,
    ) {
        if need == 0 {
            return;
        }
        let Edge { bound, next_victim } = self.find_victims(scan, lane, oldest, need, work);
        let head = &mut self.heads[lane as usize];
        (head.min_stamp, head.next_victim) = (bound, next_victim);
    }

    /// Writes the `need` oldest of the untouched slots to the beginning of `work.victims`, as indices into the slot
    /// tables: first the slots below the bound, then the ties, each group in the lane's order. The lane must have that
    /// many untouched slots, and `need` is not 0.
    pub(super) fn find_victims<S: Scan>(
        &self,
        scan: &S,
        lane: u32,
        oldest: Oldest,
        need: usize,
        work: &mut Workspace,
    ) -> Edge {
        let Oldest { mut at, mut split } = oldest;
        if need > (split.older + split.tied) as usize {
            at.bound = self.find_bound(scan, lane, at, need as u32);
            split = self.split(scan, lane, at, work).split;
        } else if need <= split.older as usize {
            // The first guess was one too high: all older slots bear the lane's oldest stamp.
            std::mem::swap(&mut work.older, &mut work.tied);
            at.bound -= 1;
            split.older = 0;
        }
        let blocks = &self.blocks[self.block_range(lane)];
        let older = if split.older > 0 { scan.list(&work.older, blocks, &mut work.victims) } else { 0 };
        let count = scan.list(&work.tied, blocks, &mut work.ties);
        let (victims, go) = (&mut work.victims[older..], need - older);
        let mut next_victim = EMPTY;
        if go == count || at.bound == FREE {
            // Empty slots have no position: take the first ones.
            victims[..go].copy_from_slice(&work.ties[..go]);
        } else {
            for (position, slot) in work.positions.iter_mut().zip(&work.ties[..count]) {
                *position = self.position_of[*slot as usize];
            }
            let (slots, positions) = (&work.ties, &mut work.positions);
            next_victim = scan.lowest(Tied { slots, positions, count, end: self.shape.tokens }, go, victims);
        }
        Edge { bound: at.bound, next_victim }
    }

    /// The oldest slot of `lane`; the caller puts a new row there. Usually it is the first empty slot, or the slot of
    /// `next_victim`, which the last choice of victims has found.
    pub(super) fn lru_slot<S: Scan>(&mut self, scan: &S, lane: u32) -> u32 {
        let LaneHead { mut min_stamp, next_victim, stamp, full_places, .. } = self.heads[lane as usize];
        if min_stamp == FREE
            && let Some((place, slot)) = self.first_empty(scan, lane, full_places)
        {
            self.heads[lane as usize].full_places = place + 1;
            return slot;
        }
        let first = |min_stamp| {
            let blocks = self.lane_blocks(lane);
            scan.first(Stamped { stamps: self.stamps(), positions: &self.position_of, blocks }, min_stamp)
        };
        let mut position = if self.is_tied(lane, next_victim) { next_victim } else { first(min_stamp) };
        if position == EMPTY {
            // No slot has the stamp `min_stamp` any more: search the lowest stamp of a slot.
            min_stamp = self.find_bound(scan, lane, At { bound: min_stamp, now: stamp + 1 }, 1);
            position = first(min_stamp);
        }
        let slot = self.slot_of[self.map_start(lane) + position as usize] - self.shape.budget_base;
        let head = &mut self.heads[lane as usize];
        (head.min_stamp, head.next_victim) = (min_stamp, EMPTY);
        slot
    }

    /// The first empty slot of `lane`, with its place. The lane's first `full` places are not empty.
    fn first_empty<S: Scan>(&self, scan: &S, lane: u32, full: u32) -> Option<(u32, u32)> {
        let (blocks, first) = (self.lane_blocks(lane), full / SLOT_BLOCK);
        let place = first * SLOT_BLOCK + scan.find(self.stamps(), blocks.get(first as usize..)?, FREE)?;
        let block = blocks.get((place / SLOT_BLOCK) as usize)?;
        Some((place, block * SLOT_BLOCK + place % SLOT_BLOCK))
    }

    /// Whether the row at `position` has the lane's `min_stamp`.
    pub(super) fn is_tied(&self, lane: u32, position: u32) -> bool {
        let slot = self.slot(lane, position).and_then(|slot| slot.checked_sub(self.shape.budget_base));
        slot.is_some_and(|slot| self.stamps()[slot as usize] == self.heads[lane as usize].min_stamp)
    }

    /// The smallest stamp at or below which the lane has at least `need` slots. It is above `at.bound`.
    fn find_bound<S: Scan>(&self, scan: &S, lane: u32, at: At, need: u32) -> u32 {
        // Invariant: fewer than `need` stamps are below `low`, and at least `need` at or below `high`.
        let (mut low, mut high) = (at.bound + 1, at.now - 1);
        let mut stride = 1_u32;
        while low < high {
            let bounds = [0, 1, 2, 3].map(|i| low.saturating_add(stride.saturating_mul(i)).min(high));
            let counts = scan.count(self.stamps(), self.lane_blocks(lane), &bounds);
            match counts.iter().position(|c| *c >= need) {
                Some(0) => return low,
                Some(found) => {
                    (low, high) = (bounds[found - 1] + 1, bounds[found]);
                    stride = ((high - low) / 4).max(1);
                }
                None => {
                    low = bounds[3] + 1;
                    stride = stride.saturating_mul(4);
                }
            }
        }
        low
    }
}
