//! Frames and rows over TCP: between hosts, or between processes of one that share no memory.
//!
//! Rows go behind their notices, and stay at the receiver until they are fetched. Each byte of rows is copied by the
//! sender into the socket, and by the receiver out of it and into its checked memory.
//!
//! Without a token only addresses of this host (loopback) are taken. They are open to all users of the host: give a
//! token where those are not trusted. What goes over a network is neither hidden nor protected against changes; a
//! tunnel has to do that.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use crate::transfer::memory::SendMemory;
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::Where;
use crate::transfer::runs::Run;
use crate::transfer::sender::Source;
use crate::transfer::socket::address::{Address, Listener};
use crate::transfer::socket::hub::Hub;
use crate::transfer::socket::opening::Way;
use crate::transfer::socket::options::Options;
use crate::transfer::socket::rows::Cursor;

/// A sender's end over TCP, between hosts or between processes of one. Rows go behind their notices, read from the
/// sender's memory when the socket takes them.
#[derive(Debug)]
pub struct TcpSender {
    hub: Hub,
    memory: Arc<SendMemory>,
}

impl TcpSender {
    /// An end that sends rows from `memory` to the receivers that listen at `addresses`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other, and for an address of a network without a token.
    pub fn new(options: Options, memory: Arc<SendMemory>, addresses: &[SocketAddr]) -> Result<TcpSender> {
        let hub = Hub::sender(Way::Stream, options, memory.clone())?;
        let mut sender = TcpSender { hub, memory };
        addresses.iter().try_for_each(|address| sender.add(*address))?;
        Ok(sender)
    }

    /// Connects to one more receiver. One that is there already is no error.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for an address of a network without a token.
    pub fn add(&mut self, address: SocketAddr) -> Result<()> {
        self.hub.add(Address::Tcp(address))
    }

    /// Connects to a receiver no longer. A connection to it is lost.
    pub fn remove(&mut self, address: SocketAddr) {
        self.hub.remove(&Address::Tcp(address));
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

    /// How long a poll has nothing to do if nothing happens at [`TcpSender::descriptors`].
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

impl Fabric for TcpSender {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }
}

impl Source for TcpSender {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.memory.planes().read(self.memory.map(), origin, run, into)
    }
}

impl SenderFabric for TcpSender {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let mut rows = Vec::new();
        runs.each(|told| {
            self.memory.planes().find(self.memory.map().len(), told.origin, &told.run)?;
            rows.try_reserve(1).map_err(|_| Error::new(Kind::OutOfMemory, "transfer connection"))?;
            rows.push((told.origin, told.run));
            Ok(())
        })?;
        self.hub.send(link, frame, &rows)
    }

    fn write(&mut self, link: u32, _: u64, _: Fence, _: &Runs<'_>) -> Result<()> {
        Err(Error::new(Kind::Unsupported, "write from afar").with("link", link))
    }
}

/// A receiver's end over TCP. What came behind a notice can be fetched until the next poll.
#[derive(Debug)]
pub struct TcpReceiver {
    hub: Hub,
    /// Where the next run of the last notice is.
    cursor: Cursor,
}

impl TcpReceiver {
    /// An end that listens at `address`; of port 0 the system chooses the port.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other, and for an address of a network without a token;
    /// [`Kind::Busy`] where another process listens; [`Kind::OsRefused`].
    pub fn bind(options: Options, address: SocketAddr) -> Result<TcpReceiver> {
        let hub = Hub::receiver(Way::Stream, options, &Address::Tcp(address))?;
        Ok(TcpReceiver { hub, cursor: Cursor::default() })
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.hub.listener().and_then(Listener::address)
    }

    /// As [`TcpSender::failure`].
    pub fn failure(&mut self) -> Option<Error> {
        self.hub.failure()
    }

    /// The bytes of memory in which things wait that have come.
    pub fn kept(&self) -> usize {
        self.hub.kept()
    }

    /// As [`TcpSender::descriptors`].
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.hub.descriptors()
    }

    /// As [`TcpSender::due`].
    pub fn due(&self) -> Duration {
        self.hub.due()
    }

    /// As [`TcpSender::wait`].
    ///
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        self.hub.wait(at_most)
    }
}

impl Fabric for TcpReceiver {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.cursor = Cursor::default();
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }
}

impl ReceiverFabric for TcpReceiver {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.hub.send(link, frame, &[])
    }

    fn fetch(&mut self, link: u32, _: Fence, at: Where, _: &Run, into: &mut [u8]) -> Result<()> {
        let Where::Origin { nth, .. } = at else {
            return Err(Error::new(Kind::Unsupported, "landing pages").with("link", link));
        };
        let rows = self.cursor.find(self.hub.rows(link), nth, into.len())?;
        into.copy_from_slice(rows);
        Ok(())
    }
}
