//! Resize: gives a running lane another budget.
//!
//! A budget ends with the lane's last places, so a shrink gives up the last places, and the blocks behind the new end
//! leave. The rows that stay there move to empty places before it. So the block list says which blocks leave and which
//! come, on every rank and on the host, and no device is asked.
//!
//! A shrink sets the head's `min_stamp` to the stamp of the newest row that leaves, or to that of empty slots if none
//! does. This may be the stamp of the last step. A growth sets it to that of empty slots. `next_victim` is then not
//! known. `full_places` is lowered to the new end. Words of the block list beyond its end keep what was there.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::residency::commit::Moved;
use crate::residency::scan::{At, Scan};
use crate::residency::tables::{ABSENT, EMPTY, FREE, LaneHead, LayerTables, UNUSED};
use crate::residency::workspace::Workspace;

/// What a resize did to the rows of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resized {
    /// Rows that are no longer resident.
    pub left: u32,
    /// Rows that got another slot.
    pub moved: u32,
}

impl LayerTables {
    /// Changes the budget of `lane` to `budget` slots. `blocks` is the lane's whole list afterwards, in its order: the
    /// present blocks with the last ones cut off, or with new blocks (none of them in a lane) at the end. A shrink to
    /// fewer slots than resident rows removes the oldest rows. Then it moves each other row at or beyond the new end
    /// to an empty place before it and calls `copy`, by ascending place. No copy reads or writes a slot that another
    /// one writes, so the copies may run in any order. A growth adds empty slots and moves nothing.
    ///
    /// Length, landed rows and stamps of rows stay as they are. The same budget again changes nothing.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a lane without a sequence, a budget of 0 or beyond the lane's extents, a list of
    /// another length than the budget has blocks, a block beyond the extents, a list that changes a block that stays,
    /// and a workspace of smaller tables. An error changes nothing.
    pub fn resize<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        blocks: &[u32],
        budget: u32,
        work: &mut Workspace,
        copy: impl FnMut(Moved),
    ) -> Result<Resized> {
        let present = self.check_resize(lane, blocks, budget, work)?.budget;
        if budget < present {
            return Ok(self.shrink(scan, lane, budget, work, copy));
        }
        if budget > present {
            self.grow(lane, blocks, budget);
        }
        Ok(Resized::default())
    }

    fn check_resize(&self, lane: u32, blocks: &[u32], budget: u32, work: &Workspace) -> Result<&LaneHead> {
        let bad = |place: &'static str, value: u32| {
            Err(Error::new(Kind::OutOfRange, "resize").at(place).with("value", value).with("lane", lane))
        };
        let Some(head) = self.heads.get(lane as usize).filter(|head| head.budget > 0) else {
            return bad("lane", lane);
        };
        let count = budget.div_ceil(SLOT_BLOCK);
        if budget == 0 || count > self.shape.lane_blocks() {
            return bad("budget", budget);
        }
        if blocks.len() != count as usize {
            return bad("number of blocks", blocks.len() as u32);
        }
        if let Some(block) = blocks.iter().find(|block| **block >= self.shape.budget_blocks) {
            return bad("block", *block);
        }
        let changed = blocks.iter().zip(self.lane_blocks(lane)).find(|(block, present)| block != present);
        if let Some((block, _)) = changed {
            return bad("blocks of the lane", *block);
        }
        if !self.has_room(head, work) {
            return bad("workspace", work.victims.len() as u32);
        }
        Ok(head)
    }

    /// Lowers the budget of `lane` to `budget`.
    fn shrink<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        budget: u32,
        work: &mut Workspace,
        copy: impl FnMut(Moved),
    ) -> Resized {
        let head = self.heads[lane as usize];
        let left = self.forget_oldest(scan, lane, (head.budget - budget) as usize, work);
        let moved = self.move_inside(scan, lane, budget, work, copy);
        self.clear(lane, budget..head.blocks * SLOT_BLOCK, UNUSED);
        let head = &mut self.heads[lane as usize];
        (head.budget, head.blocks) = (budget, budget.div_ceil(SLOT_BLOCK));
        // If a row has left, every slot holds one now: the empty slots went first. If none has, no place before became
        // empty.
        head.full_places = head.full_places.min(budget);
        // The rows that left may have the stamp of the last step, which new rows get too. So no row is known to be the
        // next victim.
        head.next_victim = EMPTY;
        Resized { left, moved }
    }

    /// Gives up the `need` oldest slots of `lane`, the empty ones first, and forgets the rows in them. Returns their
    /// number. The lane's `min_stamp` is then that of the newest of these slots.
    fn forget_oldest<S: Scan>(&mut self, scan: &S, lane: u32, need: usize, work: &mut Workspace) -> u32 {
        let (start, base) = (self.map_start(lane), self.shape.budget_base);
        let oldest = self.oldest(scan, lane, self.heads[lane as usize].stamp + 1, work);
        self.choose_victims(scan, lane, oldest, need, work);
        let mut left = 0;
        for victim in &work.victims[..need] {
            let position = std::mem::replace(&mut self.position_of[*victim as usize], EMPTY);
            if position != EMPTY {
                self.slot_of[start + position as usize] = ABSENT;
                self.stamp_of[(base + victim) as usize] = FREE;
                left += 1;
            }
        }
        left
    }

    /// Moves the rows of `lane` at places from `budget` on to the empty places before it. Returns their number.
    fn move_inside<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        budget: u32,
        work: &mut Workspace,
        mut copy: impl FnMut(Moved),
    ) -> u32 {
        let (start, base) = (self.map_start(lane), self.shape.budget_base);
        let LaneHead { budget: present, stamp, .. } = self.heads[lane as usize];
        self.split(scan, lane, At { bound: FREE, now: stamp + 1 }, work);
        let first_places = (0..).step_by(SLOT_BLOCK as usize);
        for (first, (rows, empty)) in first_places.zip(work.older.iter_mut().zip(&mut work.tied)) {
            let stays = below(first, budget);
            *rows = below(first, present) & !stays & !*empty;
            *empty &= stays;
        }
        let count = scan.list(&work.older, self.lane_blocks(lane), &mut work.victims);
        scan.list(&work.tied, self.lane_blocks(lane), &mut work.ties);
        let mut moved = 0;
        for (from, to) in work.victims[..count].iter().zip(&work.ties) {
            let (position, stamp) = (self.position_of[*from as usize], self.stamps()[*from as usize]);
            // Only a block that is twice in the lane's list has a slot without a row here.
            if position != EMPTY {
                let to = self.replace(start, *to, position, stamp);
                copy(Moved { from: base + from, to });
                moved += 1;
            }
        }
        moved
    }

    /// Raises the budget of `lane` to `budget`.
    fn grow(&mut self, lane: u32, blocks: &[u32], budget: u32) {
        let head = &mut self.heads[lane as usize];
        let present = head.budget;
        (head.budget, head.blocks) = (budget, blocks.len() as u32);
        (head.min_stamp, head.next_victim) = (FREE, EMPTY);
        let range = self.block_range(lane);
        self.blocks[range].copy_from_slice(blocks);
        // The places beyond are unused already, because all slots of a block without a lane are.
        self.clear(lane, present..budget, FREE);
    }

    /// Empties the slots at some places of `lane`, and gives them a stamp.
    fn clear(&mut self, lane: u32, places: Range<u32>, stamp: u32) {
        for index in places.start / SLOT_BLOCK..places.end.div_ceil(SLOT_BLOCK) {
            let Some(block) = self.lane_blocks(lane).get(index as usize) else { return };
            let (first, slot) = (index * SLOT_BLOCK, (block * SLOT_BLOCK) as usize);
            let from = slot + places.start.saturating_sub(first) as usize;
            let to = slot + (places.end - first).min(SLOT_BLOCK) as usize;
            self.position_of[from..to].fill(EMPTY);
            self.stamps_mut()[from..to].fill(stamp);
        }
    }
}

