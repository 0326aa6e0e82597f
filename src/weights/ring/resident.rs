//! Layers that become resident, or sharded again, between two steps of a ring.

use super::{Ring, wrong};
use crate::device::Stream;
use crate::error::{Kind, Result};
use crate::weights::window::{Windows, refused};

impl Ring<Windows> {
    /// Waits until all pulls that were enqueued have run, before one layer is remapped, or several. At the border
    /// alone.
    pub(super) fn drain(&mut self, layer: Option<usize>) -> Result<()> {
        if let Some(open) = self.open {
            let what = match open.captured {
                Some(true) => "it cannot be remapped while a step is captured",
                _ => "it cannot be remapped while a step is open",
            };
            let error = layer.map_or_else(|| wrong(Kind::Busy, what), |it| refused(Kind::Busy, it, what));
            return Err(error.hint("end or abandon the step"));
        }
        for buffer in &self.buffers {
            self.device.record(buffer.paced, buffer.stream)?;
            self.device.synchronize(buffer.paced)?;
        }
        Ok(())
    }

    /// Notes that a layer's mappings have changed, or may have: what its buffer holds is not known to be this layer.
    fn changed(&mut self, layer: usize) {
        if let Some(at) = self.place(layer)
            && self.buffers.get(at).and_then(|buffer| buffer.holds).is_some_and(|holds| holds.layer == layer)
        {
            self.forget(at);
        }
    }

    /// As [`Windows::make_resident`], between steps. `stream` is ordered after all steps that used the layer. Blocks.
    /// It also reads the memory of a rank that ended: the way to go on without that rank.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Windows::make_resident`].
    pub fn make_resident(&mut self, layer: usize, stream: Stream) -> Result<()> {
        self.drain(Some(layer))?;
        let result = self.pulls.make_resident(layer, stream);
        self.changed(layer);
        result
    }

    /// As [`Windows::make_sharded`], between steps, when all steps that used the layer have run. Blocks.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Windows::make_sharded`].
    pub fn make_sharded(&mut self, layer: usize) -> Result<()> {
        self.drain(Some(layer))?;
        let result = self.pulls.make_sharded(layer);
        // Its last pull went to its own memory; also where giving that back was refused.
        self.changed(layer);
        result
    }

    /// The windows, when nothing is pulled any more. Pulls that were enqueued go on.
    pub fn into_windows(self) -> Windows {
        self.pulls
    }
}
