//! A cache on the CUDA device when the driver refuses a call or has no memory: the caller gets an error, nothing leaks,
//! and the cache goes on or is closed.
//!
//! The test refuses each call of a whole life in a run of its own: construction, opening, joining, capturing, launched
//! steps, resizes, a fork, a truncation, closing. The caller tries again, as an engine would, and truncates sequences
//! whose step was abandoned.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "support/skip.rs"]
mod skip;

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Event, Outcome, SplitIndices, Stream, Ticket};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Capture, Captured, Config, Error, Kind, Layer,
    Layers, Memory, MicroBatch, Open, Result, Sequence, Shape, Slots, Stats, Step, WarmUp,
};
use forebay_standin::{Options, Resources, Standin};

const K: u32 = 8;
const BATCH: u32 = 2;
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

fn config() -> Config {
    let shape = Shape { layers: 2, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let slots = Slots::Uniform(64 * 3);
    Config { memory, batch: BATCH, slots, min_budget: 6, ..Config::new(shape, 3, 80, 64) }
}

/// The driver that refuses, and the device on it.
struct Rig {
    standin: Standin,
    device: Arc<CudaDevice>,
}

fn standin(options: Options) -> Option<Standin> {
    if !skip::own_driver("fails a call, or has little memory") {
        return None;
    }
    let standin = Standin::new(options);
    if standin.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    standin
}

fn device(standin: &Standin) -> Result<Arc<CudaDevice>> {
    let library = Some(standin.library().to_owned());
    CudaDevice::new(CudaOptions {
        library,
        unload: true,
        threads: 32,
        gather_blocks: 2,
        ..CudaOptions::default()
    })
}

/// An engine that enqueues nothing: the selection is already in its buffer.
struct Idle;

impl Engine for Idle {
    fn enqueue(&mut self, _: &EngineCall, _: Stream) -> Result<()> {
        Ok(())
    }
}

/// A cache, its buffers, and every ticket that it returned.
struct Life {
    device: Arc<CudaDevice>,
    cache: Cache,
    layers: Layers,
    ended: Event,
    tickets: Vec<Ticket>,
    /// Calls that were refused and made again.
    again: u32,
    truncated: u32,
}

impl Life {
    fn new(device: Arc<CudaDevice>) -> Result<Life> {
        let stream = || device.stream();
        let streams =
            OverlapStreams { compute: stream()?, resolve: stream()?, gather: stream()?, scatter: stream()? };
        let words = |count: u32| device.allocate(4 * u64::from(count));
        let split_indices =
            Some(SplitIndices { lists: words(2 * BATCH * K)?, counts: words(2 * BATCH)?, batch: BATCH });
        let buffers = Buffers { selection: words(BATCH * K)?, slots: words(BATCH * K)?, split_indices };
        let layers = Layers { streams, batch: BATCH, half: 1, buffers };
        let selection: Vec<u8> = (0..BATCH * K).flat_map(|entry| (entry % K * 3).to_le_bytes()).collect();
        device.write(buffers.selection, &selection)?;
        let ended = device.event()?;
        let cache = Cache::new(config(), device.clone())?;
        Ok(Life { device, cache, layers, ended, tickets: Vec::new(), again: 0, truncated: 0 })
    }

    /// Tries a refused call once more.
    fn twice<T>(&mut self, mut what: impl FnMut(&mut Life) -> Result<T>) -> Result<T> {
        what(self).or_else(|error| {
            let refused = [Kind::OutOfMemory, Kind::DeviceFailed];
            assert!(refused.contains(&error.kind()), "{error}");
            self.again += 1;
            what(self)
        })
    }

    fn open(&mut self) -> Result<Sequence> {
        let open = Open { prompt: 24, promised: 50, budget: Budget::Slots(6), bring_up: BringUp::Nothing };
        let sequence = self.cache.open(&open)?;
        self.cache.append_in_place(sequence, 24)?;
        let compute = self.layers.streams.compute;
        let joined = self.twice(|life| match life.cache.join(sequence, compute, WarmUp::default()) {
            // It was refused after the lane's tables: the rest must be enqueued again.
            Err(error) if error.kind() == Kind::InvalidState => life.cache.join_more(sequence, compute),
            joined => joined,
        })?;
        self.tickets.push(joined);
        Ok(sequence)
    }

    /// Truncates a sequence to its committed length, which a refused truncation may have reduced.
    fn truncate(&mut self, sequence: Sequence) -> Result<()> {
        let compute = self.layers.streams.compute;
        let truncated = self.twice(|life| {
            let length = life.cache.length(sequence)?.committed;
            life.cache.truncate(sequence, length, compute)
        })?;
        self.tickets.push(truncated);
        self.wait()
    }

    /// Changes a sequence's budget. A call that was refused half-way leaves the old one or the new one.
    fn resize(&mut self, sequence: Sequence, slots: u32) -> Result<()> {
        let (compute, old) = (self.layers.streams.compute, self.cache.budgets(sequence)?.to_vec());
        let taken = self.cache.stats().slots_in_use;
        self.twice(|life| {
            let resized = life.cache.resize(sequence, &Budget::Slots(slots), compute);
            let budgets = life.cache.budgets(sequence)?;
            if budgets != [slots; 2] {
                assert!(resized.is_err() && budgets == old, "{budgets:?}");
                assert_eq!(life.cache.stats().slots_in_use, taken, "the blocks that came went back");
            }
            resized
        })
    }

    /// Waits until all enqueued work has ended.
    fn wait(&mut self) -> Result<()> {
        let compute = self.layers.streams.compute;
        self.twice(|life| life.device.record(life.ended, compute))?;
        self.twice(|life| life.device.synchronize(life.ended))
    }

    fn capture(&mut self, overlap: Overlap) -> Result<Captured> {
        let own = [(MicroBatch(0), self.layers)];
        let by_layer = [overlap; 2];
        let capture = Capture { micro_batches: &own, query_rows: 1, by_layer: &by_layer, draft_passes: 0 };
        self.twice(|life| life.cache.capture(&capture, &mut Idle))
    }

    /// One launched step; after a step that was given up, the sequences are truncated and the step is made again.
    fn step(&mut self, captured: &Captured, sequences: &[(Sequence, u32)]) -> Result<()> {
        let compute = self.layers.streams.compute;
        let row = |(sequence, accepted): &(Sequence, u32)| BatchRow {
            sequence: *sequence,
            accepted: Accepted::Rows(*accepted),
            query_rows: 1,
        };
        let mut rows: Vec<BatchRow> = sequences.iter().map(row).collect();
        for _ in 0..2 {
            let prepared = self.twice(|life| life.cache.prepare(MicroBatch(0), 1, &rows, None, compute));
            let mut step: Step = prepared?;
            let replayed = self.cache.launch(captured, &mut [&mut step]);
            self.twice(|life| life.cache.finish(&mut step, compute))?;
            let _ = self.wait();
            let mut looks = 0;
            let retired = loop {
                looks += 1;
                assert!(looks < 1000, "the step never ends");
                match self.cache.retire(step, compute) {
                    Ok(_) => break Ok(()),
                    Err(unretired) => match unretired.step {
                        None => break Err(unretired.error),
                        Some(back) => step = back,
                    },
                }
            };
            let Err(error) = retired else { return replayed };
            if error.kind() != Kind::Cancelled {
                return Err(error);
            }
            self.truncated += 1;
            for (sequence, _) in sequences {
                self.truncate(*sequence)?;
            }
            rows.iter_mut().for_each(|row| row.accepted = Accepted::Rows(0));
        }
        Err(Error::new(Kind::Cancelled, "step").at("given up twice"))
    }

    /// The life of a cache, from the first sequence to the last one's end.
    fn decode(&mut self) -> Result<()> {
        let compute = self.layers.streams.compute;
        let start = self.cache.stats();
        let [first, second] = [self.open()?, self.open()?];
        let graphs = [self.capture(Overlap::None)?, self.capture(Overlap::Dba)?];
        self.step(&graphs[0], &[(first, 0), (second, 0)])?;
        // The last free block, and back.
        self.resize(second, 70)?;
        self.step(&graphs[1], &[(second, 1)])?;
        self.resize(second, 6)?;
        self.truncate(first)?;
        let open = Open { prompt: 0, promised: 8, budget: Budget::Slots(6), bring_up: BringUp::Whole };
        let (child, ticket) = self.twice(|life| life.cache.fork(first, &open, compute))?;
        self.tickets.push(ticket);
        self.step(&graphs[1], &[(child, 0), (first, 0)])?;
        for sequence in [first, second, child] {
            self.twice(|life| match life.cache.close(sequence, compute) {
                // It is closed already: only its lane could not be emptied at once.
                Err(error) if error.kind() == Kind::Closed => Ok(()),
                closed => closed,
            })?;
        }
        for _ in 0..2 {
            self.wait()?;
            self.twice(|life| life.cache.reap(compute))?;
        }
        let end = self.cache.stats();
        assert_eq!((end.sequences, end.free_slots), (start.sequences, start.free_slots), "{end:?}");
        assert_eq!((end.free_host_pages, end.free_lanes), (start.free_host_pages, start.free_lanes));
        self.cache.validate()
    }
}

/// A whole life with one refused call: how it ended, and which calls were made again.
fn live(rig: &Rig, at: u64, code: i32) -> Lived {
    let mut tickets = Vec::new();
    let mut counts = (0, 0);
    rig.standin.fail_call(at, code);
    let ended = Life::new(rig.device.clone()).and_then(|mut life| {
        let ended = life.decode();
        tickets.append(&mut life.tickets);
        counts = (life.again, life.truncated);
        ended
    });
    let call = rig.standin.failed_call();
    rig.standin.fail_call(u64::MAX, code);
    let event = rig.device.event();
    let failed = event.and_then(|event| rig.device.query(event)).is_err();
    for ticket in &tickets {
        let end = ticket.poll();
        assert!(end.is_some(), "call {at}: a ticket never ends: {ended:?}");
        assert!(failed || end != Some(Outcome::Cancelled), "call {at}: {end:?}");
    }
    Lived { ended, again: counts.0, truncated: counts.1, call, failed }
}

/// How a life ended, the calls that were made again, and the refused call.
struct Lived {
    ended: Result<()>,
    again: u32,
    truncated: u32,
    call: Option<String>,
    /// Whether the device has failed since.
    failed: bool,
}

/// The results of all lives, and the refused calls that no caller was informed of.
#[derive(Default)]
struct All {
    sound: u32,
    again: u32,
    truncated: u32,
    unheard: BTreeSet<String>,
}

/// Calls that release a resource or restore a thread's state.
fn undone(call: &str) -> bool {
    let back = ["Destroy", "Free", "Un", "Release"].iter().any(|word| call.contains(word));
    let guard = ["cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2"];
    back || guard.contains(&call)
}

/// Every so many calls; all of them in a soak.
fn stride(usual: usize) -> usize {
    if std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1") { 1 } else { usual }
}

/// Refuses each of the calls with `code`, one in each life.
fn every_call(code: i32, stride: usize) -> Option<All> {
    let mut all = All::default();
    let calls = {
        let standin = standin(Options::default())?;
        let rig = Rig { device: device(&standin).unwrap(), standin };
        let before = rig.standin.calls();
        live(&rig, u64::MAX, code).ended.unwrap();
        rig.standin.calls() - before
    };
    assert!(calls > 500, "{calls}");
    for at in (0..calls).step_by(stride) {
        let standin = standin(Options::default())?;
        let rig = Rig { device: device(&standin).unwrap(), standin };
        let Lived { ended, again, truncated, call, failed } = live(&rig, at, code);
        all.again += again;
        all.truncated += truncated;
        match ended {
            Ok(()) => {
                all.sound += 1;
                all.unheard.extend(call.clone().filter(|_| again + truncated == 0 && !failed));
            }
            Err(error) => {
                let known = [Kind::OutOfMemory, Kind::DeviceFailed, Kind::OsRefused, Kind::Cancelled];
                assert!(known.contains(&error.kind()), "call {at}: {error}");
            }
        }
        let Rig { standin, device } = rig;
        drop(device);
        // On a lost context no resource is released twice.
        if code != ILLEGAL_ADDRESS || !call.as_deref().is_some_and(undone) {
            assert_eq!(standin.held_resources(), Resources::default(), "call {at} ({call:?})");
        }
    }
    Some(all)
}

#[test]
fn a_cache_goes_on_after_any_call_that_the_driver_refuses_once() {
    let Some(All { sound, again, truncated, .. }) = every_call(OUT_OF_MEMORY, stride(3)) else { return };
    assert!(sound > 100 && again > 30 && truncated > 0, "{sound} {again} {truncated}");
}

#[test]
fn a_context_that_is_lost_at_any_call_leaks_nothing() {
    let Some(All { unheard, .. }) = every_call(ILLEGAL_ADDRESS, stride(7)) else { return };
    // Calls that restore a thread's state or release a resource. For all others at least the device reports it.
    assert!(unheard.iter().all(|call| undone(call)), "{unheard:?}");
    assert!(unheard.contains("cuCtxPopCurrent_v2"), "the control: some are unheard");
}

#[test]
fn running_out_of_memory_anywhere_is_an_error_that_names_it_and_leaks_nothing() {
    let grain = 2 << 20;
    let (mut refused, mut limit, mut named) = (0, 0, false);
    loop {
        let Some(standin) = standin(Options { memory: limit, ..Options::default() }) else { return };
        let made = device(&standin).and_then(Life::new).map(|_| ());
        assert_eq!(standin.held_resources(), Resources::default(), "{limit} bytes");
        match made {
            Ok(()) => break,
            Err(error) => {
                assert_eq!(error.kind(), Kind::OutOfMemory, "{limit} bytes: {error}");
                named |= error.to_string().contains("on a new device");
            }
        }
        refused += 1;
        limit += if limit < grain { grain / 64 } else { grain / 2 };
    }
    assert!(refused > 5 && named, "{refused} limits");
}

/// Calls that are refused half-way while their stream is held.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Join,
    JoinMore,
    Fork,
    Truncate,
    Close,
    Prepare,
    Shrink,
    Grow,
}

