//! The parts of a layer, given to the other ranks and taken from them.
//!
//! Over each session both sides send one message for each sharded layer, in the order of the layers, and the next one
//! only when the other side's last has arrived. So at most one descriptor is on its way in each direction: the system
//! limits those of a user, and the session those that wait. A message has 48 bytes; numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | 1: a part |
//! | 4 to 7 | layer of the model |
//! | 8 to 15 | bytes of the part, in whole granules; 0 if the rank owns none of the layer |
//! | 16 to 47 | BLAKE3 of what was filled ([`super::fill`]) |
//!
//! A part's descriptor comes with its message. Others may only read it, and it is closed when it has been sent.
//!
//! **The other ranks are not trusted** with sizes and orders: each is computed from the plan, and a message that says
//! otherwise is an error that names rank and layer. What lies in the memory is their word; [`Windows::verify`] reads
//! it. What a rank says when it has given all its parts is kept for later, up to a bound
//! ([`crate::peer`]).
//!
//! **A rank that is lost meanwhile** does not end the exchange with the others, which wait for this rank's parts in
//! turn. Its error comes when they have theirs. When it has come back, the rest is between the two ([`super::rejoin`]).
//!
//! **Open files.** On the host device a process holds one file for each part that it took, for each part of its own,
//! for each buffer, and for each session: with n ranks and l sharded layers about n x l + n. 16 ranks and 60 sharded
//! layers come to about 980, near the usual limit of 1024 (`ulimit -n`). The CUDA device keeps no file of a part.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::fill::content;
use super::plan::Source;
use super::window::{Windows, refused};
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::{Digest, Event, Links};

const OPERATION: &str = "share weights";
/// What a message is.
const PART: u32 = 1;
const BYTES: usize = 48;

/// What a rank says of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    layer: u32,
    bytes: u64,
    digest: Digest,
}

impl Part {
    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let parts: [&[u8]; 4] =
            [&PART.to_le_bytes(), &self.layer.to_le_bytes(), &self.bytes.to_le_bytes(), &self.digest];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Part> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let (kind, rest) = bytes.split_first_chunk()?;
        let (layer, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let digest = *rest.first_chunk()?;
        let part = Part { layer: u32::from_le_bytes(*layer), bytes: u64::from_le_bytes(*length), digest };
        (u32::from_le_bytes(*kind) == PART).then_some(part)
    }
}

/// How far the exchange with one rank is.
struct Progress {
    rank: u32,
    /// The digests of the parts that it gave.
    got: Vec<Digest>,
}

