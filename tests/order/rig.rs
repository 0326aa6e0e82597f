//! A cache on a watched device, and an engine that declares what its work touches and computes nothing.

use forebay::check::watch::{Attention, Watch};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Pools, ResolveOutput, Slice, SplitIndices, StepRange, Stream};
use forebay::overlap::{Attended, Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layers, Memory, MicroBatch, Open};
use forebay::{BatchRow, Result, Sequence, Shape, Slots, Step, WarmUp};
use std::sync::Arc;

/// Tokens of a prompt.
pub const PROMPT: u32 = 40;
/// Batch rows of a step.
pub const BATCH: u32 = 3;
/// The first of DBA's second half.
pub const HALF: u32 = 1;
pub const QUERY_ROWS: u32 = 2;
const K: u32 = 12;

/// The streams of a micro-batch that are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Four streams.
    None,
    /// R is on the compute stream, S on that of G.
    Two,
    /// Both micro-batches share one stream for G and one for S.
    Copies,
    /// R and G are on one stream.
    Fetch,
    /// One stream.
    One,
}

/// Two layers and a draft layer, two micro-batches; budgets below the selection of a step.
pub fn config(waves: u32) -> Config {
    let shape = Shape {
        layers: 2,
        draft_layers: 1,
        runs: [32, 0],
        index_key_bytes: 8,
        page_tokens: 16,
        top_k: K,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        host_pages: 64,
        index_pages: 64,
        slots: Slots::Uniform(1024),
        min_budget: 4,
        batch: BATCH,
        query_rows: QUERY_ROWS,
        steps_in_flight: 3,
        micro_batches: 2,
        attention_waves: waves,
        memory,
        ..Config::new(shape, 2 * BATCH + 2, 120, 16)
    }
}

/// The same with three layers, which share a selection.
pub fn grouped(waves: u32) -> Config {
    let config = config(waves);
    Config { shape: Shape { layers: 3, group_layers: 3, ..config.shape }, ..config }
}

/// One micro-batch's streams and buffers.
#[derive(Clone, Copy, Debug)]
pub struct Micro {
    pub streams: OverlapStreams,
    selection: Slice,
    slots: Slice,
    split_indices: SplitIndices,
}

impl Micro {
    fn new(device: &dyn Device, streams: OverlapStreams, waves: u32) -> Micro {
        let allocate = |words: u32| device.allocate(4 * u64::from(words)).unwrap();
        let rows = BATCH * QUERY_ROWS;
        Micro {
            streams,
            selection: allocate(rows * K),
            slots: allocate(rows * K),
            split_indices: SplitIndices {
                lists: allocate((1 + waves) * rows * K),
                counts: allocate((1 + waves) * rows),
                batch: BATCH,
            },
        }
    }

