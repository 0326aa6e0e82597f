//! A plan of a dense model: the request, and what fits.

use forebay::predict::dense::{Demand, Planned};
use forebay::{Error, Result};

use crate::input::sizes::Size;

/// One plan of the sweep.
pub struct Point {
    /// The model.
    pub model: &'static str,
    /// Memory of one GPU. All computed sizes are shown in its unit.
    pub gpu: Size,
    /// Bytes of a cached value.
    pub value_bytes: u32,
    /// The demand.
    pub demand: Demand,
    /// Windows that no sequence fills: their layers read all tokens.
    pub dropped: Vec<u32>,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// Why one sequence more than the most does not fit.
    pub one_more: Option<Error>,
}

impl Point {
    /// A computed size, in the unit of the GPU's.
    pub fn size(&self, bytes: u64) -> String {
        self.gpu.unit().size(bytes as f64)
    }
}
