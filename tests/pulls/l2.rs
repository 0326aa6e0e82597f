//! Windows that the ring brings into L2, on the virtual clock: a layer is faster by what its use finds there, and a
//! prefetch for which there is no time costs its bytes.

use std::sync::Arc;

use forebay::device::Device;
use forebay::device::clock::{ClockDevice, ClockOptions, Costs, Demand, L2, Label};
use forebay::weights::{Prefetch, Ring, RingOptions};

use super::{Priced, RATE, STEPS, layer};

/// Layers of two buffers.
const LAYERS: usize = 8;
/// What the memory moves in a microsecond, in bytes of the link.
const MEMORY: u64 = 8;
/// Microseconds of the memory in a use's bytes, and in those of its window.
const USE_US: f64 = 10.0;
const WINDOW_US: f64 = 5.0;
/// Microseconds of the link in a pull.
const PULL_US: f64 = 5.0;

fn bytes(memory_us: f64) -> u64 {
    (memory_us * (MEMORY * RATE) as f64) as u64
}

/// The last step's microseconds, with so many of communication behind each use, a prefetch at `rate` times the link's
/// bytes, and an L2 of so many microseconds of the memory.
fn step_us(rest_us: f64, rate: Option<u64>, l2_us: Option<f64>) -> f64 {
    let l2 = l2_us.map(|us| L2 { bytes: bytes(us), fixed_ns: 0.0, sm: 0.1 });
    let memory = Some((MEMORY * RATE) as f64 * 1e6);
    let mut costs = Costs { launch_ns: 0.0, copy_ns: 0.0, memory, l2, ..Costs::default() };
    costs.peer.rate = RATE as f64 * 1e6;
    costs.peer.copy_engines = 2;
    let clock = ClockDevice::new(ClockOptions { costs, ..ClockOptions::default() }).unwrap();
    let device: Arc<dyn Device> = clock.clone();
    let layers = (0..LAYERS).map(|index| layer((0.0, 0.0), Some(((index % 2) as u8, PULL_US))));
    let mut pulled = Priced::new(Arc::clone(&device), layers.collect(), 1);
    pulled.windows = (0..LAYERS).map(|_| device.allocate(bytes(WINDOW_US)).unwrap()).collect();
    let windows = pulled.windows.clone();
    let prefetch = rate.map(|rate| Prefetch { bytes: u64::MAX, rate: rate * RATE * 1_000_000 });
    let mut ring = Ring::new(&device, pulled, RingOptions { prefetch, ..RingOptions::default() }).unwrap();
    let compute = device.stream().unwrap();
    let label = Label { name: "work", layer: None, micro_batch: None };
    let mut ends = Vec::new();
    for _ in 0..STEPS {
        ring.begin(1, 0).unwrap();
        for (layer, window) in windows.iter().enumerate() {
            ring.enter(layer, 0, compute).unwrap();
            let demand = Demand { ns: 1e3, sm: 0.5 };
            clock.compute_reading(compute, label, demand, bytes(USE_US), &[*window]).unwrap();
            ring.leave(layer, 0, compute).unwrap();
            clock.compute(compute, label, Demand { ns: rest_us * 1e3, sm: 0.5 }).unwrap();
        }
        ring.end(compute).unwrap();
        let end = clock.event().unwrap();
        clock.record(end, compute).unwrap();
        ends.push(end);
    }
    clock.run().unwrap();
    let [.., before, last] = ends[..] else { panic!("two steps") };
    (clock.reached(last).unwrap() - clock.reached(before).unwrap()) / 1e3
}

fn near(found: f64, wanted: f64) {
    assert!((found / wanted - 1.0).abs() < 1e-6, "{found} us, {wanted} wanted");
}

/// Twenty microseconds of communication hide a pull of five and a prefetch of ten. The first layer of a step is not
/// touched; each other one finds its window.
#[test]
fn a_layer_is_faster_by_the_window_that_it_finds() {
    let layers = LAYERS as f64;
    let bare = layers * (USE_US + 20.0);
    // Room for what passes between a prefetch and its use's start, and not for a window of the step before.
    let room = Some(2.5 * USE_US);
    near(step_us(20.0, None, room), bare);
    near(step_us(20.0, Some(4), None), bare);
    near(step_us(20.0, Some(4), room), bare - (layers - 1.0) * WINDOW_US);
    // With room for less than the window, what is left of it.
    near(step_us(20.0, Some(4), Some(2.0)), bare - (layers - 1.0) * 2.0);
    // At a rate that takes longer than the communication it comes too late: nothing is found, and the use divides the
    // memory with what is left of it.
    let slow = step_us(4.0, Some(1), room);
    assert!(slow > layers * (USE_US + 4.0), "{slow}");
}

/// Without time between the uses the memory moves all bytes one after another: a window's are moved twice.
#[test]
fn a_prefetch_without_time_to_hide_in_costs_its_bytes() {
    let layers = LAYERS as f64;
    // A pull is written here and read here for another rank.
    let moved = layers * (USE_US + 2.0 * PULL_US / MEMORY as f64);
    let room = Some(2.5 * USE_US);
    near(step_us(0.0, None, room), moved);
    near(step_us(0.0, Some(MEMORY), room), moved + (layers - 1.0) * WINDOW_US);
}
