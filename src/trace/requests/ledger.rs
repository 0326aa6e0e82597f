//! What reading a request trace holds, told to the caller before it is taken.
//!
//! Nobody knows how large a trace is before its last line. So whoever is about to let a table grow says how large it
//! will be, the caller is asked, and its error ends the reading. Vectors and maps double, so it is asked rarely.

use std::cell::Cell;

use crate::error::Result;

/// Bytes that reading a request trace holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// For the trace: its requests, their blocks, lengths of pieces.
    pub trace: u64,
    /// Beside it, and only while it is read: tables of ids and side files, times, and what interleaving holds twice.
    pub beside: u64,
}

/// Something that grows.
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

/// Parts that are the trace's; those behind them are beside it.
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

/// Bytes of a hash map of entries of `size` bytes that is full and about to double: both tables, each with a byte of
/// its own for every place, of which seven eighths may be taken.
pub(super) fn doubled(capacity: usize, size: usize) -> u64 {
    let places = (capacity + 1).max(4).saturating_mul(8).div_ceil(7).next_power_of_two();
    (places + places / 2) as u64 * (size + 1) as u64
}
