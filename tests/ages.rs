//! Ages instead of selections: whenever a step's rows fit the budget, a join with either ends with the same rows
//! resident, in the same order of the rule, so that every later victim is the same.
//!
//! The reference is the naive rule, a list of positions. The host device must agree with it.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "support/oracle.rs"]
#[allow(dead_code, reason = "a test takes what it needs")]
mod oracle;

use forebay::ages::{NEVER, STEPS_MAX, from_selections, suffice, to_selections};
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::{Accepted, BatchRow, BringUp, Budget, Buffers, Cache, Config, Kind, Layer, LayerCall, Memory};
use forebay::{MicroBatch, Open, Shape, Streams, WarmUp};
use oracle::Oracle;
use proptest::prelude::*;

const K: usize = 8;

/// Steps of selections, each of distinct positions and then -1.
fn selections() -> impl Strategy<Value = (u32, Vec<Vec<u32>>)> {
    (2_u32..80).prop_flat_map(|length| {
        let step = prop::collection::btree_set(0..length + 3, 0..=K.min(length as usize));
        let step = step.prop_map(|step| step.into_iter().collect::<Vec<u32>>()).prop_shuffle();
        (Just(length), prop::collection::vec(step, 0..40))
    })
}

fn words(steps: &[Vec<u32>]) -> Vec<i32> {
    let padded = |step: &Vec<u32>| {
        let positions = step.iter().map(|position| *position as i32).chain(std::iter::repeat(-1));
        positions.take(K).collect::<Vec<i32>>()
    };
    steps.iter().flat_map(padded).collect()
}

/// The selections that the ages of these ones make.
fn by_ages(length: u32, selections: &[i32]) -> Vec<i32> {
    let mut ages = vec![7; length as usize];
    from_selections(selections, K, &mut ages).unwrap();
    let mut back = vec![3; selections.len()];
    to_selections(&ages, K, &mut back).unwrap();
    back
}

/// The rule's state after a warm-up.
fn warmed(length: u32, budget: u32, whole: bool, selections: &[i32]) -> Oracle {
    let mut oracle = Oracle::new(budget as usize, length);
    if whole {
        oracle.bring_up();
    }
    for step in selections.chunks_exact(K) {
        oracle.select(step.iter().filter_map(|position| u32::try_from(*position).ok()));
    }
    oracle
}

fn order(length: u32, budget: u32, whole: bool, selections: &[i32]) -> Vec<u32> {
    warmed(length, budget, whole, selections).order
}

/// What later steps select: positions of the prompt.
fn later(length: u32, seed: u64) -> Vec<Vec<u32>> {
    let mut state = seed;
    let mut below = |limit: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as u32) % limit
    };
    (0..40).map(|_| (0..4).map(|_| below(length)).collect()).collect()
}

/// The hits and misses of later steps on the host device: a row is a hit as long as no step has evicted it.
fn goes_on(length: u32, budget: u32, whole: bool, selections: &[i32], later: &[Vec<u32>]) -> Vec<(u64, u64)> {
    let device = HostDevice::new(HostOptions::default());
    let stream = device.stream().unwrap();
    let shape = Shape {
        layers: 1,
        runs: [32, 0],
        index_key_bytes: 0,
        page_tokens: 16,
        top_k: K as u32,
        ..Shape::DEEPSEEK_V3_2
    };
    let memory = Memory { huge: false, populate: false, lock: false, node: None };
    let config = Config { min_budget: 1, residency_only: true, memory, ..Config::new(shape, 1, 400, budget) };
    let mut cache = Cache::new(config, device.clone()).unwrap();
    let bring_up = if whole { BringUp::Whole } else { BringUp::Nothing };
    let open = Open { prompt: length, promised: 90, budget: Budget::Slots(budget), bring_up };
    let sequence = cache.open(&open).unwrap();
    cache.append_in_place(sequence, length).unwrap();
    let write = |slice, words: &[i32]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        device.write(slice, &bytes).unwrap();
    };
    let warm = if selections.is_empty() {
        WarmUp::default()
    } else {
        let slice = device.allocate(4 * selections.len() as u64).unwrap();
        write(slice, selections);
        WarmUp { selections: Some(slice), steps: (selections.len() / K) as u32, bytes_a_call: 0 }
    };
    let _ticket = cache.join(sequence, stream, warm).unwrap();
    let buffer = || device.allocate(4 * K as u64).unwrap();
    let (selection, slots) = (buffer(), buffer());
    let step = |picks: &Vec<u32>| {
        write(selection, &words(std::slice::from_ref(picks)));
        let row = BatchRow { sequence, accepted: Accepted::Rows(0), query_rows: 1 };
        let mut step = cache.prepare(MicroBatch(0), 1, &[row], None, stream).unwrap();
        let streams = Streams { resolve: stream, gather: stream };
        let buffers = Buffers { selection, slots, split_indices: None };
        cache.layer(&step, LayerCall::whole(Layer(0)), streams, buffers).unwrap();
        cache.finish(&mut step, stream).unwrap();
        cache.retire(step, stream).map_err(|unretired| unretired.error).unwrap().total()
    };
    later.iter().map(step).collect()
}

