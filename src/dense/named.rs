//! The names of one sequence's published pages, and in which groups of layers it uses their blocks.
//!
//! A block hash covers everything before its page, so the list begins with the first page and has no gap. It holds no
//! pages, as `held` does, and counts no users, as the directories do.

use crate::dense::shape::GROUPS_MAX;
use crate::error::Result;
use crate::fallible::{reserve, vector};
use crate::total::{BlockHash, BlockHasher};

/// The names of a sequence's published pages.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) hasher: BlockHasher,
    /// For each page, from the first, the groups in which the sequence uses the block, as bits. In the others it keeps
    /// its own page in addition to the block's, or has given it back.
    pub(super) blocks: Vec<(BlockHash, u8)>,
    /// How many blocks had lost their device page when the sequence last tried to name its own pages by them.
    pub(super) tried: u64,
}

const _: () = assert!(GROUPS_MAX <= u8::BITS as usize);

impl Named {
    pub(super) fn new(hasher: BlockHasher, pages: u32) -> Result<Named> {
        Ok(Named { hasher, blocks: vector(pages as usize, "open", "block hashes of pages")?, tried: 0 })
    }

    /// The number of published pages.
    pub(super) fn pages(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Makes room for the names of `pages` pages in all.
    pub(super) fn reserve(&mut self, pages: u32) -> Result<()> {
        let more = (pages as usize).saturating_sub(self.blocks.len());
        reserve(&mut self.blocks, more, "extend", "block hashes of pages")
    }

    /// The name of a page.
    pub(super) fn name(&self, block: u32) -> Option<&BlockHash> {
        self.blocks.get(block as usize).map(|(name, _)| name)
    }

    /// The name of a page, if the sequence uses the block in a group.
    pub(super) fn used(&self, group: usize, block: u32) -> Option<BlockHash> {
        let (name, groups) = self.blocks.get(block as usize)?;
        (groups & 1 << group != 0).then_some(*name)
    }

    /// Notes that the sequence leaves a block in a group. Returns its name if it used it.
    pub(super) fn leave(&mut self, group: usize, block: u32) -> Option<BlockHash> {
        let (name, groups) = self.blocks.get_mut(block as usize)?;
        let used = *groups & 1 << group != 0;
        *groups &= !(1 << group);
        used.then_some(*name)
    }

    /// The first `pages` names, with room for `room`, which another sequence uses too.
    pub(super) fn head(&self, pages: u32, room: u32) -> Result<Named> {
        let mut head = Named::new(self.hasher, room)?;
        head.blocks.extend(self.blocks.iter().take(pages as usize));
        Ok(head)
    }
}