impl Windows {
    /// Gives this rank's parts to all others and takes theirs, over sessions whose hello was [`Windows::hello`]'s. All
    /// ranks call it. Blocks for at most `at_most`. From then on every layer can be pulled, and none can be filled.
    /// Under [`Source::Host`] nothing is shared and no session is used.
    ///
    /// # Errors
    /// [`Kind::TimedOut`] and [`Kind::PeerLost`] with the rank; [`Kind::BadFormat`] for a rank that gives other parts
    /// than the plan's, with rank and layer; [`Kind::Corrupt`] for one whose parts are not those of its hello;
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
        let shared = self.exchange(links, &others, &digests, at_most);
        links.put_back();
        shared
    }

    /// Gives `ranks` all parts and takes theirs. What other ranks say meanwhile is set aside, as is their loss.
    pub(super) fn exchange(
        &mut self,
        links: &mut Links,
        ranks: &[u32],
        digests: &[Digest],
        at_most: Duration,
    ) -> Result<()> {
        let (start, sharded) = (Instant::now(), self.sharded());
        let mut all: Vec<Progress> =
            ranks.iter().map(|rank| Progress { rank: *rank, got: Vec::new() }).collect();
        let mut lost = None;
        for rank in ranks {
            links.attach(*rank);
            if let Some(first) = sharded.first() {
                self.give(links, *rank, *first, digests, 0)?;
            }
        }
        while let Some(waits) = all.iter().find(|one| one.got.len() < sharded.len()).map(|one| one.rank) {
            let left = at_most.saturating_sub(start.elapsed());
            let (rank, event) = match links.event(left) {
                Ok(Some(event)) => event,
                Ok(None) => {
                    return Err(Error::new(Kind::TimedOut, OPERATION)
                        .at("a rank that gives no parts")
                        .with("rank", waits));
                }
                Err(error) => {
                    let Some(rank) = error.number("rank").and_then(|rank| u32::try_from(rank).ok()) else {
                        return Err(error);
                    };
                    all.retain(|one| one.rank != rank);
                    match lost {
                        None if ranks.contains(&rank) => lost = Some(error),
                        _ => links.set_loss_aside(rank, error),
                    }
                    continue;
                }
            };
            let progress = all.iter_mut().find(|one| one.rank == rank);
            let next = progress.as_ref().and_then(|it| Some((it.got.len(), sharded.get(it.got.len())?)));
            let (Some(progress), Some((next, ordinal))) = (progress, next) else {
                // It has given all, or is not asked, and says something else already.
                match links.set_aside(rank, event) {
                    Err(error) if !ranks.contains(&rank) => links.set_loss_aside(rank, error),
                    kept => kept?,
                }
                continue;
            };
            let Event::Message { bytes, descriptor } = event else {
                let error = Error::new(Kind::PeerLost, OPERATION).at("a rank that ended");
                return Err(error.with("rank", rank));
            };
            progress.got.push(self.take(rank, *ordinal, &bytes, descriptor)?);
            match sharded.get(next + 1) {
                Some(ordinal) => self.give(links, rank, *ordinal, digests, next + 1)?,
                None => compare(links, progress)?,
            }
        }
        links.flush(ranks, at_most.saturating_sub(start.elapsed()))?;
        lost.map_or(Ok(()), Err)
    }

    /// Queues this rank's part of a layer for another rank.
    fn give(
        &self,
        links: &mut Links,
        rank: u32,
        ordinal: usize,
        digests: &[Digest],
        index: usize,
    ) -> Result<()> {
        let (plan, window) = self.at(ordinal)?;
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        let memory = window.stored.memory;
        let descriptor = memory.map(|own| self.device.export(own.backing, Protection::Read)).transpose();
        let part = Part {
            // A plan has at most 4096 layers.
            layer: plan.layer as u32,
            bytes: memory.map_or(0, |own| own.bytes),
            digest: digests.get(index).copied().unwrap_or_default(),
        };
        links.send(rank, &part.encode(), descriptor.map_err(named)?)
    }

    /// Takes another rank's part of a layer.
    fn take(
        &mut self,
        rank: u32,
        ordinal: usize,
        bytes: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Result<Digest> {
        let (plan, _) = self.at(ordinal)?;
        let (layer, pages) = (plan.layer, plan.cut.part(rank));
        let planned = (pages.end - pages.start) * self.plan.grain();
        let wrong = |what| refused(Kind::BadFormat, layer, what).with("rank", rank);
        let part = Part::decode(bytes).ok_or_else(|| wrong("a message that is no part"))?;
        if part.layer as usize != layer {
            return Err(wrong("the part of another layer").with("given", part.layer));
        }
        if part.bytes != planned || descriptor.is_some() != (planned > 0) {
            return Err(wrong("a part of another size").with("bytes", part.bytes).with("planned", planned));
        }
        let known = self.windows.get(ordinal).and_then(|window| window.digests.get(rank as usize).copied());
        if known.flatten().is_some_and(|known| known != part.digest) {
            return Err(refused(Kind::Corrupt, layer, "another part than the rank gave before")
                .with("rank", rank)
                .hint("start a rank again with the weights that it had"));
        }
        if let Some(descriptor) = descriptor {
            let named = |error: Error| error.with("rank", rank).with("layer", layer as u64);
            self.map_part(ordinal, rank, descriptor, planned).map_err(named)?;
        }
        if let Some(window) = self.windows.get_mut(ordinal) {
            let digests = window.digests.iter_mut().skip(rank as usize).take(1);
            digests.for_each(|digest| *digest = Some(part.digest));
        }
        self.connect(ordinal)?;
        Ok(part.digest)
    }
}

/// Checks that a rank gave what its hello announced.
fn compare(links: &Links, progress: &Progress) -> Result<()> {
    let theirs = links.link(progress.rank).and_then(|link| link.theirs());
    if theirs.is_some_and(|theirs| theirs.content == content(&progress.got)) {
        return Ok(());
    }
    Err(Error::new(Kind::Corrupt, OPERATION)
        .at("a rank that gave other parts than its hello announced")
        .with("rank", progress.rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_reads_as_it_was_written_and_nothing_else_is_one() {
        let part = Part { layer: 60, bytes: 0x0102_0304_0506, digest: [9; 32] };
        let bytes = part.encode();
        assert_eq!(bytes[..16], [1, 0, 0, 0, 60, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!((bytes[16..].to_vec(), Part::decode(&bytes)), (vec![9; 32], Some(part)));
        for length in 0..BYTES {
            assert_eq!(Part::decode(&bytes[..length]), None);
        }
        assert_eq!(Part::decode(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(Part::decode(&[&[2][..], &bytes[1..]].concat()), None);
    }
}
