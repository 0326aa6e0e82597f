//! A decode on the virtual clock whose misses rise and fall. A chooser changes the order of each layer's work, and the
//! same decode in each fixed order shows what that was worth.
//!
//! The cache is real and moves real rows. The costs of the work are made up. The chooser's prices come from runs of
//! each order on the clock beforehand; an engine takes them from `forebay::predict`, or measures them.

use std::sync::Arc;

use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Demand, Label, Mover};
use forebay::device::descriptor::LayerCount;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, SplitIndices, Stream};
use forebay::overlap::{
    Attended, Bucket, Chooser, Engine, EngineCall, Hysteresis, Overlap, OverlapStreams, Prices, Table, Work,
};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Layer, Layers, Memory, MicroBatch, Open,
    Result, Sequence, Shape, WarmUp,
};

const LAYERS: u32 = 6;
const ROWS: u32 = 8;
const K: u32 = 64;
const PROMPT: u32 = 1024;
const STEPS: u32 = 120;
/// The number of steps per printed line.
const LINE: usize = 10;

/// Returns how many rows a step selects in a layer that the step before did not: few while the text goes on, many when
/// the subject changes, and half as many in every other layer.
fn drift(step: u32, layer: u32) -> u32 {
    let rows = [2, 2, 24, 60, 60, 8][(step / 20 % 6) as usize];
    if layer.is_multiple_of(2) { rows } else { rows / 2 }
}

/// An engine that computes only which rows to read, and takes the time of its other work.
struct Model<'a> {
    clock: &'a ClockDevice,
    host: &'a Arc<HostDevice>,
    selection: Slice,
    /// By layer, the first row of the window that it reads.
    windows: &'a [u32],
}

impl Engine for Model<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let rows = f64::from(call.count);
        let (name, us) = match call.work {
            Work::Project => ("project", 3.0),
            Work::Index => ("index", 3.0 + 2.0 * rows),
            Work::Prepare => ("prepare", 6.0),
            Work::Attend(Attended::All) => ("attend", 14.0),
            Work::Attend(Attended::Resident) => ("attend resident", 9.0),
            Work::Attend(Attended::Fetched { .. }) => ("attend fetched", 7.0),
            Work::Merge => ("merge", 6.0),
            Work::Rest => ("rest", 12.0),
        };
        let label = Label { name, layer: Some(call.layer), micro_batch: Some(call.micro_batch) };
        self.clock.compute(stream, label, Demand { ns: us * 1e3, sm: 1.0 })?;
        if call.work != Work::Index {
            return Ok(());
        }
        let first = self.windows[call.layer.index()];
        let entries = (0..call.count * K).flat_map(|entry| ((first + entry % K) % PROMPT).to_le_bytes());
        let (entries, bytes) = (entries.collect::<Vec<u8>>(), u64::from(4 * K));
        let slice = self.selection.part(u64::from(call.first) * bytes, u64::from(call.count) * bytes)?;
        let host = Arc::clone(self.host);
        // A refused write shows in the counts, which are compared below.
        self.clock.call(stream, Arc::new(move || drop(host.write(slice, &entries))))
    }
}

/// One cache on its own clock.
struct Decode {
    host: Arc<HostDevice>,
    clock: Arc<ClockDevice>,
    cache: Cache,
    sequences: Vec<Sequence>,
    layers: Layers,
    ended: Event,
    windows: [u32; LAYERS as usize],
    step: u32,
}

