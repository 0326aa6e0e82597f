//! The parts of a layer, given to the other ranks and taken from them.
//!
//! Over each session both sides send one message for each layer, in their order ([`super::exchange`]). A part's
//! descriptor comes with its message. Others may only read it, and it is closed when it has been sent. What lies in the
//! memory is the other rank's word; [`Windows::verify`] reads it.
//!
//! **A layer that the plan keeps resident** has no part. Its message has the digest of the whole, which has to be this
//! rank's own: otherwise ranks would compute with different weights, and no pull would show it.
//!
//! **A rank that is lost meanwhile** does not end the exchange with the others, which wait for this rank's parts in
//! turn. If it has not given all, its error comes when they have theirs; otherwise [`Links::event`] tells. When it has
//! come back, the rest is between the two ([`super::rejoin`]).
//!
//! **Open files.** On the host device a process holds one file for each part that it took, for each part of its own,
//! for each buffer, and for each session: with n ranks and l sharded layers about n x l + n. 16 ranks and 60 sharded
//! layers come to about 980, near the usual limit of 1024 (`ulimit -n`). An update of all layers holds as many files of
//! parts again until its commit. The CUDA device keeps no file of a part.

use std::os::fd::OwnedFd;
use std::time::Duration;

use super::exchange::{OPERATION, PART, Part, Parts, exchange};
use super::fill::content;
use super::plan::{Place, Source};
use super::window::{Windows, refused};
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::{Digest, Links};

/// The exchange of parts in use.
struct Sharing<'a> {
    windows: &'a mut Windows,
    /// By ordinal: the digest of what this rank filled.
    digests: Vec<Digest>,
}

impl Windows {
    /// Gives this rank's parts to all others and takes theirs, over sessions whose hello was [`Windows::hello`]'s. All
    /// ranks call it. Blocks for at most `at_most`. From then on every layer can be pulled, and none can be filled.
    /// Under [`Source::Host`] nothing is shared, no session is used, and nothing is compared: no rank reads another's.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] and [`Kind::PeerLost`] with the rank; [`Kind::BadFormat`] for a rank that gives other parts
    /// than the plan's, with rank and layer; [`Kind::Corrupt`] for one whose parts are not those of its hello, and
    /// with rank and layer for one that has other bytes than this rank in a layer that the plan keeps resident;
    /// [`Kind::InvalidState`] for weights that are not filled or were shared before; [`Kind::InvalidConfig`] for
    /// sessions of another group or plan; those of [`crate::device::Device::export`],
    /// [`crate::device::Device::import_backing`] and [`crate::device::Device::range`], with rank and layer;
    /// [`Kind::OsRefused`] where this process may open no further file; the error of a rank that the sessions have
    /// lost, of one that is lost meanwhile when the exchange with the others has ended. Layers whose parts are missing
    /// then cannot be pulled; the sessions with ranks that were not lost go on.
    pub fn share(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        if self.shared {
            return Err(Error::new(Kind::InvalidState, OPERATION).at("parts that were shared before"));
        }
        let (digests, _) = self.contents(stream)?;
        if self.plan.source() == Source::Host || self.plan.group().ranks == 1 {
            self.shared = true;
            return Ok(());
        }
        let own = self.hello(links.own().geometry, stream)?;
        if own != *links.own() {
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("sessions that began with another hello")
                .with("rank", own.rank)
                .hint("begin the sessions with the hello of these windows"));
        }
        if let Some((_, error)) = links.lost().next() {
            return Err(error.clone());
        }
        self.shared = true;
        let others: Vec<u32> = (0..own.ranks).filter(|rank| *rank != own.rank).collect();
        let shared = self.exchange(links, &others, digests, at_most);
        links.put_back();
        shared
    }

    /// Gives `ranks` all parts, whose digests these are, and takes theirs.
    pub(super) fn exchange(
        &mut self,
        links: &mut Links,
        ranks: &[u32],
        digests: Vec<Digest>,
        at_most: Duration,
    ) -> Result<()> {
        for rank in ranks {
            links.attach(*rank);
        }
        exchange(&mut Sharing { windows: self, digests }, links, ranks, at_most)
    }
}

impl Parts for Sharing<'_> {
    fn count(&self) -> usize {
        self.digests.len()
    }

    fn outlives_a_rank(&self) -> bool {
        true
    }

    fn give(&self, links: &mut Links, rank: u32, ordinal: usize) -> Result<()> {
        let (plan, window) = self.windows.at(ordinal)?;
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        let memory = window.stored.memory.filter(|_| plan.place != Place::Resident);
        let device = &self.windows.device;
        let descriptor = memory.map(|own| device.export(own.backing, Protection::Read)).transpose();
        let part = Part {
            kind: PART,
            // A plan has at most 4096 layers.
            layer: plan.layer as u32,
            bytes: memory.map_or(0, |own| own.bytes),
            digest: self.digests.get(ordinal).copied().unwrap_or_default(),
        };
        links.send(rank, &part.encode(), descriptor.map_err(named)?)
    }

    fn take(&mut self, rank: u32, ordinal: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let (plan, _) = self.windows.at(ordinal)?;
        let (layer, planned) = (plan.layer, self.windows.plan.given(plan, rank));
        let part = Part::of((layer, planned), (rank, PART), bytes, descriptor.as_ref())?;
        let window = self.windows.windows.get(ordinal);
        let known = window.and_then(|window| window.digests.get(rank as usize).copied()).flatten();
        if known.is_some_and(|known| known != part.digest) {
            return Err(refused(Kind::Corrupt, layer, "another part than the rank gave before")
                .with("rank", rank)
                .hint("start a rank again with the weights that its group uses now"));
        }
        part.agrees(plan, self.digests.get(ordinal).copied(), rank)?;
        if let Some(descriptor) = descriptor {
            let named = |error: Error| error.with("rank", rank).with("layer", layer as u64);
            self.windows.map_part(ordinal, rank, descriptor, planned).map_err(named)?;
        }
        if let Some(window) = self.windows.windows.get_mut(ordinal) {
            let digests = window.digests.iter_mut().skip(rank as usize).take(1);
            digests.for_each(|digest| *digest = Some(part.digest));
        }
        self.windows.connect(ordinal)
    }

    /// Checks that a rank gave what its hello announced.
    fn taken(&self, links: &Links, rank: u32) -> Result<()> {
        let theirs = links.link(rank).and_then(|link| link.theirs());
        let digests = self.windows.windows.iter().map(|window| window.digests.get(rank as usize).copied());
        let got: Vec<Digest> = digests.filter_map(Option::flatten).collect();
        if theirs.is_some_and(|theirs| theirs.content == content(&got)) {
            return Ok(());
        }
        Err(Error::new(Kind::Corrupt, OPERATION)
            .at("a rank that gave other parts than its hello announced")
            .with("rank", rank))
    }
}
