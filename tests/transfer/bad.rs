//! Calls and frames that no honest end makes: one clear error or refusal each, and nothing is left of it.

use forebay::transfer::sender::Computed;
use forebay::transfer::{
    Chunk, Fence, LANDING_MAX, PAYLOAD_MAX, Rank, Reason, Receiver, Sender, Side, Split, receiver, sender,
};
use forebay::{Error, Kind};

use crate::frames::Bytes;
use crate::pair::{LAYERS, LINK, Memory, Pair, RANK, RECEIVING, SENDING, millis, side};

const TOKENS: u32 = 12;

fn hello(rank: [u32; 3], window: u32, side: &[u8]) -> Vec<u8> {
    Bytes::kind(1).longs(&[1]).words(&rank).words(&[window]).put(side).end()
}

fn grant(fence: Fence, numbers: [u32; 3], landing: &[u32]) -> Vec<u8> {
    let head = Bytes::kind(2).longs(&[fence.request, fence.generation]).words(&numbers);
    head.words(&[landing.len() as u32]).words(landing).end()
}

fn answer(number: u64, failed: &[(u16, &[u32])]) -> Vec<u8> {
    let head = Bytes::kind(4).longs(&[number]).short(failed.len() as u16);
    let all = failed
        .iter()
        .fold(head, |bytes, (part, runs)| bytes.short(*part).words(&[runs.len() as u32]).words(runs));
    all.end()
}

fn payload(number: u64, fence: Fence) -> Vec<u8> {
    let head = Bytes::kind(5).longs(&[number, fence.request, fence.generation]);
    head.put(&[1]).words(&[0]).put(b"payload").end()
}

/// Kind 6 to 9; the last two have no reason.
fn of_fence(kind: u8, fence: Fence, reason: u8) -> Vec<u8> {
    let head = Bytes::kind(kind).longs(&[fence.request, fence.generation]);
    if kind > 7 { head.end() } else { head.put(&[reason]).end() }
}

/// A part of a forged notice: fence, layer, tokens, origin, and digests by index; all where `some` is false.
struct Forged<'a> {
    fence: Fence,
    layer: u32,
    tokens: [u32; 2],
    origin: u64,
    some: bool,
    digests: &'a [u32],
}

