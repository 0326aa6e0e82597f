//! The queues of S3-FIFO (Yang et al., SOSP 2023) over numbers: a small queue, a main queue, and a memory of numbers
//! evicted from the small one.
//!
//! A missed number enters the small queue, or the main one if it is among the last numbers evicted from the small one
//! (as many as the main queue is meant to hold). Hits only count, up to 3. While the small queue holds at least a
//! tenth of the slots, it gives up its oldest number: to the main queue if that was hit twice or more, otherwise it is
//! evicted. Otherwise the main queue gives up its oldest: it is evicted, or, if it has hits, returns to the newest end
//! with one hit less.
//!
//! A number that must stay is skipped: without hits it keeps its place at the old end, with hits it moves as any
//! other.

use std::collections::VecDeque;

use forebay::Result;

use super::reserve;

/// Where a number is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Out,
    Small,
    Main,
}

/// The state of a number.
#[derive(Clone, Copy)]
struct Known {
    place: Place,
    hits: u8,
    /// Evictions from the small queue up to and including this number's; 0 if it has none.
    left: u64,
}

/// See the module's head.
pub struct Queues {
    slots: usize,
    known: Vec<Known>,
    /// Oldest first.
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Numbers of each queue that must stay, met in the search for a victim.
    passed: [Vec<u32>; 2],
    /// Evictions from the small queue.
    left: u64,
}

impl Queues {
    /// Empty queues for `slots` of the numbers below `numbers`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(slots: usize, numbers: usize) -> Result<Queues> {
        let most = slots.min(numbers);
        Ok(Queues {
            slots,
            known: reserve::filled(numbers, Known { place: Place::Out, hits: 0, left: 0 })?,
            small: reserve::queue(most)?,
            main: reserve::queue(most)?,
            passed: [Vec::new(), Vec::new()],
            left: 0,
        })
    }

    /// Slots of the small queue.
    fn small_slots(&self) -> usize {
        (self.slots / 10).max(1)
    }

    /// How many numbers are resident.
    pub fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Whether the number is resident.
    pub fn contains(&self, number: u32) -> bool {
        self.known[number as usize].place != Place::Out
    }

    /// Counts a hit if the number is resident. Returns whether it is.
    pub fn hit(&mut self, number: u32) -> bool {
        let known = &mut self.known[number as usize];
        let resident = known.place != Place::Out;
        if resident {
            known.hits = (known.hits + 1).min(3);
        }
        resident
    }

    /// Admits a number that is not resident. A slot is free.
    pub fn enter(&mut self, number: u32) {
        let remembered = (self.slots - self.small_slots()) as u64;
        let known = &mut self.known[number as usize];
        let returns = known.left > 0 && self.left - known.left < remembered;
        (known.hits, known.left) = (0, 0);
        if returns {
            known.place = Place::Main;
            self.main.push_back(number);
        } else {
            known.place = Place::Small;
            self.small.push_back(number);
        }
    }

    /// Evicts `count` of the numbers that need not stay, or all of them.
    pub fn evict(&mut self, mut count: usize, stays: impl Fn(u32) -> bool) {
        while count > 0 {
            let small = self.small.len() + self.passed[0].len() >= self.small_slots();
            let gone = match (self.small.is_empty(), self.main.is_empty()) {
                (true, true) => break,
                (false, main) if small || main => self.pass_small(&stays),
                (false, false) | (true, false) => self.pass_main(&stays),
                (false, true) => self.pass_small(&stays),
            };
            count -= usize::from(gone);
        }
        let [small, main] = &mut self.passed;
        small.drain(..).rev().for_each(|number| self.small.push_front(number));
        main.drain(..).rev().for_each(|number| self.main.push_front(number));
    }

    /// Takes the small queue's oldest. Returns whether it was evicted.
    fn pass_small(&mut self, stays: impl Fn(u32) -> bool) -> bool {
        let Some(number) = self.small.pop_front() else { return false };
        let known = &mut self.known[number as usize];
        if known.hits > 1 {
            (known.place, known.hits) = (Place::Main, 0);
            self.main.push_back(number);
            return false;
        }
        if stays(number) {
            self.passed[0].push(number);
            return false;
        }
        self.left += 1;
        (known.place, known.left) = (Place::Out, self.left);
        true
    }

    /// Takes the main queue's oldest. Returns whether it was evicted.
    fn pass_main(&mut self, stays: impl Fn(u32) -> bool) -> bool {
        let Some(number) = self.main.pop_front() else { return false };
        let known = &mut self.known[number as usize];
        if known.hits > 0 {
            known.hits -= 1;
            self.main.push_back(number);
            return false;
        }
        if stays(number) {
            self.passed[1].push(number);
            return false;
        }
        known.place = Place::Out;
        true
    }
}
