//! Memory with a descriptor: the kind that can be mapped again, here or in another process.
//!
//! Its size is sealed: whoever holds the descriptor may read and write the memory but not cut it off
//! under the device, which would end this process by a signal.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::limit::unsignalled;
use super::{Answer, Call, Faults, answer, ask};

/// The name under which mappings show in `/proc/<pid>/maps`, after `/memfd:`.
const NAME: &std::ffi::CStr = c"forebay";

/// Creates a descriptor without bytes, on huge pages of the default size if `huge`.
pub(super) fn create(huge: bool, faults: &dyn Faults) -> Answer<OwnedFd> {
    let (call, name, flag) = if huge {
        (Call::MemfdHuge, "memfd_create with huge pages", libc::MFD_HUGETLB)
    } else {
        (Call::Memfd, "memfd_create", 0)
    };
    ask(faults, call, name)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flag;
    // SAFETY: the name is a C string that lives for ever.
    let fd = answer(name, i64::from(unsafe { libc::memfd_create(NAME.as_ptr(), flags) }))?;
    // SAFETY: the system just gave this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Gives it `bytes` bytes, zero, and seals that size.
pub(super) fn resize(fd: &OwnedFd, bytes: u64, faults: &dyn Faults) -> Answer<()> {
    ask(faults, Call::Truncate, "ftruncate")?;
    // A size past the system's type is refused as negative.
    // SAFETY: the descriptor is open while it is borrowed.
    let resize = || unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) };
    // The limit on a file's size is one on shared memory too.
    let returned = unsignalled(resize);
    answer("ftruncate", i64::from(returned))?;
    ask(faults, Call::Seal, "fcntl")?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: as above; F_ADD_SEALS takes one integer.
    let returned = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    answer("fcntl", i64::from(returned))?;
    Ok(())
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
