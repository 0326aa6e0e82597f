//! An engine whose steps are enqueued layer by layer, or captured once and launched: the same callbacks for both.
//!
//! When a callback's work runs, it looks up its step: each micro-batch's steps wait in a queue, and the first work of a
//! step takes the next one. So a graph that was captured once does the work of any step.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use forebay::device::{Device, Slice, SplitIndices, Stream};
use forebay::overlap::{Attended, Engine, EngineCall, OverlapStreams, Work};
use forebay::{Buffers, Geometries, Geometry, Layers, Result};

use crate::device::TestDevice;

/// Positions that a query row selects.
pub const K: usize = 12;
/// Ordinary layers, and the draft layers after them.
pub const LAYERS: u32 = 3;
pub const DRAFT_LAYERS: u32 = 1;
/// Batch rows of a micro-batch.
pub const BATCH: u32 = 4;
/// Query rows of the widest step.
pub const QUERY_ROWS: u32 = 3;

/// A batch row of a step.
#[derive(Clone, Debug)]
pub struct RowWork {
    pub sequence: u64,
    /// Committed tokens.
    pub length: u32,
    /// Its query rows.
    pub rows: u32,
    /// The landing slot of each.
    pub landing: Vec<u32>,
    /// By position, the step that wrote the row.
    pub versions: Vec<u64>,
}

/// The contents of a step, as its callbacks look them up.
#[derive(Clone, Debug)]
pub struct StepWork {
    pub number: u64,
    pub seed: u64,
    pub rows: Vec<RowWork>,
}

/// A micro-batch's steps to come and the one in progress.
#[derive(Debug, Default)]
struct Turn {
    waiting: VecDeque<StepWork>,
    now: Option<StepWork>,
    /// Rows of the current layer that attention has read: batch row, query row, position.
    read: Vec<(u32, u32, u32)>,
}

/// State that the callbacks share with the test.
#[derive(Debug)]
pub struct Shared {
    geometry: Geometries,
    turns: [Mutex<Turn>; 2],
    wrong: Mutex<Vec<String>>,
}

impl Shared {
    pub fn new(geometry: Geometries) -> Arc<Shared> {
        Arc::new(Shared { geometry, turns: Default::default(), wrong: Mutex::default() })
    }

    /// A step that will run after those of its micro-batch.
    pub fn queue(&self, micro: usize, work: StepWork) {
        self.turns[micro].lock().unwrap().waiting.push_back(work);
    }

    /// The errors that attention saw so far.
    pub fn wrong(&self) -> Vec<String> {
        self.wrong.lock().unwrap().clone()
    }

    fn turn(&self, call: &EngineCall) -> MutexGuard<'_, Turn> {
        self.turns[call.micro_batch.index()].lock().unwrap()
    }

    /// The layer that selects for a call's layer.
    fn selects(&self, call: &EngineCall) -> u32 {
        self.geometry.first_of(call.layer.index()) as u32
    }

    fn complain(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }
}

/// A pseudo-random number from these values.
pub fn draw(names: &[u64], below: u32) -> u32 {
    let mixed = names.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |mixed, name| {
        let mixed = (mixed ^ name).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB)
    });
    (((mixed >> 32) * u64::from(below.max(1))) >> 32) as u32
}

/// The bytes of a row: its sequence, layer and position, and the step that wrote it.
pub fn row_bytes(geometry: &Geometry, names: [u64; 4]) -> Vec<u8> {
    let words = geometry.row_bytes() / 4;
    (0..words).flat_map(|word| draw(&[&names[..], &[word.into()]].concat(), u32::MAX).to_le_bytes()).collect()
}

impl RowWork {
    /// The row at a position, as it was when the step was prepared, or as the step writes it.
    fn row(&self, geometry: &Geometry, layer: u32, position: u32) -> Vec<u8> {
        let version = self.versions[position as usize];
        row_bytes(geometry, [self.sequence, layer.into(), position.into(), version])
    }
}

