//! The sender's memory for rows on their way: a ring of parts, one for each layer of a chunk.
//!
//! A prefill instance that kept whole sequences until they have crossed would need the memory of a decode instance. It
//! computes into a part of this ring instead, sends the part, and gives it back when the receiver has acknowledged it.
//! A page is one index in all layers, so pages cannot be given back by layer; parts of a ring can.
//!
//! **Order.** Parts are taken in the order of the ring. Acknowledgements may come in any order: memory is free again up
//! to the oldest part that is still held. A part is contiguous, so one that does not fit before the ring's end begins
//! at its start, and what it skipped is free with it.
//!
//! **A full ring** refuses: prefill waits, which is the pace that the receiver sets. A part that a receiver never
//! acknowledges holds everything behind it. So an aborted transfer gives its parts back too, after the same proof as
//! for pages ([`Quarantine`](crate::transfer::Quarantine)) where the other side reads them.

use std::collections::VecDeque;

use crate::error::{Error, Kind, Result};

const OPERATION: &str = "staging ring";

/// A part of a ring, until it is given back to that ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first byte in the ring.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// How many parts were taken before it.
    pub number: u64,
}

/// A part, and whether it was given back.
#[derive(Clone, Copy, Debug)]
struct Taken {
    part: Part,
    /// Its bytes of the ring, and those that it skipped.
    room: u64,
    skipped: u64,
    given_back: bool,
}

/// See the module's head.
#[derive(Clone, Debug)]
pub struct StagingRing {
    bytes: u64,
    align: u64,
    /// Where the next part begins, and how many bytes are not free.
    next: u64,
    used: u64,
    /// Parts from the oldest that is held.
    taken: VecDeque<Taken>,
    /// How many parts were taken.
    count: u64,
}

impl StagingRing {
    /// An empty ring of `bytes` bytes, whose parts begin at multiples of `align`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a ring of nothing, and for an alignment that is no power of two or does not divide
    /// the ring.
    pub fn new(bytes: u64, align: u64) -> Result<StagingRing> {
        if bytes == 0 || !align.is_power_of_two() || !bytes.is_multiple_of(align) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("bytes and alignment")
                .with("bytes", bytes)
                .with("align", align));
        }
        Ok(StagingRing { bytes, align, next: 0, used: 0, taken: VecDeque::new(), count: 0 })
    }

    /// Bytes that are not free: those of parts that are held, of parts given back behind one that is held, and skipped
    /// ones.
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Takes a part of `bytes` bytes.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with `wanted` and `free` if there is no room now; [`Kind::OutOfRange`] for a part that the
    /// empty ring has no room for, and for one of nothing; [`Kind::OutOfMemory`].
    pub fn take(&mut self, bytes: u64) -> Result<Part> {
        let wanted =
            bytes.checked_next_multiple_of(self.align).filter(|wanted| (1..=self.bytes).contains(wanted));
        let Some(wanted) = wanted else {
            return Err(Error::new(Kind::OutOfRange, OPERATION)
                .at("bytes of a part")
                .with("wanted", bytes)
                .with("most", self.bytes));
        };
        if self.used == 0 {
            self.next = 0;
        }
        let skipped = if wanted <= self.bytes - self.next { 0 } else { self.bytes - self.next };
        let room = skipped + wanted;
        if room > self.bytes - self.used {
            return Err(Error::new(Kind::Exhausted, OPERATION)
                .at("bytes of the ring")
                .with("wanted", wanted)
                .with("free", self.bytes - self.used)
                .hint("wait until the receiver has acknowledged parts"));
        }
        self.taken.try_reserve(1).map_err(|_| Error::new(Kind::OutOfMemory, OPERATION).at("parts"))?;
        let offset = if skipped > 0 { 0 } else { self.next };
        let part = Part { offset, bytes, number: self.count };
        self.taken.push_back(Taken { part, room: wanted, skipped, given_back: false });
        (self.next, self.used, self.count) =
            ((offset + wanted) % self.bytes, self.used + room, self.count + 1);
        Ok(part)
    }

    /// Gives a part back.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a part that is not held.
    pub fn give_back(&mut self, part: Part) -> Result<()> {
        let first = self.taken.front().map_or(self.count, |taken| taken.part.number);
        let place = part.number.checked_sub(first).and_then(|place| usize::try_from(place).ok());
        let held = place.and_then(|place| self.taken.get_mut(place));
        match held.filter(|taken| taken.part == part && !taken.given_back) {
            Some(taken) => taken.given_back = true,
            None => {
                return Err(Error::new(Kind::InvalidState, OPERATION)
                    .at("a part that is not held")
                    .with("number", part.number));
            }
        }
        while let Some(taken) = self.taken.pop_front_if(|taken| taken.given_back) {
            self.used -= taken.room + taken.skipped;
        }
        // What is before the oldest part is free.
        if let Some(oldest) = self.taken.front_mut() {
            self.used -= std::mem::take(&mut oldest.skipped);
        }
        Ok(())
    }
}
