//! The ring: pulls that run while other layers compute, each as soon as its buffer is free.
//!
//! Layers use a buffer in turn. When the use of one of them ends, the pull of the buffer's next layer begins, on a
//! stream of the buffer's own. With two buffers, layer i+2 is on its way while layer i+1 is in use (FlowMLA). No rank
//! waits for another, and no processor of a GPU takes part: a pull is copies by copy engines, ordered by events.
//!
//! ```text
//! compute  | layer 0: attention, output | experts | layer 1: attention, output | experts | layer 2 ...
//! buffer 0 |                            | pull 2 ------------------------------ |
//! buffer 1 | pull 1, of the step before | . . . . . . . . . . . . . . . . . . . | pull 3 ---------
//! ```
//!
//! **A use ends behind the output projection**, not behind the experts, so a pull has the experts of one layer and the
//! whole of the next to hide behind. The hooks of [`crate::overlap::Engine`] are at these places: an engine's `enter`,
//! `leave` and `end` call the ring's. An engine that orders its layers itself calls them in the same way. All work
//! that reads a window is on the micro-batch's compute stream, whatever the order of overlap.
//!
//! **Edges.** Into a pull: the release of the buffer by each micro-batch of the step. Out of a pull: its arrival, for
//! which each micro-batch waits when it enters the layer. That is all, and none can be left out.
//!
//! **Draft layers** run once for each draft pass. A use whose buffer's next use is of the same layer releases nothing:
//! the layer stays where it is, and its uses count as one.
//!
//! **The border.** Between steps each buffer holds the layer that uses it first, or has its pull enqueued. A step's
//! last use of a buffer begins that pull. [`Ring::begin`] enqueues what is missing: at the start, after a step that
//! was abandoned, after a layer was made sharded again, and after a commit of new weights, also of one that was
//! aborted. So the pulls of the first layers come before everything else.
//!
//! **Captured steps.** The hooks notice that a stream is being captured. Arrivals from before the capture are not
//! waited for inside it: [`Ring::launch`] orders the launch after them. The pulls of all layers are nodes of the
//! graph, also of those that are resident at present, so a layer can become resident or sharded between two launches.
//! How the graph ends is [`Wrap`]. A graph and single calls can take turns.
//!
//! **L2.** With [`RingOptions::prefetch`] the beginning of the next layer's window is brought into the device's L2
//! when a layer is left, on a stream of its own, behind the arrival; `ahead` says which edges that needs.
//!
//! **Bounds and pace.** A buffer's stream has one pull, so no more copies run at once than there are buffers.
//! [`RingOptions::parts`] cuts pulls into parts that begin at later points of the compute stream, for engines whose
//! collectives need the link in between.
//!
//! **Errors** of a call that should not have been made name the layer, if it has one, and this process's rank; that of
//! a rank that ended names the layer and that rank. They change nothing that was enqueued: the step is abandoned as any
//! other, and then [`Ring::abandon`] brings the ring back to the border.
//!
//! **Costs.** A layer costs one record and one wait a micro-batch, one record and its copies; the ring allocates
//! nothing after its construction and waits for nothing, except in the calls that say so.
//!
//! **What it does not do.** It does not decide which layers are sharded, sees no other process ([`Ring::lost`] tells
//! it of one that died), and orders nothing that reads a window on another stream than the one passed to
//! [`Ring::enter`]. A step is captured whole or not at all. Windows have one ring: what others pull into its buffers
//! it does not know.

mod ahead;
mod budget;
mod launch;
mod options;
mod pull;
mod rejoin;
mod replicas;
mod resident;
mod touch;
mod update;

pub use options::{Prefetch, RingOptions, Wrap};
pub use pull::Pull;

use super::window::{Windows, refused};
use crate::device::{Device, Event, Stream};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;
use ahead::Ahead;

const OPERATION: &str = "ring of weights";

/// A pull, as far as it is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pulling {
    layer: usize,
    /// Copies that are enqueued, and all.
    enqueued: usize,
    copies: usize,
    /// Whether its arrival is recorded, and whether that is in the capture.
    arrived: bool,
    captured: bool,
}

