//! A change of the replicas: the memory of new ones, how it is filled, and how the ranks give it to each other.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::set::{Held, Segment};
use super::wanted::{self, Replica};
use crate::device::{Device, Mapped, Slice, Stream};
use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::peer::{Digest, Links};
use crate::sync::Arc;
use crate::weights::beside::Beside;
use crate::weights::exchange::{Part, REPLICAS};
use crate::weights::fill::{self, Reads};
use crate::weights::plan::{Place, Plan, Source};
use crate::weights::update::pact::{self, Agreed, Pact, State};
use crate::weights::window::{Windows, refused};

/// A segment that its holder gains.
#[derive(Debug)]
pub(super) struct Gained {
    pub segment: Segment,
    /// Its memory on the holder, else imported.
    pub memory: Option<Mapped>,
    /// Its bytes on the owner.
    owned: Option<Mapped>,
    /// Where the holder writes it, and owner and holder read it.
    slice: Option<Slice>,
    /// What is in it, as owner and holder say.
    owner: Option<Digest>,
    holder: Option<Digest>,
}

/// A change of the replicas that ranks hold for each other. [`Windows::replicate`] makes it.
#[derive(Debug)]
pub struct Replication {
    device: Arc<dyn Device>,
    plan: Arc<Plan>,
    pub(super) pact: Pact,
    /// All segments before and after, in order, and those that are new.
    before: Vec<Segment>,
    pub(super) after: Vec<Segment>,
    pub(super) gained: Vec<Gained>,
    /// What is left to be copied, from where to where.
    left: VecDeque<(Slice, Slice)>,
}

impl Windows {
    /// The replicas that ranks hold for each other at present, in the order of layers, ranges and ranks.
    pub fn replicas(&self) -> Vec<Replica> {
        let mut all: Vec<(usize, usize, u32)> =
            self.replicas.iter().map(|Held { segment: it, .. }| (it.ordinal, it.tensor, it.holder)).collect();
        all.sort_unstable();
        all.dedup();
        let of = |(ordinal, tensor, holder)| {
            wanted::replica(&self.plan, Segment { ordinal, tensor, owner: 0, holder })
        };
        all.into_iter().filter_map(of).collect()
    }

    /// Begins a change of the replicas: `wanted` are all that there are to be after it, and those that are there and
    /// are wanted stay. Takes the memory of the replicas that this rank gains; nothing else changes, and steps go on.
    /// All ranks of the group begin it with the same arguments but the last. A number is begun once: after a change
    /// that failed or was aborted, the next one has a higher number. Numbers of changes and versions of updates count
    /// apart.
    ///
    /// `at_most` bounds the bytes of device memory that it takes: in whole granules what this rank gains, and a granule
    /// more in the first change or update, which stays. What is given up is given back by the commit.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] with the bytes `needed` and `allowed`, before any are taken, or of the device; then it
    /// holds what it held before. [`Kind::Unsupported`] where the device maps nothing anew, or memory from its
    /// beginning only, and for weights that come from the host; [`Kind::InvalidState`] before the parts were shared;
    /// [`Kind::Busy`] while an update or another change is there; [`Kind::OutOfRange`] for a layer, range or rank that
    /// is not there, and for a number that is not above all that were begun; [`Kind::InvalidConfig`] for a replica that
    /// is named twice, or of which no whole granule is another rank's; the error of a layer that cannot be used; those
    /// of [`Replication::abort`], of one that was dropped before it could give its memory back.
    pub fn replicate(&mut self, number: u32, wanted: &[Replica], at_most: u64) -> Result<Replication> {
        let after = self.replicable(number, wanted)?;
        let (grain, own) = (self.plan.grain(), self.plan.group().rank);
        let before: Vec<Segment> = self.replicas.iter().map(|held| held.segment).collect();
        let new: Vec<Segment> =
            after.iter().filter(|segment| before.binary_search(segment).is_err()).copied().collect();
        let gains = new.iter().filter(|segment| segment.holder == own);
        let needed = self.spares.needs(grain) + gains.map(|segment| segment.bytes(&self.plan)).sum::<u64>();
        if needed > at_most {
            return Err(Error::new(Kind::OutOfMemory, REPLICAS.operation)
                .at("the replicas that this rank gains")
                .with("needed", needed)
                .with("allowed", at_most)
                .hint("allow more, or move fewer replicas at a time"));
        }
        let beside = Beside::new(self, true)?;
        let mut change = Replication {
            device: Arc::clone(&self.device),
            plan: Arc::clone(&beside.plan),
            pact: Pact::new(REPLICAS, (number, self.spares.begun), beside),
            before,
            after,
            gained: Vec::new(),
            left: VecDeque::new(),
        };
        // All memory before the first range; what was taken goes with the change where something is refused.
        for segment in new {
            change.gained.push(self.gained(segment)?);
        }
        self.lend_to(&mut change, Protection::ReadWrite)?;
        self.lend_to(&mut change, Protection::Read)?;
        self.spares.changes = number;
        Ok(change)
    }

