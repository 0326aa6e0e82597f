//! A cache's tables and memory as the kernels read them, laid out by hand according to `abi.h`.

use forebay::Geometry;
use forebay::residency::{Fetch, LaneHead, TableShape};
use forebay_standin::Memory;

/// The declared sizes of a cache.
#[derive(Clone, Debug)]
pub struct Extents {
    pub geometry: Geometry,
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
        self.geometry.shape().top_k
    }

    pub fn largest(&self) -> TableShape {
        *self.shapes.iter().max_by_key(|shape| shape.budget_blocks).unwrap()
    }

    pub fn slab_words(&self, shape: &TableShape) -> usize {
        (shape.slots().div_ceil(64) * self.geometry.block_bytes() / 4) as usize
    }

    pub fn row_words(&self) -> usize {
        (self.geometry.host_page_bytes() / 4) as usize * self.host_pages as usize
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

    /// How rows are copied if the first row is at `rows` and slots begin at `slab`: bytes of a piece, numbers of a
    /// row's pieces, and the mask of its place in a line. `lines` numbers them by lines, if rows are not much shorter.
    fn pieces(&self, slab: u64, rows: u64, lines: bool) -> [u32; 3] {
        let g = &self.geometry;
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

/// One layer.
pub struct LayerImage {
    pub heads: Memory,
    pub slot_of: Memory,
    pub position_of: Memory,
    pub stamp_of: Memory,
    pub blocks: Memory,
    pub slab: Memory,
    pub rows: Memory,
}

/// A cache with one micro-batch.
pub struct Image {
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

impl LayerImage {
    fn new(extents: &Extents, shape: &TableShape) -> LayerImage {
        let slots = shape.budget_blocks as usize * 64;
        LayerImage {
            heads: Memory::new(8 * shape.lanes as usize),
            slot_of: Memory::new((shape.lanes * shape.tokens) as usize),
            position_of: Memory::of(&vec![u32::MAX; slots]),
            stamp_of: Memory::of(&vec![i32::MAX as u32; shape.slots() as usize]),
            blocks: Memory::new((shape.lanes * shape.lane_blocks()) as usize),
            slab: Memory::skewed(extents.slab_words(shape), extents.skew[0]),
            rows: Memory::skewed(extents.row_words(), extents.skew[1]),
        }
    }

    fn words(&self, of: &Extents, number: u32, shape: &TableShape, lines: bool) -> Vec<u32> {
        let tables = [&self.heads, &self.slot_of, &self.position_of, &self.stamp_of, &self.blocks];
        let layer = tables.into_iter().chain([&self.slab, &self.rows]).fold(Struct::default(), Struct::at);
        let s = shape;
        let extents = [s.lanes, s.tokens, s.query_rows, s.scratch, s.waves, s.scratch_base, s.landing_base];
        let layer = layer.words(&extents).words(&[s.budget_base, s.budget_blocks, s.lane_blocks()]);
        let layer = layer.words(&of.pieces(self.slab.address(), self.rows.address(), lines));
        let g = &of.geometry;
        let [first, second] = g.shape().runs;
        layer.words(&[number, 1, first, second, g.block_bytes(), g.host_stride(), 0]).0
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

impl Image {
    pub fn new(extents: &Extents) -> Image {
        let shape = extents.shapes[0];
        let g = &extents.geometry;
        let (layers, batch) = (extents.shapes.len(), extents.batch as usize);
        let selected = (shape.query_rows * extents.top_k()) as usize;
        let images: Vec<LayerImage> = extents.shapes.iter().map(|s| LayerImage::new(extents, s)).collect();
        // Every second layer's rows are numbered by lines, however small they are.
        let numbered = images.iter().zip(&extents.shapes).zip([true, false].into_iter().cycle());
        let words = |(number, ((image, shape), lines)): (u32, ((&LayerImage, _), _))| {
            image.words(extents, number, shape, lines)
        };
        let layer_words: Vec<_> = (0..).zip(numbered).map(words).collect();
        let table = Memory::of(&layer_words.concat());
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
        let warm_fetches = Memory::new(4 * extents.top_k() as usize * layers);
        let warm_work = Memory::new(extents.work_words() * layers);
        let parts = [&table, &table, &pages, &trust, &warm_fetches, &warm_work];
        let pools = parts.into_iter().fold(Struct::default(), Struct::at);
        let pools = pools.words(&[
            layers as u32,
            layers as u32,
            shape.lanes,
            extents.lane_pages,
            extents.batch,
            extents.top_k(),
            selected as u32,
            extents.work_words() as u32,
            extents.missed_words() as u32,
            extents.set_words() as u32,
            g.page_tokens(),
            extents.host_pages,
            if extents.residency_only { 1 } else { 7 },
            0,
        ]);
        Image {
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
            others: vec![table, failed, work, warm_fetches, warm_work],
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
        let layer = |l: &LayerImage| {
            let tables = [&l.heads, &l.slot_of, &l.position_of, &l.stamp_of, &l.blocks, &l.slab, &l.rows];
            tables.into_iter().all(Memory::is_fenced)
        };
        let own = [&self.pages, &self.trust, &self.block, &self.counts, &self.lengths];
        let lists = [&self.sticky, &self.lists, &self.fetches, &self.first, &self.marks, &self.moved];
        self.layers.iter().all(layer)
            && own.into_iter().chain(lists).chain(&self.others).all(Memory::is_fenced)
    }
}
