//! A sender and a receiver by hand: what they say when, and that a transfer goes on in every order of calls.

use std::time::Duration;

use forebay::Kind;
use forebay::transfer::{Fence, Frame, Reason, receiver, sender};

use crate::frame_bytes::sum;
use crate::pair::{LAYERS, PAGE, Pair, RECEIVING, ROW, SENDING, millis};

/// The frames of a kind among those that one end has said.
fn kinds(frames: &[(Duration, Vec<u8>)], kind: u8) -> usize {
    frames.iter().filter(|(_, frame)| frame[0] == kind).count()
}

const GRANT: u8 = 2;
const NOTICE: u8 = 3;
const PAYLOAD: u8 = 5;

#[test]
fn the_parts_of_a_micro_batch_travel_in_one_notice_a_layer() {
    let run = |together: bool| {
        let mut pair = Pair::usual();
        let fences = [1, 2, 3].map(|request| {
            pair.sender.begin(request, 8, None).unwrap();
            pair.grant(request, 8)
        });
        pair.settle();
        for layer in 0..LAYERS {
            let parts = [1, 2, 3].map(|request| pair.memory.hold(request, layer, 0..8));
            if together {
                pair.sender.computed(&parts).unwrap();
                pair.settle();
            } else {
                for part in parts {
                    pair.sender.computed(&[part]).unwrap();
                    pair.settle();
                }
            }
        }
        [1, 2, 3].into_iter().for_each(|request| pair.sender.finish(request).unwrap());
        pair.settle();
        for fence in fences {
            pair.check_rows(fence, 0..8);
            assert!(pair.is_whole(fence));
        }
        pair.check_nothing_left(&fences);
        pair.notices().into_iter().map(|(_, parts)| parts).collect::<Vec<_>>()
    };
    assert_eq!(run(true), [3; LAYERS as usize]);
    // The control: parts of calls of their own.
    assert_eq!(run(false), [1; 3 * LAYERS as usize]);
}

#[test]
fn a_short_prompt_is_told_in_one_notice_when_it_is_finished_and_a_long_one_at_once() {
    for (tokens, short) in [(8, true), (9, false)] {
        let mut pair = Pair::new(false, sender::Options { bulk_tokens: 8, ..SENDING }, RECEIVING);
        let fence = pair.grant(1, tokens);
        pair.sender.begin(1, tokens, None).unwrap();
        for layer in 0..LAYERS {
            pair.compute(1, layer, tokens).unwrap();
            pair.pass(pair.now + millis(10));
            let wanted = if short { 0 } else { layer as usize + 1 };
            assert_eq!(pair.notices().len(), wanted, "{tokens} tokens, layer {layer}");
        }
        // Time alone tells nothing.
        pair.pass(millis(500));
        pair.sender.finish(1).unwrap();
        pair.settle();
        let all: Vec<_> = pair.notices();
        match short {
            true => assert_eq!(all, [(millis(500), LAYERS as usize)]),
            false => assert_eq!(all, [(millis(0), 1), (millis(10), 1), (millis(20), 1)]),
        }
        pair.check_rows(fence, 0..tokens);
        pair.check_nothing_left(&[fence]);
    }
}

/// What a stream keeps for a frame is bounded: parts are cut, and notices take no more of them.
#[test]
fn a_notice_tells_no_more_bytes_of_rows_than_its_bound() {
    const ROWS: usize = 5;
    let bytes = |frame: &Vec<u8>| match Frame::decode(frame).unwrap() {
        Frame::Notice(notice) => Some(notice.parts().map(|part| part.tokens.len() * ROW).sum::<usize>()),
        _ => None,
    };
    for (bound, least) in [(ROWS * ROW, 9), (1, 33), (1 << 20, 1)] {
        let options = sender::Options { notice_bytes: bound as u64, ..SENDING };
        let mut pair = Pair::new(false, options, RECEIVING);
        let fence = pair.grant(4, 11);
        pair.settle();
        pair.send(4, 11);
        pair.settle();
        let told: Vec<usize> = pair.sent.iter().filter_map(|(_, frame)| bytes(frame)).collect();
        assert!(told.len() >= least && told.iter().all(|told| *told <= bound.max(ROW)), "{bound}: {told:?}");
        assert!(pair.is_whole(fence));
        pair.check_rows(fence, 0..11);
    }
}

