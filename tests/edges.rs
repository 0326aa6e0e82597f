//! Bad input and the limits of valid input: each bad input is one clear error that names the call, the place and what
//! to do, and leaves the cache unchanged.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "edges/construction.rs"]
mod construction;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;

use device::TestDevice;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped, PoolOp, Slice, SplitIndices, StepRange, Stream};
use forebay::os::Protection;
use forebay::overlap::{self, Overlap, OverlapStreams};
use forebay::residency::QueryRange;
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Lane, Layer, LayerCall};
use forebay::{BatchRow, Layers, Memory, MicroBatch, Open, Sequence, Shape, Step, Streams, WarmUp};
use std::sync::Arc;

/// Asserts which error it is, and that its text says where and what to do.
#[track_caller]
fn refused<T>(result: Result<T, Error>, kind: Kind, place: &str) -> Error {
    let error = result.err().unwrap();
    assert_eq!((error.kind(), error.place()), (kind, place), "{error}");
    let text = error.to_string();
    let (what, hint) = text.rsplit_once("; ").unwrap();
    assert!(what.starts_with(error.operation()) && what.contains(kind.describe()), "{text}");
    assert!(hint.len() > 10, "{text}");
    error
}

const K: u64 = 8;

fn config() -> Config {
    let shape = Shape {
        layers: 2,
        runs: [32, 0],
        index_key_bytes: 8,
        page_tokens: 16,
        top_k: K as u32,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config { query_rows: 2, memory, ..Config::new(shape, 3, 64, 16) }
}

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    /// For a step of one row with two query rows.
    buffers: Buffers,
}

fn engine(config: Config) -> Engine {
    let device = TestDevice::new(HostOptions::default());
    engine_on(device.device(), device, config)
}

/// On a device whose bytes `device` reads.
fn engine_on(queue: Arc<dyn Device>, device: Arc<TestDevice>, config: Config) -> Engine {
    let buffer = || device.allocate(2 * K * 4).unwrap();
    let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
    let stream = queue.stream().unwrap();
    Engine { cache: Cache::new(config, queue).unwrap(), stream, device, buffers }
}

fn asks(prompt: u32, promised: u32) -> Open {
    Open { prompt, promised, budget: Budget::Slots(16), bring_up: BringUp::Whole }
}

fn row(sequence: Sequence, accepted: u32) -> BatchRow {
    BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 2 }
}

impl Engine {
    fn streams(&self) -> Streams {
        Streams { resolve: self.stream, gather: self.stream }
    }

    fn open(&mut self, prompt: u32, promised: u32) -> Sequence {
        let sequence = self.cache.open(&asks(prompt, promised)).unwrap();
        self.cache.append_in_place(sequence, prompt).unwrap();
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        sequence
    }

    fn prepare(&mut self, rows: &[BatchRow]) -> Result<Step, Error> {
        self.cache.prepare(MicroBatch(0), 2, rows, None, self.stream)
    }

    /// All due calls of a step, for any selection in its buffers.
    fn enqueue(&self, step: &Step) {
        for layer in [0, 1].map(Layer) {
            self.cache.layer(step, LayerCall::whole(layer), self.streams(), self.buffers).unwrap();
            self.cache.scatter(step, LayerCall::whole(layer), self.stream).unwrap();
        }
    }

    fn decode(&mut self, sequence: Sequence, accepted: u32) -> u32 {
        let mut step = self.prepare(&[row(sequence, accepted)]).unwrap();
        self.enqueue(&step);
        self.cache.finish(&mut step, self.stream).unwrap();
        self.cache.retire(step, self.stream).unwrap().lengths()[0]
    }
}

/// Each of two ranks has a first backing and first pools: their numbers are the same.
#[test]
fn memory_and_pools_of_another_rank_are_refused_by_every_call_that_takes_them() {
    let clock = || ClockDevice::new(ClockOptions::default()).unwrap() as Arc<dyn Device>;
    let own = || TestDevice::new(HostOptions::default()).device();
    let over = || ClockDevice::over(HostDevice::new(HostOptions::default()), ClockOptions::default());
    let pairs = [[own(), own()], [clock(), clock()], [own(), clock()], [over().unwrap(), own()]];
    for [device, other] in pairs.into_iter().flat_map(|[a, b]| [[a.clone(), b.clone()], [b, a]]) {
        let [cache, foreign] = [&device, &other].map(|of| Cache::new(config(), of.clone()).unwrap());
        let grain = device.granularity().max(other.granularity());
        let [backing, theirs] = [&device, &other].map(|of| of.backing(grain).unwrap());
        let stream = device.stream().unwrap();
        assert_ne!((device.id(), cache.pools(), backing), (other.id(), foreign.pools(), theirs));
        let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
        let (pools, leave) = (foreign.pools(), PoolOp::Leave(Lane(0)));
        for (refused, place) in [
            (
                device.range(&[piece(backing), piece(theirs)], Protection::ReadWrite).map(drop),
                "a backing of another device",
            ),
            (device.enqueue(pools, stream, leave), "pools of another device"),
            (device.digest(pools, Lane(0)).map(drop), "pools of another device"),
            (device.validate(pools), "pools of another device"),
        ] {
            let error = refused.unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::OutOfRange, place), "{error}");
        }
        device.range(&[piece(backing)], Protection::ReadWrite).unwrap();
        device.enqueue(cache.pools(), stream, leave).unwrap();
        device.validate(cache.pools()).unwrap();
        let slice = other.allocate(64).unwrap();
        assert!(other.owns(&slice) && !device.owns(&slice));
        assert_eq!(device.copy(stream, slice, slice).unwrap_err().kind(), Kind::OutOfRange);
    }
}

