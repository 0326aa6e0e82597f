//! Row copies: many short rows at scattered addresses, as fast as the machine's vector units and memory allow.
//!
//! A row is 10 to 20 cache lines at an address that no hardware prefetcher can predict, so the loop prefetches the
//! lines of later rows while it copies. The device picks the machine's widest vectors once, when it is made.
//!
//! **Races.** The caller's edges order streams, and a forgotten edge lets a copy race with a write. So bytes are
//! moved by inline assembly: a racing copy then tears at worst, while a racing load or store in Rust would be
//! undefined behaviour.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_zeroupper};

use crate::os::move_bytes;
#[cfg(tsan)]
use crate::sync::{AtomicU32, Ordering};

/// One copy, from source to target. The call that it belongs to gives the length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) from: u64,
    pub(super) to: u64,
}

/// The most pairs of one [`Copier::copy`] call: a list short enough for the stack.
pub(super) const PAIRS: usize = 128;

/// The number of rows that are prefetched ahead of the copy. Their lines are prefetched one by one while lines are
/// copied, because all lines of a row at once are more than a core keeps in flight.
pub(super) const AHEAD: usize = 8;

/// How far ahead of a stretch's copy its source is prefetched.
const AHEAD_BYTES: usize = 4096;

/// From how many bytes on a stretch is written past the caches: half of a core's own cache, where today's machines have
/// 1 or 2 MiB.
const LONG: usize = 1 << 19;

/// The vector width that copies use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copier {
    Avx512,
    Avx2,
    Sse2,
}

impl Copier {
    /// Every copier that this machine can run, the widest first.
    pub(super) fn all() -> Vec<Copier> {
        let mut all = Vec::new();
        if is_x86_feature_detected!("avx512f") {
            all.push(Copier::Avx512);
        }
        if is_x86_feature_detected!("avx2") {
            all.push(Copier::Avx2);
        }
        all.push(Copier::Sse2);
        all
    }

    /// The copier with the widest vectors of this machine.
    pub(super) fn widest() -> Copier {
        Copier::all().first().copied().unwrap_or(Copier::Sse2)
    }

    /// Copies `bytes` bytes, a multiple of 4, for each of the first `rows` pairs. The pairs after them are only
    /// prefetched, so that a caller can copy a long list in portions.
    ///
    /// With `lines`, each target owns all cache lines that it touches. The copy may set the rest of a row's last line
    /// to zero, and writes lines past the caches where the machine can, so that no line is read only to be
    /// overwritten.
    ///
    /// After copies with `lines`, call [`Copier::settle`] before another thread may learn that the rows are there.
    ///
    /// # Safety
    /// Each pair addresses `bytes` readable and `bytes` writable bytes that do not overlap, and this
    /// copier came from [`Copier::all`]. With `lines`, each target is as long as the lines that `bytes`
    /// bytes touch.
    pub(super) unsafe fn copy(self, pairs: &[Pair], rows: usize, bytes: usize, lines: bool) {
        #[cfg(tsan)]
        // SAFETY: the caller vouches for the addresses.
        return unsafe { copy_atomically(&pairs[..rows], bytes) };
        #[cfg(not(tsan))]
        let stream = lines && pairs.iter().all(|pair| pair.to.is_multiple_of(64));
        #[cfg(not(tsan))]
        // SAFETY: the caller vouches for the addresses, and `all` has detected the vector units.
        unsafe {
            match self {
                Copier::Avx512 if stream => stream_avx512(pairs, rows, bytes),
                Copier::Avx512 => copy_avx512(pairs, rows, bytes),
                Copier::Avx2 => copy_avx2(pairs, rows, bytes),
                Copier::Sse2 => copy_sse2(pairs, rows, bytes),
            }
        }
    }

    /// Copies one stretch of any length, alignment and overlap. A long one is written past the caches where the machine
    /// can: what reads it next finds little of it there, and no line is read only to be overwritten.
    ///
    /// # Safety
    /// Both ends are valid for `bytes` bytes, and this copier came from [`Copier::all`].
    pub(super) unsafe fn stretch(self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller vouches for the same.
        unsafe { self.piece(from, to, bytes, bytes) }
    }

