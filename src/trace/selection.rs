//! A selection trace in memory: every set of every step and layer, ascending, in one flat vector.
//!
//! All sets of a step have the same size, min(k, position + 1), so a set's place follows from its step and
//! layer, without a table of offsets. A set is decoded from its predecessor in the same vector by
//! one merge of three ascending lists (the old set, the added positions, the dropped ranks), which detects
//! every contradiction.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::header::{FORMAT, Header, MEMBERS_MAX};
use super::recording::{self, RECORDING, Recording};
use super::source::{Source, malformed, unreadable};
use super::stamp::{Stamp, unreadable_file};
use super::unknown::unknown;
use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// The first bytes of a zstd frame.
pub(super) const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// The largest window that a frame may require, as a power of two: 128 MiB, the format's recommended limit.
pub(super) const WINDOW_LOG_MAX: u32 = 27;

/// Bytes by which a file is recognised.
const START: u64 = 64;

/// Bytes of the format's name before its version.
const NAME: usize = FORMAT.len() - 1;

/// The longest header in bytes.
pub(super) const HEADER_MAX: u32 = 1 << 20;

/// The least growth of memory, in members.
const GROWTH_LEAST: u64 = 1 << 12;

/// The memory that a file will need, before it is taken: see [`SelectionTrace::read_asking`].
#[derive(Clone, Copy, Debug)]
pub enum Promise<'a> {
    /// A finished trace, with its header; nothing is decoded yet.
    Trace(&'a Header),
    /// A recording, which grows step by step: the number of its positions including the next step's.
    Recording(u64),
}

/// The function that is asked.
pub(super) type Ask<'a> = dyn Fn(Promise<'_>) -> Result<()> + 'a;

/// The selections of one sequence, step by step and layer by layer. Checked: every set ascends strictly,
/// has min(k, position + 1) positions, and none beyond its query's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectionTrace {
    header: Header,
    members: Vec<u32>,
}

impl SelectionTrace {
    /// A trace of `members`: all sets one after the other, by step, then by layer, each ascending.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] if the header contradicts itself or the members, or if a set is invalid.
    pub fn new(header: Header, members: Vec<u32>) -> Result<SelectionTrace> {
        header.check(MEMBERS_MAX)?;
        let wanted = header.members_before(header.steps);
        if members.len() as u64 != wanted {
            return Err(Error::new(Kind::BadFormat, "new trace")
                .at("number of members")
                .with("value", members.len() as u64)
                .with("wanted", wanted));
        }
        let trace = SelectionTrace { header, members };
        for step in 0..trace.header.steps {
            for layer in 0..trace.header.layers {
                let set = trace.selection(step, layer);
                let ascends = set.array_windows().all(|[a, b]| a < b);
                if !ascends || set.last().is_some_and(|p| *p > trace.header.position(step)) {
                    return Err(Error::new(Kind::BadFormat, "new trace")
                        .at("a set does not ascend to its query's position at most")
                        .with("step", step)
                        .with("layer", layer));
                }
            }
        }
        Ok(trace)
    }

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

    /// Header and members, which [`SelectionTrace::of_parts`] joins again.
    pub(super) fn into_parts(self) -> (Header, Vec<u32>) {
        (self.header, self.members)
    }

    /// A trace of parts that are known to match.
    pub(super) fn of_parts(header: Header, members: Vec<u32>) -> SelectionTrace {
        SelectionTrace { header, members }
    }

    /// The trace's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The positions that `step` selected in `layer` (both from 0), ascending; empty for a step or layer
    /// that the trace does not have.
    pub fn selection(&self, step: u32, layer: u32) -> &[u32] {
        if step >= self.header.steps || layer >= self.header.layers {
            return &[];
        }
        let size = self.header.set_size(step) as usize;
        let start = self.header.members_before(step) as usize + layer as usize * size;
        self.members.get(start..start + size).unwrap_or_default()
    }

    /// The number of selected positions of all steps and layers.
    pub fn members(&self) -> u64 {
        self.members.len() as u64
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
        Ok(trace) if trace.header.unfinished.is_some() => Ok(trace),
        // A change of the file explains the failure.
        Err(e) if e.kind() != Kind::BadFormat => Err(e),
        read => changed.and(read),
    }
}

