//! The digest, which ranks compare, and the validation of the tables, which tests run after every operation.

use crate::error::{Error, Kind, Result};
use crate::geometry::SLOT_BLOCK;
use crate::residency::tables::{ABSENT, EMPTY, FREE, LayerTables, UNUSED};

/// Mixes a word, so that different sets of words have different sums of mixed words (the finaliser of splitmix64).
const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

impl LayerTables {
    /// A digest of the rule's decisions for `lane`: its length and number of steps, and the position and stamp of each
    /// slot. Slots are identified by their index in the lane, so that ranks with different pool layouts agree. The
    /// digest is a sum, so that a kernel may add it up in any order. It is 0 for a lane without a sequence.
    pub fn digest(&self, lane: u32) -> u64 {
        let Some(head) = self.heads.get(lane as usize).filter(|h| h.budget > 0) else {
            return 0;
        };
        let of_head = mix(u64::from(head.length) << 32 | u64::from(head.stamp))
            .wrapping_add(mix(u64::from(head.landed) << 32 | u64::from(head.budget)));
        self.lane_slots(lane).enumerate().fold(of_head, |sum, (place, slot)| {
            let row = u64::from(self.position_of[slot]) << 32 | u64::from(self.stamps()[slot]);
            sum.wrapping_add(mix(row ^ mix(place as u64 + 1)))
        })
    }

    /// The resident positions of `lane` from oldest to newest. Slow; for tests and reports.
    pub fn order(&self, lane: u32) -> Vec<u32> {
        let mut rows: Vec<(u32, u32)> = self
            .lane_slots(lane)
            .filter(|slot| self.position_of[*slot] != EMPTY)
            .map(|slot| (self.stamps()[slot], self.position_of[slot]))
            .collect();
        rows.sort_unstable();
        rows.into_iter().map(|(_, position)| position).collect()
    }

    /// Checks every invariant of the module's head, over all lanes and slots.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the first broken invariant.
    pub fn validate(&self) -> Result<()> {
        let mut owner = vec![None; self.shape.budget_blocks as usize];
        for lane in 0..self.shape.lanes {
            for block in self.lane_blocks(lane) {
                if owner[*block as usize].replace(lane).is_some() {
                    return Err(broken("a block is in two lanes", lane, *block));
                }
            }
            self.validate_lane(lane)?;
        }
        for (block, _) in owner.iter().enumerate().filter(|(_, o)| o.is_none()) {
            let slots = block * SLOT_BLOCK as usize..(block + 1) * SLOT_BLOCK as usize;
            let idle = self.position_of[slots.clone()].iter().all(|p| *p == EMPTY)
                && self.stamps()[slots].iter().all(|s| *s == UNUSED);
            if !idle {
                return Err(broken("a block without a lane holds rows", 0, block as u32));
            }
        }
        Ok(())
    }

    fn validate_lane(&self, lane: u32) -> Result<()> {
        let head = self.heads[lane as usize];
        if head.budget == 0 {
            return Ok(());
        }
        let map = &self.slot_of[self.map_start(lane)..][..self.shape.tokens as usize];
        let landing = self.shape.landing_base + lane * self.shape.query_rows;
        let mut resident = 0;
        for (position, slot) in map.iter().enumerate().filter(|(_, slot)| **slot != ABSENT) {
            let position = position as u32;
            if position >= head.length {
                let row = position - head.length;
                if row >= head.landed || *slot != landing + row {
                    return Err(broken("a row beyond the length is not its landing slot", lane, position));
                }
                continue;
            }
            resident += 1;
            let back =
                slot.checked_sub(self.shape.budget_base).and_then(|s| self.position_of.get(s as usize));
            if back != Some(&position) {
                return Err(broken("a slot does not point back at its position", lane, position));
            }
        }
        self.validate_slots(lane, resident)
    }

    fn validate_slots(&self, lane: u32, resident: usize) -> Result<()> {
        let head = self.heads[lane as usize];
        if head.full_places > head.budget {
            return Err(broken("a lane has more full places than slots", lane, head.full_places));
        }
        let mut filled = 0;
        for (place, slot) in self.lane_slots(lane).enumerate() {
            let (position, stamp) = (self.position_of[slot], self.stamps()[slot]);
            let usable = place < head.budget as usize;
            let fits = match (usable, position) {
                (false, position) => position == EMPTY && stamp == UNUSED,
                (true, EMPTY) => stamp == FREE,
                (true, _) => stamp > FREE && stamp <= head.stamp,
            };
            if !fits || stamp < head.min_stamp {
                return Err(broken("a slot's stamp does not fit its state", lane, slot as u32));
            }
            if position == EMPTY && place < head.full_places as usize {
                return Err(broken("an empty slot is among a lane's full places", lane, slot as u32));
            }
            if head.next_victim != EMPTY && head.min_stamp >= head.stamp {
                return Err(broken(
                    "a lane's next_victim has a stamp that may still be written",
                    lane,
                    head.next_victim,
                ));
            }
            // If `next_victim` still has the stamp `min_stamp`, it is the lowest position with that stamp.
            let tied = stamp == head.min_stamp && position != EMPTY && head.next_victim != EMPTY;
            if tied && position < head.next_victim && self.is_tied(lane, head.next_victim) {
                return Err(broken("a row is older than the lane's next_victim", lane, position));
            }
            filled += usize::from(position != EMPTY);
        }
        // Every resident position points at a slot that points back, so equal counts mean a bijection.
        if filled != resident {
            return Err(broken("a slot holds a row that its lane does not map", lane, filled as u32));
        }
        Ok(())
    }
}

fn broken(rule: &'static str, lane: u32, at: u32) -> Error {
    Error::new(Kind::Internal, "validate residency").at(rule).with("lane", lane).with("at", at)
}