impl Call {
    /// Tokens of the prompt of the sequence that is named.
    const fn prompt(self) -> u32 {
        if matches!(self, Call::Shrink | Call::Grow) { 70 } else { PROMPT }
    }

    /// The budget that a sequence has before and after a resize.
    const fn budgets(self) -> Option<[u32; 2]> {
        match self {
            // One block goes, and rows of it move into the other one.
            Call::Shrink => Some([78, 20]),
            Call::Grow => Some([20, 78]),
            _ => None,
        }
    }
}

/// A cache with one held stream.
struct Held {
    standin: Standin,
    device: Arc<CudaDevice>,
    cache: Cache,
    /// The held stream, on which the refused call goes on, and the stream of all other work.
    streams: [Stream; 3],
    forked: Vec<Sequence>,
}

const PROMPT: u32 = 40;

impl Held {
    fn new() -> Option<Held> {
        let standin = standin(Options::default())?;
        let device = device(&standin).unwrap();
        let streams = [0; 3].map(|_| device.stream().unwrap());
        Some(Held {
            cache: Cache::new(config(), device.clone()).unwrap(),
            standin,
            device,
            streams,
            forked: Vec::new(),
        })
    }

    fn open_of(prompt: u32) -> Open {
        Open { prompt, promised: 10, budget: Budget::Slots(40), bring_up: BringUp::Whole }
    }

