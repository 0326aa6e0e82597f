//! The cache of models whose attention reads every row: pages on the device, the host as second tier.
//!
//! Where a sparse cache ([`Cache`](crate::Cache)) keeps all rows on the host and the selected ones on the device, a
//! dense model reads every cached row of its layers in every step. So its rows are on the device, in pages, and
//! attention finds them by page tables. Pages are opaque bytes, and are moved whole.
//!
//! # Groups
//!
//! Layers with the same row format and the same kind of attention form a [`Group`] and share page tables: one page
//! holds its tokens' rows in every layer of the group. Most models are one group. Models with sliding-window layers are
//! two, and their window group keeps only the pages of the window. Each group has device pages of its own, and its page
//! 0, the *null page*, is zeros and belongs to no sequence: a page table names it wherever a sequence has no page.
//!
//! # Sizes
//!
//! A [`Config`] says everything: the [`Shape`], how pages lie in memory ([`Layout`], [`Runs`]), and how many there are.
//! Opening a sequence takes all pages that it will ever need, so a step allocates nothing and cannot run out of pages.
//! [`Config::pages_for`] says how many device pages that takes, [`Config::planes`] and [`Config::view`] where a layer's
//! rows are, and [`Config::footprint`] how many bytes.

mod abort;
mod admit;
mod arrive;
mod bring;
mod close;
mod config;
mod footprint;
mod held;
mod line;
mod moves;
mod named;
mod park;
mod planes;
mod pool;
mod prefix;
mod presets;
mod record;
mod reserve;
mod settle;
mod shape;
mod step;
mod tables;
mod tier;
mod truncate;
mod withheld;

use std::sync::Arc;

use crate::device::pages::descriptor;
use crate::device::{Device, Event, PageTables, Plane, Slice};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::ids::{MicroBatch, Sequence};
use crate::os::{self, Fallback, Faults, NoFaults};
use crate::sequence::Length;
use crate::step::{Ring, RingShape};
use crate::total::Secret;
use crate::total::memory::Overcommits;
use crate::total::withheld::WithheldPages;

pub use admit::Open;
pub use config::{Config, Layout, Runs, Save, Width};
pub use footprint::Footprint;
pub use planes::{PlaneShape, View};
pub use pool::TierStats;
pub use prefix::{Found, Names, Opened};
pub use record::Way;
pub use shape::{GROUPS_MAX, Group, Shape};
pub use tables::Tensors;

use line::{Arrivals, Moves};
use pool::Pool;
use record::{Record, State};
use tables::{HostTables, Sent};
use tier::Tier;

