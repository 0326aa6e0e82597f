//! The checks of an operation on pages when it is enqueued, alike on every device.
//!
//! A device with memory demands the sizes, alignments and borders that `pages` describes. One without memory, a
//! simulator's clock, has addresses that are numbers: it demands only what a schedule can get wrong there.
//!
//! **Cost.** A begin compares each slice that it writes with all others: at most 13 times 19 comparisons. Copies
//! compare each plane that is written with all others, and look a page up only where memories overlap.

use std::ops::Range;

use crate::device::Slice;
use crate::device::checks::Asker;
use crate::device::descriptor::{BATCH_MAX, Report};
use crate::device::pages::{BeginPages, CopyPages, PAGE_GROUPS_MAX, PageOp, PageTables, Plane, descriptor};
use crate::error::{Error, Kind, Result};
use crate::fallible::vector;

/// The most entries of a page table: kernels count those of all groups in 32 bits.
const ENTRIES_MAX: u64 = 1 << 28;

/// The slices of a begin that it writes: 5, and 2 of each group.
const WRITTEN: usize = 5 + 2 * PAGE_GROUPS_MAX;
/// And those that it only reads: 2, and 1 of each group.
const READ: usize = 2 + PAGE_GROUPS_MAX;

/// A begin's addresses and numbers: what a queue or a kernel's parameters can carry.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct StepPages {
    pub descriptor: u64,
    pub lanes: u64,
    /// 0 for none.
    pub accepted: u64,
    pub lengths: u64,
    pub starts: u64,
    pub positions: u64,
    pub report: u64,
    pub lane_count: u32,
    pub batch: u32,
    pub step_tokens: u32,
    pub wide: bool,
    pub groups: u32,
    /// The first `groups` mean something.
    pub tables: [StepTables; PAGE_GROUPS_MAX],
}

/// Those of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::device) struct StepTables {
    pub lanes: u64,
    pub table: u64,
    pub slots: u64,
    pub columns: u32,
    pub page_tokens: u32,
    pub pages: u32,
}

/// The numbers that a begin's slices have. Those of a checked one fit.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    lanes: u64,
    batch: u64,
    tokens: u64,
    /// Bytes of a position and of a slot.
    word: u64,
}

impl Sizes {
    fn of(begin: &BeginPages<'_>) -> Sizes {
        let word = if begin.wide { 8 } else { 4 };
        let (lanes, batch, tokens) =
            (begin.lanes.bytes() / 8, begin.lengths.bytes() / 4, begin.positions.bytes() / word);
        Sizes { lanes, batch, tokens, word }
    }

    /// Entries of a row of a group's table.
    fn columns(&self, tables: &PageTables) -> u64 {
        tables.table.bytes() / (4 * self.batch.max(1))
    }
}

/// The addresses and numbers of a checked begin.
pub(in crate::device) fn begin(begin: &BeginPages<'_>) -> StepPages {
    let sizes = Sizes::of(begin);
    let mut tables = [StepTables::default(); PAGE_GROUPS_MAX];
    for (to, group) in tables.iter_mut().zip(begin.groups) {
        let [lanes, table, slots] = [group.lanes, group.table, group.slots].map(|slice| slice.address());
        let columns = sizes.columns(group) as u32;
        *to = StepTables { lanes, table, slots, columns, page_tokens: group.page_tokens, pages: group.pages };
    }
    StepPages {
        descriptor: begin.descriptor.address(),
        lanes: begin.lanes.address(),
        accepted: begin.accepted.map_or(0, |accepted| accepted.address()),
        lengths: begin.lengths.address(),
        starts: begin.starts.address(),
        positions: begin.positions.address(),
        report: begin.report.address(),
        lane_count: sizes.lanes as u32,
        batch: sizes.batch as u32,
        step_tokens: sizes.tokens as u32,
        wide: begin.wide,
        groups: begin.groups.len() as u32,
        tables,
    }
}

/// Checks an operation.
///
/// # Errors
/// [`Kind::OutOfRange`] names the slice or number that does not fit; [`Kind::Overflow`] for slots beyond their type;
/// [`Kind::InvalidState`] for memory to write that is mapped to be read only.
pub(in crate::device) fn check(asker: &Asker, op: &PageOp<'_>) -> Result<()> {
    match op {
        PageOp::Begin(begin) => asker.begin_pages(begin),
        PageOp::Copy(copy) => asker.copy_pages(copy),
    }
}

