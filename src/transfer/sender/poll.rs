//! What a sender wants done next.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::transfer::digest::{digest, of_payload};
use crate::transfer::frames::{
    Digests, FRAME_MAX, Frame, List, NOTICE, NoticeWriter, PART, Payload, Reason, Rows,
};
use crate::transfer::plan::Plan;
use crate::transfer::runs::{Chunk, Of, room};
use crate::transfer::sender::line::{Failing, Job, Line, Told, What};
use crate::transfer::sender::request::{Computed, Held};
use crate::transfer::sender::{Action, Sender, Source, visit};

impl Sender {
    /// What is to be done next; none for nothing before [`Sender::due`], or before something comes. A frame's bytes
    /// are in `frame` then.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`](crate::error::Kind::OutOfMemory).
    pub fn poll(
        &mut self,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        while let Some((_, request)) =
            self.deadlines.first().copied().filter(|(deadline, _)| now >= *deadline)
        {
            self.deadlines.pop_first();
            self.fail(request, Reason::TimedOut);
            self.clear(request);
        }
        let mut left = self.lines.len();
        while left > 0 {
            left -= 1;
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(Action::Event(event)));
            }
            // Each connection in turn, so that none waits for another's backlog.
            self.turn = (self.turn + 1) % self.lines.len();
            if let Some(action) = self.poll_line(self.turn, now, source, frame)? {
                return Ok(Some(action));
            }
            if std::mem::take(&mut self.unreadable) {
                left = self.lines.len();
            }
        }
        Ok(self.events.pop_front().map(Action::Event))
    }

    /// When [`Sender::poll`] has something to do, if nothing comes before; none for never.
    pub fn due(&self) -> Option<Duration> {
        let lines = self.lines.iter().flat_map(|line| {
            let told = line.told.iter().map(|told| self.again(told));
            let again =
                |failing: &Failing| failing.told.map_or(Duration::ZERO, |(_, last)| self.later(last, 0));
            let failing = line.failing.iter().map(again);
            let ready = line.room() > 0 && !line.ready.is_empty();
            let unwritten = line.room_to_write() > 0 && !line.unwritten.is_empty();
            let fresh = match ready && line.far {
                true => Some(Duration::ZERO),
                false => (ready || unwritten).then_some(self.pace),
            };
            let small = (line.has_small() && !line.broken).then_some(Duration::ZERO);
            let frames = told.chain(failing).chain(fresh).chain(small).filter(|_| !line.blocked);
            let noted = line.blocked && line.blocked_at.is_none() && !line.closing;
            let heard = (line.heard || line.unblocked || noted).then_some(Duration::ZERO);
            frames.chain(heard).chain(self.patience_of(line))
        });
        let events = (!self.events.is_empty()).then_some(Duration::ZERO);
        lines.chain(events).chain(self.deadlines.first().map(|(deadline, _)| *deadline)).min()
    }

    /// When a message is told again.
    fn again(&self, told: &Told) -> Duration {
        self.later(told.last, told.times)
    }

    fn later(&self, last: Duration, times: u32) -> Duration {
        last.saturating_add(self.options.resend.saturating_mul(1 << times.min(6)))
    }

    /// When a connection has been silent for too long; none if nothing is owed on it, or if that was said.
    fn patience_of(&self, line: &Line) -> Option<Duration> {
        if line.closing || line.broken {
            return (!line.closing).then_some(Duration::ZERO);
        }
        // One without room for so long takes nothing, even if it says that it lives.
        let silent = line.owed_since().map(|owed| Some(owed.max(line.heard_at?)));
        let since = silent.flatten().into_iter().chain(line.blocked_at).min()?;
        Some(since.saturating_add(self.options.patience))
    }

    fn poll_line(
        &mut self,
        index: usize,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(None) };
        let link = line.link;
        if std::mem::take(&mut line.heard) {
            line.heard_at = Some(now);
        }
        if std::mem::take(&mut line.unblocked) {
            line.wait_anew(now);
        }
        if line.blocked {
            line.blocked_at.get_or_insert(now);
            return Ok(self.close_silent(index, now));
        }
        if !line.broken
            && let Some(bytes) = line.small()
        {
            frame.clear();
            frame.extend(bytes);
            return Ok(Some(Action::Frame { link }));
        }
        let resend = self.options.resend;
        let due =
            |failing: &&mut Failing| failing.told.is_none_or(|(_, last)| now >= last.saturating_add(resend));
        if let Some(failing) = line.failing.iter_mut().find(due) {
            failing.told = Some((failing.told.map_or(now, |(first, _)| first), now));
            frame.clear();
            Frame::Failed { fence: failing.fence, reason: failing.reason }.encode(frame);
            return Ok(Some(Action::Frame { link }));
        }
        if let Some(close) = self.close_silent(index, now) {
            return Ok(Some(close));
        }
        let Some(line) = self.lines.get(index) else { return Ok(None) };
        if let Some(place) = line.told.iter().position(|told| now >= self.again(told)) {
            let split = self.lines.get_mut(index).is_some_and(|line| line.split(place));
            if !split {
                return self.tell_again(index, place, now, source, frame);
            }
        }
        let Some(line) = self.lines.get(index) else { return Ok(None) };
        let (room, paced) = (line.room(), now >= self.pace);
        if room > 0 && (paced || line.far) && !line.ready.is_empty() {
            return self.tell(index, room, now, source, frame);
        }
        match line.room_to_write() > 0 && paced && !line.unwritten.is_empty() {
            true => Ok(self.write(index, now)),
            false => Ok(None),
        }
    }

    /// Asks for a connection to be closed that has been silent for too long.
    fn close_silent(&mut self, index: usize, now: Duration) -> Option<Action> {
        let patience = self.patience_of(self.lines.get(index)?)?;
        let line = self.lines.get_mut(index).filter(|_| now >= patience)?;
        line.closing = true;
        Some(Action::Close { link: line.link })
    }

    /// Asks for a job's rows to be written.
    fn write(&mut self, index: usize, now: Duration) -> Option<Action> {
        let line = self.lines.get_mut(index)?;
        let job = line.unwritten.pop_front()?;
        let What::Rows { part, tokens, some } = &job.what else { return None };
        let held = self.requests.get(&job.request)?.parts.get(*part)?;
        let granted = self.requests.get(&job.request)?.grants.iter();
        let mut granted = granted.filter(|grant| (grant.link, grant.fence) == (line.link, job.fence));
        let landing = granted.next().map(|grant| grant.landing.clone()).unwrap_or_default();
        let (mut rows, some) = (held.computed.clone(), some.clone());
        rows.tokens = tokens.clone();
        let (link, write, fence, bytes) = (line.link, self.writes, job.fence, job.bytes);
        self.writes += 1;
        line.writing.push((write, job));
        self.spend(now, bytes);
        Some(Action::Write { link, write, fence, landing, rows, some })
    }

    /// Moves the time at which more rows may go.
    fn spend(&mut self, now: Duration, bytes: u64) {
        let nanoseconds =
            (u128::from(bytes) * 1_000_000_000).checked_div(self.options.bytes_per_second.into());
        if let Some(nanoseconds) = nanoseconds {
            let lasts = Duration::from_nanos(nanoseconds.try_into().unwrap_or(u64::MAX));
            self.pace = self.pace.max(now).saturating_add(lasts);
        }
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
        (told.last, told.times) = (now, told.times.saturating_add(1));
        let (number, jobs) = (told.number, told.jobs.iter().flatten().cloned().collect::<Vec<_>>());
        self.message(index, number, &jobs, source, frame)
    }

    /// Tells queued jobs in one message: one payload, or as many rows as there is room for.
    fn tell(
        &mut self,
        index: usize,
        room: usize,
        now: Duration,
        source: &mut impl Source,
        frame: &mut Vec<u8>,
    ) -> Result<Option<Action>> {
        let Some(line) = self.lines.get_mut(index) else { return Ok(None) };
        let most = self.options.notice_bytes;
        let (mut jobs, mut bytes, mut rows, mut size) = (Vec::new(), NOTICE, 0_u64, 0_u64);
        while let Some(job) = line.ready.front().filter(|_| jobs.len() < room.min(u16::MAX.into())) {
            let payload = matches!(job.what, What::Payload(_));
            let digests = if matches!(job.what, What::Rows { some: Some(_), .. }) { 8 } else { 4 };
            bytes += PART + digests * job.runs;
            size = size.saturating_add(job.size);
            if !jobs.is_empty() && (payload || bytes > FRAME_MAX || size > most) {
                break;
            }
            rows = rows.saturating_add(job.bytes);
            jobs.extend(line.ready.pop_front());
            if payload {
                break;
            }
        }
        let (number, far) = (line.next, line.far);
        line.next += 1;
        let own = jobs.iter().cloned().map(Some).collect();
        line.told.push_back(Told { number, jobs: own, first: now, last: now, times: 0 });
        if !far {
            self.spend(now, rows);
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
        let repeats = line.told.iter().any(|told| told.number == number && told.times > 0);
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
        let (mut unreadable, mut counts) = (None, self.counts);
        counts.repeats += u64::from(repeats);
        for job in jobs {
            let What::Rows { part, tokens, some } = &job.what else { continue };
            let found = self.requests.get(&job.request).and_then(|sending| sending.parts.get(*part));
            let Some(Held { computed, .. }) = found else { continue };
            let read = (&mut self.bytes, &mut self.runs);
            let source = self.options.digests.then_some(&mut *source);
            if read_runs(&paired.plan, (job, computed, between), source, read).is_err() {
                unreadable = Some(job.request);
                break;
            }
            let runs = self.runs.len() as u64;
            counts.runs += runs;
            if some.is_some() && !repeats {
                counts.again += runs;
            }
            let part = Rows {
                fence: job.fence,
                layer: computed.layer,
                tokens: tokens.clone(),
                chunk: computed.chunk.unwrap_or(Chunk { first: 0, at: 0, slice: 0 }),
                origin: computed.origin,
                digests: Digests::All(List::default()),
            };
            notice.part(&part, some.is_some(), !self.options.digests);
            for (index, digest) in &self.runs {
                notice.run(some.is_some().then_some(*index), *digest);
            }
        }
        notice.end();
        let Some(request) = unreadable else {
            self.counts = counts;
            return Ok(Some(Action::Frame { link }));
        };
        // Its other jobs are told in a message of their own.
        if let Some(line) = self.lines.get_mut(index) {
            line.told.retain(|told| told.number != number);
            line.ready.extend(jobs.iter().filter(|job| job.request != request).cloned());
        }
        self.fail(request, Reason::Gone);
        self.clear(request);
        self.unreadable = true;
        Ok(None)
    }
}

/// Leaves the indices of a job's runs in the second vector, with their digests if there is a source to read them.
fn read_runs(
    plan: &Plan,
    (job, computed, between): (&Job, &Computed, Of),
    mut source: Option<&mut impl Source>,
    (bytes, runs): (&mut Vec<u8>, &mut Vec<(u32, Option<u32>)>),
) -> Result<()> {
    runs.clear();
    let What::Rows { tokens, some, .. } = &job.what else { return Ok(()) };
    let (mut index, mut asked) = (0, some.iter().flatten().copied().peekable());
    visit(plan, computed, tokens, between, |run| {
        if some.is_none() || asked.next_if_eq(&index).is_some() {
            let mut told = None;
            if let Some(source) = &mut source {
                let into = room(bytes, &run)?;
                source.read(computed.origin, &run, into)?;
                told = Some(digest(job.fence, &run, into));
            }
            runs.push((index, told));
        }
        index += 1;
        Ok(())
    })
}
