//! The pages of aborted sequences to which others may still write: see `abort`.

use crate::error::Result;
use crate::fallible::{reserve, vector};
use crate::sync::unique;
use crate::total::PageTable;

/// The pages of an aborted sequence, until [`Cache::release`](crate::Cache::release). No other abort of the process has
/// the same, in any cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Withheld {
    cache: u32,
    abort: u64,
}

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

/// The pages of all aborts that were not released.
#[derive(Debug)]
pub(super) struct WithheldPages {
    /// Distinguishes its aborts from those of other caches.
    cache: u32,
    /// Aborts so far. No two have the same number.
    aborts: u64,
    lists: Vec<(Withheld, Pages)>,
}

impl WithheldPages {
    pub(super) fn new() -> WithheldPages {
        WithheldPages { cache: unique(), aborts: 0, lists: Vec::new() }
    }

    /// Makes room for one more abort.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`].
    pub(super) fn reserve(&mut self) -> Result<()> {
        reserve(&mut self.lists, 1, "abort", "withheld pages")
    }

    /// Adds the pages of an abort.
    pub(super) fn add(&mut self, pages: Pages) -> Withheld {
        let withheld = Withheld { cache: self.cache, abort: self.aborts };
        self.aborts += 1;
        self.lists.push((withheld, pages));
        withheld
    }

    /// Removes the pages of an abort; none if they were removed before.
    pub(super) fn take(&mut self, withheld: Withheld) -> Option<Pages> {
        let place = self.lists.iter().position(|(own, _)| *own == withheld)?;
        Some(self.lists.swap_remove(place).1)
    }

    /// Pages of rows that are withheld, and as many of index keys.
    pub(super) fn pages(&self) -> u32 {
        self.lists.iter().map(|(_, pages)| pages.host.len() as u32).sum()
    }

    /// Adds its pages to the counts of page owners.
    pub(super) fn count(&self, host: &mut [u32], index: &mut [u32]) {
        for (_, pages) in &self.lists {
            pages.host.iter().for_each(|page| host[*page as usize] += 1);
            pages.index.iter().for_each(|page| index[*page as usize] += 1);
        }
    }
}
