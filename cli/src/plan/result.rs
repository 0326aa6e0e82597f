//! A plan: the request, what fits, and its yield.

use std::rc::Rc;

use forebay::predict::plan::{Demand, Note, Planned};
use forebay::predict::provenance::Provenance;
use forebay::predict::sharded::Compared;
use forebay::predict::simulate::Outcome;
use forebay::predict::worth::Baseline;
use forebay::{Error, Result};

use super::deployment::Deployed;
use super::shards::Weighed;
use crate::input::sizes::Size;

/// The given sizes of a GPU's memory and of the host's, in the form in which they were given.
pub struct Memory {
    /// Memory of one GPU. All computed sizes are shown in its unit.
    pub gpu: Size,
    /// Weights, if they are not the checkpoint's.
    pub weights: Option<Size>,
    /// Activations.
    pub activations: Option<Size>,
    /// Other memory that the engine takes.
    pub workspace: Option<Size>,
    /// Host memory for one GPU's total pool.
    pub host: Option<Size>,
}

impl Memory {
    /// A computed size.
    pub fn size(&self, bytes: f64) -> String {
        self.gpu.unit().size(bytes)
    }
}

/// One plan of the sweep.
pub struct Point {
    /// The model.
    pub model: String,
    /// The GPUs.
    pub deployed: Deployed,
    /// The demand.
    pub demand: Demand,
    /// The given sizes of memory.
    pub memory: Rc<Memory>,
    /// The weights on each GPU; none if they were given.
    pub weighed: Option<Rc<Weighed>>,
    /// The setup that it is to be simulated on; none without one.
    pub on: Option<On>,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// What sharding gives, with a setup and shards; an error where the setup's costs do not reach.
    pub compared: Option<Result<Compared>>,
    /// Why its yield is not known.
    pub unknown: Option<Error>,
    /// Its yield, with a setup.
    pub gain: Option<Gain>,
    /// Tokens a second of a single sequence, if no batch is fast enough.
    pub alone: Option<f64>,
}

impl Point {
    /// Keeps the plan, with an unknown yield.
    pub fn unknown_by(mut self, error: Error) -> Point {
        if let Ok(planned) = &mut self.planned {
            planned.notes.push(Note::Unknown);
        }
        self.unknown = Some(error);
        self
    }

    /// The link, if one was named.
    pub fn link(&self) -> Option<&str> {
        self.on.as_ref()?.link.as_deref()
    }

    /// Host memory of a node's total pools.
    pub fn host_of_node(&self, planned: &Planned) -> String {
        self.memory.size(planned.bytes.host() as f64 * f64::from(self.deployed.node_gpus()))
    }

    /// Whether it offloads, and thereby yields more than the best plan without offload.
    pub fn pays(&self) -> bool {
        let offloads = self.planned.as_ref().is_ok_and(Planned::offloads);
        let more = |gain: &Gain| gain.outcome.throughput > gain.without.map_or(0.0, |it| it.throughput);
        offloads && self.gain.as_ref().is_some_and(more)
    }

    /// The gain in tokens a second over no offload, as a share.
    pub fn gain(&self) -> Option<f64> {
        let gain = self.gain.as_ref()?;
        let without = gain.without.filter(|without| without.throughput > 0.0)?;
        Some(gain.outcome.throughput / without.throughput - 1.0)
    }
}

/// The setup, on one link, that plans are simulated on.
#[derive(Clone)]
pub struct On {
    /// The provenance of its figures.
    pub provenance: Provenance,
    /// The link, if one was named.
    pub link: Option<String>,
    /// Tokens that a step yields for each sequence.
    pub accept: f64,
    /// Bytes of memory of the GPU whose costs the setup holds.
    pub gpu: f64,
    /// Whether all costs of the setup come from a roofline, and none was measured with this model.
    pub by_roofline: bool,
    /// What a reader should know about the misses.
    pub misses_note: Option<String>,
}

/// Which batches with offload the minimum speed rules out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// No batch that matters.
    Nothing,
    /// The batches that yield more than no offload; others are fast enough.
    More,
    /// All of them.
    All,
}

/// The yield of a plan.
#[derive(Clone)]
pub struct Gain {
    /// The plan's step.
    pub outcome: Outcome,
    /// The step without offload.
    pub without: Option<Baseline>,
    /// Which batches with offload were too slow.
    pub slow: Slow,
    /// The smallest batch from which offload pays, if the best one was searched: none if offload never pays.
    pub pays_from: Option<Option<u32>>,
    /// For each batch, if the best one was searched: ratio, and tokens a second.
    pub curve: Vec<(u32, f64, f64)>,
}
