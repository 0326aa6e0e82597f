//! Begins of steps: random batches, several steps on the same tensors, each by lists against what the device wrote.

use forebay::device::descriptor::{ACCEPTED_ON_DEVICE, Cause, Report};
use forebay::device::pages::descriptor::{Changed, Entry, FROM_DEVICE, encode, words};
use forebay::device::{BeginPages, PageOp, PageTables};
use proptest::prelude::*;

use crate::world::{At, DEVICE, Kind, Model, PINNED, World, cases, set_word, word};

/// The sizes of a cache.
#[derive(Clone, Debug)]
struct Shape {
    lanes: usize,
    batch: usize,
    tokens: usize,
    wide: bool,
    /// Columns, tokens of a page, pages.
    groups: Vec<(usize, u32, u32)>,
}

/// An entry that the host writes to a lane's table.
#[derive(Clone, Copy, Debug)]
enum Page {
    Own(u32),
    Null,
    Any(i32),
}

#[derive(Clone, Debug)]
struct Row {
    lane: u32,
    length: Option<u32>,
    accepted: Option<u32>,
    query_rows: u32,
    changed: [(u32, u32); 4],
    /// Takes the numbers as they are, whether they fit or not.
    odd: bool,
}

#[derive(Clone, Debug)]
struct Step {
    edits: Vec<(usize, usize, usize, Page)>,
    rows: Vec<Row>,
    accepted: Vec<u32>,
    /// Whether there is a tensor of accepted counts.
    given: bool,
    /// The number of rows that the descriptor claims beyond those that it has.
    beyond: u32,
}

fn shape() -> impl Strategy<Value = Shape> {
    let tokens = prop_oneof![Just(1_u32), Just(4), Just(16), Just(48)];
    let group = (1..9_usize, tokens, 1..40_u32);
    let groups = prop::collection::vec(group, 1..=4);
    (1..7_usize, 1..6_usize, prop_oneof![1..12_usize, 60..150_usize], any::<bool>(), groups)
        .prop_map(|(lanes, batch, tokens, wide, groups)| Shape { lanes, batch, tokens, wide, groups })
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![20 => 0..10_u32, 1 => any::<u32>(), 1 => Just(u32::MAX - 1), 1 => Just(i32::MAX as u32)]
}

