//! The CUDA device: an NVIDIA GPU through its driver, which is loaded at run time.
//!
//! The GPU's memory holds the tables of `residency`, and the kernels of `kernels/` decide by the same LRU rule. After
//! every step they hold what the host device's tables hold, word for word.
//!
//! **Alongside an engine.** The device shares the GPU's primary context with the engine's runtime. It works on the
//! engine's own streams, each registered once with [`CudaDevice::borrow_stream`]. Each call restores the thread's
//! current context before it returns. After construction no call waits for the device or allocates, except those
//! documented to do so: memory, graphs, [`Device::digest`], [`Device::validate`], and the calls for tests.
//!
//! **Order.** Streams and the caller's events order all work. The device has one event of its own, which keeps
//! warm-ups, lists of newest rows and resizes of different streams apart (`lanes`). Captured launches carry their
//! arguments by value.
//!
//! **Failure.** When the driver refuses a call, the call returns an error with the driver's name for the code, and
//! nothing is enqueued. Two things make the device fail for good, and every later query reports them: the driver
//! reports that the context is lost, to whichever call sees it first; or host work panicked. From that call on,
//! enqueueing does nothing and returns no error. If the context is lost, all events count as reached and all tickets
//! end, since the driver will run no more host functions. Work that was waiting to be called is dropped.
//!
//! **The end.** Dropping the device waits for the work on its own and on borrowed streams, then frees everything.

mod abi;
mod backings;
mod batch;
mod device;
#[cfg_attr(not(feature = "measure"), allow(dead_code, reason = "some of it only tools ask for"))]
mod driver;
mod errors;
mod graph;
mod hosted;
mod image;
mod lanes;
mod memory;
mod module;
mod options;
mod pages;
mod pools;
mod prefetch;
#[cfg(feature = "measure")]
mod probe;
mod registration;
mod stream;
mod structs;
#[cfg(test)]
mod tests;
#[cfg(feature = "measure")]
mod work;

use std::any::Any;
use std::os::fd::OwnedFd;

use crate::device::checks::Asker;
use crate::device::pages as page_ops;
use crate::device::{
    Backing, Completer, Device, DeviceId, Event, Graph, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice,
    Stream, checks,
};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer};
use crate::os::{Map, Protection};
use crate::sync::{Arc, AtomicU32, Mutex, thread};

use backings::Memory;
use driver::{Context, Current, Driver, DriverResult, Handle, Refusal, attribute, code, flag};
use errors::{NAME, bad};
use graph::{Capturing, Executable, Graphs, capturing};
use memory::{Allocation, Physical, Worker};
use module::Module;
use pages::Copies;
use pools::{CudaPools, Enqueueing, Launches};
use registration::{Registration, Stretch, pieces};
use stream::{Calls, Enqueued, Health, KnownStream, OwnEvent};
#[cfg(feature = "measure")]
use work::Work;

pub use options::{CudaOptions, HostMemory};
pub use pools::TableCopy;

/// The CUDA device. See the [module](self) page.
#[derive(Debug)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

/// Fields are freed in their order, after the streams were drained.
#[derive(Debug)]
struct Inner {
    id: DeviceId,
    launches: Launches,
    chunk: u64,
    host_memory: HostMemory,
    copy_engine_bytes: u64,
    /// Whether one driver call may enqueue several copies: 0 from when the driver has said that it does not do so.
    batch_copies: AtomicU32,
    grain: u64,
    health: Arc<Health>,
    graphs: Mutex<Graphs>,
    pools: Mutex<Vec<Arc<CudaPools>>>,
    memory: Mutex<Memory>,
    /// The stretches of the registrations; replaced whenever one is added.
    stretches: Mutex<Arc<Vec<Stretch>>>,
    events: Mutex<Vec<OwnEvent>>,
    streams: Mutex<Vec<KnownStream>>,
    /// The memory that only tools allocate.
    #[cfg(feature = "measure")]
    marks: Mutex<Vec<OwnEvent>>,
    #[cfg(feature = "measure")]
    work: Mutex<Option<Work>>,
    calls: Calls,
    module: Module,
    worker: Worker,
    context: Arc<Context>,
    /// Values of other owners that must outlive the device.
    kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

/// The highest clock of a multiprocessor in kHz, by which a prefetch keeps its rate; `None` on a device without L2. One
/// that does not tell its clock counts as faster than any is, so that the rate stays a bound.
fn prefetch_khz(context: &Context) -> DriverResult<Option<u32>> {
    const FASTEST_KHZ: i32 = 4_000_000;
    let (l2, khz) = (context.ask(attribute::L2_BYTES)?, context.ask(attribute::CLOCK_RATE)?);
    let khz = if khz > 0 { khz } else { FASTEST_KHZ };
    Ok((l2 > 0).then_some(khz.unsigned_abs()))
}

impl CudaDevice {
    /// The number of devices of the driver. Only the option `library` matters.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when there is no driver or no device, or the driver lacks a symbol; [`Kind::Unsupported`] if
    /// the driver is too old; [`Kind::DeviceFailed`]. Each error says what to do.
    pub fn count(options: &CudaOptions) -> Result<u32> {
        Driver::load(options)?.devices()
    }