/// An engine that enqueues nothing.
struct Idle;

impl overlap::Engine for Idle {
    fn enqueue(&mut self, _: &overlap::EngineCall, _: Stream) -> Result<(), Error> {
        Ok(())
    }
}

/// Rows without bytes are resolved, and neither gathered nor stored, by any call that enqueues the layer. A device
/// refuses a gather or scatter of them.
#[test]
fn layers_of_a_cache_without_row_bytes_move_nothing() {
    let mut e = engine(Config { residency_only: true, ..config() });
    let sequence = e.open(20, 20);
    let streams =
        OverlapStreams { compute: e.stream, resolve: e.stream, gather: e.stream, scatter: e.stream };
    let layers = Layers { streams, batch: 1, half: 0, buffers: e.buffers };
    let selection: Vec<u8> = (0..2 * K as u32).flat_map(|at| (at % 20).to_le_bytes()).collect();
    e.device.write(e.buffers.selection, &selection).unwrap();
    for accepted in [0, 1] {
        let mut step = e.prepare(&[row(sequence, accepted)]).unwrap();
        for layer in [0, 1].map(Layer) {
            e.cache.overlap(&mut step, layer, None, Overlap::None, &layers, &mut Idle).unwrap();
        }
        let rows = QueryRange { first: 0, count: 2 };
        let range = StepRange { micro_batch: MicroBatch(0), layer: Layer(0), first: 0, count: 1, rows };
        for op in [PoolOp::Gather { range, wave: 0 }, PoolOp::Scatter(range)] {
            let error = e.device.enqueue(e.cache.pools(), e.stream, op).unwrap_err();
            assert_eq!(error.place(), "rows of a cache whose rows have no bytes");
        }
        e.cache.finish(&mut step, e.stream).unwrap();
        let ended = e.device.event().unwrap();
        e.device.record(ended, e.stream).unwrap();
        e.device.synchronize(ended).unwrap();
        e.cache.retire(step, e.stream).unwrap();
    }
}

#[test]
fn invalid_requests_to_open_are_refused_and_take_nothing() {
    let mut e = engine(config());
    let start = e.cache.stats();
    for (prompt, promised) in [(0, 0), (65, 0), (0, 65), (60, 5), (u32::MAX, 1), (1, u32::MAX)] {
        refused(e.cache.open(&asks(prompt, promised)), Kind::OutOfRange, "prompt and promised tokens");
    }
    let with = |budget| Open { budget, ..asks(20, 20) };
    for ratio in [0.0, -0.2, 7.0, 1.000_001, f64::NAN, f64::INFINITY] {
        refused(e.cache.open(&with(Budget::Ratio(ratio))), Kind::InvalidConfig, "ratio");
    }
    refused(e.cache.open(&with(Budget::Slots(0))), Kind::InvalidConfig, "slots");
    refused(e.cache.open(&with(Budget::Slots(15))), Kind::InvalidConfig, "slots");
    refused(e.cache.open(&with(Budget::ByLayer(vec![16]))), Kind::InvalidConfig, "layers");
    refused(e.cache.open(&with(Budget::ByLayer(vec![16, 3]))), Kind::InvalidConfig, "slots");
    assert_eq!(e.cache.stats(), start);
    e.cache.open(&asks(64, 0)).unwrap();
    e.cache.open(&with(Budget::Ratio(1.0))).unwrap();
}

#[test]
fn a_pool_without_room_for_one_more_is_an_error_that_names_it() {
    let pools = [
        ("host pages", Config { host_pages: 5, ..config() }),
        ("index-key pages", Config { index_pages: 5, ..config() }),
        ("slot blocks", Config { slots: forebay::Slots::ByLayer(vec![128, 64]), ..config() }),
        ("lanes", Config { lanes: 1, ..config() }),
    ];
    for (place, config) in pools {
        let mut e = engine(config);
        let first = e.cache.open(&asks(20, 20)).unwrap();
        let before = e.cache.stats();
        let error = refused(e.cache.open(&asks(20, 20)), Kind::Exhausted, place);
        assert!(error.number("wanted") > error.number("free"), "{error}");
        assert_eq!(e.cache.stats(), before);
        e.cache.close(first, e.stream).unwrap();
        e.cache.open(&asks(20, 20)).unwrap();
        e.cache.validate().unwrap();
    }
}

