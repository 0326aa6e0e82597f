//! Captured steps of dense models: the engine captures its kernels once for each micro-batch, and launches that graph
//! in every step of a random world.
//!
//! Sequences open, grow, fork, park and close between the launches, so page tables, slots and lengths change, as data
//! at the same addresses. `prepare`, the waits for pages and `finish` are outside of the graph. In the graph copies
//! take the step's tensors, as a driver's own work would read them, and each layer's kernels write the new rows and
//! read the others by these copies. The world checks every row against its stamps.

#[path = "../dense/configs.rs"]
mod configs;
#[path = "../dense/devices.rs"]
mod devices;
#[path = "../dense/engine.rs"]
mod engine;
#[path = "../dense/world.rs"]
mod world;

use std::collections::VecDeque;
use std::panic::catch_unwind;
use std::sync::{Arc, Mutex};

use super::device::{TestDevice, driver_is_there, is_given};
use engine::{Expected, Kernels, Launch};
use forebay::dense::{Cache, Config, Group, Open, Shape, Tensors};
use forebay::device::host::HostOptions;
use forebay::device::{CopyPages, Device, Graph, PageOp, Stream};
use forebay::{Accepted, BatchRow, Error, Kind, Memory, MicroBatch, Step, Tokens};
use world::{DONE, World};

/// The steps of a micro-batch that are launched and have not run, and the one that runs.
#[derive(Debug, Default)]
struct Turn {
    waiting: VecDeque<(Kernels, Arc<Vec<Expected>>)>,
    now: Option<(Kernels, Arc<Vec<Expected>>)>,
}

/// A graph, and the steps that it is launched for.
type Captured = (Graph, Arc<Mutex<Turn>>);

/// A graph for each micro-batch.
#[derive(Debug, Default)]
struct Graphs {
    by_micro: [Mutex<Option<Captured>>; 2],
    launches: Mutex<u32>,
    /// The control: page tables are copied at the capture, and not by each launch.
    frozen: bool,
}

/// Tensors of the same sizes.
fn alike(device: &dyn Device, tensors: &Tensors) -> Tensors {
    let one = |slice: &forebay::device::Slice| device.allocate(slice.bytes()).unwrap();
    Tensors {
        tables: tensors.tables.iter().map(one).collect(),
        slots: tensors.slots.iter().map(one).collect(),
        positions: one(&tensors.positions),
        lengths: one(&tensors.lengths),
        starts: one(&tensors.starts),
    }
}

impl Graphs {
    fn capture(&self, kernels: &Kernels, tensors: &Tensors, device: &dyn Device, stream: Stream) -> Captured {
        let (copied, turn) = (Arc::new(alike(device, tensors)), Arc::new(Mutex::new(Turn::default())));
        let copy = |from, to| device.copy(stream, from, to).unwrap();
        let tables = || tensors.tables.iter().zip(&copied.tables).for_each(|(from, to)| copy(*from, *to));
        if self.frozen {
            tables();
        }
        device.capture(stream).unwrap();
        if !self.frozen {
            tables();
        }
        tensors.slots.iter().zip(&copied.slots).for_each(|(from, to)| copy(*from, *to));
        copy(tensors.positions, copied.positions);
        copy(tensors.lengths, copied.lengths);
        copy(tensors.starts, copied.starts);
        let layers = kernels.config.shape.layers() as u32;
        for layer in 0..layers {
            let (turn, copied) = (Arc::clone(&turn), Arc::clone(&copied));
            let work = move || {
                let mut turn = turn.lock().unwrap();
                if layer == 0 {
                    turn.now = turn.waiting.pop_front();
                }
                let (kernels, rows) = turn.now.as_ref().unwrap();
                kernels.work(&copied, rows, layer);
                if layer + 1 == layers {
                    turn.now = None;
                }
            };
            device.call(stream, Arc::new(work)).unwrap();
        }
        (device.captured(stream).unwrap(), turn)
    }
}

impl Launch for Graphs {
    fn launch(
        &self,
        kernels: &Kernels,
        cache: &mut Cache,
        (device, stream): (&dyn Device, Stream),
        (step, micro): (&Step, u32),
        rows: Vec<Expected>,
    ) {
        // All layers at once: a graph cannot wait for a copy outside of it.
        cache.arrived(step, kernels.config.shape.layers() as u32 - 1, stream).unwrap();
        let mut graph = self.by_micro[micro as usize].lock().unwrap();
        let tensors = cache.tensors(MicroBatch(micro)).unwrap();
        let (graph, turn) = graph.get_or_insert_with(|| self.capture(kernels, tensors, device, stream));
        turn.lock().unwrap().waiting.push_back((kernels.clone(), Arc::new(rows)));
        device.launch(*graph, stream).unwrap();
        *self.launches.lock().unwrap() += 1;
    }

