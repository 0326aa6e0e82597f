//! The sessions of a group: who takes a rank twice, who is lost, who says too much, and who else is served meanwhile.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use forebay::os::{Call, Faults, NoFaults};
use forebay::peer::{Event, Hello, Limits, Link, Links};
use forebay::{Error, Kind};

use crate::frames::{self, OWN, frame};

/// How long an answer may take. Far longer than any does: it ends a test that hangs, and decides nothing else.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn patient() -> Limits {
    Limits { hello: PATIENCE, lost: PATIENCE, ..Limits::default() }
}

pub fn no_faults() -> Arc<dyn Faults> {
    Arc::new(NoFaults)
}

pub fn hello(rank: u32, ranks: u32) -> Hello {
    Hello { rank, ranks, ..OWN }
}

/// The hello of a rank of two, as a frame.
fn hello_of(rank: u32) -> Vec<u8> {
    frames::hello(hello(rank, 2))
}

/// A folder that is removed with its owner.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("forebay-links-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn meet(&self, own: Hello, hello: Duration) -> Result<Links, Error> {
        Links::meet(&self.0, own, Limits { hello, ..patient() }, no_faults())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// For each of so many ranks its sockets to all others.
pub fn mesh(ranks: usize) -> Vec<Vec<UnixStream>> {
    let mut all: Vec<Vec<UnixStream>> = (0..ranks).map(|_| Vec::new()).collect();
    for one in 0..ranks {
        for other in 0..one {
            let (a, b) = UnixStream::pair().unwrap();
            all[one].push(a);
            all[other].push(b);
        }
    }
    all
}

/// A process of a group of two, whose other side a test writes byte by byte.
fn beside(bytes: &[u8], faults: Arc<dyn Faults>) -> (Result<Links, Error>, UnixStream) {
    let (own, mut other) = UnixStream::pair().unwrap();
    other.write_all(bytes).unwrap();
    (Links::over(vec![own], OWN, patient(), faults), other)
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

#[test]
fn a_second_process_of_a_rank_is_refused_and_harms_no_other() {
    let folder = Folder::new("second");
    let (own, other) = (hello(0, 2), hello(1, 2));
    thread::scope(|scope| {
        let first = scope.spawn(|| folder.meet(own, PATIENCE));
        while !folder.0.join("forebay-7-0.sock").exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let busy = |own: Hello| {
            let error = folder.meet(own, PATIENCE).unwrap_err();
            assert_eq!((error.kind(), error.place()), (Kind::Busy, "a second process of this rank"));
            assert_eq!(error.number("rank"), Some(u64::from(own.rank)));
        };
        busy(own);
        let second = folder.meet(other, PATIENCE).unwrap();
        let first = first.join().unwrap().unwrap();
        // Also when all have met, for as long as the sessions live.
        busy(own);
        busy(other);
        drop((first, second));
    });
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    let error = folder.meet(own, Duration::ZERO).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(1)));
    assert_eq!(error.advice(), "start all ranks of the group with the same folder");
}

/// Two connections of one rank while the group meets: one process too many, or one that has followed a process that
/// ended.
#[test]
fn a_process_that_follows_one_that_ended_is_no_second_one() {
    for (ends, kind, place) in [
        (false, Kind::InvalidConfig, "two processes of one rank"),
        (true, Kind::PeerLost, "the connection was closed"),
    ] {
        let said = || {
            let (own, mut other) = UnixStream::pair().unwrap();
            other.write_all(&frames::hello(hello(1, 3))).unwrap();
            (own, Some(other))
        };
        let ((first, mut theirs), (second, _other)) = (said(), said());
        if ends {
            theirs = None;
        }
        let error = Links::over(vec![first, second], hello(0, 3), patient(), no_faults()).unwrap_err();
        assert_eq!((error.kind(), error.place(), error.number("rank")), (kind, place, Some(1)), "{error}");
        drop(theirs);
    }
}

