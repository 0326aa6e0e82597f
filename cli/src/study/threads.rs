//! Runs independent pieces of work on all cores.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use forebay::Result;

/// The most threads.
const MOST: usize = 8;

/// The most bytes that all concurrent pieces of work hold together, unless a single one holds more.
const BYTES: u64 = 320 << 20;

/// The results of `work` for every index below `count`, in order of index. A piece of work holds about `bytes`: fewer
/// threads run large pieces, so that memory stays bounded.
///
/// # Errors
/// The error of the lowest index among the failures; pieces that had not begun by then do not run.
pub fn each<T: Send>(count: usize, bytes: u64, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return done;
            }
            let result = work(index);
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            done.push((index, result));
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(count).min(threads(bytes));
    let mut done = thread::scope(|scope| {
        // If the system refuses a thread, the work goes on without it: this thread works as well.
        let helpers: Vec<_> =
            (1..cores).filter_map(|_| thread::Builder::new().spawn_scoped(scope, worker).ok()).collect();
        let mut done = worker();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// How many pieces that hold `bytes` each may run at a time.
fn threads(bytes: u64) -> usize {
    (BYTES / bytes.max(1)).clamp(1, MOST as u64) as usize
}

/// The most bytes that the concurrent pieces of [`each`] hold.
pub fn held(count: usize, bytes: u64) -> u64 {
    bytes.saturating_mul(threads(bytes).min(count) as u64)
}

#[cfg(test)]
mod tests {
    use forebay::{Error, Kind};

    use super::*;

    #[test]
    fn results_are_ordered_by_index_and_an_error_ends_the_work() {
        assert_eq!(each(1000, 0, |index| Ok(index * index)).unwrap()[999], 999 * 999);
        assert!(each(0, 0, Ok).unwrap().is_empty());
        let begun = AtomicUsize::new(0);
        let result = each(1_000_000, 0, |index| {
            begun.fetch_add(1, Ordering::Relaxed);
            if index >= 7 { Err(Error::new(Kind::OutOfMemory, "work")) } else { Ok(()) }
        });
        assert_eq!(result.unwrap_err().kind(), Kind::OutOfMemory);
        // A thread begins no piece after its own error.
        assert!(begun.into_inner() <= 7 + MOST);
    }

    #[test]
    fn few_threads_work_on_large_pieces() {
        assert_eq!([0, BYTES / 8, BYTES / 3, BYTES, u64::MAX].map(threads), [8, 8, 3, 1, 1]);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = |_| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        each(200, BYTES, work).unwrap();
        assert_eq!(most.into_inner(), 1);
    }
}
