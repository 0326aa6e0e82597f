//! The engine of a dense world: kernels that write new rows and read a sequence's rows, through the step's tensors
//! alone.
//!
//! A kernel runs in its stream's order. It knows what the tensors must say and which bytes it must find, because the
//! model knew when the kernel was enqueued; whatever differs it puts into a list, which the world reads.

use std::sync::{Arc, Mutex};

use crate::device::TestDevice;
use forebay::dense::{Cache, Config, Tensors, View, Width};
use forebay::device::{Device, Plane, Slice, Stream};
use forebay::{Kind, MicroBatch, Sequence, Step};

/// What a batch row of a step has to find.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The stamp of every row of the sequence, the new ones included.
    pub stamps: Vec<u64>,
    /// How many of them are new.
    pub fresh: usize,
}

/// Another way to enqueue a step's kernels than [`Kernels::enqueue`]'s own.
pub trait Launch: std::fmt::Debug + Send + Sync {
    /// Enqueues the kernels of a step, and waits for its pages.
    fn launch(
        &self,
        kernels: &Kernels,
        cache: &mut Cache,
        on: (&dyn Device, Stream),
        of: (&Step, u32),
        rows: Vec<Expected>,
    );

    /// Whether everything runs to its end, on a clock, when a step is asked for too early; of any number.
    fn settles(&self, which: u32) -> bool;

    /// All that was enqueued on the streams has ended, and the host has seen it.
    fn ended(&self, _streams: &[Stream]) {}
}

/// The model's layers and their memory, as an engine knows them.
#[derive(Clone, Debug)]
pub struct Kernels {
    pub test: Arc<TestDevice>,
    pub config: Config,
    planes: Vec<Vec<Plane>>,
    /// For each group its layers' runs.
    views: Vec<Vec<(u32, usize, View)>>,
    pub faults: Arc<Mutex<Vec<String>>>,
    pub launch: Option<Arc<dyn Launch>>,
    /// The sequences of the next step's rows, for a [`Launch`].
    pub sequences: Vec<Sequence>,
}

/// The bytes of a row.
pub fn bytes(stamp: u64, layer: u32, run: usize, count: u64) -> Vec<u8> {
    let word = stamp.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(layer) << 8 ^ run as u64;
    (0..count / 8).flat_map(|at| (word ^ at << 56).to_le_bytes()).collect()
}

impl Kernels {
    pub fn new(test: &Arc<TestDevice>, cache: &Cache) -> Kernels {
        let config = cache.config().clone();
        let groups = 0..config.shape.groups.len();
        let planes = groups.map(|group| cache.planes(group).unwrap().collect()).collect();
        let views = config.shape.groups.iter().map(|group| {
            let runs = group.layers.iter().flat_map(|layer| [(*layer, 0), (*layer, 1)]);
            runs.filter_map(|(layer, run)| Some((layer, run, config.view(layer, run)?))).collect()
        });
        let views = views.collect();
        let test = Arc::clone(test);
        Kernels { test, config, planes, views, faults: Arc::default(), launch: None, sequences: Vec::new() }
    }

    /// Enqueues a step's kernels: in each layer they write the new rows and read what each last query row reads. Each
    /// layer waits for its pages; a refused wait is tried again. Returns how many were refused.
    pub fn enqueue(
        &self,
        cache: &mut Cache,
        (device, stream): (&dyn Device, Stream),
        (step, micro): (&Step, u32),
        rows: Vec<Expected>,
    ) -> u32 {
        if let Some(launch) = &self.launch {
            launch.launch(self, cache, (device, stream), (step, micro), rows);
            return 0;
        }
        let (rows, mut refused) = (Arc::new(rows), 0);
        for layer in 0..self.config.shape.layers() as u32 {
            while let Err(error) = cache.arrived(step, layer, stream) {
                assert_eq!(error.kind(), Kind::OutOfMemory);
                refused += 1;
            }
            let tensors = cache.tensors(MicroBatch(micro)).unwrap();
            self.enqueue_layer(device, stream, tensors, &rows, layer);
        }
        refused
    }

    /// See [`Launch::settles`].
    pub fn settles(&self, which: u32) -> bool {
        self.launch.as_ref().map_or(which.is_multiple_of(2), |launch| launch.settles(which))
    }

    /// Enqueues the kernels of one layer.
    pub fn enqueue_layer(
        &self,
        device: &dyn Device,
        stream: Stream,
        tensors: &Tensors,
        rows: &Arc<Vec<Expected>>,
        layer: u32,
    ) {
        let (own, tensors, rows) = (self.clone(), tensors.clone(), Arc::clone(rows));
        device.call(stream, Arc::new(move || own.work(&tensors, &rows, layer))).unwrap();
    }

