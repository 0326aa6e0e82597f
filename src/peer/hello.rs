//! What each side says first: who it is, and what it takes the group's model and plan to be.
//!
//! Both sides send theirs without waiting and check the other's, so both find the same fault. The first 12 bytes, a
//! mark and the version, never change, so that a side of another version is told as such. The rest is of the version:
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 7 | `FOREBAYP` |
//! | 8 to 11 | version, 1 |
//! | 12 to 15, 16 to 19 | rank, ranks of the group |
//! | 20 to 27 | group |
//! | 28 to 59, 60 to 91, 92 to 123 | digests of geometry, plan and content |
//! | 124 to 127 | 0 |
//!
//! Numbers are little-endian.

use crate::error::{Error, Kind, Result};

/// The version of frames and hello.
pub const VERSION: u32 = 1;
/// The bytes of a hello after its frame's header.
pub(super) const BYTES: usize = 128;
const MARK: [u8; 8] = *b"FOREBAYP";

/// A BLAKE3 hash; all zeros where there is nothing to hash.
pub type Digest = [u8; 32];

/// Who a process of a group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The group: processes of another one are refused.
    pub group: u64,
    /// This process's rank in it, from 0.
    pub rank: u32,
    /// The ranks of the group.
    pub ranks: u32,
    /// The digest of the model's geometry, the same for all ranks.
    pub geometry: Digest,
    /// The digest of what is divided and how, the same for all ranks.
    pub plan: Digest,
    /// The digest of what this rank holds. The session passes it on and does not compare it.
    pub content: Digest,
}

impl Hello {
    /// Checks this side's own.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a rank that is not below the number of ranks.
    pub(super) fn check(&self) -> Result<()> {
        match self.rank < self.ranks {
            true => Ok(()),
            false => Err(wrong(Kind::InvalidConfig, "rank", self)),
        }
    }

    pub(super) fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let (rank, ranks, group) =
            (self.rank.to_le_bytes(), self.ranks.to_le_bytes(), self.group.to_le_bytes());
        let parts: [&[u8]; 8] =
            [&MARK, &VERSION.to_le_bytes(), &rank, &ranks, &group, &self.geometry, &self.plan, &self.content];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        bytes
    }

    /// Reads the other side's, and checks that it may talk to `own`.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for bytes that are no hello; [`Kind::BadVersion`]; [`Kind::InvalidConfig`] for another
    /// group, number of ranks, geometry or plan, and for a rank that is this side's own or none of the group.
    pub(super) fn accept(bytes: &[u8], own: &Hello) -> Result<Hello> {
        let mut rest = bytes;
        let foreign = || Error::new(Kind::BadFormat, "peer session").at("hello").hint(FOREIGN);
        if take::<8>(&mut rest) != Some(MARK) {
            return Err(foreign());
        }
        let version = take(&mut rest).map(u32::from_le_bytes).ok_or_else(foreign)?;
        if version != VERSION {
            return Err(Error::new(Kind::BadVersion, "peer session")
                .at("hello")
                .with("own", VERSION)
                .with("theirs", version)
                .hint("use the same forebay release in all processes of the group"));
        }
        let theirs = Hello::fields(&mut rest).filter(|_| rest == [0; 4]).ok_or_else(foreign)?;
        theirs.fits(own).map(|()| theirs)
    }

    fn fields(rest: &mut &[u8]) -> Option<Hello> {
        let (rank, ranks) = (u32::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?));
        let group = u64::from_le_bytes(take(rest)?);
        Some(Hello { group, rank, ranks, geometry: take(rest)?, plan: take(rest)?, content: take(rest)? })
    }

    /// Checks the other side's hello against one's own.
    fn fits(&self, own: &Hello) -> Result<()> {
        let place = if self.group != own.group {
            "a process of another group"
        } else if self.ranks != own.ranks {
            "a process that counts other ranks"
        } else if self.rank >= self.ranks {
            "a rank that the group does not have"
        } else if self.rank == own.rank {
            "a second process of the same rank"
        } else if self.geometry != own.geometry {
            "a process with another model"
        } else if self.plan != own.plan {
            "a process with another plan"
        } else {
            return Ok(());
        };
        Err(wrong(Kind::InvalidConfig, place, self)
            .hint("start all ranks of a group with the same configuration"))
    }
}

const FOREIGN: &str = "only processes that use forebay may connect to this socket";

fn wrong(kind: Kind, place: &'static str, hello: &Hello) -> Error {
    let error = Error::new(kind, "peer session").at(place);
    error.with("rank", hello.rank).with("ranks", hello.ranks).with("group", hello.group)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: u32) -> Hello {
        Hello {
            group: 0x0102_0304_0506_0708,
            rank,
            ranks: 3,
            geometry: [7; 32],
            plan: [8; 32],
            content: [9; 32],
        }
    }

    #[test]
    fn the_bytes_are_as_documented() {
        let bytes = hello(2).encode();
        assert_eq!(&bytes[..12], b"FOREBAYP\x01\0\0\0");
        assert_eq!(&bytes[12..28], [2, 0, 0, 0, 3, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!((&bytes[28..60], &bytes[60..92]), (&[7; 32][..], &[8; 32][..]));
        assert_eq!((&bytes[92..124], &bytes[124..]), (&[9; 32][..], &[0; 4][..]));
        assert_eq!(Hello::accept(&bytes, &hello(0)).unwrap(), hello(2));
    }

    #[test]
    fn each_disagreement_has_its_own_words() {
        let own = hello(1);
        let theirs = hello(0);
        let other = [0; 32];
        for (theirs, place) in [
            (Hello { group: 1, ..theirs }, "a process of another group"),
            (Hello { ranks: 4, ..theirs }, "a process that counts other ranks"),
            (Hello { rank: 3, ..theirs }, "a rank that the group does not have"),
            (Hello { rank: 1, ..theirs }, "a second process of the same rank"),
            (Hello { geometry: other, ..theirs }, "a process with another model"),
            (Hello { plan: other, ..theirs }, "a process with another plan"),
        ] {
            let error = Hello::accept(&theirs.encode(), &own).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place));
            assert_eq!(error.number("rank"), Some(u64::from(theirs.rank)));
        }
        let anything = Hello { content: other, ..theirs };
        assert_eq!(Hello::accept(&anything.encode(), &own).unwrap(), anything);
        assert_eq!(Hello { rank: 3, ..own }.check().unwrap_err().place(), "rank");
    }

    #[test]
    fn other_bytes_and_other_versions_are_told_apart() {
        let (own, good) = (hello(1), hello(0).encode());
        let changed = |at: usize, value| {
            let mut bytes = good;
            bytes[at] = value;
            Hello::accept(&bytes, &own).unwrap_err()
        };
        assert_eq!(changed(0, b'f').kind(), Kind::BadFormat);
        assert_eq!(changed(127, 1).kind(), Kind::BadFormat);
        let error = changed(8, 2);
        assert_eq!(
            (error.kind(), error.number("own"), error.number("theirs")),
            (Kind::BadVersion, Some(1), Some(2))
        );
        for bytes in 0..BYTES {
            assert_eq!(Hello::accept(&good[..bytes], &own).unwrap_err().kind(), Kind::BadFormat, "{bytes}");
        }
    }
}
