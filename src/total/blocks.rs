//! The table of blocks: it gives each block hash a small number, its *entry*.
//!
//! Open addressing with linear probing; at least half of the places are empty, so that a look-up takes one or a few
//! probes. The first 32 bits of the hash give a block its place, and all 256 bits are compared. So a collision in the
//! table never finds another block. A removal moves later blocks into the gap: there are no tombstones, and a table
//! that changes for years is as fast as a new one.
//!
//! An entry is an index into the tables that the owner keeps beside this one: what it knows of a block. All memory is
//! allocated at construction: 52 to 68 bytes for each entry.
//!
//! A place holds the low bits of its block's hash beside the entry. So a search reads no hash of another block, and a
//! removal reads none at all: with tens of thousands of blocks each would be a miss of the processor's cache.

use super::BlockHash;
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;

/// No entry.
const NONE: u32 = u32::MAX;

/// A place of the table.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// [`NONE`] if the place is empty.
    entry: u32,
    /// The low bits of the block's hash: at least those that give its place.
    mark: u32,
}

const EMPTY: Place = Place { entry: NONE, mark: 0 };

/// The most blocks, so that the table has at most 2^31 places.
pub const CAPACITY_MAX: u32 = 1 << 30;

/// The result of inserting a block that a sequence has published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// There was no such block. From now on its pages are shared.
    New,
    /// The block was there with these pages. It has one more user now.
    Known,
    /// The block is there with other pages. Nothing has changed.
    Twin,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct BlockTable {
    /// The block of each entry; of a free entry the last block that it had.
    blocks: Vec<BlockHash>,
    /// Free entries.
    free: Vec<u32>,
    places: Vec<Place>,
}

impl BlockTable {
    /// The most bytes for one block: its hash, its entry in the free list, and up to four places.
    pub(super) const ENTRY_BYTES: u64 = 68;

    /// An empty table of at most `capacity` blocks. Errors name the `operation`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] beyond [`CAPACITY_MAX`]; [`Kind::OutOfMemory`].
    pub(super) fn new(capacity: u32, operation: &'static str) -> Result<BlockTable> {
        if capacity > CAPACITY_MAX {
            return Err(Error::new(Kind::OutOfRange, operation)
                .with("blocks", capacity)
                .with("most", CAPACITY_MAX));
        }
        let mut free = filled(capacity as usize, 0, operation, "its tables")?;
        free.iter_mut().zip((0..capacity).rev()).for_each(|(place, entry)| *place = entry);
        let places = (capacity.max(1) as usize * 2).next_power_of_two();
        Ok(BlockTable {
            blocks: filled(capacity as usize, BlockHash([0; 32]), operation, "its tables")?,
            free,
            places: filled(places, EMPTY, operation, "its tables")?,
        })
    }

    /// The number of blocks.
    pub(super) fn len(&self) -> u32 {
        (self.blocks.len() - self.free.len()) as u32
    }

    /// The place at which the search for a block with this mark begins.
    #[inline]
    fn home(&self, mark: u32) -> usize {
        mark as usize & (self.places.len() - 1)
    }

    /// The entry of `block`, or the empty place where it would be inserted.
    #[inline]
    pub(super) fn find(&self, block: &BlockHash) -> std::result::Result<u32, usize> {
        let mark = block.mark();
        let mut place = self.home(mark);
        loop {
            let Place { entry, mark: other } = self.places[place];
            if entry == NONE {
                return Err(place);
            }
            if other == mark && self.blocks[entry as usize] == *block {
                return Ok(entry);
            }
            place = (place + 1) & (self.places.len() - 1);
        }
    }

    /// The block of an entry.
    #[inline]
    pub(super) fn block(&self, entry: u32) -> &BlockHash {
        &self.blocks[entry as usize]
    }

    /// All entries that have a block, in no particular order.
    pub(super) fn entries(&self) -> impl Iterator<Item = u32> + '_ {
        self.places.iter().map(|place| place.entry).filter(|entry| *entry != NONE)
    }

    /// Gives `block` an entry. [`BlockTable::find`] returned `place` for it, and the table has not changed since.
    /// `None` if no entry is free.
    #[inline]
    pub(super) fn insert(&mut self, place: usize, block: &BlockHash) -> Option<u32> {
        let entry = self.free.pop()?;
        self.blocks[entry as usize] = *block;
        self.places[place] = Place { entry, mark: block.mark() };
        Some(entry)
    }

    /// Frees an entry that has a block.
    #[inline]
    pub(super) fn remove(&mut self, entry: u32) {
        let mut place = self.home(self.blocks[entry as usize].mark());
        while self.places[place].entry != entry {
            place = (place + 1) & (self.places.len() - 1);
        }
        self.close_gap(place);
        self.free.push(entry);
    }

    /// Empties a place, and moves later entries into the gap so that every search still finds its entry.
    fn close_gap(&mut self, mut gap: usize) {
        let last = self.places.len() - 1;
        let mut place = gap;
        loop {
            place = (place + 1) & last;
            let Place { entry, mark } = self.places[place];
            if entry == NONE {
                break;
            }
            let home = self.home(mark);
            // Both are distances along the ring. The entry moves if its home is not after the gap.
            if place.wrapping_sub(home) & last >= place.wrapping_sub(gap) & last {
                self.places[gap] = Place { entry, mark };
                gap = place;
            }
        }
        self.places[gap] = EMPTY;
    }

    /// The addresses of the tables, which never change.
    #[cfg(test)]
    pub(super) fn tables(&self) -> [usize; 3] {
        [self.blocks.as_ptr() as usize, self.free.as_ptr() as usize, self.places.as_ptr() as usize]
    }
}
