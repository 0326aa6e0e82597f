//! The exchange of parts between the ranks of a group: what each gives to all others, and takes from them, in one
//! order.
//!
//! Both sides of a session send one message at a time, and the next one only when the other side's last has arrived. So
//! at most one descriptor is on its way in each direction: the system limits those of a user, and the session those
//! that wait. A message has 48 bytes, of an update 52; numbers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 to 3 | 1: a part; 16: an update begins; 17: a part of a new version; 18: the rank has given up |
//! | | 32, 33, 34: the same of a change of replicas; 33 is a replica |
//! | 4 to 7 | layer of the model; 0 in 16, 18, 32, 34 |
//! | 8 to 15 | bytes of the memory, in whole granules, 0 if the rank gives none, as of a resident layer |
//! | | in 16, 18 how many layers |
//! | | in 32, 34 how many replicas there are to be |
//! | 16 to 47 | BLAKE3 of what was filled ([`super::fill`]); in 16, 18 of the layers of the update |
//! | | in 33 of what the owner has or the holder was filled with; in 32, 34 of the replicas before and after |
//! | 48 to 51 | the version of an update, the number of a change |
//!
//! **The other ranks are not trusted** with sizes and orders: each is computed from the plan, and a message that says
//! otherwise is an error that names rank and layer. What a rank says when it has given all its parts is kept for later,
//! up to a bound ([`crate::peer`]).

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::plan::{LayerPlan, Place};
use super::window::refused;
use crate::error::{Error, Kind, Result};
use crate::peer::{Digest, Event, Links};

/// The operation that errors of an exchange name.
pub(super) const OPERATION: &str = "share weights";
/// What messages are.
pub(super) const PART: u32 = 1;
/// Those of what all ranks take together ([`super::update`], [`super::replicas`]), and the operation that its errors
/// name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kinds {
    pub begins: u32,
    pub part: u32,
    pub fails: u32,
    pub operation: &'static str,
}

pub(super) const UPDATE: Kinds = Kinds { begins: 16, part: 17, fails: 18, operation: "update weights" };
pub(super) const REPLICAS: Kinds = Kinds { begins: 32, part: 33, fails: 34, operation: "replicate weights" };

impl Kinds {
    pub const fn contain(&self, kind: u32) -> bool {
        self.begins <= kind && kind <= self.fails
    }
}

/// Bytes of a part's message.
pub(super) const BYTES: usize = 48;

/// What a message is, if it is of an update or of a change of replicas.
pub(super) fn of_pact(bytes: &[u8]) -> Option<u32> {
    let kind = bytes.first_chunk().map(|kind| u32::from_le_bytes(*kind));
    kind.filter(|kind| UPDATE.contain(*kind) || REPLICAS.contain(*kind))
}

/// What a rank says of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// What the message is.
    pub kind: u32,
    pub layer: u32,
    pub bytes: u64,
    pub digest: Digest,
}

