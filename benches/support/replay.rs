//! Traces for the benches, and a replay of one through a cache on the inline host device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::trace::SelectionTrace;
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Result, Shape, WarmUp};

use crate::clock::Lap;

/// Loads the trace called `name` from `$FOREBAY_TRACES` or `../shared/traces`; if neither has it, the small one that
/// ships. Prints which one.
pub fn trace(name: &str) -> Result<(String, SelectionTrace)> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let places = [std::env::var_os("FOREBAY_TRACES").map(PathBuf::from), Some(root.join("../shared/traces"))];
    let file = format!("{name}.topk.zst");
    let found = places.into_iter().flatten().flat_map(|p| [p.join(&file), p.join("topk").join(&file)]);
    let path = found.into_iter().find(|p| p.exists()).unwrap_or_else(|| root.join("data/demo.topk.zst"));
    let trace = SelectionTrace::read(&path)?;
    let header = trace.header();
    let used =
        format!("{} ({} layers, k {}, {} steps)", path.display(), header.layers, header.k, header.steps);
    println!("trace: {used}");
    Ok((header.label.clone(), trace))
}

/// Returns all positions of a trace by step and layer, `k` each, padded with -1.
pub fn positions(trace: &SelectionTrace) -> Vec<i32> {
    let header = trace.header();
    let mut all = Vec::with_capacity((header.steps * header.layers * header.k) as usize);
    for step in 0..header.steps {
        for layer in 0..header.layers {
            all.extend(trace.selection(step, layer).iter().map(|p| *p as i32));
            all.resize(all.len().next_multiple_of(header.k as usize), -1);
        }
    }
    all
}

/// A cache for one sequence, and the selections in memory that the device reads.
pub struct Replay {
    cache: Cache,
    stream: Stream,
    selections: Slice,
    slots: Slice,
    budget: u32,
    /// Layers, k, steps, position of the first step.
    extents: [u32; 4],
    /// All rows are resident from the first step on.
    whole: bool,
    /// Each step adds a row.
    grows: bool,
    misses: u64,
}

impl Replay {
    /// Prepares a replay of the first `steps` steps with `budget` slots per layer. `positions` has the layout that
    /// [`positions`] returns.
    pub fn new(
        trace: &SelectionTrace,
        positions: &[i32],
        steps: u32,
        budget: u32,
        portable: bool,
    ) -> Result<Replay> {
        let header = trace.header();
        let extents = [header.layers, header.k, steps.min(header.steps), header.first_position];
        Replay::of(extents, positions, header.first_position + header.steps, budget, portable)
    }

    /// Prepares steps of a sequence whose rows are all resident from the first step on. If it `grows`, each step adds a
    /// row, and the lane has an empty slot for each. A row of `positions` is a step's selection in one layer; `extents`
    /// are layers, k, steps and the sequence's tokens.
    #[allow(dead_code, reason = "only the bench of resolve has such a sequence")]
    pub fn resident(extents: [u32; 4], positions: &[i32], grows: bool, portable: bool) -> Result<Replay> {
        let tokens = extents[3] + if grows { extents[2] } else { 1 };
        Ok(Replay { whole: true, grows, ..Replay::of(extents, positions, tokens, tokens, portable)? })
    }

    fn of(extents: [u32; 4], positions: &[i32], tokens: u32, budget: u32, portable: bool) -> Result<Replay> {
        let [layers, top_k, ..] = extents;
        let shape = Shape { layers, top_k, ..Shape::DEEPSEEK_V3_2 };
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, residency_only: true, ..Config::new(shape, 1, tokens, budget) };
        let device = HostDevice::new(HostOptions { portable, ..HostOptions::default() });
        let bytes: Vec<u8> = positions.iter().flat_map(|p| p.to_le_bytes()).collect();
        let selections = device.allocate(bytes.len() as u64)?;
        device.write(selections, &bytes)?;
        Ok(Replay {
            stream: device.stream()?,
            slots: device.allocate(4 * u64::from(top_k))?,
            cache: Cache::new(config, Arc::clone(&device) as Arc<dyn Device>)?,
            selections,
            budget,
            extents,
            whole: false,
            grows: true,
            misses: 0,
        })
    }

    /// Opens the sequence, decodes every step, closes it. The time is that of the steps: prepare with its commit,
    /// resolve in every layer, report, retire. The units are selected positions.
    pub fn pass(&mut self) -> Result<(Duration, u64)> {
        let [layers, k, steps, first] = self.extents;
        let budget = Budget::Slots(self.budget);
        let promised = if self.grows { steps } else { 1 };
        let bring_up = if self.whole { BringUp::Whole } else { BringUp::Nothing };
        let open = Open { prompt: first, promised, budget, bring_up };
        let sequence = self.cache.open(&open)?;
        self.cache.append_in_place(sequence, first)?;
        let _ready = self.cache.join(sequence, self.stream, WarmUp::default())?;
        self.misses = 0;
        let begin = Lap::begin();
        for number in 0..steps {
            let accepted = Accepted::Rows(if self.grows { number.min(1) } else { 0 });
            let row = BatchRow { sequence, accepted, query_rows: 1 };
            let mut step = self.cache.prepare(MicroBatch(0), 1, &[row], None, self.stream)?;
            for layer in 0..layers {
                let set = u64::from(number * layers + layer) * u64::from(4 * k);
                let selection = self.selections.part(set, u64::from(4 * k))?;
                let buffers = Buffers { selection, slots: self.slots, split_indices: None };
                self.cache.resolve(&step, LayerCall::whole(Layer(layer)), self.stream, buffers)?;
            }
            self.cache.finish(&mut step, self.stream)?;
            self.misses += self.cache.retire(step, self.stream).map_err(|u| u.error)?.total().1;
        }
        let time = begin.end();
        self.cache.close(sequence, self.stream)?;
        Ok((time, u64::from(steps) * u64::from(layers) * u64::from(k)))
    }

    /// Returns the misses of the last pass.
    pub fn misses(&self) -> u64 {
        self.misses
    }
}
