//! Changes of the replicas in one process, on host devices that count what they hold: committed, aborted and begun
//! again, within bounds of memory and of bytes a step; and what is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use forebay::weights::{Border, Outcome, Place, Replica, Update};
use forebay::{Error, Kind};

use crate::naive::{Probe, Sources, backings, bytes, gains, holders, possible};
use crate::windows::PATIENCE;
use crate::{Engine, Faulty, changed, commit, counted, filled, grain, group, replica, shared};

fn named(engine: &Engine, faulty: &Arc<Faulty>) -> Probe {
    faulty.named(engine.own());
    Probe::new(engine, faulty)
}

/// Ranks that know the names of each other's devices.
fn named_group(count: u32, work: impl Fn(&mut Engine, &Arc<Faulty>) + Sync) {
    let devices = counted(count);
    devices.iter().zip(0..).for_each(|(device, rank)| device.named(rank));
    group(&devices, work);
}

/// Sets one after another, with steps between: each page is read from a rank that has it, no source of a page has two
/// readers more than another, and memory is what the set needs.
#[test]
fn every_rank_reads_the_set_that_there_is_and_gives_the_rest_back() {
    for ranks in 2..5 {
        let (met, all) = (Barrier::new(ranks as usize), Mutex::new(BTreeMap::<u32, Sources>::new()));
        named_group(ranks, |engine, faulty| {
            let probe = named(engine, faulty);
            let possible = possible(&engine.plan);
            assert!(possible.len() >= 2 * ranks as usize, "{}", possible.len());
            let sets: Vec<Vec<Replica>> = vec![
                vec![possible[0].clone()],
                possible.clone(),
                possible.iter().step_by(2).cloned().collect(),
                possible.iter().skip(1).step_by(3).cloned().rev().collect(),
                vec![],
            ];
            probe.check(engine, &BTreeSet::new());
            let start = faulty.backings();
            for (wanted, number) in sets.iter().zip(1..) {
                assert_eq!(changed(engine, number, wanted), Ok(Outcome::Committed));
                let set: BTreeSet<Replica> = wanted.iter().cloned().collect();
                let sources = probe.check(engine, &set);
                assert_eq!(faulty.backings(), start + 1 + backings(&engine.plan, &set));
                let (least, own) = (engine.plan.bytes().device(), bytes(&engine.plan, &set, engine.own()));
                assert_eq!(engine.ring.pulls().device_bytes(), least + own);
                all.lock().unwrap().insert(engine.own(), sources);
                met.wait();
                balanced(engine, &set, &all.lock().unwrap());
                met.wait();
            }
        });
    }
}

/// Each page's sources have as many readers as each other, or one more.
fn balanced(engine: &Engine, set: &BTreeSet<Replica>, all: &BTreeMap<u32, Sources>) {
    let pages: BTreeSet<(usize, u64)> = all.values().flat_map(|sources| sources.keys().copied()).collect();
    for (layer, page) in pages {
        let holders = holders(&engine.plan, set, layer, page);
        let mut readers: BTreeMap<u32, u32> = holders.iter().map(|rank| (*rank, 0)).collect();
        for (reader, sources) in all.iter().filter(|(reader, _)| !holders.contains(reader)) {
            *readers.get_mut(&sources[&(layer, page)]).unwrap_or_else(|| panic!("reader {reader}")) += 1;
        }
        let (least, most) = (readers.values().min().unwrap(), readers.values().max().unwrap());
        assert!(most - least <= 1, "layer {layer}, page {page}: {readers:?}");
    }
}

