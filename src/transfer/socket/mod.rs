//! Fabrics over sockets of the system: TCP, and shared memory with a Unix socket for its frames ([`Way`]). A sender's
//! end is a [`SocketSender`], a receiver's a [`SocketReceiver`].
//!
//! **Who connects.** Receivers listen, and senders connect to the addresses that they are given, again with a growing
//! wait (1 to 200 ms) when no process listens or a connection is lost. Each end counts its connections by itself.
//!
//! **States of a connection.** It *opens*: both sides say hello and prove that they know the token, if there is one
//! (`opening`). It is open from [`Happened::Connected`](crate::transfer::fabric::Happened::Connected) on: frames go
//! both ways as records (`record`), each with its lengths before it. It is lost when a socket fails or is closed, when
//! the other end sends what no end sends, or when nothing has come from it for [`Options::lost`], or it has taken
//! nothing of what waits for it for as long. The event says why, and [`Socket::failure`] why one did not open.
//!
//! **Calls.** No call waits but [`Socket::wait`]. A [`thread`](crate::transfer::thread) polls until it gives none, and
//! then waits for [`Socket::descriptors`] for at most [`Socket::due`]. An end that is not polled for the other end's
//! [`Options::lost`] is lost to it.
//!
//! **Bounds.** A connection that is not open keeps at most one short record, and there are at most
//! [`Options::unopened`] of them, for at most [`Options::opening`]. An open one keeps at most one frame with
//! [`Options::rows_max`] bytes of rows, in a buffer that grows with what arrives, and at most [`Options::queue`] bytes
//! to send or one frame with its rows. Rows to send wait as places in the sender's memory. A length is checked before
//! a byte behind it is kept.
//!
//! **Costs.** A poll makes one call of the system for each connection, to receive, until something has happened. One
//! that finds nothing, and one of 8 others, also makes one to take connections and one for each that is not open.
//!
//! **What it does not do.** It starts no thread. It hides nothing and protects no byte against changes on its way: a
//! token says who opens a connection, and digests find what went wrong by accident. A tunnel does the rest.

mod address;
mod connection;
mod dial;
mod hub;
mod incoming;
mod opening;
mod options;
mod outgoing;
mod receiver;
mod record;
mod refusal;
mod rows;
mod sender;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::os::{self, NoFaults};

pub use address::{Address, Way};
pub use opening::VERSION;
pub use options::{Options, TOKEN_MIN, Token};
pub use receiver::SocketReceiver;
pub use sender::SocketSender;

/// What an end over sockets has besides: what to wait on, and what went wrong before a connection was there.
pub trait Socket {
    /// Why a connection did not open: the oldest reason that was not taken. A few are kept.
    fn failure(&mut self) -> Option<Error>;

    /// What to wait on after a poll that gave none: sockets, and whether one waits to be sent to.
    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)>;

    /// How long a poll has nothing to do if nothing happens at the descriptors.
    fn due(&self) -> Duration;

    /// Waits until there may be something to poll for, for at most a time.
    ///
    /// # Errors
    /// [`Kind::OsRefused`](crate::error::Kind::OsRefused).
    fn wait(&self, at_most: Duration) -> Result<()> {
        let at_most = at_most.min(self.due());
        match at_most.is_zero() {
            true => Ok(()),
            false => os::wait(&self.descriptors(), at_most, &NoFaults).map(drop),
        }
    }
}
