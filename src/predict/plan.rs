//! Computes what fits on a GPU and in its part of the host's memory, and at which ratio.
//!
//! A plan is a [`Config`] and the bytes of a cache made from it, by [`Config::footprint`]: the functions that
//! divide the memory when the cache is created. The planner has no second arithmetic, only a search over batch and
//! slots. Weights, activations and workspace belong to the engine and are given; the rest of the GPU belongs to the
//! cache. Index keys come first: they all stay on the device, so they limit the live tokens at any ratio.
//!
//! Two batches frame every plan: the most sequences with all rows on the device ([`Planned::resident_batch`]), up
//! to which offload is not needed, and the most sequences at all ([`Planned::most_batch`]), each with only the
//! slots below which misses grow steeply. A third batch is in between: with elastic budgets the slots of a plan hold
//! all rows of fewer sequences than planned, and [`Planned::misses_from`] says from how many on they do not.
//!
//! **What it does not know.** Time. The simulator decides whether a larger batch pays for its misses. This module
//! reports only the cases in which offload cannot pay at any speed ([`Note::AllResident`], [`Note::Dense`]).

use crate::cache::{Config, Footprint, Slots};
use crate::device::descriptor::BATCH_MAX;
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometry, SLOT_BLOCK, Shape};
use crate::predict::elastic::Pool;
use crate::predict::model::Dims;
use crate::sparse::Budget;

/// Slots of a sequence and layer below which mean misses leave the flat part of their curve: the ESS study keeps
/// at least this many to miss fewer than 200 of 2048.
pub const FEW_SLOTS: u32 = 6400;

/// Limits beyond any engine: query rows of a step, steps in flight, micro-batches, sequences of a GPU.
const QUERY_ROWS_MAX: u32 = 1 << 10;
const STEPS_MAX: u32 = 1 << 10;
const MICRO_BATCHES_MAX: u32 = 1 << 10;
const SEQUENCES_MAX: u32 = 1 << 24;

/// How many sequences are on the GPU at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// This number, above 0.
    Sequences(u32),
    /// As many as fit.
    Most,
}

/// Slots as a fraction of the context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ratio {
    /// This fraction, above 0 and at most 1.
    Share(f64),
    /// The largest that fits; with [`Batch::Most`] the one that leaves [`Demand::least_slots`].
    Auto,
}

/// The inputs of a plan. Bytes are of one GPU, and of its part of the host's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The model's cache.
    pub shape: Shape,
    /// Tokens of the longest sequence that the model was made for; none if unknown.
    pub longest: Option<u32>,
    /// Bytes of the GPU's memory.
    pub gpu: u64,
    /// Bytes of weights on it.
    pub weights: u64,
    /// Bytes of activations.
    pub activations: u64,
    /// Bytes of the engine's other memory: workspace, graphs, communication buffers.
    pub workspace: u64,
    /// Bytes of host memory for the total pool; none for as many as it needs.
    pub host: Option<u64>,
    /// Tokens of a sequence at its end, prompt and promised.
    pub context: u32,
    /// Query rows of a step: 1 + drafts.
    pub query_rows: u32,
    /// Steps of one sequence that may be in flight.
    pub steps_in_flight: u32,
    /// Micro-batches that the batch is divided into.
    pub micro_batches: u32,
    /// Sequences.
    pub batch: Batch,
    /// Slots of each.
    pub ratio: Ratio,
    /// The fewest slots of each sequence when the plan maximises sequences.
    pub least_slots: u32,
    /// Whether residency tables, and the GPU's page tables of host memory, count as memory that has to fit; otherwise
    /// they are only reported.
    pub count_tables: bool,
    /// The granularity of the device's mappings in bytes. 2 MiB on current GPUs.
    pub grain: u64,
}

impl Demand {
    /// One GPU of `gpu` bytes that holds only the cache of sequences of `context` tokens: as many as
    /// fit, at the ratio that leaves each [`FEW_SLOTS`], with one query row and tables counted.
    pub const fn new(shape: Shape, gpu: u64, context: u32) -> Demand {
        Demand {
            shape,
            longest: None,
            gpu,
            weights: 0,
            activations: 0,
            workspace: 0,
            host: None,
            context,
            query_rows: 1,
            steps_in_flight: 2,
            micro_batches: 1,
            batch: Batch::Most,
            ratio: Ratio::Auto,
            least_slots: FEW_SLOTS,
            count_tables: true,
            grain: 2 << 20,
        }
    }
}

