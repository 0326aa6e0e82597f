//! The limit on a file's size (`ulimit -f`): an error of the call that would pass it, where the system has a signal.
//!
//! SIGXFSZ ends a process that does not expect it, with whatever it had half written. It is raised for the thread that
//! writes, so that thread alone holds it back, takes what came of it away, and leaves the process's own handling as it
//! was. The call then answers EFBIG, as it does where the signal is ignored.

use std::mem::MaybeUninit;

/// Runs `write`. Where a file would grow past the limit on its size, the call that writes it answers with an error, in
/// this thread and in those that it starts, and no SIGXFSZ comes.
pub fn unsignalled<T>(write: impl FnOnce() -> T) -> T {
    let _held = Held::new();
    write()
}

/// SIGXFSZ held back in this thread.
struct Held {
    /// The signals that were held back before.
    before: libc::sigset_t,
    /// Whether one was waiting already: then it is somebody else's.
    waiting: bool,
}

impl Held {
    fn new() -> Held {
        let set = size_signal();
        let mut before = none();
        // SAFETY: both sets are alive; the call changes the mask of this thread alone.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) };
        Held { before, waiting: waiting() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let set = size_signal();
        if !self.waiting && waiting() {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: set and time are alive; nothing is asked about the signal that is taken.
            unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const now) };
        }
        // SAFETY: the set is the one that was read; no other is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// A set of no signals.
fn none() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call writes the whole set, and cannot fail.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

fn size_signal() -> libc::sigset_t {
    let mut set = none();
    // SAFETY: the set is initialised, and the signal is one of the system's.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGXFSZ) };
    set
}

/// Whether the signal waits for this thread.
fn waiting() -> bool {
    let mut set = none();
    // SAFETY: the set is alive.
    unsafe { libc::sigpending(&raw mut set) };
    // SAFETY: as above; the signal is one of the system's.
    unsafe { libc::sigismember(&raw const set, libc::SIGXFSZ) == 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_back() -> bool {
        let mut now = none();
        // SAFETY: without a new set the call only reads.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut now) };
        // SAFETY: the set was written by the call.
        unsafe { libc::sigismember(&raw const now, libc::SIGXFSZ) == 1 }
    }

    /// As the system raises it.
    fn raise() {
        // SAFETY: raises the signal for the calling thread.
        unsafe { libc::raise(libc::SIGXFSZ) };
    }

    #[test]
    fn what_comes_meanwhile_is_taken_away_and_nothing_else_is_changed() {
        assert!(!held_back());
        // The process would end here, were it delivered.
        let answer = unsignalled(|| {
            raise();
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
