//! Updates in one process, on host devices that count what they hold: committed, aborted and begun again, of all layers
//! and of some, within a bound of memory; and what is refused.

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use forebay::Kind;
use forebay::device::Device;
use forebay::peer::Event;
use forebay::weights::{Border, Group, Outcome, Plan, Pulls, Sharding, Source, Update};

use crate::failing::alone;
use crate::windows::{PATIENCE, Rank, layers, sharding};
use crate::{Engine, Faulty, counted, grain, group, model, no_faults};

/// Bytes of device memory that an update of these layers takes, after the first one.
fn needs(engine: &Engine, layers: &[usize]) -> u64 {
    let pages = layers.iter().map(|layer| engine.plan.part(*layer, engine.own()).unwrap());
    pages.map(|pages| (pages.end - pages.start) * grain()).sum()
}

/// Three updates one after another, with a layer that becomes resident and sharded again in between, and a step after
/// each call: every byte of every use is of the version that the rank has. Memory is what it was.
#[test]
fn every_rank_takes_each_version_and_gives_the_old_memory_back() {
    for ranks in 1..5 {
        group(&counted(ranks), |engine, faulty| {
            let all = engine.layers();
            engine.step().unwrap();
            let start = faulty.backings();
            for version in [1, 2, 9] {
                if version == 2 {
                    engine.ring.make_resident(1, engine.stream()).unwrap();
                }
                // A resident layer may leave a buffer that no other uses.
                let before = (faulty.backings(), faulty.unmapped());
                assert_eq!(engine.updates(version, &all), Ok(Outcome::Committed));
                // The granule of parked addresses stays.
                let after = (before.0 + usize::from(version == 1), before.1);
                assert_eq!((faulty.backings(), faulty.unmapped()), after);
                if version == 2 {
                    engine.ring.make_sharded(1).unwrap();
                    engine.step().unwrap();
                }
            }
            assert_eq!(faulty.backings(), start + 1);
        });
    }
}

/// Layers of different versions: those that the update names change, and the others do not.
#[test]
fn some_layers_are_updated_within_less_memory() {
    group(&counted(3), |engine, faulty| {
        let all = engine.layers();
        // The first one takes a granule more.
        let needed = needs(engine, &all) + grain();
        let before = (faulty.backings(), faulty.ranges());
        let error = engine.ring.update(1, &all, needed - 1).unwrap_err();
        assert_eq!((error.kind(), error.number("needed")), (Kind::OutOfMemory, Some(needed)));
        assert_eq!(error.number("allowed"), Some(needed - 1));
        assert_eq!((faulty.backings(), faulty.ranges()), before);
        drop(engine.ring.update(1, &all, needed).unwrap());
        // A layer that this rank owns no page of costs it nothing.
        for (version, some) in [(2, vec![2]), (4, vec![3, 0]), (6, vec![4, 1, 2])] {
            let needed = needs(engine, &some);
            if needed > 0 {
                let error = engine.ring.update(version, &some, needed - 1).unwrap_err();
                assert_eq!(error.kind(), Kind::OutOfMemory);
            }
            drop(engine.ring.update(version, &some, needed).unwrap());
            assert_eq!(engine.updates(version + 1, &some), Ok(Outcome::Committed));
        }
        assert_eq!(engine.versions, [5, 7, 7, 5, 7]);
        assert_eq!(engine.updates(8, &all), Ok(Outcome::Committed));
    });
}

