//! Layers that share a selection: one table and one list of fetches, slabs and rows of each layer's own, and gathers
//! that take a list out of turn.

use crate::image::Extents;
use crate::model::{SOUND, StepRange};
use crate::world::{How, World};
use crate::{FORMS, QUERY_ROWS, begin, extents, one_row, range};
use forebay::{Geometry, Shape};
use forebay_standin::Kernels;

/// The same tables, each with so many layers. The first layer has the rows that it had, the others have rows of other
/// sizes, some of two runs.
pub fn grouped(of: Extents, members: [usize; 2], number: usize) -> Extents {
    let shape = *of.geometries[0].shape();
    let layers = members.iter().sum();
    let other = |layer: usize| {
        let (runs, host_stride) = FORMS[(number + layer) % FORMS.len()];
        Geometry::new(Shape { runs, host_stride, ..shape }).unwrap()
    };
    let geometries = (0..layers).map(|layer| if layer == 0 { of.geometries[0] } else { other(layer) });
    Extents { geometries: geometries.collect(), members: members.to_vec(), ..of }
}

/// Lane 0 with a sequence, in the middle of a step, whose second group has just been resolved: it missed rows that
/// several waves fetch.
fn resolved<'a>(kernels: &'a Kernels, extents: &Extents, seed: u64) -> World<'a> {
    let mut world = World::new(kernels, extents, How { threads: 64, seed });
    world.join(0, &[90, 40], 300);
    begin(&mut world);
    let nothing = vec![-1; (extents.top_k() * QUERY_ROWS) as usize];
    select(&mut world, 0, &nothing);
    let all: Vec<i32> = (20..20 + nothing.len() as i32).collect();
    select(&mut world, 2, &all);
    assert!(world.model.lists[0].scratch > extents.top_k() as usize, "rows for several waves");
    world
}

/// Resolves in the first layer of a group.
fn select(world: &mut World<'_>, layer: usize, selection: &[i32]) {
    let mut output = world.empty_output(layer, QUERY_ROWS);
    world.resolve(&range(layer, 0, QUERY_ROWS), selection, &mut output);
}

fn extents_of_groups() -> Extents {
    grouped(extents(75, ([16, 4], 0)), [2, 3], 1)
}

/// The waves of the second group, and every query row.
fn all(layer: usize) -> StepRange {
    range(layer, 0, QUERY_ROWS)
}

#[test]
fn every_layer_of_a_group_gathers_all_waves_of_its_first_layers_list() {
    let Some(kernels) = crate::kernels() else { return };
    let extents = extents_of_groups();
    let waves = extents.shapes[1].waves;
    // Layer by layer, in turn, and the first layer last; a wave that comes again undoes nothing.
    let by_layer: Vec<(usize, u32)> =
        (2..5).flat_map(|layer| (0..waves).map(move |wave| (layer, wave))).collect();
    let in_turn = (0..waves).flat_map(|wave| (2..5).map(move |layer| (layer, wave))).collect();
    let backwards =
        (2..5).rev().flat_map(|layer| (0..waves).flat_map(move |wave| [(layer, wave), (layer, 0)]));
    for (seed, gathers) in [(1, by_layer), (2, in_turn), (3, backwards.collect())] {
        let mut world = resolved(&kernels, &extents, seed);
        let misses = world.model.lists[0].fetches.len() as u32;
        gathers.into_iter().for_each(|(layer, wave)| world.gather(&all(layer), wave));
        (0..5).for_each(|layer| world.scatter(&all(layer)));
        world.report();
        assert_eq!(world.causes, [0].into());
        let counts: Vec<[u32; 3]> = world.model.counts.clone();
        assert_eq!(counts[0][1] + counts[1][1], 0);
        assert!(counts[2][1] == misses && counts[3] == counts[2] && counts[4] == counts[2], "{counts:?}");
    }
}

/// Gathers that must not take the list: they copy nothing, fail the step, and leave the turn of the layer as it is.
#[test]
fn a_gather_in_a_group_takes_the_list_of_its_own_first_layer_and_step_in_turn() {
    let Some(kernels) = crate::kernels() else { return };
    let extents = extents_of_groups();
    let lost = (2, [5].into());
    let wave = (1, [6].into());
    let cases: [(StepRange, u32, _); 7] = [
        // Of another group, its first layer and one that follows.
        (all(0), 0, lost.clone()),
        (all(1), 0, lost.clone()),
        // Of other query rows.
        (range(3, 1, 2), 0, lost.clone()),
        (range(4, 0, 1), 0, lost.clone()),
        // A wave before the first one, in a layer that follows, though the layer before has gathered it.
        (all(3), 1, lost.clone()),
        (all(4), 3, lost),
        // A wave left out.
        (all(2), 2, wave),
    ];
    for (seed, (wrong, number, (trust, causes))) in (10..).zip(cases) {
        let mut world = resolved(&kernels, &extents, seed);
        world.gather(&all(2), 0);
        world.gather(&wrong, number);
        assert_eq!(world.model.trust[0], trust, "{wrong:?} wave {number}");
        // What is due can still come.
        for layer in 2..5 {
            (0..extents.shapes[1].waves).for_each(|wave| world.gather(&all(layer), wave));
        }
        (0..5).for_each(|layer| world.scatter(&all(layer)));
        world.report();
        assert_eq!(world.causes, causes, "{wrong:?} wave {number}");
    }
    // Of the step before.
    let mut world = resolved(&kernels, &extents, 20);
    world.gather(&all(2), 0);
    begin(&mut world);
    world.gather(&all(3), 0);
    assert_eq!(world.model.trust[0], 2);
}

