//! Real processes: a rank that is killed at every point of an update. Those that live agree on one version and have all
//! of its bytes, and the version is the old one where no decision was made.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::weights::{Border, Outcome};
use forebay::{Kind, Result};

use crate::Engine;
use crate::children::{Processes, die};
use crate::failing::DiesAt;
use crate::windows::{Folder, PATIENCE};

/// Gives a test's child process its task: rank, ranks, where rank 1 is killed, and the folder.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Where rank 1 is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Never,
    /// With half of the layers filled.
    Fill,
    /// When it is about to send its third part.
    Give,
    /// When all parts are exchanged.
    Shared,
    /// When it is ready and waits for the others, which come later.
    Ready,
    /// The same, and it is started again with the old version before the others come.
    Returned,
    /// At its first mapping after the decision, with nothing flipped, and in the middle.
    Flip,
    HalfFlipped,
    /// When it has the new version.
    After,
    /// Not at all: it is the process that comes back.
    Again,
}

const DEATHS: [Death; 9] = [
    Death::Never,
    Death::Fill,
    Death::Give,
    Death::Shared,
    Death::Ready,
    Death::Returned,
    Death::Flip,
    Death::HalfFlipped,
    Death::After,
];

/// The file that says that rank 1 has ended.
const ENDED: &str = "ended";

