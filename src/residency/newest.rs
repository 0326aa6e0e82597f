//! The newest rows of a lane: those that it would keep if its budget shrank to their number.
//!
//! A sequence that gives up its lane for a while notes them. When it comes back, a warm-up with their positions makes
//! the rows resident that it read last. So the list has no order of its own: it is in the order of the lane's places,
//! which costs nothing here and is the same on every rank and device.
//!
//! **Cost.** The scans of one choice of victims, and one scan of the lane's stamps and positions. Nothing changes in
//! the tables.

use crate::error::{Error, Kind, Result};
use crate::residency::scan::Scan;
use crate::residency::tables::{EMPTY, FREE, LayerTables, UNUSED};
use crate::residency::victims::Edge;
use crate::residency::workspace::Workspace;

impl LayerTables {
    /// Writes the positions of the newest resident rows of `lane` by (stamp, position), as many as `positions` has room
    /// for, in the order of the lane's places, and -1 behind them. Landed rows are not resident. A lane without a
    /// sequence has no rows.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a workspace of smaller tables. An error changes nothing.
    pub fn newest<S: Scan>(
        &self,
        scan: &S,
        lane: u32,
        work: &mut Workspace,
        positions: &mut [i32],
    ) -> Result<()> {
        let head = self.head(lane).copied().unwrap_or_default();
        if !self.has_room(&head, work) {
            let value = work.victims.len() as u64;
            return Err(Error::new(Kind::OutOfRange, "newest rows").at("workspace").with("value", value));
        }
        let others = (head.budget as usize).saturating_sub(positions.len());
        let edge = match others {
            // Every row is above empty slots.
            0 => Edge { bound: FREE, next_victim: EMPTY },
            _ => {
                let oldest = self.oldest(scan, lane, head.stamp + 1, work);
                self.find_victims(scan, lane, oldest, others, work)
            }
        };
        let rows = self.lane_slots(lane).filter_map(|slot| {
            let (stamp, position) = (*self.stamps().get(slot)?, *self.position_of.get(slot)?);
            let newer = stamp > edge.bound || stamp == edge.bound && position >= edge.next_victim;
            (newer && stamp != UNUSED && position != EMPTY).then_some(position as i32)
        });
        let rest = rows.chain(std::iter::repeat(-1));
        positions.iter_mut().zip(rest).for_each(|(to, position)| *to = position);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::residency::{Portable, TableShape};

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

    /// Lane 0 with 70 slots in blocks 4 and 1, whose first places hold rows (position, stamp).
    fn lane(rows: &[(u32, u32)]) -> LayerTables {
        let mut tables = LayerTables::new(SHAPE).unwrap();
        tables.join(0, &[4, 1], 70, 150).unwrap();
        for (place, (position, stamp)) in rows.iter().enumerate() {
            let slot = [4, 1][place / 64] * 64 + place % 64;
            tables.slot_of[*position as usize] = SHAPE.budget_base + slot as u32;
            (tables.position_of[slot], tables.stamps_mut()[slot]) = (*position, *stamp);
            tables.heads[0].stamp = tables.heads[0].stamp.max(*stamp);
        }
        tables.validate().unwrap();
        tables
    }

    fn newest(tables: &LayerTables, lane: u32, count: usize) -> Vec<i32> {
        let (mut work, mut positions) = (Workspace::new(&SHAPE, 8).unwrap(), vec![7; count]);
        tables.newest(&Portable, lane, &mut work, &mut positions).unwrap();
        positions
    }

    #[test]
    fn ties_are_listed_by_position_and_empty_slots_never() {
        // Oldest first: 2 7 | 4 | 1 8 | 3 6 9, the stamps being 2 to 5.
        let tables = lane(&[(3, 5), (7, 2), (1, 4), (9, 5), (2, 2), (8, 4), (6, 5), (4, 3)]);
        let before = LayerTables::from_words(SHAPE, &tables.words()).unwrap();
        assert_eq!(newest(&tables, 0, 1), [9]);
        assert_eq!(newest(&tables, 0, 4), [3, 9, 8, 6]);
        assert_eq!(newest(&tables, 0, 7), [3, 7, 1, 9, 8, 6, 4]);
        assert_eq!(newest(&tables, 0, 10), [3, 7, 1, 9, 2, 8, 6, 4, -1, -1]);
        assert_eq!(newest(&tables, 0, 80)[..10], newest(&tables, 0, 10));
        assert_eq!(tables.words(), before.words());
    }

    #[test]
    fn a_full_lane_of_one_stamp_lists_the_highest_positions() {
        // As many rows as slots, the last ones in the second block; places behind the budget are of no lane.
        let tables = lane(&std::array::from_fn::<_, 70, _>(|place| (139 - place as u32, 1)));
        assert_eq!(newest(&tables, 0, 3), [139, 138, 137]);
        assert_eq!(newest(&tables, 0, 69)[68], 71);
        assert_eq!(newest(&tables, 0, 71)[69..], [70, -1]);
    }

    #[test]
    fn a_lane_without_rows_or_without_a_sequence_has_none() {
        for lane_number in [0, 1, 2, u32::MAX] {
            assert_eq!(newest(&lane(&[]), lane_number, 3), [-1; 3]);
        }
    }

    #[test]
    fn a_workspace_of_smaller_tables_is_refused() {
        let (tables, mut positions) = (lane(&[(3, 5)]), [7]);
        let mut work = Workspace::new(&TableShape { tokens: 60, budget_blocks: 1, ..SHAPE }, 8).unwrap();
        let error = tables.newest(&Portable, 0, &mut work, &mut positions).unwrap_err();
        assert_eq!((error.kind(), error.place(), positions), (Kind::OutOfRange, "workspace", [7]));
    }
}
