//! Ends that go wrong: places in use, ends that stop or go, and memory that is not what was said of it.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay::Kind as Error;
use forebay::os::{NoFaults, Protection, Request};
use forebay::transfer::fabric::Happened;
use forebay::transfer::memory::{Planes, SendMemory};
use forebay::transfer::socket::{Options, TOKEN_MIN, Token};

use crate::rig::{
    Address, Pair, Polled, SocketReceiver, SocketSender, Way, connect, file, frame, listen, memory, options,
    path, try_send, until,
};
use crate::stranger::{Stranger, hello, record};

#[test]
fn places_in_use_are_busy_and_what_a_killed_process_left_is_replaced() {
    let (tcp, at) = listen(Way::Tcp, options(), None).unwrap();
    let error = listen(Way::Tcp, options(), Some(&at)).err().unwrap();
    assert_eq!(error.kind(), Error::Busy, "{error}");
    drop(tcp);
    drop(listen(Way::Tcp, options(), Some(&at)).unwrap());

    let (shm, at) = listen(Way::Shm, options(), None).unwrap();
    let error = listen(Way::Shm, options(), Some(&at)).err().unwrap();
    assert_eq!(error.kind(), Error::Busy, "{error}");
    drop(shm);
    assert!(!file(&at).exists());
    // The standard library leaves the file, as a killed process does.
    drop(UnixListener::bind(file(&at)).unwrap());
    assert!(file(&at).exists());
    drop(listen(Way::Shm, options(), Some(&at)).unwrap());
    // A file that is no socket is left alone.
    File::create(file(&at)).unwrap().write_all(b"kept").unwrap();
    let error = listen(Way::Shm, options(), Some(&at)).err().unwrap();
    assert_eq!(error.kind(), Error::Busy, "{error}");
    assert_eq!(std::fs::read(file(&at)).unwrap(), b"kept");
    std::fs::remove_file(file(&at)).unwrap();
    let error = SocketReceiver::bind(options(), &Address::Shm(path().join("no/folder"))).unwrap_err();
    assert_eq!(error.kind(), Error::OsRefused, "{error}");
}

#[test]
fn addresses_of_a_network_need_a_token_and_options_must_agree() {
    let all = &Address::new(Way::Tcp, "0.0.0.0:0").unwrap();
    let error = SocketReceiver::bind(Options::default(), all).unwrap_err();
    assert_eq!(error.kind(), Error::InvalidConfig);
    assert!(error.to_string().contains("token"), "{error}");
    SocketReceiver::bind(options(), all).unwrap();
    let far = Address::new(Way::Tcp, "192.0.2.1:7").unwrap();
    let error = connect(Way::Tcp, Options::default(), memory(), std::slice::from_ref(&far)).unwrap_err();
    assert_eq!(error.kind(), Error::InvalidConfig);
    let mut sender = SocketSender::new(Way::Tcp, Options::default(), memory()).unwrap();
    assert_eq!(sender.add(far).unwrap_err().kind(), Error::InvalidConfig);
    for local in ["127.0.0.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        sender.add(Address::new(Way::Tcp, local).unwrap()).unwrap();
    }
    let error = Token::new(&[7; TOKEN_MIN - 1]).unwrap_err();
    assert_eq!((error.kind(), error.number("bytes")), (Error::InvalidConfig, Some(15)));
    assert_eq!(format!("{:?}", Token::new(&[7; TOKEN_MIN]).unwrap()), "Token");
    let second = Duration::from_secs(1);
    for wrong in [
        Options { lost: second, alive: second, ..options() },
        Options { alive: Duration::ZERO, ..options() },
        Options { queue: 1 << 16, ..options() },
        Options { unopened: 0, ..options() },
        Options { links: 0, ..options() },
        Options { opening: Duration::ZERO, ..options() },
        Options { rows_max: 1 << 33, ..options() },
    ] {
        let error = SocketSender::new(Way::Tcp, wrong, memory()).unwrap_err();
        assert_eq!(error.kind(), Error::InvalidConfig);
    }
    let request =
        Request { bytes: 4096, huge: false, populate: false, lock: false, node: None, shared: false };
    let (private, _) = SendMemory::new(&request, Planes(Vec::new()), &NoFaults).unwrap();
    let error = SocketSender::new(Way::Shm, options(), Arc::new(private)).unwrap_err();
    assert_eq!(error.kind(), Error::Unsupported);
}

