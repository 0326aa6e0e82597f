//! Claim: gathering random 656-byte rows from more than 1 GiB, and scattering as many, reaches at least 60% of the rate
//! of one large memcpy of as many bytes, at a host stride of 704 bytes.
//!
//! The gather is the device's own, of 64 lanes in one call: 2,048 rows each, drawn at random from the lane's 32,768,
//! whose pages are scattered over the pool; 82 MiB per call. The scatter covers 512 lanes in 192 layers: each row goes
//! to a page of its own. The bench compares the rows of every call with the expected ones. It also runs both at stride
//! 656, and with the pool on 4 KiB pages in place of huge ones. It measures the memcpy on both kinds of pages; the
//! claim is against the faster one.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::sync::Arc;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::device::descriptor::Entry;
use forebay::device::descriptor::step::{encode, words};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{
    Begin, Device, Join, PoolLayout, PoolOp, Pools, ResolveOutput, Slice, StepRange, Stream,
};
use forebay::os::{Map, NoFaults, Request};
use forebay::residency::{QueryRange, TableShape};
use forebay::{Geometry, Lane, Layer, MicroBatch, Result, SLOT_BLOCK, Shape};
use race::{Side, claim, done, race, record};

const ROW: u32 = 656;

/// A small random number generator with a fixed seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (((word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 32) as usize) % end
    }

    fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count).collect();
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last + 1));
        }
        all
    }
}

/// The settings of a pool.
#[derive(Clone, Copy)]
struct Extents {
    layers: u32,
    lanes: u32,
    tokens: u32,
    k: u32,
    page: u32,
    stride: u32,
    huge: bool,
}

/// The first landing slot; each lane has one from there on.
const LANDING: u32 = 64;

/// Pools on the inline host device, driven by the device's own calls.
struct Rig {
    extents: Extents,
    device: Arc<HostDevice>,
    stream: Stream,
    pools: Pools,
    rows: Vec<Slice>,
    slabs: Vec<Slice>,
    pages: Vec<u32>,
    descriptor: Slice,
    slots: Slice,
    /// The selections of consecutive steps: no position repeats until all have been selected.
    selections: Vec<Slice>,
    steps: u64,
}

impl Rig {
    fn new(extents: Extents) -> Result<Rig> {
        let Extents { layers, lanes, tokens, k, page, stride, huge } = extents;
        let shape = Shape {
            layers,
            top_k: k,
            host_stride: stride,
            page_tokens: page,
            runs: [ROW, 0],
            ..Shape::DEEPSEEK_V3_2
        };
        let geometry = Geometry::new(shape)?;
        let device = HostDevice::new(HostOptions::default());
        let budget_base = (LANDING + lanes).next_multiple_of(SLOT_BLOCK);
        let blocks = k.div_ceil(SLOT_BLOCK);
        let tables = TableShape {
            lanes,
            tokens: tokens + 1,
            query_rows: 1,
            scratch: 0,
            waves: 1,
            scratch_base: 1,
            landing_base: LANDING,
            budget_base,
            budget_blocks: lanes * blocks,
        };
        let lane_pages = (tokens + 1).div_ceil(page);
        let one_layer = geometry.host_page_bytes() * u64::from(lane_pages * lanes);
        let slab_bytes =
            u64::from(budget_base / SLOT_BLOCK + lanes * blocks) * u64::from(geometry.block_bytes());
        let layers = u64::from(layers);
        let rows = split_indices(memory(&device, layers * one_layer, huge)?, one_layer)?;
        let slabs = split_indices(device.allocate(layers * slab_bytes)?, slab_bytes)?;
        let plan = PoolLayout {
            geometry: geometry.into(),
            tables: vec![tables; extents.layers as usize],
            slabs: slabs.clone(),
            rows: rows.clone(),
            lane_pages,
            micro_batches: 1,
            batch: lanes,
            expected: Default::default(),
        };
        let rig = Rig {
            extents,
            stream: device.stream()?,
            pools: device.attach(plan)?,
            rows,
            slabs,
            pages: Numbers(1).shuffled(lane_pages * lanes),
            descriptor: device.allocate(4 * words(lanes) as u64)?,
            slots: device.allocate(u64::from(4 * lanes * k))?,
            selections: Vec::new(),
            steps: 0,
            device,
        };
        // The bench writes the landing rows first: memory that was never written is one page of zeros, read from the
        // cache.
        let landing = vec![1; (lanes * ROW) as usize];
        for slab in &rig.slabs {
            let rows = slab.part(u64::from(LANDING * ROW), landing.len() as u64)?;
            rig.device.write(rows, &landing)?;
        }
        for lane in 0..lanes {
            let pages = &rig.pages[(lane * lane_pages) as usize..][..lane_pages as usize];
            let own: Vec<u32> = (lane * blocks..(lane + 1) * blocks).collect();
            let (blocks, budgets) = (vec![own; extents.layers as usize], vec![k; extents.layers as usize]);
            let join = Join { lane: Lane(lane), length: tokens, pages, blocks: &blocks, budgets: &budgets };
            rig.device.enqueue(rig.pools, rig.stream, PoolOp::Join(join))?;
        }
        Ok(rig)
    }

