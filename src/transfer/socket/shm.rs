//! Frames over a Unix socket, and rows from the sender's memory, which the receiver maps: for processes of one host.
//!
//! A sender hands over its memory once for each connection, to be read only. The receiver asks the system whether it is
//! a memfd whose size is fixed, of the size that was said, before it maps it. So no sender can end a receiver by making
//! its memory smaller. The receiver keeps the mapping as long as the connection. Rows are copied once, into the
//! receiver's checked memory.
//!
//! Both ends have to be processes of one user. Of a sender that has died the memory lives until its connection is lost.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::sync::Arc;
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use crate::transfer::memory::SendMemory;
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::Where;
use crate::transfer::runs::Run;
use crate::transfer::sender::Source;
use crate::transfer::socket::address::Address;
use crate::transfer::socket::hub::Hub;
use crate::transfer::socket::opening::{Way, told};
use crate::transfer::socket::options::Options;

/// A sender's end over shared memory, between processes of one host and user. Its receivers map its memory, to read
/// only.
#[derive(Debug)]
pub struct ShmSender {
    hub: Hub,
    memory: Arc<SendMemory>,
}

impl ShmSender {
    /// An end that shares `memory` with the receivers that listen at `paths`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other, and for more planes than fit a record;
    /// [`Kind::Unsupported`] for memory that is not shared; [`Kind::InvalidState`] for memory that other processes may
    /// write; [`Kind::OsRefused`].
    pub fn new(options: Options, memory: Arc<SendMemory>, paths: &[PathBuf]) -> Result<ShmSender> {
        // Each connection exports it again; what speaks against it shows here.
        memory.map().export(Protection::Read, &*options.faults)?;
        told(&memory)?;
        let hub = Hub::sender(Way::Shared, options, memory.clone())?;
        let mut sender = ShmSender { hub, memory };
        paths.iter().try_for_each(|path| sender.add(path))?;
        Ok(sender)
    }

    /// Connects to one more receiver. One that is there already is no error.
    ///
    /// # Errors
    /// None yet: a path that is none is told by [`ShmSender::failure`].
    pub fn add(&mut self, path: &Path) -> Result<()> {
        self.hub.add(Address::Unix(path.to_owned()))
    }

    /// Connects to a receiver no longer. A connection to it is lost.
    pub fn remove(&mut self, path: &Path) {
        self.hub.remove(&Address::Unix(path.to_owned()));
    }

    /// The memory that rows are sent from.
    pub fn memory(&self) -> &SendMemory {
        &self.memory
    }

    /// Why a connection was lost or did not open: the oldest reason that was not taken. A few are kept.
    pub fn failure(&mut self) -> Option<Error> {
        self.hub.failure()
    }

    /// What to wait on after a poll that gave none: sockets, and whether one waits to be sent to.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.hub.descriptors()
    }

    /// How long a poll has nothing to do if nothing happens at [`ShmSender::descriptors`].
    pub fn due(&self) -> Duration {
        self.hub.due()
    }

    /// Waits until there may be something to poll for, for at most a time.
    ///
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        self.hub.wait(at_most)
    }
}

impl Fabric for ShmSender {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }
}

impl Source for ShmSender {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.memory.planes().read(self.memory.map(), origin, run, into)
    }
}

impl SenderFabric for ShmSender {
    fn send(&mut self, link: u32, frame: &[u8], _: &Runs<'_>) -> Result<()> {
        self.hub.send(link, frame, &[])
    }

    fn write(&mut self, link: u32, _: u64, _: Fence, _: &Runs<'_>) -> Result<()> {
        Err(Error::new(Kind::Unsupported, "write from afar").with("link", link))
    }
}

/// A receiver's end over shared memory. It maps a sender's memory for as long as the connection lives, once the system
/// has said that it is a memfd of fixed size.
#[derive(Debug)]
pub struct ShmReceiver {
    hub: Hub,
}

impl ShmReceiver {
    /// An end that listens at `path`, in place of a socket that a killed process left there.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other; [`Kind::Busy`] where another process listens, or
    /// the path is no socket; [`Kind::OsRefused`].
    pub fn bind(options: Options, path: &Path) -> Result<ShmReceiver> {
        Ok(ShmReceiver { hub: Hub::receiver(Way::Shared, options, &Address::Unix(path.to_owned()))? })
    }

    /// As [`ShmSender::failure`].
    pub fn failure(&mut self) -> Option<Error> {
        self.hub.failure()
    }

    /// The bytes of memory in which things wait that have come. Senders' memory is not counted.
    pub fn kept(&self) -> usize {
        self.hub.kept()
    }

    /// As [`ShmSender::descriptors`].
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.hub.descriptors()
    }

    /// As [`ShmSender::due`].
    pub fn due(&self) -> Duration {
        self.hub.due()
    }

    /// As [`ShmSender::wait`].
    ///
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        self.hub.wait(at_most)
    }
}

impl Fabric for ShmReceiver {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }
}

impl ReceiverFabric for ShmReceiver {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.hub.send(link, frame, &[])
    }

    fn fetch(&mut self, link: u32, _: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let Where::Origin { origin, .. } = at else {
            return Err(Error::new(Kind::Unsupported, "landing pages").with("link", link));
        };
        let lost = || Error::new(Kind::PeerLost, "transfer connection").with("link", link);
        let (map, planes) = self.hub.adopted(link).ok_or_else(lost)?;
        planes.read(map, origin, run, into)
    }
}
