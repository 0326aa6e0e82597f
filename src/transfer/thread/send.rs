//! A sender's end and its thread.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex};
use crate::transfer::ends::{Polled, SendingEnd};
use crate::transfer::fabric::SenderFabric;
use crate::transfer::frames::Reason;
use crate::transfer::sender::{Computed, Counts, Event, Sender};
use crate::transfer::socket::Socket;
use crate::transfer::thread::drive::Drive;
use crate::transfer::thread::run::{News, Thread};

/// Times of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// How many.
    pub count: u64,
    /// Their sum.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

impl Span {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.total = self.total.saturating_add(time);
        self.longest = self.longest.max(time);
    }
}

/// What a sender's thread has seen since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SendStatistics {
    /// Requests that have ended with all rows at their receivers.
    pub done: u64,
    /// Requests that have ended otherwise.
    pub failed: u64,
    /// Parts whose rows are held: taken, and not yet released.
    pub held: u64,
    /// By layer of the model: from when its rows were computed until their memory is free again.
    pub lag: BTreeMap<u32, Span>,
    /// Of requests that were done: from when all was computed until the receivers had it. This part of a transfer is
    /// not hidden behind the computation.
    pub exposed: Span,
    /// What was told.
    pub told: Counts,
}

/// When rows of a layer were computed.
#[derive(Clone, Copy, Debug)]
struct Since {
    layer: u32,
    at: Instant,
}

#[derive(Debug)]
struct Sending<F> {
    end: SendingEnd<F>,
    /// Rows that are held, by request and origin.
    computed: BTreeMap<(u64, u64), VecDeque<Since>>,
    /// When all of a request was computed.
    finished: BTreeMap<u64, Instant>,
    statistics: Arc<Mutex<SendStatistics>>,
}

impl<F> Sending<F> {
    /// Does something for a request. Whether it was done: not if the request has ended, which the engine is told.
    fn unless_over(&mut self, request: u64, act: impl FnOnce(&mut Sender) -> Result<()>) -> Result<bool> {
        let machine = &mut self.end.machine;
        match act(machine) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == Kind::Closed && machine.has_ended(request) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Counts what has happened.
    fn count(&mut self, event: &Event) {
        let mut statistics = self.statistics.lock();
        match *event {
            Event::Released { request, origin } => {
                let held = self.computed.get_mut(&(request, origin));
                if let Some(since) = held.and_then(VecDeque::pop_front) {
                    statistics.held -= 1;
                    statistics.lag.entry(since.layer).or_default().add(since.at.elapsed());
                }
            }
            Event::Ended { request, reason } => {
                let finished = self.finished.remove(&request);
                // All of its rows were released before.
                let mut others = self.computed.split_off(&(request, 0));
                self.computed.append(&mut others.split_off(&(request.saturating_add(1), 0)));
                if reason == Reason::Done {
                    statistics.done += 1;
                    finished.into_iter().for_each(|at| statistics.exposed.add(at.elapsed()));
                } else {
                    statistics.failed += 1;
                }
            }
            Event::Met { .. } | Event::Granted { .. } => {}
        }
    }
}

impl<F: SenderFabric + Socket> Drive for Sending<F> {
    type Event = Event;

    fn poll(&mut self, now: Duration) -> Result<Option<Polled<Event>>> {
        let polled = self.end.poll(now)?;
        self.statistics.lock().told = self.end.machine.counts();
        if let Some(Polled::Event(event)) = &polled {
            self.count(event);
        }
        Ok(polled)
    }

    fn failure(&mut self) -> Option<Error> {
        self.end.fabric.failure()
    }

    fn due(&self) -> Option<Duration> {
        self.end.machine.due()
    }

    fn idle(&self) -> Duration {
        self.end.fabric.due()
    }

    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.end.fabric.descriptors()
    }
}

/// A sender's end with the thread that drives it. See the module's head.
#[derive(Debug)]
pub struct SendThread<F: SenderFabric + Socket> {
    thread: Thread<Sending<F>>,
    statistics: Arc<Mutex<SendStatistics>>,
}

