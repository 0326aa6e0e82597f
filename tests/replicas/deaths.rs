//! Real processes: a rank that is killed at every point of a change, also the one that makes the ballot. Those that
//! live agree on one set, which is the old one where no decision was made, go on with what they read of their own or of
//! each other, and attach the rank again.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::Kind;
use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::weights::{Outcome, Pull, Replica};

use crate::children::{Processes, die};
use crate::failing::DiesAt;
use crate::windows::{Folder, PATIENCE};
use crate::{Engine, changed, commit, replica};

/// Gives a test's child process its task: rank, which rank is killed, when, and the folder.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// When a rank is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Never,
    /// With half of its replica filled.
    Fill,
    /// When it is about to send its third message.
    Give,
    /// When all is exchanged.
    Shared,
    /// When it is ready and waits for the others, which come later.
    Ready,
    /// At its first mapping after the decision.
    Flip,
    /// When it has the new set.
    After,
    /// Not at all: it is the process that comes back.
    Again,
}

/// Of rank 2, which holds and owns what others read.
const DEATHS: [Death; 7] =
    [Death::Never, Death::Fill, Death::Give, Death::Shared, Death::Ready, Death::Flip, Death::After];

/// Of rank 0, whose memory the ballot is.
const DEATHS_OF_FIRST: [Death; 4] = [Death::Give, Death::Shared, Death::Ready, Death::Flip];

/// The file that says that the rank has ended.
const ENDED: &str = "ended";

/// What there is before, and after: the killed rank holds something in both, and others hold all of its part of layer
/// 1.
fn sets() -> [Vec<Replica>; 2] {
    [vec![replica(1, 1, 2), replica(3, 0, 1)], vec![replica(1, 1, 0), replica(3, 0, 2), replica(4, 3, 1)]]
}

