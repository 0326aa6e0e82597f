//! The selections of the steps, and the rule's outcome for them, with which the device's outcome is compared.
//!
//! A step's selection misses exactly as many rows as requested. The hits are drawn from the rows that the
//! sequence selected last, which no larger budget has evicted; the misses are fresh rows. The rule of
//! [`forebay::residency`] runs over it on the host and computes hits, and every sequence's digest.
//!
//! **Sequences may share a prompt** if the host's memory cannot hold one for each. So that a sequence does not find in
//! a cache the rows that another has just fetched, each sequence takes its fresh rows from its own stretch of one
//! shuffled order of the prompt. So hardly any row is fetched twice in one step, and a sequence returns to a row only
//! long after its eviction.
//!
//! **Layers** take turns in [`PATTERNS`] patterns, each with its own draws: a step's selections are a few tables
//! instead of 61, and a layer that gets another one's result is found by the digests and the rows.

use forebay::residency::{Counts, Fetch, LayerTables, Portable, QueryRange, Selected, TableShape, Workspace};
use forebay::{Error, Kind, Result, SLOT_BLOCK};

/// Patterns that the layers take turns in.
pub const PATTERNS: u32 = 4;

/// One of this many rows of a query row's selection is not selected by the step's other query rows.
const OWN: u32 = 8;

/// The sequences of a rule.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Sequences.
    pub lanes: u32,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens that a sequence may reach, including the rows in flight.
    pub tokens: u32,
    /// Slots of a sequence and layer.
    pub budget: u32,
    /// Query rows of the widest step.
    pub query_rows: u32,
    /// Positions that a query row selects.
    pub top_k: u32,
    /// The share of the widest step's misses that one of its query rows selects.
    pub share: f64,
}

/// One step's selections and their expected outcome.
#[derive(Clone, Debug)]
pub struct Picks {
    /// The first sequences, by number.
    pub batch: u32,
    /// Query rows.
    pub query_rows: u32,
    /// By pattern `[batch][query rows][k]`.
    pub selections: Vec<Vec<i32>>,
    /// By pattern `[batch][misses]`: the positions to fetch.
    pub missed: Vec<Vec<i32>>,
    /// By pattern: counts of all batch rows.
    pub counts: Vec<Counts>,
    /// By batch row: the rows of the sequence's last step, all of which are accepted.
    pub accepted: Vec<u32>,
}

impl Picks {
    /// The pattern of a layer.
    pub const fn pattern(layer: u32) -> usize {
        (layer % PATTERNS) as usize
    }
}

/// Pseudo-random numbers, the same in every run (xorshift).
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * limit as u64) >> 32) as usize
    }

    fn shuffle(&mut self, all: &mut [i32], first: usize) {
        for place in 0..first.min(all.len()) {
            let other = place + self.below(all.len() - place);
            all.swap(place, other);
        }
    }
}

/// The last selections of one sequence in one pattern.
#[derive(Clone, Debug, Default)]
struct Recent {
    /// Positions that are certainly resident.
    rows: Vec<i32>,
    /// The next place in the shuffled order.
    next: usize,
}

/// The layers of one pattern.
#[derive(Debug)]
struct Pattern {
    tables: LayerTables,
    recent: Vec<Recent>,
    /// The prompt's positions, shuffled.
    order: Vec<i32>,
}

/// See the module's head.
#[derive(Debug)]
pub struct Rule {
    extent: Extent,
    patterns: Vec<Pattern>,
    /// By sequence: the rows of its last step.
    landed: Vec<u32>,
    chance: Chance,
    work: Workspace,
    slots: Vec<i32>,
    fetches: Vec<Fetch>,
}

fn broken(place: &'static str) -> Error {
    Error::new(Kind::Internal, "bench step").at(place)
}