    fn settles(&self, _: u32) -> bool {
        // There is no clock.
        false
    }
}

/// Runs a world on the CUDA device, by a seed that delays and reorders or in order. Returns what was done and the
/// launches.
fn run(seed: u64, order: Option<u64>, frozen: bool) -> ([u32; DONE], u32) {
    let test = TestDevice::cuda(&HostOptions::default(), order).unwrap();
    let (device, graphs) = (test.device(), Arc::new(Graphs { frozen, ..Graphs::default() }));
    let mut world = World::over(seed, (test, None, device), Some(Arc::clone(&graphs) as Arc<dyn Launch>));
    world.run(1000);
    let launches = *graphs.launches.lock().unwrap();
    (world.done, launches)
}

#[test]
fn one_graph_of_a_dense_model_serves_all_steps_of_a_world() {
    if !driver_is_there() {
        return;
    }
    // Each piece of work is a thread on a given driver.
    let usual = if is_given() { 8 } else { 40 };
    let worlds = if super::launched::soak() { 1000 } else { usual };
    let (mut done, mut launches) = ([0; DONE], 0);
    for seed in 0..worlds {
        let ran = run(seed.into(), (seed % 2 == 1).then_some(seed.into()), false);
        done.iter_mut().zip(ran.0).for_each(|(sum, done)| *sum += done);
        launches += ran.1;
    }
    let all = worlds < 40 || done.iter().all(|done| *done > 0);
    assert!(launches > 25 * worlds && all, "{launches} launches, {done:?}");
}

#[test]
fn control_page_tables_of_the_capture_are_stale() {
    if !driver_is_there() {
        return;
    }
    for seed in 0..4 {
        assert!(catch_unwind(|| run(seed, None, true)).is_err(), "seed {seed}");
    }
}

/// What belongs to one step only is enqueued outside of captures: `prepare`, and copies of pages.
#[test]
fn prepare_and_copies_of_pages_are_refused_in_a_capture_and_done_after_it() {
    if !driver_is_there() {
        return;
    }
    let test = TestDevice::cuda(&HostOptions::default(), None).unwrap();
    let groups = vec![Group { layers: vec![0], runs: [16, 0], window: None }];
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let base = Config::new(Shape { page_tokens: 16, groups }, 2, 64);
    let config = Config { step_tokens: 40, host_pages: vec![8], memory, ..base };
    let (stream, mut cache) = (test.stream().unwrap(), Cache::new(config, test.device()).unwrap());
    let (ids, open) = ([7; 32], Open { prompt: 40, promised: 20 });
    let names = cache.names(b"", Tokens::new(&ids)).unwrap();
    let sequence = cache.open_shared(&open, &names, stream).unwrap().sequence;
    let step = |cache: &mut Cache, accepted, query_rows| {
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows };
        let mut step = cache.prepare(MicroBatch(0), &[row], None, stream)?;
        cache.finish(&mut step, stream)?;
        let ended = test.event()?;
        test.record(ended, stream)?;
        test.synchronize(ended)?;
        cache.retire(step, stream).map(|_| ()).map_err(|unretired| unretired.error)
    };
    step(&mut cache, 0, 40).unwrap();
    assert_eq!(cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 32);

    let plane = cache.planes(0).unwrap().next().unwrap();
    test.capture(stream).unwrap();
    let copy = PageOp::Copy(CopyPages { planes: &[(plane, plane)], pages: &[(1, 2)] });
    let error = test.enqueue_pages(stream, copy).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::InvalidState, "the stream is being captured"));
    test.release(test.captured(stream).unwrap()).unwrap();

    // The cache's own calls first wait for work that is not in the capture, which breaks it.
    let refused = |error: Error| {
        assert_eq!(error.kind(), Kind::InvalidState, "{error}");
        assert_eq!(test.captured(stream).unwrap_err().kind(), Kind::InvalidState);
    };
    test.capture(stream).unwrap();
    refused(cache.save(stream, u64::MAX).unwrap_err());
    cache.validate().unwrap();
    assert_eq!(cache.stats().bytes_down, 0);
    // The copies are still noted, and the next call enqueues them.
    assert_eq!((cache.save(stream, u64::MAX).unwrap(), cache.stats().bytes_down), (0, 512));
    test.capture(stream).unwrap();
    refused(step(&mut cache, 40, 1).unwrap_err());
    cache.validate().unwrap();
    step(&mut cache, 40, 1).unwrap();
    assert_eq!(cache.length(sequence).unwrap().committed, 40);
}
