//! The sender's computation: a thread that makes a layer's rows in a part of the ring, takes its time, and says so.
//!
//! It never waits for the transfer but where the ring is full. The thread of the transfer owns the machine; the two
//! speak over channels, and a byte on a socket wakes the other one from its wait.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::io::Write;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay::transfer::memory::SendMemory;
use forebay::transfer::{Part, StagingRing};
use forebay::{Error, Kind, Result};
use nix::sys::signal::{Signal, raise};

use super::clock;
use super::fault::Fault;
use super::shape::{LAYERED, Shape};

/// What the computation says.
#[derive(Debug)]
pub enum Said {
    /// It has begun, at this time.
    Began(u64),
    /// Rows of a layer are in memory at `origin`.
    Computed { layer: u32, tokens: Range<u32>, origin: u64, at: u64 },
    /// All of them are.
    All,
    /// The engine gives the request up.
    Aborts,
    /// It cannot go on.
    Failed(Error),
}

/// What it computes, and how.
pub struct Computation<'a> {
    pub shape: Shape,
    /// Tokens at a time.
    pub chunk: u32,
    /// Of a layer of the whole prompt.
    pub time: Duration,
    pub spin: bool,
    pub fault: Option<Fault>,
    pub memory: &'a SendMemory,
    pub ring: StagingRing,
    pub said: Sender<Said>,
    /// Origins of parts that are free again.
    pub released: Receiver<u64>,
    /// Outlives the computation: one that is closed would wake the other thread for ever.
    pub wake: &'a UnixStream,
}

impl Computation<'_> {
    /// Computes the whole prompt. It ends early if the transfer no longer listens.
    pub fn run(mut self) {
        if let Err(error) = self.compute() {
            self.say(Said::Failed(error));
        }
    }

    /// Whether the transfer still listens.
    fn say(&mut self, said: Said) -> bool {
        let listens = self.said.send(said).is_ok();
        // A socket that is full wakes the other thread as well.
        let _ = self.wake.write(&[0]);
        listens
    }

    fn compute(&mut self) -> Result<()> {
        let (mut held, mut rows) = (VecDeque::new(), Vec::new());
        if !self.say(Said::Began(clock::nanos()?)) {
            return Ok(());
        }
        let Shape { layers, tokens, .. } = self.shape;
        let mut first = 0;
        while first < tokens {
            let chunk = first..tokens.min(first.saturating_add(self.chunk));
            for layer in 0..layers {
                let begin = Instant::now();
                let Some(part) = self.part(&mut held)? else { return Ok(()) };
                write(self.memory, &self.shape, (LAYERED, layer), chunk.clone(), part.offset, &mut rows)?;
                let share = f64::from(chunk.end - chunk.start) / f64::from(tokens);
                self.pass(begin, self.time.mul_f64(share));
                let at = clock::nanos()?;
                let last = chunk.end == tokens;
                if last && self.fault == Some(Fault::KillSender(layer)) {
                    raise(Signal::SIGKILL).map_err(|errno| refused(&errno.to_string()))?;
                }
                let computed = Said::Computed { layer, tokens: chunk.clone(), origin: part.offset, at };
                if !self.say(computed) {
                    return Ok(());
                }
                if last && self.fault == Some(Fault::Abort(layer)) {
                    self.say(Said::Aborts);
                    return Ok(());
                }
            }
            first = chunk.end;
        }
        self.say(Said::All);
        Ok(())
    }

    /// The rest of a layer's time since its beginning.
    fn pass(&self, begin: Instant, time: Duration) {
        if self.spin {
            while begin.elapsed() < time {
                spin_loop();
            }
        } else {
            sleep(time.saturating_sub(begin.elapsed()));
        }
    }

    /// A part of the ring; waits while it is full. None if the transfer no longer listens.
    fn part(&mut self, held: &mut VecDeque<Part>) -> Result<Option<Part>> {
        loop {
            while let Ok(origin) = self.released.try_recv() {
                give_back(&mut self.ring, held, origin)?;
            }
            match self.ring.take(self.shape.layer_bytes()) {
                Ok(part) => {
                    held.push_back(part);
                    return Ok(Some(part));
                }
                Err(error) if error.kind() == Kind::Exhausted => {}
                Err(error) => return Err(error),
            }
            match self.released.recv() {
                Ok(origin) => give_back(&mut self.ring, held, origin)?,
                Err(_) => return Ok(None),
            }
        }
    }
}

fn refused(what: &str) -> Error {
    Error::new(Kind::OsRefused, "transfer").at(what.to_owned())
}

fn give_back(ring: &mut StagingRing, held: &mut VecDeque<Part>, origin: u64) -> Result<()> {
    let found = held.iter().position(|part| part.offset == origin);
    found.and_then(|at| held.remove(at)).map_or(Ok(()), |part| ring.give_back(part))
}

/// Writes rows of a request's layer where a part of the memory has them.
///
/// # Errors
/// Those of the memory.
pub fn write(
    memory: &SendMemory,
    shape: &Shape,
    (request, layer): (u64, u32),
    tokens: Range<u32>,
    origin: u64,
    rows: &mut Vec<u8>,
) -> Result<()> {
    for (component, plane) in (0..).zip(memory.planes().0.iter().take(2)) {
        let bytes = if component == 0 { shape.row_bytes[0] } else { shape.row_bytes[1] };
        let mut first = tokens.start;
        while first < tokens.end {
            // A page at a time, so that the buffer stays small. The rows of pages are next to each other.
            let next = tokens.end.min((first / shape.page + 1).saturating_mul(shape.page));
            shape.rows(request, layer, component, first..next, rows);
            let at = origin + plane.offset + u64::from(first) * u64::from(bytes);
            memory.map().copy_in(at, rows)?;
            first = next;
        }
    }
    Ok(())
}
