//! The header of a frame: its kind and its length, both checked before a byte of its content is kept.

use super::hello;
use crate::error::{Error, Kind, Result};

/// The most bytes of a frame, its header included.
pub const FRAME_MAX: usize = 1 << 16;
/// The bytes of a frame's header.
pub(super) const HEADER: usize = 8;
/// The most bytes of a message.
pub const MESSAGE_MAX: usize = FRAME_MAX - HEADER;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    Hello,
    Alive,
    Message,
    End,
}

impl FrameKind {
    const fn number(self) -> u8 {
        match self {
            FrameKind::Hello => 1,
            FrameKind::Alive => 2,
            FrameKind::Message => 3,
            FrameKind::End => 4,
        }
    }

    const fn of(number: u8) -> Option<FrameKind> {
        match number {
            1 => Some(FrameKind::Hello),
            2 => Some(FrameKind::Alive),
            3 => Some(FrameKind::Message),
            4 => Some(FrameKind::End),
            _ => None,
        }
    }

    /// Whether a frame of this kind may have so many bytes after its header.
    const fn has(self, bytes: usize) -> bool {
        match self {
            FrameKind::Hello => bytes == hello::BYTES,
            FrameKind::Alive | FrameKind::End => bytes == 0,
            FrameKind::Message => bytes <= MESSAGE_MAX,
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: FrameKind,
    /// Bytes after the header.
    pub bytes: usize,
    /// Whether a descriptor belongs to the frame.
    pub descriptor: bool,
}

impl Header {
    pub fn encode(self) -> [u8; HEADER] {
        // At most MESSAGE_MAX bytes.
        let [a, b, c, d] = (self.bytes as u32).to_le_bytes();
        [a, b, c, d, self.kind.number(), u8::from(self.descriptor), 0, 0]
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for one that no side of this version sends.
    pub fn decode(bytes: [u8; HEADER]) -> Result<Header> {
        let [a, b, c, d, kind, descriptor, rest @ ..] = bytes;
        let length = u32::from_le_bytes([a, b, c, d]);
        let header = FrameKind::of(kind)
            .map(|kind| Header { kind, bytes: length as usize, descriptor: descriptor == 1 })
            .filter(|it| it.kind.has(it.bytes) && (it.kind == FrameKind::Message || !it.descriptor));
        header.filter(|_| descriptor <= 1 && rest == [0, 0]).ok_or_else(|| {
            Error::new(Kind::BadFormat, "peer session")
                .at("frame header")
                .with("kind", kind)
                .with("bytes", length)
                .hint("only processes that use forebay may connect to this socket")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All headers that may be sent, written out.
    #[test]
    fn a_header_reads_as_it_was_written_and_no_other_is_read() {
        let sent = |kind, bytes, descriptor| Header { kind, bytes, descriptor };
        for (header, bytes) in [
            (sent(FrameKind::Hello, 128, false), [128, 0, 0, 0, 1, 0, 0, 0]),
            (sent(FrameKind::Alive, 0, false), [0, 0, 0, 0, 2, 0, 0, 0]),
            (sent(FrameKind::Message, 0, true), [0, 0, 0, 0, 3, 1, 0, 0]),
            (sent(FrameKind::Message, MESSAGE_MAX, false), [0xF8, 0xFF, 0, 0, 3, 0, 0, 0]),
            (sent(FrameKind::End, 0, false), [0, 0, 0, 0, 4, 0, 0, 0]),
        ] {
            assert_eq!((header.encode(), Header::decode(bytes).unwrap()), (bytes, header));
        }
        for bytes in [
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 5, 0, 0, 0],
            [127, 0, 0, 0, 1, 0, 0, 0],
            [128, 0, 0, 0, 1, 1, 0, 0],
            [1, 0, 0, 0, 2, 0, 0, 0],
            [0, 0, 0, 0, 2, 1, 0, 0],
            [0xF9, 0xFF, 0, 0, 3, 0, 0, 0],
            [0xFF, 0xFF, 0xFF, 0xFF, 3, 0, 0, 0],
            [0, 0, 0, 0, 3, 2, 0, 0],
            [0, 0, 0, 0, 3, 0, 1, 0],
            [0, 0, 0, 0, 3, 0, 0, 1],
            [1, 0, 0, 0, 4, 0, 0, 0],
        ] {
            let error = Header::decode(bytes).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::BadFormat, "frame header"), "{bytes:?}");
        }
    }
}
