//! Ranks that come back to their group: who is taken in, who is refused, and what goes on meanwhile.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay::os::{Call, Faults};
use forebay::peer::{Event, Hello, Limits, Links};
use forebay::{Error, Kind};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};

use crate::frames::{self, OWN};
use crate::links::{Folder, PATIENCE, hello, mesh, no_faults, patient};

/// All ranks of a group that meet in a folder.
fn met(folder: &Folder, ranks: &[u32], count: u32) -> Vec<Links> {
    thread::scope(|scope| {
        let meet = |rank: &u32| {
            let own = hello(*rank, count);
            scope.spawn(move || folder.meet(own, PATIENCE).unwrap())
        };
        let all: Vec<_> = ranks.iter().map(meet).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// The error of a rank that is lost, behind what others say.
fn lost(links: &mut Links) -> Error {
    loop {
        if let Err(error) = links.event(PATIENCE) {
            return error;
        }
    }
}

/// Each sends its rank to each other one, and hears the others.
fn talk(all: &mut [Links]) {
    thread::scope(|scope| {
        for links in all {
            scope.spawn(move || {
                let own = *links.own();
                let others: Vec<u32> = (0..own.ranks).filter(|rank| *rank != own.rank).collect();
                for rank in &others {
                    links.send(*rank, &[own.rank as u8], None).unwrap();
                }
                let mut heard = Vec::new();
                while heard.len() < others.len() {
                    let Some((rank, Event::Message { bytes, .. })) = links.event(PATIENCE).unwrap() else {
                        panic!("no message")
                    };
                    assert_eq!(bytes, [rank as u8]);
                    heard.push(rank);
                }
                heard.sort_unstable();
                assert_eq!(heard, others);
            });
        }
    });
}

/// One or two of four ranks end, whichever, and are started again by the call that all ranks began with.
#[test]
fn ranks_that_are_started_again_meet_those_that_lived() {
    for dead in [vec![0], vec![1], vec![3], vec![0, 1], vec![1, 2], vec![0, 3]] {
        let folder = Folder::new(&format!("again-{dead:?}"));
        let mut all = met(&folder, &[0, 1, 2, 3], 4);
        for _ in 0..2 {
            all.retain(|links| !dead.contains(&links.own().rank));
            let again = thread::scope(|scope| {
                let again = scope.spawn(|| met(&folder, &dead, 4));
                for links in &mut all {
                    let dead = &dead;
                    scope.spawn(move || {
                        let mut told: Vec<_> =
                            dead.iter().map(|_| lost(links).number("rank").unwrap() as u32).collect();
                        told.sort_unstable();
                        assert_eq!(&told, dead);
                        let mut back: Vec<_> =
                            dead.iter().map(|_| links.readmit(PATIENCE).unwrap().unwrap()).collect();
                        back.sort_unstable();
                        assert_eq!((&back, links.lost().count()), (dead, 0));
                        assert_eq!(links.readmit(PATIENCE).unwrap(), None, "none is lost any more");
                    });
                }
                again.join().unwrap()
            });
            all.extend(again);
            talk(&mut all);
        }
        drop(all);
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    }
}

/// A rank that ends in order has nothing to give to one that has come back.
#[test]
fn an_end_in_order_waits_for_no_attachment() {
    let folder = Folder::new("end");
    let mut all = met(&folder, &[0, 1], 2);
    drop(all.pop());
    let links = &mut all[0];
    assert_eq!(lost(links).number("rank"), Some(1));
    let again = thread::scope(|scope| {
        let again = scope.spawn(|| met(&folder, &[1], 2));
        assert_eq!(links.readmit(PATIENCE), Ok(Some(1)));
        again.join().unwrap()
    });
    assert_eq!(links.unattached(), Some(1));
    links.end().unwrap();
    assert_eq!(links.unattached(), None);
    drop(again);
}

/// Two of three ranks have ended, and one of them is started again: it waits for the other one, for its time, and the
/// rank that lived has lost it again then.
#[test]
fn a_rank_that_comes_back_waits_for_the_others_no_longer_than_its_time() {
    let folder = Folder::new("alone");
    let mut all = met(&folder, &[0, 1, 2], 3);
    all.truncate(1);
    let mut survivor = all.pop().unwrap();
    let mut told = [0, 0].map(|_| lost(&mut survivor).number("rank").unwrap());
    told.sort_unstable();
    assert_eq!(told, [1, 2]);
    assert_eq!(survivor.readmit(Duration::from_millis(5)).unwrap(), None);
    thread::scope(|scope| {
        let folder = &folder;
        let again = scope.spawn(move || folder.meet(hello(1, 3), Duration::from_millis(300)).unwrap_err());
        assert_eq!(survivor.readmit(PATIENCE).unwrap(), Some(1));
        let error = lost(&mut survivor);
        assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(1)));
        let error = again.join().unwrap();
        assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(2)), "{error}");
    });
}

