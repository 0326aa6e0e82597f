//! Prompts whose length is not known when they are opened: admission by chunks.
//!
//! An engine with chunked prefill opens a sequence for its first chunk, and extends it before each further one. It may
//! also append rows that do not count in the end: drafts that ran with the prompt's last chunk and were rejected. Then
//! it truncates the prompt before the sequence joins.
//!
//! Both calls change what the host counts and owns. A sequence that has not joined has nothing on the device, so they
//! enqueue nothing and need no stream. (A join that the device refused half-way may have left work there. It reads
//! lists of this sequence's own pages and blocks, and the next join undoes what it did.) `park` brings a running
//! sequence back into this state, which is how a conversation's next turn appends a prompt of any length.
//!
//! **All or nothing.** An extension takes the pages of the larger total, and the slots if the budget is a ratio or was
//! cut to fewer tokens. If either is not available, nothing has changed, and the prompt may wait for others to end.

use crate::cache::Cache;
use crate::cache::record::{Record, State};
use crate::error::{Error, Kind, Result};
use crate::ids::Sequence;
use crate::sparse::Budget;
use crate::total::PageTable;

impl Cache {
    /// Admits more tokens to a sequence that has not joined, or that is parked: its prompt gets `prompt` tokens in all,
    /// and after them it may decode `promised`. Neither the prompt nor the sum may become smaller. The call takes the
    /// pages that the larger sum needs. A budget that was given as a ratio is that ratio of the new sum.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that has joined and is not parked; [`Kind::OutOfRange`]
    /// for a smaller prompt or sum, and for more tokens than the cache was made for; [`Kind::Exhausted`] names the
    /// pool, with `wanted` and `free`, for an arriving or parked sequence if its slots could never be given. An error
    /// changes nothing.
    pub fn extend(&mut self, sequence: Sequence, prompt: u32, promised: u32) -> Result<()> {
        let record = self.record(sequence)?;
        record.check_state(&State::PROMPTS, "extend")?;
        let (own, before) = (record.admitted.prompt, record.admitted.tokens);
        let most = self.config.max_tokens;
        let tokens =
            prompt.checked_add(promised).filter(|sum| prompt >= own && (before..=most).contains(sum));
        let Some(tokens) = tokens else {
            return Err(Error::new(Kind::OutOfRange, "extend")
                .at("prompt and promised tokens")
                .with("sum", u64::from(prompt) + u64::from(promised))
                .with("least prompt", own)
                .with("least sum", before)
                .with("most", most));
        };
        let reach = self.config.reach(tokens)?;
        let asked = self.asked_for(record, tokens)?;
        let budgets: Vec<u32> = asked.iter().map(|slots| (*slots).min(reach)).collect();
        let (index, has_lane) = (sequence.index as usize, record.owned.slots.has_lane());
        match has_lane {
            true => self.check_slots(index, &budgets)?,
            false => self.check_budgets(&budgets, "extend")?,
        }
        self.extend_pages(index, self.geometry.pages(reach))?;
        // A parked sequence takes its slots when it resumes, an arriving one when it joins.
        if has_lane {
            self.extend_slots(index, budgets, reach)?;
        }
        self.records[index].owned.asks_at = 0;
        let admitted = &mut self.records[index].admitted;
        (admitted.prompt, admitted.tokens, admitted.asked) = (prompt, tokens, asked);
        Ok(())
    }

    /// The slots that a sequence asks for, if it may have `tokens`.
    fn asked_for(&self, record: &Record, tokens: u32) -> Result<Vec<u32>> {
        let mut asked = record.admitted.asked.clone();
        if let Some(ratio) = record.admitted.ratio {
            let members = |group| self.geometry.members(group);
            Budget::Ratio(ratio).write(tokens, self.config.min_budget, &mut asked, members)?;
        }
        Ok(asked)
    }

    /// Checks that there are slots, or with shared budgets promises, for larger budgets of a sequence.
    fn check_slots(&mut self, index: usize, budgets: &[u32]) -> Result<()> {
        if self.sharing.is_none() {
            return self.sparse.slots().check_growth(&self.records[index].owned.slots, budgets);
        }
        // What it was promised already is free for it.
        let least = std::mem::take(&mut self.records[index].owned.least);
        let checked = self.check_promises(budgets);
        self.records[index].owned.least = least;
        checked
    }

    /// Takes pages until a sequence has `pages`, and room for their block hashes, or nothing.
    fn extend_pages(&mut self, index: usize, pages: u32) -> Result<()> {
        let owned = &mut self.records[index].owned;
        if let Some(hashes) = &mut owned.hashes {
            hashes.reserve(pages)?;
        }
        let mut table: PageTable = std::mem::take(&mut owned.table);
        let more = pages.saturating_sub(table.len() as u32);
        let taken = self.take_pages(more, &mut table);
        self.records[index].owned.table = table;
        taken
    }

    /// Gives a sequence the budgets that [`Cache::check_slots`] found.
    fn extend_slots(&mut self, index: usize, budgets: Vec<u32>, reach: u32) -> Result<()> {
        let owned = &mut self.records[index].owned;
        owned.slots.reserve(reach);
        if self.sharing.is_some() {
            owned.least = budgets;
            return Ok(());
        }
        self.sparse.grow(&mut owned.slots, &budgets)?;
        self.records[index].owned.slots.budgets = budgets;
        Ok(())
    }

    /// Drops the rows at and beyond `length` of a sequence that has not joined. Its prompt is then `length` tokens.
    pub(super) fn truncate_prompt(&mut self, sequence: Sequence, length: u32) -> Result<()> {
        let first = (length / self.geometry.page_tokens()) as usize;
        let record = self.record(sequence)?;
        if length > record.admitted.prompt {
            return Err(Error::new(Kind::OutOfRange, "truncate")
                .at("length")
                .with("length", length)
                .with("prompt", record.admitted.prompt));
        }
        let alone = self.uses_alone(&record.owned);
        let owners = record.owned.table.host.iter().map(|page| self.total.pages.owners(*page));
        let mut shared = owners.zip(alone).map(|(owners, alone)| owners > 1 + u32::from(alone)).skip(first);
        // The engine writes new rows to these pages as soon as this call returns, so no copy can replace them in time.
        if shared.any(|shared| shared) {
            return Err(Error::new(Kind::InvalidState, "truncate")
                .at("other sequences share the pages of these rows")
                .with("length", length)
                .hint("join it first, then truncate it"));
        }
        self.unname(sequence, first, &[])?;
        let record = self.record_mut(sequence)?;
        record.admitted.prompt = length;
        record.rows.committed = record.rows.committed.min(length);
        record.rows.stored = record.rows.stored.min(length);
        let counts = record.filled.iter_mut().chain(&mut record.keys);
        counts.for_each(|count| *count = (*count).min(length));
        record.shared = record.shared.min(length);
        Ok(())
    }
}
