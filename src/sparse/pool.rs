//! The slabs: one address range for each layer, which share physical scratch memory.
//!
//! ```text
//! layer 0:  [ scratch (shared) | landing | budget blocks ... ]
//! layer 1:  [ scratch (shared) | landing | budget blocks ... ]
//! ```
//!
//! A scratch row is needed only in one layer of one step, so every layer's slab begins with the same physical pages.
//! In an index group several layers' rows may be on their way at once: while one layer reads its scratch slots, those
//! of the next are being filled (the order ahead, see `overlap`). So each place in a group has scratch memory of its
//! own, which the layers at that place in all groups share. So has each row format: where rows differ in size, a lane's
//! scratch slots would begin at other bytes, in the slots of another lane, which may be at another layer.
//!
//! Landing slots have the same ids in every layer. Each layer has its own memory for them, because the next step
//! commits a step's new rows. Each region begins with the first whole block after a mapping boundary; slots that would
//! cross the boundary are unused. The regions have the same slot ids in every layer, since the layers of an index group
//! have the same rows in the same slots. Where rows differ in size, the smallest decides where the regions begin, and
//! layers with larger rows leave slots unused.

use crate::device::{Device, Mapped, Slice};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, Geometry, SLOT_BLOCK};
use crate::os::Protection;
use crate::residency::TableShape;
use crate::sparse::slots::{Holding, Slots};

/// The declared extents of a sparse pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseConfig {
    /// Lanes.
    pub lanes: u32,
    /// Tokens of the longest sequence, in-flight rows included.
    pub tokens: u32,
    /// Query rows of a step.
    pub query_rows: u32,
    /// Scratch slots of a lane.
    pub scratch: u32,
    /// Attention waves that use the scratch slots one after the other.
    pub waves: u32,
    /// The number of budget slots of each index group.
    pub slots: Vec<u32>,
}

/// The layout of a sparse pool, computed before any memory is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseLayout {
    /// The table shape of each index group.
    pub tables: Vec<TableShape>,
    /// Bytes of one scratch memory, rounded up to a mapping boundary.
    pub scratch_bytes: u64,
    /// The row format of each scratch memory.
    pub scratch: Vec<Geometry>,
    /// For each layer, its scratch memory: that of its place in the group and of its row format.
    pub scratch_of: Vec<usize>,
    /// Bytes of the rest of each layer's slab, rounded up to a mapping boundary.
    pub own_bytes: Vec<u64>,
}

impl SparseConfig {
    /// Computes the layout of each layer's slab, on a device whose mappings are multiples of `grain` bytes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`], [`Kind::Overflow`].
    pub fn layout(&self, geometry: &Geometries, grain: u64) -> Result<SparseLayout> {
        let overflow = || Error::new(Kind::Overflow, "sparse pool").at("slots");
        if self.slots.len() != geometry.groups().len() {
            return Err(Error::new(Kind::InvalidConfig, "sparse pool").at("layers of the slot table"));
        }
        let sizes = || geometry.formats().iter().map(|format| u64::from(format.block_bytes()));
        let (least, most) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(1));
        let round = |bytes: u64| bytes.checked_next_multiple_of(grain).ok_or_else(overflow);
        let blocks_of = |slots: u64| slots.div_ceil(u64::from(SLOT_BLOCK));

        let lanes = u64::from(self.lanes);
        // Slot 0 means none, so scratch begins at 1 and there is always a scratch block.
        let bytes_of = |blocks: u64, each: u64| blocks.checked_mul(each).ok_or_else(overflow);
        let scratch_bytes = round(bytes_of(blocks_of(1 + lanes * u64::from(self.scratch)), most)?)?;
        let own_start = scratch_bytes.div_ceil(least);
        let budget_start = own_start + blocks_of(lanes * u64::from(self.query_rows));
        let id = |blocks: u64| {
            let slots = blocks.checked_mul(u64::from(SLOT_BLOCK)).ok_or_else(overflow)?;
            u32::try_from(slots).map_err(|_| overflow())
        };
        let (landing_base, budget_base) = (id(own_start)?, id(budget_start)?);
        let (scratch, scratch_of) = scratch_memories(geometry);
        let mut layout =
            SparseLayout { tables: Vec::new(), scratch_bytes, scratch, scratch_of, own_bytes: Vec::new() };
        for (group, slots) in self.slots.iter().enumerate() {
            let budget_blocks = slots.div_ceil(SLOT_BLOCK);
            let shape = TableShape {
                lanes: self.lanes,
                tokens: self.tokens,
                query_rows: self.query_rows,
                scratch: self.scratch,
                waves: self.waves,
                scratch_base: 1,
                landing_base,
                budget_base,
                budget_blocks,
            };
            shape.check()?;
            layout.tables.push(shape);
            for layer in geometry.members(group) {
                let each = u64::from(geometry.of(layer).block_bytes());
                let end = bytes_of(budget_start + u64::from(budget_blocks), each)?;
                layout.own_bytes.push(round(end - scratch_bytes)?);
            }
        }
        Ok(layout)
    }
}

/// The row format of each scratch memory, and for each layer the one that it has.
fn scratch_memories(geometry: &Geometries) -> (Vec<Geometry>, Vec<usize>) {
    let mut kinds: Vec<(usize, Geometry)> = Vec::new();
    let memory = |layer: usize| {
        let kind = (layer - geometry.first_of(layer), *geometry.of(layer));
        let known = kinds.iter().position(|other| *other == kind);
        known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        })
    };
    let scratch_of = (0..geometry.formats().len()).map(memory).collect();
    (kinds.into_iter().map(|(_, format)| format).collect(), scratch_of)
}

