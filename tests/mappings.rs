//! Physical memory and the ranges over it, on the host device, on the clock device over it, and on the watching device;
//! `tests/cuda/mappings.rs` has the same on the stand-in driver. Each refused call of the system leaves ranges whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/faulty.rs"]
mod faulty;
#[path = "support/mappings.rs"]
mod mappings;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use faulty::Faulty;
use forebay::check::watch::Watch;
use forebay::device::clock::{ClockDevice, ClockOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped, Slice};
use forebay::os::{Call, Faults, Inject, Protection};
use forebay::{Kind, Result};
use mappings::Sut;

/// Marks a child process of this test.
const CHILD: &str = "FOREBAY_TEST_CHILD";

fn read(device: &HostDevice) -> impl Fn(Slice) -> Vec<u8> {
    |slice| {
        let mut bytes = vec![0; slice.bytes() as usize];
        device.read(slice, &mut bytes).unwrap();
        bytes
    }
}

/// Runs a test on each device that has the host's memory.
fn on_each(test: impl Fn(&Sut<'_>)) {
    let host = HostDevice::new(HostOptions::default());
    let clock = ClockDevice::over(host.clone(), ClockOptions::default()).unwrap();
    let watch = Watch::new(host.clone());
    let devices: [&dyn Device; 3] = [&*host, &*clock, &*watch];
    for device in devices {
        test(&Sut { device, read: &read(&host), write: &|slice, bytes| host.write(slice, bytes) });
    }
}

#[test]
fn a_range_keeps_its_addresses_when_it_maps_other_memory() {
    on_each(mappings::a_range_keeps_its_addresses_when_it_maps_other_memory);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    on_each(mappings::what_does_not_fit_is_refused_and_changes_nothing);
}

#[test]
fn memory_is_given_back_when_no_range_maps_it() {
    on_each(mappings::memory_is_given_back_when_no_range_maps_it);
}

#[test]
fn a_reader_imports_memory_that_stays() {
    on_each(|sut| {
        let other = HostDevice::new(HostOptions::default());
        let write = |slice, bytes: &[u8]| other.write(slice, bytes);
        mappings::a_reader_imports_memory_that_stays(
            sut,
            &Sut { device: &*other, read: &read(&other), write: &write },
        );
    });
}

/// The limit of device memory counts what is held: a backing that is given back leaves room for another.
#[test]
fn memory_that_is_given_back_is_free_again() {
    let limited = HostDevice::new(HostOptions { memory: Some(3 << 20), ..HostOptions::default() });
    let taken = limited.backing(2 << 20).unwrap();
    assert_eq!(limited.backing(2 << 20).unwrap_err().kind(), Kind::OutOfMemory);
    limited.give_back(taken).unwrap();
    limited.backing(3 << 20).unwrap();
    // Another process's memory is not counted.
    let other = HostDevice::new(HostOptions::default());
    let theirs = other.backing(1 << 20).unwrap();
    let descriptor = other.export(theirs, Protection::Read).unwrap();
    let seen = limited.import_backing(descriptor, 1 << 20, Protection::Read).unwrap();
    limited.give_back(seen).unwrap();
    assert_eq!(limited.allocate(1).unwrap_err().kind(), Kind::OutOfMemory);
}

/// The clock without memory keeps the same rules, so a plan that it accepts is one that a device accepts.
#[test]
fn a_clock_without_memory_keeps_the_rules() {
    let clock = ClockDevice::new(ClockOptions::default()).unwrap();
    let grain = clock.granularity();
    let [a, b] = [(); 2].map(|()| clock.backing(grain).unwrap());
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let range = clock.range(&[piece(a), piece(a)], Protection::Read).unwrap();
    clock.remap(range.part(grain, grain).unwrap(), &[piece(b)]).unwrap();
    assert_eq!(clock.give_back(a).unwrap_err().kind(), Kind::Busy);
    clock.remap(range, &[piece(b), piece(b)]).unwrap();
    clock.give_back(a).unwrap();
    let stream = clock.stream().unwrap();
    let from = clock.allocate(2 * grain).unwrap();
    assert_eq!(clock.copy(stream, from, range).unwrap_err().kind(), Kind::InvalidState);
    assert_eq!(clock.export(b, Protection::Read).unwrap_err().kind(), Kind::Unsupported);
    assert!(clock.maps_offsets().unwrap());
}

/// The watching device finds work that may still use addresses that are mapped anew; work on the same memory at other
/// addresses is none.
#[test]
fn a_remap_under_work_in_flight_is_found() {
    let watch = Watch::new(HostDevice::new(HostOptions::default()));
    let grain = watch.granularity();
    let [slot, other] = [(); 2].map(|()| watch.backing(grain).unwrap());
    let piece = |backing| [Mapped { backing, offset: 0, bytes: grain }];
    let [window, alias] = [(); 2].map(|()| watch.range(&piece(slot), Protection::ReadWrite).unwrap());
    let (stream, event) = (watch.stream().unwrap(), watch.event().unwrap());
    let target = watch.allocate(grain).unwrap();
    watch.copy(stream, alias, target).unwrap();
    watch.remap(window, &piece(other)).unwrap();
    watch.remap(window, &piece(slot)).unwrap();
    watch.copy(stream, window, target).unwrap();
    let error = watch.remap(window, &piece(other)).unwrap_err().to_string();
    assert!(error.contains("what is mapped at addresses") && error.contains("copy"), "{error}");
    watch.record(event, stream).unwrap();
    watch.synchronize(event).unwrap();
    watch.remap(window, &piece(other)).unwrap();
    // From now on the window is the other memory: a write of the slot does not conflict with a read of the window.
    let second = watch.stream().unwrap();
    watch.copy(stream, window, target).unwrap();
    watch.copy(second, target, alias).unwrap_err();
    watch.engine(second, "writes the slot", &[forebay::check::watch::bytes(&alias, true)]).unwrap();
    watch.engine(second, "writes the other", &[forebay::check::watch::bytes(&window, true)]).unwrap_err();
}

/// Makes, exports, imports, remaps and gives back; returns the window if it was made, and the first refusal.
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

/// Runs the scenario; whatever was refused, its window shows one of three states as a whole.
fn attempt(host: &HostDevice, device: &dyn Device, n: u64, seen: &mut BTreeSet<Vec<u8>>) -> Result<()> {
    let sut = Sut { device, read: &read(host), write: &|slice, bytes| host.write(slice, bytes) };
    let mut window = None;
    let result = scenario(&sut, &mut window);
    if let Some(window) = window {
        let shows = sut.shows(window);
        assert!([[1, 2], [5, 1], [2, 5]].contains(&[shows[0], shows[1]]), "call {n}: {shows:?}");
        seen.insert(shows);
    }
    result
}

/// Open descriptors and mappings of ours.
fn held() -> (usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mappings = maps.lines().filter(|line| line.contains("/memfd:forebay")).count();
    (fs::read_dir("/proc/self/fd").unwrap().count(), mappings)
}

/// In a process of its own, because other tests open and map at the same time.
#[test]
fn every_refused_call_leaves_ranges_whole_and_nothing_held() {
    const NAME: &str = "every_refused_call_leaves_ranges_whole_and_nothing_held";
    if std::env::var_os(CHILD).is_none() {
        let exe = std::env::current_exe().unwrap();
        let run = Command::new(exe).args(["--exact", NAME, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(
            run.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&run.stderr)
        );
        return;
    }
    let (before, mut refused, mut seen) = (held(), 0, BTreeSet::new());
    for n in 0.. {
        let faults = Arc::new(Inject::nth(n, libc::EPERM));
        let host = HostDevice::with_faults(HostOptions::default(), faults.clone());
        let counted = Faulty::new(host.clone(), false);
        let result = attempt(&host, &*counted, n, &mut seen);
        // While the device lives: each backing has a descriptor and is mapped once by itself, and once for each piece.
        // Where the system refuses a memfd, the backing is other memory, which no range can map.
        let other = |error: &forebay::Error| error.place() == "memory without a descriptor";
        let others = usize::from(result.as_ref().is_err_and(other));
        let (backings, (_, pieces)) = (counted.backings() - others, counted.ranges());
        assert_eq!(held(), (before.0 + backings, before.1 + backings + pieces), "call {n}: {result:?}");
        drop((host, counted));
        assert_eq!(held(), before, "call {n}");
        refused += u32::from(result.is_err());
        if faults.count() <= n {
            assert!(result.is_ok());
            break;
        }
    }
    assert!(refused > 25 && seen.len() == 3, "{refused} refused, seen {seen:?}");
}

/// Refuses every mapping into a range from the given one on.
#[derive(Debug)]
struct Broken {
    mapped: AtomicU64,
    from: u64,
}

impl Faults for Broken {
    fn before(&self, call: Call) -> Option<i32> {
        let refuses = call == Call::MapFixed && self.mapped.fetch_add(1, Ordering::Relaxed) >= self.from;
        refuses.then_some(libc::ENOMEM)
    }
}

/// Where even the old memory cannot be mapped again, the device says so and goes no further.
#[test]
fn a_range_that_cannot_be_restored_fails_the_device() {
    // Two backings' own ranges and two pieces of a window; then a piece of a remap, and no other.
    let faults = Arc::new(Broken { mapped: AtomicU64::new(0), from: 5 });
    let host = HostDevice::with_faults(HostOptions::default(), faults);
    let grain = host.granularity();
    let sut = Sut { device: &*host, read: &read(&host), write: &|slice, bytes| host.write(slice, bytes) };
    let [(a, _), (b, _)] = [1, 2].map(|value| sut.filled(1, value).unwrap());
    let piece = |backing| Mapped { backing, offset: 0, bytes: grain };
    let window = host.range(&[piece(a), piece(b)], Protection::Read).unwrap();
    let error = host.remap(window, &[piece(b), piece(a)]).unwrap_err();
    assert_eq!((error.kind(), error.place()), (Kind::DeviceFailed, "mmap: Cannot allocate memory"));
    let event = host.event().unwrap();
    assert_eq!(host.query(event).unwrap_err().kind(), Kind::DeviceFailed);
}
