//! Layers that share a selection (index groups): every row of every layer, on the host device and the CUDA device,
//! against a cache without groups in which each layer gets the same selection. And what is refused.
//!
//! `tests/graphs.rs` runs groups in captured steps with two micro-batches and draft passes, `tests/order.rs` leaves out
//! each of their edges.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/forgets.rs"]
mod forgets;
#[path = "groups/schedule.rs"]
mod schedule;

use std::sync::Arc;

use device::TestDevice;
use forebay::device::descriptor::LayerCount;
use forebay::device::host::HostOptions;
use forebay::device::{Device, Slice, SplitIndices, Stream};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Error, IndexGroup, Kind, Layer, LayerCall,
    Memory, MicroBatch, Open, Sequence, Shape, Slots, Step, Streams, WarmUp,
};
use forgets::{Call, Forgets};

const K: u32 = 16;
const LAYERS: u32 = 5;
const QUERY_ROWS: u32 = 2;
/// For each layer, the one that selects for it in the groups of `config`.
const SELECTS: [usize; LAYERS as usize] = [0, 1, 1, 1, 4];

/// Layers 1 to 3 are a group, with rows of two formats, one of them of two runs.
fn config() -> Config {
    let shape = Shape {
        layers: LAYERS,
        page_tokens: 16,
        top_k: K,
        lone_layers: 1,
        group_layers: 3,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    Config {
        rows: vec![[656, 0], [656, 0], [1152, 0], [512, 144], [1152, 0]],
        slots: Slots::Uniform(1024),
        min_budget: K,
        query_rows: QUERY_ROWS,
        memory,
        ..Config::new(shape, 4, 300, 64)
    }
}

/// The same rows, and every layer selects for itself.
fn alone() -> Config {
    let config = config();
    Config { shape: Shape { group_layers: 0, ..config.shape }, ..config }
}

fn mix(names: &[u32]) -> u64 {
    names.iter().fold(0x9E37_79B9_7F4A_7C15, |mixed: u64, name| {
        let mixed = (mixed ^ u64::from(*name)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB)
    })
}

/// A sequence, and for each position the step that wrote its row, 0 for the prompt.
#[derive(Clone)]
struct Own {
    handle: Sequence,
    name: u32,
    versions: Vec<u32>,
    landed: u32,
}

struct Engine {
    cache: Cache,
    device: Arc<TestDevice>,
    stream: Stream,
    selection: Slice,
    slots: Slice,
    own: Vec<Own>,
    /// For each layer, the one whose selection it reads.
    selects: [usize; LAYERS as usize],
    /// Whether a step compares the bytes of selected rows.
    checks: bool,
    steps: u32,
    names: u32,
    counts: Vec<Vec<LayerCount>>,
    digests: Vec<u64>,
}

impl Engine {
    fn new(config: Config, device: Arc<TestDevice>) -> Engine {
        let own = device.device();
        Engine::over(config, device, own)
    }

    /// On a device around `device`.
    fn over(config: Config, device: Arc<TestDevice>, around: Arc<dyn Device>) -> Engine {
        let words = u64::from(config.batch * QUERY_ROWS * K);
        let (selection, slots) = (device.allocate(4 * words).unwrap(), device.allocate(4 * words).unwrap());
        let stream = device.stream().unwrap();
        let cache = Cache::new(config, around).unwrap();
        let all = cache.geometries();
        let selects = match all.largest_group() {
            1 => SELECTS,
            _ => std::array::from_fn(|layer| all.first_of(layer)),
        };
        let (own, counts, digests) = (Vec::new(), Vec::new(), Vec::new());
        Engine {
            cache,
            device,
            stream,
            selection,
            slots,
            own,
            selects,
            checks: true,
            steps: 0,
            names: 0,
            counts,
            digests,
        }
    }

    fn settle(&self) {
        let event = self.device.event().unwrap();
        self.device.record(event, self.stream).unwrap();
        self.device.synchronize(event).unwrap();
    }

    /// The bytes of a row.
    fn row(&self, layer: u32, of: &Own, position: u32) -> Vec<u8> {
        let words = self.cache.geometries().of(layer as usize).row_bytes() / 4;
        let version = of.versions[position as usize];
        (0..words)
            .flat_map(|word| (mix(&[of.name, layer, position, version, word]) as u32).to_le_bytes())
            .collect()
    }

    fn open(&mut self, prompt: u32, slots: u32, bring_up: BringUp) -> Own {
        let open = Open { prompt, promised: 60, budget: Budget::Slots(slots), bring_up };
        let handle = self.cache.open(&open).unwrap();
        self.names += 1;
        let own = Own { handle, name: self.names, versions: vec![0; prompt as usize], landed: 0 };
        for layer in 0..LAYERS {
            let rows: Vec<u8> = (0..prompt).flat_map(|position| self.row(layer, &own, position)).collect();
            self.cache.append(handle, Layer(layer), &rows).unwrap();
        }
        own
    }

    /// Opens a sequence and joins it by a warm-up of two steps, in stretches.
    fn warm(&mut self, prompt: u32, slots: u32) {
        let own = self.open(prompt, slots, BringUp::Nothing);
        let layers: Vec<u32> = self.cache.geometries().groups().iter().map(|group| group.first).collect();
        let words: Vec<u32> = layers
            .iter()
            .flat_map(|layer| {
                (0..2 * K).map(|entry| (mix(&[self.selects[*layer as usize] as u32, entry, 3]) % 90) as u32)
            })
            .collect();
        let selections = self.device.allocate(4 * words.len() as u64).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.device.write(selections, &bytes).unwrap();
        let warm = WarmUp { selections: Some(selections), steps: 2, bytes_a_call: 1 << 16 };
        let _ticket = self.cache.join(own.handle, self.stream, warm).unwrap();
        while !self.cache.is_running(own.handle).unwrap() {
            self.settle();
            let _ticket = self.cache.join_more(own.handle, self.stream).unwrap();
        }
        self.settle();
        self.own.push(own);
    }

    fn start(&mut self, prompt: u32, slots: u32, bring_up: BringUp) {
        let own = self.open(prompt, slots, bring_up);
        let _ticket = self.cache.join(own.handle, self.stream, WarmUp::default()).unwrap();
        self.settle();
        self.own.push(own);
    }

    /// Reads or writes the runs of a slot.
    fn each_run(&self, layer: u32, slot: u32, mut visit: impl FnMut(Slice, std::ops::Range<usize>)) {
        let slab = self.cache.slab(Layer(layer)).unwrap();
        for piece in self.cache.geometries().of(layer as usize).pieces(slot) {
            let row = piece.row as usize..(piece.row + piece.bytes) as usize;
            if !row.is_empty() {
                visit(slab.part(piece.slab, piece.bytes.into()).unwrap(), row);
            }
        }
    }

    fn slot(&self, layer: u32, slot: u32) -> Vec<u8> {
        let mut row = vec![0; self.cache.geometries().of(layer as usize).row_bytes() as usize];
        self.each_run(layer, slot, |run, at| self.device.read(run, &mut row[at]).unwrap());
        row
    }

    /// The positions that a layer selects for each query row of each sequence: distinct, most of them near the end.
    fn select(&self, layer: u32) -> Vec<i32> {
        let mut all = Vec::new();
        for own in &self.own {
            for query in 0..QUERY_ROWS {
                let reach = own.versions.len() as u32 - QUERY_ROWS + query + 1;
                let mut positions: Vec<i32> = Vec::new();
                for entry in 0..K {
                    let drawn = mix(&[self.steps, own.name, layer, query, entry]);
                    let span = if drawn.is_multiple_of(3) { reach } else { 30 };
                    let position = (reach - 1 - (drawn >> 20) as u32 % span) as i32;
                    positions.push(if positions.contains(&position) { -1 } else { position });
                }
                all.extend(positions);
            }
        }
        all
    }

    /// A step of all sequences; checks the bytes of every selected row in every layer.
    fn step(&mut self) {
        self.try_step().unwrap();
    }

    /// As above. Returns the error of a step that failed.
    fn try_step(&mut self) -> Result<(), Error> {
        self.steps += 1;
        let mut rows = Vec::new();
        for own in &mut self.own {
            let accepted = (mix(&[self.steps, own.name]) % u64::from(own.landed + 1)) as u32;
            own.versions.truncate(own.versions.len() - (own.landed - accepted) as usize);
            own.versions.resize(own.versions.len() + QUERY_ROWS as usize, self.steps);
            own.landed = QUERY_ROWS;
            let accepted = Accepted::Rows(accepted);
            rows.push(BatchRow { sequence: own.handle, accepted, query_rows: QUERY_ROWS });
        }
        let mut step = self.cache.prepare(MicroBatch(0), QUERY_ROWS, &rows, None, self.stream).unwrap();
        self.settle();
        let bytes = 4 * self.own.len() as u64 * u64::from(QUERY_ROWS * K);
        let (selection, slots) = (self.selection.part(0, bytes).unwrap(), self.slots.part(0, bytes).unwrap());
        let streams = Streams { resolve: self.stream, gather: self.stream };
        for layer in 0..LAYERS {
            self.land(layer);
            let picks = self.select(self.selects[layer as usize] as u32);
            let leads = self.cache.geometries().first_of(layer as usize) == layer as usize;
            if leads {
                let words: Vec<u8> = picks.iter().flat_map(|position| position.to_le_bytes()).collect();
                self.device.write(selection, &words).unwrap();
                self.device.write(slots, &vec![0xEE; bytes as usize]).unwrap();
            }
            let call = LayerCall::whole(Layer(layer));
            let buffers = Buffers { selection, slots, split_indices: None };
            self.cache.layer(&step, call, streams, buffers).unwrap();
            self.settle();
            if self.checks {
                self.check(layer, &picks, slots);
            }
            self.cache.scatter(&step, call, self.stream).unwrap();
        }
        self.cache.finish(&mut step, self.stream).unwrap();
        self.settle();
        let retired = self.cache.retire(step, self.stream).map_err(|unretired| unretired.error)?;
        self.counts.push(retired.layers().to_vec());
        self.cache.validate().unwrap();
        let digest = |own: &Own| self.cache.digest(own.handle).unwrap();
        let digests: Vec<u64> = self.own.iter().map(digest).collect();
        self.digests.extend(digests);
        Ok(())
    }

    /// Writes the new rows of a layer to their landing slots.
    fn land(&self, layer: u32) {
        for own in &self.own {
            for query in 0..QUERY_ROWS {
                let position = own.versions.len() as u32 - QUERY_ROWS + query;
                let slot = self.cache.landing_slot(own.handle, query).unwrap();
                let row = self.row(layer, own, position);
                self.each_run(layer, slot, |run, at| self.device.write(run, &row[at]).unwrap());
            }
        }
    }

    fn check(&self, layer: u32, picks: &[i32], slots: Slice) {
        let mut bytes = vec![0; slots.bytes() as usize];
        self.device.read(slots, &mut bytes).unwrap();
        let words = bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word));
        let of = self.own.iter().flat_map(|own| std::iter::repeat_n(own, (QUERY_ROWS * K) as usize));
        for ((position, slot), own) in picks.iter().zip(words).zip(of) {
            match position {
                -1 => assert_eq!(slot, -1),
                _ => assert!(
                    self.slot(layer, slot as u32) == self.row(layer, own, *position as u32),
                    "step {} layer {layer} of sequence {} at {position}: slot {slot}",
                    self.steps,
                    own.name
                ),
            }
        }
    }

    /// Every committed row of every layer in the total pool.
    fn check_total(&self) {
        for own in &self.own {
            let committed = self.cache.length(own.handle).unwrap().committed;
            for (layer, position) in (0..LAYERS).flat_map(|layer| (0..committed).map(move |at| (layer, at))) {
                let mut row = self.row(layer, own, position);
                let wanted = row.clone();
                row.fill(0);
                self.cache.read_row(own.handle, Layer(layer), position, &mut row).unwrap();
                assert_eq!(row, wanted, "layer {layer} of sequence {} at {position}", own.name);
            }
        }
    }

    fn truncate(&mut self, at: usize, by: u32) {
        let own = &mut self.own[at];
        let length = self.cache.length(own.handle).unwrap().committed - by;
        let _ticket = self.cache.truncate(own.handle, length, self.stream).unwrap();
        own.versions.truncate(length as usize);
        own.landed = 0;
        self.settle();
    }

    /// A life with all that a sequence can do.
    fn run(mut self) -> Engine {
        self.warm(120, 90);
        self.start(100, K, BringUp::Nothing);
        (0..6).for_each(|_| self.step());
        for budget in [50, 200, 33] {
            self.cache.resize(self.own[0].handle, &Budget::Slots(budget), self.stream).unwrap();
            self.settle();
            (0..3).for_each(|_| self.step());
        }
        self.truncate(1, 3);
        self.truncate(0, 0);
        let open = Open { prompt: 0, promised: 40, budget: Budget::Slots(170), bring_up: BringUp::Whole };
        let parent = self.own[0].clone();
        let (handle, _ticket) = self.cache.fork(parent.handle, &open, self.stream).unwrap();
        self.settle();
        // A fork's committed rows are its parent's; the rows that each of them decodes are named by the step.
        self.own.push(Own { handle, ..parent });
        let gone = self.own.remove(1);
        (0..4).for_each(|_| self.step());
        self.cache.close(gone.handle, self.stream).unwrap();
        self.start(60, 62, BringUp::Whole);
        (0..4).for_each(|_| self.step());
        self.check_total();
        self
    }
}

