//! Connections on their way into a group: those that have not said hello, and those whose rank has not ended here yet.
//!
//! While a group meets, every connection matters and an error of one ends the meeting. Ranks that come back are another
//! matter: the group serves meanwhile, so the *door* ([`Door`]) keeps few connections, each for a bounded time, and
//! an error costs the connection alone.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::hello::Hello;
use super::link::Link;
use super::seat::{Listener, OPERATION, Seat};
use super::session::{Event, Limits};
use crate::error::{Error, Kind, Result};
use crate::os::Faults;
use crate::sync::Arc;

/// The most connections that a door keeps; further ones wait in the system's queue.
const COMING_MAX: usize = 16;

/// The error with its rank.
pub(super) fn of_rank(error: Error, rank: u32) -> Error {
    if error.number("rank").is_some() { error } else { error.with("rank", rank) }
}

/// A connection whose other side has not said hello.
#[derive(Debug)]
pub(super) struct Joining {
    /// The rank that was connected to, if it was this side that did.
    pub rank: Option<u32>,
    pub link: Link,
}

impl Joining {
    /// Begins a session over a connection, as [`Link::new`].
    ///
    /// # Errors
    /// As [`Link::new`], with the rank where this side connected.
    pub fn new(
        (rank, socket): (Option<u32>, UnixStream),
        own: Hello,
        limits: Limits,
        faults: &Arc<dyn Faults>,
    ) -> Result<Joining> {
        let link = Link::new(socket, own, limits, Arc::clone(faults)).map_err(|error| match rank {
            Some(rank) => of_rank(error, rank),
            None => error,
        })?;
        Ok(Joining { rank, link })
    }

    /// The other side's hello, once it has arrived and was accepted. Never blocks.
    ///
    /// # Errors
    /// As [`Link::event`], with the rank, or with the process where that is not known.
    pub fn hello(&mut self) -> Result<Option<Hello>> {
        let event = self.link.event(Duration::ZERO).map_err(|error| match self.rank {
            Some(rank) => of_rank(error, rank),
            None if error.number("rank").is_some() => error,
            None => error.with("process", self.link.credentials().process.unsigned_abs()),
        })?;
        // A session's first event is the hello.
        Ok(event.and_then(|event| if let Event::Hello(theirs) = event { Some(theirs) } else { None }))
    }
}

/// A connection at the door.
#[derive(Debug)]
struct Coming {
    joining: Joining,
    since: Instant,
    /// Its hello. It waits until the session with that rank's last process has failed here too.
    theirs: Option<Hello>,
}

/// Where the processes of lost ranks come back.
#[derive(Debug, Default)]
pub(super) struct Door {
    listener: Option<Listener>,
    coming: Vec<Coming>,
}

impl Door {
    /// Whether a connection is at the door.
    pub fn is_empty(&self) -> bool {
        self.coming.is_empty()
    }

    /// Looks in the folder as ranks do that meet: connects to those of `lower` that listen, and takes the connections
    /// of higher ones while one of these is `awaited`.
    ///
    /// # Errors
    /// [`Kind::Io`] for a folder that takes no socket.
    pub fn look(
        &mut self,
        seat: &Seat,
        lower: impl Iterator<Item = u32>,
        awaited: bool,
    ) -> Result<Vec<(Option<u32>, UnixStream)>> {
        let mut sockets = Vec::new();
        if awaited && self.listener.is_none() {
            self.listener = Some(seat.listen()?);
        }
        for rank in lower {
            if self.coming.iter().all(|one| one.joining.rank != Some(rank))
                && let Some(socket) = seat.connected(rank)?
            {
                sockets.push((Some(rank), socket));
            }
        }
        while let Some(listener) = &self.listener
            && self.coming.len() + sockets.len() < COMING_MAX
            && let Some(socket) = listener.next()?
        {
            sockets.push((None, socket));
        }
        Ok(sockets)
    }

    /// Listens no longer, until the next look. Returns the processes that have connected meanwhile: their ranks may be
    /// some whose end is noticed only later.
    pub fn shut(&mut self) -> Vec<UnixStream> {
        self.listener.take().map(Listener::shut).unwrap_or_default()
    }

    /// Keeps a connection at the door.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] if the door has as many as it keeps.
    pub fn keep(&mut self, joining: Joining) -> Result<()> {
        if self.coming.len() >= COMING_MAX {
            let error = Error::new(Kind::Exhausted, OPERATION).at("connections that have not said hello");
            return Err(error.with("connections", COMING_MAX as u64));
        }
        self.coming.push(Coming { joining, since: Instant::now(), theirs: None });
        Ok(())
    }

    /// The first connection whose process says that it is one of the ranks that `is_lost`.
    ///
    /// # Errors
    /// As [`Joining::hello`]; [`Kind::TimedOut`] for a connection that has been at the door for `at_most`. It is closed
    /// then, and the next call looks at the others. A process that this side connected to and that ended before its
    /// hello is no error: the next look connects to the one that follows it.
    pub fn next(
        &mut self,
        is_lost: impl Fn(u32) -> bool,
        at_most: Duration,
    ) -> Result<Option<(Hello, Link)>> {
        let mut at = 0;
        while let Some(Coming { joining, since, theirs }) = self.coming.get_mut(at) {
            if theirs.is_none() {
                match joining.hello() {
                    Ok(hello) => *theirs = hello,
                    Err(error) => {
                        let ended = joining.rank.is_some() && error.kind() == Kind::PeerLost;
                        self.coming.remove(at);
                        if ended {
                            continue;
                        }
                        return Err(error);
                    }
                }
            }
            let here = at;
            at += 1;
            let Some(theirs) = *theirs else { continue };
            let late = since.elapsed() >= at_most;
            if is_lost(theirs.rank) {
                let Coming { joining, .. } = self.coming.remove(here);
                return Ok(Some((theirs, joining.link)));
            }
            if late {
                self.coming.remove(here);
                return Err(Error::new(Kind::TimedOut, OPERATION)
                    .at("a second process of a rank that has not ended")
                    .with("rank", theirs.rank)
                    .with("group", theirs.group));
            }
        }
        Ok(None)
    }

    /// The sockets of connections that have still to say hello, and whether something waits to be sent there.
    pub fn awaited(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool)> {
        self.coming.iter().filter(|one| one.theirs.is_none()).map(|one| one.joining.link.awaited())
    }
}
