//! The checks of a pool layout when a cache is attached to a device, and of an operation when it is enqueued.
//!
//! A layout's parts must fit each other. An operation's slices and numbers must fit the cache's sizes. All devices
//! use these checks, so all accept the same calls. A rejected call has changed nothing.

use crate::device::descriptor::{self, BATCH_MAX, Report};
use crate::device::{
    DeviceId, Expected, Join, PoolLayout, PoolOp, Resize, ResolveOutput, Slice, SplitIndices, StepRange,
    Truncate,
};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, SLOT_BLOCK};
use crate::ids::{Lane, Layer, MicroBatch};
use crate::residency::TableShape;

/// The device whose calls are checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    /// Its name in errors.
    pub(super) name: &'static str,
    /// The device that all slices must belong to.
    pub(super) device: DeviceId,
    /// The device has memory: slices must have the sizes that the operations demand, and pages and slots must exist.
    pub(super) exact: bool,
    /// The most positions that a query row may select.
    pub(super) top_k_max: u32,
}

/// The sizes of one cache, which operations are checked against.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) asker: Asker,
    pub(super) layers: u32,
    pub(super) batch: u32,
    pub(super) lanes: u32,
    micro_batches: u32,
    query_rows: u32,
    tokens: u32,
    top_k: u64,
    lane_pages: usize,
    host_pages: u64,
    /// Rows have bytes (in a replay they have none).
    moves: bool,
    /// By index group.
    tables: Vec<TableShape>,
    pub(super) geometry: Geometries,
}

fn invalid(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::InvalidConfig, "attach").at(place).with("value", value)
}

/// The host pages of a layout: those of the first layer's rows.
pub(super) fn host_pages(layout: &PoolLayout) -> u64 {
    layout.rows.first().map_or(0, Slice::bytes) / layout.geometry.first().host_page_bytes()
}

/// The error for a resolve in a layer that shares the selection of another one.
pub(crate) fn follows(operation: &'static str, layer: Layer, first: usize) -> Error {
    let error = Error::new(Kind::OutOfRange, operation).at("a layer that another one selects for");
    error.with("layer", layer.0).with("selects for it", first as u64).hint("resolve the group's first layer")
}

/// Checks a prefetch, alike on every device.
pub(super) fn prefetch(device: DeviceId, slice: &Slice, rate: u64) -> Result<()> {
    device.check(slice)?;
    match rate {
        0 => Err(Error::new(Kind::OutOfRange, "prefetch")
            .at("a rate of 0 bytes per second")
            .hint("leave the prefetch out, or pass the rate that other work can spare")),
        _ => Ok(()),
    }
}

impl Asker {
    /// Checks that the parts of a layout fit each other and the device. A device without memory accepts any layout
    /// that names no other device's memory: a simulator's layout has no tables.
    fn check_layout(&self, layout: &PoolLayout) -> Result<()> {
        layout.slabs.iter().chain(&layout.rows).try_for_each(|slice| self.place(slice))?;
        if !self.exact {
            return Ok(());
        }
        let (g, top_k) = (&layout.geometry, layout.geometry.shape().top_k);
        if top_k > self.top_k_max {
            return Err(invalid("selected positions of a query row", top_k)
                .with("most", self.top_k_max)
                .hint("the kernels count a query row's index lists in 16 bits"));
        }
        let counts = (layout.tables.len(), layout.slabs.len(), layout.rows.len());
        if counts != (g.groups().len(), g.layers() as usize, g.layers() as usize) {
            return Err(invalid("layers of the pool layout", layout.tables.len() as u64));
        }
        let Some(first) = layout.tables.first() else {
            return Err(invalid("layers of the pool layout", 0_u32));
        };
        if layout.batch > BATCH_MAX {
            return Err(invalid("batch rows", layout.batch).with("most", BATCH_MAX));
        }
        // All layers share page numbers, so each layer needs room for the first layer's pages.
        let pages = host_pages(layout);
        let layers = g.formats().iter().zip(layout.slabs.iter().zip(&layout.rows)).enumerate();
        for (layer, (format, (slab, own))) in layers {
            let tables = layout.tables.get(g.group_of(layer)).unwrap_or(first);
            tables.check()?;
            let blocks = u64::from(tables.budget_base / SLOT_BLOCK) + u64::from(tables.budget_blocks);
            let fits = blocks.saturating_mul(format.block_bytes().into()) <= slab.bytes();
            let lanes = (tables.lanes, tables.tokens, tables.query_rows);
            if !fits
                || lanes != (first.lanes, first.tokens, first.query_rows)
                || own.bytes() < pages.saturating_mul(format.host_page_bytes())
            {
                return Err(invalid("a layer's slab, rows or tables", slab.bytes()));
            }
            // The index entries of the largest call, over all query rows and waves, must fit in 32 bits.
            let selected = u64::from(tables.query_rows) * u64::from(top_k);
            let listed = selected.saturating_mul(u64::from(tables.waves) + 1);
            if u32::try_from(listed).is_err()
                || listed.saturating_mul(4 * u64::from(layout.batch)) > i64::MAX as u64
            {
                return Err(invalid("selected positions of a step in all waves", listed));
            }
        }
        Ok(())
    }

