//! The ring of sharded weights in captured steps: each use of a layer, in each launch, finds the bytes of the layer's
//! owners, whatever was delayed or remapped in between. Each wait that is left out of a graph or around its launch
//! shows for some seed.

#[path = "ring/remapped.rs"]
mod remapped;

use std::sync::{Arc, Mutex, MutexGuard};

use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Event, Graph, Slice, Stream};
use forebay::os::{Faults, Map, NoFaults};
use forebay::peer::Links;
use forebay::weights::{
    Group, Odd, Plan, Prefetch, Pull, Pulls, Ring, RingOptions, Sharding, Source, Windows, Wrap,
};
use forebay::{Error, Kind, Result};
use forebay_standin::{Options, Standin};

use crate::rig::{driver, on, own, pinned, usual};
use crate::windows::{Folder, Rank, layers, patient, sharding};

/// Bytes that a use reads of each page: all of them in the granules of these tests on a stand-in.
const SAMPLE: u64 = 4096;
/// Steps that may be in flight before their logs are compared.
const IN_FLIGHT: u64 = 4;
/// A failure that no test reaches.
const NEVER: u64 = 1 << 40;

/// A stand-in with small pages, which delays and reorders by a seed.
pub fn delayed(seed: Option<u64>) -> Options {
    Options { granule: SAMPLE, seed, ..usual() }
}

/// The model and its ring.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub layers: usize,
    pub odd: Odd,
    pub ring: RingOptions,
    pub draft_passes: usize,
}

/// Six layers that use two buffers in turn, in one micro-batch.
pub const SMALL: Setup = Setup {
    layers: 6,
    odd: Odd::Cheapest,
    ring: RingOptions { draft_layers: 0, micro_batches: 1, parts: 1, wrap: Wrap::Joined, prefetch: None },
    draft_passes: 0,
};

/// Some pages of the next window. On a stand-in the kernel reads them: one that is not mapped ends the test.
const AHEAD: Option<Prefetch> = Some(Prefetch { bytes: 3 * SAMPLE + 5, rate: 1 << 40 });

impl Setup {
    fn wrapped(self, wrap: Wrap) -> Setup {
        Setup { ring: RingOptions { wrap, ..self.ring }, ..self }
    }

    fn micro_batches(self, micro_batches: usize) -> Setup {
        Setup { ring: RingOptions { micro_batches, ..self.ring }, ..self }
    }

    /// A rank with all parts filled. Each layer has some whole pages, so that each byte is compared.
    fn rank(&self, library: &str, group: Group, source: Source) -> Rank {
        let device: Arc<dyn Device> = CudaDevice::new(on(library)).unwrap();
        let grain = device.granularity();
        let model: Vec<Vec<u64>> =
            (0..self.layers as u64).map(|layer| vec![(2 + layer % 3) * grain]).collect();
        let sharding = Sharding { odd: self.odd, source, ..sharding(grain) };
        let plan = Plan::new(&layers(&model), group, &sharding).unwrap();
        let faults: Arc<dyn Faults> = Arc::new(NoFaults);
        let mut rank = Rank::new(&device, plan, Pulls { copy: grain }, &faults).unwrap();
        rank.fill().unwrap();
        rank
    }

    /// A rank whose layers come from its own pinned memory: it meets no other rank, and all its calls are made by one
    /// thread, so that a seed means the same in each run.
    pub fn alone(&self, library: &str) -> Engine {
        Engine::new(self.rank(library, Group { id: 1, rank: 0, ranks: 1 }, Source::Host), None, *self, |it| {
            it
        })
    }

