//! Parses one line of a format into requests; lines of sessions are parsed in `session`, with the same checks.
//!
//! Values that are checked are first taken as raw pieces of the line, so that an error names the column
//! of the wrong value.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::azure;
use super::input::{Line, digits};
use super::intern::Interner;
use super::ledger::{Ledger, Part, no_room};
use super::request::{Format, Notes, Options, REFERENCES_MAX, REQUESTS_MAX, Request};
use crate::error::{Error, Kind, Result};

/// Tokens of a Mooncake block if neither its lines nor the caller set it.
pub(super) const MOONCAKE_BLOCK: u32 = 512;

/// The destination of requests.
pub(super) type Sink<'a> = dyn FnMut(Request<'_>) -> Result<()> + 'a;

#[derive(Deserialize)]
struct Mooncake<'a> {
    #[serde(borrow)]
    timestamp: &'a RawValue,
    input_length: u32,
    output_length: u32,
    /// Set by recorders whose blocks do not have 512 tokens.
    block_size: Option<u32>,
    #[serde(borrow)]
    hash_ids: &'a RawValue,
}

#[derive(Deserialize)]
struct RagPulse<'a> {
    #[serde(borrow)]
    timestamp: &'a RawValue,
    input_length: u32,
    output_length: u32,
    #[serde(borrow)]
    hash_ids: Parts<'a>,
}

/// The pieces of a prompt, in prompt order.
#[derive(Deserialize)]
struct Parts<'a> {
    #[serde(borrow)]
    sys_prompt: &'a RawValue,
    #[serde(borrow)]
    passages_ids: &'a RawValue,
    #[serde(borrow)]
    history: &'a RawValue,
    #[serde(borrow)]
    web_search: &'a RawValue,
    #[serde(borrow)]
    user_input: &'a RawValue,
}

/// The fields that distinguish the first line of a JSON trace.
#[derive(Deserialize)]
struct Keys<'a> {
    requests: Option<serde::de::IgnoredAny>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
}

/// One line of a side file of RAGPulse.
#[derive(Deserialize)]
struct PieceLength {
    #[serde(
        alias = "sys_prompt_id",
        alias = "passage_id",
        alias = "history_id",
        alias = "user_input_id",
        alias = "web_search_id"
    )]
    id: u64,
    token_length: u32,
}

/// The format of a JSON trace, from its first line.
pub(super) fn recognise(line: Line<'_>) -> Result<Format> {
    let keys: Keys<'_> = serde_json::from_slice(line.bytes).map_err(|e| line.json(&e))?;
    match keys {
        Keys { requests: Some(_), .. } => Ok(Format::Sessions),
        Keys { hash_ids: Some(ids), .. } if ids.get().starts_with('{') => Ok(Format::RagPulse),
        Keys { hash_ids: Some(_), .. } => Ok(Format::Mooncake),
        _ => Err(line.wrong("the first line has neither `hash_ids` nor `requests`", 1)),
    }
}

/// An id and its tokens, from one line of a side file.
pub(super) fn piece_length(line: Line<'_>) -> Result<(u64, u32)> {
    let piece: PieceLength = serde_json::from_slice(line.bytes).map_err(|e| line.json(&e))?;
    Ok((piece.id, piece.token_length))
}

/// The state that is kept from line to line.
pub(super) struct Parser<'a> {
    pub(super) options: &'a Options,
    /// Tokens of the pieces in the side files.
    lengths: HashMap<u64, u32>,
    ledger: &'a Ledger<'a>,
    pub interner: Interner,
    /// Tokens of a block, once known.
    pub block_tokens: Option<u32>,
    /// The block size in the first line of a Mooncake trace.
    told: Option<u32>,
    /// Whether neither the lines nor the caller set it, so the published traces' size is used.
    unsaid: bool,
    /// Tokens of each distinct piece, if side files were given.
    pub piece_tokens: Vec<u32>,
    pub notes: Notes,
    blocks: Vec<u32>,
    pub(super) last: f64,
    requests: u64,
    references: u64,
}