    /// A sequence whose rows are all of one byte; none if it does not fit.
    fn fill(&mut self, with: u8) -> Option<Sequence> {
        self.fill_of(&Held::open_of(PROMPT), with)
    }

    fn fill_of(&mut self, open: &Open, with: u8) -> Option<Sequence> {
        let sequence = self.cache.open(open).ok()?;
        let rows = vec![with; (open.prompt * self.cache.geometry().row_bytes()) as usize];
        (0..2).for_each(|layer| self.cache.append(sequence, Layer(layer), &rows).unwrap());
        Some(sequence)
    }

    fn join(&mut self, sequence: Sequence, stream: Stream, bytes_a_call: u64) -> Result<Ticket> {
        self.cache.join(sequence, stream, WarmUp { bytes_a_call, ..WarmUp::default() })
    }

    /// The sequences that a call names, ready for it.
    fn ready(&mut self, call: Call) -> Vec<Sequence> {
        let [one, ..] = self.streams;
        let open = match call.budgets() {
            Some([slots, _]) => {
                Open { promised: 8, budget: Budget::Slots(slots), ..Held::open_of(call.prompt()) }
            }
            None => Held::open_of(call.prompt()),
        };
        let first = self.fill_of(&open, 1).unwrap();
        let bytes = if call == Call::JoinMore { 64 } else { u64::MAX };
        if call != Call::Join {
            let _ticket = self.join(first, one, bytes).unwrap();
        }
        let mut all = vec![first];
        if call == Call::Truncate {
            all.push(self.cache.fork(first, &Held::open_of(0), one).unwrap().0);
        }
        all
    }

