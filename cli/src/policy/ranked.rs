//! Pools whose rows have a total order: the row with the lowest rank is evicted.
//!
//! A policy defines a row's rank; the pool keeps the rows with the highest ranks, and tracks which rows a step may
//! evict. Ranks may change with every step, so nothing is kept sorted: one scan over the slots finds the victims, as
//! in a kernel. Its cost is proportional to the slots. If there are many times more slots than a step selects, and
//! ranks change only with selections and births, the rows are in a heap instead, and the work of a step is
//! proportional to its rows. The victims are the same, because no two ranks are equal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use forebay::Result;

use super::pool::{Pool, Selected};
use crate::study::reserve;

/// A policy as an order of rows.
pub trait Rank {
    /// Whether ranks change without a selection or a birth of their row.
    const FADES: bool = false;

    /// Whether every hit stays if a step's rows alone exceed the slots, as a kernel requires that reads the
    /// slots in the same step.
    const HITS_STAY: bool = true;

    /// The step selects the row, which is resident if `hit`, and fetched otherwise.
    fn select(&mut self, step: u32, row: Selected, hit: bool);

    /// The row was born in the step.
    fn bear(&mut self, step: u32, row: Selected);

    /// The row's present rank. Among equal ranks the lowest position is evicted first.
    fn rank(&self, position: u32) -> u64;
}

/// Not resident.
const ABSENT: u32 = u32::MAX;

/// A pool under a [`Rank`].
pub struct Ranked<R> {
    rank: R,
    slots: usize,
    /// Resident positions, in no order.
    resident: Vec<u32>,
    /// By position: the step that selected it last, plus 1; 0 before.
    selected: Vec<u32>,
    /// By position: its place in `resident`, or [`ABSENT`].
    place: Vec<u32>,
    /// Positions missed in the step.
    missed: Vec<u32>,
    /// Rank and position of rows that may be evicted.
    candidates: Vec<(u64, u32)>,
    /// Rank and position of resident rows, the lowest on top; old ranks and evicted rows remain in it.
    heap: Option<BinaryHeap<Reverse<(u64, u32)>>>,
}

/// A pool uses a heap if it has this many times more slots than a step selects rows.
const SCANNED: usize = 64;

impl<R: Rank> Ranked<R> {
    /// An empty pool of `slots` rows, for positions below `positions`, of which a step selects about `rows`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(slots: usize, positions: usize, rows: usize, rank: R) -> Result<Self> {
        let sorted = !R::FADES && slots.min(positions) > SCANNED.saturating_mul(rows);
        Ok(Ranked {
            rank,
            slots,
            // The capacity that it reaches before its stale half is removed.
            heap: sorted
                .then(|| reserve::vector(2 * positions + SCANNED + 1))
                .transpose()?
                .map(BinaryHeap::from),
            // A step's rows and new rows may coexist with those about to be evicted.
            resident: reserve::vector(positions)?,
            selected: reserve::filled(positions, 0)?,
            place: reserve::filled(positions, ABSENT)?,
            missed: reserve::vector(positions)?,
            candidates: reserve::vector(positions)?,
        })
    }

    fn insert(&mut self, position: u32) {
        self.place[position as usize] = self.resident.len() as u32;
        self.resident.push(position);
        self.note(position);
    }

    /// Records a new resident row, or a new rank of one.
    fn note(&mut self, position: u32) {
        let Some(heap) = &mut self.heap else { return };
        heap.push(Reverse((self.rank.rank(position), position)));
        // Half of it is stale; the rebuild happens once for as many rows as it holds.
        if heap.len() > 2 * self.resident.len() + SCANNED {
            let all = self.resident.iter().map(|position| Reverse((self.rank.rank(*position), *position)));
            let mut kept = std::mem::take(heap).into_vec();
            kept.clear();
            kept.extend(all);
            *heap = BinaryHeap::from(kept);
        }
    }

    /// Evicts, from the heap, the `count` lowest of the resident rows for which `may_leave` holds, or all of them.
    fn pop_lowest(&mut self, count: usize, may_leave: impl Fn(&Self, u32) -> bool) {
        let (mut gone, mut kept) = (0, std::mem::take(&mut self.candidates));
        kept.clear();
        while gone < count {
            let Some(Reverse((rank, position))) = self.heap.as_mut().and_then(BinaryHeap::pop) else { break };
            if !self.holds(position) || self.rank.rank(position) != rank {
                continue;
            }
            match may_leave(self, position) {
                true => {
                    self.remove(position);
                    gone += 1;
                }
                false => kept.push((rank, position)),
            }
        }
        self.heap.iter_mut().for_each(|heap| heap.extend(kept.iter().copied().map(Reverse)));
        self.candidates = kept;
    }

    fn remove(&mut self, position: u32) {
        let place = std::mem::replace(&mut self.place[position as usize], ABSENT) as usize;
        self.resident.swap_remove(place);
        if let Some(moved) = self.resident.get(place) {
            self.place[*moved as usize] = place as u32;
        }
    }

    /// Moves the `count` lowest candidates to the beginning, all if there are fewer.
    fn lowest(&mut self, count: usize) -> usize {
        let count = count.min(self.candidates.len());
        if count > 0 {
            self.candidates.select_nth_unstable(count - 1);
        }
        count
    }

    /// Evicts the `count` lowest of the resident rows for which `may_leave` holds, or all of them.
    fn drop_lowest(&mut self, count: usize, may_leave: impl Fn(&Self, u32) -> bool) {
        if count == 0 {
            return;
        }
        if self.heap.is_some() {
            return self.pop_lowest(count, may_leave);
        }
        self.candidates.clear();
        for i in 0..self.resident.len() {
            let position = self.resident[i];
            if may_leave(self, position) {
                self.candidates.push((self.rank.rank(position), position));
            }
        }
        for i in 0..self.lowest(count) {
            self.remove(self.candidates[i].1);
        }
    }
}

