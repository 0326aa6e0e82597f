//! The body of the fuzz target `peer_bytes`, which `tests/peer.rs` replays.

use std::rc::Rc;
use std::time::Duration;

use forebay::peer::{DESCRIPTORS_MAX, Event, Hello, Limits, MESSAGE_MAX, Session};
use forebay::{Error, Kind};

use crate::frames::{OWN, frame, hello};

/// Runs a session that `bytes` drive, in any order: what arrives, how it is cut, descriptors, the time, and what this
/// side does meanwhile. Whatever comes, it is events or one error that stays; nothing else is held than what may be.
/// Returns the events, and the error.
pub fn peer_bytes(bytes: &[u8]) -> (Vec<Event<Rc<()>>>, Option<Error>) {
    let token = Rc::new(());
    let mut now = Duration::ZERO;
    // A hello's time that some hundred bytes can let pass.
    let limits = Limits { hello: Duration::from_secs(30), ..Limits::default() };
    let mut session = Session::new(OWN, limits, now).unwrap();
    let (mut events, mut failure) = (Vec::new(), None);
    let mut rest = bytes;
    while let Some((choice, after)) = rest.split_first() {
        rest = after;
        let mut took = 0;
        let result = match choice {
            // Whole frames, which no fuzzer builds by itself.
            0 => feed(&mut session, &hello(Hello { rank: 0, ..OWN }), None, now, &mut events),
            1..=3 => feed(&mut session, &frame(*choice + 1, 0, &[]), None, now, &mut events),
            4 => feed(&mut session, &frame(3, 1, &[*choice]), Some(Rc::clone(&token)), now, &mut events),
            5 => session.arrived(&[], Some(Rc::clone(&token)), now),
            6 => session.send(&[1, 2, 3], Some(Rc::clone(&token))).or_else(own_fault),
            7 => session.send(&[9; 4096], None).or_else(own_fault),
            8 => session.end(),
            9 => session.closed(),
            10..=19 => {
                now += Duration::from_millis(u64::from(*choice) * 100);
                session.tick(now)
            }
            20..=39 => {
                session.sent(usize::from(*choice) * 16, now);
                Ok(())
            }
            _ => {
                took = usize::from(*choice - 39).min(rest.len());
                feed(&mut session, &rest[..took], None, now, &mut events)
            }
        };
        rest = &rest[took..];
        check(&session, &mut failure, result.err());
    }
    let delivered =
        events.iter().filter(|it| matches!(it, Event::Message { descriptor: Some(_), .. })).count();
    let queued = usize::from(failure.is_none()) * (1 << 20) / 11;
    assert!(Rc::strong_count(&token) <= 1 + delivered + DESCRIPTORS_MAX + queued);
    if failure.is_some() {
        assert_eq!(Rc::strong_count(&token), 1 + delivered, "a failed session holds descriptors");
    }
    drop(session);
    assert_eq!(Rc::strong_count(&token), 1 + delivered);
    (events, failure)
}

/// A message that the session did not take is this side's fault, and ends nothing.
fn own_fault(error: Error) -> Result<(), Error> {
    let own = matches!(error.kind(), Kind::Exhausted) || error.place().starts_with("a message ");
    if own { Ok(()) } else { Err(error) }
}

/// Lets bytes arrive as the session has room for them, and collects what they mean.
fn feed(
    session: &mut Session<Rc<()>>,
    mut bytes: &[u8],
    mut descriptor: Option<Rc<()>>,
    now: Duration,
    events: &mut Vec<Event<Rc<()>>>,
) -> Result<(), Error> {
    loop {
        let (first, after) = bytes.split_at(bytes.len().min(session.room()));
        session.arrived(first, descriptor.take(), now)?;
        while let Some(event) = session.event()? {
            if let Event::Message { bytes, .. } = &event {
                assert!(bytes.len() <= MESSAGE_MAX && session.theirs().is_some());
            }
            events.push(event);
        }
        assert!(session.room() > 0, "a session without room and without events");
        if after.is_empty() {
            return Ok(());
        }
        bytes = after;
    }
}

/// The first error stays: every later call returns it.
fn check(session: &Session<Rc<()>>, failure: &mut Option<Error>, error: Option<Error>) {
    if let Some(error) = &error {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains('\n'), "{text}");
    }
    match (&failure, error) {
        (Some(first), Some(error)) => assert_eq!(*first, error),
        (None, error) => *failure = error,
        (Some(_), None) => {}
    }
    if failure.is_some() {
        assert!(session.outgoing().is_none() && session.due().is_none());
    }
}
