//! S3-FIFO over steps; [`Queues`] implements the queues.
//!
//! A row selected twice in a step is hit once; a row that the step selects stays; born rows enter the small
//! queue; a step whose rows exceed the slots keeps its hits and the misses at the highest positions.

use forebay::Result;

use super::pool::{Pool, Selected};
use crate::study::reserve;
use crate::study::s3fifo_queues::Queues;

/// A pool under S3-FIFO.
pub struct S3Fifo {
    slots: usize,
    queues: Queues,
    /// By position: the step that selected it last, plus 1; 0 before.
    selected: Vec<u32>,
    missed: Vec<u32>,
}

impl S3Fifo {
    /// An empty pool of `slots` rows, for positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(slots: usize, positions: usize) -> Result<S3Fifo> {
        Ok(S3Fifo {
            slots,
            queues: Queues::new(slots, positions)?,
            selected: reserve::filled(positions, 0)?,
            missed: reserve::vector(positions)?,
        })
    }

    /// How many rows exceed the slots with `more`.
    fn surplus(&self, more: usize) -> usize {
        (self.queues.len() + more).saturating_sub(self.slots)
    }
}

impl Pool for S3Fifo {
    fn holds(&self, position: u32) -> bool {
        self.queues.contains(position)
    }

    fn select(&mut self, step: u32, rows: &[Selected]) -> u32 {
        let now = step + 1;
        self.missed.clear();
        for Selected { position, .. } in rows {
            self.selected[*position as usize] = now;
            if !self.queues.hit(*position) {
                self.missed.push(*position);
            }
        }
        self.queues.evict(self.surplus(self.missed.len()), |p| self.selected[p as usize] == now);
        let surplus = self.surplus(self.missed.len());
        self.missed[surplus..].iter().for_each(|position| self.queues.enter(*position));
        self.missed.len() as u32
    }

    fn bear(&mut self, _: u32, rows: &[Selected]) {
        let rows = &rows[rows.len().saturating_sub(self.slots)..];
        // No row is selected between steps.
        self.queues.evict(self.surplus(rows.len()), |_| false);
        rows.iter().for_each(|row| self.queues.enter(row.position));
    }
}
