//! The host device: real memory, threads as streams, and the LRU rule of `residency` run as written there.
//!
//! It runs without a GPU, serves as the reference for every other device, and runs trace replays. It implements the
//! whole trait except graphs: ranges map the same memory at several addresses, streams run on their own threads, and
//! the machine's vector units copy rows.
//!
//! **Two ways to run.** [`HostOptions::threaded`] gives each stream a thread, so that a missing edge shows as it
//! would on a GPU. Otherwise a stream is *inline*: each operation runs in the call that enqueues it. That is one
//! valid order of the same operations, needs no hand-over between threads, and suits a single thread that owns the
//! device.
//!
//! **What it does not do.** It does not model time; the clock device does. It orders streams no more than a GPU does:
//! two operations that touch the same bytes without an edge are a defect of the caller's schedule.

mod copy;
mod errors;
mod fetches;
mod marks;
mod memory;
mod paged;
mod pages;
mod pools;
#[cfg(not(loom))]
#[cfg(feature = "measure")]
mod probe;
mod resize;
mod resolve;
mod stream;
mod vector;
mod words;

use std::os::fd::OwnedFd;

use crate::device::checks::{self, Asker};
use crate::device::pages::{self as page_ops, Kept, StepPages};
use crate::device::{
    Backing, Completer, CopyPages, Device, DeviceId, Event, Mapped, PageOp, PoolLayout, PoolOp, Pools, Slice,
    Stream,
};
use crate::error::{Error, Kind, Result};
use crate::ids::Lane;
use crate::os::{Faults, Map, NoFaults, Protection, Request, move_bytes, page_size};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering, thread};

use copy::Copier;
use errors::{NAME, unknown};
use memory::Memory;
use paged::Beginning;
use pools::HostPools;
use stream::SharedEvent;
#[cfg(not(loom))]
use stream::{EventState, Queue};
/// The parts that streams share with the host, for the models of `tests/loom.rs`.
#[cfg(loom)]
pub use {
    pages::PageTables,
    stream::{EventState, Queue},
};

/// The options of a host device.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// Gives each stream a thread. Otherwise streams are inline.
    pub threaded: bool,
    /// The capacity of a threaded stream's queue, in operations. Enqueueing waits while the queue is full.
    pub queue: usize,
    /// Uses plain Rust instead of the machine's vector units, for comparison.
    pub portable: bool,
    /// Makes the operation of this number fail, and the device with it, so that tests see the state after a failure.
    /// Memory, copies and pool operations count, from 0.
    pub fail_operation: Option<u64>,
    /// The limit of device memory in bytes, since a GPU has less than the host. `None`: as much as the machine has.
    pub memory: Option<u64>,
}

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions { threaded: false, queue: 4096, portable: false, fail_operation: None, memory: None }
    }
}

/// The host device. See the [module](self) page.
#[derive(Debug)]
pub struct HostDevice {
    shared: Arc<Shared>,
    streams: Mutex<Vec<StreamState>>,
    #[cfg(not(loom))]
    #[cfg(feature = "measure")]
    marks: Mutex<Vec<Stamped>>,
    threaded: bool,
    queue: usize,
}

/// A stream: its queue and thread, or neither if it is inline.
#[derive(Debug)]
struct StreamState {
    queue: Option<Arc<Queue<Op>>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// A mark of `probe`: the event after which its time is known.
#[cfg(not(loom))]
#[cfg(feature = "measure")]
#[derive(Clone, Debug)]
struct Stamped {
    reached: Event,
    time: Arc<Mutex<Option<std::time::Instant>>>,
}

/// The state that streams and the host share.
#[derive(Debug)]
struct Shared {
    id: DeviceId,
    memory: Mutex<Memory>,
    events: Mutex<Vec<SharedEvent>>,
    pools: Mutex<Vec<Arc<HostPools>>>,
    /// The lists of copies that have ended, for the next ones: a step allocates nothing.
    spare: Mutex<Vec<Kept>>,
    /// The kind of the first failure; 0 while the device is sound.
    failure: AtomicU32,
    operations: AtomicU64,
    fail_operation: u64,
    copier: Copier,
    portable: bool,
}

/// An operation in a stream.
enum Op {
    Copy { from: u64, to: u64, bytes: u64 },
    Call(Arc<dyn Fn() + Send + Sync>),
    Complete(Completer),
    Record(SharedEvent, u64),
    Wait(SharedEvent, u64),
    Pool(Arc<HostPools>, PoolOp<'static>),
    BeginPages(StepPages),
    CopyPages(Kept),
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Op::Copy { .. } => "copy",
            Op::Call(_) => "call",
            Op::Complete(_) => "complete",
            Op::Record(..) => "record",
            Op::Wait(..) => "wait",
            Op::Pool(..) => "pool operation",
            Op::BeginPages(_) => "begin pages",
            Op::CopyPages(_) => "copy pages",
        })
    }
}

