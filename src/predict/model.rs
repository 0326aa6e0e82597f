//! The sizes that a roofline needs: those of a model's layers, and of the GPUs that serve it.

use serde::{Deserialize, Serialize};

use super::{finite, positive, within, wrong};
use crate::error::Result;
use crate::geometry::{Geometry, Shape};
use crate::text::echo;

/// The dimensions of one layer with multi-head latent attention, an indexer and routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dims {
    /// Values of a token between layers.
    pub hidden: u32,
    /// Values of the compressed query.
    pub q_lora: u32,
    /// Values of a latent.
    pub kv_lora: u32,
    /// Rotary values of a key.
    pub rope: u32,
    /// Attention heads.
    pub heads: u32,
    /// Values of a head's query without the rotary ones.
    pub nope: u32,
    /// Values of a head's output.
    pub value: u32,
    /// Heads of the indexer; 0 without one.
    pub index_heads: u32,
    /// Values of an index key.
    pub index_dim: u32,
    /// Routed experts of a layer.
    pub experts: u32,
    /// Routed experts that one token visits.
    pub experts_per_token: u32,
    /// Experts that every token visits.
    pub shared_experts: u32,
    /// Values inside an expert.
    pub expert_hidden: u32,
    /// The longest context in tokens.
    pub context_max: u32,
}

impl Dims {
    /// DeepSeek-V3.2: the published configuration.
    pub const DEEPSEEK_V3_2: Dims = Dims {
        hidden: 7168,
        q_lora: 1536,
        kv_lora: 512,
        rope: 64,
        heads: 128,
        nope: 128,
        value: 128,
        index_heads: 64,
        index_dim: 128,
        experts: 256,
        experts_per_token: 8,
        shared_experts: 1,
        expert_hidden: 2048,
        context_max: 163_840,
    };
    /// GLM-5: heads, latents and indexer as published; the sizes between layers and of the experts are
    /// assumed.
    pub const GLM_5: Dims = Dims {
        hidden: 6144,
        q_lora: 2048,
        heads: 64,
        nope: 192,
        value: 256,
        index_heads: 32,
        context_max: 202_752,
        ..Dims::DEEPSEEK_V3_2
    };

    /// GLM-5.2 and GLM-5.3: GLM-5's layers, which share selections, and a longer context (Xinference's model page).
    pub const GLM_5_2: Dims = Dims { context_max: 1_048_576, ..Dims::GLM_5 };

    /// The dimensions of a preset of [`Shape::PRESETS`]; none if they are unknown.
    pub fn preset(name: &str) -> Option<Dims> {
        match name {
            "deepseek-v3.2" | "deepseek-v3.2-bf16" | "deepseek-v3.2-int8" => Some(Dims::DEEPSEEK_V3_2),
            "deepseek-v3" | "deepseek-r1" => Some(Dims { index_heads: 0, ..Dims::DEEPSEEK_V3_2 }),
            "glm-5" => Some(Dims::GLM_5),
            "glm-5.2" | "glm-5.3" => Some(Dims::GLM_5_2),
            _ => None,
        }
    }
}

/// The format of the linear layers' weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtype {
    /// 8-bit floats, scaled in blocks of 128 x 128: the published checkpoints' own.
    #[default]
    Fp8,
    /// 16-bit floats.
    Bf16,
    /// 8-bit integers, scaled by output channel.
    Int8,
    /// 4-bit integers, scaled in groups of 128.
    Int4,
    /// 4-bit floats, scaled in groups of 16.
    Nvfp4,
}

impl WeightDtype {
    /// Bytes of `values` values, without scales.
    pub const fn bytes_of(self, values: u64) -> u64 {
        match self {
            WeightDtype::Fp8 | WeightDtype::Int8 => values,
            WeightDtype::Bf16 => 2 * values,
            WeightDtype::Int4 | WeightDtype::Nvfp4 => values.div_ceil(2),
        }
    }
}

