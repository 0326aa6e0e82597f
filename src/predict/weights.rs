//! The size of a model's weights on each GPU, by module, depending on how they are divided and in which dtype.
//!
//! `data/weights.json` lists the published checkpoints that the planner supports, each with its published size and
//! its source. The size of a part is a sum over its matrices (`matrices`, the only arithmetic),
//! whose rows and columns follow from the published configuration ([`Dims`]). In the checkpoints' own dtype, FP8, the
//! parts add up to the published size within a thousandth (`tests/plan.rs` checks it), so the division is that of the
//! files on disk.
//!
//! **Division** ([`Division`]). By default experts are divided over all GPUs, none of them twice, and everything else,
//! attention, shared experts, dense layers, embedding and head, is on every GPU. If attention is divided by heads, so
//! are these, over the GPUs of a node, except for the parts that each GPU needs whole. A division of one's own divides
//! attention, the dense parts and the experts by separate degrees, and adds redundant experts. The draft layer is
//! included if a step has drafts; it uses the main model's embedding and head.
//!
//! **Sharding.** [`Checkpoint::tensors`] has the same matrices as named byte ranges, layer by layer, for
//! [`Plan`]. So a plan of shards and the sizes here cannot differ.
//!
//! **Not covered.** Changes that an engine makes when it loads weights: copies in another layout or type, such as a
//! second, absorbed form of `kv_b_proj`.

use serde::Deserialize;

pub use super::matrices::Module;
use super::matrices::{self, Matrix};
use super::model::Dims;
pub use super::model::WeightDtype;
use super::setup::Setup;
use crate::error::{Error, Kind, Result};
use crate::geometry::{Geometry, Shape};
use crate::text::echo;
use crate::weights::{Group, Plan, Sharding, Source, Tensor};

/// The published checkpoints.
const TABLE: &str = include_str!("../../data/weights.json");

/// GPUs of a node if no setup says otherwise; attention is divided by heads over no more.
pub const NODE_GPUS: u32 = 8;

/// The most GPUs that the planner supports.
pub const GPUS_MAX: u32 = 4096;

/// How attention is divided over the GPUs of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// By sequences (DP attention): each GPU has all of attention's weights, and the cache of its own sequences.
    #[default]
    Data,
    /// By heads (TP attention): each GPU has a part of the weights and, because a latent belongs to all heads, the
    /// cache of all sequences.
    Tensor,
}

/// A published size; an unpublished part is absent.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// Parameters, as the checkpoint's page counts them.
    pub parameters: f64,
    /// Bytes of the checkpoint's files.
    pub bytes: Option<f64>,
}

/// A published checkpoint, as in the table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    presets: Vec<String>,
    checkpoint: String,
    published: Published,
    source: Vec<String>,
    layers: u32,
    dense_layers: u32,
    dense_hidden: u32,
    vocabulary: u32,
    draft_layers: u32,
    drafts_store_embeddings: bool,
}

/// A published checkpoint, and the dimensions of its layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    entry: Entry,
    dims: Dims,
}

/// How weights are divided over GPUs. Each degree is above 0; 1 leaves that part whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// GPUs that attention's heads are divided over. Down-projections and the indexer are whole on each.
    pub attention: u32,
    /// GPUs that dense FFNs, shared experts, embedding and head are divided over.
    pub dense: u32,
    /// GPUs that the experts of a layer are divided over.
    pub experts: u32,
    /// Redundant experts of each layer, on all these GPUs together.
    pub redundant: u32,
}

impl Division {
    /// Everything on one GPU.
    pub const WHOLE: Division = Division { attention: 1, dense: 1, experts: 1, redundant: 0 };

    /// The division of `gpus` GPUs if nothing else is said.
    pub fn of(gpus: u32, attention: Attention) -> Division {
        let heads = match attention {
            Attention::Data => 1,
            Attention::Tensor => gpus.clamp(1, NODE_GPUS),
        };
        Division { attention: heads, dense: heads, experts: gpus.max(1), redundant: 0 }
    }
}

/// Bytes of a module: whole, and what of it is on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleBytes {
    /// The module.
    pub module: Module,
    /// Before division.
    pub whole: u64,
    /// On each GPU; on the one with the most experts.
    pub on_gpu: u64,
}

