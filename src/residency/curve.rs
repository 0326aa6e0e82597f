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
//! budget that the curve is exact for is [`Curve::exact_from`]; smaller ones have to be replayed each.
//!
//! # How
//!
//! Each touch appends a row to a log, by ascending position within a step, and the row's older entry dies:
//! the live entries of the log are the order. A bit for each entry tells the live ones, so a depth is a
//! count of bits from the entry on: one population count, and a sum over the words behind, which is added
//! up once a step because all rows of a step are looked up in the same order. When three quarters of the log
//! are dead it is packed.
//!
//! # Costs
//!
//! A few memory accesses and one population count a selected row; one count for each 64 entries of the log a
//! step, which has at most four times as many as there are rows. About 40 bytes a token. Unlike the rest of
//! the room it allocates as the log grows: it is for study, no step of an engine waits for it.

use crate::error::{Error, Kind, Result};

/// Where a position stands that no step has touched.
const NOWHERE: u32 = u32::MAX;

/// Entries of a log that is not worth packing.
const LOG_LEAST: usize = 1 << 12;

/// The longest sequence: a log of five times as many entries is numbered in 32 bits.
const TOKENS_MAX: u32 = 1 << 29;

/// Hits and misses of one sequence in one layer at every budget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Curve {
    /// By budget from 0 on: hits. The last one stands for every larger budget.
    hits: Vec<u64>,
    lookups: u64,
    exact_from: u32,
}

