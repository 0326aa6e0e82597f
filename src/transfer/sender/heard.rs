//! What a sender does with the frames that it gets.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::transfer::frames::{Answer, Frame, Grant, Reason};
use crate::transfer::quarantine::Fence;
use crate::transfer::sender::line::{Failing, Job, What};
use crate::transfer::sender::request::{Granted, Landing, Target};
use crate::transfer::sender::{Early, Event, REMEMBERED, Sender, count};

const OPERATION: &str = "transfer sender";

impl Sender {
    /// A frame has come.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] for a frame that no receiver of this version sends, and in this place; those of a hello:
    /// [`Kind::BadVersion`], and what the two sides do not agree on; [`Kind::Exhausted`] for a receiver that takes no
    /// frames. The caller closes the connection and says [`Sender::disconnect`].
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
                self.events.push_back(Event::Met { link, rank: peer.rank });
                self.lines.iter_mut().skip(index).take(1).for_each(|line| line.peer = Some(peer.clone()));
            }
            Frame::Hello(_) => return foreign("a second hello"),
            _ if !known => return foreign("a frame before the hello"),
            Frame::Grant(grant) => self.granted(index, link, &grant)?,
            Frame::Answer(answer) if self.answer(index, &answer) => {}
            Frame::Answer(_) => return foreign("an answer to what was not told"),
            Frame::End { fence, reason: Reason::Done } if self.is_early(index, fence) => {
                self.end_early(index, fence)?;
            }
            Frame::End { fence, reason } if self.is_early(index, fence) => {
                self.give_up_early(fence.request, reason);
                self.end(link, fence, reason)?;
            }
            Frame::End { fence, reason } => {
                if !self.lines.get(index).is_some_and(|line| line.has_ended(fence)) {
                    self.miss(link, fence)?;
                }
                self.end(link, fence, reason)?;
            }
            _ => return foreign("a frame that only senders send"),
        }
        self.lines.iter_mut().skip(index).take(1).for_each(|line| line.heard = true);
        Ok(())
    }

    /// A grant has come. It is known if it is kept, or was before. It is refused otherwise, as often as it comes.
    fn granted(&mut self, index: usize, link: u32, grant: &Grant<'_>) -> Result<()> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(()) };
        let fence = grant.fence;
        let kept = self.early.iter().any(|early| (early.link, early.fence) == (link, fence))
            || self.requests.get_mut(&fence.request).is_some_and(|of| of.grant_of(fence, link).is_some());
        if !kept && line.has_ended(fence) {
            return line.say(&Frame::Failed { fence, reason: Reason::Gone });
        }
        let (tokens, first, replica) = (grant.tokens, grant.first, grant.replica);
        let landing = if line.far { grant.landing.iter().collect() } else { Vec::new() };
        self.grant(Early { link, fence, tokens, first, replica, landing, done: false }, true)
    }

    /// A receiver gives pages for a request: by a frame that comes now, or before.
    pub(super) fn grant(&mut self, grant: Early, now: bool) -> Result<()> {
        let (link, fence, request) = (grant.link, grant.fence, grant.fence.request);
        let early = self.early.iter().filter(|early| early.link == link && !early.done).count();
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return Ok(()) };
        let (refuse, kept) = (|reason| Frame::Failed { fence, reason }, Frame::Known { fence });
        let Some(sending) = self.requests.get_mut(&request) else {
            let known = self.early.iter().any(|early| (early.link, early.fence) == (link, fence));
            return match self.ended.iter().find(|(ended, _)| *ended == request) {
                Some((_, Reason::Done)) => line.say(&refuse(Reason::Gone)),
                Some((_, reason)) => line.say(&refuse(*reason)),
                None if known => line.say(&kept),
                None if early >= self.options.requests as usize => line.say(&refuse(Reason::Gone)),
                None => {
                    line.say(&kept)?;
                    self.early.push(grant);
                    Ok(())
                }
            };
        };
        if sending.grant_of(fence, link).is_some() {
            return line.say(&kept);
        }
        let Some(peer) = line.peer.clone() else { return Ok(()) };
        let (own, rank) = ((self.own.rank.stage, self.own.rank.lane), (peer.rank.stage, peer.rank.lane));
        let gets = peer.paired.plan.meet(own, rank);
        let other = sending.target.as_ref().is_some_and(|target| {
            !target.paired.is_as(&peer.paired)
                || (target.instance, target.replica) != (peer.rank.instance, peer.rank.replica)
        });
        let page = peer.paired.plan.target.page_tokens.max(1);
        let first_page = grant.first / page;
        let end = if grant.first < grant.tokens { grant.tokens.div_ceil(page) } else { 0 };
        let wanted = end.saturating_sub(first_page) as usize;
        let landing = grant.done || !line.far || grant.landing.len() == wanted;
        let numbers = grant.tokens == sending.tokens && grant.first <= grant.tokens && landing;
        let twice = sending.grants.iter().any(|known| known.rank == rank);
        let late = twice || sending.failed.is_some() || sending.parts.iter().any(|held| held.released);
        let wrong = !gets || other || !numbers || grant.replica != self.own.rank.replica;
        let reason = match wrong {
            true => Some(Reason::BadFormat),
            false => late.then_some(sending.failed.unwrap_or(Reason::Gone)),
        };
        if let Some(reason) = reason {
            // One that was known does not come again, so it is refused until it ends.
            if now {
                return line.say(&refuse(reason));
            }
            line.failing.push(Failing { fence, reason, told: None });
            return Ok(());
        }
        if now {
            line.say(&kept)?;
        }
        if sending.target.is_none() {
            sending.target = Some(Target {
                paired: Arc::clone(&peer.paired),
                instance: peer.rank.instance,
                replica: peer.rank.replica,
            });
            let receivers = sending.receivers();
            sending.parts.iter_mut().for_each(|held| held.waiting = receivers);
        }
        let (ended, drained, first) = (None, false, grant.first);
        let landing = Landing { first_page, pages: grant.landing.into() };
        sending.grants.push(Granted { link, rank, fence, first, landing, ended, drained });
        let held = sending.tokens <= self.options.bulk_tokens && !sending.finished;
        let (parts, payloads) = (if held { 0 } else { sending.parts.len() }, sending.payloads.len());
        (0..payloads).for_each(|payload| self.push_payload(link, fence, payload));
        if !grant.done {
            self.events.push_back(Event::Granted { request, link, fence, first });
        }
        (0..parts).try_for_each(|part| self.queue(request, part, (link, fence, first)))
    }

    /// What became of a message. An answer to a message that was answered before changes nothing. False for one that
    /// names a part that the message does not have.
    fn answer(&mut self, index: usize, answer: &Answer<'_>) -> bool {
        let Some(line) = self.lines.get_mut(index) else { return true };
        let place = line.told.iter().position(|told| told.number == answer.number);
        let Some(told) = place.and_then(|place| line.told.remove(place)) else { return true };
        let mut failed = answer.failed().peekable();
        for (place, job) in told.jobs.into_iter().enumerate() {
            let runs = failed.next_if(|(part, _)| usize::from(*part) == place).map(|(_, runs)| runs);
            let Some(job) = job else { continue };
            match (runs, &job.what) {
                (None, What::Rows { part, .. }) => self.answered(job.request, *part),
                (None, What::Payload(_)) => {}
                (Some(_), _) if job.attempts >= self.options.repeats => {
                    self.fail(job.request, Reason::Corrupt);
                }
                (Some(runs), _) => self.repeat(index, &job, runs.iter().collect()),
            }
        }
        failed.next().is_none()
    }

    /// Sends the runs of a job again that were wrong, or its payload.
    fn repeat(&mut self, index: usize, job: &Job, mut runs: Vec<u32>) {
        let Some(sending) = self.requests.get(&job.request).filter(|sending| sending.failed.is_none()) else {
            return;
        };
        let Some(line) = self.lines.get_mut(index) else { return };
        let (link, fence) = (line.link, job.fence);
        if !sending.open().any(|grant| (grant.link, grant.fence) == (link, fence)) {
            return;
        }
        runs.sort_unstable();
        runs.dedup();
        let (what, count) = match &job.what {
            What::Rows { part, tokens, .. } => {
                let (part, tokens, count) = (*part, tokens.clone(), runs.len());
                // Runs that the job does not have were not told.
                let all = self.runs_of(index, job);
                if runs.last().is_none_or(|last| *last as usize >= all) {
                    return self.fail(job.request, Reason::BadFormat);
                }
                (What::Rows { part, tokens, some: Some(runs) }, count)
            }
            What::Payload(payload) => (What::Payload(*payload), 0),
        };
        // Its bytes were counted when it was told for the first time.
        let (request, bytes, size, attempts) = (job.request, 0, job.size, job.attempts + 1);
        if let Some(line) = self.lines.get_mut(index) {
            line.push(Job { request, fence, what, runs: count, bytes, size, attempts });
        }
    }

    /// How many runs the tokens of a job have, those included that it does not tell.
    fn runs_of(&self, index: usize, job: &Job) -> usize {
        let What::Rows { part, tokens, .. } = &job.what else { return 0 };
        let plan = self.lines.get(index).and_then(|line| Some(&line.peer.as_ref()?.paired.plan));
        let held = self.requests.get(&job.request).and_then(|sending| sending.parts.get(*part));
        let (Some(plan), Some(held)) = (plan, held) else { return 0 };
        count(plan, &held.computed, tokens, self.between(index)).map_or(0, |(runs, _)| runs)
    }

    /// Whether a use of pages is of a request that has not begun.
    fn is_early(&self, index: usize, fence: Fence) -> bool {
        let Some(line) = self.lines.get(index) else { return false };
        // A grant that was kept may be so old that its generation is taken to have ended.
        if self.early.iter().any(|early| !early.done && (early.link, early.fence) == (line.link, fence)) {
            return true;
        }
        let known = self.ended.iter().any(|(request, _)| *request == fence.request);
        !known && !line.has_ended(fence) && !self.requests.contains_key(&fence.request)
    }

    /// A receiver has all it wants of a request that has not begun here, from other ranks. Of each connection as many
    /// are remembered as there may be requests; a request that is forgotten so waits for its deadline.
    fn end_early(&mut self, index: usize, fence: Fence) -> Result<()> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(()) };
        let link = line.link;
        line.say(&Frame::Drained { fence })?;
        line.note_end(fence);
        if let Some(early) = self.early.iter_mut().find(|early| (early.link, early.fence) == (link, fence)) {
            (early.done, early.landing) = (true, Vec::new());
            return Ok(());
        }
        let own = |early: &Early| early.link == link;
        if self.early.iter().filter(|early| own(early)).count() >= self.options.requests as usize
            && let Some(oldest) = self.early.iter().position(|early| own(early) && early.done)
        {
            self.early.remove(oldest);
        }
        let (replica, landing) = (self.own.rank.replica, Vec::new());
        self.early.push(Early { link, fence, tokens: 0, first: 0, replica, landing, done: true });
        Ok(())
    }

    /// A request that has not begun was given up by a receiver, or lost one. It fails when it begins. Of those that do
    /// not begin the newest are remembered; what is forgotten waits for its deadline.
    pub(super) fn give_up_early(&mut self, request: u64, reason: Reason) {
        if !self.given_up.iter().any(|(of, _)| *of == request) {
            self.given_up.push_back((request, reason));
        }
        while self.given_up.len() > REMEMBERED.max(self.options.requests as usize) {
            self.given_up.pop_front();
        }
    }

    /// A request begins of which a receiver has all it wants.
    pub(super) fn ended_early(&mut self, link: u32, fence: Fence) -> Result<()> {
        self.miss(link, fence)?;
        self.end(link, fence, Reason::Done)
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
        self.grant(Early { link, fence, tokens, first: tokens, replica, landing, done: true }, false)
    }

    /// A receiver reads nothing of this use any more.
    fn end(&mut self, link: u32, fence: Fence, reason: Reason) -> Result<()> {
        let Some(line) = self.lines.iter_mut().find(|line| line.link == link) else { return Ok(()) };
        line.note_end(fence);
        // What is done already stays known until its request begins.
        self.early.retain(|early| early.done || (early.link, early.fence) != (link, fence));
        let request = fence.request;
        let granted = self.requests.get_mut(&request).and_then(|sending| {
            let drained = sending.grant_of(fence, link)?.drained;
            Some((sending, drained))
        });
        let Some((sending, drained)) = granted else {
            // Nothing was ever told under it on this connection, or all of it has ended.
            line.failing.retain(|failing| failing.fence != fence);
            return if line.writes(fence) { Ok(()) } else { line.say(&Frame::Drained { fence }) };
        };
        if drained {
            return line.say(&Frame::Drained { fence });
        }
        if let Some(grant) = sending.grant_of(fence, link) {
            grant.ended.get_or_insert(reason);
        }
        line.drop_all(fence, |part| {
            if let Some(origin) = sending.answered(part) {
                self.events.push_back(Event::Released { request, origin });
            }
        });
        if reason != Reason::Done {
            self.fail(request, reason);
        }
        self.drain(request, fence, link)?;
        self.clear(request);
        Ok(())
    }
}