fn row() -> impl Strategy<Value = Row> {
    let changed = prop::array::uniform4((0..9_u32, 0..9_u32));
    let odd = prop_oneof![12 => Just(false), 1 => Just(true)];
    let accepted = prop::option::of(number());
    (number(), prop::option::of(0..200_u32), accepted, number(), changed, odd).prop_map(
        |(lane, length, accepted, query_rows, changed, odd)| {
            let huge = odd && query_rows % 2 == 0;
            let length = if huge { length.map(|length| i32::MAX as u32 - length % 8) } else { length };
            Row { lane, length, accepted, query_rows, changed, odd }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let (own, wrong) = (any::<u32>().prop_map(Page::Own), any::<i32>().prop_map(Page::Any));
    let page = prop_oneof![8 => own, 2 => Just(Page::Null), 1 => wrong];
    let edits = prop::collection::vec((0..4_usize, 0..7_usize, 0..9_usize, page), 0..20);
    let beyond = prop_oneof![15 => Just(0), 1 => 1..9_u32, 1 => Just(u32::MAX - 9)];
    let rows = prop::collection::vec(row(), 0..6);
    (edits, rows, prop::collection::vec(number(), 6), any::<bool>(), beyond)
        .prop_map(|(edits, rows, accepted, given, beyond)| Step { edits, rows, accepted, given, beyond })
}

struct Tables {
    lanes: At,
    table: At,
    slots: At,
    columns: usize,
    page_tokens: u32,
    pages: u32,
}

/// The slices of a cache in a world.
struct Cache {
    shape: Shape,
    descriptor: At,
    lanes: At,
    accepted: At,
    lengths: At,
    starts: At,
    positions: At,
    report: At,
    tables: Vec<Tables>,
}

/// An error of a step, in the order in which errors count.
type Fault = (bool, u32, u32, Cause, u32);

impl Cache {
    fn new(world: &mut World, shape: &Shape) -> Cache {
        let Shape { lanes, batch, tokens, wide, .. } = *shape;
        let (number, groups) = (if wide { 8 } else { 4 }, shape.groups.len());
        let tables = shape.groups.iter().map(|(columns, page_tokens, pages)| {
            let own = world.take(PINNED, 4 * lanes * columns, 4);
            let first: Vec<u32> = (0..(lanes * columns) as u32).map(|index| index % pages).collect();
            world.write_words(own, first);
            let table = world.take(DEVICE, 4 * batch * columns, 4);
            world.write_words(table, (0..(batch * columns) as u32).map(|index| (index + 1) % pages));
            Tables {
                lanes: own,
                table,
                slots: world.take(DEVICE, number * tokens, number),
                columns: *columns,
                page_tokens: *page_tokens,
                pages: *pages,
            }
        });
        let tables = tables.collect();
        let cache = Cache {
            shape: shape.clone(),
            descriptor: world.take(PINNED, 4 * words(batch as u32, groups), 4),
            lanes: world.take(DEVICE, 8 * lanes, 4),
            accepted: world.take(DEVICE, 4 * batch, 4),
            lengths: world.take(DEVICE, 4 * batch, 4),
            starts: world.take(DEVICE, 4 * (batch + 1), 4),
            positions: world.take(DEVICE, number * tokens, number),
            report: world.take(PINNED, 4 * Report::words(0, batch as u32), 4),
            tables,
        };
        world.write_words(cache.lanes, vec![0; 2 * lanes]);
        cache
    }

    fn edit(&self, world: &mut World, (group, lane, column, page): (usize, usize, usize, Page)) {
        let tables = &self.tables[group % self.tables.len()];
        let index = lane % self.shape.lanes * tables.columns + column % tables.columns;
        let page = match page {
            Page::Own(page) => page % tables.pages,
            Page::Null => 0,
            Page::Any(entry) => entry.cast_unsigned(),
        };
        world.write_words(At { at: tables.lanes.at + 4 * index, bytes: 4, ..tables.lanes }, [page]);
    }

    /// The entries of a step. A lane is named once.
    fn entries(&self, step: &Step) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        for row in step.rows.iter().take(self.shape.batch) {
            let lane = if row.odd { row.lane } else { row.lane % self.shape.lanes as u32 };
            if entries.iter().any(|entry| entry.lane == lane) {
                continue;
            }
            let changed = std::array::from_fn(|group| {
                let (first, count) = row.changed[group];
                let Some(tables) = self.tables.get(group) else { return Changed { first, count } };
                let columns = tables.columns as u32;
                let first = if row.odd { first } else { first % columns };
                Changed { first, count: if row.odd { count } else { count % (columns - first + 1) } }
            });
            entries.push(Entry {
                lane,
                length: row.length.unwrap_or(FROM_DEVICE),
                accepted: row.accepted.unwrap_or(ACCEPTED_ON_DEVICE),
                query_rows: row.query_rows,
                changed,
            });
        }
        entries
    }

    /// Runs a step on the device.
    fn run(&self, world: &mut World, number: u64, step: &Step) {
        step.edits.iter().for_each(|edit| self.edit(world, *edit));
        let entries = self.entries(step);
        let mut descriptor = vec![7; self.descriptor.bytes / 4];
        encode(number, self.tables.len(), entries.iter().copied(), &mut descriptor);
        if step.beyond > 0 {
            descriptor[2] = self.shape.batch as u32 + step.beyond;
        }
        world.write_words(self.descriptor, descriptor.iter().copied());
        world.write_words(self.accepted, step.accepted[..self.shape.batch].iter().copied());
        let groups: Vec<PageTables> = self.tables.iter().map(|tables| self.group(world, tables)).collect();
        let begin = BeginPages {
            descriptor: world.slice(self.descriptor),
            lanes: world.slice(self.lanes),
            accepted: step.given.then(|| world.slice(self.accepted)),
            lengths: world.slice(self.lengths),
            starts: world.slice(self.starts),
            positions: world.slice(self.positions),
            wide: self.shape.wide,
            groups: &groups,
            report: world.slice(self.report),
        };
        world.run(PageOp::Begin(begin)).unwrap();
        self.expect(&mut world.model, number, descriptor[2], &entries, step);
    }

    fn group(&self, world: &World, tables: &Tables) -> PageTables {
        PageTables {
            lanes: world.slice(tables.lanes),
            table: world.slice(tables.table),
            slots: world.slice(tables.slots),
            page_tokens: tables.page_tokens,
            pages: tables.pages,
        }
    }

    fn set_number(&self, model: &mut Model, at: At, index: usize, value: i64) {
        let Shape { wide, .. } = self.shape;
        if wide {
            set_word(model, at, 2 * index, value as u32);
            set_word(model, at, 2 * index + 1, (value >> 32) as u32);
        } else {
            set_word(model, at, index, i32::try_from(value).unwrap().cast_unsigned());
        }
    }

    /// The committed length of each row; none of one that does not count.
    fn committed(
        &self,
        model: &Model,
        entries: &[Entry],
        step: &Step,
        faults: &mut Vec<Fault>,
    ) -> Vec<Option<u32>> {
        let mut all = Vec::new();
        for (row, entry) in entries.iter().enumerate() {
            let mut fault = |cause, value| faults.push((false, 0, row as u32, cause, value));
            if entry.lane as usize >= self.shape.lanes {
                fault(Cause::Tables, entry.lane);
                all.push(None);
                continue;
            }
            let of_lane =
                |word_of| word(model, self.lanes, 2 * entry.lane as usize + word_of).cast_unsigned();
            let mut length = u64::from(entry.length);
            if entry.length == FROM_DEVICE {
                let on_device = if step.given { step.accepted[row] } else { u32::MAX };
                let accepted = if entry.accepted == ACCEPTED_ON_DEVICE { on_device } else { entry.accepted };
                length = of_lane(0).into();
                if accepted > of_lane(1) {
                    fault(Cause::Accepted, accepted);
                } else {
                    length += u64::from(accepted);
                }
            }
            let fits = length + u64::from(entry.query_rows) < 1 << 31;
            if !fits {
                fault(Cause::Tables, entry.query_rows);
            }
            all.push(fits.then_some(length as u32));
        }
        all
    }

    fn take_entries(&self, model: &mut Model, entries: &[Entry], faults: &mut Vec<Fault>) {
        for (row, entry) in
            entries.iter().enumerate().filter(|(_, entry)| (entry.lane as usize) < self.shape.lanes)
        {
            for (group, tables) in self.tables.iter().enumerate() {
                let Changed { first, count } = entry.changed[group];
                let mut fault = |value| faults.push((true, group as u32, row as u32, Cause::Tables, value));
                if u64::from(first) + u64::from(count) > tables.columns as u64 {
                    fault(first);
                    continue;
                }
                for column in first as usize..(first + count) as usize {
                    let entry = word(model, tables.lanes, entry.lane as usize * tables.columns + column);
                    let page =
                        if (0..i64::from(tables.pages)).contains(&i64::from(entry)) { entry } else { 0 };
                    if page != entry {
                        fault(entry.cast_unsigned());
                    }
                    set_word(model, tables.table, row * tables.columns + column, page.cast_unsigned());
                }
            }
        }
    }

    /// What a step has to do to the memories.
    fn expect(&self, model: &mut Model, number: u64, claimed: u32, entries: &[Entry], step: &Step) {
        let Shape { batch, tokens, .. } = self.shape;
        let mut faults = Vec::new();
        let entries = if claimed as usize > batch {
            faults.push((false, 0, 0, Cause::Tables, claimed));
            &[]
        } else {
            entries
        };
        let committed = self.committed(model, entries, step, &mut faults);
        self.take_entries(model, entries, &mut faults);
        // All query rows in their order, by row and position.
        let rows = committed.iter().zip(entries).enumerate();
        let rows = rows.filter_map(|(row, (committed, entry))| Some((row, (*committed)?, entry.query_rows)));
        let queries: Vec<(usize, u32)> = rows
            .flat_map(|(row, first, count)| (0..count).map(move |n| (row, first + n)))
            .take(tokens)
            .collect();
        let of_row = |row: usize| queries.iter().filter(|query| query.0 == row).count() as u32;
        for (row, entry) in entries.iter().enumerate() {
            let Some(length) = committed[row] else { continue };
            if of_row(row) < entry.query_rows {
                faults.push((false, 0, row as u32, Cause::Tables, entry.query_rows));
            }
            set_word(model, self.lanes, 2 * entry.lane as usize, length);
            set_word(model, self.lanes, 2 * entry.lane as usize + 1, of_row(row));
        }
        for row in 0..batch {
            let length = committed.get(row).copied().flatten().unwrap_or(0);
            set_word(model, self.lengths, row, length + of_row(row));
            if row < entries.len() {
                set_word(model, self.report, 8 + row, length);
            }
        }
        for row in 0..=batch {
            let before = queries.iter().filter(|query| query.0 < row).count();
            set_word(model, self.starts, row, before as u32);
        }
        for query in 0..tokens {
            let position = queries.get(query).map_or(0, |(_, position)| i64::from(*position));
            self.set_number(model, self.positions, query, position);
            for (group, tables) in self.tables.iter().enumerate() {
                let slot = queries.get(query).map_or(Ok(-1), |(row, position)| {
                    let (column, within) = (position / tables.page_tokens, position % tables.page_tokens);
                    let column = Some(column as usize).filter(|column| *column < tables.columns);
                    let page = column.map(|column| word(model, tables.table, row * tables.columns + column));
                    let page = page.filter(|page| *page > 0 && page.cast_unsigned() < tables.pages);
                    let slot =
                        page.map(|page| i64::from(page) * i64::from(tables.page_tokens) + i64::from(within));
                    slot.ok_or((true, group as u32, *row as u32, Cause::Tables, *position))
                });
                self.set_number(model, tables.slots, query, slot.unwrap_or(-1));
                faults.extend(slot.err());
            }
        }
        let first =
            faults.into_iter().min_by_key(|fault| (fault.0, fault.1, fault.2, fault.3 as u32, fault.4));
        let (cause, layer, row, value) =
            first.map_or((0, 0, 0, 0), |(_, layer, row, cause, value)| (cause as u32, layer, row, value));
        let header = [number as u32, (number >> 32) as u32, cause, row, layer, value, 0, 0];
        header.into_iter().enumerate().for_each(|(index, word)| set_word(model, self.report, index, word));
    }
}

/// Runs steps of a cache on a device.
fn live(kind: Kind, shape: &Shape, steps: &[Step]) -> Result<(), TestCaseError> {
    let Some(mut world) = World::new(kind) else { return Ok(()) };
    let cache = Cache::new(&mut world, shape);
    for (number, step) in steps.iter().enumerate() {
        cache.run(&mut world, 1 << 33 | number as u64, step);
        prop_assert_eq!(world.difference(), None, "{:?}, step {}", kind, number);
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(400))]
    #[test]
    fn a_step_begins_as_lists_say(shape in shape(), steps in prop::collection::vec(step(), 1..6)) {
        live(Kind::Inline, &shape, &steps)?;
    }
}

