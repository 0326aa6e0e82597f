//! A cache's tables and memory as the kernels read them, laid out by hand according to `abi.h`.

use forebay::Geometry;
use forebay::residency::{Fetch, LaneHead, TableShape};
use forebay_standin::Memory;
use std::ops::Range;

/// The declared sizes of a cache.
#[derive(Clone, Debug)]
pub struct Extents {
    /// For each layer.
    pub geometries: Vec<Geometry>,
    /// For each table, the number of its layers. They follow those of the table before.
    pub members: Vec<usize>,
    /// For each table.
    pub shapes: Vec<TableShape>,
    pub batch: u32,
    pub lane_pages: u32,
    pub host_pages: u32,
    pub residency_only: bool,
    /// Words by which slabs and rows are offset from a multiple of 128 bytes.
    pub skew: [usize; 2],
}

impl Extents {
    pub fn top_k(&self) -> u32 {
        self.geometries[0].shape().top_k
    }

    pub fn page_tokens(&self) -> u32 {
        self.geometries[0].page_tokens()
    }

    /// The layers of a table.
    pub fn layers_of(&self, table: usize) -> Range<usize> {
        let first = self.members[..table].iter().sum();
        first..first + self.members[table]
    }

    /// The table of a layer.
    pub fn table_of(&self, layer: usize) -> usize {
        (0..self.members.len()).find(|table| self.layers_of(*table).contains(&layer)).unwrap()
    }

    /// The shape of a layer's table.
    pub fn shape_of(&self, layer: usize) -> &TableShape {
        &self.shapes[self.table_of(layer)]
    }

    pub fn largest(&self) -> TableShape {
        *self.shapes.iter().max_by_key(|shape| shape.budget_blocks).unwrap()
    }

    pub fn slab_words(&self, layer: usize) -> usize {
        (self.shape_of(layer).slots().div_ceil(64) * self.geometries[layer].block_bytes() / 4) as usize
    }

    pub fn row_words(&self, layer: usize) -> usize {
        (self.geometries[layer].host_page_bytes() / 4) as usize * self.host_pages as usize
    }

    pub fn missed_words(&self) -> usize {
        self.shapes[0].tokens.div_ceil(32) as usize
    }

    pub fn set_words(&self) -> usize {
        2 * self.shapes.iter().map(TableShape::lane_blocks).max().unwrap() as usize
    }

    pub fn work_words(&self) -> usize {
        self.missed_words() + 2 * self.set_words()
    }

    /// How a layer's rows are copied if the first row is at `rows` and slots begin at `slab`: bytes of a piece, numbers
    /// of a row's pieces, and the mask of its place in a line. `lines` numbers them by lines, if rows are not much
    /// shorter.
    fn pieces(&self, layer: usize, slab: u64, rows: u64, lines: bool) -> [u32; 3] {
        let g = &self.geometries[layer];
        let stride = u64::from(g.host_stride());
        let all =
            [slab, rows, stride, g.block_bytes().into(), g.shape().runs[0].into(), g.shape().runs[1].into()];
        let bytes = [16, 8, 4].into_iter().find(|size| all.iter().all(|n| n % size == 0)).unwrap();
        let row = u64::from(g.row_bytes());
        let touched = |at: u64| (at + row - 1) / 128 - at / 128 + 1;
        let most = (0..128).map(|index| touched(rows + index * stride)).max().unwrap();
        match lines {
            true => [bytes as u32, (most * 128 / bytes) as u32, 127],
            false => [bytes as u32, (row / bytes) as u32, 0],
        }
    }
}

/// One table, of the layers that share a selection.
pub struct TableImage {
    pub heads: Memory,
    pub slot_of: Memory,
    pub position_of: Memory,
    pub stamp_of: Memory,
    pub blocks: Memory,
}

/// One layer.
pub struct LayerImage {
    pub slab: Memory,
    pub rows: Memory,
}

