//! The fabrics' ends as the two processes use them: their options, and the faults of `--fault`.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay::os;
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::receiver::Where;
use forebay::transfer::sender::Source;
use forebay::transfer::socket::{Address, Options, Socket, Token, Way};
use forebay::transfer::{Fence, Frame, Run};
use forebay::{Error, Kind, Result};

use super::args::{self, EndArguments};
use super::clock;
use crate::present::output::{echo, within};

/// The options of an end.
///
/// # Errors
/// [`Kind::Io`] for a token that cannot be read, [`Kind::InvalidConfig`] for one that is too short.
pub fn options(arguments: &EndArguments) -> Result<Options> {
    let token = arguments.token_file.as_deref().map(token).transpose()?;
    let lost = arguments.prompt.timeout;
    Ok(Options { token, lost, alive: lost / 4, opening: lost, ..Options::default() })
}

fn token(path: &Path) -> Result<Token> {
    let bytes = std::fs::read(path).map_err(|e| {
        Error::new(Kind::Io, "read").at(format!("{}: {}", echo(path.display()), os::io_text(&e)))
    })?;
    Token::new(&bytes).map_err(|error| within(error, path))
}

/// Where an end listens, or connects to.
///
/// # Errors
/// [`Kind::InvalidConfig`].
pub fn address(arguments: &EndArguments) -> Result<Address> {
    let way = match arguments.prompt.fabric {
        args::Fabric::Tcp => Way::Tcp,
        args::Fabric::Shm => Way::Shm,
    };
    Address::new(way, &arguments.at)
}

/// A sender's end that notes when layers are told, and may lose notices.
pub struct Telling<F> {
    end: F,
    /// Notices that are still to be lost.
    drops: u32,
    told: Times,
}

/// By layer, when its rows were told for the first time. The transfer thread has the end that writes it.
pub type Times = Arc<Mutex<Vec<Option<u64>>>>;

impl<F> Telling<F> {
    pub const fn new(end: F, drops: u32, told: Times) -> Telling<F> {
        Telling { end, drops, told }
    }
}

impl<F: Fabric> Fabric for Telling<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.end.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.end.close(link);
    }

    fn why_lost(&mut self, link: u32) -> Option<Error> {
        self.end.why_lost(link)
    }
}

impl<F: Source> Source for Telling<F> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.end.read(origin, run, into)
    }
}

impl<F: SenderFabric> SenderFabric for Telling<F> {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        if !matches!(Frame::decode(frame), Ok(Frame::Notice(_))) {
            return self.end.send(link, frame, runs);
        }
        let now = clock::nanos()?;
        match self.drops.checked_sub(1) {
            Some(left) => self.drops = left,
            None => self.end.send(link, frame, runs)?,
        }
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        runs.each(|of| {
            told.get_mut(of.run.layer as usize).map(|layer| layer.get_or_insert(now));
            Ok(())
        })
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        self.end.write(link, write, fence, runs)
    }
}

impl<F: Socket> Socket for Telling<F> {
    fn failure(&mut self) -> Option<Error> {
        self.end.failure()
    }
    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.end.descriptors()
    }
    fn due(&self) -> Duration {
        self.end.due()
    }
}

/// A receiver's end that may fetch wrong bytes.
pub struct Flipping<F> {
    end: F,
    /// Runs that are still to be fetched wrongly, and those that were, by layer, component and token.
    flips: u32,
    flipped: HashSet<(u32, u32, u32)>,
}

impl<F> Flipping<F> {
    pub fn new(end: F, flips: u32) -> Flipping<F> {
        Flipping { end, flips, flipped: HashSet::new() }
    }
}

impl<F: Fabric> Fabric for Flipping<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.end.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.end.close(link);
    }

    fn why_lost(&mut self, link: u32) -> Option<Error> {
        self.end.why_lost(link)
    }
}

impl<F: ReceiverFabric> ReceiverFabric for Flipping<F> {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.end.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.end.fetch(link, fence, at, run, into)?;
        if self.flips > 0 && self.flipped.insert((run.layer, run.component, run.token)) {
            self.flips -= 1;
            into.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
        Ok(())
    }

    fn holds(&mut self, link: u32) -> bool {
        self.end.holds(link)
    }
}

impl<F: Socket> Socket for Flipping<F> {
    fn failure(&mut self) -> Option<Error> {
        self.end.failure()
    }
    fn descriptors(&self) -> Vec<(BorrowedFd<'_>, bool)> {
        self.end.descriptors()
    }
    fn due(&self) -> Duration {
        self.end.due()
    }
}
