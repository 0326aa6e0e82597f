//! Who goes: the oldest of a lane's slots, chosen by scanning stamps.
//!
//! The oldest slots are those whose stamp is below some bound, and, of those that bear the bound itself,
//! the ones with the lowest positions. The bound is searched upwards from the lane's `front`, three
//! candidates in the first pass, four in each further one; as the oldest stamp moves up by about one a
//! step, the first pass is the usual case, and it counts the hits too. A second pass lists the positions
//! that share the bound, a third the slots that go: all of them run over stamps and positions in order.

use crate::residency::resolve::{Scan, Workspace};
use crate::residency::tables::{FREE, LayerTables};

/// How many slots of a lane are how old: the first pass of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ages {
    /// The stamps counted are below this one.
    pub(super) below: u32,
    /// Ascending; the last is `below - 1`.
    bounds: [u32; 4],
    /// Slots at or below each bound.
    counts: [u32; 4],
}

impl Ages {
    /// All slots with a stamp below `below`.
    pub(super) fn all(&self) -> u32 {
        self.counts[3]
    }
}

impl LayerTables {
    /// Counts the slots of `lane` with a stamp below `below`, and the oldest of them apart.
    pub(super) fn ages<S: Scan>(&self, scan: &S, lane: u32, below: u32) -> Ages {
        let (low, high) = (self.heads[lane as usize].front, below - 1);
        let bounds = [low, low.saturating_add(1), low.saturating_add(2), high].map(|b| b.min(high));
        Ages { below, bounds, counts: scan.count(&self.stamp_of, self.lane_blocks(lane), &bounds) }
    }

    /// Puts the `need` oldest of the slots that `ages` counted to the front of `work.victims`, in the
    /// lane's order, as indices into the slot tables. The lane has that many.
    pub(super) fn choose_victims<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        ages: Ages,
        need: usize,
        work: &mut Workspace,
    ) {
        if need == 0 {
            return;
        }
        let (bound, found) = self.find_bound(scan, lane, ages, need as u32);
        let (stamps, positions, blocks) = (&self.stamp_of, &self.position_of, self.lane_blocks(lane));
        let stay = found as usize - need;
        // Empty slots bear no position: the first ones of them go.
        let mut highest = u32::MAX;
        if stay > 0 && bound != FREE {
            let ties = scan.ties(stamps, positions, blocks, bound, &mut work.ties);
            // Fewer than `need` are older than the bound, so at least one of the ties goes.
            highest = *work.ties[..ties].select_nth_unstable(ties - stay - 1).1;
        }
        scan.collect(stamps, positions, blocks, (bound, highest), &mut work.victims);
        self.heads[lane as usize].front = bound;
    }

    /// The smallest stamp at or below which the lane has at least `need` slots, and how many it has.
    fn find_bound<S: Scan>(&self, scan: &S, lane: u32, ages: Ages, need: u32) -> (u32, u32) {
        let Ages { mut bounds, mut counts, .. } = ages;
        let mut stride = 1_u32;
        // The last bound's count is at least `need`: it was all slots at first, then the one that sufficed.
        loop {
            let at = counts.iter().position(|c| *c >= need).unwrap_or(3);
            let (high, found) = (bounds[at], counts[at]);
            // The first bound of a pass is the lowest that is possible.
            if at == 0 || bounds[at - 1] + 1 >= high {
                return (high, found);
            }
            let low = bounds[at - 1] + 1;
            stride = match at {
                3 => stride.saturating_mul(4),
                _ => ((high - low) / 4).max(1),
            };
            let [first, second, third] =
                [0, 1, 2].map(|i| low.saturating_add(stride.saturating_mul(i)).min(high));
            bounds = [first, second, third, high];
            counts = scan.count(&self.stamp_of, self.lane_blocks(lane), &bounds);
        }
    }
}