    pub fn layers(&self) -> Layers {
        let Micro { selection, slots, split_indices, .. } = *self;
        let buffers = Buffers { selection, slots, split_indices: Some(split_indices) };
        Layers { streams: self.streams, batch: BATCH, half: HALF, buffers }
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Rig {
    pub watch: Arc<Watch>,
    pub host: Arc<HostDevice>,
    pub clock: Option<Arc<ClockDevice>>,
    pub cache: Cache,
    pub micro: Vec<Micro>,
    pub sequences: Vec<Sequence>,
    /// The stream of the host's own work.
    pub stream: Stream,
    pub attends: bool,
    pub flights: Vec<Step>,
}

/// The engine's side: its selection depends on the layer alone, and is below every length.
pub struct Caller {
    pub watch: Arc<Watch>,
    pub host: Arc<HostDevice>,
    pools: Pools,
    micro: Vec<Micro>,
    /// Whether it declares what attention reads.
    pub attends: bool,
}

impl Caller {
    /// The part of a buffer of all rows that belongs to the call.
    fn of(&self, buffer: Slice, call: &EngineCall) -> Slice {
        let row = buffer.bytes() / u64::from(BATCH * QUERY_ROWS) * u64::from(call.rows.count);
        buffer.part(u64::from(call.first) * row, u64::from(call.count) * row).unwrap()
    }

    fn output(&self, call: &EngineCall) -> ResolveOutput {
        let micro = &self.micro[call.micro_batch.index()];
        ResolveOutput { slots: self.of(micro.slots, call), split_indices: Some(micro.split_indices) }
    }
}

impl Engine for Caller {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let EngineCall { micro_batch, layer, first, count, rows, .. } = *call;
        let range = StepRange { micro_batch, layer, first, count, rows };
        match call.work {
            Work::Index => {
                let selection = self.of(self.micro[micro_batch.index()].selection, call);
                self.watch.index(stream, &selection)?;
                let words = (0..selection.bytes() as u32 / 4).map(|i| (i % K * 3 + layer.0 % 3) % PROMPT);
                let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
                self.host.write(selection, &bytes)
            }
            Work::Prepare => self.watch.land(self.pools, stream, &range),
            Work::Attend(attended) if self.attends => {
                let reads = match attended {
                    Attended::All => Attention::All,
                    Attended::Resident => Attention::Resident,
                    Attended::Fetched { wave } => Attention::Fetched { wave },
                };
                self.watch.attend(self.pools, stream, &range, reads, &self.output(call))
            }
            Work::Merge if self.attends => {
                self.watch.attend(self.pools, stream, &range, Attention::Merged, &self.output(call))
            }
            Work::Attend(_) | Work::Project | Work::Merge | Work::Rest => Ok(()),
        }
    }
}

impl Rig {
    /// A cache with a sequence for each batch row of both micro-batches.
    pub fn new(waves: u32, sharing: Sharing, without: Option<u64>) -> Rig {
        Rig::with(config(waves), sharing, without)
    }

    pub fn with(config: Config, sharing: Sharing, without: Option<u64>) -> Rig {
        let host = HostDevice::new(HostOptions::default());
        Rig::over(host.clone(), host, config, sharing, without)
    }

    /// On a clock, which can hold a stream.
    pub fn on_clock(config: Config, sharing: Sharing, without: Option<u64>) -> Rig {
        let host = HostDevice::new(HostOptions::default());
        let clock = ClockDevice::over(host.clone(), ClockOptions::default()).unwrap();
        Rig { clock: Some(clock.clone()), ..Rig::over(clock, host, config, sharing, without) }
    }

    fn over(
        device: Arc<dyn Device>,
        host: Arc<HostDevice>,
        config: Config,
        sharing: Sharing,
        without: Option<u64>,
    ) -> Rig {
        let watch = match without {
            Some(number) => Watch::without_wait(device, number),
            None => Watch::new(device),
        };
        let waves = config.attention_waves;
        let stream = || watch.stream().unwrap();
        let (gather, scatter) = (stream(), stream());
        let streams = || {
            let compute = stream();
            match sharing {
                Sharing::None => {
                    OverlapStreams { compute, resolve: stream(), gather: stream(), scatter: stream() }
                }
                Sharing::Two => {
                    let copies = stream();
                    OverlapStreams { compute, resolve: compute, gather: copies, scatter: copies }
                }
                Sharing::Fetch => {
                    let fetch = stream();
                    OverlapStreams { compute, resolve: fetch, gather: fetch, scatter: stream() }
                }
                Sharing::One => {
                    OverlapStreams { compute, resolve: compute, gather: compute, scatter: compute }
                }
                Sharing::Copies => OverlapStreams { compute, resolve: stream(), gather, scatter },
            }
        };
        let micro = (0..2).map(|_| Micro::new(&*watch, streams(), waves)).collect();
        let cache = Cache::new(config, watch.clone()).unwrap();
        let (sequences, flights) = (Vec::new(), Vec::new());
        let stream = stream();
        Rig { stream, watch, host, clock: None, cache, micro, sequences, flights, attends: true }
    }

    /// The request of a sequence.
    pub fn asks(budget: u32) -> Open {
        Open { prompt: PROMPT, promised: 60, budget: Budget::Slots(budget), bring_up: BringUp::Whole }
    }

