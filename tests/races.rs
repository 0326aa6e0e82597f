//! The effect of a missing edge on the threaded host device: words from before or after, at worst torn rows, and no
//! undefined behaviour. By itself this test detects results that name no row; under ThreadSanitizer (`make tsan`) it
//! also detects every access of the host device that races another.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, SplitIndices, Stream};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Sequence, Shape, Step, Streams, WarmUp};
use std::sync::{Arc, Mutex, mpsc};

const K: u32 = 64;
const PROMPT: u32 = 200;
const STEPS: u32 = 60;

/// A cache with one sequence, the stream of its steps, and one for the writer.
struct Engine {
    device: Arc<HostDevice>,
    cache: Cache,
    sequence: Sequence,
    stream: Stream,
    writer: Stream,
    done: Event,
    /// A warm-up's selections.
    warm: Slice,
    accepted: Slice,
    buffers: Buffers,
}

fn words(numbers: impl Iterator<Item = u32>) -> Vec<u8> {
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// Positions of a selection. There are two selections, and no position is in both.
fn selected(which: u32) -> Vec<u8> {
    words((0..K).map(|at| 2 * at + which))
}

impl Engine {
    /// Row `p` of the prompt is filled with `p`.
    fn new() -> Engine {
        let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let shape = Shape { layers: 1, draft_layers: 0, page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, ..Config::new(shape, 1, PROMPT + STEPS + 8, K) };
        let mut cache = Cache::new(config, device.clone()).unwrap();
        let (budget, bring_up) = (Budget::Slots(K), BringUp::Nothing);
        let sequence = cache.open(&Open { prompt: PROMPT, promised: STEPS, budget, bring_up }).unwrap();
        let row_bytes = cache.geometry().row_bytes() as usize;
        let rows: Vec<u8> = (0..PROMPT).flat_map(|row| vec![row as u8; row_bytes]).collect();
        cache.append(sequence, Layer(0), &rows).unwrap();
        let [stream, writer] = [0; 2].map(|_| device.stream().unwrap());
        let waves = u64::from(cache.attention_waves());
        let words_of = |count: u64| device.allocate(4 * count).unwrap();
        let [selection, slots, warm] = [0; 3].map(|_| words_of(K.into()));
        let lists = words_of((1 + waves) * u64::from(K));
        let split_indices = Some(SplitIndices { lists, counts: words_of(1 + waves), batch: 1 });
        let accepted = words_of(1);
        [selection, warm].iter().for_each(|slice| device.write(*slice, &selected(0)).unwrap());
        let (done, buffers) = (device.event().unwrap(), Buffers { selection, slots, split_indices });
        Engine { device, cache, sequence, stream, writer, done, warm, accepted, buffers }
    }

    /// Writes on the writer's stream.
    fn write(&self, bytes: Vec<u8>, to: Slice) {
        let device = Arc::downgrade(&self.device);
        let work = move || device.upgrade().unwrap().write(to, &bytes).unwrap();
        self.device.call(self.writer, Arc::new(work)).unwrap();
    }

    /// Holds the writer's stream until the result is dropped.
    fn hold(&self) -> mpsc::Sender<()> {
        let (open, closed) = mpsc::channel::<()>();
        let closed = Mutex::new(closed);
        let wait = move || assert!(closed.lock().unwrap().recv().is_err());
        self.device.call(self.writer, Arc::new(wait)).unwrap();
        open
    }

    fn sync(&self, stream: Stream) {
        self.device.record(self.done, stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }

    fn join(&mut self) {
        let warm = WarmUp { selections: Some(self.warm), steps: 1, ..WarmUp::default() };
        let _ticket = self.cache.join(self.sequence, self.stream, warm).unwrap();
    }

    fn prepare(&mut self) -> Step {
        let row = BatchRow { sequence: self.sequence, accepted: Accepted::OnDevice, query_rows: 1 };
        self.cache.prepare(MicroBatch(0), 1, &[row], Some(self.accepted), self.stream).unwrap()
    }

    fn enqueue(&mut self, step: &mut Step) {
        let call = LayerCall::whole(Layer(0));
        let streams = Streams { resolve: self.stream, gather: self.stream };
        self.cache.layer(step, call, streams, self.buffers).unwrap();
        self.cache.scatter(step, call, self.stream).unwrap();
        self.cache.finish(step, self.stream).unwrap();
    }

    /// The contents of the rows that a step's slots name, one byte each, and the count of the first index list.
    fn read_back(&mut self, step: Step) -> (Vec<u32>, u32) {
        self.sync(self.stream);
        self.cache.retire(step, self.stream).unwrap();
        self.cache.validate().unwrap();
        let mut slots = vec![0; 4 * K as usize];
        self.device.read(self.buffers.slots, &mut slots).unwrap();
        let slab = self.cache.slab(Layer(0)).unwrap();
        let held = slots.chunks_exact(4).map(|slot| {
            let slot = u32::try_from(i32::from_le_bytes(slot.try_into().unwrap())).unwrap();
            let mut byte = [0];
            let place = self.cache.geometry().pieces(slot)[0].slab;
            self.device.read(slab.part(place, 1).unwrap(), &mut byte).unwrap();
            u32::from(byte[0])
        });
        let held = held.collect();
        let mut count = [0; 4];
        let counts = self.buffers.split_indices.unwrap().counts;
        self.device.read(counts.part(0, 4).unwrap(), &mut count).unwrap();
        (held, u32::from_le_bytes(count))
    }
}

#[test]
fn a_selection_written_while_it_is_resolved_resolves_entry_by_entry() {
    let mut engine = Engine::new();
    let (selection, warm, accepted) = (engine.buffers.selection, engine.warm, engine.accepted);
    engine.write(selected(1), warm);
    engine.join();
    engine.write(selected(1), warm);
    for number in 0..STEPS {
        engine.sync(engine.writer);
        engine.device.write(accepted, &words([number.min(1)].into_iter())).unwrap();
        let mut step = engine.prepare();
        for which in [1, 0, 1, 0] {
            engine.write(selected(which), selection);
            // The same count, written again while it may be read.
            engine.write(words([number.min(1)].into_iter()), accepted);
        }
        engine.enqueue(&mut step);
        let (held, resident) = engine.read_back(step);
        assert!((0..).zip(&held).all(|(at, row)| row / 2 == at), "{held:?}");
        assert!(resident <= K, "{resident}");
    }
}

/// A step whose selection is written on a stream that is held until the step is enqueued, with the edge or without.
fn after_an_edge(ordered: bool) -> Vec<u32> {
    let mut engine = Engine::new();
    engine.join();
    engine.device.write(engine.accepted, &words([0].into_iter())).unwrap();
    let mut step = engine.prepare();
    let held = engine.hold();
    engine.write(selected(1), engine.buffers.selection);
    if ordered {
        let written = engine.device.event().unwrap();
        engine.device.record(written, engine.writer).unwrap();
        engine.device.wait(engine.stream, written).unwrap();
    }
    engine.enqueue(&mut step);
    if !ordered {
        engine.sync(engine.stream);
    }
    drop(held);
    engine.read_back(step).0
}

#[test]
fn a_selection_after_an_edge_is_the_one_that_was_written() {
    assert!((0..).zip(after_an_edge(true)).all(|(at, row)| row == 2 * at + 1));
}

#[test]
fn control_a_selection_without_the_edge_is_the_old_one() {
    assert!((0..).zip(after_an_edge(false)).all(|(at, row)| row == 2 * at));
}

#[test]
fn rows_and_slots_overwritten_during_a_step_leave_its_tables_whole() {
    let mut engine = Engine::new();
    engine.join();
    let slab = engine.cache.slab(Layer(0)).unwrap();
    let (selection, slots, split_indices) =
        (engine.buffers.selection, engine.buffers.slots, engine.buffers.split_indices.unwrap());
    for number in 0..STEPS {
        engine.sync(engine.writer);
        engine.device.write(engine.accepted, &words([number.min(1)].into_iter())).unwrap();
        engine.device.write(selection, &selected(number % 2)).unwrap();
        let mut step = engine.prepare();
        // Over everything that the step reads and writes on the device, and back.
        engine.device.copy(engine.writer, slab, slab).unwrap();
        engine.write(words(0..K), slots);
        // An impossible count names no word beyond the lists.
        engine.write(vec![0xFF; split_indices.counts.bytes() as usize], split_indices.counts);
        engine.enqueue(&mut step);
        engine.sync(engine.stream);
        engine.cache.retire(step, engine.stream).unwrap();
        engine.cache.validate().unwrap();
    }
}
