//! What waits to be sent on a connection.
//!
//! Rows wait as places in the sender's memory, which holds them until they are answered. They are read piece by piece,
//! when the socket takes them. So a slow receiver costs the places of its rows and not their bytes.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;
use crate::os::{self, Faults};
use crate::transfer::memory::SendMemory;
use crate::transfer::runs::Run;

/// Bytes that are given to the system at once, if no run is longer.
const PIECE: usize = 1 << 18;
/// The most bytes that a turn sends, but for one piece: other connections have their turns too.
const TURN: usize = 1 << 20;

#[derive(Debug)]
enum Part {
    Bytes(Vec<u8>),
    /// A run of rows, from an origin.
    Rows(u64, Run),
}

impl Part {
    /// What it takes of the queue: its bytes, and of rows also their place.
    fn weight(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Rows(_, run) => length(run).saturating_add(size_of::<Part>()),
        }
    }
}

/// The bytes of a run.
pub fn length(run: &Run) -> usize {
    usize::try_from(run.total()).unwrap_or(usize::MAX)
}

#[derive(Debug, Default)]
pub struct Outgoing {
    parts: VecDeque<Part>,
    /// The weight of all parts.
    weight: usize,
    /// What is being sent, from `at` on.
    piece: Vec<u8>,
    at: usize,
    /// It goes with the next byte.
    descriptor: Option<OwnedFd>,
}

impl Outgoing {
    /// What waits, in bytes.
    pub fn waiting(&self) -> usize {
        self.weight.saturating_add(self.piece.len() - self.at)
    }

    /// What a frame with its rows would add to it.
    pub fn weight_of(bytes: usize, rows: &[(u64, Run)]) -> usize {
        let places = rows.len().saturating_mul(size_of::<Part>());
        rows.iter().fold(bytes.saturating_add(places), |sum, (_, run)| sum.saturating_add(length(run)))
    }

    pub fn push(&mut self, bytes: Vec<u8>) {
        self.add(Part::Bytes(bytes));
    }

    pub fn push_rows(&mut self, rows: impl Iterator<Item = (u64, Run)>) {
        rows.for_each(|(origin, run)| self.add(Part::Rows(origin, run)));
    }

    /// Bytes with a descriptor. What waited before must have been sent.
    pub fn push_with(&mut self, bytes: Vec<u8>, descriptor: OwnedFd) {
        self.push(bytes);
        self.descriptor = Some(descriptor);
    }

    fn add(&mut self, part: Part) {
        self.weight = self.weight.saturating_add(part.weight());
        self.parts.push_back(part);
    }

    /// Sends what the socket takes, up to a turn. Returns whether it took something. Rows are read from `memory`.
    ///
    /// # Errors
    /// Those of [`os::send`]; [`Kind::OutOfRange`] for rows that are not in the memory; [`Kind::OutOfMemory`].
    pub fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: Option<&SendMemory>,
        faults: &dyn Faults,
    ) -> Result<bool> {
        let mut all = 0;
        while all < TURN {
            if self.at == self.piece.len() {
                self.fill(memory)?;
            }
            let piece = self.piece.get(self.at..).unwrap_or_default();
            if piece.is_empty() {
                break;
            }
            let sent = os::send(socket, piece, self.descriptor.as_ref().map(AsFd::as_fd), faults)?;
            if sent == 0 {
                break;
            }
            self.descriptor = None;
            self.at += sent;
            all += sent;
        }
        Ok(all > 0)
    }

    /// Makes the next piece. After an error the connection's bytes go on where they ended: what could not be read is
    /// sent as other bytes, which the receiver's digests find.
    fn fill(&mut self, memory: Option<&SendMemory>) -> Result<()> {
        self.piece.clear();
        self.at = 0;
        while self.piece.len() < PIECE
            && let Some(part) = self.parts.front()
        {
            let bytes = match part {
                Part::Bytes(bytes) => bytes.len(),
                Part::Rows(_, run) => length(run),
            };
            reserve(&mut self.piece, bytes, "transfer connection", "bytes to send")?;
            self.weight = self.weight.saturating_sub(part.weight());
            match self.parts.pop_front() {
                Some(Part::Bytes(bytes)) => self.piece.extend(bytes),
                Some(Part::Rows(origin, run)) => {
                    let first = self.piece.len();
                    self.piece.resize(first + bytes, 0);
                    let to = self.piece.get_mut(first..).unwrap_or_default();
                    let memory = memory.ok_or_else(|| Error::new(Kind::Internal, "transfer connection"))?;
                    memory.planes().read(memory.map(), origin, &run, to)?;
                }
                None => break,
            }
        }
        Ok(())
    }
}