/// A change takes what the rank gains and no byte more, and copies at most as many bytes a step as it is allowed.
#[test]
fn memory_and_bytes_of_a_step_are_within_their_bounds() {
    named_group(3, |engine, faulty| {
        let wanted = [replica(4, 1, 0), replica(4, 3, 1), replica(1, 1, 2), replica(3, 0, 0)];
        let set: BTreeSet<Replica> = wanted.iter().cloned().collect();
        let own = bytes(&engine.plan, &set, engine.own());
        assert!(own > 0);
        // The first one takes a granule more.
        let needed = own + grain();
        let before = (faulty.backings(), faulty.ranges());
        let error = engine.ring.replicate(1, &wanted, needed - 1).unwrap_err();
        assert_eq!((error.kind(), error.number("needed")), (Kind::OutOfMemory, Some(needed)), "{error}");
        assert_eq!((error.number("allowed"), faulty.backings()), (Some(needed - 1), before.0));
        assert_eq!(faulty.ranges(), before.1);
        drop(engine.ring.replicate(1, &wanted, needed).unwrap());
        assert_eq!((faulty.backings(), faulty.unmapped()), (before.0 + 1, 0));
        let mut change = engine.ring.replicate(2, &wanted, own).unwrap();
        assert_eq!(engine.ring.replicate(3, &wanted, own).unwrap_err().kind(), Kind::Busy);
        let (mut left, mut at) = (own, 0);
        while left > 0 {
            let allowed = [1, grain() - 4, 0, 2 * grain() + 8, 5][at % 5];
            faulty.trace();
            let then = change.advance(allowed, engine.stream()).unwrap();
            let copied: u64 = faulty.traced().iter().map(|(from, _)| from.bytes()).sum();
            assert_eq!((copied, then, change.left()), (allowed.min(left), left - copied, then));
            (left, at) = (then, at + 1);
            engine.step().unwrap();
        }
        faulty.trace();
        assert_eq!((change.advance(u64::MAX, engine.stream()), faulty.traced()), (Ok(0), vec![]));
        let stream = engine.stream();
        change.share(&mut engine.links, stream, PATIENCE).unwrap();
        assert_eq!(commit(engine, &mut change), Ok(Outcome::Committed));
        // What is kept needs nothing.
        drop(engine.ring.replicate(3, &wanted, 0).unwrap());
        // They count in the budget, and a shrink gives none of them back.
        let least = engine.plan.bytes().device() + own;
        let error = engine.ring.shrink(least - 1).unwrap_err();
        assert_eq!((error.kind(), error.number("least")), (Kind::OutOfMemory, Some(least)));
        assert_eq!(engine.ring.shrink(least), Ok(least));
        let layer = &engine.plan.layers()[1];
        let more = engine.plan.pulled(layer);
        assert_eq!(engine.ring.grow(least + more, stream), Ok(least + more));
        engine.step().unwrap();
        engine.ring.drop_replicas().unwrap();
        assert_eq!(engine.ring.pulls().device_bytes(), least - own + more);
        engine.step().unwrap();
    });
}

/// One rank comes late, not at all, or to another border: no rank has the new set, and the next try succeeds.
#[test]
fn a_change_that_one_rank_does_not_take_is_taken_by_none() {
    let met = Barrier::new(3);
    named_group(3, |engine, faulty| {
        let (probe, own) = (named(engine, faulty), engine.own());
        let first = [replica(1, 1, 1)];
        assert_eq!(changed(engine, 1, &first), Ok(Outcome::Committed));
        let before = faulty.backings();
        let wanted = [replica(1, 1, 0), replica(4, 3, 2), replica(3, 1, 1)];
        for case in 0..3 {
            let mut change = shared(engine, 2 + case, &wanted).unwrap();
            let late = own == 1;
            let border = Border { step: 7, ..engine.border() };
            let short = Border { at_most: Duration::from_millis(50), ..border };
            let outcome = match case {
                0 if late => {
                    met.wait();
                    engine.ring.commit_replicas(&mut change, &mut engine.links, border)
                }
                0 => {
                    let outcome = engine.ring.commit_replicas(&mut change, &mut engine.links, short);
                    met.wait();
                    outcome
                }
                1 if late => {
                    drop(change);
                    Ok(Outcome::Aborted(Error::new(Kind::Cancelled, "test")))
                }
                2 if late => {
                    let other = Border { step: 8, ..border };
                    engine.ring.commit_replicas(&mut change, &mut engine.links, other)
                }
                _ => engine.ring.commit_replicas(&mut change, &mut engine.links, border),
            };
            assert!(matches!(outcome, Ok(Outcome::Aborted(_))), "{outcome:?}");
            assert_eq!((faulty.backings(), engine.ring.pulls().replicas()), (before, first.to_vec()));
            probe.check(engine, &first.iter().cloned().collect());
            met.wait();
        }
        assert_eq!(changed(engine, 9, &wanted), Ok(Outcome::Committed));
        probe.check(engine, &wanted.iter().cloned().collect());
    });
}

