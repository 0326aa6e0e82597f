//! A device on a stand-in driver of its own, or on the one that `FOREBAY_TEST_DRIVER` names, and a cache of two layers,
//! small enough for a test to read all of it.

use std::sync::Arc;

use crate::skip::{own_driver, skip};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::descriptor::{Entry, Report, step};
use forebay::device::{
    Begin, Device, Event, Join, Mapped, Newest, PoolLayout, PoolOp, Pools, ResolveOutput, Slice, StepRange,
    Stream, Ticket,
};
use forebay::os::{Map, NoFaults, Protection, Request};
use forebay::residency::{QueryRange, TableShape};
use forebay::{Geometry, Lane, Layer, MicroBatch, Result, Shape};
use forebay_standin::{Driver, Given, Options, Standin};

/// The given driver, or one of the test's own; none where there is no compiler to build one, and then the test reports
/// its skip.
pub fn driver(options: Options) -> Option<Driver> {
    let driver = Driver::new(options).unwrap();
    if driver.is_none() {
        skip("g++, which builds the stand-in driver");
    }
    driver
}

/// A driver of the test's own, which has the ability `does`.
pub fn own(options: Options, does: &str) -> Option<Standin> {
    if !own_driver(does) {
        return None;
    }
    if let Driver::Own(standin) = driver(options)? { Some(*standin) } else { None }
}

pub fn usual() -> Options {
    Options::default()
}

/// Options for a device on the driver of this library. On a stand-in blocks have few threads, because it runs each of
/// them by itself.
pub fn on(library: &str) -> CudaOptions {
    let usual = CudaOptions { library: Some(library.to_owned()), ..CudaOptions::default() };
    if Given::named().unwrap().is_some() { usual } else { CudaOptions { unload: true, threads: 64, ..usual } }
}

/// A device on a driver, in the order in which they are dropped.
pub struct Rig<D = Driver> {
    pub device: Arc<CudaDevice>,
    pub driver: D,
}

impl Rig {
    pub fn new(options: Options) -> Option<Rig> {
        let driver = driver(options)?;
        Some(Rig { device: CudaDevice::new(on(driver.library())).unwrap(), driver })
    }
}

impl Rig<Standin> {
    /// On a driver of the test's own, which has the ability `does`.
    pub fn own(options: Options, does: &str) -> Option<Rig<Standin>> {
        let driver = own(options, does)?;
        Some(Rig { device: CudaDevice::new(on(driver.library())).unwrap(), driver })
    }
}

impl Rig {
    /// Reads bytes as they are now; on a given driver, by a copy.
    pub fn read(&self, slice: Slice) -> Vec<u8> {
        let mut bytes = vec![0; slice.bytes() as usize];
        assert!(self.driver.read(slice.address(), &mut bytes));
        bytes
    }
}

pub fn pinned(bytes: u64) -> Arc<Map> {
    let request = Request { bytes, huge: false, populate: true, lock: false, node: None, shared: false };
    Arc::new(Map::new(&request, &NoFaults).unwrap().0)
}

pub const K: usize = 8;
pub const LAYERS: u32 = 2;
const LANES: u32 = 2;
const PAGES: u64 = 8;
/// Bytes of a row.
const ROW: u64 = 64;

/// A cache of two layers and two lanes, a stream, and words that the host and the device share.
pub struct Cache {
    pub device: Arc<dyn Device>,
    pub pools: Pools,
    pub stream: Stream,
    pub event: Event,
    /// Step descriptor, report, selection and slots, one after the other.
    words: Arc<Map>,
    descriptor: Slice,
    report: Slice,
    selection: Slice,
    slots: Slice,
    slabs: Vec<Slice>,
}

fn words_of(slice: &Slice, all: &Slice) -> u64 {
    slice.address() - all.address()
}

impl Cache {
    /// A cache's rows in all layers: the bytes of each row contain its number.
    pub fn rows() -> Result<Arc<Map>> {
        let total = pinned(u64::from(LAYERS) * PAGES * 16 * ROW);
        for row in 0..total.len() / ROW {
            total.copy_in(row * ROW, &[row as u8; ROW as usize])?;
        }
        Ok(total)
    }

    pub fn new(device: Arc<dyn Device>) -> Result<Cache> {
        Cache::over(device, &Cache::rows()?)
    }

    /// Over rows that another device may use too.
    pub fn over(device: Arc<dyn Device>, total: &Arc<Map>) -> Result<Cache> {
        let shape = Shape {
            layers: LAYERS,
            draft_layers: 0,
            runs: [64, 0],
            page_tokens: 16,
            top_k: K as u32,
            ..Shape::GLM_5
        };
        let geometry = Geometry::new(shape)?;
        let bytes = PAGES * geometry.host_page_bytes();
        let all = device.register(total)?;
        let grain = device.granularity();
        let slab_bytes = (4_u64 * 64 * 64).next_multiple_of(grain);
        let tables = TableShape {
            lanes: LANES,
            tokens: 64,
            query_rows: 1,
            scratch: 8,
            waves: 1,
            scratch_base: 1,
            landing_base: 64,
            budget_base: 128,
            budget_blocks: 2,
        };
        let mut slabs = Vec::new();
        let mut rows = Vec::new();
        for layer in 0..u64::from(LAYERS) {
            let backing = device.backing(slab_bytes)?;
            slabs.push(
                device.range(&[Mapped { backing, offset: 0, bytes: slab_bytes }], Protection::ReadWrite)?,
            );
            rows.push(all.part(layer * bytes, bytes)?);
        }
        let plan = PoolLayout {
            geometry: geometry.into(),
            tables: vec![tables; LAYERS as usize],
            slabs: slabs.clone(),
            rows,
            lane_pages: 4,
            micro_batches: 1,
            batch: LANES,
            expected: Default::default(),
        };
        let words = pinned(4096);
        let own = device.register(&words)?;
        let range = |at: u64, count: usize| own.part(at, 4 * count as u64);
        let row = LANES as usize * K;
        let (descriptor, report) =
            (range(0, step::words(LANES))?, range(1024, Report::words(LAYERS, LANES))?);
        let (selection, slots) = (range(2048, row)?, range(3072, row)?);
        let pools = device.attach(plan)?;
        let (stream, event) = (device.stream()?, device.event()?);
        Ok(Cache { pools, stream, event, words, descriptor, report, selection, slots, slabs, device })
    }

