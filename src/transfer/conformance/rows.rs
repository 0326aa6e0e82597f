//! Checks of rows: both machines over the fabric.

use std::time::Duration;

use crate::error::{Error, Kind};
use crate::transfer::conformance::rig::{LANDING, LAYERS, ORIGINS, Rig, TOKENS};
use crate::transfer::conformance::subject::{Checked, Subject, told};
use crate::transfer::frames::Reason;
use crate::transfer::quarantine::Fence;
use crate::transfer::sender::Computed;

/// A request on its way from a sender to a receiver, by their indices.
#[derive(Clone, Copy)]
struct Going {
    ranks: (usize, usize),
    request: u64,
    tokens: u32,
    /// The first token that is wanted.
    first: u32,
    /// Tokens of a chunk.
    chunk: u32,
}

impl Going {
    /// Chunks and layers, in the order of computing.
    fn parts(&self) -> Vec<(u32, std::ops::Range<u32>)> {
        let firsts = (0..self.tokens).step_by(self.chunk.max(1) as usize);
        let chunk = |first: u32| first..(first + self.chunk).min(self.tokens);
        firsts.flat_map(|first| (0..LAYERS).map(move |layer| (layer, chunk(first)))).collect()
    }
}

impl<S: Subject> Rig<'_, S> {
    fn begin(&mut self, going: Going) -> Checked<Fence> {
        let Going { ranks: (sender, receiver), request, tokens, first, .. } = going;
        let own = self.senders.get_mut(sender).ok_or("no such sender")?;
        own.end.machine.begin(request, tokens, None).map_err(told)?;
        self.grant((receiver, sender), request, (tokens, first))
    }

    /// Computes one part: puts its rows, and tells the sender.
    fn compute(
        &mut self,
        going: Going,
        (layer, tokens): (u32, std::ops::Range<u32>),
        origin: u64,
    ) -> Checked {
        let (sender, request) = (going.ranks.0, going.request);
        self.put(sender, (request, origin), (layer, tokens.clone()), false)?;
        let origin = self.subject.origin(origin);
        let own = self.senders.get_mut(sender).ok_or("no such sender")?;
        own.end.machine.computed(&[Computed { request, layer, tokens, chunk: None, origin }]).map_err(told)
    }

    fn finish(&mut self, going: Going) -> Checked {
        let own = self.senders.get_mut(going.ranks.0).ok_or("no such sender")?;
        own.end.machine.finish(going.request).map_err(told)
    }

    /// Waits until a request is whole at its receiver and over at its sender, and compares its rows.
    fn whole(&mut self, going: Going, fence: Fence) -> Checked {
        let (sender, receiver) = going.ranks;
        self.until("a whole request", |rig| {
            let whole = rig.receivers.get(receiver).is_some_and(|of| of.whole.contains(&fence));
            let ended =
                rig.senders.get(sender).is_some_and(|of| of.ended.contains(&(fence.request, Reason::Done)));
            whole && ended
        })?;
        self.check((receiver, sender), fence, going.first..going.tokens)
    }

    /// All landing pages are free again.
    fn all_free(&mut self) -> Checked {
        self.until("the landing pages of requests that are over", |rig| {
            rig.receivers.iter().all(|of| of.free.len() == LANDING as usize)
        })
    }
}

pub(super) fn whole<S: Subject>(subject: &mut S) -> Checked {
    let mut rig = Rig::new(subject, 1)?;
    let shapes =
        [(1, 0, 1), (4, 0, 4), (5, 0, 5), (17, 0, 6), (24, 0, 24), (23, 7, 9), (24, 23, 24), (13, 12, 5)];
    for (request, (tokens, first, chunk)) in (1..).zip(shapes) {
        let going = Going { ranks: (0, 0), request, tokens, first, chunk };
        let fence = rig.begin(going)?;
        for (origin, part) in (0..).zip(going.parts()) {
            rig.compute(going, part, origin)?;
            rig.poll()?;
        }
        rig.finish(going)?;
        rig.whole(going, fence)?;
        rig.all_free()?;
    }
    // Two at a time, told together.
    let both = [20_u64, 21].map(|request| Going { ranks: (0, 0), request, tokens: 24, first: 0, chunk: 24 });
    let fences = [rig.begin(both[0])?, rig.begin(both[1])?];
    for (at, (layer, tokens)) in (0..).zip(both[0].parts()) {
        let mut parts = Vec::new();
        for (place, going) in (0..).zip(both) {
            let origin = 2 * at + place;
            rig.put(0, (going.request, origin), (layer, tokens.clone()), false)?;
            let (tokens, origin) = (tokens.clone(), rig.subject.origin(origin));
            parts.push(Computed { request: going.request, layer, tokens, chunk: None, origin });
        }
        let own = rig.senders.first_mut().ok_or("no sender")?;
        own.end.machine.computed(&parts).map_err(told)?;
    }
    both.iter().try_for_each(|going| rig.finish(*going))?;
    both.iter().zip(fences).try_for_each(|(going, fence)| rig.whole(*going, fence))?;
    rig.all_free()
}

