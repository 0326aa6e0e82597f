//! The residency scans on AVX-512: bit for bit the same results as [`crate::residency::Portable`].
//!
//! A position is looked up by a scalar load, because a gather of sixteen words is slower than sixteen loads (Zen 5).
//! All other loops run over vectors, and list a set by compressing the numbers 0 to 63 with its word.

use std::arch::x86_64::*;

use crate::geometry::SLOT_BLOCK;
use crate::residency::{
    ABSENT, At, Portable, Scan, Split, Stamped, Tied, Touch, Touched, beyond, nth_lowest,
};

const BLOCK: usize = SLOT_BLOCK as usize;

/// Proof that this machine has the instructions. Only [`Avx512::detect`] makes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// Returns the proof if the machine has AVX-512 with byte masks and byte compression (Ice Lake, Zen 4 and later).
    pub(crate) fn detect() -> Option<Avx512> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2");
        has.then_some(Avx512(()))
    }
}

impl Scan for Avx512 {
    const QUICK_SLOTS: usize = 12;

    fn touch(&self, touch: Touch<'_>) -> Touched {
        let same = touch.slots.len() == touch.selection.len();
        if !same || touch.entries.len() < touch.selection.len() + BLOCK {
            return Portable.touch(touch);
        }
        // SAFETY: `self` proves the instructions, and the lengths were just checked.
        unsafe { touch_avx512(touch) }
    }

    fn first(&self, rows: Stamped<'_>, stamp: u32) -> u32 {
        // SAFETY: `self` proves the instructions.
        unsafe { first_avx512(rows, stamp) }
    }

    fn find(&self, stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32> {
        // SAFETY: `self` proves the instructions.
        unsafe { find_avx512(stamps, blocks, stamp) }
    }

    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        // SAFETY: `self` proves the instructions.
        unsafe { count_avx512(stamps, blocks, bounds) }
    }

    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split {
        // SAFETY: `self` proves the instructions.
        unsafe { split_avx512(stamps, blocks, at, older, tied) }
    }

    fn lowest(&self, tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32 {
        let room = tied.slots.len().min(tied.positions.len()).min(out.len());
        if room < tied.count.next_multiple_of(16) {
            return Portable.lowest(tied, keep, out);
        }
        // SAFETY: `self` proves the instructions, and the room was just checked.
        unsafe { lowest_avx512(tied, keep, out) }
    }

    fn take(&self, bits: &mut [u64], out: &mut [u32]) -> usize {
        // SAFETY: `self` proves the instructions.
        unsafe { take_avx512(bits, out) }
    }

    fn list(&self, set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize {
        // SAFETY: `self` proves the instructions.
        unsafe { list_avx512(set, blocks, out) }
    }
}

/// Writes the `lanes` of `values`, compressed, to `out[at..]`, and returns how many. A full store is several times
/// faster than a masked compressing store; the words that it writes beyond the end are overwritten later.
///
/// # Safety
/// `out` has at least `at + 16` words.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn compress(lanes: __mmask16, values: __m512i, out: &mut [u32], at: usize) -> usize {
    // SAFETY: the caller vouches for 16 words from `at` on.
    let to = unsafe { out.as_mut_ptr().add(at) };
    // SAFETY: as above.
    unsafe { _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi32(lanes, values)) };
    lanes.count_ones() as usize
}

/// The numbers 0 to 15.
#[inline]
#[target_feature(enable = "avx512f")]
fn sixteen() -> __m512i {
    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
}

/// The block's words, if it lies inside the table.
#[inline]
fn chunk(words: &[u32], block: u32) -> Option<&[u32; BLOCK]> {
    words.get(block as usize * BLOCK..).and_then(|words| words.first_chunk())
}

