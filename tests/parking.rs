//! Prompts that come in chunks, and sequences that give their lane back and return: what each call takes, frees, keeps
//! and refuses. `tests/world.rs` mixes these calls with all others; this file tests each promise by itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;

use device::TestDevice;
use forebay::device::Stream;
use forebay::device::host::HostOptions;
use forebay::{Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Kind, Layer, LayerCall, Memory};
use forebay::{MicroBatch, Open, Sequence, Shape, Share, ShareBy, Slots, Streams, Tokens, WarmUp};
use std::sync::Arc;

const K: u32 = 8;
const PAGE: u32 = 16;
const LAYERS: u32 = 3;

fn config(lanes: u32, parked: u32) -> Config {
    let shape = Shape {
        layers: LAYERS,
        runs: [32, 0],
        index_key_bytes: 8,
        page_tokens: PAGE,
        top_k: K,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let config = Config::new(shape, lanes, 400, 128);
    Config { host_pages: 80, index_pages: 80, parked, min_budget: 16, query_rows: 2, memory, ..config }
}

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    buffers: Buffers,
}

fn engine_on(config: Config, threaded: bool) -> Engine {
    let device = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
    let buffer = || device.allocate(u64::from(4 * 2 * K)).unwrap();
    let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
    let cache = Cache::new(config, device.device()).unwrap();
    Engine { cache, stream: device.stream().unwrap(), device, buffers }
}

fn engine(config: Config) -> Engine {
    engine_on(config, false)
}

fn asks(prompt: u32, promised: u32, budget: Budget) -> Open {
    Open { prompt, promised, budget, bring_up: BringUp::Nothing }
}

/// The row of a position: every byte says which.
fn row(layer: u32, position: u32) -> Vec<u8> {
    [layer, position].iter().flat_map(|word| word.to_le_bytes()).cycle().take(32).collect()
}

impl Engine {
    fn append(&mut self, sequence: Sequence, positions: std::ops::Range<u32>) {
        for layer in 0..LAYERS {
            let rows: Vec<u8> = positions.clone().flat_map(|position| row(layer, position)).collect();
            self.cache.append(sequence, Layer(layer), &rows).unwrap();
        }
    }

    fn open(&mut self, prompt: u32, promised: u32) -> Sequence {
        let sequence = self.cache.open(&asks(prompt, promised, Budget::Slots(64))).unwrap();
        self.append(sequence, 0..prompt);
        sequence
    }

    fn start(&mut self, prompt: u32, promised: u32) -> Sequence {
        let sequence = self.open(prompt, promised);
        let _ticket = self.cache.join(sequence, self.stream, WarmUp::default()).unwrap();
        sequence
    }

    /// A step of `rows` query rows that all select `picks`: its hits and misses. The rows that attention reads must be
    /// the sequence's.
    fn step(&mut self, sequence: Sequence, accepted: u32, rows: u32, picks: &[u32]) -> (u64, u64) {
        let length = self.cache.length(sequence).unwrap().committed + accepted;
        let positions: Vec<i32> = (0..K as usize).map(|at| picks.get(at).map_or(-1, |p| *p as i32)).collect();
        let bytes: Vec<u8> = (0..rows).flat_map(|_| positions.iter().flat_map(|p| p.to_le_bytes())).collect();
        self.device.write(self.buffers.selection.part(0, bytes.len() as u64).unwrap(), &bytes).unwrap();
        let whole = u64::from(4 * rows * K);
        let buffers = Buffers {
            selection: self.buffers.selection.part(0, whole).unwrap(),
            slots: self.buffers.slots.part(0, whole).unwrap(),
            split_indices: None,
        };
        let batch = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: rows };
        let mut step = self.cache.prepare(MicroBatch(0), rows, &[batch], None, self.stream).unwrap();
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for layer in 0..LAYERS {
            let call = LayerCall::whole(Layer(layer));
            self.cache.layer(&step, call, streams, buffers).unwrap();
            let slab = self.cache.slab(Layer(layer)).unwrap();
            let mut slots = vec![0; whole as usize];
            self.device.read(buffers.slots, &mut slots).unwrap();
            for (slot, position) in slots.chunks_exact(4).zip(picks) {
                let slot = i32::from_le_bytes(slot.try_into().unwrap());
                let mut read = vec![0; 32];
                self.device
                    .read(slab.part(u64::try_from(slot).unwrap() * 32, 32).unwrap(), &mut read)
                    .unwrap();
                assert_eq!(read, row(layer, *position), "layer {layer}, position {position}");
            }
            for query in 0..rows {
                let slot = self.cache.landing_slot(sequence, query).unwrap();
                let at = slab.part(u64::from(slot) * 32, 32).unwrap();
                self.device.write(at, &row(layer, length + query)).unwrap();
            }
            self.cache.scatter(&step, call, self.stream).unwrap();
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        let retired = self.cache.retire(step, self.stream).map_err(|unretired| unretired.error).unwrap();
        let total = retired.total();
        self.cache.validate().unwrap();
        total
    }

