//! One contiguous address range over pieces of several maps.
//!
//! An attention kernel needs one base address and slots at a fixed stride. But the scratch slots that all layers use
//! (landing and scratch) exist once in memory and must appear in each layer's range. So addresses are reserved first,
//! without memory, and the pieces are mapped over them one after another. The same memory can be mapped at many
//! addresses, and a write through one is visible at all others.
//!
//! A range costs one kernel mapping for each piece (the system allows 65,530 for a process by default) and page
//! tables for each address, but no further memory. The maps live as long as the range.

use std::ops::Deref;

use super::refusal::{OsResult, Refusal};
use super::{Faults, Map, Protection, Region, page_size};
use crate::error::{Error, Kind, Result};
use crate::sync::Arc;

/// The operation's name in errors of this file.
const OPERATION: &str = "map range";

/// A piece of a map. Offset and bytes are multiples of the map's page size.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The map.
    pub map: &'a Arc<Map>,
    /// The first byte inside the map.
    pub offset: u64,
    /// The length in bytes, above 0.
    pub bytes: u64,
}

/// Addresses over pieces of maps. It dereferences to its [`Region`], which has the reads and writes.
#[derive(Debug)]
pub struct Range {
    region: Region,
    /// The pieces, in order.
    placed: Vec<Placed>,
}

/// A piece that is mapped.
#[derive(Clone, Debug)]
struct Placed {
    map: Arc<Map>,
    offset: u64,
    bytes: u64,
}

impl Placed {
    fn of(piece: &Piece<'_>) -> Placed {
        Placed { map: Arc::clone(piece.map), offset: piece.offset, bytes: piece.bytes }
    }

    fn piece(&self) -> Piece<'_> {
        Piece { map: &self.map, offset: self.offset, bytes: self.bytes }
    }
}

