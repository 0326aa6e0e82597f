//! The working memory of resolves.
//!
//! A resolve allocates nothing, so its caller brings the memory for all that the call notes: the selection as it was
//! read, the missed rows, the victims. This memory is separate from the tables because the calls of all layers can use
//! it one after the other. Only threads that resolve at the same time need one each.
//!
//! A call needs nothing from the call before it, but it relies on clear bits of missed rows and leaves them clear. Its
//! caller may read the selection afterwards. [`LayerTables::resolve`](crate::residency::LayerTables::resolve) checks
//! that the memory is large enough for its tables.

use crate::error::Result;
use crate::fallible::filled;
use crate::geometry::SLOT_BLOCK;
use crate::residency::tables::{OPERATION, TableShape};

/// The working memory of a call. Each thread needs one. Its size is fixed at construction.
#[derive(Debug)]
pub struct Workspace {
    /// One bit for each position: missed in this call. Clear between calls.
    pub(super) missed: Vec<u64>,
    /// The selection of the call, as it was read.
    pub(super) selection: Vec<i32>,
    /// The number of positions in `selection`.
    pub(super) selected: usize,
    /// The indices of the missed positions in the selection.
    pub(super) entries: Vec<u32>,
    /// The budget slots of the victims, as indices into the slot tables.
    pub(super) victims: Vec<u32>,
    /// For each block of the lane one bit for each slot: its stamp is below the bound.
    pub(super) older: Vec<u64>,
    /// For each block of the lane one bit for each slot: its stamp is the bound.
    pub(super) tied: Vec<u64>,
    /// The slots whose stamp is the bound.
    pub(super) ties: Vec<u32>,
    /// The positions of the missed rows, ascending, or of the ties.
    pub(super) positions: Vec<u32>,
}

impl Workspace {
    /// Working memory for layers whose tables are at most as large as `shape`, and for calls of at most `selected`
    /// positions (query rows times k).
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`].
    pub fn new(shape: &TableShape, selected: u32) -> Result<Self> {
        let words = (shape.tokens as usize).div_ceil(64);
        let blocks = shape.lane_blocks() as usize;
        // One block more than can be listed, so that lists may be written a vector at a time.
        let listed = (blocks + 1) * SLOT_BLOCK as usize;
        let (entries, place) = (selected as usize + SLOT_BLOCK as usize, "working memory");
        Ok(Workspace {
            missed: filled(words, 0, OPERATION, place)?,
            selection: filled(selected as usize, -1, OPERATION, place)?,
            selected: 0,
            entries: filled(entries, 0, OPERATION, place)?,
            victims: filled(listed, 0, OPERATION, place)?,
            ties: filled(listed, 0, OPERATION, place)?,
            older: filled(blocks, 0, OPERATION, place)?,
            tied: filled(blocks, 0, OPERATION, place)?,
            positions: filled(listed.max(entries), 0, OPERATION, place)?,
        })
    }

    /// The selection of the last call, as it was read.
    pub fn selection(&self) -> &[i32] {
        &self.selection[..self.selected]
    }

    /// The bytes of this working memory.
    pub fn bytes(&self) -> u64 {
        let lists = [&self.entries, &self.victims, &self.ties, &self.positions];
        let words = self.selection.len() + lists.iter().map(|list| list.len()).sum::<usize>();
        let sets = self.missed.len() + self.older.len() + self.tied.len();
        (4 * words + 8 * sets) as u64
    }
}
