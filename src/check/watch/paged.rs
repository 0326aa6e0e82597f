//! The memory that operations on pages touch: all of it is bytes by address.

use super::State;
use super::touched::bytes;
use crate::check::order::Access;
use crate::device::pages::descriptor;
use crate::device::{BeginPages, CopyPages, Plane, Slice};
use crate::error::Result;

/// The parts of a plane that pages from `first` on are in: one where they touch each other.
fn pieces(plane: &Plane, first: u32, count: u32) -> Result<Vec<Slice>> {
    let Plane { memory, stride, bytes } = *plane;
    let one = |page: u64| memory.part(page.saturating_mul(stride), bytes);
    if stride == bytes {
        let whole = memory.part(u64::from(first).saturating_mul(stride), bytes.saturating_mul(count.into()));
        return whole.map(|whole| vec![whole]);
    }
    (u64::from(first)..u64::from(first) + u64::from(count)).map(one).collect()
}

impl State {
    /// The accesses of a begin, whose descriptor the host wrote before the call.
    pub(super) fn begun(&mut self, begin: &BeginPages<'_>) -> Result<Vec<Access>> {
        let (batch, lanes, groups) = (begin.lengths.bytes() / 4, begin.lanes.bytes() / 8, begin.groups.len());
        let count = u32::try_from(batch).map_or(0, |batch| descriptor::words(batch, groups));
        if batch == 0 || begin.descriptor.bytes() != 4 * count as u64 {
            // The device refuses it, with its own error.
            return Ok(Vec::new());
        }
        let written = self.mappings.behind(vec![bytes(&begin.descriptor, true)]);
        let verdict = self.order.host("prepare", &written);
        self.judged(verdict)?;
        let words = self.words_of(&begin.descriptor, count)?;
        let (_, rows) = descriptor::header(&words);
        let rows = if rows as u64 <= batch { rows } else { 0 };
        let mut list = vec![bytes(&begin.descriptor, false)];
        list.extend(begin.accepted.iter().map(|accepted| bytes(accepted, false)));
        let tensors = [begin.lengths, begin.starts, begin.positions, begin.report];
        let slots = begin.groups.iter().map(|group| group.slots);
        list.extend(tensors.into_iter().chain(slots).map(|slice| bytes(&slice, true)));
        for row in 0..rows {
            let entry = descriptor::entry(&words, groups, row);
            if u64::from(entry.lane) >= lanes {
                continue;
            }
            list.push(bytes(&begin.lanes.part(8 * u64::from(entry.lane), 8)?, true));
            for (group, changed) in begin.groups.iter().zip(entry.changed) {
                let columns = group.table.bytes() / (4 * batch);
                list.push(bytes(&group.table.part(4 * columns * row as u64, 4 * columns)?, false));
                let (first, count) = (u64::from(changed.first), u64::from(changed.count));
                if count > 0 && first + count <= columns {
                    let part = |slice: &Slice, row: u64| slice.part(4 * (columns * row + first), 4 * count);
                    list.push(bytes(&part(&group.lanes, entry.lane.into())?, false));
                    list.push(bytes(&part(&group.table, row as u64)?, true));
                }
            }
        }
        Ok(list)
    }

    /// The accesses of copies of pages. What a piece held, its target holds afterwards.
    pub(super) fn paged(&self, copy: &CopyPages<'_>) -> Result<Vec<Access>> {
        let mut list = Vec::new();
        let runs =
            copy.pages.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0) && a.1.checked_add(1) == Some(b.1));
        for run in runs {
            let [first, ..] = run else { continue };
            for (source, target) in copy.planes {
                // One access for each piece where either side's pages do not touch each other.
                let whole = source.stride == source.bytes && target.stride == target.bytes;
                let (calls, count) = if whole { (1, run.len() as u32) } else { (run.len() as u32, 1) };
                for page in 0..calls {
                    let from = pieces(source, first.0 + page, count)?;
                    let to = pieces(target, first.1 + page, count)?;
                    from.iter().zip(&to).for_each(|(from, to)| list.extend(self.moved(from, to)));
                }
            }
        }
        Ok(list)
    }
}
