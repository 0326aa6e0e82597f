//! The ring in the steps of a cache: an engine's hooks call it, in a step that the cache captures and launches and in
//! steps that it enqueues layer by layer, in each order of overlap, with draft passes of two draft layers.

use forebay::device::{SplitIndices, Stream};
use forebay::overlap::{self, EngineCall, Overlap, OverlapStreams, Work};
use forebay::weights::{Odd, RingOptions, Wrap};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Capture, Captured, Config, Layer, Layers, Memory,
    MicroBatch, Open, Result, Sequence, Shape, Step, WarmUp,
};

use crate::rig::{driver, own, pinned};
use crate::ring::{Engine, Setup, delayed};

const LAYERS: u32 = 6;
const DRAFT_LAYERS: u32 = 2;
const QUERY_ROWS: u32 = 2;
const K: u32 = 8;
/// Draft passes of a step.
const PASSES: u32 = 2;

/// The engine's side: it reads a part of the window before attention, and the rest in the output projection, or
/// wrongly behind it.
struct Hooks<'a> {
    engine: &'a mut Engine,
    late: bool,
}

impl overlap::Engine for Hooks<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let micro_batch = call.micro_batch.index();
        assert_eq!(stream, self.engine.streams[micro_batch]);
        match call.work {
            Work::Project => self.engine.reads(self.engine.at[micro_batch], micro_batch, 0, 1),
            Work::Rest if self.late => {
                self.engine.reads(self.engine.at[micro_batch] - 1, micro_batch, 1, u64::MAX)
            }
            _ => Ok(()),
        }
    }

    fn enter(&mut self, layer: Layer, micro_batch: MicroBatch, _stream: Stream) -> Result<()> {
        self.engine.enter(layer.index(), micro_batch.index())
    }

    fn enqueue_output(&mut self, call: &EngineCall, _stream: Stream) -> Result<()> {
        let micro_batch = call.micro_batch.index();
        if self.late {
            return Ok(());
        }
        self.engine.reads(self.engine.at[micro_batch], micro_batch, 1, u64::MAX)
    }

    fn leave(&mut self, layer: Layer, micro_batch: MicroBatch, _stream: Stream) -> Result<()> {
        self.engine.leave(layer.index(), micro_batch.index())
    }

    fn end(&mut self, stream: Stream) -> Result<()> {
        self.engine.ring.end(stream)
    }
}

/// A cache with a sequence in each micro-batch, which selects nothing, and the engine.
struct Decode {
    engine: Engine,
    cache: Cache,
    layers: [Layers; 2],
    sequences: [Sequence; 2],
    steps: u32,
    late: bool,
}

impl Decode {
    fn new(engine: Engine) -> Decode {
        let device = engine.device.clone();
        let shape = Shape {
            layers: LAYERS,
            draft_layers: DRAFT_LAYERS,
            runs: [64, 0],
            page_tokens: 16,
            top_k: K,
            ..Shape::GLM_5
        };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config =
            Config { query_rows: QUERY_ROWS, micro_batches: 2, memory, ..Config::new(shape, 2, 400, 40) };
        let mut cache = Cache::new(config, device.clone()).unwrap();
        let open = Open { prompt: 20, promised: 300, budget: Budget::Slots(40), bring_up: BringUp::Nothing };
        let entries = u64::from(QUERY_ROWS * K);
        let none = pinned(4096);
        none.copy_in(0, &[0xFF; 4096]).unwrap();
        let none = device.register(&none).unwrap();
        let words = |count: u64| device.allocate(4 * count).unwrap();
        let [first, second] = [0, 1].map(|micro: usize| {
            let compute = engine.streams[micro];
            let sequence = cache.open(&open).unwrap();
            cache.append_in_place(sequence, 20).unwrap();
            let _ticket = cache.join(sequence, compute, WarmUp::default()).unwrap();
            let stream = || device.stream().unwrap();
            let streams = OverlapStreams { compute, resolve: stream(), gather: stream(), scatter: stream() };
            let lists = SplitIndices { lists: words(2 * entries), counts: words(2 * entries), batch: 1 };
            let selection = words(entries);
            device.copy(compute, none.part(0, 4 * entries).unwrap(), selection).unwrap();
            let buffers = Buffers { selection, slots: words(entries), split_indices: Some(lists) };
            (Layers { streams, batch: 1, half: 0, buffers }, sequence)
        });
        engine.wait();
        let (layers, sequences) = ([first.0, second.0], [first.1, second.1]);
        Decode { engine, cache, layers, sequences, steps: 0, late: false }
    }

