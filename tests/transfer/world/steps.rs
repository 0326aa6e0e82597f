//! What happens in the world, one thing at a time.

use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::sender::Computed;
use forebay::transfer::{Fence, Frame, Of, Reason, Request, Run, digest, receiver, sender};

use super::net::{Happens, Message, Way, add_sum};
use super::nodes::{From, Hands, Origin, Reader, Table, read};
use super::{Attempt, CALM, Link, Weak, World};

/// Where the fence of a notice's first part is.
const FENCE: std::ops::Range<usize> = 11..27;
const DIGESTS: usize = 11 + 53;

impl World {
    pub(super) fn happens(&mut self, happens: Happens) {
        match happens {
            Happens::ToReceiver(link, message) => self.at_receiver(link, &message),
            Happens::ToSender(link, message) => self.at_sender(link, &message),
            Happens::Lands { link, write, fence, page, origin, run, last } => {
                self.lands(link, (write, last), (fence, page, origin), &run);
            }
            Happens::SenderLost(link) => self.lost(link, 0),
            Happens::ReceiverLost(link) => self.lost(link, 1),
            Happens::Destroyed(link) => {
                self.future.forget_writes(link);
                let Link { receiver, processes, .. } = self.links[link as usize];
                if let Some(machine) = &mut self.receivers[receiver].machine
                    && processes[1] == self.processes[1][receiver]
                {
                    machine.destroyed(link).unwrap();
                }
            }
            Happens::Connect(sender, receiver) => self.connect(sender, receiver),
            Happens::RestartSender(index) => self.start_sender(index),
            Happens::RestartReceiver(index) => self.start_receiver(index),
            Happens::Attempt(index) => self.begin(index),
            Happens::Grant(index, receiver) => self.grant(index, receiver),
            Happens::Compute(index) => self.compute(index),
            Happens::Abort(index) => {
                self.attempts[index].touched = true;
                self.give_up(index);
            }
            Happens::Close(receiver, fence) => self.close(receiver, fence),
            Happens::Nothing => {}
        }
        if self.fault(self.faults.cut) && !self.links.is_empty() {
            let link = self.draw.below(self.links.len() as u64) as u32;
            self.cut(link);
        }
        if self.fault(self.faults.crash) {
            self.crash();
        }
    }

    fn connect(&mut self, sender: usize, receiver: usize) {
        let same = |link: &&Link| (link.sender, link.receiver) == (sender, receiver);
        let old = self.links.iter().filter(same).any(|link| link.up[0] || link.up[1]);
        let (Some(from), Some(to)) =
            (&mut self.senders[sender].machine, &mut self.receivers[receiver].machine)
        else {
            return;
        };
        if old {
            return;
        }
        let number = self.links.len() as u32;
        let far = self.way == Way::Far;
        from.connect(number, far).unwrap();
        to.connect(number, far).unwrap();
        let processes = [self.processes[0][sender], self.processes[1][receiver]];
        self.links.push(Link { sender, receiver, up: [true; 2], processes });
    }

    /// A connection breaks. Its ends learn of it at different times.
    fn cut(&mut self, link: u32) {
        let Link { sender, receiver, up, .. } = self.links[link as usize];
        if up == [false; 2] {
            return;
        }
        self.seen.cut += 1;
        self.touch_all();
        let times = [self.now + self.draw.millis(60), self.now + self.draw.millis(60)];
        self.future.at(times[0], Happens::SenderLost(link));
        self.future.at(times[1], Happens::ReceiverLost(link));
        let both = times[0].max(times[1]);
        self.future.at(both + self.draw.millis(300), Happens::Destroyed(link));
        self.future.at(both + self.draw.millis(80), Happens::Connect(sender, receiver));
    }

    /// What goes on may fail now for a reason.
    fn touch_all(&mut self) {
        self.attempts.iter_mut().filter(|attempt| !attempt.over).for_each(|attempt| attempt.touched = true);
    }

