//! Tests of `--prefetch inter-layer`: the covered rows and the rows fetched for nothing equal those of a naive model,
//! for every size and split; the other numbers of the command do not change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../src/policy/mod.rs"]
mod policy;
#[path = "../src/study"]
mod study {
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod pools;
    pub mod prefetch;
    pub mod reserve;
    pub mod s3fifo_queues;
    #[expect(dead_code, reason = "only the command uses the memory estimates")]
    pub mod threads;
}

#[path = "support/command.rs"]
mod command;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forebay::trace::{Header, SelectionTrace};
use policy::{Job, Policy};
use serde_json::Value;
use study::pools::{self, Setting};
use study::prefetch::{self, Prefetched};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

/// The rows of a layer from oldest to newest, and how many rows stay.
struct List {
    rows: Vec<u32>,
    slots: usize,
}

impl List {
    /// Unselected rows, selected ones, then the new ones; the newest stay.
    fn step(&mut self, selected: &BTreeSet<u32>) {
        self.rows.retain(|row| !selected.contains(row));
        self.rows.extend(selected);
        self.shrink();
    }

    fn shrink(&mut self) {
        self.rows.drain(..self.rows.len().saturating_sub(self.slots));
    }
}

/// LRU with sets: the rows that the prefetch fetches for each layer, and the layer's misses.
fn naive(trace: &SelectionTrace, setting: Setting, slots: &[u32]) -> Vec<(Prefetched, u64)> {
    let header = trace.header();
    let union = |group: u32, layer: u32| {
        let first = header.warm_steps + group * setting.mtp;
        let all = (first..first + setting.mtp).flat_map(|step| trace.selection(step, layer));
        let length = header.decode_start + group * setting.mtp;
        all.copied().filter(|row| *row < length).collect::<BTreeSet<u32>>()
    };
    let layer = |layer: u32| {
        let mut list = List { rows: Vec::new(), slots: slots[layer as usize] as usize };
        for step in header.warm_steps - setting.warmup..header.warm_steps {
            list.step(&trace.selection(step, layer).iter().copied().collect());
        }
        let (mut sum, mut misses) = (Prefetched::default(), 0);
        for group in 0..setting.steps {
            let resident: BTreeSet<u32> = list.rows.iter().copied().collect();
            let own = union(group, layer);
            misses += own.difference(&resident).count() as u64;
            let before = if layer == 0 { BTreeSet::new() } else { union(group, layer - 1) };
            let brought: BTreeSet<u32> = before.difference(&resident).copied().collect();
            let extra = brought.difference(&own).count() as u64;
            sum.covered += brought.len() as u64 - extra;
            sum.extra += extra;
            sum.extra_most = sum.extra_most.max(extra);
            list.step(&own);
            let born = header.decode_start + group * setting.mtp;
            list.rows.extend(born..born + setting.mtp);
            list.shrink();
        }
        (sum, misses)
    };
    (0..header.layers).map(layer).collect()
}

#[test]
fn a_prefetch_fetches_the_rows_of_a_naive_model() {
    let trace = SelectionTrace::read(&demo()).unwrap();
    let layers = trace.header().layers;
    for (mtp, warmup) in [(1, 32), (2, 0)] {
        let setting = |slots| Setting { slots, warmup, mtp, steps: 150 / mtp };
        let by_layer: Vec<u32> = (0..layers).map(|layer| 1100 + 30 * layer).collect();
        let jobs = [(setting(1229), None), (setting(1235), Some(&by_layer[..]))]
            .map(|(setting, slots)| Job { policy: Policy::Lru, setting, slots });
        let counted = prefetch::inter_layer(&trace, &jobs, |_| ()).unwrap();
        let shape = forebay::Shape::DEEPSEEK_V3_2;
        let produced = [
            pools::replay(&trace, &shape, setting(1229), || ()).unwrap(),
            pools::replay_by_layer(&trace, &shape, setting(1235), &by_layer, || ()).unwrap(),
        ];
        let slots = [vec![1229; layers as usize], by_layer.clone()];
        for (i, (counted, produced)) in counted.into_iter().zip(produced).enumerate() {
            let (brought, misses): (Vec<_>, Vec<_>) =
                naive(&trace, jobs[i].setting, &slots[i]).into_iter().unzip();
            assert!(brought[1].covered > 0 && brought[1].extra > 0, "nothing to compare");
            assert_eq!(counted, brought, "{:?}", jobs[i]);
            assert!(produced.layers.iter().map(|(_, misses)| *misses).eq(misses));
        }
    }
}