#[test]
fn rows_are_told_no_faster_than_the_bound_on_bytes_a_second() {
    // 8 rows of 8 bytes are 64 bytes: 20 ms.
    for (bytes_per_second, gap) in [(3200, 20), (0, 0)] {
        let mut pair = Pair::new(false, sender::Options { bytes_per_second, ..SENDING }, RECEIVING);
        let fence = pair.grant(1, 8);
        pair.sender.begin(1, 8, None).unwrap();
        pair.settle();
        for layer in 0..LAYERS {
            pair.compute(1, layer, 8).unwrap();
            pair.settle();
            if layer == 0 && gap > 0 {
                // A payload counts for nothing and is not held up for longer than the rows before it.
                pair.sender.payload(1, 9, b"x").unwrap();
            }
            // The machine itself says when.
            pair.pass(pair.now + millis(gap));
        }
        pair.sender.finish(1).unwrap();
        pair.pass(millis(200));
        let times: Vec<_> = pair.notices().into_iter().map(|(at, parts)| (at.as_millis(), parts)).collect();
        let wanted: Vec<_> = (0..LAYERS).map(|layer| (u128::from(layer) * u128::from(gap), 1)).collect();
        assert_eq!(times, wanted);
        pair.check_rows(fence, 0..8);
        pair.check_nothing_left(&[fence]);
    }
    // What is computed meanwhile waits for the end of the pause, and is told together then.
    let mut pair = Pair::new(false, sender::Options { bytes_per_second: 3200, ..SENDING }, RECEIVING);
    pair.grant(1, 8);
    pair.sender.begin(1, 8, None).unwrap();
    for layer in 0..LAYERS {
        pair.compute(1, layer, 8).unwrap();
        pair.settle();
    }
    pair.pass(millis(19));
    assert_eq!(pair.notices(), [(millis(0), 1)]);
    pair.pass(millis(20));
    assert_eq!(pair.notices(), [(millis(0), 1), (millis(20), 2)]);
}

/// Counts parts by the frames alone: those told and not answered.
#[test]
fn no_more_parts_are_unanswered_than_the_receivers_window() {
    let most = |window| {
        let mut pair = Pair::new(false, SENDING, receiver::Options { window, ..RECEIVING });
        let fence = pair.grant(1, 40);
        pair.sender.begin(1, 40, None).unwrap();
        pair.settle();
        for (layer, page) in (0..LAYERS).flat_map(|layer| (0..10).map(move |page| (layer, page))) {
            let part = pair.memory.hold(1, layer, page * PAGE..(page + 1) * PAGE);
            pair.sender.computed(&[part]).unwrap();
        }
        pair.sender.finish(1).unwrap();
        let (mut open, mut most) = (std::collections::BTreeMap::new(), 0);
        loop {
            // The sender says all that it may before it hears an answer.
            let before = pair.sent.len();
            while pair.poll_sender() {}
            for (_, frame) in &pair.sent[before..] {
                if let Ok(Frame::Notice(notice)) = Frame::decode(frame) {
                    open.insert(notice.number, notice.parts().count());
                }
            }
            most = most.max(open.values().sum::<usize>());
            while pair.deliver_to_receiver() {}
            while pair.poll_receiver() {}
            for frame in pair.to_sender.clone() {
                if let Ok(Frame::Answer(answer)) = Frame::decode(&frame) {
                    open.remove(&answer.number);
                }
            }
            if pair.to_sender.is_empty() {
                break;
            }
            while pair.deliver_to_sender() {}
        }
        pair.settle();
        pair.check_rows(fence, 0..40);
        pair.check_nothing_left(&[fence]);
        most
    };
    assert_eq!([most(1), most(4), most(29), most(64)], [1, 4, 29, 30]);
}

