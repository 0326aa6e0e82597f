//! Replays the fuzz target `ffi_calls` on random bytes. This is a test of its own crate, because a Rust test of the
//! library cannot link what C links.

use proptest::prelude::*;

use super::{
    arrive, budget, cache, config, dense, dense_config, dense_prefix, dense_sequence, dense_step, device,
    layer, prefix, sequence, status, step, ticket,
};

#[path = "calls.rs"]
mod calls;
#[path = "dense_calls.rs"]
mod dense_calls;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) })]

    #[test]
    fn any_bytes_decode_to_a_run_of_calls(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        dense_calls::any_calls(&bytes);
        dense_calls::any_calls(&[&[255], &bytes[..]].concat());
    }
}

/// The number of runs, from `PROPTEST_CASES` if set.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200)
}

/// Bytes by a seed.
fn bytes_of(seed: u64) -> impl FnMut() -> u8 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    }
}

/// Runs whose first call is refused would find nothing.
#[test]
fn random_bytes_decode_and_share() {
    let mut byte = bytes_of(7);
    let mut reached = [0; 9];
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..600).map(|_| byte()).collect();
        let (done, arrived) = calls::ffi_calls(&bytes);
        let shared = [done.published_pages, done.shared_tokens];
        let counts = [done.steps, done.hits, done.misses, done.resizes, shared[0], shared[1]];
        let counts = counts.into_iter().chain(arrived);
        reached.iter_mut().zip(counts).for_each(|(all, count)| *all += count);
    }
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}

#[test]
fn random_bytes_reach_every_call_of_a_dense_cache() {
    let mut byte = bytes_of(8);
    let mut reached = [0; 12];
    for _ in 0..600 {
        let bytes: Vec<u8> = (0..900).map(|_| byte()).collect();
        let done = dense_calls::dense_calls(&bytes);
        let steps = [done.steps, done.arrived, done.failed];
        let parked = [done.parked, done.resumed, done.came_back];
        let sequences = [done.forked, done.truncated, done.extended];
        let shared = [done.saved, done.found, done.found_on_host];
        let all = [steps, parked, sequences, shared];
        reached.iter_mut().zip(all.as_flattened()).for_each(|(all, count)| *all += count);
    }
    assert!(reached.iter().all(|count| *count > 0), "{reached:?}");
}
