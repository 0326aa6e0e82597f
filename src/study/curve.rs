//! Misses at every budget at once: how deep in the order of rows each selected row stood.
//!
//! # Why one pass is enough
//!
//! The order of rows after a step (oldest to newest: not selected, selected, born) does not speak of a
//! budget, and the newest `budget` rows of it are what stays. So a budget that holds each step's selected
//! rows always holds the newest rows of one and the same order, and a selected row is a hit exactly when no
//! more than `budget` rows stood at or above it before the step. That number is its *depth*, and how often
//! each depth occurs gives hits and misses at every such budget.
//!
//! Births do not narrow this: they are committed one after the other, after the step that bore them and
//! before the next one looks anything up, and each commit keeps the newest rows of the order, however
//! few slots there are. Rows selected while they still land are neither looked up nor touched.
//!
//! # What it is not exact for
//!
//! A budget below the rows that some step selected keeps all hits and the *highest* of the fetched rows,
//! which depends on what was resident: no order common to all budgets says what stays then. The smallest
//! budget that the curve is exact for is [`MissRatioCurve::exact_from`]; smaller ones have to be replayed each.
//!
//! # Costs
//!
//! Those of [`LruStack`], which keeps the order and tells the depths. About 40 bytes a token.

use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::study::stack::{LruStack, NUMBERS_MAX, words};

/// Hits and misses of one sequence in one layer at every budget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissRatioCurve {
    /// By budget from 0 on: hits. The last one stands for every larger budget.
    hits: Vec<u64>,
    lookups: u64,
    exact_from: u32,
}

impl MissRatioCurve {
    /// Selected rows that are resident, over all counted steps, at a budget of `slots`. Not to be
    /// believed below [`MissRatioCurve::exact_from`].
    pub fn hits(&self, slots: u32) -> u64 {
        self.hits.get(slots as usize).or(self.hits.last()).copied().unwrap_or(0)
    }

    /// Selected rows that are fetched, likewise.
    pub fn misses(&self, slots: u32) -> u64 {
        self.lookups - self.hits(slots)
    }

    /// The smallest budget for which the curve is what a replay counts: the most distinct committed rows
    /// that one step selected, warm-up included; at least 1.
    pub fn exact_from(&self) -> u32 {
        self.exact_from.max(1)
    }

    /// The smallest budget, among those that the curve counts exactly, that misses no more than any larger
    /// one: what is missed there was neither selected nor born before.
    pub fn flat_from(&self) -> u32 {
        (self.hits.len().saturating_sub(1) as u32).max(self.exact_from())
    }
}

/// Counts depths of one sequence in one layer, step by step, in the calls of [`LayerTables`]: commit, then
/// resolve. Serves one layer after the other.
///
/// [`LayerTables`]: crate::residency::LayerTables
#[derive(Debug)]
pub struct StackDistances {
    tokens: u32,
    length: u32,
    landed: u32,
    /// Positions by their last selection or birth.
    order: LruStack,
    /// By depth: lookups that found it; at 0 those of rows that no step has touched.
    found: Vec<u64>,
    lookups: u64,
    most: u32,
    /// Bit per position, clear between calls; and the rows of a step that have to be put in order.
    selected: Vec<u64>,
    ascending: Vec<u32>,
}

/// Whether each position is above the one before it.
fn ascends(positions: &[u32]) -> bool {
    positions.array_windows().all(|[a, b]| a < b)
}