impl Shared {
    /// Remembers the first failure.
    fn fail(&self, kind: Kind) {
        let _ = self.failure.compare_exchange(0, kind as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    fn failed(&self) -> Option<Kind> {
        let code = self.failure.load(Ordering::Acquire);
        Kind::ALL.iter().copied().find(|k| *k as u32 == code)
    }

    fn check(&self) -> Result<()> {
        match self.failed() {
            None => Ok(()),
            Some(cause) => {
                Err(Error::new(Kind::DeviceFailed, NAME).at(cause.describe()).with("kind", cause as u32))
            }
        }
    }

    /// Counts an operation; returns whether it may run.
    fn admit(&self) -> bool {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        if number == self.fail_operation {
            self.fail(Kind::DeviceFailed);
        }
        self.failed().is_none()
    }

    /// Runs one operation. After a failure memory no longer changes, but records, waits and tickets continue.
    fn run(&self, op: Op) {
        match op {
            Op::Record(event, number) => event.reach(number),
            Op::Wait(event, number) => event.wait(number),
            Op::Complete(completer) => match self.failed() {
                None => completer.done(),
                Some(kind) => completer.fail(kind),
            },
            Op::Call(work) => work(),
            Op::Copy { from, to, bytes } => {
                if self.admit() {
                    // SAFETY: both ends are parts of slices of this device, checked when enqueued, whose
                    // memory lives as long as the device.
                    unsafe { self.copier.stretch(from as *const u8, to as *mut u8, bytes as usize) };
                }
            }
            Op::Pool(pools, op) => {
                if self.admit()
                    && let Err(error) = pools.run(&op)
                {
                    self.fail(error.kind());
                }
            }
            Op::BeginPages(step) => {
                if self.admit() {
                    Beginning::new(&step, self.id, self.copier).run();
                }
            }
            Op::CopyPages(kept) => {
                if self.admit()
                    && let PageOp::Copy(CopyPages { planes, pages }) = kept.op()
                {
                    paged::copy(self.copier, planes, pages);
                }
                self.spare.lock().push(kept);
            }
        }
    }

    fn event(&self, event: Event) -> Result<SharedEvent> {
        let events = self.events.lock();
        let found = usize::try_from(event.0).ok().and_then(|i| events.get(i));
        found.map(Arc::clone).ok_or_else(|| unknown("event", event.0))
    }
}

impl HostDevice {
    /// A device with no memory taken yet.
    pub fn new(options: HostOptions) -> Arc<HostDevice> {
        HostDevice::with_faults(options, std::sync::Arc::new(NoFaults))
    }

    /// A device whose calls of the system for backings and ranges ask `faults` first. For tests.
    pub fn with_faults(options: HostOptions, faults: std::sync::Arc<dyn Faults>) -> Arc<HostDevice> {
        let id = DeviceId::new();
        let shared = Shared {
            id,
            memory: Mutex::new(Memory::new(id, options.memory, faults)),
            events: Mutex::new(Vec::new()),
            pools: Mutex::new(Vec::new()),
            spare: Mutex::new(Vec::new()),
            failure: AtomicU32::new(0),
            operations: AtomicU64::new(0),
            fail_operation: options.fail_operation.unwrap_or(u64::MAX),
            copier: Copier::widest(),
            portable: options.portable,
        };
        Arc::new(HostDevice {
            shared: Arc::new(shared),
            streams: Mutex::new(Vec::new()),
            #[cfg(not(loom))]
            #[cfg(feature = "measure")]
            marks: Mutex::new(Vec::new()),
            threaded: options.threaded,
            queue: options.queue,
        })
    }

    /// The number of operations so far, in the count of [`HostOptions::fail_operation`].
    pub fn operations(&self) -> u64 {
        self.shared.operations.load(Ordering::Relaxed)
    }

    /// Reads bytes of device memory as they are now. For tests and for engines on this device.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a slice of another device or of a length other than that of `bytes`.
    pub fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()> {
        self.check_host(&slice, bytes.len())?;
        // SAFETY: the slice is this device's, as long as `bytes`, and its memory lives as long as `self`.
        unsafe { move_bytes(slice.address() as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes bytes of device memory now.
    ///
    /// # Errors
    /// As [`HostDevice::read`].
    pub fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()> {
        self.check_host(&slice, bytes.len())?;
        self.shared.id.check_target(&slice)?;
        // SAFETY: the slice is this device's, as long as `bytes`, and its memory lives as long as `self`.
        unsafe { move_bytes(bytes.as_ptr(), slice.address() as *mut u8, bytes.len()) };
        Ok(())
    }

    fn check_host(&self, slice: &Slice, bytes: usize) -> Result<()> {
        self.shared.id.check(slice)?;
        if slice.bytes() == bytes as u64 { Ok(()) } else { Err(unknown("slice length", slice.bytes())) }
    }

    /// A stream's queue; `None` for an inline stream.
    fn queue_of(&self, stream: Stream) -> Result<Option<Arc<Queue<Op>>>> {
        let streams = self.streams.lock();
        let found = usize::try_from(stream.0).ok().and_then(|i| streams.get(i));
        Ok(found.ok_or_else(|| unknown("stream", stream.0))?.queue.as_ref().map(Arc::clone))
    }

    fn append(&self, stream: Stream, op: Op) -> Result<()> {
        self.push(self.queue_of(stream)?, op)
    }

    fn push(&self, queue: Option<Arc<Queue<Op>>>, op: Op) -> Result<()> {
        match queue {
            None => self.shared.run(op),
            Some(queue) => {
                queue.push(op).map_err(|_| Error::new(Kind::Cancelled, NAME).at("stream is closed"))?;
            }
        }
        Ok(())
    }

    fn pool(&self, pools: Pools) -> Result<Arc<HostPools>> {
        let all = self.shared.pools.lock();
        let index = pools.of(self.shared.id)?;
        all.get(index).map(Arc::clone).ok_or_else(|| unknown("pools", index as u64))
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        let mut streams = self.streams.lock();
        // Close every queue before joining any thread. Queued operations still run, so that a wait in one stream
        // finds its record in another.
        for queue in streams.iter().filter_map(|s| s.queue.as_ref()) {
            queue.close();
        }
        // Work that held the device drops it on its own stream. That thread joins none: another stream may wait for a
        // record that comes behind this work. Each thread ends after this, and keeps the memory until then.
        let own = thread::current().id();
        let is_own = |stream: &StreamState| stream.thread.as_ref().is_some_and(|t| t.thread().id() == own);
        let inside = streams.iter().any(is_own);
        for thread in streams.drain(..).filter_map(|stream| stream.thread).filter(|_| !inside) {
            // A stream whose work panicked has already failed the device; nothing is left to do.
            let _ = thread.join();
        }
    }
}

impl Device for HostDevice {
    fn allocate(&self, bytes: u64) -> Result<Slice> {
        self.shared.memory.lock().take(bytes)?;
        // Huge pages are only a hint here: this device's memory is ordinary memory and works without them.
        let request = Request { bytes, huge: true, populate: false, lock: false, node: None, shared: false };
        let (map, _) = Map::new(&request, &NoFaults)?;
        self.shared.memory.lock().keep(Arc::new(map)).part(0, bytes)
    }

    fn register(&self, map: &Arc<Map>) -> Result<Slice> {
        Ok(self.shared.memory.lock().keep(Arc::clone(map)))
    }

    // SAFETY: the caller vouches for the bytes, as the trait demands; nothing is read or written here.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice {
        self.shared.id.slice(address, bytes)
    }

    fn id(&self) -> DeviceId {
        self.shared.id
    }

    fn granularity(&self) -> u64 {
        page_size()
    }

    fn takes_host_memory(&self) -> bool {
        true
    }

    fn pins_host_memory(&self) -> bool {
        false
    }

    fn backing(&self, bytes: u64) -> Result<Backing> {
        self.shared.memory.lock().backing(bytes)
    }

    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        self.shared.memory.lock().range(pieces, protection)
    }

    fn remap(&self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        let remapped = self.shared.memory.lock().remap(part, pieces);
        // The addresses map something else now, and nothing that runs from here on could be right.
        if remapped.as_ref().is_err_and(|error| error.kind() == Kind::DeviceFailed) {
            self.shared.fail(Kind::DeviceFailed);
        }
        remapped
    }

    fn export(&self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        self.shared.memory.lock().export(backing, protection)
    }

    fn import_backing(&self, descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing> {
        self.shared.memory.lock().import(descriptor, bytes, protection)
    }

    fn give_back(&self, backing: Backing) -> Result<()> {
        self.shared.memory.lock().give_back(backing)
    }

    fn stream(&self) -> Result<Stream> {
        let mut streams = self.streams.lock();
        let number = Stream(streams.len() as u64);
        let (mut queue, mut thread) = (None, None);
        if self.threaded {
            let ops = Arc::new(Queue::new(self.queue));
            let (shared, taken) = (Arc::clone(&self.shared), Arc::clone(&ops));
            let spawned = thread::Builder::new().name(format!("forebay-{}", number.0)).spawn(move || {
                while let Some(op) = taken.pop() {
                    // A panic in an engine's callback must not leave other threads waiting for this stream.
                    let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shared.run(op)));
                    if ran.is_err() {
                        shared.fail(Kind::Internal);
                    }
                }
            });
            let spawned = spawned
                .map_err(|e| Error::new(Kind::OsRefused, NAME).at(format!("a stream's thread: {e}")))?;
            (queue, thread) = (Some(ops), Some(spawned));
        }
        streams.push(StreamState { queue, thread });
        Ok(number)
    }

    fn event(&self) -> Result<Event> {
        let mut events = self.shared.events.lock();
        events.push(Arc::new(EventState::new()));
        Ok(Event(events.len() as u64 - 1))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        let event = self.shared.event(event)?;
        // A counted record must be reached, so look the stream up first.
        let queue = self.queue_of(stream)?;
        let number = event.record();
        self.push(queue, Op::Record(event, number))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let event = self.shared.event(event)?;
        let number = event.recorded();
        self.append(stream, Op::Wait(event, number))
    }

    fn query(&self, event: Event) -> Result<bool> {
        // A failed device still reaches its events. Before that, operations may still be running.
        if !self.shared.event(event)?.is_complete() {
            return Ok(false);
        }
        self.shared.check().map(|()| true)
    }

    fn synchronize(&self, event: Event) -> Result<()> {
        let event = self.shared.event(event)?;
        event.wait(event.recorded());
        self.shared.check()
    }

    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()> {
        self.shared.id.check(&from)?;
        self.shared.id.check_target(&to)?;
        if from.bytes() != to.bytes() {
            return Err(unknown("copy of another length", to.bytes()));
        }
        let op = Op::Copy { from: from.address(), to: to.address(), bytes: from.bytes() };
        self.append(stream, op)
    }

    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()> {
        checks::prefetch(self.shared.id, &slice, rate)?;
        // A processor's caches need no hint here, and it has no place in the stream's order.
        self.queue_of(stream).map(drop)
    }

    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()> {
        self.append(stream, Op::Call(work))
    }

    fn complete(&self, stream: Stream, completer: Completer) -> Result<()> {
        self.append(stream, Op::Complete(completer))
    }

    fn attach(&self, layout: PoolLayout) -> Result<Pools> {
        let pools = HostPools::new(layout, self.shared.id, self.shared.copier, self.shared.portable)?;
        let mut all = self.shared.pools.lock();
        all.push(Arc::new(pools));
        Ok(self.shared.id.pools(all.len() - 1))
    }

    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()> {
        // Check before staging: a rejected call leaves the staged lists as they were.
        let queue = self.queue_of(stream)?;
        let pools = self.pool(pools)?;
        pools.stage(&op)?;
        self.push(queue, Op::Pool(pools, op.detached()))
    }

    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()> {
        let queue = self.queue_of(stream)?;
        let asker = Asker { name: NAME, device: self.shared.id, exact: true, top_k_max: u32::MAX };
        page_ops::check(&asker, &op)?;
        let op = match &op {
            PageOp::Begin(begin) => Op::BeginPages(page_ops::begin(begin)),
            PageOp::Copy(_) => {
                let spare = self.shared.spare.lock().pop();
                Op::CopyPages(match spare {
                    Some(kept) => kept.again(op, NAME)?,
                    None => Kept::of(op, NAME)?,
                })
            }
        };
        self.push(queue, op)
    }

    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64> {
        self.pool(pools)?.digest(lane)
    }

    fn validate(&self, pools: Pools) -> Result<()> {
        self.pool(pools)?.validate()
    }
}
