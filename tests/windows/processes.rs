//! Real processes: ranks that fill, exchange and pull, and one that is killed meanwhile.

use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay::os::{Call, Faults};
use forebay::peer::{Limits, Links};
use forebay::weights::{Group, Plan, Pulls};
use forebay::{Kind, Result};
use nix::sys::signal::{Signal, raise};

use crate::windows::{Folder, PATIENCE, Rank, layers, patient, sharding};
use crate::{devices, grain, no_faults};

/// Gives a test's child process its task: rank, ranks, layers, where rank 1 dies, and the folder.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Where rank 1 is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Never,
    /// With half of its layers filled.
    Fill,
    /// When it is about to send its hello.
    Hello,
    /// When it is about to send its third part.
    Export,
    /// With a pull enqueued.
    Pull,
}

const DEATHS: [Death; 5] = [Death::Never, Death::Fill, Death::Hello, Death::Export, Death::Pull];

fn die() {
    raise(Signal::SIGKILL).unwrap();
}

/// Kills the process at a send to another.
#[derive(Debug)]
struct DiesAtSend(AtomicU32);

impl Faults for DiesAtSend {
    fn before(&self, call: Call) -> Option<i32> {
        if call == Call::Send && self.0.fetch_sub(1, Ordering::Relaxed) == 0 {
            die();
        }
        None
    }
}

fn plan(rank: u32, ranks: u32, count: u64) -> Plan {
    let bytes: Vec<Vec<u64>> = (0..count).map(|layer| vec![7 * grain() + 100 * layer, 4 * grain()]).collect();
    Plan::new(&layers(&bytes), Group { id: 0, rank, ranks }, &sharding(grain())).unwrap()
}

/// One rank, as a process. It compares every byte of two steps.
fn rank(rank: u32, ranks: u32, count: u64, death: Death, folder: &Path) -> Result<()> {
    let device = &devices(1)[0];
    let mut own = Rank::new(device, plan(rank, ranks, count), Pulls::default(), &no_faults())?;
    let dies = |at| rank == 1 && death == at;
    if dies(Death::Fill) {
        (0..count as usize / 2).try_for_each(|layer| own.fill_one(layer, 0))?;
        die();
    }
    own.fill()?;
    let faults: Arc<dyn Faults> = match death {
        Death::Hello if rank == 1 => Arc::new(DiesAtSend(AtomicU32::new(0))),
        // Of each session the hello and two parts are sent before.
        Death::Export if rank == 1 => Arc::new(DiesAtSend(AtomicU32::new(3 * (ranks - 1)))),
        _ => no_faults(),
    };
    // Where one never comes there is one other, which waits for it alone.
    let hello = if death == Death::Fill { Duration::from_millis(500) } else { PATIENCE };
    let mut links = own.share(folder, Limits { hello, ..patient() }, &faults)?;
    for _ in 0..2 {
        for layer in own.layers() {
            if dies(Death::Pull) && layer == own.layers().len() / 2 {
                own.windows.pull(layer, own.stream)?;
                die();
            }
            own.pull(layer);
        }
    }
    own.windows.verify(own.stream)?;
    if death == Death::Pull {
        // The sessions tell; the memory stays, and pulls go on being right.
        let error = lost(&mut links);
        own.layers().iter().for_each(|layer| own.pull(*layer));
        return Err(error);
    }
    end(&mut links)
}

/// What the sessions say of a rank that died.
fn lost(links: &mut Links) -> forebay::Error {
    loop {
        match links.event(PATIENCE) {
            Ok(Some(_)) => {}
            Ok(None) => panic!("no rank was lost"),
            Err(error) => return error,
        }
    }
}

/// Says the end to all others and waits for theirs, so that no rank takes another's end for its death.
fn end(links: &mut Links) -> Result<()> {
    links.end()?;
    while !links.is_over() {
        links.event(Duration::from_millis(100))?;
    }
    Ok(())
}

/// The child's part. Returns whether this process is the child.
fn is_child() -> bool {
    let Ok(told) = std::env::var(CHILD) else { return false };
    let words: Vec<&str> = told.split(',').collect();
    let [own, ranks, count, death, folder] = words[..] else { panic!("{told}") };
    let number = |word: &str| word.parse::<u32>().unwrap();
    let death = DEATHS.into_iter().find(|it| format!("{it:?}") == death).unwrap();
    let result = rank(number(own), number(ranks), u64::from(number(count)), death, Path::new(folder));
    match death {
        Death::Never => result.unwrap(),
        _ => {
            let error = result.unwrap_err();
            let kinds: &[Kind] = match death {
                Death::Fill => &[Kind::TimedOut],
                _ => &[Kind::PeerLost],
            };
            assert!(kinds.contains(&error.kind()), "{error}");
            // Before its hello no side knows which rank a connection is; and of several that end because of one
            // death, each may learn of another's end first.
            let named = error.number("rank") == Some(1);
            assert!(named || death == Death::Hello || number(ranks) > 2, "{error}");
        }
    }
    true
}

/// The ranks of a group as processes, which are gone when the test is.
struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn run(test: &str, ranks: u32, count: u32, death: Death) -> Vec<ExitStatus> {
    let folder = Folder::new();
    let start = |rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("processes::{test}"), "--nocapture"])
            .env(CHILD, format!("{rank},{ranks},{count},{death:?},{}", folder.0.display()))
            .spawn()
            .unwrap()
    };
    let mut all = Processes((0..ranks).map(start).collect());
    all.0.iter_mut().map(|child| child.wait().unwrap()).collect()
}

#[test]
fn two_four_and_eight_ranks_have_every_byte() {
    if is_child() {
        return;
    }
    let test = "two_four_and_eight_ranks_have_every_byte";
    for (ranks, count) in [(2, 61), (4, 62), (8, 61)] {
        let statuses = run(test, ranks, count, Death::Never);
        assert!(statuses.iter().all(ExitStatus::success), "{ranks} ranks: {statuses:?}");
    }
}

#[test]
fn a_rank_that_is_killed_is_told_and_nothing_else_breaks() {
    if is_child() {
        return;
    }
    let test = "a_rank_that_is_killed_is_told_and_nothing_else_breaks";
    for (death, ranks) in [
        (Death::Fill, 2),
        (Death::Hello, 2),
        (Death::Export, 2),
        (Death::Export, 3),
        (Death::Pull, 2),
        (Death::Pull, 4),
    ] {
        let statuses = run(test, ranks, 8, death);
        for (rank, status) in statuses.iter().enumerate() {
            assert_eq!(status.success(), rank != 1, "{death:?}, rank {rank}: {status}");
        }
    }
}
