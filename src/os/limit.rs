//! The limit on a file's size (`ulimit -f`): an error of the call that would pass it, where the system has a signal.
//!
//! SIGXFSZ ends a process that does not expect it, with whatever it had half written. It is raised for the thread that
//! writes, so that thread alone holds it back, takes what came of it away, and leaves the process's own handling as it
//! was. The call then answers EFBIG, as it does where the signal is ignored.

use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};

/// Runs `write`. Where a file would grow past the limit on its size, the call that writes it answers with an error, in
/// this thread and in those that it starts, and no SIGXFSZ comes.
pub fn unsignalled<T>(write: impl FnOnce() -> T) -> T {
    let _held = Held::new();
    write()
}

/// SIGXFSZ held back in this thread.
struct Held {
    /// The signals that were held back before.
    before: SigSet,
    /// Whether one was waiting already: then it is somebody else's.
    waiting: bool,
}

impl Held {
    fn new() -> Held {
        let mut before = SigSet::empty();
        // Cannot fail: only a way that the system does not know is refused.
        let _ = pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&size_signal()), Some(&mut before));
        Held { before, waiting: waiting() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let set = size_signal();
        if !self.waiting && waiting() {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: set and time are alive; nothing is asked about the signal that is taken.
            unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &raw const now) };
        }
        let _ = self.before.thread_set_mask();
    }
}

fn size_signal() -> SigSet {
    SigSet::from(Signal::SIGXFSZ)
}

/// Whether the signal waits for this thread.
fn waiting() -> bool {
    let mut set = *SigSet::empty().as_ref();
    // SAFETY: the set is one, before the call and after it, which writes nothing else.
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
    fn what_comes_meanwhile_is_taken_away_and_nothing_else_is_changed() {
        assert!(!held_back());
        // The process would end here, were it delivered.
        let answer = unsignalled(|| {
            // As the system raises it: for the calling thread.
            raise(Signal::SIGXFSZ).unwrap();
            assert!(held_back() && waiting());
            unsignalled(|| assert!(waiting(), "one that waited before is somebody else's"));
            assert!(held_back() && waiting());
            7
        });
        assert!(answer == 7 && !waiting() && !held_back());
    }

    #[test]
    fn a_panic_leaves_the_thread_as_it_was() {
        let ended = std::panic::catch_unwind(|| unsignalled(|| std::panic::resume_unwind(Box::new(()))));
        assert!(ended.is_err() && !held_back());
    }
}
