//! The allocators of lanes and of slot blocks.
//!
//! A lane and its blocks belong to one sequence, from open until the last work that names the sequence has ended. Both
//! allocators are [`Pages`], whose count of owners finds a block that is freed twice.

use crate::error::{Error, Kind, Result};
use crate::geometry::{IndexGroup, SLOT_BLOCK};
use crate::total::Pages;

/// The lanes of a cache and the blocks of each index group: the same blocks in all layers of the group.
#[derive(Debug)]
pub struct Slots {
    lanes: Pages,
    blocks: Vec<Pages>,
    groups: Vec<IndexGroup>,
}

/// The part of the sparse pool that a sequence holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// Its lane; [`Holding::NO_LANE`] while the sequence is parked or arriving.
    pub lane: u32,
    /// Its blocks in each index group, counted from the first budget block: those of its budget and, only while a
    /// resize has not ended, blocks behind them that come or go.
    pub blocks: Vec<Vec<u32>>,
    /// Its number of slots in each index group.
    pub budgets: Vec<u32>,
}

impl Slots {
    /// Allocators of `lanes` lanes, and of `blocks` slot blocks for each group.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`].
    pub fn new(lanes: u32, groups: &[IndexGroup], blocks: &[u32]) -> Result<Self> {
        let blocks = blocks.iter().map(|count| Pages::new("slot blocks", *count)).collect::<Result<_>>()?;
        Ok(Slots { lanes: Pages::new("lanes", lanes)?, blocks, groups: groups.to_vec() })
    }

    /// The first layer of a group, which names it in errors.
    fn first(&self, group: usize) -> u64 {
        self.groups.get(group).map_or(0, |group| group.first.into())
    }

    /// Free lanes.
    pub fn free_lanes(&self) -> u32 {
        self.lanes.free()
    }

    /// Free slots of the group with the fewest free slots, in whole blocks.
    pub fn free_slots(&self) -> u32 {
        self.blocks.iter().map(|pages| pages.free() * SLOT_BLOCK).min().unwrap_or(0)
    }

    /// Free blocks of a group.
    pub fn free_blocks(&self, group: usize) -> u32 {
        self.blocks.get(group).map_or(0, Pages::free)
    }

    /// Blocks of a group, free or not.
    pub fn blocks(&self, group: usize) -> u32 {
        self.blocks.get(group).map_or(0, Pages::count)
    }

