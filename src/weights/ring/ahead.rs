//! The next layer's window, brought into L2 before its use ([`RingOptions::prefetch`](super::RingOptions)).
//!
//! When the last micro-batch has left a layer, the engine communicates, and the memory has time. On a stream of the
//! ring the beginning of the next use's window is touched then ([`Device::prefetch`]).
//!
//! **Edges.** Into it: the release with which the use ended, and the next layer's arrival, before which it would bring
//! bytes that no use reads. Out of it: the next pull that writes the buffer; the end of a capture, which it has to
//! join; and the host, before anything is mapped anew. No use waits for it: one that begins before its end reads the
//! rest from memory, as it would without.
//!
//! **What it does not do.** It touches nothing across the border, where the next step's first layer would be pushed out
//! again by what runs between; nothing if the next use is of the same layer; and nothing whose pull is not enqueued
//! whole when the layer is left, as with many [`parts`](super::RingOptions::parts): such a pull ends late.

use super::options::Prefetch;
use crate::device::{Device, Event, Stream};
use crate::error::Result;

/// See the [module](self) page.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) what: Prefetch,
    pub(super) stream: Stream,
    /// At its end, for the host and for the end of a capture.
    ended: Event,
    /// Whether its stream is part of the capture.
    captured: bool,
    /// By buffer: outside of captures, and inside.
    touched: Vec<(Touched, Touched)>,
}

/// The end of the last prefetch of a buffer's windows.
#[derive(Clone, Copy, Debug)]
struct Touched {
    end: Event,
    /// Whether there was one.
    any: bool,
}

impl Ahead {
    pub(super) fn new(device: &dyn Device, what: Prefetch, buffers: usize) -> Result<Ahead> {
        let touched = || Ok(Touched { end: device.event()?, any: false });
        Ok(Ahead {
            what,
            stream: device.stream()?,
            ended: device.event()?,
            captured: false,
            touched: (0..buffers).map(|_| Ok((touched()?, touched()?))).collect::<Result<_>>()?,
        })
    }

    /// Notes that what is enqueued from here on may be in a capture.
    pub(super) fn enters(&mut self, captured: bool) {
        self.captured |= captured;
    }

    /// Records the end of a prefetch of a buffer's window.
    pub(super) fn touched(&mut self, device: &dyn Device, buffer: usize, captured: bool) -> Result<()> {
        let Some((outside, inside)) = self.touched.get_mut(buffer) else { return Ok(()) };
        let touched = if captured { inside } else { outside };
        touched.any = true;
        device.record(touched.end, self.stream)
    }

    /// Orders `stream` behind the prefetches of a buffer's windows, of the capture or outside of it.
    pub(super) fn before(
        &self,
        device: &dyn Device,
        buffer: usize,
        captured: bool,
        stream: Stream,
    ) -> Result<()> {
        let Some((outside, inside)) = self.touched.get(buffer) else { return Ok(()) };
        let touched = if captured { inside } else { outside };
        if touched.any { device.wait(stream, touched.end) } else { Ok(()) }
    }

    /// Waits until all have run that were enqueued.
    pub(super) fn drain(&self, device: &dyn Device) -> Result<()> {
        device.record(self.ended, self.stream)?;
        device.synchronize(self.ended)
    }

    /// Joins the stream to that on which a capture ends.
    pub(super) fn join(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        match self.captured {
            true => device.edge(self.ended, self.stream, stream),
            false => Ok(()),
        }
    }

    /// Forgets what was enqueued in a capture: nothing of it has run.
    pub(super) fn restore(&mut self) {
        self.captured = false;
        self.touched.iter_mut().for_each(|(_, inside)| inside.any = false);
    }
}
