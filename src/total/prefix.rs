//! The prefix index: it finds published pages by block hash (vLLM: cached full blocks).
//!
//! A *prefix block* is one page of tokens after a certain prefix. Its block hash is a keyed 256-bit BLAKE3 hash of the
//! parent's hash, the caller's key if there is one, the token ids, the geometry and the tenant's salt. The first 64
//! bits of the hash give its place in the table. Two blocks are equal only if all bits of their hashes are equal. So a
//! collision in the table never finds another block, and tenants or geometries never share a block.
//!
//! An entry holds a block's pages (rows and index keys) and the number of sequences that use it. Entries without users
//! keep their pages, in LRU order; [`PrefixIndex::evict`] removes the least recently used one. A caller that releases
//! a sequence's blocks begins with the last block, so that a prefix stays longer than its continuations.
//!
//! All memory is allocated at construction: 64 to 72 bytes for each entry. A lookup takes one or a few probes of an
//! open-addressing table. Without the cache's secret a client cannot choose the places that its blocks take.
//!
//! The index moves no bytes, owns no page, and does not decide when a page is published.

use std::fmt;

use super::Recency;
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::geometry::Shape;
use crate::ids::{HostPage, IndexPage};

/// The hash of a prefix block. See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

/// The secret key of all block hashes. Without it a client cannot guess the block hashes of another tenant's prefixes.
#[derive(Clone, Copy)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Computes the block hashes of one tenant and one geometry.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    /// The hash of the data that all blocks of the tenant share. It is the key of their block hashes.
    common: Secret,
}

impl BlockHasher {
    /// A hasher with the cache's `secret`. Tenants with different salts share no blocks.
    pub fn new(secret: &Secret, shape: &Shape, salt: &[u8]) -> BlockHasher {
        let mut common = blake3::Hasher::new_keyed(&secret.0);
        let Shape {
            layers,
            draft_layers,
            runs: [first, second],
            host_stride,
            device_block_align,
            index_key_bytes,
            page_tokens,
            top_k,
            // Which layers share a selection changes no bytes of a block.
            lone_layers: _,
            group_layers: _,
        } = *shape;
        for field in [
            layers,
            draft_layers,
            first,
            second,
            host_stride,
            device_block_align,
            index_key_bytes,
            page_tokens,
            top_k,
        ] {
            common.update(&field.to_le_bytes());
        }
        common.update(salt);
        BlockHasher { common: Secret(*common.finalize().as_bytes()) }
    }

    /// The hash of the block with `tokens` after `parent`. Without a parent it is the first block of a sequence. The
    /// caller's `key` is part of this hash, and so of all hashes after it.
    pub fn block(&self, parent: Option<&BlockHash>, key: Option<&[u8; 16]>, tokens: &[u32]) -> BlockHash {
        let mut hash = blake3::Hasher::new_keyed(&self.common.0);
        // A parent's hash or a key could be mistaken for tokens, so the first byte says which of them follow.
        hash.update(&[u8::from(parent.is_some()) | u8::from(key.is_some()) << 1]);
        hash.update(parent.map_or(&[][..], |BlockHash(name)| name));
        hash.update(key.map_or(&[][..], |key| key));
        for token in tokens {
            hash.update(&token.to_le_bytes());
        }
        BlockHash(*hash.finalize().as_bytes())
    }
}

/// No entry.
const NONE: u32 = u32::MAX;

/// The most blocks, so that the table has at most 2^31 places.
pub const CAPACITY_MAX: u32 = 1 << 30;

#[derive(Clone, Copy, Debug)]
struct Entry {
    block: BlockHash,
    pages: (HostPage, IndexPage),
    users: u32,
}

/// The result of [`PrefixIndex::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The index did not have the block. From now on its pages are shared.
    New,
    /// The index had the block with these pages. It has one more user now.
    Known,
    /// The index has the block with other pages. Nothing has changed.
    Twin,
}

/// See the module's head.
#[derive(Debug)]
pub struct PrefixIndex {
    entries: Vec<Entry>,
    /// Free entries.
    free: Vec<u32>,
    /// The entry of each place, by open addressing with linear probing. At least half of the places are empty.
    places: Vec<u32>,
    unused: Recency,
}

fn reserved<T: Clone>(value: T, count: usize) -> Result<Vec<T>> {
    filled(count, value, "new prefix index", "its tables")
}

impl PrefixIndex {
    /// The most bytes for one block: its entry, its link, and up to four places of the table.
    pub const ENTRY_BYTES: u64 = 72;

