//! Which rank of a group owns which pages of a layer.
//!
//! Every rank owns `pages / ranks` pages of a layer, and the remainder is one page more for some. Which ranks these are
//! rotates from layer to layer: the first such rank of a layer follows the last one of the layer before. So the totals
//! of any two ranks differ by at most one page, whatever the layers' sizes. A cut falls between two pages, never inside
//! one, because a page is the unit in which memory is exported and mapped.
//!
//! Parts lie in the window in rank order. A rank owns nothing of a layer that has fewer pages than there are ranks and
//! that gives it none of the remainder; its part is then an empty range at its place.
//!
//! A cut is two numbers and a start, so a plan of thousands of layers and ranks costs nothing per rank, and each part
//! is computed in constant time.

use std::ops::Range;

/// The most ranks of a group: more than any host has, so a larger number is a mistake.
pub const RANKS_MAX: u32 = 4096;

/// The cut of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pages: u64,
    ranks: u32,
    /// The first rank that owns a page of the remainder.
    first: u32,
}

impl Cut {
    /// The cuts of layers of so many pages each among `ranks` ranks, above 0, in the order in which the remainder
    /// rotates.
    pub(super) fn rotating(pages: impl Iterator<Item = u64>, ranks: u32) -> impl Iterator<Item = Cut> {
        let mut next = 0;
        pages.map(move |pages| {
            let cut = Cut { pages, ranks, first: next };
            next = ((u64::from(next) + pages % u64::from(ranks)) % u64::from(ranks)) as u32;
            cut
        })
    }

    /// Ranks that the layer is divided among.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The first rank that owns a page of the remainder.
    pub const fn first(&self) -> u32 {
        self.first
    }

    /// The first page of `rank`'s part; of `ranks`, the end of the window.
    fn start(&self, rank: u32) -> u64 {
        let (rank, ranks, first) = (u64::from(rank), u64::from(self.ranks), u64::from(self.first));
        let (each, remainder) = (self.pages / ranks, self.pages % ranks);
        // The ranks with one page more are those from `first` on, round the end of the group.
        let end = first + remainder;
        let before = rank.clamp(first, end) - first;
        let wrapped = rank.min(end.saturating_sub(ranks));
        each * rank + before + wrapped
    }

    /// The pages of the window that `rank` owns; empty for a rank that owns none, and for one beyond the group.
    pub fn part(&self, rank: u32) -> Range<u64> {
        let of = |rank: u32| self.start(rank.min(self.ranks));
        of(rank)..of(rank.saturating_add(1))
    }

    /// The most pages that a rank has to fetch to have the whole layer.
    pub(super) fn most_gathered(&self) -> u64 {
        self.pages - self.pages / u64::from(self.ranks)
    }
}
