//! Device pages of index keys, which the indexer reads: one page for each host page of a sequence.
//!
//! An index key takes 132 bytes for each token and layer, so the index keys limit the number of live tokens on a GPU.
//! That is why they are a pool of their own, which admission counts separately. The engine writes the keys (operation
//! I0). Only the first layer of an index group has keys. forebay assigns the pages, and copies keys when it copies a
//! page.

use crate::device::{Device, Slice};
use crate::error::Result;
use crate::geometry::Geometries;
use crate::total::Pages;

/// The pool of index-key pages.
#[derive(Debug)]
pub struct IndexPool {
    pub(crate) pages: Pages,
    /// The keys of each index group's first layer, `[pages][page tokens][key bytes]`; empty for models without index
    /// keys.
    groups: Vec<Slice>,
    page_bytes: u64,
}

impl IndexPool {
    /// Takes the memory.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`], [`crate::Kind::Overflow`].
    pub fn new(geometry: &Geometries, pages: u32, device: &dyn Device) -> Result<Self> {
        let page_bytes = geometry.first().index_page_bytes();
        let bytes = geometry.index_bytes(pages)?;
        let mut groups = Vec::new();
        if bytes > 0 {
            let all = device.allocate(bytes)?;
            let count = geometry.groups().len() as u64;
            let one = bytes / count;
            for group in 0..count {
                groups.push(all.part(group * one, one)?);
            }
        }
        Ok(IndexPool { pages: Pages::new("index-key pages", pages)?, groups, page_bytes })
    }

    /// The keys of a group, all pages; `None` for models without index keys.
    pub fn group(&self, group: usize) -> Option<Slice> {
        self.groups.get(group).copied()
    }

    /// The number of groups that have keys: all, or none.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The copies that bring `bytes` of a sequence's keys to its pages `table`, from the byte `first` of the sequence
    /// on: where each begins in what is copied and in a group's keys, and its bytes. Pages that follow each other in
    /// the pool are one copy. It ends early if the pages do.
    pub fn copies<'a>(
        &self,
        table: &'a [u32],
        first: u64,
        bytes: u64,
    ) -> impl Iterator<Item = (u64, u64, u64)> + 'a {
        let page_bytes = self.page_bytes;
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = first + done;
            let mut page = at.checked_div(page_bytes)? as usize;
            let begin = *table.get(page).filter(|_| done < bytes)?;
            let inside = at % page_bytes;
            let mut here = (page_bytes - inside).min(bytes - done);
            while here < bytes - done && table.get(page + 1).copied() == table[page].checked_add(1) {
                page += 1;
                here = (here + page_bytes).min(bytes - done);
            }
            let copy = (done, u64::from(begin) * page_bytes + inside, here);
            done += here;
            Some(copy)
        })
    }

    /// The keys of one page in one group.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfRange`].
    pub fn page(&self, group: usize, page: u32) -> Result<Option<Slice>> {
        let part = |keys: &Slice| keys.part(u64::from(page) * self.page_bytes, self.page_bytes);
        self.groups.get(group).map(part).transpose()
    }
}
