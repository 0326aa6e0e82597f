//! Tests of `forebay bench`: every group on the host and on the stand-in driver, its output files, and its errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/skip.rs"]
mod skip;

use std::path::PathBuf;
use std::process::Stdio;

use command::{refuses, succeeds};
use forebay_standin::{Options, Standin};
use serde_json::Value;

/// All groups except the captured step, which has its own tests.
const GROUPS: [&str; 10] =
    ["gather", "scatter", "resolve", "resolve-gather", "commit", "warm-up", "nodes", "pages", "pull", "ring"];

fn all() -> String {
    GROUPS.join(",")
}

/// The entries of a quick run.
fn entries(more: &[&str]) -> Vec<Value> {
    let text = succeeds(&[&["bench", "--quick", "--json", "-"], more].concat());
    serde_json::from_str::<Vec<Value>>(&text).unwrap()
}

/// Every run writes the device first, then complete figures of every group.
fn check(entries: &[Value], device: &str) {
    let (first, figures) = entries.split_first().unwrap();
    assert_eq!((&first["kind"], &first["device"]), (&"bench-device".into(), &device.into()));
    for ceiling in ["copy_up", "copy_down", "both_up", "both_down", "read", "write", "memory", "launch_us"] {
        assert!(first["ceilings"][ceiling].as_f64().unwrap() > 0.0, "{ceiling}");
    }
    assert!(!first["name"].as_str().unwrap().is_empty() && first["processors"].as_u64().unwrap() > 0);
    for group in GROUPS {
        assert!(figures.iter().any(|figure| figure["group"] == group), "{group}");
    }
    for figure in figures {
        assert_eq!(
            (&figure["kind"], &figure["schema"], &figure["device"]),
            (&"bench".into(), &2.into(), &device.into())
        );
        let number = |key: &str| figure[key].as_f64().unwrap_or_else(|| panic!("{key}: {figure}"));
        assert!(number("us_low") <= number("us") && number("us") <= number("us_high"), "{figure}");
        assert!(number("us_high") > 0.0 && number("ceiling_us") > 0.0 && number("checked") > 0.0, "{figure}");
        let fraction = number("ceiling_us") / number("us");
        assert!((number("fraction") - fraction).abs() <= 1e-9 * fraction, "{figure}");
        if let Some(bytes) = figure["bytes"].as_f64() {
            assert!((number("gb_s") - bytes / number("us") / 1e3).abs() < 1e-6, "{figure}");
        }
        assert_eq!(figure.get("target").is_some(), figure.get("met").is_some());
        assert!(figure["parameters"].as_object().is_some_and(|named| !named.is_empty()), "{figure}");
        assert!(figure["beside"].is_object() && figure["ceiling"].is_string(), "{figure}");
    }
}

#[test]
fn every_group_is_measured_on_the_host_and_agrees_with_the_rule() {
    let entries = entries(&["--only", &all()]);
    check(&entries, "host");
    // The host has no targets.
    assert!(entries.iter().all(|entry| entry.get("target").is_none()));
    let calls = |batch| (batch, 1, "calls".to_owned());
    assert_eq!(nodes(&entries), [calls(1), calls(4)], "a host has no graphs");
    let ways = |entry: &&Value| entry["beside"].get("packed on the host").is_some();
    assert!(entries.iter().filter(ways).count() >= 2, "packed rows and unpacked ones");
}

#[test]
fn the_share_of_misses_is_the_requested_one() {
    let entries = entries(&["--only", "resolve", "--rounds", "1"]);
    let mut shares = Vec::new();
    for figure in &entries[1..] {
        let named = |key: &str| figure["parameters"][key].as_f64().unwrap();
        let share = named("misses");
        let of_a_lane = (named("k") * named("query_rows") * share).round();
        assert_eq!(named("missed_rows"), named("batch") * of_a_lane, "{figure}");
        shares.push(share);
    }
    for share in [0.067, 0.134, 0.3] {
        assert!(shares.contains(&share), "{share}");
    }
}

