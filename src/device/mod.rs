//! The trait [`Device`] that every back end implements, and what its calls take.
//!
//! A device has memory, streams and events, and runs the operations of a decode step as data ([`PoolOp`]): begin,
//! resolve, gather, scatter, report. A step costs one call per layer and operation. That is few enough that a virtual
//! call costs nothing next to a kernel launch, and each call is one or two nodes of a captured graph. The host
//! chooses the work before a step (`step`): the batch rows, lanes, pages and buffers. The device chooses the rows
//! inside the step, by the LRU rule of [`crate::residency`].
//!
//! **Implementations.** [`host`] runs the rule on real memory with threads as streams: the reference. [`clock`]
//! computes times from a cost table, without memory or over another device. `cuda` runs the rule in kernels on an
//! NVIDIA GPU. `check::watch::Watch` wraps a device and checks which operations race.
//!
//! **Memory.** A cache takes all its memory at construction. Device memory lives as long as the device: no call frees
//! it, so no [`Slice`] can dangle. Only physical memory that no range maps can be given back. Each [`Slice`],
//! [`Backing`] and [`Pools`] carries the id of its device ([`DeviceId`]), and every other device rejects it.
//!
//! **Order.** Operations of one stream run in the order in which they were enqueued. Two streams are ordered only by
//! [`Device::record`] and [`Device::wait`], which have CUDA's meaning: a wait refers to the last record that was
//! enqueued before it. The caller orders any two operations that touch the same bytes; `step` and `overlap` contain
//! these edges for a cache.
//!
//! **Failure.** A device checks handles, slices and sizes when an operation is enqueued, and returns an error without
//! enqueueing it. An operation that fails later, on the stream, makes the device fail for good: every later
//! [`Device::query`] returns [`Kind::DeviceFailed`]. Events still complete and tickets still end, so no caller waits
//! forever.

mod checks;
pub mod clock;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod descriptor;
mod handles;
pub mod host;
mod op;
pub mod pages;
mod pieces;
#[cfg(feature = "measure")]
pub(crate) mod probe;
mod ranges;
pub mod rates;
mod ticket;

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use crate::error::{Error, Kind, Result};
use crate::geometry::Geometries;
use crate::ids::Lane;
use crate::os::{Map, Protection};
use crate::residency::TableShape;
use crate::sync::Arc;

pub(crate) use checks::follows;
pub use handles::{Backing, DeviceId, Event, Graph, Pools, Slice, Stream};
pub use op::{
    Begin, Join, Newest, PoolOp, Resize, ResolveOutput, SplitIndices, StepRange, Truncate, Warm, WarmGather,
};
pub use pages::{BeginPages, CopyPages, PAGE_GROUPS_MAX, PageOp, PageTables, Plane};
pub use ticket::{Completer, Outcome, Ticket};

/// A piece of a [`Backing`] that [`Device::range`] maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The memory to map.
    pub backing: Backing,
    /// The first byte; a multiple of the device's granularity.
    pub offset: u64,
    /// The length in bytes; a multiple of the device's granularity.
    pub bytes: u64,
}

/// The memory and table sizes of one cache on a device. They never change while the cache lives.
#[derive(Clone, Debug)]
pub struct PoolLayout {
    /// Layers, their row formats and groups, and page sizes of the model's cache.
    pub geometry: Geometries,
    /// The table sizes of each index group ([`Geometries::groups`]): of each layer, if none share a selection.
    pub tables: Vec<TableShape>,
    /// For each layer, the device memory that holds its slots.
    pub slabs: Vec<Slice>,
    /// For each layer, the pinned host memory that holds every row.
    pub rows: Vec<Slice>,
    /// Entries of a lane's page table.
    pub lane_pages: u32,
    /// The number of micro-batches.
    pub micro_batches: u32,
    /// The most batch rows of a step.
    pub batch: u32,
    /// The work that a step's report demands; otherwise the step fails.
    pub expected: Expected,
}

