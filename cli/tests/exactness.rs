//! Hits and misses of a replay through the production pools equal the naive oracle's, to the last one, on
//! every selection trace at hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../tests/support/oracle.rs"]
#[expect(dead_code, reason = "a replay cuts no sequence and brings nothing up")]
mod oracle;
#[path = "../src/pools.rs"]
mod pools;
#[path = "../../tests/support/traces.rs"]
mod traces;

use forebay::Shape;
use forebay::trace::SelectionTrace;
use oracle::Oracle;
use pools::{Loaded, Outcome};

/// The rule's own words over the trace: cold or after `warmup` warm steps, `mtp` positions a step.
fn naive(trace: &SelectionTrace, slots: u32, warmup: u32, mtp: u32) -> Outcome {
    let header = trace.header();
    let groups = header.decode_steps() / mtp;
    let mut outcome =
        Outcome { layers: vec![(0, 0); header.layers as usize], steps: vec![0; groups as usize] };
    for layer in 0..header.layers {
        let mut oracle = Oracle::new(slots as usize, header.decode_start);
        for step in header.warm_steps - warmup..header.warm_steps {
            let _ = oracle.select(trace.selection(step, layer).iter().copied());
        }
        for group in 0..groups {
            let accepted = if group == 0 { 0 } else { mtp };
            oracle.commit(accepted, mtp);
            let first = header.warm_steps + group * mtp;
            let union = (first..first + mtp).flat_map(|s| trace.selection(s, layer).iter().copied());
            let step = oracle.select(union);
            outcome.layers[layer as usize].0 += step.hits.len() as u64;
            outcome.layers[layer as usize].1 += step.misses.len() as u64;
            outcome.steps[group as usize] += step.misses.len() as u64;
        }
    }
    outcome
}

fn compare(path: &std::path::Path) {
    let trace = SelectionTrace::read(path).unwrap();
    let header = trace.header();
    let ratio = |r: f64| (r * f64::from(header.decode_start) + 0.5) as u32;
    // Below k for one query row, between k and 2k for two, and half of k: scratch slots in every step.
    let below = [header.k * 3 / 2, header.k / 2];
    for mtp in [1, 2] {
        let loaded = Loaded::new(&trace, mtp).unwrap();
        let sizes = [ratio(0.1), ratio(0.2)].into_iter().chain(below);
        for (index, slots) in sizes.enumerate() {
            // Cold and warm for the ratios; the small sizes alternate, to keep the test short.
            let warmups: &[u32] = if index < 2 { &[0, 32] } else { &[32 * (index as u32 % 2)] };
            for warmup in warmups {
                let replayed = loaded.run(&Shape::DEEPSEEK_V3_2, slots, *warmup, || ()).unwrap();
                let expected = naive(&trace, slots, *warmup, mtp);
                assert_eq!(replayed, expected, "{path:?} slots {slots} warm-up {warmup} mtp {mtp}");
                assert!(expected.steps.iter().sum::<u64>() > 0, "a replay without misses shows nothing");
            }
        }
    }
}

#[test]
fn every_trace_replays_as_the_oracle_says() {
    let Some(directory) = traces::directory("topk", "every_trace_replays_as_the_oracle_says") else { return };
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().ends_with(".topk.zst") {
            compare(&path);
            seen += 1;
        }
    }
    assert!(seen > 0, "no trace in the directory");
}

#[test]
fn the_demo_trace_replays_as_the_oracle_says() {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data");
    compare(&data.join("demo.topk.zst"));
}
