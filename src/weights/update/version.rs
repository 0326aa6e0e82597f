//! An update of weights: its memory, which is filled as the windows were, and its end.

use super::pact::{Pact, State};
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::Digest;
use crate::sync::Arc;
use crate::weights::beside::Beside;
use crate::weights::exchange::UPDATE;
#[cfg(feature = "safetensors")]
use crate::weights::files::{self, Files};
use crate::weights::fill::{self, Fills};
use crate::weights::parked::Parked;
use crate::weights::plan::{LayerPlan, Plan, Source};
use crate::weights::window::{Stored, Windows, refused};

/// A layer's new version.
#[derive(Debug)]
pub(super) struct Renewed {
    pub ordinal: usize,
    /// What this rank fills.
    pub stored: Stored,
    /// By tensor.
    filled: Vec<bool>,
    /// By rank: the part that it gave, and what it is, as it says. Its own digest is among them.
    pub others: Vec<Option<Mapped>>,
    pub digests: Vec<Option<Digest>>,
}

/// A new version of some layers, beside the one in use. [`Windows::update`] makes it.
#[derive(Debug)]
pub struct Update {
    pub(super) device: Arc<dyn Device>,
    pub(super) plan: Arc<Plan>,
    pub(super) pact: Pact,
    /// By ordinal, ascending.
    pub(super) layers: Vec<Renewed>,
    pub(super) reading: Option<Slice>,
}

impl Windows {
    /// The version of a layer's weights: 0 until the first update of it was committed. A process that was started again
    /// begins with 0, whatever it was filled with.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a layer that is not shardable.
    pub fn version(&self, layer: usize) -> Result<u32> {
        let (_, window) = self.at(self.ordinal(layer)?)?;
        Ok(window.version)
    }

    /// Begins an update of `layers` to `version`: takes the memory of their new parts, and nothing else changes. Steps
    /// go on with the old version. All ranks of the group begin it with the same arguments but the last. A version is
    /// begun once: after an update that failed or was aborted, the next one has a higher number.
    ///
    /// `at_most` bounds the bytes of device memory that it takes: in whole granules this rank's part of each of these
    /// layers, and of one that the plan keeps resident the whole. The first update takes one granule more, which stays.
    /// The old parts are given back by the commit. With less memory update fewer layers at a time, if the engine can
    /// run on layers of different versions.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] with the bytes `needed` and `allowed`, before any are taken, or of the device; then it
    /// holds what it held before. [`Kind::Unsupported`] where the device maps nothing anew, and for weights that come
    /// from the host; [`Kind::InvalidState`] before the parts were shared; [`Kind::Busy`] while another update is
    /// there; [`Kind::InvalidConfig`] for no layers, or one twice; [`Kind::OutOfRange`] for a layer that is not
    /// shardable, and for a version that is not above all that were begun; the error of a layer that cannot be used;
    /// those of [`Update::abort`], of one that was dropped before it could give its memory back.
    pub fn update(&mut self, version: u32, layers: &[usize], at_most: u64) -> Result<Update> {
        let ordinals = self.updatable(version, layers)?;
        let grain = self.plan.grain();
        let mut needed = self.spares.needs(grain);
        for ordinal in &ordinals {
            let pages = &self.at(*ordinal)?.1.stored.pages;
            needed += (pages.end - pages.start) * grain;
        }
        if needed > at_most {
            return Err(Error::new(Kind::OutOfMemory, UPDATE.operation)
                .at("the new parts of these layers")
                .with("needed", needed)
                .with("allowed", at_most)
                .hint("allow more, or update fewer layers at a time"));
        }
        let beside = Beside::new(self, false)?;
        let mut update = Update {
            device: Arc::clone(&self.device),
            plan: Arc::clone(&beside.plan),
            pact: Pact::new(UPDATE, (version, self.spares.changes), beside),
            layers: Vec::new(),
            reading: None,
        };
        // All memory before the first range; what was taken goes with the update where something is refused.
        for ordinal in ordinals {
            update.layers.push(self.renewed(ordinal)?);
        }
        self.lend(&mut update)?;
        self.spares.begun = version;
        Ok(update)
    }

