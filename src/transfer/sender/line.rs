//! One connection of a sender: what waits to be told on it, and what was told and not answered.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use crate::transfer::frames::Frame;
use crate::transfer::pairing::Peer;
use crate::transfer::quarantine::Fence;

/// How many ended uses of pages are remembered one by one.
const REMEMBERED: usize = 1 << 12;

/// Rows of a part for one receiver: those of some tokens, and of these all runs, or some.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub request: u64,
    pub fence: Fence,
    pub what: What,
    /// How often runs of it were wrong.
    pub attempts: u32,
}

/// What a job tells.
#[derive(Clone, Debug)]
pub(super) enum What {
    Rows {
        /// The index of the part in its request.
        part: usize,
        tokens: Range<u32>,
        /// Runs that are sent again; none means all.
        some: Option<Vec<u32>>,
    },
    /// The index of a payload in its request.
    Payload(usize),
}

/// A message that was not answered.
#[derive(Debug)]
pub(super) struct Told {
    pub number: u64,
    pub jobs: Vec<Job>,
    /// When it was sent for the first time, and for the last time; none if it is to be sent now.
    pub first: Duration,
    pub last: Option<Duration>,
}

impl Told {
    /// Whether it tells something of a use of pages.
    pub fn names(&self, fence: Fence) -> bool {
        self.jobs.iter().any(|job| job.fence == fence)
    }
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Line {
    pub link: u32,
    /// Whether rows are written to the receiver's memory before they are told.
    pub far: bool,
    pub peer: Option<Peer>,
    /// Small frames, in order.
    pub frames: VecDeque<Vec<u8>>,
    /// Jobs whose rows are yet to be written, far only.
    pub unwritten: VecDeque<Job>,
    /// Jobs whose rows are being written, by number.
    pub writing: Vec<(u64, Job)>,
    /// Jobs that may be told.
    pub ready: VecDeque<Job>,
    pub told: VecDeque<Told>,
    /// The number of the next message, and of the next write.
    pub next: u64,
    /// Generations that have ended: a grant of one that comes late is none. Those below the floor have all ended.
    ended: BTreeSet<u64>,
    floor: u64,
}

impl Line {
    pub fn new(link: u32, far: bool) -> Line {
        Line {
            link,
            far,
            peer: None,
            frames: VecDeque::new(),
            unwritten: VecDeque::new(),
            writing: Vec::new(),
            ready: VecDeque::new(),
            told: VecDeque::new(),
            next: 0,
            ended: BTreeSet::new(),
            floor: 0,
        }
    }

    /// Notes that a use of pages has ended.
    pub fn note_end(&mut self, fence: Fence) {
        self.ended.insert(fence.generation);
        while self.ended.len() > REMEMBERED {
            self.floor = self.ended.pop_first().map_or(self.floor, |first| first.saturating_add(1));
        }
    }

    /// Whether a use of pages has ended, as far as is remembered.
    pub fn has_ended(&self, fence: Fence) -> bool {
        fence.generation < self.floor || self.ended.contains(&fence.generation)
    }

    /// Queues a small frame.
    pub fn say(&mut self, frame: &Frame<'_>) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.frames.push_back(bytes);
    }

    /// Jobs that were told and not answered.
    pub fn in_flight(&self) -> usize {
        self.told.iter().map(|told| told.jobs.len()).sum()
    }

    /// Queues a job: rows that a foreign writer has to write first, or all else.
    pub fn push(&mut self, job: Job) {
        match self.far && matches!(job.what, What::Rows { .. }) {
            true => self.unwritten.push_back(job),
            false => self.ready.push_back(job),
        }
    }

    /// Drops what is not told yet of a use of pages.
    pub fn drop_queued(&mut self, fence: Fence) {
        self.unwritten.retain(|job| job.fence != fence);
        self.ready.retain(|job| job.fence != fence);
    }

    /// Drops all jobs of a use of pages that are not being written, and gives their parts to `dropped`.
    pub fn drop_all(&mut self, fence: Fence, mut dropped: impl FnMut(usize)) {
        let mut keep = |job: &Job| {
            let own = job.fence == fence;
            if let (true, What::Rows { part, .. }) = (own, &job.what) {
                dropped(*part);
            }
            !own
        };
        self.unwritten.retain(&mut keep);
        self.ready.retain(&mut keep);
        for told in &mut self.told {
            told.jobs.retain(&mut keep);
        }
        self.told.retain(|told| !told.jobs.is_empty());
    }

    /// Whether rows are being written under a fence.
    pub fn writes(&self, fence: Fence) -> bool {
        self.writing.iter().any(|(_, job)| job.fence == fence)
    }
}
