//! If an engine leaves out a call, that is an error: promise P19 and failure F21 of docs/testing.md.
//!
//! `finish` rejects a step in which a call is missing, as far as the host can detect it. The report finds what the host
//! cannot: a graph that holds less than was declared, or was never launched. The oracle keeps sets of enqueued work,
//! row by row. The controls leave out the report's check, and attention then reads the page's old contents.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "support/forgets.rs"]
mod forgets;

use device::TestDevice;
use forebay::device::host::HostOptions;
use forebay::device::{Device, Expected, Slice, SplitIndices, Stream};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams};
use forebay::{
    Accepted, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Layer, LayerCall, Layers, Memory,
};
use forebay::{BatchRow, MicroBatch, Open, Sequence, Shape, Step, WarmUp};
use forgets::{Call, Forgets};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const K: u32 = 4;
const ROW: usize = 32;
/// Two layers and a draft layer.
const LAYERS: u32 = 3;
const DRAFT: u32 = 2;
const WAVES: u32 = 2;
/// Query rows of the two batch rows.
const WIDTHS: [u32; 2] = [2, 1];

/// A budget of 4 slots, 8 selected rows, and scratch slots for half of the rest: two waves.
fn config() -> Config {
    let shape = Shape {
        layers: DRAFT,
        draft_layers: 1,
        runs: [ROW as u32, 0],
        index_key_bytes: 0,
        page_tokens: 16,
        top_k: K,
        ..Shape::DEEPSEEK_V3_2
    };
    Config {
        memory: Memory { huge: false, populate: false, lock: false, node: None },
        query_rows: 2,
        attention_waves: WAVES,
        min_budget: 4,
        ..Config::new(shape, 2, 32, 4)
    }
}

struct Rig {
    cache: Cache,
    memory: Arc<TestDevice>,
    forgets: Arc<Forgets>,
    stream: Stream,
    buffers: Buffers,
    sequences: Vec<Sequence>,
}

/// One call of a layer.
type Made = (Call, u32, LayerCall);

impl Rig {
    fn new(memory: Arc<TestDevice>, config: Config, expected: Option<Expected>) -> Rig {
        let forgets = Forgets::new(memory.device(), expected);
        let words = |count: u32| memory.allocate(u64::from(4 * count)).unwrap();
        let rows = 2 * config.query_rows;
        let lists = (1 + WAVES) * rows;
        let split_indices = SplitIndices { lists: words(lists * K), counts: words(lists), batch: 2 };
        let buffers = Buffers {
            selection: words(rows * K),
            slots: words(rows * K),
            split_indices: Some(split_indices),
        };
        let cache = Cache::new(config, forgets.clone()).unwrap();
        let stream = memory.stream().unwrap();
        let rig = Rig { cache, memory, forgets, stream, buffers, sequences: Vec::new() };
        rig.select(&[-1; 4 * K as usize]);
        rig
    }

    fn host() -> Rig {
        Rig::new(TestDevice::host(HostOptions::default()), config(), None).with([1, 2])
    }

    /// Opens a sequence of each tag.
    fn with<const N: usize>(mut self, tags: [u8; N]) -> Rig {
        tags.iter().for_each(|tag| self.open(*tag));
        self
    }

    /// A sequence of 20 rows, filled with its tag.
    fn open(&mut self, tag: u8) {
        let open = Open { prompt: 20, promised: 8, budget: Budget::Slots(4), bring_up: BringUp::Nothing };
        let sequence = self.cache.open(&open).unwrap();
        for layer in (0..LAYERS).map(Layer) {
            self.cache.append(sequence, layer, &[tag; 20 * ROW]).unwrap();
        }
        let _ready = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        self.sequences.push(sequence);
    }

    fn sync(&self) {
        let event = self.memory.event().unwrap();
        self.memory.record(event, self.stream).unwrap();
        self.memory.synchronize(event).unwrap();
    }

