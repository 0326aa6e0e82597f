//! Ranks over a fabric under test: rows with names of their own, and what is known of writes from afar.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::conformance::subject::{Checked, Subject, Wrong, told};
use crate::transfer::ends::{Polled, ReceivingEnd, SendingEnd, Store};
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric, Told};
use crate::transfer::frames::{Rank, Reason};
use crate::transfer::plan::Plan;
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::{self, Receiver, Where};
use crate::transfer::runs::{Of, Request, Run};
use crate::transfer::sender::{self, Sender, Source};
use crate::transfer::side::{Component, LayerPlaces, Place, Side, Split, Stage};

/// Origins that a sender has memory for.
pub const ORIGINS: u64 = 64;
/// The most tokens of an origin.
pub const TOKENS: u32 = 24;
/// Landing pages of a receiver.
pub const LANDING: u32 = 12;
/// Layers of the model.
pub(super) const LAYERS: u32 = 3;
/// Tokens of a receiver's page.
const PAGE: u32 = 6;
/// Bytes of a token's row in each component.
const ROWS: [u64; 2] = [24, 8];

/// The sides of the suite: one rank each, three layers with two components, the sender's rows with gaps between them
/// and in pages of 4 tokens, the receiver's without gaps in pages of 6.
pub fn sides() -> [Side; 2] {
    let side = |page: u32, gap: u64| {
        let strides = ROWS.map(|bytes| bytes + gap);
        let place = |layer: u32, component: u32| {
            let stride = strides.get(component as usize).copied().unwrap_or(0);
            let (offset, token_stride) = (u64::from(layer) * u64::from(page) * stride, stride);
            Place { component, plane: component, offset, token_stride, head_stride: stride }
        };
        let layers = 0..LAYERS;
        let places = |layer| LayerPlaces { layer, places: vec![place(layer, 0), place(layer, 1)] };
        let page_bytes = |stride| u64::from(LAYERS) * u64::from(page) * stride;
        let component = |name: &str, head_bytes| {
            let (name, dtype) = (name.to_owned(), "bf16".to_owned());
            Component { name, dtype, heads: 1, head_bytes }
        };
        Side {
            components: vec![component("latent", ROWS[0]), component("keys", ROWS[1])],
            stages: vec![Stage {
                layers: layers.map(places).collect(),
                page_bytes: strides.map(page_bytes).to_vec(),
            }],
            width: 1,
            split: Split::Heads,
            replicas: 1,
            page_tokens: page,
        }
    };
    [side(4, 8), side(PAGE, 0)]
}

const fn rank(instance: u64) -> Rank {
    Rank { instance, replica: 0, stage: 0, lane: 0 }
}

/// The machine of a sending instance of one rank.
pub(super) fn machine(instance: u64, digests: bool) -> Result<Sender> {
    let options = sender::Options { bulk_tokens: 4, digests, ..sender::Options::default() };
    let [side, _] = sides();
    Sender::new(side, rank(instance), options)
}

/// The bytes of a token's row: no other row has them.
fn row(of: (u64, u64), run: &Run, token: u32) -> Vec<u8> {
    let (instance, request) = of;
    let name = [instance, request, run.layer.into(), run.component.into(), token.into()];
    let bytes = ROWS.get(run.component as usize).copied().unwrap_or(0);
    // FNV-1a, of the name and the byte's place.
    let byte = |at: u64| {
        let words = name.iter().chain([&at]);
        let hash = words.fold(0xCBF2_9CE4_8422_2325_u64, |hash, word| {
            (hash ^ word).wrapping_mul(0x0100_0000_01B3).rotate_left(23)
        });
        (hash ^ hash >> 32) as u8
    };
    (0..bytes).map(byte).collect()
}

/// The bytes of a run of a request's rows.
pub(super) fn rows(of: (u64, u64), run: &Run) -> Vec<u8> {
    (run.token..run.token + run.tokens).flat_map(|token| row(of, run, token)).collect()
}

/// A write from afar that the fabric has taken: landing pages and runs.
#[derive(Clone)]
pub(super) struct Write {
    pub runs: Vec<(u32, Run)>,
    pub ended: bool,
}

/// A sender's end, and what it was asked to write.
pub(super) struct Spy<F> {
    pub inner: F,
    pub writes: BTreeMap<(u32, u64), Write>,
    /// A write that ended without having begun, or twice.
    pub wrong: Option<Wrong>,
    /// Whether it writes from afar.
    pub far: bool,
}

impl<F: SenderFabric> Fabric for Spy<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        let happened = self.inner.poll(frame)?;
        if let Some(Happened::Connected { far, .. }) = happened {
            self.far = far;
        }
        if let Some(Happened::Written { link, write, .. }) = happened {
            match self.writes.get_mut(&(link, write)).filter(|write| !write.ended) {
                Some(own) => own.ended = true,
                None => self.wrong = Some(format!("write {write} ended without having begun, or twice")),
            }
        }
        Ok(happened)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: SenderFabric> Source for Spy<F> {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.inner.read(origin, run, into)
    }
}