/// Every order in which a request's calls can come, with and without rest between them.
#[test]
fn a_transfer_is_whole_in_every_order_of_calls() {
    for (far, rests) in [(false, false), (false, true), (true, false), (true, true)] {
        // The grant comes before call `grant` of: begin, each layer, the payload, finish.
        for grant in 0..=LAYERS + 3 {
            let mut pair = Pair::new(far, SENDING, RECEIVING);
            let mut fence = None;
            for call in 0..=LAYERS + 3 {
                if call == grant {
                    fence = Some(pair.grant_with(5, 11, |wanted| wanted.payloads = &[2]).unwrap());
                    if rests {
                        pair.settle();
                    }
                }
                match call {
                    0 => pair.sender.begin(5, 11, None).unwrap(),
                    call if call <= LAYERS => pair.compute(5, call - 1, 11).unwrap(),
                    call if call == LAYERS + 1 => pair.sender.payload(5, 2, b"first").unwrap(),
                    call if call == LAYERS + 2 => pair.sender.finish(5).unwrap(),
                    _ => {}
                }
                if rests {
                    pair.settle();
                }
            }
            pair.pass(millis(300));
            let fence = fence.unwrap();
            assert!(pair.is_whole(fence), "far {far}, grant before call {grant}");
            assert_eq!(pair.ended(5), [Reason::Done]);
            pair.check_rows(fence, 0..11);
            pair.check_nothing_left(&[fence]);
            let payload = receiver::Event::Payload { fence, kind: 2, bytes: b"first".to_vec() };
            assert_eq!(pair.at_receiver.iter().filter(|event| **event == payload).count(), 1);
            // Each layer is said to be ready once, before the whole.
            let ready: Vec<_> = pair.at_receiver.iter().take_while(|event| !is_whole(event)).collect();
            for layer in 0..LAYERS {
                let wanted = receiver::Event::Ready { fence, layer };
                assert_eq!(ready.iter().filter(|event| ***event == wanted).count(), 1);
            }
            let free = pair.at_receiver.iter().filter(|event| matches!(event, receiver::Event::Free { .. }));
            assert_eq!(free.count(), usize::from(far));
        }
    }
}

fn is_whole(event: &receiver::Event) -> bool {
    matches!(event, receiver::Event::Whole { .. })
}

#[test]
fn a_request_is_over_at_the_sender_only_when_it_is_finished() {
    let mut pair = Pair::usual();
    let fence = pair.grant(1, 8);
    pair.sender.begin(1, 8, None).unwrap();
    (0..LAYERS).for_each(|layer| pair.compute(1, layer, 8).unwrap());
    pair.pass(millis(300));
    assert!(pair.is_whole(fence));
    assert!(pair.memory.held.is_empty(), "what all receivers have is released before the end");
    assert_eq!(pair.ended(1), []);
    assert!(pair.sender.begin(1, 8, None).is_err());
    pair.sender.finish(1).unwrap();
    pair.settle();
    assert_eq!(pair.ended(1), [Reason::Done]);
    pair.check_nothing_left(&[fence]);
    assert_eq!(pair.sender.finish(1).unwrap_err().kind(), Kind::Closed);
}

#[test]
fn rows_before_the_first_wanted_token_are_not_read() {
    for (first, fetched) in [(0, vec![0, 4, 8]), (5, vec![5, 8]), (8, vec![8]), (11, vec![11])] {
        let mut pair = Pair::usual();
        let fence = pair.grant_with(3, 12, |wanted| wanted.first = first).unwrap();
        pair.send(3, 12);
        pair.pass(millis(300));
        assert!(pair.is_whole(fence), "{first}");
        assert_eq!(pair.ended(3), [Reason::Done], "{first}");
        let wanted: Vec<_> =
            (0..LAYERS).flat_map(|layer| fetched.iter().map(move |token| (layer, *token))).collect();
        assert_eq!(pair.memory.fetched, wanted, "{first}");
        pair.check_rows(fence, first..12);
        pair.check_nothing_left(&[fence]);
    }
}

/// A receiver that has all rows may still want a payload.
#[test]
fn a_receiver_that_has_all_rows_gets_the_payload_alone() {
    let mut pair = Pair::usual();
    let only = |wanted: &mut receiver::Wanted<'_>| (wanted.first, wanted.payloads) = (12, &[4]);
    let fence = pair.grant_with(3, 12, only).unwrap();
    pair.sender.begin(3, 12, None).unwrap();
    (0..LAYERS).for_each(|layer| pair.compute(3, layer, 12).unwrap());
    pair.settle();
    assert!(!pair.is_whole(fence));
    assert!(pair.memory.held.is_empty(), "rows that no receiver wants are released");
    pair.sender.payload(3, 4, &[]).unwrap();
    pair.sender.finish(3).unwrap();
    pair.settle();
    assert!(pair.is_whole(fence));
    pair.check_nothing_left(&[fence]);
    assert_eq!((pair.notices(), kinds(&pair.sent, PAYLOAD)), (vec![], 1));
}