    /// The ordinals of layers that can be updated to `version`, ascending.
    fn updatable(&self, version: u32, layers: &[usize]) -> Result<Vec<usize>> {
        let wrong = |kind, what: &'static str| Err(Error::new(kind, UPDATE.operation).at(what));
        if self.plan.source() == Source::Host {
            return wrong(Kind::Unsupported, "weights that are pulled from the host");
        }
        if !self.shared {
            return wrong(Kind::InvalidState, "parts that were not shared");
        }
        if !self.spares.are_free(&*self.device)? {
            return wrong(Kind::Busy, "another update, or a change of replicas, of these windows");
        }
        if version <= self.spares.begun {
            return Err(Error::new(Kind::OutOfRange, UPDATE.operation)
                .at("a version that is not above all that were begun")
                .with("version", version)
                .with("begun", self.spares.begun));
        }
        let mut ordinals = Vec::new();
        for layer in layers {
            // The layer is ready, and its mappings are known.
            self.layer(*layer)?;
            ordinals.push(self.ordinal(*layer)?);
        }
        ordinals.sort_unstable();
        if ordinals.is_empty() || ordinals.windows(2).any(|two| two.first() == two.last()) {
            return wrong(Kind::InvalidConfig, "no layers, or one of them twice");
        }
        Ok(ordinals)
    }

    /// A layer's new version with its memory.
    fn renewed(&self, ordinal: usize) -> Result<Renewed> {
        let (plan, window) = self.at(ordinal)?;
        let pages = window.stored.pages.clone();
        let bytes = (pages.end - pages.start) * self.plan.grain();
        let memory = match bytes {
            0 => None,
            _ => Some(Mapped { backing: self.device.backing(bytes)?, offset: 0, bytes }),
        };
        let ranks = self.plan.group().ranks as usize;
        Ok(Renewed {
            ordinal,
            stored: Stored { pages, slice: None, memory },
            filled: vec![false; plan.layout.tensors().len()],
            others: vec![None; ranks],
            digests: vec![None; ranks],
        })
    }

    /// Lets the update write its memory, and read the parts of others.
    fn lend(&mut self, update: &mut Update) -> Result<()> {
        let (device, parked) = (Arc::clone(&self.device), update.pact.beside.parked);
        for layer in &mut update.layers {
            let Some(memory) = layer.stored.memory else { continue };
            let Some(window) = self.windows.get_mut(layer.ordinal) else { continue };
            let spare = match window.spare {
                Some(spare) => spare,
                None => {
                    let made = parked.range(&*device, memory.bytes, Protection::ReadWrite)?;
                    *window.spare.insert(made)
                }
            };
            // What is mapped in part is parked with the update.
            update.pact.beside.lent(spare);
            device.remap(spare, &[memory])?;
            layer.stored.slice = Some(spare);
        }
        update.reading = self.reading(parked)?;
        Ok(())
    }

    /// Where any part of a sharded layer can be read, parked.
    pub(in crate::weights) fn reading(&mut self, parked: Parked) -> Result<Option<Slice>> {
        let sharded = self.plan.layers().iter().filter(|plan| self.others(plan).next().is_some());
        let pages = sharded.flat_map(|plan| (0..self.plan.group().ranks).map(|rank| plan.cut.part(rank)));
        let most = pages.map(|part| part.end - part.start).max().unwrap_or(0) * self.plan.grain();
        if most == 0 {
            return Ok(None);
        }
        let reading = match self.spares.reading {
            Some(reading) => reading,
            None => *self.spares.reading.insert(parked.range(&*self.device, most, Protection::Read)?),
        };
        // Also where no part of this rank's own has tried whether the device maps anything anew.
        parked.park(&*self.device, reading)?;
        Ok(Some(reading))
    }
}

