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
//! warm-ups of different streams apart (`pools`). Captured launches carry their arguments by value.
//!
//! **Failure.** When the driver refuses a call, the call returns an error with the driver's name for the code, and
//! nothing is enqueued. Two things make the device fail for good, and every later query reports them: the driver
//! reports that the context is lost, to whichever call sees it first; or host work panicked. From that call on,
//! enqueueing does nothing and returns no error. If the context is lost, all events count as reached and all tickets
//! end, since the driver will run no more host functions. Work that was waiting to be called is dropped.
//!
//! **The end.** Dropping the device waits for the work on its own and on borrowed streams, then frees everything.

mod abi;
mod device;
#[cfg_attr(not(feature = "measure"), allow(dead_code, reason = "some of it only tools ask for"))]
mod driver;
mod graph;
mod hosted;
mod image;
mod memory;
mod module;
mod pools;
#[cfg(feature = "measure")]
mod probe;
mod registration;
mod stream;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::os::fd::OwnedFd;

use crate::device::rates::GATHER_BLOCKS;
use crate::device::{
    Backing, Completer, Device, DeviceId, Event, Graph, Mapped, PoolLayout, PoolOp, Pools, Slice, Stream,
};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Layer};
use crate::os::{Faults, Map, NoFaults};
use crate::sync::{Arc, Mutex, thread};

use driver::{Answer as Driven, Context, Current, Driver, Handle, Refusal, code, flag};
use graph::{Capturing, Executable, Graphs, capturing};
use memory::{Allocation, Physical, Range, Worker};
use module::Module;
use pools::{CudaPools, Enqueueing, Launches};
#[cfg(feature = "measure")]
use probe::Work;
use registration::{Registration, Stretch, pieces};
use stream::{Calls, Enqueued, Health, KnownStream, OwnEvent};

pub use pools::TableCopy;

/// The operation that errors of this device name.
const NAME: &str = "CUDA device";

/// The oldest driver whose captured graphs keep the edges of early launches.
const EARLY_LAUNCH_DRIVER: i32 = 12_030;

/// Threads of a block that kernels are compiled for at most.
const THREADS_MAX: u32 = 512;

/// Whose memory the rows of a cache stand in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostMemory {
    /// The system's, registered with the driver. The GPU reaches it in pages of 4 KiB.
    #[default]
    Registered,
    /// The driver's own, made on a NUMA node of the host, which the GPU reaches in pages of 2 MiB: its page tables take
    /// next to nothing of the GPU. With a driver of CUDA 12.2 or newer. Other processes, and other devices of this one,
    /// cannot have it. Which of the two is faster at a pool's real size has not been measured.
    Driver,
}

/// Which device, and how it is used.
#[derive(Clone)]
pub struct CudaOptions {
    /// The device's number, as the driver counts them, from 0.
    pub device: u32,
    /// The driver's library, by path or name; none for `libcuda.so.1`.
    pub library: Option<String>,
    /// Whether the library is unloaded with the last device that uses it: for tests, which load many. What a
    /// driver has started may still run.
    pub unload: bool,
    /// Faults for tests of what a system may lack.
    pub faults: Arc<dyn Faults>,
    /// Host memory is registered in pieces of at most so many bytes, rounded down to pages: drivers refuse very
    /// large ones.
    pub registration_chunk: u64,
    /// Whose memory the rows of a cache stand in.
    pub host_memory: HostMemory,
    /// Thread blocks of a gather: a bound on the multiprocessors that it takes from what runs beside it;
    /// [`GATHER_BLOCKS`] by default.
    pub gather_blocks: u32,
    /// Threads of a block: a multiple of 32 up to 512.
    pub threads: u32,
    /// Kernels are launched before those in front of them have ended, and wait for them on the device: 9.0 and
    /// later, with a driver of CUDA 12.3 or newer, as captured graphs keep such an edge only from there on. It acts
    /// where one of our kernels follows another on the same stream: in the order `none`. In DA and DBA an event
    /// stands between resolve and gather, and an event's edge begins nothing early.
    pub programmatic: bool,
    /// Gathers by bulk copies: 9.0 and later.
    pub bulk: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions {
            device: 0,
            library: None,
            unload: false,
            faults: Arc::new(NoFaults),
            registration_chunk: 64 << 30,
            host_memory: HostMemory::default(),
            gather_blocks: GATHER_BLOCKS,
            threads: THREADS_MAX,
            programmatic: false,
            bulk: false,
        }
    }
}