/// How many distinct rows a step selects, and how many of them only one query row selects.
fn distinct(top_k: u32, query_rows: u32) -> (u32, u32) {
    let own = if query_rows > 1 { top_k / OWN } else { 0 };
    (top_k - own + query_rows * own, own)
}

impl Rule {
    /// Sequences that have just joined, with nothing resident.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a budget that does not hold a step's selection, and for a prompt with too few rows
    /// for fresh misses.
    pub fn new(extent: Extent) -> Result<Rule> {
        let Extent { lanes, prompt, tokens, budget, query_rows, top_k, .. } = extent;
        let (most, _) = distinct(top_k, query_rows);
        if budget < most + SLOT_BLOCK || prompt < 2 * budget {
            return Err(Error::new(Kind::InvalidConfig, "bench step")
                .at("the budget is too small for a step's selection, or the prompt for the budget")
                .with("budget", budget)
                .with("selected", most)
                .with("prompt", prompt));
        }
        let blocks = budget.div_ceil(SLOT_BLOCK);
        let shape = TableShape {
            lanes,
            tokens,
            query_rows,
            scratch: 0,
            waves: 1,
            scratch_base: 1,
            landing_base: 1,
            budget_base: (1 + lanes * query_rows).next_multiple_of(SLOT_BLOCK),
            budget_blocks: lanes * blocks,
        };
        let mut chance = Chance(0x9E37_79B9_7F4A_7C15);
        let mut patterns = Vec::new();
        for _ in 0..PATTERNS {
            let mut tables = LayerTables::new(shape)?;
            for lane in 0..lanes {
                let own: Vec<u32> = (lane * blocks..(lane + 1) * blocks).collect();
                tables.join(lane, &own, budget, prompt)?;
            }
            let mut order: Vec<i32> = (0..prompt as i32).collect();
            chance.shuffle(&mut order, prompt as usize);
            let stretch = (prompt / lanes) as usize;
            let recent = (0..lanes as usize).map(|lane| Recent { rows: Vec::new(), next: lane * stretch });
            patterns.push(Pattern { tables, recent: recent.collect(), order });
        }
        let selected = query_rows * top_k;
        Ok(Rule {
            extent,
            patterns,
            landed: vec![0; lanes as usize],
            chance,
            work: Workspace::new(&shape, selected)?,
            slots: vec![0; selected as usize],
            fetches: vec![Fetch { position: 0, slot: 0 }; selected as usize],
        })
    }

    /// How many distinct rows a step selects: its misses if nothing is resident.
    pub fn selected(&self, query_rows: u32) -> u32 {
        distinct(self.extent.top_k, query_rows).0
    }

    /// The next step of the first `batch` sequences, with `misses` misses a sequence and layer.
    ///
    /// # Errors
    /// [`Kind::Internal`] if the rule's outcome is not the intended one.
    pub fn next(&mut self, batch: u32, query_rows: u32, misses: u32) -> Result<Picks> {
        let lanes = batch as usize;
        let accepted = self.landed.get(..lanes).ok_or_else(|| broken("sequences"))?.to_vec();
        let mut picks = Picks {
            batch,
            query_rows,
            selections: Vec::new(),
            missed: Vec::new(),
            counts: Vec::new(),
            accepted,
        };
        for pattern in 0..self.patterns.len() {
            let (mut selections, mut missed, mut counts) = (Vec::new(), Vec::new(), Counts::default());
            for lane in 0..lanes {
                let (found, fresh) = self.lane(pattern, lane, query_rows, misses, &mut selections)?;
                missed.extend(fresh);
                counts.hits += found.hits;
                counts.misses += found.misses;
            }
            picks.selections.push(selections);
            picks.missed.push(missed);
            picks.counts.push(counts);
        }
        self.landed[..lanes].fill(query_rows);
        Ok(picks)
    }