    /// Copies one piece of a copy of `all` bytes: the whole copy decides whether its pieces are written past the
    /// caches.
    ///
    /// # Safety
    /// As [`Copier::stretch`].
    pub(super) unsafe fn piece(self, from: *const u8, to: *mut u8, bytes: usize, all: usize) {
        let apart = to.addr().abs_diff(from.addr()) >= bytes;
        let streams = cfg!(not(tsan)) && self == Copier::Avx512 && to.addr().is_multiple_of(64);
        let streamed = if streams && apart && all >= LONG { bytes / 64 * 64 } else { 0 };
        // SAFETY: the caller vouches for the bytes, and `all` has detected the vector units; the target of what is
        // streamed is aligned to lines.
        unsafe {
            if streamed > 0 {
                stream_stretch(from, to, streamed);
                self.settle();
            }
            move_bytes(from.add(streamed), to.add(streamed), bytes - streamed);
        }
    }

    /// Orders the writes past the caches, which are weakly ordered, before all later writes.
    pub(super) fn settle(self) {
        if self == Copier::Avx512 {
            // SAFETY: every x86-64 machine has this instruction.
            unsafe { _mm_sfence() };
        }
    }
}

/// Copies word by word with atomics, which ThreadSanitizer can compare with the accesses that the compiler makes.
///
/// # Safety
/// As [`Copier::copy`].
#[cfg(tsan)]
unsafe fn copy_atomically(pairs: &[Pair], bytes: usize) {
    for (pair, at) in pairs.iter().flat_map(|pair| (0..bytes as u64).step_by(4).map(move |at| (pair, at))) {
        let word = |address: u64| address as *mut u32;
        // SAFETY: `bytes` is a multiple of 4, so a word at `at` ends at or before it; rows are aligned to words.
        unsafe {
            let held = AtomicU32::from_ptr(word(pair.from + at)).load(Ordering::Relaxed);
            AtomicU32::from_ptr(word(pair.to + at)).store(held, Ordering::Relaxed);
        }
    }
}

/// # Safety
/// Both ends are valid for `bytes` bytes, a multiple of 64, and do not overlap; the target begins a line.
#[target_feature(enable = "avx512f")]
unsafe fn stream_stretch(from: *const u8, to: *mut u8, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        ask(from.addr() as u64 + (at + AHEAD_BYTES) as u64);
        // SAFETY: the caller's promise.
        unsafe { stream_line(from.add(at), to.add(at)) };
    }
    _mm256_zeroupper();
}

/// # Safety
/// As [`Copier::copy`] with `lines`, for targets that begin a line.
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(pairs: &[Pair], rows: usize, bytes: usize) {
    let (whole, tail) = (bytes / 64 * 64, bytes % 64 / 4);
    let mask = ((1_u32 << tail) - 1) as u16;
    for (index, pair) in pairs.iter().take(rows).enumerate() {
        let later = pairs.get(index + AHEAD).unwrap_or(pair);
        // Prefetch the target too: otherwise the copy waits while the machine translates its page address.
        ask(later.to);
        let (from, to) = (pair.from as *const u8, pair.to as *mut u8);
        // SAFETY: reads stay below `bytes`, masked lanes are not read; writes stay in the target's lines,
        // and lines are aligned as the instruction demands.
        unsafe {
            for at in (0..whole).step_by(64) {
                ask(later.from + at as u64);
                stream_line(from.add(at), to.add(at));
            }
            if tail > 0 {
                ask(later.from + whole as u64);
                stream_words(mask, from.add(whole), to.add(whole));
            }
        }
    }
    _mm256_zeroupper();
}

/// Moves some bytes by a load and a store in inline assembly, which the compiler cannot reason about.
macro_rules! moves {
    ($($(#[$note:meta])* $name:ident, $feature:literal, $class:ident, $load:literal, $store:literal;)*) => {$(
        $(#[$note])*
        ///
        /// # Safety
        /// Both addresses are valid for these bytes, and aligned where the store demands it.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $name(from: *const u8, to: *mut u8) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    $load,
                    $store,
                    held = out($class) _,
                    from = in(reg) from,
                    to = in(reg) to,
                    options(nostack, preserves_flags)
                );
            }
        }
    )*};
}

moves! {
    /// Moves a word.
    move_4, "sse2", reg, "mov {held:e}, dword ptr [{from}]", "mov dword ptr [{to}], {held:e}";
    /// Moves 16 bytes.
    move_16, "sse2", xmm_reg, "movdqu {held}, [{from}]", "movdqu [{to}], {held}";
    /// Moves 32 bytes.
    move_32, "avx2", ymm_reg, "vmovdqu {held}, [{from}]", "vmovdqu [{to}], {held}";
    /// Moves 64 bytes.
    move_64, "avx512f", zmm_reg, "vmovdqu64 {held}, [{from}]", "vmovdqu64 [{to}], {held}";
    /// Moves 64 bytes to a line, past the caches.
    stream_line, "avx512f", zmm_reg, "vmovdqu64 {held}, [{from}]", "vmovntdq [{to}], {held}";
}

