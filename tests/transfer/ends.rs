//! How uses of pages end: given up by either end at every point, deadlines, an end that is silent or gone.

use std::time::Duration;

use forebay::transfer::receiver::Wanted;
use forebay::transfer::sender::{Computed, Source};
use forebay::transfer::{Fence, Frame, Rank, Reason, Receiver, Run, Sender, Side, receiver, sender};
use forebay::{Error, Kind, Result};

use crate::pair::{LAYERS, LINK, Memory, Pair, RANK, RECEIVING, SENDING, millis, side};

/// Who gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Sender,
    Receiver,
    Both,
    /// The connection breaks.
    Cut,
}

const TOKENS: u32 = 11;
/// At this time a request of a script fails at the sender at the latest.
const DEADLINE: Duration = Duration::from_secs(3);

/// The calls of a script, each of which may come after an end, and then changes nothing.
fn call(pair: &mut Pair, number: u32, fence: &mut Option<Fence>) {
    let done = match number {
        0 => pair.sender.begin(4, TOKENS, Some(DEADLINE)),
        1 => match pair.grant_with(4, TOKENS, |wanted| wanted.payloads = &[2]) {
            Ok(granted) => {
                *fence = Some(granted);
                Ok(())
            }
            Err(error) => {
                // After a cut.
                assert_eq!(error.kind(), Kind::InvalidState, "{error}");
                Ok(())
            }
        },
        2..5 => pair.compute(4, number - 2, TOKENS),
        5 => pair.sender.payload(4, 2, b"first"),
        _ => pair.sender.finish(4),
    };
    if let Err(error) = done {
        assert_eq!(error.kind(), Kind::Closed, "call {number}: {error}");
    }
}

/// Runs a script whose calls come in some order, one thing at a time, and ends it before thing `at`. Returns whether
/// there was one, and whether the request became whole.
fn given_up(far: bool, order: &[u32], end: End, at: usize) -> (bool, bool) {
    let mut pair = Pair::new(far, SENDING, RECEIVING);
    let (mut calls, mut fence) = (order.iter(), None);
    let mut things = 0;
    loop {
        if things == at {
            give_up(&mut pair, end, fence);
        }
        // A call comes after every fourth thing, so that each meets frames on their way.
        let goes_on = match things % 4 {
            0 => match calls.next() {
                Some(number) => {
                    call(&mut pair, *number, &mut fence);
                    true
                }
                None => pair.step(),
            },
            _ => pair.step() || calls.len() > 0,
        };
        things += 1;
        if !goes_on {
            break;
        }
    }
    pair.pass(DEADLINE * 2);
    let what =
        format!("far {far}, {order:?}, {end:?} before {at}: {:?} {:?}", pair.at_sender, pair.at_receiver);
    assert!(pair.memory.held.is_empty(), "rows are held, {what}");
    assert_eq!(pair.receiver.quarantine().reached(), 0, "{what}");
    // What began has ended once at the sender. It may be that nothing of it was there when it was given up.
    let ended = pair.ended(4);
    assert_eq!(ended.len(), 1, "{what}");
    let mut whole = false;
    if let Some(fence) = fence {
        whole = pair.is_whole(fence);
        let failed = pair.failed(fence);
        let ways = usize::from(whole) + failed.len();
        assert!(ways <= 1, "{what}");
        assert!(ways == 1 || matches!(end, End::Receiver | End::Both), "{what}");
        let drained = receiver::Event::Drained { fence };
        assert_eq!(pair.at_receiver.iter().filter(|event| **event == drained).count(), 1, "{what}");
        let free = pair.at_receiver.iter().filter(|event| matches!(event, receiver::Event::Free { .. }));
        assert_eq!(free.count(), usize::from(far), "{what}");
        if whole {
            pair.check_rows(fence, 0..TOKENS);
        }
    }
    if end != End::Cut {
        assert_eq!((pair.sender.due(), pair.receiver.due()), (None, None), "{what}");
    }
    (things > at, whole)
}

