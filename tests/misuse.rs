//! Mistakes of an engine between a prepare and a retire: each is an error or a failed step, never a wrong row.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/forgets.rs"]
mod forgets;

use device::TestDevice;
use forebay::device::descriptor::{Cause, Entry, Report, Sticky, step};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Begin, Device, Event, PoolOp, ResolveOutput, Slice, SplitIndices, StepRange, Stream};
use forebay::os::{Map, NoFaults, Request};
use forebay::residency::QueryRange;
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Layer, LayerCall, Memory};
use forebay::{BatchRow, MicroBatch, Open, SLOT_BLOCK, Sequence, Shape, Slots, Stats, Step, Streams, WarmUp};
use forgets::{Call, Forgets};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const K: u32 = 8;

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    forgets: Arc<Forgets>,
    stream: Stream,
    buffers: Buffers,
    done: Event,
}

fn config() -> Config {
    let shape = Shape { layers: 2, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config { memory, ..Config::new(shape, 2, 64, 16) }
}

impl Engine {
    fn new(threaded: bool) -> Engine {
        Engine::with(threaded, config())
    }

    fn with(threaded: bool, config: Config) -> Engine {
        let device = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
        let buffer = || device.allocate(u64::from(4 * K)).unwrap();
        let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
        let forgets = Forgets::new(device.device(), None);
        let cache = Cache::new(config, forgets.clone()).unwrap();
        let (stream, done) = (device.stream().unwrap(), device.event().unwrap());
        Engine { cache, device, forgets, stream, buffers, done }
    }

    /// A sequence of 24 rows, each filled with its position.
    fn open(&mut self) -> Sequence {
        self.open_of(30)
    }

    /// As [`Engine::open`], with so many promised tokens.
    fn open_of(&mut self, promised: u32) -> Sequence {
        let budget = Budget::Slots(self.cache.config().min_budget);
        let open = Open { prompt: 24, promised, budget, bring_up: BringUp::Nothing };
        let sequence = self.cache.open(&open).unwrap();
        let rows: Vec<u8> = (0..24).flat_map(|position| [position; 32]).collect();
        for layer in (0..self.cache.geometry().layers()).map(Layer) {
            self.cache.append(sequence, layer, &rows).unwrap();
        }
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        sequence
    }

    fn select(&self, first: i32) {
        self.sync(self.stream);
        let positions: Vec<u8> = (first..first + K as i32).flat_map(i32::to_le_bytes).collect();
        self.device.write(self.buffers.selection, &positions).unwrap();
    }

    fn sync(&self, stream: Stream) {
        self.device.record(self.done, stream).unwrap();
        self.device.synchronize(self.done).unwrap();
    }

    fn prepare(&mut self, sequence: Sequence, accepted: u32) -> Step {
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 1 };
        self.cache.prepare(MicroBatch(0), 1, &[row], None, self.stream).unwrap()
    }

    /// All due calls of a step's layer.
    fn whole(&self, step: &Step, layer: u32) {
        let (call, streams) =
            (LayerCall::whole(Layer(layer)), Streams { resolve: self.stream, gather: self.stream });
        self.cache.layer(step, call, streams, self.buffers).unwrap();
        self.cache.scatter(step, call, self.stream).unwrap();
    }

    fn finish(&mut self, step: &mut Step) {
        self.cache.finish(step, self.stream).unwrap();
        self.sync(self.stream);
    }

    /// The first byte of the rows in the slots that a layer returned.
    fn held(&self, layer: Layer, slots: Slice) -> Vec<u8> {
        let mut returned = vec![0; 4 * K as usize];
        self.device.read(slots, &mut returned).unwrap();
        let slab = self.cache.slab(layer).unwrap();
        let held = returned.chunks_exact(4).map(|slot| {
            let slot = u32::from_le_bytes(slot.try_into().unwrap());
            let piece = self.cache.geometry().pieces(slot)[0];
            let mut byte = [0];
            self.device.read(slab.part(piece.slab, 1).unwrap(), &mut byte).unwrap();
            byte[0]
        });
        held.collect()
    }

    /// One valid step over positions from `first` on; its misses, and the contents of the slots of layer 0.
    fn decode(&mut self, sequence: Sequence, accepted: u32, first: i32) -> (u64, Vec<u8>) {
        self.select(first);
        let mut step = self.prepare(sequence, accepted);
        [1, 0].into_iter().for_each(|layer| self.whole(&step, layer));
        self.finish(&mut step);
        let held = self.held(Layer(0), self.buffers.slots);
        (self.cache.retire(step, self.stream).unwrap().total().1, held)
    }
}

