//! Claim: one step of the rule, through the device, serves selected positions at least 5 times as fast as the `lru`
//! crate and 8 times as fast as `quick_cache`, for the same work on one thread: look up every selected position, insert
//! every miss.
//!
//! The trace is gemma3-32k-policy (k = 2048, three layers) with 6,400 slots per layer. A fixed seed shuffles each
//! selection, because top-k kernels emit them in any order. Our side is the whole step as an engine runs it, including
//! locks, the commit of the new row, counters and report; their side is the bare loop on warm memory. All three start
//! empty.
//!
//! A lane whose rows are all resident is measured as well, at 8,192 and at 131,072 slots: steps that miss nothing do
//! not scan the lane, so its size should cost nothing but caches.
//!
//! With `FOREBAY_COUNT_STEPS=n` the bench times nothing: n steps run once, for a tool that counts instructions
//! (`ci/instructions`).

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;
#[path = "support/replay.rs"]
mod replay;

use std::cell::Cell;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::trace::SelectionTrace;
use race::{Side, claim, done, race, record};
use replay::Replay;

const SLOTS: u32 = 6_400;
const SEED: u64 = 0x5EED_F0EB;

/// Shuffles every set of `k`, padding included.
fn shuffle(positions: &mut [i32], k: usize) {
    let mut state = SEED;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 31
    };
    for set in positions.chunks_exact_mut(k) {
        for last in (1..set.len()).rev() {
            set.swap(last, (next() % (last as u64 + 1)) as usize);
        }
    }
}

/// Calls `serve(layer, position)` for every selected position; returns the time and the number of positions.
fn walk(trace: &SelectionTrace, positions: &[i32], mut serve: impl FnMut(usize, u32)) -> (Duration, u64) {
    let (k, layers) = (trace.header().k as usize, trace.header().layers as usize);
    let begin = Lap::begin();
    for (set, selection) in positions.chunks_exact(k).enumerate() {
        for position in selection.iter().filter(|p| **p >= 0) {
            serve(set % layers, *position as u32);
        }
    }
    (begin.end(), positions.len() as u64)
}

fn lru_pass(trace: &SelectionTrace, positions: &[i32], misses: &Cell<u64>) -> (Duration, u64) {
    let room = NonZeroUsize::new(SLOTS as usize).unwrap_or(NonZeroUsize::MIN);
    let mut caches: Vec<_> = (0..trace.header().layers).map(|_| lru::LruCache::new(room)).collect();
    misses.set(0);
    walk(trace, positions, |layer, position| {
        if black_box(caches[layer].get(&position)).is_none() {
            misses.set(misses.get() + 1);
            caches[layer].put(position, position);
        }
    })
}

fn quick_pass(trace: &SelectionTrace, positions: &[i32], misses: &Cell<u64>) -> (Duration, u64) {
    let cache = || quick_cache::unsync::Cache::<u32, u32>::new(SLOTS as usize);
    let mut caches: Vec<_> = (0..trace.header().layers).map(|_| cache()).collect();
    misses.set(0);
    walk(trace, positions, |layer, position| {
        if black_box(caches[layer].get(&position)).is_none() {
            misses.set(misses.get() + 1);
            caches[layer].insert(position, position);
        }
    })
}

const RESIDENT_K: u32 = 2_048;
/// Layers and steps of a pass over a lane whose rows are all resident.
const RESIDENT: [u32; 2] = [4, 200];

/// A lane of `slots` with every row resident. If it `grows`, it has an empty slot for the row that each step adds, else
/// one. Each selection is spread evenly over the rows, and shuffled.
fn resident(slots: u32, grows: bool, portable: bool) -> forebay::Result<Replay> {
    let [layers, steps] = RESIDENT;
    let tokens = slots - if grows { steps } else { 1 };
    let apart = tokens / RESIDENT_K;
    let mut positions: Vec<i32> = (0..layers * steps)
        .flat_map(|set| (0..RESIDENT_K).map(move |place| (place * apart + set % apart) as i32))
        .collect();
    shuffle(&mut positions, RESIDENT_K as usize);
    Replay::resident([layers, RESIDENT_K, steps, tokens], &positions, grows, portable)
}

