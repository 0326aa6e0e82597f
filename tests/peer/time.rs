//! Signs of life and deadlines, on a time that the test tells.

use std::time::Duration;

use forebay::Kind;
use forebay::peer::{Event, Hello, Limits, Session};

use crate::frames::OWN;

const SECOND: Duration = Duration::from_secs(1);

fn side(rank: u32) -> Session<u64> {
    Session::new(Hello { rank, ..OWN }, Limits::default(), Duration::ZERO).unwrap()
}

/// Moves everything that `from` has to say; returns the events and the bytes.
fn tell(from: &mut Session<u64>, to: &mut Session<u64>, now: Duration) -> (Vec<Event<u64>>, usize) {
    let (mut events, mut moved) = (Vec::new(), 0);
    while let Some(outgoing) = from.outgoing() {
        let bytes = outgoing.bytes.to_vec();
        to.arrived(&bytes, None, now).unwrap();
        from.sent(bytes.len(), now);
        moved += bytes.len();
        while let Some(event) = to.event().unwrap() {
            events.push(event);
        }
    }
    (events, moved)
}

#[test]
fn idle_sides_keep_each_other_alive_with_eight_bytes_an_interval() {
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    let mut bytes = 0;
    for second in 1..=1000_u32 {
        let now = second * SECOND;
        for session in [&mut a, &mut b] {
            assert!(session.due().unwrap() <= now);
            session.tick(now).unwrap();
        }
        let told = tell(&mut a, &mut b, now);
        assert_eq!(told.0, [], "a sign of life is no event");
        bytes += told.1 + tell(&mut b, &mut a, now).1;
    }
    assert_eq!(bytes, 2 * 8 * 1000);
}

/// The control of the test above: without the signs of life a side is lost, and not before.
#[test]
fn a_silent_side_is_lost_after_its_time() {
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    a.tick(10 * SECOND - Duration::from_nanos(1)).unwrap();
    let error = a.tick(10 * SECOND).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::PeerLost, "no sign of life"));
    assert_eq!((error.number("rank"), error.number("milliseconds")), (Some(1), Some(10_000)));
}

#[test]
fn a_side_that_never_says_hello_times_out() {
    let (mut a, mut b) = (side(0), side(1));
    // A part of a hello is none.
    let part = b.outgoing().unwrap().bytes[..100].to_vec();
    a.arrived(&part, None, 599 * SECOND).unwrap();
    assert!(a.event().unwrap().is_none());
    a.tick(600 * SECOND - Duration::from_nanos(1)).unwrap();
    let error = a.tick(600 * SECOND).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::TimedOut, "the other side's hello"));
    // A deadline that no time reaches never comes.
    b.tick(599 * SECOND).unwrap();
}

#[test]
fn a_side_that_has_ended_may_close_and_one_that_has_not_is_lost() {
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    b.end().unwrap();
    b.end().unwrap();
    assert_eq!(tell(&mut b, &mut a, SECOND).0, [Event::Ended]);
    // Only one side has ended: the other may still send, but may also find the connection closed.
    a.send(b"late", None).unwrap();
    assert!(!a.is_over());
    a.tick(1000 * SECOND).unwrap();
    a.closed().unwrap();
    assert!(a.is_over() && a.outgoing().is_none());
    assert_eq!(a.send(b"x", None).unwrap_err().kind(), Kind::InvalidState);
    let error = b.closed().unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::PeerLost, "the connection was closed"));
}

/// A side that has ended waits for the other one, which takes its time: neither holds the other for lost, and the one
/// that goes on still gives a sign of life every interval.
#[test]
fn a_side_that_goes_on_after_the_others_end_is_not_lost() {
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    b.end().unwrap();
    assert_eq!(tell(&mut b, &mut a, Duration::ZERO).0, [Event::Ended]);
    for second in 1..=100_u32 {
        let now = second * SECOND;
        assert_eq!(a.due(), Some(now));
        a.tick(now).unwrap();
        b.tick(now).unwrap();
        assert_eq!(tell(&mut a, &mut b, now), (vec![], 8));
        assert_eq!(tell(&mut b, &mut a, now), (vec![], 0));
    }
    a.end().unwrap();
    assert_eq!(tell(&mut a, &mut b, 101 * SECOND).0, [Event::Ended]);
    assert!(a.is_over() && b.is_over() && a.due().is_none() && b.due().is_none());
    // The control: a side that has not ended and says nothing is lost, whatever was ended before.
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    b.end().unwrap();
    tell(&mut b, &mut a, Duration::ZERO);
    assert_eq!(b.tick(10 * SECOND).unwrap_err().place(), "no sign of life");
}

#[test]
fn a_full_queue_refuses_and_takes_again() {
    let (mut a, mut b) = (side(0), side(1));
    tell(&mut a, &mut b, Duration::ZERO);
    tell(&mut b, &mut a, Duration::ZERO);
    let message = [7; 60_000];
    let taken = (0..100).take_while(|_| a.send(&message, None).is_ok()).count();
    assert_eq!(taken, (1 << 20) / (60_000 + 8));
    let error = a.send(&message, None).unwrap_err();
    assert_eq!((error.kind(), error.number("waiting")), (Kind::Exhausted, Some(60_008 * taken as u64)));
    assert_eq!(tell(&mut a, &mut b, SECOND).0.len(), taken);
    a.send(&message, None).unwrap();
}
