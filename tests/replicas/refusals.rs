//! Each call of the system refused in turn while a rank takes part in a change, and each mapping of a flip: the ranks
//! have one set, or one of them says which layer it cannot use; no use shows other bytes, and no memory is lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::Faults;
use forebay::weights::{Outcome, Replica};
use forebay::{Kind, Result};

use crate::failing::{Nth, UNAIMED, alone};
use crate::naive::backings;
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, changed, commit, counted, group, no_faults, replica, shared};

/// What there is before, and after.
fn sets() -> [Vec<Replica>; 2] {
    let kept = replica(3, 0, 1);
    [vec![replica(1, 1, 0), kept.clone()], vec![kept, replica(3, 1, 0), replica(4, 1, 1), replica(4, 3, 0)]]
}

/// A change of rank 0, of which the `n`-th call is refused; what the other one has then, and the outcomes.
fn refused(n: u64, counted: &Arc<Faulty>, faults: &Arc<Nth>) -> (Result<Outcome>, bool) {
    let [before, after] = sets();
    let (folder, shared): (_, Arc<dyn Faults>) = (Folder::new(), faults.clone());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
            let mut engine = Engine::new(&device, (1, 2), &folder.0, &no_faults()).unwrap();
            assert_eq!(changed(&mut engine, 1, &sets()[0]), Ok(Outcome::Committed));
            let outcome = changed(&mut engine, 2, &sets()[1]);
            engine.step().unwrap();
            (outcome, engine.ring.pulls().replicas())
        });
        let device: Arc<dyn Device> = counted.clone();
        let mut engine = Engine::new(&device, (0, 2), &folder.0, &shared).unwrap();
        // The granule that is kept is among them from the first change on.
        let start = counted.backings() + 1;
        assert_eq!(changed(&mut engine, 1, &before), Ok(Outcome::Committed));
        faults.aim(n);
        let outcome = changed(&mut engine, 2, &after);
        faults.aim(UNAIMED);
        if outcome.is_err() {
            // Nothing more is said, so that the other one need not wait for its time to be over.
            drop(std::mem::replace(&mut engine.links, alone()));
        }
        engine.ring.abandon().unwrap();
        let shown = engine.step();
        let (theirs, their_set) = other.join().unwrap();
        let taken = their_set == after;
        assert!(taken || their_set == before, "{n}: {their_set:?}");
        assert_eq!(taken, matches!(theirs, Ok(Outcome::Committed)), "{n}: {theirs:?}");
        match (&outcome, &shown) {
            (Ok(Outcome::Committed), _) => assert!(taken && shown.is_ok(), "{n}: {shown:?}"),
            // A layer cannot be used, and says so; or memory was not given back.
            (Err(error), Err(same)) if taken => {
                assert_eq!((error, error.number("layer").is_some()), (same, true), "{n}");
            }
            _ => {
                shown.unwrap();
                assert_eq!(engine.ring.pulls().replicas(), their_set, "{n}: {outcome:?}");
            }
        }
        // After a decision, what is not given back stays with the device.
        if !(taken && outcome.is_err()) {
            let set: BTreeSet<Replica> = their_set.iter().cloned().collect();
            assert_eq!(counted.backings(), start + backings(&engine.plan, &set), "{n}: {outcome:?}");
            engine.ring.drop_replicas().unwrap();
            assert_eq!((counted.backings(), counted.unmapped()), (start, 0), "{n}: {outcome:?}");
        }
        (outcome, taken)
    })
}

#[test]
fn every_refused_call_leaves_one_set_or_an_error_that_says_so() {
    let (mut old, mut broken) = (0, 0);
    for n in 0.. {
        let faults = Arc::new(Nth::unaimed());
        let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), faults.clone()), false);
        let (outcome, taken) = refused(n, &counted, &faults);
        let reached = faults.reached();
        (old, broken) = (old + u32::from(!taken), broken + u32::from(outcome.is_err() && taken));
        if !reached {
            assert_eq!(outcome, Ok(Outcome::Committed));
            break;
        }
    }
    assert!(old > 25 && broken > 4, "{old} old, {broken} broken in a flip");
}

/// Each remap of a flip refused on one rank, in two ways: the layer of that remap is unusable there, with the error,
/// and each other layer goes on, on all ranks.
#[test]
fn a_flip_that_is_refused_half_way_says_so() {
    for kind in [Kind::OsRefused, Kind::DeviceFailed] {
        for refused in 0..20 {
            let over = AtomicU32::new(0);
            group(&counted(2), |engine, faulty| {
                let [before, after] = sets();
                assert_eq!(changed(engine, 1, &before), Ok(Outcome::Committed));
                let mut change = shared(engine, 2, &after).unwrap();
                if engine.own() == 0 {
                    faulty.remaps(&[vec![None; refused], vec![Some(kind)]].concat());
                }
                let result = commit(engine, &mut change);
                over.fetch_add(u32::from(faulty.remaps_left() > 0), Ordering::Relaxed);
                faulty.remaps(&[]);
                assert_eq!(engine.ring.pulls().replicas(), after);
                let mut broken = 0;
                for layer in engine.layers() {
                    match engine.ring.pulls().layer(layer) {
                        Ok(_) => {
                            engine.ring.pulls().pull(layer, engine.stream()).unwrap();
                            engine.rank.wait().unwrap();
                            assert!(engine.shows(layer), "layer {layer}");
                        }
                        Err(error) => {
                            assert_eq!((error.kind(), engine.own()), (kind, 0));
                            assert_eq!(error.number("layer"), Some(layer as u64));
                            assert_eq!(result, Err(error.clone()));
                            assert_eq!(engine.ring.begin(1, 0), Err(error));
                            broken += 1;
                        }
                    }
                }
                assert_eq!(broken, usize::from(result.is_err()), "{result:?}");
            });
            if over.load(Ordering::Relaxed) > 0 {
                assert!(refused >= 2, "{refused}");
                break;
            }
        }
    }
}

/// What is mapped without others is refused too: the replicas of that layer stay, with the right bytes, and the next
/// call drops them.
#[test]
fn replicas_that_cannot_be_dropped_stay_until_they_can() {
    group(&counted(2), |engine, faulty| {
        let [before, _] = sets();
        let held = faulty.backings() + 1;
        assert_eq!(changed(engine, 1, &before), Ok(Outcome::Committed));
        faulty.remaps(&[Some(Kind::OsRefused)]);
        let first = engine.ring.drop_replicas();
        // One of the two layers has a replica of a part that this rank reads.
        assert_eq!(first.unwrap_err().kind(), Kind::OsRefused);
        assert_eq!(engine.ring.pulls().replicas().len(), 1);
        (0..2).for_each(|_| engine.step().unwrap());
        engine.ring.drop_replicas().unwrap();
        assert_eq!((engine.ring.pulls().replicas(), faulty.backings()), (vec![], held));
        (0..2).for_each(|_| engine.step().unwrap());
        let stream = engine.stream();
        let mut change = engine.ring.replicate(2, &before, u64::MAX).unwrap();
        while change.advance(u64::MAX, stream).unwrap() > 0 {}
        change.share(&mut engine.links, stream, PATIENCE).unwrap();
        assert_eq!(commit(engine, &mut change), Ok(Outcome::Committed));
    });
}