    fn lost(&mut self, link: u32, end: usize) {
        let Link { sender, receiver, up, processes } = &mut self.links[link as usize];
        if !std::mem::replace(&mut up[end], false) {
            return;
        }
        let (sender, receiver, processes) = (*sender, *receiver, *processes);
        self.touch_all();
        match end {
            0 if processes[0] == self.processes[0][sender] => {
                self.senders[sender].machine.iter_mut().for_each(|machine| machine.disconnect(link));
            }
            1 if processes[1] == self.processes[1][receiver] => {
                self.receivers[receiver].machine.iter_mut().for_each(|machine| machine.disconnect(link));
            }
            _ => {}
        }
    }

    fn crash(&mut self) {
        let sender = self.draw.often(500);
        let end = usize::from(!sender);
        let count = if sender { self.senders.len() } else { self.receivers.len() };
        let index = self.draw.below(count as u64) as usize;
        let alive = if sender {
            self.senders[index].machine.take().is_some()
        } else {
            self.receivers[index].machine.take().is_some()
        };
        if !alive {
            return;
        }
        for number in 0..self.links.len() {
            let link = &mut self.links[number];
            if [link.sender, link.receiver][end] == index && link.up != [false; 2] {
                link.up[end] = false;
                self.cut(number as u32);
            }
        }
        for attempt in 0..self.attempts.len() {
            let of = &mut self.attempts[attempt];
            let goes_on = of.next > 0 || of.begun.contains(&true) || of.fences.iter().any(Option::is_some);
            match sender {
                true => of.begun[index] = false,
                false => of.fences[index] = None,
            }
            if !of.over && goes_on {
                (of.given_up, of.touched) = (true, true);
            }
        }
        if !sender {
            self.receivers[index].tables.clear();
            self.open.retain(|(of, _)| *of != index);
        }
        let again = if sender { Happens::RestartSender(index) } else { Happens::RestartReceiver(index) };
        self.future.at(self.now + Duration::from_millis(100) + self.draw.millis(200), again);
    }

    fn begin(&mut self, index: usize) {
        let deadline = self.deadline(4);
        let attempt = &mut self.attempts[index];
        attempt.began = self.now;
        for (node, begun) in self.senders.iter_mut().zip(&mut attempt.begun) {
            let done = node.machine.as_mut().is_some_and(|machine| {
                machine.begin(attempt.request, attempt.prompt.tokens, deadline).is_ok()
            });
            *begun = done;
            // One that is not alive.
            attempt.given_up |= !done;
            attempt.touched |= !done;
        }
        // The router looks again when the request takes too long.
        self.future.at(self.now + Duration::from_millis(5001), Happens::Nothing);
        for receiver in 0..self.receivers.len() {
            self.future.at(self.now + self.draw.millis(60), Happens::Grant(index, receiver));
        }
        self.future.at(self.now + self.draw.millis(60), Happens::Compute(index));
        if self.fault(self.faults.abort) {
            self.future.at(self.now + self.draw.millis(200), Happens::Abort(index));
        }
    }

