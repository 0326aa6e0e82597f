//! Who goes: the oldest of a lane's slots, chosen by scanning stamps.
//!
//! The oldest slots are those whose stamp is below some bound, and, of those that bear the bound itself,
//! the ones with the lowest positions. The bound is searched upwards from the lane's `front`, four
//! candidates a pass; as the oldest stamp moves up by about one a step, one pass is the usual case.

use crate::residency::resolve::{Scan, Workspace};
use crate::residency::tables::{FREE, LayerTables};

impl LayerTables {
    /// Puts the `need` oldest slots of `lane` with a stamp below `below` to the front of `work.victims`,
    /// in the lane's order, as indices into the slot tables. The lane has that many.
    pub(super) fn choose_victims<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        below: u32,
        need: usize,
        work: &mut Workspace,
    ) {
        if need == 0 {
            return;
        }
        let bound = self.find_bound(scan, lane, below, need as u32);
        let found = scan.collect(&self.stamp_of, self.lane_blocks(lane), bound, &mut work.victims);
        if found > need {
            self.drop_youngest_ties(bound, need, found, work);
        }
        self.heads[lane as usize].front = bound;
    }

    /// The smallest stamp at or below which the lane has at least `need` slots; it is below `below`.
    fn find_bound<S: Scan>(&self, scan: &S, lane: u32, below: u32, need: u32) -> u32 {
        // Invariant: fewer than `need` stamps are below `low`, and at least `need` at or below `high`.
        let (mut low, mut high) = (self.heads[lane as usize].front, below - 1);
        let mut stride = 1;
        while low < high {
            let bounds = [0, 1, 2, 3].map(|i| low.saturating_add(i * stride).min(high));
            let counts = scan.count(&self.stamp_of, self.lane_blocks(lane), &bounds);
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
