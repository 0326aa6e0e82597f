//! What plans are: what was asked, what fits, and what it yields.

use std::rc::Rc;

use forebay::predict::plan::{Demand, Note, Planned};
use forebay::predict::provenance::Provenance;
use forebay::predict::simulate::Outcome;
use forebay::predict::worth::Baseline;
use forebay::{Error, Result};

use super::deployment::Deployed;
use crate::input::sizes::Size;

/// What was said of a GPU's memory and of the host's, as it was said.
pub struct Memory {
    /// Of one GPU. All that is computed comes back in its unit.
    pub gpu: Size,
    /// Weights, where they are not the checkpoint's.
    pub weights: Option<Size>,
    /// Activations.
    pub activations: Option<Size>,
    /// Whatever else the engine takes.
    pub workspace: Option<Size>,
    /// Host memory for one GPU's total pool.
    pub host: Option<Size>,
}

impl Memory {
    /// A size that was computed.
    pub fn size(&self, bytes: f64) -> String {
        self.gpu.unit().size(bytes)
    }
}

/// One plan of the sweep.
pub struct Point {
    /// Whose cache.
    pub model: String,
    /// On which GPUs.
    pub deployed: Deployed,
    /// What was asked.
    pub demand: Demand,
    /// What of it was said of memory.
    pub memory: Rc<Memory>,
    /// What it was to be simulated on.
    pub on: Option<On>,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// Why what it yields is not known.
    pub unknown: Option<Error>,
    /// What it yields, with a setup.
    pub gain: Option<Gain>,
    /// Where no batch is fast enough: tokens a second of one sequence alone.
    pub alone: Option<f64>,
}

impl Point {
    /// The plan stands; what it yields is not known.
    pub fn unknown_by(mut self, error: Error) -> Point {
        if let Ok(planned) = &mut self.planned {
            planned.notes.push(Note::Unknown);
        }
        self.unknown = Some(error);
        self
    }

    /// The link, where one was named.
    pub fn link(&self) -> Option<&str> {
        self.on.as_ref()?.link.as_deref()
    }

    /// Host memory of a node's total pools.
    pub fn host_of_node(&self, planned: &Planned) -> String {
        self.memory.size(planned.bytes.host() as f64 * f64::from(self.deployed.node_gpus()))
    }

    /// Whether it offloads, and that yields more than none would.
    pub fn pays(&self) -> bool {
        let offloads = self.planned.as_ref().is_ok_and(Planned::offloads);
        let more = |gain: &Gain| gain.outcome.throughput > gain.without.map_or(0.0, |it| it.throughput);
        offloads && self.gain.as_ref().is_some_and(more)
    }

    /// Tokens a second beyond those without offload, as a share of them.
    pub fn gain(&self) -> Option<f64> {
        let gain = self.gain.as_ref()?;
        let without = gain.without.filter(|without| without.throughput > 0.0)?;
        Some(gain.outcome.throughput / without.throughput - 1.0)
    }
}

/// What plans are simulated on.
#[derive(Clone)]
pub struct On {
    /// What its figures rest on.
    pub provenance: Provenance,
    /// The link, where one was named.
    pub link: Option<String>,
    /// Tokens that a step yields for each sequence.
    pub accept: f64,
    /// Bytes of memory of the GPU that the costs are of.
    pub gpu: f64,
    /// Whether no cost of the setup was measured with this model.
    pub by_roofline: bool,
    /// What a reader should know about the misses.
    pub misses_note: Option<String>,
}

/// What the speed that each sequence has to have rules out of the batches with offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// None that matters.
    Nothing,
    /// Those that yield more than there is without; others are fast enough.
    More,
    /// All of them.
    All,
}

/// What a plan yields.
#[derive(Clone)]
pub struct Gain {
    /// The plan's step.
    pub outcome: Outcome,
    /// The same without offload.
    pub without: Option<Baseline>,
    /// Which batches with offload were too slow.
    pub slow: Slow,
    /// The smallest batch from which offload pays, where the best one was looked for: none where it never does.
    pub pays_from: Option<Option<u32>>,
    /// By batch, where the best one was looked for: ratio, and tokens a second.
    pub curve: Vec<(u32, f64, f64)>,
}
