//! The border at which all ranks take a new version or none does, and what is mapped anew then.
//!
//! What can be refused comes before a rank says that it is ready: from then on the others may commit, and it follows.
//! What is left is the mapping. A mapping that is refused leaves its layer unusable, never half new.

use std::time::{Duration, Instant};

use super::decision::{Ballot, Decision, Look};
use super::version::{OPERATION, Renewed, Shared, State, Update};
use crate::device::{Mapped, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::{self, Faults};
use crate::peer::{Digest, Links, Mark};
use crate::sync::Arc;
use crate::weights::fill::content;
use crate::weights::spares::Parked;
use crate::weights::taken::give_back;
use crate::weights::window::Windows;

/// How long a rank waits before it looks again whether the others are ready.
const PAUSE: Duration = Duration::from_millis(1);

/// A place between two steps.
#[derive(Clone, Copy, Debug)]
pub struct Border {
    /// A number of this border, such as that of the next step, the same on all ranks. Its lower 63 bits count.
    pub step: u64,
    /// A stream that is ordered after all work of the steps before.
    pub stream: Stream,
    /// How long to wait for the other ranks.
    pub at_most: Duration,
}

/// What became of an update, on all ranks of the group alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every rank has the new version, or will have it before its next step.
    Committed,
    /// Every rank keeps the old version; why, as far as this rank knows. The update's memory is given back.
    Aborted(Error),
}

/// A rank's part in the decision of all.
struct Vote<'a> {
    ballot: &'a Ballot<Shared>,
    links: &'a mut Links,
    /// The sessions as they were when the parts were shared.
    shared: &'a Mark,
    rank: u32,
    faults: &'a dyn Faults,
}

impl Vote<'_> {
    /// Waits for what all ranks decide, and serves the sessions meanwhile.
    fn decide(&mut self, border: &Border) -> Result<Outcome> {
        let start = Instant::now();
        // Before this rank is ready: no rank commits without it.
        let mut broken = self.unbroken().err();
        if broken.is_none() {
            self.ballot.ready(self.rank, border.step);
        }
        let wrong = |kind, what: &'static str| Error::new(kind, OPERATION).at(what);
        let strange = |value| {
            wrong(Kind::Corrupt, "a decision that no rank writes")
                .with("value", value)
                .hint("end all ranks of the group: they may have different versions")
        };
        let other = || wrong(Kind::Cancelled, "another rank has aborted");
        loop {
            let why = match broken.take() {
                Some(error) => error,
                None => match self.ballot.look(border.step) {
                    Look::Decided(Decision::Committed) => return Ok(Outcome::Committed),
                    Look::Decided(Decision::Aborted) => return Ok(Outcome::Aborted(other())),
                    Look::Strange(value) => return Err(strange(value)),
                    Look::Differs(rank, step) => wrong(Kind::InvalidState, "a rank at another border")
                        .with("rank", rank)
                        .with("step", step)
                        .with("own", border.step),
                    Look::Waits(rank) if start.elapsed() >= border.at_most => {
                        wrong(Kind::TimedOut, "a rank that is not ready").with("rank", rank)
                    }
                    Look::Waits(_) => {
                        broken = self.served().err();
                        continue;
                    }
                },
            };
            // Another rank may have decided meanwhile.
            return match self.ballot.abort() {
                Look::Decided(Decision::Committed) => Ok(Outcome::Committed),
                Look::Strange(value) => Err(strange(value)),
                _ => Ok(Outcome::Aborted(why)),
            };
        }
    }

    /// Checks that no rank was lost since the parts were shared, also none that has come back: its new process has the
    /// old version, and what the old one said of being ready says nothing of it.
    fn unbroken(&mut self) -> Result<()> {
        self.links.settle()?;
        if let Some((_, error)) = self.links.lost().next() {
            return Err(error.clone());
        }
        match self.links.lost_since(self.shared) {
            None => Ok(()),
            Some(rank) => Err(Error::new(Kind::PeerLost, OPERATION)
                .at("a rank that has ended and come back since the parts were shared")
                .with("rank", rank)
                .hint("begin an update of a higher version")),
        }
    }

    /// Serves the sessions for a moment.
    fn served(&mut self) -> Result<()> {
        os::wait(&[], PAUSE, self.faults)?;
        self.unbroken()
    }
}

