//! What can be known when an operation is enqueued: its slices and numbers.

use crate::device::block::{self, Report};
use crate::device::clock::effect::Staged;
use crate::device::{Answer, Join, Part, Parts, Plan, Slice};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer, MicroBatch};

/// The extents of one cache, and what is staged for its lanes.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) row_bytes: f64,
    pub(super) layers: u32,
    pub(super) batch: u32,
    query_rows: u32,
    /// By layer the passes of attention.
    passes: Vec<u32>,
    micro_batches: u32,
    top_k: u64,
    lane_pages: usize,
    host_pages: u64,
    /// By lane.
    pub(super) staged: Vec<Staged>,
    /// Slices have the sizes that the operations demand. A device without memory does not ask.
    exact: bool,
}

pub(super) fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, "clock device").at(place).with("value", value)
}

fn overlap(a: &Slice, b: &Slice) -> bool {
    let ends = (a.address() + a.bytes(), b.address() + b.bytes());
    a.bytes() > 0 && b.bytes() > 0 && a.address() < ends.1 && b.address() < ends.0
}

impl Extents {
    pub(super) fn new(plan: &Plan, exact: bool) -> Self {
        let g = &plan.geometry;
        let tables = plan.tables.first();
        Extents {
            row_bytes: f64::from(g.row_bytes()),
            layers: g.layers(),
            batch: plan.batch,
            query_rows: tables.map_or(u32::MAX, |t| t.query_rows),
            passes: plan.tables.iter().map(|t| t.passes).collect(),
            micro_batches: plan.micro_batches,
            top_k: g.shape().top_k.into(),
            lane_pages: plan.lane_pages as usize,
            host_pages: plan.rows.first().map_or(0, Slice::bytes) / g.host_page_bytes(),
            staged: vec![Staged::default(); tables.map_or(0, |t| t.lanes as usize)],
            exact,
        }
    }

    pub(super) fn words(&self, slice: &Slice, count: u64) -> Result<()> {
        match !self.exact || slice.bytes() == 4 * count && slice.address().is_multiple_of(4) {
            true => Ok(()),
            false => Err(bad("bytes of a slice", slice.bytes()).with("wanted", 4 * count)),
        }
    }

    pub(super) fn layer(&self, layer: Layer) -> Result<()> {
        if layer.0 < self.layers { Ok(()) } else { Err(bad("layer", layer.0)) }
    }

    pub(super) fn micro_batch(&self, micro_batch: MicroBatch) -> Result<()> {
        if micro_batch.0 < self.micro_batches { Ok(()) } else { Err(bad("micro-batch", micro_batch.0)) }
    }

    pub(super) fn lane(&self, lane: Lane) -> Result<()> {
        if lane.index() < self.staged.len() { Ok(()) } else { Err(bad("lane", lane.0)) }
    }

    pub(super) fn part(&self, part: &Part) -> Result<()> {
        self.micro_batch(part.micro_batch)?;
        self.layer(part.layer)?;
        let end = u64::from(part.first) + u64::from(part.count);
        if end > u64::from(self.batch) {
            return Err(bad("batch rows", end));
        }
        let rows = u64::from(part.rows.first) + u64::from(part.rows.count);
        if rows > u64::from(self.query_rows) { Err(bad("query rows", rows)) } else { Ok(()) }
    }

    /// The selection of a part, and what answers it: sizes, and that none of them overlap.
    pub(super) fn resolve(&self, part: &Part, selection: &Slice, answer: &Answer) -> Result<()> {
        self.part(part)?;
        let count = u64::from(part.count) * u64::from(part.rows.count) * self.top_k;
        self.words(selection, count)?;
        self.words(&answer.slots, count)?;
        if !self.exact {
            return Ok(());
        }
        let passes = self.passes_of(part.layer);
        let parts = match &answer.parts {
            Some(parts) => self.parts(part, parts, 1 + u64::from(passes))?,
            None if passes > 1 => return Err(bad("attention in several passes needs its parts", passes)),
            None => [None, None],
        };
        let slices = [Some(*selection), Some(answer.slots), parts[0], parts[1]];
        for (index, slice) in slices.iter().enumerate() {
            let Some(slice) = slice else { break };
            if slices[..index].iter().flatten().any(|other| overlap(slice, other)) {
                return Err(bad("selection and slots overlap", slice.bytes()));
            }
        }
        Ok(())
    }

    /// What a call uses of `lists` index lists and their counts.
    fn parts(&self, part: &Part, parts: &Parts, lists: u64) -> Result<[Option<Slice>; 2]> {
        if parts.batch < part.first + part.count {
            return Err(bad("batch rows of the parts", parts.batch));
        }
        if !(parts.lists.address() | parts.counts.address()).is_multiple_of(4) {
            return Err(bad("address of the parts", parts.lists.address()));
        }
        let rows = lists * u64::from(parts.batch) * u64::from(part.rows.count);
        Ok([Some(parts.lists.part(0, 4 * rows * self.top_k)?), Some(parts.counts.part(0, 4 * rows)?)])
    }

    /// A gather's part and pass.
    pub(super) fn gather(&self, part: &Part, pass: u32) -> Result<()> {
        self.part(part)?;
        match self.exact && pass >= self.passes_of(part.layer) {
            true => Err(bad("pass of attention", pass)),
            false => Ok(()),
        }
    }

    fn passes_of(&self, layer: Layer) -> u32 {
        self.passes.get(layer.index()).copied().unwrap_or(1)
    }

    /// The selections of a warm-up, `[layers][steps][k]`.
    pub(super) fn warm(&self, selections: &Slice, steps: u32) -> Result<()> {
        self.words(selections, u64::from(steps) * u64::from(self.layers) * self.top_k)
    }

    pub(super) fn step_block(&self, block: &Slice) -> Result<()> {
        self.words(block, block::step::words(self.batch) as u64)
    }

    pub(super) fn report(&self, slot: &Slice) -> Result<()> {
        self.words(slot, Report::words(self.layers, self.batch) as u64)
    }

    /// Keeps what a join will need until it runs.
    pub(super) fn stage_join(&mut self, join: &Join<'_>) -> Result<()> {
        let layers = self.layers as usize;
        if join.blocks.len() != layers || join.budgets.len() != layers {
            return Err(bad("layers of a join", join.blocks.len() as u64));
        }
        self.stage_pages(join.lane, join.pages)?;
        if let Some(staged) = self.staged.get_mut(join.lane.index()) {
            staged.blocks.resize_with(layers, Vec::new);
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
        self.lane(lane)?;
        if let Some(page) = pages.iter().find(|page| self.exact && u64::from(**page) >= self.host_pages) {
            return Err(bad("host page", *page));
        }
        if self.exact && pages.len() > self.lane_pages {
            return Err(bad("pages of a lane", pages.len() as u64));
        }
        if let Some(staged) = self.staged.get_mut(lane.index()) {
            staged.pages.clear();
            staged.pages.extend_from_slice(pages);
        }
        Ok(())
    }
}
