//! An alternative gather that aims at the copy engine's ceiling: the host packs rows, and the device places them.
//!
//! Threads of the host copy missed rows side by side into pinned memory, with vector instructions. One copy of a copy
//! engine moves them to the device, where the gather kernel places them from device memory. Parts of a call overlap:
//! while one part is copied, the next is packed and the previous one is placed. All three operations are ordinary
//! gathers of pools: the pinned memory is the slab of the host's pools, and the copied rows are the total pool of the
//! device's pools.
//!
//! A lane packs up to [`SPAN`] rows. A part whose lane packs fewer is still copied as a whole.

use std::sync::Arc;
use std::time::Instant;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Event, PoolOp, Slice, StepRange, Stream};
use forebay::measure::Probe;
use forebay::residency::Fetch;
use forebay::{Result, SLOT_BLOCK, os};

use super::host_memory::Memory;
use super::oracle::Wanted;
use super::rig::{Extents, Places, Rig};
use super::row_shape::RowShape;

/// Rows that a lane packs.
const SPAN: u32 = 512;

/// The most rows of a call.
const ROWS: u32 = 100_000;

/// The most threads that pack.
const THREADS: u32 = 8;

/// Packs and places rows; see the module's head.
pub struct Packed {
    host: Rig,
    placing: Rig,
    /// The pinned memory as the device addresses it, and its copy on the device.
    staging: Slice,
    copied: Slice,
    copies: Stream,
    /// One stream of the host device for each thread.
    threads: Vec<Stream>,
    /// By part, then thread: the rows are packed; by part: they are copied.
    is_packed: Vec<Vec<Event>>,
    is_copied: Vec<Event>,
    is_placed: Event,
}

impl Packed {
    /// Pools on both sides, filled once.
    ///
    /// # Errors
    /// Errors of the devices.
    pub fn new(device: &Arc<dyn Probe>, shape: RowShape, memory: &Memory, quick: bool) -> Result<Packed> {
        let (span, lanes) = if quick { (64, 4) } else { (SPAN, ROWS.div_ceil(SPAN)) };
        let RowShape { row, stride } = shape;
        let page = SLOT_BLOCK;
        let pages = memory.slice.bytes() / (u64::from(lanes) * u64::from(page) * u64::from(stride));
        let extents = Extents {
            row,
            stride,
            page,
            layers: 1,
            lanes,
            length: pages as u32 * page - 1,
            shorter: 0,
            growth: 0,
            k: span,
            query_rows: 1,
            budget: span,
        };
        let staging = Memory::new(&**device, extents.slab_bytes())?;
        let host: Arc<dyn Probe> = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
        let register = |map| host.register(map)?.part(0, extents.slab_bytes());
        let whole = host.register(&memory.map)?.part(0, memory.slice.bytes())?;
        let seen = Memory { map: Arc::clone(&memory.map), slice: whole };
        let places = Places::HostInto(seen, register(&staging.map)?);
        let packing = Rig::new(&host, extents, places, quick)?;

        let copied = device.allocate(staging.slice.bytes())?;
        let first = extents.tables().budget_base / SLOT_BLOCK;
        let own = span / SLOT_BLOCK;
        // Twice the packed rows, so that enough rows are not resident at any time, and a page for the landed ones.
        let of_lane = |lane: u32| (0..2 * own + 1).map(move |page| first + lane * own + page % own);
        let placed = Extents { stride: row, length: 2 * span, ..extents };
        let places = Places::Given(copied, (0..lanes).flat_map(of_lane).collect());
        let placing = Rig::new(device, placed, places, quick)?;

        let threads = if quick { 2 } else { os::threads().clamp(1, THREADS) };
        let split_indices = lanes.div_ceil(threads);
        let mut packed = Packed {
            threads: (0..threads).map(|_| host.stream()).collect::<Result<_>>()?,
            is_packed: (0..split_indices)
                .map(|_| (0..threads).map(|_| host.event()).collect())
                .collect::<Result<_>>()?,
            is_copied: (0..split_indices).map(|_| device.event()).collect::<Result<_>>()?,
            is_placed: device.event()?,
            copies: device.stream()?,
            staging: staging.slice,
            copied,
            host: packing,
            placing,
        };
        packed.call(lanes * span)?;
        Ok(packed)
    }

    /// Whether calls of `rows` are meaningful: they fill at least one lane, and all of them fit.
    pub fn takes(&self, rows: u32) -> bool {
        let Extents { k, lanes, .. } = self.host.extents;
        (k..=k * lanes).contains(&rows)
    }

