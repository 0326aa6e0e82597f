//! What a ring orders.

use std::ops::Range;

use crate::device::{Slice, Stream};
use crate::error::Result;
use crate::weights::plan::Place;
use crate::weights::window::Windows;

/// What a ring orders: layers that are pulled into buffers before they are used. [`Windows`] are the real ones.
pub trait Pull {
    /// This process's rank in its group, which errors name.
    fn rank(&self) -> u32;

    /// The layers of the model, shardable or not.
    fn layers(&self) -> usize;

    /// The buffer of a layer; `None` for one that is never pulled.
    fn buffer(&self, layer: usize) -> Option<usize>;

    /// How many copies a pull of the layer has.
    ///
    /// # Errors
    /// As [`Windows::copies`].
    fn copies(&self, layer: usize) -> Result<usize>;

    /// Enqueues some of a pull's copies on `stream`.
    ///
    /// # Errors
    /// As [`Windows::pull_some`].
    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()>;

    /// Whether the layer is whole at present without a pull.
    fn is_whole(&self, layer: usize) -> bool;

    /// Whether a pull of the layer reads the memory of this rank, as it is mapped now.
    fn reads(&self, layer: usize, rank: u32) -> bool;

    /// The layer's window, whose beginning a ring may bring into L2; `None` if there is nothing to bring.
    ///
    /// # Errors
    /// As [`Windows::layer`].
    fn window(&self, _layer: usize) -> Result<Option<Slice>> {
        Ok(None)
    }

    /// Checks that it is known what the layer's addresses show, also of a layer that is never pulled.
    ///
    /// # Errors
    /// The error after which it is not known.
    fn usable(&self, _layer: usize) -> Result<()> {
        Ok(())
    }
}

impl<P: Pull + ?Sized> Pull for &P {
    fn rank(&self) -> u32 {
        P::rank(self)
    }

    fn layers(&self) -> usize {
        P::layers(self)
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        P::buffer(self, layer)
    }

    fn copies(&self, layer: usize) -> Result<usize> {
        P::copies(self, layer)
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        P::pull_some(self, layer, stream, copies)
    }

    fn is_whole(&self, layer: usize) -> bool {
        P::is_whole(self, layer)
    }

    fn reads(&self, layer: usize, rank: u32) -> bool {
        P::reads(self, layer, rank)
    }

    fn window(&self, layer: usize) -> Result<Option<Slice>> {
        P::window(self, layer)
    }

    fn usable(&self, layer: usize) -> Result<()> {
        P::usable(self, layer)
    }
}

impl Pull for Windows {
    fn rank(&self) -> u32 {
        self.plan.group().rank
    }

    fn layers(&self) -> usize {
        self.plan.model_layers()
    }

    fn buffer(&self, layer: usize) -> Option<usize> {
        let (plan, _) = self.ordinal(layer).and_then(|ordinal| self.at(ordinal)).ok()?;
        match plan.place {
            Place::Resident => None,
            Place::Buffer(buffer) => Some(usize::from(buffer)),
        }
    }

    fn copies(&self, layer: usize) -> Result<usize> {
        Windows::copies(self, layer)
    }

    fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        Windows::pull_some(self, layer, stream, copies)
    }

    fn is_whole(&self, layer: usize) -> bool {
        // A layer whose mappings are not known is not whole; its next pull returns the error.
        self.layer(layer).is_ok() && self.is_resident(layer).unwrap_or(false)
    }

    fn reads(&self, layer: usize, rank: u32) -> bool {
        let plan = self.ordinal(layer).and_then(|ordinal| self.at(ordinal));
        plan.is_ok_and(|(plan, window)| {
            self.others(plan).any(|owner| match window.sources.get(owner as usize) {
                Some(sources) if !sources.is_empty() => sources.contains(&rank),
                _ => owner == rank,
            })
        })
    }

    fn window(&self, layer: usize) -> Result<Option<Slice>> {
        self.layer(layer).map(Some)
    }

    fn usable(&self, layer: usize) -> Result<()> {
        // A layer of which nothing was chosen has no window.
        self.ordinal(layer).map_or(Ok(()), |ordinal| Windows::usable(self, ordinal))
    }
}
