//! Admission: opening a sequence takes all the pages that its steps will need, or promises them.
//!
//! Admission counts the prompt, the promised tokens and the rows in flight, in every group of layers. So a step never
//! runs out of pages, and no running sequence has to be preempted for one. `pool` says what a group with a sliding
//! window promises.

use crate::dense::Cache;
use crate::dense::held::Held;
use crate::dense::pool::Need;
use crate::dense::record::{Copied, Record, State};
use crate::device::{Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;
use crate::ids::Sequence;

/// The request for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// The most tokens that it may decode.
    pub promised: u32,
}

impl Cache {
    /// Opens a sequence: takes its pages. Its first steps compute the prompt, in chunks of at most
    /// [`Config::step_tokens`](crate::dense::Config::step_tokens) query rows.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] names the sequences, or the pages with their group, with `wanted` and `free`;
    /// [`Kind::OutOfRange`] for more tokens than the cache was made for. An error takes nothing.
    pub fn open(&mut self, open: &Open) -> Result<Sequence> {
        let (index, tokens) = self.admit(open)?;
        let reach = self.config.reach(tokens)?;
        let mut held = vector(self.pools.len(), "open", "page tables")?;
        for (group, pool) in self.pools.iter().enumerate() {
            let need = self.need(group, reach);
            pool.check(&self.config, need, need.whole)?;
            held.push(Held::new(need)?);
        }
        let sequence = self.enter(index, (open.prompt, tokens), held);
        self.take_whole(index).map(|()| sequence).inspect_err(|_| self.records[index].state = State::Closing)
    }

    /// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are the child's prompt;
    /// `promised` is the number of tokens that the child may decode. The two share full pages; `stream` copies the
    /// partial page. The child may take part in steps at once: they wait for the copy.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`Kind::Closed`]; [`Kind::Busy`] while work of the parent is in flight;
    /// [`Kind::InvalidState`] while the parent has rows that are neither accepted nor rejected (truncate it to the
    /// length that you want), if a step of it failed, or if it is parked; [`Kind::DeviceFailed`] if its last copy
    /// failed.
    pub fn fork(&mut self, parent: Sequence, promised: u32, stream: Stream) -> Result<(Sequence, Ticket)> {
        let record = self.record(parent)?;
        record.check_state(&[State::Running], "fork")?;
        record.check_idle("fork")?;
        record.check_ticket("fork")?;
        if record.rows.landed > 0 {
            return Err(Error::new(Kind::InvalidState, "fork")
                .at("rows of the last step are neither accepted nor rejected")
                .with("landed", record.rows.landed)
                .hint("truncate the parent to the length that you want, then fork"));
        }
        let (prompt, floor) = (record.rows.committed, record.floor);
        let (index, tokens) = self.admit(&Open { prompt, promised })?;
        let reach = self.config.reach(tokens)?;
        let parent = parent.index as usize;
        let page_tokens = self.config.shape.page_tokens;
        let (full, partial) = (prompt / page_tokens, !prompt.is_multiple_of(page_tokens));
        let mut held = vector(self.pools.len(), "fork", "page tables")?;
        for (group, pool) in self.pools.iter().enumerate() {
            let need = self.need(group, reach);
            let shared = self.records[parent].held[group].shared(full);
            // The child owns the page that is copied until the copy has ended.
            let wanted = if partial { need.and(Need::COPIED) } else { need };
            pool.check(&self.config, wanted, need.whole - shared)?;
            held.push(Held::new(need)?);
        }
        let copied = vector(self.pools.len(), "fork", "copies of pages")?;
        // The work that wrote the parent's rows comes before the copy.
        self.order_behind(parent, stream)?;
        self.device.wait(stream, self.left)?;
        // The child has the parent's window, and uses the blocks of no other pages.
        self.leave_pages(parent, floor)?;
        let names = self.records[parent].names.as_ref();
        let names = names.map(|names| names.head(full, self.config.pages(reach))).transpose()?;
        let child = self.enter(index, (prompt, tokens), held);
        (self.records[index].copied, self.records[index].names) = (copied, names);
        let shared = self.share(parent, index, full, partial);
        let record = &mut self.records[index];
        (record.rows.committed, record.rows.stored, record.rows.upper) = (prompt, prompt, prompt);
        (record.start, record.floor) = (Some(prompt), floor);
        let copied = shared.and_then(|()| self.copy_fork(parent, index, stream));
        if copied.is_err() {
            self.records[index].state = State::Closing;
            // If the device refuses this, `reap` frees the child later.
            let _ = self.release_closed(index, stream);
        }
        copied.map(|ticket| (child, ticket))
    }

    /// Gives a child the full pages of its parent, and pages for the rest.
    fn share(&mut self, parent: usize, child: usize, full: u32, partial: bool) -> Result<()> {
        for group in 0..self.pools.len() {
            let Ok([from, to]) = self.records.get_disjoint_mut([parent, child]) else { continue };
            let pool = &mut self.pools[group];
            to.held[group].share(&from.held[group], full, pool)?;
            for name in (0..full).filter_map(|block| to.names.as_ref()?.used(group, block)) {
                pool.join_block(&name)?;
            }
            if let Some(page) = from.held[group].page(full).filter(|_| partial) {
                let (_, touched) = to.held[group].grow(full + 1, pool, &mut self.moves)?;
                to.after = to.after.max(touched);
                pool.keep(page)?;
                let own = to.held[group].page(full).unwrap_or(page);
                to.copied.push(Copied { group, from: page, to: own });
            }
            self.tables.write(group, child, 0, to.held[group].pages())?;
        }
        self.take_whole(child)
    }

