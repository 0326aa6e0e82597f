//! The trait that every back end implements, and the handles it speaks in.
//!
//! A device has memory, streams and events, and executes the operations of a step ([`PoolOp`]): begin, resolve,
//! gather, scatter, report. One call a layer and operation: coarse enough that a virtual
//! call costs nothing, and exactly what a captured graph holds. The host decides *what* before a step
//! (`step`); a device decides *which rows* inside it, by the rule of [`crate::residency`].
//!
//! **Memory.** Pools take all their memory at construction and it lives as long as the device: there is
//! no call that frees, so no [`Slice`] can dangle. A slice, a backing and a cache's pools know their device
//! ([`DeviceId`]), and every other device refuses them.
//!
//! **Order.** Operations of one stream run in their order. Between streams nothing is ordered but by
//! [`Device::record`] and [`Device::wait`], which mean what CUDA's calls mean: a wait refers to the last
//! record enqueued before it. Two operations that touch the same bytes must be ordered by the caller's
//! edges; the schedules of `step` and `overlap` are where these edges stand.
//!
//! **Failure.** What can be checked is checked when an operation is enqueued. An operation that fails
//! later makes the device sticky: every later query answers [`Kind::DeviceFailed`], every event still
//! completes, every ticket still ends, so that nobody waits for ever.

mod checks;
pub mod clock;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod descriptor;
pub mod host;
mod op;
mod pieces;
#[cfg(feature = "measure")]
pub(crate) mod probe;
pub mod rates;
mod ticket;

use std::fmt::Debug;

use crate::error::{Error, Kind, Result};
use crate::geometry::Geometry;
use crate::ids::Lane;
use crate::os::Map;
use crate::residency::TableShape;
use crate::sync::{Arc, unique};

pub use op::{Answer, Begin, Join, PoolOp, Raise, SplitIndices, StepRange, Truncate, Warm};
pub use ticket::{Completer, Outcome, Ticket};

/// An in-order queue of operations. On a GPU the word is the engine's own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// A point in a stream that others can wait for; of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// Which device something is of. No two devices of a process have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

impl DeviceId {
    pub(crate) fn new() -> DeviceId {
        DeviceId(unique())
    }

    /// As a number.
    pub const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn slice(self, address: u64, bytes: u64) -> Slice {
        Slice { device: self, address, bytes }
    }

    pub(crate) const fn backing(self, index: usize) -> Backing {
        Backing { device: self, index: index as u32 }
    }

    pub(crate) const fn pools(self, index: usize) -> Pools {
        Pools { device: self, index: index as u32 }
    }

    /// Whether a slice is this device's.
    pub(crate) fn check(self, slice: &Slice) -> Result<()> {
        self.own(slice.device, "slice", "a slice of another device")
    }

    fn own(self, owner: DeviceId, operation: &'static str, place: &'static str) -> Result<()> {
        if owner == self { Ok(()) } else { Err(Error::new(Kind::OutOfRange, operation).at(place)) }
    }
}

/// Bytes that a device can reach: its own memory, registered host memory, or an engine's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    device: DeviceId,
    address: u64,
    bytes: u64,
}

impl Slice {
    /// Length in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whose it is.
    pub const fn device(&self) -> DeviceId {
        self.device
    }

    /// The address, as the device sees it.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Whether the two have bytes in common.
    pub const fn overlaps(&self, other: &Slice) -> bool {
        let (a, b) = (self.address, other.address);
        self.device.0 == other.device.0
            && if a < b {
                b - a < self.bytes && other.bytes > 0
            } else {
                a - b < other.bytes && self.bytes > 0
            }
    }

    /// The part of `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when it does not lie inside.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Slice> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Slice { address: self.address + offset, bytes, ..*self }),
            _ => Err(Error::new(Kind::OutOfRange, "slice")
                .with("offset", offset)
                .with("bytes", bytes)
                .with("size", self.bytes)),
        }
    }
}

/// Physical memory of a device that can stand at several addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    device: DeviceId,
    index: u32,
}

impl Backing {
    /// Which of the backings that `device` gave it is.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another device's.
    pub fn of(self, device: DeviceId) -> Result<usize> {
        device.own(self.device, "backing", "a backing of another device").map(|()| self.index as usize)
    }
}

