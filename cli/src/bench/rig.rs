//! Pools of one cache, driven by the device's own calls, with an oracle that performs the same steps.
//!
//! Every step runs on both sides, and every slot, the bytes of every fetched or moved row, and every report are
//! compared before the next step begins; at the end all digests are compared, and the device checks its own tables.
//!
//! **Memory.** Host memory is one [`Memory`], filled once: a row's contents follow from its position, and the slab's
//! rows are compared with it. The pages of a rig's lanes are spread over all of it, even if they do not fill it. A
//! device keeps what a rig took until it is dropped, so each group of figures has a device of its own.

use std::sync::Arc;

use forebay::device::descriptor::{Entry, LayerCount, Report, step};
use forebay::device::{
    Begin, Expected, Join, PoolLayout, PoolOp, Pools, ResolveOutput, Slice, StepRange, Stream, Warm,
};
use forebay::measure::Probe;
use forebay::residency::{Fetch, QueryRange, TableShape};
use forebay::{Geometry, Lane, Layer, MicroBatch, Result, SLOT_BLOCK, Shape};

use super::host_memory::Memory;
use super::oracle::{Numbers, Oracle, Wanted, compare_row, compare_slots, differs, mix};
use super::reuse;
use super::timer::Timer;

/// Bytes written at a time.
const CHUNK: u64 = 1 << 20;

/// From this many rows on, a lane's rows are read in one piece.
const ONE_BY_ONE: usize = 16;

/// The shape of a rig.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// Bytes of a row; 4 for tables without rows.
    pub row: u32,
    /// Bytes from a row to the next in host memory.
    pub stride: u32,
    /// Tokens of a page.
    pub page: u32,
    /// Layers.
    pub layers: u32,
    /// Lanes, each with a sequence.
    pub lanes: u32,
    /// Tokens of the longest sequence.
    pub length: u32,
    /// Sequences are up to this many tokens shorter.
    pub shorter: u32,
    /// Tokens that a sequence may gain.
    pub growth: u32,
    /// Positions of a query row.
    pub k: u32,
    /// The most query rows of a step.
    pub query_rows: u32,
    /// Slots of a lane in a layer.
    pub budget: u32,
}

impl Extents {
    /// One layer of one lane with a budget of a fifth of 32K, for tests of tables without rows.
    #[cfg(test)]
    pub const ONE_LANE: Extents = Extents {
        row: 4,
        stride: 4,
        page: 64,
        layers: 1,
        lanes: 1,
        length: 32_768,
        shorter: 0,
        growth: 0,
        k: 2048,
        query_rows: 1,
        budget: 6881,
    };

    /// Tokens of a lane's tables.
    const fn tokens(&self) -> u32 {
        self.length + self.growth + self.query_rows
    }

    /// Blocks of a lane's budget.
    const fn blocks(&self) -> u32 {
        self.budget.div_ceil(SLOT_BLOCK)
    }

    /// Pages of a lane.
    pub const fn lane_pages(&self) -> u32 {
        self.tokens().div_ceil(self.page)
    }

    /// Bytes of a page of a layer.
    const fn page_bytes(&self) -> u64 {
        self.page as u64 * self.stride as u64
    }

    /// Bytes of a layer's rows in host memory.
    pub const fn layer_bytes(&self) -> u64 {
        self.lanes as u64 * self.lane_pages() as u64 * self.page_bytes()
    }

    /// Each layer's share of `bytes`, in whole pages; 0 if they do not suffice for all layers.
    const fn share(&self, bytes: u64) -> u64 {
        let each = bytes / self.layers as u64 / self.page_bytes() * self.page_bytes();
        if each < self.layer_bytes() { 0 } else { each }
    }

    /// Bytes of a layer's slab.
    pub const fn slab_bytes(&self) -> u64 {
        self.tables().slots() as u64 * self.row as u64
    }