/// The KV cache of a dense model, on one device: each query reads every row of its sequence, or of a window before it.
///
/// The device holds all rows of all open sequences, in *pages*. Attention finds them by page tables, as every paged
/// attention kernel does. The cache decides which page belongs to which sequence, and writes the tables that the
/// kernels read. The engine allocates nothing, writes the rows and computes.
///
/// **A serving loop** opens a sequence ([`open`](Cache::open)), which takes all pages that it will need. Its first
/// steps compute the prompt, in chunks; later ones decode. Each step is then:
///
/// 1. [`prepare`](Cache::prepare), for the step's batch rows. It enqueues a kernel that fills the step's tensors
///    ([`tensors`](Cache::tensors)): page tables, slots of the new rows, positions and lengths;
/// 2. in each layer, the engine's own kernels: they write the new rows to their slots, and attention reads the pages;
/// 3. [`finish`](Cache::finish);
/// 4. [`retire`](Cache::retire), once the device has finished the step. It says whether the step's tokens may be used.
///
/// [`arrive`](Cache::arrive) opens a sequence whose prompt another instance computes and a transfer brings.
/// [`fork`](Cache::fork) copies a sequence, and [`truncate`](Cache::truncate) goes back in one. [`park`](Cache::park)
/// moves its rows to the host, until [`resume`](Cache::resume). [`close`](Cache::close) ends a sequence at any time.
/// None of these calls waits for the device. The tensors are at fixed addresses, so a step may be a captured graph: its
/// data changes, the graph does not.
///
/// ```
/// use forebay::dense::{Cache, Config, Group, Open, Shape};
/// use forebay::device::Device;
/// use forebay::device::host::{HostDevice, HostOptions};
/// use forebay::{Accepted, BatchRow, MicroBatch};
///
/// # fn main() -> forebay::Result<()> {
/// // The device that runs on the host: no GPU is needed to try a loop.
/// let device = HostDevice::new(HostOptions::default());
/// let stream = device.stream()?;
/// // Two layers, with 64 bytes of K and as many of V a token; pages of 16 tokens.
/// let group = Group { layers: vec![0, 1], runs: [64, 64], window: None };
/// let shape = Shape { page_tokens: 16, groups: vec![group] };
/// // Four sequences of up to 128 tokens.
/// let mut config = Config::new(shape, 4, 128);
/// config.memory.lock = false; // A server keeps the default.
/// let mut cache = Cache::new(config, device.clone())?;
///
/// // A prompt of 20 tokens, and at most 12 to decode: 3 pages, with the rows that may be in flight.
/// let sequence = cache.open(&Open { prompt: 20, promised: 12 })?;
/// assert_eq!(cache.pages(sequence, 0)?.len(), 3);
///
/// // One step for the whole prompt, and one that decodes a token.
/// for (accepted, query_rows) in [(0, 20), (20, 1)] {
///     let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows };
///     let mut step = cache.prepare(MicroBatch(0), &[row], None, stream)?;
///     // Here the engine's kernels read `cache.tensors(MicroBatch(0))?` and work on `cache.planes(0)?`.
///     cache.finish(&mut step, stream)?;
///     let retired = cache.retire(step, stream).map_err(|unretired| unretired.error)?;
///     assert_eq!(retired.lengths(), [accepted]);
/// }
/// cache.close(sequence, stream)?;
/// # Ok(())
/// # }
/// ```
///
/// **What it does not do.** It has no thread, no lock and no clock of its own: `&mut self` is the lock. It computes no
/// attention and writes no row. It does not order the work that the engine enqueues on other streams, and it never
/// synchronises a stream. It does not grow: [`Cache::new`] takes all memory.
#[derive(Debug)]
pub struct Cache {
    config: Config,
    device: Arc<dyn Device>,
    pools: Vec<Pool>,
    tables: HostTables,
    /// For each sequence its committed length and its landed rows, `[sequences][2]` u32 on the device.
    lanes: Slice,
    /// The tensors of each micro-batch, and what its begins take of them.
    tensors: Vec<Tensors>,
    page_tables: Vec<Vec<PageTables>>,
    sent: Sent,
    ring: Ring,
    moves: Moves,
    /// Of each micro-batch what its open step waits for layer by layer.
    arrivals: Vec<Arrivals>,
    /// The memory of the host's tier.
    tier: Tier,
    /// The pages of aborted sequences that were not released.
    withheld: WithheldPages<withheld::Pages>,
    /// The group whose page is saved next.
    saves: usize,
    /// The key of the block hashes.
    secret: Secret,
    records: Vec<Record>,
    /// Recorded when pages were last given back by a call that names a stream. Work that takes pages waits for it.
    left: Event,
    /// One event per sequence, recorded after the work that the host issued for it alone.
    ready: Vec<Event>,
    /// One event per micro-batch, recorded after its last step.
    stepped: Vec<Event>,
    fallbacks: Vec<Fallback>,
    /// Sequences that may hold pages which no query reads any more, each once.
    leaving: Vec<u32>,
    /// Whether steps behind a failed one are in flight.
    draining: bool,
    /// The number of sequences opened.
    opened: u64,
    /// The number of steps retired.
    steps: u64,
    /// The number of `prepare` calls, used to find a sequence that one call names twice.
    attempt: u64,
}

