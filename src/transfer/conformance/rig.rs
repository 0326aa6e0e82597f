//! Ranks over a fabric under test: rows with names of their own, and what is known of writes from afar.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::transfer::conformance::subject::{Checked, Subject, Wrong, told};
use crate::transfer::ends::{Polled, ReceivingEnd, SendingEnd, Store};
use crate::transfer::fabric::{Fabric, Happened, ReceiverFabric, Runs, SenderFabric};
use crate::transfer::frames::Rank;
use crate::transfer::plan::Plan;
use crate::transfer::quarantine::Fence;
use crate::transfer::receiver::{self, Receiver, Where};
use crate::transfer::runs::{Of, Request, Run};
use crate::transfer::sender::{self, Sender, Source};
use crate::transfer::side::{Component, LayerPlaces, Place, Side, Split, Stage};

/// How long a check waits for something that must come.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Origins that a sender has memory for.
pub const ORIGINS: u64 = 64;
/// The most tokens of an origin.
pub const TOKENS: u32 = 24;
/// Landing pages of a receiver.
pub const LANDING: u32 = 12;
/// Layers of the model.
pub(super) const LAYERS: u32 = 3;
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
    [side(4, 8), side(6, 0)]
}

const fn rank(instance: u64) -> Rank {
    Rank { instance, replica: 0, stage: 0, lane: 0 }
}

