//! Phases of an exchange by kinds of faults, for every call that a fault can be at: a rank shares, takes another one
//! back, or comes back, and one of its calls is refused, its memory among them, or every call from one on, as of one
//! that is killed, or it is silent for longer than the others wait. Each call ends in its time, errors name a rank, no
//! layer shows another byte than its owner's, and all ranks come together again by the calls that the page of weights
//! names. Descriptors, memory and files are then those of before.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Plan, Pulls};
use forebay::{Error, Kind, Result};

use crate::children::alone_in_a_process;
use crate::faulty::Faulty;
use crate::refusals::descriptors;
use crate::windows::{Folder, MODEL, Rank, layers, patient, sharding};
use crate::{devices, grain, no_faults};

const RANKS: u32 = 3;
/// How long a silent rank lives, where one is silent.
const LOST: Duration = Duration::from_millis(400);
/// How long a meeting and an exchange wait for a rank, where one is silent, and where each says at once that it fails.
const WAIT: Duration = Duration::from_secs(5);
const PATIENT: Duration = Duration::from_secs(30);
/// Far more than all calls of a world take.
const BOUND: Duration = Duration::from_secs(120);

/// What the faulty rank does when the fault comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// All share for the first time.
    Share,
    /// It looks for a rank that has died and comes back.
    Readmit,
    /// It takes that rank's parts.
    Reattach,
    /// It is that rank, and meets the others.
    Meet,
    /// It is that rank, and shares.
    Return,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// One call that makes, sends, takes or maps memory is refused.
    Memory,
    /// One send is refused.
    Unsent,
    /// All calls are refused from one on.
    Killed,
    /// It is silent for longer than the others wait.
    Stopped,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    phase: Phase,
    fault: Fault,
    /// Calls that pass before.
    n: u64,
}

impl Case {
    /// The rank with the fault. Rank 1 is the one that dies and comes back.
    fn faulty(self) -> u32 {
        match self.phase {
            Phase::Share | Phase::Meet | Phase::Return => 1,
            Phase::Readmit | Phase::Reattach => 0,
        }
    }

    fn limits(self) -> Limits {
        match self.fault {
            Fault::Stopped => Limits { lost: LOST, interval: LOST / 8, hello: self.wait(), ..patient() },
            _ => Limits { hello: self.wait(), ..patient() },
        }
    }

    fn wait(self) -> Duration {
        if self.fault == Fault::Stopped { WAIT } else { PATIENT }
    }
}

const UNAIMED: u64 = u64::MAX;

/// The fault, once it was aimed.
#[derive(Debug)]
struct Aimed {
    fault: Fault,
    left: AtomicU64,
    hit: AtomicU64,
}

impl Aimed {
    fn new(fault: Fault) -> Arc<Aimed> {
        Arc::new(Aimed { fault, left: UNAIMED.into(), hit: 0.into() })
    }

    fn aim(&self, n: u64) {
        self.left.store(n, Ordering::Relaxed);
    }

    /// Whether the fault has come. It does not come again.
    fn ends(&self) -> bool {
        self.aim(UNAIMED);
        self.hit.load(Ordering::Relaxed) > 0
    }

    /// Whether the fault may be at this call. How often a rank polls and looks for bytes is chance.
    fn counts(&self, call: Call) -> bool {
        let memory = !matches!(call, Call::Poll | Call::Receive | Call::Send | Call::Credentials);
        match self.fault {
            Fault::Memory => memory,
            Fault::Unsent | Fault::Stopped => call == Call::Send,
            Fault::Killed => memory || call == Call::Send,
        }
    }
}

impl Faults for Aimed {
    fn before(&self, call: Call) -> Option<i32> {
        match self.left.load(Ordering::Relaxed) {
            UNAIMED => return None,
            0 if self.fault == Fault::Killed => {}
            _ if !self.counts(call) => return None,
            0 => {}
            left => {
                self.left.store(left - 1, Ordering::Relaxed);
                return None;
            }
        }
        self.hit.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Killed => return Some(libc::ENOMEM),
            Fault::Stopped => thread::sleep(LOST + LOST / 2),
            Fault::Memory | Fault::Unsent => {}
        }
        self.aim(UNAIMED);
        (self.fault != Fault::Stopped).then_some(libc::ENOMEM)
    }
}

