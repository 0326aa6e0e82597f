//! What waits to be sent on a connection.
//!
//! Rows wait as places in the sender's memory, which holds them until they are answered. They are read piece by piece,
//! when the socket takes them. So a slow receiver costs the places of its rows and not their bytes.
//!
//! **Memory.** A piece is one long run or several short ones. What a long run has taken is given back when the
//! connection has had nothing to send for a while.
//!
//! **An error ends it.** A piece that could not be made would leave a hole in the stream. So nothing is sent after an
//! error, and each later call returns the same one.

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
    /// Why nothing is sent any more.
    broken: Option<Error>,
}

impl Outgoing {
    /// Whether nothing is sent any more.
    pub const fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

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

    /// Gives back memory that a long run has taken, if nothing is being sent.
    pub fn release(&mut self) {
        if self.at == self.piece.len() && self.piece.capacity() > PIECE {
            (self.piece, self.at) = (Vec::new(), 0);
        }
    }

    fn add(&mut self, part: Part) {
        self.weight = self.weight.saturating_add(part.weight());
        self.parts.push_back(part);
    }

    /// Sends what the socket takes, up to a turn. Returns whether it took something. Rows are read from `memory`.
    ///
    /// # Errors
    /// Those of [`os::send`]; [`Kind::OutOfRange`] for rows that are not in the memory; [`Kind::OutOfMemory`]. Each
    /// later call returns the same error.
    pub fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        memory: Option<&SendMemory>,
        faults: &dyn Faults,
    ) -> Result<bool> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.turn(socket, memory, faults).inspect_err(|error| self.broken = Some(error.clone()))
    }

    fn turn(
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::os::{NoFaults, Request};
    use crate::transfer::memory::{Plane, Planes};
    use crate::transfer::runs::End;

    #[test]
    fn after_a_part_that_could_not_be_read_nothing_is_sent() {
        let request =
            Request { bytes: 4096, huge: false, populate: false, lock: false, node: None, shared: false };
        let planes = Planes(vec![Plane { offset: 0, page_bytes: 4096 }]);
        let (memory, _) = SendMemory::new(&request, planes, &NoFaults).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let mut outgoing = Outgoing::default();
        let end = |page| End { stage: 0, lane: 0, plane: 0, page, offset: 0, stride: 64 };
        let run = |page| Run {
            layer: 0,
            component: 0,
            chunk: 0,
            token: 0,
            tokens: 1,
            head: 0,
            heads: 1,
            from: end(page),
            to: end(0),
            bytes: 64,
            pieces: 1,
        };
        outgoing.push(b"head".to_vec());
        outgoing.push_rows([(0, run(1 << 20))].into_iter());
        outgoing.push(b"next".to_vec());
        let error = outgoing.flush(near.as_fd(), Some(&memory), &NoFaults).unwrap_err();
        assert_eq!(error.kind(), Kind::OutOfRange);
        assert_eq!(outgoing.flush(near.as_fd(), Some(&memory), &NoFaults).unwrap_err(), error);
        assert!(os::receive(&far, &mut [0; 64], &NoFaults).unwrap().is_none(), "a part without its rows");
        // Control: rows that are there are sent, and what is before and behind them.
        let mut whole = Outgoing::default();
        whole.push(b"head".to_vec());
        whole.push_rows([(0, run(0))].into_iter());
        assert!(whole.flush(near.as_fd(), Some(&memory), &NoFaults).unwrap());
        assert_eq!(os::receive(&far, &mut [0; 256], &NoFaults).unwrap().unwrap().bytes, 4 + 64);
    }
}
