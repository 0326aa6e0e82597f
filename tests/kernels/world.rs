//! The kernels and the model together: both run every operation, and the test compares everything after it.

use crate::image::{Extents, Image, Struct};
use crate::model::{FAILED, Model, Output, StepRange};
use forebay::device::descriptor::{Entry, step};
use forebay::residency::{LayerTables, QueryRange, TableWords};
use forebay_standin::{Kernels, Launch, Memory};
use std::collections::BTreeSet;
use std::ffi::CStr;

/// Numbers that differ from seed to seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word >> 32) as u32
    }

    pub fn below(&mut self, end: u32) -> u32 {
        self.next() % end.max(1)
    }

    pub fn one_in(&mut self, of: u32) -> bool {
        self.below(of) == 0
    }
}

/// The way a world's kernels run.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub threads: u32,
    pub seed: u64,
}

pub struct World<'a> {
    pub model: Model,
    pub image: Image,
    kernels: &'a Kernels,
    how: How,
    pub random: Random,
    /// The engine makes a mistake in one of so many operations; 0 for never.
    pub mischief: u32,
    /// The causes of failed steps so far.
    pub causes: BTreeSet<u32>,
    /// The most pages that a lane joins with.
    pub pages: usize,
    steps: u64,
    free: Vec<Vec<u32>>,
    owned: Vec<Vec<Vec<u32>>>,
}

