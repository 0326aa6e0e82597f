//! Tests of `forebay replay --curve`: every size on the curve has the counts of a replay of that size alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod curve;
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod pools;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

#[path = "support/command.rs"]
mod command;

use std::path::{Path, PathBuf};

use forebay::Shape;
use forebay::trace::SelectionTrace;
use serde_json::Value;
use study::curve::{self, Curves};
use study::pools::{self, Setting};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

/// Eight sizes: the smallest of the curve, its neighbour, some ratios, the size from which on the curve is flat, and
/// one larger than the number of tokens.
fn sizes(trace: &SelectionTrace, curves: &Curves) -> [u32; 8] {
    let (exact, flat) = (curves.exact_from(), curves.flat_from());
    let ratio = |ratio: f64| ((ratio * f64::from(trace.header().decode_start) + 0.5) as u32).max(exact);
    [exact, exact + 1, ratio(0.1), ratio(0.2), ratio(0.35), ratio(0.6), flat.max(exact), 1 << 24]
}

/// Compares the curves of a trace with the pools, layer by layer; returns the misses at the smallest size.
fn compare(path: &Path, mtp: u32, warmup: u32) -> u64 {
    let trace = SelectionTrace::read(path).unwrap();
    let setting = Setting { slots: 0, warmup, mtp, steps: trace.header().decode_steps() / mtp };
    let curves = curve::curves(&trace, setting, || ()).unwrap();
    for slots in sizes(&trace, &curves) {
        let replayed = pools::replay(&trace, &Shape::DEEPSEEK_V3_2, Setting { slots, ..setting }, || ());
        let counted = curves.layers.iter().map(|layer| (layer.hits(slots), layer.misses(slots)));
        assert!(counted.eq(replayed.unwrap().layers), "{path:?} {slots} slots, {setting:?}");
    }
    curves.total(curves.exact_from()).1
}

fn every_trace(mtp: u32, warmup: u32) {
    let Some(directory) = traces::directory("topk") else { return };
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let traces: Vec<_> = files.filter(|path| path.to_string_lossy().ends_with(".topk.zst")).collect();
    assert!(!traces.is_empty(), "no trace in the directory");
    for path in traces {
        assert!(compare(&path, mtp, warmup) > 0, "a curve without misses shows nothing");
    }
}

#[test]
fn the_curve_of_every_trace_equals_the_pools() {
    every_trace(1, 32);
}

#[test]
fn the_curve_of_every_trace_from_cold_equals_the_pools() {
    every_trace(1, 0);
}

#[test]
fn the_curve_of_every_trace_by_two_rows_equals_the_pools() {
    every_trace(2, 32);
}

#[test]
fn the_curve_of_every_trace_by_two_rows_from_cold_equals_the_pools() {
    every_trace(2, 0);
}

#[test]
fn the_curve_of_the_demo_trace_equals_the_pools() {
    for mtp in 1..4 {
        // A cold start misses more; otherwise the warm-up would have no effect.
        assert!(compare(&demo(), mtp, 0) > compare(&demo(), mtp, 32));
    }
}

fn entries(arguments: &[&str]) -> Vec<Value> {
    serde_json::from_str(&command::succeeds(&[arguments, &["--json", "-"]].concat())).unwrap()
}

#[test]
fn json_has_every_change_and_marks_sizes_that_were_replayed() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let entry = &entries(&["replay", demo, "--curve", "--slots", "40,1000,9,40", "--mtp", "2"])[0];
    assert_eq!((&entry["kind"], &entry["schema"]), (&"selection-curve".into(), &2.into()));
    let number = |value: &Value| value.as_u64().unwrap();
    let (exact, flat) = (number(&entry["exact_from"]), number(&entry["flat_from"]));
    assert!(40 < exact && exact < flat, "{exact} {flat}");
    let curve = entry["curve"].as_array().unwrap();
    let slots: Vec<u64> = curve.iter().map(|point| number(&point["slots"])).collect();
    assert_eq!((&slots[..3], slots.last()), (&[9, 40, exact][..], Some(&flat)));
    for point in curve {
        let marked = point.get("replayed").is_some_and(|mark| mark == true);
        assert_eq!(marked, number(&point["slots"]) < exact);
    }
    assert!(slots.is_sorted_by(|a, b| a < b));
    assert!(curve[2..].array_windows().all(|[a, b]| number(&a["misses"]) > number(&b["misses"])));
    assert!((slots.len() as u64) < flat - exact, "no size without a change: nothing is shown");
    // A size between two points, in the widest gap.
    let gap = slots[2..].array_windows().max_by_key(|[a, b]| b - a).unwrap();
    assert!(gap[1] - gap[0] > 1);
    // The pools' counts, also for the marked sizes.
    for slots in [9, 40, exact, (exact + flat) / 2, gap[1] - 1, gap[1], flat, flat + 7] {
        let single = &entries(&["replay", demo, "--slots", &slots.to_string(), "--mtp", "2"])[0];
        let point = curve.iter().rfind(|point| number(&point["slots"]) <= slots).unwrap();
        for field in ["hits", "misses"] {
            assert_eq!(point[field], single["total"][field], "{slots} slots");
        }
        for field in ["warmup", "mtp", "steps", "k", "layers", "context", "policy"] {
            assert_eq!(entry[field], single[field], "{field}");
        }
    }
}

#[test]
fn the_table_has_a_line_for_each_size_and_a_star_below_the_curve() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let text = |sizes: &[&str]| command::succeeds(&[&["replay", demo, "--curve"], sizes].concat());
    let table = text(&[]);
    for ratio in ["0.050", "0.100", "0.150", "0.300", "0.500", "1.000"] {
        assert!(table.lines().any(|line| line.trim_start().starts_with(ratio)), "{table}");
    }
    let lines = text(&["--slots", "9,900"]);
    let starred = |line: &&str| line.contains(" 9*  ");
    assert_eq!(lines.lines().filter(starred).count(), 1, "{lines}");
    assert!(lines.contains("was replayed by itself") && !lines.contains("900*"), "{lines}");
    assert!(!text(&["--slots", "900"]).contains("replayed by itself"));
}

#[test]
fn a_curve_refuses_the_same_options_as_a_replay() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    for (arguments, word) in [
        (&["--warmup", "999"][..], "warm_steps"),
        (&["--mtp", "99999"], "decode_steps"),
        (&["--prompt-share", "0.00001"], "leaves no slot"),
        (&["--json", demo], "would replace the trace"),
    ] {
        let errors = command::refuses(&[&["replay", demo, "--curve"], arguments].concat());
        assert!(errors.contains(word), "{errors}");
    }
}