impl std::fmt::Debug for CudaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("device", &self.device)
            .field("library", &self.library)
            .field("unload", &self.unload)
            .field("registration_chunk", &self.registration_chunk)
            .field("host_memory", &self.host_memory)
            .field("gather_blocks", &self.gather_blocks)
            .field("threads", &self.threads)
            .field("programmatic", &self.programmatic)
            .field("bulk", &self.bulk)
            .finish_non_exhaustive()
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

/// Fields are given back in their order, behind the drained streams.
#[derive(Debug)]
struct Inner {
    id: DeviceId,
    launches: Launches,
    chunk: u64,
    host_memory: HostMemory,
    grain: u64,
    health: Arc<Health>,
    graphs: Mutex<Graphs>,
    pools: Mutex<Vec<Arc<CudaPools>>>,
    memory: Mutex<Memory>,
    /// Of the registrations in it: replaced by each that is added.
    stretches: Mutex<Arc<Vec<Stretch>>>,
    events: Mutex<Vec<OwnEvent>>,
    streams: Mutex<Vec<KnownStream>>,
    /// What only tools take.
    #[cfg(feature = "measure")]
    marks: Mutex<Vec<OwnEvent>>,
    #[cfg(feature = "measure")]
    work: Mutex<Option<Work>>,
    calls: Calls,
    module: Module,
    worker: Worker,
    context: Arc<Context>,
    /// What is not this device's and has to outlive it.
    kept: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

/// Everything that stays taken while the device lives.
#[derive(Debug, Default)]
struct Memory {
    registered: Vec<Registration>,
    /// Host memory that was made here.
    hosted: Vec<Arc<Map>>,
    ranges: Vec<Range>,
    backings: Vec<Physical>,
    allocations: Vec<Allocation>,
}

fn bad(place: &'static str, value: impl Into<u64>) -> Error {
    Error::new(Kind::OutOfRange, NAME).at(place).with("value", value)
}

impl CudaDevice {
    /// How many devices the driver has. Of the options only the library matters.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when the driver, a part of it or any device is missing or the driver is too old;
    /// [`Kind::DeviceFailed`]. Each says what to do.
    pub fn count(options: &CudaOptions) -> Result<u32> {
        Driver::load(options)?.devices()
    }

