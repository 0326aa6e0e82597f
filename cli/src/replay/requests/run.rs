//! `forebay replay` of request traces: counts the hits of a prefix cache by its capacity.

use std::path::{Path, PathBuf};

use forebay::trace::requests::{self, RequestTrace};
use forebay::{Error, Kind, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish};

use super::args::RequestArguments;
use super::result::{Replay, Replayed, about};
use super::{json, text};
use crate::blocks::{self, Policy};
use crate::input::allowance::{self, Allowance};
use crate::policy;
use crate::present::output::{self, Results, echo};
use crate::present::progress;
use crate::present::terminal::Look;

/// The capacities replayed if none are named, in percent of the distinct blocks.
const PERCENT: [u64; 7] = [1, 2, 5, 10, 20, 50, 100];

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

/// A progress bar on standard error; hidden if that is no terminal.
pub fn bar(path: &Path, requests: u64) -> ProgressBar {
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
        results.write(path, json::text(&replayed)?);
    }
    if let Some(look) = tables.filter(|_| !results.take_stdout()) {
        results.print(look.wrap(&text::report(&replayed, look)));
    }
    Ok(())
}
