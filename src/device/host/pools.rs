//! The operations of a step on host memory: the LRU rule from `residency`, the row copies by `copy`.
//!
//! **Index groups.** The layers of a group have one table. Its operations decide once, and copy rows in the slab of
//! each of these layers.
//!
//! **Locks.** Decisions on a table run under its lock. A gather takes only its batch rows' lists,
//! so that one half's gather runs alongside the other half's resolve. The copies of a commit, a scatter and a warm-up
//! are short or rare, and run under their table's lock. Page tables have no lock (`pages`).

use std::ops::Range;

use crate::device::checks::{Asker, Extents};
use crate::device::descriptor::{
    self, ACCEPTED_ON_DEVICE, Cause, Entry, LayerCount, NOTHING_WRONG, Report, Sticky,
};
use crate::device::host::copy::{AHEAD, Copier, PAIRS, Pair, ask};
use crate::device::host::errors::{NAME, bad};
use crate::device::host::fetches::List;
use crate::device::host::marks::{Mark, Marks};
use crate::device::host::pages::PageTables;
use crate::device::host::vector::Avx512;
use crate::device::host::words::{Word, Words};
use crate::device::op::Staged;
use crate::device::{
    DeviceId, Expected, Newest, PoolLayout, PoolOp, Slice, StepRange, Truncate, Warm, WarmGather,
};
use crate::error::Result;
use crate::fallible::{filled, vector};
use crate::geometry::{Geometry, LINE};
use crate::ids::{Lane, MicroBatch};
use crate::residency::{Divider, Fetch, LayerTables, Moved, Portable, Scan, Selected, TableShape, Workspace};
use crate::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// The tables and lists of one cache.
#[derive(Debug)]
pub(super) struct HostPools {
    pub(super) layout: PoolLayout,
    extents: Extents,
    /// For each index group.
    pub(super) tables: Vec<Mutex<LayerTables>>,
    lanes: Vec<LaneState>,
    pages: PageTables,
    micro: Vec<MicroState>,
    pub(super) room: Mutex<Room>,
    /// Rows that resizes have moved since the last report.
    pub(super) moved: AtomicU32,
    pub(super) copier: Copier,
    avx512: Option<Avx512>,
}

/// A lane's state, and the lists that the host staged for the next operation on it. The host leaves the lists
/// unchanged until that operation has run.
#[derive(Debug)]
pub(super) struct LaneState {
    trust: Mutex<Trust>,
    pub(super) staged: Mutex<Staged>,
}

/// Whether a lane's steps may continue. A failed step fails the lane's later steps, until the sequence is truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Trust {
    #[default]
    Sound,
    /// A step failed; the resident rows are correct.
    Failed,
    /// The tables list rows that were never gathered; a truncation empties the lane.
    Bytes,
}

/// The state that a micro-batch's operations share.
#[derive(Debug)]
pub(super) struct MicroState {
    pub(super) record: Mutex<Record>,
    /// The step's number.
    pub(super) step: AtomicU64,
    pub(super) rows: AtomicU32,
    /// For each batch row, the rows that its last resolve missed.
    pub(super) lists: Vec<Mutex<List>>,
}

#[derive(Debug)]
pub(super) struct Record {
    /// The step descriptor on the device.
    pub(super) descriptor: Vec<u32>,
    pub(super) report: Report,
    /// Room to compose the report in.
    words: Vec<u32>,
    /// The slots of a batch row's selection in the layer under work.
    pub(super) slots: Vec<i32>,
    /// The smallest of the step's sticky words.
    pub(super) sticky: u64,
    /// The work done for each query row.
    pub(super) marks: Marks,
    /// For each batch row, whether an earlier step of its lane had failed when this step began.
    failed: Vec<bool>,
    /// For each lane, whether the step names it.
    named: Vec<bool>,
    pub(super) work: Workspace,
    pub(super) divider: Divider,
}

/// The landed rows that a lane accepts, and the rows that it lands in this step.
#[derive(Clone, Copy, Debug)]
struct Accept {
    lane: u32,
    rows: u32,
    next: u32,
}

