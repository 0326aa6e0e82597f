//! A resize on host memory: the rule decides which rows stay and where, and the rows that change their slot are copied
//! inside the slab of each layer of the index group.
//!
//! **Cost.** The words of the tables are scattered over memory, and so are the rows. Rows are copied in portions while
//! the rule finds the next ones, so most of the tables' cache misses overlap with the copies of earlier rows.
//!
//! **Locks.** The working memory first, then one layer's tables, as in a warm-up. The lane's staged lists are locked
//! for the whole call: the host brings no new lists for the lane before this call has run.

use crate::device::Expected;
use crate::device::host::pools::{HostPools, Moves};
use crate::error::Result;
use crate::ids::Lane;
use crate::residency::Scan;
use crate::sync::Ordering;

impl HostPools {
    /// Changes a lane's budgets to those of its staged lists.
    pub(super) fn resize<S: Scan>(&self, scan: &S, lane: Lane) -> Result<()> {
        let mut room = self.room.lock();
        let staged = self.lane(lane)?.staged.lock();
        let has_bytes = self.layout.expected != Expected::Resolved;
        let mut moves = Moves::new(self);
        let lists = staged.blocks.iter().zip(&staged.budgets);
        for (group, (tables, (blocks, budget))) in self.tables.iter().zip(lists).enumerate() {
            let mut tables = tables.lock();
            moves.begin(group);
            let resized = tables.resize(scan, lane.0, blocks, *budget, &mut room.work, |moved| {
                if has_bytes {
                    moves.add(moved);
                }
            })?;
            moves.flush();
            let layers = self.layout.geometry.members(group).len() as u32;
            self.moved.fetch_add(resized.moved * layers, Ordering::AcqRel);
        }
        Ok(())
    }
}
