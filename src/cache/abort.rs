//! Aborts: the end of a sequence to whose pages others may still write.
//!
//! A fabric such as NIXL lets a sender write to a receiver's memory from afar. Nothing that the receiver does stops a
//! write that is under way: it lands after the receiver has given the request up. If the pages belong to another
//! sequence by then, that sequence decodes with foreign rows. Engines that freed such pages at once, or after a time,
//! lost rows (sglang#24527, #32564; vllm#21570).
//!
//! So an abort ends the sequence as [`Cache::close`] does, and *withholds* its pages: they have one more owner, which
//! only [`Cache::release`] removes. Lane and slots do not wait, because no one else writes there. The caller releases
//! the pages when each writer has said that it is done with them, or when what it could write through is destroyed
//! (`transfer::quarantine` counts that, by use of the pages). No time releases them.
//!
//! | resource | is free when |
//! |---|---|
//! | lane, slots | the sequence's own work has ended, as after a close |
//! | pages | the sequence's own work has ended, and they are released: whichever is later |
//! | leading pages that it shared | as after a close: no one writes to them |
//!
//! **Which pages.** Those that the sequence has, behind the leading ones that it shared when it was opened. An engine
//! therefore truncates into shared pages, forks and publishes a sequence only when its writers are done.

use crate::cache::Cache;
use crate::cache::record::State;
use crate::cache::withheld::Pages;
use crate::device::Stream;
use crate::error::Result;
use crate::ids::Sequence;
use crate::total::withheld::Withheld;

impl Cache {
    /// Ends a sequence in any state, to whose pages others may still write. The handle is closed at once, and lane and
    /// slots come back as after [`Cache::close`]. The pages stay withheld, and no sequence gets them, until
    /// [`Cache::release`]. `stream` is as for [`Cache::close`].
    ///
    /// If work of the sequence is in flight, everything but the pages is free in the retire of its last step, or in the
    /// first [`Cache::reap`] after its work has ended. Until then an arriving sequence counts as one of
    /// [`Config::arriving`](crate::Config::arriving).
    ///
    /// # Errors
    /// [`Closed`](crate::Kind::Closed); [`OutOfMemory`](crate::Kind::OutOfMemory) without memory for the list of pages;
    /// the device's errors for a sequence that has not joined. The sequence is as before then. What the device refuses
    /// later [`Cache::reap`] does again.
    pub fn abort(&mut self, sequence: Sequence, stream: Stream) -> Result<Withheld> {
        let index = sequence.index as usize;
        let record = self.record(sequence)?;
        let filled = record.is_filled();
        let first = (record.shared / self.geometry.page_tokens()) as usize;
        let table = &record.owned.table;
        let pages = Pages::from(table, first)?;
        self.withheld.reserve()?;
        if filled {
            // As in a close.
            self.take_over(index, stream)?;
            let _ticket = self.settle(index, stream)?;
        }
        pages.host.iter().try_for_each(|page| self.total.pages.share(*page))?;
        pages.index.iter().try_for_each(|page| self.index.pages.share(*page))?;
        let id = self.withheld.add(pages);
        self.records[index].state = State::Closing;
        self.hear();
        // If the device refuses this, `reap` frees the rest later.
        let _ = self.release_closed(index, stream);
        Ok(id)
    }

    /// Releases the pages of an aborted sequence: no writer reaches them any more. They are free at once, or
    /// if the sequence's own work has not ended, in the [`Cache::reap`] or retire after its end. Returns how many are
    /// free.
    ///
    /// # Errors
    /// [`Closed`](crate::Kind::Closed) for pages that were released before. An error changes nothing.
    pub fn release(&mut self, withheld: Withheld) -> Result<u32> {
        let pages = self.withheld.take(withheld)?;
        let before = self.total.pages.free();
        pages.host.iter().try_for_each(|page| self.total.pages.release(*page))?;
        pages.index.iter().try_for_each(|page| self.index.pages.release(*page))?;
        Ok(self.total.pages.free() - before)
    }
}
