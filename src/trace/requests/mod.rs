//! Request traces: which blocks of tokens the prompts of a service consisted of, in order of arrival. The module reads
//! four formats and [writes](RequestWriter) one.
//!
//! It reads them as published, plain or as zstd, distinguished by content:
//!
//! | format | a line | block ids |
//! |---|---|---|
//! | Mooncake JSONL | a request | prefix blocks of 512 tokens, or of the lines' `block_size`, comparable everywhere |
//! | sessions of kv-cache-tester | a session with `requests` | prefix blocks of `block_size` tokens, local to a line |
//! | RAGPulse JSONL | a request | pieces of text, five lists in prompt order; lengths are in side files |
//! | Azure CSV | a request | none: lengths only |
//!
//! A *prefix block* id names the block and everything before it, so it cannot repeat inside a request. A
//! RAGPulse id names a piece by its content: it may appear twice, and the same piece after another one has
//! the same id. In a session, an element of type "subagent" contains requests of its own. By default they are
//! left out, as in the published counts; the element itself counts as a request without blocks.
//!
//! Times of a session are relative. A [`RequestTrace`] interleaves sessions by time, as if all began together;
//! [`Options::one_after_another`] keeps the file's order.
//!
//! **Limits.** [`each_request`] holds one line (at most [`LINE_MAX`] bytes) and a table of the distinct ids;
//! [`RequestTrace`] keeps 4 bytes for each reference and 12 for each request. It reads at most [`REFERENCES_MAX`]
//! references, [`REQUESTS_MAX`] requests, [`BLANK_MAX`] blank lines and [`CONTENT_MAX`] uncompressed bytes, so the
//! time for a file is limited, however far it unpacks.
//!
//! **What is refused**, with line and column: a line in another format, more ids than the length
//! allows, an id that repeats inside a request, a timestamp earlier than the previous one, a trace that ends
//! in the middle of a line, a line that is too long. RAGPulse as published has repetitions and one late
//! timestamp: in that format they are counted in [`Notes`], and the file's order is kept.

mod azure;
mod input;
mod interleave;
mod intern;
mod ledger;
mod parse;
mod request;
mod session;
mod writer;

use std::collections::HashMap;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

pub use input::{BLANK_MAX, CONTENT_MAX, LINE_MAX};
pub use ledger::Taken;
pub use request::{Format, Notes, Options, REFERENCES_MAX, REQUESTS_MAX, Request};
pub use writer::{Arrival, RequestWriter};

use crate::error::{Error, Kind, Result};
use crate::text::echo;
use crate::trace::magic::{AZURE, BYTE_ORDER_MARK};
use crate::trace::requests::input::{Line, Lines, open, unpacked};
use crate::trace::requests::ledger::{Ledger, Part, doubled, no_room};
use crate::trace::requests::parse::{Parser, Sink};
use crate::trace::requests::request::Record;
use crate::trace::source::unreadable;

/// The most pieces in side files: 2^24.
const PIECES_MAX: u64 = 1 << 24;

/// Bytes after white space by which a file is recognised.
const START: usize = 64;

/// The properties of a whole trace, after it was read.
struct Whole {
    format: Format,
    block_tokens: Option<u32>,
    piece_tokens: Vec<u32>,
    distinct: u32,
    notes: Notes,
}

