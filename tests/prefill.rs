//! The plan of a prefill instance against the staging ring itself: prefill with a ring as planned, on a clock of its
//! own.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::VecDeque;

use forebay::predict::prefill::{Demand, Planned, Ring, plan};
use forebay::transfer::{Part, StagingRing};
use forebay::{Kind, Shape};

/// The layers of several passes: enough for the pace to be steady.
const LAYERS: usize = 4000;

/// Microseconds from the end of one layer to the end of the next, in the steady state of prefill over a ring of `bytes`
/// bytes: layers compute one after another, parts cross one after another, and each is acknowledged some time later.
fn pace(ring: &Ring, bytes: u64) -> f64 {
    let mut staging = StagingRing::new(bytes, 64).unwrap();
    let mut sent: VecDeque<(f64, Part)> = VecDeque::new();
    let (mut now, mut link, mut middle) = (0.0_f64, 0.0_f64, 0.0);
    for layer in 0..LAYERS {
        let part = loop {
            while let Some((_, part)) = sent.pop_front_if(|(acknowledged, _)| *acknowledged <= now) {
                staging.give_back(part).unwrap();
            }
            match staging.take(ring.part) {
                Ok(part) => break part,
                Err(error) if error.kind() == Kind::Exhausted => now = sent.front().unwrap().0,
                Err(error) => panic!("{error}"),
            }
        };
        now += ring.layer_us;
        link = link.max(now) + ring.transfer_us;
        sent.push_back((link + ring.acknowledge_us, part));
        if layer == LAYERS / 2 {
            middle = now;
        }
    }
    (now - middle) / (LAYERS - 1 - LAYERS / 2) as f64
}

fn close(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 0.004
}

fn planned(chunk: u32, gb_s: f64, acknowledge_us: f64, depth: Option<u32>) -> Planned {
    let demand = Demand::new(Shape::DEEPSEEK_V3_2, 1 << 40, chunk);
    plan(&Demand { link_rate: gb_s * 1e9, acknowledge_us, depth, ..demand }).unwrap()
}

/// The control is a ring of one part less, over which prefill is slower.
#[test]
fn prefill_waits_for_no_part_of_a_ring_as_planned_and_for_those_of_a_smaller_one() {
    let mut depths = Vec::new();
    for (chunk, gb_s, acknowledge_us) in [
        (16_384, 50.0, 1000.0),
        (4096, 5.0, 1000.0),
        (512, 50.0, 700.0),
        (8192, 1.0, 300.0),
        (1024, 0.9, 9000.0),
    ] {
        let ring = planned(chunk, gb_s, acknowledge_us, None).ring;
        let least = ring.layer_us.max(ring.transfer_us);
        assert!(close(pace(&ring, ring.bytes), least), "{ring:?}");
        assert!(close(ring.layer_us + ring.wait_us, least), "{ring:?}");
        let less = ring.bytes - ring.part;
        assert!(pace(&ring, less) > 1.008 * least, "{ring:?}");
        depths.push(ring.depth);
    }
    assert_eq!(depths, [2, 2, 4, 2, 12]);
}

#[test]
fn a_ring_of_a_given_depth_waits_as_long_as_the_plan_says() {
    for depth in 1..8 {
        for (chunk, gb_s, acknowledge_us) in [(512, 50.0, 700.0), (1024, 0.9, 3000.0), (16_384, 50.0, 1000.0)]
        {
            let ring = planned(chunk, gb_s, acknowledge_us, Some(depth)).ring;
            assert_eq!(ring.depth, depth);
            assert!(close(pace(&ring, ring.bytes), ring.layer_us + ring.wait_us), "{ring:?}");
        }
    }
}

/// Whether a ring of two parts ever has no room for a layer while one other part is held; `equal` parts, or each of its
/// layer's own length.
fn stalls(shape: Shape, equal: bool) -> bool {
    let ring = plan(&Demand::new(shape, 1 << 40, 4096)).unwrap().ring;
    assert_eq!(ring.depth, 2);
    let mut staging = StagingRing::new(ring.bytes, 64).unwrap();
    let mut before: Option<Part> = None;
    for layer in 0..shape.layers {
        let own = if shape.group_of(layer).0 == layer { ring.part } else { ring.row_bytes };
        let Ok(part) = staging.take(if equal { ring.part } else { own }) else { return true };
        if let Some(part) = before.replace(part) {
            staging.give_back(part).unwrap();
        }
    }
    false
}

/// The control takes parts of different lengths, for which a ring of the same bytes has no room at times.
#[test]
fn equal_parts_never_wait_for_the_end_of_the_ring() {
    assert!(!stalls(Shape::GLM_5_2, true));
    assert!(stalls(Shape::GLM_5_2, false));
    // Where all layers have index keys, the two are the same.
    assert!(!stalls(Shape::DEEPSEEK_V3_2, false));
}
