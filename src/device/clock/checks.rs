//! The clock's record of one cache: its sizes, its bytes per row, and the lists staged for its lanes.

use crate::device::checks::{self, Asker};
use crate::device::op::Staged;
use crate::device::{DeviceId, PoolLayout, PoolOp, Resize};
use crate::error::Result;
use crate::ids::Layer;
use crate::residency::TableShape;

pub(super) const NAME: &str = "clock device";

/// The clock's record of one cache.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) checks: checks::Extents,
    /// Bytes of a row, by layer.
    row_bytes: Vec<f64>,
    /// For each lane.
    staged: Vec<Staged>,
}

impl Extents {
    /// `exact`: there is a device beneath, so slices are checked against its memory.
    pub(super) fn new(layout: &PoolLayout, device: DeviceId, exact: bool) -> Result<Self> {
        let checks = checks::Extents::new(layout, Asker { name: NAME, device, exact, top_k_max: u32::MAX })?;
        let groups = layout.geometry.groups().len();
        let blocks = layout.tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0) as usize;
        let staged = (0..checks.lanes).map(|_| Staged::new(groups, blocks, 0, NAME));
        Ok(Extents {
            row_bytes: layout.geometry.formats().iter().map(|layer| layer.row_bytes().into()).collect(),
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

    /// Bytes of a row in a layer.
    pub(super) fn row_bytes(&self, layer: Layer) -> f64 {
        self.row_bytes.get(layer.index()).copied().unwrap_or(0.0)
    }

    /// Bytes of a row, as a mean over the layers.
    pub(super) fn mean_row_bytes(&self) -> f64 {
        self.row_bytes.iter().sum::<f64>() / self.row_bytes.len().max(1) as f64
    }

    /// The most bytes that a resize may move: rows that fit both the slots that go and the slots that stay.
    pub(super) fn moved_bytes(&self, resize: &Resize<'_>) -> f64 {
        let Some(staged) = self.staged.get(resize.lane.index()) else { return 0.0 };
        let budgets = staged.budgets.iter().zip(resize.budgets).enumerate();
        let moved = |(group, (now, then)): (usize, (&u32, &u32))| {
            let rows = now.saturating_sub(*then).min(*then);
            f64::from(rows) * self.checks.geometry.group_row_bytes(group) as f64
        };
        budgets.map(moved).sum()
    }
}
