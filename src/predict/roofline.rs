//! The least cost of each work on a GPU: operations over peak, bytes over bandwidth, kernels.
//!
//! A work takes the longer of its operations and its bytes, each at the fraction of the peak that the setup states,
//! plus one launch for each of its kernels. It replaces missing measured points of a setup, and gives the slope beyond
//! the last one. It is a bound with fractions of peaks, not a measurement.

use super::cost::Load;
use super::model::{Deployment, Dims, Gpu, WeightDtype};
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
    /// Whether attention reads every row.
    pub dense: bool,
    /// Dtype of the linear layers' weights: FP8, or else BF16.
    pub weights: WeightDtype,
    /// The GPU.
    pub gpu: Gpu,
    /// The deployment.
    pub deployment: Deployment,
}

/// The scales of FP8 blocks are ignored here: a value is a byte.
const FP8: f64 = 1.0;
const BF16: f64 = 2.0;
const F32: f64 = 4.0;

/// Kernels of a layer's rest up to its output projection, and behind it.
const OUTPUT_KERNELS: f64 = 2.0;
const EXPERT_KERNELS: f64 = 8.0;

/// What bounds a work, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bound {
    /// Its operations.
    work: f64,
    /// Its bytes.
    bytes: f64,
    /// Its launches.
    launches: f64,
}

impl Bound {
    fn us(&self) -> f64 {
        self.work.max(self.bytes) + self.launches
    }
}

impl Roofline {
    /// The cost in microseconds for one micro-batch in one layer; [`Term::Step`] for a whole step.
    pub fn us(&self, term: Term, load: &Load) -> f64 {
        match term {
            Term::Exchange => self.deployment.exchange_us + self.exchanged(load.tokens()),
            Term::Step => 0.0,
            _ => self.bound(term, load).us(),
        }
    }

    /// Whether the memory's bandwidth bounds a work, so that other traffic of the memory delays it. The exchange does
    /// not use it much, nor is it known what a step's other works use.
    pub fn is_bound_by_memory(&self, term: Term, load: &Load) -> bool {
        let Bound { work, bytes, .. } = self.bound(term, load);
        !matches!(term, Term::Exchange | Term::Step) && bytes > work
    }

    fn bound(&self, term: Term, load: &Load) -> Bound {
        let d = &self.dims;
        let tokens = load.tokens();
        let of = |n: u32| f64::from(n);
        let index = of(d.index_heads) * of(d.index_dim);
        let (products, memory, value) = (self.products(), self.memory(), self.value());
        match term {
            Term::Project => {
                let indexer = if d.index_heads > 0 { of(d.index_dim) + of(d.index_heads) } else { 0.0 };
                let inputs = of(d.q_lora) + of(d.kv_lora) + of(d.rope) + indexer;
                let weights = of(d.hidden) * inputs + of(d.q_lora) * index;
                self.bounded(2.0 * tokens * weights / products, weights * value / memory, 6.0)
            }
            Term::Index if d.index_heads == 0 => self.bounded(0.0, 0.0, 0.0),
            Term::Index => {
                let scores = tokens * load.context;
                let keys = load.rows * load.context * self.index_key_bytes;
                // The scores are written once and read once by the top-k.
                let bytes = keys + 2.0 * scores * F32;
                // Keys of two bytes per value are multiplied in BF16.
                let bf16 = self.index_key_bytes >= BF16 * of(d.index_dim);
                let peak = if bf16 { self.bf16() } else { self.fp8() };
                self.bounded(2.0 * scores * index / peak, bytes / memory, 2.0)
            }
            Term::Prepare => {
                let (up, absorb) = (
                    of(d.q_lora) * of(d.heads) * (of(d.nope) + of(d.rope)),
                    of(d.heads) * of(d.nope) * of(d.kv_lora),
                );
                let work = 2.0 * tokens * (up / products + absorb / self.bf16());
                self.bounded(work, (up * value + absorb * BF16) / memory, 4.0)
            }
            Term::Attend => {
                let pairs = tokens * of(d.heads) * load.width;
                let work = 2.0 * pairs * (2.0 * of(d.kv_lora) + of(d.rope));
                // Dense attention reads a sequence's rows once for all its query rows.
                let readers = if self.dense { load.rows } else { tokens };
                let bytes = readers * load.width * self.row_bytes;
                // Rows of other types are made BF16 first.
                let peak = self.gpu.bf16_tflops * 1e6 * self.gpu.attention_share;
                self.bounded(work / peak, bytes / memory, 2.0)
            }
            // Two partial outputs and the result.
            Term::Merge => {
                let bytes = 3.0 * tokens * of(d.heads) * of(d.kv_lora) * BF16;
                self.bounded(0.0, bytes / memory, 1.0)
            }
            Term::Rest => {
                let (output, experts) = (self.output(tokens, 1.0), self.experts(tokens, 1.0));
                let (work, bytes) = (output.0 + experts.0, output.1 + experts.1);
                self.bounded(work, bytes / memory, OUTPUT_KERNELS + EXPERT_KERNELS)
            }
            Term::Exchange | Term::Step => self.bounded(0.0, 0.0, 0.0),
        }
    }

