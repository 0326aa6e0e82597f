//! cudarc's streams, events and slices in calls of forebay, and forebay's memory in calls of cudarc.
//!
//! **What it is for.** An engine in Rust holds its streams and its memory as cudarc's values; forebay takes a stream by
//! its handle and memory by its address, and so asks for promises in `unsafe` calls. A [`Bridge`] makes these promises:
//! it opens forebay's device in the context of a [`CudaContext`], and what it hands out keeps cudarc's values alive for
//! as long as the device may use them.
//!
//! **Costs.** A stream is borrowed once, memory is lent once. [`Bridge::follow`] and [`Bridge::lead`] are three or four
//! calls of the driver. Nothing of it stands in a step.
//!
//! **Invariants.** A stream and memory are of the bridge's own context, or refused. A borrowed stream is not destroyed
//! before the device has given it back. Lent memory is not freed before its owner says that nothing names it any more.
//! Memory of the device is never freed by cudarc.
//!
//! **What it does not do.** It orders nothing: cudarc's own events know nothing of what forebay enqueues, so an engine
//! orders by streams and by [`Bridge::follow`] and [`Bridge::lead`], as forebay's calls say. It makes no [`CudaStream`]
//! of forebay's streams: cudarc's memory holds its stream, and would outlive the device that destroys it. It names no
//! CUDA version.

mod memory;
mod stream;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Event, Stream};
use forebay::{Error, Kind, Result};

pub use memory::{DeviceView, LentSlice, Plain};
pub use stream::BorrowedStream;

/// How many borrow each stream, by its handle.
type Borrowed = Mutex<HashMap<u64, usize>>;

/// forebay's CUDA device in a context of cudarc's.
#[derive(Debug)]
pub struct Bridge {
    context: Arc<CudaContext>,
    device: Arc<CudaDevice>,
    borrowed: Arc<Borrowed>,
    /// Where events are passed on; forebay's own stream, which lives as long as the device.
    relay: Stream,
    /// Recorded by nobody: to wait for it is to ask whether the stream is known.
    never: Event,
}

/// What the driver answered to cudarc.
fn refused(operation: &'static str, error: DriverError) -> Error {
    Error::new(Kind::DeviceFailed, operation).at(format!("cudarc: {error:?}"))
}

/// Nothing that is guarded is half-changed by a panic.
fn lock(borrowed: &Borrowed) -> MutexGuard<'_, HashMap<u64, usize>> {
    borrowed.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bridge {
    /// Opens the device of `context`, whose number goes before that of `options`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a context that is not its device's primary one, in which forebay's kernels and
    /// memory are; those of [`CudaDevice::new`].
    pub fn open(context: &Arc<CudaContext>, options: CudaOptions) -> Result<Bridge> {
        if !context.is_primary() {
            return Err(Error::new(Kind::InvalidConfig, "open bridge")
                .at("the context is not the device's primary one")
                .hint("make it by CudaContext::new"));
        }
        let device = CudaDevice::new(CudaOptions { device: context.ordinal() as u32, ..options })?;
        let (relay, never) = (device.stream()?, device.event()?);
        Ok(Bridge { context: Arc::clone(context), device, borrowed: Arc::default(), relay, never })
    }

    /// forebay's device, for a cache.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// [`Kind::InvalidConfig`] for another context than the bridge's.
    fn check(&self, operation: &'static str, what: &'static str, context: &Arc<CudaContext>) -> Result<()> {
        if *context == self.context {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidConfig, operation)
            .at(format!("the {what} is of another context"))
            .with("its device", context.ordinal() as u64)
            .with("the bridge's", self.context.ordinal() as u64)
            .hint("use a bridge of that context"))
    }

    /// A stream of the engine's in forebay's calls. Whoever borrows it again gets the same one.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a stream of another context, and for the per-thread stream;
    /// [`Kind::DeviceFailed`].
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<BorrowedStream> {
        self.check("borrow stream", "stream", stream.context())?;
        BorrowedStream::new(&self.device, &self.borrowed, stream)
    }

    /// Calls `work` with cudarc's view of a stream that forebay's device knows.
    fn with<T>(
        &self,
        stream: Stream,
        work: impl FnOnce(&CudaStream) -> std::result::Result<T, DriverError>,
    ) -> Result<T> {
        // Held, so that no borrowed stream is given back meanwhile.
        let _held = lock(&self.borrowed);
        self.device.wait(stream, self.never)?;
        // SAFETY: the device has just known it, so it is a stream of this context, and stays one: its own as long as
        // itself, which is held, a borrowed one until it is given back, which waits for the lock. The view ends here.
        let view = unsafe { self.context.wrap_borrowed_stream(stream.0 as _) };
        work(&view).map_err(|error| refused("pass an event on", error))
    }

    /// Makes a stream that forebay knows wait for cudarc's event, as it was recorded last.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a stream that forebay does not know, [`Kind::InvalidConfig`] for an event of another
    /// context; [`Kind::DeviceFailed`].
    pub fn wait(&self, stream: Stream, event: &CudaEvent) -> Result<()> {
        self.check("wait for an event", "event", event.context())?;
        self.with(stream, |stream| stream.wait(event))
    }

    /// Records forebay's event once cudarc's, as it was recorded last, has been reached.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an event of another device, and as [`Bridge::wait`].
    pub fn follow(&self, event: Event, behind: &CudaEvent) -> Result<()> {
        self.wait(self.relay, behind)?;
        self.device.record(event, self.relay)
    }

    /// Records cudarc's event once forebay's, as it was recorded last, has been reached.
    ///
    /// # Errors
    /// As [`Bridge::follow`].
    pub fn lead(&self, event: Event, to: &CudaEvent) -> Result<()> {
        self.check("record an event", "event", to.context())?;
        self.device.wait(self.relay, event)?;
        self.with(self.relay, |relay| to.record(relay))
    }
}
