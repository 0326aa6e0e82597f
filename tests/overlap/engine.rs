//! An engine with a real, small attention: all its work runs in its streams, by `Device::call`.
//!
//! Its attention behaves like FlashMLA's: a share without a valid index returns log-sum-exp +inf and not-a-numbers, so
//! the merge must take validity from the counts.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use forebay::device::clock::ClockDevice;
use forebay::device::{Device, Event, Slice, SplitIndices, Stream};
use forebay::overlap::{Attended, Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Layer, Layers, Memory,
    MicroBatch, Open, Result, Sequence, Shape, Slots, Step, WarmUp,
};

use crate::device::TestDevice;
use crate::kernels::{K, ROW, attend, merge};
use crate::reference::{Token, WIDTH, attention, chance, query};

pub const LAYERS: u32 = 3;
pub const DRAFT_LAYERS: u32 = 1;
const BATCH: u32 = 3;
const PROMPT: u32 = 150;

/// The parameters of a run.
#[derive(Clone, Debug, Default)]
pub struct Setting {
    pub seed: u64,
    pub half: u32,
    pub query_rows: u32,
    pub budget: u32,
    pub waves: u32,
    /// Sequences of each micro-batch.
    pub real: [u32; 2],
    /// The chance that an entry of a selection is empty.
    pub empty: f64,
    /// Steps are enqueued for the whole captured batch, whose last rows are inert.
    pub captured: bool,
    /// Steps have any number of query rows up to `query_rows`.
    pub narrow: bool,
    /// Layers are enqueued one by one.
    pub one_by_one: bool,
}

#[derive(Debug)]
struct Decoded {
    handle: Sequence,
    id: u64,
    length: u32,
    landed: u32,
    /// Query rows of this step.
    rows: u32,
    /// By position, the step that wrote the row.
    versions: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Micro {
    layers: Layers,
    ended: Event,
}

/// A query row of a layer in a step: micro-batch, layer, draft pass, batch row, query row.
type Place = (u32, u32, u32, u32, u32);

/// How an engine fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Refuses,
    Panics,
}

/// The work of a step that is enqueued.
enum What<'a> {
    Step(&'a [Overlap]),
    Layer(Layer, Option<u32>),
}

/// The findings of the streams' work.
#[derive(Debug, Default)]
struct Found {
    /// The valid entries, the log-sum-exp and the output of each share.
    split_indices: BTreeMap<Place, Vec<(u32, f32, [f32; WIDTH])>>,
    merged: BTreeMap<Place, Option<[f32; WIDTH]>>,
    /// Rows that a share attended to, resident and fetched.
    attended: [u64; 2],
}

/// See the file's head.
pub struct Decode {
    setting: Setting,
    pub cache: Cache,
    device: Arc<dyn Device>,
    memory: Arc<TestDevice>,
    slabs: Vec<Slice>,
    micro: Vec<Micro>,
    sequences: [Vec<Decoded>; 2],
    number: u64,
    /// Query rows of this step.
    width: u32,
    found: Arc<Mutex<Found>>,
    fail: Option<(u32, Fault)>,
    stray: Option<Stream>,
    compared: u64,
}

fn config(setting: &Setting) -> Config {
    let shape = Shape {
        layers: LAYERS,
        draft_layers: DRAFT_LAYERS,
        runs: [ROW as u32, 0],
        index_key_bytes: 4,
        page_tokens: 16,
        top_k: K as u32,
        ..Shape::DEEPSEEK_V3_2
    };
    Config {
        slots: Slots::Uniform(setting.budget.next_multiple_of(64) * 2 * BATCH),
        min_budget: setting.budget,
        attention_waves: setting.waves,
        batch: BATCH,
        query_rows: setting.query_rows,
        micro_batches: 2,
        memory: Memory { huge: false, populate: false, lock: false, node: None },
        ..Config::new(shape, 2 * BATCH, PROMPT + 80, 64)
    }
}

