//! Tests of a user's first hour with the command: its output fits a terminal, and its errors use the user's own words.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{forebay, refuses, succeeds};

/// The repository's trace, by a path that is short in any checkout.
const TRACE: &str = "../data/demo.topk.zst";

/// A file with this name and text, for this test program only.
fn file(name: &str, text: &str) -> String {
    let path = format!("{}/{name}", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&path, text).unwrap();
    path
}

/// A small request trace in Mooncake's format.
fn requests() -> String {
    let line = |time: u32, ids: &str| {
        format!("{{\"timestamp\":{time},\"input_length\":1000,\"output_length\":10,\"hash_ids\":[{ids}]}}\n")
    };
    file("first_hour.jsonl", &[line(0, "1,2"), line(10, "1,3"), line(20, "1,2")].concat())
}

/// Every line that is wider than the terminal, except a single word that is that long.
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
        vec!["transfer", "demo", "--layers", "4", "--tokens", "200"],
    ]
}

#[test]
fn no_output_is_wider_than_a_terminal() {
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
fn help_texts_are_no_wider_than_a_terminal() {
    for command in ["", "replay", "plan", "simulate", "fit", "bench", "doctor", "transfer", "completions"] {
        for help in ["--help", "-h"] {
            let call: Vec<&str> = [command, help].into_iter().filter(|word| !word.is_empty()).collect();
            let text = succeeds(&call);
            assert_eq!(too_wide(&text), [""; 0], "{call:?}\n{text}");
        }
    }
}

#[test]
fn columns_that_do_not_fit_are_named_and_wide_shows_them() {
    let call = ["replay", TRACE, "--mtp", "2"];
    let (narrow, wide) = (succeeds(&call), succeeds(&[&call[..], &["--wide"]].concat()));
    assert!(
        narrow.contains("Not shown, to fit 80 columns: \"to host per step\". --wide shows all.\n"),
        "{narrow}"
    );
    assert!(wide.contains("to host") && !wide.contains("Not shown"), "{wide}");
    assert!(wide.lines().any(|line| line.contains("to device   to host")), "{wide}");
}

#[test]
fn zero_is_refused_and_numbers_are_quoted_as_given() {
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
fn a_file_of_another_kind_is_identified_and_its_command_named() {
    let (setup, measurements) = ("../data/setups/ess.json", "../data/setups/ess-measurements.json");
    let (requests, page) = (requests(), file("page.html", "<!DOCTYPE html>\n<html></html>\n"));
    let results = file("results.json", &succeeds(&["replay", TRACE, "--slots", "1024", "--json", "-"]));
    let plan = ["plan", "--setup", "ess", "--gpu", "80GiB", "--context", "32K"];
    for (call, is, use_for) in [
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
        assert!(error.contains(&format!(" is {is}")) && error.contains(use_for), "{call:?}: {error}");
        assert!(error.contains("is wanted"), "{call:?}: {error}");
    }
}

#[test]
fn errors_suggest_the_probable_name() {
    for (call, meant) in [
        (&["replay", TRACE, "--prompt-shaer", "0.1"][..], "'--prompt-share'"),
        (&["replay", TRACE, "--policy", "belad"], "'belady'"),
        (&["repaly", TRACE], "'replay'"),
    ] {
        let error = refuses(call);
        assert!(error.contains("similar") && error.contains(meant), "{call:?}: {error}");
    }
}

/// Words that follow a 1 and end like a plural: `1 layers`.
fn plurals_of_one(text: &str) -> Vec<String> {
    // Verbs after a number that is a name: layer 1 misses.
    const VERBS: [&str; 6] = ["is", "has", "was", "as", "misses", "gets"];
    let words = |line: &str| -> Vec<String> { line.split(' ').map(str::to_owned).collect() };
    let plain = |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric() && c != '-').to_owned();
    let mut found = Vec::new();
    for line in text.split(['\n', '<', '>', ',', ';', ':', '"']) {
        for [one, thing] in words(line).array_windows() {
            let thing = plain(thing);
            let counts = one.trim_matches(['(', '+']) == "1";
            if counts && thing.ends_with('s') && !thing.ends_with("ss") && !VERBS.contains(&thing.as_str()) {
                found.push(format!("1 {thing} in: {line}"));
            }
        }
    }
    found
}

#[test]
fn a_count_of_one_has_no_plural() {
    assert_eq!(plurals_of_one("layer 1 misses; 1 layer, (1 sessions)\n11 rows").len(), 1, "the control");
    let line = |ids: &str| {
        format!("{{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[{ids}]}}\n")
    };
    let request = file("one_request.jsonl", &line("7"));
    let session = file(
        "one_session.jsonl",
        "{\"block_size\":1,\"requests\":[{\"t\":0,\"in\":1,\"out\":1,\"hash_ids\":[1]},\
         {\"t\":1,\"requests\":[{\"t\":1,\"in\":1,\"out\":1,\"hash_ids\":[1]}]}]}\n",
    );
    let header =
        r#"{"layers":1,"k":1,"steps":2,"warm_steps":1,"first_position":1,"decode_start":2,"context":3}"#;
    let mut bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    bytes.extend([1, 0, 0, 0, 0, 0, 0, 0, 0]);
    let trace = format!("{}/one_of_each.topk", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&trace, bytes).unwrap();
    let one = ["--setup", "ess", "--context", "32K", "--batch", "1", "--ratio", "0.2", "--mtp", "1"];
    for call in [
        vec!["replay", &request],
        vec!["replay", &request, "--html", "-"],
        vec!["replay", &session],
        vec!["replay", &session, "--html", "-"],
        vec!["replay", &session, "--subagents", "--capacity", "1"],
        vec!["replay", &trace, "--slots", "1"],
        vec!["replay", &trace, "--slots", "1", "--curve"],
        vec!["replay", &trace, "--slots", "1", "--html", "-"],
        vec!["replay", &trace, "--slots", "1", "--split", "by-layer", "--prefetch", "inter-layer"],
        [&["simulate"], &one[..]].concat(),
        [&["simulate"], &one[..], &["--trace", &trace]].concat(),
        [&["simulate"], &one[..], &["--html", "-"]].concat(),
        [&["plan", "--gpu", "141GB"], &one[..]].concat(),
        [&["plan", "--gpu", "141GB"], &one[..], &["--html", "-"]].concat(),
        vec!["plan", "--gpu", "141GB", "--weights", "38GB", "--context", "32K", "--batch", "1"],
        vec!["fit", "../data/setups/ess-measurements.json"],
        vec!["bench", "--quick", "--only", "commit", "--rounds", "1"],
        vec!["doctor", "--device", "host", "--no-rates"],
    ] {
        let output = forebay(&call).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert!(text.contains('1'), "{call:?} said nothing: {text}");
        assert_eq!(plurals_of_one(&text), [""; 0], "{call:?}");
    }
    assert!(
        succeeds(&["replay", &session])
            .contains("\n1 session with its own block ids; 1 sub-agent with 1 request of")
    );
}

#[test]
fn completions_list_the_built_in_setups() {
    for shell in ["bash", "zsh", "fish"] {
        let script = succeeds(&["completions", shell]);
        for setup in forebay::predict::setup::Setup::names() {
            // fish has each further name on a line of its own.
            let further = |line: &str| line.starts_with(&format!("{setup}\\t"));
            let asked = |line: &&str| line.contains("setup") || line.contains("compgen") || further(line);
            let asked = script.lines().filter(asked);
            assert!(asked.clone().any(|line| line.contains(setup)), "{shell}: no {setup}");
        }
    }
    // An explicit file name is still allowed.
    assert!(
        refuses(&["plan", "--gpu", "141GB", "--setup", "none.json", "--context", "32K"])
            .contains("none.json")
    );
}

#[test]
fn an_error_gives_the_rule_of_its_number() {
    for threads in ["33", "0", "1024", "-32"] {
        let error = refuses(&["bench", "--threads", threads]);
        assert!(error.contains("not a multiple of 32 from 32 to 512"), "{error}");
    }
}
