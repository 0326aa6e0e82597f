//! Ends: a machine and its end of a fabric, as an engine drives them.
//!
//! An engine calls `poll` in its transfer's loop, with the time since any beginning of its own, until it gives none.
//! Then it waits: for the fabric, or until [`Sender::due`] or [`Receiver::due`].
//!
//! A poll gives the machine what has happened at the fabric, all of it before it asks the machine what is to be done,
//! and does that. What an engine has to know comes out of it. An error of one connection closes it and comes out as
//! [`Polled::Lost`]; the fabric connects again.

use std::collections::BTreeMap;
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
    /// A connection is there. Requests of its other end can be granted once both have said hello.
    Connected {
        /// Its number.
        link: u32,
    },
    /// A connection is gone.
    Lost {
        /// Its number.
        link: u32,
        /// What was wrong with what came on it, or with the fabric; none if the other end closed it or is gone.
        why: Option<Error>,
    },
}

/// The error of a frame that loses more than the frame: its connection.
fn breaks(sent: Result<()>) -> Option<Error> {
    sent.err().filter(|error| error.kind() != Kind::Exhausted)
}

/// A rank of a sending instance.
#[derive(Debug)]
pub struct SendingEnd<F> {
    /// The machine.
    pub machine: Sender,
    /// Its end of the fabric.
    pub fabric: F,
    /// The landing pages of grants, by request.
    landing: BTreeMap<u64, Vec<(u32, Fence, Vec<u32>)>>,
    frame: Vec<u8>,
}

impl<F: SenderFabric> SendingEnd<F> {
    /// A machine without connections and its end of a fabric.
    pub const fn new(machine: Sender, fabric: F) -> SendingEnd<F> {
        SendingEnd { machine, fabric, landing: BTreeMap::new(), frame: Vec::new() }
    }

    /// The next thing that the engine has to know, or none for now.
    ///
    /// # Errors
    /// Those of [`Fabric::poll`](crate::transfer::fabric::Fabric::poll), and of [`Sender::poll`].
    pub fn poll(&mut self, now: Duration) -> Result<Option<Polled<sender::Event>>> {
        loop {
            while let Some(happened) = self.fabric.poll(&mut self.frame)? {
                if let Some(polled) = self.happened(happened) {
                    return Ok(Some(polled));
                }
            }
            let Some(action) = self.machine.poll(now, &mut self.fabric, &mut self.frame)? else {
                return Ok(None);
            };
            if let Some(polled) = self.act(action) {
                return Ok(Some(polled));
            }
        }
    }

    fn happened(&mut self, happened: Happened) -> Option<Polled<sender::Event>> {
        match happened {
            Happened::Connected { link, far } => match self.machine.connect(link, far) {
                Ok(()) => Some(Polled::Connected { link }),
                Err(error) => self.close(link, Some(error)),
            },
            Happened::Frame { link } => {
                let taken = self.machine.frame(link, &self.frame);
                taken.err().and_then(|error| self.close(link, Some(error)))
            }
            Happened::Written { link, write, failed } => {
                self.machine.written(link, write, failed);
                None
            }
            Happened::Lost { link } => {
                self.machine.disconnect(link);
                Some(Polled::Lost { link, why: None })
            }
            Happened::Destroyed { .. } => None,
        }
    }

    fn act(&mut self, action: sender::Action) -> Option<Polled<sender::Event>> {
        match action {
            sender::Action::Frame { link } => {
                let runs = Runs::of_frame(&self.machine, link, &self.frame);
                let sent = self.fabric.send(link, &self.frame, &runs);
                breaks(sent).and_then(|error| self.close(link, Some(error)))
            }
            sender::Action::Write { link, write, fence, rows, some } => {
                let runs = Runs::of_write(&self.machine, link, &rows, some.as_deref());
                let granted = self.landing.get(&fence.request).into_iter().flatten();
                let mut granted = granted.filter(|(of, other, _)| (*of, *other) == (link, fence));
                let landing = granted.next().map_or(&[][..], |(_, _, landing)| landing);
                if self.fabric.write(link, write, fence, landing, &runs).is_err() {
                    self.machine.written(link, write, true);
                }
                None
            }
            sender::Action::Close { link } => self.close(link, None),
            sender::Action::Event(event) => {
                match &event {
                    sender::Event::Granted { request, link, fence, landing, .. } if !landing.is_empty() => {
                        let own = (*link, *fence, landing.clone());
                        self.landing.entry(*request).or_default().push(own);
                    }
                    sender::Event::Ended { request, .. } => drop(self.landing.remove(request)),
                    _ => {}
                }
                Some(Polled::Event(event))
            }
        }
    }

