//! The page allocator: free pages, and the number of owners of each other page.
//!
//! It has a stack of free pages and a count of owners for each page, both allocated at construction. Other allocators
//! lacked this count: there a page that was freed twice was later written by two sequences (sgl-project/sglang#13483,
//! #29310). Here freeing a page twice is an error.

use crate::error::{Error, Kind, Result};
use crate::fallible::{filled, vector};

/// An allocator of `count` pages.
#[derive(Debug)]
pub struct Pages {
    pool: &'static str,
    free: Vec<u32>,
    owners: Vec<u32>,
}

impl Pages {
    /// An allocator with all pages free. Errors name the pages by `pool`.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    pub fn new(pool: &'static str, count: u32) -> Result<Self> {
        let mut free = vector(count as usize, "cache", pool)?;
        free.extend((0..count).rev());
        let owners = filled(count as usize, 0, "cache", pool)?;
        Ok(Pages { pool, free, owners })
    }

    /// The number of pages, free or not.
    pub fn count(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The number of free pages.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes `count` pages or none, and appends them to `pages`.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with `wanted` and `free`.
    pub fn allocate(&mut self, count: u32, pages: &mut Vec<u32>) -> Result<()> {
        let Some(rest) = self.free.len().checked_sub(count as usize) else {
            return Err(self.exhausted(count, self.free()));
        };
        for page in self.free.drain(rest..).rev() {
            self.owners[page as usize] = 1;
            pages.push(page);
        }
        Ok(())
    }

    /// Takes one page, if one is free.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.owners[page as usize] = 1;
        Some(page)
    }

    /// The error for a request of `wanted` pages if only `free` are available.
    pub fn exhausted(&self, wanted: u32, free: u32) -> Error {
        Error::new(Kind::Exhausted, "allocate pages").at(self.pool).with("wanted", wanted).with("free", free)
    }

    /// The number of owners of `page`; 0 for a free or unknown page.
    pub fn owners(&self, page: u32) -> u32 {
        self.owners.get(page as usize).copied().unwrap_or(0)
    }

    /// Adds an owner to a page that has one.
    ///
    /// # Errors
    /// [`Kind::Internal`] for a free page.
    pub fn share(&mut self, page: u32) -> Result<()> {
        match self.owners.get_mut(page as usize) {
            Some(owners) if *owners > 0 => {
                *owners += 1;
                Ok(())
            }
            _ => Err(self.misused("share a free page", page)),
        }
    }

    /// Removes an owner. A page without owners is free.
    ///
    /// # Errors
    /// [`Kind::Internal`] for a free page: it was freed twice.
    pub fn release(&mut self, page: u32) -> Result<()> {
        match self.owners.get_mut(page as usize) {
            Some(owners) if *owners > 0 => {
                *owners -= 1;
                if *owners == 0 {
                    self.free.push(page);
                }
                Ok(())
            }
            _ => Err(self.misused("release a free page", page)),
        }
    }

    /// Checks that each page is free or owned, never both, and counted once.
    ///
    /// # Errors
    /// [`Kind::Internal`].
    pub fn validate(&self) -> Result<()> {
        let mut seen = vec![false; self.owners.len()];
        for page in &self.free {
            let twice = seen.get_mut(*page as usize).is_none_or(|seen| std::mem::replace(seen, true));
            if twice || self.owners(*page) != 0 {
                return Err(self.misused("a page is free twice or owned", *page));
            }
        }
        match seen.iter().zip(&self.owners).position(|(free, owners)| *free != (*owners == 0)) {
            Some(page) => Err(self.misused("a page is neither free nor owned", page as u32)),
            None => Ok(()),
        }
    }

    fn misused(&self, rule: &'static str, page: u32) -> Error {
        Error::new(Kind::Internal, rule).at(self.pool).with("page", page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_given_out_once_and_taken_back_once() {
        let mut pages = Pages::new("host pages", 4).unwrap();
        let mut mine = Vec::new();
        pages.allocate(3, &mut mine).unwrap();
        assert_eq!(mine, [0, 1, 2]);
        let e = pages.allocate(2, &mut mine).unwrap_err();
        assert_eq!((e.kind(), e.number("wanted"), e.number("free")), (Kind::Exhausted, Some(2), Some(1)));
        assert_eq!((mine.len(), pages.free()), (3, 1), "a refused call takes nothing");
        pages.share(1).unwrap();
        pages.release(1).unwrap();
        assert_eq!((pages.owners(1), pages.free()), (1, 1));
        pages.release(1).unwrap();
        assert_eq!((pages.owners(1), pages.free()), (0, 2));
        pages.validate().unwrap();
    }

    #[test]
    fn f10_a_double_free_is_an_error_and_changes_nothing() {
        let mut pages = Pages::new("host pages", 2).unwrap();
        let mut mine = Vec::new();
        pages.allocate(1, &mut mine).unwrap();
        pages.release(mine[0]).unwrap();
        assert_eq!(pages.release(mine[0]).unwrap_err().kind(), Kind::Internal);
        assert_eq!(pages.share(mine[0]).unwrap_err().kind(), Kind::Internal);
        assert_eq!(pages.release(99).unwrap_err().kind(), Kind::Internal);
        assert_eq!(pages.free(), 2);
        pages.validate().unwrap();
        // The control: a free list without the count would now hold the page twice.
        pages.free.push(mine[0]);
        assert!(pages.validate().is_err());
    }

    #[test]
    fn f11_a_page_that_was_given_out_is_the_callers_own() {
        let mut pages = Pages::new("host pages", 8).unwrap();
        let mut mine = Vec::new();
        pages.allocate(4, &mut mine).unwrap();
        let before = mine.clone();
        let mut other = Vec::new();
        pages.allocate(4, &mut other).unwrap();
        other.iter().for_each(|p| pages.release(*p).unwrap());
        assert_eq!(mine, before, "later calls do not reach into what the caller holds");
        assert!(mine.iter().all(|p| !other.contains(p)));
    }
}