    /// The segments of a change that can begin.
    fn replicable(&self, number: u32, wanted: &[Replica]) -> Result<Vec<Segment>> {
        let wrong = |kind, what: &'static str| Err(Error::new(kind, REPLICAS.operation).at(what));
        if self.plan.source() == Source::Host {
            return wrong(Kind::Unsupported, "weights that are pulled from the host");
        }
        if !self.shared {
            return wrong(Kind::InvalidState, "parts that were not shared");
        }
        if !self.spares.are_free(&*self.device)? {
            return wrong(Kind::Busy, "an update, or another change of replicas, of these windows");
        }
        if number <= self.spares.changes {
            return Err(Error::new(Kind::OutOfRange, REPLICAS.operation)
                .at("a number that is not above all that were begun")
                .with("number", number)
                .with("begun", self.spares.changes));
        }
        let after = wanted::segments(&self.plan, wanted)?;
        if !self.device.maps_offsets()? {
            return wrong(Kind::Unsupported, "a driver that maps memory from its beginning only");
        }
        let held = self.replicas.iter().map(|held| &held.segment);
        for segment in after.iter().chain(held) {
            let (plan, _) = self.at(segment.ordinal)?;
            self.layer(plan.layer)?;
        }
        Ok(after)
    }

    /// A new segment, with its memory if this rank holds it.
    fn gained(&self, segment: Segment) -> Result<Gained> {
        let (own, bytes) = (self.plan.group().rank, segment.bytes(&self.plan));
        let memory = match segment.holder == own {
            true => Some(Mapped { backing: self.device.backing(bytes)?, offset: 0, bytes }),
            false => None,
        };
        let stored = self.at(segment.ordinal)?.1.stored.memory.filter(|_| segment.owner == own);
        let owned = stored.map(|it| Mapped { offset: it.offset + segment.offset(&self.plan), bytes, ..it });
        Ok(Gained { segment, memory, owned, slice: None, owner: None, holder: None })
    }

    /// The most bytes that this rank can gain in a change, or that it can own of what others gain.
    fn most(&self, gains: bool) -> u64 {
        let own = self.plan.group().rank;
        let sharded = self.plan.layers().iter().filter(|layer| layer.place != Place::Resident);
        let pages = sharded.map(|layer| {
            let part = layer.cut.part(own);
            let owned = part.end - part.start;
            if gains { layer.layout.pages() - owned } else { owned }
        });
        pages.sum::<u64>() * self.plan.grain()
    }