    fn select(&self, positions: &[i32]) {
        let mut bytes: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
        bytes.resize(self.buffers.selection.bytes() as usize, 0xFF);
        self.memory.write(self.buffers.selection, &bytes).unwrap();
    }

    /// A step of the first sequences, as wide as [`WIDTHS`] says.
    fn prepare(&mut self) -> Step {
        self.prepare_in(MicroBatch(0))
    }

    fn prepare_in(&mut self, micro_batch: MicroBatch) -> Step {
        let row = |(sequence, query_rows): (&Sequence, u32)| BatchRow {
            sequence: *sequence,
            accepted: Accepted::Rows(0),
            query_rows,
        };
        let rows: Vec<BatchRow> = self.sequences.iter().zip(WIDTHS).map(row).collect();
        self.cache.prepare(micro_batch, 2, &rows, None, self.stream).unwrap()
    }

    fn make(&self, step: &Step, (call, wave, of): Made) -> Result<(), Error> {
        let (_, count) = of.batch_rows.unwrap_or((0, step.rows()));
        let bytes = u64::from(4 * K * count * of.draft_pass.map_or(step.query_rows(), |_| 1));
        let range = |slice: Slice| slice.part(0, bytes).unwrap();
        let Buffers { selection, slots, split_indices } = self.buffers;
        let buffers = Buffers { selection: range(selection), slots: range(slots), split_indices };
        match call {
            Call::Resolve => self.cache.resolve(step, of, self.stream, buffers),
            Call::Gather => self.cache.gather(step, of, wave, self.stream),
            Call::Scatter => self.cache.scatter(step, of, self.stream),
        }
    }

    /// Finishes and retires.
    fn end(&mut self, mut step: Step) -> Result<(), Error> {
        self.cache.finish(&mut step, self.stream)?;
        self.sync();
        self.cache.retire(step, self.stream).map(|_| ()).map_err(|unretired| unretired.error)
    }

    fn truncate(&mut self) {
        for sequence in self.sequences.clone() {
            let length = self.cache.length(sequence).unwrap().committed;
            let _ticket = self.cache.truncate(sequence, length, self.stream).unwrap();
        }
        self.sync();
        self.cache.validate().unwrap();
    }
}

/// All due calls: layers whole or in halves, the draft layer by draft pass.
fn due(halves: bool) -> Vec<Vec<Made>> {
    let half = |layer, first| LayerCall { batch_rows: Some((first, 1)), ..LayerCall::whole(Layer(layer)) };
    let mut all = Vec::new();
    for layer in 0..DRAFT {
        let whole = LayerCall::whole(Layer(layer));
        let split_indices = if halves { vec![half(layer, 0), half(layer, 1)] } else { vec![whole] };
        for of in &split_indices {
            all.push(vec![(Call::Resolve, 0, *of), (Call::Gather, 0, *of)]);
            all.push(vec![(Call::Gather, 1, *of)]);
        }
        // Rows that were resolved in halves may be stored at once, and the other way round.
        let stored = if halves == (layer == 0) { vec![whole] } else { vec![half(layer, 0), half(layer, 1)] };
        all.extend(stored.into_iter().map(|of| vec![(Call::Scatter, 0, of)]));
    }
    for of in (0..2).map(|pass| LayerCall::draft_pass(Layer(DRAFT), pass)) {
        all.push(vec![(Call::Resolve, 0, of), (Call::Gather, 0, of)]);
        all.push(vec![(Call::Gather, 1, of)]);
        all.push(vec![(Call::Scatter, 0, of)]);
    }
    all
}

