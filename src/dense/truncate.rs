//! Truncating a sequence: rejected drafts, a failed step, a conversation that goes back.

use crate::dense::Cache;
use crate::dense::pool::Need;
use crate::dense::record::{Copied, State};
use crate::device::{Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::fallible::{reserve, vector};
use crate::ids::Sequence;

impl Cache {
    /// Truncates a sequence to `length` tokens. Landed rows below `length` are accepted, except that those of a failed
    /// step cannot be. The call replaces pages that other sequences share from `length` on, and `stream` copies the
    /// rows of the first of them that remain. After the call a sequence whose step failed may take part in steps again.
    /// If the device refuses the call half-way, try again on any stream, with the same length or a smaller one.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a parked sequence; [`Kind::Busy`] while work of the sequence is in
    /// flight; [`Kind::OutOfRange`] for a length beyond committed and landed rows, and for one whose window was given
    /// back (a sliding window can only go back as far as it still holds pages); [`Kind::Exhausted`] when shared pages
    /// cannot be replaced. These errors change nothing. If the device refuses later operations, only this call and
    /// [`Cache::close`] accept the sequence.
    pub fn truncate(&mut self, sequence: Sequence, length: u32, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?;
        let index = sequence.index as usize;
        let record = &self.records[index];
        record.check_state(&[State::Running, State::Truncating, State::Failed], "truncate")?;
        record.check_idle("truncate")?;
        // Landed rows of a failed step cannot be accepted.
        let landed = if record.state == State::Failed { 0 } else { record.rows.landed };
        let committed = record.rows.committed;
        if length.saturating_sub(committed) > landed {
            return Err(Error::new(Kind::OutOfRange, "truncate")
                .at("length")
                .with("length", length)
                .with("committed", committed)
                .with("landed", landed));
        }
        self.check_windows(index, length, "truncate")?;
        self.check_shared(index, length)?;
        // Pages of copies that have ended. An error above gives none back.
        self.release_held(index)?;
        self.order_behind(index, stream)?;
        self.device.wait(stream, self.left)?;
        // From here on pages may lack rows, until the whole truncation is enqueued.
        let record = &mut self.records[index];
        (record.state, record.work.unsettled) = (State::Truncating, Some(stream));
        (record.rows.committed, record.rows.stored) = (committed.min(length), record.rows.stored.min(length));
        // Another try may be shorter, never longer: what is behind `length` may be gone.
        record.rows.landed = length.saturating_sub(committed);
        self.flush(stream)?;
        self.unname(index, length / self.config.shape.page_tokens)?;
        self.cut_pages(index, length)?;
        self.own_pages(index, length)?;
        self.flush(stream)?;
        let after = self.follow_copies(index, length);
        self.moves.down.wait(after, stream, &*self.device)?;
        let record = &mut self.records[index];
        let ticket = match record.copied.is_empty() {
            true => {
                record.work.unsettled = None;
                Ticket::done()
            }
            false => {
                self.copy_pages(&self.records[index].copied, stream)?;
                self.settle(index, stream)?
            }
        };
        let record = &mut self.records[index];
        let rows = &mut record.rows;
        (rows.committed, rows.stored, rows.landed, rows.upper) = (length, length, 0, length);
        (record.start, record.floor, record.state) = (Some(length), length, State::Running);
        record.failed_at = None;
        Ok(ticket)
    }

    /// The number of the last copy down that may read a page whose rows from `length` on will change, whichever
    /// sequence published it. The sequence's steps follow it.
    fn follow_copies(&mut self, index: usize, length: u32) -> u64 {
        let first = (length / self.config.shape.page_tokens) as usize;
        let record = &mut self.records[index];
        for (pool, held) in self.pools.iter().zip(&record.held) {
            let kept = held.pages().iter().skip(first).map(|page| pool.drained(*page));
            record.after = kept.fold(record.after, u64::max);
        }
        record.after
    }

    /// Checks that every sliding window still has the pages that a query at `length` reads.
    pub(super) fn check_windows(&self, index: usize, length: u32, operation: &'static str) -> Result<()> {
        let held = self.records[index].held.iter().enumerate();
        let gone = held.map(|(group, held)| (group, held.first(), self.config.first_block(group, length)));
        match gone.clone().find(|(_, first, needed)| first > needed) {
            Some((group, first, needed)) => Err(Error::new(Kind::OutOfRange, operation)
                .at("a sliding window whose pages were given back")
                .with("length", length)
                .with("group", group as u64)
                .with("wanted page", needed)
                .with("first page", first)
                .hint("close the sequence, and compute it anew")),
            None => Ok(()),
        }
    }

    /// The blocks of a group from `length` on that other sequences share.
    fn shared_from(&self, index: usize, group: usize, length: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let held = &self.records[index].held[group];
        let first = (length / self.config.shape.page_tokens).max(held.first());
        let pages = held.pages().iter().copied().enumerate().skip(first as usize);
        let pages = pages.map(|(block, page)| (block as u32, page));
        let names = self.records[index].names.as_ref();
        // A page that the directory names for this sequence alone is not shared.
        let alone = move |block, page| {
            let name = names.and_then(|names| names.used(group, block));
            u32::from(name.is_some_and(|name| self.pools[group].uses_alone(&name, page)))
        };
        pages.filter(move |(block, page)| self.pools[group].owners(*page) > 1 + alone(*block, *page))
    }

    /// Checks that pages which others share can be replaced.
    fn check_shared(&self, index: usize, length: u32) -> Result<()> {
        let inside = !length.is_multiple_of(self.config.shape.page_tokens);
        for (group, pool) in self.pools.iter().enumerate() {
            let shared = self.shared_from(index, group, length).count() as u32;
            // A group with a window has promised its pages, but not the one that a copy reads.
            let first = self.shared_from(index, group, length).next();
            let copied =
                first.is_some_and(|(block, _)| inside && block == length / self.config.shape.page_tokens);
            let need = if copied { Need::COPIED } else { Need::default() };
            pool.check(&self.config, need, shared)?;
        }
        Ok(())
    }

    /// Replaces the pages from `length` on that others share by pages of the sequence's own, and lists the copies that
    /// this needs.
    fn own_pages(&mut self, index: usize, length: u32) -> Result<()> {
        let (page_tokens, mut fresh) = (self.config.shape.page_tokens, vector(1, "truncate", "a page")?);
        let groups = self.pools.len();
        reserve(&mut self.records[index].copied, groups, "truncate", "copies of pages")?;
        for group in 0..groups {
            let first = length / page_tokens;
            let mut from = length;
            loop {
                let next = self.shared_from(index, group, from).next();
                let Some((block, page)) = next else { break };
                let pool = &mut self.pools[group];
                let touched = pool.take(1, &mut fresh, &mut self.moves)?;
                let to = fresh.pop().unwrap_or(page);
                let record = &mut self.records[index];
                record.after = record.after.max(touched);
                record.held[group].replace(block, to);
                record.epoch = record.epoch.wrapping_add(1);
                self.tables.write(group, index, block, &[to])?;
                if block == first && !length.is_multiple_of(page_tokens) {
                    pool.keep(page)?;
                    record.copied.push(Copied { group, from: page, to });
                }
                pool.release(page)?;
                from = (block + 1).saturating_mul(page_tokens);
            }
        }
        Ok(())
    }
}
