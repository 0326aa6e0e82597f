//! The step descriptor and the step report: the words that host and device exchange once per step.
//!
//! Both are plain `u32` words in pinned host memory, which kernels read and write directly. The host writes the
//! descriptor in prepare, and the device writes the report at the step's end. The memory belongs to the step from
//! prepare to retire: nothing else writes to it in between.
//!
//! The descriptor lists the batch rows: lane, accepted count, query rows. The report returns hits and misses by
//! layer, the committed lengths, and the step's first error ([`Sticky`]).

use crate::error::{Error, Kind, Result};
use crate::residency::Counts;

/// The value of [`Entry::accepted`] when the accepted count is in the device's tensor instead of the descriptor.
pub const ACCEPTED_ON_DEVICE: u32 = u32::MAX;

const HEADER: usize = 4;
const ENTRY: usize = 3;

/// One batch row of the step descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Entry {
    /// The lane.
    pub lane: u32,
    /// Accepted rows of the lane's previous step, or [`ACCEPTED_ON_DEVICE`].
    pub accepted: u32,
    /// Query rows of this step.
    pub query_rows: u32,
}

/// The layout of the step descriptor: `[step low, step high, rows, 0]`, then three words per batch row.
pub mod step {
    use super::{ENTRY, Entry, HEADER};

    /// The number of words of a descriptor for `batch` rows.
    pub const fn words(batch: u32) -> usize {
        HEADER + ENTRY * batch as usize
    }

    /// Writes the descriptor of step `number`. `words` has room for all rows.
    pub fn encode(number: u64, rows: impl ExactSizeIterator<Item = Entry>, words: &mut [u32]) {
        let header = [number as u32, (number >> 32) as u32, rows.len() as u32, 0];
        words[..HEADER].copy_from_slice(&header);
        for (row, entry) in rows.enumerate() {
            let entry = [entry.lane, entry.accepted, entry.query_rows];
            words[HEADER + row * ENTRY..][..ENTRY].copy_from_slice(&entry);
        }
    }

    /// Makes the descriptor one without rows.
    pub(crate) fn empty(words: &mut [u32]) {
        if let Some(rows) = words.get_mut(2) {
            *rows = 0;
        }
    }

    /// The step's number and its number of batch rows.
    pub fn header(words: &[u32]) -> (u64, usize) {
        (u64::from(words[1]) << 32 | u64::from(words[0]), words[2] as usize)
    }

    /// The entry of batch row `row`.
    pub fn entry(words: &[u32], row: usize) -> Entry {
        let at = HEADER + row * ENTRY;
        Entry { lane: words[at], accepted: words[at + 1], query_rows: words[at + 2] }
    }
}

/// The first error of a step, in one word. An error of the commit comes before others; then the lowest layer and
/// batch row come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sticky {
    /// Batch row.
    pub row: u32,
    /// Layer.
    pub layer: u32,
    /// The kind of error.
    pub cause: Cause,
    /// The offending position or count.
    pub value: u32,
}

/// The sticky word of a step without errors.
pub(crate) const NOTHING_WRONG: u64 = u64::MAX;

/// The most batch rows of a step. CUDA limits the second dimension of a grid to 65535 blocks, and the sticky word has
/// room for this many rows.
pub(crate) const BATCH_MAX: u32 = STICKY_ROWS - 1;
/// Batch rows and layers that a sticky word can tell apart.
const STICKY_ROWS: u32 = 1 << 15;
const STICKY_LAYERS: u32 = crate::geometry::LAYERS_MAX;
const _: () = assert!(STICKY_LAYERS == 1 << 12);

impl Sticky {
    /// Packs the error into one word, so that the most important error has the smallest word: errors of the commit
    /// first, then by layer and batch row. A device keeps the minimum, so the order in which rows find their errors
    /// does not matter.
    pub(crate) fn word(&self, behind_commit: bool) -> u64 {
        let place = u64::from(self.layer % STICKY_LAYERS) << 51 | u64::from(self.row % STICKY_ROWS) << 36;
        u64::from(behind_commit) << 63 | place | (self.cause as u64) << 32 | u64::from(self.value)
    }

