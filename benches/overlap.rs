//! Claim: on the host device DA and DBA hide the gather of a layer behind the engine's work. The bench prints the time
//! of a step in each order and the time of the gather that a step in the order `none` waits for, and which shares of
//! that gather the other orders save.
//!
//! 16 sequences of 16,384 tokens with a budget of 2,048 rows of 656 bytes, 8 layers, k 2,048; most of the selected rows
//! miss. Streams are threads. The engine's work is arithmetic on its own stream: top-k takes half as long as a gather,
//! preparation a tenth, attention over resident rows half, over fetched rows a quarter. With more threads than
//! processors nothing can be hidden: the bench needs two free processors.

#[path = "support/race.rs"]
mod race;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, SplitIndices, Stream};
use forebay::overlap::{Attended, Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Layers, Memory, MicroBatch, Open, Result,
    Sequence, Shape, WarmUp,
};
use race::{Side, claim, done, race, record};

const LAYERS: u32 = 8;
const BATCH: u32 = 16;
const K: u32 = 2048;
const TOKENS: u32 = 16_384;

/// Arithmetic that takes time and touches no memory.
fn spin(rounds: u64) {
    let mut x = rounds | 1;
    for _ in 0..rounds {
        x = black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17));
    }
}

/// The engine's work as rounds of [`spin`], enqueued on the stream that each call names.
struct Spins<'a> {
    device: &'a Arc<HostDevice>,
    /// The rounds that take as long as one layer's gather.
    gather: u64,
    selections: &'a [Vec<u8>],
    selection: Slice,
    step: usize,
}

impl Engine for Spins<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let share = match call.work {
            Work::Index => 0.5 * f64::from(call.count) / f64::from(BATCH),
            Work::Prepare => 0.1,
            Work::Attend(Attended::All) => 0.75,
            Work::Attend(Attended::Resident) => 0.5,
            Work::Attend(Attended::Fetched { .. }) => 0.25,
            Work::Project | Work::Merge | Work::Rest => 0.0,
        };
        let rounds = (share * self.gather as f64) as u64;
        if call.work == Work::Index {
            let part = |bytes: u32| u64::from(4 * K * bytes);
            let slice = self.selection.part(part(call.first), part(call.count))?;
            let positions =
                &self.selections[(self.step * 31 + call.layer.index() * 7) % self.selections.len()];
            let range = part(call.first) as usize..part(call.first + call.count) as usize;
            let (device, positions) = (Arc::clone(self.device), positions[range].to_vec());
            return self.device.call(
                stream,
                Arc::new(move || {
                    // A failed write shows in the slots, which the bench checks after the step.
                    let _ = device.write(slice, &positions);
                    spin(rounds);
                }),
            );
        }
        self.device.call(stream, Arc::new(move || spin(rounds)))
    }
}

struct Decode {
    cache: Cache,
    device: Arc<HostDevice>,
    sequences: Vec<Sequence>,
    layers: Layers,
    ended: Event,
    selections: Vec<Vec<u8>>,
    gather: u64,
    steps: usize,
    accepted: u32,
    misses: u64,
}

/// Draws the positions of one step's selection from all, ascending within a sequence.
fn positions(seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0xBF58_476D_1CE4_E5B9) | 1;
    let position = |entry: u32, x: &mut u64| {
        *x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (entry % K) * (TOKENS / K) + (*x >> 40) as u32 % (TOKENS / K)
    };
    (0..BATCH * K).flat_map(|entry| position(entry, &mut x).to_le_bytes()).collect()
}