    fn close(&mut self, link: u32, why: Option<Error>) -> Option<Polled<sender::Event>> {
        self.fabric.close(link);
        self.machine.disconnect(link);
        Some(Polled::Lost { link, why })
    }
}

/// Where a receiver's checked rows go.
pub trait Store {
    /// Stores a run's checked bytes in the receiver's own pages.
    ///
    /// # Errors
    /// Any: the request fails.
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()>;
}

/// A rank of a receiving instance.
#[derive(Debug)]
pub struct ReceivingEnd<F> {
    /// The machine.
    pub machine: Receiver,
    /// Its end of the fabric.
    pub fabric: F,
    /// A lost connection of which the machine is yet to learn that nothing lands any more.
    destroyed: Option<u32>,
    frame: Vec<u8>,
}

/// A fabric fetches, and the engine stores.
struct Hands<'a, F, S>(&'a mut F, &'a mut S);

impl<F: ReceiverFabric, S: Store> Mover for Hands<'_, F, S> {
    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.0.fetch(link, fence, at, run, into)
    }

    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        self.1.store(fence, run, bytes)
    }
}

impl<F: ReceiverFabric> ReceivingEnd<F> {
    /// A machine without connections and its end of a fabric.
    pub const fn new(machine: Receiver, fabric: F) -> ReceivingEnd<F> {
        ReceivingEnd { machine, fabric, destroyed: None, frame: Vec::new() }
    }

    /// The next thing that the engine has to know, or none for now. Rows are moved in the call.
    ///
    /// # Errors
    /// Those of [`Fabric::poll`](crate::transfer::fabric::Fabric::poll), and [`Kind::OutOfMemory`].
    pub fn poll(&mut self, now: Duration, store: &mut impl Store) -> Result<Option<Polled<receiver::Event>>> {
        loop {
            // After an error it is said again.
            if let Some(link) = self.destroyed {
                self.machine.destroyed(link)?;
                self.destroyed = None;
            }
            while let Some(happened) = self.fabric.poll(&mut self.frame)? {
                if let Some(polled) = self.happened(happened, store)? {
                    return Ok(Some(polled));
                }
            }
            let Some(action) = self.machine.poll(now, &mut self.frame) else { return Ok(None) };
            match action {
                receiver::Action::Event(event) => return Ok(Some(Polled::Event(event))),
                receiver::Action::Close { link } => return Ok(Some(self.close(link, None))),
                receiver::Action::Frame { link } => {
                    let sent = self.fabric.send(link, &self.frame);
                    if let Some(error) = breaks(sent) {
                        return Ok(Some(self.close(link, Some(error))));
                    }
                }
            }
        }
    }

    fn happened(
        &mut self,
        happened: Happened,
        store: &mut impl Store,
    ) -> Result<Option<Polled<receiver::Event>>> {
        Ok(match happened {
            Happened::Connected { link, far } => Some(match self.machine.connect(link, far) {
                Ok(()) => Polled::Connected { link },
                Err(error) => self.close(link, Some(error)),
            }),
            Happened::Frame { link } => {
                let taken = self.machine.frame(link, &self.frame, &mut Hands(&mut self.fabric, store));
                taken.err().map(|error| self.close(link, Some(error)))
            }
            Happened::Lost { link } => {
                self.machine.disconnect(link);
                Some(Polled::Lost { link, why: None })
            }
            Happened::Destroyed { link } => {
                self.destroyed = Some(link);
                self.machine.destroyed(link)?;
                self.destroyed = None;
                None
            }
            Happened::Written { .. } => None,
        })
    }

    fn close(&mut self, link: u32, why: Option<Error>) -> Polled<receiver::Event> {
        self.fabric.close(link);
        self.machine.disconnect(link);
        Polled::Lost { link, why }
    }
}
