//! A selection trace through the production pools: open, warm up, decode step by step, close.
//!
//! The rows themselves stay where they are: a replay asks what would move, not for the bytes, so the total
//! pool is address space that nothing touches, and no gather is enqueued. Everything else is what an
//! engine on the host device runs.

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::trace::SelectionTrace;
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{Open, Result, Row, Shape, WarmUp};

/// A trace on a device, in the order in which steps of `mtp` query rows read it.
pub struct Loaded<'a> {
    trace: &'a SelectionTrace,
    device: Arc<HostDevice>,
    stream: Stream,
    mtp: u32,
    /// `[groups][layers][mtp][k]` i32.
    selections: Slice,
    /// `[mtp][k]` i32.
    slots: Slice,
}

/// What one replay has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// By layer: hits and misses over all steps.
    pub layers: Vec<(u64, u64)>,
    /// By step: misses of all layers.
    pub steps: Vec<u64>,
}

impl<'a> Loaded<'a> {
    /// Lays out the trace's decode steps for `mtp` query rows a step.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`].
    pub fn new(trace: &'a SelectionTrace, mtp: u32) -> Result<Loaded<'a>> {
        let device = HostDevice::new(HostOptions::default());
        let stream = device.stream()?;
        let header = trace.header();
        let groups = header.decode_steps() / mtp;
        let row = u64::from(header.k) * 4;
        let rows = u64::from(groups) * u64::from(header.layers) * u64::from(mtp);
        let selections = device.allocate((rows * row).max(row))?;
        let mut bytes = vec![0; row as usize];
        let mut at = 0;
        for group in 0..groups {
            for layer in 0..header.layers {
                for query in 0..mtp {
                    let step = header.warm_steps + group * mtp + query;
                    fill(&mut bytes, trace.selection(step, layer));
                    device.write(selections.part(at, row)?, &bytes)?;
                    at += row;
                }
            }
        }
        let slots = device.allocate(u64::from(mtp) * row)?;
        Ok(Loaded { trace, device, stream, mtp, selections, slots })
    }

    /// Replays with `slots` slots a layer, after the last `warmup` warm steps. Calls `progress` after
    /// every step.
    ///
    /// # Errors
    /// [`forebay::Kind::OutOfMemory`]; anything else is a defect.
    pub fn run(&self, shape: &Shape, slots: u32, warmup: u32, mut progress: impl FnMut()) -> Result<Outcome> {
        let header = self.trace.header();
        let groups = header.decode_steps() / self.mtp;
        // More slots than tokens would never be filled.
        let slots = slots.min(header.decode_start + groups * self.mtp);
        let mut cache = Cache::new(self.config(shape, slots, groups), self.device.clone())?;
        let sequence = cache.open(&Open {
            prompt: header.decode_start,
            promised: groups * self.mtp,
            budget: Budget::Slots(slots),
            bring_up: BringUp::Nothing,
        })?;
        cache.append_in_place(sequence, header.decode_start)?;
        let selections = if warmup > 0 { Some(self.warm_steps(warmup)?) } else { None };
        let warm_up = WarmUp { selections, steps: warmup, ..WarmUp::default() };
        let _ready = cache.join(sequence, self.stream, warm_up)?;

        let mut outcome = Outcome { layers: vec![(0, 0); header.layers as usize], steps: Vec::new() };
        let call = u64::from(self.mtp) * u64::from(header.k) * 4;
        for group in 0..u64::from(groups) {
            let accepted = Accepted::Rows(if group == 0 { 0 } else { self.mtp });
            let row = Row { sequence, accepted, query_rows: self.mtp };
            let mut step = cache.prepare(MicroBatch(0), self.mtp, &[row], None, self.stream)?;
            for layer in 0..header.layers {
                let at = (group * u64::from(header.layers) + u64::from(layer)) * call;
                let buffers = Buffers { selection: self.selections.part(at, call)?, slots: self.slots };
                cache.resolve(&step, LayerCall::whole(Layer(layer)), self.stream, buffers)?;
            }
            cache.finish(&mut step, self.stream)?;
            let retired = cache.retire(step, self.stream).map_err(|unretired| unretired.error)?;
            for ((hits, misses), count) in outcome.layers.iter_mut().zip(retired.layers()) {
                *hits += u64::from(count.hits);
                *misses += u64::from(count.misses);
            }
            outcome.steps.push(retired.total().1);
            progress();
        }
        cache.close(sequence, self.stream)?;
        Ok(outcome)
    }

    fn config(&self, shape: &Shape, slots: u32, groups: u32) -> Config {
        let header = self.trace.header();
        let shape =
            Shape { layers: header.layers, draft_layers: 0, index_key_bytes: 0, top_k: header.k, ..*shape };
        // The last step's rows are in flight beyond the tokens that are promised.
        let tokens = header.decode_start + (groups + 1) * self.mtp;
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        Config {
            query_rows: self.mtp,
            memory,
            steps_in_flight: 1,
            residency_only: true,
            ..Config::new(shape, 1, tokens, slots)
        }
    }

    /// The last `steps` warm steps, `[layers][steps][k]` i32.
    fn warm_steps(&self, steps: u32) -> Result<Slice> {
        let header = self.trace.header();
        let row = u64::from(header.k) * 4;
        let all = self.device.allocate(u64::from(header.layers) * u64::from(steps) * row)?;
        let mut bytes = vec![0; row as usize];
        let mut at = 0;
        for layer in 0..header.layers {
            for step in header.warm_steps - steps..header.warm_steps {
                fill(&mut bytes, self.trace.selection(step, layer));
                self.device.write(all.part(at, row)?, &bytes)?;
                at += row;
            }
        }
        Ok(all)
    }
}

/// Positions as i32 words; what a short selection leaves over is -1.
fn fill(bytes: &mut [u8], positions: &[u32]) {
    let words = positions.iter().copied().chain(std::iter::repeat(u32::MAX));
    for (word, position) in bytes.chunks_exact_mut(4).zip(words) {
        word.copy_from_slice(&position.to_le_bytes());
    }
}
