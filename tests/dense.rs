//! Dense models: every row that attention reads is the row that was written, and pages are where they have to be.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "dense/admission.rs"]
mod admission;
#[path = "dense/arrive.rs"]
mod arrive;
#[path = "dense/arrive_bad.rs"]
mod arrive_bad;
#[path = "dense/arrive_late.rs"]
mod arrive_late;
#[cfg(feature = "check")]
#[path = "dense/arrive_order.rs"]
mod arrive_order;
#[path = "dense/arrive_refused.rs"]
mod arrive_refused;
#[path = "dense/arrive_same.rs"]
mod arrive_same;
#[path = "dense/bad.rs"]
mod bad;
#[path = "dense/bodies.rs"]
mod bodies;
#[path = "dense/bring.rs"]
mod bring;
#[path = "dense/calls.rs"]
mod calls;
#[path = "dense/configs.rs"]
mod configs;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "dense/devices.rs"]
mod devices;
#[path = "dense/engine.rs"]
mod engine;
#[path = "support/faulty.rs"]
mod faulty;
#[cfg(feature = "check")]
#[path = "dense/order.rs"]
mod order;
#[path = "dense/pages.rs"]
mod pages;
#[path = "dense/park.rs"]
mod park;
#[cfg(feature = "transfer")]
#[path = "dense/r1.rs"]
mod r1;
#[path = "dense/refused.rs"]
mod refused;
#[cfg(feature = "check")]
#[path = "dense/watched.rs"]
mod watched;
#[path = "dense/world.rs"]
mod world;

use forebay::dense::{Cache, Config, Group, Open, Shape};
use forebay::device::host::HostOptions;
use forebay::{Accepted, BatchRow, Kind, MicroBatch};
use world::{DONE, On, World};

fn seeds(usual: u64) -> std::ops::Range<u64> {
    let soak = std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1");
    0..if soak { usual * 50 } else { usual }
}

/// Runs a world for each seed, in which each operation must do something more than `least` times in all.
fn run(seeds: std::ops::Range<u64>, least: u32, on: impl Fn(u64) -> On) {
    let mut done = [0; DONE];
    for seed in seeds {
        let mut world = World::new(seed, on(seed));
        world.run(400);
        done.iter_mut().zip(world.done).for_each(|(sum, done)| *sum += done);
    }
    assert!(done.iter().all(|done| *done > least), "some operations were hardly tried: {done:?}");
}

#[test]
fn every_row_read_is_the_row_that_was_written() {
    run(seeds(200), 20, |_| On::Inline);
}

#[test]
fn the_same_on_threads() {
    // How much is done depends on the machine's load.
    run(seeds(60), 0, |_| On::Threads);
}

#[test]
fn the_same_on_a_clock_that_delays_and_reorders() {
    run(seeds(200), 20, On::Clock);
}

/// The body of the fuzz target `dense_ops`: a fixed corpus, then strings that are short, uneven or long.
#[test]
fn any_bytes_are_a_run_of_the_world_or_calls() {
    let corpus = [&[][..], &[0], &[1; 2], &[255; 61], &[7; 400], &[4; 600], &[0x55; 300], &[0x9E; 999]];
    corpus.iter().for_each(|bytes| bodies::dense_ops(bytes));
    let (mut done, mut calls) = ([0; DONE], 0);
    for seed in seeds(100) {
        let mut random = configs::Random::new(seed);
        let bytes: Vec<u8> = (0..seed * 37 % 3000).map(|_| random.below(256) as u8).collect();
        done.iter_mut().zip(bodies::dense_world(&bytes)).for_each(|(sum, done)| *sum += done);
        calls += calls::dense_calls(&bytes);
    }
    assert!(done.iter().all(|done| *done > 0), "some operations were never tried: {done:?}");
    assert!(calls > 1000, "{calls} calls were not refused");
}

/// The host does not know how many rows of the first step were accepted when it prepares the third.
#[test]
fn a_step_behind_a_failed_one_fails_too() {
    let test = device::TestDevice::new(HostOptions::default());
    let shape =
        Shape { page_tokens: 16, groups: vec![Group { layers: vec![0], runs: [16, 0], window: None }] };
    let config = Config { query_rows: 2, steps_in_flight: 3, ..Config::new(shape, 1, 64) };
    let (stream, counts) = (test.stream().unwrap(), test.allocate(4).unwrap());
    let mut cache = Cache::new(config, test.device()).unwrap();
    let sequence = cache.open(&Open { prompt: 2, promised: 20 }).unwrap();
    let mut steps = Vec::new();
    // The device is told that five of two rows were accepted.
    test.write(counts, &5_u32.to_le_bytes()).unwrap();
    for accepted in [Accepted::Rows(0), Accepted::OnDevice, Accepted::Rows(1)] {
        let row = BatchRow { sequence, accepted, query_rows: 2 };
        let mut step = cache.prepare(MicroBatch(0), &[row], Some(counts), stream).unwrap();
        cache.finish(&mut step, stream).unwrap();
        steps.push(step);
    }
    let third = steps.pop().unwrap();
    let unretired = cache.retire(third, stream).unwrap_err();
    assert_eq!(unretired.error.kind(), Kind::Busy, "{}", unretired.error);
    steps.push(unretired.step.unwrap());
    let outcomes = steps.into_iter().map(|step| match cache.retire(step, stream) {
        Ok(_) => None,
        Err(unretired) => Some((unretired.error.kind(), unretired.error.place().to_owned())),
    });
    let [first, second, third] = <[_; 3]>::try_from(outcomes.collect::<Vec<_>>()).unwrap();
    assert_eq!(first, None);
    assert_eq!(second, Some((Kind::DeviceFailed, "more rows were accepted than had landed".to_owned())));
    assert_eq!(third, Some((Kind::DeviceFailed, "an earlier step of the sequence failed".to_owned())));
    let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
    let error = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidState);
    let _ticket = cache.truncate(sequence, 0, stream).unwrap();
    let step = cache.prepare(MicroBatch(0), &[row], None, stream).unwrap();
    assert_eq!(step.rows(), 1);
}
