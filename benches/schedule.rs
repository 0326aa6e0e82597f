//! Claims: simulating one 61-layer step in the order DBA takes under 2 ms on one core; the schedule costs under 2 us
//! per layer on the host device.
//!
//! The simulated step is V3.2's: two micro-batches of 80 on four streams each, two query rows, about 3,000 calls of a
//! clock device without memory, enqueued and run. The cost of the schedule is the difference between two ways to
//! enqueue a layer on an inline host device: by the schedule, with callbacks that do nothing, and by its resolves,
//! gathers and scatters alone. Their batch rows are beyond the real batch, so they move nothing, and moved rows do not
//! drown the difference.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::sync::Arc;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::device::clock::{ClockDevice, ClockOptions, Demand, Label};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{
    Begin, Device, Mapped, PoolLayout, PoolOp, Pools, ResolveOutput, Slice, SplitIndices, StepRange, Stream,
};
use forebay::os::Protection;
use forebay::overlap::{
    Attended, Engine, EngineCall, Overlap, OverlapStreams, Run, Schedule, Work, enqueue_layer, enqueue_step,
};
use forebay::residency::{QueryRange, TableShape};
use forebay::{Error, Geometry, Kind, Layer, MicroBatch, Result, Shape};
use race::{Side, claim, done, race, record};

const LAYERS: u32 = 61;
const QUERY_ROWS: u32 = 2;
/// The most milliseconds of one simulated step.
const MOST_MS: f64 = 2.0;
/// The most microseconds that the schedule of one layer may cost.
const MOST_US: f64 = 2.0;

/// Two micro-batches on a device: pools, schedules, and the calls that begin and end each step.
struct Rig {
    pools: Pools,
    runs: Vec<Run>,
    descriptor: Slice,
    report: Slice,
}

impl Rig {
    fn new(device: &dyn Device, shape: Shape, batch: u32, slab: impl Fn() -> Result<Slice>) -> Result<Rig> {
        let geometry = Geometry::new(shape)?;
        let tables = TableShape {
            lanes: 1,
            tokens: 64,
            query_rows: QUERY_ROWS,
            scratch: 64,
            waves: 1,
            scratch_base: 64,
            landing_base: 128,
            budget_base: 192,
            budget_blocks: 1,
        };
        let all = LAYERS as usize;
        let rows = device.allocate(geometry.host_page_bytes())?;
        let pools = device.attach(PoolLayout {
            geometry: geometry.into(),
            tables: vec![tables; all],
            slabs: vec![slab()?; all],
            rows: vec![rows; all],
            lane_pages: 1,
            micro_batches: 2,
            batch,
            expected: Default::default(),
        })?;
        let words = |count: u32| device.allocate(4 * u64::from(count));
        let entries = batch * QUERY_ROWS * shape.top_k;
        let run = |micro_batch| {
            let streams = OverlapStreams {
                compute: device.stream()?,
                resolve: device.stream()?,
                gather: device.stream()?,
                scatter: device.stream()?,
            };
            let (lists, counts) = (words(2 * entries)?, words(2 * batch * QUERY_ROWS)?);
            Ok(Run {
                geometry: geometry.into(),
                moves: true,
                schedule: Schedule::new(device)?,
                micro_batch: MicroBatch(micro_batch),
                batch,
                half: batch / 2,
                query_rows: QUERY_ROWS,
                top_k: shape.top_k,
                waves: 1,
                streams,
                selection: words(entries)?,
                slots: words(entries)?,
                split_indices: Some(SplitIndices { lists, counts, batch }),
            })
        };
        let runs = vec![run(0)?, run(1)?];
        Ok(Rig { pools, runs, descriptor: words(1024)?, report: words(1024)? })
    }
}

/// V3.2's work on the clock: shares and times of realistic size.
struct Planned<'a>(&'a ClockDevice);

impl Engine for Planned<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let (name, ns, sm) = match call.work {
            Work::Project => ("project", 60e3, 0.8),
            Work::Index => ("index", 80e3, 0.9),
            Work::Prepare => ("prepare", 25e3, 0.6),
            Work::Attend(Attended::Fetched { .. }) => ("attend to fetched", 20e3, 0.9),
            Work::Attend(_) => ("attend", 90e3, 0.9),
            Work::Merge => ("merge", 5e3, 0.5),
            Work::Rest => ("rest", 300e3, 0.9),
        };
        let (layer, micro_batch) = (Some(call.layer), Some(call.micro_batch));
        self.0.compute(stream, Label { name, layer, micro_batch }, Demand { ns, sm })
    }
}

/// An engine that does nothing.
struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _call: &EngineCall, _stream: Stream) -> Result<()> {
        Ok(())
    }
}

