//! Tests of the advice that `forebay plan` gives an operator: whether to offload on a node, at which batch and ratio,
//! and what that gains. The last sentence of the text, the headline of the page and the JSON agree, and the README
//! shows what its command prints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::Value;

/// 8 x H200, DeepSeek-V3.2, 64K.
const NODE: &str = "--setup ess --gpus 8 --gpu 141GB --workspace 8GB --context 64K --mtp 2 --accept 1.7";

fn plan(options: &str, more: &[&str]) -> String {
    let arguments: Vec<&str> = std::iter::once("plan").chain(options.split(' ')).collect();
    succeeds(&[&arguments[..], more].concat())
}

fn entry(options: &str) -> Value {
    let Value::Array(mut entries) = serde_json::from_str(&plan(options, &["--json", "-"])).unwrap() else {
        panic!("no list")
    };
    assert_eq!(entries.len(), 1, "{options}");
    entries.remove(0)
}

/// The text after the last empty line, as one line.
fn last(text: &str) -> String {
    text.trim_end().rsplit("\n\n").next().unwrap().replace('\n', " ")
}

/// The advice, which is the same in every output, and whether it recommends offload.
fn advice(options: &str) -> (Option<bool>, String) {
    let entry = entry(options);
    let sentence = entry["advice"]["sentence"].as_str().unwrap().to_owned();
    assert_eq!(last(&plan(options, &[])), sentence, "{options}");
    assert_eq!(last(&plan(options, &["--wide"])), sentence, "{options}");
    let page = plan(options, &["--html", "-"]);
    assert!(page.contains(&format!(">{sentence}</h1>")), "{options}: {sentence}");
    // The advice is one sentence: a text that ends in a full stop occurs once.
    assert!(sentence.ends_with('.') && !sentence.contains(". "), "{sentence}");
    (entry["advice"]["offload"].as_bool(), sentence)
}

fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    match digits.len() {
        0..=3 => digits,
        n => format!("{},{}", &digits[..n - 3], &digits[n - 3..]),
    }
}

#[test]
fn where_offload_pays_the_sentence_gives_batch_ratio_gain_and_latency() {
    let (offload, sentence) = advice(NODE);
    assert_eq!(offload, Some(true));
    let entry = entry(NODE);
    let of = |value: &Value| value.as_f64().unwrap();
    let (batch, without) = (of(&entry["batch"]), &entry["without"]);
    let gain = of(&entry["throughput"]) / of(&entry["throughput_without"]) - 1.0;
    assert!((of(&entry["gain"]) / gain - 1.0).abs() < 1e-12);
    for words in [
        format!("batch {batch} on each GPU and ratio {:.3}", of(&entry["ratio"])),
        format!(
            "the 8 GPUs serve {:.0} sequences of 64K instead of {:.0}",
            8.0 * batch,
            8.0 * of(&without["batch"])
        ),
        format!(
            "{} tokens a second instead of {}",
            thousands(of(&entry["throughput"])),
            thousands(of(&entry["throughput_without"]))
        ),
        format!("(+{:.0}%)", 100.0 * gain),
        format!("{:.0} GB of host memory on each node", 8.0 * of(&entry["host_bytes"]) / 1e9),
        format!("decodes {:.1} tokens a second instead of {:.1}", of(&entry["otps"]), of(&without["otps"])),
        "extrapolated from 32 GPUs, not measured".to_owned(),
    ] {
        assert!(sentence.contains(&words), "{words}: {sentence}");
    }
}

#[test]
fn figures_per_gpu_per_node_and_in_total_follow_from_the_number_of_gpus() {
    for (gpus, node) in [("8", 8.0), ("16", 8.0), ("32", 8.0)] {
        let options = NODE.replace("--gpus 8", &format!("--gpus {gpus} --weights 60GB --batch 20"));
        let entry = entry(&options);
        let of = |field: &str| entry[field].as_f64().unwrap();
        let gpus: f64 = gpus.parse().unwrap();
        assert_eq!((of("sequences"), of("host_bytes_node")), (20.0 * gpus, node * of("host_bytes")));
        let one = 20.0 * of("otps");
        for (field, times) in [
            ("throughput_gpu", 1.0),
            ("throughput_node", node),
            ("throughput_all", gpus),
            ("throughput", 8.0),
        ] {
            assert!((of(field) / (one * times) - 1.0).abs() < 1e-9, "{field}");
        }
        assert_eq!(
            (&entry["deployment"]["gpus"], &entry["deployment"]["weights_of"]),
            (&(gpus as u32).into(), &Value::Null)
        );
    }
    // With the attention heads split, a node's GPUs have the same sequences.
    let heads = entry("--gpus 16 --gpu 141GB --context 64K --attention tp --batch 20");
    assert_eq!((&heads["sequences"], &heads["deployment"]["attention"]), (&40.into(), &"tp".into()));
    let extrapolated = |gpus: &str| {
        entry(&NODE.replace("--gpus 8", gpus))["provenance"]["deployment"]["extrapolated"].clone()
    };
    assert_eq!(
        [extrapolated("--gpus 8"), extrapolated("--gpus 32")],
        [Value::from(true), Value::from(false)]
    );
    let part = entry("--gpus 2 --gpu 141GB --weights 60GB --context 64K --batch 20");
    let bytes = |field: &str| part[field].as_u64().unwrap();
    assert_eq!((bytes("sequences"), bytes("host_bytes_node")), (40, 2 * bytes("host_bytes")));
}