/// The four vectors of a block.
#[inline]
#[target_feature(enable = "avx512f")]
fn vectors(words: &[u32; BLOCK]) -> [__m512i; 4] {
    // SAFETY: each load reads 16 of the block's 64 words.
    [0, 16, 32, 48].map(|at| unsafe { _mm512_loadu_si512(words.as_ptr().add(at).cast()) })
}

/// Packs four masks of 16 bits into the word of a block.
#[inline]
fn joined(masks: [__mmask16; 4]) -> u64 {
    let [a, b, c, d] = masks.map(u64::from);
    (a | b << 16) | (c | d << 16) << 32
}

/// Looks positions up and stamps the slots found. Compiled for the baseline instructions, so that the compiler does
/// not make gathers of it, which are slower here.
#[inline(never)]
fn look_up(touch: &mut Touch<'_>) {
    let (map, now) = (touch.map, touch.now);
    let look = |position: i32| map.get(position as u32 as usize).copied().unwrap_or(ABSENT);
    let mut stamp = |slot: u32| {
        if let Some(stamp) = touch.stamps.get_mut(slot as usize) {
            *stamp = now;
        }
    };
    let (parts, tail) = touch.selection.as_chunks::<8>();
    let (slot_parts, slot_tail) = touch.slots.as_chunks_mut::<8>();
    for (part, slots) in parts.iter().zip(slot_parts) {
        let found = part.map(look);
        *slots = found.map(|slot| slot as i32);
        found.into_iter().for_each(&mut stamp);
    }
    for (position, slot) in tail.iter().zip(slot_tail) {
        let found = look(*position);
        *slot = found as i32;
        stamp(found);
    }
}

/// # Safety
/// `touch.slots` is as long as `touch.selection`, `touch.entries` a block longer.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,bmi2,popcnt")]
unsafe fn touch_avx512(mut touch: Touch<'_>) -> Touched {
    look_up(&mut touch);
    let Touch { length, selection, slots, from, entries, missed, .. } = touch;
    let (end, none) = (_mm512_set1_epi32(length as i32), _mm512_set1_epi32(-1));
    let (mut count, mut at, mut all_inside) = (0, 0, true);
    while at < slots.len() {
        let there = (u32::MAX >> (32 - (slots.len() - at).min(16))) as __mmask16;
        // SAFETY: `there` ends with the slices.
        let (positions, to) = unsafe {
            (_mm512_maskz_loadu_epi32(there, selection.as_ptr().add(at)), slots.as_mut_ptr().add(at))
        };
        // SAFETY: as above.
        let found = unsafe { _mm512_maskz_loadu_epi32(there, to) };
        let inside = _mm512_mask_cmplt_epu32_mask(there, positions, end);
        let absent = _mm512_mask_testn_epi32_mask(inside, found, found);
        let indices = _mm512_add_epi32(sixteen(), _mm512_set1_epi32(from as i32 + at as i32));
        // SAFETY: at most `at` indices were written before, and a block's room follows the last.
        count += unsafe { compress(absent, indices, entries, count) };
        if inside != there {
            all_inside = false;
            // SAFETY: as the load.
            unsafe { _mm512_mask_storeu_epi32(to, there & !inside, none) };
        }
        at += 16;
    }
    for entry in &entries[..count] {
        // SAFETY: the numbers just written are the selection's, counted from `from`.
        let position = unsafe { *selection.get_unchecked((*entry - from) as usize) } as usize;
        if let Some(bits) = missed.get_mut(position / 64) {
            *bits |= 1 << (position % 64);
        }
    }
    Touched { missed: count, beyond: if all_inside { None } else { beyond(selection, length) } }
}

