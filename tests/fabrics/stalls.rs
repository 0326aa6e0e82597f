//! Ends that stop reading, that are not polled for a while, and that start at the same moment.

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay::Kind as Error;
use forebay::os::{Call, Faults, NoFaults, Protection};
use forebay::transfer::fabric::{Fabric, Happened, ReceiverFabric};
use forebay::transfer::socket::{Options, Socket};

use crate::rig::{
    Address, Pair, Polled, SocketReceiver, Way, connect, frame, listen, memory, options, path, try_send,
    until,
};
use crate::stranger::{Stranger, hello, opened, record};

/// A stranger that has opened a connection, and over shared memory has handed over a memory.
fn joined(at: &Address, mut poll: impl FnMut()) -> Stranger {
    let mut stranger = opened(at, &mut poll);
    if stranger.is_unix() {
        let memory = memory();
        let descriptor = memory.map().export(Protection::Read, &NoFaults).unwrap();
        let told: Vec<u8> = [memory.map().len(), 0, 64].into_iter().flat_map(u64::to_le_bytes).collect();
        stranger.say(&record(3, &told, 0), Some(&descriptor));
        poll();
    }
    stranger
}

/// An end whose socket is full waits as long as it says, also when a sign of life would be due.
fn waits_when_full(way: Way) {
    let options = Options { alive: Duration::from_millis(1), lost: Duration::from_secs(60), ..options() };
    let mut pair = Pair::new(way, &options);
    let mut sent = pair.receiver.frames.len();
    while let Ok(()) = try_send(&mut pair.sender, &frame(1, 60_000)) {
        sent += 1;
    }
    pair.sender.poll();
    std::thread::sleep(Duration::from_millis(5));
    let (start, mut turns) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(300) {
        pair.sender.end.wait(Duration::from_millis(50)).unwrap();
        pair.sender.poll();
        turns += 1;
    }
    // Signs of life that the receiver had sent before, and six waits.
    assert!(turns < 30, "{turns} turns");
    assert!(pair.sender.link().is_some());
    pair.until("what waits", |pair| pair.receiver.frames.len() == sent);
    pair.is_served();
}

#[test]
fn a_wait_with_a_full_socket_does_not_spin() {
    waits_when_full(Way::Tcp);
    waits_when_full(Way::Shm);
}

/// A peer that gives signs of life and never reads is lost after the limit, and one that reads slowly is not.
fn never_reads(way: Way, reads: bool) {
    let limit = Duration::from_secs(1);
    let options = Options { alive: Duration::from_millis(50), lost: limit, ..Options::default() };
    let (receiver, at) = listen(way, options, None).unwrap();
    let mut receiver = Polled::new(receiver);
    let mut stranger = joined(&at, || receiver.poll());
    until("a connection", || {
        receiver.poll();
        receiver.link().is_some()
    });
    let (link, start) = (receiver.link().unwrap(), Instant::now());
    let mut came = Vec::new();
    until("the end of a peer that never reads", || {
        while let Ok(()) = receiver.end.send(link, &frame(1, 60_000)) {}
        stranger.write(&record(5, &[], 0));
        receiver.poll();
        if reads {
            stranger.read(&mut came);
            came.clear();
        }
        receiver.link().is_none() || reads && start.elapsed() > 2 * limit
    });
    assert!(start.elapsed() > limit / 2);
    assert_eq!(receiver.link().is_none(), !reads, "{:?}", receiver.failures);
    let stuck = receiver.failures.iter().any(|of| of.place() == "an end that reads nothing");
    assert_eq!(stuck, !reads, "{:?}", receiver.failures);
}

#[test]
fn a_peer_that_never_reads_is_lost() {
    for reads in [false, true] {
        never_reads(Way::Tcp, reads);
        never_reads(Way::Shm, reads);
    }
}

/// Floods of frames while a receiver is not polled cost it nothing, and later little.
fn floods(way: Way) {
    let mut pair = Pair::new(way, &Options::default());
    let own = pair.receiver.link().unwrap();
    let mut strangers: Vec<_> = (0..4).map(|_| joined(&pair.at, || pair.receiver.poll())).collect();
    let before = pair.receiver.end.kept();
    let flood = [record(5, &[], 0), record(4, &frame(9, 40_000), 0)].concat();
    let kept = [&flood[..]; 50].concat();
    for stranger in &mut strangers {
        // As much as the sockets hold.
        stranger.write(&kept);
    }
    assert_eq!(pair.receiver.end.kept(), before);
    let last = frame(77, 300);
    try_send(&mut pair.sender, &last).unwrap();
    pair.receiver.end.send(own, &last).unwrap();
    pair.until("a frame each way", |pair| {
        assert!(pair.receiver.end.kept() < 4 << 20, "{}", pair.receiver.end.kept());
        pair.sender.frames.contains(&last) && pair.receiver.frames.contains(&last)
    });
    // Control: the floods came too.
    assert!(pair.receiver.frames.iter().filter(|of| **of == frame(9, 40_000)).count() >= 4);
}

