//! What a sender wants done next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::transfer::digest::{digest, of_payload};
use crate::transfer::frames::{
    Digests, FRAME_MAX, Frame, List, NOTICE, NoticeWriter, PART, Payload, Reason, Rows,
};
use crate::transfer::plan::Plan;
use crate::transfer::runs::{Chunk, Of, room};
use crate::transfer::sender::line::{Job, Line, Told, What};
use crate::transfer::sender::request::{Computed, Held, Sending};
use crate::transfer::sender::{Action, Sender, Source, visit};

/// What a line may send.
enum Next {
    /// A message that was not answered: its place.
    Again(usize),
    /// The first of the queued jobs that may be told: its place.
    Fresh(usize),
}

impl Sender {
    /// What is to be done next; none for nothing before [`Sender::due`], or before something comes. A frame's bytes
    /// are in `frame` then.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory), and [`Kind::Internal`](crate::error::Kind::Internal).
    pub fn poll(
        &mut self,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let late = |sending: &Sending| {
            sending.failed.is_none() && sending.deadline.is_some_and(|deadline| now >= deadline)
        };
        while let Some(request) = self.requests.iter().find(|(_, of)| late(of)).map(|(request, _)| *request) {
            self.fail(request, Reason::TimedOut);
            self.clear();
        }
        for _ in 0..=self.lines.len() {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(Action::Event(event)));
            }
            let turn = self.turn;
            let Some(line) = self.lines.get_mut(turn) else {
                self.turn = 0;
                continue;
            };
            if let Some(bytes) = line.frames.pop_front() {
                frame.clear();
                frame.extend(bytes);
                return Ok(Some(Action::Frame { link: line.link }));
            }
            if let Some(action) = self.poll_line(turn, now, source, frame)? {
                return Ok(Some(action));
            }
            self.turn = turn + 1;
        }
        Ok(self.events.pop_front().map(Action::Event))
    }

    /// When [`Sender::poll`] has something to do, if nothing comes before; none for never.
    pub fn due(&self) -> Option<Duration> {
        let resend = self.options.resend;
        let told = self.lines.iter().flat_map(|line| &line.told);
        let told = told.map(|told| told.last.map_or(Duration::ZERO, |last| last + resend));
        let failed = self.requests.values().filter(|sending| sending.failed.is_some());
        let failed = failed.flat_map(|sending| sending.open());
        let failed = failed.map(|grant| grant.told.map_or(Duration::ZERO, |told| told + resend));
        let late = self.requests.values().filter(|sending| sending.failed.is_none());
        let late = late.filter_map(|sending| sending.deadline);
        let waits = self.lines.iter().filter(|line| !line.ready.is_empty() || !line.unwritten.is_empty());
        let fresh = waits.map(|_| self.pace);
        let small = !self.events.is_empty() || self.lines.iter().any(|line| !line.frames.is_empty());
        told.chain(failed).chain(late).chain(fresh).chain(small.then_some(Duration::ZERO)).min()
    }

    fn poll_line(
        &mut self,
        index: usize,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(None) };
        let (link, resend) = (line.link, self.options.resend);
        let failed = self.requests.values_mut().filter_map(|sending| Some((sending.failed?, sending)));
        let mut grants =
            failed.flat_map(|(reason, of)| of.grants.iter_mut().map(move |grant| (reason, grant)));
        let untold = grants.find(|(_, grant)| {
            let due = grant.told.is_none_or(|told| now >= told + resend);
            due && grant.link == link && grant.ended.is_none()
        });
        if let Some((reason, grant)) = untold {
            grant.told = Some(now);
            frame.clear();
            Frame::Failed { fence: grant.fence, reason }.encode(frame);
            return Ok(Some(Action::Frame { link }));
        }
        let Some(peer) = &line.peer else { return Ok(None) };
        if line.told.iter().any(|told| now >= told.first + self.options.patience) {
            return Ok(Some(Action::Close { link }));
        }
        let room = (peer.window as usize).saturating_sub(line.in_flight());
        let bulk = self.options.bulk_tokens;
        if line.writing.len() < room
            && let Some(place) = line.unwritten.iter().position(|job| may_go(&self.requests, job, bulk))
        {
            return Ok(self.write(index, place));
        }
        let line = &mut self.lines[index];
        let due = |told: &Told| told.last.is_none_or(|last| now >= last + resend);
        let next = match line.told.iter().position(due) {
            Some(told) => Some(Next::Again(told)),
            None if room > 0 && now >= self.pace => {
                let fresh = line.ready.iter().position(|job| may_go(&self.requests, job, bulk));
                fresh.map(Next::Fresh)
            }
            None => None,
        };
        match next {
            Some(Next::Again(place)) => self.tell_again(index, place, now, source, frame),
            Some(Next::Fresh(place)) => self.tell(index, (place, room), now, source, frame),
            None => Ok(None),
        }
    }

    /// Asks for a job's rows to be written.
    fn write(&mut self, index: usize, place: usize) -> Option<Action> {
        let line = self.lines.get_mut(index)?;
        let job = line.unwritten.remove(place)?;
        let What::Rows { part, tokens, some } = &job.what else { return None };
        let held = self.requests.get(&job.request)?.parts.get(*part)?;
        let (mut rows, some) = (held.computed.clone(), some.clone());
        rows.tokens = tokens.clone();
        let (link, write, fence) = (line.link, line.next, job.fence);
        line.next += 1;
        line.writing.push((write, job));
        Some(Action::Write { link, write, fence, rows, some })
    }

    /// Sends a message again. What it tells is still held.
    fn tell_again(
        &mut self,
        index: usize,
        place: usize,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(None) };
        let Some(told) = line.told.get_mut(place) else { return Ok(None) };
        told.last = Some(now);
        let (number, jobs) = (told.number, told.jobs.clone());
        self.message(index, number, &jobs, source, frame)
    }

    /// Tells queued jobs from `place` on in one message: one payload, or as many rows as there is room for.
    fn tell(
        &mut self,
        index: usize,
        (place, room): (usize, usize),
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let bulk = self.options.bulk_tokens;
        let between = self.between(index);
        let Some(line) = self.lines.get_mut(index) else { return Ok(None) };
        let (mut jobs, mut bytes, mut rows, mut at) = (Vec::new(), NOTICE, 0, place);
        while let Some(job) = line.ready.get(at).filter(|_| jobs.len() < room.min(u16::MAX.into())) {
            if !may_go(&self.requests, job, bulk) {
                at += 1;
                continue;
            }
            if let What::Rows { .. } = job.what {
                let (own, all) = size(line, &self.requests, job, between)?;
                if bytes + own > FRAME_MAX {
                    break;
                }
                (bytes, rows) = (bytes + own, rows + all);
            } else if !jobs.is_empty() {
                break;
            }
            let payload = matches!(job.what, What::Payload(_));
            jobs.extend(line.ready.remove(at));
            if payload {
                break;
            }
        }
        let number = line.next;
        line.next += 1;
        line.told.push_back(Told { number, jobs: jobs.clone(), first: now, last: Some(now) });
        let nanoseconds =
            (u128::from(rows) * 1_000_000_000).checked_div(self.options.bytes_per_second.into());
        if let Some(nanoseconds) = nanoseconds {
            self.pace = self.pace.max(now) + Duration::from_nanos(nanoseconds.try_into().unwrap_or(u64::MAX));
        }
        self.message(index, number, &jobs, source, frame)
    }

    pub(super) fn between(&self, index: usize) -> Of {
        let own = (self.own.rank.stage, self.own.rank.lane);
        let peer = self.lines.get(index).and_then(|line| line.peer.as_ref());
        Of::Between(own, peer.map_or((0, 0), |peer| (peer.rank.stage, peer.rank.lane)))
    }

    /// The bytes of a message. A request whose rows cannot be read fails.
    fn message(
        &mut self,
        index: usize,
        number: u64,
        jobs: &[Job],
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let Some(line) = self.lines.get(index) else { return Ok(None) };
        let link = line.link;
        if let [Job { what: What::Payload(payload), fence, request, .. }] = jobs {
            let found = self.requests.get(request).and_then(|sending| sending.payloads.get(*payload));
            let Some((kind, bytes)) = found else { return Ok(None) };
            let digest = of_payload(*fence, *kind, bytes);
            frame.clear();
            Frame::Payload(Payload { number, fence: *fence, kind: *kind, digest, bytes }).encode(frame);
            return Ok(Some(Action::Frame { link }));
        }
        let Some(paired) = line.peer.as_ref().map(|peer| Arc::clone(&peer.paired)) else { return Ok(None) };
        let between = self.between(index);
        let mut notice = NoticeWriter::new(frame, number);
        let mut unreadable = None;
        for job in jobs {
            let What::Rows { part, tokens, some } = &job.what else { continue };
            let found = self.requests.get(&job.request).and_then(|sending| sending.parts.get(*part));
            let Some(Held { computed, .. }) = found else { continue };
            let read = (&mut self.bytes, &mut self.digests);
            if read_digests(&paired.plan, (job, computed, between), source, read).is_err() {
                unreadable = Some(job.request);
                break;
            }
            let part = Rows {
                fence: job.fence,
                layer: computed.layer,
                tokens: tokens.clone(),
                chunk: computed.chunk.unwrap_or(Chunk { first: 0, at: 0, slice: 0 }),
                origin: computed.origin,
                digests: Digests::All(List::default()),
            };
            notice.part(&part, some.is_some());
            for (index, digest) in &self.digests {
                notice.digest(some.is_some().then_some(*index), *digest);
            }
        }
        notice.end();
        let Some(request) = unreadable else { return Ok(Some(Action::Frame { link })) };
        // Its other jobs are told in a message of their own.
        if let Some(line) = self.lines.get_mut(index) {
            line.told.retain(|told| told.number != number);
            line.ready.extend(jobs.iter().filter(|job| job.request != request).cloned());
        }
        self.fail(request, Reason::Gone);
        self.clear();
        Ok(None)
    }
}

