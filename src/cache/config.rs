//! The configuration of a cache: sizes that never change, and checks that name the wrong field.
//!
//! [`Config::check`] checks all numbers before any memory is taken. `footprint` checks whether the machine has the
//! memory. The sizes of the ring and of the sparse pool follow from the same numbers, and so does the reach of a
//! sequence: its tokens with its rows in flight, for which admission reserves memory.

use crate::device::descriptor::{self, BATCH_MAX};
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometries, IndexGroup, SLOT_BLOCK, Shape};
use crate::sparse::{Share, SparseConfig, one_of};
use crate::step::RingShape;
use crate::total::memory::Memory;

/// The configuration of a cache. No part of a cache grows later.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The shape of the model's cache.
    pub shape: Shape,
    /// The bytes of each layer's runs ([`Shape::runs`]), draft layers included, for a model whose layers have different
    /// rows. Empty: every layer has the shape's.
    pub rows: Vec<[u32; 2]>,
    /// The layers that share a selection, by ascending layer: every layer in one group, draft layers in groups of their
    /// own or left out. Empty: as the shape says ([`Shape::group_layers`]).
    pub index_groups: Vec<IndexGroup>,
    /// Pages of the total pool.
    pub host_pages: u32,
    /// Pages of index keys on the device.
    pub index_pages: u32,
    /// Slots of each layer's sparse pool, in whole blocks of 64 a sequence.
    pub slots: Slots,
    /// The smallest budget that a sequence may have in any layer. The rows of a step's selections that do not fit
    /// this budget need scratch slots: `query_rows x top_k - min_budget` for each lane.
    pub min_budget: u32,
    /// The most attention waves of a step. The waves use the same scratch slots one after the other, so a lane needs
    /// scratch slots for only one wave. More than one wave needs split attention
    /// ([`Cache::overlap`](crate::Cache::overlap)). The cache uses no more waves than have rows to fetch:
    /// [`Cache::attention_waves`](crate::Cache::attention_waves).
    pub attention_waves: u32,
    /// Lets the cache set the budgets of its sequences: it divides all slots, and each sequence's own budget is only
    /// the least that it gets. `None`: a sequence keeps the budget that it was opened with until the engine resizes
    /// it.
    pub share: Option<Share>,
    /// Sequences that may be open at the same time.
    pub lanes: u32,
    /// Sequences that may be parked at the same time, in addition to the open ones
    /// ([`Cache::park`](crate::Cache::park)).
    pub parked: u32,
    /// Sequences that may be arriving at the same time, in addition to the open and parked ones
    /// ([`Cache::arrive`](crate::Cache::arrive)).
    pub arriving: u32,
    /// Tokens of the longest sequence: prompt plus promised tokens.
    pub max_tokens: u32,
    /// Rows of a batch, at most 32,767: a report can name no more.
    pub batch: u32,
    /// Query rows a sequence may have in a step: 1 + drafts.
    pub query_rows: u32,
    /// Steps of one sequence that may be in flight at the same time.
    pub steps_in_flight: u32,
    /// Micro-batches whose steps may be open at the same time.
    pub micro_batches: u32,
    /// Tracks which rows are resident without their bytes, and gathers nothing. For replays, which count the rows that
    /// would move. Until a row is appended, the total pool then takes addresses and no memory, whatever
    /// [`Config::memory`] asks for. But on a device that pins host memory
    /// ([`Device::pins_host_memory`](crate::device::Device)) the pool takes all of its memory.
    pub residency_only: bool,
    /// How the total pool's memory is taken.
    pub memory: Memory,
    /// Skips the check that the machine has enough memory. For machines that report less memory than they can give.
    pub overcommit: bool,
}

/// The slots of each layer's sparse pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slots {
    /// The same number of slots in every layer.
    Uniform(u32),
    /// The number of slots of each layer, draft layers included. Layers of one index group have the same number.
    ByLayer(Vec<u32>),
}

