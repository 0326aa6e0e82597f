//! A cache on the CUDA device when the driver refuses a call or has no memory: the caller gets an error, nothing leaks,
//! and the cache goes on or is closed.
//!
//! The test refuses each call of a whole life in a run of its own: construction, opening, joining, capturing, launched
//! steps, resizes, a fork, a truncation, closing. Every other life shares its slots. The caller tries again, as an
//! engine would, and truncates sequences whose step was abandoned.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "refused/held.rs"]
mod held;
#[path = "support/skip.rs"]
mod skip;

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Event, Outcome, SplitIndices, Stream, Ticket};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Capture, Captured, Config, Error, Kind, Layer,
    Layers, Memory, MicroBatch, Open, Result, Sequence, Shape, Share, Slots, Step, WarmUp,
};
use forebay_standin::{Options, Resources, Standin};

const K: u32 = 8;
const BATCH: u32 = 2;
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

/// A cache whose sequences have budgets of their own, or share all slots. Then each may use more than it gets.
fn config(shared: bool) -> Config {
    let (tokens, blocks) = if shared { (200, 5) } else { (80, 3) };
    let shape = Shape { layers: 2, runs: [32, 0], page_tokens: 16, top_k: K, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let slots = Slots::Uniform(64 * blocks);
    let share = shared.then(Share::default);
    Config {
        share,
        memory,
        batch: BATCH,
        slots,
        parked: 1,
        min_budget: 6,
        ..Config::new(shape, 3, tokens, 64)
    }
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
    sequences: Vec<Sequence>,
    /// Calls that were refused and made again.
    again: u32,
    truncated: u32,
}

impl Life {
    fn new(device: Arc<CudaDevice>, shared: bool) -> Result<Life> {
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
        let cache = Cache::new(config(shared), device.clone())?;
        let (tickets, sequences) = (Vec::new(), Vec::new());
        Ok(Life { device, cache, layers, ended, tickets, sequences, again: 0, truncated: 0 })
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
        let promised = if self.shares() { 150 } else { 50 };
        let open = Open { prompt: 24, promised, budget: Budget::Slots(6), bring_up: BringUp::Nothing };
        let sequence = self.cache.open(&open)?;
        self.sequences.push(sequence);
        self.cache.append_in_place(sequence, 24)?;
        let compute = self.layers.streams.compute;
        let joined = self.twice(|life| {
            let joined = life.cache.join(sequence, compute, WarmUp::default());
            life.check_budgets();
            match joined {
                // It was refused after the lane's tables: the rest must be enqueued again.
                Err(error) if error.kind() == Kind::InvalidState => life.cache.join_more(sequence, compute),
                joined => joined,
            }
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
        if self.shares() {
            // Every sequence may change, and those before a refused one have.
            let shared = self.twice(|life| {
                let shared = life.cache.share_slots(compute);
                life.check_budgets();
                shared
            });
            return shared.map(|_| ());
        }
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

    /// Parks a sequence, which accepts its landed rows, and resumes it. A refused call leaves it as it was, as before
    /// its join, or with a warm-up to complete.
    fn park_and_resume(&mut self, sequence: Sequence) -> Result<()> {
        let compute = self.layers.streams.compute;
        self.twice(|life| {
            let landed = life.cache.length(sequence)?.landed;
            life.cache.park(sequence, landed, compute)
        })?;
        let resumed = self.twice(|life| {
            let refused = |error: &Error| error.kind() == Kind::InvalidState;
            let mut resumed = life.cache.resume(sequence, compute, 0);
            if resumed.as_ref().is_err_and(refused) {
                resumed = life.cache.join(sequence, compute, WarmUp::default());
            }
            if resumed.as_ref().is_err_and(refused) {
                resumed = life.cache.join_more(sequence, compute);
            }
            life.check_budgets();
            resumed
        })?;
        self.tickets.push(resumed);
        self.wait()
    }

    fn shares(&self) -> bool {
        self.cache.config().share.is_some()
    }

    /// A refused call leaves no budget below the promise, and none without its blocks.
    fn check_budgets(&self) {
        let open = self.sequences.iter().filter_map(|sequence| self.cache.budgets(*sequence).ok());
        let open: Vec<&[u32]> = open.collect();
        assert!(open.iter().all(|own| own.iter().all(|slots| *slots == 0 || *slots >= 6)), "{open:?}");
        let blocks: u32 = open.iter().flat_map(|own| own.iter()).map(|slots| slots.div_ceil(64)).sum();
        let used = self.cache.stats().slots_in_use;
        assert!(u64::from(blocks) * 64 <= used, "{open:?}: {used} slots in use");
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
        self.park_and_resume(first)?;
        let open = Open { prompt: 0, promised: 8, budget: Budget::Slots(6), bring_up: BringUp::Whole };
        let (child, ticket) = self.twice(|life| {
            let forked = life.cache.fork(first, &open, compute);
            life.check_budgets();
            forked
        })?;
        self.sequences.push(child);
        self.tickets.push(ticket);
        self.step(&graphs[1], &[(child, 0), (first, 0)])?;
        for sequence in [first, second, child] {
            if self.shares() && sequence == second {
                // The slots of the first one are free.
                self.wait()?;
                self.twice(|life| life.cache.reap(compute))?;
                self.resize(second, 0)?;
            }
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
fn live(rig: &Rig, at: u64, code: i32, shared: bool) -> Lived {
    let mut tickets = Vec::new();
    let mut counts = (0, 0);
    rig.standin.fail_call(at, code);
    let ended = Life::new(rig.device.clone(), shared).and_then(|mut life| {
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
    let calls = |shared| {
        let standin = standin(Options::default())?;
        let rig = Rig { device: device(&standin).unwrap(), standin };
        let before = rig.standin.calls();
        live(&rig, u64::MAX, code, shared).ended.unwrap();
        Some(rig.standin.calls() - before)
    };
    let calls = [calls(false)?, calls(true)?];
    assert!(calls.iter().all(|calls| *calls > 500), "{calls:?}");
    // Every other one shares its slots; in a soak each call is refused in both.
    let lives = (0..calls[0].max(calls[1])).step_by(stride).enumerate();
    let lives = lives.flat_map(|(place, at)| {
        let both = stride == 1;
        [false, true]
            .into_iter()
            .filter(move |shared| both || (place % 2 == 1) == *shared)
            .map(move |s| (at, s))
    });
    for (at, shared) in lives.filter(|(at, shared)| *at < calls[usize::from(*shared)]) {
        let standin = standin(Options::default())?;
        let rig = Rig { device: device(&standin).unwrap(), standin };
        let Lived { ended, again, truncated, call, failed } = live(&rig, at, code, shared);
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
        let made = device(&standin).and_then(|device| Life::new(device, false)).map(|_| ());
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
    for shared in [false, true] {
        let mut life = Life::new(device.clone(), shared).unwrap();
        life.decode().unwrap();
        assert_eq!((life.again, life.truncated, life.cache.stats().resizes), (0, 0, 2));
        assert!(life.cache.slab(Layer(1)).is_ok());
    }
}