/// Reads the runs of a job, and leaves their indices and digests in the second vector.
fn read_digests(
    plan: &Plan,
    (job, computed, between): (&Job, &Computed, Of),
    source: &mut impl Source,
    (bytes, digests): (&mut Vec<u8>, &mut Vec<(u32, u32)>),
) -> Result<()> {
    digests.clear();
    let What::Rows { tokens, some, .. } = &job.what else { return Ok(()) };
    let (mut index, mut asked) = (0, some.iter().flatten().copied().peekable());
    visit(plan, computed, tokens, between, |run| {
        if some.is_none() || asked.next_if_eq(&index).is_some() {
            let into = room(bytes, &run)?;
            source.read(computed.origin, &run, into)?;
            digests.push((index, digest(job.fence, &run, into)));
        }
        index += 1;
        Ok(())
    })
}

/// Whether a job may be told now: its request has not failed, and is no short prompt that is being computed.
fn may_go(requests: &BTreeMap<u64, Sending>, job: &Job, bulk_tokens: u32) -> bool {
    requests
        .get(&job.request)
        .is_some_and(|sending| sending.failed.is_none() && (sending.finished || sending.tokens > bulk_tokens))
}

/// The bytes of a job in a notice, and those of its rows.
fn size(line: &Line, requests: &BTreeMap<u64, Sending>, job: &Job, between: Of) -> Result<(usize, u64)> {
    let What::Rows { part, tokens, some } = &job.what else { return Ok((0, 0)) };
    let (Some(peer), Some(held)) =
        (&line.peer, requests.get(&job.request).and_then(|sending| sending.parts.get(*part)))
    else {
        return Ok((0, 0));
    };
    let (mut runs, mut bytes) = (0, 0_u64);
    visit(&peer.paired.plan, &held.computed, tokens, between, |run| {
        runs += 1;
        bytes = bytes.saturating_add(run.total());
        Ok(())
    })?;
    let digests = some.as_ref().map_or(4 * runs, |some| 8 * some.len());
    Ok((PART + digests, bytes))
}
