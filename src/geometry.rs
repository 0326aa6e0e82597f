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
    };
    /// DeepSeek-V3.2, BF16 rows: 576 values of two bytes.
    pub const DEEPSEEK_V3_2_BF16: Shape = Shape { runs: [1152, 0], ..Shape::DEEPSEEK_V3_2 };
    /// DeepSeek-V3: the same latents in BF16, dense attention, no indexer. For planning only: a sparse
    /// pool needs a top-k.
    pub const DEEPSEEK_V3: Shape = Shape { index_key_bytes: 0, top_k: 0, ..Shape::DEEPSEEK_V3_2_BF16 };
    /// GLM-5: 78 layers of V3.2's row format.
    pub const GLM_5: Shape = Shape { layers: 78, ..Shape::DEEPSEEK_V3_2 };
    /// DeepSeek-V3.2 with INT8 latents and static scales: 512 i8 + 64 bf16 rope.
    pub const DEEPSEEK_V3_2_INT8: Shape = Shape { runs: [640, 0], ..Shape::DEEPSEEK_V3_2 };
    /// A grouped-query model of 32 layers with 8 KV heads of 128 BF16 values: K and V as two runs. It selects by its
    /// own page scores instead of an indexer.
    pub const GQA_8X128: Shape =
        Shape { layers: 32, runs: [2048, 2048], index_key_bytes: 0, top_k: 2048, ..Shape::DEEPSEEK_V3_2 };

    /// The presets, by their names on the command line.
    pub const PRESETS: [(&'static str, Shape); 6] = [
        ("deepseek-v3.2", Shape::DEEPSEEK_V3_2),
        ("deepseek-v3.2-bf16", Shape::DEEPSEEK_V3_2_BF16),
        ("deepseek-v3.2-int8", Shape::DEEPSEEK_V3_2_INT8),
        ("deepseek-v3", Shape::DEEPSEEK_V3),
        ("glm-5", Shape::GLM_5),
        ("gqa-8x128", Shape::GQA_8X128),
    ];

    /// The preset called `name`.
    pub fn preset(name: &str) -> Option<Shape> {
        Shape::PRESETS.iter().find(|(n, _)| *n == name).map(|(_, shape)| *shape)
    }
}

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

    /// Bytes of a total pool of `pages` pages.
    ///
    /// # Errors
    /// [`Kind::Overflow`].
    pub fn total_bytes(&self, pages: u32) -> Result<u64> {
        self.host_page_bytes()
            .checked_mul(u64::from(pages))
            .and_then(|b| b.checked_mul(u64::from(self.layers())))
            .filter(|b| *b <= isize::MAX as u64)
            .ok_or_else(|| overflow("total pool"))
    }

    /// Bytes of the index keys of `pages` pages in all layers.
    ///
    /// # Errors
    /// [`Kind::Overflow`].
    pub fn index_bytes(&self, pages: u32) -> Result<u64> {
        self.index_page_bytes()
            .checked_mul(u64::from(pages))
            .and_then(|b| b.checked_mul(u64::from(self.layers())))
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
        let g = Geometry::new(wide).unwrap();
        assert_eq!(g.total_bytes(u32::MAX).unwrap_err().kind(), Kind::Overflow);
        let align = Shape { device_block_align: u32::MAX, runs: [1 << 20, 1 << 20], ..Shape::DEEPSEEK_V3_2 };
        assert!(Geometry::new(align).is_err());
        assert!(v32().total_bytes(1 << 20).is_ok());
    }
}
