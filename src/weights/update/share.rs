//! The new parts, given to the other ranks and taken from them.
//!
//! Each rank first says which version of which layers it has, and rank 0 gives the memory of the decision with that.
//! Then come the parts of the sharded layers, in their order ([`crate::weights::exchange`]). What other ranks give is
//! imported, not mapped, until the flip; [`Update::verify_layer`] maps it for as long as it reads it.
//!
//! **Failures.** A rank that fails says so to the others, which fail too. What was on its way then is of a version that
//! is never begun again, so the next exchange drops it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use super::decision::{self, Ballot};
use super::version::{OPERATION, Shared, State, Update};
use crate::device::{Mapped, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::{Protection, Words};
use crate::peer::{Digest, Event, Links};
use crate::sync::Arc;
use crate::weights::exchange::{BEGINS, BYTES, FAILS, Heed, Part, Parts, RENEWED, exchange, of_update};
use crate::weights::fill::{self, Fills};
use crate::weights::plan::{LayerPlan, Place};
use crate::weights::window::refused;

/// How long a rank that fails tries to say so.
const LAST_WORD: Duration = Duration::from_secs(1);

/// A message of an update as its part and its version.
fn split(bytes: &[u8]) -> Option<(&[u8], u32)> {
    let (part, version) = bytes.split_last_chunk()?;
    (part.len() == BYTES).then_some((part, u32::from_le_bytes(*version)))
}

/// Checks that no rank is lost, and that none has come back and was not attached again.
fn all_there(links: &mut Links) -> Result<()> {
    links.settle()?;
    if let Some((_, error)) = links.lost().next() {
        return Err(error.clone());
    }
    match links.unattached() {
        None => Ok(()),
        Some(rank) => Err(Error::new(Kind::InvalidState, OPERATION)
            .at("a rank that has come back and was not attached again")
            .with("rank", rank)
            .hint("call `reattach` first")),
    }
}

impl Update {
    /// Whether an event of [`Links::event`] belongs to an update. A rank that is still filling may get what a faster
    /// one says; it keeps that with [`Links::set_aside`], and [`Update::share`] takes it.
    pub fn concerns(event: &Event<OwnedFd>) -> bool {
        matches!(event, Event::Message { bytes, .. } if of_update(bytes).is_some())
    }

    /// The places in the update of its sharded layers.
    fn sharded(&self) -> Vec<(usize, &LayerPlan)> {
        let plans = self.layers.iter().map(|layer| self.plan.layers().get(layer.ordinal));
        let sharded = |plan: &&LayerPlan| plan.place != Place::Resident;
        plans.enumerate().filter_map(|(at, plan)| Some((at, plan.filter(sharded)?))).collect()
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
    /// [`Kind::PeerLost`] and [`Kind::BadFormat`] with the rank; [`Kind::Cancelled`] for a rank whose own call has
    /// failed; those of [`crate::device::Device::export`] and [`crate::device::Device::import_backing`], with rank and
    /// layer.
    pub fn share(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        if self.state != State::Filling {
            return Err(Error::new(Kind::InvalidState, OPERATION).at("an update that was shared before"));
        }
        self.is_filled()?;
        let (own, group) = (*links.own(), self.plan.group());
        if (own.group, own.rank, own.ranks, own.plan)
            != (group.id, group.rank, group.ranks, self.plan.digest())
        {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("sessions of another group or plan")
                .with("rank", own.rank));
        }
        let all = all_there(links);
        let shared = match &all {
            // Nothing was said: a rank that waits to be attached would take it for a part.
            Err(_) => all,
            Ok(()) => {
                self.shared = Some(links.mark());
                self.state = State::Sharing;
                let shared = self.exchanged(links, stream, at_most);
                match shared {
                    Ok(()) => self.state = State::Shared,
                    Err(_) => self.fails(links),
                }
                shared
            }
        };
        links.put_back();
        shared
    }

    /// Tells the others that this rank cannot take the version.
    fn fails(&self, links: &mut Links) {
        if let Some(ballot) = &self.ballot {
            ballot.abort();
        }
        let (others, last) = (self.others(), self.said(&Part { kind: FAILS, ..self.begins() }));
        for rank in &others {
            // One that was lost is told by that.
            let _ = links.send(*rank, &last, None);
        }
        let _ = links.flush(&others, LAST_WORD);
    }

    /// A message.
    fn said(&self, part: &Part) -> Vec<u8> {
        [&part.encode()[..], &self.version.to_le_bytes()].concat()
    }

    fn exchanged(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        let rank = self.plan.group().rank as usize;
        self.drain(stream)?;
        self.settle()?;
        let sharded: Vec<(usize, LayerPlan)> =
            self.sharded().into_iter().map(|(at, plan)| (at, plan.clone())).collect();
        for (at, plan) in sharded {
            let Some(layer) = self.layers.get(at) else { continue };
            let (pages, slice) = (layer.stored.pages.clone(), layer.stored.slice);
            let found = fill::digest(self, &plan, &pages, slice, stream)?;
            let own = self.layers.get_mut(at).and_then(|layer| layer.digests.get_mut(rank));
            own.into_iter().for_each(|own| *own = Some(found));
            // The others hold a rank that says nothing for lost.
            links.settle()?;
        }
        self.park()?;
        if rank == 0 {
            let words = Words::new(decision::words(self.plan.group().ranks), &*self.faults)?;
            self.ballot = Some(Ballot::new(Shared(words), self.plan.group().ranks));
        }
        // What others said before is taken first.
        links.put_back();
        let others = self.others();
        exchange(self, links, &others, at_most)
    }

    /// The other ranks of the group.
    fn others(&self) -> Vec<u32> {
        let group = self.plan.group();
        (0..group.ranks).filter(|rank| *rank != group.rank).collect()
    }

    /// Version and layers, as a rank says them first.
    fn begins(&self) -> Part {
        let mut hash = blake3::Hasher::new();
        for layer in &self.layers {
            hash.update(&(layer.ordinal as u64).to_le_bytes());
        }
        let digest: Digest = *hash.finalize().as_bytes();
        Part { kind: BEGINS, layer: 0, bytes: self.layers.len() as u64, digest }
    }

    /// Takes what a rank says first.
    fn began(&mut self, rank: u32, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let wrong = |kind, what: &'static str| Error::new(kind, OPERATION).at(what).with("rank", rank);
        let theirs = Part::decode(bytes, BEGINS)
            .filter(|_| descriptor.is_some() == (rank == 0))
            .ok_or_else(|| wrong(Kind::BadFormat, "a message that begins no update"))?;
        if theirs != self.begins() {
            return Err(wrong(Kind::InvalidConfig, "a rank that updates other layers")
                .hint("begin an update with the same version and layers on all ranks"));
        }
        if let Some(descriptor) = descriptor {
            let ranks = self.plan.group().ranks;
            let words = Words::adopt(descriptor, decision::words(ranks), &*self.faults)
                .map_err(|error| error.with("rank", rank))?;
            self.ballot = Some(Ballot::new(Shared(words), ranks));
        }
        Ok(())
    }

    /// Reads the new parts that the other ranks gave, as [`crate::weights::Windows::verify`] does those in use. Steps
    /// may go on. Blocks, and serves no session meanwhile.
    ///
    /// # Errors
    /// As [`Update::verify_layer`].
    pub fn verify(&mut self, stream: Stream) -> Result<()> {
        let layers: Vec<usize> = self.sharded().into_iter().map(|(_, plan)| plan.layer).collect();
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
        if self.state != State::Shared {
            return Err(refused(Kind::InvalidState, layer, "its new parts are not shared"));
        }
        let (plan, parts, digests) = (plan.clone(), renewed.others.clone(), renewed.digests.clone());
        let (device, parked) = (Arc::clone(&self.device), self.parked);
        for ((rank, part), said) in (0..).zip(parts).zip(digests) {
            let Some((part, reading)) = part.zip(self.reading) else { continue };
            let shown = parked.show(&*device, reading, part)?;
            let found = fill::digest(self, &plan, &plan.cut.part(rank), Some(shown), stream);
            // The memory must not be shown any longer when it is given back.
            self.settle()?;
            parked.park(&*device, reading)?;
            if said != Some(found?) {
                return Err(refused(Kind::Corrupt, layer, "another rank's new part is not what it filled")
                    .with("rank", rank)
                    .hint("drop the update and begin it again"));
            }
        }
        Ok(())
    }
}

impl Parts for Update {
    fn count(&self) -> usize {
        1 + self.sharded().len()
    }

    fn heed(&self, bytes: &[u8]) -> Heed {
        match (of_update(bytes), split(bytes)) {
            (None, _) => Heed::Keep,
            (_, Some((_, version))) if version < self.version => Heed::Drop,
            (_, Some((_, version))) if version > self.version => Heed::Later,
            _ => Heed::Take,
        }
    }

    fn give(&self, links: &mut Links, rank: u32, index: usize) -> Result<()> {
        let Some(place) = index.checked_sub(1) else {
            let own = self.ballot.as_ref().filter(|_| self.plan.group().rank == 0);
            let words = own.map(|ballot| ballot.memory().0.export(&*self.faults)).transpose()?;
            return links.send(rank, &self.said(&self.begins()), words);
        };
        let sharded = self.sharded();
        let found = sharded.get(place).and_then(|(at, plan)| Some((self.layers.get(*at)?, plan)));
        let Some((layer, plan)) = found else { return Ok(()) };
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        let memory = layer.stored.memory;
        let descriptor = memory.map(|own| self.device.export(own.backing, Protection::Read)).transpose();
        let digest = layer.digests.get(self.plan.group().rank as usize).copied().flatten();
        let part = Part {
            kind: RENEWED,
            // A plan has at most 4096 layers.
            layer: plan.layer as u32,
            bytes: memory.map_or(0, |own| own.bytes),
            digest: digest.unwrap_or_default(),
        };
        links.send(rank, &self.said(&part), descriptor.map_err(named)?)
    }

    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let wrong = |kind, what: &'static str| Error::new(kind, OPERATION).at(what).with("rank", rank);
        // Of this version, by `heed`, or no message of an update, which is nothing.
        let (bytes, _) = split(bytes).unwrap_or_default();
        if of_update(bytes) == Some(FAILS) {
            return Err(wrong(Kind::Cancelled, "a rank that cannot take the version"));
        }
        let Some(place) = index.checked_sub(1) else { return self.began(rank, bytes, descriptor) };
        let sharded = self.sharded();
        let Some((at, plan)) = sharded.get(place).copied() else { return Ok(()) };
        let given = descriptor.as_ref().map(AsFd::as_fd);
        let (part, planned) = Part::of(&self.plan, plan, (rank, RENEWED), bytes, given)?;
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        let import = |descriptor| self.device.import_backing(descriptor, planned, Protection::Read);
        let backing = descriptor.map(import).transpose().map_err(named)?;
        if let Some(layer) = self.layers.get_mut(at) {
            let imported = backing.map(|backing| Mapped { backing, offset: 0, bytes: planned });
            layer.others.iter_mut().skip(rank as usize).take(1).for_each(|part| *part = imported);
            layer.digests.iter_mut().skip(rank as usize).take(1).for_each(|own| *own = Some(part.digest));
        }
        Ok(())
    }
}
