//! The sessions of one process with all others of its group, and how they find each other.
//!
//! [`Links::meet`] needs a folder that all of them can write. Each process takes its rank there, listens on a socket
//! that is named after group and rank, connects to all lower ranks, and takes the connections of all higher ones. So
//! the processes can start in any order, and several groups can meet in one folder. The sockets are removed when all
//! have met; one that a killed process left behind is replaced. An engine that has connected its processes already
//! passes the sockets ([`Links::over`]). [`Links::event`] then serves all sessions from one thread.
//!
//! **States.** A session whose other side dies, or breaks the protocol, is *lost*: [`Links::event`] returns its error
//! once, and goes on serving the others. [`Links::lost`] has the errors.
//!
//! **Costs.** A process that has to wait for lower ranks looks for them a thousand times a second. After that it sleeps
//! until something arrives or is due. It keeps what a rank says before all have met, at most 1 MiB and 16 descriptors
//! of each; a rank that says more is an error.
//!
//! **Processes that end while a group meets.** Another one may follow, so [`Links::meet`] drops what such a process
//! said and waits for its rank again, within the same time. The sessions with the others go on: a meeting that failed
//! would end them, and take the meetings of others with it. A process that lives and closes a second session behind its
//! hello refuses this one, as one that has other weights; that ends the meeting.
//!
//! **Ranks that come back.** A process that is started again meets its group as any does. The others go on meeting the
//! ranks that they have lost ([`Links::readmit`]). So a process need not know whether it is the first of its rank.
//!
//! **What it does not do.** It compares what ranks hold only when one comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::ended::Ended;
use super::hello::{Digest, Hello};
use super::joining::{Door, Joining, of_rank};
use super::kept::Kept;
use super::link::Link;
use super::seat::{OPERATION, Seat};
use super::session::{Event, Limits};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults};
use crate::sync::Arc;
use crate::text::echo;

/// How long a process waits before it looks again for those that have not come yet.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// A moment in the life of some [`Links`].
#[derive(Debug)]
pub(crate) struct Mark {
    sessions: Arc<()>,
    losses: u64,
}

/// The sessions of a process with all others of its group.
#[derive(Debug)]
pub struct Links {
    /// Before the sessions, so that nothing is connected to when they end.
    pub(super) door: Door,
    pub(super) own: Hello,
    pub(super) limits: Limits,
    /// By rank; without those that were lost.
    pub(super) links: BTreeMap<u32, Link>,
    /// Why the others were lost.
    pub(super) lost: BTreeMap<u32, Error>,
    /// What each rank that has met this one holds.
    pub(super) holds: BTreeMap<u32, Digest>,
    /// The ranks that have come back, until they are given what others had before.
    pub(super) returned: BTreeSet<u32>,
    /// How many sessions were lost, also of ranks that have come back, and the rank of the last one.
    losses: (u64, u32),
    /// Which sessions these are, for [`Mark`].
    name: Arc<()>,
    /// What arrived before all had met; [`Links::event`] returns it first.
    pub(super) early: Kept,
    /// What was received and is to be returned later.
    pub(super) aside: Kept,
    /// The rank whose session [`Links::event`] looks at first.
    turn: u32,
    pub(super) faults: Arc<dyn Faults>,
    /// This process's rank, as long as the sessions live. Behind them, so that it is given back last.
    pub(super) seat: Option<Seat>,
}

