//! Aborted sequences of a cache whose pages are withheld, by their callers' numbers.
//!
//! A number of a sequence is never another sequence's, so it names the pages that the sequence leaves, too: an abort
//! gives the caller no second number that could be lost.

use forebay::{Error, Kind, Result, Withheld};

/// The pages of aborted sequences that were not released.
#[derive(Debug, Default)]
pub(crate) struct Aborted(Vec<(u64, Withheld)>);

impl Aborted {
    /// Makes room for one more, before the abort.
    pub(crate) fn reserve(&mut self) -> Result<()> {
        let none = |_| Error::new(Kind::OutOfMemory, "abort").at("the number of a sequence");
        self.0.try_reserve(1).map_err(none)
    }

    /// Notes the pages that a sequence leaves.
    pub(crate) fn add(&mut self, sequence: u64, withheld: Withheld) {
        self.0.push((sequence, withheld));
    }

    /// Releases the pages of a sequence by `release`, and forgets them.
    pub(crate) fn release(
        &mut self,
        sequence: u64,
        release: impl FnOnce(Withheld) -> Result<u32>,
    ) -> Result<u32> {
        let found = self.0.iter().position(|(number, _)| *number == sequence);
        let found = found.and_then(|at| Some((at, self.0.get(at)?.1)));
        let (at, withheld) = found.ok_or_else(|| {
            Error::new(Kind::Closed, "release").at(format!(
                "sequence {sequence:#x} was not aborted in this cache, or its pages were released"
            ))
        })?;
        let free = release(withheld)?;
        let _released = self.0.swap_remove(at);
        Ok(free)
    }
}