/// The cache's geometry in a setup, with the fields of [`Shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheShape {
    /// Layers that a step runs once.
    pub layers: u32,
    /// Bytes of a row's runs.
    pub runs: [u32; 2],
    /// Bytes of an index key.
    pub index_key_bytes: u32,
    /// Positions that a query row selects.
    pub top_k: u32,
}

/// The most draft layers: more than any model has.
const DRAFT_LAYERS_MAX: u32 = 16;

/// The model of a setup: a preset's name, or both of `shape` and `dims`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A preset of [`Shape::PRESETS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// The cache's shape, instead of the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<CacheShape>,
    /// The layer's dimensions, instead of the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dims: Option<Dims>,
    /// Dtype of the linear layers' weights; FP8 if absent. A roofline has [`WeightDtype::Fp8`] and
    /// [`WeightDtype::Bf16`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_dtype: Option<WeightDtype>,
    /// Draft layers that the simulator runs; 0 if the cost of drafting is in `costs.step`.
    #[serde(default)]
    pub draft_layers: u32,
}

impl Model {
    fn preset_name(&self) -> Result<&str> {
        self.preset
            .as_deref()
            .ok_or_else(|| wrong("model.preset: missing, and shape and dims are not both given"))
    }

    /// Dtype of the linear layers' weights.
    pub fn weights(&self) -> WeightDtype {
        self.weight_dtype.unwrap_or_default()
    }

    /// The cache's shape, draft layers included.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] for an unknown preset or an impossible shape.
    pub fn shape(&self) -> Result<Shape> {
        let shape = match &self.shape {
            Some(own) => Shape {
                layers: own.layers,
                runs: own.runs,
                index_key_bytes: own.index_key_bytes,
                top_k: own.top_k,
                ..Shape::DEEPSEEK_V3_2
            },
            None => {
                let name = self.preset_name()?;
                Shape::preset(name)
                    .ok_or_else(|| wrong(format!("model.preset: unknown preset {:?}", echo(name))))?
            }
        };
        if !matches!(self.weights(), WeightDtype::Fp8 | WeightDtype::Bf16) {
            return Err(wrong("model.weight_dtype: a roofline has fp8 and bf16 alone"));
        }
        if self.draft_layers > DRAFT_LAYERS_MAX {
            return Err(wrong("model.draft_layers")
                .with("layers", self.draft_layers)
                .with("most", DRAFT_LAYERS_MAX));
        }
        let shape = Shape { draft_layers: self.draft_layers, ..shape };
        Geometry::new(shape).map_err(|e| within("model.shape", &e))?;
        Ok(shape)
    }

    /// The dimensions of a layer.
    ///
    /// # Errors
    /// [`crate::Kind::InvalidConfig`] for a preset without dimensions, or for one of 0.
    pub fn dims(&self) -> Result<Dims> {
        let dims = match self.dims {
            Some(dims) => dims,
            None => {
                let name = self.preset_name()?;
                Dims::preset(name).ok_or_else(|| {
                    wrong(format!("model.dims: the preset {:?} has none; set them", echo(name)))
                })?
            }
        };
        let fields = [
            ("hidden", dims.hidden),
            ("heads", dims.heads),
            ("kv_lora", dims.kv_lora),
            ("experts", dims.experts),
            ("experts_per_token", dims.experts_per_token),
            ("context_max", dims.context_max),
        ];
        match fields.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(wrong(format!("model.dims.{name}: 0"))),
            None => Ok(dims),
        }
    }
}

/// The rates of a GPU, and the fraction of them that such works reach.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Memory in GiB.
    pub memory_gib: f64,
    /// Dense FP8 peak, 10^12 operations per second.
    pub fp8_tflops: f64,
    /// Dense BF16 peak.
    pub bf16_tflops: f64,
    /// Memory bandwidth, 10^9 bytes per second.
    pub memory_gb_s: f64,
    /// From a kernel to the next dependent one in a captured graph, microseconds.
    pub kernel_us: f64,
    /// Share of the FP8 peak that matrix products reach.
    pub fp8_share: f64,
    /// Share of the BF16 peak that attention reaches.
    pub attention_share: f64,
    /// Share of the bandwidth that is reached.
    pub memory_share: f64,
}

