//! Promise P7: the declared sizes bound the cost of a step, whatever it selects and however old its sequences are. The
//! test counts and does not time: the clock device counts operations and edges, the report counts moved rows, and the
//! rule's own loops count the words that they read. `tests/allocation.rs` tests that a step allocates nothing.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::cell::Cell;
use std::sync::Arc;

use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Event, Slice, Stream};
use forebay::residency::{
    At, Fetch, LaneHead, LayerTables, Portable, QueryRange, Scan, Selected, Split, Stamped, TableShape,
    TableWords, Tied, Touch, Touched, Workspace,
};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Sequence, Shape, Streams, WarmUp};

const LAYERS: u32 = 3;
const BATCH: u32 = 3;
const WIDTH: u32 = 2;
const K: u32 = 32;
const PROMPT: u32 = 600;

fn random(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as u32
}

/// The cost of one step.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    /// Every operation, and the layer that it was for.
    operations: Vec<(&'static str, Option<Layer>)>,
    waits: u64,
}

/// A cache on a clock over the host device: rows are moved, and each enqueued operation is known by name.
struct Engine {
    cache: Cache,
    clock: Arc<ClockDevice>,
    host: Arc<HostDevice>,
    stream: Stream,
    done: Event,
    sequences: Vec<Sequence>,
    selection: Slice,
    slots: Slice,
    seen: usize,
    waits: u64,
}

