//! Parking: rows wait on the host, and are found again where attention reads them.

use std::sync::Arc;

use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use crate::faulty::Faulty;
use forebay::dense::{Cache, Config, Group, Open, Shape};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Outcome, Stream};
use forebay::{Accepted, BatchRow, Error, Kind, Memory, MicroBatch, Sequence, Step, Tokens};

/// Bytes of a page.
const PAGE: u64 = 16 * 64;

struct Rig {
    device: Arc<dyn Device>,
    cache: Cache,
    kernels: Kernels,
    stream: Stream,
}

impl Rig {
    /// Two layers of 32 bytes a token; with a window a second group.
    fn new(window: Option<u32>, change: impl FnOnce(&mut Config)) -> Rig {
        let test = TestDevice::new(HostOptions::default());
        let group = |layers: &[u32], window| Group { layers: layers.to_vec(), runs: [16, 16], window };
        let mut groups = vec![group(&[0, 1], None)];
        groups.extend(window.map(|window| group(&[2, 3], Some(window))));
        let mut config = Config::new(Shape { page_tokens: 16, groups }, 3, 128);
        config.memory = Memory { huge: false, populate: false, lock: false, node: None };
        config.host_pages = vec![9; config.shape.groups.len()];
        config.device_pages[0] = 10;
        change(&mut config);
        let (device, stream) = (test.device(), test.stream().unwrap());
        let cache = Cache::new(config, test.device()).unwrap();
        let kernels = Kernels::new(&test, &cache);
        Rig { device, cache, kernels, stream }
    }

    /// A step of a sequence whose rows have `stamps`: `accepted` of the last ones count, and `fresh` are new.
    fn step(&mut self, sequence: Sequence, stamps: &mut Vec<u64>, accepted: u32, fresh: u32) {
        let length = stamps.len() as u64;
        stamps.extend((length..length + u64::from(fresh)).map(|at| 1000 * u64::from(fresh) + at));
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: fresh };
        let mut step = self.cache.prepare(MicroBatch(0), &[row], None, self.stream).unwrap();
        let expected = vec![Expected { stamps: stamps.clone(), fresh: fresh as usize }];
        let on = (&*self.device, self.stream);
        assert_eq!(self.kernels.enqueue(&mut self.cache, on, (&step, 0), expected), 0);
        self.cache.finish(&mut step, self.stream).unwrap();
        self.cache.retire(step, self.stream).map(drop).map_err(|unretired| unretired.error).unwrap();
        self.check();
    }

    fn check(&self) {
        self.cache.validate().unwrap();
        assert_eq!(*self.kernels.faults.lock().unwrap(), Vec::<String>::new());
    }

    /// A sequence of 40 tokens whose two full pages are published and, if `saved`, on the host.
    fn published(&mut self, stamps: &mut Vec<u64>, saved: bool) -> Sequence {
        let ids: Vec<u32> = (0..32).collect();
        let none = self.cache.names(b"", Tokens::new(&[])).unwrap();
        let open = Open { prompt: 40, promised: 20 };
        let sequence = self.cache.open_shared(&open, &none, self.stream).unwrap().sequence;
        self.step(sequence, stamps, 0, 40);
        assert_eq!(self.cache.publish(sequence, 0, Tokens::new(&ids)).unwrap(), 32);
        if saved {
            let groups = self.cache.config().shape.groups.len() as u64;
            assert_eq!(self.cache.save(self.stream, u64::MAX).unwrap(), 2 * PAGE * groups);
        }
        sequence
    }

    fn park(&mut self, sequence: Sequence, accepted: u32) -> Result<(), Error> {
        self.cache.park(sequence, accepted, self.stream).map(drop)
    }

    /// The bytes that a call moves down and up.
    fn moved(&mut self, call: impl FnOnce(&mut Rig)) -> (u64, u64) {
        let before = self.cache.stats();
        call(self);
        self.check();
        let after = self.cache.stats();
        (after.bytes_down - before.bytes_down, after.bytes_up - before.bytes_up)
    }
}

