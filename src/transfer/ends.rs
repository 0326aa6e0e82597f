//! Ends: a machine and its end of a fabric, as an engine drives them.
//!
//! An engine calls `poll` in its transfer's loop, with the time since any beginning of its own, until it gives none.
//! Then it waits: for the fabric, or until [`Sender::due`] or [`Receiver::due`]. An end is of one thread. A receiver's
//! poll copies rows, so an engine that must not wait for that gives the end a thread of its own.
//!
//! A poll gives the machine what has happened at the fabric before it asks the machine what is to be done, and does
//! that. What an engine has to know comes out of it, in the order in which it happened, before anything else is taken
//! from the fabric. An error of one connection closes it and comes out as [`Polled::Lost`]; the fabric connects again.
//! A connection without room is left alone until it has room: the frame that was refused is kept, one for each
//! connection.
//!
//! **Bounds.** A poll takes at most [`EVENTS`] events of the fabric, and at a receiver [`FRAMES`] frames, whose rows
//! are moved meanwhile. If there may be more, it gives [`Polled::More`]: call it again, with the time that it is then.
//! So an end that is flooded still answers, keeps its deadlines, and tells the engine what has happened.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::fabric::{Happened, ReceiverFabric, Runs, SenderFabric};
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::{self, Mover, Receiver, Where};
use crate::transfer::runs::Run;
use crate::transfer::sender::{self, Sender};

/// What comes out of a poll.
#[derive(Clone, Debug, PartialEq)]
pub enum Polled<E> {
    /// The machine says so.
    Event(E),
    /// There may be more to do: poll again.
    More,
    /// A connection is there. Requests of its other end can be granted once both have said hello.
    Connected {
        /// Its number.
        link: u32,
    },
    /// A connection is gone.
    Lost {
        /// Its number.
        link: u32,
        /// Why, where this end knows it.
        why: Option<Error>,
    },
}

/// The most events of a fabric that a poll takes.
pub const EVENTS: usize = 1 << 12;
/// The most frames that a receiver's poll takes.
pub const FRAMES: usize = 16;

/// What became of a frame.
enum Sent {
    /// It is on its way, or its connection is gone, of which the fabric tells.
    Done,
    Refused,
    Broken(Error),
}

impl Sent {
    fn of(sent: Result<()>) -> Sent {
        match sent {
            Err(error) if error.kind() == Kind::Exhausted => Sent::Refused,
            Err(error) if error.kind() != Kind::PeerLost => Sent::Broken(error),
            _ => Sent::Done,
        }
    }
}

/// Why a machine wants a connection closed.
fn given_up(link: u32) -> Error {
    let error = Error::new(Kind::TimedOut, "transfer").at("a connection that did not answer in time");
    error.with("link", link)
}

/// A rank of a sending instance.
#[derive(Debug)]
pub struct SendingEnd<F> {
    /// The machine.
    pub machine: Sender,
    /// Its end of the fabric.
    pub fabric: F,
    /// What the engine has to know and was not given yet.
    polled: VecDeque<Polled<sender::Event>>,
    /// Frames that had no room, by connection.
    refused: BTreeMap<u32, Vec<u8>>,
    frame: Vec<u8>,
    /// Why it can no longer work, until all that happened before was given.
    broken: Option<Error>,
}

impl<F: SenderFabric> SendingEnd<F> {
    /// A machine without connections and its end of a fabric.
    pub const fn new(machine: Sender, fabric: F) -> SendingEnd<F> {
        SendingEnd {
            machine,
            fabric,
            polled: VecDeque::new(),
            refused: BTreeMap::new(),
            frame: Vec::new(),
            broken: None,
        }
    }

