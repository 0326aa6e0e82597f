//! What tools ask of a device in addition to serving: its facts and abilities, times of work, the best speed of the
//! link, and calibrated compute work that a gather can hide behind.
//!
//! No step uses any of it. A first use may allocate memory; later uses allocate none, so the measurement does not
//! disturb itself. **Times** come from the GPU's own clock, stamped when the stream reaches a [mark](Probe::mark),
//! and from the host's clock on other devices. Only differences of times have a meaning.
//!
//! [`Probe::carry`] is the reference for a gather: one long run of bytes, moved as a gather moves rows, by processors
//! that read the other side's memory directly. A copy engine ([`Device::copy`]) has another speed on the same link;
//! on several machines the two differ by half ([`super::rates`]).

use crate::device::{Device, Slice, Stream};
use crate::error::Result;

/// A point in a stream whose time the device keeps. It belongs to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u64);

/// The facts of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The maker's name for the device.
    pub name: String,
    /// Bytes of its memory; 0 where unknown.
    pub memory_total: u64,
    /// Bytes of its memory that are free now.
    pub memory_free: u64,
    /// Multiprocessors of a GPU; hardware threads of the host that this process may use.
    pub processors: u32,
    /// Copy engines (DMA); 0 on the host.
    pub copy_engines: u32,
    /// Further facts of a GPU.
    pub gpu: Option<GpuFacts>,
}

/// The facts that only a GPU has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// The newest CUDA version that its driver supports: major, minor.
    pub driver: (u32, u32),
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Its PCI address, as the system writes it: `0000:01:00.0`.
    pub bus: String,
}

/// An optional ability of a device. The probe tries it instead of reading an attribute, because drivers advertise
/// abilities that fail.
#[derive(Clone, Debug)]
pub struct Ability {
    /// The ability's name.
    pub name: &'static str,
    /// The error of the attempt, if it failed.
    pub usable: Result<()>,
}

/// A device that can be measured. See the head of `device/probe.rs` for times and ceilings.
pub trait Probe: Device {
    /// The device's facts at this moment.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn facts(&self) -> Result<Facts>;

    /// Tries the abilities that not every cache needs.
    fn abilities(&self) -> Vec<Ability>;

    /// Creates a stream as an engine does. Where streams have priorities, those of [`Device::stream`] have a higher
    /// one.
    ///
    /// # Errors
    /// As [`Device::stream`].
    fn engine_stream(&self) -> Result<Stream> {
        self.stream()
    }

    /// Creates a mark. It can be stamped any number of times; the last stamp counts.
    ///
    /// # Errors
    /// [`Kind::Exhausted`](crate::Kind::Exhausted), [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn mark(&self) -> Result<Mark>;

    /// Enqueues a time stamp: the mark keeps the time at which `stream` reaches this point. Not while the stream is
    /// being captured.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn stamp(&self, mark: Mark, stream: Stream) -> Result<()>;

    /// Microseconds between the last stamps of two marks; waits for both. At least 0, also where marks of two streams
    /// were reached in the other order.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for a mark that was never stamped;
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn elapsed_us(&self, from: Mark, to: Mark) -> Result<f64>;

    /// Reads bytes of device memory as they are now, and waits for them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for a slice of another device or length;
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()>;

    /// Writes bytes of device memory now, and waits until they are there.
    ///
    /// # Errors
    /// As [`Probe::read`].
    fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()>;

    /// Copies one long run with the same instructions as rows: by at most `blocks` thread blocks of a GPU, or by the
    /// stream's thread. Addresses and length are multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for slices of another device, of different lengths, or that are
    /// no multiple of 16 bytes.
    fn carry(&self, stream: Stream, from: Slice, to: Slice, blocks: u32) -> Result<()>;

    /// Enqueues matrix products as a stand-in for an engine's work, on all multiprocessors of a GPU or on the
    /// stream's thread. The time grows linearly with `rounds`.
    ///
    /// # Errors
    /// As [`Device::record`]; [`Kind::OutOfMemory`](crate::Kind::OutOfMemory) at the first use.
    fn compute(&self, stream: Stream, rounds: u32) -> Result<()>;

    /// Enqueues the products of [`Probe::compute`] as a persistent kernel, as DeepGEMM, FlashMLA or DeepEP launch
    /// them. On a GPU there is one block on each multiprocessor, except on `left` of them. Each block has all of its
    /// multiprocessor's shared memory and stays until the work is done. From compute capability 8.0 on, every block
    /// needs 1 KB of shared memory, so no other kernel can run on those multiprocessors. Before 8.0, no kernel that
    /// takes shared memory can. A stream's thread ignores `left`.
    ///
    /// # Errors
    /// As [`Probe::compute`]; [`Kind::OutOfRange`](crate::Kind::OutOfRange) if `left` leaves no multiprocessor for
    /// the work.
    fn compute_persistent(&self, stream: Stream, rounds: u32, left: u32) -> Result<()> {
        let _ = left;
        self.compute(stream, rounds)
    }
}