    /// Checks the address of a slab or of a layer's rows.
    fn place(&self, slice: &Slice) -> Result<()> {
        self.device.check_target(slice)?;
        let nowhere = slice.address() == 0 && slice.bytes() > 0;
        match nowhere || !slice.address().is_multiple_of(4) {
            true => Err(invalid("address of a slab or of rows", slice.address())),
            false => Ok(()),
        }
    }

    pub(super) fn bad(&self, place: &'static str, value: impl Into<u64>) -> Error {
        Error::new(Kind::OutOfRange, self.name).at(place).with("value", value)
    }

    /// Checks that a slice is the device's and holds `count` words.
    pub(super) fn words(&self, slice: &Slice, count: u64) -> Result<()> {
        self.own(slice)?;
        if !self.exact {
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

    /// Checks that a slice is the device's. Address 0 means that the engine passed a null pointer.
    fn own(&self, slice: &Slice) -> Result<()> {
        self.device.check(slice)?;
        match self.exact && slice.address() == 0 && slice.bytes() > 0 {
            true => Err(self.bad("address of a slice", 0_u32)),
            false => Ok(()),
        }
    }
}

impl Extents {
    /// The sizes of a layout, after checking it.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a layout whose parts do not fit each other or the device.
    pub(super) fn new(layout: &PoolLayout, asker: Asker) -> Result<Self> {
        asker.check_layout(layout)?;
        let first = layout.tables.first();
        Ok(Extents {
            asker,
            layers: layout.geometry.layers(),
            batch: layout.batch,
            lanes: first.map_or(0, |tables| tables.lanes),
            micro_batches: layout.micro_batches,
            query_rows: first.map_or(u32::MAX, |tables| tables.query_rows),
            tokens: first.map_or(u32::MAX, |tables| tables.tokens),
            top_k: layout.geometry.shape().top_k.into(),
            lane_pages: layout.lane_pages as usize,
            host_pages: host_pages(layout),
            moves: layout.expected != Expected::Resolved,
            tables: layout.tables.clone(),
            geometry: layout.geometry.clone(),
        })
    }

    /// Checks that an operation fits the cache.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] names the value that does not fit; [`Kind::InvalidState`] for an output in memory that is
    /// mapped to be read only.
    pub(super) fn check(&self, op: &PoolOp<'_>) -> Result<()> {
        self.targets(op)?;
        match op {
            PoolOp::Join(join) => self.join(join),
            PoolOp::Truncate(Truncate { lane, pages, .. }) => self.pages(*lane, pages),
            PoolOp::Resize(resize) => self.resize(resize),
            PoolOp::Leave(lane) => self.lane(*lane),
            PoolOp::WarmGather(range) => self.lane(range.lane),
            PoolOp::Warm(warm) => {
                self.lane(warm.lane)?;
                let groups = self.geometry.groups().len();
                if let Some(group) = warm.group.filter(|group| *group as usize >= groups) {
                    return Err(self.asker.bad("index group", group));
                }
                let count = u64::from(warm.steps) * warm.range(groups).1 as u64 * self.top_k;
                warm.selections.map_or(Ok(()), |selections| self.asker.words(&selections, count))
            }
            PoolOp::Newest(newest) => {
                self.lane(newest.lane)?;
                let count = self.geometry.groups().len() as u64 * self.top_k;
                self.asker.words(&newest.positions, count)
            }
            PoolOp::Begin(begin) => {
                self.micro_batch(begin.micro_batch)?;
                self.asker.words(&begin.descriptor, descriptor::step::words(self.batch) as u64)?;
                begin.accepted.map_or(Ok(()), |accepted| self.asker.words(&accepted, self.batch.into()))
            }
            PoolOp::Resolve { range, selection, output } => self.resolve(range, selection, output),
            PoolOp::Gather { range, wave } => {
                self.range(range)?;
                match self.asker.exact && *wave >= self.waves_of(range.layer) {
                    true => Err(self.asker.bad("wave of attention", *wave)),
                    false => self.rows(),
                }
            }
            PoolOp::Scatter(range) => self.range(range).and_then(|()| self.rows()),
            PoolOp::Report { micro_batch, slot } => {
                self.micro_batch(*micro_batch)?;
                self.asker.words(slot, Report::words(self.layers, self.batch) as u64)
            }
        }
    }

    /// Checks that the caller's slices that an operation writes may be written.
    fn targets(&self, op: &PoolOp<'_>) -> Result<()> {
        let target = |slice| self.asker.device.check_target(slice);
        match op {
            PoolOp::Newest(newest) => target(&newest.positions),
            PoolOp::Report { slot, .. } => target(slot),
            PoolOp::Resolve { output: ResolveOutput { slots, split_indices }, .. } => {
                target(slots)?;
                let split = split_indices.as_ref();
                split.map_or(Ok(()), |split| target(&split.lists).and_then(|()| target(&split.counts)))
            }
            _ => Ok(()),
        }
    }

    fn micro_batch(&self, micro: MicroBatch) -> Result<()> {
        if micro.0 < self.micro_batches { Ok(()) } else { Err(self.asker.bad("micro-batch", micro.0)) }
    }

    pub(super) fn lane(&self, lane: Lane) -> Result<()> {
        if lane.0 < self.lanes { Ok(()) } else { Err(self.asker.bad("lane", lane.0)) }
    }

    fn range(&self, range: &StepRange) -> Result<()> {
        self.micro_batch(range.micro_batch)?;
        if range.layer.0 >= self.layers {
            return Err(self.asker.bad("layer", range.layer.0));
        }
        let end = u64::from(range.first) + u64::from(range.count);
        if end > u64::from(self.batch) {
            return Err(self.asker.bad("batch rows", end));
        }
        let rows = u64::from(range.rows.first) + u64::from(range.rows.count);
        if rows > u64::from(self.query_rows) { Err(self.asker.bad("query rows", rows)) } else { Ok(()) }
    }

    /// Checks a resolve's selection and its output buffers: sizes, and that no two of them overlap.
    fn resolve(&self, range: &StepRange, selection: &Slice, output: &ResolveOutput) -> Result<()> {
        self.range(range)?;
        let first = self.geometry.first_of(range.layer.index());
        if first != range.layer.index() {
            return Err(follows(self.asker.name, range.layer, first));
        }
        let count = u64::from(range.count) * u64::from(range.rows.count) * self.top_k;
        self.asker.words(selection, count)?;
        self.asker.words(&output.slots, count)?;
        if !self.asker.exact {
            return output.split_indices.map_or(Ok(()), |split_indices| {
                self.asker.own(&split_indices.lists).and(self.asker.own(&split_indices.counts))
            });
        }
        let waves = self.waves_of(range.layer);
        let split_indices = match &output.split_indices {
            Some(split_indices) => self.split_indices(range, split_indices, 1 + u64::from(waves))?,
            None if waves > 1 => {
                return Err(self
                    .asker
                    .bad("attention in several waves needs index lists for split attention", waves));
            }
            None => [None, None],
        };
        let slices = [Some(*selection), Some(output.slots), split_indices[0], split_indices[1]];
        for (index, slice) in slices.iter().enumerate() {
            let Some(slice) = slice else { break };
            if slices[..index].iter().flatten().any(|other| slice.overlaps(other)) {
                return Err(self.asker.bad("selection and slots overlap", slice.bytes()));
            }
        }
        Ok(())
    }

    /// The parts of the index lists and counts that a call uses.
    fn split_indices(
        &self,
        range: &StepRange,
        split_indices: &SplitIndices,
        lists: u64,
    ) -> Result<[Option<Slice>; 2]> {
        self.asker.own(&split_indices.lists).and_then(|()| self.asker.own(&split_indices.counts))?;
        if split_indices.batch < range.first + range.count {
            return Err(self.asker.bad("batch rows of the index lists", split_indices.batch));
        }
        if !(split_indices.lists.address() | split_indices.counts.address()).is_multiple_of(4) {
            return Err(self.asker.bad("address of the index lists", split_indices.lists.address()));
        }
        let rows = lists.saturating_mul(u64::from(split_indices.batch) * u64::from(range.rows.count));
        let bytes = rows.saturating_mul(4);
        let [lists, counts] = [bytes.saturating_mul(self.top_k), bytes];
        Ok([Some(split_indices.lists.part(0, lists)?), Some(split_indices.counts.part(0, counts)?)])
    }

    fn waves_of(&self, layer: Layer) -> u32 {
        self.tables.get(self.geometry.group_of(layer.index())).map_or(1, |tables| tables.waves)
    }

    /// Checks that the cache's rows have bytes to move.
    fn rows(&self) -> Result<()> {
        match self.moves {
            true => Ok(()),
            false => Err(self.asker.bad("rows of a cache whose rows have no bytes", 0_u32)),
        }
    }

    /// Checks a join's lists for each index group, and its pages.
    fn join(&self, join: &Join<'_>) -> Result<()> {
        self.groups_of(join.blocks, join.budgets, "layers of a join")?;
        self.pages(join.lane, join.pages)?;
        if join.length > self.tokens {
            return Err(self.asker.bad("length of a join", join.length));
        }
        for ((tables, blocks), budget) in self.tables.iter().zip(join.blocks).zip(join.budgets) {
            let fits = blocks.len() == budget.div_ceil(SLOT_BLOCK) as usize;
            if *budget == 0 || !fits || blocks.len() > tables.lane_blocks() as usize {
                return Err(self.asker.bad("budget of a join", *budget));
            }
            if let Some(block) = blocks.iter().find(|block| **block >= tables.budget_blocks) {
                return Err(self.asker.bad("block of a join", *block));
            }
        }
        Ok(())
    }

    /// Checks a resize's lists for each index group. Only the device knows the lane's present blocks.
    fn resize(&self, resize: &Resize<'_>) -> Result<()> {
        self.lane(resize.lane)?;
        self.groups_of(resize.blocks, resize.budgets, "layers of a resize")?;
        for ((tables, blocks), budget) in self.tables.iter().zip(resize.needed()).zip(resize.budgets) {
            let needed = budget.div_ceil(SLOT_BLOCK);
            if *budget == 0 || blocks.len() < needed as usize || needed > tables.lane_blocks() {
                return Err(self.asker.bad("budget of a resize", *budget));
            }
            if let Some(block) = blocks.iter().find(|block| **block >= tables.budget_blocks) {
                return Err(self.asker.bad("block of a resize", *block));
            }
        }
        Ok(())
    }

    fn groups_of(&self, blocks: &[Vec<u32>], budgets: &[u32], place: &'static str) -> Result<()> {
        let groups = self.geometry.groups().len();
        match blocks.len() == groups && budgets.len() == groups {
            true => Ok(()),
            false => Err(self.asker.bad(place, blocks.len() as u64)),
        }
    }

    /// Checks a lane's page table.
    fn pages(&self, lane: Lane, pages: &[u32]) -> Result<()> {
        self.lane(lane)?;
        let exact = self.asker.exact;
        if let Some(page) = pages.iter().find(|page| exact && u64::from(**page) >= self.host_pages) {
            return Err(self.asker.bad("host page", *page));
        }
        match exact && pages.len() > self.lane_pages {
            true => Err(self.asker.bad("pages of a lane", pages.len() as u64)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Newest;
    use crate::geometry::{Geometry, Shape};
    use crate::residency::QueryRange;

    const TABLES: TableShape = TableShape {
        lanes: 2,
        tokens: 64,
        query_rows: 1,
        scratch: 8,
        waves: 1,
        scratch_base: 1,
        landing_base: 64,
        budget_base: 128,
        budget_blocks: 2,
    };

    /// Two layers of four pages each.
    fn layout(device: DeviceId) -> PoolLayout {
        let shape = Shape { layers: 2, draft_layers: 0, page_tokens: 16, top_k: 8, ..Shape::GLM_5 };
        let geometry = Geometry::new(shape).unwrap();
        let (slab, rows) = (4 * u64::from(geometry.block_bytes()), 4 * geometry.host_page_bytes());
        PoolLayout {
            geometry: geometry.into(),
            tables: vec![TABLES; 2],
            slabs: vec![device.slice(1 << 20, slab), device.slice(2 << 20, slab)],
            rows: vec![device.slice(4 << 20, rows), device.slice(8 << 20, rows)],
            lane_pages: 4,
            micro_batches: 1,
            batch: 2,
            expected: Expected::Whole,
        }
    }

    #[test]
    fn pool_layouts_whose_parts_do_not_fit_each_other_are_refused() {
        let device = DeviceId::new();
        let asker = Asker { name: "device", device, exact: true, top_k_max: 8 };
        let check = |change: &dyn Fn(&mut PoolLayout)| {
            let mut layout = layout(device);
            change(&mut layout);
            Extents::new(&layout, asker).map(drop)
        };
        check(&|_| {}).unwrap();
        let other = DeviceId::new();
        let changes: [&dyn Fn(&mut PoolLayout); 9] = [
            &|layout| {
                layout.rows[1] =
                    layout.rows[1].part(0, 3 * layout.geometry.first().host_page_bytes()).unwrap()
            },
            &|layout| layout.slabs[1] = layout.slabs[1].part(0, layout.slabs[1].bytes() - 4).unwrap(),
            &|layout| layout.slabs[0] = other.slice(1 << 20, layout.slabs[0].bytes()),
            &|layout| layout.rows[0] = device.slice(0, layout.rows[0].bytes()),
            &|layout| layout.tables[1].tokens += 1,
            &|layout| layout.tables[1].waves = u32::MAX,
            &|layout| layout.batch = BATCH_MAX + 1,
            &|layout| layout.tables.truncate(1),
            &|layout| {
                layout.geometry =
                    Geometry::new(Shape { top_k: 9, ..*layout.geometry.shape() }).unwrap().into()
            },
        ];
        for (number, change) in changes.iter().enumerate() {
            let kind = check(change).unwrap_err().kind();
            assert!([Kind::InvalidConfig, Kind::OutOfRange].contains(&kind), "{number}");
        }
    }

    #[test]
    fn joins_that_do_not_fit_the_tables_are_refused_before_they_run() {
        let device = DeviceId::new();
        let asker = Asker { name: "device", device, exact: true, top_k_max: 8 };
        let extents = Extents::new(&layout(device), asker).unwrap();
        let place = |lane, length, pages: &[u32], blocks: &[Vec<u32>], budgets: &[u32]| {
            let join = Join { lane: Lane(lane), length, pages, blocks, budgets };
            extents
                .check(&PoolOp::Join(join))
                .map_or_else(|error| error.place().to_owned(), |()| String::new())
        };
        let one = [vec![0], vec![1]];
        assert_eq!(place(1, 64, &[0, 3], &one, &[64, 64]), "");
        assert_eq!(place(2, 64, &[0], &one, &[64, 64]), "lane");
        assert_eq!(place(1, 65, &[0], &one, &[64, 64]), "length of a join");
        assert_eq!(place(1, 64, &[4], &one, &[64, 64]), "host page");
        assert_eq!(place(1, 64, &[0; 5], &one, &[64, 64]), "pages of a lane");
        assert_eq!(place(1, 64, &[0], &one[..1], &[64, 64]), "layers of a join");
        assert_eq!(place(1, 64, &[0], &one, &[64, 0]), "budget of a join");
        assert_eq!(place(1, 64, &[0], &one, &[64, 65]), "budget of a join");
        assert_eq!(place(1, 64, &[0], &[vec![0], vec![2]], &[64, 64]), "block of a join");
        let rows = QueryRange { first: 0, count: 1 };
        let range = StepRange { micro_batch: MicroBatch(0), layer: Layer(1), first: 1, count: 1, rows };
        extents.check(&PoolOp::Gather { range, wave: 0 }).unwrap();
        assert!(extents.check(&PoolOp::Gather { range, wave: 1 }).is_err());
        assert!(extents.check(&PoolOp::Scatter(StepRange { count: 2, ..range })).is_err());
    }

    #[test]
    fn lists_of_newest_rows_need_exactly_the_room_of_all_groups() {
        let (device, other) = (DeviceId::new(), DeviceId::new());
        let asker = Asker { name: "device", device, exact: true, top_k_max: 8 };
        let extents = Extents::new(&layout(device), asker).unwrap();
        let check = |lane, positions| extents.check(&PoolOp::Newest(Newest { lane: Lane(lane), positions }));
        check(1, device.slice(4096, 64)).unwrap();
        for (lane, positions, place) in [
            (2, device.slice(4096, 64), "lane"),
            (1, device.slice(4096, 60), "bytes of a slice"),
            (1, device.slice(4096, 128), "bytes of a slice"),
            (1, device.slice(4098, 64), "address of a slice"),
            (1, device.slice(0, 64), "address of a slice"),
        ] {
            let error = check(lane, positions).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, place));
        }
        check(1, other.slice(4096, 64)).unwrap_err();
    }

    #[test]
    fn resizes_that_do_not_fit_the_tables_are_refused_before_they_run() {
        let device = DeviceId::new();
        let asker = Asker { name: "device", device, exact: true, top_k_max: 8 };
        let extents = Extents::new(&layout(device), asker).unwrap();
        let place = |lane, blocks: &[Vec<u32>], budgets: &[u32]| {
            let resize = Resize { lane: Lane(lane), blocks, budgets };
            extents
                .check(&PoolOp::Resize(resize))
                .map_or_else(|error| error.place().to_owned(), |()| String::new())
        };
        // Blocks beyond those of the budget are not read, whatever they say.
        let more = [vec![0, u32::MAX], vec![1]];
        assert_eq!(place(1, &more, &[64, 1]), "");
        assert_eq!(place(2, &more, &[64, 64]), "lane");
        assert_eq!(place(1, &more[..1], &[64, 64]), "layers of a resize");
        assert_eq!(place(1, &more, &[64]), "layers of a resize");
        assert_eq!(place(1, &more, &[64, 0]), "budget of a resize");
        assert_eq!(place(1, &more, &[64, 65]), "budget of a resize");
        assert_eq!(place(1, &more, &[65, 64]), "budget of a resize");
        assert_eq!(place(1, &[vec![0], vec![2]], &[64, 64]), "block of a resize");
    }
}
