//! `forebay transfer send`: computes a prompt's rows and sends them.
//!
//! The first request is computed layer by layer in a ring, once the receiver has granted it. When it is over, the
//! sender tells as many bytes again as a second request, all at once and with nothing to compute: its time is that of
//! the transfer alone. Its rows lie in the ring's places, which the layers share.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use forebay::os::{NoFaults, Request, page_size};
use forebay::transfer::ends::{Polled, SendingEnd};
use forebay::transfer::fabric::SenderFabric;
use forebay::transfer::memory::SendMemory;
use forebay::transfer::sender::{self, Computed, Event, Sender as Machine};
use forebay::transfer::socket::{ShmSender, TcpSender};
use forebay::transfer::{Rank, Reason, StagingRing};
use forebay::{Error, Kind, Result, os};

use super::args::{EndArguments, Fabric, PromptArguments};
use super::clock;
use super::compute::{Computation, Said, write};
use super::fabrics::{self, Socket, Telling};
use super::fault::Fault;
use super::report::{Failure, Sent, word};
use super::shape::{ALONE, LAYERED, RING_LAYERS, Shape};

/// The longest wait: the channel of the computation wakes it earlier.
const LONGEST: Duration = Duration::from_millis(100);

/// The sender's rank.
pub const RANK: Rank = Rank { instance: 1, replica: 0, stage: 0, lane: 0 };

/// Sends a prompt.
///
/// # Errors
/// Those of the memory, the fabric and the machine; [`Kind::TimedOut`] if no receiver takes the connection.
pub fn send(arguments: &EndArguments) -> Result<Sent> {
    let shape = Shape::of(&arguments.prompt);
    let part = shape.layer_bytes().next_multiple_of(page_size());
    let bytes = part * u64::from(RING_LAYERS);
    let request = Request { bytes, huge: false, populate: true, lock: false, node: None, shared: true };
    let memory = Arc::new(SendMemory::new(&request, shape.planes(), &NoFaults)?.0);
    let ring = StagingRing::new(bytes, page_size())?;
    let options = fabrics::options(arguments)?;
    match arguments.prompt.fabric {
        Fabric::Tcp => {
            let at = [fabrics::address(&arguments.at)?];
            run(TcpSender::new(options, memory.clone(), &at)?, arguments, &memory, ring)
        }
        Fabric::Shm => {
            let at = [PathBuf::from(&arguments.at)];
            run(ShmSender::new(options, memory.clone(), &at)?, arguments, &memory, ring)
        }
    }
}

fn run<F: SenderFabric + Socket>(
    fabric: F,
    arguments: &EndArguments,
    memory: &SendMemory,
    ring: StagingRing,
) -> Result<Sent> {
    let shape = Shape::of(&arguments.prompt);
    let PromptArguments { timeout, compute, spin, no_digests, chunk, fault, .. } = arguments.prompt;
    // Short prompts too are told layer by layer.
    let options = sender::Options {
        bulk_tokens: 0,
        digests: !no_digests,
        patience: timeout,
        ..sender::Options::default()
    };
    let drops = if let Some(Fault::Drop(count)) = fault { count } else { 0 };
    let mut end = SendingEnd::new(
        Machine::new(shape.side(), RANK, options)?,
        Telling::new(fabric, drops, shape.layers),
    );
    end.machine.begin(LAYERED, shape.tokens, None)?;
    let (say, said) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let refused = |e: std::io::Error| Error::new(Kind::OsRefused, "transfer").at(os::io_text(&e));
    let (wake, woken) = UnixStream::pair().map_err(refused)?;
    wake.set_nonblocking(true).and_then(|()| woken.set_nonblocking(true)).map_err(refused)?;
    let time = compute;
    let chunk = chunk.unwrap_or(shape.tokens);
    let computation =
        Computation { shape, chunk, time, spin, fault, memory, ring, said: say, released, wake: &wake };
    let until = clock::now()? + timeout;
    let sent = Sent { computed: vec![None; shape.layers as usize], ..Sent::default() };
    std::thread::scope(|threads| {
        let mut ready = Some(computation);
        let start = || {
            if let Some(computation) = ready.take() {
                threads.spawn(move || computation.run());
            }
        };
        // The channels end with the call, and so does the computation.
        let sending =
            Sending { end, shape, memory, said, woken, release, connected: false, over: false, sent };
        sending.run(until, start)
    })
}

struct Sending<'a, F> {
    end: SendingEnd<Telling<F>>,
    shape: Shape,
    memory: &'a SendMemory,
    said: Receiver<Said>,
    woken: UnixStream,
    release: Sender<u64>,
    connected: bool,
    over: bool,
    sent: Sent,
}

