//! The decision of an update of weights (`src/weights/update/decision.rs`), in every interleaving of up to three
//! preemptions: ranks that look, give up and end agree, and one that finds the update committed finds what the others
//! did before. The test includes that source file directly, over loom's words.
//!
//! Each model has a control with a planted fault, which loom must find.
#![cfg(loom)]
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../src/weights/update/decision.rs"]
mod decision;

use std::panic::{AssertUnwindSafe, catch_unwind};

use decision::{Ballot, Decision, Look, Words, words};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::thread;

fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

fn assert_found(run: impl Fn() + Send + Sync + 'static) {
    assert!(catch_unwind(AssertUnwindSafe(|| model(run))).is_err(), "the planted mistake was not found");
}

/// Words with the orders of the real ones, or with a planted fault.
struct Shared {
    words: Vec<AtomicU64>,
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// An exchange looks first and writes then.
    TwoSteps,
    /// Nothing acquires or releases.
    Relaxed,
}

impl Words for Shared {
    fn load(&self, word: usize) -> u64 {
        let order = if self.fault == Fault::Relaxed { Ordering::Relaxed } else { Ordering::Acquire };
        self.words[word].load(order)
    }

    fn store(&self, word: usize, value: u64) {
        let order = if self.fault == Fault::Relaxed { Ordering::Relaxed } else { Ordering::Release };
        self.words[word].store(value, order);
    }

    fn exchange(&self, word: usize, from: u64, to: u64) -> u64 {
        let word = &self.words[word];
        match self.fault {
            Fault::None => word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire),
            Fault::Relaxed => word.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed),
            Fault::TwoSteps => {
                let was = word.load(Ordering::Acquire);
                if was == from {
                    word.store(to, Ordering::Release);
                }
                Ok(was)
            }
        }
        .unwrap_or_else(|was| was)
    }
}

/// The ranks' decision, and what each of them did before it was ready.
struct Group {
    ballot: Ballot<Shared>,
    done: Vec<AtomicU32>,
}

fn group(ranks: u32, fault: Fault) -> Arc<Group> {
    let words = (0..words(ranks)).map(|_| AtomicU64::new(0)).collect();
    let done = (0..ranks).map(|_| AtomicU32::new(0)).collect();
    Arc::new(Group { ballot: Ballot::new(Shared { words, fault }, ranks), done })
}

impl Group {
    fn ready(&self, rank: u32) {
        // Relaxed, as bytes are: only the ballot orders them.
        self.done[rank as usize].store(1, Ordering::Relaxed);
        self.ballot.ready(rank, 5);
    }

    /// A rank that looks once and then gives up.
    fn decides(&self, rank: u32) -> Decision {
        self.ready(rank);
        let decision = match self.ballot.look(5) {
            Look::Decided(decision) => decision,
            _ => match self.ballot.abort() {
                Look::Decided(decision) => decision,
                other => panic!("{other:?}"),
            },
        };
        if decision == Decision::Committed {
            assert!(self.done.iter().all(|done| done.load(Ordering::Relaxed) == 1), "not all were ready");
        }
        decision
    }
}

fn two_ranks(fault: Fault) {
    let group = group(2, fault);
    let other = Arc::clone(&group);
    let rank = thread::spawn(move || other.decides(1));
    let own = group.decides(0);
    assert_eq!(rank.join().unwrap(), own);
    assert!(group.ballot.memory().load(0) != 0, "nothing was decided");
}

/// Rank 2 ends at some point: before it is ready, when it is, or when it has decided.
fn one_that_ends(at: u32) {
    let group = group(3, Fault::None);
    let (first, last) = (Arc::clone(&group), Arc::clone(&group));
    let ranks = [
        thread::spawn(move || Some(first.decides(1))),
        thread::spawn(move || {
            match at {
                0 => {}
                1 => last.ready(2),
                _ => drop(last.decides(2)),
            }
            None
        }),
    ];
    let own = group.decides(0);
    let [other, _] = ranks.map(|rank| rank.join().unwrap());
    assert_eq!(other, Some(own));
    assert!(at > 0 || own == Decision::Aborted);
}

#[test]
fn two_ranks_agree_and_see_what_each_did() {
    model(|| two_ranks(Fault::None));
}

#[test]
fn two_ranks_agree_beside_one_that_ends() {
    for at in 0..3 {
        model(move || one_that_ends(at));
    }
}

#[test]
fn control_a_decision_in_two_steps_leaves_two_opinions() {
    assert_found(|| two_ranks(Fault::TwoSteps));
}

#[test]
fn control_words_without_order_show_ranks_that_are_not_ready() {
    assert_found(|| two_ranks(Fault::Relaxed));
}
