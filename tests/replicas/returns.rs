//! Ranks that come back to a group with replicas: what the others still read of ranks that have not come back, and what
//! is left where the device refuses a mapping meanwhile.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use forebay::device::Device;
use forebay::peer::Event;
use forebay::weights::{Outcome, Pull, Replica};
use forebay::{Kind, Result};

use crate::naive::owners;
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, changed, counted, no_faults, replica};

fn start(rank: u32, devices: &[Arc<Faulty>], folder: &Path) -> Result<Engine> {
    let device: Arc<dyn Device> = devices[rank as usize].clone();
    Engine::new(&device, (rank, devices.len() as u32), folder, &no_faults())
}

/// Waits until these ranks are lost. What others say meanwhile is kept.
fn loses(engine: &mut Engine, dead: &[u32]) {
    while !dead.iter().all(|rank| engine.links.lost().any(|(lost, _)| lost == *rank)) {
        match engine.links.event(PATIENCE) {
            Ok(Some((rank, event))) => engine.links.set_aside(rank, event).unwrap(),
            Ok(None) => panic!("{dead:?} do not end"),
            Err(error) => assert_eq!(error.kind(), Kind::PeerLost, "{error}"),
        }
    }
    dead.iter().for_each(|rank| engine.ring.lost(*rank));
}

/// Waits until so many ranks have come back.
fn readmits(engine: &mut Engine, count: usize) {
    let mut back = BTreeSet::new();
    while back.len() < count {
        match engine.links.readmit(PATIENCE) {
            Ok(rank) => drop(back.insert(rank.expect("a rank that comes back"))),
            // One that had met a process which has ended meets anew.
            Err(error) => assert_eq!(error.kind(), Kind::PeerLost, "{error}"),
        }
    }
}

/// Pulls layers as their parts are mapped, also from ranks that ended, and compares them. The ring does not know of it,
/// so each buffer's first layer comes last.
fn pulls(engine: &Engine, layers: &[usize]) {
    for layer in layers.iter().rev() {
        engine.ring.pulls().pull(*layer, engine.stream()).unwrap();
        engine.rank.wait().unwrap();
        assert!(engine.shows(*layer), "layer {layer}");
    }
}

/// Ranks 2 and 3 end, and 2 is attached first: the others go on reading rank 3's part of layer 1 where rank 0 has it,
/// and drop that with rank 3.
#[test]
fn what_is_left_of_a_rank_stays_until_that_rank_is_back() {
    let set = [replica(1, 1, 0), replica(3, 0, 2), replica(3, 1, 1), replica(4, 1, 3)];
    let (folder, devices) = (Folder::new(), counted(4));
    let folder = &folder.0;
    let rank = |own: u32| {
        let faulty = &devices[own as usize];
        let mut engine = start(own, &devices, folder).unwrap();
        let before = faulty.backings() + 1;
        assert_eq!(changed(&mut engine, 1, &set), Ok(Outcome::Committed));
        if own >= 2 {
            drop(engine);
            engine = start(own, &devices, folder).unwrap();
        } else {
            loses(&mut engine, &[2, 3]);
            engine.ring.reroute().unwrap();
            readmits(&mut engine, 2);
            let reads = |engine: &Engine| [2, 3].map(|rank| engine.ring.pulls().reads(1, rank));
            assert_eq!(reads(&engine), [false, false]);
            engine.ring.reattach(2, &mut engine.links, PATIENCE).unwrap();
            // Of rank 2 there is the new process, of rank 3 what rank 0 holds.
            assert_eq!(reads(&engine), [true, false]);
            pulls(&engine, &[1]);
            let left = |one: &&Replica| one.rank != 2;
            assert_eq!(engine.ring.pulls().replicas(), set.iter().filter(left).cloned().collect::<Vec<_>>());
            let segments = |one: &Replica| owners(&engine.plan, one).iter().filter(|of| **of != 2).count();
            assert_eq!(faulty.backings(), before + set.iter().filter(left).map(segments).sum::<usize>());
            // Nothing is agreed on before all ranks are there.
            let mut change = engine.ring.replicate(2, &set, u64::MAX).unwrap();
            change.advance(u64::MAX, engine.stream()).unwrap();
            let stream = engine.stream();
            let error = change.share(&mut engine.links, stream, PATIENCE).unwrap_err();
            assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(3)), "{error}");
            drop(change);
            engine.ring.reattach(3, &mut engine.links, PATIENCE).unwrap();
            assert_eq!(engine.ring.pulls().replicas(), []);
            assert_eq!((faulty.backings(), faulty.unmapped()), (before, 0));
            engine.step().unwrap();
        }
        assert_eq!(changed(&mut engine, 3, &set), Ok(Outcome::Committed));
        assert_eq!(engine.ring.pulls().replicas(), set);
        (0..2).for_each(|_| engine.step().unwrap());
        engine
    };
    thread::scope(|scope| {
        let rank = &rank;
        let ranks = [0, 1, 2, 3].map(|own| scope.spawn(move || rank(own)));
        let ended = ranks.map(thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(Result::is_ok));
    });
}

