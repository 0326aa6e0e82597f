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

const H20: &str = "--setup r1-h20 --gpu 96GiB --workspace 4GiB --context 3K --shard o_proj --dp 8";
const H800: &str = "--setup r1-h800 --gpu 80GiB --workspace 4GiB --context 3K --shard o_proj --dp 8";

/// The object `weights` of a plan's only entry.
fn weights(options: &str) -> Value {
    entries(options)[0]["weights"].clone()
}

/// A figure by way.
fn by(weights: &Value, figure: &str, way: &str) -> f64 {
    number(&weights[figure][way])
}

/// How much more one figure is than another, in percent.
fn more(figure: f64, than: f64) -> String {
    format!("{:.0}%", 100.0 * (figure / than - 1.0))
}

/// Tokens a second of one way and of sharded weights, as the page writes them.
fn rates(weights: &Value, way: &str) -> String {
    let [from, to] = [way, "sharded"].map(|way| by(weights, "throughput", way));
    format!("{from:.0} -> {to:.0}, +{}", more(to, from))
}

/// Whether the page says this, wherever its lines end.
fn on_the_page(said: &str) {
    let page: Vec<&str> = include_str!("../../docs/weights.md").split_whitespace().collect();
    assert!(page.join(" ").contains(said), "docs/weights.md does not say: {said}");
}

/// Milliseconds that a step waits.
fn waits_ms(weights: &Value) -> f64 {
    number(&weights["exposed_us"]["total"]) / 1e3
}

#[test]
fn the_published_deployments_are_on_the_page() {
    // One workspace for both. Whole weights leave no room on H20, as published; the batch there is of 8 GPUs.
    let weights = weights(H20);
    assert_eq!((&weights["batch"]["resident"], &weights["gain"]), (&Value::Null, &Value::Null));
    assert_eq!((&weights["batch"]["sharded"], &weights["batch"]["by_heads"]), (&17.into(), &61.into()));
    assert_eq!((&weights["pays"], &weights["verdict"]), (&true.into(), &"only way".into()));
    assert_eq!((&weights["better"], number(&weights["exposed_us"]["total"])), (&"activations".into(), 0.0));
    let (of_h20, moved) = (rates(&weights, "by_heads"), by(&weights, "throughput", "activations"));
    let text = printed(H20);
    for wanted in [
        "Sharding o_proj pays, but o_proj divided over 8 ranks, so that activations move, yields 398 tokens/s of a GPU",
        "with 19 sequences on each; sharded, 17 sequences on each GPU and 356 tokens/s of a GPU",
        "with whole weights on each GPU nothing fits; attention by heads (--attention tp) yields",
        "tokens/s of a GPU with 61 sequences on all; a pull of",
        "is hidden beside layers of",
        "Exposed: no layer waits; its end does not",
        "nothing here was measured",
    ] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(
        refuses(&[&["plan"], &words(&H20.replace("--gpu 96GiB", "--gpu 90GiB"))[..]].concat())
            .contains("nothing of the GPU's memory is left")
    );
    on_the_page(&format!("| batch, all GPUs: by heads -> sharded | 52 -> 136 | 61 -> {} |", 8 * 17));
    on_the_page(&format!("| tokens/s of a GPU: by heads -> sharded | 128 -> 181, +41% | {of_h20} |"));
    on_the_page(&format!("activations move | not given | {moved:.0}, with a batch of {} |", 8 * 19));
    let (pull, layer) = (number(&weights["pull_us"]) / 1e3, by(&weights, "layer_us", "sharded") / 1e3);
    on_the_page(&format!("0.34 ms | {pull:.2} ms, beside layers of {layer:.2} ms: hidden |"));
}