    /// Loads the driver and the kernels, and retains the device's primary context. No memory is taken yet.
    ///
    /// # Errors
    /// [`Kind::OsRefused`] when the driver, a part of it or any device is missing or the driver is too old, also for
    /// an option; [`Kind::InvalidConfig`] for an option that makes no sense, or a device that is not there or will not
    /// do; [`Kind::DeviceFailed`], [`Kind::OutOfMemory`]. Each says what to do.
    pub fn new(options: CudaOptions) -> Result<Arc<CudaDevice>> {
        check_options(&options)?;
        let driver = Driver::load(&options)?;
        check_driver(&options, driver.version)?;
        let context = Arc::new(Context::retain(driver, options.device)?);
        if (options.programmatic || options.bulk) && !Module::is_new(&context) {
            return Err(Error::new(Kind::Unsupported, NAME)
                .at("programmatic launches or bulk copies without kernels of this device's own, 9.0 or later")
                .with("major", context.capability.0)
                .with("minor", context.capability.1)
                .hint("do without them on this device"));
        }
        let failed = |refusal: Refusal| refusal.error(NAME);
        if options.host_memory == HostMemory::Driver {
            hosted::check(&context)?;
        }
        let grain = memory::granularity(&context, &memory::property(&context)).map_err(failed)?;
        let module = Module::load(&context, options.threads, options.bulk)?;
        let worker = Worker::new(&context).map_err(failed)?;
        let health = Arc::new(Health::default());
        let inner = Inner {
            id: DeviceId::new(),
            launches: Launches {
                threads: options.threads,
                gather_blocks: options.gather_blocks,
                programmatic: options.programmatic,
                bulk: options.bulk,
            },
            chunk: options.registration_chunk,
            host_memory: options.host_memory,
            grain,
            calls: Calls::new(&health),
            health,
            graphs: Mutex::new(Graphs::default()),
            pools: Mutex::new(Vec::new()),
            memory: Mutex::new(Memory::default()),
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

    /// Makes an engine's stream known, by the value of its `CUstream`; both names of the legacy stream are one. It is
    /// not synchronised and not destroyed.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a stream of another context, or the per-thread stream; [`Kind::DeviceFailed`].
    ///
    /// # Safety
    /// It is a stream of this process, and stays one until [`CudaDevice::return_stream`] or until this device has
    /// been dropped; then it is not being captured.
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

    /// Gives a borrowed stream back: waits for what was enqueued on it, and knows it no more. Its owner may destroy it
    /// then. Not to be called by work that runs on it, nor while others enqueue on it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a stream that is not borrowed, [`Kind::InvalidConfig`] for one that is being captured;
    /// [`Kind::DeviceFailed`]. It is still known then.
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
        // On a lost context nothing runs any more.
        inner.heard(OPERATION, waited)?;
        inner.graphs.lock().forget(stream.0);
        let mut streams = inner.streams.lock();
        let at = find(&streams)?;
        streams.swap_remove(at);
        Ok(())
    }

    /// Keeps a value until this device has ended, behind the wait for all that was enqueued: the owner of a borrowed
    /// stream, say. A value that holds this device keeps it for ever.
    pub fn keep(&self, value: Arc<dyn Any + Send + Sync>) {
        self.inner.kept.lock().push(value);
    }

    /// Whether a slice is of memory that this device keeps until it ends: what was allocated, mapped or registered
    /// here, and not what was imported.
    pub fn keeps(&self, slice: &Slice) -> bool {
        if self.inner.id.check(slice).is_err() {
            return false;
        }
        let within = |start: u64, bytes: u64| {
            let offset = slice.address().checked_sub(start);
            offset.and_then(|offset| bytes.checked_sub(offset)).is_some_and(|left| slice.bytes() <= left)
        };
        let memory = self.inner.memory.lock();
        let own = memory.allocations.iter().any(|taken| within(taken.address, taken.bytes))
            || memory.ranges.iter().any(|range| within(range.address, range.bytes));
        drop(memory);
        own || self.inner.stretches().iter().any(|stretch| within(stretch.start, stretch.bytes))
    }

    /// A descriptor of physical memory, for [`CudaDevice::import_backing`] on another device or in another process.
    /// It keeps the memory: close it once it has been imported.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a backing that is not there, [`Kind::InvalidConfig`] on a device whose memory has no
    /// descriptors; [`Kind::DeviceFailed`].
    pub fn export(&self, backing: Backing) -> Result<OwnedFd> {
        let memory = self.inner.memory.lock();
        let index = backing.of(self.inner.id)?;
        let physical = memory.backings.get(index);
        let exported = physical.ok_or_else(|| bad("backing", index as u64)).and_then(Physical::export);
        drop(memory);
        self.inner.told(exported)
    }

    /// The physical memory behind a descriptor, of which there are `bytes` bytes.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for bytes that are no multiple of [`Device::granularity`]; [`Kind::DeviceFailed`] for
    /// what is no such descriptor.
    pub fn import_backing(&self, descriptor: &OwnedFd, bytes: u64) -> Result<Backing> {
        let inner = &*self.inner;
        let physical = inner.told(Physical::import(&inner.context, descriptor, bytes, inner.grain))?;
        let mut memory = inner.memory.lock();
        memory.backings.push(physical);
        Ok(inner.id.backing(memory.backings.len() - 1))
    }

    /// Reads bytes as the device sees them, as they are now, and waits for the copy. For tests and tools.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a slice of another device or of another length; [`Kind::DeviceFailed`].
    pub fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        self.check_bytes(&slice, bytes.len())?;
        let (from, to) = (slice.address(), bytes.as_mut_ptr() as Handle);
        self.transfer("read device memory", from, to, slice.bytes())
    }

