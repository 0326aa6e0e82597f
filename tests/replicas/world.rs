//! Worlds of a seed: three ranks step, change what is resident and which replicas there are, take new versions or give
//! something up, read around a rank that has died, and are started again, in any order. Every byte of every use is
//! compared, each page is read from a rank that has it by the naive map, and memory is counted.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::weights::{Border, Outcome, Place, Pull, Replica};

use crate::naive::{Probe, backings, holders, possible};
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, commit, grain, model, no_faults};

const RANKS: u32 = 3;
/// Things that all ranks do in a world.
const ACTS: usize = 8;

/// Numbers by a seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What all ranks do together; and the rank that gives it up before the border, if one does.
#[derive(Clone, Debug)]
enum Act {
    /// Steps, with changes of residence between them, each rank its own.
    Serve,
    Change(u32, BTreeSet<Replica>, Option<u32>),
    Update(u32, Vec<usize>, Option<u32>),
    /// A rank ends, and a new process takes its place.
    Restart(u32),
}

fn acts(seed: u64, possible: &[Replica]) -> Vec<Act> {
    let mut draws = Draws(seed);
    let mut number = 0;
    let act = |_| {
        number += 1 + draws.below(2) as u32;
        let gives_up = Some(draws.below(3 * u64::from(RANKS)) as u32).filter(|rank| *rank < RANKS);
        match draws.below(8) {
            0 => Act::Serve,
            1 => Act::Restart(draws.below(RANKS.into()) as u32),
            2 => Act::Update(number, vec![draws.below(model().len() as u64) as usize], gives_up),
            _ => {
                let part = 1 + draws.below(6);
                let wanted = possible.iter().filter(|_| draws.below(part) == 0).cloned().collect();
                Act::Change(number, wanted, gives_up)
            }
        }
    };
    (0..ACTS).map(act).collect()
}

/// A rank of a world: the newest of its processes.
struct Process {
    engine: Engine,
    counted: Arc<Faulty>,
    probe: Probe,
    set: BTreeSet<Replica>,
    /// Backings beside those of layers that were made resident and of replicas, before the first update or change.
    backings: usize,
    prepared: bool,
}

impl Process {
    fn start(own: u32, folder: &Path, versions: &[u32]) -> Process {
        let counted = Faulty::new(HostDevice::new(HostOptions::default()), false);
        counted.named(own);
        let device: Arc<dyn Device> = counted.clone();
        let engine = Engine::of_versions(&device, (own, RANKS), folder, &no_faults(), versions).unwrap();
        let probe = Probe::new(&engine, &counted);
        Process {
            backings: counted.backings(),
            engine,
            counted,
            probe,
            set: BTreeSet::new(),
            prepared: false,
        }
    }

    /// Some steps with changes between them.
    fn serve(&mut self, draws: &mut Draws) {
        for _ in 0..1 + draws.below(3) {
            let stream = self.engine.stream();
            let layer = draws.below(model().len() as u64) as usize;
            let least = self.engine.plan.bytes().device() + self.engine.ring.pulls().replica_bytes();
            match draws.below(4) {
                0 => drop(self.engine.ring.shrink(least + draws.below(8) * grain()).unwrap()),
                1 => drop(self.engine.ring.grow(least + draws.below(30) * grain(), stream).unwrap()),
                2 => self.engine.ring.make_resident(layer, stream).unwrap(),
                _ => self.engine.ring.make_sharded(layer).unwrap(),
            }
            self.engine.step().unwrap();
        }
    }

    fn change(&mut self, number: u32, wanted: &BTreeSet<Replica>, gives_up: Option<u32>, draws: &mut Draws) {
        self.prepared = true;
        let list: Vec<Replica> = wanted.iter().cloned().collect();
        let mut change = self.engine.ring.replicate(number, &list, u64::MAX).unwrap();
        while change.advance(1 + draws.below(6 * grain()), self.engine.stream()).unwrap() > 0 {
            if draws.below(4) == 0 {
                self.serve(draws);
            }
        }
        let stream = self.engine.stream();
        change.share(&mut self.engine.links, stream, PATIENCE).unwrap();
        self.serve(draws);
        if gives_up == Some(self.engine.own()) {
            return change.abort().unwrap();
        }
        let outcome = commit(&mut self.engine, &mut change).unwrap();
        assert_eq!(outcome == Outcome::Committed, gives_up.is_none(), "{outcome:?}");
        if gives_up.is_none() {
            self.set.clone_from(wanted);
        }
    }