    /// Loads the driver and the kernels, and retains the device's primary context. It allocates no memory yet.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when there is no driver or no device, or the driver lacks a symbol;
    /// [`Kind::InvalidConfig`] for an invalid option or device number; [`Kind::Unsupported`] if the driver is older
    /// than 12.0, the device lacks a required ability, or device or driver lack what an option needs;
    /// [`Kind::DeviceFailed`], [`Kind::OutOfMemory`]. Each error says what to do.
    pub fn new(options: CudaOptions) -> Result<Arc<CudaDevice>> {
        options.check()?;
        let driver = Driver::load(&options)?;
        options.check_driver(driver.version)?;
        let context = Arc::new(Context::retain(driver, options.device)?);
        if (options.programmatic || options.bulk) && !Module::is_new(&context) {
            return Err(Error::new(Kind::Unsupported, NAME)
                .at("programmatic launches or bulk copies on a device without kernels for 9.0 or later")
                .with("major", context.capability.0)
                .with("minor", context.capability.1)
                .hint("turn both off for this device"));
        }
        let failed = |refusal: Refusal| refusal.error(NAME);
        if options.host_memory == HostMemory::Driver {
            hosted::check(&context)?;
        }
        let grain = memory::granularity(&context, &memory::property(&context)).map_err(failed)?;
        let module = Module::load(&context, options.threads, options.bulk)?;
        let worker = Worker::new(&context).map_err(failed)?;
        let health = Arc::new(Health::default());
        let id = DeviceId::new();
        let inner = Inner {
            id,
            launches: Launches {
                threads: options.threads,
                gather_blocks: options.gather_blocks,
                programmatic: options.programmatic,
                bulk: options.bulk,
                prefetch_khz: prefetch_khz(&context).map_err(failed)?,
            },
            chunk: options.registration_chunk,
            host_memory: options.host_memory,
            copy_engine_bytes: options.copy_engine_bytes,
            batch_copies: AtomicU32::new(options.batch_copies.into()),
            grain,
            calls: Calls::new(&health),
            health,
            graphs: Mutex::new(Graphs::default()),
            pools: Mutex::new(Vec::new()),
            memory: Mutex::new(Memory::new(id, grain)),

            stretches: Mutex::new(Arc::default()),
            events: Mutex::new(Vec::new()),
            streams: Mutex::new(Vec::new()),
            #[cfg(feature = "measure")]
            marks: Mutex::new(Vec::new()),
            #[cfg(feature = "measure")]
            work: Mutex::new(None),
            module,
            worker,
            context,
            kept: Mutex::new(Vec::new()),
        };
        Ok(Arc::new(CudaDevice { inner: Arc::new(inner) }))
    }

    /// Registers an engine's stream by its `CUstream`. Both names of the legacy stream are one stream. The device
    /// neither synchronises nor destroys it.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a stream of another context, or the per-thread stream; [`Kind::DeviceFailed`].
    ///
    /// # Safety
    /// It is a stream of this process, and stays valid until [`CudaDevice::return_stream`] or until this device has
    /// been dropped. It is not being captured when the device is dropped.
    pub unsafe fn borrow_stream(&self, raw: u64) -> Result<Stream> {
        let inner = &*self.inner;
        let raw = if raw == flag::STREAM_LEGACY { 0 } else { raw };
        if inner.known(Stream(raw)).is_err() {
            let borrowed = inner.told(KnownStream::borrowed(&inner.context, raw))?;
            let mut streams = inner.streams.lock();
            if !streams.iter().any(|stream| stream.raw == raw) {
                streams.push(borrowed);
            }
        }
        Ok(Stream(raw))
    }

