//! The ring on the virtual clock, without memory: what its steps wait is what `predict::pulls` computes, layer by
//! layer, from one step to the next too.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Demand, Label};
use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Mapped, PoolLayout, PoolOp, Pools, Slice, Stream,
};
use forebay::os::{Map, Protection};
use forebay::predict::pulls::{self, Layer, Pull};
use forebay::weights::{self, Ring, RingOptions};
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

/// Layers whose pulls are one copy each from a peer's memory.
#[derive(Debug)]
struct Priced {
    device: Arc<dyn Device>,
    layers: Vec<Layer>,
    from: Slice,
    to: Slice,
}

impl Priced {
    fn new(device: Arc<dyn Device>, layers: Vec<Layer>) -> Priced {
        let most = layers.iter().filter_map(|layer| layer.pull).map(|pull| bytes(&pull)).max().unwrap();
        let nothing: OwnedFd = File::open("/dev/null").unwrap().into();
        let peers = device.import_backing(nothing, most, Protection::Read).unwrap();
        let mapped = Mapped { backing: peers, offset: 0, bytes: most };
        let from = device.range(&[mapped], Protection::Read).unwrap();
        Priced { to: device.allocate(most).unwrap(), from, device, layers }
    }
}

/// The bytes of a pull that takes its time alone on the link.
fn bytes(pull: &Pull) -> u64 {
    ((pull.us * RATE as f64) as u64).next_multiple_of(4096)
}

impl weights::Pull for Priced {
    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        self.layers[layer].pull.map(|pull| pull.buffer.into())
    }

    fn copies(&self, _: usize) -> Result<usize> {
        Ok(1)
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        assert_eq!(copies, 0..1);
        let bytes = bytes(&self.layers[layer].pull.unwrap());
        self.device.copy(stream, self.from.part(0, bytes)?, self.to.part(0, bytes)?)
    }

    fn is_whole(&self, _: usize) -> bool {
        false
    }

    fn reads(&self, _: usize, rank: u32) -> bool {
        rank > 0
    }
}

/// The clock, on which nothing but works and pulls takes time.
fn clock(at_once: u32) -> Arc<ClockDevice> {
    let mut costs = Costs { launch_ns: 0.0, copy_ns: 0.0, ..Costs::default() };
    costs.peer.rate = RATE as f64 * 1e6;
    costs.peer.copy_engines = at_once;
    ClockDevice::new(ClockOptions { costs, ..ClockOptions::default() }).unwrap()
}

/// Microseconds from the beginning of a step to that of the next one, in the last two of some steps.
fn step_us(ring: &pulls::Ring) -> f64 {
    let graphs = ring.wrap != pulls::Wrap::Open;
    let clock = clock(ring.at_once);
    let device = Arc::new(Graphs { clock: Arc::clone(&clock), capturing: AtomicBool::new(graphs) });
    let base: Arc<dyn Device> = device.clone();
    let wrap = match ring.wrap {
        pulls::Wrap::Behind => weights::Wrap::Behind,
        pulls::Wrap::Open | pulls::Wrap::Joined => weights::Wrap::Joined,
    };
    let pulled = Priced::new(Arc::clone(&base), ring.layers.clone());
    let mut own = Ring::new(&base, pulled, RingOptions { wrap, ..RingOptions::default() }).unwrap();
    let compute = base.stream().unwrap();
    let work = |name, us: f64| {
        let label = Label { name, layer: None, micro_batch: None };
        clock.compute(compute, label, Demand { ns: us * 1e3, sm: 1.0 }).unwrap();
    };
    let starts: Vec<Event> = (0..24).map(|_| base.event().unwrap()).collect();
    for start in &starts {
        own.begin(1, 0).unwrap();
        if graphs {
            // A launch waits for what was pulled before it. What it launches here is the step that follows.
            for stream in (0..3).filter_map(|buffer| own.stream(buffer)) {
                base.edge(base.event().unwrap(), stream, compute).unwrap();
            }
        }
        base.record(*start, compute).unwrap();
        for (layer, works) in ring.layers.iter().enumerate() {
            own.enter(layer, 0, compute).unwrap();
            work("attention and output", works.uses_us);
            own.leave(layer, 0, compute).unwrap();
            work("rest", works.rest_us);
        }
        work("tail", ring.tail_us);
        own.end(compute).unwrap();
        if graphs {
            own.launch(compute, || Ok(())).unwrap();
        }
        work("between", ring.between_us);
    }
    clock.run().unwrap();
    let at = |index: usize| clock.reached(starts[index]).unwrap() / 1e3;
    at(starts.len() - 1) - at(starts.len() - 2)
}

