//! Rows in host memory that the driver allocates: a cache over it decodes as over registered memory; a device without
//! such memory reports it, and nothing leaks.

use std::sync::Arc;

use crate::rig::{Cache, driver, on, own, usual};
use crate::steps::{STEPS, run};
use forebay::device::Device;
use forebay::device::cuda::{CudaDevice, CudaOptions, HostMemory};
use forebay::{Cache as Whole, Config, Error, Kind, Shape};
use forebay_standin::{Options, Resources, Standin};

const GRAIN: u64 = 2 << 20;
const DOES: &str = "tells what it holds";
/// A call number that no test reaches.
const NEVER: u64 = u64::MAX / 2;

fn asked(standin: &Standin) -> CudaOptions {
    CudaOptions { host_memory: HostMemory::Driver, ..on(standin.library()) }
}

fn registered(standin: &Standin) -> u64 {
    standin.calls_of(c"cuMemHostRegister_v2")
}

#[test]
fn a_cache_over_the_drivers_memory_decodes_as_one_over_registered_memory() {
    for seed in [None, Some(1), Some(2)] {
        let Some(driver) = driver(Options { seed, ..usual() }) else { return };
        let mut seen = [vec![], vec![]];
        for (host_memory, seen) in [HostMemory::Registered, HostMemory::Driver].into_iter().zip(&mut seen) {
            let device = CudaDevice::new(CudaOptions { host_memory, ..on(driver.library()) }).unwrap();
            let (rows, before) = (Cache::rows().unwrap(), driver.own().map(registered));
            let made = device.host_memory(rows.len(), None).unwrap();
            assert_eq!(made.is_some(), host_memory == HostMemory::Driver);
            let total = made.unwrap_or_else(|| Arc::clone(&rows));
            let mut bytes = vec![1; rows.len() as usize];
            total.copy_out(0, &mut bytes).unwrap();
            assert!(host_memory == HostMemory::Registered || bytes.iter().all(|byte| *byte == 0));
            rows.copy_out(0, &mut bytes).unwrap();
            total.copy_in(0, &bytes).unwrap();
            let cache = Cache::over(device.clone(), &total).unwrap();
            // The words, and the rows if the system allocates them.
            let registers = 1 + u64::from(host_memory == HostMemory::Registered);
            assert_eq!(driver.own().map(registered), before.map(|before| before + registers));
            run(&cache, STEPS, |_, slots, digests| seen.push((slots, digests)));
            total.copy_out(0, &mut bytes).unwrap();
            seen.push(((bytes.iter().map(|byte| u32::from(*byte)).collect(), vec![]), vec![]));
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(driver.held_resources(), Resources::default());
    }
}

/// A cache of the library takes its rows there: only its ring is registered.
#[test]
fn a_whole_cache_takes_its_rows_where_the_device_makes_them() {
    let Some(standin) = own(usual(), DOES) else { return };
    let shape =
        Shape { layers: 2, draft_layers: 0, runs: [64, 0], page_tokens: 16, top_k: 8, ..Shape::GLM_5 };
    let config = Config::new(shape, 2, 64, 16);
    let device = CudaDevice::new(asked(&standin)).unwrap();
    let cache = Whole::new(config, device.clone()).unwrap();
    assert_eq!(registered(&standin), 1, "the ring alone");
    assert!(cache.fallbacks().is_empty(), "{:?}", cache.fallbacks());
    drop((cache, device));
    assert_eq!(standin.held_resources(), Resources::default());
}

#[test]
fn host_memory_of_the_driver_is_freed_with_its_last_user() {
    let Some(standin) = own(usual(), DOES) else { return };
    let options = CudaOptions { registration_chunk: GRAIN, ..asked(&standin) };
    let device = CudaDevice::new(options).unwrap();
    let map = device.host_memory(2 * GRAIN + 1, Some(1)).unwrap().unwrap();
    assert_eq!((map.len(), map.page_bytes(), map.descriptor().is_some()), (3 * GRAIN, GRAIN, false));
    assert_eq!(standin.held_resources().handles, 3, "in pieces");
    let slice = device.register(&map).unwrap();
    device.write(slice.part(GRAIN - 2, 4).unwrap(), &[1, 2, 3, 4]).unwrap();
    drop(device);
    let mut seen = [0; 4];
    map.copy_out(GRAIN - 2, &mut seen).unwrap();
    assert_eq!(seen, [1, 2, 3, 4]);
    assert_eq!(standin.held_resources().handles, 3);
    drop(map);
    assert_eq!(standin.held_resources(), Resources::default());
}

fn refused(options: Options) -> Option<Error> {
    let standin = own(options, DOES)?;
    let made = CudaDevice::new(asked(&standin));
    let error = made.and_then(|device| device.host_memory(GRAIN, None)).unwrap_err();
    assert_eq!(standin.held_resources(), Resources::default());
    Some(error)
}

#[test]
fn a_device_without_host_memory_of_the_driver_is_unsupported() {
    let Some(error) = refused(Options { driver_version: 12_010, ..usual() }) else { return };
    assert_eq!(
        (error.kind(), error.number("found"), error.number("wanted")),
        (Kind::Unsupported, Some(12_010), Some(12_020))
    );
    let none = refused(Options { host_memory: false, driver_version: 12_090, ..usual() }).unwrap();
    assert_eq!(
        (none.kind(), none.place()),
        (Kind::Unsupported, "the device has no host memory of the driver's")
    );
    // A driver that may not support the query is asked for the memory itself.
    let older = Options { driver_version: 12_020, ..usual() };
    let newer = Options { driver_version: 12_090, nodes: 0, ..usual() };
    let error = refused(Options { host_memory: false, ..older.clone() }).unwrap();
    assert_eq!((error.kind(), error.place()), (Kind::OsRefused, "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"));
    assert!(error.to_string().contains("--cap-add SYS_NICE"), "{error}");
    // A machine without nodes has node 0.
    for options in [older, newer] {
        let standin = own(options, DOES).unwrap();
        let device = CudaDevice::new(asked(&standin)).unwrap();
        device.host_memory(1, None).unwrap().unwrap();
        let error = device.host_memory(1, Some(7)).unwrap_err();
        assert_eq!((error.kind(), error.number("node")), (Kind::OsRefused, Some(7)));
        assert_eq!(device.host_memory(0, None).unwrap_err().kind(), Kind::InvalidConfig);
        let error = device.host_memory(1, Some(1 << 31)).unwrap_err();
        assert_eq!((error.kind(), error.number("node")), (Kind::InvalidConfig, Some(1 << 31)));
    }
}

#[test]
fn memory_of_another_device_is_refused_by_name() {
    let Some(standin) = own(usual(), DOES) else { return };
    let [one, other] = [0; 2].map(|_| CudaDevice::new(asked(&standin)).unwrap());
    let map = one.host_memory(GRAIN, None).unwrap().unwrap();
    one.register(&map).unwrap();
    let error = other.register(&map).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidConfig);
    assert!(
        error.place().contains("another device made") && !error.to_string().contains("ulimit"),
        "{error}"
    );
}

