//! Parking: a sequence gives its device pages back, its rows wait on the host, and it comes back later without
//! recomputing one.
//!
//! A server that wants to run another request first *preempts* one. vLLM frees a preempted request's blocks and
//! computes its tokens again (`Scheduler._preempt_request`); here its pages go to the host's tier.
//!
//! | call | copies | pages |
//! |---|---|---|
//! | [`Cache::park`] | down: pages that have no copy on the host | those of the device are free when the call returns |
//! | parked | none | on the host, kept from eviction; the sequence may be extended and closed |
//! | [`Cache::resume`] | up: pages that are not on the device any more | admitted as for a new sequence |
//!
//! A published page is parked as its block: the directory's host page is kept, and the device page stays findable until
//! its memory is needed. So a sequence that was published and saved parks for nothing, and a short parking costs no
//! copies up either. All other pages, the last and partial one among them, get host pages of their own.
//!
//! **Order** is that of all copies between the tiers (`moves`). The device pages are free at once: who takes one writes
//! to it behind the copy, and behind what the engine had enqueued for the sequence. Other steps wait for neither,
//! except that with `Save::Evicted` a step that evicts a page copies it behind them. A step in flight would still write
//! to the pages, so parking needs an idle sequence.
//!
//! A parked sequence keeps its place among [`Config::sequences`](crate::dense::Config::sequences).

use crate::dense::Cache;
use crate::dense::pool::{Need, Pool};
use crate::dense::record::{Parked, Record, State};
use crate::device::{Stream, Ticket};
use crate::error::{Error, Kind, Result};
use crate::fallible::{reserve, vector};
use crate::ids::Sequence;

impl Cache {
    /// Parks a sequence: its rows go to the host's tier, and its device pages are free for others when the call
    /// returns. `accepted` is how many rows of its last step count, as in [`Cache::prepare`]; the others are rejected.
    /// [`Cache::resume`] brings it back. Until then it can be extended and closed.
    ///
    /// `stream` copies the pages that have no copy on the host yet; it is ordered as for [`Cache::close`]. It should be
    /// the stream of copies, not of steps: it waits for all copies down that were enqueued before. The ticket ends with
    /// these copies. Nothing needs to wait for it.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is parked, or whose step failed (truncate it
    /// first); [`Kind::Busy`] while work of the sequence is in flight; [`Kind::DeviceFailed`] if that work failed;
    /// [`Kind::OutOfRange`] for more accepted rows than landed, and for a length whose window was given back: accept
    /// all rows of a prompt's chunk; [`Kind::Exhausted`] names the host pages with their group. These errors change
    /// nothing. If the device refuses the call half-way, call it again: it goes on where it stopped, and until then the
    /// sequence may be parked or not. The stream may be another one that is ordered as the first.
    pub fn park(&mut self, sequence: Sequence, accepted: u32, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?;
        self.hear();
        let index = sequence.index as usize;
        let record = &self.records[index];
        if record.is_away() && record.work.unsettled.is_some() {
            return self.end_parking(index, stream);
        }
        record.check_state(&[State::Running], "park")?;
        record.check_idle("park")?;
        record.check_ticket("park")?;
        if accepted > record.rows.landed {
            return Err(Error::new(Kind::OutOfRange, "park")
                .at("accepted rows")
                .with("accepted", accepted)
                .with("landed", record.rows.landed));
        }
        let length = record.rows.committed + accepted;
        self.check_windows(index, length, "park")?;
        self.check_parking(index, length)?;
        let pages = self.pools.len().saturating_mul(self.config.pages(length) as usize);
        reserve(&mut self.records[index].parked, pages, "park", "pages of a parked sequence")?;
        self.release_held(index)?;
        self.flush(stream)?;
        // What the engine has enqueued for the sequence comes before all that others do with its pages.
        let before = self.moves.down.mark(stream, &*self.device)?;
        for (held, pool) in self.records[index].held.iter().zip(&mut self.pools) {
            held.own().iter().for_each(|page| pool.note_down(*page, before));
        }
        let record = &mut self.records[index];
        let rows = &mut record.rows;
        (rows.committed, rows.stored, rows.landed, rows.upper) = (length, length, 0, length);
        (record.start, record.floor, record.state) = (Some(length), length, State::Parked);
        // What a refused call may have left on a stream are copies of the two lines, which order their own, or a
        // fork's, whose child keeps the page.
        record.work.unsettled = None;
        record.steps.micro_batch = None;
        record.epoch = record.epoch.wrapping_add(1);
        self.unname(index, length / self.config.shape.page_tokens)?;
        self.leave_pages(index, length)?;
        self.move_out(index, length)?;
        if !self.moves.is_noted() {
            return Ok(Ticket::done());
        }
        self.end_parking(index, stream)
    }