/// Whether the file at `path` is a selection trace or a request trace, by its first bytes; `None` if
/// it is neither.
///
/// # Errors
/// [`Kind::Io`] if it cannot be read, [`Kind::BadFormat`] for a damaged frame and for gzip.
pub fn is_request_trace(path: &Path) -> Result<Option<bool>> {
    let look = || {
        let mut input = open(path)?;
        let mut start = Vec::new();
        let mark = BYTE_ORDER_MARK.len() as u64;
        input.by_ref().take(mark).read_to_end(&mut start).map_err(|e| unreadable(&e, 0))?;
        if start == BYTE_ORDER_MARK {
            start.clear();
        }
        let blank = start.len() - start.trim_ascii_start().len();
        start.drain(..blank);
        if start.is_empty() {
            input::pass_blanks(&mut input)?;
        }
        let most = START.saturating_sub(start.len()) as u64;
        input.take(most).read_to_end(&mut start).map_err(|e| unreadable(&e, 0))?;
        let text = start.as_slice();
        Ok(match text.first() {
            Some(b'{') => Some(true),
            _ if text.starts_with(AZURE) => Some(true),
            _ if text.starts_with(b"TOPKTRC") => Some(false),
            _ => None,
        })
    };
    look().map_err(|e| named(e, path))
}

fn named(e: Error, path: &Path) -> Error {
    let place = format!("{}: {}", echo(path.display()), e.place());
    e.at(place)
}

