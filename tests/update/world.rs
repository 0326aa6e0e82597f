//! Worlds of a seed: three ranks step, change what is resident, take new versions or give them up at any point, end
//! at any point and are started again, in any order. All ranks know the acts before, and a list of versions, which
//! the acts alone change, says what each byte of each use is. Memory is counted, in the long one descriptors too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use forebay::Kind;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::peer::Event;
use forebay::weights::{Border, Outcome, Update};

use crate::children::alone_in_a_process;
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, Faulty, grain, model, no_faults};

const RANKS: u32 = 3;
/// Things that all ranks do in a world of many.
const ACTS: u64 = 8;
/// Far more than all layers take.
const MUCH: u64 = 1 << 40;

/// Numbers by a seed.
pub struct Draws(pub u64);

impl Draws {
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    fn rank(&mut self) -> u32 {
        self.below(RANKS.into()) as u32
    }
}

/// How an update ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Committed,
    /// All give it up with so many layers filled.
    GivenUp(usize),
    /// This rank cannot let its parts out.
    Refused(u32),
    /// This rank gives it up when it is shared.
    Aborted(u32),
    /// This rank comes to another border.
    Differs(u32),
    /// This rank ends with so many layers filled, when it has shared, or when it has committed.
    DiesFilling(u32, usize),
    DiesShared(u32),
    DiesCommitted(u32),
}

/// What all ranks do together.
#[derive(Clone, Debug)]
enum Act {
    /// So many steps, with changes between them, each rank its own.
    Serve(u64),
    /// A new version of some layers.
    Update { version: u32, layers: Vec<usize>, ends: Ends },
    /// Ranks end in a step, and new processes take their places.
    Restart(BTreeSet<u32>),
    /// Nothing is held but what was held before.
    Count,
}

impl Act {
    /// The ranks that end in it.
    fn dead(&self) -> BTreeSet<u32> {
        match self {
            Act::Restart(ranks) => ranks.clone(),
            Act::Update {
                ends: Ends::DiesFilling(rank, _) | Ends::DiesShared(rank) | Ends::DiesCommitted(rank),
                ..
            } => [*rank].into(),
            _ => BTreeSet::new(),
        }
    }
}

/// Acts, and the version of each layer behind each of them.
type History = Vec<(Act, Vec<u32>)>;

fn update(draws: &mut Draws, version: u32) -> Act {
    let count = model().len() as u64;
    let some: BTreeSet<usize> = (0..1 + draws.below(count)).map(|_| draws.below(count) as usize).collect();
    let mut layers: Vec<usize> = some.into_iter().collect();
    let (rank, filled) = (draws.rank(), draws.below(layers.len() as u64) as usize);
    let ends = match draws.below(16) {
        0 => Ends::GivenUp(filled),
        1 => Ends::Refused(rank),
        2 => Ends::Aborted(rank),
        3 => Ends::Differs(rank),
        4 => Ends::DiesFilling(rank, filled),
        5 => Ends::DiesShared(rank),
        6 => Ends::DiesCommitted(rank),
        _ => Ends::Committed,
    };
    if matches!(ends, Ends::Refused(_)) {
        // Of any fewer it may own no part.
        layers = (0..model().len()).collect();
    }
    Act::Update { version, layers, ends }
}

/// The history of a seed, with at least so many acts and steps, counted or not.
fn history(seed: u64, acts: u64, steps: u64, counts: bool) -> History {
    let (mut draws, mut version, mut versions) = (Draws(seed), 0, vec![0; model().len()]);
    let (mut all, mut done) = (History::new(), 0);
    while (all.len() as u64) < acts || done < steps {
        let act = match draws.below(8) {
            0..=2 => Act::Serve(1 + draws.below(3)),
            3 => Act::Restart((0..1 + draws.below(4) / 3).map(|_| draws.rank()).collect()),
            _ => {
                version += 1 + draws.below(2) as u32;
                update(&mut draws, version)
            }
        };
        if let Act::Update { version, layers, ends: Ends::Committed | Ends::DiesCommitted(_) } = &act {
            layers.iter().for_each(|layer| versions[*layer] = *version);
        }
        // There is a step behind each.
        done += if let Act::Serve(steps) = act { steps + 1 } else { 1 };
        all.push((act, versions.clone()));
        if counts && all.len() % 50 > 47 {
            // What a failed update has left on the way is dropped by the next one.
            version += 1;
            versions.fill(version);
            let layers = (0..model().len()).collect();
            all.push((Act::Update { version, layers, ends: Ends::Committed }, versions.clone()));
            all.push((Act::Count, versions.clone()));
        }
    }
    all
}

/// Refuses to let memory out of the process, once, when it is told.
#[derive(Debug, Default)]
struct KeepsIn(AtomicBool);

impl Faults for KeepsIn {
    fn before(&self, call: Call) -> Option<i32> {
        (call == Call::Duplicate && self.0.swap(false, Ordering::Relaxed)).then_some(libc::EMFILE)
    }
}

