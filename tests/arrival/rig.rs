//! A small cache whose rows and index keys say whose they are.

use std::ops::Range;
use std::sync::Arc;

use crate::device::TestDevice;
use crate::faulty::Faulty;
use forebay::check::watch::Watch;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream, Ticket};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, IndexGroup, Layer, LayerCall, Memory,
};
use forebay::{MicroBatch, Open, Result, Sequence, Shape, Slots, Stats, Streams, Tokens};

pub const PAGE: u32 = 16;
pub const LAYERS: u32 = 3;
/// The layers with index keys: layer 2 follows layer 1.
pub const KEYED: [u32; 2] = [0, 1];
pub const K: u32 = 8;
pub const ROW: usize = 32;
pub const KEY: usize = 8;

/// Three layers in two groups, 24 pages of 16 tokens, three lanes, four arrivals.
pub fn config() -> Config {
    let shape = Shape {
        layers: LAYERS,
        runs: [ROW as u32, 0],
        index_key_bytes: KEY as u32,
        page_tokens: PAGE,
        top_k: K,
        ..Shape::DEEPSEEK_V3_2
    };
    let group = |first, layers| IndexGroup { first, layers, top_k: K };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        index_groups: vec![group(0, 1), group(1, 2)],
        host_pages: 24,
        index_pages: 24,
        slots: Slots::Uniform(256),
        min_budget: 16,
        parked: 1,
        arriving: 4,
        query_rows: 2,
        memory,
        ..Config::new(shape, 3, 200, 64)
    }
}

pub fn asks(prompt: u32, promised: u32) -> Open {
    Open { prompt, promised, budget: Budget::Slots(64), bring_up: BringUp::Nothing }
}

fn stamp(tag: u32, layer: u32, position: u32, bytes: usize) -> Vec<u8> {
    let mixed = (tag << 24 | layer << 16 | position).wrapping_mul(0x9E37_79B9);
    mixed.to_le_bytes().into_iter().cycle().take(bytes).collect()
}

pub fn row(tag: u32, layer: u32, position: u32) -> Vec<u8> {
    stamp(tag, layer, position, ROW)
}

pub fn key(tag: u32, layer: u32, position: u32) -> Vec<u8> {
    stamp(tag, layer + 100, position, KEY)
}

/// A sequence, and the tag of its rows and keys.
#[derive(Clone, Copy, Debug)]
pub struct Own {
    pub handle: Sequence,
    pub tag: u32,
}

#[derive(Debug)]
pub struct Rig {
    pub cache: Cache,
    pub memory: Arc<TestDevice>,
    pub device: Arc<dyn Device>,
    pub faulty: Arc<Faulty>,
    pub clock: Option<Arc<ClockDevice>>,
    pub watch: Option<Arc<Watch>>,
    pub main: Stream,
    pub side: Stream,
    buffers: Buffers,
    /// Where keys lie before they are placed, and the next place there.
    staging: Slice,
    staged: u64,
    /// Where the indexer's reads go.
    indexed: Slice,
}

const STAGES: u64 = 256;
const STAGE: u64 = 256 * KEY as u64;

impl Rig {
    pub fn new(config: Config) -> Rig {
        Rig::try_new(config).unwrap()
    }

    pub fn try_new(config: Config) -> Result<Rig> {
        Rig::on(config, TestDevice::new(HostOptions { threaded: false, ..HostOptions::default() }), None)
    }

    /// On a device with a thread for each stream.
    pub fn threaded(config: Config) -> Rig {
        Rig::on(config, TestDevice::new(HostOptions { threaded: true, ..HostOptions::default() }), None)
            .unwrap()
    }

    /// On a clock that delays and reorders by a seed.
    pub fn clock(config: Config, seed: u64) -> Rig {
        Rig::on(config, TestDevice::host(HostOptions::default()), Some(seed)).unwrap()
    }

    fn on(config: Config, memory: Arc<TestDevice>, seed: Option<u64>) -> Result<Rig> {
        let options = ClockOptions { seed, ..ClockOptions::default() };
        let clock = seed.map(|_| ClockDevice::over(memory.device(), options).unwrap());
        let under = clock.clone().map_or_else(|| memory.device(), |clock| clock as Arc<dyn Device>);
        Rig::over(config, memory, under, clock, None)
    }

    /// On a device that checks the order of operations, without one of the waits.
    pub fn watched(config: Config, without: Option<u64>) -> Rig {
        let memory = TestDevice::host(HostOptions { threaded: false, ..HostOptions::default() });
        let watch = match without {
            Some(number) => Watch::without_wait(memory.device(), number),
            None => Watch::new(memory.device()),
        };
        Rig::over(config, memory, watch.clone(), None, Some(watch)).unwrap()
    }

