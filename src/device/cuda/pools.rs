//! A cache's tables and lists in device memory, and the kernel launches that work on them.
//!
//! They are one allocation, laid out here and described to the kernels by `abi`: each layer's tables in the format of
//! `residency`, and each micro-batch's step descriptor, counts and lists. What operations on a lane need besides is in
//! `lanes`.
//!
//! Each launch is checked before it is enqueued and carries its arguments by value, including the description of the
//! cache. So a captured launch can run any number of times, and a kernel reads only data from device memory. Kernels
//! trust no number that only the device has: they compare it with the cache's sizes before they address memory with
//! it.

use super::abi::{self, DUE_GATHERED, DUE_RESOLVED, DUE_SCATTERED, NO_PAGE, UNUSED_STAMP, bytes_of};
use super::driver::{Context, Current, DriverResult, Handle, LaunchAttribute, LaunchConfig, Refusal, flag};
use super::errors::NAME;
use super::lanes::{Lists, Turns};
use super::memory::{Allocation, Worker};
use super::module::{Kernel, Module};
use super::prefetch;
use crate::device::checks::{self, Asker, Extents};
use crate::device::pieces::Pieces;
use crate::device::{
    Begin, DeviceId, Expected, Newest, PoolLayout, PoolOp, ResolveOutput, Slice, StepRange, Truncate, Warm,
    WarmGather, descriptor,
};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometry, IndexGroup, SLOT_BLOCK};
use crate::ids::{Lane, MicroBatch};
use crate::residency::{EMPTY, LaneHead, LayerTables, TableShape, TableWords};
use crate::sync::Arc;

/// The most selected positions of a query row: a resolve counts index-list entries in 16 bits.
const TOP_K_MAX: u32 = 65_535;
/// The alignment of tables and lists, which is that of the driver's allocations.
const ALIGN: u64 = 256;
/// Blocks of a join for each table, of a scatter, and of a copy inside host memory.
const JOIN_BLOCKS: u32 = 8;
const SCATTER_BLOCKS: u32 = 8;
const COPY_BLOCKS: u32 = 8;
/// Blocks of a commit for each table, and threads of a block: enough for a lane's few new rows.
const COMMIT_BLOCKS: u32 = 32;
const COMMIT_THREADS: u32 = 128;

/// The launch options of kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launches {
    pub threads: u32,
    pub gather_blocks: u32,
    pub programmatic: bool,
    pub bulk: bool,
    /// The highest clock of a multiprocessor in kHz, if the device has an L2.
    pub prefetch_khz: Option<u32>,
}

/// A launch: the kernel, its blocks, the most threads of each, and the bytes of shared memory.
#[derive(Clone, Copy, Debug)]
struct Launch {
    kernel: Kernel,
    grid: [u32; 2],
    most_threads: u32,
    shared_bytes: u32,
}

impl Launch {
    fn new(kernel: Kernel, blocks: u32, rows: u32) -> Launch {
        Launch { kernel, grid: [blocks, rows], most_threads: u32::MAX, shared_bytes: 0 }
    }
}