impl<F: SenderFabric + Socket> Sending<'_, F> {
    /// Sends both requests. A receiver has to be connected by `until`.
    fn run(mut self, until: Duration, mut start: impl FnMut()) -> Result<Sent> {
        while !self.over {
            while let Ok(said) = self.said.try_recv() {
                self.take(said)?;
            }
            while let Some(polled) = self.end.poll(clock::now()?)? {
                self.polled(polled, &mut start)?;
            }
            if !self.connected {
                self.may_still_connect(until)?;
            }
            if !self.over {
                let woken = Some(self.woken.as_fd());
                fabrics::wait(&self.end.fabric, self.end.machine.due(), woken, LONGEST)?;
                let mut bytes = [0; 64];
                while (&self.woken).read(&mut bytes).is_ok_and(|read| read > 0) {}
            }
        }
        self.sent.told.clone_from(&self.end.fabric.told);
        Ok(self.sent)
    }

    fn may_still_connect(&mut self, until: Duration) -> Result<()> {
        if let Some(error) = self.end.fabric.failure() {
            return Err(error);
        }
        match clock::now()? < until {
            true => Ok(()),
            false => Err(Error::new(Kind::TimedOut, "transfer")
                .at("no receiver took the connection")
                .hint("start forebay transfer receive with the same --fabric and --at first")),
        }
    }

    fn take(&mut self, said: Said) -> Result<()> {
        match said {
            Said::Began(at) => self.sent.began = Some(at),
            Said::Computed { layer, tokens, origin, at } => {
                self.sent.computed.get_mut(layer as usize).map(|time| time.replace(at));
                let part = Computed { request: LAYERED, layer, tokens, chunk: None, origin };
                return self.unless_over(|machine| machine.computed(&[part]));
            }
            Said::All => return self.unless_over(|machine| machine.finish(LAYERED)),
            Said::Aborts => {
                self.sent.failure.get_or_insert(Failure::new(word(Kind::Cancelled)));
                return self.unless_over(|machine| machine.abort(LAYERED));
            }
            Said::Failed(error) => return Err(error),
        }
        Ok(())
    }

    /// A request that has failed meanwhile tells so by itself.
    fn unless_over(&mut self, act: impl FnOnce(&mut Machine) -> Result<()>) -> Result<()> {
        act(&mut self.end.machine).or_else(|error| match error.kind() {
            Kind::Closed => Ok(()),
            _ => Err(error),
        })
    }

    fn polled(&mut self, polled: Polled<Event>, start: &mut impl FnMut()) -> Result<()> {
        match polled {
            Polled::Connected { .. } => self.connected = true,
            Polled::Lost { why, .. } => {
                let why = why.or_else(|| self.end.fabric.failure());
                self.fail(Failure::lost(why.as_ref()));
            }
            Polled::Event(Event::Granted { request: LAYERED, .. }) => start(),
            Polled::Event(Event::Granted { .. }) => self.tell_all()?,
            Polled::Event(Event::Released { request, origin }) if request == LAYERED => {
                // A computation that is over takes no more.
                let _ = self.release.send(origin);
            }
            Polled::Event(Event::Ended { request, reason: Reason::Done }) => match request {
                LAYERED => self.prepare()?,
                _ => self.over = true,
            },
            Polled::Event(Event::Ended { reason, .. }) => self.fail(Failure::new(word(reason.kind()))),
            // The second request's rows stay where they are.
            _ => {}
        }
        Ok(())
    }

    fn fail(&mut self, failure: Failure) {
        self.over = true;
        self.sent.failure.get_or_insert(failure);
    }

    /// Where the second request has a layer's rows, and which layer's bytes these are.
    const fn place(layer: u32) -> u32 {
        layer % RING_LAYERS
    }

    fn origin(&self, layer: u32) -> u64 {
        self.shape.layer_bytes().next_multiple_of(page_size()) * u64::from(Self::place(layer))
    }

    /// Puts the rows of the second request into the ring, all of which is free.
    fn prepare(&mut self) -> Result<()> {
        self.sent.runs = self.end.fabric.runs;
        let mut rows = Vec::new();
        for layer in 0..self.shape.layers.min(RING_LAYERS) {
            let tokens = 0..self.shape.tokens;
            write(self.memory, &self.shape, (ALONE, layer), tokens, self.origin(layer), &mut rows)?;
        }
        self.end.machine.begin(ALONE, self.shape.tokens, None)
    }

    fn tell_all(&mut self) -> Result<()> {
        let part = |layer| Computed {
            request: ALONE,
            layer,
            tokens: 0..self.shape.tokens,
            chunk: None,
            origin: self.origin(layer),
        };
        let parts: Vec<Computed> = (0..self.shape.layers).map(part).collect();
        self.sent.alone = Some(clock::nanos()?);
        self.end.machine.computed(&parts)?;
        self.end.machine.finish(ALONE)
    }
}
