//! What has come on a connection and was not taken yet.
//!
//! The buffer grows with what has arrived, to at most twice that and [`PIECE`] bytes, whatever a header claims. A
//! connection is not read while a whole record waits. So it keeps at most one record and a piece. A buffer that a long
//! record has made long is given back when the other end has had nothing to say for a while.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;
use crate::os::{self, Faults};
use crate::transfer::socket::record::{HEADER, Header, Says};

/// The most bytes of one call of the system.
pub const PIECE: usize = 1 << 18;
/// The same while no long record is under way.
const SHORT: usize = 1 << 14;

/// A whole record. Its places are those of [`Incoming::bytes`], until it is consumed.
#[derive(Clone, Debug)]
pub struct Record {
    pub says: Says,
    pub own: Range<usize>,
    pub behind: Range<usize>,
}

#[derive(Debug, Default)]
pub struct Incoming {
    /// Room, of which `at..end` was not taken.
    room: Vec<u8>,
    at: usize,
    end: usize,
    /// A descriptor that came, until its record takes it.
    pub descriptor: Option<OwnedFd>,
}

impl Incoming {
    /// Reads once. Returns whether bytes came.
    ///
    /// # Errors
    /// Those of [`os::receive`]; [`Kind::BadFormat`] for a second descriptor; [`Kind::OutOfMemory`].
    pub fn read(&mut self, socket: BorrowedFd<'_>, faults: &dyn Faults) -> Result<bool> {
        let whole = self.header();
        let missing = whole.map_or(SHORT, |whole| whole.saturating_sub(self.end - self.at));
        let mut wanted = self.end + missing.clamp(SHORT, PIECE);
        if self.room.capacity() >= self.end + SHORT {
            // It grows when it is full, not for the last bytes of a piece.
            wanted = wanted.min(self.room.capacity());
        }
        if self.room.len() < wanted {
            if self.room.capacity() < wanted {
                // Twice as much each time, so that little is copied, but not more than the record and a piece.
                let most = self.at + whole.unwrap_or(0) + PIECE;
                let capacity = wanted.max(self.room.capacity().saturating_mul(2).min(most));
                let more = capacity - self.room.len();
                reserve(&mut self.room, more, "transfer connection", "what has come")?;
            }
            self.room.resize(wanted, 0);
        }
        let room = self.room.get_mut(self.end..wanted).unwrap_or_default();
        let Some(received) = os::receive(socket, room, faults)? else { return Ok(false) };
        self.end += received.bytes;
        if let Some(descriptor) = received.descriptor
            && self.descriptor.replace(descriptor).is_some()
        {
            return Err(Error::new(Kind::BadFormat, "transfer connection").at("a second descriptor"));
        }
        Ok(true)
    }

    /// What was not taken.
    pub fn arrived(&self) -> &[u8] {
        self.bytes(self.at..self.end)
    }

    pub fn bytes(&self, places: Range<usize>) -> &[u8] {
        self.room.get(places).unwrap_or_default()
    }

    /// The bytes of memory that it keeps.
    pub const fn kept(&self) -> usize {
        self.room.capacity()
    }

    /// Gives the buffer back if it is long and empty.
    pub fn release(&mut self) {
        if self.at == self.end && self.room.capacity() > PIECE {
            (self.room, self.at, self.end) = (Vec::new(), 0, 0);
        }
    }

    /// All bytes of a record that has begun, if its header is there and was found good.
    fn header(&self) -> Option<usize> {
        let header = *self.arrived().first_chunk::<HEADER>()?;
        Header::decode(header, usize::MAX).ok().map(Header::total)
    }

    /// The header of the next record, if it is there.
    ///
    /// # Errors
    /// As [`Incoming::record`].
    pub fn head(&self, most: usize) -> Result<Option<Header>> {
        self.arrived().first_chunk().map(|header| Header::decode(*header, most)).transpose()
    }

    /// The next record, if all of it is there. At most `most` bytes of rows may be behind it.
    ///
    /// # Errors
    /// [`Kind::BadFormat`], as soon as its header is there.
    pub fn record(&self, most: usize) -> Result<Option<Record>> {
        let Some(header) = self.head(most)? else { return Ok(None) };
        let (first, end) = (self.at + HEADER, self.at + header.total());
        let own = first..first + header.own;
        let behind = own.end..end;
        Ok((end <= self.end).then_some(Record { says: header.says, own, behind }))
    }

    /// Takes what comes before a place.
    pub fn consume(&mut self, place: usize) {
        self.at = place.min(self.end);
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
        } else if self.at > self.end / 2 {
            self.room.copy_within(self.at..self.end, 0);
            (self.at, self.end) = (0, self.end - self.at);
        }
    }

    /// Takes so many bytes, if they are there.
    pub fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let taken = *self.arrived().first_chunk()?;
        self.consume(self.at + N);
        Some(taken)
    }
}