    /// The same machine and model in another deployment.
    pub(super) fn on(&self, gpus: u32) -> Roofline {
        Roofline { deployment: Deployment { gpus, ..self.deployment.clone() }, ..self.clone() }
    }

    /// Microseconds of the exchange's bytes: the parts of the network and of NVLink move at once.
    pub(super) fn exchanged(&self, tokens: f64) -> f64 {
        let deployment = &self.deployment;
        let far = self.sent(tokens) * deployment.remote() / (deployment.network_gb_s * 1e3);
        let near = deployment.nvlink_gb_s.map_or(0.0, |nvlink| self.near(tokens) / (nvlink * 1e3));
        far.max(near)
    }

    /// Bytes of the exchange of `tokens` tokens that a GPU sends to its neighbours in the node.
    pub(super) fn near(&self, tokens: f64) -> f64 {
        self.sent(tokens) * self.deployment.local()
    }

    /// Values go to the experts in the weights' dtype, and come back in BF16.
    fn sent(&self, tokens: f64) -> f64 {
        tokens * f64::from(self.dims.experts_per_token) * f64::from(self.dims.hidden) * (self.value() + BF16)
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
        let work = 2.0 * tokens * f64::from(self.dims.experts_per_token) * self.expert() / self.products();
        work.max(self.touched(tokens) * self.expert() * self.value() / self.memory())
    }

    /// The output projection, the values' up-projection with it: microseconds of its operations, and bytes. If
    /// `over` GPUs divide it, each has its part of the weights, and its columns of all their tokens.
    fn output(&self, tokens: f64, over: f64) -> (f64, f64) {
        let d = &self.dims;
        let of = |n: u32| f64::from(n);
        let output = of(d.heads) * of(d.value) * of(d.hidden);
        let up = of(d.heads) * of(d.kv_lora) * of(d.value);
        let work = 2.0 * tokens * output / self.products() + 2.0 * tokens * up / self.bf16();
        (work, output / over * self.value() + up * BF16)
    }

    /// Routed experts of this GPU, shared experts: microseconds of their operations, and bytes. If `over` GPUs divide
    /// the shared ones, each has its part of them, and its columns of all their tokens.
    fn experts(&self, tokens: f64, over: f64) -> (f64, f64) {
        let (visited, shared) = (f64::from(self.dims.experts_per_token), f64::from(self.dims.shared_experts));
        let work = 2.0 * tokens * (visited + shared) * self.expert() / self.products();
        (work, (self.touched(tokens) + shared / over) * self.expert() * self.value())
    }

    /// Microseconds of the output projection, divided by `over` GPUs, and its share of a layer's rest if none divide
    /// it.
    pub(super) fn output_us(&self, tokens: f64, over: u32) -> f64 {
        let (work, bytes) = self.output(tokens, f64::from(over.max(1)));
        self.bounded(work, bytes / self.memory(), OUTPUT_KERNELS).us()
    }

    /// The share of [`Term::Rest`] up to the end of the output projection.
    pub(super) fn output_share(&self, tokens: f64) -> f64 {
        let (before, after) = (self.output_us(tokens, 1), self.experts_us(tokens, 1));
        before / (before + after)
    }

    /// Microseconds of the experts, the shared ones divided by `over` GPUs.
    fn experts_us(&self, tokens: f64, over: u32) -> f64 {
        let (work, bytes) = self.experts(tokens, f64::from(over.max(1)));
        self.bounded(work, bytes / self.memory(), EXPERT_KERNELS).us()
    }

    /// Microseconds of a layer without its collectives, if `over` GPUs, above 0 and all there are, divide attention's
    /// heads. The load is of all their sequences.
    pub(super) fn by_heads_us(&self, load: &Load, over: u32) -> f64 {
        let own = Roofline { dims: Dims { heads: self.dims.heads / over, ..self.dims }, ..self.clone() };
        let terms = [Term::Project, Term::Index, Term::Prepare, Term::Attend];
        let attention: f64 = terms.into_iter().map(|term| own.us(term, load)).sum();
        let tokens = load.tokens();
        attention + own.output_us(tokens, 1) + self.experts_us(tokens / f64::from(over), over)
    }

    /// FP8 operations a microsecond.
    fn fp8(&self) -> f64 {
        self.gpu.fp8_tflops * 1e6 * self.gpu.fp8_share
    }

    /// BF16 operations a microsecond.
    fn bf16(&self) -> f64 {
        0.5 * self.fp8()
    }

    /// Operations a microsecond of products with the linear layers' weights.
    fn products(&self) -> f64 {
        if self.weights == WeightDtype::Bf16 { self.bf16() } else { self.fp8() }
    }

    /// Bytes of a value of the linear layers' weights.
    fn value(&self) -> f64 {
        if self.weights == WeightDtype::Bf16 { BF16 } else { FP8 }
    }

    /// Bytes of the memory a microsecond.
    pub(super) fn memory(&self) -> f64 {
        self.gpu.memory_gb_s * 1e3 * self.gpu.memory_share
    }

    fn bounded(&self, work: f64, bytes: f64, kernels: f64) -> Bound {
        Bound { work, bytes, launches: kernels * self.gpu.kernel_us }
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
