//! The next layer's window, brought into L2 before its use ([`RingOptions::prefetch`](super::RingOptions)).
//!
//! When the last micro-batch has left a layer, the engine communicates, and the memory has time. On a stream of the
//! ring the beginning of the next use's window is touched then ([`Device::prefetch`]).
//!
//! **Edges.** Into it: the release with which the use ended, and the next layer's arrival, before which it would bring
//! bytes that nobody reads. Out of it: the next pull that writes the buffer; the end of a capture, which it has to join;
//! and the host, before anything is mapped anew. No use waits for it: one that begins before its end reads the rest from
//! memory, as it would without.
//!
//! **What it does not do.** It touches nothing across the border, where the next step's first layer would be pushed out
//! again by what runs between; nothing if the next use is of the same layer; and nothing whose pull is not enqueued
//! whole when the layer is left, as with many [`parts`](super::RingOptions::parts): such a pull ends late.

use super::{Buffer, Open, Prefetch, Pull, Ring};
use crate::device::{Device, Event, Stream};
use crate::error::Result;

/// See the [module](self) page.
#[derive(Debug)]
pub(super) struct Ahead {
    what: Prefetch,
    stream: Stream,
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

impl<P: Pull> Ring<P> {
    /// The stream on which windows are touched, if they are: for an engine that times its own work against it, or
    /// orders another use of the windows behind it.
    pub fn prefetch_stream(&self) -> Option<Stream> {
        self.ahead.as_ref().map(|ahead| ahead.stream)
    }

    /// Touches the window of the use behind use `at`, which the release of a buffer has ended.
    pub(super) fn touch_next(&mut self, at: usize, released: Event, open: Open) -> Result<()> {
        let next = if at + 1 < open.uses { self.used(at + 1) } else { None };
        let Some(next) = next.filter(|next| self.used(at) != Some(*next)) else { return Ok(()) };
        let Some(place) = self.place(next) else { return Ok(()) };
        let captured = open.captured.unwrap_or(false);
        let whole = |buffer: &Buffer| buffer.holds.is_some_and(|holds| holds.layer == next && holds.arrived);
        let Some(ahead) = self.ahead.as_ref().filter(|_| self.buffers.get(place).is_some_and(whole)) else {
            return Ok(());
        };
        let (stream, Prefetch { bytes, rate }) = (ahead.stream, ahead.what);
        let Some(window) = self.pulls.window(next)? else { return Ok(()) };
        let beginning = window.part(0, window.bytes().min(bytes))?;
        if let Some(ahead) = &mut self.ahead {
            ahead.captured |= captured;
        }
        self.device.wait(stream, released)?;
        self.await_arrival(place, captured, stream)?;
        self.device.prefetch(stream, beginning, rate)?;
        let Some((outside, inside)) = self.ahead.as_mut().and_then(|ahead| ahead.touched.get_mut(place))
        else {
            return Ok(());
        };
        let touched = if captured { inside } else { outside };
        touched.any = true;
        self.device.record(touched.end, stream)
    }
}