/// The first missing call when these were made: which one, its layer, batch row and query row.
fn missing(made: &[Made]) -> Option<(&'static str, u64, u64, u64)> {
    let mut waves: BTreeMap<[u32; 3], u32> = BTreeMap::new();
    let mut scattered = BTreeMap::new();
    for (call, wave, of) in made {
        let (first, count) = of.batch_rows.unwrap_or((0, 2));
        for row in first..first + count {
            for query in of.draft_pass.map_or(0..2, |pass| pass..pass + 1) {
                let place = [of.layer.0, row, query];
                match call {
                    Call::Resolve => drop(waves.insert(place, 0)),
                    Call::Gather => {
                        waves.entry(place).and_modify(|next| *next += u32::from(*next == *wave));
                    }
                    Call::Scatter => drop(scattered.insert(place, ())),
                }
            }
        }
    }
    for (layer, row) in (0..LAYERS).flat_map(|layer| [(layer, 0_u32), (layer, 1)]) {
        let places = (0..WIDTHS[row as usize]).map(|query| [layer, row, query]);
        let find = |name, is_missing: &dyn Fn(&[u32; 3]) -> bool| {
            let place = places.clone().find(|place| is_missing(place))?;
            Some((name, place[0].into(), place[1].into(), place[2].into()))
        };
        let found = find("a resolve was not enqueued", &|place| !waves.contains_key(place))
            .or_else(|| find("a gather was not enqueued", &|place| waves[place] < WAVES))
            .or_else(|| find("a scatter was not enqueued", &|place| !scattered.contains_key(place)));
        if found.is_some() {
            return found;
        }
    }
    None
}

fn described(error: &Error) -> (&str, u64, u64, u64) {
    let number = |name| error.number(name).unwrap();
    (error.place(), number("layer"), number("batch row"), number("query row"))
}

#[test]
fn p19_a_step_in_which_a_call_is_missing_is_refused_and_completed_or_abandoned() {
    let mut rig = Rig::host();
    let mut refused = [0; 3];
    for (halves, without) in [false, true].into_iter().flat_map(|halves| {
        (0..due(halves).len()).map(move |without| (halves, Some(without))).chain([(halves, None)])
    }) {
        let mut step = rig.prepare();
        let calls = due(halves);
        let mut left_out = without.map(|without| calls[without].clone()).unwrap_or_default();
        if let Some((Call::Resolve, _, of)) = left_out.first().copied() {
            left_out.push((Call::Gather, 1, of));
        }
        let made: Vec<Made> = calls.concat().into_iter().filter(|call| !left_out.contains(call)).collect();
        made.iter().for_each(|call| rig.make(&step, *call).unwrap());
        let Some(expected) = missing(&made) else {
            rig.end(step).unwrap();
            continue;
        };
        let before = rig.memory.operations();
        let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (Kind::InvalidState, "finish"), "{error}");
        assert_eq!(described(&error), expected, "halves {halves}, without {left_out:?}");
        assert!(error.to_string().contains("enqueue it, or abandon the step"), "{error}");
        assert_eq!(rig.memory.operations(), before, "nothing is enqueued");
        let kind =
            ["a resolve", "a gather", "a scatter"].iter().position(|kind| expected.0.starts_with(kind));
        refused[kind.unwrap()] += 1;
        if without.unwrap() % 2 == 0 {
            // A late gather needs its resolve again: the lists belong to the last resolve.
            let (call, _, of) = left_out[0];
            let anew = [(Call::Resolve, 0, of), (Call::Gather, 0, of), (Call::Gather, 1, of)];
            let anew = if call == Call::Scatter { &left_out[..] } else { &anew };
            anew.iter().for_each(|call| rig.make(&step, *call).unwrap());
            rig.end(step).unwrap();
        } else {
            rig.cache.abandon(&mut step).unwrap();
            assert_eq!(rig.end(step).unwrap_err().kind(), Kind::Cancelled);
            let rows = [BatchRow { sequence: rig.sequences[0], accepted: Accepted::Rows(0), query_rows: 1 }];
            let again = rig.cache.prepare(MicroBatch(0), 2, &rows, None, rig.stream).unwrap_err();
            assert_eq!(again.place(), "a step of the sequence failed");
            rig.truncate();
        }
    }
    assert!(refused.iter().all(|count| *count > 2), "{refused:?}");
}

