//! Resolve: maps a step's selection (top-k indices) to slots, writes the list of fetches, and chooses victims.

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::residency::scan::{Scan, Touch};
use crate::residency::tables::{ABSENT, EMPTY, LaneHead, LayerTables, UNUSED};
use crate::residency::victims::Oldest;
use crate::residency::workspace::Workspace;

/// A row to fetch: its position and the slot that receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Fetch {
    /// Token position in the sequence.
    pub position: u32,
    /// Slot id in the layer's slab.
    pub slot: u32,
}

/// The query rows of a call: `first..first + count` of the step. Draft pass `j` of a draft layer has `first = j`
/// and `count = 1`; an ordinary layer takes all query rows of the step at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryRange {
    /// The first query row.
    pub first: u32,
    /// The number of query rows.
    pub count: u32,
}

/// The counts of a call. Rows that are still in landing slots count as neither hit nor miss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Distinct selected rows that were resident.
    pub hits: u32,
    /// Distinct selected rows that must be fetched.
    pub misses: u32,
    /// The number of misses in scratch slots; they are the first in the list of fetches.
    pub scratch: u32,
}

/// A selected position that is not below the length visible to its query row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// The query row.
    pub row: u32,
    /// The selected position.
    pub position: u32,
}

/// The outcome of a successful call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Hits, misses and scratch rows.
    pub counts: Counts,
    /// The first selected position beyond the length, if there was one. Its slot is -1, the other results are valid,
    /// and the step's tokens must be discarded.
    pub beyond: Option<Beyond>,
}

/// A source of selected token positions. The rule reads each position once, from the first to the last, one part at a
/// time. So the positions may be in memory that another thread writes, and a source can prefetch the next part while
/// the rule looks up the current one.
pub trait Selection {
    /// The number of positions.
    fn count(&self) -> usize;

    /// Fills all of `to` with the positions from `first` on. The caller asks only for positions that exist.
    fn read(&self, first: usize, to: &mut [i32]);
}

impl Selection for [i32] {
    fn count(&self) -> usize {
        self.len()
    }

    fn read(&self, first: usize, to: &mut [i32]) {
        to.copy_from_slice(&self[first..first + to.len()]);
    }
}

/// Positions that are read and looked up at a time. A part is large enough to hide the read of the next part, and small
/// enough that the first read, which nothing hides, costs little.
const PART: usize = 256;

/// The selection of one call, and the buffers for its results.
#[derive(Debug)]
pub struct Selected<'a, P: ?Sized> {
    /// The selected token positions, `[rows.count][k]`, in any order, -1 for none. Repetitions are allowed.
    pub selection: &'a P,
    /// The slot of each position in the layer's slab, `[rows.count][k]`, -1 for none.
    pub slots: &'a mut [i32],
    /// The rows to fetch, by ascending position. It needs at least `rows.count * k` entries.
    pub fetches: &'a mut [Fetch],
}

fn bad(place: &'static str, value: u64) -> Error {
    Error::new(Kind::OutOfRange, "resolve").at(place).with("value", value)
}

/// The number of distinct positions below `length`. `bits`, one for each position, are clear before and after.
fn distinct(selection: &[i32], length: u32, bits: &mut [u64]) -> u32 {
    let mut count = 0;
    for position in selection.iter().map(|position| *position as u32).filter(|position| *position < length) {
        let (word, bit) = (&mut bits[position as usize / 64], 1 << (position % 64));
        count += u32::from(*word & bit == 0);
        *word |= bit;
    }
    bits.fill(0);
    count
}

impl LayerTables {
    /// One residency step of `lane`. It writes the slot of each selected position, decides which rows to fetch into
    /// which slots, and orders the rows by the rule. Until the sequence's next step, only these fetches write to the
    /// slots that it returns.
    ///
    /// Query row `r` may select the positions below `length + r + 1`: committed rows, and landed rows of this step up
    /// to its own.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a lane without a sequence, rows that have not landed, buffers of wrong lengths, and
    /// more selected positions than the budget and the scratch slots of all waves hold; [`Kind::Exhausted`] after 2^31
    /// steps of one sequence. An error changes nothing.
    pub fn resolve<S: Scan, P: Selection + ?Sized>(
        &mut self,
        scan: &S,
        lane: u32,
        rows: QueryRange,
        selected: Selected<'_, P>,
        work: &mut Workspace,
    ) -> Result<Resolved> {
        self.check(lane, rows, &selected, work)?;
        let head = &self.heads[lane as usize];
        // A call cannot select more distinct rows than the sequence has.
        let count = selected.slots.len();
        let most = count.min(head.length as usize);
        if most > head.budget as usize + self.shape.scratch_rows() || rows.count == 0 {
            return Err(bad("selection beyond budget and scratch slots", count as u64));
        }
        Ok(self.step(scan, lane, rows, selected, work))
    }