/// Four layers; of the third one, which has one page, one rank alone owns anything.
fn plan(rank: u32) -> Plan {
    let bytes = [vec![5 * grain()], vec![4 * grain(), 9], vec![grain()], vec![3 * grain() + 3]];
    Plan::new(&layers(&bytes), Group { id: 8, rank, ranks: RANKS }, &sharding(grain())).unwrap()
}

/// The ranks that have every byte. A stage is over when all have at once.
#[derive(Debug, Default)]
struct Stage(Mutex<(BTreeSet<u32>, bool)>);

impl Stage {
    /// Tells whether a rank has every byte. Returns whether the stage is over.
    fn tells(&self, rank: u32, whole: bool) -> bool {
        let (all, over) = &mut *self.0.lock().unwrap();
        if whole {
            all.insert(rank);
        } else {
            all.remove(&rank);
        }
        *over |= all.len() == RANKS as usize;
        *over
    }
}

/// A world of one case: before rank 1 dies, and behind the fault.
struct World {
    case: Case,
    folder: Folder,
    stages: [Stage; 2],
    begin: Instant,
}

/// What a process holds: backings, ranges and their pieces.
type Held = (usize, (usize, usize));

/// One process of a rank.
struct Process<'a> {
    world: &'a World,
    rank: Rank,
    counted: Arc<Faulty>,
    aimed: Arc<Aimed>,
    /// Whether the fault is this process's.
    faulty: bool,
    stage: usize,
}

/// Why a process ends.
enum Ends {
    /// Its group is whole, and it holds this.
    Whole(Held),
    /// It has to be started again: it died, or a call has failed for good.
    Again,
}

