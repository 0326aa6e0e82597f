//! Dense models: every row that attention reads is the row that was written, and pages are where they have to be.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "dense/engine.rs"]
mod engine;
#[path = "dense/world.rs"]
mod world;

use world::{DONE, On, World};

fn seeds(usual: u64) -> std::ops::Range<u64> {
    let soak = std::env::var("FOREBAY_SOAK").is_ok_and(|value| value == "1");
    0..if soak { usual * 50 } else { usual }
}

fn run(seeds: std::ops::Range<u64>, on: impl Fn(u64) -> On) {
    let mut done = [0; DONE];
    for seed in seeds {
        let mut world = World::new(seed, on(seed));
        world.run(400);
        done.iter_mut().zip(world.done).for_each(|(sum, done)| *sum += done);
    }
    assert!(done.iter().all(|done| *done > 5), "some operations were hardly tried: {done:?}");
}

#[test]
fn every_row_read_is_the_row_that_was_written() {
    run(seeds(200), |_| On::Inline);
}

#[test]
fn the_same_on_threads() {
    run(seeds(60), |_| On::Threads);
}

#[test]
fn the_same_on_a_clock_that_delays_and_reorders() {
    run(seeds(200), On::Clock);
}