/// One rank comes late, not at all, or to another border: no rank takes the version, and the next try succeeds.
#[test]
fn an_update_that_one_rank_does_not_take_is_taken_by_none() {
    let (met, devices) = (Barrier::new(3), counted(3));
    group(&devices, |engine, faulty| {
        let (all, own) = (engine.layers(), engine.own());
        engine.step().unwrap();
        let before = faulty.backings();
        for case in 0..3 {
            let mut update = engine.filled(1 + case, &all).unwrap();
            engine.share(&mut update).unwrap();
            let late = own == 1;
            let outcome = match case {
                // It is late: the others wait for so long, and it learns of it.
                0 if late => {
                    met.wait();
                    engine.commit(&mut update, &all, engine.border())
                }
                0 => {
                    let border = Border { at_most: Duration::from_millis(50), ..engine.border() };
                    let outcome = engine.commit(&mut update, &all, border);
                    met.wait();
                    outcome
                }
                // It drops the update.
                1 if late => {
                    drop(update);
                    Ok(Outcome::Aborted(forebay::Error::new(Kind::Cancelled, "test")))
                }
                // It has made another step.
                2 if late => {
                    let border = Border { step: engine.step + 1, ..engine.border() };
                    engine.commit(&mut update, &all, border)
                }
                _ => engine.commit(&mut update, &all, engine.border()),
            };
            let Ok(Outcome::Aborted(why)) = outcome else { panic!("{outcome:?}") };
            let kinds: &[Kind] = match case {
                0 if late => &[Kind::Cancelled],
                // Of two that wait one aborts first.
                0 => &[Kind::TimedOut, Kind::Cancelled],
                1 => &[Kind::Cancelled],
                _ => &[Kind::InvalidState, Kind::Cancelled],
            };
            assert!(kinds.contains(&why.kind()), "case {case}, rank {own}: {why}");
            if matches!(why.kind(), Kind::TimedOut) {
                assert_eq!(why.number("rank"), Some(1));
            }
            assert_eq!((faulty.backings(), faulty.unmapped()), (before + 1, 0));
            engine.step().unwrap();
            met.wait();
        }
        assert_eq!(engine.updates(4, &all), Ok(Outcome::Committed));
    });
}

/// A session that fails while a rank waits aborts the update at once, with the rank.
#[test]
fn a_rank_that_is_lost_aborts_the_update() {
    let shared = Barrier::new(3);
    group(&counted(3), |engine, _| {
        let all = engine.layers();
        let mut update = engine.filled(1, &all).unwrap();
        engine.share(&mut update).unwrap();
        shared.wait();
        if engine.own() == 2 {
            // It ends without an end: its sessions close.
            let other = Rank::new(&engine.rank.device, crate::plan(0, 1), Pulls::default(), &no_faults());
            let mut other = other.unwrap();
            other.fill().unwrap();
            let hello = other.windows.hello([0; 32], other.stream).unwrap();
            let alone = forebay::peer::Links::over(vec![], hello, crate::windows::patient(), no_faults());
            engine.links = alone.unwrap();
            return;
        }
        let Ok(Outcome::Aborted(why)) = engine.commit(&mut update, &all, engine.border()) else { panic!() };
        match why.kind() {
            Kind::PeerLost => assert_eq!(why.number("rank"), Some(2)),
            other => assert_eq!(other, Kind::Cancelled),
        }
        engine.step().unwrap();
        // With a rank that was lost no update is shared.
        let mut update = engine.filled(2, &all).unwrap();
        while engine.links.lost().next().is_none() {
            let _ = engine.links.event(PATIENCE);
        }
        let error = engine.share(&mut update).unwrap_err();
        assert_eq!(error.number("rank"), Some(2), "{error}");
        assert_eq!(update.verify(engine.stream()).unwrap_err().kind(), Kind::InvalidState);
    });
}