/// A survivor of two, whose other side a test writes, and which may be silent for so long.
fn survivor(silent: Duration) -> Links {
    let limits = Limits { lost: silent, interval: silent / 2, ..patient() };
    let (own, mut other) = UnixStream::pair().unwrap();
    other.write_all(&frames::hello(Hello { rank: 0, ..OWN })).unwrap();
    let mut links = Links::over(vec![own], OWN, limits, no_faults()).unwrap();
    drop(other);
    assert_eq!(links.event(PATIENCE).unwrap_err().number("rank"), Some(0));
    links
}

#[test]
fn those_who_are_not_the_rank_that_was_lost_are_refused_and_the_next_one_is_taken() {
    let theirs = Hello { rank: 0, ..OWN };
    let mut links = survivor(PATIENCE);
    let mut kept = Vec::new();
    let mut offer = |links: &mut Links, bytes: &[u8]| {
        let (own, mut other) = UnixStream::pair().unwrap();
        other.write_all(bytes).unwrap();
        links.offer(own).unwrap();
        kept.push(other);
        links.readmit(PATIENCE)
    };
    for (hello, place) in [
        (Hello { plan: [0; 32], ..theirs }, "a process with another plan"),
        (Hello { geometry: [0; 32], ..theirs }, "a process with another model"),
        (Hello { group: 1, ..theirs }, "a process of another group"),
        (Hello { ranks: 3, ..theirs }, "a process that counts other ranks"),
        (Hello { rank: OWN.rank, ..theirs }, "a second process of the same rank"),
        (Hello { content: [1; 32], ..theirs }, "a process with another content than its rank had"),
    ] {
        let error = offer(&mut links, &frames::hello(hello)).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place));
        assert_eq!(error.number("rank"), Some(u64::from(hello.rank)), "{error}");
        assert!(links.link(0).is_none() && links.lost().count() == 1);
    }
    let error = offer(&mut links, b"GET / HTTP/1.1\r\n").unwrap_err();
    let process = Some(u64::from(std::process::id()));
    assert_eq!((error.kind(), error.number("process")), (Kind::BadFormat, process), "{error}");
    let (own, other) = UnixStream::pair().unwrap();
    links.offer(own).unwrap();
    drop(other);
    let error = links.readmit(PATIENCE).unwrap_err();
    assert_eq!((error.kind(), error.number("process")), (Kind::PeerLost, process), "{error}");
    assert_eq!(offer(&mut links, &frames::hello(theirs)).unwrap(), Some(0));
    assert!(links.link(0).is_some() && links.lost().count() == 0);
}

/// Silent connections are few and stay for their time alone.
#[test]
fn connections_without_a_hello_have_a_bound_in_number_and_in_time() {
    let mut links = survivor(Duration::from_millis(100));
    let begin = Instant::now();
    let mut others = Vec::new();
    let error = loop {
        let (own, other) = UnixStream::pair().unwrap();
        others.push(other);
        if let Err(error) = links.offer(own) {
            break error;
        }
    };
    assert_eq!((error.kind(), error.number("connections"), others.len()), (Kind::Exhausted, Some(16), 17));
    for _ in 0..16 {
        let error = links.readmit(PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::TimedOut, "the other side's hello"));
        assert_eq!(error.number("process"), Some(u64::from(std::process::id())));
    }
    assert!(begin.elapsed() >= Duration::from_millis(100));
    assert_eq!(links.readmit(Duration::ZERO).unwrap(), None);
}