impl<'a> Parser<'a> {
    pub fn new(options: &'a Options, lengths: HashMap<u64, u32>, ledger: &'a Ledger<'a>) -> Self {
        Parser {
            options,
            lengths,
            ledger,
            interner: Interner::new(),
            block_tokens: None,
            told: None,
            unsaid: false,
            piece_tokens: Vec::new(),
            notes: Notes::default(),
            blocks: Vec::new(),
            last: 0.0,
            requests: 0,
            references: 0,
        }
    }

    /// The request of a line of Mooncake.
    pub fn mooncake(&mut self, line: Line<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let read: Mooncake<'_> = serde_json::from_slice(line.bytes).map_err(|e| line.json(&e))?;
        let tokens = self.mooncake_block(line, read.block_size)?;
        let time = seconds(line, read.timestamp)? / 1e3;
        self.in_order(line, time, line.column(read.timestamp.get()))?;
        self.begin(line)?;
        self.list(line, read.hash_ids, u64::from(read.input_length.div_ceil(tokens)))?;
        self.end(time, read.input_length, read.output_length, sink)
    }

    /// Tokens of a block: from the lines, from the caller, or as published.
    fn mooncake_block(&mut self, line: Line<'_>, told: Option<u32>) -> Result<u32> {
        let known = match self.block_tokens {
            None => {
                self.told = told;
                self.unsaid = told.or(self.options.block_tokens).is_none();
                self.options.block_tokens.or(told).unwrap_or(MOONCAKE_BLOCK)
            }
            Some(known) => known,
        };
        if told == Some(0) || told != self.told || told.is_some_and(|told| told != known) {
            return Err(line
                .wrong("`block_size` is 0, or not that of the lines before or of --block-tokens", 1)
                .with("block_size", told.unwrap_or(MOONCAKE_BLOCK))
                .with("known", known));
        }
        Ok(*self.block_tokens.insert(known))
    }

    /// The request of a line of RAGPulse, which names pieces by content, not by their prefix: a piece may appear twice.
    pub fn ragpulse(&mut self, line: Line<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let read: RagPulse<'_> = serde_json::from_slice(line.bytes).map_err(|e| line.json(&e))?;
        let time = seconds(line, read.timestamp)?;
        self.notes.late += u64::from(time < self.last);
        self.last = time;
        self.begin(line)?;
        let parts = &read.hash_ids;
        let lists = [parts.sys_prompt, parts.passages_ids, parts.history, parts.web_search, parts.user_input];
        let repeats = self.notes.repeats;
        for list in lists {
            self.list(line, list, u64::from(read.input_length))?;
        }
        self.notes.repeating_requests += u64::from(self.notes.repeats > repeats);
        if !self.piece_tokens.is_empty() {
            let tokens =
                self.blocks.iter().filter_map(|b| self.piece_tokens.get(*b as usize)).map(|t| u64::from(*t));
            let tokens: u64 = tokens.sum();
            if tokens > u64::from(read.input_length) {
                return Err(line
                    .wrong("the pieces are longer than the request", line.column(parts.sys_prompt.get()))
                    .with("tokens", tokens)
                    .with("input_length", read.input_length));
            }
        }
        self.end(time, read.input_length, read.output_length, sink)
    }

    /// The request of a line of Azure.
    pub fn azure(&mut self, line: Line<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let (time, input, output) = azure::row(line)?;
        self.in_order(line, time, 1)?;
        self.begin(line)?;
        self.end(time, input, output, sink)
    }

    /// Checks that requests are in the order of their times.
    pub(super) fn in_order(&mut self, line: Line<'_>, time: f64, column: usize) -> Result<()> {
        if time < self.last {
            return Err(line
                .wrong("the timestamp is earlier than the one before", column)
                .hint("sort the requests by their timestamps"));
        }
        self.last = time;
        Ok(())
    }

