//! What replays of request traces found, as JSON (`docs/json.md`).

use forebay::Result;
use serde::Serialize;

use super::result::{About, Replay, Replayed, Sessions, share};
use crate::blocks::BlockCurve;
use crate::present::json::{self, Head};

#[derive(Serialize)]
struct Heading {
    #[serde(flatten)]
    head: Head,
    trace: String,
    format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<&'static str>,
    policy: &'static str,
    skipped_requests: usize,
    requests: u64,
    blocks: u64,
    distinct_blocks: u32,
    block_tokens: Option<u32>,
    input_tokens: u64,
}

#[derive(Serialize)]
struct Counts {
    capacity_blocks: u32,
    hit_blocks: u64,
    hit_ratio: f64,
    evicted_blocks: u64,
    hit_tokens: Option<u64>,
    token_hit_ratio: Option<f64>,
}

/// A capacity and policy, or all capacities.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry {
    Replay {
        #[serde(flatten)]
        heading: Heading,
        #[serde(flatten)]
        counts: Counts,
    },
    Curve {
        #[serde(flatten)]
        heading: Heading,
        flat_from: u32,
        asked: Vec<Counts>,
        curve: Columns,
    },
}

/// The capacities at which hits change, and the hits from there up.
#[derive(Serialize)]
struct Columns {
    capacity_blocks: Vec<u32>,
    hit_blocks: Vec<u64>,
    hit_tokens: Option<Vec<u64>>,
}

fn heading(kind: &'static str, about: &About, replay: &Replay) -> Heading {
    Heading {
        head: Head::new(kind),
        trace: about.path.display().to_string(),
        format: about.format.name(),
        sessions: about.sessions.map(Sessions::name),
        policy: replay.policy.name(),
        skipped_requests: about.skipped,
        requests: replay.outcome.requests,
        blocks: replay.outcome.blocks,
        distinct_blocks: about.distinct,
        block_tokens: about.block_tokens,
        input_tokens: replay.outcome.input_tokens,
    }
}

fn counts(about: &About, Replay { capacity, outcome, .. }: &Replay) -> Counts {
    let tokens = about.knows_block_lengths.then_some(outcome.hit_tokens);
    Counts {
        capacity_blocks: *capacity,
        hit_blocks: outcome.hit_blocks,
        hit_ratio: share(outcome.hit_blocks, outcome.blocks),
        evicted_blocks: outcome.evicted_blocks,
        hit_tokens: tokens,
        token_hit_ratio: tokens.map(|tokens| share(tokens, outcome.input_tokens)),
    }
}

fn columns(about: &About, curve: &BlockCurve) -> Columns {
    let capacities: Vec<u32> = curve.changes().collect();
    let at = |capacity: &u32| curve.at(*capacity);
    Columns {
        hit_blocks: capacities.iter().map(|c| at(c).hit_blocks).collect(),
        hit_tokens: about.knows_block_lengths.then(|| capacities.iter().map(|c| at(c).hit_tokens).collect()),
        capacity_blocks: capacities,
    }
}

/// A trace's entries.
fn entries(Replayed { about, replays, curve }: &Replayed) -> Vec<Entry> {
    match (curve, replays.first()) {
        (Some(curve), Some(first)) => vec![Entry::Curve {
            heading: heading("requests-curve", about, first),
            flat_from: curve.flat_from(),
            asked: replays.iter().map(|replay| counts(about, replay)).collect(),
            curve: columns(about, curve),
        }],
        _ => replays
            .iter()
            .map(|r| Entry::Replay { heading: heading("requests", about, r), counts: counts(about, r) })
            .collect(),
    }
}

/// All entries as JSON, with a line end.
///
/// # Errors
/// [`Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(traces: &[Replayed]) -> Result<Vec<u8>> {
    let entries: Vec<Entry> = traces.iter().flat_map(entries).collect();
    json::list(&entries)
}
