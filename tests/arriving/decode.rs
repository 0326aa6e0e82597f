//! A decode rank: its receiver, and the cache that its rows go to.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use crate::device::TestDevice;
use crate::model::{K, KEY, Model, ROW, TOKENS, Tag, key, row};
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, Stream};
use forebay::transfer::{Fence, Rank, Receiver, Run};
use forebay::{
    Accepted, BatchRow, Buffers, Cache, Config, Layer, LayerCall, MicroBatch, Result, Sequence, Streams,
    WarmUp, Withheld,
};

/// The memory that a transfer writes to, by plane: the rows of each layer in the cache's host pages, then keys on their
/// way to device pages. Page `n` of a plane of keys goes with host page `n`: it has the same tenant, so it is not used
/// again while a copy from it is in flight.
#[derive(Clone)]
pub struct Planes {
    pub memory: Arc<TestDevice>,
    planes: Vec<(Slice, u64)>,
}

impl Planes {
    fn pieces<'a>(&'a self, page: u32, run: &'a Run) -> impl Iterator<Item = Slice> + 'a {
        let (plane, bytes) = self.planes[run.to.plane as usize];
        let first = u64::from(page) * bytes + run.to.offset;
        (0..u64::from(run.pieces))
            .map(move |piece| plane.part(first + piece * run.to.stride, run.bytes).unwrap())
    }

    pub fn write(&self, page: u32, run: &Run, bytes: &[u8]) {
        for (to, from) in self.pieces(page, run).zip(bytes.chunks_exact(run.bytes as usize)) {
            self.memory.write(to, from).unwrap();
        }
    }

    pub fn read(&self, page: u32, run: &Run, into: &mut [u8]) {
        for (from, to) in self.pieces(page, run).zip(into.chunks_exact_mut(run.bytes as usize)) {
            self.memory.read(from, to).unwrap();
        }
    }
}

/// Pages that writers from afar write to, beside the cache: what they hold by plane, and whether they are lent.
pub struct Landing {
    pages: Vec<Vec<Vec<u8>>>,
    lent: Vec<bool>,
}

impl Landing {
    pub fn new(count: usize, page_bytes: &[u64]) -> Landing {
        let page: Vec<Vec<u8>> = page_bytes.iter().map(|bytes| vec![0xDD; *bytes as usize]).collect();
        Landing { pages: vec![page; count], lent: vec![false; count] }
    }

    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let free = (0..).zip(&self.lent).filter(|(_, lent)| !**lent).map(|(page, _)| page);
        let free: Vec<u32> = free.take(count).collect();
        let enough = free.len() == count;
        free.iter().filter(|_| enough).for_each(|page| self.lent[*page as usize] = true);
        enough.then_some(free)
    }

    pub fn give_back(&mut self, page: u32) {
        assert!(std::mem::take(&mut self.lent[page as usize]), "a landing page is free twice");
    }

    pub fn is_free(&self) -> bool {
        !self.lent.contains(&true)
    }

    fn range(run: &Run, at: usize) -> usize {
        let (piece, byte) = (at as u64 / run.bytes, at as u64 % run.bytes);
        (run.to.offset + piece * run.to.stride + byte) as usize
    }

    pub fn write(&mut self, page: u32, run: &Run, bytes: &[u8]) {
        let plane = &mut self.pages[page as usize][run.to.plane as usize];
        bytes.iter().enumerate().for_each(|(at, byte)| plane[Landing::range(run, at)] = *byte);
    }

    pub fn read(&self, page: u32, run: &Run, into: &mut [u8]) {
        let plane = &self.pages[page as usize][run.to.plane as usize];
        into.iter_mut().enumerate().for_each(|(at, byte)| *byte = plane[Landing::range(run, at)]);
    }
}

/// How far the warm-up of a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmth {
    Cold,
    Planned,
    Warm,
}

/// A use of a sequence's pages by a transfer.
#[derive(Debug)]
pub struct Use {
    pub attempt: usize,
    pub handle: Sequence,
    /// Host pages and device pages.
    pub pages: Vec<(u32, u32)>,
    pub tokens: u32,
    /// The first token that the transfer brings.
    pub first: u32,
    /// Where writers from afar write, from the page of the first token that the transfer brings on.
    pub landing: Vec<u32>,
    /// Whether they may still.
    pub reached: bool,
    /// By layer: the cache was told of its rows, and then of its keys, if it has any.
    pub declared: Vec<bool>,
    pub placed: Vec<bool>,
    pub warmth: Vec<Warmth>,
    /// By group what its warm-up selects: steps, and `[steps][k]`.
    pub warm: Vec<Option<(u32, Vec<i32>)>>,
    pub early: bool,
    pub whole: bool,
    pub joined: bool,
    pub ended: bool,
    pub withheld: Option<Withheld>,
    /// Whether all senders have answered its end.
    pub drained: bool,
}