/// The sparse pool of a cache.
#[derive(Debug)]
pub struct SparsePool {
    tables: Vec<TableShape>,
    slabs: Vec<Slice>,
    slots: Slots,
}

impl SparsePool {
    /// Takes the memory on `device`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`], [`Kind::Overflow`], [`Kind::OutOfMemory`], [`Kind::OsRefused`].
    pub fn new(geometry: &Geometries, config: &SparseConfig, device: &dyn Device) -> Result<Self> {
        // All numbers are checked before any memory is taken.
        let SparseLayout { tables, scratch_bytes, scratch, scratch_of, own_bytes } =
            config.layout(geometry, device.granularity())?;
        let take = |bytes| Ok(Mapped { backing: device.backing(bytes)?, offset: 0, bytes });
        let scratch = scratch.iter().map(|_| take(scratch_bytes)).collect::<Result<Vec<Mapped>>>()?;
        let mut slabs = Vec::new();
        for (memory, bytes) in scratch_of.into_iter().zip(own_bytes) {
            slabs.push(device.range(&[scratch[memory], take(bytes)?], Protection::ReadWrite)?);
        }
        let counts: Vec<u32> = tables.iter().map(|shape| shape.budget_blocks).collect();
        Ok(SparsePool { tables, slabs, slots: Slots::new(config.lanes, geometry.groups(), &counts)? })
    }

    /// The table shape of each index group.
    pub fn tables(&self) -> &[TableShape] {
        &self.tables
    }

    /// Each layer's slab.
    pub fn slabs(&self) -> &[Slice] {
        &self.slabs
    }

    /// Lanes and blocks.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Takes a lane and slots, see [`Slots::take`].
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    pub fn take(&mut self, budgets: Vec<u32>, most: u32) -> Result<Holding> {
        self.slots.take(budgets, most)
    }

    /// Appends blocks to a sequence's lists, see [`Slots::grow`].
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    pub fn grow(&mut self, holding: &mut Holding, budgets: &[u32]) -> Result<()> {
        self.slots.grow(holding, budgets)
    }

    /// Returns the blocks behind those of a sequence's budgets, see [`Slots::trim`].
    ///
    /// # Errors
    /// [`Kind::Internal`] if a block was already free.
    pub fn trim(&mut self, holding: &mut Holding) -> Result<()> {
        self.slots.trim(holding)
    }

    /// Returns a lane and slots.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the lane or a block was already free.
    pub fn give_back(&mut self, holding: &Holding) -> Result<()> {
        self.slots.give_back(holding)
    }

    /// The landing slot of a lane's query row, the same id in every layer.
    pub fn landing(&self, lane: u32, row: u32) -> Option<u32> {
        let shape = self.tables.first()?;
        (row < shape.query_rows).then(|| shape.landing_base + lane * shape.query_rows + row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Shape;

    #[test]
    fn layers_of_a_group_have_the_same_slot_ids_whatever_their_rows() {
        let shape = Shape { layers: 3, lone_layers: 1, group_layers: 2, ..Shape::DEEPSEEK_V3_2 };
        let geometry = Geometries::new(shape, &[[656, 0], [656, 0], [1152, 0]], &[]).unwrap();
        let config = SparseConfig {
            lanes: 4,
            tokens: 256,
            query_rows: 2,
            scratch: 100,
            waves: 1,
            slots: vec![128, 192],
        };
        let layout = config.layout(&geometry, 4096).unwrap();
        assert_eq!(layout.tables.len(), 2);
        // 401 scratch slots are 7 blocks: of 1152-byte rows 126 pages, which end in the 13th block of 656-byte rows.
        assert_eq!(layout.scratch_bytes, 126 * 4096);
        assert_eq!((layout.scratch.len(), &layout.scratch_of[..]), (2, &[0, 0, 1][..]));
        assert!(
            layout.tables.iter().all(|shape| (shape.landing_base, shape.budget_base) == (13 * 64, 14 * 64))
        );
        let end = |blocks: u64, row: u64| (blocks * 64 * row - 126 * 4096).next_multiple_of(4096);
        assert_eq!(layout.own_bytes, [end(16, 656), end(17, 656), end(17, 1152)]);
        // The larger rows leave the blocks between their scratch slots' end and the landing slots unused.
        let alike = Geometries::new(shape, &[[1152, 0]; 3], &[]).unwrap();
        let alike = config.layout(&alike, 4096).unwrap();
        assert_eq!(layout.own_bytes[2] - alike.own_bytes[2], 6 * 64 * 1152);
        // Layers share scratch memory where they have one place and one row format.
        let rows = [[656, 0], [1152, 0], [656, 0], [656, 0], [1152, 0]];
        let shape = Shape { layers: 5, ..shape };
        let geometry = Geometries::new(shape, &rows, &[]).unwrap();
        let layout = SparseConfig { slots: vec![64; 3], ..config }.layout(&geometry, 4096).unwrap();
        assert_eq!((layout.scratch.len(), &layout.scratch_of[..]), (4, &[0, 1, 2, 0, 3][..]));
    }
}
