//! `forebay transfer receive`: takes a prompt's rows into pages, and compares every byte.
//!
//! It grants the first request when a sender is there, and the second one when the first is whole and compared. Rows
//! are compared a layer at a time, so that the connection lives meanwhile.

use std::path::Path;
use std::time::Duration;

use forebay::transfer::ends::{Polled, ReceivingEnd, Store};
use forebay::transfer::fabric::ReceiverFabric;
use forebay::transfer::receiver::{self, Event, Receiver as Machine, Wanted};
use forebay::transfer::socket::{ShmReceiver, TcpReceiver};
use forebay::transfer::{Fence, Rank, Run};
use forebay::{Error, Kind, Result};
use nix::sys::signal::{Signal, raise};

use super::args::{EndArguments, Fabric};
use super::clock;
use super::fabrics::{self, Flipping, Socket};
use super::fault::Fault;
use super::report::{Failure, Line, Received};
use super::send;
use super::shape::{ALONE, LAYERED, RING_LAYERS, Shape};

const RANK: Rank = Rank { instance: 2, replica: 0, stage: 0, lane: 0 };
/// The longest wait where nothing is due.
const LONGEST: Duration = Duration::from_millis(100);

/// Takes a prompt. `tell` gets what happens on the way.
///
/// # Errors
/// Those of the fabric and the machine; [`Kind::OutOfMemory`] for pages that there is no memory for.
pub fn receive(arguments: &EndArguments, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<Received> {
    let options = fabrics::options(arguments)?;
    match arguments.prompt.fabric {
        Fabric::Tcp => {
            let end = TcpReceiver::bind(options, fabrics::address(&arguments.at)?)?;
            let at = end.address().map_or_else(|| arguments.at.clone(), |at| at.to_string());
            run(end, arguments, at, tell)
        }
        Fabric::Shm => {
            let end = ShmReceiver::bind(options, Path::new(&arguments.at))?;
            run(end, arguments, arguments.at.clone(), tell)
        }
    }
}

fn run<F: ReceiverFabric + Socket>(
    fabric: F,
    arguments: &EndArguments,
    at: String,
    tell: &mut dyn FnMut(Line) -> Result<()>,
) -> Result<Received> {
    let shape = Shape::of(&arguments.prompt);
    let options = receiver::Options {
        digests: !arguments.prompt.no_digests,
        patience: arguments.prompt.timeout,
        ..receiver::Options::default()
    };
    let flips = if let Some(Fault::Flip(count)) = arguments.prompt.fault { count } else { 0 };
    let received =
        Received { stored: vec![None; shape.layers as usize], verified: true, ..Received::default() };
    let receiving = Receiving {
        end: ReceivingEnd::new(Machine::new(shape.side(), RANK, options)?, Flipping::new(fabric, flips)),
        shape,
        pages: Pages::new(&shape)?,
        fault: arguments.prompt.fault,
        state: State::Waits(LAYERED),
        connected: false,
        answered: false,
        received,
    };
    tell(Line::Listening { at })?;
    receiving.run(tell)
}

/// The receiver's pages, by plane.
struct Pages {
    planes: Vec<Vec<u8>>,
    page_bytes: [u64; 2],
    runs: u64,
    bytes: u64,
}

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
        Ok(Pages { planes, page_bytes, runs: 0, bytes: 0 })
    }
}

impl Pages {
    /// The place of a run's piece.
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
        self.runs += 1;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn place(&mut self, _: Fence, run: &Run) -> Option<&mut [u8]> {
        let bytes = usize::try_from(run.bytes).ok().filter(|_| run.pieces == 1)?;
        self.runs += 1;
        self.bytes += run.bytes;
        self.piece(run, 0, bytes)
    }
}

/// What is done with which request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is to be granted, when the sender can be.
    Waits(u64),
    Arrives(u64),
    /// It is whole, and its layers from this one on are to be compared.
    Compares(u64, u32),
    /// All is compared. The sender is to learn that the last request has ended.
    Ends,
    Over,
}