/// A buffer: its stream and events.
#[derive(Debug)]
struct Buffer {
    stream: Stream,
    /// After a pull, outside of captures and inside.
    arrived: Event,
    captured: Event,
    /// After a use, by micro-batch.
    released: Vec<Event>,
    /// Before a later part of a pull.
    paced: Event,
    /// What it holds, or is being filled with. None if nothing that is known.
    holds: Option<Pulling>,
}

/// Where a micro-batch is in its step.
#[derive(Clone, Copy, Debug, Default)]
struct Reader {
    /// The use that it enters next, or is in.
    next: usize,
    inside: bool,
    /// Its compute stream, once it has entered a layer.
    stream: Option<Stream>,
}

/// A step that has begun.
#[derive(Clone, Copy, Debug)]
struct Open {
    micro_batches: usize,
    /// Uses of sharded layers.
    uses: usize,
    /// Whether it is being captured; unknown before the first use.
    captured: Option<bool>,
}

/// Pulls sharded layers while other layers compute, each as soon as its buffer is free.
///
/// A step is [`Ring::begin`], then [`Ring::enter`] and [`Ring::leave`] around the work of each sharded layer that
/// reads its window, for each micro-batch in turn, then [`Ring::end`]. The use of a layer ends behind its output
/// projection. After an error, [`Ring::abandon`] brings the ring back to the border between two steps, where each
/// buffer holds the layer that uses it first or has its pull enqueued.
///
/// A step whose first `enter` is on a stream that is being captured is captured as a whole: its pulls are nodes of the
/// graph, also those of layers that are resident at present. [`Ring::launch`] orders each launch. Windows have one
/// ring: what others pull into its buffers it does not know.
#[derive(Debug)]
pub struct Ring<P: Pull = Windows> {
    device: Arc<dyn Device>,
    pulls: P,
    options: RingOptions,
    buffers: Vec<Buffer>,
    /// By layer of the model: its buffer.
    places: Vec<Option<usize>>,
    /// The sharded layers that run once in a step, and those that run in each draft pass.
    once: Vec<usize>,
    drafts: Vec<usize>,
    readers: Vec<Reader>,
    open: Option<Open>,
    /// Ranks that ended.
    lost: Vec<u32>,
    /// What brings windows into L2, if anything does.
    ahead: Option<Ahead>,
}

impl<P: Pull> Ring<P> {
    /// A ring over `pulls`, with a stream for each buffer. Nothing is pulled yet.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for options that no step can have; [`Kind::Exhausted`] for streams and events.
    pub fn new(device: &Arc<dyn Device>, pulls: P, options: RingOptions) -> Result<Ring<P>> {
        let layers = pulls.layers();
        let wrong = || Error::new(Kind::InvalidConfig, OPERATION).at("options").with("rank", pulls.rank());
        if options.micro_batches == 0 || options.parts == 0 || options.draft_layers > layers {
            return Err(wrong()
                .with("micro-batches", options.micro_batches as u64)
                .with("parts", options.parts as u64)
                .with("draft layers", options.draft_layers as u64)
                .hint("pass at least one micro-batch and part, and draft layers of the model"));
        }
        if let Some(Prefetch { bytes, rate }) = options.prefetch.filter(|it| it.bytes == 0 || it.rate == 0) {
            return Err(wrong()
                .with("prefetched bytes", bytes)
                .with("their rate", rate)
                .hint("pass a prefetch with bytes and a rate"));
        }
        let places: Vec<Option<usize>> = (0..layers).map(|layer| pulls.buffer(layer)).collect();
        let sharded = |layer: &usize| places.get(*layer).is_some_and(Option::is_some);
        let first_draft = layers - options.draft_layers;
        let once = (0..first_draft).filter(sharded).collect();
        let drafts = (first_draft..layers).filter(sharded).collect();
        let count = places.iter().flatten().max().map_or(0, |most| most + 1);
        let buffer = |_| {
            let released = (0..options.micro_batches).map(|_| device.event()).collect::<Result<Vec<_>>>()?;
            Ok(Buffer {
                stream: device.stream()?,
                arrived: device.event()?,
                captured: device.event()?,
                released,
                paced: device.event()?,
                holds: None,
            })
        };
        Ok(Ring {
            device: Arc::clone(device),
            pulls,
            options,
            buffers: (0..count).map(buffer).collect::<Result<Vec<_>>>()?,
            places,
            once,
            drafts,
            readers: vec![Reader::default(); options.micro_batches],
            open: None,
            lost: Vec::new(),
            ahead: options.prefetch.map(|what| Ahead::new(&**device, what, count)).transpose()?,
        })
    }