/// The work that must be done when a step is reported, for each query row of its batch rows in every layer. If any is
/// missing, the step fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// Each query row was resolved and scattered, and its misses were gathered.
    #[default]
    Whole,
    /// Each query row was resolved. For caches whose rows have no bytes (trace replay).
    Resolved,
    /// The misses were gathered. For tools that measure parts of a step and never accept its new rows.
    Gathered,
}

/// A back end. The [module](self) page explains memory, order and failure, which every implementation follows.
pub trait Device: Debug + Send + Sync {
    /// Allocates zeroed device memory that lives as long as the device.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    fn allocate(&self, bytes: u64) -> Result<Slice>;

    /// Allocates pinned host memory through the device's driver: at least `bytes` bytes, zeroed, on NUMA node `node`,
    /// or on the node nearest to the device if `node` is `None`. The caller passes the result to
    /// [`Device::register`]. Returns `None` on a device that takes the system's memory instead, which is the default
    /// of every device.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; [`Kind::OsRefused`] where the driver refuses.
    fn host_memory(&self, _bytes: u64, _node: Option<u32>) -> Result<Option<Arc<Map>>> {
        Ok(None)
    }

    /// Makes host memory reachable from the device, which keeps the mapping alive.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`] when the driver refuses.
    fn register(&self, map: &Arc<Map>) -> Result<Slice>;

    /// Wraps an engine's buffer as a slice. The device neither reads nor writes it here.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` stay valid for this device to read and write until every operation that names
    /// the slice has ended.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice;

    /// The id that all handles of this device carry. A device that wraps another one has the id of the wrapped
    /// device.
    fn id(&self) -> DeviceId;

    /// Whether this device gave the slice.
    fn owns(&self, slice: &Slice) -> bool {
        slice.device() == self.id()
    }

    /// The granularity in bytes: offsets and sizes of [`Mapped`] are multiples of it.
    fn granularity(&self) -> u64;

    /// Whether device memory is host memory, so that a cache's device pools count against the host's memory.
    fn takes_host_memory(&self) -> bool;

    /// Whether [`Device::register`] pins host memory, even if the mapping itself was not locked. A GPU's driver pins
    /// it, as its copy engines need.
    fn pins_host_memory(&self) -> bool;

    /// Allocates physical memory for [`Device::range`].
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    fn backing(&self, bytes: u64) -> Result<Backing>;

    /// Maps pieces of physical memory into one contiguous address range, all with `protection`. A piece may be mapped
    /// in several ranges. The addresses stay the range's as long as the device lives.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a piece outside its backing; [`Kind::InvalidConfig`] for one that does not begin and
    /// end on granules; [`Kind::InvalidState`] for memory that may only be read and is to be mapped to be written;
    /// [`Kind::OsRefused`] when the system cannot map it.
    fn range(&self, pieces: &[Mapped], protection: Protection) -> Result<Slice>;

    /// Maps other physical memory at the addresses of `part`, a part of a range that begins and ends where pieces of it
    /// do, with the range's protection. The addresses stay valid in captured graphs. No work that is enqueued or runs
    /// may use the part: the caller has waited for it. The call blocks.
    ///
    /// # Errors
    /// As [`Device::range`]; [`Kind::OutOfRange`] for a part of no range, or with other borders;
    /// [`Kind::InvalidConfig`] for pieces that are not as long as the part. The part maps what it mapped before then.
    /// [`Kind::DeviceFailed`] if that was refused too, and the device has failed.
    fn remap(&self, _part: Slice, _pieces: &[Mapped]) -> Result<()> {
        Err(fixed("remap"))
    }

    /// Whether a piece of a range may begin inside its backing. Drivers before CUDA 13 map a backing from its beginning
    /// only: a range of parts of memory takes one backing for each part there.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] where that has to be tried.
    fn maps_offsets(&self) -> Result<bool> {
        Ok(true)
    }