impl Engine {
    fn new() -> Engine {
        let host = HostDevice::new(HostOptions::default());
        let options = ClockOptions { record: true, ..ClockOptions::default() };
        let clock = ClockDevice::over(host.clone(), options).unwrap();
        let shape =
            Shape { layers: LAYERS, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { query_rows: WIDTH, memory, ..Config::new(shape, BATCH, 2000, 96) };
        let mut cache = Cache::new(config, clock.clone()).unwrap();
        let (stream, done) = (clock.stream().unwrap(), clock.event().unwrap());
        let open =
            Open { prompt: PROMPT, promised: 1400, budget: Budget::Slots(96), bring_up: BringUp::Nothing };
        let sequences = (0..BATCH).map(|_| {
            let sequence = cache.open(&open).unwrap();
            cache.append_in_place(sequence, PROMPT).unwrap();
            let _ticket = cache.join(sequence, stream, WarmUp::default()).unwrap();
            sequence
        });
        let sequences = sequences.collect();
        let words = || clock.allocate(u64::from(4 * BATCH * WIDTH * K)).unwrap();
        let (selection, slots) = (words(), words());
        let mut engine =
            Engine { cache, host, stream, done, sequences, selection, slots, seen: 0, waits: 0, clock };
        engine.sync();
        engine.cost();
        engine
    }

    fn sync(&self) {
        self.clock.record(self.done, self.stream).unwrap();
        self.clock.synchronize(self.done).unwrap();
    }

    /// The operations enqueued since the last call.
    fn cost(&mut self) -> Cost {
        let (spans, waits) = (self.clock.spans(), self.clock.waits());
        let operations = spans[self.seen..].iter().map(|span| (span.name, span.layer)).collect();
        let cost = Cost { operations, waits: waits - self.waits };
        (self.seen, self.waits) = (spans.len(), waits);
        cost
    }

    /// One step that selects `positions` (k of each query row, in every layer) in calls of so many batch rows. Returns
    /// its cost and the number of rows that each layer fetched.
    fn step(&mut self, accepted: u32, positions: &[i32], rows_a_call: u32) -> (Cost, Vec<u32>) {
        self.sync();
        let bytes: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
        self.host.write(self.selection, &bytes).unwrap();
        let row =
            |s: &Sequence| BatchRow { sequence: *s, accepted: Accepted::Rows(accepted), query_rows: WIDTH };
        let rows: Vec<BatchRow> = self.sequences.iter().map(row).collect();
        let mut step = self.cache.prepare(MicroBatch(0), WIDTH, &rows, None, self.stream).unwrap();
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for layer in 0..LAYERS {
            for first in (0..BATCH).step_by(rows_a_call as usize) {
                let range = |of: Slice| {
                    let row = u64::from(4 * WIDTH * K);
                    of.part(row * u64::from(first), row * u64::from(rows_a_call)).unwrap()
                };
                let batch_rows = Some((first, rows_a_call));
                let call = LayerCall { layer: Layer(layer), batch_rows, draft_pass: None };
                let (selection, slots) = (range(self.selection), range(self.slots));
                self.cache
                    .layer(&step, call, streams, Buffers { selection, slots, split_indices: None })
                    .unwrap();
                self.cache.scatter(&step, call, self.stream).unwrap();
            }
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        self.sync();
        let retired = self.cache.retire(step, self.stream).unwrap();
        let misses = retired.layers().iter().map(|layer| layer.misses).collect();
        (self.cost(), misses)
    }
}

/// The selection of a step: nothing, always the same, positions never selected before, one row repeatedly, anything.
fn positions(number: u32, length: u32, seed: &mut u64) -> Vec<i32> {
    let position = |at: u32, seed: &mut u64| match number % 5 {
        0 => -1,
        1 => (at % K) as i32,
        2 => ((at + number * 67) % length) as i32,
        3 => 7,
        _ => (random(seed) % length) as i32,
    };
    (0..BATCH * WIDTH).flat_map(|row| (0..K).map(move |k| row * K + k)).map(|at| position(at, seed)).collect()
}

#[test]
fn p7_the_operations_of_a_step_depend_neither_on_its_selections_nor_on_its_age() {
    let mut engine = Engine::new();
    let (mut seed, mut length, mut most) = (1, PROMPT, 0);
    // One commit; a resolve, a gather and a scatter for each layer; a report. Edges: after the micro-batch's last step,
    // which is that of every row; the first step, which has none before it, also after each sequence's join.
    let of = |layer| ["resolve", "gather", "scatter"].map(|name| (name, Some(Layer(layer))));
    let mut operations = vec![("begin", None)];
    operations.extend((0..LAYERS).flat_map(of));
    operations.push(("report", None));
    let declared = |waits| Cost { operations: operations.clone(), waits };
    for number in 0..300 {
        let accepted = if number == 0 { 0 } else { number % (WIDTH + 1) };
        length += accepted;
        let (cost, misses) = engine.step(accepted, &positions(number, length, &mut seed), BATCH);
        assert!(misses.iter().all(|misses| *misses <= BATCH * WIDTH * K), "{misses:?}");
        most = most.max(misses[0]);
        let waits = if number == 0 { 1 + u64::from(BATCH) } else { 1 };
        assert_eq!(cost, declared(waits), "step {number}");
    }
    assert_eq!(most, BATCH * WIDTH * K, "a step that fetches all that it selects is among them");
    // The control: an engine that makes one call for each batch row is noticed.
    let (by_row, _) = engine.step(0, &positions(1, length, &mut seed), 1);
    assert_eq!(by_row.operations.len(), 2 + (3 * LAYERS * BATCH) as usize, "{by_row:?}");
}

/// Counts the words that the rule's loops read, and the passes in which it searches a bound.
#[derive(Default)]
struct Counting {
    words: Cell<u64>,
    searched: Cell<u64>,
}

impl Counting {
    fn add(&self, words: usize) {
        self.words.set(self.words.get() + words as u64);
    }

    /// Words and searches since the last time.
    fn taken(&self) -> (u64, u64) {
        (self.words.take(), self.searched.take())
    }
}

const BLOCK: usize = 64;

impl Scan for Counting {
    const QUICK_SLOTS: usize = Portable::QUICK_SLOTS;

    fn touch(&self, touch: Touch<'_>) -> Touched {
        self.add(touch.selection.len());
        Portable.touch(touch)
    }

    fn first(&self, rows: Stamped<'_>, stamp: u32) -> u32 {
        self.add(rows.blocks.len() * BLOCK);
        Portable.first(rows, stamp)
    }

    fn find(&self, stamps: &[u32], blocks: &[u32], stamp: u32) -> Option<u32> {
        self.add(blocks.len() * BLOCK);
        Portable.find(stamps, blocks, stamp)
    }

    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        self.add(blocks.len() * BLOCK);
        self.searched.set(self.searched.get() + 1);
        Portable.count(stamps, blocks, bounds)
    }

    fn split(&self, stamps: &[u32], blocks: &[u32], at: At, older: &mut [u64], tied: &mut [u64]) -> Split {
        self.add(blocks.len() * BLOCK);
        Portable.split(stamps, blocks, at, older, tied)
    }

    /// Its own test in `src/residency/scan.rs` bounds the passes inside it.
    fn lowest(&self, tied: Tied<'_>, keep: usize, out: &mut [u32]) -> u32 {
        self.add(tied.count);
        Portable.lowest(tied, keep, out)
    }

    fn take(&self, bits: &mut [u64], out: &mut [u32]) -> usize {
        self.add(bits.len());
        Portable.take(bits, out)
    }

    fn list(&self, set: &[u64], blocks: &[u32], out: &mut [u32]) -> usize {
        self.add(set.len());
        Portable.list(set, blocks, out)
    }
}

const BUDGET: u32 = 250;
const TOKENS: u32 = 4096;

fn shape() -> TableShape {
    TableShape {
        lanes: 1,
        tokens: TOKENS,
        query_rows: WIDTH,
        scratch: WIDTH * K,
        waves: 1,
        scratch_base: 1,
        landing_base: 128,
        budget_base: 192,
        budget_blocks: BUDGET.div_ceil(64),
    }
}

/// Passes that find a bound among stamps of 31 bits: the stride grows by four until it is beyond the bound, sixteen
/// times at most, then the rest is quartered, two passes each.
const SEARCH: u64 = 3 * 16;

/// The most words that a commit and a resolve of `rows` query rows may read.
fn bound(accepted: u32, rows: u32) -> u64 {
    let shape = shape();
    let blocks = u64::from(shape.lane_blocks());
    let slots = 64 * blocks;
    // A born row: a free slot, the least recently used one, or a search and then the least recently used one.
    let born = u64::from(accepted) * (3 + SEARCH) * slots;
    // A look-up for each position, two splits and a search, the sets of victims, the ties, the missed positions.
    let resolved = u64::from(rows * K) + (3 + SEARCH) * slots + 4 * blocks + u64::from(shape.tokens) / 64;
    born + resolved
}

/// A lane's tables and the other memory that a step needs.
struct Lane {
    tables: LayerTables,
    work: Workspace,
    scan: Counting,
}

impl Lane {
    fn of(tables: LayerTables) -> Lane {
        Lane { tables, work: Workspace::new(&shape(), WIDTH * K).unwrap(), scan: Counting::default() }
    }

