//! Pools whose rows stand in a total order: whoever ranks lowest leaves.
//!
//! A policy says what a row's rank is; the pool keeps the rows that rank highest and knows whom a step may
//! drop. Ranks may change with every step, so nothing is kept sorted: victims are found by one scan over the
//! slots, which is what a kernel would do.

use forebay::Result;

use super::{Pool, Selected, room};

/// A policy as an order of rows.
pub trait Rank {
    /// Whether every hit stays when a step's rows alone exceed the slots, as a kernel needs that reads the
    /// slots in the same step.
    const HITS_STAY: bool = true;

    /// The step selects the row, which is resident if `hit` and is fetched otherwise.
    fn select(&mut self, step: u32, row: Selected, hit: bool);

    /// The row was born in the step.
    fn bear(&mut self, step: u32, row: Selected);

    /// The row's rank now. Of equal ones the lower position leaves first.
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
    /// Rank, position: who may leave.
    candidates: Vec<(u64, u32)>,
}

impl<R: Rank> Ranked<R> {
    /// An empty pool of `slots` rows, for positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(slots: usize, positions: usize, rank: R) -> Result<Self> {
        Ok(Ranked {
            rank,
            slots,
            // A step's rows and those born may stand beside those that are about to leave.
            resident: room::vector(positions)?,
            selected: room::filled(positions, 0)?,
            place: room::filled(positions, ABSENT)?,
            missed: room::vector(positions)?,
            candidates: room::vector(positions)?,
        })
    }

    fn insert(&mut self, position: u32) {
        self.place[position as usize] = self.resident.len() as u32;
        self.resident.push(position);
    }

    fn remove(&mut self, position: u32) {
        let place = std::mem::replace(&mut self.place[position as usize], ABSENT) as usize;
        self.resident.swap_remove(place);
        if let Some(moved) = self.resident.get(place) {
            self.place[*moved as usize] = place as u32;
        }
    }

    /// Moves the `count` lowest candidates to the front, all if there are fewer.
    fn lowest(&mut self, count: usize) -> usize {
        let count = count.min(self.candidates.len());
        if count > 0 {
            self.candidates.select_nth_unstable(count - 1);
        }
        count
    }

    /// Drops the `count` lowest of the resident rows for which `may_leave` holds, or all of them.
    fn drop_lowest(&mut self, count: usize, may_leave: impl Fn(&Self, u32) -> bool) {
        if count == 0 {
            return;
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
            if !hit {
                self.missed.push(row.position);
            }
        }
        let misses = self.missed.len();
        let excess = (self.resident.len() + misses).saturating_sub(self.slots);
        self.drop_lowest(excess, |pool, position| pool.selected[position as usize] != step + 1);
        let surplus = (self.resident.len() + misses).saturating_sub(self.slots);
        if surplus > 0 && R::HITS_STAY {
            // The step's rows alone exceed the slots: of the fetched ones the lowest stay out.
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

/// The production rule: rows by the step that selected or bore them last, those born in a step after those
/// that it selected, then by position.
pub struct Lru {
    /// By position: twice the step, plus 1 where the row was born in it.
    stamps: Vec<u64>,
}

impl Lru {
    /// For positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(positions: usize) -> Result<Lru> {
        Ok(Lru { stamps: room::filled(positions, 0)? })
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
