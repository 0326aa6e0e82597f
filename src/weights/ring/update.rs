//! Updates of the weights between two steps of a ring.

use super::Ring;
use crate::error::{Kind, Result};
use crate::peer::Links;
use crate::weights::update::{Border, Outcome, Update};
use crate::weights::window::Windows;

impl Ring<Windows> {
    /// As [`Windows::update`], at any time: steps and pulls go on.
    ///
    /// # Errors
    /// As [`Windows::update`].
    pub fn update(&mut self, version: u32, layers: &[usize], at_most: u64) -> Result<Update> {
        self.pulls.update(version, layers, at_most)
    }

    /// As [`Windows::commit`], between steps. The next [`Ring::begin`] or [`Ring::launch`] pulls the first layers anew,
    /// whatever became of the update.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured, and those of [`Device::synchronize`] for its pulls: nothing is
    /// decided then. Those of [`Windows::commit`].
    ///
    /// [`Device::synchronize`]: crate::device::Device::synchronize
    pub fn commit(&mut self, update: &mut Update, links: &mut Links, border: Border) -> Result<Outcome> {
        self.drain(|what| self.wrong(Kind::Busy, what))?;
        let result = self.pulls.commit(update, links, border);
        (0..self.buffers.len()).for_each(|buffer| self.forget(buffer));
        result
    }
}
