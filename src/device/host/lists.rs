//! What a resolve leaves for attention and for the gather: index lists, and lists of rows to fetch.
//!
//! A resolve holds its micro-batch's record, its layer's tables, and one row's list after the other; a gather
//! holds one row's list at a time and nothing else, and lets go of it before it blames.

use crate::device::block::{self, Cause, Sticky};
use crate::device::host::marks::Mark;
use crate::device::host::pools::{Copies, HostPools, NAME, Record};
use crate::device::{Answer, Expected, Part, Parts, Slice};
use crate::error::Result;
use crate::fallible::filled;
use crate::ids::Lane;
use crate::residency::{Answered, Fetch, Rows, Scan, Selected};
use crate::sync::Ordering;

/// What a batch row's last resolve missed. The part says whose misses these are: a gather for another
/// layer, or without a resolve in its step, must not copy rows into slots that were never meant for them;
/// and a list that nobody gathers must not pass for resident rows.
#[derive(Debug)]
pub(super) struct List {
    pub(super) fetches: Vec<Fetch>,
    count: usize,
    /// Of these, rows in scratch slots: they come first.
    scratch: usize,
    /// Scratch slots of a lane: so many of them a pass.
    share: usize,
    /// Passes gathered.
    passed: usize,
    lane: u32,
    pub(super) layer: usize,
    rows: Rows,
    step: u64,
}

impl List {
    /// Nothing is missed; room for `selected` rows.
    pub(super) fn with_room(selected: usize) -> Result<List> {
        let fetches = filled(selected, Fetch { position: 0, slot: 0 }, NAME, "a batch row's list")?;
        let rows = Rows { first: 0, count: 0 };
        Ok(List { fetches, count: 0, scratch: 0, share: 0, passed: 0, lane: 0, layer: 0, rows, step: 0 })
    }

    fn is_of(&self, part: &Part, step: u64) -> bool {
        (self.layer, self.rows, self.step) == (part.layer.index(), part.rows, step)
    }

    /// What is wrong when nothing more is gathered of `step`, if anything is.
    pub(super) fn missing(&self, step: u64) -> Option<Cause> {
        let passes = self.scratch.div_ceil(self.share.max(1)).max(1);
        (self.step == step && self.count > 0 && self.passed < passes).then(|| self.ungathered())
    }

    /// The first pass fetches all rows that stay.
    fn ungathered(&self) -> Cause {
        if self.passed == 0 { Cause::NotGathered } else { Cause::PassNotGathered }
    }

    /// What pass `pass` fetches: its share of those in scratch slots, and the first one all others.
    fn of_pass(&self, pass: usize) -> [&[Fetch]; 2] {
        let share = pass.saturating_mul(self.share).min(self.scratch);
        let away = &self.fetches[share..share.saturating_add(self.share).min(self.scratch)];
        let kept = if pass == 0 { self.scratch..self.count } else { 0..0 };
        [away, &self.fetches[kept]]
    }
}

impl HostPools {
    /// Index lists of attention in parts.
    fn lists_of(&self, part: &Part) -> u64 {
        1 + u64::from(self.plan.tables[part.layer.index()].passes)
    }