/// The statistics of a dense cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Gauge: sequences that are open, or closed with work in flight that names them.
    pub sequences: u32,
    /// Gauge: those of them that are parked.
    pub parked: u32,
    /// Gauge: those of them that arrive.
    pub arriving: u32,
    /// Gauge: pages, of the device and of the host, that are withheld after an abort.
    pub withheld_pages: u32,
    /// Gauge: sequences that may still be opened, as far as pages allow.
    pub free_sequences: u32,
    /// Gauge: steps between prepare and retire.
    pub steps_in_flight: u32,
    /// Gauge: for each group the device pages that a sequence may still take, or, with a sliding window, be promised.
    /// 0 for groups that the shape does not have.
    pub free_pages: [u32; GROUPS_MAX],
    /// What the tiers of each group hold.
    pub tiers: [TierStats; GROUPS_MAX],
    /// Counter: bytes of pages that were copied to the host's tier.
    pub bytes_down: u64,
    /// Counter: bytes of pages that came back from it.
    pub bytes_up: u64,
    /// Counter: steps retired.
    pub steps: u64,
}

impl Cache {
    /// Makes a cache and takes all its memory. The device keeps this memory until the device is dropped, even after
    /// the cache is gone. It also keeps the memory that was taken before an error: try again on a new device.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] and [`Kind::Overflow`] name the field. [`Kind::OutOfMemory`] gives the size; if the
    /// machine has less memory than the cache would take, it gives `wanted` and `available`, and nothing was taken
    /// ([`Config::overcommit`] skips this check).
    pub fn new(config: Config, device: Arc<dyn Device>) -> Result<Cache> {
        Cache::with_faults(config, device, &NoFaults)
    }

    /// Like [`Cache::new`], with faults injected into the system calls that take the host memory.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn with_faults(config: Config, device: Arc<dyn Device>, faults: &dyn Faults) -> Result<Cache> {
        config.check()?;
        let overcommits = Overcommits(faults);
        let faults: &dyn Faults = if config.overcommit { &overcommits } else { faults };
        config.check_machine(&*device, faults)?;
        let (entries, groups) = (config.entries()?, config.shape.groups.len());
        let mut fallbacks = Vec::new();
        let mut secret = Secret([0; 32]);
        os::random(&mut secret.0, faults)?;
        let tier = Tier::new(&config, &*device, faults, &mut fallbacks)?;
        let pools = (0..groups).map(|group| pool(&config, group, tier.pages(group), &*device));
        let pools = pools.collect::<Result<Vec<_>>>()?;
        let tables = HostTables::new(&config, entries, &*device, faults, &mut fallbacks)?;
        let micro_batches = 0..config.micro_batches;
        let tensors = micro_batches.clone().map(|_| Tensors::new(&config, entries, &*device));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let ring = Ring::new(ring_shape(&config), config.memory.lock, &*device, faults, &mut fallbacks)?;
        let events = |count: u32| (0..count).map(|_| device.event()).collect::<Result<Vec<_>>>();
        let mut cache = Cache {
            pools,
            tables,
            lanes: device.allocate(8 * u64::from(config.sequences))?,
            tensors,
            page_tables: vector(config.micro_batches as usize, "cache", "page tables")?,
            sent: Sent::new(config.micro_batches, config.batch)?,
            ring,
            moves: Moves::new(&config.device_pages, config.parts(), config.layers_up(), &*device)?,
            arrivals: vector(config.micro_batches as usize, "cache", "parts of a step")?,
            tier,
            withheld: WithheldPages::new(),
            saves: 0,
            secret,
            records: vector(config.sequences as usize, "cache", "sequences")?,
            left: device.event()?,
            ready: events(config.sequences)?,
            stepped: events(config.micro_batches)?,
            fallbacks,
            leaving: vector(config.sequences as usize, "cache", "sequences")?,
            draining: false,
            opened: 0,
            steps: 0,
            attempt: 0,
            config,
            device,
        };
        cache.records.resize_with(cache.config.sequences as usize, Record::default);
        for tensors in &cache.tensors {
            cache.arrivals.push(Arrivals::new(cache.config.parts())?);
            let described = cache.tables.described(&cache.config, &cache.pools, tensors);
            cache.page_tables.push(described);
        }
        Ok(cache)
    }

    /// The configuration that the cache was made with.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The memory options that the system refused. Empty if it granted all of them.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The device memory of a group's pages: page `p` of a plane begins at `p * stride` of its memory.
    /// [`Config::view`] says where a layer's rows are in them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an unknown group.
    pub fn planes(&self, group: usize) -> Result<impl ExactSizeIterator<Item = Plane> + '_> {
        let pool = self.pools.get(group).ok_or_else(|| no_group(group, self.pools.len()))?;
        Ok(pool.planes().iter().map(|(plane, _)| *plane))
    }

    /// What attention reads in the steps of a micro-batch. The addresses never change, so a captured graph can read
    /// them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an unknown micro-batch.
    pub fn tensors(&self, micro_batch: MicroBatch) -> Result<&Tensors> {
        self.tensors.get(micro_batch.index()).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "tensors")
                .at("micro-batch")
                .with("value", micro_batch.0)
                .with("most", self.config.micro_batches - 1)
        })
    }

    /// The current counters and gauges.
    pub fn stats(&self) -> Stats {
        let mut free_pages = [0; GROUPS_MAX];
        let free = self.pools.iter().map(|pool| pool.free(&self.config));
        free_pages.iter_mut().zip(free).for_each(|(to, free)| *to = free);
        let mut tiers = [TierStats::default(); GROUPS_MAX];
        tiers.iter_mut().zip(&self.pools).for_each(|(to, pool)| *to = pool.tiers());
        let sequences = self.records.iter().filter(|record| record.is_taken()).count() as u32;
        let are = |state| self.records.iter().filter(|record| record.state == state).count() as u32;
        Stats {
            sequences,
            parked: are(State::Parked),
            arriving: are(State::Arriving),
            withheld_pages: self.withheld.lists().map(withheld::Pages::count).sum(),
            free_sequences: self.config.sequences - sequences,
            steps_in_flight: self.ring.in_flight(),
            free_pages,
            tiers,
            bytes_down: self.moves.bytes[0],
            bytes_up: self.moves.bytes[1],
            steps: self.steps,
        }
    }

    /// The pages of a sequence in a group, by block: block `b` has the rows of positions `b * page_tokens ..`. Blocks
    /// before a sliding window are page 0.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfRange`] for an unknown group.
    pub fn pages(&self, sequence: Sequence, group: usize) -> Result<&[u32]> {
        let held = self.record(sequence)?.held.get(group);
        held.map(held::Held::pages).ok_or_else(|| no_group(group, self.pools.len()))
    }

    /// The length of a sequence.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn length(&self, sequence: Sequence) -> Result<Length> {
        let record = self.record(sequence)?;
        let rows = &record.rows;
        let published = record.names.as_ref().map_or(0, |names| names.pages());
        Ok(Length {
            committed: rows.committed,
            landed: rows.landed,
            published: published * self.config.shape.page_tokens,
            filled: if record.state == State::Arriving { record.arriving.whole() } else { rows.committed },
        })
    }

    /// The record of an open sequence.
    fn record(&self, sequence: Sequence) -> Result<&Record> {
        let found = self.records.get(sequence.index as usize);
        found
            .filter(|record| record.is_open(sequence))
            .ok_or_else(|| Error::new(Kind::Closed, "dense cache").at(sequence.to_string()))
    }
}

