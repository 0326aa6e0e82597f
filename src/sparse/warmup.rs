//! What is brought up before a sequence's first step, and in which stretches.
//!
//! Without it the first decode step misses nearly all it selects, in every layer (ESS, figure 4: about
//! 1700 of 2048). A warm-up replays what the last prompt positions selected as steps in which nothing is
//! born: first the residency is computed, which moves nothing, then the survivors are gathered once each.
//! The gather is cut into stretches of bounded size, so that a caller can spread it over decode steps and
//! a joining sequence does not take the link from the running ones.

use crate::device::Slice;

/// What is brought up when a sequence enters its lane, before any warm-up selections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BringUp {
    /// Every row, if they all fit the budget: while its length is within the budget a sequence never
    /// misses. A longer sequence starts empty.
    #[default]
    Whole,
    /// Nothing.
    Nothing,
}

/// How a sequence enters its lane.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmUp {
    /// `[layers][steps][k]` i32: what the last prompt positions selected, oldest first.
    pub selections: Option<Slice>,
    /// How many of them.
    pub steps: u32,
    /// The most bytes that one call gathers; 0 for no bound.
    pub bytes_a_call: u64,
}

/// A warm-up's gather, in stretches of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretches {
    next: u64,
    end: u64,
    step: u64,
}

impl Stretches {
    /// Over all slots of `budgets`, at most `bytes_a_call` bytes of rows a stretch (0: all at once).
    pub fn new(budgets: &[u32], row_bytes: u32, bytes_a_call: u64) -> Self {
        let end = budgets.iter().map(|b| u64::from(*b)).sum();
        let step = match bytes_a_call {
            0 => end,
            bytes => (bytes / u64::from(row_bytes.max(1))).max(1),
        };
        Stretches { next: 0, end, step }
    }

    /// Nothing to gather.
    pub const fn none() -> Self {
        Stretches { next: 0, end: 0, step: 0 }
    }

    /// Whether all stretches were given out.
    pub const fn is_over(&self) -> bool {
        self.next >= self.end
    }

    /// The next stretch: its first slot and its size.
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
        let mut stretches = Stretches::new(&[100, 30], 656, 656 * 40);
        let mut at = 0;
        while let Some((first, count)) = stretches.take() {
            assert_eq!(first, at);
            assert!(count <= 40);
            at += count;
        }
        assert_eq!(at, 130);
        assert_eq!(Stretches::new(&[5], 656, 1).take(), Some((0, 1)), "at least a row a call");
        assert_eq!(Stretches::new(&[5, 5], 656, 0).take(), Some((0, 10)));
        assert!(Stretches::none().is_over());
    }
}