    fn over(
        config: Config,
        memory: Arc<TestDevice>,
        under: Arc<dyn Device>,
        clock: Option<Arc<ClockDevice>>,
        watch: Option<Arc<Watch>>,
    ) -> Result<Rig> {
        let faulty = Faulty::new(under, false);
        let device: Arc<dyn Device> = faulty.clone();
        let buffer = || device.allocate(u64::from(4 * 2 * K)).unwrap();
        let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
        let (main, side) = (device.stream().unwrap(), device.stream().unwrap());
        let staging = device.allocate(STAGES * STAGE).unwrap();
        let indexed = device.allocate(u64::from(PAGE) * KEY as u64).unwrap();
        let cache = Cache::new(config, device.clone())?;
        Ok(Rig {
            cache,
            memory,
            device,
            faulty,
            clock,
            watch,
            main,
            side,
            buffers,
            staging,
            staged: 0,
            indexed,
        })
    }

    pub fn sync(&self) {
        for stream in [self.main, self.side] {
            let event = self.device.event().unwrap();
            self.device.record(event, stream).unwrap();
            self.device.synchronize(event).unwrap();
            if let Some(watch) = &self.watch {
                watch.ended(stream);
            }
        }
    }

    /// Lets work end before the host looks at what it did. A watched device runs work at once, and must not learn that
    /// the host has seen the end.
    fn look(&self) {
        if self.watch.is_none() {
            self.sync();
        }
    }

    /// Reads the index keys of a sequence, as the indexer of a step does.
    fn index(&self, own: &Own) {
        for layer in KEYED {
            let keys = self.cache.index_keys(Layer(layer)).unwrap();
            for (_, page) in self.pages(own) {
                let bytes = self.indexed.bytes();
                let page = keys.part(u64::from(page) * bytes, bytes).unwrap();
                self.device.copy(self.main, page, self.indexed).unwrap();
            }
        }
    }

    pub fn arrive(&mut self, tag: u32, prompt: u32, promised: u32) -> Own {
        Own { handle: self.cache.arrive(&asks(prompt, promised)).unwrap(), tag }
    }

    pub fn arrive_shared(&mut self, tag: u32, open: &Open, ids: &[u32]) -> (Own, u32) {
        let (handle, shared) = self.cache.arrive_shared(open, b"", Tokens::new(ids)).unwrap();
        (Own { handle, tag }, shared)
    }

    pub fn pages(&self, own: &Own) -> Vec<(u32, u32)> {
        self.cache.pages(own.handle).unwrap().map(|(host, keys)| (host.0, keys.0)).collect()
    }

    /// The memory of a row in a host page.
    pub fn row_at(&self, layer: u32, page: u32, token: u32) -> Slice {
        let at = self.cache.geometry().host_offset(page, token);
        self.cache.rows(Layer(layer)).unwrap().part(at, ROW as u64).unwrap()
    }

    /// The memory of a key in a device page.
    pub fn key_at(&self, layer: u32, page: u32, token: u32) -> Slice {
        let at = u64::from(page * PAGE + token) * KEY as u64;
        self.cache.index_keys(Layer(layer)).unwrap().part(at, KEY as u64).unwrap()
    }

    /// Writes rows of a layer to the sequence's pages, as a sender from afar does.
    pub fn write_rows(&self, own: &Own, layer: u32, positions: Range<u32>) {
        let pages = self.pages(own);
        for position in positions {
            let (page, _) = pages[(position / PAGE) as usize];
            let at = self.row_at(layer, page, position % PAGE);
            self.memory.write(at, &row(own.tag, layer, position)).unwrap();
        }
    }

    /// Memory with the keys of some tokens.
    pub fn stage(&mut self, own: &Own, layer: u32, first: u32, count: u32) -> Slice {
        let bytes: Vec<u8> = (first..first + count).flat_map(|token| key(own.tag, layer, token)).collect();
        self.stage_bytes(&bytes)
    }

    pub fn stage_bytes(&mut self, bytes: &[u8]) -> Slice {
        // The place may still be read.
        if self.staged == STAGES {
            self.sync();
            self.staged = 0;
        }
        let keys = self.staging.part(self.staged * STAGE, bytes.len() as u64).unwrap();
        self.staged += 1;
        self.memory.write(keys, bytes).unwrap();
        keys
    }

    pub fn place(&mut self, own: &Own, layer: u32, first: u32, count: u32, stream: Stream) -> Result<Ticket> {
        let keys = self.stage(own, layer, first, count);
        self.cache.place_index_keys(own.handle, Layer(layer), first, keys, stream)
    }