    /// The error of a call that this process should not have made.
    fn wrong(&self, kind: Kind, what: &'static str) -> Error {
        Error::new(kind, OPERATION).at(what).with("rank", self.pulls.rank())
    }

    /// The same, with the layer.
    fn misused(&self, kind: Kind, layer: usize, what: &'static str) -> Error {
        refused(kind, layer, what).with("rank", self.pulls.rank())
    }

    /// What it pulls.
    pub const fn pulls(&self) -> &P {
        &self.pulls
    }

    /// The stream of a buffer's pulls, for an engine that orders or times its own work against them.
    pub fn stream(&self, buffer: usize) -> Option<Stream> {
        self.buffers.get(buffer).map(|buffer| buffer.stream)
    }

    /// The layer of a use of a step.
    fn used(&self, at: usize) -> Option<usize> {
        let once = self.once.len();
        match at.checked_sub(once) {
            None => self.once.get(at).copied(),
            Some(at) => self.drafts.get(at.checked_rem(self.drafts.len())?).copied(),
        }
    }

    fn place(&self, layer: usize) -> Option<usize> {
        self.places.get(layer).copied().flatten()
    }

    /// The layer that uses a buffer first in a step; a draft layer if no other does.
    fn first(&self, buffer: usize) -> Option<usize> {
        let mut layers = self.once.iter().chain(&self.drafts).copied();
        layers.find(|layer| self.place(*layer) == Some(buffer))
    }

    /// The next use of a buffer behind use `at` of a step, as its layer; and whether that is the next step's.
    fn following(&self, buffer: usize, at: usize, uses: usize) -> Option<(usize, bool)> {
        // Each layer that is used again is so within one round of all layers.
        let round = (at + 1..uses).take(self.once.len() + self.drafts.len());
        let later = round.filter_map(|at| self.used(at)).find(|layer| self.place(*layer) == Some(buffer));
        later.map(|layer| (layer, false)).or_else(|| self.first(buffer).map(|layer| (layer, true)))
    }

    /// Begins a step of so many micro-batches and draft passes, and enqueues the pulls of the first layers that are
    /// missing. Call it before the first layer, and before a capture begins.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a step is open: two schedules use this ring; [`Kind::OutOfRange`] for more micro-batches
    /// than the ring has; [`Kind::PeerLost`] with layer and rank; the error of a layer that cannot be used; those of
    /// [`Windows::pull`].
    pub fn begin(&mut self, micro_batches: usize, draft_passes: usize) -> Result<()> {
        if self.open.is_some() {
            return Err(self
                .wrong(Kind::Busy, "a step is open")
                .hint("end or abandon it; one schedule at a time uses a ring"));
        }
        if micro_batches == 0 || micro_batches > self.options.micro_batches {
            return Err(self
                .wrong(Kind::OutOfRange, "micro-batches of a step")
                .with("micro-batches", micro_batches as u64)
                .with("most", self.options.micro_batches as u64));
        }
        self.usable(draft_passes > 0)?;
        for buffer in 0..self.buffers.len() {
            self.settle(buffer)?;
        }
        let uses = self.once.len() + self.drafts.len().saturating_mul(draft_passes);
        self.open = Some(Open { micro_batches, uses, captured: None });
        self.readers.fill(Reader::default());
        Ok(())
    }

    /// Checks that it is known what the addresses of a step's layers show, also of those that no step pulls or enters.
    fn usable(&self, drafts: bool) -> Result<()> {
        let without = if drafts { 0 } else { self.options.draft_layers };
        (0..self.places.len().saturating_sub(without)).try_for_each(|layer| self.pulls.usable(layer))
    }

    /// Makes a buffer hold its first layer, or have its pull enqueued whole.
    fn settle(&mut self, buffer: usize) -> Result<()> {
        let Some(first) = self.first(buffer) else { return Ok(()) };
        let holds = self.buffers.get(buffer).and_then(|buffer| buffer.holds);
        if holds.is_none_or(|holds| holds.layer != first) {
            self.turn_to(buffer, first, false)?;
        }
        self.complete(buffer)
    }

