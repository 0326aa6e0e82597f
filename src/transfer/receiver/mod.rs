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
//! | all senders have said *drained*, or are gone | [`Event::Drained`]: the end is answered |
//! | no writer can reach landing pages any more | [`Event::Free`]: only then are they free |
//!
//! **What was checked is what is stored.** A run is copied out of the sender's memory, the landing pages or a socket
//! into private memory, checked there, and stored from there. No foreign writer ever reaches the pages that it is
//! stored in. A writer from afar reaches landing pages alone, which the [`Quarantine`] lends: they are not used again
//! before their writers are done, never after a time.
//!
//! **Order does not matter.** The [`Ledger`] has a bit for each row. A notice that comes twice moves nothing the second
//! time. One for a use that has ended, or never was, moves nothing.
//!
//! **Lost messages.** A grant is told again until the sender knows it, and an end until it is answered, each time after
//! twice as long. The sender tells notices again. A connection on which nothing comes for [`Options::patience`],
//! although something is owed, is to be closed ([`Action::Close`]).
//!
//! **Bounds.** Requests, and ends that are not answered, are at most [`Options::requests`]. Answers that the caller has
//! not taken are at most [`Options::window`] parts for each connection, and as many ends: a sender that sends more is
//! cut off. Nothing is allocated for a run, but for a buffer of the largest run.

mod arriving;
mod heard;
mod poll;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{LANDING_MAX, Rank, Reason};
use crate::transfer::ledger::Ledger;
use crate::transfer::pairing::{Own, Role};
use crate::transfer::quarantine::{Fence, Quarantine, Writer};
use crate::transfer::runs::Run;
use crate::transfer::side::Side;
use arriving::{Arriving, Line, Says};

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
    /// Whether runs are refused that are told without a digest. Unset, such runs are stored unchecked: wrong bytes
    /// become rows. Those with a digest are checked anyway.
    pub digests: bool,
    /// After how long a grant or an end is told again; each time twice as long.
    pub resend: Duration,
    /// After how long a connection is closed on which nothing has come, although something is owed. Time counts between
    /// polls, so all frames that have come are given before a poll.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            window: 1 << 10,
            requests: 1 << 12,
            landing: 1 << 20,
            digests: true,
            resend: Duration::from_millis(200),
            patience: Duration::from_secs(5),
        }
    }
}

/// Where a run's bytes are fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// From the sender's memory, or from what came with the notice.
    Origin {
        /// Where the sender has them, as it said ([`Computed::origin`](crate::transfer::sender::Computed::origin)).
        origin: u64,
        /// The run's place among all runs that the notice tells: that of its bytes, if they came with it.
        nth: u32,
    },
    /// From a landing page of the use, to which a writer from afar has written them. They are there as they will be in
    /// the receiver's own page: at [`Run::to`].
    Landing(u32),
}

/// Moves the bytes of runs.
pub trait Mover {
    /// Copies a run's pieces, one after another, into private memory.
    ///
    /// # Errors
    /// Any: the run is asked for again.
    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()>;

    /// As fetch, but straight to where the run's rows are kept, for a run without a digest. Returns false if it cannot,
    /// and has done nothing: the run is then fetched and stored. What came before an error counts as not stored.
    ///
    /// # Errors
    /// Any: the run is asked for again.
    fn fetch_in_place(&mut self, _link: u32, _fence: Fence, _at: Where, _run: &Run) -> Result<bool> {
        Ok(false)
    }

    /// Whether the sender's memory still had the rows when they were fetched: not if the connection was closed by then.
    /// It is asked once for each part without digests, when all its runs have been stored.
    fn holds(&mut self, link: u32) -> bool;

    /// Stores bytes in the receiver's own pages: checked ones, if they have a digest.
    ///
    /// # Errors
    /// Any: the request fails.
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()>;
}

/// A request that this rank wants.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The request, by the number of this try at it, and a generation above those of all grants before.
    pub fence: Fence,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// The first token that is wanted: this rank has the rows before. Both sides agree on prefixes by token ids, which
    /// the engine compares; names of published pages are secret to a cache.
    pub first: u32,
    /// The sending instance, and its replica.
    pub sender: (u64, u32),
    /// The kinds of payloads that belong to it, each once.
    pub payloads: &'a [u8],
    /// Where writers from afar write: pages from that of the first wanted token on, as many as the tokens need. Empty
    /// if the receiver itself reads.
    pub landing: &'a [u32],
    /// When it fails, if it is not whole by then.
    pub deadline: Option<Duration>,
}

/// What a receiver has moved since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs that were stored.
    pub runs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Runs that were fetched with other bytes than their digests say, or could not be fetched.
    pub wrong: u64,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A rank of a sender has said hello: its requests can be granted.
    Met {
        /// The connection.
        link: u32,
        /// The rank.
        rank: Rank,
    },
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
    /// All senders have answered the end of a use of pages, or are gone. Landing pages are not free by that.
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