impl Launches {
    /// Enqueues a kernel; does nothing if there are no blocks.
    fn launch<T: abi::Plain>(
        &self,
        current: &Current<'_>,
        module: &Module,
        stream: Handle,
        launch: Launch,
        args: &T,
    ) -> DriverResult {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let early =
            LaunchAttribute { id: flag::LAUNCH_PROGRAMMATIC, unused: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] };
        let config = LaunchConfig {
            grid: [launch.grid[0], launch.grid[1], 1],
            block: [self.threads.min(launch.most_threads), 1, 1],
            shared_bytes: launch.shared_bytes,
            stream,
            attributes: &raw const early,
            attribute_count: self.programmatic.into(),
        };
        let parameters = [std::ptr::from_ref(args).cast()];
        current.launch(&config, module.function(launch.kernel), &parameters, 0)
    }

    /// Copies between two pieces of host memory that the device reaches. The driver's own copy would block the host.
    pub fn copy(&self, e: &Enqueueing<'_>, args: &abi::CopyArgs) -> DriverResult {
        let blocks = (args.bytes / 16).div_ceil(u64::from(self.threads)).clamp(1, COPY_BLOCKS.into()) as u32;
        self.carry(e, blocks, args)
    }

    /// Copies between any two pieces of memory, with `blocks` blocks.
    pub fn carry(&self, e: &Enqueueing<'_>, blocks: u32, args: &abi::CopyArgs) -> DriverResult {
        self.launch(e.current, e.module, e.stream, Launch::new(Kernel::Copy, blocks, 1), args)
    }

    /// Brings `bytes` bytes from `address` on into L2, at `rate` bytes per second or fewer.
    pub fn prefetch(&self, e: &Enqueueing<'_>, address: u64, bytes: u64, rate: u64) -> DriverResult {
        let Some(khz) = self.prefetch_khz else { return Ok(()) };
        let threads = self.threads.min(prefetch::THREADS);
        let (blocks, args) = prefetch::launch(khz, threads, (address, bytes), rate);
        let launch = Launch { most_threads: threads, ..Launch::new(Kernel::Prefetch, blocks, 1) };
        self.launch(e.current, e.module, e.stream, launch, &args)
    }

    /// Begins a step of a dense cache.
    pub fn begin_pages(&self, e: &Enqueueing<'_>, args: &abi::BeginPagesArgs) -> DriverResult {
        self.launch(e.current, e.module, e.stream, Launch::new(Kernel::BeginPages, 1, 1), args)
    }

    /// Copies pages, with at most `blocks` blocks; does nothing if there are none.
    pub fn pages(&self, e: &Enqueueing<'_>, blocks: u32, args: &abi::PagesArgs) -> DriverResult {
        let words = u64::from(args.plane_count) * u64::from(args.page_count) * u64::from(args.words);
        let blocks = words.div_ceil(self.threads.into()).min(blocks.into()) as u32;
        self.launch(e.current, e.module, e.stream, Launch::new(Kernel::Pages, blocks, 1), args)
    }

    /// Multiplies matrices, with the given blocks and bytes of shared memory per block.
    #[cfg(feature = "measure")]
    pub fn work(
        &self,
        e: &Enqueueing<'_>,
        blocks: u32,
        shared_bytes: u32,
        args: &abi::WorkArgs,
    ) -> DriverResult {
        let launch = Launch { shared_bytes, ..Launch::new(Kernel::Work, blocks, 1) };
        self.launch(e.current, e.module, e.stream, launch, args)
    }
}

/// The words of one layer's tables (those of its index group), copied from the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableCopy {
    /// The layer's extents.
    pub shape: TableShape,
    /// See [`TableWords::heads`].
    pub heads: Vec<LaneHead>,
    /// See [`TableWords::slot_of`].
    pub slot_of: Vec<u32>,
    /// See [`TableWords::position_of`].
    pub position_of: Vec<u32>,
    /// See [`TableWords::stamp_of`].
    pub stamp_of: Vec<u32>,
    /// See [`TableWords::blocks`].
    pub blocks: Vec<u32>,
}

impl TableCopy {
    /// The words, in the form in which the host device's tables return them.
    pub fn words(&self) -> TableWords<'_> {
        TableWords {
            heads: &self.heads,
            slot_of: &self.slot_of,
            position_of: &self.position_of,
            stamp_of: &self.stamp_of,
            blocks: &self.blocks,
        }
    }
}

/// The tables and lists of one cache.
#[derive(Debug)]
pub(super) struct CudaPools {
    pub extents: Extents,
    /// By index group.
    tables: Vec<TableShape>,
    /// The kernels' arguments that never change.
    layers: Vec<abi::Layer>,
    micro: Vec<abi::Micro>,
    words: abi::Pools,
    /// The device words in which a digest, and the rows that resizes move, are summed.
    digest: Handle,
    moved: Handle,
    launches: Launches,
    pub lists: Lists,
    pub turns: Turns,
    _memory: Allocation,
}

/// Allots consecutive places in one allocation.
struct Room {
    next: u64,
}

