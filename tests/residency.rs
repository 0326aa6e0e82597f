//! The rule against a naive oracle, as a state machine over several lanes; `validate` runs after every operation.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "support/oracle.rs"]
mod oracle;
#[path = "residency/places.rs"]
mod places;

use forebay::residency::{
    Counts, Fetch, LaneHead, LayerTables, Moved, Portable, QueryRange, Selected, TableShape, TableWords,
    Workspace,
};
use oracle::Oracle;
use places::Places;
use proptest::prelude::*;
use std::collections::BTreeSet;

const LANES: u32 = 3;
const TOKENS: u32 = 320;
const QUERY_ROWS: u32 = 3;
const K: usize = 24;

fn shape() -> TableShape {
    TableShape {
        lanes: LANES,
        tokens: TOKENS,
        query_rows: QUERY_ROWS,
        scratch: QUERY_ROWS * K as u32,
        waves: 1,
        scratch_base: 64,
        landing_base: 512,
        budget_base: 640,
        budget_blocks: 16,
    }
}

#[derive(Clone, Debug)]
enum Op {
    Join { lane: u32, blocks: u32, short: u32, length: u32, whole: bool },
    Step { lane: u32, accept: u32, rows: u32, seed: u64, spread: u32, split: bool },
    Warm { lane: u32, seed: u64 },
    Truncate { lane: u32, cut: u32 },
    Resize { lane: u32, blocks: u32, short: u32 },
    Leave { lane: u32 },
}

fn ops() -> impl Strategy<Value = Op> {
    let lane = 0..LANES;
    prop_oneof![
        2 => (lane.clone(), 1..=5_u32, 0..64_u32, 0..200_u32, any::<bool>())
            .prop_map(|(lane, blocks, short, length, whole)| Op::Join { lane, blocks, short, length, whole }),
        12 => (lane.clone(), 0..=QUERY_ROWS, 0..=QUERY_ROWS, any::<u64>(), 1..400_u32, any::<bool>()).prop_map(
            |(lane, accept, rows, seed, spread, split)| Op::Step { lane, accept, rows, seed, spread, split }
        ),
        1 => (lane.clone(), any::<u64>()).prop_map(|(lane, seed)| Op::Warm { lane, seed }),
        1 => (lane.clone(), 0..64_u32).prop_map(|(lane, cut)| Op::Truncate { lane, cut }),
        1 => lane.clone().prop_map(|lane| Op::Leave { lane }),
        4 => (lane, 1..=5_u32, 0..64_u32)
            .prop_map(|(lane, blocks, short)| Op::Resize { lane, blocks, short }),
    ]
}

fn random(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as u32
}

/// Entries near a wandering centre, with repetitions and -1 among them.
fn selection(seed: &mut u64, limit: u32, spread: u32) -> Vec<i32> {
    let centre = random(seed) % limit.max(1);
    (0..K)
        .map(|_| match random(seed) % 10 {
            0 => -1,
            _ if limit == 0 => -1,
            _ => ((centre + random(seed) % spread) % limit) as i32,
        })
        .collect()
}

struct World {
    tables: LayerTables,
    work: Workspace,
    lanes: Vec<Option<Oracle>>,
    free: BTreeSet<u32>,
    owned: Vec<Vec<u32>>,
}

impl World {
    fn new() -> Self {
        World {
            tables: LayerTables::new(shape()).unwrap(),
            work: Workspace::new(&shape(), QUERY_ROWS * K as u32).unwrap(),
            lanes: vec![None; LANES as usize],
            free: (0..16).collect(),
            owned: vec![Vec::new(); LANES as usize],
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Join { lane, blocks, short, length, whole } => self.join(lane, blocks, short, length, whole),
            Op::Step { lane, accept, rows, mut seed, spread, split } => {
                self.step(lane, accept, rows, &mut seed, spread, split);
            }
            Op::Warm { lane, mut seed } => self.warm(lane, &mut seed),
            Op::Truncate { lane, cut } => {
                if let Some(oracle) = &mut self.lanes[lane as usize] {
                    let length = oracle.length.saturating_sub(cut);
                    oracle.truncate(length);
                    self.tables.truncate(lane, length).unwrap();
                }
            }
            Op::Resize { lane, blocks, short } => self.resize(lane, blocks, short),
            Op::Leave { lane } => {
                self.tables.leave(lane);
                self.lanes[lane as usize] = None;
                self.free.extend(self.owned[lane as usize].drain(..));
            }
        }
        self.tables.validate().unwrap();
        for (lane, oracle) in self.lanes.iter().enumerate() {
            match oracle {
                Some(oracle) => {
                    assert_eq!(self.tables.order(lane as u32), oracle.order);
                    self.newest(lane, &oracle.order);
                }
                None => assert_eq!(self.tables.digest(lane as u32), 0),
            }
        }
    }

