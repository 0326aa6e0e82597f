//! Counts the link requests of row transfers, so that the first figures of a GPU show whether its link is bound by
//! requests or by bytes.
//!
//! **Counted by shape, not measured.** A load or store of a warp covers 512 bytes of a call's pieces. It sends one
//! *request* for each line of 128 bytes that it touches, and the request names the *sectors* of 32 bytes that the
//! lanes use. A line that two warps touch is two requests, so the start of a row's numbering matters: the kernels
//! number rows of these sizes by their lines of 128 bytes, so that no two warps request the same line. Counts are
//! means over all alignments of a row in host memory and in a call. Rows that are not whole sectors move more bytes
//! than they have. Sectors that a cache might serve again are not counted. What the link adds to a request, headers
//! and the walks of page tables, is not counted either.
//!
//! **Ceilings.** One long run over memory requests whole lines only, so a ceiling of R bytes a second corresponds to R
//! / 128 requests a second. A figure near its share of requests and far from its share of sectors is bound by
//! requests, and vice versa. Rows of whole aligned lines cannot distinguish the two. Neither can the shares of a short
//! call, which mostly shows launches and round trips.

use std::collections::BTreeSet;

use super::row_shape::RowShape;

/// Bytes of a line, of a sector, of a piece of a row, and of the pieces that a warp moves at once.
const LINE: u32 = 128;
const SECTOR: u32 = 32;
const PIECE: u32 = 16;
const WARP: u32 = 32 * PIECE;

/// The mean requests and bytes of a row on the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Asks {
    /// Lines of 128 bytes, counted once for each warp that touches them.
    pub requests: f64,
    /// Bytes of the sectors that the requests name.
    pub bytes: f64,
}

impl Asks {
    /// The demand of a row as the kernels number it.
    pub fn of(shape: RowShape) -> Asks {
        Asks::numbered(shape, LINE)
    }

    /// The demand of a row whose numbering begins with lines of `grain` bytes.
    fn numbered(RowShape { row, stride }: RowShape, grain: u32) -> Asks {
        // Pages begin with a line, so a row begins at any multiple of the greatest common divisor of stride and line.
        let places = multiples(gcd(stride, LINE), LINE);
        let (mut requests, mut sectors, mut count) = (0, 0, 0);
        for address in places {
            let gap = address % grain;
            let numbers = if grain == LINE { LINE } else { row.next_multiple_of(grain) };
            for first in multiples(gcd(numbers, WARP), WARP) {
                let pieces = multiples(PIECE, row).map(|at| ((first + gap + at) / WARP, address + at));
                let of = |bytes: u32| -> BTreeSet<(u32, u32)> {
                    pieces.clone().map(|(warp, at)| (warp, at / bytes)).collect()
                };
                requests += of(LINE).len();
                sectors += of(SECTOR).len();
                count += 1;
            }
        }
        let mean = |sum: usize| sum as f64 / f64::from(count.max(1));
        Asks { requests: mean(requests), bytes: mean(sectors) * f64::from(SECTOR) }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The multiples of `of` below `end`.
fn multiples(of: u32, end: u32) -> impl Iterator<Item = u32> + Clone {
    (0..end).step_by(of.max(1) as usize)
}

/// A figure's demand on the link, and the rates that the link provides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The demand of each row.
    pub asks: Asks,
    /// Rows of a call.
    pub rows: u32,
    /// Bytes a second of one long run.
    pub ceiling: f64,
    /// Microseconds of a launch.
    pub launch_us: f64,
}

impl Link {
    /// Requests of a call.
    pub fn requests(&self) -> f64 {
        f64::from(self.rows) * self.asks.requests
    }

    /// Bytes of a call's sectors.
    pub fn bytes(&self) -> f64 {
        f64::from(self.rows) * self.asks.bytes
    }

    /// Requests a second of one long run.
    pub fn most_requests(&self) -> f64 {
        self.ceiling / f64::from(LINE)
    }

    /// The least microseconds of a call by its requests.
    pub fn requests_us(&self) -> f64 {
        self.launch_us + self.requests() / self.most_requests() * 1e6
    }

    /// The least microseconds of a call by its sectors.
    pub fn bytes_us(&self) -> f64 {
        self.launch_us + self.bytes() / self.ceiling * 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(row: u32, stride: u32, grain: u32) -> (f64, f64) {
        let Asks { requests, bytes } = Asks::numbered(RowShape { row, stride }, grain);
        (requests, bytes)
    }

    #[test]
    fn a_row_requests_its_lines_and_those_that_two_warps_share() {
        // By hand: 656 bytes touch six lines at any alignment. Of ten consecutive lines of 64 bytes, one in eight
        // begins a warp, and half of these are in the middle of a 128-byte line: 10 / 16 more.
        assert_eq!(asks(656, 704, 64), (6.625, 672.0));
        assert_eq!(asks(656, 704, 128), (6.0, 672.0));
        assert_eq!(asks(656, 768, 128), (6.0, 672.0));
        // Of the 40 pieces after the first, one in 32 begins a warp, and one in eight of these a line; half of them are
        // in the middle of a sector.
        let (requests, bytes) = asks(656, 656, 16);
        assert_eq!((requests, bytes), (6.0 + 40.0 / 32.0 * 7.0 / 8.0, 672.0 + 40.0 / 32.0 / 2.0 * 32.0));
        assert!((requests - 7.09).abs() < 0.005, "{requests}");
        // A long run requests whole lines.
        assert_eq!(asks(1152, 1152, 128), (9.0, 1152.0));
    }

    #[test]
    fn rows_are_counted_as_the_kernel_numbers_them() {
        let requests = [656, 704, 768].map(|stride| Asks::of(RowShape { row: 656, stride }).requests);
        assert_eq!(requests, [6.0; 3]);
    }

    #[test]
    fn a_request_bound_link_is_distinguished_from_a_byte_bound_link() {
        let shape = RowShape { row: 656, stride: 704 };
        let link = Link { asks: Asks::of(shape), rows: 4096, ceiling: 35.2e9, launch_us: 2.0 };
        // 35.2 GB/s are 275 million lines a second.
        assert_eq!(link.most_requests(), 275e6);
        let payload = |us: f64| f64::from(4096 * 656_u32) / (us - 2.0) / 1e3;
        let by = [payload(link.requests_us()), payload(link.bytes_us())];
        assert!((by[0] - 30.07).abs() < 0.01 && (by[1] - 34.36).abs() < 0.01, "{by:?}");
    }
}
