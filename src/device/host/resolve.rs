//! Resolve and gather on host memory: they translate a step's selections (top-k indices) into slots and index lists,
//! and fetch the missed rows.
//!
//! **Races.** The rule works on copies. It reads a batch row's selection from device memory once, in portions, into
//! memory of its own, and copies the slots out at the end. So it never reads twice what another stream may be writing
//! (`words`).
//!
//! **Locks.** A resolve holds its micro-batch's record, its layer's tables, and one row's list at a time. A gather
//! holds one row's list at a time and nothing else, and releases it before it records an error. So one half's gather
//! runs alongside the other half's resolve.

use crate::device::descriptor::{self, Cause, Sticky};
use crate::device::host::fetches::List;
use crate::device::host::marks::Mark;
use crate::device::host::pools::{Copies, HostPools, Record};
use crate::device::host::words::Words;
use crate::device::{Expected, ResolveOutput, Slice, SplitIndices, StepRange};
use crate::error::Result;
use crate::ids::Lane;
use crate::residency::{Answered, LayerTables, QueryRange, Scan, Selected};
use crate::sync::Ordering;

/// The index lists of a step's batch rows, see [`SplitIndices`].
struct Lists<'a> {
    entries: Words<'a, i32>,
    counts: Words<'a, u32>,
    lists: usize,
    batch: usize,
    rows: usize,
    k: usize,
}

impl<'a> Lists<'a> {
    /// The lists of a call for `range`.
    fn new(pools: &'a HostPools, range: &StepRange, split_indices: SplitIndices) -> Lists<'a> {
        Lists {
            entries: pools.words(split_indices.lists),
            counts: pools.words(split_indices.counts),
            lists: 1 + pools.layout.tables[pools.group_of(range)].waves as usize,
            batch: split_indices.batch as usize,
            rows: range.rows.count as usize,
            k: pools.layout.geometry.shape().top_k as usize,
        }
    }

    /// Clears a batch row's lists.
    fn clear(&self, row: usize) {
        for number in 0..self.lists {
            let first = (number * self.batch + row) * self.rows;
            self.counts.fill(first, self.rows, 0);
            self.entries.fill(first * self.k, self.rows * self.k, -1);
        }
    }

    /// Appends a slot to an index list of a query row. Even if another thread changes the count meanwhile, no write
    /// reaches beyond the index lists.
    fn push(&self, row: usize, query: usize, number: usize, slot: i32) {
        let at = (number * self.batch + row) * self.rows + query;
        let count = self.counts.get(at).unwrap_or(0);
        self.entries.set((at * self.k).saturating_add(count as usize), slot);
        self.counts.set(at, count.wrapping_add(1));
    }
}

/// The state that the rows of one resolve share.
struct Resolving<'a, S> {
    pools: &'a HostPools,
    scan: &'a S,
    range: &'a StepRange,
    selections: Words<'a, i32>,
    record: &'a mut Record,
    tables: &'a mut LayerTables,
    lists: Option<Lists<'a>>,
}