    /// Gives a borrowed stream back: waits for the work enqueued on it, and forgets it. Its owner may destroy it
    /// then. Work that runs on the stream must not call this, and no thread may enqueue on the stream meanwhile.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a stream that is not borrowed; [`Kind::InvalidState`] for one that is being captured;
    /// [`Kind::DeviceFailed`]. The stream stays registered then.
    pub fn return_stream(&self, stream: Stream) -> Result<()> {
        const OPERATION: &str = "return stream";
        let inner = &*self.inner;
        let find = |streams: &[KnownStream]| {
            let at = streams.iter().position(|known| known.raw == stream.0 && !known.own);
            at.ok_or_else(|| bad("borrowed stream", stream.0))
        };
        let found = find(&inner.streams.lock());
        found?;
        if inner.capture_of(OPERATION, stream.0)?.is_some() {
            return Err(Error::new(Kind::InvalidState, OPERATION)
                .at("the stream is being captured")
                .hint("end the capture first"));
        }
        let waited = inner.context.relaxed().and_then(|current| current.stream_synchronize(stream.0));
        // With a lost context, no work runs any more.
        inner.heard(OPERATION, waited)?;
        inner.graphs.lock().forget(stream.0);
        inner.pools.lock().iter().for_each(|pools| pools.turns.forget(stream.0));
        let mut streams = inner.streams.lock();
        let at = find(&streams)?;
        streams.swap_remove(at);
        Ok(())
    }

    /// Keeps a value until this device has ended and all enqueued work was waited for, such as the owner of a
    /// borrowed stream. A value that holds this device keeps it alive forever.
    pub fn keep(&self, value: Arc<dyn Any + Send + Sync>) {
        self.inner.kept.lock().push(value);
    }

    /// Whether a slice is in memory that this device keeps until it ends: memory allocated, mapped or registered
    /// here, but not imported memory.
    pub fn keeps(&self, slice: &Slice) -> bool {
        if self.inner.id.check(slice).is_err() {
            return false;
        }
        let within = |start: u64, bytes: u64| {
            let offset = slice.address().checked_sub(start);
            offset.and_then(|offset| bytes.checked_sub(offset)).is_some_and(|left| slice.bytes() <= left)
        };
        let memory = self.inner.memory.lock();
        let own = memory.holds(within);
        drop(memory);
        own || self.inner.stretches().iter().any(|stretch| within(stretch.start, stretch.bytes))
    }

    /// Reads bytes of device memory as they are now, and waits for the copy. For tests and tools.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a slice of another device or of another length; [`Kind::DeviceFailed`].
    pub fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        self.check_bytes(&slice, bytes.len())?;
        let (from, to) = (slice.address(), bytes.as_mut_ptr() as Handle);
        self.transfer("read device memory", from, to, slice.bytes())
    }

    /// Writes bytes of device memory now, and waits for the copy. For tests and tools.
    ///
    /// # Errors
    /// As [`CudaDevice::read`].
    pub fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        self.check_bytes(&slice, bytes.len())?;
        self.inner.id.check_target(&slice)?;
        let (from, to) = (bytes.as_ptr() as Handle, slice.address());
        self.transfer("write device memory", from, to, slice.bytes())
    }

    fn check_bytes(&self, slice: &Slice, bytes: usize) -> Result<()> {
        self.inner.id.check(slice)?;
        if slice.bytes() == bytes as u64 { Ok(()) } else { Err(bad("slice length", slice.bytes())) }
    }

    /// Copies between the caller's memory and the device's, chunk by chunk, and waits.
    fn transfer(&self, operation: &'static str, from: Handle, to: Handle, bytes: u64) -> Result<()> {
        pieces(&self.inner.stretches(), from, to, bytes, |at, count, _| {
            let copied = self.inner.worker.run(|c, stream| c.copy(to + at, from + at, count, stream));
            copied.map_err(|refusal| self.inner.refused(operation, refusal))
        })
    }

    /// Enqueues a write of a lane's digest ([`Device::digest`]) to `to` (8 bytes). For ranks that compare their
    /// digests without waiting.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`]; as any enqueueing.
    pub fn digest_into(&self, pools: Pools, stream: Stream, lane: Lane, to: Slice) -> Result<()> {
        let pools = self.inner.pool(pools)?;
        pools.extents.lane(lane)?;
        pools.extents.asker.words(&to, 2)?;
        if !to.address().is_multiple_of(8) {
            return Err(bad("address of a digest", to.address()));
        }
        self.inner.enqueue_pool("digest", stream, |e| pools.digest(e, lane, to.address()))
    }

    /// Copies a layer's tables as they are now, and waits for the copies. For tests and comparisons.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`], [`Kind::DeviceFailed`].
    pub fn tables(&self, pools: Pools, layer: Layer) -> Result<TableCopy> {
        self.inner.told(self.inner.pool(pools)?.tables(&self.inner.worker, layer.index()))
    }
}