#[test]
fn a_published_and_saved_sequence_parks_with_its_partial_page_alone() {
    let mut rig = Rig::new(None, |_| {});
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, true);
    let before = rig.cache.stats();
    assert_eq!(rig.moved(|rig| rig.park(first, 40).unwrap()), (PAGE, 0));
    let stats = rig.cache.stats();
    assert_eq!((stats.sequences, stats.parked, stats.tiers[0].parked), (1, 1, 1));
    // All its pages are free: the published ones stay findable.
    assert_eq!((before.free_pages[0], stats.free_pages[0]), (5, 9));
    assert_eq!((stats.tiers[0].published, stats.tiers[0].unused), (2, 2));
    assert_eq!(rig.cache.length(first).unwrap().committed, 40);
    // They are still there.
    assert_eq!(rig.moved(|rig| drop(rig.cache.resume(first, rig.stream).unwrap())), (0, PAGE));
    let stats = rig.cache.stats();
    assert_eq!((stats.parked, stats.tiers[0].parked, stats.free_pages[0]), (0, 0, 5));
    rig.step(first, &mut rows, 0, 1);
    // Another one takes all pages meanwhile.
    assert_eq!(rig.moved(|rig| rig.park(first, 1).unwrap()), (PAGE, 0));
    let (other, mut others) = (rig.cache.open(&Open { prompt: 128, promised: 0 }).unwrap(), Vec::new());
    rig.step(other, &mut others, 0, 128);
    rig.cache.close(other, rig.stream).unwrap();
    assert_eq!(rig.moved(|rig| drop(rig.cache.resume(first, rig.stream).unwrap())), (0, 3 * PAGE));
    rig.step(first, &mut rows, 0, 1);
    // What came back is found by others.
    let ids: Vec<u32> = (0..32).collect();
    let names = rig.cache.names(b"", Tokens::new(&ids)).unwrap();
    let found = rig.cache.find(&names);
    assert_eq!((found.tokens, found.host_tokens), (32, 0));
    rig.cache.close(first, rig.stream).unwrap();
    rig.check();
    assert_eq!((rig.cache.stats().free_pages[0], rig.cache.stats().tiers[0].free_host_pages), (9, 7));
}

/// Published pages without a copy are saved by the parking, and unnamed ones are the sequence's own.
#[test]
fn what_has_no_copy_goes_down_and_rejected_rows_do_not() {
    let mut rig = Rig::new(None, |config| config.query_rows = 9);
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, false);
    rig.step(first, &mut rows, 40, 9);
    // 8 of 9 rows fill the third page.
    rows.truncate(48);
    assert_eq!(rig.moved(|rig| rig.park(first, 8).unwrap()), (3 * PAGE, 0));
    let tiers = rig.cache.stats().tiers[0];
    assert_eq!((tiers.saved, tiers.parked), (2, 1));
    drop(rig.cache.resume(first, rig.stream).unwrap());
    rig.step(first, &mut rows, 0, 2);
    // A sequence without names, and one that is closed while it is parked.
    let (second, mut others) = (rig.cache.open(&Open { prompt: 33, promised: 0 }).unwrap(), Vec::new());
    rig.step(second, &mut others, 0, 33);
    assert_eq!(rig.moved(|rig| rig.park(second, 33).unwrap()), (3 * PAGE, 0));
    rig.cache.close(second, rig.stream).unwrap();
    rig.check();
    assert_eq!(rig.cache.stats().tiers[0].free_host_pages, 7);
}

/// What a parked sequence needs is not evicted, whatever others save.
#[test]
fn parked_pages_stay_and_a_full_host_refuses_more() {
    let mut rig = Rig::new(None, |config| config.host_pages = vec![8]);
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, true);
    rig.park(first, 40).unwrap();
    let none = rig.cache.names(b"", Tokens::new(&[])).unwrap();
    let second = rig.cache.open_shared(&Open { prompt: 126, promised: 2 }, &none, rig.stream);
    let (second, mut others) = (second.unwrap().sequence, Vec::new());
    rig.step(second, &mut others, 0, 126);
    let ids: Vec<u32> = (500..612).collect();
    assert_eq!(rig.cache.publish(second, 0, Tokens::new(&ids)).unwrap(), 112);
    // Seven pages for the five that are not kept.
    assert_eq!(rig.cache.save(rig.stream, u64::MAX).unwrap(), 7 * PAGE);
    assert_eq!(rig.cache.stats().tiers[0].free_host_pages, 0);
    rig.check();
    let before = rig.cache.stats();
    let error = rig.park(second, 126).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "host pages of a group"));
    assert_eq!(error.numbers(), [("wanted", 3), ("free", 0), ("group", 0)]);
    let error = rig.cache.resume(first, rig.stream).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "device pages of a group"));
    assert_eq!(error.numbers(), [("wanted", 4), ("free", 0), ("group", 0)]);
    assert_eq!(rig.cache.stats(), before);
    rig.cache.close(second, rig.stream).unwrap();
    drop(rig.cache.resume(first, rig.stream).unwrap());
    rig.step(first, &mut rows, 0, 1);
}