impl Range {
    /// Maps the pieces one after another, all with `protection`.
    ///
    /// # Errors
    /// [`Kind::InvalidConfig`] for no pieces, or for a piece that does not begin and end on its map's page borders,
    /// in the map and in the range; [`Kind::Unsupported`] for a map without a descriptor (a private one, as where
    /// memfd was refused); [`Kind::OutOfRange`] for a piece that exceeds its map; [`Kind::Overflow`],
    /// [`Kind::OutOfMemory`] and [`Kind::OsRefused`] from reserving and mapping.
    pub fn new(pieces: &[Piece<'_>], protection: Protection, faults: &dyn Faults) -> Result<Range> {
        let total = check(pieces)?;
        let align = pieces.iter().map(|piece| piece.map.page_bytes()).fold(page_size(), u64::max);
        let failed = |refusal: Refusal| refusal.error(OPERATION).with("wanted", total);
        // The system's answer where a piece may only be read (`Map::export`).
        let hinted = |refusal: Refusal| match failed(refusal) {
            error if refusal.errno == libc::EPERM && protection == Protection::ReadWrite => {
                error.hint("map it before it is exported to be read only, or map it to be read")
            }
            error => error,
        };
        let region = Region::reserve(total, align, protection, faults).map_err(failed)?;
        place(&region, 0, pieces.iter().copied(), faults).map_err(hinted)?;
        Ok(Range { region, placed: pieces.iter().map(Placed::of).collect() })
    }

    /// Maps other pieces from `position` on, at the same addresses, in place of as many bytes of whole pieces. The
    /// caller has seen to it that nothing reads or writes there meanwhile.
    ///
    /// # Errors
    /// As [`Range::new`]; [`Kind::OutOfRange`] for a place that does not begin and end where pieces do. What was mapped
    /// before is mapped again then. [`Kind::DeviceFailed`] if that is refused too: then some of the addresses map what
    /// was there before and some the new pieces.
    pub fn replace(&mut self, position: u64, pieces: &[Piece<'_>], faults: &dyn Faults) -> Result<()> {
        const OPERATION: &str = "remap";
        let total = check(pieces)?;
        let mut borders = vec![0];
        borders.extend(self.placed.iter().scan(0, |at, piece| {
            *at += piece.bytes;
            Some(*at)
        }));
        let at = |border| borders.iter().position(|other| *other == border);
        let ends = at(position).zip(position.checked_add(total).and_then(at));
        let Some(old) = ends.and_then(|(first, last)| self.placed.get(first..last)) else {
            let error = Error::new(Kind::OutOfRange, OPERATION).at("borders of pieces");
            return Err(error.with("position", position).with("bytes", total));
        };
        if let Err(refusal) = place(&self.region, position, pieces.iter().copied(), faults) {
            let error = refusal.error(OPERATION).with("wanted", total);
            return Err(match place(&self.region, position, old.iter().map(Placed::piece), faults) {
                Ok(()) => error,
                Err(_) => Error::new(Kind::DeviceFailed, OPERATION)
                    .at(error.place().to_owned())
                    .hint("nothing that uses these addresses is right any more: end the process"),
            });
        }
        let first = ends.map_or(0, |(first, _)| first);
        let count = old.len();
        self.placed.splice(first..first + count, pieces.iter().map(Placed::of));
        Ok(())
    }

    /// The number of mapped pieces.
    pub fn pieces(&self) -> usize {
        self.placed.len()
    }
}

impl Deref for Range {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

/// Maps pieces one after another from `position` on.
fn place<'a>(
    region: &Region,
    mut position: u64,
    pieces: impl Iterator<Item = Piece<'a>>,
    faults: &dyn Faults,
) -> OsResult<()> {
    for piece in pieces {
        if let Some(fd) = piece.map.descriptor() {
            region.place(position, fd, piece.offset, piece.bytes, faults)?;
            position += piece.bytes;
        }
    }
    Ok(())
}

/// Checks every piece; returns the bytes of all.
fn check(pieces: &[Piece<'_>]) -> Result<u64> {
    if pieces.is_empty() {
        return Err(Error::new(Kind::InvalidConfig, OPERATION).at("pieces").with("pieces", 0_u32));
    }
    let mut total = 0_u64;
    for (number, piece) in pieces.iter().enumerate() {
        let error = |kind, place| Error::new(kind, OPERATION).at(place).with("piece", number as u64);
        let page = piece.map.page_bytes();
        if piece.map.descriptor().is_none() {
            return Err(error(Kind::Unsupported, "memory without a descriptor")
                .hint("ask for shared memory; where memfd_create is refused, allow it"));
        }
        if piece.bytes == 0 || [total, piece.offset, piece.bytes].iter().any(|n| n % page != 0) {
            return Err(error(Kind::InvalidConfig, "page borders")
                .with("offset", piece.offset)
                .with("bytes", piece.bytes)
                .with("page", page));
        }
        if piece.offset.checked_add(piece.bytes).is_none_or(|end| end > piece.map.len()) {
            return Err(error(Kind::OutOfRange, "piece of a map")
                .with("offset", piece.offset)
                .with("bytes", piece.bytes)
                .with("length", piece.map.len()));
        }
        total = total.checked_add(piece.bytes).ok_or_else(|| error(Kind::Overflow, "bytes of all pieces"))?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::super::{Call, Inject, NoFaults, Request};
    use super::*;

    fn map(pages: u64, shared: bool) -> Arc<Map> {
        let bytes = pages * page_size();
        let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared };
        Arc::new(Map::new(&request, &NoFaults).unwrap().0)
    }

    fn byte(region: &Region, offset: u64) -> u8 {
        let mut one = [0];
        region.copy_out(offset, &mut one).unwrap();
        one[0]
    }

    #[test]
    fn a_write_at_one_address_is_read_at_the_others() {
        let page = page_size();
        let (own, scratch) = (map(4, true), map(2, true));
        let shared = Piece { map: &scratch, offset: page, bytes: page };
        let first = Piece { map: &own, offset: 0, bytes: 2 * page };
        let second = Piece { map: &own, offset: 2 * page, bytes: 2 * page };
        // Two layers, each with two pages of its own followed by the same shared page.
        let range = Range::new(&[first, shared, second, shared], Protection::ReadWrite, &NoFaults).unwrap();
        assert_eq!((range.len(), range.pieces()), (6 * page, 4));
        range.copy_in(2 * page + 7, &[0x5A]).unwrap();
        assert_eq!(byte(&range, 5 * page + 7), 0x5A);
        assert_eq!(byte(&scratch, page + 7), 0x5A);
        own.copy_in(2 * page, &[0xC3]).unwrap();
        assert_eq!((byte(&range, 3 * page), byte(&range, 0)), (0xC3, 0));
        // One copy across the border of two pieces.
        range.copy_in(2 * page - 1, &[1, 2]).unwrap();
        assert_eq!((byte(&own, 2 * page - 1), byte(&scratch, page)), (1, 2));
        assert!(range.copy_in(6 * page, &[1]).is_err());
    }

    #[test]
    fn the_range_keeps_its_maps() {
        let page = page_size();
        let own = map(1, true);
        let range =
            Range::new(&[Piece { map: &own, offset: 0, bytes: page }], Protection::ReadWrite, &NoFaults)
                .unwrap();
        assert_eq!(Arc::strong_count(&own), 2);
        own.copy_in(0, &[9]).unwrap();
        drop(own);
        assert_eq!(byte(&range, 0), 9);
    }

    #[test]
    fn an_impossible_piece_is_refused() {
        let page = page_size();
        let (own, private) = (map(2, true), map(2, false));
        let refused = |piece| Range::new(&[piece], Protection::ReadWrite, &NoFaults).unwrap_err();
        let e = refused(Piece { map: &private, offset: 0, bytes: page });
        assert_eq!((e.kind(), e.place()), (Kind::Unsupported, "memory without a descriptor"));
        assert!(e.to_string().contains("memfd_create is refused"), "{e}");
        for (offset, bytes) in [(1, page), (0, page + 1), (0, 0)] {
            assert_eq!(refused(Piece { map: &own, offset, bytes }).kind(), Kind::InvalidConfig);
        }
        for (offset, bytes) in [(page, 2 * page), (u64::MAX - page + 1, page), (2 * page, page)] {
            assert_eq!(refused(Piece { map: &own, offset, bytes }).kind(), Kind::OutOfRange);
        }
        assert_eq!(
            Range::new(&[], Protection::ReadWrite, &NoFaults).unwrap_err().kind(),
            Kind::InvalidConfig
        );
    }

    #[test]
    fn a_refused_mapping_is_an_error_with_the_bytes_of_all() {
        let page = page_size();
        let own = map(2, true);
        let piece = Piece { map: &own, offset: 0, bytes: page };
        for (call, errno, kind) in [
            (Call::Map, libc::ENOMEM, Kind::OutOfMemory),
            (Call::MapFixed, libc::ENOMEM, Kind::OutOfMemory),
            (Call::MapFixed, libc::EPERM, Kind::OsRefused),
        ] {
            let e =
                Range::new(&[piece, piece], Protection::ReadWrite, &Inject::call(call, errno)).unwrap_err();
            assert_eq!((e.kind(), e.number("wanted")), (kind, Some(2 * page)));
        }
        assert_eq!(Arc::strong_count(&own), 1);
    }
}