    fn check_rows(&self, sequence: Sequence, length: u32) {
        for position in 0..length {
            let mut read = vec![0; 32];
            self.cache.read_row(sequence, Layer(1), position, &mut read).unwrap();
            assert_eq!(read, row(1, position), "position {position}");
        }
    }

    fn refused(
        &mut self,
        kind: Kind,
        call: impl FnOnce(&mut Cache) -> forebay::Result<()>,
    ) -> forebay::Error {
        let before = self.cache.stats();
        let error = call(&mut self.cache).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(self.cache.stats(), before, "{error}");
        self.cache.validate().unwrap();
        error
    }
}

fn budgets() -> Vec<Budget> {
    vec![Budget::Slots(100), Budget::Ratio(0.3), Budget::ByLayer(vec![70, 16, 128])]
}

#[test]
fn a_prompt_in_chunks_takes_what_it_takes_when_opened_whole() {
    for share in [None, Some(Share::default())] {
        for budget in budgets() {
            let setup = || engine(Config { share, slots: Slots::Uniform(256), ..config(2, 0) });
            let (mut whole, mut chunks) = (setup(), setup());
            let open = asks(300, 50, budget);
            let one = whole.cache.open(&open).unwrap();
            whole.append(one, 0..300);
            let other = chunks.cache.open(&Open { prompt: 10, promised: 0, ..open.clone() }).unwrap();
            let mut from = 0;
            for (to, promised) in [(10, 0), (11, 0), (90, 7), (90, 50), (290, 60), (300, 50)] {
                if to > 10 {
                    chunks.cache.extend(other, to, promised).unwrap();
                }
                chunks.append(other, from..to);
                from = to;
                assert_eq!(chunks.cache.length(other).unwrap().filled, to);
                chunks.cache.validate().unwrap();
            }
            assert_eq!(chunks.cache.stats(), whole.cache.stats());
            for (engine, sequence) in [(&mut whole, one), (&mut chunks, other)] {
                let _ticket = engine.cache.join(sequence, engine.stream, WarmUp::default()).unwrap();
                let total = engine.step(sequence, 0, 1, &[0, 15, 16, 90, 299]);
                assert_eq!(total, (0, 5 * u64::from(LAYERS)));
                engine.check_rows(sequence, 301);
            }
            assert_eq!(chunks.cache.budgets(other).unwrap(), whole.cache.budgets(one).unwrap());
            assert_eq!(chunks.cache.stats(), whole.cache.stats());
        }
    }
}

