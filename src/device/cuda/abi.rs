//! The structs that host and kernels exchange, as in `kernels/abi.h`, word for word.
//!
//! Sizes are checked at compile time here and in the kernels. A test reads the header and compares each field's name,
//! offset and size.

use crate::device::PAGE_GROUPS_MAX;
use crate::geometry::GROUP_MAX;
use crate::residency::LaneHead;

/// An address as the device sees it.
pub(super) type Address = u64;

/// The value of page-table entries beyond a lane's pages.
pub(super) const NO_PAGE: u32 = u32::MAX;
/// The offset of a staged page table, in words.
pub(super) const STAGED_PAGES: usize = 2;
/// Pairs of panels that the compute work multiplies, and steps of each.
#[cfg(feature = "measure")]
pub(super) const WORK_PANELS: usize = 16;
#[cfg(feature = "measure")]
pub(super) const WORK_STEPS: usize = 8;
/// The places of a resolve's or a warm-up's working memory.
pub(super) const IN_MEMORY: u32 = 0;
pub(super) const SETS: u32 = 1;
pub(super) const SETS_AND_BLOCKS: u32 = 2;
/// The work that a report demands of a step.
pub(super) const DUE_RESOLVED: u32 = 1;
pub(super) const DUE_GATHERED: u32 = 2;
pub(super) const DUE_SCATTERED: u32 = 4;
/// The stamp of a slot that no lane has.
pub(super) const UNUSED_STAMP: u32 = 0x7FFF_FFFF;

/// Declares structs in C layout with their sizes, and the tables that a test needs to compare them with the header.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
            #[repr(C)]
            pub(super) struct $name { $(pub(super) $field: $type),* }

            const _: () = assert!(size_of::<$name>() == $bytes);
            // SAFETY: every field is an integer, an array of some, or another such struct, and they fill the struct:
            // `$bytes` is the sum of their sizes, which the test of the fields' places shows.
            unsafe impl Plain for $name {}
        )*

        /// For each struct its fields, with their offsets and sizes in bytes.
        #[cfg(test)]
        fn layouts() -> Vec<(&'static str, Vec<(&'static str, usize, usize)>)> {
            vec![$((stringify!($name), vec![$(
                (stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>())
            ),*])),*]
        }
    };
}

/// Values that can be copied to a device byte by byte: no padding and no host pointers.
///
/// # Safety
/// No byte of the type is padding.
pub(super) unsafe trait Plain: Copy {}