/// Working memory of warm-ups, lists of newest rows and resizes, which run outside any micro-batch.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) work: Workspace,
    slots: Vec<i32>,
    fetches: Vec<Fetch>,
}

/// One item for each number below `count`, or the first error.
fn collected<T>(count: u32, make: impl FnMut(u32) -> Result<T>) -> Result<Vec<T>> {
    let mut all = vector(count as usize, NAME, "attach")?;
    for one in (0..count).map(make) {
        all.push(one?);
    }
    Ok(all)
}

/// Rows to copy, in portions that fit the stack.
pub(super) struct Copies<'a> {
    geometry: &'a Geometry,
    copier: Copier,
    pairs: [[Pair; PAIRS]; 2],
    count: usize,
    /// Rows go to the total pool, whose padded rows may be written whole.
    down: bool,
}

impl<'a> Copies<'a> {
    /// Copies of rows of one format.
    pub(super) fn new(geometry: &'a Geometry, copier: Copier) -> Self {
        Copies { geometry, copier, pairs: [[Pair { from: 0, to: 0 }; PAIRS]; 2], count: 0, down: false }
    }

    /// Adds one row's runs.
    pub(super) fn add(&mut self, runs: [Pair; 2]) {
        self.pairs[0][self.count] = runs[0];
        self.pairs[1][self.count] = runs[1];
        self.count += 1;
        if self.count == PAIRS {
            // Keep the last rows: they are prefetched now, and copied after more rows have been listed.
            self.copy(PAIRS - AHEAD);
        }
    }

    /// Copies the remaining rows.
    pub(super) fn flush(&mut self) {
        self.copy(self.count);
    }

    /// Copies the first `rows` rows.
    fn copy(&mut self, rows: usize) {
        let runs = self.geometry.shape().runs;
        let stride = self.geometry.host_stride();
        let lines = self.down && runs[1] == 0 && stride.is_multiple_of(LINE) && stride - runs[0] < LINE;
        for (pairs, bytes) in self.pairs.iter_mut().zip(runs) {
            if bytes > 0 {
                // SAFETY: every pair was made by `HostPools` from a slot inside its layer's slab and a row
                // inside its layer's rows, both checked against their slices; run lengths are the
                // geometry's, multiples of 4; a row of the total pool has its whole stride to itself.
                unsafe { self.copier.copy(&pairs[..self.count], rows, bytes as usize, lines) };
                pairs.copy_within(rows..self.count, 0);
            }
        }
        self.count -= rows;
    }
}

/// Rows that move from slot to slot in every layer of an index group. The first layer's copies begin while the rule
/// still finds the next ones; those of the other layers wait for a portion.
pub(super) struct Moves<'a> {
    pools: &'a HostPools,
    members: Range<usize>,
    first: Copies<'a>,
    portion: [Moved; PAIRS],
    count: usize,
}

impl<'a> Moves<'a> {
    pub(super) fn new(pools: &'a HostPools) -> Self {
        let (first, nothing) = (Copies::new(pools.format(0), pools.copier), Moved { from: 0, to: 0 });
        Moves { pools, members: 0..0, first, portion: [nothing; PAIRS], count: 0 }
    }

    /// Begins the moves of a group, after those of the last one.
    pub(super) fn begin(&mut self, group: usize) {
        self.flush();
        self.members = self.pools.layout.geometry.members(group);
        self.first.geometry = self.pools.format(self.members.start);
    }

    pub(super) fn add(&mut self, moved: Moved) {
        self.first.add(self.pools.slot_pairs(self.members.start, moved));
        if self.members.len() > 1 {
            self.portion[self.count] = moved;
            self.count += 1;
            if self.count == PAIRS {
                self.follow();
            }
        }
    }

    /// Copies the remaining rows.
    pub(super) fn flush(&mut self) {
        self.first.flush();
        self.follow();
    }

