//! Pinned host memory: its options, how it is taken, and whether the machine has it.
//!
//! The memory is one mapping, on huge pages, locked and bound to a node where the options say so and the system allows
//! it. Each option that the system refuses is a [`Fallback`], and the memory is taken without it. If the device
//! allocates host memory itself ([`Device::host_memory`]), that memory is used instead: pinned, on the device's own
//! pages, without a descriptor.
//!
//! A machine that lacks the memory would let it be mapped, and would later kill some process. So the caller first
//! compares what it will take with what the system reports ([`check_available`]). It may be told to skip that: then the
//! system reports nothing ([`Overcommits`]).
//!
//! It does not divide the memory, and it never gives it back: the device keeps a registered mapping until the device is
//! dropped.

use crate::device::{Device, Slice};
use crate::error::{Error, Kind, Result};
use crate::os::{Call, Fallback, Faults, Map, MemoryState, Request};
use crate::sync::Arc;

/// The options of the total pool's memory. [`Cache::fallbacks`](crate::Cache::fallbacks) lists the options that the
/// system refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Use huge pages.
    pub huge: bool,
    /// Allocate all physical memory at the start.
    pub populate: bool,
    /// Lock the memory.
    pub lock: bool,
    /// Bind the memory to this NUMA node.
    pub node: Option<u32>,
}

impl Default for Memory {
    /// The options for serving: huge pages, populated, locked.
    fn default() -> Self {
        Memory { huge: true, populate: true, lock: true, node: None }
    }
}

impl Memory {
    /// Addresses only. Memory follows where bytes are written.
    pub(crate) const LAZY: Memory = Memory { huge: false, populate: false, lock: false, node: None };

    /// The request for `bytes` bytes with these options, which another process may map too.
    pub(crate) const fn request(self, bytes: u64) -> Request {
        let Memory { huge, populate, lock, node } = self;
        Request { bytes, huge, populate, lock, node, shared: true }
    }
}

/// Takes host memory and registers it with `device`. Returns the mapping, its first `request.bytes` bytes as the device
/// addresses them, and the options that the system refused.
///
/// # Errors
/// [`Kind::OutOfMemory`], [`Kind::Overflow`], [`Kind::OsRefused`]; [`Kind::InvalidConfig`] for 0 bytes.
pub(crate) fn take(
    request: &Request,
    device: &dyn Device,
    faults: &dyn Faults,
) -> Result<(Arc<Map>, Slice, Vec<Fallback>)> {
    let (map, fallbacks) = match device.host_memory(request.bytes, request.node)? {
        Some(map) => (map, Vec::new()),
        None => Map::new(request, faults).map(|(map, fallbacks)| (Arc::new(map), fallbacks))?,
    };
    // A map is rounded up to pages.
    let slice = device.register(&map)?.part(0, request.bytes)?;
    Ok((map, slice, fallbacks))
}

/// Rejects `wanted` bytes if the system reports less available memory. If it reports none, it rejects nothing.
///
/// # Errors
/// [`Kind::OutOfMemory`] with `wanted` and `available`.
pub(crate) fn check_available(wanted: u64, state: &MemoryState) -> Result<()> {
    match state.available {
        Some(available) if available < wanted => Err(Error::new(Kind::OutOfMemory, "create")
            .at("memory of the machine")
            .with("wanted", wanted)
            .with("available", available)
            .hint("ask for less, or set overcommit if the machine can give more than the system reports")),
        _ => Ok(()),
    }
}

/// The system calls of a cache that overcommits: the system reports no available memory.
#[derive(Debug)]
pub(crate) struct Overcommits<'a>(pub(crate) &'a dyn Faults);

impl Faults for Overcommits<'_> {
    fn before(&self, call: Call) -> Option<i32> {
        self.0.before(call)
    }

    fn memory(&self, read: MemoryState) -> MemoryState {
        MemoryState { available: None, ..self.0.memory(read) }
    }

    fn passes(&self, bytes: usize) -> usize {
        self.0.passes(bytes)
    }
}