#[test]
fn a_closed_sequence_is_refused_by_every_call() {
    let mut e = engine(config());
    let (closed, other) = (e.open(20, 20), e.open(20, 20));
    e.cache.close(closed, e.stream).unwrap();
    // The record is used again: the old handle must not name the new sequence.
    let reborn = e.cache.open(&asks(20, 20)).unwrap();
    assert_ne!(closed, reborn);
    let (cache, stream) = (&mut e.cache, e.stream);
    let never = Sequence::from_bits(u64::MAX);
    for gone in [closed, never, Sequence::from_bits(77)] {
        let at = &gone.to_string();
        refused(cache.length(gone), Kind::Closed, at);
        refused(cache.append(gone, Layer(0), &[0; 32]), Kind::Closed, at);
        refused(cache.append_in_place(gone, 1), Kind::Closed, at);
        refused(cache.join(gone, stream, WarmUp::default()), Kind::Closed, at);
        refused(cache.join_more(gone, stream), Kind::Closed, at);
        refused(cache.is_running(gone), Kind::Closed, at);
        refused(cache.fork(gone, &asks(0, 1), stream), Kind::Closed, at);
        refused(cache.truncate(gone, 1, stream), Kind::Closed, at);
        refused(cache.extend(gone, 30, 20), Kind::Closed, at);
        refused(cache.park(gone, 0, stream), Kind::Closed, at);
        refused(cache.resume(gone, stream, 0), Kind::Closed, at);
        refused(cache.is_parked(gone), Kind::Closed, at);
        refused(cache.pages(gone), Kind::Closed, at);
        refused(cache.landing_slot(gone, 0), Kind::Closed, at);
        refused(cache.read_row(gone, Layer(0), 0, &mut [0; 32]), Kind::Closed, at);
        refused(cache.digest(gone), Kind::Closed, at);
        refused(cache.close(gone, stream), Kind::Closed, at);
        let rows = [row(other, 0), row(gone, 0)];
        refused(cache.prepare(MicroBatch(0), 2, &rows, None, stream), Kind::Closed, at);
    }
    assert_eq!(e.decode(other, 0), 20, "the others decode on");
    e.cache.validate().unwrap();
}

#[test]
fn calls_out_of_their_order_are_refused() {
    let mut e = engine(config());
    let filling = "the prompt is not complete, or the sequence has not joined";
    let sequence = e.cache.open(&asks(20, 20)).unwrap();
    refused(e.prepare(&[row(sequence, 0)]), Kind::InvalidState, filling);
    refused(e.cache.truncate(sequence, 21, e.stream), Kind::OutOfRange, "length");
    refused(e.cache.fork(sequence, &asks(0, 1), e.stream), Kind::InvalidState, filling);
    refused(e.cache.join_more(sequence, e.stream), Kind::InvalidState, filling);
    let join = |e: &mut Engine, warm_up| e.cache.join(sequence, e.stream, warm_up);
    let incomplete = "the prompt of a layer is incomplete";
    refused(join(&mut e, WarmUp::default()), Kind::InvalidState, incomplete);

    refused(e.cache.append(sequence, Layer(0), &[0; 33]), Kind::OutOfRange, "bytes that are not whole rows");
    refused(e.cache.append(sequence, Layer(2), &[0; 32]), Kind::OutOfRange, "layer");
    refused(e.cache.append(sequence, Layer(0), &[0; 32 * 21]), Kind::OutOfRange, "rows beyond the prompt");
    e.cache.append(sequence, Layer(1), &[1; 32 * 3]).unwrap();
    refused(e.cache.append_in_place(sequence, 18), Kind::OutOfRange, "rows beyond the prompt");
    e.cache.append(sequence, Layer(0), &[0; 32 * 20]).unwrap();
    let error = refused(join(&mut e, WarmUp::default()), Kind::InvalidState, incomplete);
    assert_eq!((error.number("layer"), error.number("filled")), (Some(1), Some(3)));
    e.cache.append(sequence, Layer(1), &[1; 32 * 17]).unwrap();

    let selections = Some(e.device.allocate(3 * K * 4).unwrap());
    let bad = WarmUp { selections, steps: 3, ..WarmUp::default() };
    refused(join(&mut e, bad), Kind::OutOfRange, "warm-up selections");
    let whole = WarmUp { bytes_a_call: 32 * 9, ..WarmUp::default() };
    let _ticket = join(&mut e, whole).unwrap();
    refused(e.prepare(&[row(sequence, 0)]), Kind::InvalidState, "the warm-up is not complete");
    refused(e.cache.park(sequence, 0, e.stream), Kind::InvalidState, "the warm-up is not complete");
    refused(join(&mut e, whole), Kind::InvalidState, "the warm-up is not complete");
    while !e.cache.is_running(sequence).unwrap() {
        let _ticket = e.cache.join_more(sequence, e.stream).unwrap();
    }
    refused(e.cache.append(sequence, Layer(0), &[]), Kind::InvalidState, "the sequence is decoding");
    refused(e.cache.append_in_place(sequence, 0), Kind::InvalidState, "the sequence is decoding");
    assert_eq!(e.decode(sequence, 0), 20);
    let unsettled = "rows of the last step are neither accepted nor rejected";
    refused(e.cache.fork(sequence, &asks(0, 1), e.stream), Kind::InvalidState, unsettled);
}

