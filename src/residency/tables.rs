//! The residency tables of one layer, as flat arrays, and how a lane joins and leaves them.

use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::geometry::SLOT_BLOCK;

/// In `slot_of`: the position has no slot. No row ever gets slot 0, so a lookup can stamp the slot that it finds
/// without a branch.
pub const ABSENT: u32 = 0;

/// In `position_of`: the slot holds no row. In a selection (there -1): no position.
pub const EMPTY: u32 = u32::MAX;

/// The stamp of a slot that holds no row. It is the oldest stamp, so empty slots are taken first.
pub(super) const FREE: u32 = 0;
/// The stamp of rows loaded when the sequence joins. It is older than the stamp of any step.
pub(super) const WARMED: u32 = 1;
/// The stamp of slots in a lane's last block beyond its budget, which are never victims. All other stamps are below it,
/// and so below `i32::MAX`: signed vector compares order them.
pub(super) const UNUSED: u32 = i32::MAX as u32;

/// The declared sizes of a layer's residency tables. Slot ids count through the layer's slab: first the scratch
/// blocks, then the landing blocks, then the budget blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Lanes.
    pub lanes: u32,
    /// Tokens of the longest sequence, promised and in-flight rows included.
    pub tokens: u32,
    /// Landing slots of a lane: the most query rows of a step.
    pub query_rows: u32,
    /// Scratch slots of a lane.
    pub scratch: u32,
    /// Attention waves over the rows that a step fetches. The rows beyond the budget use the scratch slots one wave
    /// after the other, at most `scratch` rows in each wave.
    pub waves: u32,
    /// Slot id of the first scratch slot. A lane's scratch slots begin at `scratch_base + lane * scratch`.
    pub scratch_base: u32,
    /// Slot id of the first landing slot. A lane's landing slots begin at `landing_base + lane * query_rows`.
    pub landing_base: u32,
    /// Slot id of the first budget slot, a multiple of [`SLOT_BLOCK`].
    pub budget_base: u32,
    /// Number of blocks of [`SLOT_BLOCK`] budget slots.
    pub budget_blocks: u32,
}

impl TableShape {
    /// Blocks of the largest possible budget of one lane.
    pub const fn lane_blocks(&self) -> u32 {
        let most = self.tokens.div_ceil(SLOT_BLOCK);
        if most < self.budget_blocks { most } else { self.budget_blocks }
    }

    /// Rows of a lane that a step may fetch beyond the budget.
    pub const fn scratch_rows(&self) -> usize {
        self.scratch as usize * self.waves as usize
    }

    /// The number of slot ids of the slab. All ids are below it.
    pub const fn slots(&self) -> u32 {
        self.budget_base.saturating_add(self.budget_blocks.saturating_mul(SLOT_BLOCK))
    }

    /// Bytes of a layer's tables of this shape: the cost of book-keeping on any device. Saturates for shapes that
    /// [`TableShape::check`] rejects.
    pub const fn bytes(&self) -> u64 {
        let lanes = self.lanes as u64;
        let by_lane = lanes.saturating_mul(self.tokens as u64 + self.lane_blocks() as u64);
        let by_slot = self.budget_blocks as u64 * SLOT_BLOCK as u64 + self.slots() as u64;
        let words = by_lane.saturating_add(by_slot);
        words.saturating_mul(4).saturating_add(lanes * size_of::<LaneHead>() as u64)
    }

    /// Checks that the sizes are consistent.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the inconsistent size.
    pub fn check(&self) -> Result<()> {
        let bad = |place: &'static str, value: u64| {
            Err(Error::new(Kind::InvalidConfig, "residency tables").at(place).with("value", value))
        };
        if self.lanes == 0 || self.tokens == 0 || self.query_rows == 0 {
            return bad("lanes, tokens or query rows", 0);
        }
        let (lanes, query_rows) = (u64::from(self.lanes), u64::from(self.query_rows));
        let scratch_end = u64::from(self.scratch_base) + lanes * u64::from(self.scratch);
        let landing_end = u64::from(self.landing_base) + lanes * query_rows;
        let end = u64::from(self.budget_base) + u64::from(self.budget_blocks) * u64::from(SLOT_BLOCK);
        if self.waves == 0 {
            return bad("attention waves", 0);
        }
        if self.scratch_base == ABSENT {
            return bad("scratch slots begin at slot 0, which means none", 0);
        }
        if scratch_end > u64::from(self.landing_base) {
            return bad("scratch slots reach into landing slots", scratch_end);
        }
        if landing_end > u64::from(self.budget_base) || !self.budget_base.is_multiple_of(SLOT_BLOCK) {
            return bad("landing slots reach into budget slots", landing_end);
        }
        // Slot ids are written as i32, and stamps and positions must stay below their sentinels.
        if self.tokens >= i32::MAX as u32 {
            return bad("tokens beyond 2^31", self.tokens.into());
        }
        if end > i32::MAX as u64 {
            let rule = "pass fewer pool_slots, lanes or query_rows: a layer has less than 2147483648 slots";
            return bad("slots of a layer", end).map_err(|error| error.hint(rule));
        }
        Ok(())
    }
}

