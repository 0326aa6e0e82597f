//! What sharding the weights of attention gives on a setup: time that pulls expose, sequences, and tokens a second.
//!
//! Four ways to keep the same weights are compared, each with the most sequences that its bytes leave room for:
//!
//! - **resident**: every rank has them whole;
//! - **sharded**: ranks pull each other's parts ([`Plan`]), and a step waits as [`pulls`] says;
//! - **by heads**: one node's GPUs divide attention by heads. Each has a part of the weights, and the cache of all
//!   sequences; each layer has two all-reduces and no exchange. Priced where a roofline has all costs, on one node;
//! - **activations move**: the output projection is divided over the same ranks by its columns. Each rank sends the
//!   heads' values of its tokens and gets partial results: few bytes, but two collectives in each layer, which all
//!   ranks have to reach, on the critical path.
//!
//! **A layer's time** is the sum of its works on the setup, as the simulator has it without misses. It is divided at
//! the end of the output projection, at which a window's use ends. Of a measured [`Term::Rest`] that is the share that
//! the roofline has there. With two micro-batches the second one ends the use.
//!
//! **A pull's time** is its bytes, in whole granules, over the rate of the link between GPUs
//! ([`nvlink_gb_s`](super::model::Deployment::nvlink_gb_s)), which it leaves to the engine's collectives first: their
//! bytes in this node count as bytes of the pull. From the host it is the rate of copies up, which nothing else uses
//! here.
//!
//! **Memory.** A pull writes its bytes, and other ranks read as many. Where the memory's bandwidth bounds a work, by
//! the roofline, this delays it: such a part of a layer gets that part of the traffic's time. Other works have
//! bandwidth left.
//!
//! **What it does not know**: launches, incast of many ranks at one, ranks that drift apart, and a larger batch's
//! imbalance. A roofline's layer is a bound, so on a roofline's setup more time is exposed than in an engine that is
//! slower than its bound.

use super::cost::Load;
use super::model::Deployment;
use super::plan::{Batch, Demand, plan};
use super::pulls::{self, Cycle, End, Exposed, Fill, Layer};
use super::setup::{Costs, Setup, Term};
use crate::error::{Error, Kind, Result};
use crate::weights::{LayerPlan, Place, Plan, Source, Wrap};

/// Microseconds that two collectives of a layer take, beside their bytes: 1.5 ms of a step of 61 layers, published for
/// a tensor-parallel output projection (vllm-ascend, DeepSeek-R1 in W8A8, 32 ranks in groups of 8).
pub const COLLECTIVES_US: f64 = 1_500.0 / 61.0;

/// The least gain in tokens a second that is worth the trouble: as for offload.
pub const LEAST_GAIN: f64 = 0.03;

/// Pulls that run at once: each of two buffers has its own stream.
const AT_ONCE: u32 = 2;

/// Bytes of an activation.
const BF16: f64 = 2.0;

/// Megabytes a second and bytes a microsecond are the same; a GB/s is a thousand of them.
const GB_S: f64 = 1e3;

/// What all figures of this module assume, in sentences.
pub const ASSUMPTIONS: [&str; 5] = [
    "pulls: all layers alike, a link at its full rate whenever a pull runs, no launches",
    "pulls: the engine's collectives come first; two pulls at once divide what they leave",
    "pulls write this GPU's memory and others read it, which delays works that the memory bounds",
    "a graph joins the next step's first pulls before it ends, and the next graph follows at once",
    "a divided output projection's two collectives take 24.6 us beside their bytes (published: 1.5 ms for 61 layers)",
];

/// What is compared.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The machine, and the costs of a layer.
    pub setup: &'a Setup,
    /// What is sharded, seen from one rank.
    pub plan: &'a Plan,
    /// The GPU's memory, with the weights as sharded; the context and query rows of a step; and the batch, or the most
    /// sequences.
    pub demand: &'a Demand,
    /// Bytes of weights on the GPU if nothing is sharded.
    pub unsharded: u64,
    /// Bytes of weights on the GPU if attention is divided by heads over the GPUs; none where it is not compared.
    pub by_heads: Option<u64>,
    /// Tokens that a step yields for each sequence.
    pub accept: f64,
}

