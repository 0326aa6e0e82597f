//! Changes of replicas between two steps of a ring.

use super::Ring;
use crate::error::{Kind, Result};
use crate::peer::Links;
use crate::weights::replicas::{Replica, Replication};
use crate::weights::update::{Border, Outcome};
use crate::weights::window::Windows;

impl Ring<Windows> {
    /// As [`Windows::replicate`], at any time: steps and pulls go on.
    ///
    /// # Errors
    /// As [`Windows::replicate`].
    pub fn replicate(&mut self, number: u32, wanted: &[Replica], at_most: u64) -> Result<Replication> {
        self.pulls.replicate(number, wanted, at_most)
    }

    /// As [`Windows::commit_replicas`], between steps. Buffers keep what they hold.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Windows::commit_replicas`].
    pub fn commit_replicas(
        &mut self,
        change: &mut Replication,
        links: &mut Links,
        border: Border,
    ) -> Result<Outcome> {
        self.drain(|what| self.wrong(Kind::Busy, what))?;
        self.pulls.commit_replicas(change, links, border)
    }

    /// As [`Windows::drop_replicas`], between steps. Waits for the pulls that were enqueued, launched ones too.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Windows::drop_replicas`].
    pub fn drop_replicas(&mut self) -> Result<()> {
        self.drain(|what| self.wrong(Kind::Busy, what))?;
        self.pulls.drop_replicas()
    }

    /// Reads around the ranks that ended ([`Ring::lost`]), between steps: where another rank has the same range, pulls
    /// read it there from now on, on this rank alone. A layer that still needs a rank that ended is refused as before.
    /// Waits for the pulls that were enqueued, launched ones too.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured, or a change of replicas is there; the errors of what a dropped
    /// one has left, which is done first; those of [`crate::device::Device::remap`]: each part is mapped as before or
    /// anew then, and the bytes of both are the same. Where a device has failed, every later call for the layer returns
    /// that error.
    pub fn reroute(&mut self) -> Result<()> {
        self.drain(|what| self.wrong(Kind::Busy, what))?;
        self.pulls.reroute(&self.lost)
    }
}