impl Windows {
    /// Takes an update's new version, at a border at which all ranks do, or at which none does: then the old version
    /// stays, on every rank. Waits until all ranks are there, for at most `border.at_most`. No work that is enqueued or
    /// runs may use a window, except on `border.stream`, which it waits for. Addresses and captured graphs hold. What
    /// buffers hold is of the old version: each layer has to be pulled before it is used again. A layer that was made
    /// resident is whole.
    ///
    /// # Errors
    /// Before this rank is ready, so that nothing is decided and it may be called again: [`Kind::InvalidState`] for an
    /// update that was not shared, or of other windows or sessions; [`Kind::Busy`] for a stream that is being captured;
    /// the error of a layer that cannot be used; those of [`crate::device::Device::synchronize`].
    ///
    /// After the ranks have committed: those of [`crate::device::Device::remap`] and of a pull, with the layer, for
    /// which every later call returns that error; this rank cannot go on with the group and is started again. Those of
    /// [`crate::device::Device::give_back`]; the new version is in place then, and memory stays with the device.
    /// [`Kind::Corrupt`] if another process has written nonsense into the decision: then no layer of the update can be
    /// used, because it is not known what the others have. [`Windows::version`] tells what a layer shows.
    pub fn commit(&mut self, update: &mut Update, links: &mut Links, border: Border) -> Result<Outcome> {
        let wrong = |what: &'static str| Err(Error::new(Kind::InvalidState, OPERATION).at(what));
        let voted = update.ballot.as_ref().zip(update.shared.as_ref());
        let Some((ballot, shared)) = voted.filter(|_| update.state == State::Shared) else {
            return wrong("an update that was not shared, or is over");
        };
        if !links.made(shared) {
            return wrong("other sessions than the update was shared over");
        }
        if !update.user.as_ref().is_some_and(|user| self.spares.are_lent_to(user)) {
            return wrong("an update of other windows");
        }
        if self.device.is_capturing(border.stream)? {
            let what = "weights cannot be remapped on a stream that is captured";
            return Err(Error::new(Kind::Busy, OPERATION).at(what));
        }
        update.layers.iter().try_for_each(|layer| self.usable(layer.ordinal))?;
        self.staging.drain(&*self.device, border.stream)?;
        // Fills and readings of the update have ended when it was shared and verified.
        let (rank, faults) = (self.plan.group().rank, &*self.faults);
        let decided = Vote { ballot, links: &mut *links, shared, rank, faults }.decide(&border);
        links.put_back();
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
        update.state = State::Over;
        (update.ballot, update.user) = (None, None);
        let (mut result, mut contents) = (Ok(()), Vec::new());
        for layer in std::mem::take(&mut update.layers) {
            let (ordinal, own) = (layer.ordinal, layer.digests.get(self.plan.group().rank as usize));
            contents.push((ordinal, own.copied().flatten()));
            let flipped = match self.show(&layer, stream) {
                Ok(()) => self.keep(layer, update.version, update.parked),
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
        result
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
        let Some(window) = self.windows.get_mut(layer.ordinal) else { return Ok(()) };
        let old = std::mem::replace(&mut window.stored, layer.stored);
        let others = std::mem::replace(&mut window.imported, layer.others);
        (window.version, window.digests) = (version, layer.digests);
        // Where the first version was written; nothing is written there any more.
        let was = old.slice.map_or(Ok(()), |slice| parked.park(&*device, slice));
        let held: Vec<Mapped> = old.memory.into_iter().chain(others.into_iter().flatten()).collect();
        was.and(give_back(&*device, &held))
    }

    /// Notes the digests of this rank's new parts, so that its hello is that of what it has.
    fn note_contents(&mut self, new: &[(usize, Option<Digest>)]) {
        let sharded = self.sharded();
        let Some((layers, all)) = &mut self.content else { return };
        for (ordinal, own) in sharded.iter().zip(&mut *layers) {
            let found = new.iter().find(|(one, _)| one == ordinal).and_then(|(_, digest)| *digest);
            *own = found.unwrap_or(*own);
        }
        *all = content(layers);
    }

    /// What a rank holds, as it says.
    fn content_of(&self, rank: u32) -> Digest {
        let own = self.content.as_ref().filter(|_| rank == self.plan.group().rank);
        if let Some((_, all)) = own {
            return *all;
        }
        let windows = self.sharded().into_iter().filter_map(|ordinal| self.windows.get(ordinal));
        let digests = windows.map(|window| window.digests.get(rank as usize).copied().flatten());
        content(&digests.map(Option::unwrap_or_default).collect::<Vec<_>>())
    }
}
