//! The result of retiring a step: its counters, or the reason why it failed or could not be retired.

use crate::device::descriptor::{LayerCount, Report};
use crate::error::Error;
use crate::step::phase::Step;

/// The results of a step. Retiring accepts no rows: the prepare of a sequence's next step says how many of the rows
/// that this step wrote are accepted ([`BatchRow::accepted`](crate::BatchRow::accepted)).
#[derive(Clone, Copy, Debug)]
pub struct Retired<'a> {
    pub(crate) report: &'a Report,
}

impl Retired<'_> {
    /// The step's number.
    pub const fn step(&self) -> u64 {
        self.report.step
    }

    /// Hits and misses by layer, all rows of the batch.
    pub fn layers(&self) -> &[LayerCount] {
        &self.report.layers
    }

    /// The committed length of each batch row's sequence after this step's commit, without the rows that this step
    /// wrote.
    pub fn lengths(&self) -> &[u32] {
        &self.report.lengths
    }

    /// Hits and misses of all layers.
    pub fn total(&self) -> (u64, u64) {
        self.report.layers.iter().fold((0, 0), |(hits, misses), layer| {
            (hits + u64::from(layer.hits), misses + u64::from(layer.misses))
        })
    }
}

/// A step that could not be retired, or that failed.
#[derive(Debug)]
pub struct Unretired {
    /// The reason.
    pub error: Error,
    /// The step, if it is still in flight and must be retired later; `None` if it has ended.
    pub step: Option<Step>,
}
