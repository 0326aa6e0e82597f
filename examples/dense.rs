//! The loop of a dense model of docs/integration.md, in Rust: a prompt in chunks, then steps that decode a token. A
//! second request with the same prompt finds its pages. In the middle of each another request is urgent, and the device
//! is full: the running one is parked on the host, and comes back layer by layer. On this device, which works inline,
//! the copies have ended when `resume` returns; on a GPU they run beside the layers.

use forebay::dense::{Cache, Config, Group, Open, Shape, View, Width};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::{Accepted, BatchRow, Error, Kind, MicroBatch, Sequence, Tokens};

const LAYERS: u32 = 4;
const RUN: u32 = 256;
const PAGE: u64 = 16;
const PROMPT: usize = 1000;
const CHUNK: usize = 256;
const STEPS: usize = 100;
const MOST: usize = PROMPT + STEPS;
/// Pages of the device and of the host: those of one request, with its rows in flight, and a few more.
const PAGES: u32 = MOST as u32 / PAGE as u32 + 12;

/// The engine: a model whose K and V of a token are bytes of the token's id.
struct Engine {
    device: std::sync::Arc<HostDevice>,
    stream: Stream,
    ids: Vec<u32>,
}

/// The memory of K (0) or V (1) of a layer's row in a slot.
fn place(cache: &Cache, layer: u32, run: usize, slot: u64) -> forebay::Result<Slice> {
    let none = || Error::new(Kind::OutOfRange, "engine").at("layer");
    let View { group, plane, offset, stride, row } = cache.config().view(layer, run).ok_or_else(none)?;
    let plane = cache.planes(group)?.nth(plane).ok_or_else(none)?;
    plane.memory.part(slot / PAGE * stride + offset + slot % PAGE * row, row)
}

