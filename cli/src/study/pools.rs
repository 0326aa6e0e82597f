//! Replays a selection trace through the production pools: open, warm up, decode step by step, close.
//!
//! The rows themselves are not moved: a replay counts what would move and enqueues no gather. Residency does not
//! depend on the size of a row, so rows have the minimum size, four bytes, and the total pool is a small address range
//! that nothing touches. Everything else is the code that an engine runs.
//!
//! **Memory** grows with the trace, whatever context it declares: `crate::input::selection_trace` leaves out the
//! positions that no set names if there are more of them than the trace has members. [`needs`] computes how much a
//! replay will hold.
//!
//! The trace is not copied as a whole. Host memory that the device reads holds the selections of one step, and the
//! selections of all requested warm steps, because a warm-up reads them together.

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice};
use forebay::os::{Map, NoFaults, Request};
use forebay::trace::{Header, SelectionTrace};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Result, SLOT_BLOCK, Shape, Slots, WarmUp};

/// One replay of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Slots of the sequence in one layer.
    pub slots: u32,
    /// Prompt steps replayed first, at most the trace's warm steps.
    pub warmup: u32,
    /// Query rows of a decode step, at least 1.
    pub mtp: u32,
    /// Decode steps replayed, at least 1, at most the trace's decode steps / mtp.
    pub steps: u32,
}

/// The counts of one replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Hits and misses of each layer over all steps.
    pub layers: Vec<(u64, u64)>,
    /// Misses of each step over all layers.
    pub steps: Vec<u64>,
}

/// Bytes of the total pool's bookkeeping that a replay on the host takes for each page.
const PAGE: u64 = 256;

/// Bytes of the host's workspaces for each position of a step, and for each slot of a layer.
const SELECTED: u64 = 64;
const SLOT: u64 = 16;

/// Bytes that [`replay_by_layer`] holds in addition to the trace.
///
/// # Errors
/// Errors of the pools that occur without taking memory.
pub fn needs(header: &Header, shape: &Shape, setting: Setting, slots: &[u32]) -> Result<u64> {
    let Setting { warmup, mtp, .. } = setting;
    let slots = filled(header, setting, slots);
    let config = config(header, shape, setting, &slots);
    let footprint = config.footprint(1)?;
    let k = u64::from(header.k);
    let staged = 4 * k * u64::from(header.layers) * (u64::from(mtp) + u64::from(warmup));
    let most = u64::from(slots.iter().max().copied().unwrap_or(0));
    let work = SELECTED * k * u64::from(mtp) + SLOT * most + PAGE * u64::from(config.host_pages);
    Ok(footprint.tables + footprint.step_descriptors + staged + work)
}

/// The slots that a sequence can fill: at most one for each of its tokens.
fn filled(header: &Header, setting: Setting, slots: &[u32]) -> Vec<u32> {
    let most = header.decode_start + setting.steps * setting.mtp;
    slots.iter().map(|slots| (*slots).min(most)).collect()
}

/// Replays the trace on a host device as `setting` says, with pages of `shape`. Calls `progress` after every step.
///
/// # Errors
/// [`forebay::Kind::OutOfMemory`]; any other error is a defect.
pub fn replay(
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    progress: impl FnMut(),
) -> Result<Outcome> {
    let layers = trace.header().layers as usize;
    replay_by_layer(trace, shape, setting, &vec![setting.slots; layers], progress)
}

/// As [`replay`], with slots by layer instead of the setting's.
///
/// # Errors
/// As [`replay`].
pub fn replay_by_layer(
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    slots: &[u32],
    progress: impl FnMut(),
) -> Result<Outcome> {
    replay_on(HostDevice::new(HostOptions::default()), trace, shape, setting, slots, progress)
}