/// A group with a window parks the pages of its window.
#[test]
fn a_window_parks_what_a_query_still_reads() {
    let mut rig = Rig::new(Some(20), |_| {});
    let first = rig.published(&mut Vec::new(), false);
    // The pages before the window go with the parking.
    assert_eq!(rig.moved(|rig| rig.park(first, 40).unwrap()), (5 * PAGE, 0));
    let mut rig = Rig::new(Some(20), |config| config.bring_layers = 1);
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, false);
    // The step of another one gives the pages before the window back.
    let (other, mut others) = (rig.cache.open(&Open { prompt: 9, promised: 1 }).unwrap(), Vec::new());
    rig.step(other, &mut others, 0, 9);
    rig.cache.close(other, rig.stream).unwrap();
    let error = rig.park(first, 3).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (Kind::OutOfRange, "park"), "{error}");
    assert_eq!(error.place(), "a sliding window whose pages were given back");
    // 40 tokens are three pages of the first group. A query at 40 reads 19 rows before it, in two pages.
    assert_eq!(rig.moved(|rig| rig.park(first, 40).unwrap()), (5 * PAGE, 0));
    let (other, mut others) = (rig.cache.open(&Open { prompt: 120, promised: 0 }).unwrap(), Vec::new());
    rig.step(other, &mut others, 0, 120);
    rig.cache.close(other, rig.stream).unwrap();
    drop(rig.cache.resume(first, rig.stream).unwrap());
    assert_eq!(rig.cache.pages(first, 1).unwrap()[0], 0);
    for accepted in [0, 1, 1] {
        rig.step(first, &mut rows, accepted, 1);
    }
}

/// A window of one token reads nothing before the next query: behind a full page it parks no page, and a step takes
/// one.
#[test]
fn a_window_without_pages_takes_no_more_than_its_promise() {
    let mut rig = Rig::new(Some(1), |_| {});
    let (first, mut rows) = (rig.cache.open(&Open { prompt: 64, promised: 20 }).unwrap(), Vec::new());
    rig.step(first, &mut rows, 0, 64);
    assert_eq!(rig.moved(|rig| rig.park(first, 64).unwrap()), (4 * PAGE, 0));
    drop(rig.cache.resume(first, rig.stream).unwrap());
    assert_eq!(rig.cache.pages(first, 1).unwrap(), [0; 4]);
    rig.step(first, &mut rows, 0, 1);
    let pages = rig.cache.pages(first, 1).unwrap();
    assert_eq!((&pages[..4], pages.len()), (&[0; 4][..], 5));
}

/// A fork and its parent are parked at the same time, and each has its own rows.
#[test]
fn sequences_that_share_pages_park_one_by_one() {
    let mut rig = Rig::new(None, |config| config.device_pages[0] = 11);
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, true);
    drop(rig.cache.truncate(first, 40, rig.stream).unwrap());
    let (child, _) = rig.cache.fork(first, 8, rig.stream).unwrap();
    let mut others = rows.clone();
    rig.step(first, &mut rows, 0, 1);
    rig.cache.park(first, 1, rig.stream).map(drop).unwrap();
    rig.step(child, &mut others, 0, 2);
    rig.park(child, 2).unwrap();
    rig.check();
    assert_eq!(rig.cache.stats().free_pages[0], 10);
    for (sequence, rows) in [(first, &mut rows), (child, &mut others)] {
        drop(rig.cache.resume(sequence, rig.stream).unwrap());
        rig.step(sequence, rows, 0, 1);
    }
}