    /// Unpacks a sticky word; `None` if there is no error.
    pub(crate) fn of_word(word: u64) -> Option<Sticky> {
        let cause = Cause::of((word >> 32) as u32 & 0xF).filter(|_| word != NOTHING_WRONG)?;
        let (layer, row) = ((word >> 51) as u32 % STICKY_LAYERS, (word >> 36) as u32 % STICKY_ROWS);
        Some(Sticky { row, layer, cause, value: word as u32 })
    }
}

/// The reason why a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Cause {
    /// A selected position is at or beyond the length that its query row may see.
    BeyondLength = 1,
    /// More rows were accepted than had landed.
    Accepted = 2,
    /// The lane's tables do not fit the step: the lane has no sequence, or the sequence would outgrow its declared
    /// tokens.
    Tables = 3,
    /// An earlier step of the lane failed, and the sequence was not truncated since.
    Earlier = 4,
    /// Rows that a layer's resolve missed were not gathered after it.
    NotGathered = 5,
    /// The scratch rows of an attention wave were not gathered after the previous wave. The rows that stay resident
    /// were.
    WaveNotGathered = 6,
    /// A query row was never resolved in a layer.
    NotResolved = 7,
    /// A query row was never scattered in a layer, so the total pool lacks the new row.
    NotScattered = 8,
}

impl Cause {
    const ALL: [Cause; 8] = [
        Cause::BeyondLength,
        Cause::Accepted,
        Cause::Tables,
        Cause::Earlier,
        Cause::NotGathered,
        Cause::WaveNotGathered,
        Cause::NotResolved,
        Cause::NotScattered,
    ];

    /// The cause with this code.
    fn of(code: u32) -> Option<Cause> {
        Cause::ALL.into_iter().find(|cause| *cause as u32 == code)
    }

    /// The cause in words.
    pub const fn describe(self) -> &'static str {
        match self {
            Cause::BeyondLength => "a selected position is at or beyond the length",
            Cause::Accepted => "more rows were accepted than had landed",
            Cause::Tables => "the lane's tables do not fit the step",
            Cause::Earlier => "an earlier step of the sequence failed",
            Cause::NotGathered => "a layer's missed rows were not gathered after its resolve",
            Cause::WaveNotGathered => "an attention wave's rows were not gathered",
            Cause::NotResolved => "a query row was never resolved",
            Cause::NotScattered => "a query row was not scattered",
        }
    }
}

/// Hits and misses of one layer in one step, summed over all batch rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCount {
    /// Distinct selected rows that were resident.
    pub hits: u32,
    /// The number of rows fetched.
    pub misses: u32,
    /// Of `misses`, the rows that went to scratch slots.
    pub scratch: u32,
}

impl LayerCount {
    /// Adds the counts of one batch row's resolve.
    pub fn add(&mut self, counts: &Counts) {
        self.hits += counts.hits;
        self.misses += counts.misses;
        self.scratch += counts.scratch;
    }
}

/// A step's report: `[step low, step high, cause or 0, row, layer, value, moved, 0]`, then three words per layer,
/// then the committed length of each row. It carries the step's number, so that the reader notices an earlier step's
/// report in the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The step's number.
    pub step: u64,
    /// The first error, if the step failed: see [`Sticky`].
    pub sticky: Option<Sticky>,
    /// Rows that resizes of any lane have moved to other slots since the last report of any step, in all layers. A
    /// resize that runs next to steps of several micro-batches is in the report of one of them.
    pub moved: u32,
    /// Hits and misses of each layer.
    pub layers: Vec<LayerCount>,
    /// The committed tokens of each batch row's sequence, as of this step's commit.
    pub lengths: Vec<u32>,
}

const REPORT_HEADER: usize = 8;
const COUNT: usize = 3;

impl Report {
    /// A report with room for `layers` and `batch` rows.
    pub fn with_room(layers: u32, batch: u32) -> Self {
        Report {
            step: 0,
            sticky: None,
            moved: 0,
            layers: vec![LayerCount::default(); layers as usize],
            lengths: Vec::with_capacity(batch as usize),
        }
    }

    /// The number of words of a report.
    pub const fn words(layers: u32, batch: u32) -> usize {
        REPORT_HEADER + COUNT * layers as usize + batch as usize
    }

    /// The first words of a report.
    pub(crate) fn header(step: u64, sticky: Option<Sticky>, moved: u32) -> [u32; REPORT_HEADER] {
        let [cause, row, layer, value] = match sticky {
            Some(s) => [s.cause as u32, s.row, s.layer, s.value],
            None => [0; 4],
        };
        [step as u32, (step >> 32) as u32, cause, row, layer, value, moved, 0]
    }

