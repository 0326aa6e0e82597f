//! The windows of a ring between its steps: filled before the first one, and later made resident, or sharded again.

use super::{Pull, Ring};
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::weights::window::{Windows, refused};

impl Ring<Windows> {
    /// Waits until all pulls and prefetches that were enqueued have run. At the border alone.
    pub(super) fn drain(&self, busy: impl FnOnce(&'static str) -> Error) -> Result<()> {
        if let Some(open) = self.open {
            let what = match open.captured {
                Some(true) => "it cannot be remapped while a step is captured",
                _ => "it cannot be remapped while a step is open",
            };
            return Err(busy(what).hint("end or abandon the step"));
        }
        for buffer in &self.buffers {
            self.device.record(buffer.paced, buffer.stream)?;
            self.device.synchronize(buffer.paced)?;
        }
        self.ahead.as_ref().map_or(Ok(()), |ahead| ahead.drain(&*self.device))
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
        self.drain(|what| self.misused(Kind::Busy, layer, what))?;
        let result = self.pulls.make_resident(layer, stream);
        self.changed(layer);
        result
    }

    /// As [`Windows::make_sharded`], between steps, when all steps that used the layer have run. Blocks.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; [`Kind::PeerLost`] with layer and rank for one that would need
    /// the memory of a rank that ended; those of [`Windows::make_sharded`].
    pub fn make_sharded(&mut self, layer: usize) -> Result<()> {
        self.drain(|what| self.misused(Kind::Busy, layer, what))?;
        if self.place(layer).is_none() || !self.pulls.is_resident(layer)? {
            return self.pulls.make_sharded(layer);
        }
        if let Some(rank) = self.lost.iter().find(|rank| self.pulls.reads(layer, **rank)) {
            return Err(refused(Kind::PeerLost, layer, "it would be pulled from a rank that ended")
                .with("rank", *rank)
                .hint("keep the layer resident until the rank has come back"));
        }
        let result = self.pulls.make_sharded(layer);
        // Its last pull went to its own memory; also where giving that back was refused.
        self.changed(layer);
        result
    }

    /// The windows before their first step, to be filled and shared. So a caller can make the ring first, and
    /// everything that may be refused is refused when nothing is filled yet.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] once the parts were shared, or a step has begun.
    pub fn filling(&mut self) -> Result<&mut Windows> {
        if self.pulls.is_shared() {
            return Err(self.wrong(Kind::InvalidState, "its parts were shared: they are not filled any more"));
        }
        if self.open.is_some() || self.buffers.iter().any(|buffer| buffer.holds.is_some()) {
            return Err(
                self.wrong(Kind::InvalidState, "a step has begun: its layers are not filled any more")
            );
        }
        Ok(&mut self.pulls)
    }

    /// As [`Windows::verify_layer`], at any time: steps and pulls go on.
    ///
    /// # Errors
    /// As [`Windows::verify_layer`].
    pub fn verify_layer(&mut self, layer: usize, stream: Stream) -> Result<()> {
        self.pulls.verify_layer(layer, stream)
    }

    /// The windows, when nothing is pulled any more. Pulls and prefetches that were enqueued go on.
    pub fn into_windows(self) -> Windows {
        self.pulls
    }
}