/// The places below `end`, as the bits of the block whose first place is `first`.
const fn below(first: u32, end: u32) -> u64 {
    match end.saturating_sub(first) {
        places @ 0..SLOT_BLOCK => (1 << places) - 1,
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::residency::{Fetch, Portable, QueryRange, Selected, TableShape};

    const SHAPE: TableShape = TableShape {
        lanes: 2,
        tokens: 200,
        query_rows: 2,
        scratch: 8,
        waves: 1,
        scratch_base: 1,
        landing_base: 32,
        budget_base: 64,
        budget_blocks: 6,
    };
    const NONE: (u32, u32) = (EMPTY, FREE);
    const BEYOND: (u32, u32) = (EMPTY, UNUSED);

    fn work() -> Workspace {
        Workspace::new(&SHAPE, 8).unwrap()
    }

    /// Lane 0 with rows (position, stamp) by place, [`NONE`] for no row, in blocks 4, 1 and 3 as far as it needs them.
    fn lane(budget: u32, stamp: u32, rows: &[(u32, u32)]) -> LayerTables {
        let mut tables = LayerTables::new(SHAPE).unwrap();
        let blocks = [4, 1, 3];
        tables.join(0, &blocks[..budget.div_ceil(64) as usize], budget, 150).unwrap();
        for (place, (position, stamp)) in rows.iter().enumerate().filter(|(_, row)| row.0 != EMPTY) {
            let slot = blocks[place / 64] as usize * 64 + place % 64;
            tables.slot_of[*position as usize] = SHAPE.budget_base + slot as u32;
            (tables.position_of[slot], tables.stamps_mut()[slot]) = (*position, *stamp);
        }
        tables.heads[0].stamp = stamp;
        tables.validate().unwrap();
        tables
    }

    /// The first places of lane 0.
    fn places(tables: &LayerTables, count: usize) -> Vec<(u32, u32)> {
        let slots = tables.lane_slots(0).take(count);
        slots.map(|slot| (tables.position_of[slot], tables.stamps()[slot])).collect()
    }

    /// Resizes lane 0; returns the result and the places from and to which rows were copied.
    fn resize(tables: &mut LayerTables, blocks: &[u32], budget: u32) -> (Resized, Vec<(usize, usize)>) {
        let slots: Vec<usize> = tables.lane_slots(0).collect();
        let place = |slot: u32| slots.iter().position(|s| s + SHAPE.budget_base as usize == slot as usize);
        let mut moves = Vec::new();
        let copy = |m: Moved| moves.push((place(m.from).unwrap(), place(m.to).unwrap()));
        let done = tables.resize(&Portable, 0, blocks, budget, &mut work(), copy).unwrap();
        tables.validate().unwrap();
        (done, moves)
    }

    /// The example in the module's head.
    const ROWS: [(u32, u32); 10] =
        [(3, 5), (7, 2), (1, 4), (9, 5), (2, 2), (8, 4), NONE, (5, 1), (6, 5), (4, 3)];

    #[test]
    fn the_example_of_the_page() {
        let mut tables = lane(10, 5, &ROWS);
        let done = resize(&mut tables, &[4], 6);
        assert_eq!(done, (Resized { left: 3, moved: 2 }, vec![(8, 1), (9, 4)]));
        let six = [(3, 5), (6, 5), (1, 4), (9, 5), (4, 3), (8, 4)];
        assert_eq!(places(&tables, 7), [&six[..], &[BEYOND]].concat());
        assert_eq!((tables.heads[0].min_stamp, tables.heads[0].next_victim), (2, EMPTY));
        // The rows do not come back with the slots.
        assert_eq!(resize(&mut tables, &[4], 8), (Resized::default(), vec![]));
        assert_eq!(places(&tables, 9), [&six[..], &[NONE, NONE, BEYOND]].concat());
        assert_eq!(tables.heads[0].min_stamp, FREE);

        let mut tables = lane(10, 5, &ROWS);
        let done = resize(&mut tables, &[4], 7);
        assert_eq!(done, (Resized { left: 2, moved: 2 }, vec![(8, 4), (9, 6)]));
        let seven = [(3, 5), (7, 2), (1, 4), (9, 5), (6, 5), (8, 4), (4, 3), BEYOND];
        assert_eq!(places(&tables, 8), seven, "a tie with row 2: row 7 stays");
        assert_eq!(tables.heads[0].min_stamp, 2);
    }

    #[test]
    fn a_shrink_that_no_row_leaves_moves_rows_only() {
        // Places 60 to 69 hold rows, and 128: the last block leaves, and the other two have empty places before 66.
        let mut rows = vec![NONE; 129];
        (60..70).for_each(|place| rows[place] = (place as u32, 3));
        rows[128] = (2, 2);
        let mut tables = lane(130, 3, &rows);
        let moves = vec![(66, 0), (67, 1), (68, 2), (69, 3), (128, 4)];
        assert_eq!(resize(&mut tables, &[4, 1], 66), (Resized { left: 0, moved: 5 }, moves));
        assert_eq!(places(&tables, 6), [(66, 3), (67, 3), (68, 3), (69, 3), (2, 2), NONE]);
        assert_eq!(tables.order(0), [2, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]);
        // As many slots as rows: the last empty places are given up.
        let moves = vec![(60, 5), (61, 6), (62, 7), (63, 8), (64, 9), (65, 10)];
        assert_eq!(resize(&mut tables, &[4], 11), (Resized { left: 0, moved: 6 }, moves));
        assert_eq!((tables.heads[0].min_stamp, tables.heads[0].next_victim), (FREE, EMPTY));
        assert_eq!(tables.lane_slots(0).count(), 64);
    }

    #[test]
    fn a_budget_below_the_last_selection_has_no_next_victim() {
        let mut tables = lane(4, 5, &[(8, 5), (2, 5), (6, 5), (4, 5)]);
        tables.commit(&Portable, 0, 0, 2, |_| {}).unwrap();
        assert_eq!(resize(&mut tables, &[4], 2), (Resized { left: 2, moved: 1 }, vec![(2, 1)]));
        assert_eq!((tables.heads[0].min_stamp, tables.heads[0].next_victim), (5, EMPTY));
        // New rows get stamp 5 as well, and the lowest position leaves first.
        tables.commit(&Portable, 0, 1, 2, |_| {}).unwrap();
        assert_eq!(tables.order(0), [8, 150]);
        tables.validate().unwrap();
        tables.commit(&Portable, 0, 2, 0, |_| {}).unwrap();
        assert_eq!(tables.order(0), [151, 152]);
        tables.validate().unwrap();
    }

    #[test]
    fn growing_and_shrinking_back_keeps_every_word() {
        let mut tables = lane(10, 5, &ROWS);
        resize(&mut tables, &[4], 6);
        // A growth forgets the bound that the shrink left, because empty slots are older.
        tables.heads[0].min_stamp = FREE;
        let before = LayerTables::from_words(SHAPE, &tables.words()).unwrap();
        let same = tables.resize(&Portable, 0, &[4], 6, &mut work(), |_| panic!("no row moves")).unwrap();
        assert_eq!((same, tables.words()), (Resized::default(), before.words()));
        for (blocks, budget) in [(&[4][..], 7), (&[4], 64), (&[4, 0], 65), (&[4, 5, 2], 150)] {
            assert_eq!(resize(&mut tables, blocks, budget), (Resized::default(), vec![]));
            assert_eq!(tables.head(0).map(|h| (h.budget, h.blocks)), Some((budget, blocks.len() as u32)));
            assert_eq!(resize(&mut tables, &[4], 6), (Resized::default(), vec![]));
            // Words of the list beyond its end mean nothing.
            tables.blocks[1..].fill(0);
            assert_eq!(tables.words(), before.words(), "{budget}");
        }
    }

    #[test]
    fn refused_resizes_change_nothing() {
        let mut tables = lane(100, 5, &ROWS);
        let narrow = || Workspace::new(&TableShape { tokens: 100, budget_blocks: 1, ..SHAPE }, 8).unwrap();
        let before = LayerTables::from_words(SHAPE, &tables.words()).unwrap();
        let mut refused = |lane, blocks: &[u32], budget, work: &mut Workspace, place: &str| {
            let copy = |_| panic!("a copy of a refused resize");
            let error = tables.resize(&Portable, lane, blocks, budget, work, copy).unwrap_err();
            assert_eq!((error.kind(), error.operation(), error.place()), (Kind::OutOfRange, "resize", place));
            assert_eq!(tables.words(), before.words());
        };
        for (lane, blocks, budget, place) in [
            (1, &[0][..], 10, "lane"),
            (2, &[0], 10, "lane"),
            (u32::MAX, &[0], 10, "lane"),
            (0, &[], 0, "budget"),
            (0, &[4, 1, 0, 2, 3], 257, "budget"),
            (0, &[4, 1, 0, 2], u32::MAX, "budget"),
            (0, &[4, 1], 64, "number of blocks"),
            (0, &[4], 65, "number of blocks"),
            (0, &[4, 1, 6], 150, "block"),
            (0, &[4, 1, u32::MAX], 150, "block"),
            (0, &[1], 50, "blocks of the lane"),
            (0, &[4, 2], 100, "blocks of the lane"),
            (0, &[1, 4, 0], 150, "blocks of the lane"),
        ] {
            refused(lane, blocks, budget, &mut work(), place);
        }
        for (blocks, budget) in [(&[4][..], 20), (&[4, 1], 100), (&[4, 1, 0], 150)] {
            refused(0, blocks, budget, &mut narrow(), "workspace");
        }
    }

    /// A caller that breaks the rule about blocks gets wrong rows, but no panic.
    #[test]
    fn a_block_that_is_twice_in_lists_causes_no_panic() {
        let mut tables = LayerTables::new(SHAPE).unwrap();
        tables.join(0, &[3, 3, 3], 150, 150).unwrap();
        tables.join(1, &[3], 40, 200).unwrap();
        for (lane, budget) in [(0, 50_u32), (1, 64), (0, 190), (1, 3), (0, 129), (0, 10), (1, 100), (0, 1)] {
            for count in 1..4 {
                let picks = [0, 1, 2, 3, 4, 5, 6, 7].map(|pick| pick * 19 + count);
                let (mut slots, mut fetches) = ([0; 8], [Fetch { position: 0, slot: 0 }; 8]);
                let selected = Selected { selection: &picks[..], slots: &mut slots, fetches: &mut fetches };
                tables.warm(&Portable, lane, selected, &mut work()).unwrap();
            }
            let blocks = &[3, 3, 3][..budget.div_ceil(64) as usize];
            tables.resize(&Portable, lane, blocks, budget, &mut work(), |_| {}).unwrap();
        }
    }

    /// Steps and resizes from a seed; returns each resize's places: from, to, and the new budget.
    fn live(mut seed: u64) -> Vec<(Vec<(usize, usize)>, u32)> {
        let mut next = |end: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as u32 % end
        };
        let mut tables = lane(150, 1, &[]);
        (0..40)
            .map(|_| {
                let picks = [0; 8].map(|_| next(150) as i32);
                let (mut slots, mut fetches) = ([0; 8], [Fetch { position: 0, slot: 0 }; 8]);
                let selected = Selected { selection: &picks[..], slots: &mut slots, fetches: &mut fetches };
                let rows = QueryRange { first: 0, count: 1 };
                tables.commit(&Portable, 0, 0, 1, |_| {}).unwrap();
                tables.resolve(&Portable, 0, rows, selected, &mut work()).unwrap();
                let budget = 1 + next(150);
                (resize(&mut tables, &[4, 1, 3][..budget.div_ceil(64) as usize], budget).1, budget)
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
        #[test]
        fn every_copy_goes_from_a_place_that_goes_to_one_that_stays(seed: u64) {
            let resizes = live(seed);
            prop_assert!(resizes.iter().any(|(moves, _)| moves.len() > 1));
            for (moves, budget) in resizes {
                prop_assert!(moves.iter().all(|(from, to)| *from >= budget as usize && *to < budget as usize));
                prop_assert!(moves.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
            }
        }
    }
}
