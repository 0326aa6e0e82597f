//! S3-FIFO (Yang et al., SOSP 2023): a small queue in front, a main queue, and a memory of who left the
//! small one.
//!
//! A missed row enters the small queue, or the main one if it is among the last rows that left the small one
//! (as many as the main queue is meant to hold). Hits only count, up to 3. While the small queue holds a tenth
//! of the slots it gives up its oldest row: to the main queue if it was hit twice or more, else out. Otherwise
//! the main queue's oldest leaves, or returns to the front with one hit less while it has any.
//!
//! Steps add: a row selected twice in a step is hit once; a row that the step selects is passed over: without
//! hits it keeps its place at the old end, with hits it moves as any other; born rows enter the small
//! queue; a step whose rows exceed the slots keeps its hits and the misses at the highest positions.

use std::collections::VecDeque;

use forebay::Result;

use super::{Pool, Selected, room};

/// Where a row is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Out,
    Small,
    Main,
}

/// What is known of a position.
#[derive(Clone, Copy)]
struct Row {
    place: Place,
    hits: u8,
    /// The step that selected it last, plus 1; 0 before.
    selected: u32,
    /// How many rows had left the small queue for good when it did, itself included; 0 if it is not one.
    left: u64,
}

/// A pool under S3-FIFO.
pub struct S3Fifo {
    slots: usize,
    rows: Vec<Row>,
    /// Oldest in front.
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Rows of each queue that the step selects, met on the way to a victim.
    passed: [Vec<u32>; 2],
    /// Rows that have left the small queue for good.
    left: u64,
    missed: Vec<u32>,
}

impl S3Fifo {
    /// An empty pool of `slots` rows, for positions below `positions`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(slots: usize, positions: usize) -> Result<S3Fifo> {
        let row = Row { place: Place::Out, hits: 0, selected: 0, left: 0 };
        let most = slots.min(positions);
        Ok(S3Fifo {
            slots,
            rows: room::filled(positions, row)?,
            small: room::queue(most)?,
            main: room::queue(most)?,
            passed: [room::vector(most)?, room::vector(most)?],
            left: 0,
            missed: room::vector(positions)?,
        })
    }

    /// Slots of the small queue.
    fn small_slots(&self) -> usize {
        (self.slots / 10).max(1)
    }

    fn resident(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn enter(&mut self, position: u32) {
        let remembered = (self.slots - self.small_slots()) as u64;
        let row = &mut self.rows[position as usize];
        let known = row.left > 0 && self.left - row.left < remembered;
        (row.hits, row.left) = (0, 0);
        if known {
            row.place = Place::Main;
            self.main.push_back(position);
        } else {
            row.place = Place::Small;
            self.small.push_back(position);
        }
    }

    /// Drops `count` rows of those that the step stamped `now` does not select, or all of them.
    fn evict(&mut self, mut count: usize, now: u32) {
        while count > 0 {
            let small = self.small.len() + self.passed[0].len() >= self.small_slots();
            let gone = match (self.small.is_empty(), self.main.is_empty()) {
                (true, true) => break,
                (false, main) if small || main => self.pass_small(now),
                (false, false) | (true, false) => self.pass_main(now),
                (false, true) => self.pass_small(now),
            };
            count -= usize::from(gone);
        }
        let [small, main] = &mut self.passed;
        small.drain(..).rev().for_each(|position| self.small.push_front(position));
        main.drain(..).rev().for_each(|position| self.main.push_front(position));
    }

    /// Takes the small queue's oldest row. Whether it left.
    fn pass_small(&mut self, now: u32) -> bool {
        let Some(position) = self.small.pop_front() else { return false };
        let row = &mut self.rows[position as usize];
        if row.hits > 1 {
            (row.place, row.hits) = (Place::Main, 0);
            self.main.push_back(position);
            return false;
        }
        if row.selected == now {
            self.passed[0].push(position);
            return false;
        }
        self.left += 1;
        (row.place, row.left) = (Place::Out, self.left);
        true
    }

    /// Takes the main queue's oldest row. Whether it left.
    fn pass_main(&mut self, now: u32) -> bool {
        let Some(position) = self.main.pop_front() else { return false };
        let row = &mut self.rows[position as usize];
        if row.hits > 0 {
            row.hits -= 1;
            self.main.push_back(position);
            return false;
        }
        if row.selected == now {
            self.passed[1].push(position);
            return false;
        }
        row.place = Place::Out;
        true
    }
}

impl Pool for S3Fifo {
    fn holds(&self, position: u32) -> bool {
        self.rows[position as usize].place != Place::Out
    }

    fn select(&mut self, step: u32, rows: &[Selected]) -> u32 {
        let now = step + 1;
        self.missed.clear();
        for Selected { position, .. } in rows {
            let row = &mut self.rows[*position as usize];
            row.selected = now;
            if row.place == Place::Out {
                self.missed.push(*position);
            } else {
                row.hits = (row.hits + 1).min(3);
            }
        }
        let missed = std::mem::take(&mut self.missed);
        self.evict((self.resident() + missed.len()).saturating_sub(self.slots), now);
        let surplus = (self.resident() + missed.len()).saturating_sub(self.slots);
        missed[surplus..].iter().for_each(|position| self.enter(*position));
        self.missed = missed;
        self.missed.len() as u32
    }

    fn bear(&mut self, _: u32, rows: &[Selected]) {
        let rows = &rows[rows.len().saturating_sub(self.slots)..];
        // No row is selected between steps: no stamp is 0 by then, and none that is can be resident.
        let nobody = u32::MAX;
        self.evict((self.resident() + rows.len()).saturating_sub(self.slots), nobody);
        rows.iter().for_each(|row| self.enter(row.position));
    }
}
