//! How a GPU copies the rows of a layer: in pieces, numbered so that few lines of host memory are asked for twice. The
//! CUDA device numbers them so, and what a row costs is counted from the same numbers.
//!
//! A multiprocessor asks L2, and so the link, for lines of 128 bytes: a warp's load of 16 bytes a thread is four of
//! them, if they are whole. Were a row's pieces numbered from its first byte on, one line in five or so would fall to
//! two warps, and be asked for by both. So a row's numbers begin with its first line, wherever in it the row begins,
//! and end with its last line. What the numbers leave out costs threads that idle for a load, and nothing of the link.
//!
//! Requests of a row are then the lines that it touches: 6.0 for one of 656 bytes, whether rows stand 656, 704 or 768
//! bytes apart. Numbered from its first byte it would be 7.1, if a load asks for a line once, and more if the hardware
//! divides it into quarters. Short rows are numbered from their first byte all the same: see [`Pieces::of`].

/// What a multiprocessor asks memory for at once, bytes.
pub(crate) const LINE: u32 = 128;
/// Threads of a warp, whose load is one instruction.
const WARP: u32 = 32;

/// See `abi::Layer` of the CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pieces {
    /// Bytes of a piece: 16, 8 or 4.
    pub bytes: u32,
    /// From a row's first number to the next row's.
    pub numbers: u32,
    /// Of a row's address, its place in the line; 0 where numbers have no gaps.
    pub mask: u32,
}

impl Pieces {
    /// Of rows of `row` bytes that stand `stride` apart from address `rows` on, where pieces divide `others` too: runs,
    /// blocks, addresses, or-ed. Where more than a fifth of the numbers would be left out, as with rows of less than a
    /// line, they have no gaps.
    pub fn of(row: u32, stride: u32, rows: u64, others: u64) -> Pieces {
        let places = rows | u64::from(stride);
        let bytes = match u64::from(row) | places | others {
            all if all.is_multiple_of(16) => 16,
            all if all.is_multiple_of(8) => 8,
            _ => 4,
        };
        // Rows begin at any multiple of this in a line.
        let aligned = 1 << (places | u64::from(LINE)).trailing_zeros();
        let pieces = row / bytes;
        let numbers = (LINE - aligned + row).div_ceil(LINE) * (LINE / bytes);
        match 5 * pieces >= 4 * numbers {
            true => Pieces { bytes, numbers, mask: LINE - 1 },
            false => Pieces { bytes, numbers: pieces, mask: 0 },
        }
    }

    /// Requests of lines over the link that a row takes, mean over where rows stand: what a warp asks for with one load
    /// instruction is a request for each line that it touches.
    pub fn requests(&self, row: u32, stride: u32) -> f64 {
        let (mut all, mut count) = (0_u32, 0_u32);
        // Which of a page's rows are asked for is chance, and so is which of a warp's threads has a row's first number.
        for phase in (0..WARP).map(|at| at * (stride % LINE) % LINE) {
            for first in (0..WARP).map(|at| at * (self.numbers % WARP) % WARP) {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MANY: u64 = 4096;

    /// Of many rows far from each other: requests a row, when each warp's load asks once for every line it touches.
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
    fn a_row_is_asked_for_by_the_lines_that_it_touches() {
        for (stride, packed) in [(656, 7.09), (704, 7.09), (768, 7.13)] {
            let of = Pieces::of(656, stride, 1 << 31, 1 << 30);
            assert_eq!(of, Pieces { bytes: 16, numbers: 48, mask: 127 });
            assert_eq!(naive(of, 656, stride.into(), 1 << 31), 6.0, "{stride}");
            // Without gaps, lines that fall to two warps are asked for twice.
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
