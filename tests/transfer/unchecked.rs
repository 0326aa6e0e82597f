//! Runs without digests: only where both ends have them off, and then nothing finds wrong rows.

use forebay::Kind;
use forebay::transfer::{Digests, Fence, Frame, Reason, receiver, sender};

use crate::pair::{LAYERS, PAGE, Pair, RECEIVING, ROW, SENDING, row};

/// A pair whose sender tells digests or not, and whose receiver wants them or not.
fn pair(far: bool, tells: bool, wants: bool) -> Pair {
    Pair::new(
        far,
        sender::Options { digests: tells, ..SENDING },
        receiver::Options { digests: wants, ..RECEIVING },
    )
}

/// The runs of all parts that were told: whether they have digests, and the indices of parts told again.
fn told(pair: &Pair) -> Vec<(bool, Option<Vec<u32>>)> {
    let mut told = Vec::new();
    for (_, frame) in &pair.sent {
        if let Frame::Notice(notice) = Frame::decode(frame).unwrap() {
            told.extend(notice.parts().map(|part| {
                let some = match part.digests {
                    Digests::All(_) | Digests::Without(_) => None,
                    Digests::Some(_) | Digests::SomeWithout(_) => {
                        Some(part.digests.iter().map(|(index, _)| index).collect())
                    }
                };
                (part.digests.are_there(), some)
            }));
        }
    }
    told
}

#[test]
fn rows_without_digests_are_refused_by_a_receiver_that_wants_them_and_only_by_it() {
    for far in [false, true] {
        for (tells, wants) in [(false, true), (false, false), (true, true), (true, false)] {
            let mut pair = pair(far, tells, wants);
            let fence = pair.grant(6, 11);
            pair.send(6, 11);
            pair.settle();
            let what = format!("far {far}, tells {tells}, wants {wants}");
            pair.check_nothing_left(&[fence]);
            let runs = if tells { 3 * LAYERS as usize } else { 0 };
            assert_eq!(pair.memory.read, runs, "the sender reads rows for their digests alone, {what}");
            assert!(told(&pair).iter().all(|(digests, some)| (*digests, some) == (tells, &None)), "{what}");
            if tells || !wants {
                assert!(pair.is_whole(fence), "{what}");
                pair.check_rows(fence, 0..11);
                assert_eq!(pair.ended(6), [Reason::Done], "{what}");
                continue;
            }
            let failed = pair.failed(fence);
            let [error] = failed.as_slice() else { panic!("{what}: {failed:?}") };
            assert_eq!(
                (error.kind(), error.place()),
                (Kind::BadFormat, "runs without digests, which this end wants")
            );
            assert!(error.to_string().contains("set the options' digests of both ends alike"), "{error}");
            assert_eq!((error.number("layer"), error.number("token")), (Some(0), Some(0)));
            assert!(pair.memory.fetched.is_empty() && pair.memory.stored.is_empty(), "{what}");
            assert_eq!(pair.ended(6), [Reason::BadFormat], "{what}");
        }
    }
}

/// Stores the rows of a request of which one run is fetched wrong, once.
fn with_wrong_rows(far: bool, tells: bool) -> (Pair, Fence) {
    let mut pair = pair(far, tells, false);
    pair.memory.wrong.insert((1, PAGE), 1);
    let fence = pair.grant(6, 11);
    pair.send(6, 11);
    pair.settle();
    assert!(pair.is_whole(fence));
    pair.check_nothing_left(&[fence]);
    (pair, fence)
}

/// What digests are for.
#[test]
fn control_wrong_rows_without_digests_are_stored() {
    for far in [false, true] {
        let (pair, fence) = with_wrong_rows(far, false);
        let stored = pair.memory.stored.iter();
        let wrong: Vec<_> =
            stored.filter(|((_, layer, token), bytes)| **bytes != row(6, *layer, *token)).collect();
        let mut bytes: [u8; ROW] = row(6, 1, PAGE);
        bytes[0] ^= 1;
        assert_eq!(wrong, [(&(fence, 1, PAGE), &bytes)]);
        assert_eq!(pair.memory.fetched.len(), 3 * LAYERS as usize, "each run is fetched once");
        // A receiver that does not want digests checks those that are told.
        let (pair, fence) = with_wrong_rows(far, true);
        pair.check_rows(fence, 0..11);
        assert_eq!(pair.memory.fetched.len(), 3 * LAYERS as usize + 1);
    }
}

#[test]
fn a_run_without_a_digest_that_cannot_be_fetched_is_asked_for_again_alone() {
    for far in [false, true] {
        let mut some = pair(far, false, false);
        some.memory.refused.insert((1, PAGE), 1);
        let fence = some.grant(6, 11);
        some.send(6, 11);
        some.settle();
        assert!(some.is_whole(fence));
        some.check_rows(fence, 0..11);
        some.check_nothing_left(&[fence]);
        let again: Vec<_> = told(&some).into_iter().filter(|(_, some)| some.is_some()).collect();
        assert_eq!(again, [(false, Some(vec![1]))]);
        // Too often.
        let mut all = pair(far, false, false);
        all.memory.refused.insert((1, PAGE), SENDING.repeats + 1);
        let fence = all.grant(6, 11);
        all.send(6, 11);
        all.settle();
        assert_eq!(all.ended(6), [Reason::Corrupt]);
        assert!(!all.is_whole(fence));
    }
}
