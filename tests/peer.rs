//! The session between two processes: against a naive model, over any bytes, and between real processes that end,
//! stop, or disagree.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/frames.rs"]
mod frames;
#[path = "peer/links.rs"]
mod links;
#[path = "support/links_bytes.rs"]
mod links_bytes;
#[path = "support/peer_bytes.rs"]
mod peer_bytes;
#[path = "peer/processes.rs"]
mod processes;
#[path = "peer/rejoin.rs"]
mod rejoin;
#[path = "peer/time.rs"]
mod time;

use std::collections::VecDeque;
use std::time::Duration;

use forebay::Kind;
use forebay::peer::{Event, Hello, Limits, MESSAGE_MAX, Session};
use frames::{OWN, frame, hello};
use links_bytes::links_bytes;
use peer_bytes::peer_bytes;
use proptest::prelude::*;

/// Something to do with one of the two sides.
#[derive(Clone, Debug)]
enum Op {
    /// Queue a message of this length, with a descriptor or without.
    Send { side: usize, length: usize, descriptor: bool },
    /// Move at most so many bytes from a side towards the other, and let at most so many arrive there.
    Move { side: usize, sent: usize, arrive: usize },
    /// Let time pass, and both look at it.
    Pass(u64),
    /// A side sends nothing more.
    End { side: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let length = prop_oneof![4 => 0..40_usize, 1 => 0..=MESSAGE_MAX + 1];
    let bytes = || prop_oneof![3 => 0..30_usize, 2 => 0..70_000_usize];
    let op = prop_oneof![
        6 => (0..2_usize, length, any::<bool>())
            .prop_map(|(side, length, descriptor)| Op::Send { side, length, descriptor }),
        12 => (0..2_usize, bytes(), bytes()).prop_map(|(side, sent, arrive)| Op::Move { side, sent, arrive }),
        4 => (1..4000_u64).prop_map(Op::Pass),
        1 => (0..2_usize).prop_map(|side| Op::End { side }),
    ];
    prop::collection::vec(op, 1..120)
}

/// What a side has told the other, and what the model knows of its session.
#[derive(Default)]
struct Told {
    /// Messages and descriptors, in order.
    messages: Vec<(Vec<u8>, Option<u64>)>,
    /// How many of them the other side has.
    delivered: usize,
    ended: bool,
    /// Bytes on the way, each with the descriptor that came with it.
    pipe: VecDeque<(u8, Option<u64>)>,
}

/// Two sessions, the pipes between them, and the naive model: lists of what was said.
struct World {
    sessions: [Session<u64>; 2],
    told: [Told; 2],
    now: Duration,
    heard: [Duration; 2],
    said: [Duration; 2],
    /// Whether a side knows the other's hello, and its end.
    hello: [bool; 2],
    end: [bool; 2],
    lost: bool,
    descriptors: u64,
}

const LIMITS: Limits = Limits {
    hello: Duration::from_secs(8),
    interval: Duration::from_secs(1),
    lost: Duration::from_secs(5),
    queue: 1 << 17,
};

impl World {
    fn new() -> World {
        let side = |rank| Session::new(Hello { rank, ..OWN }, LIMITS, Duration::ZERO).unwrap();
        World {
            sessions: [side(0), side(1)],
            told: [Told::default(), Told::default()],
            now: Duration::ZERO,
            heard: [Duration::ZERO; 2],
            said: [Duration::ZERO; 2],
            hello: [false; 2],
            end: [false; 2],
            lost: false,
            descriptors: 0,
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Send { side, length, descriptor } => self.send(side, length, descriptor),
            Op::Move { side, sent, arrive } => self.transport(side, sent, arrive),
            Op::Pass(milliseconds) => self.pass(Duration::from_millis(milliseconds)),
            Op::End { side } => {
                self.sessions[side].end().unwrap();
                self.told[side].ended = true;
            }
        }
    }

    fn send(&mut self, side: usize, length: usize, with: bool) {
        self.descriptors += 1;
        let message: Vec<u8> = (0..length).map(|at| (at as u64 ^ self.descriptors) as u8).collect();
        let descriptor = with.then_some(self.descriptors);
        let result = self.sessions[side].send(&message, descriptor).map_err(|error| error.kind());
        let expected = if !self.hello[side] || self.told[side].ended {
            Err(Kind::InvalidState)
        } else if length > MESSAGE_MAX {
            Err(Kind::OutOfRange)
        } else {
            Ok(())
        };
        // Only the queue's room is not in the model: a full one refuses, and changes nothing.
        if result != Err(Kind::Exhausted) || expected.is_err() {
            assert_eq!(result, expected);
        }
        if result.is_ok() {
            self.told[side].messages.push((message, descriptor));
        }
    }

