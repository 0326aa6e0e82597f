//! The order of pulls in a step, from its spans alone, and the same with each wait left out.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::predict::simulate::PULLS;
use crate::predict::weights::{Attention, Checkpoint, Division};
use crate::weights::{Group, Patterns, Plan, Sharding, Source};

/// The built-in setup whose GPUs' neighbours have this rate.
fn setup(nvlink_gb_s: f64, draft_layers: u32) -> Setup {
    let mut file = Setup::named("ess").unwrap().unwrap().file().clone();
    file.deployment.nvlink_gb_s = Some(nvlink_gb_s);
    file.model.draft_layers = draft_layers;
    Setup::new(file).unwrap()
}

fn plan(setup: &Setup, names: &str) -> Plan {
    let checkpoint = Checkpoint::of("deepseek-v3.2").unwrap().unwrap();
    let patterns = Patterns::new(&checkpoint.patterns(names)).unwrap();
    let sharding = Sharding { source: Source::Peers, ..Sharding::new(patterns) };
    let (division, dtype) = (Division::of(32, Attention::Data), setup.file().model.weights());
    let drafts = setup.shape().draft_layers > 0;
    let group = Group { id: 0, rank: 0, ranks: 8 };
    checkpoint.sharded((&division, dtype, drafts), 32, group, &sharding).unwrap()
}

/// A step with pulls, and how many waits it has; with the wait of a number left out.
fn step(setup: &Setup, batch: &Batch, without: Option<u64>) -> (Times, u64) {
    let sharded = Sharded::of(setup, &plan(setup, "o_proj"), batch).unwrap();
    let mut world = World::new(setup, batch, true).unwrap();
    world.shard(&sharded, true).unwrap();
    world.device.without_waits(without.map_or(0..0, |number| number..number + 1));
    let layers = (setup.shape().layers + world.shape.draft_layers) as usize;
    let times = world.step(setup, &vec![200.0; layers], 1.0, &vec![Overlap::Da; layers]).unwrap();
    (times, world.device.waits())
}

/// The layers that are read too early or overwritten too early, looked up span by span: a pull begins after the output
/// work of the layer that had its buffer, and ends before the first work of its own layer. No buffer has two pulls at
/// once, and the last one into each buffer is of the layer that had it first.
fn wrong(spans: &[Span]) -> Vec<Option<Layer>> {
    let is_pull = |span: &&Span| PULLS.contains(&span.name);
    let late = |a: f64, b: f64| a > b + 1e-3;
    let mut wrong = Vec::new();
    for buffer in PULLS {
        let pulls: Vec<&Span> = spans.iter().filter(|span| span.name == buffer).collect();
        let works = |layer: Option<Layer>| {
            spans
                .iter()
                .filter(move |span| span.layer == layer && !is_pull(span) && span.end_ns > span.start_ns)
        };
        // The last pulled layer is the first that the step uses.
        let mut has = pulls.last().and_then(|pull| pull.layer);
        let mut before_ns = 0.0;
        for (index, pull) in pulls.iter().enumerate() {
            let used = works(has).filter(|span| span.name == "output");
            let used_ns = used.map(|span| span.end_ns).fold(0.0, f64::max);
            let begins_ns = works(pull.layer).map(|span| span.start_ns).fold(f64::INFINITY, f64::min);
            let wraps = index + 1 == pulls.len();
            let overwritten = late(used_ns, pull.start_ns) || late(before_ns, pull.start_ns);
            if overwritten || (!wraps && late(pull.end_ns, begins_ns)) {
                wrong.push(pull.layer);
            }
            (has, before_ns) = (pull.layer, pull.end_ns);
        }
    }
    wrong
}

const ALONE: Batch = Batch { rows: [24, 0], query_rows: 1, context: 128 << 10, fill: false };
const TWO: Batch = Batch { rows: [24, 24], query_rows: 1, context: 32 << 10, fill: false };
const FILL: Batch = Batch { fill: true, ..TWO };
const DRAFTS: Batch = Batch { query_rows: 3, ..TWO };

#[test]
fn pulls_follow_the_use_before_them_and_come_before_their_own() {
    for (batch, draft_layers) in [(ALONE, 0), (TWO, 0), (FILL, 0), (DRAFTS, 1)] {
        for nvlink_gb_s in [305.0, 20.0] {
            let (times, _) = step(&setup(nvlink_gb_s, draft_layers), &batch, None);
            assert_eq!(wrong(&times.spans), [], "{batch:?} {nvlink_gb_s}");
            let pulls = times.spans.iter().filter(|span| PULLS.contains(&span.name));
            let layers: Vec<u32> = pulls.map(|pull| pull.layer.unwrap().0).collect();
            // 61 layers have a resident one or a buffer more, 62 neither.
            assert!(layers.len() >= 60, "{} pulls", layers.len());
            let outputs = times.spans.iter().filter(|span| span.name == "output").count();
            let passes = if draft_layers > 0 { 2 } else { 0 };
            assert_eq!(outputs, batch.micro_batches() * (61 + passes), "an output for each use");
        }
    }
}

/// The control: a wait of the ring that is left out is seen, the arrival where pulls are slow, the release where they
/// are fast. Every fifth wait is tried; a layer has other waits too.
#[test]
fn each_wait_of_the_ring_is_needed() {
    for nvlink_gb_s in [305.0, 20.0] {
        let setup = setup(nvlink_gb_s, 0);
        let (_, waits) = step(&setup, &ALONE, None);
        let tried = (0..waits).step_by(5);
        let seen = tried.filter(|number| !wrong(&step(&setup, &ALONE, Some(*number)).0.spans).is_empty());
        let seen = seen.count();
        assert!(seen >= 10, "{seen} of {waits} / 5 waits, {nvlink_gb_s} GB/s");
    }
}
