//! Resolve: a step's selections become slots of resident rows, a list of rows to fetch, and victims.

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::residency::tables::{ABSENT, EMPTY, LaneHead, LayerTables, TableShape, UNUSED};
use crate::residency::victims::Oldest;

/// A row to fetch: which position, into which slot of the layer's slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Fetch {
    /// Token position in the sequence.
    pub position: u32,
    /// Slot id in the layer's slab.
    pub slot: u32,
}

/// Which landing rows a call works for: query rows `first..first + count` of the step. A draft layer's
/// pass `j` is `first = j, count = 1`; an ordinary layer takes all rows of the step at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first query row.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// What a call found. Rows that are still in landing slots count as neither hit nor miss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Distinct selected rows that were resident.
    pub hits: u32,
    /// Distinct selected rows that must be fetched.
    pub misses: u32,
    /// How many of the misses live in scratch slots; they are the first of the list of fetches.
    pub scratch: u32,
}

/// A selected position at or beyond the length that its query row may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// The query row.
    pub row: u32,
    /// The position, as it was selected.
    pub position: u32,
}

/// The outcome of a call that could be carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Hits, misses and scratch rows.
    pub counts: Counts,
    /// The first entry beyond the length, if there was one: it is answered with -1, all else stands, and
    /// the step must not publish its tokens.
    pub beyond: Option<Beyond>,
}

/// What one call selects and where its answer goes.
#[derive(Debug)]
pub struct Selected<'a> {
    /// `[rows.count][k]`: token positions in any order, -1 for none, repetitions allowed.
    pub selection: &'a [i32],
    /// `[rows.count][k]`: the slot of each position in the layer's slab, -1 for none.
    pub slots: &'a mut [i32],
    /// `[rows.count * k]` at least: the rows to fetch, by ascending position.
    pub fetches: &'a mut [Fetch],
}

/// The loops that are worth a machine's vector units. [`Portable`] is plain Rust; a device may bring its
/// own, whose results must be the same to the last bit.
pub trait Scan {
    /// Looks up the positions of one query row, in any order: writes what stands for each in the map to
    /// `slots` and marks that slot, whatever it is; notes the index of every one whose slot is below
    /// `base`, where no budget slot is, in `others`. Answers how many these are.
    // By itself it keeps everything in registers; inlined into a step it does not.
    #[inline(never)]
    fn touch(&self, touch: Touch<'_>) -> usize {
        let Touch { map, marks, base, selection, slots, others } = touch;
        let Some(guard) = map.len().checked_sub(1) else {
            return 0;
        };
        let mut count = 0_usize;
        for (index, (position, slot)) in (0_u32..).zip(selection.iter().zip(slots.iter_mut())) {
            // What is none, or beyond the longest sequence, finds the map's last word, which is absent.
            // No branch is taken on what was found.
            let found = map[(*position as u32 as usize).min(guard)];
            *slot = found as i32;
            if let (Some(mark), Some(other)) = (marks.get_mut(found as usize), others.get_mut(count)) {
                (*mark, *other) = (1, index);
            }
            count = count.wrapping_add(usize::from(found < base));
        }
        count
    }

    /// For each bound the number of stamps at or below it, over the blocks of a lane (numbers of
    /// [`SLOT_BLOCK`] stamps each, all inside `stamps`).
    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4];

    /// Stamps a lane's marked slots with `at.below` and clears their marks; then splits the slots by age:
    /// writes the index of every slot with a stamp below `at.bound` to the front of `older`, of every slot
    /// with that very stamp to the front of `tied`, block by block in the order of `blocks`, and counts the
    /// stamps below `at.below`. `marks` is as long as `stamps`; both lists have room for 16 slots more than
    /// the blocks have.
    fn split(&self, lane: Aged<'_>, at: At, older: &mut [u32], tied: &mut [u32]) -> Split;
}

/// A lane's slots as [`Scan::split`] sees them.
#[derive(Debug)]
pub struct Aged<'a> {
    /// Stamps by budget slot.
    pub stamps: &'a mut [u32],
    /// Not 0: the slot was touched.
    pub marks: &'a mut [u8],
    /// The lane's blocks.
    pub blocks: &'a [u32],
}

/// Where [`Scan::split`] splits; `bound` is below `below`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The stamp that the tied slots bear.
    pub bound: u32,
    /// The stamps counted are below this one.
    pub below: u32,
}

