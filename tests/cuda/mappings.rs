//! Physical memory and the ranges over it, as on every device (`tests/support/mappings.rs`), and what a driver refuses.

use forebay::device::cuda::CudaDevice;
use forebay::device::{Device, Mapped, Slice};
use forebay::os::Protection;
use forebay::{Kind, Result};
use forebay_standin::{Options, Resources, Standin};

use crate::faulty::Faulty;
use crate::mappings::{self, Sut};
use crate::rig::{Rig, on, own, usual};

fn read(device: &CudaDevice) -> impl Fn(Slice) -> Vec<u8> {
    |slice| {
        let mut bytes = vec![0; slice.bytes() as usize];
        device.read(slice, &mut bytes).unwrap();
        bytes
    }
}

/// Runs a test on a device, streams in order and reordered by a seed.
fn on_device(test: impl Fn(&Sut<'_>)) {
    for seed in [None, Some(1)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let device = &*rig.device;
        test(&Sut { device, read: &read(device), write: &|slice, bytes| device.write(slice, bytes) });
    }
}

#[test]
fn a_range_keeps_its_addresses_when_it_maps_other_memory() {
    on_device(mappings::a_range_keeps_its_addresses_when_it_maps_other_memory);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    on_device(mappings::what_does_not_fit_is_refused_and_changes_nothing);
}

#[test]
fn memory_is_given_back_when_no_range_maps_it() {
    on_device(mappings::memory_is_given_back_when_no_range_maps_it);
}

#[test]
fn a_reader_imports_memory_that_stays() {
    let Some(rig) = Rig::new(usual()) else { return };
    let (device, other) = (&*rig.device, CudaDevice::new(on(rig.driver.library())).unwrap());
    let sut = Sut { device, read: &read(device), write: &|slice, bytes| device.write(slice, bytes) };
    let write = |slice, bytes: &[u8]| other.write(slice, bytes);
    mappings::a_reader_imports_memory_that_stays(
        &sut,
        &Sut { device: &*other, read: &read(&other), write: &write },
    );
}

#[test]
fn a_driver_is_asked_once_whether_it_maps_at_offsets() {
    for (driver_version, maps) in [(12_080, false), (13_000, true)] {
        let Some(rig) = Rig::own(Options { driver_version, ..usual() }, "has another version") else {
            return;
        };
        let before = rig.driver.held_resources();
        assert_eq!(rig.device.maps_offsets(), Ok(maps));
        assert_eq!(rig.driver.held_resources(), before);
        let calls = rig.driver.calls();
        assert_eq!((rig.device.maps_offsets(), rig.driver.calls()), (Ok(maps), calls));
        let grain = rig.device.granularity();
        let backing = rig.device.backing(2 * grain).unwrap();
        let piece = Mapped { backing, offset: grain, bytes: grain };
        assert_eq!(rig.device.range(&[piece], Protection::Read).is_ok(), maps);
    }
}

#[test]
fn memory_that_is_given_back_is_the_drivers_again() {
    let Some(rig) = Rig::own(usual(), "counts what is held") else { return };
    let (device, grain) = (&rig.device, rig.device.granularity());
    let before = rig.driver.held_resources();
    let backing = device.backing(grain).unwrap();
    assert_ne!(rig.driver.held_resources(), before);
    device.give_back(backing).unwrap();
    assert_eq!(rig.driver.held_resources(), before);
}

/// Runs the scenario with its `n`-th call refused: its result, the refused call, and what its window shows if there is
/// one. The device, which lives, holds what was made, and nothing else.
fn attempt(standin: &Standin, n: u64) -> (Result<()>, Option<String>, Option<Vec<u8>>) {
    let device = CudaDevice::new(on(standin.library())).unwrap();
    let counted = Faulty::new(device.clone(), false);
    let write = |slice, bytes: &[u8]| device.write(slice, bytes);
    let sut = Sut { device: &*counted, read: &read(&device), write: &write };
    let mut window = None;
    let before = standin.held_resources();
    standin.fail_call(n, 1);
    let result = scenario(&sut, &mut window);
    let failed = standin.failed_call();
    standin.fail_call(u64::MAX / 2, 1);
    assert_holds(standin, before, &counted, &format!("call {n}, {failed:?}"));
    (result, failed, window.map(|window| sut.shows(window)))
}

/// Checks that a driver holds what a device's callers made since `before`: handles, addresses and mapped pieces.
pub fn assert_holds(standin: &Standin, before: Resources, counted: &Faulty, case: &str) {
    let now = standin.held_resources();
    let (ranges, pieces) = counted.ranges();
    let made = (counted.backings() as u64, ranges as u64, pieces as u64);
    let held = (
        now.handles - before.handles,
        now.reservations - before.reservations,
        now.mappings - before.mappings,
    );
    assert_eq!(held, made, "{case}");
}

/// Two backings behind a window, another in their place, and an import.
fn scenario(sut: &Sut<'_>, made: &mut Option<Slice>) -> Result<()> {
    let (device, grain) = (sut.device, sut.device.granularity());
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let (a, _) = sut.filled(1, 1)?;
    let (b, _) = sut.filled(1, 2)?;
    let window = *made.insert(device.range(&[piece(a), piece(b)], Protection::Read)?);
    let (resident, _) = sut.filled(1, 5)?;
    device.remap(window, &[piece(resident), piece(a)])?;
    let seen = device.import_backing(device.export(b, Protection::Read)?, grain, Protection::Read)?;
    device.remap(window, &[piece(seen), piece(resident)])?;
    device.give_back(device.backing(grain)?)
}

/// Every refusal of create, reserve, map, access, unmap, export and import, in turn.
#[test]
fn every_refused_call_leaves_ranges_whole_and_no_handle_held() {
    for granule in [64 << 10, 2 << 20] {
        let Some(standin) = own(Options { granule, ..usual() }, "fails a call") else { return };
        every_refused_call(&standin);
    }
}

fn every_refused_call(standin: &Standin) {
    let (mut refused, mut seen) = (std::collections::BTreeSet::new(), std::collections::BTreeSet::new());
    for n in 0..1000 {
        // A thread of its own: where the call that leaves a context is refused, the thread stays in it.
        let (result, failed, shows) =
            std::thread::scope(|scope| scope.spawn(|| attempt(standin, n)).join().unwrap());
        assert_eq!(standin.held_resources(), Resources::default(), "call {n}, {failed:?}");
        if let Some(shows) = shows {
            assert!([[1, 2], [5, 1], [2, 5]].contains(&[shows[0], shows[1]]), "call {n}: {shows:?}");
            seen.insert(shows);
        }
        match failed {
            Some(call) => drop(refused.insert(call)),
            None => {
                assert!(result.is_ok(), "{result:?}");
                break;
            }
        }
    }
    for call in [
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemRelease",
    ] {
        assert!(refused.contains(call), "{call} was never refused: {refused:?}");
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
}

/// Memory of a GPU that this one cannot reach is refused when it is mapped, and nothing of it is held.
#[test]
fn memory_that_the_device_cannot_reach_is_refused() {
    let Some(rig) = Rig::own(Options { peer_access: false, ..usual() }, "cannot reach a peer") else {
        return;
    };
    let (device, grain) = (&rig.device, rig.device.granularity());
    let theirs = device.export(device.backing(grain).unwrap(), Protection::Read).unwrap();
    let before = rig.driver.held_resources();
    let seen = device.import_backing(theirs, grain, Protection::Read).unwrap();
    let piece = Mapped { backing: seen, offset: 0, bytes: grain };
    let error = device.range(&[piece], Protection::Read).unwrap_err();
    assert_eq!((error.kind(), error.number("code")), (Kind::Unsupported, Some(217)), "{error}");
    device.give_back(seen).unwrap();
    assert_eq!(rig.driver.held_resources(), before);
}

/// The same with each call refused in turn, also those that take back what was mapped: the driver holds what the
/// callers hold.
#[test]
fn memory_that_cannot_be_reached_leaves_nothing_held_whichever_call_is_refused() {
    let Some(standin) = own(Options { peer_access: false, ..usual() }, "cannot reach a peer") else { return };
    let counted = Faulty::new(CudaDevice::new(on(standin.library())).unwrap(), false);
    let grain = counted.granularity();
    let (before, mut unreachable) = (standin.held_resources(), 0);
    for n in 0..1000 {
        let reach = || {
            let own = counted.backing(grain)?;
            let own = counted.export(own, Protection::Read)?;
            let seen = counted.import_backing(own, grain, Protection::Read)?;
            counted.range(&[Mapped { backing: seen, offset: 0, bytes: grain }], Protection::Read).map(drop)
        };
        standin.fail_call(n, 1);
        // A thread of its own, as above.
        let error = std::thread::scope(|scope| scope.spawn(reach).join().unwrap()).unwrap_err();
        let failed = standin.failed_call();
        standin.fail_call(u64::MAX / 2, 1);
        unreachable += u32::from(error.number("code") == Some(217));
        assert_holds(&standin, before, &counted, &format!("call {n}, {failed:?}: {error}"));
        if failed.is_none() {
            assert_eq!((error.kind(), error.number("code")), (Kind::Unsupported, Some(217)), "{error}");
            break;
        }
    }
    // Each call that undoes something is refused too, and changes nothing about the error.
    assert!(unreachable > 2, "{unreachable}");
}

/// Where the context is lost during a remap, nothing can be restored.
#[test]
fn a_lost_context_fails_the_device() {
    let Some(rig) = Rig::own(usual(), "loses its context") else { return };
    let (device, grain) = (&*rig.device, rig.device.granularity());
    let sut = Sut { device, read: &read(device), write: &|slice, bytes| device.write(slice, bytes) };
    let [(a, _), (b, _)] = [1, 2].map(|value| sut.filled(1, value).unwrap());
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let window = device.range(&[piece(a), piece(b)], Protection::Read).unwrap();
    let event = device.event().unwrap();
    rig.driver.fail_call(2, 700);
    let error = device.remap(window, &[piece(b), piece(a)]).unwrap_err();
    assert_eq!(error.kind(), Kind::DeviceFailed);
    assert_eq!(device.query(event).unwrap_err().kind(), Kind::DeviceFailed);
}
