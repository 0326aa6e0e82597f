//! The expected result of the kernels: the rule of `residency`, and rows copied one by one.

use crate::image::Extents;
use forebay::GROUP_MAX;
use forebay::Kind;
use forebay::device::descriptor::{Cause, Entry};
use forebay::residency::{
    Answered, Divider, Fetch, LayerTables, Moved, Portable, QueryRange, Selected, Workspace,
};
use std::collections::BTreeSet;

/// Trust in a lane, as the kernels write it.
pub const SOUND: u32 = 0;
pub const FAILED: u32 = 1;
const BYTES: u32 = 2;

/// The misses of a batch row's last resolve.
#[derive(Clone, Debug, Default)]
pub struct List {
    pub fetches: Vec<Fetch>,
    pub scratch: usize,
    share: usize,
    /// For each layer of the group, the waves that were gathered.
    passed: [usize; GROUP_MAX as usize],
    of: (usize, u32, u32, u64),
    lane: u32,
}

impl List {
    /// The first layer of which nothing was gathered, or else the first that lacks a wave.
    fn missing(&self, step: u64, extents: &Extents) -> Option<(usize, Cause)> {
        if extents.residency_only || self.of.3 != step || self.fetches.is_empty() {
            return None;
        }
        let waves = self.scratch.div_ceil(self.share.max(1)).max(1);
        let layers = extents.layers_of(extents.table_of(self.of.0)).zip(self.passed);
        let (nothing, some): (Vec<_>, Vec<_>) = layers.partition(|(_, passed)| *passed == 0);
        let first = nothing.first().or_else(|| some.iter().find(|(_, passed)| *passed < waves));
        first.map(|(layer, passed)| (*layer, ungathered(*passed)))
    }
}

fn ungathered(passed: usize) -> Cause {
    if passed == 0 { Cause::NotGathered } else { Cause::WaveNotGathered }
}

/// The part of a step that an operation works on.
#[derive(Clone, Copy, Debug)]
pub struct StepRange {
    pub layer: usize,
    pub first: u32,
    pub count: u32,
    pub rows: QueryRange,
}

/// The output of a resolve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// `[count][rows][k]`.
    pub slots: Vec<i32>,
    /// `[1 + waves][batch][rows][k]`; batch rows outside the part are left as they were.
    pub lists: Vec<i32>,
    /// `[1 + waves][batch][rows]`.
    pub counts: Vec<u32>,
}

pub struct Model {
    pub extents: Extents,
    pub tables: Vec<LayerTables>,
    /// By layer, as the rows and the counts.
    pub slabs: Vec<Vec<u32>>,
    pub rows: Vec<Vec<u32>>,
    pub pages: Vec<Vec<u32>>,
    pub trust: Vec<u32>,
    pub lists: Vec<List>,
    pub counts: Vec<[u32; 3]>,
    pub lengths: Vec<u32>,
    pub sticky: u64,
    pub entries: Vec<Entry>,
    pub step: u64,
    /// Query rows that were resolved and scattered, by batch row and layer.
    pub done: Vec<[BTreeSet<u32>; 2]>,
    /// Rows that resizes have moved since the last report.
    pub moved: u32,
    failed: Vec<bool>,
    work: Workspace,
    divider: Divider,
}

impl Model {
    pub fn new(extents: &Extents) -> Model {
        let (shape, layers) = (extents.shapes[0], extents.geometries.len());
        Model {
            tables: extents.shapes.iter().map(|shape| LayerTables::new(*shape).unwrap()).collect(),
            slabs: (0..layers).map(|layer| vec![0; extents.slab_words(layer)]).collect(),
            rows: (0..layers).map(|layer| vec![0; extents.row_words(layer)]).collect(),
            pages: vec![vec![u32::MAX; extents.lane_pages as usize]; shape.lanes as usize],
            trust: vec![SOUND; shape.lanes as usize],
            lists: vec![List::default(); extents.batch as usize],
            counts: vec![[0; 3]; layers],
            lengths: Vec::new(),
            sticky: u64::MAX,
            entries: Vec::new(),
            step: 0,
            done: vec![Default::default(); extents.batch as usize * layers],
            moved: 0,
            failed: Vec::new(),
            work: Workspace::new(&extents.largest(), shape.query_rows * extents.top_k()).unwrap(),
            divider: Divider::new(extents.largest().slots()).unwrap(),
            extents: extents.clone(),
        }
    }

