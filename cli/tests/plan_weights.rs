//! Tests of the weights of `forebay plan`, run as its users run it: by module, dtype and division, and sharded over the
//! ranks of a host. The figures themselves are tested in the library (`tests/module_weights.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::{Value, json};

/// What `--model deepseek-r1` and a context need, before further options.
const R1: &str = "--model deepseek-r1 --gpu 80GB --context 4K";

fn arguments<'a>(given: &'a str, more: &'a str) -> Vec<&'a str> {
    let words = given.split(' ').chain(more.split(' ')).filter(|word| !word.is_empty());
    std::iter::once("plan").chain(words).collect()
}

/// The only entry of a plan with these options.
fn entry(given: &str, more: &str) -> Value {
    let text = succeeds(&[&arguments(given, more)[..], &["--json", "-"]].concat());
    let Value::Array(mut entries) = serde_json::from_str(&text).unwrap() else { panic!("no list") };
    assert_eq!(entries.len(), 1, "{more}");
    entries.remove(0)
}

fn printed(given: &str, more: &str) -> String {
    succeeds(&arguments(given, more)).replace('\n', " ")
}

#[test]
fn a_dense_model_has_a_plan_of_weights_without_a_setup() {
    let own = entry(R1, "");
    // On 8 GPUs of 80 GB nothing is left, so the default is two nodes.
    assert_eq!((&own["deployment"]["gpus"], &own["fits"]), (&16.into(), &true.into()));
    assert!(own["notes"].to_string().contains("dense attention reads every row"), "{}", own["notes"]);
    assert_eq!(own["weights"]["on_gpu_bytes"], own["deployment"]["weights_bytes"]);
    let modules = own["weights"]["modules"].as_array().unwrap();
    let on_gpu: u64 = modules.iter().map(|module| module["on_gpu_bytes"].as_u64().unwrap()).sum();
    assert_eq!(own["weights"]["on_gpu_bytes"], on_gpu);
    assert!(own["weights"].get("saved_bytes").is_none());
    let text = printed(R1, "");
    assert!(text.contains("Weights by module, in fp8: attention 11.4 GB, dense FFN 1.19 GB"), "{text}");
    assert!(text.contains("routed experts 40.9 GB of 654 GB") && text.contains("16 GPUs of 80 GB"), "{text}");
    assert!(!text.contains("Sharded"));
    // Where one node is enough, it stays the default.
    assert_eq!(entry("--model deepseek-r1 --gpu 141GB --context 4K", "")["deployment"]["gpus"], 8);
    assert_eq!(entry(R1, "--weight-dtype int4")["deployment"]["gpus"], 8);
}

#[test]
fn sharding_saves_the_published_bytes() {
    let gib = |value: &Value| format!("{:.2}", value.as_f64().unwrap() / f64::from(1 << 30));
    for (more, saved, exact) in [
        ("--shard o_proj", "5.55", "5.55"),
        ("--shard mla", "8.83", "8.84"),
        ("--shard o_proj --weight-dtype bf16 --gpus 32", "11.10", "11.10"),
        ("--shard mla --weight-dtype bf16 --gpus 32", "17.67", "17.69"),
    ] {
        let own = entry(R1, &format!("{more} --dp 8"));
        let weights = &own["weights"];
        assert_eq!(
            (gib(&weights["saved_bytes"]), gib(&weights["before_rounding"]["saved_bytes"])),
            (saved.into(), exact.into())
        );
        let parts = ["resident_bytes", "sharded_bytes"].map(|part| weights[part].as_u64().unwrap());
        let buffers: u64 =
            weights["buffers"].as_array().unwrap().iter().map(|one| one.as_u64().unwrap()).sum();
        assert_eq!(weights["device_bytes"], parts.iter().sum::<u64>() + buffers);
        let unsharded = entry(R1, &more.replace("--shard o_proj", "").replace("--shard mla", ""));
        let on_gpu = |entry: &Value| entry["weights"]["on_gpu_bytes"].as_i64().unwrap();
        if unsharded["deployment"]["gpus"] == own["deployment"]["gpus"] {
            assert_eq!(on_gpu(&unsharded) - on_gpu(&own), weights["saved_bytes"].as_i64().unwrap());
            assert!(own["batch"].as_u64() > unsharded["batch"].as_u64());
        }
        assert_eq!((&weights["ranks"], &weights["resident_layer"]), (&8.into(), &0.into()));
        assert_eq!((&weights["sharded_layers"], &weights["closing"]), (&60.into(), &"resident layer".into()));
    }
    let text = printed(R1, "--shard o_proj --dp 8");
    for words in [
        "Sharded over 8 ranks: o_proj in 60 of 61 layers; layer 0 stays whole",
        "the latent rows of 84,814 tokens",
        "its time needs --setup",
    ] {
        assert!(text.contains(words), "{text}");
    }
    let page = succeeds(&[&arguments(R1, "--shard o_proj")[..], &["--html", "-"]].concat());
    assert!(page.contains("Sharded over 8 ranks") && page.contains("Weights by module"));
    // A draft layer makes the layers even.
    let even = &entry(R1, "--shard mla --mtp 2")["weights"];
    assert_eq!((&even["closing"], &even["sharded_layers"]), (&"even".into(), &62.into()));
    assert_eq!(even["resident_layer"], Value::Null);
}

