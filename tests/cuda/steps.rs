//! Steps have the same result as on the host device, in every order that the driver picks; no step waits or allocates.

use crate::rig::{Cache, K, LAYERS, Rig, entry, selection, usual};
use forebay::device::descriptor::Entry;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Outcome, PoolOp, Stream, Truncate, Warm};
use forebay::{Kind, Lane, Layer};
use forebay_standin::{Options, Standin};

pub const STEPS: u64 = 12;
const OUT_OF_MEMORY: i32 = 2;

fn host() -> Cache {
    Cache::new(HostDevice::new(HostOptions::default())).unwrap()
}

/// Joins both lanes and makes steps. Calls back with the state after each.
pub fn run(cache: &Cache, steps: u64, mut each: impl FnMut(u64, (Vec<u32>, Vec<u32>), Vec<u64>)) {
    for (lane, length) in [(0, 20), (1, 30)] {
        cache.join(lane, length).unwrap();
    }
    for number in 1..=steps {
        let rows = [entry(0, number), entry(1, number)];
        let rows = &rows[..if number % 3 == 0 { 1 } else { 2 }];
        cache.prepare(number, rows, &selection(number, 20)).unwrap();
        cache.enqueue().unwrap();
        let ticket = cache.ticket().unwrap();
        cache.device.synchronize(cache.event).unwrap();
        assert_eq!(ticket.poll(), Some(Outcome::Done));
        each(number, cache.seen(), cache.digests());
    }
}

#[test]
fn steps_have_the_same_result_as_on_the_host_device() {
    let mut wanted = Vec::new();
    run(&host(), STEPS, |_, seen, digests| wanted.push((seen, digests)));
    for seed in [None, Some(1), Some(2), Some(3)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let cache = Cache::new(rig.device.clone()).unwrap();
        run(&cache, STEPS, |number, seen, digests| {
            let (wanted_seen, wanted_digests) = &wanted[number as usize - 1];
            assert_eq!(&seen.1, &wanted_seen.1, "slots of step {number}");
            assert_eq!(&digests, wanted_digests, "digests of step {number}");
            assert_eq!(&seen.0, &wanted_seen.0, "report of step {number}");
            cache.device.validate(cache.pools).unwrap();
        });
    }
}

/// Steps of sequences that lack pages, before and after a truncation that adds them. Calls back with each step's report
/// and digests.
fn without_pages(cache: &Cache) -> Vec<(Vec<u32>, Vec<u64>)> {
    // Lane 0 lacks the pages of selected rows, lane 1 that of its new row.
    cache.join_with(0, 20, 1).unwrap();
    cache.join_with(1, 32, 2).unwrap();
    let mut all = Vec::new();
    for number in 1..=4 {
        if number == 3 {
            for (lane, length) in [(0, 20), (1, 32)] {
                let pages = Cache::pages(lane, 4);
                let cut = Truncate { lane: Lane(lane), settle: 0, length, pages: &pages };
                cache.device.enqueue(cache.pools, cache.stream, PoolOp::Truncate(cut)).unwrap();
            }
        }
        let rows = [0, 1].map(|lane| Entry { lane, accepted: 0, query_rows: 1 });
        // Of the first step, lane 0 selects the last rows, and of all others the same.
        let picked: Vec<i32> = (0..2 * K as i32).map(|index| 4 + index % 16).rev().collect();
        cache.prepare(number, &rows, &picked).unwrap();
        cache.enqueue().unwrap();
        let ticket = cache.ticket().unwrap();
        cache.device.synchronize(cache.event).unwrap();
        assert_eq!(ticket.poll(), Some(Outcome::Done), "the device continues");
        all.push((cache.seen().0, cache.digests()));
    }
    all
}

#[test]
fn a_row_without_a_page_fails_its_step_alone_and_is_fetched_after_a_truncation() {
    let wanted = without_pages(&host());
    let cause = |step: usize| wanted[step].0[2];
    assert_eq!([0, 1, 2, 3].map(cause), [3, 4, 0, 0], "tables, a step before, and sound again");
    let hits = |step: usize| wanted[step].0[8];
    assert!(hits(1) > 0 && hits(2) < hits(3), "rows without bytes are not resident after a truncation");
    for seed in [None, Some(1)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        assert_eq!(without_pages(&Cache::new(rig.device.clone()).unwrap()), wanted);
    }
}