#[test]
fn an_extension_that_is_refused_changes_nothing() {
    let mut e = engine(Config { host_pages: 11, index_pages: 11, ..config(2, 1) });
    let first = e.open(60, 0);
    let second = e.open(60, 0);
    // Prompt, promise and four rows in flight: 4 pages of 16 each, and 3 are free.
    let error = e.refused(Kind::Exhausted, |cache| cache.extend(first, 60, 64));
    assert_eq!((error.number("wanted"), error.number("free")), (Some(4), Some(3)), "{error}");
    for (prompt, promised) in [(59, 10), (60, u32::MAX), (61, 400), (50, 9)] {
        e.refused(Kind::OutOfRange, |cache| cache.extend(first, prompt, promised));
    }
    e.cache.close(second, e.stream).unwrap();
    e.cache.extend(first, 70, 54).unwrap();
    e.refused(Kind::OutOfRange, |cache| cache.extend(first, 70, 53));
    let stream = e.stream;
    let incomplete =
        e.refused(Kind::InvalidState, |cache| cache.join(first, stream, WarmUp::default()).map(|_| ()));
    assert_eq!(incomplete.number("filled"), Some(60));
    e.append(first, 60..70);
    let _ticket = e.cache.join(first, stream, WarmUp::default()).unwrap();
    e.refused(Kind::InvalidState, |cache| cache.extend(first, 80, 44));
    e.cache.close(first, stream).unwrap();
    e.refused(Kind::Closed, |cache| cache.extend(first, 80, 44));

    // Slots: 4 blocks of each layer; a ratio of one takes a block for each 64 tokens.
    let mut e = engine(config(2, 0));
    let ratio = e.cache.open(&asks(60, 0, Budget::Ratio(1.0))).unwrap();
    let other = e.cache.open(&asks(100, 0, Budget::Slots(100))).unwrap();
    assert_eq!(e.cache.budgets(ratio).unwrap(), [60; 3]);
    e.refused(Kind::Exhausted, |cache| cache.extend(ratio, 60, 100));
    e.cache.close(other, e.stream).unwrap();
    e.cache.extend(ratio, 60, 100).unwrap();
    assert_eq!(e.cache.budgets(ratio).unwrap(), [160; 3]);
}

#[test]
fn a_prompt_is_truncated_before_its_join() {
    let mut e = engine(config(2, 0));
    let stream = e.stream;
    // Three drafts came with the prompt's last chunk; one was accepted.
    let sequence = e.open(40, 20);
    let before = e.cache.stats();
    assert!(e.cache.truncate(sequence, 38, stream).unwrap().poll().is_some());
    e.refused(Kind::OutOfRange, |cache| cache.truncate(sequence, 39, stream).map(|_| ()));
    assert_eq!(e.cache.stats(), before);
    let _ticket = e.cache.join(sequence, stream, WarmUp::default()).unwrap();
    assert_eq!(e.cache.length(sequence).unwrap().committed, 38);
    e.step(sequence, 0, 1, &[37, 0]);
    e.check_rows(sequence, 39);
    e.cache.close(sequence, stream).unwrap();

    // Pages that others share stay as they are; pages that were found and are used alone leave the index.
    let ids: Vec<u32> = (0..40).collect();
    let open = asks(40, 0, Budget::Slots(64));
    let begin = |e: &mut Engine| e.cache.open_shared(&open, b"", Tokens::new(&ids)).unwrap();
    let (first, _) = begin(&mut e);
    e.append(first, 0..40);
    let _ticket = e.cache.join(first, stream, WarmUp::default()).unwrap();
    assert_eq!(e.cache.publish(first, 0, Tokens::new(&ids)).unwrap(), 32);
    let (second, shared) = begin(&mut e);
    assert_eq!(shared, 32);
    let error = e.refused(Kind::InvalidState, |cache| cache.truncate(second, 31, stream).map(|_| ()));
    assert!(error.to_string().contains("join it first"), "{error}");
    let _ticket = e.cache.truncate(second, 32, stream).unwrap();
    e.cache.close(first, stream).unwrap();
    let _ticket = e.cache.truncate(second, 20, stream).unwrap();
    e.cache.validate().unwrap();
    assert_eq!((e.cache.length(second).unwrap().filled, e.cache.length(second).unwrap().published), (20, 16));
    e.cache.extend(second, 45, 0).unwrap();
    e.append(second, 20..45);
    let _ticket = e.cache.join(second, stream, WarmUp::default()).unwrap();
    e.check_rows(second, 45);
    e.cache.close(second, stream).unwrap();
}

