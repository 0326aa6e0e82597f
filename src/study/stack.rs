//! The LRU stack: an order of use, and the depth of each number in it (Mattson's stack distance).
//!
//! A number's *depth* is the count of numbers at or above it; the newest has depth 1. LRU caches of all sizes hold
//! prefixes of the same order: a cache of `n` holds the numbers of depth at most `n`.
//!
//! # How
//!
//! Each touch appends the number to a log, and its older entry dies; the live entries of the log are the order. A bit
//! per entry marks the live ones, so a depth is a count of bits from the entry on: one population count, plus the
//! live entries of the later words. There are two ways to get these, by how many numbers are asked for at once:
//!
//! - *many numbers*: a sum over all words, after which each number costs one population count. Touches maintain
//!   nothing for it.
//! - *few numbers*: a Fenwick tree counts live entries by blocks of words as they come and die, so a depth is the sum
//!   of a few nodes and a few words of the number's block, at any depth. The blocks of a prompt are mostly adjacent:
//!   such a stretch is looked up, removed and appended as one ([`LruStack::retouch`]).
//!
//! When three quarters of the log are dead, it is compacted.
//!
//! # Costs
//!
//! With many numbers: a few memory accesses and one population count a number, and a sum over a number of log words
//! in proportion to the numbers asked for. With few: the words of a block and the logarithm of the number of blocks,
//! for each stretch. About 35 bytes a number. Memory for the longest log is allocated at the beginning; only a call
//! with more numbers than exist, so with repetitions, may allocate more.

use crate::error::{Error, Kind, Result};
use crate::fallible::{filled, vector};

/// The entry of a number that was never touched.
const NOWHERE: u32 = u32::MAX;

/// Entries of a log that is not worth packing.
const LOG_LEAST: usize = 1 << 12;

/// Words of a block, and its entries.
const BLOCK: usize = 16;
const ENTRIES: usize = 64 * BLOCK;

/// The words of the log that each number asked for pays for: about the cost of its own block.
const WORDS_PAID: usize = 16;

/// The most numbers: a log of five times as many entries is numbered in 32 bits.
pub(super) const NUMBERS_MAX: u32 = 1 << 29;

/// The LRU stack: numbers in order of use, with the depth (stack distance) of each. The head of `study/stack.rs` has
/// its costs.
#[derive(Clone, Debug)]
pub struct LruStack {
    /// For each number, its live entry in the log, or [`NOWHERE`].
    entry_of: Vec<u32>,
    /// Numbers in the order in which they were touched.
    log: Vec<u32>,
    /// A bit per entry of the log, set if no later entry has its number.
    live: Vec<u64>,
    /// For each word of `live`, the live entries after it. Valid during one call.
    behind: Vec<u32>,
    /// Live entries by block, for the longest log, while `counted`.
    blocks: Blocks,
    counted: bool,
    /// First entries and counts of stretches that are about to die.
    stretches: Vec<(u32, u32)>,
    /// Live entries.
    len: usize,
    /// Entries at which the log is packed.
    limit: usize,
}

/// The operation's name in errors of allocation.
const OPERATION: &str = "count depths";
const PLACE: &str = "an order of use";

/// `count` words of `value`.
pub(super) fn words<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    filled(count, value, OPERATION, PLACE)
}

/// The lowest `count` bits of a word, at most 64.
const fn ones(count: usize) -> u64 {
    if count < 64 { (1 << count) - 1 } else { u64::MAX }
}

fn sum(words: &[u64]) -> u32 {
    words.iter().map(|word| word.count_ones()).sum()
}

/// Calls `tell` for each word with entries in `first..end`, with their bits.
fn each_word(first: usize, end: usize, mut tell: impl FnMut(usize, u64)) {
    for word in first / 64..end.div_ceil(64) {
        let from = first.saturating_sub(word * 64);
        let below = (end - word * 64).min(64);
        tell(word, ones(below) & !ones(from));
    }
}