    /// Slots of each group, free or not.
    pub fn sizes(&self) -> impl Iterator<Item = u32> + '_ {
        self.blocks.iter().map(|pages| pages.count() * SLOT_BLOCK)
    }

    /// Slots in the blocks of sequences, of all layers.
    pub fn in_use(&self) -> u64 {
        let used = |(pages, group): (&Pages, &IndexGroup)| {
            u64::from(pages.count() - pages.free()) * u64::from(SLOT_BLOCK) * u64::from(group.layers)
        };
        self.blocks.iter().zip(&self.groups).map(used).sum()
    }

    /// Takes a lane, and blocks for `budgets` slots in each group, or nothing. The lists of blocks get room for `most`
    /// slots, so that a later [`Slots::grow`] up to there allocates nothing.
    ///
    /// # Errors
    /// [`crate::Kind::Exhausted`] names lanes or slot blocks.
    pub fn take(&mut self, budgets: Vec<u32>, most: u32) -> Result<Holding> {
        let mut lane = Vec::with_capacity(1);
        self.lanes.allocate(1, &mut lane)?;
        let lane = lane[0];
        let mut holding = Holding { lane, blocks: Vec::with_capacity(budgets.len()), budgets };
        for (pages, budget) in self.blocks.iter_mut().zip(&holding.budgets) {
            let room = most.div_ceil(SLOT_BLOCK).min(pages.count());
            let mut blocks = Vec::with_capacity(room as usize);
            if let Err(error) = pages.allocate(budget.div_ceil(SLOT_BLOCK), &mut blocks) {
                self.give_back(&holding)?;
                return Err(error);
            }
            holding.blocks.push(blocks);
        }
        Ok(holding)
    }

    /// Checks that [`Slots::grow`] would find the blocks that it needs.
    ///
    /// # Errors
    /// [`crate::Kind::Exhausted`] with the layer, `wanted` and `free`.
    pub fn check_growth(&self, holding: &Holding, budgets: &[u32]) -> Result<()> {
        let groups = self.blocks.iter().zip(&holding.blocks).zip(budgets);
        for (group, ((pages, blocks), budget)) in groups.enumerate() {
            let wanted = lacking(blocks, *budget);
            if wanted > pages.free() {
                return Err(pages.exhausted(wanted, pages.free()).with("layer", self.first(group)));
            }
        }
        Ok(())
    }

    /// Appends blocks to a sequence's lists until they hold `budgets` slots in each group, or appends nothing. The
    /// sequence's budgets stay as they are.
    ///
    /// # Errors
    /// As [`Slots::check_growth`].
    pub fn grow(&mut self, holding: &mut Holding, budgets: &[u32]) -> Result<()> {
        self.check_growth(holding, budgets)?;
        for ((pages, blocks), budget) in self.blocks.iter_mut().zip(&mut holding.blocks).zip(budgets) {
            pages.allocate(lacking(blocks, *budget), blocks)?;
        }
        Ok(())
    }

    /// Returns the blocks behind those of a sequence's budgets.
    ///
    /// # Errors
    /// [`crate::Kind::Internal`] if a block was already free.
    pub fn trim(&mut self, holding: &mut Holding) -> Result<()> {
        let Holding { blocks, budgets, .. } = holding;
        for ((pages, blocks), budget) in self.blocks.iter_mut().zip(blocks).zip(budgets) {
            let needed = budget.div_ceil(SLOT_BLOCK) as usize;
            while blocks.len() > needed {
                let Some(block) = blocks.pop() else { break };
                pages.release(block)?;
            }
        }
        Ok(())
    }

    /// Returns a lane and its blocks.
    ///
    /// # Errors
    /// [`crate::Kind::Internal`] if the lane or a block was already free.
    pub fn give_back(&mut self, holding: &Holding) -> Result<()> {
        for (pages, blocks) in self.blocks.iter_mut().zip(&holding.blocks) {
            blocks.iter().try_for_each(|block| pages.release(*block))?;
        }
        if holding.has_lane() { self.lanes.release(holding.lane) } else { Ok(()) }
    }

    /// Checks the counts of owners, and that the blocks in use are those of `holdings`, each of one.
    ///
    /// # Errors
    /// [`crate::Kind::Internal`].
    pub fn validate<'a>(&self, holdings: impl Iterator<Item = &'a Holding>) -> Result<()> {
        self.lanes.validate()?;
        self.blocks.iter().try_for_each(Pages::validate)?;
        let wrong = |place, group: usize| {
            Err(Error::new(Kind::Internal, "validate slots").at(place).with("layer", self.first(group)))
        };
        let mut owned: Vec<Vec<bool>> =
            self.blocks.iter().map(|pages| vec![false; pages.count() as usize]).collect();
        for holding in holdings {
            for (group, (owned, blocks)) in owned.iter_mut().zip(&holding.blocks).enumerate() {
                let budget = holding.budgets.get(group).copied().unwrap_or(0);
                if lacking(blocks, budget) > 0 {
                    return wrong("a budget without its slot blocks", group);
                }
                for block in blocks {
                    let twice = owned.get_mut(*block as usize).is_none_or(|own| std::mem::replace(own, true));
                    if twice {
                        return wrong("a slot block of two sequences", group);
                    }
                }
            }
        }
        for (group, (pages, owned)) in self.blocks.iter().zip(&owned).enumerate() {
            let is_free = |block: usize| pages.owners(block as u32) == 0;
            if owned.iter().enumerate().any(|(block, owned)| *owned == is_free(block)) {
                return wrong("a slot block that is taken and of no sequence, or free and of one", group);
            }
        }
        Ok(())
    }
}