    fn capture(&mut self, by_layer: &[Overlap]) -> Captured {
        let micro_batches = [0, 1].map(|micro| (MicroBatch(micro), self.layers[micro as usize]));
        let capture =
            Capture { micro_batches: &micro_batches, query_rows: QUERY_ROWS, by_layer, draft_passes: PASSES };
        self.engine.begin().unwrap();
        let mut hooks = Hooks { engine: &mut self.engine, late: self.late };
        self.cache.capture(&capture, &mut hooks).unwrap()
    }

    fn prepare(&mut self, micro: usize) -> Step {
        let accepted = Accepted::Rows(u32::from(self.steps > 0));
        let row = BatchRow { sequence: self.sequences[micro], accepted, query_rows: QUERY_ROWS };
        let compute = self.engine.streams[micro];
        self.cache.prepare(MicroBatch(micro as u32), QUERY_ROWS, &[row], None, compute).unwrap()
    }

    /// A step of both micro-batches, launched or enqueued layer by layer.
    fn step(&mut self, captured: Option<&Captured>, by_layer: &[Overlap]) {
        self.engine.clear();
        // A use of the second micro-batch writes to the log too.
        self.engine.fork();
        let [mut first, mut second] = [0, 1].map(|micro| self.prepare(micro));
        match captured {
            Some(captured) => {
                let (ring, cache, stream) = (&mut self.engine.ring, &mut self.cache, self.engine.streams[0]);
                ring.launch(stream, || cache.launch(captured, &mut [&mut first, &mut second])).unwrap();
            }
            None => {
                let [one, two] = self.layers;
                let mut steps = [(&mut first, one), (&mut second, two)];
                self.engine.begin().unwrap();
                let mut hooks = Hooks { engine: &mut self.engine, late: self.late };
                self.cache.overlap_steps(&mut steps, by_layer, PASSES, &mut hooks).unwrap();
            }
        }
        for (micro, step) in [&mut first, &mut second].into_iter().enumerate() {
            self.cache.finish(step, self.engine.streams[micro]).unwrap();
        }
        self.engine.join();
        self.engine.keep();
        self.engine.wait();
        for (micro, step) in [first, second].into_iter().enumerate() {
            let retired = self.cache.retire(step, self.engine.streams[micro]).unwrap();
            assert_eq!(retired.lengths(), [20 + self.steps]);
        }
        self.steps += 1;
    }
}

fn setup(wrap: Wrap) -> Setup {
    let layers = (LAYERS + DRAFT_LAYERS) as usize;
    let ring =
        RingOptions { draft_layers: DRAFT_LAYERS as usize, micro_batches: 2, parts: 2, wrap, prefetch: None };
    Setup { layers, odd: Odd::Cheapest, ring, draft_passes: PASSES as usize }
}

#[test]
fn steps_that_a_cache_captures_and_launches_find_every_layer() {
    for (wrap, seed) in [(Wrap::Joined, None), (Wrap::Joined, Some(1)), (Wrap::Behind, Some(2))] {
        let Some(driver) = driver(delayed(seed)) else { return };
        let setup = setup(wrap);
        let mut decode = Decode::new(setup.alone(driver.library()));
        for order in Overlap::FIRST {
            let by_layer = vec![order; setup.layers];
            let captured = decode.capture(&by_layer);
            for step in 0..8 {
                decode.step(Some(&captured).filter(|_| step % 3 < 2), &by_layer);
                decode
                    .engine
                    .compare()
                    .unwrap_or_else(|what| panic!("{wrap:?}, {seed:?}, {order:?}: {what}"));
                decode.engine.turn([0, 1, 6, 3][step % 4]);
            }
        }
    }
}

/// The experts come behind the end of a use: what reads the window there finds another layer for some seed, in a graph
/// as well as layer by layer.
#[test]
fn control_a_window_that_is_read_behind_the_output_projection_is_overwritten_for_some_seed() {
    for captures in [true, false] {
        let wrong = |seed| {
            let standin = own(delayed(Some(seed)), "delays by a seed")?;
            let setup = setup(Wrap::Joined);
            let mut decode = Decode::new(setup.alone(standin.library()));
            decode.late = true;
            let by_layer = vec![Overlap::Da; setup.layers];
            let captured = captures.then(|| decode.capture(&by_layer));
            decode.step(captured.as_ref(), &by_layer);
            Some(decode.engine.compare().is_err())
        };
        match wrong(0) {
            None => return,
            Some(first) => assert!(first || (1..40).any(|seed| wrong(seed) == Some(true)), "{captures}"),
        }
    }
}