    fn call(&mut self, call: Call, sequence: Sequence, stream: Stream) -> Result<()> {
        match call {
            Call::Join => self.join(sequence, stream, u64::MAX).map(drop),
            Call::JoinMore => self.cache.join_more(sequence, stream).map(drop),
            Call::Fork => {
                self.forked.push(self.cache.fork(sequence, &Held::open_of(0), stream)?.0);
                Ok(())
            }
            Call::Truncate => self.cache.truncate(sequence, 20, stream).map(drop),
            Call::Close => self.cache.close(sequence, stream),
            Call::Shrink | Call::Grow => {
                let slots = call.budgets().unwrap()[1];
                self.cache.resize(sequence, &Budget::Slots(slots), stream)
            }
            Call::Prepare => {
                let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
                self.cache.prepare(MicroBatch(0), 1, &[row], None, stream).map(drop)
            }
        }
    }

    /// The call on the held stream, with its `n`-th driver call refused; none if it makes fewer, or if the refusal
    /// fails the device.
    fn refuse(&mut self, call: Call, sequence: Sequence, n: u64) -> Option<Option<Result<()>>> {
        let [one, ..] = self.streams;
        self.standin.hold(one.0);
        self.standin.fail_call(n, OUT_OF_MEMORY);
        let refused = self.call(call, sequence, one);
        let name = self.standin.failed_call();
        self.standin.fail_call(u64::MAX, OUT_OF_MEMORY);
        let event = self.device.event().unwrap();
        // A refused query fails the device for good: no work runs any more.
        let sound = self.device.query(event).is_ok();
        name.map(|_| sound.then_some(refused))
    }

