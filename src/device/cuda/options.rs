//! The options of a CUDA device, and their checks.
//!
//! The options say which driver and device to use, where host memory comes from, and how kernels are launched. They
//! are checked before the driver is loaded, and once more against its version. What needs the device itself is
//! checked when the device is made.

use super::errors::NAME;
use crate::device::rates::GATHER_BLOCKS;
use crate::error::{Error, Kind, Result};
use crate::os::{Faults, NoFaults};
use crate::sync::Arc;

/// The oldest driver whose captured graphs keep the edges of early launches (programmatic dependent launch).
const EARLY_LAUNCH_DRIVER: i32 = 12_030;

/// The most threads per block that the kernels are compiled for.
pub(super) const THREADS_MAX: u32 = 512;

/// The most bytes of a page's piece that a kernel copies: 32 planes of them are less than the words that it counts.
const COPY_ENGINE_BYTES_MAX: u64 = 64 << 20;

/// The source of the host memory for a cache's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostMemory {
    /// The system's memory, registered with the driver. The GPU reaches it in pages of 4 KiB.
    #[default]
    Registered,
    /// The driver's own memory on a NUMA node of the host. The GPU reaches it in pages of 2 MiB, so its page tables
    /// take almost none of the GPU's memory. It needs a driver of CUDA 12.2 or newer. Other processes, and other
    /// devices of this process, cannot use it. Which of the two is faster at a pool's real size has not been
    /// measured.
    Driver,
}

/// The options of a CUDA device.
#[derive(Clone)]
pub struct CudaOptions {
    /// The device's number in the driver's order, from 0.
    pub device: u32,
    /// The driver's library, by path or name; `None` for `libcuda.so.1`.
    pub library: Option<String>,
    /// Whether the library is unloaded with the last device that uses it. For tests, which load many; otherwise
    /// threads that a driver has started may still run its code.
    pub unload: bool,
    /// Injected faults, for tests.
    pub faults: Arc<dyn Faults>,
    /// The most bytes of host memory in one registration, rounded down to pages. Drivers refuse very large
    /// registrations.
    pub registration_chunk: u64,
    /// The source of the host memory for a cache's rows.
    pub host_memory: HostMemory,
    /// Thread blocks of a gather: a limit on the multiprocessors that it takes from other work; [`GATHER_BLOCKS`] by
    /// default.
    pub gather_blocks: u32,
    /// Threads of a block: a multiple of 32 up to 512.
    pub threads: u32,
    /// Programmatic dependent launch: a kernel is launched before the previous one has ended, and waits for it on the
    /// device. It needs compute capability 9.0 and a driver of CUDA 12.3, because older drivers lose such edges in
    /// captured graphs. It only helps where one of forebay's kernels follows another on the same stream, which is the
    /// order `none`. In DA and DBA there is an event between resolve and gather, and no kernel starts early across an
    /// event.
    pub programmatic: bool,
    /// Gathers with bulk copies; compute capability 9.0 or later.
    pub bulk: bool,
    /// From how many bytes on a copy engine copies a piece of a dense cache's page; at most 64 MiB. A kernel copies
    /// shorter ones, many in one launch. The default of 28 KiB is a guess: no GPU has measured it.
    pub copy_engine_bytes: u64,
    /// Whether one driver call enqueues up to 256 copies of a copy engine (`cuMemcpyBatchAsync`, from CUDA 12.8 on).
    /// An older driver takes a call for each copy in any case.
    pub batch_copies: bool,
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
            copy_engine_bytes: 28 << 10,
            batch_copies: true,
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
            .field("copy_engine_bytes", &self.copy_engine_bytes)
            .field("batch_copies", &self.batch_copies)
            .finish_non_exhaustive()
    }
}

impl CudaOptions {
    /// Checks what needs no driver.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |place, value: u64, hint| {
            Err(Error::new(Kind::InvalidConfig, NAME).at(place).with("value", value).hint(hint))
        };
        let threads = self.threads;
        if threads == 0 || threads > THREADS_MAX || !threads.is_multiple_of(u32::BITS) {
            return wrong("threads", threads.into(), "pass a multiple of 32 up to 512");
        }
        if self.gather_blocks == 0 {
            return wrong("gather_blocks", 0, "pass at least 1");
        }
        if self.copy_engine_bytes > COPY_ENGINE_BYTES_MAX {
            return wrong("copy_engine_bytes", self.copy_engine_bytes, "pass at most 64 MiB");
        }
        if self.registration_chunk == 0 {
            return wrong("registration_chunk", 0, "pass at least a page");
        }
        Ok(())
    }

    /// Checks the options that need a newer driver than the device does.
    pub(super) fn check_driver(&self, version: i32) -> Result<()> {
        if self.programmatic && version < EARLY_LAUNCH_DRIVER {
            return Err(Error::new(Kind::Unsupported, NAME)
                .at("the driver is too old for early launches (programmatic)")
                .with("found", version.unsigned_abs())
                .with("wanted", EARLY_LAUNCH_DRIVER.unsigned_abs())
                .hint("install NVIDIA's driver of release 545 or newer, or do without early launches"));
        }
        Ok(())
    }
}
