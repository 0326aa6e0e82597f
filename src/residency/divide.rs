//! Divide: a resolve's answer becomes the index lists of attention in parts.
//!
//! Attention over what was resident can run while the rest is fetched, so the two are listed apart; and
//! where the scratch slots hold only a share of what a step fetches beyond its budget, what each pass
//! fetches is listed apart. Every entry of the answer stands in exactly one list, so the parts together
//! are the whole, and lists keep the order of the selection.
//!
//! A fetched row is known by its slot: a bit for each fetch, set before and cleared after. Rows of
//! different passes share scratch slots; there the row's rank among the fetches says the pass.

use crate::error::{Error, Kind, Result};
use crate::residency::{Fetch, TableShape};

/// What a lane's resolve answered, see [`crate::residency::Selected`].
#[derive(Clone, Copy, Debug)]
pub struct Answered<'a> {
    /// `[query rows][k]`.
    pub selection: &'a [i32],
    /// `[query rows][k]`.
    pub slots: &'a [i32],
    /// The rows to fetch.
    pub fetches: &'a [Fetch],
    /// How many of them, the first, are in scratch slots.
    pub scratch: usize,
}

/// Room to divide in: a bit a slot, clear between calls.
#[derive(Debug)]
pub struct Divider {
    fetched: Vec<u64>,
}

impl Divider {
    /// Room for layers of at most `slots` slots.
    pub fn new(slots: u32) -> Self {
        Divider { fetched: vec![0; (slots as usize).div_ceil(64)] }
    }

    /// Calls `list(query row, list number, slot)` for every valid entry, in the order of the selection:
    /// list 0 for rows that were resident or are born in the step, `1 + pass` for those that `pass`
    /// fetches. `k` is the length of a query row.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an answer of another layer or with other extents.
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
