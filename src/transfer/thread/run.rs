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
    /// A call was refused when it was carried out, and has changed nothing. Of several parts of a call the others are
    /// taken.
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
    /// Whether the engine's descriptor is readable.
    is_told: bool,
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
        if !said.is_told {
            said.is_told = self.news.wake();
        }
    }

    /// Nothing is done any more. What waits to be done goes.
    fn end(&self, why: Error) {
        let mut calls = self.calls.lock();
        calls.stops = true;
        let queue = std::mem::take(&mut calls.queue);
        drop(calls);
        drop(queue);
        let mut said = self.said.lock();
        said.ended = Some(why);
        said.is_told = self.news.wake();
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
            if let Err(why) = call(drive, self.start.elapsed()) {
                self.say(News::Refused { request, why });
            }
        }
        let full = self.said.lock().events.len() >= EVENTS_KEPT;
        if !full && self.poll(drive)? {
            return Ok(true);
        }
        let (mut most, mut descriptors) = (LONGEST, vec![(self.wake.descriptor(), false)]);
        if !full {
            let due = drive.due().map(|due| due.saturating_sub(self.start.elapsed()));
            most = most.min(drive.idle()).min(due.unwrap_or(LONGEST));
            descriptors.extend(drive.descriptors());
        }
        if !most.is_zero() {
            os::wait(&descriptors, most, &NoFaults)?;
        }
        Ok(true)
    }

    /// Polls the end once. Whether there may be more.
    fn poll(&self, drive: &mut D) -> Result<bool> {
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
        Ok(true)
    }
}

/// Says that the thread has ended, also if a store or a call has panicked on it.
struct Ending<D: Drive> {
    shared: Arc<Shared<D>>,
    why: Option<Error>,
}

impl<D: Drive> Drop for Ending<D> {
    fn drop(&mut self) {
        if let Some(why) = self.why.take() {
            self.shared.end(why);
        }
    }
}

/// A thread and its end.
pub struct Thread<D: Drive> {
    shared: Arc<Shared<D>>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
}

impl<D: Drive> fmt::Debug for Thread<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Thread").finish_non_exhaustive()
    }
}

impl<D: Drive<Event: Send> + Send + 'static> Thread<D> {
    /// # Errors
    /// [`Kind::OsRefused`] if there can be no thread, or no sockets to wake it.
    pub fn start(name: &str, drive: D) -> Result<Thread<D>> {
        let calls = Mutex::new(Calls { queue: VecDeque::new(), stops: false });
        let said = Said { events: VecDeque::new(), unopened: 0, ended: None, is_told: false };
        let (said, wake, news) = (Mutex::new(said), Wake::new()?, Wake::new()?);
        let shared = Arc::new(Shared { calls, wake, said, news, start: Instant::now() });
        let panicked = Error::new(Kind::Internal, "transfer thread").at("a panic on the thread");
        let mut ending = Ending { shared: Arc::clone(&shared), why: Some(panicked) };
        let run = move || {
            // Dropped before `ending`: its connections are closed before the engine learns that nothing is stored any
            // more.
            let mut drive = drive;
            loop {
                match ending.shared.turn(&mut drive) {
                    Ok(true) => {}
                    Ok(false) => break ending.why = None,
                    Err(error) => break ending.why = Some(error),
                }
            }
            drop(drive);
            drop(ending);
        };
        let spawned = thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(|error| Error::new(Kind::OsRefused, "transfer thread").at(io_text(&error)))?;
        Ok(Thread { shared, thread: Mutex::new(Some(spawned)) })
    }
}

impl<D: Drive> Thread<D> {
    /// Queues a call. One that is queued when the thread has ended is dropped.
    pub fn call(
        &self,
        request: Option<u64>,
        call: impl FnOnce(&mut D, Duration) -> Result<()> + Send + 'static,
    ) {
        self.calls([(request, call)]);
    }

    /// Queues calls that are carried out together.
    pub fn calls(
        &self,
        more: impl IntoIterator<
            Item = (Option<u64>, impl FnOnce(&mut D, Duration) -> Result<()> + Send + 'static),
        >,
    ) {
        let mut calls = self.shared.calls.lock();
        if !calls.stops {
            calls.queue.extend(more.into_iter().map(|(request, call)| (request, Box::new(call) as Call<D>)));
            self.shared.wake.wake();
        }
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
            said.is_told = false;
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

impl<D: Drive> Thread<D> {
    /// Ends the thread and waits for that. Its descriptor is readable then.
    pub fn end(&self) {
        self.shared.calls.lock().stops = true;
        self.shared.wake.wake();
        let thread = self.thread.lock().take();
        // A call may have owned what is dropped here, on the thread itself.
        if let Some(thread) = thread.filter(|of| of.thread().id() != thread::current().id()) {
            // One that panicked has said so.
            let _ = thread.join();
        }
        // Also for a process that has inherited the descriptor, to which its closing would show nothing.
        self.shared.news.wake();
    }
}

impl<D: Drive> Drop for Thread<D> {
    fn drop(&mut self) {
        self.end();
    }
}
