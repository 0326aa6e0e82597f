//! What a page is known by: the token ids that the caller gives, and the block hashes that a sequence keeps of its
//! published pages.
//!
//! A block hash covers a page's token ids, its key and everything before them. So the list begins with the first page
//! and has no gap, and the hash of the next page needs only its last entry. Publishing appends to it, and truncating
//! cuts it. Its capacity is taken when the sequence is opened: publishing never grows it.
//!
//! The list says which blocks the sequence uses. It does not count their users, as the index of published pages does,
//! and it holds no pages, as the sequence's page table does.

use crate::error::{Error, Kind, Result};
use crate::fallible::{reserve, vector};
use crate::total::{BlockHash, BlockHasher};

/// The contents of pages, from which their block hashes are computed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens<'a> {
    /// Token ids, from the beginning of a page. Ids after the last full page are ignored.
    pub ids: &'a [u32],
    /// For each full page an optional key of the caller's; empty if no page has a key. A key adds what the ids do not
    /// show, for example which image they stand for. Two pages are equal only if their ids, their keys and everything
    /// before them are equal.
    pub keys: &'a [Option<[u8; 16]>],
}

impl<'a> Tokens<'a> {
    /// Token ids without keys.
    pub const fn new(ids: &'a [u32]) -> Self {
        Tokens { ids, keys: &[] }
    }

    /// The ids and the key of each full page.
    pub(crate) fn pages(self, page_tokens: u32) -> impl Iterator<Item = (&'a [u32], Option<&'a [u8; 16]>)> {
        let keys = self.keys.iter().map(Option::as_ref).chain(std::iter::repeat(None));
        self.ids.chunks_exact(page_tokens as usize).zip(keys)
    }

    /// Checks that there are at most `most` ids, and as many keys as full pages or none.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub(crate) fn check(self, page_tokens: u32, most: u32, operation: &'static str) -> Result<()> {
        let full = self.ids.len() / page_tokens as usize;
        if self.ids.len() > most as usize {
            return Err(Error::new(Kind::OutOfRange, operation)
                .at("token ids")
                .with("ids", self.ids.len() as u64)
                .with("most", most));
        }
        if !self.keys.is_empty() && self.keys.len() != full {
            return Err(Error::new(Kind::OutOfRange, operation)
                .at("keys: as many as full pages, or none")
                .with("keys", self.keys.len() as u64)
                .with("pages", full as u64));
        }
        Ok(())
    }
}

/// The block hashes of a sequence's published pages.
#[derive(Debug)]
pub(crate) struct BlockHashes {
    pub(crate) hasher: BlockHasher,
    /// One entry for each page, from the first. The flag says whether the sequence uses the block; if not, the sequence
    /// keeps its own page in addition to it.
    pub(crate) blocks: Vec<(BlockHash, bool)>,
}

impl BlockHashes {
    /// An empty list with capacity for `pages` block hashes.
    pub(crate) fn new(hasher: BlockHasher, pages: u32) -> Result<BlockHashes> {
        let blocks = vector(pages as usize, "open", "block hashes of pages")?;
        Ok(BlockHashes { hasher, blocks })
    }

    /// Makes room for the block hashes of `pages` pages in all.
    pub(crate) fn reserve(&mut self, pages: u32) -> Result<()> {
        let more = (pages as usize).saturating_sub(self.blocks.len());
        reserve(&mut self.blocks, more, "extend", "block hashes of pages")
    }

    /// The number of published pages.
    pub(crate) fn pages(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// The block hash of the next page.
    pub(crate) fn next(&self, ids: &[u32], key: Option<&[u8; 16]>) -> BlockHash {
        self.hasher.block(self.blocks.last().map(|(block, _)| block), key, ids)
    }

    /// The blocks that the sequence uses, from page `first` on, in reverse order.
    pub(crate) fn used_from(&self, first: usize) -> impl Iterator<Item = (usize, BlockHash)> + '_ {
        let blocks = self.blocks.iter().enumerate().skip(first).rev();
        blocks.filter(|(_, (_, used))| *used).map(|(page, (block, _))| (page, *block))
    }
}
