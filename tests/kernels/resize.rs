//! Resizes: a lane's budgets change between its steps, with rows that move, and with data that no host would stage.

use crate::image::Extents;
use crate::model::SOUND;
use crate::world::{How, World};
use crate::{LANES, extents, live, one_row};
use forebay::residency::TableShape;

/// The layer of lane 0 with fewer blocks, and the blocks that no lane has.
fn free_blocks(world: &World<'_>) -> Vec<u32> {
    let own = &world.blocks(0)[1];
    (0..7).filter(|block| !own.contains(block)).collect()
}

#[test]
fn a_resize_of_a_long_lane_moves_more_rows_than_threads() {
    let Some(kernels) = crate::kernels() else { return };
    for (seed, form) in [(1, ([656, 0], 0)), (2, ([24, 16], 40)), (3, ([512, 128], 704))] {
        let few = extents(75, form);
        let shapes = few.shapes.iter().map(|shape| TableShape { tokens: 1400, budget_blocks: 40, ..*shape });
        let (shapes, lane_pages) = (shapes.collect(), 1400_u32.div_ceil(16));
        let extents = Extents { shapes, lane_pages, host_pages: LANES * lane_pages, ..few };
        let mut world =
            World::new(&kernels, &extents, How { threads: [32, 512, 96][seed as usize - 1], seed });
        world.join(0, &[1300, 1299], 1290);
        // Every row is resident, position by position, and those at the end become the newest.
        world.warm(0, true, &[], 0);
        world.warm_gather(0, 0, 2600);
        for first in (0..600).step_by(75) {
            let selection: Vec<i32> = (0..75).map(|i| 1289 - first - i).collect();
            one_row(&mut world, &selection);
        }
        world.resize(0, &[640, 601]);
        assert!(world.model.moved > 1200, "{} rows moved", world.model.moved);
        one_row(&mut world, &(690..765).collect::<Vec<i32>>());
        let hits: Vec<u32> = world.model.counts.iter().map(|counts| counts[0]).collect();
        assert_eq!(hits, [75, 75], "the newest rows are resident");
        world.resize(0, &[1300, 640]);
        live(&mut world, 10);
    }
}

#[test]
fn a_resize_that_cannot_be_changes_nothing_and_fails_the_lanes_steps() {
    let Some(kernels) = crate::kernels() else { return };
    let mut world = World::new(&kernels, &extents(24, ([16, 4], 0)), How { threads: 64, seed: 20 });
    world.join(0, &[150, 140], 200);
    world.warm(0, true, &[], 0);
    let (own, free) = (world.blocks(0), free_blocks(&world));
    let more = |more: &[u32]| own.iter().map(|own| [&own[..], more].concat()).collect::<Vec<_>>();
    let six = more(&[free[0], free[1], free[2]]);
    let foreign = more(&[]).into_iter().map(|own| vec![own[0], free[0], own[2]]).collect::<Vec<_>>();
    let cases = [
        ("a lane beyond the last", LANES, [60, 60], more(&[])),
        ("a lane far beyond", 1 << 30, [60, 60], more(&[])),
        ("a lane without a sequence", 1, [60, 60], more(&[])),
        ("no budget", 0, [0, 0], more(&[])),
        ("more blocks than a lane may have", 0, [321, 321], six),
        ("a block that does not exist", 0, [200, 200], more(&[13])),
        ("a foreign block among those that stay", 0, [100, 100], foreign),
        ("fewer blocks staged than the budget needs", 0, [193, 193], more(&[])),
    ];
    for (what, lane, budgets, blocks) in cases {
        world.refused_resize(lane, &budgets, &blocks, 0);
        let failed = (lane < LANES).then_some(1);
        assert_eq!(world.model.trust.get(lane as usize).copied(), failed, "{what}");
        if lane < LANES {
            let length = world.model.tables[0].head(0).unwrap().length;
            world.truncate(0, 0, length);
            assert_eq!(world.model.trust[0], SOUND);
        }
    }
    // Layers are judged one by one: what one cannot do, another one may have done.
    let mut half = more(&[]);
    half[1][0] = 13;
    world.refused_resize(0, &[140, 130], &half, 1);
}

#[test]
fn a_cache_without_row_bytes_moves_none() {
    let Some(kernels) = crate::kernels() else { return };
    let extents = Extents { residency_only: true, ..extents(24, ([16, 4], 0)) };
    let mut world = World::new(&kernels, &extents, How { threads: 64, seed: 21 });
    world.join(0, &[150, 140], 130);
    world.warm(0, true, &[], 0);
    one_row(&mut world, &(100..124).collect::<Vec<i32>>());
    world.resize(0, &[64, 40]);
    assert!(world.model.moved > 20, "{} rows moved", world.model.moved);
}

#[test]
fn a_lane_is_resized_between_any_two_steps() {
    let Some(kernels) = crate::kernels() else { return };
    for (number, threads) in [32, 128, 512].into_iter().cycle().take(9).enumerate() {
        let form = [([656, 0], 0), ([4, 8], 12), ([16, 32], 0)][number / 3];
        let how = How { threads, seed: 300 + number as u64 };
        let mut world = World::new(&kernels, &extents([24, 75][number % 2], form), how);
        world.join(0, &[320, 300], 310);
        world.warm(0, number % 2 == 0, &[], 0);
        world.warm_gather(0, 0, 640);
        let mut moved = 0;
        for _ in 0..25 {
            let k = world.model.extents.top_k();
            let selection: Vec<i32> = (0..k).map(|_| world.random.below(310) as i32).collect();
            one_row(&mut world, &selection);
            let budgets = [0, 1].map(|_| 1 + world.random.below(320));
            world.resize(0, &budgets);
            moved += world.model.moved;
        }
        assert!(moved > 100, "{moved} rows moved");
        world.compare_digests();
    }
}