    fn blame(&mut self, lane: u32, stage: u64, (layer, row): (usize, usize), cause: Cause, value: u32) {
        let place = (layer as u64) << 51 | (row as u64) << 36;
        self.sticky = self.sticky.min(stage << 63 | place | (cause as u64) << 32 | u64::from(value));
        if let Some(trust) = self.trust.get_mut(lane as usize) {
            *trust = (*trust).max(if cause == Cause::NotGathered { BYTES } else { FAILED });
        }
    }

    fn done(&mut self, row: usize, layer: usize) -> &mut [BTreeSet<u32>; 2] {
        &mut self.done[row * self.slabs.len() + layer]
    }

    /// The words that record the calls made, for the rows of the step.
    pub fn marks(&self) -> Vec<u32> {
        let words = self.extents.shapes[0].query_rows.div_ceil(32);
        let set = |done: &BTreeSet<u32>, word: u32| {
            done.iter().filter(|query| **query / 32 == word).fold(0, |bits, query| bits | 1 << (query % 32))
        };
        let rows = &self.done[..self.entries.len() * self.slabs.len()];
        rows.iter().flatten().flat_map(|done| (0..words).map(move |word| set(done, word))).collect()
    }

    fn take_pages(&mut self, lane: u32, pages: &[u32]) {
        let table = &mut self.pages[lane as usize];
        table.fill(u32::MAX);
        for (entry, page) in table.iter_mut().zip(pages).filter(|(_, page)| **page < self.extents.host_pages)
        {
            *entry = *page;
        }
    }

    pub fn join(&mut self, lane: u32, blocks: &[Vec<u32>], budgets: &[u32], length: u32, pages: &[u32]) {
        self.take_pages(lane, pages);
        self.trust[lane as usize] = SOUND;
        for (tables, (blocks, budget)) in self.tables.iter_mut().zip(blocks.iter().zip(budgets)) {
            tables.join(lane, blocks, *budget, length).unwrap();
        }
    }

    pub fn leave(&mut self, lane: u32) {
        self.tables.iter_mut().for_each(|tables| tables.leave(lane));
    }

    pub fn truncate(&mut self, lane: u32, settle: u32, length: u32, pages: &[u32]) {
        let trust = std::mem::replace(&mut self.trust[lane as usize], SOUND);
        for table in 0..self.tables.len() {
            assert!(self.accept(table, lane, settle, 0));
            if trust == BYTES {
                self.tables[table].empty(lane);
            }
            self.tables[table].truncate(lane, length).unwrap();
        }
        self.take_pages(lane, pages);
    }

    /// Warms up some tables, with the selections of these.
    pub fn warm(
        &mut self,
        lane: u32,
        whole: bool,
        selections: &[i32],
        steps: usize,
        which: std::ops::Range<u32>,
    ) {
        let k = self.extents.top_k() as usize;
        let tables = self.tables.iter_mut().skip(which.start as usize).take(which.len());
        for (table, tables) in tables.enumerate() {
            if whole {
                tables.bring_up(lane);
            }
            for selection in selections[table * steps * k..(table + 1) * steps * k].chunks_exact(k) {
                let mut slots = vec![0; k];
                let mut fetches = vec![Fetch { position: 0, slot: 0 }; k];
                let selected = Selected { selection, slots: &mut slots, fetches: &mut fetches };
                match tables.warm(&Portable, lane, selected, &mut self.work) {
                    Ok(_) => {}
                    Err(used_up) if used_up.kind() == Kind::Exhausted => break,
                    Err(wrong) => panic!("{wrong}"),
                }
            }
        }
    }

    /// Of each table the positions of a lane's newest rows.
    pub fn newest(&mut self, lane: u32) -> Vec<i32> {
        let mut all = vec![7; self.tables.len() * self.extents.top_k() as usize];
        for (tables, positions) in self.tables.iter().zip(all.chunks_mut(self.extents.top_k() as usize)) {
            tables.newest(&Portable, lane, &mut self.work, positions).unwrap();
        }
        all
    }

