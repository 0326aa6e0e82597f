//! Phases of a change and of an update by kinds of faults, by a seed: one rank is refused a call of the system,
//! sends and receives among them, or every call from one on, as one that is killed, or is stopped for longer than
//! the others wait. Every call ends, no layer that can be used shows another version than it says, a version is one
//! that all have, and descriptors and memory are those of before.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::peer::Limits;
use forebay::weights::Outcome;
use forebay::{Error, Kind, Result};

use crate::children::alone_in_a_process;
use crate::failing::alone;
use crate::windows::{Folder, patient};
use crate::world::{Draws, descriptors, soaks};
use crate::{Engine, Faulty, model};

/// Where the fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Reside,
    Fill,
    Share,
    Commit,
}

const PHASES: [Phase; 4] = [Phase::Reside, Phase::Fill, Phase::Share, Phase::Commit];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// One call is refused.
    Refused,
    /// One send is refused, which ends a session.
    Unsent,
    /// All calls are refused from one on.
    Dead,
    /// A call takes longer than the others wait.
    Stopped,
}

const FAULTS: [Fault; 4] = [Fault::Refused, Fault::Unsent, Fault::Dead, Fault::Stopped];

/// How long a silent rank lives.
const LOST: Duration = Duration::from_millis(300);
/// Less than any call waits for by itself, and more than all of a world's calls take.
const BOUND: Duration = Duration::from_secs(60);
const UNAIMED: u64 = u64::MAX;

/// The fault of a rank, at its n-th call from the aim on.
#[derive(Debug)]
struct Aimed {
    fault: Fault,
    left: AtomicU64,
    hit: AtomicU64,
}

impl Faults for Aimed {
    fn before(&self, call: Call) -> Option<i32> {
        let left = self.left.load(Ordering::Relaxed);
        if left == UNAIMED || (self.fault == Fault::Unsent && call != Call::Send) {
            return None;
        }
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
            return None;
        }
        self.hit.fetch_add(1, Ordering::Relaxed);
        if self.fault != Fault::Dead {
            self.left.store(UNAIMED, Ordering::Relaxed);
        }
        if self.fault == Fault::Stopped {
            thread::sleep(LOST + LOST / 2);
            return None;
        }
        Some(libc::ENOMEM)
    }
}

/// A world's fault.
#[derive(Clone, Copy, Debug)]
struct Case {
    phase: Phase,
    fault: Fault,
    rank: u32,
    ranks: u32,
    n: u64,
}

fn case(seed: u64) -> Case {
    let mut draws = Draws(seed);
    // Each pair of a phase and a fault in turn.
    let (phase, fault) = (PHASES[seed as usize % 4], FAULTS[seed as usize / 4 % 4]);
    let ranks = 2 + draws.below(2) as u32;
    let most = if fault == Fault::Unsent { 6 } else { 40 };
    Case { phase, fault, ranks, rank: draws.below(ranks.into()) as u32, n: draws.below(most) }
}

/// The work of one rank, up to its first error. `at` is told of each phase.
fn works(engine: &mut Engine, at: &dyn Fn(Phase)) -> Result<()> {
    let (all, stream) = (engine.layers(), engine.stream());
    engine.step()?;
    at(Phase::Reside);
    engine.ring.make_resident(1, stream)?;
    engine.step()?;
    engine.ring.make_sharded(1)?;
    at(Phase::Fill);
    let mut update = engine.ring.update(1, &all, u64::MAX)?;
    engine.fill(&mut update, &all)?;
    at(Phase::Share);
    engine.share(&mut update)?;
    update.verify(stream)?;
    at(Phase::Commit);
    let border = engine.border();
    match engine.ring.commit(&mut update, &mut engine.links, border)? {
        Outcome::Committed => engine.versions.fill(1),
        Outcome::Aborted(why) => return Err(why),
    }
    engine.step()
}

/// The versions of the layers that can be used.
fn shown(engine: &mut Engine) -> Vec<Option<u32>> {
    let version = |engine: &mut Engine, layer: usize| {
        engine.ring.pulls().layer(layer).ok()?;
        let version = engine.ring.pulls().version(layer).unwrap();
        match engine.ring.pulls().pull(layer, engine.stream()).and_then(|()| engine.rank.wait()) {
            Err(error) if error.kind() == Kind::DeviceFailed => return None,
            pulled => pulled.unwrap(),
        }
        engine.versions[layer] = version;
        assert!(engine.shows(layer), "layer {layer} shows no whole version {version}");
        Some(version)
    };
    engine.layers().into_iter().map(|layer| version(engine, layer)).collect()
}

