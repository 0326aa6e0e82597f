//! A transfer's machines and the cache's arrival, joined: several prefill ranks send the rows of real plans to decode
//! ranks, each of which has a cache of its own.
//!
//! Rows are stored in the host pages that the cache gave (`arrive_shared`, or `extend` for a later turn). Index keys
//! are placed on a stream when their layer is ready. What the last prompt positions selected comes as payloads. Every
//! row and key says which try at a request computed it, for which layer and token.
//!
//! **What must hold.** No step reads a wrong or half row, or a wrong key. What is resident after a warm-up by ages is
//! what the naive rule has after the selections: hits and misses of each layer and step are equal. The digest of a
//! request that joined early is that of one that joins whole, and all ranks have the same. When faults have ended every
//! turn is decoded, and nothing is left in any cache or machine.
//!
//! **Who may write.** If the receiver itself stores rows, or a writer from afar reaches landing pages alone, a sequence
//! is closed at any time. If the engine has registered the cache's own pages, it aborts the sequence, and releases the
//! pages when the receiver says that they are free ([`Event::Free`](forebay::transfer::receiver::Event::Free)). That an
//! end is answered ([`Event::Drained`](forebay::transfer::receiver::Event::Drained)) does not say so. The engine also
//! runs such a request only when its writers are done, and gives it up if a connection breaks before: what was checked
//! may be written again. Pages that the request shares are not listed as pages to write to (`listed`).
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "arriving/decode.rs"]
mod decode;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/device.rs"]
mod device;
#[path = "arriving/engine.rs"]
mod engine;
#[path = "arriving/fabric.rs"]
mod fabric;
#[path = "arriving/listed.rs"]
mod listed;
#[path = "arriving/model.rs"]
mod model;
#[path = "arriving/net.rs"]
mod net;
#[allow(dead_code, reason = "a test takes what it needs")]
#[path = "support/oracle.rs"]
mod oracle;
#[path = "arriving/prefill.rs"]
mod prefill;
#[path = "arriving/serving.rs"]
mod serving;
#[path = "arriving/world.rs"]
mod world;

use net::Faults;
use world::{Met, Way, World, Wrong};

const WAYS: [Way; 3] = [Way::Shared, Way::Landing, Way::Pages];

fn run(seed: u64, what: (Way, Wrong, Faults)) -> Result<Met, String> {
    let mut world = World::new(seed, what);
    let done = world.run();
    done.map(|()| world.met).map_err(|wrong| format!("seed {seed}, {:?}: {wrong}", what.0))
}

fn seeds() -> u64 {
    if std::env::var_os("FOREBAY_SOAK").is_some() { 5_000 } else { device::few(100).into() }
}

#[test]
fn what_arrives_is_what_was_sent_whatever_the_fabric_does() {
    let mut all = Vec::new();
    for seed in 0..seeds() {
        // Of four seeds two run on a clock that reorders, one on threads.
        let way = WAYS[(seed / 4 % 3) as usize];
        all.push(run(seed, (way, Wrong::Nothing, Faults::of(seed))).unwrap());
    }
    let met = Met::sum(&all);
    println!("{met:#?}");
    let counts =
        [met.failed, met.resent, met.cut, met.late_writes, met.withheld, met.no_room, met.joins_refused];
    let arrived =
        [met.whole, met.early, met.warmed_before_whole, met.early_digests, met.shared, met.later_turns];
    let warmed = [met.without_keys, met.shortened, met.by_ages, met.by_selections, met.steps];
    let least = if seeds() < 100 { 0 } else { 5 };
    assert!([&counts[..], &arrived, &warmed].concat().iter().all(|count| *count > least), "{met:?}");
}

/// Without faults no try at a request fails, but for those that wait for room too long, and no machine closes a
/// connection.
#[test]
fn without_faults_nothing_fails() {
    for seed in 0..device::few(36).into() {
        let met = run(seed, (WAYS[(seed / 4 % 3) as usize], Wrong::Nothing, Faults::NONE)).unwrap();
        assert_eq!((met.failed, met.cut), (met.waited, 0), "seed {seed}: {met:?}");
    }
}

/// An engine that does it wrong is found in some of so many seeds, by what says one of `says`. The same faults do no
/// harm otherwise.
fn is_found(wrong: Wrong, (way, faults, tried): (Way, Faults, u64), says: &[&str]) {
    let found: Vec<String> =
        (0..tried).filter_map(|seed| run(seed, (way, wrong, faults)).err()).take(3).collect();
    assert!(!found.is_empty(), "{wrong:?} was never found");
    for told in &found {
        assert!(says.iter().any(|says| told.contains(says)), "{wrong:?}: {told}");
    }
    for seed in 0..20 {
        run(seed, (way, Wrong::Nothing, faults)).unwrap();
    }
}

/// What a step reads, and what is in pages.
const WRONG: [&str; 2] = ["the row of token", "the key of token"];

/// Writers from afar are late, and requests are given up.
const LATE: Faults = Faults { late: 500, abort: 700, ..Faults::NONE };

#[test]
fn control_pages_that_are_closed_while_a_writer_reaches_them_are_written_under_the_next_tenant() {
    is_found(Wrong::Closes, (Way::Pages, LATE, 60), &WRONG);
}

#[test]
fn control_pages_that_are_released_before_their_writers_are_done_are_written_under_the_next_tenant() {
    is_found(Wrong::ReleasesEarly, (Way::Pages, LATE, 60), &WRONG);
}

#[test]
fn control_a_request_that_runs_while_a_writer_reaches_its_pages_finds_other_rows() {
    let faults = Faults { twice: 900, late: 300, fetched: 300, cut_whole: 900, ..Faults::NONE };
    is_found(Wrong::RunsReached, (Way::Pages, faults, 200), &WRONG);
}

#[test]
fn control_keys_that_are_declared_and_not_placed_are_missed() {
    is_found(Wrong::DeclaresKeys, (Way::Shared, Faults::NONE, 60), &WRONG[1..]);
}

#[test]
fn control_a_layer_that_is_declared_before_it_is_ready_has_wrong_rows() {
    is_found(Wrong::DeclaresRows, (Way::Shared, Faults::NONE, 60), &WRONG);
}

#[test]
fn control_ages_of_another_request_make_other_rows_resident() {
    is_found(Wrong::TakesOtherAges, (Way::Shared, Faults::NONE, 60), &["hits and misses"]);
}