    /// Exports physical memory as a descriptor, for [`Device::import_backing`] of another process or device. With
    /// [`Protection::Read`] the others may only read it, and later ranges of this device too; ranges that map it stay
    /// writable. On a GPU it is the importer who maps it so. The memory lives as long as any descriptor or importer
    /// does; an open descriptor keeps it, so close it once it has been imported.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on a device that cannot export memory; [`Kind::OutOfRange`] for a backing of another
    /// device; [`Kind::InvalidState`] for one that was exported with another protection; [`Kind::OsRefused`].
    fn export(&self, _backing: Backing, _protection: Protection) -> Result<OwnedFd> {
        Err(fixed("export memory"))
    }

    /// Imports the memory of a descriptor of `bytes` bytes, which can be mapped with `protection`. The other process is
    /// not trusted, as far as the system can tell what it gave.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on a device that cannot import memory; [`Kind::BadFormat`] for a descriptor that is not of
    /// such memory, or of another size; [`Kind::InvalidConfig`] for bytes that are no multiple of the granularity;
    /// [`Kind::OsRefused`].
    fn import_backing(&self, _descriptor: OwnedFd, _bytes: u64, _protection: Protection) -> Result<Backing> {
        Err(fixed("import memory"))
    }

    /// Frees a backing that no range maps. Other processes that imported it keep the memory.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a range maps it; [`Kind::OutOfRange`] for a backing of another device, or one that was
    /// given back.
    fn give_back(&self, _backing: Backing) -> Result<()> {
        Err(fixed("give memory back"))
    }

    /// Creates a stream. A GPU's stream has the driver's number, which no other stream of the process has. Host and
    /// clock devices number theirs from 0, so each of these takes another one's stream for its own of that number, and
    /// refuses only numbers that it has not given out. Events of the two are the same.
    ///
    /// # Errors
    /// [`Kind::OsRefused`], [`Kind::Exhausted`].
    fn stream(&self) -> Result<Stream>;

    /// Creates an event. It counts as complete until it is first recorded.
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    fn event(&self) -> Result<Event>;

    /// Records `event` at the end of `stream`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a handle that this device did not give out, as far as it can tell
    /// ([`Device::stream`]).
    fn record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes `stream` wait for the last record of `event` that was enqueued before this call.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// Orders two streams: [`Device::record`] at the end of `from`, then [`Device::wait`] in `to`. A schedule makes
    /// several of these per layer, so a device that can do both in one call overrides it.
    ///
    /// # Errors
    /// As [`Device::record`] and [`Device::wait`].
    fn edge(&self, event: Event, from: Stream, to: Stream) -> Result<()> {
        self.record(event, from)?;
        self.wait(to, event)
    }

    /// Whether the last record of `event` has been reached. Never blocks.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`] when the record has been reached and the device has failed.
    fn query(&self, event: Event) -> Result<bool>;

    /// Blocks the caller until the last record of `event` has been reached. The library never calls it between
    /// construction and close.
    ///
    /// # Errors
    /// As [`Device::query`].
    fn synchronize(&self, event: Event) -> Result<()>;

    /// Enqueues a copy of `from` to `to`, which have the same length.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()>;

    /// Enqueues a hint: work that reads `slice` soon finds its bytes in the cache before the device's memory (L2). They
    /// are asked for at `rate` bytes per second or fewer, so that other work keeps the rest of the memory's rate. The
    /// hint changes no byte and returns none, so it makes no read wrong, whatever it runs beside.
    ///
    /// It counts as a read all the same. Ordered before the write of what is to be read it is useless, because the
    /// write's bytes come later. And addresses that are not mapped must not be touched: before a [`Device::remap`] the
    /// caller waits for it as for any other work. On a device without such a cache, and for host memory, it does
    /// nothing. Of other GPUs' memory it is of no use: that is kept in their caches.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] as for the source of a [`Device::copy`], and for a rate of 0.
    fn prefetch(&self, stream: Stream, slice: Slice, rate: u64) -> Result<()>;

    /// Enqueues `work`, which runs in the stream's order, on a thread of the device or in this call. If `work` holds
    /// the device, it keeps the device alive until it has run. Work that may never run should hold the device weakly.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;

    /// Ends `completer`'s ticket when the stream reaches this point.
    ///
    /// # Errors
    /// As [`Device::record`]; the ticket is then cancelled.
    fn complete(&self, stream: Stream, completer: Completer) -> Result<()>;

