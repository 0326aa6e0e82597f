//! The index of shared blocks: which sealed page holds which tokens, for which prefix, for whom.
//!
//! A *block* is a page's worth of tokens behind one certain prefix. Its name has two halves of 128 bits. The
//! *key* finds it: a keyed BLAKE3 hash over the parent's name, the token ids, the geometry and the tenant's
//! salt, or what the caller supplies. The *check* is always the hash. Two blocks are one only if both
//! halves agree; so a key that collides, or that a caller gives twice, finds nothing of the other's, and
//! nothing is ever shared across tenants or geometries.
//!
//! An entry is a block's page and how many use it. Entries without users keep their page and stand in order
//! of use; [`PrefixIndex::evict`] takes the one used longest ago. A request's blocks are released and touched
//! the last one first, so that a prefix outlives its continuations.
//!
//! All memory is taken at construction: 60 to 68 bytes an entry. Looking up is one probe or a few of an open
//! table, whose places come from the check, which nobody outside can choose. What it does not do: it
//! moves no bytes, owns no page, and does not know when a page is sealed.

use super::Recency;
use crate::error::{Error, Kind, Result};
use crate::geometry::Shape;
use crate::ids::HostPage;

/// A block's name. See the module's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    key: [u8; 16],
    check: [u8; 16],
}

impl Block {
    /// What finds it, across caches that share secret, salt and geometry.
    pub const fn key(&self) -> [u8; 16] {
        self.key
    }
}

/// Names blocks for one tenant and one geometry.
#[derive(Clone)]
pub struct Namer {
    /// The hash of all that the tenant's blocks have in common; what follows is parent and tokens.
    common: blake3::Hasher,
    root: Block,
}

impl Namer {
    /// A namer under the cache's `secret`. Tenants with different salts share nothing.
    pub fn new(secret: &[u8; 32], shape: &Shape, salt: &[u8]) -> Namer {
        let mut common = blake3::Hasher::new_keyed(secret);
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
        common.update(&(salt.len() as u64).to_le_bytes());
        common.update(salt);
        let root = split(&common);
        Namer { common, root }
    }

    /// The parent of first blocks.
    pub const fn root(&self) -> Block {
        self.root
    }

    /// The block of `tokens` behind `parent`.
    pub fn block(&self, parent: &Block, tokens: &[u32]) -> Block {
        let mut hash = self.common.clone();
        hash.update(&parent.key);
        hash.update(&parent.check);
        for token in tokens {
            hash.update(&token.to_le_bytes());
        }
        split(&hash)
    }

    /// The block that the caller found by a `key` of its own. What it holds is told all the same: a key
    /// given to other tokens or behind another parent is another block.
    pub fn supplied(&self, key: [u8; 16], parent: &Block, tokens: &[u32]) -> Block {
        Block { key, ..self.block(parent, tokens) }
    }
}

/// Both halves of a hash.
fn split(hash: &blake3::Hasher) -> Block {
    let bytes = *hash.finalize().as_bytes();
    let (mut key, mut check) = ([0; 16], [0; 16]);
    key.copy_from_slice(&bytes[..16]);
    check.copy_from_slice(&bytes[16..]);
    Block { key, check }
}

/// No entry.
const NONE: u32 = u32::MAX;

/// The most blocks: their table has at most 2^31 places.
pub const CAPACITY_MAX: u32 = 1 << 30;

#[derive(Clone, Copy, Debug)]
struct Entry {
    block: Block,
    page: HostPage,
    users: u32,
}

/// What [`PrefixIndex::insert`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The block is new; its page is shared from here on.
    New,
    /// The block was there with this page, which the caller uses from here on; its own stays its own.
    Present(HostPage),
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
    let mut table = Vec::new();
    table.try_reserve_exact(count).map_err(|_| {
        Error::new(Kind::OutOfMemory, "new prefix index")
            .at("its tables")
            .with("bytes", (count * size_of::<T>()) as u64)
    })?;
    table.resize(count, value);
    Ok(table)
}

