//! An engine around a cache: its streams, its events in the order "none" (I0, I, R, G, P, A; S after P), its buffers,
//! and an attention that computes no values but checks that each row is the selected one. A layer that another one
//! selects for begins with G, after A of the layer before, and its A reads the slots of its group's R.
//!
//! `Device::call` enqueues all of the engine's own work, so the same code runs inline and, with a thread per stream, as
//! asynchronously as on a GPU.

use super::device::{self, TestDevice};
use super::model::Origin;
use forebay::check::watch::{Attention, Watch, bytes};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Event, ResolveOutput, Slice, StepRange, Stream};
use forebay::residency::QueryRange;
use forebay::{Buffers, Cache, Config, Geometry, Lane, Layer, LayerCall, Result, Step};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::run::{On, Setup};

/// Words of a stamp before its pattern.
const HEADER: usize = 8;

/// The bytes of a row: its writer, layer, position and generation; then a pattern of these to its last byte. A row that
/// is a mixture of two matches neither.
pub fn stamp(geometry: &Geometry, layer: u32, position: u32, origin: Origin) -> Vec<u8> {
    let Origin { owner, generation } = origin;
    let mut mixed = owner ^ (u64::from(generation) << 32 | u64::from(position)) ^ u64::from(layer) << 56;
    let header: [u32; HEADER] =
        [0x666F_7265, owner as u32, (owner >> 32) as u32, layer, position, generation, !position, !layer];
    let words = geometry.row_bytes() as usize / 4;
    // Most of a run is these: one allocation.
    let mut bytes = Vec::with_capacity(4 * words.max(HEADER));
    header.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    for place in HEADER..words {
        mixed = mixed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(place as u64);
        bytes.extend_from_slice(&((mixed >> 32) as u32).to_le_bytes());
    }
    bytes.truncate(4 * words);
    bytes
}

/// The bytes of an index key, made from the same values.
pub fn key(geometry: &Geometry, layer: u32, position: u32, origin: Origin) -> Vec<u8> {
    let mark = origin.owner.rotate_left(7) ^ u64::from(origin.generation) << 20 ^ u64::from(position) << 4;
    let bytes = (mark ^ u64::from(layer)).to_le_bytes();
    bytes.iter().copied().cycle().take(geometry.shape().index_key_bytes as usize).collect()
}

/// The result of a step as found at its end, on its own stream.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepDigest {
    pub step: u64,
    pub row: usize,
    pub digest: u64,
}

/// The findings of the engine's own calls, on any thread.
#[derive(Debug, Default)]
pub struct Found {
    /// Steps, and the errors that attention saw in them.
    pub wrong: Vec<(u64, String)>,
    pub digests: Vec<StepDigest>,
}

/// One micro-batch's streams, events and buffers.
#[derive(Debug)]
pub struct Micro {
    engine: Stream,
    resolve: Stream,
    gather: Stream,
    scatter: Stream,
    selected: Event,
    resolved: Event,
    gathered: Event,
    written: Event,
    scattered: Event,
    selection: Slice,
    slots: Slice,
    accepted: Slice,
}

/// An edge of the order that a control leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// A after G.
    Gathered,
    /// S after P.
    Written,
}

/// A stream that is held until this is dropped.
pub struct Held {
    clock: Option<(Arc<ClockDevice>, Stream)>,
    _held: Option<device::Held>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((clock, stream)) = &self.clock {
            clock.let_go(*stream).unwrap();
        }
    }
}

/// One layer call of a step: its selection, the rows that attention must read, and its writes.
#[derive(Clone, Debug)]
pub struct Work {
    pub step: u64,
    pub call: LayerCall,
    /// Whether the layer selects: else the selection is that of its group's first layer.
    pub selects: bool,
    pub selection: Vec<i32>,
    /// For each entry the row that attention must find, or none if it resolves to -1.
    pub expected: Vec<Option<Vec<u8>>>,
    /// Landing slots and their new contents.
    pub rows: Vec<(u32, Vec<u8>)>,
    /// Byte offsets in the layer's index keys and their new contents.
    pub keys: Vec<(u64, Vec<u8>)>,
    /// The engine forgets S.
    pub forgets: bool,
}

/// See the module's head.
#[derive(Debug)]
pub struct Engine {
    /// Access to the bytes.
    pub device: Arc<TestDevice>,
    /// When the enqueued work happens to them, by chance.
    pub clock: Option<Arc<ClockDevice>>,
    /// Checks the order of all enqueued work, if the setup asks for it.
    pub watch: Option<Arc<Watch>>,
    pub host: Stream,
    micro: Vec<Micro>,
    /// Taken in turn; more than are waited for at once, because a failed device makes no new ones.
    events: Vec<Event>,
    next_event: AtomicUsize,
    /// Never recorded: a query of it returns whether the device has failed.
    pub probe: Event,
    /// For controls.
    pub missing: Option<Edge>,
    pub found: Arc<Mutex<Found>>,
}

