//! The rule in its most naive form: a list of positions from oldest to newest, rebuilt after every step. It has no
//! slots, stamps or maps, and so shares no structure with the library.

/// One sequence in one layer.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// Resident positions, oldest first.
    pub order: Vec<u32>,
    /// Slots.
    pub budget: usize,
    /// Committed tokens.
    pub length: u32,
    /// Rows written by the step that runs, not yet committed.
    pub landed: u32,
}

/// The result of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Selected and resident, ascending.
    pub hits: Vec<u32>,
    /// Selected and fetched, ascending.
    pub misses: Vec<u32>,
    /// The number of misses, the lowest ones, that have no slot after the step.
    pub scratch: usize,
}

impl Oracle {
    /// A sequence of `length` tokens, with no resident row.
    pub fn new(budget: usize, length: u32) -> Self {
        Oracle { order: Vec::new(), budget, length, landed: 0 }
    }

    /// Everything resident, if it fits.
    pub fn bring_up(&mut self) {
        if self.length as usize <= self.budget {
            self.order = (0..self.length).collect();
        }
    }

    /// Accepts the first `accepted` landed rows and expects `next` ones.
    pub fn commit(&mut self, accepted: u32, next: u32) {
        assert!(accepted <= self.landed);
        self.order.extend(self.length..self.length + accepted);
        self.keep_newest();
        self.length += accepted;
        self.landed = next;
    }

    /// Selects `positions` (any order, repeated, below the length; others are ignored here).
    pub fn select(&mut self, positions: impl IntoIterator<Item = u32>) -> Step {
        let mut selected = vec![false; self.length as usize];
        for position in positions.into_iter().filter(|p| *p < self.length) {
            selected[position as usize] = true;
        }
        let mut resident = vec![false; self.length as usize];
        self.order.iter().for_each(|p| resident[*p as usize] = true);
        let union = (0..self.length).filter(|p| selected[*p as usize]);
        let (hits, misses): (Vec<u32>, Vec<u32>) = union.partition(|p| resident[*p as usize]);
        let scratch = (hits.len() + misses.len()).saturating_sub(self.budget).min(misses.len());
        let mut newest: Vec<u32> = hits.iter().chain(&misses[scratch..]).copied().collect();
        newest.sort_unstable();
        self.order.retain(|p| !selected[*p as usize]);
        self.order.extend(newest);
        self.keep_newest();
        Step { hits, misses, scratch }
    }

    /// Truncates the sequence to `length` tokens.
    pub fn truncate(&mut self, length: u32) {
        self.order.retain(|p| *p < length);
        (self.length, self.landed) = (length, 0);
    }

    /// Changes the budget: a smaller one keeps the newest rows.
    pub fn resize(&mut self, budget: usize) {
        self.budget = budget;
        self.keep_newest();
    }

    fn keep_newest(&mut self) {
        let gone = self.order.len().saturating_sub(self.budget);
        self.order.drain(..gone);
    }
}