    /// Writes bytes as the device sees them, now, and waits for the copy. For tests and tools.
    ///
    /// # Errors
    /// As [`CudaDevice::read`].
    pub fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        self.check_bytes(&slice, bytes.len())?;
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

    /// Writes the digest of a lane, as [`Device::digest`] answers it, to `to` (8 bytes) in the stream's order. For
    /// ranks that compare themselves without waiting.
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

    /// The words of a layer's tables, as they are now; waits for the copies. For tests and comparisons.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`], [`Kind::DeviceFailed`].
    pub fn tables(&self, pools: Pools, layer: Layer) -> Result<TableCopy> {
        self.inner.told(self.inner.pool(pools)?.tables(&self.inner.worker, layer.index()))
    }
}

fn check_options(options: &CudaOptions) -> Result<()> {
    let wrong = |place, value: u64, hint| {
        Err(Error::new(Kind::InvalidConfig, NAME).at(place).with("value", value).hint(hint))
    };
    let threads = options.threads;
    if threads == 0 || threads > THREADS_MAX || !threads.is_multiple_of(u32::BITS) {
        return wrong("threads", threads.into(), "pass a multiple of 32 up to 512");
    }
    if options.gather_blocks == 0 {
        return wrong("gather_blocks", 0, "pass at least 1");
    }
    if options.registration_chunk == 0 {
        return wrong("registration_chunk", 0, "pass at least a page");
    }
    Ok(())
}

/// What of the options needs a newer driver than the device does.
fn check_driver(options: &CudaOptions, version: i32) -> Result<()> {
    if options.programmatic && version < EARLY_LAUNCH_DRIVER {
        return Err(Error::new(Kind::Unsupported, NAME)
            .at("the driver is too old for early launches (programmatic)")
            .with("found", version.unsigned_abs())
            .with("wanted", EARLY_LAUNCH_DRIVER.unsigned_abs())
            .hint("install NVIDIA's driver of release 545 or newer, or do without early launches"));
    }
    Ok(())
}

impl Inner {
    /// What is handed out for number `index`: of this device alone, as the upper half tells.
    fn handle(&self, index: usize) -> u64 {
        u64::from(self.id.number()) << 32 | u64::from(index as u32)
    }

    /// The number in a handle of this device.
    fn index(&self, place: &'static str, handle: u64) -> Result<usize> {
        let own = handle >> 32 == u64::from(self.id.number());
        if own { Ok(handle as u32 as usize) } else { Err(bad(place, handle)) }
    }

    /// Where registered memory is, as of now.
    fn stretches(&self) -> Arc<Vec<Stretch>> {
        Arc::clone(&self.stretches.lock())
    }

