//! The physical memory of a plan on one rank: taken at once, before any range maps it.
//!
//! A device frees memory only while no range maps it, and keeps ranges for as long as it lives. So all memory is taken
//! first: where the device has too little of it, or refuses some, what was taken is given back and nothing is held.
//! Ranges take addresses alone, and are the last that can be refused.

use super::plan::Plan;
use crate::device::{Device, Mapped};
use crate::error::Result;

/// It.
#[derive(Default)]
pub(super) struct Taken {
    /// By number.
    pub buffers: Vec<Vec<Mapped>>,
    /// By ordinal: what this rank keeps of the layer on the device, if anything.
    pub own: Vec<Option<Mapped>>,
}

impl Taken {
    pub fn new(device: &dyn Device, plan: &Plan) -> Result<Taken> {
        let mut taken = Taken::default();
        match taken.take(device, plan) {
            Ok(()) => Ok(taken),
            Err(error) => {
                taken.give_back_unmapped(device);
                Err(error)
            }
        }
    }

    fn take(&mut self, device: &dyn Device, plan: &Plan) -> Result<()> {
        for bytes in plan.bytes().buffers {
            self.buffers.push(memory(device, bytes)?);
        }
        for layer in plan.layers() {
            let pages = plan.part(layer.layer, plan.group().rank).unwrap_or(0..0);
            let bytes = (pages.end - pages.start) * plan.grain();
            let own = match bytes {
                0 => None,
                _ => Some(Mapped { backing: device.backing(bytes)?, offset: 0, bytes }),
            };
            self.own.push(own);
        }
        Ok(())
    }

    /// Gives back what no range maps. The rest stays with the device.
    pub fn give_back_unmapped(&self, device: &dyn Device) {
        for piece in self.buffers.iter().flatten().chain(self.own.iter().flatten()) {
            // Refused where a range maps it; the caller has an error of its own, which says more.
            let _ = device.give_back(piece.backing);
        }
    }
}

/// Allocates device memory that can be cut at any granule when it is mapped.
pub(super) fn memory(device: &dyn Device, bytes: u64) -> Result<Vec<Mapped>> {
    let piece = if device.maps_offsets()? { bytes } else { device.granularity() };
    let mut pieces = Vec::new();
    while (pieces.len() as u64) * piece < bytes {
        match device.backing(piece) {
            Ok(backing) => pieces.push(Mapped { backing, offset: 0, bytes: piece }),
            Err(error) => {
                // What was taken so far has never been mapped.
                return give_back(device, &pieces).and(Err(error));
            }
        }
    }
    Ok(pieces)
}

pub(super) fn give_back(device: &dyn Device, pieces: &[Mapped]) -> Result<()> {
    // Each of them, also after one that is refused.
    pieces.iter().map(|piece| device.give_back(piece.backing)).fold(Ok(()), Result::and)
}