fn no_group(group: usize, groups: usize) -> Error {
    Error::new(Kind::OutOfRange, "dense cache")
        .at("group")
        .with("group", group as u64)
        .with("groups", groups as u64)
}

/// Takes the device memory of a group's pages.
fn pool(config: &Config, group: usize, host: Option<Slice>, device: &dyn Device) -> Result<Pool> {
    let shapes = config.planes(group);
    let count = u64::from(config.device_pages.get(group).copied().unwrap_or(1));
    let mut planes = vector(shapes.len(), "cache", "planes")?;
    for shape in shapes {
        let bytes = shape.bytes.checked_mul(count).ok_or_else(|| {
            Error::new(Kind::Overflow, "dense cache").at("device_pages").with("group", group as u64)
        })?;
        planes.push(Plane { memory: device.allocate(bytes)?, stride: shape.bytes, bytes: shape.bytes });
    }
    Pool::new(config, group, planes, host)
}

/// The sizes of the ring: one slot for each step between prepare and retire.
fn ring_shape(config: &Config) -> RingShape {
    RingShape {
        steps: config.steps_in_flight.saturating_mul(config.micro_batches),
        batch: config.batch,
        layers: 0,
        query_rows: 1,
        descriptor_words: descriptor::words(config.batch, config.shape.groups.len()),
    }
}