/// A layer's record of one lane. Plain words, the same on every device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaneHead {
    /// Committed tokens: the positions below it have a row in the total pool.
    pub length: u32,
    /// Rows in landing slots, at the positions from `length` on, not yet accepted or rejected.
    pub landed: u32,
    /// Slots that this lane may fill; 0 for an empty lane.
    pub budget: u32,
    /// Blocks that hold these slots.
    pub blocks: u32,
    /// Stamp of the last residency step.
    pub stamp: u32,
    /// No slot of the lane has a stamp below this one.
    pub min_stamp: u32,
    /// The position of the oldest row, valid only while that row still has the stamp `min_stamp`; [`EMPTY`] if it is
    /// not known. `min_stamp` is then older than any stamp that will be written, so no further row can get it.
    pub next_victim: u32,
    /// The first so many places of the lane hold a row. A new row's search for an empty slot begins there, so that a
    /// lane that fills up is searched once, and not once for each new row. There may be more such places.
    pub full_places: u32,
}

/// The operation and place of out-of-memory errors.
pub(super) const OPERATION: &str = "residency tables";
const PLACE: &str = "a layer";

/// The words of a layer's tables: see [`LayerTables::words`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableWords<'a> {
    /// One head for each lane.
    pub heads: &'a [LaneHead],
    /// `[lanes][tokens]`: the slot of a position, or [`ABSENT`].
    pub slot_of: &'a [u32],
    /// `[budget slots]`: the position of a slot, or [`EMPTY`].
    pub position_of: &'a [u32],
    /// `[slots]`: the stamp of a slot. Stamps before the budget slots are unused.
    pub stamp_of: &'a [u32],
    /// `[lanes][lane_blocks]`: the blocks of a lane, counted from the first budget block.
    pub blocks: &'a [u32],
}

/// The tables of one layer: every lane's map from positions to slots, every slot's position and stamp.
#[derive(Debug)]
pub struct LayerTables {
    pub(super) shape: TableShape,
    pub(super) heads: Vec<LaneHead>,
    /// `[lanes][tokens]`: the slot of a position, or [`ABSENT`].
    pub(super) slot_of: Vec<u32>,
    /// `[budget slots]`: the position of a slot, or [`EMPTY`].
    pub(super) position_of: Vec<u32>,
    /// `[slots]`: the stamp of a slot. Stamps before the budget slots are unused; they exist so that a lookup can
    /// stamp any slot that it finds.
    pub(super) stamp_of: Vec<u32>,
    /// `[lanes][lane_blocks]`: the blocks of a lane, counted from the first budget block.
    pub(super) blocks: Vec<u32>,
}

impl LayerTables {
    /// Empty tables of the given shape. Later calls allocate nothing.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the invalid size; [`Kind::OutOfMemory`].
    pub fn new(shape: TableShape) -> Result<Self> {
        shape.check()?;
        let lanes = shape.lanes as usize;
        let slots = shape.budget_blocks as usize * SLOT_BLOCK as usize;
        Ok(LayerTables {
            shape,
            heads: filled(lanes, LaneHead::default(), OPERATION, PLACE)?,
            slot_of: filled(lanes * shape.tokens as usize, ABSENT, OPERATION, PLACE)?,
            position_of: filled(slots, EMPTY, OPERATION, PLACE)?,
            stamp_of: filled(shape.slots() as usize, UNUSED, OPERATION, PLACE)?,
            blocks: filled(lanes * shape.lane_blocks() as usize, 0, OPERATION, PLACE)?,
        })
    }