words! {
    /// One layer's tables and memory.
    Layer: 136 {
        heads: Address,
        slot_of: Address,
        position_of: Address,
        stamp_of: Address,
        blocks: Address,
        slab: Address,
        rows: Address,
        lanes: u32,
        tokens: u32,
        query_rows: u32,
        scratch: u32,
        waves: u32,
        scratch_base: u32,
        landing_base: u32,
        budget_base: u32,
        budget_blocks: u32,
        lane_blocks: u32,
        piece_bytes: u32,
        piece_numbers: u32,
        line_mask: u32,
        first: u32,
        members: u32,
        runs: [u32; 2],
        block_bytes: u32,
        host_stride: u32,
        unused: u32,
    }

    /// A row that a step fetches.
    Fetch: 16 { row: u64, position: u32, slot: u32 }

    /// The rows that a batch row's last resolve missed.
    List: 72 {
        step: u64,
        count: u32,
        scratch: u32,
        share: u32,
        lane: u32,
        layer: u32,
        members: u32,
        first: u32,
        rows: u32,
        gathered: [u32; GROUP_MAX as usize],
    }

    /// The state that a micro-batch's operations share.
    Micro: 80 {
        descriptor: Address,
        counts: Address,
        lengths: Address,
        sticky: Address,
        failed: Address,
        lists: Address,
        fetches: Address,
        work: Address,
        first: Address,
        marks: Address,
    }

    /// One cache on the device.
    Pools: 104 {
        layers: Address,
        tables: Address,
        pages: Address,
        trust: Address,
        warm_fetches: Address,
        warm_work: Address,
        layer_count: u32,
        table_count: u32,
        lanes: u32,
        lane_pages: u32,
        batch: u32,
        top_k: u32,
        selected: u32,
        work_words: u32,
        missed_words: u32,
        set_words: u32,
        page_tokens: u32,
        host_pages: u32,
        due: u32,
        unused: u32,
    }

    /// Of `forebay_load`.
    LoadArgs: 200 { pools: Pools, micro: Micro, descriptor: Address, heads: Address }

    /// Of `forebay_commit`.
    CommitArgs: 192 { pools: Pools, micro: Micro, accepted: Address }

    /// Of `forebay_resolve`.
    ResolveArgs: 384 {
        pools: Pools,
        layer: Layer,
        micro: Micro,
        selection: Address,
        slots: Address,
        lists: Address,
        counts: Address,
        number: u32,
        first: u32,
        count: u32,
        row_first: u32,
        row_count: u32,
        lists_batch: u32,
        shared: u32,
        unused: u32,
    }

    /// Of `forebay_gather`.
    GatherArgs: 344 {
        pools: Pools,
        layer: Layer,
        micro: Micro,
        number: u32,
        first: u32,
        count: u32,
        row_first: u32,
        row_count: u32,
        wave: u32,
    }

    /// Of `forebay_scatter`.
    ScatterArgs: 344 {
        pools: Pools,
        layer: Layer,
        micro: Micro,
        number: u32,
        first: u32,
        count: u32,
        row_first: u32,
        row_count: u32,
        unused: u32,
    }

    /// Of `forebay_report`.
    ReportArgs: 208 { pools: Pools, micro: Micro, slot: Address, moved: Address, query_rows: u32, unused: u32 }

    /// Of `forebay_join`.
    JoinArgs: 120 { pools: Pools, staged: Address, lane: u32, staged_blocks: u32 }

    /// Of `forebay_resize`.
    ResizeArgs: 128 { pools: Pools, staged: Address, moved: Address, lane: u32, staged_blocks: u32 }

    /// Of `forebay_truncate`.
    TruncateArgs: 128 { pools: Pools, staged: Address, lane: u32, settle: u32, length: u32, unused: u32 }

    /// Of `forebay_leave`.
    LeaveArgs: 112 { pools: Pools, lane: u32, unused: u32 }

    /// Of `forebay_warm`.
    WarmArgs: 136 {
        pools: Pools,
        selections: Address,
        lane: u32,
        whole: u32,
        steps: u32,
        shared: u32,
        first: u32,
        unused: u32,
    }

    /// Of `forebay_newest`.
    NewestArgs: 120 { pools: Pools, positions: Address, lane: u32, unused: u32 }

    /// Of `forebay_warm_gather`.
    WarmGatherArgs: 128 { pools: Pools, first: u64, count: u64, lane: u32, unused: u32 }

    /// Of `forebay_digest`.
    DigestArgs: 120 { pools: Pools, out: Address, lane: u32, unused: u32 }

    /// Of `forebay_copy`.
    CopyArgs: 24 { from: Address, to: Address, bytes: u64 }

    /// Of `forebay_prefetch`.
    PrefetchArgs: 24 { first: Address, lines: u64, cycles: u64 }

    /// The page tables of a group of a dense cache.
    PageTables: 40 {
        lanes: Address,
        table: Address,
        slots: Address,
        columns: u32,
        page_tokens: u32,
        pages: u32,
        unused: u32,
    }

    /// Of `forebay_begin_pages`.
    BeginPagesArgs: 240 {
        descriptor: Address,
        lanes: Address,
        accepted: Address,
        lengths: Address,
        starts: Address,
        positions: Address,
        report: Address,
        lane_count: u32,
        batch: u32,
        step_tokens: u32,
        wide: u32,
        group_count: u32,
        unused: u32,
        tables: [PageTables; PAGE_GROUPS_MAX],
    }

    /// The memories of a piece of every page.
    PagePlane: 32 { from: Address, to: Address, from_stride: u64, to_stride: u64 }

    /// Of `forebay_work`.
    WorkArgs: 24 { operands: Address, results: Address, panels: u32, unused: u32 }
}

/// Planes and pages of a launch of `forebay_pages`: as many as its arguments have room for.
pub(super) const PAGE_PLANES: usize = 32;
pub(super) const PAGE_LIST: usize = 376;

/// Of `forebay_pages`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PagesArgs {
    pub planes: [PagePlane; PAGE_PLANES],
    pub from: [u32; PAGE_LIST],
    pub to: [u32; PAGE_LIST],
    pub plane_count: u32,
    pub page_count: u32,
    pub words: u32,
    pub word_bytes: u32,
}

// The most bytes of a kernel's arguments.
const _: () = assert!(size_of::<PagesArgs>() == 4048 && size_of::<PagesArgs>() <= 4096);
// SAFETY: planes of four 64-bit words, then an even number of 32-bit words: nothing is padded.
unsafe impl Plain for PagesArgs {}

const _: () = assert!(size_of::<LaneHead>() == 32);
// SAFETY: eight `u32` words in C's layout.
unsafe impl Plain for LaneHead {}
// SAFETY: integers have no padding.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}