fn bytes_of(words: &[i32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Writes a row to its slot, run by run.
fn write_slot(device: &TestDevice, geometry: &Geometry, slab: Slice, slot: u32, row: &[u8]) {
    for piece in geometry.pieces(slot).iter().filter(|piece| piece.bytes > 0) {
        let range = slab.part(piece.slab, u64::from(piece.bytes)).unwrap();
        device.write(range, &row[piece.row as usize..][..piece.bytes as usize]).unwrap();
    }
}

/// Reads a slot's row, run by run; none for a slot outside the slab.
fn read_slot(device: &TestDevice, geometry: &Geometry, slab: Slice, slot: u32) -> Option<Vec<u8>> {
    let mut row = vec![0; geometry.row_bytes() as usize];
    for piece in geometry.pieces(slot).iter().filter(|piece| piece.bytes > 0) {
        let range = slab.part(piece.slab, u64::from(piece.bytes)).ok()?;
        device.read(range, &mut row[piece.row as usize..][..piece.bytes as usize]).unwrap();
    }
    Some(row)
}

/// A: every entry with a slot holds the row that is meant.
fn attend(
    device: &TestDevice,
    geometry: &Geometry,
    slab: Slice,
    slots: Slice,
    work: &Work,
) -> Option<String> {
    let mut returned = vec![0; slots.bytes() as usize];
    device.read(slots, &mut returned).unwrap();
    let returned = returned.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    for (index, (slot, expected)) in returned.zip(&work.expected).enumerate() {
        let right = match (slot, expected) {
            (-1, None) => true,
            (0.., Some(row)) => read_slot(device, geometry, slab, slot as u32).as_ref() == Some(row),
            _ => false,
        };
        if !right {
            let position = work.selection[index];
            let place = work.call;
            return Some(format!("{place:?} entry {index}: position {position} resolved to slot {slot}"));
        }
    }
    None
}

/// The part of a step that a call works on.
fn range(step: &Step, call: LayerCall) -> StepRange {
    let (first, count) = call.batch_rows.unwrap_or((0, step.rows()));
    let rows = match call.draft_pass {
        None => QueryRange { first: 0, count: step.query_rows() },
        Some(draft_pass) => QueryRange { first: draft_pass, count: 1 },
    };
    StepRange { micro_batch: step.micro_batch(), layer: call.layer, first, count, rows }
}

/// Access to the bytes, and the clock around the device, if the setup has one.
fn machine(setup: &Setup) -> (Arc<TestDevice>, Option<Arc<ClockDevice>>) {
    let Setup { on, options, without, .. } = *setup;
    let missing = without.into_iter().map(|number| number..number + 1);
    match on {
        On::Host => (TestDevice::new(options), None),
        On::Clock { seed } => {
            let device = TestDevice::host(HostOptions { fail_operation: None, ..options });
            let HostOptions { fail_operation, .. } = options;
            let options = ClockOptions { seed: Some(seed), fail_operation, ..ClockOptions::default() };
            let clock = ClockDevice::over(device.device(), options).unwrap();
            missing.for_each(|waits| clock.without_waits(waits));
            (device, Some(clock))
        }
        #[cfg(feature = "cuda")]
        On::Cuda { seed } => {
            let device = TestDevice::cuda(&HostOptions { threaded: false, ..options }, seed).unwrap();
            missing.for_each(|waits| device.without_waits(waits));
            (device, None)
        }
    }
}

impl Engine {
    /// An engine with a set of streams for each micro-batch.
    pub fn new(setup: &Setup, config: &Config) -> Engine {
        let Config { micro_batches, batch, query_rows, shape, .. } = config;
        let words = u64::from(batch * query_rows * shape.top_k);
        let Setup { watched, without, .. } = *setup;
        let (device, clock) = machine(setup);
        let base: Arc<dyn Device> = clock.clone().map_or(device.device(), |clock| clock);
        let (stream, event) = (|| base.stream().unwrap(), || base.event().unwrap());
        let micro = (0..*micro_batches).map(|_| Micro {
            engine: stream(),
            resolve: stream(),
            gather: stream(),
            scatter: stream(),
            selected: event(),
            resolved: event(),
            gathered: event(),
            written: event(),
            scattered: event(),
            selection: device.allocate(4 * words).unwrap(),
            slots: device.allocate(4 * words).unwrap(),
            accepted: device.allocate(4 * u64::from(*batch)).unwrap(),
        });
        let micro = micro.collect();
        let watch = watched.then(|| match without {
            Some(number) => Watch::without_wait(base.clone(), number),
            None => Watch::new(base.clone()),
        });
        let events = (0..64).map(|_| event()).collect();
        let next_event = AtomicUsize::new(0);
        Engine {
            probe: event(),
            host: stream(),
            micro,
            events,
            next_event,
            missing: None,
            found: Arc::default(),
            watch,
            clock,
            device,
        }
    }

    /// The device that runs the work.
    pub fn base(&self) -> Arc<dyn Device> {
        match &self.clock {
            Some(clock) => clock.clone(),
            None => self.device.device(),
        }
    }

    /// The number of operations that have run. A planned failure is numbered by it.
    pub fn operations(&self) -> u64 {
        self.clock.as_ref().map_or_else(|| self.device.operations(), |clock| clock.operations())
    }

    /// The waits enqueued so far, on a device that runs by chance.
    pub fn waits(&self) -> u64 {
        self.clock.as_ref().map_or_else(|| self.device.waits(), |clock| clock.waits())
    }

    /// For controls: leaves out the waits of these numbers, as if the caller had not made them.
    pub fn without_waits(&self, numbers: Range<u64>) {
        match &self.clock {
            Some(clock) => clock.without_waits(numbers),
            None => self.device.without_waits(numbers),
        }
    }

    /// The device on which work is enqueued.
    pub fn queue(&self) -> Arc<dyn Device> {
        match &self.watch {
            Some(watch) => watch.clone(),
            None => self.base(),
        }
    }

    /// Enqueues the engine's own work. It does not keep the device alive.
    fn call(&self, stream: Stream, work: impl Fn(&TestDevice) + Send + Sync + 'static) {
        let device = Arc::downgrade(&self.device);
        let run = move || {
            if let Some(device) = device.upgrade() {
                work(&device);
            }
        };
        self.base().call(stream, Arc::new(run)).unwrap();
    }

    /// An event that nothing waits for any more.
    pub fn event(&self) -> Event {
        self.events[self.next_event.fetch_add(1, Ordering::Relaxed) % self.events.len()]
    }

    fn order(&self, first: Stream, event: Event, then: Stream) {
        let queue = self.queue();
        queue.record(event, first).unwrap();
        queue.wait(then, event).unwrap();
    }

    /// The stream on which a micro-batch's steps are prepared and finished.
    pub fn stream(&self, micro: u32) -> Stream {
        self.micro.get(micro as usize).map_or(self.host, |m| m.engine)
    }

    /// The stream of a micro-batch's gathers.
    pub fn gathers(&self, micro: u32) -> Stream {
        self.micro[micro as usize].gather
    }

    /// The stream of a micro-batch's scatters.
    pub fn scatters(&self, micro: u32) -> Stream {
        self.micro[micro as usize].scatter
    }

    /// Holds a stream of a threaded device, or of a clock, until the result is dropped.
    pub fn hold(&self, stream: Stream) -> Held {
        let Some(clock) = &self.clock else {
            return Held { clock: None, _held: Some(self.device.hold(stream)) };
        };
        clock.hold(stream).unwrap();
        Held { clock: Some((clock.clone(), stream)), _held: None }
    }

    /// Lets time pass in which work that is not held may run.
    pub fn idle(&self) {
        if self.clock.is_none() && self.device.runs_by_itself() {
            return (0..1000).for_each(|_| std::thread::yield_now());
        }
        let (base, event) = (self.base(), self.probe);
        // A given driver runs by itself and needs real time.
        let looks =
            if self.clock.is_none() && self.device.is_remote() && device::is_given() { 10_000 } else { 20 };
        (0..looks).for_each(|_| assert!(base.query(event).is_ok()));
    }

    /// Waits until everything enqueued on a stream has run.
    pub fn drain(&self, stream: Stream) {
        let event = self.event();
        self.queue().record(event, stream).unwrap();
        self.wait(event);
    }

    /// Enqueues the device's tensor of accepted counts.
    pub fn accepted(&self, micro: u32, counts: &[u32]) -> Slice {
        let tensor = self.micro[micro as usize].accepted;
        if let Some(watch) = &self.watch {
            watch.engine(self.stream(micro), "sampler", &[bytes(&tensor, true)]).unwrap();
        }
        let mut words: Vec<u8> = counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        words.resize(tensor.bytes() as usize, 0xEE);
        self.call(self.stream(micro), move |device| device.write(tensor, &words).unwrap());
        tensor
    }

    /// I0 and I on the engine's stream, and R after them.
    fn select(&self, cache: &Cache, step: &Step, work: &Arc<Work>, buffers: Buffers) -> Result<()> {
        let (m, keys) = (&self.micro[step.micro_batch().index()], cache.index_keys(work.call.layer)?);
        if let Some(watch) = &self.watch {
            watch.index(m.engine, &buffers.selection)?;
        }
        let index = Arc::clone(work);
        self.call(m.engine, move |device| {
            for (offset, key) in &index.keys {
                device.write(keys.part(*offset, key.len() as u64).unwrap(), key).unwrap();
            }
            device.write(buffers.selection, &bytes_of(&index.selection)).unwrap();
        });
        self.order(m.engine, m.selected, m.resolve);
        cache.resolve(step, work.call, m.resolve, buffers)
    }

    /// One layer call: I0 and I, R, G, P, A on the engine's stream; S after P on its own.
    pub fn layer(&self, cache: &Cache, step: &Step, work: Work) -> Result<()> {
        let (m, call) = (&self.micro[step.micro_batch().index()], work.call);
        let range = range(step, call);
        // The calls of a group's layers may divide the batch in other ways, so each batch row has a place of its own.
        let bytes = 4 * work.selection.len() as u64;
        let place = bytes / u64::from(range.count) * u64::from(range.first);
        let buffers = Buffers {
            selection: m.selection.part(place, bytes)?,
            slots: m.slots.part(place, bytes)?,
            split_indices: None,
        };
        let (slab, geometry) = (cache.slab(call.layer)?, *cache.geometries().of(call.layer.index()));
        let work = Arc::new(work);

        if work.selects {
            self.select(cache, step, &work, buffers)?;
            self.order(m.resolve, m.resolved, m.gather);
        } else {
            self.order(m.engine, m.selected, m.gather);
        }
        cache.gather(step, call, 0, m.gather)?;
        if self.missing != Some(Edge::Gathered) {
            self.order(m.gather, m.gathered, m.engine);
        }

        if let Some(watch) = &self.watch {
            watch.land(cache.pools(), m.engine, &range)?;
        }
        let project = Arc::clone(&work);
        self.call(m.engine, move |device| {
            for (slot, row) in &project.rows {
                write_slot(device, &geometry, slab, *slot, row);
            }
        });
        if self.missing != Some(Edge::Written) {
            self.order(m.engine, m.written, m.scatter);
        }
        if !work.forgets {
            self.store(cache, step, call)?;
        }

        if let Some(watch) = &self.watch {
            let output = ResolveOutput { slots: buffers.slots, split_indices: None };
            watch.attend(cache.pools(), m.engine, &range, Attention::All, &output)?;
        }
        let found = Arc::clone(&self.found);
        self.call(m.engine, move |device| {
            if let Some(wrong) = attend(device, &geometry, slab, buffers.slots, &work) {
                found.lock().unwrap().wrong.push((work.step, wrong));
            }
        });
        Ok(())
    }

    /// S, after P.
    pub fn store(&self, cache: &Cache, step: &Step, call: LayerCall) -> Result<()> {
        let m = &self.micro[step.micro_batch().index()];
        cache.scatter(step, call, m.scatter)?;
        self.queue().record(m.scattered, m.scatter)
    }

    /// Joins every S, notes the lanes' digests, and finishes. Returns an event after all of it.
    pub fn finish(&self, cache: &mut Cache, step: &mut Step, lanes: Vec<u32>) -> Result<Event> {
        let m = &self.micro[step.micro_batch().index()];
        self.queue().wait(m.engine, m.scattered)?;
        for (row, lane) in lanes.into_iter().enumerate() {
            let (found, step) = (Arc::clone(&self.found), step.number());
            let note = move |digest| found.lock().unwrap().digests.push(StepDigest { step, row, digest });
            let base = self.base();
            self.device.digest_in(&*base, (cache.pools(), Lane(lane)), m.engine, note)?;
        }
        cache.finish(step, m.engine)?;
        let done = self.event();
        self.queue().record(done, m.engine)?;
        Ok(done)
    }

    /// Waits until the host-issued work so far has ended.
    pub fn settle(&self) {
        self.drain(self.host);
    }

    /// Waits for an event. A failed device reports its failure by every ticket and step; here only the end matters.
    pub fn wait(&self, event: Event) {
        let _ = self.queue().synchronize(event);
    }

    /// Writes an index key of a prompt row, now.
    pub fn write_key(&self, cache: &Cache, layer: Layer, offset: u64, key: &[u8]) {
        let keys = cache.index_keys(layer).unwrap().part(offset, key.len() as u64).unwrap();
        self.device.write(keys, key).unwrap();
    }

    /// Reads an index key, now.
    pub fn read_key(&self, cache: &Cache, layer: Layer, offset: u64) -> Vec<u8> {
        let bytes = cache.geometry().shape().index_key_bytes;
        let keys = cache.index_keys(layer).unwrap().part(offset, u64::from(bytes)).unwrap();
        let mut key = vec![0; bytes as usize];
        self.device.read(keys, &mut key).unwrap();
        key
    }
}