#[test]
fn a_resolve_without_its_gather_fails_the_step_and_a_truncation_trusts_no_row_of_it() {
    let mut e = Engine::new(false);
    let sequence = e.open();
    e.select(4);
    let mut step = e.prepare(sequence, 0);
    // The host enqueues it, and it never arrives.
    e.forgets.leave_out(|call, _, _| call == Call::Gather);
    [1, 0].into_iter().for_each(|layer| e.whole(&step, layer));
    e.forgets.leave_out(|_, _, _| false);
    e.finish(&mut step);
    let unretired = e.cache.retire(step, e.stream).unwrap_err();
    assert_eq!(unretired.error.kind(), Kind::DeviceFailed);
    assert!(unretired.error.place().contains("not gathered"), "{}", unretired.error);
    let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
    e.cache.validate().unwrap();
    // Everything is fetched again, and has the right bytes.
    assert_eq!(e.decode(sequence, 0, 4), (16, (4..12).collect()));
    assert_eq!(e.decode(sequence, 0, 4).0, 0, "the control: now it is resident");
}

#[test]
fn an_attention_wave_that_is_not_gathered_fails_the_step_but_costs_no_resident_row() {
    // A budget of 4 and k 8: four rows in scratch slots, two per wave.
    for (waves, missing, hits_after) in [
        (&[0, 1][..], None, 4),
        (&[0], Some("an attention wave's rows were not gathered"), 4),
        (&[1, 0, 1], Some("a layer's missed rows were not gathered"), 0),
        (&[], Some("a layer's missed rows were not gathered"), 0),
    ] {
        let shape = Shape { layers: 1, ..config().shape };
        let mut e = Engine::with(false, Config { shape, min_budget: 4, attention_waves: 2, ..config() });
        assert_eq!(e.cache.attention_waves(), 2);
        let words = |count: u32| e.device.allocate(u64::from(4 * count)).unwrap();
        e.buffers.split_indices = Some(SplitIndices { lists: words(3 * K), counts: words(3), batch: 1 });
        let sequence = e.open();
        e.select(4);
        let layer = LayerCall::whole(Layer(0));
        let mut step = e.prepare(sequence, 0);
        e.cache.resolve(&step, layer, e.stream, e.buffers).unwrap();
        waves.iter().for_each(|wave| e.cache.gather(&step, layer, *wave, e.stream).unwrap());
        // The host enqueues the others, and they never arrive.
        e.forgets.leave_out(|call, _, _| call == Call::Gather);
        [0, 1].iter().for_each(|wave| e.cache.gather(&step, layer, *wave, e.stream).unwrap());
        e.forgets.leave_out(|_, _, _| false);
        e.cache.scatter(&step, layer, e.stream).unwrap();
        e.finish(&mut step);
        match (e.cache.retire(step, e.stream), missing) {
            (Ok(_), None) => {}
            (Err(unretired), Some(missing)) => assert!(unretired.error.place().contains(missing)),
            (retired, _) => panic!("{waves:?}: {retired:?}"),
        }
        let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
        let mut step = e.prepare(sequence, 0);
        e.cache.resolve(&step, layer, e.stream, e.buffers).unwrap();
        [0, 1].iter().for_each(|wave| e.cache.gather(&step, layer, *wave, e.stream).unwrap());
        e.cache.scatter(&step, layer, e.stream).unwrap();
        e.finish(&mut step);
        assert_eq!(
            e.cache.retire(step, e.stream).unwrap().total(),
            (hits_after, 8 - hits_after),
            "{waves:?}"
        );
    }
}

/// The state of a sequence's residency that a refused resize must not change.
fn held_by(e: &Engine, sequence: Sequence) -> (Vec<u32>, Stats, u64) {
    let budgets = e.cache.budgets(sequence).unwrap().to_vec();
    (budgets, e.cache.stats(), e.cache.digest(sequence).unwrap())
}

