//! The border at which all ranks take a new version or none does, and what is mapped anew then.
//!
//! What can be refused comes before a rank says that it is ready: from then on the others may commit, and it follows.
//! What is left is the mapping. A mapping that is refused leaves its layer unusable, never half new.

use super::pact::{Border, Outcome};
use super::version::{Renewed, Update};
use crate::device::{Mapped, Stream};
use crate::error::Result;
use crate::peer::{Digest, Links};
use crate::sync::Arc;
use crate::weights::fill::content;
use crate::weights::parked::Parked;
use crate::weights::taken::give_back;
use crate::weights::window::{Stored, Windows};

impl Windows {
    /// Takes an update's new version, at a border at which all ranks do, or at which none does: then the old version
    /// stays, on every rank. Waits until all ranks are there, for at most `border.at_most`. No work that is enqueued or
    /// runs may use a window, except on `border.stream`, which it waits for. Addresses and captured graphs hold. What
    /// buffers hold is of the old version: each layer has to be pulled before it is used again. A layer that was made
    /// resident is whole. The replicas of its layers are dropped, on all ranks.
    ///
    /// # Errors
    /// [`Update::is_over`] tells the two cases apart, for an update that was not over before.
    ///
    /// Before this rank is ready, so that nothing is decided and it may be called again: [`crate::Kind::InvalidState`]
    /// for an update that was not shared, or of other windows or sessions; [`crate::Kind::Busy`] for a stream that is
    /// being captured; the error of a layer that cannot be used; those of [`crate::device::Device::synchronize`].
    ///
    /// After the ranks have committed: those of [`crate::device::Device::remap`] and of a pull, with the layer, for
    /// which every later call returns that error; this rank cannot go on with the group and is started again. Those of
    /// [`crate::device::Device::give_back`]; the new version is in place then, and memory stays with the device. An
    /// error without a layer is of what the update leaves: the new version is in place, and the windows do the rest
    /// before the next update.
    /// [`crate::Kind::Corrupt`] if another process has written nonsense into the decision: then no layer of the update
    /// can be used, because it is not known what the others have. [`Windows::version`] tells what a layer shows.
    pub fn commit(&mut self, update: &mut Update, links: &mut Links, border: Border) -> Result<Outcome> {
        let layers: Vec<usize> = update.layers.iter().map(|layer| layer.ordinal).collect();
        let decided = self.decided(&update.pact, layers, links, &border)?;
        match decided {
            Ok(Outcome::Committed) => {
                let flipped = self.flip(update, border.stream);
                links.renew(|rank| self.content_of(rank));
                flipped.map(|()| Outcome::Committed)
            }
            Ok(Outcome::Aborted(why)) => {
                // What is refused stays with the device; that nothing was taken says more.
                let _ = update.abort();
                Ok(Outcome::Aborted(why))
            }
            Err(error) => {
                update.layers.iter().for_each(|layer| drop(self.broken(layer.ordinal, error.clone())));
                let _ = update.abort();
                Err(error)
            }
        }
    }

    /// Maps all layers of an update anew. Returns the first error.
    fn flip(&mut self, update: &mut Update, stream: Stream) -> Result<()> {
        update.pact.committed();
        let (mut result, mut contents) = (Ok(()), Vec::new());
        for layer in std::mem::take(&mut update.layers) {
            let (ordinal, own) = (layer.ordinal, layer.digests.get(self.plan.group().rank as usize));
            contents.push((ordinal, own.copied().flatten()));
            let flipped = match self.show(&layer, stream) {
                Ok(()) => self.keep(layer, update.version(), update.pact.beside.parked),
                Err(error) => {
                    // Memory that a range maps is refused, and stays with the device.
                    let new = layer.stored.memory.into_iter().chain(layer.others.into_iter().flatten());
                    let _ = give_back(&*self.device, &new.collect::<Vec<_>>());
                    let named = self.at(ordinal).map(|(plan, _)| plan.layer as u64);
                    Err(self.broken(ordinal, error.with("layer", named.unwrap_or_default())))
                }
            };
            result = result.and(flipped);
        }
        self.note_contents(&contents);
        result.and(update.pact.beside.end([]))
    }

    /// Maps a layer's new parts at the addresses of the old ones. A layer that was made resident is pulled, because its
    /// memory has the other ranks' old bytes.
    fn show(&mut self, layer: &Renewed, stream: Stream) -> Result<()> {
        let (plan, window) = self.at(layer.ordinal)?;
        if let Some(error) = &window.failure {
            return Err(error.clone());
        }
        let (name, grain) = (plan.layer, self.plan.grain());
        if let Some(memory) = layer.stored.memory {
            let own = window.range.part(layer.stored.pages.start * grain, memory.bytes)?;
            self.device.remap(own, &[memory])?;
        }
        for (part, new) in window.parts.iter().zip(&layer.others) {
            if let Some((part, new)) = part.zip(*new) {
                self.device.remap(part, &[new])?;
            }
        }
        if window.pulled.as_ref().is_some_and(|pulled| pulled.own.is_some()) {
            self.pull(name, stream)?;
            self.staging.drain(&*self.device, stream)?;
        }
        Ok(())
    }

    /// Keeps a layer's new parts, and gives the old ones back.
    fn keep(&mut self, layer: Renewed, version: u32, parked: Parked) -> Result<()> {
        let device = Arc::clone(&self.device);
        // They are of the old version.
        let replicas = self.without_replicas(layer.ordinal);
        let Some(window) = self.windows.get_mut(layer.ordinal) else { return Ok(()) };
        // Where it was written is parked since it was shared.
        let stored = Stored { slice: None, ..layer.stored };
        let old = std::mem::replace(&mut window.stored, stored);
        let others = std::mem::replace(&mut window.imported, layer.others);
        (window.version, window.digests) = (version, layer.digests);
        // Where the first version was written; nothing is written there any more.
        let was = old.slice.map_or(Ok(()), |slice| parked.park(&*device, slice));
        let held = old.memory.into_iter().chain(others.into_iter().flatten()).chain(replicas);
        let held: Vec<Mapped> = held.collect();
        was.and(give_back(&*device, &held))
    }

    /// Notes the digests of this rank's new parts, so that its hello is that of what it has.
    fn note_contents(&mut self, new: &[(usize, Option<Digest>)]) {
        let Some((layers, all)) = &mut self.content else { return };
        for (ordinal, digest) in new {
            let own = layers.get_mut(*ordinal).zip(*digest);
            own.into_iter().for_each(|(own, digest)| *own = digest);
        }
        *all = content(layers);
    }

    /// What a rank holds, as it says.
    fn content_of(&self, rank: u32) -> Digest {
        let own = self.content.as_ref().filter(|_| rank == self.plan.group().rank);
        if let Some((_, all)) = own {
            return *all;
        }
        let digests = self.windows.iter().map(|window| window.digests.get(rank as usize).copied().flatten());
        content(&digests.map(Option::unwrap_or_default).collect::<Vec<_>>())
    }
}
