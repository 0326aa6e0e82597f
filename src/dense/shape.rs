//! The declared shape of a dense model's cache: groups of layers, the bytes of their rows, the tokens of a page.
//!
//! The engine declares the shape; nothing is guessed from tensors. Bytes are opaque: a row of FP8 values with its
//! scales is as good as one of BF16 values.

use std::ops::RangeInclusive;

use crate::error::{Error, Kind, Result};
use crate::geometry::LAYERS_MAX;

/// The most groups of a shape. Published models have one or two: full attention, and one sliding window.
pub const GROUPS_MAX: usize = 4;

/// Tokens of a page. Every power of two in this range is the page of some attention kernel, and nothing else is:
///
/// | kernel | tokens of a page | source |
/// |---|---|---|
/// | FlashAttention 3 | multiples of 16 | vLLM, `flash_attn.py`, `get_supported_kernel_block_sizes` |
/// | FlashInfer, TensorRT-LLM's kernels | 16, 32, 64 | vLLM, `flashinfer.py`; SGLang, "Attention Backend" |
/// | FlashInfer's `prims_ts` | 16, 32, 64, 128 | FlashInfer, `batch_prefill_with_paged_kv_cache` |
/// | FlashMLA | 64 | its README |
/// | CUTLASS MLA | 128 | vLLM, `cutlass_mla.py` |
/// | FlashAttention 2 | multiples of 256 | its `flash_api.cpp` |
///
/// TensorRT-LLM demands a power of two ("KV Cache"). Larger pages than 256 would only lose more of the last page of
/// each sequence.
const PAGE_TOKENS: RangeInclusive<u32> = 16..=256;

/// The largest run of a token in one layer, 1 MiB; more is taken for a mistake.
const RUN_MAX: u32 = 1 << 20;

/// Kernels load 16 bytes at once (the widest load of a GPU's thread), so each row has to begin on a multiple of 16.
/// Rows follow each other without gaps, so their bytes are multiples of 16 too. Heads of published models all are: the
/// smallest, 64 values of one byte, has 64.
const RUN_ALIGN: u32 = 16;

/// The cache of one model: what a token takes in each layer, and which layers are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of a page: 16, 32, 64, 128 or 256. Kernels take some of them only: FlashMLA 64, FlashInfer and
    /// TensorRT-LLM's kernels up to 64, CUTLASS MLA 128, FlashAttention 3 all of them, FlashAttention 2 only 256.
    pub page_tokens: u32,
    /// The groups: 1 to [`GROUPS_MAX`]. Each layer of the model is in exactly one, and all layers from 0 on are.
    pub groups: Vec<Group>,
}

/// Layers with one row format and one kind of attention. They share page tables: a page of the group holds its tokens'
/// rows in every layer of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The model's layer numbers, ascending.
    pub layers: Vec<u32>,
    /// Bytes of a token's K and of its V in one layer, multiples of 16, at most 1 MiB each. An MLA latent is one run:
    /// `[bytes, 0]`. On a rank of tensor parallelism these are the bytes of the rank's own heads.
    pub runs: [u32; 2],
    /// Tokens that a query reads, itself included, for layers with a sliding window (`sliding_window` of a model's
    /// configuration). `None`: all tokens before it.
    pub window: Option<u32>,
}

impl Group {
    /// Bytes of a token in one layer, both runs.
    pub const fn row_bytes(&self) -> u64 {
        self.runs[0] as u64 + self.runs[1] as u64
    }
}

/// The error for a field that breaks a rule. The rule is the hint.
fn invalid(place: &'static str, name: &'static str, value: impl Into<u64>, rule: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "dense cache").at(place).with(name, value).hint(rule)
}

impl Shape {
    /// The number of layers, of all groups together.
    pub fn layers(&self) -> usize {
        self.groups.iter().map(|group| group.layers.len()).sum()
    }