    /// Writes the report to `words`, which has room for it.
    pub fn encode(&self, words: &mut [u32]) {
        let header = Report::header(self.step, self.sticky, self.moved);
        words[..REPORT_HEADER].copy_from_slice(&header);
        for (at, count) in self.layers.iter().enumerate() {
            let count = [count.hits, count.misses, count.scratch];
            words[REPORT_HEADER + at * COUNT..][..COUNT].copy_from_slice(&count);
        }
        let lengths = REPORT_HEADER + self.layers.len() * COUNT;
        words[lengths..lengths + self.lengths.len()].copy_from_slice(&self.lengths);
    }

    /// Reads the report of step `step` with `rows` rows into `self`.
    ///
    /// # Errors
    /// [`Kind::Internal`] when `words` hold another step's report or an unknown cause.
    pub fn decode(&mut self, words: &[u32], step: u64, rows: usize) -> Result<()> {
        let stamp = u64::from(words[1]) << 32 | u64::from(words[0]);
        if stamp != step {
            return Err(Error::new(Kind::Internal, "retire")
                .at("the report slot holds another step")
                .with("wanted", step)
                .with("found", stamp));
        }
        self.step = stamp;
        let cause = Cause::of(words[2]);
        if cause.is_none() && words[2] != 0 {
            return Err(Error::new(Kind::Internal, "retire").at("cause of a report").with("code", words[2]));
        }
        self.sticky = cause.map(|cause| Sticky { row: words[3], layer: words[4], cause, value: words[5] });
        self.moved = words[6];
        for (at, count) in self.layers.iter_mut().enumerate() {
            let at = REPORT_HEADER + at * COUNT;
            *count = LayerCount { hits: words[at], misses: words[at + 1], scratch: words[at + 2] };
        }
        let lengths = REPORT_HEADER + self.layers.len() * COUNT;
        self.lengths.clear();
        self.lengths.extend_from_slice(&words[lengths..lengths + rows]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_reads_back_as_written() {
        let rows = [
            Entry { lane: 3, accepted: 1, query_rows: 2 },
            Entry { lane: 0, accepted: ACCEPTED_ON_DEVICE, query_rows: 1 },
        ];
        let mut words = vec![9; step::words(2)];
        step::encode(1 << 40 | 5, rows.iter().copied(), &mut words);
        assert_eq!(step::header(&words), (1 << 40 | 5, 2));
        assert_eq!([step::entry(&words, 0), step::entry(&words, 1)], rows);
    }

    #[test]
    fn a_sticky_word_reads_back_and_the_commits_errors_come_first() {
        let sticky = |layer, row, cause| Sticky { row, layer, cause, value: u32::MAX };
        for cause in Cause::ALL {
            let last = sticky(STICKY_LAYERS - 1, STICKY_ROWS - 1, cause);
            assert_eq!(Sticky::of_word(last.word(true)), Some(last));
            assert_eq!(Sticky::of_word(last.word(false)), Some(last));
        }
        assert_eq!(Sticky::of_word(NOTHING_WRONG), None);
        let words = [
            sticky(9, 9, Cause::Earlier).word(false),
            sticky(0, 1, Cause::BeyondLength).word(true),
            sticky(0, 2, Cause::BeyondLength).word(true),
            sticky(1, 0, Cause::BeyondLength).word(true),
            NOTHING_WRONG,
        ];
        assert!(words.is_sorted());
    }

    #[test]
    fn a_report_reads_back_and_another_steps_report_is_refused() {
        let report = Report {
            step: 7,
            sticky: Some(Sticky { row: 1, layer: 2, cause: Cause::Accepted, value: 99 }),
            moved: 12,
            layers: vec![LayerCount { hits: 1, misses: 2, scratch: 1 }; 3],
            lengths: vec![10, 20],
        };
        let mut words = vec![0; Report::words(3, 4)];
        report.encode(&mut words);
        let mut read = Report::with_room(3, 4);
        read.decode(&words, 7, 2).unwrap();
        assert_eq!(read, report);
        assert_eq!(read.decode(&words, 8, 2).unwrap_err().kind(), Kind::Internal);
    }
}
