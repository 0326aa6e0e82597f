//! Warm-up: the rows to load before a sequence's first step, and the stretches in which they are gathered.
//!
//! Without a warm-up the first decode step misses nearly all rows that it selects, in every layer (ESS, figure 4: about
//! 1700 of 2048). A warm-up replays the selections of the last prompt positions as steps without new rows. First it
//! computes which rows are resident after these steps, which moves no bytes. Then it gathers each of those rows once.
//! The gather is divided into stretches of limited size. So a caller can spread it over decode steps, and a joining
//! sequence does not take the link bandwidth of the running sequences.

use crate::device::Slice;

/// The rows to load when a sequence enters its lane, before any warm-up selections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BringUp {
    /// Every row, if all rows fit the budget. A sequence never misses while its length is within the budget. A longer
    /// sequence starts empty.
    #[default]
    Whole,
    /// No row.
    Nothing,
}

/// The warm-up of a sequence that joins the batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmUp {
    /// The selections of the last prompt positions, oldest first: `[layers][steps][k]` i32, of the layers that select
    /// (the first of each index group).
    pub selections: Option<Slice>,
    /// The number of prompt positions in `selections`, one step for each.
    pub steps: u32,
    /// The most bytes that one call gathers; 0 for no limit.
    pub bytes_a_call: u64,
}

/// The gather of a warm-up, divided into stretches of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretches {
    next: u64,
    end: u64,
    step: u64,
}

impl Stretches {
    /// Stretches over `slots` slots, numbered through all layers, each with at most `bytes_a_call` bytes of rows (0:
    /// one stretch).
    pub fn new(slots: u64, row_bytes: u32, bytes_a_call: u64) -> Self {
        let step = match bytes_a_call {
            0 => slots,
            bytes => (bytes / u64::from(row_bytes.max(1))).max(1),
        };
        Stretches { next: 0, end: slots, step }
    }

    /// Nothing to gather.
    pub const fn none() -> Self {
        Stretches { next: 0, end: 0, step: 0 }
    }

    /// Whether all stretches have been taken.
    pub const fn is_over(&self) -> bool {
        self.next >= self.end
    }

    /// Takes the next stretch: its first slot and its number of slots.
    pub fn take(&mut self) -> Option<(u64, u64)> {
        if self.is_over() {
            return None;
        }
        let first = self.next;
        self.next = self.end.min(first.saturating_add(self.step));
        Some((first, self.next - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_cover_every_slot_once_within_the_bound() {
        let mut stretches = Stretches::new(130, 656, 656 * 40);
        let mut at = 0;
        while let Some((first, count)) = stretches.take() {
            assert_eq!(first, at);
            assert!(count <= 40);
            at += count;
        }
        assert_eq!(at, 130);
        assert_eq!(Stretches::new(5, 656, 1).take(), Some((0, 1)), "at least a row a call");
        assert_eq!(Stretches::new(10, 656, 0).take(), Some((0, 10)));
        assert!(Stretches::none().is_over());
    }
}
