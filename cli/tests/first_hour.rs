//! The first hour with the command: what it prints fits a terminal, and what it refuses it refuses in the words of who
//! asked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{forebay, refuses, succeeds};

/// The trace of the repository, as a path that is short in any checkout.
const TRACE: &str = "../data/demo.topk.zst";

/// A file of this name and text, for this test program alone.
fn file(name: &str, text: &str) -> String {
    let path = format!("{}/{name}", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&path, text).unwrap();
    path
}

/// A small request trace of Mooncake's.
fn requests() -> String {
    let line = |time: u32, ids: &str| {
        format!("{{\"timestamp\":{time},\"input_length\":1000,\"output_length\":10,\"hash_ids\":[{ids}]}}\n")
    };
    file("first_hour.jsonl", &[line(0, "1,2"), line(10, "1,3"), line(20, "1,2")].concat())
}

/// Every line that is wider than the terminal, but for a word that is as long by itself.
fn too_wide(text: &str) -> Vec<&str> {
    let long = |line: &&str| line.chars().count() > 80 && line.trim().contains(' ');
    text.lines().filter(long).collect()
}

fn calls(requests: &str) -> Vec<Vec<&str>> {
    const SETUP: [&str; 6] = ["--setup", "ess", "--context", "32K", "--accept", "1.7"];
    let plan = [&["plan"], &SETUP[..], &["--gpu", "80GiB", "--mtp", "2"]].concat();
    let simulate =
        [&["simulate"], &SETUP[..], &["--batch", "64,160", "--ratio", "0.21", "--mtp", "2"]].concat();
    let sizes = ["--prompt-share", "0.2,0.3,0.4,0.5,0.6,0.7"];
    let rates = "pcie4,pcie5,pcie6,c2c";
    vec![
        vec!["replay", TRACE, "--mtp", "2"],
        [&["replay", TRACE], &sizes[..]].concat(),
        vec!["replay", TRACE, "--policy", "lru,decay-tokens,belady", "--prompt-share", "0.2"],
        vec!["replay", TRACE, "--split", "by-layer", "--prefetch", "inter-layer"],
        vec!["replay", TRACE, "--curve"],
        vec!["replay", requests],
        vec!["replay", requests, "--policy", "lru,belady", "--capacity", "1,2"],
        vec!["replay", requests, "--curve"],
        vec![
            "plan",
            "--gpu",
            "141GB",
            "--weights",
            "38GB",
            "--context",
            "32K",
            "--batch",
            "64,96",
            "--mtp",
            "2",
        ],
        [&plan[..], &["--link", rates]].concat(),
        [&plan[..], &["--batch", "16,160"]].concat(),
        simulate.clone(),
        [&simulate[..], &["--link", rates, "--overlap", "da"]].concat(),
        vec!["fit", "../data/setups/ess-measurements.json"],
        vec!["bench", "--quick", "--only", "gather,resolve-gather,commit"],
        vec!["doctor", "--device", "host", "--no-rates"],
    ]
}

#[test]
fn nothing_that_is_printed_is_wider_than_a_terminal() {
    let requests = requests();
    for call in calls(&requests) {
        let output = forebay(&call).env("LC_ALL", "C.UTF-8").env("NO_COLOR", "1").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!text.is_empty() && errors.is_empty(), "{call:?}: {errors}");
        assert_eq!(too_wide(&text), [""; 0], "{call:?}\n{text}");
    }
}

#[test]
fn helps_are_no_wider_than_a_terminal() {
    for command in ["", "replay", "plan", "simulate", "fit", "bench", "doctor", "completions"] {
        for help in ["--help", "-h"] {
            let call: Vec<&str> = [command, help].into_iter().filter(|word| !word.is_empty()).collect();
            let text = succeeds(&call);
            assert_eq!(too_wide(&text), [""; 0], "{call:?}\n{text}");
        }
    }
}

#[test]
fn what_does_not_fit_is_named_and_wide_shows_it() {
    let call = ["replay", TRACE, "--mtp", "2"];
    let (narrow, wide) = (succeeds(&call), succeeds(&[&call[..], &["--wide"]].concat()));
    assert!(narrow.contains("Left out, for 80 columns: to host a step. --wide shows all.\n"), "{narrow}");
    assert!(wide.contains("to host") && !wide.contains("Left out"), "{wide}");
    assert!(wide.lines().any(|line| line.contains("to device   to host")), "{wide}");
}

#[test]
fn nothing_at_all_is_refused_and_numbers_stand_as_they_were_given() {
    for (call, parts) in [
        (&["replay", TRACE, "--slots", "0"][..], &["'0'", "--slots", "from 1 to"][..]),
        (&["replay", TRACE, "--prompt-share", "0.0"], &["'0.0'", "--prompt-share", "above 0"]),
        (&["replay", TRACE, "--slots", "-7"], &["'-7'", "--slots", "from 1 to"]),
        (&["plan", "--gpu", "80GiB", "--context", "32K", "--ratio", "0.0"], &["'0.0'", "above 0"]),
        (&["plan", "--gpu", "80GiB", "--context", "32K", "--batch", "-7"], &["'-7'", "--batch"]),
    ] {
        let error = refuses(call);
        assert!(parts.iter().all(|part| error.contains(part)), "{call:?}: {error}");
    }
}

#[test]
fn a_file_of_another_kind_is_called_what_it_is_and_sent_where_it_belongs() {
    let (setup, measurements) = ("../data/setups/ess.json", "../data/setups/ess-measurements.json");
    let (requests, page) = (requests(), file("page.html", "<!DOCTYPE html>\n<html></html>\n"));
    let results = file("results.json", &succeeds(&["replay", TRACE, "--slots", "1024", "--json", "-"]));
    let plan = ["plan", "--setup", "ess", "--gpu", "80GiB", "--context", "32K"];
    for (call, is, goes) in [
        (vec!["replay", setup], "a setup", "--setup"),
        (vec!["replay", measurements], "measurements", "forebay fit"),
        (vec!["replay", &page], "an HTML page", "browser"),
        (vec!["replay", &results], "results that forebay wrote", "--json"),
        (vec!["fit", setup], "a setup", "forebay plan"),
        (vec!["fit", TRACE], "a selection trace", "forebay replay"),
        (
            vec!["plan", "--gpu", "80GiB", "--context", "32K", "--setup", TRACE],
            "a selection trace",
            "forebay replay",
        ),
        ([&plan[..], &["--trace", &requests]].concat(), "a request trace", "forebay replay"),
        ([&plan[..], &["--misses", measurements]].concat(), "measurements", "forebay fit"),
    ] {
        let error = refuses(&call);
        assert!(error.contains(&format!(" is {is}")) && error.contains(goes), "{call:?}: {error}");
        assert!(error.contains("is wanted"), "{call:?}: {error}");
    }
}

#[test]
fn what_was_probably_meant_is_named() {
    for (call, meant) in [
        (&["replay", TRACE, "--prompt-shaer", "0.1"][..], "'--prompt-share'"),
        (&["replay", TRACE, "--policy", "belad"], "'belady'"),
        (&["repaly", TRACE], "'replay'"),
    ] {
        let error = refuses(call);
        assert!(error.contains("similar") && error.contains(meant), "{call:?}: {error}");
    }
}
