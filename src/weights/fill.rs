//! Filling the windows: from an engine's buffers, and the digests of what was filled.
//!
//! The engine has each tensor whole, as it wants to use it, in memory that the device reaches. A rank copies the part
//! that it owns and the engine may free the rest. So a rank needs one whole tensor at a time beside its windows.
//!
//! **Digests** are BLAKE3 over the bytes of the tensors that a rank filled, in the order of the layer, without the gaps
//! between them. Each layer has one, and the *content* is the digest of all. Ranks tell them to each other
//! ([`Windows::hello`], [`Windows::share`]), and [`Windows::verify`] reads what the others gave and compares. Of a
//! layer that the plan keeps resident every rank fills the whole, so all say the same, or one is refused. Where weights
//! come from the host, no rank reads another's, and nothing is compared.
//!
//! **A new version** beside the windows ([`super::update`]) is filled and hashed by the same code: it is the other
//! thing that [`Fills`]. So is what a change of replicas ([`super::replicas`]) only [`Reads`].
//!
//! **Costs.** A digest reads what a rank filled once over the host, through 4 MiB of pinned memory: seconds for a
//! model, at its start.

use std::ops::Range;

use super::layer::Placed;
use super::plan::{LayerPlan, Place, Plan};
use super::window::{Stored, Windows, find, refused};
use crate::device::{Device, Slice, Stream};
use crate::error::{Kind, Result};
use crate::fallible;
use crate::os::Map;
use crate::peer::{Digest, Hello};
use crate::sync::Arc;
use crate::text::echo;

/// What the content digest is of; its number rises when that changes.
const CONTENT_TAG: &[u8] = b"forebay weights content 1\0";

/// The bytes of a tensor that lie in a stretch of its window, by their places in the window.
pub(super) fn within(tensor: &Placed, stretch: &Range<u64>) -> Option<Range<u64>> {
    let (start, end) = (tensor.offset.max(stretch.start), (tensor.offset + tensor.bytes).min(stretch.end));
    (start < end).then_some(start..end)
}

/// Pages of a window in chunks of at most `most` bytes, whole granules: where each begins in the window, and where it
/// is. `slice` is where the first page is.
pub(super) fn chunks(
    pages: &Range<u64>,
    slice: Option<Slice>,
    grain: u64,
    most: u64,
) -> Result<Vec<(u64, Slice)>> {
    let Some(slice) = slice else { return Ok(Vec::new()) };
    let begin = pages.start * grain;
    let starts = (0..slice.bytes()).step_by(usize::try_from(most).unwrap_or(usize::MAX));
    starts.map(|at| Ok((begin + at, slice.part(at, most.min(slice.bytes() - at))?))).collect()
}

/// What is read and hashed through memory of its own.
pub(super) trait Reads {
    fn device(&self) -> &Arc<dyn Device>;

    fn plan(&self) -> &Plan;

    /// Notes that work which reads or writes the memory goes onto this stream.
    fn uses(&mut self, _stream: Stream) {}

    /// Pinned memory through which the host reads and writes the device's.
    fn staged(&mut self) -> Result<(Arc<Map>, Slice)>;

    /// Waits until all that was enqueued on `stream` has run.
    fn drain(&mut self, stream: Stream) -> Result<()>;
}

/// What can be filled too.
pub(super) trait Fills: Reads {
    /// Ordinal and plan of a layer of the model, and what this rank fills of it.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not there; [`Kind::InvalidState`] once others were given its parts.
    fn fillable(&self, layer: usize) -> Result<(usize, &LayerPlan, &Stored)>;

    /// Notes whether a tensor is filled. Its bytes are others than before in any case, or may be.
    fn note_filled(&mut self, ordinal: usize, tensor: usize, is: bool);
}

/// Refuses a stream that is being captured: only a launch would copy, and the tensor would count as filled before it.
pub(super) fn not_captured(to: &impl Fills, layer: usize, stream: Stream) -> Result<()> {
    if to.device().is_capturing(stream)? {
        let what = "weights are not filled on a stream that is captured";
        return Err(refused(Kind::Busy, layer, what).with("rank", to.plan().group().rank));
    }
    Ok(())
}