    fn at(&self, slice: &Slice) -> u64 {
        words_of(slice, &self.descriptor)
    }

    /// Gives a lane to a sequence of `length` tokens.
    pub fn join(&self, lane: u32, length: u32) -> Result<()> {
        self.join_with(lane, length, 4)
    }

    /// The pages of a lane, `count` of them.
    pub fn pages(lane: u32, count: u32) -> Vec<u32> {
        (0..count).map(|page| lane * 4 + page).collect()
    }

    /// As [`Cache::join`], with `pages` pages of 16 tokens.
    pub fn join_with(&self, lane: u32, length: u32, pages: u32) -> Result<()> {
        let pages = Cache::pages(lane, pages);
        let blocks = vec![vec![lane]; LAYERS as usize];
        let budgets = [12; LAYERS as usize];
        let join = Join { lane: Lane(lane), length, pages: &pages, blocks: &blocks, budgets: &budgets };
        self.device.enqueue(self.pools, self.stream, PoolOp::Join(join))
    }

    pub fn range(layer: u32) -> StepRange {
        let rows = QueryRange { first: 0, count: 1 };
        StepRange { micro_batch: MicroBatch(0), layer: Layer(layer), first: 0, count: LANES, rows }
    }

    /// Writes a step's descriptor and selection.
    pub fn prepare(&self, number: u64, rows: &[Entry], selection: &[i32]) -> Result<()> {
        let mut words = vec![0; step::words(LANES)];
        step::encode(number, rows.iter().copied(), &mut words);
        self.words.copy_in_words(self.at(&self.descriptor), &words)?;
        let mut all: Vec<u32> = selection.iter().map(|position| *position as u32).collect();
        all.resize(LANES as usize * K, u32::MAX);
        self.words.copy_in_words(self.at(&self.selection), &all)
    }

    /// Enqueues a step's operations.
    pub fn enqueue(&self) -> Result<()> {
        let (device, pools, stream) = (&self.device, self.pools, self.stream);
        let begin = Begin { micro_batch: MicroBatch(0), descriptor: self.descriptor, accepted: None };
        device.enqueue(pools, stream, PoolOp::Begin(begin))?;
        for layer in 0..LAYERS {
            let range = Cache::range(layer);
            let output = ResolveOutput { slots: self.slots, split_indices: None };
            device.enqueue(pools, stream, PoolOp::Resolve { range, selection: self.selection, output })?;
            device.enqueue(pools, stream, PoolOp::Gather { range, wave: 0 })?;
            device.enqueue(pools, stream, PoolOp::Scatter(range))?;
        }
        device.enqueue(pools, stream, PoolOp::Report { micro_batch: MicroBatch(0), slot: self.report })
    }

    /// Writes a lane's newest rows of each layer to where a step writes its slots.
    pub fn newest(&self, stream: Stream, lane: u32) -> Result<()> {
        let newest = Newest { lane: Lane(lane), positions: self.slots };
        self.device.enqueue(self.pools, stream, PoolOp::Newest(newest))
    }

    /// A ticket for the enqueued work, and a record of the event after it.
    pub fn ticket(&self) -> Result<Ticket> {
        let (ticket, completer) = Ticket::new();
        self.device.complete(self.stream, completer)?;
        self.device.record(self.event, self.stream)?;
        Ok(ticket)
    }

    /// The last report's words and the last layer's slots.
    pub fn seen(&self) -> (Vec<u32>, Vec<u32>) {
        let words = |slice: &Slice| {
            let mut words = vec![0; (slice.bytes() / 4) as usize];
            self.words.copy_out_words(self.at(slice), &mut words).unwrap();
            words
        };
        (words(&self.report), words(&self.slots))
    }

    /// The slot's bytes in the last layer's slab.
    pub fn slot(&self, slot: u32) -> Slice {
        self.slabs[LAYERS as usize - 1].part(u64::from(slot) * ROW, ROW).unwrap()
    }

    /// A byte of the row at `position` of a lane in the last layer, if no step has written the row.
    pub fn byte(lane: u32, position: i32) -> u8 {
        let pages = u64::from(LAYERS - 1) * PAGES + u64::from(lane) * 4;
        (pages * 16 + position as u64) as u8
    }

    pub fn digests(&self) -> Vec<u64> {
        (0..LANES).map(|lane| self.device.digest(self.pools, Lane(lane)).unwrap()).collect()
    }
}

/// Row `row` of step `number`, as in decode: each step lands one row, and the next step accepts it.
pub fn entry(lane: u32, number: u64) -> Entry {
    Entry { lane, accepted: (number > 1).into(), query_rows: 1 }
}

/// A selection that differs from step to step, for two sequences that have `length` committed tokens.
pub fn selection(number: u64, length: u32) -> Vec<i32> {
    let position = |index: usize| (number as u32 * 7 + index as u32 * 5) % length;
    (0..2 * K).map(|index| position(index) as i32).collect()
}
