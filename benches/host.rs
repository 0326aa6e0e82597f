//! Claims: forebay's own work on the host for a step of 61 layers, batch 160, two query rows, from prepare to retire
//! without the layers, takes at most 60 us of one core. An uncaptured layer of two micro-batches of 80 takes at most 2
//! us in addition to the driver's calls. A step of a dense cache, batch 160, one query row, takes at most 20 us: with
//! one group of layers, and with two, one of which has a window.
//!
//! The device is the CUDA device over a driver whose calls do nothing (`support/idle.c`). So the figures include the
//! device's checks, locks and look-ups, and no kernel. The time of a real driver's calls needs a GPU to measure; the
//! bench prints how many calls there are, and the figures include this driver's empty calls. The bench times regions of
//! a few microseconds by the processor's clock; a figure is the median over the rounds of a mean over steps.
//!
//! `FOREBAY_COUNT_SIDE` names a side and `FOREBAY_COUNT_STEPS` a number of steps: the bench then runs that side alone,
//! for a count under callgrind.

#[path = "support/decode.rs"]
mod decode;
#[allow(dead_code, reason = "a bench takes what it needs")]
#[path = "support/race.rs"]
mod race;

use std::cell::RefCell;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use decode::Decode;
use forebay::dense;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Slice, SplitIndices, Stream};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Capture, Captured, Config, Layer, LayerCall, Layers,
    Memory, MicroBatch, Open, Result, Sequence, Shape, Step, Streams, WarmUp,
};
use race::{Side, claim, done, race, record};

const LAYERS: u32 = 61;
const QUERY_ROWS: u32 = 2;
/// The most microseconds that prepare, finish and retire of a step may take.
const MOST_STEP: f64 = 60.0;
/// The most microseconds of a step of a dense cache.
const MOST_DENSE: f64 = 20.0;
/// The most microseconds that a layer of both micro-batches may take.
const MOST_LAYER: f64 = 2.0;
const STEPS: u32 = 20;
const MEMORY: Memory = Memory { huge: false, populate: false, lock: false, node: None };

/// An engine that enqueues nothing.
struct Nothing;

impl Engine for Nothing {
    fn enqueue(&mut self, _call: &EngineCall, _stream: Stream) -> Result<()> {
        Ok(())
    }
}

/// The calls that a pass times.
#[derive(Clone, Copy, PartialEq)]
enum Timed {
    Prepare,
    Finish,
    Retire,
    /// Prepare, finish and retire.
    Step,
    /// All layers, in an order.
    Overlapped(Overlap),
    /// All layers, by one call for R and G and one for S each.
    Called,
    /// The launch of all captured layers.
    Launched,
}

/// Sequences in one or two micro-batches, all decoding.
struct Rig {
    cache: Cache,
    rows: Vec<Vec<BatchRow>>,
    layers: Vec<Layers>,
    captured: Captured,
    orders: Vec<Overlap>,
}

/// Compiles the driver.
fn driver() -> std::result::Result<String, String> {
    let (source, made) = ("benches/support/idle.c", format!("{}/libidle.so", env!("CARGO_TARGET_TMPDIR")));
    let mut compile = Command::new("cc");
    compile.current_dir(env!("CARGO_MANIFEST_DIR")).args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"]);
    let status = compile.arg(&made).arg(source).status().map_err(|error| format!("cc: {error}"))?;
    if status.success() { Ok(made) } else { Err(format!("cc did not compile {source}")) }
}

fn streams(device: &dyn Device) -> Result<OverlapStreams> {
    Ok(OverlapStreams {
        compute: device.stream()?,
        resolve: device.stream()?,
        gather: device.stream()?,
        scatter: device.stream()?,
    })
}

