//! Closing sequences, freeing their pages, and shutting a cache down.

use crate::dense::named::Named;
use crate::dense::pool::{Need, Pool, Promised};
use crate::dense::record::{Record, State};
use crate::dense::{Cache, Stats};
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::fallible::filled;
use crate::ids::Sequence;

impl Cache {
    /// Closes a sequence. An engine also aborts a request with this call; one that arrives with [`Cache::abort`], if
    /// others may still write to its pages. The handle is closed at once. The cache frees
    /// the pages when the last step that names the sequence has been retired and its last ticket has ended: in this
    /// call, in that retire, or in [`Cache::reap`]. `stream` must be ordered after the work that the engine has
    /// enqueued for the sequence outside of steps, because that may still read or write its pages.
    ///
    /// # Errors
    /// [`Kind::Closed`]. If the device refuses the call, the sequence is closed even so, and [`Cache::reap`] frees its
    /// pages.
    pub fn close(&mut self, sequence: Sequence, stream: Stream) -> Result<()> {
        self.record(sequence)?;
        let index = sequence.index as usize;
        self.records[index].state = State::Closing;
        self.hear();
        let released = self.release_closed(index, stream);
        // A later call gives the pages back, and may name another stream.
        let waits = self.records[index].state == State::Closing;
        let left = if waits { self.record_left(stream) } else { Ok(()) };
        released.and(left)
    }

    /// Orders everything that takes given-back pages from now on after the work on `stream`. One event covers all
    /// streams, so its last record comes after those of the others.
    pub(super) fn record_left(&self, stream: Stream) -> Result<()> {
        self.device.wait(stream, self.left)?;
        self.device.record(self.left, stream)
    }

    /// Frees the resources of work that has ended meanwhile: those of closed sequences, pages that finished copies have
    /// read. Returns how many closed sequences still wait.
    ///
    /// # Errors
    /// The device's errors.
    pub fn reap(&mut self, stream: Stream) -> Result<u32> {
        self.hear();
        for index in 0..self.records.len() {
            if self.records[index].state == State::Closing {
                self.release_closed(index, stream)?;
            }
            self.release_held(index)?;
        }
        Ok(self.records.iter().filter(|record| record.state == State::Closing).count() as u32)
    }

    /// Releases a closed sequence if no work that names it is in flight. A sequence that takes its pages waits for
    /// `left`: the engine may still be working on them on `stream`.
    pub(super) fn release_closed(&mut self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if record.steps.in_flight() > 0 || record.has_ticket() {
            return Ok(());
        }
        if let Some(before) = record.work.unsettled {
            let ticket = self.settle(index, before)?;
            if ticket.poll().is_none() {
                return Ok(());
            }
        }
        self.record_left(stream)?;
        self.free(index)
    }

    /// Gives back the pages of a sequence that no work names, and frees its record.
    pub(super) fn free(&mut self, index: usize) -> Result<()> {
        self.give_held_back(index)?;
        self.leave_parked(index, false)?;
        self.leave_host_pages(index)?;
        let generation = self.records[index].generation;
        let leaves = self.records[index].leaves;
        let free = Record { generation, leaves, ..Record::default() };
        let record = std::mem::replace(&mut self.records[index], free);
        self.leave_blocks(record.names.as_ref())?;
        for (group, (mut held, pool)) in record.held.into_iter().zip(&mut self.pools).enumerate() {
            pool.forgo(held.need());
            self.tables.clear(group, index, held.first(), held.end())?;
            held.release(pool)?;
        }
        Ok(())
    }

    /// Shuts the cache down. All sequences must be closed, all steps retired, and all withheld pages released.
    ///
    /// # Errors
    /// [`Kind::Busy`] returns the cache, and gives the number of remaining sequences, steps and withheld pages.
    pub fn shut_down(self) -> Result<Stats, (Box<Cache>, Error)> {
        let stats = self.stats();
        if stats.sequences == 0 && stats.steps_in_flight == 0 && stats.withheld_pages == 0 {
            return Ok(stats);
        }
        let error = Error::new(Kind::Busy, "shut down")
            .at("sequences, steps or withheld pages are left")
            .with("sequences", stats.sequences)
            .with("steps", stats.steps_in_flight)
            .with("withheld", stats.withheld_pages);
        Err((Box::new(self), error))
    }

    /// Checks that a sequence owns the page of every block that it uses.
    fn validate_users(&self, group: usize, pool: &Pool, record: &Record) -> Result<()> {
        let named = record.names.as_ref();
        let used =
            (0..named.map_or(0, Named::pages)).filter_map(|block| Some((block, named?.used(group, block)?)));
        for (block, name) in used {
            let page = pool.find(&name).and_then(|found| found.device).map(|page| page.0);
            if page.is_none() || page != record.held[group].page(block) {
                return Err(Error::new(Kind::Internal, "validate")
                    .at("a sequence uses a block without owning its page")
                    .with("group", group as u64)
                    .with("block", block));
            }
        }
        Ok(())
    }

    /// Checks every invariant of the pages and page tables. For tests, between steps.
    ///
    /// # Errors
    /// [`Kind::Internal`] names the broken invariant.
    pub fn validate(&self) -> Result<()> {
        let mut entries = filled(self.config.entries()? as usize, 0, "validate", "a page table")?;
        for (group, pool) in self.pools.iter().enumerate() {
            let mut owners = filled(pool.count() as usize, 0_u32, "validate", "owners of pages")?;
            let mut promised = Promised::default();
            let mut count = |page: u32| {
                if let Some(owners) = owners.get_mut(page as usize) {
                    *owners += 1;
                }
            };
            // The null page is the pool's own.
            count(0);
            for (lane, record) in self.records.iter().enumerate().filter(|(_, record)| record.is_taken()) {
                for copy in record.copied.iter().filter(|copy| copy.group == group) {
                    promised.add(Need::COPIED);
                    count(copy.from);
                }
                let held = &record.held[group];
                promised.add(held.need());
                self.validate_users(group, pool, record)?;
                held.own().iter().for_each(|page| count(*page));
                let row = &mut entries[..held.pages().len()];
                self.tables.read(group, lane, row)?;
                if row != held.pages() {
                    return Err(Error::new(Kind::Internal, "validate")
                        .at("the page table of a sequence")
                        .with("group", group as u64)
                        .with("lane", lane as u64));
                }
            }
            for page in self.withheld.lists().flat_map(|pages| pages.device_of(group)) {
                promised.add(Need::COPIED);
                if let Some(owners) = owners.get_mut(page as usize) {
                    *owners += 1;
                }
            }
            let arriving = self.records.iter().map(|record| record.arriving.host_pages(group)).sum::<u32>();
            let withheld = self.withheld.lists().flat_map(|pages| pages.host_of(group)).count() as u32;
            let own = self.validate_parked(group, pool)? + arriving + withheld;
            pool.validate(&owners, promised, own)?;
        }
        Ok(())
    }
}
