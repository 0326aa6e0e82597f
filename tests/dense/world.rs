//! A world of random operations on a dense cache, with a model beside it.
//!
//! The model is a list of stamps for each sequence. After each operation the cache's invariants, lengths and gauges are
//! checked; the kernels (`engine`) check every tensor and every row that attention reads.

use std::sync::Arc;

use super::configs::{Random, config};
pub use super::devices::{Devices, On};
use super::engine::{Expected, Kernels, Launch};
use crate::device::TestDevice;
use forebay::dense::{Cache, Found, Open};
use forebay::device::clock::ClockDevice;
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream};
use forebay::{Accepted, BatchRow, Kind, MicroBatch, Sequence, Step, Tokens};

/// A sequence of the model.
struct Seq {
    handle: Sequence,
    /// The token ids of its rows, those of the last step included, and the rows' stamps. A row depends on all tokens up
    /// to its own, so equal prefixes have equal rows.
    ids: Vec<u32>,
    stamps: Vec<u64>,
    /// The token ids of its prompt, and whether it has names.
    script: Vec<u32>,
    named: bool,
    /// Its length when the last step began.
    begun: usize,
    /// What the cache has to say of it.
    committed: u32,
    landed: u32,
    upper: u32,
    /// Rows enqueued over its whole life.
    enqueued: u32,
    tokens: u32,
    prompt: u32,
    /// The number of its last step.
    last: u64,
    micro: Option<u32>,
    in_flight: usize,
    /// Before this position a window may have given pages back.
    floor: usize,
    failed: bool,
    parked: bool,
    closed: bool,
}

/// A row of a step that is about to be prepared.
struct Row {
    at: usize,
    /// The token ids of the sequence, those of the new rows included.
    ids: Vec<u32>,
    /// Its length without them.
    length: usize,
    query_rows: u32,
    accepted: u32,
    by_device: bool,
    upper: u32,
}

impl Row {
    fn batch_row(&self, sequence: Sequence) -> BatchRow {
        let accepted = if self.by_device { Accepted::OnDevice } else { Accepted::Rows(self.accepted) };
        BatchRow { sequence, accepted, query_rows: self.query_rows }
    }
}

/// See [`Flight::rows`].
type Place = (usize, u32, u32, u32);

/// A step between prepare and retire.
struct Flight {
    step: Step,
    micro: u32,
    /// For each row the sequence's number, its length at the begin, its query rows, and the rows enqueued before.
    rows: Vec<Place>,
    number: u64,
    abandoned: bool,
}

pub struct World {
    device: Arc<dyn Device>,
    clock: Option<Arc<ClockDevice>>,
    test: Arc<TestDevice>,
    pub cache: Cache,
    kernels: Kernels,
    streams: Vec<Stream>,
    accepted: Vec<Slice>,
    random: Random,
    seqs: Vec<Seq>,
    flights: Vec<Flight>,
    /// The last token id that no script has.
    fresh: u32,
    /// How often each operation did something.
    pub done: [u32; DONE],
}

pub const DONE: usize = 14;

/// The stamp of a row behind one with stamp `before`.
fn chain(before: u64, id: u32) -> u64 {
    (before ^ u64::from(id)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) + 1
}

/// The stamps of a sequence's rows.
pub fn stamps(ids: &[u32]) -> Vec<u64> {
    let chained = ids.iter().scan(7, |stamp, id| {
        *stamp = chain(*stamp, *id);
        Some(*stamp)
    });
    chained.collect()
}

impl World {
    pub fn new(seed: u64, on: On) -> World {
        World::over(seed, on.devices(), None)
    }

    /// A world on the last of these devices, which may be over the others.
    pub fn over(seed: u64, (test, clock, device): Devices, launch: Option<Arc<dyn Launch>>) -> World {
        let config = config(seed);
        let streams = (0..=config.micro_batches).map(|_| device.stream().unwrap()).collect();
        let accepted =
            (0..config.micro_batches).map(|_| device.allocate(4 * u64::from(config.batch)).unwrap());
        let accepted = accepted.collect();
        let cache = Cache::new(config, Arc::clone(&device)).unwrap();
        let mut kernels = Kernels::new(&test, &cache);
        kernels.launch = launch;
        let (random, seqs, flights) = (Random::new(seed ^ 0xD15C), Vec::new(), Vec::new());
        World {
            device,
            clock,
            test,
            cache,
            kernels,
            streams,
            accepted,
            random,
            seqs,
            flights,
            fresh: 1 << 20,
            done: [0; DONE],
        }
    }