#[test]
fn a_run_whose_bytes_are_wrong_is_asked_for_again_alone() {
    for far in [false, true] {
        for times in [1, SENDING.repeats] {
            let mut pair = Pair::new(far, SENDING, RECEIVING);
            pair.memory.wrong.insert((1, 4), times);
            let fence = pair.grant(6, 12);
            pair.send(6, 12);
            pair.settle();
            assert!(pair.is_whole(fence));
            pair.check_rows(fence, 0..12);
            pair.check_nothing_left(&[fence]);
            for key in (0..LAYERS).flat_map(|layer| [0, 4, 8].map(|token| (layer, token))) {
                let count = pair.memory.fetched.iter().filter(|other| **other == key).count();
                assert_eq!(count, if key == (1, 4) { times as usize + 1 } else { 1 }, "{key:?}");
            }
        }
        // Once more is too often, at both ends.
        let mut pair = Pair::new(far, SENDING, RECEIVING);
        pair.memory.wrong.insert((1, 4), SENDING.repeats + 1);
        let fence = pair.grant(6, 12);
        pair.send(6, 12);
        pair.settle();
        let fetched = pair.memory.fetched.iter().filter(|key| **key == (1, 4)).count();
        assert_eq!(fetched, SENDING.repeats as usize + 1);
        assert_eq!(pair.ended(6), [Reason::Corrupt]);
        let errors: Vec<_> = pair.failed(fence).iter().map(forebay::Error::kind).collect();
        assert_eq!(errors, [Kind::Corrupt]);
        assert!(
            !pair.is_whole(fence) && !pair.at_receiver.contains(&receiver::Event::Ready { fence, layer: 1 })
        );
        pair.check_nothing_left(&[fence]);
    }
}

/// Changes a frame on its way and gives it a sum that fits.
fn change(frame: &mut Vec<u8>, at: usize) {
    let end = frame.len() - 4;
    frame[at] ^= 1;
    let sum = sum(&frame[..end]);
    frame.truncate(end);
    frame.extend(sum.to_le_bytes());
}

#[test]
fn a_payload_whose_bytes_are_wrong_is_sent_again_and_not_for_ever() {
    for wrong in 1..=SENDING.repeats + 1 {
        let mut pair = Pair::usual();
        let fence = pair.grant_with(6, 4, |wanted| wanted.payloads = &[1]).unwrap();
        pair.send_with_payload(6, 4, 1, b"hidden state");
        let mut changed = 0;
        while pair.step() {
            let payload = pair.to_receiver.iter_mut().find(|frame| frame[0] == PAYLOAD);
            // Its last byte; each frame once, right after it was sent.
            if let Some(frame) =
                payload.filter(|_| changed < wrong && kinds(&pair.sent, PAYLOAD) > changed as usize)
            {
                let last = frame.len() - 5;
                change(frame, last);
                changed += 1;
            }
        }
        assert_eq!(changed, wrong);
        let whole = wrong <= SENDING.repeats;
        assert_eq!(pair.is_whole(fence), whole, "{wrong}");
        let payload = receiver::Event::Payload { fence, kind: 1, bytes: b"hidden state".to_vec() };
        let found: Vec<_> = pair
            .at_receiver
            .iter()
            .filter(|event| matches!(event, receiver::Event::Payload { .. }))
            .collect();
        assert_eq!(found, vec![&payload; usize::from(whole)]);
        assert_eq!(kinds(&pair.sent, PAYLOAD), (wrong + u32::from(whole)) as usize);
        assert_eq!(pair.ended(6), [if whole { Reason::Done } else { Reason::Corrupt }]);
        pair.check_nothing_left(&[fence]);
    }
}

/// A scenario with a run that is wrong once, a payload and two requests; its events, and the runs that were fetched.
fn scenario(far: bool, twice: bool) -> (Vec<sender::Event>, Vec<receiver::Event>, Vec<(u32, u32)>) {
    let mut pair = Pair::new(far, SENDING, RECEIVING);
    pair.twice = twice;
    pair.memory.wrong.insert((2, 4), 1);
    let fences: Vec<Fence> = [1, 2]
        .into_iter()
        .map(|request| {
            let fence = pair.grant_with(request, 8, |wanted| wanted.payloads = &[3]).unwrap();
            pair.send_with_payload(request, 8, 3, b"draft");
            pair.settle();
            pair.check_rows(fence, 0..8);
            fence
        })
        .collect();
    pair.check_nothing_left(&fences);
    (pair.at_sender, pair.at_receiver, pair.memory.fetched)
}