fn notice(number: u64, parts: &[Forged<'_>]) -> Vec<u8> {
    let head = Bytes::kind(3).longs(&[number]).short(parts.len() as u16);
    let all = parts.iter().fold(head, |bytes, of| {
        let bytes = bytes.longs(&[of.fence.request, of.fence.generation]).words(&[of.layer]);
        let count = of.digests.len() as u32 / if of.some { 2 } else { 1 };
        let bytes = bytes.words(&of.tokens).words(&[0; 3]).longs(&[of.origin]).put(&[u8::from(of.some)]);
        bytes.words(&[count]).words(of.digests)
    });
    all.end()
}

const FENCE: Fence = Fence { request: 4, generation: 0 };

/// Both machines with a connection that has said nothing.
fn fresh() -> (Sender, Receiver) {
    let mut sender = Sender::new(side(LAYERS), RANK, SENDING).unwrap();
    let mut receiver = Receiver::new(side(LAYERS), RANK, RECEIVING).unwrap();
    sender.connect(LINK, false).unwrap();
    receiver.connect(LINK, false).unwrap();
    (sender, receiver)
}

#[test]
fn a_hello_that_does_not_fit_is_refused_by_both_ends_alike() {
    type Change = fn(&mut Side);
    let sides: [(Change, &str); 4] = [
        (|side| side.components[0].dtype = "fp8".into(), "the type of a component"),
        (
            |side| {
                side.components[0].heads = 2;
                side.stages[0].page_bytes[0] *= 2;
                for place in side.stages[0].layers.iter_mut().flat_map(|layer| &mut layer.places) {
                    (place.offset, place.token_stride) = (place.offset * 2, place.token_stride * 2);
                }
            },
            "heads of a component",
        ),
        (|side| side.components[0].head_bytes = 4, "bytes of a component"),
        (|side| side.components[0].name = "k".into(), "a component that the sender does not have"),
    ];
    let rank = [0; 3];
    let good = side(LAYERS).encode().unwrap();
    let mut wrong = Vec::new();
    for (change, place) in sides {
        let mut other = side(LAYERS);
        change(&mut other);
        wrong.push((hello(rank, 64, &other.encode().unwrap()), Kind::InvalidConfig, place));
    }
    // No honest end encodes what is wrong in itself, so a number is changed in the bytes: those of a page.
    let at = good.windows(8).position(|bytes| bytes == 96_u64.to_le_bytes()).unwrap();
    let mut beyond = good.clone();
    beyond[at] = 95;
    wrong.push((hello(rank, 64, &beyond), Kind::InvalidConfig, "a place beyond its page"));
    let mut version = good.clone();
    version[8] = 1;
    wrong.push((hello(rank, 64, &version), Kind::BadVersion, ""));
    wrong.push((hello(rank, 64, &good[1..]), Kind::BadFormat, ""));
    wrong.push((hello([0, 1, 0], 64, &good), Kind::OutOfRange, "a rank that is not there"));
    wrong.push((hello([0, 0, 1], 64, &good), Kind::OutOfRange, "a rank that is not there"));
    wrong.push((hello([1, 0, 0], 64, &good), Kind::OutOfRange, "replica and window"));
    wrong.push((hello(rank, 0, &good), Kind::OutOfRange, "replica and window"));
    for (bytes, kind, place) in wrong {
        let (mut sender, mut receiver) = fresh();
        let errors = [sender.frame(LINK, &bytes), receiver.frame(LINK, &bytes, &mut Memory::default())]
            .map(Result::unwrap_err);
        for error in errors {
            assert_eq!(error.kind(), kind, "{error}");
            assert!(place.is_empty() || error.place() == place, "{error}");
        }
        // Both are as before: they take a good one, once.
        let good = hello(rank, 64, &good);
        for wanted in [None, Some(Kind::BadFormat)] {
            let done = [sender.frame(LINK, &good), receiver.frame(LINK, &good, &mut Memory::default())];
            assert_eq!(done.map(|done| done.err().map(|error| error.kind())), [wanted; 2]);
        }
        rest(&mut sender, &mut receiver);
    }
}

/// The machines say who is there, their hellos and nothing else, and after the connection is gone nothing at all.
fn rest(sender: &mut Sender, receiver: &mut Receiver) {
    let (mut frame, mut memory) = (Vec::new(), Memory::default());
    let met = sender.poll(millis(0), &mut memory, &mut frame).unwrap();
    assert!(matches!(met, Some(sender::Action::Event(sender::Event::Met { link: LINK, rank: RANK }))));
    let met = receiver.poll(millis(0), &mut frame);
    assert!(matches!(met, Some(receiver::Action::Event(receiver::Event::Met { link: LINK, rank: RANK }))));
    assert!(sender.poll(millis(0), &mut memory, &mut frame).unwrap().is_some() && frame[0] == 1);
    assert!(receiver.poll(millis(0), &mut frame).is_some() && frame[0] == 1);
    assert_eq!(sender.poll(millis(9999), &mut memory, &mut frame).unwrap(), None);
    assert_eq!(receiver.poll(millis(9999), &mut frame), None);
    sender.disconnect(LINK);
    receiver.disconnect(LINK);
    assert_eq!((sender.due(), receiver.due()), (None, None));
}

#[test]
fn frames_out_of_place_are_refused() {
    let to_sender = [grant(FENCE, [12, 0, 0], &[]), answer(0, &[]), of_fence(6, FENCE, 0)];
    let to_receiver = [notice(0, &[]), payload(0, FENCE), of_fence(7, FENCE, 1), of_fence(8, FENCE, 0)];
    let own = side(LAYERS).encode().unwrap();
    for bytes in to_sender.iter().chain(&to_receiver) {
        let (mut sender, mut receiver) = fresh();
        let both = |sender: &mut Sender, receiver: &mut Receiver, link| {
            [sender.frame(link, bytes), receiver.frame(link, bytes, &mut Memory::default())]
        };
        for (link, place) in [(LINK, "a frame before the hello"), (LINK + 1, "a frame of no connection")] {
            for error in both(&mut sender, &mut receiver, link).map(Result::unwrap_err) {
                assert_eq!((error.kind(), error.place()), (Kind::BadFormat, place));
                assert_eq!(error.number("link"), Some(link.into()));
            }
        }
        let greeting = hello([0; 3], 64, &own);
        sender.frame(LINK, &greeting).unwrap();
        receiver.frame(LINK, &greeting, &mut Memory::default()).unwrap();
        let wrong = match to_sender.contains(bytes) {
            true => (receiver.frame(LINK, bytes, &mut Memory::default()), "a frame that only receivers send"),
            false => (sender.frame(LINK, bytes), "a frame that only senders send"),
        };
        let error = wrong.0.unwrap_err();
        assert_eq!((error.kind(), error.place()), (Kind::BadFormat, wrong.1));
        rest(&mut sender, &mut receiver);
    }
}

/// A pair with a request that was granted and of which layer 0 is computed but not told.
fn granted(first: u32) -> (Pair, Fence) {
    let mut pair = Pair::usual();
    let fence = pair.grant_with(FENCE.request, TOKENS, |wanted| wanted.first = first).unwrap();
    pair.sender.begin(FENCE.request, TOKENS, None).unwrap();
    pair.settle();
    pair.compute(FENCE.request, 0, TOKENS).unwrap();
    assert_eq!(fence, FENCE);
    (pair, fence)
}

#[test]
fn a_notice_of_rows_that_cannot_be_fails_its_request_at_both_ends() {
    let good = Forged { fence: FENCE, layer: 0, tokens: [4, 12], origin: 1, some: false, digests: &[1, 2] };
    let wrong = [
        (Forged { layer: LAYERS, ..good }, "rows of a notice"),
        (Forged { layer: u32::MAX, ..good }, "rows of a notice"),
        (Forged { tokens: [4, 13], ..good }, "tokens of a notice"),
        (Forged { tokens: [4, u32::MAX], ..good }, "tokens of a notice"),
        (Forged { tokens: [3, 12], ..good }, "tokens of a notice"),
        (Forged { tokens: [4, 4], ..good }, "tokens of a notice"),
        (Forged { tokens: [12, 4], ..good }, "tokens of a notice"),
        (Forged { digests: &[1], ..good }, "digests of a notice"),
        (Forged { digests: &[], ..good }, "digests of a notice"),
        (Forged { digests: &[1, 2, 3], ..good }, "digests of a notice"),
        (Forged { some: true, digests: &[1, 7, 0, 7], ..good }, "digests of a notice"),
        (Forged { some: true, digests: &[1, 7, 1, 7], ..good }, "digests of a notice"),
        (Forged { some: true, digests: &[2, 7], ..good }, "digests of a notice"),
        (Forged { some: true, digests: &[0, 7, u32::MAX, 7], ..good }, "digests of a notice"),
    ];
    for (part, place) in &wrong {
        let (mut pair, fence) = granted(4);
        let bytes = notice(1000, std::slice::from_ref(part));
        pair.receiver.frame(LINK, &bytes, &mut pair.memory).unwrap();
        pair.settle();
        let [error] = pair.failed(fence).try_into().unwrap();
        assert_eq!((error.kind(), error.place()), (Kind::BadFormat, *place), "{error}");
        assert_eq!(error.number("request"), Some(FENCE.request));
        assert_eq!(error.number("layer"), Some(part.layer.into()));
        assert_eq!(pair.ended(FENCE.request), [Reason::BadFormat]);
        assert!(pair.memory.stored.is_empty());
        pair.check_nothing_left(&[fence]);
    }
    // The control: digests that do not fit are no reason to fail.
    let (mut pair, fence) = granted(4);
    pair.receiver.frame(LINK, &notice(1000, &[good]), &mut pair.memory).unwrap();
    pair.settle();
    assert_eq!((pair.failed(fence), pair.ended(FENCE.request)), (vec![], vec![]));
    (1..LAYERS).for_each(|layer| pair.compute(FENCE.request, layer, TOKENS).unwrap());
    pair.sender.finish(FENCE.request).unwrap();
    pair.settle();
    pair.check_rows(fence, 4..TOKENS);
    pair.check_nothing_left(&[fence]);
}

/// Of another generation, another request or another connection, nothing is moved, and the sender hears so.
#[test]
fn a_notice_of_a_use_that_is_not_there_moves_nothing() {
    for other in [Fence { generation: 1, ..FENCE }, Fence { request: 5, ..FENCE }] {
        let (mut pair, fence) = granted(0);
        let parts =
            [Forged { fence: other, layer: 0, tokens: [0, 12], origin: 1, some: false, digests: &[0; 3] }];
        pair.receiver.frame(LINK, &notice(1000, &parts), &mut pair.memory).unwrap();
        pair.receiver.frame(LINK, &payload(1001, other), &mut pair.memory).unwrap();
        pair.receiver.frame(LINK, &of_fence(7, other, 1), &mut pair.memory).unwrap();
        pair.receiver.frame(LINK, &of_fence(8, other, 0), &mut pair.memory).unwrap();
        assert_eq!(pair.memory.fetched, []);
        while pair.poll_receiver() {}
        let ends = pair.to_sender.iter().filter(|frame| **frame == of_fence(6, other, 1)).count();
        // It is said once until it is taken.
        assert_eq!(ends, 1);
        pair.settle();
        (1..LAYERS).for_each(|layer| pair.compute(FENCE.request, layer, TOKENS).unwrap());
        pair.sender.finish(FENCE.request).unwrap();
        pair.settle();
        pair.check_rows(fence, 0..TOKENS);
        pair.check_nothing_left(&[fence]);
    }
}

#[test]
fn a_grant_that_does_not_fit_is_refused_and_harms_no_other() {
    let own = Fence { request: 4, generation: 77 };
    let wrong = [
        (grant(own, [TOKENS + 1, 0, 0], &[]), 5),
        (grant(own, [TOKENS - 1, 0, 0], &[]), 5),
        (grant(own, [0, 0, 0], &[]), 5),
        (grant(own, [TOKENS, TOKENS + 1, 0], &[]), 5),
        (grant(own, [TOKENS, u32::MAX, 0], &[]), 5),
        (grant(own, [TOKENS, 0, 1], &[]), 5),
    ];
    for (bytes, reason) in wrong {
        // Before and after the request begins.
        for early in [true, false] {
            let mut pair = Pair::usual();
            if early {
                pair.sender.frame(LINK, &bytes).unwrap();
            }
            pair.sender.begin(4, TOKENS, None).unwrap();
            if !early {
                pair.sender.frame(LINK, &bytes).unwrap();
            }
            while pair.poll_sender() {}
            // It says that the grant is refused; if it came before its request, that it is known first.
            let known = early.then(|| of_fence(9, own, 0));
            assert_eq!(pair.to_receiver, Vec::from_iter(known.into_iter().chain([of_fence(7, own, reason)])));
            assert_eq!(pair.at_sender, []);
            let fence = pair.grant(4, TOKENS);
            (0..LAYERS).for_each(|layer| pair.compute(4, layer, TOKENS).unwrap());
            pair.sender.finish(4).unwrap();
            pair.settle();
            pair.check_rows(fence, 0..TOKENS);
            pair.check_nothing_left(&[fence]);
            assert_eq!(pair.ended(4), [Reason::Done]);
        }
    }
    // A second use of pages for the same request on one connection, and one of a request that is over.
    let (mut pair, fence) = granted(0);
    pair.sender.frame(LINK, &grant(own, [TOKENS, 0, 0], &[])).unwrap();
    while pair.poll_sender() {}
    assert!(pair.to_receiver.contains(&of_fence(7, own, 6)));
    (1..LAYERS).for_each(|layer| pair.compute(4, layer, TOKENS).unwrap());
    pair.sender.finish(4).unwrap();
    pair.settle();
    pair.check_rows(fence, 0..TOKENS);
    let later = Fence { generation: 78, ..own };
    pair.sender.frame(LINK, &grant(later, [TOKENS, 0, 0], &[])).unwrap();
    pair.poll_sender();
    pair.poll_sender();
    assert!(pair.to_receiver.contains(&of_fence(7, later, 6)));
    pair.settle();
    pair.check_nothing_left(&[fence]);
}

/// A side of two stages of one layer each.
fn stages() -> Side {
    let mut side = side(1);
    let mut other = side.stages[0].clone();
    other.layers[0].layer = 1;
    side.stages.push(other);
    side
}

#[test]
fn a_rank_that_gets_nothing_of_a_sender_is_not_granted() {
    let mut sender = Sender::new(stages(), RANK, SENDING).unwrap();
    sender.connect(LINK, false).unwrap();
    sender.frame(LINK, &hello([0, 1, 0], 64, &stages().encode().unwrap())).unwrap();
    sender.begin(4, TOKENS, None).unwrap();
    sender.frame(LINK, &grant(FENCE, [TOKENS, 0, 0], &[])).unwrap();
    let (mut frame, mut memory) = (Vec::new(), Memory::default());
    let mut frames = Vec::new();
    while let Some(action) = sender.poll(millis(0), &mut memory, &mut frame).unwrap() {
        if let sender::Action::Event(sender::Event::Met { .. }) = action {
            continue;
        }
        assert_eq!(action, sender::Action::Frame { link: LINK });
        frames.push(frame.clone());
    }
    assert_eq!(frames[1..], [of_fence(7, FENCE, 5)]);
    // And a receiver does not wait for a rank that sends it nothing.
    let mut receiver = Receiver::new(stages(), RANK, RECEIVING).unwrap();
    receiver.connect(LINK, false).unwrap();
    receiver.frame(LINK, &hello([0, 1, 0], 64, &stages().encode().unwrap()), &mut memory).unwrap();
    let error = receiver.grant(&wanted()).unwrap_err();
    let place = "a rank of the sender that is not connected";
    assert_eq!((error.kind(), error.place()), (Kind::InvalidState, place));
    receiver.connect(LINK + 1, false).unwrap();
    receiver.frame(LINK + 1, &hello([0; 3], 64, &stages().encode().unwrap()), &mut memory).unwrap();
    receiver.grant(&wanted()).unwrap();
    let mut grants = Vec::new();
    while let Some(action) = receiver.poll(millis(0), &mut frame) {
        grants.extend((frame[0] == 2).then_some(action));
    }
    assert_eq!(grants, [receiver::Action::Frame { link: LINK + 1 }]);
}

fn wanted() -> receiver::Wanted<'static> {
    receiver::Wanted {
        fence: FENCE,
        tokens: TOKENS,
        first: 0,
        sender: (1, 0),
        payloads: &[],
        landing: &[],
        deadline: None,
    }
}

