//! The memory that the operations on one cache's pools touch, as ranges for the order.

use std::collections::BTreeMap;

use crate::check::order::{Access, Range, Space};
use crate::device::{Backing, DeviceId, Mapped, PoolLayout, PoolOp, Resize, ResolveOutput, Slice, StepRange};
use crate::error::{Error, Kind, Result};
use crate::geometry::Geometries;
use crate::ids::{Lane, MicroBatch};

/// The positions of a lane's committed and landed rows, which a scatter reads.
const HEAD: &str = "head of pools, lane";
const TABLES: &str = "tables of pools, lane";
pub(super) const RESIDENT: &str = "resident slots of pools, lane";
pub(super) const FETCHED: &str = "slots being fetched of pools, lane";
pub(super) const SCRATCH: &str = "scratch slots of pools, lane";
const LANDING: &str = "landing slots of pools, lane";
const STORED: &str = "rows of the total pool of pools, lane";
const ADDED: &str = "rows added to the total pool of pools, lane";
const PAGE_TABLE: &str = "page table of pools, lane";
const PAGES: &str = "pages of the total pool of pools";
const SLOT_BLOCKS: &str = "slot blocks of pools, layer";
/// The lists that the host keeps for a join, a truncation or a resize until it runs.
pub(super) const STAGED: &str = "staged arguments of pools, lane";
const DESCRIPTOR: &str = "step descriptor of pools, micro-batch";
const COUNTS: &str = "counts of pools, micro-batch";
const LISTS: &str = "lists of fetches of pools, micro-batch";
const BYTES: &str = "bytes at addresses of";
const BACKED: &str = "bytes of backing";
const MAPPED: &str = "what is mapped at addresses";

/// One cache's sizes, and the present state of its steps and lanes.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) id: u32,
    geometry: Geometries,
    rows: Vec<Slice>,
    pub(super) layers: u64,
    query_rows: u64,
    /// For each index group, the index lists of split attention.
    lists: Vec<u64>,
    pub(super) batch: u32,
    /// For each micro-batch, the lanes of its batch rows.
    steps: Vec<Vec<u32>>,
    /// For each lane, its pages.
    pages: Vec<Vec<u32>>,
    /// For each lane and index group, its slot blocks.
    slot_blocks: Vec<Vec<Vec<u32>>>,
    /// Whether the engine declares its writes to landing slots.
    declares: bool,
    /// For each lane, layer and query row, the state of its landing slot.
    landing: BTreeMap<[u64; 3], Landing>,
}

/// The state of a landing slot since its lane's step began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Landing {
    Written,
    Stored,
}

/// An operation's read or write of a slice, for [`Watch::engine`](crate::check::watch::Watch::engine).
pub fn bytes(slice: &Slice, write: bool) -> Access {
    let (from, to) = (slice.address(), slice.address().saturating_add(slice.bytes()));
    let access = if write { Access::write } else { Access::read };
    access(Space::new(BYTES, [slice.device().number(), 0]), from, to)
}

/// A stretch of addresses that maps a backing.
#[derive(Debug)]
struct Piece {
    addresses: Range,
    /// The mapping itself, by the same addresses.
    mapping: Space,
    backing: Space,
    offset: u64,
}

/// The backings of mapped ranges, by the first address. Two ranges over one backing are the same bytes.
#[derive(Debug, Default)]
pub(super) struct Mappings(BTreeMap<u64, Piece>);

/// The bytes of a backing; `None` for one of another device.
pub(super) fn backed(device: DeviceId, backing: Backing) -> Option<Space> {
    Some(Space::new(BACKED, [backing.of(device).ok()? as u32, 0]))
}

/// A remap's write of what addresses map. An access to these addresses reads it.
pub(super) fn mapping(part: &Slice) -> Access {
    let to = part.address().saturating_add(part.bytes());
    Access::write(Space::new(MAPPED, [part.device().number(), 0]), part.address(), to)
}

