//! What a sender does with the frames that it gets.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{Answer, Frame, Reason};
use crate::transfer::quarantine::Fence;
use crate::transfer::sender::line::{Job, What};
use crate::transfer::sender::request::{Granted, Target};
use crate::transfer::sender::{Early, Event, Sender, count};

const OPERATION: &str = "transfer sender";

impl Sender {
    /// A frame has come.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a frame that no receiver of this version sends, and in this place; those of a hello:
    /// [`Kind::BadVersion`], and what the two sides do not agree on. The caller closes the connection and says
    /// [`Sender::disconnect`].
    pub fn frame(&mut self, link: u32, bytes: &[u8]) -> Result<()> {
        let foreign = |place| Err(Error::new(Kind::BadFormat, OPERATION).at(place).with("link", link));
        let Some(index) = self.lines.iter().position(|line| line.link == link) else {
            return foreign("a frame of no connection");
        };
        let frame = Frame::decode(bytes)?;
        let known = self.lines.get(index).and_then(|line| line.peer.as_ref()).is_some();
        match frame {
            Frame::Hello(greeting) if !known => {
                let others = self.lines.iter().filter_map(|line| line.peer.as_ref());
                let peer = self.own.meet(&greeting, others.map(|peer| &peer.paired))?;
                self.lines.iter_mut().skip(index).take(1).for_each(|line| line.peer = Some(peer.clone()));
            }
            _ if !known => return foreign("a frame before the hello"),
            Frame::Grant(grant) => {
                let landing = grant.landing.iter().collect();
                let (fence, tokens) = (grant.fence, grant.tokens);
                let (first, replica) = (grant.first, grant.replica);
                self.grant(Early { link, fence, tokens, first, replica, landing, done: false })?;
            }
            Frame::Answer(answer) => self.answer(index, &answer),
            Frame::End { fence, reason: Reason::Done } if self.is_early(link, fence) => {
                self.end_early(link, fence)
            }
            Frame::End { fence, reason } => {
                self.miss(link, fence)?;
                self.end(link, fence, reason);
            }
            _ => return foreign("a frame that only senders send"),
        }
        self.clear();
        Ok(())
    }

