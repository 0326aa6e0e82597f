//! Claim: a replay of smollm2-8k-policy (30 layers, k = 512, ratio 0.2: 1,229 slots per layer) makes at least 8 times
//! as many accesses per second as libCacheSim's LRU.
//!
//! Our side is the cache itself on the inline host device: every step is prepared, resolved in every layer, reported
//! and retired; rows are not moved, as in `forebay replay`. Their side is libCacheSim's C code, started from Python
//! (`benches/libcachesim_lru.py`), with one pool of 30 x 1,229 objects and the same accesses, an object being a layer
//! and a position. Both sides count the time of the one working thread, with the accesses already in memory. The bench
//! measures the most that libCacheSim's reader can have taken, and subtracts it.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/libcachesim.rs"]
mod libcachesim;
#[path = "support/race.rs"]
mod race;
#[path = "support/replay.rs"]
mod replay;

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use criterion::Criterion;
use race::{Side, claim, done, race, record};
use replay::Replay;

const RATIO: f64 = 0.2;

/// Slots per layer: the ratio of the tokens at the start of decoding.
fn slots(tokens: u32) -> u32 {
    (RATIO * f64::from(tokens) + 0.5) as u32
}

/// Writes one little-endian u64 per access, layer x 2^20 + position, in the order of the trace.
fn write_accesses(file: &Path, positions: &[i32], layers: usize, k: usize) -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::fs::File::create(file)?);
    for (set, selection) in positions.chunks_exact(k).enumerate() {
        for position in selection.iter().filter(|p| **p >= 0) {
            let object = ((set % layers) as u64) << 20 | *position as u64;
            out.write_all(&object.to_le_bytes())?;
        }
    }
    out.flush()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (label, trace) = replay::trace("smollm2-8k-policy-tf")?;
    let positions = replay::positions(&trace);
    let (layers, k) = (trace.header().layers, trace.header().k);
    let budget = slots(trace.header().decode_start);
    let file = std::env::temp_dir().join(format!("forebay-accesses-{}.bin", std::process::id()));
    write_accesses(&file, &positions, layers as usize, k as usize)?;
    let mut ours = Replay::new(&trace, &positions, u32::MAX, budget, false)?;
    let mut misses = 0;
    let mut sides = [
        Side::new("forebay", || done(ours.pass())),
        Side::new("libCacheSim", || {
            let (seconds, accesses, missed) = done(libcachesim::lru(&file, layers * budget));
            misses = missed;
            (Duration::from_secs_f64(seconds), accesses)
        }),
    ];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, &format!("replay/{label}"), &mut sides[..1]);
    let rounds = race(5, &mut sides);
    drop(sides);
    std::fs::remove_file(&file)?;
    println!("{layers} layers x {budget} slots, {} accesses", positions.len());
    println!("misses: forebay {}, libCacheSim {misses}", ours.misses());
    for side in ["forebay", "libCacheSim"] {
        println!("{side}: {:.1} million accesses a second", rounds.rate(side) / 1e6);
    }
    claim("replay against libCacheSim's LRU", rounds.ratio("forebay", "libCacheSim"), 8.0);
    criterion.final_summary();
    Ok(())
}