#[test]
fn every_policy_counts_the_prefetch_hits_of_its_own_pool() {
    let trace = SelectionTrace::read(&demo()).unwrap();
    let setting = Setting { slots: 1229, warmup: 32, mtp: 1, steps: 150 };
    let policies = [Policy::Lru, Policy::Fifo, Policy::S3Fifo, Policy::DecayTokens, Policy::Belady];
    let jobs = policies.map(|policy| Job { policy, setting, slots: None });
    let counted = prefetch::inter_layer(&trace, &jobs, |_| ()).unwrap();
    let replayed = policy::replay(&trace, &jobs, |_| ()).unwrap();
    for (policy, (brought, outcome)) in policies.iter().zip(counted.iter().zip(&replayed)) {
        assert_eq!(brought[0], Prefetched::default(), "the first layer has none before it");
        for (brought, (_, misses)) in brought.iter().zip(&outcome.layers).skip(1) {
            assert!(brought.covered > 0 && brought.covered <= *misses, "{}", policy.name());
        }
    }
    let all: BTreeSet<u64> = counted.iter().map(|layers| Prefetched::total(layers).covered).collect();
    assert_eq!(all.len(), policies.len(), "two policies keep the same rows");
}

#[test]
fn a_prefetch_counts_as_computed_by_hand() {
    // Two layers of two slots; rows 4, 5, 6 are new in steps 0, 1, 2. The second layer:
    //   step 0: empty; fetched 0, 1; selected 0, 2: 0 is covered, 1 is extra. Then 2 and the new row 4 stay
    //   step 1: fetched 1 (4 is resident); selected 1, 2: 1 is covered. Then 2 and the new row 5 stay
    //   step 2: fetched 0 (2 is resident); selected 0, 5: 0 is covered
    let header: Header = serde_json::from_value(serde_json::json!({
        "layers": 2, "layer_ids": [3, 9], "k": 2, "steps": 3, "warm_steps": 0, "first_position": 4,
        "decode_start": 4, "context": 7,
    }))
    .unwrap();
    let members = vec![0, 1, 0, 2, 1, 4, 1, 2, 0, 2, 0, 5];
    let trace = SelectionTrace::new(header, members).unwrap();
    let setting = Setting { slots: 2, warmup: 0, mtp: 1, steps: 3 };
    let job = Job { policy: Policy::Lru, setting, slots: None };
    let counted = prefetch::inter_layer(&trace, &[job], |_| ()).unwrap();
    assert_eq!(counted, [[Prefetched::default(), Prefetched { covered: 3, extra: 1, extra_most: 1 }]]);
}

#[test]
fn the_command_prints_both_next_to_the_plain_replay() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let replay = |more: &[&str]| {
        let text = command::succeeds(&[&["replay", demo, "--policy", "lru,fifo"], more].concat());
        serde_json::from_str::<Vec<Value>>(&text).unwrap()
    };
    let plain = replay(&["--json", "-"]);
    let with = replay(&["--prefetch", "inter-layer", "--json", "-"]);
    for (plain, with) in plain.iter().zip(&with) {
        assert!(plain.get("prefetch").is_none());
        assert_eq!(plain["total"], with["total"]);
        let prefetch = &with["prefetch"];
        assert_eq!(prefetch["kind"], "inter-layer");
        for field in ["covered", "extra"] {
            let layers = with["per_layer"].as_array().unwrap().iter();
            let sum: u64 = layers.map(|layer| layer[field].as_u64().unwrap()).sum();
            assert_eq!(prefetch[field], sum);
            let mean = prefetch[format!("{field}_per_step")].as_f64().unwrap();
            assert!((mean * with["steps"].as_f64().unwrap() - sum as f64).abs() < 1e-6);
        }
        assert!(prefetch["extra_most"].as_u64().unwrap() > 0);
    }
    // Every third layer of a model of 30.
    let text = command::succeeds(&["replay", demo, "--prefetch", "inter-layer"]);
    for words in ["covered", "extra", "not adjacent"] {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn a_curve_refuses_prefetch() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let errors = command::refuses(&["replay", demo, "--curve", "--prefetch", "inter-layer"]);
    assert!(errors.contains("pass one of the two"), "{errors}");
}
