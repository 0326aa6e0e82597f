//! The report of a replay through two tiers.

use super::result::{BlockBytes, PERCENTILES, Replayed, Saved};
use crate::blocks::Outcome;
use crate::blocks::tiers::{Amount, Save};
use crate::present::numbers::{counted, fixed, number, size};
use crate::present::terminal::{Look, Spare, align_right};
use crate::replay::requests::result::share;
use crate::replay::requests::text::{DEFINITIONS, introduction};

const NOTES: &str = "\
A block on the device counts there, also if it is on the host too. Evicted: blocks that lost their page of the tier.
Up: from the host to the device, before the request computes. Down: from the device to the host.
A request's blocks are on the device at once; requests are served one after the other, and a request's copies are done \
before the next one arrives.
";

/// How the time to first token is computed.
const TIME: &str = "\
Time to first token saved by a request's hits: hit tokens / prefill rate, less the bytes up / link rate. Copies down, \
waiting, and a prefill rate that falls with the length of the prompt are not counted.
";

/// The whole report.
pub fn report(traces: &[Replayed], look: Look) -> String {
    let mut out = String::new();
    for replayed in traces {
        let Replayed { about, tiers, sums, saved, .. } = replayed;
        let measured = Outcome {
            requests: sums.requests,
            blocks: sums.asked.blocks,
            input_tokens: sums.asked.tokens,
            ..Outcome::default()
        };
        out += &introduction(about, measured);
        let when = match tiers.save {
            Save::Published => "when it is published",
            Save::Evicted => "when its device page goes to another block",
        };
        let host = match tiers.host {
            0 => "no host tier".to_owned(),
            blocks => format!("{} on the host; a block is saved {when}", counted(blocks, "block")),
        };
        out += &format!("Tiers: {} on the device, {host}.\n\n", counted(tiers.device, "block"));
        out += &format!("{}\n\n{}", table(replayed, look), copies(replayed));
        if let Some(saved) = saved {
            out += &times(saved, sums.requests);
        }
        out += "\n";
    }
    out += DEFINITIONS;
    out += NOTES;
    if traces.iter().any(|replayed| replayed.saved.is_some()) {
        out += TIME;
    }
    out
}

/// A line for each tier, and one for both.
fn table(Replayed { about, tiers, sums, .. }: &Replayed, look: Look) -> String {
    let mut table = look.table();
    table.set_header([
        "tier",
        "blocks",
        "hit\nblocks",
        "hits\nby blocks",
        "hits\nby tokens",
        "evicted\nblocks",
    ]);
    let percent = |part, whole| format!("{:.1}%", 100.0 * share(part, whole));
    let [device, host] = [sums.served.device, sums.served.host];
    let lines = [
        ("device", tiers.device.to_string(), device.hits, device.evicted_blocks.to_string()),
        ("host", tiers.host.to_string(), host.hits, host.evicted_blocks.to_string()),
        ("both", String::new(), sums.hits(), String::new()),
    ];
    for (tier, blocks, Amount { blocks: hits, tokens }, evicted) in lines {
        let by_tokens = match about.knows_block_lengths {
            true => percent(tokens, sums.asked.tokens),
            false => String::new(),
        };
        let by_blocks = percent(hits, sums.asked.blocks);
        table.add_row([tier.to_owned(), blocks, hits.to_string(), by_blocks, by_tokens, evicted]);
    }
    align_right(&mut table, |i| i > 0);
    look.fit(table, &Spare { columns: &["evicted"], keys: 1, text: None })
}

/// What moved between the tiers.
fn copies(Replayed { sums, bytes, about, .. }: &Replayed) -> String {
    let of = match (bytes, about.block_tokens) {
        (None, _) => "--block-bytes or --model gives the bytes of a block.".to_owned(),
        (Some(BlockBytes::Block(bytes)), _) => format!("A block has {}.", size(*bytes as f64)),
        (Some(BlockBytes::Token { model, bytes }), Some(tokens)) => {
            let block = size(f64::from(tokens) * *bytes as f64);
            format!("A block has {block} ({model}: {bytes} bytes a token).")
        }
        (Some(BlockBytes::Token { model, bytes }), None) => format!("A token has {bytes} bytes ({model})."),
    };
    let moved = |amount: Amount| {
        let blocks = counted(amount.blocks, "block");
        bytes.as_ref().map_or(blocks.clone(), |bytes| {
            let all = bytes.of(amount);
            format!("{blocks}, {}, {} a request", size(all), size(all / sums.requests.max(1) as f64))
        })
    };
    format!("Up: {}\nDown: {}\n{of}\n", moved(sums.served.up), moved(sums.served.down))
}

/// Seconds, to the millisecond where there are few.
fn seconds(seconds: f64) -> String {
    if seconds.abs() < 9.9995 { fixed(seconds, 3) } else { number(seconds) }
}

/// The time to first token that the hits save.
fn times(saved: &Saved, requests: u64) -> String {
    let at = PERCENTILES.iter().zip(saved.percentiles);
    let at: Vec<String> = at.map(|(percent, at)| format!("p{percent} {}", seconds(at))).collect();
    let each = |all: f64| seconds(all / requests.max(1) as f64);
    format!(
        "Time to first token saved at {} tokens/s of prefill and {} GB/s up: {} s a request, {} by hits on the \
         device and {} on the host ({}). Later than without hits: {} of {}.\n",
        number(saved.rates.prefill),
        number(saved.rates.link / 1e9),
        seconds(saved.mean),
        each(saved.device),
        each(saved.host),
        at.join(", "),
        saved.slower,
        counted(requests, "request"),
    )
}
