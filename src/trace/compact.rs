//! Compacts a trace: removes the prompt positions that no set names.
//!
//! Residency depends only on the order of positions: which of two is higher, and which is born next. So a replay over
//! `0, 1, 2` has the same counts as one over `17, 4096, 9000000`, and its tables grow with the trace's contents
//! instead of the context that its header declares.

use super::header::Header;
use super::selection::SelectionTrace;
use crate::error::Result;
use crate::fallible::filled;

/// A bit for each position below a limit, set if it is named, and the number of named positions before each.
struct Named {
    bits: Vec<u64>,
    /// By word of `bits`: named positions in the words before it.
    before: Vec<u32>,
    count: u32,
}

fn words<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    filled(count, value, "compact trace", "the prompt's positions")
}

impl Named {
    /// The positions of `members` below `end`.
    fn of(members: &[u32], end: u32) -> Result<Named> {
        let count = end.div_ceil(64) as usize;
        let (mut bits, mut before) = (words(count, 0_u64)?, words(count, 0)?);
        for position in members.iter().filter(|position| **position < end) {
            bits[(position / 64) as usize] |= 1 << (position % 64);
        }
        let mut count = 0;
        for (before, bits) in before.iter_mut().zip(&bits) {
            *before = count;
            count += bits.count_ones();
        }
        Ok(Named { bits, before, count })
    }

    /// The number of named positions before this one.
    fn rank(&self, position: u32) -> u32 {
        let word = (position / 64) as usize;
        let below = self.bits[word] & !(u64::MAX << (position % 64));
        self.before[word] + below.count_ones()
    }
}

impl SelectionTrace {
    /// The same sets over a shorter prompt. Of the positions before the first recorded step only those remain that
    /// some set of some layer names; they are renumbered in order. All layers use the same numbers, so the overlap of
    /// layers does not change. It takes two passes over the members, in place, and three bits for each position of the
    /// prompt.
    ///
    /// Header and sets still match. A step's sets keep their size, because the first step's set alone leaves
    /// min(k, position + 1) - 1 positions of the prompt.
    ///
    /// # Errors
    /// [`crate::error::Kind::OutOfMemory`].
    pub fn compact(self) -> Result<SelectionTrace> {
        let (mut header, mut members) = self.into_parts();
        let first = header.first_position;
        let named = Named::of(&members, first)?;
        let left_out = first - named.count;
        if left_out > 0 {
            for position in &mut members {
                *position = if *position < first { named.rank(*position) } else { *position - left_out };
            }
            let Header { first_position, decode_start, context, .. } = &mut header;
            for end in [first_position, decode_start, context] {
                *end -= left_out;
            }
        }
        Ok(SelectionTrace::of_parts(header, members))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Random sets of `k` positions by step and layer, in a context of `first` positions before the first step.
    fn trace(layers: u32, k: u32, first: u32, steps: u32, seed: u64) -> SelectionTrace {
        let mut state = seed;
        let mut chance = |below: u32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % u64::from(below)) as u32
        };
        let header = Header::example(layers, k, first, steps / 2, steps);
        let mut members = Vec::new();
        for step in 0..steps {
            for _ in 0..layers {
                let position = header.position(step);
                let mut set = std::collections::BTreeSet::new();
                while set.len() < header.set_size(step) as usize {
                    set.insert(chance(position + 1));
                }
                members.extend(set);
            }
        }
        SelectionTrace::new(header, members).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// The oracle: a sorted list of all positions that are named or not of the prompt, and each one's index in it.
        #[test]
        fn every_position_becomes_its_index_among_the_named_ones(
            layers in 1..4_u32, k in 1..9_u32, first in 0..300_u32, steps in 1..8_u32, seed: u64,
        ) {
            let whole = trace(layers, k, first, steps, seed);
            let compact = whole.clone().compact().unwrap();
            let sets = |t: &SelectionTrace| -> Vec<Vec<u32>> {
                (0..steps).flat_map(|s| (0..layers).map(move |l| (s, l)))
                    .map(|(s, l)| t.selection(s, l).to_vec()).collect()
            };
            let mut kept: Vec<u32> = sets(&whole).concat();
            kept.extend(first..first + steps);
            kept.sort_unstable();
            kept.dedup();
            let place = |position: &u32| kept.binary_search(position).unwrap() as u32;
            let wanted: Vec<Vec<u32>> =
                sets(&whole).iter().map(|set| set.iter().map(place).collect()).collect();
            prop_assert_eq!(sets(&compact), wanted);
            let (header, before) = (compact.header(), whole.header());
            prop_assert_eq!(header.first_position as usize, kept.len() - steps as usize);
            prop_assert_eq!(header.context - header.first_position, before.context - before.first_position);
            prop_assert_eq!(header.decode_start - header.first_position, before.warm_steps);
            // It is a trace like any other, and nothing more can be left out of it.
            let members = sets(&compact).concat();
            prop_assert_eq!(&SelectionTrace::new(header.clone(), members).unwrap(), &compact);
            prop_assert_eq!(&compact.clone().compact().unwrap(), &compact);
        }
    }

    #[test]
    fn a_prompt_of_sixteen_million_is_as_long_as_its_named_positions() {
        let long = trace(2, 3, (1 << 24) - 4, 4, 7).compact().unwrap();
        assert!(long.header().first_position <= 2 * 3 * 4, "{:?}", long.header());
    }
}