/// Ends with nothing to say stay connected; one that is not polled is lost after the limit and not before.
fn silent(way: Way) {
    let limit = Duration::from_secs(2);
    let options = Options { alive: Duration::from_millis(100), lost: limit, ..options() };
    let mut pair = Pair::new(way, &options);
    let start = Instant::now();
    pair.until("a limit and a half", |_| start.elapsed() > 3 * limit / 2);
    let lost = |of: &[Happened]| of.iter().any(|of| matches!(of, Happened::Lost { .. }));
    assert!(!lost(&pair.sender.happened) && !lost(&pair.receiver.happened));
    assert!(pair.sender.happened.iter().any(|of| matches!(of, Happened::Alive { .. })));
    for sender in [true, false] {
        pair.until("a connection", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
        let (start, polled) =
            (Instant::now(), if sender { pair.sender.happened.len() } else { pair.receiver.happened.len() });
        until("the loss of an end that is not polled", || {
            let of = match sender {
                true => {
                    pair.sender.poll();
                    &pair.sender.happened
                }
                false => {
                    pair.receiver.poll();
                    &pair.receiver.happened
                }
            };
            lost(&of[polled..])
        });
        let passed = start.elapsed();
        assert!(passed > limit / 2 && passed < 5 * limit, "{passed:?}");
        let failures = if sender { &pair.sender.failures } else { &pair.receiver.failures };
        assert!(failures.iter().any(|of| of.place() == "no sign of life"), "{failures:?}");
        // It is polled again, learns it, and is connected anew.
        pair.until("the next connection", |pair| {
            pair.sender.link().is_some() && pair.receiver.link().is_some()
        });
    }
}

#[test]
fn an_end_that_is_not_polled_is_lost_after_the_limit() {
    std::thread::scope(|scope| {
        scope.spawn(|| silent(Way::Tcp));
        silent(Way::Shm);
    });
}

/// An end that goes is lost within a moment, not after the limit, and its successor is connected.
fn gone(way: Way) {
    let options = options();
    let mut pair = Pair::new(way, &options);
    for round in 0..4 {
        let start = Instant::now();
        let lost = |of: &[Happened]| of.iter().filter(|of| matches!(of, Happened::Lost { .. })).count();
        let before = [lost(&pair.sender.happened), lost(&pair.receiver.happened)];
        if round % 2 == 0 {
            let sender = connect(way, options.clone(), memory(), std::slice::from_ref(&pair.at)).unwrap();
            pair.sender = Polled::new(sender);
            pair.until("the loss of a sender", |pair| lost(&pair.receiver.happened) > before[1]);
        } else {
            let Pair { sender, receiver, at } = pair;
            drop(receiver);
            let (receiver, at) = listen(way, options.clone(), Some(&at)).unwrap();
            pair = Pair { sender, receiver: Polled::new(receiver), at };
            pair.until("the loss of a receiver", |pair| lost(&pair.sender.happened) > before[0]);
        }
        assert!(start.elapsed() < options.lost, "{:?}", start.elapsed());
        pair.until("a successor", |pair| pair.sender.link().is_some() && pair.receiver.link().is_some());
    }
    pair.is_served();
    // A receiver that is removed is not connected again.
    pair.sender.end.remove(&pair.at);
    pair.until("the end of a receiver that is removed", |pair| {
        pair.sender.link().is_none() && pair.receiver.link().is_none()
    });
    let start = Instant::now();
    pair.until("half a second", |_| start.elapsed() > Duration::from_millis(500));
    assert!(pair.sender.link().is_none() && pair.receiver.link().is_none());
}

#[test]
fn an_end_that_goes_is_lost_at_once_and_its_successor_is_connected() {
    gone(Way::Tcp);
    gone(Way::Shm);
}

/// A wait ends with a frame, long before its time; one with nothing to come does not spin.
fn waits(way: Way) {
    // No sign of life ends a wait here.
    let (alive, lost) = (Duration::from_secs(60), Duration::from_secs(120));
    let mut pair = Pair::new(way, &Options { alive, lost, ..options() });
    pair.is_served();
    let start = Instant::now();
    let mut turns = 0;
    while start.elapsed() < Duration::from_millis(300) {
        use forebay::transfer::socket::Socket;
        pair.sender.poll();
        pair.receiver.poll();
        pair.receiver.end.wait(Duration::from_millis(50)).unwrap();
        turns += 1;
    }
    assert!(turns < 20, "{turns} turns");
    let Pair { mut sender, mut receiver, .. } = pair;
    let came = receiver.frames.len();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use forebay::transfer::socket::Socket;
            while receiver.frames.len() == came {
                receiver.poll();
                receiver.end.wait(Duration::from_secs(5)).unwrap();
                receiver.poll();
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        try_send(&mut sender, &frame(1, 10)).unwrap();
    });
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn a_wait_ends_with_what_comes_and_does_not_spin() {
    waits(Way::Tcp);
    waits(Way::Shm);
}

/// One more connection than an end may have is closed, with the reason.
#[test]
fn connections_beyond_the_bound_are_closed() {
    let options = Options { links: 1, ..options() };
    let mut pair = Pair::new(Way::Tcp, &options);
    let mut other =
        Polled::new(connect(Way::Tcp, options, memory(), std::slice::from_ref(&pair.at)).unwrap());
    until("a refusal", || {
        pair.receiver.poll();
        other.poll();
        pair.receiver.has(Error::Exhausted) && other.has(Error::Exhausted)
    });
    assert!(other.happened.is_empty(), "it was told that it is connected: {:?}", other.happened);
    pair.is_served();
}

/// What a sender says of its memory: bytes and planes.
fn memory_record(bytes: u64, planes: &[u64]) -> Vec<u8> {
    let numbers = [bytes].into_iter().chain(planes.iter().copied());
    record(3, &numbers.flat_map(u64::to_le_bytes).collect::<Vec<_>>(), 0)
}

/// A receiver is given a memory by hand.
fn given(bytes: &[u8], descriptor: Option<&OwnedFd>) -> (Polled<SocketReceiver>, Vec<u8>) {
    let (receiver, at) = listen(Way::Shm, Options::default(), None).unwrap();
    let mut receiver = Polled::new(receiver);
    let mut stranger = crate::stranger::opened(&at, || receiver.poll());
    assert!(receiver.happened.is_empty(), "connected before its memory is there");
    stranger.say(bytes, descriptor);
    let mut came = Vec::new();
    until("an answer", || {
        receiver.poll();
        let open = stranger.read(&mut came);
        !open || !receiver.happened.is_empty()
    });
    (receiver, came)
}

#[test]
fn memory_that_is_not_what_was_said_is_refused_at_both_ends() {
    let memory = memory();
    let bytes = memory.map().len();
    let good = memory.map().export(Protection::Read, &NoFaults).unwrap();
    let (receiver, _) = given(&memory_record(bytes, &[0, 64]), Some(&good));
    assert!(receiver.link().is_some(), "control: {:?}", receiver.failures);
    let plain: OwnedFd = File::open("/proc/self/exe").unwrap().into();
    // A memfd whose size may change: its owner could end the receiver by a signal.
    let loose =
        nix::sys::memfd::memfd_create(c"loose", nix::sys::memfd::MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&loose, bytes as i64).unwrap();
    // One of fixed size that others may still write, and take pages out of.
    let request = Request { bytes, huge: false, populate: false, lock: false, node: None, shared: true };
    let (written, _) = SendMemory::new(&request, Planes(Vec::new()), &NoFaults).unwrap();
    let written = written.map().export(Protection::ReadWrite, &NoFaults).unwrap();
    let wrong = [
        (memory_record(bytes + 4096, &[0, 64]), Some(&good)),
        (memory_record(bytes - 4096, &[0, 64]), Some(&good)),
        (memory_record(u64::MAX, &[0, 64]), Some(&good)),
        (memory_record(0, &[0, 64]), Some(&good)),
        (memory_record(bytes, &[0]), Some(&good)),
        (memory_record(bytes, &[0, 64]), None),
        (memory_record(bytes, &[0, 64]), Some(&plain)),
        (memory_record(bytes, &[0, 64]), Some(&loose)),
        (memory_record(bytes, &[0, 64]), Some(&written)),
        (record(4, &frame(1, 1), 0), Some(&good)),
    ];
    let handed = [&good, &plain, &loose, &written];
    let open = open_files(handed);
    assert!(open >= 4, "the count sees this test's own");
    for (bytes, descriptor) in wrong {
        let (receiver, came) = given(&bytes, descriptor);
        assert!(receiver.has(Error::BadFormat), "{:?}", receiver.failures);
        assert!(receiver.happened.is_empty());
        // The other end is told that it is the memory.
        assert_eq!(came, record(2, &[2], 0));
    }
    // Other tests open this program too, for a moment.
    until("the descriptors that were refused to be closed", || open_files(handed) <= open);
}

/// How many descriptors of these files this process has.
fn open_files(of: [&OwnedFd; 4]) -> usize {
    let number = |of: std::fs::Metadata| (of.dev(), of.ino());
    let of = of.map(|of| number(File::from(of.try_clone().unwrap()).metadata().unwrap()));
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.filter(|open| std::fs::metadata(open.path()).is_ok_and(|open| of.contains(&number(open)))).count()
}

/// A descriptor that no record announces is refused, and closed.
#[test]
fn a_descriptor_that_is_not_awaited_is_refused_and_closed() {
    let (receiver, at) = listen(Way::Shm, Options::default(), None).unwrap();
    let mut receiver = Polled::new(receiver);
    let (reader, writer) = std::io::pipe().unwrap();
    let mut stranger = Stranger::new(&at);
    stranger.say(&hello(1, 1, 2, 0), Some(&OwnedFd::from(writer)));
    until("a refusal", || {
        receiver.poll();
        receiver.has(Error::BadFormat)
    });
    has_ended(reader);
    // With a record that announces none, on a connection that is open.
    let memory = memory();
    let good = memory.map().export(Protection::Read, &NoFaults).unwrap();
    let mut stranger = crate::stranger::opened(&at, || receiver.poll());
    stranger.say(&memory_record(memory.map().len(), &[0, 64]), Some(&good));
    until("a connection", || {
        receiver.poll();
        receiver.link().is_some()
    });
    receiver.failures.clear();
    let (reader, writer) = std::io::pipe().unwrap();
    stranger.say(&record(5, &[], 0), Some(&OwnedFd::from(writer)));
    until("a refusal", || {
        receiver.poll();
        receiver.has(Error::BadFormat) && receiver.link().is_none()
    });
    has_ended(reader);
}

/// A pipe ends when no process holds its other end.
fn has_ended(reader: std::io::PipeReader) {
    let reader = OwnedFd::from(reader);
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
    assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0));
}

/// A sender whose memory a receiver refuses learns that it is the memory.
#[test]
fn a_sender_learns_that_its_memory_was_refused() {
    let listener = UnixListener::bind(path()).unwrap();
    let at = Address::Shm(listener.local_addr().unwrap().as_pathname().unwrap().to_owned());
    let mut sender =
        Polled::new(connect(Way::Shm, Options::default(), memory(), std::slice::from_ref(&at)).unwrap());
    sender.poll();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut receiver = Stranger::Unix(socket);
    // Its hello and its proof, and then the memory.
    let mut own = hello(1, 2, 2, 0);
    own.extend(record(1, &[0; 32], 0));
    receiver.say(&own, None);
    let came = receiver.await_bytes(48 + 44 + 12, || sender.poll());
    assert!(came.len() > 48 + 44 + 12 && came[48 + 44 + 8] == 3, "{came:?}");
    assert!(sender.link().is_some());
    receiver.say(&record(2, &[2], 0), None);
    until("the loss", || {
        sender.poll();
        sender.has(Error::BadFormat)
    });
    assert_eq!(sender.failures[0].place(), "the other end cannot use this end's memory");
    std::fs::remove_file(file(&at)).unwrap();
}