    /// The next thing that the engine has to know, or none for now.
    ///
    /// # Errors
    /// Those of [`Fabric::poll`](crate::transfer::fabric::Fabric::poll), and of [`Sender::poll`].
    pub fn poll(&mut self, now: Duration) -> Result<Option<Polled<sender::Event>>> {
        let mut more = false;
        if self.polled.is_empty() && self.broken.is_none() {
            match self.turn(now) {
                Ok(may_be_more) => more = may_be_more,
                Err(error) => self.broken = Some(error),
            }
            self.settle();
        }
        match self.polled.pop_front() {
            Some(polled) => Ok(Some(polled)),
            None => self.broken.take().map_or(Ok(more.then_some(Polled::More)), Err),
        }
    }

    /// Takes what has happened, and does what the machine wants. Whether there may be more.
    fn turn(&mut self, now: Duration) -> Result<bool> {
        let mut more = true;
        for _ in 0..EVENTS {
            let Some(happened) = self.fabric.poll(&mut self.frame)? else {
                more = false;
                break;
            };
            self.happened(happened);
        }
        while let Some(action) = self.machine.poll(now, &mut self.fabric, &mut self.frame)? {
            self.act(action);
        }
        Ok(more)
    }

    /// Takes what the machine has said.
    fn settle(&mut self) {
        while let Some(event) = self.machine.event() {
            self.polled.push_back(Polled::Event(event));
        }
    }

    /// Says something after what the machine has said.
    fn say(&mut self, polled: Polled<sender::Event>) {
        self.settle();
        self.polled.push_back(polled);
    }

    fn happened(&mut self, happened: Happened) {
        match happened {
            Happened::Connected { link, far } => match self.machine.connect(link, far) {
                Ok(()) => self.say(Polled::Connected { link }),
                Err(error) => self.close(link, error),
            },
            Happened::Frame { link } => {
                if let Err(error) = self.machine.frame(link, &self.frame) {
                    self.close(link, error);
                }
            }
            Happened::Alive { link } => self.machine.alive(link),
            Happened::Room { link } => match self.refused.remove(&link) {
                Some(frame) => self.send(link, &frame, true),
                None => self.machine.unblock(link),
            },
            Happened::Written { link, write, failed } => self.machine.written(link, write, failed),
            Happened::Lost { link } => {
                let why = self.fabric.why_lost(link);
                self.lost(link, why);
            }
            Happened::Destroyed { .. } => {}
        }
    }

    /// Sends a frame, again if it was `refused`.
    fn send(&mut self, link: u32, frame: &[u8], refused: bool) {
        let runs = Runs::of_frame(&self.machine, link, frame);
        match Sent::of(self.fabric.send(link, frame, &runs)) {
            Sent::Done if refused => self.machine.unblock(link),
            Sent::Done => {}
            Sent::Refused => {
                self.refused.insert(link, frame.to_vec());
                self.machine.block(link);
            }
            Sent::Broken(error) => self.close(link, error),
        }
    }

    fn act(&mut self, action: sender::Action) {
        match action {
            sender::Action::Frame { link } => {
                let frame = std::mem::take(&mut self.frame);
                self.send(link, &frame, false);
                self.frame = frame;
            }
            sender::Action::Write { link, write, fence, landing, rows, some } => {
                let runs = Runs::of_write(&self.machine, link, (&rows, some.as_deref()), &landing);
                match self.fabric.write(link, write, fence, &runs) {
                    Ok(()) => {}
                    Err(error) if error.kind() == Kind::Exhausted => {
                        self.machine.postpone(link, write);
                        self.machine.block(link);
                    }
                    Err(_) => self.machine.written(link, write, true),
                }
            }
            sender::Action::Close { link } => self.close(link, given_up(link)),
            sender::Action::Event(event) => self.polled.push_back(Polled::Event(event)),
        }
    }

    fn close(&mut self, link: u32, why: Error) {
        self.fabric.close(link);
        self.lost(link, Some(why));
    }

    fn lost(&mut self, link: u32, why: Option<Error>) {
        self.refused.remove(&link);
        self.say(Polled::Lost { link, why });
        self.machine.disconnect(link);
    }
}

