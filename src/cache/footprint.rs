//! The memory of a cache, computed before any of it is taken.
//!
//! The footprint comes from the same functions that divide the memory when the cache is made, so a plan based on it
//! matches the cache.
//!
//! Before it takes anything, [`Cache::new`](crate::Cache::new) compares the memory that it needs with the memory that
//! the machine has. The system itself would react later, by killing some process.

use crate::cache::Config;
use crate::cache::record::Record;
use crate::device::{Device, descriptor, host_page_tables};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, Geometry, SLOT_BLOCK};
use crate::os::{self, Faults, MemoryState};
use crate::residency::TableShape;
use crate::total::memory::check_available;
use crate::total::{CAPACITY_MAX, PrefixIndex};

/// The bytes of a cache, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Device: index keys of every page, all layers that have an indexer.
    pub index_keys: u64,
    /// Device: budget slots of all layers.
    pub slots: u64,
    /// Device: landing slots of all layers, in whole blocks.
    pub landing: u64,
    /// Device: scratch slots, shared by all layers; once for each place in an index group and each row format.
    pub scratch: u64,
    /// Device: bytes that stay unused because mappings are whole multiples of the granularity.
    pub padding: u64,
    /// Device: residency tables, lanes' page tables, lists of fetches, step descriptors, the working memory of
    /// resolves, and the noted positions of parked sequences.
    pub tables: u64,
    /// GPU: its page tables for registered host memory, which the driver takes from the GPU's memory
    /// ([`Footprint::page_tables`]). A host device has none. For rows in memory that the driver allocates this is an
    /// upper bound; they need almost none.
    pub host_page_tables: u64,
    /// Host: the rows of the total pool. With `residency_only` these are addresses only, unless the device pins host
    /// memory.
    pub rows: u64,
    /// Host: the pinned ring of step descriptors and reports, and the staging memory for a GPU's joins, truncations and
    /// resizes.
    /// A host device stages in ordinary memory.
    pub step_descriptors: u64,
}

impl Footprint {
    /// Bytes of index keys and rows on the device: everything but [`Footprint::tables`] and
    /// [`Footprint::host_page_tables`].
    pub const fn data(&self) -> u64 {
        self.index_keys + self.slots + self.landing + self.scratch + self.padding
    }

    /// All bytes of a GPU's memory that a cache uses: its own, and the driver's page tables for the host rows. Exact
    /// for a GPU that registers the rows (the default), but for the upper levels of its page tables, 1/512 of these; an
    /// upper bound for other devices.
    pub const fn device(&self) -> u64 {
        self.data() + self.tables + self.host_page_tables
    }

    /// All bytes of pinned host memory.
    pub const fn host(&self) -> u64 {
        self.rows + self.step_descriptors
    }

    /// Bytes of a GPU's memory that its page tables take for `host` bytes of registered memory: 8 bytes for each page
    /// of 4 KiB, so 2 MiB for each GiB. A GPU maps registered memory in pages of 4 KiB, whatever page size the system
    /// uses (`osmemdesc.c` of NVIDIA's open kernel modules). Memory that the driver allocates in pages of 2 MiB takes
    /// 4 KiB for each GiB. Each process has its own page tables. The higher levels, 1/512 of this, are not counted.
    pub const fn page_tables(host: u64) -> u64 {
        host_page_tables(host)
    }
}

