//! Which query rows of a step were resolved and which scattered, layer by layer: what its report asks for.
//!
//! A bit each, for the batch rows of one step; a batch row's words stand together, so that a step of few rows in a
//! large batch clears and asks for few.

use crate::device::block::{Cause, Entry};
use crate::residency::Rows;

/// What was done of a query row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Resolved = 0,
    Scattered = 1,
}

/// See the file's head.
#[derive(Debug)]
pub(super) struct Marks {
    layers: usize,
    query_rows: u32,
    /// `[batch][layers][2][words]`.
    bits: Vec<u32>,
}

/// The bits of a word, the first of which is query row `32 * word`, that stand for query rows below `count`.
fn below(word: u32, count: u32) -> u32 {
    match count.saturating_sub(word.saturating_mul(u32::BITS)) {
        left @ 0..u32::BITS => (1 << left) - 1,
        _ => u32::MAX,
    }
}

impl Marks {
    pub(super) fn new(layers: u32, batch: u32, query_rows: u32) -> Marks {
        let marks = Marks { layers: layers as usize, query_rows, bits: Vec::new() };
        let words = batch as usize * marks.layers * 2 * marks.words();
        Marks { bits: vec![0; words], ..marks }
    }

    /// Words of a layer's query rows.
    fn words(&self) -> usize {
        self.query_rows.div_ceil(u32::BITS) as usize
    }

    fn at(&self, row: usize, layer: usize, mark: Mark) -> usize {
        ((row * self.layers + layer) * 2 + mark as usize) * self.words()
    }

    /// A step of so many batch rows begins.
    pub(super) fn begin(&mut self, rows: usize) {
        let words = self.at(rows, 0, Mark::Resolved).min(self.bits.len());
        self.bits[..words].fill(0);
    }

    /// Notes what was done of a batch row's query rows.
    pub(super) fn note(&mut self, mark: Mark, (row, layer): (usize, usize), rows: Rows) {
        let (from, end) = (self.at(row, layer, mark), rows.first + rows.count);
        for word in rows.first / u32::BITS..end.div_ceil(u32::BITS) {
            self.bits[from + word as usize] |= below(word, end) & !below(word, rows.first);
        }
    }

    /// The first query row of a batch row of which this was not done in a layer.
    fn first_without(&self, mark: Mark, (row, layer): (usize, usize), query_rows: u32) -> Option<u32> {
        let from = self.at(row, layer, mark);
        (0..query_rows.min(self.query_rows).div_ceil(u32::BITS)).find_map(|word| {
            let due = below(word, query_rows.min(self.query_rows));
            let left = due & !self.bits[from + word as usize];
            (left != 0).then(|| word * u32::BITS + left.trailing_zeros())
        })
    }

    /// The first layer in which something is missing of a batch row, what, and of which query row.
    pub(super) fn missing(&self, row: usize, entry: Entry, scatter: bool) -> Option<(usize, Cause, u32)> {
        (0..self.layers).find_map(|layer| {
            let without = |mark, cause| {
                let query = self.first_without(mark, (row, layer), entry.query_rows)?;
                Some((layer, cause, query))
            };
            let resolved = without(Mark::Resolved, Cause::NotResolved);
            resolved.or_else(|| without(Mark::Scattered, Cause::NotScattered).filter(|_| scatter))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_missing_until_each_of_its_query_rows_was_done_in_every_layer() {
        let entry = Entry { query_rows: 70, ..Entry::default() };
        let mut marks = Marks::new(2, 3, 100);
        let rows = |first, count| Rows { first, count };
        for mark in [Mark::Resolved, Mark::Scattered] {
            let cause = [Cause::NotResolved, Cause::NotScattered][mark as usize];
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 0)));
            marks.note(mark, (1, 0), rows(0, 33));
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 33)));
            marks.note(mark, (1, 0), rows(34, 66));
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 33)));
            marks.note(mark, (1, 0), rows(33, 1));
            marks.note(mark, (1, 1), rows(0, 69));
            let cause = if mark == Mark::Resolved { (0, Cause::NotScattered, 0) } else { (1, cause, 69) };
            assert_eq!(marks.missing(1, entry, true), Some(cause));
            marks.note(mark, (1, 1), rows(69, 1));
            assert_eq!(marks.missing(1, entry, false), None);
        }
        assert_eq!(marks.missing(1, entry, true), None);
        // Query rows that a batch row has not are not asked for.
        assert_eq!(marks.missing(2, Entry::default(), true), None);
        marks.begin(1);
        assert_eq!(
            marks.missing(1, entry, true),
            None,
            "rows of a step beyond its own are left as they were"
        );
        marks.begin(2);
        assert_eq!(marks.missing(1, entry, true), Some((0, Cause::NotResolved, 0)));
    }
}
