//! Tests of what `forebay plan --shard --setup` says of pulls: the printed times against a naive computation from the
//! setup's file, and where sharding does not pay.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::path::PathBuf;

use command::{refuses, succeeds};
use serde_json::Value;

const MIB: f64 = 1_048_576.0;

fn data(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../data/setups/{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn words(text: &str) -> Vec<&str> {
    text.split(' ').filter(|word| !word.is_empty()).collect()
}

/// The entries of a plan with these options.
fn entries(options: &str) -> Vec<Value> {
    let text = succeeds(&[&["plan"], &words(options)[..], &["--json", "-"]].concat());
    let Value::Array(entries) = serde_json::from_str(&text).unwrap() else { panic!("no list") };
    entries
}

fn printed(options: &str) -> String {
    succeeds(&[&["plan"], &words(options)[..]].concat()).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn near(found: f64, wanted: f64, what: &str) {
    assert!((found / wanted - 1.0).abs() < 0.01, "{what}: {found} for {wanted}");
}

/// DeepSeek-R1's layer on a GPU, in microseconds: up to the end of the output projection, behind it, and how much of it
/// waits for memory. Each work is its products or its bytes, whichever takes longer, and 2 us for each kernel.
struct Naive {
    before: f64,
    after: f64,
    by_memory: f64,
    /// Bytes a microsecond of the memory, and of a neighbour; bytes of a weight.
    memory: f64,
    nvlink: f64,
    value: f64,
    /// Bytes of a token for experts of GPUs in this node.
    near: f64,
}

fn naive(setup: &Value, batch: f64, context: f64) -> Naive {
    let of = |path: &str| number(setup.pointer(path).unwrap());
    let value = if setup["model"]["weight_dtype"] == "bf16" { 2.0 } else { 1.0 };
    let memory = 0.8 * of("/gpu/memory_gb_s") * 1e3;
    let bf16 = 0.5 * of("/gpu/bf16_tflops") * 1e6;
    let products = if value == 2.0 { bf16 } else { 0.5 * of("/gpu/fp8_tflops") * 1e6 };
    let (gpus, node, nvlink) =
        (of("/deployment/gpus"), of("/deployment/node_gpus"), of("/deployment/nvlink_gb_s") * 1e3);
    let mut by_memory = 0.0;
    let mut work = |products: f64, bytes: f64, kernels: f64| {
        let us = products.max(bytes) + 2.0 * kernels;
        if bytes > products {
            by_memory += us;
        }
        us
    };
    // q_a, kv_a; q_b and the keys' up-projection absorbed, in BF16; attention; the output projection and the values'
    // own.
    let (down, up, absorbed) = (7168.0 * (1536.0 + 576.0), 1536.0 * 128.0 * 192.0, 128.0 * 128.0 * 512.0);
    let (output, values) = (7168.0 * 16384.0, 128.0 * 512.0 * 128.0);
    let expert = 3.0 * 7168.0 * 2048.0;
    let mut before = work(2.0 * batch * down / products, down * value / memory, 6.0)
        + work(2.0 * batch * (up / products + absorbed / bf16), (up * value + absorbed * 2.0) / memory, 4.0)
        + work(
            2.0 * batch * 128.0 * context * 1088.0 / (0.667 * of("/gpu/bf16_tflops") * 1e6),
            batch * context * 1152.0 / memory,
            2.0,
        );
    let touched = 256.0 / gpus * (1.0 - (-batch * gpus * 8.0 / 256.0).exp());
    let out = (2.0 * batch * (output / products + values / bf16), (output * value + values * 2.0) / memory);
    let moe = (2.0 * batch * 9.0 * expert / products, (touched + 1.0) * expert * value / memory);
    let (out_us, moe_us) = (out.0.max(out.1) + 4.0, moe.0.max(moe.1) + 16.0);
    let rest = work(out.0 + moe.0, out.1 + moe.1, 10.0);
    before += rest * out_us / (out_us + moe_us);
    let sent = batch * 8.0 * 7168.0 * (value + 2.0);
    let near = sent * (node - 1.0) / gpus;
    let far = sent * (1.0 - node / gpus) / (of("/deployment/network_gb_s") * 1e3);
    let after = rest * moe_us / (out_us + moe_us) + of("/deployment/exchange_us") + far.max(near / nvlink);
    Naive { before, after, by_memory, memory, nvlink, value, near }
}

/// A step in ticks of half a microsecond: 61 layers, the first one resident, each pull's bytes moved a little at a time
/// by the two pulls that there are at most. The graph ends when its last pulls have.
fn ticks(naive: &Naive, pull_us: f64, slower: f64) -> f64 {
    const TICK: f64 = 0.5;
    let (mut time, mut pulls, mut here) = (0.0, Vec::<(usize, f64)>::new(), vec![false; 64]);
    (here[1], here[2]) = (true, true);
    for layer in 0..61 {
        let scale = if layer == 0 { 1.0 } else { slower };
        let mut pass =
            |pulls: &mut Vec<(usize, f64)>, here: &mut Vec<bool>, us: f64, until: Option<usize>| {
                let mut left = us;
                while left > 0.0 || until.is_some_and(|layer| !here[layer]) {
                    let parts = pulls.len().min(2) as f64;
                    pulls.iter_mut().take(2).for_each(|pull| pull.1 -= TICK / parts);
                    pulls.iter().filter(|pull| pull.1 <= 0.0).for_each(|pull| here[pull.0] = true);
                    pulls.retain(|pull| pull.1 > 0.0);
                    (left, time) = (left - TICK, time + TICK);
                }
            };
        pass(&mut pulls, &mut here, 0.0, Some(layer).filter(|layer| *layer > 0));
        pass(&mut pulls, &mut here, scale * naive.before, None);
        if layer > 0 {
            // The layers of a buffer after it; those of the next step are numbered on.
            let next = if layer + 2 <= 60 { layer + 2 } else { layer + 3 };
            pulls.push((next, pull_us));
        }
        pass(&mut pulls, &mut here, scale * naive.after, None);
        if layer == 60 {
            pass(&mut pulls, &mut here, 0.0, Some(62));
            pass(&mut pulls, &mut here, 0.0, Some(63));
        }
    }
    time
}

#[test]
fn printed_times_are_those_of_a_naive_computation() {
    for (name, gpu, batch, context) in [
        ("r1-h20", "96GiB", 1, 3072),
        ("r1-h20", "96GiB", 17, 3072),
        ("r1-h20", "96GiB", 34, 3072),
        ("r1-h800", "80GiB", 4, 8192),
        ("r1-h800", "80GiB", 83, 3072),
    ] {
        let setup = data(name);
        let options =
            format!("--setup {name} --gpu {gpu} --context {context} --batch {batch} --shard o_proj --dp 8");
        let entry = &entries(&options)[0];
        let weights = &entry["weights"];
        let naive = naive(&setup, f64::from(batch), f64::from(context));
        let layer = naive.before + naive.after;
        let pulled = 98.0 * MIB * naive.value;
        let pull_us = (pulled + naive.near) / naive.nvlink;
        near(number(&weights["pull_us"]), pull_us, &options);
        let slower = 1.0 + naive.by_memory / layer * (2.0 * pulled / naive.memory) / layer;
        near(number(&weights["layer_us"]["sharded"]), layer * slower, &options);
        let step = ticks(&naive, pull_us, slower);
        near(number(&weights["step_us"]["sharded"]), step, &options);
        near(number(&weights["throughput"]["sharded"]), f64::from(batch) * 1e6 / step, &options);
        // What a step takes longer than its layers.
        let works = layer + 60.0 * layer * slower;
        let (total, wanted) = (number(&weights["exposed_us"]["total"]), step - works);
        assert!((total - wanted).abs() < 0.01 * step, "{options}: {total} for {wanted}");
        let layers = weights["exposed_us"]["layers"].as_array().unwrap();
        let sum: f64 = layers.iter().map(number).sum();
        assert!((sum + number(&weights["exposed_us"]["wrap"]) - total).abs() < 1e-6 && layers.len() == 61);
        if weights["batch"]["resident"] == batch {
            near(number(&weights["step_us"]["resident"]), 61.0 * layer, &options);
            let gain = 61.0 * layer / step - 1.0;
            assert!((number(&weights["gain"]) - gain).abs() < 0.01, "{options}: {}", weights["gain"]);
        }
        // Seven parts of the heads' values of this rank's tokens, and partial results of the others' tokens.
        let moved = &weights["activations"];
        let bytes = 2.0 * f64::from(batch) * (16384.0 * 7.0 / 8.0 + 7.0 * 7168.0);
        near(number(&moved["layer_bytes"]), bytes, &options);
        near(number(&moved["collectives_us"]), 1500.0 / 61.0 + bytes / naive.nvlink, &options);
        near(number(&moved["saved_bytes"]), 61.0 * 98.0 * MIB * naive.value, &options);
    }
}

/// Tokens a second of one way and of sharded weights, as the page writes them.
fn rates(weights: &Value, way: &str) -> String {
    let [from, to] = [way, "sharded"].map(|way| number(&weights["throughput"][way]));
    format!("{from:.0} -> {to:.0}, +{:.0}%", 100.0 * (to / from - 1.0))
}

#[test]
fn the_published_deployments_are_on_the_page() {
    // One workspace for both. Whole weights leave no room on H20, as published; the batch there is of 8 GPUs.
    let h20 = "--setup r1-h20 --gpu 96GiB --workspace 4GiB --context 3K --shard o_proj --dp 8";
    let weights = &entries(h20)[0]["weights"];
    assert_eq!((&weights["batch"]["resident"], &weights["gain"]), (&Value::Null, &Value::Null));
    assert_eq!((&weights["batch"]["sharded"], &weights["batch"]["by_heads"]), (&17.into(), &61.into()));
    assert_eq!((&weights["pays"], &weights["verdict"]), (&true.into(), &"only way".into()));
    assert_eq!(weights["exposed_us"]["total"], 0.0);
    let of_h20 = rates(weights, "by_heads");
    let text = printed(h20);
    for wanted in [
        "Shard o_proj: with whole weights on each GPU nothing fits; attention by heads (--attention tp) yields",
        "tokens/s of a GPU with 61 sequences on all; sharded, 17 sequences on each GPU",
        "is hidden beside layers of",
        "Exposed: no layer waits; its end does not",
        "nothing here was measured",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(
        refuses(&[&["plan"], &words(&h20.replace("--gpu 96GiB", "--gpu 90GiB"))[..]].concat())
            .contains("nothing of the GPU's memory is left")
    );
    let h800 = "--setup r1-h800 --gpu 80GiB --workspace 4GiB --context 3K --shard o_proj --dp 8";
    let weights = &entries(h800)[0]["weights"];
    assert_eq!((&weights["batch"]["resident"], &weights["batch"]["sharded"]), (&29.into(), &83.into()));
    assert_eq!((&weights["verdict"], &weights["batch"]["by_heads"]), (&"pays".into(), &Value::Null));
    assert!(number(&weights["exposed_us"]["total"]) > 0.2 * number(&weights["step_us"]["sharded"]));
    let step = number(&weights["step_us"]["sharded"]) / 1e3;
    let waits = number(&weights["exposed_us"]["total"]) / 1e3;
    for row in [
        format!("| batch, all GPUs: by heads -> sharded | 52 -> 136 | 61 -> {} |", 8 * 17),
        format!("| tokens/s of a GPU: by heads -> sharded | 128 -> 181, +41% | {} |", of_h20),
        "| 32 x H800, BF16: batch of a GPU | 30 -> 83 | 29 -> 83 |".to_owned(),
        format!("| tokens/s of a GPU | 280 -> 400, +43% | {} |", rates(weights, "resident")),
        format!("a step of {step:.0} ms waits {waits:.0} ms |"),
    ] {
        assert!(include_str!("../../docs/weights.md").contains(&row), "{row}");
    }
    let page = succeeds(&[&["plan"], &words(h800)[..], &["--html", "-"]].concat());
    assert!(page.contains("Exposed: 58 of 61 layers wait") && page.contains("Shard o_proj: 83 sequences"));
}

/// A setup's file with other neighbours.
fn changed(name: &str, nvlink: Option<f64>) -> String {
    let mut setup = data("r1-h20");
    match nvlink {
        Some(rate) => setup["deployment"]["nvlink_gb_s"] = rate.into(),
        None => drop(setup["deployment"].as_object_mut().unwrap().remove("nvlink_gb_s")),
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("plan_pulls");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, setup.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn where_it_does_not_pay_the_plan_says_so() {
    let rest = "--gpu 96GiB --context 3K --shard o_proj --dp 8";
    // Peers over PCIe: a pull takes several layers.
    let pcie = changed("pcie.json", Some(25.0));
    let slow = format!("--setup {pcie} {rest}");
    let weights = &entries(&slow)[0]["weights"];
    assert_eq!((&weights["pays"], &weights["verdict"]), (&false.into(), &"exposed".into()));
    assert!(number(&weights["pull_us"]) > 2.0 * number(&weights["layer_us"]["sharded"]));
    assert!(number(&weights["gain"]) < 0.0);
    let text = printed(&slow);
    assert!(text.contains("Do not shard o_proj: a pull takes") && text.contains("where whole weights have"));
    // Short layers: one sequence, on the same GPUs.
    let short = format!("--setup r1-h20 {rest} --batch 1");
    let weights = &entries(&short)[0]["weights"];
    assert_eq!((&weights["pays"], &weights["verdict"]), (&false.into(), &"little gain".into()));
    assert!(number(&weights["pull_us"]) > number(&weights["layer_us"]["sharded"]));
    assert!(printed(&short).contains("Do not shard o_proj: a pull takes 337 us and a layer"));
    // The host's link is one too.
    let host = format!("--setup r1-h20 {rest} --weights-from host --batch 8");
    let weights = &entries(&host)[0]["weights"];
    near(number(&weights["pull_us"]), 112.0 * MIB / 53e3, "a whole layer at 53 GB/s");
    assert_eq!(weights["pays"], false);
    assert!(printed(&host).contains("A pull from the host takes"));
    // Offload and sharding are told apart.
    let both = "--setup ess --gpu 141GB --context 32K --mtp 2 --accept 1.7 --shard mla --dp 8";
    let text = printed(both);
    assert!(text.contains("Offload: at batch") && text.contains("shard mla:"), "{text}");
    assert!(text.contains("Tokens a second of the first table do not include what a step waits for pulls"));
}

#[test]
fn bad_input_is_one_error_each() {
    let rest = "--gpu 96GiB --context 3K --shard o_proj";
    let lone = changed("lone.json", None);
    let error = refuses(&[&["plan"], &words(&format!("--setup {lone} {rest}"))[..]].concat());
    assert!(
        error.contains("deployment.nvlink_gb_s: missing in the setup; pulls from peers need it"),
        "{error}"
    );
    let host = format!("--setup {lone} {rest} --weights-from host");
    assert_eq!(entries(&host)[0]["weights"]["activations"], Value::Null);
    // Costs of the setup end at twice their last point: the plan has no times of pulls.
    let far = "--setup ess --gpu 8TB --context 4K --batch 2000 --shard o_proj";
    let text = printed(far);
    assert!(text.contains("The time of pulls is not known:"), "{text}");
    assert_eq!(entries(far)[0]["weights"].get("pull_us"), None);
    let dense = "--setup ess --model deepseek-r1 --gpu 141GB --context 4K";
    assert!(refuses(&[&["plan"], &words(dense)[..]].concat()).contains("dense"));
    let weights = &entries(&format!("{dense} --shard o_proj"))[0]["weights"];
    assert_eq!(weights["ranks"], 8, "as many as a node has, without --dp");
    let simulated = refuses(&words("simulate --setup r1-h20 --context 4K --batch 4 --ratio 1"));
    assert!(simulated.contains("dense attention selects nothing"), "{simulated}");
}