#[test]
fn a_join_that_the_device_refuses_leaves_the_lane_empty() {
    let mut e = engine(config());
    let elsewhere = TestDevice::new(HostOptions::default());
    let sequence = e.cache.open(&asks(20, 20)).unwrap();
    e.cache.append_in_place(sequence, 20).unwrap();
    let warm_up = |slice| WarmUp { selections: Some(slice), steps: 1, ..WarmUp::default() };
    let foreign = warm_up(elsewhere.allocate(2 * K * 4).unwrap());
    refused(e.cache.join(sequence, e.stream, foreign), Kind::OutOfRange, "warm-up selections");
    let odd = |e: &Engine| {
        let slice = e.device.allocate(2 * K * 4 + 1).unwrap();
        warm_up(slice.part(1, 2 * K * 4).unwrap())
    };
    let bad = odd(&e);
    refused(e.cache.join(sequence, e.stream, bad), Kind::OutOfRange, "warm-up selections");
    let _ticket = e.cache.join(sequence, e.stream, WarmUp::default()).unwrap();
    assert_eq!(e.decode(sequence, 0), 20, "it may join after all");

    // And so may the sequence that gets its lane.
    let mut e = engine(Config { lanes: 1, ..config() });
    let sequence = e.cache.open(&asks(20, 20)).unwrap();
    e.cache.append_in_place(sequence, 20).unwrap();
    let bad = odd(&e);
    refused(e.cache.join(sequence, e.stream, bad), Kind::OutOfRange, "warm-up selections");
    e.cache.close(sequence, e.stream).unwrap();
    let next = e.open(30, 20);
    assert_eq!(e.decode(next, 0), 30);
}

