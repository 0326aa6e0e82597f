//! A cache on two streams, a device with faults below it, and the calls that the models share.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32 as Count, Ordering as Order};

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{
    Backing, Completer, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice, Stream,
    Ticket,
};
use forebay::os::{Call, Faults, Map, Protection, Request};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Lane, Layer, LayerCall, Memory, MicroBatch,
    Open, Result, Sequence, Shape, Stats, Streams,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

/// The errno of a refused call.
const EACCES: i32 = 13;
pub const TOKENS: u32 = 20;
pub const ROW: usize = 32;
const KEY: usize = 8;
const K: usize = 4;
/// The positions that a step selects.
const PICKS: [i32; K] = [0, 3, 15, 19];

/// What is wrong in an interleaving.
pub type Wrong = Option<&'static str>;

/// Runs an owner in every interleaving.
pub fn model(owner: impl Fn() -> Wrong + Copy + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 10_000;
    builder.check(move || {
        // loom's own stacks are too small for the making of a cache.
        let owner = thread::Builder::new().stack_size(1 << 16).spawn(owner).unwrap();
        let wrong = owner.join().unwrap();
        assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
    });
}

/// A fault of the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// No stream waits for an event.
    NoWaits,
    /// Tickets are Done when they are enqueued.
    EarlyTickets,
}

/// Keeps the library from reading how much memory the machine has, which would be most of a model's time.
#[derive(Debug)]
struct Unread;

impl Faults for Unread {
    fn before(&self, call: Call) -> Option<i32> {
        (call == Call::MemoryState).then_some(EACCES)
    }
}

/// The host device, with a fault. It divides one piece of memory, because taking one is slow.
#[derive(Debug)]
struct Faulty {
    device: Arc<HostDevice>,
    fault: Fault,
    memory: Slice,
    taken: Count,
}

impl Faulty {
    fn new(device: &Arc<HostDevice>, fault: Fault) -> Faulty {
        let request =
            Request { bytes: 1 << 17, huge: false, populate: false, lock: false, node: None, shared: false };
        let (map, _) = Map::new(&request, &Unread).unwrap();
        let memory = device.register(&Arc::new(map)).unwrap();
        Faulty { device: Arc::clone(device), fault, memory, taken: Count::new(0) }
    }
}

/// The other methods, forwarded.
macro_rules! hand_on {
    ($($name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $result { self.device.$name($($argument),*) })*
    };
}

