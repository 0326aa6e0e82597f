//! Memory: what the device allocates, in which pieces it registers and copies host memory, and what it releases.

use crate::rig::{Rig, driver, on, own, pinned, usual};
use forebay::Kind;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::host::{HostDevice, HostOptions};
use forebay::device::{Device, Mapped};
use forebay::os::Protection;
use forebay_standin::{Options, Resources};

const PAGE: u64 = 4096;

#[test]
fn device_memory_is_zero_when_it_is_allocated_and_all_of_it_is_freed() {
    for seed in 0..20 {
        let Some(rig) = Rig::new(Options { seed: Some(seed), ..usual() }) else { return };
        let slice = rig.device.allocate(1000).unwrap();
        assert_eq!(rig.read(slice), [0; 1000]);
        let grain = rig.device.granularity();
        let backing = rig.device.backing(1).unwrap();
        let range =
            rig.device.range(&[Mapped { backing, offset: 0, bytes: grain }], Protection::ReadWrite).unwrap();
        assert!(rig.read(range).iter().all(|byte| *byte == 0));
        let Rig { device, driver } = rig;
        drop(device);
        assert_eq!(driver.held_resources(), Resources::default());
    }
}

#[test]
fn running_out_of_memory_is_an_error_with_the_wanted_size() {
    let Some(rig) = Rig::new(Options { memory: 16 << 20, ..usual() }) else { return };
    // More memory than any device has.
    for error in [rig.device.allocate(1 << 46).unwrap_err(), rig.device.backing(1 << 46).unwrap_err()] {
        assert_eq!((error.kind(), error.number("wanted")), (Kind::OutOfMemory, Some(1 << 46)));
        assert!(error.place().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
    }
    assert_eq!(rig.device.allocate(0).unwrap_err().kind(), Kind::InvalidConfig);
    assert_eq!(rig.device.backing(0).unwrap_err().kind(), Kind::InvalidConfig);
    rig.device.allocate(1 << 20).unwrap();
}

#[test]
fn a_piece_is_mapped_in_several_ranges_and_in_other_processes() {
    let Some(rig) = Rig::new(usual()) else { return };
    let device = &rig.device;
    let grain = device.granularity();
    let [shared, own] = [0; 2].map(|_| device.backing(grain).unwrap());
    let piece = |backing, offset| Mapped { backing, offset, bytes: grain };
    let long = device.range(&[piece(shared, 0), piece(own, 0)], Protection::ReadWrite).unwrap();
    let short = device.range(&[piece(shared, 0)], Protection::ReadWrite).unwrap();
    device.write(long.part(7, 3).unwrap(), &[1, 2, 3]).unwrap();
    assert_eq!(rig.read(short.part(7, 3).unwrap()), [1, 2, 3]);

    let descriptor = device.export(shared, Protection::ReadWrite).unwrap();
    let other = CudaDevice::new(on(rig.driver.library())).unwrap();
    let taken = other.import_backing(descriptor, grain, Protection::ReadWrite).unwrap();
    let seen = other.range(&[piece(taken, 0)], Protection::ReadWrite).unwrap();
    let mut bytes = [0; 3];
    other.read(seen.part(7, 3).unwrap(), &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3]);
    assert!(!device.owns(&seen) && other.owns(&seen));

    assert_eq!(device.export(taken, Protection::ReadWrite).unwrap_err().kind(), Kind::OutOfRange);
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(other.import_backing(file.into(), grain, Protection::Read).is_err(), "it has no memory");
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let Some(rig) = Rig::new(usual()) else { return };
    let grain = rig.device.granularity();
    let backing = rig.device.backing(2 * grain).unwrap();
    for (offset, bytes, kind) in [
        (0, 0, Kind::InvalidConfig),
        (1, grain, Kind::InvalidConfig),
        (0, grain - 1, Kind::InvalidConfig),
        (grain, 2 * grain, Kind::OutOfRange),
        (u64::MAX - grain + 1, grain, Kind::OutOfRange),
    ] {
        let refused =
            rig.device.range(&[Mapped { backing, offset, bytes }], Protection::ReadWrite).unwrap_err();
        assert_eq!(refused.kind(), kind, "{offset} {bytes}");
    }
    assert_eq!(rig.device.range(&[], Protection::ReadWrite).unwrap_err().kind(), Kind::InvalidConfig);
    // A driver maps from the beginning only; its documentation says "currently", so another driver may do more.
    match rig.device.range(&[Mapped { backing, offset: grain, bytes: grain }], Protection::ReadWrite) {
        Ok(range) => assert!(rig.driver.own().is_none() && range.bytes() == grain),
        Err(refused) => {
            assert_eq!(refused.kind(), Kind::OsRefused);
            assert!(refused.to_string().ends_with("take one for each piece"), "{refused}");
        }
    }
    // Another device's, though this device has one of the same number.
    let other = HostDevice::new(HostOptions::default());
    let foreign = Mapped { backing: other.backing(grain).unwrap(), offset: 0, bytes: grain };
    assert_eq!(rig.device.range(&[foreign], Protection::ReadWrite).unwrap_err().kind(), Kind::OutOfRange);
    assert_eq!(rig.driver.held_resources().reservations, 0);
}

