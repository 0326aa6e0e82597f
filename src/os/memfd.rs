//! Shared memory with a descriptor (memfd), which this process or another one can map again.
//!
//! **Seals** are what the system forbids to every holder of the descriptor, this process included. The size is
//! sealed at creation: a process that shrank the memory would end the others by a signal (SIGBUS). Before the
//! descriptor goes to another process ([`seal`]), further seals are forbidden, since a stranger's could stop this
//! process from mapping its own memory again. Where the other process shall only read, new writable mappings are
//! forbidden as well (`F_SEAL_FUTURE_WRITE`, Linux 5.1): mappings that exist stay writable, and this process too
//! can map the memory only to read from then on.
//!
//! **A descriptor from another process** is not trusted ([`check`]): it must be such memory, of the stated size,
//! with the size sealed; and with writes sealed, where it shall only be read.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::sys::statfs::fstatfs;
use nix::unistd::ftruncate;

use super::limit::unsignalled;
use super::refusal::{OsResult, Refusal, answer, ask};
use super::{Call, Faults, Protection, page_size};
use crate::error::{Error, Kind, Result};

/// The name under which mappings show in `/proc/<pid>/maps`, after `/memfd:`.
const NAME: &std::ffi::CStr = c"forebay";

/// Creates a descriptor without bytes, on huge pages of the default size if `huge`.
pub(super) fn create(huge: bool, faults: &dyn Faults) -> OsResult<OwnedFd> {
    let (call, name, flag) = if huge {
        (Call::MemfdHuge, "memfd_create with huge pages", MFdFlags::MFD_HUGETLB)
    } else {
        (Call::Memfd, "memfd_create", MFdFlags::empty())
    };
    ask(faults, call, name)?;
    answer(name, memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flag))
}

/// Sets its size to `bytes` zero bytes, and seals that size.
pub(super) fn resize(fd: &OwnedFd, bytes: u64, faults: &dyn Faults) -> OsResult<()> {
    ask(faults, Call::Truncate, "ftruncate")?;
    // A size beyond the system's type becomes negative and is refused. The limit on a file's size also applies to
    // shared memory.
    answer("ftruncate", unsignalled(|| ftruncate(fd, bytes as libc::off_t)))?;
    ask(faults, Call::Seal, "fcntl")?;
    answer("fcntl", fcntl(fd, FcntlArg::F_ADD_SEALS(size()))).map(drop)
}

/// The seals of a size.
fn size() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW
}

/// The seals of memory that another process may map with `protection`.
fn policy(protection: Protection) -> SealFlag {
    let sealed = size() | SealFlag::F_SEAL_SEAL;
    match protection {
        Protection::Read => sealed | SealFlag::F_SEAL_FUTURE_WRITE,
        Protection::ReadWrite => sealed,
    }
}

/// The seals of the descriptor.
fn seals(fd: BorrowedFd<'_>, faults: &dyn Faults) -> OsResult<SealFlag> {
    ask(faults, Call::Seals, "fcntl")?;
    answer("fcntl", fcntl(fd, FcntlArg::F_GET_SEALS)).map(SealFlag::from_bits_retain)
}

/// Seals the memory for processes that may map it with `protection`, once and for all.
///
/// # Errors
/// [`Kind::InvalidState`] if it was sealed for another protection before; [`Kind::OsRefused`].
pub(super) fn seal(fd: BorrowedFd<'_>, protection: Protection, faults: &dyn Faults) -> Result<()> {
    const OPERATION: &str = "export memory";
    let failed = |refusal: Refusal| refusal.error(OPERATION);
    let held = seals(fd, faults).map_err(failed)?;
    if !held.contains(SealFlag::F_SEAL_SEAL) {
        ask(faults, Call::Seal, "fcntl").map_err(failed)?;
        return answer("fcntl", fcntl(fd, FcntlArg::F_ADD_SEALS(policy(protection))))
            .map(drop)
            .map_err(failed);
    }
    if held == policy(protection) {
        return Ok(());
    }
    Err(Error::new(Kind::InvalidState, OPERATION)
        .at("memory that was exported with another protection before")
        .hint("export it always to be read, or always to be written"))
}

/// Another descriptor of the same memory.
pub(super) fn duplicate(fd: BorrowedFd<'_>, faults: &dyn Faults) -> OsResult<OwnedFd> {
    ask(faults, Call::Duplicate, "fcntl")?;
    fd.try_clone_to_owned().map_err(|error| Refusal::io("fcntl", &error))
}

/// Checks a descriptor that another process made: shared memory of exactly `bytes` bytes, whose size is sealed. Where
/// it shall be read only, new writes have to be sealed too: who may write may also give its pages back, and a page
/// that is read again after that may find no memory and end this process by a signal. Returns the size of its pages.
///
/// # Errors
/// [`Kind::BadFormat`] with the stated and the real size, or for anything but sealed shared memory;
/// [`Kind::OsRefused`].
pub(super) fn check(fd: &OwnedFd, bytes: u64, protection: Protection, faults: &dyn Faults) -> Result<u64> {
    const OPERATION: &str = "adopt memory";
    let wrong = |place: &'static str| Error::new(Kind::BadFormat, OPERATION).at(place);
    ask(faults, Call::Stat, "fstat").map_err(|refusal| refusal.error(OPERATION))?;
    let state = answer("fstat", fstat(fd)).map_err(|refusal| refusal.error(OPERATION))?;
    // The block size of a memfd's file system is the size of its pages; the file's own is a hint, which may be larger.
    let system = answer("fstatfs", fstatfs(fd)).map_err(|refusal| refusal.error(OPERATION))?;
    let page = u64::try_from(system.block_size()).unwrap_or(0).max(page_size());
    let sealed = match seals(fd.as_fd(), faults) {
        Ok(seals) => {
            let closed = SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_WRITE;
            seals.contains(policy(Protection::ReadWrite))
                && (protection == Protection::ReadWrite || seals.intersects(closed))
        }
        // No seals: a file, a pipe, a socket.
        Err(refusal) if refusal.errno == libc::EINVAL => false,
        Err(refusal) => return Err(refusal.error(OPERATION)),
    };
    if !sealed {
        return Err(wrong("a descriptor that is not shared memory of sealed size"));
    }
    if u64::try_from(state.st_size) != Ok(bytes) || bytes == 0 || !bytes.is_multiple_of(page) {
        let size = u64::try_from(state.st_size).unwrap_or(0);
        return Err(wrong("shared memory of another size").with("stated", bytes).with("size", size));
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::super::NoFaults;
    use super::*;

    #[test]
    fn no_process_can_shrink_the_memory() {
        let fd = create(false, &NoFaults).unwrap();
        resize(&fd, 8192, &NoFaults).unwrap();
        let file = std::fs::File::from(fd);
        assert_eq!(file.metadata().unwrap().len(), 8192);
        assert!(file.set_len(4096).is_err() && file.set_len(12288).is_err());
    }
}
