//! `forebay transfer receive`: takes a prompt's rows into pages, and compares every byte.
//!
//! It grants the first request when a sender is there, and the second one when the first is whole and compared. The
//! library's thread receives, so the connection lives while this one compares.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay::transfer::ends::{ReceivingEnd, Store};
use forebay::transfer::receiver::{self, Event, Receiver as Machine};
use forebay::transfer::socket::{Address, SocketReceiver};
use forebay::transfer::thread::{Grant, News, ReceiveThread};
use forebay::transfer::{Fence, Rank, Run};
use forebay::{Error, Kind, Result};
use nix::sys::signal::{Signal, raise};

use super::args::EndArguments;
use super::clock;
use super::fabrics::{self, Flipping};
use super::fault::Fault;
use super::report::{Failure, Line, Received};
use super::send;
use super::shape::{ALONE, LAYERED, RING_LAYERS, Shape};

const RANK: Rank = Rank { instance: 2, replica: 0, stage: 0, lane: 0 };
/// The longest wait for news.
const LONGEST: Duration = Duration::from_millis(100);

/// Takes a prompt. `tell` gets what happens on the way.
///
/// # Errors
/// Those of the fabric and the machine; [`Kind::OutOfMemory`] for pages that there is no memory for.
pub fn receive(arguments: &EndArguments, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<Received> {
    let end = SocketReceiver::bind(fabrics::options(arguments)?, &fabrics::address(arguments)?)?;
    let at = match end.address() {
        Some(Address::Tcp(at)) => at.to_string(),
        _ => arguments.at.clone(),
    };
    let shape = Shape::of(&arguments.prompt);
    let options = receiver::Options {
        digests: !arguments.prompt.no_digests,
        patience: arguments.prompt.timeout,
        ..receiver::Options::default()
    };
    let flips = if let Some(Fault::Flip(count)) = arguments.prompt.fault { count } else { 0 };
    let end = ReceivingEnd::new(Machine::new(shape.side(), RANK, options)?, Flipping::new(end, flips));
    let mut store = Pages::new(&shape)?;
    let pages = Arc::clone(&store.given);
    // A grant gives them back.
    store.ended(Fence { request: LAYERED, generation: 0 });
    let receiving = Receiving {
        thread: ReceiveThread::start(end, store)?,
        shape,
        pages,
        fault: arguments.prompt.fault,
        state: State::Waits,
        lost: None,
        connected: false,
        answered: false,
        received: Received {
            stored: vec![None; shape.layers as usize],
            verified: true,
            ..Received::default()
        },
    };
    tell(Line::Listening { at })?;
    receiving.run(tell)
}

/// The receiver's pages, by plane. The transfer thread has them while a request arrives, and hands them over when it
/// has ended.
struct Pages {
    planes: Planes,
    page_bytes: [u64; 2],
    given: Arc<Mutex<Planes>>,
}

type Planes = Vec<Vec<u8>>;

impl Pages {
    fn new(shape: &Shape) -> Result<Pages> {
        let page_bytes = shape.page_bytes();
        let mut planes = Vec::new();
        for bytes in (0..shape.layers).flat_map(|_| page_bytes) {
            let bytes = usize::try_from(bytes * u64::from(shape.pages())).unwrap_or(usize::MAX);
            let mut plane = Vec::new();
            plane.try_reserve_exact(bytes).map_err(|_| {
                Error::new(Kind::OutOfMemory, "transfer")
                    .at("the receiver's pages")
                    .with("bytes", shape.bytes())
                    .hint("send fewer tokens or layers")
            })?;
            plane.resize(bytes, 0);
            planes.push(plane);
        }
        Ok(Pages { planes, page_bytes, given: Arc::default() })
    }

    /// The bytes of a run's piece; none if it is not in the pages.
    fn piece(&mut self, run: &Run, number: u64, bytes: usize) -> Option<&mut [u8]> {
        let [latents, keys] = self.page_bytes;
        let page_bytes = if run.to.plane.is_multiple_of(2) { latents } else { keys };
        let at = u64::from(run.to.page) * page_bytes + run.to.offset + number * run.to.stride;
        let plane = self.planes.get_mut(run.to.plane as usize)?;
        plane.get_mut(usize::try_from(at).ok()?..)?.get_mut(..bytes)
    }
}

impl Store for Pages {
    fn store(&mut self, _: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let wrong = || Error::new(Kind::OutOfRange, "transfer").at("a run outside of the pages");
        let piece = usize::try_from(run.bytes).ok().filter(|piece| *piece > 0).ok_or_else(wrong)?;
        for (number, from) in (0..).zip(bytes.chunks(piece)) {
            self.piece(run, number, from.len()).ok_or_else(wrong)?.copy_from_slice(from);
        }
        Ok(())
    }

    fn place(&mut self, _: Fence, run: &Run) -> Option<&mut [u8]> {
        let bytes = usize::try_from(run.bytes).ok().filter(|_| run.pieces == 1)?;
        self.piece(run, 0, bytes)
    }

    fn ended(&mut self, _: Fence) {
        *given(&self.given) = std::mem::take(&mut self.planes);
    }
}

fn given(pages: &Mutex<Planes>) -> MutexGuard<'_, Planes> {
    pages.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How far the receiver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No sender is there.
    Waits,
    /// A request arrives.
    Arrives(u64),
    /// All is compared. The sender is to learn that the last request has ended.
    Ends,
    Over,
}

