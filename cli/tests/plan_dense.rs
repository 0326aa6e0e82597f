//! Tests of `forebay plan --dense`, run as its users run it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::Value;

fn arguments(options: &str) -> Vec<&str> {
    std::iter::once("plan").chain(options.split(' ')).collect()
}

/// The entries of the command's JSON.
fn plans(options: &str) -> Vec<Value> {
    match serde_json::from_str(&succeeds(&arguments(&format!("{options} --json -")))).unwrap() {
        Value::Array(entries) => entries,
        other => panic!("no list: {other}"),
    }
}

/// The report as printed, with all lines joined, because line breaks do not matter here.
fn printed(options: &str) -> String {
    succeeds(&arguments(options)).split_whitespace().collect::<Vec<_>>().join(" ")
}

const V3: &str = "--dense deepseek-v3 --weights 0 --context 4K";

#[test]
fn seventy_two_sequences_fit_and_one_more_is_refused_with_the_reason() {
    let card = format!("{V3} --gpu 20GiB --page-tokens 128");
    let report = printed(&card);
    assert!(report.contains(
        "deepseek-v3 on 20 GiB, 4K tokens, mtp 1: 72 sequences in 19.9 GiB of 20.0 GiB. At most 72 fit: 73 sequences \
         would take 20.2 GiB."
    ));
    let [all, more] = &plans(&format!("{card} --batch 72,73"))[..] else { panic!("two entries") };
    assert_eq!(
        (&all["fits"], &all["sequences"], &all["most_sequences"]),
        (&true.into(), &72.into(), &72.into())
    );
    assert_eq!((&more["fits"], &more["why"]), (&false.into(), &all["one_more"]));
    // Rows, the null page, and nothing that is near a page: 33 pages of each sequence, its two rows in flight included.
    let page = 128 * 61 * 1152_u64;
    assert_eq!(all["bytes_by_part"]["pages"], (72 * 33 + 1) * page);
    let error = refuses(&arguments(&format!("{card} --batch 73")));
    for told in ["out of memory: gpu", "batch 73", "most 72", "available 21474836480", "reads every row"] {
        assert!(error.contains(told), "{error}");
    }
    // They do not fit 20 GB.
    let error = refuses(&arguments(&format!("{V3} --gpu 20GB --batch 72")));
    assert!(error.contains("most 68, wanted 21052419540, available 20000000000"), "{error}");
}

#[test]
fn the_second_tier_holds_prefixes_and_parked_sequences() {
    let report = printed(&format!("{V3} --gpu 20GiB --page-tokens 128 --host 64GiB"));
    assert!(
        report.contains("holds 977,792 tokens of prefixes, or 231 sequences parked at full length."),
        "{report}"
    );
    let [entry] = &plans(&format!("{V3} --gpu 20GiB --host 64GiB"))[..] else { panic!("one entry") };
    let (tier, page) = (&entry["host_tier"], 64 * 61 * 1152_u64);
    let bytes = (64 << 30) - entry["host_bytes"].as_u64().unwrap();
    assert_eq!((&tier["bytes"], &tier["tokens"]), (&bytes.into(), &(bytes / page * 64).into()));
    assert_eq!(tier["sequences"], bytes / (65 * page));
    let error = refuses(&arguments(&format!("{V3} --gpu 20GiB --host 200MB")));
    assert!(error.contains("the second tier cannot hold one sequence"), "{error}");
    let [without] = &plans(&format!("{V3} --gpu 20GiB"))[..] else { panic!("one entry") };
    assert_eq!(without["host_tier"], Value::Null);
}

