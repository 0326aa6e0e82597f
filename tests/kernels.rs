//! The CUDA kernels, run on a CPU, against the rule of `residency`: after every operation all words of the tables, all
//! results and lists, and all bytes are equal, for any number of threads and any order of them.
//! Half of the random runs have tables of several layers, whose rows differ in size.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "kernels/groups.rs"]
mod groups;
#[path = "kernels/image.rs"]
mod image;
#[path = "kernels/model.rs"]
mod model;
#[path = "kernels/newest.rs"]
mod newest;
#[path = "kernels/prefetch.rs"]
mod prefetch;
#[path = "kernels/resize.rs"]
mod resize;
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

use forebay::device::descriptor::Entry;
use forebay::residency::{QueryRange, TableShape};
use forebay::{Geometry, Shape};
use forebay_standin::Kernels;
use image::Extents;
use model::StepRange;
use std::collections::BTreeSet;
use world::{How, World};

const LANES: u32 = 4;
const QUERY_ROWS: u32 = 3;
const TOKENS: u32 = 317;

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

/// Two layers, each with a table: one whose scratch slots hold all that a step may fetch, one that needs several waves.
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
        lone_layers: 0,
        group_layers: 0,
    };
    let landing_base = 3 + LANES * QUERY_ROWS * top_k;
    let ample = TableShape {
        lanes: LANES,
        tokens: TOKENS,
        query_rows: QUERY_ROWS,
        scratch: QUERY_ROWS * top_k,
        waves: 1,
        scratch_base: 3,
        landing_base,
        budget_base: (landing_base + LANES * QUERY_ROWS).next_multiple_of(64),
        budget_blocks: 13,
    };
    let scarce = TableShape { scratch: top_k * 2 / 3, waves: 4, budget_blocks: 7, ..ample };
    Extents {
        geometries: vec![Geometry::new(shape).unwrap(); 2],
        members: vec![1, 1],
        shapes: vec![ample, scarce],
        batch: LANES,
        lane_pages: TOKENS.div_ceil(16),
        host_pages: LANES * TOKENS.div_ceil(16),
        residency_only: false,
        skew: [0; 2],
    }
}

/// The kernels, or a reported skip.
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
        match world.random.below(22) {
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
                    world.warm_gather(lane, first.into(), count.into());
                }
            }
            0 => world.leave(lane),
            // After a mistake all steps of the lane fail.
            what @ (1 | 4..=6) if what == 1 || world.mischief > 0 => {
                let head = *world.model.tables[0].head(lane).unwrap();
                let settle = world.random.below(head.landed + 1);
                let length = (head.length + settle).saturating_sub(world.random.below(64));
                world.truncate(lane, settle, length);
            }
            2 | 3 => {
                let budgets = [0, 1].map(|layer| match world.random.below(5) {
                    0 => world.model.tables[layer].head(lane).unwrap().budget,
                    1 => 1 + world.random.below(20),
                    2 => 1 + world.random.below(320),
                    _ => 1 + world.random.below(150),
                });
                world.resize(lane, &budgets);
            }
            7 => drop(world.newest(lane)),
            _ => world.step(),
        }
    }
    world.compare_digests();
}

const FORMS: [([u32; 2], u32); 5] =
    [([656, 0], 0), ([20, 0], 20), ([16, 32], 0), ([24, 16], 40), ([4, 8], 12)];

/// Slabs and rows begin at addresses that allow pieces of 16 bytes, of 8, or of 4.
const SKEWS: [[usize; 2]; 7] = [[0, 0], [2, 0], [0, 0], [0, 2], [1, 0], [0, 1], [4, 8]];

#[test]
fn kernels_equal_the_rule_word_by_word() {
    let Some(kernels) = kernels() else { return };
    for (number, threads) in [32, 64, 128, 512, 96].into_iter().cycle().take(40).enumerate() {
        let how = How { threads, seed: number as u64 };
        let mut extents = extents([24, 75, 130][number % 3], FORMS[number / 5 % FORMS.len()]);
        extents.skew = SKEWS[number % SKEWS.len()];
        if number % 2 == 1 {
            extents = groups::grouped(extents, [[1, 2], [3, 1]][number / 2 % 2], number);
        }
        let mut world = World::new(&kernels, &extents, how);
        live(&mut world, 40);
    }
}