/// The blocks that a list lacks to hold `budget` slots.
fn lacking(blocks: &[u32], budget: u32) -> u32 {
    budget.div_ceil(SLOT_BLOCK).saturating_sub(blocks.len() as u32)
}

impl Holding {
    /// In place of a lane's number.
    pub const NO_LANE: u32 = u32::MAX;

    /// What a parked or arriving sequence holds.
    pub fn none(groups: usize) -> Holding {
        Holding { lane: Holding::NO_LANE, blocks: vec![Vec::new(); groups], budgets: vec![0; groups] }
    }

    /// Whether it holds a lane.
    pub const fn has_lane(&self) -> bool {
        self.lane != Holding::NO_LANE
    }

    /// Makes room for the blocks of `most` slots in each index group, so that [`Slots::grow`] up to there allocates
    /// nothing.
    pub fn reserve(&mut self, most: u32) {
        let wanted = most.div_ceil(SLOT_BLOCK) as usize;
        self.blocks.iter_mut().for_each(|blocks| blocks.reserve(wanted.saturating_sub(blocks.len())));
    }

    /// The number of its blocks in a layer.
    pub fn held(&self, layer: usize) -> u32 {
        self.blocks.get(layer).map_or(0, |blocks| blocks.len() as u32)
    }

    /// Whether there are blocks behind those of the budgets: see [`Slots::trim`].
    pub fn has_extra(&self) -> bool {
        let needed = |budget: &u32| budget.div_ceil(SLOT_BLOCK) as usize;
        self.blocks.iter().zip(&self.budgets).any(|(blocks, budget)| blocks.len() > needed(budget))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups of one layer each.
    const ALONE: [IndexGroup; 2] =
        [IndexGroup { first: 0, layers: 1, top_k: 8 }, IndexGroup { first: 1, layers: 1, top_k: 8 }];

    #[test]
    fn a_refused_take_changes_nothing() {
        let mut slots = Slots::new(2, &ALONE, &[4, 2]).unwrap();
        let first = slots.take(vec![65, 64], 128).unwrap();
        assert_eq!((first.blocks[0].len(), first.blocks[1].len()), (2, 1));
        let e = slots.take(vec![64, 65], 128).unwrap_err();
        assert_eq!((e.kind(), e.place()), (Kind::Exhausted, "slot blocks"));
        assert_eq!((slots.free_lanes(), slots.free_slots()), (1, 64));
        slots.validate([&first].into_iter()).unwrap();
        slots.give_back(&first).unwrap();
        assert_eq!(slots.give_back(&first).unwrap_err().kind(), Kind::Internal);
        assert_eq!((slots.free_lanes(), slots.free_slots()), (2, 128));
    }

    #[test]
    fn blocks_come_behind_the_present_ones_and_the_last_ones_go_first() {
        let mut slots = Slots::new(2, &ALONE, &[4, 4]).unwrap();
        let mut own = slots.take(vec![65, 64], 256).unwrap();
        let before = own.clone();
        // The second layer has three free blocks: nothing is taken in the first one either.
        let e = slots.grow(&mut own, &[256, 321]).unwrap_err();
        assert_eq!((e.kind(), &own), (Kind::Exhausted, &before));
        slots.grow(&mut own, &[130, 64]).unwrap();
        assert_eq!((own.blocks[0].len(), own.blocks[1].len(), own.has_extra()), (3, 1, true));
        assert_eq!((&own.blocks[0][..2], slots.in_use()), (&before.blocks[0][..], 4 * 64));
        // The resize was refused: the blocks go back.
        slots.trim(&mut own).unwrap();
        assert_eq!(own, before);
        slots.grow(&mut own, &[130, 64]).unwrap();
        own.budgets = vec![1, 64];
        slots.trim(&mut own).unwrap();
        assert_eq!((&own.blocks[0], own.has_extra()), (&before.blocks[0][..1].to_vec(), false));
        slots.validate([&own].into_iter()).unwrap();
        assert!(slots.validate([&own, &own].into_iter()).is_err() && slots.validate([].into_iter()).is_err());
    }
}