impl<F: SenderFabric> SenderFabric for Spy<F> {
    fn send(&mut self, link: u32, frame: &[u8], runs: &Runs<'_>) -> Result<()> {
        self.inner.send(link, frame, runs)
    }

    fn write(&mut self, link: u32, write: u64, fence: Fence, runs: &Runs<'_>) -> Result<()> {
        let mut own = Vec::new();
        runs.each(|Told { page, run, .. }| {
            own.push((page.ok_or_else(|| Error::new(Kind::OutOfRange, "write"))?, *run));
            Ok(())
        })?;
        self.inner.write(link, write, fence, runs)?;
        self.writes.insert((link, write), Write { runs: own, ended: false });
        Ok(())
    }
}

/// A receiver's end, and what it finds on landing pages.
pub(super) struct Finds<F> {
    pub inner: F,
    /// Of a rig with one sender its instance, while rows do not change: then the bytes that must be found are known.
    pub instance: Option<u64>,
    /// What was not there when it was told.
    pub wrong: Option<Wrong>,
}

impl<F: ReceiverFabric> Fabric for Finds<F> {
    fn poll(&mut self, frame: &mut Vec<u8>) -> Result<Option<Happened>> {
        self.inner.poll(frame)
    }

    fn close(&mut self, link: u32) {
        self.inner.close(link);
    }
}

impl<F: ReceiverFabric> ReceiverFabric for Finds<F> {
    fn send(&mut self, link: u32, frame: &[u8]) -> Result<()> {
        self.inner.send(link, frame)
    }

    fn fetch(&mut self, link: u32, fence: Fence, at: Where, run: &Run, into: &mut [u8]) -> Result<()> {
        let fetched = self.inner.fetch(link, fence, at, run, into);
        let other = self.instance.is_some_and(|instance| into != rows((instance, fence.request), run));
        if matches!(at, Where::Landing(_)) && other {
            let what = || format!("layer {} of {fence:?} was told and has not landed", run.layer);
            self.wrong.get_or_insert_with(what);
        }
        fetched
    }

    fn holds(&mut self, link: u32) -> bool {
        self.inner.holds(link)
    }
}

/// The rows that a receiver has stored: by use, layer, component and token.
#[derive(Default)]
pub(super) struct Stored(pub BTreeMap<(Fence, u32, u32, u32), Vec<u8>>);

impl Store for Stored {
    fn store(&mut self, fence: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let size = ROWS.get(run.component as usize).copied().unwrap_or(1) as usize;
        for (token, row) in (run.token..).zip(bytes.chunks_exact(size)) {
            self.0.insert((fence, run.layer, run.component, token), row.to_vec());
        }
        Ok(())
    }
}

/// A receiving rank.
pub(super) struct Receiving<F> {
    pub end: ReceivingEnd<Finds<F>>,
    pub stored: Stored,
    pub links: usize,
    /// The newest connection.
    pub link: Option<u32>,
    pub free: Vec<u32>,
    pub whole: Vec<Fence>,
    pub failed: Vec<(Fence, Error)>,
    generation: u64,
}

/// A sending rank.
pub(super) struct Sending<F> {
    pub end: SendingEnd<Spy<F>>,
    pub instance: u64,
    pub links: Vec<u32>,
    /// Requests that were granted.
    pub granted: Vec<u64>,
    pub ended: Vec<(u64, Reason)>,
}

/// Ranks of both sides over a subject.
pub(super) struct Rig<'s, S: Subject> {
    pub subject: &'s mut S,
    pub plan: Plan,
    pub senders: Vec<Sending<S::Sender>>,
    pub receivers: Vec<Receiving<S::Receiver>>,
    pub now: Duration,
    /// Whether rows are told with their digests.
    digests: bool,
    /// Whether a connection may be lost for a reason that an end knows.
    pub loses: bool,
}