#[test]
fn an_answer_about_runs_that_were_not_told_fails_the_request() {
    let wrong: [&[u32]; 4] = [&[3], &[0, 3], &[u32::MAX], &[]];
    for runs in wrong {
        let (mut pair, fence) = granted(0);
        pair.poll_sender();
        pair.to_receiver.clear();
        pair.sender.frame(LINK, &answer(0, &[(0, runs)])).unwrap();
        pair.settle();
        assert_eq!(pair.ended(4), [Reason::BadFormat], "{runs:?}");
        assert_eq!(pair.failed(fence)[0].kind(), Kind::BadFormat);
        pair.check_nothing_left(&[fence]);
    }
    // Of a message that was not told, nothing follows.
    let (mut pair, fence) = granted(0);
    pair.poll_sender();
    for number in [1, 2, u64::MAX] {
        pair.sender.frame(LINK, &answer(number, &[(0, &[0]), (9, &[9])])).unwrap();
    }
    assert_eq!(pair.memory.held.len(), 1);
    (1..LAYERS).for_each(|layer| pair.compute(4, layer, TOKENS).unwrap());
    pair.sender.finish(4).unwrap();
    pair.settle();
    pair.check_rows(fence, 0..TOKENS);
    pair.check_nothing_left(&[fence]);
    // Runs in any order and twice are sent once.
    let (mut pair, _) = granted(0);
    pair.poll_sender();
    pair.to_receiver.clear();
    pair.sender.frame(LINK, &answer(0, &[(0, &[2, 0, 2])])).unwrap();
    pair.settle();
    assert_eq!(pair.memory.fetched, [(0, 0), (0, 8)]);
}