#[test]
fn f19_host_memory_is_registered_in_chunks_and_a_chunk_that_fails_unregisters_all() {
    let Some(standin) = own(usual(), "fails a call") else { return };
    // Not a whole number of pages: it is rounded down to two.
    let options = CudaOptions { registration_chunk: 3 * PAGE - 1, ..on(standin.library()) };
    let device = CudaDevice::new(options).unwrap();
    let map = pinned(7 * PAGE);
    let slice = device.register(&map).unwrap();
    assert_eq!((slice.address(), slice.bytes()), (map.as_ptr() as u64, 7 * PAGE));
    assert_eq!(standin.held_resources().registrations, 4);
    let (before, mut failures) = (standin.held_resources(), 0);
    let next = pinned(7 * PAGE);
    for n in 0.. {
        standin.fail_call(n, 1);
        if device.register(&next).is_ok() {
            break;
        }
        failures += u32::from(standin.failed_call().as_deref() == Some("cuMemHostRegister_v2"));
        assert_eq!(standin.held_resources(), before, "call {n}");
        assert!(n < 100);
    }
    assert_eq!(failures, 4);
    standin.fail_call(u64::MAX / 2, 1);
    drop(device);
    assert_eq!(standin.held_resources(), Resources::default());
}

#[test]
fn a_registration_that_the_driver_refuses_is_an_error_that_names_it() {
    let little = Options { registration: PAGE, ..usual() };
    let Some(rig) = Rig::own(little, "pins a page at a time") else { return };
    let refused = rig.device.register(&pinned(2 * PAGE)).unwrap_err();
    assert_eq!(refused.kind(), Kind::OutOfMemory);
    assert!(refused.place().starts_with("cuMemHostRegister_v2: CUDA_ERROR_"), "{refused}");
    assert!(refused.to_string().ends_with("the limit of locked memory (ulimit -l)"), "{refused}");
    let event = rig.device.event().unwrap();
    assert_eq!(rig.device.query(event), Ok(true), "a refusal fails nothing else");
}

#[test]
fn copies_go_over_the_ends_of_chunks() {
    let Some(driver) = driver(usual()) else { return };
    let device = CudaDevice::new(CudaOptions { registration_chunk: PAGE, ..on(driver.library()) }).unwrap();
    let map = pinned(4 * PAGE);
    let host = device.register(&map).unwrap();
    let far = device.allocate(3 * PAGE).unwrap();
    let bytes: Vec<u8> = (0..4 * PAGE).map(|i| (i % 251) as u8).collect();
    map.copy_in(0, &bytes).unwrap();
    let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
    let sync = || {
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
    };
    // Up and down, across two ends of chunks, at odd addresses.
    let part = |at, bytes| host.part(at, bytes).unwrap();
    device.copy(stream, part(PAGE - 3, 2 * PAGE), far.part(1, 2 * PAGE).unwrap()).unwrap();
    device.copy(stream, far.part(1, PAGE).unwrap(), part(1001, PAGE)).unwrap();
    sync();
    let mut seen = vec![0; PAGE as usize];
    map.copy_out(1001, &mut seen).unwrap();
    assert_eq!(seen, bytes[PAGE as usize - 3..][..PAGE as usize]);
    // From host memory to host memory, which blocks no other stream.
    map.copy_in(0, &bytes).unwrap();
    let blocking = driver.synchronizations();
    device.copy(stream, part(0, PAGE + 8), part(2 * PAGE - 4, PAGE + 8)).unwrap();
    assert_eq!(driver.synchronizations(), blocking);
    sync();
    let mut seen = vec![0; PAGE as usize + 8];
    map.copy_out(2 * PAGE - 4, &mut seen).unwrap();
    assert_eq!(seen, bytes[..PAGE as usize + 8]);
    device.copy(stream, part(0, 0), part(8, 0)).unwrap();
    for (from, to, bytes) in [(0, 8, 6), (2, 8, 4), (0, 6, 4)] {
        let refused = device.copy(stream, part(from, bytes), part(to, bytes)).unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfRange);
    }
    let long = device.copy(stream, part(0, 8), far.part(0, 16).unwrap()).unwrap_err();
    assert_eq!(long.kind(), Kind::OutOfRange);
}

#[test]
fn bytes_are_read_and_written_over_chunks() {
    let Some(driver) = driver(usual()) else { return };
    let device = CudaDevice::new(CudaOptions { registration_chunk: PAGE, ..on(driver.library()) }).unwrap();
    let map = pinned(2 * PAGE);
    let slice = device.register(&map).unwrap().part(PAGE - 2, 4).unwrap();
    device.write(slice, &[1, 2, 3, 4]).unwrap();
    let mut seen = [0; 4];
    device.read(slice, &mut seen).unwrap();
    assert_eq!(seen, [1, 2, 3, 4]);
    assert_eq!(device.read(slice, &mut [0; 3]).unwrap_err().kind(), Kind::OutOfRange);
}
