//! Each call of the system refused in turn while a rank updates, and each mapping of a flip: the ranks have one
//! version, or one of them says which layer it cannot use; no use shows anything else, and no memory is lost.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults, Map, NoFaults, Protection, Request};
use forebay::peer::Event;
use forebay::weights::{Outcome, Place};
use forebay::{Kind, Result};

use crate::failing::{Nth, UNAIMED, alone};
use crate::windows::{Folder, PATIENCE, expected};
use crate::{Engine, Faulty, counted, grain, group, no_faults};

/// An update up to its outcome.
fn updated(engine: &mut Engine, version: u32) -> Result<Outcome> {
    let all = engine.layers();
    let mut update = engine.filled(version, &all)?;
    engine.share(&mut update)?;
    let border = engine.border();
    let outcome = engine.ring.commit(&mut update, &mut engine.links, border)?;
    if outcome == Outcome::Committed {
        engine.versions.fill(version);
    }
    Ok(outcome)
}

/// Rank 0 is refused one call, of the system or of its device. The other one learns the decision.
#[test]
fn every_refused_call_leaves_one_version_or_an_error_that_says_so() {
    let (refused, broken, _) = refusals(false);
    assert!(refused > 30 && broken > 8, "{refused} refused, {broken} in a flip");
    let (refused, broken, calls) = refusals(true);
    assert!(refused > 60 && broken > 8, "{refused} refused, {broken} in a flip");
    for call in [
        "backing",
        "import_backing",
        "export",
        "range",
        "remap",
        "give_back",
        "copy",
        "record",
        "synchronize",
    ] {
        assert!(calls.contains(call), "{call} is not among {calls:?}");
    }
}

/// How many calls were refused so that there was no commit, how many in a flip, and which ones of the device.
fn refusals(of_device: bool) -> (u32, u32, BTreeSet<&'static str>) {
    let (mut refused, mut broken, mut calls) = (0, 0, BTreeSet::new());
    for n in 0.. {
        let (folder, faults) = (Folder::new(), Arc::new(Nth::unaimed()));
        let shared: Arc<dyn Faults> = faults.clone();
        let host = HostDevice::with_faults(HostOptions::default(), faults.clone());
        let counted = Faulty::new(host.clone(), false);
        let mut call = None;
        let outcome = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
                let mut engine = Engine::new(&device, (1, 2), &folder.0, &no_faults()).unwrap();
                let outcome = updated(&mut engine, 1);
                engine.step().unwrap();
                (outcome, engine.versions.clone())
            });
            let device: Arc<dyn Device> = counted.clone();
            let mut engine = Engine::new(&device, (0, 2), &folder.0, &shared).unwrap();
            // The engine's own work is not refused.
            engine.rank.device = host;
            match of_device {
                true => drop(counted.aim(Some(n))),
                false => faults.aim(n),
            }
            let outcome = updated(&mut engine, 1);
            faults.aim(UNAIMED);
            call = counted.aim(None);
            if outcome.is_err() {
                // Nothing more is said, so that the other one need not wait for its time to be over.
                drop(std::mem::replace(&mut engine.links, alone()));
            }
            // The first version's writable addresses cannot be mapped again once others may read their memory.
            if outcome.as_ref().is_err_and(|error| error.kind() == Kind::DeviceFailed) {
                assert_eq!(other.join().unwrap().1, [1; 5], "{n}");
                return outcome;
            }
            let versions: Vec<u32> =
                engine.layers().iter().map(|layer| engine.ring.pulls().version(*layer).unwrap()).collect();
            engine.versions.clone_from(&versions);
            let shown = engine.step();
            let (theirs, their_versions) = other.join().unwrap();
            match &outcome {
                Ok(Outcome::Committed) => shown.unwrap(),
                // It may be that a layer cannot be used, and nothing else.
                Err(error) if their_versions == [1; 5] => {
                    assert!(error.number("layer").is_some() || shown.is_ok(), "{n}: {error}");
                    assert!(versions.contains(&1), "{n}: {error}");
                    broken += 1;
                    if shown.is_err() {
                        engine.ring.abandon().unwrap();
                    }
                }
                _ => {
                    shown.unwrap();
                    assert_eq!((&versions[..], &their_versions[..]), (&[0; 5][..], &[0; 5][..]), "{n}");
                    assert!(!matches!(theirs, Ok(Outcome::Committed)));
                }
            }
            outcome
        });
        let reached = call.is_some() || faults.reached();
        refused += u32::from(reached && outcome != Ok(Outcome::Committed));
        // What the device does not take back stays with it, and so does memory whose copies may still run.
        let stays = matches!(call, Some("give_back" | "record" | "synchronize"));
        assert!(stays || counted.unmapped() == 0, "{n}: {call:?}, {outcome:?}");
        if !reached {
            assert_eq!(outcome, Ok(Outcome::Committed));
            return (refused, broken, calls);
        }
        calls.extend(call);
    }
    unreachable!("there are as many calls as numbers");
}

