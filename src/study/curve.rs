//! Misses at every budget at once, from the stack distance of each selected row.
//!
//! # Why one pass is enough
//!
//! The order of rows after a step (oldest to newest: not selected, selected, new) does not depend on the budget, and
//! the newest `budget` rows of it stay. So every budget that holds each step's selected rows holds the newest rows of
//! one and the same order. A selected row is a hit exactly when at most `budget` rows were at or above it before the
//! step. That number is its *depth*, or stack distance (Mattson). The histogram of depths gives hits and misses at
//! every such budget.
//!
//! New rows do not restrict this. They are committed one by one, after the step that created them and before the next
//! look-up, and each commit keeps the newest rows of the order, however few slots there are. Rows selected while they
//! are still landing are neither looked up nor touched.
//!
//! # What it is not exact for
//!
//! A budget below the number of rows that some step selects keeps all hits and the *highest* of the fetched rows.
//! What stays then depends on what was resident, so no common order describes it. The smallest budget for which the
//! curve is exact is [`MissRatioCurve::exact_from`]; a smaller one needs its own replay.
//!
//! # Costs
//!
//! Those of [`LruStack`], which keeps the order and returns the depths: about 40 bytes per token.

use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::study::stack::{LruStack, NUMBERS_MAX, words};

/// Hits and misses of one sequence in one layer at every budget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissRatioCurve {
    /// Hits by budget, from 0 on. The last entry stands for every larger budget.
    hits: Vec<u64>,
    lookups: u64,
    exact_from: u32,
}

impl MissRatioCurve {
    /// The number of selected rows that are resident, over all counted steps, at a budget of `slots`. Not valid below
    /// [`MissRatioCurve::exact_from`].
    pub fn hits(&self, slots: u32) -> u64 {
        self.hits.get(slots as usize).or(self.hits.last()).copied().unwrap_or(0)
    }

    /// The number of selected rows that are fetched, over all counted steps, at a budget of `slots`. Not valid below
    /// [`MissRatioCurve::exact_from`].
    pub fn misses(&self, slots: u32) -> u64 {
        self.lookups - self.hits(slots)
    }

    /// The smallest budget at which the curve equals a replay: the most distinct committed rows that one step
    /// selected, including warm-up; at least 1.
    pub fn exact_from(&self) -> u32 {
        self.exact_from.max(1)
    }

    /// The smallest budget, among those that the curve counts exactly, that misses no more than any larger one: it
    /// misses only rows that were neither selected nor created before.
    pub fn flat_from(&self) -> u32 {
        (self.hits.len().saturating_sub(1) as u32).max(self.exact_from())
    }
}

/// Counts the stack distances of one sequence in one layer, step by step, with the calls of [`LayerTables`]: commit,
/// then resolve. It processes one layer after another.
///
/// [`LayerTables`]: crate::residency::LayerTables
#[derive(Debug)]
pub struct StackDistances {
    tokens: u32,
    length: u32,
    landed: u32,
    /// Positions by their last selection or creation.
    order: LruStack,
    /// For each depth, the number of look-ups that found it; at 0, those of rows that no step has touched.
    found: Vec<u64>,
    lookups: u64,
    most: u32,
    /// A bit per position, clear between calls, to sort a step's rows.
    selected: Vec<u64>,
    ascending: Vec<u32>,
}

/// Whether each position is above the one before it.
fn ascends(positions: &[u32]) -> bool {
    positions.array_windows().all(|[a, b]| a < b)
}

impl StackDistances {
    /// A counter for sequences of at most `tokens` tokens. The first one has `length` tokens, and nothing is
    /// resident.
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

    /// Ends the previous step and begins the next: the first `accepted` of the landed rows become the newest of the
    /// order, and `next` rows land.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for more accepted rows than landed, and for a sequence that would outgrow its tokens.
    /// Nothing has changed then.
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

    /// One step: looks up every committed row of `selection` and makes these rows the newest of the order. Positions
    /// come in any order, and may repeat. Positions at or beyond the committed length are landing rows and are
    /// ignored.
    pub fn resolve(&mut self, selection: &[u32]) {
        self.step(selection, StackDistances::count);
    }

    /// One step of a warm-up: as [`StackDistances::resolve`], but nothing is counted.
    pub fn warm(&mut self, selection: &[u32]) {
        self.step(selection, |_, _| ());
    }

    /// Returns the curve of this layer, and begins the next layer with a sequence of `length` tokens and nothing
    /// resident.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `length` is above the tokens.
    pub fn finish(&mut self, length: u32) -> Result<MissRatioCurve> {
        if length > self.tokens {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("length").with("length", length));
        }
        // No depth exceeds the number of live rows at the end, which never falls; no budget hits a row that was never
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

    /// Sorts the committed rows of the selection, passes them to `count`, and makes them the newest.
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

    /// Counts the depth of every row in the present order.
    fn count(&mut self, rows: &[u32]) {
        self.lookups += rows.len() as u64;
        self.order.depths(rows, |depth| self.found[depth as usize] += 1);
    }
}
