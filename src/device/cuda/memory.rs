//! Device memory, and host memory that the device reaches. Each type owns its memory and frees it when dropped, so
//! that a failed construction leaks nothing.
//!
//! **All calls here block the host**, some of them until the device is idle. They are for construction and the end,
//! never for a step. They run with the thread's capture mode relaxed, so that an engine's thread may be capturing at
//! the same time.
//!
//! **Memory is zeroed before it is returned.** The zeros are written on a stream of the device's own, and the call
//! waits for them. So the first user, on any stream, finds zeros, and no late write overwrites its data.
//!
//! Host memory that the driver did not allocate is in `registration`.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::driver::{Access, Context, Current, DriverResult, Handle, Property, Refusal, code, flag};
use super::registration::same_address;
use crate::error::{Error, Kind, Result};
use crate::os::{Protection, move_bytes};
use crate::sync::{Arc, Mutex};

/// The device's private stream for work that the host waits for.
#[derive(Debug)]
pub(super) struct Worker {
    context: Arc<Context>,
    /// Locked during each use, so that a caller waits only for its own work.
    stream: Mutex<Handle>,
}

impl Worker {
    pub fn new(context: &Arc<Context>) -> DriverResult<Worker> {
        let current = context.relaxed()?;
        let mut stream = 0;
        current.stream_create(&mut stream, flag::STREAM_NON_BLOCKING, 0)?;
        Ok(Worker { context: Arc::clone(context), stream: Mutex::new(stream) })
    }

    /// Enqueues on the worker's stream, and waits until it has been done.
    pub fn run(&self, work: impl FnOnce(&Current<'_>, Handle) -> DriverResult) -> DriverResult {
        let stream = self.stream.lock();
        let current = self.context.relaxed()?;
        let enqueued = work(&current, *stream);
        // Work enqueued before a refusal still uses the caller's memory, so wait for it.
        let ended = current.stream_synchronize(*stream);
        enqueued.and(ended)
    }

    /// Copies words to the device.
    pub fn upload(&self, to: Handle, bytes: &[u8]) -> DriverResult {
        self.run(|current, stream| current.copy(to, bytes.as_ptr() as Handle, bytes.len() as u64, stream))
    }

    /// Copies words from the device.
    pub fn download(&self, from: Handle, bytes: &mut [u8]) -> DriverResult {
        let (to, count) = (bytes.as_mut_ptr() as Handle, bytes.len() as u64);
        self.run(|current, stream| current.copy(to, from, count, stream))
    }

    /// Writes zeros.
    pub fn zero(&self, address: Handle, bytes: u64) -> DriverResult {
        self.run(|current, stream| current.fill_bytes(address, 0, bytes, stream))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let stream = *self.stream.lock();
        self.context.give_back(|driver| driver.stream_destroy(stream));
    }
}

/// Device memory, zero at first.
#[derive(Debug)]
pub(super) struct Allocation {
    context: Arc<Context>,
    pub address: Handle,
    pub bytes: u64,
}

impl Allocation {
    pub fn new(context: &Arc<Context>, worker: &Worker, bytes: u64) -> Result<Allocation> {
        const OPERATION: &str = "allocate device memory";
        let failed = |refusal: Refusal| refusal.error(OPERATION).with("wanted", bytes);
        if bytes == 0 {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("bytes").with("bytes", 0_u32));
        }
        let mut address = 0;
        context.relaxed().and_then(|current| current.allocate(&mut address, bytes)).map_err(failed)?;
        let taken = Allocation { context: Arc::clone(context), address, bytes };
        worker.zero(address, bytes).map_err(failed)?;
        Ok(taken)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.free(self.address));
    }
}

/// Pinned host memory that the driver allocated, zero at first.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<Context>,
    /// The address, the same for host and device.
    address: Handle,
    words: usize,
}

impl Pinned {
    pub fn new(context: &Arc<Context>, words: usize) -> Result<Pinned> {
        let bytes = 4 * words as u64;
        let failed = |refusal: Refusal| refusal.error("allocate pinned memory").with("wanted", bytes);
        let current = context.relaxed().map_err(failed)?;
        let mut address = 0;
        current.host_allocate(&mut address, bytes, flag::HOST_PORTABLE_MAPPED).map_err(failed)?;
        let taken = Pinned { context: Arc::clone(context), address, words };
        same_address(&current, address)?;
        // SAFETY: the driver gave so many bytes at this address, to this process alone.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, 4 * words) };
        Ok(taken)
    }

    /// Writes words from word `first` on.
    pub fn write(&self, first: usize, words: &[u32]) {
        let fits = first.checked_add(words.len()).is_some_and(|end| end <= self.words);
        debug_assert!(fits, "words beyond the pinned memory");
        if fits {
            // SAFETY: inside the memory, as was checked; no reference to it exists, and the device does not
            // read words that are being staged, which the contract of join and truncate demands of the caller.
            unsafe {
                move_bytes(words.as_ptr().cast(), (self.address as *mut u8).add(4 * first), 4 * words.len())
            };
        }
    }

