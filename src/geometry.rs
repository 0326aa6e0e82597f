//! The declared shape of a model's cache, and the sizes and offsets that follow from it.
//!
//! The engine declares the shape; this module guesses nothing from tensors. [`Geometry::new`] checks the shape and
//! every product once, so the offset functions below cannot overflow for any index inside the declared ranges. This
//! module is pure arithmetic: it uses no memory and no device.
//!
//! The device and the host use different strides. On the device a row has the layout of the attention kernel: packed,
//! in blocks of [`SLOT_BLOCK`] slots (FlashMLA's FP8 format needs exactly 656 bytes). In host memory the stride is the
//! next multiple of 64 bytes. Rows that do not start on a 64-byte line cost some GPUs up to 18 times the transfer time
//! (sgl-project/sglang#37617); the padding costs 7.3% more host memory for 656-byte rows.
//!
//! A row may consist of two runs (K and V, or values and scales). In host memory run 1 follows run 0 in each row. In a
//! device block, run 0 of all 64 slots comes before run 1 of all 64 slots.
//!
//! A [`Geometry`] is one row format. [`Geometries`] has the format of every layer, and says which layers share a
//! selection ([`IndexGroup`]). The layers of a group may have different row formats: they have the same rows resident,
//! in slots of the same numbers, but each has its own bytes.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};

/// Slots in one block of a sparse pool's slab, as in the paged layout of attention kernels.
pub const SLOT_BLOCK: u32 = 64;

/// The host stride is a multiple of this: one cache line of the host, in bytes.
pub const LINE: u32 = 64;

/// The shape of a model's cache, which the engine declares. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers that run once in every decode step.
    pub layers: u32,
    /// Additional layers that draft tokens (multi-token prediction). They are layers of the same cache.
    pub draft_layers: u32,
    /// Bytes of a row's runs, multiples of 4. The second is 0 for rows of one run.
    pub runs: [u32; 2],
    /// Bytes from one row to the next in host memory; 0 selects the next multiple of [`LINE`].
    pub host_stride: u32,
    /// The size of a device block is padded to a multiple of this; 0 or 1 for no padding.
    pub device_block_align: u32,
    /// Bytes of one index key on the device; 0 if the model has no indexer.
    pub index_key_bytes: u32,
    /// Tokens of a page: a power of two from 16 to 1024, commonly 64.
    pub page_tokens: u32,
    /// Positions that one query row selects in one layer; 0 for dense attention.
    pub top_k: u32,
    /// The first layers, which select for themselves alone. Only with [`Shape::group_layers`] above 1.
    pub lone_layers: u32,
    /// Of the layers that follow, each group of so many shares one selection, which the indexer of the group's first
    /// layer makes ([`IndexGroup`]). The last group may have fewer. 0 or 1: every layer selects for itself. A draft
    /// layer always does.
    pub group_layers: u32,
}

