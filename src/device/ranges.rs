//! The physical memory of a device, and the ranges of addresses that map it: what may be mapped, mapped anew, exported
//! and given back. All devices use these rules; each does the mapping by itself.
//!
//! A backing is mapped in pieces, each by any number of ranges, and a range's addresses never change. Its pieces can be
//! replaced ([`Ranges::replaceable`]): those of the same bytes, so that the borders of what goes are borders of pieces
//! before and after. A backing is given back when no range maps it.
//!
//! **Protection.** A range is mapped to be read only, or to be written too. Memory that may only be read, because
//! another process exported it so or this one did, can be mapped to be read only. Slices of such a range say so, and
//! no operation that would write there is enqueued.
//!
//! **What it does not do.** It knows neither streams nor what is in flight: a caller that replaces a mapping has
//! waited for the work that uses it.

use std::collections::BTreeMap;

use crate::device::{Backing, DeviceId, Mapped, Slice};
use crate::error::{Error, Kind, Result};
use crate::os::Protection;

/// What is known of a backing.
#[derive(Clone, Copy, Debug)]
struct Known {
    bytes: u64,
    protection: Protection,
    /// What other processes that it was exported to may do.
    exported: Option<Protection>,
    /// The pieces of ranges that map it.
    pieces: u32,
}

/// The backings and ranges of one device.
#[derive(Debug)]
pub(super) struct Ranges {
    device: DeviceId,
    grain: u64,
    /// By index; `None` if it was given back.
    backings: Vec<Option<Known>>,
    /// The pieces of each range, by its address.
    ranges: BTreeMap<u64, (Vec<Mapped>, Protection)>,
}

/// A part of a range whose pieces can be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Replaceable {
    /// The range's address.
    pub range: u64,
    /// The first byte of the part in it.
    pub offset: u64,
    /// The pieces that map it now.
    pub old: Vec<Mapped>,
    pub protection: Protection,
    /// The first of these pieces among those of the range.
    first: usize,
}

fn invalid(kind: Kind, operation: &'static str, place: &'static str) -> Error {
    Error::new(kind, operation).at(place)
}

fn sum(pieces: &[Mapped]) -> Option<u64> {
    pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.bytes))
}

impl Ranges {
    /// None yet. `grain` is the granularity in bytes.
    pub fn new(device: DeviceId, grain: u64) -> Ranges {
        Ranges { device, grain, backings: Vec::new(), ranges: BTreeMap::new() }
    }

    /// Adds a backing; its index is the number of those before it.
    pub fn add_backing(&mut self, bytes: u64, protection: Protection) -> Backing {
        self.backings.push(Some(Known { bytes, protection, exported: None, pieces: 0 }));
        self.device.backing(self.backings.len() - 1)
    }

    /// Checks that a backing can be exported with `protection`; returns its index.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for no backing; [`Kind::InvalidState`] for one that was exported with another protection,
    /// or that may only be read.
    pub fn exportable(&self, backing: Backing, protection: Protection) -> Result<usize> {
        const OPERATION: &str = "export memory";
        let (index, known) = self.known(OPERATION, backing)?;
        if known.exported.is_some_and(|exported| exported != protection) {
            return Err(invalid(
                Kind::InvalidState,
                OPERATION,
                "memory that was exported with another protection",
            )
            .hint("export it always to be read, or always to be written"));
        }
        if protection == Protection::ReadWrite && known.protection == Protection::Read {
            return Err(invalid(Kind::InvalidState, OPERATION, "memory that may only be read")
                .hint("export it to be read"));
        }
        Ok(index)
    }

    /// Checks the size of memory that is to be imported.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for bytes that are no granules.
    pub fn importable(&self, bytes: u64) -> Result<()> {
        if bytes > 0 && bytes.is_multiple_of(self.grain) {
            return Ok(());
        }
        let error = invalid(Kind::InvalidConfig, "import memory", "bytes").with("bytes", bytes);
        Err(error.with("granularity", self.grain))
    }

    fn known(&self, operation: &'static str, backing: Backing) -> Result<(usize, Known)> {
        let index = backing.of(self.device)?;
        let known = self.backings.get(index).copied().flatten();
        let unknown = || invalid(Kind::OutOfRange, operation, "backing").with("value", index as u64);
        known.map(|known| (index, known)).ok_or_else(unknown)
    }