/// A decode step with all rows on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Sequences whose cache a GPU has.
    pub batch: u32,
    /// Microseconds of a layer, without waits; of the first one.
    pub layer_us: f64,
    /// Microseconds of the step.
    pub step_us: f64,
    /// Tokens a second of one GPU.
    pub throughput: f64,
}

/// A step whose layers are pulled.
#[derive(Clone, Debug, PartialEq)]
pub struct Pulled {
    /// The step, its waits included.
    pub step: Step,
    /// Microseconds of the longest pull.
    pub pull_us: f64,
    /// What the step waits. Its graph joins the pulls of the next step's first layers.
    pub exposed: Exposed,
}

/// A step whose output projection is divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// The step, its collectives included.
    pub step: Step,
    /// Bytes that it saves on a GPU.
    pub saved: u64,
    /// Bytes that a rank sends in a layer.
    pub bytes: f64,
    /// Microseconds of a layer's collectives.
    pub collectives_us: f64,
}

/// Whether sharding pays against resident weights. Where it does, another way may be better yet
/// ([`Compared::better`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It yields at least [`LEAST_GAIN`] more.
    Pays,
    /// Resident weights leave no room for any sequence.
    OnlyWay,
    /// They do not either, but attention by heads yields as much.
    ByHeads,
    /// It would pay if pulls were hidden, but layers are too short for them.
    Exposed,
    /// It yields less than that even if pulls were hidden.
    LittleGain,
    /// It leaves no room for any sequence, or for those that were asked for, either.
    NoRoom,
}

/// A way other than sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Every rank has the weights whole.
    Resident,
    /// The output projection is divided, and activations move.
    Activations,
    /// Attention is divided by heads.
    ByHeads,
}

/// The ways; none where it has no room for a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// Every rank has the weights whole.
    pub resident: Option<Step>,
    /// Ranks pull each other's parts.
    pub sharded: Option<Pulled>,
    /// The output projection is divided.
    pub moved: Option<Moved>,
    /// Attention is divided by heads. The batch is of all GPUs.
    pub by_heads: Option<Step>,
    /// Whether sharding pays against resident weights.
    pub verdict: Verdict,
}

impl Compared {
    /// Tokens a second beyond those of resident weights, as a fraction; none if one of them has no room.
    pub fn gain(&self) -> Option<f64> {
        let resident = self.resident.filter(|step| step.throughput > 0.0)?;
        self.sharded.as_ref().map(|pulled| pulled.step.throughput / resident.throughput - 1.0)
    }

    /// The way that yields the most tokens a second, with its step; none if that is sharding, or nothing fits.
    pub fn better(&self) -> Option<(Way, Step)> {
        let ways = [
            (Way::Resident, self.resident),
            (Way::Activations, self.moved.map(|moved| moved.step)),
            (Way::ByHeads, self.by_heads),
        ];
        let sharded = self.sharded.as_ref().map_or(0.0, |pulled| pulled.step.throughput);
        let steps = ways.into_iter().filter_map(|(way, step)| Some((way, step?)));
        let best = steps.max_by(|(_, a), (_, b)| a.throughput.total_cmp(&b.throughput));
        best.filter(|(_, step)| step.throughput > sharded)
    }
}

/// Microseconds of a micro-batch in a layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    /// Up to the end of the output projection.
    before: f64,
    after: f64,
    /// Those that the memory bounds.
    pub(super) memory: f64,
}

impl Part {
    /// A micro-batch with this load; `lone` if no other hides its exchange. `over` GPUs divide the output projection.
    pub(super) fn of(setup: &Setup, load: &Load, lone: bool, over: u32) -> Result<Part> {
        let roofline = setup.roofline();
        let mut part = Part::default();
        for term in [Term::Project, Term::Index, Term::Prepare, Term::Attend, Term::Rest] {
            let us = setup.us(term, load)?;
            let before = if term == Term::Rest { us * roofline.output_share(load.tokens()) } else { us };
            part.before += before;
            part.after += us - before;
            part.memory += if roofline.is_bound_by_memory(term, load) { us } else { 0.0 };
        }
        if over > 1 {
            part.before += roofline.output_us(load.tokens(), over) - roofline.output_us(load.tokens(), 1);
        }
        if lone {
            part.after += setup.us(Term::Exchange, load)?;
        }
        Ok(part)
    }

    /// Microseconds of all of it.
    pub(super) const fn us(&self) -> f64 {
        self.before + self.after
    }
}