/// Many that start at once as one rank, over files that killed processes left: one of them is the rank.
#[test]
fn of_many_starts_over_stale_files_one_is_the_rank() {
    for round in 0..20 {
        let folder = Folder::new(&format!("stale-{round}"));
        drop(UnixListener::bind(folder.0.join("forebay-7-0.sock")).unwrap());
        File::create(folder.0.join("forebay-7-0.lock")).unwrap();
        let begin = Barrier::new(5);
        let results: Vec<_> = thread::scope(|scope| {
            let start = |rank| {
                let (folder, begin) = (&folder, &begin);
                scope.spawn(move || {
                    begin.wait();
                    folder.meet(hello(rank, 2), PATIENCE)
                })
            };
            let all = [start(0), start(0), start(0), start(0), start(1)];
            all.map(|one| one.join().unwrap()).into_iter().collect()
        });
        assert!(results[4].is_ok(), "{:?}", results[4]);
        let mut refused = results.iter().filter_map(|result| result.as_ref().err());
        assert!(refused.all(|error| error.kind() == Kind::Busy), "{results:?}");
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 2);
    }
}

#[test]
fn two_groups_meet_in_one_folder() {
    let folder = Folder::new("groups");
    let all = thread::scope(|scope| {
        let start = |group: u64, rank| {
            let folder = &folder;
            let own = Hello { group, plan: [group as u8; 32], ..hello(rank, 2) };
            scope.spawn(move || folder.meet(own, PATIENCE).unwrap())
        };
        [start(0, 0), start(1, 0), start(0, 1), start(1, 1)].map(|one| one.join().unwrap())
    });
    for links in &all {
        let theirs = links.link(1 - links.own().rank).unwrap().theirs().unwrap();
        assert_eq!((theirs.group, theirs.plan), (links.own().group, links.own().plan));
    }
}

/// One of four dies. Each other one is told once, and goes on with those that live.
#[test]
fn the_survivors_of_a_rank_keep_their_sessions() {
    let (met, dead) = (Barrier::new(4), Barrier::new(4));
    thread::scope(|scope| {
        for (rank, sockets) in (0..).zip(mesh(4)) {
            let (met, dead) = (&met, &dead);
            scope.spawn(move || {
                let links = Links::over(sockets, hello(rank, 4), patient(), no_faults()).unwrap();
                met.wait();
                if rank == 1 {
                    drop(links);
                    dead.wait();
                    return;
                }
                dead.wait();
                survive(links);
            });
        }
    });
}

fn survive(mut links: Links) {
    let own = links.own().rank;
    let others: Vec<u32> = [0, 2, 3].into_iter().filter(|rank| *rank != own).collect();
    let (mut told, mut heard) = (Vec::new(), Vec::new());
    while told.is_empty() {
        match links.event(PATIENCE) {
            Ok(Some((rank, Event::Message { .. }))) => heard.push(rank),
            Ok(other) => panic!("no rank was lost: {other:?}"),
            Err(error) => told.push(error),
        }
    }
    assert_eq!((told[0].kind(), told[0].number("rank")), (Kind::PeerLost, Some(1)), "{}", told[0]);
    assert_eq!(links.lost().collect::<Vec<_>>(), [(1, &told[0])]);
    assert_eq!(links.send(1, b"x", None).unwrap_err(), told[0]);
    assert!(links.link(1).is_none() && !links.is_over());
    for rank in &others {
        links.send(*rank, b"still here", None).unwrap();
    }
    while heard.len() < others.len() {
        // One that has heard all may have ended already.
        match links.event(PATIENCE).unwrap() {
            Some((rank, Event::Message { .. })) => heard.push(rank),
            other => assert!(matches!(other, Some((_, Event::Ended))), "{other:?}"),
        }
    }
    heard.sort_unstable();
    assert_eq!(heard, others);
    links.end().unwrap();
    while !links.is_over() {
        links.event(PATIENCE).unwrap();
    }
    assert_eq!(links.lost().count(), 1);
}

/// Sends signs of life before each look at the socket, once it has the other end.
#[derive(Debug)]
struct Floods {
    other: Mutex<Option<UnixStream>>,
    looks: AtomicU32,
    begun: Instant,
}

impl Faults for Floods {
    fn before(&self, call: Call) -> Option<i32> {
        if call != Call::Receive {
            return None;
        }
        self.looks.fetch_add(1, Ordering::Relaxed);
        if let Some(other) = self.other.lock().unwrap().as_mut() {
            other.write_all(&frame(2, 0, &[]).repeat(1000)).unwrap();
        }
        // A call that does not end is an error in place of a hanging test.
        (self.begun.elapsed() > Duration::from_secs(10)).then_some(libc::EPERM)
    }
}