    /// Checks that the layer needs no rank that ended. A graph pulls a layer that was made resident all the same, into
    /// the layer's own memory: the same bytes again, because nothing writes the memory of a process that ended.
    fn alive(&self, layer: usize) -> Result<()> {
        match self.lost.iter().find(|rank| self.pulls.reads(layer, **rank)) {
            None => Ok(()),
            Some(_) if self.pulls.is_whole(layer) => Ok(()),
            Some(rank) => Err(refused(Kind::PeerLost, layer, "it is pulled from a rank that ended")
                .with("rank", *rank)
                .hint("make the layer resident")),
        }
    }

    /// Begins the pull of a layer into a buffer that is free. Nothing is enqueued yet.
    fn turn_to(&mut self, buffer: usize, layer: usize, captured: bool) -> Result<()> {
        self.forget(buffer);
        // A graph has the copies of a layer that is resident too: it may be sharded when the graph is launched.
        let copies = if !captured && self.pulls.is_whole(layer) { 0 } else { self.pulls.copies(layer)? };
        self.alive(layer)?;
        if let Some(buffer) = self.buffers.get_mut(buffer) {
            buffer.holds = Some(Pulling { layer, enqueued: 0, copies, arrived: false, captured });
        }
        Ok(())
    }

    /// Notes that nothing is known of a buffer's content.
    fn forget(&mut self, buffer: usize) {
        if let Some(buffer) = self.buffers.get_mut(buffer) {
            buffer.holds = None;
        }
    }

    /// Enqueues the copies of a buffer's pull up to `until`, and its arrival behind the last one.
    fn proceed(&mut self, buffer: usize, until: usize) -> Result<()> {
        if let Some(pulling) = self.buffers.get(buffer).and_then(|buffer| buffer.holds)
            && pulling.enqueued < pulling.copies
        {
            // The rank may have ended since the pull began.
            self.alive(pulling.layer)?;
            if let (0, Some(ahead), Some(own)) = (pulling.enqueued, &self.ahead, self.stream(buffer)) {
                ahead.before(&*self.device, buffer, pulling.captured, own)?;
            }
        }
        let Ring { device, pulls, buffers, .. } = self;
        let Some(Buffer { stream, arrived, captured, holds: Some(pulling), .. }) = buffers.get_mut(buffer)
        else {
            return Ok(());
        };
        let until = until.min(pulling.copies);
        if pulling.enqueued < until {
            pulls.pull_some(pulling.layer, *stream, pulling.enqueued..until)?;
            pulling.enqueued = until;
        }
        if pulling.enqueued == pulling.copies && !pulling.arrived {
            device.record(if pulling.captured { *captured } else { *arrived }, *stream)?;
            pulling.arrived = true;
        }
        Ok(())
    }

    fn complete(&mut self, buffer: usize) -> Result<()> {
        self.proceed(buffer, usize::MAX)
    }

    /// Enqueues a further part of each pull that is cut into parts, behind the work that `stream` has now. For an
    /// engine that lets pulls go on behind a collective; [`Ring::enter`] and [`Ring::leave`] do it too.
    ///
    /// # Errors
    /// Those of [`Windows::pull_some`]; [`Kind::OutOfRange`] for a stream of another device.
    pub fn advance(&mut self, stream: Stream) -> Result<()> {
        for at in 0..self.buffers.len() {
            let Some(Buffer { stream: own, paced, holds: Some(pulling), .. }) = self.buffers.get(at) else {
                continue;
            };
            if pulling.enqueued < pulling.copies {
                let until = pulling.enqueued + pulling.copies.div_ceil(self.options.parts);
                self.device.edge(*paced, stream, *own)?;
                self.proceed(at, until)?;
            }
        }
        Ok(())
    }

    /// Where a micro-batch is, for a use of `layer` on `stream`; none if the layer is never pulled.
    fn reader(
        &self,
        layer: usize,
        micro_batch: usize,
        stream: Stream,
    ) -> Result<Option<(Open, Reader, usize)>> {
        if layer >= self.places.len() {
            let error = self.misused(Kind::OutOfRange, layer, "no layer of the model");
            return Err(error.with("layers", self.places.len() as u64));
        }
        let Some(open) = self.open else {
            return Err(self
                .misused(Kind::InvalidState, layer, "no step has begun")
                .hint("call `begin` first"));
        };
        let Some(reader) = self.readers.get(..open.micro_batches).and_then(|all| all.get(micro_batch)) else {
            return Err(self
                .misused(Kind::OutOfRange, layer, "a micro-batch that the step does not have")
                .with("micro-batch", micro_batch as u64)
                .with("micro-batches", open.micro_batches as u64));
        };
        if let Some(own) = reader.stream.filter(|own| *own != stream) {
            return Err(self
                .misused(Kind::InvalidState, layer, "the ring is used by two schedules")
                .with("stream", stream.0)
                .with("the step's", own.0)
                .hint("use one compute stream for a micro-batch, and one schedule at a time"));
        }
        Ok(self.place(layer).map(|buffer| (open, *reader, buffer)))
    }

