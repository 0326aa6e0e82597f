//! A receiver that a sender connects to, again and again, with a growing wait.

use std::time::{Duration, Instant};

use crate::transfer::socket::address::Address;

/// The wait after a failure is at least and at most so long.
const WAIT: Duration = Duration::from_millis(1);
const WAIT_MAX: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub struct Dial {
    pub address: Address,
    wait: Duration,
    /// When to connect; none while there is a connection or one is opening.
    pub next: Option<Instant>,
}

impl Dial {
    pub const fn new(address: Address, now: Instant) -> Dial {
        Dial { address, wait: WAIT, next: Some(now) }
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| next <= now)
    }

    /// There is no connection, or no longer. One that was open for `open` and longer than the longest wait begins the
    /// waits anew.
    pub fn again(&mut self, now: Instant, open: Duration) {
        if open > WAIT_MAX {
            self.wait = WAIT;
        }
        self.next = Some(now + self.wait);
        self.wait = (self.wait * 2).min(WAIT_MAX);
    }
}