/// Parameters of the node figures: batch, streams, and how the nodes were enqueued. Each layer has three nodes.
fn nodes(entries: &[Value]) -> Vec<(u64, u64, String)> {
    let of = |figure: &&Value| figure["group"] == "nodes";
    let parameters_of = |figure: &Value| {
        let number = |name: &str| figure["parameters"][name].as_u64().unwrap();
        assert_eq!(number("nodes"), 3 * number("layers"), "{figure}");
        assert_eq!(figure["checked"], number("batch") * 64, "every slot of a batch row: {figure}");
        assert!(figure["beside"]["the host's launch"].as_f64().unwrap() > 0.0, "{figure}");
        let enqueued = figure["parameters"]["enqueued"].as_str().unwrap().to_owned();
        (number("batch"), number("streams"), enqueued)
    };
    entries.iter().filter(of).map(parameters_of).collect()
}

/// A driver's library for the command to load; `None` without a C++ compiler, after a message that the test skips.
fn driver() -> Option<Standin> {
    let standin = Standin::new(Options::default());
    if standin.is_none() {
        skip::skip("g++, which builds the stand-in driver");
    }
    standin
}

#[test]
fn every_group_is_measured_on_a_gpu_and_agrees_with_the_rule() {
    let Some(driver) = driver() else { return };
    let of_gpu = ["--device", "cuda:0", "--driver", driver.library(), "--only", &all(), "--rounds", "1"];
    let found = entries(&of_gpu);
    check(&found, "cuda:0");
    let graph = |batch, streams| (batch, streams, "graph".to_owned());
    assert_eq!(nodes(&found), [graph(1, 1), graph(1, 3), graph(4, 1), graph(4, 3)]);
    // The tuning is used, and written to the output.
    let plain = serde_json::json!({
        "pinned": "registered", "bulk": false, "programmatic": false, "persistent": false
    });
    assert_eq!(found[0]["options"], plain);
    let tuned = [&of_gpu[..5], &["gather", "--gather-blocks", "2", "--threads", "64", "--bulk"]].concat();
    let tuned = entries(&tuned);
    let options = &tuned[0]["options"];
    let used = (&options["gather_blocks"], &options["threads"], &options["bulk"]);
    assert_eq!(used, (&2.into(), &64.into(), &true.into()), "{options}");
    // Bulk copies load no rows by warps.
    assert!(tuned.len() > 1 && tuned[1..].iter().all(|figure| figure.get("link").is_none()));
}

/// The figures of pages: the ways of each call, by its other parameters.
fn ways(entries: &[Value]) -> std::collections::BTreeMap<String, Vec<String>> {
    let mut ways = std::collections::BTreeMap::<String, Vec<String>>::new();
    for figure in &entries[1..] {
        let mut named = figure["parameters"].as_object().unwrap().clone();
        let number = |name: &str| named[name].as_u64().unwrap();
        let bytes = number("piece") * number("planes") * number("pages");
        assert_eq!((&figure["bytes"], &figure["checked"]), (&bytes.into(), &(bytes / 8).into()), "{figure}");
        assert!(figure["beside"]["memcpy"].as_f64().unwrap() > 0.0, "{figure}");
        let way = named.remove("way").unwrap().as_str().unwrap().to_owned();
        ways.entry(format!("{} {named:?}", figure["name"])).or_default().push(way);
    }
    ways
}

#[test]
fn pages_are_copied_each_way_that_a_device_has() {
    let only = ["--only", "pages", "--rounds", "1"];
    // Two directions, three kinds of places, two numbers of planes, three pieces.
    let host = ways(&entries(&only));
    assert!(host.len() == 36 && host.values().all(|ways| ways == &["host"]), "{host:?}");
    let Some(driver) = driver() else { return };
    let gpu = [&["--device", "cuda:0", "--driver", driver.library()], &only[..]].concat();
    let found = ways(&entries(&gpu));
    assert_eq!(found.keys().collect::<Vec<_>>(), host.keys().collect::<Vec<_>>());
    assert!(found.values().all(|ways| ways == &["copy engine", "one by one", "kernel"]), "{found:?}");
    // The text alone says where they cross.
    let text = succeeds(&[&["bench", "--quick"], &gpu[..]].concat());
    let lines =
        text.lines().skip_while(|line| !line.starts_with("Pieces of pages that the copy engine")).skip(1);
    let lines: Vec<&str> = lines.take_while(|line| line.starts_with("  to the ")).collect();
    assert_eq!(lines.len(), 12, "{text}");
}