#[test]
fn rows_of_every_layer_are_read_and_the_counts_are_one_layers_times_the_group() {
    let host = Engine::new(config(), TestDevice::host(HostOptions::default())).run();
    let twin = Engine::new(alone(), TestDevice::host(HostOptions::default())).run();
    assert_eq!(host.counts, twin.counts, "as many hits and misses as without groups");
    let (grouped, alone) = (host.cache.stats(), twin.cache.stats());
    assert_eq!((grouped.misses, grouped.bytes_up), (alone.misses, alone.bytes_up));
    assert_eq!((grouped.moved_rows, grouped.slots_in_use), (alone.moved_rows, alone.slots_in_use));
    assert!(grouped.moved_rows > 0 && grouped.scratch > 0 && grouped.hits > grouped.misses, "{grouped:?}");
    #[cfg(feature = "cuda")]
    for seed in [None, Some(1)] {
        let Some(device) = TestDevice::cuda(&HostOptions::default(), seed) else { return };
        let cuda = Engine::new(config(), device).run();
        assert_eq!((&cuda.counts, &cuda.digests), (&host.counts, &host.digests), "{seed:?}");
        assert_eq!(cuda.cache.stats().moved_rows, grouped.moved_rows);
    }
}

#[test]
fn groups_that_the_configuration_names_are_those_of_the_shape() {
    let group = |first, layers| IndexGroup { first, layers, top_k: K };
    let named = Config { index_groups: vec![group(0, 1), group(1, 3), group(4, 1)], ..alone() };
    let named = Engine::new(named, TestDevice::host(HostOptions::default())).run();
    let host = Engine::new(config(), TestDevice::host(HostOptions::default())).run();
    assert_eq!((named.counts, named.digests), (host.counts, host.digests));
}

