//! The sessions of one process with all others of its group, and how they find each other.
//!
//! [`Links::meet`] needs a folder that all of them can write. Each process listens there on a socket that is named
//! after group and rank, connects to all lower ranks, and takes the connections of all higher ones. So the processes
//! can start in any order. The sockets are removed when all have met; one that a killed process left behind is
//! replaced. An engine that has connected its processes already passes the sockets ([`Links::over`]). [`Links::event`]
//! then serves all sessions from one thread.
//!
//! **Costs.** A process that has to wait for lower ranks looks for them a thousand times a second. After that it sleeps
//! until something arrives or is due.
//!
//! **What it does not do.** It takes no process in later: one that died is the error of its session, which names its
//! rank.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::hello::Hello;
use super::link::Link;
use super::session::{Event, Limits};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults, io_text};
use crate::sync::Arc;
use crate::text::echo;

/// The operation that errors of this file name.
const OPERATION: &str = "meet the group's processes";
/// How long a process waits before it looks again for those that have not come yet.
const PAUSE: Duration = Duration::from_millis(1);

/// The sessions of a process with all others of its group.
#[derive(Debug)]
pub struct Links {
    own: Hello,
    /// By rank.
    links: BTreeMap<u32, Link>,
    /// What arrived before all had met.
    early: VecDeque<(u32, Event<OwnedFd>)>,
    /// The rank whose session [`Links::event`] looks at first.
    turn: u32,
    faults: Arc<dyn Faults>,
}

/// A socket that others connect to. Its file is removed with it.
struct Listener {
    socket: UnixListener,
    path: PathBuf,
}

impl Drop for Listener {
    fn drop(&mut self) {
        // It may be gone with its folder.
        let _ = fs::remove_file(&self.path);
    }
}

fn place(folder: &Path, group: u64, rank: u32) -> PathBuf {
    folder.join(format!("forebay-{group}-{rank}.sock"))
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| {
        let place = format!("{}: {step}: {}", echo(path.display()), io_text(&error));
        Error::new(Kind::Io, OPERATION)
            .at(place)
            .hint("pass a folder with a short path that every process of the group can write")
    }
}

impl Listener {
    fn new(path: PathBuf, own: &Hello) -> Result<Listener> {
        let bound = match UnixListener::bind(&path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                if UnixStream::connect(&path).is_ok() {
                    return Err(Error::new(Kind::Busy, OPERATION)
                        .at("a second process of this rank")
                        .with("rank", own.rank)
                        .with("group", own.group)
                        .hint("give each process of a group a rank of its own"));
                }
                fs::remove_file(&path).map_err(failed("remove a socket that was left behind", &path))?;
                UnixListener::bind(&path)
            }
            bound => bound,
        };
        let socket = bound.map_err(failed("listen", &path))?;
        socket.set_nonblocking(true).map_err(failed("listen", &path))?;
        Ok(Listener { socket, path })
    }

    /// The next process that has connected.
    fn next(&self) -> Result<Option<UnixStream>> {
        match self.socket.accept() {
            Ok((socket, _)) => Ok(Some(socket)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(failed("accept", &self.path)(error)),
        }
    }
}

/// A connection to the process at `path`, if it listens.
fn connected(path: &Path) -> Result<Option<UnixStream>> {
    match UnixStream::connect(path) {
        Ok(socket) => Ok(Some(socket)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) => Err(failed("connect", path)(error)),
    }
}

impl Links {
    /// Meets the other `own.ranks - 1` processes of the group in `folder`. Blocks until all hellos have been accepted,
    /// for at most [`Limits::hello`].
    ///
    /// # Errors
    /// [`Kind::TimedOut`] with the lowest rank that did not come; [`Kind::Busy`] for a second process of this rank;
    /// [`Kind::Io`] for a folder that takes no socket; those of [`Link::new`] and [`Link::event`], such as
    /// [`Kind::InvalidConfig`] for a process with another plan, with its rank.
    pub fn meet(
        folder: impl AsRef<Path>,
        own: Hello,
        limits: Limits,
        faults: Arc<dyn Faults>,
    ) -> Result<Links> {
        own.check()?;
        let folder = folder.as_ref();
        let listener = Listener::new(place(folder, own.group, own.rank), &own)?;
        let mut lower: Vec<u32> = (0..own.rank).collect();
        Links::joined(own, limits, faults, || {
            let mut sockets = Vec::new();
            for rank in std::mem::take(&mut lower) {
                match connected(&place(folder, own.group, rank))? {
                    Some(socket) => sockets.push(socket),
                    None => lower.push(rank),
                }
            }
            while let Some(socket) = listener.next()? {
                sockets.push(socket);
            }
            Ok(sockets)
        })
    }

    /// The same over sockets that the caller has connected, one to each other process of the group, in any order.
    ///
    /// # Errors
    /// As [`Links::meet`].
    pub fn over(
        sockets: Vec<UnixStream>,
        own: Hello,
        limits: Limits,
        faults: Arc<dyn Faults>,
    ) -> Result<Links> {
        own.check()?;
        let mut sockets = Some(sockets);
        Links::joined(own, limits, faults, || Ok(sockets.take().unwrap_or_default()))
    }