impl Inner {
    /// The handle for number `index`; its upper half identifies this device.
    fn handle(&self, index: usize) -> u64 {
        u64::from(self.id.number()) << 32 | u64::from(index as u32)
    }

    /// The number in a handle of this device.
    fn index(&self, place: &'static str, handle: u64) -> Result<usize> {
        let own = handle >> 32 == u64::from(self.id.number());
        if own { Ok(handle as u32 as usize) } else { Err(bad(place, handle)) }
    }

    /// The present stretches of registered memory.
    fn stretches(&self) -> Arc<Vec<Stretch>> {
        Arc::clone(&self.stretches.lock())
    }

    /// Keeps a new stream.
    fn keep(&self, made: DriverResult<KnownStream>) -> Result<Stream> {
        let own = made.map_err(|refusal| self.refused("new stream", refusal))?;
        let stream = Stream(own.raw);
        self.streams.lock().push(own);
        Ok(stream)
    }

    /// A known stream's handle.
    fn known(&self, stream: Stream) -> Result<Handle> {
        let streams = self.streams.lock();
        let known = streams.iter().any(|known| known.raw == stream.0);
        if known { Ok(stream.0) } else { Err(bad("stream", stream.0)) }
    }

    /// A known event's handle.
    fn event(&self, event: Event) -> Result<Handle> {
        let index = self.index("event", event.0)?;
        let events = self.events.lock();
        events.get(index).map(|event| event.raw).ok_or_else(|| bad("event", event.0))
    }

    fn pool(&self, pools: Pools) -> Result<Arc<CudaPools>> {
        let all = self.pools.lock();
        let index = pools.of(self.id)?;
        all.get(index).map(Arc::clone).ok_or_else(|| bad("pools", index as u64))
    }

    /// Returns an error if the device has failed.
    fn check(&self) -> Result<()> {
        match self.health.failed() {
            None => Ok(()),
            Some(cause) => {
                Err(Error::new(Kind::DeviceFailed, NAME).at(cause.describe()).with("kind", cause as u32))
            }
        }
    }

    /// Handles a lost context: no enqueued work will complete any more.
    fn lose(&self) {
        self.health.fail(Kind::DeviceFailed);
        self.calls.fail(Kind::DeviceFailed);
    }

    /// The error for a refusal of the driver; notes a lost context.
    fn refused(&self, operation: &'static str, refusal: Refusal) -> Error {
        if code::is_sticky(refusal.code) {
            self.lose();
        }
        refusal.error(operation)
    }

    /// As [`Inner::refused`], for a refusal after which the call continues.
    fn noted(&self, operation: &'static str, answer: DriverResult) {
        if let Err(refusal) = answer {
            drop(self.refused(operation, refusal));
        }
    }

    /// As [`Inner::refused`], for a refusal that is already an error. No lock is held, since work may be dropped.
    fn told<T>(&self, answer: Result<T>) -> Result<T> {
        if answer.as_ref().is_err_and(code::is_lost) {
            self.lose();
        }
        answer
    }

    /// Discards released graphs that have ended.
    fn reap(&self) {
        let (slots, heard) = self.graphs.lock().reap();
        slots.iter().for_each(|slot| self.calls.clear(*slot));
        self.noted("release", heard);
    }