impl Engine {
    /// A step of one query row of the first sequence, which selects its first rows in every layer.
    fn begin(&mut self) -> (Step, Buffers) {
        let rows = [BatchRow { sequence: self.own[0].handle, accepted: Accepted::Rows(0), query_rows: 1 }];
        let step = self.cache.prepare(MicroBatch(0), 1, &rows, None, self.stream).unwrap();
        let part = |slice: Slice| slice.part(0, 4 * u64::from(K)).unwrap();
        let buffers =
            Buffers { selection: part(self.selection), slots: part(self.slots), split_indices: None };
        let picks: Vec<u8> = (0..K).flat_map(|position| position.to_le_bytes()).collect();
        self.device.write(buffers.selection, &picks).unwrap();
        (step, buffers)
    }
}

fn refused(error: Error) -> (Kind, String) {
    (error.kind(), error.place().to_owned())
}

#[test]
fn a_layer_that_another_one_selects_for_has_no_resolve_and_no_index_keys() {
    let mut e = Engine::new(config(), TestDevice::new(HostOptions::default()));
    e.start(40, 40, BringUp::Whole);
    let (mut step, buffers) = e.begin();
    let follows = (Kind::OutOfRange, "a layer that another one selects for".to_owned());
    for layer in [2, 3] {
        let error = e.cache.resolve(&step, LayerCall::whole(Layer(layer)), e.stream, buffers).unwrap_err();
        assert!(error.to_string().contains("selects for it 1"), "{error}");
        assert_eq!(refused(error), follows);
        assert_eq!(refused(e.cache.index_keys(Layer(layer)).unwrap_err()), follows);
    }
    let keys = [0, 1, 4].map(|layer| e.cache.index_keys(Layer(layer)).unwrap());
    assert!(!keys[0].overlaps(&keys[1]) && !keys[1].overlaps(&keys[2]));
    assert_eq!(keys[0].bytes(), u64::from(e.cache.config().index_pages) * 16 * 132);
    e.cache.abandon(&mut step).unwrap();
    e.cache.finish(&mut step, e.stream).unwrap();
    e.settle();
    assert!(e.cache.retire(step, e.stream).is_err());
}

