//! The weights on one GPU: by module, in which dtype and division, and what sharding over a host's ranks saves.
//!
//! The options name degrees; what they mean in bytes is the library's ([`Checkpoint`], `forebay::weights`). Bytes need
//! no setup. A setup's costs are those of its own weights, so `--setup` excludes the options that change what a GPU
//! computes (dtype and degrees): a plan with both would show the memory of one engine and the speed of another. Shards
//! do not change what is computed, only what a step waits for, which the library predicts from the setup.
//!
//! A degree that the deployment cannot have (more ranks than GPUs) is an error here, because the library counts bytes
//! and not GPUs.

use clap::ValueEnum;
use forebay::predict::weights::{
    Attention, Checkpoint, Division, GPUS_MAX, ModuleBytes, WeightDtype, tokens_gained,
};
use forebay::weights::{Bytes, Closing, Group, LayerPlan, Patterns, Place, Plan, Sharding, Source};
use forebay::{Error, Kind, Result, Shape};

use super::deployment::Deployed;
use crate::input::sizes;

/// The options about weights that only a published checkpoint can answer.
#[derive(clap::Args)]
pub struct WeightArguments {
    /// Dtype of the linear layers' weights [default: fp8, the published checkpoints' own].
    #[arg(long, value_enum, conflicts_with_all = ["setup", "weights"])]
    pub weight_dtype: Option<Dtype>,
    /// GPUs that dense FFNs, shared experts, embedding and head are divided over; with --attention tp also the heads
    /// [default: 1, or with --attention tp a node's].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, conflicts_with_all = ["setup", "weights"],
          allow_negative_numbers = true)]
    pub tp: Option<u32>,
    /// GPUs that the experts of a layer are divided over [default: all].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, conflicts_with_all = ["setup", "weights"],
          allow_negative_numbers = true)]
    pub ep: Option<u32>,
    /// Redundant experts of each layer, on all GPUs of --ep together [default: 0].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, conflicts_with_all = ["setup", "weights"],
          allow_negative_numbers = true)]
    pub redundant_experts: Option<u32>,
    /// Weights that the ranks of a host share instead of each keeping them: o_proj, mla, or a pattern of names such as
    /// '*.o_proj.*' (docs/planner.md).
    #[arg(long, value_name = "o_proj|mla|GLOB", value_delimiter = ',', conflicts_with = "weights")]
    pub shard: Vec<String>,
    /// Data-parallel ranks of one host that share weights, beside --gpus [default: as many as a node has].
    #[arg(long, value_name = "N", value_parser = sizes::gpus, allow_negative_numbers = true, requires = "shard",
          conflicts_with = "weights")]
    pub dp: Option<u32>,
    /// Where a sharded layer's missing bytes come from: the other ranks' GPUs, or the rank's own pinned host memory
    /// [default: peers].
    #[arg(long, value_enum, requires = "shard")]
    pub weights_from: Option<From>,
}

/// The name of a dtype.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// 1 byte a value, 4 per block of 128 x 128.
    Fp8,
    /// 2 bytes a value.
    Bf16,
    /// 1 byte a value, 4 per row.
    Int8,
    /// Half a byte a value, 2 per 128 values of a row.
    Int4,
    /// Half a byte a value, 1 per 16 values of a row.
    Nvfp4,
}

/// The name of a source.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum From {
    /// The other ranks' GPUs.
    Peers,
    /// The rank's own pinned host memory.
    Host,
}

/// The weights on one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Weighed {
    /// The dtype's name.
    pub dtype: &'static str,
    /// How they are divided.
    pub division: Division,
    /// Bytes by module, without sharding.
    pub modules: Vec<ModuleBytes>,
    /// Bytes on the GPU, with sharding in whole granules.
    pub on_gpu: u64,
    /// Bytes on the GPU without sharding.
    pub unsharded: u64,
    /// Bytes on the GPU if all GPUs divide attention by heads and nothing is sharded.
    pub by_heads: u64,
    /// What is sharded.
    pub sharded: Option<Sharded>,
}

/// The shards of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Sharded {
    /// What was asked to be sharded.
    pub names: Vec<String>,
    /// Where missing bytes come from.
    pub source: Source,
    /// The plan.
    pub plan: Plan,
    /// In granules.
    pub rounded: Counted,
    /// Before rounding.
    pub exact: Counted,
}

