//! What an update and a change of replicas have in common: a thing that all ranks of a group prepare, and that all of
//! them take at one border or none takes.
//!
//! Each rank says first what it has begun: the kind, the number, and a digest of what it is about. Rank 0 gives the
//! memory of the decision ([`super::decision`]) with that. Then come the messages of the thing itself
//! ([`crate::weights::exchange`]), the same number from each rank.
//!
//! **Numbers.** A number of a kind is begun once. So what a failed exchange left on its way is known by its number, and
//! the next exchange of its kind drops it; one of the other kind keeps what this rank has not begun.
//!
//! **Failures.** A rank that fails says so to the others, which fail too.

use std::cmp::Ordering;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::decision::{self, Ballot, Decision, Look};
use crate::device::{Device, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Map, Words};
use crate::peer::{Digest, Links, Mark};
use crate::sync::Arc;
use crate::weights::beside::Beside;
use crate::weights::exchange::{BYTES, Heed, Kinds, Part, Parts, exchange, of_pact};
use crate::weights::fill::Reads;
use crate::weights::plan::{Group, Plan};
use crate::weights::window::Windows;

/// How long a rank that fails tries to say so.
const LAST_WORD: Duration = Duration::from_secs(1);
/// How long a rank waits before it looks again whether the others are ready.
const PAUSE: Duration = Duration::from_millis(1);

/// A place between two steps.
#[derive(Clone, Copy, Debug)]
pub struct Border {
    /// A number of this border, such as that of the next step, the same on all ranks. Its lower 63 bits count.
    pub step: u64,
    /// A stream that is ordered after all work of the steps before.
    pub stream: Stream,
    /// How long to wait for the other ranks.
    pub at_most: Duration,
}

/// What became of an update or of a change of replicas, on all ranks of the group alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every rank has the new state, or will have it before its next step.
    Committed,
    /// Every rank keeps the old state; why, as far as this rank knows. What was taken for the new one is given back.
    Aborted(Error),
}

/// Words that the ranks share.
#[derive(Debug)]
struct Shared(Words);

impl decision::Words for Shared {
    fn load(&self, word: usize) -> u64 {
        self.0.load(word)
    }

    fn store(&self, word: usize, value: u64) {
        self.0.store(word, value);
    }

    fn exchange(&self, word: usize, from: u64, to: u64) -> u64 {
        self.0.exchange(word, from, to)
    }
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::weights) enum State {
    Filling,
    /// What it gives and takes is on its way, or an error has ended that.
    Sharing,
    Shared,
    Over,
}

/// What ranks agree on, and how far they are.
#[derive(Debug)]
pub(in crate::weights) struct Pact {
    kinds: Kinds,
    pub number: u32,
    /// The highest number of the other kind that this rank has begun.
    other: u32,
    pub state: State,
    pub beside: Beside,
    ballot: Option<Ballot<Shared>>,
    /// The sessions as they were when it was shared over them.
    shared: Option<Mark>,
}

/// A message as its part and its number.
fn split(bytes: &[u8]) -> Option<(&[u8], u32)> {
    let (part, number) = bytes.split_last_chunk()?;
    (part.len() == BYTES).then_some((part, u32::from_le_bytes(*number)))
}

impl Pact {
    /// One that begins. `other` is the highest number of the other kind that this rank has begun.
    pub fn new(kinds: Kinds, (number, other): (u32, u32), beside: Beside) -> Pact {
        Pact { kinds, number, other, state: State::Filling, beside, ballot: None, shared: None }
    }

    pub fn error(&self, kind: Kind, what: &'static str) -> Error {
        Error::new(kind, self.kinds.operation).at(what)
    }

    fn group(&self) -> Group {
        self.beside.plan.group()
    }

    /// The other ranks of the group.
    fn others(&self) -> Vec<u32> {
        let group = self.group();
        (0..group.ranks).filter(|rank| *rank != group.rank).collect()
    }

    /// A message.
    fn said(&self, part: &Part) -> Vec<u8> {
        [&part.encode()[..], &self.number.to_le_bytes()].concat()
    }

