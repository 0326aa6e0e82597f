//! Memory with a descriptor: the kind that can be mapped again, here or in another process.
//!
//! Its size is sealed: whoever holds the descriptor may read and write the memory but not cut it off
//! under the device, which would end this process by a signal.

use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;

use super::limit::unsignalled;
use super::{Answer, Call, Faults, answer, ask};

/// The name under which mappings show in `/proc/<pid>/maps`, after `/memfd:`.
const NAME: &std::ffi::CStr = c"forebay";

/// Creates a descriptor without bytes, on huge pages of the default size if `huge`.
pub(super) fn create(huge: bool, faults: &dyn Faults) -> Answer<OwnedFd> {
    let (call, name, flag) = if huge {
        (Call::MemfdHuge, "memfd_create with huge pages", MFdFlags::MFD_HUGETLB)
    } else {
        (Call::Memfd, "memfd_create", MFdFlags::empty())
    };
    ask(faults, call, name)?;
    answer(name, memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flag))
}

/// Gives it `bytes` bytes, zero, and seals that size.
pub(super) fn resize(fd: &OwnedFd, bytes: u64, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::Truncate, "ftruncate")?;
    // A size past the system's type is refused as negative; the limit on a file's size is one on shared memory too.
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
    fn nobody_can_cut_the_memory_off() {
        let fd = create(false, &NoFaults).unwrap();
        resize(&fd, 8192, &NoFaults).unwrap();
        let file = std::fs::File::from(fd);
        assert_eq!(file.metadata().unwrap().len(), 8192);
        assert!(file.set_len(4096).is_err() && file.set_len(12288).is_err());
    }
}