/// As [`Windows::fill`].
pub(super) fn fill(
    to: &mut impl Fills,
    (layer, name): (usize, &str),
    from: Slice,
    stream: Stream,
) -> Result<()> {
    let grain = to.plan().grain();
    let (ordinal, plan, Stored { pages, slice, .. }) = to.fillable(layer)?;
    let (index, placed) = find(plan, name)?;
    if from.bytes() != placed.bytes {
        return Err(refused(Kind::OutOfRange, layer, format!("{}: its bytes", echo(name)))
            .with("bytes", from.bytes())
            .with("planned", placed.bytes)
            .hint("plan the tensor as the engine uses it"));
    }
    not_captured(to, layer, stream)?;
    let first = pages.start * grain;
    let own = within(placed, &(first..pages.end * grain));
    if let Some((own, slice)) = own.zip(*slice) {
        let bytes = own.end - own.start;
        let (from, to_own) =
            (from.part(own.start - placed.offset, bytes)?, slice.part(own.start - first, bytes)?);
        to.note_filled(ordinal, index, false);
        to.device().copy(stream, from, to_own).map_err(|error| error.with("layer", layer as u64))?;
        to.uses(stream);
    }
    to.note_filled(ordinal, index, true);
    Ok(())
}

/// The digest of some pages of a layer.
pub(super) fn digest(
    of: &mut impl Reads,
    plan: &LayerPlan,
    pages: &Range<u64>,
    slice: Option<Slice>,
    stream: Stream,
) -> Result<Digest> {
    let (device, grain) = (Arc::clone(of.device()), of.plan().grain());
    let (map, staged) = of.staged()?;
    let mut hash = blake3::Hasher::new();
    let mut bytes = fallible::filled(staged.bytes() as usize, 0, "weights", "bytes to hash")?;
    for (begin, part) in chunks(pages, slice, grain, staged.bytes())? {
        device.copy(stream, part, staged.part(0, part.bytes())?)?;
        of.uses(stream);
        of.drain(stream)?;
        for tensor in plan.layout.tensors() {
            let Some(place) = within(tensor, &(begin..begin + part.bytes())) else { continue };
            let read = bytes.get_mut(..(place.end - place.start) as usize).unwrap_or_default();
            map.copy_out(place.start - begin, read)?;
            hash.update(read);
        }
    }
    Ok(*hash.finalize().as_bytes())
}

impl Reads for Windows {
    fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn staged(&mut self) -> Result<(Arc<Map>, Slice)> {
        self.staging.memory(&*self.device, self.plan.grain(), &*self.faults)
    }

    fn drain(&mut self, stream: Stream) -> Result<()> {
        self.staging.drain(&*self.device, stream)
    }
}

impl Fills for Windows {
    fn fillable(&self, layer: usize) -> Result<(usize, &LayerPlan, &Stored)> {
        if self.shared {
            return Err(refused(Kind::InvalidState, layer, "other ranks have been given its parts")
                .with("rank", self.plan.group().rank)
                .hint("fill all layers before the parts are shared, or update them"));
        }
        let ordinal = self.ordinal(layer)?;
        let (plan, window) = self.at(ordinal)?;
        Ok((ordinal, plan, &window.stored))
    }

    fn note_filled(&mut self, ordinal: usize, tensor: usize, is: bool) {
        self.content = None;
        let window = self.windows.get_mut(ordinal);
        if let Some(filled) = window.and_then(|window| window.filled.get_mut(tensor)) {
            *filled = is;
        }
    }
}

impl Windows {
    /// Enqueues on `stream` the copy of a tensor's own part from `from`, which holds the whole tensor as the engine
    /// uses it. `from` must stay as it is until the copy has run. A GPU copies from registered host memory in words of
    /// 4 bytes, so a tensor that does not begin and end on words comes from device memory.
    ///
    /// The tensor counts as filled when its copy is enqueued. [`Windows::hello`] waits for one stream alone: a caller
    /// that fills on others has ordered that stream behind them, or digest and peers get bytes that have not arrived.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer or tensor that was not chosen, and for memory of another length or device;
    /// [`Kind::InvalidState`] once the parts were shared: [`Windows::update`] is for a new version; [`Kind::Busy`] for
    /// a stream that is being captured. A tensor whose copy was refused counts as not filled.
    pub fn fill(&mut self, layer: usize, name: &str, from: Slice, stream: Stream) -> Result<()> {
        fill(self, (layer, name), from, stream)
    }