/// Calls `tell` for each block with entries in `first..end`, with their number.
fn each_block(first: usize, end: usize, mut tell: impl FnMut(usize, u32)) {
    for block in first / ENTRIES..end.div_ceil(ENTRIES) {
        let from = first.max(block * ENTRIES);
        tell(block, (end.min((block + 1) * ENTRIES) - from) as u32);
    }
}

/// Counts by block as a Fenwick tree: node `n` sums block `n` and as many blocks before it as `n` has trailing ones
/// in binary.
#[derive(Clone, Debug, Default)]
struct Blocks(Vec<u32>);

impl Blocks {
    /// Builds the sums of these counts; the remaining of the `blocks` blocks have 0.
    fn fill(&mut self, counts: impl Iterator<Item = u32>, blocks: usize) {
        self.0.clear();
        self.0.extend(counts);
        self.0.resize(blocks, 0);
        for node in 0..blocks {
            let count = self.0[node];
            if let Some(above) = self.0.get_mut(node | (node + 1)) {
                *above += count;
            }
        }
    }

    /// Adds to a block's count, modulo 2^32.
    fn add(&mut self, block: usize, count: u32) {
        let mut node = block;
        while let Some(sum) = self.0.get_mut(node) {
            *sum = sum.wrapping_add(count);
            node |= node + 1;
        }
    }