    /// An empty index of at most `capacity` blocks.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] beyond [`CAPACITY_MAX`]; [`Kind::OutOfMemory`].
    pub fn new(capacity: u32) -> Result<PrefixIndex> {
        if capacity > CAPACITY_MAX {
            return Err(Error::new(Kind::OutOfRange, "new prefix index")
                .with("blocks", capacity)
                .with("most", CAPACITY_MAX));
        }
        let nothing = Entry { block: BlockHash([0; 32]), pages: (HostPage(0), IndexPage(0)), users: 0 };
        let unused = Recency::new(capacity).map_err(|bytes| {
            Error::new(Kind::OutOfMemory, "new prefix index").at("the order of use").with("bytes", bytes)
        })?;
        let mut free = reserved(0, capacity as usize)?;
        free.iter_mut().zip((0..capacity).rev()).for_each(|(place, entry)| *place = entry);
        Ok(PrefixIndex {
            entries: reserved(nothing, capacity as usize)?,
            free,
            places: reserved(NONE, (capacity.max(1) as usize * 2).next_power_of_two())?,
            unused,
        })
    }

    /// Blocks in the index, used or not.
    pub fn len(&self) -> u32 {
        (self.entries.len() - self.free.len()) as u32
    }

    /// Whether the index is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks without users.
    pub fn unused(&self) -> u32 {
        self.unused.len()
    }

    /// The place at which the search for `block` begins.
    fn home(&self, block: &BlockHash) -> usize {
        let [a, b, c, d, e, f, g, h, ..] = block.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) as usize & (self.places.len() - 1)
    }

    /// The place and entry of `block`, or the empty place where it would be inserted.
    fn find(&self, block: &BlockHash) -> (usize, Option<u32>) {
        let mut place = self.home(block);
        loop {
            let entry = self.places[place];
            if entry == NONE {
                return (place, None);
            }
            if self.entries[entry as usize].block == *block {
                return (place, Some(entry));
            }
            place = (place + 1) & (self.places.len() - 1);
        }
    }

    /// The pages of a block.
    pub fn pages(&self, block: &BlockHash) -> Option<(HostPage, IndexPage)> {
        self.find(block).1.map(|entry| self.entries[entry as usize].pages)
    }

    /// The number of users of a block; `None` if the index does not have it.
    pub fn users(&self, block: &BlockHash) -> Option<u32> {
        self.find(block).1.map(|entry| self.entries[entry as usize].users)
    }

    /// All blocks with their pages and numbers of users, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, (HostPage, IndexPage), u32)> + '_ {
        let entries = self.places.iter().filter(|entry| **entry != NONE);
        let entries = entries.map(|entry| &self.entries[*entry as usize]);
        entries.map(|entry| (entry.block, entry.pages, entry.users))
    }

    /// Adds a user to a block and returns its pages; `None` if the index does not have it.
    ///
    /// # Errors
    /// [`Kind::Overflow`] past 2^32 - 1 users.
    pub fn share(&mut self, block: &BlockHash) -> Result<Option<(HostPage, IndexPage)>> {
        let Some(entry) = self.find(block).1 else { return Ok(None) };
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
        let (place, found) = self.find(block);
        match found {
            Some(entry) if self.entries[entry as usize].pages == pages => {
                return self.add_user(entry).map(|()| Inserted::Known);
            }
            Some(_) => return Ok(Inserted::Twin),
            None => {}
        }
        let entry = self.free.pop().ok_or_else(|| {
            Error::new(Kind::Exhausted, "insert")
                .at("published pages")
                .with("pages", self.len())
                .with("unused", self.unused())
        })?;
        self.entries[entry as usize] = Entry { block: *block, pages, users: 1 };
        self.places[place] = entry;
        Ok(Inserted::New)
    }

    /// Removes a user. A block that loses its last user becomes the newest of the unused blocks.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the block has no users.
    pub fn release(&mut self, block: &BlockHash) -> Result<()> {
        let used = self.find(block).1.filter(|entry| self.entries[*entry as usize].users > 0);
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
        let (place, entry) = self.find(block);
        let entry = entry?;
        self.unused.remove(entry);
        self.close_gap(place);
        self.free.push(entry);
        Some(self.entries[entry as usize].pages)
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
        let block = self.entries[entry as usize].block;
        self.remove(&block)
    }

    /// Empties a place, and moves later entries into the gap so that every search still finds its entry.
    fn close_gap(&mut self, mut gap: usize) {
        let last = self.places.len() - 1;
        let mut place = gap;
        loop {
            place = (place + 1) & last;
            let entry = self.places[place];
            if entry == NONE {
                break;
            }
            let home = self.home(&self.entries[entry as usize].block);
            // Both are distances along the ring. The entry moves if its home is not after the gap.
            if place.wrapping_sub(home) & last >= place.wrapping_sub(gap) & last {
                self.places[gap] = entry;
                gap = place;
            }
        }
        self.places[gap] = NONE;
    }
}

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