/// Each remap of a flip refused on one rank, in two ways: the layer of that remap is unusable there, with the error,
/// and each other layer shows the new version, on all ranks.
#[test]
fn a_flip_that_is_refused_half_way_shows_no_mixture() {
    for kind in [Kind::OsRefused, Kind::DeviceFailed] {
        for refused in 0..40 {
            let over = AtomicU32::new(0);
            group(&counted(2), |engine, faulty| {
                let all = engine.layers();
                let mut update = engine.filled(1, &all).unwrap();
                engine.share(&mut update).unwrap();
                if engine.own() == 0 {
                    faulty.remaps(&[vec![None; refused], vec![Some(kind)]].concat());
                }
                let border = engine.border();
                // A step is open: nothing is decided, and the call is repeated.
                engine.ring.begin(1, 0).unwrap();
                assert!(
                    engine.ring.commit(&mut update, &mut engine.links, border).is_err() && !update.is_over()
                );
                engine.ring.abandon().unwrap();
                let result = engine.ring.commit(&mut update, &mut engine.links, border);
                assert!(update.is_over(), "{result:?}");
                engine.versions.fill(1);
                over.fetch_add(u32::from(faulty.remaps_left() > 0), Ordering::Relaxed);
                faulty.remaps(&[]);
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
                            assert_eq!(engine.ring.pulls().pull(layer, engine.stream()), Err(error.clone()));
                            assert_eq!(error.number("layer"), Some(layer as u64));
                            assert_eq!(engine.ring.pulls().version(layer), Ok(0));
                            broken += 1;
                        }
                    }
                }
                // A parked address that is not taken back is an error too, and breaks nothing.
                assert!(broken <= usize::from(result.is_err()), "{result:?}");
                if broken > 0 {
                    assert!(engine.ring.update(2, &all, u64::MAX).is_err());
                    // No step begins, also if the layer is never pulled.
                    let mut launched = false;
                    let error = engine
                        .ring
                        .launch(engine.rank.stream, || {
                            launched = true;
                            Ok(())
                        })
                        .unwrap_err();
                    assert_eq!((error.kind(), launched), (kind, false), "{error}");
                    assert_eq!(engine.ring.begin(1, 0), Err(error));
                }
            });
            if over.load(Ordering::Relaxed) > 0 {
                assert!(refused >= 12, "{refused}");
                break;
            }
        }
    }
}

/// What the first rank gets from one that has shared as any other, and then says of a new version what `says` makes of
/// the first rank's own first message.
fn told(says: impl Fn(&mut Engine, Vec<u8>, OwnedFd) + Sync, work: impl Fn(&mut Engine) + Sync) {
    group(&counted(2), |engine, _| {
        if engine.own() == 0 {
            return work(engine);
        }
        let (_, event) = engine.links.event(PATIENCE).unwrap().unwrap();
        let Event::Message { bytes, descriptor: Some(words) } = event else { panic!("{event:?}") };
        says(engine, bytes, words);
    });
}

/// Memory of so many bytes that others may read.
fn given(bytes: u64) -> OwnedFd {
    let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    Map::new(&request, &NoFaults).unwrap().0.export(Protection::Read, &NoFaults).unwrap()
}

/// A part of version 1 as it is said on the wire (`weights/exchange.rs` has the format).
fn message(layer: usize, bytes: u64, digest: [u8; 32]) -> Vec<u8> {
    let (layer, version) = (layer as u32, 1_u32.to_le_bytes());
    [&17_u32.to_le_bytes()[..], &layer.to_le_bytes(), &bytes.to_le_bytes(), &digest, &version].concat()
}

/// The same, of the digest 0.
fn part(layer: usize, bytes: u64) -> Vec<u8> {
    message(layer, bytes, [0; 32])
}

/// What a rank has to say of a layer that all have whole: the digest of its stamps.
fn whole(engine: &Engine, layer: usize) -> Vec<u8> {
    let stamps: Vec<u8> = expected(&engine.plan, layer, 1).into_iter().flatten().collect();
    message(layer, 0, *blake3::hash(&stamps).as_bytes())
}

/// The first layer that the plan shards, and the bytes of the second rank's part.
fn first(engine: &Engine) -> (usize, u64) {
    let found = engine.plan.layers().iter().find(|layer| layer.place != Place::Resident).unwrap();
    let pages = found.cut.part(1);
    (found.layer, (pages.end - pages.start) * grain())
}

