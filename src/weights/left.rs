//! What is left to be done before the memory of an update or of a change of replicas is given back, and who does it.
//!
//! Memory that work still writes cannot be given back, nor addresses that cannot be parked, and no other update may be
//! lent them. So where a device refuses one of these, what is left goes to the windows when the update is dropped
//! ([`User`]), and they try again before the next one begins.

use super::parked::Parked;
use super::staging::Staging;
use super::taken::give_back;
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::Result;
use crate::sync::{Arc, Mutex};

/// What has to be done before nothing of it is left.
#[derive(Debug, Default)]
pub(super) struct Left {
    pub staging: Staging,
    /// Those with work on its memory.
    streams: Vec<Stream>,
    /// The addresses at which it is written or read, which are parked again.
    pub lent: Vec<Slice>,
    /// What is given back.
    pub memory: Vec<Mapped>,
}

impl Left {
    /// Notes that work goes onto this stream.
    pub fn uses(&mut self, stream: Stream) {
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }

    /// Waits until all work has run.
    pub fn settle(&mut self, device: &dyn Device) -> Result<()> {
        while let Some(stream) = self.streams.last().copied() {
            self.staging.drain(device, stream)?;
            self.streams.pop();
        }
        Ok(())
    }

    /// Parks the addresses.
    pub fn park(&mut self, device: &dyn Device, parked: Parked) -> Result<()> {
        while let Some(lent) = self.lent.last().copied() {
            parked.park(device, lent)?;
            self.lent.pop();
        }
        Ok(())
    }

    /// Does it. What is refused is left, but for memory that is not taken back, which stays with the device.
    pub fn end(&mut self, device: &dyn Device, parked: Parked) -> Result<()> {
        self.settle(device)?;
        self.park(device, parked)?;
        give_back(device, &std::mem::take(&mut self.memory))
    }

    pub fn is_done(&self) -> bool {
        self.streams.is_empty() && self.lent.is_empty() && self.memory.is_empty()
    }
}

/// What windows and the update or change of replicas that uses them have in common: by it they know that it is there,
/// and what a dropped one has left.
#[derive(Clone, Debug)]
pub(super) struct User(Arc<Mutex<Left>>);

impl Default for User {
    fn default() -> User {
        User(Arc::new(Mutex::new(Left::default())))
    }
}

impl User {
    pub fn is(&self, other: &User) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the windows alone have it. Does first what a dropped update or change of replicas has left.
    ///
    /// # Errors
    /// What is refused; it is left then.
    pub fn is_none(&self, device: &dyn Device, parked: Option<Parked>) -> Result<bool> {
        if Arc::strong_count(&self.0) > 1 {
            return Ok(false);
        }
        // No device is called under the lock.
        let mut left = std::mem::take(&mut *self.0.lock());
        let ended = parked.map_or(Ok(()), |parked| left.end(device, parked));
        if !left.is_done() {
            self.inherits(left);
        }
        ended.map(|()| true)
    }

    /// Takes over what is left.
    pub fn inherits(&self, left: Left) {
        *self.0.lock() = left;
    }
}