    /// Enqueues what is left of a parking.
    fn end_parking(&mut self, index: usize, stream: Stream) -> Result<Ticket> {
        self.unsettle(index, stream)?;
        match self.moves.is_noted() {
            true => self.flush(stream)?,
            // Another call has enqueued them meanwhile.
            false => self.moves.down.wait_all(stream, &*self.device)?,
        }
        self.settle(index, stream)
    }

    /// Checks that the host has pages for those of a sequence of `length` tokens that have no copy there.
    fn check_parking(&self, index: usize, length: u32) -> Result<()> {
        let Record { held, names, .. } = &self.records[index];
        let full = length / self.config.shape.page_tokens;
        for (group, pool) in self.pools.iter().enumerate() {
            let first = held[group].first().max(self.config.first_block(group, length));
            let (mut wanted, mut kept) = (0, 0);
            for block in first..self.config.pages(length) {
                let names = names.as_ref().filter(|_| block < full);
                let found = names.and_then(|names| pool.find(&names.used(group, block)?));
                match found.filter(|found| found.host.is_some()) {
                    // It will not be evicted for the others.
                    Some(found) => kept += u32::from(!found.kept),
                    None => wanted += 1,
                }
            }
            pool.check_host(wanted, kept)?;
        }
        Ok(())
    }

    /// Moves the rows of a sequence to host pages, and gives its device pages back.
    fn move_out(&mut self, index: usize, length: u32) -> Result<()> {
        // First those that have copies, so that no other page evicts them.
        for saved in [true, false] {
            for group in 0..self.pools.len() {
                let first = self.records[index].held[group].first();
                for block in first..self.config.pages(length) {
                    self.move_page(index, group, block, saved)?;
                }
            }
        }
        self.records[index].parked.sort_unstable_by_key(|parked| (parked.group, parked.block));
        let mut names = self.records[index].names.take();
        self.leave_blocks(names.as_ref())?;
        names.iter_mut().for_each(|names| names.blocks.iter_mut().for_each(|(_, groups)| *groups = 0));
        let Record { held, names: own, .. } = &mut self.records[index];
        *own = names;
        for (group, (held, pool)) in held.iter_mut().zip(&mut self.pools).enumerate() {
            pool.forgo(held.need());
            held.promise(Need::default());
            self.tables.clear(group, index, held.first(), held.end())?;
            held.release(pool)?;
        }
        Ok(())
    }

    /// Parks one page, if it is one of those that are `saved` on the host as a block that the sequence uses, or one of
    /// the others.
    fn move_page(&mut self, index: usize, group: usize, block: u32, saved: bool) -> Result<()> {
        let Self { records, pools, moves, .. } = self;
        let (Record { names, held, parked, .. }, pool) = (&mut records[index], &mut pools[group]);
        let Some(page) = held[group].page(block) else { return Ok(()) };
        let name = names.as_ref().and_then(|names| names.used(group, block));
        let on_host = name.is_some_and(|name| pool.find(&name).is_some_and(|found| found.host.is_some()));
        if on_host != saved {
            return Ok(());
        }
        let host = match name {
            Some(name) if saved => pool.pin(&name)?,
            Some(name) => pool.save_kept(&name, page, moves)?,
            None => pool.move_out(page, moves)?,
        };
        let host = host.ok_or_else(|| Error::new(Kind::Internal, "park").at("host pages that were free"))?;
        parked.push(Parked { group, block, host, own: name.is_none() });
        Ok(())
    }

