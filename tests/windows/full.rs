//! A full disk. A group meets in a folder that takes no further file, or memory is made where there is no room: the
//! error says what was refused and where, nothing is held, and the same calls succeed once there is room.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use forebay::device::Device;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::os::{Call, Faults};
use forebay::peer::{Hello, Links};
use forebay::weights::{Group, Plan, Pulls};
use forebay::{Error, Kind};

use crate::faulty::Faulty;
use crate::refusals::descriptors;
use crate::skip::skip;
use crate::windows::{Folder, MODEL, PATIENCE, Rank, layers, patient, sharding};
use crate::{devices, grain, no_faults};

/// The folder of a child process of this test, which is a file system of its own with few files.
const CHILD: &str = "FOREBAY_TEST_CHILD";

fn plan(rank: u32, ranks: u32) -> Plan {
    let bytes = [vec![5 * grain()], vec![7 * grain(), 9], vec![4 * grain() + 3]];
    Plan::new(&layers(&bytes), Group { id: 6, rank, ranks }, &sharding(grain())).unwrap()
}

fn filled(rank: u32, ranks: u32) -> Rank {
    let mut rank = Rank::new(&devices(1)[0], plan(rank, ranks), Pulls::default(), &no_faults()).unwrap();
    rank.fill().unwrap();
    rank
}

fn pull_all(rank: &Rank) {
    rank.layers().iter().for_each(|layer| rank.pull(*layer));
}

/// Files that take all room of a folder but what is left free.
struct Fillers(Vec<PathBuf>);

impl Fillers {
    fn new(folder: &Path, free: usize) -> Fillers {
        let mut all = Fillers(Vec::new());
        loop {
            let path = folder.join(format!("filler-{}", all.0.len()));
            match File::create(&path) {
                Ok(_) => all.0.push(path),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::StorageFull);
                    break;
                }
            }
        }
        assert!(all.0.len() > free);
        (0..free).for_each(|_| fs::remove_file(all.0.pop().unwrap()).unwrap());
        all
    }
}

impl Drop for Fillers {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| fs::remove_file(path).unwrap());
    }
}

fn names_what(error: &Error, step: &str) {
    let place = error.place();
    assert!(error.kind() == Kind::Io && place.contains("forebay-6-"), "{error}");
    assert!(place.ends_with(&format!("{step}: No space left on device")), "{error}");
}

/// Meetings that find no room for the rank's lock, or for its socket.
fn meetings(folder: &Path, hello: Hello) {
    for (free, step) in [(0, "open the rank's lock"), (1, "listen")] {
        let (fillers, before) = (Fillers::new(folder, free), descriptors());
        let error = Links::meet(folder, hello, patient(), no_faults()).unwrap_err();
        names_what(&error, step);
        let left = fs::read_dir(folder).unwrap().count();
        assert_eq!((descriptors(), left), (before, fillers.0.len()), "{error}");
    }
}

/// Rank 1 of three ends, and comes back to a folder that is full at first. It is not refused by rank 2, which only
/// looks there; the sessions of those that live go on.
fn returns(folder: &Path) {
    thread::scope(|scope| {
        let shared = |own| {
            let mut rank = filled(own, 3);
            let links = rank.share(folder, patient(), &no_faults()).unwrap();
            pull_all(&rank);
            (rank, links)
        };
        let all = [0, 1, 2].map(|own| scope.spawn(move || shared(own))).map(|one| one.join().unwrap());
        let [first, dead, last] = all;
        drop(dead);
        let mut alive = [first, last];
        for (_, links) in &mut alive {
            let error = links.event(PATIENCE).unwrap_err();
            assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)), "{error}");
        }
        let (fillers, before) = (Fillers::new(folder, 0), descriptors());
        let [(_, listens), (_, looks)] = &mut alive;
        names_what(&listens.readmit(PATIENCE).unwrap_err(), "listen");
        assert_eq!(looks.readmit(Duration::from_millis(1)), Ok(None));
        assert_eq!(descriptors(), before);
        looks.send(0, b"there", None).unwrap();
        assert!(looks.event(Duration::from_millis(1)).unwrap().is_none());
        assert!(matches!(listens.event(PATIENCE), Ok(Some((2, _)))));
        let hello = Hello { rank: 1, ..*looks.own() };
        names_what(&Links::meet(folder, hello, patient(), no_faults()).unwrap_err(), "open the rank's lock");
        drop(fillers);
        let back = scope.spawn(move || shared(1));
        let alive = alive.map(|(mut rank, mut links)| {
            scope.spawn(move || {
                assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
                rank.windows.reattach(1, &mut links, PATIENCE).unwrap();
                pull_all(&rank);
                links
            })
        });
        drop((alive.map(|one| one.join().unwrap()), back.join().unwrap()));
    });
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0);
}