#[test]
fn a_sender_that_does_not_wait_for_answers_is_cut_off() {
    let mut pair = Pair::new(false, SENDING, receiver::Options { window: 4, ..RECEIVING });
    let parts = |number, count| {
        let part =
            || Forged { fence: FENCE, layer: 0, tokens: [0, 4], origin: 1, some: false, digests: &[1] };
        notice(number, &(0..count).map(|_| part()).collect::<Vec<_>>())
    };
    pair.memory.hold(4, 0, 0..TOKENS);
    pair.grant(4, TOKENS);
    // The window, and as much again for ends of uses that are not there.
    let mut taken = 0;
    let error = loop {
        match pair.receiver.frame(LINK, &parts(taken, 2), &mut pair.memory) {
            Ok(()) => taken += 2,
            Err(error) => break error,
        }
        assert!(taken <= 8, "it is never cut off");
    };
    assert!(taken >= 4);
    assert_eq!((error.kind(), error.place()), (Kind::Exhausted, "a sender that does not wait for answers"));
    assert_eq!(["link", "most"].map(|name| error.number(name)), [Some(7), Some(4)]);
    // What was taken was answered, so there is room again.
    let mut pair = Pair::new(false, SENDING, receiver::Options { window: 4, ..RECEIVING });
    pair.memory.hold(4, 0, 0..TOKENS);
    for number in 0..20 {
        pair.receiver.frame(LINK, &parts(number, 4), &mut pair.memory).unwrap();
        while pair.poll_receiver() {}
    }
    // Frames of uses that are not there count too.
    let other = |request| of_fence(7, Fence { request, ..FENCE }, 1);
    let flood = (0..100).map(|at| pair.receiver.frame(LINK, &other(at), &mut pair.memory));
    let taken = flood.take_while(Result::is_ok).count();
    assert!((4..=8).contains(&taken), "{taken}");
}