impl Decode {
    fn new() -> Result<Decode> {
        let host = HostDevice::new(HostOptions::default());
        let gather = Mover { fixed_ns: 3_000.0, rate: 12e9, sm: 0.1 };
        let costs = Costs { gather, ..Costs::default() };
        let clock = ClockDevice::over(host.clone(), ClockOptions { costs, ..ClockOptions::default() })?;
        let shape = Shape { layers: LAYERS, top_k: K, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, ..Config::new(shape, ROWS, PROMPT + 2 * STEPS, 2 * K) };
        let mut cache = Cache::new(config, clock.clone())?;
        let streams = OverlapStreams {
            compute: clock.stream()?,
            resolve: clock.stream()?,
            gather: clock.stream()?,
            scatter: clock.stream()?,
        };
        let words = |count: u32| clock.allocate(u64::from(4 * count));
        let split_indices =
            Some(SplitIndices { lists: words(2 * ROWS * K)?, counts: words(2 * ROWS)?, batch: ROWS });
        let buffers = Buffers { selection: words(ROWS * K)?, slots: words(ROWS * K)?, split_indices };
        let layers = Layers { streams, batch: ROWS, half: ROWS / 2, buffers };
        let budget = Budget::Slots(2 * K);
        let open = Open { prompt: PROMPT, promised: 2 * STEPS, budget, bring_up: BringUp::Nothing };
        let mut sequences = Vec::new();
        for _ in 0..ROWS {
            let sequence = cache.open(&open)?;
            cache.append_in_place(sequence, PROMPT)?;
            let _ready = cache.join(sequence, streams.compute, WarmUp::default())?;
            sequences.push(sequence);
        }
        clock.run()?;
        let (ended, windows) = (clock.event()?, [0; LAYERS as usize]);
        Ok(Decode { host, clock, cache, sequences, layers, ended, windows, step: 0 })
    }

    /// Runs one step in these orders: returns its nanoseconds, and what each layer missed. The clock cannot predict
    /// what a resolve finds: it computes the time of gathers from `misses` per batch row.
    fn step(&mut self, orders: &[Overlap], misses: &[f64]) -> Result<(f64, Vec<LayerCount>)> {
        let (compute, begun) = (self.layers.streams.compute, self.clock.now());
        for ((layer, window), misses) in (0..).zip(&mut self.windows).zip(misses) {
            *window += drift(self.step, layer);
            self.clock.set_misses(Layer(layer), *misses)?;
        }
        let accepted = Accepted::Rows(u32::from(self.step > 0));
        let rows: Vec<BatchRow> =
            self.sequences.iter().map(|s| BatchRow { sequence: *s, accepted, query_rows: 1 }).collect();
        let mut step = self.cache.prepare(MicroBatch(0), 1, &rows, None, compute)?;
        let selection = self.layers.buffers.selection;
        let mut model = Model { clock: &self.clock, host: &self.host, selection, windows: &self.windows };
        self.cache.overlap_steps(&mut [(&mut step, self.layers)], orders, 0, &mut model)?;
        self.cache.finish(&mut step, compute)?;
        self.clock.record(self.ended, compute)?;
        self.clock.synchronize(self.ended)?;
        let ns = self.clock.now() - begun;
        let retired = self.cache.retire(step, compute).map_err(|unretired| unretired.error)?;
        self.step += 1;
        Ok((ns, retired.layers().to_vec()))
    }
}

/// Returns the time that each order exposes per layer, by misses per batch row, from steps in which all layers miss
/// alike.
fn prices() -> Result<Prices> {
    let misses = vec![0.0, 4.0, 8.0, 16.0, 32.0, 64.0];
    let mut decode = Decode::new()?;
    let mut least = f64::INFINITY;
    // Each layer selects for itself, so none can run ahead.
    let mut exposed = [const { Vec::new() }; 4];
    for (times, order) in exposed.iter_mut().zip(Overlap::FIRST) {
        for rows in &misses {
            let (ns, _) = decode.step(&all(order), &[*rows; LAYERS as usize])?;
            times.push(ns / f64::from(LAYERS));
            least = least.min(ns / f64::from(LAYERS));
        }
    }
    exposed.iter_mut().flatten().for_each(|ns| *ns -= least);
    Prices::new(misses, vec![exposed])
}

/// Returns a table with all layers in one order.
fn all(order: Overlap) -> [Overlap; LAYERS as usize] {
    [order; LAYERS as usize]
}