impl Shape {
    /// DeepSeek-V3.2, FP8 rows: 512 e4m3 + 4 f32 scales + 64 bf16 rope (FlashMLA's README).
    pub const DEEPSEEK_V3_2: Shape = Shape {
        layers: 61,
        draft_layers: 0,
        runs: [656, 0],
        host_stride: 0,
        device_block_align: 1,
        index_key_bytes: 132,
        page_tokens: 64,
        top_k: 2048,
        lone_layers: 0,
        group_layers: 0,
    };
    /// DeepSeek-V3.2, BF16 rows: 576 values of two bytes.
    pub const DEEPSEEK_V3_2_BF16: Shape = Shape { runs: [1152, 0], ..Shape::DEEPSEEK_V3_2 };
    /// DeepSeek-V3, and DeepSeek-R1, which has its shape: the same latents in BF16, dense attention, no indexer. For
    /// planning only: a sparse pool needs a top-k.
    pub const DEEPSEEK_V3: Shape = Shape { index_key_bytes: 0, top_k: 0, ..Shape::DEEPSEEK_V3_2_BF16 };
    /// GLM-5: 78 layers of V3.2's row format.
    pub const GLM_5: Shape = Shape { layers: 78, ..Shape::DEEPSEEK_V3_2 };
    /// GLM-5.2 and GLM-5.3: GLM-5's rows, and IndexShare. Of 78 layers 21 have an indexer: 0, 1 and 2, then every
    /// fourth (ROCm/ATOM#1260; in the model's configuration `index_skip_topk_offset` 3 and `index_topk_freq` 4). So
    /// layers 0 and 1 select for themselves, and layer 2 begins the first group of four.
    pub const GLM_5_2: Shape = Shape { lone_layers: 2, group_layers: 4, ..Shape::GLM_5 };
    /// DeepSeek-V3.2 with INT8 latents and static scales: 512 i8 + 64 bf16 rope.
    pub const DEEPSEEK_V3_2_INT8: Shape = Shape { runs: [640, 0], ..Shape::DEEPSEEK_V3_2 };
    /// A grouped-query model of 32 layers with 8 KV heads of 128 BF16 values: K and V as two runs. It selects by its
    /// own page scores instead of an indexer.
    pub const GQA_8X128: Shape =
        Shape { layers: 32, runs: [2048, 2048], index_key_bytes: 0, top_k: 2048, ..Shape::DEEPSEEK_V3_2 };

    /// The presets, by their names on the command line.
    pub const PRESETS: [(&'static str, Shape); 9] = [
        ("deepseek-v3.2", Shape::DEEPSEEK_V3_2),
        ("deepseek-v3.2-bf16", Shape::DEEPSEEK_V3_2_BF16),
        ("deepseek-v3.2-int8", Shape::DEEPSEEK_V3_2_INT8),
        ("deepseek-v3", Shape::DEEPSEEK_V3),
        ("deepseek-r1", Shape::DEEPSEEK_V3),
        ("glm-5", Shape::GLM_5),
        ("glm-5.2", Shape::GLM_5_2),
        ("glm-5.3", Shape::GLM_5_2),
        ("gqa-8x128", Shape::GQA_8X128),
    ];

    /// The preset called `name`.
    pub fn preset(name: &str) -> Option<Shape> {
        Shape::PRESETS.iter().find(|(n, _)| *n == name).map(|(_, shape)| *shape)
    }
}

impl Shape {
    /// The layer that selects for `layer`, and the number of layers of their group, as this shape names them.
    pub const fn group_of(&self, layer: u32) -> (u32, u32) {
        if layer < self.lone_layers || layer >= self.layers || self.group_layers < 2 {
            return (layer, 1);
        }
        let first = layer - (layer - self.lone_layers) % self.group_layers;
        let left = self.layers - first;
        (first, if left < self.group_layers { left } else { self.group_layers })
    }
}

/// Layers that share a selection (GLM-5.2's IndexShare; in vLLM `SparseMLAIndexGroup`). Only the first layer has an
/// indexer and index keys. All of them have the same rows resident, in slots of the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexGroup {
    /// The layer that selects.
    pub first: u32,
    /// The number of layers, the first included, at most [`GROUP_MAX`].
    pub layers: u32,
    /// Positions that a query row selects: the shape's, or 0 for the same.
    pub top_k: u32,
}

/// The most layers of an [`IndexGroup`]. The groups of published models have four.
pub const GROUP_MAX: u32 = 8;

/// A checked [`Shape`]. Every offset below fits a `u64` for every index inside the declared ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    shape: Shape,
    host_stride: u32,
    block_bytes: u32,
}

/// One piece of a row: its offset in the device's slab, its offset in the host row, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Byte offset in the layer's slab.
    pub slab: u64,
    /// Byte offset in the host row.
    pub row: u32,
    /// Length in bytes.
    pub bytes: u32,
}

/// The largest run of a row (1 MiB) and the largest index key (64 KiB). Larger values are taken for mistakes.
const ROW_MAX: u32 = 1 << 20;
const KEY_MAX: u32 = 1 << 16;
/// The most layers, draft layers included.
pub(crate) const LAYERS_MAX: u32 = 1 << 12;
const TOP_K_MAX: u32 = 1 << 20;

