//! How many pages a sequence needs in a group, and how many all sequences need together.
//!
//! A page of a group with full attention is needed until its sequence closes, so a sequence is charged all its pages at
//! admission. In a group with a window the pages before the window are used again, so a sequence is charged fewer. This
//! module says how many, such that a step never runs out of pages.
//!
//! # The bound of one sequence
//!
//! Let `W` be the window, `P` the tokens of a page, `q` the query rows of a decoding sequence, `S` the steps of a
//! sequence in flight. The host must keep every page that a step in flight reads or writes. It knows the committed
//! length `c` at which the newest retired step began, from that step's report. It need not know how many of that step's
//! rows were accepted (the device may), so the oldest step in flight begins somewhere in `c ..= c + q`, and the newest
//! ends at `c + q + S x q` at most. The first query row of the oldest step reads from `c - (W - 1)` on. So the pages in
//! use are those of `W - 1 + (S + 1) x q` consecutive positions. `n` consecutive positions touch at most `ceil((n - 1)
//! / P) + 1` pages: as many as `n - 1` positions fill, and one that the first position ends.
//!
//! # Prompt chunks
//!
//! A chunk of a prompt has more than `q` rows, up to `step_tokens`. To charge every sequence for the largest chunk, as
//! vLLM's bound of one request does (`SlidingWindowSpec`), would be many times the window: for gpt-oss with two steps
//! in flight and chunks of 2,048 tokens 67 pages of 64 instead of 4. But `step_tokens` bounds all batch rows of a step
//! *together*. Of the steps in flight, `S` of each micro-batch, at most `T = S x micro_batches x step_tokens` rows are
//! beyond the `q` that each sequence is charged for. They belong to at most `k` sequences: those that are open, or the
//! batch rows of so many steps. `r` more rows of one sequence touch at most `ceil(r / P)` more pages, and `k` numbers
//! of the sum `T`, each divided by `P` and rounded up, make at most `(T + k x (P - 1)) / P`. That many pages are kept
//! for chunks, once for all sequences ([`Config::chunk_pages`]).
//!
//! A sequence has no more pages than its reach fills, whatever its chunks. So where the sequences are short, they need
//! less than that: [`Config::demand`] is the smaller one.
//!
//! # What steps must hold to
//!
//! - All rows of a chunk are accepted: a step with more rows than `q` leaves no doubt about the length after it.
//! - A page before the window of the oldest step in flight is given back when the step before it is retired, before the
//!   next one is prepared.
//! - The rows of a failed step are given back when it is retired. A sequence is truncated only as far as its window is
//!   still there.

use crate::dense::config::Config;

impl Config {
    /// Pages that `tokens` tokens fill, in any group.
    pub(crate) fn pages(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.shape.page_tokens.max(1))
    }

    /// The most pages that `positions` consecutive positions touch.
    fn touched(&self, positions: u64) -> u64 {
        match positions {
            0 => 0,
            n => (n - 1).div_ceil(self.shape.page_tokens.max(1).into()) + 1,
        }
    }

    /// Whether a group has a sliding window.
    pub(super) fn slides(&self, group: usize) -> bool {
        self.window(group).is_some()
    }

    /// The first page of a group that a query at `position` or beyond reads.
    pub(super) fn first_block(&self, group: usize, position: u32) -> u32 {
        let window = self.window(group).unwrap_or(u32::MAX);
        position.saturating_add(1).saturating_sub(window) / self.shape.page_tokens.max(1)
    }

    /// The window of a group with one.
    fn window(&self, group: usize) -> Option<u32> {
        self.shape.groups.get(group).and_then(|group| group.window)
    }

    /// Pages of a group that a sequence of `reach` tokens, rows in flight included, is charged at admission. Chunks of
    /// prompts aside: see [`Config::demand`].
    pub(crate) fn reserve(&self, group: usize, reach: u32) -> u32 {
        let whole = self.pages(reach);
        self.window(group).map_or(whole, |window| {
            let steps = u64::from(self.steps_in_flight) + 1;
            let rows = steps.saturating_mul(self.query_rows.into());
            let cycled = self.touched(rows.saturating_add(window.into()).saturating_sub(1));
            u32::try_from(cycled).map_or(whole, |cycled| cycled.min(whole))
        })
    }

    /// Pages of a group that the chunks of prompts in flight take beyond their sequences' [`Config::reserve`], all
    /// sequences together. 0 for a group with full attention.
    pub(crate) fn chunk_pages(&self, group: usize) -> u64 {
        if self.window(group).is_none() {
            return 0;
        }
        let tokens = u64::from(self.shape.page_tokens.max(1));
        let steps = u64::from(self.steps_in_flight) * u64::from(self.micro_batches);
        let rows = steps.saturating_mul(self.step_tokens.into());
        let sequences = steps.saturating_mul(self.batch.into()).min(self.sequences.into());
        rows.saturating_add(sequences.saturating_mul(tokens - 1)) / tokens
    }

    /// The most pages of a group that sequences have at the same time, whatever their steps: `reserved` is the sum of
    /// their [`Config::reserve`], `whole` the sum of the pages of their reaches. Admission keeps it within the group's
    /// device pages, the null page left out.
    pub(crate) fn demand(&self, group: usize, reserved: u64, whole: u64) -> u64 {
        reserved.saturating_add(self.chunk_pages(group).min(whole.saturating_sub(reserved)))
    }
}

#[cfg(test)]
#[path = "reserve_tests.rs"]
mod tests;