/// Whether the other rank's word of its new parts is refused, and how.
#[test]
fn a_rank_that_says_other_things_is_named_and_the_old_version_stays() {
    for case in 0..5 {
        let says = |engine: &mut Engine, mut begins: Vec<u8>, _: OwnedFd| {
            let (layer, bytes) = first(engine);
            let (begins, then) = match case {
                0 => {
                    begins[20] ^= 1;
                    (begins, None)
                }
                1 => (b"\x10\0\0\0".to_vec(), None),
                2 => (begins, Some((part(layer + 1, bytes), Some(given(bytes))))),
                3 => (begins, Some((part(layer, bytes), None))),
                _ => (begins, Some((part(layer, bytes), Some(given(bytes + grain()))))),
            };
            engine.links.send(0, &begins, None).unwrap();
            if let Some((message, descriptor)) = then {
                engine.links.send(0, &message, descriptor).unwrap();
            }
            // Its last word comes.
            while let Some((_, event)) = engine.links.event(PATIENCE).unwrap() {
                if matches!(event, Event::Message { bytes, .. } if bytes[0] == 18) {
                    break;
                }
            }
        };
        told(says, |engine| {
            let all = engine.layers();
            let mut update = engine.filled(1, &all).unwrap();
            let error = engine.share(&mut update).unwrap_err();
            let kind = if case == 0 { Kind::InvalidConfig } else { Kind::BadFormat };
            assert_eq!((error.kind(), error.number("rank")), (kind, Some(1)), "{case}: {error}");
            let place = [
                "a rank that has begun something else",
                "a message that begins nothing",
                "the part of another layer",
                "a part of another size",
                "shared memory of another size",
            ];
            assert!(error.place().ends_with(place[case]), "{case}: {error}");
            let border = engine.border();
            let refused = engine.ring.commit(&mut update, &mut engine.links, border).unwrap_err();
            assert_eq!(refused.kind(), Kind::InvalidState);
            drop(update);
            engine.step().unwrap();
        });
    }
}

/// Parts that are not what the rank says, and a decision that no rank writes: the first is found by reading, and after
/// the second no layer of the update can be used.
#[test]
fn other_bytes_are_found_by_reading_and_a_strange_decision_is_an_error() {
    let says = |engine: &mut Engine, begins: Vec<u8>, words: OwnedFd| {
        engine.links.send(0, &begins, None).unwrap();
        for layer in engine.plan.layers() {
            if layer.place == Place::Resident {
                engine.links.send(0, &whole(engine, layer.layer), None).unwrap();
                continue;
            }
            let pages = layer.cut.part(1);
            let bytes = (pages.end - pages.start) * grain();
            engine.links.send(0, &part(layer.layer, bytes), (bytes > 0).then(|| given(bytes))).unwrap();
        }
        // It is never ready. Then it writes something.
        while !matches!(engine.links.event(PATIENCE), Ok(Some((_, Event::Message { bytes, .. }))) if bytes == b"now")
        {
        }
        File::from(words).write_all_at(&[5; 8], 0).unwrap();
    };
    told(says, |engine| {
        let some = engine.layers()[1..].to_vec();
        let all = engine.layers();
        let mut update = engine.filled(1, &all).unwrap();
        engine.share(&mut update).unwrap();
        let error = update.verify(engine.stream()).unwrap_err();
        let (layer, _) = first(engine);
        assert_eq!((error.kind(), error.number("rank")), (Kind::Corrupt, Some(1)));
        assert!(error.place().starts_with(&format!("layer {layer}: ")), "{error}");
        engine.step().unwrap();
        engine.links.send(1, b"now", None).unwrap();
        let border = engine.border();
        let error = engine.ring.commit(&mut update, &mut engine.links, border).unwrap_err();
        assert_eq!((error.kind(), error.number("value")), (Kind::Corrupt, Some(0x0505_0505_0505_0505)));
        for layer in some {
            assert_eq!(engine.ring.pulls().layer(layer).unwrap_err(), error);
            assert_eq!(engine.ring.pulls().version(layer), Ok(0));
        }
    });
}

/// Lets the other rank commit while this one waits, and refuses the wait then.
#[derive(Debug)]
struct LastMoment {
    armed: AtomicBool,
    meets: Barrier,
}

impl Faults for LastMoment {
    fn before(&self, call: Call) -> Option<i32> {
        if call != Call::Poll || !self.armed.swap(false, Ordering::Relaxed) {
            return None;
        }
        self.meets.wait();
        self.meets.wait();
        Some(libc::EPERM)
    }
}

/// A rank that gives up when the others have just committed goes with them.
#[test]
fn a_rank_that_gives_up_too_late_follows_the_others() {
    let (folder, last) =
        (Folder::new(), LastMoment { armed: AtomicBool::new(false), meets: Barrier::new(2) });
    let last = Arc::new(last);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
            let mut engine = Engine::new(&device, (1, 2), &folder.0, &no_faults()).unwrap();
            let mut update = engine.filled(1, &[1, 2]).unwrap();
            engine.share(&mut update).unwrap();
            last.meets.wait();
            let border = engine.border();
            assert_eq!(engine.commit(&mut update, &[1, 2], border), Ok(Outcome::Committed));
            last.meets.wait();
            engine.step().unwrap();
        });
        let faults: Arc<dyn Faults> = last.clone();
        let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
        let mut engine = Engine::new(&device, (0, 2), &folder.0, &faults).unwrap();
        let mut update = engine.filled(1, &[1, 2]).unwrap();
        engine.share(&mut update).unwrap();
        last.armed.store(true, Ordering::Relaxed);
        let border = engine.border();
        assert_eq!(engine.commit(&mut update, &[1, 2], border), Ok(Outcome::Committed));
        engine.step().unwrap();
    });
}
