//! The residency scans on AVX-512: the same answers as [`crate::residency::Portable`], to the last bit.
//!
//! The scans over stamps and positions run in order, sixteen words at a time. Looking positions up does
//! not, and a gather and a scatter of sixteen words gain nothing over sixteen loads and stores on the machine
//! that was tried (Zen 5), so that loop is scalar, without a branch and without a bounds check.

use std::arch::x86_64::*;

use crate::geometry::SLOT_BLOCK;
use crate::residency::{ABSENT, At, Portable, Scan, Split, Touch};

/// The proof that this machine has the instructions; made by [`Avx512::detect`] alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof, if the machine has AVX-512.
    pub(crate) fn detect() -> Option<Avx512> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("popcnt");
        has.then_some(Avx512(()))
    }
}

impl Scan for Avx512 {
    fn touch(&self, touch: Touch<'_>) -> usize {
        let fits = touch.slots.len() == touch.selection.len()
            && touch.others.len() >= touch.selection.len()
            && !touch.map.is_empty()
            && !touch.stamps.is_empty();
        if !fits {
            return Portable.touch(touch);
        }
        // SAFETY: the lengths were just checked.
        unsafe { touch_unchecked(touch) }
    }

    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        // SAFETY: `self` proves the instructions.
        unsafe { count_avx512(stamps, blocks, bounds) }
    }

    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u32], tied: &mut [u32]) -> Split {
        // SAFETY: `self` proves the instructions.
        unsafe { split_avx512(stamps, blocks, at, older, tied) }
    }
}

/// The lanes of a vector that hold the entries below `left`.
fn lanes(left: usize) -> __mmask16 {
    if left >= 16 { u16::MAX } else { (1_u16 << left) - 1 }
}

/// Writes the `lanes` of `values`, closed up, to `out[at..]`. Answers how many.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
fn compress(lanes: __mmask16, values: __m512i, out: &mut [u32], at: usize) -> usize {
    let count = lanes.count_ones() as usize;
    let packed = _mm512_maskz_compress_epi32(lanes, values);
    if let Some(room) = out.get_mut(at..at + 16) {
        // One whole store is several times faster than a masked compressing one; what it writes past
        // `count` is room that the next call writes again.
        // SAFETY: `room` is 16 words.
        unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), packed) };
    } else if let Some(room) = out.get_mut(at..at + count) {
        // SAFETY: `room` is `count` words, and only as many lanes are stored.
        unsafe { _mm512_mask_storeu_epi32(room.as_mut_ptr().cast(), self::lanes(count), packed) };
    }
    count
}

/// # Safety
/// `slots` is as long as `selection`, `others` at least as long; `map` and `stamps` are not empty.
#[inline(never)]
unsafe fn touch_unchecked(touch: Touch<'_>) -> usize {
    let Touch { map, stamps, base, now, selection, slots, others } = touch;
    let (limit, last) = (map.len(), stamps.len() - 1);
    let mut count = 0_usize;
    for (index, position) in selection.iter().enumerate() {
        let position = *position as u32 as usize;
        let inside = position < limit;
        // SAFETY: the position read is below map.len(), of which there is at least one.
        let found = unsafe { *map.get_unchecked(std::hint::select_unpredictable(inside, position, 0)) };
        let found = std::hint::select_unpredictable(inside, found, ABSENT);
        // Landing and scratch slots lie below `base` and wrap past the end, as ABSENT does: all of them
        // end in the last word, and no branch is taken on what was found.
        let slot = (found.wrapping_sub(base) as usize).min(last);
        let resident = slot < last;
        // SAFETY: `slot` is at most the last stamp's index, and `index` is below the length of `selection`,
        // which `slots` shares; `count` is at most `index`, and `others` is as long as `selection` at least.
        unsafe {
            *stamps.get_unchecked_mut(slot) = now;
            *slots.get_unchecked_mut(index) = found as i32;
            *others.get_unchecked_mut(count) = index as u32;
        }
        count = count.wrapping_add(usize::from(!resident));
    }
    // The word that took the writes that mean no slot is nobody's victim.
    stamps[last] = i32::MAX as u32;
    count
}

/// The four vectors of a block's stamps, or none for a block outside the table.
#[inline]
#[target_feature(enable = "avx512f")]
fn vectors(stamps: &[u32], block: u32) -> [__m512i; 4] {
    let start = block as usize * SLOT_BLOCK as usize;
    match stamps.get(start..).and_then(|s| s.first_chunk::<{ SLOT_BLOCK as usize }>()) {
        // SAFETY: the chunk is 64 words, of which each load reads 16.
        Some(words) => [0, 16, 32, 48].map(|at| unsafe { _mm512_loadu_si512(words.as_ptr().add(at).cast()) }),
        None => [_mm512_set1_epi32(i32::MAX); 4],
    }
}

#[target_feature(enable = "avx512f")]
fn count_avx512(stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
    let bounds = bounds.map(|b| _mm512_set1_epi32(b as i32));
    let one = _mm512_set1_epi32(1);
    let mut counts = [_mm512_setzero_si512(); 4];
    for block in blocks {
        for stamps in vectors(stamps, *block) {
            for (bound, count) in bounds.iter().zip(counts.iter_mut()) {
                let old = _mm512_cmple_epi32_mask(stamps, *bound);
                *count = _mm512_mask_add_epi32(*count, old, *count, one);
            }
        }
    }
    counts.map(|count| _mm512_reduce_add_epi32(count) as u32)
}

#[target_feature(enable = "avx512f,popcnt")]
fn split_avx512(stamps: &[u32], blocks: &[u32], at: At, older: &mut [u32], tied: &mut [u32]) -> Split {
    let (bound, below) = (_mm512_set1_epi32(at.bound as i32), _mm512_set1_epi32(at.below as i32));
    let step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let (mut olds, mut ties, mut count) = (0, 0, 0);
    for block in blocks {
        let first = _mm512_add_epi32(step, _mm512_set1_epi32((block * SLOT_BLOCK) as i32));
        let [a, b, c, d] = vectors(stamps, *block);
        for (stamps, offset) in [(a, 0), (b, 16), (c, 32), (d, 48)] {
            let slots = _mm512_add_epi32(first, _mm512_set1_epi32(offset));
            count += _mm512_cmplt_epi32_mask(stamps, below).count_ones();
            olds += compress(_mm512_cmplt_epi32_mask(stamps, bound), slots, older, olds);
            ties += compress(_mm512_cmpeq_epi32_mask(stamps, bound), slots, tied, ties);
        }
    }
    Split { older: olds, tied: ties, below: count }
}
