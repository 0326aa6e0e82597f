//! Race-tolerant access to words of device memory, for the operations of the host device.
//!
//! Another stream's thread may be writing the words. The caller's edges prevent that, and this device exists to show
//! a forgotten edge. So no Rust reference into device memory is ever made, and no Rust load or store touches it.
//! Inline assembly moves the words: lists by the row copies ([`Copier`]), single words by their own instructions. A
//! race then yields words from before or after the write, and nothing worse. Code that works on a list copies it to
//! the device's own memory first. Under `--cfg tsan` all these accesses are relaxed atomics, so that ThreadSanitizer
//! reports any other access to such memory (`ci/tsan`).

#[cfg(not(tsan))]
use std::arch::asm;
use std::marker::PhantomData;

use crate::device::Slice;
use crate::device::host::copy::{Copier, Pair, ask};
use crate::residency::Selection;
#[cfg(tsan)]
use crate::sync::{AtomicU32, Ordering};

/// A type that device memory is read as. Any four bytes are a valid value.
pub(super) trait Word: Copy {
    /// The value with these bits.
    fn of(bits: u32) -> Self;

    /// The bits of the value.
    fn bits(self) -> u32;
}

impl Word for u32 {
    fn of(bits: u32) -> u32 {
        bits
    }

    fn bits(self) -> u32 {
        self
    }
}

impl Word for i32 {
    fn of(bits: u32) -> i32 {
        bits.cast_signed()
    }

    fn bits(self) -> u32 {
        self.cast_unsigned()
    }
}

/// The words of a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a, T> {
    address: u64,
    count: usize,
    copier: Copier,
    lives: PhantomData<&'a T>,
}

/// The number of words that a fill writes at a time.
const FILL: usize = 64;

impl<T: Word> Words<'_, T> {
    /// The words of `slice`.
    ///
    /// # Safety
    /// The slice is aligned to a word, not at address 0 unless it is empty, and its memory outlives these words.
    /// `copier` came from [`Copier::all`].
    pub(super) unsafe fn new(slice: Slice, copier: Copier) -> Self {
        let count = (slice.bytes() / 4) as usize;
        Words { address: slice.address(), count, copier, lives: PhantomData }
    }

    /// The address of word `first`, and how many of the `wanted` words exist from there on.
    fn there(&self, first: usize, wanted: usize) -> (u64, usize) {
        let offset = (first as u64).wrapping_mul(4);
        (self.address.wrapping_add(offset), wanted.min(self.count.saturating_sub(first)))
    }

    /// Those of the `count` words from `first` on that exist.
    pub(super) fn part(&self, first: usize, count: usize) -> Self {
        let (address, count) = self.there(first, count);
        Words { address, count, ..*self }
    }

    /// Fills `to` with the words from `first` on, as far as they exist.
    pub(super) fn load(&self, first: usize, to: &mut [T]) {
        let (from, count) = self.there(first, to.len());
        let pair = Pair { from, to: to.as_mut_ptr() as u64 };
        ask_all(pair.to, count);
        // SAFETY: so many words are there, `to` has room for them and lies outside of device memory, and any four bytes
        // are a `T`.
        unsafe { self.copier.copy(&[pair], 1, 4 * count, false) };
    }

    /// Writes `from` to the words from `first` on, as far as they exist.
    pub(super) fn store(&self, first: usize, from: &[T]) {
        let (to, count) = self.there(first, from.len());
        let pair = Pair { from: from.as_ptr() as u64, to };
        ask_all(to, count);
        // SAFETY: as above.
        unsafe { self.copier.copy(&[pair], 1, 4 * count, false) };
    }

    /// Sets `count` words from `first` on, as far as they exist.
    pub(super) fn fill(&self, first: usize, count: usize, value: T) {
        let same = [value; FILL];
        for at in (0..count).step_by(FILL) {
            self.store(first + at, &same[..FILL.min(count - at)]);
        }
    }

    /// The word at `index`, if it exists.
    pub(super) fn get(&self, index: usize) -> Option<T> {
        let (address, count) = self.there(index, 1);
        // SAFETY: the word is there and aligned.
        (count == 1).then(|| T::of(unsafe { read_word(address) }))
    }

    /// Sets the word at `index`, if it exists.
    pub(super) fn set(&self, index: usize, value: T) {
        let (address, count) = self.there(index, 1);
        if count == 1 {
            // SAFETY: the word is there and aligned.
            unsafe { write_word(address, value.bits()) };
        }
    }
}

