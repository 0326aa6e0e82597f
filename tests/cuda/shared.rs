//! Host memory that two devices of a process register: the driver registers it once, both use it, the last releases it.

use std::sync::{Arc, Barrier};

use crate::rig::{Cache, K, entry, on, own, pinned, selection, usual};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Outcome};
use forebay_standin::{Options, Resources, Standin};

const PAGE: u64 = 4096;
/// A call number that no test reaches.
const NEVER: u64 = u64::MAX / 2;

/// Two devices on a driver of the test's own.
fn two() -> Option<(Standin, [Arc<CudaDevice>; 2])> {
    let standin = own(Options { devices: 2, ..usual() }, "has two devices")?;
    let devices = [0, 1].map(|device| on_device(&standin, device, PAGE));
    Some((standin, devices))
}

fn on_device(standin: &Standin, device: u32, registration_chunk: u64) -> Arc<CudaDevice> {
    CudaDevice::new(CudaOptions { device, registration_chunk, ..on(standin.library()) }).unwrap()
}

/// The numbers of registrations and of their releases.
fn registered(standin: &Standin) -> (u64, u64) {
    (standin.calls_of(c"cuMemHostRegister_v2"), standin.calls_of(c"cuMemHostUnregister"))
}

/// Makes step `number`, and checks that each selected row is in its slot.
fn step(device: &CudaDevice, cache: &Cache, number: u64) {
    let picked = selection(number, 20);
    cache.prepare(number, &[entry(0, number), entry(1, number)], &picked).unwrap();
    cache.enqueue().unwrap();
    let ticket = cache.ticket().unwrap();
    device.synchronize(cache.event).unwrap();
    assert_eq!(ticket.poll(), Some(Outcome::Done));
    let slots = cache.seen().1;
    for (index, (slot, position)) in slots.iter().zip(&picked).enumerate() {
        let mut row = [0; 64];
        device.read(cache.slot(*slot), &mut row).unwrap();
        let lane = (index / K) as u32;
        assert_eq!(row, [Cache::byte(lane, *position); 64], "step {number}, lane {lane}, {position}");
    }
}

#[test]
fn rows_are_registered_once_for_two_devices_and_unregistered_by_the_last_one() {
    for first in [0, 1] {
        let Some((standin, devices)) = two() else { return };
        let rows = Cache::rows().unwrap();
        let chunks = rows.len() / PAGE;
        let mut both: Vec<_> =
            devices.into_iter().map(|device| (Cache::over(device.clone(), &rows).unwrap(), device)).collect();
        // Each has words of its own in addition.
        assert_eq!(registered(&standin), (chunks + 2, 0));
        assert_eq!(standin.held_resources().registrations, chunks + 2);
        for (cache, device) in &both {
            cache.join(0, 20).unwrap();
            cache.join(1, 30).unwrap();
            step(device, cache, 1);
        }
        drop(both.remove(first));
        assert_eq!(registered(&standin), (chunks + 2, 1), "its own words alone");
        // The rows may have been registered in the context that was destroyed.
        assert!(standin.read(rows.as_ptr() as u64, &mut [0]), "the driver still knows the rows");
        for (cache, device) in both.drain(..) {
            step(&device, &cache, 2);
        }
        assert_eq!(registered(&standin), (chunks + 2, chunks + 2));
        assert_eq!(standin.held_resources(), Resources::default());
        // And it may be registered again.
        on_device(&standin, 0, PAGE).register(&rows).unwrap();
        assert_eq!(registered(&standin), (2 * chunks + 2, 2 * chunks + 2));
    }
}

#[test]
fn devices_that_register_at_the_same_time_register_once() {
    const DEVICES: u32 = 4;
    let Some(standin) = own(Options { devices: DEVICES, ..usual() }, "has four devices") else { return };
    for round in 1..20 {
        let devices: Vec<_> = (0..DEVICES).map(|device| on_device(&standin, device, PAGE)).collect();
        let (map, together) = (pinned(3 * PAGE), Barrier::new(DEVICES as usize));
        std::thread::scope(|scope| {
            for device in devices {
                let (map, together) = (&map, &together);
                scope.spawn(move || {
                    together.wait();
                    let slice = device.register(map).unwrap();
                    assert_eq!((slice.address(), slice.bytes()), (map.as_ptr() as u64, map.len()));
                    together.wait();
                    drop(device);
                });
            }
        });
        assert_eq!(registered(&standin), (3 * round, 3 * round));
        assert_eq!(standin.held_resources(), Resources::default());
    }
}

#[test]
fn a_second_device_that_is_refused_takes_nothing_from_the_first() {
    let Some((standin, [first, second])) = two() else { return };
    let map = pinned(3 * PAGE);
    let slice = first.register(&map).unwrap();
    let before = standin.held_resources();
    let mut refused = 0;
    for n in 0.. {
        standin.fail_call(n, 1);
        let made = second.register(&map);
        standin.fail_call(NEVER, 1);
        assert_eq!(standin.held_resources(), before, "call {n}");
        first.write(slice, &[n as u8; 3 * PAGE as usize]).unwrap();
        if let Ok(own) = made {
            drop(first);
            second.write(own, &[7; 3 * PAGE as usize]).unwrap();
            break;
        }
        refused += 1;
    }
    assert!(refused >= 3, "as many as there are chunks, at least: {refused}");
    drop(second);
    assert_eq!(registered(&standin), (3, 3));
    assert_eq!(standin.held_resources(), Resources::default());
}

#[test]
fn a_first_device_that_is_refused_half_way_leaves_it_to_the_second() {
    let Some((standin, [first, second])) = two() else { return };
    let mut failed = 0;
    for n in 0.. {
        let (map, before) = (pinned(3 * PAGE), standin.held_resources());
        standin.fail_call(n, 1);
        let made = first.register(&map);
        failed += u32::from(standin.failed_call().as_deref() == Some("cuMemHostRegister_v2"));
        standin.fail_call(NEVER, 1);
        if made.is_ok() {
            break;
        }
        assert_eq!(standin.held_resources(), before, "call {n}");
        second.register(&map).unwrap();
        first.register(&map).unwrap();
        assert_eq!(standin.held_resources().registrations, before.registrations + 3);
    }
    assert_eq!(failed, 3);
    drop((first, second));
    assert_eq!(standin.held_resources(), Resources::default());
}

#[test]
fn devices_of_other_chunks_use_those_of_the_first() {
    let Some((standin, [first, _])) = two() else { return };
    let (second, map) = (on_device(&standin, 1, 4 * PAGE), pinned(4 * PAGE));
    let bytes: Vec<u8> = (0..4 * PAGE).map(|at| (at % 251) as u8).collect();
    for (device, number) in [(&first, 0_u8), (&second, 1)] {
        let slice = device.register(&map).unwrap();
        // The driver refuses a copy across the end of a chunk: it must be divided.
        let bytes: Vec<u8> = bytes.iter().map(|byte| byte ^ number).collect();
        device.write(slice, &bytes).unwrap();
        let mut seen = vec![0; bytes.len()];
        map.copy_out(0, &mut seen).unwrap();
        assert_eq!(seen, bytes);
    }
    assert_eq!(registered(&standin), (4, 0));
}
