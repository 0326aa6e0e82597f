//! Worlds of a seed: three ranks step, change what is resident, take new versions or give them up, and are started
//! again, in any order. Every byte of every use is compared, and memory is counted.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::weights::Outcome;

use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, grain, model, no_faults};

const RANKS: u32 = 3;
/// Things that all ranks do in a world.
const ACTS: usize = 8;
/// Far more than all layers take.
const MUCH: u64 = 1 << 40;

/// Numbers by a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What all ranks do together.
#[derive(Clone, Debug)]
enum Act {
    /// Steps, with changes of residence between them, each rank its own.
    Serve,
    /// A new version of some layers; a rank that gives it up before the border, if one does.
    Update { version: u32, layers: Vec<usize>, gives_up: Option<u32> },
    /// A rank ends, and a new process takes its place.
    Restart(u32),
}

fn acts(seed: u64) -> Vec<Act> {
    let mut draws = Draws(seed);
    let mut version = 0;
    let act = |_| match draws.below(4) {
        0 => Act::Serve,
        1 => Act::Restart(draws.below(RANKS.into()) as u32),
        _ => {
            version += 1 + draws.below(2) as u32;
            let layers: BTreeSet<usize> =
                (0..1 + draws.below(5)).map(|_| draws.below(model().len() as u64) as usize).collect();
            let gives_up = Some(draws.below(3 * u64::from(RANKS)) as u32).filter(|rank| *rank < RANKS);
            Act::Update { version, layers: layers.into_iter().collect(), gives_up }
        }
    };
    (0..ACTS).map(act).collect()
}

/// A rank of a world: the newest of its processes.
struct Process {
    engine: Engine,
    counted: Arc<Faulty>,
    /// Backings and ranges beside those of layers that were made resident, before the first update.
    backings: usize,
    updated: bool,
}

impl Process {
    fn start(own: u32, folder: &Path, versions: &[u32]) -> Process {
        let counted = Faulty::new(HostDevice::new(HostOptions::default()), false);
        let device: Arc<dyn Device> = counted.clone();
        let engine = Engine::of_versions(&device, (own, RANKS), folder, &no_faults(), versions).unwrap();
        Process { backings: counted.backings(), engine, counted, updated: false }
    }

    /// Some steps with changes between them.
    fn serve(&mut self, draws: &mut Draws) {
        for _ in 0..1 + draws.below(3) {
            let stream = self.engine.stream();
            let layer = draws.below(model().len() as u64) as usize;
            let least = self.engine.plan.bytes().device();
            match draws.below(4) {
                0 => drop(self.engine.ring.shrink(least + draws.below(8) * grain()).unwrap()),
                1 => drop(self.engine.ring.grow(least + draws.below(30) * grain(), stream).unwrap()),
                2 => self.engine.ring.make_resident(layer, stream).unwrap(),
                _ => self.engine.ring.make_sharded(layer).unwrap(),
            }
            self.engine.step().unwrap();
        }
    }

    fn update(&mut self, version: u32, layers: &[usize], gives_up: Option<u32>) {
        let mut update = self.engine.filled(version, layers).unwrap();
        self.engine.share(&mut update).unwrap();
        self.engine.step().unwrap();
        self.updated = true;
        if gives_up == Some(self.engine.own()) {
            update.abort().unwrap();
            return;
        }
        let border = self.engine.border();
        let border = forebay::weights::Border { step: version.into(), ..border };
        let outcome = self.engine.commit(&mut update, layers, border).unwrap();
        match gives_up {
            None => assert_eq!(outcome, Outcome::Committed),
            Some(_) => assert!(matches!(outcome, Outcome::Aborted(_)), "{outcome:?}"),
        }
    }

    /// Another rank ends and comes back.
    fn outlives(&mut self, rank: u32) {
        let engine = &mut self.engine;
        // Others may have come further already: what they say is for a later call.
        let lost = loop {
            match engine.links.event(PATIENCE) {
                Ok(Some((of, event))) => engine.links.set_aside(of, event).unwrap(),
                Ok(None) => panic!("rank {rank} does not end"),
                Err(error) => break error,
            }
        };
        assert_eq!(lost.number("rank"), Some(rank.into()), "{lost}");
        engine.ring.lost(rank);
        assert_eq!(engine.links.readmit(PATIENCE).unwrap(), Some(rank));
        engine.ring.reattach(rank, &mut engine.links, PATIENCE).unwrap();
    }

    /// All steps find their layers, and nothing is held beside what the plan says, but for one granule of updates.
    fn check(&mut self) {
        self.engine.step().unwrap();
        let least = self.engine.plan.bytes().device();
        self.engine.ring.shrink(least).unwrap();
        assert_eq!(self.engine.ring.pulls().device_bytes(), least);
        let more = self.counted.backings() - self.backings;
        assert!(more <= usize::from(self.updated), "{more} backings more");
        self.engine.ring.grow(MUCH, self.engine.stream()).unwrap();
        self.engine.step().unwrap();
    }
}

/// One rank's part of a world.
fn rank(own: u32, seed: u64, folder: &Path) -> Process {
    let mut process = Process::start(own, folder, &vec![0; model().len()]);
    let mut draws = Draws(seed ^ (u64::from(own) << 40));
    for act in acts(seed) {
        match act {
            Act::Serve => process.serve(&mut draws),
            Act::Update { version, layers, gives_up } => process.update(version, &layers, gives_up),
            Act::Restart(rank) if rank == own => {
                let versions = process.engine.versions.clone();
                drop(process);
                process = Process::start(own, folder, &versions);
            }
            Act::Restart(rank) => process.outlives(rank),
        }
        process.engine.step().unwrap();
    }
    process.check();
    process
}

fn world(seed: u64) {
    let folder = Folder::new();
    let folder = &folder.0;
    thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|own| scope.spawn(move || rank(own, seed, folder)));
        // Sessions live until all ranks have ended their parts.
        let ended = ranks.map(thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(Result::is_ok), "seed {seed}: {:?}", acts(seed));
    });
}

#[test]
fn every_world_has_one_version_at_a_time() {
    let seeds = if std::env::var_os("FOREBAY_SOAK").is_some() { 5_000 } else { 200 };
    // Ranks wait for each other, so several worlds at once are quicker.
    thread::scope(|scope| {
        for part in 0..8 {
            scope.spawn(move || (part..seeds).step_by(8).for_each(world));
        }
    });
}