/// A matrix, how many times a GPU has it, and over how many parts it is divided.
struct Copies {
    count: u64,
    matrix: Matrix,
    over: u64,
}

impl Copies {
    fn of(count: u64, matrix: Matrix, over: u32) -> Copies {
        Copies { count, matrix, over: u64::from(over.max(1)) }
    }

    fn bytes(&self, dtype: WeightDtype) -> u64 {
        let stored = self.matrix.stored(dtype, self.over);
        self.count * (stored.values + stored.scales)
    }
}

impl Checkpoint {
    /// The checkpoint of the preset `name`; none if no size of it is published.
    ///
    /// # Errors
    /// [`Kind::Internal`] for an invalid table; the built-in one is valid.
    pub fn of(name: &str) -> Result<Option<Checkpoint>> {
        let table: Vec<Entry> = serde_json::from_str(TABLE)
            .map_err(|e| Error::new(Kind::Internal, "read weights").at(e.to_string()))?;
        let found = table.into_iter().find(|entry| entry.presets.iter().any(|preset| preset == name));
        Ok(found.zip(Dims::preset(name)).map(|(entry, dims)| Checkpoint { entry, dims }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.entry.checkpoint
    }

    /// Its published size.
    pub const fn published(&self) -> Published {
        self.entry.published
    }

    /// The source of that size.
    pub fn source(&self) -> &[String] {
        &self.entry.source
    }

    /// Layers, the draft layers included if a step has drafts.
    fn layers(&self, drafts: bool) -> u32 {
        self.entry.layers + if drafts { self.entry.draft_layers } else { 0 }
    }

    /// Routed experts of a layer on one GPU, and redundant ones; of the GPU that has the most.
    fn experts(&self, division: &Division) -> (u32, u32) {
        let (experts, gpus) = (self.dims.experts, division.experts.max(1));
        let own = experts.div_ceil(gpus);
        (own, experts.saturating_add(division.redundant).div_ceil(gpus) - own)
    }

    /// The matrices of a layer on one GPU.
    fn layer(&self, layer: u32, division: &Division) -> Vec<Copies> {
        let (dims, entry) = (&self.dims, &self.entry);
        let one = |matrix, over| Copies::of(1, matrix, over);
        let mut all: Vec<Copies> =
            matrices::attention(dims).into_iter().map(|matrix| one(matrix, division.attention)).collect();
        if layer < entry.dense_layers {
            let dense = matrices::dense(dims, entry.dense_hidden);
            all.extend(dense.map(|matrix| one(matrix, division.dense)));
            return all;
        }
        let (own, redundant) = self.experts(division);
        all.extend(matrices::shared(dims).map(|matrix| one(matrix, division.dense)));
        all.push(one(matrices::router(dims), 1));
        for matrix in matrices::expert(dims) {
            let further = matrix.of(Module::RedundantExperts);
            all.extend([Copies::of(own.into(), matrix, 1), Copies::of(redundant.into(), further, 1)]);
        }
        all.extend((layer >= entry.layers).then(|| one(matrices::join(dims), 1)));
        all
    }

    /// All matrices on one GPU: those of the layers, embedding and head.
    fn all(&self, division: &Division, drafts: bool) -> impl Iterator<Item = Copies> {
        let once = matrices::vocabulary(&self.dims, self.entry.vocabulary);
        let once = once.map(|matrix| Copies::of(1, matrix, division.dense));
        (0..self.layers(drafts)).flat_map(|layer| self.layer(layer, division)).chain(once)
    }

    /// Bytes of the checkpoint as the sum of its parts.
    pub fn bytes(&self) -> u64 {
        let entry = &self.entry;
        let copies = if entry.drafts_store_embeddings { u64::from(entry.draft_layers) } else { 0 };
        let again = matrices::vocabulary(&self.dims, entry.vocabulary);
        let again = again.map(|matrix| Copies::of(copies, matrix, 1).bytes(WeightDtype::Fp8));
        self.divided(&Division::WHOLE, WeightDtype::Fp8, true) + again.iter().sum::<u64>()
    }

    /// Bytes on each of `gpus` GPUs, above 0, in the checkpoint's own dtype; with the draft layer if a step has drafts.
    pub fn on_gpu(&self, gpus: u32, attention: Attention, drafts: bool) -> u64 {
        self.divided(&Division::of(gpus, attention), WeightDtype::Fp8, drafts)
    }

    /// Bytes on one GPU of a division, on the one with the most experts.
    pub fn divided(&self, division: &Division, dtype: WeightDtype, drafts: bool) -> u64 {
        self.all(division, drafts).map(|copies| copies.bytes(dtype)).sum()
    }

    /// The same by module, and before division. Modules that the model does not have are left out.
    pub fn by_module(&self, division: &Division, dtype: WeightDtype, drafts: bool) -> Vec<ModuleBytes> {
        let (all, own) = (Division::WHOLE, *division);
        // Redundant experts exist because of a division; before it there are as many in all.
        let all = Division { redundant: own.redundant, ..all };
        let sum = |division: &Division, module| {
            let copies = self.all(division, drafts).filter(|copies| copies.matrix.module == module);
            copies.map(|copies| copies.bytes(dtype)).sum()
        };
        let bytes = |module| ModuleBytes { module, whole: sum(&all, module), on_gpu: sum(&own, module) };
        Module::ALL.into_iter().map(bytes).filter(|bytes| bytes.whole > 0).collect()
    }

    /// Checks a division that a caller chose; [`Division::of`] needs no check.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the degree that is 0, or that does not divide the heads or the experts.
    pub fn check(&self, division: &Division) -> Result<()> {
        let Division { attention, dense, experts, redundant } = *division;
        let (heads, routed) = (self.dims.heads, self.dims.experts);
        let wrong = |degree: &'static str, of: &'static str, by: u32, count: u32| {
            let place = format!("{degree}: does not divide the model's {of}");
            Err(Error::new(Kind::InvalidConfig, "plan").at(place).with("degree", by).with(of, count))
        };
        if [attention, dense].iter().any(|by| *by == 0 || !heads.is_multiple_of(*by)) {
            return wrong("tensor parallelism (tp)", "heads", attention.max(dense), heads);
        }
        if experts == 0 || !routed.is_multiple_of(experts) {
            return wrong("expert parallelism (ep)", "experts", experts, routed);
        }
        if redundant > routed {
            return Err(Error::new(Kind::InvalidConfig, "plan")
                .at("redundant experts: more than the model has")
                .with("redundant", redundant)
                .with("experts", routed));
        }
        Ok(())
    }

    /// The weights of each layer on one GPU as named byte ranges, with the names of the checkpoint's files: values, and
    /// scales as tensors of their own. Experts are the GPU's own, by number from 0, redundant ones last. Embedding and
    /// head belong to no layer, and are left out.
    pub fn tensors(&self, division: &Division, dtype: WeightDtype, drafts: bool) -> Vec<Vec<Tensor>> {
        (0..self.layers(drafts)).map(|layer| self.tensors_of(layer, division, dtype)).collect()
    }

    fn tensors_of(&self, layer: u32, division: &Division, dtype: WeightDtype) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        let (routed, _) = self.experts(division);
        for Copies { count, matrix, over } in self.layer(layer, division) {
            let stored = matrix.stored(dtype, over);
            let from = if matrix.module == Module::RedundantExperts { u64::from(routed) } else { 0 };
            for copy in from..from + count {
                let name = match matrix.module {
                    Module::RoutedExperts | Module::RedundantExperts => {
                        format!("model.layers.{layer}.mlp.experts.{copy}.{}", matrix.name)
                    }
                    _ => format!("model.layers.{layer}.{}", matrix.name),
                };
                let tensor = |suffix, bytes| Tensor { name: format!("{name}.{suffix}"), bytes, align: ALIGN };
                tensors.push(tensor("weight", stored.values));
                let scales = (stored.scales > 0).then_some(stored.scales);
                tensors.extend(scales.map(|bytes| tensor(matrices::scales_suffix(dtype), bytes)));
            }
        }
        tensors
    }

    /// The plan that shards these layers over `group`, whose ranks are among `gpus` GPUs.
    ///
    /// # Errors
    /// Errors of [`Plan::new`]; [`Kind::InvalidConfig`] names a tensor that the ranks of the group do not all have,
    /// because the division gives each of them another part of it.
    pub fn sharded(
        &self,
        (division, dtype, drafts): (&Division, WeightDtype, bool),
        gpus: u32,
        group: Group,
        sharding: &Sharding,
    ) -> Result<Plan> {
        let plan = Plan::new(&self.tensors(division, dtype, drafts), group, sharding)?;
        let degree = |name: &str| match () {
            () if name.contains(".self_attn.") => division.attention,
            () if name.contains(".mlp.experts.") => division.experts,
            () if name.contains(".mlp.gate.") || name.contains(".eh_proj.") => 1,
            () => division.dense,
        };
        let mut names =
            plan.layers().iter().flat_map(|layer| layer.layout.tensors()).map(|placed| &placed.name);
        let parts = |name: &str| u64::from(degree(name)) * u64::from(group.ranks);
        match names.find(|name| sharding.source == Source::Peers && parts(name) > u64::from(gpus)) {
            Some(name) => Err(Error::new(Kind::InvalidConfig, "plan weights")
                .at(format!("{}: the ranks of a group have different parts of it", echo(name)))
                .with("ranks", group.ranks)
                .with("degree", degree(name))
                .with("gpus", gpus)
                .hint("divide it over fewer GPUs, or shard it over fewer ranks: their product is at most the GPUs")),
            None => Ok(plan),
        }
    }

    /// The patterns of what `name` shards: `o_proj`, `mla` (all projections of attention, and the indexer's if the
    /// model has one), or a pattern itself. The two names mean the values alone: scales are small and stay on every
    /// rank.
    pub fn patterns(&self, name: &str) -> Vec<String> {
        let all = matrices::attention(&self.dims);
        let of = |matrix: &Matrix| format!("*.{}.weight", matrix.name);
        match name {
            "o_proj" => all.iter().filter(|matrix| matrix.name.ends_with("o_proj")).map(of).collect(),
            "mla" => all.iter().map(of).collect(),
            pattern => vec![pattern.to_owned()],
        }
    }
}

/// The alignment of a tensor in a window, in bytes: what CUDA's own allocator gives, so that no kernel needs more.
const ALIGN: u64 = 256;

/// Tokens whose latent rows, in all layers, fit in saved bytes.
///
/// # Errors
/// Errors of [`Geometry::new`].
pub fn tokens_gained(saved: i64, shape: Shape) -> Result<u64> {
    let geometry = Geometry::new(shape)?;
    let token = u64::from(geometry.row_bytes()) * u64::from(geometry.layers());
    Ok(u64::try_from(saved).unwrap_or(0) / token.max(1))
}

impl Setup {
    /// The published checkpoint of the setup's model; none for a custom or unpublished model.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::of`].
    pub fn checkpoint(&self) -> Result<Option<Checkpoint>> {
        let model = &self.file().model;
        let own = model.shape.is_some() || model.dims.is_some();
        match model.preset.as_deref().filter(|_| !own) {
            Some(name) => Checkpoint::of(name),
            None => Ok(None),
        }
    }

    /// Bytes of weights on each of the setup's GPUs, for steps of `query_rows` query rows, divided like the checkpoint
    /// in the planner. None if nothing is published.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::of`].
    pub fn weights(&self, query_rows: u32) -> Result<Option<u64>> {
        let drafts = query_rows > 1 || self.shape().draft_layers > 0;
        let division = Division::of(self.file().deployment.gpus, Attention::Data);
        let on_gpu = |it: Checkpoint| it.divided(&division, self.file().model.weights(), drafts);
        Ok(self.checkpoint()?.map(on_gpu))
    }
}

/// Whether `gpus` GPUs are whole nodes of `node`, above 0, or a part of one that divides it evenly.
pub const fn is_deployment(gpus: u32, node: u32) -> bool {
    gpus > 0 && gpus <= GPUS_MAX && (gpus.is_multiple_of(node) || node.is_multiple_of(gpus))
}
