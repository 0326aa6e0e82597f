//! The loops of a step that are worth a machine's vector units.
//!
//! [`Portable`] is plain Rust; a device may bring its own, whose results must be the same to the last bit.
//! What a loop finds among a lane's slots it answers as one bit a slot, a word for each block: sets are
//! joined and counted a block at a time, and listed only when they are known to be the victims.

use crate::geometry::SLOT_BLOCK;
use crate::residency::tables::{ABSENT, EMPTY};

const BLOCK: usize = SLOT_BLOCK as usize;

/// The arguments of [`Scan::touch`].
#[derive(Debug)]
pub struct Touch<'a> {
    /// Slots by position.
    pub map: &'a [u32],
    /// Stamps by slot id, for all ids that the map holds.
    pub stamps: &'a mut [u32],
    /// The stamp of this step.
    pub now: u32,
    /// The length that the query row sees.
    pub length: u32,
    /// Positions.
    pub selection: &'a [i32],
    /// Answers, as many as positions.
    pub slots: &'a mut [i32],
    /// The number of the first of these positions in the whole selection.
    pub from: u32,
    /// The numbers of what is missed; a block longer than `selection`.
    pub entries: &'a mut [u32],
    /// A bit for each position: missed.
    pub missed: &'a mut [u64],
}

/// What [`Scan::touch`] has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// How many are missed.
    pub missed: usize,
    /// The first position that is not below the length, other than -1.
    pub beyond: Option<u32>,
}

/// A lane's rows as [`Scan::first`] sees them.
#[derive(Clone, Copy, Debug)]
pub struct Stamped<'a> {
    /// Stamps by budget slot.
    pub stamps: &'a [u32],
    /// Positions by budget slot.
    pub positions: &'a [u32],
    /// The lane's blocks.
    pub blocks: &'a [u32],
}

/// Where [`Scan::split`] splits; `bound` is below `now`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The stamp that the tied slots bear.
    pub bound: u32,
    /// The stamp of this step, which the touched slots bear.
    pub now: u32,
}

/// How many slots [`Scan::split`] has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Below the bound.
    pub older: u32,
    /// At the bound.
    pub tied: u32,
    /// Touched in this step.
    pub touched: u32,
}