fn wrong(place: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "plan weights").at(place)
}

/// Bytes a microsecond of what a plan's parts come over.
///
/// # Errors
/// [`Kind::InvalidConfig`] for a setup without the rate of a GPU's neighbours if parts come from them, and for more
/// ranks than a node has.
pub(super) fn rate(setup: &Setup, plan: &Plan) -> Result<f64> {
    let deployment = &setup.file().deployment;
    if plan.source() == Source::Host {
        return Ok(setup.rates().copy_up / 1e6);
    }
    if plan.group().ranks > deployment.node_gpus {
        return Err(wrong("ranks that pull from each other are on one node of the setup")
            .with("ranks", plan.group().ranks)
            .with("node_gpus", deployment.node_gpus)
            .hint("pass --dp with at most the setup's GPUs of a node"));
    }
    let rate = deployment.nvlink_gb_s.map(|gb_s| gb_s * GB_S);
    rate.ok_or_else(|| {
        wrong("deployment.nvlink_gb_s: missing in the setup; pulls from peers need it")
            .hint("set the rate of a GPU's neighbours in the node: docs/setup-format.md")
    })
}

/// Bytes that the link carries until a layer is pulled, in a step of so many tokens: the pull's, and those of the
/// engine's collectives, which come first.
pub(super) fn crossing(setup: &Setup, plan: &Plan, layer: &LayerPlan, tokens: f64) -> f64 {
    match (plan.pulled(layer) as f64, plan.source()) {
        (pulled, Source::Peers) if pulled > 0.0 => pulled + setup.roofline().near(tokens),
        (pulled, _) => pulled,
    }
}

/// How many times longer a layer takes beside pulls of as many bytes as its own, if it takes `us` microseconds alone,
/// `memory` of which the memory bounds.
pub(super) fn slower(setup: &Setup, plan: &Plan, layer: &LayerPlan, us: f64, memory: f64) -> f64 {
    // Of what peers pull, this GPU's memory writes one copy and reads another.
    let copies = if plan.source() == Source::Peers { 2.0 } else { 1.0 };
    let traffic = copies * plan.pulled(layer) as f64 / setup.roofline().memory();
    1.0 + memory / us * traffic / us
}

impl<'a> Asked<'a> {
    /// Compares the ways.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a setup without the rate of a GPU's neighbours if parts come from them, and for more
    /// ranks than a node has; [`Kind::OutOfRange`] for a batch or context that the setup's costs do not reach; errors
    /// of [`plan`], except that something does not fit.
    pub fn compare(&self) -> Result<Compared> {
        let rate = rate(self.setup, self.plan)?;
        let resident = self.most(self.unsharded)?.map(|batch| self.resident(batch)).transpose()?;
        let sharded = self.most(self.demand.weights)?.map(|batch| self.pulled(batch, rate)).transpose()?;
        let saved = self.saved_by_division();
        let divided = self.unsharded.saturating_sub(saved);
        let moved = self.most(divided)?.map(|batch| self.moved(batch, saved)).transpose()?.flatten();
        let by_heads = self.by_heads()?;
        let mut compared = Compared { resident, sharded, moved, by_heads, verdict: Verdict::NoRoom };
        compared.verdict = match (&compared.sharded, resident, compared.gain()) {
            (None, ..) => Verdict::NoRoom,
            (Some(pulled), None, _) => {
                let as_much = |heads: Step| heads.throughput >= pulled.step.throughput;
                if by_heads.is_some_and(as_much) { Verdict::ByHeads } else { Verdict::OnlyWay }
            }
            (Some(_), Some(_), Some(gain)) if gain >= LEAST_GAIN => Verdict::Pays,
            (Some(pulled), Some(resident), _) => {
                let hidden = pulled.step.step_us - pulled.exposed.us();
                let most = self.throughput(pulled.step.batch, hidden);
                let pays = most >= (1.0 + LEAST_GAIN) * resident.throughput;
                if pays { Verdict::Exposed } else { Verdict::LittleGain }
            }
        };
        Ok(compared)
    }

    /// The most sequences whose rows fit beside so many bytes of weights, up to the number that was asked for; none if
    /// there is no room for one, or for as many as were asked for.
    fn most(&self, weights: u64) -> Result<Option<u32>> {
        self.most_of(weights, self.demand.batch)
    }