#[test]
fn each_cause_fails_its_step_and_touches_nothing_else() {
    let Some(kernels) = kernels() else { return };
    let mut causes = BTreeSet::new();
    for number in 0..20 {
        let how = How { threads: [64, 128][number % 2], seed: 1000 + number as u64 };
        let mut extents = extents([24, 75][number / 2 % 2], ([16, 4], 0));
        if (number + 1) % 4 > 1 {
            extents = groups::grouped(extents, [2, 2], number);
        }
        let mut world = World::new(&kernels, &extents, how);
        world.mischief = [30, 8, 100, 250, 600][number / 4];
        live(&mut world, 60);
        causes.extend(world.causes);
    }
    assert_eq!(causes, (0..=8).collect(), "every cause, and none");
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

/// Stamps lie so far apart that the bound is many widths of a histogram away, and then so close that it is not.
#[test]
fn the_bound_is_found_at_any_distance() {
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

/// A step of lane 0 alone, with one query row, which selects the same in both tables.
fn one_row(world: &mut World<'_>, selection: &[i32]) {
    world.begin(&[Entry { lane: 0, accepted: 0, query_rows: 1 }], &[0; LANES as usize]);
    for table in 0..2 {
        let layers = world.model.extents.layers_of(table);
        let mut output = world.empty_output(layers.start, 1);
        world.resolve(&range(layers.start, 0, 1), selection, &mut output);
        for layer in layers {
            for wave in 0..world.model.extents.shapes[table].waves {
                world.gather(&range(layer, 0, 1), wave);
            }
        }
    }
    world.report();
}

/// A lane that is resident as a whole in one layer, and beyond its budget in the other. All query rows of a step select
/// the same rows, several times, and landed rows: they miss nothing in the first layer.
#[test]
fn steps_that_miss_nothing_or_miss_in_one_layer_only_equal_the_rule() {
    let Some(kernels) = kernels() else { return };
    for (number, threads) in [32, 64, 512].into_iter().cycle().take(9).enumerate() {
        let extents = extents([24, 75, 130][number / 3], ([4, 0], 0));
        let mut world = World::new(&kernels, &extents, How { threads, seed: 100 + number as u64 });
        let (length, k) = (260, extents.top_k());
        world.join(0, &[320, 90], length);
        // Two steps of a warm-up, without misses in the first layer; the second step repeats rows of the first.
        let warm: Vec<i32> = (0..4 * k).map(|i| (i * 3 % k) as i32).collect();
        world.warm(0, true, &warm, 2);
        assert_eq!(world.model.tables[0].residents(0, 0, 320).count(), 260);
        let mut missed = 0;
        for step in 0..12 {
            begin(&mut world);
            for layer in 0..2 {
                let few = 1 + step * k / 12;
                let picks: Vec<i32> = (0..few).map(|_| world.random.below(length) as i32).collect();
                let all = range(layer, 0, QUERY_ROWS);
                let pick = |entry: u32| match entry % 9 {
                    0 => -1,
                    // New rows, which are landed and neither hit nor missed.
                    1 => (length + entry / 9 % (entry / k + 1)) as i32,
                    _ => picks[(entry % few) as usize],
                };
                let selection: Vec<i32> = (0..k * QUERY_ROWS).map(pick).collect();
                let mut output = world.empty_output(layer, QUERY_ROWS);
                world.resolve(&all, &selection, &mut output);
                let distinct: BTreeSet<i32> =
                    selection.into_iter().filter(|position| (0..length as i32).contains(position)).collect();
                let [hits, misses, _] = world.model.counts[layer];
                assert_eq!(hits + misses, distinct.len() as u32);
                assert!(layer == 1 || misses == 0, "{misses} rows missed");
                missed += u32::from(misses > 0);
                (0..extents.shapes[layer].waves).for_each(|wave| world.gather(&all, wave));
                world.scatter(&all);
            }
            world.report();
        }
        assert!(missed > 6, "{missed} steps missed in the second layer");
    }
}

/// A part of a step with one batch row: its query rows from `first` on.
fn range(layer: usize, first: u32, count: u32) -> StepRange {
    StepRange { layer, first: 0, count: 1, rows: QueryRange { first, count } }
}

/// Lane 0 with a sequence, in the middle of a step with three landed rows.
fn in_a_step<'a>(kernels: &'a Kernels, extents: &Extents, seed: u64) -> World<'a> {
    let mut world = World::new(kernels, extents, How { threads: 64, seed });
    world.join(0, &[90, 70], 200);
    begin(&mut world);
    world
}

