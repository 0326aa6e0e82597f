//! A request at the sender: its parts, who was granted to, and what is still held for them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::transfer::frames::Reason;
use crate::transfer::pairing::Paired;
use crate::transfer::quarantine::Fence;
use crate::transfer::runs::Chunk;

/// Rows of one layer of a request that the engine has computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Computed {
    /// The request.
    pub request: u64,
    /// The layer's number in the model.
    pub layer: u32,
    /// The tokens.
    pub tokens: Range<u32>,
    /// Of a sender that divides tokens the chunk that they are of; else none.
    pub chunk: Option<Chunk>,
    /// Where the rows are: a number that the fabric and the [`Source`](super::Source) understand, such as the offset of
    /// a part of a [`StagingRing`](crate::transfer::StagingRing) or a number of the request's pages.
    pub origin: u64,
}

/// A receiver's pages for a writer from afar, from that of the first wanted token on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landing {
    pub(super) first_page: u32,
    pub(super) pages: Arc<[u32]>,
}

impl Landing {
    /// The landing page of a page of the request, as [`Run::to`](crate::transfer::Run::to) names it.
    pub fn page(&self, page: u32) -> Option<u32> {
        self.pages.get(usize::try_from(page.checked_sub(self.first_page)?).ok()?).copied()
    }
}

/// A part, and for how many messages it is still held.
#[derive(Debug)]
pub(super) struct Held {
    pub computed: Computed,
    /// Messages that were not answered, and receivers that have not granted.
    pub waiting: u32,
    pub released: bool,
}

/// A receiver's pages for this request.
#[derive(Debug)]
pub(super) struct Granted {
    pub link: u32,
    /// The receiver's stage and lane.
    pub rank: (u32, u32),
    pub fence: Fence,
    /// The first token that it wants.
    pub first: u32,
    pub landing: Landing,
    pub ended: Option<Reason>,
    /// Whether nothing is written under its fence any more, and it was told so.
    pub drained: bool,
}

/// The receiving instance: one replica of it.
#[derive(Debug)]
pub(super) struct Target {
    pub paired: Arc<Paired>,
    pub instance: u64,
    pub replica: u32,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Sending {
    pub tokens: u32,
    pub deadline: Option<Duration>,
    pub target: Option<Target>,
    pub grants: Vec<Granted>,
    pub parts: Vec<Held>,
    pub payloads: Vec<(u8, Vec<u8>)>,
    /// Whether all its parts are known.
    pub finished: bool,
    pub failed: Option<Reason>,
}

impl Sending {
    pub const fn new(tokens: u32, deadline: Option<Duration>) -> Sending {
        Sending {
            tokens,
            deadline,
            target: None,
            grants: Vec::new(),
            parts: Vec::new(),
            payloads: Vec::new(),
            finished: false,
            failed: None,
        }
    }

    pub fn grant_of(&mut self, fence: Fence, link: u32) -> Option<&mut Granted> {
        self.grants.iter_mut().find(|grant| grant.fence == fence && grant.link == link)
    }

    /// The grants that have not ended.
    pub fn open(&self) -> impl Iterator<Item = &Granted> {
        self.grants.iter().filter(|grant| grant.ended.is_none())
    }

    /// How many receivers a part is for; none is known before the first grant.
    pub fn receivers(&self) -> u32 {
        self.target.as_ref().map_or(0, |target| target.paired.receivers)
    }

    /// Whether no receiver reads or waits any more, and nothing is being written for one.
    pub fn is_over(&self) -> bool {
        let settled = self.grants.iter().all(|grant| grant.drained);
        let all = self.target.as_ref().map_or(u32::MAX, |target| target.paired.receivers);
        settled && (self.failed.is_some() || self.finished && self.grants.len() as u64 >= u64::from(all))
    }

    /// One message fewer names a part. Returns its origin if nothing needs it any more.
    pub fn answered(&mut self, part: usize) -> Option<u64> {
        let held = self.parts.get_mut(part)?;
        held.waiting = held.waiting.saturating_sub(1);
        held.free()
    }
}

impl Held {
    /// Its origin, once, if nothing needs it any more.
    pub fn free(&mut self) -> Option<u64> {
        let free = self.waiting == 0 && !self.released;
        self.released |= free;
        free.then_some(self.computed.origin)
    }
}