impl<R: Rank> Pool for Ranked<R> {
    fn holds(&self, position: u32) -> bool {
        self.place[position as usize] != ABSENT
    }

    fn select(&mut self, step: u32, rows: &[Selected]) -> u32 {
        self.missed.clear();
        for row in rows {
            let hit = self.holds(row.position);
            self.selected[row.position as usize] = step + 1;
            self.rank.select(step, *row, hit);
            match hit {
                true => self.note(row.position),
                false => self.missed.push(row.position),
            }
        }
        let misses = self.missed.len();
        let excess = (self.resident.len() + misses).saturating_sub(self.slots);
        self.drop_lowest(excess, |pool, position| pool.selected[position as usize] != step + 1);
        let surplus = (self.resident.len() + misses).saturating_sub(self.slots);
        if surplus > 0 && R::HITS_STAY {
            // The step's rows alone exceed the slots: the lowest fetched ones get none.
            self.candidates.clear();
            self.candidates.extend(self.missed.iter().map(|p| (self.rank.rank(*p), *p)));
            self.lowest(surplus);
            self.missed.clear();
            self.missed.extend(self.candidates[surplus..].iter().map(|(_, position)| position));
        }
        for i in 0..self.missed.len() {
            self.insert(self.missed[i]);
        }
        if !R::HITS_STAY {
            self.drop_lowest(surplus, |_, _| true);
        }
        misses as u32
    }

    fn bear(&mut self, step: u32, rows: &[Selected]) {
        for row in rows {
            self.rank.bear(step, *row);
            self.insert(row.position);
        }
        self.drop_lowest(self.resident.len().saturating_sub(self.slots), |_, _| true);
    }
}

/// The production rule: rows by the step that selected or bore them last; rows born in a step follow those
/// that it selected, then by position.
pub struct Lru {
    /// By position: twice the step, plus 1 if the row was born in it.
    stamps: Vec<u64>,
}

impl Lru {
    /// For positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(positions: usize) -> Result<Lru> {
        Ok(Lru { stamps: reserve::filled(positions, 0)? })
    }
}

impl Rank for Lru {
    fn select(&mut self, step: u32, row: Selected, _: bool) {
        self.stamps[row.position as usize] = 2 * u64::from(step);
    }

    fn bear(&mut self, step: u32, row: Selected) {
        self.stamps[row.position as usize] = 2 * u64::from(step) + 1;
    }

    fn rank(&self, position: u32) -> u64 {
        self.stamps[position as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::policy::pool::NEVER;

    /// A rank that counts its calls.
    struct Counted(Lru, Rc<Cell<u64>>);

    impl Rank for Counted {
        fn select(&mut self, step: u32, row: Selected, hit: bool) {
            self.0.select(step, row, hit);
        }

        fn bear(&mut self, step: u32, row: Selected) {
            self.0.bear(step, row);
        }

        fn rank(&self, position: u32) -> u64 {
            self.1.set(self.1.get() + 1);
            self.0.rank(position)
        }
    }

    /// The number of rank calls in `steps` steps of two rows each, with a pool that is full from the start.
    fn asked(slots: usize, rows: usize, steps: u32) -> (u64, u32) {
        let (asked, positions) = (Rc::new(Cell::new(0)), 2 * slots + steps as usize);
        let rank = Counted(Lru::new(positions).unwrap(), asked.clone());
        let mut pool = Ranked::new(slots, positions, rows, rank).unwrap();
        let row = |position: u32| Selected { position, next: NEVER };
        let first: Vec<Selected> = (0..slots as u32).map(row).collect();
        pool.select(0, &first);
        let (before, mut misses) = (asked.get(), 0);
        for step in 1..=steps {
            misses += pool.select(step, &[row(step), row(slots as u32 + step)]);
            pool.bear(step, &[row(2 * slots as u32 + step - 1)]);
        }
        (asked.get() - before, misses)
    }

    #[test]
    fn with_many_slots_a_step_costs_only_its_selected_rows() {
        let (slots, steps) = (100_000, 5_000);
        let (heap, missed) = asked(slots, 2, steps);
        assert!(heap < 20 * u64::from(steps), "{heap} ranks were asked for in {steps} steps");
        // The control: a scan ranks all rows, and evicts the same ones.
        let few = 50;
        let (scan, scanned) = asked(slots, slots, few);
        assert!(scan > u64::from(few) * slots as u64 / 2, "{scan}");
        assert_eq!((asked(slots, 2, few).1, missed), (scanned, missed));
    }
}
