//! The residency scans on AVX-512: the same answers as [`crate::residency::Portable`], to the last bit.
//!
//! The scans over stamps run in order, sixteen words at a time. Looking positions up stays what it is in
//! plain Rust: gathers and scatters of sixteen words gained nothing measurable over the loads and stores
//! they stand for (Zen 5).

use std::arch::x86_64::*;

use crate::geometry::SLOT_BLOCK;
use crate::residency::{Aged, At, Portable, Scan, Split};

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
    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        // SAFETY: `self` proves the instructions.
        unsafe { count_avx512(stamps, blocks, bounds) }
    }

    fn split(&self, lane: Aged<'_>, at: At, older: &mut [u32], tied: &mut [u32]) -> Split {
        let room = lane.blocks.len() * SLOT_BLOCK as usize + 16;
        if lane.marks.len() < lane.stamps.len() || older.len() < room || tied.len() < room {
            return Portable.split(lane, at, older, tied);
        }
        // SAFETY: `self` proves the instructions, and the lengths were just checked.
        unsafe { split_avx512(lane, at, older, tied) }
    }
}

/// Writes the `lanes` of `values`, closed up, to `out[at..]`. Answers how many. A whole store is several
/// times faster than a masked compressing one; what it writes past them is written again.
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

/// # Safety
/// `lane.marks` is at least as long as `lane.stamps`; `older` and `tied` have 16 words more than the blocks
/// have slots.
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn split_avx512(lane: Aged<'_>, at: At, older: &mut [u32], tied: &mut [u32]) -> Split {
    let (bound, below) = (_mm512_set1_epi32(at.bound as i32), _mm512_set1_epi32(at.below as i32));
    let step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let (mut olds, mut ties, mut count) = (0, 0, 0);
    for block in lane.blocks {
        let first = *block as usize * SLOT_BLOCK as usize;
        if first + SLOT_BLOCK as usize > lane.stamps.len() {
            continue;
        }
        for slot in (first..first + SLOT_BLOCK as usize).step_by(16) {
            // SAFETY: slot + 16 is at most stamps.len(), and marks is as long.
            let (stamps_at, marks_at) =
                unsafe { (lane.stamps.as_mut_ptr().add(slot), lane.marks.as_mut_ptr().add(slot)) };
            // SAFETY: 16 bytes and 16 words from there on, as above.
            let (marks, old) =
                unsafe { (_mm_loadu_si128(marks_at.cast()), _mm512_loadu_si512(stamps_at.cast())) };
            let marks = _mm512_cvtepu8_epi32(marks);
            let stamps = _mm512_mask_mov_epi32(old, _mm512_test_epi32_mask(marks, marks), below);
            // SAFETY: as the loads.
            unsafe {
                _mm512_storeu_si512(stamps_at.cast(), stamps);
                _mm_storeu_si128(marks_at.cast(), _mm_setzero_si128());
            }
            let slots = _mm512_add_epi32(step, _mm512_set1_epi32(slot as i32));
            count += _mm512_cmplt_epi32_mask(stamps, below).count_ones();
            // SAFETY: both lists hold at most the slots seen before this vector, and have 16 words more.
            unsafe {
                olds += compress(_mm512_cmplt_epi32_mask(stamps, bound), slots, older, olds);
                ties += compress(_mm512_cmpeq_epi32_mask(stamps, bound), slots, tied, ties);
            }
        }
    }
    Split { older: olds, tied: ties, below: count }
}
