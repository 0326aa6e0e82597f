//! Who goes: the oldest of a lane's slots, chosen by scanning stamps.
//!
//! The oldest slots are those whose stamp is below some bound, and, of those that bear the bound itself,
//! the ones with the lowest positions. As the oldest stamp moves up by about one a step, the first guess
//! is the stamp above the oldest one: one pass splits the lane there, and counts on the way how many slots
//! may go at all. Only when that is too little is the bound searched, four candidates a pass, and the lane
//! split again.

use crate::residency::resolve::{Aged, At, Scan, Split, Workspace};
use crate::residency::tables::{FREE, LayerTables};

/// A lane split near its oldest slots; the lists are in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Oldest {
    pub(super) at: At,
    pub(super) split: Split,
}

impl LayerTables {
    /// Splits the slots of `lane` above its oldest stamp, and counts those with a stamp below `below`.
    pub(super) fn oldest<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        below: u32,
        work: &mut Workspace,
    ) -> Oldest {
        let bound = self.heads[lane as usize].front.saturating_add(1).min(below - 1);
        self.split(scan, lane, At { bound, below }, work)
    }

    fn split<S: Scan>(&mut self, scan: &S, lane: u32, at: At, work: &mut Workspace) -> Oldest {
        let start = lane as usize * self.shape.lane_blocks() as usize;
        let blocks = &self.blocks[start..start + self.heads[lane as usize].blocks as usize];
        let marks = &mut work.marks[self.shape.budget_base as usize..];
        let lane = Aged { stamps: &mut self.stamp_of, marks, blocks };
        Oldest { at, split: scan.split(lane, at, &mut work.victims, &mut work.ties) }
    }

    /// Puts the `need` oldest of the slots below `oldest.at.below` to the front of `work.victims`, as
    /// indices into the slot tables: those below the bound, then the ties, each in the lane's order. The
    /// lane has that many.
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
        let Oldest { mut at, mut split } = oldest;
        if need > split.older + split.tied {
            at.bound = self.find_bound(scan, lane, at, need as u32);
            Oldest { at, split } = self.split(scan, lane, at, work);
        } else if need <= split.older {
            // The first guess was one too high: all older slots bear the lane's oldest stamp.
            std::mem::swap(&mut work.victims, &mut work.ties);
            at.bound -= 1;
            (split.older, split.tied) = (0, split.older);
        }
        self.take_ties(at.bound, split, need - split.older, work);
        self.heads[lane as usize].front = at.bound;
    }

    /// Appends `go` of the tied slots to the victims: the ones with the lowest positions.
    fn take_ties(&self, bound: u32, split: Split, go: usize, work: &mut Workspace) {
        let (ties, positions) = (&work.ties[..split.tied], &mut work.positions[..split.tied]);
        let victims = &mut work.victims[split.older..];
        // Empty slots bear no position: the first ones of them go.
        if go == ties.len() || bound == FREE {
            victims[..go].copy_from_slice(&ties[..go]);
            return;
        }
        for (position, slot) in positions.iter_mut().zip(ties) {
            *position = self.position_of[*slot as usize];
        }
        let highest = nth_lowest(positions, go, self.shape.tokens);
        let mut kept = 0;
        for (slot, position) in ties.iter().zip(positions.iter()) {
            victims[kept] = *slot;
            // `go` of them are that low, and at least one is not: `kept` stays below the ties' number.
            kept += usize::from(*position <= highest);
        }
    }

    /// The smallest stamp at or below which the lane has at least `need` slots. It is above `at.bound`.
    fn find_bound<S: Scan>(&self, scan: &S, lane: u32, at: At, need: u32) -> u32 {
        // Invariant: fewer than `need` stamps are below `low`, and at least `need` at or below `high`.
        let (mut low, mut high) = (at.bound + 1, at.below - 1);
        let mut stride = 1_u32;
        while low < high {
            let bounds = [0, 1, 2, 3].map(|i| low.saturating_add(stride.saturating_mul(i)).min(high));
            let counts = scan.count(&self.stamp_of, self.lane_blocks(lane), &bounds);
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

/// The lowest value at or below which there are `n` of `values`, all of them distinct and below `end`.
/// Counting is a pass of vector compares; half a dozen of them are cheaper than one pass that branches.
fn nth_lowest(values: &[u32], n: usize, end: u32) -> u32 {
    let (mut low, mut high) = (0, end.saturating_sub(1));
    while low < high {
        let middle = low + (high - low) / 2;
        let count = values.iter().fold(0_u32, |n, v| n.wrapping_add(u32::from(*v as i32 <= middle as i32)));
        match count as usize >= n {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::nth_lowest;

    #[test]
    fn the_nth_lowest_is_the_nth_of_the_sorted() {
        for (end, step) in [(1, 1), (200, 3), (256, 1), (257, 2), (33_000, 97), (1 << 24, 65_521)] {
            let mut values: Vec<u32> = (0..).map(|i| i * step).take_while(|v| *v < end).take(900).collect();
            let sorted = values.clone();
            for n in [1, 1 + sorted.len() / 3, sorted.len()] {
                values.rotate_left(sorted.len() / 2);
                assert_eq!(nth_lowest(&values, n, end), sorted[n - 1], "{end} {n}");
            }
        }
    }
}