    /// The newest rows are the last ones of the order, in the order of the lane's places.
    fn newest(&self, lane: usize, order: &[u32]) {
        let mut work = Workspace::new(&shape(), QUERY_ROWS * K as u32).unwrap();
        let place = |position: &i32| {
            let slot = self.tables.slot(lane as u32, *position as u32).unwrap() - shape().budget_base;
            (self.owned[lane].iter().position(|block| *block == slot / 64), slot % 64)
        };
        for count in [1, 2, K, 63, 64, order.len().max(1), TOKENS as usize] {
            let mut rows = vec![7; count];
            self.tables.newest(&Portable, lane as u32, &mut work, &mut rows).unwrap();
            let first = order.len().saturating_sub(count);
            let mut newest: Vec<i32> = order[first..].iter().map(|position| *position as i32).collect();
            newest.sort_by_key(place);
            newest.resize(count, -1);
            assert_eq!(rows, newest, "{count} of {}", order.len());
        }
    }

    fn join(&mut self, lane: u32, blocks: u32, short: u32, length: u32, whole: bool) {
        let taken: Vec<u32> = self.free.iter().copied().rev().take(blocks as usize).collect();
        let budget = (blocks * 64 - short).max(1);
        let fits = taken.len() == blocks as usize && self.lanes[lane as usize].is_none();
        let joined = self.tables.join(lane, &taken, budget, length);
        if !fits {
            assert!(joined.is_err());
            return;
        }
        joined.unwrap();
        let mut oracle = Oracle::new(budget as usize, length);
        if whole {
            oracle.bring_up();
            assert_eq!(self.tables.bring_up(lane) as usize, oracle.order.len());
        }
        taken.iter().for_each(|b| assert!(self.free.remove(b)));
        self.owned[lane as usize] = taken;
        self.lanes[lane as usize] = Some(oracle);
    }

    fn resize(&mut self, lane: u32, blocks: u32, short: u32) {
        let Some(oracle) = &mut self.lanes[lane as usize] else {
            assert!(self.tables.resize(&Portable, lane, &[0], 1, &mut self.work, |_| {}).is_err());
            return;
        };
        let owned = &mut self.owned[lane as usize];
        self.free.extend(owned.iter().skip(blocks as usize));
        let mut list: Vec<u32> = owned.iter().copied().take(blocks as usize).collect();
        // There are more blocks than all lanes can have.
        list.extend(std::iter::from_fn(|| self.free.pop_last()).take(blocks as usize - list.len()));
        let budget = blocks * 64 - short;
        *owned = list.clone();

        let other = |tables: &LayerTables| [1, 2].map(|next| tables.digest((lane + next) % LANES));
        let (mut places, others) = (Places::of(&self.tables, lane), other(&self.tables));
        let mut moves = Vec::new();
        let copy = |m: Moved| moves.push((m.from, m.to));
        let done = self.tables.resize(&Portable, lane, &list, budget, &mut self.work, copy).unwrap();
        let (left, expected) = places.resize(&list, budget as usize);
        oracle.resize(budget as usize);
        assert_eq!((done.left as usize, done.moved as usize), (left.len(), moves.len()));
        assert_eq!(moves, expected);
        assert_eq!(Places::of(&self.tables, lane), places);
        assert_eq!(other(&self.tables), others);
        assert!(left.iter().all(|position| self.tables.slot(lane, *position).is_none()));
    }