#[test]
fn the_deployment_that_exposes_its_pulls_is_on_the_page() {
    let weights = weights(H800);
    assert_eq!((&weights["batch"]["resident"], &weights["batch"]["sharded"]), (&29.into(), &83.into()));
    assert_eq!((&weights["verdict"], &weights["batch"]["by_heads"]), (&"pays".into(), &Value::Null));
    assert_eq!((&weights["pays"], &weights["better"]), (&true.into(), &"activations".into()));
    let (step, waits) = (by(&weights, "step_us", "sharded") / 1e3, waits_ms(&weights));
    assert!(waits > 0.2 * step);
    on_the_page("| 32 x H800, BF16: batch of a GPU | 30 -> 83 | 29 -> 83 |");
    on_the_page(&format!("| tokens/s of a GPU | 280 -> 400, +43% | {} |", rates(&weights, "resident")));
    on_the_page("activations move | not given | 1,352, with a batch of 86 |");
    let (pull, layer) = (number(&weights["pull_us"]) / 1e3, by(&weights, "layer_us", "sharded") / 1e3);
    on_the_page(&format!(
        "{pull:.2} ms, beside layers of {layer:.2} ms: a step of {step:.0} ms waits {waits:.0} ms |"
    ));
    // Its works, of which the exchange takes a part beside its bytes.
    let [exchange, whole] = ["r1-h800", "r1-h20"].map(|name| {
        let us = number(&data(name)["deployment"]["exchange_us"]);
        (us, 61.0 * us / 1e3)
    });
    on_the_page(&format!("takes {:.0} us on H20 and {:.1} on H800", whole.0, exchange.0));
    let h20 = by(&self::weights(H20), "step_us", "sharded") / 1e3;
    let works = step - waits;
    on_the_page(&format!("{:.1} of {h20:.1} ms, and {:.1} of the {works:.1} that", whole.1, exchange.1));
    let hidden = 83.0 / (step - waits) * 1e3;
    on_the_page(&format!("would gain {}", more(hidden, by(&weights, "throughput", "resident"))));
    let page = succeeds(&[&["plan"], &words(H800)[..], &["--html", "-"]].concat());
    assert!(page.contains("Exposed: 58 of 61 layers wait"));
    assert!(
        page.contains(
            "Sharding o_proj pays, but o_proj divided over 8 ranks, so that activations move, yields"
        )
    );
    assert!(page.contains("sharded, 83 sequences on each GPU"), "{page}");
}

