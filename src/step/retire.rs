//! What an engine is told when a step ends: its counters, or why it could not be retired.

use crate::device::descriptor::{LayerCount, Report};
use crate::error::Error;
use crate::step::Step;

/// What a step has done. It accepts nothing: how many of the rows that it wrote count is said when the next step of
/// their sequences is prepared ([`BatchRow::accepted`](crate::BatchRow::accepted)).
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

    /// The committed length of each batch row's sequence, as of this step's commit: without the rows that this step
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
    /// Why.
    pub error: Error,
    /// The step, when it is still in flight and must be retired later; nothing when it has ended.
    pub step: Option<Step>,
}