    /// Maps what this rank gains where it is written and hashed, or what it owns of what others gain, which can only be
    /// read. Not behind the windows: a layer may be made resident meanwhile.
    fn lend_to(&mut self, change: &mut Replication, protection: Protection) -> Result<()> {
        let (mut pieces, mut places, mut end) = (Vec::new(), Vec::new(), 0);
        let gains = protection == Protection::ReadWrite;
        for memory in change.gained.iter().map(|it| if gains { it.memory } else { it.owned }) {
            places.push(memory.map(|memory| {
                // The holders of a segment follow each other, and its owner needs it once.
                if pieces.last() != Some(&memory) {
                    pieces.push(memory);
                    end += memory.bytes;
                }
                (end - memory.bytes, memory.bytes)
            }));
        }
        if pieces.is_empty() {
            return Ok(());
        }
        let lent = self.spares.lent(
            &*self.device,
            change.pact.beside.parked,
            (end, self.most(gains)),
            protection,
        )?;
        for (gained, place) in change.gained.iter_mut().zip(places) {
            let Some((at, bytes)) = place else { continue };
            let (segment, to) = (gained.segment, lent.part(at, bytes)?);
            gained.slice = Some(to);
            if gains {
                let (_, window) = self.at(segment.ordinal)?;
                let part = window.parts.get(segment.owner as usize).copied().flatten();
                let part = part.ok_or_else(|| change.pact.error(Kind::Internal, "a replica of no part"))?;
                change.left.push_back((part.part(segment.offset(&self.plan), bytes)?, to));
            }
        }
        // What is mapped in part is parked with the change.
        change.pact.beside.lent(lent);
        self.device.remap(lent, &pieces)
    }
}

impl Replication {
    /// The number that it has.
    pub const fn number(&self) -> u32 {
        self.pact.number
    }

    /// Whether the change is over: the ranks have decided at a border, or it was aborted. Otherwise nothing is decided,
    /// and [`Windows::commit_replicas`] may be called, also again.
    pub fn is_over(&self) -> bool {
        self.pact.is_over()
    }

    /// Bytes that this rank has still to copy, before it can share.
    pub fn left(&self) -> u64 {
        self.left.iter().map(|(from, _)| from.bytes()).sum()
    }

    /// Enqueues on `stream` copies of at most `bytes` bytes into the replicas that this rank gains, and returns how
    /// many bytes are left. An engine calls it once a step, with as many bytes as its link has room for, until none are
    /// left. The copies need no order with a step's work: they read what nothing writes, and write what nothing reads
    /// yet. A stream of their own lets them run beside it.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] once it was shared, or is over; [`Kind::Busy`] for a stream that is being captured; those
    /// of [`Device::copy`], with the rest left to be copied.
    pub fn advance(&mut self, bytes: u64, stream: Stream) -> Result<u64> {
        if self.pact.state != State::Filling {
            return Err(self.pact.error(Kind::InvalidState, "replicas that others were given"));
        }
        if self.device.is_capturing(stream)? {
            return Err(self.pact.error(Kind::Busy, "replicas are not filled on a stream that is captured"));
        }
        let mut allowed = bytes;
        while let Some((from, to)) = self.left.front_mut().filter(|_| allowed > 0) {
            let (now, rest) = (allowed.min(from.bytes()), from.bytes().saturating_sub(allowed));
            self.device.copy(stream, from.part(0, now)?, to.part(0, now)?)?;
            self.pact.beside.uses(stream);
            allowed -= now;
            (*from, *to) = (from.part(now, rest)?, to.part(now, rest)?);
            if rest == 0 {
                self.left.pop_front();
            }
        }
        Ok(self.left())
    }

