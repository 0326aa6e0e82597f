//! `forebay replay` of request traces: counts the hits of a prefix cache by its capacity.

use std::path::{Path, PathBuf};

use forebay::trace::requests::{self, Format, Notes, Options, RequestTrace};
use forebay::{Error, Kind, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish};

use crate::allowance::{self, Allowance};
use crate::blocks::{self, BlockCurve, Outcome, Policy};
use crate::look::Look;
use crate::output::{Results, echo};
use crate::{output, policy, progress, request_report};

/// The capacities replayed if none are named, in percent of the distinct blocks.
const PERCENT: [u64; 7] = [1, 2, 5, 10, 20, 50, 100];

/// The arguments for request traces only.
#[derive(clap::Args)]
pub struct RequestArguments {
    /// Request traces: capacity of the prefix cache in blocks; several, separated by commas [default: 1, 2, 5, 10,
    /// 20, 50 and 100% of the distinct blocks].
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    capacity: Vec<u32>,
    /// Request traces: first requests that only warm the cache and are not measured: a number (100) or a share of all
    /// (0.5).
    #[arg(long, value_name = "N|SHARE", value_parser = skip, allow_negative_numbers = true)]
    skip: Option<Skip>,
    /// Mooncake traces: tokens per block [default: 512].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..),
          allow_negative_numbers = true)]
    block_tokens: Option<u32>,
    /// RAGPulse traces: the side files with the pieces' lengths, separated by commas.
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    block_lengths: Vec<PathBuf>,
    /// Sessions of kv-cache-tester: also replay the requests of sub-agents.
    #[arg(long)]
    subagents: bool,
    /// Sessions of kv-cache-tester: replay them one after another, in file order. By default all sessions begin
    /// together and their requests are interleaved by time.
    #[arg(long)]
    one_after_another: bool,
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
    /// Refuses these options with selection traces.
    pub fn refuse(&self) -> Result<()> {
        let RequestArguments { capacity, skip, block_tokens, block_lengths, subagents, one_after_another } =
            self;
        let given = [
            ("--capacity", !capacity.is_empty()),
            ("--skip", skip.is_some()),
            ("--block-tokens", block_tokens.is_some()),
            ("--block-lengths", !block_lengths.is_empty()),
            ("--subagents", *subagents),
            ("--one-after-another", *one_after_another),
        ];
        match given.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((name, _)) => Err(Error::new(Kind::InvalidConfig, "replay")
                .at(format!("{name} is for request traces, but these are selection traces"))
                .hint("leave it out, or pass a request trace")),
        }
    }

    /// The files that are read in addition to the traces.
    pub fn side_files(&self) -> &[PathBuf] {
        &self.block_lengths
    }

    /// The capacities named.
    pub fn named(&self) -> &[u32] {
        &self.capacity
    }

    pub fn options(&self) -> Options {
        Options {
            block_tokens: self.block_tokens,
            subagents: self.subagents,
            piece_lengths: self.block_lengths.clone(),
            one_after_another: self.one_after_another,
        }
    }
}

/// The kind of the traces of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Traces {
    /// Selection traces.
    Selections,
    /// Request traces.
    Requests,
    /// A trace is neither, or cannot be read twice: the reader of selection traces reports it.
    Unknown,
}

/// The kind of the traces, from their first bytes.
///
/// # Errors
/// [`Kind::InvalidConfig`] for traces of both kinds; [`Kind::Io`] for a missing file,
/// [`Kind::BadFormat`] for gzip and damaged frames.
pub fn kind_of(traces: &[PathBuf]) -> Result<Traces> {
    let mut kinds = Vec::new();
    for path in traces {
        // Only files that can be read again are checked.
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
            .at(format!("{}: not a request trace of a known format", echo(path.display())))
            .hint("see docs/trace-format.md; request traces are read from regular files")),
        Some(_) => Ok(Traces::Unknown),
        None if requests && selections => Err(Error::new(Kind::InvalidConfig, "replay")
            .at("selection traces and request traces in one call")
            .hint("replay them in two calls")),
        None => Ok(if requests { Traces::Requests } else { Traces::Selections }),
    }
}