    /// Tables made from the words of a device. For tests: this checks sizes only; call [`LayerTables::validate`] to
    /// check the contents.
    ///
    /// # Errors
    /// As [`LayerTables::new`]; [`Kind::OutOfRange`] for another number of words, or block numbers beyond the shape.
    pub fn from_words(shape: TableShape, words: &TableWords<'_>) -> Result<Self> {
        let mut tables = LayerTables::new(shape)?;
        let wrong = |place: &'static str| Error::new(Kind::OutOfRange, "residency tables").at(place);
        let most = shape.lane_blocks();
        if words.heads.iter().any(|h| h.blocks > most || h.budget > h.blocks * SLOT_BLOCK) {
            return Err(wrong("blocks of a lane"));
        }
        let own = [&mut tables.slot_of, &mut tables.position_of, &mut tables.stamp_of, &mut tables.blocks];
        let given = [words.slot_of, words.position_of, words.stamp_of, words.blocks];
        for (own, given) in own.into_iter().zip(given) {
            if own.len() != given.len() {
                return Err(wrong("words of a table").with("given", given.len() as u64));
            }
            own.copy_from_slice(given);
        }
        if words.heads.len() != tables.heads.len() {
            return Err(wrong("lanes").with("given", words.heads.len() as u64));
        }
        tables.heads.copy_from_slice(words.heads);
        if (0..shape.lanes).any(|lane| tables.lane_blocks(lane).iter().any(|b| *b >= shape.budget_blocks)) {
            return Err(wrong("block"));
        }
        Ok(tables)
    }