    /// Bytes of a page of a group: its tokens' rows in every layer of the group. 0 if there is no such group.
    ///
    /// For DeepSeek-V3 in BF16 with pages of 64 tokens: 61 x 1,152 x 64 = 4,497,408.
    pub fn page_bytes(&self, group: usize) -> u64 {
        self.groups.get(group).map_or(0, |group| {
            let row = group.row_bytes().saturating_mul(group.layers.len() as u64);
            row.saturating_mul(self.page_tokens.into())
        })
    }

    /// Bytes that one more token takes in all layers, windows aside.
    pub fn token_bytes(&self) -> u64 {
        let group = |group: &Group| group.row_bytes().saturating_mul(group.layers.len() as u64);
        self.groups.iter().map(group).fold(0, u64::saturating_add)
    }

    /// Checks the shape by itself.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field: `page_tokens` that no kernel takes; no groups or too many; layers out
    /// of order, in two groups or in none; runs that are empty, too large or no multiple of 16; a window of 0 tokens.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.page_tokens.is_power_of_two() || !PAGE_TOKENS.contains(&self.page_tokens) {
            let rule = "pass 16, 32, 64, 128 or 256: attention kernels take no other pages";
            return Err(invalid("page_tokens", "value", self.page_tokens, rule));
        }
        if self.groups.is_empty() || self.groups.len() > GROUPS_MAX {
            let rule = "pass 1 to 4 groups: layers of equal rows and attention are one group";
            return Err(invalid("groups", "given", self.groups.len() as u64, rule));
        }
        for (index, group) in self.groups.iter().enumerate() {
            group.check().map_err(|error| error.with("group", index as u64))?;
        }
        self.check_layers()
    }

    /// Rejects a layer in two groups, or in none.
    fn check_layers(&self) -> Result<()> {
        if self.layers() > LAYERS_MAX as usize {
            return Err(invalid("layers", "given", self.layers() as u64, "pass at most 4096"));
        }
        let mut layers: Vec<u32> =
            self.groups.iter().flat_map(|group| group.layers.iter().copied()).collect();
        layers.sort_unstable();
        match (0_u32..).zip(&layers).find(|(wanted, layer)| wanted != *layer) {
            Some((wanted, layer)) if *layer < wanted => {
                Err(invalid("a layer in two groups", "layer", *layer, "name each layer once"))
            }
            Some((wanted, _)) => Err(invalid(
                "a layer in no group",
                "layer",
                wanted,
                "name all layers from 0 on; a rank of a pipeline counts its own from 0",
            )),
            None => Ok(()),
        }
    }
}

