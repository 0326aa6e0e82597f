//! The CUDA kernels, run on a CPU, against the rule as `residency` has it: after every operation all words of
//! the tables, all answers and lists, and all bytes are equal, whatever the number of threads and their order.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "kernels/image.rs"]
mod image;
#[path = "kernels/model.rs"]
mod model;
#[path = "support/skip.rs"]
mod skip;
#[cfg(feature = "trace")]
#[path = "kernels/traces.rs"]
mod traces;
#[cfg(feature = "trace")]
#[path = "support/traces.rs"]
mod traces_at;
#[path = "kernels/world.rs"]
mod world;

use forebay::device::block::Entry;
use forebay::residency::{Rows, TableShape};
use forebay::{Geometry, Shape};
use forebay_standin::Kernels;
use image::Extents;
use model::Part;
use std::collections::BTreeSet;
use world::{How, World};

const LANES: u32 = 4;
const QUERY_ROWS: u32 = 3;
const TOKENS: u32 = 320;

/// As [`extents`], with other lanes and batch rows.
fn wide(lanes: u32, extents: Extents) -> Extents {
    let shapes = extents.shapes.iter().map(|shape| TableShape {
        lanes,
        landing_base: shape.scratch_base + lanes * extents.shapes[0].scratch,
        budget_base: (shape.scratch_base + lanes * (extents.shapes[0].scratch + QUERY_ROWS))
            .next_multiple_of(64),
        budget_blocks: shape.budget_blocks + 2 * lanes,
        ..*shape
    });
    let shapes = shapes.collect();
    Extents { shapes, batch: lanes, host_pages: lanes * extents.lane_pages, ..extents }
}

/// Two layers: one whose scratch slots hold all that a step may fetch, one that needs several passes.
fn extents(top_k: u32, (runs, host_stride): ([u32; 2], u32)) -> Extents {
    let shape = Shape {
        layers: 2,
        draft_layers: 0,
        runs,
        host_stride,
        device_block_align: 1,
        index_key_bytes: 0,
        page_tokens: 16,
        top_k,
    };
    let landing_base = 3 + LANES * QUERY_ROWS * top_k;
    let ample = TableShape {
        lanes: LANES,
        tokens: TOKENS,
        query_rows: QUERY_ROWS,
        scratch: QUERY_ROWS * top_k,
        passes: 1,
        scratch_base: 3,
        landing_base,
        budget_base: (landing_base + LANES * QUERY_ROWS).next_multiple_of(64),
        budget_blocks: 13,
    };
    let scarce = TableShape { scratch: top_k * 2 / 3, passes: 4, budget_blocks: 7, ..ample };
    Extents {
        geometry: Geometry::new(shape).unwrap(),
        shapes: vec![ample, scarce],
        batch: LANES,
        lane_pages: TOKENS / 16,
        host_pages: LANES * TOKENS / 16,
        residency_only: false,
    }
}

/// The kernels, or a skip that is told.
fn kernels() -> Option<Kernels> {
    let kernels = Kernels::new();
    if kernels.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    kernels
}

/// Some operations, as an engine would enqueue them.
fn live(world: &mut World<'_>, operations: u32) {
    for _ in 0..operations {
        let lane = world.random.below(world.model.extents.shapes[0].lanes);
        let taken = world.model.is_taken(lane);
        match world.random.below(20) {
            _ if !taken => {
                let budgets = [0, 1].map(|_| match world.random.below(4) {
                    0 => 1 + world.random.below(20),
                    _ => 1 + world.random.below(150),
                });
                let length = world.random.below(220);
                world.join(lane, &budgets, length);
                if world.model.is_taken(lane) && world.random.one_in(2) {
                    let steps = world.random.below(4) as usize;
                    let spread = 5 + world.random.below(300);
                    let selections: Vec<i32> =
                        (0..2 * steps).flat_map(|_| world.selection(length, spread)).collect();
                    let whole = world.random.one_in(2);
                    world.warm(lane, whole, &selections, steps);
                    let (first, count) = (world.random.below(90), world.random.below(400));
                    world.raise(lane, first.into(), count.into());
                }
            }
            0 => world.leave(lane),
            1 => {
                let head = *world.model.tables[0].head(lane).unwrap();
                let settle = world.random.below(head.landed + 1);
                let length = (head.length + settle).saturating_sub(world.random.below(64));
                world.truncate(lane, settle, length);
            }
            _ => world.step(),
        }
    }
    world.compare_digests();
}