    pub(super) fn begin(&mut self, line: Line<'_>) -> Result<()> {
        self.blocks.clear();
        self.interner.next_request();
        self.requests += 1;
        if self.requests > REQUESTS_MAX {
            return Err(too_much("too many requests", line, REQUESTS_MAX));
        }
        Ok(())
    }

    pub(super) fn end(&mut self, time: f64, input: u32, output: u32, sink: &mut Sink<'_>) -> Result<()> {
        // REQUESTS_MAX limits sessions, too.
        let session = self.notes.sessions as u32;
        sink(Request {
            seconds: time,
            input_tokens: input,
            output_tokens: output,
            blocks: &self.blocks,
            session,
        })
    }

    /// Appends the ids of a JSON list; the request may have at most `most` ids.
    pub(super) fn list(&mut self, line: Line<'_>, list: &RawValue, most: u64) -> Result<()> {
        let start = line.column(list.get());
        let text = list.get().as_bytes();
        let inner = text.strip_prefix(b"[").and_then(|t| t.strip_suffix(b"]"));
        let inner = inner.ok_or_else(|| line.wrong("the block ids are not a list", start))?;
        if inner.trim_ascii().is_empty() {
            return Ok(());
        }
        let mut at = 1;
        for item in inner.split(|byte| *byte == b',') {
            let column = start + at + (item.len() - item.trim_ascii_start().len());
            at += item.len() + 1;
            let id = digits(item.trim_ascii())
                .ok_or_else(|| line.wrong("a block id is not a whole number from 0 to 2^64 - 1", column))?;
            if self.blocks.len() as u64 >= most {
                return Err(line
                    .wrong("more block ids than the length allows", column)
                    .with("most", most)
                    .hint(match self.unsaid {
                        true => "correct the lengths, or pass --block-tokens if a block has fewer tokens",
                        false => "correct the lengths",
                    }));
            }
            self.reference(line, id, column)?;
        }
        Ok(())
    }

    fn reference(&mut self, line: Line<'_>, id: u64, column: usize) -> Result<()> {
        self.references += 1;
        if self.references > REFERENCES_MAX {
            return Err(too_much("too many block references", line, REFERENCES_MAX));
        }
        let named = self.interner.name(id, self.ledger)?;
        if named.again {
            if self.block_tokens.is_some() {
                return Err(line.wrong("the block id repeats inside the request", column).with("id", id));
            }
            self.notes.repeats += 1;
        }
        if named.new && !self.lengths.is_empty() {
            let tokens = self.lengths.get(&id).ok_or_else(|| {
                line.wrong("no side file has this piece's length", column)
                    .with("id", id)
                    .hint("pass all five side files in --block-lengths, or none")
            })?;
            self.ledger.grow(Part::PieceTokens, &self.piece_tokens, 1)?;
            self.piece_tokens.try_reserve(1).map_err(|_| no_room("the pieces' lengths"))?;
            self.piece_tokens.push(*tokens);
        }
        self.blocks.try_reserve(1).map_err(|_| no_room("a request's blocks"))?;
        self.blocks.push(named.dense);
        Ok(())
    }
}

pub(super) fn too_much(what: &'static str, line: Line<'_>, most: u64) -> Error {
    Error::new(Kind::Overflow, "read trace")
        .at(what)
        .with("line", line.number)
        .with("most", most)
        .hint("cut the trace into parts")
}

/// A time, written as a number or as a string with one.
pub(super) fn seconds(line: Line<'_>, raw: &RawValue) -> Result<f64> {
    let text = raw.get();
    let digits = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
    match digits.parse::<f64>() {
        // Rust would accept a sign before it, too.
        Ok(value)
            if digits.starts_with(|c: char| c.is_ascii_digit()) && value.is_finite() && value >= 0.0 =>
        {
            Ok(value)
        }
        _ => Err(line.wrong("the timestamp is not a number of at least 0", line.column(text))),
    }
}