impl Mappings {
    /// Notes that a device maps other pieces at the addresses of `part`, which begins and ends where pieces do.
    pub(super) fn replace(&mut self, part: &Slice, pieces: &[Mapped]) {
        let end = part.address().saturating_add(part.bytes());
        self.0.retain(|from, _| !(part.address()..end).contains(from));
        self.add(part, pieces);
    }

    /// Adds a range that a device has mapped from `pieces`.
    pub(super) fn add(&mut self, range: &Slice, pieces: &[Mapped]) {
        let mut from = range.address();
        for Mapped { backing, offset, bytes } in pieces {
            // The device has mapped it, so the backing is the device's.
            let Some(backing) = backed(range.device(), *backing) else { continue };
            let to = from.saturating_add(*bytes);
            let addresses = Range { space: Space::new(BYTES, [range.device().number(), 0]), from, to };
            let mapping = Space::new(MAPPED, [range.device().number(), 0]);
            self.0.insert(from, Piece { addresses, mapping, backing, offset: *offset });
            from = to;
        }
    }

    /// Where the bytes of a range are, part by part in the range's order, without gaps: behind mapped addresses in
    /// their backing, and with them the mapping, which an access reads.
    pub(super) fn places(&self, range: Range) -> Vec<(Range, Option<Range>)> {
        let Range { space, from, to } = range;
        let (mut places, mut at) = (Vec::new(), from);
        let first = self.0.range(..=from).next_back();
        let others = self.0.range(from..to.max(from)).filter(|(start, _)| **start > from);
        for (_, piece) in first.into_iter().chain(others) {
            let Piece { addresses, mapping, backing, offset } = piece;
            let (start, end) = (at.max(addresses.from), to.min(addresses.to));
            if space != addresses.space || start >= end {
                continue;
            }
            let moved = |address: u64| address - addresses.from + offset;
            let backed = Range { space: *backing, from: moved(start), to: moved(end) };
            places.push((Range { space, from: at, to: start }, None));
            places.push((backed, Some(Range { space: *mapping, from: start, to: end })));
            at = end;
        }
        places.push((Range { space, from: at, to }, None));
        places.retain(|(place, _)| place.from < place.to);
        places
    }

    /// The accesses, with addresses of a range replaced by bytes of its backings. What bytes hold belongs to these.
    pub(super) fn behind(&self, accesses: Vec<Access>) -> Vec<Access> {
        if self.0.is_empty() {
            return accesses;
        }
        let mut list = Vec::with_capacity(accesses.len());
        for access in accesses {
            for (range, mapping) in self.places(access.range) {
                list.push(Access { range, ..access });
                list.extend(mapping.map(|Range { space, from, to }| Access::read(space, from, to)));
            }
        }
        list
    }
}

fn misplaced(place: &'static str, [lane, layer, query]: [u64; 3]) -> Error {
    let hint = "write the landing slots after the step's begin and before the scatter";
    let error = Error::new(Kind::InvalidState, "scatter").at(place).hint(hint);
    error.with("lane", lane).with("layer", layer).with("query row", query)
}

impl Watched {
    pub(super) fn new(layout: &PoolLayout) -> Watched {
        let lanes = layout.tables.first().map_or(0, |tables| tables.lanes);
        Watched {
            id: 0,
            geometry: layout.geometry.clone(),
            rows: layout.rows.clone(),
            layers: layout.slabs.len() as u64,
            query_rows: layout.tables.first().map_or(0, |tables| tables.query_rows).into(),
            lists: layout.tables.iter().map(|tables| 1 + u64::from(tables.waves)).collect(),
            batch: layout.batch,
            steps: vec![Vec::new(); layout.micro_batches as usize],
            pages: vec![Vec::new(); lanes as usize],
            slot_blocks: vec![Vec::new(); lanes as usize],
            declares: false,
            landing: BTreeMap::new(),
        }
    }