fn bytes(row: &[f32; WIDTH]) -> Vec<u8> {
    row.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Decode {
    /// Opens the sequences of both micro-batches, prompts and all, on `device`, whose bytes `memory` reads.
    pub fn new(setting: Setting, device: Arc<dyn Device>, memory: Arc<TestDevice>) -> Decode {
        let mut cache = Cache::new(config(&setting), Arc::clone(&device)).unwrap();
        let words = |count: u64| device.allocate(4 * count).unwrap();
        let rows = u64::from(BATCH * setting.query_rows);
        let lists = 1 + u64::from(setting.waves);
        let micro = || {
            let stream = || device.stream().unwrap();
            let streams =
                OverlapStreams { compute: stream(), resolve: stream(), gather: stream(), scatter: stream() };
            let k = K as u64;
            let split_indices = Some(SplitIndices {
                lists: words(lists * rows * k),
                counts: words(lists * rows),
                batch: BATCH,
            });
            let buffers = Buffers { selection: words(rows * k), slots: words(rows * k), split_indices };
            let layers = Layers { streams, batch: BATCH, half: setting.half, buffers };
            Micro { layers, ended: device.event().unwrap() }
        };
        let micro = vec![micro(), micro()];
        let mut next = 0;
        let sequences = [0, 1].map(|m: usize| {
            let open = |_| {
                next += 1;
                let handle = enter(&mut cache, &setting, next, micro[m].layers.streams.compute);
                let versions = vec![0; PROMPT as usize];
                Decoded { handle, id: next, length: PROMPT, landed: 0, rows: 0, versions }
            };
            (0..setting.real[m]).map(open).collect()
        });
        let slabs = (0..LAYERS + DRAFT_LAYERS).map(|l| cache.slab(Layer(l)).unwrap()).collect();
        let found = Arc::default();
        Decode {
            setting,
            cache,
            device,
            memory,
            slabs,
            micro,
            sequences,
            number: 0,
            width: 0,
            found,
            fail: None,
            stray: None,
            compared: 0,
        }
    }

    /// The engine's call number `calls`, counted from now on, fails.
    pub fn fail_after(&mut self, calls: u32, how: Fault) {
        self.fail = Some((calls, how));
    }

    /// From now on preparation is enqueued on a stream of the engine's own.
    pub fn stray(&mut self) {
        self.stray = Some(self.device.stream().unwrap());
    }

    /// Runs one step of both micro-batches and compares it with the expected rows. Returns the error of an abandoned
    /// step.
    pub fn step(&mut self, orders: &[Overlap]) -> Result<()> {
        let mut steps = self.prepare();
        let orders: Vec<Overlap> =
            orders.iter().cycle().copied().take((LAYERS + DRAFT_LAYERS) as usize).collect();
        let mut expected = BTreeMap::new();
        let layers = self.layers(&steps);
        let panics = self.fail.is_some_and(|(_, how)| how == Fault::Panics);
        let enqueued = match panics {
            false => self.enqueue(&mut steps, &layers, What::Step(&orders), &mut expected),
            true => catch_unwind(AssertUnwindSafe(|| {
                self.enqueue(&mut steps, &layers, What::Step(&orders), &mut expected)
            }))
            .unwrap_or_else(|_| Err(Error::new(Kind::Internal, "engine"))),
        };
        for (step, micro) in steps.iter_mut().zip(self.micro.clone()) {
            let compute = micro.layers.streams.compute;
            if enqueued.is_err() && self.setting.one_by_one {
                // Layer by layer, the other micro-batch's step has no part in it.
                self.cache.abandon(step).unwrap();
            }
            self.cache.finish(step, compute).unwrap();
            self.device.record(micro.ended, compute).unwrap();
        }
        for (step, micro) in steps.into_iter().zip(self.micro.clone()) {
            self.device.synchronize(micro.ended).unwrap();
            let retired = self.cache.retire(step, micro.layers.streams.compute);
            match (&enqueued, retired.map(|_| ())) {
                (Ok(()), Ok(())) => {}
                (Err(_), Err(unretired)) => {
                    assert!(unretired.step.is_none());
                    assert_eq!(unretired.error.kind(), Kind::Cancelled);
                }
                (enqueued, retired) => panic!("{enqueued:?}, but {retired:?}"),
            }
        }
        let found = std::mem::take(&mut *self.found.lock().unwrap());
        enqueued?;
        self.compare(&expected, &found);
        self.compare_stored();
        self.cache.validate()
    }

    /// The step's new rows are in the total pool.
    fn compare_stored(&self) {
        for sequence in self.sequences.iter().flatten() {
            for layer in 0..LAYERS + DRAFT_LAYERS {
                for position in sequence.length..sequence.length + sequence.rows {
                    let mut stored = [0; ROW as usize];
                    self.cache.read_row(sequence.handle, Layer(layer), position, &mut stored).unwrap();
                    let (position, version) = (position.into(), self.number);
                    let token = Token { sequence: sequence.id, layer: layer.into(), position, version };
                    assert_eq!(stored[..], bytes(&token.row()), "{token:?}");
                }
            }
        }
    }

    /// Enqueues the layers of prepared steps, with a change to the arguments that they share, and nothing more.
    pub fn enqueue_only(
        &mut self,
        steps: &mut [Step],
        orders: &[Overlap],
        change: &dyn Fn(&mut Layers),
    ) -> Result<()> {
        let mut layers = self.layers(steps);
        layers.iter_mut().for_each(change);
        self.enqueue(steps, &layers, What::Step(orders), &mut BTreeMap::new())
    }

    /// Layers on another stream than the ones before them: the error, and the engine's calls.
    pub fn other_streams(&mut self, steps: &mut [Step]) -> (Error, u32) {
        let other = self.device.stream().unwrap();
        self.fail = Some((100, Fault::Refuses));
        let change = |layers: &mut Layers| layers.streams.gather = other;
        let error = self.enqueue_only(steps, &[Overlap::Da; 4], &change).unwrap_err();
        (error, 100 - self.fail.map_or(0, |(left, _)| left))
    }

    /// One layer or draft pass of prepared steps.
    pub fn one_layer(&mut self, steps: &mut [Step], (layer, draft_pass): (u32, Option<u32>)) -> Result<()> {
        let layers = self.layers(steps);
        self.enqueue(steps, &layers, What::Layer(Layer(layer), draft_pass), &mut BTreeMap::new())
    }

    /// A step that is abandoned at the engine's call number `calls`, then finished, and not yet retired. Returns what
    /// the next prepare returns, and the retirements.
    pub fn after_an_abandoned_step(&mut self, calls: u32, orders: &[Overlap]) -> (Error, [Kind; 2]) {
        let mut steps = self.prepare();
        self.fail_after(calls, Fault::Refuses);
        let layers = self.layers(&steps);
        self.enqueue(&mut steps, &layers, What::Step(orders), &mut BTreeMap::new()).unwrap_err();
        let micros = self.micro.clone();
        for (step, micro) in steps.iter_mut().zip(&micros) {
            self.cache.finish(step, micro.layers.streams.compute).unwrap();
            self.device.record(micro.ended, micro.layers.streams.compute).unwrap();
        }
        let first = &self.sequences[0][0];
        let row = BatchRow { sequence: first.handle, accepted: Accepted::Rows(first.landed), query_rows: 1 };
        let compute = micros[0].layers.streams.compute;
        let refused = self.cache.prepare(MicroBatch(0), self.width, &[row], None, compute).unwrap_err();
        let mut kinds = steps.into_iter().zip(&micros).map(|(step, micro)| {
            self.device.synchronize(micro.ended).unwrap();
            self.cache.retire(step, micro.layers.streams.compute).unwrap_err().error.kind()
        });
        let kinds = [kinds.next().unwrap(), kinds.next().unwrap()];
        (refused, kinds)
    }

    /// A step whose scatter stream the device does not have, finished on another stream while its compute streams are
    /// held. Returns whether it ends only after them.
    pub fn ends_after_its_work(&mut self, clock: &ClockDevice, orders: &[Overlap]) -> bool {
        let other = self.device.stream().unwrap();
        let mut steps = self.prepare();
        self.micro.iter().for_each(|m| clock.hold(m.layers.streams.compute).unwrap());
        let strange = |layers: &mut Layers| layers.streams.scatter = Stream(9999);
        self.enqueue_only(&mut steps, orders, &strange).unwrap_err();
        let mut held = true;
        for (mut step, micro) in steps.into_iter().zip(self.micro.clone()) {
            self.cache.finish(&mut step, other).unwrap();
            self.device.record(micro.ended, other).unwrap();
            (0..1000).for_each(|_| held &= !self.device.query(micro.ended).unwrap());
            clock.let_go(micro.layers.streams.compute).unwrap();
            self.device.synchronize(micro.ended).unwrap();
            assert_eq!(self.cache.retire(step, other).unwrap_err().error.kind(), Kind::Cancelled);
        }
        held
    }

    /// Enqueues a step while its scatter streams are held, finishes it, and returns whether it ended before they were
    /// released.
    pub fn is_held_by_its_scatters(
        &mut self,
        clock: &ClockDevice,
        orders: &[Overlap],
        finished_on: Option<Stream>,
    ) -> bool {
        let mut steps = self.prepare();
        self.micro.iter().for_each(|m| clock.hold(m.layers.streams.scatter).unwrap());
        let layers = self.layers(&steps);
        self.enqueue(&mut steps, &layers, What::Step(orders), &mut BTreeMap::new()).unwrap();
        let mut held = true;
        let micros = self.micro.clone();
        for (mut step, micro) in steps.into_iter().zip(micros) {
            let stream = finished_on.unwrap_or(micro.layers.streams.compute);
            self.cache.finish(&mut step, stream).unwrap();
            self.device.record(micro.ended, stream).unwrap();
            (0..1000).for_each(|_| held &= !self.device.query(micro.ended).unwrap());
            clock.let_go(micro.layers.streams.scatter).unwrap();
            self.device.synchronize(micro.ended).unwrap();
            self.cache.retire(step, stream).unwrap();
        }
        held
    }

    /// Prepares a step of both micro-batches.
    pub fn prepare(&mut self) -> Vec<Step> {
        self.number += 1;
        let (seed, number, most) = (self.setting.seed, self.number, self.setting.query_rows);
        let narrow = 1 + (chance(seed, &[number, 77]) * f64::from(most)) as u32;
        let query_rows = if self.setting.narrow { narrow } else { most };
        self.width = query_rows;
        let mut steps = Vec::new();
        for (m, sequences) in self.sequences.iter_mut().enumerate() {
            let mut rows = Vec::new();
            for sequence in sequences {
                let draw =
                    |what, below: u32| (chance(seed, &[number, sequence.id, what]) * f64::from(below)) as u32;
                let accepted = draw(1, sequence.landed + 1);
                (sequence.rows, sequence.length) = (1 + draw(2, query_rows), sequence.length + accepted);
                sequence.versions.truncate(sequence.length as usize);
                sequence.versions.resize((sequence.length + sequence.rows) as usize, number);
                sequence.landed = sequence.rows;
                rows.push(BatchRow {
                    sequence: sequence.handle,
                    accepted: Accepted::Rows(accepted),
                    query_rows: sequence.rows,
                });
            }
            let compute = self.micro[m].layers.streams.compute;
            let micro = MicroBatch(m as u32);
            steps.push(self.cache.prepare(micro, query_rows, &rows, None, compute).unwrap());
        }
        steps
    }

    /// The arguments that the layers of each step share.
    fn layers(&self, steps: &[Step]) -> Vec<Layers> {
        let batch = |step: &Step| if self.setting.captured { BATCH } else { step.rows() };
        steps.iter().zip(&self.micro).map(|(step, m)| Layers { batch: batch(step), ..m.layers }).collect()
    }

    fn enqueue(
        &mut self,
        steps: &mut [Step],
        layers: &[Layers],
        what: What<'_>,
        expected: &mut Expected,
    ) -> Result<()> {
        let mut engine = Callbacks {
            seed: self.setting.seed,
            empty: self.setting.empty,
            number: self.number,
            device: &*self.device,
            memory: &self.memory,
            slabs: &self.slabs,
            micro: &self.micro,
            sequences: &self.sequences,
            landing: self.landing(),
            found: &self.found,
            fail: &mut self.fail,
            stray: self.stray,
            expected,
        };
        let drafts = self.width;
        let mut with: Vec<(&mut Step, Layers)> = steps.iter_mut().zip(layers.iter().copied()).collect();
        let orders = match what {
            What::Step(orders) if self.setting.one_by_one => orders,
            What::Step(orders) => return self.cache.overlap_steps(&mut with, orders, drafts, &mut engine),
            What::Layer(layer, draft_pass) => {
                let (step, layers) = &mut with[0];
                return self.cache.overlap(step, layer, draft_pass, Overlap::None, layers, &mut engine);
            }
        };
        let passes = (0..drafts).map(|pass| (Layer(LAYERS), Some(pass)));
        for (layer, draft_pass) in (0..LAYERS).map(|layer| (Layer(layer), None)).chain(passes) {
            for (step, layers) in &mut with {
                let order = orders[layer.index()];
                self.cache.overlap(step, layer, draft_pass, order, layers, &mut engine)?;
            }
        }
        Ok(())
    }

    /// Landing slots by micro-batch, batch row, query row.
    fn landing(&self) -> Vec<Vec<Vec<u32>>> {
        let rows = |s: &Decoded| (0..s.rows).map(|r| self.cache.landing_slot(s.handle, r).unwrap()).collect();
        self.sequences.iter().map(|all| all.iter().map(rows).collect()).collect()
    }

    fn compare(&mut self, expected: &Expected, found: &Found) {
        assert!(found.merged.keys().eq(expected.keys()), "every query row is attended to once");
        for (place, want) in expected {
            match (&found.merged[place], want) {
                (None, None) => {}
                (Some(got), Some(want)) => {
                    for (got, want) in got.iter().zip(want) {
                        assert!((f64::from(*got) - want).abs() < 1e-4, "{place:?}: {got} for {want}");
                    }
                }
                other => panic!("{place:?}: {other:?}"),
            }
            self.compared += 1;
        }
    }

    /// Notes that something was compared.
    pub fn check(&self) {
        assert!(self.compared > 0);
        let stats = self.cache.stats();
        assert!(stats.hits > 0 && stats.misses > 0, "{stats:?}");
    }

    /// The resident rows, sequence by sequence.
    pub fn digests(&self) -> Vec<u64> {
        self.sequences.iter().flatten().map(|s| self.cache.digest(s.handle).unwrap()).collect()
    }

    /// Truncates every sequence to its accepted length.
    pub fn truncate(&mut self) {
        (self.fail, self.stray) = (None, None);
        *self.found.lock().unwrap() = Found::default();
        for (sequences, micro) in self.sequences.iter_mut().zip(&self.micro) {
            for sequence in sequences {
                let compute = micro.layers.streams.compute;
                let length = self.cache.length(sequence.handle).unwrap().committed;
                assert_eq!(length, sequence.length, "rows accepted before the abandoned step stay");
                let _ready = self.cache.truncate(sequence.handle, length, compute).unwrap();
                sequence.landed = 0;
            }
        }
    }
}

/// Opens a sequence, appends its prompt in every layer and joins it.
fn enter(cache: &mut Cache, setting: &Setting, id: u64, stream: Stream) -> Sequence {
    let open = Open {
        prompt: PROMPT,
        promised: 60,
        budget: Budget::Slots(setting.budget),
        bring_up: BringUp::Nothing,
    };
    let handle = cache.open(&open).unwrap();
    for layer in 0..LAYERS + DRAFT_LAYERS {
        let token = |position| Token { sequence: id, layer: layer.into(), position, version: 0 };
        let rows: Vec<u8> = (0..u64::from(PROMPT)).flat_map(|p| bytes(&token(p).row())).collect();
        cache.append(handle, Layer(layer), &rows).unwrap();
    }
    let _ready = cache.join(handle, stream, WarmUp::default()).unwrap();
    handle
}

type Expected = BTreeMap<Place, Option<[f64; WIDTH]>>;

/// The engine's side of one step.
struct Callbacks<'a> {
    seed: u64,
    empty: f64,
    number: u64,
    device: &'a dyn Device,
    memory: &'a Arc<TestDevice>,
    slabs: &'a [Slice],
    micro: &'a [Micro],
    sequences: &'a [Vec<Decoded>; 2],
    landing: Vec<Vec<Vec<u32>>>,
    found: &'a Arc<Mutex<Found>>,
    fail: &'a mut Option<(u32, Fault)>,
    stray: Option<Stream>,
    expected: &'a mut Expected,
}

