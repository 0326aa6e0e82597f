//! A sender's end over sockets.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::sync::Arc;
use crate::transfer::fabric::{Fabric, Happened, Runs, SenderFabric};
use crate::transfer::memory::SendMemory;
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Run;
use crate::transfer::sender::Source;
use crate::transfer::socket::Socket;
use crate::transfer::socket::address::{Address, Way};
use crate::transfer::socket::hub::Hub;
use crate::transfer::socket::opening::told;
use crate::transfer::socket::options::Options;

/// A sender's end over TCP or shared memory. It sends rows from a memory, which lives as long as the end.
#[derive(Debug)]
pub struct SocketSender {
    hub: Hub,
    memory: Arc<SendMemory>,
    way: Way,
}

impl SocketSender {
    /// An end that connects to no receiver yet.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other. Over shared memory also for more planes than fit
    /// a record, [`Kind::Unsupported`] for memory that is not shared, [`Kind::InvalidState`] for memory that other
    /// processes may write, and [`Kind::OsRefused`].
    pub fn new(way: Way, options: Options, memory: Arc<SendMemory>) -> Result<SocketSender> {
        if way == Way::Shm {
            // Each connection exports it again; what speaks against it shows here.
            memory.map().export(Protection::Read, &*options.faults)?;
            told(&memory)?;
        }
        let hub = Hub::sender(way, options, memory.clone())?;
        Ok(SocketSender { hub, memory, way })
    }

    /// Connects to one more receiver. One that is there already is no error.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an address of the other way, and for one of a network without a token. A path that
    /// is none is told by [`Socket::failure`].
    pub fn add(&mut self, address: Address) -> Result<()> {
        if address.way() != self.way {
            return Err(Error::new(Kind::InvalidConfig, "transfer socket")
                .at(format!("{address}: an address of another fabric"))
                .hint("an end has receivers of one fabric: shared memory or TCP"));
        }
        self.hub.add(address)
    }

    /// Connects to a receiver no longer. A connection to it is lost.
    pub fn remove(&mut self, address: &Address) {
        self.hub.remove(address);
    }

    /// The memory that rows are sent from.
    pub fn memory(&self) -> &SendMemory {
        &self.memory
    }
}

impl Socket for SocketSender {
    fn failure(&mut self) -> Option<Error> {
        self.hub.failure()
    }

    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.hub.descriptors()
    }

    fn due(&self) -> Duration {
        self.hub.due()
    }
}

impl Fabric for SocketSender {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }

    fn why_lost(&mut self, link: u32) -> Option<Error> {
        self.hub.why_lost(link)
    }
}

impl Source for SocketSender {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.memory.planes().read(self.memory.map(), origin, run, into)
    }
}

impl SenderFabric for SocketSender {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let mut rows = Vec::new();
        // Over shared memory the receiver reads them by itself.
        if self.way == Way::Tcp {
            runs.each(|told| {
                self.memory.planes().find(self.memory.map().len(), told.origin, &told.run)?;
                rows.try_reserve(1).map_err(|_| Error::new(Kind::OutOfMemory, "transfer connection"))?;
                rows.push((told.origin, told.run));
                Ok(())
            })?;
        }
        self.hub.send(link, frame, &rows)
    }

    fn write(&mut self, link: u32, _: u64, _: Fence, _: &Runs<'_>) -> Result<()> {
        Err(Error::new(Kind::Unsupported, "write from afar").with("link", link))
    }
}