    fn rows_are(&self, sequence: Sequence, count: u32, byte: u8) -> bool {
        let mut row = vec![0; self.cache.geometry().row_bytes() as usize];
        (0..2).all(|layer| {
            (0..count).all(|position| {
                self.cache.read_row(sequence, Layer(layer), position, &mut row).unwrap();
                row.iter().all(|b| *b == byte)
            })
        })
    }

    /// Whether a sequence has the budgets of a resize, if the call is one.
    fn is_resized(&self, call: Call, sequence: Sequence) -> bool {
        call.budgets().is_none_or(|[_, slots]| self.cache.budgets(sequence).unwrap() == [slots; 2])
    }

    /// The number of bytes of all slots that belong to other sequences than the refused call's.
    fn bytes_of_others(&self) -> usize {
        let count = |layer| {
            let slab = self.cache.slab(Layer(layer)).unwrap();
            let mut bytes = vec![0; slab.bytes() as usize];
            assert!(self.standin.read(slab.address(), &mut bytes));
            bytes.iter().filter(|b| **b == 9).count()
        };
        count(0) + count(1)
    }

    /// Everything is freed once the stream has gone on.
    fn end(mut self, all: &[Sequence], mut start: Stats) {
        let [_, _, third] = self.streams;
        for sequence in all.iter().chain(&self.forked) {
            if let Err(error) = self.cache.close(*sequence, third) {
                assert_eq!(error.kind(), Kind::Closed);
            }
        }
        (0..2).for_each(|_| assert!(self.cache.reap(third).is_ok()));
        self.cache.validate().unwrap();
        start.resizes = self.cache.stats().resizes;
        assert_eq!(self.cache.stats(), start);
    }
}

