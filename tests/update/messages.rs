//! The body of the fuzz target `update_bytes`: another rank that says what it likes while a rank shares its parts, and
//! those of an update, and commits.

use std::collections::BTreeSet;

use crate::children::alone_in_a_process;
use crate::update_bytes::update_bytes;

#[test]
fn whatever_another_rank_says_of_an_update_no_weight_is_wrong() {
    const NAME: &str = "messages::whatever_another_rank_says_of_an_update_no_weight_is_wrong";
    if !alone_in_a_process(NAME) {
        return;
    }
    // The controls: an honest rank, as rank 1 and as rank 0.
    for first in [0, 1] {
        assert_eq!(update_bytes(&[first]), ["share: done", "update: done", "commit: done"]);
    }
    let mut seed = 5_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let mut reached = BTreeSet::new();
    // Each way to differ at each place.
    for first in [0, 1] {
        for at in 0..12 {
            for way in 8..24 {
                let kinds = if way == 8 { 0..8 } else { at % 10..at % 10 + 1 };
                for much in kinds {
                    reached.extend(update_bytes(
                        &[&[first][..], &vec![0; at.into()], &[way + 24 * much]].concat(),
                    ));
                }
            }
        }
    }
    // Each way to differ behind the ten messages, again and again.
    for first in [0, 1] {
        for way in 8..16 {
            reached.extend(update_bytes(&[&[first][..], &[0; 10], &[way; 8]].concat()));
        }
    }
    let runs = if std::env::var_os("FOREBAY_SOAK").is_some() { 20_000 } else { 200 };
    for _ in 0..runs {
        let bytes: Vec<u8> =
            (0..random(16)).map(|_| if random(4) > 0 { 0 } else { random(256) as u8 }).collect();
        reached.extend(update_bytes(&bytes));
    }
    for what in [
        "share: layer 0: a rank with other weights than this one",
        "share: layer 3: the part of another layer",
        "share: a descriptor that is not shared memory",
        "share: a rank that gave other parts than its hello announced",
        "share: lies",
        "update: layer 0: a rank with other weights than this one",
        "update: a message that begins nothing",
        "update: a rank that has begun something else",
        "update: layer 3: a part of another size",
        "update: shared memory of another size",
        "update: the connection was closed",
        "update: lies",
        "commit: a decision that no rank writes",
        "aborted: a rank at another border",
        "aborted: another rank has aborted",
        "aborted: the connection was closed",
        "commit: done",
    ] {
        assert!(reached.iter().any(|one| one.starts_with(what)), "{what} is not among {reached:#?}");
    }
}
