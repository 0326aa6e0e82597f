//! The sender's machine: one rank of a prefill instance.
//!
//! It does no I/O and knows no clock. Frames, times and what the engine has computed go in; frames and actions come
//! out of [`Sender::poll`]. It reads rows through a [`Source`], for their digests alone ([`Options::digests`]).
//!
//! # A request's way
//!
//! | what happens | the sender |
//! |---|---|
//! | [`Sender::begin`] | knows the request |
//! | a grant comes, before or after that | tells what is computed, and from then on each part at once, if it is long |
//! | [`Sender::computed`] | tells the parts of all requests of the call in one notice for each receiver |
//! | an answer | releases parts that all receivers have; sends failed runs again |
//! | [`Sender::finish`] | knows that nothing more comes; a short prompt's rows are told only now, in one notice |
//! | all receivers have ended | [`Event::Ended`] |
//!
//! **Names.** A request's number is of one try: no other try at it has the same, here or at any receiver. So what is
//! late of an earlier try names nothing. A use of pages is named by its connection and its fence: each receiver counts
//! generations by itself.
//!
//! **Nothing is sent without a grant.** Decode gives pages first. Rows that are computed before are held.
//!
//! **Parts are held until they are answered**, because the receiver reads them from where they are. A part of several
//! receivers is released when the last one has answered or ended. A connection that is gone counts as ended. A receiver
//! that reads on meanwhile finds other bytes, which do not have their digests, and will learn that the request failed.
//!
//! **Writers from afar** ([`Action::Write`]) write rows first, and tell them when they are written. After an end the
//! sender says *drained* once none of the fence's writes is in flight. A grant that comes after its end is none.
//!
//! **Lost messages.** A notice, a payload or a failure that is not answered within [`Options::resend`] is sent again. A
//! connection on which nothing comes for [`Options::patience`], although something is owed, is to be closed
//! ([`Action::Close`]).
//!
//! **Costs.** A message is a look at the runs of its rows. They are counted before where they may be too many for it,
//! and where their bytes are paced. A request takes memory for its parts and jobs; a run takes none, but for its four
//! bytes in a frame. A call looks at the requests that it names; a poll at each connection, and at the messages there
//! that were not answered.

mod heard;
mod line;
mod poll;
mod request;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{Frame, PAYLOAD_MAX, RUNS_MAX, Rank, Reason};
use crate::transfer::pairing::{Own, Role};
use crate::transfer::plan::Plan;
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::{Of, Request, Run};
use crate::transfer::side::Side;
use line::{Failing, Job, Line, What};
use request::{Held, Sending};

pub use request::{Computed, Landing};

const OPERATION: &str = "transfer sender";
/// How many ended requests are remembered at least, so that late grants are refused.
const REMEMBERED: usize = 1 << 10;

/// How a sender behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Prompts of at most so many tokens are told at once when they are finished. 0 for none.
    pub bulk_tokens: u32,
    /// The most bytes of rows a second that are told or written for the first time; 0 for no limit.
    pub bytes_per_second: u64,
    /// The most bytes of rows that a notice tells, if they are more than one token's. What a stream keeps for a frame
    /// has this bound.
    pub notice_bytes: u64,
    /// Whether each run is told with its digest. Without them nothing finds wrong rows, and a receiver whose
    /// [`receiver::Options::digests`](crate::transfer::receiver::Options::digests) is set refuses them.
    pub digests: bool,
    /// How often a run is sent again.
    pub repeats: u32,
    /// After how long a message that was not answered is sent again; each time twice as long.
    pub resend: Duration,
    /// After how long a connection is closed on which nothing has come, although something is owed: a hello, an answer,
    /// or an end. Time counts between polls, so all frames that have come are given before a poll.
    pub patience: Duration,
    /// The most requests at a time, and for each connection the most grants of requests that have not begun.
    pub requests: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            bulk_tokens: 256,
            bytes_per_second: 0,
            notice_bytes: 32 << 20,
            digests: true,
            repeats: 3,
            resend: Duration::from_millis(200),
            patience: Duration::from_secs(5),
            requests: 1 << 12,
        }
    }
}

/// Where a sender's rows are read for their digests.
pub trait Source {
    /// Copies a run's pieces, one after another, into `into`.
    ///
    /// # Errors
    /// Any: the request fails.
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()>;
}