impl Room {
    /// Allots `count` times `each` bytes.
    fn take(&mut self, count: u64, each: usize) -> Result<Handle> {
        let too_much = || Error::new(Kind::Overflow, "attach").at("bytes of tables and lists");
        let place = self.next;
        let bytes = count.checked_mul(each as u64).ok_or_else(too_much)?;
        let end = place.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGN));
        self.next = end.filter(|end| *end <= i64::MAX as u64).ok_or_else(too_much)?;
        Ok(place)
    }
}

/// The address of each table and list.
struct Addresses {
    layers: Vec<abi::Layer>,
    micro: Vec<abi::Micro>,
    pools: abi::Pools,
    digest: Handle,
    moved: Handle,
    end: u64,
}

impl Addresses {
    /// Lays everything out from address `base` on.
    fn new(layout: &PoolLayout, base: u64) -> Result<Addresses> {
        let (g, mut room) = (&layout.geometry, Room { next: base });
        let none = || Error::new(Kind::InvalidConfig, "attach").at("layers of the pool layout");
        let first = layout.tables.first().copied().ok_or_else(none)?;
        let (batch, layer_count) = (u64::from(layout.batch), u64::from(g.layers()));
        let table_count = g.groups().len() as u64;
        let top_k = g.shape().top_k;
        let selected = first.query_rows.saturating_mul(top_k);
        let missed_words = first.tokens.div_ceil(u32::BITS);
        let most = layout.tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        let set_words = most * (SLOT_BLOCK / u32::BITS);
        let work_words = missed_words.saturating_add(set_words.saturating_mul(2));
        let mut layers = Vec::new();
        for (group, shape) in g.groups().iter().zip(&layout.tables) {
            let tables = tables(shape, group, &mut room)?;
            let memory = layout.slabs.iter().zip(&layout.rows).zip(g.formats());
            let members = memory.skip(group.first as usize).take(group.layers as usize);
            layers.extend(members.map(|((slab, rows), format)| layer(&tables, format, slab, rows)));
        }
        let marks = 2 * u64::from(first.query_rows.div_ceil(u32::BITS));
        let mut micro = Vec::new();
        for _ in 0..layout.micro_batches {
            micro.push(abi::Micro {
                descriptor: room.take(descriptor::step::words(layout.batch) as u64, 4)?,
                counts: room.take(3 * layer_count, 4)?,
                lengths: room.take(batch, 4)?,
                sticky: room.take(1, 8)?,
                failed: room.take(batch, 4)?,
                lists: room.take(batch, size_of::<abi::List>())?,
                fetches: room.take(batch * u64::from(selected), size_of::<abi::Fetch>())?,
                work: room.take(batch * u64::from(work_words), 4)?,
                first: room.take(first.lanes.into(), 4)?,
                marks: room.take(batch * layer_count * marks, 4)?,
            });
        }
        let pages = room.take(u64::from(first.lanes) * u64::from(layout.lane_pages), 4)?;
        let described = room.take(layer_count, size_of::<abi::Layer>())?;
        // Without groups every layer is the first of its own.
        let tables = match table_count == layer_count {
            true => described,
            false => room.take(table_count, size_of::<abi::Layer>())?,
        };
        let pools = abi::Pools {
            layers: described,
            tables,
            pages,
            trust: room.take(first.lanes.into(), 4)?,
            warm_fetches: room.take(table_count * u64::from(top_k), size_of::<abi::Fetch>())?,
            warm_work: room.take(table_count * u64::from(work_words), 4)?,
            layer_count: g.layers(),
            table_count: table_count as u32,
            lanes: first.lanes,
            lane_pages: layout.lane_pages,
            batch: layout.batch,
            top_k,
            selected,
            work_words,
            missed_words,
            set_words,
            page_tokens: g.page_tokens(),
            host_pages: u32::try_from(checks::host_pages(layout)).unwrap_or(NO_PAGE),
            due: match layout.expected {
                Expected::Whole => DUE_RESOLVED | DUE_GATHERED | DUE_SCATTERED,
                Expected::Resolved => DUE_RESOLVED,
                Expected::Gathered => DUE_GATHERED,
            },
            unused: 0,
        };
        let (digest, moved) = (room.take(1, 8)?, room.take(1, 4)?);
        Ok(Addresses { layers, micro, pools, digest, moved, end: room.next })
    }
}

