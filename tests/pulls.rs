//! The ring on the virtual clock, without memory: its steps take what `predict::pulls` computes, and in closed form
//! what `pulls::uniform_us` says; without the waits that the ring enqueues they do not.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "pulls/beside.rs"]
mod beside;
#[path = "pulls/l2.rs"]
mod l2;

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Demand, Label};
use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice, Stream,
};
use forebay::os::{Map, Protection};
use forebay::predict::pulls::{self, Cycle, End, Fill, Layer};
use forebay::weights::{Pull, Ring, RingOptions, Wrap};
use forebay::{Lane, Result};

/// Bytes that the link moves in a microsecond.
const RATE: u64 = 1 << 20;

/// A clock that says of its streams that they are captured, where a test asks for it. What is enqueued then runs at
/// once: the graph of one launch.
#[derive(Debug)]
struct Graphs {
    clock: Arc<ClockDevice>,
    capturing: AtomicBool,
}

/// The other methods, forwarded.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $result { self.clock.$name($($argument),*) })*
    };
}

impl Device for Graphs {
    hand_on! {
        allocate(bytes: u64) -> Result<Slice>;
        register(map: &Arc<Map>) -> Result<Slice>;
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        backing(bytes: u64) -> Result<Backing>;
        range(pieces: &[Mapped], protection: Protection) -> Result<Slice>;
        remap(part: Slice, pieces: &[Mapped]) -> Result<()>;
        maps_offsets() -> Result<bool>;
        export(backing: Backing, protection: Protection) -> Result<OwnedFd>;
        import_backing(descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing>;
        give_back(backing: Backing) -> Result<()>;
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        record(event: Event, stream: Stream) -> Result<()>;
        wait(stream: Stream, event: Event) -> Result<()>;
        query(event: Event) -> Result<bool>;
        synchronize(event: Event) -> Result<()>;
        copy(stream: Stream, from: Slice, to: Slice) -> Result<()>;
        prefetch(stream: Stream, slice: Slice, rate: u64) -> Result<()>;
        enqueue_pages(stream: Stream, op: PageOp<'_>) -> Result<()>;
        call(stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;
        complete(stream: Stream, completer: Completer) -> Result<()>;
        attach(layout: PoolLayout) -> Result<Pools>;
        enqueue(pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()>;
        confine(stream: Option<Stream>) -> Result<()>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: as above.
        unsafe { self.clock.import(address, bytes) }
    }

    fn is_capturing(&self, _: Stream) -> Result<bool> {
        Ok(self.capturing.load(Ordering::Relaxed))
    }
}

/// Layers whose pulls are copies from a peer's memory, so many each, and all as long.
#[derive(Debug)]
struct Priced {
    device: Arc<dyn Device>,
    layers: Vec<Layer>,
    copies: usize,
    from: Slice,
    to: Slice,
    /// By layer, if the ring may bring them into L2.
    windows: Vec<Slice>,
}

impl Priced {
    fn new(device: Arc<dyn Device>, layers: Vec<Layer>, copies: usize) -> Priced {
        let most = layers.iter().filter_map(|layer| layer.pull).map(|pull| bytes(&pull)).max().unwrap();
        let nothing: OwnedFd = File::open("/dev/null").unwrap().into();
        let peers = device.import_backing(nothing, most, Protection::Read).unwrap();
        let mapped = Mapped { backing: peers, offset: 0, bytes: most };
        let from = device.range(&[mapped], Protection::Read).unwrap();
        Priced { to: device.allocate(most).unwrap(), from, device, layers, copies, windows: vec![] }
    }
}

/// The bytes of a pull that takes its time alone on the link.
fn bytes(pull: &Fill) -> u64 {
    ((pull.us * RATE as f64) as u64).next_multiple_of(4096)
}

impl Pull for Priced {
    fn rank(&self) -> u32 {
        0
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        self.layers[layer].pull.map(|pull| pull.buffer.into())
    }

    fn copies(&self, _: usize) -> Result<usize> {
        Ok(self.copies)
    }

    fn pull_some(&self, layer: usize, stream: Stream, mut copies: Range<usize>) -> Result<()> {
        let bytes = bytes(&self.layers[layer].pull.unwrap()) / self.copies as u64;
        copies.try_for_each(|_| self.device.copy(stream, self.from.part(0, bytes)?, self.to.part(0, bytes)?))
    }

    fn window(&self, layer: usize) -> Result<Option<Slice>> {
        Ok(self.windows.get(layer).copied())
    }

    fn is_whole(&self, _: usize) -> bool {
        false
    }

    fn reads(&self, _: usize, rank: u32) -> bool {
        rank > 0
    }
}

/// The clock, on which nothing but works and pulls takes time.
fn clock(at_once: u32, memory: Option<f64>) -> Arc<ClockDevice> {
    let mut costs = Costs { launch_ns: 0.0, copy_ns: 0.0, memory, ..Costs::default() };
    costs.peer.rate = RATE as f64 * 1e6;
    costs.peer.copy_engines = at_once;
    ClockDevice::new(ClockOptions { costs, record: true, ..ClockOptions::default() }).unwrap()
}

/// Steps that are enqueued.
const STEPS: usize = 24;

/// By step, microseconds from its beginning to that of the next one. The clock leaves out the waits of these numbers;
/// returned is their number too.
fn steps_us(cycle: &Cycle, without: Range<u64>) -> (Vec<f64>, u64) {
    let graphs = cycle.end != End::Open;
    let clock = clock(cycle.at_once, None);
    clock.without_waits(without);
    let device = Arc::new(Graphs { clock: Arc::clone(&clock), capturing: AtomicBool::new(graphs) });
    let base: Arc<dyn Device> = device.clone();
    let wrap = match cycle.end {
        End::Open => Wrap::default(),
        End::Graph(wrap) => wrap,
    };
    let pulled = Priced::new(Arc::clone(&base), cycle.layers.clone(), 1);
    let mut own = Ring::new(&base, pulled, RingOptions { wrap, ..RingOptions::default() }).unwrap();
    let compute = base.stream().unwrap();
    let work = |name, us: f64| {
        let label = Label { name, layer: None, micro_batch: None };
        clock.compute(compute, label, Demand { ns: us * 1e3, sm: 1.0 }).unwrap();
    };
    let starts: Vec<Event> = (0..=STEPS).map(|_| base.event().unwrap()).collect();
    for start in &starts {
        own.begin(1, 0).unwrap();
        if graphs {
            // A launch waits for what was pulled before it. What it launches here is the step that follows.
            for stream in (0..3).filter_map(|buffer| own.stream(buffer)) {
                base.edge(base.event().unwrap(), stream, compute).unwrap();
            }
        }
        base.record(*start, compute).unwrap();
        for (layer, works) in cycle.layers.iter().enumerate() {
            own.enter(layer, 0, compute).unwrap();
            work("attention and output", works.uses_us);
            own.leave(layer, 0, compute).unwrap();
            work("rest", works.rest_us);
        }
        work("tail", cycle.tail_us);
        own.end(compute).unwrap();
        if graphs {
            own.launch(compute, || Ok(())).unwrap();
        }
        work("between", cycle.between_us);
    }
    clock.run().unwrap();
    let at: Vec<f64> = starts.iter().map(|start| clock.reached(*start).unwrap() / 1e3).collect();
    (at.windows(2).map(|two| two[1] - two[0]).collect(), clock.waits())
}

/// The last of some steps.
fn step_us(cycle: &Cycle) -> f64 {
    *steps_us(cycle, 0..0).0.last().unwrap()
}

const ENDS: [End; 3] = [End::Open, End::Graph(Wrap::Joined), End::Graph(Wrap::Behind)];

/// A step's works, without waits.
fn works_us(cycle: &Cycle) -> f64 {
    cycle.layers.iter().map(Layer::us).sum::<f64>() + cycle.tail_us + cycle.between_us
}

/// Compares the clock with the recurrence. Returns what a step waits.
fn compare(cycle: &Cycle) -> f64 {
    let (steps, computed) = (steps_us(cycle, 0..0).0, pulls::exposed(cycle));
    let waits = computed.step_us - works_us(cycle);
    let agrees = |step: &f64| (step - computed.step_us).abs() <= 0.01 * waits.max(1.0);
    assert!(agrees(&steps[STEPS - 1]), "{steps:?} us on the clock, {} computed: {cycle:?}", computed.step_us);
    // From the second on a graph's steps are all alike: the first pulls of all are before the first one.
    assert!(cycle.end == End::Open || steps[1..].iter().all(agrees), "{steps:?}: {cycle:?}");
    assert!((computed.us() - waits).abs() <= 1e-6 * waits.max(1.0), "{computed:?}: {cycle:?}");
    waits
}

fn layer((uses_us, rest_us): (f64, f64), pull: Option<(u8, f64)>) -> Layer {
    Layer { uses_us, rest_us, pull: pull.map(|(buffer, us)| Fill { buffer, us }) }
}

/// Equal layers: the clock, the recurrence, and the closed form.
#[test]
fn equal_layers_wait_on_the_clock_as_the_closed_form_says() {
    let mut exposed = 0;
    for layers in [2, 4, 60, 62] {
        for works in [(30.0, 70.0), (80.0, 20.0)] {
            for pull in [10.0, 95.0, 105.0, 150.0, 320.0] {
                for (tail_us, between_us) in [(0.0, 0.0), (50.0, 40.0), (0.0, 900.0)] {
                    for end in ENDS {
                        let one = |index: u32| layer(works, Some(((index % 2) as u8, pull)));
                        let all: Vec<Layer> = (0..layers).map(one).collect();
                        let closed = match layers {
                            // Two layers keep their buffers.
                            2 => 0.0,
                            _ => pulls::uniform_us(layers, &all[0], pull, (tail_us, between_us), end),
                        };
                        let cycle = Cycle { layers: all, tail_us, between_us, at_once: 1, end };
                        let waits = compare(&cycle);
                        let near = (closed - waits).abs() <= 0.01 * waits.max(1.0);
                        assert!(near, "{closed} in closed form, {waits}: {cycle:?}");
                        exposed += u32::from(waits > 0.0);
                    }
                }
            }
        }
    }
    assert!(exposed > 100, "{exposed} cases in which a step waits");
}

/// Two pulls that are launched behind a graph share the link, and both are late: the closed form is of one at a time.
#[test]
fn two_pulls_at_once_behind_a_graph_wait_longer_than_the_closed_form() {
    let one = |index: u32| layer((3.0, 7.0), Some(((index % 2) as u8, 10.5)));
    let layers: Vec<Layer> = (0..60).map(one).collect();
    let end = End::Graph(Wrap::Behind);
    let closed = pulls::uniform_us(60, &layers[0], 10.5, (0.0, 0.0), end);
    let cycle = |at_once| Cycle { layers: layers.clone(), tail_us: 0.0, between_us: 0.0, at_once, end };
    let [single, both] = [1, 2].map(|at_once| compare(&cycle(at_once)));
    assert_eq!([closed, single, both].map(|us| (10.0 * us).round() / 10.0), [43.0, 43.0, 46.0]);
}

/// The control: without the waits that the ring enqueues, a step takes its works alone.
#[test]
fn without_its_waits_a_step_on_the_clock_waits_for_nothing() {
    for end in ENDS {
        let layers = (0..8).map(|index| layer((50.0, 50.0), Some((index % 2, 250.0)))).collect();
        let cycle = Cycle { layers, tail_us: 0.0, between_us: 0.0, at_once: 1, end };
        assert!(compare(&cycle) > 1_000.0);
        let (_, waits) = steps_us(&cycle, 0..0);
        let (bare, _) = steps_us(&cycle, 0..waits);
        assert!((bare[STEPS - 1] - 800.0).abs() < 1e-6, "{bare:?}: {end:?}");
    }
}

/// Layers of other lengths, resident ones between, three buffers, and links that serve two pulls at once.
#[test]
fn unequal_layers_wait_on_the_clock_as_the_recurrence_says() {
    let mut state = 7_u64;
    let mut next = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut waited = [0; 3];
    for case in 0..120 {
        let count = 3 + next(12);
        let mut ordinal = 0_u8;
        let layers: Vec<Layer> = (0..count)
            .map(|index| {
                let works = (20.0 + next(80) as f64, 10.0 + next(90) as f64);
                // An odd last layer has a buffer of its own.
                let buffer = if index + 1 == count && ordinal.is_multiple_of(2) { 2 } else { ordinal % 2 };
                let pulled = next(5) > 0;
                ordinal += u8::from(pulled);
                layer(works, pulled.then(|| (buffer, 30.0 + next(220) as f64)))
            })
            .collect();
        if !layers.iter().any(|layer| layer.pull.is_some()) {
            continue;
        }
        for (end, waited) in ENDS.into_iter().zip(&mut waited) {
            let (tail_us, between_us) = (next(60) as f64, next(60) as f64);
            let cycle = Cycle { layers: layers.clone(), tail_us, between_us, at_once: 1 + case % 2, end };
            *waited += u32::from(compare(&cycle) > 1.0);
        }
    }
    assert!(waited.iter().all(|steps| *steps > 40), "{waited:?} of 120 steps each that wait");
}

/// The wrap of a graph: joined is better where there is work behind the last use, behind where there is time between
/// graphs. The clock says the same as `predict::pulls::better`.
#[test]
fn the_better_wrap_is_the_one_that_the_clock_has() {
    for (tail_us, between_us) in [(200.0, 10.0), (5.0, 400.0), (60.0, 60.0)] {
        let layers: Vec<Layer> = (0..8).map(|index| layer((40.0, 60.0), Some((index % 2, 90.0)))).collect();
        let cycle =
            |wrap| Cycle { layers: layers.clone(), tail_us, between_us, at_once: 1, end: End::Graph(wrap) };
        let [joined, behind] = [Wrap::Joined, Wrap::Behind].map(|wrap| step_us(&cycle(wrap)));
        let (better, _) = pulls::better(&cycle(Wrap::Joined));
        let wanted = if joined <= behind { Wrap::Joined } else { Wrap::Behind };
        assert_eq!(better, wanted, "tail {tail_us}, between {between_us}: {joined} us, {behind} us");
    }
}