/// Where a receiver's rows go.
pub trait Store {
    /// Stores a run's bytes in the receiver's own pages: checked ones, if they have a digest.
    ///
    /// # Errors
    /// Any: the request fails.
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()>;

    /// The place of a run's bytes in the receiver's own pages, if its pieces follow one another there. A run without a
    /// digest is fetched straight to it, and counts as stored if that succeeds. By none, it goes through
    /// [`Store::store`].
    fn place(&mut self, _fence: Fence, _run: &Run) -> Option<&mut [u8]> {
        None
    }

    /// A use of pages has ended, whole or not: nothing is stored for it any more. A
    /// [`thread`](crate::transfer::thread) says so before the engine learns it.
    fn ended(&mut self, _fence: Fence) {}
}

/// A rank of a receiving instance.
#[derive(Debug)]
pub struct ReceivingEnd<F> {
    /// The machine.
    pub machine: Receiver,
    /// Its end of the fabric.
    pub fabric: F,
    /// What the engine has to know and was not given yet.
    polled: VecDeque<Polled<receiver::Event>>,
    /// Frames that had no room, by connection.
    refused: BTreeMap<u32, Vec<u8>>,
    /// A lost connection of which the machine is yet to learn that nothing lands any more.
    destroyed: Option<u32>,
    frame: Vec<u8>,
    /// Why it can no longer work, until all that happened before was given.
    broken: Option<Error>,
}

/// A fabric fetches, and the engine stores.
struct Hands<'a, F, S>(&'a mut F, &'a mut S);

impl<F: ReceiverFabric, S: Store> Mover for Hands<'_, F, S> {
    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.0.fetch(link, fence, at, run, into)
    }

    fn fetch_in_place(&mut self, link: u32, fence: Fence, at: Where, run: &Run) -> Result<bool> {
        match self.1.place(fence, run) {
            Some(into) => self.0.fetch(link, fence, at, run, into).map(|()| true),
            None => Ok(false),
        }
    }

    fn holds(&mut self, link: u32) -> bool {
        self.0.holds(link)
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        self.1.store(fence, run, bytes)
    }
}

impl<F: ReceiverFabric> ReceivingEnd<F> {
    /// A machine without connections and its end of a fabric.
    pub const fn new(machine: Receiver, fabric: F) -> ReceivingEnd<F> {
        ReceivingEnd {
            machine,
            fabric,
            polled: VecDeque::new(),
            refused: BTreeMap::new(),
            destroyed: None,
            frame: Vec::new(),
            broken: None,
        }
    }

    /// The next thing that the engine has to know, or none for now. Rows are moved in the call.
    ///
    /// # Errors
    /// Those of [`Fabric::poll`](crate::transfer::fabric::Fabric::poll), and [`Kind::OutOfMemory`].
    pub fn poll(&mut self, now: Duration, store: &mut impl Store) -> Result<Option<Polled<receiver::Event>>> {
        let mut more = false;
        if self.polled.is_empty() && self.broken.is_none() {
            match self.turn(now, store) {
                Ok(may_be_more) => more = may_be_more,
                Err(error) => self.broken = Some(error),
            }
            self.settle();
        }
        match self.polled.pop_front() {
            Some(polled) => Ok(Some(polled)),
            None => self.broken.take().map_or(Ok(more.then_some(Polled::More)), Err),
        }
    }

    /// Takes what has happened, and does what the machine wants. Whether there may be more.
    fn turn(&mut self, now: Duration, store: &mut impl Store) -> Result<bool> {
        // After an error it is said again.
        self.destroy()?;
        let (mut frames, mut more) = (0, true);
        for _ in 0..EVENTS {
            let Some(happened) = self.fabric.poll(&mut self.frame)? else {
                more = false;
                break;
            };
            frames += usize::from(matches!(happened, Happened::Frame { .. }));
            self.happened(happened, store)?;
            if frames >= FRAMES {
                break;
            }
        }
        self.act(now);
        Ok(more)
    }

