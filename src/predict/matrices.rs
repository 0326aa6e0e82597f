//! The matrices of a model's layers, and the bytes of each on one GPU under a dtype and a division.
//!
//! This is the only arithmetic of weights: sizes by module, the tensors that [`weights`](crate::weights) shards, and
//! the size of a whole checkpoint are sums over the same list. A matrix has a name, rows (outputs) and columns
//! (inputs). Its names are those of the checkpoint's files, without the layer.
//!
//! **Layouts** of a matrix in a [`WeightDtype`], each with the source that this follows:
//!
//! | dtype | a value | scales | source |
//! |---|---|---|---|
//! | fp8 | 1 byte | 4 bytes per block of 128 x 128 | DeepSeek-V3's `README_WEIGHTS.md`, `weight_scale_inv` |
//! | bf16 | 2 bytes | none | |
//! | int8 | 1 byte | 4 bytes per row (output channel) | meituan/DeepSeek-R1-Channel-INT8, `weight_scale` |
//! | int4 | half a byte | 2 bytes per 128 values of a row, symmetric | GPTQ's and compressed-tensors' group size 128 |
//! | nvfp4 | half a byte | 1 byte per 16 values of a row, and 4 per matrix | ModelOpt's NVFP4, `weight_scale` |
//!
//! **Assumptions.** A dtype holds for every linear layer of the blocks. Embedding, head, router, the indexer's
//! `weights_proj` and the draft layer's `eh_proj` stay BF16, as in the FP8 checkpoints. Published INT4 and NVFP4
//! checkpoints often leave attention in a wider dtype too. Norms and biases (less than a thousandth) are not counted.
//!
//! **Division.** Tensor parallelism divides the rows of a matrix or its columns, whichever its layer's split needs, and
//! rounds up. Experts are not divided: each GPU has some of them whole.

use super::model::{Dims, WeightDtype};

/// The part of a model that a weight belongs to. A draft layer's weights belong to the same modules as any layer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// Attention's projections, and the indexer.
    Attention,
    /// The FFN of the first, dense layers.
    DenseFfn,
    /// The experts that every token visits.
    SharedExpert,
    /// The experts that a router chooses from.
    RoutedExperts,
    /// Further copies of routed experts, which balance the load.
    RedundantExperts,
    /// The routers.
    Router,
    /// The table of token embeddings.
    Embedding,
    /// The projection to the vocabulary.
    Head,
    /// What only a draft layer has: the projection that joins it to the last layer.
    Draft,
}

impl Module {
    /// Every module, in the order in which they are listed.
    pub const ALL: [Module; 9] = [
        Module::Attention,
        Module::DenseFfn,
        Module::SharedExpert,
        Module::RoutedExperts,
        Module::RedundantExperts,
        Module::Router,
        Module::Embedding,
        Module::Head,
        Module::Draft,
    ];

    /// Its name in words.
    pub const fn describe(self) -> &'static str {
        match self {
            Module::Attention => "attention",
            Module::DenseFfn => "dense FFN",
            Module::SharedExpert => "shared experts",
            Module::RoutedExperts => "routed experts",
            Module::RedundantExperts => "redundant experts",
            Module::Router => "routers",
            Module::Embedding => "embedding",
            Module::Head => "head",
            Module::Draft => "draft projection",
        }
    }
}

/// What tensor parallelism divides of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    Rows,
    Columns,
    /// Nothing: each GPU needs all of it.
    Whole,
}

/// A matrix of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Its name after the layer's, or the whole name of a matrix that exists once.
    pub(super) name: &'static str,
    pub(super) module: Module,
    rows: u64,
    columns: u64,
    split: Split,
    /// Whether the dtype holds for it; otherwise it is BF16.
    quantised: bool,
}

/// Bytes of a matrix on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) values: u64,
    pub(super) scales: u64,
}

impl Matrix {
    const fn new(name: &'static str, module: Module, rows: u64, columns: u64, split: Split) -> Matrix {
        Matrix { name, module, rows, columns, split, quantised: true }
    }

    /// The same matrix of another module.
    pub(super) const fn of(self, module: Module) -> Matrix {
        Matrix { module, ..self }
    }

    const fn bf16(self) -> Matrix {
        Matrix { quantised: false, ..self }
    }

    /// Its bytes if tensor parallelism divides it into `over` parts, above 0.
    pub(super) fn stored(&self, dtype: WeightDtype, over: u64) -> Stored {
        let (rows, columns) = match self.split {
            Split::Rows => (self.rows.div_ceil(over), self.columns),
            Split::Columns => (self.rows, self.columns.div_ceil(over)),
            Split::Whole => (self.rows, self.columns),
        };
        let values = rows * columns;
        let of = |values, scales| Stored { values, scales };
        if !self.quantised {
            return of(2 * values, 0);
        }
        match dtype {
            WeightDtype::Fp8 => of(values, 4 * rows.div_ceil(128) * columns.div_ceil(128)),
            WeightDtype::Bf16 => of(2 * values, 0),
            WeightDtype::Int8 => of(values, 4 * rows),
            WeightDtype::Int4 => of(rows * columns.div_ceil(2), 2 * rows * columns.div_ceil(128)),
            WeightDtype::Nvfp4 => of(rows * columns.div_ceil(2), rows * columns.div_ceil(16) + 4),
        }
    }
}

/// The suffix of the tensor of a matrix's scales.
pub(super) const fn scales_suffix(dtype: WeightDtype) -> &'static str {
    match dtype {
        WeightDtype::Fp8 => "weight_scale_inv",
        _ => "weight_scale",
    }
}