impl Use {
    /// Whether the cache has been told of all rows and keys.
    pub fn is_complete(&self) -> bool {
        self.placed.iter().all(|done| *done)
    }
}

/// What a step of a sequence reads: whose row each of its tokens has, the new one included; its length with the
/// accepted row; that row.
pub struct Stepping<'a> {
    pub tags: &'a [Tag],
    pub length: u32,
    pub accepted: u32,
    /// By group.
    pub picks: &'a [Vec<u32>],
}

pub struct Decode {
    pub rank: Rank,
    pub machine: Receiver,
    pub cache: Cache,
    pub planes: Planes,
    pub landing: Landing,
    pub uses: BTreeMap<Fence, Use>,
    pub generation: u64,
    pub streams: [Stream; 2],
    device: Arc<dyn Device>,
    model: Rc<Model>,
    buffers: Buffers,
}

/// The device of a seed: one that runs work at once, one with a thread for each stream, or a clock that reorders.
fn devices(seed: u64) -> (Arc<TestDevice>, Arc<dyn Device>) {
    let memory = TestDevice::host(HostOptions { threaded: seed % 4 == 1, ..HostOptions::default() });
    let options = ClockOptions { seed: Some(seed), ..ClockOptions::default() };
    let device: Arc<dyn Device> = match seed % 4 {
        0 | 1 => memory.device(),
        _ => ClockDevice::over(memory.device(), options).unwrap(),
    };
    (memory, device)
}

/// A cache of a model, and the bytes from a row on the host to the next one.
pub fn host_stride(model: &Model) -> u64 {
    let (_, device) = devices(0);
    let cache = Cache::new(model.config(), device).unwrap();
    cache.geometry().host_offset(0, 1)
}

impl Decode {
    pub fn new(
        model: &Rc<Model>,
        (rank, machine): (Rank, Receiver),
        page_bytes: &[u64],
        seed: u64,
    ) -> Decode {
        let (memory, device) = devices(seed);
        let config = model.config();
        let pages = u64::from(config.host_pages);
        let buffer = || device.allocate(u64::from(4 * K)).unwrap();
        let buffers = Buffers { selection: buffer(), slots: buffer(), split_indices: None };
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let keys: Vec<Slice> = page_bytes
            .iter()
            .skip(model.layers() as usize)
            .map(|bytes| device.allocate(pages * bytes).unwrap())
            .collect();
        let landing = Landing::new(2 * TOKENS as usize / model.page as usize, page_bytes);
        let cache = Cache::new(config, device.clone()).unwrap();
        let rows = (0..model.layers()).map(|layer| cache.rows(Layer(layer)).unwrap());
        let planes = rows.chain(keys).zip(page_bytes.iter().copied()).collect();
        Decode {
            rank,
            machine,
            cache,
            planes: Planes { memory, planes },
            landing,
            uses: BTreeMap::new(),
            generation: 0,
            streams,
            device,
            model: Rc::clone(model),
            buffers,
        }
    }

    pub fn sync(&self) {
        for stream in self.streams {
            let event = self.device.event().unwrap();
            self.device.record(event, stream).unwrap();
            self.device.synchronize(event).unwrap();
        }
    }

    /// Lets all work end, and frees what has ended.
    pub fn settle(&mut self) {
        for _ in 0..3 {
            self.sync();
            self.cache.reap(self.streams[0]).unwrap();
        }
    }

    fn memory(&self) -> &TestDevice {
        &self.planes.memory
    }

    pub fn pages(&self, handle: Sequence) -> Vec<(u32, u32)> {
        self.cache.pages(handle).unwrap().map(|(host, keys)| (host.0, keys.0)).collect()
    }

    /// Memory with some words, which nothing else uses.
    pub fn words(&self, words: &[i32]) -> Slice {
        let slice = self.device.allocate(4 * words.len() as u64).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory().write(slice, &bytes).unwrap();
        slice
    }

