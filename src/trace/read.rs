//! Reads a file as a selection trace: a finished one or a recording, packed by zstd or plain, told apart by its first
//! bytes. Any bytes are allowed: a file that is neither, or contradicts itself, is an error with its place.
//!
//! A file may change while it is read, so its stamp is compared before and after. Only a recording may grow.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::body::Body;
use super::header::{FORMAT, HEADER_MAX, Header, MEMBERS_MAX};
use super::magic::{WINDOW_LOG_MAX, ZSTD_MAGIC};
use super::recording::{self, RECORDING, Recording};
use super::selection::{Ask, Promise, SelectionTrace};
use super::source::{Source, before, malformed, unreadable};
use super::stamp::{Stamp, unreadable_file};
use super::unknown::unknown;
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// Bytes by which a file is recognised.
const START: u64 = 64;

/// Bytes of the format's name before its version.
const NAME: usize = FORMAT.len() - 1;

impl SelectionTrace {
    /// Reads the file at `path`, a trace (TOPKTRC1) or a recording (TOPKTRC2), packed by zstd or plain, distinguished
    /// by its first bytes. An unfinished recording is read up to its last whole group, and [`Header::unfinished`] says
    /// so.
    ///
    /// # Errors
    /// [`Kind::Io`] if the file cannot be read, or was changed meanwhile; [`Kind::BadVersion`] for another version
    /// of the format; [`Kind::BadFormat`] for all other errors, with the file, the step and layer, and the byte of the
    /// decompressed content; [`Kind::OutOfMemory`].
    pub fn read(path: &Path) -> Result<SelectionTrace> {
        SelectionTrace::read_asking(path, |_| Ok(()))
    }

