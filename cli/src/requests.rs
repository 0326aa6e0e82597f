//! `forebay replay` of request traces: hits of a prefix cache by its capacity.

use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, LineStyle, Table, presets};
use forebay::trace::requests::{self, Format, Options, RequestTrace};
use forebay::{Error, Kind, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde::Serialize;

use crate::blocks::{self, Outcome};
use crate::{json, output};

/// The capacities replayed when none are named, in percent of the distinct blocks.
const PERCENT: [u64; 7] = [1, 2, 5, 10, 20, 50, 100];

/// What every table ends with.
const DEFINITIONS: &str = "\
Hit: a block of a request's leading run of blocks that were all in the cache when it arrived (prefix rule).
Then all its blocks are touched, the last one first, and the least recently used beyond the capacity go.
By blocks: hit blocks / all block references of the measured requests.
By tokens: tokens in hit blocks / all input tokens of the measured requests, partial last blocks included.
";

/// What a hit means where ids name pieces of text.
const PIECES: &str = "\
RAGPulse names pieces by their content: a hit says that the piece and all pieces before it in the request are
in the cache, not that they were computed behind the same pieces.
";

/// The arguments that only request traces have.
#[derive(clap::Args)]
pub struct RequestArguments {
    /// Request traces: blocks that the prefix cache holds; several, separated by commas [default: 1, 2, 5, 10,
    /// 20, 50 and 100% of the distinct blocks].
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    capacity: Vec<u32>,
    /// Request traces: requests that only warm the cache, before the measured ones: a number (100) or a share
    /// of all (0.5).
    #[arg(long, value_name = "N|SHARE", value_parser = skip, allow_negative_numbers = true)]
    skip: Option<Skip>,
    /// Mooncake traces: tokens of a block [default: 512].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..),
          allow_negative_numbers = true)]
    block_tokens: Option<u32>,
    /// RAGPulse traces: the side files with the pieces' lengths, separated by commas.
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    block_lengths: Vec<PathBuf>,
    /// Sessions of kv-cache-tester: replay the sub-agents' requests too.
    #[arg(long)]
    subagents: bool,
}

/// How many requests are not measured.
#[derive(Clone, Copy)]
enum Skip {
    Requests(u64),
    Share(f64),
}

fn skip(text: &str) -> std::result::Result<Skip, String> {
    if let Ok(requests) = text.parse() {
        return Ok(Skip::Requests(requests));
    }
    match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(Skip::Share(share)),
        _ => Err("neither a number of requests nor a share from 0 to below 1".to_owned()),
    }
}

impl RequestArguments {
    /// Refuses them beside selection traces.
    pub fn refuse(&self) -> Result<()> {
        let RequestArguments { capacity, skip, block_tokens, block_lengths, subagents } = self;
        let given = [
            ("--capacity", !capacity.is_empty()),
            ("--skip", skip.is_some()),
            ("--block-tokens", block_tokens.is_some()),
            ("--block-lengths", !block_lengths.is_empty()),
            ("--subagents", *subagents),
        ];
        match given.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((name, _)) => Err(Error::new(Kind::InvalidConfig, "replay")
                .at(format!("{name} is for request traces, and the traces are selection traces"))
                .hint("leave it out, or name a request trace")),
        }
    }

    /// The files read beside the traces.
    pub fn side_files(&self) -> &[PathBuf] {
        &self.block_lengths
    }

    fn options(&self) -> Options {
        Options {
            block_tokens: self.block_tokens,
            subagents: self.subagents,
            piece_lengths: self.block_lengths.clone(),
        }
    }
}

/// What the traces of a call are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Traces {
    /// Selection traces.
    Selections,
    /// Request traces.
    Requests,
    /// One of them is neither, or cannot be looked at twice: the reader of selection traces will say.
    Unknown,
}

/// What the traces are, by their first bytes.
///
/// # Errors
/// [`Kind::InvalidConfig`] for traces of both kinds; [`Kind::Io`] for a file that is not there,
/// [`Kind::BadFormat`] for gzip and damaged frames.
pub fn kind_of(traces: &[PathBuf]) -> Result<Traces> {
    let mut kinds = Vec::new();
    for path in traces {
        // Only what can be read again is looked at.
        let regular = std::fs::metadata(path).map_or(true, |file| file.is_file());
        kinds.push(match regular.then(|| requests::is_request_trace(path)).transpose()?.flatten() {
            Some(true) => Traces::Requests,
            Some(false) => Traces::Selections,
            None => Traces::Unknown,
        });
    }
    let unknown = kinds.iter().position(|kind| *kind == Traces::Unknown);
    let (requests, selections) = (kinds.contains(&Traces::Requests), kinds.contains(&Traces::Selections));
    match unknown.and_then(|place| traces.get(place)) {
        Some(path) if requests => Err(Error::new(Kind::BadFormat, "replay")
            .at(format!("{}: no request trace of a format that is known", path.display()))
            .hint("see docs/trace-format.md; request traces are read from regular files")),
        Some(_) => Ok(Traces::Unknown),
        None if requests && selections => Err(Error::new(Kind::InvalidConfig, "replay")
            .at("selection traces and request traces in one call")
            .hint("replay them in two calls")),
        None => Ok(if requests { Traces::Requests } else { Traces::Selections }),
    }
}