/// The rows of each part are others for a while after they were told, as those of an engine that writes too early.
pub(super) fn changes<S: Subject>(subject: &mut S) -> Checked {
    let mut rig = Rig::new(subject, 1)?;
    rig.receivers.iter_mut().for_each(|of| of.end.fabric.instance = None);
    let going = Going { ranks: (0, 0), request: 1, tokens: 24, first: 0, chunk: 12 };
    let fence = rig.begin(going)?;
    for (origin, (layer, tokens)) in (0..).zip(going.parts()) {
        rig.compute(going, (layer, tokens.clone()), origin)?;
        rig.poll_senders()?;
        rig.put(0, (1, origin), (layer, tokens.clone()), true)?;
        let end = rig.now + Duration::from_millis(15);
        while rig.now < end {
            rig.poll_receivers()?;
            rig.now = rig.subject.wait();
        }
        rig.put(0, (1, origin), (layer, tokens), false)?;
    }
    rig.finish(going)?;
    rig.whole(going, fence)
}

/// A sender closes its connection when it has told rows, and uses their memory again at once. Without digests a
/// receiver still takes no row that was not told: it asks [`ReceiverFabric::holds`](crate::transfer::fabric).
pub(super) fn closed<S: Subject>(subject: &mut S) -> Checked {
    let mut rig = Rig::with(subject, 1, false)?;
    // Rows from afar are in the receiver's own memory.
    if rig.is_far() {
        return Ok(());
    }
    rig.receivers.iter_mut().for_each(|of| of.end.fabric.instance = None);
    let going = Going { ranks: (0, 0), request: 1, tokens: 24, first: 0, chunk: 24 };
    let fence = rig.begin(going)?;
    for (origin, part) in (0..).zip(going.parts()) {
        rig.compute(going, part, origin)?;
    }
    rig.poll_senders()?;
    rig.loses = true;
    rig.close(true)?;
    for (origin, part) in (0..).zip(going.parts()) {
        rig.put(0, (1, origin), part, true)?;
    }
    rig.until("the end of a request whose sender has closed", |rig| {
        let failed = |of: &Vec<(Fence, Error)>| of.iter().any(|(of, _)| *of == fence);
        rig.receivers.iter().all(|of| of.whole.contains(&fence) || failed(&of.failed))
    })?;
    // A stream may have carried all of them.
    match rig.receivers.iter().any(|of| of.whole.contains(&fence)) {
        true => rig.check((0, 0), fence, 0..going.tokens),
        false => Ok(()),
    }
}

pub(super) fn reuse<S: Subject>(subject: &mut S) -> Checked {
    let mut rig = Rig::new(subject, 1)?;
    let mut request = 0;
    let mut next = |first| {
        request += 1;
        Going { ranks: (0, 0), request, tokens: TOKENS, first, chunk: 8 }
    };
    let steps = next(0).parts().len();
    for round in 0..2 * (steps + 1) {
        let (stop, by_sender) = (round / 2, round % 2 == 0);
        let going = next(0);
        let fence = rig.begin(going)?;
        for (origin, part) in (0..ORIGINS).zip(going.parts()).take(stop) {
            rig.compute(going, part, origin)?;
            if round % 3 > 0 {
                rig.poll()?;
            }
            if round % 3 > 1 {
                rig.now = rig.subject.wait();
            }
        }
        if by_sender {
            let own = rig.senders.first_mut().ok_or("no sender")?;
            own.end.machine.abort(going.request).map_err(told)?;
        } else {
            let own = rig.receivers.first_mut().ok_or("no receiver")?;
            match own.end.machine.abort(fence) {
                // A fast fabric has brought all of it before.
                Err(error) if error.kind() == Kind::Closed && own.whole.contains(&fence) => {
                    rig.finish(going)?
                }
                aborted => aborted.map_err(told)?,
            }
        }
        // The memory is used again as soon as the sender's request is over, the landing pages as soon as they are free.
        rig.until("the end of an aborted request", |rig| {
            let over = rig.senders.iter().all(|of| of.ended.iter().any(|(of, _)| *of == going.request));
            over && rig.receivers.iter().all(|of| of.free.len() == LANDING as usize)
        })?;
        let writes = rig.senders.first_mut().map(|of| std::mem::take(&mut of.end.fabric.writes));
        let writes = writes.unwrap_or_default();
        if !rig.is_quiet(&writes.values().collect::<Vec<_>>(), Duration::from_millis(15))? {
            return Err("something landed on pages that were said to be free".to_owned());
        }
        let going = next(0);
        let fence = rig.begin(going)?;
        for (origin, part) in (0..).zip(going.parts()) {
            rig.compute(going, part, origin)?;
        }
        rig.finish(going)?;
        rig.whole(going, fence)?;
        rig.all_free()?;
    }
    Ok(())
}