impl Rig {
    fn new(options: &CudaOptions, batch: u32, micro_batches: u32) -> Result<Rig> {
        let device = CudaDevice::new(options.clone())?;
        let (tokens, budget) = (128, 64);
        let shape = Shape { layers: LAYERS, draft_layers: 0, index_key_bytes: 0, ..Shape::DEEPSEEK_V3_2 };
        let lanes = batch * micro_batches;
        let config = Config {
            batch,
            query_rows: QUERY_ROWS,
            micro_batches,
            min_budget: budget,
            overcommit: true,
            memory: MEMORY,
            ..Config::new(shape, lanes, tokens, lanes * budget)
        };
        let mut cache = Cache::new(config, Arc::clone(&device) as Arc<dyn Device>)?;
        let open = Open {
            prompt: 64,
            promised: tokens - 64,
            budget: Budget::Slots(budget),
            bring_up: BringUp::Nothing,
        };
        let (mut rows, mut layers) = (Vec::new(), Vec::new());
        for _ in 0..micro_batches {
            let streams = streams(&*device)?;
            let mut join = |_| {
                let sequence: Sequence = cache.open(&open)?;
                cache.append_in_place(sequence, 64)?;
                let _ready = cache.join(sequence, streams.compute, WarmUp::default())?;
                Ok(BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: QUERY_ROWS })
            };
            rows.push((0..batch).map(&mut join).collect::<Result<Vec<BatchRow>>>()?);
            let words = |count: u32| device.allocate(4 * u64::from(count));
            let entries = batch * QUERY_ROWS * shape.top_k;
            let split_indices =
                SplitIndices { lists: words(2 * entries)?, counts: words(2 * batch * QUERY_ROWS)?, batch };
            let buffers = Buffers {
                selection: words(entries)?,
                slots: words(entries)?,
                split_indices: Some(split_indices),
            };
            layers.push(Layers { streams, batch, half: batch / 2, buffers });
        }
        let orders = vec![Overlap::Dba; LAYERS as usize];
        let bucket: Vec<(MicroBatch, Layers)> = (0..).map(MicroBatch).zip(layers.iter().copied()).collect();
        let capture =
            Capture { micro_batches: &bucket, query_rows: QUERY_ROWS, by_layer: &orders, draft_passes: 0 };
        let captured = cache.capture(&capture, &mut Nothing)?;
        Ok(Rig { cache, rows, layers, captured, orders })
    }

    /// Runs one step of each micro-batch; returns the timed part.
    fn step(&mut self, timed: Timed) -> Result<Duration> {
        let mut spent = Duration::ZERO;
        let mut steps: Vec<Step> = Vec::new();
        let begin = Instant::now();
        for (micro_batch, rows) in (0..).map(MicroBatch).zip(&self.rows) {
            let compute = self.layers[micro_batch.0 as usize].streams.compute;
            steps.push(self.cache.prepare(micro_batch, QUERY_ROWS, rows, None, compute)?);
        }
        spent += begin.elapsed() * u32::from(matches!(timed, Timed::Prepare | Timed::Step));
        let begin = Instant::now();
        self.all_layers(&mut steps, timed)?;
        let layers = matches!(timed, Timed::Overlapped(_) | Timed::Called | Timed::Launched);
        spent += begin.elapsed() * u32::from(layers);
        let begin = Instant::now();
        for (step, layers) in steps.iter_mut().zip(&self.layers) {
            self.cache.finish(step, layers.streams.compute)?;
        }
        spent += begin.elapsed() * u32::from(matches!(timed, Timed::Finish | Timed::Step));
        let begin = Instant::now();
        for (step, layers) in steps.into_iter().zip(&self.layers) {
            self.cache.retire(step, layers.streams.compute).map_err(|unretired| unretired.error)?;
        }
        spent += begin.elapsed() * u32::from(matches!(timed, Timed::Retire | Timed::Step));
        for row in self.rows.iter_mut().flatten() {
            row.accepted = Accepted::Rows(1);
        }
        Ok(spent)
    }

    fn all_layers(&mut self, steps: &mut [Step], timed: Timed) -> Result<()> {
        match timed {
            Timed::Overlapped(order) => {
                self.orders.fill(order);
                let mut steps: Vec<_> = steps.iter_mut().zip(self.layers.iter().copied()).collect();
                self.cache.overlap_steps(&mut steps, &self.orders, 0, &mut Nothing)
            }
            Timed::Called => {
                (0..LAYERS).try_for_each(|layer| self.call(steps, LayerCall::whole(Layer(layer))))
            }
            _ => {
                let mut steps: Vec<&mut Step> = steps.iter_mut().collect();
                self.cache.launch(&self.captured, &mut steps)
            }
        }
    }

    /// Enqueues a layer of each micro-batch by single calls: R and S on the compute stream, G on its own.
    fn call(&self, steps: &[Step], call: LayerCall) -> Result<()> {
        for (step, layers) in steps.iter().zip(&self.layers) {
            let OverlapStreams { compute, gather, .. } = layers.streams;
            let whole = |slice: Slice| slice.part(0, slice.bytes());
            let buffers = Buffers {
                selection: whole(layers.buffers.selection)?,
                slots: whole(layers.buffers.slots)?,
                split_indices: None,
            };
            self.cache.layer(step, call, Streams { resolve: compute, gather }, buffers)?;
            self.cache.scatter(step, call, compute)?;
        }
        Ok(())
    }

    /// Counts the driver calls in a step of each micro-batch, including its layers.
    fn calls(&mut self, driver: &CudaOptions, timed: Timed) -> Result<u32> {
        // The driver reports as many devices as it had calls; the query itself makes some calls too.
        let asking = CudaDevice::count(driver)?.abs_diff(CudaDevice::count(driver)?);
        let before = CudaDevice::count(driver)?;
        self.step(timed)?;
        Ok(CudaDevice::count(driver)? - before - asking)
    }

    fn pass(&mut self, timed: Timed, steps: u32) -> Result<(Duration, u64)> {
        let mut spent = Duration::ZERO;
        for _ in 0..steps {
            spent += self.step(timed)?;
        }
        Ok((spent, steps.into()))
    }
}

