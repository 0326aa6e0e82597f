//! One step on the clock: streams, buffers that are only addresses, the schedule, and the end of each layer.

use super::batch::{Batch, draft_passes};
use super::engine::{Costed, layer_us};
use super::point::{Traffic, bad};
use super::sharded::{OnClock, Sharded};
use crate::device::clock::{
    ClockDevice, ClockOptions, Costs, Demand, Direction, Kernel, Label, Link, Mover, Peer, Span,
};
use crate::device::{Begin, Device, Event, PoolLayout, PoolOp, Pools, Slice, SplitIndices};
use crate::error::Result;
use crate::geometry::{Geometries, Geometry, Shape};
use crate::ids::{Layer, MicroBatch};
use crate::overlap::{Overlap, OverlapStreams, Run, Schedule, enqueue_step};
use crate::predict::cost::Load;
use crate::predict::setup::{Setup, Term};
use crate::sync::Arc;
use crate::weights::Ring;

/// The pacing of background traffic, which is not a work and not in a timeline.
const PACE: &str = "pace";

/// The most pieces of background traffic in one direction.
const PIECES_MAX: f64 = 262_144.0;

/// End times.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// The whole step.
    pub total_ns: f64,
    /// The part in which the engine computes.
    pub busy_ns: f64,
    /// From one layer's end to the next's; a draft layer's passes together.
    pub layers_ns: Vec<f64>,
    /// The timeline.
    pub spans: Vec<Span>,
}

/// A clock with the streams of a step.
pub struct World {
    device: Arc<ClockDevice>,
    pools: Pools,
    batch: Batch,
    shape: Shape,
    runs: Vec<Run>,
    words: Slice,
    /// By micro-batch, the ends of its layers and passes, in the order in which they run.
    ends: Vec<Vec<Event>>,
    done: Event,
    /// By layer, how many times longer its works take; empty if none does.
    slower: Vec<f64>,
    /// The ring, if weights are pulled.
    ring: Option<Ring<OnClock>>,
}

/// The clock's costs from a setup.
pub fn costs(setup: &Setup) -> Costs {
    let (rates, own) = (setup.rates(), &setup.file().operations);
    let (up, down) = (rates.gather.line(), rates.scatter.line());
    let fixed = |us: f64| rates.launch_ns + us * 1e3;
    let kernel = |us, row_us: f64| Kernel { fixed_ns: fixed(us), row_ns: row_us * 1e3, sm: 0.0 };
    let mover = |(line_ns, rate), sm| Mover { fixed_ns: fixed(own.move_us) + line_ns, rate, sm };
    let default = Costs::default();
    Costs {
        // An engine's works include their launches.
        launch_ns: 0.0,
        link: Link {
            to_device: rates.copy_up.max(up.1),
            to_host: rates.copy_down.max(down.1),
            duplex: 1.0,
            copy_engines: rates.copy_engines,
        },
        peer: Peer {
            rate: setup.file().deployment.nvlink_gb_s.map_or(default.peer.rate, |gb_s| gb_s * 1e9),
            ..default.peer
        },
        device_copy: setup.file().gpu.memory_gb_s * 1e9,
        copy_ns: rates.launch_ns,
        resolve: kernel(own.resolve_us, own.resolve_row_us),
        resolve_wave: None,
        begin: kernel(own.step_us / 2.0, 0.0),
        report: kernel(own.step_us / 2.0, 0.0),
        gather: mover(up, rates.gather_sm),
        scatter: mover(down, 0.0),
        ..default
    }
}

impl World {
    /// For steps of the setup's model.
    pub fn new(setup: &Setup, batch: &Batch, record: bool) -> Result<World> {
        World::build(setup, batch, *setup.shape(), record)
    }

    /// For a step of some layers only, in groups of `group`.
    pub fn of_layers(setup: &Setup, batch: &Batch, layers: u32, group: u32) -> Result<World> {
        let shape = Shape { layers, draft_layers: 0, lone_layers: 0, group_layers: group, ..*setup.shape() };
        World::build(setup, batch, shape, false)
    }

