//! The miss-ratio curve against the naive list: one replay by the rule's definition for each budget.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "support/oracle.rs"]
#[expect(dead_code, reason = "a curve has no truncation, and no row is warmed up")]
mod oracle;

use forebay::Kind;
use forebay::study::{MissRatioCurve, StackDistances};
use oracle::Oracle;
use proptest::prelude::*;

const PROMPT: u32 = 40;
const TOKENS: u32 = 120;

#[derive(Clone, Debug)]
enum Step {
    Warm(Vec<u32>),
    Decode { accept: u32, rows: u32, positions: Vec<u32> },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let positions = |most| prop::collection::vec(0..TOKENS, 0..most);
    let warm = prop::collection::vec(positions(9).prop_map(Step::Warm), 0..4);
    let decode = (0..=3_u32, 0..=3_u32, positions(14), any::<bool>()).prop_map(
        |(accept, rows, mut positions, sort)| {
            if sort {
                positions.sort_unstable();
                positions.dedup();
            }
            Step::Decode { accept, rows, positions }
        },
    );
    (warm, prop::collection::vec(decode, 1..24)).prop_map(|(mut warm, decode)| {
        warm.extend(decode);
        warm
    })
}

/// Hits and misses at one budget, and the most rows that a step selected.
fn naive(steps: &[Step], budget: u32) -> (u64, u64, u32) {
    replay(&mut Oracle::new(budget as usize, PROMPT), steps)
}

/// As [`naive`], from where the oracle is.
fn replay(oracle: &mut Oracle, steps: &[Step]) -> (u64, u64, u32) {
    let (mut hits, mut misses, mut most) = (0, 0, 1);
    for step in steps {
        let (positions, counts) = match step {
            Step::Warm(positions) => (positions, false),
            Step::Decode { accept, rows, positions } => {
                oracle.commit((*accept).min(oracle.landed), *rows);
                (positions, true)
            }
        };
        let done = oracle.select(positions.iter().copied());
        most = most.max((done.hits.len() + done.misses.len()) as u32);
        if counts {
            hits += done.hits.len() as u64;
            misses += done.misses.len() as u64;
        }
    }
    (hits, misses, most)
}

fn counted(depths: &mut StackDistances, steps: &[Step]) -> MissRatioCurve {
    let mut landed = 0;
    for step in steps {
        match step {
            Step::Warm(positions) => depths.warm(positions),
            Step::Decode { accept, rows, positions } => {
                depths.commit((*accept).min(landed), *rows).unwrap();
                landed = *rows;
                depths.resolve(positions);
            }
        }
    }
    depths.finish(PROMPT).unwrap()
}

fn compare(curve: &MissRatioCurve, steps: &[Step]) {
    let (_, _, most) = naive(steps, TOKENS);
    assert_eq!(curve.exact_from(), most);
    for budget in most..=TOKENS + 2 {
        let (hits, misses, _) = naive(steps, budget);
        assert_eq!((curve.hits(budget), curve.misses(budget)), (hits, misses), "budget {budget}");
    }
    let flat = curve.flat_from();
    assert!(flat >= curve.exact_from(), "flat from {flat}, where nothing is counted");
    assert_eq!(curve.hits(flat), curve.hits(u32::MAX));
    assert!(flat == curve.exact_from() || curve.hits(flat - 1) < curve.hits(flat));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn the_curve_is_the_naive_list_at_every_budget(first in steps(), second in steps()) {
        let mut depths = StackDistances::new(TOKENS, PROMPT).unwrap();
        compare(&counted(&mut depths, &first), &first);
        // The next layer finds no row of the last one.
        compare(&counted(&mut depths, &second), &second);
    }

    /// LRU is a stack: a lane that was large and shrinks has from then on the hits of a lane that was small all along.
    #[test]
    fn a_shrink_leaves_what_the_smaller_budget_would_have_had(
        steps in steps(),
        at in any::<prop::sample::Index>(),
        more in 0..TOKENS,
    ) {
        let (before, after) = steps.split_at(at.index(steps.len()));
        let curve = |steps: &[Step]| counted(&mut StackDistances::new(TOKENS, PROMPT).unwrap(), steps);
        let (first, whole) = (curve(before), curve(&steps));
        for budget in naive(&steps, TOKENS).2..=TOKENS {
            let mut small = Oracle::new(budget as usize, PROMPT);
            replay(&mut small, before);
            let mut lane = Oracle::new((budget + more) as usize, PROMPT);
            prop_assert_eq!(replay(&mut lane, before).0, first.hits(budget + more));
            lane.resize(budget as usize);
            prop_assert_eq!(&lane.order, &small.order);
            prop_assert_eq!(replay(&mut lane, after).0, whole.hits(budget) - first.hits(budget));
        }
    }

    /// What a budget below the last one has lost comes back with misses only.
    #[test]
    fn budgets_that_grow_and_shrink_leave_no_row_that_the_last_budget_would_not_have(
        steps in steps(),
        budgets in prop::collection::vec(0..TOKENS, 28),
    ) {
        let most = naive(&steps, TOKENS).2;
        let mut lane = Oracle::new(TOKENS as usize, PROMPT);
        let mut least = TOKENS;
        for (step, more) in steps.iter().zip(&budgets) {
            lane.resize((most + more) as usize);
            least = least.min(most + more);
            replay(&mut lane, std::slice::from_ref(step));
        }
        for last in most..=TOKENS {
            let (mut lane, mut steady) = (lane.clone(), Oracle::new(last as usize, PROMPT));
            replay(&mut steady, &steps);
            lane.resize(last as usize);
            let rows = lane.order.len();
            prop_assert!(lane.order.iter().all(|position| steady.order.contains(position)));
            prop_assert!(last > least || rows == steady.order.len());
        }
    }
}