/// A new version of a layer drops its replicas on all ranks, and no other layer's; a layer that is resident meanwhile
/// goes on.
#[test]
fn a_new_version_drops_the_replicas_of_its_layers() {
    named_group(3, |engine, faulty| {
        let probe = named(engine, faulty);
        let start = faulty.backings() + 1;
        let wanted = [replica(4, 1, 0), replica(1, 1, 1), replica(1, 1, 2), replica(3, 0, 2)];
        assert_eq!(changed(engine, 5, &wanted), Ok(Outcome::Committed));
        // An update and a change exclude each other; the numbers of one say nothing of the other's.
        let mut update = engine.filled(1, &[0, 1]).unwrap();
        assert_eq!(engine.ring.replicate(6, &wanted, u64::MAX).unwrap_err().kind(), Kind::Busy);
        engine.share(&mut update).unwrap();
        probe.check(engine, &wanted.iter().cloned().collect());
        let border = engine.border();
        let border = Border { step: 1, ..border };
        assert_eq!(engine.commit(&mut update, &[0, 1], border), Ok(Outcome::Committed));
        let left: BTreeSet<Replica> = [replica(4, 1, 0), replica(3, 0, 2)].into();
        probe.check(engine, &left);
        assert_eq!(faulty.backings(), start + backings(&engine.plan, &left));
        let change = filled(engine, 6, &wanted).unwrap();
        assert_eq!(engine.ring.update(2, &[1], u64::MAX).unwrap_err().kind(), Kind::Busy);
        drop(change);
        // Replicas of the new version have its bytes.
        engine.ring.make_resident(1, engine.stream()).unwrap();
        assert_eq!(changed(engine, 7, &wanted), Ok(Outcome::Committed));
        engine.ring.make_sharded(1).unwrap();
        probe.check(engine, &wanted.iter().cloned().collect());
        assert_eq!(changed(engine, 8, &[]), Ok(Outcome::Committed));
        assert_eq!((faulty.backings(), faulty.unmapped()), (start, 0));
    });
}

#[test]
fn what_cannot_be_replicated_is_refused_and_nothing_changes() {
    named_group(2, |engine, faulty| {
        engine.step().unwrap();
        let before = (faulty.backings(), faulty.ranges());
        for (number, wanted, kind) in [
            (0, vec![replica(4, 0, 0)], Kind::OutOfRange),
            (1, vec![replica(5, 0, 0)], Kind::OutOfRange),
            (1, vec![replica(4, 9, 0)], Kind::OutOfRange),
            (1, vec![replica(4, 0, 2)], Kind::OutOfRange),
            (1, vec![replica(4, 1, 0), replica(4, 3, 0), replica(4, 1, 0)], Kind::InvalidConfig),
            // No whole page; whole pages of the rank alone; a layer that is resident.
            (1, vec![replica(2, 0, 0)], Kind::InvalidConfig),
            (1, vec![replica(4, 0, 0)], Kind::InvalidConfig),
            (1, vec![replica(0, 0, 0)], Kind::InvalidConfig),
        ] {
            let error = engine.ring.replicate(number, &wanted, u64::MAX).unwrap_err();
            assert_eq!(error.kind(), kind, "{wanted:?}: {error}");
        }
        assert_eq!(gains(&engine.plan, &replica(4, 0, 0)), 0);
        assert_eq!((faulty.backings(), faulty.ranges()), before);
        let kind = |result: forebay::Result<()>| result.unwrap_err().kind();
        let wanted = [replica(4, 3, 0), replica(1, 0, 1)];
        let mut change = engine.ring.replicate(1, &wanted, u64::MAX).unwrap();
        // Before it is filled, and shared.
        let stream = engine.stream();
        if change.left() > 0 {
            let error = change.share(&mut engine.links, stream, PATIENCE).unwrap_err();
            assert_eq!((error.kind(), error.number("bytes")), (Kind::InvalidState, Some(change.left())));
        }
        assert_eq!(kind(commit(engine, &mut change).map(drop)), Kind::InvalidState);
        while change.advance(grain(), stream).unwrap() > 0 {}
        change.share(&mut engine.links, stream, PATIENCE).unwrap();
        assert_eq!(kind(change.share(&mut engine.links, stream, PATIENCE)), Kind::InvalidState);
        assert_eq!(kind(change.advance(1, stream).map(drop)), Kind::InvalidState);
        let other = 1 - engine.own();
        assert_eq!(kind(engine.ring.reattach(other, &mut engine.links, PATIENCE)), Kind::Busy);
        for dropped in [engine.ring.drop_replicas(), engine.ring.reroute()] {
            assert_eq!(kind(dropped), Kind::Busy);
        }
        // In an open step it is refused, and goes on when the step has ended.
        engine.ring.begin(1, 0).unwrap();
        assert_eq!(kind(commit(engine, &mut change).map(drop)), Kind::Busy);
        assert_eq!(kind(engine.ring.drop_replicas()), Kind::Busy);
        engine.ring.abandon().unwrap();
        assert_eq!(commit(engine, &mut change), Ok(Outcome::Committed));
        assert_eq!(kind(commit(engine, &mut change).map(drop)), Kind::InvalidState);
        assert_eq!(engine.ring.replicate(1, &wanted, u64::MAX).unwrap_err().kind(), Kind::OutOfRange);
        engine.step().unwrap();
    });
}