impl Engine {
    /// Reads a tensor of i32, or of i64.
    fn words(&self, tensor: Slice, width: Width) -> forebay::Result<Vec<u64>> {
        let mut bytes = vec![0; tensor.bytes() as usize];
        self.device.read(tensor, &mut bytes)?;
        Ok(match width {
            Width::I32 => bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word) as u64).collect(),
            Width::I64 => bytes.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word) as u64).collect(),
        })
    }

    /// The projections: new rows go to their slots.
    fn write_rows(&self, cache: &Cache, layer: u32, ids: &[u32], rows: usize) -> forebay::Result<()> {
        let (tensors, width) = (cache.tensors(MicroBatch(0))?, cache.config().width);
        let (slots, positions) =
            (self.words(tensors.slots[0], width)?, self.words(tensors.positions, width)?);
        for (slot, position) in slots.iter().zip(positions).take(rows) {
            for run in 0..2 {
                let row = vec![ids[position as usize] as u8; RUN as usize];
                self.device.write(place(cache, layer, run, *slot)?, &row)?;
            }
        }
        Ok(())
    }

    /// Attention: reads the rows of the only batch row by its page table, and checks whose they are.
    fn attend(&self, cache: &Cache, layer: u32, ids: &[u32]) -> forebay::Result<u64> {
        let tensors = cache.tensors(MicroBatch(0))?;
        let table = self.words(tensors.tables[0], Width::I32)?;
        let length = self.words(tensors.lengths, Width::I32)?[0];
        let mut sum = 0;
        for at in 0..length {
            let slot = table[(at / PAGE) as usize] * PAGE + at % PAGE;
            for run in 0..2 {
                let mut row = vec![0; RUN as usize];
                self.device.read(place(cache, layer, run, slot)?, &mut row)?;
                if row != [ids[at as usize] as u8; RUN as usize] {
                    return Err(Error::new(Kind::Corrupt, "engine").at("another row").with("position", at));
                }
                sum += if run == 0 { u64::from(row[0]) } else { 0 };
            }
        }
        Ok(sum)
    }

    /// One step of one sequence with these token ids: `rows` query rows, after `accepted` of the last step's.
    fn step(
        &self,
        cache: &mut Cache,
        (sequence, ids): (Sequence, &[u32]),
        accepted: usize,
        rows: usize,
    ) -> forebay::Result<u64> {
        let mut sum = 0;
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted as u32), query_rows: rows as u32 };
        let mut step = cache.prepare(MicroBatch(0), &[row], None, self.stream)?;
        // A captured graph reads the same tensors in every step.
        for layer in 0..LAYERS {
            // Before new rows are written: the pages that come back from the host are there.
            cache.arrived(&step, layer, self.stream)?;
            // P: the engine writes the new rows to their slots. A: attention reads the pages.
            self.write_rows(cache, layer, ids, rows)?;
            sum += self.attend(cache, layer, ids)?;
        }
        cache.finish(&mut step, self.stream)?;
        // When the step has ended: the committed length, and the word that its tokens may be used.
        cache.retire(step, self.stream).map_err(|unretired| unretired.error)?;
        Ok(sum)
    }

    /// Another request is urgent. If the device is full, the running one waits on the host until it has ended. Returns
    /// whether it did: the parking has accepted its last rows.
    fn preempt(&self, cache: &mut Cache, running: Sequence, accepted: usize) -> forebay::Result<bool> {
        let open = Open { prompt: CHUNK as u32, promised: 1 };
        let (urgent, parked) = match cache.open(&open) {
            Err(error) if error.kind() == Kind::Exhausted => {
                let _copies = cache.park(running, accepted as u32, self.stream)?;
                (cache.open(&open)?, true)
            }
            opened => (opened?, false),
        };
        let ids = &self.ids[1..];
        self.step(cache, (urgent, ids), 0, CHUNK)?;
        self.step(cache, (urgent, ids), CHUNK, 1)?;
        cache.close(urgent, self.stream)?;
        if parked {
            let _copies = cache.resume(running, self.stream)?;
        }
        Ok(parked)
    }

    /// A request: opens, computes what is not there, decodes, publishes, closes. Returns the tokens that were there,
    /// and the sum of what attention read.
    fn serve(&self, cache: &mut Cache) -> forebay::Result<(u32, u64)> {
        // The last token is computed again, for its logits.
        let names = cache.names(b"tenant", Tokens::new(&self.ids[..PROMPT - 1]))?;
        let open = Open { prompt: PROMPT as u32, promised: STEPS as u32 };
        let opened = cache.open_shared(&open, &names, self.stream)?;
        let (sequence, found) = (opened.sequence, opened.found.tokens);
        let (own, mut at) = ((sequence, &self.ids[..]), found as usize);
        let (mut accepted, mut sum) = (0, 0);
        while at < PROMPT {
            let rows = CHUNK.min(PROMPT - at);
            sum += self.step(cache, own, accepted, rows)?;
            (at, accepted) = (at + rows, rows);
        }
        for number in 0..STEPS {
            if number == STEPS / 2 {
                accepted = if self.preempt(cache, sequence, accepted)? { 0 } else { accepted };
            }
            sum += self.step(cache, own, accepted, 1)?;
            accepted = 1;
        }
        // Full pages whose rows are accepted are found by later requests.
        cache.publish(sequence, found, Tokens::new(&self.ids[found as usize..]))?;
        // They go to the host too, at most so many bytes in a call: what is there costs a parking no copy.
        cache.save(self.stream, 1 << 20)?;
        cache.close(sequence, self.stream)?;
        Ok((found, sum))
    }
}

/// Serves two requests, and returns a line about them.
pub fn serve() -> forebay::Result<String> {
    let device = HostDevice::new(HostOptions::default());
    let groups = vec![Group { layers: (0..LAYERS).collect(), runs: [RUN, RUN], window: None }];
    let mut config = Config::new(Shape { page_tokens: PAGE as u32, groups }, 4, MOST as u32);
    (config.device_pages, config.host_pages) = (vec![PAGES], vec![PAGES]);
    config.bring_layers = 1;
    config.memory.lock = false;
    let mut cache = Cache::new(config, device.clone())?;
    let (stream, ids) = (device.stream()?, (0..MOST as u32).map(|at| at * 7 % 251).collect());
    let engine = Engine { device, stream, ids };
    let [first, second] = [engine.serve(&mut cache)?, engine.serve(&mut cache)?];
    Ok(format!("{} and {} tokens found, sums {} and {}", first.0, second.0, first.1, second.1))
}

/// Prints the line.
pub fn main() -> forebay::Result<()> {
    println!("{}", serve()?);
    Ok(())
}
