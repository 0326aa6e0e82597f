//! Ranks that come back while others have begun an update.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use forebay::Kind;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::weights::{Border, Outcome, Update};

use crate::windows::{Folder, PATIENCE};
use crate::{Engine, no_faults};

fn start(rank: u32, folder: &Folder) -> Engine {
    let device: Arc<dyn Device> = HostDevice::new(HostOptions::default());
    Engine::new(&device, (rank, 3), &folder.0, &no_faults()).unwrap()
}

/// Steps, and looks between them what others say and whether rank 2 is back, without waiting.
fn serves_until_2_is_back(engine: &mut Engine) {
    loop {
        engine.step().unwrap();
        match engine.links.event(Duration::ZERO) {
            Ok(Some((rank, event))) => engine.links.set_aside(rank, event).unwrap(),
            Ok(None) => thread::sleep(Duration::from_millis(1)),
            Err(error) => {
                assert_eq!(error.number("rank"), Some(2), "{error}");
                engine.ring.lost(2);
                engine.ring.abandon().unwrap();
                break;
            }
        }
    }
    // What rank 1 said before is kept meanwhile, once.
    let start = std::time::Instant::now();
    while engine.links.readmit(Duration::ZERO).unwrap().is_none() {
        assert!(start.elapsed() < PATIENCE, "rank 2 does not come back");
        match engine.links.event(Duration::ZERO) {
            Ok(Some((rank, event))) => engine.links.set_aside(rank, event).unwrap(),
            Ok(None) => thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// The ranks have made different numbers of steps, so the border is their first one after version 2 was shared.
fn commits(engine: &mut Engine, update: &mut Update) {
    let border = Border { step: 0, ..engine.border() };
    assert_eq!(engine.commit(update, &engine.layers(), border), Ok(Outcome::Committed));
    engine.step().unwrap();
}

fn takes(engine: &mut Engine) {
    let mut update = engine.filled(2, &engine.layers()).unwrap();
    engine.share(&mut update).unwrap();
    commits(engine, &mut update);
}

/// Rank 1 begins an update of version 1, of which rank 0 hears while it steps and rank 2 ends. Version 2 is refused
/// before rank 2 is attached, which tells that rank nothing; after it the same call succeeds.
#[test]
fn an_update_goes_on_when_a_rank_is_attached_again() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            let mut engine = start(2, &folder);
            // Rank 1 has begun.
            engine.links.event(PATIENCE).unwrap().unwrap();
            drop(engine);
            let mut engine = start(2, &folder);
            engine.step().unwrap();
            takes(&mut engine);
            engine
        });
        let first = scope.spawn(|| {
            let mut engine = start(1, &folder);
            let mut update = engine.filled(1, &engine.layers()).unwrap();
            let error = engine.share(&mut update).unwrap_err();
            assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(2)), "{error}");
            drop(update);
            engine.ring.lost(2);
            assert_eq!(engine.links.readmit(PATIENCE), Ok(Some(2)));
            engine.ring.reattach(2, &mut engine.links, PATIENCE).unwrap();
            takes(&mut engine);
            engine
        });
        let mut engine = start(0, &folder);
        serves_until_2_is_back(&mut engine);
        let mut update = engine.filled(2, &engine.layers()).unwrap();
        for _ in 0..2 {
            let error = engine.share(&mut update).unwrap_err();
            assert_eq!((error.kind(), error.number("rank")), (Kind::InvalidState, Some(2)), "{error}");
        }
        engine.ring.reattach(2, &mut engine.links, PATIENCE).unwrap();
        engine.step().unwrap();
        engine.share(&mut update).unwrap();
        commits(&mut engine, &mut update);
        // All sessions live until the last rank has ended.
        drop((first.join().unwrap(), second.join().unwrap()));
    });
}
