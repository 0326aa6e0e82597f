//! What an update does with the sessions: they are served while its parts are hashed, and who was told of the old
//! version has to meet anew.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::weights::Outcome;

use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, counted, frames, model, no_faults};

/// How many copies a device had made whenever its rank looked at a session.
#[derive(Debug)]
struct Looks(Arc<Faulty>, Mutex<BTreeSet<u64>>);

impl Faults for Looks {
    fn before(&self, call: Call) -> Option<i32> {
        if call == Call::Receive {
            self.1.lock().unwrap().insert(self.0.copied());
        }
        None
    }
}

fn host() -> Arc<dyn Device> {
    HostDevice::new(HostOptions::default())
}

#[test]
fn the_sessions_are_served_between_two_layers_that_are_hashed() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut engine = Engine::new(&host(), (1, 2), &folder.0, &no_faults()).unwrap();
            let mut update = engine.filled(1, &engine.layers()).unwrap();
            engine.share(&mut update).unwrap();
            engine
        });
        let counted = counted(1).remove(0);
        let looks = Arc::new(Looks(counted.clone(), Mutex::default()));
        let (device, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (counted.clone(), looks.clone());
        let mut engine = Engine::new(&device, (0, 2), &folder.0, &faults).unwrap();
        let mut update = engine.filled(1, &engine.layers()).unwrap();
        let before = counted.copied();
        looks.1.lock().unwrap().clear();
        engine.share(&mut update).unwrap();
        // A layer's part is hashed by one copy.
        let hashed = counted.copied() - before;
        let looked = looks.1.lock().unwrap().clone();
        assert!(hashed >= 3, "{hashed}");
        assert!((0..=hashed).all(|copies| looked.contains(&(before + copies))), "{before}: {looked:?}");
        drop(other.join().unwrap());
    });
}

#[test]
fn who_was_told_of_the_old_version_meets_anew() {
    let (folder, (tells, new)) = (Folder::new(), channel());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut engine = Engine::new(&host(), (1, 2), &folder.0, &no_faults()).unwrap();
            let all = engine.layers();
            let mut update = engine.filled(1, &all).unwrap();
            engine.share(&mut update).unwrap();
            let border = engine.border();
            assert_eq!(engine.commit(&mut update, &all, border), Ok(Outcome::Committed));
            tells.send(*engine.links.own()).unwrap();
        });
        let mut engine = Engine::new(&host(), (0, 2), &folder.0, &no_faults()).unwrap();
        let all = engine.layers();
        // It is told what this rank holds, and says nothing yet.
        let (own, mut early) = UnixStream::pair().unwrap();
        let old = *engine.links.own();
        engine.links.offer(own).unwrap();
        assert_eq!(engine.links.readmit(Duration::ZERO), Ok(None));
        let mut update = engine.filled(1, &all).unwrap();
        engine.share(&mut update).unwrap();
        let border = engine.border();
        assert_eq!(engine.commit(&mut update, &all, border), Ok(Outcome::Committed));
        let error = engine.links.event(PATIENCE).unwrap_err();
        assert_eq!(error.number("rank"), Some(1), "{error}");
        engine.ring.lost(1);
        // The connection is closed, so this is not said to anyone.
        let _ = early.write_all(&frames::hello(new.recv().unwrap()));
        assert_eq!(engine.links.readmit(Duration::from_millis(20)), Ok(None));
        let mut told = vec![0; frames::hello(old).len()];
        early.read_exact(&mut told).unwrap();
        assert_eq!(told, frames::hello(old));
        // A process that meets now comes back.
        let again = scope.spawn(|| {
            Engine::of_versions(&host(), (1, 2), &folder.0, &no_faults(), &vec![1; model().len()]).unwrap()
        });
        assert_eq!(engine.links.readmit(PATIENCE), Ok(Some(1)));
        engine.ring.reattach(1, &mut engine.links, PATIENCE).unwrap();
        engine.step().unwrap();
        again.join().unwrap().step().unwrap();
    });
}