/// What the ranks of a world have in common.
struct World {
    seed: u64,
    history: History,
    folder: Folder,
    /// Descriptors of the process where the acts count them, without those that each first update leaves.
    open: AtomicUsize,
    /// Processes that have begun an update.
    updated: AtomicUsize,
}

/// A rank of a world: the newest of its processes.
struct Process<'a> {
    world: &'a World,
    engine: Engine,
    counted: Arc<Faulty>,
    keeps: Arc<KeepsIn>,
    /// Backings beside those of layers that were made resident, before the first update.
    backings: usize,
    updated: bool,
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        self.world.updated.fetch_sub(usize::from(self.updated), Ordering::Relaxed);
    }
}

impl<'a> Process<'a> {
    fn start(own: u32, world: &'a World, versions: &[u32]) -> Process<'a> {
        let keeps = Arc::new(KeepsIn::default());
        let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), keeps.clone()), false);
        let device: Arc<dyn Device> = counted.clone();
        let folder = &world.folder.0;
        let engine = Engine::of_versions(&device, (own, RANKS), folder, &no_faults(), versions).unwrap();
        Process { world, backings: counted.backings(), engine, counted, keeps, updated: false }
    }

    /// Some steps with changes between them.
    fn serve(&mut self, steps: u64, draws: &mut Draws) {
        for _ in 0..steps {
            let stream = self.engine.stream();
            let layer = draws.below(model().len() as u64) as usize;
            let least = self.engine.plan.bytes().device();
            match draws.below(5) {
                0 => drop(self.engine.ring.shrink(least + draws.below(8) * grain()).unwrap()),
                1 => drop(self.engine.ring.grow(least + draws.below(30) * grain(), stream).unwrap()),
                2 => self.engine.ring.make_resident(layer, stream).unwrap(),
                // A graph that changes nothing.
                3 => self.engine.ring.launch(stream, || Ok(())).unwrap(),
                _ => self.engine.ring.make_sharded(layer).unwrap(),
            }
            self.engine.step().unwrap();
        }
    }

    /// An update up to its end.
    fn update(&mut self, version: u32, layers: &[usize], ends: Ends) {
        let own = self.engine.own();
        self.world
            .updated
            .fetch_add(usize::from(!std::mem::replace(&mut self.updated, true)), Ordering::Relaxed);
        let mut update = self.engine.ring.update(version, layers, u64::MAX).unwrap();
        for (filled, layer) in layers.iter().enumerate() {
            if ends == Ends::GivenUp(filled) || ends == Ends::DiesFilling(own, filled) {
                return;
            }
            self.engine.fill_one(&mut update, *layer).unwrap();
            self.engine.step().unwrap();
        }
        self.keeps.0.store(ends == Ends::Refused(own), Ordering::Relaxed);
        let shared = self.engine.share(&mut update);
        assert!(!self.keeps.0.load(Ordering::Relaxed));
        if matches!(ends, Ends::Refused(_) | Ends::DiesFilling(..)) {
            shared.unwrap_err();
            return;
        }
        shared.unwrap();
        self.engine.step().unwrap();
        if ends == Ends::DiesShared(own) {
            return;
        }
        if ends == Ends::Aborted(own) {
            return update.abort().unwrap();
        }
        self.commit(&mut update, layers, ends);
    }

    fn commit(&mut self, update: &mut Update, layers: &[usize], ends: Ends) {
        let differs = u64::from(ends == Ends::Differs(self.engine.own()));
        let border = Border { step: u64::from(update.version()) << 1 | differs, ..self.engine.border() };
        let outcome = self.engine.commit(update, layers, border).unwrap();
        match ends {
            Ends::Committed | Ends::DiesCommitted(_) => assert_eq!(outcome, Outcome::Committed),
            _ => assert!(matches!(outcome, Outcome::Aborted(_)), "{outcome:?}"),
        }
    }

    /// Other ranks end and come back.
    fn outlives(&mut self, dead: &BTreeSet<u32>) {
        let engine = &mut self.engine;
        let lost = |engine: &Engine| engine.links.lost().map(|(rank, _)| rank).collect::<BTreeSet<u32>>();
        while lost(engine) != *dead {
            match engine.links.event(PATIENCE) {
                // Others may have come further already: what they say is for a later call.
                Ok(Some((of, event))) => engine.links.set_aside(of, event).unwrap(),
                Ok(None) => panic!("{dead:?} do not end"),
                Err(error) => assert!(dead.contains(&(error.number("rank").unwrap() as u32)), "{error}"),
            }
        }
        dead.iter().for_each(|rank| engine.ring.lost(*rank));
        let mut gone = dead.clone();
        while !gone.is_empty() {
            let mut back = BTreeSet::new();
            while back != gone {
                match engine.links.readmit(PATIENCE) {
                    Ok(rank) => drop(back.insert(rank.expect("a rank that comes back"))),
                    // One that had met a process which has ended meets anew.
                    Err(error) => assert_eq!(error.kind(), Kind::PeerLost, "{error}"),
                }
            }
            gone.retain(|rank| match engine.ring.reattach(*rank, &mut engine.links, PATIENCE) {
                Ok(()) => false,
                Err(error) => {
                    assert_eq!(error.kind(), Kind::PeerLost, "{error}");
                    true
                }
            });
        }
    }

    /// Says a word to some ranks, at once, because this one may end before it looks at its sessions again. Waits until
    /// so many have said `wanted`.
    fn talks(&mut self, to: &[u32], word: &[u8], (mut from, wanted): (u32, &[u8])) {
        let links = &mut self.engine.links;
        to.iter().for_each(|rank| links.send(*rank, word, None).unwrap());
        loop {
            match links.event(if from > 0 { PATIENCE } else { Duration::ZERO }) {
                Ok(Some((_, Event::Message { bytes, .. }))) if bytes == wanted => from -= 1,
                Ok(Some((rank, event))) => links.set_aside(rank, event).unwrap(),
                Ok(None) if from == 0 => break,
                // One that has heard all may have gone on to its end, which the list of lost ranks keeps.
                Err(error) => assert_eq!(error.kind(), Kind::PeerLost),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Nothing is held beside what the plan says, but for one granule of updates.
    fn check(&mut self) {
        let least = self.engine.plan.bytes().device();
        self.engine.ring.shrink(least).unwrap();
        assert_eq!(self.engine.ring.pulls().device_bytes(), least);
        assert_eq!(self.counted.backings() - self.backings, usize::from(self.updated));
        assert_eq!(self.counted.unmapped(), 0);
    }

    /// The process holds no more descriptors than where they were counted first.
    fn count(&mut self) {
        self.check();
        if self.engine.own() > 0 {
            return self.talks(&[0], b"here", (1, b"counted"));
        }
        self.talks(&[], b"", (RANKS - 1, b"here"));
        let open = descriptors() - self.world.updated.load(Ordering::Relaxed);
        let first = self.world.open.compare_exchange(0, open, Ordering::Relaxed, Ordering::Relaxed);
        assert!(first == Ok(0) || first == Err(open), "{open} open, {first:?} at first");
        self.talks(&[1, 2], b"counted", (0, b""));
    }
}

/// Open descriptors.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// One rank's part of a world.
fn rank(own: u32, world: &World) -> Process<'_> {
    let mut process = Process::start(own, world, &vec![0; model().len()]);
    let mut draws = Draws(world.seed ^ (u64::from(own) << 40));
    for (act, versions) in &world.history {
        match act {
            Act::Serve(steps) => process.serve(*steps, &mut draws),
            Act::Update { version, layers, ends } => process.update(*version, layers, *ends),
            Act::Restart(dead) if dead.contains(&own) => {
                process.engine.ring.begin(1, 0).unwrap();
                let stream = process.engine.stream();
                process.engine.ring.enter(0, 0, stream).unwrap();
            }
            Act::Restart(_) => {}
            Act::Count => process.count(),
        }
        let dead = act.dead();
        if dead.contains(&own) {
            drop(process);
            process = Process::start(own, world, versions);
        } else if !dead.is_empty() {
            process.outlives(&dead);
        }
        assert_eq!(process.engine.versions, *versions, "rank {own}, {act:?}");
        process.engine.step().unwrap();
    }
    process.check();
    process.engine.ring.grow(MUCH, process.engine.stream()).unwrap();
    process.engine.step().unwrap();
    process
}

fn world(seed: u64, history: History) {
    let (open, updated) = Default::default();
    let world = World { seed, history, folder: Folder::new(), open, updated };
    let world = &world;
    thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|own| scope.spawn(move || rank(own, world)));
        // Sessions live until all ranks have ended their parts.
        let ended = ranks.map(thread::ScopedJoinHandle::join);
        assert!(ended.iter().all(Result::is_ok), "seed {seed}");
    });
}

pub fn soaks() -> bool {
    std::env::var_os("FOREBAY_SOAK").is_some()
}

#[test]
fn every_world_has_one_version_at_a_time() {
    let seeds = if soaks() { 5_000 } else { 200 };
    // Ranks wait for each other, so several worlds at once are quicker.
    thread::scope(|scope| {
        for part in 0..8 {
            scope.spawn(move || {
                (part..seeds).step_by(8).for_each(|seed| world(seed, history(seed, ACTS, 0, false)));
            });
        }
    });
}

/// One world with 10,000 steps in a soak, in a process of its own, because other tests open descriptors.
#[test]
fn a_long_world_holds_at_its_end_what_it_held_at_its_start() {
    const NAME: &str = "world::a_long_world_holds_at_its_end_what_it_held_at_its_start";
    if !alone_in_a_process(NAME) {
        return;
    }
    let history = history(2026, 0, if soaks() { 10_000 } else { 400 }, true);
    let counts = history.iter().filter(|(act, _)| matches!(act, Act::Count)).count();
    assert!(counts >= 3, "{counts}");
    let before = descriptors();
    world(2026, history);
    assert_eq!(descriptors(), before);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("/memfd:forebay"), "{maps}");
}
