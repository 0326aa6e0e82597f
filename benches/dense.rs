//! Claims, for models whose attention reads every row:
//!
//! - prepare, finish and retire of a step of 160 sequences take at most 20 us;
//! - a prefix of 512 pages is found in at most 100 us, when its names are known;
//! - 4,096 tokens of DeepSeek-V3's latents come back from the host's tier at 90% of the rate of a memcpy at least, from
//!   opening the sequence to its last byte.
//!
//! The device is the host device, in order: so a step's figure includes the work of its begin, which a GPU does beside
//! the host, and the bring-back includes the copies. The memcpy copies as many bytes between two memories of the same
//! device, in one piece. All sides run in turn.

#[path = "support/decode.rs"]
mod decode;
#[path = "support/race.rs"]
mod race;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use decode::{BATCH, Decode};
use forebay::dense::{Cache, Config, Layout, Names, Open, Shape};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice, Stream};
use forebay::{Accepted, BatchRow, Memory, MicroBatch, Result, Sequence, Tokens};
use race::{Side, claim, done, race, record};

/// The most microseconds of a step, and of a look-up.
const MOST_STEP: f64 = 20.0;
const MOST_FIND: f64 = 100.0;
/// The pages of the prefix that is looked up, and the tokens that come back.
const FOUND: u32 = 512;
const BROUGHT: u32 = 4096;
const PAGE: u32 = 64;
/// Sequences that hold pages and have no rows.
const FILLERS: u32 = 12;

fn memory() -> Memory {
    Memory { huge: true, populate: true, lock: false, node: None }
}

/// A cache whose device holds one long prefix, and the names of two.
struct Prefixes {
    device: Arc<HostDevice>,
    cache: Cache,
    stream: Stream,
    names: [Names; 2],
    from: Slice,
    to: Slice,
}

impl Prefixes {
    /// A cache of latents of `layers` layers for sequences of `pages` pages. Its device holds little more than one.
    fn new(layers: u32, pages: u32, layout: Layout) -> Result<Prefixes> {
        let device = HostDevice::new(HostOptions::default());
        let mut shape = Shape::deepseek_v3(2);
        shape.page_tokens = PAGE;
        shape.groups[0].layers = (0..layers).collect();
        let tokens = pages * PAGE;
        let page = shape.page_bytes(0);
        let base = Config { layout, memory: memory(), ..Config::new(shape, FILLERS + 2, tokens + 1) };
        let config = Config {
            device_pages: vec![(FILLERS + 1) * (pages + 1) + 8],
            host_pages: vec![2 * pages + 8],
            step_tokens: tokens + 1,
            ..base
        };
        let stream = device.stream()?;
        let mut cache = Cache::new(config, device.clone())?;
        // Planes are as large as a server's are to the memory's pages, but most of their pages belong to others.
        for _ in 0..FILLERS {
            cache.open(&Open { prompt: tokens, promised: 1 })?;
        }
        let ids = [1, 2].map(|first| (0..tokens).map(|at| first + 7 * at).collect::<Vec<u32>>());
        let names = [0, 1].map(|at| cache.names(b"", Tokens::new(&ids[at])));
        let [first, second] = names;
        let (first, second) = (first?, second?);
        for (ids, names) in ids.iter().zip([&first, &second]) {
            let sequence = cache.open_shared(&Open { prompt: tokens, promised: 1 }, names, stream)?.sequence;
            compute(&mut cache, sequence, tokens, stream)?;
            cache.publish(sequence, 0, Tokens::new(ids))?;
            cache.save(stream, u64::MAX)?;
            cache.close(sequence, stream)?;
        }
        let bytes = page * u64::from(pages);
        let (from, to) = (device.allocate(bytes)?, device.allocate(bytes)?);
        device.write(from, &vec![3; bytes as usize])?;
        Ok(Prefixes { device, cache, stream, names: [first, second], from, to })
    }

    /// Finds a prefix whose names are known.
    fn find(&self) -> Result<(Duration, u64)> {
        let begun = Instant::now();
        for names in self.names.iter().cycle().take(64) {
            std::hint::black_box(self.cache.find(names));
        }
        Ok((begun.elapsed(), 64))
    }

    /// Opens a sequence whose pages the other prefix has evicted from the device.
    fn bring(&mut self) -> Result<(Duration, u64)> {
        self.names.swap(0, 1);
        let open = Open { prompt: BROUGHT, promised: 1 };
        let begun = Instant::now();
        let opened = self.cache.open_shared(&open, &self.names[1], self.stream)?;
        let time = begun.elapsed();
        assert!(opened.found.host_tokens >= BROUGHT - 9 * PAGE, "it was on the device: {:?}", opened.found);
        self.cache.close(opened.sequence, self.stream)?;
        Ok((time, u64::from(opened.found.host_tokens)))
    }

    /// Copies as many bytes as `BROUGHT` tokens in one piece.
    fn copy(&self) -> Result<(Duration, u64)> {
        let begun = Instant::now();
        self.device.copy(self.stream, self.from, self.to)?;
        Ok((begun.elapsed(), u64::from(BROUGHT)))
    }
}

/// A step with all rows of a prompt, and one that accepts them.
fn compute(cache: &mut Cache, sequence: Sequence, tokens: u32, stream: Stream) -> Result<()> {
    for (accepted, query_rows) in [(0, tokens), (tokens, 1)] {
        let row = BatchRow { sequence, accepted: Accepted::Rows(accepted), query_rows };
        let mut step = cache.prepare(MicroBatch(0), &[row], None, stream)?;
        cache.finish(&mut step, stream)?;
        cache.retire(step, stream).map_err(|unretired| unretired.error)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let decode =
        RefCell::new(Decode::new(HostDevice::new(HostOptions::default()), Shape::gpt_oss_20b(2), memory())?);
    // One layer: a look-up reads no rows.
    let long = Prefixes::new(1, FOUND, Layout::LayerFirst)?;
    let brought = [Layout::LayerFirst, Layout::PageFirst]
        .map(|layout| RefCell::new(done(Prefixes::new(61, BROUGHT / PAGE, layout))));
    let mut sides = [
        Side::new("step", || done(decode.borrow_mut().pass())),
        Side::new("find", || done(long.find())),
        Side::new("bring, layer first", || done(brought[0].borrow_mut().bring())),
        Side::new("bring, page first", || done(brought[1].borrow_mut().bring())),
        Side::new("memcpy", || done(brought[0].borrow().copy())),
    ];
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    record(&mut criterion, "dense", &mut sides);
    let rounds = race(9, &mut sides);
    drop(sides);
    criterion.final_summary();
    let [step, find] = ["step", "find"].map(|side| 1e6 / rounds.rate(side));
    println!("prepare, finish and retire of {BATCH} sequences: {step:.1} us");
    println!("a prefix of {FOUND} pages: {find:.1} us");
    claim("20 us against a step", MOST_STEP / step, 1.0);
    claim("100 us against a look-up of 512 pages", MOST_FIND / find, 1.0);
    for side in ["bring, layer first", "bring, page first"] {
        claim(&format!("{side}, against memcpy"), rounds.ratio(side, "memcpy"), 0.9);
    }
    Ok(())
}