impl Selection for Words<'_, i32> {
    fn count(&self) -> usize {
        self.count
    }

    /// Also prefetches as many words after them: the next batch row's words usually follow.
    fn read(&self, first: usize, to: &mut [i32]) {
        self.load(first, to);
        ask_all(self.there(first + to.len(), 0).0, to.len());
    }
}

/// Prefetches the lines of `count` words, which need not exist. The target of a list's copy is prefetched first,
/// because stores wait for their lines one after another.
#[inline(always)]
fn ask_all(address: u64, count: usize) {
    let lines = (address % 64 + 4 * count as u64).div_ceil(64);
    (0..lines).for_each(|line| ask((address & !63).wrapping_add(64 * line)));
}

/// # Safety
/// The address is aligned and holds a word.
#[inline(always)]
unsafe fn read_word(address: u64) -> u32 {
    #[cfg(tsan)]
    // SAFETY: the caller's promise.
    return unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(Ordering::Relaxed);
    #[cfg(not(tsan))]
    {
        let word: u32;
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "mov {word:e}, dword ptr [{address}]",
                word = out(reg) word,
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            );
        }
        word
    }
}

/// # Safety
/// As [`read_word`].
#[inline(always)]
unsafe fn write_word(address: u64, word: u32) {
    #[cfg(tsan)]
    // SAFETY: the caller's promise.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(word, Ordering::Relaxed);
    #[cfg(not(tsan))]
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "mov dword ptr [{address}], {word:e}",
            word = in(reg) word,
            address = in(reg) address,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceId;

    #[test]
    fn words_are_read_and_written_at_their_address_only() {
        for copier in Copier::all() {
            let memory: Vec<u32> = (0..300).collect();
            let slice = DeviceId::new().slice(memory.as_ptr() as u64 + 4 * 10, 4 * 200);
            // SAFETY: the vector outlives the words, which are the only way to it until they are gone.
            let words = unsafe { Words::<i32>::new(slice, copier) };
            let mut read = [7; 5];
            words.load(198, &mut read);
            assert_eq!(read, [208, 209, 7, 7, 7], "{copier:?}");
            assert_eq!((words.get(0), words.get(199), words.get(200)), (Some(10), Some(209), None));
            let (mut picked, mut end) = ([7; 3], [7; 2]);
            words.part(20, 9).read(5, &mut picked);
            assert_eq!(picked, [35, 36, 37], "{copier:?}");
            let last = words.part(198, 5);
            last.read(0, &mut end);
            assert_eq!((last.count(), end, words.part(300, 5).count()), (2, [208, 209], 0));
            words.set(199, -1);
            words.set(200, -2);
            words.store(0, &[-3; 3]);
            words.store(200, &[-4; 3]);
            words.store(usize::MAX / 8, &[-5; 3]);
            words.fill(100, 70, -6);
            words.fill(190, 70, -7);
            let mut expected: Vec<i32> = (0..300).collect();
            expected[10..13].fill(-3);
            expected[110..180].fill(-6);
            expected[200..210].fill(-7);
            let mut all = vec![0; 300];
            let whole = DeviceId::new().slice(memory.as_ptr() as u64, 4 * 300);
            // SAFETY: as above.
            unsafe { Words::<i32>::new(whole, copier) }.load(0, &mut all);
            assert_eq!(all, expected, "{copier:?}");
        }
    }
}
