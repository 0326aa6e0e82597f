//! Converts cudarc's streams, events and slices for forebay's calls, and forebay's memory for cudarc's calls.
//!
//! **What it is for.** An engine in Rust keeps its streams and its memory as cudarc's values. forebay takes a stream by
//! its handle and memory by its address, and so has `unsafe` calls whose caller must promise their lifetimes. A
//! [`Bridge`] keeps these promises: it opens forebay's device in the context of a [`CudaContext`], and keeps cudarc's
//! values alive for as long as the device may use them.
//!
//! **Costs.** A stream is borrowed once, memory is lent once, and a view is made once; a view makes three events.
//! [`Bridge::follow`] and [`Bridge::lead`] make three or four driver calls each. A step makes none of these calls.
//!
//! **Invariants.** The bridge rejects a stream or memory of a context other than its own. A borrowed stream is not
//! destroyed before the device has ended, which may be after the bridge: until then another thread may enqueue on it,
//! and no call reports when the last such thread has finished. Lent memory is not freed before its owner declares that
//! no operation uses it any more. The bridge makes no view of lent memory, because such a view could outlive it. cudarc
//! never frees memory of the device.
//!
//! **What it does not do.** It orders nothing: cudarc's own events do not cover what forebay enqueues, so an engine
//! orders by streams and by [`Bridge::follow`] and [`Bridge::lead`], as forebay's calls require. It gives no stream
//! back early. It makes no [`CudaStream`] of forebay's streams: cudarc's memory holds its stream, and would outlive the
//! device that destroys the stream. It names no CUDA version.

mod memory;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Event, Stream};
use forebay::{Error, Kind, Result};

pub use memory::{DeviceView, LentSlice, Plain};

/// forebay's CUDA device in a context that cudarc holds.
#[derive(Debug)]
pub struct Bridge {
    context: Arc<CudaContext>,
    device: Arc<CudaDevice>,
    /// The engine's borrowed streams. The device keeps this list too, until it ends.
    borrowed: Arc<Mutex<Vec<Arc<CudaStream>>>>,
    /// The stream that passes events on; it is forebay's own and lives as long as the device.
    relay: Stream,
}

/// Turns the driver's error, as cudarc returns it, into forebay's.
fn refused(operation: &'static str, error: DriverError) -> Error {
    Error::new(Kind::DeviceFailed, operation).at(format!("cudarc: {error:?}"))
}

impl Bridge {
    /// Opens the device of `context`. The context's device number replaces that of `options`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a context that is not its device's primary one, because forebay's kernels and memory
    /// are in the primary one; the errors of [`CudaDevice::new`].
    pub fn open(context: &Arc<CudaContext>, options: CudaOptions) -> Result<Bridge> {
        if !context.is_primary() {
            return Err(Error::new(Kind::InvalidConfig, "open bridge")
                .at("the context is not the device's primary one")
                .hint("make it by CudaContext::new"));
        }
        let device = CudaDevice::new(CudaOptions { device: context.ordinal() as u32, ..options })?;
        let borrowed: Arc<Mutex<Vec<Arc<CudaStream>>>> = Arc::default();
        device.keep(Arc::clone(&borrowed) as _);
        let relay = device.stream()?;
        Ok(Bridge { context: Arc::clone(context), device, borrowed, relay })
    }

    /// Returns forebay's device, for a cache. It may outlive the bridge.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Returns [`Kind::InvalidConfig`] for a context other than the bridge's.
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

    /// Returns forebay's name of an engine's stream, which is valid until the device ends. The device's end waits for
    /// the work enqueued on the stream; until then the stream is not destroyed, even if its owner drops it. Borrowing
    /// it again returns the same stream.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a stream of another context, and for the per-thread stream;
    /// [`Kind::DeviceFailed`].
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        self.check("borrow stream", "stream", stream.context())?;
        // SAFETY: a stream of cudarc's that its `Arc` keeps alive: the caller's `Arc` now, and from below on the one in
        // the list, which is dropped when the device has ended.
        let known = unsafe { self.device.borrow_stream(stream.cu_stream() as u64) }?;
        // A panic cannot leave the list half changed.
        let mut borrowed = self.borrowed.lock().unwrap_or_else(PoisonError::into_inner);
        if !borrowed.iter().any(|kept| kept.cu_stream() == stream.cu_stream()) {
            borrowed.push(Arc::clone(stream));
        }
        Ok(known)
    }

    /// Returns cudarc's view of a stream that forebay's device has a record of.
    fn known(&self, stream: Stream) -> Result<Arc<CudaStream>> {
        // This query fails for a stream that the device has no record of, and enqueues nothing.
        self.device.is_capturing(stream)?;
        // SAFETY: a stream of this context, as the query above has checked. It exists until the device has ended, and
        // the bridge holds the device: the stream is the device's own, or was borrowed above. No caller keeps the view.
        Ok(unsafe { self.context.wrap_borrowed_stream(stream.0 as _) })
    }

    /// Makes a stream that forebay has a record of wait for the last record of cudarc's event.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a stream that forebay has no record of, [`Kind::InvalidConfig`] for an event of another
    /// context; [`Kind::DeviceFailed`].
    pub fn wait(&self, stream: Stream, event: &CudaEvent) -> Result<()> {
        const OPERATION: &str = "wait for an event";
        self.check(OPERATION, "event", event.context())?;
        self.known(stream)?.wait(event).map_err(|error| refused(OPERATION, error))
    }

    /// Makes forebay's event complete after the last record of cudarc's event.
    ///
    /// One stream passes all events on, so forebay's event also completes after those that [`Bridge::follow`] and
    /// [`Bridge::lead`] passed on before. [`Bridge::wait`] makes a stream wait for cudarc's event alone. Do not pass on
    /// an event that was recorded in a capture: it would draw the bridge's stream into the capture, and the capture
    /// could not end.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an event of another device; the errors of [`Bridge::wait`].
    pub fn follow(&self, event: Event, behind: &CudaEvent) -> Result<()> {
        self.wait(self.relay, behind)?;
        self.device.record(event, self.relay)
    }

    /// Makes cudarc's event complete after the last record of forebay's event, with the same limits as
    /// [`Bridge::follow`].
    ///
    /// # Errors
    /// The errors of [`Bridge::follow`].
    pub fn lead(&self, event: Event, to: &CudaEvent) -> Result<()> {
        const OPERATION: &str = "record an event";
        self.check(OPERATION, "event", to.context())?;
        self.device.wait(self.relay, event)?;
        to.record(&*self.known(self.relay)?).map_err(|error| refused(OPERATION, error))
    }
}