/// Attaches a rank again, which may end meanwhile and come back once more.
fn attaches(engine: &mut Engine, rank: u32) {
    loop {
        readmits(engine, 1);
        match engine.ring.reattach(rank, &mut engine.links, PATIENCE) {
            Ok(()) => return,
            Err(error) => assert_eq!(error.kind(), Kind::PeerLost, "{error}"),
        }
    }
}

/// Waits for a word of a rank, and keeps what others say. False if a session ends first.
fn hears(engine: &mut Engine, of: u32) -> bool {
    loop {
        match engine.links.event(PATIENCE) {
            Ok(Some((rank, Event::Message { bytes, .. }))) if (rank, &bytes[..]) == (of, b"done") => {
                return true;
            }
            Ok(Some((rank, event))) => engine.links.set_aside(rank, event).unwrap(),
            Ok(None) => panic!("rank {of} says nothing"),
            Err(error) => {
                assert_eq!(error.kind(), Kind::PeerLost, "{error}");
                return false;
            }
        }
    }
}

fn held() -> [Replica; 4] {
    [replica(1, 1, 0), replica(3, 0, 1), replica(3, 1, 0), replica(4, 1, 2)]
}

/// Rank 0, of which the device refuses a mapping while it attaches rank 2. Returns whether it came to that.
fn refused_once(engine: &mut Engine, faulty: &Faulty, passing: usize) -> bool {
    let before = faulty.backings() + 1;
    assert_eq!(changed(engine, 1, &held()), Ok(Outcome::Committed));
    loses(engine, &[2]);
    engine.ring.reroute().unwrap();
    readmits(engine, 1);
    faulty.remaps(&[vec![None; passing], vec![Some(Kind::OsRefused)]].concat());
    let first = engine.ring.reattach(2, &mut engine.links, PATIENCE);
    let reached = faulty.remaps_left() == 0;
    faulty.remaps(&[]);
    match first {
        Ok(()) => assert!(!reached),
        Err(error) => {
            assert_eq!((error.kind(), reached), (Kind::OsRefused, true), "{error}");
            // Each part is read from the old process or from the new one, or from who has a copy.
            pulls(engine, &engine.layers());
            engine.ring.reroute().unwrap();
            let replicas = engine.ring.pulls().replicas();
            assert_eq!(engine.ring.pulls().reads(1, 2), !replicas.contains(&held()[0]), "{passing}");
            pulls(engine, &engine.layers());
            attaches(engine, 2);
        }
    }
    assert_eq!(engine.ring.pulls().replicas(), []);
    assert_eq!((faulty.backings(), faulty.unmapped()), (before, 0));
    engine.links.send(2, b"done", None).unwrap();
    reached
}

/// Each mapping of a rank's return refused once, of its parts and of what replicas leave: bytes are right all the time,
/// and the next process is attached.
#[test]
fn a_return_that_is_refused_half_way_is_made_good_by_the_next_process() {
    for passing in 0.. {
        let (folder, devices) = (Folder::new(), counted(3));
        let folder = &folder.0;
        let rank = |own: u32| {
            let mut engine = start(own, &devices, folder).unwrap();
            let mut reached = false;
            match own {
                0 => reached = refused_once(&mut engine, &devices[0], passing),
                1 => {
                    assert_eq!(changed(&mut engine, 1, &held()), Ok(Outcome::Committed));
                    loses(&mut engine, &[2]);
                    attaches(&mut engine, 2);
                    while !hears(&mut engine, 2) {
                        engine.ring.lost(2);
                        attaches(&mut engine, 2);
                    }
                }
                _ => {
                    assert_eq!(changed(&mut engine, 1, &held()), Ok(Outcome::Committed));
                    drop(engine);
                    engine = loop {
                        match start(own, &devices, folder) {
                            Ok(mut next) => {
                                if hears(&mut next, 0) {
                                    break next;
                                }
                            }
                            Err(error) => assert_eq!(error.kind(), Kind::PeerLost, "{error}"),
                        }
                    };
                    engine.links.send(1, b"done", None).unwrap();
                }
            }
            assert_eq!(changed(&mut engine, 2, &held()), Ok(Outcome::Committed));
            (0..2).for_each(|_| engine.step().unwrap());
            (engine, reached)
        };
        let reached = thread::scope(|scope| {
            let rank = &rank;
            let ranks = [0, 1, 2].map(|own| scope.spawn(move || rank(own)));
            // Sessions live until all ranks have ended their parts.
            ranks.map(|rank| rank.join().expect("a rank that ends well")).map(|(_, reached)| reached)[0]
        });
        if !reached {
            assert!(passing >= 6, "{passing}");
            return;
        }
    }
}