    /// Gives the replicas that this rank gains to all others and takes theirs. All ranks call it, when nothing is left
    /// to be copied. Owners and holders hash what they have, and the digests of both have to agree. It waits for
    /// `stream` and for those of the copies. Otherwise it is as [`super::super::Update::share`], in time and in what it
    /// serves: an engine that goes on stepping calls it on a thread of its own. What others say early,
    /// [`super::super::Update::concerns`] tells apart.
    ///
    /// `at_most` begins when this rank has hashed its own, so it has to cover the hashing of the slowest rank. A rank
    /// whose [`Windows::replicate`] was refused does not call it, and the others wait for all of `at_most`: ranks that
    /// agree before they fill that all have begun need not wait.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] with the bytes that are left to be copied, and for a change that was shared before;
    /// [`Kind::InvalidConfig`] for sessions of another group or plan; the error of a rank that is lost;
    /// [`Kind::InvalidState`] for one that has come back and was not attached again. Nothing was said to any rank
    /// then, and the call may be made again.
    ///
    /// After other errors the change cannot be committed, by any rank: drop it, and begin one of a higher number.
    /// [`Kind::Corrupt`] with the rank and layer of a replica that is not what its owner has; [`Kind::InvalidConfig`]
    /// for a rank that has other replicas, or wants others: if it was called with the same, drop the replicas on all
    /// ranks ([`super::super::Ring::drop_replicas`]); [`Kind::TimedOut`], [`Kind::PeerLost`] and [`Kind::BadFormat`]
    /// with the rank; [`Kind::Cancelled`] for a rank whose own call has failed; those of [`Device::export`] and
    /// [`Device::import_backing`], with rank and layer.
    pub fn share(&mut self, links: &mut Links, stream: Stream, at_most: Duration) -> Result<()> {
        pact::share(self, links, stream, at_most)
    }

    /// The digest of a segment's bytes, where they are mapped.
    fn read(&mut self, segment: Segment, slice: Slice, stream: Stream) -> Result<Digest> {
        let found = segment.of(&self.plan).map(|(layer, pages)| (layer.clone(), pages));
        let (layer, pages) = found.ok_or_else(|| self.pact.error(Kind::Internal, "a segment"))?;
        fill::digest(self, &layer, &pages, Some(slice), stream)
    }

    /// Checks that owner and holder of a segment say the same, once both have.
    fn agrees(&self, gained: &Gained) -> Result<()> {
        match gained.owner.zip(gained.holder) {
            Some((owner, holder)) if owner != holder => {
                let layer = self.plan.layers().get(gained.segment.ordinal).map_or(0, |plan| plan.layer);
                Err(refused(Kind::Corrupt, layer, "a replica that is not what its owner has")
                    .with("rank", gained.segment.holder)
                    .with("owner", gained.segment.owner)
                    .with("layer", layer as u64))
            }
            _ => Ok(()),
        }
    }

    /// Ends the change: no rank takes it, unless all have committed already. What was taken is given back. Blocks until
    /// the copies into it have run. Nothing happens to a change that is over.
    ///
    /// Where it cannot be known that they have run, or the addresses at which they write cannot be parked, the change
    /// keeps its memory and the windows stay busy: call it again. If it is dropped then, the next [`Windows::update`],
    /// [`Windows::replicate`] or other call that needs the change to be over does what is left, or returns why it
    /// cannot.
    ///
    /// # Errors
    /// Those of [`Device::synchronize`], [`Device::remap`] and [`Device::give_back`]; the memory stays with the device
    /// then.
    pub fn abort(&mut self) -> Result<()> {
        self.pact.abort();
        self.left.clear();
        self.pact.beside.end(std::mem::take(&mut self.gained).into_iter().filter_map(|it| it.memory))
    }
}

impl Drop for Replication {
    fn drop(&mut self) {
        // No caller is there to be told. What is left goes to the windows with what is beside them.
        let _ = self.abort();
    }
}

impl Agreed for Replication {
    fn pact(&self) -> &Pact {
        &self.pact
    }

    fn pact_mut(&mut self) -> &mut Pact {
        &mut self.pact
    }