/// What a sender wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the frame, whose bytes are in the buffer of the call.
    Frame {
        /// On this connection.
        link: u32,
    },
    /// Write a part's runs to the receiver's landing pages, and say [`Sender::written`].
    Write {
        /// The connection.
        link: u32,
        /// The write.
        write: u64,
        /// The use of pages, as granted on this connection.
        fence: Fence,
        /// The receiver's pages.
        landing: Landing,
        /// The rows; its tokens are those to write.
        rows: Computed,
        /// The runs to write, by index; none means all.
        some: Option<Vec<u32>>,
    },
    /// Close a connection whose other end has not answered in time, and say [`Sender::disconnect`].
    Close {
        /// The connection.
        link: u32,
    },
    /// Something has happened.
    Event(Event),
}

/// What a sender has told since its beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Runs, each as often as it was told.
    pub runs: u64,
    /// Runs that were told again because they had arrived with other bytes.
    pub again: u64,
    /// Messages that were sent again because no answer came.
    pub repeats: u64,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A rank of a receiver has said hello.
    Met {
        /// The connection.
        link: u32,
        /// The rank.
        rank: Rank,
    },
    /// A receiver has granted.
    Granted {
        /// The request.
        request: u64,
        /// The connection.
        link: u32,
        /// The use of pages.
        fence: Fence,
        /// The first token that is wanted.
        first: u32,
    },
    /// Nothing needs these rows any more: their memory may be used again.
    Released {
        /// The request.
        request: u64,
        /// Where they are.
        origin: u64,
    },
    /// The request is over on this rank: all receivers have it, or it failed. Its rows have been released before.
    Ended {
        /// The request.
        request: u64,
        /// Why.
        reason: Reason,
    },
}

/// A grant of a request that has not begun.
#[derive(Debug)]
struct Early {
    link: u32,
    fence: Fence,
    tokens: u32,
    first: u32,
    replica: u32,
    landing: Vec<u32>,
    /// Whether the receiver has all it wants already.
    done: bool,
}

/// See the module's head.
#[derive(Debug)]
pub struct Sender {
    own: Own,
    options: Options,
    lines: Vec<Line>,
    requests: BTreeMap<u64, Sending>,
    deadlines: BTreeSet<(Duration, u64)>,
    early: Vec<Early>,
    /// Requests that were given up before they began here.
    given_up: VecDeque<(u64, Reason)>,
    ended: VecDeque<(u64, Reason)>,
    events: VecDeque<Event>,
    /// The number of the next write.
    writes: u64,
    /// When the next rows may be told.
    pace: Duration,
    /// The line that is looked at first.
    turn: usize,
    /// Whether rows could not be read: connections that were looked at before have more to say.
    unreadable: bool,
    /// A run's bytes, and the runs of a job with their digests, if they are told.
    bytes: Vec<u8>,
    runs: Vec<(u32, Option<u32>)>,
    counts: Counts,
}

