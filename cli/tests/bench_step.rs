//! Tests of `forebay bench --only step` on the host, and on the stand-in driver, where the steps are captured: every
//! figure is measured, and every result is compared with the rule.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/skip.rs"]
mod skip;

use command::{refuses, succeeds};
use forebay_standin::{Options, Standin};
use serde_json::Value;

/// The figures of tiny steps, as JSON.
fn figures(more: &[&str]) -> Vec<Value> {
    let all = [&["bench", "--only", "step", "--quick", "--rounds", "1", "--json", "-"], more].concat();
    let entries: Vec<Value> = serde_json::from_str(&succeeds(&all)).unwrap();
    entries.into_iter().filter(|entry| entry["kind"] == "bench").collect()
}

fn are_whole(figures: &[Value], captured: &str) {
    let of = |name: &str| -> Vec<&Value> { figures.iter().filter(|f| f["name"] == name).collect() };
    // Batch 4 with 2 and 1 query rows, batch 2, batch 1; one sequence has no halves for DBA.
    let counts =
        [("engine alone", 4), ("step, none", 4), ("step, da", 4), ("step, dba", 3), ("step, best order", 4)];
    for (name, count) in counts {
        assert_eq!(of(name).len(), count, "{name}");
    }
    let overlapping = (of("work beside a gather").len(), of("gather behind work").len());
    assert_eq!((of("forebay's nodes").len(), overlapping), (4, (2, 2)));
    for figure in figures {
        assert_eq!(figure["group"], "step");
        assert!(figure["target"].is_null(), "tiny steps reach nothing: {figure}");
        if figure["name"] != "rounds of products" {
            assert_eq!(figure["parameters"]["captured"], captured);
            assert!(figure["parameters"]["pool"].as_u64().is_some_and(|pool| pool > 1 << 20), "{figure}");
            assert!(figure["checked"].as_u64().unwrap() > 20, "{figure}");
        }
    }
    for figure in of("step, da") {
        let parameter = |name: &str| figure["parameters"][name].as_f64().unwrap();
        let rows = parameter("misses") * parameter("batch") * parameter("layers");
        assert!(rows > 0.0 && figure["us"].as_f64().unwrap() > 0.0);
        for name in ["exposed", "exposed a layer", "the same order, resident"] {
            assert!(figure["beside"][name].is_f64(), "{name}: {figure}");
        }
        assert_eq!(figure["ceiling"], "resident step");
    }
}

#[test]
fn the_host_measures_every_figure_call_by_call() {
    are_whole(&figures(&[]), "no");
}

/// Whether every figure reports that its work ran as persistent kernels, and that each sequence had its own prompt.
fn are_persistent(figures: &[Value]) {
    for figure in figures.iter().filter(|figure| figure["name"] != "rounds of products") {
        let named = &figure["parameters"];
        assert_eq!((&named["persistent"], &named["left_sms"]), (&"yes".into(), &0.into()), "{figure}");
        assert_eq!(named["prompts"], named["batch"], "{figure}");
    }
}

#[test]
fn a_gpu_measures_every_figure_in_captured_steps_also_next_to_persistent_kernels() {
    let Some(driver) = Standin::new(Options::default()) else {
        return skip::skip("g++, which builds the stand-in driver");
    };
    let of_gpu = ["--device", "cuda:0", "--driver", driver.library()];
    // The steps take the stand-in half a minute, so one run serves both.
    let found = figures(&[&of_gpu[..], &["--persistent", "--pool", "64MiB"]].concat());
    are_whole(&found, "yes");
    are_persistent(&found);
    let all = [&["bench", "--quick"][..], &of_gpu].concat();
    // The stand-in has one multiprocessor; no other group runs first.
    let error = refuses(&[&all[..], &["--persistent", "--leave-sms", "1"]].concat());
    assert!(error.contains("--leave-sms") && error.contains("value 1"), "{error}");
    let error = refuses(&[&all[..], &["--leave-sms", "4"]].concat());
    assert!(error.contains("--persistent"), "{error}");
}

#[test]
fn without_a_driver_there_are_no_figures() {
    let error = refuses(&[
        "bench",
        "--only",
        "step",
        "--quick",
        "--device",
        "cuda:0",
        "--driver",
        "no-such-driver.so",
    ]);
    assert!(error.contains("CUDA driver") && error.contains("no-such-driver.so"), "{error}");
}
