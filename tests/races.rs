//! What a forgotten edge does on the threaded host device: words of before or of after, torn rows at worst, and nothing
//! that the language leaves undefined. By itself this tells wrong slots; under ThreadSanitizer (`make tsan`) it also
//! tells every access of the device room that races another.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, Stream};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{Open, Row, Sequence, Shape, Streams, WarmUp};
use std::sync::Arc;

const K: u32 = 64;
const PROMPT: u32 = 200;
const STEPS: u32 = 100;

/// A cache with one sequence, the stream of its steps, and one on which somebody writes.
struct Engine {
    device: Arc<HostDevice>,
    cache: Cache,
    sequence: Sequence,
    stream: Stream,
    writer: Stream,
    done: Event,
    selection: Slice,
    slots: Slice,
}

fn words(numbers: impl Iterator<Item = u32>) -> Vec<u8> {
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// Positions of a selection, of which there are two: no position is in both.
fn selected(which: u32) -> Vec<u8> {
    words((0..K).map(|at| 2 * at + which))
}

impl Engine {
    fn new() -> Engine {
        let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let shape = Shape { layers: 1, draft_layers: 0, page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, ..Config::new(shape, 1, PROMPT + STEPS + 8, K) };
        let mut cache = Cache::new(config, device.clone()).unwrap();
        let open =
            Open { prompt: PROMPT, promised: STEPS, budget: Budget::Slots(K), bring_up: BringUp::Nothing };
        let sequence = cache.open(&open).unwrap();
        let rows = vec![1; (PROMPT * shape.runs.iter().sum::<u32>()) as usize];
        cache.append(sequence, Layer(0), &rows).unwrap();
        let [stream, writer] = [0; 2].map(|_| device.stream().unwrap());
        let _ticket = cache.join(sequence, stream, WarmUp::default()).unwrap();
        let [selection, slots] = [0; 2].map(|_| device.allocate((4 * K).into()).unwrap());
        device.write(selection, &selected(0)).unwrap();
        let done = device.event().unwrap();
        Engine { device, cache, sequence, stream, writer, done, selection, slots }
    }

    /// Somebody's work in the order of the writer's stream.
    fn write(&self, bytes: Vec<u8>, to: Slice) {
        let device = Arc::downgrade(&self.device);
        let work = move || {
            if let Some(device) = device.upgrade() {
                device.write(to, &bytes).unwrap();
            }
        };
        self.device.call(self.writer, Arc::new(work)).unwrap();
    }

    fn sync(&self, stream: Stream) {
        self.device.record(self.done, stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }

    /// A step in which `beside` enqueues on the writer's stream, ordered before the resolve or not at all. Answers the
    /// slots.
    fn step(&mut self, number: u32, ordered: bool, beside: impl Fn(&Engine)) -> Vec<i32> {
        let row = Row { sequence: self.sequence, accepted: Accepted::Rows(number.min(1)), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), 1, &[row], None, self.stream).unwrap();
        beside(self);
        if ordered {
            self.device.record(self.done, self.writer).unwrap();
            self.device.wait(self.stream, self.done).unwrap();
        }
        let call = LayerCall::whole(Layer(0));
        let streams = Streams { resolve: self.stream, gather: self.stream };
        let buffers = Buffers { selection: self.selection, slots: self.slots, parts: None };
        self.cache.layer(&step, call, streams, buffers).unwrap();
        self.cache.scatter(&step, call, self.stream).unwrap();
        self.cache.finish(&mut step, self.stream).unwrap();
        self.sync(self.stream);
        self.cache.retire(step, self.stream).unwrap();
        let mut slots = vec![0; 4 * K as usize];
        self.device.read(self.slots, &mut slots).unwrap();
        self.cache.validate().unwrap();
        slots.chunks_exact(4).map(|slot| i32::from_le_bytes(slot.try_into().unwrap())).collect()
    }
}

/// Steps beside a writer of selections: how often a step was answered neither all old nor all new, which only the
/// tables could tell, and whether every answer names a row.
fn selections(ordered: bool) -> bool {
    let mut engine = Engine::new();
    (0..STEPS).all(|number| {
        let selection = engine.selection;
        let slots = engine.step(number, ordered, |engine| {
            for which in [0, 1, 0, 1] {
                engine.write(selected(which), selection);
            }
        });
        engine.sync(engine.writer);
        slots.iter().all(|slot| *slot > 0)
    })
}

#[test]
fn a_selection_that_is_written_while_it_is_resolved_is_answered_row_by_row() {
    assert!(selections(false));
}

#[test]
fn a_selection_that_is_written_before_it_is_resolved_is_answered() {
    assert!(selections(true));
}

#[test]
fn rows_that_are_written_while_they_are_fetched_and_stored_are_whole_or_torn() {
    let mut engine = Engine::new();
    let slab = engine.cache.slab(Layer(0)).unwrap();
    for number in 0..STEPS {
        engine.step(number, false, |engine| {
            engine.write(selected(number % 2), engine.selection);
            // Over everything that the step reads and writes on the device, and back.
            engine.device.copy(engine.writer, slab, slab).unwrap();
            engine.write(words(0..K), engine.slots);
        });
        engine.sync(engine.writer);
    }
}
