//! Claim: simulating one step of 61 layers takes less than 2 ms of one core, and a sweep of 1,000 points from layer
//! prices takes less than 5 s.
//!
//! The step is the built-in setup's at 32K, batch 160, ratio 0.21: two micro-batches, orders chosen by layer. It
//! includes the step without misses that it is compared with, and the simulator starts with no prices. The sweep has 20
//! batches, 5 contexts and 10 ratios, and its simulator keeps its prices from point to point.

#[path = "support/clock.rs"]
mod clock;
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::Result;
use forebay::predict::setup::Setup;
use forebay::predict::simulate::{Options, Point, Simulator};
use race::{Side, claim, done, race, record};

const POINT: Point = Point { context: 32 << 10, batch: 160, mtp: 2, accept: 1.7, ratio: 0.21 };

fn ess() -> Setup {
    done(Setup::named("ess").unwrap_or_else(|| std::process::exit(1)))
}

fn step(setup: &Setup) -> Result<(Duration, u64)> {
    let setup = setup.clone();
    let lap = Lap::begin();
    std::hint::black_box(Simulator::new(setup).run(&POINT, &Options::default())?);
    Ok((lap.end(), 1))
}

fn sweep(setup: &Setup) -> Result<(Duration, u64)> {
    let setup = setup.clone();
    let lap = Lap::begin();
    let mut simulator = Simulator::new(setup);
    for batch in (1..=20).map(|step| 12 * step) {
        for context in (1..=5).map(|step| 24_576 * step) {
            for ratio in (0..10).map(|step| 0.14 + 0.08 * f64::from(step)) {
                let point = Point { context, batch, ratio, ..POINT };
                std::hint::black_box(simulator.estimate(&point, &Options::default())?);
            }
        }
    }
    Ok((lap.end(), 1000))
}

fn main() {
    let setup = ess();
    let mut sides = [Side::new("a step", || done(step(&setup))), Side::new("points", || done(sweep(&setup)))];
    let mut criterion = Criterion::default().configure_from_args();
    record(&mut criterion, "simulate", &mut sides);
    let rounds = race(5, &mut sides);
    claim("2 ms against a step of 61 layers", 2e-3 * rounds.rate("a step"), 1.0);
    claim("5 s against 1,000 points", 5e-3 * rounds.rate("points"), 1.0);
    claim("a point of a sweep against a step", rounds.ratio("points", "a step"), 1.0);
    criterion.final_summary();
}