    fn transport(&mut self, side: usize, mut sent: usize, mut arrive: usize) {
        while let Some(outgoing) = self.sessions[side].outgoing().filter(|_| sent > 0) {
            let bytes = &outgoing.bytes[..outgoing.bytes.len().min(sent)];
            let with = outgoing.descriptor.copied();
            let pipe = &mut self.told[side].pipe;
            pipe.extend(bytes.iter().enumerate().map(|(at, byte)| (*byte, with.filter(|_| at == 0))));
            let taken = bytes.len();
            sent -= taken;
            self.sessions[side].sent(taken, self.now);
            self.said[side] = self.now;
        }
        // As the kernel does, a call returns bytes up to the second descriptor.
        let other = 1 - side;
        while arrive > 0 && !self.told[side].pipe.is_empty() {
            let room = self.sessions[other].room().min(arrive);
            let (mut bytes, mut with) = (Vec::new(), None);
            while let Some((byte, descriptor)) = self.told[side].pipe.front().copied() {
                if bytes.len() == room || (with.is_some() && descriptor.is_some()) {
                    break;
                }
                with = with.or(descriptor);
                bytes.push(byte);
                self.told[side].pipe.pop_front();
            }
            arrive -= bytes.len();
            self.sessions[other].arrived(&bytes, with, self.now).unwrap();
            self.heard[other] = self.now;
            self.events(other);
        }
    }

