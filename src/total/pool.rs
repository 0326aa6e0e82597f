//! The memory of the total pool and the owners of its pages.
//!
//! The layout is layer-major: the rows of a layer are contiguous, `[pages][page tokens][host stride]`, so that one
//! layer can be transferred, or gathered from, as one range. `memory` takes it, as one mapping.
//! [`TotalPool::fallbacks`] lists the options that the system refused.

use crate::device::{Device, Slice};
use crate::error::{Error, Kind, Result};
use crate::geometry::Geometries;
use crate::os::{Fallback, Faults, Map};
use crate::sync::Arc;
use crate::total::Pages;
use crate::total::memory::{Memory, take};

/// The byte that fills a newly allocated page in debug builds.
const POISON: u8 = 0xFF;

/// The total pool.
#[derive(Debug)]
pub struct TotalPool {
    pub(crate) pages: Pages,
    geometry: Geometries,
    map: Arc<Map>,
    layers: Vec<Slice>,
    /// For each layer, where its rows begin in the mapping.
    starts: Vec<u64>,
    fallbacks: Vec<Fallback>,
}

impl TotalPool {
    /// Takes the memory of `pages` pages in every layer, with the options of `memory`, and registers it with `device`.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`], [`Kind::Overflow`], [`Kind::OsRefused`].
    pub fn new(
        geometry: Geometries,
        pages: u32,
        memory: Memory,
        device: &dyn Device,
        faults: &dyn Faults,
    ) -> Result<Self> {
        let bytes = geometry.total_bytes(pages)?;
        let (map, all, fallbacks) = take(&memory.request(bytes), device, faults)?;
        let mut layers = Vec::with_capacity(geometry.formats().len());
        let mut start = 0;
        for format in geometry.formats() {
            let own = format.host_page_bytes() * u64::from(pages);
            layers.push((start, all.part(start, own)?));
            start += own;
        }
        Ok(TotalPool {
            starts: layers.iter().map(|(start, _)| *start).collect(),
            layers: layers.into_iter().map(|(_, rows)| rows).collect(),
            pages: Pages::new("host pages", pages)?,
            geometry,
            map,
            fallbacks,
        })
    }

    /// The memory options that the system refused.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The rows of a layer, all pages.
    pub fn layers(&self) -> &[Slice] {
        &self.layers
    }

    /// The rows of one page in one layer.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn page(&self, layer: usize, page: u32) -> Result<Slice> {
        let bytes = self.geometry.of(layer).host_page_bytes();
        match self.layers.get(layer) {
            Some(rows) => rows.part(u64::from(page) * bytes, bytes),
            None => Err(Error::new(Kind::OutOfRange, "total pool").at("layer").with("layer", layer as u64)),
        }
    }

    fn offset(&self, layer: usize, page: u32, token: u32) -> u64 {
        // The mapping's copies refuse a place beyond its end.
        let start = self.starts.get(layer).copied().unwrap_or(self.map.len());
        start + self.geometry.of(layer).host_offset(page, token)
    }

    /// Overwrites a page's rows in every layer with NaN (in FP8, bfloat16 and f32), so that a read of a row that was
    /// never stored shows. No sequence may use the page yet.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub(crate) fn poison(&self, page: u32) -> Result<()> {
        let bytes = |layer| self.geometry.of(layer).host_page_bytes() as usize;
        let layers = 0..self.layers.len();
        let rows = vec![POISON; layers.clone().map(bytes).max().unwrap_or(0)];
        layers
            .into_iter()
            .try_for_each(|layer| self.map.copy_in(self.offset(layer, page, 0), &rows[..bytes(layer)]))
    }

    /// Writes one packed row (no padding) to its place.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn write_row(&self, layer: usize, page: u32, token: u32, row: &[u8]) -> Result<()> {
        self.map.copy_in(self.offset(layer, page, token), row)
    }

    /// Reads the current bytes of one row.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    pub fn read_row(&self, layer: usize, page: u32, token: u32, row: &mut [u8]) -> Result<()> {
        self.map.copy_out(self.offset(layer, page, token), row)
    }
}
