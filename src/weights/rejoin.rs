//! The parts of a rank that has come back, in the place of those that its last process gave.
//!
//! A pull reads another rank's part through a range of this device, and a captured pull holds that range's addresses.
//! So the memory of the new process is mapped behind the same addresses, part by part as they arrive, and what the old
//! one gave is given back. The system frees the dead process's memory when the last rank has given its part back.
//!
//! **No mixture.** The new process announced the content of the old one ([`Links::readmit`]), and each part has the
//! digest of the part that it replaces. So the bytes of a layer are the same before, after and between: where a part
//! is refused, the old mapping stays and is right, and layers may read from the old and from the new memory. What lies
//! in the new memory is that rank's word, as at the start; [`Windows::verify`] reads it.
//!
//! **Replicas** ([`super::replicas`]) are dropped when all parts are there: the new process holds none, and knows of
//! none. Until then other parts are read as before, also around ranks that ended. While another rank is lost, or not
//! attached again, only those go that the rank held or owned: the others may be what is left of that rank's parts. No
//! change is shared before it is attached, and with the last rank the last replicas go. So each rank that has
//! outlived one that ended begins the next change without any.
//!
//! **The other side** calls [`Windows::share`], or this as well if it was only stopped. The messages are the same.
//!
//! **What it does not do.** It neither waits for pulls nor orders any: [`super::Ring`] does.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::plan::Source;
use super::window::Windows;
use crate::device::Mapped;
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::Links;

const OPERATION: &str = "attach a rank again";

impl Windows {
    /// Gives this rank's parts to `rank`, which has come back ([`Links::readmit`]), takes its parts, and maps them
    /// where those of its last process were. Blocks for at most `at_most`. All addresses stay, also those that
    /// captured pulls hold. [`Links::event`] must not be called between the two: it would return the rank's first
    /// part. No pull that reads the rank's parts may be enqueued or run, and none at all where there are replicas. At
    /// the end they are dropped, all of them once no other rank is lost or waits to be attached
    /// ([`Windows::drop_replicas`]), before that those that the rank held and those of its parts. Several ranks that
    /// came back are taken one after another, the lowest first, so that ranks that wait for each other wait in one
    /// order. Under [`Source::Host`] nothing is shared: the rank counts as there again, and nothing else happens.
    ///
    /// Let `at_most` be at least [`Limits::hello`](crate::peer::Limits::hello), as for [`Windows::share`]: where
    /// several ranks died at once, a new process gives its parts only when it has met all. A call that is over before
    /// ends the session. The process takes the second such end for a refusal, and its [`Links::meet`] ends with an
    /// error.
    ///
    /// # Errors
    /// As [`Windows::share`], and those of [`crate::device::Device::remap`] with rank and layer; [`Kind::Corrupt`] for
    /// a part that is not the one of before; [`Kind::InvalidState`] before the parts were shared, and for a rank that
    /// has not come back; [`Kind::Busy`] while a change of replicas is there, and the errors of what a dropped one has
    /// left; those of [`Windows::drop_replicas`]; the error of a layer that cannot be used.
    ///
    /// An error after something was said to the rank ends the session with it: it is lost again, and can come back
    /// again. Each of its parts is mapped as before or anew then, and the bytes of both are the same; a part that is
    /// anew is read from that rank alone, until [`super::Ring::reroute`] is called again. Replicas stay, but for layers
    /// whose drop has succeeded. Where a device has failed, every later call for the layer returns that error.
    pub fn reattach(&mut self, rank: u32, links: &mut Links, at_most: Duration) -> Result<()> {
        let group = self.plan.group();
        let wrong = |kind, place| Err(Error::new(kind, OPERATION).at(place).with("rank", rank));
        if rank == group.rank || rank >= group.ranks {
            return wrong(Kind::OutOfRange, "no other rank of the group");
        }
        let Some((digests, content)) = self.content.clone().filter(|_| self.shared) else {
            return wrong(Kind::InvalidState, "weights whose parts were not shared");
        };
        let shares = self.plan.source() != Source::Host;
        let own = links.own();
        if (own.group, own.rank, own.plan, own.content) != (group.id, group.rank, self.plan.digest(), content)
        {
            return wrong(Kind::InvalidConfig, "sessions that began with another hello");
        }
        if shares {
            // What such a layer maps may be of another version than its digest says.
            (0..self.windows.len()).try_for_each(|ordinal| self.usable(ordinal))?;
            self.changes_nothing().map_err(|error| error.with("rank", rank))?;
        }
        if !links.attach(rank) {
            let lost = links.lost().find(|(lost, _)| *lost == rank).map(|(_, error)| error.clone());
            return lost.map_or_else(|| wrong(Kind::InvalidState, "a rank that has not come back"), Err);
        }
        if !shares {
            return Ok(());
        }
        // What kept this rank alive stays until the other one is there.
        let attached = self.exchange(links, &[rank], digests, at_most);
        let attached = attached.and_then(|()| self.drop_replicas_of(rank, &links.absent()));
        links.put_back();
        attached.map_err(|error| links.lose(rank, error))
    }

    /// Maps the memory of another rank's part, at the addresses of the part that it gave before, if it did.
    pub(super) fn map_part(
        &mut self,
        ordinal: usize,
        rank: u32,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<()> {
        let backing = self.device.import_backing(descriptor, bytes, Protection::Read)?;
        let new = Mapped { backing, offset: 0, bytes };
        let (_, window) = self.at(ordinal)?;
        let shown = match window.parts.get(rank as usize).copied().flatten() {
            None => self.device.range(&[new], Protection::Read),
            Some(part) => self.device.remap(part, &[new]).map(|()| part),
        };
        let shown = match shown {
            Ok(shown) => shown,
            Err(error) if error.kind() == Kind::DeviceFailed => return Err(self.broken(ordinal, error)),
            Err(error) => return self.device.give_back(backing).and(Err(error)),
        };
        let Some(window) = self.windows.get_mut(ordinal) else { return Ok(()) };
        let mut places = window.parts.iter_mut().zip(&mut window.imported);
        let Some((part, imported)) = places.nth(rank as usize) else { return Ok(()) };
        *part = Some(shown);
        // It maps no replicas any more.
        window.sources.iter_mut().skip(rank as usize).take(1).for_each(Vec::clear);
        match imported.replace(new) {
            None => Ok(()),
            Some(old) => self.device.give_back(old.backing),
        }
    }
}
