//! The thread itself: its calls, its events, its loop.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::os::{self, NoFaults, io_text};
use crate::sync::{Arc, Mutex, thread};
use crate::transfer::ends::Polled;
use crate::transfer::thread::drive::Drive;
use crate::transfer::thread::wake::Wake;

/// The most events that are kept for an engine.
pub const EVENTS_KEPT: usize = 1 << 16;
/// The most reasons why connections did not open that are kept among them.
pub const UNOPENED_KEPT: usize = 64;
/// Events after which calls have their turn.
const TURN: usize = 64;
/// The longest wait.
const LONGEST: Duration = Duration::from_secs(10);

/// What has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum News<E> {
    /// The machine says so.
    Event(E),
    /// A connection is there. [`Event::Met`](crate::transfer::receiver::Event::Met) says who is at its other end.
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
    /// A connection did not open.
    Unopened {
        /// Why.
        why: Error,
    },
    /// A call was refused when it was carried out. It has changed nothing.
    Refused {
        /// The request that the call was about, if it was about one.
        request: Option<u64>,
        /// Why.
        why: Error,
    },
}

/// What the engine wants done with an end, at the time that it is then.
type Call<D> = Box<dyn FnOnce(&mut D, Duration) -> Result<()> + Send>;

struct Calls<D> {
    /// By the request that each is about, if it is about one.
    queue: VecDeque<(Option<u64>, Call<D>)>,
    stops: bool,
}

struct Said<E> {
    events: VecDeque<News<E>>,
    /// How many of them are reasons why a connection did not open.
    unopened: usize,
    /// Why the thread has ended by itself.
    ended: Option<Error>,
}

struct Shared<D: Drive> {
    calls: Mutex<Calls<D>>,
    wake: Wake,
    said: Mutex<Said<D::Event>>,
    news: Wake,
    start: Instant,
}

impl<D: Drive> Shared<D> {
    fn say(&self, news: News<D::Event>) {
        let mut said = self.said.lock();
        if let News::Unopened { .. } = news {
            if said.unopened >= UNOPENED_KEPT {
                return;
            }
            said.unopened += 1;
        }
        said.events.push_back(news);
        if said.events.len() == 1 {
            self.news.wake();
        }
    }

    /// Carries calls out, polls, and waits. Whether the thread goes on.
    fn turn(&self, drive: &mut D) -> Result<bool> {
        self.wake.clear();
        let mut calls = self.calls.lock();
        let (stops, queue) = (calls.stops, std::mem::take(&mut calls.queue));
        drop(calls);
        if stops {
            return Ok(false);
        }
        for (request, call) in queue {
            match call(drive, self.start.elapsed()) {
                Err(error) if error.kind() != Kind::Closed => {
                    self.say(News::Refused { request, why: error });
                }
                _ => {}
            }
        }
        let full = self.said.lock().events.len() >= EVENTS_KEPT;
        if !full && self.poll(drive)? {
            return Ok(true);
        }
        let machine = drive.due().map(|due| due.saturating_sub(self.start.elapsed()));
        let (mut most, mut descriptors) = (LONGEST, vec![(self.wake.descriptor(), false)]);
        if !full {
            most = most.min(drive.idle()).min(machine.unwrap_or(LONGEST));
            descriptors.extend(drive.descriptors());
        }
        if !most.is_zero() {
            os::wait(&descriptors, most, &NoFaults)?;
        }
        Ok(true)
    }

    /// Polls the end. Whether there may be more.
    fn poll(&self, drive: &mut D) -> Result<bool> {
        for _ in 0..TURN {
            let polled = drive.poll(self.start.elapsed())?;
            while let Some(why) = drive.failure() {
                self.say(News::Unopened { why });
            }
            self.say(match polled {
                None => return Ok(false),
                Some(Polled::More) => return Ok(true),
                Some(Polled::Event(event)) => News::Event(event),
                Some(Polled::Connected { link }) => News::Connected { link },
                Some(Polled::Lost { link, why }) => News::Lost { link, why },
            });
        }
        Ok(true)
    }
}

/// A thread and its end.
pub struct Thread<D: Drive> {
    shared: Arc<Shared<D>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl<D: Drive> fmt::Debug for Thread<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Thread").finish_non_exhaustive()
    }
}

impl<D: Drive<Event: Send> + Send + 'static> Thread<D> {
    /// # Errors
    /// [`Kind::OsRefused`] if there can be no thread, or no sockets to wake it.
    pub fn start(name: &str, mut drive: D) -> Result<Thread<D>> {
        let calls = Mutex::new(Calls { queue: VecDeque::new(), stops: false });
        let said = Mutex::new(Said { events: VecDeque::new(), unopened: 0, ended: None });
        let (wake, news) = (Wake::new()?, Wake::new()?);
        let shared = Arc::new(Shared { calls, wake, said, news, start: Instant::now() });
        let own = Arc::clone(&shared);
        let run = move || {
            let ended = loop {
                match own.turn(&mut drive) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => break error,
                }
            };
            // Its connections are closed before the engine learns that nothing is stored any more.
            drop(drive);
            own.said.lock().ended = Some(ended);
            own.news.wake();
        };
        let spawned = thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(|error| Error::new(Kind::OsRefused, "transfer thread").at(io_text(&error)))?;
        Ok(Thread { shared, thread: Some(spawned) })
    }
}

impl<D: Drive> Thread<D> {
    /// Queues a call.
    pub fn call(
        &self,
        request: Option<u64>,
        call: impl FnOnce(&mut D, Duration) -> Result<()> + Send + 'static,
    ) {
        self.shared.calls.lock().queue.push_back((request, Box::new(call)));
        self.shared.wake.wake();
    }

    /// The next event, or none for now. Does not wait.
    ///
    /// # Errors
    /// The one with which the thread has ended, after all events.
    pub fn poll(&self) -> Result<Option<News<D::Event>>> {
        let mut said = self.shared.said.lock();
        let full = said.events.len() >= EVENTS_KEPT;
        let news = said.events.pop_front();
        match (&news, &said.ended) {
            (None, Some(error)) => return Err(error.clone()),
            (Some(News::Unopened { .. }), _) => said.unopened -= 1,
            _ => {}
        }
        if said.events.is_empty() && said.ended.is_none() {
            self.shared.news.clear();
        }
        drop(said);
        if full {
            self.shared.wake.wake();
        }
        Ok(news)
    }

    /// Waits until there is an event, for at most a time.
    ///
    /// # Errors
    /// [`Kind::OsRefused`].
    pub fn wait(&self, at_most: Duration) -> Result<()> {
        os::wait(&[(self.descriptor(), false)], at_most, &NoFaults).map(drop)
    }

    /// What is readable while there are events, and after the thread has ended by itself.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.news.descriptor()
    }
}

impl<D: Drive> Drop for Thread<D> {
    fn drop(&mut self) {
        self.shared.calls.lock().stops = true;
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}