    /// The tables, word by word.
    pub fn words(&self) -> TableWords<'_> {
        TableWords {
            heads: &self.heads,
            slot_of: &self.slot_of,
            position_of: &self.position_of,
            stamp_of: &self.stamp_of,
            blocks: &self.blocks,
        }
    }

    /// The declared sizes.
    pub const fn shape(&self) -> &TableShape {
        &self.shape
    }

    /// Bytes of these tables: the cost of book-keeping in one layer.
    pub fn bytes(&self) -> u64 {
        let words = self.slot_of.len() + self.position_of.len() + self.stamp_of.len() + self.blocks.len();
        words as u64 * 4 + self.heads.len() as u64 * size_of::<LaneHead>() as u64
    }

    /// The layer's record of `lane`.
    pub fn head(&self, lane: u32) -> Option<&LaneHead> {
        self.heads.get(lane as usize)
    }

    /// The range of the lane's blocks in `blocks`.
    pub(super) fn block_range(&self, lane: u32) -> std::ops::Range<usize> {
        let start = lane as usize * self.shape.lane_blocks() as usize;
        start..start + self.heads.get(lane as usize).map_or(0, |h| h.blocks as usize)
    }

    pub(super) fn lane_blocks(&self, lane: u32) -> &[u32] {
        self.blocks.get(self.block_range(lane)).unwrap_or(&[])
    }

    /// The stamps of the budget slots.
    pub(super) fn stamps(&self) -> &[u32] {
        self.stamp_of.get(self.shape.budget_base as usize..).unwrap_or(&[])
    }

    pub(super) fn stamps_mut(&mut self) -> &mut [u32] {
        self.stamp_of.get_mut(self.shape.budget_base as usize..).unwrap_or(&mut [])
    }

    pub(super) fn map_start(&self, lane: u32) -> usize {
        lane as usize * self.shape.tokens as usize
    }

    /// The slot of `position` in `lane`, if it is resident or landed.
    pub fn slot(&self, lane: u32, position: u32) -> Option<u32> {
        if position >= self.shape.tokens || lane >= self.shape.lanes {
            return None;
        }
        let slot = *self.slot_of.get(self.map_start(lane) + position as usize)?;
        (slot != ABSENT).then_some(slot)
    }

    /// Gives `lane` to a sequence of `length` tokens with `budget` slots in the given blocks (numbered
    /// from the first budget block, none of them in another lane). Nothing is resident yet.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when lane, length, budget or a block is beyond the declared extents;
    /// [`Kind::Busy`] when the lane is taken.
    pub fn join(&mut self, lane: u32, blocks: &[u32], budget: u32, length: u32) -> Result<()> {
        let range = |place: &'static str, value: u32| {
            Err(Error::new(Kind::OutOfRange, "join lane").at(place).with("value", value))
        };
        let Some(head) = self.heads.get(lane as usize) else {
            return range("lane", lane);
        };
        if head.budget != 0 {
            return Err(Error::new(Kind::Busy, "join lane").at("lane").with("lane", lane));
        }
        if length > self.shape.tokens {
            return range("length", length);
        }
        if budget == 0 || blocks.len() != budget.div_ceil(SLOT_BLOCK) as usize {
            return range("budget", budget);
        }
        if blocks.len() > self.shape.lane_blocks() as usize {
            return range("budget", budget);
        }
        if let Some(block) = blocks.iter().find(|b| **b >= self.shape.budget_blocks) {
            return range("block", *block);
        }
        let head = LaneHead {
            length,
            landed: 0,
            budget,
            blocks: blocks.len() as u32,
            stamp: WARMED,
            min_stamp: FREE,
            next_victim: EMPTY,
            full_places: 0,
        };
        self.heads[lane as usize] = head;
        let start = lane as usize * self.shape.lane_blocks() as usize;
        self.blocks[start..start + blocks.len()].copy_from_slice(blocks);
        let map = self.map_start(lane);
        self.slot_of[map..map + self.shape.tokens as usize].fill(ABSENT);
        let mut left = budget as usize;
        for block in blocks {
            let slots = *block as usize * SLOT_BLOCK as usize..(*block as usize + 1) * SLOT_BLOCK as usize;
            let usable = left.min(SLOT_BLOCK as usize);
            self.position_of[slots.clone()].fill(EMPTY);
            self.stamps_mut()[slots.clone()][..usable].fill(FREE);
            self.stamps_mut()[slots][usable..].fill(UNUSED);
            left -= usable;
        }
        Ok(())
    }

    /// Makes every row of the lane resident, if the budget holds all of them and the lane has made no step. The rows
    /// are older than the rows of any step, in ascending order. If the budget is too small it loads no row, because an
    /// arbitrary part would only cost its transfer. Returns the number of rows that this makes resident.
    pub fn bring_up(&mut self, lane: u32) -> u32 {
        let Some(head) = self.heads.get(lane as usize).copied() else {
            return 0;
        };
        if head.length > head.budget || head.budget == 0 || head.stamp != WARMED {
            return 0;
        }
        let map = self.map_start(lane);
        for position in 0..head.length {
            let block = self.lane_blocks(lane)[(position / SLOT_BLOCK) as usize];
            let slot = block * SLOT_BLOCK + position % SLOT_BLOCK;
            self.slot_of[map + position as usize] = self.shape.budget_base + slot;
            self.position_of[slot as usize] = position;
            self.stamps_mut()[slot as usize] = WARMED;
        }
        self.heads[lane as usize].full_places = head.length;
        head.length
    }

    /// Forgets every resident row of `lane`. For rows that the tables list as resident but that were never copied.
    pub fn empty(&mut self, lane: u32) {
        let start = self.map_start(lane);
        for index in 0..self.lane_blocks(lane).len() {
            let first = self.lane_blocks(lane)[index] as usize * SLOT_BLOCK as usize;
            for slot in first..first + SLOT_BLOCK as usize {
                let position = std::mem::replace(&mut self.position_of[slot], EMPTY);
                if position != EMPTY {
                    self.slot_of[start + position as usize] = ABSENT;
                    self.stamps_mut()[slot] = FREE;
                }
            }
        }
        if let Some(head) = self.heads.get_mut(lane as usize) {
            (head.min_stamp, head.full_places) = (FREE, 0);
        }
    }

    /// Forgets all of `lane`. Its blocks may then belong to another lane.
    pub fn leave(&mut self, lane: u32) {
        for index in 0..self.lane_blocks(lane).len() {
            let start = self.lane_blocks(lane)[index] as usize * SLOT_BLOCK as usize;
            self.position_of[start..start + SLOT_BLOCK as usize].fill(EMPTY);
            self.stamps_mut()[start..start + SLOT_BLOCK as usize].fill(UNUSED);
        }
        if let Some(head) = self.heads.get_mut(lane as usize) {
            *head = LaneHead::default();
        }
    }

    /// The lane's slots in the order in which victims are assigned, as indices into the slot tables.
    pub(super) fn lane_slots(&self, lane: u32) -> impl Iterator<Item = usize> + '_ {
        self.lane_blocks(lane).iter().flat_map(|block| {
            let start = *block as usize * SLOT_BLOCK as usize;
            start..start + SLOT_BLOCK as usize
        })
    }
}
