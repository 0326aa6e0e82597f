//! A plan of a prefill instance: the request, and what it takes.

use forebay::Result;
use forebay::predict::prefill::{Demand, Planned};

use super::super::deployment::Deployed;
use crate::input::sizes::Size;

/// One plan of the sweep.
pub struct Point {
    /// The model.
    pub model: String,
    /// Memory of one GPU. All computed sizes are shown in its unit.
    pub gpu: Size,
    /// The GPUs.
    pub deployed: Deployed,
    /// The demand.
    pub demand: Demand,
    /// The plan, or why there is none.
    pub planned: Result<Planned>,
    /// The plan of the same prompts in one pass; none where that is the plan, or where activations were given, for the
    /// chunk.
    pub in_one_pass: Option<Result<Planned>>,
}

impl Point {
    /// A computed size, in the unit of the GPU's.
    pub fn size(&self, bytes: u64) -> String {
        self.gpu.unit().size(bytes as f64)
    }
}