/// What is replayed, apart from the capacities.
pub struct Asked {
    /// The policies named, each once.
    pub policies: Vec<policy::Policy>,
    /// Whether every capacity is counted.
    pub curve: bool,
    /// Bytes that a replay may hold.
    pub memory: Option<u64>,
}

impl Asked {
    /// The policies in their form for blocks.
    fn policies(&self) -> Result<Vec<Policy>> {
        let known = |policy: &policy::Policy| {
            Policy::ALL.into_iter().find(|block| block.name() == policy.name()).ok_or_else(|| {
                Error::new(Kind::InvalidConfig, "replay")
                    .at(format!("--policy {} is for selection traces: it counts by steps", policy.name()))
                    .hint("request traces take lru, fifo, s3-fifo and belady")
            })
        };
        let policies = self.policies.iter().map(known).collect::<Result<Vec<_>>>()?;
        if self.curve && policies != [Policy::Lru] {
            return Err(Error::new(Kind::InvalidConfig, "replay")
                .at("--curve counts lru, but --policy names another")
                .hint("replay the other policies at named capacities, without --curve"));
        }
        Ok(policies)
    }
}

/// A trace's description for the reports.
pub struct About {
    /// The file, as named.
    pub path: PathBuf,
    pub format: Format,
    /// All requests, and how many of them are not measured.
    pub requests: usize,
    pub skipped: usize,
    /// Distinct blocks of the whole trace.
    pub distinct: u32,
    /// Tokens of a block, if all blocks have the same.
    pub block_tokens: Option<u32>,
    pub knows_block_lengths: bool,
    pub notes: Notes,
    /// Whether sub-agents' requests were replayed.
    pub subagents: bool,
    /// The order of sessions; none in formats without sessions.
    pub sessions: Option<Sessions>,
}

/// The order in which the requests of several sessions were replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sessions {
    /// By time; all sessions begin together.
    Interleaved,
    /// In file order, as requested.
    OneAfterAnother,
    /// In file order, because all times are equal.
    WithoutTimes,
}

impl Sessions {
    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Sessions::Interleaved => "interleaved",
            Sessions::OneAfterAnother | Sessions::WithoutTimes => "one-after-another",
        }
    }

    /// The words of the heading.
    pub const fn words(self) -> &'static str {
        match self {
            Sessions::Interleaved => {
                "interleaved by time, all beginning together (--one-after-another replays them in file order)"
            }
            Sessions::OneAfterAnother => "one after another",
            Sessions::WithoutTimes => "one after another, because all their times are equal",
        }
    }

    fn of(trace: &RequestTrace, arguments: &RequestArguments) -> Option<Sessions> {
        (trace.format() == Format::Sessions).then_some(
            match (trace.interleaved(), arguments.one_after_another) {
                (true, _) => Sessions::Interleaved,
                (false, true) => Sessions::OneAfterAnother,
                (false, false) => Sessions::WithoutTimes,
            },
        )
    }
}

/// One replay.
pub struct Replay {
    pub policy: Policy,
    pub capacity: u32,
    pub outcome: Outcome,
}

/// A trace's replays, without the trace: several would not fit in memory.
pub struct Replayed {
    pub about: About,
    /// By capacity, then policy, in the order named.
    pub replays: Vec<Replay>,
    /// Every capacity, if requested.
    pub curve: Option<BlockCurve>,
}

