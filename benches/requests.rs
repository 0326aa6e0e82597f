//! Claims: a replay of agentic_A (21.5 million block references, 10,000 blocks) makes at least 2 times as many accesses
//! per second as libCacheSim's LRU, without parsing on either side. Hits at every capacity take at most 4 times as long
//! as that one replay: on this trace, on the Mooncake trace with its short prompts, and on a generated one where
//! prompts of one block each come back from 4 million blocks deep.
//!
//! Our side is what `forebay replay` runs: it looks up the leading run of every request and touches all its blocks.
//! Their side is libCacheSim's C code, started from Python (`benches/libcachesim_lru.py`), with the same blocks in the
//! same order, the last of a request first. Both sides count the time of the one working thread; the bench measures the
//! most that libCacheSim's reader can have taken, and subtracts it. It also prints our time with reading and parsing,
//! and the rate of every study policy, one pass each.

#[path = "../cli/src/blocks/mod.rs"]
#[expect(dead_code, reason = "only the command asks for the memory of a replay")]
mod blocks;
#[path = "support/clock.rs"]
mod clock;
#[path = "support/libcachesim.rs"]
mod libcachesim;
#[path = "support/race.rs"]
mod race;
#[path = "../cli/src/study"]
mod study {
    pub mod reserve;
    pub mod s3fifo_queues;
}

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blocks::{BlockCurve, Policy};
use clock::Lap;
use criterion::Criterion;
use forebay::trace::requests::{Options, RequestTrace};
use race::{Side, claim, done, race, record};

const CAPACITY: u32 = 10_000;

/// 4 million blocks, 4,096 per prompt, then the oldest million of them again in their order, one per prompt.
fn deep_prompts() -> forebay::Result<RequestTrace> {
    const MANY: u32 = 4096;
    let mut lines = String::new();
    let mut prompt = |ids: std::ops::Range<u32>| {
        let (tokens, ids) = (512 * ids.len(), ids.collect::<Vec<_>>());
        lines += &format!(
            "{{\"timestamp\":0,\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}}}\n"
        );
    };
    (0..1024).for_each(|i| prompt(i * MANY..(i + 1) * MANY));
    (0..1 << 20).for_each(|id| prompt(id..id + 1));
    RequestTrace::from_bytes(lines.as_bytes(), &Options::default())
}

/// The time of the curve of all capacities over the time of one capacity.
fn every_against_one(trace: &RequestTrace, rounds: usize) -> f64 {
    let references = trace.references().len() as u64;
    let mut sides = [
        Side::new("one", || {
            let begin = Lap::begin();
            done(blocks::replay(trace, Policy::Lru, CAPACITY, 0, || ()));
            (begin.end(), references)
        }),
        Side::new("every", || {
            let begin = Lap::begin();
            done(blocks::curve(trace, 0, || ()));
            (begin.end(), references)
        }),
    ];
    race(rounds, &mut sides).ratio("every", "one")
}

/// Runs every policy once, and prints what it found.
fn policies(trace: &RequestTrace) -> forebay::Result<()> {
    for policy in Policy::ALL {
        let begin = Lap::begin();
        let found = blocks::replay(trace, policy, CAPACITY, 0, || ())?;
        let rate = found.blocks as f64 / begin.end().as_secs_f64() / 1e6;
        let hits = 100.0 * found.hit_blocks as f64 / found.blocks as f64;
        println!("{}: {hits:.2}% hits by blocks, {rate:.1} million references a second", policy.name());
    }
    Ok(())
}

/// Writes one little-endian u64 per access: requests in order, each from its last block to its first.
fn write_accesses(file: &Path, trace: &RequestTrace) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::fs::File::create(file)?);
    for request in 0..trace.requests() {
        for block in trace.blocks(request).iter().rev() {
            out.write_all(&u64::from(*block).to_le_bytes())?;
        }
    }
    out.flush()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let traces =
        std::env::var_os("FOREBAY_TRACES").map_or_else(|| root.join("../shared/traces"), PathBuf::from);
    let path = traces.join("kv-cache-tester/agentic_A.jsonl.zst");
    let reading = Lap::begin();
    let trace = RequestTrace::read(&path, &Options { one_after_another: true, ..Options::default() })?;
    let reading = reading.end();
    let file = std::env::temp_dir().join(format!("forebay-blocks-{}.bin", std::process::id()));
    write_accesses(&file, &trace)?;
    let references = trace.references().len() as u64;
    let (mut hits, mut misses, mut took) = (0, 0, Duration::ZERO);
    let mut every: Option<BlockCurve> = None;
    let mut sides = [
        Side::new("forebay", || {
            let begin = Lap::begin();
            hits = done(blocks::replay(&trace, Policy::Lru, CAPACITY, 0, || ())).hit_blocks;
            took = begin.end();
            (took, references)
        }),
        Side::new("every capacity", || {
            let begin = Lap::begin();
            every = Some(done(blocks::curve(&trace, 0, || ())));
            (begin.end(), references)
        }),
        Side::new("libCacheSim", || {
            let (seconds, accesses, missed) = done(libcachesim::lru(&file, CAPACITY));
            misses = missed;
            (Duration::from_secs_f64(seconds), accesses)
        }),
    ];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "requests/agentic_A", &mut sides[..2]);
    let rounds = race(5, &mut sides);
    drop(sides);
    std::fs::remove_file(&file)?;
    println!("{references} references, {} distinct, {CAPACITY} blocks", trace.distinct());
    println!("misses: forebay {} (prefix rule), libCacheSim {misses}", references - hits);
    let every = every.ok_or("no pass")?;
    if every.at(CAPACITY).hit_blocks != hits {
        return Err("the curve and the replay disagree".into());
    }
    println!("every capacity: {} changes, flat from {} blocks", every.changes().count(), every.flat_from());
    for side in ["forebay", "every capacity", "libCacheSim"] {
        println!("{side}: {:.1} million accesses a second", rounds.rate(side) / 1e6);
    }
    println!(
        "forebay: {:.3} s, {:.3} s with reading and parsing",
        took.as_secs_f64(),
        (took + reading).as_secs_f64()
    );
    policies(&trace)?;
    let times = rounds.ratio("forebay", "every capacity");
    println!("every capacity takes {times:.2} times as long as one");
    claim("every capacity of agentic_A against one", rounds.ratio("every capacity", "forebay"), 0.25);
    let mooncake = traces.join("mooncake/conversation_trace.jsonl.zst");
    let short = every_against_one(&RequestTrace::read(&mooncake, &Options::default())?, 9);
    println!("every capacity of the Mooncake trace takes {:.2} times as long as one", 1.0 / short);
    claim("every capacity of the Mooncake trace against one", short, 0.25);
    let deep = every_against_one(&deep_prompts()?, 3);
    println!(
        "every capacity of prompts of one block, 4 million deep, takes {:.2} times as long as one",
        1.0 / deep
    );
    claim("every capacity of prompts of one block, 4 million deep, against one", deep, 0.25);
    claim("agentic_A against libCacheSim's LRU", rounds.ratio("forebay", "libCacheSim"), 2.0);
    criterion.final_summary();
    Ok(())
}