    /// Allocates a cache's tables and lists on the device.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a layout whose parts do not fit each other; [`Kind::OutOfMemory`].
    fn attach(&self, layout: PoolLayout) -> Result<Pools>;

    /// Enqueues an operation on a cache's pools; [`PoolOp`] describes each. After a join, a truncation or a resize
    /// the caller enqueues no other one of these for the same lane until the first has run: the device keeps the lane's
    /// lists in one place.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for handles, slices and numbers that do not fit the cache's sizes. Nothing is enqueued
    /// then, and the lists that an earlier operation of the lane left stay as they were.
    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()>;

    /// Enqueues an operation on the pages of a dense cache; [`PageOp`] describes each. The device keeps nothing of the
    /// call: lists that it borrows may change after it. The words that it names belong to the operation until it has
    /// run.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for handles, slices and numbers that do not fit each other; [`Kind::Overflow`] for slots
    /// beyond their type; [`Kind::InvalidState`] for memory to write that is mapped to be read only, and for copies on
    /// a stream that is being captured. Nothing is enqueued then. A begin that is refused with any other error was not
    /// enqueued either; some pieces of a copy may have been.
    fn enqueue_pages(&self, stream: Stream, op: PageOp<'_>) -> Result<()>;

    /// Begins a capture: the device records the work that is enqueued on `stream`, and on streams that wait for it,
    /// and runs none of it until [`Device::captured`] ends the capture.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on a device without graphs; [`Kind::Busy`] when the stream is already being captured.
    fn capture(&self, _stream: Stream) -> Result<()> {
        Err(no_graphs())
    }

    /// Ends the capture that began on `stream`, even where it returns an error.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a broken capture, such as one with a forked stream that was not joined, or when no
    /// capture began on `stream`; [`Kind::OutOfMemory`].
    fn captured(&self, _stream: Stream) -> Result<Graph> {
        Err(no_graphs())
    }

    /// Whether `stream` is being captured, by this device or by anyone else.
    ///
    /// # Errors
    /// As [`Device::record`]; [`Kind::InvalidState`] for a broken capture.
    fn is_capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }

    /// Launches a graph as one operation of `stream`. Launches of one graph run one after another.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a graph that this device does not have; [`Kind::InvalidState`] when `stream` is being
    /// captured.
    fn launch(&self, _graph: Graph, _stream: Stream) -> Result<()> {
        Err(no_graphs())
    }

    /// Destroys a graph. Launches that are already enqueued still run.
    ///
    /// # Errors
    /// As [`Device::launch`].
    fn release(&self, _graph: Graph) -> Result<()> {
        Err(no_graphs())
    }

    /// The residency digest of a lane, summed over all index groups. It does not wait for streams. Tests use it, and
    /// ranks compare it between steps.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64>;

    /// Checks every invariant of the tables. Tests use it.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the broken invariant.
    fn validate(&self, pools: Pools) -> Result<()>;

    /// Restricts enqueueing to one stream, or with `None` lifts the restriction and returns the first error that it
    /// caused. Devices for tests and planning implement it, so that they find an engine's callback that enqueues on
    /// the wrong stream. Other devices do not see an engine's launches and do nothing here.
    ///
    /// # Errors
    /// The error of the first operation that was enqueued on another stream.
    fn confine(&self, _stream: Option<Stream>) -> Result<()> {
        Ok(())
    }
}

/// Bytes of a GPU's memory that its page tables take for `host` bytes of registered memory: 8 bytes for each page of
/// 4 KiB, the higher levels of its page tables aside.
pub(crate) const fn host_page_tables(host: u64) -> u64 {
    const PAGE: u64 = 4096;
    8 * host.div_ceil(PAGE)
}

/// The error of a device whose memory is fixed once it is mapped, and its own.
fn fixed(operation: &'static str) -> Error {
    Error::new(Kind::Unsupported, operation).at("a device whose memory is its own")
}

fn no_graphs() -> Error {
    Error::new(Kind::Unsupported, "capture").at("a device without graphs").hint("enqueue each step's layers")
}