/// The figures of the page's explanations.
#[test]
fn deviations_are_on_the_page() {
    let (h20, h800) = (weights(H20), weights(H800));
    // Tokens a second beside the published ones, and steps.
    let beside = [(&h20, "by_heads", 128.0), (&h20, "sharded", 181.0)].into_iter();
    let beside = beside.chain([(&h800, "resident", 280.0), (&h800, "sharded", 400.0)]);
    let mut ratios: Vec<f64> =
        beside.map(|(of, way, published)| by(of, "throughput", way) / published).collect();
    ratios.sort_by(f64::total_cmp);
    on_the_page(&format!("{:.1} to {:.1} times the published ones", ratios[0], ratios[3]));
    let [sharded, resident] =
        [(&h20, "sharded"), (&h800, "resident")].map(|(of, way)| by(of, "step_us", way) / 1e3);
    on_the_page(&format!(
        "where the bound is {sharded:.0}, and 107 ms on H800 at batch 30, where it is {resident:.0}"
    ));
    on_the_page(&format!("by the bound it is {:.1} times", sharded * 1e3 / by(&h20, "step_us", "by_heads")));
    // Activations that move: how much better, and with four times the constant.
    let [of_h20, of_h800] =
        [&h20, &h800].map(|of| more(by(of, "throughput", "activations"), by(of, "throughput", "sharded")));
    on_the_page(&format!("in both deployments, by {of_h20} and {of_h800}"));
    let dearer = |of: &Value, batch: f64| batch * 1e6 / (by(of, "step_us", "activations") + 3.0 * 1_500.0);
    let same = weights(&format!("{H20} --batch 17"));
    on_the_page(&format!(
        "the same batch of 17 yields {:.0} tokens/s, less than the 356",
        dearer(&same, 17.0)
    ));
    assert_eq!(format!("{:.0}", dearer(&h800, 86.0)), "1263");
    on_the_page("they still yield 1,263 tokens/s against 882");
    let collectives = number(&h800["activations"]["collectives_us"]);
    on_the_page(&format!(
        "Of the {collectives:.0} us of a layer's collectives {:.0} are bytes",
        collectives - 1_500.0 / 61.0
    ));
    // One sequence.
    let one = weights(&format!("{H20} --batch 1"));
    let (step, waits, layer) =
        (by(&one, "step_us", "sharded"), waits_ms(&one), by(&one, "layer_us", "sharded") / 1e3);
    let pull = number(&one["pull_us"]) / 1e3;
    on_the_page(&format!(
        "{pull:.2} ms, beside layers of {layer:.2} ms: a step of {:.1} ms waits {waits:.1} ms |",
        step / 1e3
    ));
    on_the_page(&format!("the plan exposes {:.0}% of the step", 1e5 * waits / step));
    let whole = weights("--setup r1-h20 --gpu 96GiB --context 3K --shard o_proj --dp 8 --batch 1");
    let alone = by(&whole, "layer_us", "resident") / 1e3;
    on_the_page(&format!(
        "takes {alone:.2} ms alone, and {layer:.2} with the memory's other traffic; a pull takes {pull:.2}"
    ));
    let [heads, pulls] = ["by_heads", "sharded"].map(|way| by(&one, "throughput", way));
    on_the_page(&format!("attention by heads yields {heads:.0} tokens/s, and pulls {pulls:.0}"));
    // The memory that a GPU has.
    let less = weights(&H20.replace("96GiB", "95.5GiB"));
    on_the_page(&format!("with 95.5 GiB it is {} on each GPU", less["batch"]["sharded"]));
    let least = H20.replace("96GiB", "96GB").replace("--workspace 4GiB", "");
    refuses(&[&["plan"], &words(&format!("{least} --batch 17"))[..]].concat());
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
    let on_pcie = weights(&H20.replace("r1-h20", &changed("pcie-17.json", Some(25.0))));
    let [pull, step] = [number(&on_pcie["pull_us"]), by(&on_pcie, "step_us", "sharded")].map(|us| us / 1e3);
    on_the_page(&format!("At 25 GB/s a pull of 98 MiB takes {pull:.1} ms"));
    on_the_page(&format!("a batch of 17: a step lasts {step:.0} ms"));
    // The sharded plan's tokens a second where nothing is won, and a pull of all projections.
    let eight = weights(&format!("--setup r1-h20 {rest} --batch 8"));
    assert_eq!((&eight["verdict"], &eight["better"]), (&"little gain".into(), &"by_heads".into()));
    on_the_page(&format!("at batch 8 on H20 {:.0}% of the tokens", -100.0 * number(&eight["gain"])));
    let all = weights(&format!("--setup r1-h20 {} --batch 8", rest.replace("o_proj", "mla")));
    let times = number(&all["pull_bytes"]) / number(&eight["pull_bytes"]);
    on_the_page(&format!("With `mla` a pull moves {times:.1} times the bytes"));
    // Peers over PCIe: a pull takes several layers.
    let pcie = changed("pcie.json", Some(25.0));
    let slow = format!("--setup {pcie} {rest}");
    let weights = &entries(&slow)[0]["weights"];
    assert_eq!((&weights["pays"], &weights["verdict"]), (&false.into(), &"exposed".into()));
    assert!(number(&weights["pull_us"]) > 2.0 * number(&weights["layer_us"]["sharded"]));
    assert!(number(&weights["gain"]) < 0.0);
    let text = printed(&slow);
    assert!(text.contains("Do not shard o_proj: a pull takes") && text.contains("where whole weights have"));
    assert!(text.contains("; o_proj divided over 8 ranks, so that activations move, yields"), "{text}");
    // The host's link alone: no other way has a price.
    let host = format!("{} --weights-from host", H20.replace("r1-h20", &changed("host.json", None)));
    let alone = self::weights(&host);
    assert_eq!((&alone["pays"], &alone["better"]), (&true.into(), &Value::Null));
    assert!(printed(&host).contains("Shard o_proj: with whole weights on each GPU nothing fits; sharded,"));
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