    /// Takes connections until all ranks have said hello.
    fn joined(
        own: Hello,
        limits: Limits,
        faults: Arc<dyn Faults>,
        mut connections: impl FnMut() -> Result<Vec<UnixStream>>,
    ) -> Result<Links> {
        let start = Instant::now();
        let mut links = Links { own, links: BTreeMap::new(), early: VecDeque::new(), turn: 0, faults };
        let mut joining: Vec<Link> = Vec::new();
        loop {
            for socket in connections()? {
                joining.push(Link::new(socket, own, limits, Arc::clone(&links.faults))?);
            }
            joining = links.greet(joining)?;
            links.early()?;
            let Some(missing) = links.missing() else { return Ok(links) };
            if start.elapsed() >= limits.hello {
                return Err(Error::new(Kind::TimedOut, OPERATION)
                    .at("a process that did not come")
                    .with("rank", missing)
                    .with("ranks", own.ranks)
                    .with("group", own.group)
                    .hint("start all ranks of the group with the same folder"));
            }
            let sockets: Vec<_> = joining.iter().map(Link::awaited).collect();
            os::wait(&sockets, PAUSE, &*links.faults)?;
        }
    }

    /// Takes those into the group whose hello has arrived, and returns the others.
    fn greet(&mut self, joining: Vec<Link>) -> Result<Vec<Link>> {
        let mut waiting = Vec::new();
        for mut link in joining {
            match link.event(Duration::ZERO)? {
                // A session's first event is the hello.
                Some(Event::Hello(theirs)) => {
                    if self.links.insert(theirs.rank, link).is_some() {
                        return Err(Error::new(Kind::InvalidConfig, OPERATION)
                            .at("two processes of one rank")
                            .with("rank", theirs.rank)
                            .with("group", theirs.group)
                            .hint("give each process of a group a rank of its own"));
                    }
                }
                _ => waiting.push(link),
            }
        }
        Ok(waiting)
    }

    /// Keeps the sessions alive while others are missing, and what they say.
    fn early(&mut self) -> Result<()> {
        for (rank, link) in &mut self.links {
            while let Some(event) = link.event(Duration::ZERO)? {
                self.early.push_back((*rank, event));
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

    /// The session with `rank`; none for one's own rank and for those that the group does not have.
    pub fn link(&self, rank: u32) -> Option<&Link> {
        self.links.get(&rank)
    }

    /// Queues a message for `rank`, as [`Link::send`].
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for one's own rank and for one that the group does not have; those of [`Link::send`].
    pub fn send(&mut self, rank: u32, message: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let link = self.links.get_mut(&rank).ok_or_else(|| {
            Error::new(Kind::OutOfRange, "send to a rank").with("rank", rank).with("ranks", self.own.ranks)
        })?;
        link.send(message, descriptor)
    }

    /// Queues this side's end in every session.
    ///
    /// # Errors
    /// As [`Link::end`].
    pub fn end(&mut self) -> Result<()> {
        self.links.values_mut().try_for_each(Link::end)
    }

    /// Whether every session is over.
    pub fn is_over(&self) -> bool {
        self.links.values().all(Link::is_over)
    }

    /// Sends what was queued. [`Links::event`] then returns `before` first, and what arrived meanwhile.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] after `at_most`; those of [`Links::event`].
    pub(crate) fn flush(&mut self, at_most: Duration, before: Vec<(u32, Event<OwnedFd>)>) -> Result<()> {
        let start = Instant::now();
        let mut arrived = VecDeque::from(before);
        while !self.is_sent() {
            let left = at_most.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::new(Kind::TimedOut, "send to a rank").at("a rank that takes no messages"));
            }
            arrived.extend(self.event(left.min(PAUSE))?);
        }
        self.early.extend(arrived);
        Ok(())
    }

    /// Whether everything that was queued has been sent.
    fn is_sent(&self) -> bool {
        self.links.values().all(|link| !link.awaited().1)
    }

    /// The next event of any session, with its rank; `None` if there is none for `at_most`, or if all are over. Call it
    /// as often as [`Link::event`].
    ///
    /// # Errors
    /// Those of [`Link::event`]; they are final for that session and name its rank.
    pub fn event(&mut self, at_most: Duration) -> Result<Option<(u32, Event<OwnedFd>)>> {
        if let Some(event) = self.early.pop_front() {
            return Ok(Some(event));
        }
        let start = Instant::now();
        loop {
            // Each in turn, so that one that never stops talking does not silence the others.
            let (before, from): (Vec<u32>, Vec<u32>) = self.links.keys().partition(|rank| **rank < self.turn);
            for rank in from.into_iter().chain(before) {
                let Some(link) = self.links.get_mut(&rank) else { continue };
                if let Some(event) = link.event(Duration::ZERO)? {
                    self.turn = rank + 1;
                    return Ok(Some((rank, event)));
                }
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
