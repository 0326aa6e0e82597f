//! Computes the effect of the host stride, and of an alternative: requests over the link against host memory.
//!
//! A row's stride on the host is its size rounded up to a multiple of 64 bytes, unless a shape sets another: 704 for
//! 656. The GPU requests lines of 128 bytes, so at 704 every second row begins in the middle of a line. At 768 each
//! row begins with a line, for a tenth more host memory. Pieces are numbered by the lines that a row really has, so
//! that both strides need as few requests; short rows are numbered without gaps, and may need more. The effect of the
//! host's memory and of the GPU's page walks needs a measurement.

use crate::device::clock::{Design, fetched};
use crate::geometry::Geometry;

/// Bytes of a line that a GPU requests over the link.
const LINE: u32 = 128;
/// The default multiple.
const DEFAULT: u32 = crate::geometry::LINE;

/// A stride of rows in host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stride {
    /// Bytes from one row to the next.
    pub bytes: u32,
    /// Mean requests of lines for a gathered row.
    pub requests: f64,
    /// Mean bytes of sectors that cross the link for it.
    pub fetched: f64,
}

impl Stride {
    fn at(row: u32, bytes: u32) -> Stride {
        Stride { bytes, requests: Design::NOW.requests(row, bytes), fetched: fetched(row, bytes) }
    }

    /// The stride of a cache.
    pub fn of(geometry: &Geometry) -> Stride {
        Stride::at(geometry.row_bytes(), geometry.host_stride())
    }

    /// The alternative: whole lines, or the default if the stride has whole lines. None if these are equal.
    pub fn other(geometry: &Geometry) -> Option<Stride> {
        let (row, own) = (geometry.row_bytes(), geometry.host_stride());
        let lines = row.next_multiple_of(LINE);
        let other = if own == lines { row.next_multiple_of(DEFAULT) } else { lines };
        (other != own).then(|| Stride::at(row, other))
    }

    /// Bytes of rows that take `bytes` at the stride `own`.
    pub const fn host_bytes(&self, bytes: u64, own: u32) -> u64 {
        (bytes as u128 * self.bytes as u128 / own as u128) as u64
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::geometry::Shape;

    fn of(shape: Shape) -> (Stride, Option<Stride>) {
        let geometry = Geometry::new(shape).unwrap_or_else(|error| unreachable!("{error}"));
        (Stride::of(&geometry), Stride::other(&geometry))
    }

    #[test]
    fn a_stride_of_whole_lines_and_the_default_are_compared_with_each_other() {
        let (own, other) = of(Shape::DEEPSEEK_V3_2);
        assert_eq!(own, Stride { bytes: 704, requests: 6.0, fetched: 704.0 });
        assert_eq!(other, Some(Stride { bytes: 768, requests: 6.0, fetched: 704.0 }));
        let (lines, other) = of(Shape { host_stride: 768, ..Shape::DEEPSEEK_V3_2 });
        assert_eq!((lines.bytes, other), (768, Some(own)));
        // 64 pages of 64 rows.
        assert_eq!(lines.host_bytes(64 * 64 * 704, 704), 64 * 64 * 768);
        // 1,152 bytes are 9 lines; packed rows of 656 touch more sectors than they have to.
        assert_eq!(of(Shape::DEEPSEEK_V3_2_BF16).1, None);
        let (packed, other) = of(Shape { host_stride: 656, ..Shape::DEEPSEEK_V3_2 });
        assert_eq!((packed.fetched, other.map(|other| other.bytes)), (704.0, Some(768)));
        // Short rows have no gaps between their numbers: of one in eight a line falls to two warps.
        let short = Shape { runs: [192, 0], ..Shape::DEEPSEEK_V3_2 };
        let (own, other) = of(short);
        assert_eq!(own.requests, 2.125);
        assert_eq!(other.map(|other| (other.bytes, other.requests)), Some((256, 2.125)));
    }
}
