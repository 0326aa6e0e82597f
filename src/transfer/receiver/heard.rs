//! What a receiver does with the frames that it gets.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::transfer::digest::{digest, of_payload};
use crate::transfer::frames::{Frame, Notice, Payload, Reason, Rows, answer};
use crate::transfer::quarantine::{Fence, Writer};
use crate::transfer::receiver::{Event, Mover, Receiver};
use crate::transfer::runs::{Of, Request, room};

const OPERATION: &str = "transfer receiver";

/// Why a part fails its request.
type Wrong = (Reason, Error);

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
                self.lines.iter_mut().skip(index).take(1).for_each(|line| line.peer = Some(peer.clone()));
            }
            _ if !known => return foreign("a frame before the hello"),
            Frame::Notice(notice) => self.notice(index, &notice, mover)?,
            Frame::Payload(payload) => self.payload(index, &payload)?,
            Frame::Failed { fence, reason } => self.failed(index, (fence, link), reason)?,
            Frame::Drained { fence } => self.drained(fence, link),
            _ => return foreign("a frame that only receivers send"),
        }
        Ok(())
    }

    /// Whether a request takes rows from a connection. From now on it is not granted again there.
    fn hears(&mut self, fence: Fence, link: u32) -> bool {
        let arriving = self.arriving.iter_mut().find(|arriving| arriving.fence == fence);
        let from = arriving.and_then(|arriving| arriving.from.iter_mut().find(|from| from.link == link));
        from.map(|from| from.heard = true).is_some()
    }

    /// Queues an answer to a message of so many parts.
    fn answer(&mut self, index: usize, number: u64, parts: u32) -> Result<()> {
        let mut bytes = Vec::new();
        answer(&mut bytes, number, &self.failed);
        self.say(index, bytes, parts.max(1))
    }

    /// Queues a frame that a sender's message of so many parts brings about.
    fn say(&mut self, index: usize, bytes: Vec<u8>, parts: u32) -> Result<()> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(()) };
        line.answers = line.answers.saturating_add(parts);
        // A part brings about an answer, and an end if its use of pages is not arriving.
        if line.answers > self.options.window.saturating_mul(2) {
            return Err(Error::new(Kind::Exhausted, OPERATION)
                .at("a sender that does not wait for answers")
                .with("link", line.link)
                .with("most", self.options.window));
        }
        line.frames.push_back((bytes, parts));
        Ok(())
    }

    fn notice(&mut self, index: usize, notice: &Notice<'_>, mover: &mut impl Mover) -> Result<()> {
        let Some(link) = self.lines.get(index).map(|line| line.link) else { return Ok(()) };
        self.failed.clear();
        let mut parts = 0;
        for (place, part) in (0..).zip(notice.parts()) {
            parts += 1;
            // What is told of another use moves nothing.
            if !self.hears(part.fence, link) {
                self.disown(index, part.fence)?;
                continue;
            }
            match self.take(index, place, &part, mover) {
                Ok(()) => self.settle(part.fence),
                Err((reason, error)) => {
                    let error = error.with("layer", part.layer).with("token", part.tokens.start);
                    self.fail(part.fence, reason, error);
                }
            }
        }
        self.answer(index, notice.number, parts)
    }

    /// Moves the runs of a part. The index of each that failed is left in `failed`.
    fn take(
        &mut self,
        index: usize,
        place: u16,
        part: &Rows<'_>,
        mover: &mut impl Mover,
    ) -> std::result::Result<(), Wrong> {
        let wrong = |at| (Reason::BadFormat, Error::new(Kind::BadFormat, OPERATION).at(at));
        let Some(arriving) = self.arriving.iter_mut().find(|arriving| arriving.fence == part.fence) else {
            return Ok(());
        };
        let Some((link, peer)) =
            self.lines.get(index).and_then(|line| Some((line.link, line.peer.as_ref()?)))
        else {
            return Ok(());
        };
        let tokens = part.tokens.clone();
        if tokens.is_empty() || tokens.start < arriving.first || tokens.end > arriving.tokens {
            return Err(wrong("tokens of a notice"));
        }
        let paired = Arc::clone(&peer.paired);
        let own = (self.own.rank.stage, self.own.rank.lane);
        let between = Of::Between((peer.rank.stage, peer.rank.lane), own);
        let chunks = [part.chunk];
        let chunks = if paired.divides() { chunks.as_slice() } else { &[] };
        let request = Request { tokens: tokens.end, replicas: [0, 0], chunks };
        let mut digests = part.digests.iter().peekable();
        let (mut run_index, fence, mut broken) = (0_u32, part.fence, None);
        let visited = paired.plan.runs(&request, (part.layer, tokens), between, |run| {
            let own = run_index;
            run_index += 1;
            let Some((_, told)) = digests.next_if(|(index, _)| *index == own) else { return Ok(()) };
            if arriving.ledger.has(&run)? {
                return Ok(());
            }
            let bytes = room(&mut self.bytes, &run)?;
            let fetched = mover.fetch(link, fence, part.origin, &run, bytes);
            if fetched.is_err() || digest(fence, &run, bytes) != told {
                self.failed.push((place, own));
                return Ok(());
            }
            if let Err(error) = mover.store(fence, &run, bytes) {
                broken = Some((Reason::Aborted, error.clone()));
                return Err(error);
            }
            arriving.ledger.note(&run).map(|_| ())
        });
        if let Some(broken) = broken {
            return Err(broken);
        }
        let all = part.digests.all().is_none_or(|all| all as u64 == u64::from(run_index));
        match visited {
            Ok(()) if all && digests.next().is_none() => Ok(()),
            Ok(()) => Err(wrong("digests of a notice")),
            Err(error) if error.kind() == Kind::OutOfMemory => Err((Reason::Aborted, error)),
            Err(_) => Err(wrong("rows of a notice")),
        }
    }

    fn payload(&mut self, index: usize, payload: &Payload<'_>) -> Result<()> {
        let Some(link) = self.lines.get(index).map(|line| line.link) else { return Ok(()) };
        let Payload { number, fence, kind, digest, bytes } = *payload;
        self.failed.clear();
        if self.hears(fence, link) {
            if of_payload(fence, kind, bytes) != digest {
                self.failed.push((0, 0));
            } else if let Some(arriving) = self.arriving.iter_mut().find(|arriving| arriving.fence == fence)
                && let Some(at) = arriving.payloads.iter().position(|other| *other == kind)
            {
                // Each rank of the sender sends it; the first one counts.
                arriving.payloads.remove(at);
                self.events.push_back(Event::Payload { fence, kind, bytes: bytes.to_vec() });
                self.settle(fence);
            }
        } else {
            self.disown(index, fence)?;
        }
        self.answer(index, number, 1)
    }

    /// A sender gives a use of pages up.
    fn failed(&mut self, index: usize, (fence, link): (Fence, u32), reason: Reason) -> Result<()> {
        if self.hears(fence, link) {
            let error = Error::new(reason.kind(), OPERATION).at("the sender gave a request up");
            self.fail(fence, reason, error.with("link", link));
            return Ok(());
        }
        self.disown(index, fence)
    }

    /// A sender names a use of pages that is not arriving from it: it is told the end again, or that nothing of it is
    /// read here.
    fn disown(&mut self, index: usize, fence: Fence) -> Result<()> {
        let Some(link) = self.lines.get(index).map(|line| line.link) else { return Ok(()) };
        let ending = self.endings.iter_mut().find(|ending| ending.fence == fence);
        let told = ending.and_then(|ending| ending.links.iter_mut().find(|(other, _)| *other == link));
        if let Some((_, told)) = told {
            *told = None;
            return Ok(());
        }
        let mut bytes = Vec::new();
        Frame::End { fence, reason: Reason::Aborted }.encode(&mut bytes);
        self.say(index, bytes, 1)
    }

    /// A sender has nothing in flight under a fence any more.
    fn drained(&mut self, fence: Fence, link: u32) {
        if let Some(landing) = self.quarantine.drained(fence, Writer(link)) {
            self.events.push_back(Event::Free { landing });
        }
        if let Some(ending) = self.endings.iter_mut().find(|ending| ending.fence == fence) {
            ending.links.retain(|(other, _)| *other != link);
        }
        self.clear();
    }
}
