//! The new parts, given to the other ranks and taken from them.
//!
//! After the message that begins an update ([`super::pact`]) come the parts of its layers, in their order; of a layer
//! that the plan keeps resident its digest alone, which all ranks have to agree on. What other ranks give is imported,
//! not mapped, until the flip; [`Update::verify_layer`] maps it for as long as it reads it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::pact::{self, Agreed, Pact, State};
use super::version::{Renewed, Update};
use crate::device::{Mapped, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::{Digest, Event, Links};
use crate::sync::Arc;
use crate::weights::exchange::{Part, UPDATE, of_pact};
use crate::weights::fill::{self, Reads};
use crate::weights::plan::{LayerPlan, Place};
use crate::weights::window::refused;

impl Update {
    /// Whether an event of [`Links::event`] belongs to an update or to a change of replicas. A rank that is still
    /// filling may get what a faster one says; it keeps that with [`Links::set_aside`], and [`Update::share`] takes it.
    pub fn concerns(event: &Event<OwnedFd>) -> bool {
        matches!(event, Event::Message { bytes, .. } if of_pact(bytes).is_some())
    }

    /// A layer of the update, by its place in it.
    fn place(&self, at: usize) -> Result<(&Renewed, &LayerPlan)> {
        let found =
            self.layers.get(at).and_then(|layer| Some((layer, self.plan.layers().get(layer.ordinal)?)));
        // The exchange asks for no more than there are.
        found.ok_or_else(|| self.pact.error(Kind::Internal, "a layer of the update"))
    }

    /// Gives this rank's new parts to all others and takes theirs. All ranks call it, when all layers of the update are
    /// filled. `stream` is ordered after all fills. Blocks until this rank's parts are hashed, and then for at most
    /// `at_most`; a call that fails takes a second more to say so to the others. It serves the sessions meanwhile,
    /// between two layers at least, so an engine that goes on stepping calls it on a thread of its own.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] with the tensor that was not filled, and for an update that was shared before;
    /// [`Kind::InvalidConfig`] for sessions of another group or plan; the error of a rank that is lost;
    /// [`Kind::InvalidState`] for one that has come back and was not attached again. Nothing was said to any rank
    /// then, and the call may be made again.
    ///
    /// After other errors the update cannot be committed, by any rank: drop it, and begin one of a higher version.
    /// [`Kind::InvalidConfig`] for a rank that updates other layers or to a later version; [`Kind::TimedOut`],
    /// [`Kind::PeerLost`] and [`Kind::BadFormat`] with the rank; [`Kind::Corrupt`] with rank and layer for one that has
    /// filled other bytes than this rank into a layer that the plan keeps resident; [`Kind::Cancelled`] for a rank
    /// whose own call has failed; those of [`crate::device::Device::export`] and
    /// [`crate::device::Device::import_backing`], with rank and layer.
    pub fn share(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        pact::share(self, links, stream, at_most)
    }

    /// Reads the new parts that the other ranks gave, as [`crate::weights::Windows::verify`] does those in use. Steps
    /// may go on. Blocks, and serves no session meanwhile.
    ///
    /// # Errors
    /// As [`Update::verify_layer`].
    pub fn verify(&mut self, stream: Stream) -> Result<()> {
        let plans = self.layers.iter().filter_map(|one| self.plan.layers().get(one.ordinal));
        let layers: Vec<usize> = plans.map(|plan| plan.layer).collect();
        layers.into_iter().try_for_each(|layer| self.verify_layer(layer, stream))
    }

    /// As [`Update::verify`], one layer.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] with rank and layer; [`Kind::OutOfRange`] for a layer that the update does not name;
    /// [`Kind::InvalidState`] before the parts were shared; those of [`crate::device::Device::remap`] and
    /// [`crate::device::Device::copy`].
    pub fn verify_layer(&mut self, layer: usize, stream: Stream) -> Result<()> {
        let (plan, renewed) = self.of(layer)?;
        if self.pact.state != State::Shared {
            return Err(refused(Kind::InvalidState, layer, "its new parts are not shared"));
        }
        let (plan, parts, digests) = (plan.clone(), renewed.others.clone(), renewed.digests.clone());
        let (device, parked) = (Arc::clone(&self.device), self.pact.beside.parked);
        for ((rank, part), said) in (0..).zip(parts).zip(digests) {
            let Some((part, reading)) = part.zip(self.reading) else { continue };
            self.pact.beside.lent(reading);
            let shown = parked.show(&*device, reading, part)?;
            let found = fill::digest(self, &plan, &plan.cut.part(rank), Some(shown), stream);
            // The memory must not be shown any longer when it is given back.
            self.settle()?;
            self.park()?;
            if said != Some(found?) {
                return Err(refused(Kind::Corrupt, layer, "another rank's new part is not what it filled")
                    .with("rank", rank)
                    .hint("drop the update and begin it again"));
            }
        }
        Ok(())
    }
}

impl Agreed for Update {
    fn pact(&self) -> &Pact {
        &self.pact
    }

    fn pact_mut(&mut self) -> &mut Pact {
        &mut self.pact
    }

    fn is_filled(&self) -> Result<()> {
        Update::is_filled(self)
    }

    fn begins(&self) -> (u64, Digest) {
        let mut hash = blake3::Hasher::new();
        for layer in &self.layers {
            hash.update(&(layer.ordinal as u64).to_le_bytes());
        }
        (self.layers.len() as u64, *hash.finalize().as_bytes())
    }

    fn prepare(&mut self, links: &mut Links, stream: Stream) -> Result<()> {
        let rank = self.plan.group().rank as usize;
        self.drain(stream)?;
        self.settle()?;
        for at in 0..self.layers.len() {
            let (layer, plan) = self.place(at)?;
            let (plan, pages, slice) = (plan.clone(), layer.stored.pages.clone(), layer.stored.slice);
            let found = fill::digest(self, &plan, &pages, slice, stream)?;
            let own = self.layers.get_mut(at).and_then(|layer| layer.digests.get_mut(rank));
            own.into_iter().for_each(|own| *own = Some(found));
            links.settle()?;
        }
        // The reading has ended, so no later call waits for this stream.
        self.settle()?;
        self.park()
    }

    fn count(&self) -> usize {
        self.layers.len()
    }

    fn give(&self, rank: u32, index: usize) -> Result<(Part, Option<OwnedFd>)> {
        let (layer, plan) = self.place(index)?;
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        let memory = layer.stored.memory.filter(|_| plan.place != Place::Resident);
        let descriptor = memory.map(|own| self.device.export(own.backing, Protection::Read)).transpose();
        let digest = layer.digests.get(self.plan.group().rank as usize).copied().flatten();
        let part = Part {
            kind: UPDATE.part,
            // A plan has at most 4096 layers.
            layer: plan.layer as u32,
            bytes: memory.map_or(0, |own| own.bytes),
            digest: digest.unwrap_or_default(),
        };
        Ok((part, descriptor.map_err(named)?))
    }

    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let (layer, plan) = self.place(index)?;
        let (name, planned) = (plan.layer, self.plan.given(plan, rank));
        let part = Part::of((name, planned), (rank, UPDATE.part), bytes, descriptor.as_ref())?;
        let own = layer.digests.get(self.plan.group().rank as usize).copied().flatten();
        part.agrees(plan, own, rank)?;
        let named = |error: Error| error.with("rank", rank).with("layer", name as u64);
        let import = |descriptor| self.device.import_backing(descriptor, planned, Protection::Read);
        let backing = descriptor.map(import).transpose().map_err(named)?;
        if let Some(layer) = self.layers.get_mut(index) {
            let imported = backing.map(|backing| Mapped { backing, offset: 0, bytes: planned });
            layer.others.iter_mut().skip(rank as usize).take(1).for_each(|part| *part = imported);
            layer.digests.iter_mut().skip(rank as usize).take(1).for_each(|own| *own = Some(part.digest));
        }
        Ok(())
    }
}