    pub fn warm_gather(&mut self, lane: u32, first: u64, count: u64) {
        let slots = (0..self.slabs.len()).flat_map(|layer| {
            let budget = self.tables[self.extents.table_of(layer)].head(lane).unwrap().budget;
            (0..budget).map(move |place| (layer, place))
        });
        let stretch: Vec<(usize, u32)> = slots.skip(first as usize).take(count as usize).collect();
        for (layer, place) in stretch {
            let tables = &self.tables[self.extents.table_of(layer)];
            let fetches: Vec<Fetch> = tables.residents(lane, place, 1).collect();
            for fetch in fetches {
                if !self.move_row(layer, lane, fetch, false) {
                    self.trust[lane as usize] = BYTES;
                }
            }
        }
    }

    pub fn load(&mut self, step: u64, entries: &[Entry]) {
        (self.step, self.sticky) = (step, u64::MAX);
        self.counts.fill([0; 3]);
        let lane = |row: usize| entries[row].lane;
        let lanes = self.trust.len() as u32;
        let trust = |entry: &Entry| self.trust.get(entry.lane as usize).is_some_and(|t| *t != SOUND);
        self.failed = entries.iter().map(trust).collect();
        self.lengths =
            entries.iter().map(|e| self.tables[0].head(e.lane).map_or(0, |head| head.length)).collect();
        let wrong = |row: &usize| lane(*row) >= lanes || (0..*row).any(|before| lane(before) == lane(*row));
        self.entries = entries.to_vec();
        if let Some(row) = (0..entries.len()).find(wrong) {
            for entry in entries {
                self.blame(entry.lane, 0, (0, row), Cause::Tables, lane(row));
            }
            self.entries.clear();
        }
    }

    /// Accepts landed rows in one table; false if that is impossible.
    fn accept(&mut self, table: usize, lane: u32, accepted: u32, next: u32) -> bool {
        let mut moves = Vec::new();
        let done = self.tables[table].commit(&Portable, lane, accepted, next, |moved| moves.push(moved));
        self.copy_slots(table, &moves);
        done.is_ok()
    }

    /// Changes a lane's budget in one table.
    pub fn resize(&mut self, table: usize, lane: u32, blocks: &[u32], budget: u32) {
        let mut moves = Vec::new();
        let copy = |moved| moves.push(moved);
        let done = self.tables[table].resize(&Portable, lane, blocks, budget, &mut self.work, copy);
        assert_eq!(done.unwrap().moved as usize, moves.len());
        self.moved += (moves.len() * self.extents.members[table]) as u32;
        if !self.extents.residency_only {
            self.copy_slots(table, &moves);
        }
    }

    /// In every layer of a table.
    fn copy_slots(&mut self, table: usize, moves: &[Moved]) {
        for (layer, moved) in self.extents.layers_of(table).flat_map(|l| moves.iter().map(move |m| (l, m))) {
            let [from, to] = [moved.from, moved.to].map(|slot| self.extents.geometries[layer].pieces(slot));
            for (from, to) in from.iter().zip(to) {
                let start = (from.slab / 4) as usize;
                let end = start + (from.bytes / 4) as usize;
                self.slabs[layer].copy_within(start..end, (to.slab / 4) as usize);
            }
        }
    }

    pub fn commit(&mut self, accepted: &[u32]) {
        for table in 0..self.tables.len() {
            let layers = self.extents.layers_of(table);
            for (row, entry) in self.entries.clone().into_iter().enumerate() {
                layers.clone().for_each(|layer| *self.done(row, layer) = Default::default());
                let count = if entry.accepted == u32::MAX { accepted[row] } else { entry.accepted };
                let landed = self.tables[table].head(entry.lane).map_or(0, |head| head.landed);
                let failed = self.failed[row];
                let (cause, believed) = match count <= landed {
                    _ if failed => (Cause::Earlier, 0),
                    true => (Cause::Tables, count),
                    false => (Cause::Accepted, 0),
                };
                let done = self.accept(table, entry.lane, believed, entry.query_rows);
                if failed || !done || believed != count {
                    self.blame(entry.lane, 0, (layers.start, row), cause, count);
                }
                if table == 0 {
                    self.lengths[row] = self.tables[0].head(entry.lane).map_or(0, |head| head.length);
                }
            }
        }
    }