fn begin(world: &mut World<'_>) {
    world.begin(&[Entry { lane: 0, accepted: 0, query_rows: QUERY_ROWS }], &[0; LANES as usize]);
}

/// Resolves `count` query rows of lane 0 from `first` on; they select positions that were never selected before.
fn resolve(world: &mut World<'_>, layer: usize, (first, count): (u32, u32), from: i32) {
    let k = world.model.extents.top_k() as i32;
    let selection: Vec<i32> = (0..k * count as i32).map(|i| from + i).collect();
    let mut output = world.empty_output(layer, count);
    world.resolve(&range(layer, first, count), &selection, &mut output);
    assert!(!world.model.lists[0].fetches.is_empty());
}

/// A layer in which lane 0 selects nothing, and whose new rows are stored.
fn nothing(world: &mut World<'_>, layer: usize) {
    let all = range(layer, 0, QUERY_ROWS);
    let mut output = world.empty_output(layer, QUERY_ROWS);
    let selection = vec![-1; (world.model.extents.top_k() * QUERY_ROWS) as usize];
    world.resolve(&all, &selection, &mut output);
    world.scatter(&all);
}

#[test]
fn a_layer_that_is_missing_or_not_stored_fails_its_step_by_query_row() {
    let Some(kernels) = kernels() else { return };
    // Query rows resolved and scattered in layer 1, and the reported cause.
    let all = (0, QUERY_ROWS);
    for (resolved, scattered, cause, value) in [
        (all, all, 0, 0),
        ((0, 0), all, 7, 0),
        ((0, 2), all, 7, 2),
        ((1, 2), all, 7, 0),
        (all, (0, 0), 8, 0),
        (all, (0, 1), 8, 1),
        ((0, 1), (1, 2), 7, 1),
    ] {
        let mut world = in_a_step(&kernels, &extents(24, ([16, 4], 0)), 11);
        nothing(&mut world, 0);
        if resolved.1 > 0 {
            resolve(&mut world, 1, resolved, 20);
            (0..world.model.extents.shapes[1].waves)
                .for_each(|wave| world.gather(&range(1, resolved.0, resolved.1), wave));
        }
        if scattered.1 > 0 {
            world.scatter(&range(1, scattered.0, scattered.1));
        }
        world.report();
        let word = world.model.sticky;
        let found = if word == u64::MAX { (0, 0) } else { ((word >> 32) as u32 & 0xF, word as u32) };
        assert_eq!(found, (cause, value), "{resolved:?} {scattered:?}");
        assert_eq!(world.model.trust[0], u32::from(cause > 0));
    }
}