impl Callbacks<'_> {
    fn place(call: &EngineCall, row: u32, query: u32) -> Place {
        let draft_pass = if call.layer.0 < LAYERS { 0 } else { call.rows.first };
        (call.micro_batch.0, call.layer.0, draft_pass, row, query)
    }

    /// The batch rows of a call with their query rows.
    fn rows(&self, call: &EngineCall) -> Vec<(u32, u32)> {
        let sequences = &self.sequences[call.micro_batch.index()];
        let queries = call.rows.first..call.rows.first + call.rows.count;
        let both = |row: u32| queries.clone().map(move |query| (row, query));
        let real = |(row, query): &(u32, u32)| sequences.get(*row as usize).is_some_and(|s| *query < s.rows);
        (call.first..call.first + call.count).flat_map(both).filter(real).collect()
    }

    /// Positions for a query row: distinct, new rows of the step among them.
    fn select(&self, call: &EngineCall, row: u32, query: u32) -> Vec<i32> {
        let sequence = &self.sequences[call.micro_batch.index()][row as usize];
        let reach = sequence.length + query + 1;
        let draw = |what: u64| {
            let names = [self.number, sequence.id, call.layer.0.into(), call.rows.first.into(), query.into()];
            chance(self.seed, &[&names[..], &[what]].concat())
        };
        let mut positions = Vec::new();
        for entry in 0..K as u64 {
            // Mostly positions near the end or among a few old rows, so that some stay resident.
            let near = draw(1000 + entry) < 0.6;
            let span = if near { 20.0 } else { f64::from(reach) };
            let position = (reach - 1).saturating_sub((draw(entry) * span) as u32) as i32;
            let none = draw(2000 + entry) < self.empty || positions.contains(&position);
            positions.push(if none { -1 } else { position });
        }
        positions
    }

    fn run(&self, stream: Stream, work: impl Fn() + Send + Sync + 'static) -> Result<()> {
        self.device.call(stream, Arc::new(work))
    }

    fn index(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let buffer = self.micro[call.micro_batch.index()].layers.buffers.selection;
        let mut writes = Vec::new();
        for (row, query) in self.rows(call) {
            let positions = self.select(call, row, query);
            let sequence = &self.sequences[call.micro_batch.index()][row as usize];
            let layer = u64::from(call.layer.0);
            let token = |p: &i32| {
                let (position, version) = (*p as u64, sequence.versions[*p as usize]);
                Token { sequence: sequence.id, layer, position, version }.row()
            };
            let rows: Vec<[f32; WIDTH]> = positions.iter().filter(|p| **p >= 0).map(token).collect();
            let asked = self::query(sequence.id, layer, self.number, query.into());
            self.expected.insert(Self::place(call, row, query), attention(&asked, &rows));
            let at = u64::from(row * call.rows.count + query - call.rows.first) * K as u64;
            let bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_le_bytes()).collect();
            writes.push((buffer.part(4 * at, bytes.len() as u64)?, bytes));
        }
        let memory = Arc::clone(self.memory);
        self.run(stream, move || {
            writes.iter().for_each(|(slice, bytes)| memory.write(*slice, bytes).unwrap())
        })
    }

    fn prepare(&self, call: &EngineCall, stream: Stream) -> Result<()> {
        let slab = self.slabs[call.layer.index()];
        let mut writes = Vec::new();
        for (row, query) in self.rows(call) {
            let sequence = &self.sequences[call.micro_batch.index()][row as usize];
            let slot = self.landing[call.micro_batch.index()][row as usize][query as usize];
            let position = u64::from(sequence.length + query);
            let token =
                Token { sequence: sequence.id, layer: call.layer.0.into(), position, version: self.number };
            writes.push((slab.part(u64::from(slot) * ROW, ROW)?, bytes(&token.row())));
        }
        let memory = Arc::clone(self.memory);
        self.run(stream, move || {
            writes.iter().for_each(|(slice, bytes)| memory.write(*slice, bytes).unwrap())
        })
    }

    fn attend(&self, call: EngineCall, attended: Attended, stream: Stream) -> Result<()> {
        let Buffers { slots, split_indices, .. } = self.micro[call.micro_batch.index()].layers.buffers;
        let slab = self.slabs[call.layer.index()];
        let mut reads = Vec::new();
        let width = 4 * K as u64;
        for (row, query) in self.rows(&call) {
            let at = u64::from(row * call.rows.count + query - call.rows.first);
            let rows = u64::from(BATCH * call.rows.count);
            let of = |number: u64| -> Result<(Slice, Option<Slice>)> {
                let split_indices = split_indices.ok_or_else(|| Error::new(Kind::Internal, "attend"))?;
                let at = number * rows + at;
                Ok((
                    split_indices.lists.part(at * width, width)?,
                    Some(split_indices.counts.part(4 * at, 4)?),
                ))
            };
            let (list, count) = match attended {
                Attended::All => (slots.part(at * width, width)?, None),
                Attended::Resident => of(0)?,
                Attended::Fetched { wave } => of(1 + u64::from(wave))?,
            };
            let sequence = &self.sequences[call.micro_batch.index()][row as usize];
            let asked = self::query(sequence.id, call.layer.0.into(), self.number, query.into());
            reads.push((Self::place(&call, row, query), list, count, asked));
        }
        // Rows of the captured batch without a sequence resolve to no slots, whatever they select.
        let mut inert = Vec::new();
        for row in self.sequences[call.micro_batch.index()].len() as u32..call.count {
            let at = u64::from(row * call.rows.count);
            inert.push(slots.part(at * width, u64::from(call.rows.count) * width)?);
        }
        let (memory, found) = (Arc::clone(self.memory), Arc::clone(self.found));
        self.run(stream, move || {
            for slice in &inert {
                let mut bytes = vec![0; slice.bytes() as usize];
                memory.read(*slice, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == 0xFF), "an inert row has a slot");
            }
            for (place, list, count, asked) in &reads {
                let range = attend(&memory, slab, (*list, *count), asked);
                let mut found = found.lock().unwrap();
                found.attended[usize::from(matches!(attended, Attended::Fetched { .. }))] +=
                    u64::from(range.0);
                match attended {
                    Attended::All => {
                        found.merged.insert(*place, (range.0 > 0).then_some(range.2));
                    }
                    _ => found.split_indices.entry(*place).or_default().push(range),
                }
            }
        })
    }

    fn merge(&self, call: &EngineCall, stream: Stream) -> Result<()> {
        let places: Vec<Place> =
            self.rows(call).iter().map(|(row, query)| Self::place(call, *row, *query)).collect();
        let found = Arc::clone(self.found);
        self.run(stream, move || {
            let mut found = found.lock().unwrap();
            for place in &places {
                let split_indices = found.split_indices.remove(place).unwrap_or_default();
                found.merged.insert(*place, merge(&split_indices));
            }
        })
    }
}

impl Engine for Callbacks<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        match self.fail.as_mut() {
            Some((0, Fault::Refuses)) => return Err(Error::new(Kind::Io, "engine").at("the engine's own")),
            Some((0, Fault::Panics)) => std::panic::panic_any("a callback that panics"),
            Some((left, _)) => *left -= 1,
            None => {}
        }
        match call.work {
            Work::Project | Work::Rest => self.run(stream, || {}),
            Work::Index => self.index(call, stream),
            Work::Prepare => self.prepare(call, self.stray.unwrap_or(stream)),
            Work::Attend(attended) => self.attend(*call, attended, stream),
            Work::Merge => self.merge(call, stream),
        }
    }
}