/// A part of a [`Backing`] in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Which memory.
    pub backing: Backing,
    /// From which byte on; a multiple of the device's granularity.
    pub offset: u64,
    /// How many bytes; a multiple of the device's granularity.
    pub bytes: u64,
}

/// What a device needs to run a cache's steps: extents and memory, fixed for life.
#[derive(Clone, Debug)]
pub struct PoolLayout {
    /// The model's cache.
    pub geometry: Geometry,
    /// The extents of each layer's tables.
    pub tables: Vec<TableShape>,
    /// The slab of each layer's sparse pool.
    pub slabs: Vec<Slice>,
    /// The rows of each layer's total pool.
    pub rows: Vec<Slice>,
    /// Pages of a lane's page table.
    pub lane_pages: u32,
    /// Micro-batches.
    pub micro_batches: u32,
    /// Batch rows of a step.
    pub batch: u32,
    /// What reports ask of steps.
    pub expected: Expected,
}

/// What must have been done of a step when it is reported, for each query row of its batch rows in every layer:
/// otherwise it fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Expected {
    /// It was resolved and scattered, and what it missed was gathered.
    #[default]
    Whole,
    /// It was resolved: rows have no bytes (replay).
    Resolved,
    /// What was missed was gathered: for tools that measure parts of a step, whose new rows nobody accepts.
    Gathered,
}

/// The tables and lists of one cache on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    device: DeviceId,
    index: u32,
}

impl Pools {
    /// Which of the pools that `device` gave they are.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for another device's.
    pub fn of(self, device: DeviceId) -> Result<usize> {
        device.own(self.device, "pools", "pools of another device").map(|()| self.index as usize)
    }
}

/// Work that was captured once, to be launched any number of times; of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// A back end. See the module's head for memory, order and failure.
pub trait Device: Debug + Send + Sync {
    /// Zeroed device memory that lives as long as the device.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    fn allocate(&self, bytes: u64) -> Result<Slice>;

    /// Pinned host memory of the device's own making, zero at first, at least `bytes` bytes on NUMA node `node`, or on
    /// the one beside the device: for [`Device::register`] to take. None of a device that is given the system's memory
    /// instead, as every device is unless it was asked for this.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]; [`Kind::OsRefused`] where the driver gives none.
    fn host_memory(&self, _bytes: u64, _node: Option<u32>) -> Result<Option<Arc<Map>>> {
        Ok(None)
    }

    /// Makes host memory reachable; the device keeps it mapped.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`] when the driver refuses.
    fn register(&self, map: &Arc<Map>) -> Result<Slice>;

    /// The slice of an engine's buffer.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are memory that this device may read and write until every operation
    /// that names the slice has ended.
    unsafe fn import(&self, address: u64, bytes: u64) -> Slice;

    /// Which device it is: what it gave says so. A device around another one is that device.
    fn id(&self) -> DeviceId;

    /// Whether a slice is this device's.
    fn owns(&self, slice: &Slice) -> bool {
        slice.device == self.id()
    }

    /// The multiple that offsets and sizes of [`Mapped`] must be.
    fn granularity(&self) -> u64;

    /// Whether its memory is the machine's own: what a cache takes of it counts as host memory.
    fn takes_host_memory(&self) -> bool;

    /// Whether [`Device::register`] makes host memory resident, whatever was asked of the memory itself: a driver pins
    /// what its copy engines are to reach.
    fn pins_host_memory(&self) -> bool;

    /// Physical memory for ranges.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    fn backing(&self, bytes: u64) -> Result<Backing>;

    /// One contiguous address range over pieces of memory; a piece may stand in several ranges.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a piece outside its backing, [`Kind::OsRefused`] when it cannot be mapped.
    fn range(&self, pieces: &[Mapped]) -> Result<Slice>;

    /// A new stream.
    ///
    /// # Errors
    /// [`Kind::OsRefused`], [`Kind::Exhausted`].
    fn stream(&self) -> Result<Stream>;

    /// A new event, complete until it is recorded.
    ///
    /// # Errors
    /// [`Kind::Exhausted`].
    fn event(&self) -> Result<Event>;

