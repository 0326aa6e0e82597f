//! One layer's steps as pools process them: selections united by decode step, and the next selection of every row.

use forebay::Result;
use forebay::trace::SelectionTrace;

use super::pool::{NEVER, Selected};
use crate::study::reserve;

/// The steps of one layer: warm-up steps, then decode steps.
pub struct Steps {
    /// Rows of all steps, ascending within a step.
    rows: Vec<Selected>,
    /// Where each step begins in `rows`, and where the last one ends.
    bounds: Vec<usize>,
    /// Rows born, in order; [`Selected::next`] counts from their birth.
    born: Vec<Selected>,
    warm: u32,
    mtp: u32,
    positions: u32,
}

impl Steps {
    /// Of `layer`: the last `warm` warm steps, then `groups` decode steps of `mtp` query rows. The trace has
    /// as many.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(trace: &SelectionTrace, layer: u32, warm: u32, mtp: u32, groups: u32) -> Result<Steps> {
        let header = trace.header();
        let first = header.warm_steps - warm;
        let warm_steps = (first..header.warm_steps).map(|s| trace.selection(s, layer).to_vec());
        let decode_steps = (0..groups).map(|group| {
            let from = header.warm_steps + group * mtp;
            let length = header.decode_start + group * mtp;
            let all = (from..from + mtp).flat_map(|s| trace.selection(s, layer));
            all.copied().filter(|position| *position < length).collect()
        });
        Steps::of(warm_steps.chain(decode_steps), header.decode_start, warm, mtp, groups)
    }

    /// Of `warm` warm-up steps and `groups` decode steps, positions in any order and repeated, none born in
    /// its own step; the prompt ends at `prompt`.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn of(
        steps: impl Iterator<Item = Vec<u32>>,
        prompt: u32,
        warm: u32,
        mtp: u32,
        groups: u32,
    ) -> Result<Steps> {
        let positions = prompt + groups * mtp;
        let (mut rows, mut bounds) = (Vec::new(), vec![0]);
        for mut step in steps {
            step.sort_unstable();
            step.dedup();
            reserve::grow(&mut rows, step.len())?;
            rows.extend(step.iter().map(|position| Selected { position: *position, next: NEVER }));
            bounds.push(rows.len());
        }
        let mut next = reserve::filled(positions as usize, NEVER)?;
        for (step, bound) in bounds.windows(2).enumerate().rev() {
            for row in &mut rows[bound[0]..bound[1]] {
                row.next = std::mem::replace(&mut next[row.position as usize], step as u32);
                // A row that the warm-up selects once more returns at no cost, so it is not needed before.
                if row.next < warm {
                    row.next = NEVER;
                }
            }
        }
        let born = (prompt..positions)
            .map(|position| Selected { position, next: next[position as usize] })
            .collect();
        Ok(Steps { rows, bounds, born, warm, mtp, positions })
    }

    /// Warm-up steps.
    pub fn warm(&self) -> u32 {
        self.warm
    }

    /// All positions are below this one.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// The mean number of rows of a step.
    pub fn mean_rows(&self) -> u32 {
        self.rows.len().div_ceil((self.bounds.len() - 1).max(1)) as u32
    }

    /// The rows of a step, counted from the first warm-up step.
    pub fn selected(&self, step: u32) -> &[Selected] {
        let step = step as usize;
        &self.rows[self.bounds[step]..self.bounds[step + 1]]
    }

    /// The rows born in a decode step, counted from the first one.
    pub fn born(&self, group: u32) -> &[Selected] {
        let (from, mtp) = (group as usize * self.mtp as usize, self.mtp as usize);
        &self.born[from..from + mtp]
    }
}