/// The sides of [`residents`]: name, slots, whether each step adds a row, plain Rust.
const LANES: [(&str, u32, bool, bool); 6] = [
    ("8,192 slots", 8_192, false, false),
    ("131,072 slots", 131_072, false, false),
    ("131,072 slots, a row added", 131_072, true, false),
    ("8,192 slots, plain Rust", 8_192, false, true),
    ("131,072 slots, plain Rust", 131_072, false, true),
    ("131,072 slots, a row added, plain Rust", 131_072, true, true),
];

/// Steps without misses, in a small lane and in a large one; in the large one also with a new row in each step.
fn residents(criterion: &mut Criterion) -> forebay::Result<()> {
    let replay = |(_, slots, grows, portable)| resident(slots, grows, portable);
    let mut replays = LANES.into_iter().map(replay).collect::<forebay::Result<Vec<Replay>>>()?;
    let sides = LANES.into_iter().zip(&mut replays);
    let mut sides: Vec<Side<'_>> =
        sides.map(|((name, ..), replay)| Side::new(name, || done(replay.pass()))).collect();
    record(criterion, "resolve/resident", &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    for (name, ..) in LANES {
        let us = 1e6 * f64::from(RESIDENT_K) / rounds.rate(name);
        println!("every row resident, {name}: {us:.2} us a layer");
    }
    for plain in ["", ", plain Rust"] {
        let [few, many] = ["8,192", "131,072"].map(|slots| format!("{slots} slots{plain}"));
        let grown = format!("131,072 slots, a row added{plain}");
        let times = rounds.ratio(&few, &many);
        println!("every row resident, time at 131,072 slots against 8,192{plain}: {times:.2}x");
        let added = rounds.ratio(&many, &grown);
        println!("every row resident, time with a row added against none{plain}: {added:.2}x");
    }
    println!("misses: {:?}", replays.iter().map(Replay::misses).collect::<Vec<_>>());
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (label, trace) = replay::trace("gemma3-32k-policy-tf")?;
    let mut positions = replay::positions(&trace);
    shuffle(&mut positions, trace.header().k as usize);
    if let Some(steps) = std::env::var_os("FOREBAY_COUNT_STEPS") {
        let steps = steps.to_string_lossy().parse()?;
        let (_, indices) = Replay::new(&trace, &positions, steps, SLOTS, true)?.pass()?;
        println!("indices {indices}");
        return Ok(());
    }
    let mut fast = Replay::new(&trace, &positions, u32::MAX, SLOTS, false)?;
    let mut plain = Replay::new(&trace, &positions, u32::MAX, SLOTS, true)?;
    let (of_lru, of_quick) = (Cell::new(0), Cell::new(0));
    let mut sides = [
        Side::new("forebay", || done(fast.pass())),
        Side::new("forebay, plain Rust", || done(plain.pass())),
        Side::new("lru", || lru_pass(&trace, &positions, &of_lru)),
        Side::new("quick_cache", || quick_pass(&trace, &positions, &of_quick)),
    ];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, &format!("resolve/{label}"), &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    residents(&mut criterion)?;
    criterion.final_summary();
    for side in ["forebay", "forebay, plain Rust", "lru", "quick_cache"] {
        println!("{side}: {:.2} ns a position", 1e9 / rounds.rate(side));
    }
    println!("misses: forebay {}, lru {}, quick_cache {}", fast.misses(), of_lru.get(), of_quick.get());
    claim("resolve, AVX-512, against lru", rounds.ratio("forebay", "lru"), 5.0);
    claim("resolve, AVX-512, against quick_cache", rounds.ratio("forebay", "quick_cache"), 8.0);
    claim("resolve, plain Rust, against lru", rounds.ratio("forebay, plain Rust", "lru"), 5.0);
    claim(
        "resolve, plain Rust, against quick_cache",
        rounds.ratio("forebay, plain Rust", "quick_cache"),
        8.0,
    );
    Ok(())
}