/// A call for all layers takes buffers of all groups, no more and no fewer.
#[test]
fn a_call_for_all_layers_takes_a_selection_for_each_group() {
    let mut e = Engine::new(config(), TestDevice::new(HostOptions::default()));
    e.start(200, 40, BringUp::Nothing);
    let (mut step, _) = e.begin();
    const GROUPS: u32 = 3;
    let bytes = |groups: u32| 4 * u64::from(groups * K);
    let both = e.device.allocate(2 * bytes(LAYERS)).unwrap();
    let words: Vec<u8> = (0..GROUPS * K).flat_map(|position| position.to_le_bytes()).collect();
    e.device.write(both.part(0, bytes(GROUPS)).unwrap(), &words).unwrap();
    let of = |first, groups| both.part(bytes(first), bytes(groups)).unwrap();
    let streams = Streams { resolve: e.stream, gather: e.stream };
    let call = |selection, slots| e.cache.layers(&step, streams, selection, slots);
    for groups in [GROUPS - 1, GROUPS + 1, LAYERS] {
        let error = call(of(0, groups), of(LAYERS, GROUPS)).unwrap_err();
        assert_eq!(error.number("wanted"), Some(bytes(GROUPS)), "{error}");
        assert_eq!(refused(error), (Kind::OutOfRange, "selection".to_owned()));
        let error = call(of(0, GROUPS), of(LAYERS, groups)).unwrap_err();
        assert_eq!(refused(error), (Kind::OutOfRange, "slots".to_owned()));
    }
    let error = call(of(0, GROUPS), of(GROUPS - 1, GROUPS)).unwrap_err();
    assert_eq!(refused(error), (Kind::OutOfRange, "selection and slots overlap".to_owned()));
    let slots = of(GROUPS, GROUPS);
    call(of(0, GROUPS), slots).unwrap();
    e.settle();
    let picks: Vec<i32> = (0..(GROUPS * K) as i32).collect();
    for layer in 0..LAYERS {
        let group = [0, 1, 1, 1, 2][layer as usize];
        let picks = &picks[(group * K) as usize..][..K as usize];
        e.check(layer, picks, slots.part(bytes(group), bytes(1)).unwrap());
        e.cache.scatter(&step, LayerCall::whole(Layer(layer)), e.stream).unwrap();
    }
    e.cache.finish(&mut step, e.stream).unwrap();
    e.settle();
    assert_eq!(e.cache.retire(step, e.stream).unwrap().total(), (0, u64::from(K * LAYERS)));
}