/// The matrices of attention, and of the indexer if there is one.
pub(super) fn attention(d: &Dims) -> Vec<Matrix> {
    let of = |n: u32| u64::from(n);
    let (hidden, heads, q_lora, kv_lora) = (of(d.hidden), of(d.heads), of(d.q_lora), of(d.kv_lora));
    let (nope, rope, value) = (of(d.nope), of(d.rope), of(d.value));
    let own = |name, rows, columns, split| Matrix::new(name, Module::Attention, rows, columns, split);
    let mut all = vec![
        own("self_attn.q_a_proj", q_lora, hidden, Split::Whole),
        own("self_attn.q_b_proj", heads * (nope + rope), q_lora, Split::Rows),
        own("self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden, Split::Whole),
        own("self_attn.kv_b_proj", heads * (nope + value), kv_lora, Split::Rows),
        own("self_attn.o_proj", hidden, heads * value, Split::Columns),
    ];
    if d.index_heads > 0 {
        let (heads, dim) = (of(d.index_heads), of(d.index_dim));
        all.extend([
            own("self_attn.indexer.wq_b", heads * dim, q_lora, Split::Whole),
            own("self_attn.indexer.wk", dim, hidden, Split::Whole),
            own("self_attn.indexer.weights_proj", heads, hidden, Split::Whole).bf16(),
        ]);
    }
    all
}

/// The matrices of a gated FFN of `inner` values.
fn ffn(names: [&'static str; 3], module: Module, hidden: u64, inner: u64) -> [Matrix; 3] {
    let [gate, up, down] = names;
    [
        Matrix::new(gate, module, inner, hidden, Split::Rows),
        Matrix::new(up, module, inner, hidden, Split::Rows),
        Matrix::new(down, module, hidden, inner, Split::Columns),
    ]
}

/// A dense layer's FFN.
pub(super) fn dense(d: &Dims, inner: u32) -> [Matrix; 3] {
    let names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
    ffn(names, Module::DenseFfn, u64::from(d.hidden), u64::from(inner))
}

/// A layer's shared experts, which files store as one.
pub(super) fn shared(d: &Dims) -> [Matrix; 3] {
    let names =
        ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"];
    let inner = u64::from(d.shared_experts) * u64::from(d.expert_hidden);
    ffn(names, Module::SharedExpert, u64::from(d.hidden), inner)
}

/// One routed expert; its names follow `mlp.experts.N.`.
pub(super) fn expert(d: &Dims) -> [Matrix; 3] {
    let names = ["gate_proj", "up_proj", "down_proj"];
    ffn(names, Module::RoutedExperts, u64::from(d.hidden), u64::from(d.expert_hidden))
        .map(|matrix| Matrix { split: Split::Whole, ..matrix })
}

/// A layer's router.
pub(super) const fn router(d: &Dims) -> Matrix {
    let (rows, columns) = (d.experts as u64, d.hidden as u64);
    Matrix::new("mlp.gate", Module::Router, rows, columns, Split::Whole).bf16()
}

/// Embedding and head.
pub(super) const fn vocabulary(d: &Dims, tokens: u32) -> [Matrix; 2] {
    let (rows, columns) = (tokens as u64, d.hidden as u64);
    [
        Matrix::new("model.embed_tokens", Module::Embedding, rows, columns, Split::Rows).bf16(),
        Matrix::new("lm_head", Module::Head, rows, columns, Split::Rows).bf16(),
    ]
}

/// The projection that joins a draft layer to the last layer.
pub(super) const fn join(d: &Dims) -> Matrix {
    let hidden = d.hidden as u64;
    Matrix::new("eh_proj", Module::Draft, hidden, 2 * hidden, Split::Whole).bf16()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, for DeepSeek's o_proj: 7168 x 16384.
    #[test]
    fn a_matrix_has_the_bytes_of_its_published_layout() {
        let all = attention(&Dims::DEEPSEEK_V3_2);
        let o_proj = all.iter().find(|matrix| matrix.name.ends_with("o_proj")).unwrap();
        let of = |dtype| {
            let Stored { values, scales } = o_proj.stored(dtype, 1);
            (values, scales)
        };
        let mib = 1 << 20;
        assert_eq!(of(WeightDtype::Fp8), (112 * mib, 56 * 128 * 4));
        assert_eq!(of(WeightDtype::Bf16), (224 * mib, 0));
        assert_eq!(of(WeightDtype::Int8), (112 * mib, 7168 * 4));
        assert_eq!(of(WeightDtype::Int4), (56 * mib, 7168 * 128 * 2));
        assert_eq!(of(WeightDtype::Nvfp4), (56 * mib, 7 * mib + 4));
        // Heads are the inputs of o_proj and the outputs of q_b_proj; q_a_proj is on every GPU.
        assert_eq!(o_proj.stored(WeightDtype::Fp8, 8), Stored { values: 14 * mib, scales: 56 * 16 * 4 });
        let [q_a, q_b] = [&all[0], &all[1]].map(|matrix| matrix.stored(WeightDtype::Int8, 8));
        assert_eq!((q_a.scales, q_b.scales), (1536 * 4, 24_576 / 8 * 4));
        // 187.1 million values a layer, 61 layers: 22.8 GB in BF16.
        let values: u64 = attention(&Dims { index_heads: 0, ..Dims::DEEPSEEK_V3_2 })
            .iter()
            .map(|matrix| matrix.stored(WeightDtype::Bf16, 1).values)
            .sum();
        assert_eq!(values, 2 * 187_105_280);
        assert_eq!((61 * values) / 100_000_000, 228);
    }
}
