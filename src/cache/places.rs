//! The device memory in which `park` notes the newest rows of parked sequences.
//!
//! It is divided into *places*, one for each sequence that may be parked at the same time. A place is `[groups][top_k]`
//! i32 positions, -1 for none. `park` says who writes and reads it, and in which order.

use crate::device::Slice;
use crate::error::{Error, Kind, Result};

/// A place of a parked sequence: see `park`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) number: u32,
    /// Whether the device has written positions there.
    pub(super) noted: bool,
}

/// The device memory in which the positions of parked sequences' newest rows are noted.
#[derive(Debug)]
pub(super) struct Places {
    /// `[places][groups][top_k]` i32; none without places.
    memory: Option<Slice>,
    /// Bytes of a place.
    bytes: u64,
    free: Vec<u32>,
}

impl Places {
    /// `count` free places of `bytes` in `memory`.
    pub(super) fn new(memory: Option<Slice>, bytes: u64, count: u32) -> Places {
        Places { memory, bytes, free: (0..count).rev().collect() }
    }

    /// The place that [`Places::take`] takes next.
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    pub(super) fn next(&self) -> Result<u32> {
        self.free.last().copied().ok_or_else(|| {
            Error::new(Kind::Exhausted, "park")
                .at("places of parked sequences")
                .with("wanted", 1_u32)
                .with("free", 0_u32)
                .hint("make the cache with a larger `parked`")
        })
    }

    /// Takes the next place.
    pub(super) fn take(&mut self) {
        self.free.pop();
    }

    /// The memory of a place.
    ///
    /// # Errors
    /// [`Kind::Internal`].
    pub(super) fn slice(&self, place: u32) -> Result<Slice> {
        let memory =
            self.memory.and_then(|memory| memory.part(u64::from(place) * self.bytes, self.bytes).ok());
        memory.ok_or_else(|| Error::new(Kind::Internal, "park").at("no such place"))
    }

    /// Frees the place of a sequence, if it has one.
    pub(super) fn give_back(&mut self, place: Option<Place>) {
        self.free.extend(place.map(|place| place.number));
    }

    /// Checks that every place is free or one of `taken`.
    ///
    /// # Errors
    /// [`Kind::Internal`].
    pub(super) fn validate(&self, taken: impl Iterator<Item = u32>, count: u32) -> Result<()> {
        let mut all: Vec<u32> = self.free.iter().copied().chain(taken).collect();
        all.sort_unstable();
        match all.into_iter().eq(0..count) {
            true => Ok(()),
            false => Err(Error::new(Kind::Internal, "validate").at("places of parked sequences")),
        }
    }
}
