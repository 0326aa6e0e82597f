//! Real processes: a rank is killed at each phase of its start and of a step and started again, or stopped and goes on.
//! The others keep their addresses, read its new memory, and give the old one back.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Stream};
use forebay::os::{Call, Faults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Pulls, Ring, RingOptions};
use forebay::{Kind, Result};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;

use crate::children::{Processes, die};
use crate::processes::{end, messages, plan};
use crate::windows::{Folder, MODEL, PATIENCE, Rank, patient, sharding};
use crate::{alone, grain, no_faults};

/// Gives a test's child process its task: rank, ranks, where rank 1 fails, which of its processes it is, the folder.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Where the first process of rank 1 is killed, or stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    /// When it is about to take the memory of its second layer.
    Create,
    /// With half of its layers filled.
    Fill,
    /// When all is filled.
    Filled,
    /// When it is about to send its hello.
    Hello,
    /// When it has met all, and shares nothing yet.
    Met,
    /// When it is about to send its third part.
    Export,
    /// When it is about to map another rank's second part.
    Import,
    /// With a pull enqueued.
    Pull,
    /// While a layer is used.
    Use,
    /// Between the use of two layers.
    Step,
    /// The same, and its next process is killed when it is about to send its third part.
    Twice,
    /// There it stops, and is told to go on when all others have lost it.
    Stop,
}

use Fails::{Create, Export, Fill, Filled, Hello, Import, Met, Pull, Step, Stop, Twice, Use};

/// With how many ranks.
const FAILS: [(Fails, u32); 12] = [
    (Create, 2),
    (Fill, 2),
    (Filled, 2),
    (Hello, 2),
    (Met, 3),
    (Export, 3),
    (Import, 3),
    (Pull, 3),
    (Use, 2),
    (Step, 2),
    (Twice, 3),
    (Stop, 3),
];
const LAYERS: usize = 6;

/// Kills the process at a call, once it is armed with how many pass before.
#[derive(Debug)]
struct DiesAt(Call, AtomicU32);

