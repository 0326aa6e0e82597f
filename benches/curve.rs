//! Claims: counting the misses of smollm2-8k-policy (30 layers, k = 512) at every size takes at most 4 times as long as
//! a replay of one size (ratio 0.2: 1,229 slots per layer). The same holds for 200,000 tokens of which each step
//! selects one (one layer, generated, 40,000 slots).
//!
//! Both sides read the selections of every recorded step from memory, cold, one query row per step, on one thread. The
//! replay is the cache itself on the inline host device with its vectorised resolve, without moving rows: the fastest
//! that `forebay replay` can be. The other side computes every layer's stack distances and miss-ratio curve, as
//! `forebay replay --curve` does. At the end the bench compares both counts at the replayed size.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;
#[path = "support/replay.rs"]
mod replay;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::study::{MissRatioCurve, StackDistances};
use forebay::trace::{Header, SelectionTrace};
use race::{Side, claim, done, race, record};
use replay::Replay;

/// Computes the miss-ratio curves of all layers; the units are selected positions.
fn curves(trace: &SelectionTrace) -> forebay::Result<(Duration, u64, Vec<MissRatioCurve>)> {
    let header = trace.header();
    let (first, mut curves) = (header.first_position, Vec::new());
    let begin = Lap::begin();
    let mut depths = StackDistances::new(first + header.steps, first)?;
    for layer in 0..header.layers {
        for step in 0..header.steps {
            depths.commit(step.min(1), 1)?;
            depths.resolve(trace.selection(step, layer));
        }
        curves.push(depths.finish(first)?);
    }
    Ok((begin.end(), trace.members(), curves))
}

/// Generates a trace of one layer in which each of `tokens` steps selects one position, recent ones more often.
fn lonely(tokens: u32) -> forebay::Result<SelectionTrace> {
    let mut random = 1_u64;
    let mut near = |position: u32| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let back = (1_u64 << (random >> 59)).min(u64::from(position) + 1);
        position - ((random >> 20) % back) as u32
    };
    let text = String::new;
    let header = Header {
        format: "TOPKTRC1".to_owned(),
        label: "generated".to_owned(),
        model: text(),
        arch: text(),
        layers: 1,
        layer_ids: vec![0],
        k: 1,
        steps: tokens,
        warm_steps: 0,
        unfinished: None,
        first_position: 0,
        decode_start: 0,
        context: tokens,
        score: text(),
        mode: text(),
        text: text(),
    };
    SelectionTrace::new(header, (0..tokens).map(&mut near).collect())
}

/// Races the curve against a replay with `slots` per layer, and prints the claim.
fn compare(
    trace: &SelectionTrace,
    slots: u32,
    times: usize,
    words: &str,
    criterion: Option<&mut Criterion>,
) -> Result<(), Box<dyn std::error::Error>> {
    let positions = replay::positions(trace);
    let mut single = Replay::new(trace, &positions, u32::MAX, slots, false)?;
    let (mut at_once, mut misses) = (Vec::new(), 0);
    let mut sides = [
        Side::new("every size", || {
            let (time, units, curves) = done(curves(trace));
            at_once = curves;
            (time, units)
        }),
        Side::new("one size", || {
            let pass = done(single.pass());
            misses = single.misses();
            pass
        }),
    ];
    if let Some(criterion) = criterion {
        record(criterion, &format!("curve/{}", trace.header().label), &mut sides);
    }
    let rounds = race(times, &mut sides);
    drop(sides);
    let counted: u64 = at_once.iter().map(|curve| curve.misses(slots)).sum();
    let exact = at_once.iter().map(MissRatioCurve::exact_from).max().unwrap_or(0);
    println!(
        "{slots} slots a layer: {counted} misses by the curve (exact from {exact} slots on), {misses} by the replay"
    );
    if slots >= exact && counted != misses {
        return Err("the curve and the replay disagree".into());
    }
    for side in ["every size", "one size"] {
        println!("{side}: {:.1} million positions a second", rounds.rate(side) / 1e6);
    }
    let times = rounds.ratio("one size", "every size");
    println!("every size takes {times:.2} times as long as one size");
    claim(words, rounds.ratio("every size", "one size"), 0.25);
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    let (_, trace) = replay::trace("smollm2-8k-policy-tf")?;
    let slots = (0.2 * f64::from(trace.header().decode_start) + 0.5) as u32;
    compare(&trace, slots, 9, "curve against a replay of one size", Some(&mut criterion))?;
    compare(&lonely(200_000)?, 40_000, 3, "curve of 200,000 tokens, k = 1, against one size", None)?;
    criterion.final_summary();
    Ok(())
}
