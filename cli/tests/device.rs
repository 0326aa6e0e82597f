//! Tests of `--device`: which device replays, the errors without one, and that every device counts the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/skip.rs"]
mod skip;

use std::path::Path;

use command::{refuses, succeeds};
use forebay_standin::{Options, Standin};

fn demo() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst").to_str().unwrap().to_owned()
}

/// The error of a replay of the demo trace with `more`.
fn refusal(more: &[&str]) -> String {
    refuses(&[&["replay", &demo(), "--prompt-share", "0.1"], more].concat())
}

#[test]
fn without_a_driver_the_error_names_the_missing_part_and_the_fix() {
    let error = refusal(&["--device", "cuda:0", "--driver", "no-such-folder/libcuda.so.1"]);
    for part in ["CUDA driver", "no-such-folder/libcuda.so.1", "No such file", "525", "host device"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    // A library that is no driver.
    let error = refusal(&["--device", "cuda:0", "--driver", "libc.so.6"]);
    assert!(error.contains("CUDA driver") && error.contains("cuDriverGetVersion"), "{error}");
    // The system's driver, if there is one, would replay.
    let output = command::forebay(&["replay", &demo(), "--prompt-share", "0.1", "--device", "cuda:0"])
        .output()
        .unwrap();
    if !output.status.success() {
        let error = command::refused(output, &["--device", "cuda:0"]);
        assert!(error.contains("CUDA driver"), "{error}");
    }
}

#[test]
fn a_device_is_named_cuda_and_its_number() {
    for name in ["cuda", "cuda:", "cuda:-1", "cuda:one", "cuda:4294967296", "CUDA:0", "gpu", ""] {
        let error = refusal(&["--device", name]);
        assert!(error.contains("--device") && error.contains("cuda:0"), "{name}: {error}");
    }
    assert!(refusal(&["--driver", "libc.so.6"]).contains("--device cuda:N"));
}

#[test]
fn the_host_is_the_default_device() {
    let replay = |more: &[&str]| {
        succeeds(&[&["replay", &demo(), "--prompt-share", "0.1", "--json", "-"], more].concat())
    };
    assert_eq!(replay(&["--device", "host"]), replay(&[]));
}

#[test]
fn counts_that_only_the_host_has_are_refused_for_other_devices() {
    for more in [
        &["--policy", "fifo"][..],
        &["--policy", "lru,belady"],
        &["--curve"],
        &["--prefetch", "inter-layer"],
        &["--html", "no-such-folder/report.html"],
    ] {
        let error = refusal(&[more, &["--device", "cuda:0"]].concat());
        assert!(error.contains(more[0]) && error.contains("--device"), "{error}");
    }
}

/// A driver for the command to load: the one that `FOREBAY_TEST_DRIVER` names, or a stand-in; `None` without a C++
/// compiler, after a message that the test skips.
struct Driver {
    library: String,
    /// Removed together with its file.
    _standin: Option<Standin>,
}

fn driver() -> Option<Driver> {
    if let Ok(library) = std::env::var("FOREBAY_TEST_DRIVER") {
        return Some(Driver { library, _standin: None });
    }
    let standin = Standin::new(Options::default());
    if standin.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    standin.map(|standin| Driver { library: standin.library().to_owned(), _standin: Some(standin) })
}

#[test]
fn a_gpu_counts_the_same_as_the_host() {
    let Some(driver) = driver() else { return };
    let trace = demo();
    for more in [
        &["--prompt-share", "0.05,0.2", "--mtp", "16"][..],
        &["--slots", "700", "--mtp", "64", "--warmup", "0"],
        &["--prompt-share", "0.1", "--mtp", "32", "--split", "by-layer"],
    ] {
        let all = [&["replay", &trace, "--json", "-"], more].concat();
        let on_gpu = [&all[..], &["--device", "cuda:0", "--driver", &driver.library]].concat();
        assert_eq!(succeeds(&on_gpu), succeeds(&all), "{more:?}");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_counted() {
    let Some(driver) = driver() else { return };
    let error = refusal(&["--device", "cuda:7", "--driver", &driver.library]);
    for part in ["no such device", "device 7", "devices "] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