/// Passes every request of the file at `path` to `sink`, in order; an error of the sink ends the reading.
///
/// # Errors
/// [`Kind::Io`] if a file cannot be read; [`Kind::BadFormat`] with line and column (see the module's
/// head); [`Kind::Overflow`] for a trace beyond the limits; errors of the sink.
pub fn each_request(
    path: &Path,
    options: &Options,
    mut sink: impl FnMut(Request<'_>) -> Result<()>,
) -> Result<Notes> {
    let ledger = Ledger::new(&|_| Ok(()));
    let lengths = piece_lengths(&options.piece_lengths, &ledger)?;
    let whole = input::whole(path, |input| stream(input, options, lengths, &ledger, &mut sink));
    whole.map(|whole| whole.notes).map_err(|e| named(e, path))
}

/// The lengths from all side files, by id.
fn piece_lengths(paths: &[PathBuf], ledger: &Ledger<'_>) -> Result<HashMap<u64, u32>> {
    let mut lengths = HashMap::new();
    for path in paths {
        input::whole(path, |input| pieces(input, &mut lengths, ledger)).map_err(|e| named(e, path))?;
    }
    Ok(lengths)
}

/// Adds the lengths from one side file.
fn pieces(input: Box<dyn BufRead>, lengths: &mut HashMap<u64, u32>, ledger: &Ledger<'_>) -> Result<()> {
    let mut lines = Lines::new(input);
    let mut any = false;
    while let Some(line) = lines.next()? {
        let (id, tokens) = parse::piece_length(line)?;
        if lengths.len() as u64 >= PIECES_MAX {
            return Err(parse::too_much("too many pieces", line, PIECES_MAX));
        }
        if lengths.len() == lengths.capacity() {
            ledger.set(Part::Lengths, doubled(lengths.capacity(), size_of::<(u64, u32)>()))?;
        }
        lengths.try_reserve(1).map_err(|_| no_room("the pieces' lengths"))?;
        if lengths.insert(id, tokens).is_some_and(|known| known != tokens) {
            return Err(line.wrong("the side files give this piece two lengths", 1).with("id", id));
        }
        any = true;
    }
    match any {
        true => Ok(()),
        false => Err(input::malformed("the side file names no piece").hint("name files with `token_length`")),
    }
}

/// Reads an uncompressed content to its end.
fn stream(
    input: Box<dyn BufRead + '_>,
    options: &Options,
    lengths: HashMap<u64, u32>,
    ledger: &Ledger<'_>,
    sink: &mut Sink<'_>,
) -> Result<Whole> {
    let mut parser = Parser::new(options, lengths, ledger);
    let mut lines = Lines::new(input);
    let mut format = None;
    let mut requests = |parser: &mut Parser<'_>, format, line: Line<'_>| match format {
        Format::Mooncake => parser.mooncake(line, sink),
        Format::Sessions => parser.session(line, sink),
        Format::RagPulse => parser.ragpulse(line, sink),
        Format::Azure => parser.azure(line, sink),
    };
    while let Some(line) = lines.next()? {
        match format {
            Some(format) => requests(&mut parser, format, line)?,
            None if line.bytes.starts_with(AZURE) => {
                azure::header(line)?;
                format = Some(Format::Azure);
            }
            None => {
                let json = parse::recognise(line)?;
                check(options, json)?;
                requests(&mut parser, *format.insert(json), line)?;
            }
        }
    }
    let format = format.ok_or_else(|| {
        Error::new(Kind::BadFormat, "read trace")
            .at("the file has no line that is not blank")
            .hint("nothing was recorded in this file, or it was truncated: pass another file")
    })?;
    check(options, format)?;
    Ok(Whole {
        format,
        block_tokens: parser.block_tokens,
        distinct: parser.interner.count(),
        piece_tokens: parser.piece_tokens,
        notes: parser.notes,
    })
}

/// Refuses options of other formats.
fn check(options: &Options, format: Format) -> Result<()> {
    let wrong = |what| Err(Error::new(Kind::InvalidConfig, "read trace").at(what).hint("leave it out"));
    if options.block_tokens == Some(0) {
        return wrong("a block of 0 tokens");
    }
    if options.block_tokens.is_some() && format != Format::Mooncake {
        return wrong("--block-tokens is for Mooncake traces");
    }
    if options.subagents && format != Format::Sessions {
        return wrong("--subagents is for sessions of kv-cache-tester");
    }
    if options.one_after_another && format != Format::Sessions {
        return wrong("--one-after-another is for sessions of kv-cache-tester");
    }
    if !options.piece_lengths.is_empty() && format != Format::RagPulse {
        return wrong("--block-lengths is for RAGPulse traces");
    }
    Ok(())
}

/// A request trace in memory, with dense ids.
#[derive(Debug)]
pub struct RequestTrace {
    format: Format,
    block_tokens: Option<u32>,
    piece_tokens: Vec<u32>,
    distinct: u32,
    notes: Notes,
    records: Vec<Record>,
    blocks: Vec<u32>,
    interleaved: bool,
}

impl RequestTrace {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// Errors of [`each_request`], and [`Kind::OutOfMemory`].
    pub fn read(path: &Path, options: &Options) -> Result<RequestTrace> {
        RequestTrace::read_asking(path, options, |_| Ok(()))
    }

    /// As [`RequestTrace::read`]; calls `ask` each time before more memory is taken. An error of `ask` ends the
    /// reading.
    ///
    /// # Errors
    /// Errors of [`RequestTrace::read`], and those of `ask`, with the file.
    pub fn read_asking(
        path: &Path,
        options: &Options,
        ask: impl Fn(Taken) -> Result<()>,
    ) -> Result<RequestTrace> {
        let ledger = Ledger::new(&ask);
        let lengths = piece_lengths(&options.piece_lengths, &ledger)?;
        input::whole(path, |input| collect(input, options, lengths, &ledger)).map_err(|e| named(e, path))
    }

    /// Reads a trace from the bytes of a file. Any bytes are allowed, and none cause a panic.
    ///
    /// # Errors
    /// As [`RequestTrace::read`].
    pub fn from_bytes(bytes: &[u8], options: &Options) -> Result<RequestTrace> {
        let ledger = Ledger::new(&|_| Ok(()));
        let lengths = piece_lengths(&options.piece_lengths, &ledger)?;
        collect(unpacked(bytes)?, options, lengths, &ledger)
    }

    /// Bytes of memory that the trace holds.
    pub fn bytes(&self) -> u64 {
        let words = self.blocks.capacity() + self.piece_tokens.capacity();
        (4 * words + size_of::<Record>() * self.records.capacity()) as u64
    }

    /// The format of the file.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Tokens of a block; `None` if blocks have individual lengths, or none are named.
    pub fn block_tokens(&self) -> Option<u32> {
        self.block_tokens
    }

    /// The number of distinct blocks; every block of a request is below it.
    pub fn distinct(&self) -> u32 {
        self.distinct
    }

    /// The reader's counts other than requests.
    pub fn notes(&self) -> Notes {
        self.notes
    }

    /// Whether sessions are interleaved, in the order of their requests' times; otherwise they follow one another,
    /// because that was requested or because all times are equal.
    pub fn interleaved(&self) -> bool {
        self.interleaved
    }

    /// Requests.
    pub fn requests(&self) -> usize {
        self.records.len()
    }

    /// Block references of all requests, in order.
    pub fn references(&self) -> &[u32] {
        &self.blocks
    }

    /// The blocks of request `i`, from 0, from the prompt's beginning; empty beyond the last request.
    pub fn blocks(&self, i: usize) -> &[u32] {
        let end = |i: usize| self.records.get(i).map(|record| record.end as usize);
        let start = i.checked_sub(1).and_then(end).unwrap_or(0);
        end(i).and_then(|end| self.blocks.get(start..end)).unwrap_or_default()
    }

    /// Tokens of request `i`'s prompt.
    pub fn input_tokens(&self, i: usize) -> u64 {
        self.records.get(i).map_or(0, |record| u64::from(record.input_tokens))
    }

    /// Tokens generated for request `i`.
    pub fn output_tokens(&self, i: usize) -> u64 {
        self.records.get(i).map_or(0, |record| u64::from(record.output_tokens))
    }

    /// Whether the lengths of blocks are known.
    pub fn knows_block_lengths(&self) -> bool {
        self.block_tokens.is_some() || !self.piece_tokens.is_empty()
    }

    /// Tokens in the first `run` blocks of request `i`, at most its prompt's (the last block may be
    /// partial); 0 if the lengths of blocks are unknown.
    pub fn tokens_of_run(&self, i: usize, run: usize) -> u64 {
        let tokens = match self.block_tokens {
            Some(tokens) => run as u64 * u64::from(tokens),
            None => self.blocks(i).iter().take(run).map(|block| self.tokens_of_block(*block)).sum(),
        };
        tokens.min(self.input_tokens(i))
    }

    /// Tokens of a whole block; 0 if the lengths of blocks are unknown.
    pub fn tokens_of_block(&self, block: u32) -> u64 {
        let piece = || self.piece_tokens.get(block as usize).copied();
        u64::from(self.block_tokens.or_else(piece).unwrap_or(0))
    }
}

/// Reads all of an uncompressed content into memory.
fn collect(
    input: Box<dyn BufRead + '_>,
    options: &Options,
    lengths: HashMap<u64, u32>,
    ledger: &Ledger<'_>,
) -> Result<RequestTrace> {
    let (mut records, mut blocks, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
    let full = |_| no_room("the decoded trace");
    let whole = stream(input, options, lengths, ledger, &mut |request| {
        ledger.grow(Part::Blocks, &blocks, request.blocks.len())?;
        blocks.try_reserve(request.blocks.len()).map_err(full)?;
        ledger.grow(Part::Requests, &records, 1)?;
        records.try_reserve(1).map_err(full)?;
        blocks.extend_from_slice(request.blocks);
        // REFERENCES_MAX is below 2^32.
        let Request { input_tokens, output_tokens, .. } = request;
        records.push(Record { end: blocks.len() as u32, input_tokens, output_tokens });
        if request.session > 0 && !options.one_after_another {
            ledger.grow(Part::Times, &seconds, 1)?;
            seconds.try_reserve(1).map_err(full)?;
            seconds.push(request.seconds);
        }
        Ok(())
    })?;
    let Whole { format, block_tokens, piece_tokens, distinct, notes } = whole;
    // The parser and its memory are gone.
    ledger.set(Part::Ids, 0).and_then(|()| ledger.set(Part::Lengths, 0))?;
    let interleaved = interleave::interleave(&mut records, &mut blocks, distinct, &seconds, ledger)?;
    Ok(RequestTrace { format, block_tokens, piece_tokens, distinct, notes, records, blocks, interleaved })
}

#[cfg(test)]
mod tests;
