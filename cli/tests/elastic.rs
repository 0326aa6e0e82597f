//! Tests of elastic budgets in `forebay simulate` and `forebay plan`: up to which batch nothing is missed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::Path;

use command::{refuses, succeeds};
use serde_json::{Value, json};

/// A command line with options as one text.
fn line<'a>(command: &'a str, options: &'a str) -> Vec<&'a str> {
    std::iter::once(command).chain(options.split_whitespace()).collect()
}

/// The entries of the command's JSON.
fn entries(command: &str, options: &str) -> Vec<Value> {
    let options = format!("{options} --json -");
    serde_json::from_str(&succeeds(&line(command, &options))).unwrap()
}

/// What the command prints, without its line breaks.
fn printed(command: &str, options: &str) -> String {
    succeeds(&line(command, options)).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn number(entry: &Value, field: &str) -> f64 {
    entry[field].as_f64().unwrap_or_else(|| panic!("{field} of {entry}"))
}

/// The ESS study's cache at 32K, and the slots that it leaves each of 160 sequences.
const POINT: &str = "--setup ess --context 32K --mtp 2 --accept 1.7";
const SLOTS: u32 = 160 * 6784;

/// The entry without the fields that only elastic budgets have.
fn of_fixed(entry: &Value) -> Value {
    let mut entry = entry.clone();
    for field in ["pool_slots", "misses_from", "provenance"] {
        entry.as_object_mut().unwrap().remove(field);
    }
    entry
}

#[test]
fn below_the_batch_where_memory_ends_nothing_is_exposed() {
    let all = entries("simulate", &format!("{POINT} --elastic --cache 80GiB --batch 1,16,33,34,64,160"));
    let whole = entries("simulate", &format!("{POINT} --ratio 1 --batch 1,16,33"));
    for (entry, fixed) in all.iter().zip(&whole) {
        assert_eq!((number(entry, "ratio"), number(entry, "misses")), (1.0, 0.0), "{entry}");
        assert_eq!((number(entry, "exposed_ms"), number(entry, "wait_ms")), (0.0, 0.0), "{entry}");
        assert_eq!(of_fixed(entry), of_fixed(fixed));
        for layer in entry["per_layer"].as_array().unwrap() {
            assert_eq!((number(layer, "misses"), number(layer, "exposed_us")), (0.0, 0.0), "{layer}");
        }
    }
    for entry in &all[3..] {
        let ratio = f64::from(SLOTS) / (number(entry, "batch") * 32768.0);
        assert!((number(entry, "ratio") - ratio).abs() < 1e-12, "{entry}");
        assert!(number(entry, "misses") > 0.0 && number(entry, "exposed_ms") > 0.0, "{entry}");
    }
    assert!(all.iter().all(|entry| entry["pool_slots"] == SLOTS && entry["misses_from"] == 34));
    // The largest batch is the one that the cache was planned for.
    let planned = entries("simulate", &format!("{POINT} --cache 80GiB --batch 160"));
    assert_eq!(of_fixed(&all[5]), of_fixed(&planned[0]));
    assert!(planned[0].get("pool_slots").is_none() && planned[0].get("misses_from").is_none());
    // What budgets fixed for 160 sequences cost 16.
    let fixed = entries("simulate", &format!("{POINT} --ratio 0.20703125 --batch 16"));
    assert!(
        number(&fixed[0], "exposed_ms") > 0.0 && number(&fixed[0], "step_ms") > number(&all[1], "step_ms")
    );
    // The slots may be named instead of the memory.
    let named =
        entries("simulate", &format!("{POINT} --elastic --pool-slots {SLOTS} --batch 1,16,33,34,64,160"));
    assert_eq!(named, all);
}

#[test]
fn all_outputs_of_a_simulation_say_where_misses_begin_and_what_is_not_counted() {
    let says = format!("Elastic budgets: {SLOTS} slots a layer; at 32K nothing is missed up to batch 33.");
    let assumed = "elastic budgets: equal parts of the pool, set at once; misses are counts with fixed budgets of that \
                   size, so they include neither the misses that follow a change of budget nor the time of moving rows";
    let sweep = format!("{POINT} --elastic --cache 80GiB --batch 16,160");
    let text = printed("simulate", &sweep);
    assert!(text.contains(&says) && text.contains(&format!("Assumed: {assumed}.")), "{text}");
    let page = succeeds(&line("simulate", &format!("{sweep} --html -")));
    assert!(page.contains(&says) && page.contains(assumed), "the page");
    for entry in entries("simulate", &sweep) {
        assert!(entry["provenance"]["assumptions"].to_string().contains(assumed), "{entry}");
    }
    let picture = succeeds(&line(
        "simulate",
        &format!("{POINT} --elastic --pool-slots {SLOTS} --batch 16 --timeline -"),
    ));
    assert!(picture.contains("ratio 1.000, order best, elastic budgets"));
    let few = printed("simulate", &format!("{POINT} --elastic --pool-slots 32000 --batch 1,2"));
    assert!(few.contains("32000 slots a layer; at 32K misses begin at batch 1."), "{few}");
    let fixed = printed("simulate", &format!("{POINT} --cache 80GiB --batch 160"));
    assert!(!fixed.to_lowercase().contains("elastic"), "{fixed}");
    // One line for each context, with links too.
    let two = format!("{POINT},64K --link pcie4,c2c --elastic --pool-slots {SLOTS} --batch 33,100");
    let two =
        printed("simulate", &two.replace("32K --mtp 2 --accept 1.7,64K", "32K,64K --mtp 2 --accept 1.7"));
    assert!(two.contains(&says) && two.contains("at 64K nothing is missed up to batch 16."), "{two}");
    assert_eq!(two.matches("Elastic budgets:").count(), 2, "{two}");
}

#[test]
fn misses_of_a_trace_are_counted_at_the_ratio_of_each_batch() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
    let point = format!("{POINT} --trace {}", trace.display());
    let all = entries("simulate", &format!("{point} --elastic --pool-slots 65536 --batch 2,4,8"));
    let fixed = entries("simulate", &format!("{point} --ratio 0.25 --batch 8"));
    assert_eq!(all.iter().map(|entry| number(entry, "ratio")).collect::<Vec<_>>(), [1.0, 0.5, 0.25]);
    let misses: Vec<f64> = all.iter().map(|entry| number(entry, "misses")).collect();
    assert!(misses[0] == 0.0 && misses[0] < misses[1] && misses[1] < misses[2], "{misses:?}");
    assert_eq!(of_fixed(&all[2]), of_fixed(&fixed[0]));
}

