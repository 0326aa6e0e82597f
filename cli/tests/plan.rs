//! `forebay plan`, run as its users run it: what it says fits, what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::Value;

/// Runs it, options as one text; answers the entries of its JSON.
fn plans(options: &str) -> Vec<Value> {
    let arguments: Vec<&str> = ["plan", "--json", "-"].into_iter().chain(options.split(' ')).collect();
    match serde_json::from_str(&succeeds(&arguments)).unwrap() {
        Value::Array(entries) => entries,
        other => panic!("no list: {other}"),
    }
}

fn column(entries: &[Value], field: &str) -> Vec<f64> {
    entries.iter().map(|entry| entry[field].as_f64().unwrap()).collect()
}

fn digits(ratios: Vec<f64>) -> Vec<f64> {
    ratios.into_iter().map(|ratio| (ratio * 100.0).round() / 100.0).collect()
}

#[test]
fn the_ratio_column_of_the_ess_study() {
    let budget = "--gpu 80GiB --mtp 2 --tables beside";
    let rows = plans(&format!("{budget} --context 32K --batch 52,64,96,128,160"));
    assert_eq!(digits(column(&rows, "ratio")), [1.0, 0.82, 0.48, 0.31, 0.21]);
    let rows = plans(&format!("{budget} --context 128K --batch 13,40,54"));
    assert_eq!(digits(column(&rows, "ratio")), [1.0, 0.21, 0.1]);
    for row in &rows {
        assert!(row["bytes"].as_u64().unwrap() <= 80 << 30);
        assert_eq!(row["offload"], row["ratio"] != 1.0);
    }
}

#[test]
fn entries_have_the_documented_fields() {
    let [entry] = &plans("--gpu 141GB --weights 38GB --activations 1GB --workspace 4GB --context 32K")[..]
    else {
        panic!("one entry")
    };
    assert_eq!((&entry["schema"], &entry["kind"]), (&1.into(), &"plan".into()));
    assert_eq!(entry["forebay"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&entry["model"], &entry["context"], &entry["mtp"]),
        (&"deepseek-v3.2".into(), &32768.into(), &1.into())
    );
    assert_eq!(entry["available_bytes"], 98_000_000_000_u64);
    let parts = &entry["bytes_by_part"];
    let device = ["index_keys", "slots", "landing", "scratch", "padding", "tables"];
    let sum: u64 = device.iter().map(|part| parts[part].as_u64().unwrap()).sum();
    assert_eq!(entry["bytes"], sum);
    let host = parts["host_rows"].as_u64().unwrap() + parts["host_step_blocks"].as_u64().unwrap();
    assert_eq!(entry["host_bytes"], host);
    assert!(entry["slots"].as_u64().unwrap() >= 6400);
    assert_eq!(entry["batch"], entry["most_batch"]);
    assert!(entry["fits"].as_bool().unwrap() && entry.get("why").is_none());
}

#[test]
fn a_sweep_says_which_points_do_not_fit() {
    let rows = plans("--gpu 80GiB,141GB --context 128K --batch 40,90 --mtp 2");
    let fits: Vec<bool> = rows.iter().map(|row| row["fits"].as_bool().unwrap()).collect();
    assert_eq!(fits, [true, false, true, true]);
    assert!(rows[1]["why"].as_str().unwrap().contains("gpu"), "{}", rows[1]["why"]);
    assert!(rows[1].get("ratio").is_none() && rows[1]["context"] == 131_072);
    let table = succeeds(&["plan", "--gpu", "80GiB,141GB", "--context", "128K", "--batch", "40,90"]);
    assert!(table.contains("does not fit") && !table.contains("NaN") && !table.contains("inf"), "{table}");
}

#[test]
fn where_offload_does_not_pay_it_is_said() {
    let whole = succeeds(&["plan", "--gpu", "80GiB", "--context", "32K", "--batch", "52"]);
    assert!(whole.contains("Does not pay here: all rows of this batch fit on the device"), "{whole}");
    let dense = succeeds(&["plan", "--gpu", "80GiB", "--context", "4K", "--model", "deepseek-v3"]);
    assert!(dense.contains("dense attention"), "{dense}");
    let few = succeeds(&["plan", "--gpu", "80GiB", "--context", "32K", "--batch", "190"]);
    assert!(few.contains("Fewer than 6400 slots"), "{few}");
    let pays = succeeds(&["plan", "--gpu", "80GiB", "--context", "32K", "--batch", "128"]);
    assert!(!pays.contains("oes not pay"), "{pays}");
}

#[test]
fn bad_input_is_one_error_that_names_the_option_or_the_field() {
    let good = "--gpu 80GiB --context 32K";
    let cases = [
        ("--context 32K", "--gpu"),
        ("--gpu 80GiB", "--context"),
        ("--gpu 80 --context 32K", "--gpu"),
        ("--gpu 0GiB --context 32K", "--gpu"),
        ("--gpu -1GiB --context 32K", "-1"),
        ("--gpu 80GiB --context 32k", "--context"),
        ("--gpu 80GiB --context 0", "--context"),
        ("--gpu 80GiB --context 200K", "context is beyond the model's"),
        ("--gpu 80GiB --context 32K --weights 80GiB", "weights"),
        ("--gpu 80GiB --context 32K --weights 79GiB --activations 2GiB", "activations"),
        ("--gpu 80GiB --context 32K --workspace 1EB", "--workspace"),
        ("--gpu 80GiB --context 32K --batch 0", "--batch"),
        ("--gpu 80GiB --context 32K --batch -5", "--batch"),
        ("--gpu 80GiB --context 32K --batch 100000", "gpu: the cache of this batch"),
        ("--gpu 80GiB --context 32K --batch 100 --host 1GiB", "host: the total pool of this batch"),
        ("--gpu 80GiB --context 32K --ratio 0", "--ratio"),
        ("--gpu 80GiB --context 32K --ratio 1.01", "--ratio"),
        ("--gpu 80GiB --context 32K --ratio NaN", "--ratio"),
        ("--gpu 80GiB --context 32K --mtp 0", "--mtp"),
        ("--gpu 80GiB --context 32K --model gpt", "--model"),
        ("--gpu 80GiB --context 4K --model deepseek-v3 --ratio 0.5", "ratio of a dense model"),
        ("--gpu 80GiB --context 32K --nonsense 1", "--nonsense"),
    ];
    for (options, named) in cases {
        let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
        let error = refuses(&arguments);
        assert!(error.contains(named), "{options}: {error}");
    }
    // One value of a list that is wrong is an error of the whole.
    assert!(refuses(&["plan", "--gpu", "80GiB", "--context", "32K,200K"]).contains("context"));
    let many: Vec<String> = (1..=400).map(|n| n.to_string()).collect();
    let many = many.join(",");
    let arguments = ["plan", "--gpu", "80GiB", "--context", &many, "--batch", &many];
    assert!(refuses(&arguments).contains("more combinations than one sweep takes"));
    assert_eq!(plans(good).len(), 1);
}