#[test]
fn windows_keep_fewer_pages_and_those_beyond_the_context_are_left_out() {
    let entries = plans("--dense gemma-3-27b --gpu 80GiB --weights 0 --context 512,32K");
    let [short, long] = &entries[..] else { panic!("two entries") };
    assert_eq!(
        (&short["dropped_windows"][0], &long["dropped_windows"]),
        (&1024.into(), &Value::Array(vec![]))
    );
    let windows = |entry: &Value| [0, 1].map(|group| entry["groups"][group]["window"].as_u64());
    assert_eq!([windows(short), windows(long)], [[None, None], [None, Some(1024)]]);
    let pages = |entry: &Value| [0, 1].map(|group| entry["groups"][group]["device_pages"].as_u64().unwrap());
    let [full, local] = pages(long);
    assert!(local * 10 < full, "{full} {local}");
    assert_eq!(pages(short)[0], pages(short)[1]);
    let report = printed("--dense gemma-3-27b --gpu 80GiB --weights 0 --context 512");
    assert!(report.contains("a window of 1,024 tokens is larger than a context of 512"), "{report}");
    // Larger chunks of prompts keep more pages of the window.
    let [chunks] =
        &plans("--dense gemma-3-27b --gpu 80GiB --weights 0 --context 32K --batch 8 --step-tokens 8K")[..]
    else {
        panic!("one entry")
    };
    let [few] = &plans("--dense gemma-3-27b --gpu 80GiB --weights 0 --context 32K --batch 8")[..] else {
        panic!("one entry")
    };
    assert_eq!(pages(chunks)[0], pages(few)[0]);
    assert_eq!(pages(chunks)[1] - pages(few)[1], 2 * (8192 - 2048) / 64);
}

#[test]
fn a_plan_that_does_not_fit_is_a_line_of_a_sweep() {
    let options = "--dense llama-3.1-8b,qwen3-32b --gpu 24GiB --weights 16GB --context 8K --batch 8,max";
    let report = printed(options);
    assert!(report.contains("does not fit 4"), "{report}");
    let fits: Vec<bool> = plans(options).iter().map(|entry| entry["fits"].as_bool().unwrap()).collect();
    assert_eq!(fits, [true, true, false, true]);
}

#[test]
fn entries_have_the_documented_fields() {
    let documented = include_str!("../../docs/json.md");
    let (_, rest) = documented.split_once("## `kind` \"plan-dense\"").unwrap();
    let table = rest.split_once("\n## ").unwrap().0;
    let documented = |field: &str| table.contains(&format!("`{field}`"));
    let entries = plans(&format!("{V3} --gpu 20GiB --batch 72,74 --host 64GiB"));
    for (field, value) in entries.iter().flat_map(|entry| entry.as_object().unwrap()) {
        let inner = value.as_object().into_iter().chain(value[0].as_object()).flat_map(|inner| inner.keys());
        for field in std::iter::once(field).chain(inner) {
            assert!(documented(field) || ["schema", "forebay", "kind"].contains(&field.as_str()), "{field}");
        }
    }
}

#[test]
fn the_figures_of_the_page_are_the_computed_ones() {
    let page = include_str!("../../docs/planner.md");
    let table = page.split_once("| sequences of 4K | of 32K | of 128K |\n").unwrap().1;
    let lines: Vec<&str> = table.lines().skip(1).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(lines.len(), 8);
    for line in lines {
        let cells: Vec<String> =
            line.trim_matches('|').split('|').map(|cell| cell.trim().replace(',', "")).collect();
        let entries = plans(&format!("--dense {} --gpu 80GiB --weights 0 --context 4K,32K,128K", cells[0]));
        let computed = entries.iter().map(|entry| entry["most_sequences"].to_string());
        let computed: Vec<String> =
            std::iter::once(entries[0]["token_bytes"].to_string()).chain(computed).collect();
        assert_eq!(cells[1..], computed, "{line}");
    }
}

#[test]
fn what_does_not_belong_to_a_dense_model_is_refused() {
    let cases = [
        (
            "--dense gpt-2 --gpu 80GiB --weights 0 --context 4K",
            "no dense model of that name; there are llama-3.1-8b",
        ),
        ("--dense deepseek-v3 --gpu 80GiB --context 4K", "--weights"),
        (&format!("{V3} --gpu 80GiB --ratio 0.5"), "--ratio"),
        (&format!("{V3} --gpu 80GiB --setup ess"), "--setup"),
        (&format!("{V3} --gpu 80GiB --html page.html"), "--html"),
        (&format!("{V3} --gpu 80GiB --page-tokens 48"), "pass 16, 32, 64, 128 or 256"),
        (&format!("{V3} --gpu 80GiB --value-bytes 4"), "2 for BF16, 1 for FP8"),
        ("--gpu 80GiB --weights 0 --context 4K --page-tokens 64", "--dense"),
    ];
    for (options, told) in cases {
        let error = refuses(&arguments(options));
        assert!(error.contains(told), "{options}: {error}");
    }
}
