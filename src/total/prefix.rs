//! The prefix index: it finds published pages by block hash (vLLM: cached full blocks).
//!
//! An entry holds a block's pages (rows and index keys) and the number of sequences that use it. Entries without users
//! keep their pages, in LRU order; [`PrefixIndex::evict`] removes the least recently used one. A caller that releases
//! a sequence's blocks begins with the last block, so that a prefix stays longer than its continuations.
//!
//! All memory is allocated at construction: 72 to 88 bytes for each entry. A lookup takes one or a few probes of the
//! table of blocks.
//!
//! The index moves no bytes, owns no page, and does not decide when a page is published.

use super::blocks::{BlockTable, Inserted};
use super::{BlockHash, Recency};
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::ids::{HostPage, IndexPage};

#[derive(Clone, Copy, Debug)]
struct Entry {
    pages: (HostPage, IndexPage),
    users: u32,
}

/// See the module's head.
#[derive(Debug)]
pub struct PrefixIndex {
    table: BlockTable,
    entries: Vec<Entry>,
    unused: Recency,
}

const NEW: &str = "new prefix index";

impl PrefixIndex {
    /// The most bytes for one block: its place in the table, its entry and its link.
    pub const ENTRY_BYTES: u64 = BlockTable::ENTRY_BYTES + 20;

    /// An empty index of at most `capacity` blocks.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] beyond [`super::CAPACITY_MAX`]; [`Kind::OutOfMemory`].
    pub fn new(capacity: u32) -> Result<PrefixIndex> {
        let table = BlockTable::new(capacity, NEW)?;
        let nothing = Entry { pages: (HostPage(0), IndexPage(0)), users: 0 };
        let entries = filled(capacity as usize, nothing, NEW, "its tables")?;
        let unused = Recency::new(capacity).map_err(|bytes| {
            Error::new(Kind::OutOfMemory, NEW).at("the order of use").with("bytes", bytes)
        })?;
        Ok(PrefixIndex { table, entries, unused })
    }

    /// Blocks in the index, used or not.
    pub fn len(&self) -> u32 {
        self.table.len()
    }

    /// Whether the index is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks without users.
    pub fn unused(&self) -> u32 {
        self.unused.len()
    }

    fn find(&self, block: &BlockHash) -> Option<u32> {
        self.table.find(block).ok()
    }

    /// The pages of a block.
    pub fn pages(&self, block: &BlockHash) -> Option<(HostPage, IndexPage)> {
        self.find(block).map(|entry| self.entries[entry as usize].pages)
    }

    /// The number of users of a block; `None` if the index does not have it.
    pub fn users(&self, block: &BlockHash) -> Option<u32> {
        self.find(block).map(|entry| self.entries[entry as usize].users)
    }

    /// All blocks with their pages and numbers of users, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, (HostPage, IndexPage), u32)> + '_ {
        self.table.entries().map(|entry| {
            let Entry { pages, users } = self.entries[entry as usize];
            (*self.table.block(entry), pages, users)
        })
    }

    /// Adds a user to a block and returns its pages; `None` if the index does not have it.
    ///
    /// # Errors
    /// [`Kind::Overflow`] past 2^32 - 1 users.
    pub fn share(&mut self, block: &BlockHash) -> Result<Option<(HostPage, IndexPage)>> {
        let Some(entry) = self.find(block) else { return Ok(None) };
        self.add_user(entry)?;
        Ok(Some(self.entries[entry as usize].pages))
    }

    fn add_user(&mut self, entry: u32) -> Result<()> {
        let users = &mut self.entries[entry as usize].users;
        *users =
            users.checked_add(1).ok_or_else(|| Error::new(Kind::Overflow, "share").at("users of a block"))?;
        self.unused.remove(entry);
        Ok(())
    }

    /// Inserts a block with its `pages` and one user. If the index already has the block with these pages, it adds a
    /// user.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] if the index is full: [`PrefixIndex::evict`] makes room, unless all blocks are in use.
    /// [`Kind::Overflow`] as in [`PrefixIndex::share`].
    pub fn insert(&mut self, block: &BlockHash, pages: (HostPage, IndexPage)) -> Result<Inserted> {
        let place = match self.table.find(block) {
            Ok(entry) if self.entries[entry as usize].pages == pages => {
                return self.add_user(entry).map(|()| Inserted::Known);
            }
            Ok(_) => return Ok(Inserted::Twin),
            Err(place) => place,
        };
        let entry = self.table.insert(place, block).ok_or_else(|| {
            Error::new(Kind::Exhausted, "insert")
                .at("published pages")
                .with("pages", self.len())
                .with("unused", self.unused())
        })?;
        self.entries[entry as usize] = Entry { pages, users: 1 };
        Ok(Inserted::New)
    }

    /// Removes a user. A block that loses its last user becomes the newest of the unused blocks.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the block has no users.
    pub fn release(&mut self, block: &BlockHash) -> Result<()> {
        let used = self.find(block).filter(|entry| self.entries[*entry as usize].users > 0);
        let entry = used.ok_or_else(|| Error::new(Kind::Internal, "release a block without users"))?;
        let users = &mut self.entries[entry as usize].users;
        *users -= 1;
        if *users == 0 {
            self.unused.touch(entry);
        }
        Ok(())
    }

    /// Removes a block, used or not. Returns its pages if the index had it.
    pub fn remove(&mut self, block: &BlockHash) -> Option<(HostPage, IndexPage)> {
        self.find(block).map(|entry| self.remove_entry(entry))
    }

    /// The number of unused blocks whose pages satisfy `free`, counted up to `most`.
    pub fn evictable(&self, most: u32, free: impl Fn((HostPage, IndexPage)) -> bool) -> u32 {
        let pages = self.unused.iter().map(|entry| self.entries[entry as usize].pages);
        pages.filter(|pages| free(*pages)).take(most as usize).count() as u32
    }

    /// Removes the least recently used of the unused blocks whose pages satisfy `free`. The caller frees the returned
    /// pages.
    pub fn evict(&mut self, free: impl Fn((HostPage, IndexPage)) -> bool) -> Option<(HostPage, IndexPage)> {
        let entry = self.unused.iter().find(|entry| free(self.entries[*entry as usize].pages))?;
        Some(self.remove_entry(entry))
    }

    fn remove_entry(&mut self, entry: u32) -> (HostPage, IndexPage) {
        self.unused.remove(entry);
        self.table.remove(entry);
        self.entries[entry as usize].pages
    }
}

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
