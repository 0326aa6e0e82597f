//! Shared memory with a descriptor (memfd), which this process or another one can map again.
//!
//! Its size is sealed: a process with the descriptor can read and write the memory but cannot shrink it, which would
//! end this process by a signal.

use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

use super::limit::unsignalled;
use super::refusal::{OsResult, answer, ask};
use super::{Call, Faults};

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
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    answer("fcntl", fcntl(fd, FcntlArg::F_ADD_SEALS(seals))).map(drop)
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
