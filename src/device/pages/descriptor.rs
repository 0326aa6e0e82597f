//! The descriptor of a step of a dense cache: `[step low, step high, rows, 0]`, then for each batch row
//! `[lane, length, accepted, query rows]` and for each group `[first changed entry, changed entries]`.
//!
//! These are u32 words in pinned host memory. The host writes them in prepare, and a device reads them when the step
//! begins. They belong to the step until it is retired.

use crate::device::pages::PAGE_GROUPS_MAX;

/// The value of [`Entry::length`] when only the device knows the committed length.
pub const FROM_DEVICE: u32 = u32::MAX;

const HEADER: usize = 4;
const ROW: usize = 4;
const CHANGED: usize = 2;

/// Entries of a page table that changed since the micro-batch's table got this row last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// The first of them.
    pub first: u32,
    /// How many there are.
    pub count: u32,
}

/// One batch row of the descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The lane.
    pub lane: u32,
    /// The committed tokens before this step's query rows, or [`FROM_DEVICE`]: those of the lane and the accepted ones.
    pub length: u32,
    /// Where the length is [`FROM_DEVICE`], accepted rows of the lane's previous step, or
    /// [`ACCEPTED_ON_DEVICE`](crate::device::descriptor::ACCEPTED_ON_DEVICE).
    pub accepted: u32,
    /// Query rows of this step.
    pub query_rows: u32,
    /// The changed entries of each group's table. Those beyond the cache's groups mean nothing.
    pub changed: [Changed; PAGE_GROUPS_MAX],
}

/// The number of words of a batch row.
pub(crate) const fn row_words(groups: usize) -> usize {
    ROW + CHANGED * groups
}

/// The number of words of a descriptor for `batch` rows and `groups` groups.
pub const fn words(batch: u32, groups: usize) -> usize {
    HEADER + row_words(groups) * batch as usize
}

/// Writes the descriptor of step `number`. `words` has room for all rows, and `groups` is at most
/// [`PAGE_GROUPS_MAX`].
pub fn encode(number: u64, groups: usize, rows: impl ExactSizeIterator<Item = Entry>, words: &mut [u32]) {
    let header = [number as u32, (number >> 32) as u32, rows.len() as u32, 0];
    words[..HEADER].copy_from_slice(&header);
    for (to, entry) in words[HEADER..].chunks_exact_mut(row_words(groups)).zip(rows) {
        let Entry { lane, length, accepted, query_rows, changed } = entry;
        to[..ROW].copy_from_slice(&[lane, length, accepted, query_rows]);
        for (to, Changed { first, count }) in to[ROW..].chunks_exact_mut(CHANGED).zip(changed) {
            to.copy_from_slice(&[first, count]);
        }
    }
}

/// The step's number and its number of batch rows.
pub fn header(words: &[u32]) -> (u64, usize) {
    (u64::from(words[1]) << 32 | u64::from(words[0]), words[2] as usize)
}

/// The entry of batch row `row`.
pub fn entry(words: &[u32], groups: usize, row: usize) -> Entry {
    decode(&words[HEADER + row * row_words(groups)..][..row_words(groups)])
}

/// The first word of batch row `row`.
pub(crate) const fn place(groups: usize, row: usize) -> usize {
    HEADER + row * row_words(groups)
}

/// The entry of a row's words.
pub(crate) fn decode(row: &[u32]) -> Entry {
    let mut changed = [Changed::default(); PAGE_GROUPS_MAX];
    for (changed, words) in changed.iter_mut().zip(row[ROW..].chunks_exact(CHANGED)) {
        *changed = Changed { first: words[0], count: words[1] };
    }
    Entry { lane: row[0], length: row[1], accepted: row[2], query_rows: row[3], changed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_reads_back_as_written_for_every_number_of_groups() {
        let changed =
            |at: u32| [0, 1, 2, 3].map(|group| Changed { first: at + group, count: 7 * at + group });
        let rows = [
            Entry { lane: 3, length: 40, accepted: 1, query_rows: 2, changed: changed(10) },
            Entry { lane: 0, length: FROM_DEVICE, accepted: u32::MAX, query_rows: 1, changed: changed(20) },
        ];
        for groups in 1..=PAGE_GROUPS_MAX {
            let mut written = vec![9; words(3, groups)];
            encode(1 << 40 | 5, groups, rows.iter().copied(), &mut written);
            assert_eq!(header(&written), (1 << 40 | 5, 2));
            for (row, mut wanted) in rows.into_iter().enumerate() {
                wanted.changed[groups..].fill(Changed::default());
                assert_eq!(entry(&written, groups, row), wanted, "{groups} groups");
            }
            assert!(written[place(groups, 2)..].iter().all(|word| *word == 9), "{groups} groups");
        }
    }
}