    /// Runs `count` operations, and then ends everything.
    pub fn run(&mut self, count: u32) {
        (0..count).for_each(|_| self.operate());
        self.end();
    }

    /// The operations that these bytes say, and then the end.
    pub fn run_bytes(&mut self, bytes: &[u8]) {
        self.random.take_from(bytes);
        while self.random.has_bytes() {
            self.operate();
        }
        self.end();
    }

    fn operate(&mut self) {
        let (op, which) = (self.random.below(36), self.random.below(1 << 16));
        match op {
            0 => self.open(),
            1..=3 | 34 | 35 => self.open_shared(which),
            24..=26 => self.publish(which),
            27 => self.save(which),
            4..=11 => self.step(),
            12..=17 => self.retire(which),
            18 | 19 => self.truncate(which),
            20 => self.fork(which),
            21 => self.extend(which),
            22 | 28 | 29 => self.close(which),
            30 | 31 => self.park(which),
            32 | 33 => self.resume(which),
            _ => self.reap(),
        }
        self.check();
    }

    /// On a clock, everything that was enqueued runs to its end.
    fn settle(&self) {
        let Some(clock) = &self.clock else { return };
        clock.run().unwrap();
        self.kernels.launch.iter().for_each(|launch| launch.ended(&self.streams));
    }

    fn side(&self) -> Stream {
        *self.streams.last().unwrap()
    }

    fn check(&self) {
        self.cache.validate().unwrap();
        for seq in self.seqs.iter().filter(|seq| !seq.closed) {
            let length = self.cache.length(seq.handle).unwrap();
            assert_eq!((length.committed, length.landed), (seq.committed, seq.landed));
        }
        let stats = self.cache.stats();
        assert_eq!(stats.steps_in_flight as usize, self.flights.len());
        let parked = self.seqs.iter().filter(|seq| seq.parked && !seq.closed).count();
        assert!((parked..=stats.sequences as usize).contains(&(stats.parked as usize)));
        let faults = self.kernels.faults.lock().unwrap();
        assert!(faults.is_empty(), "{faults:?} {:?}", self.cache.config());
    }

    fn open(&mut self) {
        let most = self.cache.config().max_tokens;
        let prompt = self.random.below(most);
        let promised = 1 + self.random.below(most - prompt);
        let before = self.cache.stats();
        let handle = match self.cache.open(&Open { prompt, promised }) {
            Ok(handle) => handle,
            Err(error) => {
                assert_eq!(error.kind(), Kind::Exhausted);
                assert!(
                    before.free_sequences == 0 || error.number("wanted") > error.number("free"),
                    "{error}"
                );
                assert_eq!(self.cache.stats(), before);
                return;
            }
        };
        self.done[0] += 1;
        let script = (0..prompt).map(|_| self.next_id()).collect();
        self.enter(handle, script, 0, promised, false);
    }

    /// A token id that no other row has.
    fn next_id(&mut self) -> u32 {
        self.fresh += 1;
        self.fresh
    }

    /// Adds a sequence that has the first `found` rows of its prompt.
    fn enter(&mut self, handle: Sequence, script: Vec<u32>, found: u32, promised: u32, named: bool) {
        let ids = script[..found as usize].to_vec();
        self.seqs.push(Seq {
            handle,
            stamps: stamps(&ids),
            ids,
            begun: found as usize,
            committed: found,
            landed: 0,
            upper: found,
            enqueued: 0,
            tokens: script.len() as u32 + promised,
            prompt: script.len() as u32,
            script,
            named,
            last: 0,
            micro: None,
            in_flight: 0,
            floor: found as usize,
            failed: false,
            parked: false,
            closed: false,
        });
    }