/// A rank that is still filling gets what a faster one says, and keeps it.
#[test]
fn what_a_faster_rank_says_is_kept() {
    group(&counted(2), |engine, _| {
        let all = engine.layers();
        let mut update = engine.filled(1, &all).unwrap();
        if engine.own() == 1 {
            let (rank, event) = engine.links.event(PATIENCE).unwrap().unwrap();
            assert!(rank == 0 && Update::concerns(&event) && !Update::concerns(&Event::Ended), "{event:?}");
            engine.links.set_aside(rank, event).unwrap();
            // Something else, which reaches the other rank while it waits for parts.
            engine.links.send(0, b"other", None).unwrap();
        }
        engine.share(&mut update).unwrap();
        engine.step().unwrap();
        if engine.own() == 0 {
            let (rank, event) = engine.links.event(PATIENCE).unwrap().unwrap();
            assert!(rank == 1 && !Update::concerns(&event), "{event:?}");
            assert!(matches!(event, Event::Message { bytes, .. } if bytes == b"other"));
        }
        assert_eq!(engine.commit(&mut update, &all, engine.border()), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}

#[test]
fn what_cannot_be_updated_is_refused_and_nothing_changes() {
    group(&counted(2), |engine, faulty: &Arc<Faulty>| {
        let before = faulty.backings();
        for (version, some, kind) in [
            (0, vec![1], Kind::OutOfRange),
            (1, vec![5], Kind::OutOfRange),
            (1, vec![], Kind::InvalidConfig),
            (1, vec![1, 2, 1], Kind::InvalidConfig),
        ] {
            assert_eq!(engine.ring.update(version, &some, u64::MAX).unwrap_err().kind(), kind);
        }
        assert_eq!(faulty.backings(), before);
        let mut update = engine.ring.update(1, &[1, 2], u64::MAX).unwrap();
        assert_eq!(engine.ring.update(1, &[3], u64::MAX).unwrap_err().kind(), Kind::Busy);
        // Before it is filled, and shared.
        let kind = |result: forebay::Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(engine.share(&mut update)), Kind::InvalidState);
        let border = engine.border();
        let commit = |engine: &mut Engine, update: &mut Update| {
            engine.ring.commit(update, &mut engine.links, border).map(drop)
        };
        assert_eq!(kind(commit(engine, &mut update)), Kind::InvalidState);
        assert_eq!(kind(update.verify(engine.stream())), Kind::InvalidState);
        let from = engine.rank.holds(&[0; 64]);
        assert_eq!(kind(update.fill(0, "model.layers.0.weight.0", from, engine.stream())), Kind::OutOfRange);
        assert_eq!(kind(update.fill(1, "model.layers.1.weight.0", from, engine.stream())), Kind::OutOfRange);
        engine.fill(&mut update, &[1, 2]).unwrap();
        engine.share(&mut update).unwrap();
        assert_eq!(kind(engine.share(&mut update)), Kind::InvalidState);
        assert_eq!(
            kind(update.fill(1, "model.layers.1.weight.0", from, engine.stream())),
            Kind::InvalidState
        );
        // Other sessions know nothing of a rank that was lost in these.
        assert_eq!(
            engine.ring.commit(&mut update, &mut alone(), border).unwrap_err().kind(),
            Kind::InvalidState
        );
        // In an open step it is refused, and goes on when the step has ended.
        engine.ring.begin(1, 0).unwrap();
        assert_eq!(kind(commit(engine, &mut update)), Kind::Busy);
        engine.ring.abandon().unwrap();
        assert_eq!(engine.commit(&mut update, &[1, 2], engine.border()), Ok(Outcome::Committed));
        assert_eq!(kind(commit(engine, &mut update)), Kind::InvalidState);
        engine.step().unwrap();
        // A version that was begun before.
        assert_eq!(engine.ring.update(1, &[1], u64::MAX).unwrap_err().kind(), Kind::OutOfRange);
        // Versions and layers that two ranks do not agree on: the one that is behind knows, and the other one waits, or
        // learns that the first has begun the next one.
        let mut update = engine.filled(2 + engine.own(), &[1, 2]).unwrap();
        let limit = Duration::from_millis(300);
        let stream = engine.stream();
        let found = kind(update.share(&mut engine.links, stream, limit));
        assert!(found == Kind::InvalidConfig || engine.own() == 1 && found == Kind::TimedOut, "{found:?}");
        drop(update);
        let mut update = engine.filled(4, &[1 + engine.own() as usize]).unwrap();
        let found = kind(engine.share(&mut update));
        assert!(matches!(found, Kind::InvalidConfig | Kind::Cancelled), "{found:?}");
        drop(update);
        // Whatever was said then is dropped by the next one.
        assert_eq!(engine.updates(5, &engine.layers()), Ok(Outcome::Committed));
    });
    // Windows that were not shared, and weights from the host.
    for (source, kind) in [(Source::Peers, Kind::InvalidState), (Source::Host, Kind::Unsupported)] {
        let device: Arc<dyn Device> = counted(1)[0].clone();
        let sharding = Sharding { source, ..sharding(grain()) };
        let plan = Plan::new(&layers(&model()), Group { id: 0, rank: 0, ranks: 1 }, &sharding).unwrap();
        let mut rank = Rank::new(&device, plan, Pulls::default(), &no_faults()).unwrap();
        rank.fill().unwrap();
        assert_eq!(rank.windows.update(1, &[1], u64::MAX).unwrap_err().kind(), kind);
    }
}

/// An update whose copies may still run keeps its memory, and no other one is begun meanwhile.
#[test]
fn an_update_that_cannot_wait_for_its_copies_keeps_the_windows_busy() {
    group(&counted(1), |engine, faulty| {
        drop(engine.filled(1, &[0]).unwrap());
        let start = faulty.backings();
        let mut update = engine.filled(2, &[0]).unwrap();
        faulty.aim(Some(0));
        assert_eq!(update.abort().unwrap_err().kind(), Kind::OutOfMemory);
        assert!(faulty.aim(None).is_some());
        assert_eq!(engine.ring.update(3, &[0], u64::MAX).unwrap_err().kind(), Kind::Busy);
        update.abort().unwrap();
        assert_eq!(faulty.backings(), start);
        drop(update);
        assert_eq!(engine.updates(3, &[0]), Ok(Outcome::Committed));
    });
}

/// Each refused call of a drop: the windows do what is left before the next update or change of replicas begins, and
/// hold then what they held. While it is refused still, these say so.
#[test]
fn what_a_dropped_update_could_not_give_back_is_given_back_by_the_next() {
    group(&counted(2), |engine, faulty| {
        let all = engine.layers();
        drop(engine.ring.update(1, &all, u64::MAX).unwrap());
        let (start, mut calls) = (faulty.backings(), BTreeSet::new());
        for (version, passing) in (2..).zip(0..) {
            let update = engine.filled(version, &all).unwrap();
            faulty.aim(Some(passing));
            drop(update);
            let Some(call) = faulty.aim(None) else { break };
            calls.insert(call);
            // Memory that is not taken back stays with the device.
            if call == "give_back" {
                break;
            }
            // It is refused once more.
            faulty.aim(Some(0));
            let again = engine.ring.update(100, &all, u64::MAX).map(drop);
            assert!(faulty.aim(None).is_some());
            faulty.aim(Some(0));
            let replicated = engine.ring.replicate(100, &[], u64::MAX).map(drop);
            assert!(faulty.aim(None).is_some());
            for refused in [again, replicated] {
                assert_eq!(refused.unwrap_err().kind(), Kind::OutOfMemory, "{call}");
            }
            drop(engine.ring.replicate(version, &[], u64::MAX).unwrap());
            assert_eq!((faulty.backings(), faulty.unmapped()), (start, 0), "{call}");
            engine.step().unwrap();
        }
        assert_eq!(calls, ["event", "give_back", "record", "remap", "synchronize"].into());
        let mut update = engine.filled(50, &all).unwrap();
        engine.share(&mut update).unwrap();
        // The ranks had different numbers of calls to be refused, and so of steps.
        let border = Border { step: 50, ..engine.border() };
        assert_eq!(engine.commit(&mut update, &all, border), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}
