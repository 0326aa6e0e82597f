//! All connections of one end: those that open, those that are open, and whom to connect to.
//!
//! A poll takes new connections, goes on with openings, and then gives one connection after another its turn, until
//! something has happened. The next poll begins with the connection after that one. So none waits for another one's
//! backlog. New connections and openings are looked at in a poll that would find nothing else, and after every 8
//! events. So strangers cost at most [`Options::unopened`] calls of the system for 8 events.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Bound, Range};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use crate::transfer::fabric::Happened;
use crate::transfer::memory::SendMemory;
use crate::transfer::runs::Run;
use crate::transfer::socket::address::{Address, Listener, Way};
use crate::transfer::socket::connection::{Connection, Served};
use crate::transfer::socket::dial::Dial;
use crate::transfer::socket::opening::{Adopted, Opening, Side};
use crate::transfer::socket::options::Options;
use crate::transfer::socket::refusal;

/// The most connections that a poll takes.
const ACCEPTS: usize = 16;
/// Events after which a poll looks again for new connections, if none before had nothing.
const EVENTS: u32 = 8;
/// How long none are taken after the system refused one.
const PAUSE: Duration = Duration::from_millis(50);
/// The most failures that are kept; the oldest go first.
const FAILURES: usize = 16;

/// A connection that has not opened.
#[derive(Debug)]
struct Unopened {
    connection: Connection,
    opening: Opening,
    since: Instant,
    /// The dial that it is of, at a sender.
    dial: Option<u32>,
}

#[derive(Debug)]
struct Link {
    connection: Connection,
    since: Instant,
    dial: Option<u32>,
    adopted: Option<Adopted>,
}

/// Whether it is about a connection, of what waits to be told: beginnings and ends.
const fn is_of(told: &Happened, of: u32) -> bool {
    matches!(told, Happened::Connected { link, .. } | Happened::Lost { link } if *link == of)
}

#[derive(Debug)]
pub struct Hub {
    side: Side,
    way: Way,
    options: Options,
    memory: Option<Arc<SendMemory>>,
    listener: Option<Listener>,
    /// No connection is taken before.
    paused: Option<Instant>,
    /// When it was polled last.
    polled: Instant,
    dials: BTreeMap<u32, Dial>,
    dialled: u32,
    unopened: VecDeque<Unopened>,
    links: BTreeMap<u32, Link>,
    /// The next connection's number.
    number: u32,
    /// The connection that had the last turn.
    turn: u32,
    told: VecDeque<Happened>,
    /// Events since a poll looked for new connections.
    given: u32,
    failures: VecDeque<Error>,
    /// The connection that was lost last, and why.
    lost: Option<(u32, Error)>,
    /// The frame that the last poll gave: its connection, and the rows behind it.
    held: Option<(u32, Range<usize>)>,
}

impl Hub {
    fn new(side: Side, way: Way, options: Options) -> Result<Hub> {
        options.check()?;
        Ok(Hub {
            side,
            way,
            options,
            memory: None,
            listener: None,
            paused: None,
            polled: Instant::now(),
            dials: BTreeMap::new(),
            dialled: 0,
            unopened: VecDeque::new(),
            links: BTreeMap::new(),
            number: 0,
            turn: 0,
            told: VecDeque::new(),
            given: 0,
            failures: VecDeque::new(),
            lost: None,
            held: None,
        })
    }

    /// A sender's.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that contradict each other.
    pub fn sender(way: Way, options: Options, memory: Arc<SendMemory>) -> Result<Hub> {
        Ok(Hub { memory: Some(memory), ..Hub::new(Side::Sender, way, options)? })
    }

    /// A receiver's, which listens.
    ///
    /// # Errors
    /// As [`Hub::sender`], and those of [`Address::check`] and [`Address::listen`].
    pub fn receiver(way: Way, options: Options, address: &Address) -> Result<Hub> {
        let mut hub = Hub::new(Side::Receiver, way, options)?;
        address.check(&hub.options)?;
        hub.listener = Some(address.listen()?);
        Ok(hub)
    }

