//! An order of use, and how deep in it each number stands: the stack of LRU.
//!
//! A number's *depth* is how many stand at or above it, the newest at depth 1. Least-recently-used caches of
//! every size hold a beginning of the same order, so a cache of `n` holds what stands no deeper than `n`.
//!
//! # How
//!
//! Each touch appends the number to a log and its older entry dies: the live entries of the log are the order. A
//! bit for each entry tells the live ones, so a depth is a count of bits from the entry on: one population
//! count, and the live entries of the words behind. For these there are two ways, chosen by what is asked at
//! once:
//!
//! - *many numbers*: a sum over all words, after which each number costs one population count. Nothing is kept
//!   for it when numbers are touched.
//! - *few numbers*: live entries are counted by blocks of words as they come and die, so that only blocks behind
//!   the oldest entry asked for are summed up, and a few words of each number's block. Numbers that stand near
//!   each other in the log, as a prompt's blocks do, share that sum.
//!
//! When three quarters of the log are dead it is packed.
//!
//! # Costs
//!
//! A few memory accesses and one population count a number; beside it the lesser of a sum over the log's words
//! and one over its blocks, and of the former at most as many words as the numbers asked for pay for. About
//! 30 bytes a number. It allocates as the log grows: it is for study, no step of an engine waits for it.

use crate::error::{Error, Kind, Result};

/// Where a number stands that was never touched.
const NOWHERE: u32 = u32::MAX;

/// Entries of a log that is not worth packing.
const LOG_LEAST: usize = 1 << 12;

/// Words of a block.
const BLOCK: usize = 16;

/// Words that a number asked for pays for: what its own block would cost it, and a little.
const WORDS_PAID: usize = 16;

/// The most numbers: a log of five times as many entries is numbered in 32 bits.
pub(crate) const NUMBERS_MAX: u32 = 1 << 29;

/// See the module's head.
#[derive(Clone, Debug)]
pub struct LruStack {
    /// By number: its live entry in the log, or [`NOWHERE`].
    entry_of: Vec<u32>,
    /// Numbers in the order in which they were touched.
    log: Vec<u32>,
    /// Bit per entry of the log: no later entry has its number.
    live: Vec<u64>,
    /// By word of `live`, or by block: live entries behind it. Holds during one call.
    behind: Vec<u32>,
    /// By block: its live entries, while `counted`.
    in_block: Vec<u32>,
    counted: bool,
    /// Live entries.
    len: usize,
    /// Entries at which the log is packed.
    limit: usize,
}

/// `count` words of `value`.
pub(super) fn words<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    let mut words = Vec::new();
    words.try_reserve_exact(count).map_err(|_| {
        let bytes = (size_of::<T>() * count) as u64;
        Error::new(Kind::OutOfMemory, "count depths").at("an order of use").with("bytes", bytes)
    })?;
    words.resize(count, value);
    Ok(words)
}

/// The lowest `count` bits of a word, at most 64.
const fn ones(count: usize) -> u64 {
    if count < 64 { (1 << count) - 1 } else { u64::MAX }
}

fn sum(words: &[u64]) -> u32 {
    words.iter().map(|word| word.count_ones()).sum()
}

impl LruStack {
    /// An empty order over the numbers below `numbers`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `numbers` is above 2^29; [`Kind::OutOfMemory`].
    pub fn new(numbers: u32) -> Result<LruStack> {
        if numbers > NUMBERS_MAX {
            return Err(Error::new(Kind::OutOfRange, "count depths")
                .at("an order of use")
                .with("numbers", numbers));
        }
        Ok(LruStack {
            entry_of: words(numbers as usize, NOWHERE)?,
            log: Vec::new(),
            live: Vec::new(),
            behind: Vec::new(),
            in_block: Vec::new(),
            counted: false,
            len: 0,
            limit: LOG_LEAST,
        })
    }

    /// How many numbers were touched.
    pub fn len(&self) -> u32 {
        self.len as u32
    }