/// What [`Scan::split`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Slots below the bound.
    pub older: usize,
    /// Slots at the bound.
    pub tied: usize,
    /// All slots with a stamp below `below`.
    pub below: u32,
}

/// The arguments of [`Scan::touch`].
#[derive(Debug)]
pub struct Touch<'a> {
    /// Slots by position; the last word is [`ABSENT`].
    pub map: &'a [u32],
    /// By slot id, for all ids that the map holds.
    pub marks: &'a mut [u8],
    /// Slot id of the first budget slot.
    pub base: u32,
    /// Positions, as many as `slots` and `others` have words.
    pub selection: &'a [i32],
    /// Answers.
    pub slots: &'a mut [i32],
    /// Indices into `selection` of what has no budget slot.
    pub others: &'a mut [u32],
}

/// Plain Rust, for any machine.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Scan for Portable {
    fn count(&self, stamps: &[u32], blocks: &[u32], bounds: &[u32; 4]) -> [u32; 4] {
        let mut counts = [0; 4];
        for block in blocks {
            for (bound, count) in bounds.iter().zip(counts.iter_mut()) {
                let stamps = block_of(stamps, *block);
                *count +=
                    stamps.iter().fold(0_u32, |n, s| n.wrapping_add(u32::from(*s as i32 <= *bound as i32)));
            }
        }
        counts
    }

    fn split(&self, lane: Aged<'_>, at: At, older: &mut [u32], tied: &mut [u32]) -> Split {
        let (mut olds, mut ties, mut below) = (0_usize, 0_usize, 0_u32);
        for block in lane.blocks {
            let slots = *block as usize * SLOT_BLOCK as usize..(*block as usize + 1) * SLOT_BLOCK as usize;
            let (stamps, marks) = (lane.stamps.get_mut(slots.clone()), lane.marks.get_mut(slots));
            let (Some(stamps), Some(marks)) = (stamps, marks) else { continue };
            for (stamp, mark) in stamps.iter_mut().zip(marks.iter_mut()) {
                *stamp = if *mark == 0 { *stamp } else { at.below };
                below = below.wrapping_add(u32::from(*stamp < at.below));
                *mark = 0;
            }
            // No branch is taken on a stamp: each index is written to both lists, and kept where it fits.
            for (slot, stamp) in (block * SLOT_BLOCK..).zip(stamps.iter()) {
                if let (Some(old), Some(tie)) = (older.get_mut(olds), tied.get_mut(ties)) {
                    (*old, *tie) = (slot, slot);
                }
                olds = olds.wrapping_add(usize::from(*stamp < at.bound));
                ties = ties.wrapping_add(usize::from(*stamp == at.bound));
            }
        }
        Split { older: olds, tied: ties, below }
    }
}

/// The stamps of a block; blocks lie inside the table by `join`.
fn block_of(stamps: &[u32], block: u32) -> &[u32] {
    let start = block as usize * SLOT_BLOCK as usize;
    stamps.get(start..start + SLOT_BLOCK as usize).unwrap_or(&[])
}

/// What a call needs beside the tables: one per thread of control, sized at construction.
#[derive(Debug)]
pub struct Workspace {
    /// Bit per position: missed in this call. Clear between calls.
    missed: Vec<u64>,
    /// Bit per word of `missed` that is not zero.
    summary: Vec<u64>,
    /// Indices of selected positions that were not resident.
    pub(super) others: Vec<u32>,
    /// Budget slots that go, as indices into the slot tables.
    pub(super) victims: Vec<u32>,
    /// By slot id: touched in this call. Clear between calls, but for ids that are no budget slot's.
    pub(super) marks: Vec<u8>,
    /// Slots that share the last victims' stamp, and their positions.
    pub(super) ties: Vec<u32>,
    pub(super) positions: Vec<u32>,
}

impl Workspace {
    /// Room for layers whose tables are at most as large as `shape`, and calls of at most `selected`
    /// positions (query rows times k).
    pub fn new(shape: &TableShape, selected: u32) -> Self {
        let words = (shape.tokens as usize).div_ceil(64);
        let slots = (shape.lane_blocks() as usize + 1) * SLOT_BLOCK as usize;
        Workspace {
            missed: vec![0; words],
            summary: vec![0; words.div_ceil(64)],
            others: vec![0; selected as usize],
            victims: vec![0; slots],
            marks: vec![0; shape.slots() as usize],
            ties: vec![0; slots],
            positions: vec![0; slots],
        }
    }