    /// Opens a sequence with a prompt that begins like others.
    fn open_shared(&mut self, which: u32) {
        let most = self.cache.config().max_tokens;
        let prompt = self.random.below(most);
        let promised = 1 + self.random.below(most - prompt);
        // One of few beginnings, then one of few continuations.
        let (script, turn, branch) = (which % 2, which / 2 % 3 * 40, which / 6 % 2);
        let id = |at| if at < turn { script } else { 10 + 10 * script + branch };
        let mut ids: Vec<u32> = (0..prompt).map(id).collect();
        let known = if self.random.one_in(3) { self.random.below(prompt + 1) } else { prompt } as usize;
        // No other sequence has the rest.
        for id in &mut ids[known..] {
            *id = self.next_id();
        }
        let side = self.side();
        let names = self.cache.names(b"salt", Tokens::new(&ids[..known])).unwrap();
        let found = self.cache.find(&names);
        let other = self.cache.names(b"pepper", Tokens::new(&ids[..known])).unwrap();
        assert_eq!(self.cache.find(&other), Found::default(), "another tenant's pages");
        let before = self.cache.stats();
        match self.cache.open_shared(&Open { prompt, promised }, &names, side) {
            Ok(opened) => {
                assert_eq!(opened.found, found);
                assert!(found.host_tokens <= found.tokens && found.tokens as usize <= known);
                self.done[8] += u32::from(found.tokens > 0);
                self.done[9] += u32::from(found.host_tokens > 0);
                self.enter(opened.sequence, ids, found.tokens, promised, true);
            }
            Err(error) => {
                assert_eq!(error.kind(), Kind::Exhausted, "{error}");
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn publish(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let seq = &self.seqs[at];
        let published = self.cache.length(seq.handle).unwrap().published;
        // All rows of a prompt's chunk are accepted, so they are stored when it is retired.
        let stored = (seq.committed as usize).max(seq.floor).min(seq.ids.len());
        let known = &seq.ids[published as usize..stored.max(published as usize)];
        match self.cache.publish(seq.handle, published, Tokens::new(known)) {
            Ok(now) => {
                assert!(seq.named && !seq.failed && !seq.parked);
                assert!(now >= published && now as usize <= stored);
                self.done[10] += u32::from(now > published);
            }
            // Its copies may be in flight.
            Err(error) if error.kind() == Kind::Busy => {}
            Err(error) => {
                let allowed = !seq.named || seq.failed || seq.parked;
                assert!(error.kind() == Kind::InvalidState && allowed, "{error}")
            }
        }
    }

    fn save(&mut self, which: u32) {
        let bytes = u64::from(which);
        let saved = self.cache.save(self.streams[which as usize % self.streams.len()], bytes).unwrap();
        assert!(saved <= bytes);
        self.done[11] += u32::from(saved > 0);
    }

    /// The open sequences that may be in a step.
    fn running(&self) -> Vec<usize> {
        let runs = |seq: &Seq| !seq.closed && !seq.failed && !seq.parked;
        (0..self.seqs.len()).filter(|at| runs(&self.seqs[*at])).collect()
    }

    fn pick(&self, which: u32) -> Option<usize> {
        let open: Vec<usize> = (0..self.seqs.len()).filter(|at| !self.seqs[*at].closed).collect();
        open.get(which as usize % open.len().max(1)).copied()
    }

    /// One more row of a batch, if the sequence can be in a step of `micro` with at most `left` query rows.
    fn batch_row(&mut self, at: usize, micro: u32, left: u32, on_device: bool) -> Option<Row> {
        let config = self.cache.config().clone();
        let seq = &self.seqs[at];
        let busy = seq.in_flight >= config.steps_in_flight as usize;
        if busy || seq.micro.is_some_and(|own| own != micro) || self.random.one_in(4) {
            return None;
        }
        let chunk = seq.landed > config.query_rows;
        let accepted = if chunk { seq.landed } else { self.random.below(seq.landed + 1) };
        let (length, by_device) = (seq.begun + accepted as usize, on_device && !chunk);
        // Rows in flight may turn out to be accepted.
        let reach = config.query_rows * config.steps_in_flight + seq.tokens;
        let upper = self.upper(at, accepted, by_device);
        let most = match seq.prompt.saturating_sub(length as u32) {
            0 => config.query_rows,
            prompt => prompt,
        };
        let (over, script) = (length as u32 >= seq.tokens, seq.script.clone());
        let query_rows = (1 + self.random.below(most)).min(left).min(reach.saturating_sub(upper));
        if query_rows == 0 || (over && !self.random.one_in(3)) {
            return None;
        }
        let mut ids = self.seqs[at].ids[..length].to_vec();
        for position in length..length + query_rows as usize {
            ids.push(script.get(position).copied().unwrap_or_else(|| self.next_id()));
        }
        Some(Row { at, ids, length, query_rows, accepted, by_device, upper: upper + query_rows })
    }

    /// Prepares, enqueues and finishes a step.
    fn step(&mut self) {
        let config = self.cache.config();
        let (micro_batches, batch, most) =
            (config.micro_batches, config.batch as usize, config.steps_in_flight);
        let mut left = config.step_tokens;
        let micro = self.random.below(micro_batches);
        let on_device = self.random.one_in(2);
        let mut chosen = Vec::new();
        for at in self.running() {
            let row = self.batch_row(at, micro, left, on_device).filter(|_| chosen.len() < batch);
            left -= row.as_ref().map_or(0, |row| row.query_rows);
            chosen.extend(row);
        }
        if chosen.is_empty() || self.flights.len() as u32 >= most * micro_batches {
            return;
        }
        let (stream, tensor) = (self.streams[micro as usize], self.accepted[micro as usize]);
        let counts = chosen.iter().map(|row| row.accepted).chain(std::iter::repeat(u32::MAX)).take(batch);
        let words: Vec<u8> = counts.flat_map(u32::to_le_bytes).collect();
        let test = Arc::clone(&self.test);
        self.device.call(stream, Arc::new(move || test.write(tensor, &words).unwrap())).unwrap();
        let rows: Vec<BatchRow> = chosen.iter().map(|row| row.batch_row(self.seqs[row.at].handle)).collect();
        let accepted = on_device.then_some(tensor);
        let mut step = match self.cache.prepare(MicroBatch(micro), &rows, accepted, stream) {
            Ok(step) => step,
            Err(error) => {
                let drains = self.seqs.iter().any(|seq| seq.failed && seq.in_flight > 0);
                assert!(drains && error.kind() == Kind::Busy, "{error}");
                return;
            }
        };
        self.done[1] += 1;
        let (mut expected, mut flight) = (Vec::new(), Vec::new());
        for row in chosen {
            let seq = &mut self.seqs[row.at];
            flight.push((row.at, row.length as u32, row.query_rows, seq.enqueued));
            (seq.stamps, seq.ids, seq.begun, seq.micro) =
                (stamps(&row.ids), row.ids, row.length, Some(micro));
            if seq.in_flight == 0 {
                seq.floor = seq.floor.max(row.length);
            }
            (seq.landed, seq.upper, seq.enqueued) =
                (row.query_rows, row.upper, seq.enqueued + row.query_rows);
            (seq.in_flight, seq.last) = (seq.in_flight + 1, step.number());
            expected.push(Expected { stamps: seq.stamps.clone(), fresh: row.query_rows as usize });
        }
        let abandoned = self.random.one_in(24);
        if abandoned {
            // Its kernels are never enqueued.
            self.cache.abandon(&mut step).unwrap();
            flight.iter().for_each(|(at, ..)| self.seqs[*at].failed = true);
            self.done[7] += 1;
        } else {
            let on = (&*self.device, stream);
            self.kernels.sequences = rows.iter().map(|row| row.sequence).collect();
            assert_eq!(self.kernels.enqueue(&mut self.cache, on, (&step, micro), expected), 0);
        }
        self.cache.finish(&mut step, stream).unwrap();
        let number = step.number();
        self.flights.push(Flight { step, micro, rows: flight, number, abandoned });
    }

    /// The most tokens that a sequence may have when its next step begins: rows whose count only the device has may all
    /// be accepted, until a retired step says otherwise.
    fn upper(&self, at: usize, accepted: u32, by_device: bool) -> u32 {
        let seq = &self.seqs[at];
        if by_device { seq.upper } else { seq.upper - (seq.landed - accepted) }
    }

    fn retire(&mut self, which: u32) {
        if self.flights.is_empty() {
            return;
        }
        let at = which as usize % self.flights.len();
        let earlier = |row: &Place| {
            self.flights[..at].iter().any(|flight| flight.rows.iter().any(|(seq, ..)| *seq == row.0))
        };
        let waits = self.flights[at].rows.iter().any(earlier);
        let Flight { step, micro, rows, number, abandoned } = self.flights.remove(at);
        let stream = self.streams[micro as usize];
        match self.cache.retire(step, stream) {
            Ok(retired) => {
                let lengths: Vec<u32> = rows.iter().map(|(_, length, ..)| *length).collect();
                assert!(!abandoned && !waits && retired.lengths() == lengths);
            }
            Err(unretired) => match unretired.step {
                Some(step) => {
                    assert_eq!(unretired.error.kind(), Kind::Busy);
                    self.flights.insert(at, Flight { step, micro, rows, number, abandoned });
                    match self.clock {
                        Some(_) if self.kernels.settles(which) => self.settle(),
                        Some(_) => {}
                        None => std::thread::sleep(std::time::Duration::from_micros(50)),
                    }
                    return;
                }
                None => {
                    assert!(abandoned && unretired.error.kind() == Kind::Cancelled, "{}", unretired.error)
                }
            },
        }
        self.done[2] += 1;
        let config_rows = self.cache.config().query_rows;
        for (seq, length, query_rows, before) in rows {
            let seq = &mut self.seqs[seq];
            seq.upper = seq.upper.min(length + seq.enqueued - before);
            seq.in_flight -= 1;
            // All rows of a prompt's chunk are accepted.
            let chunk = if query_rows > config_rows && !abandoned { query_rows } else { 0 };
            seq.floor = seq.floor.max((length + chunk) as usize);
            if seq.last == number {
                seq.committed = length;
            }
        }
    }

    fn truncate(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let (side, seq) = (self.side(), &self.seqs[at]);
        let landed = if seq.failed { 0 } else { seq.landed };
        let length = self.random.below(seq.committed + landed + 1);
        let length = if self.random.one_in(3) { length } else { (seq.committed + landed).max(length) };
        let before = self.cache.stats();
        match self.cache.truncate(seq.handle, length, side) {
            Ok(_) => {
                assert_eq!(seq.in_flight, 0);
                let seq = &mut self.seqs[at];
                seq.stamps.truncate(length as usize);
                seq.ids.truncate(length as usize);
                (seq.begun, seq.committed, seq.landed, seq.upper) = (length as usize, length, 0, length);
                (seq.floor, seq.failed) = (length as usize, false);
                self.done[3] += 1;
            }
            Err(error) => {
                let windows = self.cache.config().shape.groups.iter().any(|group| group.window.is_some());
                match error.kind() {
                    // A copy of a fork or of a truncation may be in flight too.
                    Kind::Busy => {}
                    Kind::OutOfRange => {
                        assert!(windows && (length as usize) < self.seqs[at].floor.max(1), "{error}")
                    }
                    Kind::InvalidState => assert!(self.seqs[at].parked, "{error}"),
                    kind => assert_eq!(kind, Kind::Exhausted, "{error}"),
                }
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn fork(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let (side, seq) = (self.side(), &self.seqs[at]);
        let most = self.cache.config().max_tokens;
        let promised = self.random.below(most + 1 - seq.committed.min(most));
        let before = self.cache.stats();
        match self.cache.fork(seq.handle, promised, side) {
            Ok((handle, _)) => {
                assert!(seq.in_flight == 0 && seq.landed == 0 && !seq.failed && !seq.parked);
                self.done[4] += 1;
                let child = Seq {
                    handle,
                    stamps: seq.stamps.clone(),
                    ids: seq.ids.clone(),
                    script: seq.ids.clone(),
                    named: seq.named,
                    begun: seq.stamps.len(),
                    committed: seq.committed,
                    landed: 0,
                    upper: seq.committed,
                    enqueued: 0,
                    tokens: seq.committed + promised,
                    prompt: seq.committed,
                    last: 0,
                    micro: None,
                    in_flight: 0,
                    floor: seq.floor,
                    failed: false,
                    parked: false,
                    closed: false,
                };
                self.seqs.push(child);
            }
            Err(error) => {
                match error.kind() {
                    Kind::Busy | Kind::Exhausted => {}
                    Kind::InvalidState => assert!(seq.landed > 0 || seq.failed || seq.parked, "{error}"),
                    kind => assert_eq!((kind, seq.committed + promised), (Kind::OutOfRange, 0), "{error}"),
                }
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn extend(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let seq = &self.seqs[at];
        let prompt = self.random.below(self.cache.config().max_tokens + 2);
        let promised = self.random.below(20);
        let before = self.cache.stats();
        match self.cache.extend(seq.handle, prompt, promised) {
            Ok(()) => {
                assert!(prompt >= seq.prompt && prompt + promised >= seq.tokens && !seq.failed);
                let seq = &mut self.seqs[at];
                (seq.prompt, seq.tokens) = (prompt, prompt + promised);
                self.done[5] += 1;
            }
            Err(error) => {
                match error.kind() {
                    Kind::OutOfRange => {
                        let most = self.cache.config().max_tokens;
                        let grows = prompt >= seq.prompt && prompt + promised >= seq.tokens;
                        assert!(!grows || prompt + promised > most, "{error}");
                    }
                    Kind::InvalidState => assert!(seq.failed),
                    kind => assert_eq!(kind, Kind::Exhausted, "{error}"),
                }
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn park(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let (side, seq) = (self.side(), &self.seqs[at]);
        let accepted = if seq.landed > self.cache.config().query_rows && !self.random.one_in(4) {
            seq.landed
        } else {
            self.random.below(seq.landed + 1)
        };
        let before = self.cache.stats();
        match self.cache.park(seq.handle, accepted, side) {
            Ok(_) => {
                assert!(seq.in_flight == 0 && !seq.failed && !seq.parked);
                assert!(self.cache.pages(seq.handle, 0).unwrap().is_empty());
                let seq = &mut self.seqs[at];
                let length = seq.begun + accepted as usize;
                seq.stamps.truncate(length);
                seq.ids.truncate(length);
                (seq.begun, seq.committed, seq.landed, seq.upper) = (length, length as u32, 0, length as u32);
                (seq.floor, seq.parked, seq.micro) = (length, true, None);
                self.done[12] += 1;
            }
            Err(error) => {
                let windows = self.cache.config().shape.groups.iter().any(|group| group.window.is_some());
                match error.kind() {
                    Kind::Busy => {}
                    Kind::InvalidState => assert!(seq.failed || seq.parked, "{error}"),
                    // Rows of a prompt's chunk are all accepted.
                    Kind::OutOfRange => {
                        assert!(windows && seq.landed > self.cache.config().query_rows, "{error}")
                    }
                    kind => {
                        assert_eq!(kind, Kind::Exhausted, "{error}");
                        assert!(error.number("wanted") > error.number("free"), "{error}");
                    }
                }
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn resume(&mut self, which: u32) {
        let parked: Vec<usize> = (0..self.seqs.len()).filter(|at| self.seqs[*at].parked).collect();
        let parked: Vec<usize> = parked.into_iter().filter(|at| !self.seqs[*at].closed).collect();
        let Some(&at) = parked.get(which as usize % parked.len().max(1)) else { return };
        let before = self.cache.stats();
        match self.cache.resume(self.seqs[at].handle, self.side()) {
            Ok(_) => {
                self.seqs[at].parked = false;
                self.done[13] += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), Kind::Exhausted, "{error}");
                assert!(error.number("wanted") > error.number("free"), "{error}");
                assert_eq!(self.cache.stats(), before);
            }
        }
    }

    fn close(&mut self, which: u32) {
        let Some(at) = self.pick(which) else { return };
        let side = self.side();
        self.cache.close(self.seqs[at].handle, side).unwrap();
        self.seqs[at].closed = true;
        let handle = self.seqs[at].handle;
        assert_eq!(self.cache.length(handle).unwrap_err().kind(), Kind::Closed);
        self.done[6] += 1;
    }

    fn reap(&mut self) {
        let side = self.side();
        self.cache.reap(side).unwrap();
    }

    /// Retires every step and closes every sequence: every page has to come back.
    fn end(&mut self) {
        let fresh =
            Cache::new(self.cache.config().clone(), TestDevice::host(HostOptions::default()).device());
        let unused = fresh.unwrap().stats();
        while !self.flights.is_empty() {
            self.settle();
            self.retire(0);
            std::thread::yield_now();
        }
        self.check();
        for at in 0..self.seqs.len() {
            if !self.seqs[at].closed {
                let side = self.side();
                self.cache.close(self.seqs[at].handle, side).unwrap();
            }
        }
        let side = self.side();
        while self.cache.reap(side).unwrap() > 0 {
            self.settle();
            std::thread::yield_now();
        }
        self.cache.validate().unwrap();
        let stats = self.cache.stats();
        assert_eq!((stats.sequences, stats.free_pages), (0, unused.free_pages));
    }
}
