//! Decodes a recording into a trace, up to its last whole group.

use std::io::{BufRead, Read};

use super::super::body::Body;
use super::super::header::CONTEXT_MAX;
use super::super::magic::WINDOW_LOG_MAX;
use super::super::selection::{Ask, Promise, SelectionTrace};
use super::super::source::{Source, before, malformed, unreadable};
use super::{Frames, MARK, MARK_BYTES, Recording, mark};
use crate::error::{Error, Kind, Result};

/// The most bytes that are ignored after a damaged mark, or after a damaged frame.
const LOST_MAX: u64 = 1 << 26;

/// The piece that follows the groups read so far.
enum Piece {
    /// One more group.
    Group,
    /// The end: the recording is finished.
    End,
}

/// The groups of a recording read so far.
struct Groups<'a> {
    recording: &'a Recording,
    body: Body,
    steps: u32,
    members_max: u64,
    ask: &'a Ask<'a>,
}

impl<'a> Groups<'a> {
    fn new(recording: &'a Recording, members_max: u64, ask: &'a Ask<'a>) -> Self {
        // Memory grows with the decoded steps; the possible number of steps only limits it.
        let most = recording.end().saturating_sub(recording.first_position);
        Groups { recording, body: Body::new(recording.header(most), members_max), steps: 0, members_max, ask }
    }

    /// Decodes the next group or the end.
    fn piece(&mut self, source: &mut Source<'_>) -> Result<Piece> {
        let place = source.offset();
        let (passed, count) = (source.u32()?, source.u32()?);
        if passed != self.steps {
            return Err(malformed("a group, or the end, has a wrong count of the steps before it", place)
                .with("value", passed)
                .with("steps", self.steps));
        }
        if count == 0 {
            return Ok(Piece::End);
        }
        for _ in 0..count {
            self.step(source)?;
        }
        Ok(Piece::Group)
    }

    fn step(&mut self, source: &mut Source<'_>) -> Result<()> {
        let step = self.steps;
        if self.body.header.position(step) >= self.recording.end().min(CONTEXT_MAX) {
            return Err(malformed("the steps end beyond the context", source.offset())
                .with("context", self.recording.end()));
        }
        let members = self.body.header.members_before(step + 1);
        if members > self.members_max {
            return Err(Error::new(Kind::Overflow, "read trace")
                .at("the recording is too large")
                .with("members", members)
                .with("most", self.members_max)
                .hint("record fewer steps or layers in a file"));
        }
        (self.ask)(Promise::Recording(members))?;
        for layer in 0..self.recording.layers {
            let from = self.recording.source(layer);
            let decoded = match from == layer {
                true => self.body.set(source, step, layer),
                false => self.body.again(step, from),
            };
            decoded.map_err(|e| before(e, &format!("step {step}, layer {layer}: ")))?;
        }
        self.steps += 1;
        Ok(())
    }

    /// The trace; `unfinished` if the end is missing.
    fn trace(self, unfinished: Option<u64>) -> Result<SelectionTrace> {
        if self.steps == 0 {
            let e = Error::new(Kind::BadFormat, "read trace")
                .at("the recording has no whole group of steps")
                .hint("nothing was recorded in this file, or all of it was lost: record again");
            return Err(unfinished.map_or(e.clone(), |bytes| e.with("bytes left off", bytes)));
        }
        let mut header = self.recording.header(self.steps);
        header.check(self.members_max)?;
        header.unfinished = unfinished;
        Ok(self.body.trace(header))
    }
}

/// Reads the groups of an unpacked recording. It has no checksums, so it must be finished.
pub(in crate::trace) fn plain(
    source: &mut Source<'_>,
    recording: &Recording,
    members_max: u64,
    ask: &Ask<'_>,
) -> Result<SelectionTrace> {
    let mut groups = Groups::new(recording, members_max, ask);
    while let Piece::Group = groups.piece(source)? {}
    match source.is_at_end()? {
        true => groups.trace(None),
        false => Err(malformed("bytes follow the end", source.offset())),
    }
}