/// Moves those of up to 16 words whose mask bits are set.
///
/// # Safety
/// Both addresses are valid for these words.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn move_words(mask: u16, from: *const u8, to: *mut u8) {
    // SAFETY: the caller's promise; lanes without a bit are neither read nor written.
    unsafe {
        asm!(
            "vmovdqu32 {held}{{{mask}}}{{z}}, [{from}]",
            "vmovdqu32 [{to}]{{{mask}}}, {held}",
            held = out(zmm_reg) _,
            mask = in(kreg) mask,
            from = in(reg) from,
            to = in(reg) to,
            options(nostack, preserves_flags)
        );
    }
}

/// Moves the words whose mask bits are set to a line, past the caches. The line's other words become 0.
///
/// # Safety
/// `from` is valid for these words. `to` is aligned to a line and valid for it.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn stream_words(mask: u16, from: *const u8, to: *mut u8) {
    // SAFETY: the caller's promise; lanes without a bit are not read.
    unsafe {
        asm!(
            "vmovdqu32 {held}{{{mask}}}{{z}}, [{from}]",
            "vmovntdq [{to}], {held}",
            held = out(zmm_reg) _,
            mask = in(kreg) mask,
            from = in(reg) from,
            to = in(reg) to,
            options(nostack, preserves_flags)
        );
    }
}

/// Prefetches the line of an address.
#[inline(always)]
pub(super) fn ask(address: u64) {
    // SAFETY: a prefetch reads nothing and cannot fault, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) };
}

/// Prefetches every line of a row.
#[inline(always)]
fn prefetch(pair: Option<&Pair>, bytes: usize) {
    if let Some(pair) = pair {
        for at in (0..bytes).step_by(64) {
            ask(pair.from + at as u64);
        }
    }
}

/// # Safety
/// As [`Copier::copy`].
#[target_feature(enable = "avx512f")]
unsafe fn copy_avx512(pairs: &[Pair], rows: usize, bytes: usize) {
    let (whole, tail) = (bytes / 64 * 64, bytes % 64 / 4);
    let mask = ((1_u32 << tail) - 1) as u16;
    for (index, pair) in pairs.iter().take(rows).enumerate() {
        let later = pairs.get(index + AHEAD).unwrap_or(pair);
        let (from, to) = (pair.from as *const u8, pair.to as *mut u8);
        // SAFETY: all offsets stay below `bytes`, for which the caller vouches; masked lanes are neither
        // read nor written.
        unsafe {
            for at in (0..whole).step_by(64) {
                ask(later.from + at as u64);
                move_64(from.add(at), to.add(at));
            }
            if tail > 0 {
                ask(later.from + whole as u64);
                move_words(mask, from.add(whole), to.add(whole));
            }
        }
    }
    _mm256_zeroupper();
}

/// # Safety
/// As [`Copier::copy`].
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(pairs: &[Pair], rows: usize, bytes: usize) {
    let whole = bytes / 32 * 32;
    for (index, pair) in pairs.iter().take(rows).enumerate() {
        prefetch(pairs.get(index + AHEAD), bytes);
        let (from, to) = (pair.from as *const u8, pair.to as *mut u8);
        // SAFETY: all offsets stay below `bytes`, for which the caller vouches.
        unsafe {
            for at in (0..whole).step_by(32) {
                move_32(from.add(at), to.add(at));
            }
            copy_tail(from, to, whole, bytes);
        }
    }
    _mm256_zeroupper();
}

/// # Safety
/// As [`Copier::copy`].
unsafe fn copy_sse2(pairs: &[Pair], rows: usize, bytes: usize) {
    let whole = bytes / 16 * 16;
    for (index, pair) in pairs.iter().take(rows).enumerate() {
        prefetch(pairs.get(index + AHEAD), bytes);
        let (from, to) = (pair.from as *const u8, pair.to as *mut u8);
        // SAFETY: all offsets stay below `bytes`, for which the caller vouches.
        unsafe {
            for at in (0..whole).step_by(16) {
                move_16(from.add(at), to.add(at));
            }
            copy_tail(from, to, whole, bytes);
        }
    }
}