    /// Enqueues on a registered stream; does nothing on a failed device.
    fn enqueue(
        &self,
        operation: &'static str,
        stream: Stream,
        work: impl FnOnce(&Current<'_>, Handle) -> DriverResult,
    ) -> Result<()> {
        self.enqueue_known(operation, self.known(stream)?, work)
    }

    /// As above, on a stream that was already looked up.
    fn enqueue_known(
        &self,
        operation: &'static str,
        raw: Handle,
        work: impl FnOnce(&Current<'_>, Handle) -> DriverResult,
    ) -> Result<()> {
        if self.health.failed().is_some() {
            return Ok(());
        }
        self.heard(operation, self.context.enter().and_then(|current| work(&current, raw))).map(|_| ())
    }

    /// Handles the driver's result of an enqueue call; returns whether work was enqueued. A lost context counts as if
    /// the work had been enqueued and failed: the next query reports it, so that no call stops half-way.
    fn heard(&self, operation: &'static str, enqueued: DriverResult) -> Result<bool> {
        match enqueued {
            Ok(()) => Ok(true),
            Err(refusal) if code::is_sticky(refusal.code) => {
                self.lose();
                Ok(false)
            }
            Err(refusal) => Err(refusal.error(operation)),
        }
    }

    /// Enqueues kernels, whose arguments have been checked.
    fn enqueue_pool(
        &self,
        operation: &'static str,
        stream: Stream,
        work: impl FnOnce(&Enqueueing<'_>) -> DriverResult,
    ) -> Result<()> {
        self.enqueue(operation, stream, |current, stream| {
            work(&Enqueueing { current, module: &self.module, stream })
        })
    }

    /// The capture state of a stream on which a host function is to be enqueued.
    fn capture_of(&self, operation: &'static str, stream: Handle) -> Result<Option<u64>> {
        match self.context.enter().and_then(|current| capturing(&current, stream)) {
            Err(refusal) if code::is_sticky(refusal.code) => {
                self.lose();
                Ok(None)
            }
            Err(refusal) => Err(refusal.error(operation)),
            Ok(Capturing::No) => Ok(None),
            Ok(Capturing::Active(id)) => Ok(Some(id)),
            Ok(Capturing::Broken) => Err(Error::new(Kind::InvalidState, operation)
                .at("the stream's capture is broken")
                .hint("end the capture and begin a new one")),
        }
    }

    /// Enqueues a host function; returns whether it was enqueued. If the driver refuses, or the context is lost, the
    /// function's work is dropped.
    fn host_function(&self, operation: &'static str, raw: Handle, work: Enqueued) -> Result<bool> {
        let enter = self.context.enter();
        let enqueued = enter.and_then(|current| current.host_function(raw, work.function, work.data));
        let enqueued = self.heard(operation, enqueued);
        match enqueued {
            Ok(true) => {}
            Ok(false) => self.calls.fail_one(work.number, Kind::DeviceFailed),
            Err(_) => self.calls.clear(work.number),
        }
        enqueued
    }

    /// The driver's state of an event.
    fn synchronized(&self, answer: DriverResult) -> Result<bool> {
        match answer {
            Ok(()) => self.check().map(|()| true),
            Err(refusal) if refusal.code == code::NOT_READY => Ok(false),
            Err(refusal) if code::CAPTURE.contains(&refusal.code) => Err(refusal.error("query")),
            // The event's state is unknown, and the caller may query again.
            Err(refusal) if refusal.code == code::OUT_OF_MEMORY => Err(refusal.error("query")),
            // An event reports any earlier failure, whatever it was.
            Err(refusal) => {
                self.lose();
                Err(Error::new(Kind::DeviceFailed, "query").at(refusal.error("query").place().to_owned()))
            }
        }
    }

    /// Waits until none of the device's enqueued work runs any more; returns whether that is certain.
    fn drain(&self) -> bool {
        // This reports a lost context even if no stream is left.
        let sound = self.worker.run(|_, _| Ok(())).is_ok();
        let Ok(current) = self.context.relaxed() else { return false };
        let streams = self.streams.lock();
        // Wait for each stream, even after one failed.
        let refused = streams.iter().filter(|stream| current.stream_synchronize(stream.raw).is_err());
        refused.count() == 0 && sound
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.graphs.lock().abandon(&self.context);
        let drained = self.drain();
        self.calls.fail(Kind::Cancelled);
        self.calls.close(drained);
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Work that was the last owner of the device is dropped on a thread of the driver, which may not call the
        // driver.
        if self.inner.calls.is_running_here() {
            let inner = Arc::clone(&self.inner);
            let closing = thread::Builder::new().name("forebay-close".to_owned()).spawn(move || {
                while Arc::strong_count(&inner) > 1 {
                    thread::yield_now();
                }
            });
            if closing.is_err() {
                // Without a thread to close it on, the device is leaked.
                std::mem::forget(Arc::clone(&self.inner));
            }
        }
    }
}
