//! The index of shared blocks: which published page holds which tokens, for which prefix, for whom.
//!
//! A *block* is a page's worth of tokens behind one certain prefix. Its name is a keyed BLAKE3 hash of 256 bits
//! over the parent's name, a key where the caller supplies one, the token ids, the geometry and the tenant's
//! salt; the first 64 bits find its place in the table. Two blocks are one only if their whole names agree: so what
//! collides in the table finds nothing of the other's, and nothing is ever shared across tenants or geometries.
//!
//! An entry is a block's pages (rows and index keys) and how many sequences use it. Entries without users
//! keep their pages and stand in order of use; [`PrefixIndex::evict`] takes the one used longest ago. Who
//! releases a sequence's blocks begins with the last, so that a prefix outlives its continuations.
//!
//! All memory is taken at construction: 64 to 72 bytes an entry. Looking up is one probe or a few of an open
//! table, whose places nobody can choose who does not know the cache's secret. What it does not do: it
//! moves no bytes, owns no page, and does not know when a page is published.

use std::fmt;

use super::Recency;
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::geometry::Shape;
use crate::ids::{HostPage, IndexPage};

/// A block's name. See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

/// What nobody may know who is to share only what is meant to be shared: it keys all names.
#[derive(Clone, Copy)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Names blocks for one tenant and one geometry.
#[derive(Clone, Copy, Debug)]
pub struct BlockHasher {
    /// The hash of all that the tenant's blocks have in common: the key of their own hashes.
    common: Secret,
}

impl BlockHasher {
    /// A namer under the cache's `secret`. Tenants with different salts share nothing.
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

    /// The block of `tokens` behind `parent`; behind nothing, the first of a sequence. A `key` of the caller's
    /// is a part of what the block is, and of what follows.
    pub fn block(&self, parent: Option<&BlockHash>, key: Option<&[u8; 16]>, tokens: &[u32]) -> BlockHash {
        let mut hash = blake3::Hasher::new_keyed(&self.common.0);
        // Names and keys could be tokens as well: the first byte says which of them follow.
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

/// The most blocks: their table has at most 2^31 places.
pub const CAPACITY_MAX: u32 = 1 << 30;

#[derive(Clone, Copy, Debug)]
struct Entry {
    block: BlockHash,
    pages: (HostPage, IndexPage),
    users: u32,
}

/// What [`PrefixIndex::insert`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The block was not there; its pages are shared from here on.
    New,
    /// The block was there with these pages, and has one user more.
    Known,
    /// The block is there with other pages; nothing has changed.
    Twin,
}

/// See the module's head.
#[derive(Debug)]
pub struct PrefixIndex {
    entries: Vec<Entry>,
    /// Entries to be used next.
    free: Vec<u32>,
    /// Open addressing, linear: the entry of each place. At least half of the places are empty.
    places: Vec<u32>,
    unused: Recency,
}

fn reserved<T: Clone>(value: T, count: usize) -> Result<Vec<T>> {
    filled(count, value, "new prefix index", "its tables")
}

impl PrefixIndex {
    /// The most that it takes for a block: its entry, its link, and up to four places of the table.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks that nobody uses.
    pub fn unused(&self) -> u32 {
        self.unused.len()
    }

    /// The place where the search for `block` begins.
    fn home(&self, block: &BlockHash) -> usize {
        let [a, b, c, d, e, f, g, h, ..] = block.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) as usize & (self.places.len() - 1)
    }

    /// Where `block` stands, or the empty place where it would: place and entry.
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

    /// Users of a block; `None` when it is not in the index.
    pub fn users(&self, block: &BlockHash) -> Option<u32> {
        self.find(block).1.map(|entry| self.entries[entry as usize].users)
    }

    /// All blocks, their pages and users, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (BlockHash, (HostPage, IndexPage), u32)> + '_ {
        let entries = self.places.iter().filter(|entry| **entry != NONE);
        let entries = entries.map(|entry| &self.entries[*entry as usize]);
        entries.map(|entry| (entry.block, entry.pages, entry.users))
    }

    /// One more user for a block, whose pages are answered; `None` when it is not in the index.
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

    /// Puts in a block with its `pages` and one user, or adds a user to the one that has these pages.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when the index is full: [`PrefixIndex::evict`] makes room, unless all are in use.
    /// [`Kind::Overflow`] as [`PrefixIndex::share`].
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
                .at("shared blocks")
                .with("blocks", self.len())
                .with("unused", self.unused())
        })?;
        self.entries[entry as usize] = Entry { block: *block, pages, users: 1 };
        self.places[place] = entry;
        Ok(Inserted::New)
    }

    /// One user less; a block that loses its last user becomes the newest of the unused.
    ///
    /// # Errors
    /// [`Kind::Internal`] when nobody uses it.
    pub fn release(&mut self, block: &BlockHash) -> Result<()> {
        let used = self.find(block).1.filter(|entry| self.entries[*entry as usize].users > 0);
        let entry = used.ok_or_else(|| Error::new(Kind::Internal, "release a block that nobody uses"))?;
        let users = &mut self.entries[entry as usize].users;
        *users -= 1;
        if *users == 0 {
            self.unused.touch(entry);
        }
        Ok(())
    }

    /// Takes a block out, used or not; answers its pages if it was there.
    pub fn remove(&mut self, block: &BlockHash) -> Option<(HostPage, IndexPage)> {
        let (place, entry) = self.find(block);
        let entry = entry?;
        self.unused.remove(entry);
        self.close_gap(place);
        self.free.push(entry);
        Some(self.entries[entry as usize].pages)
    }

    /// How many unused blocks have pages that `free` takes, counted up to `most`.
    pub fn evictable(&self, most: u32, free: impl Fn((HostPage, IndexPage)) -> bool) -> u32 {
        let pages = self.unused.iter().map(|entry| self.entries[entry as usize].pages);
        pages.filter(|pages| free(*pages)).take(most as usize).count() as u32
    }

    /// Takes out the unused block that was used longest ago, of those whose pages `free` takes; its pages are
    /// the caller's to free.
    pub fn evict(&mut self, free: impl Fn((HostPage, IndexPage)) -> bool) -> Option<(HostPage, IndexPage)> {
        let entry = self.unused.iter().find(|entry| free(self.entries[*entry as usize].pages))?;
        let block = self.entries[entry as usize].block;
        self.remove(&block)
    }

    /// Empties a place and moves up what could not stand there before, so that every search still ends right.
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
            // Both are distances along the ring: it moves if its home is not behind the gap.
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
