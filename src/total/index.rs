//! Device pages of index keys: what the indexer reads. One page for each host page of a sequence.
//!
//! At 132 bytes a token and layer they are the real cap on live tokens of a GPU, so they are a pool of
//! their own with an admission of its own. The engine writes the keys (edge I0); forebay says where, and
//! moves them when a page is copied.

use crate::device::{Device, Slice};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::total::Pages;

/// The pool of index-key pages.
#[derive(Debug)]
pub struct IndexPool {
    pub(crate) pages: Pages,
    /// Per layer `[pages][page tokens][key bytes]`; empty for models without index keys.
    layers: Vec<Slice>,
    page_bytes: u64,
}

impl IndexPool {
    /// Takes the memory.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfMemory`], [`crate::Kind::Overflow`].
    pub fn new(geometry: &Geometry, pages: u32, device: &dyn Device) -> Result<Self> {
        let page_bytes = geometry.index_page_bytes();
        let bytes = geometry.index_bytes(pages)?;
        let mut layers = Vec::new();
        if bytes > 0 {
            let all = device.allocate(bytes)?;
            let one = bytes / u64::from(geometry.layers());
            for layer in 0..u64::from(geometry.layers()) {
                layers.push(all.part(layer * one, one)?);
            }
        }
        Ok(IndexPool { pages: Pages::new("index-key pages", pages)?, layers, page_bytes })
    }

    /// The keys of a layer, all pages; nothing for models without index keys.
    pub fn layer(&self, layer: usize) -> Option<Slice> {
        self.layers.get(layer).copied()
    }

    /// The keys of one page in one layer.
    ///
    /// # Errors
    /// [`crate::Kind::OutOfRange`].
    pub fn page(&self, layer: usize, page: u32) -> Result<Option<Slice>> {
        let part = |keys: &Slice| keys.part(u64::from(page) * self.page_bytes, self.page_bytes);
        self.layers.get(layer).map(part).transpose()
    }
}
