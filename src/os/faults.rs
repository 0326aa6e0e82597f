//! Faults: an errno in the kernel's place, chosen by the caller.
//!
//! Each system call first asks a [`Faults`], except those that unmap memory. So a test can make a call fail on any
//! machine, with any errno, and can fail the calls of a scenario one after the other ([`Inject::nth`]). A [`Faults`]
//! may also change what calls report: the memory that is free, and the bytes that a write takes.
//!
//! A fault replaces a call that has not been made. It cannot undo one, and it cannot make the system accept one.

use std::fmt;

use super::memory::MemoryState;
use crate::sync::{AtomicU64, Ordering};

/// Which call a fault is injected into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `memfd_create` with the base page size.
    Memfd,
    /// `memfd_create` with huge pages.
    MemfdHuge,
    /// `fcntl` that forbids all holders of a descriptor to resize its memory, to write it, or to forbid more.
    Seal,
    /// `fcntl` that reads what is forbidden to the holders of a descriptor.
    Seals,
    /// `fcntl` that duplicates a descriptor.
    Duplicate,
    /// `fstat` of a received descriptor.
    Stat,
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
    /// `poll` of a socket.
    Poll,
    /// `sendmsg` to a socket.
    Send,
    /// `recvmsg` from a socket.
    Receive,
    /// `getsockopt` for the process at a socket's other end.
    Credentials,
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
pub trait Faults: fmt::Debug + Send + Sync {
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