/// The change, up to the rank's death. Returns the outcome.
fn changes(engine: &mut Engine, (victim, death): (u32, Death), faults: &DiesAt, folder: &Path) -> Outcome {
    let ends = engine.own() == victim;
    let mut change = engine.ring.replicate(2, &sets()[1], u64::MAX).unwrap();
    let (half, stream) = (change.left() / 2, engine.stream());
    change.advance(half, stream).unwrap();
    if ends && death == Death::Fill {
        engine.rank.wait().unwrap();
        die();
    }
    change.advance(u64::MAX, stream).unwrap();
    if ends && death == Death::Give {
        faults.arm(4);
    }
    // It learns only by its sessions that the other one has gone.
    if let Err(error) = change.share(&mut engine.links, stream, PATIENCE) {
        return Outcome::Aborted(error);
    }
    match death {
        Death::Shared if ends => die(),
        // It waits for the others, and is killed when it has done so for some time.
        Death::Ready if ends => faults.arm(20),
        // They serve no session meanwhile: the commit itself has to find that the rank has ended.
        Death::Ready => {
            let start = Instant::now();
            while !folder.join(ENDED).exists() {
                assert!(start.elapsed() < PATIENCE, "rank {victim} does not end");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Death::Flip if ends => faults.arm(0),
        _ => {}
    }
    commit(engine, &mut change).unwrap()
}

/// Goes on without the rank, and then with its next process.
fn outlives(engine: &mut Engine, victim: u32, taken: bool) {
    // The call that waited for it may have returned its error.
    let mut at_most = if engine.links.lost().next().is_some() { Duration::ZERO } else { PATIENCE };
    loop {
        match engine.links.event(at_most) {
            Ok(Some((of, event))) => engine.links.set_aside(of, event).unwrap(),
            Ok(None) if at_most == Duration::ZERO => break,
            Ok(None) => panic!("rank {victim} does not end"),
            Err(lost) => {
                assert_eq!(lost.number("rank"), Some(victim.into()), "{lost}");
                at_most = Duration::ZERO;
            }
        }
    }
    engine.ring.lost(victim);
    assert_eq!(engine.ring.launch(engine.rank.stream, || Ok(())).unwrap_err().kind(), Kind::PeerLost);
    engine.ring.reroute().unwrap();
    // Of layer 3 nothing but the owner has the last pages.
    let reads = [1, 3].map(|layer| engine.ring.pulls().reads(layer, victim));
    assert!(victim == 0 || reads == [!taken, true], "{reads:?}");
    if taken && victim == 2 {
        engine.ring.pulls().pull(1, engine.stream()).unwrap();
        engine.rank.wait().unwrap();
        assert!(engine.shows(1));
    }
    assert_eq!(engine.links.readmit(PATIENCE), Ok(Some(victim)));
    engine.ring.reattach(victim, &mut engine.links, PATIENCE).unwrap();
    assert_eq!(engine.ring.pulls().replicas(), []);
}

/// One rank, as a process. Returns whether it had the new set.
fn rank(own: u32, (victim, death): (u32, Death), folder: &Path) -> bool {
    let call = match death {
        Death::Give => Call::Send,
        Death::Ready => Call::Poll,
        _ => Call::MapFixed,
    };
    let faults = Arc::new(DiesAt::unarmed(call));
    let shared: Arc<dyn Faults> = faults.clone();
    let device: Arc<dyn Device> = HostDevice::with_faults(HostOptions::default(), faults.clone());
    let mut engine = Engine::new(&device, (own, 3), folder, &shared).unwrap();
    let mut taken = false;
    if death != Death::Again {
        assert_eq!(changed(&mut engine, 1, &sets()[0]), Ok(Outcome::Committed));
        let outcome = changes(&mut engine, (victim, death), &faults, folder);
        if own == victim && death == Death::After {
            die();
        }
        taken = outcome == Outcome::Committed;
        let set = engine.ring.pulls().replicas();
        assert_eq!(set, sets()[usize::from(taken)], "{outcome:?}");
        if let Outcome::Aborted(why) = outcome {
            assert!(matches!(why.kind(), Kind::PeerLost | Kind::Cancelled), "{why}");
        }
        // The memory of the one that was killed stays mapped.
        engine.step().unwrap();
        if death != Death::Never {
            outlives(&mut engine, victim, taken);
        }
    }
    engine.step().unwrap();
    assert_eq!(changed(&mut engine, 3, &sets()[1]), Ok(Outcome::Committed));
    (0..2).for_each(|_| engine.step().unwrap());
    taken
}

#[test]
fn those_that_live_have_one_set_whenever_a_rank_is_killed() {
    const NAME: &str = "deaths::those_that_live_have_one_set_whenever_a_rank_is_killed";
    if let Ok(told) = std::env::var(CHILD) {
        let words: Vec<&str> = told.split(',').collect();
        let [own, victim, death, folder] = words[..] else { panic!("{told}") };
        let death = DEATHS.into_iter().chain([Death::Again]).find(|it| format!("{it:?}") == death).unwrap();
        let dies = (victim.parse().unwrap(), death);
        let taken = rank(own.parse().unwrap(), dies, Path::new(folder));
        std::fs::write(Path::new(folder).join(format!("taken-{own}")), taken.to_string()).unwrap();
        return;
    }
    let of_first = DEATHS_OF_FIRST.map(|death| (0, death));
    for (victim, death) in DEATHS.map(|death| (2, death)).into_iter().chain(of_first) {
        let folder = Folder::new();
        let start_as = |rank: u32, death: Death| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(CHILD, format!("{rank},{victim},{death:?},{}", folder.0.display()))
                .spawn()
                .unwrap()
        };
        let mut all = Processes((0..3).map(|rank| start_as(rank, death)).collect());
        if death != Death::Never {
            assert!(!all.0[victim as usize].wait().unwrap().success());
            std::fs::write(folder.0.join(ENDED), "").unwrap();
            all.0[victim as usize] = start_as(victim, Death::Again);
        }
        for (rank, child) in all.0.iter_mut().enumerate() {
            assert!(child.wait().unwrap().success(), "{death:?} of {victim}, rank {rank}");
        }
        let committed = matches!(death, Death::Never | Death::Flip | Death::After);
        for rank in (0..3).filter(|rank| death == Death::Never || *rank != victim) {
            let taken = std::fs::read_to_string(folder.0.join(format!("taken-{rank}"))).unwrap();
            assert_eq!(taken, committed.to_string(), "{death:?} of {victim}, rank {rank}");
        }
    }
}