const FORMS: [([u32; 2], u32); 5] =
    [([656, 0], 0), ([20, 0], 20), ([16, 32], 0), ([24, 16], 40), ([4, 8], 12)];

#[test]
fn kernels_equal_the_rule_word_by_word() {
    let Some(kernels) = kernels() else { return };
    for (number, threads) in [32, 64, 128, 512, 96].into_iter().cycle().take(40).enumerate() {
        let how = How { threads, seed: number as u64 };
        let extents = extents([24, 75, 130][number % 3], FORMS[number / 5 % FORMS.len()]);
        let mut world = World::new(&kernels, &extents, how);
        live(&mut world, 40);
    }
}

#[test]
fn what_must_not_be_fails_the_step_and_touches_nothing_else() {
    let Some(kernels) = kernels() else { return };
    let mut causes = BTreeSet::new();
    for number in 0..20 {
        let how = How { threads: [64, 128][number % 2], seed: 1000 + number as u64 };
        let mut world = World::new(&kernels, &extents([24, 75][number / 2 % 2], ([16, 4], 0)), how);
        world.mischief = [30, 8, 100, 250, 600][number / 4];
        live(&mut world, 50);
        causes.extend(world.causes);
    }
    assert_eq!(causes, (0..=6).collect(), "every cause, and none");
}

#[test]
fn a_batch_of_more_rows_than_threads_is_gathered_whole() {
    let Some(kernels) = kernels() else { return };
    for seed in 0..2 {
        let extents = wide(70, extents(24, ([16, 0], 0)));
        let mut world = World::new(&kernels, &extents, How { threads: 32, seed });
        for lane in 0..70 {
            world.join(lane, &[40, 30], 100 + lane);
        }
        let mut most = 0;
        for step in 0..2 {
            let accepted = step * QUERY_ROWS;
            let entries: Vec<Entry> =
                (0..70).rev().map(|lane| Entry { lane, accepted, query_rows: QUERY_ROWS }).collect();
            world.step_of(&entries, &[0; 70]);
            let misses = world.model.lists.iter().filter(|list| !list.fetches.is_empty()).count();
            most = most.max(misses);
        }
        assert!(most > 64, "{most} rows with misses");
    }
}

/// Stamps lie so far apart that the bound is many widths of a histogram away, and then so that it is not.
#[test]
fn the_bound_is_found_however_far_away_it_is() {
    let Some(kernels) = kernels() else { return };
    for (seed, apart) in [(1, 5), (2, 17), (3, 60)] {
        let mut world = World::new(&kernels, &extents(75, ([4, 0], 0)), How { threads: 64, seed });
        world.join(0, &[64, 64], 300);
        for position in 0..64 {
            let k = world.model.extents.top_k() as usize;
            for _ in 0..world.random.below(apart) {
                one_row(&mut world, &vec![-1; k]);
            }
            let mut selection = vec![-1; k];
            selection[7] = position * 37 % 64;
            one_row(&mut world, &selection);
        }
        for count in [3, 30, 50] {
            let selection: Vec<i32> = (0..75).map(|i| if i < count { 100 + 2 * i } else { -1 }).collect();
            one_row(&mut world, &selection);
        }
    }
}

/// A step of lane 0 alone, with one query row, which selects the same in both layers.
fn one_row(world: &mut World<'_>, selection: &[i32]) {
    world.begin(&[Entry { lane: 0, accepted: 0, query_rows: 1 }], &[0; LANES as usize]);
    for layer in 0..2 {
        let part = Part { layer, first: 0, count: 1, rows: Rows { first: 0, count: 1 } };
        let mut answer = world.unanswered(layer, 1);
        world.resolve(&part, selection, &mut answer);
        for pass in 0..world.model.extents.shapes[layer].passes {
            world.gather(&part, pass);
        }
    }
    world.report();
}
