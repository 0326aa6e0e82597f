//! What the thread needs of either end.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::transfer::ends::Polled;

/// An end that the thread drives. Times are those since the thread's start.
pub trait Drive {
    /// What its machine says.
    type Event;

    /// The next thing that has happened, or none for now.
    ///
    /// # Errors
    /// Those after which the end can no longer work.
    fn poll(&mut self, now: Duration) -> Result<Option<Polled<Self::Event>>>;

    /// Why a connection did not open, if one did not.
    fn failure(&mut self) -> Option<Error>;

    /// When the machine has something to do; none for never.
    fn due(&self) -> Option<Duration>;

    /// How long the fabric has nothing to do.
    fn idle(&self) -> Duration;

    /// What to wait on.
    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)>;
}