    fn heed(&self, bytes: &[u8]) -> Heed {
        let (Some(kind), Some((_, number))) = (of_pact(bytes), split(bytes)) else {
            return if of_pact(bytes).is_some() { Heed::Take } else { Heed::Keep };
        };
        let own = self.kinds.contain(kind);
        match number.cmp(if own { &self.number } else { &self.other }) {
            Ordering::Equal if own => Heed::Take,
            Ordering::Greater if own => Heed::Later,
            // It may be left over, or what the rank does next.
            Ordering::Greater => Heed::Keep,
            _ => Heed::Drop,
        }
    }

    /// Checks that these are sessions of its group, and that all ranks are there.
    fn all_there(&self, links: &mut Links) -> Result<()> {
        links.settle()?;
        if let Some((_, error)) = links.lost().next() {
            return Err(error.clone());
        }
        match links.unattached() {
            None => Ok(()),
            Some(rank) => Err(self
                .error(Kind::InvalidState, "a rank that has come back and was not attached again")
                .with("rank", rank)
                .hint("call `reattach` first")),
        }
    }

    /// Takes what a rank says first.
    fn began(&mut self, begins: &Part, rank: u32, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let wrong = |kind, what| self.error(kind, what).with("rank", rank);
        let theirs = Part::decode(bytes, self.kinds.begins)
            .filter(|_| descriptor.is_some() == (rank == 0))
            .ok_or_else(|| wrong(Kind::BadFormat, "a message that begins nothing"))?;
        if theirs != *begins {
            return Err(wrong(Kind::InvalidConfig, "a rank that has begun something else")
                .hint("begin with the same arguments on all ranks"));
        }
        if let Some(descriptor) = descriptor {
            let ranks = self.group().ranks;
            let words = Words::adopt(descriptor, decision::words(ranks), &*self.beside.faults)
                .map_err(|error| error.with("rank", rank))?;
            self.ballot = Some(Ballot::new(Shared(words), ranks));
        }
        Ok(())
    }

    /// Ends it: no rank takes it, unless all have committed already.
    pub fn abort(&mut self) {
        self.state = State::Over;
        if let Some(ballot) = self.ballot.take() {
            ballot.abort();
        }
    }

    /// Whether it was taken, or never will be.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Ends it after all ranks have committed.
    pub fn committed(&mut self) {
        (self.state, self.ballot) = (State::Over, None);
    }
}

/// What ranks take together.
pub(in crate::weights) trait Agreed {
    fn pact(&self) -> &Pact;

    fn pact_mut(&mut self) -> &mut Pact;

    /// Checks that it is filled.
    fn is_filled(&self) -> Result<()>;

    /// What it is about: how many things, and their digest.
    fn begins(&self) -> (u64, Digest);

    /// Makes ready what is given. Others hold a rank that serves no session for lost.
    fn prepare(&mut self, links: &mut Links, stream: Stream) -> Result<()>;

    /// Messages of each rank.
    fn count(&self) -> usize;

    /// Message `index` for another rank.
    fn give(&self, rank: u32, index: usize) -> Result<(Part, Option<OwnedFd>)>;

    /// Takes message `index` of another rank.
    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()>;

    /// Waits until all work on its memory has run.
    fn settle(&mut self) -> Result<()> {
        self.pact_mut().beside.settle()
    }

    /// Parks the addresses at which its memory was written and read.
    fn park(&mut self) -> Result<()> {
        self.pact_mut().beside.park()
    }
}

impl<A: Agreed> Reads for A {
    fn device(&self) -> &Arc<dyn Device> {
        &self.pact().beside.device
    }

    fn plan(&self) -> &Plan {
        &self.pact().beside.plan
    }

    fn uses(&mut self, stream: Stream) {
        self.pact_mut().beside.uses(stream);
    }

    fn staged(&mut self) -> Result<(Arc<Map>, Slice)> {
        self.pact_mut().beside.staged()
    }

    fn drain(&mut self, stream: Stream) -> Result<()> {
        self.pact_mut().beside.drain(stream)
    }
}

/// Its exchange, with the message that begins it.
struct Exchange<'a, A>(&'a mut A);