    /// The number of compared rows, slots and reports.
    pub fn checked(&self) -> u64 {
        self.host.checked + self.placing.checked
    }

    /// Compares all digests.
    ///
    /// # Errors
    /// Errors of [`Rig::finish`].
    pub fn finish(&mut self) -> Result<()> {
        self.host.finish()?;
        self.placing.finish()
    }

    /// Microseconds of the host's clock for `rows`, from the first that is packed to the last that is placed.
    ///
    /// # Errors
    /// Errors of the devices; [`forebay::Kind::Internal`] for a wrong row.
    pub fn call(&mut self, rows: u32) -> Result<f64> {
        let count = rows.div_ceil(self.host.extents.k);
        let lanes: Vec<u32> = (0..count).collect();
        let share = |row: usize| rows / count + u32::from((row as u32) < rows % count);
        for rig in [&mut self.host, &mut self.placing] {
            rig.begin(&lanes, 0, 1, |_, _, _| {})?;
            rig.select(0, |row| Wanted { query: 1, misses: share(row), hits: 0 })?;
            rig.timer.time(|stream| rig.resolve(0, stream))?;
            rig.check_answers(0)?;
        }
        let begun = Instant::now();
        self.bring(count)?;
        let us = begun.elapsed().as_nanos() as f64 / 1e3;
        self.host.check_rows(0)?;
        self.check_placed(&lanes)?;
        self.host.end()?;
        self.placing.end()?;
        Ok(us)
    }

    /// Packs, copies and places the misses of the first `count` lanes; waits for the last.
    fn bring(&self, count: u32) -> Result<()> {
        let (host, device) = (&self.host.device, &self.placing.device);
        let threads = self.threads.len() as u32;
        let one = |rig: &Rig, first: u32, count: u32| StepRange { first, count, ..rig.range(0) };
        let split_indices =
            || (0..count).step_by(threads.max(1) as usize).zip(&self.is_packed).zip(&self.is_copied);
        for ((first, packed), _) in split_indices() {
            for (lane, (stream, event)) in (first..count).zip(self.threads.iter().zip(packed)) {
                host.enqueue(
                    self.host.pools,
                    *stream,
                    PoolOp::Gather { range: one(&self.host, lane, 1), wave: 0 },
                )?;
                host.record(*event, *stream)?;
            }
        }
        for ((first, packed), copied) in split_indices() {
            let lanes = threads.min(count - first);
            packed.iter().take(lanes as usize).try_for_each(|event| host.synchronize(*event))?;
            let (from, bytes) = self.area(first, lanes);
            device.copy(self.copies, self.staging.part(from, bytes)?, self.copied.part(from, bytes)?)?;
            device.record(*copied, self.copies)?;
            device.wait(self.placing.stream(), *copied)?;
            device.enqueue(
                self.placing.pools,
                self.placing.stream(),
                PoolOp::Gather { range: one(&self.placing, first, lanes), wave: 0 },
            )?;
        }
        device.record(self.is_placed, self.placing.stream())?;
        device.synchronize(self.is_placed)
    }

    /// The range of some lanes' slots in the packed memory: offset and bytes.
    fn area(&self, first: u32, lanes: u32) -> (u64, u64) {
        let Extents { row, k, .. } = self.host.extents;
        let slot = u64::from(self.host.extents.tables().budget_base + first * k);
        (slot * u64::from(row), u64::from(lanes * k * row))
    }

    /// Compares every placed row with the total pool: a placed position names a slot of the packed memory, and the
    /// host's pools have the row of that slot.
    fn check_placed(&mut self, lanes: &[u32]) -> Result<()> {
        let span = self.host.extents.k;
        let base = self.host.extents.tables().budget_base;
        for lane in lanes {
            let mut held = vec![0; span as usize];
            for Fetch { position, slot } in self.host.oracle.residents(0, *lane) {
                if let Some(held) = held.get_mut((slot - base - lane * span) as usize) {
                    *held = position;
                }
            }
            let wanted = |row: &Fetch, bytes: &mut [u8]| {
                let position = held.get((row.position % span) as usize).copied().unwrap_or_default();
                self.host.host_row(0, *lane, position, bytes)
            };
            let list = self.placing.oracle.fetches.get(*lane as usize).map(Vec::as_slice).unwrap_or_default();
            self.placing.checked += self.placing.compare_rows(0, *lane, list, wanted)?;
        }
        Ok(())
    }
}
