//! Tests of `forebay simulate --shard`, run as its users run it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::{Path, PathBuf};

use command::{refuses, succeeds};
use serde_json::{Value, json};

const POINT: &str = "simulate --setup ess --context 32K --mtp 2 --accept 1.7 --batch 128 --ratio 0.31";

fn run(options: &str) -> String {
    succeeds(&format!("{POINT} {options}").split_whitespace().collect::<Vec<_>>())
}

fn entry(options: &str) -> Value {
    let entries: Vec<Value> = serde_json::from_str(&run(&format!("{options} --json -"))).unwrap();
    entries.into_iter().next().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

/// A file for these tests only.
fn file(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("simulate-pulls");
    fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

/// The built-in setup with a field changed, as a file.
fn changed(name: &str, pointer: &str, value: Value) -> String {
    let ess = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/setups/ess.json");
    let mut setup: Value = serde_json::from_str(&fs::read_to_string(ess).unwrap()).unwrap();
    *setup.pointer_mut(pointer).unwrap() = value;
    fs::write(file(name), setup.to_string()).unwrap();
    file(name).to_str().unwrap().to_owned()
}

#[test]
fn an_entry_says_what_pulls_expose_and_all_else_is_as_without() {
    let (bare, mut sharded) = (entry(""), entry("--shard o_proj --dp 8"));
    assert!(bare.get("pulls").is_none() && bare["per_layer"][0].get("pulls_exposed_us").is_none());
    let pulls = sharded["pulls"].clone();
    assert_eq!((&pulls["shard"], &pulls["ranks"]), (&json!(["o_proj"]), &json!(8)));
    assert_eq!((&pulls["weights_from"], &pulls["sharded_layers"]), (&json!("peers"), &json!(60)));
    // 98 MiB of FP8 in pages of 2 MiB, at 305 GB/s, and the engine's own bytes before them.
    let alone_us = f64::from(98 << 20) / 305e3;
    assert!((alone_us..1.6 * alone_us).contains(&number(&pulls["pull_us"])), "{pulls}");
    let more = number(&pulls["exposed_ms"]) + number(&pulls["slower_ms"]);
    let step_ms = number(&bare["step_ms"]) + more;
    assert!((number(&sharded["step_ms"]) / step_ms - 1.0).abs() < 1e-9, "{pulls}");
    for field in ["exposed_ms", "wait_ms", "overlap", "misses"] {
        assert_eq!(sharded[field], bare[field], "{field}");
    }
    let of_layers: f64 = sharded["per_layer"].as_array_mut().unwrap().iter_mut().fold(0.0, |sum, layer| {
        sum + number(&layer.as_object_mut().unwrap().remove("pulls_exposed_us").unwrap())
    });
    assert_eq!(sharded["per_layer"], bare["per_layer"]);
    assert!(of_layers <= 1e3 * number(&pulls["exposed_ms"]) + 1e-6, "the rest is the wrap: {of_layers}");
    // Over a slow link each layer waits.
    let slow = entry("--shard o_proj --dp 8 --weights-from host")["pulls"].clone();
    assert_eq!(slow["weights_from"], "host");
    assert!(number(&slow["exposed_ms"]) > 20.0 + number(&pulls["exposed_ms"]), "{slow}");
}

#[test]
fn text_and_pictures_name_the_pulls() {
    let text = run("--shard mla --dp 8").replace('\n', " ");
    assert!(text.contains("Pulls: mla sharded over 8 ranks, from peers. The longest takes"), "{text}");
    assert!(text.contains("a graph that joins its last pulls"), "an assumption: {text}");
    assert!(!run("").contains("Pulls:"));
    let several = run("--shard mla --dp 8 --overlap none,da").replace('\n', " ");
    assert!(several.contains("A step waits at most"), "{several}");
    let picture = run("--shard mla --dp 8 --layer 17 --timeline -");
    for words in
        [">pull, buffer 0<", ">pull, buffer 1<", ">pull<", ">layer 19<", "ms for pulls", "mla sharded"]
    {
        assert!(picture.contains(words), "{words}");
    }
    assert!(!picture.contains("buffer 2") && !run("--timeline -").contains(">pull"));
    // Layers 16 to 18 are enlarged: three layers of 61, not those in which their pulls began.
    let hint = "pull, buffer 1, layer 19: ";
    assert_eq!(picture.matches(hint).count(), 2, "in the whole step and enlarged");
    assert_eq!(picture.matches("pull, buffer 1, layer 23: ").count(), 1, "in the whole step alone");
    let page = run("--shard mla --dp 8 --html -");
    assert!(page.contains("Pulls: mla sharded over 8 ranks") && page.contains(">pull, buffer 1<"));
    let trace: Value = serde_json::from_str(&run("--shard o_proj --dp 8 --perfetto -")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let lanes = events.iter().filter(|event| event["name"] == "thread_name");
    let lanes: Vec<&Value> = lanes.map(|event| &event["args"]["name"]).collect();
    assert!(["pull, buffer 0", "pull, buffer 1"].iter().all(|lane| lanes.iter().any(|own| own == lane)));
    let pulls = events.iter().filter(|event| event["name"].as_str().is_some_and(|n| n.starts_with("pull")));
    let layers: Vec<u64> = pulls.map(|event| event["args"]["layer"].as_u64().unwrap()).collect();
    assert_eq!(layers.len(), 60);
}

#[test]
fn misses_by_step_have_mean_pulls() {
    let rows = [50.0, 300.0].map(|each| vec![each; 61]);
    let steps = json!({"steps": {"query_rows": 2, "query_rows_power": 1, "rows": rows}});
    fs::write(file("steps.json"), steps.to_string()).unwrap();
    let misses = format!("--misses {} --overlap da", file("steps.json").display());
    let found = entry(&format!("{misses} --shard mla --dp 8"));
    assert_eq!(found["steps"]["count"], 2);
    let bare = number(&entry(&misses)["step_ms"]);
    let more = number(&found["pulls"]["exposed_ms"]) + number(&found["pulls"]["slower_ms"]);
    assert!((number(&found["step_ms"]) / (bare + more) - 1.0).abs() < 1e-9, "{found}");
}

#[test]
fn what_cannot_be_sharded_is_one_error() {
    let lone = changed("lone.json", "/deployment/nvlink_gb_s", Value::Null);
    let point = "--context 32K --mtp 2 --batch 128 --ratio 0.31";
    let cases = [
        ("--setup ess --shard o_proj".to_owned(), "--dp"),
        ("--setup ess --dp 8".to_owned(), "--shard"),
        ("--setup ess --weights-from host".to_owned(), "--shard"),
        ("--setup ess --shard o_proj --dp 0".to_owned(), "--dp"),
        ("--setup ess --shard o_proj --dp 8 --weights-from disk".to_owned(), "--weights-from"),
        ("--setup ess --model glm-5.2 --shard o_proj --dp 8".to_owned(), "--shard: no checkpoint"),
        ("--setup ess --shard o_proj --dp 64".to_owned(), "--dp: more ranks than GPUs"),
        ("--setup ess --shard o_proj --dp 16".to_owned(), "on one node of the setup"),
        ("--setup ess --shard nothing.* --dp 8".to_owned(), "matches no tensor"),
        ("--setup ess --shard [ --dp 8".to_owned(), "the pattern ["),
        (format!("--setup {lone} --shard o_proj --dp 8"), "deployment.nvlink_gb_s: missing"),
    ];
    for (options, named) in &cases {
        let all = format!("simulate {point} {options}");
        let error = refuses(&all.split_whitespace().collect::<Vec<_>>());
        assert!(error.contains(named), "{options}: {error}");
    }
    // From the host no neighbour is needed.
    let host = format!("simulate {point} --setup {lone} --shard o_proj --dp 8 --weights-from host");
    succeeds(&host.split_whitespace().collect::<Vec<_>>());
}
