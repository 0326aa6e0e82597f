//! Pages that a foreign writer may still write to.
//!
//! A fabric such as NIXL lets the sender write to the receiver's memory from afar. Such a write may land at any time
//! after the receiver has given the request up. Engines that used the pages again after a time-out, or after any
//! acknowledgement, lost other requests' rows (sglang#24527, #32564, #35049; vllm#21570). Here pages that were lent to
//! writers are free again only after each of them has said that it is done with this very use of the pages, or after
//! what it could write through has been destroyed. No call takes a time.
//!
//! **Fences.** A use of pages is a [`Fence`]: the request, and a generation that no other use has. An acknowledgement
//! that names another generation, one that came late or twice, has no effect.
//!
//! **States.** Of a fence's pages:
//!
//! | state | entered by | may be written by |
//! |---|---|---|
//! | lent | [`Quarantine::lend`] | their writers |
//! | drained | the last [`Quarantine::drained`] or [`Quarantine::destroyed`] | the receiver alone |
//! | in quarantine | [`Quarantine::give_back`] of lent pages | their writers, still |
//! | free | `give_back` of drained pages; the last acknowledgement of those in quarantine | |
//!
//! **The cap.** Pages that are lent and not drained count against a bound, whether or not they were given back. So an
//! abort always finds room, and a peer that never answers costs at most that many pages. What is beyond it is not lent.
//!
//! **Who needs it.** Where the receiver itself copies rows into place, from shared memory or a socket, there is no
//! foreign writer: such pages have no writers, and are free when they are given back.

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;

const OPERATION: &str = "quarantine";

/// One use of pages: no other use, earlier or later, has the same generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence {
    /// The request.
    pub request: u64,
    /// A number that grows with each use of pages of a cache.
    pub generation: u64,
}

/// Who writes from afar: one connection of a sender. A sender that connects again is another writer, with a number that
/// none had before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Writer(pub u32);

/// The pages of a fence.
#[derive(Debug)]
struct Lent {
    fence: Fence,
    pages: Vec<u32>,
    /// Who may still write.
    writers: Vec<Writer>,
    given_back: bool,
}

/// Pages that writers may reach. See the module's head.
#[derive(Debug)]
pub struct Quarantine {
    most: u32,
    /// Pages that writers may still reach.
    reached: u32,
    /// The generation that the next fence may have at least.
    next: u64,
    /// By fence.
    lent: Vec<Lent>,
}

impl Quarantine {
    /// Nothing is lent. At most `most` pages may be reachable by writers at a time.
    pub const fn new(most: u32) -> Quarantine {
        Quarantine { most, reached: 0, next: 0, lent: Vec::new() }
    }

    /// Pages that writers may still reach.
    pub const fn reached(&self) -> u32 {
        self.reached
    }

    /// Those of them that were given back: they are of no use until their writers are done.
    pub fn waiting(&self) -> u32 {
        let waiting = self.lent.iter().filter(|lent| lent.given_back);
        waiting.map(|lent| lent.pages.len() as u32).fold(0, u32::saturating_add)
    }

    /// The uses that writers may still reach: who they are, how many pages, and whether these were given back. Of a
    /// writer that never answers the owner destroys the connection.
    pub fn outstanding(&self) -> impl Iterator<Item = (Fence, &[Writer], usize, bool)> {
        let reached = self.lent.iter().filter(|lent| !lent.writers.is_empty());
        reached.map(|lent| (lent.fence, lent.writers.as_slice(), lent.pages.len(), lent.given_back))
    }

    fn place(&self, fence: Fence) -> std::result::Result<usize, usize> {
        self.lent.binary_search_by_key(&fence, |lent| lent.fence)
    }

