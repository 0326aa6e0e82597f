//! The CUDA kernels, run on a CPU, against the rule as `residency` has it: after every operation all words of
//! the tables, all answers and lists, and all bytes are equal, whatever the number of threads and their order.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "kernels/image.rs"]
mod image;
#[path = "kernels/model.rs"]
mod model;
#[cfg(feature = "trace")]
#[path = "kernels/traces.rs"]
mod traces;
#[cfg(feature = "trace")]
#[path = "support/traces.rs"]
mod traces_at;
#[path = "kernels/world.rs"]
mod world;

use forebay::residency::TableShape;
use forebay::{Geometry, Shape};
use forebay_standin::Kernels;
use image::Extents;
use std::io::Write;
use world::{How, World};

const LANES: u32 = 4;
const QUERY_ROWS: u32 = 3;
const TOKENS: u32 = 320;

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
fn kernels(test: &str) -> Option<Kernels> {
    let kernels = Kernels::new();
    if kernels.is_none() {
        let line = format!("SKIP: {test}: no g++ when the stand-in driver was built\n");
        eprint!("{line}");
        if let Some(list) = std::env::var_os("FOREBAY_SKIPS") {
            let mut list = std::fs::OpenOptions::new().create(true).append(true).open(list).unwrap();
            list.write_all(line.as_bytes()).unwrap();
        }
    }
    kernels
}

/// Some operations, as an engine would enqueue them.
fn live(world: &mut World<'_>, operations: u32) {
    for _ in 0..operations {
        let lane = world.random.below(LANES);
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
    let Some(kernels) = kernels("kernels_equal_the_rule_word_by_word") else { return };
    for (number, threads) in [32, 64, 128, 512, 96].into_iter().cycle().take(40).enumerate() {
        let how = How { threads, seed: number as u64 };
        let extents = extents([24, 75, 130][number % 3], FORMS[number / 5 % FORMS.len()]);
        let mut world = World::new(&kernels, &extents, how);
        live(&mut world, 40);
    }
}

#[test]
fn what_must_not_be_fails_the_step_and_touches_nothing_else() {
    let Some(kernels) = kernels("what_must_not_be_fails_the_step_and_touches_nothing_else") else { return };
    for number in 0..20 {
        let how = How { threads: [64, 128][number % 2], seed: 1000 + number as u64 };
        let mut world = World::new(&kernels, &extents([24, 75][number / 2 % 2], ([16, 4], 0)), how);
        world.mischief = 30;
        live(&mut world, 50);
    }
}