/// What a device may do faster than [`Portable`].
pub trait Scan {
    /// Looks up positions of one query row, in any order: writes the slot of each to `slots` and stamps
    /// it, whatever it is; notes the number of every one below the length that is absent in `entries`, and
    /// sets its bit in `missed`. What is not below the length, -1 included, is answered with -1, whatever the
    /// map holds.
    fn touch(&self, touch: Touch<'_>) -> Touched;

    /// The lowest position of a lane's slots that bear `stamp`; `u32::MAX` if none does.
    fn first(&self, rows: Stamped<'_>, stamp: u32) -> u32;

    /// The first slot of a lane that bears `stamp`.
    fn find(&self, stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32>;

    /// For each bound the number of stamps at or below it, over the blocks of a lane (numbers of
    /// [`SLOT_BLOCK`] stamps each, all inside `stamps`).
    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4];

    /// Tells, a word for each of a lane's blocks, which slots have a stamp below `at.bound` and which that very
    /// stamp, and counts these and those that bear `at.now`. The sets have a word for each block at least.
    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split;

    /// Writes the `keep` of the tied slots with the lowest positions to the front of `out`, in their order, and
    /// answers the lowest position that is left out. `out` has room for all of them and a block more.
    fn lowest(&self, tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32;

    /// Writes the places of all ones to the front of `out`, ascending, and clears them. Answers how many; `out`
    /// has room for a block more.
    fn take(&self, bits: &mut [u64], out: &mut [u32]) -> usize;

    /// Writes the slots of a set, a word for each of `blocks`, to the front of `out`, in the lane's order.
    /// Answers how many; `out` has room for a block more.
    fn list(&self, set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize;
}

/// Slots as old as each other, as [`Scan::lowest`] sees them.
#[derive(Debug)]
pub struct Tied<'a> {
    /// The slots; a block more than there are.
    pub slots: &'a [u32],
    /// The position of each, all distinct; a block more, too.
    pub positions: &'a mut [u32],
    /// How many there are: more than are kept.
    pub count: usize,
    /// All positions are below it.
    pub end: u32,
}

/// Plain Rust, for any machine.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Scan for Portable {
    // By itself it keeps everything in registers; inlined into a step it does not.
    #[inline(never)]
    fn touch(&self, touch: Touch<'_>) -> Touched {
        let Touch { map, stamps, now, length, selection, slots, from, entries, missed } = touch;
        let (mut count, mut outside) = (0_usize, 0_usize);
        for (index, (position, slot)) in (from..).zip(selection.iter().zip(slots.iter_mut())) {
            let inside = (*position as u32) < length;
            // No branch is taken on what was found.
            let found = map.get(*position as u32 as usize).copied().unwrap_or(ABSENT);
            *slot = if inside { found as i32 } else { -1 };
            if let Some(stamp) = stamps.get_mut(found as usize) {
                *stamp = now;
            }
            if let Some(entry) = entries.get_mut(count) {
                *entry = index;
            }
            count = count.wrapping_add(usize::from(inside & (found == ABSENT)));
            outside = outside.wrapping_add(usize::from(!inside));
        }
        for entry in &entries[..count] {
            let position = selection[(*entry - from) as usize] as usize;
            missed[position / 64] |= 1 << (position % 64);
        }
        Touched { missed: count, beyond: if outside > 0 { beyond(selection, length) } else { None } }
    }

    fn first(&self, rows: Stamped<'_>, stamp: u32) -> u32 {
        let lowest = |block: &u32| {
            let rows = block_of(rows.stamps, *block).iter().zip(block_of(rows.positions, *block));
            rows.map(|(s, position)| if *s == stamp { *position } else { u32::MAX }).min()
        };
        rows.blocks.iter().filter_map(lowest).min().unwrap_or(u32::MAX)
    }

    fn find(&self, stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32> {
        let at = |block: &u32| {
            let same = set_of(block_of(stamps, *block), |s| s == stamp);
            (same != 0).then(|| block * SLOT_BLOCK + same.trailing_zeros())
        };
        blocks.iter().find_map(at)
    }

    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        let mut counts = [0; 4];
        for block in blocks {
            for (bound, count) in bounds.iter().zip(counts.iter_mut()) {
                let stamps = block_of(stamps, *block);
                *count +=
                    stamps.iter().fold(0_u32, |n, s| n.wrapping_add(u32::from(*s as i32 <= *bound as i32)));
            }
        }
        counts
    }

    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split {
        let mut split = Split::default();
        for (block, (older, tied)) in blocks.iter().zip(older.iter_mut().zip(tied.iter_mut())) {
            let stamps = block_of(stamps, *block);
            *older = set_of(stamps, |stamp| stamp < at.bound);
            *tied = set_of(stamps, |stamp| stamp == at.bound);
            split.older += older.count_ones();
            split.tied += tied.count_ones();
            split.touched +=
                stamps.iter().fold(0_u32, |n, stamp| n.wrapping_add(u32::from(*stamp == at.now)));
        }
        split
    }

    fn lowest(&self, tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32 {
        let Tied { slots, positions, count, end } = tied;
        let positions = &positions[..count];
        let highest = nth_lowest(count, keep, end, |bound| {
            positions.iter().fold(0_u32, |n, v| n.wrapping_add(u32::from(*v as i32 <= bound as i32))) as usize
        });
        let (mut kept, mut next) = (0, EMPTY);
        for (slot, position) in slots.iter().zip(positions) {
            out[kept] = *slot;
            // One at least is left out: `kept` stays below the number of slots.
            kept += usize::from(*position <= highest);
            next = next.min(if *position <= highest { EMPTY } else { *position });
        }
        next
    }

    fn take(&self, bits: &mut [u64], out: &mut [u32]) -> usize {
        let words = (0_u32..).zip(bits.iter_mut());
        ones(words.map(|(index, bits)| (index * SLOT_BLOCK, std::mem::take(bits))), out)
    }

    fn list(&self, set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize {
        ones(blocks.iter().map(|block| block * SLOT_BLOCK).zip(set.iter().copied()), out)
    }
}

/// Lists the ones of words, whose first place stands before each.
fn ones(words: impl Iterator<Item = (u32, u64)>, out: &mut [u32]) -> usize {
    let mut count = 0;
    for (first, mut bits) in words {
        while bits != 0 {
            let Some(to) = out.get_mut(count) else { return count };
            *to = first + bits.trailing_zeros();
            bits &= bits - 1;
            count += 1;
        }
    }
    count
}

/// The first selected position that is not below `length`, other than -1.
pub(crate) fn beyond(selection: &[i32], length: u32) -> Option<u32> {
    selection
        .iter()
        .map(|position| *position as u32)
        .find(|position| *position >= length && *position != EMPTY)
}

/// The words of a block; blocks lie inside the tables by `join`.
fn block_of(words: &[u32], block: u32) -> &[u32] {
    let start = block as usize * BLOCK;
    words.get(start..start + BLOCK).unwrap_or(&[])
}

/// Which words of a block `are`, a bit each.
fn set_of(words: &[u32], are: impl Fn(u32) -> bool) -> u64 {
    let mut set = 0;
    for (byte, words) in words.chunks_exact(8).enumerate() {
        let bits = words.iter().enumerate().fold(0_u64, |bits, (i, w)| bits | u64::from(are(*w)) << i);
        set |= bits << (8 * byte);
    }
    set
}

/// A bound at or below which there are `n` of `values`, all of them distinct and below `end`, by counting:
/// half a dozen passes of vector compares are cheaper than one pass that branches. `count` tells how many
/// values are at or below a bound.
#[inline]
pub(crate) fn nth_lowest(of: usize, n: usize, end: u32, count: impl Fn(u32) -> usize) -> u32 {
    // Invariant: `under` values are below `low`, `over` at or below `high`, and under < n <= over.
    let (mut low, mut high) = (0, end.saturating_sub(1));
    let (mut under, mut over, mut halve) = (0, of, false);
    while low < high && over > n {
        // Positions lie about evenly: look where the nth would be then, and halve every other time lest
        // they do not.
        let (width, part) = (u64::from(high - low), ((n - under) as u64, (over - under) as u64));
        let ahead = if halve { width / 2 } else { (width * part.0 / part.1).min(width - 1) };
        halve = !halve;
        let middle = low + ahead as u32;
        match count(middle) {
            found if found >= n => (high, over) = (middle, found),
            found => (low, under) = (middle + 1, found),
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::nth_lowest;

    /// All values have a bound of their own, found in a few counts.
    fn check(values: &mut [u32], end: u32) {
        let middle = values.len() / 2;
        values.rotate_left(middle);
        for n in [1, 1 + values.len() / 3, values.len() - 1, values.len()] {
            let counts = std::cell::Cell::new(0);
            let count = |bound| {
                counts.set(counts.get() + 1);
                values.iter().filter(|v| **v <= bound).count()
            };
            let bound = nth_lowest(values.len(), n, end, count);
            assert!(counts.get() <= 2 * end.ilog2() + 2, "{end} {n}: {counts:?} counts");
            assert_eq!(count(bound), n, "{end} {n}");
        }
    }

    #[test]
    fn the_bound_of_the_n_lowest_has_n_at_or_below_it() {
        for (end, step) in [(2, 1), (200, 3), (256, 1), (257, 2), (33_000, 97), (1 << 24, 65_521)] {
            check(&mut (0..).map(|i| i * step).take_while(|v| *v < end).take(900).collect::<Vec<u32>>(), end);
        }
        // Crowded at one end, at the other, and in the middle: halving keeps the counts few.
        for crowd in [0, 1 << 23, (1 << 24) - 601] {
            let mut values: Vec<u32> = (crowd..crowd + 600).chain([(1 << 24) - 1]).collect();
            values.insert(0, 0);
            values.sort_unstable();
            values.dedup();
            check(&mut values, 1 << 24);
        }
    }
}
