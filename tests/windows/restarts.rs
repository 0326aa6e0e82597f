//! Real processes: a rank is killed at each phase of its start and of a step and started again, or stopped and goes on.
//! The others keep their addresses, read its new memory, and give the old one back.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use forebay::device::Stream;
use forebay::os::Faults;
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Pulls, Ring, RingOptions};
use forebay::{Kind, Result};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;

use crate::processes::{DiesAtSend, Processes, die, end, messages, plan};
use crate::windows::{Folder, MODEL, PATIENCE, Rank, patient, sharding};
use crate::{alone, devices, grain, no_faults};

/// Gives a test's child process its task: rank, ranks, where rank 1 fails, which of its processes it is, the folder.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Where the first process of rank 1 is killed, or stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    /// With half of its layers filled.
    Fill,
    /// When all is filled.
    Filled,
    /// When it is about to send its hello.
    Hello,
    /// When it is about to send its third part.
    Export,
    /// With a pull enqueued.
    Pull,
    /// Between the use of two layers.
    Step,
    /// There it stops, and is told to go on when all others have lost it.
    Stop,
}

use Fails::{Export, Fill, Filled, Hello, Pull, Step, Stop};

const FAILS: [Fails; 7] = [Fill, Filled, Hello, Export, Pull, Step, Stop];
const LAYERS: usize = 6;

/// A rank's windows in a ring, and what they have to show.
struct Engine {
    rank: Rank,
    ring: Ring,
    stream: Stream,
    expected: Vec<Vec<Option<u8>>>,
}

impl Engine {
    fn new(mut rank: Rank) -> Engine {
        let expected = (0..LAYERS).map(|layer| rank.expected(layer)).collect();
        let (stream, device) = (rank.stream, Arc::clone(&rank.device));
        // The windows go into the ring; the rank keeps others, of one page.
        let one = alone(&[vec![grain()]], &sharding(grain()));
        let windows = std::mem::replace(&mut rank.windows, one.windows);
        let ring = Ring::new(&device, windows, RingOptions::default()).unwrap();
        Engine { rank, ring, stream, expected }
    }

    /// A step, of which each use compares every byte. `at` is called between two layers.
    fn step(&mut self, at: impl Fn()) -> Result<()> {
        self.ring.begin(1, 0)?;
        for layer in 0..LAYERS {
            self.ring.enter(layer, 0, self.stream)?;
            let shown = self.rank.read(self.ring.pulls().layer(layer)?);
            let mut both = shown.iter().zip(&self.expected[layer]);
            assert!(both.all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown)), "layer {layer}");
            self.ring.leave(layer, 0, self.stream)?;
            if layer == LAYERS / 2 {
                at();
            }
        }
        self.ring.end(self.stream)
    }

    fn addresses(&self) -> Vec<u64> {
        (0..LAYERS).map(|layer| self.ring.pulls().layer(layer).unwrap().address()).collect()
    }

    /// Waits for all `lost` ranks, and attaches them.
    fn back(&mut self, links: &mut Links, lost: &[u32]) -> Result<()> {
        let mut back = BTreeSet::new();
        while back.len() < lost.len() {
            back.insert(links.readmit(PATIENCE)?.unwrap());
        }
        assert!(lost.iter().all(|rank| back.contains(rank)), "{back:?}");
        back.into_iter().try_for_each(|rank| self.ring.reattach(rank, links, PATIENCE))
    }

    /// Steps until so many ranks are lost. Then a step says so, until they are back, of which some may have `died`.
    fn survives(&mut self, links: &mut Links, count: usize, died: bool, told: impl Fn()) -> Result<()> {
        let (addresses, memory, mut lost) = (self.addresses(), memory(), Vec::new());
        while lost.len() < count {
            // The memory of a rank that has died stays, so steps go on being right until it is told.
            self.step(|| {})?;
            match links.event(Duration::from_millis(1)) {
                Ok(event) => assert!(event.is_none(), "{event:?}"),
                Err(error) => lost.push(error.number("rank").unwrap() as u32),
            }
        }
        lost.iter().for_each(|rank| self.ring.lost(*rank));
        let error = self.step(|| {}).unwrap_err();
        assert_eq!(error.kind(), Kind::PeerLost);
        assert!(lost.contains(&(error.number("rank").unwrap() as u32)), "{error}");
        self.ring.abandon()?;
        told();
        self.back(links, &lost)?;
        assert_eq!((self.addresses(), memory.len()), (addresses, self::memory().len()));
        let given: usize = (0..LAYERS).filter(|layer| self.gives(*layer)).count();
        // The dead process's memory is given back; a process that goes on gives the memory that it gave before.
        let gone = memory.difference(&self::memory()).count();
        assert_eq!(gone, if died { given } else { 0 });
        Ok(())
    }

    /// Whether rank 1 owns a part of the layer.
    fn gives(&self, layer: usize) -> bool {
        !self.ring.pulls().plan().part(layer, 1).unwrap().is_empty()
    }
}