/// Slices by their names, as many as there are.
type Named<const N: usize> = [Option<(&'static str, Slice)>; N];

/// The slices of a begin that it writes, and those that it reads.
fn slices(begin: &BeginPages<'_>) -> (Named<WRITTEN>, Named<READ>) {
    let (mut written, mut read) = ([None; WRITTEN], [None; READ]);
    let own = [
        ("lanes of a begin", begin.lanes),
        ("lengths of a begin", begin.lengths),
        ("starts of a begin", begin.starts),
        ("positions of a begin", begin.positions),
        ("report of a begin", begin.report),
    ];
    let tables = begin
        .groups
        .iter()
        .flat_map(|group| [("table of a begin", group.table), ("slots of a begin", group.slots)]);
    written.iter_mut().zip(own.into_iter().chain(tables)).for_each(|(to, slice)| *to = Some(slice));
    let words = begin.groups.iter().map(|group| ("page tables of lanes", group.lanes));
    let accepted = begin.accepted.map(|accepted| ("accepted counts of a begin", accepted));
    let own = [("descriptor of a begin", begin.descriptor)].into_iter().chain(accepted);
    read.iter_mut().zip(own.chain(words)).for_each(|(to, slice)| *to = Some(slice));
    (written, read)
}

impl Asker {
    fn begin_pages(&self, begin: &BeginPages<'_>) -> Result<()> {
        if !(1..=PAGE_GROUPS_MAX).contains(&begin.groups.len()) {
            return Err(self
                .bad("groups of a begin", begin.groups.len() as u64)
                .with("most", PAGE_GROUPS_MAX as u64));
        }
        let (written, read) = slices(begin);
        written.iter().flatten().try_for_each(|(_, slice)| self.device.check_target(slice))?;
        read.iter().flatten().try_for_each(|(_, slice)| self.device.check(slice))?;
        if !self.exact {
            return Ok(());
        }
        self.sizes(begin)?;
        for (index, (name, slice)) in written.iter().flatten().enumerate() {
            let others = written.iter().take(index).chain(&read).flatten();
            if let Some((_, other)) = others.into_iter().find(|(_, other)| slice.overlaps(other)) {
                return Err(self
                    .bad(name, slice.address())
                    .with("bytes", slice.bytes())
                    .with("overlaps", other.address())
                    .hint("a begin writes each of its slices: give each memory of its own"));
            }
        }
        Ok(())
    }

    /// Checks the sizes of a begin's slices, which give its numbers.
    fn sizes(&self, begin: &BeginPages<'_>) -> Result<()> {
        let sizes @ Sizes { lanes, batch, tokens, word } = Sizes::of(begin);
        let counts = [
            ("lanes of a begin", lanes, u64::from(u32::MAX)),
            ("batch rows", batch, BATCH_MAX.into()),
            ("step tokens", tokens, i32::MAX as u64),
        ];
        for (place, count, most) in counts {
            if count == 0 || count > most {
                return Err(self.bad(place, count).with("most", most));
            }
        }
        self.sized("lanes of a begin", &begin.lanes, lanes, 8, 4)?;
        self.sized("lengths of a begin", &begin.lengths, batch, 4, 4)?;
        self.sized("starts of a begin", &begin.starts, batch + 1, 4, 4)?;
        self.sized("positions of a begin", &begin.positions, tokens, word, word)?;
        let words = descriptor::words(batch as u32, begin.groups.len()) as u64;
        self.sized("descriptor of a begin", &begin.descriptor, words, 4, 4)?;
        self.sized("report of a begin", &begin.report, Report::words(0, batch as u32) as u64, 4, 4)?;
        if let Some(accepted) = &begin.accepted {
            self.sized("accepted counts of a begin", accepted, batch, 4, 4)?;
        }
        begin.groups.iter().try_for_each(|group| self.tables(&sizes, group))
    }

    /// Checks the sizes of a group's tables.
    fn tables(&self, sizes: &Sizes, group: &PageTables) -> Result<()> {
        let columns = sizes.columns(group);
        let most = ENTRIES_MAX / sizes.batch;
        if columns == 0 || columns > most {
            return Err(self.bad("entries of a row of a page table", columns).with("most", most));
        }
        self.sized("table of a begin", &group.table, sizes.batch * columns, 4, 4)?;
        self.sized("page tables of lanes", &group.lanes, sizes.lanes.saturating_mul(columns), 4, 4)?;
        self.sized("slots of a begin", &group.slots, sizes.tokens, sizes.word, sizes.word)?;
        if group.page_tokens == 0 {
            return Err(self.bad("tokens of a page", 0_u32));
        }
        // Entries are i32, and so are narrow slots.
        let slots = u64::from(group.pages) * u64::from(group.page_tokens);
        let fits = group.pages <= 1 << 31 && (sizes.word == 8 || slots <= 1 << 31);
        match fits {
            true if group.pages > 0 => Ok(()),
            true => Err(self.bad("pages of a group", 0_u32).hint("count the null page too")),
            false => Err(Error::new(Kind::Overflow, self.name)
                .at("slots of a group")
                .with("pages", group.pages)
                .with("tokens of a page", group.page_tokens)
                .hint("ask for wide slots, or give the group fewer pages")),
        }
    }

    /// Checks that a slice holds `count` items of `bytes` bytes at an address that is a multiple of `align`.
    fn sized(&self, place: &'static str, slice: &Slice, count: u64, bytes: u64, align: u64) -> Result<()> {
        let wanted = count.saturating_mul(bytes);
        if slice.bytes() != wanted {
            return Err(self.bad(place, slice.bytes()).with("wanted", wanted));
        }
        self.placed(place, slice, align)
    }

    fn placed(&self, place: &'static str, slice: &Slice, align: u64) -> Result<()> {
        let nowhere = slice.address() == 0 && slice.bytes() > 0;
        match nowhere || !slice.address().is_multiple_of(align) {
            true => Err(self.bad(place, slice.address()).with("multiple of", align)),
            false => Ok(()),
        }
    }

    fn copy_pages(&self, copy: &CopyPages<'_>) -> Result<()> {
        let last = |page: fn(&(u32, u32)) -> u32| copy.pages.iter().map(page).max();
        let (from, to) = (last(|page| page.0), last(|page| page.1));
        for (source, target) in copy.planes {
            self.device.check(&source.memory)?;
            self.device.check_target(&target.memory)?;
            if source.bytes != target.bytes {
                return Err(self
                    .bad("bytes of a page's piece and of its target", source.bytes)
                    .with("target", target.bytes));
            }
            self.plane("plane to copy from", source, from)?;
            self.plane("plane to copy to", target, to)?;
        }
        if self.exact { self.apart(copy) } else { Ok(()) }
    }

    /// Checks a plane, which has pages up to `last`.
    fn plane(&self, place: &'static str, plane: &Plane, last: Option<u32>) -> Result<()> {
        let Plane { memory, stride, bytes } = *plane;
        if stride < bytes {
            return Err(self.bad(place, bytes).with("stride", stride).hint("pages must not overlap"));
        }
        if !self.exact {
            return Ok(());
        }
        self.placed(place, &memory, 4)?;
        if !(stride.is_multiple_of(4) && bytes.is_multiple_of(4)) {
            return Err(self.bad(place, bytes).with("stride", stride).with("multiple of", 4_u32));
        }
        if bytes == 0 {
            return Ok(());
        }
        // Without pages to copy there is room for one all the same, so that no sum of bytes overflows.
        let last = last.unwrap_or(0);
        // The stride is not 0 here.
        let most = memory.bytes().checked_sub(bytes).map(|rest| rest / stride);
        match most.is_some_and(|most| u64::from(last) <= most) {
            true => Ok(()),
            false => Err(self
                .bad(place, bytes)
                .with("page", last)
                .with("stride", stride)
                .with("memory", memory.bytes())),
        }
    }

    /// Checks that no piece is written that is read or written by another copy of the operation.
    fn apart(&self, copy: &CopyPages<'_>) -> Result<()> {
        let mut sorted = Vec::new();
        let mut targets = copy.pages;
        if !targets.is_sorted_by(|a, b| a.1 < b.1) {
            sorted = vector(targets.len(), self.name, "pages to copy")?;
            sorted.extend_from_slice(targets);
            sorted.sort_unstable_by_key(|page| page.1);
            targets = &sorted;
        }
        if let Some(twice) = targets.windows(2).find(|two| two[0].1 == two[1].1) {
            return Err(self.bad("page that is copied to twice", twice[0].1));
        }
        let targeted = |page: i128| targets.binary_search_by(|(_, to)| i128::from(*to).cmp(&page)).is_ok();
        for (index, (_, written)) in copy.planes.iter().enumerate() {
            let sources = copy.planes.iter().map(|(source, _)| (source, true));
            let others = copy.planes.iter().take(index).map(|(_, target)| (target, false));
            for (other, read) in sources.chain(others) {
                for apart in self.shifts(other, written)? {
                    let page = |page: &(u32, u32)| if read { page.0 } else { page.1 };
                    let touched =
                        copy.pages.iter().map(page).find(|page| targeted(i128::from(*page) + apart));
                    if let Some(page) = touched {
                        let place =
                            if read { "page that is copied from and to" } else { "planes to copy to" };
                        return Err(self
                            .bad(place, page)
                            .hint("copy in two calls, or give each its own memory"));
                    }
                }
            }
        }
        drop(sorted);
        Ok(())
    }

    /// How many pages after one of `other` a page of `written` may be that shares bytes with it.
    fn shifts(&self, other: &Plane, written: &Plane) -> Result<Range<i128>> {
        if !other.memory.overlaps(&written.memory) || other.bytes == 0 || written.bytes == 0 {
            return Ok(0..0);
        }
        if other.stride != written.stride {
            return Err(self
                .bad("planes of one memory with unequal strides", other.stride)
                .with("target", written.stride));
        }
        // Pieces side by side in a page, as the host's tier has them, share no bytes with those of any page.
        let (first, second) = match other.memory.address() <= written.memory.address() {
            true => (other, written),
            false => (written, other),
        };
        let between = second.memory.address() - first.memory.address();
        let beside = between >= first.bytes && between <= written.stride.saturating_sub(second.bytes);
        if beside {
            return Ok(0..0);
        }
        let stride = i128::from(written.stride);
        let between = i128::from(written.memory.address()) - i128::from(other.memory.address());
        let (bytes, before) = (i128::from(other.bytes), i128::from(written.bytes));
        let first = (-before - between).div_euclid(stride) + 1;
        Ok(first..(bytes - between - 1).div_euclid(stride) + 1)
    }
}
