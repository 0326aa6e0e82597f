//! Device pages of index keys, which the indexer reads: one page for each host page of a sequence.
//!
//! An index key takes 132 bytes for each token and layer, so the index keys limit the number of live tokens on a GPU.
//! That is why they are a pool of their own, which admission counts separately. The engine writes the keys (operation
//! I0). forebay assigns the pages, and copies keys when it copies a page.

use crate::device::{Device, Slice};
use crate::error::Result;
use crate::geometry::Geometry;
use crate::total::Pages;

/// The pool of index-key pages.
#[derive(Debug)]
pub struct IndexPool {
    pub(crate) pages: Pages,
    /// The keys of each layer, `[pages][page tokens][key bytes]`; empty for models without index keys.
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

    /// The keys of a layer, all pages; `None` for models without index keys.
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