    /// Gives a use of pages up, and says so, as [`Event::Failed`](receiver::Event::Failed) with [`Kind::Cancelled`]
    /// after what has happened before. Nothing is stored for it any more.
    ///
    /// # Errors
    /// Those of [`Receiver::abort`].
    pub fn abort(&mut self, fence: Fence) -> Result<()> {
        self.settle();
        self.machine.abort(fence)?;
        let error = Error::new(Kind::Cancelled, "transfer receiver").at("aborted here");
        // Before what the abort has brought about.
        let error = error.with("request", fence.request);
        self.polled.push_back(Polled::Event(receiver::Event::Failed { fence, error }));
        Ok(())
    }

    /// Says that a use of pages has failed that the machine does not know.
    pub(super) fn fail(&mut self, fence: Fence, error: Error) {
        self.say(Polled::Event(receiver::Event::Failed { fence, error }));
    }

    /// Takes what the machine has said.
    fn settle(&mut self) {
        while let Some(event) = self.machine.event() {
            self.polled.push_back(Polled::Event(event));
        }
    }

    /// Does what the machine wants.
    fn act(&mut self, now: Duration) {
        while let Some(action) = self.machine.poll(now, &mut self.frame) {
            match action {
                receiver::Action::Event(event) => self.polled.push_back(Polled::Event(event)),
                receiver::Action::Close { link } => self.close(link, given_up(link)),
                receiver::Action::Frame { link } => {
                    let frame = std::mem::take(&mut self.frame);
                    self.send(link, &frame, false);
                    self.frame = frame;
                }
            }
        }
    }

    fn destroy(&mut self) -> Result<()> {
        if let Some(link) = self.destroyed {
            self.machine.destroyed(link)?;
            self.destroyed = None;
        }
        Ok(())
    }

    /// Says something after what the machine has said.
    fn say(&mut self, polled: Polled<receiver::Event>) {
        self.settle();
        self.polled.push_back(polled);
    }

    fn happened(&mut self, happened: Happened, store: &mut impl Store) -> Result<()> {
        match happened {
            Happened::Connected { link, far } => match self.machine.connect(link, far) {
                Ok(()) => self.say(Polled::Connected { link }),
                Err(error) => self.close(link, error),
            },
            Happened::Frame { link } => {
                let taken = self.machine.frame(link, &self.frame, &mut Hands(&mut self.fabric, store));
                if let Err(error) = taken {
                    self.close(link, error);
                }
            }
            Happened::Alive { link } => self.machine.alive(link),
            Happened::Room { link } => {
                if let Some(frame) = self.refused.remove(&link) {
                    self.send(link, &frame, true);
                }
            }
            Happened::Lost { link } => {
                let why = self.fabric.why_lost(link);
                self.lost(link, why);
            }
            Happened::Destroyed { link } => {
                self.destroyed = Some(link);
                self.destroy()?;
            }
            Happened::Written { .. } => {}
        }
        Ok(())
    }

    /// Sends a frame, again if it was `refused`.
    fn send(&mut self, link: u32, frame: &[u8], refused: bool) {
        match Sent::of(self.fabric.send(link, frame)) {
            Sent::Done if refused => self.machine.unblock(link),
            Sent::Done => {}
            Sent::Refused => {
                self.refused.insert(link, frame.to_vec());
                self.machine.block(link);
            }
            Sent::Broken(error) => self.close(link, error),
        }
    }

    fn close(&mut self, link: u32, why: Error) {
        self.fabric.close(link);
        self.lost(link, Some(why));
    }

    fn lost(&mut self, link: u32, why: Option<Error>) {
        self.refused.remove(&link);
        self.say(Polled::Lost { link, why });
        self.machine.disconnect(link);
    }
}
