//! Memory that is brought into the device's L2 beside a layer's work, for an engine that orders its layers itself.

use crate::cache::Cache;
use crate::device::{Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::Layer;
use crate::step::Step;

impl Cache {
    /// Brings `ranges` into the device's L2 ([`Device::prefetch`](crate::device::Device::prefetch)), all at `rate`
    /// bytes per second, one after another on `stream`, behind what `behind` has now. It goes with [`Cache::layer`]:
    /// call it where the engine has enqueued the layer's attention and begins to communicate, with what the next layer
    /// reads first, such as its index keys ([`Cache::index_keys`]), or pages of a dense layer. `stream` is none of the
    /// layer's own, and the same one in the whole step. No layer waits for it; the step's end does
    /// ([`Cache::finish`]), so that no page is given to another sequence meanwhile. In a capture of its own the engine
    /// joins `stream` before the capture ends.
    ///
    /// # Errors
    /// Those of [`Device::prefetch`](crate::device::Device::prefetch); ranges before the refused one are enqueued.
    /// [`Kind::InvalidConfig`] for another stream than the step's prefetches had before; [`Kind::OutOfRange`] for
    /// another cache's step; [`Kind::InvalidState`] for a finished step.
    pub fn prefetch(
        &mut self,
        step: &Step,
        ranges: &[Slice],
        rate: u64,
        behind: Stream,
        stream: Stream,
    ) -> Result<()> {
        self.check_step(step, Layer(0))?;
        if let Some(other) = self.ring.slot(step)?.prefetches.filter(|other| *other != stream) {
            return Err(Error::new(Kind::InvalidConfig, "prefetch")
                .at("two streams for the prefetches of one step")
                .with("stream", stream.0)
                .with("the step's", other.0));
        }
        let schedule = &self.schedules[step.micro_batch.index()];
        schedule.by_hand(&*self.device, behind, stream)?;
        self.ring.prefetch_on(step, stream);
        ranges.iter().try_for_each(|range| self.device.prefetch(stream, *range, rate))
    }
}