/// The bytes of a rank, counted in one way.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// What the chosen tensors take.
    pub bytes: Bytes,
    /// What that saves.
    pub saved: i64,
    /// Bytes of the largest pull of a layer.
    pub pull: u64,
    /// The whole of that layer.
    pub layer: u64,
    /// Tokens whose latent rows fit in what is saved.
    pub tokens: u64,
}

/// The error for an option.
fn wrong(place: String, value: u32, most: u32) -> Error {
    Error::new(Kind::InvalidConfig, "plan").at(place).with("value", value).with("gpus", most)
}

impl Sharded {
    /// The layer that stays resident, if one does.
    pub const fn resident_layer(&self) -> Option<usize> {
        match self.plan.closing() {
            Closing::Resident(layer) => Some(layer),
            Closing::Even | Closing::ThirdBuffer => None,
        }
    }

    fn of(names: &[String], plan: Plan, source: Source, shape: Shape) -> Result<Sharded> {
        let whole = plan.whole();
        let counted =
            |bytes: Bytes, pull: fn(&Plan, &LayerPlan) -> u64, layer: fn(&Plan, &LayerPlan) -> u64| {
                let sharded = plan.layers().iter().filter(|one| one.place != Place::Resident);
                let largest = sharded.max_by_key(|one| pull(&plan, one));
                let saved = bytes.saved(whole);
                Ok::<_, Error>(Counted {
                    saved,
                    pull: largest.map_or(0, |one| pull(&plan, one)),
                    layer: largest.map_or(0, |one| layer(&plan, one)),
                    tokens: tokens_gained(saved, shape)?,
                    bytes,
                })
            };
        Ok(Sharded {
            rounded: counted(plan.bytes(), Plan::pulled, |plan, one| one.layout.pages() * plan.grain())?,
            exact: counted(plan.exact_bytes(), Plan::pulled_exactly, |_, one| one.layout.bytes())?,
            names: names.to_vec(),
            source,
            plan,
        })
    }
}

impl WeightArguments {
    /// Whether an option asks for something that needs a checkpoint.
    pub fn need_checkpoint(&self) -> Option<&'static str> {
        let asked = [
            ("--shard", !self.shard.is_empty()),
            ("--weight-dtype", self.weight_dtype.is_some()),
            ("--tp", self.tp.is_some()),
            ("--ep", self.ep.is_some()),
            ("--redundant-experts", self.redundant_experts.is_some()),
        ];
        asked.into_iter().find(|(_, asked)| *asked).map(|(option, _)| option)
    }

    /// GPUs that attention's heads are divided over.
    pub fn heads(&self, attention: Attention, node_gpus: u32) -> u32 {
        match attention {
            Attention::Data => 1,
            Attention::Tensor => self.tp.unwrap_or(node_gpus),
        }
    }

    /// The fewest GPUs that these degrees need.
    pub fn least_gpus(&self, attention: Attention) -> u32 {
        let heads = self.heads(attention, 1);
        let ranks = self.dp.unwrap_or(1).saturating_mul(heads);
        ranks.max(self.tp.unwrap_or(1)).max(self.ep.unwrap_or(1))
    }

    /// The ranks of a host that share weights.
    fn ranks(&self, deployed: &Deployed) -> u32 {
        self.dp.unwrap_or_else(|| (deployed.node_gpus() / deployed.heads.max(1)).max(1))
    }

    fn division(&self, checkpoint: &Checkpoint, deployed: &Deployed) -> Result<Division> {
        let gpus = deployed.gpus;
        let Division { dense, experts, .. } = Division::of(gpus, deployed.attention);
        let division = Division {
            attention: deployed.heads,
            dense: self.tp.unwrap_or(dense),
            experts: self.ep.unwrap_or(experts),
            redundant: self.redundant_experts.unwrap_or(0),
        };
        // A default rounds up; only what was asked for has to divide the model.
        checkpoint.check(&Division { experts: self.ep.unwrap_or(1), ..division })?;
        if let Some(tp) = self.tp.filter(|tp| !gpus.is_multiple_of(*tp)) {
            return Err(wrong("--tp: does not divide the GPUs".to_owned(), tp, gpus));
        }
        if let Some(ep) = self.ep.filter(|ep| !gpus.is_multiple_of(*ep)) {
            return Err(wrong("--ep: does not divide the GPUs".to_owned(), ep, gpus));
        }
        Ok(division)
    }

    /// The weights on each GPU of a deployment, in the dtype of the setup, if there is one.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the option with a degree that the model or the deployment cannot have; errors of
    /// [`Checkpoint::sharded`].
    pub fn weigh(
        &self,
        checkpoint: &Checkpoint,
        deployed: &Deployed,
        of_setup: Option<WeightDtype>,
        (shape, drafts): (Shape, bool),
    ) -> Result<Weighed> {
        let (dtype, name) = match of_setup {
            Some(dtype) => (dtype, named(dtype)),
            None => dtype(self.weight_dtype.unwrap_or(Dtype::Fp8)),
        };
        let division = self.division(checkpoint, deployed)?;
        let whole = checkpoint.divided(&division, dtype, drafts);
        let ranks = self.ranks(deployed);
        if self.dp.is_some() && u64::from(ranks) * u64::from(deployed.heads) > u64::from(deployed.gpus) {
            return Err(wrong("--dp: more ranks than GPUs".to_owned(), ranks, deployed.gpus));
        }
        let sharded = if self.shard.is_empty() {
            None
        } else {
            let asked = (&self.shard[..], self.weights_from);
            let plan = plan_of(checkpoint, (&division, dtype, drafts), deployed.gpus, asked, ranks)?;
            let source = plan.source();
            Some(Sharded::of(&self.shard, plan, source, shape)?)
        };
        let on_gpu = sharded.as_ref().map_or(whole, |sharded| {
            (whole - sharded.plan.whole()).saturating_add(sharded.rounded.bytes.device())
        });
        let modules = checkpoint.by_module(&division, dtype, drafts);
        let by_heads = checkpoint.divided(&Division::of(deployed.gpus, Attention::Tensor), dtype, drafts);
        Ok(Weighed { dtype: name, division, modules, on_gpu, unsharded: whole, by_heads, sharded })
    }
}