#[test]
fn a_group_meets_in_a_folder_that_was_full_and_a_rank_comes_back_to_it() {
    const NAME: &str = "full::a_group_meets_in_a_folder_that_was_full_and_a_rank_comes_back_to_it";
    if let Ok(folder) = std::env::var(CHILD) {
        let folder = Path::new(&folder);
        let mut rank = filled(0, 1);
        let hello = rank.windows.hello(MODEL, rank.stream).unwrap();
        meetings(folder, hello);
        returns(folder);
        return;
    }
    // A file system of eight files, one of which is its root, in namespaces of the child's own.
    let folder = Folder::new();
    let own = ["--user", "--map-root-user", "--mount", "sh", "-c"];
    let mount = "mount -t tmpfs -o nr_inodes=8 forebay-test \"$FOREBAY_TEST_CHILD\"";
    let run = |script: &str| {
        let mut child = Command::new("unshare");
        child.args(own).arg(script).arg(std::env::current_exe().unwrap());
        child.args(["--exact", NAME, "--nocapture"]).env(CHILD, &folder.0).output()
    };
    if !run(mount).is_ok_and(|run| run.status.success()) {
        skip("namespaces of a user, in which a small file system can be mounted");
        return;
    }
    let run = run(&format!("{mount} && exec \"$0\" \"$@\"")).unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    let wrong = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && said.contains("1 passed"), "{said}{wrong}");
}

/// Has room for so many pieces of memory, and for no further one, until it is given more.
#[derive(Debug)]
struct Room(AtomicU64);

impl Faults for Room {
    fn before(&self, call: Call) -> Option<i32> {
        let takes = |left: u64| left.checked_sub(1);
        let full = call == Call::Truncate
            && self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, takes).is_err();
        full.then_some(libc::ENOSPC)
    }
}

/// Room for any number of the pieces that a rank needs, and for no further one. The same device gives the same memory
/// once there is room, and the group has every byte.
#[test]
fn memory_that_found_no_room_is_taken_once_there_is_some() {
    let mut refused = 0;
    for pieces in 0.. {
        let room = Arc::new(Room(pieces.into()));
        let counted = Faulty::new(HostDevice::with_faults(HostOptions::default(), room.clone()), false);
        let device: Arc<dyn Device> = counted.clone();
        let made = || Rank::new(&device, plan(0, 2), Pulls::default(), &no_faults());
        let first = made();
        room.0.store(u64::MAX, Ordering::Relaxed);
        let Err(error) = first else { break };
        let place = "ftruncate: No space left on device";
        assert_eq!((error.kind(), error.place()), (Kind::OsRefused, place), "{error}");
        assert_eq!(counted.backings(), 0, "{pieces}: {error}");
        let (folder, mut rank) = (Folder::new(), made().unwrap());
        rank.fill().unwrap();
        thread::scope(|scope| {
            let other = scope.spawn(|| filled(1, 2).share(&folder.0, patient(), &no_faults()).unwrap());
            let links = rank.share(&folder.0, patient(), &no_faults()).unwrap();
            pull_all(&rank);
            drop((links, other.join().unwrap()));
        });
        refused += 1;
    }
    // Two buffers and a part of each layer.
    assert_eq!(refused, 2 + 3);
}
