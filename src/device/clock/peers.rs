//! Which addresses are other GPUs' memory: those that map an imported backing.
//!
//! A copy from or to such addresses crosses the link between GPUs, so it is priced apart from a copy inside the device.
//! The device beneath a clock may do the mapping, so the clock notes here what is mapped where. A range's addresses
//! never change, and pieces are replaced by as many bytes; so what is noted of replaced addresses is what it was for.

use std::collections::BTreeMap;

use crate::device::{Backing, Mapped, Slice};

/// See the [module](self) page.
#[derive(Debug, Default)]
pub(super) struct Peers {
    imported: Vec<Backing>,
    /// Ends of addresses that map one of these, by their beginning. They do not overlap.
    mapped: BTreeMap<u64, u64>,
}

impl Peers {
    /// Notes a backing that was imported.
    pub(super) fn import(&mut self, backing: Backing) {
        self.imported.push(backing);
    }

    /// Forgets a backing, which no range maps.
    pub(super) fn give_back(&mut self, backing: Backing) {
        self.imported.retain(|other| *other != backing);
    }

    /// Notes that the addresses of `slice` map these pieces, whatever they mapped before. The borders of what goes are
    /// borders of pieces before and after.
    pub(super) fn map(&mut self, slice: Slice, pieces: &[Mapped]) {
        let mut at = slice.address();
        let end = at.saturating_add(slice.bytes());
        self.mapped.retain(|start, _| !(at..end).contains(start));
        for piece in pieces {
            if self.imported.contains(&piece.backing) {
                self.mapped.insert(at, at.saturating_add(piece.bytes));
            }
            at = at.saturating_add(piece.bytes);
        }
    }

    /// Whether any byte of `slice` is another GPU's.
    pub(super) fn has(&self, slice: Slice) -> bool {
        let (start, end) = (slice.address(), slice.address().saturating_add(slice.bytes()));
        self.mapped.range(..end).next_back().is_some_and(|(_, last)| *last > start)
    }
}