    /// Every fourth position up to the length, so that each step of `ones` can select another.
    fn new() -> Lane {
        let mut tables = LayerTables::new(shape()).unwrap();
        let blocks: Vec<u32> = (0..BUDGET.div_ceil(64)).collect();
        tables.join(0, &blocks, BUDGET, PROMPT * 5).unwrap();
        let mut lane = Lane::of(tables);
        // Each row has a stamp of its own: the bound of many victims has to be searched.
        for position in 0..BUDGET {
            lane.step(0, 1, |_| position as i32);
        }
        lane
    }

    /// A step: the words that it read, the passes of its searches, and the slots that it returned.
    fn step(&mut self, accepted: u32, rows: u32, position: impl Fn(u32) -> i32) -> (u64, u64, Vec<i32>) {
        let Lane { tables, work, scan } = self;
        tables.commit(scan, 0, accepted, rows, |_| ()).unwrap();
        let selection: Vec<i32> = (0..rows * K).map(position).collect();
        let mut slots = vec![0; selection.len()];
        let mut fetches = vec![Fetch { position: 0, slot: 0 }; selection.len()];
        let selected = Selected { selection: &selection[..], slots: &mut slots, fetches: &mut fetches };
        tables.resolve(scan, 0, QueryRange { first: 0, count: rows }, selected, work).unwrap();
        let (words, searched) = scan.taken();
        (words, searched, slots)
    }