/// What a reader of a plan should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// All rows of the whole batch fit on the device: offload moves bytes and gains nothing.
    AllResident,
    /// Dense attention reads every row in every step: no row can stay in host memory.
    Dense,
    /// Fewer slots per sequence and layer than [`FEW_SLOTS`], with a context that is longer.
    FewSlots,
    /// Fewer slots than a step selects: the other rows use scratch slots.
    Scratch,
    /// Host memory, not the GPU's, limits the batch.
    HostBound,
    /// Even the most sequences with [`Demand::least_slots`] are no more than fit with all rows resident.
    NoRoom,
    /// The most sequences with all rows on the device yield as many tokens per second; set by [`super::worth`].
    Slower,
    /// The misses at this ratio, or the costs at this batch, are unknown; set by [`super::worth`].
    Unknown,
    /// Larger batches were not tried, because their misses or costs are unknown; set by [`super::worth`].
    Untried,
    /// A sequence decodes fewer tokens per second than required; set by [`super::worth`].
    TooSlow,
    /// Batches with offload yield more, but decode fewer tokens per second than required; set by
    /// [`super::worth`].
    MoreTooSlow,
}

impl Note {
    /// The note in a sentence.
    pub const fn describe(self) -> &'static str {
        match self {
            Note::AllResident => "does not pay here: all rows of this batch fit on the device",
            Note::Dense => "does not pay here: dense attention reads every row in every step",
            Note::FewSlots => "fewer than 6400 slots a sequence and layer: expect many misses",
            Note::Scratch => {
                "fewer slots than a step selects: the other rows use scratch slots for that step"
            }
            Note::HostBound => "host memory limits the batch",
            Note::Slower => {
                "does not pay here: fewer sequences, all rows on the device, yield as many tokens a second"
            }
            Note::Unknown => "not simulated: misses or costs are unknown here",
            Note::Untried => "larger batches were not tried: misses or costs are unknown there",
            Note::TooSlow => "a sequence decodes fewer tokens a second than --min-otps",
            Note::MoreTooSlow => {
                "batches with offload yield more, but decode fewer tokens a second each than --min-otps"
            }
            Note::NoRoom => {
                "does not pay here: index keys and slots leave room for no more sequences than whole rows"
            }
        }
    }
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// Sequences.
    pub batch: u32,
    /// Slots of each in each layer.
    pub slots: u32,
    /// Slots as a fraction of the context.
    pub ratio: f64,
    /// The configuration for [`crate::Cache::new`]; none if nothing is offloaded.
    pub config: Option<Config>,
    /// Its bytes. Without offload: index keys, and rows in whole blocks as `slots`.
    pub bytes: Footprint,
    /// Bytes of the GPU that weights, activations and workspace leave.
    pub available: u64,
    /// The most sequences with all rows on the device.
    pub resident_batch: u32,
    /// The most sequences with [`Demand::least_slots`] slots each; [`Planned::resident_batch`] if that is more.
    pub most_batch: u32,
    /// The most tokens, of all open sequences together, whose index keys fit in [`Planned::available`] if no row takes
    /// any of it; none for a model without index keys.
    pub live_tokens: Option<u64>,
    /// With elastic budgets ([`Config::share`] set in [`Planned::config`]), the smallest batch whose rows do not all
    /// have slots: one sequence fewer misses nothing. None if the rows of the whole batch have slots. It counts slots;
    /// what a change of budgets costs is not included ([`Pool`]).
    pub misses_from: Option<u32>,
    /// Notes for the reader.
    pub notes: Vec<Note>,
}

impl Planned {
    /// Whether rows are in host memory.
    pub const fn offloads(&self) -> bool {
        self.config.is_some()
    }

    /// The slots of a layer, all sequences together.
    pub const fn pool(&self) -> Pool {
        Pool::planned(self.batch, self.slots)
    }
}

fn invalid(field: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "plan").at(field)
}

/// The longest sequence in tokens of the preset `name`, by its published configuration.
pub fn longest_context(name: &str) -> Option<u32> {
    Dims::preset(name).map(|dims| dims.context_max)
}

