//! The allocators of lanes and of slot blocks.
//!
//! A lane and its blocks belong to one sequence, from open until the last work that names the sequence has ended. Both
//! allocators are [`Pages`], whose count of owners finds a block that is freed twice.

use crate::error::Result;
use crate::geometry::SLOT_BLOCK;
use crate::total::Pages;

/// The lanes of a cache and the blocks of each layer.
#[derive(Debug)]
pub struct Slots {
    lanes: Pages,
    blocks: Vec<Pages>,
}

/// The part of the sparse pool that a sequence holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Its lane.
    pub lane: u32,
    /// Its blocks in each layer, counted from the first budget block.
    pub blocks: Vec<Vec<u32>>,
    /// Its number of slots in each layer.
    pub budgets: Vec<u32>,
}

impl Slots {
    /// Allocators of `lanes` lanes, and of `blocks` slot blocks for each layer.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`].
    pub fn new(lanes: u32, blocks: &[u32]) -> Result<Self> {
        let blocks = blocks.iter().map(|count| Pages::new("slot blocks", *count));
        Ok(Slots { lanes: Pages::new("lanes", lanes)?, blocks: blocks.collect::<Result<_>>()? })
    }

    /// Free lanes.
    pub fn free_lanes(&self) -> u32 {
        self.lanes.free()
    }

    /// Free slots of the layer with the fewest free slots, in whole blocks.
    pub fn free_slots(&self) -> u32 {
        self.blocks.iter().map(|pages| pages.free() * SLOT_BLOCK).min().unwrap_or(0)
    }

    /// Takes a lane, and blocks for `budgets` slots in each layer, or nothing.
    ///
    /// # Errors
    /// [`crate::Kind::Exhausted`] names lanes or slot blocks.
    pub fn take(&mut self, budgets: Vec<u32>) -> Result<Holding> {
        let mut lane = Vec::with_capacity(1);
        self.lanes.allocate(1, &mut lane)?;
        let lane = lane[0];
        let mut holding = Holding { lane, blocks: Vec::with_capacity(budgets.len()), budgets };
        for (pages, budget) in self.blocks.iter_mut().zip(&holding.budgets) {
            let mut blocks = Vec::new();
            if let Err(error) = pages.allocate(budget.div_ceil(SLOT_BLOCK), &mut blocks) {
                self.give_back(&holding)?;
                return Err(error);
            }
            holding.blocks.push(blocks);
        }
        Ok(holding)
    }

    /// Returns a lane and its blocks.
    ///
    /// # Errors
    /// [`crate::Kind::Internal`] if the lane or a block was already free.
    pub fn give_back(&mut self, holding: &Holding) -> Result<()> {
        for (pages, blocks) in self.blocks.iter_mut().zip(&holding.blocks) {
            blocks.iter().try_for_each(|block| pages.release(*block))?;
        }
        self.lanes.release(holding.lane)
    }

    /// Checks the counts of owners.
    ///
    /// # Errors
    /// [`crate::Kind::Internal`].
    pub fn validate(&self) -> Result<()> {
        self.lanes.validate()?;
        self.blocks.iter().try_for_each(Pages::validate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_refused_take_changes_nothing() {
        let mut slots = Slots::new(2, &[4, 2]).unwrap();
        let first = slots.take(vec![65, 64]).unwrap();
        assert_eq!((first.blocks[0].len(), first.blocks[1].len()), (2, 1));
        let e = slots.take(vec![64, 65]).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::Exhausted, "slot blocks"));
        assert_eq!((slots.free_lanes(), slots.free_slots()), (1, 64));
        slots.validate().unwrap();
        slots.give_back(&first).unwrap();
        assert_eq!(slots.give_back(&first).unwrap_err().kind(), Kind::Internal);
        assert_eq!((slots.free_lanes(), slots.free_slots()), (2, 128));
    }
}