/// A resize is refused with this kind and place, and changes nothing.
fn refused_resize(e: &mut Engine, sequence: Sequence, budget: &Budget, kind: Kind, place: &str) -> Error {
    let before = held_by(e, sequence);
    let error = e.cache.resize(sequence, budget, e.stream).unwrap_err();
    assert_eq!((error.kind(), error.place()), (kind, place), "{error}");
    assert_eq!(held_by(e, sequence), before, "{error}");
    e.cache.validate().unwrap();
    error
}

/// Layers of five and of two slot blocks, for sequences of up to 186 slots.
fn narrow() -> Config {
    let slots = Slots::ByLayer(vec![5 * SLOT_BLOCK, 2 * SLOT_BLOCK]);
    Config { lanes: 3, host_pages: 40, index_pages: 40, slots, min_budget: 8, max_tokens: 184, ..config() }
}

#[test]
fn a_budget_that_cannot_be_is_refused_by_name_and_changes_nothing() {
    let mut e = Engine::with(false, narrow());
    let [one, two] = [(); 2].map(|()| e.open_of(160));
    e.decode(one, 0, 4);
    let mut refused = |budget, kind, place| refused_resize(&mut e, one, &budget, kind, place);
    for ratio in [0.0, -1.0, 1.01, f64::NAN, f64::INFINITY] {
        refused(Budget::Ratio(ratio), Kind::InvalidConfig, "ratio");
    }
    for layers in [vec![], vec![64], vec![64; 3]] {
        refused(Budget::ByLayer(layers), Kind::InvalidConfig, "layers");
    }
    for few in [Budget::Slots(0), Budget::Slots(7), Budget::ByLayer(vec![64, 7])] {
        let error = refused(few, Kind::InvalidConfig, "slots");
        assert_eq!(error.number("least"), Some(8));
    }
    // A sequence of 184 tokens and two in flight reaches further than the second layer.
    for (many, wanted) in [(Budget::ByLayer(vec![8, 129]), 129), (Budget::Slots(u32::MAX), 186)] {
        let error = refused(many, Kind::OutOfRange, "slots of a layer");
        let numbers = ["layer", "wanted", "most"].map(|name| error.number(name));
        assert_eq!(numbers, [Some(1), Some(wanted), Some(128)]);
    }
    // The first layer has room, and the second layer's other block is the other sequence's.
    let error = refused(Budget::Slots(65), Kind::Exhausted, "slot blocks");
    assert_eq!(["layer", "wanted", "free"].map(|name| error.number(name)), [Some(1), Some(1), Some(0)]);
    // The control: what fits is done.
    e.cache.close(two, e.stream).unwrap();
    e.cache.resize(one, &Budget::Slots(65), e.stream).unwrap();
    assert_eq!(e.cache.budgets(one).unwrap(), [65, 65]);
    assert_eq!(e.decode(one, 0, 4), (0, (4..12).collect()));
}

