//! The page table of a sequence: for each 64 tokens a host page of rows and a device page of index keys.

use crate::ids::{HostPage, IndexPage};

/// Pages in the order of the sequence. The two lists have the same length, always.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageTable {
    pub(crate) host: Vec<u32>,
    pub(crate) index: Vec<u32>,
}

impl PageTable {
    /// The number of pages.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// The pair at `page`.
    pub fn get(&self, page: usize) -> Option<(HostPage, IndexPage)> {
        Some((HostPage(*self.host.get(page)?), IndexPage(*self.index.get(page)?)))
    }

    /// The first `pages` pages.
    pub fn head(&self, pages: usize) -> PageTable {
        let pages = pages.min(self.len());
        PageTable { host: self.host[..pages].to_vec(), index: self.index[..pages].to_vec() }
    }
}