#[test]
fn misses_of_one_point_are_refused_unless_none_is_needed() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let written = |name: &str, value: Value| {
        let path = folder.join(name);
        fs::write(&path, value.to_string()).unwrap();
        path.display().to_string()
    };
    let rows = vec![9.0; 61];
    let table = json!({"table": {"query_rows": 2, "query_rows_power": 1, "rows": rows}});
    let steps = json!({"steps": {"query_rows": 2, "query_rows_power": 1, "rows": [rows.clone(), rows]}});
    for misses in [written("elastic-table.json", table), written("elastic-steps.json", steps)] {
        let point = format!("{POINT} --elastic --pool-slots 65536 --misses {misses}");
        let error = refuses(&line("simulate", &format!("{point} --batch 1,3")));
        assert!(error.contains("--elastic: the misses are of one operating point"), "{error}");
        assert!(error.contains("batch 3") && error.contains("--trace"), "{error}");
        assert_eq!(entries("simulate", &format!("{point} --batch 1,2"))[1]["exposed_ms"], 0.0);
    }
}

#[test]
fn a_plan_says_up_to_which_batch_nothing_is_missed() {
    let cache = "--gpu 80GiB --weights 0 --tables beside --mtp 2";
    let one = format!("{cache} --context 32K --batch 160");
    assert_eq!(entries("plan", &one)[0]["misses_from"], 34);
    let says = "Elastic budgets: the 1,085,440 slots of batch 160 at ratio 0.207 hold all rows of 33 sequences of 32K; \
                nothing is missed up to batch 33.";
    let text = printed("plan", &one);
    assert!(
        text.contains(says) && text.contains("misses after a change of budget are not counted"),
        "{text}"
    );
    // The advice stays the last sentence.
    assert!(text.find(says) < text.find("With offload the 8 GPUs hold"), "{text}");
    let page = succeeds(&line("plan", &format!("{one} --html -")));
    assert!(page.contains(says) && page.contains("misses from batch"));
    // The column has a number for each plan, and none where the rows of the whole batch have slots.
    let wide = succeeds(&line("plan", &format!("{cache} --context 32K --batch 52,128,160 --wide")));
    let head = wide.lines().position(|line| line.contains("misses")).unwrap();
    assert!(wide.lines().nth(head + 1).unwrap().contains("from"), "{wide}");
    let sweep = entries("plan", &format!("{cache} --context 32K --batch 52,128,160"));
    let from: Vec<&Value> = sweep.iter().map(|entry| &entry["misses_from"]).collect();
    assert_eq!(from, [&Value::Null, &json!(40), &json!(34)]);
    let whole = printed("plan", &format!("{cache} --context 32K --batch 52"));
    assert!(!whole.contains("Elastic budgets:"), "{whole}");
    // Several settings have a sentence each, and a pool below one sequence has its own words.
    let two = printed("plan", &format!("{cache} --context 32K,128K --batch 50 --ratio 0.01"));
    let none = "do not hold the rows of one sequence of 32K; every batch misses.";
    assert!(two.contains(none) && two.matches("Elastic budgets:").count() == 2, "{two}");
    assert!(two.contains("32K: Elastic budgets: ") && two.contains("128K: Elastic budgets: "), "{two}");
    let few = entries("plan", &format!("{cache} --context 32K --batch 50 --ratio 0.01"));
    assert_eq!(few[0]["misses_from"], 1);
}

