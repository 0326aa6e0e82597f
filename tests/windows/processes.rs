//! Real processes: ranks that fill, exchange and pull, and one that is killed meanwhile.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use forebay::os::{Call, Faults};
use forebay::peer::{Event, Limits, Links};
use forebay::weights::{Group, Plan, Pulls};
use forebay::{Error, Kind, Result};

use crate::children::{Processes, die};
use crate::windows::{Folder, PATIENCE, Rank, layers, patient, sharding};
use crate::{devices, grain, no_faults};

/// Gives a test's child process its task: group, rank, ranks, layers, where rank 1 dies, and the folder.
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

pub fn plan(group: Group, count: u64) -> Plan {
    let bytes: Vec<Vec<u64>> = (0..count).map(|layer| vec![7 * grain() + 100 * layer, 4 * grain()]).collect();
    Plan::new(&layers(&bytes), group, &sharding(grain())).unwrap()
}

/// One rank, as a process. It compares every byte of two steps.
fn rank(group: Group, count: u64, death: Death, folder: &Path) -> Result<()> {
    let device = &devices(1)[0];
    let Group { rank, ranks, .. } = group;
    let mut own = Rank::new(device, plan(group, count), Pulls::default(), &no_faults())?;
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
    // Where one never comes, or not again, there is one other, which waits for it alone.
    let never = matches!(death, Death::Fill | Death::Hello);
    let hello = if never { Duration::from_millis(500) } else { PATIENCE };
    let mut links = own.share(folder, Limits { hello, ..patient() }, &faults)?;
    if death == Death::Pull {
        // No rank dies before all have shared.
        match rank {
            1 => assert_eq!(messages(&mut links, ranks as usize - 1, Vec::new())?.len(), ranks as usize - 1),
            _ => links.send(1, b"shared", None)?,
        }
    }
    for _ in 0..2 {
        for layer in own.layers() {
            if dies(Death::Pull) && layer == own.layers().len() / 2 {
                own.windows.pull(layer, own.stream)?;
                die();
            }
            own.pull(layer);
        }
    }
    let mut early = Vec::new();
    for layer in own.layers() {
        // The sessions are served between two layers.
        own.windows.verify_layer(layer, own.stream)?;
        if death == Death::Never
            && let Some((_, event)) = links.event(Duration::ZERO)?
        {
            early.push(event);
        }
    }
    assert!(early.iter().all(|event| matches!(event, Event::Ended)), "{early:?}");
    if death == Death::Pull {
        // The sessions tell; the memory stays, and pulls go on being right.
        let (error, heard) = lost(&mut links);
        own.layers().iter().for_each(|layer| own.pull(*layer));
        return agreed(&mut links, heard).and(Err(error));
    }
    end(&mut links)
}

/// What the sessions say of a rank that died, and the ranks that have sent a message meanwhile.
fn lost(links: &mut Links) -> (Error, Vec<u32>) {
    let mut heard = Vec::new();
    loop {
        match links.event(PATIENCE) {
            Ok(Some((rank, Event::Message { .. }))) => heard.push(rank),
            Ok(other) => panic!("no rank was lost: {other:?}"),
            Err(error) => return (error, heard),
        }
    }
}

/// Those that live have lost one rank alone, still hear each other, and end together.
fn agreed(links: &mut Links, heard: Vec<u32>) -> Result<()> {
    assert_eq!(links.lost().map(|(rank, _)| rank).collect::<Vec<_>>(), [1]);
    let own = *links.own();
    let others: Vec<u32> = (0..own.ranks).filter(|rank| *rank != own.rank && *rank != 1).collect();
    for rank in &others {
        links.send(*rank, b"lost one", None)?;
    }
    assert_eq!(messages(links, others.len(), heard)?, others);
    end(links)
}

/// The ranks from which so many messages have come.
pub fn messages(links: &mut Links, count: usize, mut heard: Vec<u32>) -> Result<Vec<u32>> {
    while heard.len() < count {
        match links.event(PATIENCE)? {
            Some((rank, Event::Message { .. })) => heard.push(rank),
            // One that has heard all may have ended already.
            other => assert!(matches!(other, Some((_, Event::Ended))), "{other:?}"),
        }
    }
    heard.sort_unstable();
    Ok(heard)
}

/// Says the end to all others and waits for theirs, so that no rank takes another's end for its death.
pub fn end(links: &mut Links) -> Result<()> {
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
    let [group, own, ranks, count, death, folder] = words[..] else { panic!("{told}") };
    let number = |word: &str| word.parse::<u32>().unwrap();
    let death = DEATHS.into_iter().find(|it| format!("{it:?}") == death).unwrap();
    let group = Group { id: number(group).into(), rank: number(own), ranks: number(ranks) };
    let result = rank(group, u64::from(number(count)), death, Path::new(folder));
    match death {
        Death::Never => result.unwrap(),
        _ => {
            let error = result.unwrap_err();
            // Of several that live one may still meet, and waits for the rank that has died.
            let several = death == Death::Export && number(ranks) > 2;
            let kinds: &[Kind] = match death {
                Death::Fill | Death::Hello => &[Kind::TimedOut],
                _ if several => &[Kind::PeerLost, Kind::TimedOut],
                _ => &[Kind::PeerLost],
            };
            assert!(kinds.contains(&error.kind()), "{error}");
            // Of several that end because of one death, each may learn of another's end first.
            let other = several && error.number("rank").is_some();
            assert!(error.number("rank") == Some(1) || other, "{error}");
        }
    }
    true
}

/// Runs groups of so many ranks, all in one folder.
fn run(test: &str, groups: u32, ranks: u32, count: u32, death: Death) -> Vec<ExitStatus> {
    let folder = Folder::new();
    let start = |index: u32| {
        let (group, rank) = (index / ranks, index % ranks);
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("processes::{test}"), "--nocapture"])
            .env(CHILD, format!("{group},{rank},{ranks},{count},{death:?},{}", folder.0.display()))
            .spawn()
            .unwrap()
    };
    let mut all = Processes((0..groups * ranks).map(start).collect());
    all.0.iter_mut().map(|child| child.wait().unwrap()).collect()
}

#[test]
fn two_four_and_eight_ranks_have_every_byte() {
    if is_child() {
        return;
    }
    let test = "two_four_and_eight_ranks_have_every_byte";
    for (ranks, count) in [(2, 61), (4, 62), (8, 61)] {
        let statuses = run(test, 1, ranks, count, Death::Never);
        assert!(statuses.iter().all(ExitStatus::success), "{ranks} ranks: {statuses:?}");
    }
}

/// Two tensor-parallel ranks, each with two data-parallel ones that share.
#[test]
fn two_groups_share_in_one_folder() {
    if is_child() {
        return;
    }
    let statuses = run("two_groups_share_in_one_folder", 2, 2, 8, Death::Never);
    assert_eq!(statuses.len(), 4);
    assert!(statuses.iter().all(ExitStatus::success), "{statuses:?}");
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
        let statuses = run(test, 1, ranks, 8, death);
        for (rank, status) in statuses.iter().enumerate() {
            assert_eq!(status.success(), rank != 1, "{death:?}, rank {rank}: {status}");
        }
    }
}
