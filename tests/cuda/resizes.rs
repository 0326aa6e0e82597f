//! Resizes between steps: the same result as on the host device, in every order that the driver picks, and no capture
//! takes one.

use crate::rig::{Cache, LAYERS, Rig, entry, selection, usual};
use crate::steps::STEPS;
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, PoolOp, Resize, Stream, Warm};
use forebay::{Kind, Lane, Layer};
use forebay_standin::Options;

/// Gives a lane these slots in each layer.
fn resize(cache: &Cache, stream: Stream, lane: u32, budgets: &[u32]) -> forebay::Result<()> {
    let blocks = vec![vec![lane]; LAYERS as usize];
    let resize = Resize { lane: Lane(lane), blocks: &blocks, budgets };
    cache.device.enqueue(cache.pools, stream, PoolOp::Resize(resize))
}

/// Budgets of the layers before a step: some as they were, some larger, some with fewer slots than rows.
fn budgets(number: u64, lane: u32) -> [u32; LAYERS as usize] {
    [0, 1].map(|layer| [12, 40, 9, 20, 8, 12, 31][(number as usize * 3 + lane as usize + 2 * layer) % 7])
}

/// A step's report and slots, and the digests after it.
type Came = (Vec<u32>, Vec<u32>, Vec<u64>);

/// Steps with resizes between them, and all rows that these moved.
fn run(cache: &Cache) -> (Vec<Came>, u32) {
    for (lane, length) in [(0, 20), (1, 30)] {
        cache.join(lane, length).unwrap();
    }
    let (mut all, mut moved) = (Vec::new(), 0);
    for number in 1..=STEPS {
        cache.prepare(number, &[entry(0, number), entry(1, number)], &selection(number, 20)).unwrap();
        // The host stages no other list before the last resize of a lane has run: each step is waited for.
        for lane in (0..2).filter(|lane| !(number + u64::from(*lane)).is_multiple_of(4)) {
            resize(cache, cache.stream, lane, &budgets(number, lane)).unwrap();
        }
        cache.enqueue().unwrap();
        cache.device.record(cache.event, cache.stream).unwrap();
        cache.device.synchronize(cache.event).unwrap();
        let (report, slots) = cache.seen();
        moved += report[6];
        all.push((report, slots, cache.digests()));
        cache.device.validate(cache.pools).unwrap();
    }
    (all, moved)
}

#[test]
fn resizes_have_the_same_result_as_on_the_host_device() {
    let (wanted, moved) = run(&Cache::new(HostDevice::new(HostOptions::default())).unwrap());
    assert!(moved > 20, "{moved} rows moved");
    for seed in [None, Some(1), Some(2), Some(3)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let (found, _) = run(&Cache::new(rig.device.clone()).unwrap());
        for (number, (found, wanted)) in found.into_iter().zip(&wanted).enumerate() {
            assert_eq!(&found, wanted, "report, slots and digests of step {}, {seed:?}", number + 1);
        }
    }
}

#[test]
fn a_resize_is_refused_in_a_capture_and_breaks_none() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    cache.join(0, 20).unwrap();
    for budget in [9, 14] {
        cache.device.capture(cache.stream).unwrap();
        let refused = resize(&cache, cache.stream, 0, &[50; LAYERS as usize]).unwrap_err();
        assert_eq!((refused.kind(), refused.operation()), (Kind::InvalidState, "resize"));
        cache.enqueue().unwrap();
        let graph = cache.device.captured(cache.stream).unwrap();
        cache.device.release(graph).unwrap();
        // What the refused call would have staged is not what the next one brings.
        resize(&cache, cache.stream, 0, &[budget; LAYERS as usize]).unwrap();
        cache.device.record(cache.event, cache.stream).unwrap();
        cache.device.synchronize(cache.event).unwrap();
        let tables = rig.device.tables(cache.pools, Layer(1)).unwrap();
        assert_eq!(tables.heads[0].budget, budget);
    }
}

#[test]
fn resizes_warm_ups_and_lists_of_newest_rows_of_different_streams_take_turns() {
    for seed in 0..10 {
        let options = Options { seed: Some(seed), ..usual() };
        let Some(rig) = Rig::own(options, "counts waits") else { return };
        let cache = Cache::new(rig.device.clone()).unwrap();
        let other = rig.device.stream().unwrap();
        let (waits, operations) = (rig.driver.waits(), rig.driver.operations());
        let warm = Warm { lane: Lane(0), group: None, whole: false, selections: None, steps: 0 };
        cache.device.enqueue(cache.pools, cache.stream, PoolOp::Warm(warm)).unwrap();
        resize(&cache, other, 1, &[9; LAYERS as usize]).unwrap();
        resize(&cache, cache.stream, 0, &[9; LAYERS as usize]).unwrap();
        cache.newest(other, 1).unwrap();
        assert_eq!(rig.driver.waits(), waits + 4, "each waits for the one before it");
        for stream in [other, cache.stream] {
            cache.device.record(cache.event, stream).unwrap();
            cache.device.synchronize(cache.event).unwrap();
        }
        assert_eq!(rig.driver.operations(), operations + 4, "one launch each");
    }
}