    fn grant(&mut self, index: usize, receiver: usize) {
        let deadline = self.deadline(3);
        let attempt = &mut self.attempts[index];
        if attempt.given_up || attempt.over || attempt.fences[receiver].is_some() {
            return;
        }
        let node = &mut self.receivers[receiver];
        let fence = Fence { request: attempt.request, generation: node.generation };
        let count = attempt.prompt.tokens.div_ceil(self.sides[1].page_tokens) as usize;
        let granted = node.machine.as_mut().is_some_and(|machine| {
            let Some(pages) = node.cache.take(fence, count) else { return false };
            let far = self.way == Way::Far;
            let Some(landing) = node.landing.take(fence, if far { count } else { 0 }) else {
                node.cache.free(fence);
                return false;
            };
            let wanted = receiver::Wanted {
                fence,
                tokens: attempt.prompt.tokens,
                first: attempt.first,
                sender: (self.senders[0].rank.instance, 0),
                payloads: &[1, 7],
                landing: &landing,
                deadline,
            };
            if machine.grant(&wanted).is_err() {
                node.cache.free(fence);
                node.landing.free(fence);
                return false;
            }
            let table = Table { attempt: index, pages, landing, whole: false, ended: false };
            node.tables.insert(fence, table);
            true
        });
        if granted {
            node.generation += 1;
            attempt.fences[receiver] = Some(fence);
            self.open.push((receiver, fence));
        } else {
            // Pages are few, and connections come later. Who waits too long is given up, and its pages with it.
            let waited = self.now - attempt.began > Duration::from_secs(1);
            attempt.given_up |= waited;
            attempt.touched |= waited;
            self.future.at(self.now + Duration::from_millis(20), Happens::Grant(index, receiver));
        }
    }

    /// Computes one layer of a chunk, sometimes together with another attempt's.
    fn compute(&mut self, index: usize) {
        let mut of = vec![index];
        if self.draw.often(300) {
            let other = self.draw.below(self.attempts.len() as u64) as usize;
            let goes_on = |attempt: &Attempt| attempt.next < attempt.steps.len() && attempt.next > 0;
            of.extend((other != index && goes_on(&self.attempts[other])).then_some(other));
        }
        of.retain(|index| !self.attempts[*index].given_up && !self.attempts[*index].over);
        for sender in 0..self.senders.len() {
            let mut parts = Vec::new();
            for attempt in of.iter().map(|index| &self.attempts[*index]) {
                let Some((chunk, layer)) = attempt.steps.get(attempt.next).copied() else { continue };
                let from = if chunk == 0 { 0 } else { attempt.prompt.ends[chunk - 1] };
                let tokens = from..attempt.prompt.ends[chunk];
                let divides = !attempt.prompt.chunks.is_empty();
                let origins = &mut self.senders[sender].origins;
                origins.push(Origin {
                    rows: Rc::clone(&attempt.rows),
                    layer,
                    tokens: tokens.clone(),
                    chunk: if divides { chunk as u32 } else { 0 },
                    released: false,
                });
                parts.push(Computed {
                    request: attempt.request,
                    layer,
                    tokens,
                    chunk: attempt.prompt.chunks.get(chunk).copied(),
                    origin: origins.len() as u64 - 1,
                });
            }
            let node = &mut self.senders[sender];
            // A request that failed meanwhile is over here: what was computed for it is of no use.
            parts.retain(|part| {
                let goes_on =
                    self.attempts.iter().any(|of| of.request == part.request && of.begun[sender] && !of.over);
                node.origins[part.origin as usize].released = !goes_on;
                goes_on
            });
            if let Some(machine) = &mut node.machine {
                machine.computed(&parts).unwrap();
            }
        }
        for index in of {
            self.attempts[index].next += 1;
            let attempt = &self.attempts[index];
            if attempt.next < attempt.steps.len() {
                self.future.at(self.now + self.draw.millis(12), Happens::Compute(index));
            } else if attempt.next == attempt.steps.len() {
                let (request, salt) = (attempt.request, attempt.salt);
                for machine in self.senders.iter_mut().filter_map(|node| node.machine.as_mut()) {
                    let given = machine.payload(request, 1, &[salt; 9]);
                    let _ = given
                        .and_then(|()| machine.payload(request, 7, &[]))
                        .and_then(|()| machine.finish(request));
                }
            }
        }
    }

    /// An attempt is given up on both sides.
    fn give_up(&mut self, index: usize) {
        let attempt = &mut self.attempts[index];
        if attempt.over {
            return;
        }
        attempt.given_up = true;
        let request = attempt.request;
        for (node, begun) in self.senders.iter_mut().zip(&attempt.begun) {
            if let Some(machine) = node.machine.as_mut().filter(|_| *begun) {
                let _ = machine.abort(request);
            }
        }
        for receiver in 0..self.receivers.len() {
            let Some(fence) = self.attempts[index].fences[receiver] else { continue };
            if let Some(machine) = &mut self.receivers[receiver].machine {
                let _ = machine.abort(fence);
            }
            self.end(receiver, fence);
        }
    }

