//! A text trace as a stream of lines, plain or zstd, distinguished by the first bytes.
//!
//! One line is in memory at a time, at most [`LINE_MAX`] bytes of it. The limit is checked while the line is read, so
//! neither a line without an end nor a frame that unpacks to terabytes can take more. The lines have at most
//! [`CONTENT_MAX`] bytes, and at most [`BLANK_MAX`] of them are blank, so a small file that unpacks without end is
//! refused after a limited time.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use super::super::magic::{BYTE_ORDER_MARK, GZIP_MAGIC, WINDOW_LOG_MAX, ZSTD_MAGIC};
use super::super::source::unreadable;
use super::super::stamp::{Stamp, unreadable_file};
use super::super::unknown::unknown;
use crate::error::{Error, Kind, Result};

/// The longest line in bytes: 64 MiB. Sessions of coding agents have lines of some 4 MB.
pub const LINE_MAX: usize = 1 << 26;

/// The most bytes of an uncompressed text trace: 8 GiB. The most references that a trace may have take less.
pub const CONTENT_MAX: u64 = 1 << 33;

/// The most blank lines of a text trace: 2^20.
pub const BLANK_MAX: u64 = 1 << 20;

/// Lines up to this many bytes are parsed without checking for free memory.
const SHORT: usize = 1 << 16;

/// The most bytes that parsing takes for each byte of a line: the text without its escapes, and an error that repeats
/// it with them, each in a buffer that has doubled.
const PARSED: usize = 16;

/// Bytes read at a time.
const BUFFER: usize = 1 << 16;

pub(super) fn malformed(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::BadFormat, "read trace").at(what)
}

/// Opens a file. Returns the uncompressed content.
pub(super) fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let file = File::open(path).map_err(|e| unreadable_file(&e))?;
    Stamp::of(&file)?;
    unpacked(BufReader::with_capacity(BUFFER, file))
}

/// Calls `read` with the file's uncompressed content.
///
/// # Errors
/// Errors of `read`; [`Kind::Io`] if the file was changed meanwhile.
pub(super) fn whole<T>(path: &Path, read: impl FnOnce(Box<dyn BufRead>) -> Result<T>) -> Result<T> {
    let io = |e: io::Error| unreadable_file(&e);
    let file = File::open(path).map_err(io)?;
    let stamp = Stamp::of(&file)?;
    let same = file.try_clone().map_err(io)?;
    let result = unpacked(BufReader::with_capacity(BUFFER, file)).and_then(read);
    match result {
        Err(e) if e.kind() != Kind::BadFormat => Err(e),
        // A change of the file explains the failure.
        result => stamp.check(&same).and(result),
    }
}

/// The uncompressed content of `file`.
pub(super) fn unpacked<'a>(mut file: impl BufRead + 'a) -> Result<Box<dyn BufRead + 'a>> {
    let mut start = Vec::with_capacity(ZSTD_MAGIC.len());
    (&mut file).take(ZSTD_MAGIC.len() as u64).read_to_end(&mut start).map_err(|e| unreadable(&e, 0))?;
    if start.starts_with(&GZIP_MAGIC) {
        return Err(unknown(&start));
    }
    let is_zstd = start == ZSTD_MAGIC;
    let whole = io::Cursor::new(start).chain(file);
    if !is_zstd {
        return Ok(Box::new(whole));
    }
    let mut frames = zstd::stream::read::Decoder::with_buffer(whole).map_err(|e| unreadable(&e, 0))?;
    frames.window_log_max(WINDOW_LOG_MAX).map_err(|e| unreadable(&e, 0))?;
    Ok(Box::new(BufReader::with_capacity(BUFFER, frames)))
}

/// Skips white space, at most [`LINE_MAX`] bytes of it.
pub(super) fn pass_blanks(input: &mut dyn BufRead) -> Result<()> {
    let mut passed = 0;
    loop {
        let bytes = match input.fill_buf() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(unreadable(&e, passed as u64)),
            Ok(bytes) => bytes,
        };
        let blank = bytes.len() - bytes.trim_ascii_start().len();
        let ended = blank < bytes.len() || bytes.is_empty();
        input.consume(blank);
        passed += blank;
        if ended {
            return Ok(());
        }
        if passed > LINE_MAX {
            return Err(malformed("the file begins with too many blanks")
                .with("most", LINE_MAX as u64)
                .hint("remove the blank lines"));
        }
    }
}

/// The most characters of the JSON reader's message in an error.
const WORDS: usize = 120;

/// A line and its place.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    /// Its bytes, without the line end.
    pub bytes: &'a [u8],
    /// Its number, from 1.
    pub number: u64,
    /// Whether the file continues after it, or ended with a line end.
    pub whole: bool,
}