#[test]
fn a_sequence_that_cannot_be_resized_now_is_refused_by_its_state_and_keeps_its_slots() {
    let mut e = Engine::with(false, narrow());
    let budget = Budget::Slots(20);
    let open = Open { prompt: 24, promised: 30, budget: Budget::Slots(8), bring_up: BringUp::Whole };
    let invalid = Kind::InvalidState;
    let sequence = e.cache.open(&open).unwrap();
    let filling = "the prompt is not complete, or the sequence has not joined";
    refused_resize(&mut e, sequence, &budget, invalid, filling);
    e.cache.append_in_place(sequence, 24).unwrap();
    refused_resize(&mut e, sequence, &budget, invalid, filling);
    let slowly = WarmUp { bytes_a_call: 64, ..WarmUp::default() };
    let _ticket = e.cache.join(sequence, e.stream, slowly).unwrap();
    refused_resize(&mut e, sequence, &budget, invalid, "the warm-up is not complete");
    while !e.cache.is_running(sequence).unwrap() {
        let _ticket = e.cache.join_more(sequence, e.stream).unwrap();
    }
    // From prepare to finish.
    e.select(4);
    let mut step = e.prepare(sequence, 0);
    let open_step = "a step of the sequence is open";
    refused_resize(&mut e, sequence, &budget, Kind::Busy, open_step);
    [0, 1].into_iter().for_each(|layer| e.whole(&step, layer));
    refused_resize(&mut e, sequence, &budget, Kind::Busy, open_step);
    e.finish(&mut step);
    e.cache.resize(sequence, &budget, e.stream).unwrap();
    e.cache.retire(step, e.stream).unwrap();
    // One that was given up, and one that failed.
    let mut step = e.prepare(sequence, 0);
    e.cache.abandon(&mut step).unwrap();
    refused_resize(&mut e, sequence, &Budget::Slots(9), Kind::Busy, open_step);
    e.cache.finish(&mut step, e.stream).unwrap();
    refused_resize(&mut e, sequence, &Budget::Slots(9), invalid, "a step of the sequence failed");
    e.cache.retire(step, e.stream).unwrap_err();
    refused_resize(&mut e, sequence, &Budget::Slots(9), invalid, "a step of the sequence failed");
    let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
    e.select(100);
    let mut step = e.prepare(sequence, 0);
    [0, 1].into_iter().for_each(|layer| e.whole(&step, layer));
    e.finish(&mut step);
    assert_eq!(e.cache.retire(step, e.stream).unwrap_err().error.kind(), Kind::DeviceFailed);
    refused_resize(&mut e, sequence, &Budget::Slots(9), invalid, "a step of the sequence failed");
    let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
    e.cache.resize(sequence, &Budget::Slots(9), e.stream).unwrap();
    assert_eq!(e.cache.budgets(sequence).unwrap(), [9, 9]);
    // Closed, with a step in flight, and gone; and a handle that never was one.
    let mut step = e.prepare(sequence, 0);
    [0, 1].into_iter().for_each(|layer| e.whole(&step, layer));
    e.finish(&mut step);
    e.cache.close(sequence, e.stream).unwrap();
    for handle in [sequence, Sequence::from_bits(u64::MAX)] {
        let before = e.cache.stats();
        let error = e.cache.resize(handle, &budget, e.stream).unwrap_err();
        assert_eq!((error.kind(), e.cache.budgets(handle).unwrap_err().kind()), (Kind::Closed, Kind::Closed));
        assert_eq!(e.cache.stats(), before);
    }
    let _ = e.cache.retire(step, e.stream);
    assert_eq!(e.cache.resize(sequence, &budget, e.stream).unwrap_err().kind(), Kind::Closed);
    assert_eq!(e.cache.stats().slots_in_use, 0);
}

#[test]
fn there_are_no_more_attention_waves_than_rows_to_fetch() {
    // 44 rows beyond the budget: 30 waves have shares of 2, so 22 waves suffice.
    let waves = |min_budget: u32, attention_waves: u32| {
        let shape = Shape { top_k: 48, ..config().shape };
        let config = Config { shape, min_budget, attention_waves, ..config() };
        Cache::new(config, TestDevice::new(HostOptions::default()).device()).unwrap().attention_waves()
    };
    assert_eq!([waves(4, 30), waves(4, 7), waves(4, 1), waves(4, 1000)], [22, 7, 1, 44]);
    assert_eq!(waves(16, u32::MAX), 32);
}

#[test]
fn a_gather_of_another_layer_fails_the_step_and_copies_nothing() {
    let mut e = Engine::new(false);
    let sequence = e.open();
    e.select(4);
    let mut step = e.prepare(sequence, 0);
    e.cache.resolve(&step, LayerCall::whole(Layer(0)), e.stream, e.buffers).unwrap();
    e.cache.gather(&step, LayerCall::whole(Layer(1)), 0, e.stream).unwrap();
    e.cache.gather(&step, LayerCall::whole(Layer(0)), 0, e.stream).unwrap();
    e.cache.scatter(&step, LayerCall::whole(Layer(0)), e.stream).unwrap();
    e.whole(&step, 1);
    e.finish(&mut step);
    assert_eq!(e.cache.retire(step, e.stream).unwrap_err().error.kind(), Kind::DeviceFailed);
    let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
    assert_eq!(e.decode(sequence, 0, 4), (16, (4..12).collect()), "the device continues");
}