    /// A use of pages that did not become whole is over at a receiver: no one writes its pages any more.
    fn end(&mut self, receiver: usize, fence: Fence) {
        let node = &mut self.receivers[receiver];
        let Some(table) = node.tables.get_mut(&fence).filter(|table| !table.ended && !table.whole) else {
            return;
        };
        table.ended = true;
        node.cache.free(fence);
        if self.weak == Weak::TimeOut {
            node.landing.free(fence);
        }
    }

    fn close(&mut self, receiver: usize, fence: Fence) {
        let node = &self.receivers[receiver];
        let Some(table) = node.tables.get(&fence) else { return };
        self.check(receiver, fence, table.attempt, None);
        let node = &mut self.receivers[receiver];
        node.tables.get_mut(&fence).unwrap().ended = true;
        node.cache.free(fence);
    }

    fn check(&mut self, receiver: usize, fence: Fence, attempt: usize, layer: Option<u32>) {
        let Attempt { prompt, first, salt, .. } = &self.attempts[attempt];
        // A receiver divides heads: chunks say nothing of its pages.
        let request = Request { tokens: prompt.tokens, replicas: [0, 0], chunks: &[] };
        let node = &self.receivers[receiver];
        let wrong = node.wrong_row(&self.sides[1], &request, (fence, *first, *salt), layer);
        if let Some(wrong) = wrong {
            self.broken.get_or_insert(wrong);
        }
    }

    /// Ends attempts, and begins new ones at the requests of those that failed.
    pub(super) fn route(&mut self) {
        for index in 0..self.attempts.len() {
            if self.attempts[index].over {
                continue;
            }
            let attempt = &mut self.attempts[index];
            let waits = self.patient && self.now > attempt.began + Duration::from_secs(5);
            if waits && attempt.begun.contains(&true) && !attempt.given_up {
                attempt.why.push_str("it took too long; ");
                attempt.given_up = true;
            }
            if self.attempts[index].given_up {
                self.give_up(index);
            }
            let attempt = &self.attempts[index];
            let sent = attempt.begun.iter().all(|begun| !begun);
            let whole = attempt.whole == self.receivers.len() && !attempt.given_up;
            if sent && (whole || attempt.given_up) {
                let (request, touched, why) = (attempt.request, attempt.touched, attempt.why.clone());
                self.attempts[index].over = true;
                if whole {
                    self.seen.whole += 1;
                } else {
                    self.seen.failed += 1;
                    if !touched {
                        self.broken.get_or_insert(format!("request {request} failed for no reason: {why}"));
                    }
                    self.attempt();
                }
            }
        }
    }

    fn at_sender(&mut self, link: u32, message: &Message) {
        let Link { sender, up, .. } = self.links[link as usize];
        let Some(machine) = self.senders[sender].machine.as_mut().filter(|_| up[0]) else { return };
        if machine.frame(link, &message.bytes).is_err() {
            self.lost(link, 0);
            self.cut(link);
        }
    }

    fn at_receiver(&mut self, link: u32, message: &Message) {
        let Link { sender, receiver, up, .. } = self.links[link as usize];
        if !up[1] || self.receivers[receiver].machine.is_none() {
            return;
        }
        let mut draws = self.draw.clone();
        let (calm, often) = (self.now >= CALM, self.faults.fetched);
        let mut faults = || !calm && draws.often(often);
        let node = &mut self.receivers[receiver];
        let from = match (self.way, &message.carried) {
            (Way::Shared, _) => From::Shared(&self.senders[sender].origins),
            (Way::Stream, Some(carried)) => From::Stream(carried),
            _ => From::Landing,
        };
        let pools = (&mut node.cache, &mut node.landing, &node.tables);
        let mut hands = Hands::new(from, pools, &mut faults, self.weak == Weak::ReadsTwice);
        let machine = node.machine.as_mut().unwrap();
        let taken = machine.frame(link, &message.bytes, &mut hands);
        let broken = hands.broken.take();
        self.draw = draws;
        self.broken = self.broken.take().or(broken);
        if taken.is_err() {
            self.lost(link, 1);
            self.cut(link);
        } else if self.weak == Weak::ByCount {
            self.count(link, receiver, &message.bytes);
        }
    }