struct Receiving<F> {
    end: ReceivingEnd<Flipping<F>>,
    shape: Shape,
    pages: Pages,
    fault: Option<Fault>,
    state: State,
    connected: bool,
    /// Whether the sender knows that the last request has ended.
    answered: bool,
    received: Received,
}

impl<F: ReceiverFabric + Socket> Receiving<F> {
    fn run(mut self, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<Received> {
        while self.state != State::Over {
            while let Some(polled) = self.end.poll(clock::now()?, &mut self.pages)? {
                self.polled(polled, tell)?;
            }
            match self.state {
                State::Waits(request) if self.connected => self.grant(request)?,
                State::Compares(request, layer) => self.compare(request, layer),
                State::Over => break,
                _ => fabrics::wait(&self.end.fabric, self.end.machine.due(), None, LONGEST)?,
            }
        }
        Ok(self.received)
    }

    fn polled(&mut self, polled: Polled<Event>, tell: &mut dyn FnMut(Line) -> Result<()>) -> Result<()> {
        match polled {
            Polled::Connected { .. } if !self.connected => {
                self.connected = true;
                tell(Line::Connected)?;
            }
            // When it has the last request, the sender may go.
            Polled::Lost { .. } if self.received.whole[1].is_some() => self.answered(),
            Polled::Lost { why, .. } => {
                let why = why.or_else(|| self.end.fabric.failure());
                self.fail(Failure::lost(why.as_ref()));
            }
            Polled::Event(Event::Ready { fence, layer }) if fence.request == LAYERED => {
                let now = clock::nanos()?;
                self.received.stored.get_mut(layer as usize).map(|time| time.replace(now));
                if self.fault == Some(Fault::StopReceiver(layer)) {
                    raise(Signal::SIGSTOP)
                        .map_err(|errno| Error::new(Kind::OsRefused, "transfer").at(errno.to_string()))?;
                }
            }
            Polled::Event(Event::Whole { fence }) => {
                let now = clock::nanos()?;
                if fence.request == LAYERED {
                    self.received.whole[0] = Some(now);
                    self.count();
                } else {
                    self.received.whole[1] = Some(now);
                }
                self.state = State::Compares(fence.request, 0);
            }
            Polled::Event(Event::Failed { error, .. }) => self.fail(Failure::of(&error)),
            Polled::Event(Event::Drained { fence }) if fence.request == ALONE => self.answered(),
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
    const fn count(&mut self) {
        (self.received.runs, self.received.bytes) = (self.pages.runs, self.pages.bytes);
    }

    fn fail(&mut self, failure: Failure) {
        if self.received.whole[0].is_none() {
            self.count();
        }
        self.state = State::Over;
        self.received.verified = false;
        self.received.failure.get_or_insert(failure);
    }

    /// Grants a request, if the sender has said hello.
    fn grant(&mut self, request: u64) -> Result<()> {
        let wanted = Wanted {
            fence: Fence { request, generation: request },
            tokens: self.shape.tokens,
            first: 0,
            sender: (send::RANK.instance, send::RANK.replica),
            payloads: &[],
            landing: &[],
            deadline: None,
        };
        match self.end.machine.grant(&wanted) {
            Ok(()) => self.state = State::Arrives(request),
            Err(error) if error.kind() == Kind::InvalidState => {
                return fabrics::wait(&self.end.fabric, self.end.machine.due(), None, LONGEST);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Compares a layer. In the second request the layers share the places of the sender's ring.
    fn compare(&mut self, request: u64, layer: u32) {
        let of = if request == ALONE { layer % RING_LAYERS } else { layer };
        let mut rows = Vec::new();
        for component in 0..2 {
            self.shape.rows(request, of, component, 0..self.shape.tokens, &mut rows);
            let plane = self.pages.planes.get((2 * layer + component) as usize);
            let same = plane.is_some_and(|plane| plane.starts_with(&rows));
            self.received.verified &= same;
        }
        self.state = match (layer + 1 < self.shape.layers, request) {
            (true, _) => State::Compares(request, layer + 1),
            (false, LAYERED) => State::Waits(ALONE),
            (false, _) if self.answered => State::Over,
            (false, _) => State::Ends,
        };
    }
}
