//! The extents of one cache, what a row of it weighs, and what is staged for its lanes.

use std::ops::Deref;

use crate::device::checks::{self, Asker};
use crate::device::clock::effect::Staged;
use crate::device::{Join, Plan};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;

const NAME: &str = "clock device";

/// It dereferences to what can be checked.
#[derive(Debug)]
pub(super) struct Extents {
    checks: checks::Extents,
    pub(super) row_bytes: f64,
    /// By lane.
    pub(super) staged: Vec<Staged>,
}

pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}

impl Deref for Extents {
    type Target = checks::Extents;

    fn deref(&self) -> &checks::Extents {
        &self.checks
    }
}

impl Extents {
    pub(super) fn new(plan: &Plan, exact: bool) -> Self {
        let lanes = plan.tables.first().map_or(0, |t| t.lanes as usize);
        Extents {
            // The clock knows slices by its own tag, or by the one of the device beneath.
            checks: checks::Extents::new(plan, Asker { name: NAME, tag: None, exact }),
            row_bytes: f64::from(plan.geometry.row_bytes()),
            staged: vec![Staged::default(); lanes],
        }
    }

    /// Keeps what a join will need until it runs.
    pub(super) fn stage_join(&mut self, join: &Join<'_>) -> Result<()> {
        self.checks.join(join)?;
        self.stage_pages(join.lane, join.pages)?;
        if let Some(staged) = self.staged.get_mut(join.lane.index()) {
            staged.blocks.resize_with(join.blocks.len(), Vec::new);
            for (kept, blocks) in staged.blocks.iter_mut().zip(join.blocks) {
                kept.clear();
                kept.extend_from_slice(blocks);
            }
            staged.budgets.clear();
            staged.budgets.extend_from_slice(join.budgets);
            staged.length = join.length;
        }
        Ok(())
    }

    /// Keeps a page table until the operation that takes it over runs.
    pub(super) fn stage_pages(&mut self, lane: Lane, pages: &[u32]) -> Result<()> {
        self.checks.pages(lane, pages)?;
        if let Some(staged) = self.staged.get_mut(lane.index()) {
            staged.pages.clear();
            staged.pages.extend_from_slice(pages);
        }
        Ok(())
    }
}
