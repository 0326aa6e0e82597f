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
use crate::device::Stream;
use crate::error::{Error, Kind, Result};
use crate::fallible::{reserve, vector};
use crate::ids::Sequence;

/// The pages of an aborted sequence, until [`Cache::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Withheld(u64);

/// The pages of one abort.
#[derive(Debug)]
struct Pages {
    id: Withheld,
    host: Vec<u32>,
    index: Vec<u32>,
}

/// The pages of all aborts that were not released.
#[derive(Debug, Default)]
pub(super) struct WithheldPages {
    /// Aborts so far. No two have the same number.
    aborts: u64,
    lists: Vec<Pages>,
}

impl WithheldPages {
    /// Pages of rows that are withheld, and as many of index keys.
    pub(super) fn pages(&self) -> u32 {
        self.lists.iter().map(|pages| pages.host.len() as u32).sum()
    }

    /// Adds its pages to the counts of page owners.
    pub(super) fn count(&self, host: &mut [u32], index: &mut [u32]) {
        for pages in &self.lists {
            pages.host.iter().for_each(|page| host[*page as usize] += 1);
            pages.index.iter().for_each(|page| index[*page as usize] += 1);
        }
    }
}

impl Cache {
    /// Ends a sequence in any state, to whose pages others may still write. The handle is closed at once, and lane and
    /// slots come back as after [`Cache::close`]. The pages stay withheld, and no sequence gets them, until
    /// [`Cache::release`]. `stream` is as for [`Cache::close`].
    ///
    /// # Errors
    /// [`Kind::Closed`]; [`Kind::OutOfMemory`] without memory for the list of pages; the device's errors for a sequence
    /// that has not joined. The sequence is as before then. What the device refuses later [`Cache::reap`] does again.
    pub fn abort(&mut self, sequence: Sequence, stream: Stream) -> Result<Withheld> {
        let index = sequence.index as usize;
        let record = self.record(sequence)?;
        let filled = record.is_filled();
        let first = (record.shared / self.geometry.page_tokens()) as usize;
        let table = &record.owned.table;
        let mut pages = Pages {
            id: Withheld(self.withheld.aborts),
            host: vector(table.len(), "abort", "withheld pages")?,
            index: vector(table.len(), "abort", "withheld pages")?,
        };
        pages.host.extend(table.host.iter().skip(first));
        pages.index.extend(table.index.iter().skip(first));
        reserve(&mut self.withheld.lists, 1, "abort", "withheld pages")?;
        if filled {
            // The engine may still be writing to its pages.
            self.take_over(index, stream)?;
        }
        pages.host.iter().try_for_each(|page| self.total.pages.share(*page))?;
        pages.index.iter().try_for_each(|page| self.index.pages.share(*page))?;
        let id = pages.id;
        self.withheld.aborts += 1;
        self.withheld.lists.push(pages);
        self.records[index].state = State::Closing;
        self.hear();
        // If the device refuses this, `reap` frees the rest later.
        let _ = self.release_closed(index, stream);
        Ok(id)
    }

    /// Releases the pages of an aborted sequence: no writer reaches them any more. They are free at once, or when the
    /// sequence's own work has ended. Returns how many are free.
    ///
    /// # Errors
    /// [`Kind::Closed`] for pages that were released before. An error changes nothing.
    pub fn release(&mut self, withheld: Withheld) -> Result<u32> {
        let Some(place) = self.withheld.lists.iter().position(|pages| pages.id == withheld) else {
            return Err(Error::new(Kind::Closed, "release")
                .at("pages that are not withheld")
                .with("abort", withheld.0)
                .hint("release the pages of an abort once"));
        };
        let before = self.total.pages.free();
        let pages = self.withheld.lists.swap_remove(place);
        pages.host.iter().try_for_each(|page| self.total.pages.release(*page))?;
        pages.index.iter().try_for_each(|page| self.index.pages.release(*page))?;
        Ok(self.total.pages.free() - before)
    }
}