impl StepWork {
    /// The selection of a query row in a layer: distinct positions, mostly near ones, some of them of its own step.
    fn positions(&self, layer: u32, row: u32, query: u32) -> Vec<i32> {
        let Some(of) = self.rows.get(row as usize).filter(|of| query < of.rows) else {
            // Positions that no row may select: inert rows are ignored.
            return vec![0x7000_0000 + row as i32; K];
        };
        let reach = of.length + query + 1;
        let chance = |what: u64, below: u32| {
            let names = [self.seed, self.number, of.sequence, layer.into(), query.into(), what];
            draw(&names, below)
        };
        let mut positions: Vec<i32> = Vec::with_capacity(K);
        for entry in 0..K as u64 {
            let span = if chance(3 * entry, 10) < 6 { 24.min(reach) } else { reach };
            let position = (reach - 1 - chance(3 * entry + 1, span)) as i32;
            let none = chance(3 * entry + 2, 20) == 0 || positions.contains(&position);
            positions.push(if none { -1 } else { position });
        }
        positions
    }

    /// Entries that attention must read: batch row, query row, position.
    fn expected(&self, call: &EngineCall, selects: u32) -> Vec<(u32, u32, u32)> {
        let mut all = Vec::new();
        for (row, of) in (0..).zip(&self.rows) {
            for query in call.rows.first..(call.rows.first + call.rows.count).min(of.rows) {
                let positions =
                    self.positions(selects, row, query).into_iter().filter(|position| *position >= 0);
                all.extend(positions.map(|position| (row, query, position as u32)));
            }
        }
        all.sort_unstable();
        all
    }
}

/// The engine's side of the layers of both micro-batches.
pub struct Callbacks<'a> {
    pub queue: &'a dyn Device,
    pub memory: Weak<TestDevice>,
    pub shared: Arc<Shared>,
    pub layers: [Layers; 2],
    pub slabs: Vec<Slice>,
}

/// The state of a callback when it runs.
#[derive(Clone)]
struct Running {
    memory: Weak<TestDevice>,
    shared: Arc<Shared>,
    call: EngineCall,
    buffers: Buffers,
    slab: Slice,
}

impl Engine for Callbacks<'_> {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> Result<()> {
        let running = Running {
            memory: self.memory.clone(),
            shared: Arc::clone(&self.shared),
            call: *call,
            buffers: self.layers[call.micro_batch.index()].buffers,
            slab: self.slabs[call.layer.index()],
        };
        let work: Arc<dyn Fn() + Send + Sync> = match call.work {
            Work::Project => Arc::new(move || running.project()),
            Work::Index => Arc::new(move || running.index()),
            Work::Prepare => Arc::new(move || running.prepare()),
            Work::Attend(attended) => Arc::new(move || running.attend(attended)),
            Work::Merge => return Ok(()),
            Work::Rest => Arc::new(move || running.rest()),
        };
        self.queue.call(stream, work)
    }
}

impl Running {
    fn memory(&self) -> Arc<TestDevice> {
        self.memory.upgrade().unwrap()
    }

    /// The first work of a step takes the next one from the queue.
    fn project(&self) {
        let mut turn = self.shared.turn(&self.call);
        if self.call.layer.0 == 0 {
            turn.now = turn.waiting.pop_front();
        }
        turn.read.clear();
    }

    fn index(&self) {
        let turn = self.shared.turn(&self.call);
        let Some(step) = &turn.now else { return self.shared.complain(format!("no step: {:?}", self.call)) };
        let EngineCall { first, count, rows, layer, .. } = self.call;
        for row in first..first + count {
            for query in rows.first..rows.first + rows.count {
                let positions = step.positions(layer.0, row, query);
                let at = u64::from(row * rows.count + query - rows.first) * 4 * K as u64;
                let slice = self.buffers.selection.part(at, 4 * K as u64).unwrap();
                let bytes: Vec<u8> = positions.iter().flat_map(|position| position.to_le_bytes()).collect();
                self.memory().write(slice, &bytes).unwrap();
            }
        }
    }

    fn prepare(&self) {
        let turn = self.shared.turn(&self.call);
        let Some(step) = &turn.now else { return };
        let (rows, layer) = (self.call.rows, self.call.layer.0);
        let geometry = self.shared.geometry.of(self.call.layer.index());
        for of in &step.rows {
            for query in rows.first..(rows.first + rows.count).min(of.rows) {
                let bytes = of.row(geometry, layer, of.length + query);
                for piece in geometry.pieces(of.landing[query as usize]).iter().filter(|p| p.bytes > 0) {
                    let slice = self.slab.part(piece.slab, piece.bytes.into()).unwrap();
                    self.memory().write(slice, &bytes[piece.row as usize..][..piece.bytes as usize]).unwrap();
                }
            }
        }
    }

