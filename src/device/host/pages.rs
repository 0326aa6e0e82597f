//! The lanes' page tables in host memory.
//!
//! The caller's edges order a table's readers after its writer, as with all device memory, so no lock guards a table.
//! A locked instruction per row would keep look-ups from overlapping, and took half the time of a scatter. Entries
//! are atomic: if an edge is missing, a reader gets a page that was range-checked, of this sequence or another, and
//! never a torn value.

use crate::device::host::errors::NAME;
use crate::error::Result;
use crate::fallible::vector;
use crate::ids::Lane;
use crate::sync::{AtomicU32, Ordering};

/// The value of entries beyond the sequence's pages.
const NO_PAGE: u32 = u32::MAX;

/// The host page of each page of each lane's sequence.
#[derive(Debug)]
pub struct PageTables {
    entries: Vec<AtomicU32>,
    /// Entries of each lane's table.
    size: usize,
}

impl PageTables {
    /// Tables of `size` pages for each lane, all empty.
    pub fn new(lanes: u32, size: u32) -> Result<Self> {
        let count = lanes as usize * size as usize;
        let mut entries = vector(count, NAME, "page tables")?;
        entries.resize_with(count, || AtomicU32::new(NO_PAGE));
        Ok(PageTables { entries, size: size as usize })
    }

    /// Makes `pages` a lane's table. Pages beyond its size, and lanes out of range, are ignored.
    pub fn take(&self, lane: Lane, pages: &[u32]) {
        let table = self.entries.iter().skip(lane.index() * self.size).take(self.size);
        for (entry, page) in table.zip(pages.iter().chain(std::iter::repeat(&NO_PAGE))) {
            entry.store(*page, Ordering::Relaxed);
        }
    }

    /// The host page of a lane's page `index`; `None` beyond the sequence's end.
    #[inline(always)]
    pub fn page(&self, lane: Lane, index: usize) -> Option<u32> {
        let entry = self.entries.get(lane.index() * self.size + index).filter(|_| index < self.size)?;
        Some(entry.load(Ordering::Relaxed)).filter(|page| *page != NO_PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_has_the_pages_it_took_last_and_no_others() {
        let tables = PageTables::new(3, 4).unwrap();
        tables.take(Lane(0), &[7, 8, 9, 10]);
        tables.take(Lane(1), &[5, 0, 6]);
        tables.take(Lane(1), &[4, 3]);
        tables.take(Lane(2), &[1]);
        let row = |lane| (0..6).map(|index| tables.page(Lane(lane), index)).collect::<Vec<_>>();
        assert_eq!(row(0), [Some(7), Some(8), Some(9), Some(10), None, None]);
        assert_eq!(row(1), [Some(4), Some(3), None, None, None, None]);
        assert_eq!(row(2), [Some(1), None, None, None, None, None]);
        assert_eq!(row(3), [None; 6]);
    }
}
