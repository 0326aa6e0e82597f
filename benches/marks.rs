//! Claim: recording a step's calls on host and device, and reading these records at its end, takes at most 1% of the
//! instructions of its resolves and gathers. Timing cannot resolve so small a share: `ci/instructions` runs one of the
//! shapes below under callgrind and counts (`FOREBAY_COUNT_SIDE` names the shape, `FOREBAY_COUNT_STEPS` the number of
//! steps). By itself this bench prints how long a layer of each shape takes, including all calls of a step.
//!
//! A step is an engine's, through `Cache` on the host device, in plain Rust: prepare; resolve, gather and scatter of
//! each layer, of the whole batch or in halves; finish and retire. The bench draws selections from somewhat more
//! positions than there are slots, so that about 13% miss.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "nothing is raced here")]
#[path = "support/race.rs"]
mod race;

use std::sync::Arc;
use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Result, Sequence, Shape, WarmUp};
use race::{Side, done, race, record};

const LAYERS: u32 = 2;

/// One kind of step.
#[derive(Clone, Copy)]
struct Sizes {
    name: &'static str,
    batch: u32,
    query_rows: u32,
    top_k: u32,
    /// Bytes of a row.
    row: u32,
    halves: bool,
}

/// DeepSeek-V3.2's rows, and the smallest work that has records.
const ALL: [Sizes; 4] = [
    Sizes { name: "whole", batch: 4, query_rows: 1, top_k: 2048, row: 656, halves: false },
    Sizes { name: "drafts", batch: 4, query_rows: 2, top_k: 2048, row: 656, halves: false },
    Sizes { name: "halves", batch: 4, query_rows: 2, top_k: 2048, row: 656, halves: true },
    Sizes { name: "small", batch: 4, query_rows: 1, top_k: 64, row: 656, halves: true },
];

struct Rig {
    sizes: Sizes,
    device: Arc<HostDevice>,
    cache: Cache,
    stream: forebay::device::Stream,
    sequences: Vec<Sequence>,
    buffers: Buffers,
    drawn: u64,
}

impl Rig {
    fn new(sizes: Sizes) -> Result<Rig> {
        let device = HostDevice::new(HostOptions { portable: true, ..HostOptions::default() });
        let Sizes { batch, query_rows, top_k, row, .. } = sizes;
        let shape = Shape {
            layers: LAYERS,
            draft_layers: 0,
            runs: [row, 0],
            index_key_bytes: 0,
            top_k,
            ..Shape::DEEPSEEK_V3_2
        };
        let budget = 4 * top_k;
        let prompt = budget + budget / 7;
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { query_rows, memory, ..Config::new(shape, batch, prompt + 64, budget) };
        let mut cache = Cache::new(config, device.clone())?;
        let stream = device.stream()?;
        let open = Open { prompt, promised: 64, budget: Budget::Slots(budget), bring_up: BringUp::Nothing };
        let mut sequences = Vec::new();
        for _ in 0..batch {
            let sequence = cache.open(&open)?;
            cache.append_in_place(sequence, prompt)?;
            let _ready = cache.join(sequence, stream, WarmUp::default())?;
            sequences.push(sequence);
        }
        let words = u64::from(4 * batch * query_rows * top_k);
        let buffers = Buffers {
            selection: device.allocate(words)?,
            slots: device.allocate(words)?,
            split_indices: None,
        };
        Ok(Rig { sizes, device, cache, stream, sequences, buffers, drawn: 0 })
    }

    /// Returns distinct positions for each query row: a walk over all of them by a coprime step.
    fn select(&mut self) -> Result<()> {
        let Sizes { batch, query_rows, top_k, .. } = self.sizes;
        let length = u64::from(4 * top_k + 4 * top_k / 7);
        let divides = |a: u64, b: u64| (2..=a).any(|d| a.is_multiple_of(d) && b.is_multiple_of(d));
        let mut bytes = Vec::new();
        for _ in 0..batch * query_rows {
            self.drawn =
                self.drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (start, mut width) = ((self.drawn >> 33) % length, 1 + (self.drawn >> 45) % 97);
            while divides(width, length) {
                width += 1;
            }
            let positions = (0..u64::from(top_k)).map(|i| ((start + i * width) % length) as i32);
            bytes.extend(positions.flat_map(i32::to_le_bytes));
        }
        self.device.write(self.buffers.selection, &bytes)
    }

    fn step(&mut self) -> Result<()> {
        let Sizes { batch, query_rows, top_k, halves, .. } = self.sizes;
        let rows =
            |sequence: &Sequence| BatchRow { sequence: *sequence, accepted: Accepted::Rows(0), query_rows };
        let rows: Vec<BatchRow> = self.sequences.iter().map(rows).collect();
        let stream = self.stream;
        let mut step = self.cache.prepare(MicroBatch(0), query_rows, &rows, None, stream)?;
        let split_indices =
            if halves { vec![(0, batch / 2), (batch / 2, batch - batch / 2)] } else { vec![(0, batch)] };
        for layer in (0..LAYERS).map(Layer) {
            self.select()?;
            for (first, count) in &split_indices {
                let bytes = |rows: u32| u64::from(4 * rows * query_rows * top_k);
                let range = |of: forebay::device::Slice| of.part(bytes(*first), bytes(*count));
                let Buffers { selection, slots, .. } = self.buffers;
                let buffers =
                    Buffers { selection: range(selection)?, slots: range(slots)?, split_indices: None };
                let call = LayerCall { batch_rows: Some((*first, *count)), ..LayerCall::whole(layer) };
                self.cache.resolve(&step, call, stream, buffers)?;
                self.cache.gather(&step, call, 0, stream)?;
                self.cache.scatter(&step, call, stream)?;
            }
        }
        self.cache.finish(&mut step, stream)?;
        self.cache.retire(step, stream).map(|_| ()).map_err(|unretired| unretired.error)
    }

    fn pass(&mut self, steps: u32) -> Result<(Duration, u64)> {
        let lap = Lap::begin();
        (0..steps).try_for_each(|_| self.step())?;
        Ok((lap.end(), u64::from(steps * LAYERS)))
    }
}

fn main() -> Result<()> {
    if let (Ok(side), Ok(steps)) = (std::env::var("FOREBAY_COUNT_SIDE"), std::env::var("FOREBAY_COUNT_STEPS"))
    {
        let sizes = ALL.iter().find(|sizes| sizes.name == side);
        let mut rig = Rig::new(*done(sizes.ok_or("no such side")))?;
        let steps: u32 = done(steps.parse());
        rig.pass(steps)?;
        let stats = rig.cache.stats();
        let share = stats.misses as f64 / (stats.hits + stats.misses) as f64;
        println!("layers {} misses {share:.3}", steps * LAYERS);
        return Ok(());
    }
    let mut rigs = Vec::new();
    for sizes in ALL {
        rigs.push(Rig::new(sizes)?);
    }
    let mut sides: Vec<Side<'_>> = Vec::new();
    for rig in &mut rigs {
        sides.push(Side::new(rig.sizes.name, || done(rig.pass(20))));
    }
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "marks", &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    criterion.final_summary();
    for sizes in ALL {
        println!("a layer, {}: {:.2} us", sizes.name, 1e6 / rounds.rate(sizes.name));
    }
    Ok(())
}
