//! What a replay of a request trace found.

use std::path::{Path, PathBuf};

use forebay::trace::requests::{Format, Notes, RequestTrace};
use forebay::{Error, Kind, Result};

use super::args::{RequestArguments, Skip};
use crate::blocks::{BlockCurve, Outcome, Policy};
use crate::present::output::echo;

/// What the reports say of a trace.
pub struct About {
    /// The file, as it was named.
    pub path: PathBuf,
    pub format: Format,
    /// All requests, and those of them that are not measured.
    pub requests: usize,
    pub skipped: usize,
    /// Distinct blocks of the whole trace.
    pub distinct: u32,
    /// Tokens of a block, where all have the same.
    pub block_tokens: Option<u32>,
    pub knows_block_lengths: bool,
    pub notes: Notes,
    /// Whether sub-agents' requests were replayed.
    pub subagents: bool,
    /// How sessions stand to each other; none in formats without them.
    pub sessions: Option<Sessions>,
}

/// In which order the requests of several sessions were replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sessions {
    /// By their times, all sessions beginning together.
    Interleaved,
    /// As the file has them: that was asked for.
    OneAfterAnother,
    /// As the file has them: all times are alike.
    WithoutTimes,
}

impl Sessions {
    /// As JSON has it.
    pub const fn name(self) -> &'static str {
        match self {
            Sessions::Interleaved => "interleaved",
            Sessions::OneAfterAnother | Sessions::WithoutTimes => "one-after-another",
        }
    }

    /// As a headline has it.
    pub const fn words(self) -> &'static str {
        match self {
            Sessions::Interleaved => {
                "interleaved by their times, all beginning together (--one-after-another replays them in turn)"
            }
            Sessions::OneAfterAnother => "one after another",
            Sessions::WithoutTimes => "one after another, because all their times are alike",
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

/// A trace's replays. The trace itself is gone: several would not fit.
pub struct Replayed {
    pub about: About,
    /// By capacity, then policy, as named.
    pub replays: Vec<Replay>,
    /// Every capacity, if that was asked for.
    pub curve: Option<BlockCurve>,
}

/// What the reports say of `trace`.
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

/// A part of a whole; 0 of nothing.
pub fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
