//! The public interface, [`Cache`]: one cache of one model on one device, driven by one owner.
//!
//! # The life of a sequence
//!
//! | state | entered by | calls that change the sequence, besides `close` and `abort` |
//! |---|---|---|
//! | arriving | [`Cache::arrive`] | [`append`], [`keys`], [`extend`], [`truncate`], [`join`], [`join_early`] |
//! | filling | [`open`], [`open_shared`] | [`append`], [`extend`], [`truncate`], [`join`], [`join_early`], [`park`] |
//! | joining | a [`join`] that leaves rows to gather (its limit, or the device refused) | [`join_more`], to the end |
//! | warming | [`join_early`] | [`append`], [`keys`], [`Cache::warm_layer`] to the last layer |
//! | running | joins, [`resume`], fork, `truncate` | steps, [`resize`], [`truncate`], [`publish`], [`park`], fork |
//! | parked | [`park`] | [`append`], [`keys`] if it arrived, [`extend`], [`truncate`], [`resume`] |
//! | truncating | a `truncate` that the device refused half-way | [`truncate`] |
//! | failed | a failed step | [`truncate`] |
//! | closing | [`Cache::close`], [`Cache::abort`] with work in flight | none: its handle is no longer valid |
//!
//! `append` is any of [`append`], [`append_in_place`] and [`Cache::append_layer_in_place`].
//!
//! [`append`]: Cache::append
//! [`keys`]: Cache::place_index_keys
//! [`extend`]: Cache::extend
//! [`open`]: Cache::open
//! [`open_shared`]: Cache::open_shared
//! [`park`]: Cache::park
//! [`resume`]: Cache::resume
//! [`append_in_place`]: Cache::append_in_place
//! [`join`]: Cache::join
//! [`join_early`]: Cache::join_early
//! [`join_more`]: Cache::join_more
//! [`truncate`]: Cache::truncate
//! [`publish`]: Cache::publish
//! [`resize`]: Cache::resize
//!
//! # What it promises, and how
//!
//! Opening a sequence takes everything that its steps will need: host pages and index-key pages for the prompt, the
//! promised tokens and the rows in flight, slots in every layer, and a lane. So a step allocates nothing and cannot run
//! out of memory. Some calls take more: a `truncate` into shared pages, which replaces them by fresh pages, a `resize`
//! to a larger budget, an `extend`, a `resume`, which takes the lane and slots that `park` gave back, and the `join` or
//! `join_early` of an arriving sequence, which has pages and nothing else until then (`arrive`).
//!
//! After a sequence is closed, the cache takes back its resources once the last step with the sequence has been retired
//! and every ticket of its work has ended. That holds for steps that completed and for steps that were abandoned.
//! Pages to which others may still write wait for more than that: `abort` withholds them. If
//! the device refuses a call half-way, the cache takes back the resources of the call once the stream has passed the
//! operations that the call enqueued (`settle`).
//!
//! # What it does not do
//!
//! It has no thread and no clock. It needs no lock, because a call that changes it takes `&mut self`. Besides
//! [`Cache::new`] and `capture`, which wait for work on the device's own stream, only `digest` and `validate`, which
//! are for checks, wait for a GPU. It never synchronises an engine's stream. It computes no attention.

mod abort;
mod admit;
mod arrive;
mod budgets;
mod captured;
mod close;
mod config;
mod decode;
mod early;
mod extend;
mod footprint;
mod overlapped;
mod park;
mod places;
mod prefetch;
mod prefix;
mod record;
mod resize;
mod sequence;
mod settle;
mod sharing;
mod withheld;

use std::sync::Arc;

use crate::device::{Device, Event, Expected, PoolLayout, Pools, Slice, Stream, follows};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, Geometry};
use crate::ids::{HostPage, IndexPage, Layer, Sequence};
use crate::os::{self, Fallback, Faults, NoFaults};
use crate::overlap::{Run, Schedule};
use crate::sparse::SparsePool;
use crate::stats::Stats;
use crate::step::Ring;
use crate::total::memory::{Memory, Overcommits};
use crate::total::withheld::WithheldPages;
use crate::total::{CAPACITY_MAX, IndexPool, PrefixIndex, Secret, TotalPool};

pub use admit::Open;
pub use captured::{Capture, Captured};
pub use config::{Config, Slots};
pub use footprint::Footprint;
pub use overlapped::Layers;