#[test]
fn tables_are_copied_word_for_word() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    run(&cache, 3, |_, _, _| ());
    for layer in 0..LAYERS {
        let tables = rig.device.tables(cache.pools, Layer(layer)).unwrap();
        assert_eq!(tables.heads.iter().map(|head| head.budget).collect::<Vec<_>>(), [12, 12]);
        assert_eq!(tables.shape.lanes as usize * tables.shape.tokens as usize, tables.slot_of.len());
        assert!(tables.slot_of.iter().any(|slot| *slot != 0));
    }
    assert_eq!(rig.device.tables(cache.pools, Layer(LAYERS)).unwrap_err().kind(), Kind::OutOfRange);
}

#[test]
fn a_digest_is_computed_without_a_wait() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    run(&cache, 2, |_, _, _| ());
    let to = rig.device.allocate(16).unwrap();
    let blocking = rig.driver.synchronizations();
    rig.device.digest_into(cache.pools, cache.stream, Lane(1), to.part(8, 8).unwrap()).unwrap();
    assert_eq!(rig.driver.synchronizations(), blocking);
    cache.device.record(cache.event, cache.stream).unwrap();
    cache.device.synchronize(cache.event).unwrap();
    assert_eq!(rig.read(to.part(8, 8).unwrap()), cache.digests()[1].to_le_bytes());
    for (at, bytes) in [(0, 16), (4, 8)] {
        let refused = rig.device.digest_into(cache.pools, cache.stream, Lane(1), to.part(at, bytes).unwrap());
        assert_eq!(refused.unwrap_err().kind(), Kind::OutOfRange);
    }
}

#[test]
fn a_step_neither_waits_nor_allocates() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    cache.join(0, 20).unwrap();
    cache.join(1, 30).unwrap();
    let (blocking, held) = (rig.driver.synchronizations(), rig.driver.held_resources());
    let gate = rig.driver.hold(cache.stream.0).unwrap();
    for number in 1..=STEPS {
        cache.prepare(number, &[entry(0, number), entry(1, number)], &selection(number, 20)).unwrap();
        cache.enqueue().unwrap();
        let ticket = cache.ticket().unwrap();
        assert_eq!((ticket.poll(), cache.device.query(cache.event)), (None, Ok(false)));
    }
    assert_eq!(rig.driver.synchronizations(), blocking, "nothing waited for the device");
    assert_eq!(rig.driver.held_resources(), held, "nothing was taken");
    drop(gate);
    cache.device.synchronize(cache.event).unwrap();
}

fn warm(lane: u32) -> Warm {
    Warm { lane: Lane(lane), group: None, whole: false, selections: None, steps: 0 }
}

#[test]
fn warm_ups_of_different_streams_do_not_run_into_each_other() {
    for seed in 0..20 {
        let options = Options { seed: Some(seed), ..usual() };
        let Some(rig) = Rig::own(options, "counts waits") else { return };
        let cache = Cache::new(rig.device.clone()).unwrap();
        let other = rig.device.stream().unwrap();
        let before = rig.driver.waits();
        cache.device.enqueue(cache.pools, cache.stream, PoolOp::Warm(warm(0))).unwrap();
        cache.device.enqueue(cache.pools, other, PoolOp::Warm(warm(1))).unwrap();
        assert_eq!(rig.driver.waits(), before + 2, "each waits for the one before it");
    }
}

/// A cache whose last warm-up runs on its held stream, and whose event the driver has refused there.
fn warmed_without_an_event(rig: &Rig<Standin>) -> Cache {
    let cache = Cache::new(rig.device.clone()).unwrap();
    rig.driver.hold(cache.stream.0);
    // The record is one of the few calls of a warm-up.
    let refused = (0..10).find(|call| {
        rig.driver.fail_call(*call, OUT_OF_MEMORY);
        let warmed = cache.device.enqueue(cache.pools, cache.stream, PoolOp::Warm(warm(0)));
        let record = rig.driver.failed_call().as_deref() == Some("cuEventRecord");
        assert!(!record || warmed.is_ok(), "{warmed:?}");
        record
    });
    rig.driver.fail_call(u64::MAX, OUT_OF_MEMORY);
    assert!(refused.is_some());
    cache
}

