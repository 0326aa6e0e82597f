//! Tests of `forebay plan`, run as its users run it: what fits, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::Path;

use command::{refuses, succeeds};
use forebay::predict::model::Dims;
use serde_json::{Value, json};

/// Runs the command with options as one text; returns the entries of its JSON.
fn plans(options: &str) -> Vec<Value> {
    let arguments: Vec<&str> = ["plan", "--json", "-"].into_iter().chain(options.split(' ')).collect();
    match serde_json::from_str(&succeeds(&arguments)).unwrap() {
        Value::Array(entries) => entries,
        other => panic!("no list: {other}"),
    }
}

/// The tables as printed, with all lines joined, because line breaks do not matter here.
fn printed(arguments: &[&str]) -> String {
    succeeds(arguments).replace('\n', " ")
}

fn column(entries: &[Value], field: &str) -> Vec<f64> {
    entries.iter().map(|entry| entry[field].as_f64().unwrap()).collect()
}

fn digits(ratios: Vec<f64>) -> Vec<f64> {
    ratios.into_iter().map(|ratio| (ratio * 100.0).round() / 100.0).collect()
}

#[test]
fn the_ratio_column_of_the_ess_study() {
    let budget = "--gpu 80GiB --weights 0 --mtp 2 --tables beside";
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
    assert_eq!((&entry["schema"], &entry["kind"]), (&2.into(), &"plan".into()));
    assert_eq!(entry["forebay"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&entry["model"], &entry["context"], &entry["mtp"]),
        (&"deepseek-v3.2".into(), &32768.into(), &1.into())
    );
    assert_eq!(entry["available_bytes"], 98_000_000_000_u64);
    let parts = &entry["bytes_by_part"];
    let device = ["index_keys", "slots", "landing", "scratch", "padding", "tables", "host_page_tables"];
    let sum: u64 = device.iter().map(|part| parts[part].as_u64().unwrap()).sum();
    assert_eq!(entry["bytes"], sum);
    let host = parts["host_rows"].as_u64().unwrap() + parts["host_step_descriptors"].as_u64().unwrap();
    assert_eq!(entry["host_bytes"], host);
    assert_eq!(parts["host_page_tables"], 8 * host.div_ceil(4096), "2 MiB a GiB");
    assert!(entry["slots"].as_u64().unwrap() >= 6400);
    assert_eq!(entry["batch"], entry["most_batch"]);
    assert!(entry["fits"].as_bool().unwrap() && entry.get("why").is_none());
}

/// `ratio` is a share of the final context; replay sizes its pools by a prompt share. Options, JSON, tables, pages and
/// the documentation of the JSON agree.
#[test]
fn a_ratio_is_a_share_of_the_final_context_and_replay_takes_a_prompt_share() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
    let trace = demo.to_str().unwrap();
    let header = forebay::trace::SelectionTrace::read(&demo).unwrap().header().clone();
    let json = |arguments: &[&str]| -> Value {
        let text = succeeds(&[arguments, &["--json", "-"]].concat());
        serde_json::from_str::<Value>(&text).unwrap()[0].take()
    };
    let documented = include_str!("../../docs/json.md");
    let fields = |kind: &str| -> &str {
        let (_, rest) = documented.split_once(&format!("## `kind` \"{kind}\"")).unwrap();
        rest.split_once("\n## ").map_or(rest, |(own, _)| own)
    };
    let has = |kind, field: &str| fields(kind).lines().any(|line| line.starts_with(&format!("| `{field}`")));
    let replay = ["replay", trace, "--slots", "1229"];
    let replayed = json(&replay);
    let share = replayed["prompt_share"].as_f64().unwrap() * f64::from(header.decode_start);
    assert!((share - 1229.0).abs() < 1e-9, "{share}");
    assert!(
        replayed.get("ratio").is_none() && !has("selection", "ratio") && has("selection", "prompt_share")
    );
    let point = ["--setup", "ess", "--context", "32K", "--batch", "96"];
    let planned = json(&[&["plan", "--gpu", "80GiB", "--weights", "0"], &point[..]].concat());
    let slots = planned["slots"].as_f64().unwrap();
    assert!(slots < 32768.0 && planned["ratio"] == slots / 32768.0, "{planned}");
    let simulated = json(&[&["simulate", "--ratio", "0.21"], &point[..]].concat());
    assert_eq!(simulated["ratio"], 0.21);
    for (kind, entry) in [("plan", &planned), ("simulate", &simulated)] {
        assert!(
            entry.get("prompt_share").is_none() && has(kind, "ratio") && !has(kind, "prompt_share"),
            "{kind}"
        );
    }
    // The printed table: its first head takes two lines.
    for more in [&[][..], &["--curve"]] {
        let table = succeeds(&[&replay[..], more].concat());
        let heads: Vec<&str> =
            table.lines().skip_while(|line| !line.trim_start().starts_with("prompt")).collect();
        assert!(heads[1].trim_start().starts_with("share"), "{table}");
        assert!(table.contains("Prompt share: slots over the tokens at decode start."), "{table}");
    }
    let page = succeeds(&[&replay[..], &["--html", "-"]].concat());
    assert!(page.contains("slots / prompt (log)") && page.contains("At prompt share 0.2"));
    let words = page.replace("miss ratio", "").replace("Miss ratio", "");
    assert!(!words.contains("ratio "), "a ratio on the page of a replay");
    for (command, option) in
        [("replay", "--prompt-share <"), ("plan", "--ratio <"), ("simulate", "--ratio <")]
    {
        let help = succeeds(&[command, "--help"]);
        assert!(help.contains(option), "{command}");
        assert_eq!(
            help.matches("--ratio <").count() + help.matches("--prompt-share <").count(),
            1,
            "{command}"
        );
    }
}

