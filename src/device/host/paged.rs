//! The operations on pages in host memory: a step's begin by the rule of `pages`, and copies of pages.
//!
//! A begin goes from row to row, and by portions of a row's entries and query rows, which fit the stack. It allocates
//! nothing. A step's words may lie in memory that others write, so all of them are read once and then checked
//! (`words`).

use crate::device::DeviceId;
use crate::device::descriptor::{ACCEPTED_ON_DEVICE, Cause, NOTHING_WRONG, Report, Sticky};
use crate::device::host::copy::Copier;
use crate::device::host::words::{Word, Words};
use crate::device::pages::descriptor::{self, Entry, FROM_DEVICE};
use crate::device::pages::{PAGE_GROUPS_MAX, Plane, StepPages, StepTables, merged, runs};

/// The entries or query rows of a portion.
const PORTION: usize = 64;
/// The most words of a batch row.
const ROW: usize = descriptor::row_words(PAGE_GROUPS_MAX);

/// Copies pages that were checked.
pub(super) fn copy(copier: Copier, planes: &[(Plane, Plane)], pages: &[(u32, u32)]) {
    let page = planes.iter().fold(0_u64, |sum, (source, _)| sum.saturating_add(source.bytes));
    let all = page.saturating_mul(pages.len() as u64) as usize;
    for (source, target) in merged(planes) {
        let whole = source.stride == source.bytes && target.stride == target.bytes;
        for run in runs(pages) {
            let (pieces, bytes) =
                if whole { (1, source.bytes * u64::from(run.count)) } else { (run.count, source.bytes) };
            for page in 0..pieces {
                let from = source.memory.address() + u64::from(run.from + page) * source.stride;
                let to = target.memory.address() + u64::from(run.to + page) * target.stride;
                // SAFETY: both ends are in the planes' memory, whose last page was checked when the copy was
                // enqueued, and which lives as long as the device.
                unsafe { copier.piece(from as *const u8, to as *mut u8, bytes as usize, all) };
            }
        }
    }
}

/// A tensor of i32 or of i64.
struct Numbers<'a> {
    words: Words<'a, u32>,
    wide: bool,
}

impl Numbers<'_> {
    /// Writes a portion from number `first` on.
    fn store(&self, first: usize, values: &[i64]) {
        // A row that decodes has one: clearing words for a whole portion would take longer than its copy.
        if let [value] = *values {
            let words = [value as u32, (value >> 32) as u32];
            return match self.wide {
                true => self.words.store(2 * first, &words),
                false => self.words.store(first, &words[..1]),
            };
        }
        let mut words = [0; 2 * PORTION];
        if !self.wide {
            words.iter_mut().zip(values).for_each(|(word, value)| *word = *value as u32);
            return self.words.store(first, &words[..values.len()]);
        }
        for (pair, value) in words.chunks_exact_mut(2).zip(values) {
            pair.copy_from_slice(&[*value as u32, (*value >> 32) as u32]);
        }
        self.words.store(2 * first, &words[..2 * values.len()]);
    }

    /// Sets all numbers from `first` on.
    fn end(&self, first: usize, count: usize, value: i64) {
        let values = [value; PORTION];
        for at in (first..count).step_by(PORTION) {
            self.store(at, &values[..PORTION.min(count - at)]);
        }
    }
}

/// A group's tables.
struct Tables<'a> {
    lanes: Words<'a, i32>,
    table: Words<'a, i32>,
    slots: Numbers<'a>,
    sizes: StepTables,
}

impl Tables<'_> {
    /// The page of an entry; `None` for one that is no page of the group.
    fn page(&self, entry: i32) -> Option<u32> {
        u32::try_from(entry).ok().filter(|page| *page < self.sizes.pages)
    }
}

/// Where a step is: its batch row, and its first error so far.
struct Place {
    row: usize,
    sticky: u64,
}

impl Place {
    /// Notes an error of the row, of its commit if it is no group's.
    fn blame(&mut self, group: Option<usize>, cause: Cause, value: u32) {
        let sticky = Sticky { row: self.row as u32, layer: group.unwrap_or(0) as u32, cause, value };
        self.sticky = self.sticky.min(sticky.word(group.is_some()));
    }
}