impl Config {
    /// The bytes of a cache with this configuration, on a device that maps memory in multiples of `grain` bytes
    /// ([`crate::device::Device::granularity`]). The call takes no memory.
    ///
    /// # Errors
    /// The errors of [`crate::Cache::new`] that need no memory: [`Kind::InvalidConfig`] and [`Kind::Overflow`]
    /// name the field.
    pub fn footprint(&self, grain: u64) -> Result<Footprint> {
        let geometry = self.geometries()?;
        self.check(&geometry)?;
        let layout = self.sparse(&geometry)?.layout(&geometry, grain)?;
        let blocks_of = |slots: u64| slots.div_ceil(u64::from(SLOT_BLOCK));
        let block_bytes = |format: &Geometry| u64::from(format.block_bytes());
        let scratch_blocks = layout.tables.first().map_or(0, |shape| {
            blocks_of(u64::from(shape.scratch_base) + u64::from(shape.lanes) * u64::from(shape.scratch))
        });
        let scratch_bytes = layout.scratch.iter().map(|_| layout.scratch_bytes);
        // Checked first: the sum covers the parts below.
        let mapped = sum(layout.own_bytes.iter().copied().chain(scratch_bytes), 0)?;
        let scratch = sum(layout.scratch.iter().map(|format| scratch_blocks * block_bytes(format)), 0)?;
        let budgets = geometry.formats().iter().enumerate().map(|(layer, format)| {
            let shape = layout.tables.get(geometry.group_of(layer));
            shape.map_or(0, |shape| u64::from(shape.budget_blocks) * block_bytes(format))
        });
        let budget = sum(budgets, 0)?;
        let landing_blocks = blocks_of(u64::from(self.lanes) * u64::from(self.query_rows));
        let landing = sum(geometry.formats().iter().map(|format| landing_blocks * block_bytes(format)), 0)?;
        let places = self.place_bytes(&geometry).checked_mul(self.parked.into()).ok_or_else(overflow)?;
        let bookkeeping = self.bookkeeping(&geometry, &layout.tables).ok_or_else(overflow)?;
        let bookkeeping = bookkeeping.checked_add(places).ok_or_else(overflow)?;
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

    /// Rejects a cache that the machine has no memory for, before anything is taken. It counts:
    ///
    /// - the rows, if their memory is allocated from the start (`populate`, `lock`, or a device that pins host
    ///   memory), except rows for which huge pages are reserved;
    /// - if device memory is the machine's memory: [`Footprint::tables`], and the device's other memory if `populate`
    ///   or `lock` is set;
    /// - the ring, the steps' records of enqueued calls, and the lists of pages, blocks and lanes.
    ///
    /// If the system does not report its memory, nothing is rejected.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] with `wanted` and `available`.
    pub(super) fn check_machine(&self, device: &dyn Device, faults: &dyn Faults) -> Result<()> {
        // If this cannot be computed, `Cache::new` fails later and names the field.
        let Ok(footprint) = self.footprint(device.granularity()) else { return Ok(()) };
        let state = os::memory_state(faults);
        check_available(self.of_machine(&footprint, device, &state), &state)
    }

    /// Bytes of the machine's memory that are in use as soon as the cache is made.
    fn of_machine(&self, footprint: &Footprint, device: &dyn Device, state: &MemoryState) -> u64 {
        let layers = u64::from(self.shape.layers) + u64::from(self.shape.draft_layers);
        let pages = 2 * size_of::<u32>() as u64 * (u64::from(self.host_pages) + u64::from(self.index_pages));
        let shared = self.host_pages.min(self.index_pages).min(CAPACITY_MAX);
        let lane = size_of::<Record>() as u64 + 4 * layers;
        // An arriving sequence counts its index keys too.
        let records = lane * u64::from(self.records()) + 4 * layers * u64::from(self.arriving);
        let lists = pages + PrefixIndex::ENTRY_BYTES * u64::from(shared) + records;
        let resident = self.memory.populate || self.memory.lock;
        // The available memory that the system reports does not include reserved huge pages.
        let reserved = self.memory.huge && !self.residency_only && state.has_huge(footprint.rows);
        let stored = resident && !self.residency_only;
        let rows = if (stored || device.pins_host_memory()) && !reserved { footprint.rows } else { 0 };
        // The memory of `tables` is allocated at once, because it is written at the creation.
        let device = match (device.takes_host_memory(), resident) {
            (false, _) => 0,
            (true, false) => footprint.tables,
            (true, true) => footprint.data() + footprint.tables,
        };
        let ring = footprint.step_descriptors.next_multiple_of(os::page_size());
        // Each step's record of enqueued calls (`step::enqueued`).
        let places = layers.saturating_mul(u64::from(self.query_rows));
        let steps = u64::from(self.steps_in_flight).saturating_mul(u64::from(self.micro_batches));
        let notes = places.saturating_mul(4 * (u64::from(self.batch) + 1)).saturating_mul(steps);
        [lists, ring, notes, rows, device].into_iter().fold(0, u64::saturating_add)
    }

    /// Host bytes in which a GPU stages joins and truncations: for each lane its length and pages, and for each index
    /// group its budget and blocks.
    fn staged(&self, geometry: &Geometries, tables: &[TableShape]) -> Option<u64> {
        let lane_pages = geometry.pages(self.reach(self.max_tokens).ok()?);
        let blocks = tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        let words = (1 + u64::from(blocks)).checked_mul(tables.len() as u64)?;
        words.checked_add(2 + u64::from(lane_pages))?.checked_mul(4 * u64::from(self.lanes))
    }

    /// Device bytes in addition to the residency tables, as a GPU takes them (`device/cuda/kernels/abi.h`; a host
    /// device takes less): for each micro-batch the step descriptor, the report, the lists and the working memory of
    /// resolves; the page tables of the lanes; and the lists and working memory of warm-ups.
    fn bookkeeping(&self, geometry: &Geometries, tables: &[TableShape]) -> Option<u64> {
        let (lanes, batch) = (u64::from(self.lanes), u64::from(self.batch));
        let (layers, top_k) = (u64::from(geometry.layers()), u64::from(self.shape.top_k));
        let lane_pages = geometry.pages(self.reach(self.max_tokens).ok()?);
        let tokens = tables.iter().map(|shape| shape.tokens).max().unwrap_or(0);
        let blocks = tables.iter().map(TableShape::lane_blocks).max().unwrap_or(0);
        // One bit for each position, two bits for each slot.
        let room = 4 * (u64::from(tokens.div_ceil(u32::BITS)) + 4 * u64::from(blocks));
        let fetches = FETCH.checked_mul(u64::from(self.query_rows) * top_k)?;
        let marks = 8 * layers * u64::from(self.query_rows.div_ceil(u32::BITS));
        let row = [LIST, 4, 4, room, marks].into_iter().try_fold(fetches, u64::checked_add)?;
        let micro = batch.checked_mul(row)?.checked_add(4 * descriptor::step::words(self.batch) as u64)?;
        let micro =
            micro.checked_add(12 * layers + 4 * lanes + 8)?.checked_mul(u64::from(self.micro_batches))?;
        let groups = geometry.groups().len() as u64;
        // The first layers of groups are described a second time.
        let described = if groups == layers { layers } else { layers + groups };
        let shared =
            described * LAYER + groups * (room + FETCH * top_k) + lanes * 4 * (u64::from(lane_pages) + 1);
        micro.checked_add(shared)
    }
}

/// Bytes of a GPU's description of a layer, of a list of fetches, and of an entry of that list: `abi.h`.
const LAYER: u64 = 136;
const LIST: u64 = 72;
const FETCH: u64 = 16;

fn sum(mut parts: impl Iterator<Item = u64>, first: u64) -> Result<u64> {
    parts.try_fold(first, |all, part| all.checked_add(part)).ok_or_else(overflow)
}

fn overflow() -> Error {
    Error::new(Kind::Overflow, "footprint").at("bytes on the device")
}
