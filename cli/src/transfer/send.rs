//! `forebay transfer send`: computes a prompt's rows and sends them.
//!
//! The first request is computed layer by layer in a ring, once the receiver has granted it. When it is over, the
//! sender tells as many bytes again as a second request, all at once and with nothing to compute: its time is that of
//! the transfer alone. Its rows lie in the ring's places, which the layers share.
//!
//! The library's thread sends. This one computes, and waits for the transfer only where the ring is full.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay::os::{NoFaults, Request, page_size};
use forebay::transfer::ends::SendingEnd;
use forebay::transfer::memory::SendMemory;
use forebay::transfer::sender::{self, Computed, Event, Sender as Machine};
use forebay::transfer::socket::SocketSender;
use forebay::transfer::thread::{News, SendThread};
use forebay::transfer::{Part, Rank, Reason, StagingRing};
use forebay::{Error, Kind, Result};
use nix::sys::signal::{Signal, raise};

use super::args::{EndArguments, PromptArguments};
use super::clock;
use super::compute::{pass, write};
use super::fabrics::{self, Telling, Times};
use super::fault::Fault;
use super::report::{Failure, Sent, word};
use super::shape::{ALONE, LAYERED, RING_LAYERS, Shape};

/// The longest wait for news. The end of one is looked at for the time within which a receiver has to come.
const LONGEST: Duration = Duration::from_millis(100);

/// The sender's rank.
pub const RANK: Rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };

/// Sends a prompt.
///
/// # Errors
/// Those of the memory, the fabric and the machine; [`Kind::TimedOut`] if no receiver takes the connection.
pub fn send(arguments: &EndArguments) -> Result<Sent> {
    let prompt = &arguments.prompt;
    let shape = Shape::of(prompt);
    let part = shape.layer_bytes().next_multiple_of(page_size());
    let bytes = part * u64::from(RING_LAYERS);
    let request = Request { bytes, huge: false, populate: true, lock: false, node: None, shared: true };
    let memory = Arc::new(SendMemory::new(&request, shape.planes(), &NoFaults)?.0);
    let at = fabrics::address(arguments)?;
    let mut fabric = SocketSender::new(at.way(), fabrics::options(arguments)?, memory.clone())?;
    fabric.add(at)?;
    let drops = if let Some(Fault::Drop(count)) = prompt.fault { count } else { 0 };
    let told = Arc::new(Mutex::new(vec![None; shape.layers as usize]));
    let fabric = Telling::new(fabric, drops, told.clone());
    // Short prompts too are told layer by layer.
    let options = sender::Options {
        bulk_tokens: 0,
        digests: !prompt.no_digests,
        patience: prompt.timeout,
        ..sender::Options::default()
    };
    let machine = Machine::new(shape.side(), RANK, options)?;
    let sending = Sending {
        thread: SendThread::start(SendingEnd::new(machine, fabric))?,
        prompt,
        shape,
        memory: &memory,
        ring: StagingRing::new(bytes, page_size())?,
        held: VecDeque::new(),
        told,
        state: State::Connects,
        lost: None,
        sent: Sent { computed: vec![None; shape.layers as usize], ..Sent::default() },
    };
    sending.run()
}

/// How far the sender is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No receiver is there.
    Connects,
    /// The request waits for its grant.
    Waits,
    /// The request is granted.
    Sends,
    /// It has ended, in order or not.
    Over,
}

struct Sending<'a> {
    thread: SendThread<Telling<SocketSender>>,
    prompt: &'a PromptArguments,
    shape: Shape,
    memory: &'a SendMemory,
    ring: StagingRing,
    /// Parts of the ring whose rows are on their way.
    held: VecDeque<Part>,
    told: Times,
    state: State,
    /// How the receiver was lost.
    lost: Option<Failure>,
    sent: Sent,
}

