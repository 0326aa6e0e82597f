//! What was found about a device, or about the machine.

use forebay::device::rates::Rates;
use forebay::measure::Ceilings;
use serde::Serialize;

use super::facts::{GpuEntry, MachineEntry};
use super::finding::Finding;

/// The measured rates of a device.
pub struct Measured {
    pub ceilings: Ceilings,
    /// None if the times allow no rate.
    pub rates: Option<Rates>,
}

/// A device, or the machine.
pub struct Checked {
    /// Its name in `--device`.
    pub device: String,
    pub facts: FactsEntry,
    /// In the order of the report.
    pub findings: Vec<Finding>,
    pub measured: Option<Measured>,
}

/// Its facts as numbers, if there are any.
#[derive(Serialize)]
#[serde(untagged)]
pub enum FactsEntry {
    Gpu(GpuEntry),
    Machine(MachineEntry),
    Unknown,
}

impl FactsEntry {
    pub fn is_unknown(&self) -> bool {
        matches!(self, FactsEntry::Unknown)
    }
}
