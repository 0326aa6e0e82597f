//! Accounts for the memory of reading a request trace, and asks the caller before it is taken.
//!
//! The size of a trace is unknown before its last line. So each table reports its new size before it grows; the caller
//! is asked, and its error ends the reading. Vectors and maps double, so it is asked rarely.

use std::cell::Cell;

use crate::error::{Error, Kind, Result};

/// Bytes that reading a request trace holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Of the trace: its requests, their blocks, lengths of pieces.
    pub trace: u64,
    /// Of the reading alone: tables of ids and side files, times, and copies for interleaving.
    pub beside: u64,
}

/// A structure that grows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    Requests,
    Blocks,
    PieceTokens,
    Lengths,
    Ids,
    Times,
    Interleaving,
}

/// Bytes of every part.
pub(super) struct Ledger<'a> {
    parts: [Cell<u64>; 7],
    ask: &'a dyn Fn(Taken) -> Result<()>,
}

/// The first parts belong to the trace; the others only to the reading.
const OF_TRACE: usize = 3;

impl<'a> Ledger<'a> {
    pub fn new(ask: &'a dyn Fn(Taken) -> Result<()>) -> Self {
        Ledger { parts: Default::default(), ask }
    }

    /// `part` is about to hold `bytes`.
    pub fn set(&self, part: Part, bytes: u64) -> Result<()> {
        if let Some(known) = self.parts.get(part as usize) {
            known.set(bytes);
        }
        let sum = |parts: &[Cell<u64>]| parts.iter().map(Cell::get).sum();
        let (trace, beside) = self.parts.split_at(OF_TRACE);
        (self.ask)(Taken { trace: sum(trace), beside: sum(beside) })
    }

    /// `more` are about to be pushed to `all`, which doubles when it is full.
    pub fn grow<T>(&self, part: Part, all: &Vec<T>, more: usize) -> Result<()> {
        let length = all.len() + more;
        if length <= all.capacity() {
            return Ok(());
        }
        self.set(part, (size_of::<T>() * length.max(2 * all.capacity())) as u64)
    }
}

/// Bytes of a full hash map of entries of `size` bytes that is about to double: both tables, with an additional byte
/// for every place, of which seven eighths may be used.
pub(super) fn doubled(capacity: usize, size: usize) -> u64 {
    let places = (capacity + 1).max(4).saturating_mul(8).div_ceil(7).next_power_of_two();
    (places + places / 2) as u64 * (size + 1) as u64
}

/// The error for missing memory for `what`.
pub(super) fn no_room(what: &'static str) -> Error {
    Error::new(Kind::OutOfMemory, "read trace").at(what).hint("free memory")
}
