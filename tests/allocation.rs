//! Promise P6: after a cache has been warmed up, no thread of the process allocates or frees from prepare to retire,
//! nor in a resize between two steps, on the host device and on the CUDA device, layer by layer and by graphs; nor in
//! the steps of a ring of sharded weights, nor in those of a dense cache, which slide windows and evict pages, nor for
//! the runs of a transfer. The memory that a driver takes does not come through Rust's allocator. This program has one
//! test only, because the allocator counts every thread except the test harness's own, which waits meanwhile and may
//! allocate at any time.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "allocation/dense.rs"]
mod dense;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[allow(dead_code, reason = "a test takes what it needs")]
#[cfg(feature = "transfer")]
#[path = "support/frame_bytes.rs"]
mod frame_bytes;
#[cfg(feature = "transfer")]
#[path = "allocation/transfer.rs"]
mod transfer;

use device::TestDevice;
use forebay::device::clock::{ClockDevice, ClockOptions, Demand, Direction, Label};
use forebay::device::descriptor::LayerCount;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::pages::descriptor::{Changed, Entry, FROM_DEVICE, encode, words};
use forebay::device::{BeginPages, Device, Event, PageOp, PageTables, Slice, SplitIndices, Stream};
use forebay::os::{Faults, Map, NoFaults, Request};
use forebay::overlap::{Bucket, Chooser, Hysteresis, Prices, Table};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams};
use forebay::weights::{
    Group, Patterns, Plan, Pulls, Ring, RingOptions, Sharding, Source, Tensor, Windows, Wrap,
};
use forebay::{
    Accepted, BringUp, Budget, Buffers, Cache, Captured, Config, Layer, LayerCall, Layers, Memory, MicroBatch,
};
use forebay::{BatchRow, Open, SLOT_BLOCK, Sequence, Shape, Share, ShareBy, Slots, Streams, WarmUp};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The system's allocator, which counts its calls while a test asks for it.
struct Counting {
    on: AtomicBool,
    /// Whether the process's first thread counts: it is the harness's, unless the test runs on it.
    first: AtomicBool,
    calls: AtomicU64,
    /// The bytes of the largest allocation.
    largest: AtomicU64,
}

fn is_first_thread() -> bool {
    // SAFETY: both calls read a number and touch no memory.
    unsafe { libc::gettid() == libc::getpid() }
}

impl Counting {
    fn note(&self, bytes: usize) {
        if self.on.load(Ordering::SeqCst) && (self.first.load(Ordering::SeqCst) || !is_first_thread()) {
            self.calls.fetch_add(1, Ordering::SeqCst);
            self.largest.fetch_max(bytes as u64, Ordering::SeqCst);
        }
    }
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.note(layout.size());
        // SAFETY: the caller's layout, unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.note(0);
        // SAFETY: `at` came from the system's allocator with this layout, as all of ours do.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.note(size);
        // SAFETY: as `dealloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting {
    on: AtomicBool::new(false),
    first: AtomicBool::new(false),
    calls: AtomicU64::new(0),
    largest: AtomicU64::new(0),
};

/// Allocations, growths and frees of all threads while `work` runs.
fn counted(work: impl FnOnce()) -> u64 {
    let before = ALLOCATOR.calls.load(Ordering::SeqCst);
    ALLOCATOR.first.store(is_first_thread(), Ordering::SeqCst);
    ALLOCATOR.on.store(true, Ordering::SeqCst);
    work();
    ALLOCATOR.on.store(false, Ordering::SeqCst);
    ALLOCATOR.calls.load(Ordering::SeqCst) - before
}

/// The bytes of the largest allocation while `work` runs.
#[cfg(feature = "transfer")]
fn largest(work: impl FnOnce()) -> u64 {
    ALLOCATOR.largest.store(0, Ordering::SeqCst);
    counted(work);
    ALLOCATOR.largest.load(Ordering::SeqCst)
}

const K: u32 = 32;
const BATCH: u32 = 3;
/// Ordinary layers; one draft layer follows.
const LAYERS: u32 = 3;

/// How the layers are ordered by the schedule.
const ORDERS: [Overlap; 4] = [Overlap::Dba, Overlap::None, Overlap::Da, Overlap::Dba];

/// A cache of several sequences, two query rows and a draft layer, and the buffers of its steps.
struct Loop {
    cache: Cache,
    device: Arc<TestDevice>,
    sequences: Vec<Sequence>,
    streams: Streams,
    done: Event,
    selection: Slice,
    slots: Slice,
    split_indices: SplitIndices,
    positions: Vec<u8>,
    misses: u64,
    scratch: u64,
    /// Launched in place of the layers enqueued by their schedule.
    captured: Option<Captured>,
}