#[test]
fn weights_are_the_models_unless_given() {
    let of = |options: &str| entry(options)["deployment"].clone();
    let own = of("--gpus 8 --gpu 141GB --context 64K");
    assert!(own["weights_of"].as_str().unwrap().contains("DeepSeek-V3.2"));
    // Scales of 128 x 128 blocks included; a block that a matrix fills in part has a whole scale.
    assert_eq!(own["weights_bytes"], 101_718_368_960_u64);
    // Without a number of GPUs the setup's counts: fewer experts on each.
    let more = of("--setup ess --gpu 141GB --context 64K --mtp 2");
    assert!(more["gpus"] == 32 && more["weights_bytes"].as_u64() < own["weights_bytes"].as_u64());
    for (said, bytes) in [("38GB", 38_000_000_000_u64), ("0", 0)] {
        let given = of(&format!("--gpus 8 --gpu 141GB --context 64K --weights {said}"));
        assert_eq!((&given["weights_bytes"], &given["weights_of"]), (&bytes.into(), &Value::Null));
    }
}

#[test]
fn where_offload_does_not_pay_the_sentence_advises_against_it_with_a_reason() {
    let not = |options: &str, words: &[&str]| {
        let (offload, sentence) = advice(options);
        assert_eq!(offload, Some(false), "{options}: {sentence}");
        assert!(sentence.starts_with("Do not offload: "), "{options}: {sentence}");
        for words in words {
            assert!(sentence.contains(words), "{words}, {options}: {sentence}");
        }
    };
    // A gain of less than 3%, with a hardly larger batch and a hardly smaller ratio.
    not(
        &format!("{NODE} --batch 10 --ratio 0.5 --link 1GB/s"),
        &["1.7% more", "less than 3% more is not worth it"],
    );
    not(&format!("{NODE} --batch 10 --ratio 0.5 --link 0.5GB/s"), &["% fewer tokens", "not worth it"]);
    // Nearly all rows stay on the device.
    not(&format!("{NODE} --batch 9 --ratio 0.99"), &["leaves nearly all rows on the device"]);
    not(&format!("{NODE} --link 0.1GB/s"), &["no batch with it yields more than the 9 sequences"]);
    not(&format!("{NODE} --batch 4"), &["all rows of 4 sequences fit on each GPU"]);
    not("--gpus 8 --gpu 141GB --context 64K --batch 4", &["all rows of 4 sequences fit on each GPU"]);
    not("--gpus 8 --gpu 141GB --context 4K --model deepseek-v3", &["dense attention reads every row"]);
    // The batches that are fast enough do not need offload, or no batch is fast enough.
    not(
        &format!("{NODE} --min-otps 19.2"),
        &["no batch with it decodes 19.2 tokens", "without it 9 sequences on each GPU decode 19.3"],
    );
    not(&format!("{NODE} --min-otps 500"), &["not even one sequence", "500 tokens a second"]);
    not(
        &format!("{NODE} --batch 30 --min-otps 28"),
        &["with it batch 30 decodes", "each sequence, not 28.0"],
    );
}

#[test]
fn batches_that_are_too_slow_are_not_advised() {
    let (offload, sentence) = advice(&format!("{NODE} --min-otps 17"));
    assert_eq!(offload, Some(true), "{sentence}");
    let (any, some) = (entry(NODE), entry(&format!("{NODE} --min-otps 17")));
    assert!(some["otps"].as_f64() >= Some(17.0) && any["otps"].as_f64() < Some(17.0));
    assert!(some["batch"].as_u64() < any["batch"].as_u64());
    assert!(some["throughput"].as_f64() < any["throughput"].as_f64());
    // With one more sequence the step would be too slow.
    let next = some["batch"].as_u64().unwrap() + 1;
    let slow = entry(&format!("{NODE} --min-otps 17 --batch {next}"));
    assert!(slow["otps"].as_f64() < Some(17.0) && slow["advice"]["offload"] == false);
    let said = slow["advice"]["sentence"].as_str().unwrap();
    assert!(said.contains(&format!("with it batch {next} decodes 16.")), "{said}");
    assert!(slow["notes"].to_string().contains("fewer tokens a second than --min-otps"));
}