    /// One step of a warm-up: makes the rows that a prompt position selected resident by the rule. It adds no new rows,
    /// returns no slots and uses no scratch slots. `slots` and `fetches` are working memory, as long as `selection`.
    ///
    /// # Errors
    /// As [`LayerTables::resolve`].
    pub fn warm<S: Scan, P: Selection + ?Sized>(
        &mut self,
        scan: &S,
        lane: u32,
        selected: Selected<'_, P>,
        work: &mut Workspace,
    ) -> Result<Resolved> {
        let rows = QueryRange { first: 0, count: 0 };
        self.check(lane, rows, &selected, work)?;
        Ok(self.step(scan, lane, rows, selected, work))
    }

    /// The resident rows in a stretch of `lane`'s slots, in the lane's order: the rows to gather once a warm-up has
    /// computed which rows are resident.
    pub fn residents(&self, lane: u32, first: u32, count: u32) -> impl Iterator<Item = Fetch> + '_ {
        let base = self.shape.budget_base;
        self.lane_slots(lane).skip(first as usize).take(count as usize).filter_map(move |slot| {
            let position = self.position_of[slot];
            (position != EMPTY).then_some(Fetch { position, slot: base + slot as u32 })
        })
    }

    /// Checks the sizes of a call.
    fn check<P: Selection + ?Sized>(
        &self,
        lane: u32,
        rows: QueryRange,
        selected: &Selected<'_, P>,
        work: &Workspace,
    ) -> Result<()> {
        let head = self.heads.get(lane as usize).filter(|h| h.budget > 0);
        let Some(head) = head else {
            return Err(bad("lane", u64::from(lane)));
        };
        let end = u64::from(rows.first) + u64::from(rows.count);
        if end > u64::from(head.landed) {
            return Err(bad("rows", end));
        }
        let count = selected.selection.count();
        let room = selected.fetches.len().min(work.selection.len());
        if !count.is_multiple_of(rows.count.max(1) as usize) || selected.slots.len() != count || count > room
        {
            return Err(bad("selection", count as u64));
        }
        if !self.has_room(head, work) {
            return Err(bad("workspace", work.victims.len() as u64));
        }
        if head.stamp >= UNUSED - 2 {
            return Err(Error::new(Kind::Exhausted, "resolve").at("steps of one sequence"));
        }
        Ok(())
    }

    /// Whether a workspace is large enough for these tables. Its other parts have matching sizes.
    pub(super) fn has_room(&self, head: &LaneHead, work: &Workspace) -> bool {
        work.missed.len() * 64 >= self.shape.tokens as usize
            && work.victims.len() >= (head.blocks as usize + 1) * SLOT_BLOCK as usize
    }

    /// The step itself, after its sizes were checked.
    fn step<S: Scan, P: Selection + ?Sized>(
        &mut self,
        scan: &S,
        lane: u32,
        rows: QueryRange,
        selected: Selected<'_, P>,
        work: &mut Workspace,
    ) -> Resolved {
        let Selected { selection, slots, fetches } = selected;
        let head = &self.heads[lane as usize];
        let now = head.stamp + 1;
        let k = slots.len() / rows.count.max(1) as usize;
        // The length that the first query row sees; each further row sees one more. A warm-up has no query row and
        // sees the committed rows.
        let limit = if rows.count == 0 { head.length } else { head.length + rows.first + 1 };
        let start = self.map_start(lane);
        let (mut missed, mut beyond) = (0, None);
        work.selected = slots.len();
        for row in 0..rows.count.max(1) as usize {
            for from in (row * k..(row + 1) * k).step_by(PART) {
                let part = from..(from + PART).min((row + 1) * k);
                let positions = &mut work.selection[part.clone()];
                selection.read(from, positions);
                // Landed rows beyond the length are stamped as well, if the map has them. Their stamps are never
                // read.
                let touched = scan.touch(Touch {
                    map: &self.slot_of[start..start + self.shape.tokens as usize],
                    stamps: &mut self.stamp_of,
                    now,
                    length: limit + row as u32,
                    selection: positions,
                    from: from as u32,
                    entries: &mut work.entries[missed..missed + part.len() + SLOT_BLOCK as usize],
                    slots: &mut slots[part],
                    missed: &mut work.missed,
                });
                if let (None, Some(position)) = (beyond, touched.beyond) {
                    beyond = Some(Beyond { row: rows.first + row as u32, position });
                }
                missed += touched.missed;
            }
        }
        let (hits, misses, scratch) = if missed == 0 {
            (self.hits(scan, lane, now, work), 0, 0)
        } else {
            let misses = scan.take(&mut work.missed, &mut work.positions);
            let oldest = self.oldest(scan, lane, now, work);
            let scratch = self.place(scan, lane, oldest, &mut fetches[..misses], work);
            (oldest.split.touched, misses, scratch)
        };
        for entry in &work.entries[..missed] {
            let entry = *entry as usize;
            slots[entry] = self.slot_of[start + work.selection[entry] as usize] as i32;
        }
        for fetch in &fetches[..scratch] {
            self.slot_of[start + fetch.position as usize] = ABSENT;
        }
        self.heads[lane as usize].stamp = now;
        let counts = Counts { hits, misses: misses as u32, scratch: scratch as u32 };
        Resolved { counts, beyond }
    }

    /// The number of distinct rows that a step without misses has selected; all of them are hits. A lane with few slots
    /// is scanned for them, which is quicker there. In a larger one they are counted by position, whatever its size.
    /// Landed rows are at the length and beyond.
    fn hits<S: Scan>(&self, scan: &S, lane: u32, now: u32, work: &mut Workspace) -> u32 {
        let head = &self.heads[lane as usize];
        let by_stamp = |work: &mut Workspace| self.oldest(scan, lane, now, work).split.touched;
        if (head.budget as usize) < S::QUICK_SLOTS * work.selected {
            return by_stamp(work);
        }
        let hits = distinct(&work.selection[..work.selected], head.length, &mut work.missed);
        debug_assert_eq!(hits, by_stamp(work), "hits by position and by stamp");
        hits
    }

    /// Gives every missed row a slot: the rows with the highest positions get the victims' slots, the others get
    /// scratch slots. Returns the number of rows in scratch slots. In a warm-up those rows stay absent.
    fn place<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        oldest: Oldest,
        fetches: &mut [Fetch],
        work: &mut Workspace,
    ) -> usize {
        let head = &self.heads[lane as usize];
        let (evictable, now) = ((head.budget - oldest.split.touched) as usize, oldest.at.now);
        let scratch = fetches.len().saturating_sub(evictable);
        let start = self.map_start(lane);
        let scratch_start = self.shape.scratch_base + lane * self.shape.scratch;
        let (away, kept) = fetches.split_at_mut(scratch);
        for (index, fetch) in away.iter_mut().enumerate() {
            let position = work.positions[index];
            // Only a warm-up has more of these rows than the scratch slots of all waves, and it reads none of them.
            let slot = match index < self.shape.scratch_rows() {
                true => scratch_start + index as u32 % self.shape.scratch,
                false => ABSENT,
            };
            self.slot_of[start + position as usize] = slot;
            *fetch = Fetch { position, slot };
        }
        for (fetch, position) in kept.iter_mut().zip(&work.positions[scratch..]) {
            fetch.position = *position;
        }
        self.choose_victims(scan, lane, oldest, kept.len(), work);
        for (fetch, victim) in kept.iter_mut().zip(&work.victims) {
            fetch.slot = self.replace(start, *victim, fetch.position, now);
        }
        scratch
    }

    /// Puts `position` into the budget slot `victim` and forgets the row that was there. Returns the slot's id.
    #[inline]
    pub(super) fn replace(&mut self, map_start: usize, victim: u32, position: u32, stamp: u32) -> u32 {
        let old = std::mem::replace(&mut self.position_of[victim as usize], position);
        if old != EMPTY {
            self.slot_of[map_start + old as usize] = ABSENT;
        }
        let slot = self.shape.budget_base + victim;
        self.slot_of[map_start + position as usize] = slot;
        self.stamp_of[slot as usize] = stamp;
        slot
    }
}