    /// The control that counts what is told.
    fn count(&mut self, link: u32, receiver: usize, bytes: &[u8]) {
        let Ok(Frame::Notice(notice)) = Frame::decode(bytes) else { return };
        for part in notice.parts() {
            let Some(table) = self.receivers[receiver].tables.get(&part.fence) else { continue };
            let (attempt, ended) = (table.attempt, table.ended);
            let told = self.told.entry((part.fence, receiver, part.layer, link)).or_default();
            *told += part.tokens.len() as u32;
            let wanted = self.attempts[attempt].prompt.tokens - self.attempts[attempt].first;
            let all =
                self.links.iter().enumerate().filter(|(_, of)| of.receiver == receiver && of.up[1]).all(
                    |(link, _)| {
                        let key = (part.fence, receiver, part.layer, link as u32);
                        self.told.get(&key).is_some_and(|told| *told >= wanted)
                    },
                );
            if all && !ended {
                self.check(receiver, part.fence, attempt, Some(part.layer));
            }
        }
    }

    fn lands(&mut self, link: u32, (write, last): (u64, bool), what: (Fence, u32, u64), run: &Run) {
        let (fence, page, origin) = what;
        let Link { sender, receiver, up, processes } = self.links[link as usize];
        if self.receivers[receiver].machine.is_some() && processes[1] == self.processes[1][receiver] {
            let mut bytes = vec![0; run.total() as usize];
            let _ = read(&self.senders[sender].origins, origin, run, &mut bytes);
            if self.fault(self.faults.fetched) {
                bytes[0] ^= 1;
            }
            let node = &mut self.receivers[receiver];
            if node.landing.owner[page as usize] != Some(fence) {
                self.broken.get_or_insert(format!("{fence:?} writes page {page}, which is not its own"));
                return;
            }
            if node.tables.get(&fence).is_none_or(|table| table.ended || table.whole) {
                self.seen.late_writes += 1;
            }
            node.landing.write(page, run, &bytes);
        }
        if last
            && up[0]
            && processes[0] == self.processes[0][sender]
            && let Some(machine) = &mut self.senders[sender].machine
        {
            machine.written(link, write, false);
        }
    }

    /// Lets all machines say what they want done.
    pub(super) fn pump(&mut self) {
        let mut frame = Vec::new();
        for index in 0..self.senders.len() {
            while let Some(mut machine) = self.senders[index].machine.take() {
                let action = machine.poll(self.now, &mut Reader(&self.senders[index].origins), &mut frame);
                self.senders[index].machine = Some(machine);
                match action.unwrap() {
                    Some(action) => self.sent(index, action, &frame),
                    None => break,
                }
            }
        }
        for index in 0..self.receivers.len() {
            while let Some(machine) = &mut self.receivers[index].machine {
                match machine.poll(self.now, &mut frame) {
                    Some(receiver::Action::Frame { link }) => {
                        let message = Message { bytes: frame.clone(), carried: None };
                        self.post(link, message, false);
                    }
                    Some(receiver::Action::Close { link }) => {
                        self.seen.closed += 1;
                        self.lost(link, 1);
                        self.cut(link);
                    }
                    Some(receiver::Action::Event(event)) => self.received(index, event),
                    None => break,
                }
            }
        }
    }

