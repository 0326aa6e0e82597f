//! A sender's memory, in which fabrics find rows by themselves.
//!
//! An *origin* ([`Computed::origin`](crate::transfer::sender::Computed::origin)) is a byte of this memory: where a part
//! of a [`StagingRing`](crate::transfer::StagingRing) begins, or a request's pages. From there a [`Plane`] says where
//! the pages of each of the side's planes are. So a run's first byte is at origin + the plane's offset + page times the
//! plane's page bytes + the run's offset in its page.
//!
//! **Trust.** A receiver that maps a sender's memory computes places from what the sender told. Each place is checked
//! against the memory's end, without overflow, before a byte is read ([`Planes::find`]).
//!
//! **Who writes.** The engine writes rows, and only where none are held: a part is its own from when it takes it
//! until it tells the sender ([`Sender::computed`](crate::transfer::Sender::computed)), and again after
//! [`Event::Released`](crate::transfer::sender::Event::Released). Readers that come late read other bytes, and find by
//! digests that they do.

use crate::error::{Error, Kind, Result};
use crate::os::{self, Fallback, Faults, Map, Region};
use crate::transfer::runs::Run;
use crate::transfer::sender::Source;

const OPERATION: &str = "send memory";

/// Where the pages of a plane are, seen from an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Bytes from an origin to the plane's page 0.
    pub offset: u64,
    /// Bytes from a page to the next one.
    pub page_bytes: u64,
}

/// The planes of a rank, in the order of its stage's `page_bytes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planes(pub Vec<Plane>);

impl Planes {
    /// The offset of a run's first byte in a memory of `bytes` bytes, in which all its pieces lie.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a run that does not lie in the memory, or whose plane is not there.
    pub fn find(&self, bytes: u64, origin: u64, run: &Run) -> Result<u64> {
        let found = || {
            let from = &run.from;
            let plane = self.0.get(usize::try_from(from.plane).ok()?)?;
            let page = plane.page_bytes.checked_mul(from.page.into())?;
            let first = origin.checked_add(plane.offset)?.checked_add(page)?.checked_add(from.offset)?;
            let last = u64::from(run.pieces).checked_sub(1)?.checked_mul(from.stride)?;
            let end = first.checked_add(last)?.checked_add(run.bytes)?;
            (end <= bytes).then_some(first)
        };
        found().ok_or_else(|| {
            Error::new(Kind::OutOfRange, OPERATION)
                .at("a run outside of the memory")
                .with("origin", origin)
                .with("page", run.from.page)
                .with("bytes", bytes)
        })
    }

    /// Copies a run's pieces, one after another, out of a memory.
    ///
    /// # Errors
    /// As [`Planes::find`]; [`Kind::OutOfRange`] also for an `into` of another length than the run's.
    pub fn read(&self, region: &Region, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        let first = self.find(region.len(), origin, run)?;
        let piece = self::piece(run, into.len())?;
        for (at, to) in (0..).zip(into.chunks_exact_mut(piece)) {
            region.copy_out(first + at * run.from.stride, to)?;
        }
        Ok(())
    }
}

/// The bytes of a run's piece, if all of them are `bytes` bytes.
fn piece(run: &Run, bytes: usize) -> Result<usize> {
    let piece = usize::try_from(run.bytes).ok().filter(|piece| *piece > 0 && run.total() == bytes as u64);
    piece.ok_or_else(|| {
        Error::new(Kind::OutOfRange, OPERATION).at("bytes of a run").with("bytes", bytes as u64)
    })
}

/// See the module's head.
#[derive(Debug)]
pub struct SendMemory {
    map: Map,
    planes: Planes,
}

impl SendMemory {
    /// Memory of `request.bytes` bytes. A fabric over shared memory needs [`os::Request::shared`].
    ///
    /// # Errors
    /// Those of [`Map::new`]. What the system refused besides is listed.
    pub fn new(
        request: &os::Request,
        planes: Planes,
        faults: &dyn Faults,
    ) -> Result<(SendMemory, Vec<Fallback>)> {
        let (map, refused) = Map::new(request, faults)?;
        Ok((SendMemory { map, planes }, refused))
    }

    /// Writes a run's pieces, which come one after another, where an origin says.
    ///
    /// # Errors
    /// As [`Planes::read`].
    pub fn write(&self, origin: u64, run: &Run, bytes: &[u8]) -> Result<()> {
        let first = self.planes.find(self.map.len(), origin, run)?;
        let piece = self::piece(run, bytes.len())?;
        for (at, from) in (0..).zip(bytes.chunks_exact(piece)) {
            self.map.copy_in(first + at * run.from.stride, from)?;
        }
        Ok(())
    }

    /// The memory.
    pub const fn map(&self) -> &Map {
        &self.map
    }

    /// Where rows are in it.
    pub const fn planes(&self) -> &Planes {
        &self.planes
    }
}

impl Source for SendMemory {
    fn read(&mut self, origin: u64, run: &Run, into: &mut [u8]) -> Result<()> {
        self.planes.read(&self.map, origin, run, into)
    }
}