/// The error with more text before its place.
pub(super) fn before(e: Error, prefix: &str) -> Error {
    let place = format!("{prefix}{}", e.place());
    e.at(place)
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

/// The sets decoded so far, and buffers for the current one.
pub(super) struct Body {
    pub header: Header,
    /// The possible number of members.
    most: u64,
    members: Vec<u32>,
    added: Vec<u32>,
    dropped: Vec<u32>,
    set: Vec<u32>,
}

impl Body {
    /// For the sets of `header`, in no more than `most` members.
    pub fn new(header: Header, most: u64) -> Self {
        let most = most.min(header.members_before(header.steps));
        Body { header, most, members: Vec::new(), added: Vec::new(), dropped: Vec::new(), set: Vec::new() }
    }

    /// Decodes the set of `step` and `layer`, the next in the file, and appends it.
    pub fn set(&mut self, source: &mut Source<'_>, step: u32, layer: u32) -> Result<()> {
        let size = self.header.set_size(step) as usize;
        let place = source.offset();
        let (adds, drops) = (usize::from(source.u16()?), usize::from(source.u16()?));
        let old = match step.checked_sub(1) {
            None => &[][..],
            Some(prior) => {
                let old_size = self.header.set_size(prior) as usize;
                let start = self.header.members_before(prior) as usize + layer as usize * old_size;
                self.members.get(start..start + old_size).unwrap_or_default()
            }
        };
        if drops > old.len() || old.len() - drops + adds != size {
            return Err(malformed("the set has the wrong size", place)
                .with("value", (old.len() + adds).saturating_sub(drops) as u64)
                .with("wanted", size as u64));
        }
        let position = u64::from(self.header.position(step));
        let beyond = "a position lies beyond the query's own";
        ascending(source, adds, position, beyond, &mut self.added)?;
        let ranks = (old.len() as u64).saturating_sub(1);
        ascending(source, drops, ranks, "a rank lies beyond the set", &mut self.dropped)?;
        merge(old, &self.added, &self.dropped, &mut self.set).map_err(|twice| {
            malformed("an added position was in the set already", place).with("position", twice)
        })?;
        self.append()
    }

    /// Appends the set of `layer` at `step` again, as the next layer's.
    pub fn again(&mut self, step: u32, layer: u32) -> Result<()> {
        let size = self.header.set_size(step) as usize;
        let start = self.header.members_before(step) as usize + layer as usize * size;
        self.set.clear();
        self.set.extend_from_slice(self.members.get(start..start + size).unwrap_or_default());
        self.append()
    }

    /// Discards the sets of `step` and of all later steps.
    pub fn forget_from(&mut self, step: u32) {
        self.members.truncate(self.header.members_before(step) as usize);
    }

    /// The trace of the sets decoded, under `header`.
    pub fn trace(self, header: Header) -> SelectionTrace {
        SelectionTrace::of_parts(header, self.members)
    }

    /// Appends the current set. Memory at most doubles, and never exceeds the possible members.
    fn append(&mut self) -> Result<()> {
        let length = self.members.len();
        if self.members.capacity() - length < self.set.len() {
            let growth = (length as u64).max(GROWTH_LEAST).min(self.most.saturating_sub(length as u64));
            let growth = (growth as usize).max(self.set.len());
            self.members.try_reserve_exact(growth).map_err(|_| {
                Error::new(Kind::OutOfMemory, "read trace")
                    .at("the decoded trace")
                    .with("bytes", 4 * (length + growth) as u64)
                    .with("whole at most", 4 * self.most)
                    .hint("free memory, or cut the trace to fewer steps or layers")
            })?;
        }
        self.members.extend_from_slice(&self.set);
        Ok(())
    }
}

/// Reads `count` gap-coded values, none above `most`, into `out`.
fn ascending(
    source: &mut Source<'_>,
    count: usize,
    most: u64,
    beyond: &'static str,
    out: &mut Vec<u32>,
) -> Result<()> {
    out.clear();
    let mut least = 0_u64;
    for _ in 0..count {
        let place = source.offset();
        let value = least + u64::from(source.varint()?);
        if value > most {
            return Err(malformed(beyond, place).with("value", value).with("most", most));
        }
        out.push(value as u32);
        least = value + 1;
    }
    Ok(())
}

/// Writes `old` without the ranks `dropped`, and with `added` inserted, ascending, to `out`. All lists ascend.
/// Fails with a position that is both old and added.
fn merge(old: &[u32], added: &[u32], dropped: &[u32], out: &mut Vec<u32>) -> std::result::Result<(), u32> {
    out.clear();
    let mut added = added.iter().copied().peekable();
    let mut dropped = dropped.iter().map(|rank| *rank as usize).peekable();
    for (rank, position) in old.iter().copied().enumerate() {
        while let Some(new) = added.next_if(|new| *new < position) {
            out.push(new);
        }
        if added.peek() == Some(&position) {
            return Err(position);
        }
        if dropped.next_if_eq(&rank).is_none() {
            out.push(position);
        }
    }
    out.extend(added);
    Ok(())
}

#[cfg(test)]
#[path = "selection_tests.rs"]
mod tests;