impl Decode {
    fn new() -> Result<Decode> {
        let shape = Shape { layers: LAYERS, index_key_bytes: 0, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: true, populate: true, lock: false, node: None };
        let config = Config { memory, ..Config::new(shape, BATCH, TOKENS + 4096, K) };
        let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let mut cache = Cache::new(config, Arc::clone(&device) as Arc<dyn Device>)?;
        let streams = OverlapStreams {
            compute: device.stream()?,
            resolve: device.stream()?,
            gather: device.stream()?,
            scatter: device.stream()?,
        };
        let open =
            Open { prompt: TOKENS, promised: 4096, budget: Budget::Slots(K), bring_up: BringUp::Nothing };
        let mut sequences = Vec::new();
        for _ in 0..BATCH {
            let sequence = cache.open(&open)?;
            cache.append_in_place(sequence, TOKENS)?;
            let _ready = cache.join(sequence, streams.compute, WarmUp::default())?;
            sequences.push(sequence);
        }
        let words = |count: u32| device.allocate(u64::from(4 * count));
        let split_indices =
            SplitIndices { lists: words(2 * BATCH * K)?, counts: words(2 * BATCH)?, batch: BATCH };
        let buffers = Buffers {
            selection: words(BATCH * K)?,
            slots: words(BATCH * K)?,
            split_indices: Some(split_indices),
        };
        Ok(Decode {
            cache,
            sequences,
            layers: Layers { streams, batch: BATCH, half: BATCH / 2, buffers },
            ended: device.event()?,
            device,
            selections: (0..64).map(positions).collect(),
            gather: 0,
            steps: 0,
            accepted: 0,
            misses: 0,
        })
    }

    /// Runs one step in one order: returns its time, and its layers as units.
    fn step(&mut self, order: Overlap) -> Result<(Duration, u64)> {
        let compute = self.layers.streams.compute;
        let begin = Instant::now();
        let accepted = Accepted::Rows(self.accepted);
        let rows: Vec<BatchRow> =
            self.sequences.iter().map(|s| BatchRow { sequence: *s, accepted, query_rows: 1 }).collect();
        let mut step = self.cache.prepare(MicroBatch(0), 1, &rows, None, compute)?;
        let mut engine = Spins {
            device: &self.device,
            gather: self.gather,
            selections: &self.selections,
            selection: self.layers.buffers.selection,
            step: self.steps,
        };
        let orders = [order; LAYERS as usize];
        self.cache.overlap_steps(&mut [(&mut step, self.layers)], &orders, 0, &mut engine)?;
        self.cache.finish(&mut step, compute)?;
        self.device.record(self.ended, compute)?;
        self.device.synchronize(self.ended)?;
        let time = begin.elapsed();
        self.misses = self.cache.retire(step, compute).map_err(|unretired| unretired.error)?.total().1;
        (self.steps, self.accepted) = (self.steps + 1, 0);
        Ok((time, u64::from(LAYERS)))
    }
}

fn main() {
    let mut decode = done(Decode::new());
    // Without the engine's work a step is forebay's own work; most of it is the gather.
    let idle = (0..9).map(|_| done(decode.step(Overlap::None)).0).min().unwrap_or_default();
    let begin = Instant::now();
    spin(10_000_000);
    let rounds = 1e7 / begin.elapsed().as_secs_f64();
    decode.gather = (idle.as_secs_f64() / f64::from(LAYERS) * rounds) as u64;
    let misses = decode.misses / u64::from(LAYERS * BATCH);
    println!("{misses} misses a sequence and layer, a layer's R, G and S {:?}", idle / LAYERS);
    let decode = &std::cell::RefCell::new(decode);
    let side = |name, order| Side::new(name, move || done(decode.borrow_mut().step(order)));
    let mut sides = [side("none", Overlap::None), side("da", Overlap::Da), side("dba", Overlap::Dba)];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "overlap", &mut sides);
    let rounds = race(31, &mut sides);
    // A layer without overlap takes 1.35 gathers of the engine's work and one gather.
    for (name, hidden) in [("da", 0.6), ("dba", 0.85)] {
        let (saved, most) = (100.0 - 100.0 / rounds.ratio(name, "none"), 100.0 * hidden / 2.35);
        println!(
            "{name}: {:.0} layers/s, saves {saved:.0}% of a step; at most {most:.0}%",
            rounds.rate(name)
        );
    }
    claim("a step in the order DA against none", rounds.ratio("da", "none"), 1.1);
    claim("a step in the order DBA against none", rounds.ratio("dba", "none"), 1.1);
    criterion.final_summary();
}
