//! The loops of a step that gain from vector instructions.
//!
//! [`Portable`] is plain Rust. A device may have its own implementation, whose results must be equal bit for bit. A
//! loop over a lane's slots returns a set of slots as one bit for each slot, one word for each block. So sets are
//! joined and counted a block at a time, and listed only when they are known to be the victims.

use crate::geometry::SLOT_BLOCK;
use crate::residency::tables::{ABSENT, EMPTY};

const BLOCK: usize = SLOT_BLOCK as usize;

/// The arguments of [`Scan::touch`].
#[derive(Debug)]
pub struct Touch<'a> {
    /// The slot of each position of the lane.
    pub map: &'a [u32],
    /// The stamp of each slot id that the map holds.
    pub stamps: &'a mut [u32],
    /// The stamp of this step.
    pub now: u32,
    /// The length that the query row sees.
    pub length: u32,
    /// The selected positions.
    pub selection: &'a [i32],
    /// The slots of the selected positions, one for each.
    pub slots: &'a mut [i32],
    /// The index of the first of these positions in the whole selection.
    pub from: u32,
    /// The indices of the missed positions in the whole selection; a block longer than `selection`.
    pub entries: &'a mut [u32],
    /// One bit for each position of the lane: missed.
    pub missed: &'a mut [u64],
}

/// The result of [`Scan::touch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// The number of missed positions.
    pub missed: usize,
    /// The first position that is not below the length, other than -1.
    pub beyond: Option<u32>,
}

/// The arguments of [`Scan::first`]: the rows of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Stamped<'a> {
    /// Stamps by budget slot.
    pub stamps: &'a [u32],
    /// Positions by budget slot.
    pub positions: &'a [u32],
    /// The lane's blocks.
    pub blocks: &'a [u32],
}

/// The stamps at which [`Scan::split`] splits; `bound` is below `now`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The stamp of the tied slots.
    pub bound: u32,
    /// The stamp of this step, which the touched slots have.
    pub now: u32,
}

/// The numbers of slots that [`Scan::split`] has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Slots whose stamp is below the bound.
    pub older: u32,
    /// Slots whose stamp is the bound.
    pub tied: u32,
    /// Slots touched in this step.
    pub touched: u32,
}

/// The loops that a device may implement faster than [`Portable`].
pub trait Scan {
    /// A step without misses finds its hits quicker by [`Scan::split`] than by counting positions if the lane has fewer
    /// slots than this for each selected position. Measured by `benches/resolve.rs` (docs/benchmarks.md).
    const QUICK_SLOTS: usize;

    /// Looks up positions of one query row, in any order. It writes the slot of each position to `slots` and stamps
    /// that slot, even if it is the null slot. For every absent position below the length it appends the index to
    /// `entries` and sets the bit in `missed`. A position that is not below the length, -1 included, gets slot -1,
    /// whatever the map holds.
    fn touch(&self, touch: Touch<'_>) -> Touched;

    /// The lowest position among a lane's slots with stamp `stamp`; `u32::MAX` if there is none.
    fn first(&self, rows: Stamped<'_>, stamp: u32) -> u32;

    /// The first place with stamp `stamp` in the blocks of a lane, counted from the first of `blocks`.
    fn find(&self, stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32>;

    /// For each bound the number of stamps at or below it, over the blocks of a lane. `blocks` holds block numbers; a
    /// block is [`SLOT_BLOCK`] stamps, all inside `stamps`.
    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4];

    /// Finds the slots of a lane whose stamp is below `at.bound` (`older`) or equal to it (`tied`), as one word for
    /// each block. Counts them, and the slots with stamp `at.now`. Both sets have at least one word for each block.
    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split;

    /// Writes the `keep` tied slots with the lowest positions to the beginning of `out`, in their order. Returns the
    /// lowest position that is left out. `out` has room for all of them and a block more.
    fn lowest(&self, tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32;

    /// Writes the indices of all set bits to the beginning of `out`, ascending, and clears the bits. Returns their
    /// number. `out` has room for a block more.
    fn take(&self, bits: &mut [u64], out: &mut [u32]) -> usize;

    /// Writes the slots of a set, which has a word for each of `blocks`, to the beginning of `out`, in the lane's
    /// order. Returns their number. `out` has room for a block more.
    fn list(&self, set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize;
}

/// The arguments of [`Scan::lowest`]: slots with equal stamps.
#[derive(Debug)]
pub struct Tied<'a> {
    /// The slots. The slice is a block longer than `count`.
    pub slots: &'a [u32],
    /// The position of each slot, all distinct. The slice is a block longer than `count`.
    pub positions: &'a mut [u32],
    /// The number of slots, more than are kept.
    pub count: usize,
    /// A number above all positions.
    pub end: u32,
}

/// Plain Rust, for any machine.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Scan for Portable {
    const QUICK_SLOTS: usize = 2;

    // As a function of its own the loop keeps its variables in registers; inlined into a step it does not.
    #[inline(never)]
    fn touch(&self, touch: Touch<'_>) -> Touched {
        let Touch { map, stamps, now, length, selection, slots, from, entries, missed } = touch;
        let (mut count, mut outside) = (0_usize, 0_usize);
        for (index, (position, slot)) in (from..).zip(selection.iter().zip(slots.iter_mut())) {
            let inside = (*position as u32) < length;
            // No branch depends on the slot that was found.
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
        let at = |(first, block): (u32, &u32)| {
            let same = set_of(block_of(stamps, *block), |s| s == stamp);
            (same != 0).then(|| first + same.trailing_zeros())
        };
        (0..).step_by(BLOCK).zip(blocks).find_map(at)
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
            // At least one slot is left out, so `kept` stays below the number of slots.
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

/// Lists the set bits of words. Each word comes with the index of its first bit.
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

/// The words of a block. `join` checks that blocks are inside the tables.
fn block_of(words: &[u32], block: u32) -> &[u32] {
    let start = block as usize * BLOCK;
    words.get(start..start + BLOCK).unwrap_or(&[])
}

/// The words of a block that satisfy `are`, one bit for each word.
fn set_of(words: &[u32], are: impl Fn(u32) -> bool) -> u64 {
    let mut set = 0;
    for (byte, words) in words.chunks_exact(8).enumerate() {
        let bits = words.iter().enumerate().fold(0_u64, |bits, (i, w)| bits | u64::from(are(*w)) << i);
        set |= bits << (8 * byte);
    }
    set
}

/// A bound with exactly `n` values at or below it. The `of` values are distinct and below `end`. `count` returns the
/// number of values at or below a bound. The function searches by counting, because half a dozen scans with vector
/// compares cost less than one scan with branches.
#[inline]
pub(crate) fn nth_lowest(of: usize, n: usize, end: u32, count: impl Fn(u32) -> usize) -> u32 {
    // Invariant: `under` values are below `low`, `over` at or below `high`, and under < n <= over.
    let (mut low, mut high) = (0, end.saturating_sub(1));
    let (mut under, mut over, mut halve) = (0, of, false);
    while low < high && over > n {
        // Positions are often spread evenly, so probe where the nth would then be. If they are not, halving every
        // other time keeps the search short.
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

    /// Every value has a bound of its own, found in a few counts.
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