/// Whether all of a stream's work ends.
fn ends(cache: &Cache, stream: Stream) -> bool {
    cache.device.record(cache.event, stream).unwrap();
    (0..1000).any(|_| cache.device.query(cache.event).unwrap())
}

#[test]
fn an_event_that_the_driver_refused_after_a_warm_up_is_recorded_before_the_next_one() {
    let Some(rig) = Rig::own(usual(), "refuses a call") else { return };
    let cache = warmed_without_an_event(&rig);
    let other = rig.device.stream().unwrap();
    let warm_up = || cache.device.enqueue(cache.pools, other, PoolOp::Warm(warm(1)));
    // A record that is refused again is an error of the next warm-up: the sixth call of it, after those that look for
    // captures of both streams.
    rig.driver.fail_call(5, OUT_OF_MEMORY);
    assert_eq!(warm_up().unwrap_err().kind(), Kind::OutOfMemory);
    assert_eq!(rig.driver.failed_call().as_deref(), Some("cuEventRecord"));
    rig.driver.fail_call(u64::MAX, OUT_OF_MEMORY);
    assert!(ends(&cache, other), "nothing of it was enqueued");
    warm_up().unwrap();
    assert!(!ends(&cache, other), "it waits for the held stream's");
    rig.driver.let_go(cache.stream.0);
    assert!(ends(&cache, other));
}

#[test]
fn no_capture_takes_the_record_of_an_event_that_was_refused() {
    let Some(rig) = Rig::own(usual(), "refuses a call") else { return };
    let cache = warmed_without_an_event(&rig);
    let other = rig.device.stream().unwrap();
    let warm_up = || cache.device.enqueue(cache.pools, other, PoolOp::Warm(warm(1)));
    cache.device.capture(cache.stream).unwrap();
    assert_eq!(warm_up().unwrap_err().kind(), Kind::InvalidState);
    cache.enqueue().unwrap();
    let graph = cache.device.captured(cache.stream).unwrap();
    cache.device.release(graph).unwrap();
    warm_up().unwrap();
    rig.driver.let_go(cache.stream.0);
    assert!(ends(&cache, other));
}

#[test]
fn invalid_operations_are_refused_before_the_driver_sees_them() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    let calls = rig.driver.calls();
    assert_eq!(cache.join(2, 20).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(cache.join(0, 65).unwrap_err().kind(), Kind::OutOfRange);
    let range = Cache::range(LAYERS);
    assert_eq!(
        cache
            .device
            .enqueue(cache.pools, cache.stream, PoolOp::Gather { range, wave: 0 })
            .unwrap_err()
            .kind(),
        Kind::OutOfRange
    );
    let range = Cache::range(0);
    assert_eq!(
        cache
            .device
            .enqueue(cache.pools, cache.stream, PoolOp::Gather { range, wave: 1 })
            .unwrap_err()
            .kind(),
        Kind::OutOfRange
    );
    assert_eq!(rig.driver.calls(), calls);
}

#[test]
fn a_warm_up_is_refused_in_a_capture_and_breaks_none() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    cache.join(0, 20).unwrap();
    // Neither the first event of all, which was never recorded, nor a later one.
    for _ in 0..2 {
        cache.device.capture(cache.stream).unwrap();
        let refused = cache.device.enqueue(cache.pools, cache.stream, PoolOp::Warm(warm(0))).unwrap_err();
        assert_eq!((refused.kind(), refused.operation()), (Kind::InvalidState, "warm"));
        cache.enqueue().unwrap();
        let graph = cache.device.captured(cache.stream).unwrap();
        cache.device.release(graph).unwrap();
        cache.device.enqueue(cache.pools, cache.stream, PoolOp::Warm(warm(0))).unwrap();
    }
}
