//! Tests of `--split by-layer`: the pools have the counts that the curves predict, no other split is better where the
//! best is known, and the command reports its split.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod curve;
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod pools;
    pub mod split;
}
#[path = "../../tests/support/traces.rs"]
mod traces;

#[path = "support/command.rs"]
mod command;

use std::path::{Path, PathBuf};

use forebay::Shape;
use forebay::study::StackDistances;
use forebay::trace::SelectionTrace;
use proptest::prelude::*;
use serde_json::Value;
use study::curve::{self, Curves};
use study::pools::{self, Setting};
use study::split;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

/// Compares the trace at some sizes: the pools count by layer as the curves predict for the divided slots, and all
/// layers together miss no more than with equal slots.
fn compare(path: &Path, mtp: u32, ratios: &[f64]) {
    let trace = SelectionTrace::read(path).unwrap();
    let header = trace.header();
    let setting = Setting { slots: 0, warmup: 32, mtp, steps: header.decode_steps() / mtp };
    let curves = curve::curves(&trace, setting, || ()).unwrap();
    let most = header.decode_start + setting.steps * mtp;
    for ratio in ratios {
        let size = (ratio * f64::from(header.decode_start) + 0.5) as u32;
        let slots = split::by_layer(&curves, size, most).unwrap();
        let sum = slots.iter().sum::<u32>();
        assert!(sum <= size * header.layers && slots.iter().all(|slots| *slots > 0 && *slots <= most));
        let replayed =
            pools::replay_by_layer(&trace, &Shape::DEEPSEEK_V3_2, setting, &slots, || ()).unwrap().layers;
        let uniform = pools::replay(&trace, &Shape::DEEPSEEK_V3_2, Setting { slots: size, ..setting }, || ());
        let misses = |layers: &[(u64, u64)]| layers.iter().map(|(_, misses)| misses).sum::<u64>();
        if slots.iter().all(|slots| *slots == size) {
            assert_eq!(replayed, uniform.unwrap().layers);
            continue;
        }
        let counted = curves.layers.iter().zip(&slots).map(|(curve, s)| (curve.hits(*s), curve.misses(*s)));
        assert!(counted.eq(replayed.iter().copied()), "{path:?} {slots:?}, {setting:?}");
        let (divided, uniform) = (misses(&replayed), misses(&uniform.unwrap().layers));
        let flat = size >= curves.flat_from();
        assert!(divided < uniform || flat && divided == uniform, "{path:?} {size} slots a layer");
    }
}

#[test]
fn the_pools_count_as_the_curves_predict_on_every_trace() {
    let Some(directory) = traces::directory("topk") else { return };
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let paths: Vec<_> = paths.filter(|path| path.to_string_lossy().ends_with(".topk.zst")).collect();
    assert!(!paths.is_empty(), "no trace in the directory");
    for path in paths {
        compare(&path, 1, &[0.1, 0.3]);
        compare(&path, 2, &[0.2]);
    }
}

#[test]
fn the_pools_count_as_the_curves_predict_on_the_demo_trace() {
    (1..4).for_each(|mtp| compare(&demo(), mtp, &[0.05, 0.15, 0.2, 0.5, 1.0]));
}

/// Rows of the prompt of a small layer.
const ROWS: u32 = 7;

/// A layer whose steps select one row each: the row at stack distance `depth` in the LRU order. Rows 0 to 6 are touched
/// first. So the test can make any curve, and no curve needs more than one slot to be exact.
fn steps(depths: &[usize]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..ROWS).rev().collect();
    let touch = |depth: &usize| {
        let row = order.remove(depth - 1);
        order.insert(0, row);
        row
    };
    depths.iter().map(touch).collect()
}

fn curves(layers: &[Vec<u32>]) -> Curves {
    let mut depths = StackDistances::new(ROWS, ROWS).unwrap();
    let mut count = |steps: &Vec<u32>| {
        (0..ROWS).for_each(|row| depths.warm(&[row]));
        steps.iter().for_each(|row| depths.resolve(&[*row]));
        depths.finish(ROWS).unwrap()
    };
    let curves = Curves { layers: layers.iter().map(&mut count).collect() };
    assert_eq!(curves.exact_from(), 1);
    curves
}

