//! Lists of a lane's newest rows: of full, part-filled and empty lanes, and that a warm-up with a list brings its rows
//! back.

use crate::image::Extents;
use crate::world::{How, World};
use crate::{LANES, extents, one_row};
use forebay::residency::TableShape;

/// The positions of each table's list, ascending, without the places that have none.
fn rows(list: &[i32], tables: usize) -> Vec<Vec<i32>> {
    let of_table = |list: &[i32]| {
        let count = list.iter().position(|position| *position < 0).unwrap_or(list.len());
        assert!(list[count..].iter().all(|position| *position == -1), "{list:?}");
        let mut rows = list[..count].to_vec();
        rows.sort_unstable();
        rows
    };
    list.chunks(list.len() / tables).map(of_table).collect()
}

#[test]
fn the_newest_rows_of_a_long_lane_are_those_that_it_read_last() {
    let Some(kernels) = crate::kernels() else { return };
    for (threads, seed) in [(32, 1), (512, 2), (96, 3)] {
        let few = extents(75, ([16, 0], 0));
        let shapes = few.shapes.iter().map(|shape| TableShape { tokens: 1400, budget_blocks: 40, ..*shape });
        let (shapes, lane_pages) = (shapes.collect(), 1400_u32.div_ceil(16));
        let extents = Extents { shapes, lane_pages, host_pages: LANES * lane_pages, ..few };
        let mut world = World::new(&kernels, &extents, How { threads, seed });
        world.join(0, &[1300, 1291], 1290);
        world.warm(0, true, &[], 0);
        // All rows have one stamp.
        let highest: Vec<i32> = (1215..1290).collect();
        assert_eq!(rows(&world.newest(0), 2), [highest.clone(), highest]);
        // A step that selects some of the 75 rows, the rest being of the step before.
        one_row(&mut world, &(0..75).map(|i| i * 17).collect::<Vec<i32>>());
        one_row(&mut world, &(0..75).map(|i| 700 + i / 2).collect::<Vec<i32>>());
        let last = (38..75).map(|i| i * 17).filter(|row| !(700..738).contains(row));
        let mut wanted: Vec<i32> = (700..738).chain(last.rev().take(37)).collect();
        let missing = 75 - wanted.len();
        wanted.extend((0..38).rev().map(|i| i * 17).take(missing));
        wanted.sort_unstable();
        assert_eq!(rows(&world.newest(0), 2), [wanted.clone(), wanted]);
    }
}

#[test]
fn a_lane_with_fewer_rows_than_a_selection_lists_them_all_and_no_empty_slot() {
    let Some(kernels) = crate::kernels() else { return };
    for (number, threads) in [32, 64, 512].into_iter().enumerate() {
        let how = How { threads, seed: 30 + number as u64 };
        let mut world = World::new(&kernels, &extents(75, ([16, 4], 0)), how);
        for lane in [0, LANES, u32::MAX] {
            assert_eq!(world.newest(lane), [-1; 150], "no sequence is in lane {lane}");
        }
        world.join(0, &[100, 70], 90);
        assert_eq!(world.newest(0), [-1; 150], "nothing is resident");
        // Of 20 rows, 100 and 70 slots stay mostly empty. One row is landed as well, and is not among them.
        one_row(&mut world, &(0..75).map(|i| if i < 20 { 3 * i } else { -1 }).collect::<Vec<i32>>());
        let some: Vec<i32> = (0..20).map(|i| 3 * i).collect();
        assert_eq!(rows(&world.newest(0), 2), [some.clone(), some]);
        // More rows than one list has room for, in slots of which some are still empty; and as many as there are slots.
        one_row(&mut world, &(10..85).collect::<Vec<i32>>());
        let step: Vec<i32> = (10..85).collect();
        assert_eq!(rows(&world.newest(0), 2)[0], step);
        assert_eq!(world.model.tables[1].residents(0, 0, 70).count(), 70);
        assert_eq!(rows(&world.newest(0), 2)[1].len(), 70);
        world.leave(0);
        assert_eq!(world.newest(0), [-1; 150], "the sequence has left");
        // Empty places before those of rows: a truncation has emptied the first ones.
        world.join(0, &[100, 70], 90);
        for first in [50, 0] {
            one_row(&mut world, &(0..75).map(|i| if i < 10 { first + i } else { -1 }).collect::<Vec<i32>>());
        }
        world.truncate(0, 0, 30);
        let low: Vec<i32> = (0..10).collect();
        assert_eq!(rows(&world.newest(0), 2), [low.clone(), low]);
    }
}

#[test]
fn a_warm_up_with_the_list_brings_the_rows_back() {
    let Some(kernels) = crate::kernels() else { return };
    let mut world = World::new(&kernels, &extents(75, ([16, 4], 0)), How { threads: 128, seed: 40 });
    world.join(0, &[130, 90], 300);
    for _ in 0..6 {
        let selection: Vec<i32> = (0..75).map(|_| world.random.below(300) as i32).collect();
        one_row(&mut world, &selection);
    }
    let list = world.newest(0);
    world.leave(0);
    world.join(2, &[130, 90], 300);
    world.warm(2, false, &list, 1);
    for (table, rows) in rows(&list, 2).into_iter().enumerate() {
        assert_eq!(rows.len(), 75);
        let order = world.model.tables[table].order(2);
        assert_eq!(order.iter().map(|row| *row as i32).collect::<Vec<_>>(), rows, "{table}");
    }
}

#[test]
fn a_list_between_any_two_steps_and_resizes_equals_the_rule() {
    let Some(kernels) = crate::kernels() else { return };
    for (number, threads) in [32, 128, 512].into_iter().cycle().take(9).enumerate() {
        let how = How { threads, seed: 400 + number as u64 };
        let mut world = World::new(&kernels, &extents([24, 75, 130][number % 3], ([4, 8], 12)), how);
        world.join(0, &[320, 300], 310);
        world.warm(0, number % 2 == 0, &[], 0);
        for _ in 0..25 {
            let k = world.model.extents.top_k();
            let spread = 1 + world.random.below(310);
            let selection: Vec<i32> = (0..k).map(|_| world.random.below(spread) as i32).collect();
            one_row(&mut world, &selection);
            world.newest(0);
            let budgets = [0, 1].map(|_| 1 + world.random.below(320));
            world.resize(0, &budgets);
            world.newest(0);
        }
    }
}