    /// Copies the portion in the layers after the first.
    fn follow(&mut self) {
        for layer in self.members.clone().skip(1).filter(|_| self.count > 0) {
            let mut copies = Copies::new(self.pools.format(layer), self.pools.copier);
            let pairs = self.portion[..self.count].iter().map(|moved| self.pools.slot_pairs(layer, *moved));
            pairs.for_each(|runs| copies.add(runs));
            copies.flush();
        }
        self.count = 0;
    }
}

impl Drop for Copies<'_> {
    fn drop(&mut self) {
        if self.down {
            self.copier.settle();
        }
    }
}

impl HostPools {
    pub(super) fn new(layout: PoolLayout, device: DeviceId, copier: Copier, portable: bool) -> Result<Self> {
        let asker = Asker { name: NAME, device, exact: true, top_k_max: u32::MAX };
        let extents = Extents::new(&layout, asker)?;
        let g = &layout.geometry;
        let groups = g.groups().len();
        let shape = layout.tables.first().copied().ok_or_else(|| bad("layers", 0_u32))?;
        let selected = shape.query_rows.saturating_mul(g.shape().top_k);
        let largest = layout.tables.iter().max_by_key(|t| t.budget_blocks).copied().unwrap_or(shape);
        let work = || Workspace::new(&largest, selected);
        let nothing = Fetch { position: 0, slot: 0 };
        let list = |_| List::with_room(selected as usize).map(Mutex::new);
        let slots = layout.tables.iter().map(TableShape::slots).max().unwrap_or(0);
        let micro = |_| {
            Ok(MicroState {
                step: AtomicU64::new(0),
                rows: AtomicU32::new(0),
                record: Mutex::new(Record {
                    descriptor: vec![0; descriptor::step::words(layout.batch)],
                    report: Report::with_room(g.layers(), layout.batch),
                    words: vec![0; Report::words(g.layers(), layout.batch)],
                    slots: filled(selected as usize, -1, NAME, "a batch row's slots")?,
                    sticky: NOTHING_WRONG,
                    marks: Marks::new(g.layers(), layout.batch, shape.query_rows)?,
                    failed: Vec::with_capacity(layout.batch as usize),
                    named: filled(shape.lanes as usize, false, NAME, "lanes of a step")?,
                    work: work()?,
                    divider: Divider::new(slots)?,
                }),
                lists: collected(layout.batch, list)?,
            })
        };
        let (blocks, pages) = (largest.lane_blocks() as usize, layout.lane_pages as usize);
        let lane = |_| {
            Ok(LaneState {
                trust: Mutex::new(Trust::Sound),
                staged: Mutex::new(Staged::new(groups, blocks, pages, NAME)?),
            })
        };
        let k = g.shape().top_k as usize;
        Ok(HostPools {
            tables: layout
                .tables
                .iter()
                .map(|t| LayerTables::new(*t).map(Mutex::new))
                .collect::<Result<_>>()?,
            lanes: collected(shape.lanes, lane)?,
            pages: PageTables::new(shape.lanes, layout.lane_pages)?,
            micro: collected(layout.micro_batches, micro)?,
            room: Mutex::new(Room {
                work: work()?,
                slots: filled(k, 0, NAME, "room of warm-ups")?,
                fetches: filled(k, nothing, NAME, "room of warm-ups")?,
            }),
            moved: AtomicU32::new(0),
            extents,
            layout,
            copier,
            avx512: if portable { None } else { Avx512::detect() },
        })
    }

    /// Checks an operation, and copies the lists that it borrows.
    pub(super) fn stage(&self, op: &PoolOp<'_>) -> Result<()> {
        self.extents.check(op)?;
        if let Some(lane) = op.staged_lane() {
            self.lane(lane)?.staged.lock().take(op);
        }
        Ok(())
    }

    pub(super) fn lane(&self, lane: Lane) -> Result<&LaneState> {
        self.lanes.get(lane.index()).ok_or_else(|| bad("lane", lane.0))
    }

