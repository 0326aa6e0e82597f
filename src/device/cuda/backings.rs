//! The memory that a CUDA device holds: what it allocated and registered, physical memory, and the ranges that map it.
//!
//! `device::ranges` decides what may be mapped, `memory` calls the driver.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use super::driver::{Context, DriverResult, code};
use super::errors::bad;
use super::memory::{Allocation, Part, Physical, Range, Worker, unmappable};
use super::registration::Registration;
use crate::device::ranges::Ranges;
use crate::device::{Backing, DeviceId, Mapped, Slice};
use crate::error::{Error, Kind, Result};
use crate::os::{Map, Protection};
use crate::sync::Arc;

/// All of it. Fields are freed in their order.
#[derive(Debug)]
pub(super) struct Memory {
    pub registered: Vec<Registration>,
    /// Host memory that this device's driver made.
    pub hosted: Vec<Arc<Map>>,
    /// By address.
    ranges: BTreeMap<u64, Range>,
    /// By index; `None` if it was given back.
    backings: Vec<Option<Physical>>,
    rules: Ranges,
    pub allocations: Vec<Allocation>,
    /// Whether a mapping may begin inside a backing, once that was tried.
    offsets: Option<bool>,
    id: DeviceId,
}

impl Memory {
    pub fn new(id: DeviceId, grain: u64) -> Memory {
        Memory {
            registered: Vec::new(),
            hosted: Vec::new(),
            ranges: BTreeMap::new(),
            backings: Vec::new(),
            rules: Ranges::new(id, grain),
            allocations: Vec::new(),
            offsets: None,
            id,
        }
    }

    /// Whether `bytes` bytes from `address` lie in memory that was allocated or mapped here.
    pub fn holds(&self, within: impl Fn(u64, u64) -> bool) -> bool {
        self.allocations.iter().any(|taken| within(taken.address, taken.bytes))
            || self.ranges.values().any(|range| within(range.address, range.bytes))
    }

    pub fn add(&mut self, physical: Physical, protection: Protection) -> Backing {
        let bytes = physical.bytes();
        self.backings.push(Some(physical));
        self.rules.add_backing(bytes, protection)
    }

    fn physical(&self, index: usize) -> Result<&Physical> {
        let physical = self.backings.get(index).and_then(Option::as_ref);
        physical.ok_or_else(|| bad("backing", index as u64))
    }

    /// The memory of pieces that were checked.
    fn parts(&self, pieces: &[Mapped]) -> Result<Vec<Part<'_>>> {
        let part =
            |piece: &Mapped| Ok((self.physical(piece.backing.of(self.id)?)?, piece.offset, piece.bytes));
        pieces.iter().map(part).collect()
    }

    pub fn range(
        &mut self,
        context: &Arc<Context>,
        pieces: &[Mapped],
        protection: Protection,
    ) -> Result<Slice> {
        const OPERATION: &str = "map range";
        self.rules.check(OPERATION, pieces, protection)?;
        let parts = self.parts(pieces)?;
        let range = Range::new(context, &parts, protection)
            .map_err(|refusal| unmappable(OPERATION, refusal, &parts))?;
        let address = range.address;
        self.ranges.insert(address, range);
        Ok(self.rules.add(address, pieces, protection))
    }

    /// As [`crate::device::Device::remap`].
    pub fn remap(&mut self, part: Slice, pieces: &[Mapped]) -> Result<()> {
        const OPERATION: &str = "remap";
        let place = self.rules.replaceable(OPERATION, part, pieces)?;
        let mut range = self.ranges.remove(&place.range).ok_or_else(|| bad("range", place.range))?;
        let replaced = self.parts(&place.old).and_then(|old| {
            let new = self.parts(pieces)?;
            let (refusal, restored) = match range.replace(place.offset, &old, &new) {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(refused)) => refused,
                Err(refusal) => return Err(refusal.error(OPERATION)),
            };
            let error = unmappable(OPERATION, refusal, &new);
            match restored {
                Ok(()) => Err(error),
                Err(_) => Err(Error::new(Kind::DeviceFailed, OPERATION)
                    .at(error.place().to_owned())
                    .hint("nothing that uses these addresses is right any more: end the process")),
            }
        });
        self.ranges.insert(place.range, range);
        replaced.map(|()| self.rules.replaced(&place, pieces))
    }

    /// Whether a mapping may begin inside a backing: tried once.
    pub fn maps_offsets(&mut self, context: &Arc<Context>, worker: &Worker, grain: u64) -> Result<bool> {
        if let Some(known) = self.offsets {
            return Ok(known);
        }
        let backing = Physical::new(context, worker, 2 * grain, grain)?;
        let tried: DriverResult<Range> = Range::over(context, &[(&backing, grain, grain)]);
        let maps = match tried {
            Ok(_) => true,
            Err(refusal) if refusal.code == code::INVALID_VALUE => false,
            Err(refusal) => return Err(refusal.error("map range")),
        };
        Ok(*self.offsets.insert(maps))
    }

    pub fn export(&mut self, backing: Backing, protection: Protection) -> Result<OwnedFd> {
        let index = self.rules.exportable(backing, protection)?;
        let exported = self.physical(index)?.export()?;
        self.rules.exported(index, protection);
        Ok(exported)
    }

    pub fn import(
        &mut self,
        context: &Arc<Context>,
        descriptor: &OwnedFd,
        bytes: u64,
        protection: Protection,
    ) -> Result<Backing> {
        self.rules.importable(bytes)?;
        Ok(self.add(Physical::import(context, descriptor, bytes)?, protection))
    }

    pub fn give_back(&mut self, backing: Backing) -> Result<()> {
        let index = self.rules.give_back("give memory back", backing)?;
        if let Some(place) = self.backings.get_mut(index) {
            *place = None;
        }
        Ok(())
    }
}
