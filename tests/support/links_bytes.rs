//! The body of the fuzz target `links_bytes`, which `tests/peer.rs` replays.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use forebay::os::{self, NoFaults};
use forebay::peer::{Hello, Limits, Links};
use forebay::{Error, Kind};

use crate::frames::{OWN, frame, hello};

/// The ranks of the group; this side is rank 1, and the bytes drive all others.
const RANKS: u32 = 4;

/// Runs the sessions of a process whose three others `bytes` drive: who writes, what, and who closes. Whatever comes, a
/// rank is lost once, by an error that names it, and the others are served. Returns the errors, and how many events
/// came.
pub fn links_bytes(bytes: &[u8]) -> (Vec<Error>, usize) {
    let own = Hello { ranks: RANKS, ..OWN };
    let (mut sockets, mut others) = (Vec::new(), Vec::new());
    for rank in [0, 2, 3] {
        let (a, mut b) = UnixStream::pair().unwrap();
        b.write_all(&hello(Hello { rank, ..own })).unwrap();
        // No bytes block this process, which is both sides.
        b.set_nonblocking(true).unwrap();
        sockets.push(a);
        others.push((rank, Some(b)));
    }
    let mut links = Links::over(sockets, own, Limits::default(), Arc::new(NoFaults)).unwrap();
    let null = File::open("/dev/null").unwrap();
    let (mut errors, mut events, mut given) = (Vec::new(), 0, 0);
    let mut rest = bytes;
    while let Some((choice, after)) = rest.split_first() {
        rest = after;
        let Some((rank, socket)) = others.get_mut(usize::from(choice % 3)) else { continue };
        let whole = |socket: &mut Option<UnixStream>, bytes: &[u8]| {
            // The other end may have been closed, or full.
            let _ = socket.as_mut().map(|socket| socket.write(bytes));
        };
        match choice / 3 {
            0 => *socket = None,
            1..=3 => whole(socket, &frame(choice / 3 + 1, 0, &[])),
            4 => whole(socket, &frame(3, 0, &[7; 300])),
            5..=8 => {
                let message = frame(3, 1, &[*choice]);
                let _ = socket.as_ref().map(|it| os::send(it, &message, Some(null.as_fd()), &NoFaults));
            }
            9..=14 => {
                let with = (given < 50).then(|| null.try_clone().unwrap().into());
                given += 1;
                let open = links.link(*rank).is_some_and(|link| !link.is_over());
                let sent = links.send(*rank, &[1, 2, 3], with);
                assert_eq!(sent.is_ok(), open, "{sent:?}");
            }
            15..=20 => events += served(&mut links, &mut errors),
            _ => {
                let raw = usize::from(choice - 62).min(rest.len());
                whole(socket, &rest[..raw]);
                rest = &rest[raw..];
            }
        }
    }
    others.iter_mut().for_each(|(_, socket)| *socket = None);
    events += served(&mut links, &mut errors);
    assert!(links.is_over() && links.event(Duration::MAX).unwrap().is_none());
    (errors, events)
}

/// Takes all events that are there. Returns how many.
fn served(links: &mut Links, errors: &mut Vec<Error>) -> usize {
    let (mut events, mut quiet) = (0, 0);
    // A call reads a piece of what arrived, so some bring no event.
    while quiet < 20 {
        match links.event(Duration::ZERO) {
            Ok(None) => quiet += 1,
            Ok(Some((rank, _))) => {
                events += 1;
                assert!(links.link(rank).is_some());
            }
            Err(error) => {
                let rank = error.number("rank");
                assert!(matches!(error.kind(), Kind::BadFormat | Kind::PeerLost), "{error}");
                assert!(errors.iter().all(|before| before.number("rank") != rank), "{error}: twice");
                errors.push(error);
            }
        }
    }
    let lost: Vec<_> = links.lost().map(|(rank, error)| (Some(u64::from(rank)), error.clone())).collect();
    let mut told: Vec<_> = errors.iter().map(|error| (error.number("rank"), error.clone())).collect();
    told.sort_by_key(|(rank, _)| *rank);
    assert_eq!(lost, told);
    events
}
