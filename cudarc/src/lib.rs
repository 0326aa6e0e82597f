//! cudarc's streams, events and slices in calls of forebay, and forebay's memory in calls of cudarc.
//!
//! **What it is for.** An engine in Rust holds its streams and its memory as cudarc's values; forebay takes a stream by
//! its handle and memory by its address, and so asks for promises in `unsafe` calls. A [`Bridge`] makes these promises:
//! it opens forebay's device in the context of a [`CudaContext`], and what it hands out keeps cudarc's values alive for
//! as long as the device may use them.
//!
//! **Costs.** A stream is borrowed once, memory is lent once, and a view is made once: it makes three events.
//! [`Bridge::follow`] and [`Bridge::lead`] are three or four calls of the driver. Nothing of it stands in a step.
//!
//! **Invariants.** A stream and memory are of the bridge's own context, or refused. A borrowed stream is not destroyed
//! before the device has ended, which may be after the bridge: until then another thread may enqueue on it, and nothing
//! tells when none does any more. Lent memory is not freed before its owner says that nothing names it any more, and no
//! view is made of it, which would outlive that. Memory of the device is never freed by cudarc.
//!
//! **What it does not do.** It orders nothing: cudarc's own events know nothing of what forebay enqueues, so an engine
//! orders by streams and by [`Bridge::follow`] and [`Bridge::lead`], as forebay's calls say. It gives no stream back
//! early. It makes no [`CudaStream`] of forebay's streams: cudarc's memory holds its stream, and would outlive the
//! device that destroys it. It names no CUDA version.

mod memory;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Event, Stream};
use forebay::{Error, Kind, Result};

pub use memory::{DeviceView, LentSlice, Plain};

/// forebay's CUDA device in a context of cudarc's.
#[derive(Debug)]
pub struct Bridge {
    context: Arc<CudaContext>,
    device: Arc<CudaDevice>,
    /// The device keeps it too, for as long as itself.
    borrowed: Arc<Mutex<Vec<Arc<CudaStream>>>>,
    /// Where events are passed on; forebay's own stream, which lives as long as the device.
    relay: Stream,
}

/// What the driver answered to cudarc.
fn refused(operation: &'static str, error: DriverError) -> Error {
    Error::new(Kind::DeviceFailed, operation).at(format!("cudarc: {error:?}"))
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
        let borrowed: Arc<Mutex<Vec<Arc<CudaStream>>>> = Arc::default();
        device.keep(Arc::clone(&borrowed) as _);
        let relay = device.stream()?;
        Ok(Bridge { context: Arc::clone(context), device, borrowed, relay })
    }

    /// forebay's device, for a cache. It may outlive the bridge.
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

    /// A stream of the engine's in forebay's calls, until the device ends, which waits for what was enqueued on it: so
    /// long it is not destroyed, whoever lets go of it. Whoever borrows it again gets the same one.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a stream of another context, and for the per-thread stream;
    /// [`Kind::DeviceFailed`].
    pub fn stream(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        self.check("borrow stream", "stream", stream.context())?;
        // SAFETY: a stream of cudarc's, which its `Arc` keeps: the caller's now, and from below on one that goes when
        // the device has ended.
        let known = unsafe { self.device.borrow_stream(stream.cu_stream() as u64) }?;
        // A panic leaves the list whole.
        let mut borrowed = self.borrowed.lock().unwrap_or_else(PoisonError::into_inner);
        if !borrowed.iter().any(|kept| kept.cu_stream() == stream.cu_stream()) {
            borrowed.push(Arc::clone(stream));
        }
        Ok(known)
    }

    /// cudarc's view of a stream that forebay's device knows.
    fn known(&self, stream: Stream) -> Result<Arc<CudaStream>> {
        // Asked because it is refused for a stream that the device does not know, and enqueues nothing.
        self.device.is_capturing(stream)?;
        // SAFETY: a stream of this context, as the device has just known it, and it is one until the device has ended,
        // which the bridge holds: the device's own, or one that was borrowed above. No caller keeps the view.
        Ok(unsafe { self.context.wrap_borrowed_stream(stream.0 as _) })
    }

    /// Makes a stream that forebay knows wait for cudarc's event, as it was recorded last.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a stream that forebay does not know, [`Kind::InvalidConfig`] for an event of another
    /// context; [`Kind::DeviceFailed`].
    pub fn wait(&self, stream: Stream, event: &CudaEvent) -> Result<()> {
        const OPERATION: &str = "wait for an event";
        self.check(OPERATION, "event", event.context())?;
        self.known(stream)?.wait(event).map_err(|error| refused(OPERATION, error))
    }

    /// Records forebay's event once cudarc's, as it was recorded last, has been reached.
    ///
    /// All events that are passed on go through one stream: this one is reached behind those that [`Bridge::follow`]
    /// and [`Bridge::lead`] passed on before as well. To make a stream wait for cudarc's event alone there is
    /// [`Bridge::wait`]. An event that was recorded in a capture is not to be passed on: it would draw that stream into
    /// the capture, which could not end then.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for an event of another device, and as [`Bridge::wait`].
    pub fn follow(&self, event: Event, behind: &CudaEvent) -> Result<()> {
        self.wait(self.relay, behind)?;
        self.device.record(event, self.relay)
    }

    /// Records cudarc's event once forebay's, as it was recorded last, has been reached; with the same bounds as
    /// [`Bridge::follow`].
    ///
    /// # Errors
    /// As [`Bridge::follow`].
    pub fn lead(&self, event: Event, to: &CudaEvent) -> Result<()> {
        const OPERATION: &str = "record an event";
        self.check(OPERATION, "event", to.context())?;
        self.device.wait(self.relay, event)?;
        to.record(&*self.known(self.relay)?).map_err(|error| refused(OPERATION, error))
    }
}