    /// Fills the entries of `output` that belong to the part's rows.
    pub fn resolve(&mut self, range: &StepRange, selection: &[i32], output: &mut Output) {
        let per_row = range.rows.count as usize * self.extents.top_k() as usize;
        let (batch, rows) = (self.extents.batch as usize, range.rows.count as usize);
        let members = self.extents.layers_of(self.extents.table_of(range.layer));
        let lists = 1 + self.extents.shape_of(range.layer).waves as usize;
        for index in 0..range.count as usize {
            let row = range.first as usize + index;
            for list in 0..lists {
                let first = (list * batch + row) * rows;
                output.counts[first..first + rows].fill(0);
                let k = self.extents.top_k() as usize;
                output.lists[first * k..(first + rows) * k].fill(-1);
            }
            let missing = self.lists[row].missing(self.step, &self.extents);
            let of = (range.layer, range.rows.first, range.rows.count, self.step);
            self.lists[row] = List { of, share: self.lists[row].share, ..List::default() };
            output.slots[index * per_row..][..per_row].fill(-1);
            if let Some(entry) = self.entries.get(row).copied() {
                for layer in members.clone() {
                    self.done(row, layer)[0].extend(range.rows.first..range.rows.first + range.rows.count);
                }
                if let Some((_, cause)) = missing {
                    self.blame(entry.lane, 1, (range.layer, row), cause, range.layer as u32);
                }
                self.resolve_row(range, row, entry, &selection[index * per_row..][..per_row], index, output);
            }
        }
    }