/// The time is looked at after each piece that arrived: a side that says without end that it lives keeps no other from
/// its own work, whether that one waits or only looks.
#[test]
fn signs_of_life_without_end_do_not_hold_a_call() {
    let floods = || {
        let (other, looks) = (Mutex::new(None), AtomicU32::new(0));
        Arc::new(Floods { other, looks, begun: Instant::now() })
    };
    let faults = floods();
    let (links, other) = beside(&hello_of(0), faults.clone());
    let mut links = links.unwrap();
    *faults.other.lock().unwrap() = Some(other);
    faults.looks.store(0, Ordering::Relaxed);
    assert!(links.event(Duration::ZERO).unwrap().is_none());
    let looks = faults.looks.load(Ordering::Relaxed);
    assert!((2..10).contains(&looks), "{looks} looks");
    // A session that waits.
    let faults = floods();
    let (own, mut other) = UnixStream::pair().unwrap();
    other.write_all(&hello_of(0)).unwrap();
    let mut link = Link::new(own, OWN, patient(), faults.clone()).unwrap();
    assert!(matches!(link.event(PATIENCE), Ok(Some(Event::Hello(_)))));
    *faults.other.lock().unwrap() = Some(other);
    assert!(link.event(Duration::from_millis(20)).unwrap().is_none());
}

/// A rank said that it lives, or a part of a message, and then ended: the first look tells it.
#[test]
fn the_end_behind_what_was_said_is_told_by_the_first_look() {
    let (alive, message) = (frame(2, 0, &[]).repeat(100), frame(3, 0, &[0; 60_000]));
    for said in [&alive[..], &message[..40_000], &message[..59_000]] {
        let (links, mut other) = beside(&hello_of(0), no_faults());
        let mut links = links.unwrap();
        other.write_all(said).unwrap();
        drop(other);
        let error = links.event(Duration::ZERO).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::PeerLost, Some(0)), "{error}");
    }
}

/// Before all have met, a rank that never stops talking is an error, and takes no more memory or descriptors.
#[test]
fn what_a_rank_says_before_all_have_met_has_a_bound() {
    for with in [false, true] {
        let (own, flood) = UnixStream::pair().unwrap();
        let (missing, _silent) = UnixStream::pair().unwrap();
        let error = thread::scope(|scope| {
            scope.spawn(move || {
                let limits = Limits { queue: 1 << 22, ..patient() };
                let mut link = Link::new(flood, hello(0, 3), limits, no_faults()).unwrap();
                while link.theirs().is_none() {
                    link.event(PATIENCE).unwrap();
                }
                for _ in 0..40 {
                    link.send(&vec![0; if with { 0 } else { 60_000 }], with.then(null)).unwrap();
                }
                while link.event(PATIENCE).is_ok_and(|event| event.is_some()) {}
            });
            Links::over(vec![own, missing], hello(1, 3), patient(), no_faults()).map(drop).unwrap_err()
        });
        assert_eq!((error.kind(), error.number("rank")), (Kind::Exhausted, Some(0)), "{error}");
        let expected = if with { 17 } else { 0 };
        assert_eq!(error.number("descriptors"), Some(expected), "{error}");
        assert!(error.number("bytes").unwrap() < (1 << 20) + 61_000);
    }
}