    /// Keeps a stream that was made.
    fn keep(&self, made: Driven<KnownStream>) -> Result<Stream> {
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

    /// The device has failed: says so.
    fn check(&self) -> Result<()> {
        match self.health.failed() {
            None => Ok(()),
            Some(cause) => {
                Err(Error::new(Kind::DeviceFailed, NAME).at(cause.describe()).with("kind", cause as u32))
            }
        }
    }

    /// The context is lost: nothing that was enqueued will be heard of again.
    fn lose(&self) {
        self.health.fail(Kind::DeviceFailed);
        self.calls.fail(Kind::DeviceFailed);
    }

    /// What the driver refused, as an error.
    fn refused(&self, operation: &'static str, refusal: Refusal) -> Error {
        if code::is_sticky(refusal.code) {
            self.lose();
        }
        refusal.error(operation)
    }

    /// As [`Inner::refused`], of what goes on all the same.
    fn noted(&self, operation: &'static str, answer: Driven) {
        if let Err(refusal) = answer {
            drop(self.refused(operation, refusal));
        }
    }

    /// As [`Inner::refused`], of what has already been made an error. No lock is held: work may be dropped.
    fn told<T>(&self, answer: Result<T>) -> Result<T> {
        if answer.as_ref().is_err_and(code::is_lost) {
            self.lose();
        }
        answer
    }

    /// Discards the graphs that were released and have ended.
    fn reap(&self) {
        let (slots, heard) = self.graphs.lock().reap();
        slots.iter().for_each(|slot| self.calls.clear(*slot));
        self.noted("release", heard);
    }

    /// Enqueues on a known stream; on a device that has failed there is nothing to do.
    fn enqueue(
        &self,
        operation: &'static str,
        stream: Stream,
        work: impl FnOnce(&Current<'_>, Handle) -> Driven,
    ) -> Result<()> {
        self.enqueue_known(operation, self.known(stream)?, work)
    }

    /// The same on a stream that was looked up.
    fn enqueue_known(
        &self,
        operation: &'static str,
        raw: Handle,
        work: impl FnOnce(&Current<'_>, Handle) -> Driven,
    ) -> Result<()> {
        if self.health.failed().is_some() {
            return Ok(());
        }
        self.heard(operation, self.context.enter().and_then(|current| work(&current, raw))).map(|_| ())
    }

    /// What the driver says to an enqueueing: whether something is enqueued. A lost context is as if the work had
    /// been enqueued and failed: the next query tells, so that no call ends half-way.
    fn heard(&self, operation: &'static str, enqueued: Driven) -> Result<bool> {
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
        work: impl FnOnce(&Enqueueing<'_>) -> Driven,
    ) -> Result<()> {
        self.enqueue(operation, stream, |current, stream| {
            work(&Enqueueing { current, module: &self.module, stream })
        })
    }

    /// What a stream's capture is, when something is to run on the host in the stream's order.
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
                .hint("end the capture and begin it anew")),
        }
    }

    /// Enqueues a function of the host's: whether it is. Where that is refused, or the context is lost, its work is
    /// given back.
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

    /// What the driver says of an event.
    fn synchronized(&self, answer: Driven) -> Result<bool> {
        match answer {
            Ok(()) => self.check().map(|()| true),
            Err(refusal) if refusal.code == code::NOT_READY => Ok(false),
            Err(refusal) if code::CAPTURE.contains(&refusal.code) => Err(refusal.error("query")),
            // Nothing is known of the event: it may be asked again.
            Err(refusal) if refusal.code == code::OUT_OF_MEMORY => Err(refusal.error("query")),
            // An event answers with what failed before it, whatever that was.
            Err(refusal) => {
                self.lose();
                Err(Error::new(Kind::DeviceFailed, "query").at(refusal.error("query").place().to_owned()))
            }
        }
    }

    /// Waits until nothing that was enqueued here runs any more; answers whether that is sure.
    fn drain(&self) -> bool {
        // A lost context says so here, even where no stream is left.
        let sound = self.worker.run(|_, _| Ok(())).is_ok();
        let Ok(current) = self.context.relaxed() else { return false };
        let streams = self.streams.lock();
        // Each is waited for, even behind one that cannot be.
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
        // Work that was the last to hold the device ends on a thread of the driver's, which may not call the driver.
        if self.inner.calls.is_running_here() {
            let inner = Arc::clone(&self.inner);
            let closing = thread::Builder::new().name("forebay-close".to_owned()).spawn(move || {
                while Arc::strong_count(&inner) > 1 {
                    thread::yield_now();
                }
            });
            if closing.is_err() {
                // Without a thread to close it on, the device stays as it is.
                std::mem::forget(Arc::clone(&self.inner));
            }
        }
    }
}
