//! Captured steps: each launch of a graph has the same result as the host device step by step.
//!
//! One captured graph is launched many times while the real batch changes, sequences join and leave, drafts are
//! rejected, and the next step is enqueued before the last one is retired. The same script runs on the host device
//! layer by layer. At every step both have the same residency digests, counters and lengths, and attention finds in
//! every slot, byte by byte, the selected row.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a world for several tests")]
#[path = "graphs/dense.rs"]
mod dense;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "graphs/engine.rs"]
mod engine;
#[cfg(feature = "cuda")]
#[path = "graphs/launched.rs"]
mod launched;
#[cfg(feature = "cuda")]
#[path = "graphs/whole.rs"]
mod whole;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use device::TestDevice;
use engine::{
    BATCH, Callbacks, DRAFT_LAYERS, K, LAYERS, QUERY_ROWS, RowWork, Shared, StepWork, draw, row_bytes,
};
use forebay::device::descriptor::LayerCount;
use forebay::device::host::HostOptions;
use forebay::device::{Event, Graph};
use forebay::overlap::{Engine, Overlap};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Cache, Capture, Captured, Config, Kind, Lane, Layer, Layers, Memory,
    MicroBatch, Open, Sequence, Shape, Slots, Step, WarmUp,
};

const ALL: u32 = LAYERS + DRAFT_LAYERS;
const PROMISED: u32 = 60;

fn config() -> Config {
    let shape = Shape {
        layers: LAYERS,
        draft_layers: DRAFT_LAYERS,
        runs: [20, 12],
        device_block_align: 512,
        index_key_bytes: 0,
        page_tokens: 16,
        top_k: K as u32,
        ..Shape::DEEPSEEK_V3_2
    };
    Config {
        // Below query rows x k: scratch slots are used.
        min_budget: 16,
        // As many as two micro-batches' sequences need for all of their rows, with those that still leave.
        slots: Slots::Uniform(64 * 48),
        batch: BATCH,
        query_rows: QUERY_ROWS,
        micro_batches: 2,
        memory: Memory { huge: false, populate: false, lock: false, node: None },
        ..Config::new(shape, 16, 90 + PROMISED, 16)
    }
}

/// A sequence, and the contents of its rows.
struct Decoded {
    handle: Sequence,
    id: u64,
    lane: u32,
    length: u32,
    landed: u32,
    admitted: u32,
    versions: Vec<u64>,
    /// After its join, or its last resize.
    changed: Event,
}

/// The result of a step: digests by micro-batch and batch row, counters, lengths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Came {
    digests: BTreeMap<(usize, usize), u64>,
    counts: [Vec<LayerCount>; 2],
    lengths: [Vec<u32>; 2],
}

struct Flight {
    number: u64,
    steps: [Step; 2],
    ended: [Event; 2],
}

struct Run {
    seed: u64,
    device: Arc<TestDevice>,
    cache: Cache,
    shared: Arc<Shared>,
    layers: [Layers; 2],
    events: Vec<Event>,
    captured: Vec<Captured>,
    /// The waits of the last launch, if they are counted.
    launch: Range<u64>,
    /// A graph that the engine captured.
    own: Option<(Graph, Captured)>,
    sequences: [Vec<Decoded>; 2],
    /// Whether budgets change between steps.
    resizes: bool,
    opened: u64,
    number: u64,
    flights: VecDeque<Flight>,
    came: Arc<Mutex<BTreeMap<u64, Came>>>,
}

/// The tables to capture: each order alone, and one that mixes them; in a group also layers that run ahead.
fn tables(config: &Config) -> Vec<Vec<Overlap>> {
    let [none, da, dba, ahead] = Overlap::ALL;
    let alone = Overlap::FIRST.into_iter().map(|order| vec![order; ALL as usize]);
    let mixed = [vec![dba, none, da, da]];
    let grouped = [vec![dba, ahead, ahead, da], vec![none, ahead, da, dba], vec![da, none, ahead, none]];
    let grouped = grouped.into_iter().filter(|_| config.shape.group_layers > 1);
    alone.chain(mixed).chain(grouped).collect()
}

/// The same, but the ordinary layers share a selection. Two of them have one row format, the third another.
fn grouped() -> Config {
    let config = config();
    let shape = Shape { group_layers: LAYERS, ..config.shape };
    Config { shape, rows: vec![[20, 12], [20, 12], [8, 4], [20, 12]], ..config }
}