const WRAPS: [pulls::Wrap; 3] = [pulls::Wrap::Open, pulls::Wrap::Joined, pulls::Wrap::Behind];

/// Compares the clock with the recurrence. Returns what a step waits.
fn compare(ring: &pulls::Ring) -> f64 {
    let works: f64 = ring.layers.iter().map(Layer::us).sum::<f64>() + ring.tail_us + ring.between_us;
    let (clock, computed) = (step_us(ring) - works, pulls::exposed(ring));
    let waits = computed.step_us - works;
    assert!(
        (clock - waits).abs() <= 0.01 * waits.max(1.0),
        "{clock} us on the clock, {waits} computed: {ring:?}"
    );
    waits
}

fn layer((uses_us, rest_us): (f64, f64), pull: Option<(u8, f64)>) -> Layer {
    Layer { uses_us, rest_us, pull: pull.map(|(buffer, us)| Pull { buffer, us }) }
}

/// Equal layers: the clock, the recurrence, and the closed form.
#[test]
fn equal_layers_wait_on_the_clock_as_the_closed_form_says() {
    let mut exposed = 0;
    for layers in [2, 4, 60, 62] {
        for works in [(30.0, 70.0), (80.0, 20.0)] {
            for pull in [10.0, 95.0, 105.0, 150.0, 320.0] {
                for (tail_us, between_us) in [(0.0, 0.0), (50.0, 40.0), (0.0, 900.0)] {
                    for wrap in WRAPS {
                        let one = |index: u32| layer(works, Some(((index % 2) as u8, pull)));
                        let all: Vec<Layer> = (0..layers).map(one).collect();
                        let closed = pulls::uniform_us(layers, &all[0], pull, (tail_us, between_us), wrap);
                        let ring = pulls::Ring { layers: all, tail_us, between_us, at_once: 1, wrap };
                        let waits = compare(&ring);
                        // Two layers have no other layer between a use and the next.
                        let near = (closed - waits).abs() <= 0.01 * waits.max(1.0);
                        assert!(near || layers == 2, "{closed} in closed form, {waits}: {ring:?}");
                        exposed += u32::from(waits > 0.0);
                    }
                }
            }
        }
    }
    assert!(exposed > 100, "{exposed} cases in which a step waits");
}

/// Layers of other lengths, resident ones between, three buffers, and links that serve two pulls at once.
#[test]
fn unequal_layers_wait_on_the_clock_as_the_recurrence_says() {
    let mut state = 7_u64;
    let mut next = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut waited = 0;
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
        for wrap in WRAPS {
            let (tail_us, between_us) = (next(60) as f64, next(60) as f64);
            let ring =
                pulls::Ring { layers: layers.clone(), tail_us, between_us, at_once: 1 + case % 2, wrap };
            waited += u32::from(compare(&ring) > 1.0);
        }
    }
    assert!(waited > 100, "{waited} steps that wait");
}

/// The wrap of a graph: joined is better where there is work behind the last use, behind where there is time between
/// graphs. The clock says the same as `predict::pulls::better`.
#[test]
fn the_better_wrap_is_the_one_that_the_clock_has() {
    for (tail_us, between_us) in [(200.0, 10.0), (5.0, 400.0), (60.0, 60.0)] {
        let layers: Vec<Layer> = (0..8).map(|index| layer((40.0, 60.0), Some((index % 2, 90.0)))).collect();
        let ring = |wrap| pulls::Ring { layers: layers.clone(), tail_us, between_us, at_once: 1, wrap };
        let [joined, behind] = [pulls::Wrap::Joined, pulls::Wrap::Behind].map(|wrap| step_us(&ring(wrap)));
        let (better, _) = pulls::better(&ring(pulls::Wrap::Joined));
        let wanted = if joined <= behind { pulls::Wrap::Joined } else { pulls::Wrap::Behind };
        assert_eq!(better, wanted, "tail {tail_us}, between {between_us}: {joined} us, {behind} us");
    }
}
