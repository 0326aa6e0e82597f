//! Who goes: the oldest of a lane's slots, chosen by scanning stamps.
//!
//! The oldest slots are those whose stamp is below some bound, and, of those that bear the bound itself,
//! the ones with the lowest positions. The bound is searched upwards from the lane's `front`, four
//! candidates a pass; as the oldest stamp moves up by about one a step, one pass is the usual case.

use crate::geometry::SLOT_BLOCK;
use crate::residency::resolve::{Scan, Workspace};
use crate::residency::tables::{FREE, LayerTables};

const BLOCK: usize = SLOT_BLOCK as usize;

impl LayerTables {
    /// Puts the `need` oldest slots of `lane` with a stamp below `below` to the front of `work.victims`,
    /// in the lane's order, as indices into the slot tables. The lane has that many.
    pub(super) fn choose_victims<S: Scan>(
        &mut self,
        lane: u32,
        below: u32,
        need: usize,
        work: &mut Workspace,
    ) {
        if need == 0 {
            return;
        }
        let bound = self.find_bound::<S>(lane, below, need as u32);
        let mut found = 0;
        for block in self.lane_blocks(lane) {
            let first = block * SLOT_BLOCK;
            found += S::collect(self.block_stamps(first), bound, first, &mut work.victims[found..]);
        }
        if found > need {
            self.drop_youngest_ties(bound, need, found, work);
        }
        self.heads[lane as usize].front = bound;
    }

    fn block_stamps(&self, first: u32) -> &[u32; BLOCK] {
        // Blocks lie inside the table by `join`, so the answer is never the empty block.
        static NONE: [u32; BLOCK] = [super::tables::UNUSED; BLOCK];
        self.stamp_of.get(first as usize..).and_then(|s| s.first_chunk()).unwrap_or(&NONE)
    }

    /// How many stamps of the lane are at or below each bound.
    fn count<S: Scan>(&self, lane: u32, bounds: &[u32; 4]) -> [u32; 4] {
        let mut counts = [0; 4];
        for block in self.lane_blocks(lane) {
            S::count(self.block_stamps(block * SLOT_BLOCK), bounds, &mut counts);
        }
        counts
    }

    /// The smallest stamp at or below which the lane has at least `need` slots; it is below `below`.
    fn find_bound<S: Scan>(&self, lane: u32, below: u32, need: u32) -> u32 {
        // Invariant: fewer than `need` stamps are below `low`, and at least `need` at or below `high`.
        let (mut low, mut high) = (self.heads[lane as usize].front, below - 1);
        let mut stride = 1;
        while low < high {
            let bounds = [0, 1, 2, 3].map(|i| low.saturating_add(i * stride).min(high));
            let counts = self.count::<S>(lane, &bounds);
            match counts.iter().position(|c| *c >= need) {
                Some(0) => return low,
                Some(at) => {
                    (low, high) = (bounds[at - 1] + 1, bounds[at]);
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

    /// Of the slots in `work.victims[..found]` keeps `need`: all that are older than `bound`, and of those
    /// that bear it the ones with the lowest positions (empty slots: the first ones).
    fn drop_youngest_ties(&self, bound: u32, need: usize, found: usize, work: &mut Workspace) {
        let mut ties = 0;
        for slot in &work.victims[..found] {
            work.ties[ties] = self.position_of[*slot as usize];
            ties += usize::from(self.stamp_of[*slot as usize] == bound);
        }
        // found - need of the ties stay, so at least one goes.
        let go = ties - (found - need);
        let highest = match bound {
            FREE => u32::MAX,
            _ => *work.ties[..ties].select_nth_unstable(go - 1).1,
        };
        let (mut kept, mut tied) = (0, 0);
        for index in 0..found {
            let slot = work.victims[index];
            let tie = self.stamp_of[slot as usize] == bound;
            let goes = !tie || (tied < go && self.position_of[slot as usize] <= highest);
            tied += usize::from(tie && goes);
            work.victims[kept] = slot;
            kept += usize::from(goes);
        }
    }
}