/// The machine of a sending instance of one rank.
pub(super) fn machine(instance: u64) -> Result<Sender> {
    let options = sender::Options { bulk_tokens: 4, ..sender::Options::default() };
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

/// A write from afar that the fabric has taken.
pub(super) struct Write {
    pub fence: Fence,
    pub link: u32,
    /// Landing pages and runs.
    pub runs: Vec<(u32, u64, Run)>,
    pub ended: bool,
}

/// A sender's end, and what it was asked to write.
pub(super) struct Spy<F> {
    pub inner: F,
    pub writes: BTreeMap<(u32, u64), Write>,
    /// Writes that have ended well since the last look.
    pub written: Vec<(u32, u64)>,
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
        if let Some(Happened::Written { link, write, failed }) = happened {
            match self.writes.get_mut(&(link, write)).filter(|write| !write.ended) {
                Some(own) => own.ended = true,
                None => self.wrong = Some(format!("write {write} ended without having begun, or twice")),
            }
            self.written.extend((!failed).then_some((link, write)));
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

    fn write(&mut self, link: u32, write: u64, fence: Fence, landing: &[u32], runs: &Runs<'_>) -> Result<()> {
        let mut own = Vec::new();
        runs.each(|origin, run| {
            let page = landing.get(run.to.page as usize).copied();
            own.push((page.ok_or_else(|| Error::new(Kind::OutOfRange, "write"))?, origin, *run));
            Ok(())
        })?;
        self.inner.write(link, write, fence, landing, runs)?;
        self.writes.insert((link, write), Write { fence, link, runs: own, ended: false });
        Ok(())
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
    pub end: ReceivingEnd<F>,
    pub stored: Stored,
    pub links: usize,
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
    pub ended: Vec<(u64, crate::transfer::frames::Reason)>,
}

/// Ranks of both sides over a subject.
pub(super) struct Rig<'s, S: Subject> {
    pub subject: &'s mut S,
    pub plan: Plan,
    pub senders: Vec<Sending<S::Sender>>,
    pub receivers: Vec<Receiving<S::Receiver>>,
    pub now: Duration,
    /// Whether rows change meanwhile, so that a write's bytes are not known.
    pub rows_change: bool,
}

impl<'s, S: Subject> Rig<'s, S> {
    /// So many instances of one rank on each side, all connected.
    pub fn new(subject: &'s mut S, count: u64) -> Checked<Rig<'s, S>> {
        let [from, to] = sides();
        let plan = Plan::new(&from, &to).map_err(told)?;
        let (senders, receivers) = (Vec::new(), Vec::new());
        let mut rig = Rig { subject, plan, senders, receivers, now: Duration::ZERO, rows_change: false };
        for instance in 0..count {
            rig.add_sender(instance + 1)?;
            rig.add_receiver(instance + 101)?;
        }
        rig.until("connections", |rig| {
            rig.receivers.iter().all(|of| of.links as u64 >= count)
                && rig.senders.iter().all(|of| of.links.len() as u64 >= count)
        })?;
        // Both ends say hello.
        rig.settle()?;
        Ok(rig)
    }

    /// Whether senders write from afar.
    pub fn is_far(&self) -> bool {
        self.senders.iter().any(|of| of.end.fabric.far)
    }

    pub fn add_sender(&mut self, instance: u64) -> Checked {
        let inner = self.subject.sender().map_err(told)?;
        let spy = Spy { inner, writes: BTreeMap::new(), written: Vec::new(), wrong: None, far: false };
        let end = SendingEnd::new(machine(instance).map_err(told)?, spy);
        self.senders.push(Sending { end, instance, links: Vec::new(), ended: Vec::new() });
        Ok(())
    }

    fn add_receiver(&mut self, instance: u64) -> Checked {
        let [_, side] = sides();
        let machine = Receiver::new(side, rank(instance), receiver::Options::default()).map_err(told)?;
        self.receivers.push(Receiving {
            end: ReceivingEnd::new(machine, self.subject.receiver().map_err(told)?),
            stored: Stored::default(),
            links: 0,
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
        for index in 0..self.senders.len() {
            let Some(own) = self.senders.get_mut(index) else { continue };
            while let Some(polled) = own.end.poll(self.now).map_err(told)? {
                match polled {
                    Polled::Connected { link } => own.links.push(link),
                    Polled::Lost { why: Some(error), .. } => return Err(error.to_string()),
                    Polled::Event(sender::Event::Ended { request, reason }) => {
                        own.ended.push((request, reason));
                    }
                    Polled::Lost { .. } | Polled::Event(_) => {}
                }
            }
            if let Some(wrong) = own.end.fabric.wrong.take() {
                return Err(wrong);
            }
            self.look_at_writes(index)?;
        }
        Ok(())
    }

    pub fn poll_receivers(&mut self) -> Checked {
        for own in &mut self.receivers {
            while let Some(polled) = own.end.poll(self.now, &mut own.stored).map_err(told)? {
                match polled {
                    Polled::Connected { .. } => own.links += 1,
                    Polled::Lost { why: Some(error), .. } => return Err(error.to_string()),
                    Polled::Lost { .. } => own.links -= 1,
                    Polled::Event(receiver::Event::Whole { fence }) => own.whole.push(fence),
                    Polled::Event(receiver::Event::Failed { fence, error }) => {
                        own.failed.push((fence, error))
                    }
                    Polled::Event(receiver::Event::Free { landing }) => own.free.extend(landing),
                    Polled::Event(_) => {}
                }
            }
        }
        Ok(())
    }

    /// A write that has ended has landed.
    fn look_at_writes(&mut self, index: usize) -> Checked {
        let Some(own) = self.senders.get_mut(index) else { return Ok(()) };
        for name in std::mem::take(&mut own.end.fabric.written) {
            let Some(write) = own.end.fabric.writes.get(&name) else { continue };
            let of = (own.instance, write.fence.request);
            // The suite looks where it has one receiver.
            let [receiver] = &mut self.receivers[..] else { return Ok(()) };
            if self.rows_change {
                continue;
            }
            for (page, _, run) in &write.runs {
                if landed(&mut receiver.end.fabric, write, *page, run)? != rows(of, run) {
                    return Err(format!("write {} has ended and layer {} has not landed", name.1, run.layer));
                }
            }
        }
        Ok(())
    }

    /// Polls, and lets time pass until something holds.
    pub fn until(&mut self, what: &str, holds: impl Fn(&Rig<'s, S>) -> bool) -> Checked {
        let end = self.now + LIMIT;
        loop {
            self.poll()?;
            if holds(self) {
                return Ok(());
            }
            if self.now > end {
                return Err(format!("{what} did not come within {LIMIT:?}"));
            }
            self.now = self.subject.wait();
        }
    }

    /// Lets what is on its way arrive.
    pub fn settle(&mut self) -> Checked {
        let end = self.now + Duration::from_millis(60);
        while self.now < end {
            self.poll()?;
            self.now = self.subject.wait();
        }
        self.poll()
    }

    /// Puts the rows of one layer of a request where an origin says.
    pub fn put(
        &mut self,
        sender: usize,
        (request, origin): (u64, u64),
        (layer, tokens): (u32, std::ops::Range<u32>),
        spoiled: bool,
    ) -> Checked {
        let Some(own) = self.senders.get_mut(sender) else { return Ok(()) };
        let (of, subject) = ((own.instance, request), &mut *self.subject);
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

    /// A receiver wants a request of a sender. Landing pages are taken if they are needed.
    pub fn grant(
        &mut self,
        (receiver, sender): (usize, usize),
        request: u64,
        (tokens, first): (u32, u32),
    ) -> Checked<Fence> {
        let far = self.is_far();
        let instance = self.senders.get(sender).map_or(0, |of| of.instance);
        let missing = || "no such receiver".to_owned();
        let own = self.receivers.get_mut(receiver).ok_or_else(missing)?;
        own.generation += 1;
        let fence = Fence { request, generation: own.generation };
        let pages = if far { tokens.div_ceil(6) as usize } else { 0 };
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
        own.end.machine.grant(&wanted).map_err(told)?;
        Ok(fence)
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

/// What is on a landing page.
pub(super) fn landed<F: ReceiverFabric>(
    fabric: &mut F,
    write: &Write,
    page: u32,
    run: &Run,
) -> Checked<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(run.total()).unwrap_or(0)];
    let at = Where::Landing(page);
    fabric.fetch(write.link, write.fence, at, run, &mut bytes).map_err(told)?;
    Ok(bytes)
}