#[test]
fn batches_that_do_not_fit_are_refused_and_nothing_is_enqueued() {
    let mut e = engine(Config { micro_batches: 2, batch: 2, ..config() });
    let [a, b, c] = [0; 3].map(|_| e.open(20, 20));
    let stream = e.stream;
    let before = e.device.operations();
    let mut prepare = |micro, width, rows: &[BatchRow], accepted, kind, place: &str| {
        refused(e.cache.prepare(MicroBatch(micro), width, rows, accepted, stream), kind, place)
    };
    let of = |sequence, query_rows| BatchRow { query_rows, ..row(sequence, 0) };
    prepare(2, 2, &[row(a, 0)], None, Kind::OutOfRange, "micro-batch");
    prepare(u32::MAX, 2, &[row(a, 0)], None, Kind::OutOfRange, "micro-batch");
    prepare(0, 2, &[], None, Kind::OutOfRange, "rows of the batch");
    prepare(0, 2, &[row(a, 0), row(b, 0), row(c, 0)], None, Kind::OutOfRange, "rows of the batch");
    prepare(0, 0, &[of(a, 0)], None, Kind::OutOfRange, "query rows");
    prepare(0, 3, &[of(a, 3)], None, Kind::OutOfRange, "query rows");
    prepare(0, 2, &[of(a, 0)], None, Kind::OutOfRange, "query rows of a batch row");
    prepare(0, 1, &[of(a, 2)], None, Kind::OutOfRange, "query rows of a batch row");
    let twice =
        prepare(0, 2, &[row(a, 0), row(a, 0)], None, Kind::InvalidConfig, "a sequence is named twice");
    assert_eq!(twice.number("batch row"), Some(1));
    prepare(0, 2, &[row(a, 1)], None, Kind::OutOfRange, "accepted rows");
    let on_device = BatchRow { accepted: Accepted::OnDevice, ..row(a, 0) };
    prepare(0, 2, &[on_device], None, Kind::InvalidConfig, "no tensor of accepted counts");
    assert_eq!(e.device.operations(), before);

    assert_eq!(e.decode(a, 0), 20);
    refused(e.prepare(&[row(a, 3)]), Kind::OutOfRange, "accepted rows");
    refused(
        e.cache.prepare(MicroBatch(1), 2, &[row(a, 0)], None, stream),
        Kind::InvalidState,
        "a sequence of another micro-batch",
    );
    assert_eq!(e.decode(a, 2), 22);
    let (few, many) = (e.device.allocate(4).unwrap(), e.device.allocate(8).unwrap());
    let before = e.device.operations();
    let prepared = e.cache.prepare(MicroBatch(0), 2, &[on_device], Some(few), stream);
    let error = refused(prepared, Kind::OutOfRange, "bytes of a slice");
    assert_eq!((error.number("wanted"), e.device.operations()), (Some(8), before));
    e.device.write(many, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut step = e.cache.prepare(MicroBatch(0), 2, &[on_device], Some(many), stream).unwrap();
    e.enqueue(&step);
    e.cache.finish(&mut step, stream).unwrap();
    assert_eq!(e.cache.retire(step, stream).unwrap().lengths(), [23]);
}

#[test]
fn a_device_count_of_more_rows_than_landed_fails_the_step() {
    let mut e = engine(config());
    let sequence = e.open(20, 20);
    assert_eq!(e.decode(sequence, 0), 20);
    let counts = e.device.allocate(12).unwrap();
    e.device.write(counts, &[3; 12]).unwrap();
    let rows = [BatchRow { accepted: Accepted::OnDevice, ..row(sequence, 0) }];
    let mut step = e.cache.prepare(MicroBatch(0), 2, &rows, Some(counts), e.stream).unwrap();
    e.enqueue(&step);
    e.cache.finish(&mut step, e.stream).unwrap();
    let unretired = e.cache.retire(step, e.stream).unwrap_err();
    assert_eq!(unretired.step, None);
    let error: Result<(), Error> = Err(unretired.error);
    let error = refused(error, Kind::DeviceFailed, "more rows were accepted than had landed");
    assert_eq!(error.number("value"), Some(0x0303_0303));
    let _ticket = e.cache.truncate(sequence, 20, e.stream).unwrap();
    assert_eq!(e.decode(sequence, 0), 20);
    e.cache.validate().unwrap();
}

#[test]
fn prompt_rows_written_in_place_belong_to_the_sequence() {
    let mut e = engine(config());
    let sequence = e.cache.open(&asks(20, 0)).unwrap();
    let geometry = *e.cache.geometry();
    let pages: Vec<u32> = e.cache.pages(sequence).unwrap().map(|(host, _)| host.0).collect();
    let rows = |layer: u32, at: u32| [(100 * layer + at) as u8; 32];
    for (layer, at) in (0..2).flat_map(|layer| (0..20).map(move |at| (layer, at))) {
        let tokens = geometry.page_tokens();
        let place = geometry.host_offset(pages[(at / tokens) as usize], at % tokens);
        let all = e.cache.rows(Layer(layer)).unwrap();
        e.device.write(all.part(place, 32).unwrap(), &rows(layer, at)).unwrap();
    }
    e.cache.append_in_place(sequence, 20).unwrap();
    let _ticket = e.cache.join(sequence, e.stream, WarmUp::default()).unwrap();
    for (layer, at) in (0..2).flat_map(|layer| (0..20).map(move |at| (layer, at))) {
        let mut row = [0; 32];
        e.cache.read_row(sequence, Layer(layer), at, &mut row).unwrap();
        assert_eq!(row, rows(layer, at), "layer {layer}, position {at}");
    }
}

#[test]
fn a_cache_without_row_bytes_counts_and_moves_nothing() {
    let fetched = |residency_only| {
        let mut e = engine(Config { residency_only, ..config() });
        let sequence = e.cache.open(&Open { bring_up: BringUp::Nothing, ..asks(20, 8) }).unwrap();
        for layer in [0, 1].map(Layer) {
            e.cache.append(sequence, layer, &[7; 20 * 32]).unwrap();
        }
        let _ticket = e.cache.join(sequence, e.stream, WarmUp::default()).unwrap();
        let selection: Vec<u8> = (0..2 * K).flat_map(|at| (at as i32 % 20).to_le_bytes()).collect();
        e.device.write(e.buffers.selection, &selection).unwrap();
        let mut step = e.prepare(&[row(sequence, 0)]).unwrap();
        e.enqueue(&step);
        e.cache.finish(&mut step, e.stream).unwrap();
        e.cache.retire(step, e.stream).unwrap();
        let slab = e.cache.slab(Layer(0)).unwrap();
        let mut bytes = vec![0; slab.bytes() as usize];
        e.device.read(slab, &mut bytes).unwrap();
        (e.cache.stats().misses, bytes.contains(&7))
    };
    let (counted, moved) = fetched(true);
    assert_eq!(fetched(false), (counted, true), "the control moves what it misses");
    assert!(counted > 0 && !moved);
}

#[test]
fn a_sequence_does_not_outgrow_its_admission() {
    let mut e = engine(config());
    let sequence = e.open(60, 4);
    let mut length = e.decode(sequence, 0);
    // Two steps of two rows may be in flight after the last admitted token, and no more.
    while length < 66 {
        length = e.decode(sequence, 2);
    }
    let error = refused(
        e.prepare(&[row(sequence, 2)]),
        Kind::OutOfRange,
        "the sequence outgrows its admitted tokens",
    );
    assert_eq!((error.number("tokens"), error.number("admitted")), (Some(70), Some(64)));
    assert_eq!(e.decode(sequence, 0), 66);
    refused(e.cache.read_row(sequence, Layer(0), 80, &mut [0; 32]), Kind::OutOfRange, "position");
    refused(e.cache.read_row(sequence, Layer(2), 0, &mut [0; 32]), Kind::OutOfRange, "layer");
    refused(e.cache.read_row(sequence, Layer(0), 0, &mut [0; 31]), Kind::OutOfRange, "row bytes");
    refused(e.cache.landing_slot(sequence, 2), Kind::OutOfRange, "query row");
    refused(e.cache.slab(Layer(2)), Kind::OutOfRange, "layer");
    refused(e.cache.rows(Layer(2)), Kind::OutOfRange, "layer");
    refused(e.cache.index_keys(Layer(2)), Kind::OutOfRange, "layer");
    refused(e.cache.truncate(sequence, 69, e.stream), Kind::OutOfRange, "length");
}

#[test]
fn buffers_and_rows_that_do_not_fit_a_layer_are_refused() {
    misfits(engine(config()));
    // A device that runs work later still refuses it when it is enqueued.
    let device = TestDevice::host(HostOptions::default());
    let clock = ClockDevice::over(device.device(), ClockOptions::default()).unwrap();
    misfits(engine_on(clock, device, config()));
}

fn misfits(mut e: Engine) {
    let sequence = e.open(20, 20);
    let mut step = e.prepare(&[row(sequence, 0)]).unwrap();
    let good = e.buffers;
    slices_that_do_not_fit(&mut e, &step);
    let whole = LayerCall::whole(Layer(0));
    let calls = [
        (LayerCall::whole(Layer(2)), "layer"),
        (LayerCall::draft_pass(Layer(1), 2), "rows of the step"),
        (LayerCall { batch_rows: Some((1, 1)), ..whole }, "rows of the step"),
        (LayerCall { batch_rows: Some((u32::MAX, 2)), ..whole }, "rows of the step"),
    ];
    for (call, place) in calls {
        refused(e.cache.resolve(&step, call, e.stream, good), Kind::OutOfRange, place);
        refused(e.cache.gather(&step, call, 0, e.stream), Kind::OutOfRange, place);
        refused(e.cache.scatter(&step, call, e.stream), Kind::OutOfRange, place);
    }
    refused(e.cache.resolve(&step, whole, Stream(99), good), Kind::OutOfRange, "stream");
    refused(e.cache.gather(&step, whole, 1, e.stream), Kind::OutOfRange, "wave of attention");
    let whole_parts = parts_that_do_not_fit(&mut e, &step);
    e.cache.resolve(&step, whole, e.stream, Buffers { split_indices: Some(whole_parts), ..good }).unwrap();
    e.cache.gather(&step, whole, 0, e.stream).unwrap();
    refused(good.slots.part(1, 2 * K * 4), Kind::OutOfRange, "");
    e.enqueue(&step);
    e.cache.finish(&mut step, e.stream).unwrap();
    let mut left = Some(step);
    while let Some(step) = left.take() {
        left = e.cache.retire(step, e.stream).err().map(|unretired| unretired.step.unwrap());
    }
}

/// Memory at no address, for a selection.
fn nowhere(e: &Engine) -> Slice {
    // SAFETY: nothing is enqueued with it.
    unsafe { e.device.import(0, 2 * K * 4) }
}

/// Memory for a selection, off a word's boundary.
fn odd(e: &Engine) -> Slice {
    e.device.allocate(2 * K * 4 + 1).unwrap().part(1, 2 * K * 4).unwrap()
}

fn slices_that_do_not_fit(e: &mut Engine, step: &Step) {
    let elsewhere = TestDevice::new(HostOptions::default());
    let foreign = elsewhere.allocate(2 * K * 4).unwrap();
    let good = e.buffers;
    let wide = e.device.allocate(2 * K * 4 + 4).unwrap();
    let empty = good.slots.part(0, 0).unwrap();
    let (null, odd) = (nowhere(e), odd(e));
    let with = |selection: Slice, slots: Slice| Buffers { selection, slots, split_indices: None };
    let cases = [
        (with(foreign, good.slots), "a slice of another device"),
        (with(good.selection, foreign), "a slice of another device"),
        (with(wide, good.slots), "bytes of a slice"),
        (with(good.selection, wide), "bytes of a slice"),
        (with(good.selection.part(0, K * 4).unwrap(), good.slots), "bytes of a slice"),
        (with(odd, good.slots), "address of a slice"),
        (with(good.selection, odd), "address of a slice"),
        (with(null, good.slots), "address of a slice"),
        (with(good.selection, null), "address of a slice"),
        (with(empty, good.slots), "bytes of a slice"),
        (with(good.selection, empty), "bytes of a slice"),
        (with(good.selection, null.part(0, 0).unwrap()), "bytes of a slice"),
    ];
    for (buffers, place) in cases {
        let call = LayerCall::whole(Layer(0));
        refused(e.cache.layer(step, call, e.streams(), buffers), Kind::OutOfRange, place);
    }
}

/// Returns parts that fit.
fn parts_that_do_not_fit(e: &mut Engine, step: &Step) -> SplitIndices {
    let (good, whole) = (e.buffers, LayerCall::whole(Layer(0)));
    let elsewhere = TestDevice::new(HostOptions::default());
    let (null, odd, empty) = (nowhere(e), odd(e), good.slots.part(0, 0).unwrap());
    // Two lists of one batch row with two query rows.
    let (lists, counts) = (e.device.allocate(4 * K * 4).unwrap(), e.device.allocate(4 * 4).unwrap());
    let whole_parts = SplitIndices { lists, counts, batch: 1 };
    let split_indices = [
        (SplitIndices { batch: 0, ..whole_parts }, "batch rows of the index lists"),
        (SplitIndices { batch: u32::MAX, ..whole_parts }, ""),
        (SplitIndices { counts: counts.part(0, 12).unwrap(), ..whole_parts }, ""),
        (SplitIndices { lists: lists.part(0, 3 * K * 4).unwrap(), ..whole_parts }, ""),
        (
            SplitIndices { lists: elsewhere.allocate(4 * K * 4).unwrap(), ..whole_parts },
            "a slice of another device",
        ),
        (
            SplitIndices { counts: lists.part(0, 4 * 4).unwrap(), ..whole_parts },
            "selection and slots overlap",
        ),
        (
            SplitIndices { counts: e.device.allocate(20).unwrap().part(1, 16).unwrap(), ..whole_parts },
            "address of the index lists",
        ),
        (SplitIndices { lists: odd, ..whole_parts }, "address of the index lists"),
        (SplitIndices { lists: null, ..whole_parts }, "address of a slice"),
        (SplitIndices { counts: null, ..whole_parts }, "address of a slice"),
        (SplitIndices { counts: empty, ..whole_parts }, ""),
        (SplitIndices { lists: empty, ..whole_parts }, ""),
    ];
    for (split_indices, place) in split_indices {
        let buffers = Buffers { split_indices: Some(split_indices), ..good };
        refused(e.cache.resolve(step, whole, e.stream, buffers), Kind::OutOfRange, place);
    }
    whole_parts
}

#[test]
fn steps_are_finished_once_and_belong_to_their_cache() {
    let (mut e, mut other) = (engine(config()), engine(config()));
    let [a, b] = [0; 2].map(|_| e.open(20, 20));
    let theirs = other.open(20, 20);
    let whole = LayerCall::whole(Layer(0));
    let mut step = e.prepare(&[row(a, 0)]).unwrap();
    // The same number and slot, but of another cache.
    let mut foreign = other.prepare(&[row(theirs, 0)]).unwrap();
    let not_ours = "a step of another cache";
    refused(e.cache.layer(&foreign, whole, e.streams(), e.buffers), Kind::OutOfRange, not_ours);
    refused(e.cache.scatter(&foreign, whole, e.stream), Kind::OutOfRange, not_ours);
    refused(e.cache.finish(&mut foreign, e.stream), Kind::OutOfRange, not_ours);
    let unretired = e.cache.retire(foreign, e.stream).unwrap_err();
    refused::<()>(Err(unretired.error), Kind::OutOfRange, not_ours);
    let mut foreign = unretired.step.unwrap();
    other.enqueue(&foreign);
    other.cache.finish(&mut foreign, other.stream).unwrap();
    other.cache.retire(foreign, other.stream).unwrap();

    // One step of a micro-batch is open at a time.
    refused(e.prepare(&[row(b, 0)]), Kind::Busy, "the micro-batch's last step is not finished");
    let unretired = e.cache.retire(step, e.stream).unwrap_err();
    refused::<()>(Err(unretired.error), Kind::Busy, "the step was not finished");
    step = unretired.step.unwrap();
    e.enqueue(&step);
    refused(e.cache.finish(&mut step, Stream(99)), Kind::OutOfRange, "stream");
    e.cache.finish(&mut step, e.stream).unwrap();
    refused(e.cache.finish(&mut step, e.stream), Kind::InvalidState, "the step is finished");
    refused(e.cache.resolve(&step, whole, e.stream, e.buffers), Kind::InvalidState, "the step is finished");
    refused(e.cache.gather(&step, whole, 0, e.stream), Kind::InvalidState, "the step is finished");
    refused(e.cache.scatter(&step, whole, e.stream), Kind::InvalidState, "the step is finished");
    let mut next = e.prepare(&[row(a, 1)]).unwrap();
    e.enqueue(&next);
    e.cache.finish(&mut next, e.stream).unwrap();
    refused(e.prepare(&[row(a, 1)]), Kind::Busy, "every step descriptor is in flight");
    e.cache.retire(next, e.stream).unwrap();
    e.cache.retire(step, e.stream).unwrap();
    assert_eq!(e.cache.length(a).unwrap().committed, 21, "retired in whichever order");
}

#[test]
fn a_sequence_has_no_more_steps_in_flight_than_configured() {
    let mut e = engine(Config { micro_batches: 2, ..config() });
    let sequence = e.open(20, 20);
    let steps = [0, 1].map(|accepted| {
        let mut step = e.prepare(&[row(sequence, accepted)]).unwrap();
        e.enqueue(&step);
        e.cache.finish(&mut step, e.stream).unwrap();
        step
    });
    let error = refused(e.prepare(&[row(sequence, 1)]), Kind::Busy, "steps of one sequence in flight");
    assert_eq!(error.number("value"), Some(2));
    refused(e.cache.truncate(sequence, 3, e.stream), Kind::Busy, "work of the sequence is in flight");
    for step in steps {
        e.cache.retire(step, e.stream).unwrap();
    }
}

#[test]
fn an_unknown_stream_is_refused_and_changes_nothing() {
    let mut e = engine(config());
    let parent = e.open(24, 20);
    let _ticket = e.cache.fork(parent, &asks(0, 8), e.stream).unwrap();
    let unknown = Stream(99);
    let start = e.cache.stats();
    let pages: Vec<_> = e.cache.pages(parent).unwrap().collect();
    refused(e.cache.truncate(parent, 8, unknown), Kind::OutOfRange, "stream");
    assert_eq!(e.cache.pages(parent).unwrap().collect::<Vec<_>>(), pages, "shared pages are still shared");
    refused(e.cache.fork(parent, &asks(0, 8), unknown), Kind::OutOfRange, "stream");
    refused(e.cache.prepare(MicroBatch(0), 2, &[row(parent, 0)], None, unknown), Kind::OutOfRange, "stream");
    assert_eq!(e.cache.stats(), start);

    let joining = e.cache.open(&asks(20, 8)).unwrap();
    e.cache.append_in_place(joining, 20).unwrap();
    refused(e.cache.join(joining, unknown, WarmUp::default()), Kind::OutOfRange, "stream");
    let bounded = WarmUp { bytes_a_call: 32, ..WarmUp::default() };
    let _ticket = e.cache.join(joining, e.stream, bounded).unwrap();
    refused(e.cache.join_more(joining, unknown), Kind::OutOfRange, "stream");
    while !e.cache.is_running(joining).unwrap() {
        let _ticket = e.cache.join_more(joining, e.stream).unwrap();
    }
    assert_eq!((e.decode(joining, 0), e.decode(parent, 0)), (20, 24));
    // Closed nevertheless; the next call that can does what the stream could not do.
    refused(e.cache.close(joining, unknown), Kind::OutOfRange, "stream");
    refused(e.cache.length(joining), Kind::Closed, &joining.to_string());
    assert_eq!(e.cache.reap(e.stream).unwrap(), 0);
    e.cache.validate().unwrap();
}

#[test]
fn shut_down_returns_a_cache_that_still_holds_something() {
    let mut e = engine(config());
    let sequence = e.open(20, 20);
    let mut step = e.prepare(&[row(sequence, 0)]).unwrap();
    e.enqueue(&step);
    e.cache.close(sequence, e.stream).unwrap();
    let (mut cache, error) = e.cache.shut_down().unwrap_err();
    let error = refused::<()>(Err(error), Kind::Busy, "sequences, steps or withheld pages are left");
    assert_eq!((error.number("sequences"), error.number("steps")), (Some(1), Some(1)));
    cache.finish(&mut step, e.stream).unwrap();
    cache.retire(step, e.stream).unwrap();
    assert_eq!(cache.shut_down().unwrap().steps, 1);
}