#[test]
fn a_sweep_reports_the_points_that_do_not_fit() {
    let rows = plans("--gpu 80GiB,141GB --weights 0 --context 128K --batch 40,90 --mtp 2");
    let fits: Vec<bool> = rows.iter().map(|row| row["fits"].as_bool().unwrap()).collect();
    assert_eq!(fits, [true, false, true, true]);
    assert!(rows[1]["why"].as_str().unwrap().contains("gpu"), "{}", rows[1]["why"]);
    assert!(rows[1].get("ratio").is_none() && rows[1]["context"] == 131_072);
    let table = succeeds(&[
        "plan",
        "--weights",
        "0",
        "--gpu",
        "80GiB,141GB",
        "--context",
        "128K",
        "--batch",
        "40,90",
    ]);
    assert!(table.contains("does not fit") && !table.contains("NaN") && !table.contains("inf"), "{table}");
}

#[test]
fn a_stride_of_whole_cache_lines_is_offered_with_its_cost() {
    let given = "--gpu 80GiB --weights 0 --context 32K --mtp 2 --batch 160";
    let [entry] = &plans(given)[..] else { panic!("one entry") };
    let stride = &entry["host_stride"];
    assert_eq!((&stride["bytes"], &stride["requests"]), (&704.into(), &6.0.into()));
    let other = &stride["other"];
    assert_eq!(
        (&other["bytes"], &other["requests"], &other["fetched_bytes"]),
        (&768.into(), &6.0.into(), &704.0.into())
    );
    let rows = entry["bytes_by_part"]["host_rows"].as_u64().unwrap();
    assert_eq!(other["host_rows"].as_u64(), Some(rows / 704 * 768));
    // The offered stride is the one the plan then uses, and 704 is offered in return.
    let [aligned] = &plans(&format!("{given} --host-stride 768"))[..] else { panic!("one entry") };
    assert_eq!(aligned["bytes_by_part"]["host_rows"].as_u64(), Some(rows / 704 * 768));
    assert_eq!(aligned["host_stride"]["other"]["host_rows"].as_u64(), Some(rows));
    let arguments: Vec<&str> = std::iter::once("plan").chain(given.split(' ')).collect();
    let said = printed(&arguments);
    assert!(said.contains("At 768 (--host-stride): 6.00 requests, +9.1% of the rows' host memory"), "{said}");
    let whole = plans("--gpu 80GiB --weights 0 --context 32K --mtp 2 --batch 52");
    assert!(whole[0].get("host_stride").is_none());
    let wrong: Vec<&str> = arguments.iter().copied().chain(["--host-stride", "640"]).collect();
    assert!(refuses(&wrong).contains("host_stride"));
}