/// See the module's head.
#[derive(Debug)]
pub struct Receiver {
    own: Own,
    options: Options,
    lines: Vec<Line>,
    arriving: BTreeMap<Fence, Arriving>,
    deadlines: BTreeSet<(Duration, Fence)>,
    /// Ended uses of pages, and how many connections have not answered.
    endings: BTreeMap<Fence, u32>,
    quarantine: Quarantine,
    events: VecDeque<Event>,
    /// The generation that the next grant may have at least.
    next: u64,
    turn: usize,
    /// A run's bytes, and the runs of a notice that failed.
    bytes: Vec<u8>,
    failed: Vec<(u16, u32)>,
    counts: Counts,
}

impl Receiver {
    /// A rank of a receiving instance, without connections.
    ///
    /// # Errors
    /// Those of [`Side::encode`]; [`Kind::OutOfRange`] for a rank that the side does not have; [`Kind::InvalidConfig`]
    /// for a window and times of nothing.
    pub fn new(side: Side, rank: Rank, options: Options) -> Result<Receiver> {
        if options.window == 0 || options.resend.is_zero() || options.patience.is_zero() {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("window, resend and patience"));
        }
        Ok(Receiver {
            own: Own::new(side, rank, Role::Receiver)?,
            options,
            lines: Vec::new(),
            arriving: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            endings: BTreeMap::new(),
            quarantine: Quarantine::new(options.landing),
            events: VecDeque::new(),
            next: 0,
            turn: 0,
            bytes: Vec::new(),
            failed: Vec::new(),
            counts: Counts::default(),
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
        self.own.hello(self.options.window).encode(&mut hello);
        self.lines.push(Line::new(link, far, hello));
        Ok(())
    }

    /// A connection is gone. Requests that need it fail. Landing pages that its other end may still write to stay in
    /// quarantine until [`Receiver::destroyed`].
    pub fn disconnect(&mut self, link: u32) {
        let Some(index) = self.lines.iter().position(|line| line.link == link) else { return };
        let line = self.lines.remove(index);
        let needs = self.arriving.iter().filter(|(_, arriving)| arriving.links.contains(&link));
        let lost: Vec<Fence> = needs.map(|(fence, _)| *fence).collect();
        for fence in lost {
            let error = Error::new(Kind::PeerLost, OPERATION).at("a sender's connection").with("link", link);
            self.fail(fence, Reason::PeerLost, error);
        }
        for saying in line.sayings.iter().filter(|saying| saying.says != Says::Grant) {
            self.ended(saying.fence);
        }
    }

    /// Something has come on a connection, though no whole frame: its other end lives.
    pub fn alive(&mut self, link: u32) {
        self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.heard = true);
    }

