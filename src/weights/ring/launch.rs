//! Captured steps: what the ring knows after a capture, and the edges around a launch.

use super::{Buffer, Pull, Pulling, Ring, Wrap, wrong};
use crate::device::Stream;
use crate::error::{Kind, Result};

impl<P: Pull> Ring<P> {
    /// Brings the ring back to the border after a capture, in which nothing ran: the buffers hold what [`Ring::begin`]
    /// made them hold.
    pub(super) fn restore(&mut self) {
        for at in 0..self.buffers.len() {
            let first = self.first(at);
            if let Some(buffer) = self.buffers.get_mut(at)
                && buffer.holds.is_none_or(|holds| holds.captured)
            {
                // Begun, so it was pulled whole before.
                buffer.holds = first.map(|layer| Pulling {
                    layer,
                    enqueued: 0,
                    copies: 0,
                    arrived: true,
                    captured: false,
                });
            }
        }
    }

    /// Launches a graph that contains a step of this ring: `launch` enqueues it on `stream`. The launch is ordered
    /// after the pulls before it, and the pulls behind it after the launch.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open; those of [`Ring::begin`], before anything is launched; [`Kind::PeerLost`]
    /// with layer and rank for a graph that pulls from a rank that ended; the error of `launch`.
    pub fn launch(&mut self, stream: Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.open.is_some() {
            return Err(wrong(Kind::Busy, "a step is open").hint("end or abandon it before a launch"));
        }
        self.once.iter().chain(&self.drafts).try_for_each(|layer| self.alive(*layer))?;
        for at in 0..self.buffers.len() {
            self.settle(at)?;
            if let Some(Buffer { arrived, .. }) = self.buffers.get(at) {
                self.device.wait(stream, *arrived)?;
            }
        }
        let launched = launch();
        for at in 0..self.buffers.len() {
            let Some(Buffer { stream: own, paced, .. }) = self.buffers.get(at) else { continue };
            self.device.edge(*paced, stream, *own)?;
            let Some(first) = self.first(at) else { continue };
            if launched.is_err() {
                // A launch that was refused half-way may have changed what the buffer holds.
                self.forget(at);
                continue;
            }
            if self.options.wrap == Wrap::Behind && self.turns(at) {
                self.turn_to(at, first, false)?;
            } else if let Some(holds) = self.buffers.get_mut(at).and_then(|buffer| buffer.holds.as_mut()) {
                holds.arrived = false;
            }
            self.complete(at)?;
        }
        launched
    }

    /// Whether several layers use a buffer in turn.
    fn turns(&self, buffer: usize) -> bool {
        let mut layers = self.once.iter().chain(&self.drafts);
        layers.by_ref().filter(|layer| self.place(**layer) == Some(buffer)).nth(1).is_some()
    }
}