#[target_feature(enable = "avx512f")]
fn first_avx512(rows: Stamped<'_>, stamp: u32) -> u32 {
    let (stamp, mut lowest) = (_mm512_set1_epi32(stamp as i32), [_mm512_set1_epi32(-1); 4]);
    for block in rows.blocks {
        let (Some(stamps), Some(positions)) = (chunk(rows.stamps, *block), chunk(rows.positions, *block))
        else {
            continue;
        };
        let rows = vectors(stamps).into_iter().zip(vectors(positions));
        for (lowest, (stamps, positions)) in lowest.iter_mut().zip(rows) {
            let same = _mm512_cmpeq_epi32_mask(stamps, stamp);
            *lowest = _mm512_mask_min_epu32(*lowest, same, *lowest, positions);
        }
    }
    let [a, b, c, d] = lowest;
    _mm512_reduce_min_epu32(_mm512_min_epu32(_mm512_min_epu32(a, b), _mm512_min_epu32(c, d)))
}

#[target_feature(enable = "avx512f")]
fn find_avx512(stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32> {
    let stamp = _mm512_set1_epi32(stamp as i32);
    for (first, block) in (0..).step_by(BLOCK).zip(blocks) {
        let Some(words) = chunk(stamps, *block) else { continue };
        let same = joined(vectors(words).map(|stamps| _mm512_cmpeq_epi32_mask(stamps, stamp)));
        if same != 0 {
            return Some(first + same.trailing_zeros());
        }
    }
    None
}

#[target_feature(enable = "avx512f")]
fn count_avx512(stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
    let bounds = bounds.map(|b| _mm512_set1_epi32(b as i32));
    let one = _mm512_set1_epi32(1);
    let mut counts = [_mm512_setzero_si512(); 4];
    for words in blocks.iter().filter_map(|block| chunk(stamps, *block)) {
        for stamps in vectors(words) {
            for (bound, count) in bounds.iter().zip(counts.iter_mut()) {
                let old = _mm512_cmple_epi32_mask(stamps, *bound);
                *count = _mm512_mask_add_epi32(*count, old, *count, one);
            }
        }
    }
    counts.map(|count| _mm512_reduce_add_epi32(count) as u32)
}

#[target_feature(enable = "avx512f,popcnt")]
fn split_avx512(stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split {
    let (bound, now) = (_mm512_set1_epi32(at.bound as i32), _mm512_set1_epi32(at.now as i32));
    let mut split = Split::default();
    for (block, (older, tied)) in blocks.iter().zip(older.iter_mut().zip(tied.iter_mut())) {
        let Some(words) = chunk(stamps, *block) else {
            (*older, *tied) = (0, 0);
            continue;
        };
        let stamps = vectors(words);
        *older = joined(stamps.map(|stamps| _mm512_cmplt_epi32_mask(stamps, bound)));
        *tied = joined(stamps.map(|stamps| _mm512_cmpeq_epi32_mask(stamps, bound)));
        split.touched += joined(stamps.map(|stamps| _mm512_cmpeq_epi32_mask(stamps, now))).count_ones();
        split.older += older.count_ones();
        split.tied += tied.count_ones();
    }
    split
}

/// # Safety
/// `tied.slots`, `tied.positions` and `out` have room for `tied.count`, rounded up to whole vectors.
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn lowest_avx512(tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32 {
    let Tied { slots, positions, count, end } = tied;
    let whole = count.next_multiple_of(16);
    // What fills the last vector is above every bound.
    positions[count..whole].fill(u32::MAX);
    let highest = nth_lowest(count, keep, end, |bound| count_to(&positions[..whole], bound));
    let highest = _mm512_set1_epi32(highest as i32);
    let (mut next, mut kept) = (_mm512_set1_epi32(-1), 0);
    for at in (0..whole).step_by(16) {
        // SAFETY: the caller vouches for whole vectors.
        let (slots, positions) = unsafe {
            (
                _mm512_loadu_si512(slots.as_ptr().add(at).cast()),
                _mm512_loadu_si512(positions.as_ptr().add(at).cast()),
            )
        };
        let low = _mm512_cmple_epu32_mask(positions, highest);
        next = _mm512_mask_min_epu32(next, !low, next, positions);
        // SAFETY: at most `at` were kept before.
        kept += unsafe { compress(low, slots, out, kept) };
    }
    _mm512_reduce_min_epu32(next)
}

/// How many of `values`, whole vectors, are at or below `bound`.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
fn count_to(values: &[u32], bound: u32) -> usize {
    let bound = _mm512_set1_epi32(bound as i32);
    let mut count = 0;
    for values in values.chunks_exact(16) {
        // SAFETY: the chunk is 16 words.
        let values = unsafe { _mm512_loadu_si512(values.as_ptr().cast()) };
        count += _mm512_cmple_epu32_mask(values, bound).count_ones() as usize;
    }
    count
}

/// Writes the positions of the set bits of `bits`, counted from `first`, to `out[at..]`, as far as there is room for
/// whole vectors. Returns the place of the next ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
fn spread(first: u32, bits: u64, out: &mut [u32], at: usize) -> usize {
    const NUMBERS: [u8; BLOCK] = {
        let mut numbers = [0; BLOCK];
        let mut place = 0;
        while place < BLOCK {
            numbers[place] = place as u8;
            place += 1;
        }
        numbers
    };
    // SAFETY: the array is 64 bytes.
    let numbers = unsafe { _mm512_loadu_si512(NUMBERS.as_ptr().cast()) };
    debug_assert!(at + BLOCK <= out.len(), "a block more than ones");
    let Some(out) = out.get_mut(at..at + BLOCK) else { return at };
    let mut places = _mm512_maskz_compress_epi8(bits, numbers);
    let (ones, first) = (bits.count_ones() as usize, _mm512_set1_epi32(first as i32));
    // Most words have fewer than 17 set bits, and so need one round.
    for out in out.chunks_exact_mut(16).take(ones.div_ceil(16).max(1)) {
        let next = _mm512_add_epi32(first, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(places)));
        // SAFETY: the chunk is 16 words.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), next) };
        places = _mm512_alignr_epi32::<4>(places, places);
    }
    at + ones
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt,bmi1")]
fn take_avx512(bits: &mut [u64], out: &mut [u32]) -> usize {
    let mut count = 0;
    let (groups, tail) = bits.as_chunks_mut::<BLOCK>();
    let done = groups.len() * BLOCK;
    for (first, group) in (0_u32..).step_by(BLOCK).zip(groups) {
        let mut filled = 0;
        for (byte, words) in group.chunks_exact(8).enumerate() {
            // SAFETY: the chunk is 64 bytes.
            let words = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
            filled |= u64::from(_mm512_test_epi64_mask(words, words)) << (8 * byte);
        }
        while filled != 0 {
            let word = filled.trailing_zeros();
            filled &= filled - 1;
            let bits = std::mem::take(&mut group[word as usize % BLOCK]);
            count = spread((first + word) * 64, bits, out, count);
        }
    }
    for (word, bits) in (done as u32..).zip(tail) {
        count = spread(word * 64, std::mem::take(bits), out, count);
    }
    count
}

#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,popcnt")]
fn list_avx512(set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize {
    blocks.iter().zip(set).fold(0, |count, (block, bits)| spread(block * SLOT_BLOCK, *bits, out, count))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::residency::{
        Beyond, EMPTY, Fetch, LayerTables, QueryRange, Resolved, Selected, TableShape, Workspace,
    };
    use std::collections::BTreeMap;

    const SLOTS: usize = 6 * BLOCK;
    const TOKENS: usize = 4_500;

    /// Runs every scan of `scan` on data from the seed; returns all that they write and return.
    fn scans<S: Scan>(scan: &S, seed: u64, length: u32, k: usize) -> String {
        let mut state = seed;
        let mut next = |end: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % end) as u32
        };
        let map: Vec<u32> = (0..TOKENS).map(|_| next(2) * (64 + next(SLOTS as u64))).collect();
        let selection: Vec<i32> = (0..k).map(|_| next(TOKENS as u64 + 200) as i32 - 100).collect();
        let (mut slots, mut entries) = (vec![0; k], vec![0; k + BLOCK]);
        let (mut stamps, mut missed) = (vec![0; 64 + SLOTS], vec![0; TOKENS.div_ceil(64)]);
        let touched = scan.touch(Touch {
            map: &map,
            stamps: &mut stamps,
            now: 5,
            length,
            selection: &selection,
            slots: &mut slots,
            from: 7,
            entries: &mut entries,
            missed: &mut missed,
        });
        entries.truncate(touched.missed);
        let mut taken = vec![0; k + BLOCK];
        let count = scan.take(&mut missed, &mut taken);
        taken.truncate(count);
        let looked = (touched, slots, stamps, entries, missed, taken);

        // Few ages make blocks full of ties, many make sparse ones.
        let ages = 1 + u64::from(next(8));
        let stamps: Vec<u32> = (0..SLOTS).map(|_| 2 + next(ages)).collect();
        let mut positions: Vec<u32> = (0..SLOTS as u32).map(|slot| slot * 11 % 4_099).collect();
        positions.swap(0, next(SLOTS as u64) as usize);
        let blocks = [4, 0, 5, 2];
        let (mut older, mut tied) = ([0; 4], [0; 4]);
        let bounds = [0, 3, 4, 9];
        let counts = scan.count(&stamps, &blocks, &bounds);
        let at = At { bound: 2 + next(4), now: 2 + next(8) };
        let split = scan.split(&stamps, &blocks, at, &mut older, &mut tied);
        let rows = Stamped { stamps: &stamps, positions: &positions, blocks: &blocks };
        let first = [at.bound, 100].map(|stamp| scan.first(rows, stamp));
        let found = [at.bound, 100].map(|stamp| scan.find(&stamps, &blocks, stamp));
        let mut ties = vec![0; SLOTS + BLOCK];
        let count = scan.list(&tied, &blocks, &mut ties);
        let mut left = Vec::new();
        for keep in 1..count {
            let mut tied: Vec<u32> = ties.iter().map(|slot| positions[*slot as usize]).collect();
            let mut out = vec![0; SLOTS + BLOCK];
            let tied = Tied { slots: &ties, positions: &mut tied, count, end: TOKENS as u32 };
            let next = scan.lowest(tied, keep, &mut out);
            assert_ne!(next, EMPTY);
            left.push((next, out[..keep].to_vec()));
        }
        ties.truncate(count);

        format!("{looked:?} {:?}", (counts, split, older, tied, first, found, ties, left))
    }

    /// Runs steps of two query rows with `scan`, each read in three portions, and resizes the lane after each. Returns
    /// all results.
    fn steps<S: Scan>(scan: &S, mut seed: u64) -> String {
        const K: usize = 600;
        let mut next = |end: i32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as i32 % end
        };
        let shape = TableShape {
            lanes: 1,
            tokens: 3_000,
            query_rows: 2,
            scratch: 2 * K as u32,
            waves: 1,
            scratch_base: 64,
            landing_base: 1_280,
            budget_base: 1_344,
            budget_blocks: 12,
        };
        let mut tables = LayerTables::new(shape).unwrap();
        let mut work = Workspace::new(&shape, 2 * K as u32).unwrap();
        let blocks: Vec<u32> = (0..11).collect();
        tables.join(0, &blocks, 700, 2_000).unwrap();
        let (mut slots, mut fetches) = (vec![0; 2 * K], vec![Fetch { position: 0, slot: 0 }; 2 * K]);
        let mut told = String::new();
        for step in 0..4 {
            tables.commit(scan, 0, 2.min(step), 2, |_| {}).unwrap();
            // Some positions occur in several portions, some are -1, some are beyond the length.
            let picks: Vec<i32> = (0..2 * K).map(|_| next(2_100) - 50).map(|p| p.max(-1)).collect();
            let selected = Selected { selection: &picks[..], slots: &mut slots, fetches: &mut fetches };
            let done =
                tables.resolve(scan, 0, QueryRange { first: 0, count: 2 }, selected, &mut work).unwrap();
            let length = 2_000 + (0..=step).map(|step| 2.min(step)).sum::<u32>();
            naive(&picks, K, length, &done, &slots, &fetches);
            assert_eq!(work.selection(), picks);
            told += &format!("{done:?} {slots:?} {:?}", &fetches[..done.counts.misses as usize]);
            tables.validate().unwrap();
            // The same again, of the rows that are resident now: nothing is missed.
            let resident = |p: &i32| tables.slot(0, *p as u32).map_or(-1, |_| *p);
            let picks: Vec<i32> = picks.iter().map(resident).collect();
            let selected = Selected { selection: &picks[..], slots: &mut slots, fetches: &mut fetches };
            let done =
                tables.resolve(scan, 0, QueryRange { first: 0, count: 2 }, selected, &mut work).unwrap();
            naive(&picks, K, length, &done, &slots, &fetches);
            assert!(done.counts.hits > 0 && done.counts.misses == 0, "{done:?}");
            told += &format!("{done:?} {slots:?} {:?}", tables.words());
            let (budget, mut moves) = (1 + next(700) as u32, Vec::new());
            let blocks = &blocks[..budget.div_ceil(SLOT_BLOCK) as usize];
            let done = tables.resize(scan, 0, blocks, budget, &mut work, |moved| moves.push(moved)).unwrap();
            told += &format!("{done:?} {moves:?} {}", tables.digest(0));
            tables.validate().unwrap();
        }
        told
    }

    /// The properties of every step's result, whatever is resident: one slot for each position, and each fetched row
    /// once.
    fn naive(picks: &[i32], k: usize, length: u32, done: &Resolved, slots: &[i32], fetches: &[Fetch]) {
        let inside = |(entry, position): &(usize, i32)| {
            *position >= 0 && (*position as u32) < length + 1 + (*entry / k) as u32
        };
        let (there, not): (Vec<_>, Vec<_>) = picks.iter().copied().enumerate().partition(inside);
        assert!(not.iter().all(|(entry, _)| slots[*entry] == -1));
        let first = not.iter().find(|(_, position)| *position >= 0);
        let beyond = first.map(|(entry, p)| Beyond { row: (*entry / k) as u32, position: *p as u32 });
        assert_eq!(done.beyond, beyond);
        let mut slot_of = BTreeMap::new();
        for (entry, position) in there {
            assert_eq!(*slot_of.entry(position as u32).or_insert(slots[entry]), slots[entry], "{entry}");
        }
        let fetches = &fetches[..done.counts.misses as usize];
        assert!(fetches.is_sorted_by_key(|fetch| fetch.position));
        assert!(fetches.iter().all(|fetch| slot_of.get(&fetch.position) == Some(&(fetch.slot as i32))));
        let landed = slot_of.keys().filter(|position| **position >= length).count();
        assert_eq!(slot_of.len() - landed, (done.counts.hits + done.counts.misses) as usize);
    }

    proptest! {
        #[test]
        fn every_scan_reads_a_step_in_parts_as_one_step_and_resizes_alike(seed: u64) {
            let plain = steps(&Portable, seed);
            if let Some(scan) = Avx512::detect() {
                prop_assert_eq!(steps(&scan, seed), plain);
            }
        }

        #[test]
        fn every_scan_agrees_with_plain_rust(seed: u64, length in 0..TOKENS as u32 + 1, k in 0_usize..200) {
            // A machine without the instructions runs plain Rust: there is nothing to compare.
            if let Some(scan) = Avx512::detect() {
                prop_assert_eq!(scans(&scan, seed, length, k), scans(&Portable, seed, length, k));
            }
        }
    }
}
