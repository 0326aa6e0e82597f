//! What a receiver does with the frames that it gets.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::digest::{digest, of_payload};
use crate::transfer::frames::{Frame, Notice, Payload, Reason, Rows, answer};
use crate::transfer::quarantine::{Fence, Writer};
use crate::transfer::receiver::arriving::{Arriving, Saying, Says, Waiting};
use crate::transfer::receiver::{Event, Mover, Receiver, Where};
use crate::transfer::runs::{Of, Request, Run, room};

const OPERATION: &str = "transfer receiver";

/// Why a part fails its request.
type Wrong = (Reason, Error);

/// Of a part without digests, at an end that wants them.
fn without_digests() -> Wrong {
    let error = Error::new(Kind::BadFormat, OPERATION).at("runs without digests, which this end wants");
    (Reason::BadFormat, error.hint("set the options' digests of both ends alike"))
}

/// What became of a run.
enum Carried {
    Stored,
    /// It could not be fetched, or does not have its digest.
    Wrong,
    /// It could not be stored.
    Broken(Error),
}

/// Fetches a run, checks it if it was told with a digest, and stores it.
fn carry(
    mover: &mut impl Mover,
    (link, fence, at): (u32, Fence, Where),
    (run, told): (&Run, Option<u32>),
    bytes: &mut Vec<u8>,
) -> Result<Carried> {
    if told.is_none() {
        match mover.fetch_in_place(link, fence, at, run) {
            Ok(true) => return Ok(Carried::Stored),
            Ok(false) => {}
            Err(_) => return Ok(Carried::Wrong),
        }
    }
    let bytes = room(bytes, run)?;
    let fetched = mover.fetch(link, fence, at, run, bytes);
    if fetched.is_err() || told.is_some_and(|told| digest(fence, run, bytes) != told) {
        return Ok(Carried::Wrong);
    }
    Ok(mover.store(fence, run, bytes).map_or_else(Carried::Broken, |()| Carried::Stored))
}

/// Rows without digests count only if their sender has not closed the connection by now: what it has told is there
/// until then.
fn still_told(link: u32, part: &Rows<'_>, mover: &mut impl Mover) -> std::result::Result<(), Wrong> {
    if part.digests.are_there() || mover.holds(link) {
        return Ok(());
    }
    let error = Error::new(Kind::PeerLost, OPERATION).at("a sender that has closed its connection");
    Err((Reason::PeerLost, error.with("link", link)))
}

impl Receiver {
    /// A frame has come. The rows that it tells of are moved in the call.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a frame that no sender of this version sends, and in this place; those of a hello:
    /// [`Kind::BadVersion`], and what the two sides do not agree on; [`Kind::Exhausted`] for a sender that does not
    /// keep to the window. The caller closes the connection and says [`Receiver::disconnect`].
    pub fn frame(&mut self, link: u32, bytes: &[u8], mover: &mut impl Mover) -> Result<()> {
        let foreign = |place| Err(Error::new(Kind::BadFormat, OPERATION).at(place).with("link", link));
        let Some(index) = self.lines.iter().position(|line| line.link == link) else {
            return foreign("a frame of no connection");
        };
        let frame = Frame::decode(bytes)?;
        let known = self.lines.get(index).and_then(|line| line.peer.as_ref()).is_some();
        match frame {
            Frame::Hello(greeting) if !known => {
                let others = self.lines.iter().filter_map(|line| line.peer.as_ref());
                let peer = self.own.meet(&greeting, others.map(|peer| &peer.paired))?;
                self.events.push_back(Event::Met { link, rank: peer.rank });
                self.lines.iter_mut().skip(index).take(1).for_each(|line| line.peer = Some(peer.clone()));
            }
            Frame::Hello(_) => return foreign("a second hello"),
            _ if !known => return foreign("a frame before the hello"),
            Frame::Notice(notice) => self.notice((index, link), &notice, mover)?,
            Frame::Payload(payload) => self.payload(index, &payload)?,
            Frame::Failed { reason: Reason::Done, .. } => return foreign("a failure for no reason"),
            Frame::Failed { fence, reason } => self.failed(index, (fence, link), reason)?,
            Frame::Drained { fence } if self.arriving.contains_key(&fence) => {
                return foreign("an answer to an end that was not told");
            }
            Frame::Drained { fence } => self.drained(index, (fence, link)),
            Frame::Known { fence } => self.known(index, fence),
            _ => return foreign("a frame that only receivers send"),
        }
        self.lines.iter_mut().skip(index).take(1).for_each(|line| line.heard = true);
        Ok(())
    }

    /// A sender knows a grant.
    fn known(&mut self, index: usize, fence: Fence) {
        if let Some(line) = self.lines.get_mut(index) {
            line.sayings.retain(|saying| saying.fence != fence || saying.says != Says::Grant);
        }
    }

