//! A session over a Unix stream socket, with the system's clock.
//!
//! [`Link::event`] does all the work: it sends what waits, receives, watches the time, and returns the next event. A
//! program calls it at least once in every [`Limits::interval`], for example from a thread of its own; a process that
//! calls it less often seems dead to the other side. [`Link::send`] only queues.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::frame::FRAME_MAX;
use super::hello::Hello;
use super::session::{Event, Limits, Session};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Credentials, Faults, Received};
use crate::sync::Arc;

/// The most bytes of one call of the system.
const CHUNK: usize = 1 << 14;
/// The most such pieces that a call reads when its time is over: the longest frame, and what follows it.
const PIECES: usize = FRAME_MAX / CHUNK + 2;

/// A session with the process at the other end of a socket.
#[derive(Debug)]
pub struct Link {
    socket: UnixStream,
    session: Session<OwnedFd>,
    start: Instant,
    credentials: Credentials,
    faults: Arc<dyn Faults>,
}

impl Link {
    /// Begins a session over a connected socket. The first [`Link::event`] sends this side's hello.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a process of another user at the other end, for a rank that the group does not have,
    /// and for limits that contradict each other; [`Kind::OsRefused`].
    pub fn new(socket: UnixStream, own: Hello, limits: Limits, faults: Arc<dyn Faults>) -> Result<Link> {
        let credentials = os::credentials(&socket, &*faults)?;
        if credentials.user != os::user() {
            return Err(Error::new(Kind::InvalidConfig, "peer session")
                .at("a process of another user")
                .with("user", credentials.user)
                .with("own", os::user())
                .hint("run all processes of a group as one user"));
        }
        let session = Session::new(own, limits, Duration::ZERO)?;
        Ok(Link { socket, session, start: Instant::now(), credentials, faults })
    }

    /// The process at the other end.
    pub fn credentials(&self) -> Credentials {
        self.credentials
    }

    /// The other side's hello, once it was accepted.
    pub fn theirs(&self) -> Option<&Hello> {
        self.session.theirs()
    }

    /// Whether both sides have ended.
    pub fn is_over(&self) -> bool {
        self.session.is_over()
    }

    /// Queues a message, as [`Session::send`]; [`Link::event`] sends it.
    ///
    /// # Errors
    /// As [`Session::send`].
    pub fn send(&mut self, message: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        self.session.send(message, descriptor)
    }

    /// Queues this side's end.
    ///
    /// # Errors
    /// As [`Session::end`].
    pub fn end(&mut self) -> Result<()> {
        self.session.end()
    }

    /// Sends what waits, receives, and returns the next event; `None` if there is none for `at_most`, or if the session
    /// is over.
    ///
    /// # Errors
    /// The errors of [`Session::event`] and [`Session::tick`], which are final: [`Kind::PeerLost`] for a side that
    /// closed the connection or gave no sign of life, [`Kind::TimedOut`] for one that never said hello;
    /// [`Kind::OsRefused`].
    pub fn event(&mut self, at_most: Duration) -> Result<Option<Event<OwnedFd>>> {
        let until = self.start.elapsed().saturating_add(at_most);
        let mut late = 0;
        loop {
            if let Some(event) = self.session.event()? {
                return Ok(Some(event));
            }
            if self.session.is_over() {
                return Ok(None);
            }
            self.session.tick(self.start.elapsed())?;
            let sent = self.send_waiting();
            // Also after a send that was refused: the other side may have said its end before it closed.
            let learnt = self.receive()?;
            if learnt && let Some(event) = self.session.event()? {
                return Ok(Some(event));
            }
            if !learnt {
                sent?;
            }
            // Behind what was learnt more may be there, such as the end of the connection. But a side that only says
            // that it lives must not hold this one for good.
            let now = self.start.elapsed();
            late += usize::from(now >= until);
            if late > 0 && (!learnt || late >= PIECES) {
                return Ok(None);
            }
            if learnt {
                continue;
            }
            let (socket, at_most) = (self.awaited(), self.due().min(until.saturating_sub(now)));
            os::wait(&[socket], at_most, &*self.faults)?;
        }
    }

    /// The socket, and whether the session waits to send to it too.
    pub(super) fn awaited(&self) -> (BorrowedFd<'_>, bool) {
        (self.socket.as_fd(), self.session.outgoing().is_some())
    }

    /// How long [`Link::event`] has nothing to do, if nothing arrives.
    pub(super) fn due(&self) -> Duration {
        let due = self.session.due().unwrap_or(Duration::MAX);
        due.saturating_sub(self.start.elapsed())
    }

    /// Sends as much as the socket takes.
    fn send_waiting(&mut self) -> Result<()> {
        while let Some(outgoing) = self.session.outgoing() {
            let descriptor = outgoing.descriptor.map(AsFd::as_fd);
            match os::send(&self.socket, outgoing.bytes, descriptor, &*self.faults)? {
                0 => break,
                bytes => self.session.sent(bytes, self.start.elapsed()),
            }
        }
        Ok(())
    }

    /// Receives what is there, at most what the session has room for. Returns whether the session has learnt something.
    fn receive(&mut self) -> Result<bool> {
        let mut buffer = [0; CHUNK];
        let room = self.session.room().min(CHUNK);
        let received = buffer.get_mut(..room).map(|buffer| os::receive(&self.socket, buffer, &*self.faults));
        match received.transpose() {
            Ok(Some(Some(Received { bytes, descriptor }))) => {
                let bytes = buffer.get(..bytes).unwrap_or_default();
                let arrived = self.session.arrived(bytes, descriptor, self.start.elapsed());
                arrived.map(|()| true).map_err(|error| self.session.fail(error))
            }
            Ok(_) => Ok(false),
            Err(error) if error.kind() == Kind::PeerLost => self.session.closed().map(|()| true),
            // What the system has dropped never comes again.
            Err(error) => Err(self.session.fail(error)),
        }
    }
}