    /// One sequence in one pattern: adds its selection, and returns the rule's counts and the fetched rows.
    fn lane(
        &mut self,
        pattern: usize,
        lane: usize,
        query_rows: u32,
        misses: u32,
        selections: &mut Vec<i32>,
    ) -> Result<(Counts, Vec<i32>)> {
        let k = self.extent.top_k;
        let (all, own) = distinct(k, query_rows);
        let Pattern { tables, recent, order } = &mut self.patterns[pattern];
        tables.commit(&Portable, lane as u32, self.landed[lane], query_rows, |_| {})?;
        let recent = &mut recent[lane];
        let hits = all.checked_sub(misses).ok_or_else(|| broken("more misses than rows selected"))? as usize;
        if recent.rows.len() < hits {
            return Err(broken("too few rows are known to be resident"));
        }
        self.chance.shuffle(&mut recent.rows, hits);
        let fresh = fresh(tables, lane as u32, recent, order, misses as usize)?;
        let shared = shared_misses(k, query_rows, own, misses, self.extent.share);
        let first = selections.len();
        let spread = Spread { k, own, hits: &recent.rows[..hits], fresh: &fresh, shared };
        (0..query_rows).for_each(|row| spread.row(row, &mut self.chance, selections));
        let count = (query_rows * k) as usize;
        let selected = Selected {
            selection: &selections[first..],
            slots: &mut self.slots[..count],
            fetches: &mut self.fetches[..count],
        };
        let rows = QueryRange { first: 0, count: query_rows };
        let found = tables.resolve(&Portable, lane as u32, rows, selected, &mut self.work)?;
        let wanted = Counts { hits: hits as u32, misses, scratch: 0 };
        if found.counts != wanted || found.beyond.is_some() {
            return Err(broken("the rule finds other misses than were asked for")
                .with("misses", found.counts.misses)
                .with("asked", misses));
        }
        recent.rows.splice(0..0, fresh.iter().copied());
        recent.rows.truncate(distinct(k, self.extent.query_rows).0 as usize);
        Ok((found.counts, fresh))
    }

    /// The expected digest of the sequence in a lane, over this many layers.
    pub fn digest(&self, lane: u32, layers: u32) -> u64 {
        (0..layers).fold(0, |sum: u64, layer| {
            let digest = self.patterns[Picks::pattern(layer)].tables.digest(lane);
            sum.wrapping_add(digest.wrapping_mul(2 * u64::from(layer) + 1))
        })
    }
}

/// The next `count` positions of a sequence's order that are not resident.
fn fresh(
    tables: &LayerTables,
    lane: u32,
    recent: &mut Recent,
    order: &[i32],
    count: usize,
) -> Result<Vec<i32>> {
    let mut fresh = Vec::with_capacity(count);
    for _ in 0..order.len() {
        if fresh.len() == count {
            break;
        }
        let position = order[recent.next % order.len()];
        recent.next += 1;
        if tables.slot(lane, position as u32).is_none() {
            fresh.push(position);
        }
    }
    if fresh.len() == count { Ok(fresh) } else { Err(broken("too few rows of the prompt are not resident")) }
}

/// The part of a step's misses that all of its query rows select; the rest is divided evenly.
fn shared_misses(k: u32, query_rows: u32, own: u32, misses: u32, share: f64) -> u32 {
    if query_rows < 2 {
        return misses;
    }
    let alone = (1.0 - share) * f64::from(misses) / f64::from(query_rows - 1);
    // At most the rows selected alone, and enough to leave room for the others.
    let least = misses.saturating_sub(k - own).div_ceil(query_rows);
    let alone = (alone.round().max(0.0) as u32).min(own).min(misses / query_rows).max(least);
    misses - query_rows * alone
}

/// A step's rows, to be distributed to its query rows.
struct Spread<'a> {
    k: u32,
    own: u32,
    hits: &'a [i32],
    fresh: &'a [i32],
    /// The fresh rows that all query rows select.
    shared: u32,
}

