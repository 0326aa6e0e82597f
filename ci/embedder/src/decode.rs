//! An engine that keeps its streams and memory in cudarc decodes over forebay: its top-k writes a selection (top-k
//! indices), its projections write new rows, and its attention reads the rows of the resolved slots, all by cudarc's
//! calls on cudarc's stream.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError};
use forebay::device::cuda::CudaOptions;
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Error, Kind, Layer, LayerCall, Memory,
    MicroBatch, Open, Result, Sequence, Shape, Streams, WarmUp,
};
use forebay_cudarc::{Bridge, DeviceView, LentSlice};

const LAYERS: u32 = 3;
const TOP_K: usize = 64;
const PROMPT: u32 = 600;
const STEPS: u32 = 12;
const ROW: usize = 656;

/// The first byte of a row, and all its other bytes.
fn stamp(layer: u32, position: u32) -> u8 {
    (31 * layer + 7 * position) as u8
}

fn failed(error: DriverError) -> Error {
    Error::new(Kind::DeviceFailed, "decode").at(format!("cudarc: {error:?}"))
}

fn outside(operation: &'static str) -> Error {
    Error::new(Kind::Internal, operation).at("a slot outside the slab")
}

/// The engine, with one sequence.
struct Engine {
    stream: Arc<CudaStream>,
    cache: Cache,
    /// Of each layer.
    slabs: Vec<DeviceView<u8>>,
    selection: LentSlice<i32>,
    slots: LentSlice<i32>,
}

impl Engine {
    /// Returns the row of `position` in every layer's landing slot.
    fn project(&mut self, sequence: Sequence, layer: u32, position: u32) -> Result<()> {
        let at = self.cache.landing_slot(sequence, 0)? as usize * ROW;
        let mut slab = self.slabs[layer as usize].view_mut();
        let mut place = slab.try_slice_mut(at..at + ROW).ok_or_else(|| outside("project"))?;
        self.stream.memcpy_htod(&[stamp(layer, position); ROW], &mut place).map_err(failed)
    }

    /// Reads every selected row in its resolved slot, checks it, and returns the number of rows.
    fn attend(&self, layer: u32, selected: &[i32]) -> Result<u32> {
        let slab = self.slabs[layer as usize].view();
        let slots = self.stream.clone_dtoh(&self.slots.view()).map_err(failed)?;
        for (position, slot) in selected.iter().zip(slots) {
            let at = slot as usize * ROW;
            let row = slab.try_slice(at..at + ROW).ok_or_else(|| outside("attend"))?;
            let bytes = self.stream.clone_dtoh(&row).map_err(failed)?;
            if bytes != [stamp(layer, *position as u32); ROW] {
                return Err(Error::new(Kind::Internal, "attend").at("another row").with("slot", slot as u64));
            }
        }
        Ok(selected.len() as u32)
    }
}

/// Decodes on the device of `context`, by the driver at `library`; returns a line about the result.
///
/// # Errors
/// The errors of forebay and of the driver; [`Kind::Internal`] if attention would read a wrong row.
pub fn decode(context: &Arc<CudaContext>, library: Option<String>) -> Result<String> {
    let bridge = Bridge::open(context, CudaOptions { library, ..CudaOptions::default() })?;
    let stream = context.new_stream().map_err(failed)?;
    let ours = bridge.stream(&stream)?;
    let words = || stream.alloc_zeros::<i32>(TOP_K).map_err(failed).and_then(|words| bridge.lend(words));
    let (selection, slots) = (words()?, words()?);
    let buffers = Buffers { selection: selection.slice(), slots: slots.slice(), split_indices: None };

    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let shape = Shape { layers: LAYERS, top_k: TOP_K as u32, ..Shape::DEEPSEEK_V3_2 };
    let config = Config { memory, ..Config::new(shape, 1, 1024, 128) };
    let mut cache = Cache::new(config, bridge.device().clone())?;
    let open =
        Open { prompt: PROMPT, promised: STEPS, budget: Budget::Slots(128), bring_up: BringUp::Nothing };
    let sequence = cache.open(&open)?;
    for layer in 0..LAYERS {
        let rows: Vec<u8> = (0..PROMPT).flat_map(|position| [stamp(layer, position); ROW]).collect();
        cache.append(sequence, Layer(layer), &rows)?;
    }
    let _ready = cache.join(sequence, ours, WarmUp::default())?;

    let view = |layer| bridge.view(cache.slab(Layer(layer))?, &stream);
    let slabs = (0..LAYERS).map(view).collect::<Result<_>>()?;
    let mut engine = Engine { stream, cache, slabs, selection, slots };
    let (mut hits, mut misses, mut read) = (0, 0, 0);
    for number in 0..STEPS {
        let position = PROMPT + number;
        let row = BatchRow { sequence, accepted: Accepted::Rows(number.min(1)), query_rows: 1 };
        let mut step = engine.cache.prepare(MicroBatch(0), 1, &[row], None, ours)?;
        for layer in 0..LAYERS {
            let call = LayerCall::whole(Layer(layer));
            let selected = (1..TOP_K as u32).map(|i| 5 * (i + number) % PROMPT);
            let selected: Vec<i32> =
                [position].into_iter().chain(selected).map(|position| position as i32).collect();
            engine.stream.memcpy_htod(&selected, &mut engine.selection.view_mut()).map_err(failed)?;
            engine.cache.layer(&step, call, Streams { resolve: ours, gather: ours }, buffers)?;
            engine.project(sequence, layer, position)?;
            read += engine.attend(layer, &selected)?;
            engine.cache.scatter(&step, call, ours)?;
        }
        engine.cache.finish(&mut step, ours)?;
        engine.stream.synchronize().map_err(failed)?;
        let retired = engine.cache.retire(step, ours).map_err(|unretired| unretired.error)?;
        hits += retired.total().0;
        misses += retired.total().1;
    }
    let Engine { mut cache, selection, slots, .. } = engine;
    cache.close(sequence, ours)?;
    cache.shut_down().map_err(|(_, error)| error)?;
    // SAFETY: the cache that used it has been shut down, and its steps are retired.
    drop(unsafe { (selection.take_back(), slots.take_back()) });
    Ok(format!("{STEPS} steps, {hits} hits, {misses} misses, {read} rows read"))
}
