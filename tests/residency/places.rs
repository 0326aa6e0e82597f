//! A resize in its most naive form: what each place of a lane holds, sorted and rebuilt. It has no maps and no sets.
//! It reads the library's tables only to begin and to compare.

use forebay::residency::{EMPTY, LaneHead, LayerTables};

/// A lane, by place.
#[derive(Debug, PartialEq, Eq)]
pub struct Places {
    /// The row at each usable place: (stamp, position).
    pub rows: Vec<Option<(u32, u32)>>,
    pub blocks: Vec<u32>,
    pub head: LaneHead,
    /// The slot ids of the landed rows.
    pub landed: Vec<Option<u32>>,
    base: u32,
}

impl Places {
    pub fn of(tables: &LayerTables, lane: u32) -> Self {
        let (words, shape) = (tables.words(), tables.shape());
        let head = words.heads[lane as usize];
        let list = &words.blocks[(lane * shape.lane_blocks()) as usize..][..head.blocks as usize];
        let row = |place: u32| {
            let slot = list[place as usize / 64] * 64 + place % 64;
            let stamp = words.stamp_of[(shape.budget_base + slot) as usize];
            let position = words.position_of[slot as usize];
            (position != EMPTY).then_some((stamp, position))
        };
        Places {
            rows: (0..head.budget).map(row).collect(),
            blocks: list.to_vec(),
            head,
            landed: (head.length..head.length + head.landed).map(|p| tables.slot(lane, p)).collect(),
            base: shape.budget_base,
        }
    }

    /// Changes the budget; `blocks` is the list afterwards. Returns the rows that leave, and the moves as pairs of slot
    /// ids, from and to.
    pub fn resize(&mut self, blocks: &[u32], budget: usize) -> (Vec<u32>, Vec<(u32, u32)>) {
        if budget == self.rows.len() {
            return Default::default();
        }
        let mut order: Vec<(u32, u32)> = self.rows.iter().flatten().copied().collect();
        order.sort_unstable();
        let leave = &order[..order.len().saturating_sub(budget)];
        let mut behind: Vec<(usize, (u32, u32))> = Vec::new();
        let mut rows = vec![None; budget];
        for (place, row) in self.rows.iter().enumerate() {
            match row {
                Some(row) if leave.contains(row) => {}
                Some(row) if place >= budget => behind.push((place, *row)),
                row if place < budget => rows[place] = *row,
                _ => {}
            }
        }
        let slot = |list: &[u32], place: usize| self.base + list[place / 64] * 64 + place as u32 % 64;
        let mut moves = Vec::new();
        for (from, row) in behind {
            let to = rows.iter().position(Option::is_none).unwrap();
            rows[to] = Some(row);
            moves.push((slot(&self.blocks, from), slot(blocks, to)));
        }
        self.head = LaneHead {
            budget: budget as u32,
            blocks: blocks.len() as u32,
            min_stamp: leave.last().map_or(0, |newest| newest.0),
            next_victim: EMPTY,
            full_places: self.head.full_places.min(budget as u32),
            ..self.head
        };
        let left = leave.iter().map(|row| row.1).collect();
        (self.rows, self.blocks) = (rows, blocks.to_vec());
        (left, moves)
    }
}