const CALLS: [Call; 7] =
    [Call::Join, Call::JoinMore, Call::Fork, Call::Truncate, Call::Close, Call::Shrink, Call::Grow];

#[test]
fn work_enqueued_by_a_refused_call_reaches_no_other_sequence() {
    let Some(mut held) = Held::new() else { return };
    let new = held.fill(9).unwrap();
    let _ticket = held.join(new, held.streams[2], u64::MAX).unwrap();
    let alone = (held.cache.digest(new).unwrap(), held.bytes_of_others());
    let (mut waited, mut others) = (0, 0);
    let mut over = None;
    for (call, n) in CALLS.iter().flat_map(|call| (0..200).map(move |n| (*call, n))) {
        if over == Some(call) {
            continue;
        }
        let Some(mut held) = Held::new() else { return };
        let [one, other, third] = held.streams;
        let start = held.cache.stats();
        let mut all = held.ready(call);
        let Some(refused) = held.refuse(call, all[0], n) else {
            over = Some(call);
            continue;
        };
        if refused.is_none() {
            continue;
        }
        for sequence in &all {
            let _ = held.cache.close(*sequence, other);
        }
        waited += held.cache.reap(other).unwrap();
        let mut news = Vec::new();
        while let Some(new) = held.fill(9) {
            let _ticket = held.join(new, third, u64::MAX).unwrap();
            news.push(new);
        }
        held.standin.let_go(one.0);
        let bytes = held.bytes_of_others();
        assert_eq!(bytes, alone.1 * news.len(), "{call:?}, call {n}: bytes in slots");
        let resident = |new: &Sequence| held.cache.digest(*new).unwrap() == alone.0;
        assert!(news.iter().all(resident), "{call:?}, call {n}: residency");
        assert!(news.iter().all(|new| held.rows_are(*new, PROMPT, 9)), "{call:?}, call {n}: rows");
        others += news.len();
        all.extend(news);
        held.end(&all, start);
    }
    assert!(waited > 20 && others > 20, "{waited} {others}");
}

