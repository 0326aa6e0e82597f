//! A receiver's end and its thread.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, Mutex};
use crate::transfer::ends::{Polled, ReceivingEnd, Store};
use crate::transfer::fabric::ReceiverFabric;
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::{Counts, Event, Wanted};
use crate::transfer::socket::Socket;
use crate::transfer::thread::drive::Drive;
use crate::transfer::thread::run::{News, Thread};

/// A request that is wanted: [`Wanted`] with lists of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The use of pages.
    pub fence: Fence,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// The first token that is wanted.
    pub first: u32,
    /// The sending instance, and its replica.
    pub sender: (u64, u32),
    /// The kinds of payloads that belong to it, each once.
    pub payloads: Vec<u8>,
    /// Landing pages of writers from afar; empty over sockets.
    pub landing: Vec<u32>,
    /// How long it may take, from when the call is carried out.
    pub within: Option<Duration>,
}

/// What a receiver's thread has seen since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveStatistics {
    /// Requests that became whole.
    pub whole: u64,
    /// Requests that failed or were aborted.
    pub failed: u64,
    /// Landing pages that writers from afar may reach.
    pub reached: u32,
    /// Those of them whose request has ended.
    pub waiting: u32,
    /// What was moved.
    pub moved: Counts,
}

#[derive(Debug)]
struct Receiving<F, S> {
    end: ReceivingEnd<F>,
    store: S,
    /// The generation that the next grant has at least. Those of grants that failed count too.
    next: u64,
    statistics: Arc<Mutex<ReceiveStatistics>>,
}

impl<F: ReceiverFabric, S: Store> Receiving<F, S> {
    fn count(&mut self, event: &Event) {
        match event {
            Event::Whole { fence } => {
                self.store.ended(*fence);
                self.statistics.lock().whole += 1;
            }
            Event::Failed { fence, .. } => {
                self.store.ended(*fence);
                self.statistics.lock().failed += 1;
            }
            _ => {}
        }
    }
}

impl<F: ReceiverFabric + Socket, S: Store> Drive for Receiving<F, S> {
    type Event = Event;

    fn poll(&mut self, now: Duration) -> Result<Option<Polled<Event>>> {
        let polled = self.end.poll(now, &mut self.store)?;
        let (machine, mut statistics) = (&self.end.machine, self.statistics.lock());
        statistics.moved = machine.counts();
        statistics.reached = machine.quarantine().reached();
        statistics.waiting = machine.quarantine().waiting();
        drop(statistics);
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

/// A receiver's end with the thread that drives it. See the module's head.
///
/// Each grant ends with one [`Event::Whole`] or one [`Event::Failed`]. From then on nothing is stored for it, and its
/// pages may be used for something else. An abort too takes effect when its event comes, and not before.
#[derive(Debug)]
pub struct ReceiveThread<F: ReceiverFabric + Socket, S: Store> {
    thread: Thread<Receiving<F, S>>,
    statistics: Arc<Mutex<ReceiveStatistics>>,
}

impl<F: ReceiverFabric + Socket + Send + 'static, S: Store + Send + 'static> ReceiveThread<F, S> {
    /// Starts the thread. It gives rows to `store`.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] if there can be no thread, or no sockets to wake it.
    pub fn start(end: ReceivingEnd<F>, store: S) -> Result<ReceiveThread<F, S>> {
        let statistics = Arc::new(Mutex::new(ReceiveStatistics::default()));
        let receiving = Receiving { end, store, next: 0, statistics: Arc::clone(&statistics) };
        Ok(ReceiveThread { thread: Thread::start("forebay-receive", receiving)?, statistics })
    }
}

impl<F: ReceiverFabric + Socket, S: Store> ReceiveThread<F, S> {
    /// As [`Receiver::grant`](crate::transfer::Receiver::grant). Before it `prepare` tells the store where the rows go.
    /// Grant when [`Event::Met`] has come for the sender's ranks: without them the grant fails. A generation that is
    /// not above those of all grants before is [`News::Refused`], because the use that it names may be arriving.
    pub fn grant(&self, grant: Grant, prepare: impl FnOnce(&mut S) -> Result<()> + Send + 'static) {
        self.thread.call(Some(grant.fence.request), move |receiving, now| {
            let next = grant.fence.generation.checked_add(1);
            let Some(next) = next.filter(|_| grant.fence.generation >= receiving.next) else {
                return Err(Error::new(Kind::InvalidState, "transfer receiver")
                    .at("a generation that was used")
                    .with("request", grant.fence.request));
            };
            receiving.next = next;
            let wanted = Wanted {
                fence: grant.fence,
                tokens: grant.tokens,
                first: grant.first,
                sender: grant.sender,
                payloads: &grant.payloads,
                landing: &grant.landing,
                deadline: grant.within.map(|within| now.saturating_add(within)),
            };
            let granted = prepare(&mut receiving.store).and_then(|()| receiving.end.machine.grant(&wanted));
            if let Err(error) = granted {
                receiving.end.fail(grant.fence, error);
            }
            Ok(())
        });
    }

    /// As [`Receiver::abort`](crate::transfer::Receiver::abort). [`Event::Failed`] with [`Kind::Cancelled`] says when
    /// it is done, unless the request has ended before.
    pub fn abort(&self, fence: Fence) {
        self.thread.call(Some(fence.request), move |receiving, _| {
            match receiving.end.abort(fence) {
                // It has ended before, and was told so.
                Err(error) if error.kind() == Kind::Closed && fence.generation < receiving.next => Ok(()),
                aborted => aborted,
            }
        });
    }

    /// Does something with the fabric.
    pub fn with(&self, act: impl FnOnce(&mut F) -> Result<()> + Send + 'static) {
        self.thread.call(None, move |receiving, _| act(&mut receiving.end.fabric));
    }

    /// The next event, or none for now. Does not wait.
    ///
    /// # Errors
    /// The one with which the thread has ended, after all events. Nothing is stored any more then.
    pub fn poll(&self) -> Result<Option<News<Event>>> {
        self.thread.poll()
    }

    /// Waits until there is an event, for at most a time.
    ///
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        self.thread.wait(at_most)
    }

    /// What is readable while there are events, and after the thread has ended by itself.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.thread.descriptor()
    }

    /// Ends the thread: when this returns, connections are closed, and nothing is stored any more. Calls do nothing
    /// then, and `poll` gives what is left.
    pub fn end(&self) {
        self.thread.end();
    }

    /// What it has seen.
    pub fn statistics(&self) -> ReceiveStatistics {
        *self.statistics.lock()
    }
}
