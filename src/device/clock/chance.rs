//! Random timing from a seed: delays, durations and orders of operations.
//!
//! A schedule is correct when every order that its edges allow gives the same bytes. So with a seed, each operation
//! is delayed and prolonged by times that are mostly short and sometimes longer than everything else together.
//! Streams differ in speed. An effect happens at its operation's start or at its end. The host's polls take random
//! times, and now and then the host is slow to enqueue. The draw for an operation depends only on the seed, the
//! stream and the operation's number in the stream; the draw for the host depends on how often it has called. So the
//! same calls run the same way again.

/// The random draw for one operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Draw {
    /// Nanoseconds before it starts.
    pub(super) before_ns: f64,
    /// Nanoseconds added to its duration.
    pub(super) during_ns: f64,
    /// Whether its effect happens at its start instead of its end.
    pub(super) early: bool,
}

impl Draw {
    /// The draw without a seed.
    pub(super) const NONE: Draw = Draw { before_ns: 0.0, during_ns: 0.0, early: false };
}

/// The purposes of draws; draws of one seed for different purposes are independent.
const POLL: u64 = u64::MAX;
const PACE: u64 = u64::MAX - 1;
const CALL: u64 = u64::MAX - 2;

fn mix(mut word: u64) -> u64 {
    // The finaliser of splitmix64.
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn word(seed: u64, stream: u64, number: u64) -> u64 {
    let stream = mix(seed ^ mix(stream.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    mix(stream ^ number.wrapping_mul(0xD134_2543_DE82_EF95))
}

/// A delay in nanoseconds: often zero, often short, and now and then long enough for all other streams to finish.
fn time(word: u64) -> f64 {
    let most = match word % 16 {
        0..=5 => return 0.0,
        6..=11 => 2e3,
        12..=14 => 1e5,
        _ => 1e7,
    };
    most * ((word >> 32) as f64 / 4_294_967_296.0)
}

/// The draw for operation `number` of a stream.
pub(super) fn operation(seed: u64, stream: u64, number: u64) -> Draw {
    let drawn = word(seed, stream, number);
    let pace = [0.1, 1.0, 1.0, 20.0][word(seed, stream, PACE) as usize % 4];
    Draw { before_ns: pace * time(drawn), during_ns: pace * time(mix(drawn)), early: drawn >> 16 & 1 == 1 }
}

/// The nanoseconds that pass while the host polls an event for the `number`-th time.
pub(super) fn poll(seed: u64, number: u64) -> f64 {
    time(word(seed, POLL, number))
}

/// The nanoseconds that pass before the host enqueues for the `number`-th time; mostly zero.
pub(super) fn enqueueing(seed: u64, number: u64) -> f64 {
    let drawn = word(seed, CALL, number);
    if drawn.is_multiple_of(4) { time(mix(drawn)) } else { 0.0 }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_again_and_another_does_not() {
        let draws = |seed| (0..64).map(|number| operation(seed, number % 4, number)).collect::<Vec<_>>();
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
        let polls = |seed| (0..64).map(|number| poll(seed, number)).collect::<Vec<_>>();
        assert_eq!(polls(3), polls(3));
        assert_ne!(polls(3), polls(4));
    }

    #[test]
    fn a_streams_operations_are_prompt_or_very_late_with_early_or_late_effects() {
        let draws: Vec<Draw> = (0..400).map(|number| operation(1, 2, number)).collect();
        let share = |is: fn(&Draw) -> bool| draws.iter().filter(|d| is(d)).count();
        assert!(share(|d| d.before_ns == 0.0) > 80);
        assert!(share(|d| d.before_ns > 1e5) > 8, "longer than a hundred others");
        assert!(share(|d| d.early) > 120 && share(|d| !d.early) > 120);
    }
}
