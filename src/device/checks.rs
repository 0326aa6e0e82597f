//! What can be known of an operation when it is enqueued: its slices and numbers, against the extents of a cache.

use crate::device::block::{self, Report};
use crate::device::{Answer, Join, Part, Parts, Plan, Slice, check_device};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer, MicroBatch};

/// Which device asks: errors name it, and slices must be its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    pub(super) name: &'static str,
    /// Its slices; none where they were checked before.
    pub(super) tag: Option<u32>,
    /// Slices have the sizes that the operations demand. A device without memory does not ask.
    pub(super) exact: bool,
}

/// The extents of one cache.
#[derive(Debug)]
pub(super) struct Extents {
    asker: Asker,
    pub(super) layers: u32,
    pub(super) batch: u32,
    query_rows: u32,
    /// By layer the passes of attention.
    passes: Vec<u32>,
    micro_batches: u32,
    lanes: u32,
    top_k: u64,
    lane_pages: usize,
    host_pages: u64,
}

impl Extents {
    pub(super) fn new(plan: &Plan, asker: Asker) -> Self {
        let g = &plan.geometry;
        let tables = plan.tables.first();
        Extents {
            asker,
            layers: g.layers(),
            batch: plan.batch,
            query_rows: tables.map_or(u32::MAX, |t| t.query_rows),
            passes: plan.tables.iter().map(|t| t.passes).collect(),
            micro_batches: plan.micro_batches,
            lanes: tables.map_or(0, |t| t.lanes),
            top_k: g.shape().top_k.into(),
            lane_pages: plan.lane_pages as usize,
            host_pages: plan.rows.first().map_or(0, Slice::bytes) / g.host_page_bytes(),
        }
    }

    pub(super) fn bad(&self, place: &'static str, value: impl Into<u64>) -> Error {
        Error::new(Kind::OutOfRange, self.asker.name).at(place).with("value", value)
    }

    /// Whether a slice is the device's and holds `count` words.
    pub(super) fn words(&self, slice: &Slice, count: u64) -> Result<()> {
        self.own(slice)?;
        if !self.asker.exact {
            return Ok(());
        }
        if slice.bytes() != 4 * count {
            return Err(self.bad("bytes of a slice", slice.bytes()).with("wanted", 4 * count));
        }
        match slice.address().is_multiple_of(4) {
            true => Ok(()),
            false => Err(self.bad("address of a slice", slice.address()).with("multiple of", 4_u32)),
        }
    }

    /// Whether a slice is the device's. An engine that passes no address has imported none.
    fn own(&self, slice: &Slice) -> Result<()> {
        self.asker.tag.map_or(Ok(()), |tag| check_device(slice, tag))?;
        match self.asker.exact && slice.address() == 0 && slice.bytes() > 0 {
            true => Err(self.bad("address of a slice", 0_u32)),
            false => Ok(()),
        }
    }

    pub(super) fn layer(&self, layer: Layer) -> Result<()> {
        if layer.0 < self.layers { Ok(()) } else { Err(self.bad("layer", layer.0)) }
    }

    pub(super) fn micro_batch(&self, micro: MicroBatch) -> Result<()> {
        if micro.0 < self.micro_batches { Ok(()) } else { Err(self.bad("micro-batch", micro.0)) }
    }

    pub(super) fn lane(&self, lane: Lane) -> Result<()> {
        if lane.0 < self.lanes { Ok(()) } else { Err(self.bad("lane", lane.0)) }
    }

    pub(super) fn part(&self, part: &Part) -> Result<()> {
        self.micro_batch(part.micro_batch)?;
        self.layer(part.layer)?;
        let end = u64::from(part.first) + u64::from(part.count);
        if end > u64::from(self.batch) {
            return Err(self.bad("batch rows", end));
        }
        let rows = u64::from(part.rows.first) + u64::from(part.rows.count);
        if rows > u64::from(self.query_rows) { Err(self.bad("query rows", rows)) } else { Ok(()) }
    }

    /// The selection of a part, and what answers it: sizes, and that none of them overlap.
    pub(super) fn resolve(&self, part: &Part, selection: &Slice, answer: &Answer) -> Result<()> {
        self.part(part)?;
        let count = u64::from(part.count) * u64::from(part.rows.count) * self.top_k;
        self.words(selection, count)?;
        self.words(&answer.slots, count)?;
        if !self.asker.exact {
            return Ok(());
        }
        let passes = self.passes_of(part.layer);
        let parts = match &answer.parts {
            Some(parts) => self.parts(part, parts, 1 + u64::from(passes))?,
            None if passes > 1 => {
                return Err(self.bad("attention in several passes needs its parts", passes));
            }
            None => [None, None],
        };
        let slices = [Some(*selection), Some(answer.slots), parts[0], parts[1]];
        for (index, slice) in slices.iter().enumerate() {
            let Some(slice) = slice else { break };
            if slices[..index].iter().flatten().any(|other| overlap(slice, other)) {
                return Err(self.bad("selection and slots overlap", slice.bytes()));
            }
        }
        Ok(())
    }

    /// What a call uses of `lists` index lists and their counts.
    fn parts(&self, part: &Part, parts: &Parts, lists: u64) -> Result<[Option<Slice>; 2]> {
        self.own(&parts.lists).and_then(|()| self.own(&parts.counts))?;
        if parts.batch < part.first + part.count {
            return Err(self.bad("batch rows of the parts", parts.batch));
        }
        if !(parts.lists.address() | parts.counts.address()).is_multiple_of(4) {
            return Err(self.bad("address of the parts", parts.lists.address()));
        }
        let rows = lists.saturating_mul(u64::from(parts.batch) * u64::from(part.rows.count));
        let bytes = rows.saturating_mul(4);
        let [lists, counts] = [bytes.saturating_mul(self.top_k), bytes];
        Ok([Some(parts.lists.part(0, lists)?), Some(parts.counts.part(0, counts)?)])
    }

    /// A gather's part and pass.
    pub(super) fn gather(&self, part: &Part, pass: u32) -> Result<()> {
        self.part(part)?;
        match self.asker.exact && pass >= self.passes_of(part.layer) {
            true => Err(self.bad("pass of attention", pass)),
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

    /// What a join brings for each layer, and its pages.
    pub(super) fn join(&self, join: &Join<'_>) -> Result<()> {
        let layers = self.layers as usize;
        if join.blocks.len() != layers || join.budgets.len() != layers {
            return Err(self.bad("layers of a join", join.blocks.len() as u64));
        }
        self.pages(join.lane, join.pages)
    }

    /// A lane's page table.
    pub(super) fn pages(&self, lane: Lane, pages: &[u32]) -> Result<()> {
        self.lane(lane)?;
        let exact = self.asker.exact;
        if let Some(page) = pages.iter().find(|page| exact && u64::from(**page) >= self.host_pages) {
            return Err(self.bad("host page", *page));
        }
        match exact && pages.len() > self.lane_pages {
            true => Err(self.bad("pages of a lane", pages.len() as u64)),
            false => Ok(()),
        }
    }
}

/// As [`Slice::overlaps`], for slices that are known to be one device's.
fn overlap(a: &Slice, b: &Slice) -> bool {
    let ends = (a.address().saturating_add(a.bytes()), b.address().saturating_add(b.bytes()));
    a.bytes() > 0 && b.bytes() > 0 && a.address() < ends.1 && b.address() < ends.0
}