/// An engine that enqueues nothing.
struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _call: &EngineCall, _stream: Stream) -> forebay::Result<()> {
        Ok(())
    }
}

impl Loop {
    fn new(device: Arc<TestDevice>, share: Option<Share>) -> Loop {
        let shape = Shape {
            layers: LAYERS,
            draft_layers: 1,
            runs: [64, 0],
            page_tokens: 16,
            top_k: K,
            ..Shape::DEEPSEEK_V3_2
        };
        let memory = Memory { huge: false, populate: true, lock: false, node: None };
        // Two blocks more than the sequences take at their opening.
        let slots = Slots::Uniform((BATCH + 2) * SLOT_BLOCK);
        let config =
            Config { query_rows: 2, memory, slots, share, parked: 1, ..Config::new(shape, BATCH, 2000, 40) };
        let [main, gather] = [0, 1].map(|_| device.stream().unwrap());
        let bytes = u64::from(BATCH * 2 * K * 4);
        let mut cache = Cache::new(config, device.device()).unwrap();
        let open =
            Open { prompt: 600, promised: 1400, budget: Budget::Slots(40), bring_up: BringUp::Nothing };
        let sequences = (0..BATCH).map(|_| {
            let sequence = cache.open(&open).unwrap();
            cache.append_in_place(sequence, 600).unwrap();
            let _ticket = cache.join(sequence, main, WarmUp::default()).unwrap();
            sequence
        });
        let sequences: Vec<Sequence> = sequences.collect();
        let done = device.event().unwrap();
        // One has been parked: what a step needs is there again.
        device.record(done, main).unwrap();
        device.synchronize(done).unwrap();
        cache.park(sequences[0], 0, main).unwrap();
        let _ticket = cache.resume(sequences[0], main, 0).unwrap();
        Loop {
            cache,
            sequences,
            streams: Streams { resolve: main, gather },
            done,
            selection: device.allocate(bytes).unwrap(),
            slots: device.allocate(bytes).unwrap(),
            split_indices: SplitIndices {
                lists: device.allocate(2 * bytes).unwrap(),
                counts: device.allocate(u64::from(2 * BATCH * 2 * 4)).unwrap(),
                batch: BATCH,
            },
            device,
            positions: vec![0; bytes as usize],
            misses: 0,
            scratch: 0,
            captured: None,
        }
    }

