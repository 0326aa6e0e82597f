//! The windows of one rank: where each layer's weights lie, who wrote which byte, and the pull that completes a layer.
//!
//! A window is a range of addresses that holds one whole layer and may only be read. Its pages are of two kinds. Those
//! that this rank owns are mapped in place and were filled once. The others are pages of the buffer that the plan gives
//! the layer; a *pull* copies the other ranks' parts into them. Several layers use a buffer in turn, so a window shows
//! its layer from the end of its pull until another layer of the buffer is pulled.
//!
//! ```text
//! window (read)    | buffer pages | own pages | buffer pages |
//! pulled (written) | buffer pages             | buffer pages |
//! ```
//!
//! **Addresses.** Each sharded layer has a second range, *pulled*, over the same buffer pages without the hole; pulls
//! write there. Both keep their addresses for as long as the device lives, so kernels and captured graphs may hold
//! them. [`Windows::make_resident`] maps memory of the layer's own behind both, and [`Windows::make_sharded`] the
//! buffer again. A pull that was captured before goes on being right: it writes the same bytes again.
//!
//! **Memory.** A rank's part of a layer is a backing of its own, because one backing is what another process imports
//! and what a device gives back. Where the driver maps backings from their beginning only
//! ([`Device::maps_offsets`]), a buffer is one backing for each page.
//!
//! **States.** A layer is *filled* when each of its tensors was ([`Windows::fill`]). When all are, the parts can be
//! shared ([`Windows::share`]); their memory is never filled again. A layer is *ready* when it is filled and, if it is
//! sharded over peers, the parts of all other ranks are there. Only then has it an address and can be pulled, so that
//! no engine reads weights that never came. A new version of shared layers is an [`Update`](super::Update).
//!
//! **Copies** of a pull are enqueued one by one on the caller's stream. They take the peers in an order that begins
//! behind this rank, one copy of each after another, so that ranks that pull at the same time read from different ones.
//! Where a part has replicas ([`super::replicas`]), this is the order of owners: the ranks that are read may coincide.
//! [`Windows::pull_some`] enqueues a part of them, for callers that pace their links.
//!
//! **Failures.** A change that fails leaves the layer as it was. Copies that were enqueued before run all the same, so
//! nothing is mapped anew before they have ended. Where the old mappings cannot be restored, or the device has failed,
//! it is not known what a layer's addresses show, and every later call for the layer returns that error.
//!
//! **What it does not do.** It orders nothing: the caller's events say when a buffer may be overwritten and when a
//! layer has arrived. It frees nothing: a device keeps ranges, and the memory that they map, for as long as it lives,
//! also when the windows are dropped. A construction that fails gives back the memory that no range maps, which is all
//! of it until the first range; the rest stays with the device.

use std::ops::Range;

use super::layer::Placed;
use super::plan::{LayerPlan, Place, Plan, Source};
use super::replicas::{Held, bytes_of};
use super::spares::Spares;
use super::staging::{Pinned, Staging, pinned};
use super::taken::{Taken, give_back, memory};
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::{Fallback, Faults, Protection};
use crate::peer::Digest;
use crate::sync::Arc;
use crate::text::echo;

/// How the copies of a pull are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulls {
    /// The most bytes of one copy; rounded up to whole granules, at least one.
    pub copy: u64,
}

impl Default for Pulls {
    /// 2 MiB, as TensorRT-LLM cuts the pulls of its distributed weights (its pull request 12974).
    fn default() -> Pulls {
        Pulls { copy: 2 << 20 }
    }
}

/// The bytes of a layer that this rank has filled by itself.
#[derive(Debug)]
pub(super) struct Stored {
    /// Where they lie in the window, in pages.
    pub pages: Range<u64>,
    /// Where they are written. None if there are none.
    pub slice: Option<Slice>,
    /// Their memory, if it is the device's.
    pub memory: Option<Mapped>,
}

/// The pages of a window that pulls write.
#[derive(Debug)]
pub(super) struct Pulled {
    /// Where they are written.
    slice: Slice,
    /// The pages of the buffer.
    buffer: Vec<Mapped>,
    /// The layer's own memory, while it is resident.
    pub own: Option<Vec<Mapped>>,
    /// From where to where, in order; complete once all parts are there.
    copies: Vec<(Slice, Slice)>,
}

