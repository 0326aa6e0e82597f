//! What engines and the router do, one thing at a time.

use std::rc::Rc;
use std::time::Duration;

use forebay::transfer::sender::Computed;
use forebay::transfer::{Fence, Request, receiver};

use super::future::Happens;
use super::nodes::{Origin, Table};
use super::{Attempt, Way, Weak, World};

impl World {
    pub(super) fn happens(&mut self, happens: Happens) {
        match happens {
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
        if self.fault(self.faults.crash) {
            self.crash();
        }
    }

    /// What goes on may fail now for a reason.
    pub(super) fn touch_all(&mut self) {
        self.attempts.iter_mut().filter(|attempt| !attempt.over).for_each(|attempt| attempt.touched = true);
    }

    fn crash(&mut self) {
        let sender = self.draw.often(500);
        let count = if sender { self.senders.len() } else { self.receivers.len() };
        let index = self.draw.below(count as u64) as usize;
        let alive = match sender {
            true => self.senders[index].end.take().is_some(),
            false => self.receivers[index].end.take().is_some(),
        };
        if !alive {
            return;
        }
        for attempt in 0..self.attempts.len() {
            let of = &mut self.attempts[attempt];
            let takes_part = if sender { of.from.contains(&index) } else { of.to.contains(&index) };
            let goes_on = of.next > 0 || of.begun.contains(&true) || of.fences.iter().any(Option::is_some);
            match sender {
                true => of.begun[index] = false,
                false => of.fences[index] = None,
            }
            if !of.over && goes_on && takes_part {
                (of.given_up, of.touched) = (true, true);
            }
        }
        self.touch_all();
        if !sender {
            self.receivers[index].memory.borrow_mut().tables.clear();
            self.open.retain(|(of, _)| *of != index);
        }
        let again = if sender { Happens::RestartSender(index) } else { Happens::RestartReceiver(index) };
        self.future.at(self.now + Duration::from_millis(100) + self.draw.millis(200), again);
    }

    fn begin(&mut self, index: usize) {
        let deadline = self.deadline(4);
        let attempt = &mut self.attempts[index];
        attempt.began = self.now;
        for sender in attempt.from.clone() {
            let done = self.senders[sender].end.as_mut().is_some_and(|end| {
                end.machine.begin(attempt.request, attempt.prompt.tokens, deadline).is_ok()
            });
            attempt.begun[sender] = done;
            // One that is not alive.
            attempt.given_up |= !done;
            attempt.touched |= !done;
        }
        // The router looks again when the request takes too long.
        self.future.at(self.now + Duration::from_millis(5001), Happens::Nothing);
        for receiver in self.attempts[index].to.clone() {
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
        let rank = self.senders[attempt.from[0]].rank;
        let granted = node.end.as_mut().is_some_and(|end| {
            let memory = &mut *node.memory.borrow_mut();
            let Some(pages) = memory.cache.take(fence, count) else { return false };
            let far = self.way == Way::Far;
            let wanted = attempt.first..attempt.prompt.tokens;
            let page = self.sides[1].page_tokens;
            let written = if wanted.is_empty() { 0 } else { count - (wanted.start / page) as usize };
            let Some(landing) = memory.landing.take(fence, if far { written } else { 0 }) else {
                memory.cache.free(fence);
                return false;
            };
            let wanted = receiver::Wanted {
                fence,
                tokens: attempt.prompt.tokens,
                first: attempt.first,
                sender: (rank.instance, rank.replica),
                payloads: &[1, 7],
                landing: &landing,
                deadline,
            };
            if end.machine.grant(&wanted).is_err() {
                memory.cache.free(fence);
                memory.landing.free(fence);
                return false;
            }
            let table = Table { attempt: index, pages, landing, whole: false, ended: false };
            memory.tables.insert(fence, table);
            true
        });
        if granted {
            node.generation += 1;
            attempt.fences[receiver] = Some(fence);
            self.open.push((receiver, fence));
        } else {
            // Pages are few, and connections come later. What waits too long is given up, and its pages with it.
            let waited = self.now - attempt.began > Duration::from_secs(1);
            attempt.given_up |= waited;
            attempt.touched |= waited;
            self.future.at(self.now + Duration::from_millis(20), Happens::Grant(index, receiver));
        }
    }

    /// Computes one layer of a chunk, sometimes together with those of others.
    fn compute(&mut self, index: usize) {
        let mut of = vec![index];
        while of.len() < 4 && self.draw.often(300) {
            let other = self.draw.below(self.attempts.len() as u64) as usize;
            let goes_on = |attempt: &Attempt| attempt.next < attempt.steps.len() && attempt.next > 0;
            of.extend((!of.contains(&other) && goes_on(&self.attempts[other])).then_some(other));
        }
        of.retain(|index| !self.attempts[*index].given_up && !self.attempts[*index].over);
        self.seen.together = self.seen.together.max(of.len() as u32);
        for sender in 0..self.senders.len() {
            self.compute_at(sender, &of);
        }
        for index in of {
            self.attempts[index].next += 1;
            let attempt = &self.attempts[index];
            if attempt.next < attempt.steps.len() {
                self.future.at(self.now + self.draw.millis(12), Happens::Compute(index));
            } else if attempt.next == attempt.steps.len() {
                let (request, salt) = (attempt.request, attempt.salt);
                for end in self.senders.iter_mut().filter_map(|node| node.end.as_mut()) {
                    let given = end.machine.payload(request, 1, &[salt; 9]);
                    let _ = given
                        .and_then(|()| end.machine.payload(request, 7, &[]))
                        .and_then(|()| end.machine.finish(request));
                }
            }
        }
    }

    fn compute_at(&mut self, sender: usize, of: &[usize]) {
        let node = &mut self.senders[sender];
        let Some(end) = &mut node.end else { return };
        let mut parts = Vec::new();
        for attempt in of.iter().map(|index| &self.attempts[*index]) {
            // A request that failed meanwhile is over here: what is computed for it is of no use.
            let step = attempt.steps.get(attempt.next).filter(|_| attempt.begun[sender]);
            let Some((chunk, layer)) = step.copied() else { continue };
            let from = if chunk == 0 { 0 } else { attempt.prompt.ends[chunk - 1] };
            let tokens = from..attempt.prompt.ends[chunk];
            let divides = !attempt.prompt.chunks.is_empty();
            let memory = &mut *node.memory.borrow_mut();
            memory.parts.push(Origin {
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
                origin: memory.parts.len() as u64 - 1,
            });
        }
        end.machine.computed(&parts).unwrap();
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
            if let Some(end) = node.end.as_mut().filter(|_| *begun) {
                let _ = end.machine.abort(request);
            }
        }
        for receiver in 0..self.receivers.len() {
            let Some(fence) = self.attempts[index].fences[receiver] else { continue };
            if let Some(end) = &mut self.receivers[receiver].end {
                let _ = end.machine.abort(fence);
            }
            self.end(receiver, fence);
        }
    }

    /// A use of pages that did not become whole is over at a receiver: no one writes its pages any more.
    pub(super) fn end(&mut self, receiver: usize, fence: Fence) {
        let memory = &mut *self.receivers[receiver].memory.borrow_mut();
        let Some(table) = memory.tables.get_mut(&fence).filter(|table| !table.ended && !table.whole) else {
            return;
        };
        table.ended = true;
        memory.cache.free(fence);
        if self.weak == Weak::TimeOut {
            memory.landing.free(fence);
        }
    }

    pub(super) fn close_later(&mut self, receiver: usize, fence: Fence) {
        self.future.at(self.now + self.draw.millis(200), Happens::Close(receiver, fence));
    }

    fn close(&mut self, receiver: usize, fence: Fence) {
        let memory = Rc::clone(&self.receivers[receiver].memory);
        let attempt = memory.borrow().tables.get(&fence).map(|table| table.attempt);
        let Some(attempt) = attempt else { return };
        self.check(receiver, fence, attempt, None);
        let memory = &mut *memory.borrow_mut();
        memory.tables.get_mut(&fence).unwrap().ended = true;
        memory.cache.free(fence);
    }

    pub(super) fn check(&mut self, receiver: usize, fence: Fence, attempt: usize, layer: Option<u32>) {
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
            let whole = attempt.whole == attempt.to.len() && !attempt.given_up;
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
}