#[test]
fn a_refused_call_is_made_again_on_another_stream() {
    let (mut again, mut queued, mut truncating) = (0, 0, 0);
    let mut over = None;
    for (call, n) in CALLS.iter().flat_map(|call| (0..200).map(move |n| (*call, n))) {
        if over == Some(call) {
            continue;
        }
        let Some(mut held) = Held::new() else { return };
        let [one, other, _] = held.streams;
        let all = held.ready(call);
        let Some(refused) = held.refuse(call, all[0], n) else {
            over = Some(call);
            continue;
        };
        let Some(refused) = refused else { continue };
        if let Err(error) = refused {
            assert_eq!(error.kind(), Kind::OutOfMemory, "{call:?}, call {n}");
            if call == Call::Truncate && !held.cache.is_running(all[0]).unwrap() {
                let error = held.cache.resize(all[0], &Budget::Slots(20), other).unwrap_err();
                assert_eq!(error.place(), "the device refused a truncate half-way");
                truncating += 1;
            }
            let done = match held.call(call, all[0], other) {
                // Its lane has the tables already.
                Err(error) if call == Call::Join && error.kind() == Kind::InvalidState => {
                    held.call(Call::JoinMore, all[0], other)
                }
                // It is enqueued, and its lists are still staged.
                Err(error) if call.budgets().is_some() && error.kind() == Kind::Busy => {
                    queued += 1;
                    assert!(held.is_resized(call, all[0]), "{call:?}, call {n}");
                    held.standin.let_go(one.0);
                    held.call(call, all[0], other)
                }
                done => done,
            };
            match done {
                Err(error) if call == Call::Close => assert_eq!(error.kind(), Kind::Closed),
                done => done.unwrap(),
            }
            again += 1;
        }
        held.standin.let_go(one.0);
        if call != Call::Close {
            let count = if call == Call::Truncate { 20 } else { call.prompt() };
            assert!(held.is_resized(call, all[0]), "{call:?}, call {n}");
            assert_eq!(held.cache.length(all[0]).unwrap().committed, count, "{call:?}, call {n}");
            assert!(held.rows_are(all[0], count, 1), "{call:?}, call {n}");
        }
        held.cache.validate().unwrap();
    }
    assert!(again > 30 && queued > 1 && truncating > 0, "{again} {queued} {truncating}");
}

#[test]
fn a_step_descriptor_is_not_written_while_a_refused_prepare_may_read_it() {
    let mut busy = 0;
    for n in 0.. {
        let Some(mut held) = Held::new() else { return };
        let [one, other, _] = held.streams;
        let mut start = held.cache.stats();
        let all = held.ready(Call::Prepare);
        let Some(refused) = held.refuse(Call::Prepare, all[0], n) else { break };
        if refused.is_some_and(|refused| refused.is_err()) {
            // One descriptor may still be read: of two, one is left.
            let row = BatchRow { sequence: all[0], accepted: Accepted::Rows(0), query_rows: 1 };
            let prepare = |held: &mut Held| held.cache.prepare(MicroBatch(0), 1, &[row], None, other);
            let mut step = prepare(&mut held).unwrap();
            held.cache.abandon(&mut step).unwrap();
            held.cache.finish(&mut step, other).unwrap();
            busy += held.cache.stats().steps_in_flight - 1;
            held.standin.let_go(one.0);
            assert_eq!(held.cache.retire(step, other).unwrap_err().error.kind(), Kind::Cancelled);
            start.steps = 1;
            held.end(&all, start);
        }
    }
    assert!(busy > 0, "none was refused after the reader was enqueued");
}

/// The call's layer must exist for its slab; the first one does.
#[test]
fn a_life_without_refusals_decodes() {
    let (device, _standin);
    if let Ok(library) = std::env::var("FOREBAY_TEST_DRIVER") {
        let options = CudaOptions { library: Some(library), ..CudaOptions::default() };
        device = CudaDevice::new(options).unwrap();
    } else {
        let Some(standin) = standin(Options { seed: Some(5), ..Options::default() }) else { return };
        device = self::device(&standin).unwrap();
        _standin = standin;
    }
    let mut life = Life::new(device).unwrap();
    life.decode().unwrap();
    assert_eq!((life.again, life.truncated), (0, 0));
    assert!(life.cache.slab(Layer(1)).is_ok());
}
