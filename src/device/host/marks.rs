//! Marks for each query row of a step, by layer: whether it was resolved and whether it was scattered. The report
//! checks them.
//!
//! Each mark is one bit. A batch row's words are contiguous, so a step of few rows in a large batch clears and checks
//! few words.

use crate::device::descriptor::{Cause, Entry};
use crate::device::host::errors::NAME;
use crate::error::Result;
use crate::fallible::filled;
use crate::residency::QueryRange;

/// The work that was done for a query row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Resolved = 0,
    Scattered = 1,
}

/// The marks of one step.
#[derive(Debug)]
pub(super) struct Marks {
    layers: usize,
    query_rows: u32,
    /// Words for the query rows of one layer.
    words: usize,
    /// `[batch][layers][2][words]`.
    bits: Vec<u32>,
}

/// The bits of word `word` for query rows below `count`; bit 0 is query row `32 * word`.
fn below(word: u32, count: u32) -> u32 {
    match count.saturating_sub(word.saturating_mul(u32::BITS)) {
        left @ 0..u32::BITS => (1 << left) - 1,
        _ => u32::MAX,
    }
}

impl Marks {
    pub(super) fn new(layers: u32, batch: u32, query_rows: u32) -> Result<Marks> {
        let (layers, words) = (layers as usize, query_rows.div_ceil(u32::BITS) as usize);
        let all = (2 * words).saturating_mul(batch as usize).saturating_mul(layers);
        Ok(Marks { layers, query_rows, words, bits: filled(all, 0, NAME, "marks of steps")? })
    }

    /// Where a batch row's words begin.
    fn start(&self, row: usize) -> usize {
        row * self.layers * 2 * self.words
    }

    /// Clears the marks for a step of `rows` batch rows.
    pub(super) fn begin(&mut self, rows: usize) {
        let words = self.start(rows).min(self.bits.len());
        self.bits[..words].fill(0);
    }

    /// Marks a batch row's query rows.
    pub(super) fn note(&mut self, mark: Mark, row: usize, layer: usize, rows: QueryRange) {
        let from = self.start(row) + (layer * 2 + mark as usize) * self.words;
        let (first, end) = (rows.first, rows.first + rows.count);
        for (word, bits) in (0..).zip(&mut self.bits[from..from + self.words]) {
            *bits |= below(word, end) & !below(word, first);
        }
    }

    /// The first layer in which a batch row lacks a mark, the error, and the query row.
    pub(super) fn missing(&self, row: usize, entry: Entry, scatter: bool) -> Option<(usize, Cause, u32)> {
        let rows = entry.query_rows.min(self.query_rows);
        let layers = self.bits[self.start(row)..self.start(row + 1)].chunks_exact(2 * self.words);
        layers.enumerate().find_map(|(layer, marks)| {
            let (resolved, scattered) = marks.split_at(self.words);
            let stored = || first_without(scattered, rows).filter(|_| scatter);
            match first_without(resolved, rows) {
                Some(query) => Some((layer, Cause::NotResolved, query)),
                None => stored().map(|query| (layer, Cause::NotScattered, query)),
            }
        })
    }
}

/// The first of `rows` query rows without a mark.
fn first_without(marks: &[u32], rows: u32) -> Option<u32> {
    (0..).zip(marks).find_map(|(word, done)| {
        let left = below(word, rows) & !done;
        (left != 0).then(|| word * u32::BITS + left.trailing_zeros())
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn marks_without_memory_for_them_are_an_error() {
        for layers in [1 << 20, u32::MAX] {
            let error = Marks::new(layers, 32_767, u32::MAX).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::OutOfMemory, "marks of steps"));
        }
    }

    #[test]
    fn a_row_is_missing_until_each_of_its_query_rows_was_done_in_every_layer() {
        let entry = Entry { query_rows: 70, ..Entry::default() };
        let mut marks = Marks::new(2, 3, 100).unwrap();
        let rows = |first, count| QueryRange { first, count };
        for mark in [Mark::Resolved, Mark::Scattered] {
            let cause = [Cause::NotResolved, Cause::NotScattered][mark as usize];
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 0)));
            marks.note(mark, 1, 0, rows(0, 33));
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 33)));
            marks.note(mark, 1, 0, rows(34, 66));
            assert_eq!(marks.missing(1, entry, true), Some((0, cause, 33)));
            marks.note(mark, 1, 0, rows(33, 1));
            marks.note(mark, 1, 1, rows(0, 69));
            let cause = if mark == Mark::Resolved { (0, Cause::NotScattered, 0) } else { (1, cause, 69) };
            assert_eq!(marks.missing(1, entry, true), Some(cause));
            marks.note(mark, 1, 1, rows(69, 1));
            assert_eq!(marks.missing(1, entry, false), None);
        }
        assert_eq!(marks.missing(1, entry, true), None);
        // Query rows beyond a batch row's own need no mark.
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