    fn is_filled(&self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            left => Err(self
                .pact
                .error(Kind::InvalidState, "replicas that are not filled")
                .with("bytes", left)
                .hint("call `advance` until nothing is left")),
        }
    }

    fn begins(&self) -> (u64, Digest) {
        let mut hash = blake3::Hasher::new();
        for set in [&self.before, &self.after] {
            hash.update(&(set.len() as u64).to_le_bytes());
            for segment in set {
                let numbers = [
                    segment.ordinal as u64,
                    segment.tensor as u64,
                    segment.owner.into(),
                    segment.holder.into(),
                ];
                numbers.iter().for_each(|number| {
                    hash.update(&number.to_le_bytes());
                });
            }
        }
        (self.after.len() as u64, *hash.finalize().as_bytes())
    }

    fn prepare(&mut self, links: &mut Links, stream: Stream) -> Result<()> {
        self.drain(stream)?;
        self.settle()?;
        let own = self.plan.group().rank;
        let mut read: Option<(Slice, Digest)> = None;
        for at in 0..self.gained.len() {
            let Some(&Gained { segment, slice: Some(slice), .. }) = self.gained.get(at) else { continue };
            // An owner hashes a segment once for all of its holders, which follow each other.
            let found = match read {
                Some((last, found)) if last == slice => found,
                _ => self.read(segment, slice, stream)?,
            };
            read = Some((slice, found));
            if let Some(gained) = self.gained.get_mut(at) {
                *(if segment.owner == own { &mut gained.owner } else { &mut gained.holder }) = Some(found);
            }
            links.settle()?;
        }
        // The reading has ended, so no later call waits for this stream.
        self.settle()?;
        // Before memory is exported, as in an update.
        self.park()
    }

    fn count(&self) -> usize {
        self.gained.len()
    }

    fn give(&self, rank: u32, index: usize) -> Result<(Part, Option<OwnedFd>)> {
        // The exchange asks for no more than there are.
        let found =
            self.gained.get(index).and_then(|it| Some((it, self.plan.layers().get(it.segment.ordinal)?)));
        let (gained, plan) = found.ok_or_else(|| self.pact.error(Kind::Internal, "a message"))?;
        let named = |error: Error| error.with("rank", rank).with("layer", plan.layer as u64);
        // Nothing was imported yet for what another rank holds.
        let memory = gained.memory.filter(|_| gained.segment.holder == self.plan.group().rank);
        let descriptor = memory.map(|own| self.device.export(own.backing, Protection::Read)).transpose();
        let own = if gained.segment.owner == self.plan.group().rank { gained.owner } else { None };
        let part = Part {
            kind: REPLICAS.part,
            // A plan has at most 4096 layers.
            layer: plan.layer as u32,
            bytes: memory.map_or(0, |own| own.bytes),
            digest: own.or(gained.holder.filter(|_| memory.is_some())).unwrap_or_default(),
        };
        Ok((part, descriptor.map_err(named)?))
    }

    fn take(&mut self, rank: u32, index: usize, bytes: &[u8], descriptor: Option<OwnedFd>) -> Result<()> {
        let Some(segment) = self.gained.get(index).map(|gained| gained.segment) else { return Ok(()) };
        let Some(layer) = self.plan.layers().get(segment.ordinal).map(|plan| plan.layer) else {
            return Ok(());
        };
        let planned = if segment.holder == rank { segment.bytes(&self.plan) } else { 0 };
        let part = Part::of((layer, planned), (rank, REPLICAS.part), bytes, descriptor.as_ref())?;
        let named = |error: Error| error.with("rank", rank).with("layer", layer as u64);
        let import = |descriptor| self.device.import_backing(descriptor, planned, Protection::Read);
        let backing = descriptor.map(import).transpose().map_err(named)?;
        let Some(gained) = self.gained.get_mut(index) else { return Ok(()) };
        if let Some(backing) = backing {
            gained.memory = Some(Mapped { backing, offset: 0, bytes: planned });
            gained.holder = Some(part.digest);
        }
        if segment.owner == rank {
            gained.owner = Some(part.digest);
        }
        self.gained.get(index).map_or(Ok(()), |gained| self.agrees(gained))
    }
}