impl Curve {
    /// Selected rows that are resident, over all counted steps, at a budget of `slots`. Not to be
    /// believed below [`Curve::exact_from`].
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
pub struct Depths {
    tokens: u32,
    length: u32,
    landed: u32,
    /// By position: its live entry in the log, or [`NOWHERE`].
    entry_of: Vec<u32>,
    /// Positions in the order in which they were touched.
    log: Vec<u32>,
    /// Bit per entry of the log: no later entry has its position.
    live: Vec<u64>,
    /// By word of `live`: live entries in the words behind it.
    behind: Vec<u32>,
    /// Live entries.
    rows: usize,
    /// Entries at which the log is packed.
    limit: usize,
    /// By depth: lookups that found it; 0 is not used.
    found: Vec<u64>,
    lookups: u64,
    most: u32,
    /// Bit per position, clear between calls; and the rows of a step that have to be put in order.
    selected: Vec<u64>,
    ascending: Vec<u32>,
}

/// `count` words of `value`.
fn words<T: Clone>(count: usize, value: T) -> Result<Vec<T>> {
    let mut words = Vec::new();
    words.try_reserve_exact(count).map_err(|_| {
        let bytes = (size_of::<T>() * count) as u64;
        Error::new(Kind::OutOfMemory, "count depths").at("a layer").with("bytes", bytes)
    })?;
    words.resize(count, value);
    Ok(words)
}

/// Whether each position is above the one before it.
fn ascends(positions: &[u32]) -> bool {
    positions.array_windows().all(|[a, b]| a < b)
}

/// The lowest `count` bits of a word, at most 64.
const fn ones(count: usize) -> u64 {
    if count < 64 { (1 << count) - 1 } else { u64::MAX }
}

impl Depths {
    /// For sequences of at most `tokens` tokens. The first one has `length`, and nothing is resident.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `length` is above `tokens`, or `tokens` above 2^29; [`Kind::OutOfMemory`].
    pub fn new(tokens: u32, length: u32) -> Result<Self> {
        if tokens > TOKENS_MAX {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("tokens").with("tokens", tokens));
        }
        if length > tokens {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("length").with("length", length));
        }
        Ok(Depths {
            tokens,
            length,
            landed: 0,
            entry_of: words(tokens as usize, NOWHERE)?,
            log: Vec::new(),
            live: Vec::new(),
            behind: Vec::new(),
            rows: 0,
            limit: LOG_LEAST,
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
        self.make_room(born.len());
        self.append(&born);
        self.ascending = born;
        (self.length, self.landed) = (length, next);
        Ok(())
    }

    /// One step: looks every committed row of `selection` up and makes the rows the newest of the order.
    /// Positions in any order, repetitions allowed; those at or beyond the committed length are landing
    /// rows and pass by.
    pub fn resolve(&mut self, selection: &[u32]) {
        self.step(selection, Depths::count);
    }

    /// One step of a warm-up: as [`Depths::resolve`], but nothing is counted.
    pub fn warm(&mut self, selection: &[u32]) {
        self.step(selection, |_, _| ());
    }

    /// What was counted; the next layer begins, with a sequence of `length` tokens and nothing resident.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when `length` is above the tokens.
    pub fn finish(&mut self, length: u32) -> Result<Curve> {
        if length > self.tokens {
            return Err(Error::new(Kind::OutOfRange, "count depths").at("length").with("length", length));
        }
        // No depth exceeds the live rows of the end: their number never falls.
        let found = &mut self.found[..=self.rows];
        let flat = found.iter().rposition(|count| *count > 0).unwrap_or(0);
        let mut hits = Vec::new();
        hits.try_reserve_exact(flat + 1).map_err(|_| {
            Error::new(Kind::OutOfMemory, "count depths").at("a curve").with("bytes", 8 * (flat as u64 + 1))
        })?;
        let mut sum = 0;
        hits.extend(found[..=flat].iter().map(|count| {
            sum += count;
            sum
        }));
        let curve = Curve { hits, lookups: self.lookups, exact_from: self.most };
        found.fill(0);
        for position in self.log.drain(..) {
            self.entry_of[position as usize] = NOWHERE;
        }
        self.live.clear();
        (self.length, self.landed, self.rows, self.limit) = (length, 0, 0, LOG_LEAST);
        (self.lookups, self.most) = (0, 0);
        Ok(curve)
    }

    /// Puts the committed rows of the selection in order, hands them to `count`, and appends them.
    fn step(&mut self, selection: &[u32], count: impl FnOnce(&mut Depths, &[u32])) {
        let mut sorted = std::mem::take(&mut self.ascending);
        let rows = if ascends(selection) {
            &selection[..selection.partition_point(|p| *p < self.length)]
        } else {
            self.sort(selection, &mut sorted);
            &sorted[..]
        };
        self.make_room(rows.len());
        count(self, rows);
        self.most = self.most.max(rows.len() as u32);
        self.append(rows);
        self.ascending = sorted;
    }

    /// The distinct committed rows of a selection, ascending.
    fn sort(&mut self, selection: &[u32], sorted: &mut Vec<u32>) {
        for position in selection.iter().filter(|p| **p < self.length) {
            self.selected[(position / 64) as usize] |= 1 << (position % 64);
        }
        sorted.clear();
        let committed = self.length.div_ceil(64) as usize;
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
        let mut sum = 0;
        for (behind, word) in self.behind.iter_mut().zip(&self.live).rev() {
            *behind = sum;
            sum += word.count_ones();
        }
        self.lookups += rows.len() as u64;
        for position in rows {
            let entry = self.entry_of[*position as usize];
            if entry == NOWHERE {
                continue;
            }
            let word = (entry / 64) as usize;
            let depth = self.behind[word] + (self.live[word] >> (entry % 64)).count_ones();
            self.found[depth as usize] += 1;
        }
    }

    /// Makes the rows the newest, in their order. There is room.
    fn append(&mut self, rows: &[u32]) {
        let (first, end) = (self.log.len(), self.log.len() + rows.len());
        for (entry, position) in (first as u32..).zip(rows) {
            let old = std::mem::replace(&mut self.entry_of[*position as usize], entry);
            if old == NOWHERE {
                self.rows += 1;
                continue;
            }
            self.live[(old / 64) as usize] &= !(1 << (old % 64));
        }
        self.log.extend_from_slice(rows);
        for word in first / 64..end.div_ceil(64) {
            let from = first.saturating_sub(word * 64);
            let below = (end - word * 64).min(64);
            self.live[word] |= ones(below) & !ones(from);
        }
    }

    /// Room for `more` entries: packs a log that has grown to its limit.
    fn make_room(&mut self, more: usize) {
        if self.log.len() + more > self.limit {
            self.pack();
            self.limit = (4 * self.rows).max(LOG_LEAST) + more;
        }
        let words = (self.log.len() + more).div_ceil(64);
        if words > self.live.len() {
            self.live.resize(words, 0);
            self.behind.resize(words.max(self.behind.len()), 0);
        }
    }

    /// Takes the dead entries out of the log.
    fn pack(&mut self) {
        let mut kept = 0;
        for (word, bits) in self.live.iter().enumerate() {
            let mut left = *bits;
            while left != 0 {
                let position = self.log[word * 64 + left.trailing_zeros() as usize];
                self.log[kept] = position;
                self.entry_of[position as usize] = kept as u32;
                kept += 1;
                left &= left - 1;
            }
        }
        self.log.truncate(kept);
        self.live.clear();
        self.live.resize(kept / 64, u64::MAX);
        if !kept.is_multiple_of(64) {
            self.live.push(ones(kept % 64));
        }
    }
}
