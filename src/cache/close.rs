//! The end of a sequence, and of a cache.

use crate::cache::Cache;
use crate::cache::record::{Owned, Record, State};
use crate::device::{PoolOp, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Sequence};
use crate::stats::Stats;

impl Cache {
    /// Ends a sequence. Its handle is closed at once; its pages, slots and lane come back when the last
    /// step that names it has been retired and its last ticket has ended: now, at that retire, or by
    /// [`Cache::reap`]. An abort is the same call. `stream` is ordered behind what the engine has enqueued for
    /// the sequence outside of steps: a prefill that still writes index keys writes them to its own pages.
    ///
    /// # Errors
    /// [`Kind::Closed`]. What the device refuses leaves a sequence that has not joined open, for another try; any
    /// other is closed all the same, and its release is left to [`Cache::reap`].
    pub fn close(&mut self, sequence: Sequence, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        if self.record(sequence)?.state == State::Filling {
            // The engine may still be writing index keys to its pages.
            self.take_over(index, stream)?;
        }
        self.records[index].state = State::Closing;
        self.hear();
        self.release_closed(index, stream)
    }

    /// Takes up what has ended since: closed sequences whose last ticket has ended are released, and pages
    /// that ended work has copied from come back, as do step descriptors that were given up.
    /// Answers how many closed sequences still wait.
    ///
    /// # Errors
    /// As the device's.
    pub fn reap(&mut self, stream: Stream) -> Result<u32> {
        self.hear();
        self.ring.reclaim(&*self.device, &self.stepped)?;
        for index in 0..self.records.len() {
            if self.records[index].state == State::Closing {
                self.release_closed(index, stream)?;
            }
            self.release_held(index)?;
        }
        Ok(self.records.iter().filter(|r| r.state == State::Closing).count() as u32)
    }

    /// Releases a closed sequence if nothing that names it is in flight.
    pub(super) fn release_closed(&mut self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if !record.steps.in_flight.is_empty() || record.has_ticket() {
            return Ok(());
        }
        if let Some(before) = record.work.unsettled {
            let ticket = self.settle(index, before)?;
            if ticket.poll().is_none() {
                return Ok(());
            }
        }
        self.take_over(index, stream)?;
        self.empty_lane(Lane(self.records[index].lane()), stream)?;
        self.give_back(index)
    }

    /// Empties a lane on the device. Whoever takes it, or its slots, over waits for `left`. One event
    /// stands for all leaves, so its last record has to be behind the leaves of every stream.
    pub(super) fn empty_lane(&self, lane: Lane, stream: Stream) -> Result<()> {
        self.device.wait(stream, self.left)?;
        self.device.enqueue(self.pools, stream, PoolOp::Leave(lane))?;
        self.device.record(self.left, stream)
    }

    /// Returns pages, slots and lane, and frees the record.
    fn give_back(&mut self, index: usize) -> Result<()> {
        let generation = self.records[index].generation;
        let record = std::mem::replace(&mut self.records[index], Record { generation, ..Record::default() });
        self.release_all(&record.owned)
    }

    /// Returns what a sequence owned: the names' uses first, then pages, slots and lane.
    pub(super) fn release_all(&mut self, owned: &Owned) -> Result<()> {
        for (_, block) in owned.names.iter().flat_map(|names| names.used_from(0)) {
            self.prefix.release(&block)?;
        }
        for (host, keys) in owned.table.host.iter().zip(&owned.table.index) {
            self.total.pages.release(*host)?;
            self.index.pages.release(*keys)?;
        }
        for copy in &owned.copied {
            self.total.pages.release(copy.from.0)?;
            self.index.pages.release(copy.from.1)?;
        }
        self.sparse.give_back(&owned.slots)
    }

    /// Ends the cache: everything must be closed and retired.
    ///
    /// # Errors
    /// [`Kind::Busy`] gives the cache back, with the sequences and steps that are left.
    pub fn shut_down(self) -> Result<Stats, (Box<Cache>, Error)> {
        let stats = self.stats();
        if stats.sequences == 0 && stats.steps_in_flight == 0 {
            return Ok(stats);
        }
        let error = Error::new(Kind::Busy, "shut down")
            .at("sequences or steps are left")
            .with("sequences", stats.sequences)
            .with("steps", stats.steps_in_flight);
        Err((Box::new(self), error))
    }

    /// Every owner of every page is a sequence or the index of shared blocks, and the counts agree.
    pub(super) fn validate_pages(&self) -> Result<()> {
        let mut host = vec![0_u32; self.config.host_pages as usize];
        let mut keys = vec![0_u32; self.config.index_pages as usize];
        for record in self.records.iter().filter(|r| r.is_taken()) {
            record.owned.table.host.iter().for_each(|p| host[*p as usize] += 1);
            record.owned.table.index.iter().for_each(|p| keys[*p as usize] += 1);
            for copy in &record.owned.copied {
                host[copy.from.0 as usize] += 1;
                keys[copy.from.1 as usize] += 1;
            }
        }
        self.count_shared(&mut host, &mut keys)?;
        let wrong = |page: u32| {
            Error::new(Kind::Internal, "validate pages").at("owners of a page").with("page", page)
        };
        for (page, owners) in (0_u32..).zip(host) {
            if self.total.pages.owners(page) != owners {
                return Err(wrong(page));
            }
        }
        for (page, owners) in (0_u32..).zip(keys) {
            if self.index.pages.owners(page) != owners {
                return Err(wrong(page));
            }
        }
        Ok(())
    }
}
