//! The body of the fuzz target `update_bytes`: another rank that says what it likes while a rank shares its parts, and
//! those of an update, and commits.

use std::collections::BTreeSet;

use crate::update_bytes::update_bytes;
use crate::world::alone_in_a_process;

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
        for at in 0..10 {
            for way in 8..24 {
                let bytes = [&[first][..], &vec![0; at], &[way + 24 * random(10) as u8]].concat();
                reached.extend(update_bytes(&bytes));
            }
        }
    }
    let runs = if std::env::var_os("FOREBAY_SOAK").is_some() { 20_000 } else { 200 };
    for _ in 0..runs {
        let bytes: Vec<u8> =
            (0..random(14)).map(|_| if random(4) > 0 { 0 } else { random(256) as u8 }).collect();
        reached.extend(update_bytes(&bytes));
    }
    for what in ["aborted: "] {
        assert!(reached.iter().any(|one| one.starts_with(what)), "{what} is not among {reached:?}");
    }
    eprintln!("{reached:#?}");
}
