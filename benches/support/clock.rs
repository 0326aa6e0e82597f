//! The CPU time of this thread, which does not depend on other load of the machine.
//!
//! Wall-clock time includes what other programs took. The kernel's account of a thread does not. The kernel updates it
//! when it takes the thread off its processor, so each reading sleeps for a moment first.

use std::time::Duration;

/// A measurement of this thread's CPU time.
pub struct Lap {
    begin: Duration,
}

impl Lap {
    /// Begins now.
    pub fn begin() -> Lap {
        Lap { begin: ran() }
    }

    /// Returns the CPU time of this thread since the measurement began.
    pub fn end(&self) -> Duration {
        ran().saturating_sub(self.begin)
    }
}

/// Returns the total CPU time of this thread, from `/proc/thread-self/schedstat`.
fn ran() -> Duration {
    std::thread::sleep(Duration::from_micros(1));
    let account = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(account.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or_default())
}
