//! What an update and a change of replicas have beside the windows until all ranks take it: memory of their own, which
//! is written at parked addresses, read to be hashed, and given back if no rank takes it.

use super::plan::Plan;
use super::spares::Parked;
use super::staging::Staging;
use super::taken::give_back;
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
    /// The addresses at which it is written or read, which are parked again.
    pub lent: Vec<Slice>,
    staging: Staging,
    /// Those with work on its memory.
    streams: Vec<Stream>,
}

impl Beside {
    pub fn new(windows: &Windows, parked: Parked) -> Beside {
        Beside {
            device: Arc::clone(&windows.device),
            plan: Arc::new(windows.plan.clone()),
            faults: Arc::clone(&windows.faults),
            parked,
            lent: Vec::new(),
            staging: Staging::default(),
            streams: Vec::new(),
        }
    }

    /// Notes that work on its memory goes onto this stream.
    pub fn uses(&mut self, stream: Stream) {
        if !self.streams.contains(&stream) {
            self.streams.push(stream);
        }
    }

    /// Pinned memory through which the host reads and writes it.
    pub fn staged(&mut self) -> Result<(Arc<Map>, Slice)> {
        self.staging.memory(&*self.device, self.plan.grain(), &*self.faults)
    }

    /// Waits until all that was enqueued on `stream` has run.
    pub fn drain(&mut self, stream: Stream) -> Result<()> {
        self.staging.drain(&*self.device, stream)
    }

    /// Waits until all work on its memory has run.
    pub fn settle(&mut self) -> Result<()> {
        while let Some(stream) = self.streams.last().copied() {
            self.drain(stream)?;
            self.streams.pop();
        }
        Ok(())
    }

    /// Parks the addresses that were lent. Before its memory is exported: a system that lets others only read it would
    /// not map it again to be written, where something is refused.
    pub fn park(&mut self) -> Result<()> {
        while let Some(lent) = self.lent.last().copied() {
            self.parked.park(&*self.device, lent)?;
            self.lent.pop();
        }
        Ok(())
    }

    /// Gives memory of it back.
    pub fn give_back(&self, memory: &[Mapped]) -> Result<()> {
        give_back(&*self.device, memory)
    }
}
