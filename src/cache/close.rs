//! Closing sequences, freeing their resources, and shutting a cache down.

use crate::cache::record::{Owned, Record, State};
use crate::cache::{Cache, withheld};
use crate::device::{PoolOp, Stream};
use crate::error::{Error, Kind, Result};
use crate::ids::{Lane, Sequence};
use crate::stats::Stats;

impl Cache {
    /// Closes a sequence. An engine also ends a request early with this call, unless others write to the sequence's
    /// pages on their own: then it calls [`Cache::abort`]. The handle is closed at once. The cache frees
    /// the pages, slots and lane when the last step that names the sequence has been retired and its last ticket has
    /// ended: in this call, in that retire, or in [`Cache::reap`]. With [`Config::share`](crate::Config::share) the
    /// slots do not wait for the ticket. `stream` must be ordered after the work that the
    /// engine has enqueued for the sequence outside of steps, because a prefill may still write index keys to the
    /// sequence's pages.
    ///
    /// # Errors
    /// [`Kind::Closed`]. If the device refuses the call, a sequence that has not joined stays open, and the engine may
    /// try again. Any other sequence is closed even so, and [`Cache::reap`] frees its resources.
    pub fn close(&mut self, sequence: Sequence, stream: Stream) -> Result<()> {
        let index = sequence.index as usize;
        if self.record(sequence)?.is_filled() {
            // The engine may still be writing index keys to its pages. Its slots do not wait for that.
            self.take_over(index, stream)?;
            let _ticket = self.settle(index, stream)?;
        }
        self.records[index].state = State::Closing;
        self.hear();
        self.release_closed(index, stream)
    }

    /// Frees the resources of work that has ended meanwhile: those of closed sequences whose last ticket has ended,
    /// pages from which finished work has copied, and step descriptors of begins that the device refused half-way.
    /// Returns how many closed sequences still wait. On `stream` the call enqueues the operations that empty the lanes
    /// of the sequences it releases.
    ///
    /// # Errors
    /// The device's errors.
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

    /// Releases a closed sequence if no work that names it is in flight.
    pub(super) fn release_closed(&mut self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if record.steps.in_flight() > 0 {
            return Ok(());
        }
        // The lane's next join stages its lists where a resize may still read its own. On a failed device none runs.
        let staged = match self.is_staged(index) {
            Err(error) if error.kind() == Kind::DeviceFailed => false,
            staged => staged?,
        };
        if self.records[index].has_ticket() || staged {
            return self.give_up_slots(index, stream);
        }
        let record = &self.records[index];
        if let Some(before) = record.work.unsettled {
            let ticket = self.settle(index, before)?;
            if ticket.poll().is_none() {
                return Ok(());
            }
        }
        if self.records[index].owned.slots.has_lane() {
            self.take_over(index, stream)?;
            self.empty_lane(Lane(self.records[index].lane()), stream)?;
        }
        self.give_back(index)
    }

    /// With shared budgets, frees the slots of a closed sequence whose work is in flight. The sequence that takes them
    /// waits on the device, so how fast the device works changes no budget. The lane and the pages follow later: the
    /// host writes to those.
    fn give_up_slots(&mut self, index: usize, stream: Stream) -> Result<()> {
        let record = &self.records[index];
        if self.sharing.is_none() || !record.has_slots() || record.work.unsettled.is_some() {
            return Ok(());
        }
        let lane = record.lane();
        self.take_over(index, stream)?;
        self.empty_lane(Lane(lane), stream)?;
        let Owned { slots, least, .. } = &mut self.records[index].owned;
        slots.budgets.fill(0);
        least.fill(0);
        self.sparse.trim(slots)?;
        self.share_is_due();
        self.record_ready(index, stream)?;
        self.records[index].note_work();
        Ok(())
    }

    /// Empties a lane on the device. The next sequence that takes the lane or its slots waits for `left`. One event
    /// covers all emptied lanes, so its last record must come after the leave operations of every stream.
    pub(super) fn empty_lane(&self, lane: Lane, stream: Stream) -> Result<()> {
        self.device.wait(stream, self.left)?;
        self.device.enqueue(self.pools, stream, PoolOp::Leave(lane))?;
        self.device.record(self.left, stream)
    }

    /// Returns pages, slots and lane, and frees the record.
    fn give_back(&mut self, index: usize) -> Result<()> {
        let generation = self.records[index].generation;
        if self.records[index].has_slots() {
            self.share_is_due();
        }
        let record = std::mem::replace(&mut self.records[index], Record { generation, ..Record::default() });
        self.places.give_back(record.owned.place);
        self.release_all(&record.owned)
    }

    /// Returns the resources that a sequence owned: first its uses of published pages, then pages, slots and lane.
    pub(super) fn release_all(&mut self, owned: &Owned) -> Result<()> {
        for (_, block) in owned.hashes.iter().flat_map(|hashes| hashes.used_from(0)) {
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

    /// Checks that every owner of every page is a sequence, the index of published pages or an abort that withholds it,
    /// and that the counts agree.
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
        withheld::count(&self.withheld, &mut host, &mut keys);
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
