//! How long work takes in its stream.
//!
//! Behind an idle GPU's first mark an operation is still on its way from the host, so that what is timed is the
//! launch. Therefore work goes in front: matrix products that last while the host enqueues what is timed, and its
//! marks. A host device has inline streams and needs none.

use std::sync::Arc;

use forebay::Result;
use forebay::device::Stream;
use forebay::device::probe::{Mark, Probe};

/// Microseconds of work in front: the time in which the host enqueues some operations.
const AHEAD_US: f64 = 200.0;

/// The most rounds of work in front.
const ROUNDS_MAX: u32 = 1 << 20;

/// Bytes of the operation that does nothing, and how often it is timed.
const NOTHING: u64 = 16;
const LAUNCHES: u32 = 32;

/// A stream and two marks in it.
#[derive(Debug)]
pub struct Timer {
    device: Arc<dyn Probe>,
    stream: Stream,
    from: Mark,
    to: Mark,
    /// Rounds of work in front of what is timed.
    ahead: u32,
}

impl Timer {
    /// On a stream of its own. `quick` goes without work in front.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Arc<dyn Probe>, quick: bool) -> Result<Timer> {
        let stream = device.stream()?;
        let mut timer =
            Timer { device: Arc::clone(device), stream, from: device.mark()?, to: device.mark()?, ahead: 0 };
        if device.facts()?.gpu.is_none() || quick {
            return Ok(timer);
        }
        let mut rounds = 1;
        let products = |rounds| move |stream| device.compute(stream, rounds);
        timer.time(products(rounds))?;
        while timer.time(products(rounds))? < AHEAD_US && rounds < ROUNDS_MAX {
            rounds *= 2;
        }
        timer.ahead = rounds;
        Ok(timer)
    }

    /// The least microseconds of an operation that does nothing, timed as all figures are: on a GPU without its way
    /// from the host.
    ///
    /// # Errors
    /// Those of the device.
    pub fn launch_us(&self) -> Result<f64> {
        let room = self.device.allocate(2 * NOTHING)?;
        let (from, to) = (room.part(0, NOTHING)?, room.part(NOTHING, NOTHING)?);
        let mut least = f64::INFINITY;
        for _ in 0..LAUNCHES {
            least = least.min(self.time(|stream| self.device.carry(stream, from, to, 1))?);
        }
        // A clock that ticks coarsely may see no time go by.
        Ok(least.max(1e-3))
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Microseconds that the stream takes for what `work` enqueues; waits for it.
    ///
    /// # Errors
    /// Those of the device and of `work`.
    pub fn time(&self, work: impl FnOnce(Stream) -> Result<()>) -> Result<f64> {
        if self.ahead > 0 {
            self.device.compute(self.stream, self.ahead)?;
        }
        self.device.stamp(self.from, self.stream)?;
        work(self.stream)?;
        self.device.stamp(self.to, self.stream)?;
        self.device.elapsed_us(self.from, self.to)
    }
}
