//! The uses of a receiver's pages that an engine has granted and whose end it has not taken.
//!
//! A page that is written is in one use at a time, so that no late row of one request reaches another one. Pages whose
//! rows are there already may be shared by uses, such as those of a common prefix, while none writes them.

use std::collections::{BTreeMap, BTreeSet};

use forebay::transfer::Fence;
use forebay::{Error, Kind, Result};

/// What C has been told of uses.
#[derive(Debug, Default)]
pub struct Told {
    /// Uses whose end has not been taken, with their pages.
    open: BTreeMap<Fence, Lent>,
    /// Pages that a use writes.
    written: BTreeSet<u32>,
    /// Pages with rows that uses have already, and how many uses.
    kept: BTreeMap<u32, u32>,
    /// The generation that the next grant has at least.
    next: u64,
    /// Payloads that have not been read.
    pub payloads: BTreeMap<(Fence, u8), Vec<u8>>,
}

/// A use's pages: those whose rows are there already, and those that are written.
#[derive(Debug, Default)]
pub struct Lent {
    pub kept: Vec<u32>,
    pub written: Vec<u32>,
}

impl Told {
    /// Lends pages to a use. None is written for it that another use has, and it has none that another use writes.
    pub fn lend(&mut self, fence: Fence, pages: Lent) -> Result<()> {
        let wrong = |place| Error::new(Kind::InvalidState, "transfer receiver").at(place);
        let Some(next) = fence.generation.checked_add(1).filter(|_| fence.generation >= self.next) else {
            return Err(wrong("a generation that is not above those of all grants before")
                .with("request", fence.request)
                .with("generation", fence.generation));
        };
        let mut own = BTreeSet::new();
        let in_use =
            |page: &&u32| self.written.contains(page) || self.kept.contains_key(page) || !own.insert(**page);
        let taken = pages.written.iter().find(in_use);
        let also = pages.kept.iter().find(|page| self.written.contains(page) || own.contains(page));
        if let Some(page) = taken.or(also) {
            return Err(wrong("a page that is in use already").with("page", *page).hint(
                "give pages again when FB_TRANSFER_WHOLE or FB_TRANSFER_FAILED has come for their use",
            ));
        }
        self.next = next;
        self.written.append(&mut own);
        pages.kept.iter().for_each(|page| *self.kept.entry(*page).or_default() += 1);
        self.open.insert(fence, pages);
        Ok(())
    }

    /// Whether the end of a use has not been taken.
    pub fn is_open(&self, fence: Fence) -> bool {
        self.open.contains_key(&fence)
    }

    /// The end of a use is taken: its pages are the engine's again.
    pub fn ended(&mut self, fence: Fence) {
        let Lent { kept, written } = self.open.remove(&fence).unwrap_or_default();
        written.iter().for_each(|page| {
            self.written.remove(page);
        });
        for page in kept {
            match self.kept.get_mut(&page) {
                Some(uses) if *uses > 1 => *uses -= 1,
                _ => drop(self.kept.remove(&page)),
            }
        }
        self.payloads.retain(|(of, _), _| *of != fence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_written_is_in_one_use_at_a_time() {
        let mut told = Told::default();
        let lend = |told: &mut Told, generation, kept: &[u32], written: &[u32]| {
            let pages = Lent { kept: kept.to_vec(), written: written.to_vec() };
            told.lend(Fence { request: 3, generation }, pages).map_err(|error| error.kind())
        };
        let wrong = Err(Kind::InvalidState);
        assert_eq!(lend(&mut told, 0, &[1], &[4, 2]), Ok(()));
        for (kept, written) in
            [(&[][..], &[5, 2][..]), (&[], &[5, 6, 5]), (&[4], &[5]), (&[], &[1]), (&[5], &[5])]
        {
            assert_eq!(lend(&mut told, 1, kept, written), wrong, "{kept:?} {written:?}");
        }
        assert_eq!(lend(&mut told, 0, &[], &[7]), wrong);
        assert_eq!(lend(&mut told, u64::MAX, &[], &[7]), wrong);
        // What was refused has taken nothing, its generation included.
        assert_eq!(lend(&mut told, 1, &[1, 1, 3], &[5, 6, 7]), Ok(()));
        let ended = |told: &mut Told, generation| told.ended(Fence { request: 3, generation });
        ended(&mut told, 0);
        assert_eq!(lend(&mut told, 2, &[], &[1]), wrong, "the other use has it still");
        assert_eq!(lend(&mut told, 2, &[], &[2, 4]), Ok(()));
        // Once: its pages are another use's by now.
        ended(&mut told, 0);
        assert_eq!(lend(&mut told, 3, &[], &[4]), wrong);
        ended(&mut told, 1);
        ended(&mut told, 2);
        assert!(told.written.is_empty() && told.kept.is_empty() && told.open.is_empty());
    }
}
