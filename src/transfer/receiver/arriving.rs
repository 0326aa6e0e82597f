//! A request at the receiver, and a connection: what has arrived, and what the other ends are yet to hear.

use std::collections::VecDeque;
use std::time::Duration;

use crate::transfer::frames::Reason;
use crate::transfer::ledger::Ledger;
use crate::transfer::pairing::Peer;
use crate::transfer::quarantine::Fence;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Arriving {
    pub tokens: u32,
    /// The first token that is wanted.
    pub first: u32,
    /// The sender's replica.
    pub replica: u32,
    pub landing: Vec<u32>,
    /// The connections that its rows come from.
    pub links: Vec<u32>,
    pub ledger: Ledger,
    /// Kinds of payloads that have not come.
    pub payloads: Vec<u8>,
    pub deadline: Option<Duration>,
    /// The layer, component and first token of the last run that was wrong.
    pub wrong: Option<(u32, u32, u32)>,
}

impl Arriving {
    pub fn is_whole(&self) -> bool {
        self.payloads.is_empty() && self.ledger.is_whole()
    }
}

/// What a sender is told until it has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// A grant, until the sender knows it.
    Grant,
    /// An end, until nothing is in flight.
    End(Reason),
}

/// Something that is told again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Saying {
    pub fence: Fence,
    pub says: Says,
    /// When it was told first and last, and how often.
    pub told: Option<(Duration, Duration)>,
    pub times: u32,
}

/// A frame that waits to be taken: its bytes, the parts that it answers, and the message that it answers.
#[derive(Debug)]
pub(super) struct Waiting {
    pub bytes: Vec<u8>,
    pub parts: u32,
    pub answers: Option<u64>,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Line {
    pub link: u32,
    /// Whether rows are written to landing pages from its other end.
    pub far: bool,
    pub peer: Option<Peer>,
    pub frames: VecDeque<Waiting>,
    /// The sum of the parts of those frames.
    pub parts: u32,
    pub sayings: Vec<Saying>,
    /// Whether a frame has come since the last poll, and the time of the poll after the last frame.
    pub heard: bool,
    pub heard_at: Option<Duration>,
    /// Whether it was said that it is to be closed.
    pub closing: bool,
    /// Whether the fabric has no room for its frames; since which poll; and whether it has room again since the last
    /// poll.
    pub blocked: bool,
    pub blocked_at: Option<Duration>,
    pub unblocked: bool,
}

impl Line {
    pub fn new(link: u32, far: bool, hello: Vec<u8>) -> Line {
        let frames = VecDeque::from([Waiting { bytes: hello, parts: 0, answers: None }]);
        Line {
            link,
            far,
            peer: None,
            frames,
            parts: 0,
            sayings: Vec::new(),
            heard: true,
            heard_at: None,
            closing: false,
            blocked: false,
            blocked_at: None,
            unblocked: false,
        }
    }

    /// Tells something until it is answered, instead of what was told of this use of pages.
    pub fn say(&mut self, fence: Fence, says: Says) {
        self.sayings.retain(|saying| saying.fence != fence);
        self.sayings.push(Saying { fence, says, told: None, times: 0 });
    }

    /// What waited for room was not on its way meanwhile: it need not be told again yet.
    pub fn wait_anew(&mut self, now: Duration) {
        self.blocked_at = None;
        self.sayings.iter_mut().filter_map(|saying| saying.told.as_mut()).for_each(|told| *told = (now, now));
    }

    /// Since when the other end owes an answer, its hello included.
    pub fn owed_since(&self) -> Option<Duration> {
        let told = self.sayings.iter().filter_map(|saying| Some(saying.told?.0));
        told.chain(self.peer.is_none().then_some(Duration::ZERO)).min()
    }
}
