//! Sharded weights in a simulated step: the production ring ([`Ring`]) over pulls that are priced and move nothing.
//!
//! The engine's hooks call the ring where a real engine calls it, so its events and streams decide when a pull runs
//! and which layer waits. A pull is one copy, over the link between GPUs or, from the host, over the link that gathers
//! use too. Bytes, rates, the end of a use inside the rest of a layer, and what pulls cost the memory are those of
//! [`sharded`](crate::predict::sharded), as the planner has them.
//!
//! **The border.** The step is one of many alike, as a graph that joins its last pulls: it begins with its first layers
//! there, and ends when those of the next step are there. The ring enqueues it by single calls, so the streams of the
//! buffers are joined behind it here.
//!
//! **What it does not do**: the launches of a pull's parts, other ranks that pull from this GPU at other times than it
//! pulls from them, and the wrap of a graph behind its launch.

use std::ops::Range;

use super::batch::{Batch, draft_passes};
use super::point::bad;
use crate::device::clock::{ClockDevice, Direction, Label};
use crate::device::{Device, Stream};
use crate::error::Result;
use crate::ids::Layer;
use crate::predict::cost::Load;
use crate::predict::setup::Setup;
use crate::predict::sharded::{Part, crossing, rate, slower};
use crate::sync::Arc;
use crate::weights::{self, Place, Plan, Ring, RingOptions, Source};

/// The names of the pulls into each buffer, as spans have them.
pub const PULLS: [&str; 3] = ["pull, buffer 0", "pull, buffer 1", "pull, buffer 2"];

/// What figures with sharded weights assume, in sentences.
pub const PULL_ASSUMPTIONS: [&str; 4] = [
    "pulls: one copy for each layer, and a link at its full rate whenever one runs",
    "pulls from peers: the engine's collectives come first; two pulls at once divide what they leave",
    "pulls write this GPU's memory and peers read it, which delays works that the memory bounds",
    "a step begins with its first layers there and ends with those of the next, as a graph that joins its last pulls",
];

/// What a step waits for, and how much slower its works are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pulls {
    /// Milliseconds that the step waits for pulls, the wrap into the next step included. All else runs as in the
    /// step without them, gathers and their waits too.
    pub exposed_ms: f64,
    /// Milliseconds that works take longer because pulls use the device's memory.
    pub slower_ms: f64,
    /// Microseconds of the longest pull, alone on the link.
    pub pull_us: f64,
    /// By layer, draft layers with a pass last, the exposed microseconds. They sum to all but the wrap.
    pub exposed_us: Vec<f64>,
}

/// A layer's pull: its buffer, and its bytes with those that come before them on the link.
#[derive(Clone, Copy, Debug)]
struct Pulled {
    buffer: usize,
    bytes: u64,
}

/// A plan, priced for one kind of step.
#[derive(Clone, Debug)]
pub struct Sharded {
    /// By layer of the plan's model.
    layers: Vec<Option<Pulled>>,
    direction: Direction,
    /// This rank.
    rank: u32,
    /// Layers that run in draft passes.
    draft_layers: usize,
    /// By layer, how many times longer its works take.
    pub slower: Vec<f64>,
    /// Microseconds of the longest pull, alone on the link.
    pub pull_us: f64,
}

