//! The receiver's machine: one rank of a decode instance.
//!
//! It does no I/O and knows no clock. Frames and times go in; frames and events come out of [`Receiver::poll`]. A
//! [`Mover`] moves rows, which the machine calls while it reads a notice.
//!
//! # A request's way
//!
//! | what happens | the receiver |
//! |---|---|
//! | [`Receiver::grant`] | tells all ranks of the sender that have rows for this one |
//! | a notice | moves each run: fetch, check, store, note; then answers which runs failed |
//! | all rows of a layer are there | [`Event::Ready`] |
//! | all rows and payloads are there | [`Event::Whole`], and an end to the senders |
//! | [`Receiver::abort`], a failure, a deadline, a lost connection | an end with the reason |
//! | all senders have said *drained* | [`Event::Drained`]: landing pages are free |
//!
//! **What was checked is what is stored.** A run is copied out of the sender's memory, the landing pages or a socket
//! into private memory, checked there, and stored from there. No foreign writer ever reaches the pages that it is
//! stored in. A writer from afar reaches landing pages alone, which the [`Quarantine`] lends: they are not used again
//! before their writers are done, never after a time.
//!
//! **Order does not matter.** The [`Ledger`] has a bit for each row. A notice that comes twice moves nothing the second
//! time. One for a use that has ended, or never was, moves nothing.
//!
//! **Lost messages.** A grant is told again until something of the request comes, and an end until it is answered; the
//! sender sends notices again.
//!
//! **Bounds.** Requests, and ends that are not answered, are at most [`Options::requests`]. Answers that the caller has
//! not taken are at most twice [`Options::window`] parts for each connection: a sender that sends more is cut off. Nothing is
//! allocated for a run, but for a buffer of the largest run.

mod arriving;
mod heard;
mod poll;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{LANDING_MAX, Rank, Reason};
use crate::transfer::ledger::Ledger;
use crate::transfer::pairing::{Own, Peer, Role};
use crate::transfer::quarantine::{Fence, Quarantine, Writer};
use crate::transfer::runs::Run;
use crate::transfer::side::Side;
use arriving::{Arriving, Ending, From};

pub use poll::Action;

const OPERATION: &str = "transfer receiver";

/// How a receiver behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The most parts that a sender may tell on a connection before they are answered.
    pub window: u32,
    /// The most requests at a time, those included whose end is not answered.
    pub requests: u32,
    /// The most landing pages that writers from afar may reach at a time.
    pub landing: u32,
    /// After how long a grant or an end is told again.
    pub resend: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { window: 1 << 10, requests: 1 << 12, landing: 1 << 20, resend: Duration::from_millis(200) }
    }
}

/// Moves the bytes of runs.
pub trait Mover {
    /// Copies a run's pieces, one after another, into private memory: from where the sender has them (`origin`, as the
    /// sender gave it), from the landing pages of the fence, or from what has come on the connection.
    ///
    /// # Errors
    /// Any: the run is asked for again.
    fn fetch(&mut self, link: u32, fence: Fence, origin: u64, run: &Run, into: &mut [u8]) -> Result<()>;

    /// Stores checked bytes in the receiver's own pages.
    ///
    /// # Errors
    /// Any: the request fails.
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()>;
}

/// A request that this rank wants.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The request, and a generation above those of all grants before.
    pub fence: Fence,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// The first token that is wanted: this rank has the rows before. Both sides agree on prefixes by token ids, which
    /// the engine compares; names of published pages are secret to a cache.
    pub first: u32,
    /// The sender's replica.
    pub replica: u32,
    /// The kinds of payloads that belong to it, each once.
    pub payloads: &'a [u8],
    /// Where writers from afar write; empty if the receiver itself reads.
    pub landing: &'a [u32],
    /// When it fails, if it is not whole by then.
    pub deadline: Option<Duration>,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// All rows of a layer are stored.
    Ready {
        /// The use of pages.
        fence: Fence,
        /// The layer's number in the model.
        layer: u32,
    },
    /// A payload has come.
    Payload {
        /// The use of pages.
        fence: Fence,
        /// Its kind.
        kind: u8,
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// All rows and payloads of a request are there.
    Whole {
        /// The use of pages.
        fence: Fence,
    },
    /// A request will not become whole. Nothing is stored for it any more.
    Failed {
        /// The use of pages.
        fence: Fence,
        /// Why, with the numbers of what failed where they are known.
        error: Error,
    },
    /// All senders have answered the end of a use of pages, or are gone.
    Drained {
        /// The use of pages.
        fence: Fence,
    },
    /// Landing pages that no writer can reach any more.
    Free {
        /// The pages.
        landing: Vec<u32>,
    },
}