use places::Places;
use record::{Record, State};
use sharing::Sharing;

/// A KV cache that may exceed its device's memory, for one model on one device.
///
/// Pinned host memory holds every row of every open sequence, in pages: the *total pool*. The device holds, for each
/// sequence, the rows that sparse attention read last, in *slots*: the *sparse pool*. For each token that it decodes,
/// a model with an indexer selects a few thousand positions (its top-k indices). The cache maps each selected position
/// to the slot that holds its row on the device, and fetches the rows that have no slot. So the rows of a sequence
/// take only its budget of slots on the device, whatever its length. Its index keys, its page table and its part of
/// the residency tables still grow with the length that it was opened for.
///
/// **A decode loop** opens a sequence ([`open`](Cache::open)), stores the rows that prefill computed
/// ([`append`](Cache::append)) and adds the sequence to the batch ([`join`](Cache::join)). Each step is then:
///
/// 1. [`prepare`](Cache::prepare);
/// 2. in each layer, [`layer`](Cache::layer) after the engine's top-k, then the engine's attention over the slots that
///    `layer` returned, and [`scatter`](Cache::scatter) after the engine has written the new rows;
/// 3. [`finish`](Cache::finish);
/// 4. [`retire`](Cache::retire), once the device has finished the step. It says whether the step's tokens may be
///    used.
///
/// [`close`](Cache::close) ends a sequence at any time.
///
/// The calls of this loop enqueue work on the engine's streams, or check whether work has ended. None of them waits.
/// This example decodes one token, in a model of one layer that selects four positions:
///
/// ```
/// use forebay::device::host::{HostDevice, HostOptions};
/// use forebay::device::Device;
/// use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
/// use forebay::{Open, BatchRow, Shape, Streams, WarmUp};
///
/// # fn main() -> forebay::Result<()> {
/// // The device that runs on the host: no GPU is needed to try a loop.
/// let device = HostDevice::new(HostOptions::default());
/// let stream = device.stream()?;
/// let shape = Shape { layers: 1, top_k: 4, ..Shape::DEEPSEEK_V3_2 };
/// // One sequence of up to 128 tokens, 64 of them on the device. A server keeps the default: locked memory.
/// let memory = Memory { huge: false, populate: false, lock: false, node: None };
/// let mut cache = Cache::new(Config { memory, ..Config::new(shape, 1, 128, 64) }, device.clone())?;
///
/// // A prompt of 100 tokens, whose rows are 656 bytes each.
/// let open = Open { prompt: 100, promised: 28, budget: Budget::Slots(64), bring_up: BringUp::Nothing };
/// let sequence = cache.open(&open)?;
/// cache.append(sequence, Layer(0), &[7; 100 * 656])?;
/// let _ready = cache.join(sequence, stream, WarmUp::default())?;
///
/// // The top-k indices that the engine has written, and a buffer for the slots: 4 x i32 for the one query row.
/// let (selection, slots) = (device.allocate(16)?, device.allocate(16)?);
/// let picks: Vec<u8> = [3_i32, 50, 99, -1].into_iter().flat_map(i32::to_le_bytes).collect();
/// device.write(selection, &picks)?;
///
/// let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
/// let mut step = cache.prepare(MicroBatch(0), 1, &[row], None, stream)?;
/// let (call, streams) = (LayerCall::whole(Layer(0)), Streams { resolve: stream, gather: stream });
/// cache.layer(&step, call, streams, Buffers { selection, slots, split_indices: None })?;
/// // Here the engine writes the new row to `cache.landing_slot(sequence, 0)` of `cache.slab(Layer(0))`, and its
/// // attention reads the slots.
/// cache.scatter(&step, call, stream)?;
/// cache.finish(&mut step, stream)?;
/// let retired = cache.retire(step, stream).map_err(|unretired| unretired.error)?;
/// assert_eq!(retired.total(), (0, 3), "three rows were fetched; the next step finds them");
///
/// cache.close(sequence, stream)?;
/// # Ok(())
/// # }
/// ```
///
/// **What it does not do.** It has no thread, no lock and no clock of its own: `&mut self` is the lock. It computes
/// neither attention nor top-k. It does not order the work that the engine enqueues on other streams, and it never
/// synchronises a stream. It does not grow: [`Cache::new`] takes all memory. The device keeps that memory until the
/// device is dropped. `docs/integration.md` follows a whole engine through these calls; `examples/decode_loop.rs` and
/// `examples/integration.rs` are complete programs.
#[derive(Debug)]
pub struct Cache {
    config: Config,
    geometry: Geometries,
    device: Arc<dyn Device>,
    pools: Pools,
    total: TotalPool,
    index: IndexPool,
    prefix: PrefixIndex,
    /// The key of the block hashes.
    secret: Secret,
    sparse: SparsePool,
    ring: Ring,
    records: Vec<Record>,
    /// Recorded after a lane was last emptied. The next sequence in a lane waits for it.
    left: Event,
    /// The places of parked sequences' newest rows, and the event recorded after one was last read.
    places: Places,
    warmed: Event,
    /// The pages of aborted sequences that writers may still reach.
    withheld: WithheldPages<withheld::Pages>,
    /// One event per record, recorded after the work that the host issued for its sequence alone.
    ready: Vec<Event>,
    /// One event per micro-batch, recorded after its last step. Its next step waits for it, and so does later work for
    /// its sequences.
    stepped: Vec<Event>,
    /// For each micro-batch the events of its layers.
    schedules: Vec<Schedule>,
    /// The data that is the same for all layers of a step, with capacity for every micro-batch.
    runs: Vec<Run>,
    fallbacks: Vec<Fallback>,
    stats: Stats,
    /// Room for the budgets of a resize, one for each index group.
    budgets: Vec<u32>,
    /// The shared budgets, if the configuration asks for them.
    sharing: Option<Box<Sharing>>,
    /// The number of sequences opened.
    opened: u64,
    /// The number of `prepare` calls, used to find a sequence that one call names twice.
    attempt: u64,
}

