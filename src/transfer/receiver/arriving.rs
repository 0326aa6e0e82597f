//! A request at the receiver: what has arrived of it, from whom, and what is still asked for.

use std::time::Duration;

use crate::transfer::frames::Reason;
use crate::transfer::ledger::Ledger;
use crate::transfer::quarantine::Fence;

/// A sender's rank that a request's rows come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct From {
    pub link: u32,
    /// Whether something has come of the request.
    pub heard: bool,
    /// When it was last told of the grant; none if it is to be told now.
    pub told: Option<Duration>,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Arriving {
    pub fence: Fence,
    pub tokens: u32,
    /// The first token that is wanted.
    pub first: u32,
    /// The sender's replica.
    pub replica: u32,
    pub landing: Vec<u32>,
    pub from: Vec<From>,
    pub ledger: Ledger,
    /// Kinds of payloads that have not come.
    pub payloads: Vec<u8>,
    pub deadline: Option<Duration>,
    /// Layers that were said to be ready.
    pub ready: Vec<u32>,
}

/// A use of pages that has ended here. It is told so until the senders have said that nothing lands any more.
#[derive(Debug)]
pub(super) struct Ending {
    pub fence: Fence,
    pub reason: Reason,
    /// The connections that have not answered, and when they were last told.
    pub links: Vec<(u32, Option<Duration>)>,
}

impl Arriving {
    pub fn is_whole(&self) -> bool {
        self.payloads.is_empty() && self.ledger.is_whole()
    }
}