/// Makes a plan.
///
/// # Errors
/// [`Kind::InvalidConfig`] names an invalid field: no batch, no context or one beyond the model, a
/// ratio outside (0, 1], no least slots. [`Kind::OutOfMemory`] names what does not fit, with `wanted` and `available`
/// bytes: weights, activations and workspace, the GPU, or the host. [`Kind::Overflow`] for more sequences than any
/// GPU serves, and for sizes that overflow. Errors of [`Config::footprint`].
pub fn plan(demand: &Demand) -> Result<Planned> {
    let room = Room::new(demand)?;
    let resident_batch = most(|lanes| Ok(room.resident(lanes)?.device() <= room.available))?;
    let sparse = demand.shape.top_k > 0;
    let least = demand.least_slots.min(demand.context);
    let most_batch = if sparse { room.most_with(least)? } else { 0 }.max(resident_batch);
    let (batch, slots) = room.choose(resident_batch, most_batch, least)?;
    let whole = slots.is_none();
    let slots = slots.unwrap_or(demand.context);
    let (config, bytes) = match whole {
        true => (None, room.resident(batch)?),
        false => {
            let config = room.config(batch, slots)?;
            let bytes = config.footprint(demand.grain)?;
            (Some(config), bytes)
        }
    };
    let notes = room.notes(batch, slots, whole, resident_batch, most_batch);
    let misses_from = Pool::planned(batch, slots).misses_from(demand.context);
    let key = u64::from(demand.shape.index_key_bytes) * u64::from(room.geometry.index_layers());
    Ok(Planned {
        batch,
        slots,
        ratio: f64::from(slots) / f64::from(demand.context),
        config,
        bytes,
        available: room.available,
        resident_batch,
        most_batch,
        live_tokens: room.available.checked_div(key),
        misses_from: Some(misses_from).filter(|first| *first <= batch),
        notes,
    })
}

/// The most sequences for which `fits` holds; if so, it holds for all smaller numbers, because every part of a
/// footprint grows with the sequences.
pub(super) fn most(fits: impl Fn(u32) -> Result<bool>) -> Result<u32> {
    let (mut most, mut beyond) = (0, 1);
    while fits(beyond)? {
        if beyond >= SEQUENCES_MAX {
            return Err(Error::new(Kind::Overflow, "plan")
                .at("gpu: has room for more sequences than the planner supports")
                .with("most", SEQUENCES_MAX)
                .hint("plan with a smaller GPU or a longer context"));
        }
        (most, beyond) = (beyond, beyond * 2);
    }
    while beyond - most > 1 {
        let middle = most + (beyond - most) / 2;
        if fits(middle)? { most = middle } else { beyond = middle }
    }
    Ok(most)
}