/// Runs the decode with a chooser between the steps: returns each step's nanoseconds and orders.
fn adaptive(counts: &[Vec<LayerCount>], misses: &[Vec<f64>]) -> Result<Vec<(f64, Vec<Overlap>)>> {
    let tables = Overlap::FIRST.map(|order| Table::fixed(LAYERS, order)).to_vec();
    let bucket = Bucket { batch: ROWS, prices: prices()?, tables };
    let hysteresis = Hysteresis { smoothing: 0.3, share: 0.05, least_ns: 1_000.0, steps: 4 };
    let mut chooser = Chooser::new(vec![bucket], 4, hysteresis)?;
    let (mut decode, mut orders, mut steps) = (Decode::new()?, all(Overlap::None).to_vec(), Vec::new());
    for (known, misses) in counts.iter().zip(misses) {
        let (ns, found) = decode.step(&orders, misses)?;
        assert_eq!(found, *known, "the same rows in changing orders");
        steps.push((ns, orders.clone()));
        // An engine that captures launches the graph of this bucket, table and version, and captures anew if `changed`
        // reports another table.
        let choice = chooser.choose(&found, ROWS, ROWS)?;
        if let Some(table) = chooser.table(choice.bucket, choice.index) {
            orders.clone_from(&table.by_layer);
        }
    }
    Ok(steps)
}

fn main() -> Result<()> {
    // The misses do not depend on the order, so one decode gives them for all.
    let (mut decode, bare) = (Decode::new()?, [0.0; LAYERS as usize]);
    let counted: Vec<_> =
        (0..STEPS).map(|_| decode.step(&all(Overlap::None), &bare)).collect::<Result<_>>()?;
    let bare_ns = counted[0].0;
    let counts: Vec<Vec<LayerCount>> = counted.into_iter().map(|(_, counts)| counts).collect();
    let by_row = |count: &LayerCount| f64::from(count.misses) / f64::from(ROWS);
    let misses: Vec<Vec<f64>> = counts.iter().map(|step| step.iter().map(by_row).collect()).collect();

    // By decode and step: the microseconds above a step without misses in the order none.
    let exposed_us = |ns: f64| (ns - bare_ns) / 1e3;
    let mut exposed = Vec::new();
    for order in Overlap::FIRST {
        let mut decode = Decode::new()?;
        let steps = counts.iter().zip(&misses).map(|(known, misses)| {
            let (ns, found) = decode.step(&all(order), misses)?;
            assert_eq!(found, *known, "the same rows in every order");
            Ok(exposed_us(ns))
        });
        exposed.push(steps.collect::<Result<Vec<f64>>>()?);
    }
    let chosen = adaptive(&counts, &misses)?;
    exposed.push(chosen.iter().map(|(ns, _)| exposed_us(*ns)).collect());

    println!("  steps  misses  none  da dba  exposed us: chooser    none      da     dba");
    for last in (LINE..=STEPS as usize).step_by(LINE) {
        let orders = &chosen[last - 1].1;
        let [a, b, c] = Overlap::FIRST.map(|order| orders.iter().filter(|own| **own == order).count());
        let mean = |us: &Vec<f64>| us[last - LINE..last].iter().sum::<f64>() / LINE as f64;
        let [none, da, dba, own] = [0, 1, 2, 3].map(|decode| mean(&exposed[decode]));
        let (first, misses) = (last + 1 - LINE, misses[last - 1].iter().sum::<f64>());
        print!("{first:3}-{last:3} {misses:7.0} {a:5} {b:3} {c:3} ");
        println!("{own:20.1} {none:7.1} {da:7.1} {dba:7.1}");
    }
    let moves = chosen.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
    let [none, da, dba, own] = [0, 1, 2, 3].map(|decode: usize| exposed[decode].iter().sum::<f64>());
    let (best, worst) = (none.min(da).min(dba), none.max(da).max(dba));
    println!("all steps: chooser {own:.0} us in {moves} moves; none {none:.0}, da {da:.0}, dba {dba:.0}");
    println!("{:.0}% of the best fixed order, {:.0}% of the worst", 100.0 * own / best, 100.0 * own / worst);
    assert!(own <= worst, "no worse than the worst fixed order");
    Ok(())
}