/// A process of a rank whose session has not failed here waits until it has, and not for ever.
#[test]
fn a_process_of_a_rank_that_has_not_ended_here_waits_for_that() {
    let ranks = mesh(3);
    let limits =
        Limits { lost: Duration::from_millis(400), interval: Duration::from_millis(100), ..patient() };
    let mut all: Vec<_> = thread::scope(|scope| {
        let over =
            |(rank, sockets)| scope.spawn(move || Links::over(sockets, hello(rank, 3), limits, no_faults()));
        let all: Vec<_> = (0..).zip(ranks).map(over).collect();
        all.into_iter().map(|one| one.join().unwrap().unwrap()).collect()
    });
    let (two, one) = (all.pop().unwrap(), all.pop().unwrap());
    let mut links = all.pop().unwrap();
    drop(one);
    assert_eq!(links.event(PATIENCE).unwrap_err().number("rank"), Some(1));
    let offer = |links: &mut Links| {
        let (own, mut other) = UnixStream::pair().unwrap();
        other.write_all(&frames::hello(hello(2, 3))).unwrap();
        links.offer(own).unwrap();
        other
    };
    let serves = AtomicBool::new(true);
    thread::scope(|scope| {
        let serves = &serves;
        let lives = scope.spawn(move || {
            let mut two = two;
            while serves.load(Ordering::Relaxed) {
                let _ = two.event(Duration::from_millis(10));
            }
            // It ends with what it said last.
            two.send(0, b"of the first process", None).unwrap();
            while two.link(0).is_some_and(|link| !link.is_over())
                && two.event(Duration::ZERO).unwrap().is_some()
            {}
        });
        let _second = offer(&mut links);
        let error = links.readmit(PATIENCE).unwrap_err();
        assert_eq!(
            (error.kind(), error.place(), error.number("rank")),
            (Kind::TimedOut, "a second process of a rank that has not ended", Some(2))
        );
        // Now it ends while a second one is there, and what it said is not taken for the second one's.
        let _third = offer(&mut links);
        serves.store(false, Ordering::Relaxed);
        lives.join().unwrap();
        assert_eq!(links.readmit(PATIENCE).unwrap(), Some(2));
        assert_eq!(links.lost().map(|(rank, _)| rank).collect::<Vec<_>>(), [1]);
        assert!(links.event(Duration::from_millis(20)).unwrap().is_none());
    });
}

/// Connects a process of rank 1 while a connection is looked at, once, when it has a socket to connect to.
#[derive(Debug, Default)]
struct Follows(Mutex<(Option<PathBuf>, Option<UnixStream>)>);

impl Faults for Follows {
    fn before(&self, call: Call) -> Option<i32> {
        let (path, connected) = &mut *self.0.lock().unwrap();
        if call == Call::Credentials
            && let Some(path) = path.take()
        {
            *connected = Some(says_hello(&path, 1));
        }
        None
    }
}

fn says_hello(path: &Path, rank: u32) -> UnixStream {
    let mut socket = UnixStream::connect(path).unwrap();
    socket.write_all(&frames::hello(hello(rank, 3))).unwrap();
    socket
}

/// A process that connects when the door has looked for the last time waits there, until the end of its rank's last
/// process is noticed.
#[test]
fn a_process_that_comes_while_the_door_is_shut_is_not_turned_away() {
    let (folder, faults) = (Folder::new("shut"), Arc::new(Follows::default()));
    let own: Arc<dyn Faults> = faults.clone();
    let mut all: Vec<Links> = thread::scope(|scope| {
        let start = |rank: u32| {
            let (folder, faults) = (&folder.0, if rank == 0 { Arc::clone(&own) } else { no_faults() });
            scope.spawn(move || Links::meet(folder, hello(rank, 3), patient(), faults).unwrap())
        };
        [start(0), start(1), start(2)].map(|one| one.join().unwrap()).into_iter().collect()
    });
    let (two, one) = (all.pop().unwrap(), all.pop().unwrap());
    let mut links = all.pop().unwrap();
    drop(two);
    assert_eq!(lost(&mut links).number("rank"), Some(2));
    assert_eq!(links.readmit(Duration::ZERO).unwrap(), None);
    let path = folder.0.join("forebay-7-0.sock");
    faults.0.lock().unwrap().0 = Some(path.clone());
    let _two = says_hello(&path, 2);
    assert_eq!(links.readmit(PATIENCE).unwrap(), Some(2));
    assert!(!path.exists() && faults.0.lock().unwrap().1.is_some());
    drop(one);
    assert_eq!(lost(&mut links).number("rank"), Some(1));
    assert_eq!(links.readmit(Duration::from_secs(20)).unwrap(), Some(1));
}