#[test]
fn a_step_after_a_failed_one_fails_too_and_accepts_nothing_of_it() {
    let mut e = Engine::new(false);
    let sequence = e.open();
    e.select(40);
    let mut bad = e.prepare(sequence, 0);
    [0, 1].into_iter().for_each(|layer| e.whole(&bad, layer));
    e.finish(&mut bad);
    let mut later = e.prepare(sequence, 1);
    [0, 1].into_iter().for_each(|layer| e.whole(&later, layer));
    e.finish(&mut later);
    // Retired in the other order: the later one must not look valid even then.
    let error = e.cache.retire(later, e.stream).unwrap_err().error;
    assert_eq!(error.place(), "an earlier step of the sequence failed");
    assert_eq!(e.cache.retire(bad, e.stream).unwrap_err().error.kind(), Kind::DeviceFailed);
    assert_eq!(e.cache.length(sequence).unwrap().committed, 24, "the failed row was not accepted");
    let _ticket = e.cache.truncate(sequence, 24, e.stream).unwrap();
    assert_eq!(e.decode(sequence, 0, 0).1, (0..8).collect::<Vec<u8>>());
}

#[test]
fn resolve_and_gather_on_two_streams_have_their_edge() {
    let mut e = Engine::new(true);
    let sequence = e.open();
    let gather = e.device.stream().unwrap();
    e.select(4);
    let mut step = e.prepare(sequence, 0);
    let held = e.device.hold(e.stream);
    let streams = Streams { resolve: e.stream, gather };
    e.cache.layer(&step, LayerCall::whole(Layer(0)), streams, e.buffers).unwrap();
    drop(held);
    e.sync(gather);
    e.cache.scatter(&step, LayerCall::whole(Layer(0)), e.stream).unwrap();
    e.whole(&step, 1);
    e.finish(&mut step);
    assert_eq!(e.cache.retire(step, e.stream).unwrap().total().1, 16);
}

#[test]
fn selection_and_slots_must_be_two_buffers() {
    let mut e = Engine::new(false);
    let sequence = e.open();
    let step = e.prepare(sequence, 0);
    let both = |slots: Slice| Buffers { slots, ..e.buffers };
    let call = LayerCall::whole(Layer(0));
    let error = e.cache.resolve(&step, call, e.stream, both(e.buffers.selection)).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, "selection and slots overlap"));
}

#[test]
fn numbers_at_the_end_of_their_type_are_errors() {
    let mut e = Engine::new(false);
    let sequence = e.open();
    let step = e.prepare(sequence, 0);
    let call = LayerCall::draft_pass(Layer(0), u32::MAX);
    assert_eq!(e.cache.scatter(&step, call, e.stream).unwrap_err().kind(), Kind::OutOfRange);
    let call = LayerCall { batch_rows: Some((u32::MAX, u32::MAX)), ..LayerCall::whole(Layer(0)) };
    assert_eq!(e.cache.scatter(&step, call, e.stream).unwrap_err().kind(), Kind::OutOfRange);
    let huge = [
        Config { slots: Slots::Uniform(u32::MAX), ..config() },
        Config { max_tokens: u32::MAX - 2, ..config() },
        Config { max_tokens: u32::MAX, ..config() },
        Config { lanes: u32::MAX, ..config() },
        Config { query_rows: u32::MAX, ..config() },
        Config { steps_in_flight: u32::MAX, ..config() },
        Config { host_pages: u32::MAX, shape: Shape { page_tokens: 1024, ..Shape::GQA_8X128 }, ..config() },
    ];
    for config in huge {
        let refused = Cache::new(config.clone(), TestDevice::new(HostOptions::default()).device());
        assert!(refused.is_err(), "{config:?}");
    }
}

#[test]
fn a_wait_is_for_the_last_record_however_far_other_streams_are() {
    let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
    let [slow, fast, waiting] = [0, 1, 2].map(|_| device.stream().unwrap());
    let event = device.event().unwrap();
    let open = Arc::new(AtomicBool::new(false));
    let gate = Arc::clone(&open);
    let hold = move || {
        while !gate.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    };
    device.call(slow, Arc::new(hold)).unwrap();
    device.record(event, slow).unwrap();
    device.wait(waiting, event).unwrap();
    device.record(event, fast).unwrap();
    device.synchronize(event).unwrap();
    let passed = Arc::new(AtomicBool::new(false));
    let (seen, before) = (Arc::clone(&passed), Arc::clone(&open));
    device
        .call(waiting, Arc::new(move || seen.store(before.load(Ordering::Acquire), Ordering::Release)))
        .unwrap();
    for _ in 0..1000 {
        std::thread::yield_now();
    }
    open.store(true, Ordering::Release);
    let done = device.event().unwrap();
    device.record(done, waiting).unwrap();
    device.synchronize(done).unwrap();
    assert!(passed.load(Ordering::Acquire), "the waiting stream went on before the record it waits for");
}

