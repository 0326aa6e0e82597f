//! What a layer's weights are to forebay, and how the chosen ones lie in the layer's window.
//!
//! A layer is a list of named byte ranges ([`Tensor`]). The engine fills them after its own transformations
//! (absorbed, fused, quantised or re-laid-out weights), and forebay never interprets the bytes: it knows a name, a
//! length and an alignment. So any dtype and any model fit, and one window can hold ranges of several dtypes.
//!
//! [`Layout`] puts the chosen ranges of one layer one after another, each at the next multiple of its alignment, in
//! the engine's order, and rounds the whole up to granules, the pages of the device's mappings. It costs at most the
//! alignments and one granule per layer. Ranges that are not chosen stay outside forebay.
//!
//! **Invariants.** Ranges do not overlap. A range starts at a multiple of its alignment in the window, and also in
//! memory, because an alignment is at most a granule and a window starts at one. All sums are checked, so a layout of
//! sizes that came from a file is an error and not an overflow.

use crate::error::{Error, Kind, Result};
use crate::text::echo;

/// One named byte range of a layer's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The engine's name, by which patterns choose it; unique in its layer.
    pub name: String,
    /// Its length in bytes, above 0.
    pub bytes: u64,
    /// Its alignment in bytes: a power of two, at most the granule.
    pub align: u64,
}

/// A chosen range in its layer's window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The range's name.
    pub name: String,
    /// Bytes from the start of the window.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The chosen ranges of one layer, laid out in whole pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<Placed>,
    bytes: u64,
    pages: u64,
}

/// The error for a layer that cannot be planned.
pub(super) fn wrong(kind: Kind, layer: usize, name: &str, what: &str) -> Error {
    Error::new(kind, "plan weights").at(format!("layer {layer}, {}: {what}", echo(name)))
}

impl Layout {
    /// Lays out `chosen`, tensors of layer `layer`, in pages of `grain` bytes, a power of two.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] names layer and tensor: no bytes, an alignment that is no power of two or above the
    /// granule. [`Kind::Overflow`] if the layer does not fit a `u64`.
    pub(super) fn new<'a>(
        layer: usize,
        chosen: impl Iterator<Item = &'a Tensor>,
        grain: u64,
    ) -> Result<Layout> {
        let (mut tensors, mut end, mut bytes) = (Vec::new(), 0_u64, 0_u64);
        for tensor in chosen {
            let name = &tensor.name;
            if tensor.bytes == 0 {
                return Err(wrong(Kind::InvalidConfig, layer, name, "a tensor of no bytes")
                    .hint("leave it out of the layer"));
            }
            if !tensor.align.is_power_of_two() || tensor.align > grain {
                return Err(wrong(Kind::InvalidConfig, layer, name, "its alignment")
                    .with("align", tensor.align)
                    .with("grain", grain)
                    .hint("pass a power of two, at most the granule"));
            }
            let overflow = || wrong(Kind::Overflow, layer, name, "the layer's bytes");
            let offset = end.checked_next_multiple_of(tensor.align).ok_or_else(overflow)?;
            end = offset.checked_add(tensor.bytes).ok_or_else(overflow)?;
            bytes += tensor.bytes;
            tensors.push(Placed { name: name.clone(), offset, bytes: tensor.bytes });
        }
        Ok(Layout { tensors, bytes, pages: end.div_ceil(grain) })
    }

    /// The ranges, by ascending offset.
    pub fn tensors(&self) -> &[Placed] {
        &self.tensors
    }

    /// Bytes of the ranges alone, without alignment and rounding.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pages of the window, of one granule each.
    pub const fn pages(&self) -> u64 {
        self.pages
    }
}