fn waits_for(file: &Path) {
    let start = Instant::now();
    while !file.exists() {
        assert!(start.elapsed() < PATIENCE, "rank 1 does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a session tells that rank 1 has ended.
fn loses(engine: &mut Engine) -> Result<()> {
    let lost = loop {
        match engine.links.event(PATIENCE) {
            Ok(Some((of, event))) => engine.links.set_aside(of, event)?,
            Ok(None) => panic!("rank 1 does not end"),
            Err(error) => break error,
        }
    };
    assert_eq!(lost.number("rank"), Some(1), "{lost}");
    Ok(())
}

/// Rank 1 ends and comes back.
fn outlives(engine: &mut Engine) -> Result<()> {
    loses(engine)?;
    engine.ring.lost(1);
    assert_eq!(engine.links.readmit(PATIENCE)?, Some(1));
    engine.ring.reattach(1, &mut engine.links, PATIENCE)
}

/// The process that comes back, with the old version. It lives until the other rank has ended.
fn again(mut engine: Engine) -> Result<u32> {
    engine.step()?;
    engine.step()?;
    while let Ok(Some(_)) = engine.links.event(PATIENCE) {}
    Ok(0)
}

/// One rank, as a process. Returns the version that it has at the end.
fn rank((own, ranks): (u32, u32), death: Death, folder: &Path) -> Result<u32> {
    let dies = |at| own == 1 && death == at;
    // Two mappings a layer are this rank's own and others' parts.
    let call = match death {
        Death::Give => Call::Send,
        Death::Ready | Death::Returned => Call::Poll,
        _ => Call::MapFixed,
    };
    let faults = Arc::new(DiesAt::unarmed(call));
    let shared: Arc<dyn Faults> = faults.clone();
    let device: Arc<dyn Device> = HostDevice::with_faults(HostOptions::default(), faults.clone());
    let mut engine = Engine::new(&device, (own, ranks), folder, &shared)?;
    if death == Death::Again {
        return again(engine);
    }
    engine.step()?;
    let all = engine.layers();
    let mut update = engine.ring.update(1, &all, u64::MAX)?;
    for layer in &all {
        if dies(Death::Fill) && *layer == 2 {
            die();
        }
        engine.fill_one(&mut update, *layer)?;
    }
    if dies(Death::Give) {
        faults.arm(2 * (ranks - 1));
    }
    let border = Border { at_most: PATIENCE, ..engine.border() };
    let outcome = match engine.share(&mut update) {
        // It learns only by its sessions that the other one has gone.
        Err(error) => Outcome::Aborted(error),
        Ok(()) => {
            match death {
                Death::Shared if own == 1 => die(),
                // It waits for the others, and is killed when it has done so for some time.
                Death::Ready | Death::Returned if own == 1 => faults.arm(20),
                // It serves no session meanwhile: the commit itself has to find that rank 1 has ended.
                Death::Ready => waits_for(&folder.join(ENDED)),
                Death::Returned => outlives(&mut engine)?,
                Death::Flip if own == 1 => faults.arm(0),
                Death::HalfFlipped if own == 1 => faults.arm(5),
                _ => {}
            }
            engine.commit(&mut update, &all, border)?
        }
    };
    if dies(Death::After) {
        die();
    }
    drop(update);
    if death == Death::Never {
        // Of one update nothing stays open, however many there are.
        engine.updates(2, &all)?;
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open();
        engine.updates(3, &all)?;
        // A faster rank's first message may have been there before; behind the last update none is.
        assert!(open() <= before, "{} of {before}", open());
        return Ok(3);
    }
    let version = match &outcome {
        Outcome::Committed => 1,
        Outcome::Aborted(why) => {
            // Of two that live one may learn of it by the other, which may have ended already.
            let told = why.number("rank") == Some(1) || ranks > 2;
            assert!(told && matches!(why.kind(), Kind::PeerLost | Kind::Cancelled), "{why}");
            0
        }
    };
    // The memory of the one that was killed stays mapped: every byte of the version that all have.
    engine.step()?;
    engine.step()?;
    assert!(engine.versions.iter().all(|own| *own == version));
    Ok(version)
}

#[test]
fn those_that_live_have_one_version_whenever_a_rank_is_killed() {
    const NAME: &str = "processes::those_that_live_have_one_version_whenever_a_rank_is_killed";
    if let Ok(told) = std::env::var(CHILD) {
        let words: Vec<&str> = told.split(',').collect();
        let [own, ranks, death, folder] = words[..] else { panic!("{told}") };
        let number = |word: &str| word.parse::<u32>().unwrap();
        let death = DEATHS.into_iter().chain([Death::Again]).find(|it| format!("{it:?}") == death).unwrap();
        let version = rank((number(own), number(ranks)), death, Path::new(folder)).unwrap();
        std::fs::write(Path::new(folder).join(format!("version-{own}")), version.to_string()).unwrap();
        return;
    }
    for (death, ranks) in DEATHS.into_iter().zip([2, 2, 3, 3, 2, 2, 3, 3, 2]) {
        let folder = Folder::new();
        let start_as = |rank: u32, death: Death| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, format!("{rank},{ranks},{death:?},{}", folder.0.display()))
                .spawn()
                .unwrap()
        };
        let mut all = Processes((0..ranks).map(|rank| start_as(rank, death)).collect());
        match death {
            Death::Ready => {
                all.0[1].wait().unwrap();
                std::fs::write(folder.0.join(ENDED), "").unwrap();
            }
            Death::Returned => {
                all.0[1].wait().unwrap();
                all.0.push(start_as(1, Death::Again));
            }
            _ => {}
        }
        let ended: Vec<ExitStatus> = all.0.iter_mut().map(|child| child.wait().unwrap()).collect();
        for (rank, status) in ended.iter().enumerate() {
            assert_eq!(
                status.success(),
                rank != 1 || death == Death::Never,
                "{death:?}, rank {rank}: {status}"
            );
        }
        let version = |rank: &u32| std::fs::read_to_string(folder.0.join(format!("version-{rank}"))).unwrap();
        let versions: Vec<String> = (0..ranks).filter(|rank| *rank != 1).map(|rank| version(&rank)).collect();
        let committed = matches!(death, Death::Flip | Death::HalfFlipped | Death::After);
        // That a rank was ready decides nothing: those that learn of its death before they are ready abort.
        let expected = match death {
            Death::Never => "3",
            _ if committed => "1",
            _ => "0",
        };
        assert!(versions.iter().all(|version| version == expected), "{death:?}: {versions:?}");
    }
}
