//! A trace's content as a counted stream of bytes: a fixed buffer over a reader, an error for truncation, and
//! the offset of the next byte for every message.

use std::io::{self, Read};

use crate::error::{Error, Kind, Result};
use crate::os::io_text;

/// Bytes read at a time. The content passes through this buffer and is never held as a whole.
const BUFFER: usize = 1 << 16;

/// The most bytes of a 32-bit LEB128 varint, and the most that the last of them may hold.
const VARINT_BYTES: u32 = 5;
const VARINT_LAST: u8 = 0x0F;

/// The name of the offset in errors, counted in the uncompressed content.
pub(super) const BYTE: &str = "unpacked byte";

/// The error for a truncated content, packed or not.
const TRUNCATED: &str = "truncated: the file ends early";

/// The error for malformed content at byte `at` of the uncompressed content.
pub(super) fn malformed(what: impl Into<std::borrow::Cow<'static, str>>, at: u64) -> Error {
    Error::new(Kind::BadFormat, "read trace").at(what).with(BYTE, at)
}

/// The error with more text before its place.
pub(super) fn before(e: Error, prefix: &str) -> Error {
    let place = format!("{prefix}{}", e.place());
    e.at(place)
}

/// Whether an error means missing memory; the decompressor only reports it as text.
fn is_memory(e: &io::Error) -> bool {
    let code = zstd::zstd_safe::zstd_sys::ZSTD_ErrorCode::ZSTD_error_memory_allocation as usize;
    let words = || zstd::zstd_safe::get_error_name(code.wrapping_neg());
    e.kind() == io::ErrorKind::OutOfMemory || e.to_string() == words()
}

/// A reader's error: [`Kind::OutOfMemory`]; otherwise [`Kind::Io`] for the system's and [`Kind::BadFormat`] for the
/// decompressor's.
pub(super) fn unreadable(e: &io::Error, at: u64) -> Error {
    if is_memory(e) {
        return Error::new(Kind::OutOfMemory, "read trace")
            .at("unpacking")
            .with(BYTE, at)
            .hint("free memory");
    }
    if e.raw_os_error().is_some() {
        return Error::new(Kind::Io, "read trace").at(io_text(e)).with(BYTE, at);
    }
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return malformed(TRUNCATED, at);
    }
    malformed(format!("the zstd frame is damaged: {e}"), at)
}

/// The stream; see the module's head.
pub(super) struct Source<'a> {
    input: &'a mut dyn Read,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    passed: u64,
    /// The input's error: a further read might continue at another place.
    broken: Option<Error>,
}

impl<'a> Source<'a> {
    pub(super) fn new(input: &'a mut dyn Read) -> Self {
        Source::behind(input, 0)
    }

    /// The part of a content that begins after `passed` bytes of it.
    pub(super) fn behind(input: &'a mut dyn Read, passed: u64) -> Self {
        Source { input, buffer: vec![0; BUFFER].into_boxed_slice(), at: 0, end: 0, passed, broken: None }
    }

    /// The offset of the next byte in the decompressed content.
    pub(super) fn offset(&self) -> u64 {
        self.passed + self.at as u64
    }

    /// The buffered bytes, after reading more if there are none; empty at the end.
    fn fill(&mut self) -> Result<&[u8]> {
        if let Some(e) = &self.broken {
            return Err(e.clone());
        }
        if self.at == self.end {
            self.passed += self.end as u64;
            (self.at, self.end) = (0, 0);
            self.end = loop {
                match self.input.read(&mut self.buffer) {
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(self.broken.insert(unreadable(&e, self.passed)).clone()),
                    Ok(n) => break n.min(self.buffer.len()),
                }
            };
        }
        Ok(self.buffer.get(self.at..self.end).unwrap_or_default())
    }

    /// Whether everything has been read.
    pub(super) fn is_at_end(&mut self) -> Result<bool> {
        Ok(self.fill()?.is_empty())
    }

    /// Skips the rest, until more than `most` bytes were skipped. Returns whether the end was reached.
    pub(super) fn skip(&mut self, most: u64) -> Result<bool> {
        let start = self.offset();
        while self.offset() - start <= most {
            if self.fill()?.is_empty() {
                return Ok(true);
            }
            self.at = self.end;
        }
        Ok(false)
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = self.fill()?.first().copied();
        match byte {
            Some(byte) => {
                self.at += 1;
                Ok(byte)
            }
            None => Err(malformed(TRUNCATED, self.offset())),
        }
    }

    /// The next `out.len()` bytes.
    pub(super) fn exact(&mut self, out: &mut [u8]) -> Result<()> {
        for place in out {
            *place = self.byte()?;
        }
        Ok(())
    }

    pub(super) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        let mut bytes = [0; 4];
        self.exact(&mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// One unsigned LEB128 varint of 32 bits.
    pub(super) fn varint(&mut self) -> Result<u32> {
        let start = self.offset();
        let first = self.byte()?;
        let mut value = u32::from(first & 0x7F);
        let mut last = first;
        let mut bytes = 1;
        while last >= 0x80 {
            last = self.byte()?;
            if bytes == VARINT_BYTES - 1 && last > VARINT_LAST {
                return Err(malformed("a varint is longer than 32 bits", start));
            }
            value |= u32::from(last & 0x7F) << (7 * bytes);
            bytes += 1;
        }
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(bytes: &[u8]) -> Result<u32> {
        Source::new(&mut &bytes[..]).varint()
    }

    #[test]
    fn varints_hold_32_bits_and_not_one_more() {
        for (bytes, value) in
            [(&[0][..], 0), (&[0x7F], 127), (&[0x80, 1], 128), (&[0xFF, 0xFF, 0xFF, 0xFF, 0x0F], u32::MAX)]
        {
            assert_eq!(varint(bytes), Ok(value));
        }
        for bytes in [&[0xFF, 0xFF, 0xFF, 0xFF, 0x10][..], &[0x80, 0x80, 0x80, 0x80, 0x80, 1]] {
            assert!(varint(bytes).unwrap_err().place().contains("longer"));
        }
        let e = varint(&[0x80, 0x80]).unwrap_err();
        assert_eq!((e.place(), e.number(BYTE)), (TRUNCATED, Some(2)));
    }

    #[test]
    fn running_out_of_memory_is_not_reported_as_damage() {
        let words = "Allocation error : not enough memory";
        assert_eq!(unreadable(&io::Error::other(words), 0).kind(), Kind::OutOfMemory);
        assert_eq!(unreadable(&io::Error::from_raw_os_error(libc::ENOMEM), 0).kind(), Kind::OutOfMemory);
        assert_eq!(unreadable(&io::Error::other("Data corruption detected"), 0).kind(), Kind::BadFormat);
        assert_eq!(unreadable(&io::Error::from_raw_os_error(libc::EIO), 0).kind(), Kind::Io);
    }

    /// Gives one byte at a time, with interruptions.
    struct Drip(u32);

    impl Read for Drip {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.0 += 1;
            if self.0 % 2 == 1 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            out[0] = self.0 as u8;
            Ok(1)
        }
    }

    #[test]
    fn short_and_interrupted_reads_make_no_difference() {
        let mut input = Drip(0);
        let mut source = Source::new(&mut input);
        assert_eq!(source.u32(), Ok(u32::from_le_bytes([2, 4, 6, 8])));
        assert_eq!(source.offset(), 4);
        assert!(!source.is_at_end().unwrap());
    }
}