#[test]
fn floods_of_strangers_that_have_opened_cost_little() {
    floods(Way::Tcp);
    floods(Way::Shm);
}

/// Memory that a long record has taken is given back.
#[test]
fn what_a_long_record_took_is_given_back() {
    let (receiver, at) = listen(Way::Tcp, Options::default(), None).unwrap();
    let mut receiver = Polled::new(receiver);
    let mut stranger = opened(&at, || receiver.poll());
    let rows: u32 = 8 << 20;
    let mut all = record(4, &frame(1, 10), rows);
    all.extend([1_u32, rows - 8].into_iter().flat_map(u32::to_le_bytes));
    all.resize(all.len() + rows as usize - 8, 7);
    let (mut said, mut most) = (0, 0);
    until("a frame with its rows", || {
        said += stranger.write(&all[said..]).unwrap();
        receiver.poll();
        most = most.max(receiver.end.kept());
        !receiver.frames.is_empty()
    });
    // It grows to what it needs and a piece, and not to twice as much.
    assert!(most >= rows as usize && most < rows as usize + (1 << 20), "{most}");
    stranger.say(&record(5, &[], 0), None);
    until("the end of the buffer", || {
        receiver.poll();
        receiver.end.kept() <= 1 << 18
    });
    assert!(receiver.link().is_some());
}

/// Neither end is polled for longer than the limit, as when the whole host is held up: the connection lives on.
fn held_up(way: Way) {
    let options = Options { alive: Duration::from_millis(300), lost: Duration::from_secs(1), ..options() };
    let mut pair = Pair::new(way, &options);
    let start = Instant::now();
    pair.until("some signs of life", |_| start.elapsed() > Duration::from_millis(700));
    // Nothing is left to read, so that only the time speaks.
    pair.until("what is on its way", |_| start.elapsed() > Duration::from_millis(720));
    pair.sender.poll();
    std::thread::sleep(Duration::from_millis(1500));
    pair.sender.poll();
    pair.is_served();
    let lost = |of: &[Happened]| of.iter().any(|of| matches!(of, Happened::Lost { .. }));
    assert!(!lost(&pair.sender.happened) && !lost(&pair.receiver.happened));
}

#[test]
fn an_end_that_was_held_up_does_not_lose_connections_by_itself() {
    held_up(Way::Tcp);
    held_up(Way::Shm);
}

/// The longest times there are mean never, and overflow nothing.
#[test]
fn times_beyond_all_clocks_are_never() {
    let lost = Duration::MAX;
    let (alive, opening) = (lost - Duration::from_nanos(1), lost);
    let mut pair = Pair::new(Way::Tcp, &Options { alive, lost, opening, ..options() });
    pair.is_served();
    assert_eq!(pair.sender.end.due(), Duration::MAX);
    pair.sender.end.wait(Duration::from_millis(1)).unwrap();
}

/// Refuses one call to send, when it is told to.
#[derive(Debug, Default)]
struct Once(AtomicBool);

impl Faults for Once {
    fn before(&self, call: Call) -> Option<i32> {
        (call == Call::Send && self.0.swap(false, Ordering::Relaxed)).then_some(libc::ENOBUFS)
    }
}