pub(super) fn mixing<S: Subject>(subject: &mut S) -> Checked {
    const RANKS: usize = 3;
    let mut rig = Rig::new(subject, RANKS as u64)?;
    for round in 0..RANKS {
        // The same requests and generations on all connections at once.
        let request = round as u64 + 1;
        let all: Vec<Going> = (0..RANKS)
            .map(|sender| {
                let ranks = (sender, (sender + round) % RANKS);
                Going { ranks, request, tokens: 12, first: 0, chunk: 6 }
            })
            .collect();
        let fences = all.iter().map(|going| rig.begin(*going)).collect::<Checked<Vec<_>>>()?;
        for (origin, part) in (0..).zip(all.first().map_or_else(Vec::new, Going::parts)) {
            all.iter().try_for_each(|going| rig.compute(*going, part.clone(), origin))?;
            rig.poll()?;
        }
        all.iter().try_for_each(|going| rig.finish(*going))?;
        all.iter().zip(&fences).try_for_each(|(going, fence)| rig.whole(*going, *fence))?;
        rig.all_free()?;
    }
    Ok(())
}

/// A sender goes, or a connection is closed, while something is written from afar.
pub(super) fn destroyed<S: Subject>(subject: &mut S) -> Checked {
    let mut rig = Rig::new(subject, 1)?;
    if !rig.is_far() {
        return Ok(());
    }
    for request in 1..=9 {
        let going = Going { ranks: (0, 0), request, tokens: TOKENS, first: 0, chunk: TOKENS };
        let fence = rig.begin(going)?;
        for (origin, part) in (0..).zip(going.parts()) {
            rig.compute(going, part, origin)?;
        }
        let limit = rig.now + rig.subject.limit();
        let sender = loop {
            rig.poll_senders()?;
            let sender = rig.senders.first_mut().ok_or("no sender")?;
            if !sender.end.fabric.writes.is_empty() {
                break sender;
            }
            if rig.now > limit {
                return Err("no write has begun".to_owned());
            }
            rig.now = rig.subject.wait();
        };
        let writes = sender.end.fabric.writes.clone();
        let instance = match request % 3 {
            0 => {
                rig.senders.clear();
                request + 1
            }
            closes => {
                let instance = sender.instance;
                rig.close(closes == 1)?;
                instance
            }
        };
        rig.until("the destruction of what could write", |rig| {
            let failed = |of: &Vec<(Fence, Error)>| of.iter().any(|(of, _)| *of == fence);
            rig.receivers.iter().all(|of| of.free.len() == LANDING as usize && failed(&of.failed))
        })?;
        let quiet = rig.subject.quiet();
        if !rig.is_quiet(&writes.values().collect::<Vec<_>>(), quiet)? {
            return Err("something landed after the destruction was told".to_owned());
        }
        // The next one begins with a sender of its own.
        rig.senders.clear();
        rig.add_sender(instance + 100)?;
        rig.receivers.iter_mut().for_each(|of| of.end.fabric.instance = Some(instance + 100));
        rig.until("a successor", |rig| {
            let connected = rig.senders.iter().all(|of| !of.links.is_empty());
            connected && rig.receivers.iter().all(|of| of.links == 1)
        })?;
    }
    Ok(())
}