/// Misses of a list of `slots` rows, the newest last.
fn misses(steps: &[u32], slots: usize) -> u64 {
    let mut list: Vec<u32> = (0..ROWS).collect();
    list.drain(..list.len().saturating_sub(slots));
    let mut misses = 0;
    for row in steps {
        misses += u64::from(!list.contains(row));
        list.retain(|kept| kept != row);
        list.push(*row);
        list.drain(..list.len().saturating_sub(slots));
    }
    misses
}

/// The least misses over all divisions of at most `total` slots, at least one a layer.
fn least(layers: &[Vec<u32>], total: usize) -> u64 {
    let [layer, rest @ ..] = layers else { return 0 };
    let each = |slots: usize| misses(layer, slots) + least(rest, total - slots);
    (1..=total - rest.len()).map(each).min().unwrap()
}

/// Two or three layers by the stack distances of their selections, and slots for each.
fn layers() -> impl Strategy<Value = (Vec<Vec<usize>>, u32)> {
    let depths = prop::collection::vec(1..=ROWS as usize, 0..24);
    (prop::collection::vec(depths, 2..4), 1..=ROWS)
}

/// The gain of each further slot; of a convex curve it never grows.
fn gains(curve: &forebay::study::MissRatioCurve) -> Vec<u64> {
    (1..ROWS).map(|slots| curve.misses(slots) - curve.misses(slots + 1)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn no_division_of_convex_curves_misses_less((depths, slots) in layers()) {
        // Stack distances sorted by frequency give a convex curve.
        let convex: Vec<Vec<usize>> = depths.iter().map(|depths| {
            let mut counts: Vec<usize> = (1..=7).map(|d| depths.iter().filter(|x| **x == d).count()).collect();
            counts.sort_unstable_by(|a, b| b.cmp(a));
            (1..).zip(counts).flat_map(|(depth, count)| std::iter::repeat_n(depth, count)).collect()
        }).collect();
        let layers: Vec<Vec<u32>> = convex.iter().map(|depths| steps(depths)).collect();
        let curves = curves(&layers);
        prop_assert!(curves.layers.iter().all(|curve| gains(curve).is_sorted_by(|a, b| a >= b)));
        let divided = split::by_layer(&curves, slots, ROWS).unwrap();
        let missed = layers.iter().zip(&divided).map(|(steps, slots)| misses(steps, *slots as usize));
        prop_assert_eq!(missed.sum::<u64>(), least(&layers, slots as usize * layers.len()));
    }

    /// Curves of any shape: the loss against the best split is less than the gain of one segment, and a whole curve is
    /// one segment at most; uniform is never better.
    #[test]
    fn a_division_of_other_curves_loses_less_than_a_segment((depths, slots) in layers()) {
        let layers: Vec<Vec<u32>> = depths.iter().map(|depths| steps(depths)).collect();
        let curves = curves(&layers);
        let divided = split::by_layer(&curves, slots, ROWS).unwrap();
        let total = slots as usize * layers.len();
        prop_assert!(divided.iter().sum::<u32>() as usize <= total);
        let missed: u64 = layers.iter().zip(&divided).map(|(steps, slots)| misses(steps, *slots as usize)).sum();
        prop_assert_eq!(missed, split::misses(&curves, &divided));
        prop_assert!(missed <= curves.total(slots).1);
        let most = curves.layers.iter().map(|curve| curve.misses(1) - curve.misses(ROWS)).max().unwrap();
        let best = least(&layers, total);
        prop_assert!(missed == best || missed < best + most, "{missed} {best} {most}");
    }
}

#[test]
fn a_jump_is_taken_whole_or_not_at_all() {
    // The first layer cycles over five rows: nothing before the fifth slot, everything with it. The second
    // gains one a slot.
    let layers = [steps(&[5; 20]), steps(&[2, 3, 4, 5, 6, 7])];
    let curves = curves(&layers);
    assert_eq!(gains(&curves.layers[0]), [0, 0, 0, 20, 0, 0]);
    assert_eq!(split::by_layer(&curves, 4, ROWS).unwrap(), [5, 3]);
    // Four slots in all: the jump does not fit, and smaller gains take its place.
    assert_eq!(split::by_layer(&curves, 2, ROWS).unwrap(), [1, 3]);
    // More slots than both layers can use.
    assert_eq!(split::by_layer(&curves, 7, ROWS).unwrap(), [5, 7]);
    // A step may need one slot in each layer.
    assert_eq!(split::by_layer(&curves, 1, ROWS).unwrap(), [1, 1]);
}

#[test]
fn equal_gains_go_to_the_lower_layer() {
    let same = || steps(&[2, 3, 4, 5]);
    assert_eq!(split::by_layer(&curves(&[same(), same(), same()]), 2, ROWS).unwrap(), [4, 1, 1]);
}

#[test]
fn the_command_prints_both_splits_side_by_side() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let arguments = ["replay", demo, "--split", "by-layer", "--prompt-share", "0.1,0.2", "--json", "-"];
    let entries: Vec<Value> = serde_json::from_str(&command::succeeds(&arguments)).unwrap();
    let splits: Vec<&Value> = entries.iter().map(|entry| &entry["split"]).collect();
    assert_eq!(splits, ["uniform", "by-layer", "uniform", "by-layer"]);
    for [uniform, divided] in entries.as_chunks().0 {
        assert!(uniform.get("slots_by_layer").is_none() && uniform.get("gain").is_none());
        let (before, after) = (&uniform["total"]["misses"], &divided["total"]["misses"]);
        assert_eq!((&divided["uniform_misses"], &divided["slots"]), (before, &uniform["slots"]));
        let (before, after) = (before.as_f64().unwrap(), after.as_f64().unwrap());
        assert!(after < before);
        assert!((divided["gain"].as_f64().unwrap() - (1.0 - after / before)).abs() < 1e-12);
        assert_eq!(divided["slots_by_layer"].as_array().unwrap().len(), 10);
        assert_ne!(divided["first_steps"], Value::Null);
    }
    let table = command::succeeds(&arguments[..arguments.len() - 2]);
    for words in ["by layer", "uniform", "fewer misses", "divided by what each layer gains"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let uniform = command::succeeds(&["replay", demo, "--split", "uniform", "--prompt-share", "0.1,0.2"]);
    assert_eq!(uniform, command::succeeds(&["replay", demo, "--prompt-share", "0.1,0.2"]));
}

/// Every policy gets the slots of LRU's curves; its gain is relative to its own uniform split.
#[test]
fn other_policies_replay_the_same_split() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let arguments = ["replay", demo, "--split", "by-layer", "--policy", "lru,decay", "--prompt-share", "0.2"];
    let text = command::succeeds(&[&arguments[..], &["--json", "-"]].concat());
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    let of = |field: &str| entries.iter().map(|entry| entry[field].clone()).collect::<Vec<_>>();
    assert_eq!(of("policy"), ["lru", "lru", "decay", "decay"]);
    assert_eq!(of("split"), ["uniform", "by-layer", "uniform", "by-layer"]);
    assert_eq!(entries[1]["slots_by_layer"], entries[3]["slots_by_layer"]);
    assert_eq!(entries[3]["uniform_misses"], entries[2]["total"]["misses"]);
    assert!(entries[3]["gain"].as_f64().unwrap() > 0.0);
    let table = command::succeeds(&arguments);
    assert!(table.contains("  decay, by layer  ") && table.contains("  lru  "), "{table}");
}