    /// Whether a request takes rows from a connection. If so, its sender knows the grant.
    fn hears(&mut self, index: usize, fence: Fence) -> bool {
        let Some(link) = self.lines.get(index).map(|line| line.link) else { return false };
        let hears = self.arriving.get(&fence).is_some_and(|arriving| arriving.links.contains(&link));
        if hears {
            self.known(index, fence);
        }
        hears
    }

    /// Whether a message waits to be answered: it has come twice.
    fn waits(&self, index: usize, number: u64) -> bool {
        let mut frames = self.lines.get(index).into_iter().flat_map(|line| &line.frames);
        frames.any(|waiting| waiting.answers == Some(number))
    }

    /// Queues an answer to a message of so many parts.
    fn answer(&mut self, index: usize, number: u64, parts: u32) -> Result<()> {
        let mut bytes = Vec::new();
        answer(&mut bytes, number, &self.failed);
        self.say(index, Waiting { bytes, parts: parts.max(1), answers: Some(number) })
    }

    /// Queues a frame that a sender's message brings about.
    fn say(&mut self, index: usize, waiting: Waiting) -> Result<()> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(()) };
        line.parts = line.parts.saturating_add(waiting.parts);
        // A part brings about an answer, and an end if its use of pages is not arriving.
        if line.parts > self.options.window.saturating_mul(2) {
            return Err(Error::new(Kind::Exhausted, OPERATION)
                .at("a sender that does not wait for answers")
                .with("link", line.link)
                .with("most", self.options.window));
        }
        line.frames.push_back(waiting);
        Ok(())
    }

    fn notice(
        &mut self,
        (index, link): (usize, u32),
        notice: &Notice<'_>,
        mover: &mut impl Mover,
    ) -> Result<()> {
        if self.waits(index, notice.number) {
            return Ok(());
        }
        // Before anything is moved for a sender that does not keep to the window.
        if notice.parts().count() as u64 > u64::from(self.options.window) {
            return Err(Error::new(Kind::Exhausted, OPERATION)
                .at("parts of a notice")
                .with("most", self.options.window));
        }
        self.failed.clear();
        let (mut parts, mut told) = (0, 0_u32);
        for (place, part) in (0..).zip(notice.parts()) {
            parts += 1;
            let first = told;
            told = told.saturating_add(part.digests.count() as u32);
            // What is told of another use moves nothing.
            if !self.hears(index, part.fence) {
                self.disown(index, part.fence)?;
                continue;
            }
            let (fence, layer) = (part.fence, part.layer);
            let ready = self.is_ready(fence, layer);
            let taken = self.take(index, (place, first), &part, mover);
            match taken.and_then(|()| still_told(link, &part, mover)) {
                Ok(()) => {
                    if !ready && self.is_ready(fence, layer) {
                        self.events.push_back(Event::Ready { fence, layer });
                        self.settle(fence);
                    }
                }
                Err((reason, error)) => {
                    self.fail(fence, reason, error.with("layer", layer).with("token", part.tokens.start));
                }
            }
        }
        self.answer(index, notice.number, parts)
    }

    /// Says that a request is whole, if it is.
    pub(super) fn settle(&mut self, fence: Fence) {
        if self.arriving.get(&fence).is_some_and(Arriving::is_whole) {
            self.events.push_back(Event::Whole { fence });
            self.end(fence, Reason::Done);
        }
    }

    /// Moves the runs of a part, which is given by its place in the notice and that of its first run. The index of each
    /// that failed is left in `failed`.
    fn take(
        &mut self,
        index: usize,
        (place, mut nth): (u16, u32),
        part: &Rows<'_>,
        mover: &mut impl Mover,
    ) -> std::result::Result<(), Wrong> {
        let wrong = |at| (Reason::BadFormat, Error::new(Kind::BadFormat, OPERATION).at(at));
        let Some(arriving) = self.arriving.get_mut(&part.fence) else { return Ok(()) };
        let line = self.lines.get(index);
        let found = line.and_then(|line| Some((line.link, line.far, line.peer.as_ref()?)));
        let Some((link, far, peer)) = found else { return Ok(()) };
        let tokens = part.tokens.clone();
        if tokens.is_empty() || tokens.start < arriving.first || tokens.end > arriving.tokens {
            return Err(wrong("tokens of a notice"));
        }
        let (paired, fence) = (Arc::clone(&peer.paired), part.fence);
        let own = (self.own.rank.stage, self.own.rank.lane);
        let between = Of::Between((peer.rank.stage, peer.rank.lane), own);
        let chunks = [part.chunk];
        let chunks = if paired.divides() { chunks.as_slice() } else { &[] };
        let request = Request { tokens: tokens.end, replicas: [0, 0], chunks };
        if self.options.digests && !part.digests.are_there() {
            return Err(without_digests());
        }
        let mut digests = part.digests.iter().peekable();
        let (bytes, failed, counts) = (&mut self.bytes, &mut self.failed, &mut self.counts);
        let (mut broken, mut runs, all) = (None, 0_u32, part.digests.are_all());
        let first_page = arriving.first / paired.plan.target.page_tokens.max(1);
        // Ends the visit: what comes then is not told.
        let enough = || Error::new(Kind::Cancelled, OPERATION);
        let visited = paired.plan.runs(&request, (part.layer, tokens), between, |run| {
            let own = runs;
            runs += 1;
            let told = match digests.next_if(|(index, _)| *index == own) {
                Some((_, told)) => told,
                None if all || digests.peek().is_none() => return Err(enough()),
                None => return Ok(()),
            };
            let page = run.to.page.checked_sub(first_page).and_then(|at| arriving.landing.get(at as usize));
            let at = match (far, page) {
                (true, Some(page)) => Where::Landing(*page),
                (true, None) => return Err(Error::new(Kind::OutOfRange, OPERATION).at("landing pages")),
                (false, _) => Where::Origin { origin: part.origin, nth },
            };
            nth = nth.saturating_add(1);
            let found = arriving.ledger.find(&run)?;
            if arriving.ledger.has(&found) {
                return Ok(());
            }
            match carry(mover, (link, fence, at), (&run, told), bytes)? {
                Carried::Stored => {
                    arriving.ledger.set(&found);
                    (counts.runs, counts.bytes) = (counts.runs + 1, counts.bytes + run.total());
                }
                Carried::Wrong => {
                    arriving.wrong = Some((run.layer, run.component, run.token));
                    failed.push((place, own));
                    counts.wrong += 1;
                }
                Carried::Broken(error) => {
                    broken = Some((Reason::Aborted, error));
                    return Err(enough());
                }
            }
            Ok(())
        });
        if let Some(broken) = broken {
            return Err(broken);
        }
        let told = part.digests.count() > 0 && digests.next().is_none();
        match visited {
            Ok(()) if told => Ok(()),
            Err(error) if error.kind() == Kind::Cancelled && told && !all => Ok(()),
            Err(error) if error.kind() == Kind::OutOfMemory => Err((Reason::Aborted, error)),
            Err(error) if error.kind() != Kind::Cancelled => Err(wrong("rows of a notice")),
            _ => Err(wrong("digests of a notice")),
        }
    }

    fn payload(&mut self, index: usize, payload: &Payload<'_>) -> Result<()> {
        let Payload { number, fence, kind, digest, bytes } = *payload;
        if self.waits(index, number) {
            return Ok(());
        }
        self.failed.clear();
        if !self.hears(index, fence) {
            self.disown(index, fence)?;
        } else if of_payload(fence, kind, bytes) != digest {
            self.failed.push((0, 0));
        } else if let Some(arriving) = self.arriving.get_mut(&fence)
            && let Some(at) = arriving.payloads.iter().position(|other| *other == kind)
        {
            // Each rank of the sender sends it; the first one counts.
            arriving.payloads.remove(at);
            self.events.push_back(Event::Payload { fence, kind, bytes: bytes.to_vec() });
            self.settle(fence);
        }
        self.answer(index, number, 1)
    }

    /// A sender gives a use of pages up.
    fn failed(&mut self, index: usize, (fence, link): (Fence, u32), reason: Reason) -> Result<()> {
        if !self.hears(index, fence) {
            return self.disown(index, fence);
        }
        let error =
            Error::new(reason.kind(), OPERATION).at("the sender gave a request up").with("link", link);
        let wrong = self.arriving.get(&fence).and_then(|arriving| arriving.wrong);
        let error = match wrong.filter(|_| reason == Reason::Corrupt) {
            Some((layer, component, token)) => Error::new(reason.kind(), OPERATION)
                .at("runs without their digests, time after time")
                .with("layer", layer)
                .with("component", component)
                .with("token", token),
            None => error,
        };
        self.fail(fence, reason, error);
        Ok(())
    }

    /// A sender names a use of pages that is not arriving from it: it is told the end again, or that nothing of it is
    /// read here.
    fn disown(&mut self, index: usize, fence: Fence) -> Result<()> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(()) };
        let ends = |saying: &&mut Saying| saying.fence == fence && saying.says != Says::Grant;
        if let Some(saying) = line.sayings.iter_mut().find(ends) {
            (saying.told, saying.times) = (saying.told.map(|(first, _)| (first, Duration::ZERO)), 0);
            return Ok(());
        }
        let mut bytes = Vec::new();
        Frame::End { fence, reason: Reason::Aborted }.encode(&mut bytes);
        match line.frames.iter().any(|waiting| waiting.bytes == bytes) {
            true => Ok(()),
            false => self.say(index, Waiting { bytes, parts: 1, answers: None }),
        }
    }

    /// A sender has nothing in flight under a fence any more.
    fn drained(&mut self, index: usize, (fence, link): (Fence, u32)) {
        if let Some(landing) = self.quarantine.drained(fence, Writer(link)) {
            self.events.push_back(Event::Free { landing });
        }
        let Some(line) = self.lines.get_mut(index) else { return };
        let before = line.sayings.len();
        line.sayings.retain(|saying| saying.fence != fence);
        if line.sayings.len() < before {
            self.ended(fence);
        }
    }
}