#[test]
fn a_plan_where_offload_does_not_pay_is_reported() {
    let whole = printed(&["plan", "--weights", "0", "--gpu", "80GiB", "--context", "32K", "--batch", "52"]);
    assert!(whole.contains("Does not pay here: all rows of this batch fit on the device"), "{whole}");
    let dense =
        printed(&["plan", "--weights", "0", "--gpu", "80GiB", "--context", "4K", "--model", "deepseek-v3"]);
    assert!(dense.contains("dense attention"), "{dense}");
    let few = printed(&["plan", "--weights", "0", "--gpu", "80GiB", "--context", "32K", "--batch", "190"]);
    assert!(few.contains("Fewer than 6400 slots"), "{few}");
    let pays = printed(&["plan", "--weights", "0", "--gpu", "80GiB", "--context", "32K", "--batch", "128"]);
    assert!(!pays.contains("oes not pay"), "{pays}");
}

#[test]
fn with_a_setup_the_best_batch_and_its_throughput_are_found() {
    let budget = "--setup ess --gpu 80GiB --weights 0 --context 32K --mtp 2 --accept 1.7 --tables beside";
    let [best] = &plans(budget)[..] else { panic!("one entry") };
    assert_eq!(
        (&best["setup"], &best["offload"], &best["pays"]),
        (&"ess".into(), &true.into(), &true.into())
    );
    let (yields, without) =
        (best["throughput"].as_f64().unwrap(), best["throughput_without"].as_f64().unwrap());
    assert!(yields > 1.4 * without, "{yields} {without}");
    assert_eq!(best["pays_from"], best["resident_batch"].as_u64().unwrap() + 1);
    let asked = plans(&format!("{budget} --batch 52,96,128,160"));
    assert!(column(&asked, "throughput").iter().all(|one| *one <= 1.001 * yields));
    assert!(asked.iter().all(|entry| entry.get("pays_from").is_none()));
    assert_eq!((&asked[0]["pays"], &asked[1]["pays"]), (&false.into(), &true.into()));
    let links = plans(&format!("{budget} --link pcie4,c2c"));
    assert_eq!((&links[0]["link"], &links[1]["link"]), (&"pcie4".into(), &"c2c".into()));
    assert!(column(&links, "throughput")[0] < column(&links, "throughput")[1]);
}

#[test]
fn a_link_that_is_too_slow_does_not_pay() {
    let options = "--gpu 80GiB --weights 0 --context 32K --mtp 2 --accept 1.7 --setup ess --link 0.79GB/s";
    let [best] = &plans(options)[..] else { panic!("one entry") };
    assert_eq!(
        (&best["offload"], &best["pays"], &best["pays_from"]),
        (&false.into(), &false.into(), &Value::Null)
    );
    let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
    let table = printed(&[&arguments[..], &["--wide"]].concat());
    assert!(table.contains("never") && table.contains("Does not pay here"), "{table}");
    let asked = plans(&format!("{options} --batch 128"));
    assert_eq!((&asked[0]["offload"], &asked[0]["pays"]), (&true.into(), &false.into()));
    // A ratio below those with known misses: there is a plan, without its time.
    let unknown = plans("--gpu 80GiB --weights 0 --context 32K --mtp 2 --setup ess --batch 128,240");
    assert!(unknown[0].get("throughput").is_some() && unknown[1].get("throughput").is_none());
    assert!(unknown[1]["notes"].to_string().contains("unknown"), "{}", unknown[1]["notes"]);
}

