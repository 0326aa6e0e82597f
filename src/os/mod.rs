//! All system calls of forebay: host memory, its descriptors, shared libraries, files.
//!
//! **What it is for.** The total pool is one long mapping that the device reads and writes directly. So it has to be
//! resident (populated, locked), near the device (bound to its NUMA node), cheap to translate (huge pages), and
//! mappable twice (a descriptor that [`Range`] maps again). A machine can refuse each of these while everything else
//! works. A refusal that leaves the memory usable is a [`Fallback`], which the call returns to its caller; any other
//! is an [`Error`].
//!
//! **Faults.** Each call first asks a [`Faults`], which may return an errno in the kernel's place. So every fallback
//! can be tested on any machine, and a scenario can be run once for each call that it makes, with that call failing.
//! It costs one indirect call per system call. A step makes no system call.
//!
//! **Invariants.** Every resource has an owner that frees it: mappings a [`Region`], descriptors an `OwnedFd`,
//! libraries a [`Library`], a half-written file the guard that removes it. No Rust reference into a mapping is ever
//! made, because devices, threads and other processes write it at the same time; [`Region`] defines what a copy then
//! means.
//!
//! **Crates.** nix, memmap2 or libloading make a call where that removes an unsafe block, and libc otherwise
//! (docs/design.md, "Packages").
//!
//! **What it does not do.** It reads no limits in advance except those of memory, and decides no sizes. It retries
//! only interrupted calls. Unmapping asks no fault, since no caller could handle one.

mod append;
mod bind;
mod descriptor;
mod file;
mod library;
mod limit;
mod lock;
mod machine;
mod map;
mod memfd;
mod memory;
mod numa;
mod partial;
mod random;
mod range;
mod region;
#[cfg(test)]
mod tests;

use std::{fmt, io};

use nix::errno::Errno;

use crate::error::{Error, Kind};
use crate::sync::{AtomicU64, Ordering};

pub use append::Appender;
pub use bind::nodes;
pub use descriptor::{receive, send};
pub use file::{Identity, identity, write_whole};
pub use library::Library;
pub use limit::unsignalled;
pub use machine::{memory, memory_state, node_beside, processor, threads};
pub use map::{Map, Request};
pub use memory::{MemoryState, page_size};
pub use numa::near;
pub use random::random;
pub use range::{Piece, Range};
pub use region::Region;
pub(crate) use region::move_bytes;

/// Which call a fault is injected into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `memfd_create` with the base page size.
    Memfd,
    /// `memfd_create` with huge pages.
    MemfdHuge,
    /// `fcntl` that forbids all holders of a descriptor to resize its memory.
    Seal,
    /// `ftruncate` of a memfd to its size, or of a file to its whole pieces.
    Truncate,
    /// `mmap` at an address of the system's choice.
    Map,
    /// `mmap` of a piece into a reserved range.
    MapFixed,
    /// `madvise` for transparent huge pages.
    AdviseHuge,
    /// `madvise` that makes all pages resident.
    Populate,
    /// `mlock`.
    Lock,
    /// `mbind`.
    Bind,
    /// `sched_setaffinity`.
    Affinity,
    /// `set_mempolicy`.
    Policy,
    /// Reading which NUMA nodes are online.
    Nodes,
    /// Reading how much memory and how many huge pages are free.
    MemoryState,
    /// `sendmsg` of a descriptor.
    SendDescriptor,
    /// `recvmsg` of a descriptor.
    ReceiveDescriptor,
    /// `dlopen`.
    OpenLibrary,
    /// `dlsym`.
    FindSymbol,
    /// Opening a file to write.
    CreateFile,
    /// Writing a part of a file.
    Write,
    /// `fsync` of a written file.
    Sync,
    /// `flock` of a file that is being written.
    LockFile,
    /// Opening the folder that a file is in.
    OpenFolder,
    /// `fsync` of that folder.
    SyncFolder,
    /// Renaming a written file to its place.
    Rename,
    /// `getrandom`.
    Random,
}

/// Decides before each call whether the call is made (`None`) or fails with an errno.
pub trait Faults: Send + Sync {
    /// The errno to fail `call` with; `None` lets it through.
    fn before(&self, call: Call) -> Option<i32>;

    /// The system's memory state to use; `read` is the real one.
    fn memory(&self, read: MemoryState) -> MemoryState {
        read
    }

    /// How many of the `bytes` of an appending write are passed on, as by a disk that fills up.
    fn passes(&self, bytes: usize) -> usize {
        bytes
    }
}

/// Lets every call through.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFaults;