    /// A layer's tables, with the scratch slots that the rule requires.
    pub const fn tables(&self) -> TableShape {
        let scratch = (self.query_rows * self.k).saturating_sub(self.budget);
        let landing_base = 1 + self.lanes * scratch;
        let budget_base = (landing_base + self.lanes * self.query_rows).next_multiple_of(SLOT_BLOCK);
        TableShape {
            lanes: self.lanes,
            tokens: self.tokens(),
            query_rows: self.query_rows,
            scratch,
            waves: 1,
            scratch_base: 1,
            landing_base,
            budget_base,
            budget_blocks: self.lanes * self.blocks(),
        }
    }

    fn geometry(&self) -> Result<Geometry> {
        Geometry::new(Shape {
            layers: self.layers,
            top_k: self.k,
            runs: [self.row, 0],
            host_stride: self.stride,
            page_tokens: self.page,
            device_block_align: 1,
            ..Shape::DEEPSEEK_V3_2
        })
    }
}

/// The memory of a rig's rows.
#[derive(Debug)]
pub enum Places {
    /// No rows: tables alone.
    Tables,
    /// In host memory, with each lane's pages at random places.
    Host(Memory),
    /// In host memory, with a given slab for all layers; memory for one layer serves all, too.
    HostInto(Memory, Slice),
    /// In given memory of one layer, with the pages of all lanes.
    Given(Slice, Vec<u32>),
}

/// See the module's head.
#[derive(Debug)]
pub struct Rig {
    /// Its shape.
    pub extents: Extents,
    /// The device.
    pub device: Arc<dyn Probe>,
    /// Its pools.
    pub pools: Pools,
    /// The stream of its steps.
    pub timer: Timer,
    /// The rule, which performs the same steps.
    pub oracle: Oracle,
    /// The number of comparisons so far.
    pub checked: u64,
    geometry: Geometry,
    tables: TableShape,
    memory: Option<Memory>,
    /// Bytes from a layer's rows to the next layer's; 0 if all layers share their rows.
    layer_bytes: u64,
    slabs: Vec<Slice>,
    pages: Vec<u32>,
    descriptor: Memory,
    report: Memory,
    selection: Slice,
    answers: Slice,
    /// The step's number, its lanes by batch row, and its query rows.
    number: u64,
    lanes: Vec<u32>,
    query: u32,
    /// `[lanes][query][k]` of the next resolve.
    selected: Vec<i32>,
    bytes: Vec<u8>,
}

impl Rig {
    /// Joins all lanes, with nothing resident. `quick` as for [`Timer::new`].
    ///
    /// # Errors
    /// Errors of the device; [`forebay::Kind::OutOfMemory`].
    pub fn new(device: &Arc<dyn Probe>, extents: Extents, places: Places, quick: bool) -> Result<Rig> {
        let Extents { layers, lanes, k, query_rows, .. } = extents;
        let (geometry, tables) = (extents.geometry()?, extents.tables());
        let lane_pages = extents.lane_pages();
        let alone = matches!(places, Places::Tables);
        let expected = if alone { Expected::Resolved } else { Expected::Gathered };
        let (rows, memory, slab, pages) = match places {
            Places::Tables => (device.allocate(extents.layer_bytes())?, None, None, None),
            Places::Host(memory) => (memory.slice, Some(memory), None, None),
            Places::HostInto(memory, slab) => (memory.slice, Some(memory), Some(slab), None),
            Places::Given(slice, pages) => (slice, None, None, Some(pages)),
        };
        let layer_bytes = extents.share(rows.bytes());
        let layer_of = |layer: u32| match layer_bytes {
            // Tables alone need the extent of a layer's rows, but no rows; given memory has its own layout.
            0 => rows.part(0, rows.bytes()),
            bytes => rows.part(u64::from(layer) * bytes, bytes),
        };
        let pages = pages.unwrap_or_else(|| {
            let room = layer_bytes.max(extents.layer_bytes()) / extents.page_bytes();
            let mut pages: Vec<u32> = (0..room as u32).collect();
            let needed = (lane_pages * lanes) as usize;
            Numbers::new(1).draw(&mut pages, needed);
            pages.truncate(needed);
            pages
        });
        let slabs: Vec<Slice> = match slab {
            Some(slab) => vec![slab; layers as usize],
            None => (0..layers).map(|_| device.allocate(extents.slab_bytes())).collect::<Result<_>>()?,
        };
        let plan = PoolLayout {
            geometry: geometry.into(),
            tables: vec![tables; layers as usize],
            slabs: slabs.clone(),
            rows: (0..layers).map(layer_of).collect::<Result<_>>()?,
            lane_pages,
            micro_batches: 1,
            batch: lanes,
            expected,
        };
        let most = u64::from(lanes) * u64::from(query_rows) * u64::from(k) * 4;
        let mut rig = Rig {
            pools: device.attach(plan)?,
            timer: Timer::new(device, quick)?,
            oracle: Oracle::new(tables, layers, lanes, k)?,
            checked: 0,
            descriptor: Memory::new(&**device, 4 * step::words(lanes) as u64)?,
            report: Memory::new(&**device, 4 * Report::words(layers, lanes) as u64)?,
            selection: device.allocate(most)?,
            answers: device.allocate(most)?,
            device: Arc::clone(device),
            number: 0,
            lanes: Vec::new(),
            query: 1,
            selected: Vec::new(),
            bytes: Vec::new(),
            extents,
            geometry,
            tables,
            memory,
            layer_bytes,
            slabs,
            pages,
        };
        (0..lanes).try_for_each(|lane| rig.join(lane))?;
        rig.wait()?;
        Ok(rig)
    }