/// A folder that takes no socket, because something else is in its place, is an error of the call; nothing is left
/// there, the sessions go on, and when the folder takes it the same call succeeds.
#[test]
fn a_folder_that_takes_no_socket_is_an_error_until_it_does() {
    let folder = Folder::new("taken");
    let path = folder.0.join("forebay-7-0.sock");
    let refused = |error: Error| {
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert!(error.place().contains("forebay-7-0.sock: remove a socket"), "{error}");
    };
    let files = || std::fs::read_dir(&folder.0).unwrap().count();
    std::fs::create_dir(&path).unwrap();
    refused(folder.meet(hello(0, 2), PATIENCE).unwrap_err());
    assert_eq!(files(), 1);
    for is_file in [false, true] {
        if is_file {
            std::fs::remove_dir(&path).unwrap();
            std::fs::write(&path, "").unwrap();
        }
        let error = folder.meet(hello(1, 2), Duration::from_millis(20)).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(0)), "{error}");
    }
    // A file is replaced as a socket that was left.
    let mut all = met(&folder, &[0, 1], 2);
    talk(&mut all);
    all.truncate(1);
    let mut links = all.pop().unwrap();
    assert_eq!(lost(&mut links).number("rank"), Some(1));
    std::fs::create_dir(&path).unwrap();
    refused(links.readmit(PATIENCE).unwrap_err());
    std::fs::remove_dir(&path).unwrap();
    thread::scope(|scope| {
        let again = scope.spawn(|| met(&folder, &[1], 2).pop().unwrap());
        assert_eq!(links.readmit(PATIENCE).unwrap(), Some(1));
        all.extend([links, again.join().unwrap()]);
    });
    talk(&mut all);
    drop(all);
    assert_eq!(files(), 0);
}

/// Refuses to receive once.
#[derive(Debug, Default)]
struct Deaf(AtomicBool);

impl Faults for Deaf {
    fn before(&self, call: Call) -> Option<i32> {
        (call == Call::Receive && self.0.swap(false, Ordering::Relaxed)).then_some(libc::EPERM)
    }
}

/// Two processes that live lose each other, as where one was stopped for too long: both come back by the same call, and
/// a third one's words are kept.
#[test]
fn processes_that_lost_each_other_come_back_to_each_other() {
    let folder = Folder::new("each-other");
    let deaf = Arc::new(Deaf::default());
    let faults: Arc<dyn Faults> = deaf.clone();
    let mut all: Vec<Links> = thread::scope(|scope| {
        let (folder, faults) = (&folder, &faults);
        let start = |rank: u32| {
            let faults = if rank == 0 { Arc::clone(faults) } else { no_faults() };
            scope.spawn(move || Links::meet(&folder.0, hello(rank, 3), patient(), faults).unwrap())
        };
        [start(0), start(1), start(2)].map(|one| one.join().unwrap()).into_iter().collect()
    });
    deaf.0.store(true, Ordering::Relaxed);
    let first = lost(&mut all[0]).number("rank").unwrap() as usize;
    assert_eq!(lost(&mut all[first]).number("rank"), Some(0));
    let third = 3 - first;
    all[third].send(0, b"meanwhile", None).unwrap();
    assert!(all[third].event(Duration::ZERO).unwrap().is_none());
    let mut back = [None, None];
    while back != [Some(first as u32), Some(0)] {
        for (side, at) in [0, first].into_iter().enumerate() {
            back[side] = back[side].or(all[at].readmit(Duration::from_millis(1)).unwrap());
        }
    }
    let Some((rank, Event::Message { bytes, .. })) = all[0].event(PATIENCE).unwrap() else {
        panic!("nothing")
    };
    assert_eq!((rank as usize, &bytes[..]), (third, &b"meanwhile"[..]));
    talk(&mut all);
}

/// A process that listens and takes no connections, with a full queue or with room in it, holds another no longer than
/// its time.
#[test]
fn a_socket_that_is_not_read_is_a_rank_that_did_not_come() {
    for full in [true, false] {
        let folder = Folder::new("unread");
        let path = folder.0.join("forebay-7-0.sock");
        let bound = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        bind(bound.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&bound, Backlog::new(1).unwrap()).unwrap();
        // One more than the queue's length fits into it.
        let _first: Vec<_> =
            (0..if full { 2 } else { 0 }).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let error = folder.meet(hello(1, 2), Duration::from_millis(50)).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(0)), "{full}: {error}");
    }
}