/// A cache with one micro-batch.
pub struct Image {
    pub tables: Vec<TableImage>,
    pub layers: Vec<LayerImage>,
    /// The kernels' arguments by value, as words.
    pub pools: Vec<u32>,
    pub micro: Vec<u32>,
    pub layer_words: Vec<Vec<u32>>,
    pub pages: Memory,
    pub trust: Memory,
    pub block: Memory,
    pub counts: Memory,
    pub lengths: Memory,
    pub sticky: Memory,
    pub lists: Memory,
    pub fetches: Memory,
    pub first: Memory,
    pub marks: Memory,
    /// Rows that resizes have moved since the last report.
    pub moved: Memory,
    others: Vec<Memory>,
}

/// Words of a struct of the kernels.
#[derive(Default)]
pub struct Struct(pub Vec<u32>);

impl Struct {
    pub fn long(mut self, value: u64) -> Struct {
        self.0.extend([value as u32, (value >> 32) as u32]);
        self
    }

    pub fn at(self, memory: &Memory) -> Struct {
        self.long(memory.address())
    }

    pub fn words(mut self, words: &[u32]) -> Struct {
        self.0.extend(words);
        self
    }
}

impl TableImage {
    fn new(shape: &TableShape) -> TableImage {
        let slots = shape.budget_blocks as usize * 64;
        TableImage {
            heads: Memory::new(8 * shape.lanes as usize),
            slot_of: Memory::new((shape.lanes * shape.tokens) as usize),
            position_of: Memory::of(&vec![u32::MAX; slots]),
            stamp_of: Memory::of(&vec![i32::MAX as u32; shape.slots() as usize]),
            blocks: Memory::new((shape.lanes * shape.lane_blocks()) as usize),
        }
    }

    fn parts(&self) -> [&Memory; 5] {
        [&self.heads, &self.slot_of, &self.position_of, &self.stamp_of, &self.blocks]
    }

    /// The heads as the rule has them.
    pub fn heads(&self) -> Vec<LaneHead> {
        let head = |w: &[u32]| LaneHead {
            length: w[0],
            landed: w[1],
            budget: w[2],
            blocks: w[3],
            stamp: w[4],
            min_stamp: w[5],
            next_victim: w[6],
            full_places: w[7],
        };
        self.heads.read().chunks_exact(8).map(head).collect()
    }
}

impl LayerImage {
    fn new(extents: &Extents, layer: usize) -> LayerImage {
        LayerImage {
            slab: Memory::skewed(extents.slab_words(layer), extents.skew[0]),
            rows: Memory::skewed(extents.row_words(layer), extents.skew[1]),
        }
    }

    fn words(&self, of: &Extents, layer: usize, tables: &TableImage) -> Vec<u32> {
        let table = of.table_of(layer);
        let (s, members) = (&of.shapes[table], of.layers_of(table));
        let addresses = tables.parts().into_iter().chain([&self.slab, &self.rows]);
        let words = addresses.fold(Struct::default(), Struct::at);
        let extents = [s.lanes, s.tokens, s.query_rows, s.scratch, s.waves, s.scratch_base, s.landing_base];
        let words = words.words(&extents).words(&[s.budget_base, s.budget_blocks, s.lane_blocks()]);
        // Every second layer's rows are numbered by lines, however small they are.
        let lines = layer.is_multiple_of(2);
        let words = words.words(&of.pieces(layer, self.slab.address(), self.rows.address(), lines));
        let g = &of.geometries[layer];
        let [first, second] = g.shape().runs;
        let members = [members.start as u32, members.len() as u32];
        words.words(&members).words(&[first, second, g.block_bytes(), g.host_stride(), 0]).0
    }
}

