//! A few words in memory that several processes share, each read and changed as a whole.
//!
//! Processes that must agree on one value need an exchange that only one of them wins, whenever any of them ends. That
//! is an atomic in memory that all of them map. The size of the memory cannot change, so no other process can end this
//! one by it, but any may write any value.
//!
//! The memory of these words is reached by atomics alone, of the standard library also under loom, which has no words
//! at addresses that are given.

use std::os::fd::OwnedFd;

use super::{Faults, Map, Protection, Request, page_size};
use crate::error::Result;
use crate::sync::{Ordering, SharedWord};

/// Words that processes share. They are 0 at first. An index beyond them reads 0 and changes nothing.
#[derive(Debug)]
pub struct Words {
    map: Map,
    count: usize,
}

/// The bytes of so many words, in whole pages.
fn bytes(count: usize) -> u64 {
    (count.max(1) as u64).saturating_mul(size_of::<u64>() as u64).next_multiple_of(page_size())
}

impl Words {
    /// Makes so many words.
    ///
    /// # Errors
    /// As [`Map::new`].
    pub fn new(count: usize, faults: &dyn Faults) -> Result<Words> {
        let request = Request {
            bytes: bytes(count),
            huge: false,
            populate: false,
            lock: false,
            node: None,
            shared: true,
        };
        Map::new(&request, faults).map(|(map, _)| Words { map, count })
    }

    /// A descriptor for another process, which may change them.
    ///
    /// # Errors
    /// As [`Map::export`].
    pub fn export(&self, faults: &dyn Faults) -> Result<OwnedFd> {
        self.map.export(Protection::ReadWrite, faults)
    }

    /// Maps so many words that another process made, which is not trusted.
    ///
    /// # Errors
    /// As [`Map::adopt`].
    pub fn adopt(descriptor: OwnedFd, count: usize, faults: &dyn Faults) -> Result<Words> {
        let map = Map::adopt(descriptor, bytes(count), Protection::ReadWrite, faults)?;
        Ok(Words { map, count })
    }

    fn at(&self, word: usize) -> Option<&SharedWord> {
        let inside = word < self.count && bytes(self.count) <= self.map.len();
        // SAFETY: `word` is inside the mapping, which lives as long as `self`, begins at a page and is readable and
        // writable; this process reaches it by these atomics alone, and the system hands out zeros.
        inside.then(|| unsafe { SharedWord::from_ptr(self.map.as_ptr().cast::<u64>().add(word)) })
    }

    /// The value of a word; acquires what its writer released.
    pub fn load(&self, word: usize) -> u64 {
        self.at(word).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Sets a word, and releases what was done before.
    pub fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.at(word) {
            word.store(value, Ordering::Release);
        }
    }

    /// Sets a word to `to` if it is `from`, and returns what it was; acquires and releases.
    pub fn exchange(&self, word: usize, from: u64, to: u64) -> u64 {
        let exchanged =
            self.at(word).map(|word| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire));
        exchanged.map_or(0, |was| was.unwrap_or_else(|was| was))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Call, Inject, NoFaults};
    use super::*;
    use crate::error::Kind;

    #[test]
    fn words_of_two_mappings_are_the_same_and_one_exchange_wins() {
        let own = Words::new(600, &NoFaults).unwrap();
        let theirs = Words::adopt(own.export(&NoFaults).unwrap(), 600, &NoFaults).unwrap();
        theirs.store(599, 7);
        assert_eq!((own.load(599), own.load(0)), (7, 0));
        assert_eq!((own.exchange(0, 0, 1), theirs.exchange(0, 0, 2), theirs.load(0)), (0, 1, 1));
        own.store(600, 1);
        assert_eq!((own.load(600), own.exchange(600, 0, 1), own.load(usize::MAX)), (0, 0, 0));
    }

    #[test]
    fn words_of_another_size_and_refusals_are_errors() {
        let own = Words::new(2, &NoFaults).unwrap();
        let wrong = Words::adopt(own.export(&NoFaults).unwrap(), 600, &NoFaults).unwrap_err();
        assert_eq!((wrong.kind(), wrong.number("size")), (Kind::BadFormat, Some(page_size())));
        // Without a descriptor the words are this process's alone.
        let private = Words::new(2, &Inject::call(Call::Memfd, libc::EPERM)).unwrap();
        assert_eq!(private.export(&NoFaults).unwrap_err().kind(), Kind::Unsupported);
        let error = Words::new(2, &Inject::call(Call::Map, libc::ENOMEM)).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfMemory);
    }
}