fn place(error: &Error) -> (Kind, &str) {
    (error.kind(), error.place())
}

#[test]
fn a_receiver_refuses_what_it_cannot_want_and_an_error_changes_nothing() {
    let mut pair = Pair::new(true, SENDING, receiver::Options { requests: 2, landing: 5, ..RECEIVING });
    type Change = fn(&mut receiver::Wanted<'_>);
    let numbers = (Kind::OutOfRange, "tokens, payloads or landing pages");
    let simple: [(Change, (Kind, &str)); 8] = [
        (|wanted| wanted.first = TOKENS, numbers),
        (|wanted| wanted.landing = &[1, 2], (Kind::OutOfRange, "landing pages")),
        (|wanted| wanted.tokens = 0, numbers),
        (|wanted| wanted.first = 13, numbers),
        (|wanted| wanted.payloads = &[1, 2, 1], numbers),
        (|wanted| wanted.landing = &[0; LANDING_MAX + 1], numbers),
        (|wanted| wanted.sender.1 = 1, (Kind::InvalidState, "a sender that is not connected")),
        (|wanted| wanted.landing = &[1, 2, 3, 4, 5, 6], (Kind::OutOfRange, "landing pages")),
    ];
    for (change, wrong) in simple {
        let error = pair.grant_with(4, TOKENS, change).unwrap_err();
        assert_eq!(place(&error), wrong, "{error}");
        assert_eq!(pair.receiver.quarantine().reached(), 0);
    }
    pair.settle();
    assert_eq!((pair.at_receiver.len(), pair.answered.len()), (0, 1));
    // Three of five landing pages, and then no three more; the numbers say how many.
    let first = pair.grant(4, TOKENS);
    let error = pair.grant_with(5, TOKENS, |_| {}).unwrap_err();
    assert_eq!(place(&error), (Kind::Exhausted, "pages that writers may reach"));
    assert_eq!(["wanted", "free"].map(|name| error.number(name)), [Some(3), Some(2)]);
    for generation in [0, u64::MAX] {
        let again = pair.grant_with(5, TOKENS, |wanted| wanted.fence.generation = generation).unwrap_err();
        assert_eq!(place(&again), (Kind::InvalidState, "a generation that was used"));
    }
    let second = pair.grant(5, 8);
    let error = pair.grant_with(6, 4, |wanted| wanted.landing = &[]).unwrap_err();
    assert_eq!(place(&error), (Kind::Exhausted, "requests"));
    assert!(!error.advice().is_empty());
    // An end that is not answered counts.
    pair.receiver.abort(first).unwrap();
    assert_eq!(place(&pair.receiver.abort(first).unwrap_err()), (Kind::Closed, "abort"));
    assert!(pair.grant_with(6, 4, |wanted| wanted.landing = &[]).is_err());
    pair.settle();
    let third = pair.grant(6, 4);
    for fence in [second, third] {
        pair.receiver.abort(fence).unwrap();
    }
    pair.settle();
    pair.check_nothing_left(&[first, second, third]);
    assert_eq!(
        place(&pair.receiver.connect(LINK, true).unwrap_err()),
        (Kind::InvalidState, "a connection twice")
    );
}

#[test]
fn a_sender_refuses_calls_that_cannot_be_and_goes_on() {
    let mut pair = Pair::new(false, sender::Options { requests: 2, ..SENDING }, RECEIVING);
    let sender = &mut pair.sender;
    assert_eq!(place(&sender.begin(4, 0, None).unwrap_err()), (Kind::OutOfRange, "tokens"));
    sender.begin(4, TOKENS, None).unwrap();
    assert_eq!(
        place(&sender.begin(4, TOKENS, None).unwrap_err()),
        (Kind::InvalidState, "a request that has begun")
    );
    sender.begin(5, TOKENS, None).unwrap();
    let error = sender.begin(6, TOKENS, None).unwrap_err();
    assert_eq!((place(&error), error.number("request")), ((Kind::Exhausted, "requests"), Some(6)));
    let closed = (Kind::Closed, "a request that is over");
    let good = Computed { request: 4, layer: 0, tokens: 0..TOKENS, chunk: None, origin: 1 };
    let parts = [
        (Computed { request: 6, ..good.clone() }, closed),
        (
            Computed { tokens: 0..TOKENS + 1, ..good.clone() },
            (Kind::OutOfRange, "tokens and chunk of a part"),
        ),
        (Computed { tokens: 3..3, ..good.clone() }, (Kind::OutOfRange, "tokens and chunk of a part")),
        (
            Computed { chunk: Some(Chunk { first: 0, at: 0, slice: TOKENS }), ..good },
            (Kind::OutOfRange, "tokens and chunk of a part"),
        ),
    ];
    for (part, wanted) in parts {
        assert_eq!(place(&sender.computed(&[part]).unwrap_err()), wanted);
    }
    let long = vec![0; PAYLOAD_MAX + 1];
    assert_eq!(place(&sender.payload(4, 1, &long).unwrap_err()), (Kind::OutOfRange, "bytes of a payload"));
    sender.payload(4, 1, b"once").unwrap();
    let twice = (Kind::InvalidState, "a payload twice, or after the end");
    assert_eq!(place(&sender.payload(4, 1, b"once").unwrap_err()), twice);
    for done in [sender.payload(6, 1, &[]), sender.finish(6), sender.abort(6)] {
        assert_eq!(place(&done.unwrap_err()), closed);
    }
    let error = sender.connect(LINK, false).unwrap_err();
    assert_eq!((place(&error), error.number("link")), ((Kind::InvalidState, "a connection twice"), Some(7)));
    sender.abort(5).unwrap();
    (0..LAYERS).for_each(|layer| pair.compute(4, layer, TOKENS).unwrap());
    pair.sender.finish(4).unwrap();
    let part = pair.memory.hold(4, 0, 0..4);
    let error = pair.sender.computed(std::slice::from_ref(&part)).unwrap_err();
    assert_eq!(place(&error), (Kind::InvalidState, "a part of a finished request"));
    pair.memory.held.remove(&part.origin);
    assert_eq!(place(&pair.sender.payload(4, 2, &[]).unwrap_err()), twice);
    let fence = pair.grant_with(4, TOKENS, |wanted| wanted.payloads = &[1]).unwrap();
    pair.settle();
    pair.check_rows(fence, 0..TOKENS);
    assert_eq!((pair.ended(4), pair.ended(5)), (vec![Reason::Done], vec![Reason::Aborted]));
    pair.check_nothing_left(&[fence]);
}

fn event_is_of(event: &sender::Event, request: u64) -> bool {
    matches!(event, sender::Event::Granted { request: of, .. } if *of == request)
}

/// Grants of requests that never begin take room for as many as the option says.
#[test]
fn early_grants_are_bounded() {
    let mut pair = Pair::usual();
    for request in 0..100 {
        let fence = Fence { request, generation: request };
        pair.sender.frame(LINK, &grant(fence, [TOKENS, 0, 0], &[])).unwrap();
        pair.sender.frame(LINK, &grant(fence, [TOKENS, 0, 0], &[])).unwrap();
    }
    let mut granted = Vec::new();
    for request in 0..100 {
        pair.sender.begin(request, TOKENS, None).unwrap();
        while pair.poll_sender() {}
        granted.extend(pair.at_sender.drain(..).find(|event| matches!(event, sender::Event::Granted { .. })));
        // The receiver knows none of them, and says so: those whose grant was refused end when they begin.
        match granted.iter().any(|event| event_is_of(event, request)) {
            true => pair.sender.abort(request).unwrap(),
            false => assert!(pair.sender.has_ended(request)),
        }
        pair.settle();
        pair.at_sender.clear();
    }
    assert_eq!(granted.len(), SENDING.requests as usize);
    pair.check_nothing_left(&[]);
}

#[test]
fn machines_that_cannot_be_are_not_made() {
    let other = Rank { instance: 1, replica: 0, stage: 0, lane: 1 };
    let replica = Rank { replica: 1, ..RANK };
    let both = |side: Side, rank| {
        let sending = Sender::new(side.clone(), rank, SENDING).map(drop);
        let receiving = Receiver::new(side, rank, RECEIVING).map(drop);
        [sending, receiving].map(Result::unwrap_err)
    };
    let error = Receiver::new(side(LAYERS), RANK, receiver::Options { window: 0, ..RECEIVING }).unwrap_err();
    assert_eq!(place(&error), (Kind::InvalidConfig, "window, resend and patience"));
    let never = sender::Options { resend: std::time::Duration::ZERO, ..SENDING };
    let error = Sender::new(side(LAYERS), RANK, never).unwrap_err();
    assert_eq!(place(&error), (Kind::InvalidConfig, "resend and patience"));
    for error in both(side(LAYERS), other) {
        assert_eq!(place(&error), (Kind::OutOfRange, "a rank that is not there"));
    }
    for error in both(side(LAYERS), replica) {
        assert_eq!((place(&error), error.number("given")), ((Kind::OutOfRange, "replica"), Some(1)));
    }
    for error in both(Side { page_tokens: 0, ..side(LAYERS) }, RANK) {
        assert_eq!(place(&error), (Kind::InvalidConfig, "page_tokens"));
    }
    // A receiver of divided tokens is found when the ends meet, by both.
    let divided = Side { split: Split::Tokens, ..side(LAYERS) };
    let mut receiver = Receiver::new(divided.clone(), RANK, RECEIVING).unwrap();
    receiver.connect(LINK, false).unwrap();
    let (mut sender, _) = fresh();
    let bytes = [divided, side(LAYERS)].map(|side| hello([0; 3], 64, &side.encode().unwrap()));
    let errors = [
        sender.frame(LINK, &bytes[0]).unwrap_err(),
        receiver.frame(LINK, &bytes[1], &mut Memory::default()).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(place(&error), (Kind::Unsupported, "a receiver whose ranks divide tokens"));
    }
}