impl Image {
    pub fn new(extents: &Extents) -> Image {
        let shape = extents.shapes[0];
        let (tables, layers) = (extents.shapes.len(), extents.geometries.len());
        let batch = extents.batch as usize;
        let selected = (shape.query_rows * extents.top_k()) as usize;
        let table_images: Vec<TableImage> = extents.shapes.iter().map(TableImage::new).collect();
        let images: Vec<LayerImage> = (0..layers).map(|layer| LayerImage::new(extents, layer)).collect();
        let words =
            |layer: usize| images[layer].words(extents, layer, &table_images[extents.table_of(layer)]);
        let layer_words: Vec<_> = (0..layers).map(words).collect();
        let all = Memory::of(&layer_words.concat());
        let firsts = (0..tables).flat_map(|table| layer_words[extents.layers_of(table).start].clone());
        let firsts = Memory::of(&firsts.collect::<Vec<_>>());
        let pages = Memory::of(&vec![u32::MAX; (shape.lanes * extents.lane_pages) as usize]);
        let trust = Memory::new(shape.lanes as usize);
        let block = Memory::new(4 + 3 * batch);
        let (counts, lengths, sticky) = (Memory::new(3 * layers), Memory::new(batch), Memory::new(2));
        let (failed, lists) = (Memory::new(batch), Memory::new(18 * batch));
        let fetches = Memory::new(4 * selected * batch);
        let work = Memory::new(extents.work_words() * batch);
        let first = Memory::new(shape.lanes as usize);
        let marks = Memory::new(batch * layers * 2 * shape.query_rows.div_ceil(32) as usize);
        let parts = [&block, &counts, &lengths, &sticky, &failed, &lists, &fetches, &work, &first, &marks];
        let micro = parts.into_iter().fold(Struct::default(), Struct::at).0;
        let warm_fetches = Memory::new(4 * extents.top_k() as usize * tables);
        let warm_work = Memory::new(extents.work_words() * tables);
        let parts = [&all, &firsts, &pages, &trust, &warm_fetches, &warm_work];
        let pools = parts.into_iter().fold(Struct::default(), Struct::at);
        let pools = pools.words(&[
            layers as u32,
            tables as u32,
            shape.lanes,
            extents.lane_pages,
            extents.batch,
            extents.top_k(),
            selected as u32,
            extents.work_words() as u32,
            extents.missed_words() as u32,
            extents.set_words() as u32,
            extents.page_tokens(),
            extents.host_pages,
            if extents.residency_only { 1 } else { 7 },
            0,
        ]);
        Image {
            tables: table_images,
            layers: images,
            pools: pools.0,
            micro,
            layer_words,
            pages,
            trust,
            block,
            counts,
            lengths,
            sticky,
            lists,
            fetches,
            first,
            marks,
            moved: Memory::new(1),
            others: vec![all, firsts, failed, work, warm_fetches, warm_work],
        }
    }

    /// The misses of a batch row's last resolve: the rows, and how many are in scratch slots.
    pub fn list(&self, row: usize, selected: usize) -> (Vec<Fetch>, usize) {
        let list = self.lists.read();
        let [count, scratch] = [list[18 * row + 2], list[18 * row + 3]].map(|word| word as usize);
        let fetches = self.fetches.read();
        let words = &fetches[4 * row * selected..][..4 * count];
        let fetches = words.chunks_exact(4).map(|w| Fetch { position: w[2], slot: w[3] }).collect();
        (fetches, scratch)
    }

    /// Whether all writes stayed inside.
    pub fn is_fenced(&self) -> bool {
        let tables = self.tables.iter().flat_map(TableImage::parts);
        let layers = self.layers.iter().flat_map(|layer| [&layer.slab, &layer.rows]);
        let own = [&self.pages, &self.trust, &self.block, &self.counts, &self.lengths];
        let lists = [&self.sticky, &self.lists, &self.fetches, &self.first, &self.marks, &self.moved];
        tables.chain(layers).all(Memory::is_fenced)
            && own.into_iter().chain(lists).chain(&self.others).all(Memory::is_fenced)
    }
}