    fn step(&mut self, lane: u32, accept: u32, rows: u32, seed: &mut u64, spread: u32, split: bool) {
        let Some(oracle) = &mut self.lanes[lane as usize] else {
            let refused = self.tables.commit(&Portable, lane, 0, 1, |_| {});
            assert!(refused.is_err());
            return;
        };
        let accepted = accept.min(oracle.landed);
        let before = self.tables.digest(lane);
        let mut moved = Vec::new();
        let committed = self.tables.commit(&Portable, lane, accepted, rows, |m| moved.push(m));
        if oracle.length + accepted + rows > TOKENS {
            assert!(committed.is_err());
            assert_eq!(self.tables.digest(lane), before);
            return;
        }
        committed.unwrap();
        let born = oracle.length;
        oracle.commit(accepted, rows);
        assert_eq!(moved.len(), (accepted as usize).min(oracle.budget));
        for m in moved {
            let row = m.from - (512 + lane * QUERY_ROWS);
            assert_eq!(self.tables.slot(lane, born + row), Some(m.to));
        }
        // A draft layer runs one draft pass per row; an ordinary layer takes all rows at once.
        let calls: Vec<QueryRange> = match (rows, split) {
            (0, _) => Vec::new(),
            (_, true) => (0..rows).map(|first| QueryRange { first, count: 1 }).collect(),
            (_, false) => vec![QueryRange { first: 0, count: rows }],
        };
        for call in calls {
            let positions: Vec<i32> = (0..call.count)
                .flat_map(|r| selection(seed, oracle.length + call.first + r + 1, spread))
                .collect();
            Self::check_call(&mut self.tables, &mut self.work, oracle, lane, call, &positions);
        }
    }

    fn check_call(
        t: &mut LayerTables,
        w: &mut Workspace,
        o: &mut Oracle,
        lane: u32,
        call: QueryRange,
        positions: &[i32],
    ) {
        let mut slots = vec![-7; positions.len()];
        let mut fetches = vec![Fetch { position: 0, slot: 0 }; positions.len()];
        let before: Vec<Option<u32>> = (0..TOKENS).map(|p| t.slot(lane, p)).collect();
        let selected = Selected { selection: positions, slots: &mut slots, fetches: &mut fetches };
        let done = t.resolve(&Portable, lane, call, selected, w).unwrap();
        let step = o.select(positions.iter().filter(|p| **p >= 0).map(|p| *p as u32));
        let counts = done.counts;
        assert_eq!(done.beyond, None);
        assert_eq!((counts.hits as usize, counts.misses as usize), (step.hits.len(), step.misses.len()));
        assert_eq!(counts.scratch as usize, step.scratch);
        let fetches = &fetches[..counts.misses as usize];
        assert_eq!(fetches.iter().map(|f| f.position).collect::<Vec<_>>(), step.misses);
        // No slot is written that this step reads, and none twice.
        let mut written = BTreeSet::new();
        for (index, fetch) in fetches.iter().enumerate() {
            assert!(written.insert(fetch.slot), "two rows in one slot");
            assert_eq!(index < step.scratch, fetch.slot < 512, "scratch slots come first");
            assert!(step.hits.iter().all(|h| before[*h as usize] != Some(fetch.slot)));
        }
        for (position, slot) in positions.iter().zip(&slots) {
            let expected = match *position {
                -1 => -1,
                p if p as u32 >= o.length => (512 + lane * QUERY_ROWS + (p as u32 - o.length)) as i32,
                p => match fetches.iter().find(|f| f.position == p as u32) {
                    Some(fetch) => fetch.slot as i32,
                    None => before[p as usize].unwrap() as i32,
                },
            };
            assert_eq!(*slot, expected, "position {position}");
        }
    }

    fn warm(&mut self, lane: u32, seed: &mut u64) {
        let Some(oracle) = &mut self.lanes[lane as usize] else {
            return;
        };
        let positions = selection(seed, oracle.length, 50);
        let mut slots = vec![0; K];
        let mut fetches = vec![Fetch { position: 0, slot: 0 }; K];
        let selected = Selected { selection: &positions[..], slots: &mut slots, fetches: &mut fetches };
        let counts = self.tables.warm(&Portable, lane, selected, &mut self.work).unwrap().counts;
        let step = oracle.select(positions.iter().filter(|p| **p >= 0).map(|p| *p as u32));
        assert_eq!(counts.misses as usize, step.misses.len());
        assert_eq!(self.tables.residents(lane, 0, u32::MAX).count(), oracle.order.len());
    }
}