#[test]
fn a_gather_that_a_layer_of_a_group_lacks_is_missed_at_the_end() {
    let mut e = Engine::new(config(), TestDevice::new(HostOptions::default()));
    e.start(200, 40, BringUp::Nothing);
    let (mut step, buffers) = e.begin();
    let streams = Streams { resolve: e.stream, gather: e.stream };
    for layer in 0..LAYERS {
        let call = LayerCall::whole(Layer(layer));
        if layer != 2 {
            e.cache.layer(&step, call, streams, buffers).unwrap();
        }
        e.cache.scatter(&step, call, e.stream).unwrap();
    }
    let error = e.cache.finish(&mut step, e.stream).unwrap_err();
    assert!(error.to_string().contains("layer 2"), "{error}");
    assert_eq!(refused(error), (Kind::InvalidState, "a gather was not enqueued".to_owned()));
    // Now it comes too late: the resolve of layer 4 has the list. The device says so.
    e.cache.gather(&step, LayerCall::whole(Layer(2)), 0, e.stream).unwrap();
    e.cache.finish(&mut step, e.stream).unwrap();
    e.settle();
    let failed = e.cache.retire(step, e.stream).unwrap_err().error;
    assert_eq!(failed.kind(), Kind::DeviceFailed, "{failed}");
}

