//! The decode loop of docs/integration.md, in Rust: two sequences, four layers, one draft per step.

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice};
use forebay::{Accepted, BringUp, Budget, Buffers, Cache, Config, Layer, LayerCall, Memory, MicroBatch};
use forebay::{BatchRow, Open, Sequence, Shape, Streams, WarmUp};

const LAYERS: u32 = 4;
const TOP_K: u32 = 64;
const PROMPT: u32 = 1000;
const STEPS: u32 = 100;
const ROW: u64 = 656;

/// The engine's indexer: a query row at `at` selects itself, the row before it, and some of the prompt.
fn select(number: u32, at: u32) -> impl Iterator<Item = i32> {
    let prompt = (2..TOP_K).map(move |i| 3 * (i + number) % PROMPT);
    [at, at - 1].into_iter().chain(prompt).map(|position| position as i32)
}

/// The engine's attention: adds up the first byte of every row in its slots.
fn attend(device: &HostDevice, slab: Slice, slots: Slice) -> forebay::Result<u64> {
    let mut words = vec![0; slots.bytes() as usize];
    device.read(slots, &mut words)?;
    let mut sum = 0;
    for slot in words.chunks_exact(4).map(|word| i32::from_le_bytes([word[0], word[1], word[2], word[3]])) {
        let mut first = [0];
        device.read(slab.part(slot as u64 * ROW, 1)?, &mut first)?;
        sum += u64::from(first[0]);
    }
    Ok(sum)
}

/// Decodes, and returns a line with the counts.
pub fn decode() -> forebay::Result<String> {
    // Once: everything is taken here, and nothing later.
    let device = HostDevice::new(HostOptions::default());
    let stream = device.stream()?;
    let shape = Shape { layers: LAYERS, top_k: TOP_K, ..Shape::DEEPSEEK_V3_2 };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let config = Config { query_rows: 2, memory, ..Config::new(shape, 2, 2048, 256) };
    let mut cache = Cache::new(config, device.clone())?;
    let words = u64::from(2 * 2 * TOP_K);
    let (selection, slots) = (device.allocate(4 * words)?, device.allocate(4 * words)?);
    let streams = Streams { resolve: stream, gather: stream };

    // A request: admitted for all that it may become, filled layer by layer, entered into the batch.
    let mut sequences: Vec<Sequence> = Vec::new();
    for _ in 0..2 {
        let open =
            Open { prompt: PROMPT, promised: 300, budget: Budget::Slots(256), bring_up: BringUp::Nothing };
        let sequence = cache.open(&open)?;
        for layer in 0..LAYERS {
            let rows: Vec<u8> = (0..PROMPT).flat_map(|at| [(31 * layer + at) as u8; ROW as usize]).collect();
            cache.append(sequence, Layer(layer), &rows)?;
        }
        let _ready = cache.join(sequence, stream, WarmUp::default())?;
        sequences.push(sequence);
    }

    let (mut hits, mut misses, mut sum, mut lengths) = (0, 0, 0, [PROMPT; 2]);
    for number in 0..STEPS {
        // Which sequences decode, and how many rows of their last step were accepted: the draft or not.
        let accepted = [0, 1].map(|s| if number == 0 { 0 } else { 1 + (number + s) % 2 });
        let row = |s: usize| BatchRow {
            sequence: sequences[s],
            accepted: Accepted::Rows(accepted[s]),
            query_rows: 2,
        };
        let mut step = cache.prepare(MicroBatch(0), 2, &[row(0), row(1)], None, stream)?;
        lengths = [lengths[0] + accepted[0], lengths[1] + accepted[1]];
        for layer in 0..LAYERS {
            let call = LayerCall::whole(Layer(layer));
            // I: the engine's top-k writes the selection. R and G: slots, and what is missing.
            let rows = lengths.into_iter().flat_map(|length| [length, length + 1]);
            let entries: Vec<u8> =
                rows.flat_map(|at| select(number, at)).flat_map(i32::to_le_bytes).collect();
            device.write(selection, &entries)?;
            cache.layer(&step, call, streams, Buffers { selection, slots, split_indices: None })?;
            // P: the engine writes the new rows to their landing slots.
            let slab = cache.slab(Layer(layer))?;
            for sequence in &sequences {
                for query in 0..2 {
                    let slot = cache.landing_slot(*sequence, query)?;
                    let new = [(number + query) as u8; ROW as usize];
                    device.write(slab.part(u64::from(slot) * ROW, ROW)?, &new)?;
                }
            }
            // A: reads the slots. S: the new rows go to host memory.
            sum += attend(&device, slab, slots)?;
            cache.scatter(&step, call, stream)?;
        }
        cache.finish(&mut step, stream)?;
        // When the step has ended: the counters, and the word that its tokens may be used.
        let retired = cache.retire(step, stream).map_err(|unretired| unretired.error)?;
        hits += retired.total().0;
        misses += retired.total().1;
    }

    for sequence in sequences {
        cache.close(sequence, stream)?;
    }
    cache.shut_down().map_err(|(_, error)| error)?;
    Ok(format!("{STEPS} steps, {hits} hits, {misses} misses, sum {sum}"))
}

/// Prints the line.
pub fn main() -> forebay::Result<()> {
    println!("{}", decode()?);
    Ok(())
}