    /// Whether none was.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tells `found` the depth of each number in the order as it stands; 0 for one that was never touched.
    #[inline]
    pub fn depths(&mut self, numbers: &[u32], found: impl FnMut(u32)) {
        if self.live.len() <= WORDS_PAID * numbers.len() {
            self.depths_of_many(numbers, found);
        } else {
            self.depths_of_few(numbers, found);
        }
    }

    fn depths_of_many(&mut self, numbers: &[u32], mut found: impl FnMut(u32)) {
        // Counting by blocks would cost every touch; nobody asks for it now.
        self.counted = false;
        self.behind.resize(self.live.len().max(self.behind.len()), 0);
        let mut sum = 0;
        for (behind, word) in self.behind.iter_mut().zip(&self.live).rev() {
            *behind = sum;
            sum += word.count_ones();
        }
        for number in numbers {
            let entry = self.entry_of[*number as usize];
            if entry == NOWHERE {
                found(0);
                continue;
            }
            let word = (entry / 64) as usize;
            found(self.behind[word] + (self.live[word] >> (entry % 64)).count_ones());
        }
    }

    fn depths_of_few(&mut self, numbers: &[u32], mut found: impl FnMut(u32)) {
        if !self.counted {
            self.in_block.clear();
            self.in_block.extend(self.live.chunks(BLOCK).map(sum));
            self.counted = true;
        }
        self.behind.resize(self.in_block.len().max(self.behind.len()), 0);
        // Blocks from `summed` on have their sums; `total` is what lives in them.
        let (mut summed, mut total) = (self.in_block.len(), 0);
        let (mut last, mut behind) = (usize::MAX, 0);
        for number in numbers {
            let entry = self.entry_of[*number as usize];
            if entry == NOWHERE {
                found(0);
                continue;
            }
            let word = (entry / 64) as usize;
            if word != last {
                let block = word / BLOCK;
                while summed > block {
                    summed -= 1;
                    self.behind[summed] = total;
                    total += self.in_block[summed];
                }
                let end = ((block + 1) * BLOCK).min(self.live.len());
                behind = self.behind[block] + sum(&self.live[word + 1..end]);
                last = word;
            }
            found(behind + (self.live[word] >> (entry % 64)).count_ones());
        }
    }

    /// Makes the numbers the newest, the last one on top. One that stands there twice counts where it stands
    /// last.
    #[inline]
    pub fn touch(&mut self, numbers: impl ExactSizeIterator<Item = u32>) {
        self.make_room(numbers.len());
        let first = self.log.len();
        self.log.extend(numbers);
        self.enliven(first);
        if self.counted { self.bury::<true>(first) } else { self.bury::<false>(first) }
    }

    /// Sets the bits of the entries from `first` on, and counts them.
    fn enliven(&mut self, first: usize) {
        let end = self.log.len();
        for word in first / 64..end.div_ceil(64) {
            let from = first.saturating_sub(word * 64);
            let below = (end - word * 64).min(64);
            self.live[word] |= ones(below) & !ones(from);
        }
        if self.counted {
            const ENTRIES: usize = BLOCK * 64;
            self.in_block.resize(self.live.len().div_ceil(BLOCK).max(self.in_block.len()), 0);
            for block in first / ENTRIES..end.div_ceil(ENTRIES) {
                let from = first.max(block * ENTRIES);
                self.in_block[block] += (end.min((block + 1) * ENTRIES) - from) as u32;
            }
        }
    }

    /// Lets the older entries die of the numbers from the entry `first` on.
    #[inline]
    fn bury<const COUNTED: bool>(&mut self, first: usize) {
        for (entry, number) in (first as u32..).zip(&self.log[first..]) {
            let old = std::mem::replace(&mut self.entry_of[*number as usize], entry);
            if old == NOWHERE {
                self.len += 1;
                continue;
            }
            let word = (old / 64) as usize;
            self.live[word] &= !(1 << (old % 64));
            if COUNTED {
                self.in_block[word / BLOCK] -= 1;
            }
        }
    }

    /// Room for `more` entries: packs a log that has grown to its limit.
    fn make_room(&mut self, more: usize) {
        if self.log.len() + more > self.limit {
            self.pack();
            self.limit = (4 * self.len).max(LOG_LEAST) + more;
        }
        let words = (self.log.len() + more).div_ceil(64);
        if words > self.live.len() {
            self.live.resize(words, 0);
        }
    }

