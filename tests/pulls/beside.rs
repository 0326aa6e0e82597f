//! What pulls do to the engine's work on the virtual clock: to works that the device's memory bounds, and to
//! collectives, which need the same link.

use std::sync::Arc;

use forebay::device::clock::{ClockDevice, Demand, Label, Span};
use forebay::device::{Device, Stream};
use forebay::predict::pulls::{self, Cycle, End, Layer};
use forebay::weights::{Ring, RingOptions};

use super::{Priced, RATE, STEPS, clock, layer};

/// An even number of layers of two buffers.
const LAYERS: usize = 8;

/// A clock, its ring, and the engine's stream.
struct Rig {
    clock: Arc<ClockDevice>,
    ring: Ring<Priced>,
    compute: Stream,
}

fn named(name: &'static str) -> Label {
    Label { name, layer: None, micro_batch: None }
}

impl Rig {
    /// Layers whose pulls take so many microseconds alone, in so many copies.
    fn new(pull_us: f64, parts: usize, memory: Option<f64>) -> Rig {
        let clock = clock(2, memory);
        let device: Arc<dyn Device> = clock.clone();
        let layers = (0..LAYERS).map(|index| layer((0.0, 0.0), Some(((index % 2) as u8, pull_us))));
        let pulled = Priced::new(Arc::clone(&device), layers.collect(), parts);
        let ring = Ring::new(&device, pulled, RingOptions { parts, ..RingOptions::default() }).unwrap();
        let compute = device.stream().unwrap();
        Rig { clock, ring, compute }
    }

    /// Steps of the same layers, of which `before` is the use and `after` the rest. Returns the microseconds of the
    /// last step.
    fn steps(&mut self, before: impl Fn(&mut Rig), after: impl Fn(&mut Rig)) -> f64 {
        let mut ends = Vec::new();
        for _ in 0..STEPS {
            self.ring.begin(1, 0).unwrap();
            for layer in 0..LAYERS {
                self.ring.enter(layer, 0, self.compute).unwrap();
                before(self);
                self.ring.leave(layer, 0, self.compute).unwrap();
                after(self);
            }
            self.ring.end(self.compute).unwrap();
            let end = self.clock.event().unwrap();
            self.clock.record(end, self.compute).unwrap();
            ends.push(end);
        }
        self.clock.run().unwrap();
        let [.., before, last] = ends[..] else { panic!("two steps") };
        (self.clock.reached(last).unwrap() - self.clock.reached(before).unwrap()) / 1e3
    }

    fn works(&self, us: f64, bytes: f64) {
        let demand = Demand { ns: us * 1e3, sm: 1.0 };
        self.clock.compute_in_memory(self.compute, named("work"), demand, bytes as u64).unwrap();
    }
}

/// The memory reads and writes so many times the link's bytes.
const MEMORY: f64 = 8.0;

/// Hidden pulls make a layer longer by what they take of its memory's rate: what they write, and as much that the
/// other ranks read. The recurrence of such layers has the same step. A layer that the memory does not bound loses
/// nothing.
#[test]
fn hidden_pulls_take_the_memory_of_works_that_it_bounds() {
    let (uses, rest, pull) = (30.0, 70.0, 60.0);
    let bytes_us = MEMORY * RATE as f64;
    let step = |memory: Option<f64>, bound: f64| {
        let mut rig = Rig::new(pull, 1, memory);
        rig.steps(
            |rig| rig.works(uses, bound * uses * bytes_us),
            |rig| rig.works(rest, bound * rest * bytes_us),
        )
    };
    let alone = LAYERS as f64 * (uses + rest);
    let memory = Some(bytes_us * 1e6);
    let slower = 1.0 + 2.0 * pull / MEMORY / (uses + rest);
    let longer: Vec<Layer> = (0..LAYERS)
        .map(|index| layer((slower * uses, slower * rest), Some(((index % 2) as u8, pull))))
        .collect();
    let cycle = Cycle { layers: longer, tail_us: 0.0, between_us: 0.0, at_once: 2, end: End::Open };
    let wanted = pulls::exposed(&cycle).step_us;
    assert!((wanted - slower * alone).abs() < 1e-6 && wanted > 1.1 * alone, "{wanted} {alone}");
    let found = step(memory, 1.0);
    assert!((found / wanted - 1.0).abs() < 0.01, "{found} us on the clock, {wanted} computed");
    // Half of the memory's rate leaves room for the pulls; and the control is a memory that is not divided.
    for (memory, bound) in [(memory, 0.5), (memory, 0.0), (None, 1.0)] {
        let found = step(memory, bound);
        assert!((found / alone - 1.0).abs() < 1e-6, "{found} us, {alone} alone: {memory:?} {bound}");
    }
}

/// Microseconds of the collectives of a layer: the exchange of its tokens to experts and back.
const EXCHANGE_US: f64 = 10.0;

/// A layer of 100 us: 30 of attention and projection, 10 of routing, the exchange, 30 of experts, the exchange back,
/// 10 of others. Returns a step's time, and the longest collective after the first step.
fn exchanged(parts: usize, pull_us: f64) -> (f64, f64) {
    let collective = |rig: &mut Rig| {
        let demand = Demand { ns: EXCHANGE_US * 1e3, sm: 0.1 };
        let bytes = EXCHANGE_US * RATE as f64;
        rig.clock.collective(rig.compute, named("exchange"), demand, bytes as u64).unwrap();
        rig.ring.advance(rig.compute).unwrap();
    };
    let mut rig = Rig::new(pull_us, parts, None);
    let step_us = rig.steps(
        |rig| rig.works(30.0, 0.0),
        |rig| {
            rig.works(10.0, 0.0);
            collective(rig);
            rig.works(30.0, 0.0);
            collective(rig);
            rig.works(10.0, 0.0);
        },
    );
    let spans: Vec<Span> = rig.clock.spans().into_iter().filter(|span| span.name == "exchange").collect();
    let took = spans[2 * LAYERS..].iter().map(|span| (span.end_ns - span.start_ns) / 1e3);
    (step_us, took.fold(0.0, f64::max))
}

/// A pull in one part shares the link with the next collective, which takes twice as long. In parts that begin behind
/// collectives and end before the next ones, it leaves them their link, and is hidden all the same.
#[test]
fn a_pull_in_parts_leaves_collectives_their_link() {
    let alone = LAYERS as f64 * 100.0;
    let near = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 1e-3;
    // Seven points: from a layer's `leave` to the `enter` of the one after the next. Two pulls are on their way, so
    // two parts of 30/7 us run in each of the shortest gaps, of 10 us.
    let (step, exchange) = exchanged(7, 30.0);
    assert!(near(exchange, EXCHANGE_US) && near(step, alone), "{step} us, an exchange of {exchange}");
    let (step, exchange) = exchanged(1, 30.0);
    assert!(near(exchange, 2.0 * EXCHANGE_US) && step > 1.09 * alone, "{step} us, an exchange of {exchange}");
    // Parts that are longer than the gaps reach into the collectives again.
    let (step, exchange) = exchanged(7, 60.0);
    assert!(exchange > 1.2 * EXCHANGE_US && step > 1.01 * alone, "{step} us, an exchange of {exchange}");
}
