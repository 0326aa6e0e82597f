//! Two sets of positions as bits: their differences come out in ascending order without sorting.

use super::super::header::CONTEXT_MAX;
use crate::error::{Error, Kind, Result};

/// Positions in a word.
const WORD: u32 = u64::BITS;

/// Words for every possible position.
const WORDS: usize = (CONTEXT_MAX / WORD) as usize;

/// The old set and the new one. Both are empty between two calls.
pub(super) struct Bits {
    /// Up to the highest position reached, with capacity for all; the system provides pages as they are used.
    words: Vec<[u64; 2]>,
}

impl Bits {
    /// Bytes held.
    pub const BYTES: u64 = (WORDS * size_of::<[u64; 2]>()) as u64;

    /// Fails with [`OutOfMemory`](crate::Kind::OutOfMemory).
    pub fn new() -> Result<Bits> {
        Ok(Bits { words: room(WORDS)? })
    }

    /// Inserts the old set and the new one. The new one's distinct positions are also appended to `list`, as far as
    /// there is capacity. Fails with the first position above `most`; both sets then hold what was read before it.
    pub fn fill(
        &mut self,
        old: &[u32],
        new: impl Iterator<Item = u32>,
        most: u32,
        list: &mut Vec<u32>,
    ) -> std::result::Result<(), u32> {
        let reached = (most / WORD) as usize + 1;
        if self.words.len() < reached {
            self.words.resize(reached.min(WORDS), [0; 2]);
        }
        for position in old {
            if let Some([word, _]) = self.words.get_mut((position / WORD) as usize) {
                *word |= 1 << (position % WORD);
            }
        }
        for position in new {
            match self.words.get_mut((position / WORD) as usize) {
                Some([_, word]) if position <= most => {
                    let bit = 1 << (position % WORD);
                    if *word & bit == 0 {
                        list.push(position);
                    }
                    *word |= bit;
                }
                _ => return Err(position),
            }
        }
        Ok(())
    }

    /// Removes both sets, which have no position above `most`. Returns which positions only the new one has,
    /// which ranks of the old one the new one lacks, and the size of the new one.
    pub fn difference(&mut self, most: u32, added: &mut Vec<u32>, dropped: &mut Vec<u32>) -> usize {
        added.clear();
        dropped.clear();
        let (mut rank, mut distinct) = (0, 0);
        for (start, words) in (0..=most).step_by(WORD as usize).zip(&mut self.words) {
            let [old, new] = std::mem::take(words);
            ones(new & !old, |bit| added.push(start + bit));
            ones(old & !new, |bit| dropped.push(rank + (old & ((1 << bit) - 1)).count_ones()));
            rank += old.count_ones();
            distinct += new.count_ones() as usize;
        }
        distinct
    }
}

/// The set bits of a word, from the lowest.
fn ones(mut word: u64, mut each: impl FnMut(u32)) {
    while word != 0 {
        each(word.trailing_zeros());
        word &= word - 1;
    }
}

pub(super) fn no_memory() -> Error {
    Error::new(Kind::OutOfMemory, "record").at("the buffers").hint("record smaller groups, or free memory")
}

/// An empty list with capacity for `most`.
pub(super) fn room<T>(most: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(most).map_err(|_| no_memory().with("wanted", most as u64))?;
    Ok(list)
}
