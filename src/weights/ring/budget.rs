//! The device memory of a ring's weights, made smaller and larger between two steps.
//!
//! A sharded layer shares buffers with others, and a resident one has memory of its own for what it would pull. So an
//! engine can turn weights into room for sequences: it calls [`Ring::shrink`] before it makes a cache, whose index keys
//! and slots take the memory that is freed. A device keeps a cache's memory for as long as it lives, so [`Ring::grow`]
//! gets none of that back. The weights' addresses and the pulls of captured graphs stay.
//!
//! **Which layers** become resident first is one order: those whose place among the sharded layers is first with its
//! bits reversed, which spreads them over the model. A layer that does not fit is left out, so which ones are resident
//! depends on sizes and on the budgets before.
//!
//! **Costs.** A layer that becomes resident is pulled once and mapped twice; one that becomes sharded is mapped twice.
//! The calls wait for pulls that are under way, and block.
//!
//! **Replicas** count in the budget from their commit on, and a shrink gives none of them back.
//!
//! **What it does not do.** It does not decide the budget, and takes nothing from a cache.

use super::Ring;
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::weights::window::Windows;

/// The error of a layer's change, with the layer.
fn of_layer(error: Error, layer: usize) -> Error {
    if error.number("layer").is_some() { error } else { error.with("layer", layer as u64) }
}

impl Ring<Windows> {
    /// The layers that the plan shards, in the order in which they become resident.
    fn order(&self) -> Vec<usize> {
        let layers = self.once.iter().chain(&self.drafts).zip(0_u32..);
        let mut layers: Vec<(u32, usize)> = layers.map(|(layer, at)| (at.reverse_bits(), *layer)).collect();
        layers.sort_unstable();
        layers.into_iter().map(|(_, layer)| layer).collect()
    }

    /// Bytes that a layer takes more when it is resident.
    fn more(&self, layer: usize) -> u64 {
        let plan = self.pulls.plan();
        plan.layers().iter().find(|one| one.layer == layer).map_or(0, |one| plan.pulled(one))
    }

    fn closed(&self) -> Result<()> {
        match self.open {
            None => Ok(()),
            Some(_) => Err(self
                .wrong(Kind::Busy, "the budget cannot change while a step is open or captured")
                .hint("end or abandon the step")),
        }
    }

    /// Makes layers sharded until the weights take at most `most` bytes of device memory
    /// ([`Windows::device_bytes`]). Between steps, when all steps that used the layers have run. Returns the bytes that
    /// they take. Blocks. Nothing happens if they take no more.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] with the least bytes if even the plan and this rank's replicas take more, and nothing
    /// changes ([`Ring::drop_replicas`] gives theirs back); [`Kind::Busy`]
    /// while a step is open or captured; those of [`Ring::make_sharded`], with the layer. Layers before that one stay
    /// sharded then.
    pub fn shrink(&mut self, most: u64) -> Result<u64> {
        self.closed()?;
        let least = self.pulls.plan().bytes().device() + self.pulls.replica_bytes();
        if most < least {
            return Err(self
                .wrong(Kind::OutOfMemory, "the budget: all layers sharded take more")
                .with("budget", most)
                .with("least", least)
                .hint("raise the budget, or divide the layers among more ranks"));
        }
        for layer in self.order().into_iter().rev() {
            if self.pulls.device_bytes() <= most {
                break;
            }
            if !self.pulls.is_resident(layer)? {
                continue;
            }
            self.make_sharded(layer).map_err(|error| of_layer(error, layer))?;
        }
        Ok(self.pulls.device_bytes())
    }

    /// Makes layers resident, in their order, as long as the weights take at most `most` bytes of device memory; a
    /// layer that does not fit is left out. Between steps; `stream` is ordered after all steps that used the layers.
    /// Returns the bytes that the weights take. Blocks.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Ring::make_resident`], with the layer, such as
    /// [`Kind::OutOfMemory`] where the device has less memory than the budget. Layers before that one stay resident
    /// then.
    pub fn grow(&mut self, most: u64, stream: Stream) -> Result<u64> {
        self.closed()?;
        for layer in self.order() {
            let fits = self.pulls.device_bytes().saturating_add(self.more(layer)) <= most;
            if fits && !self.pulls.is_resident(layer)? {
                self.make_resident(layer, stream).map_err(|error| of_layer(error, layer))?;
            }
        }
        Ok(self.pulls.device_bytes())
    }
}
