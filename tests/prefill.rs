//! The plan of a prefill instance against the staging ring itself: prefill with a ring as planned, on a clock of its
//! own.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::VecDeque;

use forebay::predict::layered::Pass;
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

/// The ends of the computation and of the transfer, tick by tick: each stage is a worker that takes the next part when
/// it is free, and the first one only if the ring has room. `parts` are the ticks of each part in each stage.
fn ticked(parts: &[[u64; 4]], depth: usize, acknowledge: u64) -> [u64; 2] {
    let (mut at, mut workers) = (vec![0; parts.len()], [None::<(usize, u64)>; 4]);
    let (mut begun, mut stored, mut computed, mut now) = (0, Vec::new(), 0, 0);
    loop {
        let mut moves = true;
        while moves {
            moves = false;
            for stage in 0..4 {
                let held = begun - stored.iter().filter(|time| *time + acknowledge <= now).count();
                let next = at.iter().position(|of| *of == stage);
                if workers[stage].is_none() && (stage > 0 || held < depth) {
                    workers[stage] = next.map(|part| (part, parts[part][stage]));
                    begun += usize::from(stage == 0 && next.is_some());
                    moves |= next.is_some();
                }
                if let Some((part, 0)) = workers[stage] {
                    (workers[stage], moves) = (None, true);
                    at[part] += 1;
                    match stage {
                        0 => computed = now,
                        3 => stored.push(now),
                        _ => {}
                    }
                }
            }
        }
        if stored.len() == parts.len() {
            return [computed, now];
        }
        now += 1;
        workers.iter_mut().flatten().for_each(|(_, left)| *left -= 1);
    }
}

/// All combinations of some numbers for each place.
fn combinations(of: &[&[u64]]) -> Vec<Vec<u64>> {
    of.iter().fold(vec![Vec::new()], |all, more| {
        let with = |one: &Vec<u64>| more.iter().map(|next| [&one[..], &[*next]].concat()).collect::<Vec<_>>();
        all.iter().flat_map(with).collect()
    })
}

/// Every time is a whole number of microseconds, so both count alike. The control has a ring without end.
#[test]
fn a_layered_transfer_takes_as_long_as_it_does_tick_by_tick() {
    let numbers: [&[u64]; 8] = [&[1, 6], &[0, 2], &[1, 5], &[1, 4], &[0, 7], &[1, 2, 4], &[1, 2], &[2, 3]];
    let mut waiting = 0;
    for of in combinations(&numbers) {
        let [layer, digest, link, store, acknowledge, depth, micro_batches, tokens] = of[..] else {
            panic!()
        };
        let rate = |us: u64| 1e6 / us as f64;
        let pass = Pass {
            layers: 5,
            tokens: tokens as u32,
            micro_batches: micro_batches as u32,
            token_bytes: 1,
            layer_us: (layer * tokens) as f64,
            stage_rate: rate(1),
            digest_rate: (digest > 0).then(|| rate(digest)),
            link_rate: rate(link),
            store_rate: rate(store),
            acknowledge_us: acknowledge as f64,
            depth: depth as u32,
        };
        let found = pass.simulate().unwrap();
        let shares: &[u64] = if micro_batches == 1 { &[tokens] } else { &[tokens.div_ceil(2), tokens / 2] };
        let part = |tokens: &u64| [layer + 1, digest, link, store].map(|us| us * tokens);
        let parts: Vec<[u64; 4]> = (0..5).flat_map(|_| shares.iter().map(part)).collect();
        let [computed, stored] = ticked(&parts, depth as usize, acknowledge);
        let ready: Vec<[u64; 4]> =
            parts.iter().map(|[_, rest @ ..]| [0, rest[0], rest[1], rest[2]]).collect();
        let [_, alone] = ticked(&ready, usize::MAX, 0);
        let wanted = [computed, stored - computed, alone].map(|ticks| ticks as f64);
        let ours = [found.compute_us, found.exposed_us, found.alone_us];
        assert!(ours.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6), "{pass:?}: {ours:?} {wanted:?}");
        let moved = (link * tokens * 5) as f64;
        assert!((found.link_load - moved / computed as f64).abs() < 1e-9);
        assert!((found.hidden - (1.0 - wanted[1] / wanted[2]).max(0.0)).abs() < 1e-9);
        let alone = (layer * tokens * 5) as f64;
        assert!((found.slowed - (computed as f64 / alone - 1.0)).abs() < 1e-9);
        let without = ticked(&parts, usize::MAX, acknowledge)[0];
        assert!((found.wait_us - (computed - without) as f64).abs() < 1e-6, "{pass:?}");
        waiting += usize::from(computed > without);
    }
    assert!(waiting > 100, "{waiting} passes wait for the ring");
}

#[test]
fn a_pass_that_cannot_be_is_refused_by_its_field() {
    let good = Pass {
        layers: 2,
        tokens: 4,
        micro_batches: 2,
        token_bytes: 8,
        layer_us: 1.0,
        stage_rate: 1.0,
        digest_rate: Some(1.0),
        link_rate: 1.0,
        store_rate: 1.0,
        acknowledge_us: 0.0,
        depth: 1,
    };
    good.simulate().unwrap();
    let wrong = [
        (Pass { layers: 0, ..good }, "layers"),
        (Pass { tokens: 0, ..good }, "tokens"),
        (Pass { micro_batches: 0, ..good }, "micro-batches"),
        (Pass { micro_batches: 5, ..good }, "more micro-batches than tokens"),
        (Pass { token_bytes: 0, ..good }, "bytes of a token"),
        (Pass { depth: 0, ..good }, "parts of the ring"),
        (Pass { layers: u32::MAX, ..good }, "layers and micro-batches"),
        (Pass { layer_us: 0.0, ..good }, "layer time"),
        (Pass { stage_rate: f64::NAN, ..good }, "stage rate"),
        (Pass { digest_rate: Some(0.0), ..good }, "digest rate"),
        (Pass { link_rate: -1.0, ..good }, "link rate"),
        (Pass { store_rate: f64::INFINITY, ..good }, "store rate"),
        (Pass { acknowledge_us: -1.0, ..good }, "acknowledgement"),
    ];
    for (pass, field) in wrong {
        let error = pass.simulate().unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, field), "{error}");
    }
}