    fn most_of(&self, weights: u64, asked: Batch) -> Result<Option<u32>> {
        let demand =
            Demand { weights, batch: Batch::Most, ratio: super::plan::Ratio::Auto, ..self.demand.clone() };
        let most = match plan(&demand) {
            Ok(planned) => planned.resident_batch,
            Err(error) if error.kind() == Kind::OutOfMemory => 0,
            Err(error) => return Err(error),
        };
        Ok(match asked {
            Batch::Most => Some(most).filter(|most| *most > 0),
            Batch::Sequences(batch) => Some(batch).filter(|batch| *batch <= most),
        })
    }

    fn load(&self, rows: u32, query_rows: u32) -> Load {
        let top_k = self.setup.shape().top_k;
        let width = if self.setup.is_dense() { self.demand.context } else { top_k };
        Load {
            rows: rows.into(),
            query_rows: query_rows.into(),
            context: self.demand.context.into(),
            width: width.into(),
        }
    }

    /// A layer of `batch` sequences with no waits, and the microseconds of it that the memory bounds.
    fn layer(&self, batch: u32, query_rows: u32, over: u32) -> Result<(Layer, f64)> {
        let of = |rows, lone| Part::of(self.setup, &self.load(rows, query_rows), lone, over);
        if !self.setup.two_batch(batch, self.demand.context) {
            let one = of(batch, true)?;
            return Ok((Layer { uses_us: one.before, rest_us: one.after, pull: None }, one.memory));
        }
        let (first, second) = (of(batch - batch / 2, false)?, of(batch / 2, false)?);
        let uses_us = first.before + first.after + second.before;
        Ok((Layer { uses_us, rest_us: second.after, pull: None }, first.memory + second.memory))
    }

    /// The layers of a step, each with the time that the memory bounds. A draft layer runs once for each draft, and its
    /// weights are used until its last pass.
    fn layers(&self, batch: u32, over: u32) -> Result<Vec<(Layer, f64)>> {
        let count = self.setup.shape().layers;
        let one = self.layer(batch, self.demand.query_rows, over)?;
        let mut layers = vec![one; count as usize];
        let passes = self.demand.query_rows.saturating_sub(1);
        if passes > 0 && self.plan.layers().iter().any(|layer| layer.layer == count as usize) {
            let (pass, memory) = self.layer(batch, 1, over)?;
            let uses_us = f64::from(passes - 1) * pass.us() + pass.uses_us;
            layers.push((Layer { uses_us, ..pass }, f64::from(passes) * memory));
        }
        Ok(layers)
    }

    /// Microseconds of what follows the layers.
    fn tail(&self, batch: u32) -> Result<f64> {
        self.setup.us(Term::Step, &self.load(batch, self.demand.query_rows))
    }

    fn throughput(&self, batch: u32, step_us: f64) -> f64 {
        f64::from(batch) * self.accept * 1e6 / step_us
    }

    fn step(&self, batch: u32, layer_us: f64, step_us: f64) -> Step {
        Step { batch, layer_us, step_us, throughput: self.throughput(batch, step_us) }
    }

    fn resident(&self, batch: u32) -> Result<Step> {
        self.without_waits(batch, 1, 0.0)
    }

    /// A step of which each layer takes `more` microseconds more.
    fn without_waits(&self, batch: u32, over: u32, more: f64) -> Result<Step> {
        let layers = self.layers(batch, over)?;
        let all: f64 = layers.iter().map(|(layer, _)| layer.us() + more).sum();
        let first = layers.first().map_or(0.0, |(layer, _)| layer.us() + more);
        Ok(self.step(batch, first, all + self.tail(batch)?))
    }