#[test]
fn a_parked_sequence_frees_lane_and_slots_and_returns_with_the_rows_it_selected_last() {
    let mut e = engine(config(1, 2));
    let stream = e.stream;
    let free = e.cache.stats();
    let first = e.start(200, 50);
    e.step(first, 0, 1, &[5, 100, 7]);
    e.step(first, 1, 2, &[199, 8, 200]);
    let running = e.cache.stats();
    e.cache.park(first, 1, stream).unwrap();
    let parked = e.cache.stats();
    assert_eq!((parked.free_lanes, parked.slots_in_use, parked.parked), (1, 0, 1));
    assert_eq!(parked.free_host_pages, running.free_host_pages, "its pages stay");
    let length = e.cache.length(first).unwrap();
    assert_eq!((length.committed, length.landed, e.cache.is_parked(first).unwrap()), (202, 0, true));
    // Its lane and slots serve another sequence meanwhile, which parks too.
    let second = e.start(100, 50);
    e.step(second, 0, 1, &[1, 2, 3, 4, 5, 6, 7, 8]);
    e.refused(Kind::Exhausted, |cache| cache.resume(first, stream, 0).map(|_| ()));
    e.cache.park(second, 0, stream).unwrap();
    let _ticket = e.cache.resume(first, stream, 0).unwrap();
    assert_eq!(e.cache.stats().parked, 1);
    // The rows of both steps are resident, the ninth newest is not; the accepted row was never selected.
    let total = e.step(first, 0, 1, &[5, 100, 7, 199, 8, 200]);
    assert_eq!(total, (6 * u64::from(LAYERS), 0));
    let total = e.step(first, 1, 1, &[201, 3]);
    assert_eq!(total, (0, 2 * u64::from(LAYERS)));
    e.check_rows(first, 204);
    e.cache.close(first, stream).unwrap();
    let _ticket = e.cache.resume(second, stream, 0).unwrap();
    let total = e.step(second, 0, 1, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(total, (8 * u64::from(LAYERS), 0));
    e.check_rows(second, 100);
    e.cache.close(second, stream).unwrap();
    let end = e.cache.stats();
    assert_eq!(
        (end.sequences, end.free_lanes, end.free_host_pages),
        (0, free.free_lanes, free.free_host_pages)
    );
    e.cache.validate().unwrap();
}

#[test]
fn the_next_turn_of_a_conversation_is_appended_while_parked() {
    let mut e = engine(config(1, 1));
    let stream = e.stream;
    let sequence = e.cache.open(&asks(50, 10, Budget::Ratio(0.5))).unwrap();
    e.append(sequence, 0..50);
    let _ticket = e.cache.join(sequence, stream, WarmUp::default()).unwrap();
    assert_eq!(e.cache.budgets(sequence).unwrap(), [30; 3]);
    let mut length = 50;
    for turn in 0..4_u32 {
        let picks: Vec<u32> = (0..K).map(|at| (at * 7 + turn) % length).collect();
        e.step(sequence, 0, 2, &picks);
        // One draft is rejected; the turn's rows overwrite it.
        e.cache.park(sequence, 1, stream).unwrap();
        length += 1;
        let next = length + 40 + turn;
        e.cache.extend(sequence, next, 10).unwrap();
        let incomplete = e.refused(Kind::InvalidState, |cache| cache.resume(sequence, stream, 0).map(|_| ()));
        assert_eq!(incomplete.number("filled"), Some(length.into()));
        e.append(sequence, length..next);
        e.check_rows(sequence, next);
        // Two rows of the turn were drafts too.
        let _ticket = e.cache.truncate(sequence, next - 2, stream).unwrap();
        length = next - 2;
        let _ticket = e.cache.resume(sequence, stream, 0).unwrap();
        let wanted = (f64::from(next + 10) * 0.5 + 0.5) as u32;
        assert_eq!(e.cache.budgets(sequence).unwrap(), [wanted; 3], "half of all tokens");
        let (_, missed) = e.step(sequence, 0, 1, &picks);
        assert_eq!(missed, 0, "turn {turn}: what was selected last is resident");
        length += 1;
        e.step(sequence, 1, 1, &[length - 1, 0]);
        let _ticket = e.cache.truncate(sequence, length, stream).unwrap();
        e.check_rows(sequence, length);
    }
}

#[test]
fn a_parked_parent_is_truncated_once_its_forks_copy_is_reaped() {
    let mut e = engine(config(2, 1));
    let stream = e.stream;
    let parent = e.start(40, 10);
    let open = asks(0, 10, Budget::Slots(64));
    let (child, _ticket) = e.cache.fork(parent, &open, stream).unwrap();
    e.cache.park(parent, 0, stream).unwrap();
    // The first two pages are shared. The third was copied, and is held until the child's work has been looked at.
    e.refused(Kind::InvalidState, |cache| cache.truncate(parent, 34, stream).map(|_| ()));
    assert_eq!(e.cache.reap(stream).unwrap(), 0);
    let _ticket = e.cache.truncate(parent, 34, stream).unwrap();
    e.refused(Kind::InvalidState, |cache| cache.truncate(parent, 31, stream).map(|_| ()));
    e.cache.close(child, stream).unwrap();
    let _ticket = e.cache.truncate(parent, 5, stream).unwrap();
    e.cache.validate().unwrap();
    e.check_rows(parent, 5);
}

#[test]
fn a_prompt_may_be_parked_before_its_join() {
    let mut e = engine(config(1, 1));
    let stream = e.stream;
    let first = e.cache.open(&asks(50, 10, Budget::Slots(64))).unwrap();
    e.append(first, 0..20);
    e.refused(Kind::OutOfRange, |cache| cache.park(first, 1, stream));
    e.cache.park(first, 0, stream).unwrap();
    e.refused(Kind::InvalidState, |cache| cache.park(first, 0, stream));
    let second = e.start(30, 5);
    let error = e.refused(Kind::Exhausted, |cache| cache.park(second, 0, stream));
    assert_eq!(error.place(), "places of parked sequences");
    e.append(first, 20..50);
    e.cache.close(second, stream).unwrap();
    let _ticket = e.cache.resume(first, stream, 0).unwrap();
    let total = e.step(first, 0, 1, &[0, 19, 20, 49]);
    assert_eq!(total, (0, 4 * u64::from(LAYERS)), "nothing was noted");
    e.cache.close(first, stream).unwrap();
    // A parked sequence that is closed frees its place.
    for _ in 0..3 {
        let sequence = e.start(30, 5);
        e.cache.park(sequence, 0, stream).unwrap();
        for call in ["digest", "landing slot"] {
            let error = match call {
                "digest" => e.cache.digest(sequence).unwrap_err(),
                _ => e.cache.landing_slot(sequence, 0).unwrap_err(),
            };
            assert_eq!((error.kind(), error.operation()), (Kind::InvalidState, call));
        }
        e.cache.close(sequence, stream).unwrap();
        assert_eq!((e.cache.stats().sequences, e.cache.stats().parked), (0, 0));
        e.cache.validate().unwrap();
    }
}

#[test]
fn a_place_of_a_parked_sequence_is_counted_to_the_byte() {
    let [none, five] = [0, 5].map(|parked| config(2, parked).footprint(4096).unwrap());
    let place = u64::from(LAYERS * K) * 4;
    assert_eq!(five.tables - none.tables, 5 * place);
    assert_eq!(five, forebay::Footprint { tables: five.tables, ..none }, "and nothing else changes");
}

#[test]
fn a_parked_sequence_keeps_no_promise_of_shared_slots() {
    let share = Some(Share::default());
    let mut e = engine(Config { share, slots: Slots::Uniform(256), ..config(3, 2) });
    let stream = e.stream;
    let open = asks(150, 50, Budget::Slots(128));
    let start = |e: &mut Engine| {
        let sequence = e.cache.open(&open).unwrap();
        e.append(sequence, 0..150);
        let _ticket = e.cache.join(sequence, stream, WarmUp::default()).unwrap();
        sequence
    };
    let (first, second) = (start(&mut e), start(&mut e));
    assert_eq!(e.cache.open(&open).unwrap_err().place(), "slot blocks");
    e.step(first, 0, 1, &[3, 4]);
    e.cache.park(first, 0, stream).unwrap();
    let third = start(&mut e);
    let error = e.refused(Kind::Exhausted, |cache| cache.resume(first, stream, 0).map(|_| ()));
    assert_eq!(error.place(), "slot blocks");
    e.cache.close(second, stream).unwrap();
    let _ticket = e.cache.resume(first, stream, 0).unwrap();
    assert_eq!(e.step(first, 0, 1, &[3, 4]), (2 * u64::from(LAYERS), 0));
    e.cache.close(third, stream).unwrap();
    e.cache.close(first, stream).unwrap();
    assert_eq!(e.cache.stats().slots_in_use, 0);
}

#[test]
fn a_resumed_sequence_outgrows_its_share_again() {
    let share = Some(Share { by: ShareBy::Length, ..Share::default() });
    let shared = Config { share, slots: Slots::Uniform(1024), max_tokens: 1000, ..config(2, 1) };
    let mut e = engine(Config { host_pages: 140, index_pages: 140, ..shared });
    let stream = e.stream;
    let start = |e: &mut Engine, prompt: u32| {
        let sequence = e.cache.open(&asks(prompt, 940 - prompt, Budget::Slots(64))).unwrap();
        e.append(sequence, 0..prompt);
        let _ticket = e.cache.join(sequence, stream, WarmUp::default()).unwrap();
        sequence
    };
    let first = start(&mut e, 100);
    assert!(e.cache.budgets(first).unwrap()[0] > 800, "all slots, so it will never ask for more");
    e.step(first, 0, 1, &[0]);
    e.cache.park(first, 0, stream).unwrap();
    let second = start(&mut e, 800);
    e.step(second, 0, 1, &[0]);
    let _ticket = e.cache.resume(first, stream, 0).unwrap();
    let (before, resizes) = (e.cache.budgets(first).unwrap()[0], e.cache.stats().resizes);
    e.step(second, 0, 1, &[0]);
    e.step(first, 0, 2, &[0]);
    for _ in 0..350 {
        e.step(first, 2, 2, &[0]);
    }
    let after = e.cache.budgets(first).unwrap()[0];
    assert!(after > before && e.cache.stats().resizes > resizes, "{before} slots, then {after}");
}

#[test]
fn a_sequence_with_work_in_flight_is_not_parked() {
    let mut e = engine_on(config(2, 1), true);
    let stream = e.stream;
    let sequence = e.open(50, 10);
    let held = e.device.hold(stream);
    let ticket = e.cache.join(sequence, stream, WarmUp::default()).unwrap();
    e.refused(Kind::Busy, |cache| cache.park(sequence, 0, stream));
    drop(held);
    while ticket.poll().is_none() {
        std::thread::yield_now();
    }
    let held = e.device.hold(stream);
    // The device has not emptied the lane, and the lane is free: the next sequence waits for it on the device.
    e.cache.park(sequence, 0, stream).unwrap();
    assert_eq!(e.cache.stats().free_lanes, 2);
    let ticket = e.cache.resume(sequence, e.device.stream().unwrap(), 0).unwrap();
    assert!(ticket.poll().is_none());
    drop(held);
    while ticket.poll().is_none() {
        std::thread::yield_now();
    }
    e.cache.validate().unwrap();
}