    /// Draws the selections: each lane's positions in random order, `k` per step.
    fn select(&mut self) -> Result<()> {
        let Extents { lanes, tokens, k, .. } = self.extents;
        let mut numbers = Numbers(2);
        let orders: Vec<Vec<u32>> = (0..lanes).map(|_| numbers.shuffled(tokens)).collect();
        for step in 0..(tokens / k) as usize {
            let of_lane = |order: &Vec<u32>| order[step * k as usize..][..k as usize].to_vec();
            let bytes: Vec<u8> = orders.iter().flat_map(of_lane).flat_map(u32::to_le_bytes).collect();
            let selection = self.device.allocate(bytes.len() as u64)?;
            self.device.write(selection, &bytes)?;
            self.selections.push(selection);
        }
        Ok(())
    }

    /// Begins a step: no row is accepted, and one row lands in every lane. Lanes come in shuffled order.
    fn begin(&mut self, order: &[u32]) -> Result<()> {
        self.steps += 1;
        let mut descriptor = vec![0; words(self.extents.lanes)];
        let entries = order.iter().map(|lane| Entry { lane: *lane, accepted: 0, query_rows: 1 });
        encode(self.steps, entries, &mut descriptor);
        let bytes: Vec<u8> = descriptor.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.device.write(self.descriptor, &bytes)?;
        let begin = Begin { micro_batch: MicroBatch(0), descriptor: self.descriptor, accepted: None };
        self.device.enqueue(self.pools, self.stream, PoolOp::Begin(begin))
    }

    fn range(&self, layer: u32) -> StepRange {
        let rows = QueryRange { first: 0, count: 1 };
        StepRange {
            micro_batch: MicroBatch(0),
            layer: Layer(layer),
            first: 0,
            count: self.extents.lanes,
            rows,
        }
    }

    /// Returns the place of a lane's position in its layer's rows.
    fn host_row(&self, layer: u32, lane: u32, position: u32) -> Result<Slice> {
        let size = self.extents.page;
        let lane_pages = (self.extents.tokens + 1).div_ceil(size);
        let page = self.pages[(lane * lane_pages + position / size) as usize];
        let row = u64::from(page * size + position % size);
        self.rows[layer as usize].part(row * u64::from(self.extents.stride), u64::from(ROW))
    }

    fn slot_row(&self, layer: u32, slot: u32) -> Result<Slice> {
        self.slabs[layer as usize].part(u64::from(slot) * u64::from(ROW), u64::from(ROW))
    }

