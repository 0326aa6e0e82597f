//! What engines and routers will do, in order of time.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay::transfer::Fence;

/// What happens at a time.
#[derive(Clone, Copy)]
pub enum Happens {
    RestartSender(usize),
    RestartReceiver(usize),
    /// An attempt at a request begins, or is granted at a receiver, or goes on.
    Attempt(usize),
    Grant(usize, usize),
    Compute(usize),
    Abort(usize),
    /// A decode instance is done with a whole request.
    Close(usize, Fence),
    /// Someone looks again.
    Nothing,
}

#[derive(Default)]
pub struct Future {
    all: BTreeMap<(Duration, u64), Happens>,
    count: u64,
}

impl Future {
    pub fn at(&mut self, time: Duration, happens: Happens) {
        self.all.insert((time, self.count), happens);
        self.count += 1;
    }

    pub fn first(&self) -> Option<Duration> {
        self.all.first_key_value().map(|((time, _), _)| *time)
    }

    /// What happens until a time, first.
    pub fn take(&mut self, now: Duration) -> Option<Happens> {
        let entry = self.all.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(entry.remove())
    }
}