/// A searched plan, too, says it of its own slots, and the simulator agrees with it on both sides of the batch.
#[test]
fn the_simulator_agrees_with_the_plan_about_the_batch() {
    let gpu = "--gpu 80GiB --weights 0";
    let [best] = &entries("plan", &format!("{POINT} {gpu}"))[..] else { panic!("one plan") };
    let slots = best["slots"].as_u64().unwrap().div_ceil(64) * 64 * best["batch"].as_u64().unwrap();
    let first = best["misses_from"].as_u64().unwrap();
    assert!(1 < first && first < best["resident_batch"].as_u64().unwrap(), "{best}");
    assert_eq!(first, slots / 32768 + 1);
    let both = format!("{POINT} --elastic --pool-slots {slots} --batch {},{first}", first - 1);
    let both = entries("simulate", &both);
    assert_eq!((number(&both[0], "misses"), &both[0]["misses_from"]), (0.0, &json!(first)));
    assert!(number(&both[1], "misses") > 0.0);
}

#[test]
fn the_fields_are_documented() {
    let documented = include_str!("../../docs/json.md");
    for (kind, fields) in [("plan", &["misses_from"][..]), ("simulate", &["pool_slots", "misses_from"])] {
        let (_, rest) = documented.split_once(&format!("## `kind` \"{kind}\"")).unwrap();
        let own = rest.split_once("\n## ").map_or(rest, |(own, _)| own);
        for field in fields {
            let named =
                |line: &str| line.split('|').nth(1).is_some_and(|cell| cell.contains(&format!("`{field}`")));
            assert!(own.lines().any(named), "{field} of {kind}");
        }
    }
}

#[test]
fn bad_pools_are_one_error_that_names_the_option_or_the_number() {
    let given = "--elastic --batch 2";
    let cases = [
        (given.to_owned(), "--elastic without --cache or --pool-slots"),
        (format!("{given} --cache 80GiB --pool-slots 4096"), "--pool-slots"),
        (format!("{given} --cache 80GiB --ratio 0.5"), "--ratio"),
        (format!("{given} --pool-slots 4096 --ratio auto"), "--ratio"),
        ("--batch 2 --pool-slots 4096".to_owned(), "--elastic"),
        ("--batch 2 --ratio 0.5 --pool-slots 4096".to_owned(), "--pool-slots"),
        ("--batch 2 --cache 80GiB --pool-slots 4096".to_owned(), "--pool-slots"),
        (format!("{given} --pool-slots 0"), "--pool-slots"),
        (format!("{given} --pool-slots -64"), "--pool-slots"),
        (format!("{given} --pool-slots 64.5"), "--pool-slots"),
        (format!("{given} --pool-slots 4294967296"), "--pool-slots"),
        (format!("{given} --pool-slots 1e9"), "--pool-slots"),
        (format!("{given} --pool-slots 64K"), "--pool-slots"),
        (format!("{given} --pool-slots 64,128"), "--pool-slots"),
        (format!("{given} --pool-slots 127"), "blocks 1, batch 2"),
        (format!("{given} --pool-slots 63"), "blocks 0, batch 2"),
        // Below the least ratio that the study counted there is no figure.
        (
            format!("{given} --pool-slots 6464"),
            "misses.curve.mean.ratio: 0.0986 is below the first measured one, 0.1",
        ),
        (format!("{given}0000 --pool-slots 4096"), "batch"),
        ("--elastic --batch 9000 --cache 80GiB".to_owned(), "gpu: the cache of this batch"),
        ("--elastic --batch 1,4294967295 --cache 80GiB".to_owned(), "batch"),
        ("--elastic --batch 2 --cache 1MiB".to_owned(), "gpu: the cache of this batch"),
    ];
    for (options, named) in &cases {
        let options = format!("{POINT} {options}");
        let error = refuses(&line("simulate", &options));
        assert!(error.contains(named), "{options}: {error}");
    }
    for options in [&["--elastic"][..], &["--pool-slots", "4096"]] {
        let error = refuses(&[&["simulate", "--kernels"], options].concat());
        assert!(error.contains(options[0]) && error.contains("--kernels"), "{error}");
    }
    // The most slots and the largest batch that the options take.
    let most = entries("simulate", &format!("{POINT} --elastic --pool-slots 4294967295 --batch 1"));
    assert_eq!((&most[0]["ratio"], &most[0]["misses_from"]), (&json!(1.0), &json!(131_072)));
}
