//! The handles that a device gives out: streams, events, memory, pools and graphs.
//!
//! A handle is a number or an address, `Copy`, and owns nothing. A device frees what it made when it is dropped; only
//! a graph can be released before. Memory and pools carry the id of their device, so every other device rejects them:
//! the first pools of two ranks have the same number. The numbers of streams, events and graphs are the back end's
//! own. On a GPU a stream's number is that of the engine's stream, and events and graphs have the device's id in their
//! upper half.

use crate::error::{Error, Kind, Result};
use crate::os::Protection;
use crate::sync::unique;

/// An in-order queue of operations. On a GPU the number is the engine's own `cudaStream_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// A point in a stream that other streams and the host can wait for. It belongs to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// The identity of a device, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(u32);

impl DeviceId {
    pub(crate) fn new() -> DeviceId {
        DeviceId(unique())
    }

    /// The id as a number.
    pub const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn slice(self, address: u64, bytes: u64) -> Slice {
        Slice { device: self, address, bytes, protection: Protection::ReadWrite }
    }

    pub(crate) const fn backing(self, index: usize) -> Backing {
        Backing { device: self, index: index as u32 }
    }

    pub(crate) const fn pools(self, index: usize) -> Pools {
        Pools { device: self, index: index as u32 }
    }

    /// Checks that this device gave the slice.
    pub(crate) fn check(self, slice: &Slice) -> Result<()> {
        self.own(slice.device, "slice", "a slice of another device")
    }

    /// Checks that this device gave the slice, and that its bytes may be written.
    pub(crate) fn check_target(self, slice: &Slice) -> Result<()> {
        self.check(slice)?;
        match slice.protection {
            Protection::ReadWrite => Ok(()),
            Protection::Read => Err(Error::new(Kind::InvalidState, "slice")
                .at("memory that is mapped to be read only")
                .hint("write it through the mapping of its owner")),
        }
    }

    fn own(self, owner: DeviceId, operation: &'static str, place: &'static str) -> Result<()> {
        if owner == self { Ok(()) } else { Err(Error::new(Kind::OutOfRange, operation).at(place)) }
    }
}

/// Bytes that a device can reach: its own memory, registered host memory, or an engine's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    device: DeviceId,
    address: u64,
    bytes: u64,
    protection: Protection,
}

impl Slice {
    /// Length in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that gave it.
    pub const fn device(&self) -> DeviceId {
        self.device
    }

    /// The address at which the device sees the bytes.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Whether its bytes may be written at this address, or read only.
    pub const fn protection(&self) -> Protection {
        self.protection
    }

    pub(crate) const fn protected(self, protection: Protection) -> Slice {
        Slice { protection, ..self }
    }

    /// Whether the two slices share any byte.
    pub const fn overlaps(&self, other: &Slice) -> bool {
        let (a, b) = (self.address, other.address);
        self.device.0 == other.device.0
            && if a < b {
                b - a < self.bytes && other.bytes > 0
            } else {
                a - b < other.bytes && self.bytes > 0
            }
    }

    /// The sub-slice of `bytes` bytes that begins at `offset`.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] when it reaches beyond the slice.
    pub fn part(&self, offset: u64, bytes: u64) -> Result<Slice> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(Slice { address: self.address + offset, bytes, ..*self }),
            _ => Err(Error::new(Kind::OutOfRange, "slice")
                .with("offset", offset)
                .with("bytes", bytes)
                .with("size", self.bytes)),
        }
    }
}

/// Physical device memory that can be mapped at several addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    device: DeviceId,
    index: u32,
}

impl Backing {
    /// The index of this backing among those that `device` gave.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if another device gave it.
    pub fn of(self, device: DeviceId) -> Result<usize> {
        device.own(self.device, "backing", "a backing of another device").map(|()| self.index as usize)
    }
}

/// The residency tables, page tables and lists of fetches of one cache on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    device: DeviceId,
    index: u32,
}

impl Pools {
    /// The index of these pools among those that `device` gave.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] if another device gave it.
    pub fn of(self, device: DeviceId) -> Result<usize> {
        device.own(self.device, "pools", "pools of another device").map(|()| self.index as usize)
    }
}

/// Captured work (a CUDA graph) that can be launched any number of times. It belongs to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);