impl StackDistances {
    /// For sequences of at most `tokens` tokens. The first one has `length`, and nothing is resident.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `length` is above `tokens`, or `tokens` above 2^29; [`Kind::OutOfMemory`].
    pub fn new(tokens: u32, length: u32) -> Result<Self> {
        if tokens > NUMBERS_MAX {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("tokens").with("tokens", tokens));
        }
        if length > tokens {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("length").with("length", length));
        }
        Ok(StackDistances {
            tokens,
            length,
            landed: 0,
            order: LruStack::new(tokens)?,
            found: words(tokens as usize + 1, 0)?,
            lookups: 0,
            most: 0,
            selected: words(tokens.div_ceil(64) as usize, 0)?,
            ascending: Vec::new(),
        })
    }

    /// Ends the previous step and begins the next: of the landed rows the first `accepted` become the newest
    /// of the order, and `next` rows land.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for more accepted rows than landed, and for a sequence that would outgrow its
    /// tokens. Nothing has changed then.
    pub fn commit(&mut self, accepted: u32, next: u32) -> Result<()> {
        let length = self.length.saturating_add(accepted);
        if accepted > self.landed || length > self.tokens || next > self.tokens - length {
            return Err(Error::new(Kind::OutOfRange, "count depths")
                .at("rows of a step")
                .with("accepted", accepted)
                .with("next", next));
        }
        let mut born = std::mem::take(&mut self.ascending);
        born.clear();
        born.extend(self.length..length);
        self.order.touch(born.iter().copied());
        self.ascending = born;
        (self.length, self.landed) = (length, next);
        Ok(())
    }

    /// One step: looks every committed row of `selection` up and makes the rows the newest of the order.
    /// Positions in any order, repetitions allowed; those at or beyond the committed length are landing
    /// rows and pass by.
    pub fn resolve(&mut self, selection: &[u32]) {
        self.step(selection, StackDistances::count);
    }

    /// One step of a warm-up: as [`StackDistances::resolve`], but nothing is counted.
    pub fn warm(&mut self, selection: &[u32]) {
        self.step(selection, |_, _| ());
    }

    /// What was counted; the next layer begins, with a sequence of `length` tokens and nothing resident.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `length` is above the tokens.
    pub fn finish(&mut self, length: u32) -> Result<MissRatioCurve> {
        if length > self.tokens {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("length").with("length", length));
        }
        // No depth exceeds the live rows of the end, whose number never falls; no budget hits what was never
        // touched.
        self.found[0] = 0;
        let found = &mut self.found[..=self.order.len() as usize];
        let flat = found.iter().rposition(|count| *count > 0).unwrap_or(0);
        let mut hits = vector(flat + 1, "count depths", "a curve")?;
        let mut sum = 0;
        hits.extend(found[..=flat].iter().map(|count| {
            sum += count;
            sum
        }));
        let curve = MissRatioCurve { hits, lookups: self.lookups, exact_from: self.most };
        found.fill(0);
        self.order.clear();
        (self.length, self.landed, self.lookups, self.most) = (length, 0, 0, 0);
        Ok(curve)
    }

    /// Puts the committed rows of the selection in order, hands them to `count`, and appends them.
    fn step(&mut self, selection: &[u32], count: impl FnOnce(&mut StackDistances, &[u32])) {
        let mut sorted = std::mem::take(&mut self.ascending);
        let rows = if ascends(selection) {
            &selection[..selection.partition_point(|p| *p < self.length)]
        } else {
            self.sort(selection, &mut sorted);
            &sorted[..]
        };
        count(self, rows);
        self.most = self.most.max(rows.len() as u32);
        self.order.touch(rows.iter().copied());
        self.ascending = sorted;
    }

    /// The distinct committed rows of a selection, ascending.
    fn sort(&mut self, selection: &[u32], sorted: &mut Vec<u32>) {
        let committed = self.length.div_ceil(64) as usize;
        if selection.len() < committed / 8 {
            sorted.clear();
            sorted.extend(selection.iter().filter(|p| **p < self.length));
            sorted.sort_unstable();
            sorted.dedup();
            return;
        }
        for position in selection.iter().filter(|p| **p < self.length) {
            self.selected[(position / 64) as usize] |= 1 << (position % 64);
        }
        sorted.clear();
        for (word, bits) in self.selected[..committed].iter_mut().enumerate() {
            let mut left = std::mem::take(bits);
            while left != 0 {
                sorted.push(word as u32 * 64 + left.trailing_zeros());
                left &= left - 1;
            }
        }
    }

    /// Counts the depth of every row, in the order as it stands.
    fn count(&mut self, rows: &[u32]) {
        self.lookups += rows.len() as u64;
        self.order.depths(rows, |depth| self.found[depth as usize] += 1);
    }
}