    /// Records `event` at the end of `stream`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for handles that this device did not give.
    fn record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Makes `stream` wait for the last record of `event`.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// An edge: [`Device::record`] at the end of `from`, then [`Device::wait`] in `to`. A schedule makes some for each
    /// layer, so a device that can do both at once does.
    ///
    /// # Errors
    /// As these two.
    fn edge(&self, event: Event, from: Stream, to: Stream) -> Result<()> {
        self.record(event, from)?;
        self.wait(to, event)
    }

    /// Whether the last record of `event` has been reached.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`] when it has been reached and the device has failed.
    fn query(&self, event: Event) -> Result<bool>;

    /// Blocks the caller until the last record of `event` has been reached. The library itself never
    /// calls it between construction and close.
    ///
    /// # Errors
    /// As [`Device::query`].
    fn synchronize(&self, event: Event) -> Result<()>;

    /// Copies `from` to `to`, which have the same length.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    fn copy(&self, stream: Stream, from: Slice, to: Slice) -> Result<()>;

    /// Runs `work` in the stream's order, on a thread of the device. Work that holds the device keeps it alive
    /// until it has run: work that may never run holds it weakly.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn call(&self, stream: Stream, work: Arc<dyn Fn() + Send + Sync>) -> Result<()>;

    /// Ends `completer`'s ticket when the stream reaches this point.
    ///
    /// # Errors
    /// As [`Device::record`]; the ticket is then cancelled.
    fn complete(&self, stream: Stream, completer: Completer) -> Result<()>;

    /// Takes the tables and lists of a cache.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a plan whose parts do not fit each other.
    fn attach(&self, plan: PoolLayout) -> Result<Pools>;

    /// Enqueues an operation on a cache's pools; [`PoolOp`] says what each does. The caller keeps a lane's data
    /// unchanged until an operation on the lane has run.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for handles, slices and numbers that do not fit the cache's extents: nothing is enqueued
    /// then, and what was staged for a lane before stays.
    fn enqueue(&self, pools: Pools, stream: Stream, op: PoolOp<'_>) -> Result<()>;

    /// From now on records what is enqueued on `stream`, and on the streams that wait for it, instead of
    /// running it, until [`Device::captured`].
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on a device without graphs; [`Kind::Busy`] when the stream is being captured.
    fn capture(&self, _stream: Stream) -> Result<()> {
        Err(no_graphs())
    }

    /// Ends a capture that began on `stream`, with an error or without.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a capture that something has broken, as a stream that was not joined back,
    /// or that did not begin on `stream`; [`Kind::OutOfMemory`].
    fn captured(&self, _stream: Stream) -> Result<Graph> {
        Err(no_graphs())
    }

    /// Whether what is enqueued on `stream` now is recorded, by whoever began that, instead of run.
    ///
    /// # Errors
    /// As [`Device::record`]; [`Kind::InvalidConfig`] for a capture that something has broken.
    fn is_capturing(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }

    /// Enqueues a graph's work as one operation of `stream`. Launches of one graph run one after the other.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a graph that this device does not have.
    fn launch(&self, _graph: Graph, _stream: Stream) -> Result<()> {
        Err(no_graphs())
    }

    /// Gives a graph up. Launches of it that are enqueued still run.
    ///
    /// # Errors
    /// As [`Device::launch`].
    fn release(&self, _graph: Graph) -> Result<()> {
        Err(no_graphs())
    }

    /// The residency digest of a lane, all layers summed. Waits for nothing: for tests and for ranks that
    /// compare themselves between steps.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`].
    fn digest(&self, pools: Pools, lane: Lane) -> Result<u64>;

    /// Checks every invariant of the tables. For tests.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the broken one.
    fn validate(&self, pools: Pools) -> Result<()>;

    /// From now on refuses whatever is enqueued on another stream than this one; with `None` no longer, and
    /// then answers with the first refusal. So an engine that enqueues its work on the wrong stream is
    /// found by the devices that see it: those for tests and for planning. To the others its launches are
    /// invisible, and they do nothing here.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] when something was refused.
    fn confine(&self, _stream: Option<Stream>) -> Result<()> {
        Ok(())
    }
}

fn no_graphs() -> Error {
    Error::new(Kind::Unsupported, "capture").at("a device without graphs").hint("enqueue each step's layers")
}
