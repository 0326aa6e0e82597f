//! What was found of a device, or of the machine.

use forebay::device::rates::Rates;
use forebay::measure::Ceilings;
use serde::Serialize;

use super::facts::{GpuEntry, MachineEntry};
use super::finding::Finding;

/// What is measured of a device.
pub struct Measured {
    pub ceilings: Ceilings,
    /// None where times were such that no speed follows.
    pub rates: Option<Rates>,
}

/// A device, or the machine.
pub struct Checked {
    /// As `--device` names it.
    pub device: String,
    pub facts: FactsEntry,
    /// In the order in which they are shown.
    pub findings: Vec<Finding>,
    pub measured: Option<Measured>,
}

/// Numbers of it, where there are any.
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