impl Sending<'_> {
    /// Sends both requests.
    fn run(mut self) -> Result<Sent> {
        self.thread.begin(LAYERED, self.shape.tokens, None);
        let until = clock::now()? + self.prompt.timeout;
        self.until(|sending| {
            if sending.state == State::Connects && clock::now()? >= until {
                return Err(Error::new(Kind::TimedOut, "transfer")
                    .at("no receiver took the connection")
                    .hint("start forebay transfer receive with the same --fabric and --at first"));
            }
            Ok(!matches!(sending.state, State::Connects | State::Waits))
        })?;
        self.sent.began = Some(clock::nanos()?);
        self.compute()?;
        self.until(|sending| Ok(sending.state == State::Over))?;
        self.sent.runs = self.thread.statistics().told.runs;
        if self.sent.failure.is_none() {
            self.again()?;
        }
        self.sent.told.clone_from(&self.told.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(self.sent)
    }

    /// Takes news until something holds.
    fn until(&mut self, mut holds: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        loop {
            self.take()?;
            if holds(self)? {
                return Ok(());
            }
            self.thread.wait(LONGEST)?;
        }
    }

    /// Takes the news that is there.
    fn take(&mut self) -> Result<()> {
        while let Some(news) = self.thread.poll()? {
            match news {
                News::Connected { .. } if self.state == State::Connects => self.state = State::Waits,
                News::Unopened { why } if self.state == State::Connects => return Err(why),
                News::Refused { why, .. } => return Err(why),
                // The end of a request that was granted says whether the receiver had it before it went.
                News::Lost { why, .. } => {
                    let lost = Failure::lost(why.as_ref());
                    match self.state {
                        State::Connects | State::Waits => self.fail(lost),
                        State::Sends | State::Over => self.lost = Some(lost),
                    }
                }
                News::Event(Event::Granted { .. }) if self.state == State::Waits => {
                    self.state = State::Sends;
                }
                News::Event(Event::Released { request: LAYERED, origin }) => self.release(origin)?,
                News::Event(Event::Ended { reason: Reason::Done, .. }) => self.state = State::Over,
                News::Event(Event::Ended { reason, .. }) => {
                    let lost = self.lost.take().filter(|_| reason == Reason::PeerLost);
                    self.fail(lost.unwrap_or_else(|| Failure::new(word(reason.kind()))));
                }
                // The second request's rows stay where they are.
                _ => {}
            }
        }
        Ok(())
    }

    fn fail(&mut self, failure: Failure) {
        self.state = State::Over;
        self.sent.failure.get_or_insert(failure);
    }

    fn release(&mut self, origin: u64) -> Result<()> {
        let found = self.held.iter().position(|part| part.offset == origin);
        found.and_then(|at| self.held.remove(at)).map_or(Ok(()), |part| self.ring.give_back(part))
    }

    /// Computes the whole prompt, chunk by chunk. It ends early if the request does.
    fn compute(&mut self) -> Result<()> {
        let tokens = self.shape.tokens;
        let chunk = self.prompt.chunk.unwrap_or(tokens);
        let mut first = 0;
        while first < tokens {
            let own = first..tokens.min(first.saturating_add(chunk));
            for layer in 0..self.shape.layers {
                self.layer(layer, own.clone())?;
                self.take()?;
                if self.state == State::Over || self.sent.failure.is_some() {
                    return Ok(());
                }
            }
            first = own.end;
        }
        self.thread.finish(LAYERED);
        Ok(())
    }

    /// Computes a layer's rows of some tokens, and tells them.
    fn layer(&mut self, layer: u32, tokens: Range<u32>) -> Result<()> {
        let begin = Instant::now();
        let Some(origin) = self.part()? else { return Ok(()) };
        let mut rows = Vec::new();
        write(self.memory, &self.shape, (LAYERED, layer), tokens.clone(), origin, &mut rows)?;
        let share = f64::from(tokens.end - tokens.start) / f64::from(self.shape.tokens);
        pass(begin, self.prompt.compute.mul_f64(share), self.prompt.spin);
        let at = clock::nanos()?;
        self.sent.computed.get_mut(layer as usize).map(|time| time.replace(at));
        let last = tokens.end == self.shape.tokens;
        if last && self.prompt.fault == Some(Fault::KillSender(layer)) {
            raise(Signal::SIGKILL)
                .map_err(|errno| Error::new(Kind::OsRefused, "transfer").at(errno.to_string()))?;
        }
        self.thread.computed(vec![Computed { request: LAYERED, layer, tokens, chunk: None, origin }]);
        if last && self.prompt.fault == Some(Fault::Abort(layer)) {
            // It is over when the receiver has answered.
            self.thread.abort(LAYERED);
            self.sent.failure = Some(Failure::new(word(Kind::Cancelled)));
        }
        Ok(())
    }

    /// Room for a layer in the ring; waits while it is full. None if the request has ended.
    fn part(&mut self) -> Result<Option<u64>> {
        loop {
            if self.state == State::Over {
                return Ok(None);
            }
            match self.ring.take(self.shape.layer_bytes()) {
                Ok(part) => {
                    let origin = part.offset;
                    self.held.push_back(part);
                    return Ok(Some(origin));
                }
                Err(error) if error.kind() == Kind::Exhausted => {}
                Err(error) => return Err(error),
            }
            self.thread.wait(LONGEST)?;
            self.take()?;
        }
    }

    /// Sends the second request: all of it at once, from the ring, all of which is free.
    fn again(&mut self) -> Result<()> {
        if let Some(lost) = self.lost.take() {
            self.fail(lost);
            return Ok(());
        }
        let mut rows = Vec::new();
        let layer_bytes = self.shape.layer_bytes().next_multiple_of(page_size());
        let origin = |layer: u32| layer_bytes * u64::from(layer % RING_LAYERS);
        for layer in 0..self.shape.layers.min(RING_LAYERS) {
            let tokens = 0..self.shape.tokens;
            write(self.memory, &self.shape, (ALONE, layer), tokens, origin(layer), &mut rows)?;
        }
        self.state = State::Waits;
        self.thread.begin(ALONE, self.shape.tokens, None);
        self.until(|sending| Ok(sending.state != State::Waits))?;
        let tokens = 0..self.shape.tokens;
        let part = |layer| Computed {
            request: ALONE,
            layer,
            tokens: tokens.clone(),
            chunk: None,
            origin: origin(layer),
        };
        self.sent.alone = Some(clock::nanos()?);
        self.thread.computed((0..self.shape.layers).map(part).collect());
        self.thread.finish(ALONE);
        self.until(|sending| Ok(sending.state == State::Over))
    }
}
