//! What has arrived of a request at one rank of the receiver.
//!
//! **A bit for each row.** A row here is a head of a component of a token in a layer. A run sets the bits of its rows
//! when its bytes are in place and checked. Nothing is counted but bits that were not set before. So runs may come in
//! any order, more than once, and cut in another way than the first time, and a layer is ready exactly when every row
//! of it is there. Engines that count messages or bytes call a layer complete that is not (vllm#52516).
//!
//! **Cost.** Memory is taken once: a bit for each row. 61 layers x 3 components x 4,096 tokens are 94 KB; 80 layers of
//! 8 heads of K and V x 128K tokens are 21 MB. So the caller bounds the tokens. A run costs a word for every 64 tokens
//! of each of its heads, and allocates nothing; what is missing costs a look at every row of the layer.
//!
//! **What it does not know.** Generations and checks: who notes a run has compared both.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::fallible::{filled, vector};
use crate::transfer::plan::Plan;
use crate::transfer::runs::Run;

const OPERATION: &str = "ledger";

/// The rows of a component of a layer.
#[derive(Clone, Copy, Debug)]
struct Rows {
    layer: u32,
    component: u32,
    heads: u32,
    /// The first word of its bits.
    first: usize,
}

/// A layer, and how many of its rows have not arrived.
#[derive(Clone, Copy, Debug)]
struct Arriving {
    layer: u32,
    /// The first of its rows in the list.
    first: usize,
    missing: u64,
}

/// The place of a run's rows: the layer's place in the list, the component's rows, and of these the heads and tokens,
/// counted from the first token here.
#[derive(Clone, Debug)]
pub(super) struct Found {
    layer: usize,
    rows: Rows,
    heads: Range<u32>,
    tokens: Range<u32>,
}

/// See the module's head.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// The stage and lane of the rank.
    rank: (u32, u32),
    tokens: Range<u32>,
    /// By layer, in the order of the plan.
    rows: Vec<Rows>,
    layers: Vec<Arriving>,
    /// The place of the layer that was noted last.
    last: usize,
    /// Words of a row of bits, one for each token.
    words: usize,
    bits: Vec<u64>,
}

impl Ledger {
    /// Nothing has arrived at the receiver's rank `lane` of `stage` of the tokens that are sent.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a rank that is not there, and for tokens that end before they begin;
    /// [`Kind::Overflow`]; [`Kind::OutOfMemory`].
    pub fn new(plan: &Plan, rank @ (stage, lane): (u32, u32), tokens: Range<u32>) -> Result<Ledger> {
        plan.target.check_rank(stage, lane)?;
        let Some(count) = tokens.end.checked_sub(tokens.start) else {
            return Err(Error::new(Kind::OutOfRange, OPERATION).at("tokens").with("end", tokens.end));
        };
        let words = count.div_ceil(u64::BITS) as usize;
        let own = || plan.pairs.iter().filter(|pair| pair.to_stage == stage);
        let mut rows = vector(own().count(), OPERATION, "rows")?;
        let mut layers: Vec<Arriving> = vector(own().count(), OPERATION, "layers")?;
        let (mut first, overflow) = (0_usize, || Error::new(Kind::Overflow, OPERATION).at("bits"));
        for pair in own() {
            let heads = plan.target.heads(pair.heads);
            rows.push(Rows { layer: pair.layer, component: pair.component, heads, first });
            let more = words.checked_mul(heads as usize).and_then(|words| first.checked_add(words));
            first = more.ok_or_else(overflow)?;
            let missing = u64::from(heads) * u64::from(count);
            match layers.last_mut().filter(|last| last.layer == pair.layer) {
                Some(last) => last.missing += missing,
                None => layers.push(Arriving { layer: pair.layer, first: rows.len() - 1, missing }),
            }
        }
        let bits = filled(first, 0, OPERATION, "bits of rows")?;
        Ok(Ledger { rank, tokens, rows, layers, last: 0, words, bits })
    }

    /// Notes that a run's bytes are in place. Returns how many of its rows had not arrived before.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a run of rows that this rank does not get; it changes nothing.
    pub fn note(&mut self, run: &Run) -> Result<u64> {
        let found = self.find(run)?;
        Ok(self.set(&found))
    }

    /// Notes the rows of a run that was found.
    pub(super) fn set(&mut self, found: &Found) -> u64 {
        let mut fresh = 0;
        for head in found.heads.clone() {
            let first = found.rows.first + head as usize * self.words;
            fresh += u64::from(set(&mut self.bits[first..first + self.words], found.tokens.clone()));
        }
        self.last = found.layer;
        if let Some(layer) = self.layers.get_mut(found.layer) {
            layer.missing -= fresh;
        }
        fresh
    }