/// The notes of an entry, and the marks and the sentence of its table.
fn noted(options: &str) -> (String, String) {
    (entry(options)["notes"].to_string(), plan(options, &["--wide"]))
}

/// "Too slow" is not "does not pay": larger batches yield more, and a user with a lower target speed can have them.
#[test]
fn a_plan_that_is_too_slow_and_one_that_does_not_pay_have_different_marks() {
    let slower = "fewer sequences, all rows on the device, yield as many";
    let (notes, text) = noted(&format!("{NODE} --min-otps 19.2"));
    assert!(notes.contains("batches with offload yield more, but") && !notes.contains(slower), "{notes}");
    let line =
        |text: &str| text.lines().find(|line| line.trim_start().starts_with("64K")).unwrap().to_owned();
    assert!(line(&text).contains("too slow") && line(&text).contains("[m]"), "{text}");
    assert!(!line(&text).contains("never") && !line(&text).contains("[t]"), "{text}");
    // If the link is the slow part, the text names it.
    let (notes, text) = noted(&format!("{NODE} --link 0.1GB/s"));
    assert!(notes.contains(slower) && !notes.contains("yield more"), "{notes}");
    assert!(line(&text).contains("never") && line(&text).contains("[t]") && !text.contains("[m]"), "{text}");
    // Some batches are fast enough, but not those that yield more.
    let slow = format!("{NODE} --link 1.5GB/s");
    let least = |otps: &str| entry(&format!("{slow} --min-otps {otps}"));
    let without = entry(&slow)["without"]["otps"].as_f64().unwrap();
    let (any, some) = (entry(&slow), least(&format!("{:.3}", without - 0.01)));
    assert!(
        any["pays"] == true && some["pays_from"].is_null() && some["advice"]["offload"] == false,
        "{any} {some}"
    );
    // Not even one sequence fits: no batch has times, and the mark gives the reason.
    let (notes, text) = noted(&format!("{NODE} --min-otps 500"));
    assert!(notes.contains("fewer tokens a second than --min-otps") && line(&text).contains("[o]"), "{text}");
}

#[test]
fn a_named_batch_that_fits_whole_is_reported_as_too_slow() {
    let otps = entry(&format!("{NODE} --batch 4"))["otps"].as_f64().unwrap();
    let (offload, sentence) = advice(&format!("{NODE} --batch 4 --min-otps 50"));
    let words = format!(
        "all rows of 4 sequences fit on each GPU, and each decodes {otps:.1} tokens a second, not 50.0"
    );
    assert!(offload == Some(false) && sentence.contains(&words), "{words}: {sentence}");
    let (_, fast) = advice(&format!("{NODE} --batch 4 --min-otps 10"));
    assert!(!fast.contains("and each decodes"), "{fast}");
}

/// The sentence also names what it does not count, because users quote it alone.
#[test]
fn given_weights_and_another_gpus_memory_are_in_the_sentence() {
    let (_, plain) = advice(NODE);
    assert!(!plain.contains("it counts"), "{plain}");
    for (options, words) in [
        (format!("{NODE} --weights 0"), "; it counts no weights (--weights 0)."),
        (format!("{NODE} --weights 90GB"), "; it counts 90 GB of weights on each GPU (--weights)."),
        (
            NODE.replace("141GB", "120GiB"),
            "; it counts GPUs of 120 GiB, where those of the setup have 131 GiB.",
        ),
        (
            format!("{} --weights 0", NODE.replace("141GB", "80GB")),
            "; it counts no weights (--weights 0) and GPUs of 80 GB, where those of the setup have 141 GB.",
        ),
        (format!("{NODE} --weights 0 --batch 4"), "; it counts no weights (--weights 0)."),
        (
            "--gpus 8 --gpu 141GB --weights 0 --context 64K".to_owned(),
            "; it counts no weights (--weights 0).",
        ),
    ] {
        let (_, sentence) = advice(&options);
        assert!(sentence.ends_with(words), "{options}: {sentence}");
    }
}

