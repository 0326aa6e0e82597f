//! A share by misses: at every step the budgets are those of a curve that the test makes from the same counters, with
//! lengths and budgets that it reads from outside.

use super::{Engine, FLIGHT, K, LAYERS, POOL, config, share};
use forebay::{MissCurve, SLOT_BLOCK, Sequence, Share, ShareBy, Want};

/// Sequences in the order of their opening, each with the tokens that it may have.
type Open = Vec<(Sequence, u32)>;

/// A sequence's tokens, with the row that its last step wrote.
fn length(e: &Engine, own: Sequence) -> u32 {
    let length = e.cache.length(own).unwrap();
    length.committed + length.landed
}

/// Adds the last step's counts in each layer.
fn note(e: &Engine, open: &Open, curves: &mut [MissCurve]) {
    for (layer, curve) in curves.iter_mut().enumerate() {
        let (mut slots, mut tokens) = (0, 0);
        for (own, _) in open {
            let (length, budget) = (length(e, *own), e.cache.budgets(*own).unwrap()[layer]);
            slots += u64::from(budget.min(length));
            tokens += u64::from(length);
        }
        curve.note(slots, tokens, e.missed[layer].into(), open.len() as u32);
    }
}

/// Blocks of each layer and sequence.
fn divided(e: &Engine, open: &Open, by: ShareBy, curves: &[MissCurve]) -> Vec<Vec<u32>> {
    let of = |curve| {
        let want = |(own, tokens): &(Sequence, u32)| Want::new(K, length(e, *own), FLIGHT, tokens + FLIGHT);
        let mut wants: Vec<Want> = open.iter().map(want).collect();
        Share { by, ..share() }.targets(POOL / SLOT_BLOCK, Some(curve), &mut wants);
        wants.iter().map(|want| want.blocks).collect()
    };
    curves.iter().map(of).collect()
}

fn held(e: &Engine, open: &Open) -> Vec<Vec<u32>> {
    let of = |layer: usize| {
        let own = |(own, _): &(Sequence, u32)| e.cache.budgets(*own).unwrap()[layer].div_ceil(SLOT_BLOCK);
        open.iter().map(own).collect()
    };
    (0..LAYERS as usize).map(of).collect()
}

#[test]
fn a_share_by_misses_divides_by_the_curve_of_its_counters() {
    let share = Share { by: ShareBy::Misses, every: 1, least_change: 1000, ..share() };
    let mut e = Engine::new(config(share));
    let mut curves = vec![MissCurve::default(); LAYERS as usize];
    let (mut open, mut unlike) = (Open::new(), 0);
    // Short ones have slots that they do not fill.
    for (prompt, promised) in [(1_500, 300), (600, 600), (60, 300), (60, 300), (300, 300)] {
        open.push((e.start(prompt, promised), prompt + promised));
        for step in 0..24 {
            let wanted = divided(&e, &open, share.by, &curves);
            unlike += usize::from(wanted != divided(&e, &open, ShareBy::Length, &curves));
            let begun = e.prepare();
            // The first step after a join shows that the device has run what the join resized.
            if step > 0 {
                assert_eq!(held(&e, &open), wanted, "step {step} of {} sequences", open.len());
            }
            e.finish(begun);
            note(&e, &open, &mut curves);
        }
    }
    assert!(unlike > 40, "{unlike} divisions that were not by length");
}
