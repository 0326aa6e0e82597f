//! Captured steps: what the ring knows after a capture, and the edges around a launch.

use super::ahead::Ahead;
use super::{Buffer, Pull, Pulling, Ring, Wrap};
use crate::device::Stream;
use crate::error::{Kind, Result};

impl<P: Pull> Ring<P> {
    /// Brings the ring back to the border after a capture, in which nothing ran: the buffers hold what [`Ring::begin`]
    /// made them hold.
    pub(super) fn restore(&mut self) {
        self.ahead.iter_mut().for_each(Ahead::restore);
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
    /// with layer and rank while a layer that is not resident is pulled from a rank that ended; the error of `launch`;
    /// [`Kind::Closed`] where it returns in a forked child, which has no device: nothing more is enqueued there. Those
    /// of [`Ring::begin`] also behind a launch, which then runs.
    pub fn launch(&mut self, stream: Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.open.is_some() {
            return Err(self.wrong(Kind::Busy, "a step is open").hint("end or abandon it before a launch"));
        }
        self.once.iter().chain(&self.drafts).try_for_each(|layer| self.alive(*layer))?;
        self.usable(true)?;
        for at in 0..self.buffers.len() {
            self.settle(at)?;
            if let Some(Buffer { arrived, .. }) = self.buffers.get(at) {
                self.device.wait(stream, *arrived)?;
            }
            self.ahead.as_ref().map_or(Ok(()), |ahead| ahead.before(&*self.device, at, false, stream))?;
        }
        let process = std::process::id();
        let mut result = launch();
        if std::process::id() != process {
            return result.and(Err(self.wrong(Kind::Closed, "the launch returned in a forked child")));
        }
        // A launch that was refused half-way may have changed what the buffers hold, except one that never changes.
        let pulled = result.is_ok() && self.options.wrap == Wrap::Joined;
        for at in 0..self.buffers.len() {
            if self.turns(at) && !pulled {
                self.forget(at);
            }
        }
        let again = result.is_ok() && !pulled;
        for at in 0..self.buffers.len() {
            result = result.and(self.behind(at, stream, again));
        }
        result
    }

    /// Orders a buffer's stream after a launch, and notes its arrival anew. `again`: what the graph did not pull is
    /// pulled.
    fn behind(&mut self, at: usize, stream: Stream, again: bool) -> Result<()> {
        let Some(Buffer { stream: own, paced, holds, .. }) = self.buffers.get_mut(at) else { return Ok(()) };
        if let Err(error) = self.device.edge(*paced, stream, *own) {
            *holds = None;
            return Err(error);
        }
        match holds {
            Some(holds) => holds.arrived = false,
            None if again => return self.settle(at),
            None => return Ok(()),
        }
        self.complete(at)
    }

    /// Whether several layers use a buffer in turn.
    fn turns(&self, buffer: usize) -> bool {
        let mut layers = self.once.iter().chain(&self.drafts);
        layers.by_ref().filter(|layer| self.place(**layer) == Some(buffer)).nth(1).is_some()
    }
}