fn give_up(pair: &mut Pair, end: End, fence: Option<Fence>) {
    if end == End::Cut {
        pair.cut();
    }
    if matches!(end, End::Sender | End::Both) {
        let done = pair.sender.abort(4);
        assert!(done.is_ok() || done.unwrap_err().kind() == Kind::Closed);
    }
    if let (End::Receiver | End::Both, Some(fence)) = (end, fence) {
        let done = pair.receiver.abort(fence);
        assert!(done.is_ok() || done.unwrap_err().kind() == Kind::Closed);
    }
}

#[test]
fn a_request_that_is_given_up_at_any_point_leaves_nothing() {
    let orders: [[u32; 7]; 3] = [[0, 1, 2, 3, 4, 5, 6], [1, 0, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6, 1]];
    let (mut points, mut wholes) = (0, 0);
    for (far, order) in [false, true].into_iter().flat_map(|far| orders.map(|order| (far, order))) {
        for end in [End::Sender, End::Receiver, End::Both, End::Cut] {
            let mut at = 0;
            loop {
                let (there, whole) = given_up(far, &order, end, at);
                if !there {
                    // It was never given up.
                    assert!(whole, "far {far}, {order:?}");
                    break;
                }
                at += 1;
                points += 1;
                wholes += u32::from(whole);
            }
            assert!(at > 20, "{at}");
        }
    }
    assert!(points > 500 && wholes > 50 && wholes < points / 2, "{wholes} of {points}");
}

/// A write from afar that ends after the request was given up is not lost: only then the receiver hears *drained*.
#[test]
fn a_write_that_ends_after_the_end_is_what_drains_the_pages() {
    for by_sender in [true, false] {
        let mut pair = Pair::new(true, SENDING, RECEIVING);
        let fence = pair.grant(4, TOKENS);
        pair.sender.begin(4, TOKENS, None).unwrap();
        pair.settle();
        (0..LAYERS).for_each(|layer| pair.compute(4, layer, TOKENS).unwrap());
        while pair.poll_sender() {}
        assert_eq!(pair.writes.len(), LAYERS as usize);
        match by_sender {
            true => pair.sender.abort(4).unwrap(),
            false => pair.receiver.abort(fence).unwrap(),
        }
        // Everything but the writes. No time makes up for them.
        for now in [0, 10, 400, 900] {
            pair.now = millis(now);
            assert_eq!(pair.closed, []);
            while pair.poll_sender()
                || pair.poll_receiver()
                || pair.deliver_to_receiver()
                || pair.deliver_to_sender()
            {}
            assert_eq!(pair.receiver.quarantine().reached(), 3);
            assert_eq!(pair.memory.held.len(), LAYERS as usize, "rows are held while they are written");
            assert!(!pair.sent.iter().any(|(_, frame)| frame[0] == 8), "drained too early");
            assert_eq!(pair.ended(4), []);
        }
        for left in (0..LAYERS).rev() {
            assert!(pair.land());
            while pair.poll_sender() || pair.deliver_to_receiver() || pair.poll_receiver() {}
            let reached = pair.receiver.quarantine().reached();
            assert_eq!(reached, if left > 0 { 3 } else { 0 }, "{left} writes are left");
        }
        pair.settle();
        assert_eq!(pair.ended(4), [Reason::Aborted]);
        pair.check_nothing_left(&[fence]);
    }
}

#[test]
fn a_write_that_failed_fails_its_request_at_both_ends() {
    let mut pair = Pair::new(true, SENDING, RECEIVING);
    let fence = pair.grant(4, TOKENS);
    pair.send(4, TOKENS);
    while pair.poll_sender() || pair.poll_receiver() || pair.deliver_to_sender() {}
    let (write, ..) = pair.writes.pop_front().unwrap();
    pair.sender.written(LINK, write, true);
    // One that was not asked for, or has ended.
    pair.sender.written(LINK, write, true);
    pair.sender.written(LINK, 999, true);
    pair.sender.written(LINK + 1, write, true);
    pair.settle();
    assert_eq!(pair.ended(4), [Reason::PeerLost]);
    assert_eq!(pair.failed(fence)[0].kind(), Kind::PeerLost);
    pair.check_nothing_left(&[fence]);
}

