//! What a tool asks of a device beside serving: what it is, what it can do, how long work took, what the link
//! gives at best, and work of a known kind to hide a gather behind.
//!
//! None of it stands on the path of a step. A first use may take memory; later ones take none, so that what is
//! measured is not the measuring. **Times** are a GPU's own where there is one, taken when the stream comes to
//! a [mark](Probe::mark), and the host's clock elsewhere: differences mean something, single readings do not.
//!
//! [`Probe::carry`] is what a gather is compared with: one long run of bytes, moved as a gather moves rows, by
//! processors that read the other side's memory themselves. A copy engine ([`Device::copy`]) is the link's other
//! speed; on several machines the two differ by half ([`super::rates`]).

use crate::device::{Device, Slice, Stream};
use crate::error::Result;

/// A point in a stream whose time is kept; of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u64);

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The maker's name for it.
    pub name: String,
    /// Bytes of its memory; 0 where that is not known.
    pub memory_total: u64,
    /// Bytes of it that can be taken now.
    pub memory_free: u64,
    /// Multiprocessors of a GPU; hardware threads of the host that this process may use.
    pub processors: u32,
    /// Engines that copy by themselves; none on the host.
    pub copy_engines: u32,
    /// Of a GPU.
    pub gpu: Option<GpuFacts>,
}

/// What a GPU is besides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// The newest CUDA that its driver knows: major, minor.
    pub driver: (u32, u32),
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Its place on the bus, as the system writes it: `0000:01:00.0`.
    pub bus: String,
}

/// Something that a device may be able to do. It was tried, not asked for: drivers name abilities that fail.
#[derive(Clone, Debug)]
pub struct Ability {
    /// What.
    pub name: &'static str,
    /// Why not, if not.
    pub usable: Result<()>,
}

/// A device that can be measured. See the module's head.
pub trait Probe: Device {
    /// What the device is, now.
    ///
    /// # Errors
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn facts(&self) -> Result<Facts>;

    /// What the device may be able to do beside what every cache needs.
    fn abilities(&self) -> Vec<Ability>;

    /// A new stream as an engine has them: where streams have priorities, those of [`Device::stream`] go before it.
    ///
    /// # Errors
    /// As [`Device::stream`].
    fn engine_stream(&self) -> Result<Stream> {
        self.stream()
    }

    /// A new mark, to be stamped any number of times: the last one counts.
    ///
    /// # Errors
    /// [`Kind::Exhausted`](crate::Kind::Exhausted), [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn mark(&self) -> Result<Mark>;

    /// Keeps the time at which `stream` comes to this point. Not while the stream is being captured.
    ///
    /// # Errors
    /// As [`Device::record`].
    fn stamp(&self, mark: Mark, stream: Stream) -> Result<()>;

    /// Microseconds between the last stamps of two marks; waits for both. Not less than 0: marks of two streams
    /// may have been reached in the other order.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for a mark that was never stamped;
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn elapsed_us(&self, from: Mark, to: Mark) -> Result<f64>;

    /// Reads bytes as the device sees them, as they are now, and waits for them.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for a slice of another device or length;
    /// [`Kind::DeviceFailed`](crate::Kind::DeviceFailed).
    fn read(&self, slice: Slice, bytes: &mut [u8]) -> Result<()>;

    /// Writes bytes as the device sees them, now, and waits until they are there.
    ///
    /// # Errors
    /// As [`Probe::read`].
    fn write(&self, slice: Slice, bytes: &[u8]) -> Result<()>;

    /// Copies one long run as rows are copied, by at most `blocks` thread blocks of a GPU, or by the stream's
    /// thread. Addresses and length are multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`](crate::Kind::OutOfRange) for slices of another device or of different lengths, and for
    /// what is no multiple of 16 bytes.
    fn carry(&self, stream: Stream, from: Slice, to: Slice, blocks: u32) -> Result<()>;

    /// Matrix products as an engine's work: all processors of a GPU, or the stream's thread. Its time grows
    /// linearly with `rounds`.
    ///
    /// # Errors
    /// As [`Device::record`]; [`Kind::OutOfMemory`](crate::Kind::OutOfMemory) at the first use.
    fn compute(&self, stream: Stream, rounds: u32) -> Result<()>;

    /// The same products as [`Probe::compute`] makes, by a persistent kernel, as those of DeepGEMM, FlashMLA or DeepEP
    /// are: on a GPU one block on each multiprocessor but `left` of them, which has all of its shared memory and stays
    /// until all is done: from compute capability 8.0 on, where every block needs 1 KB of it, no other kernel comes to
    /// run there; before, none that takes any. A stream's thread has nothing to leave.
    ///
    /// # Errors
    /// As [`Probe::compute`]; [`Kind::OutOfRange`](crate::Kind::OutOfRange) where none is left for the work.
    fn compute_persistent(&self, stream: Stream, rounds: u32, left: u32) -> Result<()> {
        let _ = left;
        self.compute(stream, rounds)
    }
}