#[test]
fn every_frame_twice_changes_nothing() {
    for far in [false, true] {
        let (mut once, mut twice) = (scenario(far, false), scenario(far, true));
        assert_eq!(once.0.len(), 2 * (1 + LAYERS as usize + 1));
        // The order of what two frames bring about at the same time is not a promise.
        for list in [&mut once.0, &mut twice.0] {
            list.sort_by_key(|event| format!("{event:?}"));
        }
        assert_eq!(once, twice);
    }
}

#[test]
fn answers_that_come_late_or_twice_change_nothing() {
    let mut pair = Pair::usual();
    let fence = pair.grant(6, 8);
    pair.sender.begin(6, 8, None).unwrap();
    pair.settle();
    pair.compute(6, 0, 8).unwrap();
    pair.poll_sender();
    while pair.deliver_to_receiver() || pair.poll_receiver() {}
    let late: Vec<_> = pair.to_sender.drain(..).collect();
    assert_eq!(late.len(), 1);
    // The same message again, and the receiver moves nothing again.
    let number = |frame: &[u8]| match Frame::decode(frame).unwrap() {
        Frame::Notice(notice) => notice.number,
        Frame::Answer(answer) => answer.number,
        other => panic!("{other:?}"),
    };
    pair.now = SENDING.resend;
    while pair.poll_sender() || pair.deliver_to_receiver() || pair.poll_receiver() {}
    assert_eq!(kinds(&pair.sent, NOTICE), 2);
    assert_eq!(number(&pair.sent[pair.sent.len() - 1].1), number(&late[0]));
    assert_eq!(pair.memory.fetched, [(0, 0), (0, 4)]);
    assert_eq!(pair.memory.held.len(), 1, "rows are held until they are answered");
    let again: Vec<_> = pair.to_sender.drain(..).collect();
    for frame in late.iter().chain(&late).chain(&again).chain(&late) {
        pair.sender.frame(7, frame).unwrap();
        pair.settle();
    }
    assert!(pair.memory.held.is_empty());
    (1..LAYERS).for_each(|layer| pair.compute(6, layer, 8).unwrap());
    pair.sender.finish(6).unwrap();
    pair.settle();
    for frame in late.iter().chain(&again) {
        pair.sender.frame(7, frame).unwrap();
    }
    pair.settle();
    pair.check_rows(fence, 0..8);
    pair.check_nothing_left(&[fence]);
    assert_eq!(pair.ended(6), [Reason::Done]);
}

#[test]
fn a_grant_is_told_again_until_the_sender_knows_it() {
    let mut pair = Pair::usual();
    let fence = pair.grant(6, 8);
    // What the sender says is lost for 200 ms.
    for now in 0..200 {
        pair.now = millis(now);
        while pair.poll_receiver() || pair.deliver_to_sender() || pair.poll_sender() {
            pair.to_receiver.clear();
        }
    }
    // At 0, 60 and 180 ms; and at 420 ms for the last time, whatever the sender does later.
    assert_eq!(kinds(&pair.answered, GRANT), 3);
    pair.pass(millis(900));
    assert_eq!(kinds(&pair.answered, GRANT), 4);
    pair.send(6, 8);
    pair.pass(millis(1800));
    assert_eq!(kinds(&pair.answered, GRANT), 4);
    let granted = |event: &&sender::Event| matches!(event, sender::Event::Granted { .. });
    assert_eq!(pair.at_sender.iter().filter(granted).count(), 1);
    pair.check_rows(fence, 0..8);
    pair.check_nothing_left(&[fence]);
}

/// A prompt waits long in the engine's queue, while many others go through the same connection.
#[test]
fn a_grant_that_waits_while_many_others_end_is_kept() {
    let mut pair = Pair::usual();
    let waits = pair.grant(1, 4);
    pair.settle();
    for request in 10..10 + 4200 {
        let fence = pair.grant(request, 4);
        pair.send(request, 4);
        pair.settle();
        assert!(pair.is_whole(fence));
        pair.at_receiver.clear();
        pair.at_sender.clear();
        pair.sent.clear();
    }
    pair.send(1, 4);
    pair.pass(pair.now + millis(900));
    assert!(pair.is_whole(waits));
}
