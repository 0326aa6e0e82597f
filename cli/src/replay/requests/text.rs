//! The results of replaying request traces, as text and as JSON (`docs/json.md`).

use forebay::trace::requests::Format;

use super::result::{About, Replay, Replayed, share};
use crate::blocks::{Outcome, Policy};
use crate::present::numbers::counted;
use crate::present::output;
use crate::present::terminal::{Look, Spare, align_right};

/// The end of every table.
pub const DEFINITIONS: &str = "\
Hit: a block of a request's leading run of blocks that were all in the cache when it arrived (prefix rule).
By blocks: hit blocks / all block references of the measured requests.
By tokens: tokens in hit blocks / all input tokens of the measured requests, partial last blocks included.
";

/// The meaning of a hit if ids name pieces of text.
pub const PIECES: &str = "\
RAGPulse names pieces by their content: a hit says that the piece and all pieces
before it in the request are in the cache, not that they were computed after
the same pieces.
";

/// The eviction policy in one line.
pub fn definition(policy: Policy, pieces: bool) -> String {
    let line = match policy {
        Policy::Lru => {
            "a request's blocks are used from the last to the first; the least recently used one is evicted."
        }
        Policy::Fifo => {
            "a request's blocks enter from the first to the last; the block that entered first is evicted."
        }
        Policy::S3Fifo => {
            "three queues; a request's blocks are used from the last to the first; blocks used once are evicted early."
        }
        Policy::Belady if pieces => {
            "evicts the block whose next request is farthest; where ids name pieces, this does not bound these hits."
        }
        Policy::Belady => {
            "the optimum in blocks over all requests: evicts the block whose next request is farthest."
        }
    };
    format!("{}: {line}\n", policy.name())
}

/// The whole report.
pub fn report(traces: &[Replayed], look: Look) -> String {
    let mut out = String::new();
    for Replayed { about, replays, curve } in traces {
        let measured = replays.first().map(|replay| replay.outcome).unwrap_or_default();
        out += &introduction(about, measured);
        out += "\n";
        if about.distinct > 0 {
            out += &table(about, replays, look);
            out += "\n\n";
        }
        if let Some(curve) = curve {
            out += &format!(
                "One pass counts every capacity exactly. More than {} gain nothing.\n\n",
                counted(u64::from(curve.flat_from()), "block")
            );
        }
    }
    out += DEFINITIONS;
    let pieces = traces.iter().any(|t| t.about.format == Format::RagPulse);
    let used = |policy: &Policy| traces.iter().flat_map(|t| &t.replays).any(|r| r.policy == *policy);
    Policy::ALL.into_iter().filter(used).for_each(|policy| out += &definition(policy, pieces));
    if pieces {
        out += PIECES;
    }
    out
}

/// The replayed trace, and how much of it is measured.
pub fn introduction(about: &About, measured: Outcome) -> String {
    let notes = about.notes;
    let mut out = format!(
        "{}: {} ({})\n\
         Measured: {} {}, {}, {}. In the whole trace {}",
        output::harmless(&about.path.display().to_string()),
        counted(about.requests as u64, "request"),
        about.format.name(),
        if about.skipped > 0 { "the last" } else { "all" },
        measured.requests,
        counted(measured.blocks, "block reference"),
        counted(measured.input_tokens, "input token"),
        counted(u64::from(about.distinct), "distinct block"),
    );
    match (about.block_tokens, about.knows_block_lengths) {
        (Some(tokens), _) => out += &format!(" of {}.\n", counted(u64::from(tokens), "token")),
        (None, true) => out += " with lengths of their own.\n",
        (None, false) => out += ".\n",
    }
    if let Some(sessions) = about.sessions {
        let order = match notes.sessions {
            // A single session has no neighbour.
            1 => "1 session with its own block ids".to_owned(),
            count => format!("{count} sessions, {}, block ids local to each", sessions.words()),
        };
        out += &format!(
            "{order}; {} with {} of their own, {}.\n",
            counted(notes.subagents, "sub-agent"),
            counted(notes.subagent_requests, "request"),
            if about.subagents { "replayed" } else { "left out (--subagents includes them)" },
        );
    }
    if notes.late + notes.repeats > 0 {
        out += &format!(
            "Timestamps that go backwards: {}; requests that repeat a piece: {}. They are replayed unchanged.\n",
            notes.late, notes.repeating_requests
        );
    }
    if about.distinct == 0 {
        out += "The trace names no blocks, so requests share nothing: every prompt is computed in full.\n";
    } else if !about.knows_block_lengths {
        out += "The blocks' lengths are unknown (--block-lengths), so hits are not weighted by tokens.\n";
    }
    out
}

/// One line for each capacity and policy.
fn table(about: &About, replays: &[Replay], look: Look) -> String {
    let mut table = look.table();
    let named = replays.iter().any(|replay| replay.policy != Policy::Lru);
    let header = [
        "capacity\nblocks",
        "of\ndistinct",
        "hit\nblocks",
        "hits\nby blocks",
        "hits\nby tokens",
        "evicted\nblocks",
    ];
    table.set_header(named.then_some("policy").into_iter().chain(header));
    for Replay { policy, capacity, outcome } in replays {
        let percent = |part, whole| format!("{:.1}%", 100.0 * share(part, whole));
        let by_tokens = match about.knows_block_lengths {
            true => percent(outcome.hit_tokens, outcome.input_tokens),
            false => String::new(),
        };
        let cells = [
            capacity.to_string(),
            percent(u64::from(*capacity), u64::from(about.distinct)),
            outcome.hit_blocks.to_string(),
            percent(outcome.hit_blocks, outcome.blocks),
            by_tokens,
            outcome.evicted_blocks.to_string(),
        ];
        table.add_row(named.then(|| policy.name().to_owned()).into_iter().chain(cells));
    }
    align_right(&mut table, |i| i > 0 || !named);
    look.fit(table, &Spare { columns: &["evicted"], keys: 1 + usize::from(named), text: None })
}