proptest! {
    #![proptest_config(cases(60))]
    #[test]
    fn a_step_begins_alike_on_every_device(
        shape in shape(),
        steps in prop::collection::vec(step(), 1..6),
        seed: u64,
    ) {
        live(Kind::Threaded, &shape, &steps)?;
        live(Kind::Clocked(seed), &shape, &steps)?;
        #[cfg(feature = "check")]
        live(Kind::Watched, &shape, &steps)?;
    }
}

/// A batch row of a step of many.
fn one_of_many(row: usize) -> Row {
    let n = row as u32;
    let (length, odd) = (n.is_multiple_of(3).then_some(n), false);
    let changed = [(n % 5, 2), (n % 7, n % 4), (0, 0), (n, n % 9)];
    Row { lane: 3 * n, length, accepted: (n % 4 == 1).then_some(n % 3), query_rows: n % 6, changed, odd }
}

/// More rows than a block of threads has, which the CUDA device begins in several rounds.
#[test]
fn a_step_of_more_rows_than_threads_begins_as_lists_say() {
    let groups = vec![(5, 4, 30), (8, 16, 9), (3, 2, 12), (7, 1, 40)];
    let shape = Shape { lanes: 611, batch: 150, tokens: 350, wide: true, groups };
    let step = |first: usize| Step {
        edits: (0..200).map(|n| (n % 4, n * 7, n, Page::Own(n as u32 * 5 + 1))).collect(),
        rows: (first..first + 149).map(one_of_many).collect(),
        accepted: (0..150).map(|n| n % 3).collect(),
        given: true,
        beyond: 0,
    };
    let steps = [step(0), step(0), step(40), step(1)];
    live(Kind::Inline, &shape, &steps).unwrap();
    #[cfg(feature = "cuda")]
    if crate::device::driver_is_there() {
        (1..4).for_each(|seed| live(Kind::Cuda(Some(seed), 0), &shape, &steps).unwrap());
    }
}

#[cfg(feature = "cuda")]
proptest! {
    #![proptest_config(cases(40))]
    #[test]
    fn a_step_begins_alike_on_the_cuda_device(
        shape in shape(),
        steps in prop::collection::vec(step(), 1..6),
        seed: u64,
    ) {
        if crate::device::driver_is_there() {
            live(Kind::Cuda(None, 0), &shape, &steps)?;
            live(Kind::Cuda(Some(seed), 0), &shape, &steps)?;
        }
    }
}