/// The tables of a group, as all of its layers name them.
fn tables(shape: &TableShape, group: &IndexGroup, room: &mut Room) -> Result<abi::Layer> {
    let lanes = u64::from(shape.lanes);
    Ok(abi::Layer {
        heads: room.take(lanes, size_of::<LaneHead>())?,
        slot_of: room.take(lanes * u64::from(shape.tokens), 4)?,
        position_of: room.take(u64::from(shape.budget_blocks) * u64::from(SLOT_BLOCK), 4)?,
        stamp_of: room.take(shape.slots().into(), 4)?,
        blocks: room.take(lanes * u64::from(shape.lane_blocks()), 4)?,
        lanes: shape.lanes,
        tokens: shape.tokens,
        query_rows: shape.query_rows,
        scratch: shape.scratch,
        waves: shape.waves,
        scratch_base: shape.scratch_base,
        landing_base: shape.landing_base,
        budget_base: shape.budget_base,
        budget_blocks: shape.budget_blocks,
        lane_blocks: shape.lane_blocks(),
        first: group.first,
        members: group.layers,
        ..abi::Layer::default()
    })
}

/// A layer of a group: its tables, and memory and row format of its own.
fn layer(tables: &abi::Layer, format: &Geometry, slab: &Slice, rows: &Slice) -> abi::Layer {
    let runs = format.shape().runs;
    let others = slab.address() | u64::from(runs[0] | runs[1] | format.block_bytes());
    let pieces = Pieces::of(format.row_bytes(), format.host_stride(), rows.address(), others);
    abi::Layer {
        slab: slab.address(),
        rows: rows.address(),
        piece_bytes: pieces.bytes,
        piece_numbers: pieces.numbers,
        line_mask: pieces.mask,
        runs,
        block_bytes: format.block_bytes(),
        host_stride: format.host_stride(),
        ..*tables
    }
}

impl CudaPools {
    /// Allocates the memory and writes the tables of an empty cache.
    pub fn new(
        layout: PoolLayout,
        device: DeviceId,
        context: &Arc<Context>,
        worker: &Worker,
        launches: Launches,
    ) -> Result<CudaPools> {
        const OPERATION: &str = "attach";
        let asker = Asker { name: NAME, device, exact: true, top_k_max: TOP_K_MAX };
        let extents = Extents::new(&layout, asker)?;
        let bytes = Addresses::new(&layout, 0)?.end;
        let memory = Allocation::new(context, worker, bytes)?;
        let addresses = Addresses::new(&layout, memory.address)?;
        let failed = |refusal: Refusal| refusal.error(OPERATION);
        let lists = Lists::new(context, &layout, addresses.pools.lanes)?;
        let turns = Turns::new(context).map_err(failed)?;
        fill(&addresses, &layout.tables, worker).map_err(failed)?;
        Ok(CudaPools {
            extents,
            layers: addresses.layers,
            micro: addresses.micro,
            words: addresses.pools,
            digest: addresses.digest,
            moved: addresses.moved,
            launches,
            lists,
            turns,
            tables: layout.tables,
            _memory: memory,
        })
    }

    /// Enqueues an operation that was checked and staged.
    pub fn run(&self, e: &Enqueueing<'_>, op: &PoolOp<'_>) -> DriverResult {
        match op {
            PoolOp::Join(join) => self.join(e, join.lane),
            PoolOp::Truncate(truncate) => self.truncate(e, truncate),
            PoolOp::Resize(resize) => self.resize(e, resize.lane),
            PoolOp::Leave(lane) => {
                let args = abi::LeaveArgs { pools: self.words, lane: lane.0, unused: 0 };
                self.launch(e, Launch::new(Kernel::Leave, self.words.table_count, 1), &args)
            }
            PoolOp::Warm(warm) => self.warm(e, warm),
            PoolOp::Newest(newest) => self.newest(e, newest),
            PoolOp::WarmGather(range) => self.warm_gather(e, range),
            PoolOp::Begin(begin) => self.begin(e, begin),
            PoolOp::Resolve { range, selection, output } => self.resolve(e, range, selection, output),
            PoolOp::Gather { range, wave } => self.gather(e, range, *wave),
            PoolOp::Scatter(range) => self.scatter(e, range),
            PoolOp::Report { micro_batch, slot } => {
                let args = abi::ReportArgs {
                    pools: self.words,
                    micro: self.micro(*micro_batch),
                    slot: slot.address(),
                    moved: self.moved,
                    query_rows: self.layer(0).query_rows,
                    unused: 0,
                };
                self.launch(e, Launch::new(Kernel::Report, 1, 1), &args)
            }
        }
    }