/// Whatever ends a session, its error names the rank; before a hello, the rank that was connected to, or the process.
#[test]
fn every_error_of_a_session_names_its_rank() {
    let good = hello_of(0);
    for (bytes, kind, place) in [
        (frame(9, 0, &[]), Kind::BadFormat, "frame header"),
        (frame(3, 1, b"x"), Kind::BadFormat, "a message without its descriptor"),
        (good.clone(), Kind::BadFormat, "a second hello"),
    ] {
        let (links, _other) = beside(&[&good[..], &bytes].concat(), no_faults());
        // All of it may be read while the group meets.
        let error = links.map(|mut links| links.event(PATIENCE).map(drop).unwrap_err());
        let error = error.unwrap_or_else(|error| error);
        assert_eq!((error.kind(), error.place(), error.number("rank")), (kind, place, Some(0)), "{error}");
    }
    let (links, _other) = beside(b"GET / HTTP/1.1\r\n", no_faults());
    let error = links.unwrap_err();
    let process = Some(u64::from(std::process::id()));
    assert_eq!((error.kind(), error.number("process")), (Kind::BadFormat, process), "{error}");
    // What the system refuses.
    for call in [Call::Send, Call::Receive] {
        let faults = Arc::new(Refuses { call, now: AtomicBool::new(false) });
        let (links, _other) = beside(&good, faults.clone());
        let mut links = links.unwrap();
        links.send(0, b"x", None).unwrap();
        faults.now.store(true, Ordering::Relaxed);
        let error = links.event(PATIENCE).unwrap_err();
        assert_eq!((error.kind(), error.number("rank")), (Kind::OsRefused, Some(0)), "{error}");
        assert_eq!(links.lost().collect::<Vec<_>>(), [(0, &error)]);
        assert!(links.event(PATIENCE).unwrap().is_none() && links.is_over());
    }
}

/// Refuses a call from some moment on.
#[derive(Debug)]
struct Refuses {
    call: Call,
    now: AtomicBool,
}

impl Faults for Refuses {
    fn before(&self, call: Call) -> Option<i32> {
        (call == self.call && self.now.load(Ordering::Relaxed)).then_some(libc::EPERM)
    }
}

/// Behind its hello: a rank that closes its sessions and lives refuses this one, and that is told at once. One that
/// has gone is waited for, as one that closes before its hello or says its end, and the error says how it ended.
#[test]
fn a_rank_that_ends_its_sessions_while_the_group_meets_is_named() {
    let greets = &frames::hello(hello(0, 3))[..];
    let parts = &[greets, &frame(4, 0, &[])].concat()[..];
    let (short, again) = (Duration::from_secs(2), "a process that ended and did not come again");
    let closed = "the connection was closed";
    for (said, patience, kind, place) in [
        (&[greets, greets][..], PATIENCE, Kind::PeerLost, closed.to_string()),
        (&[greets], short, Kind::TimedOut, format!("{again}: {closed}")),
        (&[b"", b""], short, Kind::TimedOut, format!("{again}: {closed}")),
        (&[parts, parts], short, Kind::TimedOut, format!("{again}: it said that it ends")),
    ] {
        let folder = Folder::new("before");
        let listener = UnixListener::bind(folder.0.join("forebay-7-0.sock")).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (last, before) = said.split_last().unwrap();
                before.iter().for_each(|said| listener.accept().unwrap().0.write_all(said).unwrap());
                let mut socket = listener.accept().unwrap().0;
                // Before the last connection ends: no further one is made.
                drop(listener);
                socket.write_all(last).unwrap();
            });
            let error = folder.meet(hello(1, 3), patience).unwrap_err();
            // If fewer connections were made, the test fails and does not wait.
            said.iter().for_each(|_| drop(UnixStream::connect(folder.0.join("forebay-7-0.sock"))));
            assert_eq!((error.kind(), error.place(), error.number("rank")), (kind, &*place, Some(0)));
        });
    }
}

/// A rank is silent, is held for lost, and dies later: the connection that was made to it meanwhile ends too, behind
/// its hello or before. It has refused nothing, so the process that follows it is met by the same calls.
#[test]
fn a_rank_that_was_silent_and_then_dies_is_waited_for() {
    let greets = frames::hello(hello(0, 3));
    let lost = Duration::from_secs(2);
    let limits = Limits { interval: Duration::from_millis(50), lost, ..patient() };
    let case = |name: &str, last: &[u8]| {
        let folder = &Folder::new(name);
        let listener = UnixListener::bind(folder.0.join("forebay-7-0.sock")).unwrap();
        thread::scope(|scope| {
            let meet = |rank| {
                let links = move || Links::meet(&folder.0, hello(rank, 3), limits, no_faults()).unwrap();
                scope.spawn(links)
            };
            let survivor = meet(1);
            let mut stopped = listener.accept().unwrap().0;
            stopped.write_all(&greets).unwrap();
            // Until the survivor closes it.
            let _ = stopped.read_to_end(&mut Vec::new());
            let mut dies = listener.accept().unwrap().0;
            dies.write_all(last).unwrap();
            dies.shutdown(Shutdown::Write).unwrap();
            // A meeting that is complete does not look whether one has ended since.
            let _ = dies.read_to_end(&mut Vec::new());
            drop(listener);
            let all = [survivor, meet(0), meet(2)].map(|one| one.join().unwrap());
            assert!(all.iter().all(|links| links.lost().count() == 0));
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| case("silent", b""));
        scope.spawn(|| case("woken", &greets));
    });
}