impl Sender {
    /// A rank of a sending instance, without connections.
    ///
    /// # Errors
    /// Those of [`Side::encode`]; [`Kind::OutOfRange`] for a rank that the side does not have; [`Kind::InvalidConfig`]
    /// for times of nothing.
    pub fn new(side: Side, rank: Rank, options: Options) -> Result<Sender> {
        if options.resend.is_zero() || options.patience.is_zero() {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("resend and patience"));
        }
        Ok(Sender {
            own: Own::new(side, rank, Role::Sender)?,
            options,
            lines: Vec::new(),
            requests: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            early: Vec::new(),
            given_up: VecDeque::new(),
            ended: VecDeque::new(),
            events: VecDeque::new(),
            writes: 0,
            pace: Duration::ZERO,
            turn: 0,
            unreadable: false,
            bytes: Vec::new(),
            runs: Vec::new(),
            counts: Counts::default(),
        })
    }

    /// The next event, which [`Sender::poll`] would give. It needs no time.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether a request has ended and is remembered: at least the last 1,024 are.
    pub fn has_ended(&self, request: u64) -> bool {
        !self.requests.contains_key(&request) && self.ended.iter().any(|(of, _)| *of == request)
    }

    /// What it has told.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// A connection to a rank of a receiving instance. `far` says that rows are written to its memory from here.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a number that another connection has now.
    pub fn connect(&mut self, link: u32, far: bool) -> Result<()> {
        if self.lines.iter().any(|line| line.link == link) {
            return Err(Error::new(Kind::InvalidState, OPERATION)
                .at("a connection twice")
                .with("link", link));
        }
        let mut line = Line::new(link, far);
        line.say(&self.own.hello(1))?;
        self.lines.push(line);
        Ok(())
    }

    /// A connection is gone, and with it everything that could be written through it. Requests that have pages of it
    /// fail.
    pub fn disconnect(&mut self, link: u32) {
        let Some(index) = self.lines.iter().position(|line| line.link == link) else { return };
        self.lines.remove(index);
        for early in self.early.extract_if(.., |early| early.link == link).collect::<Vec<_>>() {
            self.give_up_early(early.fence.request, Reason::PeerLost);
        }
        let mut named = Vec::new();
        for (request, sending) in &mut self.requests {
            for grant in sending.grants.iter_mut().filter(|grant| grant.link == link) {
                let lost = grant.ended.replace(grant.ended.unwrap_or(Reason::PeerLost)).is_none();
                grant.drained = true;
                named.push((*request, lost));
            }
        }
        for (request, lost) in named {
            if lost {
                self.fail(request, Reason::PeerLost);
            }
            self.clear(request);
        }
    }

    /// A request whose prompt is computed here. If a receiver has given it up already, it ends at once. At `deadline`
    /// it fails, if it is not over by then: a receiver may have gone before it granted. Without a deadline the engine
    /// has to give up what the router says has ended.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for one that has begun and not ended; [`Kind::Exhausted`]; [`Kind::OutOfRange`] for one
    /// of no tokens.
    pub fn begin(&mut self, request: u64, tokens: u32, deadline: Option<Duration>) -> Result<()> {
        let wrong = |kind, place| Err(Error::new(kind, OPERATION).at(place).with("request", request));
        if self.requests.contains_key(&request) {
            return wrong(Kind::InvalidState, "a request that has begun");
        }
        if self.requests.len() >= self.options.requests as usize {
            return wrong(Kind::Exhausted, "requests");
        }
        if tokens == 0 {
            return wrong(Kind::OutOfRange, "tokens");
        }
        self.ended.retain(|(ended, _)| *ended != request);
        self.requests.insert(request, Sending::new(tokens, deadline));
        self.deadlines.extend(deadline.map(|deadline| (deadline, request)));
        let own = self.early.extract_if(.., |early| early.fence.request == request);
        for early in own.collect::<Vec<_>>() {
            let link = early.link;
            let granted = match early.done {
                true => self.ended_early(link, early.fence),
                false => self.grant(early, false),
            };
            if granted.is_err() {
                self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.broken = true);
            }
        }
        let given_up = self.given_up.iter().position(|(of, _)| *of == request);
        if let Some((_, reason)) = given_up.and_then(|place| self.given_up.remove(place)) {
            self.fail(request, reason);
            self.clear(request);
        }
        Ok(())
    }

    /// Whether this side divides tokens, so that parts have chunks.
    pub(in crate::transfer) fn divides(&self) -> bool {
        self.own.divides()
    }

    /// Visits the runs of an [`Action::Write`]: those of its rows to the connection's receiver, of these all or some.
    ///
    /// # Errors
    /// [`Kind::Closed`] for a connection that is gone; errors of `visit`.
    pub fn runs(
        &self,
        link: u32,
        rows: &Computed,
        some: Option<&[u32]>,
        mut visit: impl FnMut(Run) -> Result<()>,
    ) -> Result<()> {
        let index = self.lines.iter().position(|line| line.link == link && line.peer.is_some());
        let found = index.and_then(|index| Some((index, self.lines.get(index)?.peer.as_ref()?)));
        let Some((index, peer)) = found else {
            return Err(Error::new(Kind::Closed, OPERATION)
                .at("a connection that is gone")
                .with("link", link));
        };
        let mut number = 0;
        self::visit(&peer.paired.plan, rows, &rows.tokens, self.between(index), |run| {
            let own = number;
            number += 1;
            if some.is_none_or(|some| some.binary_search(&own).is_ok()) { visit(run) } else { Ok(()) }
        })
    }

    fn sending(&mut self, request: u64) -> Result<&mut Sending> {
        self.requests.get_mut(&request).ok_or_else(|| {
            Error::new(Kind::Closed, OPERATION).at("a request that is over").with("request", request)
        })
    }

    /// Rows that the engine has computed and that are complete in memory. The parts of one call are told together.
    /// Each row of a request is given once. Of a request that has failed they are released when it is over.
    ///
    /// # Errors
    /// [`Kind::Closed`] for a request that is not known or over; [`Kind::OutOfRange`] for tokens that it does not have,
    /// for a chunk where the sender does not divide tokens, none where it does, and one that does not cover the
    /// tokens; [`Kind::InvalidState`] after [`Sender::finish`]. The parts before the wrong one are taken.
    pub fn computed(&mut self, parts: &[Computed]) -> Result<()> {
        parts.iter().try_for_each(|part| self.take_part(part))
    }

    fn take_part(&mut self, part: &Computed) -> Result<()> {
        let (request, bulk) = (part.request, self.options.bulk_tokens);
        let chunk = match &part.chunk {
            Some(chunk) => self.own.divides() && self.own.covers(chunk, &part.tokens),
            None => !self.own.divides(),
        };
        let sending = self.sending(request)?;
        let wrong = |kind, place| Err(Error::new(kind, OPERATION).at(place).with("layer", part.layer));
        if sending.finished {
            return wrong(Kind::InvalidState, "a part of a finished request");
        }
        if part.tokens.is_empty() || part.tokens.end > sending.tokens || !chunk {
            return wrong(Kind::OutOfRange, "tokens and chunk of a part");
        }
        let receivers = sending.receivers();
        sending.parts.push(Held { computed: part.clone(), waiting: receivers, released: false });
        let index = sending.parts.len() - 1;
        if sending.failed.is_some() || sending.tokens <= bulk {
            return Ok(());
        }
        self.queue_for_all(request, index)
    }

    /// Queues a part for all receivers that have granted.
    fn queue_for_all(&mut self, request: u64, index: usize) -> Result<()> {
        let Some(sending) = self.requests.get(&request) else { return Ok(()) };
        let grants: Vec<_> =
            sending.grants.iter().map(|g| (g.link, g.fence, g.first, g.ended.is_some())).collect();
        for (link, fence, first, ended) in grants {
            match ended {
                true => self.answered(request, index),
                false => self.queue(request, index, (link, fence, first))?,
            }
        }
        Ok(())
    }

    /// A payload for all receivers of a request: its first token, hidden state, passes of drafts.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfRange`] for more than [`PAYLOAD_MAX`] bytes; [`Kind::InvalidState`] for a kind
    /// that it has already, and after [`Sender::finish`].
    pub fn payload(&mut self, request: u64, kind: u8, bytes: &[u8]) -> Result<()> {
        let sending = self.sending(request)?;
        let wrong = |kind, place| Err(Error::new(kind, OPERATION).at(place).with("request", request));
        if bytes.len() > PAYLOAD_MAX {
            return wrong(Kind::OutOfRange, "bytes of a payload");
        }
        if sending.finished || sending.payloads.iter().any(|(other, _)| *other == kind) {
            return wrong(Kind::InvalidState, "a payload twice, or after the end");
        }
        sending.payloads.push((kind, bytes.to_vec()));
        if sending.failed.is_some() {
            return Ok(());
        }
        let index = sending.payloads.len() - 1;
        let grants: Vec<_> = sending.open().map(|grant| (grant.link, grant.fence)).collect();
        grants.into_iter().for_each(|(link, fence)| self.push_payload(link, fence, index));
        Ok(())
    }

    /// The engine has given all rows and payloads of a request.
    ///
    /// # Errors
    /// [`Kind::Closed`] for a request that is over.
    pub fn finish(&mut self, request: u64) -> Result<()> {
        let bulk = self.options.bulk_tokens;
        let sending = self.sending(request)?;
        let held = !std::mem::replace(&mut sending.finished, true) && sending.tokens <= bulk;
        let parts = if held && sending.failed.is_none() { sending.parts.len() } else { 0 };
        (0..parts).try_for_each(|index| self.queue_for_all(request, index))?;
        self.clear(request);
        Ok(())
    }

    /// Gives a request up. Its receivers are told, and its rows are held until they have answered.
    ///
    /// # Errors
    /// [`Kind::Closed`].
    pub fn abort(&mut self, request: u64) -> Result<()> {
        self.sending(request)?;
        self.fail(request, Reason::Aborted);
        self.clear(request);
        Ok(())
    }

    /// Something has come on a connection, though no whole frame: its other end lives.
    pub fn alive(&mut self, link: u32) {
        self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.heard = true);
    }

    /// The fabric has no room for frames and writes of a connection: none is asked for until [`Sender::unblock`]. One
    /// that has none for [`Options::patience`] is to be closed.
    pub fn block(&mut self, link: u32) {
        self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.blocked = true);
    }

    /// The fabric has room again. What was told is told again only after the whole time from now on.
    pub fn unblock(&mut self, link: u32) {
        let own = self.lines.iter_mut().filter(|line| line.link == link);
        own.for_each(|line| (line.blocked, line.unblocked) = (false, true));
    }

    /// The fabric had no room for a write that [`Action::Write`] has just asked for, and has not begun it. It is asked
    /// for again. Call it before anything else of this machine.
    pub fn postpone(&mut self, link: u32, write: u64) {
        self.lines.iter_mut().filter(|line| line.link == link).for_each(|line| line.postpone(write));
    }

    /// A write that [`Action::Write`] asked for has ended; nothing of it will land later. `failed` says that it did not
    /// write everything.
    pub fn written(&mut self, link: u32, write: u64, failed: bool) {
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return };
        let Some(index) = line.writing.iter().position(|(number, _)| *number == write) else { return };
        let (_, job) = line.writing.remove(index);
        let (request, fence) = (job.request, job.fence);
        let open = self.requests.get(&request).is_some_and(|sending| {
            let mut open = sending.open();
            sending.failed.is_none() && open.any(|grant| (grant.fence, grant.link) == (fence, link))
        });
        match job.what {
            What::Rows { part, .. } if !open => self.answered(request, part),
            _ => line.ready.push_back(job),
        }
        if failed && open {
            self.fail(request, Reason::PeerLost);
        }
        // A frame that finds no room is said again when the receiver asks.
        let _ = self.drain(request, fence, link);
        self.clear(request);
    }

    fn push_payload(&mut self, link: u32, fence: Fence, index: usize) {
        let request = fence.request;
        if let Some(line) = self.lines.iter_mut().find(|line| line.link == link) {
            let what = What::Payload(index);
            line.push(Job { request, fence, what, runs: 0, bytes: 0, size: 0, attempts: 0 });
        }
    }

    /// Queues a part's rows for a receiver, in as many jobs as their runs need.
    fn queue(&mut self, request: u64, index: usize, (link, fence, first): (u32, Fence, u32)) -> Result<()> {
        let (Some(sending), Some(line)) =
            (self.requests.get_mut(&request), self.lines.iter_mut().find(|line| line.link == link))
        else {
            return Ok(());
        };
        let (Some(held), Some(peer)) = (sending.parts.get_mut(index), &line.peer) else { return Ok(()) };
        let paired = Arc::clone(&peer.paired);
        let between =
            Of::Between((self.own.rank.stage, self.own.rank.lane), (peer.rank.stage, peer.rank.lane));
        let tokens = held.computed.tokens.start.max(first)..held.computed.tokens.end;
        // Halves of what is too much for one job.
        let mut rest = Some(tokens);
        let mut later = Vec::new();
        let mut jobs: u32 = 0;
        while let Some(tokens) = rest.take().or_else(|| later.pop()) {
            let exact = self.options.bytes_per_second > 0;
            let (runs, bytes) = measure(&paired.plan, &held.computed, &tokens, (between, exact))?;
            let size = paired.plan.most_bytes(held.computed.layer, tokens.len() as u32);
            if (runs > RUNS_MAX || size > self.options.notice_bytes) && tokens.len() > 1 {
                let half = tokens.start + tokens.len() as u32 / 2;
                later.push(half..tokens.end);
                rest = Some(tokens.start..half);
            } else if runs > 0 {
                let what = What::Rows { part: index, tokens, some: None };
                line.push(Job { request, fence, what, runs, bytes, size, attempts: 0 });
                jobs += 1;
            }
        }
        held.waiting = (held.waiting + jobs).saturating_sub(1);
        if let Some(origin) = held.free() {
            self.events.push_back(Event::Released { request, origin });
        }
        Ok(())
    }

    /// One message fewer names a part.
    fn answered(&mut self, request: u64, part: usize) {
        if let Some(origin) = self.requests.get_mut(&request).and_then(|sending| sending.answered(part)) {
            self.events.push_back(Event::Released { request, origin });
        }
    }

    /// A request cannot be sent: its receivers are told. What they may still read is held until they have answered.
    fn fail(&mut self, request: u64, reason: Reason) {
        let Some(sending) = self.requests.get_mut(&request).filter(|sending| sending.failed.is_none()) else {
            return;
        };
        sending.failed = Some(reason);
        for grant in sending.open() {
            if let Some(line) = self.lines.iter_mut().find(|line| line.link == grant.link) {
                line.drop_queued(grant.fence);
                line.failing.push(Failing { fence: grant.fence, reason, told: None });
            }
        }
    }

    /// Says that nothing lands under a fence any more, if it has ended and nothing is being written under it.
    fn drain(&mut self, request: u64, fence: Fence, link: u32) -> Result<()> {
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return Ok(()) };
        let grant = self.requests.get_mut(&request).and_then(|sending| sending.grant_of(fence, link));
        if let Some(grant) = grant.filter(|grant| grant.ended.is_some() && !grant.drained)
            && !line.writes(fence)
        {
            grant.drained = true;
            line.say(&Frame::Drained { fence })?;
        }
        Ok(())
    }

    /// Forgets a request if it is over.
    fn clear(&mut self, request: u64) {
        let Some(sending) = self.requests.get(&request).filter(|sending| sending.is_over()) else { return };
        let reason = sending.failed.unwrap_or(Reason::Done);
        sending.deadline.map(|deadline| self.deadlines.remove(&(deadline, request)));
        let parts = self.requests.remove(&request).into_iter().flat_map(|sending| sending.parts);
        let held = parts.filter(|held| !held.released).map(|held| held.computed.origin);
        self.events.extend(held.map(|origin| Event::Released { request, origin }));
        self.events.push_back(Event::Ended { request, reason });
        self.ended.push_back((request, reason));
        while self.ended.len() > REMEMBERED.max(self.options.requests as usize) {
            self.ended.pop_front();
        }
    }
}