impl Faults for DiesAt {
    fn before(&self, call: Call) -> Option<i32> {
        if call == self.0
            && self.1.load(Ordering::Relaxed) != u32::MAX
            && self.1.fetch_sub(1, Ordering::Relaxed) == 0
        {
            die();
        }
        None
    }
}

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

    /// A step, of which each use compares every byte. `at` is called within a use, and between two layers.
    fn step(&mut self, at: impl Fn(Fails)) -> Result<()> {
        self.ring.begin(1, 0)?;
        for layer in 0..LAYERS {
            self.ring.enter(layer, 0, self.stream)?;
            let shown = self.rank.read(self.ring.pulls().layer(layer)?);
            let mut both = shown.iter().zip(&self.expected[layer]);
            assert!(both.all(|(shown, byte)| byte.is_none_or(|byte| byte == *shown)), "layer {layer}");
            if layer == LAYERS / 2 {
                at(Use);
            }
            self.ring.leave(layer, 0, self.stream)?;
            if layer == LAYERS / 2 {
                at(Step);
            }
        }
        self.ring.end(self.stream)
    }

    fn addresses(&self) -> Vec<u64> {
        (0..LAYERS).map(|layer| self.ring.pulls().layer(layer).unwrap().address()).collect()
    }

    /// Waits for all `lost` ranks, and attaches them; those again that were lost meanwhile, which are so many.
    fn back(&mut self, links: &mut Links, lost: &[u32], mut again: u32) -> Result<()> {
        let mut back = BTreeSet::new();
        while back.len() < lost.len() {
            back.insert(links.readmit(PATIENCE)?.unwrap());
        }
        assert!(lost.iter().all(|rank| back.contains(rank)), "{back:?}");
        while let Some(rank) = back.pop_first() {
            match self.ring.reattach(rank, links, PATIENCE) {
                Err(error) if error.kind() == Kind::PeerLost && again > 0 => {
                    again -= 1;
                    back.insert(links.readmit(PATIENCE)?.unwrap());
                }
                attached => attached?,
            }
        }
        assert_eq!(again, 0);
        Ok(())
    }

    /// Steps until so many ranks are lost. Then a step says so, until they are back. Some may have died, `died` times.
    fn survives(&mut self, links: &mut Links, count: usize, died: u32, told: impl Fn()) -> Result<()> {
        let (addresses, memory, mut lost) = (self.addresses(), memory(), Vec::new());
        while lost.len() < count {
            // The memory of a rank that has died stays, so steps go on being right until it is told.
            self.step(|_| {})?;
            match links.event(Duration::from_millis(1)) {
                Ok(event) => assert!(event.is_none(), "{event:?}"),
                Err(error) => lost.push(error.number("rank").unwrap() as u32),
            }
        }
        lost.iter().for_each(|rank| self.ring.lost(*rank));
        let error = self.step(|_| {}).unwrap_err();
        assert_eq!(error.kind(), Kind::PeerLost);
        assert!(lost.contains(&(error.number("rank").unwrap() as u32)), "{error}");
        self.ring.abandon()?;
        told();
        self.back(links, &lost, died.saturating_sub(1))?;
        assert_eq!((self.addresses(), memory.len()), (addresses, self::memory().len()));
        let given: usize = (0..LAYERS).filter(|layer| self.gives(*layer)).count();
        // The dead process's memory is given back; a process that goes on gives the memory that it gave before.
        let gone = memory.difference(&self::memory()).count();
        assert_eq!(gone, if died > 0 { given } else { 0 });
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

/// One process of a rank: fills, meets and shares. `life` counts the rank's processes.
fn started(group: Group, fails: Fails, life: u32, folder: &Path) -> Result<(Rank, Links, Result<()>)> {
    let at = |phase| group.rank == 1 && life == 0 && fails == phase;
    let call = match fails {
        Create => Call::Truncate,
        Import => Call::MapFixed,
        _ => Call::Send,
    };
    let dies = Arc::new(DiesAt(call, AtomicU32::new(u32::MAX)));
    let arm = |passing| dies.1.store(passing, Ordering::Relaxed);
    if at(Create) {
        // Behind those of two buffers.
        arm(3);
    }
    let device: Arc<dyn Device> = HostDevice::with_faults(HostOptions::default(), dies.clone());
    let mut own = Rank::new(&device, plan(group, LAYERS as u64), Pulls::default(), &no_faults())?;
    if at(Fill) {
        (0..LAYERS / 2).try_for_each(|layer| own.fill_one(layer, 0))?;
        die();
    }
    own.fill()?;
    if at(Filled) {
        die();
    }
    if at(Hello) {
        arm(0);
    } else if at(Export) || (group.rank == 1 && life == 1 && fails == Twice) {
        // Of each session the hello and two parts are sent before.
        arm(3 * (group.ranks - 1));
    }
    let hello = own.windows.hello(MODEL, own.stream)?;
    // A rank that ends while all meet is met by the same call when it is there again.
    let mut links = Links::meet(folder, hello, limits(fails), dies.clone())?;
    if at(Met) {
        die();
    }
    if at(Import) {
        arm(1);
    }
    let shared = own.windows.share(&mut links, own.stream, PATIENCE);
    Ok((own, links, shared))
}

/// One process of a rank, up to its end.
fn process(group: Group, fails: Fails, life: u32, folder: &Path) -> Result<()> {
    let (rank, others) = (group.rank, group.ranks as usize - 1);
    let (own, mut links, shared) = started(group, fails, life, folder)?;
    let mut engine = Engine::new(own);
    match shared {
        // The others have each other's parts. One that had yet to meet some rank has met the new process.
        Err(error) if rank != 1 && error.kind() == Kind::PeerLost => {
            let lost: Vec<u32> = links.lost().map(|(rank, _)| rank).collect();
            assert!(lost.contains(&1) && lost.contains(&(error.number("rank").unwrap() as u32)), "{error}");
            engine.back(&mut links, &lost, 0)?;
        }
        shared => {
            shared?;
            let in_step = matches!(fails, Pull | Use | Step | Twice | Stop);
            if in_step && rank != 1 {
                let told = || std::fs::write(folder.join(format!("lost-by-{rank}")), "").unwrap();
                let died = match fails {
                    Stop => 0,
                    Twice => 2,
                    _ => 1,
                };
                engine.survives(&mut links, 1, died, told)?;
            } else if in_step && life == 0 {
                engine.step(|_| {})?;
                if fails == Pull {
                    engine.ring.pulls().pull(1, engine.stream)?;
                    die();
                }
                engine.step(|at| match (fails, at) {
                    (Use, Use) | (Step | Twice, Step) => die(),
                    (Stop, Step) => raise(Signal::SIGSTOP).unwrap(),
                    _ => {}
                })?;
                engine.survives(&mut links, others, 0, || {})?;
            }
        }
    }
    (0..2).try_for_each(|_| engine.step(|_| {}))?;
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
        let [rank, ranks, fails, life, folder] = words[..] else { panic!("{told}") };
        let (fails, _) = FAILS.into_iter().find(|(it, _)| format!("{it:?}") == fails).unwrap();
        let group = Group { id: 0, rank: rank.parse().unwrap(), ranks: ranks.parse().unwrap() };
        return process(group, fails, life.parse().unwrap(), Path::new(folder)).unwrap();
    }
    for (fails, ranks) in FAILS {
        let folder = Folder::new();
        let start = |rank: u32, life: u32| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, format!("{rank},{ranks},{fails:?},{life},{}", folder.0.display()))
                .spawn()
                .unwrap()
        };
        let mut all = Processes((0..ranks).map(|rank| start(rank, 0)).collect());
        if fails == Stop {
            let lost = |rank: &u32| folder.0.join(format!("lost-by-{rank}")).exists();
            while ![0, 2].iter().all(lost) {
                assert!([0, 2].iter().all(|rank: &usize| all.0[*rank].try_wait().unwrap().is_none()));
                std::thread::sleep(Duration::from_millis(10));
            }
            kill(Pid::from_raw(all.0[1].id().cast_signed()), Signal::SIGCONT).unwrap();
        } else {
            for life in 1..=if fails == Twice { 2 } else { 1 } {
                assert!(!all.0[1].wait().unwrap().success());
                all.0[1] = start(1, life);
            }
        }
        for (rank, child) in all.0.iter_mut().enumerate() {
            assert!(child.wait().unwrap().success(), "{fails:?}, rank {rank}");
        }
    }
}