/// A process that says its end and goes while others are missing has met this one where no other can follow it.
#[test]
fn a_process_that_says_its_end_stays_met_over_sockets() {
    let (looks, begun) = (AtomicU32::new(0), Instant::now());
    let faults = Arc::new(Floods { other: Mutex::new(None), looks, begun });
    let ((one, mut first), (two, mut second)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    first.write_all(&[frames::hello(hello(0, 3)), frame(4, 0, &[])].concat()).unwrap();
    drop(first);
    let mut links = thread::scope(|scope| {
        let links = scope.spawn(|| Links::over(vec![one, two], hello(2, 3), patient(), faults.clone()));
        // Its end has been seen by then.
        while faults.looks.load(Ordering::Relaxed) < 50 && !links.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        second.write_all(&frames::hello(hello(1, 3))).unwrap();
        links.join().unwrap().unwrap()
    });
    assert!(matches!(links.event(PATIENCE), Ok(Some((0, Event::Ended)))) && links.link(0).unwrap().is_over());
}

/// The first process of a rank ends while the group meets, before its hello or when it has said something, also that it
/// ends: its rank is met all the same, by the same calls, and what it said is gone.
#[test]
fn a_rank_that_is_started_again_while_the_group_meets_is_met_by_the_same_calls() {
    for dead in 0..3_u32 {
        let greets = frames::hello(hello(dead, 3));
        let says = frame(3, 0, b"of the first");
        for (case, said) in
            [&[][..], &[&greets, &says], &[&greets, &says, &frame(4, 0, &[])]].iter().enumerate()
        {
            let folder = &Folder::new(&format!("anew-{dead}-{case}"));
            let path = |rank: u32| folder.0.join(format!("forebay-7-{rank}.sock"));
            let [first, second] = [[1, 2], [0, 2], [0, 1]][dead as usize];
            let mut all: Vec<Links> = thread::scope(|scope| {
                let meet = |rank: u32| scope.spawn(move || folder.meet(hello(rank, 3), PATIENCE).unwrap());
                let listener = (dead == 0).then(|| UnixListener::bind(path(0)).unwrap());
                let first = (meet(first), path(first));
                let mut socket = match listener {
                    Some(listener) => listener.accept().unwrap().0,
                    None => {
                        while !first.1.exists() {
                            thread::sleep(Duration::from_millis(1));
                        }
                        UnixStream::connect(&first.1).unwrap()
                    }
                };
                said.iter().for_each(|said| socket.write_all(said).unwrap());
                // As a process that ends; the other side answers when it has noticed.
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket.shutdown(Shutdown::Write).unwrap();
                socket.read_to_end(&mut Vec::new()).unwrap();
                [first.0, meet(second), meet(dead)].map(|one| one.join().unwrap()).into_iter().collect()
            });
            for links in &mut all {
                assert!(links.lost().count() == 0 && links.event(Duration::ZERO).unwrap().is_none());
            }
        }
    }
}

#[test]
fn another_number_of_sockets_than_of_other_ranks_is_refused_at_once() {
    for count in [0, 1, 3] {
        let sockets = mesh(4).swap_remove(0).into_iter().take(count).collect();
        let error = Links::over(sockets, hello(0, 3), patient(), no_faults()).unwrap_err();
        assert_eq!((error.kind(), error.number("sockets")), (Kind::InvalidConfig, Some(count as u64)));
    }
    // A rank that never says hello is named, and no folder is.
    let (own, _other) = UnixStream::pair().unwrap();
    let short = Limits { hello: Duration::from_millis(20), ..patient() };
    let error = Links::over(vec![own], hello(0, 2), short, no_faults()).unwrap_err();
    assert_eq!((error.kind(), error.number("rank")), (Kind::TimedOut, Some(1)));
    assert!(!error.advice().contains("folder"), "{error}");
}
