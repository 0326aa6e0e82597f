//! The size of a model's weights on each GPU, depending on how they are divided.
//!
//! `data/weights.json` lists the published checkpoints that the planner supports, each with its published size and
//! its source. The size of a part follows from the published configuration ([`Dims`]): a matrix in FP8
//! takes one byte per value and a scale of four bytes for each block of 128 x 128; embedding, head, the experts' router
//! and the input projection of a draft layer are BF16. The parts add up to the published size within a thousandth
//! (`tests/plan.rs` checks it), so the division is that of the files on disk.
//!
//! **Assumptions.** Experts are divided over all GPUs, none of them twice. Everything else, attention, shared
//! experts, dense layers, embedding and head, is on every GPU. If attention is divided, these are divided over the
//! GPUs of a node, except for the parts that each GPU needs whole. The draft layer is included if a step has drafts.
//!
//! **Not covered.** Changes that an engine makes when it loads weights: copies in another type or layout,
//! redundant experts.

use serde::Deserialize;

use super::model::Dims;
use super::setup::Setup;
use crate::error::{Error, Kind, Result};

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

/// Bytes of one layer's parts, and of parts that exist once.
struct SplitIndices {
    /// One routed expert.
    expert: u64,
    /// Attention's matrices that have heads.
    heads: u64,
    /// Attention's other matrices, and the indexer, which are never divided.
    whole: u64,
    /// A layer's router.
    router: u64,
    shared: u64,
    dense: u64,
    /// Embedding and head.
    embeddings: u64,
    /// The projection that connects a draft layer to the preceding layer.
    join: u64,
}

/// Bytes of a matrix of this many values: a byte each, and a scale of four for each block of 128 x 128.
const fn fp8(values: u64) -> u64 {
    values + values.div_ceil(128 * 128) * 4
}

const fn bf16(values: u64) -> u64 {
    2 * values
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

    fn split_indices(&self) -> SplitIndices {
        let d = &self.dims;
        let of = |n: u32| u64::from(n);
        let (hidden, heads) = (of(d.hidden), of(d.heads));
        let index = match d.index_heads {
            0 => 0,
            heads => {
                let (heads, dim) = (of(heads), of(d.index_dim));
                fp8(of(d.q_lora) * heads * dim) + fp8(hidden * dim) + bf16(hidden * heads)
            }
        };
        SplitIndices {
            expert: 3 * fp8(hidden * of(d.expert_hidden)),
            heads: fp8(of(d.q_lora) * heads * (of(d.nope) + of(d.rope)))
                + fp8(of(d.kv_lora) * heads * (of(d.nope) + of(d.value)))
                + fp8(heads * of(d.value) * hidden),
            whole: fp8(hidden * of(d.q_lora)) + fp8(hidden * (of(d.kv_lora) + of(d.rope))) + index,
            router: bf16(hidden * of(d.experts)),
            shared: of(d.shared_experts) * 3 * fp8(hidden * of(d.expert_hidden)),
            dense: 3 * fp8(hidden * of(self.entry.dense_hidden)),
            embeddings: 2 * bf16(hidden * of(self.entry.vocabulary)),
            join: bf16(2 * hidden * hidden),
        }
    }

    /// Bytes of the checkpoint as the sum of its parts.
    pub fn bytes(&self) -> u64 {
        let entry = &self.entry;
        let copies = if entry.drafts_store_embeddings { u64::from(entry.draft_layers) } else { 0 };
        self.on_gpu(1, Attention::Data, true) + copies * self.split_indices().embeddings
    }

    /// Bytes on each of `gpus` GPUs, above 0; with the draft layer if a step has drafts.
    pub fn on_gpu(&self, gpus: u32, attention: Attention, drafts: bool) -> u64 {
        let (range, entry) = (self.split_indices(), &self.entry);
        let (layers, dense) = (u64::from(entry.layers), u64::from(entry.dense_layers));
        let draft = if drafts { u64::from(entry.draft_layers) } else { 0 };
        let sparse = layers - dense.min(layers) + draft;
        let own = u64::from(self.dims.experts.div_ceil(gpus.max(1)));
        let divided =
            (layers + draft) * range.heads + sparse * range.shared + dense * range.dense + range.embeddings;
        let over = match attention {
            Attention::Data => 1,
            Attention::Tensor => u64::from(gpus.clamp(1, NODE_GPUS)),
        };
        let whole = (layers + draft) * range.whole + sparse * range.router + draft * range.join;
        sparse * own * range.expert + divided.div_ceil(over) + whole
    }
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
        let on_gpu = |it: Checkpoint| it.on_gpu(self.file().deployment.gpus, Attention::Data, drafts);
        Ok(self.checkpoint()?.map(on_gpu))
    }
}

/// Whether `gpus` GPUs are whole nodes of `node`, above 0, or a part of one that divides it evenly.
pub const fn is_deployment(gpus: u32, node: u32) -> bool {
    gpus > 0 && gpus <= GPUS_MAX && (gpus.is_multiple_of(node) || node.is_multiple_of(gpus))
}