    /// Lends pages to writers. No page may be lent twice at a time.
    ///
    /// # Errors
    /// [`Kind::Exhausted`] with `wanted` and `free` if more pages would be reachable than the bound allows;
    /// [`Kind::InvalidState`] for a generation that is not above those before; [`Kind::OutOfMemory`]. The pages are the
    /// caller's then.
    pub fn lend(&mut self, fence: Fence, pages: &[u32], writers: &[Writer]) -> Result<()> {
        let (Err(place), true) = (self.place(fence), fence.generation >= self.next) else {
            return Err(Error::new(Kind::InvalidState, OPERATION)
                .at("a generation that had pages")
                .with("request", fence.request)
                .with("generation", fence.generation));
        };
        let (wanted, free) = (pages.len() as u64, self.most - self.reached);
        if !writers.is_empty() && wanted > u64::from(free) {
            return Err(Error::new(Kind::Exhausted, OPERATION)
                .at("pages that writers may reach")
                .with("wanted", wanted)
                .with("free", free)
                .hint("wait until writers have acknowledged aborted transfers, or raise the bound"));
        }
        let mut lent = Lent { fence, pages: Vec::new(), writers: Vec::new(), given_back: false };
        reserve(&mut lent.pages, pages.len(), OPERATION, "pages")?;
        reserve(&mut lent.writers, writers.len(), OPERATION, "writers")?;
        reserve(&mut self.lent, 1, OPERATION, "fences")?;
        lent.pages.extend(pages);
        lent.writers.extend(writers);
        if !writers.is_empty() {
            // Checked: no more than `free`.
            self.reached += pages.len() as u32;
        }
        self.lent.insert(place, lent);
        self.next = fence.generation.saturating_add(1);
        Ok(())
    }

    /// The receiver needs a fence's pages no more: its sequence was closed, or the transfer aborted. Returns them if no
    /// writer can reach them; otherwise a later acknowledgement does.
    ///
    /// # Errors
    /// [`Kind::InvalidState`] for a fence without pages, or whose pages were given back.
    pub fn give_back(&mut self, fence: Fence) -> Result<Option<Vec<u32>>> {
        let wrong = |place| {
            let error = Error::new(Kind::InvalidState, OPERATION).at(place);
            error.with("request", fence.request).with("generation", fence.generation)
        };
        let index = self.place(fence).map_err(|_| wrong("a fence without pages"))?;
        let lent = &mut self.lent[index];
        if lent.given_back {
            return Err(wrong("pages given back twice"));
        }
        lent.given_back = true;
        Ok(lent.writers.is_empty().then(|| self.lent.remove(index).pages))
    }

    /// A writer acknowledges that nothing which it has enqueued under this fence will land any more, and that it will
    /// enqueue nothing under it. Returns the pages that are free by that. A fence or a writer that is not waited for
    /// changes nothing.
    pub fn drained(&mut self, fence: Fence, writer: Writer) -> Option<Vec<u32>> {
        let index = self.place(fence).ok()?;
        self.end(index, writer)
    }

    /// What a writer could write through no longer exists, such as its connection's registered memory. Appends the
    /// pages that are free by that to `free`.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`]: call it again.
    pub fn destroyed(&mut self, writer: Writer, free: &mut Vec<u32>) -> Result<()> {
        let mut index = 0;
        while let Some(lent) = self.lent.get(index) {
            reserve(free, lent.pages.len(), OPERATION, "free pages")?;
            let before = self.lent.len();
            free.extend(self.end(index, writer).into_iter().flatten());
            index += usize::from(self.lent.len() == before);
        }
        Ok(())
    }

    /// Ends the writes of one writer to a fence's pages.
    fn end(&mut self, index: usize, writer: Writer) -> Option<Vec<u32>> {
        let lent = &mut self.lent[index];
        let before = lent.writers.len();
        lent.writers.retain(|other| *other != writer);
        if lent.writers.len() == before || !lent.writers.is_empty() {
            return None;
        }
        self.reached -= lent.pages.len() as u32;
        lent.given_back.then(|| self.lent.remove(index).pages)
    }
}
