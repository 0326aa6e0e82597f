//! A device that refuses a call: each call of an arrival's life in a run of its own. The caller tries again, or ends
//! the sequence, and everything comes back.

use std::collections::BTreeSet;

use crate::rig::{KEYED, LAYERS, Own, Rig, asks, config};
use forebay::{Layer, Result, WarmUp};

/// A call; if it is refused and `again`, made again on the other stream. None if it was refused for good.
fn retry<T>(rig: &mut Rig, again: bool, call: impl Fn(&mut Rig, bool) -> Result<T>) -> Option<T> {
    match call(rig, false) {
        Ok(done) => Some(done),
        Err(_) if again => Some(call(rig, true).unwrap()),
        Err(_) => None,
    }
}

/// The life of an arrival, up to the call that ends it. None if a call was refused for good.
fn life(rig: &mut Rig, tries_again: bool, own: &Own) -> Option<()> {
    for layer in 0..LAYERS {
        rig.write_rows(own, layer, 0..40);
        rig.cache.append_layer_in_place(own.handle, Layer(layer), 40).unwrap();
    }
    for layer in KEYED {
        for (first, count) in [(0, 25), (25, 15)] {
            let _ticket = retry(rig, tries_again, |rig, again| {
                let stream = if again { rig.main } else { rig.side };
                rig.place(own, layer, first, count, stream)
            })?;
        }
    }
    let _ticket = retry(rig, tries_again, |rig, again| {
        let stream = if again { rig.side } else { rig.main };
        // The join may have got as far as the gather.
        let waits = rig.cache.join_more(own.handle, stream);
        if again && waits.is_ok() {
            return waits;
        }
        rig.cache.join(own.handle, stream, WarmUp::default())
    })?;
    Some(())
}

/// One run, in which the call after `passing` others is refused. The receiver tries again or ends the sequence, and it
/// ends it by an abort or a close. Returns the refused call's name, if the run came that far.
fn run(tries_again: bool, aborts: bool, passing: Option<u64>) -> Option<&'static str> {
    let mut rig = Rig::new(config());
    let start = rig.cache.stats();
    let own = rig.arrive(1, 40, 10);
    rig.faulty.aim(passing);
    let lived = life(&mut rig, tries_again, &own);
    let mut refused = rig.faulty.aim(None);
    if lived.is_some() {
        // It is whole, whatever was refused.
        rig.step(&own, 40, 0, &[0, 24, 25, 39]);
        rig.check(&own, 41);
        if refused.is_none() {
            // The calls that end it are refused too.
            rig.faulty.aim(passing.map(|passing| passing % 12));
        }
    }
    let withheld = match aborts {
        true => rig.cache.abort(own.handle, rig.side).or_else(|_| rig.cache.abort(own.handle, rig.main)).ok(),
        false => {
            if rig.cache.close(own.handle, rig.side).is_err() {
                // It is closed, or as before.
                let _ = rig.cache.close(own.handle, rig.side);
            }
            None
        }
    };
    refused = refused.or(rig.faulty.aim(None));
    rig.cache.validate().unwrap();
    rig.sync();
    rig.cache.reap(rig.main).unwrap();
    if let Some(withheld) = withheld {
        assert_eq!(rig.cache.stats().withheld_pages, 4);
        rig.cache.release(withheld).unwrap();
    }
    rig.check_free(&start);
    refused
}

#[test]
fn a_refused_call_of_the_device_leaves_an_arrival_to_be_tried_again_or_ended() {
    for tries_again in [false, true] {
        for aborts in [false, true] {
            let mut names = BTreeSet::new();
            for passing in 0..40 {
                names.extend(run(tries_again, aborts, Some(passing)));
            }
            let all = ["complete", "copy", "enqueue", "record", "wait"];
            assert_eq!(names.into_iter().collect::<Vec<_>>(), all, "{tries_again}, {aborts}");
            assert_eq!(run(tries_again, aborts, None), None);
        }
    }
}

#[test]
fn an_abort_of_a_complete_prompt_that_the_device_refuses_changes_nothing() {
    let mut names = Vec::new();
    for passing in 0..8 {
        let mut rig = Rig::new(config());
        let start = rig.cache.stats();
        let own = Own { handle: rig.cache.arrive(&asks(40, 0)).unwrap(), tag: 1 };
        rig.fill(&own, 0..40);
        let before = rig.cache.stats();
        rig.faulty.aim(Some(passing));
        let aborted = rig.cache.abort(own.handle, rig.main);
        let refused = rig.faulty.aim(None);
        if aborted.is_err() {
            names.extend(refused);
            assert_eq!(rig.cache.stats(), before);
            assert!(rig.cache.is_arriving(own.handle).unwrap());
            let _ticket = rig.cache.join(own.handle, rig.main, WarmUp::default()).unwrap();
            rig.step(&own, 40, 0, &[0, 39]);
        }
        let withheld = aborted.unwrap_or_else(|_| rig.cache.abort(own.handle, rig.main).unwrap());
        rig.cache.release(withheld).unwrap();
        rig.check_free(&start);
    }
    // The wait for the sequence's copies, and a ticket and an event behind them.
    assert_eq!(names, ["wait", "complete", "record"]);
}