impl Process<'_> {
    fn new(world: &World, own: u32, first: bool) -> Process<'_> {
        let case = world.case;
        let aimed = Aimed::new(case.fault);
        let host = HostDevice::with_faults(HostOptions::default(), aimed.clone());
        let counted = Faulty::new(host, false);
        let device: Arc<dyn Device> = counted.clone();
        let mut rank = Rank::new(&device, plan(own), Pulls::default(), &no_faults()).unwrap();
        rank.fill().unwrap();
        let comes_back = matches!(case.phase, Phase::Meet | Phase::Return);
        let faulty = own == case.faulty() && first != comes_back;
        Process { world, rank, counted, aimed, faulty, stage: 0 }
    }

    /// Makes a call in which the fault may be, if it is in this phase. Returns whether the process has died of it too.
    fn at<T>(&mut self, phase: Phase, call: impl FnOnce(&mut Rank) -> Result<T>) -> (Result<T>, bool) {
        let early = self.stage == 0 && matches!(phase, Phase::Readmit | Phase::Reattach);
        let was = self.aimed.hit.load(Ordering::Relaxed) > 0;
        let aims = self.faulty && self.world.case.phase == phase && !early && !was;
        if aims {
            self.aimed.aim(self.world.case.n);
        }
        let result = call(&mut self.rank);
        let hit = aims && self.aimed.ends();
        let case = self.world.case;
        assert!(self.world.begin.elapsed() < BOUND, "{case:?}");
        match &result {
            Ok(_) => {
                assert!(!hit || case.fault != Fault::Memory, "{case:?}: memory that was refused and not told")
            }
            Err(error) => self.is_named(error),
        }
        (result, hit && case.fault == Fault::Killed)
    }

    /// An error names the rank that it is of: for ranks without the fault, the one that has it or the one that died.
    fn is_named(&self, error: &Error) {
        let (case, own) = (self.world.case, self.rank.rank());
        if self.world.stages[1].0.lock().unwrap().1 {
            // The others end.
            return;
        }
        let about = [case.faulty(), 1].map(|rank| Some(u64::from(rank)));
        let chance = own == case.faulty() || own == 1 || case.fault == Fault::Stopped;
        let named = match error.number("rank") {
            rank @ Some(_) => chance || about.contains(&rank),
            None => error.number("process").is_some() || (self.faulty && case.fault != Fault::Memory),
        };
        assert!(named, "{case:?}, rank {own}: {error}");
        let told = matches!(error.kind(), Kind::PeerLost | Kind::TimedOut);
        assert!(told || chance, "{case:?}, rank {own}: {error}");
    }

    /// Whether every layer can be pulled. Those that can show every byte of their owners.
    fn is_whole(&self) -> bool {
        let mut all = true;
        for layer in self.rank.layers() {
            match self.rank.windows.pull(layer, self.rank.stream) {
                Ok(()) => {
                    self.rank.wait().unwrap();
                    assert!(self.rank.is_whole(layer), "{:?}, layer {layer}", self.world.case);
                }
                Err(error) => {
                    assert_eq!(error.kind(), Kind::InvalidState, "{:?}: {error}", self.world.case);
                    all = false;
                }
            }
        }
        assert_eq!(self.counted.unmapped(), 0, "{:?}", self.world.case);
        all
    }

    fn held(&self) -> Held {
        (self.counted.backings(), self.counted.ranges())
    }

    /// From its start until it ends.
    fn runs(&mut self, first: bool) -> Ends {
        let (case, folder) = (self.world.case, self.world.folder.0.clone());
        let faults: Arc<dyn Faults> = self.aimed.clone();
        let (met, died) = self.at(Phase::Meet, |rank| {
            let hello = rank.windows.hello(MODEL, rank.stream)?;
            Links::meet(&folder, hello, case.limits(), faults)
        });
        let Some(mut links) = met.ok().filter(|_| !died) else { return Ends::Again };
        let phase = if first { Phase::Share } else { Phase::Return };
        let (shared, died) = self.at(phase, |rank| rank.windows.share(&mut links, rank.stream, case.wait()));
        self.is_whole();
        // What was not lost cannot be shared again.
        if died || shared.is_err_and(|error| error.kind() != Kind::PeerLost) {
            return Ends::Again;
        }
        let before = (case.phase != Phase::Share && first).then_some(0);
        for stage in before.into_iter().chain([1]) {
            if stage == 1 && before.is_some() && self.rank.rank() == 1 {
                return Ends::Again;
            }
            self.stage = stage;
            if !self.goes_on(&mut links) {
                return Ends::Again;
            }
        }
        Ends::Whole(self.held())
    }

    /// Takes every rank that was lost back, until all ranks have every byte. Returns whether it lives then.
    fn goes_on(&mut self, links: &mut Links) -> bool {
        let (own, world) = (self.rank.rank(), self.world);
        let mut whole = self.is_whole();
        loop {
            assert!(world.begin.elapsed() < BOUND, "{:?}, rank {own}", world.case);
            match links.event(Duration::from_millis(1)) {
                Ok(event) => assert!(event.is_none(), "{:?}: {event:?}", world.case),
                Err(error) => self.is_named(&error),
            }
            // A rank that ends after that is told before.
            let all_here = links.lost().count() == 0 && links.unattached().is_none();
            if world.stages[self.stage].tells(own, whole && all_here) {
                return true;
            }
            if links.lost().count() == 0 {
                continue;
            }
            let (back, died) = self.at(Phase::Readmit, |_| links.readmit(Duration::from_millis(20)));
            if died {
                return false;
            }
            let Ok(Some(back)) = back else { continue };
            let (_, died) =
                self.at(Phase::Reattach, |rank| rank.windows.reattach(back, links, world.case.wait()));
            if died {
                return false;
            }
            whole = self.is_whole();
        }
    }
}

/// A rank, as often as it has to be started. Returns what it holds at the end, and whether the fault was reached.
fn rank(world: &World, own: u32) -> (Held, bool) {
    let mut hit = false;
    for start in 0.. {
        // The fault is of one process.
        let mut process = Process::new(world, own, start == 0);
        process.faulty &= start < 2 && !hit;
        let ends = process.runs(start == 0);
        hit |= process.aimed.hit.load(Ordering::Relaxed) > 0;
        if let Ends::Whole(held) = ends {
            return (held, hit);
        }
        assert!(world.begin.elapsed() < BOUND, "{:?}, rank {own}", world.case);
    }
    unreachable!()
}