/// A changed copy of the built-in setup; returns the file's name.
fn setup(name: &str, change: impl Fn(&mut Value)) -> String {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/setups/ess.json");
    let mut setup: Value = serde_json::from_str(&fs::read_to_string(data).unwrap()).unwrap();
    change(&mut setup);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, setup.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_setup_with_its_own_model_is_planned_as_that_model() {
    let own = setup("own-model.json", |setup| {
        setup["name"] = "mine".into();
        let dims = serde_json::to_value(Dims { context_max: 65536, ..Dims::DEEPSEEK_V3_2 }).unwrap();
        setup["model"] = json!({"draft_layers": 0, "dims": dims,
            "shape": {"layers": 61, "runs": [512, 144], "index_key_bytes": 132, "top_k": 2048}});
    });
    let options = format!("--setup {own} --gpu 80GiB --weights 0 --batch 8");
    let entry = &plans(&format!("{options} --context 32K"))[0];
    assert_eq!((&entry["model"], &entry["setup"]), (&"mine".into(), &"mine".into()));
    let table = succeeds(&[
        "plan",
        "--setup",
        &own,
        "--weights",
        "0",
        "--gpu",
        "80GiB",
        "--context",
        "32K",
        "--batch",
        "8",
    ]);
    assert!(
        table.contains("\nmine: 61 layers") && table.starts_with("Computed from setup mine: 32 GPUs"),
        "{table}"
    );
    let refused = |options: &str| {
        let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
        refuses(&arguments)
    };
    let error = refused(&format!("{options} --context 128K"));
    assert!(error.contains("context is beyond the model's") && error.contains("65536"), "{error}");
    let error = refused(&format!("{options} --context 32K --longest 128K"));
    assert!(error.contains("--longest") && error.contains("65536"), "{error}");
    assert!(refused(&format!("{options} --context 32K --longest 16K")).contains("context is beyond"));
}

#[test]
fn a_point_without_data_leaves_the_others() {
    let known = "--setup ess --gpu 80GiB --weights 0 --mtp 2 --accept 1.7";
    let rows = plans(&format!("{known} --context 32K,8K,1K"));
    let yields: Vec<bool> = rows.iter().map(|row| row.get("throughput").is_some()).collect();
    // Of 8K the part that fits whole is known, of 1K nothing.
    assert_eq!(yields, [true, true, false]);
    assert!(rows[1]["notes"].to_string().contains("larger batches were not tried"));
    assert!(rows[2]["notes"].to_string().contains("not simulated"));
    assert!(rows[2]["fits"] == true && rows[2]["bytes"].as_u64().unwrap() > 0);
    assert!(rows[2]["unknown"].as_str().unwrap().contains("costs."), "{}", rows[2]["unknown"]);
    assert!(rows[0].get("unknown").is_none());
    assert!(rows[0].get("pays_from").is_some() && rows[1].get("pays_from").is_none());
    let arguments = "plan --setup ess --weights 0 --gpu 80GiB --context 32K,8K,1K --wide";
    let table = succeeds(&arguments.split(' ').collect::<Vec<_>>());
    let line = table.lines().find(|line| line.trim_start().starts_with("1K")).unwrap();
    assert!(line.contains("GiB") && line.contains("[u]") && !table.contains("never"), "{table}");
    let rows = plans("--setup ess --gpu 80GiB --weights 0 --accept 2.8 --mtp 4 --context 32K,16K");
    assert!(rows.len() == 2 && rows.iter().all(|row| row["fits"] == true));
}

#[test]
fn rows_of_the_roofline_are_marked_among_fitted_rows() {
    let options = "--setup ess --gpu 80GiB --weights 0 --context 32K --batch 96 --mtp 2 --accept 1.7";
    let both = format!("{options} --model deepseek-v3.2,deepseek-v3.2-bf16");
    let rows = plans(&both);
    assert_eq!((&rows[0]["by_roofline"], &rows[1]["by_roofline"]), (&false.into(), &true.into()));
    let of = |options: &str, html: &[&str]| {
        let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
        succeeds(&[&arguments[..], html].concat())
    };
    let table = of(&both, &[]);
    let marked: Vec<&str> = table.lines().filter(|line| line.contains("[r]")).collect();
    assert!(marked.len() == 2 && marked[0].contains("bf16"), "{table}");
    assert!(marked[1].contains("not comparable with fitted rows"), "{table}");
    let page = of(&both, &["--html", "-"]);
    assert!(page.contains("not comparable with fitted rows") && page.contains("bf16 (by roofline)"));
    assert!(!of(options, &[]).contains("not comparable"));
}

#[test]
fn misses_of_another_model_or_context_are_reported_with_the_plan() {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
    let options =
        format!("--setup ess --gpu 80GiB --weights 0 --context 32K --batch 96 --trace {}", trace.display());
    let note = plans(&options)[0]["misses_note"].as_str().unwrap().to_owned();
    for words in ["spread over 61 by depth", "not scaled to k 2048", "tokens of context, not scaled"] {
        assert!(note.contains(words), "{note}");
    }
    let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
    assert!(printed(&arguments).contains(&note));
    assert!(succeeds(&[&arguments[..], &["--html", "-"]].concat()).contains(&note));
}

#[test]
fn memory_and_time_count_the_same_micro_batches() {
    let options = "--setup ess --gpu 80GiB --weights 0 --mtp 2 --accept 1.7 --batch 40";
    let of = |options: &str| plans(options).remove(0);
    let (two, one) =
        (of(&format!("{options} --context 32K")), of(&format!("{options} --context 32K --micro-batches 1")));
    assert_eq!((&two["micro_batches"], &one["micro_batches"]), (&2.into(), &1.into()));
    let simulated = |two_batch: &str| {
        let text = succeeds(&[
            "simulate",
            "--json",
            "-",
            "--setup",
            "ess",
            "--context",
            "32K",
            "--batch",
            "40",
            "--mtp",
            "2",
            "--accept",
            "1.7",
            "--ratio",
            "1",
            "--two-batch",
            two_batch,
        ]);
        serde_json::from_str::<Value>(&text).unwrap()[0]["step_ms"].clone()
    };
    assert_eq!((&two["step_ms"], &one["step_ms"]), (&simulated("on"), &simulated("off")));
    // Longer than the contexts for which the setup runs two.
    let long = of(&format!("{options} --context 128K"));
    let asked = of(&format!("{options} --context 128K --micro-batches 1"));
    assert_eq!(long, asked);
    let two = of(&format!("{options} --context 128K --micro-batches 2"));
    assert!(two["micro_batches"] == 2 && two["step_ms"] != long["step_ms"]);
    let many = [
        "plan",
        "--setup",
        "ess",
        "--weights",
        "0",
        "--gpu",
        "80GiB",
        "--context",
        "32K",
        "--micro-batches",
        "3",
    ];
    assert!(refuses(&many).contains("--micro-batches"));
}

#[test]
fn a_plan_that_does_not_fit_repeats_its_inputs() {
    let rows = plans(
        "--setup ess --link pcie4 --gpu 80GiB --weights 0 --context 128K --batch 40,900 --ratio auto --mtp 2",
    );
    let last = &rows[1];
    assert_eq!(last["fits"], false);
    assert_eq!(last["asked"], json!({"batch": 900, "ratio": "auto"}));
    assert_eq!((&last["setup"], &last["link"]), (&"ess".into(), &"pcie4".into()));
    assert_eq!(
        plans("--gpu 80GiB --weights 0 --context 32K --ratio 0.5")[0]["asked"],
        json!({"batch": "max", "ratio": 0.5})
    );
    let table = succeeds(&[
        "plan",
        "--setup",
        "ess",
        "--link",
        "pcie4",
        "--weights",
        "0",
        "--gpu",
        "80GiB",
        "--context",
        "128K",
        "--batch",
        "40,900",
    ]);
    assert!(table.lines().any(|line| line.contains("does not fit")) && table.contains("pcie4"), "{table}");
}

#[test]
fn bad_input_is_one_error_that_names_the_option_or_the_field() {
    let good = "--gpu 80GiB --weights 0 --context 32K";
    let cases = [
        ("--context 32K", "--gpu"),
        ("--gpu 80GiB", "--context"),
        ("--gpu 80 --context 32K", "--gpu"),
        ("--gpu 0GiB --context 32K", "--gpu"),
        ("--gpu -1GiB --context 32K", "-1"),
        ("--gpu 80GiB --weights 0 --context 32k", "--context"),
        ("--gpu 80GiB --weights 0 --context 0", "--context"),
        ("--gpu 80GiB --weights 0 --context 200K", "context is beyond the model's"),
        ("--gpu 80GiB --context 32K --weights 80GiB", "weights"),
        ("--gpu 80GiB --context 32K --weights 79GiB --activations 2GiB", "activations"),
        ("--gpu 80GiB --weights 0 --context 32K --workspace 1EB", "--workspace"),
        (
            "--gpu 80GiB --weights 0 --context 32K --workspace 80GiB",
            "workspace: nothing of the GPU's memory is left",
        ),
        ("--gpu 80GiB --weights 0 --context 32K --batch 0", "--batch"),
        ("--gpu 80GiB --weights 0 --context 32K --batch -5", "--batch"),
        ("--gpu 80GiB --weights 0 --context 32K --batch 60000", "gpu: the cache of this batch"),
        (
            "--gpu 80GiB --weights 0 --context 32K --batch 100 --host 1GiB",
            "host: the total pool of this batch",
        ),
        ("--gpu 80GiB --weights 0 --context 32K --ratio 0", "--ratio"),
        ("--gpu 80GiB --weights 0 --context 32K --ratio 1.01", "--ratio"),
        ("--gpu 80GiB --weights 0 --context 32K --ratio NaN", "--ratio"),
        ("--gpu 80GiB --weights 0 --context 32K --mtp 0", "--mtp"),
        ("--gpu 80GiB --weights 0 --context 32K --model gpt", "--model"),
        ("--gpu 80GiB --weights 0 --context 4K --model deepseek-v3 --ratio 0.5", "ratio of a dense model"),
        ("--gpu 80GiB --weights 0 --context 32K --nonsense 1", "--nonsense"),
        ("--gpu 80GiB --weights 0 --context 32K --link pcie5", "--setup"),
        ("--gpu 80GiB --weights 0 --context 32K --accept 1", "--setup"),
        ("--gpu 80GiB --weights 0 --context 32K --trace t", "--setup"),
        ("--gpu 80GiB --weights 0 --context 32K --setup none", "--setup none"),
        ("--gpu 80GiB --weights 0 --context 32K --setup ess --accept 1.5", "accept"),
        ("--gpu 80GiB --weights 0 --context 32K --setup ess --link x", "link"),
        ("--gpu 80GiB --weights 0 --context 32K --setup ess --model gqa-8x128", "model.dims"),
        ("--gpu 80GiB --weights 0 --context 4K --setup ess --model deepseek-v3", "dense"),
        ("--gpu 80GiB --weights 0 --context 32K --html x --json x", "name the same file"),
        ("--gpu 141GB --context 32K --gpus 0", "--gpus"),
        ("--gpu 141GB --context 32K --gpus 7", "--gpus"),
        ("--gpu 141GB --context 32K --gpus -8", "--gpus"),
        ("--gpu 141GB --context 32K --gpus 1e9", "--gpus"),
        ("--gpu 141GB --context 32K --gpus 1000000000", "--gpus"),
        ("--gpu 141GB --context 32K --gpus 4", "weights: nothing of the GPU's memory is left"),
        ("--gpu 141GB --context 32K --weights 142GB", "weights: nothing of the GPU's memory is left"),
        ("--gpu 141GB --context 32K --model gqa-8x128", "pass --weights"),
        ("--gpu 141GB --context 32K --attention both", "--attention"),
        ("--gpu 141GB --context 32K --setup ess --attention tp", "--attention dp"),
        ("--gpu 141GB --context 32K --min-otps 20", "--setup"),
        ("--gpu 141GB --context 32K --setup ess --min-otps fast", "--min-otps"),
        ("--gpu 141GB --context 32K --setup ess --min-otps -1", "--min-otps"),
        ("--gpu 141GB --context 32K --setup ess --min-otps 0", "--min-otps"),
        ("--gpu 141GB --context 32K --setup ess --min-otps inf", "--min-otps"),
    ];
    for (options, named) in cases {
        let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
        let error = refuses(&arguments);
        assert!(error.contains(named), "{options}: {error}");
    }
    // One wrong value in a list is an error of the whole list.
    assert!(
        refuses(&["plan", "--weights", "0", "--gpu", "80GiB", "--context", "32K,200K"]).contains("context")
    );
    let many: Vec<String> = (1..=400).map(|n| n.to_string()).collect();
    let many = many.join(",");
    let arguments = ["plan", "--weights", "0", "--gpu", "80GiB", "--context", &many, "--batch", &many];
    assert!(refuses(&arguments).contains("the sweep has too many combinations"));
    assert_eq!(plans(good).len(), 1);
}