/// How many runs some tokens of a part may have, and the bytes of these; exactly, if that is asked for or if they may
/// be more than a job has room for. None, if there is no run at all.
fn measure(
    plan: &Plan,
    part: &Computed,
    tokens: &Range<u32>,
    (between, exact): (Of, bool),
) -> Result<(usize, u64)> {
    let most = plan.most_runs(part.layer, tokens.len() as u32);
    if exact || most > RUNS_MAX as u64 {
        return count(plan, part, tokens, between);
    }
    let (enough, mut found) = (Error::new(Kind::Cancelled, OPERATION), false);
    let visited = visit(plan, part, tokens, between, |_| {
        found = true;
        Err(enough.clone())
    });
    match visited {
        _ if found => Ok((most as usize, 0)),
        Ok(()) => Ok((0, 0)),
        Err(error) => Err(error),
    }
}

/// How many runs some tokens of a part have, and the bytes of these. None, if the receiver does not keep the layer.
fn count(plan: &Plan, part: &Computed, tokens: &Range<u32>, between: Of) -> Result<(usize, u64)> {
    let (mut runs, mut bytes) = (0, 0_u64);
    visit(plan, part, tokens, between, |run| {
        runs += 1;
        bytes = bytes.saturating_add(run.total());
        Ok(())
    })?;
    Ok((runs, bytes))
}

/// Visits the runs of some tokens of a part.
fn visit(
    plan: &Plan,
    part: &Computed,
    tokens: &Range<u32>,
    between: Of,
    visit: impl FnMut(Run) -> Result<()>,
) -> Result<()> {
    if !plan.sends(part.layer) || tokens.is_empty() {
        return Ok(());
    }
    // The replicas change no run.
    let request = Request { tokens: tokens.end, replicas: [0, 0], chunks: part.chunk.as_slice() };
    plan.runs(&request, (part.layer, tokens.clone()), between, visit)
}
