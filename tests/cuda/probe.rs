//! What tools ask of the device: its facts and abilities, times, runs by processors, and an engine's work.

use std::sync::Arc;

use crate::rig::{Rig, driver, on, own, pinned, usual};
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::device::{Device, Slice};
use forebay::measure::{Ceilings, GpuFacts, Mark, Probe};
use forebay::os::{Faults, Inject};
use forebay::{Config, Error, Kind, Memory, Shape};
use forebay_standin::{Driver, Options, Resources};

#[test]
fn facts_are_the_drivers() {
    let options = Options { processors: 7, driver_version: 13_020, memory: 64 << 20, devices: 2, ..usual() };
    let Some(standin) = own(options, "has two devices") else { return };
    let device = CudaDevice::new(CudaOptions { device: 1, ..on(standin.library()) }).unwrap();
    device.allocate(1 << 20).unwrap();
    let facts = device.facts().unwrap();
    assert_eq!((facts.name.as_str(), facts.processors, facts.copy_engines), ("stand-in", 7, 3));
    assert_eq!((facts.memory_total, facts.memory_free), (64 << 20, 63 << 20));
    let gpu = GpuFacts { driver: (13, 2), capability: (9, 0), bus: "0000:3c:00.0".to_owned() };
    assert_eq!(facts.gpu, Some(gpu));
    assert_eq!(CudaDevice::count(&on(standin.library())).unwrap(), 2);
}

#[test]
fn devices_are_counted_with_the_reasons_why_there_are_none() {
    for (options, kind, place) in [
        (Options { devices: 0, ..usual() }, Kind::OsRefused, "no device"),
        (Options { stub: true, ..usual() }, Kind::OsRefused, "is a stub for linking, not a driver"),
        (Options { driver_version: 11_080, ..usual() }, Kind::Unsupported, "is too old"),
    ] {
        let Some(standin) = own(options, "lacks something") else { return };
        let error = CudaDevice::count(&on(standin.library())).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.place().ends_with(place), "{error}");
    }
    let library = Some("/nonexistent/libcuda.so.1".to_owned());
    let error = CudaDevice::count(&CudaOptions { library, ..CudaOptions::default() }).unwrap_err();
    assert!(error.place().starts_with("missing library "), "{error}");
}

const ABILITIES: [&str; 6] = [
    "virtual memory",
    "memory descriptors",
    "fabric handles",
    "host memory of the driver's",
    "graphs",
    "conditional nodes",
];

/// By name, the reasons why unusable abilities are unusable.
fn unusable(device: &CudaDevice) -> Vec<(&'static str, Error)> {
    let abilities = device.abilities();
    assert_eq!(abilities.iter().map(|ability| ability.name).collect::<Vec<_>>(), ABILITIES);
    abilities.into_iter().filter_map(|ability| Some((ability.name, ability.usable.err()?))).collect()
}

#[test]
fn abilities_are_tried_and_their_resources_are_released() {
    let options = Options { processors: 7, ..usual() };
    for (options, name, reason) in [
        (options.clone(), "", ""),
        (
            Options { fabric: false, ..options.clone() },
            "fabric handles",
            "cuMemCreate: CUDA_ERROR_NOT_PERMITTED",
        ),
        (
            Options { descriptors: false, ..options.clone() },
            "memory descriptors",
            "the device cannot export its memory as a descriptor",
        ),
        // Memory is still available, but for this process alone.
        (
            Options { withheld: true, ..options.clone() },
            "memory descriptors",
            "the device cannot export its memory as a descriptor",
        ),
        (
            Options { host_memory: false, ..options.clone() },
            "host memory of the driver's",
            "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED",
        ),
        (
            Options { conditional_nodes: false, ..options },
            "conditional nodes",
            "cuGraphConditionalHandleCreate: CUDA_ERROR_NOT_SUPPORTED",
        ),
    ] {
        let Some(rig) = Rig::own(options, "lacks something") else { return };
        let before = rig.driver.held_resources();
        let found = unusable(&rig.device);
        assert_eq!(rig.driver.held_resources(), before);
        let found: Vec<_> = found.iter().map(|(name, error)| (*name, error.place())).collect();
        let wanted = if name.is_empty() { vec![] } else { vec![(name, reason)] };
        assert_eq!(found, wanted);
    }
}