#[test]
fn an_allocation_refused_half_way_leaks_nothing() {
    for (code, kind) in [(1, Kind::DeviceFailed), (2, Kind::OutOfMemory), (800, Kind::OsRefused)] {
        let Some(standin) = own(usual(), DOES) else { return };
        let options = CudaOptions { registration_chunk: GRAIN, ..asked(&standin) };
        let device = CudaDevice::new(options).unwrap();
        let mut calls = Vec::new();
        for n in 0.. {
            let before = standin.held_resources();
            standin.fail_call(n, code);
            // A thread of its own: a context that could not be popped stays on its stack.
            let made = std::thread::scope(|scope| scope.spawn(|| device.host_memory(3 * GRAIN, None)).join())
                .unwrap();
            let call = standin.failed_call();
            standin.fail_call(NEVER, code);
            match (made, call) {
                (Ok(_), None) => break,
                (Ok(_), Some(_)) => {}
                (Err(error), call) => {
                    let call = call.unwrap();
                    assert_eq!(standin.held_resources(), before, "call {n} ({call}): {error}");
                    if call.starts_with("cuMem") {
                        let made = call == "cuMemCreate";
                        // Only for the node is an invalid value a refusal of the system.
                        let of_node = made || call == "cuMemGetAllocationGranularity";
                        let kind = if of_node && code == 1 { Kind::OsRefused } else { kind };
                        assert_eq!(error.kind(), kind, "{call}: {error}");
                        let named = error.to_string().contains("SYS_NICE");
                        assert_eq!(named, kind == Kind::OsRefused && made, "{call}: {error}");
                    }
                    calls.push(call);
                }
            }
        }
        for (call, times) in
            [("cuMemCreate", 3), ("cuMemMap", 3), ("cuMemSetAccess", 2), ("cuMemsetD8Async", 1)]
        {
            assert_eq!(calls.iter().filter(|name| *name == call).count(), times, "{call} of {calls:?}");
        }
    }
}