/// One layer.
#[derive(Debug)]
pub(super) struct Window {
    pub range: Slice,
    pub stored: Stored,
    pub pulled: Option<Pulled>,
    /// By tensor.
    pub filled: Vec<bool>,
    /// By rank: its part, to be read.
    pub parts: Vec<Option<Slice>>,
    /// By rank: the memory of its part, as this process imported it.
    pub imported: Vec<Option<Mapped>>,
    /// By rank: what its part is, as it says.
    pub digests: Vec<Option<Digest>>,
    /// Which version of the weights it shows.
    pub version: u32,
    /// By rank: the ranks whose memory its part maps; none if it is that rank's alone.
    pub sources: Vec<Vec<u32>>,
    /// Where a new version of the stored pages is written, once there was one. Parked between updates.
    pub spare: Option<Slice>,
    /// Why the window and its pulled pages may show different memory.
    pub failure: Option<Error>,
}

/// The windows of one rank.
#[derive(Debug)]
pub struct Windows {
    pub(super) device: Arc<dyn Device>,
    pub(super) plan: Plan,
    pub(super) faults: Arc<dyn Faults>,
    /// The most bytes of a copy.
    copy: u64,
    /// By ordinal.
    pub(super) windows: Vec<Window>,
    /// Whether other ranks have been given this rank's parts.
    pub(super) shared: bool,
    /// The digests of what this rank filled, by ordinal, and of all, once they were computed.
    pub(super) content: Option<(Vec<Digest>, Digest)>,
    pub(super) staging: Staging,
    pub(super) spares: Spares,
    /// The replicas of the group, in order.
    pub(super) replicas: Vec<Held>,
    fallbacks: Vec<Fallback>,
}

/// The operation that errors of this file name.
const OPERATION: &str = "weights";

pub(super) fn refused(kind: Kind, layer: usize, what: impl std::fmt::Display) -> Error {
    Error::new(kind, OPERATION).at(format!("layer {layer}: {what}"))
}

/// Checks that all tensors of a layer were filled.
pub(super) fn filled(plan: &LayerPlan, filled: &[bool], rank: u32) -> Result<()> {
    let mut tensors = plan.layout.tensors().iter().zip(filled);
    match tensors.find(|(_, filled)| !**filled) {
        None => Ok(()),
        Some((tensor, _)) => {
            let what = format!("{} was not filled", echo(&tensor.name));
            Err(refused(Kind::InvalidState, plan.layer, what)
                .with("rank", rank)
                .hint("fill every tensor of the plan first"))
        }
    }
}

/// The first `bytes` bytes of pieces, and the rest.
fn split(pieces: &[Mapped], bytes: u64) -> (Vec<Mapped>, Vec<Mapped>) {
    let (mut first, mut rest, mut left) = (Vec::new(), Vec::new(), bytes);
    for piece in pieces {
        let own = left.min(piece.bytes);
        left -= own;
        if own > 0 {
            first.push(Mapped { bytes: own, ..*piece });
        }
        if own < piece.bytes {
            rest.push(Mapped { offset: piece.offset + own, bytes: piece.bytes - own, ..*piece });
        }
    }
    (first, rest)
}

/// What a window maps: the pulled pages around the stored ones.
fn around(pulled: &[Mapped], stored: &Stored, grain: u64) -> Vec<Mapped> {
    let (mut pieces, after) = split(pulled, stored.pages.start * grain);
    pieces.extend(stored.memory);
    pieces.extend(after);
    pieces
}