impl Config {
    /// A cache of `shape` for `lanes` sequences of up to `max_tokens` tokens. All sequences fit one batch, with one
    /// query row each. Each sequence has `slots` slots in each layer.
    pub fn new(shape: Shape, lanes: u32, max_tokens: u32, slots: u32) -> Self {
        let pages = max_tokens.div_ceil(shape.page_tokens.max(1)).saturating_add(1).saturating_mul(lanes);
        let blocks = slots.div_ceil(SLOT_BLOCK);
        Config {
            shape,
            rows: Vec::new(),
            index_groups: Vec::new(),
            host_pages: pages,
            index_pages: pages,
            slots: Slots::Uniform(blocks.saturating_mul(SLOT_BLOCK).saturating_mul(lanes)),
            min_budget: slots,
            attention_waves: 1,
            share: None,
            lanes,
            parked: 0,
            arriving: 0,
            max_tokens,
            batch: lanes,
            query_rows: 1,
            steps_in_flight: 2,
            micro_batches: 1,
            residency_only: false,
            memory: Memory::default(),
            overcommit: false,
        }
    }

    /// The row format of every layer, and the index groups.
    pub(super) fn geometries(&self) -> Result<Geometries> {
        Geometries::new(self.shape, &self.rows, &self.index_groups)
    }

    pub(super) fn check(&self, geometry: &Geometries) -> Result<()> {
        let counts = [
            ("lanes", self.lanes),
            ("max_tokens", self.max_tokens),
            ("host_pages", self.host_pages),
            ("index_pages", self.index_pages),
            ("batch", self.batch),
            ("query_rows", self.query_rows),
            ("steps_in_flight", self.steps_in_flight),
            ("micro_batches", self.micro_batches),
            ("min_budget", self.min_budget),
            ("attention_waves", self.attention_waves),
            ("top_k (dense attention needs no sparse pool)", self.shape.top_k),
        ];
        if let Some((name, _)) = counts.iter().find(|(_, count)| *count == 0) {
            let error = Error::new(Kind::InvalidConfig, "cache").at(*name).with("value", 0_u32);
            return Err(error.hint("pass 1 or more"));
        }
        if self.batch > BATCH_MAX {
            let error = Error::new(Kind::InvalidConfig, "cache").at("batch").with("value", self.batch);
            return Err(error.with("most", BATCH_MAX).hint("divide the batch over several micro-batches"));
        }
        self.check_slots(geometry)?;
        // Positions are written as i32, and some values are reserved as marks.
        if self.reach(self.max_tokens)? >= i32::MAX as u32 {
            let error =
                Error::new(Kind::InvalidConfig, "cache").at("max_tokens").with("value", self.max_tokens);
            return Err(error.hint("max_tokens + query_rows x steps_in_flight must stay below 2147483647"));
        }
        self.share.as_ref().map_or(Ok(()), |share| self.check_share(share, geometry))?;
        self.check_pools(geometry)
    }

    /// Rejects a share whose steps could not move a block.
    fn check_share(&self, share: &Share, geometry: &Geometries) -> Result<()> {
        share.check()?;
        let rows: u64 = geometry.formats().iter().map(|layer| u64::from(layer.row_bytes())).sum();
        let block = rows * u64::from(SLOT_BLOCK);
        match share.bytes_a_step < block {
            true => Err(Error::new(Kind::InvalidConfig, "share")
                .at("bytes_a_step")
                .with("value", share.bytes_a_step)
                .with("least", block)
                .hint("pass at least the bytes of 64 rows in every layer, else no sequence could shrink")),
            false => Ok(()),
        }
    }

    /// Checks a table of slots by layer.
    fn check_slots(&self, geometry: &Geometries) -> Result<()> {
        let Slots::ByLayer(table) = &self.slots else { return Ok(()) };
        let layers = geometry.layers() as usize;
        let wrong = || Error::new(Kind::InvalidConfig, "cache").at("slots by layer");
        if table.len() != layers {
            return Err(wrong().with("given", table.len() as u64).with("wanted", layers as u64));
        }
        (0..geometry.groups().len()).try_for_each(|group| match one_of(table, geometry.members(group)) {
            Ok(_) => Ok(()),
            Err(layer) => Err(wrong()
                .with("layer", layer as u64)
                .hint("give all layers of an index group the same slots")),
        })
    }