impl Fills for Update {
    fn fillable(&self, layer: usize) -> Result<(usize, &LayerPlan, &Stored)> {
        if self.pact.state != State::Filling {
            return Err(refused(Kind::InvalidState, layer, "other ranks have been given its new parts"));
        }
        let (plan, renewed) = self.of(layer)?;
        Ok((renewed.ordinal, plan, &renewed.stored))
    }

    fn note_filled(&mut self, ordinal: usize, tensor: usize, is: bool) {
        let layer = self.layers.iter_mut().find(|layer| layer.ordinal == ordinal);
        if let Some(filled) = layer.and_then(|layer| layer.filled.get_mut(tensor)) {
            *filled = is;
        }
    }
}

impl Update {
    /// The version that it is of.
    pub const fn version(&self) -> u32 {
        self.pact.number
    }

    /// The layer's plan and its new version.
    pub(super) fn of(&self, layer: usize) -> Result<(&LayerPlan, &Renewed)> {
        let mut all = self.layers.iter().filter_map(|one| Some((self.plan.layers().get(one.ordinal)?, one)));
        all.find(|(plan, _)| plan.layer == layer)
            .ok_or_else(|| refused(Kind::OutOfRange, layer, "it is not part of the update"))
    }

    /// As [`Windows::fill`], of the new version.
    ///
    /// # Errors
    /// As [`Windows::fill`]; [`Kind::OutOfRange`] for a layer that the update does not name.
    pub fn fill(&mut self, layer: usize, name: &str, from: Slice, stream: Stream) -> Result<()> {
        fill::fill(self, (layer, name), from, stream)
    }

    /// As [`Windows::fill_from`], of the new version: fills all layers of the update.
    ///
    /// # Errors
    /// As [`Windows::fill_from`].
    #[cfg(feature = "safetensors")]
    pub fn fill_from(&mut self, files: &Files, stream: Stream) -> Result<()> {
        let plans = self.layers.iter().filter_map(|one| self.plan.layers().get(one.ordinal));
        let layers: Vec<usize> = plans.map(|plan| plan.layer).collect();
        files::fill_from(self, files, layers.into_iter(), stream)
    }

    /// Checks that all layers were filled.
    pub(super) fn is_filled(&self) -> Result<()> {
        let rank = self.plan.group().rank;
        self.layers.iter().try_for_each(|layer| {
            let plan = self.plan.layers().get(layer.ordinal);
            plan.map_or(Ok(()), |plan| crate::weights::window::filled(plan, &layer.filled, rank))
        })
    }

    /// Whether the update is over: the ranks have decided at a border, or it was aborted. Otherwise nothing is decided,
    /// and [`Windows::commit`] may be called, also again.
    pub fn is_over(&self) -> bool {
        self.pact.is_over()
    }

    /// Ends the update: no rank takes the new version, unless all have committed already. Its memory is given back.
    /// Blocks until the copies into it have run. Nothing happens to an update that is over.
    ///
    /// Where it cannot be known that they have run, or the addresses at which they write cannot be parked, the update
    /// keeps its memory and the windows stay busy: call it again. If it is dropped then, the next [`Windows::update`]
    /// or [`Windows::replicate`] does what is left, or returns why it cannot.
    ///
    /// # Errors
    /// Those of [`Device::synchronize`], [`Device::remap`] and [`Device::give_back`]; the memory stays with the device
    /// then.
    pub fn abort(&mut self) -> Result<()> {
        self.pact.abort();
        let layers = std::mem::take(&mut self.layers).into_iter();
        let memory =
            layers.flat_map(|it| it.stored.memory.into_iter().chain(it.others.into_iter().flatten()));
        self.pact.beside.end(memory)
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        // No caller is there to be told. What is left goes to the windows with what is beside them.
        let _ = self.abort();
    }
}
