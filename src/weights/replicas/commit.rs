//! The border at which all ranks have the new replicas or none has, and what is mapped anew then, or without others.

use super::change::Replication;
use super::set::{self, Held, Segment};
use crate::device::Mapped;
use crate::error::{Error, Kind, Result};
use crate::peer::Links;
use crate::weights::exchange::REPLICAS;
use crate::weights::taken::give_back;
use crate::weights::update::pact::State;
use crate::weights::update::{Border, Outcome};
use crate::weights::window::Windows;

/// The parts that segments are of.
fn parts(of: &[Held]) -> Vec<(usize, u32)> {
    let mut parts: Vec<(usize, u32)> =
        of.iter().map(|held| (held.segment.ordinal, held.segment.owner)).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}

impl Windows {
    /// Takes a change of the replicas, at a border at which all ranks do, or at which none does: then the old ones
    /// stay, on every rank. Otherwise as [`Windows::commit`]; what buffers hold stays right, because no byte changes.
    ///
    /// # Errors
    /// As [`Windows::commit`]: before this rank is ready those of a call that was wrong; after the ranks have committed
    /// those of [`crate::device::Device::remap`], with the layer, for which every later call returns that error, and
    /// those of [`crate::device::Device::give_back`]; [`Kind::Corrupt`] for a decision that no rank writes: then no
    /// layer whose replicas change can be used.
    pub fn commit_replicas(
        &mut self,
        change: &mut Replication,
        links: &mut Links,
        border: Border,
    ) -> Result<Outcome> {
        let gone = self
            .replicas
            .iter()
            .map(|held| held.segment)
            .filter(|it| change.after.binary_search(it).is_err());
        let mut parts: Vec<(usize, u32)> = gone
            .chain(change.gained.iter().map(|gained| gained.segment))
            .map(|segment| (segment.ordinal, segment.owner))
            .collect();
        parts.sort_unstable();
        parts.dedup();
        // Before this rank is ready: what it cannot take is taken by no rank.
        if change.gained.iter().any(|gained| gained.memory.is_none()) && change.pact.state == State::Shared {
            return Err(change.pact.error(Kind::Internal, "a replica without memory"));
        }
        match self.decided(&change.pact, parts.iter().map(|part| part.0), links, &border)? {
            Ok(Outcome::Committed) => {
                self.take_replicas(change, &parts)?;
                Ok(Outcome::Committed)
            }
            Ok(Outcome::Aborted(why)) => {
                // What is refused stays with the device; that nothing was taken says more.
                let _ = change.abort();
                Ok(Outcome::Aborted(why))
            }
            Err(error) => {
                parts.iter().for_each(|(ordinal, _)| drop(self.broken(*ordinal, error.clone())));
                let _ = change.abort();
                Err(error)
            }
        }
    }

    /// Maps the parts that change, and gives back what is gone. Returns the first error.
    fn take_replicas(&mut self, change: &mut Replication, parts: &[(usize, u32)]) -> Result<()> {
        change.pact.committed();
        let gained = std::mem::take(&mut change.gained).into_iter();
        self.replicas.extend(gained.filter_map(|it| Some(Held { segment: it.segment, memory: it.memory? })));
        let after = &change.after;
        let (mut kept, gone): (Vec<Held>, Vec<Held>) =
            self.replicas.drain(..).partition(|held| after.binary_search(&held.segment).is_ok());
        kept.sort_unstable_by_key(|held| held.segment);
        self.replicas = kept;
        let mut result = Ok(());
        for (ordinal, owner) in parts.iter().copied() {
            let shown = self.usable(ordinal).and_then(|()| self.show_part(ordinal, owner, &[]));
            result = result.and(shown.map_err(|error| {
                let error = self.named(ordinal, error);
                self.broken(ordinal, error)
            }));
        }
        let gone: Vec<Mapped> = gone.into_iter().map(|held| held.memory).collect();
        result.and(give_back(&*self.device, &gone)).and(change.pact.beside.end([]))
    }

    /// An error of a layer, with the layer.
    fn named(&self, ordinal: usize, error: Error) -> Error {
        let layer = self.plan.layers().get(ordinal).map(|plan| plan.layer as u64);
        match (error.number("layer"), layer) {
            (None, Some(layer)) => error.with("layer", layer),
            _ => error,
        }
    }

    /// The error of a part that was refused and maps what it mapped before. A device that has failed may map anything.
    fn refused_part(&mut self, ordinal: usize, error: Error) -> Error {
        let error = self.named(ordinal, error);
        if error.kind() == Kind::DeviceFailed { self.broken(ordinal, error) } else { error }
    }

