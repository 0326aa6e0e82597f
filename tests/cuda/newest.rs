//! Lists of a lane's newest rows: the same as on the host device, in every order that the driver picks, and no capture
//! takes one.

use crate::rig::{Cache, K, LAYERS, Rig, usual};
use crate::steps;
use forebay::Kind;
use forebay::device::host::{HostDevice, HostOptions};
use forebay_standin::Options;

/// Both lanes' lists after each step.
fn lists(cache: &Cache) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    steps::run(cache, steps::STEPS, |_, _, digests| {
        for lane in 0..2 {
            cache.newest(cache.stream, lane).unwrap();
            cache.device.record(cache.event, cache.stream).unwrap();
            cache.device.synchronize(cache.event).unwrap();
            all.push(cache.seen().1);
        }
        assert_eq!(cache.digests(), digests, "a list changes nothing");
    });
    all
}

#[test]
fn lists_of_newest_rows_are_the_host_devices() {
    let host = Cache::new(HostDevice::new(HostOptions::default())).unwrap();
    let wanted = lists(&host);
    let positions = |list: &Vec<u32>| list.len() == LAYERS as usize * K && !list.contains(&u32::MAX);
    assert!(wanted[2..].iter().all(positions), "{wanted:?}");
    for seed in [None, Some(1), Some(2), Some(3)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let found = lists(&Cache::new(rig.device.clone()).unwrap());
        assert_eq!(found, wanted, "{seed:?}");
    }
}

#[test]
fn a_list_of_newest_rows_is_refused_in_a_capture_and_breaks_none() {
    let Some(rig) = Rig::new(usual()) else { return };
    let cache = Cache::new(rig.device.clone()).unwrap();
    cache.join(0, 20).unwrap();
    cache.device.capture(cache.stream).unwrap();
    let refused = cache.newest(cache.stream, 0).unwrap_err();
    assert_eq!((refused.kind(), refused.operation()), (Kind::InvalidState, "newest"));
    cache.enqueue().unwrap();
    let graph = cache.device.captured(cache.stream).unwrap();
    cache.device.release(graph).unwrap();
    cache.newest(cache.stream, 0).unwrap();
    cache.device.record(cache.event, cache.stream).unwrap();
    cache.device.synchronize(cache.event).unwrap();
    assert_eq!(cache.seen().1, [u32::MAX; LAYERS as usize * K], "nothing is resident yet");
}
