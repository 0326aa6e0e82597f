//! What a cache will take, before any of it is taken.
//!
//! The same functions that divide the memory when the cache is made answer here, so a plan cannot promise
//! what a construction then refuses.
//!
//! A construction itself holds what it will take of the machine's memory against what the machine has, before it
//! takes anything: the system's own answer comes late, and is the end of some process.

use crate::cache::Config;
use crate::cache::record::Record;
use crate::device::{Device, descriptor};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometry, SLOT_BLOCK};
use crate::os::{self, Call, Faults, MemoryState};
use crate::residency::TableShape;
use crate::total::{CAPACITY_MAX, PrefixIndex};

/// Bytes of a cache by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Device: index keys of every page, all layers.
    pub index_keys: u64,
    /// Device: the blocks of slots that budgets are made of, all layers.
    pub slots: u64,
    /// Device: landing slots, all layers, in whole blocks.
    pub landing: u64,
    /// Device: scratch slots, once for all layers.
    pub scratch: u64,
    /// Device: what whole mappings leave unused.
    pub padding: u64,
    /// Device: residency tables, lanes' page tables, lists of fetches, step descriptors, and the room that resolves work in.
    pub tables: u64,
    /// Of a GPU: its own page tables of the host memory that it reaches, which the driver takes of the GPU's memory
    /// when that is registered ([`Footprint::page_tables`]). A host device has none, and rows in memory that the driver
    /// makes need nearly none: for those it is an upper bound.
    pub host_page_tables: u64,
    /// Host: the rows of the total pool; of a cache for replays addresses alone, where the device does not pin them.
    pub rows: u64,
    /// Host: the pinned ring of step descriptors and reports; and what a GPU's joins and roll-backs are staged in, which a
    /// host device does without.
    pub step_descriptors: u64,
}

impl Footprint {
    /// Bytes of index keys and rows on the device: everything but [`Footprint::tables`] and
    /// [`Footprint::host_page_tables`].
    pub const fn data(&self) -> u64 {
        self.index_keys + self.slots + self.landing + self.scratch + self.padding
    }

    /// All bytes of a GPU's memory that are gone when the cache is made: what it takes, and what the driver needs for
    /// the GPU to reach its rows. Of a GPU that registers them, as it does by default; an upper bound for others.
    pub const fn device(&self) -> u64 {
        self.data() + self.tables + self.host_page_tables
    }

    /// All bytes of pinned host memory.
    pub const fn host(&self) -> u64 {
        self.rows + self.step_descriptors
    }

    /// Bytes of a GPU's memory that its page tables take for `host` bytes of registered memory: 8 a page of 4 KiB, 2
    /// MiB a GiB. A GPU reaches registered memory in such pages, whatever pages the system has it on (`osmemdesc.c` of
    /// NVIDIA's open kernel modules); memory that the driver makes in pages of 2 MiB takes 4 KiB a GiB. Each process
    /// pays for itself. The levels above are a 512th of it and not counted.
    pub const fn page_tables(host: u64) -> u64 {
        const PAGE: u64 = 4096;
        8 * host.div_ceil(PAGE)
    }
}

impl Config {
    /// What a cache of this configuration takes on a device that maps memory in multiples of `grain` bytes
    /// ([`crate::device::Device::granularity`]). Takes nothing.
    ///
    /// # Errors
    /// Those of [`crate::Cache::new`] that need no memory: [`Kind::InvalidConfig`] and [`Kind::Overflow`]
    /// name the field.
    pub fn footprint(&self, grain: u64) -> Result<Footprint> {
        let geometry = Geometry::new(self.shape)?;
        self.check(&geometry)?;
        let layout = self.sparse(&geometry)?.layout(&geometry, grain)?;
        let block_bytes = u64::from(geometry.block_bytes());
        let blocks = |slots: u64| slots.div_ceil(u64::from(SLOT_BLOCK)) * block_bytes;
        let layers = u64::from(geometry.layers());
        let scratch = layout.tables.first().map_or(0, |shape| {
            blocks(u64::from(shape.scratch_base) + u64::from(shape.lanes) * u64::from(shape.scratch))
        });
        // Checked first: it holds the parts below.
        let mapped = sum(layout.own_bytes.iter().copied(), layout.scratch_bytes)?;
        let budgets = layout.tables.iter().map(|shape| u64::from(shape.budget_blocks) * block_bytes);
        let budget = sum(budgets, 0)?;
        let landing = layers * blocks(u64::from(self.lanes) * u64::from(self.query_rows));
        let bookkeeping = self.bookkeeping(&geometry, &layout.tables).ok_or_else(overflow)?;
        let staged = self.staged(&geometry, &layout.tables).ok_or_else(overflow)?;
        let rows = geometry.total_bytes(self.host_pages)?;
        let step_descriptors = self.ring(&geometry).bytes().checked_add(staged).ok_or_else(overflow)?;
        let host = rows.checked_add(step_descriptors).ok_or_else(overflow)?;
        Ok(Footprint {
            index_keys: geometry.index_bytes(self.index_pages)?,
            slots: budget,
            landing,
            scratch,
            padding: mapped - budget - landing - scratch,
            tables: sum(layout.tables.iter().map(TableShape::bytes), bookkeeping)?,
            host_page_tables: Footprint::page_tables(host),
            rows,
            step_descriptors,
        })
    }