    /// Maps another rank's part as this rank reads it with the replicas that there are, without ranks that are `lost`.
    fn show_part(&mut self, ordinal: usize, owner: u32, lost: &[u32]) -> Result<()> {
        let (_, window) = self.at(ordinal)?;
        let at = owner as usize;
        let shown = window.parts.get(at).copied().flatten().zip(window.imported.get(at).copied().flatten());
        let Some((part, memory)) = shown else { return Ok(()) };
        let reads = set::reads(&self.plan, (ordinal, owner), memory, &self.replicas, lost);
        let pieces: Vec<Mapped> = reads.iter().map(|read| read.memory).collect();
        self.device.remap(part, &pieces)?;
        if let Some(sources) = self.windows.get_mut(ordinal).and_then(|window| window.sources.get_mut(at)) {
            *sources = reads.iter().map(|read| read.from).collect();
        }
        Ok(())
    }

    /// Maps the memory of owners again, on this rank alone, and gives back all replicas: its own, and what it imported.
    /// For ranks of which one has replicas that another has not, and for a group that needs the memory. No work that is
    /// enqueued or runs may use a window. The others go on reading what this rank held, and its device has the memory
    /// again when the last of them has given it back. Until all ranks have dropped them it is free by no byte, though
    /// [`Windows::device_bytes`] and budgets count it no longer. Before the next change all ranks do so.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a change is there; the errors of what a dropped one has left, which is done first
    /// ([`super::Replication::abort`]); those of [`crate::device::Device::remap`], with the layer. A layer whose
    /// parts are not all mapped anew keeps its replicas; where a device has failed, every later call for it returns
    /// that error. Those of [`crate::device::Device::give_back`]; memory stays with the device then.
    pub fn drop_replicas(&mut self) -> Result<()> {
        self.changes_nothing()?;
        self.drop_some(|_| true, &[])
    }

    /// Drops replicas when `rank` was attached again, whose new process has none: all of them, or, while other ranks
    /// are `missing`, what the old one held and what there is of its parts. Others may be what is left of the parts of
    /// a missing rank.
    pub(in crate::weights) fn drop_replicas_of(&mut self, rank: u32, missing: &[u32]) -> Result<()> {
        let is_of = |segment: Segment| [segment.owner, segment.holder].contains(&rank);
        self.drop_some(|segment| missing.is_empty() || is_of(segment), missing)
    }

    /// Gives back replicas, where the other sources of their parts can be mapped, without ranks that are `lost`.
    fn drop_some(&mut self, goes: impl Fn(Segment) -> bool, lost: &[u32]) -> Result<()> {
        let (gone, stay): (Vec<Held>, Vec<Held>) =
            self.replicas.drain(..).partition(|held| goes(held.segment));
        self.replicas = stay;
        let (mut result, mut kept) = (Ok(()), Vec::new());
        for of_layer in parts(&gone).chunk_by(|one, next| one.0 == next.0) {
            let shown = of_layer.iter().try_for_each(|(ordinal, owner)| {
                self.usable(*ordinal)
                    .and_then(|()| self.show_part(*ordinal, *owner, lost))
                    .map_err(|error| self.refused_part(*ordinal, error))
            });
            let own = of_layer.first().map_or(&[][..], |part| set::of_layer(&gone, part.0)).iter().copied();
            let dropped = match shown {
                Ok(()) => give_back(&*self.device, &own.map(|held| held.memory).collect::<Vec<_>>()),
                Err(error) => {
                    kept.extend(own);
                    Err(error)
                }
            };
            result = result.and(dropped);
        }
        self.replicas.extend(kept);
        self.replicas.sort_unstable_by_key(|held| held.segment);
        result
    }

    /// Checks that no change of the replicas is there.
    pub(in crate::weights) fn changes_nothing(&self) -> Result<()> {
        if self.spares.replicate_nothing(&*self.device)? {
            return Ok(());
        }
        Err(Error::new(Kind::Busy, REPLICAS.operation)
            .at("a change of replicas of these windows")
            .hint("drop or commit it first"))
    }

    /// Reads from holders and owners that are not `lost`, where there are such. On this rank alone. No work that is
    /// enqueued or runs may use a window.
    pub(in crate::weights) fn reroute(&mut self, lost: &[u32]) -> Result<()> {
        self.changes_nothing()?;
        for (ordinal, owner) in parts(&self.replicas) {
            let shown = self.usable(ordinal).and_then(|()| self.show_part(ordinal, owner, lost));
            shown.map_err(|error| self.refused_part(ordinal, error))?;
        }
        Ok(())
    }

    /// Gives up the replicas of a layer whose parts are mapped without them. Returns their memory.
    pub(in crate::weights) fn without_replicas(&mut self, ordinal: usize) -> Vec<Mapped> {
        if let Some(window) = self.windows.get_mut(ordinal) {
            window.sources.iter_mut().for_each(Vec::clear);
        }
        let of_layer = |held: &mut Held| held.segment.ordinal == ordinal;
        self.replicas.extract_if(.., of_layer).map(|held| held.memory).collect()
    }
}
