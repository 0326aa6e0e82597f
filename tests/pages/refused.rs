//! Operations on pages that do not fit: each is one error with its place and numbers, and nothing is enqueued.

use forebay::device::descriptor::Report;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::pages::descriptor::words;
use forebay::device::{BeginPages, CopyPages, Device, Mapped, PageOp, PageTables, Plane, Slice};
use forebay::os::Protection;
use forebay::{Error, Kind};

use crate::world::{DEVICE, Kind as On, PINNED, World};

/// Batch rows, step tokens, lanes and columns.
const SIZES: [usize; 4] = [3, 10, 4, 5];

/// A begin that fits.
struct Fitting {
    slices: [Slice; 7],
    tables: PageTables,
}

impl Fitting {
    fn new(world: &mut World) -> Fitting {
        let [batch, tokens, lanes, columns] = SIZES;
        let mut slice = |side, bytes, align| {
            let at = world.take(side, bytes, align);
            world.slice(at)
        };
        let report = 4 * Report::words(0, batch as u32);
        Fitting {
            slices: [
                slice(PINNED, 4 * words(batch as u32, 1), 4),
                slice(DEVICE, 8 * lanes, 4),
                slice(DEVICE, 4 * batch, 4),
                slice(DEVICE, 4 * batch, 4),
                slice(DEVICE, 4 * (batch + 1), 4),
                slice(DEVICE, 8 * tokens, 8),
                slice(PINNED, report, 4),
            ],
            tables: PageTables {
                lanes: slice(PINNED, 4 * lanes * columns, 4),
                table: slice(DEVICE, 4 * batch * columns, 4),
                slots: slice(DEVICE, 8 * tokens, 8),
                page_tokens: 16,
                pages: 30,
            },
        }
    }

    fn begin<'a>(&self, groups: &'a [PageTables]) -> BeginPages<'a> {
        let [descriptor, lanes, accepted, lengths, starts, positions, report] = self.slices;
        let accepted = Some(accepted);
        BeginPages { descriptor, lanes, accepted, lengths, starts, positions, wide: true, groups, report }
    }
}