#[test]
fn a_deadline_of_the_receiver_ends_both() {
    let mut pair = Pair::usual();
    let deadline = millis(100);
    let fence = pair.grant_with(4, TOKENS, |wanted| wanted.deadline = Some(deadline)).unwrap();
    pair.sender.begin(4, TOKENS, None).unwrap();
    // Layer 1 lacks its last tokens.
    pair.compute(4, 0, TOKENS).unwrap();
    let part = pair.memory.hold(4, 1, 0..6);
    pair.sender.computed(&[part]).unwrap();
    pair.pass(millis(99));
    assert_eq!((pair.failed(fence), pair.ended(4)), (vec![], vec![]));
    assert_eq!(pair.receiver.due(), Some(deadline));
    pair.pass(deadline);
    let error = pair.failed(fence).remove(0);
    assert_eq!(error.kind(), Kind::TimedOut);
    let numbers = ["request", "layer", "token"].map(|name| error.number(name));
    assert_eq!(numbers, [Some(4), Some(1), Some(6)]);
    assert_eq!(pair.ended(4), [Reason::TimedOut]);
    pair.check_nothing_left(&[fence]);
}

#[test]
fn a_deadline_of_the_sender_ends_both() {
    for granted in [true, false] {
        let mut pair = Pair::usual();
        let fence = granted.then(|| pair.grant(4, TOKENS));
        pair.sender.begin(4, TOKENS, Some(millis(100))).unwrap();
        pair.compute(4, 0, TOKENS).unwrap();
        pair.pass(millis(99));
        assert_eq!(pair.ended(4), []);
        pair.pass(millis(100));
        assert_eq!(pair.ended(4), [Reason::TimedOut]);
        let failed: Vec<_> =
            fence.iter().flat_map(|fence| pair.failed(*fence)).map(|error| error.kind()).collect();
        assert_eq!(failed, vec![Kind::TimedOut; usize::from(granted)]);
        pair.check_nothing_left(&Vec::from_iter(fence));
        // A grant that comes later is told why at once.
        let late = pair.grant(4, TOKENS);
        pair.settle();
        assert_eq!(pair.failed(late)[0].kind(), Kind::TimedOut);
        pair.check_nothing_left(&[late]);
    }
    // No deadline, and it waits.
    let mut pair = Pair::usual();
    pair.send(4, TOKENS);
    pair.pass(Duration::from_secs(100));
    assert_eq!((pair.ended(4), pair.memory.held.len()), (vec![], LAYERS as usize));
}

/// Frames to one end are lost; the other one goes on until its patience is at an end.
#[test]
fn a_connection_that_has_not_answered_in_time_is_closed() {
    let mut pair = Pair::usual();
    let fence = pair.grant(4, TOKENS);
    pair.settle();
    pair.send(4, TOKENS);
    let first = millis(30);
    pair.now = first;
    let mut lost = 0;
    while pair.closed.is_empty() {
        while pair.poll_sender() {
            lost += pair.to_receiver.len();
            pair.to_receiver.clear();
        }
        assert!(pair.now < Duration::from_secs(5), "never closed");
        pair.now += millis(1);
    }
    assert_eq!(pair.closed, [first + SENDING.patience]);
    // At first, and after 50, 100, 200 and 400 ms more.
    assert_eq!(lost, 5);
    pair.settle();
    assert_eq!(pair.ended(4), [Reason::PeerLost]);
    assert_eq!(pair.failed(fence)[0].kind(), Kind::PeerLost);
    assert_eq!(pair.failed(fence)[0].number("link"), Some(LINK.into()));
    pair.check_nothing_left(&[fence]);
}