#[test]
fn a_row_without_a_page_fails_its_step_and_is_not_resident_after_a_truncation() {
    let Some(kernels) = kernels() else { return };
    for (seed, short_tables) in [(1, false), (2, true)] {
        // A lane whose table is shorter than its sequence, or has fewer pages.
        let mut extents = extents(24, ([16, 4], 0));
        extents.lane_pages -= if short_tables { 12 } else { 0 };
        let mut world = World::new(&kernels, &extents, How { threads: 64, seed });
        world.pages = 8;
        world.join(0, &[90, 70], 200);
        begin(&mut world);
        // Rows on both sides of the last page's end, and all of them beyond it.
        for (layer, from) in [(0, 100), (1, 150)] {
            resolve(&mut world, layer, (0, 2), from);
            for wave in 0..world.model.extents.shapes[layer].waves {
                world.gather(&range(layer, 0, 2), wave);
            }
            world.scatter(&range(layer, 0, 3));
        }
        world.report();
        assert!(world.causes.contains(&3) && world.model.trust[0] == 2, "{:?}", world.causes);
        world.pages = usize::MAX;
        world.truncate(0, 0, 120);
        assert_eq!(world.model.tables[0].residents(0, 0, 90).count(), 0, "nothing is resident");
        begin(&mut world);
        resolve(&mut world, 0, (0, 1), 96);
        world.gather(&range(0, 0, 1), 0);
        world.report();
    }
}

#[test]
fn a_new_row_without_a_page_fails_its_step() {
    let Some(kernels) = kernels() else { return };
    let mut world = World::new(&kernels, &extents(24, ([16, 4], 0)), How { threads: 32, seed: 5 });
    world.pages = 8;
    world.join(0, &[90, 70], 127);
    begin(&mut world);
    world.scatter(&range(0, 0, 3));
    world.report();
    assert!(world.causes.contains(&3) && world.model.trust[0] == 1, "{:?}", world.causes);
}

#[test]
fn a_gather_takes_the_list_of_its_own_resolve_and_no_other() {
    let Some(kernels) = kernels() else { return };
    let extents = extents(24, ([16, 4], 0));
    // Of another layer, of other rows: one later, one less.
    for (seed, gathered) in [(1, range(0, 0, 2)), (2, range(1, 1, 2)), (3, range(1, 0, 1))] {
        let mut world = in_a_step(&kernels, &extents, seed);
        nothing(&mut world, 0);
        resolve(&mut world, 1, (0, 2), 20);
        world.gather(&gathered, 0);
        world.report();
        assert!(world.causes.contains(&5), "{:?}", world.causes);
    }
    // Of the step before.
    let mut world = in_a_step(&kernels, &extents, 4);
    resolve(&mut world, 1, (0, 2), 20);
    world.report();
    begin(&mut world);
    world.gather(&range(1, 0, 2), 0);
    world.report();
}

#[test]
fn a_gather_after_its_steps_report_moves_nothing() {
    let Some(kernels) = kernels() else { return };
    let mut world = in_a_step(&kernels, &extents(24, ([16, 4], 0)), 5);
    nothing(&mut world, 0);
    resolve(&mut world, 1, (0, 3), 20);
    world.gather(&range(1, 0, 3), 0);
    world.scatter(&range(1, 0, 3));
    world.report();
    // The lane's slots belong to another sequence now.
    world.leave(0);
    world.join(1, &[90, 70], 200);
    world.gather(&range(1, 0, 3), 0);
}

#[test]
fn ties_among_more_slots_than_a_block_keeps_are_ordered() {
    let Some(kernels) = kernels() else { return };
    let few = extents(120, ([4, 0], 0));
    let shapes = few.shapes.iter().map(|shape| TableShape { tokens: 1400, budget_blocks: 20, ..*shape });
    let lane_pages = 1400_u32.div_ceil(16);
    let shapes = shapes.collect();
    let extents = Extents { shapes, lane_pages, host_pages: LANES * lane_pages, ..few };
    for seed in 0..3 {
        // Each thread keeps 14 slots: 448 of 32 threads.
        let mut world = World::new(&kernels, &extents, How { threads: 32, seed });
        world.join(0, &[900, 500], 1300);
        for _ in 0..40 {
            let selection: Vec<i32> = (0..120).map(|_| world.random.below(1300) as i32).collect();
            one_row(&mut world, &selection);
        }
    }
}

