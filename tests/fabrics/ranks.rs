//! Small engines on both sides. A sender's rank computes layers into a staging ring that has room for one request. A
//! receiver's rank stores every request in the same pages. So each request needs the memory of the one before it. A
//! row's bytes say its request, layer and token.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use forebay::os::{NoFaults, Request as Memory};
use forebay::transfer::fabric::{ReceiverFabric, SenderFabric};
use forebay::transfer::memory::{Plane, Planes, SendMemory};
use forebay::transfer::receiver::{Wanted, Where};
use forebay::transfer::sender::{self, Computed};
use forebay::transfer::{
    Component, Fence, Frame, LayerPlaces, Of, Part, Place, Plan, Polled, Rank, Reason, Receiver,
    ReceivingEnd, Request, Run, Sender, SendingEnd, Side, Split, Stage, StagingRing, Store, receiver,
};
use forebay::{Error, Result};

pub const LAYERS: u32 = 4;
pub const TOKENS: u32 = 24;
const PAGE: u32 = 4;
const ROW: usize = 64;
const PAGE_BYTES: u64 = PAGE as u64 * ROW as u64;
/// Bytes of a layer's rows.
const PART: u64 = TOKENS as u64 * ROW as u64;

/// Each layer has a plane of its own, so that a part of the ring can have any layer's rows.
fn side() -> Side {
    let (name, dtype, row) = ("latent".to_owned(), "bf16".to_owned(), ROW as u64);
    let place = |plane| Place { component: 0, plane, offset: 0, token_stride: row, head_stride: row };
    let layers = (0..LAYERS).map(|layer| LayerPlaces { layer, places: vec![place(layer)] });
    Side {
        components: vec![Component { name, dtype, heads: 1, head_bytes: row }],
        stages: vec![Stage { layers: layers.collect(), page_bytes: vec![PAGE_BYTES; LAYERS as usize] }],
        width: 1,
        split: Split::Heads,
        replicas: 1,
        page_tokens: PAGE,
    }
}

fn row(request: u64, layer: u32, token: u32) -> [u8; ROW] {
    let name = request << 24 | u64::from(layer) << 16 | u64::from(token);
    let mut bytes = [0; ROW];
    for (word, into) in (1..).zip(bytes.as_chunks_mut().0) {
        *into = (name << 8 | word).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    }
    bytes
}

/// The rows of some tokens.
pub fn rows(request: u64, layer: u32, tokens: Range<u32>) -> Vec<u8> {
    tokens.flat_map(|token| row(request, layer, token)).collect()
}