struct Receiving {
    thread: ReceiveThread<Flipping<SocketReceiver>, Pages>,
    shape: Shape,
    pages: Arc<Mutex<Planes>>,
    fault: Option<Fault>,
    state: State,
    /// How the sender was lost.
    lost: Option<Failure>,
    connected: bool,
    /// Whether the sender knows that the last request has ended.
    answered: bool,
    received: Received,
}

impl Receiving {
    fn run(mut self, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<Received> {
        while self.state != State::Over {
            match self.thread.poll()? {
                Some(news) => self.news(news, tell)?,
                None => self.thread.wait(LONGEST)?,
            }
        }
        Ok(self.received)
    }

    fn news(&mut self, news: News<Event>, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<()> {
        match news {
            News::Connected { .. } if !self.connected => {
                self.connected = true;
                tell(Line::Connected)?;
            }
            News::Event(Event::Met { .. }) if self.state == State::Waits => self.grant(LAYERED),
            // When it has the last request, the sender may go.
            News::Lost { .. } if self.received.whole[1].is_some() => self.answered(),
            // The end of the request says whether all of it was there before.
            News::Lost { why, .. } => {
                let lost = Failure::lost(why.as_ref());
                match self.state {
                    State::Arrives(_) => self.lost = Some(lost),
                    _ => self.fail(lost),
                }
            }
            News::Unopened { why } if self.state == State::Waits => {
                tell(Line::Unopened { why: why.to_string() })?;
            }
            News::Event(Event::Ready { fence, layer }) if fence.request == LAYERED => {
                let now = clock::nanos()?;
                self.received.stored.get_mut(layer as usize).map(|time| time.replace(now));
                if self.fault == Some(Fault::StopReceiver(layer)) {
                    raise(Signal::SIGSTOP)
                        .map_err(|errno| Error::new(Kind::OsRefused, "transfer").at(errno.to_string()))?;
                }
            }
            News::Event(Event::Whole { fence: Fence { request: LAYERED, .. } }) => {
                self.received.whole[0] = Some(clock::nanos()?);
                self.count();
                self.compare(LAYERED);
                self.grant(ALONE);
            }
            News::Event(Event::Whole { .. }) => {
                self.received.whole[1] = Some(clock::nanos()?);
                self.compare(ALONE);
                self.state = if self.answered { State::Over } else { State::Ends };
            }
            News::Event(Event::Failed { error, .. }) => {
                let lost =
                    self.lost.take().filter(|_| matches!(error.kind(), Kind::PeerLost | Kind::InvalidState));
                self.fail(lost.unwrap_or_else(|| Failure::of(&error)));
            }
            News::Event(Event::Drained { fence }) if fence.request == ALONE => self.answered(),
            News::Refused { why, .. } => return Err(why),
            _ => {}
        }
        Ok(())
    }

    /// The sender knows that the last request has ended.
    fn answered(&mut self) {
        self.answered = true;
        if self.state == State::Ends {
            self.state = State::Over;
        }
    }

    /// What was stored of the first request.
    fn count(&mut self) {
        let moved = self.thread.statistics().moved;
        (self.received.runs, self.received.bytes) = (moved.runs, moved.bytes);
    }

    fn fail(&mut self, failure: Failure) {
        if self.received.whole[0].is_none() {
            self.count();
        }
        self.state = State::Over;
        self.received.verified = false;
        self.received.failure.get_or_insert(failure);
    }

    fn grant(&mut self, request: u64) {
        self.state = State::Arrives(request);
        let grant = Grant {
            fence: Fence { request, generation: request },
            tokens: self.shape.tokens,
            first: 0,
            sender: (send::RANK.instance, send::RANK.replica),
            payloads: Vec::new(),
            landing: Vec::new(),
            within: None,
        };
        let planes = std::mem::take(&mut *given(&self.pages));
        self.thread.grant(grant, |pages| {
            pages.planes = planes;
            Ok(())
        });
    }

    /// Compares all rows. In the second request the layers share the places of the sender's ring.
    fn compare(&mut self, request: u64) {
        let planes = given(&self.pages);
        let mut rows = Vec::new();
        for layer in 0..self.shape.layers {
            let of = if request == ALONE { layer % RING_LAYERS } else { layer };
            for component in 0..2 {
                self.shape.rows(request, of, component, 0..self.shape.tokens, &mut rows);
                let plane = planes.get((2 * layer + component) as usize);
                let same = plane.is_some_and(|plane| plane.starts_with(&rows));
                self.received.verified &= same;
            }
        }
    }
}