#[test]
fn sizes_are_printed_in_the_unit_of_the_input() {
    let given =
        "--gpus 8 --gpu 141GB --weights 100GB --activations 1.5GB --host 600GB --context 64K --batch 20";
    let text = plan(given, &["--wide"]);
    for words in
        ["8 GPUs of 141 GB,", "Weights: 100 GB on", "1.5 GB of activations", "Host memory: 600 GB a GPU"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    let page = plan(given, &["--html", "-"]);
    assert!(!text.contains("GiB") && !text.contains("MiB") && !page.contains("GiB"), "{text}");
    let binary = plan(&given.replace("GB", "GiB"), &["--wide"]);
    assert!(!binary.contains(" GB") && binary.contains("8 GPUs of 141 GiB,"), "{binary}");
    let several = plan("--gpu 80GiB,141GB --weights 0 --context 64K --batch 4", &[]);
    assert!(several.contains("80 GiB: ") && several.contains("141 GB: "), "{several}");
}

/// A changed copy of the built-in setup; returns the file's name.
fn setup(name: &str, change: impl Fn(&mut Value)) -> String {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/setups/ess.json");
    let mut setup: Value = serde_json::from_str(&std::fs::read_to_string(data).unwrap()).unwrap();
    change(&mut setup);
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&file, setup.to_string()).unwrap();
    file.to_str().unwrap().to_owned()
}

/// The bytes of the weights are one number. A plan compares it with `--gpu`, a simulation with the setup's memory.
#[test]
fn weights_are_one_number_and_checked_against_the_named_memory() {
    let narrow = setup("narrow.json", |setup| setup["gpu"]["memory_gib"] = 80.into());
    let options = NODE.replace("ess", &narrow);
    let planned = entry(&options);
    assert_eq!(
        (&planned["fits"], &planned["deployment"]["weights_bytes"]),
        (&true.into(), &103_582_813_312_u64.into())
    );
    let assumed = planned["provenance"]["assumptions"].to_string();
    assert!(assumed.contains("32 experts a GPU") && !assumed.contains(" GB a GPU"), "{assumed}");
    let step = format!("simulate --setup {narrow} --gpus 8 --context 64K --mtp 2 --batch 20 --ratio 0.2");
    let error = refuses(&step.split(' ').collect::<Vec<_>>());
    assert!(error.contains("96.5 GiB of weights on each of 8 GPUs are more than its 80.0 GiB"), "{error}");
    let least = entry(&options.replace("141GB", "60GB --weights 0"));
    assert_eq!((&least["fits"], &least["deployment"]["weights_bytes"]), (&true.into(), &0.into()));
}

/// A node has the number of GPUs that the setup gives.
#[test]
fn the_setup_gives_the_gpus_of_a_node() {
    let file = setup("nodes-of-four.json", |setup| setup["deployment"]["node_gpus"] = 4.into());
    let options = NODE.replace("ess", &file).replace("--gpus 8", "--gpus 16 --batch 30");
    let four = entry(&options);
    let of = |field: &str| four[field].as_f64().unwrap();
    assert_eq!(four["deployment"]["node_gpus"], 4);
    assert_eq!(of("host_bytes_node"), 4.0 * of("host_bytes"));
    assert!((of("throughput_node") / (4.0 * of("throughput_gpu")) - 1.0).abs() < 1e-12);
    let host = format!("{:.0} GB of host memory on each node", 4.0 * of("host_bytes") / 1e9);
    assert!(four["advice"]["sentence"].to_string().contains(&host), "{four}");
    assert!(plan(&options, &["--html", "-"]).contains("tokens/s of 4 GPUs"));
    // Without a setup, and with the built-in one, a node has 8 GPUs.
    let eight = entry("--gpus 16 --gpu 141GB --context 64K --batch 20");
    assert_eq!(eight["deployment"]["node_gpus"], 8);
    let refused: Vec<&str> =
        std::iter::once("plan").chain("--gpus 12 --gpu 141GB --context 64K".split(' ')).collect();
    let error = refuses(&refused);
    assert!(error.contains("--gpus 12: not a multiple of a node's 8 GPUs"), "{error}");
}

#[test]
fn a_given_rate_is_reported_as_given() {
    let assumed = entry(&format!("{NODE} --link 37GB/s"))["provenance"]["assumptions"].to_string();
    assert!(assumed.contains("link: single rows gathered at 37 GB/s, as given"), "{assumed}");
    assert!(!assumed.contains("other rates than"), "{assumed}");
}

#[test]
fn no_advice_is_given_without_data() {
    let (offload, sentence) = advice("--gpus 8 --gpu 141GB --context 64K");
    assert!(
        offload.is_none() && sentence.contains("pass --setup to find out whether that pays"),
        "{sentence}"
    );
    let (offload, sentence) = advice(&format!("{NODE} --batch 50"));
    assert!(offload.is_none() && sentence.starts_with("Unknown: "), "{sentence}");
}