    fn update(&mut self, version: u32, layers: &[usize], gives_up: Option<u32>) {
        self.prepared = true;
        let mut update = self.engine.filled(version, layers).unwrap();
        self.engine.share(&mut update).unwrap();
        self.engine.step().unwrap();
        if gives_up == Some(self.engine.own()) {
            return update.abort().unwrap();
        }
        let border = Border { step: version.into(), ..self.engine.border() };
        let outcome = self.engine.commit(&mut update, layers, border).unwrap();
        assert_eq!(outcome == Outcome::Committed, gives_up.is_none(), "{outcome:?}");
        if gives_up.is_none() {
            self.set.retain(|one| !layers.contains(&one.layer));
        }
    }

    /// Another rank ends and comes back. Before it does, this one may read around it.
    fn outlives(&mut self, rank: u32, draws: &mut Draws) {
        let (engine, set) = (&mut self.engine, &mut self.set);
        // Others may have come further already: what they say is for a later call.
        let lost = loop {
            match engine.links.event(PATIENCE) {
                Ok(Some((other, event))) => engine.links.set_aside(other, event).unwrap(),
                Ok(None) => panic!("rank {rank} does not end"),
                Err(error) => break error,
            }
        };
        assert_eq!(lost.number("rank"), Some(rank.into()), "{lost}");
        engine.ring.lost(rank);
        if draws.below(2) == 0 {
            engine.ring.reroute().unwrap();
            for layer in engine.plan.layers().to_vec() {
                let pages = 0..layer.layout.pages();
                let only = |page| holders(&engine.plan, set, layer.layer, page) == [rank].into();
                let needs = layer.place != Place::Resident && pages.into_iter().any(only);
                assert_eq!(engine.ring.pulls().reads(layer.layer, rank), needs, "layer {}", layer.layer);
            }
        }
        assert_eq!(engine.links.readmit(PATIENCE).unwrap(), Some(rank));
        engine.ring.reattach(rank, &mut engine.links, PATIENCE).unwrap();
        set.clear();
        // Where the next one has ended already, what there is of it stays until it is back too.
        let left = engine.ring.pulls().replicas();
        if !left.is_empty() {
            assert!(engine.links.lost().next().is_some() && left.iter().all(|one| one.rank != rank));
            engine.step().unwrap();
            engine.ring.drop_replicas().unwrap();
        }
    }

    /// All steps find their layers, from where the naive map says.
    fn check(&mut self) {
        self.probe.check(&mut self.engine, &self.set);
    }

    /// Nothing is held beside what the plan and the replicas say, but for one granule.
    fn end(&mut self) {
        self.check();
        let least = self.engine.plan.bytes().device() + self.engine.ring.pulls().replica_bytes();
        self.engine.ring.shrink(least).unwrap();
        assert_eq!(self.engine.ring.pulls().device_bytes(), least);
        let replicas = backings(&self.engine.plan, &self.set);
        let more = self.counted.backings() - self.backings - replicas;
        assert!(more <= usize::from(self.prepared), "{more} backings more");
        self.check();
        self.engine.ring.drop_replicas().unwrap();
        assert_eq!(self.counted.backings(), self.backings + more);
        self.set.clear();
        self.check();
    }
}

/// One rank's part of a world.
fn rank(own: u32, seed: u64, folder: &Path) -> Process {
    let mut process = Process::start(own, folder, &vec![0; model().len()]);
    let mut draws = Draws(seed ^ (u64::from(own) << 40));
    for act in acts(seed, &possible(&process.engine.plan)) {
        match act {
            Act::Serve => process.serve(&mut draws),
            Act::Change(number, wanted, gives_up) => process.change(number, &wanted, gives_up, &mut draws),
            Act::Update(version, layers, gives_up) => process.update(version, &layers, gives_up),
            Act::Restart(rank) if rank == own => {
                let versions = process.engine.versions.clone();
                drop(process);
                process = Process::start(own, folder, &versions);
            }
            Act::Restart(rank) => process.outlives(rank, &mut draws),
        }
        process.check();
    }
    process.end();
    process
}

fn world(seed: u64) {
    let folder = Folder::new();
    let folder = &folder.0;
    thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|own| scope.spawn(move || rank(own, seed, folder)));
        // Sessions live until all ranks have ended their parts.
        let ended = ranks.map(thread::ScopedJoinHandle::join);
        assert!(
            ended.iter().all(Result::is_ok),
            "seed {seed}: {:?}",
            acts(seed, &possible(&crate::plan(0, RANKS)))
        );
    });
}

#[test]
fn every_world_reads_the_replicas_that_there_are() {
    let seeds = if std::env::var_os("FOREBAY_SOAK").is_some() { 5_000 } else { 200 };
    // Ranks wait for each other, so several worlds at once are quicker.
    thread::scope(|scope| {
        for part in 0..8 {
            scope.spawn(move || (part..seeds).step_by(8).for_each(world));
        }
    });
}