#[test]
fn a_driver_that_lacks_an_optional_function_is_loaded() {
    let Some(standin) = own(usual(), "has everything else") else { return };
    // Optional functions are looked up last: a device survives the refusals of the loader that are theirs. One of them
    // is an ability.
    let found = (0..).find_map(|n| {
        let faults = Arc::new(Inject::nth(n, 2)) as Arc<dyn Faults>;
        let device = CudaDevice::new(CudaOptions { faults, ..on(standin.library()) }).ok()?;
        Some(unusable(&device)).filter(|found| !found.is_empty())
    });
    let found = found.unwrap();
    let [(name, error)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(*name, "conditional nodes");
    assert_eq!(error.place(), "cuGraphConditionalHandleCreate: this driver does not have it");
    assert!(error.to_string().ends_with("has one width"), "{error}");
}

#[test]
fn marks_tell_the_time_between_the_points_that_a_stream_reached() {
    for seed in [None, Some(3)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let device = &rig.device;
        let (stream, slice) = (device.stream().unwrap(), device.allocate(1 << 20).unwrap());
        let [a, b, c] = [0; 3].map(|_| device.mark().unwrap());
        let other = device.stream().unwrap();
        for _ in 0..2 {
            device.stamp(a, stream).unwrap();
            device
                .carry(stream, slice.part(0, 1 << 19).unwrap(), slice.part(1 << 19, 1 << 19).unwrap(), 2)
                .unwrap();
            device.stamp(b, stream).unwrap();
            device.compute(stream, 1).unwrap();
            device.stamp(c, stream).unwrap();
            let (short, long) = (device.elapsed_us(a, b).unwrap(), device.elapsed_us(a, c).unwrap());
            assert!(0.0 < short && short < long, "{short} {long}");
            assert_eq!((device.elapsed_us(c, a).unwrap(), device.elapsed_us(b, b).unwrap()), (0.0, 0.0));
        }
        // The last stamp counts, on any stream.
        device.stamp(b, other).unwrap();
        assert!(device.elapsed_us(c, b).unwrap() > 0.0);
    }
}

#[test]
fn marks_that_were_never_stamped_or_are_unknown_are_refused() {
    let Some(rig) = Rig::new(usual()) else { return };
    let device = &rig.device;
    let other = CudaDevice::new(on(rig.driver.library())).unwrap();
    let (stream, mark, stamped) = (device.stream().unwrap(), device.mark().unwrap(), device.mark().unwrap());
    device.stamp(stamped, stream).unwrap();
    let foreign = other.mark().unwrap();
    for (from, to) in [(mark, stamped), (stamped, mark), (Mark(7), stamped), (stamped, foreign)] {
        assert_eq!(device.elapsed_us(from, to).unwrap_err().kind(), Kind::OutOfRange);
    }
    let unstamped = device.elapsed_us(stamped, mark).unwrap_err();
    assert_eq!(unstamped.place(), "a mark that was never stamped");
    assert_eq!((unstamped.number("from"), unstamped.number("to")), (Some(stamped.0), Some(mark.0)));
    assert_eq!(device.stamp(foreign, stream).unwrap_err().kind(), Kind::OutOfRange);
    let event = device.event().unwrap();
    assert_eq!(device.query(event), Ok(true), "a refusal fails nothing else");
    device.capture(stream).unwrap();
    assert_eq!(device.stamp(stamped, stream).unwrap_err().kind(), Kind::InvalidState);
    device.compute(stream, 1).unwrap();
    let graph = device.captured(stream).unwrap();
    device.launch(graph, stream).unwrap();
    assert_eq!(device.elapsed_us(stamped, stamped), Ok(0.0), "the capture has not touched it");
}

#[test]
fn every_ceiling_is_a_speed() {
    for seed in [None, Some(11)] {
        let Some(rig) = Rig::new(Options { seed, ..usual() }) else { return };
        let operations = || match &rig.driver {
            Driver::Own(standin) => Some(standin.operations()),
            Driver::Given(_) => None,
        };
        let before = operations();
        let found = Ceilings::measure(&*rig.device, 1 << 16, 1).unwrap();
        let Ceilings { copy_up, copy_down, both_up, both_down, read, write, memory, .. } = found;
        for speed in [copy_up, copy_down, both_up, both_down, read, write, memory] {
            assert!(speed.is_finite() && speed > 0.0, "{found:?}");
        }
        assert!(found.read_blocks >= 2 && found.launch_us > 0.0, "{found:?}");
        // Memory that is zeroed, five runs twice each, both ways twice, and 33 launches.
        assert_eq!(operations(), before.map(|before| before + 1 + 5 * 2 + 2 * 2 + 33));
    }
}

#[test]
fn a_run_is_copied_whole_by_any_number_of_blocks_and_no_byte_next_to_it() {
    const BYTES: u64 = 5 * 4096 - 48;
    let Some(driver) = driver(usual()) else { return };
    // A run across the ends of chunks: kernels see one range of addresses.
    let device = CudaDevice::new(CudaOptions { registration_chunk: 4096, ..on(driver.library()) }).unwrap();
    let map = pinned(8 * 4096);
    let host = device.register(&map).unwrap();
    let near = device.allocate(8 * 4096).unwrap();
    let stream = device.stream().unwrap();
    let (from, to) = (host.part(16, BYTES).unwrap(), near.part(32, BYTES).unwrap());
    let whole = |slice: Slice| {
        let mut bytes = vec![0; slice.bytes() as usize];
        Probe::read(&*device, slice, &mut bytes).unwrap();
        bytes
    };
    for (round, blocks) in [1, 3, 7, 33, 1000].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..8 * 4096_usize).map(|i| (i * 7 + i / 251 + round) as u8).collect();
        map.copy_in(0, &bytes).unwrap();
        Probe::write(&*device, near, &[0xEE; 8 * 4096]).unwrap();
        device.carry(stream, from, to, blocks).unwrap();
        let event = device.event().unwrap();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
        let seen = whole(near);
        assert_eq!(seen[32..][..BYTES as usize], bytes[16..][..BYTES as usize], "{blocks} blocks");
        let others = seen[..32].iter().chain(&seen[32 + BYTES as usize..]);
        assert!(
            others.clone().count() > 0 && others.into_iter().all(|byte| *byte == 0xEE),
            "{blocks} blocks"
        );
        // And down again, to another place.
        map.copy_in(0, &[0; 8 * 4096]).unwrap();
        device.carry(stream, to, host.part(64, BYTES).unwrap(), blocks).unwrap();
        device.record(event, stream).unwrap();
        device.synchronize(event).unwrap();
        assert_eq!(whole(host.part(64, BYTES).unwrap()), bytes[16..][..BYTES as usize]);
    }
}

