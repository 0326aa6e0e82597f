//! Replays the fuzz target `ffi_calls` on random bytes. This is a test of its own crate, because a Rust test of the
//! library cannot link what C links.

use proptest::prelude::*;

use super::{budget, cache, config, device, layer, prefix, sequence, status, step};

#[path = "calls.rs"]
mod calls;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) })]

    #[test]
    fn any_bytes_decode_to_a_run_of_calls(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        calls::ffi_calls(&bytes);
    }
}

/// The number of runs, from `PROPTEST_CASES` if set.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200)
}

/// Runs whose first call is refused would find nothing.
#[test]
fn random_bytes_decode_and_share() {
    let mut state = 7_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut reached = [0; 6];
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..600).map(|_| byte()).collect();
        let done = calls::ffi_calls(&bytes);
        let shared = [done.published_pages, done.shared_tokens];
        let counts = [done.steps, done.hits, done.misses, done.resizes, shared[0], shared[1]];
        reached.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}
