//! The host device's memory: mappings that live as long as the device, physical memory, and ranges over it.
//!
//! A backing is a memfd, a range maps pieces of several ones, and an exported backing is a descriptor. `device::ranges`
//! decides what may be mapped; the system maps it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use super::errors::{NAME, unknown};
use crate::device::ranges::Ranges;
use crate::device::{Backing, DeviceId, Mapped, Slice};
use crate::error::{Error, Kind, Result};
use crate::os::{Faults, Map, Piece, Protection, Range, Request, page_size};
use crate::sync::Arc;

/// All of it.
#[derive(Debug)]
pub(super) struct Memory {
    id: DeviceId,
    /// The bytes left of [`super::HostOptions::memory`].
    left: Option<u64>,
    maps: Vec<Arc<Map>>,
    /// By index; `None` if it was given back.
    backings: Vec<Option<Held>>,
    /// By address.
    ranges: BTreeMap<u64, Range>,
    rules: Ranges,
    // The standard library's: loom's does not become one of a trait object.
    faults: std::sync::Arc<dyn Faults>,
}

/// A backing.
#[derive(Debug)]
struct Held {
    map: Arc<Map>,
    /// Its bytes of the device's limit: 0 for another process's.
    taken: u64,
}

impl Memory {
    /// None yet, of at most `limit` bytes.
    pub fn new(id: DeviceId, limit: Option<u64>, faults: std::sync::Arc<dyn Faults>) -> Memory {
        Memory {
            id,
            left: limit,
            maps: Vec::new(),
            backings: Vec::new(),
            ranges: BTreeMap::new(),
            rules: Ranges::new(id, page_size()),
            faults,
        }
    }

    /// Counts device memory against the limit.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        let Some(left) = self.left else { return Ok(()) };
        let rest = left.checked_sub(bytes).ok_or_else(|| {
            Error::new(Kind::OutOfMemory, NAME).at("device memory").with("wanted", bytes).with("free", left)
        })?;
        self.left = Some(rest);
        Ok(())
    }

    fn untake(&mut self, bytes: u64) {
        self.left = self.left.map(|left| left.saturating_add(bytes));
    }

    /// Keeps a mapping for as long as the device lives.
    pub fn keep(&mut self, map: Arc<Map>) -> Slice {
        let slice = self.id.slice(map.as_ptr() as u64, map.len());
        self.maps.push(map);
        slice
    }

    pub fn backing(&mut self, bytes: u64) -> Result<Backing> {
        self.take(bytes)?;
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
        match Map::new(&request, &*self.faults) {
            Ok((map, _)) => Ok(self.add(map, bytes, Protection::ReadWrite)),
            Err(error) => {
                self.untake(bytes);
                Err(error)
            }
        }
    }

    fn add(&mut self, map: Map, taken: u64, protection: Protection) -> Backing {
        let bytes = map.len();
        self.backings.push(Some(Held { map: Arc::new(map), taken }));
        self.rules.add_backing(bytes, protection)
    }

    fn held(&self, index: usize) -> Result<&Held> {
        let held = self.backings.get(index).and_then(Option::as_ref);
        held.ok_or_else(|| unknown("backing", index as u64))
    }

    /// The maps of pieces that were checked.
    fn parts(&self, pieces: &[Mapped]) -> Result<Vec<Piece<'_>>> {
        let part = |piece: &Mapped| {
            let map = &self.held(piece.backing.of(self.id)?)?.map;
            Ok(Piece { map, offset: piece.offset, bytes: piece.bytes })
        };
        pieces.iter().map(part).collect()
    }

    pub fn range(&mut self, pieces: &[Mapped], protection: Protection) -> Result<Slice> {
        self.rules.check("map range", pieces, protection)?;
        let range = Range::new(&self.parts(pieces)?, protection, &*self.faults)?;
        let address = range.as_ptr() as u64;
        self.ranges.insert(address, range);
        Ok(self.rules.add(address, pieces, protection))
    }

    /// As [`crate::device::Device::remap`].
    pub fn remap(&mut self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        let place = self.rules.replaceable("remap", part, pieces)?;
        let mut range = self.ranges.remove(&place.range).ok_or_else(|| unknown("range", place.range))?;
        let replaced =
            self.parts(pieces).and_then(|parts| range.replace(place.offset, &parts, &*self.faults));
        self.ranges.insert(place.range, range);
        replaced.map(|()| self.rules.replaced(&place, pieces))
    }

    pub fn export(&mut self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        let index = self.rules.exportable(backing, protection)?;
        let exported = self.held(index)?.map.export(protection, &*self.faults)?;
        self.rules.exported(index, protection);
        Ok(exported)
    }

    pub fn import(&mut self, descriptor: OwnedFd, bytes: u64, protection: Protection) -> Result<Backing> {
        self.rules.importable(bytes)?;
        let map = Map::adopt(descriptor, bytes, protection, &*self.faults)?;
        Ok(self.add(map, 0, protection))
    }

    pub fn give_back(&mut self, backing: Backing) -> Result<()> {
        let index = self.rules.give_back("give memory back", backing)?;
        if let Some(Held { taken, .. }) = self.backings.get_mut(index).and_then(Option::take) {
            self.untake(taken);
        }
        Ok(())
    }
}