    pub const fn listener(&self) -> Option<&Listener> {
        self.listener.as_ref()
    }

    /// Adds a receiver to connect to, if it is not there.
    ///
    /// # Errors
    /// Those of [`Address::check`].
    pub fn add(&mut self, address: Address) -> Result<()> {
        address.check(&self.options)?;
        if self.dials.values().all(|dial| dial.address != address) {
            self.dials.insert(self.dialled, Dial::new(address, Instant::now()));
            self.dialled = self.dialled.wrapping_add(1);
        }
        Ok(())
    }

    /// Forgets a receiver. Its connection is lost.
    pub fn remove(&mut self, address: &Address) {
        let Some((&dial, _)) = self.dials.iter().find(|(_, dial)| dial.address == *address) else { return };
        self.dials.remove(&dial);
        self.unopened.retain(|of| of.dial != Some(dial));
        let links: Vec<u32> =
            self.links.iter().filter(|(_, of)| of.dial == Some(dial)).map(|(link, _)| *link).collect();
        for link in links {
            // The engine knows none whose beginning it was not told.
            let known = !self.told.iter().any(|told| is_of(told, link));
            self.close(link);
            if known {
                self.told.push_back(Happened::Lost { link });
            }
        }
    }

    /// Why a connection was lost, once.
    pub fn why_lost(&mut self, link: u32) -> Option<Error> {
        self.lost.take_if(|(lost, _)| *lost == link).map(|(_, why)| why)
    }

    /// Why a connection did not open: the oldest reason that was not taken.
    pub fn failure(&mut self) -> Option<Error> {
        self.failures.pop_front()
    }

    fn failed(&mut self, error: Error) {
        if self.failures.len() >= FAILURES {
            self.failures.pop_front();
        }
        self.failures.push_back(error);
    }

    /// The bytes of memory in which things wait that have come.
    pub fn kept(&self) -> usize {
        let unopened = self.unopened.iter().map(|of| of.connection.incoming.kept());
        unopened.chain(self.links.values().map(|of| of.connection.incoming.kept())).sum()
    }

    /// The most bytes behind a frame that comes here.
    fn most(&self) -> usize {
        match (self.side, self.way) {
            (Side::Receiver, Way::Tcp) => self.options.rows_max,
            _ => 0,
        }
    }

