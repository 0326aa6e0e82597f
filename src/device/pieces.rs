//! Row copies on a GPU in pieces of 4 to 16 bytes, numbered so that few lines of host memory are requested twice. The
//! CUDA device passes this numbering to its kernels, and the cost model counts a row's link requests by the same
//! numbering.
//!
//! A multiprocessor requests lines of 128 bytes from L2, and so from the link. A warp's load of 16 bytes per thread
//! covers four of them if it is aligned. If a row's pieces were numbered from its first byte, about one line in five
//! would be split between two warps, and both would request it. So a row's numbers begin at its first line, wherever
//! the row begins in that line, and end with its last line. The unused numbers cost idle threads for one load, and
//! nothing on the link.
//!
//! A row then costs one request for each line that it touches: 6.0 for a row of 656 bytes, at a stride of 656, 704 or
//! 768 bytes. Numbered from its first byte it would cost 7.1, if a load requests a line once, and more if the
//! hardware divides lines into quarters. Short rows are still numbered from their first byte: see [`Pieces::of`].

/// Bytes of a memory request of a multiprocessor.
pub(crate) const LINE: u32 = 128;
/// Threads of a warp, whose load is one instruction.
const WARP: u32 = 32;

/// The numbering of one layer's pieces. `abi::Layer` of the CUDA device carries it to the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Bytes of a piece: 16, 8 or 4.
    pub bytes: u32,
    /// The distance from a row's first number to the next row's.
    pub numbers: u32,
    /// The mask that extracts a row's place in its line from its address; 0 where numbers have no gaps.
    pub mask: u32,
}

impl Pieces {
    /// The numbering for rows of `row` bytes, `stride` bytes apart, from address `rows` on. Pieces divide `others`
    /// too: run lengths, slot blocks and addresses, or-ed together. Where more than a fifth of the numbers would be
    /// unused, as for rows shorter than a line, the numbers have no gaps.
    pub fn of(row: u32, stride: u32, rows: u64, others: u64) -> Pieces {
        let places = rows | u64::from(stride);
        let bytes = match u64::from(row) | places | others {
            all if all.is_multiple_of(16) => 16,
            all if all.is_multiple_of(8) => 8,
            _ => 4,
        };
        // A row begins at any multiple of this in a line.
        let aligned = 1 << (places | u64::from(LINE)).trailing_zeros();
        let pieces = row / bytes;
        let numbers = (LINE - aligned + row).div_ceil(LINE) * (LINE / bytes);
        match 5 * pieces >= 4 * numbers {
            true => Pieces { bytes, numbers, mask: LINE - 1 },
            false => Pieces { bytes, numbers: pieces, mask: 0 },
        }
    }

    /// Line requests over the link for a row, as a mean over the rows' places. One load instruction of a warp makes
    /// one request for each line that it touches.
    pub fn requests(&self, row: u32, stride: u32) -> f64 {
        let (mut all, mut count) = (0_u32, 0_u32);
        // Rows of a page are selected at random, and so is the thread that has a row's first number.
        for phase in multiples(stride, LINE) {
            for first in multiples(self.numbers, WARP) {
                let first = first + (phase & self.mask) / self.bytes;
                let asked = |piece: u32| ((first + piece) / WARP, (phase + piece * self.bytes) / LINE);
                let pieces = 1..row / self.bytes;
                all += 1 + pieces.filter(|piece| asked(*piece) != asked(piece - 1)).count() as u32;
                count += 1;
            }
        }
        f64::from(all) / f64::from(count)
    }
}