/// The same by the naive rule.
fn goes_on_naively(oracle: &mut Oracle, later: &[Vec<u32>]) -> Vec<(u64, u64)> {
    let step = |picks: &Vec<u32>| {
        let step = oracle.select(picks.iter().copied());
        (step.hits.len() as u64, step.misses.len() as u64)
    };
    later.iter().map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn ages_say_what_selections_say_whenever_the_rows_of_a_step_fit(
        (length, steps) in selections(),
        budget in 1_u32..40,
        whole in any::<bool>(),
    ) {
        let own = words(&steps);
        let back = by_ages(length, &own);
        let rows = |step: &Vec<u32>| step.iter().filter(|position| **position < length).count();
        let most = steps.iter().map(rows).max().unwrap_or(0);
        prop_assert_eq!(suffice(&own, K, length, budget).unwrap(), most <= budget as usize);
        // Each position once, in the last step that selected it.
        for position in 0..length {
            let listed: Vec<usize> = (0..back.len()).filter(|at| back[*at] == position as i32).collect();
            let last = steps.iter().rposition(|step| step.contains(&position));
            let last: Vec<usize> = last.into_iter().collect();
            prop_assert_eq!(listed.iter().map(|at| at / K).collect::<Vec<_>>(), last, "position {}", position);
        }
        if most <= budget as usize {
            prop_assert_eq!(order(length, budget, whole, &own), order(length, budget, whole, &back));
        }
        // The ages of the result are those that it was made of.
        prop_assert_eq!(by_ages(length, &back), back);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_device_warmed_by_ages_goes_on_as_one_warmed_by_selections(
        (length, steps) in selections(),
        budget in K as u32..40,
        whole in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let own = words(&steps);
        let (back, later) = (by_ages(length, &own), later(length, seed));
        let hits = goes_on(length, budget, whole, &own, &later);
        prop_assert_eq!(&hits, &goes_on(length, budget, whole, &back, &later));
        prop_assert_eq!(hits, goes_on_naively(&mut warmed(length, budget, whole, &own), &later));
    }
}

#[test]
fn with_fewer_slots_than_a_step_selects_ages_say_too_little_and_that_is_found() {
    // Row 9 is a hit of the second step because the first step selected it. So it keeps its slot, and of the others the
    // highest has the second one. From ages alone the first step selects nothing, and rows 10 and 11 stay.
    let own = words(&[vec![9], vec![9, 10, 11]]);
    let back = by_ages(20, &own);
    assert_eq!(order(20, 2, false, &own), [9, 11]);
    assert_eq!(order(20, 2, false, &back), [10, 11]);
    assert!(!suffice(&own, K, 20, 2).unwrap());
    // The device shows it too: row 9 is a hit in one case, and a miss in the other.
    let later = [vec![9]];
    assert_eq!(goes_on(20, 2, false, &own, &later), [(1, 0)]);
    assert_eq!(goes_on(20, 2, false, &back, &later), [(0, 1)]);
    // With a slot for each row of a step they agree.
    assert!(suffice(&own, K, 20, 3).unwrap());
    assert_eq!(order(20, 3, false, &own), order(20, 3, false, &back));
    // Positions beyond the length load nothing, and take no slots.
    assert!(suffice(&own, K, 11, 2).unwrap());
}

#[test]
fn what_does_not_fit_a_byte_or_a_step_is_refused() {
    let none = vec![-1; K * (STEPS_MAX + 1)];
    assert!(!suffice(&none, K, 10, 10).unwrap());
    let mut ages = [5; 10];
    let place = |error: forebay::Error| {
        assert_eq!(error.kind(), Kind::OutOfRange);
        error.place().to_owned()
    };
    assert_eq!(place(from_selections(&none, K, &mut ages).unwrap_err()), "steps");
    assert_eq!(ages, [5; 10]);
    let whole = "selections that are not whole steps";
    assert_eq!(place(from_selections(&none[..K + 1], K, &mut ages).unwrap_err()), whole);
    assert_eq!(place(suffice(&none[..1], 0, 1, 1).unwrap_err()), whole);
    let mut room = vec![0; K * 2];
    // From another machine: an age of none of two steps, and more positions of one age than a step selects.
    assert_eq!(place(to_selections(&[0, 1, 2], K, &mut room).unwrap_err()), "an age of none of the steps");
    let many = "more positions of one age than a step selects";
    assert_eq!(place(to_selections(&[0; K + 1], K, &mut room).unwrap_err()), many);
    let mut longest = vec![0; K * (STEPS_MAX + 1)];
    assert_eq!(place(to_selections(&[0], K, &mut longest).unwrap_err()), "steps");
    // Each age of the longest warm-up, to its ends.
    let mut steps = vec![-1; K * STEPS_MAX];
    (steps[0], steps[K * STEPS_MAX - 1]) = (3, 4);
    from_selections(&steps, K, &mut ages).unwrap();
    assert_eq!((ages[3], ages[4], ages[5]), (254, 0, NEVER));
    let mut back = vec![0; K * STEPS_MAX];
    to_selections(&ages, K, &mut back).unwrap();
    assert_eq!((back[0], back[K * (STEPS_MAX - 1)]), (3, 4));
    assert_eq!(back.iter().filter(|word| **word != -1).count(), 2);
    // No steps: nothing was selected.
    from_selections(&[], K, &mut ages).unwrap();
    assert_eq!(ages, [NEVER; 10]);
}
