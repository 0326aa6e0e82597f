//! A place's state in one word, and the list of free places.
//!
//! From the top: the kind of the object (8 bits, 0 while the place is free), the generation (40 bits), the use (16
//! bits: 0 idle, 0xFFFF exclusive, otherwise the number of readers). A handle is the same word with its place in the
//! bits of the use. Both words without these bits are the *name*, so one comparison checks kind and generation.
//!
//! | from | to | by |
//! |---|---|---|
//! | free, g | name(k, g), idle | [`occupy`]: store, release |
//! | name, n readers | name, n + 1 | [`read`]: compare and swap, acquire |
//! | name, n readers | name, n - 1 | [`unread`]: compare and swap, release |
//! | name, idle | name, exclusive | [`alone`]: compare and swap, acquire |
//! | name, exclusive | name, idle | [`unalone`]: store, release |
//! | name, exclusive | free, g + 1 | [`vacate`]: store, release |
//! | any | 0 | a fork, in the child |
//!
//! Why these operations are enough. Only the thread that took a place off the list writes its word. Only the holder of
//! exclusive access ends it, so a store is enough. The next thread that enters acquires the releases of readers and
//! holders, so a change comes after every read before it. An ended name gains no reader, because the swap compares the
//! name together with the use. A call that is inside when the process forks does not find its name in the child, and
//! then leaves the word unchanged.
//!
//! A generation repeats after 2^40 objects of one place. Nothing here waits.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The bits of the use, or of a handle's place.
pub const USE: u64 = 0xFFFF;
const ALONE: u64 = USE;
const READERS_MAX: u64 = ALONE - 1;
const GENERATION_SHIFT: u32 = 16;
const KIND_SHIFT: u32 = 56;
/// The bits of a generation.
const GENERATION: u64 = (1 << KIND_SHIFT) - (1 << GENERATION_SHIFT);

/// Why a call was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The place does not have this name: the object has ended, never existed, or was made before a fork.
    Ended,
    /// Other calls are inside.
    InUse,
}

/// The kind in a name or handle.
pub const fn kind(name: u64) -> u8 {
    (name >> KIND_SHIFT) as u8
}

/// Enters for reading, together with other readers.
pub fn read(word: &AtomicU64, name: u64) -> Result<(), Refused> {
    let mut now = word.load(Ordering::Relaxed);
    loop {
        match (now & !USE == name, now & USE) {
            (false, _) => return Err(Refused::Ended),
            (true, READERS_MAX..) => return Err(Refused::InUse),
            _ => {}
        }
        match word.compare_exchange_weak(now, now + 1, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return Ok(()),
            Err(other) => now = other,
        }
    }
}

/// Leaves after [`read`].
pub fn unread(word: &AtomicU64, name: u64) {
    let mut now = word.load(Ordering::Relaxed);
    while now & !USE == name {
        match word.compare_exchange_weak(now, now - 1, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(other) => now = other,
        }
    }
}

/// Enters exclusively.
pub fn alone(word: &AtomicU64, name: u64) -> Result<(), Refused> {
    match word.compare_exchange(name, name | ALONE, Ordering::Acquire, Ordering::Relaxed) {
        Ok(_) => Ok(()),
        Err(now) if now & !USE == name => Err(Refused::InUse),
        Err(_) => Err(Refused::Ended),
    }
}

/// Whether no call has exclusive access. If an exclusive call is refused then, readers are the reason.
pub fn is_shared(word: &AtomicU64) -> bool {
    word.load(Ordering::Relaxed) & USE != ALONE
}

/// Leaves after [`alone`].
pub fn unalone(word: &AtomicU64, name: u64) {
    if word.load(Ordering::Relaxed) == name | ALONE {
        word.store(name, Ordering::Release);
    }
}

/// Ends a name that is held exclusively; returns whether it was.
pub fn vacate(word: &AtomicU64, name: u64) -> bool {
    let held = word.load(Ordering::Relaxed) == name | ALONE;
    if held {
        let next = (name & GENERATION).wrapping_add(1 << GENERATION_SHIFT) & GENERATION;
        word.store(next, Ordering::Release);
    }
    held
}

/// Gives a name to a free place that was taken off the list; a place that never had one begins with the generation
/// `base`.
pub fn occupy(word: &AtomicU64, kind: u8, base: u64) -> u64 {
    let generation = match word.load(Ordering::Relaxed) {
        0 => (base << GENERATION_SHIFT) & GENERATION,
        free => free,
    };
    let name = u64::from(kind) << KIND_SHIFT | generation;
    word.store(name, Ordering::Release);
    name
}

/// The list's head counts its changes above the place + 1, so that a place that left the list and came back is not
/// mistaken for one that stayed.
const CHANGE: u64 = 1 << 32;

/// Adds a place to the list of free places; `next` is the place's link.
pub fn push(head: &AtomicU64, next: &AtomicU32, place: u32) {
    let mut now = head.load(Ordering::Relaxed);
    loop {
        next.store(now as u32, Ordering::Relaxed);
        let changed = (now & !(CHANGE - 1)).wrapping_add(CHANGE) | (u64::from(place) + 1);
        match head.compare_exchange_weak(now, changed, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(other) => now = other,
        }
    }
}

/// Takes a place off the list; `next` returns a place's link.
pub fn pop<'a>(head: &AtomicU64, next: impl Fn(u32) -> &'a AtomicU32) -> Option<u32> {
    let mut now = head.load(Ordering::Acquire);
    loop {
        let place = (now as u32).checked_sub(1)?;
        let behind = u64::from(next(place).load(Ordering::Relaxed));
        let changed = (now & !(CHANGE - 1)).wrapping_add(CHANGE) | behind;
        match head.compare_exchange_weak(now, changed, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return Some(place),
            Err(other) => now = other,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_handle_admits_no_more_readers_than_it_can_count() {
        let word = AtomicU64::new(0);
        let name = occupy(&word, 7, 5);
        assert_eq!((kind(name), name), (7, 7 << KIND_SHIFT | 5 << GENERATION_SHIFT));
        word.store(name | (READERS_MAX - 1), Ordering::Relaxed);
        assert_eq!(read(&word, name), Ok(()));
        assert_eq!(read(&word, name), Err(Refused::InUse));
        assert_eq!(alone(&word, name), Err(Refused::InUse));
        unread(&word, name);
        assert_eq!(word.load(Ordering::Relaxed), name | (READERS_MAX - 1));
    }

    #[test]
    fn generations_wrap_around_without_changing_the_kind() {
        let word = AtomicU64::new(0);
        let name = occupy(&word, 1, u64::MAX);
        assert_eq!(name, 1 << KIND_SHIFT | GENERATION);
        assert_eq!(alone(&word, name), Ok(()));
        assert!(vacate(&word, name));
        assert!(!vacate(&word, name));
        assert_eq!(kind(word.load(Ordering::Relaxed)), 0);
        assert_eq!(read(&word, name), Err(Refused::Ended));
    }
}