    /// A layer, whose number was checked.
    fn layer(&self, number: usize) -> abi::Layer {
        self.layers.get(number).copied().unwrap_or_default()
    }

    /// A micro-batch, whose number was checked.
    fn micro(&self, number: MicroBatch) -> abi::Micro {
        self.micro.get(number.index()).copied().unwrap_or_default()
    }

    fn launch<T: abi::Plain>(&self, e: &Enqueueing<'_>, launch: Launch, args: &T) -> DriverResult {
        self.launches.launch(e.current, e.module, e.stream, launch, args)
    }

    fn join(&self, e: &Enqueueing<'_>, lane: Lane) -> DriverResult {
        let args = self.lists.join(self.words, lane);
        self.launch(e, Launch::new(Kernel::Join, self.words.table_count, JOIN_BLOCKS), &args)
    }

    fn truncate(&self, e: &Enqueueing<'_>, truncate: &Truncate<'_>) -> DriverResult {
        let args = abi::TruncateArgs {
            pools: self.words,
            staged: self.lists.at(truncate.lane),
            lane: truncate.lane.0,
            settle: truncate.settle,
            length: truncate.length,
            unused: 0,
        };
        self.launch(e, Launch::new(Kernel::Truncate, self.words.table_count, 1), &args)
    }

    /// A single launch for all tables: one of several could be refused after the others.
    fn resize(&self, e: &Enqueueing<'_>, lane: Lane) -> DriverResult {
        let args = self.lists.resize(self.words, self.moved, lane);
        let launch = Launch::new(Kernel::Resize, self.words.table_count, 1);
        self.turns.take(e.current, e.stream, || self.launch(e, launch, &args))
    }

    fn warm(&self, e: &Enqueueing<'_>, warm: &Warm) -> DriverResult {
        let (shared, shared_bytes) = self.room(e);
        let (first, count) = warm.range(self.words.table_count as usize);
        let args = abi::WarmArgs {
            pools: self.words,
            selections: warm.selections.map_or(0, |slice| slice.address()),
            lane: warm.lane.0,
            whole: warm.whole.into(),
            steps: warm.steps,
            shared,
            first: first as u32,
            unused: 0,
        };
        let launch = Launch::new(Kernel::Warm, count as u32, 1);
        let launch = Launch { shared_bytes, ..launch };
        // All lanes share the list of fetches, and the working memory if it is in global memory.
        self.turns.take(e.current, e.stream, || self.launch(e, launch, &args))
    }

    fn newest(&self, e: &Enqueueing<'_>, newest: &Newest) -> DriverResult {
        let positions = newest.positions.address();
        let args = abi::NewestArgs { pools: self.words, positions, lane: newest.lane.0, unused: 0 };
        let launch = Launch::new(Kernel::Newest, self.words.table_count, 1);
        self.turns.take(e.current, e.stream, || self.launch(e, launch, &args))
    }

    fn warm_gather(&self, e: &Enqueueing<'_>, range: &WarmGather) -> DriverResult {
        let WarmGather { lane, first, count } = *range;
        let args = abi::WarmGatherArgs { pools: self.words, first, count, lane: lane.0, unused: 0 };
        self.launch(e, Launch::new(Kernel::WarmGather, self.blocks_for(count), 1), &args)
    }