    fn sent(&mut self, index: usize, action: sender::Action, frame: &[u8]) {
        match action {
            sender::Action::Frame { link } => {
                let carried = (self.way == Way::Stream).then(|| Rc::new(self.senders[index].origins.clone()));
                self.post(link, Message { bytes: frame.to_vec(), carried }, true);
            }
            sender::Action::Write { link, write, fence, rows, some } => {
                self.write(link, write, fence, &rows, some)
            }
            sender::Action::Close { link } => {
                self.seen.closed += 1;
                self.lost(link, 0);
                self.cut(link);
            }
            sender::Action::Event(sender::Event::Released { origin, .. }) => {
                let origin = &mut self.senders[index].origins[origin as usize];
                if std::mem::replace(&mut origin.released, true) {
                    self.broken.get_or_insert("rows are released twice".to_owned());
                }
            }
            sender::Action::Event(sender::Event::Ended { request, reason }) => {
                let of =
                    self.attempts.iter_mut().find(|of| of.request == request && of.begun[index] && !of.over);
                if let Some(attempt) = of {
                    attempt.begun[index] = false;
                    attempt.given_up |= reason != Reason::Done;
                    attempt.touched |= reason == Reason::Corrupt;
                    attempt.why.push_str(&format!("{reason:?} at the sender; "));
                }
            }
            sender::Action::Event(sender::Event::Granted { link, fence, landing, .. }) => {
                self.granted.insert((link, fence), landing);
            }
        }
    }

    /// Writes rows to landing pages, run by run, some late.
    fn write(&mut self, link: u32, write: u64, fence: Fence, rows: &Computed, some: Option<Vec<u32>>) {
        let Link { sender, .. } = self.links[link as usize];
        let mut runs = Vec::new();
        let machine = self.senders[sender].machine.as_ref().unwrap();
        let listed = machine.runs(link, rows, some.as_deref(), |run| {
            runs.push(run);
            Ok(())
        });
        listed.unwrap();
        let landing = self.granted[&(link, fence)].clone();
        let mut times: Vec<_> = runs.iter().map(|_| self.now + self.draw.millis(10)).collect();
        if self.fault(self.faults.late) {
            times.iter_mut().for_each(|time| *time += self.draw.millis(400));
        }
        times.sort_unstable();
        let last = runs.len() - 1;
        for (place, (run, time)) in runs.into_iter().zip(times).enumerate() {
            let page = landing[run.to.page as usize];
            let (origin, last) = (rows.origin, place == last);
            self.future.at(time, Happens::Lands { link, write, fence, page, origin, run, last });
        }
    }

    /// Sends a message over the fabric.
    fn post(&mut self, link: u32, mut message: Message, to_receiver: bool) {
        let hello = message.bytes[0] == 1;
        if self.fault(self.faults.misnamed) && to_receiver {
            self.misname(link, &mut message);
        }
        let told = message.bytes[0];
        if self.fault(self.faults.nonsense) && !hello && told != 8 && !(told == 2 && self.way == Way::Far) {
            let at = 1 + self.draw.below(message.bytes.len() as u64 - 5) as usize;
            message.bytes[at] ^= 1 << self.draw.below(8);
            add_sum(&mut message.bytes);
            self.confused = true;
            self.touch_all();
        }
        if self.fault(self.faults.damaged) {
            let at = self.draw.below(message.bytes.len() as u64) as usize;
            message.bytes[at] ^= 1 << self.draw.below(8);
        }
        let copies = match (self.fault(self.faults.lost), self.fault(self.faults.twice)) {
            // A connection begins with its hello: one that loses it is no connection.
            (true, _) if !hello => 0,
            (_, true) if !hello => 2,
            _ => 1,
        };
        self.seen.resent += u32::from(copies != 1);
        for _ in 0..copies {
            let late = if !hello && self.fault(self.faults.late) { 300 } else { 2 };
            // The hello comes first.
            let least = if hello { 0 } else { 3000 };
            let time = self.now + Duration::from_micros(least) + self.draw.millis(late);
            let happens = match to_receiver {
                true => Happens::ToReceiver(link, message.clone()),
                false => Happens::ToSender(link, message.clone()),
            };
            self.future.at(time, happens);
        }
    }

