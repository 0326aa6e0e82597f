//! A range of mapped addresses that is unmapped when it is dropped.
//!
//! Devices, threads of the host device and other processes read and write the same bytes while this process does, and
//! the language's memory model does not order them; events do. So no Rust reference into a region exists, and copies
//! are made by string instructions in inline assembly, which the compiler treats as opaque. A copy that races with a
//! write reads or leaves torn bytes, and nothing worse. These copies cost little more than `memcpy` from a few
//! hundred bytes on, and are slower below. A step does not use them; the host device has its own row copies.

use std::arch::asm;
use std::ffi::c_void;
#[cfg(feature = "cuda")]
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use memmap2::{MmapMut, MmapOptions, MmapRaw};
use nix::errno::Errno;

use super::refusal::{OsResult, Refusal, answer, ask};
use super::{Call, Faults};
use crate::error::{Error, Kind, Result};
#[cfg(tsan)]
use crate::sync::{AtomicU8, Ordering};

/// Mapped addresses with bounds checks. [`super::Map`] and [`super::Range`] dereference to it.
#[derive(Debug)]
pub struct Region {
    /// The mapping that is unmapped as a whole on drop.
    mapped: Mapped,
    /// The beginning of the usable part.
    start: NonNull<u8>,
    len: usize,
    /// Whether its bytes may be written through these addresses.
    protection: Protection,
}

/// What may be done with memory through a mapping, or by another process that holds a descriptor of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Read it.
    Read,
    /// Read and write it.
    ReadWrite,
}