impl Sharded {
    /// Prices `plan` for steps of this content.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] for a plan of another number of layers; errors of [`rate`];
    /// [`crate::Kind::OutOfRange`] for a load that the setup's costs do not reach.
    pub fn of(setup: &Setup, plan: &Plan, batch: &Batch) -> Result<Sharded> {
        let shape = setup.shape();
        let (once, all) = (shape.layers as usize, plan.model_layers());
        let run = once + if draft_passes(batch) > 0 { shape.draft_layers as usize } else { 0 };
        if !(run..=once + shape.draft_layers as usize).contains(&all) {
            return Err(bad("sharded: the plan is of a model with another number of layers")
                .with("layers", all as u64)
                .with("wanted", run as u64));
        }
        let rate = rate(setup, plan)?;
        let tokens = f64::from(batch.rows.iter().sum::<u32>()) * f64::from(batch.query_rows);
        let mut sharded = Sharded {
            layers: vec![None; all],
            direction: match plan.source() {
                Source::Peers => Direction::Peer,
                Source::Host => Direction::ToDevice,
            },
            rank: plan.group().rank,
            draft_layers: all - once,
            slower: vec![1.0; all],
            pull_us: 0.0,
        };
        let [of_layers, of_drafts] = [batch.query_rows, 1].map(|rows| layer(setup, batch, rows));
        let (of_layers, (pass_us, memory)) = (of_layers?, of_drafts?);
        // A draft layer is pulled once, however many passes it has.
        let passes = f64::from(draft_passes(batch).max(1));
        let of_drafts = (passes * pass_us, passes * memory);
        for one in plan.layers() {
            let Place::Buffer(buffer) = one.place else { continue };
            let (us, memory) = if one.layer < once { of_layers } else { of_drafts };
            let crossing = crossing(setup, plan, one, tokens);
            sharded.pull_us = sharded.pull_us.max(crossing / rate);
            let pulled = Pulled { buffer: buffer.into(), bytes: crossing.round() as u64 };
            sharded.layers.iter_mut().skip(one.layer).take(1).for_each(|layer| *layer = Some(pulled));
            let slower = slower(setup, plan, one, us, memory);
            sharded.slower.iter_mut().skip(one.layer).take(1).for_each(|layer| *layer = slower);
        }
        Ok(sharded)
    }

    /// The production ring over these pulls. Its first pulls are enqueued.
    ///
    /// # Errors
    /// Those of [`Ring::new`] and [`Ring::begin`].
    pub fn ring(&self, clock: &Arc<ClockDevice>, batch: &Batch) -> Result<Ring<OnClock>> {
        let device: Arc<dyn Device> = Arc::clone(clock) as Arc<dyn Device>;
        let pulls = OnClock { clock: Arc::clone(clock), sharded: self.clone() };
        let (micro_batches, draft_layers) = (batch.micro_batches(), self.draft_layers);
        let options = RingOptions { draft_layers, micro_batches, ..RingOptions::default() };
        let mut ring = Ring::new(&device, pulls, options)?;
        ring.begin(micro_batches, draft_passes(batch) as usize)?;
        Ok(ring)
    }
}

/// Microseconds of a layer of all micro-batches, and those that the memory bounds.
fn layer(setup: &Setup, batch: &Batch, query_rows: u32) -> Result<(f64, f64)> {
    let mut both = (0.0, 0.0);
    for rows in batch.rows.into_iter().take(batch.micro_batches()) {
        let load = Load {
            rows: rows.into(),
            query_rows: query_rows.into(),
            context: batch.context.into(),
            width: setup.shape().top_k.into(),
        };
        let part = Part::of(setup, &load, batch.exchanges(), 1)?;
        both = (both.0 + part.us(), both.1 + part.memory);
    }
    Ok(both)
}

/// Pulls on a clock without memory.
#[derive(Debug)]
pub struct OnClock {
    clock: Arc<ClockDevice>,
    sharded: Sharded,
}

impl OnClock {
    fn pulled(&self, layer: usize) -> Option<Pulled> {
        self.sharded.layers.get(layer).copied().flatten()
    }
}

impl weights::Pull for OnClock {
    fn rank(&self) -> u32 {
        self.sharded.rank
    }

    fn layers(&self) -> usize {
        self.sharded.layers.len()
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        self.pulled(layer).map(|pulled| pulled.buffer)
    }

    fn copies(&self, layer: usize) -> Result<usize> {
        Ok(usize::from(self.pulled(layer).is_some_and(|pulled| pulled.bytes > 0)))
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        let (Some(Pulled { buffer, bytes }), false) = (self.pulled(layer), copies.is_empty()) else {
            return Ok(());
        };
        let name = PULLS
            .get(buffer)
            .copied()
            .ok_or_else(|| bad("sharded: more buffers than a plan has").with("buffer", buffer as u64))?;
        let label = Label { name, layer: Some(Layer(layer as u32)), micro_batch: None };
        self.clock.traffic(stream, label, self.sharded.direction, bytes)
    }

    fn is_whole(&self, _: usize) -> bool {
        false
    }

    fn reads(&self, layer: usize, rank: u32) -> bool {
        self.pulled(layer).is_some() && self.sharded.direction == Direction::Peer && rank != self.sharded.rank
    }
}