    pub fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.let_go();
        let now = Instant::now();
        self.excuse(now);
        let looks = self.given == 0;
        if looks {
            self.begins(now);
        }
        let mut happened = self.next(now, frame);
        if happened.is_none() && !looks {
            self.begins(now);
            happened = self.next(now, frame);
        }
        self.given = if happened.is_some() { (self.given + 1) % EVENTS } else { 0 };
        Ok(happened)
    }

    /// Goes on with connections that are not open.
    fn begins(&mut self, now: Instant) {
        self.connect(now);
        self.accept(now);
        self.open(now);
    }

    /// What happens next at connections that are open.
    fn next(&mut self, now: Instant, frame: &mut Vec<u8>) -> Option<Happened> {
        if let Some(happened) = self.told.pop_front() {
            return Some(happened);
        }
        for _ in 0..self.links.len() {
            let after = (Bound::Excluded(self.turn), Bound::Unbounded);
            let next = self.links.range(after).next().or_else(|| self.links.first_key_value());
            let Some((&link, _)) = next else { break };
            self.turn = link;
            match self.serve(link, now, frame) {
                Ok(None) => {}
                Ok(happened) => return happened,
                Err(error) => {
                    self.lost = Some((link, error));
                    self.close(link);
                    return Some(Happened::Lost { link });
                }
            }
        }
        None
    }

    /// Puts off what other ends have to do in time, if this end was not polled for long: it was not there to hear
    /// them, and whatever has held it up may have held them up too.
    fn excuse(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(std::mem::replace(&mut self.polled, now));
        let half = self.options.lost / 2;
        if gap > half {
            self.links.values_mut().for_each(|of| of.connection.excuse(&self.options, half, now));
        }
    }

    /// Lets the last frame and its rows go.
    fn let_go(&mut self) {
        if let Some((link, rows)) = self.held.take()
            && let Some(of) = self.links.get_mut(&link)
        {
            of.connection.incoming.consume(rows.end);
        }
    }

    fn serve(&mut self, link: u32, now: Instant, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let most = self.most();
        let Some(of) = self.links.get_mut(&link) else { return Ok(None) };
        Ok(match of.connection.serve(self.memory.as_deref(), &self.options, now, most)? {
            Served::Nothing => None,
            Served::Alive => Some(Happened::Alive { link }),
            Served::Room => Some(Happened::Room { link }),
            Served::Frame { frame: own, rows } => {
                frame.clear();
                frame.extend_from_slice(of.connection.incoming.bytes(own));
                self.held = Some((link, rows));
                Some(Happened::Frame { link })
            }
        })
    }

    /// The rows behind the frame that the last poll gave, if it came on this connection.
    pub fn rows(&self, link: u32) -> &[u8] {
        let held = self.held.as_ref().filter(|(of, _)| *of == link);
        let rows = held.and_then(|(link, rows)| Some((self.links.get(link)?, rows)));
        rows.map_or(&[], |(of, rows)| of.connection.incoming.bytes(rows.clone()))
    }

    /// Whether the other end still has a connection.
    pub fn is_held(&self, link: u32) -> bool {
        self.links.get(&link).is_some_and(|of| of.connection.is_held(&self.options))
    }

    /// The memory of a connection's sender.
    pub fn adopted(&self, link: u32) -> Option<&Adopted> {
        self.links.get(&link)?.adopted.as_ref()
    }

    /// # Errors
    /// As [`SenderFabric::send`](crate::transfer::fabric::SenderFabric::send).
    pub fn send(&mut self, link: u32, frame: &[u8], rows: &[(u64, Run)]) -> Result<()> {
        let lost = || Error::new(Kind::PeerLost, "transfer connection").with("link", link);
        let of = self.links.get_mut(&link).ok_or_else(lost)?;
        of.connection.send(frame, rows, &self.options)?;
        // An error shows again at the connection's turn.
        let _ = of.connection.flush(self.memory.as_deref(), &self.options, Instant::now());
        Ok(())
    }

    pub fn close(&mut self, link: u32) {
        if let Some(of) = self.links.remove(&link) {
            let now = Instant::now();
            self.dial_again(of.dial, now, now.saturating_duration_since(of.since));
        }
        if self.held.as_ref().is_some_and(|(of, _)| *of == link) {
            self.held = None;
        }
        self.told.retain(|told| !is_of(told, link));
    }

    fn dial_again(&mut self, dial: Option<u32>, now: Instant, open: Duration) {
        if let Some(dial) = dial.and_then(|dial| self.dials.get_mut(&dial)) {
            dial.again(now, open);
        }
    }

    /// Connects to receivers.
    fn connect(&mut self, now: Instant) {
        let due = |(id, dial): (&u32, &Dial)| dial.is_due(now).then_some(*id);
        let due: Vec<u32> = self.dials.iter().filter_map(due).collect();
        for id in due {
            let Some(dial) = self.dials.get_mut(&id) else { continue };
            dial.next = None;
            match dial.address.connect(&*self.options.faults) {
                Ok(Some(socket)) => self.begin(socket, Some(id), now),
                refused => {
                    dial.again(now, Duration::ZERO);
                    if let Err(error) = refused {
                        self.failed(error);
                    }
                }
            }
        }
    }

    /// Takes new connections.
    fn accept(&mut self, now: Instant) {
        if self.paused.is_some_and(|until| now < until) {
            return;
        }
        self.paused = None;
        for _ in 0..ACCEPTS {
            let Some(listener) = &self.listener else { return };
            match listener.accept(&*self.options.faults) {
                Ok(None) => return,
                Ok(Some(socket)) => {
                    if self.unopened.len() >= self.options.unopened {
                        // One that has said hello may belong here.
                        let silent = self.unopened.iter().position(|of| of.opening.is_silent());
                        self.unopened.remove(silent.unwrap_or(0));
                    }
                    self.begin(socket, None, now);
                }
                Err(error) => {
                    let is_full = error.kind() == Kind::Exhausted;
                    self.failed(error);
                    if is_full {
                        self.paused = Some(now + PAUSE);
                        return;
                    }
                }
            }
        }
    }

    fn begin(&mut self, socket: OwnedFd, dial: Option<u32>, now: Instant) {
        let mut connection = Connection::new(socket, now);
        match Opening::new(self.side, self.way, &mut connection, &self.options) {
            Ok(opening) => self.unopened.push_back(Unopened { connection, opening, since: now, dial }),
            Err(error) => {
                self.dial_again(dial, now, Duration::ZERO);
                self.failed(error);
            }
        }
    }

    /// Goes on with openings.
    fn open(&mut self, now: Instant) {
        for _ in 0..self.unopened.len() {
            let Some(mut of) = self.unopened.pop_front() else { return };
            match self.advance(&mut of, now) {
                Ok(false) if now.saturating_duration_since(of.since) < self.options.opening => {
                    self.unopened.push_back(of);
                }
                Ok(true) => self.opened(of, now),
                // No process listens, or what listens takes no more connections now.
                Err(None) => self.dial_again(of.dial, now, Duration::ZERO),
                Ok(false) => {
                    self.dial_again(of.dial, now, Duration::ZERO);
                    self.failed(
                        Error::new(Kind::TimedOut, "transfer connection")
                            .at("an opening")
                            .with("milliseconds", self.options.opening.as_millis() as u64)
                            .hint("see whether the other end runs, and is one of the same fabric"),
                    );
                }
                Err(Some(error)) => {
                    self.dial_again(of.dial, now, Duration::ZERO);
                    self.failed(error);
                }
            }
        }
    }

    /// Goes on with one. The error is none if there is no process yet to connect to.
    fn advance(&self, of: &mut Unopened, now: Instant) -> std::result::Result<bool, Option<Error>> {
        let is_absent = |of: &Unopened| of.dial.is_some() && of.opening.is_silent();
        if is_absent(of) && of.connection.is_refused(&self.options)? {
            return Err(None);
        }
        let full = self.links.len() >= self.options.links;
        let (memory, options) = (self.memory.as_deref(), &self.options);
        let advanced = of.opening.advance(&mut of.connection, memory, options, now, full);
        advanced.map_err(|error| Some(error).filter(|error| !is_absent(of) || error.kind() != Kind::PeerLost))
    }

    fn opened(&mut self, mut of: Unopened, now: Instant) {
        let next = self.number.checked_add(1).filter(|_| self.links.len() < self.options.links);
        let Some(next) = next else {
            self.dial_again(of.dial, now, Duration::ZERO);
            self.failed(refusal::full(self.options.links));
            return;
        };
        let (link, adopted) = (std::mem::replace(&mut self.number, next), of.opening.adopted.take());
        self.links.insert(link, Link { connection: of.connection, since: now, dial: of.dial, adopted });
        self.told.push_back(Happened::Connected { link, far: false });
    }

    /// What to wait on: sockets, and whether one waits to be sent to.
    pub fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        let listener = self.listener.as_ref().filter(|_| self.paused.is_none());
        let unopened = self.unopened.iter().map(|of| of.connection.awaited());
        let links = self.links.values().map(|of| of.connection.awaited());
        listener.map(|of| (of.socket(), false)).into_iter().chain(unopened).chain(links).collect()
    }

    /// How long a poll has nothing to do if nothing happens at the descriptors.
    pub fn due(&self) -> Duration {
        let ready = |of: &Link| of.connection.is_ready(&self.options, self.most());
        if !self.told.is_empty() || self.links.values().any(ready) {
            return Duration::ZERO;
        }
        let dials = self.dials.values().filter_map(|dial| dial.next);
        let unopened = self.unopened.iter().filter_map(|of| of.since.checked_add(self.options.opening));
        let links = self.links.values().filter_map(|of| of.connection.due(&self.options));
        let first = dials.chain(unopened).chain(links).chain(self.paused).min();
        first.map_or(Duration::MAX, |first| first.saturating_duration_since(Instant::now()))
    }
}
