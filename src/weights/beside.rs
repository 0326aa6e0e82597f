//! What an update and a change of replicas have beside the windows until all ranks take it: memory of their own, which
//! is written at parked addresses, read to be hashed, and given back if no rank takes it.

use super::left::{Left, User};
use super::parked::Parked;
use super::plan::Plan;
use super::window::Windows;
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::Result;
use crate::os::{Faults, Map};
use crate::sync::Arc;

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
        self.left.uses(stream);
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
            user.inherits(std::mem::take(&mut self.left));
        }
    }
}
