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

/// Lists have at least so much room, and a power of two: the copies of a step are a few pages, and the next ones often
/// a few more.
const ROOM: usize = 16;

/// Copies a list into the room of another one.
fn keep<T: Copy>(room: &mut Vec<T>, list: &[T], device: &'static str) -> Result<()> {
    room.clear();
    if room.capacity() < list.len() {
        let least = list.len().checked_next_power_of_two().unwrap_or(list.len()).max(ROOM);
        *room = vector(least, device, "an operation on pages")?;
    }
    room.extend_from_slice(list);
    Ok(())
}

impl Kept {
    /// Copies the lists of an operation.
    pub fn of(op: PageOp<'_>, device: &'static str) -> Result<Kept> {
        match op {
            PageOp::Begin(begin) => {
                let mut groups = Vec::new();
                keep(&mut groups, begin.groups, device)?;
                Ok(Kept::Begin(BeginPages { groups: &[], ..begin }, groups))
            }
            PageOp::Copy(copy) => {
                let (mut planes, mut pages) = (Vec::new(), Vec::new());
                keep(&mut planes, copy.planes, device)?;
                keep(&mut pages, copy.pages, device)?;
                Ok(Kept::Copy(planes, pages))
            }
        }
    }

    /// As [`Kept::of`], in the room of an operation that has ended.
    pub fn again(self, op: PageOp<'_>, device: &'static str) -> Result<Kept> {
        match (self, op) {
            (Kept::Copy(mut planes, mut pages), PageOp::Copy(copy)) => {
                keep(&mut planes, copy.planes, device)?;
                keep(&mut pages, copy.pages, device)?;
                Ok(Kept::Copy(planes, pages))
            }
            (_, op) => Kept::of(op, device),
        }
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

/// The planes that have bytes. Pieces of consecutive planes that touch each other in each page, on both sides, are one.
/// Their memories have bytes in common, as those of one page's pieces do: two allocations are never one plane.
pub(in crate::device) fn merged(planes: &[(Plane, Plane)]) -> impl Iterator<Item = (Plane, Plane)> {
    let end = |plane: &Plane| plane.memory.address() + plane.bytes;
    let touches = move |a: &Plane, b: &Plane| {
        let beside = a.stride == b.stride && end(a) == b.memory.address() && a.bytes + b.bytes <= a.stride;
        beside && a.memory.overlaps(&b.memory)
    };
    let joined = |a: Plane, b: Plane| {
        let ends = [a, b].map(|plane| plane.memory.address() + plane.memory.bytes());
        let memory = a.memory.device().slice(a.memory.address(), ends[0].max(ends[1]) - a.memory.address());
        Plane { memory, bytes: a.bytes + b.bytes, ..a }
    };
    let mut rest = planes.iter().copied().filter(|(source, _)| source.bytes > 0).peekable();
    std::iter::from_fn(move || {
        let (mut source, mut target) = rest.next()?;
        while let Some(next) = rest.next_if(|next| touches(&source, &next.0) && touches(&target, &next.1)) {
            (source, target) = (joined(source, next.0), joined(target, next.1));
        }
        Some((source, target))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceId;

    #[test]
    fn pieces_that_touch_each_other_on_both_sides_are_one() {
        let device = DeviceId::new();
        let plane = |at: u64, stride, bytes| Plane {
            memory: device.slice(at, 10 * stride - at % stride),
            stride,
            bytes,
        };
        let both = |at: u64, bytes| (plane(800 + at, 80, bytes), plane(8000 + at, 80, bytes));
        let list = [both(0, 16), both(16, 4), both(20, 0), both(20, 40), both(64, 16)];
        let found: Vec<_> = merged(&list).collect();
        assert_eq!(found, [both(0, 60), both(64, 16)]);
        // Apart on one side, or of other strides, or more than a page.
        let apart = [both(0, 16), (plane(816, 80, 16), plane(8020, 80, 16))];
        assert_eq!(merged(&apart).collect::<Vec<_>>(), apart);
        let other = [both(0, 16), (plane(816, 80, 16), plane(8016, 96, 16))];
        assert_eq!(merged(&other).collect::<Vec<_>>(), other);
        let cut = |(a, b): (Plane, Plane)| {
            let one = |plane: Plane| Plane { memory: plane.memory.part(0, plane.bytes).unwrap(), ..plane };
            (one(a), one(b))
        };
        let lone = [cut(both(0, 16)), both(16, 16)];
        assert_eq!(merged(&lone).collect::<Vec<_>>(), lone);
        let long = [both(0, 64), both(64, 20)];
        assert_eq!(merged(&long).collect::<Vec<_>>(), long);
    }

    #[test]
    fn pages_that_follow_each_other_on_both_sides_are_one_run() {
        let pages = [(5, 0), (6, 1), (7, 2), (8, 4), (9, 5), (3, 6), (2, 7), (u32::MAX, 8), (0, 9), (1, 10)];
        let found: Vec<_> = runs(&pages).map(|run| (run.from, run.to, run.count)).collect();
        assert_eq!(found, [(5, 0, 3), (8, 4, 2), (3, 6, 1), (2, 7, 1), (u32::MAX, 8, 1), (0, 9, 2)]);
        assert_eq!(runs(&[]).count(), 0);
    }
}
