//! The residency of one layer in the plainest form: a list of positions, oldest first.
//!
//! No slots, no stamps, no indices: every step rebuilds the list as the rule words it. Slow on purpose;
//! what it says is what production pools are compared with.

use std::ops::Range;

/// What is resident in one layer, oldest first.
pub struct Pool {
    slots: usize,
    order: Vec<u32>,
}

impl Pool {
    /// An empty pool of `slots` rows.
    pub fn new(slots: u32) -> Self {
        Pool { slots: slots as usize, order: Vec::new() }
    }

    /// A step that reads `selected` (ascending, each once). Returns hits and misses.
    pub fn select(&mut self, selected: &[u32]) -> (u64, u64) {
        let is_selected = |position: &u32| selected.binary_search(position).is_ok();
        let (mut hits, others): (Vec<u32>, Vec<u32>) = self.order.drain(..).partition(is_selected);
        hits.sort_unstable();
        let missed: Vec<u32> = selected.iter().copied().filter(|p| hits.binary_search(p).is_err()).collect();
        let counts = (hits.len() as u64, missed.len() as u64);
        // All hits keep their slots; of the fetched, the highest positions take what room there is.
        let room = self.slots.saturating_sub(hits.len());
        let mut resident = hits;
        resident.extend(missed.iter().rev().take(room));
        resident.sort_unstable();
        self.order = others;
        self.order.extend(resident);
        self.evict();
        counts
    }

    /// The step's own rows become resident, the newest of all.
    pub fn bear(&mut self, rows: Range<u32>) {
        self.order.extend(rows);
        self.evict();
    }

    /// The newest rows stay.
    fn evict(&mut self) {
        let surplus = self.order.len().saturating_sub(self.slots);
        self.order.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_unselected_then_selected_then_born() {
        let mut pool = Pool::new(6);
        assert_eq!(pool.select(&[5, 9]), (0, 2));
        pool.bear(10..12);
        assert_eq!(pool.order, [5, 9, 10, 11]);
        assert_eq!(pool.select(&[3, 9]), (1, 1));
        assert_eq!(pool.order, [5, 10, 11, 3, 9]);
        pool.bear(12..14);
        assert_eq!(pool.order, [10, 11, 3, 9, 12, 13]);
    }

    #[test]
    fn beyond_the_budget_hits_stay_and_the_highest_fetched_join_them() {
        let mut pool = Pool::new(3);
        pool.select(&[1, 2]);
        assert_eq!(pool.select(&[1, 4, 5, 6]), (1, 3));
        assert_eq!(pool.order, [1, 5, 6]);
        pool.bear(7..8);
        assert_eq!(pool.order, [5, 6, 7]);
        pool.bear(8..13);
        assert_eq!(pool.order, [10, 11, 12]);
    }
}