impl Part {
    pub fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let parts: [&[u8]; 4] =
            [&self.kind.to_le_bytes(), &self.layer.to_le_bytes(), &self.bytes.to_le_bytes(), &self.digest];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        bytes
    }

    /// The part, if it is of this kind.
    pub fn decode(bytes: &[u8], kind: u32) -> Option<Part> {
        let bytes: &[u8; BYTES] = bytes.try_into().ok()?;
        let (own, rest) = bytes.split_first_chunk()?;
        let (layer, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let digest = *rest.first_chunk()?;
        let (layer, bytes) = (u32::from_le_bytes(*layer), u64::from_le_bytes(*length));
        (u32::from_le_bytes(*own) == kind).then_some(Part { kind, layer, bytes, digest })
    }

    /// What `rank` gives of a layer, with memory of `planned` bytes.
    ///
    /// # Errors
    /// [`Kind::BadFormat`] with rank and layer for anything but that.
    pub fn of(
        (layer, planned): (usize, u64),
        (rank, kind): (u32, u32),
        bytes: &[u8],
        descriptor: Option<&OwnedFd>,
    ) -> Result<Part> {
        let wrong = |what| refused(Kind::BadFormat, layer, what).with("rank", rank);
        let part = Part::decode(bytes, kind).ok_or_else(|| wrong("a message that is no part"))?;
        if part.layer as usize != layer {
            return Err(wrong("the part of another layer").with("given", part.layer));
        }
        if part.bytes != planned || descriptor.is_some() != (planned > 0) {
            return Err(wrong("a part of another size").with("bytes", part.bytes).with("planned", planned));
        }
        Ok(part)
    }

    /// Checks what `rank` says of a layer of which every rank has filled the whole, against this rank's `own` digest.
    /// Of other layers ranks fill different bytes.
    ///
    /// # Errors
    /// [`Kind::Corrupt`] with rank and layer.
    pub fn agrees(&self, plan: &LayerPlan, own: Option<Digest>, rank: u32) -> Result<()> {
        if plan.place != Place::Resident || own == Some(self.digest) {
            return Ok(());
        }
        Err(refused(
            Kind::Corrupt,
            plan.layer,
            "a rank with other weights than this one, where each has the whole",
        )
        .with("rank", rank)
        .with("layer", self.layer)
        .hint("fill all ranks with the same weights"))
    }
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heed {
    /// It is one of the exchange.
    Take,
    /// It is for another call.
    Keep,
    /// It is of an exchange that failed before.
    Drop,
    /// It is of a later exchange, which it is kept for; this one has failed at the other rank.
    Later,
}

/// What one rank gives and takes.
pub(super) trait Parts {
    /// Messages that each rank sends to each other one.
    fn count(&self) -> usize;

    /// What becomes of a message of a rank that has not given all.
    fn heed(&self, _bytes: &[u8]) -> Heed {
        Heed::Take
    }

    /// Whether the exchange with the others goes on when a rank is lost.
    fn outlives_a_rank(&self) -> bool {
        false
    }

    /// Queues message `index` for another rank.
    fn give(&self, links: &mut Links, rank: u32, index: usize) -> Result<()>;

    /// Takes message `index` of another rank.
    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()>;

    /// All messages of a rank have come.
    fn taken(&self, _links: &Links, _rank: u32) -> Result<()> {
        Ok(())
    }
}

/// How many messages of a rank have come.
struct Progress {
    rank: u32,
    got: usize,
}

/// Gives `ranks` all parts and takes theirs, within `at_most`. What ranks say beside it is set aside, and so is the
/// loss of other ranks, and of one that has given all.
///
/// # Errors
/// [`Kind::TimedOut`] and [`Kind::PeerLost`] with the rank; those of the parts and of [`Links::event`]. The error of a
/// rank that is lost before it has given all comes at once, or when the exchange with the others has ended
/// ([`Parts::outlives_a_rank`]).
pub(super) fn exchange(
    parts: &mut impl Parts,
    links: &mut Links,
    ranks: &[u32],
    at_most: Duration,
) -> Result<()> {
    let mut lost = None;
    match (served(parts, links, ranks, at_most, &mut lost), lost) {
        (Ok(()), Some((_, error))) => Err(error),
        (result, None) => result,
        (Err(error), Some((rank, loss))) => {
            links.set_loss_aside(rank, loss);
            Err(error)
        }
    }
}

/// The exchange, and the first rank that was lost in it.
fn served(
    parts: &mut impl Parts,
    links: &mut Links,
    ranks: &[u32],
    at_most: Duration,
    lost: &mut Option<(u32, Error)>,
) -> Result<()> {
    let (start, count) = (Instant::now(), parts.count());
    let mut all: Vec<Progress> = ranks.iter().map(|rank| Progress { rank: *rank, got: 0 }).collect();
    if count > 0 {
        ranks.iter().try_for_each(|rank| parts.give(links, *rank, 0))?;
    }
    while let Some(waits) = all.iter().find(|one| one.got < count).map(|one| one.rank) {
        match links.event(at_most.saturating_sub(start.elapsed())) {
            Ok(Some((rank, event))) => match all.iter_mut().find(|one| one.rank == rank) {
                Some(progress) => heard(parts, links, progress, event)?,
                None => keep(links, rank, event, ranks)?,
            },
            Ok(None) => {
                return Err(Error::new(Kind::TimedOut, OPERATION)
                    .at("a rank that gives no parts")
                    .with("rank", waits));
            }
            Err(error) => {
                let rank = error.number("rank").and_then(|rank| u32::try_from(rank).ok());
                let Some(rank) = rank else { return Err(error) };
                // One that has given all is missed by a later call.
                let owes = all.iter().any(|one| one.rank == rank && one.got < count);
                all.retain(|one| one.rank != rank);
                match (owes, &lost) {
                    (true, _) if !parts.outlives_a_rank() => return Err(error),
                    (true, None) => *lost = Some((rank, error)),
                    _ => links.set_loss_aside(rank, error),
                }
            }
        }
    }
    links.flush(ranks, at_most.saturating_sub(start.elapsed()))
}

/// Keeps what a rank says for another call. The loss of one that is not asked is kept too.
fn keep(links: &mut Links, rank: u32, event: Event<OwnedFd>, ranks: &[u32]) -> Result<()> {
    match links.set_aside(rank, event) {
        Err(error) if !ranks.contains(&rank) => {
            links.set_loss_aside(rank, error);
            Ok(())
        }
        kept => kept,
    }
}

/// Takes what a rank says that is asked, and answers.
fn heard(
    parts: &mut impl Parts,
    links: &mut Links,
    progress: &mut Progress,
    event: Event<OwnedFd>,
) -> Result<()> {
    let (rank, count) = (progress.rank, parts.count());
    let heed = match &event {
        // It has given all, and says something else already.
        _ if progress.got == count => Heed::Keep,
        Event::Message { bytes, .. } => parts.heed(bytes),
        _ => Heed::Take,
    };
    match heed {
        Heed::Take => {}
        Heed::Drop => return Ok(()),
        Heed::Keep => return links.set_aside(rank, event),
        Heed::Later => {
            links.set_aside(rank, event)?;
            return Err(Error::new(Kind::InvalidConfig, OPERATION)
                .at("a rank that has begun something later")
                .with("rank", rank)
                .hint("begin updates and changes of replicas with the same arguments on all ranks"));
        }
    }
    let Event::Message { bytes, descriptor } = event else {
        let error = Error::new(Kind::PeerLost, OPERATION).at("a rank that ended");
        return Err(error.with("rank", rank));
    };
    parts.take(rank, progress.got, &bytes, descriptor)?;
    progress.got += 1;
    if progress.got < count { parts.give(links, rank, progress.got) } else { parts.taken(links, rank) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_reads_as_it_was_written_and_nothing_else_is_one() {
        let part = Part { kind: PART, layer: 60, bytes: 0x0102_0304_0506, digest: [9; 32] };
        let bytes = part.encode();
        assert_eq!(bytes[..16], [1, 0, 0, 0, 60, 0, 0, 0, 6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!((bytes[16..].to_vec(), Part::decode(&bytes, PART)), (vec![9; 32], Some(part)));
        for length in 0..BYTES {
            assert_eq!(Part::decode(&bytes[..length], PART), None);
        }
        assert_eq!(Part::decode(&[&bytes[..], &[0]].concat(), PART), None);
        assert_eq!(Part::decode(&[&[2][..], &bytes[1..]].concat(), PART), None);
        assert_eq!(Part::decode(&bytes, 17), None);
    }
}