    fn wait(&self, stream: Stream) {
        self.device.record(self.done, stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }

    /// The buffers of `rows` query rows per batch row, filled with positions that wander.
    fn buffers(&mut self, number: u32, rows: u32) -> Buffers {
        let bytes = (BATCH * rows * K * 4) as usize;
        for (n, word) in (0_u32..).zip(self.positions[..bytes].chunks_exact_mut(4)) {
            word.copy_from_slice(&((n * 37 + number * 101) % 600).to_le_bytes());
        }
        let selection = self.selection.part(0, bytes as u64).unwrap();
        self.device.write(selection, &self.positions[..bytes]).unwrap();
        Buffers { selection, slots: self.slots.part(0, bytes as u64).unwrap(), split_indices: None }
    }

    /// One call: R, an edge, G on the other stream, an edge back, S.
    fn layer(&mut self, step: &forebay::Step, call: LayerCall, buffers: Buffers) {
        let Streams { resolve, gather } = self.streams;
        let scatter = resolve;
        self.cache.resolve(step, call, resolve, buffers).unwrap();
        self.device.record(self.done, resolve).unwrap();
        self.device.wait(gather, self.done).unwrap();
        self.cache.gather(step, call, 0, gather).unwrap();
        self.device.record(self.done, gather).unwrap();
        self.device.wait(scatter, self.done).unwrap();
        self.cache.scatter(step, call, scatter).unwrap();
        self.wait(scatter);
    }

    fn layers(&mut self, number: u32) -> Layers {
        let Streams { resolve: compute, gather } = self.streams;
        let streams = OverlapStreams { compute, resolve: gather, gather, scatter: gather };
        let buffers = Buffers { split_indices: Some(self.split_indices), ..self.buffers(number, 2) };
        Layers { streams, batch: BATCH, half: 1, buffers }
    }

    /// All layers by the schedule, each in another order, for an engine without work.
    fn overlapped(&mut self, step: &mut forebay::Step, number: u32) {
        let with = self.layers(number);
        match &self.captured {
            Some(captured) => self.cache.launch(captured, &mut [step]).unwrap(),
            None => self.cache.overlap_steps(&mut [(step, with)], &ORDERS, 2, &mut Idle).unwrap(),
        }
    }

    #[cfg(feature = "cuda")]
    fn capture(&mut self) {
        let micro_batches = [(MicroBatch(0), self.layers(0))];
        let bucket = forebay::Capture {
            micro_batches: &micro_batches,
            query_rows: 2,
            by_layer: &ORDERS,
            draft_passes: 2,
        };
        self.captured = Some(self.cache.capture(&bucket, &mut Idle).unwrap());
    }

    /// The allocations and frees of `steps` steps of a warm cache.
    fn warm_steps(&mut self, steps: u32) -> u64 {
        // The joins must have ended before a resize.
        self.wait(self.streams.resolve);
        // A thread, a lock or the standard library may allocate at its first use.
        (0..4).for_each(|number| self.step(number));
        self.wait(self.streams.gather);
        let before = self.misses;
        let calls = counted(|| (4..4 + steps).for_each(|number| self.step(number)));
        let misses = self.misses - before;
        let stats = self.cache.stats();
        if self.cache.config().share.is_some() {
            assert!(
                stats.slots_in_use == u64::from((LAYERS + 1) * (BATCH + 2) * SLOT_BLOCK) && stats.resizes > 0
            );
            return calls;
        }
        assert_eq!(stats.resizes, u64::from(4 + steps));
        assert!(stats.moved_rows > u64::from(steps), "rows must move: {stats:?}");
        assert!(misses > u64::from(16 * steps), "the steps must fetch: {misses} misses");
        assert!(self.scratch > u64::from(16 * steps), "and use scratch slots: {}", self.scratch);
        calls
    }

    /// The sequences in turn get the free blocks between two steps, and give them up after the next one. A cache that
    /// shares its slots does it by itself: it divides them in every prepare.
    fn resize(&mut self, number: u32) {
        if self.cache.config().share.is_some() {
            return;
        }
        let sequence = self.sequences[(number / 2 % BATCH) as usize];
        let slots = [3 * SLOT_BLOCK, 40][number as usize % 2];
        let stream = [self.streams.resolve, self.streams.gather][number as usize / 6 % 2];
        self.cache.resize(sequence, &Budget::Slots(slots), stream).unwrap();
    }

    fn step(&mut self, number: u32) {
        self.resize(number);
        let main = self.streams.resolve;
        let accepted = if number == 0 { 0 } else { 1 + number % 2 };
        let row = |n: usize| BatchRow {
            sequence: self.sequences[n],
            accepted: Accepted::Rows(accepted),
            query_rows: 2,
        };
        let rows = [row(0), row(1), row(2)];
        let mut step = self.cache.prepare(MicroBatch(0), 2, &rows, None, main).unwrap();
        if number.is_multiple_of(3) {
            self.overlapped(&mut step, number);
        } else {
            for layer in 0..LAYERS {
                let buffers = self.buffers(number + layer, 2);
                self.layer(&step, LayerCall::whole(Layer(layer)), buffers);
            }
            for pass in 0..2 {
                let buffers = self.buffers(number + pass, 1);
                self.layer(&step, LayerCall::draft_pass(Layer(LAYERS), pass), buffers);
            }
        }
        self.cache.finish(&mut step, main).unwrap();
        // Sometimes too early on a threaded device; the refusal allocates nothing either.
        let mut left = Some(step);
        while let Some(step) = left.take() {
            match self.cache.retire(step, main) {
                Ok(retired) => {
                    self.misses += retired.total().1;
                    self.scratch += retired.layers().iter().map(|l| u64::from(l.scratch)).sum::<u64>();
                }
                Err(unretired) => left = Some(unretired.step.unwrap()),
            }
        }
    }
}

/// On the stand-in driver, in order and delayed: layers enqueued one by one and by their schedule, and a graph that
/// is launched.
#[cfg(feature = "cuda")]
fn on_the_cuda_device() {
    if !device::driver_is_there() {
        return;
    }
    for (seed, captured) in [(None, false), (None, true), (Some(7), true)] {
        let mut decode = Loop::new(TestDevice::cuda(&HostOptions::default(), seed).unwrap(), None);
        if captured {
            decode.capture();
        }
        assert_eq!(decode.warm_steps(20), 0, "CUDA device, seed {seed:?}, a graph: {captured}");
        assert_eq!(dense_begins(&decode.device), 0, "a dense cache, seed {seed:?}");
        assert_eq!(dense::steps(decode.device.device()), 0, "a dense cache that evicts, seed {seed:?}");
        assert_eq!(dense::arrival(decode.device.device()), 0, "an arrival, seed {seed:?}");
        assert_eq!(ring_steps(&decode.device, captured), 0, "a ring, seed {seed:?}, a graph: {captured}");
        let seen = counted_call(&**decode.device);
        assert!(seen == 2 || (device::is_given() && seen > 2), "the control: {seen}");
    }
}

/// The allocations and frees of steps of a ring of sharded weights, by single calls or by launches of one.
fn ring_steps(device: &Arc<TestDevice>, captured: bool) -> u64 {
    const LAYERS: usize = 6;
    let own = device.device();
    let (stream, done, grain) = (own.stream().unwrap(), own.event().unwrap(), own.granularity());
    let tensor = Tensor { name: "o_proj".to_owned(), bytes: 2 * grain, align: 256 };
    let patterns = Patterns::new(&["*"]).unwrap();
    let sharding = Sharding { grain, source: Source::Host, ..Sharding::new(patterns) };
    let group = Group { id: 0, rank: 0, ranks: 1 };
    let plan = Plan::new(&vec![vec![tensor]; LAYERS], group, &sharding).unwrap();
    let faults: Arc<dyn Faults> = Arc::new(NoFaults);
    let mut windows = Windows::new(&own, plan, Pulls { copy: grain }, &faults).unwrap();
    let weights = own.allocate(2 * grain).unwrap();
    (0..LAYERS).for_each(|layer| windows.fill(layer, "o_proj", weights, stream).unwrap());
    let options = RingOptions { parts: 2, wrap: Wrap::Behind, ..RingOptions::default() };
    let mut ring = Ring::new(&own, windows, options).unwrap();
    let uses = |ring: &mut Ring| {
        for layer in 0..LAYERS {
            ring.enter(layer, 0, stream).unwrap();
            ring.leave(layer, 0, stream).unwrap();
        }
        ring.end(stream).unwrap();
    };
    let graph = captured.then(|| {
        ring.begin(1, 0).unwrap();
        own.capture(stream).unwrap();
        uses(&mut ring);
        own.captured(stream).unwrap()
    });
    let mut step = || {
        match graph {
            Some(graph) => ring.launch(stream, || own.launch(graph, stream)).unwrap(),
            None => {
                ring.begin(1, 0).unwrap();
                uses(&mut ring);
            }
        }
        own.record(done, stream).unwrap();
        own.synchronize(done).unwrap();
    };
    (0..4).for_each(|_| step());
    counted(|| (0..20).for_each(|_| step()))
}

/// The cost of a call that allocates and frees once, on the thread that runs it, and of its enqueueing.
fn counted_call(device: &dyn Device) -> u64 {
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    let work: Arc<dyn Fn() + Send + Sync> = Arc::new(|| drop(std::hint::black_box(Box::new(7))));
    let run = || {
        device.call(stream, Arc::clone(&work)).unwrap();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
    };
    run();
    counted(run)
}

/// Allocations of 60 steps of a dense cache's begins, with a group of each kind.
fn dense_begins(device: &Arc<TestDevice>) -> u64 {
    let request =
        Request { bytes: 1 << 16, huge: false, populate: false, lock: false, node: None, shared: false };
    let map = Arc::new(Map::new(&request, &NoFaults).unwrap().0);
    let (pinned, own) = (device.register(&map).unwrap(), device.allocate(1 << 16).unwrap());
    let (host, memory) =
        (|at, bytes| pinned.part(at, bytes).unwrap(), |at, bytes| own.part(at, bytes).unwrap());
    let group = |at| PageTables {
        lanes: host(at, 64),
        table: memory(at, 64),
        slots: memory(at + 64, 64),
        page_tokens: 16,
        pages: 3,
    };
    let groups = [group(4096), group(8192)];
    let begin = BeginPages {
        descriptor: host(0, 4 * words(2, 2) as u64),
        lanes: memory(0, 16),
        accepted: None,
        lengths: memory(64, 8),
        starts: memory(128, 12),
        positions: memory(256, 64),
        wide: true,
        groups: &groups,
        report: host(1024, 40),
    };
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    let mut descriptor = vec![0; words(2, 2)];
    let mut step = |number| {
        let changed = [Changed { first: 0, count: 4 }; 4];
        let row = |lane| Entry { lane, length: FROM_DEVICE, accepted: 0, query_rows: 2, changed };
        encode(number, 2, [row(0), row(1)].into_iter(), &mut descriptor);
        map.copy_in_words(0, &descriptor).unwrap();
        device.enqueue_pages(stream, PageOp::Begin(begin)).unwrap();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
    };
    (0..4).for_each(&mut step);
    counted(|| (0..60).for_each(&mut step))
}

/// A chooser with room for two tables, at misses that need more.
fn chooser() -> Chooser {
    let orders = [vec![0.0, 90_000.0], vec![5000.0, 50_000.0], vec![20_000.0, 30_000.0], Vec::new()];
    let prices = Prices::new(vec![0.0, 100.0], vec![orders]).unwrap();
    let bucket = Bucket { batch: 8, prices, tables: vec![Table::fixed(2, Overlap::None)] };
    let hysteresis = Hysteresis { smoothing: 0.5, share: 0.05, least_ns: 100.0, steps: 3 };
    Chooser::new(vec![bucket], 2, hysteresis).unwrap()
}

/// A step on a clock device that has no memory: work, copies that wait for an engine, edges.
fn simulate(clock: &ClockDevice, streams: [Stream; 4], event: Event) {
    clock.reset().unwrap();
    let label = Label { name: "work", layer: None, micro_batch: None };
    for layer in 0..61 {
        clock.set_misses(Layer(layer), 100.0).unwrap();
        for (n, stream) in (0..).zip(streams) {
            let ns = 1000.0 + f64::from(n * layer);
            clock.compute(stream, label, Demand { ns, sm: 0.5 }).unwrap();
            clock.traffic(stream, label, Direction::ToDevice, 100_000).unwrap();
            clock.record(event, stream).unwrap();
            clock.wait(streams[(n as usize + 1) % 4], event).unwrap();
        }
    }
    assert!(clock.run().unwrap() > 61e3);
}

#[test]
fn p6_a_step_allocates_and_frees_nothing() {
    for options in [
        HostOptions::default(),
        HostOptions { portable: true, ..HostOptions::default() },
        HostOptions { threaded: true, ..HostOptions::default() },
        HostOptions { threaded: true, queue: 1, ..HostOptions::default() },
    ] {
        assert_eq!(Loop::new(TestDevice::host(options), None).warm_steps(60), 0, "{options:?}");
        assert_eq!(ring_steps(&TestDevice::host(options), false), 0, "a ring, {options:?}");
        assert_eq!(dense_begins(&TestDevice::host(options)), 0, "a dense cache, {options:?}");
        assert_eq!(dense::steps(TestDevice::host(options).device()), 0, "a dense cache, {options:?}");
        assert_eq!(dense::arrival(TestDevice::host(options).device()), 0, "an arrival, {options:?}");
    }
    let share = Share { by: ShareBy::Misses, every: 1, ..Share::default() };
    assert_eq!(
        Loop::new(TestDevice::host(HostOptions::default()), Some(share)).warm_steps(60),
        0,
        "{share:?}"
    );
    #[cfg(feature = "cuda")]
    on_the_cuda_device();

    let mut chooser = chooser();
    let mut choose = |misses: u32| {
        let counts = [8, 3].map(|rows| LayerCount { misses: rows * misses, ..LayerCount::default() });
        chooser.choose(&counts, 8, 8).unwrap().changed
    };
    choose(0);
    let mut changed = 0;
    let calls =
        counted(|| changed = (0..400).map(|step| choose(step / 40 % 3 * 45)).filter(|it| *it).count());
    assert_eq!(calls, 0, "a choice");
    assert!(changed > 2, "tables must be changed: {changed}");

    let clock = ClockDevice::new(ClockOptions { record: true, ..ClockOptions::default() }).unwrap();
    let streams = [(); 4].map(|()| clock.stream().unwrap());
    let event = clock.event().unwrap();
    (0..2).for_each(|_| simulate(&clock, streams, event));
    assert_eq!(counted(|| (0..20).for_each(|_| simulate(&clock, streams, event))), 0, "a simulated step");

    #[cfg(feature = "transfer")]
    {
        assert_eq!(transfer::runs(), 0, "the runs of a transfer");
        let [claimed, read] = transfer::claimed();
        assert!(claimed <= read && read < 4096, "{claimed} bytes for a claim, {read} for a side");
        assert_eq!(largest(|| drop(std::hint::black_box(vec![1_u8; 100]))), 100);
        assert_eq!(transfer::frames(), 0, "frames that are read");
        let [few, many] = [2, 4000].map(transfer::notice);
        assert_eq!(few, many, "calls and largest, at the sender and the receiver, of few and many runs");
    }

    // The controls: an allocation is counted, on this thread and on a stream's.
    assert_eq!(counted_call(&*HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() })), 2);
    assert_eq!(counted(|| drop(std::hint::black_box(vec![1_u8; 100]))), 2);
}
