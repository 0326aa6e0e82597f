//! Aborts: the end of a sequence that arrives, to whose pages others may still write.
//!
//! The sparse cache's `abort` says why: what a fabric has under way lands after the receiver has given the request up,
//! and may not land in another sequence's rows. So an abort ends the sequence as [`Cache::close`] does, and *withholds*
//! the pages that the transfer writes to, until [`Cache::release`]. No time releases them.
//!
//! | way | withheld | free as after a close |
//! |---|---|---|
//! | [`Way::Direct`] | the device pages of its prompt | leading pages that it shared, pages behind the prompt |
//! | [`Way::Host`] | its host pages | all its device pages: only the cache's own copies write there |
//!
//! A group with a sliding window promises its sequences the pages that they take. A withheld page is promised as a page
//! that a copy reads is: one more, until it is released. So a step still finds a free page whenever it needs one.
//!
//! A sequence that has joined has no such writers: its transfer is over, and [`Cache::close`] ends it.

use crate::dense::Cache;
use crate::dense::record::{Record, State, Way};
use crate::dense::withheld::Pages;
use crate::device::Stream;
use crate::error::Result;
use crate::fallible::vector;
use crate::ids::Sequence;
use crate::total::withheld::Withheld;

impl Cache {
    /// Ends a sequence that arrives, to whose pages others may still write. The handle is closed at once. The pages
    /// that its transfer writes to stay withheld, and no sequence gets them, until [`Cache::release`]. All else comes
    /// back as after [`Cache::close`]. `stream` is as for that.
    ///
    /// # Errors
    /// [`Closed`](crate::Kind::Closed); [`InvalidState`](crate::Kind::InvalidState) for a sequence that is not
    /// arriving: close it; [`OutOfMemory`](crate::Kind::OutOfMemory) without memory for the list of pages; the device's
    /// errors. The sequence is arriving still then. What the device refuses later [`Cache::reap`] does again.
    pub fn abort(&mut self, sequence: Sequence, stream: Stream) -> Result<Withheld> {
        self.record(sequence)?.check_state(&[State::Arriving], "abort")?;
        let index = sequence.index as usize;
        let pages = self.reached(index)?;
        self.withheld.reserve()?;
        self.record_left(stream)?;
        for (group, page) in &pages.device {
            self.pools[*group].keep(*page)?;
        }
        let record = &mut self.records[index];
        // The host pages are the abort's from now on. Copies up may still read them.
        record.arriving.pairs.clear();
        record.state = State::Closing;
        let withheld = self.withheld.add(pages);
        self.hear();
        // If the device refuses this, `reap` frees the rest later.
        let _ = self.release_closed(index, stream);
        Ok(withheld)
    }

    /// The pages to which the transfer of a sequence writes.
    fn reached(&self, index: usize) -> Result<Pages> {
        let Record { arriving, held, prompt, .. } = &self.records[index];
        let mut pages = Pages { device: Vec::new(), host: Vec::new() };
        match arriving.way {
            Way::Direct => {
                let all = held.iter().map(|held| held.own().len()).sum();
                pages.device = vector(all, "abort", "withheld pages")?;
                let end = self.config.pages(*prompt);
                for (group, held) in held.iter().enumerate() {
                    let own = (arriving.shared..end).filter_map(|block| held.page(block));
                    pages.device.extend(own.map(|page| (group, page)));
                }
            }
            Way::Host => {
                let all = arriving.pairs.iter().map(Vec::len).sum();
                pages.host = vector(all, "abort", "withheld pages")?;
                for (group, pairs) in arriving.pairs.iter().enumerate() {
                    pages.host.extend(pairs.iter().map(|(host, _)| (group, *host)));
                }
            }
        }
        Ok(pages)
    }

    /// Releases the pages of an aborted sequence: no writer reaches them any more. They are free at once, or, if the
    /// sequence's own work has not ended, in the [`Cache::reap`] after its end. Returns how many are free.
    ///
    /// # Errors
    /// [`Closed`](crate::Kind::Closed) for pages that were released before. An error changes nothing.
    pub fn release(&mut self, withheld: Withheld) -> Result<u32> {
        let Pages { device, host } = self.withheld.take(withheld)?;
        let mut free = host.len() as u32;
        for (group, page) in device {
            let pool = &mut self.pools[group];
            pool.let_go(page)?;
            free += u32::from(pool.owners(page) == 0);
        }
        for (group, page) in host {
            self.pools[group].give_host_back(page, &mut self.moves)?;
        }
        Ok(free)
    }
}