    /// The fabric has no room for frames of a connection: none is asked for until [`Receiver::unblock`]. One that has
    /// none for [`Options::patience`] is to be closed.
    pub fn block(&mut self, link: u32) {
        self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.blocked = true);
    }

    /// The fabric has room again. What was told is told again only after the whole time from now on.
    pub fn unblock(&mut self, link: u32) {
        let own = self.lines.iter_mut().filter(|line| line.link == link);
        own.for_each(|line| (line.blocked, line.unblocked) = (false, true));
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

    /// The next event, which [`Receiver::poll`] would give. It needs no time.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What it has moved.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// The landing pages that writers may reach.
    pub const fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    /// Wants a request: tells the ranks of the sender that have rows for this one.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a generation that is not above those before or is the largest number, and while a
    /// rank of the replica that has rows for this one is not connected; [`Kind::Exhausted`] for more requests or
    /// landing pages than the options allow; [`Kind::OutOfRange`] for tokens, payloads or landing pages that cannot be,
    /// and if nothing is wanted; [`Kind::OutOfMemory`]. An error changes nothing.
    pub fn grant(&mut self, wanted: &Wanted<'_>) -> Result<()> {
        let Wanted { fence, tokens, first, sender: (instance, replica), payloads, landing, deadline } =
            *wanted;
        let wrong = |kind, place| Error::new(kind, OPERATION).at(place).with("request", fence.request);
        let next = fence.generation.checked_add(1).filter(|_| fence.generation >= self.next);
        let Some(next) = next else {
            return Err(wrong(Kind::InvalidState, "a generation that was used"));
        };
        if self.arriving.len() + self.endings.len() >= self.options.requests as usize {
            return Err(
                wrong(Kind::Exhausted, "requests").hint("wait until senders have answered ended ones")
            );
        }
        let twice =
            payloads.iter().enumerate().any(|(at, kind)| payloads.iter().take(at).any(|of| of == kind));
        let nothing = first >= tokens && payloads.is_empty();
        if nothing || first > tokens || twice || landing.len() > LANDING_MAX {
            return Err(wrong(Kind::OutOfRange, "tokens, payloads or landing pages"));
        }
        let own = (self.own.rank.stage, self.own.rank.lane);
        let peers = || self.lines.iter().filter_map(|line| Some((line, line.peer.as_ref()?)));
        let of_sender =
            || peers().filter(|(_, peer)| (peer.rank.instance, peer.rank.replica) == (instance, replica));
        // Of two connections to one rank the newer one counts.
        let Some((_, one)) = of_sender().next_back() else {
            return Err(wrong(Kind::InvalidState, "a sender that is not connected"));
        };
        let (mut links, mut far, mut missing) = (Vec::new(), false, false);
        one.paired.plan.senders(own, |rank| {
            let found = of_sender().rfind(|(_, peer)| (peer.rank.stage, peer.rank.lane) == rank);
            match found.filter(|(_, peer)| peer.paired.is_as(&one.paired)) {
                Some((line, _)) => {
                    links.push(line.link);
                    far |= line.far;
                }
                None => missing = true,
            }
        })?;
        if missing {
            return Err(wrong(Kind::InvalidState, "a rank of the sender that is not connected"));
        }
        let one_page = one.paired.plan.target.page_tokens.max(1);
        // None if no row is wanted.
        let end = if first < tokens { tokens.div_ceil(one_page) } else { 0 };
        let pages = end.saturating_sub(first / one_page) as usize;
        if far && landing.len() != pages {
            return Err(wrong(Kind::OutOfRange, "landing pages").with("wanted", pages as u64));
        }
        if links.is_empty() && !payloads.is_empty() {
            return Err(wrong(Kind::OutOfRange, "payloads of a rank that gets no rows"));
        }
        let ledger = Ledger::new(&one.paired.plan, own, first..tokens)?;
        let own_lines = self.lines.iter_mut().filter(|line| links.contains(&line.link));
        if !landing.is_empty() {
            let far = own_lines.filter(|line| line.far).map(|line| Writer(line.link));
            self.quarantine.lend(fence, landing, &far.collect::<Vec<_>>())?;
        }
        for line in self.lines.iter_mut().filter(|line| links.contains(&line.link)) {
            line.say(fence, Says::Grant);
        }
        self.next = next;
        self.deadlines.extend(deadline.map(|deadline| (deadline, fence)));
        let ready: Vec<u32> = ledger.layers().filter(|layer| ledger.is_ready(*layer)).collect();
        self.events.extend(ready.into_iter().map(|layer| Event::Ready { fence, layer }));
        let (landing, payloads) = (landing.to_vec(), payloads.to_vec());
        let wrong = None;
        let of = Arriving { tokens, first, replica, landing, links, ledger, payloads, deadline, wrong };
        self.arriving.insert(fence, of);
        // A rank that gets nothing has all of it.
        self.settle(fence);
        Ok(())
    }

    /// Whether all rows of a layer of a request are stored. Not of one that has ended.
    pub fn is_ready(&self, fence: Fence, layer: u32) -> bool {
        self.arriving.get(&fence).is_some_and(|arriving| arriving.ledger.is_ready(layer))
    }

    /// Gives a request up: its senders are told. Nothing is stored for it any more.
    ///
    /// # Errors
    /// [`Kind::Closed`] for one that is not arriving.
    pub fn abort(&mut self, fence: Fence) -> Result<()> {
        match self.arriving.contains_key(&fence) {
            true => {
                self.end(fence, Reason::Aborted);
                Ok(())
            }
            false => Err(Error::new(Kind::Closed, OPERATION).at("abort").with("request", fence.request)),
        }
    }

    fn fail(&mut self, fence: Fence, reason: Reason, error: Error) {
        self.events.push_back(Event::Failed { fence, error: error.with("request", fence.request) });
        self.end(fence, reason);
    }

    /// A use of pages ends: its senders are told until they have answered.
    fn end(&mut self, fence: Fence, reason: Reason) {
        let Some(arriving) = self.arriving.remove(&fence) else { return };
        arriving.deadline.map(|deadline| self.deadlines.remove(&(deadline, fence)));
        if !arriving.landing.is_empty()
            && let Ok(Some(landing)) = self.quarantine.give_back(fence)
        {
            self.events.push_back(Event::Free { landing });
        }
        let mut told = 0;
        for line in self.lines.iter_mut().filter(|line| arriving.links.contains(&line.link)) {
            line.say(fence, Says::End(reason));
            told += 1;
        }
        match told {
            0 => self.events.push_back(Event::Drained { fence }),
            _ => drop(self.endings.insert(fence, told)),
        }
    }

    /// One connection fewer owes an answer to an end.
    fn ended(&mut self, fence: Fence) {
        let Some(left) = self.endings.get_mut(&fence) else { return };
        *left -= 1;
        if *left == 0 {
            self.endings.remove(&fence);
            self.events.push_back(Event::Drained { fence });
        }
    }
}