/// The error for a field that breaks a rule. The rule is the hint.
fn invalid(place: &'static str, value: u32, rule: &'static str) -> Error {
    Error::new(Kind::InvalidConfig, "geometry").at(place).with("value", value).hint(rule)
}

fn overflow(place: &'static str) -> Error {
    Error::new(Kind::Overflow, "geometry").at(place)
}

impl Geometry {
    /// Checks a declared shape.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names the field: no layers, an empty first run, a run or key that is not a
    /// multiple of 4, a stride shorter than the row, or a page size that is not a power of two from 16 to 1024.
    /// [`Kind::Overflow`] if a block size or layer count does not fit its type.
    pub fn new(shape: Shape) -> Result<Geometry> {
        let [first, second] = shape.runs;
        if shape.layers == 0 {
            return Err(invalid("layers", 0, "pass 1 or more, besides draft layers"));
        }
        let both = |error: Error| {
            let error =
                error.at("layers").with("layers", shape.layers).with("draft_layers", shape.draft_layers);
            Err(error.hint("pass at most 4096, draft layers included"))
        };
        match shape.layers.checked_add(shape.draft_layers) {
            None => return both(Error::new(Kind::Overflow, "geometry")),
            Some(layers) if layers > LAYERS_MAX => return both(Error::new(Kind::InvalidConfig, "geometry")),
            Some(_) => {}
        }
        for run in shape.runs {
            if !run.is_multiple_of(4) || run > ROW_MAX {
                return Err(invalid("runs", run, "pass a multiple of 4, at most 1048576"));
            }
        }
        if first == 0 {
            return Err(invalid("runs", first, "pass a multiple of 4 above 0 for the first run"));
        }
        let row = first + second;
        if !shape.index_key_bytes.is_multiple_of(4) || shape.index_key_bytes > KEY_MAX {
            let rule = "pass a multiple of 4, at most 65536, or 0 for a model without an indexer";
            return Err(invalid("index_key_bytes", shape.index_key_bytes, rule));
        }
        if !shape.page_tokens.is_power_of_two() || !(16..=1024).contains(&shape.page_tokens) {
            return Err(invalid("page_tokens", shape.page_tokens, "pass a power of two from 16 to 1024"));
        }
        if shape.top_k > TOP_K_MAX {
            return Err(invalid("top_k", shape.top_k, "pass at most 1048576"));
        }
        if shape.group_layers > GROUP_MAX {
            return Err(invalid("group_layers", shape.group_layers, "pass at most 8"));
        }
        if shape.lone_layers > shape.layers {
            return Err(invalid("lone_layers", shape.lone_layers, "pass at most the layers"));
        }
        let host_stride = match shape.host_stride {
            0 => row.next_multiple_of(LINE),
            stride => stride,
        };
        if host_stride < row || !host_stride.is_multiple_of(4) || host_stride > 2 * ROW_MAX + LINE {
            let rule = "pass a multiple of 4 from a row's bytes to 2097216, or 0 for the next multiple of 64";
            return Err(invalid("host_stride", host_stride, rule));
        }
        let packed = SLOT_BLOCK.checked_mul(row).ok_or_else(|| overflow("device block"))?;
        let block_bytes = packed
            .checked_next_multiple_of(shape.device_block_align.max(1))
            .ok_or_else(|| overflow("device block"))?;
        if !block_bytes.is_multiple_of(4) {
            let rule = "pass a multiple of 4, or 0 for no padding";
            return Err(invalid("device_block_align", shape.device_block_align, rule));
        }
        Ok(Geometry { shape, host_stride, block_bytes })
    }

    /// The declared shape.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// All layers, draft layers included.
    pub const fn layers(&self) -> u32 {
        self.shape.layers + self.shape.draft_layers
    }

    /// Layers that have an indexer, and so index keys: the first of each of the shape's groups, and all draft layers.
    pub const fn index_layers(&self) -> u32 {
        let Shape { layers, draft_layers, lone_layers, group_layers, .. } = self.shape;
        let size = if group_layers > 1 { group_layers } else { 1 };
        lone_layers + (layers - lone_layers).div_ceil(size) + draft_layers
    }

