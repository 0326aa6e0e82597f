//! A decode loop on the host device: one sequence, the work of one layer, and drafts of which half are accepted.
//!
//! Run it with `cargo run --example decode_loop`.

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Shape, Streams, WarmUp};

fn main() -> forebay::Result<()> {
    let shape = Shape { layers: 4, top_k: 64, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { populate: false, ..Memory::default() };
    let config = Config { query_rows: 2, memory, ..Config::new(shape, 1, 2048, 256) };
    let device = HostDevice::new(HostOptions::default());
    let stream = device.stream()?;
    let mut cache = Cache::new(config, device.clone())?;

    // The prompt: prefill writes every row of every layer to the total pool.
    let open = Open { prompt: 1000, promised: 1000, budget: Budget::Slots(256), bring_up: BringUp::Whole };
    let sequence = cache.open(&open)?;
    for layer in 0..4 {
        cache.append(sequence, Layer(layer), &vec![layer as u8; 1000 * 656])?;
    }
    let _ready = cache.join(sequence, stream, WarmUp::default())?;

    // Decode: two query rows a step (one draft), each selecting 64 positions.
    let selection = device.allocate(2 * 64 * 4)?;
    let slots = device.allocate(2 * 64 * 4)?;
    let streams = Streams { resolve: stream, gather: stream };
    let mut accepted = 0;
    for number in 0..100 {
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows: 2 };
        let mut step = cache.prepare(MicroBatch(0), 2, &[row], None, stream)?;
        for layer in 0..4 {
            let call = LayerCall::whole(Layer(layer));
            // The indexer's work: here a window that moves through the prompt.
            let entries: Vec<u8> =
                (0..128_i32).flat_map(|i| ((i + number) * 3 % 1000).to_le_bytes()).collect();
            device.write(selection, &entries)?;
            cache.layer(&step, call, streams, Buffers { selection, slots, split_indices: None })?;
            // The engine's attention reads `slots`, and its projections write the new rows to
            // `cache.landing_slot(sequence, 0..2)` of the layer's slab; then they are stored:
            cache.scatter(&step, call, stream)?;
        }
        cache.finish(&mut step, stream)?;
        let retired = cache.retire(step, stream).map_err(|unretired| unretired.error)?;
        if number % 25 == 0 {
            let (hits, misses) = retired.total();
            println!("step {number}: {hits} hits, {misses} misses in 4 layers");
        }
        accepted = 1 + number as u32 % 2;
    }
    cache.close(sequence, stream)?;
    let stats = cache.shut_down().map_err(|(_, error)| error)?;
    println!(
        "{} steps, {} hits, {} misses, {} bytes up",
        stats.steps, stats.hits, stats.misses, stats.bytes_up
    );
    Ok(())
}