    /// The counts of all blocks before this one.
    fn before(&self, block: usize) -> u32 {
        let (mut end, mut sum) = (block, 0);
        while end > 0 {
            sum += self.0[end - 1];
            end &= end - 1;
        }
        sum
    }
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
        let numbers = numbers as usize;
        let entries = (4 * numbers).max(LOG_LEAST) + numbers;
        Ok(LruStack {
            entry_of: words(numbers, NOWHERE)?,
            log: vector(entries, OPERATION, PLACE)?,
            live: vector(entries.div_ceil(64), OPERATION, PLACE)?,
            behind: vector(entries.div_ceil(64), OPERATION, PLACE)?,
            blocks: Blocks(vector(entries.div_ceil(ENTRIES), OPERATION, PLACE)?),
            counted: false,
            stretches: vector(numbers, OPERATION, PLACE)?,
            len: 0,
            limit: LOG_LEAST,
        })
    }

    /// The number of distinct numbers that were touched.
    pub fn len(&self) -> u32 {
        self.len as u32
    }

    /// Whether no number was touched.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Calls `found` with the depth of each number in the present order; 0 for a number that was never touched.
    ///
    /// # Panics
    /// For a number that is not below the limit of [`LruStack::new`].
    #[inline]
    pub fn depths(&mut self, numbers: &[u32], found: impl FnMut(u32)) {
        if self.live.len() <= WORDS_PAID * numbers.len() {
            self.depths_of_many(numbers, found);
        } else {
            self.depths_of_few(numbers, found);
        }
    }

    fn depths_of_many(&mut self, numbers: &[u32], mut found: impl FnMut(u32)) {
        // Counting by blocks would slow every touch, and is not needed now.
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
        self.count();
        for number in numbers {
            let entry = self.entry_of[*number as usize];
            found(if entry == NOWHERE { 0 } else { self.depth(entry) });
        }
    }

    /// Counts the blocks' live entries, unless they are counted.
    fn count(&mut self) {
        if !self.counted {
            self.blocks.fill(self.live.chunks(BLOCK).map(sum), self.limit.div_ceil(ENTRIES));
            self.counted = true;
        }
    }

    /// The depth of a live entry, while `counted`.
    fn depth(&self, entry: u32) -> u32 {
        let word = (entry / 64) as usize;
        let block = word / BLOCK;
        let here = (self.live[word] & ones(entry as usize % 64)).count_ones();
        self.len as u32 - self.blocks.before(block) - sum(&self.live[block * BLOCK..word]) - here
    }

    /// Calls `found` with the depths of the numbers in the present order, then makes them the newest, the first one
    /// on top. `found` gets stretches: the depth of a stretch's first number, and its length. A stretch is a run of
    /// numbers that are adjacent in the order, or, with depth 0, that were never touched. For a repeated number,
    /// `found` gets its old depth both times, and the number's new place is that of its first occurrence.
    ///
    /// # Panics
    /// For a number that is not below the limit of [`LruStack::new`]; the stack is unusable then.
    pub fn retouch(&mut self, numbers: &[u32], mut found: impl FnMut(u32, u32)) {
        self.make_room(numbers.len());
        self.count();
        let mut rest = numbers;
        while let Some(number) = rest.first() {
            let entry = self.entry_of[*number as usize];
            let follows = |(below, number): (u32, &u32)| {
                let expected = if entry == NOWHERE { Some(NOWHERE) } else { entry.checked_sub(below) };
                Some(self.entry_of[*number as usize]) == expected
            };
            let count = (0..).zip(rest).take_while(|next| follows(*next)).count();
            rest = &rest[count..];
            if entry == NOWHERE {
                found(0, count as u32);
            } else {
                found(self.depth(entry), count as u32);
                self.stretches.push((entry + 1 - count as u32, count as u32));
            }
        }
        let mut stretches = std::mem::take(&mut self.stretches);
        stretches.drain(..).for_each(|(first, count)| self.bury_stretch(first as usize, count as usize));
        self.stretches = stretches;
        let first = self.log.len();
        self.log.extend(numbers.iter().rev());
        self.enliven(first);
        for entry in first..self.log.len() {
            let number = self.log[entry] as usize;
            let old = std::mem::replace(&mut self.entry_of[number], entry as u32);
            // The older entries have died; this is a repeated number.
            if old != NOWHERE && old as usize >= first {
                self.bury_stretch(old as usize, 1);
            }
        }
    }

    /// Marks the live ones of `count` entries from `first` on as dead, while `counted`.
    fn bury_stretch(&mut self, first: usize, count: usize) {
        each_word(first, first + count, |word, bits| {
            let dying = (self.live[word] & bits).count_ones();
            self.live[word] &= !bits;
            self.len -= dying as usize;
            self.blocks.add(word / BLOCK, dying.wrapping_neg());
        });
    }

    /// Makes the numbers the newest, the last one on top. A repeated number takes the place of its last occurrence.
    ///
    /// # Panics
    /// As [`LruStack::retouch`].
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
        each_word(first, end, |word, bits| self.live[word] |= bits);
        self.len += end - first;
        if self.counted {
            each_block(first, end, |block, entries| self.blocks.add(block, entries));
        }
    }

    /// Marks the older entries of the numbers from entry `first` on as dead.
    #[inline]
    fn bury<const COUNTED: bool>(&mut self, first: usize) {
        let mut dying = 0;
        for (entry, number) in (first as u32..).zip(&self.log[first..]) {
            let old = std::mem::replace(&mut self.entry_of[*number as usize], entry);
            if old == NOWHERE {
                continue;
            }
            dying += 1;
            let word = (old / 64) as usize;
            self.live[word] &= !(1 << (old % 64));
            if COUNTED {
                self.blocks.add(word / BLOCK, u32::MAX);
            }
        }
        self.len -= dying;
    }

    /// Makes room for `more` entries: compacts a log that has reached its limit.
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

    /// Stack distances of `numbers` in a plain list, the newest last.
    fn plain(list: &[u32], numbers: &[u32]) -> Vec<u32> {
        let depth = |n: &u32| list.iter().rev().position(|m| m == n).map_or(0, |above| above as u32 + 1);
        numbers.iter().map(depth).collect()
    }

    fn told(stack: &mut LruStack, numbers: &[u32]) -> Vec<u32> {
        let mut depths = Vec::new();
        stack.depths(numbers, |depth| depths.push(depth));
        depths
    }

    /// Distinct numbers, a few consecutive ones after each of the first.
    fn stretches(numbers: &[u32]) -> Vec<u32> {
        let mut is_new = [true; 3000];
        let rows = numbers.iter().take(40).flat_map(|n| *n..(n + n % 50).min(3000));
        rows.filter(|n| std::mem::take(&mut is_new[*n as usize])).collect()
    }

    fn retouched(stack: &mut LruStack, numbers: &[u32]) -> Vec<u32> {
        let mut depths = Vec::new();
        stack.retouch(numbers, |depth, count| {
            depths.extend((0..count).map(|below| if depth == 0 { 0 } else { depth + below }));
        });
        depths
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// 3,000 numbers fill three blocks of words, so few are looked up by blocks and many by words; steps of
        /// both sizes in turn pass the log's limit several times.
        #[test]
        fn stack_distances_are_those_of_a_plain_list(
            steps in prop::collection::vec(
                (prop::bool::weighted(0.2), prop::collection::vec(0..3000_u32, 0..900)), 0..60),
            clear in 0..60_usize,
        ) {
            let mut stack = LruStack::new(3000).unwrap();
            let mut list: Vec<u32> = Vec::new();
            for (i, (many, numbers)) in steps.iter().enumerate() {
                let asked = if *many { &numbers[..] } else { &numbers[..numbers.len().min(2)] };
                prop_assert_eq!(told(&mut stack, asked), plain(&list, asked));
                let mut numbers = numbers.clone();
                if i % 3 == 0 {
                    numbers = stretches(&numbers);
                    if i % 2 == 0 {
                        numbers.extend_from_within(..numbers.len() / 2);
                    }
                    prop_assert_eq!(retouched(&mut stack, &numbers), plain(&list, &numbers));
                    numbers.reverse();
                } else {
                    stack.touch(numbers.iter().copied());
                }
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

    /// Numbers return one by one, the newest first: each has a distance one greater than the one before. 100,000 of
    /// them fill 98 blocks, and twice as many exceed the log's limit.
    #[test]
    fn single_numbers_have_distances_up_to_the_whole_list() {
        const NUMBERS: u32 = 100_000;
        let mut stack = LruStack::new(NUMBERS).unwrap();
        let order: Vec<u32> = (0..NUMBERS).map(|i| i * 7919 % NUMBERS).collect();
        stack.touch(order.iter().copied());
        for turn in 0..5 {
            let back = |i: u32| if turn % 2 == 0 { NUMBERS - 1 - i } else { i } as usize;
            for i in 0..NUMBERS {
                assert_eq!(retouched(&mut stack, &[order[back(i)]]), [i + 1], "turn {turn}");
            }
        }
    }

    #[test]
    fn a_repeated_prompt_is_one_stretch() {
        let mut stack = LruStack::new(400).unwrap();
        let mut told = Vec::new();
        for prompt in [0..200, 0..300, 100..250] {
            stack.retouch(&prompt.collect::<Vec<_>>(), |depth, count| told.push((depth, count)));
        }
        assert_eq!(told, [(0, 200), (1, 200), (0, 100), (101, 150)]);
        assert_eq!(stack.len(), 300);
    }

    #[test]
    fn a_number_listed_twice_counts_at_its_first_place() {
        let mut stack = LruStack::new(10).unwrap();
        for depths in [[0, 0, 0, 0], [1, 1, 2, 1]] {
            assert_eq!(retouched(&mut stack, &[5, 5, 6, 5]), depths);
            assert_eq!((stack.len(), told(&mut stack, &[5, 6])), (2, vec![1, 2]));
        }
    }

    /// A log that is never compacted grows without limit; one that is compacted each time takes quadratic time.
    #[test]
    fn the_log_grows_to_four_times_its_live_entries() {
        const NUMBERS: u32 = 4000;
        const BATCH: u32 = 100;
        let mut stack = LruStack::new(NUMBERS).unwrap();
        let (room, mut longest) = (stack.log.capacity(), 0);
        for i in 0..400 {
            let first = i * BATCH % NUMBERS;
            stack.touch(first..first + BATCH);
            longest = longest.max(stack.log.len());
        }
        assert_eq!(stack.log.capacity(), room, "taken at the beginning");
        let most = 4 * NUMBERS as usize + BATCH as usize;
        assert!((most - BATCH as usize..=most).contains(&longest), "{longest} entries");
    }

    #[test]
    fn too_many_numbers_are_refused() {
        assert_eq!(LruStack::new(u32::MAX).unwrap_err().kind(), Kind::OutOfRange);
    }
}