#[test]
fn an_invalid_run_is_refused() {
    let Some(rig) = Rig::new(usual()) else { return };
    let device = &rig.device;
    let (stream, slice) = (device.stream().unwrap(), device.allocate(256).unwrap());
    let part = |at, bytes| slice.part(at, bytes).unwrap();
    device.carry(stream, part(0, 0), part(16, 0), 1).unwrap();
    for (from, to, blocks) in [
        (part(8, 16), part(64, 16), 1),
        (part(0, 16), part(72, 16), 1),
        (part(0, 24), part(64, 24), 1),
        (part(0, 16), part(64, 32), 1),
        (part(0, 16), part(64, 16), 0),
        (part(0, 16), part(64, 16), u32::MAX),
    ] {
        let refused = device.carry(stream, from, to, blocks).unwrap_err();
        assert_eq!(refused.kind(), Kind::OutOfRange, "{from:?} {to:?} {blocks}");
    }
    let other = CudaDevice::new(on(rig.driver.library())).unwrap();
    assert!(other.carry(other.stream().unwrap(), slice, slice, 1).is_err(), "another device's memory");
}

#[test]
fn work_takes_its_memory_at_the_first_use_even_inside_a_capture() {
    let Some(rig) = Rig::own(usual(), "tells what it holds") else { return };
    let (device, standin) = (&rig.device, &rig.driver);
    let stream = device.stream().unwrap();
    let before = standin.held_resources();
    device.capture(stream).unwrap();
    device.compute(stream, 2).unwrap();
    let graph = device.captured(stream).unwrap();
    let taken = standin.held_resources().allocations;
    assert_eq!(taken, before.allocations + 1);
    let operations = standin.operations();
    device.launch(graph, stream).unwrap();
    device.compute(stream, 3).unwrap();
    device.compute(stream, 0).unwrap();
    assert_eq!((standin.held_resources().allocations, standin.operations()), (taken, operations + 2));
    assert_eq!(device.compute(stream, u32::MAX).unwrap_err().kind(), Kind::OutOfRange);
    let Rig { device, driver } = rig;
    drop(device);
    assert_eq!(driver.held_resources(), Resources::default());
}

#[test]
fn a_cache_takes_the_gpu_memory_that_its_footprint_says() {
    let shape = Shape { layers: 3, top_k: 300, page_tokens: 16, ..Shape::DEEPSEEK_V3_2 };
    let few = Config { query_rows: 2, parked: 7, ..Config::new(shape, 4, 3000, 700) };
    let many = Config { query_rows: 40, micro_batches: 2, batch: 24, ..Config::new(shape, 32, 500, 150) };
    let groups = Shape { layers: 4, lone_layers: 1, group_layers: 3, ..shape };
    let rows = vec![[656, 0], [1152, 0], [512, 144], [656, 0]];
    let grouped = Config { rows, query_rows: 2, ..Config::new(groups, 4, 3000, 700) };
    for config in [few, many, grouped] {
        let memory = Memory { huge: false, populate: false, lock: false, node: None };
        let config = Config { memory, ..config };
        let Some(Rig { device, driver }) =
            Rig::own(Options { memory: 1 << 30, ..usual() }, "tells what is free")
        else {
            return;
        };
        let free = || device.facts().unwrap().memory_free;
        let footprint = config.footprint(device.granularity()).unwrap();
        let (before, pinned) = (free(), || driver.held_resources().pinned);
        assert_eq!(pinned(), 0);
        let cache = forebay::Cache::new(config, device.clone()).unwrap();
        let taken = before - free() - footprint.data();
        // Each table begins at a multiple of 256 bytes: 5 per index group, 10 per micro-batch, 8 for all.
        let tables = 5 * 3 + 10 * 2 + 8;
        assert!(
            (footprint.tables..footprint.tables + 256 * tables).contains(&taken),
            "{taken} {footprint:?}"
        );
        // Rows and ring are whole pages.
        let host = footprint.host();
        assert!((host..host + 2 * 4096).contains(&pinned()), "{} {footprint:?}", pinned());
        drop(cache);
    }
}
