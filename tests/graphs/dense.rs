//! Captured steps of dense models: the engine captures its kernels once for each micro-batch, and launches that graph
//! in every step of a random world.
//!
//! Sequences open, grow, fork, park and close between the launches, so page tables, slots and lengths change, as data
//! at the same addresses. `prepare`, the waits for pages and `finish` are outside of the graph. In the graph copies
//! take the step's tensors, as a driver's own work would read them, and each layer's kernels write the new rows and
//! read the others by these copies. The world checks every row against its stamps. The host device has no graphs: there
//! the same nodes, made once, are enqueued in every step.

#[path = "../dense/configs.rs"]
mod configs;
#[path = "../dense/devices.rs"]
mod devices;
#[path = "../dense/engine.rs"]
mod engine;
#[path = "../dense/world.rs"]
mod world;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use super::device::{TestDevice, is_given};
use engine::{Expected, Kernels, Launch};
use forebay::dense::{Cache, Tensors};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Graph, Slice, Stream};
use forebay::{Kind, MicroBatch, Step};
use world::{DONE, World};

/// The steps of a micro-batch that are launched and have not run, and the one that runs.
#[derive(Debug, Default)]
struct Turn {
    waiting: VecDeque<(Kernels, Arc<Vec<Expected>>)>,
    now: Option<(Kernels, Arc<Vec<Expected>>)>,
}

/// A node of the engine's step.
enum Node {
    Copy(Slice, Slice),
    Call(Arc<dyn Fn() + Send + Sync>),
}

impl Node {
    fn enqueue(&self, device: &dyn Device, stream: Stream) {
        match self {
            Node::Copy(from, to) => device.copy(stream, *from, *to).unwrap(),
            Node::Call(work) => device.call(stream, Arc::clone(work)).unwrap(),
        }
    }
}

/// The engine's step, made once.
enum Made {
    Graph(Graph),
    /// On a device without graphs.
    Nodes(Vec<Node>),
}

impl Made {
    fn new(nodes: Vec<Node>, device: &dyn Device, stream: Stream) -> Made {
        match device.capture(stream) {
            Ok(()) => {
                nodes.iter().for_each(|node| node.enqueue(device, stream));
                Made::Graph(device.captured(stream).unwrap())
            }
            Err(error) => {
                assert_eq!(error.kind(), Kind::Unsupported);
                Made::Nodes(nodes)
            }
        }
    }

    fn launch(&self, device: &dyn Device, stream: Stream) {
        match self {
            Made::Graph(graph) => device.launch(*graph, stream).unwrap(),
            Made::Nodes(nodes) => nodes.iter().for_each(|node| node.enqueue(device, stream)),
        }
    }
}

/// A step that was made, and those that it is launched for.
type Launched = (Made, Arc<Mutex<Turn>>);

/// A step for each micro-batch.
#[derive(Default)]
struct Graphs {
    by_micro: [Mutex<Option<Launched>>; 2],
    launches: Mutex<u32>,
    /// The control: page tables are copied at the capture, and not by each launch.
    frozen: bool,
}

impl std::fmt::Debug for Graphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graphs").field("frozen", &self.frozen).finish_non_exhaustive()
    }
}

/// Tensors of the same sizes.
fn alike(device: &dyn Device, tensors: &Tensors) -> Tensors {
    let one = |slice: &Slice| device.allocate(slice.bytes()).unwrap();
    Tensors {
        tables: tensors.tables.iter().map(one).collect(),
        slots: tensors.slots.iter().map(one).collect(),
        positions: one(&tensors.positions),
        lengths: one(&tensors.lengths),
        starts: one(&tensors.starts),
    }
}