    /// The accesses of an operation. For a begin, `lanes` are the step's lanes.
    pub(super) fn touched(&self, op: &PoolOp<'_>, lanes: &[u32]) -> Vec<Access> {
        match op {
            PoolOp::Join(join) => {
                let mut list = self.lane_and_pages(join.lane.0, join.pages);
                self.slot_blocks(join.blocks, true, &mut list);
                list
            }
            PoolOp::Truncate(truncate) => self.lane_and_pages(truncate.lane.0, truncate.pages),
            PoolOp::Resize(resize) => self.resizing(resize),
            PoolOp::Leave(lane) => self.leaving(*lane),
            PoolOp::Warm(warm) => {
                let mut list = Vec::new();
                self.lane(warm.lane.0, &mut list);
                list.extend(warm.selections.iter().map(|selections| bytes(selections, false)));
                list
            }
            PoolOp::Newest(newest) => {
                let tables = Access::read(self.space(TABLES, newest.lane.0), 0, self.layers);
                vec![tables, bytes(&newest.positions, true)]
            }
            PoolOp::WarmGather(range) => {
                let read = [(TABLES, self.layers), (STORED, self.layers), (PAGE_TABLE, 1)];
                let space = |name| self.space(name, range.lane.0);
                let mut list: Vec<Access> =
                    read.iter().map(|(name, to)| Access::read(space(name), 0, *to)).collect();
                list.push(Access::write(space(RESIDENT), 0, self.layers));
                list
            }
            PoolOp::Begin(begin) => {
                let mut list = vec![bytes(&begin.descriptor, false)];
                list.extend(begin.accepted.iter().map(|accepted| bytes(accepted, false)));
                let written = [DESCRIPTOR, COUNTS].map(|name| self.space(name, begin.micro_batch.0));
                list.extend(written.map(|space| Access::write(space, 0, 1)));
                lanes.iter().for_each(|lane| self.lane(*lane, &mut list));
                list
            }
            PoolOp::Resolve { range, selection, output } => {
                let decided = [(HEAD, false), (TABLES, true), (RESIDENT, true), (FETCHED, true)];
                let mut list = self.range(range, &decided);
                list.extend([bytes(selection, false), bytes(&output.slots, true)]);
                list.extend([self.descriptor(range), self.counts(range)]);
                let places = 0..self.geometry.largest_group();
                list.extend(places.map(|place| self.fetches(range, place)));
                self.split_indices(range, output, (0, u64::MAX), true, &mut list);
                list
            }
            PoolOp::Gather { range, wave } => {
                let touched = [(STORED, false), (PAGE_TABLE, false), (SCRATCH, true), (FETCHED, true)];
                // Waves after the first fetch only to scratch slots.
                let mut list = self.range(range, if *wave == 0 { &touched } else { &touched[..3] });
                list.extend([self.descriptor(range), self.counts(range)]);
                let layer = range.layer.index();
                list.push(self.fetches(range, (layer - self.geometry.first_of(layer)) as u32));
                list
            }
            PoolOp::Scatter(range) => {
                let mut list = self.range(range, &[(HEAD, false), (PAGE_TABLE, false), (ADDED, true)]);
                self.landing(range, true, false, &mut list);
                list.push(self.descriptor(range));
                list
            }
            PoolOp::Report { micro_batch, slot } => {
                let space = |name| self.space(name, micro_batch.0);
                vec![
                    Access::read(space(DESCRIPTOR), 0, 1),
                    Access::read(space(LISTS), 0, self.batch_rows(self.geometry.largest_group())),
                    Access::write(space(COUNTS), 0, 1),
                    bytes(slot, true),
                ]
            }
        }
    }