impl Faults for NoFaults {
    fn before(&self, _: Call) -> Option<i32> {
        None
    }
}

/// The calls that an [`Inject`] fails.
#[derive(Debug)]
enum Aim {
    Each(Call),
    Nth(u64),
}

/// Fails chosen calls with a chosen errno, and counts all calls.
#[derive(Debug)]
pub struct Inject {
    aim: Aim,
    errno: i32,
    seen: AtomicU64,
}

impl Inject {
    /// Fails every `call`.
    pub fn call(call: Call, errno: i32) -> Self {
        Inject { aim: Aim::Each(call), errno, seen: AtomicU64::new(0) }
    }

    /// Fails the call number `n` of all calls, counted from 0. `u64::MAX` fails none and only counts.
    pub fn nth(n: u64, errno: i32) -> Self {
        Inject { aim: Aim::Nth(n), errno, seen: AtomicU64::new(0) }
    }

    /// The number of calls so far, including the failed ones.
    pub fn count(&self) -> u64 {
        self.seen.load(Ordering::Relaxed)
    }
}

impl Faults for Inject {
    fn before(&self, call: Call) -> Option<i32> {
        let number = self.seen.fetch_add(1, Ordering::Relaxed);
        let hit = match self.aim {
            Aim::Each(aimed) => aimed == call,
            Aim::Nth(n) => n == number,
        };
        hit.then_some(self.errno)
    }
}

/// An option that the system refused and the call did without. It displays as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The refused option: one of this type's constants.
    pub what: &'static str,
    /// The bytes concerned; for [`Fallback::NUMA_BINDING`] and [`Fallback::NODE_PROCESSORS`] the node.
    pub wanted: u64,
    /// The call and the system's reason.
    pub cause: String,
}

impl Fallback {
    /// The memory is on base pages; the system may merge them later.
    pub const HUGE_PAGES: &'static str = "huge pages";
    /// The thread runs on any processors.
    pub const NODE_PROCESSORS: &'static str = "processors of the node";
    /// The memory may be swapped out.
    pub const LOCKED_MEMORY: &'static str = "locked memory";
    /// The memory is on any node.
    pub const NUMA_BINDING: &'static str = "NUMA binding";
    /// The memory has no descriptor: no other process and no [`Range`] can map it.
    pub const SHARED_MEMORY: &'static str = "shared memory";
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if [Fallback::NUMA_BINDING, Fallback::NODE_PROCESSORS].contains(&self.what) {
            write!(f, "{} (wanted node {}): {}", self.what, self.wanted, self.cause)
        } else {
            write!(f, "{} (wanted {} bytes): {}", self.what, self.wanted, self.cause)
        }
    }
}

/// A refused call: its name and its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal {
    name: &'static str,
    errno: i32,
}

/// The result of a system call.
type OsResult<T> = std::result::Result<T, Refusal>;

impl Refusal {
    /// The refusal of call `name`. Where nix has no name for the number, errno still holds it.
    fn of(name: &'static str, errno: Errno) -> Self {
        let number = if errno == Errno::UnknownErrno { Errno::last_raw() } else { errno as i32 };
        Refusal { name, errno: number }
    }

    /// As [`Refusal::of`], for memmap2, which itself refuses only sizes that no address reaches.
    fn io(name: &'static str, error: &io::Error) -> Self {
        Refusal { name, errno: error.raw_os_error().unwrap_or(libc::ENOMEM) }
    }

    /// The refusal as an error: out of memory where the system says so, refused otherwise.
    fn error(self, operation: &'static str) -> Error {
        let kind = if self.errno == libc::ENOMEM { Kind::OutOfMemory } else { Kind::OsRefused };
        Error::new(kind, operation).at(self.to_string())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, errno_text(self.errno))
    }
}

/// The text of an I/O error, without the system's number.
pub fn io_text(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" (os error") {
        Some((words, _)) => words.to_owned(),
        None => text,
    }
}

/// The system's text for an errno, without its number.
fn errno_text(errno: i32) -> String {
    io_text(&io::Error::from_raw_os_error(errno))
}

/// Asks the faults whether `call`, which the system calls `name`, may be made.
fn ask(faults: &dyn Faults, call: Call, name: &'static str) -> OsResult<()> {
    match faults.before(call) {
        None => Ok(()),
        Some(errno) => Err(Refusal { name, errno }),
    }
}

/// The result of call `name` from nix, or from [`Errno::result`] for a call that nix lacks.
fn answer<T>(name: &'static str, returned: nix::Result<T>) -> OsResult<T> {
    returned.map_err(|errno| Refusal::of(name, errno))
}