/// The shared memory that this process maps, by inode.
fn memory() -> BTreeSet<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("/memfd:forebay"));
    ours.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap()).collect()
}

fn limits(fails: Fails) -> Limits {
    match fails {
        Stop => Limits { interval: Duration::from_millis(50), lost: Duration::from_secs(3), ..patient() },
        _ => patient(),
    }
}

/// One process of a rank.
fn process(group: Group, fails: Fails, first: bool, folder: &Path) -> Result<()> {
    let (rank, others) = (group.rank, group.ranks as usize - 1);
    let at = |phase| rank == 1 && first && fails == phase;
    let mut own = Rank::new(&devices(1)[0], plan(group, LAYERS as u64), Pulls::default(), &no_faults())?;
    if at(Fill) {
        (0..LAYERS / 2).try_for_each(|layer| own.fill_one(layer, 0))?;
        die();
    }
    own.fill()?;
    if at(Filled) {
        die();
    }
    let faults: Arc<dyn Faults> = if at(Hello) {
        Arc::new(DiesAtSend(AtomicU32::new(0)))
    } else if at(Export) {
        // Of each session the hello and two parts are sent before.
        Arc::new(DiesAtSend(AtomicU32::new(3 * others as u32)))
    } else {
        no_faults()
    };
    let hello = own.windows.hello(MODEL, own.stream)?;
    // A rank that ends while all meet is met by the same call when it is there again.
    let mut links = Links::meet(folder, hello, limits(fails), faults)?;
    let shared = own.windows.share(&mut links, own.stream, PATIENCE);
    let mut engine = Engine::new(own);
    match shared {
        // The others have each other's parts. One that had yet to meet some rank has met the new process.
        Err(error) if rank != 1 && error.kind() == Kind::PeerLost => {
            let lost: Vec<u32> = links.lost().map(|(rank, _)| rank).collect();
            assert!(lost.contains(&1) && lost.contains(&(error.number("rank").unwrap() as u32)), "{error}");
            engine.back(&mut links, &lost)?;
        }
        shared => {
            shared?;
            let in_step = matches!(fails, Pull | Step | Stop);
            if in_step && rank != 1 {
                let told = || std::fs::write(folder.join(format!("lost-by-{rank}")), "").unwrap();
                engine.survives(&mut links, 1, fails != Stop, told)?;
            } else if in_step && first {
                engine.step(|| {})?;
                if fails == Pull {
                    engine.ring.pulls().pull(1, engine.stream)?;
                    die();
                }
                engine.step(|| if fails == Step { die() } else { raise(Signal::SIGSTOP).unwrap() })?;
                engine.survives(&mut links, others, false, || {})?;
            }
        }
    }
    (0..2).try_for_each(|_| engine.step(|| {}))?;
    let mut windows = engine.ring.into_windows();
    windows.verify(engine.stream)?;
    let ranks: Vec<u32> = (0..group.ranks).filter(|other| *other != rank).collect();
    ranks.iter().try_for_each(|other| links.send(*other, b"whole", None))?;
    assert_eq!(messages(&mut links, others, Vec::new())?, ranks);
    end(&mut links)
}

#[test]
fn a_rank_that_fails_at_any_phase_comes_back() {
    const NAME: &str = "restarts::a_rank_that_fails_at_any_phase_comes_back";
    if let Ok(told) = std::env::var(CHILD) {
        let words: Vec<&str> = told.split(',').collect();
        let [rank, ranks, fails, first, folder] = words[..] else { panic!("{told}") };
        let fails = FAILS.into_iter().find(|it| format!("{it:?}") == fails).unwrap();
        let group = Group { id: 0, rank: rank.parse().unwrap(), ranks: ranks.parse().unwrap() };
        return process(group, fails, first == "true", Path::new(folder)).unwrap();
    }
    for (fails, ranks) in [(Fill, 2), (Filled, 2), (Hello, 2), (Export, 3), (Pull, 3), (Step, 2), (Stop, 3)] {
        let folder = Folder::new();
        let start = |rank: u32, first: bool| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, format!("{rank},{ranks},{fails:?},{first},{}", folder.0.display()))
                .spawn()
                .unwrap()
        };
        let mut all = Processes((0..ranks).map(|rank| start(rank, true)).collect());
        if fails == Stop {
            let lost = |rank: &u32| folder.0.join(format!("lost-by-{rank}")).exists();
            while ![0, 2].iter().all(lost) {
                assert!([0, 2].iter().all(|rank: &usize| all.0[*rank].try_wait().unwrap().is_none()));
                std::thread::sleep(Duration::from_millis(10));
            }
            kill(Pid::from_raw(all.0[1].id().cast_signed()), Signal::SIGCONT).unwrap();
        } else {
            assert!(!all.0[1].wait().unwrap().success());
            all.0[1] = start(1, false);
        }
        for (rank, child) in all.0.iter_mut().enumerate() {
            assert!(child.wait().unwrap().success(), "{fails:?}, rank {rank}");
        }
    }
}