    /// Gives the first part of a notice the fence of another use on the connection. Where digests do not cover whose
    /// rows they are, they still fit.
    fn misname(&mut self, link: u32, message: &mut Message) {
        let Link { sender, receiver, .. } = self.links[link as usize];
        let Ok(Frame::Notice(notice)) = Frame::decode(&message.bytes) else { return };
        let Some(part) = notice.parts().next() else { return };
        let tables = &self.receivers[receiver].tables;
        let others = tables.iter().filter(|(fence, table)| **fence != part.fence && !table.ended);
        let mut others: Vec<Fence> = others.map(|(fence, _)| *fence).collect();
        others.sort_unstable();
        let Some(other) = others.first().copied() else { return };
        let (from, to) = (self.senders[sender].rank, self.receivers[receiver].rank);
        let between = Of::Between((from.stage, from.lane), (to.stage, to.lane));
        let chunks = [part.chunk];
        let divides = self.sides[0].split == forebay::transfer::Split::Tokens;
        let chunks = if divides { chunks.as_slice() } else { &[] };
        let request = Request { tokens: part.tokens.end, replicas: [0, 0], chunks };
        let mut digests = Vec::new();
        let origins = &self.senders[sender].origins;
        self.plan
            .runs(&request, (part.layer, part.tokens.clone()), between, |run| {
                let mut bytes = vec![0; run.total() as usize];
                read(origins, part.origin, &run, &mut bytes)?;
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
        self.touch_all();
    }

    fn received(&mut self, index: usize, event: receiver::Event) {
        match event {
            receiver::Event::Ready { fence, layer } => {
                self.seen.layers += 1;
                let attempt = self.receivers[index].tables[&fence].attempt;
                self.check(index, fence, attempt, Some(layer));
            }
            receiver::Event::Payload { fence, kind, bytes } => {
                let attempt = self.receivers[index].tables[&fence].attempt;
                let wanted = if kind == 1 { vec![self.attempts[attempt].salt; 9] } else { Vec::new() };
                if bytes != wanted {
                    self.broken.get_or_insert(format!("payload {kind} of {fence:?}: {bytes:?}"));
                }
            }
            receiver::Event::Whole { fence } => {
                let table = self.receivers[index].tables.get_mut(&fence).unwrap();
                table.whole = true;
                let attempt = table.attempt;
                self.attempts[attempt].whole += 1;
                self.check(index, fence, attempt, None);
                self.future.at(self.now + self.draw.millis(200), Happens::Close(index, fence));
            }
            receiver::Event::Failed { fence, error } => {
                let attempt = self.receivers[index].tables[&fence].attempt;
                self.attempts[attempt].touched |= error.kind() == forebay::Kind::Corrupt;
                self.attempts[attempt].why.push_str(&format!("{error}; "));
                self.attempts[attempt].given_up = true;
                self.end(index, fence);
            }
            receiver::Event::Drained { fence } => self.open.retain(|open| *open != (index, fence)),
            receiver::Event::Free { landing } => {
                let node = &mut self.receivers[index];
                for page in landing {
                    let owner = &mut node.landing.owner[page as usize];
                    let arrives =
                        |fence: &Fence| node.tables.get(fence).is_some_and(|of| !of.ended && !of.whole);
                    match owner.filter(arrives) {
                        None => *owner = None,
                        // The control has given the page to others meanwhile: it stays theirs.
                        Some(_) if self.weak == Weak::TimeOut => {}
                        Some(fence) => {
                            self.broken
                                .get_or_insert(format!("a page of {fence:?} is free while it arrives"));
                        }
                    }
                }
            }
        }
    }
}