const SIDES: [(&str, u32, Timed); 12] = [
    ("step", 1, Timed::Step),
    ("prepare", 1, Timed::Prepare),
    ("finish", 1, Timed::Finish),
    ("retire", 1, Timed::Retire),
    ("launch", 1, Timed::Launched),
    ("none", 1, Timed::Overlapped(Overlap::None)),
    ("dba", 1, Timed::Overlapped(Overlap::Dba)),
    ("two steps", 2, Timed::Step),
    ("two none", 2, Timed::Overlapped(Overlap::None)),
    ("two da", 2, Timed::Overlapped(Overlap::Da)),
    ("two dba", 2, Timed::Overlapped(Overlap::Dba)),
    ("two called", 2, Timed::Called),
];

fn main() {
    let options = CudaOptions { library: Some(done(driver())), ..CudaOptions::default() };
    let one = RefCell::new(done(Rig::new(&options, 160, 1)));
    let two = RefCell::new(done(Rig::new(&options, 80, 2)));
    let dense =
        [("dense, one group", dense::Shape::deepseek_v3(2)), ("dense, two", dense::Shape::gpt_oss_20b(2))]
            .map(|(name, shape)| {
                let device = done(CudaDevice::new(options.clone()));
                (name, RefCell::new(done(Decode::new(device, shape, MEMORY))))
            });
    let rig = |micro_batches| if micro_batches == 1 { &one } else { &two };
    if let (Ok(name), Ok(steps)) = (std::env::var("FOREBAY_COUNT_SIDE"), std::env::var("FOREBAY_COUNT_STEPS"))
    {
        let side = done(SIDES.iter().find(|side| side.0 == name).ok_or("no such side"));
        done(rig(side.1).borrow_mut().pass(side.2, done(steps.parse())));
        return;
    }
    let pass = |micro_batches, timed| move || done(rig(micro_batches).borrow_mut().pass(timed, STEPS));
    let mut sides: Vec<Side<'_>> =
        SIDES.iter().map(|(name, count, timed)| Side::new(name, pass(*count, *timed))).collect();
    sides.extend(dense.iter().map(|(name, decode)| Side::new(name, || done(decode.borrow_mut().pass()))));
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "host", &mut sides);
    let rounds = race(101, &mut sides);
    let us = |name| 1e6 / rounds.rate(name);
    for (name, timed) in [("launch", Timed::Launched), ("none", Timed::Overlapped(Overlap::None))]
        .into_iter()
        .chain([("dba", Timed::Overlapped(Overlap::Dba)), ("called", Timed::Called)])
    {
        let [one, two] = [&one, &two].map(|rig| done(rig.borrow_mut().calls(&options, timed)));
        println!("calls of the driver in a whole step, {name}: {one}, of two micro-batches {two}");
    }
    for (name, micro_batches, timed) in SIDES {
        let layers = matches!(timed, Timed::Overlapped(_) | Timed::Called);
        let (figure, of) =
            if layers { (us(name) / f64::from(LAYERS), "a layer") } else { (us(name), "a step") };
        println!("{name}, {micro_batches} micro-batches: {figure:.2} us {of}");
    }
    for (name, _) in &dense {
        println!("{name}: {:.2} us a step", us(name));
        claim(&format!("20 us against a step, {name}"), MOST_DENSE / us(name), 1.0);
    }
    claim("60 us against prepare, finish and retire", MOST_STEP / us("step"), 1.0);
    for name in ["two none", "two da", "two dba", "two called"] {
        let words = format!("2 us against a layer of two micro-batches, {name}");
        claim(&words, MOST_LAYER * f64::from(LAYERS) / us(name), 1.0);
    }
    criterion.final_summary();
}