/// An error of sending that no call returned loses the connection.
#[test]
fn an_error_of_sending_is_not_forgotten() {
    let once = Arc::new(Once::default());
    let (receiver, at) = listen(Way::Tcp, options(), None).unwrap();
    drop(receiver);
    let options = Options { faults: once.clone(), ..options() };
    let (receiver, at) = listen(Way::Tcp, options.clone(), Some(&at)).unwrap();
    let sender = connect(Way::Tcp, options, memory(), std::slice::from_ref(&at)).unwrap();
    let mut pair = Pair { sender: Polled::new(sender), receiver: Polled::new(receiver), at };
    pair.until("a connection", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
    pair.is_served();
    once.0.store(true, Ordering::Relaxed);
    try_send(&mut pair.sender, &frame(7, 100)).unwrap();
    assert!(!once.0.load(Ordering::Relaxed), "the call was refused");
    assert_eq!(pair.sender.end.due(), Duration::ZERO);
    let before = pair.receiver.frames.len();
    pair.sender.poll();
    assert!(pair.sender.has(Error::OsRefused), "{:?}", pair.sender.failures);
    pair.until("the next connection", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
    assert_eq!(pair.receiver.frames.len(), before);
    pair.is_served();
}

/// A host that cannot be reached is said; a port at which no process listens is not.
#[test]
fn a_host_that_cannot_be_reached_is_told() {
    #[derive(Debug)]
    struct Unreachable;
    impl Faults for Unreachable {
        fn before(&self, call: Call) -> Option<i32> {
            (call == Call::Credentials).then_some(libc::EHOSTUNREACH)
        }
    }
    let (receiver, at) = listen(Way::Tcp, options(), None).unwrap();
    drop(receiver);
    let start = Instant::now();
    let mut sender = Polled::new(connect(Way::Tcp, options(), memory(), std::slice::from_ref(&at)).unwrap());
    until("some attempts", || {
        sender.poll();
        start.elapsed() > Duration::from_millis(100)
    });
    assert!(sender.failures.is_empty(), "{:?}", sender.failures);
    let options = Options { faults: Arc::new(Unreachable), ..options() };
    let mut sender = Polled::new(connect(Way::Tcp, options, memory(), &[at]).unwrap());
    until("a failure", || {
        sender.poll();
        sender.has(Error::PeerLost)
    });
    assert!(sender.failures[0].place().contains("No route"), "{:?}", sender.failures);
}

/// What waits to be told of a connection goes with it.
#[test]
fn nothing_is_told_of_a_connection_that_was_closed() {
    for removes in [false, true] {
        let options = options();
        let ends: Vec<_> = (0..2).map(|_| listen(Way::Tcp, options.clone(), None).unwrap()).collect();
        let at: Vec<Address> = ends.iter().map(|(_, at)| at.clone()).collect();
        let mut receivers: Vec<_> = ends.into_iter().map(|(end, _)| Polled::new(end)).collect();
        let mut sender = connect(Way::Tcp, options, memory(), &at).unwrap();
        let mut buffer = Vec::new();
        let mut first = None;
        until("two connections at once", || {
            for receiver in &mut receivers {
                for _ in 0..5 {
                    receiver.poll();
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            first = sender.poll(&mut buffer).unwrap();
            first.is_some()
        });
        let first_link = match first {
            Some(Happened::Connected { link, .. }) => link,
            other => panic!("{other:?}"),
        };
        // The other one waits to be told.
        let other = first_link + 1;
        assert_eq!(sender.due(), Duration::ZERO);
        if removes {
            sender.remove(&at[0]);
            sender.remove(&at[1]);
        } else {
            sender.close(other);
        }
        while let Some(happened) = sender.poll(&mut buffer).unwrap() {
            if let Happened::Connected { link, .. } | Happened::Lost { link } = happened {
                assert_ne!(link, other, "{happened:?}");
            }
        }
    }
}

/// Of receivers that start at once at a path that a killed process left, one listens there.
#[test]
fn of_two_receivers_that_start_at_once_one_is_refused() {
    for round in 0..200 {
        let path = path();
        // The standard library leaves the file.
        drop(UnixListener::bind(&path).unwrap());
        let start = std::sync::Barrier::new(2);
        let bind = || {
            start.wait();
            SocketReceiver::bind(Options::default(), &Address::Shm(path.clone()))
        };
        let bound = std::thread::scope(|scope| {
            let other = scope.spawn(bind);
            [bind(), other.join().unwrap()]
        });
        let kinds: Vec<_> =
            bound.iter().filter_map(|of| of.as_ref().err().map(forebay::Error::kind)).collect();
        assert_eq!(kinds, [Error::Busy], "round {round}");
        drop(std::os::unix::net::UnixStream::connect(&path).unwrap());
        drop(bound);
        assert!(!path.exists() && !path.with_extension("lock").exists());
    }
}

/// A receiver that goes leaves what another program has put in its place.
#[test]
fn a_socket_that_another_program_put_there_is_left() {
    let path = path();
    let receiver = SocketReceiver::bind(Options::default(), &Address::Shm(path.clone())).unwrap();
    std::fs::rename(&path, path.with_extension("away")).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(receiver);
    drop(std::os::unix::net::UnixStream::connect(&path).unwrap());
    drop(other);
    std::fs::remove_file(&path).unwrap();
    std::fs::remove_file(path.with_extension("away")).unwrap();
}

/// Strangers that say nothing do not drive out one that has said hello.
#[test]
fn one_that_has_said_hello_is_not_driven_out_by_silent_ones() {
    let options = Options { unopened: 4, opening: Duration::from_secs(60), ..Options::default() };
    let (receiver, at) = listen(Way::Tcp, options, None).unwrap();
    let mut receiver = Polled::new(receiver);
    let mut polite = Stranger::new(&at);
    polite.say(&hello(1, 1, 1, 0), None);
    assert_eq!(polite.await_bytes(48, || receiver.poll()).len(), 48);
    let mut silent: Vec<_> = (0..20).map(|_| Stranger::new(&at)).collect();
    until("the end of most silent ones", || {
        receiver.poll();
        silent.iter_mut().filter_map(|of| of.read(&mut Vec::new()).then_some(())).count() <= 3
    });
    polite.say(&record(1, &[0; 32], 0), None);
    assert_eq!(polite.await_bytes(44, || receiver.poll()), record(1, &[0; 32], 0));
}