#[test]
fn a_parked_sequence_can_be_extended_and_closed_and_nothing_else() {
    let mut rig = Rig::new(None, |_| {});
    let mut rows = Vec::new();
    let first = rig.published(&mut rows, false);
    let states = [rig.cache.resume(first, rig.stream).map(drop), rig.park(first, 41)].map(Result::unwrap_err);
    assert_eq!(states.map(|error| error.kind()), [Kind::InvalidState, Kind::OutOfRange]);
    rig.park(first, 40).unwrap();
    let row = BatchRow { sequence: first, accepted: Accepted::Rows(0), query_rows: 1 };
    let refused = [
        rig.cache.prepare(MicroBatch(0), &[row], None, rig.stream).map(drop),
        rig.cache.fork(first, 1, rig.stream).map(drop),
        rig.cache.truncate(first, 20, rig.stream).map(drop),
        rig.cache.publish(first, 32, Tokens::new(&[])).map(drop),
        rig.cache.park(first, 0, rig.stream).map(drop),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert_eq!((error.kind(), error.place()), (Kind::InvalidState, "the sequence is parked"), "{error}");
        assert_eq!(error.advice(), "resume it, or close it");
    }
    // The next turn of a conversation, for which a resume takes the pages.
    rig.cache.extend(first, 100, 28).unwrap();
    assert_eq!(rig.cache.stats().free_pages[0], 9);
    drop(rig.cache.resume(first, rig.stream).unwrap());
    assert_eq!(rig.cache.stats().free_pages[0], 0);
    rig.step(first, &mut rows, 0, 60);
    // Without a host's tier there is no place to wait.
    let mut rig = Rig::new(None, |config| config.host_pages = Vec::new());
    let first = rig.published(&mut Vec::new(), false);
    let error = rig.park(first, 40).unwrap_err();
    assert_eq!((error.kind(), error.number("free")), (Kind::Exhausted, Some(0)), "{error}");
}

/// What the device could not hold even if it were empty is refused when a parked sequence is extended, not when it is
/// resumed.
#[test]
fn a_parked_sequence_is_not_extended_beyond_the_device() {
    for (window, pages) in [(None, [7, 0]), (Some(17), [9, 5])] {
        let change = |config: &mut Config| {
            config.device_pages = pages[..config.shape.groups.len()].to_vec();
            config.query_rows = 1;
        };
        let mut rig = Rig::new(window, change);
        let first = rig.published(&mut Vec::new(), false);
        rig.park(first, 40).unwrap();
        let most = (60..=128).take_while(|tokens| rig.cache.extend(first, 40, tokens - 40).is_ok()).last();
        let error = rig.cache.extend(first, 40, 88);
        if let Some(tokens) = most.filter(|tokens| *tokens < 128) {
            let error = error.unwrap_err();
            let free = error.number("free").unwrap();
            assert_eq!(error.kind(), Kind::Exhausted);
            assert!(error.number("wanted").unwrap() > free, "{error}");
            assert!(window.is_some() || (free, tokens) == (6, 94), "{free} {tokens}");
        } else {
            assert!(window.is_some());
        }
        drop(rig.cache.resume(first, rig.stream).unwrap());
    }
}

/// A cache of two layers on a clock whose streams can be held, over a device that refuses what a test says.
struct Clocked {
    clock: Arc<ClockDevice>,
    faulty: Arc<Faulty>,
    cache: Cache,
    streams: [Stream; 3],
}

impl Clocked {
    fn new(device_pages: u32) -> Clocked {
        let test = TestDevice::host(HostOptions::default());
        let clock = ClockDevice::over(test.device(), ClockOptions::default()).unwrap();
        let faulty = Faulty::new(clock.clone(), false);
        let group = Group { layers: vec![0, 1], runs: [16, 0], window: None };
        let mut config = Config::new(Shape { page_tokens: 16, groups: vec![group] }, 4, 64);
        config.memory = Memory { huge: false, populate: false, lock: false, node: None };
        (config.device_pages, config.host_pages, config.bring_layers) = (vec![device_pages], vec![9], 1);
        let cache = Cache::new(config, faulty.clone()).unwrap();
        let streams = [(); 3].map(|()| clock.stream().unwrap());
        Clocked { clock, faulty, cache, streams }
    }