#[test]
fn a_profiler_can_isolate_one_gather_or_one_resolve() {
    let found = entries(&["--only", "gather,resolve", "--rows", "100", "--batch", "2"]);
    let [_, gather, resolve] = &found[..] else { panic!("{found:?}") };
    let named = |figure: &Value, keys: &[&str]| -> Vec<Value> {
        keys.iter().map(|key| figure["parameters"][key].clone()).collect()
    };
    assert_eq!(named(gather, &["rows", "row_bytes", "stride"]), [100, 656, 704]);
    assert!(gather["beside"].get("packed on the host").is_none(), "{gather}");
    // Two calls warm up and three are timed: each row, and each lane's report, slots and digest.
    assert_eq!(named(resolve, &["batch", "query_rows", "budget"]), [2, 1, 160]);
    assert_eq!(resolve["parameters"]["misses"], 0.134);
}

#[test]
fn rows_come_from_the_requested_memory_and_every_figure_reports_its_size() {
    let more = ["--only", "gather,scatter,resolve-gather,warm-up", "--rounds", "1", "--pool", "6MiB"];
    let entries = entries(&more);
    for figure in &entries[1..] {
        assert_eq!(figure["parameters"]["pool"], 6 << 20, "{figure}");
    }
    let table = succeeds(&["bench", "--quick", "--only", "scatter", "--rounds", "1"]);
    assert!(table.contains("; pool: 4.00 MiB)"), "{table}");
}

/// Requests on the link by a GPU's row figures: computed from the shape, and estimated from the times.
#[test]
fn row_figures_report_their_requests_on_the_gpus_link() {
    let Some(driver) = driver() else { return };
    let more =
        ["--device", "cuda:0", "--driver", driver.library(), "--only", "gather,scatter", "--rounds", "1"];
    let entries = entries(&more);
    for figure in &entries[1..] {
        let number = |of: &Value, name: &str| of[name].as_f64().unwrap_or_else(|| panic!("{name}: {figure}"));
        let (link, named) = (&figure["link"], &figure["parameters"]);
        let asks = if named["row_bytes"] == 656 { (6.0, 672.0) } else { (9.0, 1152.0) };
        assert_eq!((number(link, "requests_a_row"), number(link, "sector_bytes_a_row")), asks, "{figure}");
        let lines = number(link, "requests_s") * number(figure, "us") / 1e6;
        assert!((lines / (number(named, "rows") * asks.0) - 1.0).abs() < 1e-6, "{figure}");
        let (lines, sectors) = (number(link, "of_requests"), number(link, "of_sectors"));
        assert!(lines > 0.0 && sectors > 0.0 && lines + 1e-9 >= sectors, "{figure}");
        assert!(
            (number(link, "requests_ceiling_s") * 128e-9 / number(link, "ceiling_gb_s") - 1.0).abs() < 1e-6
        );
    }
    let all = [&["bench", "--quick"], &more[..]].concat();
    let table = succeeds(&all);
    assert!(table.contains("lines a row") && table.contains("Of lines, of sectors"), "{table}");
}

#[test]
fn options_that_a_gpu_lacks_are_refused() {
    let Some(driver) = driver() else { return };
    let on = |device: &str, more: &[&str]| {
        let all = ["bench", "--quick", "--only", "gather", "--device", device, "--driver", driver.library()];
        refuses(&[&all[..], more].concat())
    };
    let error = on("cuda:7", &[]);
    assert!(error.contains("no such device") && error.contains("devices 1"), "{error}");
    let error = on("cuda:0", &["--threads", "100"]);
    assert!(error.contains("threads") && error.contains("multiple of 32"), "{error}");
}

