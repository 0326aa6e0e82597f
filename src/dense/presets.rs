//! The shapes of published models, by the numbers of their `config.json`.
//!
//! A preset is the whole model on one GPU. A rank of tensor parallelism divides the bytes of both runs by the ranks; an
//! MLA latent belongs to all heads and is not divided. All presets have pages of 64 tokens, which the most kernels
//! take; `Shape { page_tokens: 16, ..Shape::llama_3_1_8b(2) }` is the same model with other pages.
//!
//! `value_bytes` are the bytes of a cached value: 2 for BF16, 1 for FP8.

use crate::dense::shape::{Group, Shape};

/// Tokens of a preset's page.
const PAGE_TOKENS: u32 = 64;

/// Bytes of a value of [`Shape::preset`]: BF16.
const BF16: u32 = 2;

/// Makes a shape of the bytes of a value.
type Preset = fn(u32) -> Shape;

/// One group of all layers.
fn whole(layers: u32, runs: [u32; 2]) -> Shape {
    Shape {
        page_tokens: PAGE_TOKENS,
        groups: vec![Group { layers: (0..layers).collect(), runs, window: None }],
    }
}

/// K and V of grouped-query attention.
const fn heads(kv_heads: u32, head_dim: u32, value_bytes: u32) -> [u32; 2] {
    let bytes = kv_heads.saturating_mul(head_dim).saturating_mul(value_bytes);
    [bytes, bytes]
}

/// Two groups: the layers with full attention, which are the last of every `period` layers, and those with a window.
fn windowed(layers: u32, period: u32, window: u32, runs: [u32; 2]) -> Shape {
    let is_full = |layer: &u32| (layer + 1).is_multiple_of(period);
    let (full, local) = (0..layers).partition(is_full);
    let group = |layers, window| Group { layers, runs, window };
    Shape { page_tokens: PAGE_TOKENS, groups: vec![group(full, None), group(local, Some(window))] }
}

impl Shape {
    /// Llama 3.1 8B (meta-llama/Llama-3.1-8B: `num_hidden_layers` 32, `num_key_value_heads` 8, `hidden_size` 4096 over
    /// `num_attention_heads` 32).
    pub fn llama_3_1_8b(value_bytes: u32) -> Shape {
        whole(32, heads(8, 128, value_bytes))
    }

    /// Llama 3.1 70B (meta-llama/Llama-3.1-70B: `num_hidden_layers` 80, `num_key_value_heads` 8, `hidden_size` 8192
    /// over `num_attention_heads` 64).
    pub fn llama_3_1_70b(value_bytes: u32) -> Shape {
        whole(80, heads(8, 128, value_bytes))
    }

    /// Qwen3 32B (Qwen/Qwen3-32B: `num_hidden_layers` 64, `num_key_value_heads` 8, `head_dim` 128).
    pub fn qwen3_32b(value_bytes: u32) -> Shape {
        whole(64, heads(8, 128, value_bytes))
    }

    /// Gemma 3 27B (google/gemma-3-27b-it, `text_config`: `num_hidden_layers` 62, `num_key_value_heads` 16, `head_dim`
    /// 128, `sliding_window` 1024, `sliding_window_pattern` 6: layers 5, 11, ... 59 have full attention).
    pub fn gemma_3_27b(value_bytes: u32) -> Shape {
        windowed(62, 6, 1024, heads(16, 128, value_bytes))
    }

    /// gpt-oss-20b (openai/gpt-oss-20b: `num_hidden_layers` 24, `num_key_value_heads` 8, `head_dim` 64,
    /// `sliding_window` 128, `layer_types`: sliding attention in even layers, full attention in odd ones).
    pub fn gpt_oss_20b(value_bytes: u32) -> Shape {
        windowed(24, 2, 128, heads(8, 64, value_bytes))
    }

    /// gpt-oss-120b (openai/gpt-oss-120b: `num_hidden_layers` 36; else as [`Shape::gpt_oss_20b`]).
    pub fn gpt_oss_120b(value_bytes: u32) -> Shape {
        windowed(36, 2, 128, heads(8, 64, value_bytes))
    }

