//! Records: what a connection consists of after both sides have said hello.
//!
//! A record is a header of 12 bytes, and behind it as many bytes as the header says. Numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | bytes of the record's own |
//! | 4 to 7 | bytes of rows behind those |
//! | 8 | kind |
//! | 9 to 11 | 0 |
//!
//! | kind | its own bytes | from |
//! |---|---|---|
//! | 1 proof | 32: that the token is known | both, once |
//! | 2 refused | 1: why | both, the last |
//! | 3 memory | 8: the memory's bytes; of each plane its offset and a page's bytes, 8 each | sender, with a memfd |
//! | 4 frame | a frame; behind it rows | both |
//! | 5 alive | none | both |
//!
//! A header is checked before a byte behind it is kept.

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::FRAME_MAX;

/// The bytes of a header.
pub const HEADER: usize = 12;
/// The bytes of a proof.
pub const PROOF: usize = 32;

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    Proof = 1,
    Refused = 2,
    Memory = 3,
    Frame = 4,
    Alive = 5,
}

/// The head of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub says: Says,
    /// Bytes of its own.
    pub own: usize,
    /// Bytes of rows behind those.
    pub behind: usize,
}

impl Header {
    /// The header's bytes, of lengths that [`Header::decode`] takes.
    pub fn encode(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let (own, behind) = ((self.own as u32).to_le_bytes(), (self.behind as u32).to_le_bytes());
        let all = own.into_iter().chain(behind).chain([self.says as u8]);
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = from);
        bytes
    }

    /// Reads a header. At most `behind` bytes of rows may follow.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a kind or a length that is none.
    pub fn decode(bytes: [u8; HEADER], most: usize) -> Result<Header> {
        let number =
            |at: usize| bytes.get(at..)?.first_chunk().map(|four| u32::from_le_bytes(*four) as usize);
        let (own, behind) = (number(0).unwrap_or(usize::MAX), number(4).unwrap_or(usize::MAX));
        let read = || {
            let [kind, rest @ ..] = *bytes.last_chunk::<4>()?;
            let (says, lengths, most) = match kind {
                1 => (Says::Proof, PROOF..=PROOF, 0),
                2 => (Says::Refused, 1..=1, 0),
                3 => (Says::Memory, 8..=FRAME_MAX, 0),
                4 => (Says::Frame, 1..=FRAME_MAX, most),
                5 => (Says::Alive, 0..=0, 0),
                _ => return None,
            };
            let taken = rest == [0; 3] && lengths.contains(&own) && behind <= most;
            taken.then_some(Header { says, own, behind })
        };
        read().ok_or_else(|| {
            Error::new(Kind::BadFormat, "transfer connection")
                .at("a record that no end of this version sends")
                .with("bytes", own as u64)
                .with("rows", behind as u64)
                .hint("let only instances that use forebay connect, and raise rows_max above their notice_bytes")
        })
    }

    /// All bytes of the record.
    pub const fn total(self) -> usize {
        HEADER + self.own + self.behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_documented_and_others_are_refused() {
        let header = Header { says: Says::Frame, own: 0x0102, behind: 0x03_0405 };
        let bytes = [2, 1, 0, 0, 5, 4, 3, 0, 4, 0, 0, 0];
        assert_eq!((header.encode(), header.total()), (bytes, 12 + 0x0102 + 0x03_0405));
        assert_eq!(Header::decode(bytes, 0x03_0405).unwrap(), header);
        assert_eq!(Header::decode(bytes, 0x03_0404).unwrap_err().kind(), Kind::BadFormat);
        let of = |says, own, behind| Header::decode(Header { says, own, behind }.encode(), 100).is_ok();
        assert!(of(Says::Proof, 32, 0) && !of(Says::Proof, 31, 0) && !of(Says::Proof, 32, 1));
        assert!(of(Says::Alive, 0, 0) && !of(Says::Alive, 1, 0) && !of(Says::Alive, 0, 1));
        assert!(
            of(Says::Frame, FRAME_MAX, 100) && !of(Says::Frame, FRAME_MAX + 1, 0) && !of(Says::Frame, 0, 0)
        );
        assert!(of(Says::Memory, 8, 0) && !of(Says::Memory, 7, 0) && of(Says::Refused, 1, 0));
        for (at, value) in [(8, 0), (8, 6), (9, 1), (11, 1), (3, 1), (7, 1)] {
            let mut changed = bytes;
            changed[at] = value;
            assert!(Header::decode(changed, 1 << 20).is_err(), "{at}");
        }
    }
}
