//! Ranks that decide, in any order of their calls, each of which may end at any of them: all that go on have one
//! outcome, and it is that of a naive reading of the log. The loom models of the same code are in `tests/loom.rs`.

use std::cell::Cell;

use proptest::prelude::*;

use super::decision::{Ballot, Decision, Look, Words, words};

struct Cells(Vec<Cell<u64>>);

impl Words for Cells {
    fn load(&self, word: usize) -> u64 {
        self.0[word].get()
    }

    fn store(&self, word: usize, value: u64) {
        self.0[word].set(value);
    }

    fn exchange(&self, word: usize, from: u64, to: u64) -> u64 {
        let was = self.0[word].get();
        self.0[word].set(if was == from { to } else { was });
        was
    }
}

fn ballot(ranks: u32) -> Ballot<Cells> {
    Ballot::new(Cells((0..words(ranks)).map(|_| Cell::new(0)).collect()), ranks)
}

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Ready,
    Look,
    GivesUp,
    Ends,
}

/// The decision by the log alone: the first call that finds a reason decides.
fn read(log: &[(u32, Act)], ranks: u32, steps: &[u64]) -> Option<Decision> {
    let ready = |log: &[(u32, Act)], rank| log.contains(&(rank, Act::Ready));
    log.iter().enumerate().find_map(|(at, (rank, act))| match act {
        Act::GivesUp => Some(Decision::Aborted),
        Act::Look if ready(&log[..at], *rank) => {
            let all = (0..ranks).all(|other| ready(&log[..at], other));
            let same = steps.iter().all(|step| step == &steps[0]);
            (all && same).then_some(Decision::Committed)
        }
        _ => None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    #[test]
    fn all_that_go_on_have_the_outcome_of_the_log(
        ranks in 1..5_u32,
        turns in prop::collection::vec((0..5_u32, 0..12_u32), 1..60),
        apart in prop::bool::weighted(0.1),
    ) {
        let ballot = ballot(ranks);
        let steps: Vec<u64> = (0..ranks).map(|rank| 7 + u64::from(apart && rank == 1)).collect();
        // By rank: whether it is ready, what it knows, and whether it has ended.
        let mut states = vec![(false, None, false); ranks as usize];
        let mut log = Vec::new();
        for (rank, die) in turns.into_iter().filter(|(rank, _)| *rank < ranks) {
            let (is_ready, knows, ended) = &mut states[rank as usize];
            if *ended || knows.is_some() {
                continue;
            }
            let act = match die {
                0 => Act::Ends,
                1 => Act::GivesUp,
                _ if !*is_ready => Act::Ready,
                _ => Act::Look,
            };
            let step = steps[rank as usize];
            let found = match act {
                Act::Ends => {
                    *ended = true;
                    continue;
                }
                Act::Ready => {
                    ballot.ready(rank, step);
                    *is_ready = true;
                    None
                }
                Act::Look => Some(ballot.look(step)),
                Act::GivesUp => Some(ballot.abort()),
            };
            log.push((rank, act));
            let expected = read(&log, ranks, &steps);
            match found {
                Some(Look::Decided(decision)) => {
                    prop_assert_eq!(expected, Some(decision), "{:?}", &log);
                    *knows = Some(decision);
                }
                Some(Look::Differs(other, step)) => {
                    prop_assert!(apart && steps[other as usize] == step && expected.is_none());
                }
                Some(Look::Waits(other)) => {
                    prop_assert!(expected.is_none() && !log.contains(&(other, Act::Ready)));
                }
                Some(Look::Strange(value)) => prop_assert!(false, "{value}"),
                None => {}
            }
        }
        // Those that live and do not know yet give up, and learn the same.
        let mut known: Vec<Decision> = states.iter().filter_map(|(_, knows, _)| *knows).collect();
        for _ in states.iter().filter(|(_, knows, ended)| knows.is_none() && !ended) {
            match ballot.abort() {
                Look::Decided(decision) => known.push(decision),
                other => prop_assert!(false, "{other:?}"),
            }
        }
        prop_assert!(known.windows(2).all(|two| two[0] == two[1]), "{:?}", known);
    }
}

#[test]
fn a_value_that_no_rank_writes_is_found() {
    let ballot = ballot(2);
    ballot.memory().store(0, 3);
    ballot.ready(0, 1);
    assert_eq!((ballot.look(1), ballot.abort()), (Look::Strange(3), Look::Strange(3)));
    // Every other bit of the two decisions is as strange.
    for decided in [Decision::Committed, Decision::Aborted] {
        let other = self::ballot(1);
        other.ready(0, 1);
        let found = if decided == Decision::Committed { other.look(1) } else { other.abort() };
        assert_eq!(found, Look::Decided(decided));
        let value = other.memory().load(0);
        for bit in 0..64 {
            other.memory().store(0, value ^ 1 << bit);
            assert_eq!(other.look(1), Look::Strange(value ^ 1 << bit));
        }
    }
}