/// Memory for one request's rows.
pub fn memory() -> Arc<SendMemory> {
    let bytes = PART * u64::from(LAYERS);
    let request = Memory { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    let planes = Planes(vec![Plane { offset: 0, page_bytes: PAGE_BYTES }; LAYERS as usize]);
    Arc::new(SendMemory::new(&request, planes, &NoFaults).unwrap().0)
}

/// Visits the runs that a frame tells, if it is a notice.
pub fn told(frame: &[u8], mut visit: impl FnMut(Fence, Where, &Run)) {
    let Ok(Frame::Notice(notice)) = Frame::decode(frame) else { return };
    let plan = Plan::new(&side(), &side()).unwrap();
    let mut nth = 0;
    for part in notice.parts() {
        let (request, mut own) = (Request { tokens: part.tokens.end, replicas: [0, 0], chunks: &[] }, 0);
        let visited = plan.runs(&request, (part.layer, part.tokens.clone()), Of::All, |run| {
            let told = part.digests.are_all() || part.digests.iter().any(|(index, _)| index == own);
            own += 1;
            if told {
                visit(part.fence, Where::Origin { origin: part.origin, nth }, &run);
                nth += 1;
            }
            Ok(())
        });
        visited.unwrap();
    }
}

/// A sender's rank.
pub struct Sends<F> {
    pub end: SendingEnd<F>,
    memory: Arc<SendMemory>,
    ring: StagingRing,
    parts: BTreeMap<u64, Part>,
    /// The request whose layers are computed, and the next layer.
    pub computes: Option<(u64, u32)>,
    pub granted: Vec<u64>,
    pub ended: Vec<(u64, Reason)>,
    pub connected: u32,
    pub lost: u32,
}

impl<F: SenderFabric> Sends<F> {
    /// Each layer is told when it is computed, as of long prompts.
    pub fn new(fabric: F, memory: Arc<SendMemory>, instance: u64, options: sender::Options) -> Sends<F> {
        let rank = Rank { instance, replica: 0, stage: 0, lane: 0 };
        let options = sender::Options { bulk_tokens: 0, ..options };
        Sends {
            end: SendingEnd::new(Sender::new(side(), rank, options).unwrap(), fabric),
            memory,
            ring: StagingRing::new(PART * u64::from(LAYERS), ROW as u64).unwrap(),
            parts: BTreeMap::new(),
            computes: None,
            granted: Vec::new(),
            ended: Vec::new(),
            connected: 0,
            lost: 0,
        }
    }

    pub fn begin(&mut self, request: u64) {
        self.end.machine.begin(request, TOKENS, None).unwrap();
        self.computes = Some((request, 0));
    }

    /// Computes the next layer, if there is one and the ring has room for it.
    pub fn compute(&mut self) -> bool {
        let Some((request, layer)) = self.computes else { return false };
        let Ok(part) = self.ring.take(PART) else { return false };
        self.memory.map().copy_in(part.offset, &rows(request, layer, 0..TOKENS)).unwrap();
        assert_eq!(self.parts.insert(part.offset, part), None);
        let of = Computed { request, layer, tokens: 0..TOKENS, chunk: None, origin: part.offset };
        self.end.machine.computed(&[of]).unwrap();
        self.computes = (layer + 1 < LAYERS).then_some((request, layer + 1));
        if self.computes.is_none() {
            self.end.machine.finish(request).unwrap();
        }
        true
    }

    pub fn poll(&mut self, now: Duration) {
        while let Some(polled) = self.end.poll(now).unwrap() {
            match polled {
                Polled::Event(sender::Event::Granted { request, .. }) => self.granted.push(request),
                Polled::Event(sender::Event::Released { origin, .. }) => {
                    let part = self.parts.remove(&origin).unwrap();
                    self.ring.give_back(part).unwrap();
                }
                Polled::Event(sender::Event::Ended { request, reason }) => {
                    self.computes = self.computes.filter(|(of, _)| *of != request);
                    self.ended.push((request, reason));
                }
                Polled::Connected { .. } => self.connected += 1,
                Polled::Lost { .. } => self.lost += 1,
                Polled::More | Polled::Event(sender::Event::Met { .. }) => {}
            }
        }
    }

    /// Bytes of the ring that rows are held in.
    pub const fn held(&self) -> u64 {
        self.ring.used()
    }

    /// Why a request ended, if it has.
    pub fn reason(&self, request: u64) -> Option<Reason> {
        self.ended.iter().find(|(of, _)| *of == request).map(|(_, reason)| *reason)
    }
}

/// A receiver's pages for one request.
#[derive(Debug, PartialEq)]
pub struct Pages(Vec<u8>);

impl Default for Pages {
    fn default() -> Pages {
        Pages(vec![0; (PART * u64::from(LAYERS)) as usize])
    }
}

impl Store for Pages {
    fn store(&mut self, _: Fence, run: &Run, bytes: &[u8]) -> Result<()> {
        let first = u64::from(run.to.plane) * PART + u64::from(run.to.page) * PAGE_BYTES + run.to.offset;
        for (piece, bytes) in (0..).zip(bytes.chunks_exact(run.bytes as usize)) {
            let at = (first + piece * run.to.stride) as usize;
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }
}

impl Pages {
    /// How many rows are not those of a request.
    pub fn wrong(&self, request: u64) -> usize {
        let rows = (0..LAYERS).flat_map(|layer| (0..TOKENS).map(move |token| row(request, layer, token)));
        self.0.chunks_exact(ROW).zip(rows).filter(|(own, row)| own != row).count()
    }
}

/// A receiver's rank.
pub struct Receives<F> {
    pub end: ReceivingEnd<F>,
    pub pages: Pages,
    generation: u64,
    /// The requests that are whole, and how many of their rows were wrong when that was said.
    pub whole: Vec<(u64, usize)>,
    pub failed: Vec<(u64, Error)>,
    pub drained: Vec<u64>,
    pub connected: u32,
    pub lost: u32,
}

impl<F: ReceiverFabric> Receives<F> {
    pub fn new(fabric: F, options: receiver::Options) -> Receives<F> {
        let rank = Rank { instance: 2, replica: 0, stage: 0, lane: 0 };
        Receives {
            end: ReceivingEnd::new(Receiver::new(side(), rank, options).unwrap(), fabric),
            pages: Pages::default(),
            generation: 0,
            whole: Vec::new(),
            failed: Vec::new(),
            drained: Vec::new(),
            connected: 0,
            lost: 0,
        }
    }

    /// Wants a request of an instance.
    pub fn grant(&mut self, request: u64, instance: u64, deadline: Option<Duration>) -> Result<Fence> {
        let fence = Fence { request, generation: self.generation };
        let (tokens, first, sender, payloads, landing) = (TOKENS, 0, (instance, 0), &[][..], &[][..]);
        let wanted = Wanted { fence, tokens, first, sender, payloads, landing, deadline };
        self.end.machine.grant(&wanted)?;
        self.generation += 1;
        Ok(fence)
    }

    pub fn poll(&mut self, now: Duration) {
        while let Some(polled) = self.end.poll(now, &mut self.pages).unwrap() {
            match polled {
                Polled::Event(receiver::Event::Whole { fence }) => {
                    self.whole.push((fence.request, self.pages.wrong(fence.request)));
                }
                Polled::Event(receiver::Event::Failed { fence, error }) => {
                    self.failed.push((fence.request, error));
                }
                Polled::Event(receiver::Event::Drained { fence }) => self.drained.push(fence.request),
                Polled::Connected { .. } => self.connected += 1,
                Polled::Lost { .. } => self.lost += 1,
                _ => {}
            }
        }
    }

    pub fn is_whole(&self, request: u64) -> bool {
        self.whole.iter().any(|(of, _)| *of == request)
    }

    pub fn has_failed(&self, request: u64) -> bool {
        self.failed.iter().any(|(of, _)| *of == request)
    }
}