    fn first_word(&self, row: Slice) -> Result<u32> {
        let mut word = [0; 4];
        self.device.read(row.part(0, 4)?, &mut word)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Runs one step's gather: every selected row is a miss.
    fn gather(&mut self, order: &[u32]) -> Result<(Duration, u64)> {
        self.begin(order)?;
        let selection = self.selections[self.steps as usize % self.selections.len()];
        let output = ResolveOutput { slots: self.slots, split_indices: None };
        self.device.enqueue(
            self.pools,
            self.stream,
            PoolOp::Resolve { range: self.range(0), selection, output },
        )?;
        let lap = Lap::begin();
        self.device.enqueue(self.pools, self.stream, PoolOp::Gather { range: self.range(0), wave: 0 })?;
        let time = lap.end();
        let last = u64::from(self.extents.lanes * self.extents.k - 1);
        for (lane, word) in [(order.first(), 0), (order.last(), last)] {
            let word = |slice: Slice| self.first_word(slice.part(4 * word, 4)?);
            let (slot, position) = (word(self.slots)?, word(selection)?);
            let lane = lane.copied().unwrap_or_default();
            let (got, want) = (self.slot_row(0, slot)?, self.host_row(0, lane, position)?);
            assert_eq!(self.first_word(got)?, self.first_word(want)?, "a row that was gathered");
        }
        Ok((time, u64::from(self.extents.lanes * self.extents.k * ROW)))
    }

    /// Runs one step's scatter, in every layer.
    fn scatter(&mut self, order: &[u32]) -> Result<(Duration, u64)> {
        self.begin(order)?;
        let stamp = (self.steps as u32).to_le_bytes();
        let landing = self.slot_row(0, LANDING + order[0])?.part(0, 4)?;
        self.device.write(landing, &stamp)?;
        let lap = Lap::begin();
        for layer in 0..self.extents.layers {
            self.device.enqueue(self.pools, self.stream, PoolOp::Scatter(self.range(layer)))?;
        }
        let time = lap.end();
        let row = self.host_row(0, order[0], self.extents.tokens)?;
        assert_eq!(self.first_word(row)?, self.steps as u32, "the row that was scattered");
        Ok((time, u64::from(self.extents.layers * self.extents.lanes * ROW)))
    }
}

/// Returns a slice in parts of `bytes`, one per layer.
fn split_indices(whole: Slice, bytes: u64) -> Result<Vec<Slice>> {
    (0..whole.bytes() / bytes).map(|layer| whole.part(layer * bytes, bytes)).collect()
}

/// Returns device memory with every page touched and every word stamped: on huge pages if the system has them, or on
/// base pages like shared memory.
fn memory(device: &Arc<HostDevice>, bytes: u64, huge: bool) -> Result<Slice> {
    let slice = if huge {
        device.allocate(bytes)?
    } else {
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
        device.register(&Arc::new(Map::new(&request, &NoFaults)?.0))?.part(0, bytes)?
    };
    const CHUNK: u64 = 1 << 20;
    let mut word = 0_u32;
    for at in (0..bytes).step_by(CHUNK as usize) {
        let here = CHUNK.min(bytes - at);
        let stamps: Vec<u8> =
            (0..here / 4).flat_map(|i| (word.wrapping_add(i as u32)).to_le_bytes()).collect();
        device.write(slice.part(at, here)?, &stamps)?;
        word = word.wrapping_add((here / 4) as u32);
    }
    Ok(slice)
}

const GATHER: Extents =
    Extents { layers: 1, lanes: 64, tokens: 32_768, k: 2048, page: 64, stride: 704, huge: true };
const SCATTER: Extents =
    Extents { layers: 192, lanes: 512, tokens: 15, k: 1, page: 16, stride: 704, huge: true };

fn gather_side(name: &'static str, extents: Extents) -> Result<Side<'static>> {
    let mut rig = Rig::new(extents)?;
    rig.select()?;
    let order: Vec<u32> = (0..extents.lanes).collect();
    Ok(Side::new(name, move || done(rig.gather(&order))))
}

fn scatter_side(name: &'static str, extents: Extents) -> Result<Side<'static>> {
    let mut rig = Rig::new(extents)?;
    let order = Numbers(3).shuffled(extents.lanes);
    Ok(Side::new(name, move || done(rig.scatter(&order))))
}

/// Runs one memcpy of `bytes` between two buffers of device memory, or of the heap.
fn memcpy_sides(bytes: u64) -> Result<[Side<'static>; 2]> {
    let device = HostDevice::new(HostOptions::default());
    let stream = device.stream()?;
    let (from, to) = (memory(&device, bytes, true)?, memory(&device, bytes, true)?);
    let huge = move || {
        let lap = Lap::begin();
        done(device.copy(stream, from, to));
        (lap.end(), bytes)
    };
    let source = vec![1_u8; bytes as usize];
    let mut target = vec![2_u8; bytes as usize];
    let base = move || {
        let lap = Lap::begin();
        // The same as ptr::copy_nonoverlapping of all bytes: one memcpy.
        target.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&mut target);
        (lap.end(), bytes)
    };
    Ok([Side::new("memcpy, huge pages", huge), Side::new("memcpy, 4 KiB pages", base)])
}

fn main() -> Result<()> {
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    let bytes = u64::from(GATHER.lanes * GATHER.k * ROW);
    for (what, side, base) in [
        ("gather", gather_side as fn(&'static str, Extents) -> Result<Side<'static>>, GATHER),
        ("scatter", scatter_side, SCATTER),
    ] {
        let [huge_copy, base_copy] = memcpy_sides(bytes)?;
        let mut sides = [
            huge_copy,
            base_copy,
            side("stride 704", base)?,
            side("stride 656", Extents { stride: 656, ..base })?,
            side("stride 704, 4 KiB pages", Extents { huge: false, ..base })?,
        ];
        record(&mut criterion, what, &mut sides);
        let rounds = race(9, &mut sides);
        for side in &sides {
            println!("{what}, {}: {:.2} GB a second", side.name, rounds.rate(side.name) / 1e9);
        }
        for side in &sides[2..] {
            let [huge, base] = [0, 1].map(|copy: usize| rounds.ratio(side.name, sides[copy].name));
            claim(&format!("{what}, {}, against one memcpy", side.name), huge.min(base), 0.6);
        }
    }
    criterion.final_summary();
    Ok(())
}