impl Spread<'_> {
    /// Adds one query row's selection, unordered, as a top-k returns it.
    fn row(&self, row: u32, chance: &mut Chance, selections: &mut Vec<i32>) {
        let first = selections.len();
        let shared_hits = (self.k - self.own - self.shared) as usize;
        let shared = self.shared as usize;
        selections.extend(&self.hits[..shared_hits]);
        selections.extend(&self.fresh[..shared]);
        if self.own > 0 {
            let rows = (self.hits.len() - shared_hits + self.fresh.len() - shared) / self.own as usize;
            let fresh = (self.fresh.len() - shared) / rows.max(1);
            let hits = self.own as usize - fresh;
            let row = row as usize;
            selections.extend(&self.hits[shared_hits + row * hits..][..hits]);
            selections.extend(&self.fresh[shared + row * fresh..][..fresh]);
        }
        let count = selections.len() - first;
        chance.shuffle(&mut selections[first..], count);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn extent() -> Extent {
        Extent { lanes: 3, prompt: 1000, tokens: 1200, budget: 150, query_rows: 2, top_k: 64, share: 0.57 }
    }

    #[test]
    fn a_step_selects_rows_with_the_requested_number_of_misses() {
        let mut rule = Rule::new(extent()).unwrap();
        for (batch, query_rows, misses) in
            [(3, 2, 72), (3, 2, 72), (3, 2, 72), (3, 2, 9), (2, 1, 0), (3, 1, 7), (1, 2, 0), (3, 2, 21)]
        {
            let picks = rule.next(batch, query_rows, misses).unwrap();
            assert_eq!(picks.selections.len(), PATTERNS as usize);
            for (counts, selection) in picks.counts.iter().zip(&picks.selections) {
                assert_eq!(counts.misses, batch * misses);
                assert_eq!(counts.hits, batch * (rule.selected(query_rows) - misses));
                assert_eq!(selection.len(), (batch * query_rows * 64) as usize);
                for row in selection.chunks_exact(64) {
                    assert_eq!(row.iter().collect::<BTreeSet<_>>().len(), 64, "distinct within a query row");
                }
            }
        }
    }

    #[test]
    fn sequences_of_one_step_fetch_different_rows() {
        let mut rule = Rule::new(extent()).unwrap();
        (0..4).for_each(|_| drop(rule.next(3, 2, 72).unwrap()));
        let picks = rule.next(3, 2, 20).unwrap();
        let all: BTreeSet<i32> = picks.missed[0].iter().copied().collect();
        assert!(all.len() >= 55, "{} of 60 rows", all.len());
    }

    #[test]
    fn one_query_row_reads_the_requested_share_of_the_misses() {
        assert_eq!(shared_misses(2048, 1, 0, 137, 0.57), 137);
        let shared = shared_misses(2048, 2, 256, 190, 0.5736);
        // 28 by both, 81 by each alone: 109 of 190.
        assert_eq!((shared, (190 - shared) / 2), (28, 81));
        assert_eq!(shared_misses(2048, 2, 256, 2304, 0.5736), 1792, "all of them");
        assert_eq!(shared_misses(2048, 2, 256, 0, 0.5736), 0);
    }

    #[test]
    fn digests_distinguish_patterns_and_layers() {
        let mut rule = Rule::new(extent()).unwrap();
        rule.next(3, 2, 72).unwrap();
        assert_ne!(rule.digest(0, 3), rule.digest(0, 4));
        assert_ne!(rule.digest(0, 4), rule.digest(1, 4));
        assert_ne!(rule.patterns[0].tables.digest(0), rule.patterns[1].tables.digest(0));
    }

    #[test]
    fn a_budget_that_evicts_just_selected_rows_is_refused() {
        let error = Rule::new(Extent { budget: 100, ..extent() }).unwrap_err();
        assert_eq!((error.kind(), error.number("selected")), (Kind::InvalidConfig, Some(72)));
        assert!(Rule::new(Extent { prompt: 200, ..extent() }).is_err());
    }
}
