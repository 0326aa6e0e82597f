//! Tests of `forebay plan --role prefill`, run as its users run it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::{Value, json};

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

const NODE: &str = "--role prefill --gpus 8 --gpu 141GB --workspace 8GB";

#[test]
fn a_prompt_in_one_pass_needs_weights_activations_and_a_ring() {
    let [entry] = &plans(&format!("{NODE} --context 4K"))[..] else { panic!("one entry") };
    assert_eq!((&entry["kind"], &entry["role"]), (&json!("plan-prefill"), &json!("prefill")));
    let ring = &entry["ring"];
    assert_eq!((&ring["all_rows"], &ring["all_index_keys"]), (&json!(175_898_624), &json!(32_980_992)));
    assert_eq!([&ring["parts"], &ring["part_bytes"], &ring["bytes"]], [2, 3_424_256, 6_848_512]);
    assert_eq!((&ring["wait_ms"], &ring["on_host"]), (&json!(0.0), &json!(false)));
    let parts = entry["bytes_by_part"].as_object().unwrap();
    let sum: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(entry["bytes"], sum);
    assert_eq!(entry["left_bytes"], 141_000_000_000 - sum);
    assert_eq!(parts["weights"], entry["deployment"]["weights_bytes"]);
    assert_eq!([&parts["activations"], &parts["ring"], &parts["rows"]], [250_000_000, 6_848_512, 0]);
    assert_eq!((&entry["in_one_pass"], &entry["passes"]), (&Value::Null, &json!(1)));
    assert_eq!(entry["assumptions"].as_array().unwrap().len(), 4);
    let report = printed(&format!("{NODE} --context 4K"));
    for told in [
        "weights: 102 GB on each, from the checkpoint deepseek-ai/DeepSeek-V3.2",
        "Assumed: activations: 1 GB at 16384 tokens, as published",
        "The ring on the GPU has 2 parts of 3.42 MB: a layer of a pass of 4,096 tokens",
        "So a part is held for 3.64 ms, and a further one is taken every 2.58 ms: 2 parts are the fewest",
        "Without it the rows and index keys of all layers, 209 MB, would be held",
    ] {
        assert!(report.contains(told), "{told}: {report}");
    }
}

#[test]
fn a_prompt_in_chunks_keeps_its_pages_and_is_compared_with_one_pass() {
    let [whole, chunks] = &plans(&format!("{NODE} --context 128K --chunk 128K,16K"))[..] else {
        panic!("two entries")
    };
    let kept = ["rows", "index_keys"].map(|part| chunks["bytes_by_part"][part].as_u64().unwrap());
    assert_eq!(kept, [131_072 * 61 * 656, 131_072 * 61 * 132]);
    assert_eq!(whole["bytes_by_part"]["rows"], 0);
    assert_eq!((&chunks["passes"], &chunks["in_one_pass"]["bytes"]), (&json!(8), &whole["bytes"]));
    let report = printed(&format!("{NODE} --context 128K"));
    assert!(report.contains("its pages stay, 6.30 GB, until the last one is computed"), "{report}");
    assert!(report.contains("In one pass a prompt would need none: 118 GB in all, 8.00 GB of activations."));
    // Given activations are those of the chunk, so that those of one pass are not known.
    let given = printed(&format!("{NODE} --context 128K --activations 2GB"));
    assert!(given.contains("its pages stay") && !given.contains("In one pass"), "{given}");
    assert!(!given.contains("Assumed: activations"), "{given}");
}

#[test]
fn ranks_the_host_and_slow_links_change_the_ring() {
    let more = "--context 16K --sp 4 --host 1GB --send-rate 1GB/s --acknowledge-ms 2 --layer-ms 5";
    let [entry] = &plans(&format!("{NODE} {more}"))[..] else { panic!("one entry") };
    let ring = &entry["ring"];
    assert_eq!((&entry["pass_tokens"], &entry["ranks"]), (&json!(4096), &json!(4)));
    assert_eq!((&ring["on_host"], &entry["bytes_by_part"]["ring"]), (&json!(true), &json!(0)));
    // 5 ms, 3.42 ms and 2 ms.
    assert_eq!(
        (&ring["parts"], &ring["layer_ms"], &ring["acknowledge_ms"]),
        (&json!(3), &json!(5.0), &json!(2.0))
    );
    assert_eq!(ring["transfer_ms"], 3.424256);
    let slow = printed(&format!("{NODE} --context 16K --send-rate 1GB/s"));
    assert!(slow.contains("The link is slower than the computation: prefill waits 3.40 ms in each layer."));
    let one = printed(&format!("{NODE} --context 16K --ring-parts 1"));
    assert!(one.contains("with 1 part prefill waits 1.27 ms in each layer."), "{one}");
    let two = printed(&format!("{NODE} --context 16K --ring-parts 2"));
    assert!(two.contains("with 2 parts prefill never waits."), "{two}");
    // A model without index keys, and layers that share an indexer.
    let models = printed("--role prefill --model deepseek-v3,glm-5.2 --weights 0 --gpu 80GiB --context 4K");
    assert!(models.contains("deepseek-v3: 61 layers, rows of 1152 bytes, 1152 in the ring, no index keys"));
    assert!(
        models.contains("index keys of 132 bytes in 21 layers") && models.contains("tokens, rows alone.")
    );
}