    /// Compares the events of a side with what the other one said.
    fn events(&mut self, side: usize) {
        while let Some(event) = self.sessions[side].event().unwrap() {
            let told = &mut self.told[1 - side];
            match event {
                Event::Hello(theirs) => {
                    assert_eq!(theirs, Hello { rank: 1 - side as u32, ..OWN });
                    assert!(!std::mem::replace(&mut self.hello[side], true));
                }
                Event::Message { bytes, descriptor } => {
                    assert_eq!((bytes, descriptor), told.messages[told.delivered]);
                    told.delivered += 1;
                }
                Event::Ended => {
                    assert!(told.ended && told.delivered == told.messages.len());
                    self.end[side] = true;
                }
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for side in 0..2 {
            let due = self.sessions[side].due();
            let expected = if self.end[side] {
                Ok(())
            } else if !self.hello[side] && self.now >= LIMITS.hello {
                Err(Kind::TimedOut)
            } else if self.hello[side] && self.now >= self.heard[side] + LIMITS.lost {
                Err(Kind::PeerLost)
            } else {
                Ok(())
            };
            let result = self.sessions[side].tick(self.now).map_err(|error| error.kind());
            assert_eq!(result, expected);
            // Until its own end a side never stays silent, also when the other one has ended.
            let silent = self.now >= self.said[side] + LIMITS.interval && !self.told[side].ended;
            assert!(result.is_err() || !silent || self.sessions[side].outgoing().is_some());
            // What the look found was due: an error by then, and after a look the next one is later.
            if result.is_err() {
                assert!(due.is_some_and(|due| due <= self.now));
                assert_eq!(self.sessions[side].tick(self.now).map_err(|error| error.kind()), expected);
                self.lost = true;
            } else if let Some(due) = self.sessions[side].due() {
                assert!(due > self.now && due <= self.now + LIMITS.hello);
            }
        }
    }

    /// Moves everything that was said, both ends included: nothing is missing.
    fn finish(&mut self) {
        for op in [0, 1].map(|side| Op::End { side }) {
            self.run(&op);
        }
        for _ in 0..2 {
            (0..2).for_each(|side| self.transport(side, usize::MAX, usize::MAX));
        }
        for side in 0..2 {
            let told = &self.told[side];
            assert_eq!((told.delivered, self.end[side]), (told.messages.len(), true));
            assert!(self.sessions[side].is_over() && self.sessions[side].due().is_none());
            self.sessions[side].closed().unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// However bytes are cut and sides take turns: every message arrives once, in order, with its descriptor, and a
    /// side is held for lost exactly when nothing came from the other for as long as the limits say.
    #[test]
    fn two_sides_agree_with_two_lists(ops in ops()) {
        let mut world = World::new();
        for op in &ops {
            world.run(op);
            if world.lost {
                return Ok(());
            }
        }
        world.finish();
    }
}

/// The body of the fuzz target `peer_bytes`: sessions that begin well, then anything.
#[test]
fn any_bytes_are_events_or_an_error() {
    let mut seed = 1_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let (events, failure) = peer_bytes(&[0, 1, 4, 2, 4, 3]);
    assert!(failure.is_none() && events.len() == 5, "the control: a session from hello to end: {events:?}");
    let mut reached = std::collections::BTreeSet::new();
    let long: [&[u8]; 3] = [&[5; 17], &[19; 17], &[0, 19, 19, 19, 19, 19, 19]];
    reached.extend(long.iter().filter_map(|bytes| peer_bytes(bytes).1).map(|error| error.place().to_owned()));
    for run in 0..30_000 {
        let mut bytes: Vec<u8> = if run % 3 > 0 { vec![0] } else { Vec::new() };
        bytes.extend((0..random(60)).map(|_| random(if run % 2 == 0 { 40 } else { 256 }) as u8));
        let (_, failure) = peer_bytes(&bytes);
        reached.extend(failure.map(|error| error.place().to_owned()));
    }
    for place in [
        "frame header",
        "a second hello",
        "a frame before hello",
        "a frame after the end",
        "descriptors without messages",
        "the connection was closed",
        "no sign of life",
        "the other side's hello",
    ] {
        assert!(reached.contains(place), "{place} is not among {reached:?}");
    }
}

/// The body of the fuzz target `links_bytes`: three ranks that say anything, in any order, and close.
#[test]
fn whatever_ranks_say_each_is_lost_once_and_the_others_are_served() {
    let mut seed = 7_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    // The control: each of three says a message, one with a descriptor, and its end.
    let (errors, events) = links_bytes(&[12, 13, 17, 9, 10, 11]);
    assert_eq!((errors, events), (Vec::new(), 6));
    let (mut reached, mut most) = (std::collections::BTreeSet::new(), 0);
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..random(80))
            .map(|_| (random(4), random(63), random(256)))
            .map(|(any, few, all)| if any > 0 { few } else { all } as u8)
            .collect();
        let (errors, events) = links_bytes(&bytes);
        most = most.max(events);
        reached.extend(errors.iter().map(|error| error.place().to_owned()));
    }
    for place in ["frame header", "a frame after the end", "the connection was closed"] {
        assert!(reached.contains(place), "{place} is not among {reached:?}");
    }
    assert!(most > 8, "{most}");
}

/// A side that breaks the protocol is told in words of its own.
#[test]
fn each_breach_has_its_error() {
    let good = hello(Hello { rank: 0, ..OWN });
    let mut version = good.clone();
    version[16] = 2;
    let mut plan = good.clone();
    plan[8 + 60] ^= 1;
    let message = frame(3, 0, b"hi");
    let end = frame(4, 0, &[]);
    for (bytes, kind, place) in [
        (frame(2, 0, &[]), Kind::BadFormat, "a frame before hello"),
        (message.clone(), Kind::BadFormat, "a frame before hello"),
        ([&good[..], &good].concat(), Kind::BadFormat, "a second hello"),
        ([&good[..], &end, &message].concat(), Kind::BadFormat, "a frame after the end"),
        ([&good[..], &frame(3, 1, b"hi")].concat(), Kind::BadFormat, "a message without its descriptor"),
        (frame(1, 0, &[0; 127]), Kind::BadFormat, "frame header"),
        (frame(1, 0, &[0; 128]), Kind::BadFormat, "hello"),
        (version, Kind::BadVersion, "hello"),
        (plan, Kind::InvalidConfig, "a process with another plan"),
        (b"GET / HTTP/1.1\r\n".to_vec(), Kind::BadFormat, "frame header"),
    ] {
        let mut session: Session<u64> = Session::new(OWN, Limits::default(), Duration::ZERO).unwrap();
        session.arrived(&bytes, None, Duration::ZERO).unwrap();
        let error = loop {
            match session.event() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{bytes:?} was taken"),
                Err(error) => break error,
            }
        };
        assert_eq!((error.kind(), error.place()), (kind, place));
        // The error stays, whatever is called.
        assert_eq!(session.event().unwrap_err(), error);
        assert_eq!(session.send(b"x", None).unwrap_err(), error);
        assert_eq!(session.tick(Duration::MAX).unwrap_err(), error);
        assert_eq!(session.arrived(&[], None, Duration::ZERO).unwrap_err(), error);
        assert_eq!(session.end().unwrap_err(), error);
        assert_eq!(session.closed().unwrap_err(), error);
        assert!(session.outgoing().is_none() && session.due().is_none() && !session.is_over());
    }
}

#[test]
fn contradictory_limits_and_ranks_are_refused() {
    let new = |own, limits| Session::<u64>::new(own, limits, Duration::ZERO).map(drop).unwrap_err();
    let usual = Limits::default();
    let short = Limits { lost: Duration::from_millis(1999), ..usual };
    assert_eq!(new(OWN, short).place(), "a time to be lost that is below two intervals");
    let zero = Limits { interval: Duration::ZERO, ..usual };
    assert_eq!(new(OWN, zero).kind(), Kind::InvalidConfig);
    assert_eq!(new(OWN, Limits { queue: 65_535, ..usual }).place(), "a queue shorter than a frame");
    let error = new(Hello { rank: 2, ..OWN }, usual);
    assert_eq!((error.kind(), error.place(), error.number("ranks")), (Kind::InvalidConfig, "rank", Some(2)));
}