impl PrefixIndex {
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
        let nothing = Entry { block: Block { key: [0; 16], check: [0; 16] }, page: HostPage(0), users: 0 };
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
    fn home(&self, block: &Block) -> usize {
        let [a, b, c, d, e, f, g, h, ..] = block.check;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) as usize & (self.places.len() - 1)
    }

    /// Where `block` stands, or the empty place where it would: place and entry.
    fn find(&self, block: &Block) -> (usize, Option<u32>) {
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

    /// The page of a block.
    pub fn page(&self, block: &Block) -> Option<HostPage> {
        self.find(block).1.map(|entry| self.entries[entry as usize].page)
    }

    /// Users of a block; `None` when it is not in the index.
    pub fn users(&self, block: &Block) -> Option<u32> {
        self.find(block).1.map(|entry| self.entries[entry as usize].users)
    }

    /// How many of `blocks` are there, from the first on, up to the first that is not.
    pub fn leading_run(&self, blocks: &[Block]) -> usize {
        blocks.iter().take_while(|block| self.find(block).1.is_some()).count()
    }

    /// One more user for every block of the leading run; answers its length.
    ///
    /// # Errors
    /// [`Kind::Overflow`] past 2^32 - 1 users of a block; nothing has changed then.
    pub fn share(&mut self, blocks: &[Block]) -> Result<usize> {
        for (i, block) in blocks.iter().enumerate() {
            let Some(entry) = self.find(block).1 else { return Ok(i) };
            if let Err(e) = self.add_user(entry) {
                self.release(&blocks[..i])?;
                return Err(e);
            }
        }
        Ok(blocks.len())
    }

    fn add_user(&mut self, entry: u32) -> Result<()> {
        let users = &mut self.entries[entry as usize].users;
        *users =
            users.checked_add(1).ok_or_else(|| Error::new(Kind::Overflow, "share").at("users of a block"))?;
        self.unused.remove(entry);
        Ok(())
    }

    /// Puts in a block with its `page` and one user, or adds a user to the one that is there.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] when the index is full: [`PrefixIndex::evict`] makes room, unless all are in use.
    /// [`Kind::Overflow`] as [`PrefixIndex::share`].
    pub fn insert(&mut self, block: &Block, page: HostPage) -> Result<Inserted> {
        let (place, found) = self.find(block);
        if let Some(entry) = found {
            self.add_user(entry)?;
            return Ok(Inserted::Present(self.entries[entry as usize].page));
        }
        let entry = self.free.pop().ok_or_else(|| {
            Error::new(Kind::Exhausted, "insert")
                .at("shared blocks")
                .with("blocks", self.len())
                .with("unused", self.unused())
        })?;
        self.entries[entry as usize] = Entry { block: *block, page, users: 1 };
        self.places[place] = entry;
        Ok(Inserted::New)
    }

    /// One user less for each of `blocks`, the last one first; a block that loses its last user becomes the
    /// newest of the unused.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] at the first, from the end, that nobody uses; those behind it were released.
    pub fn release(&mut self, blocks: &[Block]) -> Result<()> {
        for (i, block) in blocks.iter().enumerate().rev() {
            let used = self.find(block).1.filter(|entry| self.entries[*entry as usize].users > 0);
            let entry = used.ok_or_else(|| {
                Error::new(Kind::OutOfRange, "release")
                    .at("a block that nobody uses")
                    .with("block", i as u64)
                    .hint("release what was shared or inserted, once")
            })?;
            let users = &mut self.entries[entry as usize].users;
            *users -= 1;
            if *users == 0 {
                self.unused.touch(entry);
            }
        }
        Ok(())
    }

    /// Makes the unused among `blocks` the newest, the last one first.
    pub fn touch(&mut self, blocks: &[Block]) {
        for block in blocks.iter().rev() {
            if let (_, Some(entry)) = self.find(block)
                && self.entries[entry as usize].users == 0
            {
                self.unused.touch(entry);
            }
        }
    }

    /// Forgets the unused block that was used longest ago; its page is the caller's to free.
    pub fn evict(&mut self) -> Option<(Block, HostPage)> {
        let entry = self.unused.pop_oldest()?;
        let Entry { block, page, .. } = self.entries[entry as usize];
        self.close_gap(self.find(&block).0);
        self.free.push(entry);
        Some((block, page))
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