    /// Bytes of a row, both runs, no padding.
    pub const fn row_bytes(&self) -> u32 {
        self.shape.runs[0] + self.shape.runs[1]
    }

    /// Bytes from one row to the next in host memory.
    pub const fn host_stride(&self) -> u32 {
        self.host_stride
    }

    /// Bytes of a device block of [`SLOT_BLOCK`] slots, padding included.
    pub const fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Tokens of a page.
    pub const fn page_tokens(&self) -> u32 {
        self.shape.page_tokens
    }

    /// Pages that `tokens` tokens touch.
    pub const fn pages(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.shape.page_tokens)
    }

    /// Bytes of one page of rows in one layer of the total pool: 45,056 for V3.2 in FP8.
    pub const fn host_page_bytes(&self) -> u64 {
        self.shape.page_tokens as u64 * self.host_stride as u64
    }

    /// Bytes of one page of index keys in one layer.
    pub const fn index_page_bytes(&self) -> u64 {
        self.shape.page_tokens as u64 * self.shape.index_key_bytes as u64
    }

    /// Bytes of the index keys of `pages` pages, in all layers that have an indexer.
    ///
    /// # Errors
    /// [`Kind::Overflow`].
    pub fn index_bytes(&self, pages: u32) -> Result<u64> {
        self.index_bytes_of(pages, self.index_layers())
    }

    fn index_bytes_of(&self, pages: u32, layers: u32) -> Result<u64> {
        self.index_page_bytes()
            .checked_mul(u64::from(pages))
            .and_then(|b| b.checked_mul(u64::from(layers)))
            .filter(|b| *b <= isize::MAX as u64)
            .ok_or_else(|| overflow("index keys"))
    }

    /// The byte offset of a row in its layer's part of the total pool, for token `token` of page `page`.
    pub const fn host_offset(&self, page: u32, token: u32) -> u64 {
        (page as u64 * self.shape.page_tokens as u64 + token as u64) * self.host_stride as u64
    }

    /// The pieces of `slot` in its layer's slab. The second is empty for rows of one run.
    pub const fn pieces(&self, slot: u32) -> [Piece; 2] {
        let [first, second] = self.shape.runs;
        let block = (slot / SLOT_BLOCK) as u64 * self.block_bytes as u64;
        let place = (slot % SLOT_BLOCK) as u64;
        [
            Piece { slab: block + place * first as u64, row: 0, bytes: first },
            Piece {
                slab: block + SLOT_BLOCK as u64 * first as u64 + place * second as u64,
                row: first,
                bytes: second,
            },
        ]
    }
}

/// The row format of every layer of a cache, and its index groups. A copy shares the original's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometries(Arc<Formats>);

#[derive(Debug, PartialEq, Eq)]
struct Formats {
    first: Geometry,
    /// For each layer.
    layers: Vec<Geometry>,
    /// By the first layer, ascending.
    groups: Vec<IndexGroup>,
    /// For each layer, its group.
    group_of: Vec<u32>,
}

/// One format in every layer, and the groups of its shape.
impl From<Geometry> for Geometries {
    fn from(geometry: Geometry) -> Geometries {
        let layers = vec![geometry; geometry.layers() as usize];
        Geometries::of_groups(geometry, layers, groups_of(geometry.shape()))
    }
}

/// The groups that a shape names.
fn groups_of(shape: &Shape) -> Vec<IndexGroup> {
    let all = (0..shape.layers + shape.draft_layers).map(|layer| (layer, shape.group_of(layer)));
    let firsts = all.filter(|(layer, (first, _))| layer == first);
    firsts.map(|(_, (first, layers))| IndexGroup { first, layers, top_k: shape.top_k }).collect()
}

const NAME_ALL: &str = "name every layer; one that selects alone is a group of one";