impl<F: SenderFabric + Socket + Send + 'static> SendThread<F> {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Kind::OsRefused`](crate::error::Kind::OsRefused) if there can be no thread, or no sockets to wake it.
    pub fn start(end: SendingEnd<F>) -> Result<SendThread<F>> {
        let statistics = Arc::new(Mutex::new(SendStatistics::default()));
        let (computed, finished) = (BTreeMap::new(), BTreeMap::new());
        let sending = Sending { end, computed, finished, statistics: Arc::clone(&statistics) };
        Ok(SendThread { thread: Thread::start("forebay-send", sending)?, statistics })
    }
}

impl<F: SenderFabric + Socket> SendThread<F> {
    /// As [`Sender::begin`](crate::transfer::Sender::begin). The request fails if it is not done `within` a time from
    /// when the call is carried out.
    pub fn begin(&self, request: u64, tokens: u32, within: Option<Duration>) {
        self.thread.call(Some(request), move |sending, now| {
            let deadline = within.map(|within| now.saturating_add(within));
            sending.end.machine.begin(request, tokens, deadline)
        });
    }

    /// As [`Sender::computed`](crate::transfer::Sender::computed), for parts of one request or more. Their rows are
    /// written already, and stay until [`Event::Released`], or until their request's [`Event::Ended`].
    pub fn computed(&self, parts: Vec<Computed>) {
        let at = Instant::now();
        self.thread.calls(parts.into_iter().map(|part| {
            let request = part.request;
            let call = move |sending: &mut Sending<F>, _: Duration| {
                let computed = |machine: &mut Sender| machine.computed(std::slice::from_ref(&part));
                let taken = sending.unless_over(request, computed);
                if taken.map_err(|error| error.with("layer", part.layer).with("origin", part.origin))? {
                    let held = sending.computed.entry((request, part.origin)).or_default();
                    held.push_back(Since { layer: part.layer, at });
                    sending.statistics.lock().held += 1;
                }
                Ok(())
            };
            (Some(request), call)
        }));
    }

    /// As [`Sender::payload`](crate::transfer::Sender::payload).
    pub fn payload(&self, request: u64, kind: u8, bytes: Vec<u8>) {
        self.thread.call(Some(request), move |sending, _| {
            sending.unless_over(request, |machine| machine.payload(request, kind, &bytes)).map(drop)
        });
    }

    /// As [`Sender::finish`](crate::transfer::Sender::finish).
    pub fn finish(&self, request: u64) {
        let at = Instant::now();
        self.thread.call(Some(request), move |sending, _| {
            if sending.unless_over(request, |machine| machine.finish(request))? {
                sending.finished.insert(request, at);
            }
            Ok(())
        });
    }

    /// As [`Sender::abort`](crate::transfer::Sender::abort).
    pub fn abort(&self, request: u64) {
        self.thread.call(Some(request), move |sending, _| {
            sending.unless_over(request, |machine| machine.abort(request)).map(drop)
        });
    }

    /// Does something with the fabric, such as to add a receiver.
    pub fn with(&self, act: impl FnOnce(&mut F) -> Result<()> + Send + 'static) {
        self.thread.call(None, move |sending, _| act(&mut sending.end.fabric));
    }

    /// The next event, or none for now. Does not wait.
    ///
    /// # Errors
    /// The one with which the thread has ended, after all events.
    pub fn poll(&self) -> Result<Option<News<Event>>> {
        self.thread.poll()
    }

    /// Waits until there is an event, for at most a time.
    ///
    /// # Errors
    /// [`Kind::OsRefused`](crate::error::Kind::OsRefused).
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        self.thread.wait(at_most)
    }

    /// What is readable while there are events, and after the thread has ended by itself.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.thread.descriptor()
    }

    /// Ends the thread: when this returns, connections are closed, and nothing is read any more. Calls do nothing then,
    /// and `poll` gives what is left.
    pub fn end(&self) {
        self.thread.end();
    }

    /// What it has seen.
    pub fn statistics(&self) -> SendStatistics {
        self.statistics.lock().clone()
    }
}