impl Cache {
    /// Makes a cache and takes all its memory. The device keeps this memory until the device is dropped, even after
    /// the cache is gone. It also keeps the memory that was taken before an error: try again on a new device.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] and [`Kind::Overflow`] name the field. [`Kind::OutOfMemory`] gives the size. If the
    /// machine has less memory than the cache would take, the error gives `wanted` and `available`, and no memory has
    /// been taken (unless [`Config::overcommit`] is set).
    pub fn new(config: Config, device: Arc<dyn Device>) -> Result<Cache> {
        Cache::with_faults(config, device, &NoFaults)
    }

    /// Like [`Cache::new`], with faults injected into the system calls that take the host memory.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn with_faults(config: Config, device: Arc<dyn Device>, faults: &dyn Faults) -> Result<Cache> {
        let overcommits = Overcommits(faults);
        let faults: &dyn Faults = if config.overcommit { &overcommits } else { faults };
        config.check_machine(&*device, faults)?;
        Cache::take(config, device, faults).map_err(|error| match error.kind() {
            Kind::OutOfMemory => {
                error.hint("ask for less memory, on a new device: this one keeps the memory that was taken")
            }
            _ => error,
        })
    }

    fn take(config: Config, device: Arc<dyn Device>, faults: &dyn Faults) -> Result<Cache> {
        let geometry = config.geometries()?;
        config.check(&geometry)?;
        let sparse_config = config.sparse(&geometry)?;
        // Rows that are never stored need no pages.
        let memory = if config.residency_only { Memory::LAZY } else { config.memory };
        let total = TotalPool::new(geometry.clone(), config.host_pages, memory, &*device, faults)?;
        let mut fallbacks = total.fallbacks().to_vec();
        let index = IndexPool::new(&geometry, config.index_pages, &*device)?;
        let prefix = PrefixIndex::new(config.host_pages.min(config.index_pages).min(CAPACITY_MAX))?;
        let mut secret = Secret([0; 32]);
        os::random(&mut secret.0, faults)?;
        let sparse = SparsePool::new(&geometry, &sparse_config, &*device)?;
        let ring = Ring::new(config.ring(&geometry), config.memory.lock, &*device, faults, &mut fallbacks)?;
        let pools = device.attach(PoolLayout {
            geometry: geometry.clone(),
            tables: sparse.tables().to_vec(),
            slabs: sparse.slabs().to_vec(),
            rows: total.layers().to_vec(),
            lane_pages: geometry.pages(sparse_config.tokens),
            micro_batches: config.micro_batches,
            batch: config.batch,
            expected: if config.residency_only { Expected::Resolved } else { Expected::Whole },
        })?;
        let place = config.place_bytes(&geometry);
        let memory =
            if config.parked > 0 { Some(device.allocate(place * u64::from(config.parked))?) } else { None };
        Ok(Cache {
            left: device.event()?,
            places: Places::new(memory, place, config.parked),
            warmed: device.event()?,
            withheld: WithheldPages::new(),
            ready: (0..config.records()).map(|_| device.event()).collect::<Result<_>>()?,
            stepped: (0..config.micro_batches).map(|_| device.event()).collect::<Result<_>>()?,
            schedules: (0..config.micro_batches).map(|_| Schedule::new(&*device)).collect::<Result<_>>()?,
            runs: Vec::with_capacity(config.micro_batches as usize),
            records: (0..config.records()).map(|_| Record::default()).collect(),
            budgets: vec![0; geometry.groups().len()],
            sharing: config
                .share
                .map(|share| Sharing::new(share, config.lanes as usize, geometry.groups().len())),
            opened: 0,
            config,
            geometry,
            device,
            pools,
            total,
            index,
            prefix,
            secret,
            sparse,
            ring,
            fallbacks,
            stats: Stats::default(),
            attempt: 0,
        })
    }

    /// The configuration that the cache was made with.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The checked shape, with the row format of the first layer.
    pub fn geometry(&self) -> &Geometry {
        self.geometry.first()
    }

    /// The row formats of all layers, and which layers share a selection.
    pub const fn geometries(&self) -> &Geometries {
        &self.geometry
    }

    /// The number of attention waves over the fetched rows, for split attention. There are 1 + this many index lists
    /// ([`SplitIndices`](crate::device::SplitIndices)): index list 0 for resident rows, then one for each wave.
    pub fn attention_waves(&self) -> u32 {
        self.sparse.tables().first().map_or(1, |table| table.waves)
    }

    /// The cache's pools on the device: residency tables, page tables, lists of fetches, step descriptors and counts.
    /// For checking devices and for tools.
    pub const fn pools(&self) -> Pools {
        self.pools
    }

    /// The memory options that the system refused, such as huge pages or locking. Empty if it granted all of them.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The current counters and gauges. Costs a copy.
    pub fn stats(&self) -> Stats {
        Stats {
            sequences: self.records.iter().filter(|r| r.is_taken()).count() as u32,
            steps_in_flight: self.ring.in_flight(),
            free_host_pages: self.total.pages.free(),
            free_index_pages: self.index.pages.free(),
            unused_pages: self.prefix.unused(),
            free_slots: self
                .sharing
                .as_ref()
                .map_or_else(|| self.sparse.slots().free_slots(), |_| self.unpromised()),
            slots_in_use: self.sparse.slots().in_use(),
            free_lanes: self.sparse.slots().free_lanes(),
            parked: self.records.iter().filter(|r| r.state == State::Parked).count() as u32,
            arriving: self.records.iter().filter(|r| r.is_arrival()).count() as u32,
            withheld_pages: withheld::pages(&self.withheld),
            ..self.stats
        }
    }

    /// The slab of a layer, which the attention kernel reads.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn slab(&self, layer: Layer) -> Result<Slice> {
        self.sparse.slabs().get(layer.index()).copied().ok_or_else(|| self.no_layer(layer))
    }

    /// The rows of a layer in the total pool, `[pages][page tokens][host stride]`. A prefill on the device or a
    /// transfer writes prompt rows here in place ([`Cache::append_in_place`]). It may write the pages of its sequence
    /// ([`Cache::pages`]), but not pages that other sequences share.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn rows(&self, layer: Layer) -> Result<Slice> {
        self.total.layers().get(layer.index()).copied().ok_or_else(|| self.no_layer(layer))
    }

    /// The index keys of a layer, `[pages][page tokens][key bytes]`. The engine writes and reads them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an unknown layer, a layer that another one selects for, or a model without index keys.
    pub fn index_keys(&self, layer: Layer) -> Result<Slice> {
        self.check_layer(layer)?;
        self.check_first("index keys", layer)?;
        self.index.group(self.geometry.group_of(layer.index())).ok_or_else(|| self.no_layer(layer))
    }

    /// The pages of a sequence, in order.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn pages(&self, sequence: Sequence) -> Result<impl Iterator<Item = (HostPage, IndexPage)> + '_> {
        let table = &self.record(sequence)?.owned.table;
        Ok((0..table.len()).filter_map(|page| table.get(page)))
    }

    /// The landing slot to which the engine writes the new row of a sequence's query row `row`. It is the same slot in
    /// every layer.
    ///
    /// # Errors
    /// [`Kind::Closed`], [`Kind::OutOfRange`].
    pub fn landing_slot(&self, sequence: Sequence, row: u32) -> Result<u32> {
        let record = self.record(sequence)?;
        record.check_lane("landing slot")?;
        let slot = self.sparse.landing(record.lane(), row);
        slot.ok_or_else(|| Error::new(Kind::OutOfRange, "landing slot").at("query row").with("row", row))
    }

    /// Reads the current bytes of one row of the total pool, packed. For checks and for engines that move rows
    /// themselves.
    ///
    /// # Errors
    /// [`Kind::Closed`], [`Kind::OutOfRange`].
    pub fn read_row(&self, sequence: Sequence, layer: Layer, position: u32, row: &mut [u8]) -> Result<()> {
        self.check_layer(layer)?;
        let record = self.record(sequence)?;
        let (page, token) = (position / self.geometry.page_tokens(), position % self.geometry.page_tokens());
        let page = record.owned.table.get(page as usize).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "read row").at("position").with("position", position)
        })?;
        if row.len() != self.geometry.of(layer.index()).row_bytes() as usize {
            return Err(Error::new(Kind::OutOfRange, "read row")
                .at("row bytes")
                .with("bytes", row.len() as u64));
        }
        self.total.read_row(layer.index(), page.0.0, token, row)
    }

    /// The residency digest of a sequence over all layers. It is equal on every rank that received the same
    /// selections, step by step, since the sequence joined. It reads 8 bytes for each of the sequence's slots in every
    /// layer. On a GPU it waits for the device. Call it between steps, after the last step has been retired. Ranks
    /// whose digests differ have attended to different rows: `docs/integration.md` (Ranks) says what to do.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn digest(&self, sequence: Sequence) -> Result<u64> {
        let record = self.record(sequence)?;
        record.check_lane("digest")?;
        self.device.digest(self.pools, crate::ids::Lane(record.lane()))
    }

    /// Checks every invariant of the pools, the page tables and the residency tables. For tests, between steps.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the broken invariant.
    pub fn validate(&self) -> Result<()> {
        self.total.pages.validate()?;
        self.index.pages.validate()?;
        let taken = self.records.iter().filter(|record| record.is_taken());
        self.sparse.slots().validate(taken.map(|record| &record.owned.slots))?;
        let places = self.records.iter().filter_map(|record| record.owned.place);
        self.places.validate(places.map(|place| place.number), self.config.parked)?;
        self.device.validate(self.pools)?;
        self.validate_pages()
    }

    fn check_layer(&self, layer: Layer) -> Result<()> {
        if layer.0 < self.geometry.layers() { Ok(()) } else { Err(self.no_layer(layer)) }
    }

    /// Checks that a layer selects for itself.
    fn check_first(&self, operation: &'static str, layer: Layer) -> Result<()> {
        match self.geometry.first_of(layer.index()) {
            first if first == layer.index() => Ok(()),
            first => Err(follows(operation, layer, first)),
        }
    }

    fn no_layer(&self, layer: Layer) -> Error {
        Error::new(Kind::OutOfRange, "cache")
            .at("layer")
            .with("layer", layer.0)
            .with("layers", self.geometry.layers())
    }

    /// The record of an open sequence.
    fn record(&self, sequence: Sequence) -> Result<&Record> {
        let found = self.records.get(sequence.index as usize);
        found.filter(|r| r.is_open(sequence)).ok_or_else(|| closed(sequence))
    }

    fn record_mut(&mut self, sequence: Sequence) -> Result<&mut Record> {
        let found = self.records.get_mut(sequence.index as usize);
        found.filter(|r| r.is_open(sequence)).ok_or_else(|| closed(sequence))
    }

    /// Makes `stream` wait until the sequence's earlier work has ended, on any stream.
    fn wait_ready(&self, index: usize, stream: Stream) -> Result<()> {
        match self.ready.get(index) {
            Some(event) => self.device.wait(stream, *event),
            None => Ok(()),
        }
    }

    fn record_ready(&self, index: usize, stream: Stream) -> Result<()> {
        match self.ready.get(index) {
            Some(event) => self.device.record(*event, stream),
            None => Ok(()),
        }
    }
}

fn closed(sequence: Sequence) -> Error {
    Error::new(Kind::Closed, "cache").at(sequence.to_string())
}