    /// Notes a missed position once.
    fn miss(&mut self, position: u32) {
        let word = position as usize / 64;
        if let (Some(bits), Some(sum)) = (self.missed.get_mut(word), self.summary.get_mut(word / 64)) {
            *bits |= 1 << (position % 64);
            *sum |= 1 << (word % 64);
        }
    }

    /// Writes the noted positions to `fetches`, ascending, and forgets them. Answers how many.
    fn take_missed(&mut self, fetches: &mut [Fetch]) -> usize {
        let mut count = 0;
        for (index, sum) in self.summary.iter_mut().enumerate() {
            let mut words = std::mem::take(sum);
            while words != 0 {
                let word = index * 64 + words.trailing_zeros() as usize;
                words &= words - 1;
                let mut bits = std::mem::take(&mut self.missed[word]);
                while bits != 0 {
                    let position = (word * 64) as u32 + bits.trailing_zeros();
                    bits &= bits - 1;
                    if let Some(fetch) = fetches.get_mut(count) {
                        fetch.position = position;
                    }
                    count += 1;
                }
            }
        }
        count.min(fetches.len())
    }
}

fn bad(place: &'static str, value: u64) -> Error {
    Error::new(Kind::OutOfRange, "resolve").at(place).with("value", value)
}

impl LayerTables {
    /// One residency step of `lane`: answers each selected position with a slot, decides what is fetched
    /// and into which slots, and orders the rows by the rule. A slot that is answered here is not
    /// written to before the sequence's next step, except by these fetches.
    ///
    /// Query row `r` may select the positions below `length + r + 1`: committed rows, and the landed rows
    /// of this step up to its own.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a lane without a sequence, rows that have not landed, buffers of wrong
    /// lengths, more selected positions than budget and scratch slots; [`Kind::Exhausted`] after 2^31
    /// steps of one sequence. Nothing has changed then.
    pub fn resolve<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        rows: Rows,
        selected: Selected<'_>,
        work: &mut Workspace,
    ) -> Result<Resolved> {
        let Selected { selection, slots, fetches } = selected;
        let (k, limit) = self.check(lane, rows, (selection.len(), slots.len(), fetches.len()), work)?;
        let head = &self.heads[lane as usize];
        // No more distinct rows can be asked for than there are.
        let most = selection.len().min(head.length as usize);
        if most > (head.budget + self.shape.scratch) as usize || rows.count == 0 {
            return Err(bad("selection beyond budget and scratch slots", selection.len() as u64));
        }
        Ok(self.step(scan, lane, rows, (k, limit), (selection, slots, fetches), work))
    }

    /// One step of a warm-up: what a prompt position selected is touched and made resident by the rule,
    /// nothing is born, nothing is answered, and no row lives in scratch slots. `slots` and `fetches` are
    /// room to work in, as long as `selection`.
    ///
    /// # Errors
    /// As [`LayerTables::resolve`].
    pub fn warm<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        selected: Selected<'_>,
        work: &mut Workspace,
    ) -> Result<Resolved> {
        let Selected { selection, slots, fetches } = selected;
        let rows = Rows { first: 0, count: 0 };
        self.check(lane, rows, (selection.len(), slots.len(), fetches.len()), work)?;
        let length = self.heads[lane as usize].length;
        Ok(self.step(scan, lane, rows, (selection.len(), length), (selection, slots, fetches), work))
    }

    /// Checks a call's extents; answers k and the length that the first query row sees.
    fn check(
        &self,
        lane: u32,
        rows: Rows,
        (selected, slots, fetches): (usize, usize, usize),
        work: &Workspace,
    ) -> Result<(usize, u32)> {
        let head = self.heads.get(lane as usize).filter(|h| h.budget > 0);
        let Some(head) = head else {
            return Err(bad("lane", u64::from(lane)));
        };
        let end = u64::from(rows.first) + u64::from(rows.count);
        if end > u64::from(head.landed) {
            return Err(bad("rows", end));
        }
        let per_row = rows.count.max(1) as usize;
        if !selected.is_multiple_of(per_row) || slots != selected || selected > fetches.min(work.others.len())
        {
            return Err(bad("selection", selected as u64));
        }
        self.check_room(head, work)?;
        if head.stamp >= UNUSED - 2 {
            return Err(Error::new(Kind::Exhausted, "resolve").at("steps of one sequence"));
        }
        Ok((selected / per_row, head.length + rows.first + 1))
    }

    /// Whether a workspace has room for these tables.
    pub(super) fn check_room(&self, head: &LaneHead, work: &Workspace) -> Result<()> {
        let narrow = work.missed.len() * 64 < self.shape.tokens as usize
            || work.marks.len() < self.shape.slots() as usize
            || work.victims.len() < (head.blocks as usize + 1) * SLOT_BLOCK as usize;
        if narrow { Err(bad("workspace", work.marks.len() as u64)) } else { Ok(()) }
    }

    /// The step itself; `limit` is the length that the first row sees, each further row sees one more.
    fn step<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        rows: Rows,
        (k, limit): (usize, u32),
        (selection, slots, fetches): (&[i32], &mut [i32], &mut [Fetch]),
        work: &mut Workspace,
    ) -> Resolved {
        let now = self.heads[lane as usize].stamp + 1;
        let start = self.map_start(lane);
        let (mut missed, mut beyond) = (0, None);
        for row in 0..rows.count.max(1) as usize {
            let part = row * k..(row + 1) * k;
            let limit = limit as usize + row;
            let others = scan.touch(Touch {
                map: &self.slot_of[start..=start + self.shape.tokens as usize],
                marks: &mut work.marks,
                base: self.shape.budget_base,
                selection: &selection[part.clone()],
                slots: &mut slots[part.clone()],
                others: &mut work.others[missed..missed + k],
            });
            // What is not resident: nothing selected, a landed row, a miss, or an error. The misses stay
            // in the list, to be answered once they have a slot.
            let mut kept = missed;
            for index in missed..missed + others {
                let entry = part.start + work.others[index] as usize;
                let position = selection[entry] as u32;
                if position as usize >= limit {
                    slots[entry] = -1;
                    if position != EMPTY && beyond.is_none() {
                        beyond = Some(Beyond { row: rows.first + row as u32, position });
                    }
                } else if slots[entry] as u32 == ABSENT {
                    work.miss(position);
                    work.others[kept] = entry as u32;
                    kept += 1;
                }
            }
            missed = kept;
        }
        let misses = work.take_missed(fetches);
        let oldest = self.oldest(scan, lane, now, work);
        // What is stamped now was hit: all other slots of the budget are older.
        let hits = self.heads[lane as usize].budget - oldest.split.below;
        let scratch = self.place(scan, lane, oldest, &mut fetches[..misses], work);
        for entry in &work.others[..missed] {
            let entry = *entry as usize;
            slots[entry] = self.slot_of[start + selection[entry] as usize] as i32;
        }
        for fetch in &fetches[..scratch] {
            self.slot_of[start + fetch.position as usize] = ABSENT;
        }
        self.heads[lane as usize].stamp = now;
        let counts = Counts { hits, misses: misses as u32, scratch: scratch as u32 };
        Resolved { counts, beyond }
    }

    /// Gives every missed row a slot: those with the highest positions a victim's, the others a scratch
    /// slot. Answers how many are in scratch slots; a warm-up's simply stay away.
    fn place<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        oldest: Oldest,
        fetches: &mut [Fetch],
        work: &mut Workspace,
    ) -> usize {
        if fetches.is_empty() {
            return 0;
        }
        let (evictable, now) = (oldest.split.below as usize, oldest.at.below);
        let scratch = fetches.len().saturating_sub(evictable);
        let start = self.map_start(lane);
        let scratch_start = self.shape.scratch_base + lane * self.shape.scratch;
        for (index, fetch) in fetches[..scratch].iter_mut().enumerate() {
            // Only a warm-up has more of them than scratch slots, and it reads none of them.
            fetch.slot =
                if index < self.shape.scratch as usize { scratch_start + index as u32 } else { ABSENT };
            self.slot_of[start + fetch.position as usize] = fetch.slot;
        }
        let kept = &mut fetches[scratch..];
        self.choose_victims(scan, lane, oldest, kept.len(), work);
        for (fetch, victim) in kept.iter_mut().zip(&work.victims) {
            fetch.slot = self.replace(start, *victim, fetch.position, now);
        }
        scratch
    }

    /// Puts `position` into the budget slot `victim` and forgets what was there. Answers the slot's id.
    pub(super) fn replace(&mut self, map_start: usize, victim: u32, position: u32, stamp: u32) -> u32 {
        let old = std::mem::replace(&mut self.position_of[victim as usize], position);
        if old != EMPTY {
            self.slot_of[map_start + old as usize] = ABSENT;
        }
        let slot = self.shape.budget_base + victim;
        self.slot_of[map_start + position as usize] = slot;
        self.stamp_of[victim as usize] = stamp;
        slot
    }
}
