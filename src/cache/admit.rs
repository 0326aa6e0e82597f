//! Admission: opening a sequence takes all the memory that it will need, or none.
//!
//! Admission counts the prompt, the promised tokens and the rows in flight, on the host and on the device. Host rows
//! grow with every decoded token; systems that admitted only the prompt ran out of memory in the middle of decoding
//! (sgl-project/sglang#23704).

use crate::cache::Cache;
use crate::cache::budgets::Takes;
use crate::cache::record::{Admitted, HostWork, Owned, PageCopy, Record, State};
use crate::device::{Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::ids::Sequence;
use crate::sequence::{RowCounts, SequenceSteps};
use crate::sparse::{BringUp, Budget, Holding, WarmUp};
use crate::total::PageTable;

/// The request for a sequence: its tokens and its slots.
#[derive(Clone, Debug, PartialEq)]
pub struct Open {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// The most tokens that it may decode.
    pub promised: u32,
    /// Its slots in each layer, the same in all layers of an index group; with [`Config::share`](crate::Config::share),
    /// the least that it ever has.
    pub budget: Budget,
    /// The rows to load when it joins.
    pub bring_up: BringUp,
}

impl Cache {
    /// Opens a sequence: takes its pages, slots and lane. With [`Config::share`](crate::Config::share) it takes no
    /// slots yet: the budget is what the sequence is promised, and [`Cache::join`] takes its share.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] names the pool, with `wanted` and `free`; [`Kind::OutOfRange`] for more tokens
    /// than the cache was made for; [`Kind::InvalidConfig`] for an invalid budget. An error takes nothing.
    pub fn open(&mut self, open: &Open) -> Result<Sequence> {
        self.open_as(State::Filling, open)
    }

    /// Opens a sequence that begins as `state`: filling, or arriving.
    pub(super) fn open_as(&mut self, state: State, open: &Open) -> Result<Sequence> {
        let (index, tokens) = self.admit(state, open)?;
        let pages = self.geometry.pages(self.config.reach(tokens)?);
        let admitted = self.admitted(open, tokens)?;
        let (slots, least) = self.first_slots(state, &admitted)?;
        let mut table = PageTable::default();
        if let Err(error) = self.take_pages(pages, &mut table) {
            self.sparse.give_back(&slots)?;
            return Err(error);
        }
        Ok(self.enter(state, index, admitted, Owned { table, slots, least, ..Owned::default() }, 0))
    }

    /// Opens a sequence that begins as a copy of `parent`. The parent's committed tokens are the child's prompt;
    /// `open.prompt` is ignored. The two share full pages; `stream` copies the partial page. They never share slots:
    /// the child starts with the rows that `open.bring_up` loads, and is ready when the ticket is Done.
    ///
    /// # Errors
    /// As [`Cache::open`]; [`Kind::Closed`]; [`Kind::Busy`] while work of the parent is in flight, and as in
    /// [`Cache::join`]; [`Kind::InvalidState`] while the parent has rows that are neither accepted nor rejected
    /// (truncate it to the length that you want), or if it has not joined; [`Kind::DeviceFailed`] if work of the parent
    /// failed.
    pub fn fork(&mut self, parent: Sequence, open: &Open, stream: Stream) -> Result<(Sequence, Ticket)> {
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
        let open = Open { prompt: record.rows.committed, ..open.clone() };
        let (index, tokens) = self.admit(State::Filling, &open)?;
        // The work that writes the parent's rows must end before they are copied or gathered.
        self.order_behind(parent.index as usize, stream)?;
        let pages = self.geometry.pages(self.config.reach(tokens)?);
        let full = (open.prompt / self.geometry.page_tokens()) as usize;
        let fresh = pages - full as u32;
        let hashes = self.fork_hashes(parent, pages, full)?;
        let mut table = self.record(parent)?.owned.table.head(full);
        let partial = self
            .record(parent)?
            .owned
            .table
            .get(full)
            .filter(|_| !open.prompt.is_multiple_of(self.geometry.page_tokens()));
        let admitted = self.admitted(&open, tokens)?;
        let (slots, least) = self.take_slots(&admitted)?;
        let owned = Owned { slots, least, ..Owned::default() };
        let child = self.enter(State::Filling, index, admitted, owned, open.prompt);
        // Until it has pages, no work names the child, so that a refusal takes nothing.
        let room = self.check_room(fresh, 0).and_then(|()| self.take_share(child, Takes::Share, stream));
        if let Err(error) = room.and_then(|()| self.take_pages(fresh, &mut table)) {
            self.take_back(index)?;
            return Err(error);
        }
        for page in 0..full {
            self.total.pages.share(table.host[page])?;
            self.index.pages.share(table.index[page])?;
        }
        let copy = partial.map(|(host, keys)| PageCopy {
            from: (host.0, keys.0),
            to: (table.host[full], table.index[full]),
        });
        if let Some(copy) = copy {
            self.total.pages.share(copy.from.0)?;
            self.index.pages.share(copy.from.1)?;
        }
        for (_, block) in hashes.iter().flat_map(|hashes| hashes.used_from(0)) {
            self.prefix.share(&block)?;
        }
        let owned = &mut self.records[index].owned;
        (owned.table, owned.hashes) = (table, hashes);
        owned.copied.extend(copy);
        let joined = self.join_fork(parent, child, copy, stream);
        if joined.is_err() {
            self.records[index].state = State::Closing;
            // The parent's work has ended, as checked above. A truncate that is tried again must not find older copies.
            self.give_held_back(parent.index as usize)?;
            // If the device refuses this, `reap` frees the child later.
            let _ = self.release_closed(index, stream);
        }
        joined.map(|ticket| (child, ticket))
    }

    fn join_fork(
        &mut self,
        parent: Sequence,
        child: Sequence,
        copy: Option<PageCopy>,
        stream: Stream,
    ) -> Result<Ticket> {
        let (index, parent) = (child.index as usize, parent.index as usize);
        // The parent must not write the copied page before the copy has been made.
        self.records[parent].work.unsettled = Some(stream);
        self.take_over(index, stream)?;
        copy.into_iter().try_for_each(|copy| self.copy_page(copy, stream))?;
        let ticket = self.join(child, stream, WarmUp::default())?;
        self.record_ready(parent, stream)?;
        self.records[parent].note_work();
        Ok(ticket)
    }

    /// Checks the numbers of a request. Returns the index of a free record and the admitted tokens.
    pub(super) fn admit(&self, state: State, open: &Open) -> Result<(usize, u32)> {
        let tokens = open.prompt.checked_add(open.promised);
        let Some(admitted) = tokens.filter(|t| *t > 0 && *t <= self.config.max_tokens) else {
            return Err(Error::new(Kind::OutOfRange, "open")
                .at("prompt and promised tokens")
                .with("prompt", open.prompt)
                .with("promised", open.promised)
                .with("most", self.config.max_tokens));
        };
        if state == State::Arriving {
            self.check_arrivals()?;
        }
        let free = self.records.iter().position(|r| !r.is_taken());
        let index = free.ok_or_else(|| {
            Error::new(Kind::Exhausted, "open").at("lanes").with("wanted", 1_u32).with("free", 0_u32)
        })?;
        Ok((index, admitted))
    }

    /// What a request asks for, with the slots of its budget.
    pub(super) fn admitted(&self, open: &Open, tokens: u32) -> Result<Admitted> {
        let mut asked = vec![0; self.geometry.groups().len()];
        let members = |group| self.geometry.members(group);
        open.budget.write(tokens, self.config.min_budget, &mut asked, members)?;
        let ratio = open.budget.ratio();
        Ok(Admitted { prompt: open.prompt, tokens, bring_up: open.bring_up, asked, ratio })
    }

    /// What a sequence has of the sparse pool when it begins as `state`: an arriving one nothing, any other what
    /// [`Cache::take_slots`] takes.
    pub(super) fn first_slots(&mut self, state: State, admitted: &Admitted) -> Result<(Holding, Vec<u32>)> {
        if state != State::Arriving {
            return self.take_slots(admitted);
        }
        self.check_budgets(&admitted.budgets(self.config.reach(admitted.tokens)?), "arrive")?;
        Ok((Holding::none(self.geometry.groups().len()), Vec::new()))
    }

    /// Takes a lane and slots, or, with shared budgets, a lane alone. Then the second list is what it promises.
    pub(super) fn take_slots(&mut self, admitted: &Admitted) -> Result<(Holding, Vec<u32>)> {
        let reach = self.config.reach(admitted.tokens)?;
        let budgets = admitted.budgets(reach);
        if self.sharing.is_none() {
            return Ok((self.sparse.take(budgets, reach)?, Vec::new()));
        }
        self.check_promises(&budgets)?;
        Ok((self.sparse.take(vec![0; budgets.len()], reach)?, budgets))
    }

    /// Takes `count` pages of rows and as many of index keys, or none. It evicts unused shared pages if needed.
    pub(super) fn take_pages(&mut self, count: u32, table: &mut PageTable) -> Result<()> {
        self.check_room(count, 0)?;
        self.make_room(count)?;
        let before = table.len();
        self.total.pages.allocate(count, &mut table.host)?;
        if let Err(error) = self.index.pages.allocate(count, &mut table.index) {
            for page in table.host.drain(before..) {
                self.total.pages.release(page)?;
            }
            return Err(error);
        }
        // In debug builds, a row that was never stored must show, and not happen to be right.
        match cfg!(debug_assertions) && !self.config.residency_only {
            true => table.host[before..].iter().try_for_each(|page| self.total.poison(*page)),
            false => Ok(()),
        }
    }

    /// Begins the record of an admitted sequence. Every layer already has `filled` rows of its prompt, with their index
    /// keys.
    pub(super) fn enter(
        &mut self,
        state: State,
        index: usize,
        admitted: Admitted,
        owned: Owned,
        filled: u32,
    ) -> Sequence {
        let generation = self.records[index].generation.wrapping_add(1);
        self.opened += 1;
        let counted = if state == State::Arriving { self.index.groups() } else { 0 };
        self.records[index] = Record {
            state,
            generation,
            opened: self.opened,
            admitted,
            owned,
            filled: vec![filled; self.geometry.layers() as usize],
            keys: vec![filled; counted],
            shared: filled,
            rows: RowCounts::default(),
            steps: SequenceSteps::with_room(self.config.steps_in_flight),
            work: HostWork::default(),
        };
        Sequence { index: index as u32, generation }
    }

    /// Undoes [`Cache::enter`] for a sequence that no work names and no caller has the handle of.
    fn take_back(&mut self, index: usize) -> Result<()> {
        self.opened -= 1;
        let generation = self.records[index].generation.wrapping_sub(1);
        let record = std::mem::replace(&mut self.records[index], Record { generation, ..Record::default() });
        self.release_all(&record.owned)
    }

    /// Makes the sequence the only owner of its pages from position `length` on: fresh pages replace the pages that
    /// others use. Returns the page copy that is needed if `length` falls inside a replaced page.
    pub(super) fn own_pages_from(&mut self, sequence: Sequence, length: u32) -> Result<Option<PageCopy>> {
        let page_tokens = self.geometry.page_tokens();
        let first = (length / page_tokens) as usize;
        let record = self.record(sequence)?;
        let alone = self.uses_alone(&record.owned);
        let owners =
            |page: usize| self.total.pages.owners(record.owned.table.host[page]) - u32::from(alone[page]);
        let pages: Vec<usize> = (first..record.owned.table.len()).filter(|page| owners(*page) > 1).collect();
        let mut fresh = PageTable::default();
        self.take_pages(pages.len() as u32, &mut fresh)?;
        self.unname(sequence, first, &pages)?;
        let mut copy = None;
        for (page, (host, keys)) in pages.into_iter().zip(fresh.host.into_iter().zip(fresh.index)) {
            let table = &mut self.record_mut(sequence)?.owned.table;
            let old = (
                std::mem::replace(&mut table.host[page], host),
                std::mem::replace(&mut table.index[page], keys),
            );
            if page == first && !length.is_multiple_of(page_tokens) {
                copy = Some(PageCopy { from: old, to: (host, keys) });
                self.record_mut(sequence)?.owned.copied.extend(copy);
                continue;
            }
            self.total.pages.release(old.0)?;
            self.index.pages.release(old.1)?;
        }
        Ok(copy)
    }

    /// Copies a page's rows and index keys in every layer.
    pub(super) fn copy_page(&self, copy: PageCopy, stream: Stream) -> Result<()> {
        for layer in 0..self.geometry.layers() as usize {
            let rows = (self.total.page(layer, copy.from.0)?, self.total.page(layer, copy.to.0)?);
            self.device.copy(stream, rows.0, rows.1)?;
        }
        for group in 0..self.geometry.groups().len() {
            let keys = (self.index.page(group, copy.from.1)?, self.index.page(group, copy.to.1)?);
            if let (Some(from), Some(to)) = keys {
                self.device.copy(stream, from, to)?;
            }
        }
        Ok(())
    }
}