    /// The warm-up of some groups of a use.
    pub fn warm_up(&self, of: &Use, groups: Range<usize>) -> WarmUp {
        let all = of.warm[groups].iter().map(|warm| warm.as_ref().unwrap());
        let steps = all.clone().map(|(steps, _)| *steps).next().unwrap();
        let words: Vec<i32> = all.flat_map(|(_, words)| words.iter().copied()).collect();
        WarmUp { selections: Some(self.words(&words)), steps, bytes_a_call: 0 }
    }

    /// Where the keys of some tokens of a group are, on their way, and how they are placed: page by page.
    fn staged(&self, of: &Use, group: usize) -> Vec<(u32, Slice)> {
        let page = self.model.page;
        let (keys, _) = self.planes.planes[self.model.layers() as usize + group];
        let pages = of.first / page..of.tokens.div_ceil(page);
        let part = |number: u32| {
            let first = of.first.max(number * page);
            let count = of.tokens.min((number + 1) * page) - first;
            let at = of.pages[number as usize].0 * page + first % page;
            let at = u64::from(at) * KEY as u64;
            (first, keys.part(at, u64::from(count) * KEY as u64).unwrap())
        };
        pages.map(part).collect()
    }

    pub fn place_keys(&mut self, fence: Fence, group: usize, stream: Stream) -> Result<()> {
        let of = &self.uses[&fence];
        let layer = Layer(self.model.groups[group].0);
        for (first, keys) in self.staged(of, group) {
            let _ticket = self.cache.place_index_keys(of.handle, layer, first, keys, stream)?;
        }
        Ok(())
    }

    /// The same for a sequence that did not arrive, as an engine would do it.
    pub fn copy_keys(&self, fence: Fence, group: usize, stream: Stream) {
        let (of, page) = (&self.uses[&fence], self.model.page);
        let all = self.cache.index_keys(Layer(self.model.groups[group].0)).unwrap();
        for (first, keys) in self.staged(of, group) {
            let at = u64::from(of.pages[(first / page) as usize].1 * page + first % page) * KEY as u64;
            self.device.copy(stream, keys, all.part(at, keys.bytes()).unwrap()).unwrap();
        }
    }

    /// What is wrong with the rows of a layer in host pages.
    pub fn wrong_rows(&self, pages: &[(u32, u32)], layer: u32, tags: &[Tag]) -> Option<String> {
        let rows = self.cache.rows(Layer(layer)).unwrap();
        let page = self.model.page;
        (0..).zip(tags).find_map(|(position, tag)| {
            let at = self.cache.geometry().host_offset(pages[(position / page) as usize].0, position % page);
            let mut found = vec![0; ROW];
            self.memory().read(rows.part(at, ROW as u64).unwrap(), &mut found).unwrap();
            let right = found == row(*tag, layer, position);
            (!right).then(|| format!("layer {layer}, the row of token {position} in its host page"))
        })
    }

    /// What is wrong with the index keys in device pages.
    pub fn wrong_keys(&self, pages: &[(u32, u32)], tags: &[Tag]) -> Option<String> {
        let keyed = self.model.groups.iter().map(|(first, _)| *first).filter(|_| self.model.keyed);
        let page = self.model.page;
        keyed.into_iter().find_map(|layer| {
            let keys = self.cache.index_keys(Layer(layer)).unwrap();
            (0..).zip(tags).find_map(|(position, tag)| {
                let at = pages[(position / page) as usize].1 * page + position % page;
                let mut found = vec![0; KEY];
                let part = keys.part(u64::from(at) * KEY as u64, KEY as u64).unwrap();
                self.memory().read(part, &mut found).unwrap();
                let right = found == key(*tag, layer, position);
                (!right).then(|| format!("layer {layer}, the key of token {position}"))
            })
        })
    }

    /// What is wrong with any row or key of a sequence's first tokens.
    pub fn wrong(&self, handle: Sequence, tags: &[Tag]) -> Option<String> {
        let pages = self.pages(handle);
        let rows = (0..self.model.layers()).find_map(|layer| self.wrong_rows(&pages, layer, tags));
        rows.or_else(|| self.wrong_keys(&pages, tags))
    }

    /// The row in a slot.
    fn in_slot(&self, layer: u32, slot: u32) -> Vec<u8> {
        let slab = self.cache.slab(Layer(layer)).unwrap();
        let mut found = Vec::new();
        for piece in self.cache.geometry().pieces(slot).iter().filter(|piece| piece.bytes > 0) {
            let mut bytes = vec![0; piece.bytes as usize];
            self.memory().read(slab.part(piece.slab, piece.bytes.into()).unwrap(), &mut bytes).unwrap();
            found.extend(bytes);
        }
        found
    }

