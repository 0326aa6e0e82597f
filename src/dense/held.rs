//! The pages of one sequence in one group, block by block.
//!
//! Block `b` is the page of positions `b * page_tokens ..`. With full attention a sequence holds all its blocks from
//! its opening to its end. With a sliding window it holds the blocks from the first that a query may still read to the
//! last that was written; entries before them name the null page.

use crate::dense::line::Moves;
use crate::dense::pool::{NULL_PAGE, Need, Pool};
use crate::error::Result;
use crate::fallible::{reserve, vector};

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// The page of each block from block 0: a row of the group's page tables.
    pages: Vec<u32>,
    /// The first block that the sequence holds.
    first: u32,
    /// What it was promised.
    need: Need,
}

impl Held {
    /// No pages yet, with room for all that it needs.
    pub(super) fn new(need: Need) -> Result<Held> {
        Ok(Held { pages: vector(need.whole as usize, "open", "a page table")?, first: 0, need })
    }

    /// The page of each block from block 0.
    pub(super) fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// The first block that it holds.
    pub(super) const fn first(&self) -> u32 {
        self.first
    }

    /// The end of the blocks that it holds.
    pub(super) fn end(&self) -> u32 {
        self.pages.len() as u32
    }

    /// What it was promised.
    pub(super) const fn need(&self) -> Need {
        self.need
    }

    /// The pages that it holds.
    pub(super) fn own(&self) -> &[u32] {
        self.pages.get(self.first as usize..).unwrap_or(&[])
    }

    /// The page of a block that it holds.
    pub(super) fn page(&self, block: u32) -> Option<u32> {
        self.pages.get(block as usize).copied().filter(|page| *page != NULL_PAGE)
    }

    /// How many of the blocks before `end` it holds.
    pub(super) fn shared(&self, end: u32) -> u32 {
        end.min(self.end()).saturating_sub(self.first)
    }

    /// Makes room for `blocks` blocks in all.
    pub(super) fn reserve(&mut self, blocks: u32) -> Result<()> {
        let more = (blocks as usize).saturating_sub(self.pages.len());
        reserve(&mut self.pages, more, "extend", "a page table")
    }

    /// Notes that it was promised more.
    pub(super) fn promise(&mut self, need: Need) {
        self.need = need;
    }

    /// Takes pages up to block `end`. Returns the new ones, and the last copy down that touched one of them.
    pub(super) fn grow(&mut self, end: u32, pool: &mut Pool, moves: &mut Moves) -> Result<(&[u32], u64)> {
        let before = self.pages.len();
        let touched = pool.take(end.saturating_sub(self.end()), &mut self.pages, moves)?;
        Ok((&self.pages[before..], touched))
    }

    /// Appends the page of the next block, which the sequence owns; or none, before a window.
    pub(super) fn push(&mut self, page: Option<u32>) {
        self.pages.push(page.unwrap_or(NULL_PAGE));
        if page.is_none() {
            self.first = self.end();
        }
    }

    /// Gives back the first page, if it is before block `first`. Returns its block.
    pub(super) fn leave(&mut self, first: u32, pool: &mut Pool) -> Result<Option<u32>> {
        let block = self.first;
        if block >= first.min(self.end()) {
            return Ok(None);
        }
        let page = std::mem::replace(&mut self.pages[block as usize], NULL_PAGE);
        self.first = block + 1;
        pool.release(page)?;
        Ok(Some(block))
    }

    /// Gives back the pages from block `end` on.
    pub(super) fn cut(&mut self, end: u32, pool: &mut Pool) -> Result<()> {
        let end = end.max(self.first) as usize;
        while self.pages.len() > end {
            self.pages.pop().map_or(Ok(()), |page| pool.release(page))?;
        }
        Ok(())
    }

    /// Shares the blocks of `parent` before block `end`, in a table without blocks.
    pub(super) fn share(&mut self, parent: &Held, end: u32, pool: &mut Pool) -> Result<()> {
        self.first = parent.first.min(end);
        for page in parent.pages.iter().take(end as usize) {
            if *page != NULL_PAGE {
                pool.share(*page)?;
            }
            self.pages.push(*page);
        }
        Ok(())
    }

    /// Puts `page` in the place of a block's page, which it returns.
    pub(super) fn replace(&mut self, block: u32, page: u32) -> u32 {
        self.pages.get_mut(block as usize).map_or(NULL_PAGE, |own| std::mem::replace(own, page))
    }

    /// Gives back every page.
    pub(super) fn release(&mut self, pool: &mut Pool) -> Result<()> {
        for page in self.pages.drain(..).skip(self.first as usize) {
            pool.release(page)?;
        }
        self.first = 0;
        Ok(())
    }
}
