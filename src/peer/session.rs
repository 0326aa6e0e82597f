//! The protocol of a session, without socket and clock.
//!
//! The caller moves bytes and tells the time as a [`Duration`] since any moment of its choice, the same for all calls.
//! `D` is what goes for a descriptor: an `OwnedFd` in a [`super::Link`], a number in tests.
//!
//! A session never waits and never calls back: [`Session::arrived`] takes bytes, [`Session::event`] gives what they
//! mean, [`Session::outgoing`] what to send. [`Session::tick`] looks at the time, and [`Session::due`] says when next
//! to.

use std::collections::VecDeque;
use std::time::Duration;

use super::frame::{FRAME_MAX, FrameKind, HEADER, Header, MESSAGE_MAX};
use super::hello::Hello;
use crate::error::{Error, Kind, Result};
use crate::fallible;

/// The most descriptors that arrived before the frames that they belong to were read.
pub const DESCRIPTORS_MAX: usize = 16;

/// The place of the error of a side that was held for lost because nothing arrived.
pub(super) const SILENT: &str = "no sign of life";
/// The operation that errors of this file name.
const OPERATION: &str = "peer session";

/// The times and the memory of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long the other side may take for its hello; in [`super::Links`], how long all of the group may take.
    pub hello: Duration,
    /// After how long without a frame of its own a side sends that it is alive.
    pub interval: Duration,
    /// After how long without a byte of the other side it counts as lost; at least two intervals of the other side.
    pub lost: Duration,
    /// The most bytes of frames that wait to be sent; at least [`FRAME_MAX`].
    pub queue: usize,
}

impl Default for Limits {
    /// 10 minutes for the hello, "alive" every second, lost after 10, a queue of 1 MiB. Ranks meet when each has filled
    /// its weights, so the slowest storage decides how long the first one waits.
    fn default() -> Limits {
        let seconds = Duration::from_secs;
        Limits { hello: seconds(600), interval: seconds(1), lost: seconds(10), queue: 1 << 20 }
    }
}

impl Limits {
    fn check(&self) -> Result<()> {
        let place = if self.interval.is_zero() || self.lost < self.interval.saturating_mul(2) {
            "a time to be lost that is below two intervals"
        } else if self.queue < FRAME_MAX {
            "a queue shorter than a frame"
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::InvalidConfig, OPERATION).at(place))
    }
}

/// What the other side did.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<D> {
    /// It said who it is, and may be sent messages.
    Hello(Hello),
    /// It sent a message.
    Message {
        /// The message, at most [`MESSAGE_MAX`] bytes.
        bytes: Vec<u8>,
        /// Its descriptor.
        descriptor: Option<D>,
    },
    /// It will send nothing more.
    Ended,
}

/// Bytes to send.
#[derive(Debug)]
pub struct Outgoing<'a, D> {
    /// The bytes, at least one.
    pub bytes: &'a [u8],
    /// The descriptor to send with the first of them.
    pub descriptor: Option<&'a D>,
}

/// A frame that waits to be sent.
#[derive(Debug)]
struct Waiting<D> {
    bytes: Vec<u8>,
    sent: usize,
    descriptor: Option<D>,
}

/// One side of a session. See the [module](super) page.
#[derive(Debug)]
pub struct Session<D> {
    own: Hello,
    limits: Limits,
    theirs: Option<Hello>,
    /// Bytes that arrived; those before `read` have been read.
    arrived: Vec<u8>,
    read: usize,
    descriptors: VecDeque<D>,
    waiting: VecDeque<Waiting<D>>,
    /// Bytes of `waiting` that are still to be sent.
    queued: usize,
    begun: Duration,
    /// When the last byte arrived, and when the last one was sent.
    heard: Duration,
    said: Duration,
    own_end: bool,
    their_end: bool,
    failure: Option<Error>,
}

impl<D> Session<D> {
    /// A session that begins `now` with this side's hello.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a rank that the group does not have, or limits that contradict each other;
    /// [`Kind::OutOfMemory`].
    pub fn new(own: Hello, limits: Limits, now: Duration) -> Result<Session<D>> {
        own.check()?;
        limits.check()?;
        let mut session = Session {
            own,
            limits,
            theirs: None,
            arrived: Vec::new(),
            read: 0,
            descriptors: VecDeque::new(),
            waiting: VecDeque::new(),
            queued: 0,
            begun: now,
            heard: now,
            said: now,
            own_end: false,
            their_end: false,
            failure: None,
        };
        session.queue(FrameKind::Hello, &own.encode(), None)?;
        Ok(session)
    }

    /// The other side's hello, once it was accepted.
    pub fn theirs(&self) -> Option<&Hello> {
        self.theirs.as_ref()
    }

    /// Whether both sides have ended, and everything has been sent.
    pub fn is_over(&self) -> bool {
        self.own_end && self.their_end && self.waiting.is_empty()
    }

