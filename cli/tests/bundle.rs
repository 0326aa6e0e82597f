//! Tests of the results that a machine with a GPU leaves behind. `forebay bench` writes each figure when it has
//! measured it. `ci/gpu/run.sh` plans its calls, reports a missing GPU, and keeps its figures when it is ended.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/skip.rs"]
mod skip;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use command::{forebay, refuses, succeeds};
use forebay_standin::{Options, Standin};
use serde_json::Value;

/// An empty folder for this test only.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bundle").join(name);
    drop(fs::remove_dir_all(&path));
    fs::create_dir_all(&path).unwrap();
    path
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    assert!(text.is_empty() || text.ends_with('\n'), "a line is cut off: {text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits until `path` has figures, at most as long as `run` runs.
fn until_figures(path: &Path, run: &mut Child) {
    let figures = || fs::read_to_string(path).unwrap_or_default().matches("\"kind\":\"bench\",").count();
    while figures() < 2 {
        assert!(run.try_wait().unwrap().is_none(), "it ended before its figures");
        std::thread::yield_now();
    }
}

#[test]
fn figures_are_written_line_by_line_and_equal_the_list() {
    let folder = folder("lines");
    let path = folder.join("figures.jsonl");
    let name = path.to_str().unwrap();
    let all = ["bench", "--quick", "--rounds", "1", "--json", "-", "--json-lines", name];
    let listed: Vec<Value> = serde_json::from_str(&succeeds(&all)).unwrap();
    let found = lines(&path);
    assert_eq!(found[0]["kind"], "bench-device");
    assert_eq!(found.len(), listed.len());
    // A group may sort its measurements: each figure occurs once.
    let sorted = |entries: &[Value]| {
        let mut texts: Vec<String> = entries.iter().map(Value::to_string).collect();
        texts.sort();
        texts
    };
    assert_eq!(sorted(&found), sorted(&listed));
    let error = refuses(&["bench", "--quick", "--json-lines", name]);
    assert!(error.contains("figures.jsonl") && error.contains("never overwritten"), "{error}");
    let error = refuses(&["bench", "--quick", "--json-lines", "-"]);
    assert!(error.contains("--json-lines") && error.contains("standard output"), "{error}");
    let error = refuses(&["bench", "--quick", "--json", name, "--json-lines", name]);
    assert!(error.contains("same file"), "{error}");
    let error = refuses(&["bench", "--quick", "--json-lines", "no-such-folder/a.jsonl"]);
    assert!(error.contains("no-such-folder"), "{error}");
}

#[test]
fn a_killed_bench_leaves_the_figures_up_to_that_moment() {
    let path = folder("killed").join("figures.jsonl");
    let long = ["bench", "--quick", "--only", "gather", "--rounds", "5000", "--json-lines"];
    let mut command = forebay(&[&long[..], &[path.to_str().unwrap()]].concat());
    let mut run = command.stdout(Stdio::null()).spawn().unwrap();
    until_figures(&path, &mut run);
    run.kill().unwrap();
    run.wait().unwrap();
    let found = lines(&path);
    assert!(found.len() >= 3 && found[1]["group"] == "gather", "{found:?}");
}

/// The script with the command next to it, as in the bundle, on the driver in `driver`.
fn script(bundle: &Path, driver: &Path, arguments: &[&str]) -> Command {
    fs::create_dir_all(bundle.join("bin")).unwrap();
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/gpu/run.sh"), bundle.join("run.sh")).unwrap();
    drop(symlink(env!("CARGO_BIN_EXE_forebay"), bundle.join("bin/forebay")));
    fs::write(bundle.join("commit"), "a test's\n").unwrap();
    let mut command = Command::new("bash");
    command.arg(bundle.join("run.sh")).args(arguments).current_dir(bundle).stdin(Stdio::null());
    command.env("FOREBAY_GPU_QUICK", "1").env("LD_LIBRARY_PATH", driver).env("LC_ALL", "C");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the lines of a plan, and its status.
fn plan(minutes: &str, call: &str) -> (Option<i32>, Vec<String>) {
    let bundle = folder(&format!("plan-{minutes}-{call}"));
    let output = script(&bundle, &bundle, &["plan", minutes, call]).output().unwrap();
    (output.status.code(), text(&output.stdout).lines().map(str::to_owned).collect())
}

#[test]
fn the_plan_assigns_every_part_to_a_call_with_enough_time() {
    let (status, planned) = plan("45", "9.5");
    assert_eq!(status, Some(0), "{planned:?}");
    let mut parts = Vec::new();
    let mut room = 0.0;
    for call in planned.iter().filter(|line| line.starts_with("call ")) {
        let (numbers, command) = call.split_once("./run.sh ").unwrap();
        let words: Vec<&str> = command.split(' ').collect();
        parts.extend(words[0].split(',').map(str::to_owned));
        let seconds: f64 = words[2].parse().unwrap();
        let numbers: Vec<f64> = numbers.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(numbers[0] <= seconds && seconds < 570.0, "{call}");
        room += seconds;
    }
    assert!(room < 2700.0, "{planned:?}");
    // The most informative calls come first, and tests after the figures.
    let first = ["smoke", "doctor", "rows", "fetch", "step", "resolve", "nodes", "pools"];
    assert_eq!(parts[..8], first, "{planned:?}");
    for part in ["step-ways", "ncu", "tests", "python", "sanitizer"] {
        assert!(parts.iter().any(|one| one == part), "{part}: {planned:?}");
    }
    let left_out = |minutes, call| {
        let lines = plan(minutes, call).1;
        lines.into_iter().find(|line| line.starts_with("no time for:")).unwrap_or_default()
    };
    assert!(left_out("20", "5").contains(" python "), "it names the part that does not fit");
    assert!(left_out("600", "60").is_empty(), "with enough time every part has a call");
    assert_eq!(plan("0", "5").0, Some(2), "no part fits into zero minutes");
    assert_eq!(plan("45", "x").0, Some(2));
}

#[test]
fn a_machine_without_a_gpu_prints_one_line_and_no_results() {
    let bundle = folder("no-gpu");
    let run = |arguments: &[&str]| -> Output {
        // The driver loads but shows no device.
        script(&bundle, &bundle, arguments).env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()
    };
    let output = run(&["all", "results"]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{said}");
    assert!(said.starts_with("error: no GPU that forebay can use") && said.lines().count() == 1, "{said}");
    assert!(!bundle.join("results").exists());
    let output = run(&["rows,sows", "results"]);
    assert!(text(&output.stderr).contains("no part is called sows"));
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn a_run_that_is_ended_keeps_its_figures_and_reports_the_end() {
    let Some(driver) = Standin::new(Options::default()) else {
        return skip::skip("g++, which builds the stand-in driver");
    };
    let bundle = folder("ended");
    fs::copy(driver.library(), bundle.join("libcuda.so.1")).unwrap();
    let mut command = script(&bundle, &bundle, &["rows,nodes", "results"]);
    let mut run = command.env("FOREBAY_GPU_ROUNDS", "600").stdout(Stdio::null()).spawn().unwrap();
    let results = bundle.join("results");
    until_figures(&results.join("figures.jsonl.part"), &mut run);
    let ended = Command::new("kill").arg(run.id().to_string()).status().unwrap();
    assert!(ended.success());
    assert_eq!(run.wait().unwrap().code(), Some(2));
    let found = lines(&results.join("figures.jsonl"));
    assert_eq!(
        (&found[0]["kind"], &found[0]["options"]),
        (&"run".into(), &"--only gather --rounds 600".into())
    );
    assert!(found.len() >= 4 && found[2]["group"] == "gather", "{found:?}");
    assert!(!results.join("figures.jsonl.part").exists());
    let summary = fs::read_to_string(results.join("summary.txt")).unwrap();
    assert!(summary.contains("rows: interrupted") && !summary.contains("nodes: "), "{summary}");
    assert!(summary.ends_with(&format!("is in {}\n", results.display())), "{summary}");
    // The next call continues there.
    let output = script(&bundle, &bundle, &["nodes", "results"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert!(lines(&results.join("figures.jsonl")).len() > found.len() + 6);
}