/// Copies the words from `at` to `bytes`.
///
/// # Safety
/// As [`Copier::copy`], for one pair.
#[inline(always)]
unsafe fn copy_tail(from: *const u8, to: *mut u8, at: usize, bytes: usize) {
    for at in (at..bytes).step_by(4) {
        // SAFETY: `bytes` is a multiple of 4, so a word at `at` ends at or before it.
        unsafe { move_4(from.add(at), to.add(at)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_written_by_lines_are_whole_and_padded_with_zeros() {
        #[repr(align(64))]
        struct Lines([u8; 3 * 704]);
        for copier in Copier::all() {
            for bytes in [4, 60, 64, 68, 640, 656, 704] {
                let source: Vec<u8> = (0..3 * bytes).map(|i| (i * 5 + 1) as u8).collect();
                let mut target = Lines([0xEE; 3 * 704]);
                let pairs: Vec<Pair> = (0..3)
                    .map(|i| Pair {
                        from: source[i * bytes..].as_ptr() as u64,
                        to: target.0[i * 704..].as_mut_ptr() as u64,
                    })
                    .collect();
                // SAFETY: each target has 704 bytes to itself, all lines that `bytes` bytes touch.
                unsafe { copier.copy(&pairs, pairs.len(), bytes, true) };
                for i in 0..3 {
                    let row = &target.0[i * 704..][..704];
                    assert_eq!(&row[..bytes], &source[i * bytes..][..bytes], "{copier:?} {bytes}");
                    let end = bytes.next_multiple_of(64);
                    assert!(row[bytes..end].iter().all(|b| [0, 0xEE].contains(b)));
                    assert!(row[end..].iter().all(|b| *b == 0xEE), "{copier:?} {bytes}");
                }
            }
        }
    }

    #[test]
    fn every_copier_copies_every_length_and_nothing_else() {
        for copier in Copier::all() {
            for bytes in (4..400).step_by(4).chain([512, 656, 1152]) {
                let source: Vec<u8> = (0..3 * bytes).map(|i| (i * 7 + 3) as u8).collect();
                let mut target = vec![0xEE_u8; 3 * (bytes + 8)];
                let pairs: Vec<Pair> = (0..3)
                    .map(|i| Pair {
                        from: source[(2 - i) * bytes..].as_ptr() as u64,
                        to: target[i * (bytes + 8)..].as_mut_ptr() as u64,
                    })
                    .collect();
                // SAFETY: each pair lies inside its vector, which outlives the call.
                unsafe { copier.copy(&pairs, 2, bytes, false) };
                assert!(target[2 * (bytes + 8)..].iter().all(|b| *b == 0xEE), "{copier:?} {bytes}");
                // SAFETY: as above.
                unsafe { copier.copy(&pairs[2..], 1, bytes, false) };
                for i in 0..3 {
                    let row = &target[i * (bytes + 8)..][..bytes + 8];
                    assert_eq!(&row[..bytes], &source[(2 - i) * bytes..][..bytes], "{copier:?} {bytes}");
                    assert_eq!(&row[bytes..], &[0xEE; 8], "{copier:?} {bytes}");
                }
            }
        }
    }

    /// Stretches of any length, place and overlap, against the standard library's copy.
    #[test]
    fn every_copier_copies_every_stretch_and_nothing_else() {
        let mut memory: Vec<u8> = (0..3 * LONG).map(|at| (at * 7 + at / 251) as u8).collect();
        // Places count from a line's beginning.
        let line = memory.as_ptr().align_offset(64);
        for copier in Copier::all() {
            for bytes in [0, 1, 63, 64, 65, LONG - 1, LONG, LONG + 1, LONG + 64, LONG + 127] {
                for (from, to) in
                    [(3, LONG + 128), (0, LONG + 192), (LONG + 200, 64), (0, 64), (64, 0), (100, 40), (5, 5)]
                {
                    let mut wanted = memory.clone();
                    wanted.copy_within(line + from..line + from + bytes, line + to);
                    let base = memory[line..].as_mut_ptr();
                    // SAFETY: both ends are inside `memory`, the only pointer to which is this one.
                    unsafe { copier.stretch(base.add(from), base.add(to), bytes) };
                    assert!(memory == wanted, "{copier:?}: {bytes} bytes from {from} to {to}");
                }
            }
        }
    }
}