/// What became of a rank.
struct Had {
    shown: Vec<Option<u32>>,
    error: Option<Error>,
    hit: bool,
    /// Its sessions, until all ranks have ended.
    _engine: Engine,
}

fn rank(own: u32, case: Case, folder: &Path) -> Had {
    let aimed = Arc::new(Aimed { fault: case.fault, left: UNAIMED.into(), hit: 0.into() });
    let aim = |n| aimed.left.store(n, Ordering::Relaxed);
    let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), aimed.clone()), false);
    let (device, faults): (Arc<dyn Device>, Arc<dyn Faults>) = (counted.clone(), aimed.clone());
    let limits = match case.fault {
        Fault::Stopped => Limits { lost: LOST, interval: LOST / 10, ..patient() },
        _ => patient(),
    };
    let versions = vec![0; model().len()];
    let mut engine = Engine::within(limits, &device, (own, case.ranks), folder, &faults, &versions).unwrap();
    let at = |phase| aim(if (own, phase) == (case.rank, case.phase) { case.n } else { UNAIMED });
    let error = works(&mut engine, &at).err();
    aim(UNAIMED);
    if error.is_some() {
        // It ends, and its memory can be looked at.
        engine.links = alone();
        let _ = engine.ring.abandon();
    }
    let shown = shown(&mut engine);
    // A process that is killed takes its memory with it, and so does one that ends because a layer cannot be used.
    let ends = case.fault == Fault::Dead || shown.contains(&None);
    assert!(ends || counted.unmapped() == 0, "{case:?}: {error:?}");
    Had { shown, error, hit: aimed.hit.load(Ordering::Relaxed) > 0, _engine: engine }
}

/// Returns whether the fault was reached.
fn world(case: Case) -> bool {
    let (folder, start) = (Folder::new(), Instant::now());
    let all: Vec<Had> = thread::scope(|scope| {
        let folder = &folder.0;
        let ranks: Vec<_> = (0..case.ranks).map(|own| scope.spawn(move || rank(own, case, folder))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panic!("{case:?}"))).collect()
    });
    assert!(start.elapsed() < BOUND, "{case:?}");
    let version = u32::from(all.iter().any(|had| had.shown.contains(&Some(1))));
    for (own, had) in (0..).zip(&all) {
        let whole = |shown: &Option<u32>| *shown == Some(version) || (shown.is_none() && own == case.rank);
        assert!(had.shown.iter().all(whole), "{case:?}, rank {own}: {:?}, {:?}", had.shown, had.error);
        if let Some(error) = had.error.as_ref().filter(|_| own != case.rank) {
            let told = matches!(error.kind(), Kind::PeerLost | Kind::Cancelled);
            assert!(told || case.fault == Fault::Stopped, "{case:?}, rank {own}: {error}");
        }
    }
    let hit = all.iter().any(|had| had.hit);
    // Without a fault all have the new version, unless a busy machine has stopped one.
    let whole = all.iter().all(|had| had.error.is_none());
    assert!(hit || case.fault == Fault::Stopped || (whole && version == 1), "{case:?}");
    hit
}

#[test]
fn no_fault_at_any_phase_leaves_a_wrong_weight() {
    const NAME: &str = "faults::no_fault_at_any_phase_leaves_a_wrong_weight";
    if !alone_in_a_process(NAME) {
        return;
    }
    let seeds = if soaks() { 5_000 } else { 200 };
    let (before, reached) = (descriptors(), Mutex::new(BTreeSet::new()));
    thread::scope(|scope| {
        for part in 0..8 {
            let reached = &reached;
            scope.spawn(move || {
                for seed in (part..seeds).step_by(8) {
                    let case = case(seed);
                    if world(case) {
                        reached.lock().unwrap().insert((case.phase, case.fault));
                    }
                }
            });
        }
    });
    assert_eq!(descriptors(), before);
    // Only the exchange of parts sends anything; others say that they live once in a second.
    let reached = reached.into_inner().unwrap();
    let silent = |pair: &(Phase, Fault)| pair.0 != Phase::Share && pair.1 == Fault::Unsent;
    let pairs = PHASES.into_iter().flat_map(|phase| FAULTS.map(|fault| (phase, fault)));
    let missed: Vec<_> = pairs.filter(|pair| !silent(pair) && !reached.contains(pair)).collect();
    assert!(missed.is_empty(), "{missed:?}");
}
