//! Belady's optimum: evicts the row whose next selection is farthest, first of all a row without one.
//!
//! It has the fewest misses of all policies whose pool takes every miss into a slot, as described in `policy`. Before
//! each step, let C be the resident rows and U the selected ones. The misses are |U \ C|; the rows resident after the
//! step are any P with U in P, P in C + U, and |P| <= slots; the rows resident before the next one are any subset of P
//! and the rows born, again of at most `slots`. So a born row is kept only if it is needed before the row that it
//! would replace, and a row that was fetched for the last time is evicted with the next births. Misses of warm-up
//! steps are not counted: a row that the warm-up selects once more may be evicted at once, and the others are kept by
//! the decode step that selects them next. Each choice keeps the rows that are selected soonest; that no other choice
//! is better follows from the usual exchange argument, and is tested against a search over all choices.
//!
//! If a step's rows alone exceed the slots, P is any part of U of that size: unlike the other policies, the
//! optimum may evict a hit in favour of a row that it fetched. That would need a copy after the step, so there it is a
//! bound rather than a policy to build.

use forebay::Result;

use super::pool::Selected;
use super::ranked::Rank;
use crate::study::reserve;

/// Rows by the step that selects them next, farthest first.
pub struct Belady {
    /// By position.
    next: Vec<u32>,
}

impl Belady {
    /// For positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(positions: usize) -> Result<Belady> {
        Ok(Belady { next: reserve::filled(positions, 0)? })
    }
}

impl Rank for Belady {
    const HITS_STAY: bool = false;

    fn select(&mut self, _: u32, row: Selected, _: bool) {
        self.next[row.position as usize] = row.next;
    }

    fn bear(&mut self, _: u32, row: Selected) {
        self.next[row.position as usize] = row.next;
    }

    fn rank(&self, position: u32) -> u64 {
        u64::from(u32::MAX - self.next[position as usize])
    }
}