/// Reads the marks and frames after the first one, which held `unpacked` bytes.
pub(in crate::trace) fn packed<R: BufRead>(
    file: &mut R,
    mut unpacked: u64,
    recording: &Recording,
    members_max: u64,
    ask: &Ask<'_>,
) -> Result<SelectionTrace> {
    let mut groups = Groups::new(recording, members_max, ask);
    loop {
        let steps = groups.steps;
        let mut start = Vec::with_capacity(MARK_BYTES);
        let io = |e: std::io::Error| unreadable(&e, unpacked);
        (&mut *file).take(MARK_BYTES as u64).read_to_end(&mut start).map_err(io)?;
        let Some(length) = marked(&start) else {
            return match lost(file, start, unpacked)? {
                Some(bytes) => groups.trace(Some(bytes)),
                None => Err(behind(malformed("neither a group nor the end follows", unpacked), steps)),
            };
        };
        let mut part = (&mut *file).take(u64::from(length));
        let damage = match frame(&mut part, &mut unpacked, &mut groups).map_err(|e| behind(e, steps))? {
            Ok(Piece::Group) => continue,
            Ok(Piece::End) => {
                return match skip(&mut (&mut *file).take(1), unpacked)? {
                    0 => groups.trace(None),
                    _ => Err(behind(malformed("bytes follow the end", unpacked), steps)),
                };
            }
            Err(Damage(e)) => e,
        };
        groups.body.forget_from(steps);
        groups.steps = steps;
        skip(&mut part, unpacked)?;
        let read = MARK_BYTES as u64 + u64::from(length) - part.limit();
        return match lost(file, Vec::new(), unpacked)? {
            Some(bytes) => groups.trace(Some(read + bytes)),
            None => Err(behind(damage, steps)),
        };
    }
}

/// Reads to the end. Returns the number of bytes.
fn skip(bytes: &mut impl Read, unpacked: u64) -> Result<u64> {
    std::io::copy(bytes, &mut std::io::sink()).map_err(|e| unreadable(&e, unpacked))
}

/// The length in `bytes`, if they are a mark.
fn marked(bytes: &[u8]) -> Option<u32> {
    let [.., a, b, c, d, _, _, _, _] = bytes.first_chunk::<MARK_BYTES>()?;
    let length = u32::from_le_bytes([*a, *b, *c, *d]);
    (bytes == mark(length)).then_some(length)
}

/// Reads the bytes after the last good piece, which begin with `window`. Returns their number, unless
/// they contain a mark, or there are more than [`LOST_MAX`].
fn lost(file: &mut impl BufRead, mut window: Vec<u8>, unpacked: u64) -> Result<Option<u64>> {
    let mut count = window.len() as u64;
    while count <= LOST_MAX {
        let read = (&mut *file).take(LOST_MAX >> 8).read_to_end(&mut window);
        let read = read.map_err(|e| unreadable(&e, unpacked))? as u64;
        if window.windows(MARK_BYTES).any(|bytes| bytes.starts_with(&MARK) && marked(bytes).is_some()) {
            return Ok(None);
        }
        if read == 0 {
            return Ok(Some(count));
        }
        count += read;
        // A mark may have begun.
        window.drain(..window.len().saturating_sub(MARK_BYTES - 1));
    }
    Ok(None)
}

/// The error of a file that is wrong after `steps` good steps.
fn behind(e: Error, steps: u32) -> Error {
    match e.kind() {
        Kind::BadFormat => e
            .with("whole steps before", steps)
            .hint("the file was changed after it was recorded: use an unchanged copy"),
        _ => e,
    }
}

/// Damage after the recorder wrote a frame: a truncated frame, or a wrong checksum. A frame with a valid checksum and
/// contradictory content is a separate error.
struct Damage(Error);

/// Decodes the single frame of `part`.
fn frame<R: BufRead>(
    part: &mut std::io::Take<&mut R>,
    unpacked: &mut u64,
    groups: &mut Groups<'_>,
) -> Result<Result<Piece, Damage>> {
    let io = |e: std::io::Error| unreadable(&e, *unpacked);
    let mut frame = zstd::stream::read::Decoder::with_buffer(&mut *part).map_err(io)?.single_frame();
    frame.window_log_max(WINDOW_LOG_MAX).map_err(io)?;
    let source = &mut Source::behind(&mut frame, *unpacked);
    let piece = groups.piece(source).and_then(|piece| match source.is_at_end()? {
        true => Ok(piece),
        false => Err(malformed("bytes follow the steps of a group", source.offset())),
    });
    if piece.as_ref().is_err_and(|e| matches!(e.kind(), Kind::Io | Kind::OutOfMemory)) {
        return piece.map(Ok);
    }
    // The checksum is compared at the end of a frame. A frame that goes on and on is not a recorder's group.
    let ended = match source.skip(u64::from(Frames::BYTES_MAX)) {
        Ok(ended) => ended,
        Err(e) if e.kind() == Kind::BadFormat => return Ok(Err(Damage(e))),
        Err(e) => return Err(e),
    };
    *unpacked = source.offset();
    drop(frame);
    match part.limit() > 0 && ended {
        true => Ok(Err(Damage(malformed("a frame is shorter than its mark says", *unpacked)))),
        false => piece.map(Ok),
    }
}
