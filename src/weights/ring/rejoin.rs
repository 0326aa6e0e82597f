//! A rank that has come back, between two steps of a ring.

use std::time::Duration;

use super::{OPERATION, Ring};
use crate::error::{Error, Kind, Result};
use crate::peer::Links;
use crate::weights::window::Windows;

impl Ring<Windows> {
    /// As [`Windows::reattach`], between steps, when all steps have run that pull from the rank. Waits for the pulls
    /// that were enqueued, launched ones too. Replicas are dropped. From then on the rank counts as ended no longer
    /// ([`Ring::lost`]).
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open or captured; those of [`Windows::reattach`]. If the session with the rank
    /// has ended then, the rank counts as ended.
    pub fn reattach(&mut self, rank: u32, links: &mut Links, at_most: Duration) -> Result<()> {
        self.drain(|what| Error::new(Kind::Busy, OPERATION).at(what).with("rank", rank))?;
        let attached = self.pulls.reattach(rank, links, at_most);
        match attached {
            Ok(()) => self.lost.retain(|lost| *lost != rank),
            Err(_) if links.link(rank).is_none() => self.lost(rank),
            Err(_) => {}
        }
        attached
    }
}
