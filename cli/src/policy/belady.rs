//! Belady's optimum: the row leaves whose next selection is farthest, first of all one that has none.
//!
//! It is the least number of misses that any policy can have in a pool that takes every miss into a slot, as
//! `policy` says: before each step, let C be the resident rows, U the selected ones. The misses are |U \ C|;
//! what is resident after the step is any P with U in P, P in C + U, and |P| <= slots; what is resident
//! before the next one is any subset of P and the rows born, again of at most `slots`. So a born row is kept only
//! when it is wanted before what it would replace, and a row that was fetched for the last time leaves
//! with the next births. Misses of warm-up steps are not counted: a row that the warm-up selects once more may go
//! at once, and the others are kept by the decode step that selects them next. The rows that are kept in each
//! choice are those selected soonest; that no other choice does better is the usual exchange, and is tested
//! against a search over all choices.
//!
//! Where a step's rows alone exceed the slots, P is any part of U of that size: unlike the other policies, the
//! optimum may let a hit go for a row that it fetched. It would need a copy after the step, so there it is a
//! bound rather than something to build.

use forebay::Result;

use super::pool::Selected;
use super::ranked::Rank;
use crate::study::reserve;

/// Rows by the step that selects them next, soonest last out.
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
