//! What an update and a change of replicas have beside the windows until all ranks take it: memory of their own, which
//! is written at parked addresses, read to be hashed, and given back if no rank takes it.
//!
//! **Whose it is.** Memory that work still writes cannot be given back, nor addresses that cannot be parked, and no
//! other update may be lent them. So where a device refuses one of these, what is left to be done ([`Left`]) goes to
//! the windows when the update is dropped ([`User`]), and they try again before the next one begins.

use super::plan::Plan;
use super::spares::Parked;
use super::staging::Staging;
use super::taken::give_back;
use super::window::Windows;
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::Result;
use crate::os::{Faults, Map};
use crate::sync::{Arc, Mutex};

/// What has to be done before nothing of it is left.
#[derive(Debug, Default)]
pub(super) struct Left {
    staging: Staging,
    /// Those with work on its memory.
    streams: Vec<Stream>,
    /// The addresses at which it is written or read, which are parked again.
    lent: Vec<Slice>,
    /// What is given back.
    memory: Vec<Mapped>,
}

impl Left {
    fn settle(&mut self, device: &dyn Device) -> Result<()> {
        while let Some(stream) = self.streams.last().copied() {
            self.staging.drain(device, stream)?;
            self.streams.pop();
        }
        Ok(())
    }

    fn park(&mut self, device: &dyn Device, parked: Parked) -> Result<()> {
        while let Some(lent) = self.lent.last().copied() {
            parked.park(device, lent)?;
            self.lent.pop();
        }
        Ok(())
    }

    /// Does it. What is refused is left, but for memory that is not taken back, which stays with the device.
    fn end(&mut self, device: &dyn Device, parked: Parked) -> Result<()> {
        self.settle(device)?;
        self.park(device, parked)?;
        give_back(device, &std::mem::take(&mut self.memory))
    }

    fn is_done(&self) -> bool {
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
            *self.0.lock() = left;
        }
        ended.map(|()| true)
    }
}

/// It.
#[derive(Debug)]
pub(super) struct Beside {
    pub device: Arc<dyn Device>,
    pub plan: Arc<Plan>,
    pub faults: Arc<dyn Faults>,
    pub parked: Parked,
    left: Left,
    /// None when nothing is left.
    user: Option<User>,
}

impl Beside {
    pub fn new(windows: &mut Windows, replicates: bool) -> Result<Beside> {
        let parked = windows.spares.parked(&*windows.device, windows.plan.grain())?;
        Ok(Beside {
            device: Arc::clone(&windows.device),
            plan: Arc::new(windows.plan.clone()),
            faults: Arc::clone(&windows.faults),
            parked,
            left: Left::default(),
            user: Some(windows.spares.lend(replicates)),
        })
    }

    /// Whether it is beside these windows.
    pub fn is_of(&self, windows: &Windows) -> bool {
        self.user.as_ref().is_some_and(|user| windows.spares.are_lent_to(user))
    }

    /// Notes that work on its memory goes onto this stream.
    pub fn uses(&mut self, stream: Stream) {
        if !self.left.streams.contains(&stream) {
            self.left.streams.push(stream);
        }
    }

    /// Notes addresses at which its memory is going to be mapped.
    pub fn lent(&mut self, addresses: Slice) {
        self.left.lent.push(addresses);
    }

    /// Pinned memory through which the host reads and writes it.
    pub fn staged(&mut self) -> Result<(Arc<Map>, Slice)> {
        self.left.staging.memory(&*self.device, self.plan.grain(), &*self.faults)
    }

    /// Waits until all that was enqueued on `stream` has run.
    pub fn drain(&mut self, stream: Stream) -> Result<()> {
        self.left.staging.drain(&*self.device, stream)
    }

    /// Waits until all work on its memory has run.
    pub fn settle(&mut self) -> Result<()> {
        self.left.settle(&*self.device)
    }

    /// Parks the addresses that were lent. Before its memory is exported: a system that lets others only read it would
    /// not map it again to be written, where something is refused.
    pub fn park(&mut self) -> Result<()> {
        self.left.park(&*self.device, self.parked)
    }

    /// Ends it: gives `memory` back when all work on it has run and no address maps it. Then the windows are free for
    /// another one. It can be called again where something is refused.
    pub fn end(&mut self, memory: impl IntoIterator<Item = Mapped>) -> Result<()> {
        self.left.memory.extend(memory);
        let ended = self.left.end(&*self.device, self.parked);
        if self.left.is_done() {
            self.user = None;
        }
        ended
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(user) = self.user.take() {
            *user.0.lock() = std::mem::take(&mut self.left);
        }
    }
}
