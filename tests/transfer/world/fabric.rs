//! The world's side of the fabric: its ends are polled, and some of their messages are changed as no wire would.

use forebay::transfer::model::{Memory, Message};
use forebay::transfer::{Frame, Of, Polled, Reason, Request, Split, digest, receiver, sender};

use super::nodes::Hands;
use super::{Weak, World};
use crate::frame_bytes::sum;

/// Where the fence of a notice's first part is.
const FENCE: std::ops::Range<usize> = 11..27;
const DIGESTS: usize = 11 + 53;

/// Gives a changed frame a sum that fits.
fn add_sum(bytes: &mut Vec<u8>) {
    let end = bytes.len() - 4;
    let sum = sum(&bytes[..end]);
    bytes.truncate(end);
    bytes.extend(sum.to_le_bytes());
}

impl World {
    /// Lets all ends say what they want done, until they have nothing to say.
    pub(super) fn pump(&mut self) {
        for index in 0..self.senders.len() {
            self.senders[index].memory.borrow_mut().refuses = self.fault(self.faults.unread);
            while let Some(mut end) = self.senders[index].end.take() {
                let polled = end.poll(self.now).unwrap();
                self.senders[index].end = Some(end);
                let Some(polled) = polled else { break };
                self.sent(index, polled);
            }
            let (refused, broken) = {
                let memory = &mut *self.senders[index].memory.borrow_mut();
                (std::mem::take(&mut memory.refused), memory.broken.take())
            };
            if refused {
                self.touch_all();
            }
            self.broken = self.broken.take().or(broken);
        }
        for index in 0..self.receivers.len() {
            self.receivers[index].memory.borrow_mut().refuses = self.fault(self.faults.unstored);
            while let Some(mut end) = self.receivers[index].end.take() {
                let polled = end.poll(self.now, &mut Hands(self.receivers[index].memory.clone())).unwrap();
                let heard = std::mem::take(&mut end.fabric.heard);
                self.receivers[index].end = Some(end);
                heard.iter().for_each(|(link, bytes)| self.count(*link, index, bytes));
                let Some(polled) = polled else { break };
                self.received(index, polled);
            }
            let (refused, broken, late) = {
                let memory = &mut *self.receivers[index].memory.borrow_mut();
                let late = std::mem::take(&mut memory.late_writes);
                (std::mem::take(&mut memory.refused), memory.broken.take(), late)
            };
            if refused {
                self.touch_all();
            }
            self.seen.late_writes += late;
            self.broken = self.broken.take().or(broken);
        }
        let mut messages = self.net.take_sent();
        messages.iter_mut().for_each(|message| self.change(message));
        self.net.post(messages);
        self.watch_connections();
    }

    /// What goes on may fail now for a reason, if a connection broke or a write was not whole.
    pub(super) fn watch_connections(&mut self) {
        let seen = self.net.seen();
        if (seen.cut, seen.unwritten) != (self.last_seen.cut, self.last_seen.unwritten) {
            self.touch_all();
        }
        self.last_seen = seen;
    }

    fn sent(&mut self, index: usize, polled: Polled<sender::Event>) {
        match polled {
            Polled::More
            | Polled::Connected { .. }
            | Polled::Event(sender::Event::Met { .. } | sender::Event::Granted { .. }) => {}
            Polled::Lost { .. } => self.touch_all(),
            Polled::Event(sender::Event::Released { origin, .. }) => {
                let origin = &mut self.senders[index].memory.borrow_mut().parts[origin as usize];
                if std::mem::replace(&mut origin.released, true) {
                    self.broken.get_or_insert("rows are released twice".to_owned());
                }
            }
            Polled::Event(sender::Event::Ended { request, reason }) => {
                let of =
                    self.attempts.iter_mut().find(|of| of.request == request && of.begun[index] && !of.over);
                if let Some(attempt) = of {
                    attempt.begun[index] = false;
                    attempt.given_up |= reason != Reason::Done;
                    attempt.touched |= reason == Reason::Corrupt;
                    attempt.why.push_str(&format!("{reason:?} at the sender; "));
                }
            }
        }
    }

    fn received(&mut self, index: usize, polled: Polled<receiver::Event>) {
        let memory = self.receivers[index].memory.clone();
        let attempt_of = |fence| memory.borrow().tables[&fence].attempt;
        let event = match polled {
            Polled::Connected { link } => return self.receivers[index].links.push(link),
            Polled::Lost { link, .. } => {
                self.receivers[index].links.retain(|of| *of != link);
                return self.touch_all();
            }
            Polled::More => return,
            Polled::Event(event) => event,
        };
        match event {
            receiver::Event::Met { .. } => {}
            receiver::Event::Ready { fence, layer } => {
                self.seen.layers += 1;
                self.check(index, fence, attempt_of(fence), Some(layer));
            }
            receiver::Event::Payload { fence, kind, bytes } => {
                let salt = self.attempts[attempt_of(fence)].salt;
                let wanted = if kind == 1 { vec![salt; 9] } else { Vec::new() };
                if bytes != wanted {
                    self.broken.get_or_insert(format!("payload {kind} of {fence:?}: {bytes:?}"));
                }
            }
            receiver::Event::Whole { fence } => {
                let attempt = attempt_of(fence);
                memory.borrow_mut().tables.get_mut(&fence).unwrap().whole = true;
                self.attempts[attempt].whole += 1;
                self.check(index, fence, attempt, None);
                self.close_later(index, fence);
            }
            receiver::Event::Failed { fence, error } => {
                let attempt = &mut self.attempts[attempt_of(fence)];
                attempt.touched |= error.kind() == forebay::Kind::Corrupt;
                attempt.why.push_str(&format!("{error}; "));
                attempt.given_up = true;
                self.end(index, fence);
            }
            receiver::Event::Drained { fence } => self.open.retain(|open| *open != (index, fence)),
            receiver::Event::Free { landing } => self.free(index, &landing),
        }
    }

