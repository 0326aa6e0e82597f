//! The residency scans on AVX-512: the same answers as [`crate::residency::Portable`], to the last bit.
//!
//! Sixteen positions are looked up by one gather; hits scatter their stamp; what is not resident is
//! compressed into the list of others. Two of sixteen entries may name one row: the conflict instruction
//! finds them, so that a row is counted once.

use std::arch::x86_64::*;

use crate::geometry::SLOT_BLOCK;
use crate::residency::{ABSENT, Portable, Scan, Touch};

/// The proof that this machine has the instructions; made by [`Avx512::detect`] alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof, if the machine has AVX-512 with conflict detection.
    pub(crate) fn detect() -> Option<Avx512> {
        let wide = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512cd");
        (wide && is_x86_feature_detected!("popcnt")).then_some(Avx512(()))
    }
}

impl Scan for Avx512 {
    fn touch(&self, touch: Touch<'_>) -> (u32, usize) {
        let fits = touch.slots.len() == touch.selection.len()
            && touch.others.len() >= touch.selection.len()
            && touch.map.len() < i32::MAX as usize
            && touch.stamps.len() < i32::MAX as usize;
        if !fits || touch.stamps.is_empty() {
            return Portable.touch(touch);
        }
        // SAFETY: `self` proves the instructions, and the lengths were just checked.
        unsafe { touch_avx512(touch) }
    }

    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        // SAFETY: `self` proves the instructions.
        unsafe { count_avx512(stamps, blocks, bounds) }
    }

    fn collect(&self, stamps: &[u32], blocks: &[u32], bound: u32, out: &mut [u32]) -> usize {
        // SAFETY: `self` proves the instructions.
        unsafe { collect_avx512(stamps, blocks, bound, out) }
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
/// `slots` is as long as `selection`, `others` at least as long; `map` and `stamps` are shorter than 2^31
/// words and `stamps` is not empty.
#[target_feature(enable = "avx512f,avx512cd,popcnt")]
unsafe fn touch_avx512(touch: Touch<'_>) -> (u32, usize) {
    let Touch { map, stamps, base, now, selection, slots, others } = touch;
    let limit = _mm512_set1_epi32(map.len() as i32);
    let budget = _mm512_set1_epi32((stamps.len() - 1) as i32);
    let (base, now) = (_mm512_set1_epi32(base as i32), _mm512_set1_epi32(now as i32));
    let absent = _mm512_set1_epi32(ABSENT as i32);
    let mut index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let (mut fresh, mut count) = (0, 0);
    for at in (0..selection.len()).step_by(16) {
        let valid = lanes(selection.len() - at);
        // SAFETY: only the valid lanes are read: at + 16 may pass the end, at + valid lanes does not.
        let positions = unsafe { _mm512_mask_loadu_epi32(absent, valid, selection.as_ptr().add(at)) };
        let inside = _mm512_cmplt_epu32_mask(positions, limit);
        // SAFETY: the lanes read are those with a position below map.len(), as 4-byte words.
        let found =
            unsafe { _mm512_mask_i32gather_epi32::<4>(absent, inside, positions, map.as_ptr().cast()) };
        let slot = _mm512_sub_epi32(found, base);
        let resident = _mm512_cmplt_epu32_mask(slot, budget);
        // SAFETY: `slots` is as long as `selection`.
        unsafe { _mm512_mask_storeu_epi32(slots.as_mut_ptr().add(at), valid, found) };
        // SAFETY: the lanes read are those with a slot below stamps.len() - 1.
        let old = unsafe { _mm512_mask_i32gather_epi32::<4>(now, resident, slot, stamps.as_ptr().cast()) };
        let unseen = _mm512_mask_cmpneq_epi32_mask(resident, old, now);
        let twice = _mm512_mask_test_epi32_mask(unseen, _mm512_conflict_epi32(slot), absent);
        fresh += (unseen & !twice).count_ones();
        // SAFETY: as the read above; lanes of one slot write the same word.
        unsafe { _mm512_mask_i32scatter_epi32::<4>(stamps.as_mut_ptr().cast(), unseen, slot, now) };
        count += compress(valid & !resident, index, others, count);
        index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    }
    (fresh, count)
}

/// The four vectors of a block's stamps, or none for a block outside the table.
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
fn vectors(stamps: &[u32], block: u32) -> [__m512i; 4] {
    let start = block as usize * SLOT_BLOCK as usize;
    match stamps.get(start..).and_then(|s| s.first_chunk::<{ SLOT_BLOCK as usize }>()) {
        // SAFETY: the chunk is 64 words, of which each load reads 16.
        Some(words) => [0, 16, 32, 48].map(|at| unsafe { _mm512_loadu_si512(words.as_ptr().add(at).cast()) }),
        None => [_mm512_set1_epi32(i32::MAX); 4],
    }
}

#[target_feature(enable = "avx512f,popcnt")]
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
fn collect_avx512(stamps: &[u32], blocks: &[u32], bound: u32, out: &mut [u32]) -> usize {
    let bound = _mm512_set1_epi32(bound as i32);
    let step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut count = 0;
    for block in blocks {
        for (part, stamps) in vectors(stamps, *block).into_iter().enumerate() {
            let old = _mm512_cmple_epi32_mask(stamps, bound);
            if old != 0 {
                let first = (block * SLOT_BLOCK) as i32 + part as i32 * 16;
                count += compress(old, _mm512_add_epi32(step, _mm512_set1_epi32(first)), out, count);
            }
        }
    }
    count
}
