//! Features that a machine may lack: each is an error that names the feature and says what to do, and nothing leaks.

use std::sync::Arc;

use crate::rig::{on, own, usual};
use forebay::device::Device;
use forebay::device::cuda::{CudaDevice, CudaOptions};
use forebay::os::{Call, Faults, Inject, Protection};
use forebay::{Error, Kind};
use forebay_standin::{Options, Resources, Standin};

/// The abilities of a stand-in that is older than others.
const OLD: &str = "is of another release or generation";

fn refused(options: CudaOptions) -> Error {
    CudaDevice::new(options).unwrap_err()
}

/// The error of a device on such a driver; none without a driver.
fn refused_on(options: Options) -> Option<Error> {
    let standin = own(options, "lacks something")?;
    let error = refused(on(standin.library()));
    assert_eq!(standin.held_resources(), Resources::default());
    Some(error)
}

fn named(library: &str) -> CudaOptions {
    CudaOptions { library: Some(library.to_owned()), ..CudaOptions::default() }
}

#[test]
fn without_a_driver_the_error_names_the_package_to_install() {
    let error = refused(named("/nonexistent/libcuda.so.1"));
    assert_eq!(error.kind(), Kind::OsRefused);
    assert!(error.place().starts_with("missing library /nonexistent/libcuda.so.1: "), "{error}");
    assert!(
        error
            .to_string()
            .ends_with("install NVIDIA's driver of release 525 or newer, or use the host device")
    );
    assert_eq!(refused(named("a\0b")).kind(), Kind::InvalidConfig);
}

#[test]
fn a_library_that_is_no_driver_lacks_its_symbols() {
    let error = refused(named("libm.so.6"));
    assert_eq!(error.kind(), Kind::OsRefused);
    assert!(error.place().starts_with("missing symbol cuDriverGetVersion in libm.so.6"), "{error}");
}

#[test]
fn each_symbol_that_is_missing_is_named() {
    let Some(standin) = own(usual(), "tells what it holds") else { return };
    let mut seen = Vec::new();
    for n in 0.. {
        let faults = Arc::new(Inject::nth(n, libc_enoent()));
        let made = CudaDevice::new(CudaOptions {
            faults: faults.clone() as Arc<dyn Faults>,
            ..on(standin.library())
        });
        match made {
            Ok(_) => break,
            Err(error) => {
                assert_eq!(error.kind(), Kind::OsRefused);
                assert!(error.place().starts_with("missing "), "{error}");
                seen.push(error.place().to_owned());
            }
        }
        assert_eq!(standin.held_resources(), Resources::default());
    }
    assert!(seen.len() > 50 && seen[0].starts_with("missing library "), "{}", seen.len());
    seen.sort();
    let all = seen.len();
    seen.dedup();
    assert_eq!(seen.len(), all, "each call of the loader is for something else");
    let symbol = CudaOptions {
        faults: Arc::new(Inject::call(Call::FindSymbol, libc_enoent())),
        ..on(standin.library())
    };
    assert!(refused(symbol).place().starts_with("missing symbol cuDriverGetVersion"));
}

/// No such file.
fn libc_enoent() -> i32 {
    2
}

#[test]
fn a_stub_library_is_not_taken_for_a_driver() {
    let Some(error) = refused_on(Options { stub: true, ..usual() }) else { return };
    assert_eq!(error.kind(), Kind::OsRefused);
    assert!(error.place().ends_with("is a stub for linking, not a driver"), "{error}");
    assert!(error.to_string().contains("stubs off the library path"), "{error}");
}

#[test]
fn a_driver_that_is_too_old_is_an_error_with_the_release_that_is_needed() {
    let Some(error) = refused_on(Options { driver_version: 11_080, ..usual() }) else { return };
    assert_eq!(
        (error.kind(), error.number("found"), error.number("wanted")),
        (Kind::Unsupported, Some(11_080), Some(12_000))
    );
    let Some(standin) = own(Options { driver_version: 12_000, ..usual() }, OLD) else { return };
    assert!(CudaDevice::new(on(standin.library())).is_ok());
}

#[test]
fn a_driver_without_devices_is_an_error_that_says_so() {
    let Some(error) = refused_on(Options { devices: 0, ..usual() }) else { return };
    assert_eq!((error.kind(), error.place()), (Kind::OsRefused, "no device"));
}