/// The different values of `at * step` modulo a power of two, for the rows or warps `at`; each is equally frequent. At
/// most 32 are used, which are all values modulo 128 if `step` is a multiple of 4.
fn multiples(step: u32, modulus: u32) -> impl Iterator<Item = u32> {
    let period = modulus >> (step | modulus).trailing_zeros();
    (0..period.min(WARP)).map(move |at| at * (step % modulus) % modulus)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MANY: u64 = 4096;

    /// Requests per row, for many rows far from each other, when each warp's load requests every line that it touches
    /// once.
    fn naive(pieces: Pieces, row: u64, stride: u64, rows: u64) -> f64 {
        let mut asked = 0;
        let mut warp = std::collections::BTreeSet::new();
        for number in 0..MANY * u64::from(pieces.numbers) {
            let (index, place) = (number / u64::from(pieces.numbers), number % u64::from(pieces.numbers));
            let start = rows + (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 44) * stride;
            let before = (start & u64::from(pieces.mask)) / u64::from(pieces.bytes);
            if place >= before && (place - before) * u64::from(pieces.bytes) < row {
                warp.insert((start + (place - before) * u64::from(pieces.bytes)) / 128);
            }
            if number % 32 == 31 {
                asked += warp.len();
                warp.clear();
            }
        }
        (asked + warp.len()) as f64 / MANY as f64
    }

    #[test]
    fn a_row_needs_a_request_for_each_line_that_it_touches() {
        for (stride, packed) in [(656, 7.09), (704, 7.09), (768, 7.13)] {
            let of = Pieces::of(656, stride, 1 << 31, 1 << 30);
            assert_eq!(of, Pieces { bytes: 16, numbers: 48, mask: 127 });
            assert_eq!(naive(of, 656, stride.into(), 1 << 31), 6.0, "{stride}");
            // Without gaps, a line that is split between two warps is requested twice.
            let found = naive(Pieces { numbers: 41, mask: 0, ..of }, 656, stride.into(), 1 << 31);
            assert!((found - packed).abs() < 0.05, "{stride}: {found}");
        }
    }

    #[test]
    fn every_piece_of_a_row_has_a_number_wherever_it_begins() {
        for runs in
            [[656, 0], [1152, 0], [640, 0], [512, 128], [20, 0], [16, 32], [132, 0], [2048, 2048], [600, 0]]
        {
            for more in [0, 4, 8, 16, 48, 64, 100] {
                for skew in [0, 4, 8, 16, 64, 96] {
                    let row = runs[0] + runs[1];
                    let of = Pieces::of(row, row + more, (1 << 20) + skew, u64::from(runs[0] | runs[1]));
                    let used = if of.mask == 0 { of.numbers } else { of.numbers - (row / of.bytes) };
                    assert!(
                        5 * (row / of.bytes) >= 4 * of.numbers,
                        "{runs:?} {more} {skew}: {used} are left out"
                    );
                    for index in 0..64 {
                        let start = (1 << 20) + skew + u64::from(index * (row + more));
                        let before = (start as u32 & of.mask) / of.bytes;
                        assert!(before + row / of.bytes <= of.numbers, "{runs:?} {more} {skew} {index}");
                        assert!(start.is_multiple_of(of.bytes.into()), "{runs:?} {more} {skew} {index}");
                    }
                }
            }
        }
    }

    #[test]
    fn requests_of_a_row_are_those_that_its_pieces_make() {
        let rows = [
            (656, 656),
            (656, 704),
            (656, 768),
            (1152, 1152),
            (512, 512),
            (132, 192),
            (132, 132),
            (192, 192),
        ];
        for (row, stride) in rows.into_iter().chain([(192, 256), (64, 64), (20, 20), (600, 608)]) {
            let of = Pieces::of(row, stride, 0, 0);
            let packed = Pieces { numbers: row / of.bytes, mask: 0, ..of };
            for pieces in [of, packed, Pieces { numbers: row.next_multiple_of(64) / of.bytes, ..packed }] {
                let found = pieces.requests(row, stride);
                let wanted = naive(pieces, row.into(), stride.into(), 1 << 31);
                assert!((found - wanted).abs() < 0.05, "{row} at {stride}: {pieces:?} {found} {wanted}");
            }
        }
    }

    #[test]
    fn rows_of_less_than_a_line_are_numbered_without_gaps() {
        let of = Pieces::of(64, 64, 0, 0);
        assert_eq!(of, Pieces { bytes: 16, numbers: 4, mask: 0 });
        let of = Pieces::of(20, 20, 4, 0);
        assert_eq!(of, Pieces { bytes: 4, numbers: 5, mask: 0 });
        // Nor are those whose numbers would have gaps of more than a fifth.
        assert_eq!(Pieces::of(192, 192, 0, 0), Pieces { bytes: 16, numbers: 12, mask: 0 });
        assert_eq!(Pieces::of(132, 132, 0, 0), Pieces { bytes: 4, numbers: 33, mask: 0 });
    }
}