    /// Takes the dead entries out of the log.
    fn pack(&mut self) {
        let mut kept = 0;
        for (word, bits) in self.live.iter().enumerate() {
            let mut left = *bits;
            while left != 0 {
                let number = self.log[word * 64 + left.trailing_zeros() as usize];
                self.log[kept] = number;
                self.entry_of[number as usize] = kept as u32;
                kept += 1;
                left &= left - 1;
            }
        }
        self.log.truncate(kept);
        self.live.clear();
        self.live.resize(kept / 64, u64::MAX);
        if !kept.is_multiple_of(64) {
            self.live.push(ones(kept % 64));
        }
        self.counted = false;
    }

    /// Forgets all numbers.
    pub fn clear(&mut self) {
        for number in self.log.drain(..) {
            self.entry_of[number as usize] = NOWHERE;
        }
        self.live.clear();
        (self.counted, self.len, self.limit) = (false, 0, LOG_LEAST);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{BLOCK, Kind, LruStack, WORDS_PAID};

    /// Depths of `numbers` in a plain list, the newest last.
    fn plain(list: &[u32], numbers: &[u32]) -> Vec<u32> {
        let depth = |n: &u32| list.iter().rev().position(|m| m == n).map_or(0, |above| above as u32 + 1);
        numbers.iter().map(depth).collect()
    }

    fn told(stack: &mut LruStack, numbers: &[u32]) -> Vec<u32> {
        let mut depths = Vec::new();
        stack.depths(numbers, |depth| depths.push(depth));
        depths
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// 3,000 numbers fill three blocks of words, so few are looked up by blocks and many by words; steps of
        /// both sizes in turn pass the log's limit several times.
        #[test]
        fn it_is_a_plain_list(
            steps in prop::collection::vec(
                (prop::bool::weighted(0.2), prop::collection::vec(0..3000_u32, 0..900)), 0..60),
            clear in 0..60_usize,
        ) {
            let mut stack = LruStack::new(3000).unwrap();
            let mut list: Vec<u32> = Vec::new();
            for (i, (many, numbers)) in steps.iter().enumerate() {
                let asked = if *many { &numbers[..] } else { &numbers[..numbers.len().min(2)] };
                prop_assert_eq!(told(&mut stack, asked), plain(&list, asked));
                stack.touch(numbers.iter().copied());
                let mut is_new = vec![false; 3000];
                numbers.iter().for_each(|n| is_new[*n as usize] = true);
                list.retain(|n| !is_new[*n as usize]);
                let mut newest = numbers.clone();
                newest.reverse();
                newest.retain(|n| std::mem::take(&mut is_new[*n as usize]));
                list.extend(newest.iter().rev());
                prop_assert_eq!(stack.len() as usize, list.len());
                if i == clear {
                    stack.clear();
                    list.clear();
                    prop_assert!(stack.is_empty());
                }
            }
            let all: Vec<u32> = (0..3000).collect();
            prop_assert_eq!(told(&mut stack, &all), plain(&list, &all));
        }
    }

    #[test]
    fn few_numbers_are_looked_up_by_blocks() {
        let mut stack = LruStack::new(5000).unwrap();
        stack.touch(0..4000);
        assert!(stack.live.len() > 2 * BLOCK.max(WORDS_PAID));
        assert_eq!(told(&mut stack, &[7, 4999]), [3993, 0]);
        assert!(stack.counted, "the way of the few");
        stack.touch([7, 0, 7].into_iter());
        assert_eq!(told(&mut stack, &[0, 7, 8]), [2, 1, 3994]);
        let all: Vec<u32> = (0..4000).collect();
        assert_eq!(told(&mut stack, &all)[..2], [2, 4000]);
        assert!(!stack.counted, "the way of the many");
    }

    #[test]
    fn too_many_numbers_are_refused() {
        assert_eq!(LruStack::new(u32::MAX).unwrap_err().kind(), Kind::OutOfRange);
    }
}
