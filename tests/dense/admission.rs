//! How many sequences fit: what admission lets in is what the pages hold, and one more is refused with the reason.
//!
//! That a step finds the pages which admission promised is what the world shows: its `step` takes no error of a
//! prepare but that of a failed sequence whose steps are in flight, whatever was opened, shared and evicted before.

use std::sync::Arc;

use crate::device::TestDevice;
use crate::engine::{Expected, Kernels};
use forebay::dense::{Cache, Config, Group, Open, Shape};
use forebay::device::Device;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::HostOptions;
use forebay::{Accepted, BatchRow, Kind, Memory, MicroBatch};

const MEMORY: Memory = Memory { huge: false, populate: false, lock: false, node: None };

/// A published decode card has 20 GiB for 72 sequences of 4,096 tokens of DeepSeek-V3 in BF16. The clock has no memory,
/// so the cache has its real sizes here.
#[test]
fn seventy_two_sequences_of_deepseek_v3_fit_20_gib_and_one_more_is_refused() {
    const BYTES: u64 = 20 << 30;
    let shape = Shape { page_tokens: 128, ..Shape::deepseek_v3(2) };
    let pages = (BYTES / shape.page_bytes(0)) as u32;
    let config = Config { device_pages: vec![pages], memory: MEMORY, ..Config::new(shape, 100, 4096) };
    assert!(config.footprint().unwrap().pages <= BYTES);
    let clock = ClockDevice::new(ClockOptions::default()).unwrap();
    let mut cache = Cache::new(config, clock.clone()).unwrap();
    let bytes: u64 = cache.planes(0).unwrap().map(|plane| plane.memory.bytes()).sum();
    assert!((BYTES - 8_994_816..=BYTES).contains(&bytes), "{bytes}");
    let open = Open { prompt: 4000, promised: 96 };
    let mut sequences: Vec<_> = (0..72).map(|_| cache.open(&open).unwrap()).collect();
    // 2,386 pages of 128 tokens; a sequence takes 33 of them, with its rows in flight.
    let before = cache.stats();
    assert_eq!((before.sequences, before.free_pages[0]), (72, 2386 - 72 * 33));
    let error = cache.open(&open).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "device pages of a group"));
    assert_eq!(error.numbers(), [("wanted", 33), ("free", 10), ("group", 0)]);
    assert_eq!(cache.stats(), before);
    cache.validate().unwrap();
    // A short one still fits, and after one has gone another whole one does.
    sequences.push(cache.open(&Open { prompt: 1000, promised: 200 }).unwrap());
    let stream = clock.stream().unwrap();
    cache.close(sequences[40], stream).unwrap();
    cache.open(&open).unwrap();
}

/// Pages for one sequence and not one more: its prompt, its promised tokens and its rows in flight all find room.
#[test]
fn a_sequence_that_fits_exactly_runs_to_its_last_row() {
    let group = |layers: &[u32], window| Group { layers: layers.to_vec(), runs: [16, 16], window };
    for (tokens, window) in [(92, 17), (93, 40), (96, 1), (12, 5)] {
        let shape = Shape { page_tokens: 16, groups: vec![group(&[0], None), group(&[1], Some(window))] };
        let (query_rows, steps_in_flight) = (2, 2);
        let base = Config { query_rows, steps_in_flight, ..Config::new(shape, 2, tokens) };
        let mut config = Config { batch: 1, step_tokens: 30, memory: MEMORY, ..base };
        config.device_pages = config.pages_for(1, tokens);
        let test = TestDevice::new(HostOptions::default());
        let (device, stream) = (test.device(), test.stream().unwrap());
        let mut cache = Cache::new(config.clone(), Arc::clone(&device)).unwrap();
        let kernels = Kernels::new(&test, &cache);
        let prompt = tokens - 4;
        let sequence = cache.open(&Open { prompt, promised: 4 }).unwrap();
        assert_eq!(cache.stats().free_pages[..2], [0, 0]);
        let error = cache.open(&Open { prompt: 1, promised: 0 }).unwrap_err();
        assert_eq!((error.kind(), error.number("free")), (Kind::Exhausted, Some(0)));
        let (mut stamps, mut landed) = (Vec::new(), 0);
        // Until it has all tokens, and rows in all the room that is for rows in flight.
        while stamps.len() < tokens as usize + 4 {
            let left = prompt.saturating_sub(stamps.len() as u32);
            let fresh = if left == 0 { query_rows } else { left.min(30) };
            let row = BatchRow { sequence, accepted: Accepted::Rows(landed), query_rows: fresh };
            let mut step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
            let first = 7 + stamps.len() as u64;
            stamps.extend(first..first + u64::from(fresh));
            let expected = vec![Expected { stamps: stamps.clone(), fresh: fresh as usize }];
            kernels.enqueue(&mut cache, (&*device, stream), (&step, 0), expected);
            cache.finish(&mut step, stream).unwrap();
            cache.retire(step, stream).map_err(|unretired| unretired.error).unwrap();
            cache.validate().unwrap();
            landed = fresh;
        }
        assert_eq!(*kernels.faults.lock().unwrap(), Vec::<String>::new());
        let row = BatchRow { sequence, accepted: Accepted::Rows(landed), query_rows };
        let error = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap_err();
        assert_eq!(error.place(), "the sequence outgrows its admitted tokens");
    }
}