    fn build(setup: &Setup, batch: &Batch, mut shape: Shape, record: bool) -> Result<World> {
        if draft_passes(batch) == 0 {
            shape.draft_layers = 0;
        }
        let device =
            ClockDevice::new(ClockOptions { costs: costs(setup), record, ..ClockOptions::default() })?;
        let micro_batches = batch.micro_batches();
        let geometry = Geometries::from(Geometry::new(shape)?);
        let pools = device.attach(PoolLayout {
            geometry: geometry.clone(),
            tables: Vec::new(),
            slabs: Vec::new(),
            rows: Vec::new(),
            lane_pages: 0,
            micro_batches: micro_batches as u32,
            batch: batch.rows[0],
            expected: Default::default(),
        })?;
        let shared = device.stream()?;
        let mut runs = Vec::with_capacity(micro_batches);
        for (i, rows) in batch.rows.into_iter().take(micro_batches).enumerate() {
            let compute = if batch.fill && i > 0 { device.stream()? } else { shared };
            let (resolve, gather, scatter) = (device.stream()?, device.stream()?, device.stream()?);
            let streams = OverlapStreams { compute, resolve, gather, scatter };
            runs.push(run_of(&*device, batch, rows, i as u32, &geometry, streams)?);
        }
        let passes = draft_passes(batch) as usize * shape.draft_layers as usize;
        let ends = (0..micro_batches).map(|_| {
            (0..shape.layers as usize + passes).map(|_| device.event()).collect::<Result<Vec<Event>>>()
        });
        let ends = ends.collect::<Result<_>>()?;
        let (words, done) = (device.allocate(4)?, device.event()?);
        let (batch, slower, ring) = (*batch, Vec::new(), None);
        Ok(World { pools, batch, shape, runs, words, ends, done, device, slower, ring })
    }

    /// Makes works take as long as beside the pulls of sharded weights, and with `pulls` pulls these weights. Before
    /// all else: the clock begins again when the first layers are there.
    pub fn shard(&mut self, sharded: &Sharded, pulls: bool) -> Result<()> {
        self.slower.clone_from(&sharded.slower);
        if pulls {
            self.ring = Some(sharded.ring(&self.device, &self.batch)?);
            self.device.reset()?;
        }
        Ok(())
    }

    /// Copies during the step for `enough_ns`, at rates that the link supports.
    pub fn background(&mut self, traffic: Traffic, enough_ns: f64) -> Result<()> {
        let Traffic { to_device, to_host } = traffic;
        for (name, direction, rate) in
            [("traffic up", Direction::ToDevice, to_device), ("traffic down", Direction::ToHost, to_host)]
        {
            if rate == 0.0 {
                continue;
            }
            let (piece, stream) = (1_u64 << 20, self.device.stream()?);
            let every_ns = piece as f64 / rate * 1e9;
            let label = |name| Label { name, layer: None, micro_batch: None };
            let pieces = (enough_ns / every_ns).ceil();
            if pieces > PIECES_MAX {
                return Err(bad("traffic: more than the simulator supports during a step")
                    .with("MiB", pieces as u64)
                    .with("most", PIECES_MAX as u64));
            }
            // A pacing stream decides when each piece may start, so that a slow piece does not delay the next.
            let (pace, go) = (self.device.stream()?, self.device.event()?);
            for _ in 0..pieces as u64 {
                self.device.compute(pace, label(PACE), Demand { ns: every_ns, sm: 0.0 })?;
                self.device.record(go, pace)?;
                self.device.wait(stream, go)?;
                self.device.traffic(stream, label(name), direction, piece)?;
            }
        }
        Ok(())
    }