/// The list of a group that a later resolve takes over, or the report finds, with one layer's turn not at its end.
#[test]
fn a_layer_of_a_group_that_lacks_its_gather_fails_the_step_and_the_lane_trusts_no_row() {
    let Some(kernels) = crate::kernels() else { return };
    let extents = extents_of_groups();
    let waves = extents.shapes[1].waves;
    // Waves that each layer of the second group gathers, the cause, and the layer that is named.
    for (seed, (gathered, cause, named)) in (30..).zip([
        ([waves, waves, 0], 5, 4),
        ([waves, 0, waves], 5, 3),
        ([0, waves, waves], 5, 2),
        ([waves, waves - 1, waves], 6, 3),
        // The layer without any row comes first: it has rows by its tables that have no bytes.
        ([1, waves, 0], 5, 4),
        ([1, 1, waves], 6, 2),
    ]) {
        for later in [false, true] {
            let mut world = resolved(&kernels, &extents, seed);
            for (layer, gathered) in (2..5).zip(gathered) {
                (0..gathered).for_each(|wave| world.gather(&all(layer), wave));
            }
            if later {
                select(&mut world, 0, &vec![-1; (extents.top_k() * QUERY_ROWS) as usize]);
            }
            (0..5).for_each(|layer| world.scatter(&all(layer)));
            world.report();
            let found = ((world.model.sticky >> 32) as u32 & 0xF, world.model.sticky as u32);
            assert_eq!(found, (cause, if later { 0 } else { named }), "{gathered:?}");
            assert_eq!(world.model.trust[0], if cause == 5 { 2 } else { 1 });
            world.truncate(0, 0, 230);
            let rows = world.model.tables[1].residents(0, 0, 40).count();
            assert_eq!((world.model.trust[0], rows == 0), (SOUND, cause == 5), "{rows} rows are resident");
        }
    }
}

/// A lane whose rows are all resident and have their bytes in every layer.
fn warm<'a>(kernels: &'a Kernels, extents: &Extents, seed: u64) -> World<'a> {
    let mut world = World::new(kernels, extents, How { threads: 96, seed });
    world.join(0, &[150, 140], 130);
    world.warm(0, true, &[], 0);
    world.warm_gather(0, 0, 2 * 150 + 3 * 140);
    let k = extents.top_k() as i32;
    one_row(&mut world, &(129 - k..129).collect::<Vec<i32>>());
    world
}

#[test]
fn a_resize_moves_rows_in_every_layer_of_a_group() {
    let Some(kernels) = crate::kernels() else { return };
    for (number, form) in FORMS.into_iter().enumerate() {
        let extents = grouped(extents(24, form), [2, 3], number);
        let mut world = warm(&kernels, &extents, 40 + number as u64);
        world.resize(0, &[64, 100]);
        let both = world.model.moved;
        world.resize(0, &[64, 40]);
        // Of the second group alone, in its three layers.
        let second = world.model.moved - both;
        assert!(both > 100 && second >= 24 && second.is_multiple_of(3), "{both} rows, then {second}");
        // The report has them all, once.
        one_row(&mut world, &(0..24).collect::<Vec<i32>>());
        assert_eq!(world.model.moved, 0);
    }
}

#[test]
fn a_group_without_row_bytes_moves_and_gathers_none() {
    let Some(kernels) = crate::kernels() else { return };
    let extents = Extents { residency_only: true, ..grouped(extents(24, ([16, 4], 0)), [2, 3], 2) };
    let mut world = warm(&kernels, &extents, 50);
    world.resize(0, &[64, 40]);
    assert!(world.model.moved > 60, "{} rows moved", world.model.moved);
    begin(&mut world);
    let selection: Vec<i32> = (0..3 * 24).collect();
    (0..2).for_each(|table| select(&mut world, extents.layers_of(table).start, &selection));
    world.report();
    assert_eq!(world.causes, [0].into());
}

/// Two rows are accepted, in slots of the same numbers in every layer.
#[test]
fn a_commit_moves_landed_rows_in_every_layer_of_a_group() {
    let Some(kernels) = crate::kernels() else { return };
    for (number, form) in FORMS.into_iter().enumerate() {
        let extents = grouped(extents(24, form), [2, 3], number);
        let mut world = warm(&kernels, &extents, 60 + number as u64);
        begin(&mut world);
        let nothing = vec![-1; 24 * QUERY_ROWS as usize];
        for table in 0..2 {
            let layers = world.model.extents.layers_of(table);
            select(&mut world, layers.start, &nothing);
            layers.for_each(|layer| world.scatter(&all(layer)));
        }
        world.report();
        world.truncate(0, 2, 132);
        assert_eq!(world.model.tables[1].head(0).unwrap().length, 132);
        one_row(&mut world, &(108..132).collect::<Vec<i32>>());
    }
}