#[test]
fn p19_a_gather_before_its_resolve_does_not_count() {
    let mut rig = Rig::host();
    let mut step = rig.prepare();
    due(false).concat().into_iter().for_each(|call| rig.make(&step, call).unwrap());
    // Of one row, in a layer that was gathered as a whole.
    let of = LayerCall { batch_rows: Some((1, 1)), ..LayerCall::whole(Layer(1)) };
    rig.make(&step, (Call::Resolve, 0, of)).unwrap();
    let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
    assert_eq!(described(&error), ("a gather was not enqueued", 1, 1, 0));
    (0..WAVES).for_each(|wave| rig.make(&step, (Call::Gather, wave, of)).unwrap());
    rig.end(step).unwrap();
}

#[test]
fn p19_attention_waves_of_a_gather_count_in_their_order() {
    let mut rig = Rig::host();
    let mut step = rig.prepare();
    let first = (Call::Gather, 0, LayerCall::whole(Layer(0)));
    let calls = due(false).concat().into_iter().filter(|made| *made != first);
    calls.for_each(|call| rig.make(&step, call).unwrap());
    let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
    assert_eq!((described(&error), error.number("wave")), (("a gather was not enqueued", 0, 0, 0), Some(0)));
    rig.cache.abandon(&mut step).unwrap();
    rig.end(step).unwrap_err();
}

/// The second batch row has one query row: it has no second draft pass, for host and device alike.
#[test]
fn p19_query_rows_beyond_those_of_a_sequence_are_not_due() {
    let run = |memory| {
        let mut rig = Rig::new(memory, config(), None).with([1, 2]);
        let step = rig.prepare();
        for (call, wave, of) in due(false).concat() {
            let batch_rows = if of.draft_pass == Some(1) { Some((0, 1)) } else { of.batch_rows };
            rig.make(&step, (call, wave, LayerCall { batch_rows, ..of })).unwrap();
        }
        rig.end(step).unwrap();
    };
    run(TestDevice::host(HostOptions::default()));
    #[cfg(feature = "cuda")]
    if device::driver_is_there() {
        run(TestDevice::cuda(&HostOptions::default(), None).unwrap());
    }
}

/// An engine without any work.
struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _call: &EngineCall, _stream: Stream) -> forebay::Result<()> {
        Ok(())
    }
}

impl Rig {
    fn layers(&self) -> Layers {
        let stream = self.stream;
        let streams = OverlapStreams { compute: stream, resolve: stream, gather: stream, scatter: stream };
        Layers { streams, batch: 2, half: 1, buffers: self.buffers }
    }
}

#[test]
fn p19_a_draft_pass_that_the_schedule_did_not_announce_is_missing() {
    let mut rig = Rig::host();
    let orders = [Overlap::Dba, Overlap::None, Overlap::Da];
    for passes in 0..=2 {
        let (mut step, layers) = (rig.prepare(), rig.layers());
        rig.cache.overlap_steps(&mut [(&mut step, layers)], &orders, passes, &mut Idle).unwrap();
        for pass in passes..2 {
            let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
            assert_eq!(described(&error), ("a resolve was not enqueued", DRAFT.into(), 0, pass.into()));
            rig.cache.overlap(&mut step, Layer(DRAFT), Some(pass), Overlap::Da, &layers, &mut Idle).unwrap();
        }
        rig.end(step).unwrap();
    }
}

#[test]
fn p19_a_step_of_a_cache_without_row_bytes_needs_its_resolves_only() {
    let memory = TestDevice::host(HostOptions::default());
    let mut rig = Rig::new(memory, Config { residency_only: true, ..config() }, None).with([1, 2]);
    let mut step = rig.prepare();
    for (_, _, of) in due(true).concat().into_iter().filter(|(call, ..)| *call == Call::Resolve) {
        let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
        assert_eq!(error.place(), "a resolve was not enqueued");
        rig.make(&step, (Call::Resolve, 0, of)).unwrap();
    }
    rig.end(step).unwrap();
}