/// If nothing fits, there is no plan; if something fits, each point that does not has its own sentence.
#[test]
fn a_plan_where_nothing_fits_is_reported() {
    let arguments: Vec<&str> = std::iter::once("plan").chain(NODE.split(' ')).collect();
    let error = refuses(&[&arguments[..], &["--batch", "900"]].concat());
    assert!(error.contains("gpu: the cache of this batch") && error.contains("smaller batch"), "{error}");
    let some = last(&plan(&NODE.replace("64K", "8K,64K"), &["--batch", "200"]));
    let words = "64K: Nothing fits: 200 sequences take ";
    assert!(some.contains(words) && some.contains(" GB of each GPU, and 29.4 GB are there."), "{some}");
    let host = last(&plan("--gpus 8 --gpu 141GB --context 8K,64K --batch 30 --host 60GB", &[]));
    assert!(host.contains("GB of host memory for each GPU, and 60.0 GB are there."), "{host}");
}

#[test]
fn not_simulated_and_not_tried_have_different_marks() {
    let unknown = plan(&NODE.replace("--context 64K", "--context 64K,1K"), &["--weights", "0"]);
    let line = |start: &str| unknown.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
    assert!(line("64K").contains("[l]") && !line("64K").contains("[u]"), "{unknown}");
    assert!(line("1K").contains("[u]") && !line("1K").contains("[l]"), "{unknown}");
    assert!(
        unknown.contains("[l] Larger batches were not tried: ") && unknown.contains("[u] Not simulated: ")
    );
}

#[test]
fn a_sweep_gives_one_sentence_for_each_setting() {
    let options = NODE.replace("--context 64K", "--context 32K,64K");
    let text = plan(&options, &["--link", "pcie4,pcie5"]);
    let said: String = last(&text);
    for setting in ["pcie4, 32K: ", "pcie5, 32K: ", "pcie4, 64K: ", "pcie5, 64K: "] {
        assert!(said.contains(&format!("{setting}Offload: at batch ")), "{setting}: {said}");
    }
    // Batches and ratios are no settings: the advice names the best of them.
    let several = last(&plan(NODE, &["--batch", "4,12,30"]));
    assert!(several.starts_with("Offload: at batch 30 on each GPU"), "{several}");
}

#[test]
fn piped_lines_are_no_longer_than_the_default_width() {
    let sweep = NODE.replace("--context 64K", "--context 32K,64K,1K") + " --link pcie4,c2c";
    let memory =
        "--gpus 8 --gpu 141GB,180GB --context 32K,64K --mtp 1,2 --batch 4,20,max --model deepseek-v3.2,glm-5";
    for options in [NODE, &sweep, memory, "--gpus 8 --gpu 141GB --context 64K --attention tp"] {
        let text = plan(options, &[]);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{options}: {line}");
        }
        let wide = plan(options, &["--wide"]);
        assert!(wide.lines().any(|line| line.chars().count() > 80) && !wide.contains("--wide"), "{options}");
        assert!(text.replace('\n', " ").contains("--wide shows all"), "{options}: {text}");
    }
}

#[test]
fn the_page_shows_baseline_gain_and_inputs() {
    let page = plan(NODE, &["--html", "-"]);
    let at = |words: &str| page.find(words).unwrap_or_else(|| panic!("{words}"));
    let (headline, gain) = (at("<h1 class=\"sentence\">Offload: "), at("tokens/s, gained"));
    assert!(headline < gain && at("tokens/s a node without offload") < gain && gain < at("<figure"));
    for echo in [
        "8 GPUs of 141 GB, DP attention",
        "Weights: 104 GB on each GPU",
        "Setup ess, its own link",
        "Context: 64K",
    ] {
        assert!(at(echo) < at("<figure"), "{echo}");
    }
}

/// README's first command under "Before buying memory", split as by a shell, and the sentence below it.
#[test]
fn the_readmes_command_ends_with_the_sentence_printed_below_it() {
    let readme = include_str!("../../README.md");
    let part = readme.split("## Before buying memory").nth(1).unwrap();
    let mut blocks = part.split("```").skip(1).step_by(2);
    let command = blocks.next().unwrap().trim_start_matches("sh\n").trim();
    let shown = blocks.next().unwrap().trim_start_matches("text\n").trim();
    let arguments: Vec<&str> = command.strip_prefix("forebay ").unwrap().split_whitespace().collect();
    assert_eq!(last(&succeeds(&arguments)), shown.replace('\n', " "));
}