    /// Refuses what the machine has no memory for, before anything is taken: the rows, where they are resident from
    /// the start (`populate`, `lock`, or a device that pins what it is shown); the device's memory, where it is the
    /// machine's: its tables always, the rest where rows are asked to be resident; the ring, what steps note and the
    /// lists of pages, blocks and lanes always. Rows for which huge pages are reserved are not asked for. Where the
    /// system does not tell ([`Overcommits`]), nothing is refused.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] with both numbers.
    pub(super) fn check_machine(&self, device: &dyn Device, faults: &dyn Faults) -> Result<()> {
        // What cannot be computed is refused by name when it is taken.
        let Ok(footprint) = self.footprint(device.granularity()) else { return Ok(()) };
        let state = os::memory_state(faults);
        let wanted = self.of_machine(&footprint, device, &state);
        match state.available {
            Some(available) if available < wanted => Err(Error::new(Kind::OutOfMemory, "create")
                .at("memory of the machine")
                .with("wanted", wanted)
                .with("available", available)
                .hint("ask for less, or declare overcommit where more can be had than the system says")),
            _ => Ok(()),
        }
    }

    /// Bytes of the machine's memory that are in use as soon as the cache is made.
    fn of_machine(&self, footprint: &Footprint, device: &dyn Device, state: &MemoryState) -> u64 {
        let layers = u64::from(self.shape.layers) + u64::from(self.shape.draft_layers);
        let pages = 2 * size_of::<u32>() as u64 * (u64::from(self.host_pages) + u64::from(self.index_pages));
        let shared = self.host_pages.min(self.index_pages).min(CAPACITY_MAX);
        let lane = size_of::<Record>() as u64 + 4 * layers;
        let lists = pages + PrefixIndex::ENTRY_BYTES * u64::from(shared) + lane * u64::from(self.lanes);
        let resident = self.memory.populate || self.memory.lock;
        // Reserved huge pages are no part of what the system says is available.
        let reserved = self.memory.huge && !self.residency_only && state.has_huge(footprint.rows);
        let stored = resident && !self.residency_only;
        let rows = if (stored || device.pins_host_memory()) && !reserved { footprint.rows } else { 0 };
        // Tables are written when they are made.
        let device = match (device.takes_host_memory(), resident) {
            (false, _) => 0,
            (true, false) => footprint.tables,
            (true, true) => footprint.data() + footprint.tables,
        };
        let ring = footprint.step_descriptors.next_multiple_of(os::page_size());
        // What each step of the ring notes of its calls (`step::enqueued`).
        let places = layers.saturating_mul(u64::from(self.query_rows));
        let steps = u64::from(self.steps_in_flight).saturating_mul(u64::from(self.micro_batches));
        let notes = places.saturating_mul(4 * (u64::from(self.batch) + 1)).saturating_mul(steps);
        [lists, ring, notes, rows, device].into_iter().fold(0, u64::saturating_add)
    }

    /// Host bytes that a GPU stages joins and roll-backs in: of each lane its length, its pages, and of each layer the
    /// budget and the blocks.
    fn staged(&self, geometry: &Geometry, tables: &[TableShape]) -> Option<u64> {
        let lane_pages = geometry.pages(self.reach(self.max_tokens).ok()?);
        let blocks = tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        let words = (1 + u64::from(blocks)).checked_mul(tables.len() as u64)?;
        words.checked_add(2 + u64::from(lane_pages))?.checked_mul(4 * u64::from(self.lanes))
    }

    /// Device bytes beside the residency tables, as a GPU takes them (`device/cuda/kernels/abi.h`; a host device takes
    /// less): of each micro-batch step descriptor, report, lists and the room that resolves work in; lanes' page tables;
    /// what warm-ups list and work in.
    fn bookkeeping(&self, geometry: &Geometry, tables: &[TableShape]) -> Option<u64> {
        let (lanes, batch) = (u64::from(self.lanes), u64::from(self.batch));
        let (layers, top_k) = (u64::from(geometry.layers()), u64::from(self.shape.top_k));
        let lane_pages = geometry.pages(self.reach(self.max_tokens).ok()?);
        let tokens = tables.iter().map(|shape| shape.tokens).max().unwrap_or(0);
        let blocks = tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        // A bit a position, two bits a slot.
        let room = 4 * (u64::from(tokens.div_ceil(u32::BITS)) + 4 * u64::from(blocks));
        let fetches = FETCH.checked_mul(u64::from(self.query_rows) * top_k)?;
        let marks = 8 * layers * u64::from(self.query_rows.div_ceil(u32::BITS));
        let row = [LIST, 4, 4, room, marks].into_iter().try_fold(fetches, u64::checked_add)?;
        let micro = batch.checked_mul(row)?.checked_add(4 * descriptor::step::words(self.batch) as u64)?;
        let micro =
            micro.checked_add(12 * layers + 4 * lanes + 8)?.checked_mul(u64::from(self.micro_batches))?;
        let shared = layers * (LAYER + room + FETCH * top_k) + lanes * 4 * (u64::from(lane_pages) + 1);
        micro.checked_add(shared)
    }
}

/// Bytes of a GPU's description of a layer, of a list of fetches, and of a row of it: `abi.h`.
const LAYER: u64 = 112;
const LIST: u64 = 40;
const FETCH: u64 = 16;

/// The system of a cache that overcommits: it does not tell what it has.
pub(super) struct Overcommits<'a>(pub(super) &'a dyn Faults);

impl Faults for Overcommits<'_> {
    fn before(&self, call: Call) -> Option<i32> {
        self.0.before(call)
    }

    fn memory(&self, read: MemoryState) -> MemoryState {
        MemoryState { available: None, ..self.0.memory(read) }
    }

    fn passes(&self, bytes: usize) -> usize {
        self.0.passes(bytes)
    }
}

fn sum(mut parts: impl Iterator<Item = u64>, first: u64) -> Result<u64> {
    parts.try_fold(first, |all, part| all.checked_add(part)).ok_or_else(overflow)
}

fn overflow() -> Error {
    Error::new(Kind::Overflow, "footprint").at("bytes on the device")
}
