//! A resize on host memory: the rule decides which rows stay and where, and the rows that change their slot are copied
//! inside each layer's slab.
//!
//! **Cost.** The words of the tables are scattered over memory, and so are the rows. Rows are copied in portions while
//! the rule finds the next ones, so most of the tables' cache misses overlap with the copies of earlier rows.
//!
//! **Locks.** The working memory first, then one layer's tables, as in a warm-up. The lane's staged lists are locked
//! for the whole call: the host brings no new lists for the lane before this call has run.

use crate::device::Expected;
use crate::device::host::copy::Pair;
use crate::device::host::pools::{Copies, HostPools};
use crate::error::Result;
use crate::ids::Lane;
use crate::residency::Scan;
use crate::sync::Ordering;

impl HostPools {
    /// Changes a lane's budgets to those of its staged lists.
    pub(super) fn resize<S: Scan>(&self, scan: &S, lane: Lane) -> Result<()> {
        let mut room = self.room.lock();
        let staged = self.lane(lane)?.staged.lock();
        let g = &self.layout.geometry;
        let has_bytes = self.layout.expected != Expected::Resolved;
        let mut copies = Copies::new(g, self.copier);
        let layers = self.layers.iter().zip(&self.layout.slabs);
        for ((layer, slab), (blocks, budget)) in layers.zip(staged.blocks.iter().zip(&staged.budgets)) {
            let slab = slab.address();
            let mut tables = layer.lock();
            let resized = tables.resize(scan, lane.0, blocks, *budget, &mut room.work, |moved| {
                if has_bytes {
                    let (from, to) = (g.pieces(moved.from), g.pieces(moved.to));
                    copies
                        .add([0, 1].map(|run| Pair { from: slab + from[run].slab, to: slab + to[run].slab }));
                }
            })?;
            copies.flush();
            self.moved.fetch_add(resized.moved, Ordering::AcqRel);
        }
        Ok(())
    }
}