    /// Begins and finishes a step of one row on the first stream.
    fn begin(&mut self, sequence: Sequence, accepted: u32, query_rows: u32) -> Step {
        let [main, ..] = self.streams;
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows };
        let mut step = self.cache.prepare(MicroBatch(0), &[row], None, main).unwrap();
        (0..2).for_each(|layer| self.cache.arrived(&step, layer, main).unwrap());
        self.cache.finish(&mut step, main).unwrap();
        step
    }

    /// Retires a step of the first stream.
    fn retire(&mut self, step: Step) {
        assert!(self.reaches(self.streams[0]));
        let retired = self.cache.retire(step, self.streams[0]);
        retired.map(drop).map_err(|unretired| unretired.error).unwrap();
    }

    /// A sequence that takes two pages, with 20 rows.
    fn open(&mut self) -> Sequence {
        let sequence = self.cache.open(&Open { prompt: 20, promised: 4 }).unwrap();
        let step = self.begin(sequence, 0, 20);
        self.retire(step);
        sequence
    }

    /// Whether a stream's work can run to its end now.
    fn reaches(&self, stream: Stream) -> bool {
        let event = self.clock.event().unwrap();
        self.clock.record(event, stream).unwrap();
        match self.clock.synchronize(event) {
            Ok(()) => true,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Busy);
                false
            }
        }
    }
}

/// The device refuses the copies of a parking; a call on another stream enqueues them, behind what the engine had
/// enqueued for the sequence, and a second try of the parking has nothing left to do.
#[test]
fn refused_copies_wait_for_the_stream_of_the_parking() {
    let mut rig = Clocked::new(9);
    let [main, parking, other] = rig.streams;
    let sequence = rig.open();
    // The engine's work for the sequence has not ended.
    rig.clock.hold(parking).unwrap();
    rig.faulty.aim(Some(5));
    assert_eq!(rig.cache.park(sequence, 20, parking).unwrap_err().kind(), Kind::OutOfMemory);
    let refused = rig.faulty.aim(None);
    let stats = rig.cache.stats();
    assert_eq!((refused, stats.parked, stats.bytes_down), (Some("enqueue_pages"), 1, 0));
    rig.clock.hold(other).unwrap();
    assert_eq!(rig.cache.save(other, 0).unwrap(), 0);
    assert_eq!(rig.cache.stats().bytes_down, 2 * 512);
    assert!(!rig.reaches(other));
    let ticket = rig.cache.park(sequence, 20, main).unwrap();
    assert!(!rig.reaches(main));
    assert_eq!((ticket.poll(), rig.cache.stats().bytes_down), (None, 2 * 512));
    let error = rig.cache.park(sequence, 20, other).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::InvalidState, "the sequence is parked"));
    rig.clock.let_go(parking).unwrap();
    assert!(!rig.reaches(main));
    rig.clock.let_go(other).unwrap();
    assert!(rig.reaches(main));
    assert_eq!(ticket.poll(), Some(Outcome::Done));
}

/// The copies of a refused parking are enqueued by a call on another stream whose last record is refused too. The
/// ticket of the second try still ends after them.
#[test]
fn a_ticket_comes_after_copies_that_no_event_is_recorded_behind() {
    let mut rig = Clocked::new(9);
    let [main, parking, other] = rig.streams;
    let sequence = rig.open();
    rig.faulty.aim(Some(5));
    rig.cache.park(sequence, 20, parking).unwrap_err();
    assert_eq!(rig.faulty.aim(None), Some("enqueue_pages"));
    rig.clock.hold(other).unwrap();
    rig.faulty.aim(Some(4));
    rig.cache.save(other, 0).unwrap_err();
    assert_eq!((rig.faulty.aim(None), rig.cache.stats().bytes_down), (Some("record"), 2 * 512));
    let ticket = rig.cache.park(sequence, 20, main).unwrap();
    assert!(!rig.reaches(main) && ticket.poll().is_none());
    rig.clock.let_go(other).unwrap();
    assert!(rig.reaches(main));
    assert_eq!(ticket.poll(), Some(Outcome::Done));
}