#[test]
fn a_record_that_is_refused_leaves_the_event_as_it_was() {
    let device = TestDevice::new(HostOptions::default());
    let event = device.event().unwrap();
    assert!(device.record(event, Stream(99)).is_err());
    assert!(device.query(event).unwrap());
    device.synchronize(event).unwrap();
}

/// Runs a step with a descriptor that no cache writes. Returns its slots in layer 0, and its report.
fn step_with_lanes(e: &Engine, lanes: [u32; 2]) -> (Vec<u8>, Report) {
    let request =
        Request { bytes: 4096, huge: false, populate: true, lock: false, node: None, shared: false };
    let map = Arc::new(Map::new(&request, &NoFaults).unwrap().0);
    let all = e.device.register(&map).unwrap();
    let mut words = vec![0; step::words(2)];
    let entry = |lane| Entry { lane, accepted: 0, query_rows: 1 };
    step::encode(9, lanes.map(entry).into_iter(), &mut words);
    map.copy_in_words(0, &words).unwrap();
    let descriptor = all.part(0, 4 * words.len() as u64).unwrap();
    let report = all.part(2048, 4 * Report::words(2, 2) as u64).unwrap();
    let rows = QueryRange { first: 0, count: 1 };
    let range = StepRange { micro_batch: MicroBatch(0), layer: Layer(0), first: 0, count: 2, rows };
    let [selection, slots] = [(); 2].map(|()| e.device.allocate(u64::from(8 * K)).unwrap());
    let positions: Vec<u8> = (0..2 * K as i32).flat_map(i32::to_le_bytes).collect();
    e.device.write(selection, &positions).unwrap();
    e.device.write(slots, &[7; 8 * K as usize]).unwrap();
    let output = ResolveOutput { slots, split_indices: None };
    for op in [
        PoolOp::Begin(Begin { micro_batch: MicroBatch(0), descriptor, accepted: None }),
        PoolOp::Resolve { range, selection, output },
        PoolOp::Report { micro_batch: MicroBatch(0), slot: report },
    ] {
        e.device.enqueue(e.cache.pools(), e.stream, op).unwrap();
    }
    e.sync(e.stream);
    let (mut read, mut words) = (Report::with_room(2, 2), vec![0; Report::words(2, 2)]);
    map.copy_out_words(2048, &mut words).unwrap();
    read.decode(&words, 9, 2).unwrap();
    let mut returned = vec![0; 8 * K as usize];
    e.device.read(slots, &mut returned).unwrap();
    (returned, read)
}

/// No cache writes such a descriptor. None of its rows runs. Its step fails, and so do the next steps of its lanes. Its
/// slots are not those that the valid step before it returned.
#[test]
fn a_descriptor_that_names_a_lane_twice_or_out_of_range_runs_nothing_and_fails_its_lanes() {
    for (lanes, value) in [([0, 0], 0), ([0, 77], 77)] {
        let mut e = Engine::new(false);
        let sequence = e.open();
        let mut sound = e.prepare(sequence, 0);
        [0, 1].into_iter().for_each(|layer| e.whole(&sound, layer));
        e.finish(&mut sound);
        e.cache.retire(sound, e.stream).unwrap();
        let digest = e.cache.digest(sequence).unwrap();
        let (returned, read) = step_with_lanes(&e, lanes);
        assert_eq!(read.sticky, Some(Sticky { row: 1, layer: 0, cause: Cause::Tables, value }));
        assert_eq!(read.lengths[0], 24);
        assert!(returned.iter().all(|byte| *byte == 0xFF), "no slot of a row is expected");
        assert_eq!(e.cache.digest(sequence).unwrap(), digest);
        e.cache.validate().unwrap();
        let mut next = e.prepare(sequence, 0);
        [0, 1].into_iter().for_each(|layer| e.whole(&next, layer));
        e.finish(&mut next);
        let unretired = e.cache.retire(next, e.stream).unwrap_err();
        assert_eq!(unretired.error.place(), Cause::Earlier.describe());
    }
}

