//! Real selections: the kernels and the rule decode a recorded sequence next to each other.

use crate::image::Extents;
use crate::model::StepRange;
use crate::traces_at;
use crate::world::{How, World};
use forebay::device::descriptor::Entry;
use forebay::residency::{QueryRange, TableShape};
use forebay::trace::SelectionTrace;
use forebay::{Geometry, Shape};
use forebay_standin::Kernels;
use std::path::Path;

const LAYERS: u32 = 3;
const QUERY_ROWS: u32 = 2;
const STEPS: u32 = 60;
const WARM: u32 = 8;

/// Three of the trace's layers, in one lane, with `ratio` of the context as budget.
fn extents(trace: &SelectionTrace, ratio: f64) -> (Extents, u32) {
    let header = trace.header();
    let shape = Shape {
        layers: LAYERS,
        draft_layers: 0,
        runs: [12, 0],
        host_stride: 12,
        device_block_align: 1,
        index_key_bytes: 0,
        page_tokens: 64,
        top_k: header.k,
        lone_layers: 0,
        group_layers: 0,
    };
    let budget = (f64::from(header.decode_start) * ratio) as u32;
    let tokens = header.decode_start + STEPS * QUERY_ROWS + QUERY_ROWS;
    let (scratch, scratch_base) = (QUERY_ROWS * header.k, 1);
    let landing_base = scratch_base + scratch;
    let tables = TableShape {
        lanes: 1,
        tokens,
        query_rows: QUERY_ROWS,
        scratch,
        waves: 1,
        scratch_base,
        landing_base,
        budget_base: (landing_base + QUERY_ROWS).next_multiple_of(64),
        budget_blocks: budget.div_ceil(64) + 2,
    };
    let pages = tokens.div_ceil(64);
    let extents = Extents {
        geometries: vec![Geometry::new(shape).unwrap(); LAYERS as usize],
        members: vec![1; LAYERS as usize],
        shapes: vec![tables; LAYERS as usize],
        batch: 1,
        lane_pages: pages,
        host_pages: pages,
        residency_only: false,
        skew: [0; 2],
    };
    (extents, budget)
}

/// The selection of a step in a layer, padded to k.
fn selected(trace: &SelectionTrace, step: u32, layer: u32) -> Vec<i32> {
    let set = trace.selection(step, layer % trace.header().layers);
    let set = set.iter().map(|position| *position as i32);
    set.chain(std::iter::repeat(-1)).take(trace.header().k as usize).collect()
}

fn walk(kernels: &Kernels, path: &Path, ratio: f64) {
    let trace = SelectionTrace::read(path).unwrap();
    let header = trace.header();
    let (extents, budget) = extents(&trace, ratio);
    let how = How { threads: 256, seed: header.context.into() };
    let mut world = World::new(kernels, &extents, how);
    world.join(0, &[budget; LAYERS as usize], header.decode_start);
    let warm = header.warm_steps.min(WARM);
    let steps = (0..LAYERS).flat_map(|layer| (0..warm).map(move |step| (layer, step)));
    let warm_from = header.warm_steps - warm;
    let selections: Vec<i32> =
        steps.flat_map(|(layer, step)| selected(&trace, warm_from + step, layer)).collect();
    world.warm(0, false, &selections, warm as usize);
    world.warm_gather(0, 0, u64::from(budget) * u64::from(LAYERS));
    let steps = STEPS.min(header.decode_steps() / QUERY_ROWS);
    let (mut hits, mut misses) = (0, 0);
    for step in 0..steps {
        let accepted = if step == 0 { 0 } else { QUERY_ROWS };
        world.begin(&[Entry { lane: 0, accepted, query_rows: QUERY_ROWS }], &[0]);
        for layer in 0..LAYERS {
            let rows = QueryRange { first: 0, count: QUERY_ROWS };
            let range = StepRange { layer: layer as usize, first: 0, count: 1, rows };
            let first = header.warm_steps + step * QUERY_ROWS;
            let selection: Vec<i32> =
                (0..QUERY_ROWS).flat_map(|row| selected(&trace, first + row, layer)).collect();
            let mut output = world.empty_output(layer as usize, QUERY_ROWS);
            world.resolve(&range, &selection, &mut output);
            world.gather(&range, 0);
            world.scatter(&range);
        }
        world.report();
        hits += world.model.counts.iter().map(|counts| counts[0]).sum::<u32>();
        misses += world.model.counts.iter().map(|counts| counts[1]).sum::<u32>();
        assert_eq!(world.model.sticky, u64::MAX, "a trace selects nothing beyond its length");
    }
    world.compare_digests();
    assert!(steps > 10 && hits > 0 && misses > 0, "{steps} steps, {hits} hits, {misses} misses");
}

#[test]
fn kernels_walk_real_selections_as_the_rule_does() {
    let Some(kernels) = crate::kernels() else { return };
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/demo.topk.zst");
    walk(&kernels, &demo, 0.2);
    let Some(directory) = traces_at::directory("topk") else { return };
    for (name, ratio) in [("smollm2-4k-policy-k64", 0.05), ("gemma3-32k-agent-tf", 0.1)] {
        walk(&kernels, &directory.join(format!("{name}.topk.zst")), ratio);
    }
}