impl<'s, S: Subject> Rig<'s, S> {
    /// So many instances of one rank on each side, all connected, with digests.
    pub fn new(subject: &'s mut S, count: u64) -> Checked<Rig<'s, S>> {
        Rig::with(subject, count, true)
    }

    /// As `new`, with digests or without.
    pub fn with(subject: &'s mut S, count: u64, digests: bool) -> Checked<Rig<'s, S>> {
        let [from, to] = sides();
        let plan = Plan::new(&from, &to).map_err(told)?;
        let (senders, receivers) = (Vec::new(), Vec::new());
        let now = subject.wait();
        let mut rig = Rig { subject, plan, senders, receivers, now, digests, loses: false };
        for instance in 0..count {
            rig.add_sender(instance + 1)?;
            rig.add_receiver(instance + 101)?;
        }
        rig.until("connections", |rig| {
            rig.receivers.iter().all(|of| of.links as u64 >= count)
                && rig.senders.iter().all(|of| of.links.len() as u64 >= count)
        })?;
        if let ([sender], [receiver]) = (&rig.senders[..], &mut rig.receivers[..]) {
            receiver.end.fabric.instance = Some(sender.instance);
        }
        Ok(rig)
    }

    /// Whether senders write from afar.
    pub fn is_far(&self) -> bool {
        self.senders.iter().any(|of| of.end.fabric.far)
    }

    pub fn add_sender(&mut self, instance: u64) -> Checked {
        let inner = self.subject.sender().map_err(told)?;
        let spy = Spy { inner, writes: BTreeMap::new(), wrong: None, far: false };
        let end = SendingEnd::new(machine(instance, self.digests).map_err(told)?, spy);
        let (links, granted, ended) = (Vec::new(), Vec::new(), Vec::new());
        self.senders.push(Sending { end, instance, links, granted, ended });
        Ok(())
    }

    fn add_receiver(&mut self, instance: u64) -> Checked {
        let [_, side] = sides();
        let options = receiver::Options { digests: self.digests, ..receiver::Options::default() };
        let machine = Receiver::new(side, rank(instance), options).map_err(told)?;
        let inner = self.subject.receiver().map_err(told)?;
        let finds = Finds { inner, instance: None, wrong: None };
        self.receivers.push(Receiving {
            end: ReceivingEnd::new(machine, finds),
            stored: Stored::default(),
            links: 0,
            link: None,
            free: (0..LANDING).collect(),
            whole: Vec::new(),
            failed: Vec::new(),
            generation: 0,
        });
        Ok(())
    }

    /// Polls all ends until they have nothing to say.
    pub fn poll(&mut self) -> Checked {
        self.poll_senders()?;
        self.poll_receivers()
    }

    pub fn poll_senders(&mut self) -> Checked {
        for own in &mut self.senders {
            while let Some(polled) = own.end.poll(self.now).map_err(told)? {
                match polled {
                    Polled::Connected { link } => own.links.push(link),
                    Polled::Lost { why: Some(error), .. } if !self.loses => return Err(error.to_string()),
                    Polled::Event(sender::Event::Granted { request, .. }) => own.granted.push(request),
                    Polled::Event(sender::Event::Ended { request, reason }) => {
                        own.ended.push((request, reason));
                    }
                    Polled::More | Polled::Lost { .. } | Polled::Event(_) => {}
                }
            }
            if let Some(wrong) = own.end.fabric.wrong.take() {
                return Err(wrong);
            }
        }
        Ok(())
    }

    pub fn poll_receivers(&mut self) -> Checked {
        for own in &mut self.receivers {
            while let Some(polled) = own.end.poll(self.now, &mut own.stored).map_err(told)? {
                match polled {
                    Polled::Connected { link } => {
                        own.links += 1;
                        own.link = Some(link);
                    }
                    Polled::Lost { why: Some(error), .. } if !self.loses => return Err(error.to_string()),
                    Polled::Lost { link, .. } if own.links == 0 => {
                        return Err(format!("connection {link} is lost twice"));
                    }
                    Polled::Lost { .. } => own.links -= 1,
                    Polled::Event(receiver::Event::Whole { fence }) => own.whole.push(fence),
                    Polled::Event(receiver::Event::Failed { fence, error }) => {
                        own.failed.push((fence, error))
                    }
                    Polled::Event(receiver::Event::Free { landing }) => own.free.extend(landing),
                    Polled::More | Polled::Event(_) => {}
                }
            }
            if let Some(wrong) = own.end.fabric.wrong.take() {
                return Err(wrong);
            }
        }
        Ok(())
    }

    /// Polls, and lets time pass until something holds.
    pub fn until(&mut self, what: &str, holds: impl Fn(&Rig<'s, S>) -> bool) -> Checked {
        let (limit, end) = (self.subject.limit(), self.now + self.subject.limit());
        loop {
            self.poll()?;
            if holds(self) {
                return Ok(());
            }
            if self.now > end {
                return Err(format!("{what} did not come within {limit:?}"));
            }
            self.now = self.subject.wait();
        }
    }

    /// Puts the rows of one layer of a request where the nth origin says.
    pub fn put(
        &mut self,
        sender: usize,
        (request, origin): (u64, u64),
        (layer, tokens): (u32, std::ops::Range<u32>),
        spoiled: bool,
    ) -> Checked {
        let Some(own) = self.senders.get_mut(sender) else { return Ok(()) };
        let (of, subject) = ((own.instance, request), &mut *self.subject);
        let origin = subject.origin(origin);
        let request = Request { tokens: tokens.end, replicas: [0, 0], chunks: &[] };
        let put = |run: Run| {
            let mut bytes = rows(of, &run);
            if spoiled {
                bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
            }
            subject.put(&mut own.end.fabric.inner, origin, &run, &bytes)
        };
        self.plan.runs(&request, (layer, tokens), Of::All, put).map_err(told)
    }

    /// A receiver wants a request of a sender. Landing pages are taken if they are needed. It waits until both know
    /// each other, and the sender knows the grant.
    pub fn grant(
        &mut self,
        (receiver, sender): (usize, usize),
        request: u64,
        (tokens, first): (u32, u32),
    ) -> Checked<Fence> {
        let far = self.is_far();
        let instance = self.senders.get(sender).map_or(0, |of| of.instance);
        let own = self.receiver(receiver)?;
        own.generation += 1;
        let fence = Fence { request, generation: own.generation };
        let pages = if far { (tokens.div_ceil(PAGE) - first / PAGE) as usize } else { 0 };
        if own.free.len() < pages {
            return Err(format!("{} landing pages are free", own.free.len()));
        }
        let landing: Vec<u32> = own.free.drain(..pages).collect();
        let wanted = receiver::Wanted {
            fence,
            tokens,
            first,
            sender: (instance, 0),
            payloads: &[],
            landing: &landing,
            deadline: None,
        };
        let end = self.now + self.subject.limit();
        while let Err(error) = self.receiver(receiver)?.end.machine.grant(&wanted) {
            // The sender has not said hello.
            if error.kind() != Kind::InvalidState || self.now > end {
                return Err(told(error));
            }
            self.poll()?;
            self.now = self.subject.wait();
        }
        self.until("a grant", |rig| rig.senders.get(sender).is_some_and(|of| of.granted.contains(&request)))?;
        Ok(fence)
    }

    fn receiver(&mut self, index: usize) -> Checked<&mut Receiving<S::Receiver>> {
        self.receivers.get_mut(index).ok_or_else(|| "no such receiver".to_owned())
    }

    /// One end closes the connection of the first sender and receiver.
    pub fn close(&mut self, by_sender: bool) -> Checked {
        let (Some(sender), Some(receiver)) = (self.senders.first_mut(), self.receivers.first_mut()) else {
            return Err("no ends".to_owned());
        };
        let link = if by_sender { sender.links.last() } else { receiver.link.as_ref() };
        let link = *link.ok_or("no connection")?;
        match by_sender {
            true => {
                sender.end.fabric.close(link);
                sender.end.machine.disconnect(link);
            }
            false => {
                receiver.end.fabric.close(link);
                receiver.end.machine.disconnect(link);
                receiver.links -= 1;
            }
        }
        Ok(())
    }

    /// What is on the landing pages of writes to a receiver.
    pub fn landed<'a>(&mut self, writes: impl Iterator<Item = &'a Write>) -> Checked<Vec<Vec<u8>>> {
        let receiver = self.receivers.first_mut().ok_or("no receiver")?;
        let fabric = &mut receiver.end.fabric.inner;
        let mut all = Vec::new();
        for (page, run) in writes.flat_map(|write| &write.runs) {
            let mut bytes = vec![0; usize::try_from(run.total()).unwrap_or(0)];
            self.subject.landed(fabric, *page, run, &mut bytes).map_err(told)?;
            all.push(bytes);
        }
        Ok(all)
    }

    /// Nothing lands on the pages of writes for a while.
    pub fn is_quiet(&mut self, writes: &[&Write], quiet: Duration) -> Checked<bool> {
        let before = self.landed(writes.iter().copied())?;
        let end = self.now + quiet;
        while self.now < end {
            self.now = self.subject.wait();
        }
        Ok(self.landed(writes.iter().copied())? == before)
    }

    /// Compares what a receiver has stored of a request.
    pub fn check(
        &self,
        (receiver, sender): (usize, usize),
        fence: Fence,
        tokens: std::ops::Range<u32>,
    ) -> Checked {
        let instance = self.senders.get(sender).map_or(0, |of| of.instance);
        let Some(own) = self.receivers.get(receiver) else { return Ok(()) };
        let request = Request { tokens: tokens.end, replicas: [0, 0], chunks: &[] };
        let mut wrong = None;
        for layer in 0..LAYERS {
            let compare = |run: Run| {
                for token in run.token..run.token + run.tokens {
                    let stored = own.stored.0.get(&(fence, layer, run.component, token));
                    if stored != Some(&row((instance, fence.request), &run, token)) {
                        wrong.get_or_insert(format!("{fence:?} layer {layer} token {token} is wrong"));
                    }
                }
                Ok(())
            };
            self.plan.runs(&request, (layer, tokens.clone()), Of::All, compare).map_err(told)?;
        }
        wrong.map_or(Ok(()), Err)
    }
}