impl Windows {
    /// Takes the memory of `plan` on `device` and maps all windows. Nothing is filled yet. Memory that ranges map stays
    /// the device's for as long as it lives, also when the windows are dropped.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for a plan in other granules than the device's; [`Kind::OutOfMemory`];
    /// [`Kind::OsRefused`] and others of [`Device::range`]. Memory that no range maps is given back then. A device that
    /// lacks memory for the plan is left as it was.
    pub fn new(
        device: &Arc<dyn Device>,
        plan: Plan,
        pulls: Pulls,
        faults: &Arc<dyn Faults>,
    ) -> Result<Windows> {
        let grain = plan.grain();
        if !grain.is_multiple_of(device.granularity()) {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("the plan's granule")
                .with("grain", grain)
                .with("granularity", device.granularity())
                .hint("plan with the device's granularity"));
        }
        let taken = Taken::new(&**device, &plan)?;
        Windows::over(device, plan, pulls, faults, &taken)
            .inspect_err(|_| taken.give_back_unmapped(&**device))
    }

    /// Maps the windows over their memory.
    fn over(
        device: &Arc<dyn Device>,
        plan: Plan,
        pulls: Pulls,
        faults: &Arc<dyn Faults>,
        taken: &Taken,
    ) -> Result<Windows> {
        let (grain, host) = (plan.grain(), plan.bytes().host);
        let (host, fallbacks) = match host {
            0 => (None, Vec::new()),
            bytes => {
                let Pinned { slice, fallbacks, .. } = pinned(&**device, bytes, &**faults)?;
                (Some(slice), fallbacks)
            }
        };
        let mut stored_before = 0;
        let mut windows = Vec::with_capacity(plan.layers().len());
        for (layer, own) in plan.layers().iter().zip(&taken.own) {
            let host = match (layer.place, &host) {
                (Place::Buffer(_), Some(host)) => {
                    let own = host.part(stored_before, layer.layout.pages() * grain)?;
                    stored_before += own.bytes();
                    Some(own)
                }
                _ => None,
            };
            windows.push(Window::new(&**device, &plan, layer, &taken.buffers, (*own, host))?);
        }
        let mut windows = Windows {
            device: Arc::clone(device),
            faults: Arc::clone(faults),
            copy: pulls.copy.max(1).checked_next_multiple_of(grain).unwrap_or(u64::MAX),
            plan,
            windows,
            shared: false,
            content: None,
            staging: Staging::default(),
            spares: Spares::default(),
            replicas: Vec::new(),
            fallbacks,
        };
        for ordinal in 0..windows.windows.len() {
            windows.connect(ordinal)?;
        }
        Ok(windows)
    }

    /// The plan.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether other ranks were given this rank's parts: from then on nothing is filled. It is true also when
    /// [`Windows::share`] has lost a rank before it had all parts.
    pub const fn is_shared(&self) -> bool {
        self.shared
    }

    /// The options of pinned host memory that the system refused, under [`Source::Host`].
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// The ordinal of a layer of the model.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not shardable.
    pub(super) fn ordinal(&self, layer: usize) -> Result<usize> {
        let layers = self.plan.layers();
        layers.binary_search_by_key(&layer, |one| one.layer).map_err(|_| {
            refused(Kind::OutOfRange, layer, "no tensor of it was chosen")
                .with("shardable", layers.len() as u64)
        })
    }

    pub(super) fn at(&self, ordinal: usize) -> Result<(&LayerPlan, &Window)> {
        let found = self.plan.layers().get(ordinal).zip(self.windows.get(ordinal));
        found.ok_or_else(|| Error::new(Kind::OutOfRange, OPERATION).with("ordinal", ordinal as u64))
    }

    /// The addresses of a whole layer. They may only be read, and never change.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not shardable; [`Kind::InvalidState`] while the layer is not ready,
    /// with the tensor that was not filled or the rank whose part is missing.
    pub fn layer(&self, layer: usize) -> Result<Slice> {
        let (_, window) = self.ready(layer)?;
        Ok(window.range)
    }

    /// The addresses of one tensor of a layer.
    ///
    /// # Errors
    /// As [`Windows::layer`]; [`Kind::OutOfRange`] for a tensor that was not chosen.
    pub fn tensor(&self, layer: usize, name: &str) -> Result<Slice> {
        let (plan, window) = self.ready(layer)?;
        let (_, placed) = find(plan, name)?;
        window.range.part(placed.offset, placed.bytes)
    }

    /// A layer that is whole, or can be pulled.
    fn ready(&self, layer: usize) -> Result<(&LayerPlan, &Window)> {
        let (plan, window) = self.at(self.ordinal(layer)?)?;
        if let Some(error) = &window.failure {
            return Err(error.clone());
        }
        self.is_filled(plan, window)?;
        match self.missing(plan, window).next() {
            None => Ok((plan, window)),
            Some(rank) => Err(refused(Kind::InvalidState, layer, "the part of another rank is missing")
                .with("rank", rank)
                .hint("share the parts of all ranks first")),
        }
    }

    /// Checks that all tensors of a layer were filled.
    pub(super) fn is_filled(&self, plan: &LayerPlan, window: &Window) -> Result<()> {
        filled(plan, &window.filled, self.plan.group().rank)
    }

    /// The ranks whose parts a pull of this layer needs.
    pub(super) fn others(&self, plan: &LayerPlan) -> impl Iterator<Item = u32> + use<> {
        let (group, cut) = (self.plan.group(), plan.cut);
        let over_peers = plan.place != Place::Resident && self.plan.source() == Source::Peers;
        let ranks = if over_peers { group.ranks } else { 1 };
        // Beginning behind this rank, so that no two ranks begin with the same one where each owns something.
        (1..ranks)
            .map(move |step| ((u64::from(group.rank) + u64::from(step)) % u64::from(ranks)) as u32)
            .filter(move |rank| !cut.part(*rank).is_empty())
    }

    fn missing<'a>(&self, plan: &LayerPlan, window: &'a Window) -> impl Iterator<Item = u32> + use<'a> {
        let parts = &window.parts;
        self.others(plan).filter(move |rank| parts.get(*rank as usize).copied().flatten().is_none())
    }

    /// How many copies [`Windows::pull`] enqueues: none for a layer that the plan keeps resident.
    ///
    /// # Errors
    /// As [`Windows::layer`].
    pub fn copies(&self, layer: usize) -> Result<usize> {
        let (_, window) = self.ready(layer)?;
        Ok(window.pulled.as_ref().map_or(0, |pulled| pulled.copies.len()))
    }

    /// Enqueues on `stream` the copies that bring a layer's other parts into its window. The layer that the buffer held
    /// is gone from the first copy on. A resident layer needs none; of a layer that was made resident the same bytes
    /// are written again.
    ///
    /// # Errors
    /// As [`Windows::layer`], and those of [`Device::copy`], such as for a stream that the device does not know
    /// ([`Device::stream`] says which device can tell), with the layer; copies that were enqueued before stay.
    pub fn pull(&self, layer: usize, stream: Stream) -> Result<()> {
        let all = 0..self.copies(layer)?;
        self.pull_some(layer, stream, all)
    }

    /// Enqueues some of a layer's copies, by their numbers below [`Windows::copies`]. The layer is whole when each has
    /// been made.
    ///
    /// # Errors
    /// As [`Windows::pull`]; [`Kind::OutOfRange`] for copies that the pull does not have.
    pub fn pull_some(&self, layer: usize, stream: Stream, copies: Range<usize>) -> Result<()> {
        let (_, window) = self.ready(layer)?;
        let all = window.pulled.as_ref().map_or(&[][..], |pulled| &pulled.copies);
        let Some(copies) = all.get(copies.clone()) else {
            return Err(refused(Kind::OutOfRange, layer, "copies that a pull does not have")
                .with("from", copies.start as u64)
                .with("to", copies.end as u64)
                .with("copies", all.len() as u64));
        };
        let named = |error: Error| error.with("layer", layer as u64);
        copies.iter().try_for_each(|(from, to)| self.device.copy(stream, *from, *to)).map_err(named)
    }

    /// Makes the copies of a layer, once all parts are there.
    pub(super) fn connect(&mut self, ordinal: usize) -> Result<()> {
        let (plan, window) = self.at(ordinal)?;
        let Some(pulled) = &window.pulled else { return Ok(()) };
        if self.missing(plan, window).next().is_some() {
            return Ok(());
        }
        let grain = self.plan.grain();
        // From where each part comes, and where it begins among the pulled pages.
        let mut parts = Vec::new();
        if let (Source::Host, Some(host)) = (self.plan.source(), window.stored.slice) {
            parts.push((host, 0));
        }
        for rank in self.others(plan) {
            let pages = plan.cut.part(rank);
            let hole = if pages.start < window.stored.pages.start {
                0
            } else {
                window.stored.pages.end - window.stored.pages.start
            };
            let part = window.parts.get(rank as usize).copied().flatten();
            parts.extend(part.map(|part| (part, (pages.start - hole) * grain)));
        }
        let most = parts.iter().map(|(part, _)| part.bytes()).max().unwrap_or(0);
        let mut copies = Vec::new();
        for start in (0..most).step_by(usize::try_from(self.copy).unwrap_or(usize::MAX)) {
            for (part, to) in &parts {
                let bytes = part.bytes().saturating_sub(start).min(self.copy);
                if bytes > 0 {
                    copies.push((part.part(start, bytes)?, pulled.slice.part(to + start, bytes)?));
                }
            }
        }
        if let Some(pulled) = self.windows.get_mut(ordinal).and_then(|window| window.pulled.as_mut()) {
            pulled.copies = copies;
        }
        Ok(())
    }

    /// Gives a sharded layer memory of its own, fills it by a pull on `stream`, and maps it behind the layer's
    /// addresses, which stay as they are. From then on the layer is whole in every step without a pull. Blocks until
    /// all work on `stream` has run. No other work that is enqueued or runs may use the layer's window. Nothing happens
    /// to a layer that is resident.
    ///
    /// # Errors
    /// As [`Windows::pull`]; [`Kind::Busy`] if `stream` is being captured; [`Kind::OutOfMemory`]; those of
    /// [`Device::remap`]. The layer is sharded as before then. If not even that can be restored, if the device has
    /// failed, or if it cannot be known whether the pull's copies have ended, every later call for the layer returns
    /// that error.
    pub fn make_resident(&mut self, layer: usize, stream: Stream) -> Result<()> {
        let ordinal = self.ordinal(layer)?;
        let (_, window) = self.ready(layer)?;
        let Some(pulled) = window.pulled.as_ref().filter(|pulled| pulled.own.is_none()) else {
            return Ok(());
        };
        let (range, slice, buffer) = (window.range, pulled.slice, pulled.buffer.clone());
        if self.device.is_capturing(stream)? {
            let what = "it cannot be remapped on a stream that is captured";
            return Err(refused(Kind::Busy, layer, what).with("rank", self.plan.group().rank));
        }
        // Before anything is mapped anew it is known that this stream can be waited for.
        self.staging.drain(&*self.device, stream).map_err(|error| error.with("layer", layer as u64))?;
        let own = memory(&*self.device, slice.bytes())?;
        if let Err(error) = self.device.remap(slice, &own) {
            return Err(self.changed_back(ordinal, error, &own));
        }
        // The window shows the buffer until the memory behind it is whole. The copies that were enqueued before one
        // that is refused run all the same, and nothing is mapped anew under them.
        let pulled = self.pull(layer, stream);
        if let Err(error) = self.staging.drain(&*self.device, stream) {
            return Err(self.broken(ordinal, error));
        }
        let (_, window) = self.at(ordinal)?;
        let whole = around(&own, &window.stored, self.plan.grain());
        match pulled.and_then(|()| self.device.remap(range, &whole)) {
            Ok(()) => {
                self.change(ordinal, |pulled| pulled.own = Some(own));
                Ok(())
            }
            Err(error) if error.kind() == Kind::DeviceFailed => Err(self.broken(ordinal, error)),
            Err(error) => match self.device.remap(slice, &buffer) {
                Ok(()) => Err(self.changed_back(ordinal, error, &own)),
                Err(restored) => {
                    self.broken(ordinal, restored);
                    Err(error)
                }
            },
        }
    }

    /// Maps the buffer behind the addresses of a layer that was made resident, and gives its memory back. The layer has
    /// to be pulled before it is used again. Blocks. No work that is enqueued or runs may use the layer's window.
    /// Nothing happens to other layers.
    ///
    /// # Errors
    /// As [`Windows::layer`]; those of [`Device::remap`]. The layer is resident as before then; else as in
    /// [`Windows::make_resident`]. Only an error of [`Device::give_back`] comes when the layer is sharded
    /// ([`Windows::is_resident`] tells), and its memory stays with the device.
    pub fn make_sharded(&mut self, layer: usize) -> Result<()> {
        let ordinal = self.ordinal(layer)?;
        let (_, window) = self.ready(layer)?;
        let Some((pulled, own)) = window.pulled.as_ref().and_then(|it| Some((it, it.own.clone()?))) else {
            return Ok(());
        };
        let grain = self.plan.grain();
        let (range, slice, buffer) = (window.range, pulled.slice, pulled.buffer.clone());
        let (shared, whole) = (around(&buffer, &window.stored, grain), around(&own, &window.stored, grain));
        if let Err(error) = self.device.remap(range, &shared) {
            return Err(self.changed_back(ordinal, error, &[]));
        }
        if let Err(error) = self.device.remap(slice, &buffer) {
            if error.kind() != Kind::DeviceFailed
                && let Err(restored) = self.device.remap(range, &whole)
            {
                self.broken(ordinal, restored);
            }
            return Err(self.changed_back(ordinal, error, &[]));
        }
        self.change(ordinal, |pulled| pulled.own = None);
        give_back(&*self.device, &own)
    }

    /// Whether a layer is whole without a pull: by the plan, or because it was made so.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not shardable.
    pub fn is_resident(&self, layer: usize) -> Result<bool> {
        let (_, window) = self.at(self.ordinal(layer)?)?;
        Ok(window.pulled.as_ref().is_none_or(|pulled| pulled.own.is_some()))
    }

    /// Bytes of device memory that all layers take at present: the plan's, those of layers that were made resident, and
    /// those of this rank's replicas.
    pub fn device_bytes(&self) -> u64 {
        let own = self.windows.iter().filter_map(|window| window.pulled.as_ref()?.own.as_ref());
        let own = own.flatten().map(|piece| piece.bytes).sum::<u64>();
        self.plan.bytes().device() + own + self.replica_bytes()
    }

    /// Bytes of device memory that this rank's replicas take.
    pub fn replica_bytes(&self) -> u64 {
        bytes_of(&self.replicas, self.plan.group().rank)
    }

    fn change(&mut self, ordinal: usize, change: impl FnOnce(&mut Pulled)) {
        if let Some(pulled) = self.windows.get_mut(ordinal).and_then(|window| window.pulled.as_mut()) {
            change(pulled);
        }
    }

    /// The error of a change after which the layer's addresses show what they showed before, and nothing shows
    /// `memory`, which is given back. A device that has failed may show anything.
    fn changed_back(&mut self, ordinal: usize, error: Error, memory: &[Mapped]) -> Error {
        if error.kind() == Kind::DeviceFailed {
            return self.broken(ordinal, error);
        }
        // What is refused here stays with the device; the first error says more.
        let _ = give_back(&*self.device, memory);
        error
    }

    /// The error of a layer of which it is not known what its addresses show.
    pub(super) fn usable(&self, ordinal: usize) -> Result<()> {
        let failure = self.windows.get(ordinal).and_then(|window| window.failure.clone());
        failure.map_or(Ok(()), Err)
    }

    /// Keeps the error after which it is not known what a layer's addresses show.
    pub(super) fn broken(&mut self, ordinal: usize, error: Error) -> Error {
        if let Some(window) = self.windows.get_mut(ordinal) {
            window.failure = Some(error.clone());
        }
        error
    }
}