#[test]
fn a_new_row_searches_an_empty_slot_behind_the_full_places() {
    let mut tables = LayerTables::new(shape()).unwrap();
    let full = |tables: &LayerTables| tables.head(0).unwrap().full_places;
    // Accepts `rows` new rows; returns the budget slots that they get.
    let grow = |tables: &mut LayerTables, rows: u32| {
        let mut slots = Vec::new();
        tables.commit(&Portable, 0, 0, rows, |_| {}).unwrap();
        tables.commit(&Portable, 0, rows, 0, |moved| slots.push(moved.to - shape().budget_base)).unwrap();
        tables.validate().unwrap();
        slots
    };
    tables.join(0, &[3, 1], 100, 62).unwrap();
    assert_eq!((full(&tables), tables.bring_up(0), full(&tables)), (0, 62, 62));
    assert_eq!((grow(&mut tables, 3), full(&tables)), (vec![254, 255, 64], 65));
    // A lane that is told of too many full places is found out.
    let found = |places: u32| {
        let mut heads = tables.words().heads.to_vec();
        heads[0].full_places = places;
        let words = TableWords { heads: &heads, ..tables.words() };
        LayerTables::from_words(shape(), &words).unwrap().validate().is_err()
    };
    assert_eq!([64, 65, 66, 101].map(found), [false, false, true, true]);
    // Row 0 leaves, and the last row moves to its place; then every row from 10 on goes, and that one with them.
    let mut work = Workspace::new(&shape(), 1).unwrap();
    tables.resize(&Portable, 0, &[3], 64, &mut work, |_| {}).unwrap();
    assert_eq!(full(&tables), 64);
    tables.resize(&Portable, 0, &[3, 1], 80, &mut work, |_| {}).unwrap();
    assert_eq!(full(&tables), 64);
    tables.truncate(0, 10).unwrap();
    assert_eq!((full(&tables), grow(&mut tables, 2), full(&tables)), (0, vec![192, 202], 11));
    tables.empty(0);
    assert_eq!((full(&tables), grow(&mut tables, 1), full(&tables)), (0, vec![192], 1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn rule_equals_the_naive_list(ops in prop::collection::vec(ops(), 1..80)) {
        let mut world = World::new();
        // Two lanes from the start, one of them with a budget below a single row's selection.
        world.apply(&Op::Join { lane: 0, blocks: 1, short: 50, length: 120, whole: false });
        world.apply(&Op::Join { lane: 1, blocks: 2, short: 3, length: 100, whole: true });
        for op in &ops {
            world.apply(op);
        }
    }
}

/// The ranks must agree on the slot of each row too: born rows, ascending, take the slots of the least recently used
/// rows one by one, ordered by (stamp, position), wherever in the lane those slots are.
#[test]
fn born_rows_take_the_slots_of_the_least_recently_used_rows_one_by_one() {
    let mut tables = LayerTables::new(shape()).unwrap();
    let mut work = Workspace::new(&shape(), K as u32).unwrap();
    tables.join(0, &[3], 2, 10).unwrap();
    let mut step = |tables: &mut LayerTables, positions: &[i32], rows: u32| {
        let (mut slots, mut fetches) = ([0; 4], [Fetch { position: 0, slot: 0 }; 4]);
        let selection: Vec<i32> = positions.iter().copied().chain(std::iter::repeat(-1)).take(4).collect();
        let (slots, fetches) = (&mut slots[..], &mut fetches[..]);
        let selected = Selected { selection: &selection[..], slots, fetches };
        tables.resolve(&Portable, 0, QueryRange { first: 0, count: 1 }, selected, &mut work).unwrap();
        let mut moved = Vec::new();
        tables.commit(&Portable, 0, rows, 2, |m| moved.push((m.from - 512, m.to - 640 - 3 * 64))).unwrap();
        moved
    };
    tables.commit(&Portable, 0, 0, 2, |_| {}).unwrap();
    assert_eq!(step(&mut tables, &[9], 0), []);
    // Position 9 is in the lane's first slot, position 4 in its second; both have the same stamp.
    assert_eq!(step(&mut tables, &[4, 9], 2), [(0, 1), (1, 0)]);
    tables.validate().unwrap();
}

/// Lane 0 in a step with three landed rows; each call selects some rows, several times, in several query rows.
struct Lane0 {
    tables: LayerTables,
    work: Workspace,
    length: u32,
    seed: u64,
}

impl Lane0 {
    fn new(blocks: &[u32], budget: u32, length: u32) -> Self {
        let mut tables = LayerTables::new(shape()).unwrap();
        tables.join(0, blocks, budget, length).unwrap();
        tables.bring_up(0);
        tables.commit(&Portable, 0, 0, QUERY_ROWS, |_| {}).unwrap();
        let work = Workspace::new(&shape(), QUERY_ROWS * K as u32).unwrap();
        Lane0 { tables, work, length, seed: 7 }
    }

    /// Calls a resolve, or a warm-up of one row, that selects any of `rows`, landed rows and nothing. It counts the
    /// distinct rows that were resident before it, and those that were not.
    fn call(&mut self, rows: &[u32], warm: bool) -> BTreeSet<u32> {
        let count = if warm { 1 } else { QUERY_ROWS };
        let mut positions = Vec::new();
        for row in 0..count {
            positions.extend((0..K).map(|_| match random(&mut self.seed) % 8 {
                0 => -1,
                1 if !warm => (self.length + random(&mut self.seed) % (row + 1)) as i32,
                _ => rows[random(&mut self.seed) as usize % rows.len()] as i32,
            }));
        }
        let selected: BTreeSet<u32> =
            positions.iter().map(|p| *p as u32).filter(|p| *p < self.length).collect();
        let (hits, misses): (Vec<u32>, Vec<u32>) =
            selected.iter().partition(|position| self.tables.slot(0, **position).is_some());
        let nothing = Fetch { position: 7, slot: 7 };
        let (mut slots, mut fetches) = (vec![0; positions.len()], vec![nothing; positions.len()]);
        let call = Selected { selection: &positions[..], slots: &mut slots, fetches: &mut fetches };
        let (tables, work) = (&mut self.tables, &mut self.work);
        let done = match warm {
            true => tables.warm(&Portable, 0, call, work).unwrap(),
            false => tables.resolve(&Portable, 0, QueryRange { first: 0, count }, call, work).unwrap(),
        };
        let counts = Counts { hits: hits.len() as u32, misses: misses.len() as u32, scratch: 0 };
        assert_eq!((done.counts, done.beyond), (counts, None));
        assert!(fetches[misses.len()..].iter().all(|fetch| *fetch == nothing));
        for (position, slot) in positions.iter().zip(&slots) {
            assert_eq!(u32::try_from(*slot).ok(), tables.slot(0, *position as u32), "{position}");
        }
        tables.validate().unwrap();
        selected
    }
}

/// Such a step stamps the rows that it selects, and notes its stamp in the lane's head. It counts a row once, however
/// often it is selected, and leaves nothing behind that a later step would take for a miss.
#[test]
fn a_step_without_misses_changes_stamps_only() {
    let copy = |tables: &LayerTables| {
        let words = tables.words();
        let stamps = words.stamp_of[640..].to_vec();
        let rest = [words.slot_of, words.position_of, words.blocks].map(<[u32]>::to_vec);
        (words.heads.to_vec(), stamps, rest)
    };
    // A lane that has all its rows and empty slots, and one that evicts rows between such steps.
    for (blocks, budget, length, misses) in [(&[5, 0, 9][..], 192, 150, false), (&[2, 7], 100, 200, true)] {
        let mut lane = Lane0::new(blocks, budget, length);
        let all: Vec<u32> = (0..length).collect();
        for number in 0..200 {
            let before = copy(&lane.tables);
            lane.call(&all, number % 7 == 0);
            assert_eq!(copy(&lane.tables).2 != before.2, misses, "rows come and go");
            let resident: Vec<u32> =
                all.iter().copied().filter(|position| lane.tables.slot(0, *position).is_some()).collect();
            let (mut heads, mut stamps, rest) = copy(&lane.tables);
            let selected = lane.call(&resident, number % 5 == 0);
            heads[0] = LaneHead { stamp: heads[0].stamp + 1, ..heads[0] };
            for position in selected {
                stamps[(lane.tables.slot(0, position).unwrap() - 640) as usize] = heads[0].stamp;
            }
            assert_eq!(copy(&lane.tables), (heads, stamps, rest));
        }
    }
}