/// Checks groups that the engine names, and adds those of draft layers that it left out.
fn checked_groups(shape: &Shape, given: &[IndexGroup]) -> Result<Vec<IndexGroup>> {
    let invalid = |what: &'static str, group: &IndexGroup, hint: &'static str| {
        let error = Error::new(Kind::InvalidConfig, "index_groups").at(what).with("first", group.first);
        Err(error.with("layers", group.layers).with("top_k", group.top_k).hint(hint))
    };
    let all = shape.layers + shape.draft_layers;
    let (mut groups, mut next) = (Vec::with_capacity(given.len()), 0);
    for group in given {
        let end = group.first.saturating_add(group.layers);
        if group.layers == 0 || group.first >= all {
            return invalid(
                "a group names no first layer",
                group,
                "name a layer of the shape, and how many follow",
            );
        }
        if group.first < next {
            return invalid("groups overlap", group, "name each layer in one group, in ascending order");
        }
        if group.first > next {
            return invalid("a layer in no group", group, NAME_ALL);
        }
        if group.layers > GROUP_MAX || end > all {
            return invalid(
                "layers of a group",
                group,
                "pass at most 8 layers, all of them layers of the shape",
            );
        }
        if end > shape.layers && group.layers > 1 {
            return invalid("a draft layer in a group", group, "a draft layer selects for itself");
        }
        if group.top_k != 0 && group.top_k != shape.top_k {
            return invalid("groups differ in k", group, "pass the shape's top_k, or 0");
        }
        groups.push(IndexGroup { top_k: shape.top_k, ..*group });
        next = end;
    }
    if next < shape.layers {
        let missing = IndexGroup { first: next, layers: 0, top_k: 0 };
        return invalid("a layer in no group", &missing, NAME_ALL);
    }
    groups.extend((next..all).map(|first| IndexGroup { first, layers: 1, top_k: shape.top_k }));
    Ok(groups)
}

impl Geometries {
    /// Checks the rows of every layer and the groups. `rows` has the bytes of each layer's runs ([`Shape::runs`]),
    /// draft layers included; if it is empty, every layer has the shape's. `groups` names the groups in the order of
    /// their layers; if it is empty, they are the shape's. Draft layers may be left out.
    ///
    /// # Errors
    /// As [`Geometry::new`]; [`Kind::InvalidConfig`] for rows of another number of layers, and for groups that overlap,
    /// leave a layer out, name no first layer, differ in k, have more than [`GROUP_MAX`] layers, or contain a draft
    /// layer and another one.
    pub fn new(shape: Shape, rows: &[[u32; 2]], groups: &[IndexGroup]) -> Result<Geometries> {
        let geometry = Geometry::new(shape)?;
        let count = geometry.layers() as usize;
        let layers = match rows {
            [] => vec![geometry; count],
            rows if rows.len() == count => rows
                .iter()
                .zip(0_u32..)
                .map(|(runs, layer)| {
                    Geometry::new(Shape { runs: *runs, ..shape }).map_err(|error| error.with("layer", layer))
                })
                .collect::<Result<_>>()?,
            rows => {
                return Err(Error::new(Kind::InvalidConfig, "geometry")
                    .at("rows by layer")
                    .with("given", rows.len() as u64)
                    .with("wanted", count as u64));
            }
        };
        let groups = if groups.is_empty() { groups_of(&shape) } else { checked_groups(&shape, groups)? };
        Ok(Geometries::of_groups(geometry, layers, groups))
    }

    fn of_groups(geometry: Geometry, layers: Vec<Geometry>, groups: Vec<IndexGroup>) -> Geometries {
        let members = |(number, group): (u32, &IndexGroup)| (0..group.layers).map(move |_| number);
        let group_of = (0..).zip(&groups).flat_map(members).collect();
        let first = layers.first().copied().unwrap_or(geometry);
        Geometries(Arc::new(Formats { first, layers, groups, group_of }))
    }

    /// The first layer's format. What does not depend on the row format is the same in every layer.
    pub fn first(&self) -> &Geometry {
        &self.0.first
    }

