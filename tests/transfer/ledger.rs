//! Runs that come in any order, twice, and cut in another way: a layer is ready when every row is there, not before.

use std::collections::BTreeSet;

use forebay::Kind;
use forebay::transfer::{Ledger, Of, Plan, Request, Run, Side};
use proptest::prelude::*;

use crate::map::runs_of;
use crate::random::{Case, Layout, case, side};
use forebay::transfer::Split;

/// A row of a layer: component, head, token.
type Row = (u32, u32, u32, u32);

fn rows(run: &Run) -> impl Iterator<Item = Row> {
    let Run { layer, component, token, tokens, head, heads, .. } = *run;
    (head..head + heads)
        .flat_map(move |head| (token..token + tokens).map(move |token| (layer, component, head, token)))
}

/// All rows that a rank gets.
fn wanted(side: &Side, stage: u32, tokens: std::ops::Range<u32>) -> BTreeSet<Row> {
    let mut rows = BTreeSet::new();
    for of in &side.stages[stage as usize].layers {
        for place in &of.places {
            let heads = (side.components[place.component as usize].heads / side.width).max(1);
            let heads = (0..heads).flat_map(|head| tokens.clone().map(move |token| (head, token)));
            rows.extend(heads.map(|(head, token)| (of.layer, place.component, head, token)));
        }
    }
    rows
}

fn check(ledger: &Ledger, plan: &Plan, missing: &BTreeSet<Row>) -> Result<(), TestCaseError> {
    prop_assert_eq!(ledger.is_whole(), missing.is_empty());
    for layer in plan.layers() {
        let of_layer: BTreeSet<u32> = missing.iter().filter(|row| row.0 == layer).map(|row| row.3).collect();
        prop_assert_eq!(ledger.is_ready(layer), of_layer.is_empty());
        let mut told = Vec::new();
        ledger.missing(layer, |range| told.push(range));
        prop_assert!(told.windows(2).all(|pair| pair[0].end < pair[1].start));
        prop_assert_eq!(told.into_iter().flatten().collect::<BTreeSet<_>>(), of_layer);
    }
    Ok(())
}

fn live(case: &Case, order: &[u16]) -> Result<(), TestCaseError> {
    let [source, target] = case.sides();
    let plan = Plan::new(&source, &target).unwrap();
    let chunks = case.chunks(&source);
    let request = Request { tokens: case.count, replicas: case.replicas, chunks: &chunks };
    let tokens = case.from..case.count;
    for (stage, lane) in (0..target.stages.len() as u32).map(|stage| (stage, (stage + 1) % target.width)) {
        let mut ledger = Ledger::new(&plan, (stage, lane), tokens.clone()).unwrap();
        let mut missing = wanted(&target, stage, tokens.clone());
        // The runs, and the same rows cut at another place.
        let mut runs = Vec::new();
        for layer in plan.layers() {
            for range in [tokens.clone(), case.from..case.cut, case.cut..case.count] {
                runs.extend(runs_of(&plan, &request, (layer, range), Of::Receiver(stage, lane)).unwrap());
            }
        }
        for at in order {
            if runs.is_empty() {
                break;
            }
            let run = runs[usize::from(*at) % runs.len()];
            let fresh = rows(&run).filter(|row| missing.remove(row)).count();
            prop_assert_eq!(ledger.note(&run), Ok(fresh as u64));
            check(&ledger, &plan, &missing)?;
        }
        for run in &runs {
            ledger.note(run).unwrap();
            missing.retain(|row| !rows(run).any(|own| own == *row));
        }
        prop_assert!(missing.is_empty(), "{missing:?}");
        check(&ledger, &plan, &missing)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]
    #[test]
    fn a_layer_is_ready_when_every_row_is_there(
        case in case(),
        order in prop::collection::vec(any::<u16>(), 0..20),
    ) {
        live(&case, &order)?;
    }
}

