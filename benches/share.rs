//! Claim: dividing the slots of 61 layers over 64 sequences takes less than 1 ms of one core, by any measure.
//!
//! The sequences have between 2K and 128K tokens, were promised 2,048 slots each, and may grow by an eighth. A layer
//! has 819,200 slots, so not all rows fit. A cache divides when a sequence comes, ends or outgrows its budget, and then
//! once for all layers that are alike; only a division by misses looks at each layer. The pass divides every layer.

#[path = "support/clock.rs"]
mod clock;
#[allow(dead_code, reason = "no side can fail, and none is compared with another")]
#[path = "support/race.rs"]
mod race;

use std::time::Duration;

use clock::Lap;
use criterion::Criterion;
use forebay::{MissCurve, Share, ShareBy, Want};
use race::{Side, claim, race, record};

const LAYERS: u64 = 61;
const SEQUENCES: u32 = 64;
const BLOCKS: u32 = 819_200 / 64;
/// Divisions of all layers in one pass.
const TIMES: u64 = 20;

fn wants() -> Vec<Want> {
    let lengths = (0..SEQUENCES).map(|n| 2_048 + n * (131_072 - 2_048) / (SEQUENCES - 1));
    lengths.map(|length| Want::new(2_048, length, 4, length + length / 8)).collect()
}

/// A curve with a point in each of its bins.
fn curve() -> MissCurve {
    let mut curve = MissCurve::default();
    for bin in 0..16 {
        curve.note(2 * bin + 1, 32, 4_096 / (bin + 1), 1);
    }
    curve
}

fn pass(by: ShareBy) -> (Duration, u64) {
    let (share, curve, mut wants) = (Share { by, ..Share::default() }, curve(), wants());
    let lap = Lap::begin();
    for _ in 0..TIMES * LAYERS {
        share.targets(std::hint::black_box(BLOCKS), Some(&curve), &mut wants);
        std::hint::black_box(&wants);
    }
    (lap.end(), TIMES)
}

fn main() {
    let mut sides = [
        Side::new("equal", || pass(ShareBy::Equal)),
        Side::new("length", || pass(ShareBy::Length)),
        Side::new("misses", || pass(ShareBy::Misses)),
    ];
    let mut criterion = Criterion::default().configure_from_args();
    record(&mut criterion, "share", &mut sides);
    let rounds = race(9, &mut sides);
    for side in ["equal", "length", "misses"] {
        println!("{side}: {:.0} us for 61 layers", 1e6 / rounds.rate(side));
        claim(&format!("1 ms against a division of 61 layers, {side}"), 1e-3 * rounds.rate(side), 1.0);
    }
    criterion.final_summary();
}
