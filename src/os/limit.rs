//! Writes past the limit on a file's size (`ulimit -f`) return an error instead of raising SIGXFSZ.
//!
//! SIGXFSZ by default ends the process, and leaves a half-written file. The signal goes to the writing thread, so
//! that thread alone blocks it, removes a pending one, and leaves the process's handler unchanged. The call then
//! fails with EFBIG, as it does where the signal is ignored.

use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};

/// Runs `write`. If a file would grow past the limit on its size, the writing call returns an error, in this thread
/// and in threads that it starts, and no SIGXFSZ is delivered.
pub fn unsignalled<T>(write: impl FnOnce() -> T) -> T {
    let _held = Held::new();
    write()
}

/// A guard that blocks SIGXFSZ in this thread.
struct Held {
    /// The signals that were blocked before.
    before: SigSet,
    /// Whether a SIGXFSZ was already pending, which is then not ours to remove.
    waiting: bool,
}

impl Held {
    fn new() -> Held {
        let mut before = SigSet::empty();
        // Cannot fail: the kernel only rejects an unknown mode.
        let _ = pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&size_signal()), Some(&mut before));
        Held { before, waiting: waiting() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let set = size_signal();
        if !self.waiting && waiting() {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: set and time are alive; no information about the signal is requested.
            unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &raw const now) };
        }
        let _ = self.before.thread_set_mask();
    }
}

fn size_signal() -> SigSet {
    SigSet::from(Signal::SIGXFSZ)
}

/// Whether the signal is pending for this thread.
fn waiting() -> bool {
    let mut set = *SigSet::empty().as_ref();
    // SAFETY: the set is valid before the call and after it, which writes nothing else.
    let pending = unsafe {
        libc::sigpending(&raw mut set);
        SigSet::from_sigset_t_unchecked(set)
    };
    pending.contains(Signal::SIGXFSZ)
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::raise;

    use super::*;

    fn held_back() -> bool {
        SigSet::thread_get_mask().unwrap().contains(Signal::SIGXFSZ)
    }

    #[test]
    fn a_signal_raised_meanwhile_is_discarded_and_nothing_else_changes() {
        assert!(!held_back());
        // A delivered signal would end the process here.
        let result = unsignalled(|| {
            // As the system raises it: for the calling thread.
            raise(Signal::SIGXFSZ).unwrap();
            assert!(held_back() && waiting());
            unsignalled(|| assert!(waiting(), "a signal that was pending before is not ours"));
            assert!(held_back() && waiting());
            7
        });
        assert!(result == 7 && !waiting() && !held_back());
    }

    #[test]
    fn a_panic_leaves_the_thread_as_it_was() {
        let ended = std::panic::catch_unwind(|| unsignalled(|| std::panic::resume_unwind(Box::new(()))));
        assert!(ended.is_err() && !held_back());
    }
}