/// Ranks that want other sets, or have others, or do something else, refuse each other, and go on when they agree.
#[test]
fn ranks_that_do_not_agree_change_nothing() {
    named_group(2, |engine, faulty| {
        let (before, stream) = (faulty.backings(), engine.stream());
        let kind = |result: forebay::Result<()>| result.unwrap_err().kind();
        let wanted = [replica(4, 3, 0), replica(1, 0, 1)];
        assert_eq!(changed(engine, 1, &wanted), Ok(Outcome::Committed));
        // Sets that two ranks do not agree on, after the change and before it.
        let other = [replica(4, 3, 0), replica(3, 0, engine.own())];
        let mut change = filled(engine, 2, &other).unwrap();
        let found = kind(change.share(&mut engine.links, stream, PATIENCE));
        assert!(matches!(found, Kind::InvalidConfig | Kind::Cancelled), "{found:?}");
        drop(change);
        if engine.own() == 1 {
            engine.ring.drop_replicas().unwrap();
        }
        let mut change = filled(engine, 3, &wanted).unwrap();
        let found = kind(change.share(&mut engine.links, stream, PATIENCE));
        assert!(matches!(found, Kind::InvalidConfig | Kind::Cancelled), "{found:?}");
        drop(change);
        engine.ring.drop_replicas().unwrap();
        assert_eq!(changed(engine, 4, &wanted), Ok(Outcome::Committed));
        // A rank updates, and another one changes replicas: each waits for the other.
        let short = Duration::from_millis(100);
        let found = if engine.own() == 0 {
            let mut change = filled(engine, 5, &[]).unwrap();
            kind(change.share(&mut engine.links, stream, short))
        } else {
            let mut update: Update = engine.filled(1, &[0]).unwrap();
            kind(update.share(&mut engine.links, stream, short))
        };
        // Or the other one has given up and begun the next change, of which this one hears.
        let heard = engine.own() == 0 && found == Kind::InvalidConfig;
        assert!(heard || found == Kind::TimedOut, "{found:?}");
        // Whatever was said then is dropped by the next ones.
        assert_eq!(changed(engine, 6, &[]), Ok(Outcome::Committed));
        let all = engine.layers();
        let mut update = engine.filled(2, &all).unwrap();
        engine.share(&mut update).unwrap();
        let border = Border { step: 2, ..engine.border() };
        assert_eq!(engine.commit(&mut update, &all, border), Ok(Outcome::Committed));
        engine.step().unwrap();
        assert_eq!((faulty.backings(), faulty.unmapped()), (before + 1, 0));
    });
}