impl Gpu {
    pub(super) fn check(&self) -> Result<()> {
        positive(self.memory_gib, || "gpu.memory_gib".to_owned())?;
        positive(self.fp8_tflops, || "gpu.fp8_tflops".to_owned())?;
        positive(self.bf16_tflops, || "gpu.bf16_tflops".to_owned())?;
        positive(self.memory_gb_s, || "gpu.memory_gb_s".to_owned())?;
        finite(self.kernel_us, || "gpu.kernel_us".to_owned())?;
        let shares = [
            ("fp8_share", self.fp8_share),
            ("attention_share", self.attention_share),
            ("memory_share", self.memory_share),
        ];
        for (name, share) in shares {
            positive(share, || format!("gpu.{name}"))?;
            if share > 1.0 {
                return Err(wrong(format!("gpu.{name}: {share} is above 1")));
            }
        }
        Ok(())
    }
}

/// The GPUs that serve together, and how they exchange the experts' tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deployment {
    /// GPUs that the experts are divided over.
    pub gpus: u32,
    /// GPUs of one node; tokens for experts of other nodes cross the network. Throughput is always given for 8 GPUs,
    /// regardless of this value.
    pub node_gpus: u32,
    /// A GPU's network bandwidth, 10^9 bytes per second.
    pub network_gb_s: f64,
    /// A GPU's bandwidth to its neighbours inside the node, 10^9 bytes per second. Required for other numbers of GPUs
    /// than that of the costs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_gb_s: Option<f64>,
    /// Microseconds of a dispatch and its combine for one token.
    pub exchange_us: f64,
    /// GPUs of the measured costs; [`Deployment::gpus`] if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub costs_gpus: Option<u32>,
}

/// The GPUs of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Served {
    /// GPUs that the experts are divided over.
    pub gpus: u32,
    /// GPUs of one node.
    pub node_gpus: u32,
    /// GPUs that the setup's costs are of.
    pub costs_gpus: u32,
    /// Whether these differ, so that a model of the experts is used between the costs and the figure.
    pub extrapolated: bool,
}

impl Deployment {
    pub(super) fn check(&self) -> Result<()> {
        let (own, most) = (self.costs_gpus(), self.gpus.max(self.costs_gpus()));
        if self.gpus == 0 || own == 0 || self.node_gpus == 0 || self.node_gpus > most {
            return Err(wrong("deployment.gpus: 0, or fewer than node_gpus"));
        }
        positive(self.network_gb_s, || "deployment.network_gb_s".to_owned())?;
        if let Some(nvlink) = self.nvlink_gb_s {
            positive(nvlink, || "deployment.nvlink_gb_s".to_owned())?;
        }
        finite(self.exchange_us, || "deployment.exchange_us".to_owned())
    }

    /// GPUs of the measured costs.
    pub fn costs_gpus(&self) -> u32 {
        self.costs_gpus.unwrap_or(self.gpus)
    }

    /// The GPUs of figures of this deployment.
    pub(super) fn served(&self) -> Served {
        let (gpus, costs_gpus) = (self.gpus, self.costs_gpus());
        Served { gpus, node_gpus: self.node_gpus.min(gpus), costs_gpus, extrapolated: gpus != costs_gpus }
    }

    /// The fraction of the ranks, and so of the tokens, that are on other nodes.
    pub fn remote(&self) -> f64 {
        1.0 - f64::from(self.node_gpus.min(self.gpus)) / f64::from(self.gpus)
    }

    /// The fraction of them that are neighbours on the same node.
    pub fn local(&self) -> f64 {
        f64::from(self.node_gpus.min(self.gpus).saturating_sub(1)) / f64::from(self.gpus)
    }
}