#[test]
fn a_log_that_is_packed_many_times_keeps_the_order() {
    // About 19 rows a step, 700 steps: the log of 4096 entries is packed three times, among counted steps.
    let positions =
        |step: u32| (0..PROMPT).filter(move |p| (p * 7 + step).is_multiple_of(3) || p % 5 == step % 5);
    let accept = |step| u32::from(step % 2 == 1 && step < 150);
    let decode = |step| Step::Decode { accept: accept(step), rows: 1, positions: positions(step).collect() };
    let steps: Vec<Step> = (0..700).map(decode).collect();
    compare(&counted(&mut StackDistances::new(TOKENS, PROMPT).unwrap(), &steps), &steps);
    let warm: Vec<Step> = (0..900).map(|step| Step::Warm(positions(step).collect())).chain(steps).collect();
    compare(&counted(&mut StackDistances::new(TOKENS, PROMPT).unwrap(), &warm), &warm);
}

#[test]
fn below_the_rows_of_one_step_the_curve_is_not_exact() {
    // Two slots: 0 is a hit and keeps its slot, 2 takes the other, 1 has none. The newest two are 1 and 2.
    let steps = [
        Step::Decode { accept: 0, rows: 0, positions: vec![0] },
        Step::Decode { accept: 0, rows: 0, positions: vec![0, 1, 2] },
        Step::Decode { accept: 0, rows: 0, positions: vec![1] },
        Step::Decode { accept: 0, rows: 0, positions: vec![0] },
    ];
    let curve = counted(&mut StackDistances::new(TOKENS, PROMPT).unwrap(), &steps);
    assert_eq!(curve.exact_from(), 3);
    assert_ne!(curve.misses(2), naive(&steps, 2).1);
    assert_eq!(curve.misses(3), naive(&steps, 3).1);
}

#[test]
fn rows_born_alone_do_not_raise_the_least_exact_budget() {
    // Three rows are born at a time, one is selected: the curve is exact at one slot already.
    let steps = [
        Step::Decode { accept: 0, rows: 3, positions: vec![5] },
        Step::Decode { accept: 3, rows: 3, positions: vec![PROMPT + 2] },
        Step::Decode { accept: 3, rows: 1, positions: vec![PROMPT + 5] },
        Step::Decode { accept: 1, rows: 1, positions: vec![PROMPT + 5] },
    ];
    let curve = counted(&mut StackDistances::new(TOKENS, PROMPT).unwrap(), &steps);
    assert_eq!((curve.exact_from(), curve.hits(1), curve.hits(2)), (1, 2, 3));
    compare(&curve, &steps);
}

#[test]
fn impossible_rows_are_refused_and_change_nothing() {
    let refused = |result: forebay::Result<()>| assert_eq!(result.unwrap_err().kind(), Kind::OutOfRange);
    assert!(StackDistances::new(4, 5).is_err());
    assert_eq!(StackDistances::new(u32::MAX, 0).unwrap_err().kind(), Kind::OutOfRange);
    let mut depths = StackDistances::new(4, 2).unwrap();
    refused(depths.commit(1, 0));
    refused(depths.commit(0, 3));
    refused(depths.commit(u32::MAX, u32::MAX));
    depths.commit(0, 2).unwrap();
    refused(depths.commit(2, 1));
    refused(depths.commit(3, 0));
    depths.commit(2, 0).unwrap();
    depths.resolve(&[3, 4, u32::MAX, 0]);
    assert!(depths.finish(5).is_err());
    let curve = depths.finish(2).unwrap();
    assert_eq!((curve.hits(1), curve.misses(1), curve.misses(0)), (1, 1, 2));
    // Nothing counted: no budget has a hit.
    let none = depths.finish(2).unwrap();
    assert_eq!((none.hits(9), none.misses(9), none.exact_from(), none.flat_from()), (0, 0, 1, 1));
}
