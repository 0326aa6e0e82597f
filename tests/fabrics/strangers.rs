//! Strangers at a receiver that serves others: nonsense, silence, floods, claims. Each costs little, is said in one
//! error, and holds up no one else.

use std::time::{Duration, Instant};

use forebay::Kind as Error;
use forebay::transfer::fabric::Happened;
use forebay::transfer::socket::{Options, Token};

use crate::rig::{Pair, Polled, Way, connect, frame, listen, memory, options, until};
use crate::stranger::{Stranger, hello, opened, record};

/// Memory that strangers may cost a receiver: what it keeps for 64 connections that are not open, and some.
const LITTLE: usize = 2 << 20;

/// A stranger that says something is dropped with this error, while others are served.
fn dropped(pair: &mut Pair, bytes: &[u8], kind: Error) {
    let mut stranger = Stranger::new(&pair.at);
    stranger.write(bytes);
    pair.receiver.failures.clear();
    let mut came = Vec::new();
    until("the end of a stranger", || {
        pair.sender.poll();
        pair.receiver.poll();
        !stranger.read(&mut came)
    });
    assert!(pair.receiver.has(kind), "{:?} after {bytes:?}", pair.receiver.failures);
    pair.is_served();
}

fn nonsense(way: Way) {
    let mut pair = Pair::new(way, &Options::default());
    dropped(&mut pair, b"GET / HTTP/1.1\r\n\r\n", Error::BadFormat);
    dropped(&mut pair, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", Error::BadFormat);
    dropped(&mut pair, &[0; 4096], Error::BadFormat);
    dropped(&mut pair, b"F0", Error::BadFormat);
    dropped(&mut pair, &hello(2, 1, way as u8, 0), Error::BadVersion);
    dropped(&mut pair, &hello(u32::MAX, 9, 9, 9), Error::BadVersion);
    // A receiver, the other fabric, a token that this end does not have, a byte that is not zero.
    dropped(&mut pair, &hello(1, 2, way as u8, 0), Error::BadFormat);
    dropped(&mut pair, &hello(1, 1, 3 - way as u8, 0), Error::BadFormat);
    dropped(&mut pair, &hello(1, 1, way as u8, 1), Error::InvalidConfig);
    let with = |record: &[u8]| [&hello(1, 1, way as u8, 0), record].concat();
    dropped(&mut pair, &with(&record(1, &[1; 32], 0)), Error::InvalidConfig);
    dropped(&mut pair, &with(&record(4, &[0; 9], 0)), Error::BadFormat);
    dropped(&mut pair, &with(&record(1, &[0; 31], 0)), Error::BadFormat);
    dropped(&mut pair, &with(&[0xFF; 12]), Error::BadFormat);
    // Headers alone, of records that may come later: what they announce is not awaited.
    dropped(&mut pair, &with(&record(4, &[0; 9], 0)[..12]), Error::BadFormat);
    dropped(
        &mut pair,
        &with(&[&60_000_u32.to_le_bytes()[..], &[0; 4], &[3, 0, 0, 0]].concat()),
        Error::BadFormat,
    );
    // A linear congruential generator's bytes.
    let mut state = 1_u64;
    for _ in 0..50 {
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        let length = usize::from(byte()) + 1;
        let bytes: Vec<u8> = (0..length).map(|_| byte()).collect();
        dropped(&mut pair, &bytes, Error::BadFormat);
    }
    assert!(pair.receiver.end.kept() < LITTLE);
}

#[test]
fn bytes_of_strangers_are_dropped_and_others_are_served() {
    nonsense(Way::Tcp);
    nonsense(Way::Shm);
}

/// An opened stranger's records.
fn claims(way: Way) {
    let mut pair = Pair::new(way, &Options::default());
    let is_stream = matches!(pair.at, forebay::transfer::socket::Address::Tcp(_));
    let claim = |own: u32, behind: u32, kind: u8| {
        let lengths = [own.to_le_bytes(), behind.to_le_bytes()].concat();
        [&lengths[..], &[kind, 0, 0, 0]].concat()
    };
    let wrong =
        [claim(1 << 30, 0, 4), claim(9, 1 << 30, 4), claim(9, u32::MAX, 4), claim(0, 0, 4), claim(1, 0, 5)];
    for bytes in wrong.into_iter().chain([claim(0, 0, 9), record(1, &[0; 32], 0)]) {
        pair.receiver.failures.clear();
        let mut stranger = opened(&pair.at, || pair.receiver.poll());
        stranger.say(&bytes, None);
        let mut came = Vec::new();
        pair.receiver.poll();
        until("the end of a stranger", || {
            pair.receiver.poll();
            !stranger.read(&mut came)
        });
        assert!(pair.receiver.has(Error::BadFormat), "{bytes:?}: {:?}", pair.receiver.failures);
        pair.sender.poll();
        let newest = pair.sender.link();
        assert!(newest.is_some());
    }
    if is_stream {
        // A length that may be, with nothing behind it, keeps what came.
        let mut strangers: Vec<Stranger> =
            (0..8).map(|_| opened(&pair.at, || pair.receiver.poll())).collect();
        for stranger in &mut strangers {
            stranger.say(&claim(9, 64 << 20, 4), None);
            stranger.say(&[7; 9], None);
        }
        for _ in 0..20 {
            pair.receiver.poll();
            std::thread::sleep(Duration::from_millis(1));
        }
        let kept = pair.receiver.end.kept();
        assert!(kept < 8 * (1 << 19), "{kept} bytes are kept of nothing");
    }
}

#[test]
fn a_length_that_is_claimed_allocates_nothing() {
    claims(Way::Tcp);
    claims(Way::Shm);
}

/// Rows whose table does not fit, behind a frame.
#[test]
fn rows_with_wrong_lengths_lose_the_connection() {
    let mut pair = Pair::new(Way::Tcp, &Options::default());
    for table in [[2, 0, 0, 0, 9, 0, 0, 0], [1, 0, 0, 0, 1, 0, 0, 0], [255; 8]] {
        pair.receiver.failures.clear();
        let mut stranger = opened(&pair.at, || pair.receiver.poll());
        stranger.say(&record(4, &frame(1, 10), 8), None);
        stranger.say(&table, None);
        let mut came = Vec::new();
        until("the end of a stranger", || {
            pair.receiver.poll();
            !stranger.read(&mut came)
        });
        assert!(pair.receiver.has(Error::BadFormat));
    }
    assert!(pair.receiver.frames.is_empty());
}

/// A stranger that never stops sending, without an opening and behind one.
fn gigabyte(way: Way) {
    let mut pair = Pair::new(way, &Options::default());
    let zeros = vec![0; 1 << 20];
    let mut stranger = Stranger::new(&pair.at);
    let mut sent = 0;
    until("the end of a stranger that sends a gigabyte", || {
        pair.receiver.poll();
        let written = stranger.write(&zeros);
        sent += written.unwrap_or(0);
        assert!(pair.receiver.end.kept() < LITTLE);
        written.is_none() || sent >= 1 << 30
    });
    assert!(sent < 1 << 28, "{sent} bytes were taken");
    pair.is_served();
}

#[test]
fn a_gigabyte_of_nothing_is_not_read() {
    gigabyte(Way::Tcp);
    gigabyte(Way::Shm);
}

/// So many connections that say nothing, or half of a hello.
fn half_open(way: Way, count: usize) {
    let options = Options { unopened: 8, opening: Duration::from_secs(60), ..options() };
    let mut pair = Pair::new(way, &options);
    let mut strangers = Vec::new();
    for number in 0..count {
        let mut stranger = Stranger::new(&pair.at);
        if number % 2 == 0 {
            stranger.write(&hello(1, 1, 1, 0)[..20]);
        }
        strangers.push(stranger);
        pair.receiver.poll();
        if number % 100 == 0 {
            pair.is_served();
            // Those that were dropped: a process has not so many files.
            strangers.retain_mut(|of| of.read(&mut Vec::new()));
        }
    }
    until("the end of most strangers", || {
        pair.receiver.poll();
        let open = strangers.iter_mut().filter_map(|of| of.read(&mut Vec::new()).then_some(())).count();
        assert!(pair.receiver.end.kept() < LITTLE);
        open <= 8
    });
    pair.is_served();
    // One that belongs here opens beside those that are left.
    let other = connect(way, options, memory(), std::slice::from_ref(&pair.at)).unwrap();
    let mut other = Polled::new(other);
    until("a connection beside strangers", || {
        pair.receiver.poll();
        other.poll();
        other.link().is_some()
    });
}

#[test]
fn a_thousand_half_open_connections_leave_a_few_and_others_are_served() {
    half_open(Way::Tcp, 1000);
    half_open(Way::Shm, 1000);
}

/// A stranger that says nothing, and one that says its hello byte by byte, are dropped in time.
fn slow(way: Way) {
    let opening = Duration::from_secs(1);
    let options = Options { opening, ..Options::default() };
    let mut pair = Pair::new(way, &options);
    pair.receiver.failures.clear();
    let mut strangers = [Stranger::new(&pair.at), Stranger::new(&pair.at)];
    let start = Instant::now();
    let (mut said, mut ended) = (0, [false; 2]);
    until("the end of slow strangers", || {
        pair.sender.poll();
        pair.receiver.poll();
        if start.elapsed() > Duration::from_millis(50 * said as u64) && said < 47 && !ended[0] {
            strangers[0].write(&hello(1, 1, way as u8, 0)[said..=said]);
            said += 1;
        }
        for (of, ended) in strangers.iter_mut().zip(&mut ended) {
            *ended |= !of.read(&mut Vec::new());
        }
        ended == [true; 2]
    });
    assert!(start.elapsed() >= opening * 9 / 10 && said > 3);
    let late = pair.receiver.failures.iter().filter(|of| of.kind() == Error::TimedOut).count();
    assert_eq!(late, 2, "{:?}", pair.receiver.failures);
    pair.is_served();
    assert!(!pair.receiver.happened.iter().any(|of| matches!(of, Happened::Lost { .. })));
}

#[test]
fn a_stranger_that_says_nothing_or_too_slowly_is_dropped_in_time() {
    slow(Way::Tcp);
    slow(Way::Shm);
}

/// Two ends whose tokens differ never open, and both say why, in the same words.
fn tokens(way: Way, sender: Option<&str>, receiver: Option<&str>) {
    let with = |secret: Option<&str>| {
        let token = secret.map(|secret| Token::new(secret.as_bytes()).unwrap());
        Options { token, ..Options::default() }
    };
    let (receiver, at) = listen(way, with(receiver), None).unwrap();
    let sender = connect(way, with(sender), memory(), &[at]).unwrap();
    let (mut sender, mut receiver) = (Polled::new(sender), Polled::new(receiver));
    until("the error of both", || {
        sender.poll();
        receiver.poll();
        sender.failures.len() >= 2 && receiver.failures.len() >= 2
    });
    let words = "transfer connection: invalid configuration: the two ends do not have the same token; \
                 give both instances the same token, or neither of them one";
    for failure in sender.failures.iter().chain(&receiver.failures) {
        assert_eq!(failure.to_string(), words);
    }
    assert!(sender.happened.is_empty() && receiver.happened.is_empty());
}

#[test]
fn a_wrong_or_missing_token_opens_nothing_and_both_ends_say_so() {
    let (one, other) = (Some("the token of one side"), Some("the token of the other side"));
    for (sender, receiver) in [(one, other), (one, None), (None, one)] {
        tokens(Way::Tcp, sender, receiver);
        tokens(Way::Shm, sender, receiver);
    }
}

/// What a connection of before said is of no use to another one.
#[test]
fn an_opening_that_is_played_again_is_refused() {
    let options = options();
    let (receiver, at) = listen(Way::Tcp, options.clone(), None).unwrap();
    let mut receiver = Polled::new(receiver);
    // A sender whose bytes pass through this test's hands.
    let between = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = between.local_addr().unwrap();
    let mut sender = Polled::new(
        connect(Way::Tcp, options, memory(), &[forebay::transfer::socket::Address::Tcp(address)]).unwrap(),
    );
    sender.poll();
    let (socket, _) = between.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let (mut near, mut far) = (Stranger::Tcp(socket), Stranger::new(&at));
    let (mut to, mut back, mut passed) = (Vec::new(), Vec::new(), [0, 0]);
    until("a connection through others' hands", || {
        sender.poll();
        receiver.poll();
        near.read(&mut to);
        far.read(&mut back);
        passed[0] += far.write(&to[passed[0]..]).unwrap();
        passed[1] += near.write(&back[passed[1]..]).unwrap();
        sender.link().is_some() && receiver.link().is_some()
    });
    let mut again = Stranger::new(&at);
    again.write(&to[..48 + 44]);
    until("a refusal", || {
        receiver.poll();
        receiver.has(Error::InvalidConfig)
    });
    assert_eq!(receiver.happened.iter().filter(|of| matches!(of, Happened::Connected { .. })).count(), 1);
}

/// A sender that is led to a stranger says why it does not open, and goes on trying.
fn sender_at_a_stranger(says: &[u8], kind: Error) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let at = forebay::transfer::socket::Address::Tcp(listener.local_addr().unwrap());
    let options = Options { opening: Duration::from_millis(100), ..Options::default() };
    let mut sender = Polled::new(connect(Way::Tcp, options, memory(), &[at]).unwrap());
    let mut strangers = Vec::new();
    until("two failures", || {
        sender.poll();
        if let Ok((socket, _)) = listener.accept() {
            socket.set_nonblocking(true).unwrap();
            let mut stranger = Stranger::Tcp(socket);
            stranger.write(says);
            strangers.push(stranger);
        }
        sender.failures.len() >= 2
    });
    assert!(sender.failures.iter().all(|of| of.kind() == kind), "{:?}", sender.failures);
    assert!(sender.happened.is_empty());
}

#[test]
fn a_sender_that_is_led_to_a_stranger_says_why_it_does_not_open() {
    sender_at_a_stranger(b"", Error::TimedOut);
    sender_at_a_stranger(&hello(1, 2, 1, 0)[..47], Error::TimedOut);
    sender_at_a_stranger(b"220 ready\r\n", Error::BadFormat);
    sender_at_a_stranger(&hello(2, 2, 1, 0), Error::BadVersion);
    // Another sender, as one that has reached itself; another fabric; a token; a proof that is none.
    sender_at_a_stranger(&hello(1, 1, 1, 0), Error::BadFormat);
    sender_at_a_stranger(&hello(1, 2, 2, 0), Error::BadFormat);
    sender_at_a_stranger(&hello(1, 2, 1, 1), Error::InvalidConfig);
    sender_at_a_stranger(&[hello(1, 2, 1, 0), record(1, &[9; 32], 0)].concat(), Error::InvalidConfig);
    // The other end refuses, for a reason that only it knows.
    sender_at_a_stranger(&[hello(1, 2, 1, 0), record(2, &[3], 0)].concat(), Error::PeerLost);
}