    /// The address of word `first`, as the device sees it.
    pub fn at(&self, first: usize) -> Handle {
        self.address + 4 * first as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.give_back(|driver| driver.host_free(self.address));
    }
}

/// Physical memory.
#[derive(Debug)]
pub(super) struct Physical {
    context: Arc<Context>,
    memory: Handle,
    bytes: u64,
    /// Whether it can be exported as a descriptor.
    shared: bool,
}

/// The properties of physical memory: on this device, and exportable as a descriptor if the device reports support.
pub(super) fn property(context: &Context) -> Property {
    Property {
        kind: flag::MEMORY_PINNED,
        handles: if context.descriptors { flag::HANDLE_DESCRIPTOR } else { 0 },
        location: context.location(),
        unused: [0; 2],
    }
}

/// The multiple that offsets and sizes of mappings must be.
pub(super) fn granularity(context: &Context, of: &Property) -> DriverResult<u64> {
    let mut bytes = 0;
    context.enter()?.granularity(&mut bytes, of, 0)?;
    Ok(bytes.max(1))
}

impl Physical {
    /// Allocates `bytes`, a multiple of the granularity, without zeroing.
    pub fn plain(context: &Arc<Context>, bytes: u64, wanted: &Property) -> DriverResult<Physical> {
        let mut memory = 0;
        context.relaxed()?.memory_create(&mut memory, bytes, wanted, 0)?;
        Ok(Physical { context: Arc::clone(context), memory, bytes, shared: wanted.handles != 0 })
    }

    /// Allocates `bytes`, rounded up to `grain`, and writes zeros.
    pub fn new(context: &Arc<Context>, worker: &Worker, bytes: u64, grain: u64) -> Result<Physical> {
        const OPERATION: &str = "allocate physical memory";
        let failed = |refusal: Refusal| refusal.error(OPERATION).with("wanted", bytes);
        let rounded = bytes.checked_next_multiple_of(grain).filter(|rounded| *rounded > 0);
        let Some(rounded) = rounded else {
            return Err(Error::new(Kind::InvalidConfig, OPERATION).at("bytes").with("bytes", bytes));
        };
        let wanted = property(context);
        let taken = match Physical::plain(context, rounded, &wanted) {
            // A device may report handles that the system does not permit: then allocate memory for this process
            // alone.
            Err(refusal) if wanted.handles != 0 && code::is_withheld(refusal.code) => {
                Physical::plain(context, rounded, &Property { handles: 0, ..wanted })
            }
            made => made,
        };
        let taken = taken.map_err(failed)?;
        let range = Range::over(context, &[(&taken, 0, rounded)]).map_err(failed)?;
        worker.zero(range.address, rounded).map_err(failed)?;
        Ok(taken)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A descriptor with which another process or device can import the same memory.
    pub fn export(&self) -> Result<OwnedFd> {
        const OPERATION: &str = "export device memory";
        if !self.shared {
            return Err(Error::new(Kind::Unsupported, OPERATION)
                .at("the device cannot export its memory as a descriptor")
                .hint("share memory between devices that have them"));
        }
        let mut handle = [0; 8];
        let exported = self
            .context
            .relaxed()
            .and_then(|c| c.memory_export(&mut handle, self.memory, flag::HANDLE_DESCRIPTOR, 0));
        exported.map_err(|refusal| refusal.error(OPERATION))?;
        // The descriptor is an integer in the first four bytes of the handle (little-endian).
        let [first, ..] = handle;
        // SAFETY: the driver opened this descriptor for the caller, who closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(first as i32) })
    }

    /// Imports the memory of a descriptor from [`Physical::export`], of this process or another.
    pub fn import(context: &Arc<Context>, descriptor: &OwnedFd, bytes: u64) -> Result<Physical> {
        const OPERATION: &str = "import device memory";
        let (mut memory, number) = (0, i64::from(descriptor.as_raw_fd()).unsigned_abs());
        let imported = context
            .relaxed()
            .and_then(|current| current.memory_import(&mut memory, number, flag::HANDLE_DESCRIPTOR));
        imported.map_err(|refusal| refusal.error(OPERATION))?;
        Ok(Physical { context: Arc::clone(context), memory, bytes, shared: true })
    }
}

/// Allocates memory with a fabric handle and frees it again, to try whether that works.
#[cfg(feature = "measure")]
pub(super) fn try_fabric(context: &Arc<Context>) -> DriverResult {
    let wanted = Property { handles: flag::HANDLE_FABRIC, ..property(context) };
    let current = context.relaxed()?;
    let (mut bytes, mut memory) = (0, 0);
    current.granularity(&mut bytes, &wanted, 0)?;
    current.memory_create(&mut memory, bytes, &wanted, 0)?;
    let taken = Physical { context: Arc::clone(context), memory, bytes, shared: true };
    current.memory_export(&mut [0; 8], taken.memory, flag::HANDLE_FABRIC, 0)
}

impl Drop for Physical {
    fn drop(&mut self) {
        // Memory that is still mapped lives until it is unmapped.
        self.context.give_back(|driver| driver.memory_release(self.memory));
    }
}

/// One address range over pieces of physical memory.
#[derive(Debug)]
pub(super) struct Range {
    context: Arc<Context>,
    pub address: Handle,
    /// The bytes of the reserved addresses.
    pub bytes: u64,
    protection: Protection,
    /// The bytes of each mapped piece, by its address.
    mapped: BTreeMap<Handle, u64>,
}

/// A piece of physical memory: the memory, the offset in it, and the length in bytes.
pub(super) type Part<'a> = (&'a Physical, u64, u64);