    /// Whether all rows of a run that was found have arrived.
    pub(super) fn has(&self, found: &Found) -> bool {
        found.heads.clone().all(|head| {
            let first = found.rows.first + head as usize * self.words;
            masks(found.tokens.clone()).all(|(word, mask)| self.bits[first + word] & mask == mask)
        })
    }

    /// The place of a run's rows.
    ///
    /// # Errors
    /// As [`Ledger::note`].
    pub(super) fn find(&self, run: &Run) -> Result<Found> {
        let wrong =
            |place, value: u64| Err(Error::new(Kind::OutOfRange, OPERATION).at(place).with("given", value));
        if (run.to.stage, run.to.lane) != self.rank {
            return wrong("a run to another rank", run.to.lane.into());
        }
        let end = run.token.checked_add(run.tokens).filter(|end| *end <= self.tokens.end);
        let Some(end) = end.filter(|_| run.token >= self.tokens.start) else {
            return wrong("tokens of a run", run.token.into());
        };
        // Runs come layer by layer.
        let is_it = |place: &usize| self.layers.get(*place).is_some_and(|layer| layer.layer == run.layer);
        let layer = Some(self.last).filter(is_it);
        let layer = layer.unwrap_or_else(|| self.layers.partition_point(|layer| layer.layer < run.layer));
        let begin = self.layers.get(layer).map_or(self.rows.len(), |layer| layer.first);
        let of_layer = self.rows.iter().skip(begin).take_while(|rows| rows.layer == run.layer);
        let Some(rows) = of_layer.copied().find(|rows| rows.component == run.component) else {
            return wrong("layer and component of a run", run.layer.into());
        };
        let Some(last) = run.head.checked_add(run.heads).filter(|last| *last <= rows.heads) else {
            return wrong("heads of a run", run.head.into());
        };
        let tokens = run.token - self.tokens.start..end - self.tokens.start;
        Ok(Found { layer, rows, heads: run.head..last, tokens })
    }

    /// Whether all rows of a layer have arrived. A layer of which this rank gets nothing is ready.
    pub fn is_ready(&self, layer: u32) -> bool {
        let place = self.layers.partition_point(|other| other.layer < layer);
        self.layers.get(place).is_none_or(|other| other.layer != layer || other.missing == 0)
    }

    /// The layers of which this rank gets rows, ascending.
    pub fn layers(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers.iter().map(|layer| layer.layer)
    }

    /// Whether all rows of all layers have arrived.
    pub fn is_whole(&self) -> bool {
        self.layers.iter().all(|layer| layer.missing == 0)
    }

    /// Visits the tokens of a layer of which a row has not arrived, in ascending ranges: what is asked for again.
    pub fn missing(&self, layer: u32, mut visit: impl FnMut(Range<u32>)) {
        let begin = self.rows.partition_point(|rows| rows.layer < layer);
        let of_layer = || self.rows.iter().skip(begin).take_while(|rows| rows.layer == layer);
        if self.is_ready(layer) {
            return;
        }
        let mut from = None;
        for token in self.tokens.clone() {
            let (word, bit) = bit_of(token - self.tokens.start);
            let there = of_layer().all(|rows| {
                (0..rows.heads as usize)
                    .all(|head| self.bits[rows.first + head * self.words + word] & bit != 0)
            });
            match (there, from) {
                (false, None) => from = Some(token),
                (true, Some(first)) => {
                    visit(first..token);
                    from = None;
                }
                _ => {}
            }
        }
        if let Some(first) = from {
            visit(first..self.tokens.end);
        }
    }
}

/// The word and the bit of a token.
const fn bit_of(token: u32) -> (usize, u64) {
    ((token / u64::BITS) as usize, 1 << (token % u64::BITS))
}

/// The words that have bits of a range, and these bits.
fn masks(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let words = if range.is_empty() { 0..0 } else { range.start / u64::BITS..range.end.div_ceil(u64::BITS) };
    words.map(move |number| {
        let begin = number * u64::BITS;
        let (from, to) = (range.start.saturating_sub(begin), (range.end - begin).min(u64::BITS));
        (number as usize, (u64::MAX >> (u64::BITS - (to - from))) << from)
    })
}

/// Sets the bits of a range. Returns how many were not set.
fn set(words: &mut [u64], range: Range<u32>) -> u32 {
    let mut fresh = 0;
    for (number, mask) in masks(range) {
        if let Some(word) = words.get_mut(number) {
            fresh += (mask & !*word).count_ones();
            *word |= mask;
        }
    }
    fresh
}