/// A step of which the device forgets some calls; the result is how it ends.
fn forgetful(rig: &mut Rig, halves: bool, left_out: (Call, u32, u32, u32)) -> Result<(), Error> {
    let (call, layer, first, query) = left_out;
    rig.forgets.leave_out(move |made, range, _| {
        let of = (range.layer.0, range.first, range.rows.first);
        (made == call || (call == Call::Resolve && made == Call::Gather)) && of == (layer, first, query)
    });
    let step = rig.prepare();
    due(halves).concat().into_iter().for_each(|call| rig.make(&step, call).unwrap());
    let ended = rig.end(step);
    rig.forgets.leave_out(|_, _, _| false);
    ended
}

/// The report of one device about each call that never arrived.
fn reported(memory: Arc<TestDevice>) -> Vec<String> {
    let mut rig = Rig::new(memory, config(), None).with([1, 2]);
    let mut all = Vec::new();
    for (halves, left_out) in [
        (false, (Call::Resolve, 0, 0, 0)),
        (false, (Call::Resolve, 1, 0, 0)),
        (true, (Call::Resolve, 1, 1, 0)),
        (false, (Call::Resolve, DRAFT, 0, 1)),
        (false, (Call::Scatter, 0, 1, 0)),
        (true, (Call::Scatter, 0, 0, 0)),
        (false, (Call::Scatter, DRAFT, 0, 1)),
    ] {
        let error = forgetful(&mut rig, halves, left_out).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (Kind::DeviceFailed, "retire"), "{error}");
        assert!(error.to_string().contains("truncate its sequences to a committed length"), "{error}");
        let (call, layer, first, query) = left_out;
        let said = if call == Call::Resolve {
            "a query row was never resolved"
        } else {
            "a query row was not scattered"
        };
        let numbers = ["layer", "batch row", "value"].map(|name| error.number(name).unwrap());
        assert_eq!((error.place(), numbers), (said, [layer, first, query].map(u64::from)), "{left_out:?}");
        let ahead = rig.cache.truncate(rig.sequences[0], 21, rig.stream).unwrap_err();
        assert_eq!(ahead.kind(), Kind::OutOfRange, "landed rows of a failed step are not accepted");
        rig.truncate();
        // The same step, whole.
        forgetful(&mut rig, halves, (Call::Resolve, 99, 0, 0)).unwrap();
        all.push(error.to_string());
    }
    all
}

#[test]
fn p19_the_report_finds_the_same_missing_calls_on_every_device() {
    let reports = reported(TestDevice::host(HostOptions::default()));
    assert_eq!(reports.len(), 7);
    assert_eq!(reported(TestDevice::host(HostOptions { threaded: true, ..HostOptions::default() })), reports);
    #[cfg(feature = "cuda")]
    if device::driver_is_there() {
        assert_eq!(reported(TestDevice::cuda(&HostOptions::default(), Some(3)).unwrap()), reports);
    }
}

