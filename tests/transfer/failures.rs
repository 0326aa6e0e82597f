//! Failures of the field, as tests of the transfer's own; `docs/testing.md` lists them.

use std::time::Duration;

use forebay::transfer::{Fence, Frame, receiver};

use crate::pair::{LAYERS, Pair, RECEIVING, SENDING};

const TOKENS: u32 = 11;
const LATER: Duration = Duration::from_secs(20);

/// A request whose rows are on their way; then one end gives it up, and of the frames after that one is lost. Returns
/// whether there was such a frame, and whether anything is left before it is told again.
fn lost_after_an_abort(far: bool, by_sender: bool, lost: usize) -> (bool, bool) {
    let mut pair = Pair::new(far, SENDING, RECEIVING);
    let fence = pair.grant(4, TOKENS);
    pair.settle();
    pair.sender.begin(4, TOKENS, None).unwrap();
    pair.compute(4, 0, TOKENS).unwrap();
    pair.compute(4, 1, TOKENS).unwrap();
    while pair.poll_sender() {}
    match by_sender {
        true => pair.sender.abort(4).unwrap(),
        false => pair.receiver.abort(fence).unwrap(),
    }
    let mut count = 0;
    loop {
        while pair.poll_sender() || pair.poll_receiver() {}
        let (to_receiver, to_sender) = (!pair.to_receiver.is_empty(), !pair.to_sender.is_empty());
        count += usize::from(to_receiver || to_sender);
        if to_receiver || to_sender {
            match (count == lost + 1, to_receiver) {
                (true, true) => drop(pair.to_receiver.pop_front()),
                (true, false) => drop(pair.to_sender.pop_front()),
                (false, true) => assert!(pair.deliver_to_receiver()),
                (false, false) => assert!(pair.deliver_to_sender()),
            }
        } else if !pair.land() {
            break;
        }
    }
    let drained = pair.at_receiver.contains(&receiver::Event::Drained { fence });
    let left = !drained || !pair.memory.held.is_empty() || pair.receiver.quarantine().reached() > 0;
    pair.pass(LATER);
    pair.check_nothing_left(&[fence]);
    assert!(!pair.is_whole(fence));
    (count > lost, left)
}

/// F9: a completion that is lost after an abort costs time, and no page.
#[test]
fn f9_a_frame_that_is_lost_after_an_abort_is_told_again_and_nothing_leaks() {
    for (far, by_sender) in [(false, false), (false, true), (true, false), (true, true)] {
        let all: Vec<_> =
            (0..).map(|lost| lost_after_an_abort(far, by_sender, lost)).take_while(|of| of.0).collect();
        assert!(all.len() >= 2, "{all:?}");
        // Before it is told again something is left: the test would see it.
        assert!(all.iter().any(|(_, left)| *left), "{far} {by_sender}");
    }
}

/// Delivers the sender's frames in an order, and settles.
fn ends_in_order(order: &[usize], by_sender: Option<usize>) {
    let mut pair = Pair::usual();
    let fence = pair.grant(4, TOKENS);
    pair.settle();
    pair.sender.begin(4, TOKENS, None).unwrap();
    for layer in 0..LAYERS {
        pair.compute(4, layer, TOKENS).unwrap();
        while pair.poll_sender() {}
    }
    if by_sender.is_some() {
        pair.sender.abort(4).unwrap();
        while pair.poll_sender() {}
    } else {
        pair.sender.finish(4).unwrap();
    }
    let frames: Vec<_> = std::mem::take(&mut pair.to_receiver).into();
    assert_eq!(frames.len(), order.len(), "a notice for each layer, and an end");
    for frame in order {
        pair.to_receiver.push_back(frames[*frame].clone());
        assert!(pair.deliver_to_receiver());
        while pair.poll_receiver() {}
    }
    let end = by_sender.and_then(|end| order.iter().position(|frame| *frame == end));
    let before = end.map_or(order.len(), |end| end);
    assert_eq!(pair.is_whole(fence), before == LAYERS as usize, "{order:?}");
    let ends = |event: &&receiver::Event| {
        matches!(event, receiver::Event::Whole { .. } | receiver::Event::Failed { .. })
    };
    assert_eq!(pair.at_receiver.iter().filter(ends).count(), 1, "{order:?}: {:?}", pair.at_receiver);
    // What came before the end is stored whole, and nothing after it.
    let layers: Vec<u32> = order[..before].iter().map(|layer| *layer as u32).collect();
    let stored = |(of, layer, _): &(Fence, u32, u32)| *of == fence && layers.contains(layer);
    assert_eq!(pair.memory.stored.keys().filter(|key| stored(key)).count(), layers.len() * TOKENS as usize);
    assert_eq!(pair.memory.stored.len(), layers.len() * TOKENS as usize, "{order:?}");
    pair.pass(LATER);
    pair.check_nothing_left(&[fence]);
}

/// F17: a request may end before, between and after its last stores.
#[test]
fn f17_the_end_of_a_request_and_its_last_rows_may_come_in_any_order() {
    let mut orders = vec![Vec::new()];
    for frame in 0..=LAYERS as usize {
        let insert = |order: &Vec<usize>| {
            (0..=order.len())
                .map(move |at| [&order[..at], &[frame], &order[at..]].concat())
                .collect::<Vec<_>>()
        };
        orders = orders.iter().flat_map(insert).collect();
    }
    assert_eq!(orders.len(), 24);
    for order in &orders {
        ends_in_order(order, Some(LAYERS as usize));
    }
    for order in orders.iter().filter(|order| order.last() == Some(&(LAYERS as usize))) {
        ends_in_order(&order[..LAYERS as usize], None);
    }
}

/// F17: the receiver's end crosses the last rows on their way. They move nothing, and are not held for ever.
#[test]
fn f17_rows_that_cross_the_receivers_end_move_nothing_and_are_released() {
    for before in 0..LAYERS {
        let mut pair = Pair::usual();
        let fence = pair.grant(4, TOKENS);
        pair.settle();
        pair.sender.begin(4, TOKENS, None).unwrap();
        for layer in 0..LAYERS {
            pair.compute(4, layer, TOKENS).unwrap();
            while pair.poll_sender() {}
        }
        pair.sender.finish(4).unwrap();
        (0..before).for_each(|_| assert!(pair.deliver_to_receiver()));
        let told =
            pair.to_receiver.iter().filter(|of| matches!(Frame::decode(of), Ok(Frame::Notice(_)))).count();
        assert_eq!(told, (LAYERS - before) as usize);
        pair.receiver.abort(fence).unwrap();
        let stored = pair.memory.stored.len();
        pair.pass(LATER);
        assert_eq!(pair.memory.stored.len(), stored, "rows came after the end");
        assert!(!pair.is_whole(fence) && pair.memory.held.is_empty());
        pair.check_nothing_left(&[fence]);
    }
}
