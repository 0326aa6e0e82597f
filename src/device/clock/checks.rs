//! The extents of one cache, what a row of it weighs, and what is staged for its lanes.

use crate::device::checks::{self, Asker};
use crate::device::op::Staged;
use crate::device::{DeviceId, Join, PoolLayout, PoolOp, Truncate};
use crate::error::{Error, Kind, Result};

pub(super) const NAME: &str = "clock device";

/// What the clock knows of a cache.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) checks: checks::Extents,
    pub(super) row_bytes: f64,
    /// By lane.
    staged: Vec<Staged>,
}

pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}

/// The lane for which an operation brings lists.
fn lane_of(op: &PoolOp<'_>) -> Option<usize> {
    match op {
        PoolOp::Join(Join { lane, .. }) | PoolOp::Truncate(Truncate { lane, .. }) => Some(lane.index()),
        _ => None,
    }
}

impl Extents {
    /// `exact`: there is a device beneath, whose memory is meant.
    pub(super) fn new(plan: &PoolLayout, device: DeviceId, exact: bool) -> Result<Self> {
        let checks = checks::Extents::new(plan, Asker { name: NAME, device, exact, top_k_max: u32::MAX })?;
        let layers = checks.layers as usize;
        let staged = (0..checks.lanes).map(|_| Staged::new(layers, 0, NAME));
        Ok(Extents {
            row_bytes: f64::from(plan.geometry.row_bytes()),
            staged: staged.collect::<Result<_>>()?,
            checks,
        })
    }

    /// Keeps what an operation borrows, which was checked, until it runs.
    pub(super) fn stage(&mut self, op: &PoolOp<'_>) {
        if let Some(staged) = lane_of(op).and_then(|lane| self.staged.get_mut(lane)) {
            staged.take(op);
        }
    }

    /// What an operation takes over now, if it brought anything.
    pub(super) fn staged(&self, op: &PoolOp<'_>) -> Option<Staged> {
        lane_of(op).and_then(|lane| self.staged.get(lane)).cloned()
    }
}