    /// Runs one step: `misses` and `orders` by layer, `share`: the fraction of a request's misses that a query row
    /// reads.
    pub fn step(&mut self, setup: &Setup, misses: &[f64], share: f64, orders: &[Overlap]) -> Result<Times> {
        for (layer, rows) in (0..).map(Layer).zip(misses) {
            self.device.set_misses(layer, *rows)?;
        }
        let device: &dyn Device = &*self.device;
        for run in &self.runs {
            let begin = Begin { micro_batch: run.micro_batch, descriptor: self.words, accepted: None };
            device.enqueue(self.pools, run.streams.compute, PoolOp::Begin(begin))?;
        }
        if self.batch.fill
            && let Some(second) = self.runs.get(1)
        {
            // Half a layer later, so that the two do not wait at the same time.
            let ns = layer_us(setup, &self.batch, self.batch.rows[0])? * 1e3 / 2.0;
            let label = Label { name: "stagger", layer: None, micro_batch: Some(second.micro_batch) };
            self.device.compute(second.streams.compute, label, Demand { ns, sm: 0.0 })?;
        }
        let engine = Costed::new(&self.device, setup, &self.batch, misses, share, &self.ends);
        let mut engine = engine.beside(&self.slower, self.ring.as_mut());
        let (draft_layers, draft_passes) = (self.shape.draft_layers, draft_passes(&self.batch));
        enqueue_step(device, self.pools, &self.runs, orders, draft_layers, draft_passes, &mut engine)?;
        let busy_ns = engine.busy_us * 1e3;
        self.finish(setup)?;
        self.device.synchronize(self.done)?;
        Ok(self.times(busy_ns))
    }

    /// The works that follow the layers, once a step, after all micro-batches.
    fn finish(&mut self, setup: &Setup) -> Result<()> {
        let device = &*self.device;
        let Some(main) = self.runs.first() else { return Ok(()) };
        for run in &self.runs {
            run.schedule.join(device, &run.streams, run.streams.compute)?;
            let report = PoolOp::Report { micro_batch: run.micro_batch, slot: self.words };
            device.enqueue(self.pools, run.streams.compute, report)?;
            if run.streams.compute != main.streams.compute {
                device.record(self.done, run.streams.compute)?;
                device.wait(main.streams.compute, self.done)?;
            }
        }
        let load = Load {
            rows: self.batch.rows.iter().sum::<u32>().into(),
            query_rows: self.batch.query_rows.into(),
            context: self.batch.context.into(),
            width: self.shape.top_k.into(),
        };
        let ns = setup.us(Term::Step, &load)? * 1e3;
        let label = Label { name: "step", layer: None, micro_batch: None };
        device.compute(main.streams.compute, label, Demand { ns, sm: 1.0 })?;
        if let Some(ring) = &mut self.ring {
            ring.end(main.streams.compute)?;
            for stream in (0..).map_while(|buffer| ring.stream(buffer)) {
                device.edge(self.done, stream, main.streams.compute)?;
            }
        }
        device.record(self.done, main.streams.compute)
    }

    fn times(&self, busy_ns: f64) -> Times {
        let reached = |event| self.device.reached(event).unwrap_or(0.0);
        let layers = (self.shape.layers + self.shape.draft_layers) as usize;
        let mut layers_ns = vec![0.0; layers];
        let mut before = 0.0;
        let once = self.shape.layers as usize;
        let count = self.ends.first().map_or(0, Vec::len);
        for i in 0..count {
            let end = self.ends.iter().map(|ends| reached(ends[i])).fold(0.0, f64::max);
            // Draft passes run one after the other, each over all draft layers.
            let layer = if i < once { i } else { once + (i - once) % (layers - once) };
            layers_ns[layer] += end - before;
            before = end;
        }
        let spans = self.device.spans().into_iter().filter(|span| span.name != PACE).collect();
        Times { total_ns: reached(self.done), busy_ns, layers_ns, spans }
    }
}

fn run_of(
    device: &dyn Device,
    batch: &Batch,
    rows: u32,
    micro_batch: u32,
    geometry: &Geometries,
    streams: OverlapStreams,
) -> Result<Run> {
    let top_k = geometry.shape().top_k;
    let list = u64::from(rows) * u64::from(batch.query_rows) * u64::from(top_k) * 4;
    let counts = u64::from(rows) * u64::from(batch.query_rows) * 4;
    Ok(Run {
        geometry: geometry.clone(),
        moves: true,
        schedule: Schedule::new(device)?,
        micro_batch: MicroBatch(micro_batch),
        batch: rows,
        half: rows.div_ceil(2),
        query_rows: batch.query_rows,
        top_k,
        waves: 1,
        streams,
        selection: device.allocate(list)?,
        slots: device.allocate(list)?,
        split_indices: Some(SplitIndices {
            lists: device.allocate(2 * list)?,
            counts: device.allocate(2 * counts)?,
            batch: rows,
        }),
    })
}

#[cfg(all(test, not(loom)))]
#[path = "world_tests.rs"]
mod tests;