#[test]
fn a_plan_that_does_not_fit_is_a_line_of_a_sweep_and_an_error_alone() {
    let options = "--role prefill --gpu 104GB --gpus 8 --context 16K --batch 1,8";
    let fits: Vec<bool> = plans(options).iter().map(|entry| entry["fits"].as_bool().unwrap()).collect();
    assert_eq!(fits, [true, false]);
    assert!(printed(options).contains("does not fit"));
    let error = refuses(&arguments("--role prefill --gpu 104GB --gpus 8 --context 16K --batch 8"));
    for told in ["out of memory: gpu: activations", "wanted 8000000000", "missing", "smaller chunk or batch"]
    {
        assert!(error.contains(told), "{error}");
    }
    let error = refuses(&arguments(&format!("{NODE} --context 16K --host 20MB")));
    assert!(error.contains("host: the staging ring (wanted 27394048, available 20000000, missing 7394048)"));
    let error = refuses(&arguments(&format!("{NODE} --context 16K --ring-parts 4000")));
    assert!(error.contains("gpu: the staging ring (wanted 54788096000"), "{error}");
    let page = succeeds(&arguments(&format!("{options} --html -")));
    assert!(page.contains("does not fit") && page.contains("Memory of the GPU"));
}

#[test]
fn options_of_the_other_role_and_bad_values_are_refused() {
    let context = "--role prefill --gpu 141GB --context 64K";
    for option in
        ["--chunk 1K", "--sp 2", "--send-rate 5GB/s", "--layer-ms 3", "--acknowledge-ms 1", "--ring-parts 2"]
    {
        let error = refuses(&arguments(&format!("--gpu 141GB --context 64K {option}")));
        let name = option.split(' ').next().unwrap();
        assert!(error.contains(&format!("{name}: an option of --role prefill; leave it out")), "{error}");
    }
    for (option, name) in [
        ("--ratio 0.3", "--ratio"),
        ("--mtp 2", "--mtp"),
        ("--micro-batches 2", "--micro-batches"),
        ("--least-slots 6400", "--least-slots"),
        ("--tables counted", "--tables"),
        ("--shard mla", "--shard"),
        ("--setup ess", "--setup"),
        ("--dense llama-3.1-8b --weights 0", "--dense"),
        ("--batch 1,max", "--batch max"),
    ] {
        let error = refuses(&arguments(&format!("{context} {option}")));
        assert!(error.contains(&format!("{name}: an option of --role decode; leave it out")), "{error}");
    }
    for (option, told) in [
        ("--chunk 0", "not a number of tokens from 1"),
        ("--chunk 128K", "chunk is beyond the context (chunk 131072, context 65536)"),
        (
            "--sp 8 --attention tp",
            "--attention tp: heads and tokens are not divided over the same GPUs (sp 8)",
        ),
        ("--sp 3", "--sp does not divide the GPUs (sp 3, gpus 8)"),
        ("--sp 0", "not a whole number of GPUs"),
        ("--send-rate 5", "not a rate such as 50GB/s"),
        ("--layer-ms 0", "not a number above 0"),
        ("--ring-parts 0", "not a whole number from 1"),
        ("--batch 0", "not a whole number from 1"),
        (
            "--weights 200GB",
            "gpu: weights (wanted 200000000000, available 141000000000, missing 59000000000)",
        ),
    ] {
        let error = refuses(&arguments(&format!("{context} {option}")));
        assert!(error.contains(told), "{option}: {error}");
    }
    let beyond = refuses(&arguments("--role prefill --gpu 141GB --context 200K"));
    assert!(beyond.contains("context is beyond the model's (context 204800, most 163840)"), "{beyond}");
    let role = refuses(&arguments("--role both --gpu 141GB --context 64K"));
    assert!(role.contains("possible values: decode, prefill"), "{role}");
}

#[test]
fn decode_is_the_default_role() {
    let decode = "--gpu 80GiB --weights 0 --context 32K";
    assert_eq!(succeeds(&arguments(decode)), succeeds(&arguments(&format!("{decode} --role decode"))));
    assert_eq!(plans(decode)[0]["role"], "decode");
}

#[test]
fn the_page_shows_the_parts_of_the_memory() {
    let one = succeeds(&arguments(&format!("{NODE} --context 16K --html -")));
    for told in ["What does a prefill instance need?", "staging ring", "27.4 MB", "1.00 GB", "102 GB", "<svg"]
    {
        assert!(one.contains(told), "{told}");
    }
    let two = succeeds(&arguments(&format!("{NODE} --context 16K,128K --html -")));
    assert!(two.contains("128K in chunks of 16K") && two.contains("6.30 GB"));
}

#[test]
fn entries_have_the_documented_fields() {
    let documented = include_str!("../../docs/json.md");
    let (_, rest) = documented.split_once("## `kind` \"plan-prefill\"").unwrap();
    let table = rest.split_once("\n## ").unwrap().0;
    let documented = |field: &str| table.contains(&format!("`{field}`"));
    for entry in plans(&format!("{NODE} --context 128K --batch 1,100")) {
        for (field, value) in entry.as_object().unwrap() {
            let inner = value.as_object().into_iter().flat_map(|inner| inner.keys());
            for field in std::iter::once(field).chain(inner) {
                assert!(
                    documented(field) || ["schema", "forebay", "kind"].contains(&field.as_str()),
                    "{field}"
                );
            }
        }
    }
}

#[test]
fn the_figures_of_the_page_are_the_computed_ones() {
    let page = include_str!("../../docs/planner.md");
    let table = page.split_once("| context | chunk | activations | ring | pages | left |\n").unwrap().1;
    let lines: Vec<&str> = table.lines().skip(1).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(lines.len(), 5);
    for line in lines {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let options = format!("{NODE} --context {} --chunk {} --wide", cells[0], cells[1]);
        let row = format!(
            "{} {} 1 102 GB {} 8.00 GB {} {} {}",
            cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]
        );
        let report = printed(&options);
        assert!(report.contains(&row), "{row}: {report}");
    }
}