    fn words(&self, slice: Slice) -> Vec<i32> {
        let mut bytes = vec![0; slice.bytes() as usize];
        self.memory().read(slice, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
    }

    /// Reads each listed slot, and finds by the selection which sequence's row it must be.
    fn attend(&self, attended: Attended) {
        let mut turn = self.shared.turn(&self.call);
        let Some(step) = turn.now.take() else { return };
        let rows = self.call.rows;
        for row in 0..self.call.count {
            for query in rows.first..rows.first + rows.count {
                let slots = self.listed(attended, row, query - rows.first);
                match step.rows.get(row as usize).filter(|of| query < of.rows) {
                    Some(of) => self.check(&step, of, (row, query), &slots, &mut turn.read),
                    None if slots.iter().all(|slot| *slot == -1) => {}
                    None => self.shared.complain(format!("an inert row has slots: {:?} {row}", self.call)),
                }
            }
        }
        turn.now = Some(step);
    }

    /// The slots that attention reads for a query row: as many as the counts say, and the rest is -1.
    fn listed(&self, attended: Attended, row: u32, query: u32) -> Vec<i32> {
        let at = u64::from(row * self.call.rows.count + query);
        let bytes = 4 * K as u64;
        let number = match attended {
            Attended::All => return self.words(self.buffers.slots.part(at * bytes, bytes).unwrap()),
            Attended::Resident => 0,
            Attended::Fetched { wave } => 1 + u64::from(wave),
        };
        let SplitIndices { lists, counts, batch } = self.buffers.split_indices.unwrap();
        let at = number * u64::from(batch * self.call.rows.count) + at;
        let list = self.words(lists.part(at * bytes, bytes).unwrap());
        let valid = self.words(counts.part(4 * at, 4).unwrap())[0] as usize;
        if list.iter().take(valid).any(|slot| *slot < 0) || list.iter().skip(valid).any(|slot| *slot != -1) {
            self.shared.complain(format!("{valid} valid entries of {list:?}"));
        }
        list
    }

    fn check(
        &self,
        step: &StepWork,
        of: &RowWork,
        (row, query): (u32, u32),
        slots: &[i32],
        read: &mut Vec<(u32, u32, u32)>,
    ) {
        let layer = self.call.layer.0;
        let geometry = self.shared.geometry.of(self.call.layer.index());
        let positions = step.positions(self.shared.selects(&self.call), row, query);
        let rows: Vec<(u32, Vec<u8>)> = positions
            .iter()
            .filter(|position| **position >= 0)
            .map(|position| (*position as u32, of.row(geometry, layer, *position as u32)))
            .collect();
        for slot in slots.iter().filter(|slot| **slot >= 0) {
            let mut bytes = vec![0; geometry.row_bytes() as usize];
            for piece in geometry.pieces(*slot as u32).iter().filter(|p| p.bytes > 0) {
                let slice = self.slab.part(piece.slab, piece.bytes.into()).unwrap();
                let range = &mut bytes[piece.row as usize..][..piece.bytes as usize];
                self.memory().read(slice, range).unwrap();
            }
            match rows.iter().find(|(_, row)| *row == bytes) {
                Some((position, _)) => read.push((row, query, *position)),
                None => self.shared.complain(format!(
                    "step {}: {:?} row {row} query {query}: slot {slot} holds no selected row",
                    step.number, self.call
                )),
            }
        }
    }

    /// After attention: every selected row was read once, in one share or another.
    fn rest(&self) {
        let mut turn = self.shared.turn(&self.call);
        let mut read = std::mem::take(&mut turn.read);
        read.sort_unstable();
        let selects = self.shared.selects(&self.call);
        if let Some(step) = turn.now.as_ref().filter(|step| step.expected(&self.call, selects) != read) {
            self.shared.complain(format!("step {}: {:?} read {read:?}", step.number, self.call));
        }
    }
}

/// A micro-batch's streams and buffers.
pub fn layers(device: &TestDevice) -> Layers {
    let stream = || device.stream().unwrap();
    let words = |count: u64| device.allocate(4 * count).unwrap();
    let (rows, k) = (u64::from(BATCH * QUERY_ROWS), K as u64);
    let streams =
        OverlapStreams { compute: stream(), resolve: stream(), gather: stream(), scatter: stream() };
    let split_indices =
        Some(SplitIndices { lists: words(2 * rows * k), counts: words(2 * rows), batch: BATCH });
    let buffers = Buffers { selection: words(rows * k), slots: words(rows * k), split_indices };
    Layers { streams, batch: BATCH, half: BATCH / 2, buffers }
}