#[test]
fn a_size_below_the_curves_stays_uniform() {
    let demo = demo();
    let arguments = ["replay", demo.to_str().unwrap(), "--split", "by-layer", "--slots", "9", "--json", "-"];
    let entries: Vec<Value> = serde_json::from_str(&command::succeeds(&arguments)).unwrap();
    assert_eq!(entries[1]["slots_by_layer"], Value::from(vec![9; 10]));
    assert_eq!(entries[0]["total"], entries[1]["total"]);
}

#[test]
fn a_split_is_refused_with_a_curve_and_for_request_traces() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let errors = command::refuses(&["replay", demo, "--split", "by-layer", "--curve"]);
    assert!(errors.contains("pass one of the two"), "{errors}");
    assert!(command::refuses(&["replay", demo, "--split", "evenly"]).contains("by-layer"));
    let requests = Path::new(env!("CARGO_TARGET_TMPDIR")).join("split-requests.jsonl");
    let request = r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[0]}"#;
    std::fs::write(&requests, request).unwrap();
    for [flag, value] in [["--split", "by-layer"], ["--prefetch", "inter-layer"]] {
        let errors = command::refuses(&["replay", requests.to_str().unwrap(), flag, value]);
        assert!(errors.contains(&format!("{flag} is for selection traces")), "{errors}");
    }
}