fn replay(path: &Path, arguments: &RequestArguments, asked: &Asked) -> Result<Replayed> {
    let policies = asked.policies()?;
    let allowance = Allowance { of: allowance::Replayed::Requests, memory: asked.memory };
    let trace = RequestTrace::read_asking(path, &arguments.options(), |taken| allowance.reading(taken))?;
    let about = about(path, arguments, &trace)?;
    if about.distinct == 0 && (!arguments.capacity.is_empty() || asked.curve) {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{}: the trace names no blocks, so a capacity has no effect", echo(path.display())))
            .hint("leave out --capacity and --curve"));
    }
    let mut capacities = arguments.capacity.clone();
    if capacities.is_empty() {
        let share = |percent: u64| (u64::from(trace.distinct()) * percent).div_ceil(100).max(1) as u32;
        capacities.extend(PERCENT.map(share));
        capacities.dedup();
    }
    let needs = match asked.curve {
        true => blocks::curve_bytes(&trace),
        false => policies.iter().map(|policy| blocks::bytes(&trace, *policy)).max().unwrap_or(0),
    };
    allowance.check_of(path, trace.bytes(), needs)?;
    let passes = if asked.curve { 1 } else { capacities.len() * policies.len() };
    let bar = bar(path, trace.requests() as u64 * passes as u64);
    let (mut replays, mut curve) = (Vec::new(), None);
    if asked.curve {
        let every = blocks::curve(&trace, about.skipped, || bar.inc(1))?;
        let at = |capacity| Replay { policy: Policy::Lru, capacity, outcome: every.at(capacity) };
        replays.extend(capacities.into_iter().map(at));
        curve = Some(every);
    } else {
        for (capacity, policy) in capacities.iter().flat_map(|c| policies.iter().map(|p| (*c, *p))) {
            let outcome = blocks::replay(&trace, policy, capacity, about.skipped, || bar.inc(1))?;
            replays.push(Replay { policy, capacity, outcome });
        }
    }
    bar.finish_and_clear();
    Ok(Replayed { about, replays, curve })
}

/// The description of `trace` for the reports.
///
/// # Errors
/// [`Kind::BadFormat`] without requests, [`Kind::InvalidConfig`] when all of them are skipped.
pub fn about(path: &Path, arguments: &RequestArguments, trace: &RequestTrace) -> Result<About> {
    let all = trace.requests();
    if all == 0 {
        return Err(Error::new(Kind::BadFormat, "replay")
            .at(format!("{}: the trace has no requests", echo(path.display()))));
    }
    let skipped = match arguments.skip {
        None => 0,
        Some(Skip::Requests(n)) => usize::try_from(n).unwrap_or(usize::MAX),
        Some(Skip::Share(share)) => (share * all as f64 + 1e-9).floor() as usize,
    };
    if skipped >= all {
        return Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{}: --skip leaves nothing to measure", echo(path.display())))
            .with("requests", all as u64)
            .hint("skip fewer requests"));
    }
    Ok(About {
        path: path.to_owned(),
        format: trace.format(),
        requests: all,
        skipped,
        distinct: trace.distinct(),
        block_tokens: trace.block_tokens(),
        knows_block_lengths: trace.knows_block_lengths(),
        notes: trace.notes(),
        subagents: arguments.subagents,
        sessions: Sessions::of(trace, arguments),
    })
}

/// A progress bar on standard error; hidden if that is no terminal.
fn bar(path: &Path, requests: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr())
        .with_finish(ProgressFinish::AndClear);
    if let Ok(style) = progress::style("{prefix} [{bar:30}] {percent}% of {len} requests, {left}") {
        bar.set_style(style);
    }
    bar.with_prefix(output::harmless(&path.display().to_string()))
}

/// Refuses an option of selection traces.
///
/// # Errors
/// [`Kind::InvalidConfig`] names it.
pub fn check_option(selection: Option<&str>) -> Result<()> {
    match selection {
        None => Ok(()),
        Some(flag) => Err(Error::new(Kind::InvalidConfig, "replay")
            .at(format!("{flag} is for selection traces, but these are request traces"))
            .hint("leave it out; request traces take --capacity")),
    }
}

/// `forebay replay` of request traces, into `results`. Prints tables in the given look, unless JSON replaces them.
///
/// # Errors
/// Errors of reading a trace, and of settings that do not fit it.
pub fn command<'a>(
    arguments: &RequestArguments,
    asked: &Asked,
    traces: &[PathBuf],
    json: Option<&'a Path>,
    tables: Option<Look>,
    results: &mut Results<'a>,
) -> Result<()> {
    let replayed = traces.iter().map(|path| replay(path, arguments, asked)).collect::<Result<Vec<_>>>()?;
    if let Some(path) = json {
        results.write(path, request_report::json(&replayed)?);
    }
    if let Some(look) = tables.filter(|_| !results.take_stdout()) {
        results.print(look.wrap(&request_report::text(&replayed, look)));
    }
    Ok(())
}