    /// Writes to all slots once, so that no figure includes first touches.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn touch(&self) -> Result<()> {
        let zeros = vec![0; CHUNK as usize];
        for slab in &self.slabs {
            for at in (0..slab.bytes()).step_by(CHUNK as usize) {
                let bytes = CHUNK.min(slab.bytes() - at);
                self.device.write(slab.part(at, bytes)?, zeros.get(..bytes as usize).unwrap_or_default())?;
            }
        }
        Ok(())
    }

    /// The stream of its steps.
    pub fn stream(&self) -> Stream {
        self.timer.stream()
    }

    /// Waits for everything enqueued on the stream.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn wait(&self) -> Result<()> {
        self.timer.wait()
    }

    /// The initial tokens of a lane.
    fn begins_with(&self, lane: u32) -> u32 {
        let Extents { length, shorter, .. } = self.extents;
        length - (mix(u64::from(lane)) % u64::from(shorter + 1)) as u32
    }

    /// Joins a lane on both sides.
    fn join(&mut self, lane: u32) -> Result<()> {
        let Extents { layers, budget, .. } = self.extents;
        let (count, length) = (self.extents.blocks(), self.begins_with(lane));
        let own: Vec<u32> = (lane * count..(lane + 1) * count).collect();
        self.oracle.join(lane, &own, budget, length)?;
        let (blocks, budgets) = (vec![own; layers as usize], vec![budget; layers as usize]);
        let lane_pages = self.extents.lane_pages() as usize;
        let pages = self.pages.get(lane as usize * lane_pages..).unwrap_or_default();
        let pages = pages.get(..lane_pages).unwrap_or_default();
        let join = Join { lane: Lane(lane), length, pages, blocks: &blocks, budgets: &budgets };
        self.device.enqueue(self.pools, self.stream(), PoolOp::Join(join))
    }

    /// Gives a lane to a new sequence of the same length.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn rejoin(&mut self, lane: u32) -> Result<()> {
        self.device.enqueue(self.pools, self.stream(), PoolOp::Leave(Lane(lane)))?;
        self.oracle.leave(lane);
        self.join(lane)?;
        self.wait()
    }

    /// Fills every lane's budget in every layer with selections of random rows, as prompts do; then makes `decoded`
    /// more as decode steps do ([`reuse`]). Copies no bytes: rows that were not fetched are not compared.
    ///
    /// # Errors
    /// Errors of the device, and of [`Oracle::select`].
    pub fn fill(&mut self, decoded: u32) -> Result<()> {
        let Extents { layers, lanes, k, budget, .. } = self.extents;
        let prompt = budget.div_ceil(k);
        let (steps, served) = (prompt + decoded, Wanted::share(k, 1, reuse::MISSED));
        let room = self.device.allocate(u64::from(layers * steps * k) * 4)?;
        let mut numbers = Numbers::new(3);
        for lane in 0..lanes {
            let length = self.begins_with(lane);
            let mut selections = Vec::with_capacity((layers * steps * k) as usize);
            for layer in 0..layers {
                let mut all: Vec<u32> = (0..length).collect();
                numbers.draw(&mut all, (prompt * k) as usize);
                let mut from = selections.len();
                let end = from + (prompt * k) as usize;
                selections.extend(all.iter().take((prompt * k) as usize).map(|position| *position as i32));
                selections.resize(end, -1);
                for _ in 0..decoded {
                    self.oracle.warm_layer(layer, lane, selections.get(from..).unwrap_or_default())?;
                    from = selections.len();
                    self.oracle.select(layer, lane, served, &mut selections)?;
                }
                self.oracle.warm_layer(layer, lane, selections.get(from..).unwrap_or_default())?;
            }
            self.write_words(room, &selections)?;
            let warm = Warm { lane: Lane(lane), group: None, whole: false, selections: Some(room), steps };
            self.device.enqueue(self.pools, self.stream(), PoolOp::Warm(warm))?;
            self.wait()?;
        }
        Ok(())
    }

    /// Writes words to device memory, and waits.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn write_words(&mut self, slice: Slice, words: &[i32]) -> Result<()> {
        self.bytes.clear();
        self.bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self.device.write(slice, &self.bytes)
    }

    /// Begins a step of `lanes` with `query` query rows; the first `accepted` rows of the previous step stay. Returns
    /// the time of the commit in microseconds. Calls `moved` for every landed row that got a slot.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn begin(
        &mut self,
        lanes: &[u32],
        accepted: u32,
        query: u32,
        moved: impl FnMut(u32, u32, forebay::residency::Moved),
    ) -> Result<f64> {
        self.number += 1;
        self.query = query;
        self.lanes.clear();
        self.lanes.extend_from_slice(lanes);
        let mut words = vec![0; step::words(self.extents.lanes)];
        let entries = lanes.iter().map(|lane| Entry { lane: *lane, accepted, query_rows: query });
        step::encode(self.number, entries, &mut words);
        self.descriptor.map.copy_in_words(0, &words)?;
        let begin = Begin { micro_batch: MicroBatch(0), descriptor: self.descriptor.slice, accepted: None };
        let us = self.timer.time(|stream| self.device.enqueue(self.pools, stream, PoolOp::Begin(begin)))?;
        self.oracle.begin(lanes, accepted, query, moved)?;
        Ok(us)
    }

    /// All batch rows of the step in a layer.
    pub fn range(&self, layer: u32) -> StepRange {
        let rows = QueryRange { first: 0, count: self.query };
        let count = self.lanes.len() as u32;
        StepRange { micro_batch: MicroBatch(0), layer: Layer(layer), first: 0, count, rows }
    }

    /// The first `batch` batch rows of a layer, whether or not a step has begun for them: the step range, and the
    /// buffers of its resolve.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for more batch rows than there are.
    pub fn unbegun(&self, layer: u32, batch: u32) -> Result<(StepRange, Slice, ResolveOutput)> {
        let range = StepRange {
            micro_batch: MicroBatch(0),
            layer: Layer(layer),
            first: 0,
            count: batch,
            rows: QueryRange { first: 0, count: 1 },
        };
        let bytes = 4 * u64::from(batch) * u64::from(self.extents.k);
        let output = ResolveOutput { slots: self.answers.part(0, bytes)?, split_indices: None };
        Ok((range, self.selection.part(0, bytes)?, output))
    }

    /// Draws the selections of the step's lanes in a layer, by batch row, and copies them to the device.
    ///
    /// # Errors
    /// Errors of [`Oracle::select`].
    pub fn select(&mut self, layer: u32, wanted: impl Fn(usize) -> Wanted) -> Result<()> {
        let mut selected = std::mem::take(&mut self.selected);
        selected.clear();
        for (row, lane) in self.lanes.iter().enumerate() {
            self.oracle.select(layer, *lane, wanted(row), &mut selected)?;
        }
        self.choose(selected)
    }

    /// Copies a selection `[lanes][query][k]` to the device.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn choose(&mut self, selected: Vec<i32>) -> Result<()> {
        let slice = self.selection.part(0, 4 * selected.len() as u64)?;
        self.write_words(slice, &selected)?;
        self.selected = selected;
        Ok(())
    }

    /// Enqueues the layer's resolve.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn resolve(&self, layer: u32, stream: Stream) -> Result<()> {
        let bytes = 4 * self.selected.len() as u64;
        let output = ResolveOutput { slots: self.answers.part(0, bytes)?, split_indices: None };
        let selection = self.selection.part(0, bytes)?;
        self.device.enqueue(
            self.pools,
            stream,
            PoolOp::Resolve { range: self.range(layer), selection, output },
        )
    }

    /// Enqueues the layer's gather.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn gather(&self, layer: u32, stream: Stream) -> Result<()> {
        self.device.enqueue(self.pools, stream, PoolOp::Gather { range: self.range(layer), wave: 0 })
    }

    /// Resolves by the rule, and compares every slot with the device's resolve, which has run.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for a difference; errors of the device.
    pub fn check_answers(&mut self, layer: u32) -> Result<()> {
        self.oracle.resolve(layer, &self.lanes, self.query, &self.selected)?;
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(4 * self.selected.len(), 0);
        self.device.read(self.answers.part(0, bytes.len() as u64)?, &mut bytes)?;
        let found: Vec<i32> = bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
        self.bytes = bytes;
        let per_row = (self.query * self.extents.k) as usize;
        self.checked += compare_slots(layer, per_row, &found, &self.oracle.slots)?;
        Ok(())
    }

    /// Compares every row that the layer's gather has fetched with the total pool.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for a difference; errors of the device.
    pub fn check_rows(&mut self, layer: u32) -> Result<()> {
        let lists = std::mem::take(&mut self.oracle.fetches);
        let compared = self.lanes.iter().zip(&lists).try_fold(0, |sum, (lane, list)| {
            let wanted = |row: &Fetch, bytes: &mut [u8]| self.host_row(layer, *lane, row.position, bytes);
            self.compare_rows(layer, *lane, list, wanted).map(|compared| sum + compared)
        });
        self.oracle.fetches = lists;
        self.checked += compared?;
        Ok(())
    }

    /// Compares rows in a lane's slots with the expected contents of `wanted`. Returns how many.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for a difference; errors of the device.
    pub fn compare_rows(
        &self,
        layer: u32,
        lane: u32,
        list: &[Fetch],
        wanted: impl Fn(&Fetch, &mut [u8]) -> Result<()>,
    ) -> Result<u64> {
        let row = self.extents.row as usize;
        let slots = self.extents.blocks() * SLOT_BLOCK;
        let first = self.tables.budget_base + lane * slots;
        let mut area = Vec::new();
        if list.len() >= ONE_BY_ONE {
            area.resize(slots as usize * row, 0);
            self.device.read(self.slot_rows(layer, first, slots)?, &mut area)?;
        }
        let (mut one, mut must) = (vec![0; row], vec![0; row]);
        for fetch in list {
            wanted(fetch, &mut must)?;
            let at = fetch.slot.wrapping_sub(first) as usize;
            let found = match area.get(at.saturating_mul(row)..).and_then(|rows| rows.get(..row)) {
                Some(found) => found,
                None => {
                    self.device.read(self.slot_rows(layer, fetch.slot, 1)?, &mut one)?;
                    &one[..]
                }
            };
            compare_row(found, &must, || {
                format!("layer {layer}, lane {lane}, position {}, slot {}", fetch.position, fetch.slot)
            })?;
        }
        Ok(list.len() as u64)
    }

    /// `count` slots of a layer's slab, from `first` on.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for slots outside the slab.
    pub fn slot_rows(&self, layer: u32, first: u32, count: u32) -> Result<Slice> {
        let row = u64::from(self.extents.row);
        match self.slabs.get(layer as usize) {
            Some(slab) => slab.part(u64::from(first) * row, u64::from(count) * row),
            None => Err(differs(format!("layer {layer}"), self.slabs.len() as u64, u64::from(layer))),
        }
    }

    /// A lane's landing slots, from the first one on.
    pub fn landing(&self, lane: u32) -> u32 {
        self.tables.landing_base + lane * self.tables.query_rows
    }

    /// The place of a lane's position in host memory.
    fn host_offset(&self, layer: u32, lane: u32, position: u32) -> u64 {
        let (page, token) = (position / self.extents.page, position % self.extents.page);
        let place = lane as usize * self.extents.lane_pages() as usize + page as usize;
        let page = self.pages.get(place).copied().unwrap_or_default();
        u64::from(layer) * self.layer_bytes + self.geometry.host_offset(page, token)
    }

    /// The bytes of a lane's position in the total pool.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfRange`] for a rig without a total pool.
    pub fn host_row(&self, layer: u32, lane: u32, position: u32, bytes: &mut [u8]) -> Result<()> {
        match &self.memory {
            Some(memory) => memory.map.copy_out(self.host_offset(layer, lane, position), bytes),
            None => Err(differs("a rig without a total pool".to_owned(), 1, 0)),
        }
    }

    /// Ends the step and compares its report: no error, the hits and misses of each layer, lengths.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for a difference; errors of the device.
    pub fn end(&mut self) -> Result<()> {
        let Extents { layers, lanes, .. } = self.extents;
        self.device.enqueue(
            self.pools,
            self.stream(),
            PoolOp::Report { micro_batch: MicroBatch(0), slot: self.report.slice },
        )?;
        self.wait()?;
        let mut words = vec![0; Report::words(layers, lanes)];
        self.report.map.copy_out_words(0, &mut words)?;
        let mut report = Report::with_room(layers, lanes);
        report.decode(&words, self.number, self.lanes.len())?;
        if let Some(sticky) = report.sticky {
            let place =
                format!("layer {}, batch row {}: {}", sticky.layer, sticky.row, sticky.cause.describe());
            return Err(differs(place, 0, sticky.value.into()));
        }
        for (layer, (found, wanted)) in report.layers.iter().zip(&self.oracle.counts).enumerate() {
            let words = |count: &LayerCount| [count.hits, count.misses, count.scratch].map(u64::from);
            for ((what, found), wanted) in
                ["hits", "misses", "scratch rows"].into_iter().zip(words(found)).zip(words(wanted))
            {
                if found != wanted {
                    return Err(differs(format!("{what} of layer {layer} in the report"), wanted, found));
                }
            }
        }
        for (lane, found) in self.lanes.iter().zip(&report.lengths) {
            let wanted = self.oracle.length(*lane);
            if *found != wanted {
                return Err(differs(
                    format!("length of lane {lane} in the report"),
                    wanted.into(),
                    u64::from(*found),
                ));
            }
        }
        self.checked += self.lanes.len() as u64;
        Ok(())
    }

    /// Compares every lane's digest, and has the device check its tables.
    ///
    /// # Errors
    /// [`forebay::Kind::Internal`] for a difference or a failed check.
    pub fn finish(&mut self) -> Result<()> {
        for lane in 0..self.extents.lanes {
            let (found, wanted) = (self.device.digest(self.pools, Lane(lane))?, self.oracle.digest(lane));
            if found != wanted {
                return Err(differs(format!("digest of lane {lane}"), wanted, found));
            }
            self.checked += 1;
        }
        self.device.validate(self.pools)
    }
}
