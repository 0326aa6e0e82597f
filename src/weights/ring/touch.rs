//! Where a ring touches the next window: `ahead` has the edges.

use super::{Buffer, Open, Prefetch, Pull, Ring};
use crate::device::{Event, Stream};
use crate::error::Result;

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
        let Some(ahead) = self.ahead.as_mut().filter(|_| self.buffers.get(place).is_some_and(whole)) else {
            return Ok(());
        };
        let (stream, Prefetch { bytes, rate }) = (ahead.stream, ahead.what);
        let Some(window) = self.pulls.window(next)? else { return Ok(()) };
        let beginning = window.part(0, window.bytes().min(bytes))?;
        ahead.enters(captured);
        self.device.wait(stream, released)?;
        self.await_arrival(place, captured, stream)?;
        self.device.prefetch(stream, beginning, rate)?;
        let touched = self.ahead.as_mut().map(|ahead| ahead.touched(&*self.device, place, captured));
        touched.unwrap_or(Ok(()))
    }
}