#[test]
fn an_attention_wave_that_is_gathered_again_undoes_none_of_the_later_waves() {
    let Some(kernels) = kernels() else { return };
    let mut world = World::new(&kernels, &extents(75, ([16, 4], 0)), How { threads: 64, seed: 6 });
    world.join(0, &[90, 40], 300);
    begin(&mut world);
    nothing(&mut world, 0);
    resolve(&mut world, 1, (0, 3), 20);
    for wave in [0, 1, 0, 2, 3] {
        world.gather(&range(1, 0, 3), wave);
    }
    world.scatter(&range(1, 0, 3));
    assert!(world.model.lists[0].scratch > 150, "{} rows in scratch slots", world.model.lists[0].scratch);
    world.report();
    assert_eq!(world.causes, [0].into(), "nothing is missing");
}

#[test]
fn no_step_leaves_the_tables_and_no_lane_is_joined_with_missing_pages() {
    let Some(kernels) = kernels() else { return };
    let extents = extents(24, ([16, 4], 0));
    let mut world = World::new(&kernels, &extents, How { threads: 64, seed: 7 });
    world.refused_join(0, 64, 100, &[13]);
    world.refused_join(0, 64, 100, &[1 << 30]);
    world.refused_join(0, 64, TOKENS + 1, &[1]);
    world.refused_join(0, 0, 100, &[]);
    world.refused_join(0, 512, 100, &[0, 1, 2, 3, 4, 5, 6, 6]);
    for lane in 0..LANES {
        world.join(lane, &[64, 30], TOKENS - 2);
    }
    // One row more than there are positions: of the last lane, beyond the end of the table.
    let entries: Vec<Entry> =
        (0..LANES).map(|lane| Entry { lane, accepted: 0, query_rows: QUERY_ROWS }).collect();
    world.begin(&entries, &[0; LANES as usize]);
    world.report();
    assert_eq!(world.causes, [3].into());
}

#[test]
fn a_step_of_a_lane_without_free_stamps_fails() {
    let Some(kernels) = kernels() else { return };
    let mut world = in_a_step(&kernels, &extents(24, ([16, 4], 0)), 8);
    world.age(0, 1);
    let mut output = world.empty_output(0, 1);
    resolve(&mut world, 0, (0, 1), 20);
    world.gather(&range(0, 0, 1), 0);
    world.resolve(&range(0, 1, 1), &[60; 24], &mut output);
    assert!(output.slots.iter().all(|slot| *slot == -1), "{:?}", output.slots);
    let selections: Vec<i32> = (0..96).map(|i| 100 + i).collect();
    world.warm(0, false, &selections, 2);
    world.report();
    assert_eq!(world.causes, [3].into());
}

#[test]
fn a_cache_without_row_bytes_needs_no_gather() {
    let Some(kernels) = kernels() else { return };
    let extents = Extents { residency_only: true, ..extents(24, ([16, 4], 0)) };
    let mut world = in_a_step(&kernels, &extents, 9);
    resolve(&mut world, 0, (0, QUERY_ROWS), 20);
    resolve(&mut world, 1, (0, QUERY_ROWS), 20);
    world.report();
    assert_eq!(world.causes, [0].into());
}

/// Budgets that hold the whole selection of a step need no scratch slots. A warm-up may load more rows than budget and
/// scratch slots hold, since no attention reads them.
#[test]
fn lanes_without_scratch_slots_decode_and_warm_up_like_others() {
    let Some(kernels) = kernels() else { return };
    for (seed, scratch) in [(10, 0), (11, 0), (12, 5)] {
        let mut extents = extents(75, ([16, 4], 0));
        for shape in &mut extents.shapes {
            (shape.scratch, shape.waves) = (scratch, 1);
        }
        let mut world = World::new(&kernels, &extents, How { threads: 64, seed });
        world.join(0, &[240, 20], 260);
        let selections: Vec<i32> = (0..2 * 2 * 75).map(|i| i % 260).collect();
        world.warm(0, false, &selections, 2);
        assert_eq!(world.model.tables[1].residents(0, 0, 20).count(), 20);
        world.join(1, &[230, 240], 200);
        live(&mut world, 20);
    }
}