    /// The error for a layer that is not the next one of a micro-batch.
    fn out_of_order(&self, layer: usize, reader: Reader, what: &'static str) -> Error {
        let error = self.misused(Kind::InvalidState, layer, what);
        match self.used(reader.next) {
            Some(expected) => error.with("expected", expected as u64),
            None => error,
        }
        .hint("use the sharded layers in their order, each once, then the draft layers in each draft pass")
    }

    /// A micro-batch's use of a layer begins: the work that is enqueued on `stream` from here on finds the layer
    /// whole. Nothing happens for a layer that is not sharded.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a layer out of order, for one whose buffer another micro-batch has not left, without
    /// [`Ring::begin`], and for a micro-batch on two streams; [`Kind::OutOfRange`] for a layer or micro-batch that
    /// there is not; those of [`Windows::pull_some`].
    pub fn enter(&mut self, layer: usize, micro_batch: usize, stream: Stream) -> Result<()> {
        let Some((mut open, reader, buffer)) = self.reader(layer, micro_batch, stream)? else {
            return Ok(());
        };
        if reader.inside {
            return Err(self.out_of_order(layer, reader, "entered before the last layer was left"));
        }
        if reader.next >= open.uses || self.used(reader.next) != Some(layer) {
            return Err(self.out_of_order(layer, reader, "entered out of order"));
        }
        let capturing = match open.captured {
            Some(captured) => captured,
            None => self.device.is_capturing(stream)?,
        };
        open.captured = Some(capturing);
        self.open = Some(open);
        let holds = self.buffers.get(buffer).and_then(|buffer| buffer.holds);
        if holds.is_none_or(|holds| holds.layer != layer) {
            return Err(self
                .misused(Kind::InvalidState, layer, "its pull has not begun")
                .hint("let the micro-batches take turns in each layer; abandon a step after an error"));
        }
        self.advance(stream)?;
        self.complete(buffer)?;
        self.await_arrival(buffer, capturing, stream)?;
        if let Some(reader) = self.readers.get_mut(micro_batch) {
            *reader = Reader { inside: true, stream: Some(stream), ..*reader };
        }
        Ok(())
    }

    /// Makes `stream` wait for what a buffer holds.
    fn await_arrival(&self, buffer: usize, capturing: bool, stream: Stream) -> Result<()> {
        let arrival = self.buffers.get(buffer).and_then(|buffer| Some((buffer, buffer.holds?)));
        let Some((Buffer { arrived, captured, .. }, Pulling { captured: inside, .. })) = arrival else {
            return Ok(());
        };
        match (capturing, inside) {
            (true, true) => self.device.wait(stream, *captured),
            // The launch waits for what was pulled before the capture.
            (true, false) => Ok(()),
            (false, _) => self.device.wait(stream, *arrived),
        }
    }

    /// A micro-batch's use of a layer ends with the work that is enqueued on `stream` now. When the last micro-batch
    /// has left it, the pull of the buffer's next layer begins.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a layer that was not entered; [`Kind::PeerLost`] with the next layer and the rank;
    /// those of [`Ring::enter`].
    pub fn leave(&mut self, layer: usize, micro_batch: usize, stream: Stream) -> Result<()> {
        let Some((open, reader, buffer)) = self.reader(layer, micro_batch, stream)? else { return Ok(()) };
        if !reader.inside || self.used(reader.next) != Some(layer) {
            return Err(self.out_of_order(layer, reader, "left without having been entered"));
        }
        let at = reader.next;
        let released = self.buffers.get(buffer).and_then(|own| own.released.get(micro_batch)).copied();
        if let Some(released) = released {
            self.device.record(released, stream)?;
        }
        if let Some(reader) = self.readers.get_mut(micro_batch) {
            *reader = Reader { next: at + 1, inside: false, ..*reader };
        }
        self.advance(stream)?;
        let all = self.readers.iter().take(open.micro_batches).all(|reader| reader.next > at);
        let Some(released) = released.filter(|_| all) else { return Ok(()) };
        let captured = open.captured.unwrap_or(false);
        if let Some((next, wraps)) = self.following(buffer, at, open.uses)
            && next != layer
            && !(wraps && captured && self.options.wrap == Wrap::Behind)
        {
            self.pull_behind(buffer, next, open.micro_batches, captured)?;
        }
        self.touch_next(at, released, open)
    }