/// The bytes of plain values.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the values are initialised memory without padding, borrowed for as long as the bytes are.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::device::pages::descriptor as page_descriptor;

    const HEADER: &str = include_str!("kernels/abi.h");

    /// Names of fields, with their offsets and sizes.
    type Fields = Vec<(&'static str, usize, usize)>;

    /// A field's name and its number of items.
    fn named(field: &str) -> (&str, usize) {
        match field.split_once('[') {
            Some((field, count)) => (field, count.trim_end_matches(']').parse().unwrap()),
            None => (field, 1),
        }
    }

    /// The structs of the header that are mirrored here.
    fn mirrored() -> Vec<(&'static str, Fields)> {
        let lists = [("from", offset_of!(PagesArgs, from)), ("to", offset_of!(PagesArgs, to))];
        let counts = [
            ("plane_count", offset_of!(PagesArgs, plane_count)),
            ("page_count", offset_of!(PagesArgs, page_count)),
            ("words", offset_of!(PagesArgs, words)),
            ("word_bytes", offset_of!(PagesArgs, word_bytes)),
        ];
        let mut fields =
            vec![("planes", offset_of!(PagesArgs, planes), size_of::<[PagePlane; PAGE_PLANES]>())];
        fields.extend(lists.map(|(name, at)| (name, at, 4 * PAGE_LIST)));
        fields.extend(counts.map(|(name, at)| (name, at, 4)));
        let mut all = layouts();
        all.push(("PagesArgs", fields));
        all
    }

    /// The fields of `struct name` in the header, with offsets and sizes as C lays out words of 4 and 8 bytes.
    fn in_header(name: &str) -> Vec<(String, usize, usize)> {
        let text: String = HEADER.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
        let start = text.find(&format!("struct {name} {{")).unwrap_or_else(|| panic!("{name}"));
        let body = &text[start..][text[start..].find('{').unwrap() + 1..];
        let mut fields = Vec::new();
        let mut offset: usize = 0;
        for line in body[..body.find('}').unwrap()].split(';').map(str::trim).filter(|l| !l.is_empty()) {
            let (kind, names) = line.split_once(' ').unwrap();
            let word: usize = match kind {
                "u64" => 8,
                "u32" | "RoomAt" => 4,
                // Structs of words of both sizes.
                other => {
                    let size = layouts()
                        .iter()
                        .find(|(name, _)| *name == other)
                        .map(|(_, fields)| fields.iter().map(|(_, _, size)| size).sum::<usize>());
                    offset = offset.next_multiple_of(8);
                    let size = size.unwrap_or_else(|| panic!("{other}"));
                    let (field, count) = named(names);
                    fields.push((field.to_owned(), offset, size * count));
                    offset += size * count;
                    continue;
                }
            };
            for field in names.split(',').map(str::trim) {
                let (field, count) = named(field);
                offset = offset.next_multiple_of(word);
                fields.push((field.to_owned(), offset, word * count));
                offset += word * count;
            }
        }
        fields
    }

    #[test]
    fn structs_are_the_headers() {
        for (name, fields) in mirrored() {
            let fields: Vec<_> = fields.into_iter().map(|(f, at, size)| (f.to_owned(), at, size)).collect();
            assert_eq!(fields, in_header(name), "{name}");
        }
        let head =
            ["length", "landed", "budget", "blocks", "stamp", "min_stamp", "next_victim", "full_places"];
        let names: Vec<_> = in_header("LaneHead").into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, head);
    }

    #[test]
    fn no_struct_of_the_header_is_without_a_mirror_and_none_has_padding() {
        let known: Vec<_> = mirrored().into_iter().map(|(name, _)| name).collect();
        for line in HEADER.lines().filter_map(|l| l.strip_prefix("struct ")) {
            let name = line.split(' ').next().unwrap();
            assert!(known.contains(&name) || name == "LaneHead", "{name}");
        }
        for (name, fields) in mirrored() {
            let mut end = 0;
            for (field, at, size) in fields {
                assert_eq!(at, end, "{name}::{field}");
                end = at + size;
            }
        }
    }

    #[test]
    fn constants_are_the_headers() {
        for text in [
            "NO_PAGE = 0xFFFFFFFFu".to_owned(),
            "NOTHING_WRONG = ~0ull".to_owned(),
            format!("STAGED_PAGES = {STAGED_PAGES};"),
            format!(
                "DUE_RESOLVED = {DUE_RESOLVED}, DUE_GATHERED = {DUE_GATHERED}, DUE_SCATTERED = {DUE_SCATTERED};"
            ),
            format!("IN_MEMORY = {IN_MEMORY}, SETS = {SETS}, SETS_AND_BLOCKS = {SETS_AND_BLOCKS} }}"),
            format!("WORK_PANELS = {WORK_PANELS};"),
            format!("WORK_STEPS = {WORK_STEPS};"),
            format!("UNUSED_STAMP = 0x{UNUSED_STAMP:X}u"),
            format!("SLOT_BLOCK = {};", crate::geometry::SLOT_BLOCK),
            format!("GROUP_MAX = {GROUP_MAX};"),
            format!("gathered[{GROUP_MAX}];"),
            "ABSENT = 0;".to_owned(),
            "EMPTY = 0xFFFFFFFFu".to_owned(),
            format!("PAGE_GROUPS = {PAGE_GROUPS_MAX};"),
            format!("PAGE_ENTRY = {};", page_descriptor::row_words(0)),
            format!("FROM_DEVICE = 0x{:X}u", page_descriptor::FROM_DEVICE),
            format!("MOST_TOKENS = 0x{:X}u", i32::MAX),
        ] {
            assert!(HEADER.contains(&text), "{text}");
        }
        assert_eq!((crate::residency::ABSENT, crate::residency::EMPTY), (0, u32::MAX));
        assert_eq!(crate::device::descriptor::NOTHING_WRONG, u64::MAX);
    }
}