impl Graphs {
    fn make(&self, kernels: &Kernels, tensors: &Tensors, device: &dyn Device, stream: Stream) -> Launched {
        let (copied, turn) = (Arc::new(alike(device, tensors)), Arc::new(Mutex::new(Turn::default())));
        let mut nodes: Vec<Node> = Vec::new();
        let copies = |from: &[Slice], to: &[Slice]| -> Vec<Node> {
            from.iter().zip(to).map(|(from, to)| Node::Copy(*from, *to)).collect()
        };
        let tables = copies(&tensors.tables, &copied.tables);
        if self.frozen {
            tables.iter().for_each(|node| node.enqueue(device, stream));
        } else {
            nodes.extend(tables);
        }
        nodes.extend(copies(&tensors.slots, &copied.slots));
        let rest = |tensors: &Tensors| [tensors.positions, tensors.lengths, tensors.starts];
        nodes.extend(copies(&rest(tensors), &rest(&copied)));
        let layers = kernels.config.shape.layers() as u32;
        nodes.extend((0..layers).map(|layer| {
            let (turn, copied) = (Arc::clone(&turn), Arc::clone(&copied));
            Node::Call(Arc::new(move || {
                let mut turn = turn.lock().unwrap();
                if layer == 0 {
                    turn.now = turn.waiting.pop_front();
                }
                let (kernels, rows) = turn.now.as_ref().unwrap();
                kernels.work(&copied, rows, layer);
                if layer + 1 == layers {
                    turn.now = None;
                }
            }))
        }));
        (Made::new(nodes, device, stream), turn)
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
        let mut made = self.by_micro[micro as usize].lock().unwrap();
        let tensors = cache.tensors(MicroBatch(micro)).unwrap();
        let (made, turn) = made.get_or_insert_with(|| self.make(kernels, tensors, device, stream));
        turn.lock().unwrap().waiting.push_back((kernels.clone(), Arc::new(rows)));
        made.launch(device, stream);
        *self.launches.lock().unwrap() += 1;
    }

    fn settles(&self, _: u32) -> bool {
        // There is no clock.
        false
    }
}

/// Runs a world on a device. Returns what was done and the launches.
fn run(seed: u64, test: Arc<TestDevice>, frozen: bool) -> ([u32; DONE], u32) {
    let (device, graphs) = (test.device(), Arc::new(Graphs { frozen, ..Graphs::default() }));
    let mut world = World::over(seed, (test, None, device), Some(Arc::clone(&graphs) as Arc<dyn Launch>));
    world.run(1000);
    let launches = *graphs.launches.lock().unwrap();
    (world.done, launches)
}

/// Runs worlds in which every operation must do something.
fn run_all(seeds: u64, on: impl Fn(u64) -> Arc<TestDevice>) {
    let (mut done, mut launches) = ([0; DONE], 0);
    for seed in 0..seeds {
        let ran = run(seed, on(seed), false);
        done.iter_mut().zip(ran.0).for_each(|(sum, done)| *sum += done);
        launches += u64::from(ran.1);
    }
    // A few worlds do not do everything.
    let all = seeds < 20 || done.iter().all(|done| *done > 0);
    assert!(launches > 25 * seeds && all, "{launches} launches, {done:?}");
}

/// With page tables of the first step each world reads wrong rows, and finds that: nothing else ends it.
fn stale(on: impl Fn() -> Arc<TestDevice>) {
    for seed in 0..4 {
        let ran = catch_unwind(AssertUnwindSafe(|| run(seed, on(), true)));
        let said = *ran.unwrap_err().downcast::<String>().unwrap();
        // The first fault of attention: `Kernels::attend`.
        assert!(said.starts_with("[\"group ") && said.contains(" position "), "seed {seed}: {said}");
    }
}

#[test]
fn a_step_of_a_dense_model_that_was_made_once_serves_all_steps_of_a_world() {
    let threaded = |seed: u64| !seed.is_multiple_of(4);
    run_all(if is_given() { 4 } else { 20 }, |seed| {
        TestDevice::new(HostOptions { threaded: threaded(seed), ..HostOptions::default() })
    });
}

#[test]
fn control_page_tables_of_the_first_step_are_stale() {
    stale(|| TestDevice::new(HostOptions::default()));
}

#[cfg(feature = "cuda")]
mod launched {
    use super::*;
    use crate::device::driver_is_there;
    use crate::launched::soak;
    use forebay::dense::{Config, Group, Open, Shape};
    use forebay::device::{CopyPages, PageOp};
    use forebay::{Accepted, BatchRow, Error, Memory, Tokens};

    #[test]
    fn one_graph_of_a_dense_model_serves_all_steps_of_a_world() {
        if !driver_is_there() {
            return;
        }
        let seeds = match (soak(), is_given()) {
            (true, _) => 1000,
            // Each piece of work is a thread on a given driver.
            (_, true) => 8,
            _ => 40,
        };
        run_all(seeds, |seed| {
            let order = (seed % 2 == 1).then_some(seed);
            TestDevice::cuda(&HostOptions::default(), order).unwrap()
        });
    }

    #[test]
    fn control_page_tables_of_the_capture_are_stale() {
        if !driver_is_there() {
            return;
        }
        stale(|| TestDevice::cuda(&HostOptions::default(), None).unwrap());
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
}