/// Bytes of a GPU's memory that the engine's own parts leave for the cache.
pub(super) fn available(gpu: u64, parts: [(&'static str, u64); 3]) -> Result<u64> {
    parts.into_iter().try_fold(gpu, |available, (field, bytes)| {
        available.checked_sub(bytes).filter(|left| *left > 0).ok_or_else(|| {
            Error::new(Kind::OutOfMemory, "plan")
                .at(format!("{field}: nothing of the GPU's memory is left for the cache"))
                .with(field, bytes)
                .with("available", available)
                .hint("plan with a larger GPU, or spread the weights over more of them")
        })
    })
}

/// A checked demand.
struct Room<'a> {
    demand: &'a Demand,
    geometry: Geometry,
    available: u64,
}

impl<'a> Room<'a> {
    fn new(demand: &'a Demand) -> Result<Room<'a>> {
        let geometry = Geometry::new(demand.shape)?;
        let counts = [
            ("context", demand.context),
            ("query_rows", demand.query_rows),
            ("steps_in_flight", demand.steps_in_flight),
            ("micro_batches", demand.micro_batches),
            ("least_slots", demand.least_slots),
        ];
        if let Some((field, _)) = counts.iter().find(|(_, count)| *count == 0) {
            return Err(invalid(field).with("value", 0_u32));
        }
        let most = [
            ("query_rows", demand.query_rows, QUERY_ROWS_MAX),
            ("steps_in_flight", demand.steps_in_flight, STEPS_MAX),
            ("micro_batches", demand.micro_batches, MICRO_BATCHES_MAX),
        ];
        if let Some((field, count, most)) = most.into_iter().find(|(_, count, most)| count > most) {
            return Err(invalid(field).with("value", count).with("most", most));
        }
        if demand.grain == 0 || demand.gpu == 0 {
            return Err(invalid(if demand.gpu == 0 { "gpu" } else { "grain" }).with("value", 0_u32));
        }
        if demand.batch == Batch::Sequences(0) {
            return Err(invalid("batch").with("value", 0_u32));
        }
        if let Ratio::Share(ratio) = demand.ratio
            && !(ratio > 0.0 && ratio <= 1.0)
        {
            return Err(invalid("ratio").hint("pass a ratio above 0 and at most 1"));
        }
        if let Some(longest) = demand.longest.filter(|longest| demand.context > *longest) {
            return Err(invalid("context is beyond the model's")
                .with("context", demand.context)
                .with("most", longest));
        }
        let available = available(
            demand.gpu,
            [
                ("weights", demand.weights),
                ("activations", demand.activations),
                ("workspace", demand.workspace),
            ],
        )?;
        Ok(Room { demand, geometry, available })
    }

    /// Pages of one sequence, including its rows in flight.
    fn pages(&self) -> Result<u32> {
        let Demand { context, query_rows, steps_in_flight, .. } = *self.demand;
        let reach = query_rows.checked_mul(steps_in_flight).and_then(|rows| rows.checked_add(context));
        Ok(self.geometry.pages(reach.ok_or_else(|| self.overflow("context"))?))
    }

    fn overflow(&self, field: &'static str) -> Error {
        Error::new(Kind::Overflow, "plan").at(field)
    }

    /// The configuration of a cache of `lanes` sequences with `slots` slots each.
    fn config(&self, lanes: u32, slots: u32) -> Result<Config> {
        let demand = self.demand;
        let product = |a: u32, b: u32| a.checked_mul(b).ok_or_else(|| self.overflow("batch"));
        let pages = product(self.pages()?, lanes)?;
        let blocks = slots.div_ceil(SLOT_BLOCK);
        Ok(Config {
            host_pages: pages,
            index_pages: pages,
            slots: Slots::Uniform(product(product(blocks, SLOT_BLOCK)?, lanes)?),
            batch: lanes.div_ceil(demand.micro_batches),
            query_rows: demand.query_rows,
            steps_in_flight: demand.steps_in_flight,
            micro_batches: demand.micro_batches,
            ..Config::new(demand.shape, lanes, demand.context, slots)
        })
    }

    /// The bytes of `lanes` sequences with all rows on the device, as in an engine without offload.
    fn resident(&self, lanes: u32) -> Result<Footprint> {
        let overflow = || self.overflow("batch");
        let pages = self.pages()?.checked_mul(lanes).ok_or_else(overflow)?;
        let tokens = u64::from(pages) * u64::from(self.geometry.page_tokens());
        let blocks = tokens.div_ceil(u64::from(SLOT_BLOCK)) * u64::from(self.geometry.layers());
        let slots = blocks.checked_mul(u64::from(self.geometry.block_bytes())).ok_or_else(overflow)?;
        Ok(Footprint { index_keys: self.geometry.index_bytes(pages)?, slots, ..Footprint::default() })
    }

    /// The bytes that have to fit on the device.
    fn counted(&self, bytes: &Footprint) -> u64 {
        if self.demand.count_tables { bytes.device() } else { bytes.data() }
    }

    fn fits_host(&self, bytes: &Footprint) -> bool {
        self.demand.host.is_none_or(|host| bytes.host() <= host)
    }

    /// Whether memory suffices. A cache that is invalid with any memory is an error.
    fn fits(&self, lanes: u32, slots: u32) -> Result<bool> {
        match self.config(lanes, slots).and_then(|config| config.footprint(self.demand.grain)) {
            Ok(bytes) => Ok(self.counted(&bytes) <= self.available && self.fits_host(&bytes)),
            Err(error) if error.kind() == Kind::OutOfMemory => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The most sequences with `slots` slots each, in micro-batches that a cache supports.
    fn most_with(&self, slots: u32) -> Result<u32> {
        let widest = BATCH_MAX.saturating_mul(self.demand.micro_batches);
        most(|lanes| if lanes > widest { Ok(false) } else { self.fits(lanes, slots) })
    }

    /// The largest budget with which `lanes` sequences fit, in whole blocks or the whole context.
    fn largest(&self, lanes: u32) -> Result<Option<u32>> {
        let context = self.demand.context;
        // The upper bound counts index keys and slots alone. The search goes down block by block from there, because
        // scratch slots shrink as budgets grow, so the budgets that fit may have gaps.
        let pages = self.pages()?.checked_mul(lanes).ok_or_else(|| self.overflow("batch"))?;
        let keys = self.geometry.index_bytes(pages)?;
        let block =
            u64::from(self.geometry.block_bytes()) * u64::from(self.geometry.layers()) * u64::from(lanes);
        let room = self.available.saturating_sub(keys) / block.max(1);
        let most = u32::try_from(room).unwrap_or(u32::MAX).min(context.div_ceil(SLOT_BLOCK));
        for blocks in (1..=most).rev() {
            let slots = blocks.saturating_mul(SLOT_BLOCK).min(context);
            if self.fits(lanes, slots)? {
                return Ok(Some(slots));
            }
        }
        Ok(None)
    }

    /// Batch and slots; no slots if all rows stay on the device.
    fn choose(&self, resident: u32, most: u32, least: u32) -> Result<(u32, Option<u32>)> {
        let demand = self.demand;
        if demand.shape.top_k == 0 {
            if matches!(demand.ratio, Ratio::Share(ratio) if ratio < 1.0) {
                return Err(
                    invalid("ratio of a dense model").hint("pass ratio 1: dense attention reads every row")
                );
            }
            return match demand.batch {
                Batch::Most if resident > 0 => Ok((resident, None)),
                Batch::Most => Err(self.too_large(1, None)),
                Batch::Sequences(batch) if batch <= resident => Ok((batch, None)),
                Batch::Sequences(batch) => Err(self.too_large(batch, None)),
            };
        }
        match (demand.batch, demand.ratio) {
            (Batch::Sequences(batch), Ratio::Auto) if batch <= resident => Ok((batch, None)),
            (Batch::Sequences(batch), Ratio::Auto) => match self.largest(batch)? {
                Some(slots) => Ok((batch, Some(slots))),
                None => Err(self.too_large(batch, Some(SLOT_BLOCK.min(demand.context)))),
            },
            (Batch::Most, Ratio::Auto) if most == 0 => Err(self.too_large(1, Some(least))),
            (Batch::Most, Ratio::Auto) if most == resident => Ok((resident, None)),
            (Batch::Most, Ratio::Auto) => Ok((most, Some(self.largest(most)?.unwrap_or(least)))),
            (Batch::Sequences(batch), Ratio::Share(ratio)) => {
                let slots = self.slots(ratio)?;
                if self.fits(batch, slots)? {
                    Ok((batch, Some(slots)))
                } else {
                    Err(self.too_large(batch, Some(slots)))
                }
            }
            (Batch::Most, Ratio::Share(ratio)) => {
                let slots = self.slots(ratio)?;
                match self.most_with(slots)? {
                    0 => Err(self.too_large(1, Some(slots))),
                    batch => Ok((batch, Some(slots))),
                }
            }
        }
    }

    fn slots(&self, ratio: f64) -> Result<u32> {
        let slots = Budget::Ratio(ratio).slots(self.demand.context, 1, 1)?;
        Ok(slots.first().copied().unwrap_or(1))
    }

    /// The error that says why `lanes` sequences do not fit.
    fn too_large(&self, lanes: u32, slots: Option<u32>) -> Error {
        let bytes = match slots {
            Some(slots) => self.config(lanes, slots).and_then(|config| config.footprint(self.demand.grain)),
            None => self.resident(lanes),
        };
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) => return error,
        };
        let wanted = self.counted(&bytes);
        let (place, wanted, available) = match self.demand.host {
            Some(host) if wanted <= self.available => {
                ("host: the total pool of this batch", bytes.host(), host)
            }
            _ => ("gpu: the cache of this batch", wanted, self.available),
        };
        Error::new(Kind::OutOfMemory, "plan")
            .at(place)
            .with("batch", lanes)
            .with("wanted", wanted)
            .with("available", available)
            .hint("plan with a smaller batch, context or ratio, or with more memory")
    }

    fn notes(&self, batch: u32, slots: u32, whole: bool, resident: u32, most: u32) -> Vec<Note> {
        let demand = self.demand;
        let selected = demand.query_rows.saturating_mul(demand.shape.top_k);
        let dense = demand.shape.top_k == 0;
        let asked = match demand.ratio {
            Ratio::Auto => demand.least_slots.min(demand.context),
            Ratio::Share(_) => slots,
        };
        let more = |lanes: u32| {
            let bytes = self.config(lanes, asked).and_then(|config| config.footprint(demand.grain));
            bytes.is_ok_and(|bytes| self.counted(&bytes) <= self.available && !self.fits_host(&bytes))
        };
        let wants_most = demand.batch == Batch::Most;
        let host_bound = !dense && wants_most && more(batch + 1);
        let all = [
            (Note::Dense, dense),
            (Note::AllResident, !dense && batch <= resident),
            (Note::NoRoom, !dense && wants_most && most == resident && !host_bound),
            (Note::FewSlots, !whole && slots < FEW_SLOTS.min(demand.context)),
            (Note::Scratch, !whole && slots < selected.min(demand.context)),
            (Note::HostBound, host_bound),
        ];
        all.into_iter().filter(|(_, holds)| *holds).map(|(note, _)| note).collect()
    }
}