/// One connection.
#[derive(Debug)]
struct Line {
    link: u32,
    /// Whether rows are written to landing pages from its other end.
    far: bool,
    peer: Option<Peer>,
    /// Frames, in order, and the parts that answers among them name.
    frames: VecDeque<(Vec<u8>, u32)>,
    /// The sum of those parts.
    answers: u32,
}

/// See the module's head.
#[derive(Debug)]
pub struct Receiver {
    own: Own,
    options: Options,
    lines: Vec<Line>,
    arriving: Vec<Arriving>,
    endings: Vec<Ending>,
    quarantine: Quarantine,
    events: VecDeque<Event>,
    /// The generation that the next grant may have at least.
    next: u64,
    turn: usize,
    /// A run's bytes, and the runs of a notice that failed.
    bytes: Vec<u8>,
    failed: Vec<(u16, u32)>,
}

impl Receiver {
    /// A rank of a receiving instance, without connections.
    ///
    /// # Errors
    /// Those of [`Side::encode`]; [`Kind::OutOfRange`] for a rank that the side does not have; [`Kind::InvalidConfig`]
    /// for a window of nothing.
    pub fn new(side: Side, rank: Rank, options: Options) -> Result<Receiver> {
        if options.window == 0 {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("window"));
        }
        Ok(Receiver {
            own: Own::new(side, rank, Role::Receiver)?,
            options,
            lines: Vec::new(),
            arriving: Vec::new(),
            endings: Vec::new(),
            quarantine: Quarantine::new(options.landing),
            events: VecDeque::new(),
            next: 0,
            turn: 0,
            bytes: Vec::new(),
            failed: Vec::new(),
        })
    }

    /// A connection to a rank of a sending instance. `far` says that its other end writes to landing pages. A number is
    /// not used again for another connection: it names what could write ([`Writer`]).
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a number that a connection has now.
    pub fn connect(&mut self, link: u32, far: bool) -> Result<()> {
        if self.lines.iter().any(|line| line.link == link) {
            return Err(Error::new(Kind::InvalidState, OPERATION)
                .at("a connection twice")
                .with("link", link));
        }
        let mut hello = Vec::new();
        self.own.greet(self.options.window, &mut hello);
        let frames = VecDeque::from([(hello, 0)]);
        self.lines.push(Line { link, far, peer: None, frames, answers: 0 });
        Ok(())
    }

    /// A connection is gone. Requests that need it fail. Landing pages that its other end may still write to stay in
    /// quarantine until [`Receiver::destroyed`].
    pub fn disconnect(&mut self, link: u32) {
        self.lines.retain(|line| line.link != link);
        let needs = |arriving: &&Arriving| arriving.from.iter().any(|from| from.link == link);
        let lost: Vec<Fence> = self.arriving.iter().filter(needs).map(|arriving| arriving.fence).collect();
        for fence in lost {
            let error = Error::new(Kind::PeerLost, OPERATION).at("a sender's connection").with("link", link);
            self.fail(fence, Reason::PeerLost, error);
        }
        for ending in &mut self.endings {
            ending.links.retain(|(other, _)| *other != link);
        }
        self.clear();
    }

    /// What the other end of a connection that is gone could write through no longer exists: its registered memory was
    /// taken away, or its process and adapter are known to have ended.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]: call it again.
    pub fn destroyed(&mut self, link: u32) -> Result<()> {
        let mut landing = Vec::new();
        self.quarantine.destroyed(Writer(link), &mut landing)?;
        if !landing.is_empty() {
            self.events.push_back(Event::Free { landing });
        }
        Ok(())
    }

    /// The landing pages that writers may reach.
    pub const fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    /// Wants a request: tells the ranks of the sender that have rows for this one.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a generation that is not above those before, or while a rank of the replica that has
    /// rows for this one is not connected; [`Kind::Exhausted`] for more requests or landing pages than the options
    /// allow; [`Kind::OutOfRange`] for tokens, a replica or payloads that cannot be; [`Kind::OutOfMemory`]. An error
    /// changes nothing.
    pub fn grant(&mut self, wanted: &Wanted<'_>) -> Result<()> {
        let Wanted { fence, tokens, first, replica, payloads, landing, deadline } = *wanted;
        let wrong = |kind, place| Error::new(kind, OPERATION).at(place).with("request", fence.request);
        if fence.generation < self.next {
            return Err(wrong(Kind::InvalidState, "a generation that was used"));
        }
        if self.arriving.len() + self.endings.len() >= self.options.requests as usize {
            return Err(
                wrong(Kind::Exhausted, "requests").hint("wait until senders have answered ended ones")
            );
        }
        let twice = (1..payloads.len()).any(|at| payloads[..at].contains(&payloads[at]));
        if tokens == 0 || first > tokens || twice || landing.len() > LANDING_MAX {
            return Err(wrong(Kind::OutOfRange, "tokens, payloads or landing pages"));
        }
        let peers = || self.lines.iter().filter_map(|line| Some((line, line.peer.as_ref()?)));
        let of_replica = || peers().filter(|(_, peer)| peer.rank.replica == replica);
        let Some((_, one)) = of_replica().next() else {
            return Err(wrong(Kind::InvalidState, "a replica that is not connected"));
        };
        let own = (self.own.rank.stage, self.own.rank.lane);
        let (mut from, mut missing) = (Vec::new(), false);
        let paired = &one.paired;
        paired.plan.senders(own, |rank| {
            let is_it =
                |peer: &Peer| (peer.rank.stage, peer.rank.lane) == rank && Arc::ptr_eq(&peer.paired, paired);
            match of_replica().find(|(_, peer)| is_it(peer)) {
                Some((line, _)) => from.push(From { link: line.link, heard: false, told: None }),
                None => missing = true,
            }
        })?;
        if missing {
            return Err(wrong(Kind::InvalidState, "a rank of the sender that is not connected"));
        }
        let ledger = Ledger::new(&paired.plan, own, first..tokens)?;
        if !landing.is_empty() {
            let far = self.lines.iter().filter(|line| line.far && from.iter().any(|of| of.link == line.link));
            let writers: Vec<Writer> = far.map(|line| Writer(line.link)).collect();
            self.quarantine.lend(fence, landing, &writers)?;
        }
        self.next = fence.generation.saturating_add(1);
        self.arriving.push(Arriving {
            fence,
            tokens,
            first,
            replica,
            landing: landing.to_vec(),
            from,
            ledger,
            payloads: payloads.to_vec(),
            deadline,
            ready: Vec::new(),
        });
        self.settle(fence);
        Ok(())
    }

    /// Whether all rows of a layer of a request are stored. Not of one that has ended.
    pub fn is_ready(&self, fence: Fence, layer: u32) -> bool {
        let found = self.arriving.iter().find(|arriving| arriving.fence == fence);
        found.is_some_and(|arriving| arriving.ledger.is_ready(layer))
    }

    /// Gives a request up: its senders are told. Nothing is stored for it any more.
    ///
    /// # Errors
    /// [`Kind::Closed`] for one that is not arriving.
    pub fn abort(&mut self, fence: Fence) -> Result<()> {
        match self.arriving.iter().any(|arriving| arriving.fence == fence) {
            true => {
                self.end(fence, Reason::Aborted);
                Ok(())
            }
            false => Err(Error::new(Kind::Closed, OPERATION).at("abort").with("request", fence.request)),
        }
    }

    fn fail(&mut self, fence: Fence, reason: Reason, error: Error) {
        self.end(fence, reason);
        self.events.push_back(Event::Failed { fence, error: error.with("request", fence.request) });
    }

    /// A use of pages ends: its senders are told until they have answered.
    fn end(&mut self, fence: Fence, reason: Reason) {
        let Some(index) = self.arriving.iter().position(|arriving| arriving.fence == fence) else { return };
        let arriving = self.arriving.remove(index);
        if !arriving.landing.is_empty()
            && let Ok(Some(landing)) = self.quarantine.give_back(fence)
        {
            self.events.push_back(Event::Free { landing });
        }
        let alive = |from: &From| self.lines.iter().any(|line| line.link == from.link);
        let links = arriving.from.iter().filter(|from| alive(from)).map(|from| (from.link, None)).collect();
        self.endings.push(Ending { fence, reason, links });
        self.clear();
    }

    /// Says what is ready and whole of a request.
    fn settle(&mut self, fence: Fence) {
        let Some(arriving) = self.arriving.iter_mut().find(|arriving| arriving.fence == fence) else {
            return;
        };
        for layer in arriving.ledger.layers() {
            if arriving.ledger.is_ready(layer) && !arriving.ready.contains(&layer) {
                arriving.ready.push(layer);
                self.events.push_back(Event::Ready { fence, layer });
            }
        }
        if arriving.is_whole() {
            self.events.push_back(Event::Whole { fence });
            self.end(fence, Reason::Done);
        }
    }

    /// Forgets ends that all senders have answered.
    fn clear(&mut self) {
        let events = &mut self.events;
        self.endings.retain(|ending| {
            if ending.links.is_empty() {
                events.push_back(Event::Drained { fence: ending.fence });
            }
            !ending.links.is_empty()
        });
    }
}
