//! The least cost of each work on a GPU: operations over peak, bytes over bandwidth, kernels.
//!
//! A work takes the longer of its operations and its bytes, each at the fraction of the peak that the setup states,
//! plus one launch for each of its kernels. It replaces missing measured points of a setup, and gives the slope beyond
//! the last one. It is a bound with fractions of peaks, not a measurement.

use super::cost::Load;
use super::model::{Deployment, Dims, Gpu};
use super::setup::Term;

/// The model, the GPU and the deployment of a roofline.
#[derive(Clone, Debug)]
pub struct Roofline {
    /// The model's layer.
    pub dims: Dims,
    /// Bytes of an index key.
    pub index_key_bytes: f64,
    /// Bytes of a row that attention reads.
    pub row_bytes: f64,
    /// The GPU.
    pub gpu: Gpu,
    /// The deployment.
    pub deployment: Deployment,
}

/// The scales of FP8 blocks are ignored here: a value is a byte.
const FP8: f64 = 1.0;
const BF16: f64 = 2.0;
const F32: f64 = 4.0;

impl Roofline {
    /// The cost in microseconds for one micro-batch in one layer; [`Term::Step`] for a whole step.
    pub fn us(&self, term: Term, load: &Load) -> f64 {
        let d = &self.dims;
        let tokens = load.tokens();
        let of = |n: u32| f64::from(n);
        let index = of(d.index_heads) * of(d.index_dim);
        let (fp8, memory) = (self.fp8(), self.memory());
        match term {
            Term::Project => {
                let inputs = of(d.q_lora) + of(d.kv_lora) + of(d.rope) + of(d.index_dim) + of(d.index_heads);
                let weights = of(d.hidden) * inputs + of(d.q_lora) * index;
                self.longer(2.0 * tokens * weights / fp8, weights * FP8 / memory, 6.0)
            }
            Term::Index => {
                let scores = tokens * load.context;
                let keys = load.rows * load.context * self.index_key_bytes;
                // The scores are written once and read once by the top-k.
                let bytes = keys + 2.0 * scores * F32;
                // Keys of two bytes per value are multiplied in BF16.
                let bf16 = self.index_key_bytes >= BF16 * of(d.index_dim);
                let peak = if bf16 { 0.5 * fp8 } else { fp8 };
                self.longer(2.0 * scores * index / peak, bytes / memory, 2.0)
            }
            Term::Prepare => {
                let (up, absorb) = (
                    of(d.q_lora) * of(d.heads) * (of(d.nope) + of(d.rope)),
                    of(d.heads) * of(d.nope) * of(d.kv_lora),
                );
                let work = 2.0 * tokens * (up / fp8 + absorb / (0.5 * fp8));
                self.longer(work, (up * FP8 + absorb * BF16) / memory, 4.0)
            }
            Term::Attend => {
                let pairs = tokens * of(d.heads) * load.width;
                let work = 2.0 * pairs * (2.0 * of(d.kv_lora) + of(d.rope));
                let bytes = tokens * load.width * self.row_bytes;
                // Rows of other types are made BF16 first.
                let peak = self.gpu.bf16_tflops * 1e6 * self.gpu.attention_share;
                self.longer(work / peak, bytes / memory, 2.0)
            }
            // Two partial outputs and the result.
            Term::Merge => {
                let bytes = 3.0 * tokens * of(d.heads) * of(d.kv_lora) * BF16;
                self.longer(0.0, bytes / memory, 1.0)
            }
            Term::Rest => self.rest(tokens),
            Term::Exchange => self.deployment.exchange_us + self.exchanged(tokens),
            Term::Step => 0.0,
        }
    }

    /// The same machine and model in another deployment.
    pub(super) fn on(&self, gpus: u32) -> Roofline {
        Roofline { deployment: Deployment { gpus, ..self.deployment.clone() }, ..self.clone() }
    }

    /// Microseconds of the exchange's bytes: the parts of the network and of NVLink move at once.
    pub(super) fn exchanged(&self, tokens: f64) -> f64 {
        let (d, deployment) = (&self.dims, &self.deployment);
        // FP8 values to the experts, BF16 values back.
        let sent = tokens * f64::from(d.experts_per_token) * f64::from(d.hidden) * (FP8 + BF16);
        let far = sent * deployment.remote() / (deployment.network_gb_s * 1e3);
        let near = deployment.nvlink_gb_s.map_or(0.0, |nvlink| sent * deployment.local() / (nvlink * 1e3));
        far.max(near)
    }