impl<A: Agreed> Exchange<'_, A> {
    fn begins(&self) -> Part {
        let (bytes, digest) = self.0.begins();
        Part { kind: self.0.pact().kinds.begins, layer: 0, bytes, digest }
    }

    /// Tells the others that this rank cannot take it.
    fn fails(&self, links: &mut Links) {
        let pact = self.0.pact();
        if let Some(ballot) = &pact.ballot {
            ballot.abort();
        }
        let (others, last) = (pact.others(), pact.said(&Part { kind: pact.kinds.fails, ..self.begins() }));
        for rank in &others {
            // One that was lost is told by that.
            let _ = links.send(*rank, &last, None);
        }
        let _ = links.flush(&others, LAST_WORD);
    }

    fn exchanged(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        self.0.prepare(links, stream)?;
        let pact = self.0.pact_mut();
        let Group { rank, ranks, .. } = pact.group();
        if rank == 0 {
            let words = Words::new(decision::words(ranks), &*pact.beside.faults)?;
            pact.ballot = Some(Ballot::new(Shared(words), ranks));
        }
        let others = pact.others();
        // What others said before is taken first.
        links.put_back();
        exchange(self, links, &others, at_most)
    }
}

impl<A: Agreed> Parts for Exchange<'_, A> {
    fn count(&self) -> usize {
        1 + self.0.count()
    }

    fn heed(&self, bytes: &[u8]) -> Heed {
        self.0.pact().heed(bytes)
    }

    fn give(&self, links: &mut Links, rank: u32, index: usize) -> Result<()> {
        let pact = self.0.pact();
        let (part, descriptor) = match index.checked_sub(1) {
            Some(index) => self.0.give(rank, index)?,
            None => {
                let own = pact.ballot.as_ref().filter(|_| pact.group().rank == 0);
                let words = own.map(|ballot| ballot.memory().0.export(&*pact.beside.faults)).transpose()?;
                (self.begins(), words)
            }
        };
        links.send(rank, &pact.said(&part), descriptor)
    }

    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        // Of this number, by `heed`, or no message of a pact, which is nothing.
        let (bytes, _) = split(bytes).unwrap_or_default();
        let pact = self.0.pact();
        if of_pact(bytes) == Some(pact.kinds.fails) {
            return Err(pact.error(Kind::Cancelled, "a rank that has given up").with("rank", rank));
        }
        match index.checked_sub(1) {
            Some(index) => self.0.take(rank, index, bytes, descriptor),
            None => {
                let begins = self.begins();
                self.0.pact_mut().began(&begins, rank, bytes, descriptor)
            }
        }
    }
}

/// As [`super::Update::share`].
pub(in crate::weights) fn share(
    of: &mut impl Agreed,
    links: &mut Links,
    stream: Stream,
    at_most: Duration,
) -> Result<()> {
    let pact = of.pact();
    if pact.state != State::Filling {
        return Err(pact.error(Kind::InvalidState, "what was shared before, or is over"));
    }
    of.is_filled()?;
    let (own, group) = (*links.own(), pact.group());
    if (own.group, own.rank, own.ranks, own.plan)
        != (group.id, group.rank, group.ranks, pact.beside.plan.digest())
    {
        return Err(pact
            .error(Kind::InvalidConfig, "sessions of another group or plan")
            .with("rank", own.rank));
    }
    let all = pact.all_there(links);
    let shared = match &all {
        // Nothing was said: a rank that waits to be attached would take it for a part.
        Err(_) => all,
        Ok(()) => {
            let pact = of.pact_mut();
            pact.shared = Some(links.mark());
            pact.state = State::Sharing;
            let shared = Exchange(&mut *of).exchanged(links, stream, at_most);
            match shared {
                Ok(()) => of.pact_mut().state = State::Shared,
                Err(_) => Exchange(of).fails(links),
            }
            shared
        }
    };
    links.put_back();
    shared
}

/// A rank's part in the decision of all.
struct Vote<'a> {
    pact: &'a Pact,
    ballot: &'a Ballot<Shared>,
    links: &'a mut Links,
    shared: &'a Mark,
}

