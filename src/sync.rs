//! The only place that names atomics, locks and threads: the standard library's, or loom's under
//! `--cfg loom`, where every interleaving of a small scenario is tried (`tests/loom.rs`), or with locks that
//! ThreadSanitizer understands under `--cfg tsan` (`ci/tsan`).
//!
//! **Lock order.** A thread that holds a lock takes only locks that stand below it here:
//!
//! 1. a micro-batch's record (host device)
//! 2. the room to work in of warm-ups (host device)
//! 3. a layer's tables (host device)
//! 4. a batch row's list of fetches (host device)
//! 5. a lane's trust (host device), then what is staged for it
//! 6. the device's lists of streams, events, pools, graphs, memory and registered stretches: of the CUDA
//!    device never two at a time
//! 7. the CUDA device's own stream, the event of its warm-ups, and its calls, then one call's work, which calls are
//!    free and which threads run one
//! 8. the list of host memory that is registered in this process, and who uses one stretch of it (CUDA device):
//!    never the two at a time, and nothing is taken behind them
//! 9. a stream's queue
//! 10. an event's counts
//! 11. the clock device's state, behind which nothing is taken
//! 12. what a watch knows: held across no call of the device that it watches
//!
//! A lock whose holder panicked is entered all the same: what it guards is plain data whose rules
//! `validate` can check, and a second panic would hide the first.

#[cfg(loom)]
pub(crate) use loom::{
    sync::{
        Arc, Condvar as RawCondvar, Mutex as RawMutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
};
#[cfg(not(any(loom, tsan)))]
pub(crate) use std::sync::{Condvar as RawCondvar, Mutex as RawMutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
};

// ThreadSanitizer does not see how the standard library, which is not built with it, takes a contended lock.
#[cfg(tsan)]
pub(crate) use std::sync::atomic::AtomicU8;

#[cfg(tsan)]
pub(crate) use parking_lot::{Condvar as RawCondvar, Mutex as RawMutex, MutexGuard};
#[cfg(not(tsan))]
use std::sync::PoisonError;

/// A lock that forgives a holder's panic.
#[derive(Debug)]
pub(crate) struct Mutex<T>(RawMutex<T>);

impl<T> Mutex<T> {
    /// For a static too, which loom has none of: the CUDA device, which needs it, is not built with loom.
    #[cfg(not(loom))]
    pub(crate) const fn new(value: T) -> Self {
        Mutex(RawMutex::new(value))
    }

    #[cfg(loom)]
    pub(crate) fn new(value: T) -> Self {
        Mutex(RawMutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        #[cfg(not(tsan))]
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        #[cfg(tsan)]
        let guard = self.0.lock();
        guard
    }
}

/// A condition variable beside [`Mutex`].
#[derive(Debug)]
pub(crate) struct Condvar(RawCondvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Condvar(RawCondvar::new())
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        #[cfg(not(tsan))]
        let guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
        #[cfg(tsan)]
        let guard = {
            let mut guard = guard;
            self.0.wait(&mut guard);
            guard
        };
        guard
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A number that no other call in this process has got or will get. Always the standard library's atomic:
/// there is nothing to interleave.
pub(crate) fn unique() -> u32 {
    use std::sync::atomic::AtomicU32 as Counter;
    static NEXT: Counter = Counter::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