    pub(super) fn micro(&self, micro: MicroBatch) -> Result<&MicroState> {
        self.micro.get(micro.index()).ok_or_else(|| bad("micro-batch", micro.0))
    }

    /// Runs one operation in its stream's order.
    pub(super) fn run(&self, op: &PoolOp<'_>) -> Result<()> {
        match self.avx512 {
            Some(scan) => self.run_with(&scan, op),
            None => self.run_with(&Portable, op),
        }
    }

    fn run_with<S: Scan>(&self, scan: &S, op: &PoolOp<'_>) -> Result<()> {
        match *op {
            PoolOp::Join(join) => self.join(join.lane, join.length),
            PoolOp::Truncate(truncate) => self.truncate(scan, &truncate),
            PoolOp::Resize(resize) => self.resize(scan, resize.lane),
            PoolOp::Leave(lane) => {
                self.tables.iter().for_each(|tables| tables.lock().leave(lane.0));
                Ok(())
            }
            PoolOp::Warm(warm) => self.warm(scan, &warm),
            PoolOp::Newest(newest) => self.newest(scan, &newest),
            PoolOp::WarmGather(range) => self.warm_gather(&range),
            PoolOp::Begin(begin) => {
                self.load(begin.micro_batch, begin.descriptor)?;
                self.commit(scan, begin.micro_batch, begin.accepted)
            }
            PoolOp::Resolve { range, selection, output } => self.resolve(scan, &range, selection, output),
            PoolOp::Gather { range, wave } => self.gather(&range, wave),
            PoolOp::Scatter(range) => self.scatter(&range),
            PoolOp::Report { micro_batch, slot } => self.report(micro_batch, slot),
        }
    }