    /// The same lane after almost 2^31 steps of a sequence: its stamps are as far apart as possible, in the same order.
    fn aged(&self) -> Lane {
        const LAST: u32 = i32::MAX as u32 - 1000;
        let now = self.tables.head(0).unwrap().stamp;
        let older = |stamp: u32| if stamp > now { stamp } else { stamp * (LAST / now) };
        let TableWords { heads, slot_of, position_of, stamp_of, blocks } = self.tables.words();
        let head = |h: &LaneHead| LaneHead { stamp: older(h.stamp), min_stamp: older(h.min_stamp), ..*h };
        let heads: Vec<LaneHead> = heads.iter().map(head).collect();
        let stamp_of: Vec<u32> = stamp_of.iter().map(|stamp| older(*stamp)).collect();
        let words = TableWords { heads: &heads, slot_of, position_of, stamp_of: &stamp_of, blocks };
        let tables = LayerTables::from_words(shape(), &words).unwrap();
        tables.validate().unwrap();
        Lane::of(tables)
    }

    /// The words that a search from the oldest stamp on, stamp by stamp, reads until it has found `need` slots or read
    /// `most` words.
    fn one_by_one(&self, need: u32, most: u64) -> u64 {
        let words = self.tables.words();
        let stamps = &words.stamp_of[shape().budget_base as usize..];
        let mut bound = self.tables.head(0).unwrap().min_stamp;
        loop {
            let counts = self.scan.count(stamps, words.blocks, &[0, 1, 2, 3].map(|i| bound + i));
            if counts[3] >= need || self.scan.words.get() > most {
                return self.scan.taken().0;
            }
            bound += 4;
        }
    }
}

#[test]
fn p7_the_words_that_the_rule_reads_are_bounded_by_the_extents_at_any_age() {
    let mut young = Lane::new();
    let mut old = young.aged();
    let need = WIDTH * K;
    let control = [young.one_by_one(need, bound(0, WIDTH)), old.one_by_one(need, bound(0, WIDTH))];
    let mut seed = 1;
    let (mut searched, mut most) = (0, 0);
    for number in 0..200_u32 {
        let accepted = if number == 0 { 1 } else { number % (WIDTH + 1) };
        let length = young.tables.head(0).unwrap().length;
        let fresh = BUDGET + number * WIDTH * K;
        let anything: Vec<i32> = (0..WIDTH * K).map(|_| (random(&mut seed) % length) as i32).collect();
        let position = |at: u32| match number % 5 {
            // All missed and new.
            0 => ((fresh + at) % length) as i32,
            1 => -1,
            2 => (at % 5) as i32,
            3 => (at * 7) as i32,
            _ => anything[at as usize],
        };
        let [(words, passes, slots), aged] =
            [&mut young, &mut old].map(|lane| lane.step(accepted, WIDTH, position));
        assert_eq!(slots, aged.2, "step {number}: only the work differs by age");
        for (words, passes) in [(words, passes), (aged.0, aged.1)] {
            assert!(words <= bound(accepted, WIDTH), "step {number}: {words} words");
            assert!(passes <= (1 + u64::from(accepted)) * SEARCH, "step {number}: {passes} passes");
        }
        (searched, most) = (searched.max(aged.1), most.max(aged.0));
    }
    assert!(searched > 10, "the bound of an old sequence has to be searched: {searched} passes");
    assert!(most * 8 > bound(0, WIDTH), "the bound is at most a few times the largest count: {most}");
    // The control: the cost of a search by age stays within the bound while a sequence is young, and exceeds it later.
    assert!(control[0] <= bound(0, WIDTH) && control[1] > bound(0, WIDTH), "{control:?}");
}