/// A sequence decodes in pages that another sequence had: its first new row is stored or forgotten, accepted, evicted,
/// and selected. The result is what attention reads of it, or how the step in which it was forgotten ended.
fn read_back(forget: bool, expected: Option<Expected>) -> Result<[u8; ROW], Error> {
    let memory = TestDevice::host(HostOptions::default());
    let one = Config { query_rows: 1, attention_waves: 1, ..Config::new(config().shape, 1, 32, 4) };
    let shape = Shape { draft_layers: 0, layers: 1, ..one.shape };
    let mut rig = Rig::new(memory, Config { shape, memory: config().memory, ..one }, expected);
    let step_of = |rig: &mut Rig, accepted: u32, positions: [i32; K as usize]| {
        rig.sync();
        rig.select(&positions);
        let sequence = rig.sequences[0];
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 1 };
        let step = rig.cache.prepare(MicroBatch(0), 1, &[row], None, rig.stream)?;
        let slot = rig.cache.landing_slot(sequence, 0)?;
        let slab = rig.cache.slab(Layer(0))?;
        let place = |slot: u32| slab.part(rig.cache.geometry().pieces(slot)[0].slab, ROW as u64);
        rig.memory.write(place(slot)?, &[7; ROW])?;
        let whole = LayerCall::whole(Layer(0));
        let calls = [(Call::Resolve, 0, whole), (Call::Gather, 0, whole), (Call::Scatter, 0, whole)];
        calls.into_iter().try_for_each(|call| rig.make(&step, call))?;
        rig.sync();
        let (mut slot, mut row) = ([0; 4], [0; ROW]);
        rig.memory.read(rig.buffers.slots.part(0, 4)?, &mut slot)?;
        rig.memory.read(place(u32::from_le_bytes(slot))?, &mut row)?;
        rig.end(step).map(|()| row)
    };
    let fill = |rig: &mut Rig, tag: u8, rows: usize, promised: u32| {
        let open =
            Open { prompt: rows as u32, promised, budget: Budget::Slots(4), bring_up: BringUp::Nothing };
        let sequence = rig.cache.open(&open).unwrap();
        rig.cache.append(sequence, Layer(0), &vec![tag; rows * ROW]).unwrap();
        let _ready = rig.cache.join(sequence, rig.stream, WarmUp::default()).unwrap();
        rig.sequences = vec![sequence];
    };
    // The page's last sequence.
    fill(&mut rig, 9, 30, 0);
    rig.cache.close(rig.sequences[0], rig.stream).unwrap();
    fill(&mut rig, 1, 12, 12);
    if forget {
        rig.forgets.leave_out(|call, _, _| call == Call::Scatter);
    }
    let first = step_of(&mut rig, 0, [0, 1, 2, 3]);
    rig.forgets.leave_out(|_, _, _| false);
    first?;
    for positions in [[4, 5, 6, 7], [8, 9, 10, 11]] {
        step_of(&mut rig, 1, positions)?;
    }
    step_of(&mut rig, 1, [12, -1, -1, -1])
}

#[test]
fn f21_rows_of_a_step_that_stored_nothing_are_neither_accepted_nor_read() {
    assert_eq!(read_back(false, None), Ok([7; ROW]), "a row that was stored");
    let error = read_back(true, None).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::DeviceFailed, "a query row was not scattered"));
    // The control: a cache that does not check accepts the row, and reads what the page's last sequence left there. A
    // debug build poisoned that when it gave the page out.
    let stale = if cfg!(debug_assertions) { 0xFF } else { 9 };
    assert_eq!(read_back(true, Some(Expected::Gathered)), Ok([stale; ROW]));
}

#[cfg(feature = "cuda")]
#[test]
fn p19_a_graph_that_lacks_a_layer_or_was_not_launched_fails_its_step() {
    if !device::driver_is_there() {
        return;
    }
    let mut rig =
        Rig::new(TestDevice::cuda(&HostOptions::default(), None).unwrap(), config(), None).with([1, 2]);
    let (micro_batches, by_layer) = ([(MicroBatch(0), rig.layers())], [Overlap::None; LAYERS as usize]);
    let bucket = forebay::Capture {
        micro_batches: &micro_batches,
        query_rows: 2,
        by_layer: &by_layer,
        draft_passes: 2,
    };
    let whole = rig.cache.capture(&bucket, &mut Idle).unwrap();
    rig.forgets.leave_out(|_, range, _| range.layer == Layer(1));
    let lacking = rig.cache.capture(&bucket, &mut Idle).unwrap();
    rig.forgets.leave_out(|_, _, _| false);
    rig.forgets.capture(rig.stream).unwrap();
    let own = rig.cache.capture_into(&bucket, &mut Idle).unwrap();
    let graph = rig.forgets.captured(rig.stream).unwrap();
    let failed = |rig: &mut Rig, enqueue: &dyn Fn(&mut Rig, &mut Step)| {
        let mut step = rig.prepare();
        enqueue(rig, &mut step);
        let ended = rig.end(step);
        rig.truncate();
        ended.map_err(|error| (error.place().to_owned(), error.number("layer").unwrap()))
    };
    let launch =
        |captured| move |rig: &mut Rig, step: &mut Step| rig.cache.launch(captured, &mut [step]).unwrap();
    assert_eq!(failed(&mut rig, &launch(&whole)), Ok(()));
    let never = |layer| Err(("a query row was never resolved".to_owned(), layer));
    assert_eq!(failed(&mut rig, &launch(&lacking)), never(1));
    let launched = |is: bool| {
        let own = &own;
        move |rig: &mut Rig, step: &mut Step| {
            if is {
                rig.forgets.launch(graph, rig.stream).unwrap();
            }
            rig.cache.launched(own, &mut [step]).unwrap();
        }
    };
    assert_eq!(failed(&mut rig, &launched(true)), Ok(()));
    assert_eq!(failed(&mut rig, &launched(false)), never(0));
    // Without a call to the cache nothing was enqueued.
    let mut step = rig.prepare();
    let error = rig.cache.finish(&mut step, rig.stream).unwrap_err();
    assert_eq!(described(&error), ("a resolve was not enqueued", 0, 0, 0));
    rig.cache.abandon(&mut step).unwrap();
    rig.end(step).unwrap_err();
    drop((whole, lacking, own));
    rig.forgets.release(graph).unwrap();
}

