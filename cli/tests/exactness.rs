//! Tests that hits and misses of a replay through the production pools equal those of the naive oracle, to the last
//! one, on every selection trace that is installed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../tests/support/oracle.rs"]
#[expect(dead_code, reason = "a replay truncates no sequence and loads no rows")]
mod oracle;
#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod pools;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

use forebay::Shape;
use forebay::trace::SelectionTrace;
use oracle::Oracle;
use study::pools::{self, Outcome, Setting};

/// The rule, written out literally, over one layer of the trace: hits, and misses by step.
fn naive(trace: &SelectionTrace, setting: Setting, layer: u32) -> (u64, Vec<u64>) {
    let Setting { slots, warmup, mtp, steps } = setting;
    let header = trace.header();
    let mut oracle = Oracle::new(slots as usize, header.decode_start);
    for step in header.warm_steps - warmup..header.warm_steps {
        let _ = oracle.select(trace.selection(step, layer).iter().copied());
    }
    let (mut hits, mut misses) = (0, Vec::new());
    for group in 0..steps {
        let accepted = if group == 0 { 0 } else { mtp };
        oracle.commit(accepted, mtp);
        let first = header.warm_steps + group * mtp;
        let union = (first..first + mtp).flat_map(|s| trace.selection(s, layer).iter().copied());
        let step = oracle.select(union);
        hits += step.hits.len() as u64;
        misses.push(step.misses.len() as u64);
    }
    (hits, misses)
}

/// All layers by the literal rule.
fn expected(trace: &SelectionTrace, setting: Setting) -> Outcome {
    let mut outcome = Outcome { layers: Vec::new(), steps: vec![0; setting.steps as usize] };
    for layer in 0..trace.header().layers {
        let (hits, misses) = naive(trace, setting, layer);
        outcome.layers.push((hits, misses.iter().sum()));
        outcome.steps.iter_mut().zip(misses).for_each(|(sum, step)| *sum += step);
    }
    outcome
}

fn compare(path: &std::path::Path) {
    let trace = SelectionTrace::read(path).unwrap();
    let header = trace.header();
    let ratio = |r: f64| (r * f64::from(header.decode_start) + 0.5) as u32;
    let (tenth, fifth) = (ratio(0.1), ratio(0.2));
    // Every ratio with one query row and two, cold and warm. Half of k, and 1.5 k for two rows, need scratch slots in
    // every step.
    let ratios = [tenth, fifth].map(|slots| [(1, slots, 0), (1, slots, 32), (2, slots, 0), (2, slots, 32)]);
    let below =
        [(1, header.k / 2, 32), (2, header.k / 2, 0), (2, header.k * 3 / 2, 0), (2, header.k * 3 / 2, 32)];
    for (mtp, slots, warmup) in ratios.into_iter().flatten().chain(below) {
        let setting = Setting { slots, warmup, mtp, steps: header.decode_steps() / mtp };
        let replayed = pools::replay(&trace, &Shape::DEEPSEEK_V3_2, setting, || ()).unwrap();
        let expected = expected(&trace, setting);
        assert_eq!(replayed, expected, "{path:?} {setting:?}");
        assert!(expected.steps.iter().sum::<u64>() > 0, "a replay without misses shows nothing");
    }
}

#[test]
fn every_trace_replays_as_in_the_oracle() {
    let Some(directory) = traces::directory("topk") else { return };
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
fn the_demo_trace_replays_as_in_the_oracle() {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data");
    compare(&data.join("demo.topk.zst"));
}
