//! The clock's record of one cache: its sizes, its bytes per row, and the lists staged for its lanes.

use crate::device::checks::{self, Asker};
use crate::device::op::Staged;
use crate::device::{DeviceId, PoolLayout, PoolOp, Resize};
use crate::error::{Error, Kind, Result};
use crate::residency::TableShape;

pub(super) const NAME: &str = "clock device";

/// The clock's record of one cache.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) checks: checks::Extents,
    pub(super) row_bytes: f64,
    /// For each lane.
    staged: Vec<Staged>,
}

pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}

impl Extents {
    /// `exact`: there is a device beneath, so slices are checked against its memory.
    pub(super) fn new(layout: &PoolLayout, device: DeviceId, exact: bool) -> Result<Self> {
        let checks = checks::Extents::new(layout, Asker { name: NAME, device, exact, top_k_max: u32::MAX })?;
        let layers = checks.layers as usize;
        let blocks = layout.tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0) as usize;
        let staged = (0..checks.lanes).map(|_| Staged::new(layers, blocks, 0, NAME));
        Ok(Extents {
            row_bytes: f64::from(layout.geometry.row_bytes()),
            staged: staged.collect::<Result<_>>()?,
            checks,
        })
    }

    /// Copies the lists that a checked operation borrows.
    pub(super) fn stage(&mut self, op: &PoolOp<'_>) {
        if let Some(staged) = op.staged_lane().and_then(|lane| self.staged.get_mut(lane.index())) {
            staged.take(op);
        }
    }

    /// The lists staged for an operation, if it brought any.
    pub(super) fn staged(&self, op: &PoolOp<'_>) -> Option<Staged> {
        op.staged_lane().and_then(|lane| self.staged.get(lane.index())).cloned()
    }

    /// The most rows that a resize may move: those that fit both the slots that go and the slots that stay.
    pub(super) fn moved_rows(&self, resize: &Resize<'_>) -> f64 {
        let Some(staged) = self.staged.get(resize.lane.index()) else { return 0.0 };
        let moved = |(now, then): (&u32, &u32)| f64::from(now.saturating_sub(*then).min(*then));
        staged.budgets.iter().zip(resize.budgets).map(moved).sum()
    }
}