impl<'a> World<'a> {
    pub fn new(kernels: &'a Kernels, extents: &Extents, how: How) -> World<'a> {
        let lanes = extents.shapes[0].lanes as usize;
        let mut world = World {
            model: Model::new(extents),
            image: Image::new(extents),
            kernels,
            how,
            random: Random(how.seed),
            mischief: 0,
            causes: BTreeSet::new(),
            pages: usize::MAX,
            steps: 1 << 33,
            free: extents.shapes.iter().map(|shape| (0..shape.budget_blocks).collect()).collect(),
            owned: vec![vec![Vec::new(); extents.shapes.len()]; lanes],
        };
        for layer in 0..extents.geometries.len() {
            let words: Vec<u32> = (0..extents.row_words(layer)).map(|_| world.random.next()).collect();
            world.image.layers[layer].rows.write(0, &words);
            world.model.rows[layer] = words;
        }
        world
    }

    fn mischief(&mut self) -> bool {
        self.mischief > 0 && self.random.one_in(self.mischief)
    }

    fn run(&mut self, name: &CStr, grid: [u32; 3], shared: u32, args: Struct) {
        let seed = u64::from(self.random.next());
        let launch = Launch { grid, threads: self.how.threads, shared, seed };
        assert!(self.kernels.run(name, launch, &args.0), "{name:?}");
    }

    fn args(&self) -> Struct {
        Struct::default().words(&self.image.pools)
    }

    /// Of kernels of a micro-batch.
    fn of_micro(&self) -> Struct {
        self.args().words(&self.image.micro)
    }

    /// Of kernels of one layer.
    fn of_layer(&self, layer: usize) -> Struct {
        self.args().words(&self.image.layer_words[layer]).words(&self.image.micro)
    }

    /// Bytes of shared memory if the work room is there: `RoomAt`.
    fn room_bytes(&self, room: u32) -> u32 {
        let extents = &self.model.extents;
        4 * [0, extents.work_words(), extents.work_words() + extents.set_words() / 2][room as usize] as u32
    }

    fn tables(&self) -> u32 {
        self.model.tables.len() as u32
    }

    fn staged(&self, length: u32, pages: &[u32]) -> Vec<u32> {
        let mut words = vec![length, pages.len() as u32];
        words.extend(pages);
        words.resize(2 + self.model.extents.lane_pages as usize, 77);
        words
    }

    /// Pages of a lane: enough for all its tokens, all distinct from other lanes'. Sometimes one is beyond the total
    /// pool, or the last ones are missing.
    fn pages_of(&mut self, lane: u32) -> Vec<u32> {
        let pages = self.model.extents.lane_pages;
        let mut own: Vec<u32> = (0..pages).map(|index| (index * 7 + 3) % pages + lane * pages).collect();
        if self.mischief() {
            let page = self.random.below(pages) as usize;
            own[page] = self.model.extents.host_pages + self.random.below(3);
        }
        if self.mischief() {
            own.truncate(self.random.below(pages) as usize);
        }
        own.truncate(self.pages);
        own
    }

    /// Gives a lane to a sequence, if each table has blocks for it.
    pub fn join(&mut self, lane: u32, budgets: &[u32], length: u32) {
        let enough = |(free, budget): (&Vec<u32>, &u32)| free.len() >= budget.div_ceil(64) as usize;
        if self.model.is_taken(lane) || !self.free.iter().zip(budgets).all(enough) {
            return;
        }
        let mut blocks = Vec::new();
        for (free, budget) in self.free.iter_mut().zip(budgets) {
            let (count, turn) = (budget.div_ceil(64) as usize, self.random.below(64) as usize);
            let turn = turn % free.len();
            free.rotate_left(turn);
            blocks.push(free.split_off(free.len() - count));
        }
        let pages = self.pages_of(lane);
        let mut staged = self.staged(length, &pages);
        staged.extend(budgets);
        let most = blocks.iter().map(Vec::len).max().unwrap();
        for blocks in &blocks {
            staged.extend(blocks);
            staged.resize(staged.len() + most - blocks.len(), 1 << 30);
        }
        let staged = Memory::of(&staged);
        let args = self.args().at(&staged).words(&[lane, most as u32]);
        let chunks = 1 + self.random.below(3);
        self.run(c"forebay_join", [self.tables(), chunks, 1], 0, args);
        self.model.join(lane, &blocks, budgets, length, &pages);
        self.owned[lane as usize] = blocks;
        self.compare("join");
    }

    /// Gives a lane to a sequence, which is impossible: no table changes.
    pub fn refused_join(&mut self, lane: u32, budget: u32, length: u32, blocks: &[u32]) {
        let pages = self.pages_of(lane);
        let mut staged = self.staged(length, &pages);
        staged.extend(vec![budget; self.model.tables.len()]);
        (0..self.model.tables.len()).for_each(|_| staged.extend(blocks));
        let staged = Memory::of(&staged);
        let args = self.args().at(&staged).words(&[lane, blocks.len() as u32]);
        self.run(c"forebay_join", [self.tables(), 2, 1], 0, args);
        for tables in &mut self.model.tables {
            tables.join(lane, blocks, budget, length).unwrap_err();
        }
        self.compare("refused join");
    }

    /// Makes a lane one that has made all its steps but `left`.
    pub fn age(&mut self, lane: u32, left: u32) {
        for (image, tables) in self.image.tables.iter().zip(&mut self.model.tables) {
            let mut heads = image.heads();
            heads[lane as usize].stamp = i32::MAX as u32 - 2 - left;
            let words = TableWords { heads: &heads, ..tables.words() };
            *tables = LayerTables::from_words(*tables.shape(), &words).unwrap();
            image.heads.write(7 * lane as usize + 4, &[heads[lane as usize].stamp]);
        }
        self.compare("ageing");
    }

    /// Changes a lane's budgets, if each table has blocks for them.
    pub fn resize(&mut self, lane: u32, budgets: &[u32]) {
        let mut blocks = self.owned[lane as usize].clone();
        for ((blocks, budget), free) in blocks.iter_mut().zip(budgets).zip(&self.free) {
            let count = budget.div_ceil(64) as usize;
            let more = count.saturating_sub(blocks.len());
            if free.len() < more {
                return;
            }
            blocks.truncate(count);
            blocks.extend(&free[free.len() - more..]);
        }
        self.run_resize(lane, budgets, &blocks, blocks.iter().map(Vec::len).max().unwrap());
        for (table, (blocks, budget)) in blocks.into_iter().zip(budgets).enumerate() {
            self.model.resize(table, lane, &blocks, *budget);
            let (own, free) = (&mut self.owned[lane as usize][table], &mut self.free[table]);
            free.retain(|block| !blocks.contains(block));
            free.extend(own.iter().filter(|block| !blocks.contains(block)));
            *own = blocks;
        }
        self.compare("resize");
    }

    /// A resize of which the tables from `refused` on are impossible: their tables stay, and the lane's steps fail.
    pub fn refused_resize(&mut self, lane: u32, budgets: &[u32], blocks: &[Vec<u32>], refused: usize) {
        let most = blocks.iter().map(Vec::len).max().unwrap();
        self.run_resize(lane, budgets, blocks, most);
        for table in 0..refused {
            self.model.resize(table, lane, &blocks[table], budgets[table]);
            self.owned[lane as usize][table] = blocks[table].clone();
        }
        if let Some(trust) = self.model.trust.get_mut(lane as usize) {
            *trust = FAILED.max(*trust);
        }
        self.compare("a refused resize");
    }

    /// Each table's blocks in a place of `most` blocks; beyond them is what no resize may take.
    fn run_resize(&mut self, lane: u32, budgets: &[u32], blocks: &[Vec<u32>], most: usize) {
        let mut staged = self.staged(99, &[]);
        staged.extend(budgets);
        for blocks in blocks {
            staged.extend(blocks);
            staged.resize(staged.len() + most - blocks.len(), 1 << 30);
        }
        let staged = Memory::of(&staged);
        let args = self.args().at(&staged).at(&self.image.moved).words(&[lane, most as u32]);
        self.run(c"forebay_resize", [self.tables(), 1, 1], 0, args);
        assert!(staged.is_fenced());
    }

    /// A lane's blocks in each table.
    pub fn blocks(&self, lane: u32) -> Vec<Vec<u32>> {
        self.owned[lane as usize].clone()
    }

    pub fn leave(&mut self, lane: u32) {
        let args = self.args().words(&[lane, 0]);
        self.run(c"forebay_leave", [self.tables(), 1, 1], 0, args);
        self.model.leave(lane);
        for (free, owned) in self.free.iter_mut().zip(&mut self.owned[lane as usize]) {
            free.append(owned);
        }
        self.compare("leave");
    }

    pub fn truncate(&mut self, lane: u32, settle: u32, length: u32) {
        let pages = self.pages_of(lane);
        let staged = Memory::of(&self.staged(0, &pages));
        let args = self.args().at(&staged).words(&[lane, settle, length, 0]);
        self.run(c"forebay_truncate", [self.tables(), 1, 1], 0, args);
        self.model.truncate(lane, settle, length, &pages);
        self.compare("truncate");
    }

    /// Of all tables at once, or one by one from the last.
    pub fn warm(&mut self, lane: u32, whole: bool, selections: &[i32], steps: usize) {
        let tables = self.tables();
        if self.random.one_in(2) {
            return self.warm_some(lane, whole, selections, steps, 0..tables);
        }
        let each = selections.len() / tables as usize;
        for table in (0..tables).rev() {
            let own = &selections[table as usize * each..][..each];
            self.warm_some(lane, whole, own, steps, table..table + 1);
        }
    }

    fn warm_some(
        &mut self,
        lane: u32,
        whole: bool,
        selections: &[i32],
        steps: usize,
        tables: std::ops::Range<u32>,
    ) {
        let words: Vec<u32> = selections.iter().map(|position| *position as u32).collect();
        let (memory, room) = (Memory::of(&words), self.random.below(3));
        let args = if selections.is_empty() { self.args().long(0) } else { self.args().at(&memory) };
        let args = args.words(&[lane, whole.into(), steps as u32, room, tables.start, 0]);
        let bytes = self.room_bytes(room);
        self.run(c"forebay_warm", [tables.len() as u32, 1, 1], bytes, args);
        self.model.warm(lane, whole, selections, steps, tables);
        self.compare("warm");
    }

    /// Compares the list of a lane's newest rows, which may be any lane.
    pub fn newest(&mut self, lane: u32) -> Vec<i32> {
        let wanted = self.model.newest(lane);
        let positions = Memory::of(&vec![77; wanted.len()]);
        let args = self.args().at(&positions).words(&[lane, 0]);
        self.run(c"forebay_newest", [self.tables(), 1, 1], 0, args);
        let found: Vec<i32> = positions.read().iter().map(|position| *position as i32).collect();
        assert_eq!(found, wanted, "the newest rows of lane {lane}");
        assert!(positions.is_fenced());
        self.compare("newest");
        found
    }

    pub fn warm_gather(&mut self, lane: u32, first: u64, count: u64) {
        let args = self.args().long(first).long(count).words(&[lane, 0]);
        let ctas = 1 + self.random.below(4);
        self.run(c"forebay_warm_gather", [ctas, 1, 1], 0, args);
        self.model.warm_gather(lane, first, count);
        self.compare("warm gather");
    }

    /// Begins a step; `accepted` are the counts on the device.
    pub fn begin(&mut self, entries: &[Entry], accepted: &[u32]) {
        self.steps += 1;
        let mut words = vec![77; step::words(self.model.extents.batch)];
        step::encode(self.steps, entries.iter().copied(), &mut words);
        let (pinned, counts) = (Memory::of(&words), Memory::of(accepted));
        let args = self.of_micro().at(&pinned).at(&self.image.tables[0].heads);
        self.run(c"forebay_load", [1, 1, 1], 0, args);
        self.model.load(self.steps, entries);
        self.compare("load");
        let args = self.of_micro().at(&counts);
        let blocks = 1 + self.random.below(self.model.extents.batch);
        self.run(c"forebay_commit", [self.tables(), blocks, 1], 0, args);
        self.model.commit(accepted);
        self.compare("commit");
        self.land(entries);
    }

    /// The engine writes the new rows.
    fn land(&mut self, entries: &[Entry]) {
        for layer in 0..self.model.slabs.len() {
            let table = self.model.extents.table_of(layer);
            for entry in entries {
                for query in 0..entry.query_rows {
                    let Some(row) = self.model.tables[table].landing(entry.lane, query) else { continue };
                    for piece in self.model.extents.geometries[layer].pieces(row.slot) {
                        let words: Vec<u32> = (0..piece.bytes / 4).map(|_| self.random.next()).collect();
                        let first = piece.slab as usize / 4;
                        self.image.layers[layer].slab.write(first, &words);
                        self.model.slabs[layer][first..first + words.len()].copy_from_slice(&words);
                    }
                }
            }
        }
    }

    fn range_words(range: &StepRange) -> [u32; 5] {
        [range.layer as u32, range.first, range.count, range.rows.first, range.rows.count]
    }

    /// An output that nothing has been written to.
    pub fn empty_output(&self, layer: usize, rows: u32) -> Output {
        let lists = 1 + self.model.extents.shape_of(layer).waves;
        let rows = (lists * self.model.extents.batch * rows) as usize;
        let k = self.model.extents.top_k() as usize;
        Output { slots: Vec::new(), lists: vec![-7; rows * k], counts: vec![7; rows] }
    }

    /// Resolves a part of the step; `output` holds what earlier parts left in the lists.
    pub fn resolve(&mut self, range: &StepRange, selection: &[i32], output: &mut Output) {
        let words = |values: &[i32]| Memory::of(&values.iter().map(|v| *v as u32).collect::<Vec<_>>());
        let back = |memory: &Memory| memory.read().iter().map(|word| *word as i32).collect::<Vec<_>>();
        output.slots = vec![-7; selection.len()];
        let (asked, slots) = (words(selection), words(&output.slots));
        let (lists, counts) = (words(&output.lists), Memory::of(&output.counts));
        let divided = self.model.extents.shape_of(range.layer).waves > 1 || self.random.one_in(2);
        let args = self.of_layer(range.layer).at(&asked).at(&slots);
        let args = if divided { args.at(&lists).at(&counts) } else { args.long(0).long(0) };
        let room = self.random.below(3);
        let args = args.words(&Self::range_words(range));
        let args = args.words(&[self.model.extents.batch, room, 0]);
        let bytes = self.room_bytes(room);
        self.run(c"forebay_resolve", [range.count, 1, 1], bytes, args);
        self.model.resolve(range, selection, output);
        assert_eq!(back(&slots), output.slots, "{range:?} {:?}", self.how);
        if divided {
            assert_eq!(counts.read(), output.counts, "{range:?} {:?}", self.how);
            assert_eq!(back(&lists), output.lists, "{range:?} {:?}", self.how);
        }
        for memory in [&asked, &slots, &lists, &counts] {
            assert!(memory.is_fenced());
        }
        let shape = self.model.extents.shapes[0];
        let selected = (shape.query_rows * self.model.extents.top_k()) as usize;
        for row in range.first as usize..(range.first + range.count) as usize {
            let list = &self.model.lists[row];
            let found = self.image.list(row, selected);
            assert_eq!(found, (list.fetches.clone(), list.scratch), "{range:?} {row} {:?}", self.how);
        }
        self.compare("resolve");
    }

    pub fn gather(&mut self, range: &StepRange, wave: u32) {
        let args = self.of_layer(range.layer).words(&Self::range_words(range)).words(&[wave]);
        let name = if self.random.one_in(2) { c"forebay_gather" } else { c"forebay_gather_bulk" };
        let ctas = 1 + self.random.below(5);
        self.run(name, [ctas, 1, 1], 0, args);
        self.model.gather(range, wave as usize);
        self.compare("gather");
    }

    pub fn scatter(&mut self, range: &StepRange) {
        let args = self.of_layer(range.layer).words(&Self::range_words(range)).words(&[0]);
        let ctas = 1 + self.random.below(3);
        self.run(c"forebay_scatter", [ctas, 1, 1], 0, args);
        self.model.scatter(range);
        self.compare("scatter");
    }

    pub fn report(&mut self) {
        let expected = self.model.report();
        self.causes.insert(expected[2]);
        let slot = Memory::new(expected.len());
        let rows = self.model.extents.shapes[0].query_rows;
        let args = self.of_micro().at(&slot).at(&self.image.moved).words(&[rows, 0]);
        self.run(c"forebay_report", [1, 1, 1], 0, args);
        assert!(slot.is_fenced());
        assert_eq!(slot.read(), expected, "{:?}", self.how);
        self.compare("report");
    }

    /// All words of the tables, all bytes, and the digests.
    pub fn compare(&mut self, after: &str) {
        let place = |what: &str, of: usize| format!("{what} of {of} after {after}, {:?}", self.how);
        for (table, (image, tables)) in self.image.tables.iter().zip(&self.model.tables).enumerate() {
            let words = tables.words();
            let base = tables.shape().budget_base as usize;
            assert_eq!(image.heads(), words.heads, "{}", place("heads", table));
            assert_eq!(image.slot_of.read(), words.slot_of, "{}", place("map", table));
            assert_eq!(image.position_of.read(), words.position_of, "{}", place("positions", table));
            assert_eq!(image.stamp_of.read()[base..], words.stamp_of[base..], "{}", place("stamps", table));
            assert_eq!(image.blocks.read(), words.blocks, "{}", place("blocks", table));
        }
        for (layer, image) in self.image.layers.iter().enumerate() {
            assert!(image.slab.holds(&self.model.slabs[layer]), "{}", place("slab", layer));
            assert!(image.rows.holds(&self.model.rows[layer]), "{}", place("rows", layer));
        }
        assert_eq!(self.image.moved.read(), [self.model.moved], "rows moved after {after}, {:?}", self.how);
        assert_eq!(self.image.trust.read(), self.model.trust, "trust after {after}, {:?}", self.how);
        assert_eq!(self.image.pages.read(), self.model.pages.concat(), "pages after {after}");
        let sticky = self.image.sticky.read();
        let sticky = u64::from(sticky[1]) << 32 | u64::from(sticky[0]);
        if self.model.step > 0 {
            assert_eq!(sticky, self.model.sticky, "sticky word after {after}, {:?}", self.how);
        }
        let marks = self.model.marks();
        if after != "load" {
            let found = self.image.marks.read();
            assert_eq!(found[..marks.len()], marks, "calls recorded after {after}, {:?}", self.how);
        }
        let first = self.image.first.read();
        assert!(first.iter().all(|row| *row == 0), "rows by lane after {after}");
        assert!(self.image.is_fenced(), "a write outside after {after}, {:?}", self.how);
    }

    /// The lanes' digests, as the kernel sums them.
    pub fn compare_digests(&mut self) {
        for lane in 0..self.model.trust.len() as u32 {
            let sum = Memory::new(2);
            let args = self.args().at(&sum).words(&[lane, 0]);
            self.run(c"forebay_digest", [self.tables(), 1, 1], 0, args);
            let expected = self.model.tables.iter().enumerate().fold(0_u64, |all, (table, tables)| {
                all.wrapping_add(tables.digest(lane).wrapping_mul(2 * table as u64 + 1))
            });
            assert_eq!(sum.read(), [expected as u32, (expected >> 32) as u32]);
        }
    }

    /// Positions near a wandering centre, with repetitions, -1, and sometimes an invalid one.
    pub fn selection(&mut self, limit: u32, spread: u32) -> Vec<i32> {
        let centre = self.random.below(limit);
        let k = self.model.extents.top_k();
        let position = |world: &mut Self| match world.random.below(10) {
            0 => -1,
            _ if limit == 0 => -1,
            _ if world.mischief() && world.random.one_in(8) => {
                limit as i32 + (world.random.next() as i32 >> (world.random.below(31)))
            }
            _ => ((centre + world.random.below(spread)) % limit) as i32,
        };
        (0..k).map(|_| position(self)).collect()
    }

    /// The selections of a part of the step, by the positions that each query row may see.
    pub fn selections(&mut self, range: &StepRange, entries: &[Entry], spread: u32) -> Vec<i32> {
        let mut all = Vec::new();
        for row in range.first..range.first + range.count {
            for query in range.rows.first..range.rows.first + range.rows.count {
                let lane = entries.get(row as usize).map_or(0, |entry| entry.lane);
                let limit = self.model.limit(lane, query);
                all.extend(self.selection(limit, spread));
            }
        }
        all
    }

    /// A step of some lanes with all its layers, parts and waves.
    pub fn step(&mut self) {
        let (entries, accepted) = self.entries();
        self.step_of(&entries, &accepted);
    }

    /// A step of these lanes.
    pub fn step_of(&mut self, entries: &[Entry], accepted: &[u32]) {
        self.begin(entries, accepted);
        for table in 0..self.model.tables.len() {
            self.group(table, entries);
        }
        self.report();
    }

    fn entries(&mut self) -> (Vec<Entry>, Vec<u32>) {
        let extents = self.model.extents.clone();
        let mut lanes: Vec<u32> = (0..extents.shapes[0].lanes).collect();
        let turn = self.random.below(extents.shapes[0].lanes) as usize;
        lanes.rotate_left(turn);
        lanes.retain(|lane| self.model.is_taken(*lane));
        lanes.truncate(1 + self.random.below(extents.batch) as usize);
        if self.mischief() {
            lanes.push([99, 0, 1][self.random.below(3) as usize]);
            lanes.truncate(extents.batch as usize);
        }
        let mut counts = vec![5; extents.batch as usize];
        let mut entries = Vec::new();
        for (row, lane) in lanes.into_iter().enumerate() {
            let head = self.model.tables[0].head(lane).copied().unwrap_or_default();
            let most = head.landed + u32::from(self.mischief());
            let accepted = self.random.below(most + 1);
            let left = extents.shapes[0].tokens - head.length - head.landed.min(accepted);
            let query_rows = self.random.below(extents.shapes[0].query_rows + 1).min(left);
            let query_rows = query_rows + 9 * u32::from(self.mischief());
            counts[row] = accepted;
            let accepted = if self.random.one_in(3) { u32::MAX } else { accepted };
            entries.push(Entry { lane, accepted, query_rows });
        }
        (entries, counts)
    }

    /// The layers of a table: all rows are resolved in the first, then every layer gathers and scatters by parts of its
    /// own.
    fn group(&mut self, table: usize, entries: &[Entry]) {
        let shape = self.model.extents.shapes[table];
        let (layers, batch) = (self.model.extents.layers_of(table), self.model.extents.batch);
        // A draft layer runs one draft pass per row; an ordinary layer takes all rows at once.
        let calls: Vec<QueryRange> = match self.random.one_in(3) {
            true => (0..shape.query_rows).map(|first| QueryRange { first, count: 1 }).collect(),
            false => vec![QueryRange { first: 0, count: shape.query_rows }],
        };
        let spread = [10, 60, 400][self.random.below(3) as usize];
        for rows in calls {
            let mut parts = self.parts(layers.start, rows);
            let mut output = self.empty_output(layers.start, rows.count);
            parts.retain(|_| self.mischief == 0 || !self.random.one_in(20));
            for range in &parts {
                let selection = self.selections(range, entries, spread);
                self.resolve(range, &selection, &mut output);
            }
            for layer in layers.clone() {
                if layer > layers.start {
                    parts = self.parts(layer, rows);
                }
                for range in &parts {
                    for wave in 0..shape.waves {
                        if self.mischief == 0 || !self.random.one_in(15) {
                            self.gather(range, wave);
                        }
                    }
                    if self.mischief == 0 || !self.random.one_in(15) {
                        self.scatter(range);
                    }
                }
                // Also before the layers of its own group are through.
                if self.mischief > 0 && self.random.one_in(30) {
                    let range = StepRange {
                        layer: self.random.below(self.model.slabs.len() as u32) as usize,
                        first: 0,
                        count: batch,
                        rows,
                    };
                    let wave = self.random.below(3);
                    self.gather(&range, wave);
                }
            }
        }
    }

    /// One or two parts of the batch.
    fn parts(&mut self, layer: usize, rows: QueryRange) -> Vec<StepRange> {
        let batch = self.model.extents.batch;
        let half = self.random.below(batch + 1);
        let range = |first: u32, end: u32| StepRange { layer, first, count: end - first, rows };
        [range(0, half), range(half, batch)].into_iter().filter(|range| range.count > 0).collect()
    }
}