impl Line<'_> {
    /// An error at `column`, from 1, in bytes.
    pub fn wrong(&self, what: impl Into<std::borrow::Cow<'static, str>>, column: usize) -> Error {
        malformed(what).with("line", self.number).with("column", column as u64)
    }

    /// The column of `part`, a piece of this line.
    pub fn column(&self, part: &str) -> usize {
        (part.as_ptr() as usize).wrapping_sub(self.bytes.as_ptr() as usize).wrapping_add(1)
    }

    /// Checks that there is memory to parse it. Without memory the JSON reader aborts the process.
    pub fn room(self) -> Result<Self> {
        if self.bytes.len() > SHORT {
            let mut room: Vec<u8> = Vec::new();
            let bytes = PARSED * self.bytes.len();
            room.try_reserve_exact(bytes).map_err(|_| {
                Error::new(Kind::OutOfMemory, "read trace")
                    .at("parsing a line")
                    .with("line", self.number)
                    .with("bytes", bytes as u64)
                    .hint("free memory")
            })?;
        }
        Ok(self)
    }

    /// The error of a trace that ends in this line.
    pub fn cut(&self, column: usize) -> Error {
        self.wrong("the trace ends in the middle of a line", column)
            .hint("remove the last line, or get the complete file")
    }

    /// The JSON reader's error.
    pub fn json(&self, e: &serde_json::Error) -> Error {
        self.json_behind(e, 0)
    }

    /// The JSON reader's error in a piece of the line that begins after `passed` bytes.
    pub fn json_behind(&self, e: &serde_json::Error, passed: usize) -> Error {
        let column = passed + e.column();
        if e.is_eof() && !self.whole {
            return self.cut(column);
        }
        let text = e.to_string();
        let words = text.rsplit_once(" at line ").map_or(text.as_str(), |(words, _)| words);
        // The message repeats the value that it did not expect, however long that is.
        let cut = words.char_indices().nth(WORDS).map_or(words, |(end, _)| &words[..end]);
        let more = if cut.len() < words.len() { "..." } else { "" };
        self.wrong(format!("{cut}{more}"), column)
    }
}

/// Parses decimal digits.
pub(super) fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.checked_sub(b'0').filter(|d| *d < 10)?;
        value.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// The lines of a content, without blank ones.
pub(super) struct Lines<'a> {
    input: Box<dyn BufRead + 'a>,
    line: Vec<u8>,
    number: u64,
    passed: u64,
    blank: u64,
    /// The most bytes.
    most: u64,
}

impl<'a> Lines<'a> {
    pub fn new(input: Box<dyn BufRead + 'a>) -> Self {
        Lines::within(input, CONTENT_MAX)
    }

    /// The lines of a content of at most `most` bytes.
    pub fn within(input: Box<dyn BufRead + 'a>, most: u64) -> Self {
        Lines { input, line: Vec::new(), number: 0, passed: 0, blank: 0, most }
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> Result<Option<Line<'_>>> {
        loop {
            let (any, whole) = self.read()?;
            if !any {
                return Ok(None);
            }
            if self.number == 1 && self.line.starts_with(BYTE_ORDER_MARK) {
                self.line.drain(..BYTE_ORDER_MARK.len());
            }
            if !self.line.trim_ascii().is_empty() {
                return Line { bytes: &self.line, number: self.number, whole }.room().map(Some);
            }
            self.blank += 1;
            if self.blank > BLANK_MAX {
                return Err(malformed("too many blank lines")
                    .with("line", self.number)
                    .with("most", BLANK_MAX)
                    .hint("remove the blank lines"));
            }
        }
    }

    /// Reads one line. Returns whether there was one, and whether a line end closed it.
    fn read(&mut self) -> Result<(bool, bool)> {
        self.line.clear();
        self.number += 1;
        loop {
            let bytes = match self.input.fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(unreadable(&e, self.passed).with("line", self.number)),
                Ok(bytes) => bytes,
            };
            if bytes.is_empty() {
                return Ok((!self.line.is_empty(), false));
            }
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let piece = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
            if self.line.len() + piece.len() > LINE_MAX {
                return Err(malformed("the line is too long")
                    .with("line", self.number)
                    .with("column", LINE_MAX as u64 + 1)
                    .with("most", LINE_MAX as u64));
            }
            self.line.try_reserve(piece.len()).map_err(|_| {
                Error::new(Kind::OutOfMemory, "read trace").at("a line").with("line", self.number)
            })?;
            self.line.extend_from_slice(piece);
            let taken = piece.len() + usize::from(end.is_some());
            self.input.consume(taken);
            self.passed += taken as u64;
            if self.passed > self.most {
                return Err(malformed("the trace is too long without its compression")
                    .with("line", self.number)
                    .with("most bytes", self.most)
                    .hint("cut the trace into parts"));
            }
            if end.is_some() {
                return Ok((true, true));
            }
        }
    }
}