    fn begin(&self, e: &Enqueueing<'_>, begin: &Begin) -> DriverResult {
        let (pools, micro) = (self.words, self.micro(begin.micro_batch));
        let load = abi::LoadArgs {
            pools,
            micro,
            descriptor: begin.descriptor.address(),
            heads: self.layer(0).heads,
        };
        let accepted = begin.accepted.map_or(0, |slice| slice.address());
        let commit = abi::CommitArgs { pools, micro, accepted };
        self.launch(e, Launch::new(Kernel::Load, 1, 1), &load)?;
        let launch = Launch::new(Kernel::Commit, self.words.table_count, self.words.batch.min(COMMIT_BLOCKS));
        self.launch(e, Launch { most_threads: COMMIT_THREADS, ..launch }, &commit)
    }

    /// The place of a resolve's working memory, and its bytes of shared memory. The sets take precedence over the
    /// lane's slot blocks, which are read less often.
    fn room(&self, e: &Enqueueing<'_>) -> (u32, u32) {
        let sets = u64::from(self.words.work_words) * 4;
        let all = sets + u64::from(self.words.set_words / 2) * 4;
        match u64::from(e.module.shared_bytes) {
            most if all <= most => (abi::SETS_AND_BLOCKS, all as u32),
            most if sets <= most => (abi::SETS, sets as u32),
            _ => (abi::IN_MEMORY, 0),
        }
    }

    fn resolve(
        &self,
        e: &Enqueueing<'_>,
        range: &StepRange,
        selection: &Slice,
        output: &ResolveOutput,
    ) -> DriverResult {
        let (shared, shared_bytes) = self.room(e);
        let args = abi::ResolveArgs {
            pools: self.words,
            layer: self.layer(range.layer.index()),
            micro: self.micro(range.micro_batch),
            selection: selection.address(),
            slots: output.slots.address(),
            lists: output.split_indices.map_or(0, |split_indices| split_indices.lists.address()),
            counts: output.split_indices.map_or(0, |split_indices| split_indices.counts.address()),
            number: range.layer.0,
            first: range.first,
            count: range.count,
            row_first: range.rows.first,
            row_count: range.rows.count,
            lists_batch: output.split_indices.map_or(0, |split_indices| split_indices.batch),
            shared,
            unused: 0,
        };
        let launch = Launch::new(Kernel::Resolve, range.count, 1);
        self.launch(e, Launch { shared_bytes, ..launch }, &args)
    }

    fn gather(&self, e: &Enqueueing<'_>, range: &StepRange, wave: u32) -> DriverResult {
        let args = abi::GatherArgs {
            pools: self.words,
            layer: self.layer(range.layer.index()),
            micro: self.micro(range.micro_batch),
            number: range.layer.0,
            first: range.first,
            count: range.count,
            row_first: range.rows.first,
            row_count: range.rows.count,
            wave,
        };
        let kernel = if self.launches.bulk { Kernel::GatherBulk } else { Kernel::Gather };
        let rows = u64::from(range.count) * u64::from(self.words.selected);
        self.launch(e, Launch::new(kernel, self.blocks_for(rows), 1), &args)
    }

    /// Blocks to move `rows` rows with a warp each, at most those of a gather.
    fn blocks_for(&self, rows: u64) -> u32 {
        let most = u64::from(self.launches.gather_blocks);
        rows.div_ceil(u64::from(self.launches.threads / u32::BITS)).min(most) as u32
    }

    fn scatter(&self, e: &Enqueueing<'_>, range: &StepRange) -> DriverResult {
        let args = abi::ScatterArgs {
            pools: self.words,
            layer: self.layer(range.layer.index()),
            micro: self.micro(range.micro_batch),
            number: range.layer.0,
            first: range.first,
            count: range.count,
            row_first: range.rows.first,
            row_count: range.rows.count,
            unused: 0,
        };
        let rows = u64::from(range.count) * u64::from(range.rows.count);
        let blocks = self.blocks_for(rows).min(SCATTER_BLOCKS);
        self.launch(e, Launch::new(Kernel::Scatter, blocks, 1), &args)
    }

    /// Adds up the digest of a lane, all tables summed, at `to`.
    pub fn digest(&self, e: &Enqueueing<'_>, lane: Lane, to: Handle) -> DriverResult {
        let args = abi::DigestArgs { pools: self.words, out: to, lane: lane.0, unused: 0 };
        e.current.fill_words(to, 0, 2, e.stream)?;
        self.launch(e, Launch::new(Kernel::Digest, self.words.table_count, 1), &args)
    }