    fn copy_fork(&mut self, parent: usize, child: usize, stream: Stream) -> Result<Ticket> {
        if self.records[child].copied.is_empty() {
            return Ok(Ticket::done());
        }
        self.flush(stream)?;
        let after = self.records[child].after;
        self.moves.down.wait(after, stream, &*self.device)?;
        // The parent must not write the copied page before the copy has been made.
        self.records[parent].work.unsettled = Some(stream);
        self.records[child].work.unsettled = Some(stream);
        self.copy_pages(&self.records[child].copied, stream)?;
        self.device.record(self.ready[parent], stream)?;
        let Record { work, coming, .. } = &mut self.records[parent];
        // What came back for the parent is there: its ticket had ended.
        (work.unsettled, work.stepped) = (None, false);
        coming.clear();
        self.settle(child, stream)
    }

    /// Admits more tokens to a sequence: `prompt` tokens and after them `promised` that it may decode. Neither the
    /// prompt nor the sum may become smaller. The call takes the pages that the larger sum needs; steps in flight go
    /// on. For a parked sequence [`Cache::resume`] takes them.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence whose step failed; [`Kind::OutOfRange`] for a smaller
    /// prompt or sum, and for more tokens than the cache was made for; [`Kind::Exhausted`] as in [`Cache::open`], and
    /// for more than a parked sequence could have on an empty device. An error changes nothing.
    pub fn extend(&mut self, sequence: Sequence, prompt: u32, promised: u32) -> Result<()> {
        let record = self.record(sequence)?;
        record.check_state(&[State::Running, State::Parked], "extend")?;
        let tokens = prompt.saturating_add(promised);
        let wrong = || {
            Error::new(Kind::OutOfRange, "extend")
                .at("prompt and promised tokens")
                .with("prompt", prompt)
                .with("promised", promised)
        };
        if prompt < record.prompt || tokens < record.tokens {
            return Err(wrong().with("least prompt", record.prompt).with("least sum", record.tokens));
        }
        if tokens > self.config.max_tokens {
            return Err(wrong().with("most", self.config.max_tokens));
        }
        let (index, reach) = (sequence.index as usize, self.config.reach(tokens)?);
        let away = record.is_away();
        for (group, pool) in self.pools.iter().enumerate().filter(|_| away) {
            // A resume takes them.
            pool.check_alone(&self.config, self.need(group, reach))?;
        }
        let groups = if away { 0 } else { self.pools.len() };
        for (group, pool) in self.pools.iter().enumerate().take(groups) {
            let (need, held) = (self.need(group, reach), &mut self.records[index].held[group]);
            let more = need.beyond(held.need());
            pool.check(&self.config, more, more.whole)?;
            held.reserve(need.whole)?;
        }
        if let Some(names) = &mut self.records[index].names {
            names.reserve(self.config.pages(reach))?;
        }
        for group in 0..groups {
            let (need, held) = (self.need(group, reach), &mut self.records[index].held[group]);
            self.pools[group].promise(need.beyond(held.need()));
            held.promise(need);
        }
        (self.records[index].prompt, self.records[index].tokens) = (prompt, tokens);
        if groups > 0 { self.take_whole(index) } else { Ok(()) }
    }

    /// Checks the numbers of a request. Returns the index of a free record and the admitted tokens.
    pub(super) fn admit(&self, open: &Open) -> Result<(usize, u32)> {
        let tokens = open.prompt.checked_add(open.promised);
        let Some(tokens) = tokens.filter(|tokens| *tokens > 0 && *tokens <= self.config.max_tokens) else {
            return Err(Error::new(Kind::OutOfRange, "open")
                .at("prompt and promised tokens")
                .with("prompt", open.prompt)
                .with("promised", open.promised)
                .with("most", self.config.max_tokens));
        };
        let free = self.records.iter().position(|record| !record.is_taken());
        let index = free.ok_or_else(|| {
            Error::new(Kind::Exhausted, "open").at("sequences").with("wanted", 1_u32).with("free", 0_u32)
        })?;
        Ok((index, tokens))
    }

    /// Begins the record of an admitted sequence, and promises it its pages.
    pub(super) fn enter(&mut self, index: usize, tokens: (u32, u32), held: Vec<Held>) -> Sequence {
        let generation = self.records[index].generation.wrapping_add(1);
        self.opened += 1;
        self.pools.iter_mut().zip(&held).for_each(|(pool, held)| pool.promise(held.need()));
        let record = Record::new(generation, self.opened, tokens, self.config.steps_in_flight);
        let leaves = self.records[index].leaves;
        self.records[index] = Record { held, leaves, ..record };
        Sequence { index: index as u32, generation }
    }

    /// Takes all pages of the groups with full attention.
    pub(super) fn take_whole(&mut self, index: usize) -> Result<()> {
        for group in 0..self.pools.len() {
            if !self.config.slides(group) {
                let end = self.records[index].held[group].need().whole;
                self.take_pages(index, group, end)?;
            }
        }
        Ok(())
    }

    /// What a sequence of `reach` tokens, rows in flight included, needs of a group.
    pub(super) fn need(&self, group: usize, reach: u32) -> Need {
        Need { reserve: self.config.reserve(group, reach), whole: self.config.pages(reach) }
    }

    /// Takes pages up to block `end` of a group, which admission found, and enters them in the page table.
    pub(super) fn take_pages(&mut self, index: usize, group: usize, end: u32) -> Result<()> {
        let Record { held, after, .. } = &mut self.records[index];
        let before = held[group].end();
        let (fresh, touched) = held[group].grow(end, &mut self.pools[group], &mut self.moves)?;
        *after = touched.max(*after);
        self.tables.write(group, index, before, fresh)
    }
}
