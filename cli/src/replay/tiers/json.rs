//! What a replay through two tiers found, as JSON (`docs/json.md`).

use forebay::Result;
use serde::Serialize;

use super::result::{BlockBytes, PERCENTILES, Replayed, Saved};
use crate::blocks::tiers::{Amount, Tier};
use crate::present::json::{self, Head};
use crate::replay::requests::result::{About, Sessions, share};

#[derive(Serialize)]
struct Entry {
    #[serde(flatten)]
    head: Head,
    trace: String,
    format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<&'static str>,
    device_blocks: u32,
    host_blocks: u32,
    save: &'static str,
    skipped_requests: usize,
    requests: u64,
    blocks: u64,
    distinct_blocks: u32,
    block_tokens: Option<u32>,
    input_tokens: u64,
    device: Hits,
    host: Hits,
    both: Share,
    up: Copied,
    down: Copied,
    block_bytes: Option<u64>,
    token_bytes: Option<u64>,
    row_model: Option<String>,
    time_saved: Option<TimeSaved>,
}

#[derive(Serialize)]
struct Share {
    hit_blocks: u64,
    hit_ratio: f64,
    hit_tokens: Option<u64>,
    token_hit_ratio: Option<f64>,
}

#[derive(Serialize)]
struct Hits {
    #[serde(flatten)]
    share: Share,
    evicted_blocks: u64,
}

#[derive(Serialize)]
struct Copied {
    blocks: u64,
    bytes: Option<f64>,
    bytes_per_request: Option<f64>,
}

#[derive(Serialize)]
struct TimeSaved {
    prefill_tokens_per_second: f64,
    link_bytes_per_second: f64,
    device_seconds: f64,
    host_seconds: f64,
    mean_seconds: f64,
    percentiles: Vec<Percentile>,
    slower_requests: u64,
}

#[derive(Serialize)]
struct Percentile {
    percent: u32,
    seconds: f64,
}

fn hits(about: &About, part: Amount, whole: Amount) -> Share {
    let tokens = about.knows_block_lengths.then_some(part.tokens);
    Share {
        hit_blocks: part.blocks,
        hit_ratio: share(part.blocks, whole.blocks),
        hit_tokens: tokens,
        token_hit_ratio: tokens.map(|tokens| share(tokens, whole.tokens)),
    }
}

fn time_saved(saved: &Saved) -> TimeSaved {
    let seconds = PERCENTILES.iter().zip(saved.percentiles);
    TimeSaved {
        prefill_tokens_per_second: saved.rates.prefill,
        link_bytes_per_second: saved.rates.link,
        device_seconds: saved.device,
        host_seconds: saved.host,
        mean_seconds: saved.mean,
        percentiles: seconds.map(|(percent, seconds)| Percentile { percent: *percent, seconds }).collect(),
        slower_requests: saved.slower,
    }
}

fn entry(Replayed { about, tiers, sums, bytes, saved }: &Replayed) -> Entry {
    let tier =
        |tier: &Tier| Hits { share: hits(about, tier.hits, sums.asked), evicted_blocks: tier.evicted_blocks };
    let copied = |amount: Amount| {
        let bytes = bytes.as_ref().map(|bytes| bytes.of(amount));
        let bytes_per_request = bytes.map(|bytes| bytes / sums.requests.max(1) as f64);
        Copied { blocks: amount.blocks, bytes, bytes_per_request }
    };
    let (block_bytes, token_bytes, row_model) = match bytes {
        None => (None, None, None),
        Some(BlockBytes::Block(bytes)) => (Some(*bytes), None, None),
        Some(BlockBytes::Token { model, bytes }) => {
            let block = about.block_tokens.map(|tokens| u64::from(tokens) * bytes);
            (block, Some(*bytes), Some(model.clone()))
        }
    };
    Entry {
        head: Head::new("requests-tiers"),
        trace: about.path.display().to_string(),
        format: about.format.name(),
        sessions: about.sessions.map(Sessions::name),
        device_blocks: tiers.device,
        host_blocks: tiers.host,
        save: tiers.save.name(),
        skipped_requests: about.skipped,
        requests: sums.requests,
        blocks: sums.asked.blocks,
        distinct_blocks: about.distinct,
        block_tokens: about.block_tokens,
        input_tokens: sums.asked.tokens,
        device: tier(&sums.served.device),
        host: tier(&sums.served.host),
        both: hits(about, sums.hits(), sums.asked),
        up: copied(sums.served.up),
        down: copied(sums.served.down),
        block_bytes,
        token_bytes,
        row_model,
        time_saved: saved.as_ref().map(time_saved),
    }
}

/// All entries as JSON, with a line end.
///
/// # Errors
/// [`forebay::Kind::Internal`]: plain numbers and texts always have a JSON form.
pub fn text(traces: &[Replayed]) -> Result<Vec<u8>> {
    json::list(&traces.iter().map(entry).collect::<Vec<_>>())
}