    /// How many bytes [`Session::arrived`] takes before [`Session::event`] has to be called: at least one after `event`
    /// returned `None`.
    pub fn room(&self) -> usize {
        FRAME_MAX.saturating_sub(self.arrived.len() - self.read)
    }

    /// Takes bytes that arrived, at most [`Session::room`], and the descriptor that came with one of them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for more bytes than there is room for; [`Kind::BadFormat`] for more descriptors than
    /// [`DESCRIPTORS_MAX`] whose frames are unknown; [`Kind::OutOfMemory`]; the final error of the session.
    pub fn arrived(&mut self, bytes: &[u8], descriptor: Option<D>, now: Duration) -> Result<()> {
        self.sound()?;
        if bytes.len() > self.room() {
            let error = Error::new(Kind::OutOfRange, OPERATION).at("more bytes than there is room for");
            return Err(error.with("bytes", bytes.len() as u64).with("room", self.room() as u64));
        }
        self.arrived.drain(..self.read);
        self.read = 0;
        fallible::reserve(&mut self.arrived, bytes.len(), OPERATION, "bytes that arrived")?;
        self.arrived.extend_from_slice(bytes);
        if !bytes.is_empty() {
            self.heard = now;
        }
        self.descriptors.extend(descriptor);
        if self.descriptors.len() > DESCRIPTORS_MAX {
            return Err(self.fail(malformed("descriptors without messages")));
        }
        Ok(())
    }

    /// The next event among the bytes that arrived; `None` if they hold no further one.
    ///
    /// # Errors
    /// [`Kind::BadFormat`], [`Kind::BadVersion`] and [`Kind::InvalidConfig`] for frames that break the protocol, and
    /// for a hello of another version, group, model or plan; all are final.
    pub fn event(&mut self) -> Result<Option<Event<D>>> {
        self.sound()?;
        loop {
            match self.frame() {
                Ok(Some(Some(event))) => return Ok(Some(event)),
                Ok(Some(None)) => {}
                Ok(None) => return Ok(None),
                // Memory may come back; the frame is still there.
                Err(error) if error.kind() == Kind::OutOfMemory => return Err(error),
                Err(error) => return Err(self.fail(error)),
            }
        }
    }

    /// Reads one frame: `None` if it has not arrived as a whole, `Some(None)` if it says nothing but that the other
    /// side lives.
    fn frame(&mut self) -> Result<Option<Option<Event<D>>>> {
        let rest = self.arrived.get(self.read..).unwrap_or_default();
        let Some((header, rest)) = rest.split_first_chunk::<HEADER>() else { return Ok(None) };
        let header = Header::decode(*header)?;
        if self.their_end {
            return Err(malformed("a frame after the end"));
        }
        if (header.kind == FrameKind::Hello) == self.theirs.is_some() {
            return Err(malformed(if self.theirs.is_some() {
                "a second hello"
            } else {
                "a frame before hello"
            }));
        }
        let Some(content) = rest.get(..header.bytes) else { return Ok(None) };
        let event = match header.kind {
            FrameKind::Alive => None,
            FrameKind::Hello => {
                let theirs = Hello::accept(content, &self.own)?;
                self.theirs = Some(theirs);
                Some(Event::Hello(theirs))
            }
            FrameKind::End => {
                self.their_end = true;
                Some(Event::Ended)
            }
            FrameKind::Message => {
                let mut bytes = fallible::vector(content.len(), OPERATION, "a message")?;
                bytes.extend_from_slice(content);
                let descriptor = if header.descriptor { self.descriptors.pop_front() } else { None };
                if header.descriptor && descriptor.is_none() {
                    return Err(malformed("a message without its descriptor"));
                }
                Some(Event::Message { bytes, descriptor })
            }
        };
        self.read += HEADER + header.bytes;
        Ok(Some(event))
    }

    /// Tells that the connection was closed, once [`Session::event`] has returned all events. If the other side had
    /// ended, the session is over.
    ///
    /// # Errors
    /// [`Kind::PeerLost`] if the other side had not ended; it is final.
    pub fn closed(&mut self) -> Result<()> {
        self.sound()?;
        if self.their_end {
            // What is still to be sent has no reader.
            self.waiting.clear();
            (self.queued, self.own_end) = (0, true);
            return Ok(());
        }
        let error = self.lost("the connection was closed");
        Err(self.fail(error))
    }