/// The error of pieces that the driver refused to map.
pub(super) fn unmappable(operation: &'static str, refusal: Refusal, parts: &[Part<'_>]) -> Error {
    let total: u64 = parts.iter().map(|(_, _, bytes)| bytes).sum();
    match refusal.error(operation) {
        e if matches!(e.kind(), Kind::OutOfMemory | Kind::Unsupported) || code::is_lost(&e) => {
            e.with("wanted", total)
        }
        e => {
            let e = Error::new(Kind::OsRefused, operation).at(e.place().to_owned()).with("wanted", total);
            match parts.iter().any(|(_, offset, _)| *offset > 0) {
                true => e.hint("this driver maps a backing from its beginning only: take one for each piece"),
                false => e,
            }
        }
    }
}

impl Range {
    /// Maps pieces one after another, for the device to read and write.
    pub fn over(context: &Arc<Context>, parts: &[Part<'_>]) -> DriverResult<Range> {
        Range::new(context, parts, Protection::ReadWrite)
    }

    /// Maps pieces one after another.
    pub fn new(context: &Arc<Context>, parts: &[Part<'_>], protection: Protection) -> DriverResult<Range> {
        let bytes = parts.iter().map(|(_, _, bytes)| bytes).sum();
        let current = context.relaxed()?;
        let mut address = 0;
        current.address_reserve(&mut address, bytes, 0, 0, 0)?;
        let mapped = BTreeMap::new();
        let mut range = Range { context: Arc::clone(context), address, bytes, protection, mapped };
        range.map(&current, address, parts)?;
        Ok(range)
    }

    /// Maps pieces from `start` on, where nothing is mapped.
    fn map(&mut self, current: &Current<'_>, start: Handle, parts: &[Part<'_>]) -> DriverResult {
        let mut at = start;
        for (physical, offset, bytes) in parts {
            current.map(at, *bytes, *offset, physical.memory, 0)?;
            self.mapped.insert(at, *bytes);
            at += bytes;
        }
        self.access(current, start, at - start)
    }

    /// Lets the device access whole pieces. One call for all of them, because this call is the slow one.
    fn access(&self, current: &Current<'_>, start: Handle, bytes: u64) -> DriverResult {
        let flags = match self.protection {
            Protection::Read => flag::ACCESS_READ,
            Protection::ReadWrite => flag::ACCESS_READ_WRITE,
        };
        let access = Access { location: self.context.location(), flags };
        current.set_access(start, bytes, &access, 1)
    }

    /// Unmaps the pieces of some addresses.
    fn unmap(&mut self, current: &Current<'_>, start: Handle, bytes: u64) -> DriverResult {
        let pieces: Vec<(Handle, u64)> =
            self.mapped.range(start..start + bytes).map(|(at, bytes)| (*at, *bytes)).collect();
        for (at, bytes) in pieces {
            current.unmap(at, bytes)?;
            self.mapped.remove(&at);
        }
        Ok(())
    }

    /// Maps `new` in place of `old`, which are whole pieces of the same bytes, from `offset` on. The second result is
    /// the refusal of the attempt to map the old ones again, after which some of the addresses map nothing.
    pub fn replace(
        &mut self,
        offset: u64,
        old: &[Part<'_>],
        new: &[Part<'_>],
    ) -> DriverResult<std::result::Result<(), (Refusal, DriverResult)>> {
        let context = Arc::clone(&self.context);
        let current = context.relaxed()?;
        let (start, bytes) = (self.address + offset, old.iter().map(|(_, _, bytes)| bytes).sum());
        let unmapped = self.unmap(&current, start, bytes);
        let Err(refusal) = unmapped.and_then(|()| self.map(&current, start, new)) else { return Ok(Ok(())) };
        Ok(Err((refusal, self.restore(&current, start, bytes, old))))
    }

    /// Maps the old pieces again, whichever of them and of the new ones are mapped.
    fn restore(
        &mut self,
        current: &Current<'_>,
        start: Handle,
        bytes: u64,
        old: &[Part<'_>],
    ) -> DriverResult {
        self.unmap(current, start, bytes)?;
        self.map(current, start, old)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        for (at, bytes) in &self.mapped {
            self.context.give_back(|driver| driver.unmap(*at, *bytes));
        }
        self.context.give_back(|driver| driver.address_free(self.address, self.bytes));
    }
}
