//! The CPU time of this thread, which does not depend on the machine's other programs.
//!
//! Wall-clock time includes the time of other programs. The kernel's account of a thread does not; the kernel updates
//! it when the thread leaves its processor, so each reading sleeps for a moment first.

use std::time::Duration;

/// A period of this thread's CPU time.
pub struct Lap {
    begin: Duration,
}

impl Lap {
    /// Begins now.
    pub fn begin() -> Lap {
        Lap { begin: ran() }
    }

    /// The thread's CPU time since the beginning.
    pub fn end(&self) -> Duration {
        ran().saturating_sub(self.begin)
    }
}

/// The thread's total CPU time, from `/proc/thread-self/schedstat`.
fn ran() -> Duration {
    std::thread::sleep(Duration::from_micros(1));
    let account = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(account.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or_default())
}
