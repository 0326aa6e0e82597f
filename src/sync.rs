//! Atomics, locks and threads. Every other module takes them from here.
//!
//! They are the standard library's. Under `--cfg loom` they are loom's, which tries every interleaving of a small
//! scenario (`tests/loom.rs`). Under `--cfg tsan` the locks are ones that ThreadSanitizer understands (`ci/tsan`).
//!
//! **Lock order.** A thread that holds a lock takes only locks that come later in this list:
//!
//! 1. a micro-batch's record (host device)
//! 2. the working memory of warm-ups (host device)
//! 3. a layer's tables (host device)
//! 4. a batch row's list of fetches (host device)
//! 5. a lane's trust (host device), then the lane's staged data
//! 6. the device's lists of streams, events, pools, graphs, memory and registered ranges (a thread never holds two of
//!    these of a CUDA device)
//! 7. the CUDA device's own stream, the event of its warm-ups and its calls, then one call's work, the free calls and
//!    the threads that run a call
//! 8. the list of host memory that is registered in this process, and the users of one range of it (CUDA device): a
//!    thread never holds both, and takes no other lock while it holds one
//! 9. a stream's queue
//! 10. an event's counts
//! 11. the clock device's state: a thread that holds it takes no other lock
//! 12. the state of a watch: no thread holds it while it calls the watched device
//! 13. what a dropped update of weights has left to its windows: a thread that holds it takes no other lock
//!
//! If the holder of a lock panicked, the next thread takes the lock anyway. The guarded data is plain data that
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

// The standard library is not built with ThreadSanitizer, which therefore does not see how it takes a contended lock.
#[cfg(tsan)]
pub(crate) use std::sync::atomic::AtomicU8;

#[cfg(tsan)]
pub(crate) use parking_lot::{Condvar as RawCondvar, Mutex as RawMutex, MutexGuard};
#[cfg(not(tsan))]
use std::sync::PoisonError;

/// A lock that another thread can take after its holder panicked.
#[derive(Debug)]
pub(crate) struct Mutex<T>(RawMutex<T>);

impl<T> Mutex<T> {
    /// `const`, so that it works in a static. Loom has no such constructor; the CUDA device, which needs it, is not
    /// built with loom.
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

/// A condition variable for [`Mutex`].
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

/// A word in memory that other processes share. It always is the standard library's atomic, because loom has none at
/// addresses that are given.
pub(crate) type SharedWord = std::sync::atomic::AtomicU64;

/// A number that is unique in this process. It always uses the standard library's atomic, because loom has nothing to
/// interleave here.
pub(crate) fn unique() -> u32 {
    use std::sync::atomic::AtomicU32 as Counter;
    static NEXT: Counter = Counter::new(1);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