/// What an engine's graph did to one step, launched so many times: the slots that were returned last, their contents,
/// hits and misses, and digests.
#[cfg(feature = "cuda")]
fn launched_by_the_engine(times: u32) -> ([i32; 4], [u8; 4 * ROW], [u64; 2], [u64; 2]) {
    let mut rig =
        Rig::new(TestDevice::cuda(&HostOptions::default(), None).unwrap(), config(), None).with([1, 2]);
    let (micro_batches, by_layer) = ([(MicroBatch(0), rig.layers())], [Overlap::None; LAYERS as usize]);
    let bucket = forebay::Capture {
        micro_batches: &micro_batches,
        query_rows: 2,
        by_layer: &by_layer,
        draft_passes: 2,
    };
    rig.forgets.capture(rig.stream).unwrap();
    let own = rig.cache.capture_into(&bucket, &mut Idle).unwrap();
    let graph = rig.forgets.captured(rig.stream).unwrap();
    rig.select(&[3, 5, 7, 9, 3, 5, 7, 9, 2, 4, 6, 8, -1, -1, -1, -1]);
    let mut step = rig.prepare();
    (0..times).for_each(|_| rig.forgets.launch(graph, rig.stream).unwrap());
    rig.cache.launched(&own, &mut [&mut step]).unwrap();
    assert_eq!(
        rig.cache.launched(&own, &mut [&mut step]).unwrap_err().place(),
        "the step's layers have been launched"
    );
    rig.end(step).unwrap();
    let (mut words, slab) = ([0; 16], rig.cache.slab(Layer(DRAFT)).unwrap());
    rig.memory.read(rig.buffers.slots.part(0, 16).unwrap(), &mut words).unwrap();
    let slots: [i32; 4] =
        std::array::from_fn(|at| i32::from_le_bytes(std::array::from_fn(|byte| words[4 * at + byte])));
    let mut rows = [0; 4 * ROW];
    for (slot, row) in slots.into_iter().zip(rows.chunks_exact_mut(ROW)) {
        let place = rig.cache.geometry().pieces(slot as u32)[0].slab;
        rig.memory.read(slab.part(place, ROW as u64).unwrap(), row).unwrap();
    }
    let (stats, digests) = (rig.cache.stats(), [0, 1].map(|at| rig.cache.digest(rig.sequences[at]).unwrap()));
    drop(own);
    rig.forgets.release(graph).unwrap();
    (slots, rows, [stats.hits, stats.misses], digests)
}

