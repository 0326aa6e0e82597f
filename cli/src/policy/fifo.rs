//! First in, first out: evicts rows in the order of their arrival, regardless of hits.

use forebay::Result;

use super::pool::Selected;
use super::ranked::Rank;
use crate::study::reserve;

/// Rows by the step that fetched or bore them; rows born in a step follow those that it fetched, then by
/// position.
pub struct Fifo {
    /// By position: twice the step, plus 1 if the row was born in it.
    entered: Vec<u64>,
}

impl Fifo {
    /// For positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(positions: usize) -> Result<Fifo> {
        Ok(Fifo { entered: reserve::filled(positions, 0)? })
    }
}

impl Rank for Fifo {
    fn select(&mut self, step: u32, row: Selected, hit: bool) {
        if !hit {
            self.entered[row.position as usize] = 2 * u64::from(step);
        }
    }

    fn bear(&mut self, step: u32, row: Selected) {
        self.entered[row.position as usize] = 2 * u64::from(step) + 1;
    }

    fn rank(&self, position: u32) -> u64 {
        self.entered[position as usize]
    }
}