    fn resolve_row(
        &mut self,
        range: &StepRange,
        row: usize,
        entry: Entry,
        selection: &[i32],
        index: usize,
        output: &mut Output,
    ) {
        let k = self.extents.top_k() as usize;
        let count = entry.query_rows.saturating_sub(range.rows.first).min(range.rows.count);
        if count == 0 {
            return;
        }
        let asked = count as usize * k;
        let slots = &mut output.slots[index * selection.len()..][..asked];
        let selection = &selection[..asked];
        let mut fetches = vec![Fetch { position: 0, slot: 0 }; asked];
        let rows = QueryRange { first: range.rows.first, count };
        let selected = Selected { selection, slots: &mut *slots, fetches: &mut fetches };
        let table = self.extents.table_of(range.layer);
        let tables = &mut self.tables[table];
        let Ok(done) = tables.resolve(&Portable, entry.lane, rows, selected, &mut self.work) else {
            slots.fill(-1);
            self.blame(entry.lane, 1, (range.layer, row), Cause::Tables, entry.lane);
            return;
        };
        fetches.truncate(done.counts.misses as usize);
        let scratch = done.counts.scratch as usize;
        let answered = Answered { selection, slots, fetches: &fetches, scratch };
        let (batch, all) = (self.extents.batch as usize, range.rows.count as usize);
        self.divider
            .divide(tables.shape(), &answered, k, |query, list, slot| {
                let at = (list * batch + row) * all + query;
                output.lists[at * k + output.counts[at] as usize] = slot;
                output.counts[at] += 1;
            })
            .unwrap();
        let share = tables.shape().scratch as usize;
        let list = &mut self.lists[row];
        (list.fetches, list.scratch, list.share, list.lane) = (fetches, scratch, share, entry.lane);
        let counts = [done.counts.hits, done.counts.misses, done.counts.scratch];
        for layer in self.extents.layers_of(table) {
            self.counts[layer].iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        if let Some(beyond) = done.beyond {
            self.blame(entry.lane, 1, (range.layer, row), Cause::BeyondLength, beyond.position);
        }
    }

    pub fn gather(&mut self, range: &StepRange, wave: usize) {
        let first = self.extents.layers_of(self.extents.table_of(range.layer)).start;
        let member = range.layer - first;
        for row in range.first as usize..((range.first + range.count) as usize).min(self.entries.len()) {
            let list = self.lists[row].clone();
            let passed = list.passed[member];
            let mut cause = (wave > passed).then(|| ungathered(passed));
            if list.of != (first, range.rows.first, range.rows.count, self.step) {
                cause = Some(Cause::NotGathered);
            }
            if let Some(cause) = cause {
                let lane = self.entries[row].lane;
                self.blame(lane, 1, (range.layer, row), cause, range.layer as u32);
                continue;
            }
            for (rank, fetch) in list.fetches.iter().enumerate() {
                let of = if rank < list.scratch { rank / list.share } else { 0 };
                if of == wave && !self.move_row(range.layer, list.lane, *fetch, false) {
                    self.blame(list.lane, 1, (range.layer, row), Cause::Tables, fetch.position);
                    self.trust[list.lane as usize] = BYTES;
                }
            }
            self.lists[row].passed[member] = passed.max(wave + 1);
        }
    }

    pub fn scatter(&mut self, range: &StepRange) {
        for row in range.first as usize..((range.first + range.count) as usize).min(self.entries.len()) {
            let lane = self.entries[row].lane;
            self.done(row, range.layer)[1].extend(range.rows.first..range.rows.first + range.rows.count);
            for query in range.rows.first..range.rows.first + range.rows.count {
                let tables = &self.tables[self.extents.table_of(range.layer)];
                let Some(landing) = tables.landing(lane, query) else { continue };
                if !self.move_row(range.layer, lane, landing, true) {
                    self.blame(lane, 1, (range.layer, row), Cause::Tables, landing.position);
                }
            }
        }
    }

    /// Copies a row between its slot and the total pool; false if the lane has no page for it.
    fn move_row(&mut self, layer: usize, lane: u32, fetch: Fetch, down: bool) -> bool {
        let g = &self.extents.geometries[layer];
        let page = self.pages[lane as usize].get((fetch.position / g.page_tokens()) as usize).copied();
        let Some(page) = page.filter(|page| *page < self.extents.host_pages) else { return false };
        let host = g.host_offset(page, fetch.position % g.page_tokens());
        for piece in g.pieces(fetch.slot) {
            let (host, slab) = ((host as usize + piece.row as usize) / 4, piece.slab as usize / 4);
            let words = piece.bytes as usize / 4;
            let (host, slab) =
                (&mut self.rows[layer][host..][..words], &mut self.slabs[layer][slab..][..words]);
            if down { host.copy_from_slice(slab) } else { slab.copy_from_slice(host) }
        }
        true
    }

    /// The words of the step's report.
    pub fn report(&mut self) -> Vec<u32> {
        for row in 0..self.entries.len() {
            if let Some((layer, cause)) = self.lists[row].missing(self.step, &self.extents) {
                self.blame(self.entries[row].lane, 1, (layer, row), cause, layer as u32);
            }
        }
        let layers = self.slabs.len();
        for (row, layer) in (0..self.entries.len()).flat_map(|row| (0..layers).map(move |l| (row, l))) {
            let entry = self.entries[row];
            let most = entry.query_rows.min(self.extents.shape_of(layer).query_rows);
            let [resolved, scattered] = self.done(row, layer).clone();
            let undone = |done: &BTreeSet<u32>| (0..most).find(|query| !done.contains(query));
            if let Some(query) = undone(&resolved) {
                self.blame(entry.lane, 1, (layer, row), Cause::NotResolved, query);
            } else if let Some(query) = undone(&scattered).filter(|_| !self.extents.residency_only) {
                self.blame(entry.lane, 1, (layer, row), Cause::NotScattered, query);
            }
        }
        let mut words = vec![self.step as u32, (self.step >> 32) as u32];
        let word = self.sticky;
        match word {
            u64::MAX => words.extend([0; 4]),
            _ => words.extend([
                (word >> 32) as u32 & 0xF,
                (word >> 36) as u32 & 0x7FFF,
                (word >> 51) as u32 & 0xFFF,
                word as u32,
            ]),
        }
        let moved = if self.entries.is_empty() { 0 } else { std::mem::take(&mut self.moved) };
        words.extend([moved, 0]);
        words.extend(self.counts.iter().flatten());
        words.extend(&self.lengths);
        words
    }

    /// Positions of a lane that its query row `query` may select.
    pub fn limit(&self, lane: u32, query: u32) -> u32 {
        self.tables[0].head(lane).map_or(0, |head| head.length + query + 1)
    }

    /// Whether a lane has a sequence.
    pub fn is_taken(&self, lane: u32) -> bool {
        self.tables[0].head(lane).is_some_and(|head| head.budget > 0)
    }
}
