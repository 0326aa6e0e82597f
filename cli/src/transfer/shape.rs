//! What is sent: the shape of a prompt's rows at both ends, and the bytes of each row.

use std::ops::Range;

use forebay::transfer::memory::{Plane, Planes};
use forebay::transfer::{Component, LayerPlaces, Place, Side, Split, Stage};

use super::args::PromptArguments;

/// The request that is computed, and the one that is sent again when all of it is there.
pub const LAYERED: u64 = 1;
pub const ALONE: u64 = 2;

/// Layers that the sender's ring has room for.
pub const RING_LAYERS: u32 = 4;

/// The shape of a prompt's rows. Both ends keep latents and index keys of a layer in pages of their own.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: u32,
    pub tokens: u32,
    pub row_bytes: [u32; 2],
    pub page: u32,
    pub seed: u64,
}

impl Shape {
    pub const fn of(arguments: &PromptArguments) -> Shape {
        let PromptArguments { layers, tokens, row_bytes, page, seed, .. } = *arguments;
        Shape { layers, tokens, row_bytes, page, seed }
    }

    /// Bytes of a page of latents and of one of index keys.
    pub fn page_bytes(&self) -> [u64; 2] {
        self.row_bytes.map(|bytes| u64::from(bytes) * u64::from(self.page))
    }

    pub const fn pages(&self) -> u32 {
        self.tokens.div_ceil(self.page)
    }

    /// Bytes of a layer in pages.
    pub fn layer_bytes(&self) -> u64 {
        let [latents, keys] = self.page_bytes();
        (latents + keys) * u64::from(self.pages())
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        let [latent, key] = self.row_bytes.map(u64::from);
        (latent + key) * u64::from(self.tokens) * u64::from(self.layers)
    }

    /// What either end says about its pages. Each layer has two planes.
    pub fn side(&self) -> Side {
        let component = |name: &str, bytes: u32| Component {
            name: name.to_owned(),
            dtype: "bytes".to_owned(),
            heads: 1,
            head_bytes: bytes.into(),
        };
        let [latent, key] = self.row_bytes;
        let place = |layer: u32, component: u32, bytes: u32| Place {
            component,
            plane: 2 * layer + component,
            offset: 0,
            token_stride: bytes.into(),
            head_stride: bytes.into(),
        };
        let layers = (0..self.layers)
            .map(|layer| LayerPlaces { layer, places: vec![place(layer, 0, latent), place(layer, 1, key)] });
        Side {
            components: vec![component("latent", latent), component("index key", key)],
            stages: vec![Stage {
                layers: layers.collect(),
                page_bytes: (0..self.layers).flat_map(|_| self.page_bytes()).collect(),
            }],
            width: 1,
            split: Split::Heads,
            replicas: 1,
            page_tokens: self.page,
        }
    }

    /// Where a part of the sender's ring has the planes of its layer: latents first, then index keys.
    pub fn planes(&self) -> Planes {
        let [latents, keys] = self.page_bytes();
        let behind = latents * u64::from(self.pages());
        let of_layer = [Plane { offset: 0, page_bytes: latents }, Plane { offset: behind, page_bytes: keys }];
        Planes((0..self.layers).flat_map(|_| of_layer).collect())
    }

    /// The bytes of consecutive rows: no other request, layer or token has them, and no other seed.
    pub fn rows(&self, request: u64, layer: u32, component: u32, tokens: Range<u32>, into: &mut Vec<u8>) {
        into.clear();
        let bytes = if component == 0 { self.row_bytes[0] } else { self.row_bytes[1] } as usize;
        for token in tokens {
            let name = [request, layer.into(), component.into(), token.into()];
            let mut word = name.iter().fold(mixed(self.seed), |word, of| mixed(word ^ of));
            let end = into.len() + bytes;
            while into.len() < end {
                word = word.wrapping_add(0x9E37_79B9_7F4A_7C15).rotate_left(7);
                let left = (end - into.len()).min(8);
                into.extend(word.to_le_bytes().iter().take(left));
            }
        }
    }
}

/// A word whose bits depend on all bits of another one (the last steps of SplitMix64).
const fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}