#[test]
fn from_the_host_a_pull_is_a_whole_layer() {
    let own = &entry(R1, "--shard o_proj --weights-from host")["weights"];
    let page = 112 << 20;
    assert_eq!((&own["weights_from"], &own["sharded_bytes"]), (&"host".into(), &0.into()));
    assert_eq!((&own["host_bytes"], &own["pull_bytes"]), (&(60_u64 * page).into(), &page.into()));
    assert_eq!(own["buffers"], json!([page, page]));
    let text = printed(R1, "--shard o_proj --weights-from host");
    assert!(
        text.contains("from each rank's pinned host memory") && text.contains("of host memory"),
        "{text}"
    );
}

#[test]
fn degrees_divide_the_modules_they_are_for() {
    let of =
        |more: &str| entry("--model deepseek-r1 --gpu 141GB --context 4K --gpus 32", more)["weights"].clone();
    let on_gpu = |weights: &Value, name: &str| {
        let all = weights["modules"].as_array().unwrap();
        all.iter().find(|module| module["module"] == name).unwrap()["on_gpu_bytes"].as_u64().unwrap()
    };
    let (plain, tp) = (of(""), of("--tp 8"));
    assert_eq!(on_gpu(&plain, "attention"), on_gpu(&tp, "attention"));
    for name in ["dense FFN", "shared experts", "embedding", "head"] {
        assert_eq!(on_gpu(&plain, name), 8 * on_gpu(&tp, name), "{name}");
    }
    assert_eq!(on_gpu(&of("--ep 8"), "routed experts"), 4 * on_gpu(&plain, "routed experts"));
    let redundant = of("--redundant-experts 32");
    assert_eq!(8 * on_gpu(&redundant, "redundant experts"), on_gpu(&plain, "routed experts"));
    let heads = of("--attention tp --tp 4");
    assert_eq!((&heads["attention_tp"], &heads["tp"]), (&4.into(), &4.into()));
    assert!(on_gpu(&heads, "attention") < on_gpu(&plain, "attention") / 3);
    // Four groups of heads among 16 GPUs have each the cache of all their sequences.
    let own =
        entry("--model deepseek-r1 --gpu 141GB --context 4K --gpus 16", "--attention tp --tp 4 --batch 3");
    assert_eq!(own["sequences"], 12);
    let text = printed("--model deepseek-r1 --gpu 141GB --context 4K --gpus 32", "--tp 8 --ep 16");
    assert!(
        text.contains("experts divided over 16 GPUs, dense parts, embedding and head over 8 GPUs"),
        "{text}"
    );
}

#[test]
fn bad_input_is_one_error_that_names_the_option() {
    let cases = [
        ("--shard nothing", "the pattern nothing matches no tensor of any layer"),
        ("--shard *.o_proj.weight,o_proj", "model.layers.0.self_attn.o_proj.weight: two patterns match it"),
        ("--shard [a", "the pattern [a: "),
        ("--shard o_proj --weights 10GB", "--shard"),
        (
            "--shard o_proj --setup none-such",
            "--setup none-such: neither a file nor a built-in setup (ess, r1-h20, r1-h800)",
        ),
        ("--setup r1-h20", "attention of this model is dense"),
        ("--tp 2 --setup r1-h20 --shard o_proj", "--tp"),
        ("--dp 16 --setup r1-h800 --shard o_proj", "ranks that pull from each other are on one node"),
        ("--weight-dtype int8 --setup ess", "--weight-dtype"),
        ("--weight-dtype fp7", "--weight-dtype"),
        ("--weights-from host", "--shard"),
        ("--shard o_proj --weights-from disk", "--weights-from"),
        ("--dp 0", "--dp"),
        ("--dp -1", "--dp"),
        ("--dp 5000", "--dp"),
        // Without anything to share it would have no effect.
        ("--dp 8", "--shard"),
        ("--dp 16 --gpus 8 --shard mla", "--dp: more ranks than GPUs (value 16, gpus 8)"),
        ("--ep 3", "expert parallelism (ep): does not divide the model's experts"),
        ("--ep 16 --gpus 8", "--ep: does not divide the GPUs"),
        ("--tp 3", "tensor parallelism (tp): does not divide the model's heads"),
        ("--tp 16 --gpus 8", "--tp: does not divide the GPUs"),
        ("--redundant-experts 0", "--redundant-experts"),
        ("--redundant-experts 300", "redundant experts: more than the model has"),
        ("--shard *.mlp.experts.*", "the ranks of a group have different parts of it"),
        ("--gpus 8", "weights: nothing of the GPU's memory is left"),
        ("--gpus 8 --shard mla", "weights: nothing of the GPU's memory is left"),
    ];
    for (more, named) in cases {
        let error = refuses(&arguments(R1, more));
        assert!(error.contains(named), "{more}: {error}");
    }
    let unknown = "--model gqa-8x128 --gpu 80GB --context 4K";
    for option in ["--shard o_proj", "--weight-dtype bf16", "--tp 2", "--ep 2"] {
        let error = refuses(&arguments(unknown, option));
        let name = option.split(' ').next().unwrap();
        assert!(error.contains(&format!("{name}: no checkpoint of gqa-8x128 is known")), "{error}");
    }
    // 8 GPUs of 96 GB hold the weights only if the ranks share them.
    let h20 = "--model deepseek-r1 --gpu 96GB --context 4K --gpus 8";
    assert!(refuses(&arguments(h20, "")).contains("weights: nothing of the GPU's memory is left"));
    assert_eq!(entry(h20, "--shard mla --dp 8")["fits"], true);
}
