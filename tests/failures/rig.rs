//! A small cache whose rows identify themselves, and gates that hold a stream back until the test releases it.

use crate::device::{Held, TestDevice, is_given};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream, Ticket};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Error, HostPage, Layer, LayerCall, Memory};
use forebay::{BatchRow, MicroBatch, Open, Sequence, Shape, Step, Streams, WarmUp};
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

/// Positions that a query row selects.
pub const K: usize = 8;
/// Bytes of a row, in two runs.
pub const ROW: usize = 32;

/// Two layers, pages of 16 tokens.
pub fn config(lanes: u32, max_tokens: u32) -> Config {
    let shape = Shape {
        layers: 2,
        draft_layers: 0,
        runs: [20, 12],
        host_stride: 0,
        device_block_align: 1,
        index_key_bytes: 8,
        page_tokens: 16,
        top_k: K as u32,
        lone_layers: 0,
        group_layers: 0,
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config { memory, ..Config::new(shape, lanes, max_tokens, 16) }
}

/// A row of `tag` in one layer at one position.
pub fn stamp(tag: u32, layer: u32, position: u32) -> [u8; ROW] {
    let mut row = [0; ROW];
    for (n, word) in row.chunks_exact_mut(4).enumerate() {
        let mixed = tag.wrapping_mul(0x9E37_79B9) ^ (layer << 28) ^ (position << 4) ^ n as u32;
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    row
}

/// A device and its memory: a thread for each stream, streams that run at once, or a clock that delays and reorders by
/// chance.
#[derive(Clone)]
pub struct Machine {
    pub memory: Arc<TestDevice>,
    clock: Option<Arc<ClockDevice>>,
}

impl Machine {
    pub fn host(threaded: bool) -> Machine {
        let memory = TestDevice::new(HostOptions { threaded, ..HostOptions::default() });
        Machine { memory, clock: None }
    }

    /// By this seed, and without some of the waits.
    pub fn clock(seed: u64, without: Range<u64>) -> Machine {
        let memory = TestDevice::host(HostOptions::default());
        let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
        let clock = ClockDevice::over(memory.device(), options).unwrap();
        clock.without_waits(without);
        Machine { memory, clock: Some(clock) }
    }

    /// The CUDA device on a stand-in that delays and reorders by this seed, without some of the waits.
    #[cfg(feature = "cuda")]
    pub fn cuda(seed: u64, without: Range<u64>) -> Machine {
        let memory = TestDevice::cuda(&HostOptions::default(), Some(seed)).unwrap();
        memory.without_waits(without);
        Machine { memory, clock: None }
    }

    /// Waits enqueued so far, if chance decides what they order.
    fn waits(&self) -> u64 {
        self.clock.as_ref().map_or_else(|| self.memory.waits(), |clock| clock.waits())
    }

    pub fn device(&self) -> Arc<dyn Device> {
        match &self.clock {
            Some(clock) => clock.clone(),
            None => self.memory.device(),
        }
    }

    pub fn device_and_stream(&self) -> (Arc<dyn Device>, Stream) {
        let device = self.device();
        let stream = device.stream().unwrap();
        (device, stream)
    }

    /// Queries that take long enough for all work that is not held to run.
    pub fn looks(&self) -> u32 {
        let by_itself = self.memory.runs_by_itself() || (self.memory.is_remote() && is_given());
        if self.clock.is_some() || !by_itself { 30 } else { 10_000 }
    }

    /// Holds a stream from now on.
    pub fn gate(&self, stream: Stream) -> Gate {
        match &self.clock {
            Some(clock) => {
                clock.hold(stream).unwrap();
                Gate::Clock(clock.clone(), stream)
            }
            None => Gate::Held(Mutex::new(Some(self.memory.hold(stream)))),
        }
    }

    /// Blocks until `stream` has run its enqueued work.
    pub fn sync(&self, stream: Stream) {
        let device = self.device();
        let event = device.event().unwrap();
        device.record(event, stream).unwrap();
        let _ = device.synchronize(event);
    }

    pub fn bytes(&self, slice: Slice) -> Vec<u8> {
        let mut bytes = vec![0; slice.bytes() as usize];
        self.memory.read(slice, &mut bytes).unwrap();
        bytes
    }
}

/// Seeds of the clock.
fn seeds() -> Range<u64> {
    0..if std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1") { 5_000 } else { 200 }
}

/// Runs a test on threads, where its gates force the order, and for every seed of the clock and of the stand-in.
pub fn everywhere(test: impl Fn(Machine)) {
    test(Machine::host(true));
    seeds().for_each(|seed| test(Machine::clock(seed, 0..0)));
    #[cfg(feature = "cuda")]
    if crate::device::driver_is_there() {
        // A given driver has no seeds.
        let seeds = if is_given() { 1 } else { seeds().end / 10 };
        (0..seeds).for_each(|seed| test(Machine::cuda(seed, 0..0)));
    }
}

/// The control of a test whose order comes from waits: without one of them it fails, for some seed.
pub fn some_wait_is_missed(test: impl Fn(Machine)) {
    is_missed(&test, Machine::clock);
    #[cfg(feature = "cuda")]
    if crate::device::driver_is_there() {
        is_missed(&test, Machine::cuda);
    }
}

fn is_missed(test: &impl Fn(Machine), machine: impl Fn(u64, Range<u64>) -> Machine) {
    let whole = machine(0, 0..0);
    test(whole.clone());
    let fails = |seed, wait| catch_unwind(AssertUnwindSafe(|| test(machine(seed, wait..wait + 1)))).is_err();
    let seeds = if whole.clock.is_none() && is_given() { 1 } else { seeds().end / 10 };
    let missed = |wait| (0..seeds).any(|seed| fails(seed, wait));
    assert!((0..whole.waits()).any(missed), "none of {} waits is missed", whole.waits());
}

/// Holds a stream from its creation until it is opened or dropped.
pub enum Gate {
    Clock(Arc<ClockDevice>, Stream),
    Held(Mutex<Option<Held>>),
}

impl Gate {
    pub fn open(&self) {
        match self {
            Gate::Clock(clock, stream) => clock.let_go(*stream).unwrap(),
            Gate::Held(held) => drop(held.lock().unwrap().take()),
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// One batch row.
pub fn row(sequence: Sequence, accepted: u32, query_rows: u32) -> BatchRow {
    BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows }
}

/// The cache, its device, and the tag of every position of every sequence.
pub struct Rig {
    pub cache: Cache,
    pub device: Arc<dyn Device>,
    pub machine: Machine,
    pub stream: Stream,
    pub tags: HashMap<Sequence, Vec<u32>>,
    /// The tickets of all joins.
    pub joins: Vec<Ticket>,
    selection: Slice,
    slots: Slice,
    /// A selection of nothing, and its slots.
    nothing: [Slice; 2],
}

impl Rig {
    pub fn new(config: Config, threaded: bool) -> Rig {
        Rig::on(Machine::host(threaded), config)
    }

    pub fn on(machine: Machine, config: Config) -> Rig {
        let device = machine.device();
        let bytes = u64::from(config.query_rows) * K as u64 * 4;
        let whole = bytes * u64::from(config.batch);
        let nothing = [(); 2].map(|()| device.allocate(whole).unwrap());
        machine.memory.write(nothing[0], &vec![0xFF; whole as usize]).unwrap();
        Rig {
            nothing,
            stream: device.stream().unwrap(),
            selection: device.allocate(bytes).unwrap(),
            slots: device.allocate(bytes).unwrap(),
            cache: Cache::new(config, device.clone()).unwrap(),
            device,
            machine,
            tags: HashMap::new(),
            joins: Vec::new(),
        }
    }

    pub fn sync(&self) {
        self.machine.sync(self.stream);
    }

    /// The request of a sequence of these tokens.
    pub fn asks(prompt: u32, promised: u32) -> Open {
        Open { prompt, promised, budget: Budget::Slots(16), bring_up: BringUp::Whole }
    }

    /// Opens a sequence, appends its prompt and enqueues its join.
    pub fn admit(&mut self, prompt: u32, promised: u32, tag: u32) -> Sequence {
        let sequence = self.cache.open(&Rig::asks(prompt, promised)).unwrap();
        for layer in 0..self.cache.geometry().layers() {
            let rows: Vec<u8> = (0..prompt).flat_map(|p| stamp(tag, layer, p)).collect();
            self.cache.append(sequence, Layer(layer), &rows).unwrap();
        }
        self.joins.push(self.cache.join(sequence, self.stream, WarmUp::default()).unwrap());
        self.tags.insert(sequence, vec![tag; prompt as usize]);
        sequence
    }

    /// [`Rig::admit`], then waits.
    pub fn open(&mut self, prompt: u32, promised: u32, tag: u32) -> Sequence {
        let sequence = self.admit(prompt, promised, tag);
        self.sync();
        sequence
    }

    /// Forks without waiting.
    pub fn fork(&mut self, parent: Sequence, promised: u32) -> Sequence {
        let (child, _ticket) = self.cache.fork(parent, &Rig::asks(0, promised), self.stream).unwrap();
        self.tags.insert(child, self.tags[&parent].clone());
        child
    }

    /// Truncates and waits.
    pub fn truncate(&mut self, sequence: Sequence, length: u32) {
        let _ticket = self.cache.truncate(sequence, length, self.stream).unwrap();
        self.tags.get_mut(&sequence).unwrap().truncate(length as usize);
        self.sync();
    }

    pub fn host_pages(&self, sequence: Sequence) -> Vec<HostPage> {
        self.cache.pages(sequence).unwrap().map(|(host, _)| host).collect()
    }

    /// The row in `slot`.
    pub fn slab_row(&self, layer: u32, slot: u32) -> Vec<u8> {
        let slab = self.cache.slab(Layer(layer)).unwrap();
        let mut row = vec![0; ROW];
        for piece in self.cache.geometry().pieces(slot) {
            let bytes = &mut row[piece.row as usize..][..piece.bytes as usize];
            self.machine.memory.read(slab.part(piece.slab, piece.bytes.into()).unwrap(), bytes).unwrap();
        }
        row
    }

    /// Writes the new row of one query row to its landing slot.
    pub fn land(&self, sequence: Sequence, query_row: u32, layer: u32, row: &[u8]) {
        let slot = self.cache.landing_slot(sequence, query_row).unwrap();
        let slab = self.cache.slab(Layer(layer)).unwrap();
        for piece in self.cache.geometry().pieces(slot) {
            let bytes = &row[piece.row as usize..][..piece.bytes as usize];
            self.machine.memory.write(slab.part(piece.slab, piece.bytes.into()).unwrap(), bytes).unwrap();
        }
    }

    /// Begins a step of one sequence that is as wide as configured.
    pub fn prepare(&mut self, sequence: Sequence, accepted: u32) -> Step {
        let width = self.cache.config().query_rows;
        let rows = [row(sequence, accepted, width)];
        self.cache.prepare(MicroBatch(0), width, &rows, None, self.stream).unwrap()
    }

    /// Enqueues one call's resolve and gather of `positions`.
    pub fn select(&self, step: &Step, call: LayerCall, positions: &[i32]) -> Buffers {
        let bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_le_bytes()).collect();
        let size = bytes.len() as u64;
        let selection = self.selection.part(0, size).unwrap();
        let buffers = Buffers { selection, slots: self.slots.part(0, size).unwrap(), split_indices: None };
        self.machine.memory.write(selection, &bytes).unwrap();
        let streams = Streams { resolve: self.stream, gather: self.stream };
        self.cache.layer(step, call, streams, buffers).unwrap();
        buffers
    }

    /// The due calls of layers that a test does not look at: they select nothing, and the contents of the landing slots
    /// are stored.
    pub fn rest(&self, step: &Step, layers: impl IntoIterator<Item = u32>, stream: Stream) {
        let words = u64::from(step.rows() * step.query_rows()) * 4 * K as u64;
        let [selection, slots] = self.nothing.map(|slice| slice.part(0, words).unwrap());
        let buffers = Buffers { selection, slots, split_indices: None };
        for call in layers.into_iter().map(|layer| LayerCall::whole(Layer(layer))) {
            self.cache.layer(step, call, Streams { resolve: stream, gather: stream }, buffers).unwrap();
            self.cache.scatter(step, call, stream).unwrap();
        }
    }

    /// [`Rig::rest`] of all layers, on the rig's stream.
    pub fn all(&self, step: &Step) {
        self.rest(step, 0..self.cache.geometry().layers(), self.stream);
    }

    /// The slots that a call returned.
    pub fn slots(&self, buffers: Buffers) -> Vec<i32> {
        let mut bytes = vec![0; buffers.slots.bytes() as usize];
        self.machine.memory.read(buffers.slots, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|w| i32::from_le_bytes(w.try_into().unwrap())).collect()
    }

    /// Every selected committed position is in its slot, with its own bytes.
    pub fn check_slots(&self, sequence: Sequence, layer: u32, positions: &[i32], slots: &[i32]) {
        let tags = &self.tags[&sequence];
        for (position, slot) in positions.iter().zip(slots) {
            let tag = tags[*position as usize];
            let row = self.slab_row(layer, *slot as u32);
            assert_eq!(
                row,
                stamp(tag, layer, *position as u32),
                "layer {layer}, position {position}, slot {slot}"
            );
        }
    }

    /// Every committed row of the total pool has the bytes that were written.
    pub fn check_total(&self, sequence: Sequence) {
        let committed = self.cache.length(sequence).unwrap().committed;
        for layer in 0..self.cache.geometry().layers() {
            for position in 0..committed {
                let mut bytes = [0; ROW];
                self.cache.read_row(sequence, Layer(layer), position, &mut bytes).unwrap();
                let tag = self.tags[&sequence][position as usize];
                assert_eq!(bytes, stamp(tag, layer, position), "layer {layer}, position {position}");
            }
        }
    }

    /// A whole step of one sequence, with every slot checked; its new rows have `tag`. Returns the length.
    pub fn decode(&mut self, sequence: Sequence, accepted: u32, tag: u32) -> Result<u32, Error> {
        let length = self.cache.length(sequence)?.committed + accepted;
        let width = self.cache.config().query_rows;
        self.tags.get_mut(&sequence).unwrap().truncate(length as usize);
        let mut step = self.prepare(sequence, accepted);
        for layer in 0..self.cache.geometry().layers() {
            self.sync();
            let position = |n: u32| (tag.wrapping_mul(31).wrapping_add(n * 7 + layer) % length.max(1)) as i32;
            let positions: Vec<i32> = (0..width * K as u32).map(position).collect();
            let positions = if length == 0 { vec![-1; positions.len()] } else { positions };
            let buffers = self.select(&step, LayerCall::whole(Layer(layer)), &positions);
            self.sync();
            if length > 0 {
                self.check_slots(sequence, layer, &positions, &self.slots(buffers));
            }
            for query_row in 0..width {
                self.land(sequence, query_row, layer, &stamp(tag, layer, length + query_row));
            }
            self.cache.scatter(&step, LayerCall::whole(Layer(layer)), self.stream)?;
        }
        self.tags.get_mut(&sequence).unwrap().resize((length + width) as usize, tag);
        self.cache.finish(&mut step, self.stream)?;
        self.sync();
        Ok(self.cache.retire(step, self.stream).map_err(|u| u.error)?.lengths()[0])
    }

    /// Free pages, slots and lanes, and the sequences and steps that still exist.
    pub fn gauges(&self) -> [u32; 6] {
        let stats = self.cache.stats();
        [
            stats.sequences,
            stats.steps_in_flight,
            stats.free_host_pages,
            stats.free_index_pages,
            stats.free_slots,
            stats.free_lanes,
        ]
    }
}
