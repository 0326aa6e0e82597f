//! Commit and truncate: accepting or forgetting the rows that a step wrote to its landing slots, and removing the rows
//! beyond a new length.

use crate::error::{Error, Kind, Result};
use crate::residency::resolve::Fetch;
use crate::residency::scan::Scan;
use crate::residency::tables::{ABSENT, EMPTY, FREE, LayerTables};

/// A row's copy inside the slab: an accepted row's from its landing slot to its budget slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Moved {
    /// The slot id that the row leaves.
    pub from: u32,
    /// The slot id that the row gets.
    pub to: u32,
}

impl LayerTables {
    /// Ends the previous step of `lane` and begins the next. The first `accepted` landed rows become the newest
    /// resident rows, the other landed rows are forgotten, and the next step has `next` landing rows. Calls `copy` for
    /// every accepted row that has a slot, oldest first; a budget below `accepted` keeps the last accepted rows. Hits,
    /// fetched rows and evictions of rejected query rows are not undone.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a lane without a sequence, for more accepted rows than landed rows, for more next
    /// rows than landing slots, and for a sequence that would outgrow its declared tokens. An error changes nothing.
    pub fn commit<S: Scan>(
        &mut self,
        scan: &S,
        lane: u32,
        accepted: u32,
        next: u32,
        mut copy: impl FnMut(Moved),
    ) -> Result<()> {
        let bad = |place: &'static str, value: u32| {
            Err(Error::new(Kind::OutOfRange, "commit").at(place).with("value", value).with("lane", lane))
        };
        let head = match self.heads.get(lane as usize) {
            Some(head) if head.budget > 0 => *head,
            _ => return bad("lane", lane),
        };
        if accepted > head.landed {
            return bad("accepted rows", accepted);
        }
        if next > self.shape.query_rows {
            return bad("query rows", next);
        }
        let length = head.length + accepted;
        if length > self.shape.tokens || next > self.shape.tokens - length {
            return bad("length", length);
        }
        let start = self.map_start(lane);
        let landing = self.shape.landing_base + lane * self.shape.query_rows;
        let landed = start + head.length as usize;
        self.slot_of[landed..landed + head.landed as usize].fill(ABSENT);

        for row in accepted.saturating_sub(head.budget)..accepted {
            let victim = self.lru_slot(scan, lane);
            let slot = self.replace(start, victim, head.length + row, head.stamp);
            copy(Moved { from: landing + row, to: slot });
        }
        for row in 0..next {
            self.slot_of[start + (length + row) as usize] = landing + row;
        }
        let head = &mut self.heads[lane as usize];
        (head.length, head.landed) = (length, next);
        Ok(())
    }

    /// Truncates the sequence in `lane` to `length` tokens. It forgets every resident row at or beyond `length`, and
    /// every landed row.
    ///
    /// # Errors
    /// [`Kind::OutOfRange`] for a lane without a sequence or a length beyond the committed one.
    pub fn truncate(&mut self, lane: u32, length: u32) -> Result<()> {
        let head = match self.heads.get(lane as usize) {
            Some(head) if head.budget > 0 && length <= head.length => *head,
            _ => {
                return Err(Error::new(Kind::OutOfRange, "truncate").at("length").with("length", length));
            }
        };
        let start = self.map_start(lane);
        let (budget_base, end) = (self.shape.budget_base, head.length + head.landed);
        let mut emptied = false;
        for position in length..end {
            let slot = std::mem::replace(&mut self.slot_of[start + position as usize], ABSENT);
            if slot != ABSENT && slot >= budget_base {
                self.position_of[(slot - budget_base) as usize] = EMPTY;
                self.stamp_of[slot as usize] = FREE;
                emptied = true;
            }
        }
        let head = &mut self.heads[lane as usize];
        (head.length, head.landed) = (length, 0);
        if emptied {
            (head.min_stamp, head.full_places) = (FREE, 0);
        }
        Ok(())
    }

    /// The landing slot of the step's query row `row` in `lane`, and the position of that row.
    pub fn landing(&self, lane: u32, row: u32) -> Option<Fetch> {
        let head = self.heads.get(lane as usize)?;
        if row >= head.landed {
            return None;
        }
        let slot = self.shape.landing_base + lane * self.shape.query_rows + row;
        Some(Fetch { position: head.length + row, slot })
    }
}