/// Either end says its end again until it has an answer. The receiver waits twice as long each time.
#[test]
fn an_end_is_told_again_until_it_is_answered() {
    let mut pair = Pair::usual();
    let fence = pair.grant(4, TOKENS);
    pair.sender.begin(4, TOKENS, None).unwrap();
    pair.settle();
    pair.receiver.abort(fence).unwrap();
    let before = pair.answered.len();
    for now in 0..=180 {
        pair.now = millis(now);
        while pair.poll_receiver() {}
        pair.to_sender.clear();
    }
    let times: Vec<_> =
        pair.answered[before..].iter().map(|(at, frame)| (at.as_millis(), frame[0])).collect();
    assert_eq!(times, [(0, 6), (60, 6), (180, 6)]);
    assert_eq!(pair.ended(4), []);
    pair.pass(millis(500));
    assert_eq!(pair.ended(4), [Reason::Aborted]);
    pair.check_nothing_left(&[fence]);
    // And a sender that gave up.
    let fence = pair.grant(5, TOKENS);
    pair.sender.begin(5, TOKENS, None).unwrap();
    pair.settle();
    pair.sender.abort(5).unwrap();
    let before = pair.sent.len();
    for now in 500..=650 {
        pair.now = millis(now);
        while pair.poll_sender() {}
        pair.to_receiver.clear();
    }
    let times: Vec<_> = pair.sent[before..].iter().map(|(at, frame)| (at.as_millis(), frame[0])).collect();
    assert_eq!(times, [(500, 7), (550, 7), (600, 7), (650, 7)]);
    pair.pass(millis(1000));
    assert_eq!(pair.failed(fence)[0].kind(), Kind::Cancelled);
    pair.check_nothing_left(&[fence]);
}

/// A request that its receiver has given up ends when it begins, and takes no grant that comes late; the next try at it
/// is another request.
#[test]
fn a_request_that_was_given_up_before_it_began_ends_when_it_begins() {
    for far in [false, true] {
        let mut pair = Pair::new(far, SENDING, RECEIVING);
        let first = pair.grant(4, TOKENS);
        while pair.poll_receiver() {}
        let grant: Vec<_> = pair.to_sender.drain(..).collect();
        pair.receiver.abort(first).unwrap();
        pair.settle();
        pair.check_nothing_left(&[first]);
        pair.to_sender.extend(grant.clone());
        pair.settle();
        pair.sender.begin(4, TOKENS, None).unwrap();
        pair.to_sender.extend(grant);
        pair.settle();
        assert_eq!(pair.ended(4), [Reason::Aborted]);
        assert_eq!(pair.compute(4, 0, TOKENS).unwrap_err().kind(), Kind::Closed);
        assert!(pair.writes.is_empty() && pair.notices().is_empty(), "it sends for a use that has ended");
        assert!(!pair.at_sender.iter().any(|event| matches!(event, sender::Event::Granted { .. })));
        let second = pair.grant(5, TOKENS);
        pair.send(5, TOKENS);
        pair.settle();
        assert!(pair.is_whole(second));
        pair.check_rows(second, 0..TOKENS);
        pair.check_rows(first, 0..0);
        pair.check_nothing_left(&[first, second]);
    }
}

/// So does one whose grant, or end, came before it began, if the connection is lost in between.
#[test]
fn a_request_whose_receiver_was_lost_before_it_began_ends_when_it_begins() {
    for done in [false, true] {
        let mut pair = Pair::usual();
        let fence = pair.grant(4, TOKENS);
        pair.settle();
        if done {
            let mut end = Vec::new();
            Frame::End { fence, reason: Reason::Done }.encode(&mut end);
            pair.sender.frame(LINK, &end).unwrap();
        }
        pair.cut();
        pair.sender.begin(4, TOKENS, None).unwrap();
        while pair.poll_sender() {}
        assert_eq!(pair.ended(4), [Reason::PeerLost], "done {done}");
    }
}