/// A replica that was not filled with what its owner has is found by all ranks, and taken by none.
#[test]
fn other_bytes_are_found_before_the_border() {
    named_group(3, |engine, faulty| {
        let before = faulty.backings() + 1;
        let mut change = engine.ring.replicate(1, &[replica(3, 0, 1)], u64::MAX).unwrap();
        if engine.own() == 1 {
            faulty.leave_out_copy();
        }
        while change.advance(grain(), engine.stream()).unwrap() > 0 {}
        let stream = engine.stream();
        let error = change.share(&mut engine.links, stream, PATIENCE).unwrap_err();
        match error.kind() {
            Kind::Corrupt => assert_eq!((error.number("rank"), error.number("layer")), (Some(1), Some(3))),
            other => assert_eq!(other, Kind::Cancelled, "{error}"),
        }
        // The first that knows is one that has both digests.
        let border = engine.border();
        let refused = engine.ring.commit_replicas(&mut change, &mut engine.links, border).unwrap_err();
        assert_eq!(refused.kind(), Kind::InvalidState);
        drop(change);
        assert_eq!((faulty.backings(), faulty.unmapped()), (before, 0));
        engine.step().unwrap();
        assert_eq!(changed(engine, 2, &[replica(3, 0, 1)]), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}

/// The device counts on no rank: a stream of another device is refused with the rest left to be copied.
#[test]
fn a_copy_that_is_refused_is_made_again() {
    named_group(2, |engine, faulty| {
        let mut change = engine.ring.replicate(1, &[replica(3, 1, 0), replica(4, 1, 1)], u64::MAX).unwrap();
        let left = change.left();
        faulty.refuse_copy(0);
        let stream = engine.rank.device.stream().unwrap();
        assert_eq!(change.advance(left, stream).unwrap_err().kind(), Kind::Exhausted);
        assert_eq!((change.left(), change.advance(left, stream)), (left, Ok(0)));
        let stream = engine.stream();
        change.share(&mut engine.links, stream, PATIENCE).unwrap();
        assert_eq!(commit(engine, &mut change), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}

/// What is over waits for no stream any more: the engine may have returned the one on which it shared.
#[test]
fn what_was_committed_asks_nothing_of_the_device_when_it_is_dropped() {
    group(&counted(2), |engine, faulty| {
        let mut change = shared(engine, 1, &[replica(1, 1, 0)]).unwrap();
        assert_eq!(commit(engine, &mut change), Ok(Outcome::Committed));
        faulty.aim(Some(0));
        drop(change);
        assert_eq!(faulty.aim(None), None);
        let mut update = engine.filled(1, &[3]).unwrap();
        engine.share(&mut update).unwrap();
        let border = Border { step: 9, ..engine.border() };
        assert_eq!(engine.commit(&mut update, &[3], border), Ok(Outcome::Committed));
        faulty.aim(Some(0));
        drop(update);
        assert_eq!(faulty.aim(None), None);
    });
}

/// A change whose addresses cannot be parked keeps them: no other one is lent them meanwhile, and its end takes nothing
/// from the next one.
#[test]
fn a_change_that_cannot_park_keeps_the_windows_busy_until_it_can() {
    group(&counted(2), |engine, faulty| {
        let wanted = [replica(1, 1, 0)];
        let mut change = filled(engine, 1, &wanted).unwrap();
        faulty.remaps(&[Some(Kind::OutOfMemory)]);
        assert_eq!(change.abort().unwrap_err().kind(), Kind::OutOfMemory);
        assert_eq!(engine.ring.replicate(2, &wanted, u64::MAX).unwrap_err().kind(), Kind::Busy);
        change.abort().unwrap();
        let mut next = filled(engine, 2, &wanted).unwrap();
        drop(change);
        next.share(&mut engine.links, engine.rank.stream, PATIENCE).unwrap();
        assert_eq!(commit(engine, &mut next), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}

/// Sets that grow by one replica at a time leave fewer addresses behind than the last range has, on the rank that gains
/// them and on their owner, and no range is longer than any change can need.
#[test]
fn a_change_that_needs_more_addresses_leaves_few_behind() {
    named_group(2, |engine, faulty| {
        let possible = possible(&engine.plan);
        let (of_own, of_other): (Vec<Replica>, Vec<Replica>) =
            possible.into_iter().partition(|one| one.rank == engine.own());
        let sharded = engine.plan.layers().iter().filter(|layer| layer.place != Place::Resident);
        let (mut owned, mut pages) = (0, 0);
        for layer in sharded {
            owned += layer.cut.part(engine.own()).count() as u64;
            pages += layer.layout.pages();
        }
        // The granule of the first change is mapped by a range of its own.
        drop(engine.ring.replicate(1, &[], u64::MAX).unwrap());
        let mut number = 1;
        for (all, most) in [(of_own, pages - owned), (of_other, owned)] {
            let before = faulty.lengths().len();
            for count in 1..=all.len() {
                number += 1;
                drop(engine.ring.replicate(number, &all[..count], u64::MAX).unwrap());
            }
            let needed: u64 = all.iter().map(|one| gains(&engine.plan, one)).sum();
            let lengths = faulty.lengths();
            let (last, left) = lengths[before..].split_last().unwrap();
            assert!(left.len() >= 2, "{left:?}");
            assert!(left.iter().sum::<u64>() < *last, "{left:?} before {last}");
            assert!((needed..=most * grain()).contains(last), "{last}: {needed} of {most} pages");
        }
    });
}

/// Where the device has no room for twice the addresses, a change takes as many as it needs.
#[test]
fn a_change_takes_the_addresses_that_it_needs_where_there_are_no_more() {
    named_group(2, |engine, faulty| {
        let mut own = possible(&engine.plan);
        own.retain(|one| one.rank == engine.own());
        let (mut number, mut exact) = (0, 0);
        for count in 1..=own.len() {
            let needed: u64 = own[..count].iter().map(|one| gains(&engine.plan, one)).sum();
            for passing in 0.. {
                number += 1;
                faulty.aim(Some(passing));
                let change = engine.ring.replicate(number, &own[..count], u64::MAX);
                let refused = faulty.aim(None);
                if refused == Some("range") && change.is_ok() && count > 1 {
                    assert_eq!(faulty.lengths().last(), Some(&needed));
                    exact += 1;
                }
                if change.is_ok() {
                    break;
                }
            }
        }
        assert!(exact > 0);
    });
}

/// Each refused call of a drop: the windows do what is left before the next change or update, or before a call that has
/// to find none, and hold then what they held. While it is refused still, a change or an update says so.
#[test]
fn what_a_dropped_change_could_not_give_back_is_given_back_by_the_next() {
    group(&counted(2), |engine, faulty| {
        let (wanted, other) = ([replica(1, 1, 0), replica(4, 1, 1)], 1 - engine.own());
        drop(engine.ring.replicate(1, &[], u64::MAX).unwrap());
        let (start, mut calls) = (faulty.backings(), BTreeSet::new());
        for (number, passing) in (2..).zip(0..) {
            let mut change = engine.ring.replicate(number, &wanted, u64::MAX).unwrap();
            change.advance(u64::MAX, engine.stream()).unwrap();
            faulty.aim(Some(passing));
            drop(change);
            let Some(call) = faulty.aim(None) else { break };
            calls.insert(call);
            // Memory that is not taken back stays with the device.
            if call == "give_back" {
                break;
            }
            let kind = |result: forebay::Result<()>| result.unwrap_err().kind();
            // It is refused once more.
            faulty.aim(Some(0));
            let again = engine.ring.replicate(100, &wanted, u64::MAX).map(drop);
            assert!(faulty.aim(None).is_some());
            faulty.aim(Some(0));
            let updated = engine.ring.update(100, &[3], u64::MAX).map(drop);
            assert_eq!((kind(again), kind(updated)), (Kind::OutOfMemory, Kind::OutOfMemory));
            assert!(faulty.aim(None).is_some());
            match passing % 3 {
                0 => drop(engine.ring.update(number, &[3], u64::MAX).unwrap()),
                1 => engine.ring.drop_replicas().unwrap(),
                _ => assert_eq!(
                    kind(engine.ring.reattach(other, &mut engine.links, PATIENCE)),
                    Kind::InvalidState
                ),
            }
            assert_eq!((faulty.backings(), faulty.unmapped()), (start, 0), "{call}");
        }
        assert_eq!(calls, ["event", "give_back", "record", "remap", "synchronize"].into());
        assert_eq!(changed(engine, 50, &wanted), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}
