//! What aborted sequences leave to writers from afar: pages that no other sequence gets until a release.
//!
//! Each cache says what the pages of an abort are (`P`), keeps them from others while they are in the list, and gives
//! them back when it has taken them out.

use crate::error::{Error, Kind, Result};
use crate::fallible::reserve;
use crate::sync::unique;

/// The pages of an aborted sequence, until the cache's `release` ([`Cache::release`](crate::Cache::release),
/// [`dense::Cache::release`](crate::dense::Cache::release)). No other abort of the process has the same, in any cache.
#[must_use = "its pages are never free again"]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Withheld {
    cache: u32,
    abort: u64,
}

/// The pages of all aborts that were not released.
#[derive(Debug)]
pub(crate) struct WithheldPages<P> {
    /// Distinguishes its aborts from those of other caches.
    cache: u32,
    /// Aborts so far. No two have the same number.
    aborts: u64,
    lists: Vec<(Withheld, P)>,
}

impl<P> WithheldPages<P> {
    pub(crate) fn new() -> WithheldPages<P> {
        WithheldPages { cache: unique(), aborts: 0, lists: Vec::new() }
    }

    /// Makes room for one more abort.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`].
    pub(crate) fn reserve(&mut self) -> Result<()> {
        reserve(&mut self.lists, 1, "abort", "withheld pages")
    }

    /// Adds the pages of an abort.
    pub(crate) fn add(&mut self, pages: P) -> Withheld {
        let withheld = Withheld { cache: self.cache, abort: self.aborts };
        self.aborts += 1;
        self.lists.push((withheld, pages));
        withheld
    }

    /// Removes the pages of an abort.
    ///
    /// # Errors
    /// [`Kind::Closed`] if they were removed before, or are of another cache.
    pub(crate) fn take(&mut self, withheld: Withheld) -> Result<P> {
        match self.lists.iter().position(|(own, _)| *own == withheld) {
            Some(place) => Ok(self.lists.swap_remove(place).1),
            None => Err(Error::new(Kind::Closed, "release")
                .at("pages that are not withheld")
                .hint("release the pages of an abort once")),
        }
    }

    /// The pages of each abort.
    pub(crate) fn lists(&self) -> impl Iterator<Item = &P> {
        self.lists.iter().map(|(_, pages)| pages)
    }
}