    /// Brings the rows and keys of some tokens in every layer.
    pub fn fill(&mut self, own: &Own, positions: Range<u32>) {
        let count = positions.end - positions.start;
        for layer in 0..LAYERS {
            self.write_rows(own, layer, positions.clone());
            self.cache.append_layer_in_place(own.handle, Layer(layer), count).unwrap();
        }
        for layer in KEYED {
            let _ticket = self.place(own, layer, positions.start, count, self.side).unwrap();
        }
    }

    /// Whether the rows and keys of a sequence's first `length` tokens are its own.
    pub fn is_whole(&self, own: &Own, length: u32) -> bool {
        let pages = self.pages(own);
        let is = |at: Slice, wanted: Vec<u8>| {
            let mut read = vec![0; wanted.len()];
            self.memory.read(at, &mut read).unwrap();
            read == wanted
        };
        (0..length).all(|position| {
            let ((page, keys), token) = (pages[(position / PAGE) as usize], position % PAGE);
            let rows = |layer| is(self.row_at(layer, page, token), row(own.tag, layer, position));
            let keyed = |layer: &u32| is(self.key_at(*layer, keys, token), key(own.tag, *layer, position));
            (0..LAYERS).all(rows) && KEYED.iter().all(keyed)
        })
    }

    pub fn check(&self, own: &Own, length: u32) {
        self.sync();
        assert!(self.is_whole(own, length), "{own:?}");
    }

    /// A step of one query row that selects `picks`. The rows that attention reads must be the sequence's; the new row
    /// and its keys are written.
    pub fn step(&mut self, own: &Own, length: u32, accepted: u32, picks: &[u32]) {
        let words: Vec<i32> = (0..K as usize).map(|at| picks.get(at).map_or(-1, |p| *p as i32)).collect();
        let bytes: Vec<u8> = words.iter().flat_map(|p| p.to_le_bytes()).collect();
        self.look();
        let half = |slice: Slice| slice.part(0, u64::from(4 * K)).unwrap();
        let (selection, slots) = (half(self.buffers.selection), half(self.buffers.slots));
        self.memory.write(selection, &bytes).unwrap();
        let batch = BatchRow { sequence: own.handle, accepted: Accepted::Rows(accepted), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), 1, &[batch], None, self.main).unwrap();
        self.index(own);
        let streams = Streams { resolve: self.main, gather: self.main };
        let position = length + accepted;
        for layer in 0..LAYERS {
            let call = LayerCall::whole(Layer(layer));
            let buffers = Buffers { selection, slots, split_indices: None };
            self.cache.layer(&step, call, streams, buffers).unwrap();
            self.look();
            let slab = self.cache.slab(Layer(layer)).unwrap();
            let at = |slot: u64| slab.part(slot * ROW as u64, ROW as u64).unwrap();
            let mut read = vec![0; 4 * K as usize];
            self.memory.read(slots, &mut read).unwrap();
            for (slot, pick) in read.chunks_exact(4).zip(picks) {
                let slot = i32::from_le_bytes(slot.try_into().unwrap());
                let mut found = vec![0; ROW];
                self.memory.read(at(u64::try_from(slot).unwrap()), &mut found).unwrap();
                assert_eq!(found, row(own.tag, layer, *pick), "layer {layer}, position {pick}");
            }
            let slot = self.cache.landing_slot(own.handle, 0).unwrap();
            self.memory.write(at(slot.into()), &row(own.tag, layer, position)).unwrap();
            self.cache.scatter(&step, call, self.main).unwrap();
        }
        let (_, keys) = self.pages(own)[(position / PAGE) as usize];
        for layer in KEYED {
            let to = self.key_at(layer, keys, position % PAGE);
            self.memory.write(to, &key(own.tag, layer, position)).unwrap();
        }
        self.cache.finish(&mut step, self.main).unwrap();
        self.look();
        self.cache.retire(step, self.main).map_err(|unretired| unretired.error).unwrap();
    }

    /// Checks that everything is as free as in `start`.
    pub fn check_free(&mut self, start: &Stats) {
        // One call hears that the last ticket has ended, and enqueues the next one.
        for _ in 0..3 {
            self.sync();
            self.cache.reap(self.main).unwrap();
        }
        let end = self.cache.stats();
        assert_eq!((end.sequences, end.arriving, end.withheld_pages), (0, 0, 0));
        assert_eq!(
            (end.free_host_pages, end.free_index_pages, end.free_lanes, end.slots_in_use),
            (start.free_host_pages, start.free_index_pages, start.free_lanes, 0)
        );
        self.cache.validate().unwrap();
    }
}