    /// Queues a message of at most [`MESSAGE_MAX`] bytes, and a descriptor that goes with it.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] before the other side's hello and after this side's end; [`Kind::OutOfRange`] for a
    /// longer message; [`Kind::Exhausted`] if the queue is full; [`Kind::OutOfMemory`]: nothing was queued then. The
    /// final error of the session.
    pub fn send(&mut self, message: &[u8], descriptor: Option<D>) -> Result<()> {
        self.sound()?;
        let refused = |kind, place| Err(Error::new(kind, OPERATION).at(place));
        if self.theirs.is_none() {
            return refused(Kind::InvalidState, "a message before the other side's hello");
        }
        if self.own_end {
            return refused(Kind::InvalidState, "a message after the end");
        }
        if message.len() > MESSAGE_MAX {
            let error = Error::new(Kind::OutOfRange, OPERATION).at("a message that is too long");
            return Err(error.with("bytes", message.len() as u64).with("most", MESSAGE_MAX as u64));
        }
        if HEADER + message.len() > self.limits.queue.saturating_sub(self.queued) {
            let error = Error::new(Kind::Exhausted, OPERATION).at("messages that wait to be sent");
            return Err(error.with("waiting", self.queued as u64).hint("send what waits, then call again"));
        }
        self.queue(FrameKind::Message, message, descriptor)
    }

    /// Queues this side's last frame. Later calls do nothing.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; the final error of the session.
    pub fn end(&mut self) -> Result<()> {
        self.sound()?;
        if !self.own_end {
            self.queue(FrameKind::End, &[], None)?;
            self.own_end = true;
        }
        Ok(())
    }

    fn queue(&mut self, kind: FrameKind, content: &[u8], descriptor: Option<D>) -> Result<()> {
        let header = Header { kind, bytes: content.len(), descriptor: descriptor.is_some() };
        let mut bytes = fallible::vector(HEADER + content.len(), OPERATION, "a frame to send")?;
        bytes.extend_from_slice(&header.encode());
        bytes.extend_from_slice(content);
        self.queued += bytes.len();
        self.waiting.push_back(Waiting { bytes, sent: 0, descriptor });
        Ok(())
    }

    /// What to send next; `None` if nothing waits.
    pub fn outgoing(&self) -> Option<Outgoing<'_, D>> {
        let first = self.waiting.front().filter(|_| self.failure.is_none())?;
        let bytes = first.bytes.get(first.sent..)?;
        Some(Outgoing { bytes, descriptor: first.descriptor.as_ref() })
    }

    /// Tells that the first `bytes` bytes of [`Session::outgoing`], and its descriptor if there are any bytes, were
    /// sent.
    pub fn sent(&mut self, bytes: usize, now: Duration) {
        let Some(first) = self.waiting.front_mut().filter(|_| bytes > 0) else { return };
        let taken = bytes.min(first.bytes.len() - first.sent);
        first.sent += taken;
        first.descriptor = None;
        self.queued -= taken;
        self.said = now;
        if first.sent == first.bytes.len() {
            self.waiting.pop_front();
        }
    }

    /// Looks at the time: queues a sign of life when one is due.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] if no hello came in time; [`Kind::PeerLost`] if nothing else did. Both are final.
    pub fn tick(&mut self, now: Duration) -> Result<()> {
        self.sound()?;
        // A side that has ended owes no further sign of life, but still waits for this side's.
        let owed = !self.their_end;
        if owed && self.theirs.is_none() && now >= self.begun.saturating_add(self.limits.hello) {
            let error = Error::new(Kind::TimedOut, OPERATION).at("the other side's hello");
            return Err(self.fail(error.with("milliseconds", milliseconds(self.limits.hello))));
        }
        if owed && self.theirs.is_some() && now >= self.heard.saturating_add(self.limits.lost) {
            let error = self.lost(SILENT).with("milliseconds", milliseconds(self.limits.lost));
            return Err(self.fail(error));
        }
        if self.waiting.is_empty() && !self.own_end && now >= self.said.saturating_add(self.limits.interval) {
            self.queue(FrameKind::Alive, &[], None)?;
        }
        Ok(())
    }

    /// When [`Session::tick`] is due next, if nothing arrives and nothing is sent; `None` if it need not be called.
    pub fn due(&self) -> Option<Duration> {
        if self.failure.is_some() {
            return None;
        }
        let deadline = match self.theirs {
            _ if self.their_end => None,
            None => Some(self.begun.saturating_add(self.limits.hello)),
            Some(_) => Some(self.heard.saturating_add(self.limits.lost)),
        };
        let silent = self.waiting.is_empty() && !self.own_end;
        let alive = silent.then(|| self.said.saturating_add(self.limits.interval));
        deadline.into_iter().chain(alive).min()
    }

    fn lost(&self, place: &'static str) -> Error {
        let error = Error::new(Kind::PeerLost, OPERATION).at(place);
        match self.theirs {
            Some(theirs) => error.with("rank", theirs.rank).with("group", theirs.group),
            None => error.with("group", self.own.group),
        }
    }

    fn sound(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Ends the session with an error, and drops what it held.
    pub(super) fn fail(&mut self, error: Error) -> Error {
        self.failure = Some(error.clone());
        (self.arrived, self.read, self.queued) = (Vec::new(), 0, 0);
        self.descriptors.clear();
        self.waiting.clear();
        error
    }
}

fn malformed(place: &'static str) -> Error {
    let error = Error::new(Kind::BadFormat, OPERATION).at(place);
    error.hint("only processes that use forebay may connect to this socket")
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
