//! Ranks that come back to their group.
//!
//! A process that is started again calls [`Links::meet`], as if the group began. Its rank is free, because the system
//! released the lock when the last process ended. The others call [`Links::readmit`], in which they do what ranks do
//! that meet: a rank connects to the lower ones that it has lost, and listens for the higher ones. So several ranks
//! that died at once find each other and the rest, and none has to know that it was started again. Each waits for the
//! whole group, for as long as [`Limits::hello`](super::Limits::hello) says. A process that was only stopped for too
//! long has lost the others in turn, so it calls [`Links::readmit`] too.
//!
//! **Who is taken in.** A rank that was lost here, with the group, model and plan of all, and with the *content* that
//! the rank had before: others go on with what they have of it. A process of a rank whose end was not noticed yet waits
//! at the door until it is.
//!
//! **Bounds.** At most 16 connections wait to say hello, each for [`Limits::lost`](super::Limits::lost). An error costs
//! the connection that it is of, and nothing else.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::joining::Joining;
use super::links::{Links, PAUSE};
use super::seat::OPERATION;
use super::session::Limits;
use crate::error::{Error, Kind, Result};
use crate::os;

impl Links {
    /// Looks whether a rank that was lost has come back, for at most `at_most`; zero looks once and never waits.
    /// Returns the rank, whose session goes on from then on; the lowest first where several are there. `None` if none
    /// has come, and at once if none was lost. What other ranks say meanwhile, [`Links::event`] returns later.
    ///
    /// What is still kept of the rank's last process is dropped, also that it was lost, if that was not told yet.
    ///
    /// # Errors
    /// Those of a connection that is refused, with its rank, or with its process before it has said hello:
    /// [`Kind::InvalidConfig`] for another group, model, plan or content, [`Kind::TimedOut`] for one that says no
    /// hello, [`Kind::PeerLost`] for one that ends before it, and those of [`super::Link::new`]. [`Kind::Io`] for a
    /// folder that takes no socket any more; [`Kind::OsRefused`]. The other sessions, and later calls, go on.
    pub fn readmit(&mut self, at_most: Duration) -> Result<Option<u32>> {
        let start = Instant::now();
        let found = loop {
            match self.look() {
                Ok(None) if !self.lost.is_empty() || !self.door.is_empty() => {}
                found => break found,
            }
            let left = at_most.saturating_sub(start.elapsed());
            if left.is_zero() {
                break Ok(None);
            }
            if let Err(error) = self.pause(left.min(PAUSE)) {
                break Err(error);
            }
        };
        if self.lost.keys().all(|rank| *rank < self.own.rank) {
            for socket in self.door.shut() {
                // One that is refused finds the connection closed, and meets again.
                let _ = self.keep((None, socket));
            }
        }
        found
    }

    /// Takes a socket that the caller has connected to a process that may be of a lost rank, for [`Links::readmit`].
    ///
    /// # Errors
    /// Those of [`super::Link::new`]; [`Kind::Exhausted`] where 16 connections have still to say hello.
    pub fn offer(&mut self, socket: UnixStream) -> Result<()> {
        self.keep((None, socket))
    }

    fn keep(&mut self, connection: (Option<u32>, UnixStream)) -> Result<()> {
        let limits = Limits { hello: self.limits.lost, ..self.limits };
        self.door.keep(Joining::new(connection, self.own, limits, &self.faults)?)
    }

    /// Looks once.
    fn look(&mut self) -> Result<Option<u32>> {
        let own = self.own.rank;
        if let Some(seat) = &self.seat {
            let lower = self.lost.keys().copied().take_while(|rank| *rank < own);
            let higher = self.lost.keys().any(|rank| *rank > own);
            for connection in self.door.look(seat, lower, higher)? {
                self.keep(connection)?;
            }
        }
        let lost = &self.lost;
        let found = self.door.next(|rank| lost.contains_key(&rank), self.limits.lost)?;
        let Some((theirs, link)) = found else { return Ok(None) };
        let rank = theirs.rank;
        if self.holds.get(&rank).is_some_and(|held| *held != theirs.content) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("a process with another content than its rank had")
                .with("rank", rank)
                .with("group", theirs.group)
                .hint("start a rank again with the weights that its group uses now"));
        }
        self.lost.remove(&rank);
        self.early.forget(rank);
        self.aside.forget(rank);
        self.links.insert(rank, link);
        self.returned.insert(rank);
        Ok(Some(rank))
    }

    /// Serves the sessions until something comes to the door, for at most `at_most`.
    fn pause(&mut self, at_most: Duration) -> Result<()> {
        let open = self.links.values().filter(|link| !link.is_over()).map(|link| link.awaited());
        let sockets: Vec<_> = open.chain(self.door.awaited()).collect();
        os::wait(&sockets, at_most, &*self.faults)?;
        self.pump();
        Ok(())
    }
}