impl Run {
    fn new(seed: u64, device: Arc<TestDevice>) -> Run {
        Run::of(config(), seed, device)
    }

    fn of(config: Config, seed: u64, device: Arc<TestDevice>) -> Run {
        let cache = Cache::new(config, device.device()).unwrap();
        Run {
            seed,
            shared: Shared::new(cache.geometries().clone()),
            layers: [engine::layers(&device), engine::layers(&device)],
            events: (0..8).map(|_| device.event().unwrap()).collect(),
            captured: Vec::new(),
            launch: 0..0,
            own: None,
            sequences: [Vec::new(), Vec::new()],
            resizes: false,
            opened: 0,
            number: 0,
            flights: VecDeque::new(),
            came: Arc::default(),
            cache,
            device,
        }
    }

    fn draw(&self, what: u64, below: u32) -> u32 {
        draw(&[self.seed, self.number, self.opened, what], below)
    }

    /// Calls `what` with the engine's side of the layers.
    fn with_engine<T>(&mut self, what: impl FnOnce(&mut Cache, &mut dyn Engine) -> T) -> T {
        let slabs = (0..ALL).map(|layer| self.cache.slab(Layer(layer)).unwrap()).collect();
        let queue = self.device.device();
        let memory = Arc::downgrade(&self.device);
        let mut engine =
            Callbacks { queue: &*queue, memory, shared: self.shared.clone(), layers: self.layers, slabs };
        what(&mut self.cache, &mut engine)
    }

    /// The micro-batches of a bucket.
    fn both(&self) -> [(MicroBatch, Layers); 2] {
        [0, 1].map(|micro| (MicroBatch(micro), self.layers[micro as usize]))
    }

    fn open(&mut self, micro: usize) {
        self.opened += 1;
        let prompt = 20 + self.draw(1, 70);
        let (id, stream) = (self.opened, self.layers[micro].streams.compute);
        let bring_up = if self.draw(2, 2) == 0 { BringUp::Whole } else { BringUp::Nothing };
        let budget = Budget::Slots(16 + self.draw(3, 40));
        let open = Open { prompt, promised: PROMISED, budget, bring_up };
        let handle = self.cache.open(&open).unwrap();
        for layer in 0..ALL {
            let format = self.cache.geometries().of(layer as usize);
            let row = |position| row_bytes(format, [id, layer.into(), position, 0]);
            let rows: Vec<u8> = (0..u64::from(prompt)).flat_map(row).collect();
            self.cache.append(handle, Layer(layer), &rows).unwrap();
        }
        let _ticket = self.cache.join(handle, stream, WarmUp::default()).unwrap();
        let lane = self.lane(handle);
        let changed = self.device.event().unwrap();
        self.device.record(changed, stream).unwrap();
        self.sequences[micro].push(Decoded {
            handle,
            id,
            lane,
            length: prompt,
            landed: 0,
            admitted: prompt + PROMISED,
            versions: vec![0; prompt as usize],
            changed,
        });
    }

    /// Some sequences get another budget, with their last steps in flight.
    fn resize(&mut self, micro: usize) {
        let stream = self.layers[micro].streams.compute;
        for at in 0..self.sequences[micro].len() {
            let s = &self.sequences[micro][at];
            if self.draw(50 + s.id, 3) > 0 {
                continue;
            }
            let budget = 16 + self.draw(90 + s.id, 3 * 64);
            // The lists of the last change must not be in use any more.
            self.device.synchronize(s.changed).unwrap();
            self.cache.resize(s.handle, &Budget::Slots(budget), stream).unwrap();
            self.device.record(s.changed, stream).unwrap();
        }
    }

    /// Landing slots are numbered by lane.
    fn lane(&self, sequence: Sequence) -> u32 {
        let first = self.cache.landing_slot(sequence, 0).unwrap();
        let blocks = 64 * self.scratch_blocks();
        (first - blocks) / QUERY_ROWS
    }

    fn scratch_blocks(&self) -> u32 {
        let blocks = || self.cache.geometries().formats().iter().map(|layer| u64::from(layer.block_bytes()));
        let scratch = 1 + 16 * u64::from(QUERY_ROWS * K as u32 - 16);
        let bytes = scratch.div_ceil(64) * blocks().max().unwrap();
        bytes.next_multiple_of(self.device.granularity()).div_ceil(blocks().min().unwrap()) as u32
    }

