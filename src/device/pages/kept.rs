//! What devices make of a checked operation on pages: a copy of its lists, and runs of pages.

use crate::device::pages::{BeginPages, CopyPages, PageOp, PageTables, Plane};
use crate::error::Result;
use crate::fallible::vector;

/// An operation with the lists that it borrowed, for a device that runs it after the call.
#[derive(Clone, Debug)]
pub(in crate::device) enum Kept {
    /// The begin of a step, and its groups.
    Begin(BeginPages<'static>, Vec<PageTables>),
    /// The planes and pages of copies.
    Copy(Vec<(Plane, Plane)>, Vec<(u32, u32)>),
}

impl Kept {
    /// Copies the lists of an operation.
    pub fn of(op: PageOp<'_>, device: &'static str) -> Result<Kept> {
        fn kept<T: Copy>(list: &[T], device: &'static str) -> Result<Vec<T>> {
            let mut room = vector(list.len(), device, "an operation on pages")?;
            room.extend_from_slice(list);
            Ok(room)
        }
        Ok(match op {
            PageOp::Begin(begin) => {
                Kept::Begin(BeginPages { groups: &[], ..begin }, kept(begin.groups, device)?)
            }
            PageOp::Copy(CopyPages { planes, pages }) => {
                Kept::Copy(kept(planes, device)?, kept(pages, device)?)
            }
        })
    }

    /// The operation.
    pub fn op(&self) -> PageOp<'_> {
        match self {
            Kept::Begin(begin, groups) => PageOp::Begin(BeginPages { groups, ..*begin }),
            Kept::Copy(planes, pages) => PageOp::Copy(CopyPages { planes, pages }),
        }
    }
}

/// Pages that follow each other on both sides of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::device) struct Run {
    /// The first page to copy from.
    pub from: u32,
    /// The first page to copy to.
    pub to: u32,
    /// The number of pages.
    pub count: u32,
}

/// The runs of a list of pages, each as long as can be.
pub(in crate::device) fn runs(pages: &[(u32, u32)]) -> impl Iterator<Item = Run> {
    let follows =
        |a: &(u32, u32), b: &(u32, u32)| a.0.checked_add(1) == Some(b.0) && a.1.checked_add(1) == Some(b.1);
    pages.chunk_by(follows).filter_map(|run| {
        let (from, to) = *run.first()?;
        Some(Run { from, to, count: run.len() as u32 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_follow_each_other_on_both_sides_are_one_run() {
        let pages = [(5, 0), (6, 1), (7, 2), (8, 4), (9, 5), (3, 6), (2, 7), (u32::MAX, 8), (0, 9), (1, 10)];
        let found: Vec<_> = runs(&pages).map(|run| (run.from, run.to, run.count)).collect();
        assert_eq!(found, [(5, 0, 3), (8, 4, 2), (3, 6, 1), (2, 7, 1), (u32::MAX, 8, 1), (0, 9, 2)]);
        assert_eq!(runs(&[]).count(), 0);
    }
}