/// What the host cannot see: the gather or the scatter of one layer never reaches the device. The resolve of the next
/// group finds the gather, or the report if there is none.
#[test]
fn a_call_that_a_layer_of_a_group_lost_fails_the_step() {
    let last = || Config { shape: Shape { lone_layers: 2, ..config().shape }, ..config() };
    let lost = |call, named| move |layer| (call, layer, named);
    let cases = (1..4).map(lost(Call::Gather, Some(4))).chain((1..4).map(lost(Call::Scatter, None)));
    let cases = cases.map(|case| (config(), case));
    for (new, (call, lost, named)) in cases.chain((2..5).map(|lost| (last(), (Call::Gather, lost, None)))) {
        for device in devices() {
            let around = Forgets::new(device.device(), None);
            let mut e = Engine::over(new.clone(), device, around.clone());
            e.start(200, 40, BringUp::Nothing);
            e.step();
            around.leave_out(move |made, range, _| made == call && range.layer == Layer(lost));
            e.checks = false;
            let error = e.try_step().unwrap_err();
            let layer = format!("layer {}", named.unwrap_or(lost));
            assert!(error.to_string().contains(&layer), "{call:?} of layer {lost}: {error}");
        }
    }
}

/// A step that is given up between the attention waves of a group: its first layer has gathered a wave, the next one
/// nothing. By the tables its rows are resident in every layer.
#[test]
fn a_step_given_up_between_the_waves_of_a_group_leaves_no_row_without_its_bytes() {
    for device in devices() {
        let mut e = Engine::new(Config { attention_waves: 2, ..config() }, device);
        e.start(200, K, BringUp::Nothing);
        assert_eq!(e.cache.attention_waves(), 2);
        let (handle, stream) = (e.own[0].handle, e.stream);
        let row = BatchRow { sequence: handle, accepted: Accepted::Rows(0), query_rows: QUERY_ROWS };
        let picks: Vec<i32> = (100..100 + (QUERY_ROWS * K) as i32).collect();
        let words: Vec<u8> = picks.iter().flat_map(|position| position.to_le_bytes()).collect();
        let part = |slice: Slice, words: usize| slice.part(0, 4 * words as u64).unwrap();
        let [selection, slots] = [e.selection, e.slots].map(|slice| part(slice, picks.len()));
        e.device.write(selection, &words).unwrap();
        let split = |rows: u32| {
            let [lists, counts] =
                [3 * rows * K, 3 * rows].map(|words| e.device.allocate(4 * u64::from(words)));
            Some(SplitIndices { lists: lists.unwrap(), counts: counts.unwrap(), batch: 1 })
        };
        let [wide, narrow] = [QUERY_ROWS, 1].map(split);
        let buffers = Buffers { selection, slots, split_indices: wide };
        let mut step = e.cache.prepare(MicroBatch(0), QUERY_ROWS, &[row], None, stream).unwrap();
        let call = |layer| LayerCall::whole(Layer(layer));
        e.cache.resolve(&step, call(0), stream, buffers).unwrap();
        (0..2).for_each(|wave| e.cache.gather(&step, call(0), wave, stream).unwrap());
        e.cache.resolve(&step, call(1), stream, buffers).unwrap();
        e.cache.gather(&step, call(1), 0, stream).unwrap();
        e.cache.abandon(&mut step).unwrap();
        e.cache.finish(&mut step, stream).unwrap();
        e.settle();
        assert_eq!(e.cache.retire(step, stream).unwrap_err().error.kind(), Kind::Cancelled);
        let _ticket = e.cache.truncate(handle, 200, stream).unwrap();
        e.settle();
        // The rows that the step would have kept.
        let (mut step, _) = e.begin();
        let (kept, picks) = (part(selection, K as usize), &picks[K as usize..]);
        e.device.write(kept, &words[4 * K as usize..]).unwrap();
        let buffers = Buffers { selection: kept, slots: part(slots, K as usize), split_indices: narrow };
        for layer in 0..LAYERS {
            e.cache.layer(&step, call(layer), Streams { resolve: stream, gather: stream }, buffers).unwrap();
            e.cache.gather(&step, call(layer), 1, stream).unwrap();
            e.settle();
            e.check(layer, picks, buffers.slots);
            e.cache.scatter(&step, call(layer), stream).unwrap();
        }
        e.cache.finish(&mut step, stream).unwrap();
        e.settle();
        assert_eq!(e.cache.retire(step, stream).unwrap().total(), (0, u64::from(K * LAYERS)));
    }
}