    /// Rejects pools that cannot hold a sequence of one token.
    fn check_pools(&self, geometry: &Geometries) -> Result<()> {
        let few = |place: &'static str, given: u32, least: u32, rule: &'static str| {
            let error = Error::new(Kind::InvalidConfig, "cache").at(place).with("given", given);
            Err(error.with("least", least).hint(rule))
        };
        let flight =
            "pass at least the pages of one token and the rows in flight: query_rows x steps_in_flight";
        let pages = geometry.pages(self.reach(1)?);
        if self.host_pages < pages {
            return few("host_pages", self.host_pages, pages, flight);
        }
        if self.index_pages < pages {
            return few("index_pages", self.index_pages, pages, flight);
        }
        // Each of them has a page or more.
        let most = self.host_pages.min(self.index_pages);
        if self.arriving > most {
            let error = Error::new(Kind::InvalidConfig, "cache").at("arriving").with("value", self.arriving);
            return Err(error.with("most", most).hint("pass at most the number of pages"));
        }
        let slots = match &self.slots {
            Slots::Uniform(slots) => Some(*slots),
            Slots::ByLayer(table) => table.iter().min().copied(),
        };
        match slots {
            Some(slots) if slots < self.min_budget => {
                few("slots", slots, self.min_budget, "pass at least min_budget")
            }
            _ => Ok(()),
        }
    }

    /// The tokens of a sequence together with its rows in flight.
    pub(super) fn reach(&self, tokens: u32) -> Result<u32> {
        let rows = self.query_rows.checked_mul(self.steps_in_flight);
        rows.and_then(|rows| rows.checked_add(tokens)).ok_or_else(|| {
            Error::new(Kind::Overflow, "cache")
                .at("max_tokens and the rows in flight: query_rows x steps_in_flight")
                .with("max_tokens", tokens)
                .with("query_rows", self.query_rows)
                .with("steps_in_flight", self.steps_in_flight)
        })
    }

    /// The most sequences that exist at the same time.
    pub(super) const fn records(&self) -> u32 {
        self.lanes.saturating_add(self.parked).saturating_add(self.arriving)
    }

    /// Bytes of a parked sequence's place: the positions of its newest rows, `[groups][top_k]` i32.
    pub(super) fn place_bytes(&self, geometry: &Geometries) -> u64 {
        4 * geometry.groups().len() as u64 * u64::from(self.shape.top_k)
    }

    pub(super) fn ring(&self, geometry: &Geometries) -> RingShape {
        let steps = self.steps_in_flight.saturating_mul(self.micro_batches);
        RingShape {
            steps,
            batch: self.batch,
            layers: geometry.layers(),
            query_rows: self.query_rows,
            descriptor_words: descriptor::step::words(self.batch),
        }
    }

    pub(super) fn sparse(&self, geometry: &Geometries) -> Result<SparseConfig> {
        let (scratch, waves) = self.shares()?;
        Ok(SparseConfig {
            lanes: self.lanes,
            tokens: self.reach(self.max_tokens)?,
            query_rows: self.query_rows,
            scratch,
            waves,
            slots: match &self.slots {
                Slots::Uniform(slots) => vec![*slots; geometry.groups().len()],
                Slots::ByLayer(table) => {
                    let firsts = geometry.groups().iter().map(|group| table.get(group.first as usize));
                    firsts.flatten().copied().collect()
                }
            },
        })
    }

    /// The scratch slots of a lane, and the number of waves that use them one after the other.
    fn shares(&self) -> Result<(u32, u32)> {
        let selected = self
            .query_rows
            .checked_mul(self.shape.top_k)
            .ok_or_else(|| Error::new(Kind::Overflow, "cache").at("query_rows x top_k"))?;
        let beyond = selected.saturating_sub(self.min_budget);
        let share = beyond.div_ceil(self.attention_waves);
        Ok((share, beyond.div_ceil(share.max(1)).max(1)))
    }
}