impl<S: Scan> Resolving<'_, S> {
    /// Resolves row `index` of the call, which is batch row `row`, into the record's slots.
    fn row(&mut self, index: usize, row: usize, list: &mut List) -> Result<()> {
        let (pools, range, layer) = (self.pools, self.range, self.range.layer.index());
        let k = pools.layout.geometry.shape().top_k as usize;
        let Record { descriptor, report, sticky: word, marks, work, divider, slots, .. } = &mut *self.record;
        let sticky = |cause, value| Sticky { row: row as u32, layer: layer as u32, cause, value };
        let missing = list.missing(report.step).filter(|_| pools.layout.expected != Expected::Resolved);
        let members = pools.layout.geometry.members(pools.group_of(range));
        list.begin(range, members.len(), report.step);
        if let Some(lists) = &self.lists {
            lists.clear(row);
        }
        let per_row = range.rows.count as usize * k;
        let entry =
            (row < descriptor::step::header(descriptor).1).then(|| descriptor::step::entry(descriptor, row));
        // A sequence may have fewer query rows than the step's width: the others do nothing.
        let query_rows = entry.map_or(0, |entry| entry.query_rows);
        let count = query_rows.saturating_sub(range.rows.first).min(range.rows.count);
        let (slots, inert) = slots[..per_row].split_at_mut(count as usize * k);
        inert.fill(-1);
        let Some(entry) = entry else { return Ok(()) };
        members.clone().for_each(|layer| marks.note(Mark::Resolved, row, layer, range.rows));
        if let Some((_, cause)) = missing {
            pools.blame(word, entry.lane, true, sticky(cause, layer as u32));
        }
        list.lane = entry.lane;
        if count == 0 {
            return Ok(());
        }
        let selection = &self.selections.part(index * per_row, slots.len());
        let rows = QueryRange { first: range.rows.first, count };
        let selected = Selected { selection, slots: &mut *slots, fetches: &mut list.fetches };
        let Ok(done) = self.tables.resolve(self.scan, entry.lane, rows, selected, work) else {
            slots.fill(-1);
            pools.blame(word, entry.lane, true, sticky(Cause::Tables, entry.lane));
            return Ok(());
        };
        list.missed(&done.counts, self.tables.shape());
        report.layers[members].iter_mut().for_each(|layer| layer.add(&done.counts));
        if let Some(beyond) = done.beyond {
            pools.blame(word, entry.lane, true, sticky(Cause::BeyondLength, beyond.position));
        }
        if let Some(lists) = &self.lists {
            let (fetches, scratch) = list.fetched();
            let answered = Answered { selection: work.selection(), slots, fetches, scratch };
            divider.divide(self.tables.shape(), &answered, k, |query, number, slot| {
                lists.push(row, query, number, slot);
            })?;
        }
        Ok(())
    }
}

impl HostPools {
    pub(super) fn resolve<S: Scan>(
        &self,
        scan: &S,
        range: &StepRange,
        selections: Slice,
        output: ResolveOutput,
    ) -> Result<()> {
        let state = self.micro(range.micro_batch)?;
        let per_row = range.rows.count as usize * self.layout.geometry.shape().top_k as usize;
        let (selections, answers) = (self.words(selections), self.words(output.slots));
        let (mut record, mut tables) = (state.record.lock(), self.tables[self.group_of(range)].lock());
        let lists = output.split_indices.map(|split_indices| Lists::new(self, range, split_indices));
        let (record, tables) = (&mut *record, &mut *tables);
        let mut call = Resolving { pools: self, scan, range, selections, record, tables, lists };
        for (index, row) in (range.first as usize..(range.first + range.count) as usize).enumerate() {
            call.row(index, row, &mut state.lists[row].lock())?;
            answers.store(index * per_row, &call.record.slots[..per_row]);
        }
        Ok(())
    }

    /// Takes only its rows' locks, so other rows of the layer can be resolved meanwhile.
    pub(super) fn gather(&self, range: &StepRange, wave: u32) -> Result<()> {
        let state = self.micro(range.micro_batch)?;
        let step = state.step.load(Ordering::Acquire);
        let real = state.rows.load(Ordering::Acquire);
        let wave = wave as usize;
        let mut copies = Copies::new(self.format(range.layer.index()), self.copier);
        for row in range.first..(range.first + range.count).min(real) {
            let mut list = state.lists[row as usize].lock();
            if let Err(cause) = list.take(range, wave, step) {
                drop(list);
                let mut record = state.record.lock();
                let lane = descriptor::step::entry(&record.descriptor, row as usize).lane;
                let sticky = Sticky { row, layer: range.layer.0, cause, value: range.layer.0 };
                self.blame(&mut record.sticky, lane, true, sticky);
                continue;
            }
            // The first position whose row the lane has no page for.
            let mut lost: Option<u32> = None;
            for fetch in list.of_wave(wave).into_iter().flatten() {
                match self.pairs(range.layer.index(), Lane(list.lane), *fetch, false) {
                    Some(runs) => copies.add(runs),
                    None => lost = Some(lost.map_or(fetch.position, |first| first.min(fetch.position))),
                }
            }
            let lane = list.lane;
            drop(list);
            if let Some(value) = lost {
                let sticky = Sticky { row, layer: range.layer.0, cause: Cause::Tables, value };
                self.blame(&mut state.record.lock().sticky, lane, true, sticky);
                self.lack_bytes(lane);
            }
        }
        copies.flush();
        Ok(())
    }
}
