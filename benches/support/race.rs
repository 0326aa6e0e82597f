//! Compares several sides: criterion measures each, and then they run against each other, round by round.
//!
//! Criterion measures one side after the other, which suits a figure that is followed over time. It does not suit a
//! ratio: on a shared machine, minutes lie between the first side and the last. So the sides run once more in turn, and
//! a ratio is the median over the rounds of each round's ratio.

use std::time::Duration;

use criterion::{Criterion, Throughput};

/// One side: a name and a pass of its work, which returns its time and its number of units.
pub struct Side<'a> {
    pub name: &'static str,
    pub pass: Box<dyn FnMut() -> (Duration, u64) + 'a>,
}

impl<'a> Side<'a> {
    pub fn new(name: &'static str, pass: impl FnMut() -> (Duration, u64) + 'a) -> Self {
        Side { name, pass: Box::new(pass) }
    }
}

/// Units per second, by round and side.
pub struct Rounds {
    names: Vec<&'static str>,
    rates: Vec<Vec<f64>>,
}

/// Returns the result of a pass; a pass that fails ends the bench, because its figures would mean nothing.
pub fn done<T, E: std::fmt::Display>(pass: Result<T, E>) -> T {
    pass.unwrap_or_else(|error| {
        eprintln!("the bench cannot go on: {error}");
        std::process::exit(1)
    })
}

/// Measures every side with criterion as `group/name`.
pub fn record(criterion: &mut Criterion, group: &str, sides: &mut [Side<'_>]) {
    let mut reports = criterion.benchmark_group(group);
    for side in sides {
        let (_, units) = (side.pass)();
        reports.throughput(Throughput::Elements(units));
        reports.bench_function(side.name, |bencher| {
            bencher.iter_custom(|passes| (0..passes).map(|_| (side.pass)().0).sum());
        });
    }
    reports.finish();
}

/// Runs the sides in turn, for an odd number of rounds, so that the median is one of them.
pub fn race(rounds: usize, sides: &mut [Side<'_>]) -> Rounds {
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let passes = sides.iter_mut().map(|side| (side.pass)());
        rates.push(passes.map(|(time, units)| units as f64 / time.as_secs_f64()).collect());
    }
    Rounds { names: sides.iter().map(|side| side.name).collect(), rates }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Rounds {
    fn of(&self, name: &str) -> usize {
        self.names.iter().position(|n| *n == name).unwrap_or_default()
    }

    /// Returns the median units per second of a side.
    pub fn rate(&self, name: &str) -> f64 {
        let side = self.of(name);
        median(self.rates.iter().map(|round| round[side]))
    }

    /// Returns how many times as fast as `other` the side is: the median over the rounds.
    pub fn ratio(&self, name: &str, other: &str) -> f64 {
        let (side, other) = (self.of(name), self.of(other));
        median(self.rates.iter().map(|round| round[side] / round[other]))
    }
}

/// Prints one line per claim, which docs/benchmarks.md quotes.
pub fn claim(words: &str, ratio: f64, target: f64) {
    let verdict = if ratio >= target { "met" } else { "MISSED" };
    println!("claim: {words}: ratio {ratio:.2} (target {target:.2}, {verdict})");
}