/// So does one whose grant is so old that uses of its generation are taken to have ended.
#[test]
fn an_old_grant_that_is_given_up_before_its_request_begins_ends_it() {
    let mut pair = Pair::usual();
    let end = |pair: &mut Pair, fence, reason| {
        let mut end = Vec::new();
        Frame::End { fence, reason }.encode(&mut end);
        pair.sender.frame(LINK, &end).unwrap();
        while pair.poll_sender() {}
    };
    let old = pair.grant(4, TOKENS);
    pair.settle();
    for number in 1..1 << 13 {
        let fence = Fence { request: 4 + number, generation: old.generation + number };
        end(&mut pair, fence, Reason::Aborted);
    }
    end(&mut pair, old, Reason::Aborted);
    pair.sender.begin(4, TOKENS, None).unwrap();
    while pair.poll_sender() {}
    assert_eq!(pair.ended(4), [Reason::Aborted]);
}

/// Of the requests that were given up before they began the newest are remembered.
#[test]
fn requests_that_were_given_up_before_they_began_take_bounded_room() {
    const REMEMBERED: u64 = 1 << 10;
    let mut pair = Pair::usual();
    for request in 0..REMEMBERED + 2 {
        let mut end = Vec::new();
        let fence = Fence { request, generation: request };
        Frame::End { fence, reason: Reason::TimedOut }.encode(&mut end);
        pair.sender.frame(LINK, &end).unwrap();
        while pair.poll_sender() {}
    }
    for request in [0, 1, 2, REMEMBERED + 1] {
        pair.sender.begin(request, TOKENS, None).unwrap();
    }
    while pair.poll_sender() {}
    let ended = [0, 1, 2, REMEMBERED + 1].map(|request| pair.ended(request).len());
    assert_eq!(ended, [0, 0, 1, 1]);
}

/// A notice of a use that has ended moves nothing, and the sender hears that it has.
#[test]
fn a_notice_that_comes_after_the_end_moves_nothing() {
    let mut pair = Pair::usual();
    let fence = pair.grant(4, TOKENS);
    pair.settle();
    pair.send(4, TOKENS);
    while pair.poll_sender() {}
    let notices: Vec<_> = pair.to_receiver.drain(..).collect();
    assert!(matches!(Frame::decode(&notices[0]), Ok(Frame::Notice(_))));
    pair.receiver.abort(fence).unwrap();
    pair.settle();
    pair.to_receiver.extend(notices);
    pair.settle();
    assert_eq!(pair.memory.fetched, []);
    pair.check_rows(fence, 0..0);
    pair.check_nothing_left(&[fence]);
}

/// A receiver may have all it wants, from other ranks, before its request begins here. Its end may come twice.
#[test]
fn an_end_that_comes_twice_before_its_request_ends_it_when_it_begins() {
    let mut pair = Pair::usual();
    let fence = Fence { request: 4, generation: 0 };
    let mut end = Vec::new();
    Frame::End { fence, reason: Reason::Done }.encode(&mut end);
    for _ in 0..2 {
        pair.sender.frame(LINK, &end).unwrap();
    }
    pair.send(4, TOKENS);
    while pair.poll_sender() {}
    assert_eq!(pair.ended(4), [Reason::Done]);
    assert!(pair.memory.held.is_empty(), "rows are held for a receiver that wants none");
}