#[cfg(feature = "cuda")]
#[test]
fn an_engines_graph_launched_twice_for_a_step_leaves_the_same_rows() {
    if !device::driver_is_there() {
        return;
    }
    let [(slots, rows, [hits, misses], digests), twice] = [1, 2].map(launched_by_the_engine);
    assert_eq!((rows, misses > 0), ([1; 4 * ROW], true), "rows of the first sequence");
    assert_eq!((twice.0, twice.1), (slots, rows));
    assert_eq!(twice.2[1], misses, "the fetched rows are found");
    assert!(twice.2[0] > hits, "and counted again");
    assert!(
        (0..2).all(|at| twice.3[at] != digests[at]),
        "a rank that did it differs from those that did not"
    );
}

/// One event follows all rows of a step, and each operation that the host issues for a sequence alone has its own: the
/// calls of a prepare do not grow with its batch.
#[test]
fn a_prepare_waits_once_for_all_batch_rows_unless_an_operation_came_between() {
    let mut rig = Rig::host();
    let waits = |rig: &mut Rig| {
        let before = rig.forgets.waits.load(Ordering::Relaxed);
        let step = rig.prepare();
        let waited = rig.forgets.waits.load(Ordering::Relaxed) - before;
        due(false).concat().into_iter().for_each(|made| rig.make(&step, made).unwrap());
        rig.end(step).unwrap();
        waited
    };
    // The micro-batch's last step, and both joins.
    assert_eq!(waits(&mut rig), 1 + 2);
    assert_eq!(waits(&mut rig), 1);
    rig.truncate();
    assert_eq!(waits(&mut rig), 1 + 2);
    assert_eq!(waits(&mut rig), 1);
    let (first, length) = (rig.sequences[0], rig.cache.length(rig.sequences[0]).unwrap().committed);
    let _ticket = rig.cache.truncate(first, length, rig.stream).unwrap();
    assert_eq!(waits(&mut rig), 1 + 1);
}

/// Work after a step on another stream waits for the event that the step's own micro-batch recorded last. The host sees
/// the step end before it lets anything follow, so no run and no watched order would show a wrong event.
#[test]
fn work_after_a_step_waits_for_the_end_of_its_own_micro_batch() {
    let device = TestDevice::host(HostOptions::default());
    let mut rig = Rig::new(device, Config { micro_batches: 2, ..config() }, None).with([1, 2]);
    let step = rig.prepare_in(MicroBatch(1));
    due(false).concat().into_iter().for_each(|made| rig.make(&step, made).unwrap());
    rig.forgets.recorded.lock().unwrap().clear();
    rig.end(step).unwrap();
    let own = rig.forgets.recorded.lock().unwrap().clone();
    let [first, second] = [0, 1].map(|at| rig.sequences[at]);
    let length = rig.cache.length(first).unwrap().committed;
    let (truncating, closed) = (rig.memory.stream().unwrap(), rig.memory.stream().unwrap());
    let _ticket = rig.cache.truncate(first, length, truncating).unwrap();
    rig.cache.close(second, closed).unwrap();
    for stream in [truncating, closed] {
        let awaited = rig.forgets.awaited.lock().unwrap().clone();
        let first = awaited.into_iter().find(|(_, waits)| *waits == stream).unwrap();
        assert!(own.contains(&(first.0, rig.stream)), "{first:?} of {own:?}");
    }
    // A fork comes after a truncation, and waits for it.
    rig.forgets.recorded.lock().unwrap().clear();
    let _ticket = rig.cache.truncate(first, length, truncating).unwrap();
    let truncation_ends = rig.forgets.recorded.lock().unwrap().clone();
    rig.sync();
    let open = Open { prompt: 20, promised: 8, budget: Budget::Slots(4), bring_up: BringUp::Nothing };
    let forked = rig.memory.stream().unwrap();
    let _fork = rig.cache.fork(first, &open, forked).unwrap();
    let awaited = rig.forgets.awaited.lock().unwrap().clone();
    let first = awaited.into_iter().find(|(_, waits)| *waits == forked).unwrap();
    assert!(truncation_ends.contains(&(first.0, truncating)), "{first:?} of {truncation_ends:?}");
}