/// Returns what each rank holds at the end, and whether the fault was reached.
fn world(case: Case) -> (Vec<Held>, bool) {
    let world = World { case, folder: Folder::new(), stages: Default::default(), begin: Instant::now() };
    let all: Vec<(Held, bool)> = thread::scope(|scope| {
        let world = &world;
        let ranks: Vec<_> = (0..RANKS).map(|own| scope.spawn(move || rank(world, own))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panic!("{case:?}"))).collect()
    });
    assert_eq!(std::fs::read_dir(&world.folder.0).unwrap().count(), 0, "{case:?}");
    let hit = all.iter().any(|(_, hit)| *hit);
    (all.into_iter().map(|(held, _)| held).collect(), hit)
}

const PHASES: [Phase; 5] = [Phase::Share, Phase::Readmit, Phase::Reattach, Phase::Meet, Phase::Return];
const FAULTS: [Fault; 4] = [Fault::Memory, Fault::Unsent, Fault::Killed, Fault::Stopped];

/// Every phase by every fault at every call, until none is left that the fault can be at. In a process of its own,
/// because other tests open descriptors.
#[test]
fn all_ranks_come_together_again_whatever_an_exchange_meets() {
    const NAME: &str = "faults::all_ranks_come_together_again_whatever_an_exchange_meets";
    if !alone_in_a_process(NAME) {
        return;
    }
    let before = descriptors();
    let (held, hit) = world(Case { phase: Phase::Share, fault: Fault::Memory, n: UNAIMED });
    assert!(!hit);
    let reached = Mutex::new(Vec::new());
    let chains = Mutex::new(PHASES.iter().flat_map(|phase| FAULTS.map(|fault| (*phase, fault))));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some((phase, fault)) = { chains.lock().unwrap().next() } {
                    let mut n = 0;
                    loop {
                        let (after, hit) = world(Case { phase, fault, n });
                        assert_eq!(after, held, "{phase:?}, {fault:?}, {n}");
                        if !hit {
                            break;
                        }
                        n += 1;
                    }
                    reached.lock().unwrap().push(((phase, fault), n));
                }
            });
        }
    });
    assert_eq!(descriptors(), before);
    let reached = reached.into_inner().unwrap();
    // Only an exchange of parts takes memory.
    let none = |(phase, fault)| matches!(phase, Phase::Readmit | Phase::Meet) && fault == Fault::Memory;
    assert_eq!(reached.len(), PHASES.len() * FAULTS.len());
    assert!(reached.iter().all(|(pair, calls)| (*calls > 0) != none(*pair)), "{reached:?}");
    let memory = |(phase, fault)| !none((phase, fault)) && fault == Fault::Memory;
    assert!(reached.iter().all(|(pair, calls)| *calls > 15 || !memory(*pair)), "{reached:?}");
}

/// The control: a copy that is left out, of one page, is a wrong byte of a layer.
#[test]
fn a_page_that_was_not_pulled_is_seen() {
    let folder = Folder::new();
    thread::scope(|scope| {
        let share = |own: u32| {
            let counted = Faulty::new(devices(1).remove(0), false);
            let device: Arc<dyn Device> = counted.clone();
            let mut rank = Rank::new(&device, plan(own), Pulls::default(), &no_faults()).unwrap();
            rank.fill().unwrap();
            (rank.share(&folder.0, patient(), &no_faults()).unwrap(), rank, counted)
        };
        let all = [0, 1, 2].map(|own| scope.spawn(move || share(own))).map(|one| one.join().unwrap());
        let (_, rank, counted) = &all[0];
        rank.layers().iter().for_each(|layer| rank.pull(*layer));
        // Another layer is in the buffer now.
        counted.leave_out_copy();
        rank.windows.pull(0, rank.stream).unwrap();
        rank.wait().unwrap();
        assert!(!rank.is_whole(0));
    });
}