    /// A receiver gives pages for a request.
    pub(super) fn grant(&mut self, grant: Early) -> Result<()> {
        let (link, fence, request) = (grant.link, grant.fence, grant.fence.request);
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return Ok(()) };
        if line.has_ended(fence) {
            return Ok(());
        }
        let refuse = |reason| Frame::Failed { fence, reason };
        let Some(sending) = self.requests.get_mut(&request) else {
            let known = self.early.iter().any(|early| (early.link, early.fence) == (link, fence));
            match self.ended.iter().find(|(ended, _)| *ended == request) {
                Some((_, Reason::Done)) => line.say(&refuse(Reason::Gone)),
                Some((_, reason)) => line.say(&refuse(*reason)),
                // One more comes again later.
                None if !known && self.early.len() < self.options.requests as usize => self.early.push(grant),
                None => {}
            }
            return Ok(());
        };
        if let Some(known) = sending.grant_of(fence, link) {
            // It asks whether anything was lost.
            if known.ended.is_none() {
                line.told.iter_mut().filter(|told| told.names(fence)).for_each(|told| told.last = None);
            }
            return Ok(());
        }
        let Some(peer) = &line.peer else { return Ok(()) };
        let own = (self.own.rank.stage, self.own.rank.lane);
        let (mut receivers, mut gets) = (0, false);
        peer.paired.plan.receivers(own, |rank| {
            receivers += 1;
            gets |= rank == (peer.rank.stage, peer.rank.lane);
        })?;
        let target = sending.target.as_ref();
        let other = target.is_some_and(|target| {
            !Arc::ptr_eq(&target.paired, &peer.paired) || target.replica != peer.rank.replica
        });
        let numbers = grant.tokens == sending.tokens && grant.first <= grant.tokens;
        if !gets || other || !numbers || grant.replica != self.own.rank.replica {
            line.say(&refuse(Reason::BadFormat));
            return Ok(());
        }
        let twice = sending.grants.iter().any(|known| known.link == link);
        if twice || sending.failed.is_some() || sending.parts.iter().any(|held| held.released) {
            line.say(&refuse(sending.failed.unwrap_or(Reason::Gone)));
            return Ok(());
        }
        if target.is_none() {
            sending.target =
                Some(Target { paired: Arc::clone(&peer.paired), replica: peer.rank.replica, receivers });
            sending.parts.iter_mut().for_each(|held| held.waiting = receivers);
        }
        let (ended, told, drained) = (None, None, false);
        sending.grants.push(Granted { link, fence, first: grant.first, ended, told, drained });
        for index in 0..sending.payloads.len() {
            line.push(Job { request, fence, what: What::Payload(index), attempts: 0 });
        }
        let (parts, first, landing) = (sending.parts.len(), grant.first, grant.landing);
        self.events.push_back(Event::Granted { request, link, fence, first, landing });
        (0..parts).try_for_each(|part| self.queue(request, part, (link, fence, first)))
    }

    /// What became of a message. An answer to a message that was answered before changes nothing.
    fn answer(&mut self, index: usize, answer: &Answer<'_>) {
        let Some(line) = self.lines.get_mut(index) else { return };
        let Some(place) = line.told.iter().position(|told| told.number == answer.number) else { return };
        let Some(told) = line.told.remove(place) else { return };
        let mut failed = vec![None; told.jobs.len()];
        for (part, runs) in answer.failed() {
            failed.iter_mut().skip(part.into()).take(1).for_each(|failed| *failed = Some(runs));
        }
        for (job, failed) in told.jobs.into_iter().zip(failed) {
            match (failed, &job.what) {
                (None, What::Rows { part, .. }) => self.answered(job.request, *part),
                (None, What::Payload(_)) => {}
                (Some(_), _) if job.attempts >= self.options.repeats => {
                    self.fail(job.request, Reason::Corrupt);
                }
                (Some(runs), _) => self.repeat(index, &job, runs.iter().collect()),
            }
        }
    }

    /// Sends the runs of a job again that were wrong, or its payload.
    fn repeat(&mut self, index: usize, job: &Job, mut runs: Vec<u32>) {
        let Some(sending) = self.requests.get(&job.request).filter(|sending| sending.failed.is_none()) else {
            return;
        };
        if !sending.open().any(|grant| grant.fence == job.fence) {
            return;
        }
        runs.sort_unstable();
        runs.dedup();
        let what = match &job.what {
            What::Rows { part, tokens, .. } => {
                let between = self.between(index);
                let counted = self.lines.get(index).and_then(|line| {
                    let (plan, held) = (&line.peer.as_ref()?.paired.plan, sending.parts.get(*part)?);
                    count(plan, &held.computed, tokens, between).ok()
                });
                // Runs that the job does not have were not told.
                if runs.last().is_none_or(|last| counted.is_none_or(|counted| *last as usize >= counted)) {
                    return self.fail(job.request, Reason::BadFormat);
                }
                What::Rows { part: *part, tokens: tokens.clone(), some: Some(runs) }
            }
            What::Payload(payload) => What::Payload(*payload),
        };
        let again = Job { request: job.request, fence: job.fence, what, attempts: job.attempts + 1 };
        if let Some(line) = self.lines.get_mut(index) {
            line.push(again);
        }
    }

    /// Whether a use of pages is of a request that has not begun.
    fn is_early(&self, link: u32, fence: Fence) -> bool {
        let known = self.ended.iter().any(|(request, _)| *request == fence.request);
        let ended = self.lines.iter().any(|line| line.link == link && line.has_ended(fence));
        !known && !ended && !self.requests.contains_key(&fence.request)
    }

    /// A receiver has all it wants of a request that has not begun here, from other ranks or from before.
    fn end_early(&mut self, link: u32, fence: Fence) {
        let full = self.early.len() >= self.options.requests as usize;
        match self.early.iter_mut().find(|early| (early.link, early.fence) == (link, fence)) {
            Some(early) => early.done = true,
            // It is told again later.
            None if full => return,
            None => {
                let (tokens, replica, landing) = (0, self.own.rank.replica, Vec::new());
                self.early.push(Early { link, fence, tokens, first: 0, replica, landing, done: true });
            }
        }
        if let Some(line) = self.lines.iter_mut().find(|line| line.link == link) {
            line.say(&Frame::Drained { fence });
        }
    }

    /// A request begins of which a receiver has all it wants.
    pub(super) fn ended_early(&mut self, link: u32, fence: Fence) -> Result<()> {
        self.miss(link, fence)?;
        self.end(link, fence, Reason::Done);
        Ok(())
    }

    /// A use of pages ends whose grant was lost: it ends what was granted, so it is granted first. A receiver may have
    /// all it needs from other ranks.
    fn miss(&mut self, link: u32, fence: Fence) -> Result<()> {
        let Some(sending) = self.requests.get(&fence.request) else { return Ok(()) };
        if sending.grants.iter().any(|grant| grant.link == link) {
            return Ok(());
        }
        let (tokens, replica) = (sending.tokens, self.own.rank.replica);
        let landing = Vec::new();
        self.grant(Early { link, fence, tokens, first: tokens, replica, landing, done: false })
    }

    /// A receiver reads nothing of this use any more.
    fn end(&mut self, link: u32, fence: Fence, reason: Reason) {
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return };
        line.note_end(fence);
        self.early.retain(|early| (early.link, early.fence) != (link, fence));
        let request = fence.request;
        let sending = self.requests.get_mut(&request);
        let Some((sending, drained)) = sending.and_then(|sending| {
            let grant = sending.grant_of(fence, link)?;
            grant.ended.get_or_insert(reason);
            let drained = grant.drained;
            Some((sending, drained))
        }) else {
            // Nothing was ever written under it on this connection, or all of it has ended.
            if !line.writes(fence) {
                line.say(&Frame::Drained { fence });
            }
            return;
        };
        if drained {
            line.say(&Frame::Drained { fence });
            return;
        }
        line.drop_all(fence, |part| {
            if let Some(origin) = sending.answered(part) {
                self.events.push_back(Event::Released { request, origin });
            }
        });
        if reason != Reason::Done {
            self.fail(request, reason);
        }
        self.drain(request, fence, link);
    }
}
