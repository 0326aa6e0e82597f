//! Two fading counts: a row's rank is the number of its recent selections, plus a smaller weight for earlier ones. The
//! result of a search for a rule that misses at least a tenth less than LRU and that a kernel could
//! still run (`docs/policies.md`).
//!
//! Every selection adds one to both counts of a row, a birth adds two, because a new row had no chance to be selected.
//! One count halves in 4 steps, the other in 32; the row with the smallest `5 x fast + slow` is evicted. LRU ignores
//! how often a row was selected; counting without fading, which is very bad on these traces, never forgets.
//!
//! A kernel needs three words for each slot (two counts, the step of the last selection) and the scan that LRU
//! needs. Counts fade when they are read, in integers, so every device computes the same residency. With
//! [`Memory::Tokens`] each token of the context has the words instead, even while its row is not
//! resident: 12 bytes for each token and layer, in addition to the 132 of an index key.

use forebay::Result;

use super::pool::Selected;
use super::ranked::Rank;
use crate::study::reserve;

/// Where counts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// With the slot: eviction discards a row's counts.
    Slots,
    /// With the token: a row that returns has its counts back.
    Tokens,
}

/// One selection: counts have 16 fraction bits.
const ONE: u32 = 1 << 16;

/// Steps in which each count halves.
const FAST: u32 = 4;
const SLOW: u32 = 32;

/// The weight of the fast count; the slow one has 1.
const WEIGHT: u64 = 5;

/// The counts of a row.
#[derive(Clone, Copy, Default)]
struct Counts {
    fast: u32,
    slow: u32,
    /// The step at which they were computed.
    step: u32,
}

/// `count` after `steps`: halved for each `half` of them, interpolated linearly in between.
fn faded(count: u32, steps: u32, half: u32) -> u32 {
    let (halvings, rest) = (steps / half, steps % half);
    let left = count.checked_shr(halvings).unwrap_or(0);
    left - (u64::from(left) * u64::from(rest) / u64::from(2 * half)) as u32
}

impl Counts {
    fn at(self, step: u32) -> Counts {
        let steps = step - self.step;
        Counts { fast: faded(self.fast, steps, FAST), slow: faded(self.slow, steps, SLOW), step }
    }

    fn plus(self, count: u32) -> Counts {
        Counts { fast: self.fast + count, slow: self.slow + count, ..self }
    }
}

/// Rows by `5 x fast + slow`, then by position.
pub struct Decay {
    /// By position.
    counts: Vec<Counts>,
    memory: Memory,
    step: u32,
}

impl Decay {
    /// For positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(positions: usize, memory: Memory) -> Result<Decay> {
        Ok(Decay { counts: reserve::filled(positions, Counts::default())?, memory, step: 0 })
    }
}

impl Rank for Decay {
    const FADES: bool = true;

    fn select(&mut self, step: u32, row: Selected, hit: bool) {
        self.step = step;
        let counts = &mut self.counts[row.position as usize];
        if !hit && self.memory == Memory::Slots {
            *counts = Counts { step, ..Counts::default() };
        }
        *counts = counts.at(step).plus(ONE);
    }

    fn bear(&mut self, step: u32, row: Selected) {
        self.step = step;
        self.counts[row.position as usize] = Counts { step, ..Counts::default() }.plus(2 * ONE);
    }

    fn rank(&self, position: u32) -> u64 {
        let Counts { fast, slow, .. } = self.counts[position as usize].at(self.step);
        WEIGHT * u64::from(fast) + u64::from(slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_halves_with_every_half_life_and_never_grows() {
        assert_eq!([0, 4, 8, 64].map(|steps| faded(ONE, steps, FAST)), [ONE, ONE / 2, ONE / 4, 1]);
        assert_eq!(faded(ONE, 2, FAST), ONE * 3 / 4);
        assert_eq!(faded(u32::MAX, 4000, FAST), 0);
        assert!((0..2000).is_sorted_by_key(|steps| std::cmp::Reverse(faded(3 * ONE, steps, SLOW))));
    }

    #[test]
    fn no_count_overflows_when_every_step_selects_the_row() {
        let mut counts = Counts::default();
        for step in 1..100_000 {
            counts = counts.at(step).plus(ONE);
        }
        assert!(counts.slow < 100 * ONE && counts.fast < counts.slow);
    }

    #[test]
    fn only_decay_tokens_remembers_evicted_rows() {
        let row = Selected { position: 0, next: crate::policy::pool::NEVER };
        let ranks = [Memory::Slots, Memory::Tokens].map(|memory| {
            let mut decay = Decay::new(1, memory).unwrap();
            decay.select(1, row, false);
            decay.select(2, row, false);
            decay.rank(0)
        });
        assert_eq!(ranks[0], 6 * u64::from(ONE));
        assert!(ranks[1] > 10 * u64::from(ONE), "{ranks:?}");
    }
}