    /// Checks pieces that are to be mapped with `protection`; returns the bytes of all.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for no pieces, and for a piece that does not begin and end on granules;
    /// [`Kind::OutOfRange`] for a piece outside its backing, or of no backing; [`Kind::InvalidState`] for memory that
    /// may only be read; [`Kind::Overflow`].
    pub fn check(&self, operation: &'static str, pieces: &[Mapped], protection: Protection) -> Result<u64> {
        if pieces.is_empty() {
            return Err(invalid(Kind::InvalidConfig, operation, "pieces").with("pieces", 0_u32));
        }
        for &Mapped { backing, offset, bytes } in pieces {
            let (_, known) = self.known(operation, backing)?;
            let numbers = |error: Error| error.with("offset", offset).with("bytes", bytes);
            if bytes == 0 || [offset, bytes].iter().any(|n| !n.is_multiple_of(self.grain)) {
                let error = numbers(invalid(Kind::InvalidConfig, operation, "page borders"));
                return Err(error.with("granularity", self.grain));
            }
            if offset.checked_add(bytes).is_none_or(|end| end > known.bytes) {
                let error = numbers(invalid(Kind::OutOfRange, operation, "piece of a backing"));
                return Err(error.with("length", known.bytes));
            }
            if protection == Protection::ReadWrite && known.protection == Protection::Read {
                return Err(invalid(Kind::InvalidState, operation, "memory that may only be read")
                    .hint("map it to be read, or map it to be written before it is exported"));
            }
        }
        sum(pieces).ok_or_else(|| invalid(Kind::Overflow, operation, "bytes of all pieces"))
    }

    /// Adds a range that was mapped from pieces that were checked, and returns its slice.
    pub fn add(&mut self, address: u64, pieces: &[Mapped], protection: Protection) -> Slice {
        self.count(pieces, 1);
        self.ranges.insert(address, (pieces.to_vec(), protection));
        self.device.slice(address, sum(pieces).unwrap_or(0)).protected(protection)
    }

    fn count(&mut self, pieces: &[Mapped], by: i32) {
        for piece in pieces {
            let index = piece.backing.of(self.device).ok();
            let known = index.and_then(|index| self.backings.get_mut(index)).and_then(Option::as_mut);
            if let Some(known) = known {
                known.pieces = known.pieces.saturating_add_signed(by);
            }
        }
    }

    /// Checks that the pieces of `part`, of a range, can be replaced by `new`.
    ///
    /// # Errors
    /// As [`Ranges::check`]; [`Kind::OutOfRange`] for a part of no range, and for one that does not begin and end on
    /// the borders of its pieces; [`Kind::InvalidConfig`] for pieces of other bytes than the part's.
    pub fn replaceable(&self, operation: &'static str, part: Slice, new: &[Mapped]) -> Result<Replaceable> {
        self.device.check(&part)?;
        let nowhere = |place| {
            let error = invalid(Kind::OutOfRange, operation, place).with("address", part.address());
            error.with("bytes", part.bytes())
        };
        let found = self.ranges.range(..=part.address()).next_back();
        let Some((&range, (pieces, protection))) = found else {
            return Err(nowhere("a slice of no range"));
        };
        let bytes = self.check(operation, new, *protection)?;
        let offset = part.address() - range;
        let end = offset.saturating_add(part.bytes());
        if end > sum(pieces).unwrap_or(0) {
            return Err(nowhere("a slice of no range"));
        }
        if bytes != part.bytes() {
            let error = invalid(Kind::InvalidConfig, operation, "pieces of another length");
            return Err(error.with("bytes", bytes).with("replaced", part.bytes()));
        }
        // The borders of the range's pieces, from 0 to its end.
        let mut borders = vec![0_u64];
        borders.extend(pieces.iter().scan(0, |at, piece| {
            *at += piece.bytes;
            Some(*at)
        }));
        let at = |border: u64| borders.iter().position(|other| *other == border);
        match at(offset).zip(at(end)).and_then(|(first, last)| Some((first, pieces.get(first..last)?))) {
            Some((first, old)) => {
                Ok(Replaceable { range, offset, old: old.to_vec(), protection: *protection, first })
            }
            None => Err(nowhere("a slice that does not end where its range's pieces do")),
        }
    }

    /// Notes that a part's pieces were replaced.
    pub fn replaced(&mut self, part: &Replaceable, new: &[Mapped]) {
        self.count(&part.old, -1);
        self.count(new, 1);
        if let Some((pieces, _)) = self.ranges.get_mut(&part.range) {
            pieces.splice(part.first..part.first + part.old.len(), new.iter().copied());
        }
    }

    /// Notes that other processes may map a backing with `protection` from now on.
    pub fn exported(&mut self, backing: usize, protection: Protection) {
        if let Some(Some(known)) = self.backings.get_mut(backing) {
            known.exported = Some(protection);
            if protection == Protection::Read {
                known.protection = protection;
            }
        }
    }

    /// Forgets a backing, and returns its index.
    ///
    /// # Errors
    /// [`Kind::Busy`] while a range maps it; [`Kind::OutOfRange`] for no backing of this device.
    pub fn give_back(&mut self, operation: &'static str, backing: Backing) -> Result<usize> {
        let (index, known) = self.known(operation, backing)?;
        if known.pieces > 0 {
            return Err(invalid(Kind::Busy, operation, "a backing that ranges map")
                .with("pieces", known.pieces)
                .hint("map other memory in its place first"));
        }
        if let Some(place) = self.backings.get_mut(index) {
            *place = None;
        }
        Ok(index)
    }
}