impl Vote<'_> {
    /// Waits for what all ranks decide, and serves the sessions meanwhile.
    fn decide(&mut self, border: &Border) -> Result<Outcome> {
        let start = Instant::now();
        // Before this rank is ready: no rank commits without it.
        let mut broken = self.unbroken().err();
        if broken.is_none() {
            self.ballot.ready(self.pact.group().rank, border.step);
        }
        let pact = self.pact;
        let wrong = |kind, what| pact.error(kind, what);
        let strange = |value| {
            wrong(Kind::Corrupt, "a decision that no rank writes")
                .with("value", value)
                .hint("end all ranks of the group: they may have different weights")
        };
        let other = || wrong(Kind::Cancelled, "another rank has aborted");
        loop {
            let why = match broken.take() {
                Some(error) => error,
                None => match self.ballot.look(border.step) {
                    Look::Decided(Decision::Committed) => return Ok(Outcome::Committed),
                    Look::Decided(Decision::Aborted) => return Ok(Outcome::Aborted(other())),
                    Look::Strange(value) => return Err(strange(value)),
                    Look::Differs(rank, step) => wrong(Kind::InvalidState, "a rank at another border")
                        .with("rank", rank)
                        .with("step", step)
                        .with("own", border.step),
                    Look::Waits(rank) if start.elapsed() >= border.at_most => {
                        wrong(Kind::TimedOut, "a rank that is not ready").with("rank", rank)
                    }
                    Look::Waits(_) => {
                        broken = self.served().err();
                        continue;
                    }
                },
            };
            // Another rank may have decided meanwhile.
            return match self.ballot.abort() {
                Look::Decided(Decision::Committed) => Ok(Outcome::Committed),
                Look::Strange(value) => Err(strange(value)),
                _ => Ok(Outcome::Aborted(why)),
            };
        }
    }

    /// Checks that no rank was lost since it was shared, also none that has come back: its new process has the old
    /// state, and what the old one said of being ready says nothing of it.
    fn unbroken(&mut self) -> Result<()> {
        self.links.settle()?;
        if let Some((_, error)) = self.links.lost().next() {
            return Err(error.clone());
        }
        match self.links.lost_since(self.shared) {
            None => Ok(()),
            Some(rank) => Err(self
                .pact
                .error(Kind::PeerLost, "a rank that has ended and come back since the ranks have shared")
                .with("rank", rank)
                .hint("begin again with a higher number")),
        }
    }

    /// Serves the sessions for a moment.
    fn served(&mut self) -> Result<()> {
        os::wait(&[], PAUSE, &*self.pact.beside.faults)?;
        self.unbroken()
    }
}

impl Windows {
    /// What all ranks decide at a border. `layers` are the ordinals of those that change. An error of the outer result
    /// comes before this rank is ready, so that nothing is decided; one of the inner is a decision that no rank writes.
    pub(in crate::weights) fn decided(
        &mut self,
        pact: &Pact,
        layers: impl IntoIterator<Item = usize>,
        links: &mut Links,
        border: &Border,
    ) -> Result<Result<Outcome>> {
        let wrong = |what| Err(pact.error(Kind::InvalidState, what));
        let voted = pact.ballot.as_ref().zip(pact.shared.as_ref());
        let Some((ballot, shared)) = voted.filter(|_| pact.state == State::Shared) else {
            return wrong("what was not shared, or is over");
        };
        if !links.made(shared) {
            return wrong("other sessions than it was shared over");
        }
        if !pact.beside.is_of(self) {
            return wrong("what was begun by other windows");
        }
        if self.device.is_capturing(border.stream)? {
            return Err(pact.error(Kind::Busy, "weights cannot be remapped on a stream that is captured"));
        }
        layers.into_iter().try_for_each(|ordinal| self.usable(ordinal))?;
        self.staging.drain(&*self.device, border.stream)?;
        // Fills and readings have ended when it was shared and verified.
        let decided = Vote { pact, ballot, links: &mut *links, shared }.decide(border);
        links.put_back();
        Ok(decided)
    }
}