    /// Values of one expert's three matrices.
    fn expert(&self) -> f64 {
        3.0 * f64::from(self.dims.hidden) * f64::from(self.dims.expert_hidden)
    }

    /// How many of a GPU's own experts a micro-batch of `tokens` on every GPU visits. Tokens of all GPUs may visit
    /// this GPU's experts; the power is the probability that all of them miss an expert.
    fn touched(&self, tokens: f64) -> f64 {
        let (experts, gpus) = (f64::from(self.dims.experts), f64::from(self.deployment.gpus));
        let visits = tokens * gpus * f64::from(self.dims.experts_per_token) / experts;
        experts / gpus * (1.0 - (-visits).exp())
    }

    /// Microseconds of the routed experts alone: their operations, or the weights of the visited ones.
    pub(super) fn routed(&self, tokens: f64) -> f64 {
        let work = 2.0 * tokens * f64::from(self.dims.experts_per_token) * self.expert() / self.fp8();
        work.max(self.touched(tokens) * self.expert() * FP8 / self.memory())
    }

    /// Output projection, routed experts of this GPU, shared experts.
    fn rest(&self, tokens: f64) -> f64 {
        let d = &self.dims;
        let of = |n: u32| f64::from(n);
        let (heads, value) = (of(d.heads), of(d.value));
        let expert = self.expert();
        let output = heads * value * of(d.hidden);
        let up = heads * of(d.kv_lora) * value;
        let touched = self.touched(tokens);
        let visited = of(d.experts_per_token) + of(d.shared_experts);
        let work =
            2.0 * tokens * (output + visited * expert) / self.fp8() + 2.0 * tokens * up / (0.5 * self.fp8());
        let weights = (output + (touched + of(d.shared_experts)) * expert) * FP8 + up * BF16;
        self.longer(work, weights / self.memory(), 10.0)
    }

    /// FP8 operations a microsecond.
    fn fp8(&self) -> f64 {
        self.gpu.fp8_tflops * 1e6 * self.gpu.fp8_share
    }

    /// Bytes a microsecond.
    fn memory(&self) -> f64 {
        self.gpu.memory_gb_s * 1e3 * self.gpu.memory_share
    }

    fn longer(&self, work: f64, bytes: f64, kernels: f64) -> f64 {
        work.max(bytes) + kernels * self.gpu.kernel_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Shape;
    use crate::predict::setup::{File, Setup};

    /// The built-in machine with another cache, and so few heads that attention is bound by its rows.
    fn roofline(shape: Shape, index_key_bytes: f64) -> Roofline {
        let ess = Setup::named("ess").unwrap().unwrap();
        let mut file: File = ess.file().clone();
        let presets = Shape::PRESETS.iter();
        file.model.preset = presets.clone().find(|(_, of)| *of == shape).map(|(name, _)| (*name).to_owned());
        file.model.dims = Some(Dims { heads: 4, ..*ess.dims() });
        Roofline { index_key_bytes, ..Setup::new(file).unwrap().roofline().clone() }
    }

    #[test]
    fn attention_reads_the_shapes_rows_and_the_indexer_its_keys() {
        let load = Load { rows: 64.0, query_rows: 4.0, context: 32768.0, width: 2048.0 };
        let kernels = 2.0 * roofline(Shape::DEEPSEEK_V3_2, 132.0).gpu.kernel_us;
        let us = |term, shape, key| roofline(shape, key).us(term, &load) - kernels;
        let rows = |shape| us(Term::Attend, shape, 132.0);
        let fp8 = rows(Shape::DEEPSEEK_V3_2);
        assert!((rows(Shape::DEEPSEEK_V3_2_BF16) / fp8 - 1152.0 / 656.0).abs() < 1e-9);
        assert!((rows(Shape::DEEPSEEK_V3_2_INT8) / fp8 - 640.0 / 656.0).abs() < 1e-9);
        let keys = |bytes| us(Term::Index, Shape::DEEPSEEK_V3_2, bytes);
        assert!((keys(256.0) / keys(132.0) - 2.0).abs() < 1e-9, "{} {}", keys(256.0), keys(132.0));
    }
}