const fn dtype(name: Dtype) -> (WeightDtype, &'static str) {
    let dtype = match name {
        Dtype::Fp8 => WeightDtype::Fp8,
        Dtype::Bf16 => WeightDtype::Bf16,
        Dtype::Int8 => WeightDtype::Int8,
        Dtype::Int4 => WeightDtype::Int4,
        Dtype::Nvfp4 => WeightDtype::Nvfp4,
    };
    (dtype, named(dtype))
}

const fn named(dtype: WeightDtype) -> &'static str {
    match dtype {
        WeightDtype::Fp8 => "fp8",
        WeightDtype::Bf16 => "bf16",
        WeightDtype::Int8 => "int8",
        WeightDtype::Int4 => "int4",
        WeightDtype::Nvfp4 => "nvfp4",
    }
}

/// The fewest whole nodes, doubled from `least` GPUs on, for which `fits` holds; `least` rounded up if it never does.
///
/// # Errors
/// Errors of `fits`.
pub fn fewest_nodes(node: u32, least: u32, fits: impl Fn(u32) -> Result<bool>) -> Result<u32> {
    let first = least.div_ceil(node.max(1)).saturating_mul(node);
    let mut gpus = first;
    while gpus <= GPUS_MAX {
        if fits(gpus)? {
            return Ok(gpus);
        }
        gpus = gpus.saturating_mul(2);
    }
    Ok(first)
}

/// The plan that shards `names` over the `ranks` of a host, seen from the first: of a checkpoint's weights as they are
/// divided over `gpus`, their dtype, and whether a step has drafts.
///
/// # Errors
/// Errors of [`Patterns::new`] and [`Checkpoint::sharded`].
pub fn plan_of(
    checkpoint: &Checkpoint,
    of: (&Division, WeightDtype, bool),
    gpus: u32,
    (names, from): (&[String], Option<From>),
    ranks: u32,
) -> Result<Plan> {
    let patterns: Vec<String> = names.iter().flat_map(|name| checkpoint.patterns(name)).collect();
    let source = match from {
        Some(From::Host) => Source::Host,
        Some(From::Peers) | None => Source::Peers,
    };
    let sharding = Sharding { source, ..Sharding::new(Patterns::new(&patterns)?) };
    checkpoint.sharded(of, gpus, Group { id: 0, rank: 0, ranks }, &sharding)
}
