//! The naive model: a list of rows per sequence and layer, an oracle per sequence and index group, owners of pages by
//! counting.

use super::oracle::Oracle;
use super::prefix::{Name, Script};
use forebay::device::Stream;
use forebay::{Budget, Config, SLOT_BLOCK, Sequence, Slots};
use std::collections::HashMap;
use std::ops::Range;

/// The writer of a row, and the number of the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The writing sequence's handle, or [`FOUND`].
    pub owner: u64,
    /// Counts writes; for rows that were found in place, where their bytes are kept.
    pub generation: u32,
}

/// The owner of rows that were declared to be in place, with any contents.
pub const FOUND: u64 = u64::MAX;

/// The phase of a sequence's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Filling,
    Parked,
    Joining,
    Running,
    Failed,
    Closing,
    Gone,
}

/// A sequence, as the model sees it.
#[derive(Clone, Debug)]
pub struct Seq {
    pub handle: Sequence,
    pub state: State,
    pub prompt: u32,
    pub admitted: u32,
    pub whole: bool,
    /// As it was opened with or last resized to.
    pub asked: Budget,
    /// By index group, as everything of slots.
    pub budgets: Vec<u32>,
    /// What it was promised; with shared budgets it has no slots before it joins.
    pub least: Vec<u32>,
    /// Its join found no slots that others could give up.
    pub busy: bool,
    /// Slot blocks: those of the budgets, unless a resize failed half-way.
    pub blocks: Vec<u32>,
    /// The stream of a resize that may not have run.
    pub resizing: Option<Stream>,
    /// By layer the committed rows, or during prefill those that are there.
    pub rows: Vec<Vec<Origin>>,
    /// The rows that the last step wrote after them.
    pub landed: Vec<Origin>,
    pub oracles: Vec<Oracle>,
    pub micro: Option<u32>,
    pub in_flight: u32,
    /// One of its steps failed and it was not truncated since: later steps fail too, and accept nothing.
    pub tainted: bool,
    /// A step was given up before all layers of a group had gathered what it missed. By its tables these rows are
    /// resident, so a truncation trusts none of the sequence's rows.
    pub lost: bool,
    /// Pages by the model's own numbers, and one that is held for a copy.
    pub pages: Vec<usize>,
    pub held: Option<usize>,
    pub lane: u32,
    pub landing: Vec<u32>,
    /// Index pages, as the cache named them.
    pub key_pages: Vec<u32>,
    /// Slots whose rows a bounded warm-up has not visited.
    pub unvisited: u64,
    pub rows_a_call: u64,
    /// Its tokens, if the cache has them, and its published pages, each with whether it uses the page of the index.
    pub script: Option<Script>,
    pub names: Vec<(Name, bool)>,
    /// Committed rows that are certainly stored.
    pub stored: u32,
    /// While it is parked, by index group, the newest resident rows of the time when it ran; none if it never ran.
    pub noted: Option<Vec<Vec<u32>>>,
}

impl Seq {
    /// Whether the handle still names the sequence.
    pub fn is_open(&self) -> bool {
        !matches!(self.state, State::Closing | State::Gone)
    }

    /// Whether it is a prompt that may grow: it has not joined, or it is parked.
    pub fn is_prompt(&self) -> bool {
        matches!(self.state, State::Filling | State::Parked)
    }

    /// Rows of the prompt that every layer has.
    pub fn filled(&self) -> u32 {
        self.rows.iter().map(Vec::len).min().unwrap() as u32
    }

    /// Committed tokens.
    pub fn length(&self) -> u32 {
        self.rows[0].len() as u32
    }

    /// Updates every oracle and every layer's rows: `accepted` landed rows are accepted, and `next` rows will land.
    pub fn commit(&mut self, accepted: u32, next: Vec<Origin>) {
        for rows in &mut self.rows {
            rows.extend(&self.landed[..accepted as usize]);
        }
        self.oracles.iter_mut().for_each(|oracle| oracle.commit(accepted, next.len() as u32));
        self.landed = next;
    }

    /// Fresh oracles for the rows that are there.
    pub fn enter(&mut self) {
        let length = self.length();
        let oracle = |budget: &u32| {
            let mut oracle = Oracle::new(*budget as usize, length);
            if self.whole {
                oracle.bring_up();
            }
            oracle
        };
        self.oracles = self.budgets.iter().map(oracle).collect();
    }
}

/// Pages by number, each with its owners counted.
#[derive(Debug, Default)]
pub struct PageModel {
    owners: HashMap<usize, u32>,
    named: usize,
}

impl PageModel {
    /// Pages with an owner.
    pub fn taken(&self) -> u32 {
        self.owners.len() as u32
    }

    /// `count` pages with one owner each.
    pub fn take(&mut self, count: u32) -> Vec<usize> {
        let first = self.named;
        self.named += count as usize;
        self.owners.extend((first..self.named).map(|page| (page, 1)));
        (first..self.named).collect()
    }

    /// One owner more.
    pub fn share(&mut self, page: usize) {
        *self.owners.get_mut(&page).unwrap() += 1;
    }

    /// The number of its owners.
    pub fn owners(&self, page: usize) -> u32 {
        self.owners[&page]
    }

    /// One owner less.
    pub fn release(&mut self, page: usize) {
        let owners = self.owners.get_mut(&page).unwrap();
        *owners -= 1;
        if *owners == 0 {
            self.owners.remove(&page);
        }
    }
}

/// The slot blocks of budgets.
pub fn blocks(budgets: &[u32]) -> Vec<u32> {
    budgets.iter().map(|slots| slots.div_ceil(SLOT_BLOCK)).collect()
}

/// Slots by index group that a config declares.
pub fn declared_slots(config: &Config, groups: &[Range<u32>]) -> Vec<u32> {
    match &config.slots {
        Slots::Uniform(slots) => vec![*slots; groups.len()],
        Slots::ByLayer(table) => groups.iter().map(|group| table[group.start as usize]).collect(),
    }
}

/// Tokens with the rows that may be in flight after them.
pub fn reach(config: &Config, tokens: u32) -> u32 {
    tokens + config.query_rows * config.steps_in_flight
}

/// The slots that a budget gives by index group, or none for an invalid one.
pub fn budgets(config: &Config, budget: &Budget, admitted: u32, groups: &[Range<u32>]) -> Option<Vec<u32>> {
    let layers = groups.last()?.end;
    let table = match budget {
        Budget::Ratio(ratio) if *ratio > 0.0 && *ratio <= 1.0 => {
            vec![((ratio * f64::from(admitted)).round() as u32).max(config.min_budget); layers as usize]
        }
        Budget::Ratio(_) => return None,
        Budget::Slots(slots) => vec![*slots; layers as usize],
        Budget::ByLayer(table) => table.clone(),
    };
    let fits = table.len() == layers as usize && table.iter().all(|s| *s >= config.min_budget);
    let most = reach(config, admitted).max(config.min_budget);
    let of = |group: &Range<u32>| &table[group.start as usize..group.end as usize];
    let fits = fits && groups.iter().all(|group| of(group).iter().all(|slots| *slots == of(group)[0]));
    fits.then(|| groups.iter().map(|group| of(group)[0].min(most)).collect())
}