    /// Landing pages that no writer reaches any more.
    fn free(&mut self, index: usize, landing: &[u32]) {
        let memory = &mut *self.receivers[index].memory.borrow_mut();
        for page in landing {
            let owner = &mut memory.landing.owner[*page as usize];
            let arrives = |fence: &_| memory.tables.get(fence).is_some_and(|of| !of.ended && !of.whole);
            match owner.filter(arrives) {
                None => *owner = None,
                // The control has given the page to others meanwhile: it stays theirs.
                Some(_) if self.weak == Weak::TimeOut => {}
                Some(fence) => {
                    self.broken.get_or_insert(format!("a page of {fence:?} is free while it arrives"));
                }
            }
        }
    }

    /// The control that counts what is told.
    fn count(&mut self, link: u32, receiver: usize, bytes: &[u8]) {
        let Ok(Frame::Notice(notice)) = Frame::decode(bytes) else { return };
        for part in notice.parts() {
            let node = &self.receivers[receiver];
            let memory = node.memory.borrow();
            let Some(table) = memory.tables.get(&part.fence) else { continue };
            let (attempt, ended) = (table.attempt, table.ended);
            drop(memory);
            let told = self.told.entry((part.fence, receiver, part.layer, link)).or_default();
            *told += part.tokens.len() as u32;
            let wanted = self.attempts[attempt].prompt.tokens - self.attempts[attempt].first;
            let all = node.links.iter().all(|link| {
                let key = (part.fence, receiver, part.layer, *link);
                self.told.get(&key).is_some_and(|told| *told >= wanted)
            });
            if all && !ended {
                self.check(receiver, part.fence, attempt, Some(part.layer));
            }
        }
    }

    /// What no wire does: a message is confused, or nonsense, with a sum that fits.
    fn change(&mut self, message: &mut Message) {
        let (kind, far) = (message.bytes[0], self.way == super::Way::Far);
        if kind == 3 || kind == 5 {
            let fresh = self.numbers.insert((message.link, message.bytes[..9].to_vec()));
            self.seen.repeated += u32::from(!fresh);
        }
        if self.fault(self.faults.misnamed) && message.to_receiver {
            self.misname(message);
        }
        if self.fault(self.faults.nonsense) && kind != 1 && kind != 8 && !(kind == 2 && far) {
            let at = 1 + self.draw.below(message.bytes.len() as u64 - 5) as usize;
            message.bytes[at] ^= 1 << self.draw.below(8);
            add_sum(&mut message.bytes);
            self.confused = true;
            self.touch_all();
        }
    }

    /// Gives the first part of a notice the fence of another use on the connection. Where digests do not cover whose
    /// rows they are, they still fit.
    fn misname(&mut self, message: &mut Message) {
        let (from, to) = self.net.ends(message.link).unwrap();
        let sender = self.senders.iter().find(|node| node.process == from);
        let receiver = self.receivers.iter().find(|node| node.process == to);
        let (Some(sender), Some(receiver)) = (sender, receiver) else { return };
        let Ok(Frame::Notice(notice)) = Frame::decode(&message.bytes) else { return };
        let Some(part) = notice.parts().next() else { return };
        let memory = receiver.memory.borrow();
        let others = memory.tables.iter().filter(|(fence, table)| **fence != part.fence && !table.ended);
        let mut others: Vec<_> = others.map(|(fence, _)| *fence).collect();
        others.sort_unstable();
        let Some(other) = others.first().copied() else { return };
        let (from, to) = (sender.rank, receiver.rank);
        let between = Of::Between((from.stage, from.lane), (to.stage, to.lane));
        let chunks = [part.chunk];
        let divides = self.sides[0].split == Split::Tokens;
        let chunks = if divides { chunks.as_slice() } else { &[] };
        let request = Request { tokens: part.tokens.end, replicas: [0, 0], chunks };
        let mut digests = Vec::new();
        self.plan
            .runs(&request, (part.layer, part.tokens.clone()), between, |run| {
                let mut bytes = vec![0; run.total() as usize];
                let by = forebay::transfer::model::By::Fabric;
                sender.memory.borrow_mut().read(by, part.origin, &run, &mut bytes)?;
                digests.push(digest(other, &run, &bytes));
                Ok(())
            })
            .unwrap();
        let all = part.digests.are_all();
        let words = [other.request, other.generation].into_iter().flat_map(u64::to_le_bytes);
        message.bytes.iter_mut().skip(FENCE.start).zip(words).for_each(|(to, from)| *to = from);
        if self.weak == Weak::BytesOnly && all {
            let words = digests.into_iter().flat_map(u32::to_le_bytes);
            message.bytes.iter_mut().skip(DIGESTS).zip(words).for_each(|(to, from)| *to = from);
        }
        add_sum(&mut message.bytes);
        drop(memory);
        self.touch_all();
    }
}
