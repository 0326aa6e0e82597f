//! Addresses at which a new version of the weights, or a replica, is written and read before it is used.
//!
//! A device keeps ranges for as long as it lives, and memory that a range maps cannot be given back. So these addresses
//! are made once and used by all updates and changes of replicas, and between two of them they are *parked*: each
//! granule of them maps one granule of memory, the same for all. That granule is all that updates leave behind. A
//! parked range costs one mapping for each of its granules; on the host device, where the system allows 65,530 of them,
//! plan large models in larger granules than the device's. Those of replicas have at most twice the granules of the
//! largest change, and those that became too short, however many there were, have together fewer than that again. It is
//! more where the device refused twice the length, so that a range is as long as its change needs.

use super::left::User;
use super::parked::Parked;
use crate::device::{Device, Mapped, Slice};
use crate::error::{Kind, Result};
use crate::os::Protection;

/// What updates and changes of replicas leave behind, and whether there is one at present.
#[derive(Debug, Default)]
pub(super) struct Spares {
    parked: Option<Parked>,
    /// Where the parts of other ranks are read, one at a time.
    pub reading: Option<Slice>,
    /// Where the segments that this rank gains are written, and where those that others gain of it are read. As long as
    /// those of the largest change, or up to twice as long.
    gains: Option<Slice>,
    owned: Option<Slice>,
    /// The highest version that was begun, and the highest number of a change of replicas.
    pub begun: u32,
    pub changes: u32,
    user: User,
    /// Whether the last user is a change of replicas.
    replicates: bool,
}

impl Spares {
    /// Whether no update and no change of replicas is there. Gives back first what a dropped one could not.
    ///
    /// # Errors
    /// Those of [`Device::synchronize`], [`Device::remap`] and [`Device::give_back`], where it still cannot.
    pub fn are_free(&self, device: &dyn Device) -> Result<bool> {
        self.user.is_none(device, self.parked)
    }

    /// As [`Spares::are_free`], of changes of replicas alone.
    pub fn replicate_nothing(&self, device: &dyn Device) -> Result<bool> {
        if self.replicates { self.are_free(device) } else { Ok(true) }
    }

    /// Notes the user.
    pub fn lend(&mut self, replicates: bool) -> User {
        self.replicates = replicates;
        self.user.clone()
    }

    /// Whether this is the user.
    pub fn are_lent_to(&self, user: &User) -> bool {
        self.user.is(user)
    }

    /// Bytes of memory that a user needs beside its own.
    pub fn needs(&self, grain: u64) -> u64 {
        if self.parked.is_some() { 0 } else { grain }
    }

    /// A range of so many bytes at which a change of replicas is written or read, of which no change needs more than
    /// `most`. A device keeps a range that has become too short, parked. So a longer one has twice its length, if a
    /// change can need that and the device has room: all that became too short have together less than twice the length
    /// of the last of them.
    pub fn lent(
        &mut self,
        device: &dyn Device,
        parked: Parked,
        (bytes, most): (u64, u64),
        protection: Protection,
    ) -> Result<Slice> {
        let kept = match protection {
            Protection::ReadWrite => &mut self.gains,
            Protection::Read => &mut self.owned,
        };
        let range = match kept.filter(|range| range.bytes() >= bytes) {
            Some(range) => range,
            None => {
                let twice = kept.map_or(0, |short| short.bytes().saturating_mul(2)).min(most);
                let longer = match parked.range(device, twice.max(bytes), protection) {
                    // As long as has to be may find room, or be within the mappings of a process.
                    Err(error) if twice > bytes && error.kind() != Kind::DeviceFailed => {
                        parked.range(device, bytes, protection)
                    }
                    made => made,
                };
                *kept.insert(longer?)
            }
        };
        range.part(0, bytes)
    }

    /// The granule that parked ranges map, taken once.
    pub fn parked(&mut self, device: &dyn Device, grain: u64) -> Result<Parked> {
        if let Some(parked) = self.parked {
            return Ok(parked);
        }
        let granule = Mapped { backing: device.backing(grain)?, offset: 0, bytes: grain };
        // It is kept once it is known to be memory that ranges can map, and mapped from then on.
        match device.range(&[granule], Protection::Read) {
            Ok(_) => Ok(*self.parked.insert(Parked { granule })),
            Err(error) => device.give_back(granule.backing).and(Err(error)),
        }
    }
}