/// A caller that polls until nothing is left is told once that a connection is to be closed.
#[test]
fn a_silent_connection_is_to_be_closed_once() {
    let mut pair = Pair::usual();
    pair.grant(4, TOKENS);
    pair.settle();
    pair.send(4, TOKENS);
    let (mut frame, mut closes) = (Vec::new(), 0);
    for times in 0..3 {
        for _ in 0..20 {
            match pair.sender.poll(SENDING.patience * times * 2, &mut pair.memory, &mut frame).unwrap() {
                Some(sender::Action::Close { link }) => closes += u32::from(link == LINK),
                Some(_) => {}
                None => break,
            }
        }
    }
    assert_eq!(closes, 1);
    let mut receiver = Pair::usual().receiver;
    let mut closes = 0;
    receiver.connect(LINK + 1, false).unwrap();
    for times in 0..3 {
        while let Some(action) = receiver.poll(RECEIVING.patience * times * 2, &mut frame) {
            closes += u32::from(action == receiver::Action::Close { link: LINK + 1 });
            assert!(closes < 3, "a caller that polls until nothing is left never ends");
        }
    }
    assert_eq!(closes, 1, "its other end never said hello");
}

/// Rows that cannot be read fail their request at all connections in the same poll, also at one that was looked at
/// before. One of two receivers has the first rows already, so that only the other one's are read.
#[test]
fn rows_that_cannot_be_read_are_told_to_all_receivers_at_once() {
    struct Unreadable;
    impl Source for Unreadable {
        fn read(&mut self, _: u64, _: &Run, _: &mut [u8]) -> Result<()> {
            Err(Error::new(Kind::Io, "read"))
        }
    }
    for all in 0..2 {
        let mut sender = two_receivers(all);
        let part = |tokens| Computed { request: 1, layer: 0, tokens, chunk: None, origin: 1 };
        let (mut frame, mut memory) = (Vec::new(), Memory::default());
        memory.hold(1, 0, 0..4);
        sender.computed(&[part(2..4)]).unwrap();
        while sender.poll(millis(1), &mut memory, &mut frame).unwrap().is_some() {}
        sender.computed(&[part(0..2)]).unwrap();
        let mut failed = [0; 2];
        while let Some(action) = sender.poll(millis(2), &mut Unreadable, &mut frame).unwrap() {
            if let sender::Action::Frame { link } = action
                && let Frame::Failed { reason, .. } = Frame::decode(&frame).unwrap()
            {
                assert_eq!(reason, Reason::Gone);
                failed[link as usize] += 1;
            }
        }
        assert_eq!(failed, [1, 1], "{all}");
        assert!(sender.due().is_none_or(|due| due > millis(2)), "{all}: {:?}", sender.due());
    }
}

/// A sender with a request that two receivers want: one of them all of it, the other one from its third token on.
fn two_receivers(all: u32) -> Sender {
    // Both ranks keep the one head.
    let to = Side { width: 2, ..side(LAYERS) };
    let mut sender = Sender::new(side(LAYERS), RANK, SENDING).unwrap();
    let (mut frame, nothing) = (Vec::new(), &mut Memory::default());
    for lane in 0..2 {
        let rank = Rank { instance: 2, lane, ..RANK };
        let mut receiver = Receiver::new(to.clone(), rank, RECEIVING).unwrap();
        sender.connect(lane, false).unwrap();
        receiver.connect(lane, false).unwrap();
        while let Some(action) = sender.poll(millis(0), nothing, &mut frame).unwrap() {
            // The other connection is told that its grant is known.
            if action == (sender::Action::Frame { link: lane }) {
                receiver.frame(lane, &frame, nothing).unwrap();
            }
        }
        let wanted = Wanted {
            fence: Fence { request: 1, generation: 1 },
            tokens: 4,
            first: if lane == all { 0 } else { 2 },
            sender: (RANK.instance, 0),
            payloads: &[],
            landing: &[],
            deadline: None,
        };
        receiver.grant(&wanted).unwrap();
        while let Some(action) = receiver.poll(millis(0), &mut frame) {
            if let receiver::Action::Event(receiver::Event::Met { .. }) = action {
                continue;
            }
            assert_eq!(action, receiver::Action::Frame { link: lane });
            sender.frame(lane, &frame).unwrap();
        }
    }
    sender.begin(1, 4, None).unwrap();
    sender
}