/// A trace's replays.
struct Replayed {
    path: PathBuf,
    trace: RequestTrace,
    skipped: usize,
    /// Whether sub-agents' requests were replayed.
    subagents: bool,
    /// Capacity and counts.
    replays: Vec<(u32, Outcome)>,
}

fn replay(path: &Path, arguments: &RequestArguments) -> Result<Replayed> {
    let trace = RequestTrace::read(path, &arguments.options())?;
    let all = trace.requests();
    if all == 0 {
        return Err(Error::new(Kind::BadFormat, "replay")
            .at(format!("{}: the trace has no requests", path.display())));
    }
    let skipped = match arguments.skip {
        None => 0,
        Some(Skip::Requests(n)) => usize::try_from(n).unwrap_or(usize::MAX),
        Some(Skip::Share(share)) => (share * all as f64 + 1e-9).floor() as usize,
    };
    if skipped >= all {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{}: --skip leaves nothing to measure", path.display()))
            .with("requests", all as u64)
            .hint("skip fewer requests"));
    }
    let mut capacities = arguments.capacity.clone();
    if capacities.is_empty() {
        let share = |percent: u64| (u64::from(trace.distinct()) * percent).div_ceil(100).max(1) as u32;
        capacities.extend(PERCENT.map(share));
        capacities.dedup();
    }
    let bar = progress(path, all as u64 * capacities.len() as u64);
    let run = |capacity| Ok((capacity, blocks::replay(&trace, capacity, skipped, || bar.inc(1))?));
    let replays = capacities.into_iter().map(run).collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    Ok(Replayed { path: path.to_owned(), trace, skipped, subagents: arguments.subagents, replays })
}

/// A bar on standard error; hidden where that is no terminal.
fn progress(path: &Path, requests: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr())
        .with_finish(ProgressFinish::AndClear);
    if let Ok(style) =
        ProgressStyle::with_template("{prefix} [{bar:30}] {percent}% of {len} requests, {eta} left")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.with_prefix(output::harmless(&path.display().to_string()))
}

/// `forebay replay` of request traces. `selection` names an option of selection traces
/// that was given.
///
/// # Errors
/// Those of reading a trace, of settings that do not fit it, and of writing the result.
pub fn command(
    arguments: &RequestArguments,
    selection: Option<&str>,
    traces: &[PathBuf],
    json: Option<&Path>,
) -> Result<()> {
    if let Some(flag) = selection {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{flag} is for selection traces, and the traces are request traces"))
            .hint("leave it out; request traces take --capacity"));
    }
    let replayed = traces.iter().map(|path| replay(path, arguments)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = json {
        output::write_json(path, &json_text(&replayed)?)?;
    }
    if json.is_some_and(output::is_stdout) {
        return Ok(());
    }
    output::print(report(&replayed, output::speaks_utf8()).as_bytes())
}

#[derive(Serialize)]
struct Entry {
    schema: u32,
    forebay: &'static str,
    kind: &'static str,
    trace: String,
    format: &'static str,
    policy: &'static str,
    capacity_blocks: u32,
    skipped_requests: usize,
    requests: u64,
    blocks: u64,
    distinct_blocks: u32,
    block_tokens: Option<u32>,
    hit_blocks: u64,
    hit_ratio: f64,
    evicted_blocks: u64,
    input_tokens: u64,
    hit_tokens: Option<u64>,
    token_hit_ratio: Option<f64>,
}