#[test]
fn bad_input_is_one_error_that_names_the_input() {
    let refused = |more: &[&str]| refuses(&[&["bench", "--quick"], more].concat());
    let error = refused(&["--only", "gather,gaather"]);
    assert!(error.contains("gaather") && error.contains("--only"), "{error}");
    for (more, parts) in [
        (&["--rounds", "0"][..], &["--rounds", "0"][..]),
        (&["--rounds", "-1"], &["--rounds"]),
        (&["--gather-blocks", "0"], &["--gather-blocks"]),
        (&["--threads", "8"], &["--threads"]),
        (&["--device", "gpu"], &["--device", "cuda:0"]),
        (&["--gather-blocks", "8"], &["--gather-blocks", "--device cuda:N"]),
        (&["--pool", "64"], &["--pool", "80GiB"]),
        (&["--pool", "0"], &["--pool"]),
        // More than any machine has: refused before any memory is taken.
        (&["--pool", "900000TiB"], &["--pool", "exceeds", "free"]),
        (&["--pool", "1MiB"], &["--pool", "less than", "least 4194304"]),
        (&["--threads", "64"], &["--threads", "--device cuda:N"]),
        (&["--bulk"], &["--bulk", "--device cuda:N"]),
        (&["--persistent", "--leave-sms", "4"], &["--leave-sms", "--device cuda:N"]),
        (&["--persistent"], &["--persistent", "--device cuda:N"]),
        (&["--persistent", "--device", "cuda:0", "--only", "gather"], &["--persistent", "--only"]),
        (&["--rows", "64", "--only", "scatter"], &["--rows", "--only"]),
        (&["--rows", "257", "--only", "gather"], &["--rows", "most 256"]),
        (&["--batch", "2", "--only", "gather"], &["--batch", "--only"]),
        (&["--programmatic"], &["--programmatic", "--device cuda:N"]),
        (&["--driver", "libc.so.6"], &["--driver", "--device cuda:N"]),
        (
            &["--device", "cuda:0", "--driver", "no-such-folder/libcuda.so.1"],
            &["no-such-folder", "CUDA driver"],
        ),
        (&["--json", "a.json", "--picture", "a.json"], &["--json", "--picture", "same file"]),
        (&["--only", "commit", "--json", "no-such-folder/a.json"], &["no-such-folder/a.json"]),
        (&["--only", "commit", "--picture", "no-such-folder/a.svg"], &["no-such-folder/a.svg"]),
    ] {
        let error = refused(more);
        assert!(parts.iter().all(|part| error.contains(part)), "{more:?}: {error}");
    }
}

/// The path of a file for this test only.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn tables_and_the_picture_name_what_was_measured() {
    let path = file("bench.svg");
    let table = succeeds(&["bench", "--quick", "--picture", path.to_str().unwrap(), "--only", &all()]);
    assert!(table.is_ascii(), "{table}");
    for part in GROUPS.iter().chain(&[
        "Ceilings: ",
        "of ceiling",
        "copy engine",
        "quartiles",
        "with the rule, and equal",
    ]) {
        assert!(table.contains(part), "{part}: {table}");
    }
    let picture = std::fs::read_to_string(&path).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("xmlns=\"http://www.w3.org/2000/svg\""));
    assert!(picture.contains("prefers-color-scheme: dark") && picture.trim_end().ends_with("</svg>"));
    for part in GROUPS.iter().chain(&["packed on the host", "rows of a call", "copy engine"]) {
        assert!(picture.contains(part), "{part}");
    }
    // One group gives a picture too, and a picture alone goes to standard output.
    let alone = succeeds(&["bench", "--quick", "--picture", "-", "--only", "scatter"]);
    assert!(alone.starts_with("<svg ") && !alone.contains("Ceilings: \n"));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut child = command::forebay(&["bench", "--quick", "--only", "scatter", "--rounds", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

#[test]
fn rows_are_in_driver_allocated_memory_on_request() {
    let Some(driver) = driver() else { return };
    let of = |pinned: &str| {
        let of_gpu = ["--device", "cuda:0", "--driver", driver.library(), "--rounds", "1", "--only"];
        entries(&[&of_gpu[..], &["gather,scatter", "--pinned", pinned]].concat())
    };
    // Every row is compared with its stored bytes.
    for pinned in ["registered", "driver"] {
        let figures = of(pinned);
        assert!(figures.len() > 2 && figures[1..].iter().all(|figure| figure["checked"].as_u64() > Some(0)));
        assert_eq!(figures[0]["options"]["pinned"], pinned);
    }
    let text = refuses(&["bench", "--quick", "--pinned", "driver"]);
    assert!(text.contains("--pinned") && text.contains("--device cuda:N"), "{text}");
}