#[test]
fn a_missing_device_is_named() {
    let Some(standin) = own(Options { devices: 2, ..usual() }, "has two devices") else { return };
    let error = refused(CudaOptions { device: 2, ..on(standin.library()) });
    assert_eq!(
        (error.kind(), error.number("device"), error.number("devices")),
        (Kind::InvalidConfig, Some(2), Some(2))
    );
    assert!(CudaDevice::new(CudaOptions { device: 1, ..on(standin.library()) }).is_ok());
    assert_eq!(standin.held_resources(), Resources::default());
}

#[test]
fn a_device_too_old_is_refused() {
    let Some(error) = refused_on(Options { capability: (7, 5), ..usual() }) else { return };
    assert_eq!((error.kind(), error.place()), (Kind::Unsupported, "compute capability below 8.0"));
    assert_eq!((error.number("major"), error.number("minor")), (Some(7), Some(5)));
}

#[test]
fn f16_a_device_with_warps_of_another_width_is_refused() {
    for warp in [16, 64] {
        let Some(error) = refused_on(Options { warp, ..usual() }) else { return };
        assert_eq!((error.kind(), error.place()), (Kind::Unsupported, "threads of a warp"));
        assert_eq!(error.number("found"), Some(u64::from(warp)));
    }
}

#[test]
fn options_that_make_no_sense_are_named() {
    let options = CudaOptions::default;
    for (options, place) in [
        (CudaOptions { threads: 0, ..options() }, "threads"),
        (CudaOptions { threads: 48, ..options() }, "threads"),
        (CudaOptions { threads: 1024, ..options() }, "threads"),
        (CudaOptions { gather_blocks: 0, ..options() }, "gather_blocks"),
        (CudaOptions { copy_engine_bytes: (64 << 20) + 1, ..options() }, "copy_engine_bytes"),
        (CudaOptions { registration_chunk: 0, ..options() }, "registration_chunk"),
    ] {
        let error = refused(options);
        assert_eq!((error.kind(), error.place()), (Kind::InvalidConfig, place));
    }
}

#[test]
fn options_that_need_a_newer_device_are_refused_on_an_older_one() {
    let accepts = |standin: &Standin, programmatic, bulk| {
        CudaDevice::new(CudaOptions { programmatic, bulk, ..on(standin.library()) }).map(|_| ())
    };
    let Some(new) = own(usual(), OLD) else { return };
    accepts(&new, true, true).unwrap();
    // 8.6 runs the kernels of 8.0; 11.0 has no kernels of its own and gets those for 8.0.
    for capability in [(8, 6), (11, 0)] {
        let Some(old) = own(Options { capability, ..usual() }, OLD) else { return };
        accepts(&old, false, false).unwrap();
        for (programmatic, bulk) in [(true, false), (false, true)] {
            assert_eq!(accepts(&old, programmatic, bulk).unwrap_err().kind(), Kind::Unsupported);
        }
        assert_eq!(old.held_resources(), Resources::default());
    }
}

#[test]
fn early_launches_are_refused_by_a_driver_whose_graphs_lose_them() {
    let on_version = |driver_version, programmatic| {
        let standin = own(Options { driver_version, ..usual() }, OLD)?;
        let made = CudaDevice::new(CudaOptions { programmatic, ..on(standin.library()) }).map(drop);
        assert_eq!(standin.held_resources(), Resources::default());
        Some(made)
    };
    let Some(made) = on_version(12_030, true) else { return };
    assert_eq!((made, on_version(12_020, false)), (Ok(()), Some(Ok(()))));
    let error = on_version(12_020, true).unwrap().unwrap_err();
    assert_eq!(
        (error.kind(), error.number("found"), error.number("wanted")),
        (Kind::Unsupported, Some(12_020), Some(12_030))
    );
    assert!(error.to_string().contains("too old for early launches"), "{error}");
    assert!(error.to_string().ends_with("or do without early launches"), "{error}");
}

#[test]
fn memory_without_descriptors_serves_and_is_not_exported() {
    let Some(standin) = own(Options { descriptors: false, ..usual() }, "has no descriptors") else { return };
    let device = CudaDevice::new(on(standin.library())).unwrap();
    let cache = crate::rig::Cache::new(device.clone()).unwrap();
    cache.join(0, 20).unwrap();
    let error = device.export(device.backing(1).unwrap(), Protection::ReadWrite).unwrap_err();
    assert_eq!(
        (error.kind(), error.place()),
        (Kind::Unsupported, "the device cannot export its memory as a descriptor")
    );
}
