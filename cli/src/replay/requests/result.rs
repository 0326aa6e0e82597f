//! What a replay of a request trace found.

use std::path::{Path, PathBuf};

use forebay::trace::requests::{Format, Notes, RequestTrace};
use forebay::{Error, Kind, Result};

use super::args::{RequestArguments, Skip};
use crate::blocks::{BlockCurve, Outcome, Policy};
use crate::present::output::echo;

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

/// A share of a whole; 0 of nothing.
pub fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