impl Links {
    /// Meets the other `own.ranks - 1` processes of the group in `folder`. Blocks until all hellos have been accepted,
    /// for at most [`Limits::hello`]: ranks fill their weights before they meet, so set it to how far apart they may
    /// be done. A process that ends meanwhile is waited for again, in the same time. This process keeps its rank in
    /// that folder until the sessions are dropped.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] with the lowest rank that did not come, or ended and did not come again, and why it ended;
    /// [`Kind::PeerLost`] for a process that said hello and closed the connection twice (one of another process
    /// namespace is waited for); [`Kind::Busy`] for a second process of this rank; [`Kind::Io`] for a folder that takes
    /// no lock or no socket; those of [`Link::new`] and [`Link::event`], such as [`Kind::InvalidConfig`] for a process
    /// with another plan; [`Kind::Exhausted`] for a rank that says more than can be kept until all have met. They name
    /// the rank, or the process if it has connected without a hello.
    pub fn meet(
        folder: impl AsRef<Path>,
        own: Hello,
        limits: Limits,
        faults: Arc<dyn Faults>,
    ) -> Result<Links> {
        own.check()?;
        let folder = folder.as_ref();
        let seat = Seat::take(folder, &own)?;
        let listener = seat.listen()?;
        let connections = |here: &dyn Fn(u32) -> bool| {
            let mut sockets = Vec::new();
            for rank in (0..own.rank).filter(|rank| !here(*rank)) {
                if let Some(socket) = seat.connected(rank)? {
                    sockets.push((Some(rank), socket));
                }
            }
            while let Some(socket) = listener.next()? {
                sockets.push((None, socket));
            }
            Ok(sockets)
        };
        let hint = "start all ranks of the group with the same folder";
        let mut links = Links::joined((own, limits), faults, hint, connections, Ended::new(true))?;
        links.seat = Some(seat);
        Ok(links)
    }