/// The batch row of a lane without a sequence resolves to no slots, whatever the row before it was.
#[test]
fn a_lane_without_a_sequence_resolves_to_no_slots() {
    let mut e = Engine::new(false);
    let _sequence = e.open();
    let (returned, read) = step_with_lanes(&e, [0, 1]);
    assert_eq!(read.sticky.map(|wrong| (wrong.row, wrong.cause)), Some((1, Cause::Tables)));
    let (found, none) = returned.split_at(4 * K as usize);
    assert!(found.chunks_exact(4).all(|slot| ![[7; 4], [0xFF; 4]].contains(&slot.try_into().unwrap())));
    assert!(none.iter().all(|byte| *byte == 0xFF), "{none:?}");
}

#[test]
fn all_layers_at_once_are_refused_where_one_would_overwrite_rows_fetched_by_another() {
    // A sequence of 24 rows: a budget of 8 holds the selection of a step, and one of 4 does not.
    for (budget, refused) in [(8, false), (4, true)] {
        let mut e = Engine::with(false, Config { min_budget: budget, ..config() });
        let sequence = e.open();
        let (one, all) = (u64::from(4 * K), u64::from(8 * K));
        let [selection, slots] = [(); 2].map(|()| e.device.allocate(all).unwrap());
        let layer = |of: Slice, layer: u64| of.part(one * layer, one).unwrap();
        let positions: Vec<u8> = (4..12).chain(14..22).flat_map(i32::to_le_bytes).collect();
        e.device.write(selection, &positions).unwrap();
        let streams = Streams { resolve: e.stream, gather: e.stream };
        let mut step = e.prepare(sequence, 0);
        let called = e.cache.layers(&step, streams, selection, slots);
        if refused {
            let error = called.unwrap_err();
            assert_eq!(error.kind(), Kind::InvalidConfig);
            assert!(error.to_string().contains("call layer by layer"), "{error}");
            // The control: what would have happened.
            for (number, of) in [0, 1].map(|n| (u64::from(n), Layer(n))) {
                let (selection, slots) = (layer(selection, number), layer(slots, number));
                let buffers = Buffers { selection, slots, split_indices: None };
                e.cache.layer(&step, LayerCall::whole(of), streams, buffers).unwrap();
            }
        } else {
            called.unwrap();
        }
        for of in [0, 1].map(Layer) {
            e.cache.scatter(&step, LayerCall::whole(of), e.stream).unwrap();
        }
        e.finish(&mut step);
        let held = [0, 1].map(|n| e.held(Layer(n), layer(slots, n.into())));
        assert_eq!(held[1], (14..22).collect::<Vec<u8>>());
        assert_eq!(held[0] != (4..12).collect::<Vec<u8>>(), refused, "{held:?}");
        assert_eq!(e.cache.retire(step, e.stream).unwrap().total(), (0, 16));
    }
}

#[test]
fn all_layers_at_once_need_no_scratch_where_a_sequence_is_held_whole_or_rows_have_no_bytes() {
    // The sequence's possible length decides, not its present one: the result does not change while it decodes.
    for (residency_only, promised, slots, right) in
        [(false, 1, 8, true), (false, 5, 7, false), (true, 5, 7, true)]
    {
        let mut e = Engine::with(false, Config { min_budget: 4, residency_only, ..config() });
        let open = Open { prompt: 4, promised, budget: Budget::Slots(slots), bring_up: BringUp::Nothing };
        let sequence = e.cache.open(&open).unwrap();
        e.cache.append_in_place(sequence, 4).unwrap();
        let _ticket = e.cache.join(sequence, e.stream, WarmUp::default()).unwrap();
        let [selection, slots] = [(); 2].map(|()| e.device.allocate(u64::from(8 * K)).unwrap());
        let positions: Vec<u8> =
            [0, 1, 2, 3, 0, 1, 2, 3].repeat(2).into_iter().flat_map(i32::to_le_bytes).collect();
        e.device.write(selection, &positions).unwrap();
        let step = e.prepare(sequence, 0);
        let streams = Streams { resolve: e.stream, gather: e.stream };
        let called = e.cache.layers(&step, streams, selection, slots);
        assert_eq!(called.is_ok(), right, "{promised} promised, {residency_only}: {called:?}");
        let short = e.cache.layers(&step, streams, selection.part(0, 4).unwrap(), slots);
        assert!(short.is_err());
    }
}