/// One sequence is at a layer whose rows are larger than those of the layer that another one is at, as in two
/// micro-batches. Both layers are the first of their groups, and both sequences have rows in scratch slots.
#[test]
fn scratch_rows_of_two_sequences_at_layers_with_different_rows_are_apart() {
    for device in devices() {
        let mut e = Engine::new(Config { micro_batches: 2, ..config() }, device);
        (0..2).for_each(|_| e.start(200, K, BringUp::Nothing));
        let stream = e.stream;
        let picks: Vec<i32> = (100..100 + (QUERY_ROWS * K) as i32).collect();
        let words: Vec<u8> = picks.iter().flat_map(|position| position.to_le_bytes()).collect();
        let buffers = |place: u64| {
            let [selection, slots] = [e.selection, e.slots]
                .map(|slice| slice.part(place * words.len() as u64, words.len() as u64));
            Buffers { selection: selection.unwrap(), slots: slots.unwrap(), split_indices: None }
        };
        let both = [buffers(0), buffers(1)];
        both.iter().for_each(|buffers| e.device.write(buffers.selection, &words).unwrap());
        let mut steps = Vec::new();
        // The second sequence stays at the first layer of the group, the first goes on to the group behind it.
        for (number, last) in [(1, 1), (0, 4)] {
            let sequence = e.own[number].handle;
            let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: QUERY_ROWS };
            let step = e.cache.prepare(MicroBatch(number as u32), QUERY_ROWS, &[row], None, stream).unwrap();
            for layer in 0..=last {
                let streams = Streams { resolve: stream, gather: stream };
                e.cache.layer(&step, LayerCall::whole(Layer(layer)), streams, both[number]).unwrap();
            }
            steps.push((step, number, last));
        }
        e.settle();
        for (_, number, layer) in &steps {
            let mut slots = vec![0; words.len()];
            e.device.read(both[*number].slots, &mut slots).unwrap();
            for (position, slot) in picks.iter().zip(slots.as_chunks::<4>().0) {
                let slot = e.slot(*layer, u32::from_le_bytes(*slot));
                let row = e.row(*layer, &e.own[*number], *position as u32);
                assert!(slot == row, "sequence {number} at layer {layer}: position {position}");
            }
        }
        for (mut step, ..) in steps {
            e.cache.abandon(&mut step).unwrap();
            e.cache.finish(&mut step, stream).unwrap();
            e.settle();
            assert!(e.cache.retire(step, stream).is_err());
        }
    }
}

/// The host device, and the CUDA device where there is a driver.
fn devices() -> Vec<Arc<TestDevice>> {
    let host = TestDevice::host(HostOptions::default());
    #[cfg(feature = "cuda")]
    return [Some(host), TestDevice::cuda(&HostOptions::default(), None)].into_iter().flatten().collect();
    #[cfg(not(feature = "cuda"))]
    vec![host]
}

#[test]
fn tables_by_layer_are_equal_in_a_group() {
    let device = || TestDevice::host(HostOptions::default());
    let new = |config: Config| Cache::new(config, device().device()).map(drop);
    let slots = |table: [u32; 5]| Config { slots: Slots::ByLayer(table.to_vec()), ..config() };
    new(slots([64, 128, 128, 128, 192])).unwrap();
    let error = new(slots([64, 128, 128, 192, 192])).unwrap_err();
    assert_eq!(refused(error), (Kind::InvalidConfig, "slots by layer".to_owned()));
    let group = |first, layers, top_k| IndexGroup { first, layers, top_k };
    for (groups, place) in [
        (vec![group(0, 3, 0), group(2, 3, 0)], "groups overlap"),
        (vec![group(0, 3, 0), group(3, 0, 0)], "a group names no first layer"),
        (vec![group(0, 3, 0), group(3, 2, K / 2)], "groups differ in k"),
        (vec![group(0, 3, 0)], "a layer in no group"),
    ] {
        let error = new(Config { index_groups: groups, ..config() }).unwrap_err();
        assert_eq!(refused(error), (Kind::InvalidConfig, place.to_owned()));
    }
    let mut e = Engine::new(config(), device());
    e.start(100, 40, BringUp::Nothing);
    let own = e.own[0].handle;
    let mut resize = |table: [u32; 5]| e.cache.resize(own, &Budget::ByLayer(table.to_vec()), e.stream);
    let error = resize([40, 50, 50, 51, 60]).unwrap_err();
    assert_eq!(
        refused(error),
        (Kind::InvalidConfig, "layers of one index group with different budgets".to_owned())
    );
    resize([40, 50, 50, 50, 60]).unwrap();
    assert_eq!(e.cache.budgets(own).unwrap(), [40, 50, 60]);
}