impl Group {
    fn check(&self) -> Result<()> {
        let Some(first) = self.layers.first() else {
            return Err(invalid("layers of a group", "given", 0_u32, "name the group's layers"));
        };
        let mut before = *first;
        for layer in &self.layers[1..] {
            if *layer <= before {
                let rule = "name the layers of a group once, in ascending order";
                return Err(invalid("layers of a group", "layer", *layer, rule));
            }
            before = *layer;
        }
        let [first, second] = self.runs;
        if first == 0 {
            let rule = "pass the bytes of K, or of the latent, first; only the second run may be 0";
            return Err(invalid("runs", "value", first, rule));
        }
        if let Some(run) =
            [first, second].into_iter().find(|run| !run.is_multiple_of(RUN_ALIGN) || *run > RUN_MAX)
        {
            let rule = "pass multiples of 16 up to 1048576: kernels load 16 bytes at once";
            return Err(invalid("runs", "value", run, rule));
        }
        match self.window {
            Some(0) => Err(invalid(
                "window",
                "value",
                0_u32,
                "pass the tokens that a query reads, itself included, or no window for all",
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layers of each group.
    type Layers<'a> = &'a [&'a [u32]];

    fn group(layers: &[u32]) -> Group {
        Group { layers: layers.to_vec(), runs: [2048, 2048], window: None }
    }

    fn shape(groups: &[&[u32]]) -> Shape {
        Shape { page_tokens: 64, groups: groups.iter().map(|layers| group(layers)).collect() }
    }

    fn refused(shape: &Shape) -> Option<(String, Option<u64>, Option<u64>)> {
        let error = shape.check().err()?;
        assert_eq!((error.kind(), error.operation()), (Kind::InvalidConfig, "dense cache"));
        assert_ne!(error.advice(), Kind::InvalidConfig.hint());
        let value = ["value", "given", "layer"].iter().find_map(|name| error.number(name));
        Some((error.place().to_owned(), value, error.number("group")))
    }

    #[test]
    fn pages_are_those_that_kernels_take() {
        for tokens in 0..=1024 {
            let shape = Shape { page_tokens: tokens, ..shape(&[&[0]]) };
            let taken = [16, 32, 64, 128, 256].contains(&tokens);
            let wanted = (!taken).then(|| ("page_tokens".to_owned(), Some(tokens.into()), None));
            assert_eq!(refused(&shape), wanted);
        }
    }

    #[test]
    fn every_layer_is_in_one_group() {
        assert_eq!(refused(&shape(&[&[0, 2, 3], &[1, 4]])), None);
        assert_eq!(refused(&shape(&[&[0], &[1], &[2], &[3]])), None);
        let many: Vec<u32> = (0..=4096).collect();
        let cases: [(Layers, &str, u64, Option<u64>); 9] = [
            (&[], "groups", 0, None),
            (&[&[0], &[1], &[2], &[3], &[4]], "groups", 5, None),
            (&[&[0, 1], &[]], "layers of a group", 0, Some(1)),
            (&[&[0, 2, 1]], "layers of a group", 1, Some(0)),
            (&[&[2], &[0, 1, 1]], "layers of a group", 1, Some(1)),
            (&[&[0, 1, 2], &[2, 3]], "a layer in two groups", 2, None),
            (&[&[0, 1], &[3]], "a layer in no group", 2, None),
            (&[&[1, 2]], "a layer in no group", 0, None),
            (&[&many], "layers", 4097, None),
        ];
        for (groups, place, value, group) in cases {
            assert_eq!(refused(&shape(groups)), Some((place.to_owned(), Some(value), group)), "{place}");
        }
        assert_eq!(refused(&shape(&[&many[..4096]])), None);
    }

    #[test]
    fn rows_and_windows_are_checked_in_their_group() {
        let with = |runs, window| {
            let mut shape = shape(&[&[0], &[1]]);
            shape.groups[1] = Group { runs, window, ..group(&[1]) };
            refused(&shape)
        };
        assert_eq!(with([1152, 0], None), None);
        assert_eq!(with([16, 1 << 20], Some(1)), None);
        for (runs, value) in
            [([0, 0], 0), ([0, 256], 0), ([24, 16], 24), ([16, 8], 8), ([16, (1 << 20) + 16], 0x10_0010)]
        {
            assert_eq!(with(runs, None), Some(("runs".to_owned(), Some(value), Some(1))));
        }
        assert_eq!(with([16, 16], Some(0)), Some(("window".to_owned(), Some(0), Some(1))));
    }

    #[test]
    fn bytes_of_pages_and_tokens_are_those_of_all_layers() {
        let mut shape = shape(&[&[0, 2, 3], &[1, 4]]);
        shape.groups[1].runs = [1152, 0];
        assert_eq!(
            (shape.page_bytes(0), shape.page_bytes(1), shape.page_bytes(2)),
            (3 * 64 * 4096, 2 * 64 * 1152, 0)
        );
        assert_eq!((shape.layers(), shape.token_bytes()), (5, 3 * 4096 + 2 * 1152));
        let huge = Group { runs: [u32::MAX; 2], ..group(&[0; 1 << 10]) };
        let shape = Shape { page_tokens: u32::MAX, groups: vec![huge] };
        assert_eq!(shape.page_bytes(0), u64::MAX);
    }
}
