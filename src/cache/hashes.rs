//! The block hashes that a sequence keeps of its published pages.
//!
//! A block hash covers a page's token ids, its key and everything before them. So the list begins with the first page
//! and has no gap, and the hash of the next page needs only its last entry. Publishing appends to it, and truncating
//! cuts it (`share`). Its capacity is taken when the sequence is opened: publishing never grows it.
//!
//! The list says which blocks the sequence uses. It does not count their users, as the index of published pages does,
//! and it holds no pages, as the sequence's page table does.

use crate::error::Result;
use crate::fallible::{reserve, vector};
use crate::total::{BlockHash, BlockHasher};

/// The block hashes of a sequence's published pages.
#[derive(Debug)]
pub(super) struct BlockHashes {
    pub(super) hasher: BlockHasher,
    /// One entry for each page, from the first. The flag says whether the sequence uses the block; if not, the sequence
    /// keeps its own page in addition to it.
    pub(super) blocks: Vec<(BlockHash, bool)>,
}

impl BlockHashes {
    /// An empty list with capacity for `pages` block hashes.
    pub(super) fn new(hasher: BlockHasher, pages: u32) -> Result<BlockHashes> {
        let blocks = vector(pages as usize, "open", "block hashes of pages")?;
        Ok(BlockHashes { hasher, blocks })
    }

    /// Makes room for the block hashes of `pages` pages in all.
    pub(super) fn reserve(&mut self, pages: u32) -> Result<()> {
        let more = (pages as usize).saturating_sub(self.blocks.len());
        reserve(&mut self.blocks, more, "extend", "block hashes of pages")
    }

    /// The number of published pages.
    pub(super) fn pages(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The block hash of the next page.
    pub(super) fn next(&self, ids: &[u32], key: Option<&[u8; 16]>) -> BlockHash {
        self.hasher.block(self.blocks.last().map(|(block, _)| block), key, ids)
    }

    /// The blocks that the sequence uses, from page `first` on, in reverse order.
    pub(super) fn used_from(&self, first: usize) -> impl Iterator<Item = (usize, BlockHash)> + '_ {
        let blocks = self.blocks.iter().enumerate().skip(first).rev();
        blocks.filter(|(_, (_, used))| *used).map(|(page, (block, _))| (page, *block))
    }
}
