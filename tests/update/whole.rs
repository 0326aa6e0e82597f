//! Layers that every rank has whole: ranks with different bytes in one refuse each other when they share, when they
//! update, and when one comes back.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Slice};
use forebay::peer::Links;
use forebay::weights::{Outcome, Place, Pulls};
use forebay::{Error, Kind, Result};

use crate::windows::{Folder, MODEL, PATIENCE, Rank, filler, patient, stamp_of};
use crate::{Engine, counted, group, no_faults, plan};

/// The layer that the plan keeps resident.
fn whole() -> usize {
    let plan = plan(0, 3);
    let mut found = plan.layers().iter().filter(|layer| layer.place == Place::Resident);
    let (layer, more) = (found.next().unwrap().layer, found.next());
    assert!(more.is_none());
    layer
}

/// Checks that an error is of the layer, and names a rank out of these.
fn names(error: &Error, ranks: &[u64]) {
    let rank = error.number("rank").filter(|rank| ranks.contains(rank));
    assert!(rank.is_some() && error.number("layer") == Some(whole() as u64), "{error}");
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
}

fn start(rank: u32, versions: &[u32], folder: &Folder) -> Result<Engine> {
    let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
    Engine::of_versions(&device, (rank, 3), &folder.0, &no_faults(), versions)
}

/// A tensor of a layer as version 1 has it, but for one byte.
fn other(rank: &Rank, own: u32, layer: usize) -> (String, Slice) {
    let plan = plan(own, 3);
    let placed = plan.layers()[layer].layout.tensors()[0].clone();
    let at = placed.offset..placed.offset + placed.bytes;
    let mut bytes: Vec<u8> = at.map(|at| stamp_of(filler(&plan, layer), 1, layer, at)).collect();
    bytes[placed.bytes as usize / 2] ^= 1;
    let from = rank.holds(&bytes);
    (placed.name, from)
}

/// Rank 2 begins with other bytes of one layer. Where that is one that each rank fills with bytes of its own, nothing
/// is refused.
#[test]
fn ranks_that_begin_with_different_bytes_refuse_each_other() {
    for layer in 0..plan(0, 3).layers().len() {
        let (folder, barrier, ended) = (Folder::new(), Barrier::new(3), AtomicU32::new(0));
        let begin = |own: u32| {
            let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
            let mut rank = Rank::new(&device, plan(own, 3), Pulls::default(), &no_faults()).unwrap();
            rank.fill().unwrap();
            if own == 2 {
                let (name, from) = other(&rank, own, layer);
                rank.windows.fill(layer, &name, from, rank.stream).unwrap();
                rank.wait().unwrap();
            }
            let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
            let mut links = Links::meet(&folder.0, hello, patient(), no_faults()).unwrap();
            // All have met before one of them fails and ends its sessions.
            barrier.wait();
            let shared = rank.windows.share(&mut links, rank.stream, PATIENCE);
            ended.fetch_add(1, Ordering::Relaxed);
            let start = Instant::now();
            while shared.is_ok() && ended.load(Ordering::Relaxed) < 3 && start.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(1));
            }
            shared
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || begin(rank))).collect();
            let mut found = 0;
            for (thread, others) in threads.into_iter().zip([[2, 2], [2, 2], [0, 1]]) {
                match thread.join().unwrap() {
                    Ok(()) => assert_ne!(layer, whole()),
                    Err(error) => {
                        assert_eq!(layer, whole(), "{error}");
                        // Another rank may have found it first, and ended.
                        if error.kind() != Kind::PeerLost {
                            names(&error, &others);
                            found += 1;
                        }
                    }
                }
            }
            assert_eq!(found > 0, layer == whole());
        });
    }
}

/// Rank 1 fills the layer's new version with one other byte. No rank takes it, and all take the next one.
#[test]
fn an_update_with_different_bytes_is_taken_by_none() {
    group(&counted(3), |engine, faulty| {
        let all = engine.layers();
        engine.step().unwrap();
        let held = faulty.backings();
        let mut update = engine.filled(1, &all).unwrap();
        if engine.own() == 1 {
            let (name, from) = other(&engine.rank, engine.own(), whole());
            update.fill(whole(), &name, from, engine.stream()).unwrap();
            engine.rank.wait().unwrap();
        }
        let error = engine.share(&mut update).unwrap_err();
        match error.kind() {
            Kind::Corrupt if engine.own() == 1 => names(&error, &[0, 2]),
            Kind::Corrupt => names(&error, &[1]),
            other => assert_eq!(other, Kind::Cancelled, "{error}"),
        }
        engine.step().unwrap();
        drop(update);
        // The granule of parked addresses stays.
        assert_eq!(faulty.backings(), held + 1);
        assert_eq!(engine.updates(2, &all), Ok(Outcome::Committed));
    });
}

/// A further version, at the same border on all ranks, which have made different numbers of steps.
fn takes(engine: &mut Engine) {
    engine.step().unwrap();
    engine.step = 100;
    assert_eq!(engine.updates(2, &engine.layers()), Ok(Outcome::Committed));
}

/// Rank 2 ends after a commit, and comes back with the old bytes of the layer and the new ones of the others: it is
/// refused at the door. With the new ones of all it is taken, and a further update goes on.
#[test]
fn a_rank_that_comes_back_with_old_bytes_is_refused() {
    let folder = Folder::new();
    let count = plan(0, 3).layers().len();
    let first = |rank: u32| {
        let mut engine = start(rank, &vec![0; count], &folder).unwrap();
        assert_eq!(engine.updates(1, &engine.layers()), Ok(Outcome::Committed));
        engine
    };
    let survivor = |rank: u32| {
        let mut engine = first(rank);
        while engine.links.event(PATIENCE).is_ok() {}
        engine.ring.lost(2);
        let mut refused = 0;
        while let Some(error) = match engine.links.readmit(PATIENCE) {
            Ok(back) => {
                assert_eq!(back, Some(2));
                None
            }
            Err(error) => Some(error),
        } {
            let content = error.kind() == Kind::InvalidConfig && error.number("rank") == Some(2);
            assert!(content || error.kind() == Kind::PeerLost, "{error}");
            refused += u32::from(content);
        }
        assert!(refused > 0);
        engine.ring.reattach(2, &mut engine.links, PATIENCE).unwrap();
        takes(&mut engine);
        engine
    };
    thread::scope(|scope| {
        let others: Vec<_> = [0, 1].map(|rank| scope.spawn(move || survivor(rank))).into_iter().collect();
        drop(first(2));
        let mut old = vec![1; count];
        old[whole()] = 0;
        assert!(start(2, &old, &folder).is_err());
        let mut engine = start(2, &vec![1; count], &folder).unwrap();
        takes(&mut engine);
        // All sessions live until the last rank has ended.
        drop(others.into_iter().map(|other| other.join().unwrap()).collect::<Vec<_>>());
    });
}