    /// Resumes a parked sequence: takes the device pages that it will need, and brings its rows back on `stream`. Its
    /// steps wait for them on the device, as those of [`Cache::open_shared`] do; it may enter any micro-batch. The
    /// ticket ends when all of its pages are there.
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::InvalidState`] for a sequence that is not parked; [`Kind::Exhausted`] names the device
    /// pages with their group. These errors change nothing. If the device refuses the call half-way, the sequence stays
    /// parked and keeps the device pages that it has taken: resume it again, or close it.
    pub fn resume(&mut self, sequence: Sequence, stream: Stream) -> Result<Ticket> {
        self.record(sequence)?.check_state(&[State::Parked], "resume")?;
        let index = sequence.index as usize;
        let mut pairs = vector(self.pools.len(), "resume", "copies of pages")?;
        for group in 0..self.pools.len() {
            let of_group = self.records[index].parked.iter().filter(|parked| parked.group == group);
            pairs.push(vector(of_group.count(), "resume", "copies of pages")?);
        }
        let away = self.records[index].is_away();
        if away {
            self.check_back(index)?;
        }
        self.flush(stream)?;
        if away {
            self.take_back(index)?;
        }
        let mut filled = 0;
        let Record { names, held, parked, .. } = &self.records[index];
        for Parked { group, block, host, .. } in parked {
            let page = held[*group].page(*block).unwrap_or_default();
            match names.as_ref().and_then(|names| names.used(*group, *block)) {
                Some(_) => filled = self.pools[*group].filled(page).max(filled),
                None => pairs[*group].push((*host, page)),
            }
        }
        let number = self.bring(index, filled, &pairs, stream)?;
        let ticket = self.settle_coming(index, number, stream)?;
        self.leave_parked(index, true)?;
        self.records[index].state = State::Running;
        Ok(ticket)
    }

    /// Checks that the device has the pages of a sequence that is to be resumed.
    fn check_back(&mut self, index: usize) -> Result<()> {
        let reach = self.config.reach(self.records[index].tokens)?;
        for (group, pool) in self.pools.iter().enumerate() {
            let need = self.need(group, reach);
            let Record { names, held, parked, .. } = &mut self.records[index];
            let blocks = parked.iter().filter(|parked| parked.group == group && !parked.own);
            let pages = blocks.filter_map(|parked| pool.find(names.as_ref()?.name(parked.block)?)?.device);
            let (shared, idle) = pages
                .fold((0, 0), |(shared, idle), page| (shared + 1, idle + u32::from(pool.is_idle(page.0))));
            pool.check(&self.config, need, need.whole - shared + idle)?;
            held[group].reserve(need.whole)?;
        }
        Ok(())
    }

    /// Takes these pages: those of its blocks that are still on the device, and fresh ones.
    fn take_back(&mut self, index: usize) -> Result<()> {
        let reach = self.config.reach(self.records[index].tokens)?;
        // First those that are there, so that no other page evicts them.
        let Self { records, pools, .. } = self;
        let Record { names, parked, .. } = &mut records[index];
        for Parked { group, block, .. } in parked.iter().filter(|parked| !parked.own) {
            let Some((name, groups)) = names.as_mut().and_then(|names| names.blocks.get_mut(*block as usize))
            else {
                continue;
            };
            *groups |= u8::from(pools[*group].use_block(name)?.is_some()) << group;
        }
        for group in 0..self.pools.len() {
            let need = self.need(group, reach);
            self.pools[group].promise(need);
            self.records[index].held[group].promise(need);
            self.take_parked(index, group)?;
        }
        self.take_whole(index)?;
        for (group, held) in self.records[index].held.iter().enumerate() {
            self.tables.write(group, index, 0, held.pages())?;
        }
        Ok(())
    }

    /// Fills the page table of a group up to the sequence's last row. Before a window it has no pages.
    fn take_parked(&mut self, index: usize, group: usize) -> Result<()> {
        let end = self.config.pages(self.records[index].rows.committed);
        let Self { records, pools, moves, .. } = self;
        let (Record { names, held, parked, .. }, pool) = (&mut records[index], &mut pools[group]);
        let held = &mut held[group];
        for Parked { block, .. } in parked.iter().filter(|parked| parked.group == group) {
            while held.end() < *block {
                held.push(None);
            }
            let name = names.as_ref().and_then(|names| names.used(group, *block));
            match name.and_then(|name| pool.find(&name)?.device) {
                Some(page) => held.push(Some(page.0)),
                // Its copy comes after those that still read it.
                None => drop(held.grow(block + 1, pool, moves)?),
            }
        }
        // A window of one token that ends with a page has parked none.
        while held.end() < end {
            held.push(None);
        }
        Ok(())
    }

    /// Gives back the host pages of a parked sequence. If it is `back` on the device, its blocks are found there from
    /// now on.
    pub(super) fn leave_parked(&mut self, index: usize, back: bool) -> Result<()> {
        let Self { records, pools, moves, .. } = self;
        let Record { names, held, parked, .. } = &mut records[index];
        for Parked { group, block, host, own } in parked.drain(..) {
            let pool = &mut pools[group];
            if own {
                pool.give_host_back(host, moves)?;
                continue;
            }
            let Some((name, groups)) = names.as_mut().and_then(|names| names.blocks.get_mut(block as usize))
            else {
                continue;
            };
            pool.unpin(name)?;
            if let Some(page) = held[group].page(block).filter(|_| back && *groups & 1 << group == 0) {
                *groups |= u8::from(pool.publish(name, page)?) << group;
            }
        }
        Ok(())
    }

    /// Checks the host pages of a group that parked sequences keep. Returns how many are their own.
    pub(super) fn validate_parked(&self, group: usize, pool: &Pool) -> Result<u32> {
        let mut own = 0;
        for record in self.records.iter().filter(|record| record.is_taken()) {
            for parked in record.parked.iter().filter(|parked| parked.group == group) {
                own += u32::from(parked.own);
                let name = record.names.as_ref().and_then(|names| names.name(parked.block));
                let found = name.and_then(|name| pool.find(name)).filter(|found| found.kept);
                if !parked.own && found.and_then(|found| found.host).map(|host| host.0) != Some(parked.host) {
                    return Err(Error::new(Kind::Internal, "validate")
                        .at("a parked sequence lost the copy of a block")
                        .with("group", group as u64)
                        .with("block", parked.block));
                }
            }
        }
        Ok(own)
    }
}
