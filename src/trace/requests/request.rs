//! A request and the properties of its trace: the formats, how they are read, what is counted, and the limits.
//!
//! Parser, sessions, writer and [`RequestTrace`](super::RequestTrace) share these; nothing here reads.

use std::path::PathBuf;

/// The most block references of a trace: 2^28, 1 GiB in memory.
pub const REFERENCES_MAX: u64 = 1 << 28;

/// The most requests of a trace: 2^25, some tens of seconds of reading where they name no blocks.
pub const REQUESTS_MAX: u64 = 1 << 25;

/// The formats of request traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Mooncake JSONL, and other files in that format.
    Mooncake,
    /// Session lines of kv-cache-tester.
    Sessions,
    /// RAGPulse JSONL.
    RagPulse,
    /// The CSV of Azure's LLM inference traces.
    Azure,
}

impl Format {
    /// The format's name.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Mooncake => "mooncake",
            Format::Sessions => "kv-cache-tester",
            Format::RagPulse => "ragpulse",
            Format::Azure => "azure",
        }
    }
}

/// How a trace is read.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Tokens of a block of a Mooncake trace; 512 if nothing is said. The other formats state it themselves.
    pub block_tokens: Option<u32>,
    /// Whether the requests of sub-agents are included, at the place of their element.
    pub subagents: bool,
    /// RAGPulse's side files, with the pieces' lengths in tokens.
    pub piece_lengths: Vec<PathBuf>,
    /// Whether a [`RequestTrace`](super::RequestTrace) keeps sessions one after another, as in the file, instead of
    /// interleaving them by time. [`each_request`](super::each_request) always keeps the file's order.
    pub one_after_another: bool,
}

/// Counts of a reader other than requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notes {
    /// Session lines.
    pub sessions: u64,
    /// Elements that are sub-agents.
    pub subagents: u64,
    /// The requests inside them, included or not.
    pub subagent_requests: u64,
    /// References to a piece that the same request referred to before (RAGPulse).
    pub repeats: u64,
    /// Requests with such references.
    pub repeating_requests: u64,
    /// Requests with a timestamp before the previous one's (RAGPulse).
    pub late: u64,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request<'a> {
    /// Arrival: seconds since the trace's or the session's start; for Azure since the year 0.
    pub seconds: f64,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// The prompt's blocks from its beginning, as dense numbers: 0, 1, 2... in order of first appearance.
    pub blocks: &'a [u32],
    /// The session that it belongs to, from 1; 0 in formats without sessions.
    pub session: u32,
}

/// A stored request: the end of its blocks, and its lengths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub end: u32,
    pub input_tokens: u32,
    pub output_tokens: u32,
}