    /// As [`SelectionTrace::read`]; calls `ask` before memory is taken: once after the header of a finished trace, and
    /// before each step of a recording. An error of `ask` ends the reading.
    ///
    /// # Errors
    /// Errors of [`SelectionTrace::read`], and those of `ask`, with the file.
    pub fn read_asking(path: &Path, ask: impl Fn(Promise<'_>) -> Result<()>) -> Result<SelectionTrace> {
        let read = || {
            let file = File::open(path).map_err(|e| unreadable_file(&e))?;
            of_file(file, &ask, || ())
        };
        read().map_err(|e| before(e, &format!("{}: ", echo(path.display()))))
    }

    /// Reads a trace from the bytes of a file. Any bytes are allowed, and none cause a panic.
    ///
    /// # Errors
    /// As [`SelectionTrace::read`].
    pub fn from_bytes(bytes: &[u8]) -> Result<SelectionTrace> {
        decode(&mut &bytes[..], MEMBERS_MAX, &|_| Ok(()))
    }

    /// As [`SelectionTrace::from_bytes`], for traces of at most `members` positions (4 bytes each).
    ///
    /// # Errors
    /// As [`SelectionTrace::read`].
    pub fn from_bytes_within(bytes: &[u8], members: u64) -> Result<SelectionTrace> {
        decode(&mut &bytes[..], members.min(MEMBERS_MAX), &|_| Ok(()))
    }
}

/// Reads an open file. Calls `meanwhile` after reading, before the check whether the file has changed.
fn of_file(file: File, ask: &Ask<'_>, meanwhile: impl FnOnce()) -> Result<SelectionTrace> {
    let stamp = Stamp::of(&file)?;
    let mut input = BufReader::new(file);
    let read = decode(&mut input, MEMBERS_MAX, ask);
    meanwhile();
    let changed = stamp.check(input.get_ref());
    match read {
        // It grows while it is recorded. The part read consists of whole groups, each with its checksum.
        Ok(trace) if trace.header().unfinished.is_some() => Ok(trace),
        // A change of the file explains the failure.
        Err(e) if e.kind() != Kind::BadFormat => Err(e),
        read => changed.and(read),
    }
}

/// Decodes a file's bytes, compressed or not.
fn decode(file: &mut dyn BufRead, members_max: u64, ask: &Ask<'_>) -> Result<SelectionTrace> {
    let mut start = Vec::with_capacity(START as usize);
    (&mut *file).take(START).read_to_end(&mut start).map_err(|e| unreadable(&e, 0))?;
    if start.is_empty() {
        return Err(Error::new(Kind::BadFormat, "read trace").at("the file is empty"));
    }
    let compressed = start.starts_with(&ZSTD_MAGIC);
    let plain = start.iter().zip(FORMAT.as_bytes()).take(NAME).all(|(a, b)| a == b);
    if !compressed && !plain {
        return Err(unknown(&start));
    }
    let mut whole = start.as_slice().chain(file);
    if !compressed {
        let source = &mut Source::new(&mut whole);
        return match opening(source, members_max)? {
            Opening::Trace(header) => body(source, header, members_max, ask),
            Opening::Recording(recording) => recording::plain(source, &recording, members_max, ask),
        };
    }
    let mut frame =
        zstd::stream::read::Decoder::with_buffer(whole).map_err(|e| unreadable(&e, 0))?.single_frame();
    frame.window_log_max(WINDOW_LOG_MAX).map_err(|e| unreadable(&e, 0))?;
    let source = &mut Source::new(&mut frame);
    match opening(source, members_max)? {
        Opening::Trace(header) => {
            let trace = body(source, header, members_max, ask)?;
            let rest = frame.finish().fill_buf().map_err(|e| unreadable(&e, 0))?.len();
            if rest > 0 {
                return Err(Error::new(Kind::BadFormat, "read trace").at("bytes follow the zstd frame"));
            }
            Ok(trace)
        }
        Opening::Recording(recording) => {
            if !source.is_at_end()? {
                return Err(malformed("the first frame continues after the header", source.offset()));
            }
            let unpacked = source.offset();
            recording::packed(&mut frame.finish(), unpacked, &recording, members_max, ask)
        }
    }
}

/// The beginning of a content.
enum Opening {
    Trace(Header),
    Recording(Recording),
}

/// Reads the magic and the header.
fn opening(source: &mut Source<'_>, members_max: u64) -> Result<Opening> {
    let mut magic = [0; FORMAT.len()];
    source.exact(&mut magic)?;
    let version = magic[NAME];
    if magic[..NAME] != FORMAT.as_bytes()[..NAME] || !version.is_ascii_digit() {
        return Err(unknown(&magic));
    }
    let records = magic == RECORDING.as_bytes();
    if magic != FORMAT.as_bytes() && !records {
        return Err(Error::new(Kind::BadVersion, "read trace")
            .at("format TOPKTRC")
            .with("version", version - b'0')
            .with("known up to", 2_u32));
    }
    let length = source.u32()?;
    if length > HEADER_MAX {
        return Err(malformed("the header is too long", 8).with("length", length).with("most", HEADER_MAX));
    }
    let mut json = vec![0; length as usize];
    source.exact(&mut json)?;
    Ok(match records {
        true => Opening::Recording(Recording::parse(&json)?),
        false => Opening::Trace(Header::parse(&json, members_max)?),
    })
}

/// Decodes the sets that a finished trace's header declares; nothing may follow them.
fn body(source: &mut Source<'_>, header: Header, members_max: u64, ask: &Ask<'_>) -> Result<SelectionTrace> {
    ask(Promise::Trace(&header))?;
    let mut body = Body::new(header, members_max);
    for step in 0..body.header.steps {
        for layer in 0..body.header.layers {
            body.set(source, step, layer).map_err(|e| before(e, &format!("step {step}, layer {layer}: ")))?;
        }
    }
    if !source.is_at_end()? {
        return Err(malformed("bytes follow the last step", source.offset()));
    }
    let header = body.header.clone();
    Ok(body.trace(header))
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