/// As [`replay_by_layer`] on `device`, which nothing else uses. The device releases what a replay took.
///
/// # Errors
/// As [`replay`], and [`forebay::Kind::DeviceFailed`].
pub fn replay_on(
    device: Arc<dyn Device>,
    trace: &SelectionTrace,
    shape: &Shape,
    setting: Setting,
    slots: &[u32],
    mut progress: impl FnMut(),
) -> Result<Outcome> {
    let header = trace.header();
    let Setting { warmup, mtp, steps, .. } = setting;
    let slots = filled(header, setting, slots);
    let (stream, ended) = (device.stream()?, device.event()?);
    let staging = Staging::new(&*device, u64::from(header.layers) * u64::from(mtp), header.k)?;
    let slots_out = device.allocate(u64::from(mtp) * staging.row)?;
    let mut cache = Cache::new(config(header, shape, setting, &slots), device.clone())?;
    let sequence = cache.open(&Open {
        prompt: header.decode_start,
        promised: steps * mtp,
        budget: Budget::ByLayer(slots),
        bring_up: BringUp::Nothing,
    })?;
    cache.append_in_place(sequence, header.decode_start)?;
    let warm = if warmup > 0 { Some(warm_steps(trace, &*device, warmup)?) } else { None };
    let selections = warm.as_ref().map(|warm| warm.slice);
    let warm_up = WarmUp { selections, steps: warmup, ..WarmUp::default() };
    let _ready = cache.join(sequence, stream, warm_up)?;

    let mut outcome = Outcome { layers: vec![(0, 0); header.layers as usize], steps: Vec::new() };
    for group in 0..steps {
        let accepted = Accepted::Rows(if group == 0 { 0 } else { mtp });
        let query_rows = BatchRow { sequence, accepted, query_rows: mtp };
        let mut step = cache.prepare(MicroBatch(0), mtp, &[query_rows], None, stream)?;
        for layer in 0..header.layers {
            let first = u64::from(layer) * u64::from(mtp);
            for query in 0..mtp {
                let positions = trace.selection(header.warm_steps + group * mtp + query, layer);
                staging.write(first + u64::from(query), positions)?;
            }
            let selection = staging.rows(first, u64::from(mtp))?;
            let buffers = Buffers { selection, slots: slots_out, split_indices: None };
            cache.resolve(&step, LayerCall::whole(Layer(layer)), stream, buffers)?;
        }
        cache.finish(&mut step, stream)?;
        // After this wait nothing reads the staged selections any more, and the step can be retired.
        device.record(ended, stream)?;
        device.synchronize(ended)?;
        let retired = cache.retire(step, stream).map_err(|unretired| unretired.error)?;
        for ((hits, misses), count) in outcome.layers.iter_mut().zip(retired.layers()) {
            *hits += u64::from(count.hits);
            *misses += u64::from(count.misses);
        }
        outcome.steps.push(retired.total().1);
        progress();
    }
    cache.close(sequence, stream)?;
    device.record(ended, stream)?;
    device.synchronize(ended)?;
    Ok(outcome)
}

fn config(header: &Header, shape: &Shape, setting: Setting, slots: &[u32]) -> Config {
    let Setting { mtp, steps, .. } = setting;
    let shape = Shape {
        layers: header.layers,
        draft_layers: 0,
        index_key_bytes: 0,
        top_k: header.k,
        runs: [4, 0],
        host_stride: 4,
        device_block_align: 1,
        // A trace has a selection for each of its layers.
        lone_layers: 0,
        group_layers: 0,
        ..*shape
    };
    // The last step's rows are in flight beyond the promised tokens.
    let tokens = header.decode_start + (steps + 1) * mtp;
    let least = slots.iter().min().copied().unwrap_or(0);
    let blocks = |slots: &u32| slots.div_ceil(SLOT_BLOCK).saturating_mul(SLOT_BLOCK);
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        query_rows: mtp,
        memory,
        steps_in_flight: 1,
        residency_only: true,
        slots: Slots::ByLayer(slots.iter().map(blocks).collect()),
        ..Config::new(shape, 1, tokens, least)
    }
}

/// The last `steps` warm steps, `[layers][steps][k]` i32.
fn warm_steps(trace: &SelectionTrace, device: &dyn Device, steps: u32) -> Result<Staging> {
    let header = trace.header();
    let staging = Staging::new(device, u64::from(header.layers) * u64::from(steps), header.k)?;
    let mut row = 0;
    for layer in 0..header.layers {
        for step in header.warm_steps - steps..header.warm_steps {
            staging.write(row, trace.selection(step, layer))?;
            row += 1;
        }
    }
    Ok(staging)
}

/// Selections of query rows in host memory that the device reads: k words each.
struct Staging {
    map: Arc<Map>,
    slice: Slice,
    /// Bytes of a row.
    row: u64,
}

impl Staging {
    fn new(device: &dyn Device, rows: u64, k: u32) -> Result<Staging> {
        let row = u64::from(k) * 4;
        let bytes = rows * row;
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: false };
        let map = Arc::new(Map::new(&request, &NoFaults)?.0);
        let slice = device.register(&map)?.part(0, bytes)?;
        Ok(Staging { map, slice, row })
    }

    /// Positions as i32 words; the rest of a short selection is -1.
    fn write(&self, row: u64, positions: &[u32]) -> Result<()> {
        let (start, bytes) = (row * self.row, positions.len() as u64 * 4);
        self.map.copy_in_words(start, positions)?;
        self.map.fill(start + bytes, self.row.saturating_sub(bytes), 0xFF)
    }

    fn rows(&self, first: u64, count: u64) -> Result<Slice> {
        self.slice.part(first * self.row, count * self.row)
    }
}