    /// Two ranks that have shared.
    fn peers(&self, library: &str) -> Vec<Engine> {
        let folder = Folder::new();
        let one = |own: u32| {
            let mut rank = self.rank(library, Group { id: 1, rank: own, ranks: 2 }, Source::Peers);
            let faults: Arc<dyn Faults> = Arc::new(NoFaults);
            let links = rank.share(&folder.0, patient(), &faults).unwrap();
            Engine::new(rank, Some(links), *self, |windows| windows)
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| scope.spawn(move || one(rank)));
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// An engine whose work is to read: each use of a layer copies its window to a log. The log of each step is kept for
/// the host, in the order of the first micro-batch's stream.
pub struct Engine<P: Pull = Windows> {
    pub device: Arc<dyn Device>,
    pub ring: Ring<P>,
    /// The compute stream of each micro-batch.
    pub streams: Vec<Stream>,
    event: Event,
    setup: Setup,
    /// By layer: its addresses, as they were before the first step, and the bytes that a use has to read.
    windows: Vec<(Slice, Vec<u8>)>,
    grain: u64,
    /// The layer of each use of a step, and where its log begins.
    uses: Vec<(usize, u64)>,
    /// The use that each micro-batch is in, or comes to.
    pub at: Vec<usize>,
    /// Bytes of one micro-batch's log.
    bytes: u64,
    log: Slice,
    nothing: Slice,
    map: Arc<Map>,
    host: Slice,
    kept: u64,
    graph: Option<Graph>,
    _links: Option<Links>,
}

impl<P: Pull> Engine<P> {
    fn new(rank: Rank, links: Option<Links>, setup: Setup, pulls: impl FnOnce(Windows) -> P) -> Engine<P> {
        let grain = rank.plan().grain();
        let window = |layer| {
            let (window, bytes) = (rank.windows.layer(layer).unwrap(), rank.expected(layer));
            let samples = bytes.chunks(grain as usize).flat_map(|page| &page[..SAMPLE as usize]);
            (window, samples.map(|byte| byte.unwrap()).collect())
        };
        let windows: Vec<(Slice, Vec<u8>)> = (0..setup.layers).map(window).collect();
        let once = setup.layers - setup.ring.draft_layers;
        let drafts = (0..setup.draft_passes).flat_map(|_| once..setup.layers);
        let mut bytes = 0;
        let uses = (0..once).chain(drafts).map(|layer| {
            let at = bytes;
            bytes += windows[layer].1.len() as u64;
            (layer, at)
        });
        let uses = uses.collect();
        let Rank { device, windows: sharded, .. } = rank;
        let all = bytes * setup.ring.micro_batches as u64;
        let map = pinned(IN_FLIGHT * all);
        let (host, log, nothing) =
            (device.register(&map).unwrap(), device.allocate(all).unwrap(), device.allocate(all).unwrap());
        let ring = Ring::new(&device, pulls(sharded), setup.ring).unwrap();
        let streams: Vec<_> = (0..setup.ring.micro_batches).map(|_| device.stream().unwrap()).collect();
        let event = device.event().unwrap();
        device.copy(streams[0], host.part(0, all).unwrap(), nothing).unwrap();
        let at = vec![0; streams.len()];
        let engine = Engine {
            device,
            ring,
            streams,
            event,
            setup,
            windows,
            grain,
            uses,
            at,
            bytes,
            log,
            nothing,
            map,
            host,
            kept: 0,
            graph: None,
            _links: links,
        };
        engine.wait();
        engine
    }

    /// Waits for all work of the compute streams.
    pub fn wait(&self) {
        for stream in &self.streams {
            self.device.record(self.event, *stream).unwrap();
            self.device.synchronize(self.event).unwrap();
        }
    }

    /// Orders the first micro-batch's stream after the others, or they after it.
    pub fn join(&self) {
        self.fork_or_join(false).unwrap();
    }

    /// Orders the other micro-batches' streams after the first one's.
    pub fn fork(&self) {
        self.fork_or_join(true).unwrap();
    }

    fn fork_or_join(&self, fork: bool) -> Result<()> {
        let [first, others @ ..] = &self.streams[..] else { return Ok(()) };
        others.iter().try_for_each(|other| {
            let [from, to] = if fork { [first, other] } else { [other, first] };
            self.device.edge(self.event, *from, *to)
        })
    }

    pub fn enter(&mut self, layer: usize, micro_batch: usize) -> Result<()> {
        assert_eq!(self.uses[self.at[micro_batch]].0, layer);
        self.ring.enter(layer, micro_batch, self.streams[micro_batch])
    }

    /// Reads some pages of a use's window: from one on, up to another one.
    pub fn reads(&self, at: usize, micro_batch: usize, from: u64, to: u64) -> Result<()> {
        let (layer, log) = self.uses[at];
        let (window, expected) = &self.windows[layer];
        let log = micro_batch as u64 * self.bytes + log;
        (from..to.min(expected.len() as u64 / SAMPLE)).try_for_each(|page| {
            let to = self.log.part(log + page * SAMPLE, SAMPLE).unwrap();
            self.device.copy(self.streams[micro_batch], window.part(page * self.grain, SAMPLE).unwrap(), to)
        })
    }

    pub fn leave(&mut self, layer: usize, micro_batch: usize) -> Result<()> {
        self.at[micro_batch] += 1;
        self.ring.leave(layer, micro_batch, self.streams[micro_batch])
    }

    /// Begins a step, before which nothing is in the log.
    pub fn begin(&mut self) -> Result<()> {
        self.at.fill(0);
        self.ring.begin(self.setup.ring.micro_batches, self.setup.draft_passes)
    }

    /// The uses from one on, of all micro-batches in turn.
    fn use_all(&mut self, from: usize, to: usize) -> Result<()> {
        for at in from..to {
            let layer = self.uses[at].0;
            for micro_batch in 0..self.streams.len() {
                self.enter(layer, micro_batch)?;
                self.reads(at, micro_batch, 0, u64::MAX)?;
                self.leave(layer, micro_batch)?;
            }
        }
        Ok(())
    }

    fn whole_step(&mut self) -> Result<()> {
        self.fork_or_join(true)?;
        self.use_all(0, self.uses.len())?;
        self.ring.end(self.streams[0])?;
        self.fork_or_join(false)
    }

    /// Captures a step. After an error the capture is discarded and the step abandoned.
    fn capture(&mut self) -> Result<()> {
        self.begin()?;
        let (device, first) = (Arc::clone(&self.device), self.streams[0]);
        device.capture(first)?;
        let enqueued = self.whole_step();
        let graph = device.captured(first);
        match enqueued {
            Ok(()) => self.graph = Some(graph?),
            Err(error) => {
                graph.map_or(Ok(()), |graph| device.release(graph))?;
                self.ring.abandon()?;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Forgets what the log has, in the order of the first stream.
    pub fn clear(&self) {
        self.device.copy(self.streams[0], self.nothing, self.log).unwrap();
    }

    /// Keeps the log of a step, in the order of the first stream.
    pub fn keep(&mut self) {
        let bytes = self.log.bytes();
        let to = self.host.part(self.kept % IN_FLIGHT * bytes, bytes).unwrap();
        self.device.copy(self.streams[0], self.log, to).unwrap();
        self.kept += 1;
    }

    fn launch(&mut self) {
        let (device, graph, first) = (Arc::clone(&self.device), self.graph.unwrap(), self.streams[0]);
        self.clear();
        self.ring.launch(first, || device.launch(graph, first)).unwrap();
        self.keep();
    }

    /// A step by single calls.
    fn call(&mut self) -> Result<()> {
        self.clear();
        self.begin()?;
        self.whole_step()?;
        self.keep();
        Ok(())
    }

    /// Waits, and compares each byte that each use of the kept steps has read.
    pub fn compare(&mut self) -> Result<(), String> {
        self.wait();
        assert!(self.kept <= IN_FLIGHT);
        for step in 0..std::mem::take(&mut self.kept) {
            for (micro_batch, (layer, at)) in
                (0..self.streams.len() as u64).flat_map(|micro| self.uses.iter().map(move |it| (micro, it)))
            {
                let expected = &self.windows[*layer].1;
                let mut found = vec![0; expected.len()];
                let log = step * self.log.bytes() + micro_batch * self.bytes + at;
                self.map.copy_out(log, &mut found).unwrap();
                if let Some(wrong) = found.iter().zip(expected).position(|(a, b)| a != b) {
                    return Err(format!(
                        "step {step} of those kept, micro-batch {micro_batch}, layer {layer}: byte {wrong}"
                    ));
                }
            }
        }
        Ok(())
    }
}

impl Engine {
    /// The layers that use a buffer first.
    fn first_layers(&self) -> [usize; 2] {
        let pulls = self.ring.pulls();
        [0, 1].map(|buffer| (0..).find(|layer| Pull::buffer(pulls, *layer) == Some(buffer)).unwrap())
    }

    fn is_resident(&self, layer: usize) -> bool {
        self.ring.pulls().is_resident(layer).unwrap()
    }

    /// A resident layer becomes sharded, a sharded one resident. Nothing of the engine is under way.
    pub fn turn(&mut self, layer: usize) {
        if self.is_resident(layer) {
            self.ring.make_sharded(layer).unwrap();
        } else {
            self.ring.make_resident(layer, self.streams[0]).unwrap();
        }
        let window = self.windows[layer].0;
        assert_eq!(self.ring.pulls().layer(layer), Ok(window), "the addresses stay");
    }
}

/// Numbers by a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        ((self.0 >> 33) as usize) % below
    }
}

/// Launches of one captured step by two ranks. Between them layers become resident and sharded again, the first ones
/// most often, and now and then a step is made by single calls or abandoned.
fn replayed(setup: Setup, seed: Option<u64>, launches: usize) {
    let Some(driver) = driver(delayed(seed)) else { return };
    let mut ranks = setup.peers(driver.library());
    // Some layers of the second rank are resident when its step is captured, and sharded later.
    let second = ranks[1].first_layers();
    second.into_iter().chain([4]).for_each(|layer| ranks[1].turn(layer));
    ranks.iter_mut().for_each(|rank| rank.capture().unwrap());
    let mut draws = Draws(seed.unwrap_or(0));
    let (mut launched, mut remapped, mut first_remapped) = (0, 0, 0);
    while launched < launches {
        for _ in 0..1 + draws.below(2) {
            ranks.iter_mut().for_each(Engine::launch);
            launched += 1;
        }
        let what = draws.below(6);
        for rank in &mut ranks {
            match what {
                0 => rank.call().unwrap(),
                1 => {
                    rank.begin().unwrap();
                    rank.use_all(0, setup.layers / 2).unwrap();
                    rank.join();
                    rank.ring.abandon().unwrap();
                }
                _ => {}
            }
            rank.launch();
        }
        launched += 1;
        for rank in &mut ranks {
            rank.compare().unwrap_or_else(|what| panic!("{setup:?}, seed {seed:?}: {what}"));
            let first = rank.first_layers()[draws.below(2)];
            for layer in [first, draws.below(setup.layers)] {
                if Pull::buffer(rank.ring.pulls(), layer).is_some() && draws.below(3) > 0 {
                    rank.turn(layer);
                    remapped += 1;
                    first_remapped += u32::from(layer == first);
                }
            }
        }
    }
    assert!(remapped > launches / 4 && first_remapped > launches as u32 / 8, "{remapped}, {first_remapped}");
}

/// The layers of published models. The plan keeps one of them resident, or has a third buffer.
const LARGE: Setup = Setup { layers: 61, ..SMALL };

#[test]
fn a_hundred_launches_find_every_layer_in_its_window() {
    for wrap in [Wrap::Joined, Wrap::Behind] {
        replayed(LARGE.wrapped(wrap), None, 100);
        replayed(LARGE.wrapped(wrap), Some(1), 100);
    }
}

#[test]
fn late_and_reordered_launches_find_every_layer_in_its_window() {
    for seed in 2..10 {
        let wrap = [Wrap::Joined, Wrap::Behind][seed as usize % 2];
        let micro_batches = 1 + seed as usize / 2 % 2;
        let odd = [Odd::ThirdBuffer, Odd::ResidentFirst, Odd::ResidentLast][seed as usize % 3];
        let setup = Setup { layers: 7 + seed as usize, odd, ..SMALL };
        let parts = 1 + seed as usize % 3;
        let setup = Setup { ring: RingOptions { parts, prefetch: AHEAD, ..setup.ring }, ..setup };
        replayed(setup.wrapped(wrap).micro_batches(micro_batches), Some(seed), 40);
    }
}

#[test]
fn two_micro_batches_find_every_layer_in_its_window() {
    for (wrap, seed) in [(Wrap::Joined, 11), (Wrap::Behind, 12)] {
        replayed(LARGE.wrapped(wrap).micro_batches(2), Some(seed), 40);
    }
}

/// What a test needs of a stand-in of its own.
const LEAVES_OUT: &str = "leaves out waits";

/// Whether launches go wrong without some waits of their capture, and how many the capture has.
fn without(standin: &Standin, setup: Setup, left_out: Option<u64>) -> (bool, u64) {
    let mut engine = setup.alone(standin.library());
    let first = standin.waits();
    if let Some(wait) = left_out {
        standin.without_waits(first + wait..first + wait + 1);
    }
    engine.capture().unwrap();
    let waits = standin.waits() - first;
    (0..3).for_each(|_| engine.launch());
    (engine.compare().is_err(), waits)
}

#[test]
fn control_each_wait_that_is_left_out_of_a_captured_step_shows_for_some_seed() {
    for (wrap, micro_batches) in [(Wrap::Joined, 1), (Wrap::Joined, 2), (Wrap::Behind, 1)] {
        let setup = SMALL.wrapped(wrap).micro_batches(micro_batches);
        let Some(standin) = own(delayed(Some(0)), LEAVES_OUT) else { return };
        let (wrong, waits) = without(&standin, setup, None);
        assert!(!wrong && waits > 8, "{waits}");
        // Pulls and micro-batches are joined because a driver refuses streams that are not. The graph's own end comes
        // behind all of its nodes; the second micro-batch forks from where the graph begins.
        let joins = 2 + micro_batches as u64 - 1;
        let demanded: Vec<u64> = (0..micro_batches as u64 - 1).chain(waits - joins..waits).collect();
        let shows = |wait: u64| {
            let mut seeds = 0..if demanded.contains(&wait) { 8 } else { 60 };
            seeds.any(|seed| {
                let standin = own(delayed(Some(seed)), LEAVES_OUT).unwrap();
                without(&standin, setup, Some(wait)).0
            })
        };
        let missed: Vec<u64> = (0..waits).filter(|wait| !shows(*wait)).collect();
        assert_eq!(missed, demanded, "{setup:?}: waits that are not missed");
    }
}

/// Whether a launch goes wrong without its wait of this number: first the pulls before it, then the edges behind it.
fn without_around(seed: u64, wrap: Wrap, left_out: Option<u64>) -> bool {
    let standin = own(delayed(Some(seed)), LEAVES_OUT).unwrap();
    let mut engine = SMALL.wrapped(wrap).alone(standin.library());
    engine.capture().unwrap();
    let firsts = engine.first_layers();
    firsts.iter().for_each(|layer| engine.turn(*layer));
    engine.launch();
    engine.wait();
    // Both first layers are pulled before the next launch.
    firsts.iter().for_each(|layer| engine.turn(*layer));
    let first = standin.waits();
    if let Some(wait) = left_out {
        standin.without_waits(first + wait..first + wait + 1);
    }
    engine.launch();
    assert_eq!(standin.waits() - first, 4, "two buffers, before the launch and after it");
    engine.launch();
    engine.compare().is_err()
}

#[test]
fn control_the_waits_around_a_launch_that_are_left_out_show_for_some_seed() {
    if own(delayed(None), LEAVES_OUT).is_none() {
        return;
    }
    for wrap in [Wrap::Joined, Wrap::Behind] {
        assert!(!(0..20).any(|seed| without_around(seed, wrap, None)), "{wrap:?}");
        for wait in 0..4 {
            let shows = (0..60).any(|seed| without_around(seed, wrap, Some(wait)));
            // Where pulls are in the graph, what is behind a launch is needed for remapping alone.
            assert_eq!(shows, wait < 2 || wrap == Wrap::Behind, "{wrap:?}, wait {wait}");
        }
    }
}

/// Windows that change behind a ring's back.
#[derive(Clone, Debug)]
struct Behind(Arc<Mutex<Windows>>);

impl Behind {
    fn lock(&self) -> MutexGuard<'_, Windows> {
        self.0.lock().unwrap()
    }
}

impl Pull for Behind {
    fn rank(&self) -> u32 {
        Pull::rank(&*self.lock())
    }

    fn layers(&self) -> usize {
        Pull::layers(&*self.lock())
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        Pull::buffer(&*self.lock(), layer)
    }

    fn copies(&self, layer: usize) -> Result<usize> {
        Pull::copies(&*self.lock(), layer)
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: std::ops::Range<usize>) -> Result<()> {
        Pull::pull_some(&*self.lock(), layer, stream, copies)
    }

    fn is_whole(&self, layer: usize) -> bool {
        Pull::is_whole(&*self.lock(), layer)
    }

    fn reads(&self, layer: usize, rank: u32) -> bool {
        Pull::reads(&*self.lock(), layer, rank)
    }
}

/// A first layer that becomes sharded again is not in its buffer. Who does not tell the ring reads another layer.
#[test]
fn control_a_first_layer_that_is_not_pulled_when_it_is_sharded_again_is_stale() {
    let Some(driver) = driver(delayed(None)) else { return };
    for wrap in [Wrap::Joined, Wrap::Behind] {
        for told in [true, false] {
            let setup = SMALL.wrapped(wrap);
            let rank = setup.rank(driver.library(), Group { id: 1, rank: 0, ranks: 1 }, Source::Host);
            let stale = if told {
                let mut engine = Engine::new(rank, None, setup, |windows| windows);
                engine.capture().unwrap();
                engine.turn(0);
                engine.launch();
                engine.wait();
                engine.turn(0);
                engine.launch();
                engine.compare()
            } else {
                let mut engine = Engine::new(rank, None, setup, |windows| Behind(Arc::new(windows.into())));
                engine.capture().unwrap();
                let windows = engine.ring.pulls().clone();
                engine.device.record(engine.event, engine.ring.stream(0).unwrap()).unwrap();
                engine.device.synchronize(engine.event).unwrap();
                windows.lock().make_resident(0, engine.streams[0]).unwrap();
                engine.launch();
                engine.device.record(engine.event, engine.ring.stream(0).unwrap()).unwrap();
                engine.device.synchronize(engine.event).unwrap();
                windows.lock().make_sharded(0).unwrap();
                engine.launch();
                engine.compare()
            };
            assert_eq!(stale.is_ok(), told, "{wrap:?}: {stale:?}");
        }
    }
}

/// A capture in which a driver call is refused, and the name of that call. The capture is discarded and the step
/// abandoned.
fn refused(engine: &mut Engine, standin: &Standin, call: usize) -> (Result<()>, Option<String>) {
    let (device, first) = (Arc::clone(&engine.device), engine.streams[0]);
    engine.begin().unwrap();
    device.capture(first).unwrap();
    standin.fail_call(call as u64, 1);
    let enqueued = engine.whole_step();
    let name = standin.failed_call();
    standin.fail_call(NEVER, 1);
    let graph = device.captured(first);
    graph.map_or(Ok(()), |graph| device.release(graph)).unwrap();
    engine.ring.abandon().unwrap();
    (enqueued, name)
}

/// Each driver call of a capture is refused once. The ring is at its border then: a step by single calls, and a
/// capture, find every layer.
#[test]
fn a_capture_that_fails_half_way_leaves_the_ring_at_its_border() {
    for (wrap, micro_batches) in [(Wrap::Joined, 2), (Wrap::Behind, 1)] {
        let Some(standin) = own(delayed(Some(5)), "fails a call") else { return };
        let setup = SMALL.wrapped(wrap).micro_batches(micro_batches);
        let ring = RingOptions { prefetch: AHEAD.filter(|_| micro_batches == 2), ..setup.ring };
        let mut engine = Setup { ring, ..setup }.alone(standin.library());
        let (mut calls, mut copies, mut waits) = (0, 0, 0);
        loop {
            // In a thread of its own, because a context whose removal is refused stays with the thread.
            let capture = std::thread::scope(|scope| {
                scope.spawn(|| refused(&mut engine, &standin, calls)).join().unwrap()
            });
            let (Err(error), Some(name)) = &capture else {
                let (enqueued, name) = capture;
                enqueued.unwrap();
                let Some(name) = name else { break };
                assert_eq!(name, "cuCtxPopCurrent_v2", "the one call whose refusal changes nothing");
                calls += 1;
                continue;
            };
            assert_eq!(error.number("code"), Some(1), "{error}");
            calls += 1;
            copies += usize::from(name == "cuMemcpyAsync");
            waits += usize::from(name == "cuStreamWaitEvent");
            engine.call().unwrap();
            engine.compare().unwrap_or_else(|what| panic!("{name}, call {calls}: {what}"));
        }
        assert!(copies > 20 && waits > 8, "{copies} copies and {waits} waits of {calls} calls");
        engine.capture().unwrap();
        engine.launch();
        engine.compare().unwrap();
    }
}

/// A launch that is refused, and one that is refused when it has been enqueued: the caller gets its error, and the next
/// launch finds every layer.
#[test]
fn a_launch_that_is_refused_leaves_the_ring_at_its_border() {
    for (wrap, seed) in [(Wrap::Joined, 1), (Wrap::Behind, 2)] {
        let Some(driver) = driver(delayed(Some(seed))) else { return };
        let mut engine = SMALL.wrapped(wrap).alone(driver.library());
        engine.capture().unwrap();
        let (device, graph, first) = (Arc::clone(&engine.device), engine.graph.unwrap(), engine.streams[0]);
        for launched in [false, true, false] {
            let launch = || {
                if launched {
                    device.launch(graph, first)?;
                }
                Err(Error::new(Kind::Io, "engine"))
            };
            assert_eq!(engine.ring.launch(first, launch).unwrap_err().kind(), Kind::Io);
            engine.launch();
            engine.call().unwrap();
            engine.compare().unwrap();
        }
    }
}
