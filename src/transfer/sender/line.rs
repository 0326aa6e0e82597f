//! One connection of a sender: what waits to be told on it, and what was told and not answered.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{Frame, Reason};
use crate::transfer::pairing::Peer;
use crate::transfer::quarantine::Fence;

/// How many ended uses of pages are remembered one by one.
const REMEMBERED: usize = 1 << 12;
/// The most small frames that wait to be sent.
const FRAMES_MAX: usize = 1 << 14;

/// Rows of a part for one receiver: those of some tokens, and of these all runs, or some.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub request: u64,
    pub fence: Fence,
    pub what: What,
    /// The most runs that it tells, and the bytes of its rows where they are paced.
    pub runs: usize,
    pub bytes: u64,
    /// The most bytes that its rows have.
    pub size: u64,
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
    /// Its jobs by their place in it; none for those whose use of pages has ended.
    pub jobs: Vec<Option<Job>>,
    /// When it was sent first and last, and how often.
    pub first: Duration,
    pub last: Duration,
    pub times: u32,
}

/// A use of pages for which the receiver is told that no more comes, until it says that it has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failing {
    pub fence: Fence,
    pub reason: Reason,
    /// When it was told first and last.
    pub told: Option<(Duration, Duration)>,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Line {
    pub link: u32,
    /// Whether rows are written to the receiver's memory before they are told.
    pub far: bool,
    pub peer: Option<Peer>,
    /// Small frames, in order.
    frames: VecDeque<Vec<u8>>,
    /// Jobs whose rows are yet to be written, far only.
    pub unwritten: VecDeque<Job>,
    /// Jobs whose rows are being written, by the number of the write.
    pub writing: Vec<(u64, Job)>,
    /// Jobs that may be told.
    pub ready: VecDeque<Job>,
    pub told: VecDeque<Told>,
    pub failing: Vec<Failing>,
    /// The number of the next message.
    pub next: u64,
    /// Whether it is to be closed, for another reason than silence, and whether that was said.
    pub broken: bool,
    pub closing: bool,
    /// Whether the fabric has no room for it; since which poll; and whether it has room again since the last poll.
    pub blocked: bool,
    pub blocked_at: Option<Duration>,
    pub unblocked: bool,
    /// Whether a frame has come since the last poll, and the time of the poll after the last frame.
    pub heard: bool,
    pub heard_at: Option<Duration>,
    /// Generations that have ended: a grant of one that comes late is none. None is remembered below the floor.
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
            failing: Vec::new(),
            next: 0,
            broken: false,
            closing: false,
            blocked: false,
            blocked_at: None,
            unblocked: false,
            heard: true,
            heard_at: None,
            ended: BTreeSet::new(),
            floor: 0,
        }
    }

    /// Notes that a use of pages has ended. Of those that are no longer remembered one by one, all count as ended: a
    /// receiver's generations grow.
    pub fn note_end(&mut self, fence: Fence) {
        if fence.generation < self.floor {
            return;
        }
        self.ended.insert(fence.generation);
        while self.ended.len() > REMEMBERED {
            self.floor = self.ended.pop_first().map_or(self.floor, |first| first.saturating_add(1));
        }
    }

    /// Whether a use of pages has ended, or is so old that it is taken to have.
    pub fn has_ended(&self, fence: Fence) -> bool {
        fence.generation < self.floor || self.ended.contains(&fence.generation)
    }

    /// Queues a small frame.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] for a receiver that sends much and takes nothing.
    pub fn say(&mut self, frame: &Frame<'_>) -> Result<()> {
        if self.frames.len() >= FRAMES_MAX {
            let error = Error::new(Kind::Exhausted, "transfer sender").at("a receiver that takes no frames");
            return Err(error.with("link", self.link).with("most", FRAMES_MAX as u64));
        }
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.frames.push_back(bytes);
        Ok(())
    }

    /// Takes the first small frame.
    pub fn small(&mut self) -> Option<Vec<u8>> {
        self.frames.pop_front()
    }

    pub fn has_small(&self) -> bool {
        !self.frames.is_empty()
    }

    /// How many jobs may be told now: the receiver takes so many parts before it has answered, those included that it
    /// need not answer any more.
    pub fn room(&self) -> usize {
        let told: usize = self.told.iter().map(|told| told.jobs.len()).sum();
        let window = self.peer.as_ref().map_or(0, |peer| peer.window as usize);
        window.saturating_sub(told)
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

    /// How many jobs may be written now: as many as may be told after that.
    pub fn room_to_write(&self) -> usize {
        self.room().saturating_sub(self.writing.len() + self.ready.len())
    }

    /// Drops all jobs of a use of pages that are not being written, and gives their parts to `dropped`. Those that were
    /// told leave their place in the message, because answers name parts by it.
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
        for job in self.told.iter_mut().flat_map(|told| &mut told.jobs) {
            *job = job.take().filter(&mut keep);
        }
        self.told.retain(|told| told.jobs.iter().any(Option::is_some));
        self.failing.retain(|failing| failing.fence != fence);
    }

    /// Takes a message back that has lost jobs: what is left is told again, in another one.
    pub fn split(&mut self, place: usize) -> bool {
        let lost = self.told.get(place).is_some_and(|told| told.jobs.iter().any(Option::is_none));
        if lost && let Some(told) = self.told.remove(place) {
            let left = told.jobs.into_iter().flatten();
            self.ready.extend(left.map(|job| Job { bytes: 0, ..job }));
        }
        lost
    }

    /// What waited for room was not on its way meanwhile: it need not be told again yet.
    pub fn wait_anew(&mut self, now: Duration) {
        self.blocked_at = None;
        self.told.iter_mut().for_each(|told| (told.first, told.last) = (now, now));
        let failing = self.failing.iter_mut().filter_map(|failing| failing.told.as_mut());
        failing.for_each(|told| *told = (now, now));
    }

    /// Takes a write back that the fabric had no room for: it is asked for again.
    pub fn postpone(&mut self, write: u64) {
        if let Some(index) = self.writing.iter().position(|(number, _)| *number == write) {
            let (_, job) = self.writing.remove(index);
            self.unwritten.push_front(Job { bytes: 0, ..job });
        }
    }

    /// Whether rows are being written under a fence.
    pub fn writes(&self, fence: Fence) -> bool {
        self.writing.iter().any(|(_, job)| job.fence == fence)
    }

    /// Since when the other end owes an answer: a hello, an answer, or an end.
    pub fn owed_since(&self) -> Option<Duration> {
        let told = self.told.iter().map(|told| told.first);
        let failing = self.failing.iter().filter_map(|failing| Some(failing.told?.0));
        let hello = self.peer.is_none().then_some(Duration::ZERO);
        told.chain(failing).chain(hello).min()
    }
}