    /// The same over sockets that the caller has connected, one to each other process of the group, in any order.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for another number of sockets; [`Kind::PeerLost`] for a process that ends, because no
    /// other one can follow it; otherwise as [`Links::meet`].
    pub fn over(
        sockets: Vec<UnixStream>,
        own: Hello,
        limits: Limits,
        faults: Arc<dyn Faults>,
    ) -> Result<Links> {
        own.check()?;
        if sockets.len() as u64 + 1 != u64::from(own.ranks) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("sockets")
                .with("sockets", sockets.len() as u64)
                .with("rank", own.rank)
                .with("ranks", own.ranks)
                .hint("pass one socket to each other process of the group"));
        }
        let mut sockets = Some(sockets.into_iter().map(|socket| (None, socket)).collect());
        let hint = "see what that rank waits for, or allow more time";
        let connections = |_: &dyn Fn(u32) -> bool| Ok(sockets.take().unwrap_or_default());
        Links::joined((own, limits), faults, hint, connections, Ended::new(false))
    }

    /// Takes connections until all ranks have said hello. `connections` is told which ranks are here.
    fn joined(
        (own, limits): (Hello, Limits),
        faults: Arc<dyn Faults>,
        hint: &'static str,
        mut connections: impl FnMut(&dyn Fn(u32) -> bool) -> Result<Vec<(Option<u32>, UnixStream)>>,
        mut ended: Ended,
    ) -> Result<Links> {
        let start = Instant::now();
        let mut links = Links {
            own,
            limits,
            links: BTreeMap::new(),
            lost: BTreeMap::new(),
            holds: BTreeMap::new(),
            returned: BTreeSet::new(),
            losses: (0, 0),
            name: Arc::new(()),
            early: Kept::default(),
            aside: Kept::default(),
            turn: 0,
            faults,
            door: Door::default(),
            seat: None,
        };
        // One deadline for all, which names the rank; a session by itself does not know whose hello is missing.
        let session = Limits { hello: Duration::MAX, ..limits };
        let mut joining: Vec<Joining> = Vec::new();
        loop {
            let here =
                |rank| links.links.contains_key(&rank) || joining.iter().any(|one| one.rank == Some(rank));
            for connection in connections(&here)? {
                joining.push(Joining::new(connection, own, session, &links.faults)?);
            }
            joining = links.greet(joining, &mut ended)?;
            // All have met, also where one has ended since: the sessions tell that.
            let Some(missing) = links.missing() else { return Ok(links) };
            links.early(&mut ended)?;
            if start.elapsed() >= limits.hello {
                let error = Error::new(Kind::TimedOut, OPERATION)
                    .with("rank", missing)
                    .with("ranks", own.ranks)
                    .with("group", own.group);
                return Err(match ended.why(missing) {
                    None => error.at("a process that did not come").hint(hint),
                    Some(why) => error
                        .at(format!("a process that ended and did not come again: {}", echo(why.place())))
                        .hint("see why that rank ended or refuses this one, and start it again"),
                });
            }
            let sockets: Vec<_> = joining.iter().map(|one| one.link.awaited()).collect();
            os::wait(&sockets, PAUSE, &*links.faults)?;
        }
    }

    /// Takes those into the group whose hello has arrived, and returns the others.
    fn greet(&mut self, joining: Vec<Joining>, ended: &mut Ended) -> Result<Vec<Joining>> {
        let mut waiting = Vec::new();
        for mut one in joining {
            let theirs = match one.hello() {
                Ok(Some(theirs)) => theirs,
                Ok(None) => {
                    waiting.push(one);
                    continue;
                }
                Err(error) => {
                    ended.note(one.rank, &one.link, error)?;
                    continue;
                }
            };
            if self.links.contains_key(&theirs.rank) {
                // The first process may have ended, and this one follow it.
                self.early(ended)?;
            }
            if self.links.contains_key(&theirs.rank) {
                return Err(Error::new(Kind::InvalidConfig, OPERATION)
                    .at("two processes of one rank")
                    .with("rank", theirs.rank)
                    .with("group", theirs.group)
                    .hint("give each process of a group a rank of its own"));
            }
            self.links.insert(theirs.rank, one.link);
            self.holds.insert(theirs.rank, theirs.content);
        }
        Ok(waiting)
    }

    /// Keeps the sessions alive while others are missing, and what they say.
    fn early(&mut self, ended: &mut Ended) -> Result<()> {
        for rank in self.links.keys().copied().collect::<Vec<_>>() {
            while let Some(link) = self.links.get_mut(&rank) {
                let error = match link.event(Duration::ZERO) {
                    Ok(Some(event)) => {
                        self.early.push(rank, event)?;
                        continue;
                    }
                    // One that said its end and has gone is met by no process that comes now.
                    Ok(None) if link.is_over() && ended.is_followed() => {
                        Error::new(Kind::PeerLost, OPERATION).at("it said that it ends")
                    }
                    Ok(None) => break,
                    Err(error) => error,
                };
                ended.note(Some(rank), link, of_rank(error, rank))?;
                // The process that follows says all anew.
                self.links.remove(&rank);
                self.holds.remove(&rank);
                self.early.forget(rank);
            }
        }
        Ok(())
    }

    /// The lowest rank that has not come yet.
    fn missing(&self) -> Option<u32> {
        (0..self.own.ranks).find(|rank| *rank != self.own.rank && !self.links.contains_key(rank))
    }

    /// This process's own hello.
    pub const fn own(&self) -> &Hello {
        &self.own
    }

    /// The session with `rank`; none for one's own rank, for those that the group does not have, and for lost ones.
    pub fn link(&self, rank: u32) -> Option<&Link> {
        self.links.get(&rank)
    }

    /// The ranks whose sessions have failed, and why, in the order of ranks. [`Links::event`] has returned each of
    /// these errors once, or will, or the call that was waiting for that rank has.
    pub fn lost(&self) -> impl Iterator<Item = (u32, &Error)> {
        self.lost.iter().map(|(rank, error)| (*rank, error))
    }

    /// Ends the session with a rank that failed, unless it had failed before. The other side finds the connection
    /// closed.
    pub(crate) fn lose(&mut self, rank: u32, error: Error) -> Error {
        let error = of_rank(error, rank);
        if self.links.remove(&rank).is_none() {
            return error;
        }
        self.returned.remove(&rank);
        self.losses = (self.losses.0 + 1, rank);
        self.lost.insert(rank, error.clone());
        error
    }

    /// This moment, for [`Links::lost_since`].
    pub(crate) fn mark(&self) -> Mark {
        Mark { sessions: Arc::clone(&self.name), losses: self.losses.0 }
    }

    /// Whether the mark is of these sessions, and not of others of the same group.
    pub(crate) fn made(&self, mark: &Mark) -> bool {
        Arc::ptr_eq(&self.name, &mark.sessions)
    }

    /// The last rank that was lost since then, if one was; it may have come back.
    pub(crate) fn lost_since(&self, mark: &Mark) -> Option<u32> {
        (self.losses.0 > mark.losses).then_some(self.losses.1)
    }

    /// Notes that a rank is given what others have, as it waits for. Returns whether it had come back.
    pub(crate) fn attach(&mut self, rank: u32) -> bool {
        self.returned.remove(&rank)
    }

    /// The lowest rank that has come back ([`Links::readmit`]) and was not given what others have. Until then
    /// [`Links::event`] would return what it says first, which the call that gives it takes.
    pub fn unattached(&self) -> Option<u32> {
        self.returned.first().copied()
    }

    /// The ranks that are lost, and those that have come back and were not given what others have.
    pub(crate) fn absent(&self) -> Vec<u32> {
        self.lost.keys().chain(&self.returned).copied().collect()
    }

    /// Notes what this rank and the others hold from now on. Ranks that come back have to hold the same. Those at the
    /// door were told otherwise: their connections end, and the meeting that they are in connects again.
    pub(crate) fn renew(&mut self, content: impl Fn(u32) -> Digest) {
        self.door = Door::default();
        self.own.content = content(self.own.rank);
        self.holds.iter_mut().for_each(|(rank, held)| *held = content(*rank));
    }

    /// Queues a message for `rank`, as [`Link::send`].
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for one's own rank and for one that the group does not have; the error of a lost rank;
    /// those of [`Link::send`]. All name the rank.
    pub fn send(&mut self, rank: u32, message: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let none = || {
            let unknown = Error::new(Kind::OutOfRange, "send to a rank").with("rank", rank);
            self.lost.get(&rank).cloned().unwrap_or(unknown.with("ranks", self.own.ranks))
        };
        let link = self.links.get_mut(&rank).ok_or_else(none)?;
        link.send(message, descriptor).map_err(|error| of_rank(error, rank))
    }

    /// Queues this side's end in every session.
    ///
    /// # Errors
    /// As [`Link::end`], with the rank.
    pub fn end(&mut self) -> Result<()> {
        // No rank is attached any more.
        self.returned.clear();
        self.links.iter_mut().try_for_each(|(rank, link)| link.end().map_err(|error| of_rank(error, *rank)))
    }

    /// Whether every session is over, or was lost.
    pub fn is_over(&self) -> bool {
        self.links.values().all(Link::is_over)
    }

    /// Keeps an event that [`Links::event`] has returned and that a later call of this library takes, such as
    /// `weights::Update::share`. It has a bound, in bytes and descriptors of each rank.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] for a rank of which too much is kept; it is lost then.
    pub fn set_aside(&mut self, rank: u32, event: Event<OwnedFd>) -> Result<()> {
        self.aside.push(rank, event).map_err(|error| self.lose(rank, error))
    }

    /// Keeps the error of a rank that was lost, which [`Links::event`] has returned, until [`Links::put_back`].
    pub(crate) fn set_loss_aside(&mut self, rank: u32, error: Error) {
        self.aside.push_loss(rank, error);
    }

    /// Lets [`Links::event`] return first what was set aside.
    pub(crate) fn put_back(&mut self) {
        self.early.prepend(std::mem::take(&mut self.aside));
    }

    /// Sends what was queued for `ranks`, and sets aside what arrives meanwhile.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] after `at_most`, with the rank that takes nothing; those of [`Links::serve`].
    pub(crate) fn flush(&mut self, ranks: &[u32], at_most: Duration) -> Result<()> {
        let start = Instant::now();
        while let Some(rank) = self.unsent(ranks) {
            let left = at_most.saturating_sub(start.elapsed());
            if left.is_zero() {
                let error = Error::new(Kind::TimedOut, "send to a rank").at("a rank that takes no messages");
                return Err(error.with("rank", rank));
            }
            self.serve(left.min(PAUSE))?;
        }
        Ok(())
    }

    /// One of `ranks` for which something waits to be sent.
    fn unsent(&self, ranks: &[u32]) -> Option<u32> {
        let waits = |rank: &u32| self.links.get(rank).is_some_and(|link| link.awaited().1);
        ranks.iter().copied().find(waits)
    }

    /// Sets aside all that has arrived, and which ranks were lost. Never waits.
    ///
    /// # Errors
    /// As [`Links::serve`].
    pub(crate) fn settle(&mut self) -> Result<()> {
        while self.serve(Duration::ZERO)? {}
        Ok(())
    }

    /// Sets aside what arrives for at most `at_most`, one event, or which rank is lost. Returns whether anything was.
    ///
    /// # Errors
    /// Those of [`Links::event`] that have no rank.
    fn serve(&mut self, at_most: Duration) -> Result<bool> {
        let (rank, error) = match self.event(at_most) {
            Ok(None) => return Ok(false),
            Ok(Some((rank, event))) => match self.set_aside(rank, event) {
                Ok(()) => return Ok(true),
                Err(error) => (rank, error),
            },
            Err(error) => match error.number("rank").and_then(|rank| u32::try_from(rank).ok()) {
                Some(rank) => (rank, error),
                None => return Err(error),
            },
        };
        self.set_loss_aside(rank, error);
        Ok(true)
    }

    /// Takes at most one event of each session, for [`Links::event`] to return later, and keeps the sessions alive.
    pub(super) fn pump(&mut self) {
        for rank in self.links.keys().copied().collect::<Vec<_>>() {
            let Some(link) = self.links.get_mut(&rank) else { continue };
            let kept = match link.event(Duration::ZERO) {
                Ok(None) => Ok(()),
                Ok(Some(event)) => self.early.push(rank, event),
                Err(error) => Err(error),
            };
            if let Err(error) = kept {
                let error = self.lose(rank, error);
                self.early.push_loss(rank, error);
            }
        }
    }

    /// The next event of any session, with its rank; `None` if there is none for `at_most`, or if all are over or lost.
    /// Call it as often as [`Link::event`].
    ///
    /// # Errors
    /// Those of [`Link::event`], with the rank. Such a session is lost: its error is returned once and stays in
    /// [`Links::lost`], its connection is closed, and later calls serve the others. [`Kind::OsRefused`] and
    /// [`Kind::OutOfMemory`] without a rank from waiting for all; no session is lost then.
    pub fn event(&mut self, at_most: Duration) -> Result<Option<(u32, Event<OwnedFd>)>> {
        if let Some((rank, event)) = self.early.pop() {
            return event.map(|event| Some((rank, event)));
        }
        let start = Instant::now();
        loop {
            // Each in turn, so that one that never stops talking does not silence the others.
            let (before, from): (Vec<u32>, Vec<u32>) = self.links.keys().partition(|rank| **rank < self.turn);
            for rank in from.into_iter().chain(before) {
                let Some(link) = self.links.get_mut(&rank) else { continue };
                let event = match link.event(Duration::ZERO) {
                    Ok(None) => continue,
                    Ok(Some(event)) => Ok(Some((rank, event))),
                    Err(error) => Err(self.lose(rank, error)),
                };
                self.turn = rank + 1;
                return event;
            }
            let left = at_most.saturating_sub(start.elapsed());
            let open: Vec<&Link> = self.links.values().filter(|link| !link.is_over()).collect();
            if left.is_zero() || open.is_empty() {
                return Ok(None);
            }
            let due = open.iter().map(|link| link.due()).min().unwrap_or(left);
            let sockets: Vec<_> = open.iter().map(|link| link.awaited()).collect();
            os::wait(&sockets, due.min(left), &*self.faults)?;
        }
    }
}