    fn pulled(&self, batch: u32, rate: f64) -> Result<Pulled> {
        let (setup, plan) = (self.setup, self.plan);
        let tokens = f64::from(batch) * f64::from(self.demand.query_rows);
        let mut layers = self.layers(batch, 1)?;
        for one in plan.layers() {
            let Place::Buffer(buffer) = one.place else { continue };
            for (layer, memory) in layers.iter_mut().skip(one.layer).take(1) {
                let slower = slower(setup, plan, one, layer.us(), *memory);
                (layer.uses_us, layer.rest_us) = (layer.uses_us * slower, layer.rest_us * slower);
                layer.pull = Some(Fill { buffer, us: crossing(setup, plan, one, tokens) / rate });
            }
        }
        let layers: Vec<Layer> = layers.into_iter().map(|(layer, _)| layer).collect();
        let pull_us = layers.iter().filter_map(|layer| layer.pull).map(|pull| pull.us).fold(0.0, f64::max);
        let sharded = layers.iter().find(|layer| layer.pull.is_some()).or_else(|| layers.first());
        let layer_us = sharded.map_or(0.0, Layer::us);
        // A setup has no time between graphs, and without one no wrap is better than the joined one.
        let exposed = pulls::exposed(&Cycle {
            layers,
            tail_us: self.tail(batch)?,
            between_us: 0.0,
            at_once: AT_ONCE,
            end: End::Graph(Wrap::Joined),
        });
        Ok(Pulled { step: self.step(batch, layer_us, exposed.step_us), pull_us, exposed })
    }

    /// Bytes of the output projections' values on a GPU, if ranks of the group divide them, that this saves.
    fn saved_by_division(&self) -> u64 {
        let (dims, ranks) = (self.setup.dims(), u64::from(self.plan.group().ranks.max(1)));
        let values = u64::from(dims.heads) * u64::from(dims.value) * u64::from(dims.hidden);
        let bytes = self.setup.file().model.weights().bytes_of(values);
        let drafts = self.plan.layers().iter().any(|layer| layer.layer == self.setup.shape().layers as usize);
        let layers = u64::from(self.setup.shape().layers) + u64::from(drafts);
        layers * (bytes - bytes.div_ceil(ranks))
    }

    /// None without neighbours of a known rate.
    fn moved(&self, batch: u32, saved: u64) -> Result<Option<Moved>> {
        let (setup, ranks) = (self.setup, self.plan.group().ranks);
        let Some(gb_s) = setup.file().deployment.nvlink_gb_s.filter(|_| ranks > 1) else { return Ok(None) };
        let (dims, others) = (setup.dims(), f64::from(ranks - 1));
        let tokens = f64::from(batch) * f64::from(self.demand.query_rows);
        // Each rank sends the values of the others' columns, and partial results of the others' tokens.
        let values = f64::from(dims.heads) * f64::from(dims.value) * others / f64::from(ranks);
        let bytes = BF16 * tokens * (values + f64::from(dims.hidden) * others);
        let micro_batches = if setup.two_batch(batch, self.demand.context) { 2.0 } else { 1.0 };
        let collectives_us = micro_batches * COLLECTIVES_US + bytes / (gb_s * GB_S);
        let step = self.without_waits(batch, ranks, collectives_us)?;
        Ok(Some(Moved { step, saved, bytes, collectives_us }))
    }

    /// None where it is not priced, or has no room.
    fn by_heads(&self) -> Result<Option<Step>> {
        let (setup, Deployment { gpus, node_gpus, nvlink_gb_s, .. }) =
            (self.setup, &self.setup.file().deployment);
        let priced = setup.file().costs == Costs::default()
            && (2..=*node_gpus).contains(gpus)
            && setup.dims().heads.is_multiple_of(*gpus);
        let (Some(weights), Some(gb_s)) = (self.by_heads.filter(|_| priced), nvlink_gb_s) else {
            return Ok(None);
        };
        let asked = match self.demand.batch {
            Batch::Sequences(batch) => Batch::Sequences(batch.saturating_mul(*gpus)),
            Batch::Most => Batch::Most,
        };
        let Some(batch) = self.most_of(weights, asked)? else { return Ok(None) };
        let load = self.load(batch, self.demand.query_rows);
        // A ring moves each value twice over all links but one.
        let sent = 2.0 * load.tokens() * f64::from(setup.dims().hidden) * BF16;
        let sent = sent * f64::from(gpus - 1) / f64::from(*gpus);
        let collectives_us = COLLECTIVES_US + 2.0 * sent / (gb_s * GB_S);
        let layer_us = setup.roofline().by_heads_us(&load, *gpus) + collectives_us;
        let step_us = f64::from(setup.shape().layers) * layer_us + self.tail(batch)?;
        let throughput = self.throughput(batch, step_us) / f64::from(*gpus);
        Ok(Some(Step { batch, layer_us, step_us, throughput }))
    }
}