    /// Sequences leave, some before their last step is retired, and others join.
    fn change(&mut self, micro: usize) {
        let stream = self.layers[micro].streams.compute;
        let mut at = 0;
        while at < self.sequences[micro].len() {
            let s = &self.sequences[micro][at];
            let full = s.length + s.landed + 2 * QUERY_ROWS > s.admitted;
            if full || self.draw(10 + at as u64, 12) == 0 {
                let gone = self.sequences[micro].swap_remove(at);
                self.cache.close(gone.handle, stream).unwrap();
            } else {
                at += 1;
            }
        }
        let wanted = 1 + self.draw(20 + micro as u64, BATCH) as usize;
        while self.sequences[micro].len() < wanted {
            self.open(micro);
        }
    }

    fn prepare(&mut self, micro: usize) -> Step {
        let (seed, number) = (self.seed, self.number);
        let mut rows = Vec::new();
        let mut work = StepWork { number, seed, rows: Vec::new() };
        for s in &mut self.sequences[micro] {
            let accepted = draw(&[seed, number, s.id, 1], s.landed + 1);
            let query_rows = 1 + draw(&[seed, number, s.id, 2], QUERY_ROWS);
            s.length += accepted;
            s.versions.truncate(s.length as usize);
            s.versions.resize((s.length + query_rows) as usize, number);
            s.landed = query_rows;
            let landing =
                (0..query_rows).map(|row| self.cache.landing_slot(s.handle, row).unwrap()).collect();
            work.rows.push(RowWork {
                sequence: s.id,
                length: s.length,
                rows: query_rows,
                landing,
                versions: s.versions.clone(),
            });
            rows.push(BatchRow { sequence: s.handle, accepted: Accepted::Rows(accepted), query_rows });
        }
        self.shared.queue(micro, work);
        let compute = self.layers[micro].streams.compute;
        self.cache.prepare(MicroBatch(micro as u32), QUERY_ROWS, &rows, None, compute).unwrap()
    }

    /// One step of both micro-batches: launched if there are graphs, else enqueued layer by layer.
    fn step(&mut self) {
        self.number += 1;
        (0..2).for_each(|micro| self.change(micro));
        if self.resizes {
            (0..2).for_each(|micro| self.resize(micro));
        }
        let mut steps = [self.prepare(0), self.prepare(1)];
        self.enqueue(&mut steps);
        let ended = [0, 1].map(|micro| self.events[(2 * self.number as usize + micro) % self.events.len()]);
        for (micro, step) in steps.iter_mut().enumerate() {
            let compute = self.layers[micro].streams.compute;
            for (row, s) in self.sequences[micro].iter().enumerate() {
                let (came, number) = (self.came.clone(), self.number);
                let note = move |digest| {
                    let mut came = came.lock().unwrap();
                    came.entry(number).or_default().digests.insert((micro, row), digest);
                };
                let queue = self.device.device();
                self.device.digest_in(&*queue, (self.cache.pools(), Lane(s.lane)), compute, note).unwrap();
            }
            self.cache.finish(step, compute).unwrap();
            self.device.record(ended[micro], compute).unwrap();
        }
        self.flights.push_back(Flight { number: self.number, steps, ended });
        if self.flights.len() == 2 || self.draw(40, 3) == 0 {
            self.retire();
        }
    }

    /// Enqueues the steps' layers, or launches their captured graph.
    fn enqueue(&mut self, steps: &mut [Step; 2]) {
        let tables = tables(self.cache.config());
        let table = self.draw(30, tables.len() as u32) as usize;
        let [first, second] = steps;
        if let Some((graph, captured)) = &self.own {
            let streams = self.layers.map(|layers| layers.streams.compute);
            let event = self.device.event().unwrap();
            self.device.record(event, streams[1]).unwrap();
            self.device.wait(streams[0], event).unwrap();
            self.device.launch(*graph, streams[0]).unwrap();
            self.device.record(event, streams[0]).unwrap();
            self.device.wait(streams[1], event).unwrap();
            self.cache.launched(captured, &mut [first, second]).unwrap();
        } else if self.captured.is_empty() {
            let mut with = [(first, self.layers[0]), (second, self.layers[1])];
            let by_layer = &tables[table];
            let enqueued = self
                .with_engine(|cache, engine| cache.overlap_steps(&mut with, by_layer, QUERY_ROWS, engine));
            enqueued.unwrap();
        } else {
            let captured = &self.captured[table % self.captured.len()];
            let before = self.device.waits();
            self.cache.launch(captured, &mut [first, second]).unwrap();
            self.launch = before..self.device.waits();
        }
    }

