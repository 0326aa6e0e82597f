//! Measures how long work takes in its stream.
//!
//! If a GPU is idle at the first mark, the next operation is still on its way from the host, and the launch would be
//! timed. So other work runs first: matrix products that last while the host enqueues the timed work and its marks. If
//! the host is late anyway, the products become longer for later measurements, because a rising clock shortens them. A
//! host device has inline streams and needs none.
//!
//! Before the products, a GPU's cache is filled with unused data. Between two resolves of a layer an engine reads all
//! its weights, so none of the layer's tables stays in the cache. Without this step the benchmark's own tables would,
//! particularly those of few sequences.

use std::cell::Cell;
use std::sync::Arc;

use forebay::Result;
use forebay::device::{Event, Slice, Stream};
use forebay::measure::{Mark, Probe};

/// Microseconds of preceding work: the time in which the host enqueues some operations.
const AHEAD_US: f64 = 400.0;

/// How often the preceding work is timed; the least time counts, since an idle GPU's clock is slow at first.
const TRIED: u32 = 8;

/// The factor by which the preceding work grows at most if the host is late.
const LONGER_MAX: u32 = 8;

/// Bytes that are read, and as many that are written, to empty a GPU's cache: together more than any cache.
const EVICTED: u64 = 80 << 20;

/// Thread blocks of that operation.
const EVICTING_BLOCKS: u32 = 256;

/// The most rounds of preceding work.
const ROUNDS_MAX: u32 = 1 << 15;

/// Bytes of the empty operation, and how often it is timed.
const NOTHING: u64 = 16;
const LAUNCHES: u32 = 32;

/// A stream and two marks in it.
#[derive(Debug)]
pub struct Timer {
    device: Arc<dyn Probe>,
    stream: Stream,
    from: Mark,
    to: Mark,
    /// Work before the timed one; none on a host.
    ahead: Option<Ahead>,
}

/// The preceding work.
#[derive(Debug)]
struct Ahead {
    /// Rounds of products: for the next measurement, and at most.
    rounds: Cell<u32>,
    most: u32,
    /// The mark after them.
    done: Event,
    /// Source and destination of the operation that empties the cache.
    from: Slice,
    to: Slice,
}

impl Timer {
    /// Creates a timer on its own stream. `quick` omits the preceding work.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Arc<dyn Probe>, quick: bool) -> Result<Timer> {
        let stream = device.stream()?;
        let mut timer = Timer {
            device: Arc::clone(device),
            stream,
            from: device.mark()?,
            to: device.mark()?,
            ahead: None,
        };
        if device.facts()?.gpu.is_none() || quick {
            return Ok(timer);
        }
        let mut rounds = 1;
        let least = |rounds| -> Result<f64> {
            let times = (0..TRIED).map(|_| timer.time(|stream| device.compute(stream, rounds)));
            times.collect::<Result<Vec<f64>>>().map(|times| times.into_iter().fold(f64::INFINITY, f64::min))
        };
        while least(rounds)? < AHEAD_US && rounds < ROUNDS_MAX {
            rounds *= 2;
        }
        let room = device.allocate(2 * EVICTED)?;
        timer.ahead = Some(Ahead {
            rounds: Cell::new(rounds),
            most: rounds * LONGER_MAX,
            done: device.event()?,
            from: room.part(0, EVICTED)?,
            to: room.part(EVICTED, EVICTED)?,
        });
        Ok(timer)
    }

    /// The least microseconds of an empty operation, timed like all figures: on a GPU without its way from the host.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn launch_us(&self) -> Result<f64> {
        let room = self.device.allocate(2 * NOTHING)?;
        let (from, to) = (room.part(0, NOTHING)?, room.part(NOTHING, NOTHING)?);
        let mut least = f64::INFINITY;
        for _ in 0..LAUNCHES {
            least = least.min(self.time(|stream| self.device.carry(stream, from, to, 1))?);
        }
        // A coarse clock may show no time at all.
        Ok(least.max(1e-3))
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Microseconds that the stream takes for the operations of `work`; waits for them.
    ///
    /// # Errors
    /// Errors of the device and of `work`.
    pub fn time(&self, work: impl FnOnce(Stream) -> Result<()>) -> Result<f64> {
        if let Some(ahead) = &self.ahead {
            self.device.carry(self.stream, ahead.from, ahead.to, EVICTING_BLOCKS)?;
            self.device.compute(self.stream, ahead.rounds.get())?;
            self.device.record(ahead.done, self.stream)?;
        }
        self.device.stamp(self.from, self.stream)?;
        work(self.stream)?;
        self.device.stamp(self.to, self.stream)?;
        if let Some(ahead) = &self.ahead
            && self.device.query(ahead.done)?
        {
            ahead.rounds.set((2 * ahead.rounds.get()).min(ahead.most));
        }
        self.device.elapsed_us(self.from, self.to)
    }

    /// Waits for everything enqueued on the stream.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn wait(&self) -> Result<()> {
        self.device.stamp(self.to, self.stream)?;
        self.device.elapsed_us(self.to, self.to).map(|_| ())
    }
}

#[cfg(test)]
#[cfg(feature = "cuda")]
#[path = "../../../tests/support/skip.rs"]
mod skip;

#[cfg(test)]
#[cfg(feature = "cuda")]
mod tests {
    use super::*;
    use crate::input::device::{DeviceName, ProbeOptions, Target};
    use forebay_standin::{Options, Standin};

    #[test]
    fn the_leading_work_grows_where_the_host_was_late() {
        let Some(driver) = Standin::new(Options::default()) else {
            return skip::skip("g++, which builds the stand-in driver");
        };
        let library = Some(driver.library().to_owned());
        let target = Target { name: DeviceName::Cuda(0), driver: library };
        let device = target.probe(ProbeOptions::of("bench")).unwrap();
        let timer = Timer::new(&device, false).unwrap();
        let rounds = || timer.ahead.as_ref().unwrap().rounds.get();
        let before = rounds();
        // The host waits for the end of all the work, so it is late.
        let late = |stream| {
            let event = device.event()?;
            device.record(event, stream)?;
            device.synchronize(event)
        };
        timer.time(late).unwrap();
        assert_eq!(rounds(), 2 * before);
        for _ in 0..4 {
            timer.time(late).unwrap();
        }
        assert_eq!(rounds(), LONGER_MAX * before, "so long, and no longer");
        assert!(Timer::new(&device, true).unwrap().ahead.is_none());
    }
}