    /// The declared shape. Its runs are those of the first layer.
    pub fn shape(&self) -> &Shape {
        self.0.first.shape()
    }

    /// All layers, draft layers included.
    pub fn layers(&self) -> u32 {
        self.0.first.layers()
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> u32 {
        self.0.first.page_tokens()
    }

    /// Pages that `tokens` tokens touch.
    pub fn pages(&self, tokens: u32) -> u32 {
        self.0.first.pages(tokens)
    }

    /// The format of a layer; of the first layer, if there is no such layer.
    #[inline]
    pub fn of(&self, layer: usize) -> &Geometry {
        self.0.layers.get(layer).unwrap_or(&self.0.first)
    }

    /// The formats of all layers.
    pub fn formats(&self) -> &[Geometry] {
        &self.0.layers
    }

    /// The groups, by ascending layer. Layers that select for themselves are groups of one.
    pub fn groups(&self) -> &[IndexGroup] {
        &self.0.groups
    }

    /// The number of a layer's group; 0 if there is no such layer.
    #[inline]
    pub fn group_of(&self, layer: usize) -> usize {
        self.0.group_of.get(layer).map_or(0, |group| *group as usize)
    }

    /// The layers of a group; none if there is no such group.
    #[inline]
    pub fn members(&self, group: usize) -> Range<usize> {
        self.0.groups.get(group).map_or(0..0, |of| of.first as usize..(of.first + of.layers) as usize)
    }

    /// The layer that selects for `layer`: the first of its group.
    #[inline]
    pub fn first_of(&self, layer: usize) -> usize {
        self.members(self.group_of(layer)).start
    }

    /// The most layers of a group.
    pub fn largest_group(&self) -> u32 {
        self.0.groups.iter().map(|group| group.layers).max().unwrap_or(1)
    }

    /// Bytes of a row in all layers of a group together.
    pub fn group_row_bytes(&self, group: usize) -> u64 {
        self.members(group).map(|layer| u64::from(self.of(layer).row_bytes())).sum()
    }

    /// Bytes of a total pool of `pages` pages.
    ///
    /// # Errors
    /// [`Kind::Overflow`].
    pub fn total_bytes(&self, pages: u32) -> Result<u64> {
        let layer = |all: u64, geometry: &Geometry| {
            all.checked_add(geometry.host_page_bytes().checked_mul(pages.into())?)
        };
        let all = self.0.layers.iter().try_fold(0, layer);
        all.filter(|b| *b <= isize::MAX as u64).ok_or_else(|| overflow("total pool"))
    }

    /// Bytes of the index keys of `pages` pages: of the first layer of every group.
    ///
    /// # Errors
    /// [`Kind::Overflow`].
    pub fn index_bytes(&self, pages: u32) -> Result<u64> {
        self.0.first.index_bytes_of(pages, self.0.groups.len() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v32() -> Geometry {
        Geometry::new(Shape::DEEPSEEK_V3_2).unwrap()
    }

    #[test]
    fn presets_are_valid_and_found_by_name() {
        for (name, shape) in Shape::PRESETS {
            assert!(Geometry::new(shape).is_ok(), "{name}");
            assert_eq!(Shape::preset(name), Some(shape));
        }
        assert_eq!(Shape::preset("gpt-2"), None);
    }

    #[test]
    fn v32_has_the_published_sizes() {
        let g = v32();
        assert_eq!((g.layers(), g.row_bytes(), g.host_stride()), (61, 656, 704));
        assert_eq!(g.host_page_bytes(), 45_056);
        assert_eq!(g.block_bytes(), 64 * 656);
        assert_eq!(Geometry::new(Shape::DEEPSEEK_V3_2_BF16).unwrap().host_stride(), 1152);
        // ESS, table 2: 52 sequences of 32K take 76.3 GiB of rows and index keys.
        let tokens = 52_u64 * 32_768 * 61;
        assert_eq!((tokens * (656 + 132) * 10) >> 30, 762);
        // (76.28: the page prints 76.3.)
    }

    #[test]
    fn two_runs_are_planes_of_a_block() {
        let g =
            Geometry::new(Shape { runs: [576, 8], device_block_align: 576, ..Shape::DEEPSEEK_V3_2 }).unwrap();
        assert_eq!(g.block_bytes() % 576, 0);
        let [a, b] = g.pieces(65);
        assert_eq!(a.slab, u64::from(g.block_bytes()) + 576);
        assert_eq!(b.slab, u64::from(g.block_bytes()) + 64 * 576 + 8);
        assert_eq!((b.row, b.bytes), (576, 8));
    }

    #[test]
    fn pieces_of_all_slots_of_a_block_tile_it() {
        let g = Geometry::new(Shape { runs: [12, 8], ..Shape::DEEPSEEK_V3_2 }).unwrap();
        let mut seen = vec![false; g.block_bytes() as usize];
        for slot in 0..SLOT_BLOCK {
            for piece in g.pieces(slot) {
                for byte in &mut seen[piece.slab as usize..][..piece.bytes as usize] {
                    assert!(!std::mem::replace(byte, true));
                }
            }
        }
        assert!(seen.iter().all(|s| *s));
    }

    #[test]
    fn invalid_values_are_refused_by_field() {
        let base = Shape::DEEPSEEK_V3_2;
        let cases = [
            (Shape { layers: 0, ..base }, "layers"),
            (Shape { layers: 4096, draft_layers: 1, ..base }, "layers"),
            (Shape { runs: [0, 0], ..base }, "runs"),
            (Shape { runs: [6, 0], ..base }, "runs"),
            (Shape { runs: [656, u32::MAX - 3], ..base }, "runs"),
            (Shape { host_stride: 640, ..base }, "host_stride"),
            (Shape { index_key_bytes: 3, ..base }, "index_key_bytes"),
            (Shape { page_tokens: 48, ..base }, "page_tokens"),
            (Shape { page_tokens: 0, ..base }, "page_tokens"),
            (Shape { top_k: u32::MAX, ..base }, "top_k"),
            (Shape { group_layers: 9, ..base }, "group_layers"),
            (Shape { lone_layers: 1 + base.layers, ..base }, "lone_layers"),
        ];
        for (shape, field) in cases {
            let e = Geometry::new(shape).unwrap_err();
            assert_eq!((e.kind(), e.place()), (Kind::InvalidConfig, field));
        }
    }

    #[test]
    fn products_that_do_not_fit_are_refused() {
        let huge = Shape { layers: u32::MAX, draft_layers: 2, ..Shape::DEEPSEEK_V3_2 };
        assert_eq!(Geometry::new(huge).unwrap_err().kind(), Kind::Overflow);
        let wide =
            Shape { layers: 4096, runs: [1 << 20, 1 << 20], page_tokens: 1024, ..Shape::DEEPSEEK_V3_2 };
        let g = Geometries::new(wide, &[], &[]).unwrap();
        assert_eq!(g.total_bytes(u32::MAX).unwrap_err().kind(), Kind::Overflow);
        let align = Shape { device_block_align: u32::MAX, runs: [1 << 20, 1 << 20], ..Shape::DEEPSEEK_V3_2 };
        assert!(Geometry::new(align).is_err());
        assert!(Geometries::from(v32()).total_bytes(1 << 20).is_ok());
    }

    fn grouped() -> Shape {
        Shape { layers: 11, draft_layers: 2, lone_layers: 2, group_layers: 4, ..Shape::DEEPSEEK_V3_2 }
    }

    #[test]
    fn a_shape_groups_its_layers_after_the_lone_ones_and_no_draft_layer() {
        let all = Geometries::from(Geometry::new(grouped()).unwrap());
        let groups: Vec<_> = all.groups().iter().map(|group| (group.first, group.layers)).collect();
        assert_eq!(groups, [(0, 1), (1, 1), (2, 4), (6, 4), (10, 1), (11, 1), (12, 1)]);
        assert_eq!(
            (0..13).map(|l| all.group_of(l)).collect::<Vec<_>>(),
            [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 5, 6]
        );
        assert_eq!((all.first_of(5), all.members(3), all.largest_group()), (2, 6..10, 4));
        assert_eq!(all.first().index_layers(), 7);
        assert_eq!(all.index_bytes(2).unwrap(), 7 * 2 * 64 * 132);
        for shape in [Shape { group_layers: 0, ..grouped() }, Shape { group_layers: 1, ..grouped() }] {
            let alone = Geometries::from(Geometry::new(shape).unwrap());
            assert_eq!((alone.groups().len(), alone.first().index_layers()), (13, 13));
        }
        let lone = Geometry::new(Shape { lone_layers: 11, ..grouped() }).unwrap();
        assert_eq!((Geometries::from(lone).groups().len(), lone.index_layers()), (13, 13));
    }

    #[test]
    fn glm_5_2_has_an_indexer_in_layers_0_to_2_and_then_in_every_fourth() {
        let all = Geometries::from(Geometry::new(Shape::GLM_5_2).unwrap());
        let firsts: Vec<usize> = all.groups().iter().map(|group| group.first as usize).collect();
        let full = |layer: &usize| layer.saturating_sub(2).is_multiple_of(4) || *layer == 1;
        assert_eq!(firsts, (0..78).filter(full).collect::<Vec<_>>());
        assert_eq!((firsts.len(), all.members(20)), (21, 74..78));
        assert_eq!(all.first().index_layers(), 21);
    }

    #[test]
    fn layers_of_a_group_may_have_different_rows() {
        let mut rows = vec![[656, 0]; 13];
        (rows[3], rows[4]) = ([1152, 0], [512, 64]);
        let all = Geometries::new(grouped(), &rows, &[]).unwrap();
        assert_eq!([2, 3, 4].map(|l| all.of(l).host_stride()), [704, 1152, 576]);
        assert_eq!((all.group_row_bytes(2), all.group_row_bytes(0)), (656 + 1152 + 576 + 656, 656));
        assert_eq!(all.total_bytes(3).unwrap(), 3 * 64 * (11 * 704 + 1152 + 576));
        let error = Geometries::new(grouped(), &rows[1..], &[]).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, "rows by layer"));
        rows[12] = [6, 0];
        assert_eq!(Geometries::new(grouped(), &rows, &[]).unwrap_err().place(), "runs");
    }

    #[test]
    fn named_groups_cover_every_layer_once_with_one_k() {
        let group = |first, layers| IndexGroup { first, layers, top_k: 0 };
        let of = |groups: &[IndexGroup]| {
            let all = Geometries::new(grouped(), &[], groups);
            all.map(|all| all.groups().len()).map_err(|error| (error.kind(), error.place().to_owned()))
        };
        assert_eq!(of(&[group(0, 8), group(8, 3)]), Ok(4));
        assert_eq!(of(&[group(0, 8), group(8, 3), group(11, 1), group(12, 1)]), Ok(4));
        let refused: [(&[IndexGroup], &str); 10] = [
            (&[group(0, 4), group(3, 8)], "groups overlap"),
            (&[group(4, 7), group(0, 4)], "a layer in no group"),
            (&[group(0, 4), group(5, 6)], "a layer in no group"),
            (&[group(0, 8)], "a layer in no group"),
            (&[group(0, 0)], "a group names no first layer"),
            (&[group(0, 8), group(8, 3), group(13, 1)], "a group names no first layer"),
            (&[group(0, 9), group(9, 2)], "layers of a group"),
            (&[group(0, 8), group(8, 3), group(11, 1), group(12, 2)], "layers of a group"),
            (&[group(0, 8), group(8, 4)], "a draft layer in a group"),
            (&[group(0, 8), IndexGroup { top_k: 1024, ..group(8, 3) }], "groups differ in k"),
        ];
        for (groups, place) in refused {
            assert_eq!(of(groups), Err((Kind::InvalidConfig, place.to_owned())), "{groups:?}");
        }
        assert_eq!(of(&[group(0, u32::MAX)]), Err((Kind::InvalidConfig, "layers of a group".to_owned())));
    }
}