/// A step that begins.
pub(super) struct Beginning<'a> {
    step: &'a StepPages,
    device: DeviceId,
    copier: Copier,
}

impl<'a> Beginning<'a> {
    pub(super) fn new(step: &'a StepPages, device: DeviceId, copier: Copier) -> Self {
        Beginning { step, device, copier }
    }

    fn words<T: Word>(&self, address: u64, count: u64) -> Words<'a, T> {
        // SAFETY: the slice was checked when the step was enqueued: this device's, not at address 0, aligned to words,
        // of so many words, and its memory lives as long as the device. The device's copier came from `all`.
        unsafe { Words::new(self.device.slice(address, 4 * count), self.copier) }
    }

    fn numbers(&self, address: u64) -> Numbers<'a> {
        let StepPages { step_tokens, wide, .. } = *self.step;
        Numbers { words: self.words(address, u64::from(step_tokens) << u32::from(wide)), wide }
    }

    fn tables(&self) -> [Option<Tables<'a>>; PAGE_GROUPS_MAX] {
        let count = self.step.groups as usize;
        std::array::from_fn(|group| {
            let sizes = *self.step.tables.get(group).filter(|_| group < count)?;
            let columns = u64::from(sizes.columns);
            Some(Tables {
                lanes: self.words(sizes.lanes, u64::from(self.step.lane_count) * columns),
                table: self.words(sizes.table, u64::from(self.step.batch) * columns),
                slots: self.numbers(sizes.slots),
                sizes,
            })
        })
    }

    /// Runs it.
    pub(super) fn run(&self) {
        let step = self.step;
        let (groups, batch, tokens) = (step.groups as usize, step.batch as usize, step.step_tokens as usize);
        let words = self.words::<u32>(step.descriptor, descriptor::words(step.batch, groups) as u64);
        let [lengths, starts] = [(step.lengths, batch), (step.starts, batch + 1)];
        let [lengths, starts] = [lengths, starts].map(|(at, count)| self.words::<i32>(at, count as u64));
        let report = self.words::<u32>(step.report, Report::words(0, step.batch) as u64);
        let (tables, positions) = (self.tables(), self.numbers(step.positions));
        let mut header = [0; 4];
        words.load(0, &mut header);
        let (number, mut rows) = descriptor::header(&header);
        let mut place = Place { row: 0, sticky: NOTHING_WRONG };
        if rows > batch {
            place.blame(None, Cause::Tables, rows as u32);
            rows = 0;
        }
        let mut start = 0;
        for row in 0..rows {
            place.row = row;
            let mut entry = [0; ROW];
            let entry = &mut entry[..descriptor::row_words(groups)];
            words.load(descriptor::place(groups, row), entry);
            let entry = descriptor::decode(entry);
            let (committed, query_rows) = self.commit(&mut place, &entry, tokens - start);
            report.set(Report::words(0, row as u32), committed);
            lengths.set(row, (committed + query_rows) as i32);
            starts.set(row, start as i32);
            let end = start + query_rows as usize;
            self.fill(&positions, start, end, committed);
            for (group, tables) in tables.iter().flatten().enumerate() {
                if entry.lane < step.lane_count {
                    self.take(&mut place, group, tables, &entry);
                }
                self.slots(&mut place, group, tables, start, end, committed);
            }
            start = end;
        }
        lengths.fill(rows, batch - rows, 0);
        starts.fill(rows, batch + 1 - rows, start as i32);
        positions.end(start, tokens, 0);
        tables.iter().flatten().for_each(|tables| tables.slots.end(start, tokens, -1));
        report.store(0, &Report::header(number, Sticky::of_word(place.sticky), 0));
    }

    /// Commits a row: its committed length, and its query rows of at most `most`.
    fn commit(&self, place: &mut Place, entry: &Entry, most: usize) -> (u32, u32) {
        let lanes = self.words::<u32>(self.step.lanes, 2 * u64::from(self.step.lane_count));
        if entry.lane >= self.step.lane_count {
            place.blame(None, Cause::Tables, entry.lane);
            return (0, 0);
        }
        let mut lane = [0; 2];
        lanes.load(2 * entry.lane as usize, &mut lane);
        let committed = match entry.length {
            FROM_DEVICE => {
                let accepted = self.accepted(place.row, entry);
                if accepted > lane[1] {
                    place.blame(None, Cause::Accepted, accepted);
                }
                u64::from(lane[0]) + u64::from(if accepted > lane[1] { 0 } else { accepted })
            }
            length => length.into(),
        };
        if committed + u64::from(entry.query_rows) > i32::MAX as u64 {
            place.blame(None, Cause::Tables, entry.query_rows);
            return (0, 0);
        }
        let query_rows = entry.query_rows.min(most as u32);
        if query_rows < entry.query_rows {
            place.blame(None, Cause::Tables, entry.query_rows);
        }
        lanes.store(2 * entry.lane as usize, &[committed as u32, query_rows]);
        (committed as u32, query_rows)
    }

    /// The accepted rows of a row whose length the device knows; more than any lane has where no tensor has them.
    fn accepted(&self, row: usize, entry: &Entry) -> u32 {
        match entry.accepted {
            ACCEPTED_ON_DEVICE if self.step.accepted == 0 => u32::MAX,
            ACCEPTED_ON_DEVICE => {
                let counts = self.words::<u32>(self.step.accepted, self.step.batch.into());
                counts.get(row).unwrap_or(u32::MAX)
            }
            accepted => accepted,
        }
    }

    fn fill(&self, positions: &Numbers<'_>, start: usize, end: usize, committed: u32) {
        if end == start + 1 {
            return positions.store(start, &[committed.into()]);
        }
        for first in (start..end).step_by(PORTION) {
            let mut values = [0; PORTION];
            let values = &mut values[..PORTION.min(end - first)];
            (i64::from(committed) + (first - start) as i64..)
                .zip(&mut *values)
                .for_each(|(p, value)| *value = p);
            positions.store(first, values);
        }
    }

    /// Takes a row's changed entries over.
    fn take(&self, place: &mut Place, group: usize, tables: &Tables<'_>, entry: &Entry) {
        let columns = tables.sizes.columns as usize;
        let changed = entry.changed[group];
        let (first, count) = (changed.first as usize, changed.count as usize);
        if first + count > columns {
            return place.blame(Some(group), Cause::Tables, changed.first);
        }
        for at in (first..first + count).step_by(PORTION) {
            let mut entries = [0; PORTION];
            let entries = &mut entries[..PORTION.min(first + count - at)];
            tables.lanes.load(entry.lane as usize * columns + at, entries);
            for entry in &mut *entries {
                if tables.page(*entry).is_none() {
                    place.blame(Some(group), Cause::Tables, entry.cast_unsigned());
                    *entry = 0;
                }
            }
            tables.table.store(place.row * columns + at, entries);
        }
    }

    /// Writes the slots of a row's query rows.
    fn slots(
        &self,
        place: &mut Place,
        group: usize,
        tables: &Tables<'_>,
        start: usize,
        end: usize,
        committed: u32,
    ) {
        let StepTables { columns, page_tokens, .. } = tables.sizes;
        let table = tables.table.part(place.row * columns as usize, columns as usize);
        let mut slot = |position: u32| {
            let entry = table.get((position / page_tokens) as usize);
            let page = entry.and_then(|entry| tables.page(entry)).filter(|page| *page > 0);
            match page {
                Some(page) => i64::from(page) * i64::from(page_tokens) + i64::from(position % page_tokens),
                None => {
                    place.blame(Some(group), Cause::Tables, position);
                    -1
                }
            }
        };
        if end == start + 1 {
            return tables.slots.store(start, &[slot(committed)]);
        }
        for first in (start..end).step_by(PORTION) {
            let mut values = [0; PORTION];
            let values = &mut values[..PORTION.min(end - first)];
            let positions = committed + (first - start) as u32..;
            positions.zip(&mut *values).for_each(|(position, value)| *value = slot(position));
            tables.slots.store(first, values);
        }
    }
}
