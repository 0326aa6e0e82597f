//! Sequences that outgrow their budgets ask for slots: after a shrink, after a truncation, and more than once.

use super::{Engine, FLIGHT, POOL, config, share};
use forebay::device::Outcome;
use forebay::{Share, ShareBy};

fn by_length() -> Engine {
    Engine::new(config(Share { by: ShareBy::Length, ..share() }))
}

/// The second sequence of two that are equally long stops, and the first one outgrows its half of the slots.
fn grows_alone(e: &mut Engine, steps: usize) {
    assert_eq!(e.budgets(), [POOL / 2; 2]);
    e.lengths.truncate(1);
    e.run(steps);
    let length = e.cache.length(e.lengths[0].0).unwrap().committed;
    assert!(length > POOL / 2 && e.budgets()[0] > length, "{length}: {:?}", e.budgets());
}

#[test]
fn a_sequence_that_shrank_asks_for_slots_again_as_it_grows() {
    let mut e = by_length();
    e.start(300, 700);
    e.step();
    assert_eq!(e.budgets(), [1000 + FLIGHT], "which last to its end");
    e.start(300, 700);
    e.run(3);
    grows_alone(&mut e, 250);
}

#[test]
fn a_sequence_that_was_truncated_asks_for_slots_again_as_it_grows() {
    let mut e = by_length();
    let both = [e.start(800, 800), e.start(800, 800)];
    e.run(3);
    for own in both {
        let ticket = e.cache.truncate(own, 40, e.stream).unwrap();
        e.settle();
        assert_eq!(ticket.poll(), Some(Outcome::Done));
    }
    e.run(2);
    grows_alone(&mut e, 500);
}

#[test]
fn a_sequence_that_asked_in_vain_asks_again() {
    let mut e = by_length();
    for _ in 0..2 {
        e.start(800, 800);
    }
    e.run(3);
    assert_eq!(e.budgets(), [POOL / 2; 2], "which both of them have outgrown");
    // Then the first one becomes so much longer that more of the slots are its share.
    e.lengths.truncate(1);
    e.run(400);
    assert!(e.budgets()[0] > POOL / 2, "{:?}", e.budgets());
}