impl Window {
    fn new(
        device: &dyn Device,
        plan: &Plan,
        layer: &LayerPlan,
        buffers: &[Vec<Mapped>],
        (memory, host): (Option<Mapped>, Option<Slice>),
    ) -> Result<Window> {
        let (grain, pages) = (plan.grain(), layer.layout.pages());
        let own = plan.part(layer.layer, plan.group().rank).unwrap_or(0..0);
        let slice = memory.map(|memory| device.range(&[memory], Protection::ReadWrite)).transpose()?;
        let mut stored = Stored { pages: own, slice, memory };
        let buffer = match layer.place {
            Place::Resident => None,
            Place::Buffer(buffer) => buffers.get(usize::from(buffer)),
        };
        let bytes = plan.pulled(layer);
        let buffer = buffer.filter(|_| bytes > 0).map(|buffer| split(buffer, bytes).0);
        let range =
            device.range(&around(buffer.as_deref().unwrap_or_default(), &stored, grain), Protection::Read)?;
        let pulled = match buffer {
            None => None,
            Some(buffer) => {
                let slice = device.range(&buffer, Protection::ReadWrite)?;
                Some(Pulled { slice, buffer, own: None, copies: Vec::new() })
            }
        };
        if host.is_some() {
            // What is stored is the whole layer, outside the window.
            stored = Stored { pages: 0..pages, slice: host, memory: None };
        }
        let ranks = plan.group().ranks as usize;
        let filled = vec![false; layer.layout.tensors().len()];
        Ok(Window {
            range,
            stored,
            pulled,
            filled,
            parts: vec![None; ranks],
            imported: vec![None; ranks],
            digests: vec![None; ranks],
            version: 0,
            sources: vec![Vec::new(); ranks],
            spare: None,
            failure: None,
        })
    }
}

/// A chosen tensor of a layer, and its place among them.
pub(super) fn find<'a>(plan: &'a LayerPlan, name: &str) -> Result<(usize, &'a Placed)> {
    let mut tensors = plan.layout.tensors().iter().enumerate();
    tensors.find(|(_, tensor)| tensor.name == name).ok_or_else(|| {
        refused(Kind::OutOfRange, plan.layer, format!("no chosen tensor is named {}", echo(name)))
    })
}
