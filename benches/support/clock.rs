//! Time that this thread has run, whatever else runs on the machine.
//!
//! Wall-clock time counts what other programs took. The kernel's account of a thread does not; it is
//! brought up to date when the thread is taken off its processor, so each reading sleeps for a moment
//! first.

use std::time::Duration;

/// A stretch of this thread's time.
pub struct Lap {
    begin: Duration,
}

impl Lap {
    /// Begins now.
    pub fn begin() -> Lap {
        Lap { begin: ran() }
    }

    /// The time that this thread has run since.
    pub fn end(&self) -> Duration {
        ran().saturating_sub(self.begin)
    }
}

/// The time that this thread has run in all, from `/proc/thread-self/schedstat`.
fn ran() -> Duration {
    std::thread::sleep(Duration::from_micros(1));
    let account = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(account.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or_default())
}