    /// DeepSeek-V3, and DeepSeek-R1, which has its shape (deepseek-ai/DeepSeek-V3: `num_hidden_layers` 61,
    /// `kv_lora_rank` 512 and `qk_rope_head_dim` 64, one latent of 576 values: 1,152 bytes in BF16). Without its layer
    /// 61, which drafts (`num_nextn_predict_layers` 1): an engine that runs it adds the layer to the group.
    pub fn deepseek_v3(value_bytes: u32) -> Shape {
        whole(61, [value_bytes.saturating_mul(512 + 64), 0])
    }

    /// SmolLM2 135M (HuggingFaceTB/SmolLM2-135M: `num_hidden_layers` 30, `num_key_value_heads` 3, `hidden_size` 576
    /// over `num_attention_heads` 9).
    pub fn smollm2_135m(value_bytes: u32) -> Shape {
        whole(30, heads(3, 64, value_bytes))
    }

    /// The presets, by their names on the command line: each makes a shape of the bytes of a value.
    pub const PRESETS: [(&'static str, Preset); 9] = [
        ("llama-3.1-8b", Shape::llama_3_1_8b),
        ("llama-3.1-70b", Shape::llama_3_1_70b),
        ("qwen3-32b", Shape::qwen3_32b),
        ("gemma-3-27b", Shape::gemma_3_27b),
        ("gpt-oss-20b", Shape::gpt_oss_20b),
        ("gpt-oss-120b", Shape::gpt_oss_120b),
        ("deepseek-v3", Shape::deepseek_v3),
        ("deepseek-r1", Shape::deepseek_v3),
        ("smollm2-135m", Shape::smollm2_135m),
    ];

    /// The preset called `name`, in BF16 with pages of 64 tokens.
    pub fn preset(name: &str) -> Option<Shape> {
        Shape::PRESETS.iter().find(|(n, _)| *n == name).map(|(_, preset)| preset(BF16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_found_by_name() {
        for (name, _) in Shape::PRESETS {
            let shape = Shape::preset(name).unwrap();
            assert!(shape.check().is_ok(), "{name}");
            assert_eq!(shape.page_tokens, 64);
        }
        assert_eq!(Shape::preset("gpt-2"), None);
    }

    #[test]
    fn presets_have_the_published_bytes_of_a_token() {
        // Llama 3.1 8B: 128 KiB a token in BF16, the usual figure; 70B: 320 KiB. V3: 70 KB (DeepSeek's ISCA paper of
        // 2025, table 1: 70.272 KB, beside Qwen2.5 72B and Llama 3.1 405B).
        let cases = [
            ("llama-3.1-8b", 131_072),
            ("llama-3.1-70b", 327_680),
            ("qwen3-32b", 262_144),
            ("gemma-3-27b", 507_904),
            ("gpt-oss-20b", 49_152),
            ("gpt-oss-120b", 73_728),
            ("deepseek-v3", 70_272),
            ("smollm2-135m", 23_040),
        ];
        for (name, bytes) in cases {
            assert_eq!(Shape::preset(name).unwrap().token_bytes(), bytes, "{name}");
        }
        assert_eq!(Shape::deepseek_v3(1).token_bytes(), 35_136);
        assert_eq!(Shape::deepseek_v3(2).groups[0].runs, [1152, 0]);
    }

    #[test]
    fn layers_with_a_window_follow_the_pattern_of_the_model() {
        let full = |name: &str| {
            let shape = Shape::preset(name).unwrap();
            let [full, local] = shape.groups.as_slice() else { panic!("{name} has two groups") };
            assert_eq!(full.window, None);
            (full.layers.clone(), local.layers.len(), local.window)
        };
        let (layers, local, window) = full("gemma-3-27b");
        assert_eq!((layers, local, window), (vec![5, 11, 17, 23, 29, 35, 41, 47, 53, 59], 52, Some(1024)));
        let (layers, local, window) = full("gpt-oss-20b");
        assert_eq!((layers[..3].to_vec(), layers.len(), local, window), (vec![1, 3, 5], 12, 12, Some(128)));
        let (layers, local, window) = full("gpt-oss-120b");
        assert_eq!((layers[17], layers.len(), local, window), (35, 18, 18, Some(128)));
    }
}