    /// The digest of a lane, as it is now.
    pub fn digest_now(&self, worker: &Worker, module: &Module, lane: Lane) -> DriverResult<u64> {
        let mut sum = 0_u64;
        worker.run(|current, stream| {
            self.digest(&Enqueueing { current, module, stream }, lane, self.digest)?;
            current.copy(std::ptr::from_mut(&mut sum) as Handle, self.digest, 8, stream)
        })?;
        Ok(sum)
    }

    /// A layer's tables, as they are now.
    pub fn tables(&self, worker: &Worker, layer: usize) -> Result<TableCopy> {
        let places = self.tables.get(self.extents.geometry.group_of(layer)).zip(self.layers.get(layer));
        let (shape, at) = places.ok_or_else(|| self.extents.asker.bad("layer", layer as u64))?;
        let lanes = shape.lanes as usize;
        let words = |address: Handle, count: usize| {
            let mut bytes = vec![0; 4 * count];
            worker.download(address, &mut bytes).map_err(|refusal| refusal.error("copy tables"))?;
            let word = |four: &[u8]| four.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
            Ok::<Vec<u32>, Error>(bytes.chunks_exact(4).map(word).collect())
        };
        let heads = words(at.heads, lanes * size_of::<LaneHead>() / 4)?;
        let head = |words: &[u32]| match *words {
            [length, landed, budget, blocks, stamp, min_stamp, next_victim, full_places] => {
                LaneHead { length, landed, budget, blocks, stamp, min_stamp, next_victim, full_places }
            }
            _ => LaneHead::default(),
        };
        Ok(TableCopy {
            shape: *shape,
            heads: heads.chunks_exact(size_of::<LaneHead>() / 4).map(head).collect(),
            slot_of: words(at.slot_of, lanes * shape.tokens as usize)?,
            position_of: words(at.position_of, shape.budget_blocks as usize * SLOT_BLOCK as usize)?,
            stamp_of: words(at.stamp_of, shape.slots() as usize)?,
            blocks: words(at.blocks, lanes * shape.lane_blocks() as usize)?,
        })
    }

    /// Checks every invariant of all tables.
    pub fn validate(&self, worker: &Worker) -> Result<()> {
        let mut groups = self.extents.geometry.groups().iter();
        groups.try_for_each(|group| {
            let copy = self.tables(worker, group.first as usize)?;
            LayerTables::from_words(copy.shape, &copy.words())?.validate()
        })
    }
}

/// The target of a launch: context, stream and options.
#[derive(Debug)]
pub(super) struct Enqueueing<'a> {
    pub current: &'a Current<'a>,
    pub module: &'a Module,
    pub stream: Handle,
}

/// Writes the tables of an empty cache to zeroed memory.
fn fill(addresses: &Addresses, tables: &[TableShape], worker: &Worker) -> DriverResult {
    worker.run(|current, stream| {
        let fill = |address, value, count: u64| match count {
            0 => Ok(()),
            _ => current.fill_words(address, value, count, stream),
        };
        let firsts = addresses.layers.iter().enumerate().filter(|(number, of)| *number == of.first as usize);
        for ((_, layer), shape) in firsts.zip(tables) {
            fill(layer.position_of, EMPTY, u64::from(shape.budget_blocks) * u64::from(SLOT_BLOCK))?;
            fill(layer.stamp_of, UNUSED_STAMP, shape.slots().into())?;
        }
        let pools = &addresses.pools;
        fill(pools.pages, NO_PAGE, u64::from(pools.lanes) * u64::from(pools.lane_pages))
    })?;
    for micro in &addresses.micro {
        worker.upload(micro.sticky, bytes_of(&[descriptor::NOTHING_WRONG]))?;
    }
    worker.upload(addresses.pools.layers, bytes_of(&addresses.layers))?;
    let firsts = (0..).zip(&addresses.layers).filter(|(number, of)| *number == of.first);
    let firsts: Vec<abi::Layer> = firsts.map(|(_, layer)| *layer).collect();
    worker.upload(addresses.pools.tables, bytes_of(&firsts))
}