    /// The kernels of one layer, when they run.
    pub fn work(&self, tensors: &Tensors, rows: &[Expected], layer: u32) {
        if let Err(fault) = self.run(tensors, rows, layer) {
            self.faults.lock().unwrap().push(fault);
        }
    }

    fn words(&self, slice: Slice, wide: bool) -> Vec<i64> {
        let mut bytes = vec![0; slice.bytes() as usize];
        self.test.read(slice, &mut bytes).unwrap();
        match wide {
            true => bytes.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect(),
            false => bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word).into()).collect(),
        }
    }

    fn run(&self, tensors: &Tensors, rows: &[Expected], layer: u32) -> Result<(), String> {
        if layer == 0 {
            self.check(tensors, rows)?;
        }
        let wide = self.config.width == Width::I64;
        let stamps = rows.iter().flat_map(|row| &row.stamps[row.stamps.len() - row.fresh..]);
        let group = self.group_of(layer);
        for (slot, stamp) in self.words(tensors.slots[group], wide).iter().zip(stamps) {
            self.write(group, *slot as u64, *stamp, layer);
        }
        self.attend(group, tensors, rows, layer)
    }

    /// Checks the step's tensors.
    fn check(&self, tensors: &Tensors, rows: &[Expected]) -> Result<(), String> {
        let wide = self.config.width == Width::I64;
        let (batch, tokens) = (self.config.batch as usize, self.config.step_tokens as usize);
        let mut lengths: Vec<i64> = rows.iter().map(|row| row.stamps.len() as i64).collect();
        lengths.resize(batch, 0);
        is("lengths", &self.words(tensors.lengths, false), &lengths)?;
        let mut starts = vec![0];
        starts.extend(rows.iter().scan(0, |sum, row| {
            *sum += row.fresh as i64;
            Some(*sum)
        }));
        starts.resize(batch + 1, *starts.last().unwrap());
        is("starts", &self.words(tensors.starts, false), &starts)?;
        let fresh =
            rows.iter().flat_map(|row| (row.stamps.len() - row.fresh) as i64..row.stamps.len() as i64);
        let mut positions: Vec<i64> = fresh.collect();
        let count = positions.len();
        positions.resize(tokens, 0);
        is("positions", &self.words(tensors.positions, wide), &positions)?;
        (0..self.planes.len()).try_for_each(|group| {
            let slots = self.words(tensors.slots[group], wide);
            is("slots of no row", &slots[count..], &vec![-1; tokens - count])
        })
    }

    pub fn group_of(&self, layer: u32) -> usize {
        self.config.shape.groups.iter().position(|group| group.layers.contains(&layer)).unwrap()
    }

    /// The first position that a layer's attention reads for a row of a step.
    pub fn first_read(&self, row: &Expected, layer: u32) -> usize {
        let window = self.config.shape.groups[self.group_of(layer)].window;
        let window = window.map_or(usize::MAX, |window| window as usize);
        // The first query row reads furthest back.
        (row.stamps.len() - row.fresh + 1).saturating_sub(window)
    }

    /// The places of a row in a layer: its run and its memory.
    pub fn places(&self, group: usize, slot: u64, layer: u32) -> impl Iterator<Item = (usize, Slice)> + '_ {
        let page_tokens = u64::from(self.config.shape.page_tokens);
        let (page, token) = (slot / page_tokens, slot % page_tokens);
        self.views[group].iter().filter(move |(of, ..)| *of == layer).map(move |(_, run, view)| {
            let at = page * view.stride + view.offset + token * view.row;
            (*run, self.planes[group][view.plane].memory.part(at, view.row).unwrap())
        })
    }

    fn write(&self, group: usize, slot: u64, stamp: u64, layer: u32) {
        for (run, place) in self.places(group, slot, layer) {
            self.test.write(place, &bytes(stamp, layer, run, place.bytes())).unwrap();
        }
    }

    /// Reads what the last query of each batch row reads.
    fn attend(&self, group: usize, tensors: &Tensors, rows: &[Expected], layer: u32) -> Result<(), String> {
        let table = self.words(tensors.tables[group], false);
        let entries = table.len() / self.config.batch as usize;
        let page_tokens = self.config.shape.page_tokens as usize;
        for (row, expected) in rows.iter().enumerate() {
            for position in self.first_read(expected, layer)..expected.stamps.len() {
                let page = table[row * entries + position / page_tokens];
                let slot = page as u64 * page_tokens as u64 + (position % page_tokens) as u64;
                for (run, place) in self.places(group, slot, layer) {
                    let mut found = vec![0; place.bytes() as usize];
                    self.test.read(place, &mut found).unwrap();
                    if page == 0 || found != bytes(expected.stamps[position], layer, run, place.bytes()) {
                        return Err(format!(
                            "group {group} row {row} position {position} page {page} layer {layer}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn is(what: &str, found: &[i64], wanted: &[i64]) -> Result<(), String> {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{what}: {found:?}, not {wanted:?}")),
    }
}