    /// Notes an enqueued operation: what its lane holds from now on, and the lanes of a step that begins.
    pub(super) fn enqueued(&mut self, op: &PoolOp<'_>, lanes: Vec<u32>) {
        match op {
            PoolOp::Join(join) => self.holds(join.lane, join.pages, Some(join.blocks)),
            PoolOp::Truncate(truncate) => self.holds(truncate.lane, truncate.pages, None),
            PoolOp::Resize(resize) => self.holds_slots(resize.lane, resize.needed()),
            PoolOp::Leave(lane) => self.holds(*lane, &[], Some(&[])),
            PoolOp::Begin(begin) => self.begins(begin.micro_batch, lanes),
            _ => {}
        }
    }

    fn holds(&mut self, lane: Lane, pages: &[u32], blocks: Option<&[Vec<u32>]>) {
        if let Some(own) = self.pages.get_mut(lane.index()) {
            own.clear();
            own.extend_from_slice(pages);
        }
        if let Some(blocks) = blocks {
            self.holds_slots(lane, blocks.iter().map(Vec::as_slice));
        }
    }

    fn holds_slots<'a>(&mut self, lane: Lane, blocks: impl Iterator<Item = &'a [u32]>) {
        if let Some(own) = self.slot_blocks.get_mut(lane.index()) {
            own.clear();
            own.extend(blocks.map(<[u32]>::to_vec));
        }
    }

    /// Notes that a step of these lanes begins.
    fn begins(&mut self, micro: MicroBatch, lanes: Vec<u32>) {
        self.landing.retain(|place, _| !lanes.iter().any(|lane| u64::from(*lane) == place[0]));
        if let Some(step) = self.steps.get_mut(micro.index()) {
            *step = lanes;
        }
    }

    /// The landing slots of `range`, by lane, layer and query row.
    fn places(&self, range: &StepRange) -> Vec<[u64; 3]> {
        let rows = range.rows.first..range.rows.first + range.rows.count;
        let places = |lane| rows.clone().map(move |query| [lane, range.layer.0, query].map(u64::from));
        self.lanes(range).flat_map(places).collect()
    }

    /// Notes that the engine writes the landing slots of `range`.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] if the scatter that stores them is already enqueued.
    pub(super) fn lands(&mut self, range: &StepRange) -> Result<()> {
        self.declares = true;
        let mut stored = None;
        for place in self.places(range) {
            let before = self.landing.insert(place, Landing::Written);
            stored = stored.or_else(|| before.filter(|before| *before == Landing::Stored).map(|_| place));
        }
        stored.map_or(Ok(()), |place| {
            Err(misplaced("a landing slot is written after the scatter that stores it", place))
        })
    }

    /// Notes that a scatter of `range` is enqueued.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] if the engine declares its writes and has not written a landing slot since its step
    /// began: the scatter would store an earlier step's data.
    pub(super) fn stores(&mut self, range: &StepRange) -> Result<()> {
        let places = self.places(range);
        let unwritten =
            places.iter().find(|place| self.declares && !self.landing.contains_key(*place)).copied();
        self.landing.extend(places.into_iter().map(|place| (place, Landing::Stored)));
        unwritten.map_or(Ok(()), |place| {
            Err(misplaced("a scatter comes before the write of its landing slots", place))
        })
    }

    pub(super) fn space(&self, name: &'static str, number: u32) -> Space {
        Space::new(name, [self.id, number])
    }

    /// Everything of a lane except its page table.
    fn lane(&self, lane: u32, list: &mut Vec<Access>) {
        for name in [HEAD, TABLES, RESIDENT, FETCHED, STORED, ADDED] {
            list.push(Access::write(self.space(name, lane), 0, self.layers));
        }
        list.push(Access::write(self.space(LANDING, lane), 0, self.layers * self.query_rows));
        list.push(Access::write(self.space(SCRATCH, lane), 0, self.geometry.largest_group().into()));
    }

    /// Everything of a lane, the pages that it had, and those that it has from now on.
    fn lane_and_pages(&self, lane: u32, pages: &[u32]) -> Vec<Access> {
        let mut list = Vec::with_capacity(pages.len() + 9);
        self.lane(lane, &mut list);
        list.push(Access::write(self.space(PAGE_TABLE, lane), 0, 1));
        // The next writer of a page that the lane frees must come after this.
        for page in self.pages.get(lane as usize).into_iter().flatten().chain(pages) {
            let first = u64::from(*page) * self.layers;
            list.push(Access::read(self.space(PAGES, 0), first, first + self.layers));
        }
        list
    }

    /// Slot blocks by index group, as a lane takes them (`write`) or frees them.
    fn slot_blocks(&self, blocks: &[Vec<u32>], write: bool, list: &mut Vec<Access>) {
        for (group, blocks) in blocks.iter().enumerate() {
            self.slot_blocks_of(group, blocks, write, list);
        }
    }

    fn slot_blocks_of(&self, group: usize, blocks: &[u32], write: bool, list: &mut Vec<Access>) {
        let layer = self.geometry.members(group).start as u32;
        let access = if write { Access::write } else { Access::read };
        let places = blocks.iter().map(|block| u64::from(*block));
        list.extend(places.map(|at| access(self.space(SLOT_BLOCKS, layer), at, at + 1)));
    }

    /// A lane's tables and resident rows, the slot blocks that come, and those that go. Its length, landing and scratch
    /// slots and pages stay as they are.
    fn resizing(&self, resize: &Resize<'_>) -> Vec<Access> {
        let lane = resize.lane.0;
        let mut list = vec![Access::read(self.space(HEAD, lane), 0, self.layers)];
        for name in [TABLES, RESIDENT, FETCHED] {
            list.push(Access::write(self.space(name, lane), 0, self.layers));
        }
        let own = self.slot_blocks.get(resize.lane.index()).map_or(&[][..], Vec::as_slice);
        for (group, (own, blocks)) in own.iter().zip(resize.needed()).enumerate() {
            let kept = own.len().min(blocks.len());
            for (blocks, write) in [(&own[kept..], false), (&blocks[kept..], true)] {
                self.slot_blocks_of(group, blocks, write, &mut list);
            }
        }
        list
    }

    /// Everything of a lane that leaves.
    fn leaving(&self, lane: Lane) -> Vec<Access> {
        let mut list = self.lane_and_pages(lane.0, &[]);
        if let Some(blocks) = self.slot_blocks.get(lane.index()) {
            self.slot_blocks(blocks, false, &mut list);
        }
        list
    }

    /// The accesses of `range` to each of its lanes. A group's layers have one head and one table, those of its first
    /// layer; a resolve decides which slots all of them read and fetch.
    pub(super) fn range(&self, range: &StepRange, names: &[(&'static str, bool)]) -> Vec<Access> {
        let mut list = Vec::new();
        let layer = u64::from(range.layer.0);
        let members = self.geometry.members(self.geometry.group_of(range.layer.index()));
        let (first, end) = (members.start as u64, members.end as u64);
        let decides = names.contains(&(TABLES, true));
        for lane in self.lanes(range) {
            for (name, write) in names {
                let access = if *write { Access::write } else { Access::read };
                let (from, to) = match *name {
                    PAGE_TABLE => (0, 1),
                    // Each place in a group has scratch slots of its own.
                    SCRATCH => (layer - first, layer - first + 1),
                    HEAD | TABLES => (first, first + 1),
                    RESIDENT | FETCHED if decides => (first, end),
                    _ => (layer, layer + 1),
                };
                list.push(access(self.space(name, lane), from, to));
            }
        }
        list
    }

    fn lanes(&self, range: &StepRange) -> impl Iterator<Item = u32> + '_ {
        let lanes = self.steps.get(range.micro_batch.index()).map_or(&[][..], Vec::as_slice);
        lanes.iter().skip(range.first as usize).take(range.count as usize).copied()
    }

    /// The landing slots of the query rows of `range`, from its first query row on or from the step's first.
    pub(super) fn landing(&self, range: &StepRange, from_first: bool, write: bool, list: &mut Vec<Access>) {
        let start = u64::from(range.layer.0) * self.query_rows;
        let first = if from_first { u64::from(range.rows.first) } else { 0 };
        let end = u64::from(range.rows.first) + u64::from(range.rows.count);
        for lane in self.lanes(range) {
            let access = if write { Access::write } else { Access::read };
            list.push(access(self.space(LANDING, lane), start + first, start + end));
        }
    }

    /// The step descriptor, from which an operation reads its lanes.
    fn descriptor(&self, range: &StepRange) -> Access {
        Access::read(self.space(DESCRIPTOR, range.micro_batch.0), 0, 1)
    }

    /// The lists of fetches of `range`, as the gather of the layer at `place` in a group uses them. All places read one
    /// list, and count their gathers apart. A resolve writes it for all of them.
    fn fetches(&self, range: &StepRange, place: u32) -> Access {
        let first = self.batch_rows(place) + u64::from(range.first);
        Access::write(self.space(LISTS, range.micro_batch.0), first, first + u64::from(range.count))
    }

    /// The batch rows of this many places of a group.
    fn batch_rows(&self, places: u32) -> u64 {
        u64::from(places) * u64::from(self.batch)
    }

    /// Counters of a step are added to, in any order.
    fn counts(&self, range: &StepRange) -> Access {
        Access::read(self.space(COUNTS, range.micro_batch.0), 0, 1)
    }

    /// The batch rows of `range` in index lists `from..to`, with their counts.
    pub(super) fn split_indices(
        &self,
        range: &StepRange,
        output: &ResolveOutput,
        lists: (u64, u64),
        write: bool,
        list: &mut Vec<Access>,
    ) {
        let Some(split_indices) = &output.split_indices else { return };
        let all = self.lists.get(self.geometry.group_of(range.layer.index())).copied().unwrap_or(1);
        for slice in [&split_indices.lists, &split_indices.counts] {
            let words = match slice == &split_indices.lists {
                true => u64::from(self.geometry.shape().top_k),
                false => 1,
            };
            let row = 4 * words * u64::from(range.rows.count);
            let one = row * u64::from(split_indices.batch);
            for index in lists.0..lists.1.min(all) {
                let at = index * one + u64::from(range.first) * row;
                let rows = slice.part(at, u64::from(range.count) * row);
                list.extend(rows.iter().map(|rows| bytes(rows, write)));
            }
        }
    }

    /// The pages of one layer's rows that contain a slice; `None` for other memory.
    fn pages_of(&self, slice: &Slice) -> Option<(u64, std::ops::RangeInclusive<u64>)> {
        let inside = |rows: &Slice| {
            let offset = slice.address().checked_sub(rows.address())?;
            (slice.bytes() > 0 && offset + slice.bytes() <= rows.bytes()).then_some(offset)
        };
        let found = self.rows.iter().enumerate().find_map(|(layer, rows)| Some((layer, inside(rows)?)));
        let (layer, offset) = found?;
        let size = self.geometry.of(layer).host_page_bytes().max(1);
        Some((layer as u64, offset / size..=(offset + slice.bytes() - 1) / size))
    }

    /// The accesses of a copy to the total pool.
    pub(super) fn copied(&self, slice: &Slice, write: bool, list: &mut Vec<Access>) {
        let access = if write { Access::write } else { Access::read };
        let Some((layer, pages)) = self.pages_of(slice) else { return };
        for page in pages {
            let place = page * self.layers + layer;
            list.push(access(self.space(PAGES, 0), place, place + 1));
            // Shared pages are full: no step adds to them.
            let mut lanes =
                (0..).zip(&self.pages).filter(|(_, own)| own.iter().any(|p| u64::from(*p) == page));
            if let (Some((lane, _)), None) = (lanes.next(), lanes.next()) {
                let both = [STORED, ADDED].map(|name| access(self.space(name, lane), layer, layer + 1));
                list.extend(both);
            }
        }
    }
}
