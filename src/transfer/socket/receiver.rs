//! A receiver's end over sockets.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric};
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::Where;
use crate::transfer::runs::Run;
use crate::transfer::socket::Socket;
use crate::transfer::socket::address::{Address, Way};
use crate::transfer::socket::hub::Hub;
use crate::transfer::socket::options::Options;
use crate::transfer::socket::rows::Cursor;

/// A receiver's end over TCP or shared memory. What came behind a notice over TCP can be fetched until the next poll. A
/// sender's memory is mapped for as long as its connection lives, once the system has said that it is a memfd of fixed
/// size.
#[derive(Debug)]
pub struct SocketReceiver {
    hub: Hub,
    way: Way,
    /// Over TCP: where the next run of the last notice is.
    cursor: Cursor,
}

impl SocketReceiver {
    /// An end that listens at `address`. Of port 0 the system chooses the port. A file that a killed process left at a
    /// path is replaced.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other, and for an address of a network without a token;
    /// [`Kind::Busy`] where another process listens, or the path is no socket; [`Kind::OsRefused`].
    pub fn bind(options: Options, address: &Address) -> Result<SocketReceiver> {
        let way = address.way();
        Ok(SocketReceiver { hub: Hub::receiver(way, options, address)?, way, cursor: Cursor::default() })
    }

    /// Where it listens.
    pub fn address(&self) -> Option<Address> {
        self.hub.listener()?.address()
    }

    /// The bytes of memory in which things wait that have come. Senders' memory is not counted.
    pub fn kept(&self) -> usize {
        self.hub.kept()
    }
}

impl Socket for SocketReceiver {
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

impl Fabric for SocketReceiver {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.cursor = Cursor::default();
        self.hub.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.hub.close(link);
    }

    fn why_lost(&mut self, link: u32) -> Option<Error> {
        self.hub.why_lost(link)
    }
}

impl ReceiverFabric for SocketReceiver {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.hub.send(link, frame, &[])
    }

    fn fetch(&mut self, link: u32, _: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let Where::Origin { origin, nth } = at else {
            return Err(Error::new(Kind::Unsupported, "landing pages").with("link", link));
        };
        if self.way == Way::Tcp {
            into.copy_from_slice(self.cursor.find(self.hub.rows(link), nth, into.len())?);
            return Ok(());
        }
        let lost = || Error::new(Kind::PeerLost, "transfer connection").with("link", link);
        let (map, planes) = self.hub.adopted(link).ok_or_else(lost)?;
        planes.read(map, origin, run, into)
    }

    fn holds(&mut self, link: u32) -> bool {
        self.way == Way::Tcp || self.hub.is_held(link)
    }
}
