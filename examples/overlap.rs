//! A decode loop whose gathers are hidden behind the engine's own work: three orders, the same rows.

use std::sync::Arc;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, SplitIndices, Stream};
use forebay::overlap::{Engine, EngineCall, Overlap, OverlapStreams, Work};
use forebay::{
    Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Layers, Memory, MicroBatch, Open, Shape,
    WarmUp,
};

/// An engine's work, enqueued on the stream that each call names. This one only has an indexer: a window that moves
/// through the prompt. A real one launches its kernels.
struct Model {
    device: Arc<HostDevice>,
    selection: Slice,
    step: u32,
}

impl Engine for Model {
    fn enqueue(&mut self, call: &EngineCall, stream: Stream) -> forebay::Result<()> {
        if call.work != Work::Index {
            return Ok(());
        }
        let entries: Vec<u8> = (0..64).flat_map(|i| ((i + self.step) * 3 % 1000).to_le_bytes()).collect();
        let (device, selection) = (Arc::clone(&self.device), self.selection);
        // The device reports errors of its streams when the step is retired.
        self.device.call(stream, Arc::new(move || drop(device.write(selection, &entries))))
    }
}

fn main() -> forebay::Result<()> {
    let device = HostDevice::new(HostOptions { threaded: true, ..HostOptions::default() });
    let shape = Shape { layers: 4, top_k: 64, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let config = Config { memory, ..Config::new(shape, 1, 2000, 128) };
    let mut cache = Cache::new(config, device.clone())?;
    let streams = OverlapStreams {
        compute: device.stream()?,
        resolve: device.stream()?,
        gather: device.stream()?,
        scatter: device.stream()?,
    };
    let words = |count: u64| device.allocate(4 * count);
    let split_indices = Some(SplitIndices { lists: words(2 * 64)?, counts: words(2)?, batch: 1 });
    let buffers = Buffers { selection: words(64)?, slots: words(64)?, split_indices };
    let layers = Layers { streams, batch: 1, half: 0, buffers };

    for order in Overlap::FIRST {
        let open =
            Open { prompt: 1000, promised: 100, budget: Budget::Slots(128), bring_up: BringUp::Nothing };
        let sequence = cache.open(&open)?;
        cache.append_in_place(sequence, 1000)?;
        let _ready = cache.join(sequence, streams.compute, WarmUp::default())?;
        let (mut misses, ended) = (0, device.event()?);
        for number in 0..50 {
            let accepted = Accepted::Rows(u32::from(number > 0));
            let row = BatchRow { sequence, accepted, query_rows: 1 };
            let mut step = cache.prepare(MicroBatch(0), 1, &[row], None, streams.compute)?;
            let mut model = Model { device: device.clone(), selection: buffers.selection, step: number };
            cache.overlap_steps(&mut [(&mut step, layers)], &[order; 4], 0, &mut model)?;
            cache.finish(&mut step, streams.compute)?;
            // An engine continues with its next step and retires this one later.
            device.record(ended, streams.compute)?;
            device.synchronize(ended)?;
            misses += cache.retire(step, streams.compute).map_err(|unretired| unretired.error)?.total().1;
        }
        println!("{}: {misses} rows fetched, digest {:016x}", order.name(), cache.digest(sequence)?);
        cache.close(sequence, streams.compute)?;
    }
    Ok(())
}
