//! A simulated step.

use std::collections::HashSet;

use forebay::overlap::Overlap;
use forebay::predict::elastic::Pool;
use forebay::predict::plan::Ratio;
use forebay::predict::provenance::Provenance;
use forebay::predict::simulate::Outcome;
use serde::Serialize;

use super::shards::Sharded;
use crate::present::numbers::tokens;
use crate::study::mean_step::Worst;

/// A point of the sweep, simulated.
pub struct Simulated {
    /// The provenance of its figures.
    pub provenance: Provenance,
    /// The link, if one was named.
    pub link: Option<String>,
    /// Which orders were allowed.
    pub choice: &'static str,
    /// The ratio as requested.
    pub asked: Ratio,
    /// The pool that the sequences divide, with elastic budgets.
    pub pool: Option<Pool>,
    /// Whether each micro-batch had a compute stream of its own.
    pub fill: bool,
    /// Gigabytes a second of other traffic, up and down.
    pub traffic: [Option<f64>; 2],
    /// What is sharded, if something is.
    pub sharded: Option<Sharded>,
    /// The step; the mean of a replay's steps.
    pub outcome: Outcome,
    /// The longest of a replay's steps.
    pub worst: Option<Worst>,
}

impl Simulated {
    /// The step that is drawn: a mean has no timeline, so of several steps it is the longest.
    pub fn drawn(&self) -> &Outcome {
        self.worst.as_ref().map_or(&self.outcome, |worst| &worst.outcome)
    }
}

/// For each pool and context, up to which batch nothing is missed. Empty with fixed budgets.
pub fn elastic(all: &[Simulated]) -> Vec<String> {
    let mut known = HashSet::new();
    let pools = all.iter().filter_map(|one| Some((one.pool?, one.outcome.point.context)));
    let sentence = |(pool, context): (Pool, u32)| {
        let begin = match pool.misses_from(context) {
            1 => "misses begin at batch 1".to_owned(),
            first => format!("nothing is missed up to batch {}", first - 1),
        };
        format!("Elastic budgets: {} slots a layer; at {} {begin}.", pool.slots(), tokens(context))
    };
    pools.filter(|pool| known.insert(*pool)).map(sentence).collect()
}

/// Rows that a request misses in a layer, mean over the layers.
pub fn mean_misses(outcome: &Outcome) -> f64 {
    outcome.misses.iter().sum::<f64>() / outcome.misses.len().max(1) as f64
}

/// Exposed time as a share of the step.
pub fn exposed_share(outcome: &Outcome) -> f64 {
    if outcome.step_ms > 0.0 { outcome.exposed_ms / outcome.step_ms } else { 0.0 }
}

/// By layer, the microseconds that gathers and pulls expose.
fn exposed_us(outcome: &Outcome) -> impl Iterator<Item = f64> {
    let pulls = outcome.pulls.iter().flat_map(|pulls| &pulls.exposed_us).copied();
    outcome.exposed_us.iter().zip(pulls.chain(std::iter::repeat(0.0))).map(|(gathers, pulls)| gathers + pulls)
}

/// The layer with most exposed time.
pub fn worst_layer(outcome: &Outcome) -> u32 {
    let layers = (0_u32..).zip(exposed_us(outcome));
    layers.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(layer, _)| layer)
}

/// The number of layers in each order.
#[derive(Serialize)]
pub struct Counts {
    pub none: u32,
    pub da: u32,
    pub dba: u32,
    pub ahead: u32,
}

pub fn counts(outcome: &Outcome) -> Counts {
    let count = |order| outcome.overlap.iter().filter(|overlap| **overlap == order).count() as u32;
    let [none, da, dba, ahead] = Overlap::ALL.map(count);
    Counts { none, da, dba, ahead }
}