    /// Opens a sequence, fills its prompt and joins it by a warm-up, with each stretch on a stream of its own.
    pub fn admit_warm(&mut self, budget: u32) -> Result<Sequence> {
        let sequence = self.cache.open(&Rig::asks(budget))?;
        self.cache.append_in_place(sequence, PROMPT)?;
        let groups = self.cache.geometries().groups().len() as u64;
        let selections = self.watch.allocate(4 * groups * u64::from(K))?;
        let row = self.cache.geometry().row_bytes();
        let warm = WarmUp { selections: Some(selections), steps: 1, bytes_a_call: u64::from(2 * row) };
        let _ticket = self.cache.join(sequence, self.watch.stream()?, warm)?;
        while !self.cache.is_running(sequence)? {
            let _ticket = self.cache.join_more(sequence, self.watch.stream()?)?;
        }
        Ok(sequence)
    }

    /// Opens a sequence, fills its prompt and joins it, on a stream of its own.
    pub fn admit(&mut self, budget: u32) -> Result<Sequence> {
        let sequence = self.cache.open(&Rig::asks(budget))?;
        self.cache.append_in_place(sequence, PROMPT)?;
        let _ticket = self.cache.join(sequence, self.watch.stream()?, WarmUp::default())?;
        Ok(sequence)
    }

    /// A sequence for each batch row of both micro-batches.
    pub fn fill(&mut self) -> Result<()> {
        for row in 0..2 * BATCH {
            let sequence = self.admit(4 + row)?;
            self.sequences.push(sequence);
        }
        Ok(())
    }

    pub fn caller(&self) -> Caller {
        Caller {
            watch: self.watch.clone(),
            host: self.host.clone(),
            pools: self.cache.pools(),
            micro: self.micro.clone(),
            attends: self.attends,
        }
    }

    /// The sequences of a micro-batch.
    pub fn rows(&self, micro: usize, accepted: u32) -> Vec<BatchRow> {
        let rows = self.sequences.iter().skip(micro * BATCH as usize).take(BATCH as usize);
        let accepted = Accepted::Rows(accepted);
        rows.map(|sequence| BatchRow { sequence: *sequence, accepted, query_rows: QUERY_ROWS }).collect()
    }

    /// Enqueues a step of both micro-batches, with the given order of each layer, and leaves it in flight.
    pub fn step<const LAYERS: usize>(&mut self, orders: [Overlap; LAYERS], accepted: u32) -> Result<()> {
        let mut caller = self.caller();
        self.step_of(orders, accepted, &mut caller)
    }

    /// The same with another engine.
    pub fn step_of<const LAYERS: usize>(
        &mut self,
        orders: [Overlap; LAYERS],
        accepted: u32,
        engine: &mut dyn Engine,
    ) -> Result<()> {
        let mut steps = Vec::new();
        for micro in 0..2 {
            let rows = self.rows(micro, accepted);
            let stream = self.micro[micro].streams.compute;
            steps.push(self.cache.prepare(MicroBatch(micro as u32), QUERY_ROWS, &rows, None, stream)?);
        }
        let layers: Vec<Layers> = self.micro.iter().map(Micro::layers).collect();
        let mut open: Vec<(&mut Step, Layers)> = steps.iter_mut().zip(layers).collect();
        self.cache.overlap_steps(&mut open, &orders, QUERY_ROWS, engine)?;
        for (step, micro) in steps.iter_mut().zip(&self.micro) {
            self.cache.finish(step, micro.streams.compute)?;
        }
        self.flights.extend(steps);
        Ok(())
    }

    /// Waits until the steps and the host's own work have ended.
    pub fn settle(&self) -> Result<()> {
        let steps = self.micro.iter().map(|micro| micro.streams.compute);
        steps.chain([self.stream]).try_for_each(|stream| {
            let event = self.watch.event()?;
            self.watch.record(event, stream)?;
            self.watch.synchronize(event)
        })
    }

    /// Retires every step in flight.
    pub fn retire(&mut self) {
        for step in self.flights.drain(..) {
            self.cache.retire(step, self.stream).unwrap();
        }
    }

    /// `steps` steps, two in flight at a time.
    pub fn run<const LAYERS: usize>(&mut self, orders: [Overlap; LAYERS], steps: u32) -> Result<()> {
        for step in 0..steps {
            self.step(orders, if step == 0 { 0 } else { 1 + step % QUERY_ROWS })?;
        }
        Ok(())
    }
}