/// A part of a whole; 0 of nothing.
fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn entry(replayed: &Replayed, capacity: u32, outcome: Outcome) -> Entry {
    let trace = &replayed.trace;
    let tokens = trace.knows_block_lengths().then_some(outcome.hit_tokens);
    Entry {
        schema: json::SCHEMA,
        forebay: env!("CARGO_PKG_VERSION"),
        kind: "requests",
        trace: replayed.path.display().to_string(),
        format: trace.format().name(),
        policy: "lru",
        capacity_blocks: capacity,
        skipped_requests: replayed.skipped,
        requests: outcome.requests,
        blocks: outcome.blocks,
        distinct_blocks: trace.distinct(),
        block_tokens: trace.block_tokens(),
        hit_blocks: outcome.hit_blocks,
        hit_ratio: share(outcome.hit_blocks, outcome.blocks),
        evicted_blocks: outcome.evicted_blocks,
        input_tokens: outcome.input_tokens,
        hit_tokens: tokens,
        token_hit_ratio: tokens.map(|tokens| share(tokens, outcome.input_tokens)),
    }
}

fn json_text(traces: &[Replayed]) -> Result<Vec<u8>> {
    let entries: Vec<Entry> =
        traces.iter().flat_map(|t| t.replays.iter().map(|(capacity, o)| entry(t, *capacity, *o))).collect();
    let mut text = serde_json::to_vec_pretty(&entries)
        .map_err(|e| Error::new(Kind::Internal, "write JSON").at(e.to_string()))?;
    text.push(b'\n');
    Ok(text)
}

fn report(traces: &[Replayed], utf8: bool) -> String {
    let mut out = String::new();
    for replayed in traces {
        out += &heading(replayed);
        out += "\n";
        if replayed.trace.distinct() > 0 {
            out += &table(replayed, utf8);
            out += "\n\n";
        }
    }
    out += DEFINITIONS;
    if traces.iter().any(|t| t.trace.format() == Format::RagPulse) {
        out += PIECES;
    }
    out
}

fn heading(replayed: &Replayed) -> String {
    let (trace, notes) = (&replayed.trace, replayed.trace.notes());
    let measured = replayed.replays.first().map(|(_, outcome)| *outcome).unwrap_or_default();
    let mut out = format!(
        "{}: {} requests ({})\n\
         Measured: {} {}, {} block references, {} input tokens. In the whole trace {} distinct blocks",
        output::harmless(&replayed.path.display().to_string()),
        trace.requests(),
        trace.format().name(),
        if replayed.skipped > 0 { "the last" } else { "all" },
        measured.requests,
        measured.blocks,
        measured.input_tokens,
        trace.distinct(),
    );
    match (trace.block_tokens(), trace.knows_block_lengths()) {
        (Some(tokens), _) => out += &format!(" of {tokens} tokens.\n"),
        (None, true) => out += " with lengths of their own.\n",
        (None, false) => out += ".\n",
    }
    if trace.format() == Format::Sessions {
        out += &format!(
            "{} sessions, one after another, block ids local to each; \
             {} sub-agents with {} requests of their own, {}.\n",
            notes.sessions,
            notes.subagents,
            notes.subagent_requests,
            if replayed.subagents { "replayed" } else { "left out (--subagents replays them)" },
        );
    }
    if notes.late + notes.repeats > 0 {
        out += &format!(
            "Timestamps that step back: {}; requests that repeat a piece: {}. Kept as they stand in the file.\n",
            notes.late, notes.repeating_requests
        );
    }
    if trace.distinct() == 0 {
        out += "The trace names no blocks, so there is nothing to share: every prompt is computed whole.\n";
    } else if !trace.knows_block_lengths() {
        out += "The blocks' lengths are not known (--block-lengths), so nothing is weighted by tokens.\n";
    }
    out
}

/// One line for each capacity.
fn table(replayed: &Replayed, utf8: bool) -> String {
    let mut table = Table::new();
    let rule = if utf8 { '─' } else { '-' };
    table.load_style(presets::NOTHING.header_separator(LineStyle::new(rule, rule, rule, rule)));
    table.set_header([
        "capacity\nblocks",
        "of\ndistinct",
        "hit\nblocks",
        "hits\nby blocks",
        "hits\nby tokens",
        "evicted\nblocks",
    ]);
    let trace = &replayed.trace;
    for (capacity, outcome) in &replayed.replays {
        let percent = |part, whole| format!("{:.1}%", 100.0 * share(part, whole));
        let by_tokens = match trace.knows_block_lengths() {
            true => percent(outcome.hit_tokens, outcome.input_tokens),
            false => String::new(),
        };
        table.add_row([
            capacity.to_string(),
            percent(u64::from(*capacity), u64::from(trace.distinct())),
            outcome.hit_blocks.to_string(),
            percent(outcome.hit_blocks, outcome.blocks),
            by_tokens,
            outcome.evicted_blocks.to_string(),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}