type Wanted = (Kind, &'static str, &'static [(&'static str, u64)]);

const fn range(place: &'static str, numbers: &'static [(&'static str, u64)]) -> Wanted {
    (Kind::OutOfRange, place, numbers)
}

/// Whether an operation is refused so, and has changed nothing.
#[track_caller]
fn refused(world: &World, op: PageOp<'_>, (kind, place, numbers): Wanted) -> Error {
    let error = world.run(op).unwrap_err();
    assert_eq!((error.kind(), error.place()), (kind, place), "{error}");
    for (name, value) in numbers {
        assert_eq!(error.number(name), Some(*value), "{error}");
    }
    assert_eq!(world.difference(), None, "{error}");
    error
}

/// The slice without its last word.
fn shorter(slice: Slice) -> Slice {
    slice.part(0, slice.bytes() - 4).unwrap()
}

fn nothing(slice: Slice) -> Slice {
    slice.part(0, 0).unwrap()
}

fn moved(slice: Slice, by: u64) -> Slice {
    let whole = slice.part(by, slice.bytes() - by).unwrap();
    whole.part(0, whole.bytes() / 8 * 8).unwrap()
}

#[test]
fn begins_whose_slices_do_not_fit_each_other_are_refused() {
    let mut world = World::new(On::Inline).unwrap();
    let fitting = Fitting::new(&mut world);
    type Change = fn(&mut BeginPages<'_>);
    let changes: [(Change, Wanted); 12] = [
        (|b| b.descriptor = shorter(b.descriptor), range("descriptor of a begin", &[("wanted", 88)])),
        (|b| b.lanes = shorter(b.lanes), range("lanes of a begin", &[("value", 28)])),
        (|b| b.lanes = nothing(b.lanes), range("lanes of a begin", &[("value", 0)])),
        (|b| b.accepted = b.accepted.map(shorter), range("accepted counts of a begin", &[("wanted", 12)])),
        (|b| b.lengths = nothing(b.lengths), range("batch rows", &[("value", 0), ("most", 32767)])),
        (|b| b.lengths = shorter(b.lengths), range("starts of a begin", &[("wanted", 12)])),
        (|b| b.starts = shorter(b.starts), range("starts of a begin", &[("wanted", 16)])),
        (|b| b.positions = nothing(b.positions), range("step tokens", &[("value", 0)])),
        (|b| b.positions = shorter(b.positions), range("positions of a begin", &[("value", 76)])),
        (|b| b.positions = moved(b.positions, 4), range("positions of a begin", &[("multiple of", 8)])),
        (|b| b.report = shorter(b.report), range("report of a begin", &[("wanted", 44)])),
        (|b| b.groups = &[], range("groups of a begin", &[("value", 0), ("most", 4)])),
    ];
    let tables = [fitting.tables];
    for (change, wanted) in changes {
        let mut begin = fitting.begin(&tables);
        change(&mut begin);
        refused(&world, PageOp::Begin(begin), wanted);
    }
    let five = [fitting.tables; 5];
    refused(
        &world,
        PageOp::Begin(fitting.begin(&five)),
        range("groups of a begin", &[("value", 5), ("most", 4)]),
    );
}

#[test]
fn begins_whose_tables_do_not_fit_are_refused() {
    let mut world = World::new(On::Inline).unwrap();
    let fitting = Fitting::new(&mut world);
    type Change = fn(&mut PageTables);
    let changes: [(Change, Wanted); 8] = [
        (|t| t.table = nothing(t.table), range("entries of a row of a page table", &[("value", 0)])),
        (|t| t.table = shorter(t.table), range("table of a begin", &[("value", 56), ("wanted", 48)])),
        (|t| t.lanes = shorter(t.lanes), range("page tables of lanes", &[("wanted", 80)])),
        (|t| t.slots = shorter(t.slots), range("slots of a begin", &[("wanted", 80)])),
        (|t| t.slots = moved(t.slots, 4), range("slots of a begin", &[("value", 72)])),
        (|t| t.page_tokens = 0, range("tokens of a page", &[])),
        (|t| t.pages = 0, range("pages of a group", &[])),
        (|t| t.pages = (1 << 31) + 1, (Kind::Overflow, "slots of a group", &[("tokens of a page", 16)])),
    ];
    for (change, wanted) in changes {
        let mut tables = [fitting.tables];
        change(&mut tables[0]);
        refused(&world, PageOp::Begin(fitting.begin(&tables)), wanted);
    }
    // Narrow slots end earlier, at 2^31.
    let narrow = |pages| {
        let tables = [PageTables { pages, ..fitting.tables }];
        let begin = BeginPages { wide: false, ..fitting.begin(&tables) };
        let result =
            HostDevice::new(HostOptions::default()).enqueue_pages(world.stream, PageOp::Begin(begin));
        // The slices are another device's, which is found after the number of groups and before any size.
        assert_eq!(result.unwrap_err().kind(), Kind::OutOfRange);
        world.run(PageOp::Begin(begin)).err().map(|error| error.kind())
    };
    assert_eq!(narrow((1 << 27) + 1), Some(Kind::Overflow));
    assert_eq!(world.difference(), None);
    assert_eq!(narrow(1 << 27), None);
}

#[test]
fn begins_that_write_where_they_read_or_write_are_refused() {
    let mut world = World::new(On::Inline).unwrap();
    let fitting = Fitting::new(&mut world);
    // The begin's slices, with the other one moved over it.
    let tables = [fitting.tables, Fitting::new(&mut world).tables];
    type Change = fn(&World, &mut BeginPages<'_>, &mut [PageTables; 2]);
    let changes: [(Change, &str); 8] = [
        (|w, b, _| b.starts = w.over(b.starts, b.lengths), "starts of a begin"),
        (|w, b, _| b.lengths = w.over(b.lengths, b.accepted.unwrap()), "lengths of a begin"),
        (|w, b, _| b.lanes = w.over(b.lanes, b.positions), "positions of a begin"),
        (|w, b, _| b.report = w.over(b.report, b.descriptor), "report of a begin"),
        (|w, b, t| b.report = w.over(b.report, t[0].lanes), "report of a begin"),
        (|_, _, t| t[1].table = t[0].table, "table of a begin"),
        (|_, _, t| t[1].slots = t[0].slots, "slots of a begin"),
        (|_, b, t| t[1].slots = b.positions, "slots of a begin"),
    ];
    let wide = world.take(PINNED, 4 * words(SIZES[0] as u32, 2), 4);
    let descriptor = world.slice(wide);
    for (change, place) in changes {
        let (mut begin, mut tables) = (BeginPages { descriptor, ..fitting.begin(&[]) }, tables);
        change(&world, &mut begin, &mut tables);
        refused(
            &world,
            PageOp::Begin(BeginPages { groups: &tables, ..begin }),
            (Kind::OutOfRange, place, &[]),
        );
    }
    // Two groups may read the same pinned words.
    let same = [tables[0], PageTables { lanes: tables[0].lanes, ..tables[1] }];
    world.run(PageOp::Begin(BeginPages { descriptor, ..fitting.begin(&same) })).unwrap();
}

#[test]
fn memory_of_others_and_memory_to_read_only_are_refused() {
    let mut world = World::new(On::Inline).unwrap();
    let fitting = Fitting::new(&mut world);
    let (tables, device) = ([fitting.tables], &world.queue);
    let foreign = HostDevice::new(HostOptions::default()).allocate(1 << 16).unwrap();
    let backing = device.backing(1 << 16).unwrap();
    let pieces = [Mapped { backing, offset: 0, bytes: 1 << 16 }];
    let read_only = device.range(&pieces, Protection::Read).unwrap();
    type Place = fn(&mut BeginPages<'_>, Slice);
    let places: [(Place, bool); 7] = [
        (|b, memory| b.descriptor = memory.part(0, b.descriptor.bytes()).unwrap(), false),
        (|b, memory| b.accepted = memory.part(0, 12).ok(), false),
        (|b, memory| b.lanes = memory.part(0, b.lanes.bytes()).unwrap(), true),
        (|b, memory| b.lengths = memory.part(0, b.lengths.bytes()).unwrap(), true),
        (|b, memory| b.starts = memory.part(0, b.starts.bytes()).unwrap(), true),
        (|b, memory| b.positions = memory.part(0, b.positions.bytes()).unwrap(), true),
        (|b, memory| b.report = memory.part(0, b.report.bytes()).unwrap(), true),
    ];
    for (place, written) in places {
        let mut begin = fitting.begin(&tables);
        place(&mut begin, foreign);
        refused(&world, PageOp::Begin(begin), (Kind::OutOfRange, "a slice of another device", &[]));
        if written {
            place(&mut begin, read_only);
            let wanted = (Kind::InvalidState, "memory that is mapped to be read only", &[][..]);
            refused(&world, PageOp::Begin(begin), wanted);
        }
    }
    type Table = fn(&mut PageTables) -> &mut Slice;
    let tables_of: [Table; 3] = [|t| &mut t.lanes, |t| &mut t.table, |t| &mut t.slots];
    for place in tables_of {
        let mut tables = [fitting.tables];
        let slice = place(&mut tables[0]);
        *slice = foreign.part(0, slice.bytes()).unwrap();
        let begin = PageOp::Begin(fitting.begin(&tables));
        refused(&world, begin, (Kind::OutOfRange, "a slice of another device", &[]));
    }
    let own = world.take(DEVICE, 64, 4);
    let plane = |memory: Slice| Plane { memory: memory.part(0, 64).unwrap(), stride: 16, bytes: 16 };
    let own = plane(world.slice(own));
    let copy = |planes: &[(Plane, Plane)], wanted| {
        refused(&world, PageOp::Copy(CopyPages { planes, pages: &[(0, 0)] }), wanted);
    };
    copy(&[(plane(foreign), own)], (Kind::OutOfRange, "a slice of another device", &[]));
    copy(&[(own, plane(foreign))], (Kind::OutOfRange, "a slice of another device", &[]));
    copy(&[(own, plane(read_only))], (Kind::InvalidState, "memory that is mapped to be read only", &[]));
    world.run(PageOp::Copy(CopyPages { planes: &[(plane(read_only), own)], pages: &[] })).unwrap();
}

#[test]
fn copies_of_pages_that_their_planes_do_not_have_are_refused() {
    let mut world = World::new(On::Inline).unwrap();
    let places = [(); 2].map(|()| world.take(DEVICE, 200, 4));
    let [from, to] = places.map(|at| world.slice(at));
    let plane = |memory: Slice, stride, bytes| Plane { memory, stride, bytes };
    let (a, b) = (plane(from, 48, 40), plane(to, 48, 40));
    let (from_there, to_there) = ("plane to copy from", "plane to copy to");
    // Four pages: the last one may end before its stride does.
    world.run(PageOp::Copy(CopyPages { planes: &[(a, plane(to, 40, 40))], pages: &[(3, 4)] })).unwrap();
    let last = places[0].at + 3 * 48;
    world.model[DEVICE].copy_within(last..last + 40, places[1].at + 4 * 40);
    let check = |source, target, pages: &[(u32, u32)], wanted| {
        refused(&world, PageOp::Copy(CopyPages { planes: &[(source, target)], pages }), wanted);
    };
    check(a, b, &[(4, 0)], range(from_there, &[("page", 4), ("stride", 48), ("value", 40), ("memory", 200)]));
    check(a, b, &[(0, 1), (1, u32::MAX)], range(to_there, &[("page", u32::MAX as u64)]));
    check(plane(from, 36, 40), b, &[(0, 0)], range(from_there, &[("value", 40), ("stride", 36)]));
    check(a, plane(to, 36, 40), &[], range(to_there, &[("value", 40), ("stride", 36)]));
    let huge = u64::MAX - 3;
    check(plane(from, huge, huge), plane(to, huge, huge), &[], range(from_there, &[("memory", 200)]));
    check(plane(from, u64::MAX - 3, 40), b, &[(1, 1)], range(from_there, &[("page", 1)]));
    check(plane(from, 204, 204), plane(to, 204, 204), &[(0, 0)], range(from_there, &[("value", 204)]));
    check(
        a,
        plane(to, 48, 36),
        &[(0, 0)],
        range("bytes of a page's piece and of its target", &[("target", 36)]),
    );
    check(plane(from, 42, 40), b, &[(0, 0)], range(from_there, &[("multiple of", 4), ("stride", 42)]));
    check(plane(from, 48, 38), plane(to, 48, 38), &[(0, 0)], range(from_there, &[("value", 38)]));
    let skewed = plane(from.part(2, 198).unwrap(), 48, 40);
    check(skewed, b, &[(0, 0)], range(from_there, &[("multiple of", 4)]));
    check(a, b, &[(0, 1), (1, 2), (2, 1)], range("page that is copied to twice", &[("value", 1)]));
    check(a, a, &[(0, 1), (1, 2)], range("page that is copied from and to", &[("value", 1)]));
    check(a, a, &[(2, 2)], range("page that is copied from and to", &[("value", 2)]));
    let other = plane(from, 40, 40);
    check(
        a,
        other,
        &[(0, 3)],
        range("planes of one memory with unequal strides", &[("value", 48), ("target", 40)]),
    );
    let planes = [(a, b), (a, plane(to.part(8, 192).unwrap(), 48, 40))];
    let copy = PageOp::Copy(CopyPages { planes: &planes, pages: &[(0, 0), (1, 2)] });
    refused(&world, copy, range("planes to copy to", &[("value", 0)]));
}