    /// Ends the oldest step.
    fn retire(&mut self) {
        let Some(flight) = self.flights.pop_front() else { return };
        for (micro, (step, ended)) in flight.steps.into_iter().zip(flight.ended).enumerate() {
            self.device.synchronize(ended).unwrap();
            let retired = self.cache.retire(step, self.layers[micro].streams.compute).unwrap();
            let mut came = self.came.lock().unwrap();
            let came = came.entry(flight.number).or_default();
            came.counts[micro] = retired.layers().to_vec();
            came.lengths[micro] = retired.lengths().to_vec();
            for group in self.cache.geometries().groups() {
                let layers = &came.counts[micro][group.first as usize..][..group.layers as usize];
                assert!(layers.iter().all(|layer| *layer == layers[0]), "{layers:?}");
            }
        }
        let wrong = self.shared.wrong();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    /// Retires everything and reads every committed row in the total pool.
    fn check_total(&mut self) {
        while !self.flights.is_empty() {
            self.retire();
        }
        // Sequences that were closed or opened since may still be leaving or joining.
        for layers in &self.layers {
            let ended = self.device.event().unwrap();
            self.device.record(ended, layers.streams.compute).unwrap();
            self.device.synchronize(ended).unwrap();
        }
        self.cache.validate().unwrap();
        for s in self.sequences.iter().flatten() {
            for (layer, position) in (0..ALL).flat_map(|layer| (0..s.length).map(move |p| (layer, p))) {
                let format = self.cache.geometries().of(layer as usize);
                let mut row = vec![0; format.row_bytes() as usize];
                self.cache.read_row(s.handle, Layer(layer), position, &mut row).unwrap();
                let names = [s.id, layer.into(), position.into(), s.versions[position as usize]];
                assert_eq!(row, row_bytes(format, names), "sequence {} layer {layer} at {position}", s.id);
            }
        }
    }

    fn came(&self) -> BTreeMap<u64, Came> {
        self.came.lock().unwrap().clone()
    }
}

#[test]
fn layers_enqueued_one_by_one_read_every_selected_row() {
    let mut run = Run::new(5, TestDevice::new(HostOptions::default()));
    (0..60).for_each(|_| run.step());
    run.check_total();
    let counts = run.came().into_values().flat_map(|came| came.counts.concat());
    let all = counts.fold((0, 0, 0), |a, c| (a.0 + c.hits, a.1 + c.misses, a.2 + c.scratch));
    assert!(all.0 > 0 && all.1 > 0 && all.2 > 0, "hits, misses and scratch rows: {all:?}");
}

/// Rows of every layer, drafts, rejected ones, resizes with steps in flight, and draft passes.
#[test]
fn layers_that_share_a_selection_read_every_selected_row() {
    let mut run = Run::of(grouped(), 5, TestDevice::new(HostOptions::default()));
    run.resizes = true;
    (0..100).for_each(|_| run.step());
    run.check_total();
    assert!(run.cache.stats().moved_rows > 0);
    let counts = run.came().into_values().flat_map(|came| came.counts.concat());
    let all = counts.fold((0, 0, 0), |a, c| (a.0 + c.hits, a.1 + c.misses, a.2 + c.scratch));
    assert!(all.0 > 0 && all.1 > 0 && all.2 > 0, "hits, misses and scratch rows: {all:?}");
}

#[test]
fn a_device_without_graphs_refuses_captures_and_the_cache_continues() {
    let mut run = Run::new(6, TestDevice::host(HostOptions::default()));
    run.step();
    run.check_total();
    let by_layer = vec![Overlap::None; ALL as usize];
    let both = run.both();
    let capture =
        Capture { micro_batches: &both, query_rows: QUERY_ROWS, by_layer: &by_layer, draft_passes: 0 };
    let error = run.with_engine(|cache, engine| cache.capture(&capture, engine)).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Unsupported, "a device without graphs"));
    run.step();
    run.check_total();
}