    /// What this rank says first to the others: its place in the group, the digests of plan and content, and
    /// `geometry`, the caller's digest of its model. Blocks until `stream` has run and the content is read; fills on
    /// other streams must have run before.
    ///
    /// Ranks that fill from different checkpoints of one shape (DeepSeek-V3 and R1 have the same names and sizes) find
    /// each other out only by `geometry`: let it cover what the checkpoint is at the group's start, such as the hashes
    /// of its files. It stays that for as long as the group lives, also when new weights are committed, and a rank that
    /// comes back says the same. The content tells versions apart.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a layer that was not filled, with the tensor; those of
    /// [`crate::device::Device::copy`].
    pub fn hello(&mut self, geometry: Digest, stream: Stream) -> Result<Hello> {
        let group = self.plan.group();
        let (_, content) = self.contents(stream)?;
        Ok(Hello {
            group: group.id,
            rank: group.rank,
            ranks: group.ranks,
            geometry,
            plan: self.plan.digest(),
            content,
        })
    }

    /// The digests of what this rank filled of each layer, and of all.
    pub(super) fn contents(&mut self, stream: Stream) -> Result<(Vec<Digest>, Digest)> {
        if let Some(known) = &self.content {
            return Ok(known.clone());
        }
        for ordinal in 0..self.windows.len() {
            let (plan, window) = self.at(ordinal)?;
            self.is_filled(plan, window)?;
        }
        let mut layers = Vec::new();
        for ordinal in 0..self.windows.len() {
            let (plan, window) = self.at(ordinal)?;
            let (plan, pages, slice) = (plan.clone(), window.stored.pages.clone(), window.stored.slice);
            layers.push(digest(self, &plan, &pages, slice, stream)?);
        }
        let all = content(&layers);
        self.content = Some((layers.clone(), all));
        Ok((layers, all))
    }

    /// Reads the parts that the other ranks gave, and compares them with what these ranks say that they filled. Blocks
    /// for as long as reading all of them takes, seconds for a model, and serves no session meanwhile: within
    /// [`crate::peer::Limits::lost`] the other ranks hold this one for lost. Where that may take too long, verify layer
    /// by layer ([`Windows::verify_layer`]).
    ///
    /// # Errors
    /// As [`Windows::verify_layer`].
    pub fn verify(&mut self, stream: Stream) -> Result<()> {
        let layers: Vec<usize> = self.plan().layers().iter().map(|plan| plan.layer).collect();
        layers.into_iter().try_for_each(|layer| self.verify_layer(layer, stream))
    }

    /// As [`Windows::verify`], one layer, so that the caller can serve its sessions between two of them
    /// ([`crate::peer::Links::event`]). Nothing is read of a layer that the plan keeps resident, which
    /// has no part of another rank.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] with layer and rank, the owner's also where its part is read from a replica;
    /// [`Kind::OutOfRange`] for a layer that is not shardable;
    /// [`Kind::InvalidState`] for one that is sharded and whose parts are missing; those of
    /// [`crate::device::Device::copy`].
    pub fn verify_layer(&mut self, layer: usize, stream: Stream) -> Result<()> {
        let (plan, window) = self.at(self.ordinal(layer)?)?;
        if plan.place == Place::Resident {
            return Ok(());
        }
        self.layer(layer)?;
        let (plan, parts, digests) = (plan.clone(), window.parts.clone(), window.digests.clone());
        for rank in self.others(&plan) {
            let (part, said) = (parts.get(rank as usize), digests.get(rank as usize));
            let (part, said) = (part.copied().flatten(), said.copied().flatten());
            let found = digest(self, &plan, &plan.cut.part(rank), part, stream)?;
            if said != Some(found) {
                return Err(refused(Kind::Corrupt, layer, "another rank's part is not what it filled")
                    .with("rank", rank)
                    .hint("fill that rank again"));
            }
        }
        Ok(())
    }
}

/// The digest of what a rank filled of all layers, in order.
pub(super) fn content(layers: &[Digest]) -> Digest {
    let mut hash = blake3::Hasher::new();
    hash.update(CONTENT_TAG);
    layers.iter().for_each(|layer| {
        hash.update(layer);
    });
    *hash.finalize().as_bytes()
}