    /// The words of a slice of a checked operation.
    pub(super) fn words<T: Word>(&self, slice: Slice) -> Words<'_, T> {
        // SAFETY: the slice is this device's, aligned and not at address 0, which was checked when it was enqueued, and
        // its memory lives as long as the device; the copier is one of `Copier::all`.
        unsafe { Words::new(slice, self.copier) }
    }

    fn join(&self, lane: Lane, length: u32) -> Result<()> {
        let state = self.lane(lane)?;
        self.pages.take(lane, &state.staged.lock().pages);
        *state.trust.lock() = Trust::Sound;
        for (index, tables) in self.tables.iter().enumerate() {
            let mut tables = tables.lock();
            let staged = state.staged.lock();
            tables.join(lane.0, &staged.blocks[index], staged.budgets[index], length)?;
        }
        Ok(())
    }

    fn truncate<S: Scan>(&self, scan: &S, truncate: &Truncate<'_>) -> Result<()> {
        let Truncate { lane, settle, length, .. } = *truncate;
        let state = self.lane(lane)?;
        let trust = std::mem::take(&mut *state.trust.lock());
        let mut moves = Moves::new(self);
        for (group, tables) in self.tables.iter().enumerate() {
            let mut tables = tables.lock();
            let accept = Accept { lane: lane.0, rows: settle, next: 0 };
            moves.begin(group);
            accept_landed(scan, &mut tables, &mut moves, accept)?;
            if trust == Trust::Bytes {
                tables.empty(lane.0);
            }
            tables.truncate(lane.0, length)?;
        }
        self.pages.take(lane, &state.staged.lock().pages);
        Ok(())
    }

    fn warm<S: Scan>(&self, scan: &S, warm: &Warm) -> Result<()> {
        let mut room = self.room.lock();
        let Room { work, slots, fetches } = &mut *room;
        let selections = warm.selections.map(|slice| self.words(slice));
        let (first, count) = warm.range(self.tables.len());
        for (index, tables) in self.tables.iter().skip(first).take(count).enumerate() {
            let mut tables = tables.lock();
            if warm.whole {
                tables.bring_up(warm.lane.0);
            }
            let first = index * warm.steps as usize;
            for step in first..first + warm.steps as usize {
                let Some(selections) = &selections else { break };
                let selection = &selections.part(step * slots.len(), slots.len());
                let selected = Selected { selection, slots, fetches };
                // A warm-up is a hint: positions beyond the length load nothing.
                tables.warm(scan, warm.lane.0, selected, work)?;
            }
        }
        Ok(())
    }

    fn newest<S: Scan>(&self, scan: &S, newest: &Newest) -> Result<()> {
        let mut room = self.room.lock();
        let Room { work, slots: positions, .. } = &mut *room;
        let to = self.words(newest.positions);
        for (index, tables) in self.tables.iter().enumerate() {
            tables.lock().newest(scan, newest.lane.0, work, positions)?;
            to.store(index * positions.len(), positions);
        }
        Ok(())
    }

    fn warm_gather(&self, range: &WarmGather) -> Result<()> {
        let (mut first, mut left) = (range.first, range.count);
        for (index, format) in self.layout.geometry.formats().iter().enumerate() {
            let tables = self.tables[self.layout.geometry.group_of(index)].lock();
            let budget = tables.head(range.lane.0).map_or(0, |h| u64::from(h.budget));
            let here = left.min(budget.saturating_sub(first));
            if here > 0 {
                let mut copies = Copies::new(format, self.copier);
                for fetch in tables.residents(range.lane.0, first as u32, here as u32) {
                    match self.pairs(index, range.lane, fetch, false) {
                        Some(runs) => copies.add(runs),
                        None => self.lack_bytes(range.lane.0),
                    }
                }
                copies.flush();
            }
            left -= here;
            first = first.saturating_sub(budget);
        }
        Ok(())
    }

    fn load(&self, micro: MicroBatch, descriptor: Slice) -> Result<()> {
        let state = self.micro(micro)?;
        let mut record = state.record.lock();
        self.words(descriptor).load(0, &mut record.descriptor);
        let (step, rows) = descriptor::step::header(&record.descriptor);
        if rows > self.layout.batch as usize {
            return Err(bad("rows of a step descriptor", rows as u64));
        }
        record.report.step = step;
        record.sticky = NOTHING_WRONG;
        record.report.lengths.clear();
        record.report.layers.fill(LayerCount::default());
        record.marks.begin(rows);
        self.know_lanes(&mut record, rows)?;
        let (_, rows) = descriptor::step::header(&record.descriptor);
        state.step.store(step, Ordering::Release);
        state.rows.store(rows as u32, Ordering::Release);
        Ok(())
    }

    /// Checks the lanes of a step. A descriptor that names a lane twice, or a lane that does not exist, makes its
    /// step and its lanes fail; such rows are not processed.
    fn know_lanes(&self, record: &mut Record, rows: usize) -> Result<()> {
        let Record { descriptor, report, sticky, failed, named, .. } = record;
        let lane = |row: usize| descriptor::step::entry(descriptor, row).lane;
        named.fill(false);
        let wrong = (0..rows).find(|row| match named.get_mut(lane(*row) as usize) {
            None => true,
            Some(named) => std::mem::replace(named, true),
        });
        failed.clear();
        match wrong {
            None => {
                for row in 0..rows {
                    failed.push(*self.lane(Lane(lane(row)))?.trust.lock() != Trust::Sound);
                }
            }
            Some(row) => {
                let value = lane(row);
                let wrong = Sticky { row: row as u32, layer: 0, cause: Cause::Tables, value };
                let tables = self.tables.first().map(|tables| tables.lock());
                for lane in (0..rows).map(lane) {
                    self.blame(sticky, lane, false, wrong);
                    let head = tables.as_ref().and_then(|tables| tables.head(lane).copied());
                    report.lengths.push(head.unwrap_or_default().length);
                }
                drop(tables);
                descriptor::step::empty(descriptor);
            }
        }
        Ok(())
    }

    fn commit<S: Scan>(&self, scan: &S, micro: MicroBatch, accepted: Option<Slice>) -> Result<()> {
        let mut record = self.micro(micro)?.record.lock();
        let Record { descriptor, report, sticky, failed, .. } = &mut *record;
        let counts = accepted.map(|slice| self.words::<u32>(slice));
        let (_, rows) = descriptor::step::header(descriptor);
        let mut moves = Moves::new(self);
        for (group, tables) in self.tables.iter().enumerate() {
            let mut tables = tables.lock();
            moves.begin(group);
            for row in 0..rows {
                let Entry { lane, accepted, query_rows } = descriptor::step::entry(descriptor, row);
                let accepted = match accepted {
                    ACCEPTED_ON_DEVICE => counts.and_then(|counts| counts.get(row)).unwrap_or(u32::MAX),
                    count => count,
                };
                let landed = tables.head(lane).map_or(0, |h| h.landed);
                // Ignore an impossible count, and accept nothing after a failed step: this step fails too, and the
                // tables stay valid and equal in all layers.
                let failed = failed[row];
                let (cause, believed) = match accepted <= landed {
                    _ if failed => (Cause::Earlier, 0),
                    true => (Cause::Tables, accepted),
                    false => (Cause::Accepted, 0),
                };
                let next = Accept { lane, rows: believed, next: query_rows };
                let done = accept_landed(scan, &mut tables, &mut moves, next);
                if failed || done.is_err() || believed != accepted {
                    let (row, layer) = (row as u32, moves.members.start as u32);
                    let wrong = Sticky { row, layer, cause, value: accepted };
                    self.blame(sticky, lane, false, wrong);
                }
                if group == 0 {
                    report.lengths.push(tables.head(lane).map_or(0, |h| h.length));
                }
            }
        }
        Ok(())
    }

    /// Records an error of a step, `committed` or of its commit, and stops its lane.
    pub(super) fn blame(&self, word: &mut u64, lane: u32, committed: bool, sticky: Sticky) {
        *word = sticky.word(committed).min(*word);
        if let Ok(state) = self.lane(Lane(lane)) {
            let mut trust = state.trust.lock();
            *trust = match sticky.cause {
                Cause::NotGathered => Trust::Bytes,
                _ if *trust == Trust::Bytes => Trust::Bytes,
                _ => Trust::Failed,
            };
        }
    }

    /// Marks a lane whose tables list rows that have no bytes.
    pub(super) fn lack_bytes(&self, lane: u32) {
        if let Ok(state) = self.lane(Lane(lane)) {
            *state.trust.lock() = Trust::Bytes;
        }
    }

    /// The source and target of a row's runs: up to its slot, or `down` from it. `None` if the lane has no page for
    /// the row.
    #[inline(always)]
    pub(super) fn pairs(&self, layer: usize, lane: Lane, fetch: Fetch, down: bool) -> Option<[Pair; 2]> {
        let g = self.format(layer);
        let page = self.pages.page(lane, (fetch.position / g.page_tokens()) as usize)?;
        let offset = g.host_offset(page, fetch.position % g.page_tokens());
        // Pages were checked against the total pool when staged, slots against the slab when attached.
        let (host, slab) = (self.layout.rows[layer].address() + offset, self.layout.slabs[layer].address());
        Some(g.pieces(fetch.slot).map(|piece| {
            let (host, slot) = (host + u64::from(piece.row), slab + piece.slab);
            if down { Pair { from: slot, to: host } } else { Pair { from: host, to: slot } }
        }))
    }

    /// The source and target of a row's runs, from slot to slot of one layer.
    #[inline(always)]
    fn slot_pairs(&self, layer: usize, moved: Moved) -> [Pair; 2] {
        let (g, slab) = (self.format(layer), self.layout.slabs[layer].address());
        let (from, to) = (g.pieces(moved.from), g.pieces(moved.to));
        [0, 1].map(|run| Pair { from: slab + from[run].slab, to: slab + to[run].slab })
    }

    /// A layer's row format.
    #[inline(always)]
    pub(super) fn format(&self, layer: usize) -> &Geometry {
        self.layout.geometry.of(layer)
    }

    /// The index group of a range's layer.
    pub(super) fn group_of(&self, range: &StepRange) -> usize {
        self.layout.geometry.group_of(range.layer.index())
    }

    fn scatter(&self, range: &StepRange) -> Result<()> {
        let mut record = self.micro(range.micro_batch)?.record.lock();
        let Record { descriptor, sticky: word, marks, .. } = &mut *record;
        let (_, real) = descriptor::step::header(descriptor);
        let layer = range.layer.index();
        let tables = self.tables[self.group_of(range)].lock();
        let mut copies = Copies::new(self.format(layer), self.copier);
        copies.down = true;
        let rows = range.first as usize..((range.first + range.count) as usize).min(real);
        // Each head may be a cache miss: prefetch all of them first.
        for row in rows.clone() {
            if let Some(head) = tables.head(descriptor::step::entry(descriptor, row).lane) {
                ask(std::ptr::from_ref(head) as u64);
            }
        }
        for row in rows {
            let lane = descriptor::step::entry(descriptor, row).lane;
            marks.note(Mark::Scattered, row, layer, range.rows);
            for query in range.rows.first..range.rows.first + range.rows.count {
                let Some(landing) = tables.landing(lane, query) else { continue };
                if let Some(runs) = self.pairs(layer, Lane(lane), landing, true) {
                    copies.add(runs);
                    continue;
                }
                let (row, layer, cause) = (row as u32, layer as u32, Cause::Tables);
                self.blame(word, lane, true, Sticky { row, layer, cause, value: landing.position });
            }
        }
        copies.flush();
        Ok(())
    }

    fn report(&self, micro: MicroBatch, slot: Slice) -> Result<()> {
        let state = self.micro(micro)?;
        let mut record = state.record.lock();
        let Record { descriptor, report, words, sticky: word, marks, .. } = &mut *record;
        let (step, rows) = descriptor::step::header(descriptor);
        let expected = self.layout.expected;
        for (row, list) in state.lists[..rows].iter().enumerate() {
            let list = list.lock();
            let entry = descriptor::step::entry(descriptor, row);
            let mut blame = |layer: usize, cause, value| {
                let sticky = Sticky { row: row as u32, layer: layer as u32, cause, value };
                self.blame(word, entry.lane, true, sticky);
            };
            if let Some((layer, cause)) = list.missing(step).filter(|_| expected != Expected::Resolved) {
                blame(layer, cause, layer as u32);
            }
            let missing = marks.missing(row, entry, expected == Expected::Whole);
            if let Some((layer, cause, query)) = missing.filter(|_| expected != Expected::Gathered) {
                blame(layer, cause, query);
            }
        }
        report.sticky = Sticky::of_word(*word);
        // A report without rows belongs to no step, and no caller reads it.
        report.moved = if rows == 0 { 0 } else { self.moved.swap(0, Ordering::AcqRel) };
        report.encode(words);
        self.words(slot).store(0, words);
        // Operations that are enqueued before the next step begins, such as a graph launched without a step, find no
        // rows.
        descriptor::step::empty(descriptor);
        state.rows.store(0, Ordering::Release);
        Ok(())
    }

    pub(super) fn digest(&self, lane: Lane) -> Result<u64> {
        self.lane(lane)?;
        let digests = self.tables.iter().map(|tables| tables.lock().digest(lane.0));
        Ok(digests
            .enumerate()
            .fold(0, |sum: u64, (group, digest)| sum.wrapping_add(digest.wrapping_mul(2 * group as u64 + 1))))
    }

    pub(super) fn validate(&self) -> Result<()> {
        self.tables.iter().try_for_each(|tables| tables.lock().validate())
    }
}

/// Accepts landed rows in one table, and copies those that have a slot.
fn accept_landed<S: Scan>(
    scan: &S,
    tables: &mut LayerTables,
    moves: &mut Moves<'_>,
    accept: Accept,
) -> Result<()> {
    let Accept { lane, rows, next } = accept;
    tables.commit(scan, lane, rows, next, |moved| moves.add(moved))?;
    moves.flush();
    Ok(())
}
