//! The pages of aborted sequences to which others may still write: see `abort`.

use crate::error::Result;
use crate::fallible::vector;
use crate::total::PageTable;
use crate::total::withheld::WithheldPages;

/// The pages of one abort: of rows, and as many of index keys.
#[derive(Debug)]
pub(super) struct Pages {
    pub(super) host: Vec<u32>,
    pub(super) index: Vec<u32>,
}

impl Pages {
    /// The pages of a table from `first` on.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`].
    pub(super) fn from(table: &PageTable, first: usize) -> Result<Pages> {
        let room = || vector(table.len(), "abort", "withheld pages");
        let mut pages = Pages { host: room()?, index: room()? };
        pages.host.extend(table.host.iter().skip(first));
        pages.index.extend(table.index.iter().skip(first));
        Ok(pages)
    }
}

/// Pages of rows that are withheld, and as many of index keys.
pub(super) fn pages(withheld: &WithheldPages<Pages>) -> u32 {
    withheld.lists().map(|pages| pages.host.len() as u32).sum()
}

/// Adds withheld pages to the counts of page owners.
pub(super) fn count(withheld: &WithheldPages<Pages>, host: &mut [u32], index: &mut [u32]) {
    for pages in withheld.lists() {
        pages.host.iter().for_each(|page| host[*page as usize] += 1);
        pages.index.iter().for_each(|page| index[*page as usize] += 1);
    }
}
