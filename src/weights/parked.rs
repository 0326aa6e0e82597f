//! Ranges whose addresses are kept, and which show nothing of interest meanwhile ([`super::spares`]).

use crate::device::{Device, Mapped, Slice};
use crate::error::Result;
use crate::os::Protection;

/// The granule that parked ranges map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parked {
    pub granule: Mapped,
}

impl Parked {
    /// What a parked range of so many bytes maps.
    fn pieces(self, bytes: u64) -> Vec<Mapped> {
        (0..bytes / self.granule.bytes.max(1)).map(|_| self.granule).collect()
    }

    /// What a range of so many bytes maps whose beginning maps `first`.
    fn behind(self, first: Mapped, bytes: u64) -> Vec<Mapped> {
        let mut pieces = vec![first];
        pieces.extend(self.pieces(bytes.saturating_sub(first.bytes)));
        pieces
    }

    /// A new parked range.
    pub fn range(self, device: &dyn Device, bytes: u64, protection: Protection) -> Result<Slice> {
        device.range(&self.pieces(bytes), protection)
    }

    /// Parks a range.
    pub fn park(self, device: &dyn Device, range: Slice) -> Result<()> {
        device.remap(range, &self.pieces(range.bytes()))
    }

    /// Lets a range begin with memory that is not longer, and parks what is behind it.
    pub fn show(self, device: &dyn Device, range: Slice, memory: Mapped) -> Result<Slice> {
        device.remap(range, &self.behind(memory, range.bytes()))?;
        range.part(0, memory.bytes)
    }
}