/// Completion by a count of runs, or of bytes, is early when one comes twice.
#[test]
fn control_counts_call_a_layer_ready_that_is_not() {
    let tokens = vec![("k".to_owned(), 2, 8)];
    let one = side(&tokens, &[vec![(0, vec![0])]], (1, Split::Heads, 1, 16), (Layout::Rows, 0, false));
    let plan = Plan::new(&one, &one).unwrap();
    let request = Request { tokens: 40, replicas: [0, 0], chunks: &[] };
    let runs = runs_of(&plan, &request, (0, 0..40), Of::Receiver(0, 0)).unwrap();
    assert_eq!(runs.iter().map(|run| run.tokens).collect::<Vec<_>>(), [16, 16, 8]);
    let mut ledger = Ledger::new(&plan, (0, 0), 0..40).unwrap();
    let mut bytes = 0;
    for run in [&runs[0], &runs[2], &runs[0]] {
        bytes += run.bytes * u64::from(run.pieces);
        ledger.note(run).unwrap();
    }
    assert_eq!(bytes, plan.bytes(40), "three runs, and as many bytes as the request has");
    assert!(!ledger.is_ready(0) && !ledger.is_whole());
    let mut missing = Vec::new();
    ledger.missing(0, |range| missing.push(range));
    assert_eq!(missing, vec![16_u32..32]);
    ledger.note(&runs[1]).unwrap();
    assert!(ledger.is_ready(0) && ledger.is_whole());
    // Of nothing, nothing arrives.
    assert_eq!(ledger.note(&Run { tokens: 0, token: 5, ..runs[0] }), Ok(0));
    // Rows that this rank does not get.
    let wrong: [fn(&mut Run); 8] = [
        |run| run.to.lane = 1,
        |run| run.to.stage = 1,
        |run| run.layer = 1,
        |run| run.component = 1,
        |run| run.token = 33,
        |run| run.tokens = u32::MAX,
        |run| run.head = 1,
        |run| run.heads = u32::MAX,
    ];
    let mut later = Ledger::new(&plan, (0, 0), 8..40).unwrap();
    for change in wrong {
        let mut run = runs[2];
        change(&mut run);
        assert_eq!(later.note(&run).unwrap_err().kind(), Kind::OutOfRange);
    }
    assert_eq!(later.note(&runs[0]).unwrap_err().kind(), Kind::OutOfRange, "tokens that are not sent");
    let backward = std::ops::Range { start: 8, end: 0 };
    for (rank, tokens) in [((0, 1), 0..40), ((1, 0), 0..40), ((0, 0), backward)] {
        assert_eq!(Ledger::new(&plan, rank, tokens).unwrap_err().kind(), Kind::OutOfRange, "{rank:?}");
    }
}

/// Runs of more tokens than a word of bits has, which begin and end inside words.
#[test]
fn long_runs_set_every_word_between_their_ends() {
    let tokens = vec![("k".to_owned(), 1, 1)];
    let one = side(&tokens, &[vec![(3, vec![0])]], (1, Split::Heads, 1, 1000), (Layout::Rows, 0, false));
    let plan = Plan::new(&one, &one).unwrap();
    let request = Request { tokens: 1000, replicas: [0, 0], chunks: &[] };
    let run = |tokens| runs_of(&plan, &request, (3, tokens), Of::All).unwrap()[0];
    let mut ledger = Ledger::new(&plan, (0, 0), 10..1000).unwrap();
    for (tokens, fresh) in [(20..300, 280), (10..20, 10), (290..980, 680), (64..128, 0), (999..1000, 1)] {
        assert_eq!(ledger.note(&run(tokens.clone())), Ok(fresh), "{tokens:?}");
    }
    let mut missing = Vec::new();
    ledger.missing(3, |range| missing.push(range));
    assert_eq!(missing, vec![980_u32..999]);
    assert_eq!(ledger.note(&run(500..1000)), Ok(19));
    assert!(ledger.is_whole());
}
