//! Pinned host memory that the driver allocates: physical memory on a NUMA node of the host, mapped for device and
//! host.
//!
//! **What it is for.** A GPU reaches registered memory in pages of 4 KiB: its page tables take 2 MiB of its memory
//! for each GiB, and random rows miss its translation caches. Memory from the driver has the driver's granularity, 2
//! MiB on present GPUs, for host and device alike. Whether that makes gathers faster has not been measured, so
//! registered memory is the default.
//!
//! **Where.** On the given node, or on the node that the driver reports as nearest to the device; on node 0 where the
//! system has no nodes, as the driver's header asks. The location "node of the current thread" cannot be used: the
//! driver refuses to create memory there.
//!
//! **Access** is granted to the device and to the host, by one call each. No other device gets access: where devices
//! cannot reach each other, drivers refuse to grant two of them access to the same memory (NCCL issue 1838).
//!
//! **Reasons for an error**: a driver below CUDA 12.2, a device without such memory, a container that may not bind
//! memory to nodes, a node without memory or processors. There is no silent fallback, so that a measurement is of the
//! memory that was asked for.

use std::ptr::NonNull;

use super::driver::{Access, Context, DriverResult, Location, Property, Refusal, attribute, code, flag};
use super::memory::{self, Physical, Range, Worker};
use crate::error::{Error, Kind, Result};
use crate::os::Map;
use crate::sync::Arc;

const OPERATION: &str = "make host memory";

/// The oldest driver that allocates memory on a host node.
const OLDEST_DRIVER: i32 = 12_020;

/// The oldest driver that reliably reports whether a device has such memory; with an older one the allocation is
/// tried.
const ASKED_DRIVER: i32 = 12_090;

/// The hint of its errors.
pub(super) const INSTEAD: &str = "register the system's memory instead, which is the default";

/// The hint where physical memory was refused.
const BOUND: &str =
    "register the system's memory, or let the process take memory of the node (docker: --cap-add SYS_NICE)";

/// Checks that the driver and the device support such memory.
pub(super) fn check(context: &Context) -> Result<()> {
    let version = context.version();
    if version < OLDEST_DRIVER {
        return Err(Error::new(Kind::Unsupported, OPERATION)
            .at("the driver is too old to make host memory")
            .with("found", version.unsigned_abs())
            .with("wanted", OLDEST_DRIVER.unsigned_abs())
            .hint("install NVIDIA's driver of release 535 or newer, or register the system's memory"));
    }
    let has = || context.ask(attribute::HOST_NUMA_MEMORY).map(|has| has != 0);
    if version < ASKED_DRIVER || has().map_err(|refusal| refusal.error(OPERATION))? {
        return Ok(());
    }
    Err(Error::new(Kind::Unsupported, OPERATION)
        .at("the device has no host memory of the driver's")
        .hint(INSTEAD))
}

/// The parts of a mapping, in the order in which they are freed.
#[derive(Debug)]
struct Hosted {
    _range: Range,
    _pieces: Vec<(Physical, u64)>,
}

/// Allocates at least `bytes` bytes, in consecutive pieces of at most `chunk` bytes, and writes zeros.
pub(super) fn make(
    context: &Arc<Context>,
    worker: &Worker,
    bytes: u64,
    node: Option<u32>,
    chunk: u64,
) -> Result<Map> {
    let place = place(context, node)?;
    let of = |error: Error| error.with("wanted", bytes).with("node", place.ordinal.unsigned_abs());
    let failed = |refusal: Refusal| of(refused(refusal, INSTEAD));
    let wanted = Property { kind: flag::MEMORY_PINNED, handles: 0, location: place, unused: [0; 2] };
    let page = memory::granularity(context, &wanted).map_err(|refusal| of(not_made(refusal, INSTEAD)))?;
    let Some(rounded) = bytes.checked_next_multiple_of(page).filter(|rounded| *rounded > 0) else {
        return Err(Error::new(Kind::InvalidConfig, OPERATION).at("bytes").with("bytes", bytes));
    };
    let pieces = pieces(context, &wanted, rounded, (chunk / page).max(1) * page);
    let pieces = pieces.map_err(|refusal| of(not_made(refusal, BOUND)))?;
    let range = mapped(context, place, &pieces).map_err(failed)?;
    worker.zero(range.address, rounded).map_err(failed)?;
    let Some(start) = NonNull::new(range.address as *mut u8) else {
        return Err(Error::new(Kind::DeviceFailed, OPERATION).at("no address"));
    };
    let owner = Box::new(Hosted { _range: range, _pieces: pieces });
    // SAFETY: the driver mapped so many bytes at this address for the host to read and write, until `owner` unmaps
    // them; zeros were written to all of them.
    Ok(unsafe { Map::given(start, rounded, page, owner) })
}

/// The location for the memory.
fn place(context: &Context, node: Option<u32>) -> Result<Location> {
    let ordinal = match node {
        Some(node) => i32::try_from(node).map_err(|_| {
            let error = Error::new(Kind::InvalidConfig, OPERATION).at("no such node").with("node", node);
            error.hint("name a NUMA node of the system, or none for the node nearest to the device")
        })?,
        None => {
            let beside = context.ask(attribute::HOST_NUMA_ID);
            beside.map_err(|refusal| refusal.error(OPERATION))?.max(0)
        }
    };
    Ok(Location { kind: flag::LOCATION_HOST_NUMA, ordinal })
}

/// Allocates `bytes` bytes of physical memory in pieces, with each piece's size.
fn pieces(
    context: &Arc<Context>,
    wanted: &Property,
    bytes: u64,
    chunk: u64,
) -> DriverResult<Vec<(Physical, u64)>> {
    let mut pieces = Vec::new();
    let mut left = bytes;
    while left > 0 {
        let part = chunk.min(left);
        pieces.push((Physical::plain(context, part, wanted)?, part));
        left -= part;
    }
    Ok(pieces)
}

/// Maps the pieces one after another, for device and host.
fn mapped(context: &Arc<Context>, place: Location, pieces: &[(Physical, u64)]) -> DriverResult<Range> {
    let parts: Vec<_> = pieces.iter().map(|(piece, bytes)| (piece, 0, *bytes)).collect();
    let range = Range::over(context, &parts)?;
    let host = Access { location: place, flags: flag::ACCESS_READ_WRITE };
    context.relaxed()?.set_access(range.address, range.bytes, &host, 1)?;
    Ok(range)
}

/// The error for a failed allocation. Drivers report a missing node, or a container that may not bind memory to it,
/// as an invalid value.
fn not_made(refusal: Refusal, instead: &'static str) -> Error {
    match refusal.code {
        code::INVALID_VALUE => withheld(&refusal.error(OPERATION), instead),
        _ => refused(refusal, instead),
    }
}

/// The error for a refusal. It counts as the system's ([`Kind::OsRefused`]), not the device's, unless the context is
/// lost.
fn refused(refusal: Refusal, instead: &'static str) -> Error {
    let is_withheld = code::is_withheld(refusal.code);
    let error = refusal.error(OPERATION);
    match (is_withheld, error.kind()) {
        (true, _) => withheld(&error, instead),
        (false, Kind::OutOfMemory) => {
            error.hint("ask for less than the node has free, or register the system's memory")
        }
        _ => error,
    }
}

fn withheld(error: &Error, instead: &'static str) -> Error {
    Error::new(Kind::OsRefused, OPERATION).at(error.place().to_owned()).hint(instead)
}