    /// Writes the new row of a step to its landing slot.
    fn land(&self, layer: u32, slot: u32, bytes: &[u8]) {
        let slab = self.cache.slab(Layer(layer)).unwrap();
        for piece in self.cache.geometry().pieces(slot).iter().filter(|piece| piece.bytes > 0) {
            let to = slab.part(piece.slab, piece.bytes.into()).unwrap();
            self.memory().write(to, &bytes[piece.row as usize..][..piece.bytes as usize]).unwrap();
        }
    }

    /// A step of one query row. Returns the hits and misses of each layer, or which row or key was wrong.
    pub fn step(
        &mut self,
        handle: Sequence,
        of: &Stepping<'_>,
    ) -> std::result::Result<Vec<(u32, u32)>, String> {
        let main = self.streams[0];
        let batch = BatchRow { sequence: handle, accepted: Accepted::Rows(of.accepted), query_rows: 1 };
        let mut step = self.cache.prepare(MicroBatch(0), 1, &[batch], None, main).unwrap();
        self.sync();
        let (pages, tag) = (self.pages(handle), of.tags[of.length as usize]);
        let mut wrong = self.wrong_keys(&pages, &of.tags[..of.length as usize]);
        for layer in 0..self.model.layers() {
            let picks = &of.picks[self.model.group_of(layer)];
            let word = |at: u32| picks.get(at as usize).map_or(-1, |pick| *pick as i32);
            let bytes: Vec<u8> = (0..K).flat_map(|at| word(at).to_le_bytes()).collect();
            self.memory().write(self.buffers.selection, &bytes).unwrap();
            let call = LayerCall::whole(Layer(layer));
            let streams = Streams { resolve: main, gather: main };
            self.cache.layer(&step, call, streams, self.buffers).unwrap();
            self.sync();
            let mut slots = vec![0; 4 * K as usize];
            self.memory().read(self.buffers.slots, &mut slots).unwrap();
            for (slot, pick) in slots.chunks_exact(4).zip(picks) {
                let slot = u32::from_le_bytes(slot.try_into().unwrap());
                if self.in_slot(layer, slot) != row(of.tags[*pick as usize], layer, *pick) {
                    wrong.get_or_insert(format!("layer {layer}, the row of token {pick} that a step reads"));
                }
            }
            let slot = self.cache.landing_slot(handle, 0).unwrap();
            self.land(layer, slot, &row(tag, layer, of.length));
            self.cache.scatter(&step, call, main).unwrap();
            if self.model.keyed_group(layer).is_some() {
                let at = pages[(of.length / self.model.page) as usize].1 * self.model.page
                    + of.length % self.model.page;
                let keys = self.cache.index_keys(Layer(layer)).unwrap();
                let to = keys.part(u64::from(at) * KEY as u64, KEY as u64).unwrap();
                self.memory().write(to, &key(tag, layer, of.length)).unwrap();
            }
        }
        self.cache.finish(&mut step, main).unwrap();
        self.sync();
        let retired = self.cache.retire(step, main).map_err(|unretired| unretired.error).unwrap();
        let counts = retired.layers().iter().map(|layer| (layer.hits, layer.misses)).collect();
        wrong.map_or(Ok(counts), Err)
    }
}

/// A cache without bytes, in which sequences join whole.
pub struct Twin {
    cache: Cache,
    device: Arc<dyn Device>,
    memory: Arc<TestDevice>,
    stream: Stream,
}

impl Twin {
    pub fn new(model: &Model) -> Twin {
        let (memory, device) = devices(0);
        let config = Config { residency_only: true, ..model.config() };
        let stream = device.stream().unwrap();
        Twin { cache: Cache::new(config, device.clone()).unwrap(), device, memory, stream }
    }

    /// The digest of a sequence that joins whole, with these selections, `[groups][steps][k]`.
    pub fn digest(&mut self, open: &forebay::Open, steps: u32, words: &[i32]) -> u64 {
        let handle = self.cache.open(open).unwrap();
        self.cache.append_in_place(handle, open.prompt).unwrap();
        let selections = self.device.allocate(4 * words.len() as u64).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write(selections, &bytes).unwrap();
        let warm = WarmUp { selections: Some(selections), steps, bytes_a_call: 0 };
        let _ticket = self.cache.join(handle, self.stream, warm).unwrap();
        let digest = self.cache.digest(handle).unwrap();
        self.cache.close(handle, self.stream).unwrap();
        digest
    }
}