    /// Begins the pull of a layer behind the releases of a buffer.
    fn pull_behind(&mut self, buffer: usize, next: usize, readers: usize, captured: bool) -> Result<()> {
        self.turn_to(buffer, next, captured)?;
        if let Some(Buffer { stream, released, .. }) = self.buffers.get(buffer) {
            released.iter().take(readers).try_for_each(|event| self.device.wait(*stream, *event))?;
        }
        let copies = self.buffers.get(buffer).and_then(|buffer| buffer.holds).map_or(0, |it| it.copies);
        self.proceed(buffer, copies.div_ceil(self.options.parts))
    }

    /// Ends a step whose layers are all enqueued. In a capture, the buffers' streams are joined to `stream`, on which
    /// the capture began, and the ring is as it was before: nothing has run.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] without a step, or with a layer that a micro-batch has not left; those of
    /// [`Device::edge`].
    pub fn end(&mut self, stream: Stream) -> Result<()> {
        let Some(open) = self.open else {
            return Err(self.wrong(Kind::InvalidState, "no step has begun").hint("call `begin` first"));
        };
        let mut readers = self.readers.iter().take(open.micro_batches).zip(0_u64..);
        if let Some((reader, micro_batch)) = readers.find(|(it, _)| it.inside || it.next < open.uses) {
            let layer = self.used(reader.next).unwrap_or_default();
            return Err(self
                .misused(Kind::InvalidState, layer, "not used in a step that ends")
                .with("micro-batch", micro_batch)
                .hint("enter and leave every sharded layer, or abandon the step"));
        }
        if open.captured == Some(true) {
            for at in 0..self.buffers.len() {
                self.complete(at)?;
                let Some(Buffer { stream: own, captured, holds, .. }) = self.buffers.get(at) else {
                    continue;
                };
                if holds.is_some_and(|holds| holds.captured) {
                    self.device.edge(*captured, *own, stream)?;
                }
            }
            self.ahead.as_ref().map_or(Ok(()), |ahead| ahead.join(&*self.device, stream))?;
            self.restore();
        }
        self.open = None;
        Ok(())
    }

    /// Abandons an open step, as after an error. The next [`Ring::begin`] pulls the first layers that are gone, behind
    /// all work that the step's micro-batches have enqueued. In a capture nothing has run and nothing is enqueued: the
    /// caller discards the capture. Without an open step nothing happens.
    ///
    /// # Errors
    /// Those of [`Device::record`] and [`Device::wait`]; the step is closed all the same.
    pub fn abandon(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        if open.captured == Some(true) {
            self.restore();
            return Ok(());
        }
        let mut result = Ok(());
        for at in 0..self.buffers.len() {
            let first = self.first(at);
            let Some(Buffer { stream: own, released, holds, .. }) = self.buffers.get_mut(at) else {
                continue;
            };
            *holds = holds.filter(|holds| Some(holds.layer) == first);
            // Whatever is pulled next comes after what the step has enqueued.
            for (reader, event) in self.readers.iter().zip(&*released) {
                let Some(stream) = reader.stream else { continue };
                result = result.and(self.device.edge(*event, stream, *own));
            }
        }
        result
    }

    /// Notes that a rank has ended: no pull of a layer that is not resident reads its memory from now on, although it
    /// could, until the rank has come back ([`Ring::reattach`]). [`Ring::make_resident`] does, and so does a graph that
    /// was captured before, for layers that were made resident: the memory stays mapped, and nothing writes it any
    /// more.
    pub fn lost(&mut self, rank: u32) {
        if !self.lost.contains(&rank) {
            self.lost.push(rank);
        }
    }
}
