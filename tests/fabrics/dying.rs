//! Ends whose process is killed or stopped at a phase of a request.
//!
//! | phase | at a sender | at a receiver |
//! |---|---|---|
//! | opening | it is connected, and has said no hello | as the sender |
//! | granted | the grant has come, and is not known yet | the grant is sent |
//! | first layer | its notice is about to be sent | its notice has come, and nothing of it is stored |
//! | halfway | as the first layer, of the middle one | as the first layer, of the middle one |
//! | last layer | as the first layer, of the last one | as the first layer, of the last one |
//! | whole | the end has come, and is not read | all is stored, and the end is not sent |
//! | drained | *drained* is sent | *drained* has come, and is not read |

use forebay::Result;
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use forebay::transfer::receiver::Where;
use forebay::transfer::sender::Source;
use forebay::transfer::{Fence, Frame, Run};
use nix::sys::signal::{Signal, raise};

use crate::ranks::LAYERS;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub enum Phase {
    Opening,
    Granted,
    FirstLayer,
    Halfway,
    LastLayer,
    Whole,
    Drained,
}

pub const PHASES: [Phase; 7] = [
    Phase::Opening,
    Phase::Granted,
    Phase::FirstLayer,
    Phase::Halfway,
    Phase::LastLayer,
    Phase::Whole,
    Phase::Drained,
];

/// The phase that a frame begins, if any.
fn phase(frame: &[u8]) -> Option<Phase> {
    match Frame::decode(frame).unwrap() {
        Frame::Grant(_) => Some(Phase::Granted),
        Frame::Notice(notice) => match notice.parts().next()?.layer {
            0 => Some(Phase::FirstLayer),
            layer if layer == LAYERS / 2 => Some(Phase::Halfway),
            layer if layer == LAYERS - 1 => Some(Phase::LastLayer),
            _ => None,
        },
        Frame::End { .. } => Some(Phase::Whole),
        Frame::Drained { .. } => Some(Phase::Drained),
        _ => None,
    }
}

/// An end whose process gets a signal at a phase, once.
pub struct Dying<F> {
    pub inner: F,
    at: Option<(Phase, Signal)>,
}

impl<F> Dying<F> {
    pub const fn new(inner: F, at: Option<(Phase, Signal)>) -> Dying<F> {
        Dying { inner, at }
    }

    fn reached(&mut self, phase: Option<Phase>) {
        if let Some((_, signal)) = self.at.take_if(|(of, _)| Some(*of) == phase) {
            raise(signal).unwrap();
        }
    }
}

impl<F: Fabric> Fabric for Dying<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let happened = self.inner.poll(frame)?;
        match happened {
            Some(Happened::Connected { .. }) => self.reached(Some(Phase::Opening)),
            Some(Happened::Frame { .. }) => self.reached(phase(frame)),
            _ => {}
        }
        Ok(happened)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: SenderFabric> Source for Dying<F> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.read(origin, run, into)
    }
}

impl<F: SenderFabric> SenderFabric for Dying<F> {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        let phase = phase(frame);
        self.reached(phase.filter(|phase| *phase != Phase::Drained));
        let sent = self.inner.send(link, frame, runs);
        self.reached(phase);
        sent
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        self.inner.write(link, write, fence, runs)
    }
}

impl<F: ReceiverFabric> ReceiverFabric for Dying<F> {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        let phase = phase(frame);
        self.reached(phase.filter(|phase| *phase != Phase::Granted));
        let sent = self.inner.send(link, frame);
        self.reached(phase);
        sent
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.fetch(link, fence, at, run, into)
    }

    fn holds(&mut self, link: u32) -> bool {
        self.inner.holds(link)
    }
}
