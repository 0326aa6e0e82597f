//! Divide: makes the index lists of split attention from the slots that a resolve returned.
//!
//! Attention over the resident rows can run while the other rows are fetched, so these two groups have separate index
//! lists. If a step fetches more rows beyond its budget than the scratch slots hold, each attention wave has an index
//! list of its own. Every slot of the resolve is in exactly one index list, and each index list keeps the order of the
//! selection.
//!
//! A bit for each slot marks the fetched rows; the bits are set before and cleared after. Rows of different waves use
//! the same scratch slots. For those, the row's rank among the fetches gives the wave.

use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::residency::tables::OPERATION;
use crate::residency::{Fetch, TableShape};

/// The results of a lane's resolve: see [`crate::residency::Selected`].
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// The selected positions, `[query rows][k]`.
    pub selection: &'a [i32],
    /// The slots of these positions, `[query rows][k]`.
    pub slots: &'a [i32],
    /// The rows to fetch.
    pub fetches: &'a [Fetch],
    /// The number of fetches into scratch slots; they are the first of `fetches`.
    pub scratch: usize,
}

/// The working memory of [`Divider::divide`]: one bit for each slot, clear between calls.
#[derive(Debug)]
pub struct Divider {
    fetched: Vec<u64>,
}

impl Divider {
    /// Working memory for layers of at most `slots` slots.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    pub fn new(slots: u32) -> Result<Self> {
        Ok(Divider { fetched: filled((slots as usize).div_ceil(64), 0, OPERATION, "memory to divide")? })
    }

    /// Calls `list(query row, list number, slot)` for every valid entry, in the order of the selection. Index list 0
    /// has the rows that were resident and the new rows of the step; index list `1 + wave` has the rows that `wave`
    /// fetches. `k` is the number of selected positions of a query row.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for results of another layer or with other sizes.
    pub fn divide(
        &mut self,
        shape: &TableShape,
        answered: &Answered<'_>,
        k: usize,
        mut list: impl FnMut(usize, usize, i32),
    ) -> Result<()> {
        let Answered { selection, slots, fetches, scratch } = *answered;
        let bad = |place, value: usize| {
            Error::new(Kind::OutOfRange, "divide").at(place).with("value", value as u64)
        };
        let Some((away, kept)) = fetches.split_at_checked(scratch) else {
            return Err(bad("scratch rows", scratch));
        };
        if k == 0 || selection.len() != slots.len() || self.fetched.len() * 64 < shape.slots() as usize {
            return Err(bad("selection", selection.len()));
        }
        self.mark(kept, true)?;
        let scratch_slots = shape.scratch_base..shape.scratch_base + shape.lanes * shape.scratch;
        for (entry, (position, slot)) in selection.iter().zip(slots).enumerate() {
            let Ok(id) = u32::try_from(*slot) else { continue };
            let number = match scratch_slots.contains(&id) {
                true => {
                    let rank = away.partition_point(|fetch| fetch.position < *position as u32);
                    1 + rank / shape.scratch as usize
                }
                false => {
                    usize::from(self.fetched.get(id as usize / 64).is_some_and(|w| w >> (id % 64) & 1 == 1))
                }
            };
            list(entry / k, number, *slot);
        }
        self.mark(kept, false)
    }

    fn mark(&mut self, fetches: &[Fetch], to: bool) -> Result<()> {
        for fetch in fetches {
            let Some(word) = self.fetched.get_mut(fetch.slot as usize / 64) else {
                return Err(Error::new(Kind::OutOfRange, "divide").at("slot").with("slot", fetch.slot));
            };
            let bit = 1 << (fetch.slot % 64);
            *word = if to { *word | bit } else { *word & !bit };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: TableShape = TableShape {
        lanes: 2,
        tokens: 1000,
        query_rows: 2,
        scratch: 3,
        waves: 4,
        scratch_base: 1,
        landing_base: 64,
        budget_base: 128,
        budget_blocks: 2,
    };

    fn divided(
        selection: &[i32],
        slots: &[i32],
        fetches: &[Fetch],
        scratch: usize,
    ) -> Vec<(usize, usize, i32)> {
        let mut divider = Divider::new(SHAPE.slots()).unwrap();
        let mut lists = Vec::new();
        let answered = Answered { selection, slots, fetches, scratch };
        // Twice, so that state left over from the first call would show.
        for _ in 0..2 {
            lists.clear();
            divider
                .divide(&SHAPE, &answered, 4, |query, list, slot| lists.push((query, list, slot)))
                .unwrap();
        }
        lists
    }

    #[test]
    fn every_valid_entry_is_in_one_list_in_the_selections_order() {
        // Lane 1: scratch slots 4 to 6 in turn for the four lowest fetches, then two in budget slots.
        let fetches: Vec<Fetch> = [(10, 4), (20, 5), (30, 6), (40, 4), (50, 200), (60, 131)]
            .map(|(position, slot)| Fetch { position, slot })
            .into();
        let selection = [50, 40, -1, 10, 70, 20, 900, 60];
        let slots = [200, 4, -1, 4, 130, 5, 66, 131];
        let lists = divided(&selection, &slots, &fetches, 4);
        assert_eq!(
            lists,
            [(0, 1, 200), (0, 2, 4), (0, 1, 4), (1, 0, 130), (1, 1, 5), (1, 0, 66), (1, 1, 131)],
            "a resident row and a landing slot in list 0; one slot, two rows, two waves"
        );
    }

    #[test]
    fn a_resolve_output_of_another_shape_is_refused() {
        let fetch = Fetch { position: 1, slot: SHAPE.slots() };
        let good = Answered { selection: &[1], slots: &[130], fetches: &[fetch], scratch: 0 };
        let mut divider = Divider::new(SHAPE.slots()).unwrap();
        let mut refused = |answered: &Answered<'_>, k: usize, place: &str| {
            let error = divider.divide(&SHAPE, answered, k, |_, _, _| {}).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, place));
        };
        refused(&good, 1, "slot");
        refused(&Answered { fetches: &[], ..good }, 0, "selection");
        refused(&Answered { fetches: &[], slots: &[], ..good }, 1, "selection");
        refused(&Answered { scratch: 2, ..good }, 1, "scratch rows");
    }
}