impl Protection {
    /// The flags of `mmap`.
    fn flags(self) -> libc::c_int {
        match self {
            Protection::Read => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

#[derive(Debug)]
enum Mapped {
    /// Memory. The type returns addresses, not references.
    Memory(MmapRaw),
    /// Reserved addresses that pieces are mapped over. memmap2 cannot map without access, and a mapping with access
    /// counts as memory where the system does not overcommit.
    Addresses { base: NonNull<u8>, bytes: usize },
    /// Memory that another owner mapped, and unmaps when it is dropped.
    #[cfg(feature = "cuda")]
    Given { _owner: Box<dyn Debug + Send + Sync> },
}

// SAFETY: a region is addresses and lengths that never change; its memory belongs to no thread and is accessed by raw
// copies only.
unsafe impl Send for Region {}
// SAFETY: as above; racing copies are opaque to the compiler and tear at worst.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes readable and writable: those of `descriptor`, shared, or private zeros.
    pub(super) fn new(descriptor: Option<BorrowedFd<'_>>, len: u64, faults: &dyn Faults) -> OsResult<Self> {
        Region::memory(len, Protection::ReadWrite, faults, |options| match descriptor {
            Some(fd) => options.map_raw(&fd),
            None => options.map_anon().map(MmapMut::into),
        })
    }

    /// Maps `len` bytes of `descriptor`, shared, with `protection`.
    pub(super) fn shared(
        descriptor: BorrowedFd<'_>,
        len: u64,
        protection: Protection,
        faults: &dyn Faults,
    ) -> OsResult<Self> {
        Region::memory(len, protection, faults, |options| match protection {
            Protection::Read => options.map_raw_read_only(&descriptor),
            Protection::ReadWrite => options.map_raw(&descriptor),
        })
    }

    fn memory(
        len: u64,
        protection: Protection,
        faults: &dyn Faults,
        map: impl FnOnce(&MmapOptions) -> io::Result<MmapRaw>,
    ) -> OsResult<Self> {
        ask(faults, Call::Map, "mmap")?;
        let len = len as usize;
        let mut options = MmapOptions::new();
        options.len(len);
        let memory = map(&options).map_err(|error| Refusal::io("mmap", &error))?;
        let start = some_address(memory.as_mut_ptr())?;
        Ok(Region { mapped: Mapped::Memory(memory), start, len, protection })
    }

    /// Reserves `len` bytes of addresses without memory, the first a multiple of `align` (a power of two). Memory
    /// that is placed there gets `protection`.
    pub(super) fn reserve(
        len: u64,
        align: u64,
        protection: Protection,
        faults: &dyn Faults,
    ) -> OsResult<Self> {
        let Some(padded) = len.checked_add(align) else {
            return Err(Refusal { name: "mmap", errno: libc::ENOMEM });
        };
        ask(faults, Call::Map, "mmap")?;
        let (bytes, flags) = (padded as usize, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: without MAP_FIXED the system takes addresses that nothing else uses.
        let at = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        let base = some_address(answer("mmap", Errno::result(at))?.cast())?;
        // The skip is below `align`, and `align` more bytes than `len` are reserved.
        let skip = base.as_ptr().align_offset(align as usize);
        let start = base.map_addr(|base| base.saturating_add(skip));
        Ok(Region { mapped: Mapped::Addresses { base, bytes }, start, len: len as usize, protection })
    }

    /// Wraps memory that `owner` has mapped and unmaps.
    ///
    /// # Safety
    /// `len` bytes from `start` on are readable, writable and initialised as long as `owner` lives.
    #[cfg(feature = "cuda")]
    pub(super) unsafe fn given(start: NonNull<u8>, len: u64, owner: Box<dyn Debug + Send + Sync>) -> Region {
        let (mapped, protection) = (Mapped::Given { _owner: owner }, Protection::ReadWrite);
        Region { mapped, start, len: len as usize, protection }
    }

    /// Whether another owner mapped it.
    #[cfg(feature = "cuda")]
    pub(super) fn is_given(&self) -> bool {
        matches!(self.mapped, Mapped::Given { .. })
    }

    /// Makes `call` for all of the memory. Reserved addresses have none, and memory of another owner is left alone.
    pub(super) fn whole(
        &self,
        name: &'static str,
        call: impl FnOnce(&MmapRaw) -> io::Result<()>,
    ) -> OsResult<()> {
        match &self.mapped {
            Mapped::Memory(memory) => call(memory).map_err(|error| Refusal::io(name, &error)),
            Mapped::Addresses { .. } => Err(Refusal { name, errno: libc::EINVAL }),
            #[cfg(feature = "cuda")]
            Mapped::Given { .. } => Err(Refusal { name, errno: libc::EINVAL }),
        }
    }

    /// Maps `bytes` of `fd` from `offset` over this region's addresses from `position`. The caller has
    /// checked that all are multiples of the page size and inside the region.
    pub(super) fn place(
        &self,
        position: u64,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        faults: &dyn Faults,
    ) -> OsResult<()> {
        ask(faults, Call::MapFixed, "mmap")?;
        let Some(at) = self.at(position, bytes) else {
            return Err(Refusal { name: "mmap", errno: libc::EINVAL });
        };
        // SAFETY: `at` with `bytes` lies inside the addresses this region owns, so that MAP_FIXED
        // replaces nothing of anyone else's.
        let got = unsafe {
            libc::mmap(
                at.as_ptr().cast::<c_void>(),
                bytes as usize,
                self.protection.flags(),
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        answer("mmap", Errno::result(got)).map(drop)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it has no bytes; never true for a region that was made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for devices. [`Region::len`] bytes from there are valid for reads while this
    /// region lives, and for writes if [`Region::protection`] says so; others write them at the same time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// What may be done through these addresses.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// The address of `offset`, if `bytes` bytes from there are inside.
    fn at(&self, offset: u64, bytes: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        // Inside the mapping or at its end, so nothing saturates.
        (end <= self.len()).then(|| self.start.map_addr(|start| start.saturating_add(offset as usize)))
    }

    fn checked(&self, operation: &'static str, offset: u64, bytes: u64) -> Result<NonNull<u8>> {
        self.at(offset, bytes).ok_or_else(|| {
            Error::new(Kind::OutOfRange, operation)
                .at("mapped memory")
                .with("offset", offset)
                .with("bytes", bytes)
                .with("length", self.len())
        })
    }

    /// As [`Region::checked`], for bytes that are about to be written.
    fn writable(&self, operation: &'static str, offset: u64, bytes: u64) -> Result<NonNull<u8>> {
        match self.protection {
            Protection::ReadWrite => self.checked(operation, offset, bytes),
            Protection::Read => Err(Error::new(Kind::InvalidState, operation)
                .at("memory that is mapped to be read only")
                .hint("write it through the mapping of its owner")),
        }
    }

    /// Copies `bytes` to `offset`. Returns an error, and writes nothing, if they do not fit ([`Kind::OutOfRange`]) or
    /// the memory is mapped to be read only ([`Kind::InvalidState`]).
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.writable("copy in", offset, bytes.len() as u64)?;
        // SAFETY: the target was checked; the source is a slice, which never lies in a region.
        unsafe { copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Fills `bytes` from `offset` on. Returns [`Kind::OutOfRange`] if the region ends before.
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.checked("copy out", offset, bytes.len() as u64)?;
        // SAFETY: the source was checked, and its bytes are initialised because the system hands out
        // zeros; the target is a slice, which never lies in a region.
        unsafe { copy(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// As [`Region::copy_in`], for words in the machine's order.
    pub fn copy_in_words(&self, offset: u64, words: &[u32]) -> Result<()> {
        let bytes = size_of_val(words);
        let to = self.writable("copy in", offset, bytes as u64)?;
        // SAFETY: the target was checked; the source is a slice, and any word is four initialised bytes.
        unsafe { copy(words.as_ptr().cast(), to.as_ptr(), bytes) };
        Ok(())
    }

    /// As [`Region::copy_out`], for words in the machine's order.
    pub fn copy_out_words(&self, offset: u64, words: &mut [u32]) -> Result<()> {
        let bytes = size_of_val(words);
        let from = self.checked("copy out", offset, bytes as u64)?;
        // SAFETY: the source was checked; the target is a slice, and any four bytes are a word.
        unsafe { copy(from.as_ptr(), words.as_mut_ptr().cast(), bytes) };
        Ok(())
    }

    /// Copies `bytes` from offset `from` to offset `to`; the two may overlap. Refuses as [`Region::copy_in`].
    pub fn copy_within(&self, from: u64, to: u64, bytes: u64) -> Result<()> {
        let source = self.checked("copy within", from, bytes)?;
        let target = self.writable("copy within", to, bytes)?;
        // SAFETY: both were checked.
        unsafe { move_bytes(source.as_ptr(), target.as_ptr(), bytes as usize) };
        Ok(())
    }

    /// Sets `bytes` bytes from `offset` on to `value`. Refuses as [`Region::copy_in`].
    pub fn fill(&self, offset: u64, bytes: u64, value: u8) -> Result<()> {
        let to = self.writable("fill", offset, bytes)?;
        #[cfg(tsan)]
        for at in 0..bytes as usize {
            // SAFETY: the target was checked.
            unsafe { AtomicU8::from_ptr(to.as_ptr().add(at)) }.store(value, Ordering::Relaxed);
        }
        #[cfg(not(tsan))]
        // SAFETY: the target was checked; the direction flag is clear in every Rust function.
        unsafe {
            asm!(
                "rep stosb",
                inout("rcx") bytes => _,
                inout("rdi") to.as_ptr() => _,
                in("al") value,
                options(nostack, preserves_flags)
            );
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Mapped::Addresses { base, bytes } = self.mapped {
            // SAFETY: exactly what was mapped, once; no reference into it exists.
            unsafe { libc::munmap(base.as_ptr().cast::<c_void>(), bytes) };
        }
    }
}

/// Copies bytes that may overlap, and that other threads may write meanwhile: the copy then tears, and nothing worse
/// happens.
///
/// # Safety
/// Both ends are valid for `bytes` bytes.
pub(crate) unsafe fn move_bytes(from: *const u8, to: *mut u8, bytes: usize) {
    let ahead = to.addr().wrapping_sub(from.addr());
    if ahead == 0 || ahead >= bytes {
        // SAFETY: the caller's promise; the copy ascends and the target does not begin inside the source.
        unsafe { copy(from, to, bytes) };
        return;
    }
    // The target begins inside the source: copy from the end down, in parts as long as the distance between the two,
    // so that no part overlaps its target.
    let mut end = bytes;
    while end > 0 {
        let part = end.min(ahead);
        end -= part;
        // SAFETY: `end` with `part` is inside `bytes`, for which the caller vouches.
        unsafe { copy(from.add(end), to.add(end), part) };
    }
}

/// The system never maps address 0 unless it is asked to.
fn some_address(at: *mut u8) -> OsResult<NonNull<u8>> {
    NonNull::new(at).ok_or(Refusal { name: "mmap", errno: libc::ENOMEM })
}

/// Copies byte by byte with atomics, which ThreadSanitizer can compare with the accesses that the compiler makes.
///
/// # Safety
/// Both ends are valid for `bytes` bytes; the target does not begin inside the source.
#[cfg(tsan)]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    for at in 0..bytes {
        // SAFETY: the caller's promise; the source is only read.
        unsafe {
            let byte = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(at)).store(byte, Ordering::Relaxed);
        }
    }
}

/// Copies ascending, byte by byte as far as any observer can tell.
///
/// # Safety
/// Both ends are valid for `bytes` bytes; the target does not begin inside the source.
#[cfg(not(tsan))]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; the direction flag is clear in every Rust function.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}