impl Device for Faulty {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        let at = self.taken.fetch_add(bytes.next_multiple_of(64) as u32, Order::Relaxed);
        self.memory.part(at.into(), bytes)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        if self.fault == Fault::NoWaits { Ok(()) } else { self.device.wait(stream, event) }
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        if self.fault == Fault::EarlyTickets {
            completer.done();
            return Ok(());
        }
        self.device.complete(stream, completer)
    }

    // SAFETY: asks of its caller what the trait's method asks.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        // SAFETY: the caller of this method vouches for what the inner device asks.
        unsafe { self.device.import(address, bytes) }
    }

    hand_on! {
        register(map: &Arc<Map>) -> Result<Slice>;
        id() -> DeviceId;
        granularity() -> u64;
        takes_host_memory() -> bool;
        pins_host_memory() -> bool;
        backing(bytes: u64) -> Result<Backing>;
        range(pieces: &[Mapped], protection: Protection) -> Result<Slice>;
        stream() -> Result<Stream>;
        event() -> Result<Event>;
        record(event: Event, stream: Stream) -> Result<()>;
        query(event: Event) -> Result<bool>;
        synchronize(event: Event) -> Result<()>;
        copy(stream: Stream, from: Slice, to: Slice) -> Result<()>;
        prefetch(stream: Stream, slice: Slice, rate: u64) -> Result<()>;
        call(stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;
        attach(layout: PoolLayout) -> Result<Pools>;
        enqueue(pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()>;
        enqueue_pages(stream: Stream, op: PageOp<'_>) -> Result<()>;
        digest(pools: Pools, lane: Lane) -> Result<u64>;
        validate(pools: Pools) -> Result<()>;
    }
}

fn config(layers: u32) -> Config {
    let shape = Shape {
        layers,
        runs: [ROW as u32, 0],
        index_key_bytes: KEY as u32,
        page_tokens: 16,
        top_k: K as u32,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        host_pages: 2,
        index_pages: 2,
        steps_in_flight: 1,
        arriving: 2,
        memory,
        overcommit: true,
        ..Config::new(shape, 1, 32, 64)
    }
}

/// An operation that loom sees and orders nothing by.
#[derive(Clone)]
pub struct Turn(pub Arc<AtomicU32>);

impl Turn {
    pub fn new() -> Turn {
        Turn(Arc::new(AtomicU32::new(0)))
    }

    pub fn take(&self) -> u32 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

pub struct Rig {
    pub cache: Cache,
    pub device: Arc<HostDevice>,
    pub side: Stream,
    pub main: Stream,
    /// Memory for keys to place, keys that were read, a selection and slots.
    memory: Slice,
    /// Memory for the slots that attention reads.
    attended: Slice,
    /// Recorded where the owner waits for a stream.
    ended: Event,
    start: Stats,
}

/// Where keys that are read go, where a selection is, and where slots go, in the rig's memory.
const READ: u64 = 2048;
const SELECTION: u64 = 3072;
const SLOTS: u64 = 3584;

impl Rig {
    pub fn new(layers: u32, fault: Fault) -> Rig {
        Rig::failing(layers, fault, None)
    }

    /// On a device whose operation of this number fails.
    pub fn failing(layers: u32, fault: Fault, fail_operation: Option<u64>) -> Rig {
        let options = HostOptions { threaded: true, queue: 64, fail_operation, ..HostOptions::default() };
        let device = HostDevice::new(options);
        // The thread that was made first runs first where both may.
        let (main, side) = (device.stream().unwrap(), device.stream().unwrap());
        let faulty = std::sync::Arc::new(Faulty::new(&device, fault));
        let (memory, attended) = (faulty.allocate(4096).unwrap(), faulty.allocate(1 << 14).unwrap());
        let cache = Cache::with_faults(config(layers), faulty, &Unread).unwrap();
        let (ended, start) = (device.event().unwrap(), cache.stats());
        Rig { cache, device, side, main, memory, attended, ended, start }
    }

    pub fn arrive(&mut self) -> Result<Sequence> {
        let budget = Budget::Slots(64);
        self.cache.arrive(&Open { prompt: TOKENS, promised: 0, budget, bring_up: BringUp::Whole })
    }

    pub fn append(&mut self, own: Sequence, layer: u32, tag: u8) {
        self.cache.append(own, Layer(layer), &[tag; TOKENS as usize * ROW]).unwrap();
    }

    /// Keys to place: bytes of this value.
    pub fn keys(&self, tag: u8) -> Slice {
        let bytes = [tag; TOKENS as usize * KEY];
        let keys = self.memory.part(u64::from(tag) * bytes.len() as u64, bytes.len() as u64).unwrap();
        self.device.write(keys, &bytes).unwrap();
        keys
    }

    pub fn place(&mut self, own: Sequence, layer: u32, keys: Slice, stream: Stream) -> Ticket {
        self.cache.place_index_keys(own, Layer(layer), 0, keys, stream).unwrap()
    }

    fn read(&self, slice: Slice) -> Vec<u8> {
        let mut read = vec![0; slice.bytes() as usize];
        self.device.read(slice, &mut read).unwrap();
        read
    }

    /// Enqueues on `main` what the indexer of a step reads: the keys of a layer. Returns where it puts them.
    pub fn index(&self, layer: u32) -> Slice {
        let keys = self.cache.index_keys(Layer(layer)).unwrap();
        let to = self.memory.part(READ + u64::from(layer) * keys.bytes(), keys.bytes()).unwrap();
        self.device.copy(self.main, keys, to).unwrap();
        to
    }

    /// Where the keys of a sequence are in those of a layer.
    fn places(&self, own: Sequence) -> Vec<usize> {
        let pages: Vec<u32> = self.cache.pages(own).unwrap().map(|(_, page)| page.0).collect();
        (0..TOKENS).map(|token| (pages[token as usize / 16] * 16 + token % 16) as usize * KEY).collect()
    }

    /// Whether the sequence's keys among those of a layer have this value.
    pub fn are_keys(&self, own: Sequence, layer: Slice, tag: u8) -> bool {
        let keys = self.read(layer);
        self.places(own).into_iter().all(|at| keys[at..at + KEY] == [tag; KEY])
    }

    /// Writes keys of layer 0 to a sequence's pages, as a writer from afar does.
    pub fn write_keys(&self, own: Sequence, tag: u8) {
        let keys = self.cache.index_keys(Layer(0)).unwrap();
        for at in self.places(own) {
            self.device.write(keys.part(at as u64, KEY as u64).unwrap(), &[tag; KEY]).unwrap();
        }
    }

    pub fn has_rows(&self, own: Sequence, layer: u32, tag: u8) -> bool {
        (0..TOKENS).all(|position| {
            let mut row = [0; ROW];
            self.cache.read_row(own, Layer(layer), position, &mut row).unwrap();
            row == [tag; ROW]
        })
    }

    /// The memory of a sequence's rows in a layer.
    pub fn rows(&self, own: Sequence, layer: u32) -> Vec<Slice> {
        let (rows, pages) = (self.cache.rows(Layer(layer)).unwrap(), self.cache.pages(own).unwrap());
        let pages: Vec<u32> = pages.map(|(page, _)| page.0).collect();
        let row = |token: u32| self.cache.geometry().host_offset(pages[token as usize / 16], token % 16);
        (0..TOKENS).map(|token| rows.part(row(token), ROW as u64).unwrap()).collect()
    }

    /// The next sequence, which takes the pages of one that has ended on `stream`: as soon as there are pages, or when
    /// that stream has run its work.
    pub fn next(&mut self, stream: Stream, both: &Both) -> Sequence {
        self.cache.reap(stream).unwrap();
        let next = self.arrive();
        both.count(next.is_ok());
        if let Ok(next) = next {
            return next;
        }
        self.sync(stream);
        self.cache.reap(stream).unwrap();
        self.arrive().unwrap()
    }

    /// Waits for a stream. Returns whether the device is sound.
    pub fn sync(&self, stream: Stream) -> bool {
        self.device.record(self.ended, stream).unwrap();
        // An event of a device that has failed is reached too.
        self.device.synchronize(self.ended).is_ok()
    }

    /// A step on `main` of one sequence whose rows and keys have this value. The indexer reads the keys of each layer,
    /// and attention the rows of the picks. Returns what is wrong, and the digest of the lane.
    pub fn step(&mut self, own: Sequence, layers: u32, tag: u8) -> (Wrong, u64) {
        let part = |at, bytes| self.memory.part(at, bytes).unwrap();
        let (selection, slots) = (part(SELECTION, 4 * K as u64), part(SLOTS, 4 * K as u64));
        let picks: Vec<u8> = PICKS.iter().flat_map(|pick| pick.to_le_bytes()).collect();
        self.device.write(selection, &picks).unwrap();
        let row = BatchRow { sequence: own, accepted: Accepted::Rows(0), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), 1, &[row], None, self.main).unwrap();
        let streams = Streams { resolve: self.main, gather: self.main };
        let mut attended = Vec::new();
        for layer in 0..layers {
            let keys = self.index(layer);
            let buffers = Buffers { selection, slots, split_indices: None };
            let call = LayerCall::whole(Layer(layer));
            self.cache.layer(&step, call, streams, buffers).unwrap();
            // Attention reads the slots.
            let slab = self.cache.slab(Layer(layer)).unwrap();
            let rows = self.attended.part(u64::from(layer) * slab.bytes(), slab.bytes()).unwrap();
            self.device.copy(self.main, slab, rows).unwrap();
            attended.push((keys, rows));
            self.cache.scatter(&step, call, self.main).unwrap();
        }
        self.cache.finish(&mut step, self.main).unwrap();
        self.sync(self.main);
        self.cache.retire(step, self.main).map_err(|unretired| unretired.error).unwrap();
        let slots = self.read(slots);
        let slots: Vec<usize> =
            slots.chunks(4).map(|slot| i32::from_le_bytes(slot.try_into().unwrap()) as usize).collect();
        let wrong = attended.into_iter().find_map(|(keys, rows)| {
            let rows = self.read(rows);
            let right = slots.iter().all(|slot| rows[slot * ROW..(slot + 1) * ROW] == [tag; ROW]);
            let wrong = (!right).then_some("attention read other rows");
            if self.are_keys(own, keys, tag) { wrong } else { Some("the indexer read other keys") }
        });
        (wrong, self.cache.digest(own).unwrap())
    }

    /// What is wrong when all has ended: everything is as free as at the start.
    pub fn check_free(&mut self) -> Wrong {
        for stream in [self.side, self.main, self.side, self.main] {
            self.sync(stream);
            self.cache.reap(self.main).unwrap();
        }
        let (start, end) = (&self.start, self.cache.stats());
        let is = |stats: &Stats| {
            (
                stats.sequences,
                stats.arriving,
                stats.withheld_pages,
                stats.free_host_pages,
                stats.free_index_pages,
            )
        };
        let slots = |stats: &Stats| (stats.free_lanes, stats.free_slots, stats.slots_in_use);
        if is(start) != is(&end) || slots(start) != slots(&end) {
            return Some("something is not free");
        }
        self.cache.validate().err().map(|_| "the cache is not valid")
    }
}

/// How many interleavings went each of two ways.
pub struct Both([Count; 2]);

impl Both {
    pub const fn new() -> Both {
        Both([Count::new(0), Count::new(0)])
    }

    pub fn count(&self, way: bool) {
        self.0[usize::from(way)].fetch_add(1, Order::Relaxed);
    }

    /// Checks that a model took both ways, and forgets it.
    pub fn check(&self) {
        let ways = self.0.each_ref().map(|way| way.swap(0, Order::Relaxed));
        assert!(ways.iter().all(|way| *way > 0), "one way was never taken: {ways:?}");
    }
}

/// Whether a number is the same in every interleaving.
pub fn is_same(seen: &OnceLock<u64>, number: u64) -> Wrong {
    (*seen.get_or_init(|| number) != number).then_some("it depends on the interleaving")
}