/// Whatever call of the device is refused, the parking goes on in a second try, on another stream.
#[test]
fn a_parking_that_was_refused_goes_on() {
    for (passing, again) in (0..).flat_map(|passing| [(passing, 1), (passing, 2)]) {
        let mut rig = Clocked::new(9);
        let sequence = rig.open();
        rig.faulty.aim(Some(passing));
        let first = rig.cache.park(sequence, 20, rig.streams[1]).map(drop);
        if rig.faulty.aim(None).is_none() {
            assert!(passing > 5 && first.is_ok());
            return;
        }
        assert_eq!(first.unwrap_err().kind(), Kind::OutOfMemory);
        let ticket = rig.cache.park(sequence, 20, rig.streams[again]).unwrap();
        rig.clock.run().unwrap();
        let stats = rig.cache.stats();
        assert_eq!((ticket.poll(), stats.parked, stats.free_pages[0]), (Some(Outcome::Done), 1, 8));
        assert_eq!(stats.bytes_down, 2 * 512, "{passing}");
        rig.cache.validate().unwrap();
        drop(rig.cache.resume(sequence, rig.streams[2]).unwrap());
        let step = rig.begin(sequence, 0, 1);
        rig.retire(step);
    }
}

/// Only who takes a page of the parked sequence waits for its copies.
#[test]
fn steps_of_others_do_not_wait_for_a_parking() {
    let mut rig = Clocked::new(7);
    let [main, copies, others] = rig.streams;
    let [first, second, third] = [(); 3].map(|()| rig.open());
    drop(rig.cache.park(first, 20, copies).unwrap());
    rig.clock.run().unwrap();
    drop(rig.cache.resume(first, copies).unwrap());
    rig.clock.run().unwrap();
    rig.clock.hold(others).unwrap();
    drop(rig.cache.park(second, 20, others).unwrap());
    for (sequence, accepted) in [(third, 20), (first, 0)] {
        let step = rig.begin(sequence, accepted, 1);
        rig.retire(step);
    }
    let taker = rig.cache.open(&Open { prompt: 20, promised: 4 }).unwrap();
    let step = rig.begin(taker, 0, 20);
    assert!(!rig.reaches(main));
    rig.clock.let_go(others).unwrap();
    rig.retire(step);
}

/// A resume is refused on one stream, again on another, and the sequence is closed. Its pages are not free before the
/// copies of the first try have ended.
#[test]
fn pages_of_a_resume_that_was_refused_twice_are_not_free_while_copies_run() {
    // The calls of the first try up to its first copy pass, and then the second one is refused.
    let first_copy = (0..)
        .find(|passing| {
            let mut rig = Clocked::new(5);
            let sequence = rig.open();
            drop(rig.cache.park(sequence, 20, rig.streams[1]).unwrap());
            rig.clock.run().unwrap();
            rig.faulty.aim(Some(*passing));
            drop(rig.cache.resume(sequence, rig.streams[1]));
            rig.faulty.aim(None) == Some("enqueue_pages")
        })
        .unwrap();
    for second in 0.. {
        let mut rig = Clocked::new(5);
        let [main, copies, others] = rig.streams;
        let sequence = rig.open();
        drop(rig.cache.park(sequence, 20, copies).unwrap());
        rig.clock.run().unwrap();
        rig.clock.hold(copies).unwrap();
        rig.faulty.aim(Some(first_copy + 1));
        rig.cache.resume(sequence, copies).unwrap_err();
        rig.faulty.aim(Some(second));
        let resumed = rig.cache.resume(sequence, others).map(drop);
        if rig.faulty.aim(None).is_none() {
            assert!(second > 5 && resumed.is_ok());
            return;
        }
        rig.cache.close(sequence, main).unwrap();
        assert_eq!(rig.cache.reap(main).unwrap(), 1, "refused at {second}");
        assert_eq!(rig.cache.stats().free_pages[0], 2, "refused at {second}");
        rig.clock.let_go(copies).unwrap();
        rig.clock.run().unwrap();
        assert_eq!((rig.cache.reap(main).unwrap(), rig.cache.stats().free_pages[0]), (0, 4));
        rig.cache.validate().unwrap();
    }
}