/// Runs steps on the clock: begins, layers, reports, until all work is done.
fn simulate(device: &ClockDevice, rig: &Rig, steps: u64) -> Result<(Duration, u64)> {
    let orders = [Overlap::Dba; LAYERS as usize];
    let lap = Lap::begin();
    for _ in 0..steps {
        device.reset()?;
        for layer in 0..LAYERS {
            device.set_misses(Layer(layer), f64::from(100 + layer))?;
        }
        for run in &rig.runs {
            let begin = Begin { micro_batch: run.micro_batch, descriptor: rig.descriptor, accepted: None };
            device.enqueue(rig.pools, run.streams.compute, PoolOp::Begin(begin))?;
        }
        enqueue_step(device, rig.pools, &rig.runs, &orders, 0, 0, &mut Planned(device))?;
        for run in &rig.runs {
            run.schedule.join(device, &run.streams, run.streams.compute)?;
            device.enqueue(
                rig.pools,
                run.streams.compute,
                PoolOp::Report { micro_batch: run.micro_batch, slot: rig.report },
            )?;
        }
        let ns = device.run()?;
        if !(1e6..1e9).contains(&ns) {
            return Err(Error::new(Kind::Internal, "simulated step").at(format!("{ns} ns")));
        }
    }
    Ok((lap.end(), steps))
}

/// Enqueues one layer's operations in the order DBA, without the schedule.
fn operations(device: &HostDevice, rig: &Rig, layer: Layer) -> Result<()> {
    let run = &rig.runs[0];
    let OverlapStreams { resolve, gather, scatter, .. } = run.streams;
    let rows = QueryRange { first: 0, count: QUERY_ROWS };
    for (first, count) in [(0, run.half), (run.half, run.batch - run.half)] {
        let range = StepRange { micro_batch: run.micro_batch, layer, first, count, rows };
        let words = 4 * u64::from(QUERY_ROWS * run.top_k);
        let of = |slice: Slice| slice.part(u64::from(first) * words, u64::from(count) * words);
        let output = ResolveOutput { slots: of(run.slots)?, split_indices: run.split_indices };
        device.enqueue(
            rig.pools,
            resolve,
            PoolOp::Resolve { range, selection: of(run.selection)?, output },
        )?;
        device.enqueue(rig.pools, gather, PoolOp::Gather { range, wave: 0 })?;
    }
    let range = StepRange { micro_batch: run.micro_batch, layer, first: 0, count: run.batch, rows };
    device.enqueue(rig.pools, scatter, PoolOp::Scatter(range))
}

/// Enqueues layers on the host device: by the schedule, or the operations alone.
fn layers(device: &HostDevice, rig: &Rig, scheduled: bool, steps: u64) -> Result<(Duration, u64)> {
    let run = &rig.runs[0];
    let lap = Lap::begin();
    for _ in 0..steps {
        for layer in (0..LAYERS).map(Layer) {
            if scheduled {
                enqueue_layer(device, rig.pools, run, layer, None, Overlap::Dba, &mut Idle)?;
            } else {
                operations(device, rig, layer)?;
            }
        }
    }
    Ok((lap.end(), steps * u64::from(LAYERS)))
}

fn main() -> Result<()> {
    let clock = ClockDevice::new(ClockOptions::default())?;
    let planned = Rig::new(&*clock, Shape::DEEPSEEK_V3_2, 80, || clock.allocate(1 << 40))?;
    let spans = ClockDevice::new(ClockOptions { record: true, ..ClockOptions::default() })?;
    let recorded = Rig::new(&*spans, Shape::DEEPSEEK_V3_2, 80, || spans.allocate(1 << 40))?;
    let host: Arc<HostDevice> = HostDevice::new(HostOptions::default());
    let small =
        Shape { runs: [32, 0], index_key_bytes: 8, page_tokens: 16, top_k: 8, ..Shape::DEEPSEEK_V3_2 };
    let grain = host.granularity().max(1 << 16);
    let slab = || {
        host.range(
            &[Mapped { backing: host.backing(grain)?, offset: 0, bytes: grain }],
            Protection::ReadWrite,
        )
    };
    let inline = Rig::new(&*host, small, 2, slab)?;

    let mut sides = [
        Side::new("simulated step", || done(simulate(&clock, &planned, 10))),
        Side::new("simulated step, spans kept", || done(simulate(&spans, &recorded, 10))),
        Side::new("layer by the schedule", || done(layers(&host, &inline, true, 200))),
        Side::new("layer without it", || done(layers(&host, &inline, false, 200))),
    ];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "schedule", &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    criterion.final_summary();
    let ms = 1e3 / rounds.rate("simulated step");
    println!("one step of {LAYERS} layers, two micro-batches, DBA: {ms:.3} ms simulated");
    let kept = rounds.ratio("simulated step", "simulated step, spans kept");
    println!("the same with its spans kept takes {kept:.2} times as long");
    let us = |side| 1e6 / rounds.rate(side);
    let (with, without) = (us("layer by the schedule"), us("layer without it"));
    println!("a layer on the host device: {with:.3} us by the schedule, {without:.3} us without it");
    claim("2 ms against a simulated step", MOST_MS / ms, 1.0);
    claim("2 us against the schedule of a layer", MOST_US / (with - without), 1.0);
    Ok(())
}