    pub(super) fn resolve<S: Scan>(
        &self,
        scan: &S,
        part: &Part,
        selection: Slice,
        answer: Answer,
    ) -> Result<()> {
        let state = self.micro(part.micro_batch)?;
        let k = self.plan.geometry.shape().top_k as usize;
        let (selection, slots) = (self.read::<i32>(selection), self.write::<i32>(answer.slots));
        let per_row = part.rows.count as usize * k;
        let mut record = state.record.lock();
        let Record { block, report, sticky: word, marks, work, divider, .. } = &mut *record;
        let (_, real) = block::step::header(block);
        let layer = part.layer.index();
        let mut tables = self.layers[layer].lock();
        let mut lists = answer.parts.map(|parts| self.lists(part, parts));
        for (index, row) in (part.first as usize..(part.first + part.count) as usize).enumerate() {
            let slots = &mut slots[index * per_row..(index + 1) * per_row];
            let mut list = state.lists[row].lock();
            let missing = list.missing(report.step).filter(|_| self.plan.expected != Expected::Resolved);
            (list.count, list.scratch, list.passed) = (0, 0, 0);
            (list.layer, list.rows, list.step) = (layer, part.rows, report.step);
            if let Some(lists) = &mut lists {
                lists.clear(row);
            }
            if row >= real {
                slots.fill(-1);
                continue;
            }
            let entry = block::step::entry(block, row);
            marks.note(Mark::Resolved, (row, layer), part.rows);
            let sticky = |cause, value| Sticky { row: row as u32, layer: layer as u32, cause, value };
            if let Some(cause) = missing {
                self.blame(word, entry.lane, (true, sticky(cause, layer as u32)));
            }
            list.lane = entry.lane;
            // A sequence may have fewer query rows than the step is wide: the others are inert.
            let count = entry.query_rows.saturating_sub(part.rows.first).min(part.rows.count);
            let (slots, inert) = slots.split_at_mut(count as usize * k);
            inert.fill(-1);
            if count == 0 {
                continue;
            }
            let selection = &selection[index * per_row..][..slots.len()];
            let rows = Rows { first: part.rows.first, count };
            let selected = Selected { selection, slots: &mut *slots, fetches: &mut list.fetches };
            let done = match tables.resolve(scan, entry.lane, rows, selected, work) {
                Ok(done) => done,
                Err(_) => {
                    slots.fill(-1);
                    self.blame(word, entry.lane, (true, sticky(Cause::Tables, entry.lane)));
                    continue;
                }
            };
            list.count = done.counts.misses as usize;
            (list.scratch, list.share) = (done.counts.scratch as usize, tables.shape().scratch as usize);
            report.layers[layer].add(&done.counts);
            if let Some(beyond) = done.beyond {
                self.blame(word, entry.lane, (true, sticky(Cause::BeyondLength, beyond.position)));
            }
            if let Some(lists) = &mut lists {
                let (fetches, scratch) = (&list.fetches[..list.count], list.scratch);
                let answered = Answered { selection, slots, fetches, scratch };
                divider.divide(tables.shape(), &answered, k, |query, number, slot| {
                    lists.push(row, query, number, slot);
                })?;
            }
        }
        Ok(())
    }

    fn lists(&self, part: &Part, parts: Parts) -> Lists<'_> {
        let k = self.plan.geometry.shape().top_k as usize;
        let (rows, lists) = (part.rows.count as usize, self.lists_of(part) as usize);
        let batch = parts.batch as usize;
        Lists { entries: self.write(parts.lists), counts: self.write(parts.counts), lists, batch, rows, k }
    }

    /// Takes no lock but its rows': beside it, other rows of the layer are resolved.
    pub(super) fn gather(&self, part: &Part, pass: u32) -> Result<()> {
        let state = self.micro(part.micro_batch)?;
        let step = state.step.load(Ordering::Acquire);
        let real = state.rows.load(Ordering::Acquire);
        let pass = pass as usize;
        let mut copies = Copies::new(&self.plan.geometry, self.copier);
        for row in part.first..(part.first + part.count).min(real) {
            let mut list = state.lists[row as usize].lock();
            let cause = match list.is_of(part, step) {
                false => Some(Cause::NotGathered),
                true => (pass > list.passed).then(|| list.ungathered()),
            };
            if let Some(cause) = cause {
                drop(list);
                let mut record = state.record.lock();
                let lane = block::step::entry(&record.block, row as usize).lane;
                let sticky = Sticky { row, layer: part.layer.0, cause, value: part.layer.0 };
                self.blame(&mut record.sticky, lane, (true, sticky));
                continue;
            }
            // The first position whose row the lane has no page for.
            let mut lost: Option<u32> = None;
            for fetch in list.of_pass(pass).into_iter().flatten() {
                match self.pairs(part.layer.index(), Lane(list.lane), *fetch, false) {
                    Some(runs) => copies.add(runs),
                    None => lost = Some(lost.map_or(fetch.position, |first| first.min(fetch.position))),
                }
            }
            list.passed = list.passed.max(pass + 1);
            let lane = list.lane;
            drop(list);
            if let Some(value) = lost {
                let sticky = Sticky { row, layer: part.layer.0, cause: Cause::Tables, value };
                self.blame(&mut state.record.lock().sticky, lane, (true, sticky));
                self.lack_bytes(lane);
            }
        }
        copies.flush();
        Ok(())
    }
}

/// The index lists of a step's rows, see [`Parts`].
struct Lists<'a> {
    entries: &'a mut [i32],
    counts: &'a mut [u32],
    lists: usize,
    batch: usize,
    rows: usize,
    k: usize,
}

impl Lists<'_> {
    /// A batch row has no valid entries.
    fn clear(&mut self, row: usize) {
        for number in 0..self.lists {
            let first = (number * self.batch + row) * self.rows;
            self.counts[first..first + self.rows].fill(0);
            self.entries[first * self.k..(first + self.rows) * self.k].fill(-1);
        }
    }

    fn push(&mut self, row: usize, query: usize, number: usize, slot: i32) {
        let at = (number * self.batch + row) * self.rows + query;
        self.entries[at * self.k + self.counts[at] as usize] = slot;
        self.counts[at] += 1;
    }
}
