//! Tests of `forebay simulate` and `forebay fit`, run as their users run them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/browser.rs"]
mod browser;
#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::{Path, PathBuf};

use command::{refuses, succeeds};
use forebay::overlap::Table;
use serde_json::{Value, json};

/// A file for these tests only.
fn file(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("simulate");
    fs::create_dir_all(&folder).unwrap();
    folder.join(name)
}

fn written(name: &str, text: &str) -> String {
    let path = file(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name).to_str().unwrap().to_owned()
}

/// Runs the command on the setup `ess` with options as one text; returns the entries of its JSON.
fn simulated(options: &str) -> Vec<Value> {
    let begin = ["simulate", "--json", "-", "--setup", "ess"];
    let arguments: Vec<&str> = begin.into_iter().chain(options.split(' ')).collect();
    match serde_json::from_str(&succeeds(&arguments)).unwrap() {
        Value::Array(entries) => entries,
        other => panic!("no list: {other}"),
    }
}

fn number(entry: &Value, field: &str) -> f64 {
    entry[field].as_f64().unwrap_or_else(|| panic!("{field} of {entry}"))
}

const POINT: &str = "--context 32K --mtp 2 --accept 1.7 --batch 128 --ratio 0.31";

#[test]
fn an_entry_has_the_documented_fields_and_they_agree() {
    let [entry] = &simulated(POINT)[..] else { panic!("one entry") };
    assert_eq!(
        (&entry["schema"], &entry["kind"], &entry["setup"]),
        (&json!(2), &json!("simulate"), &json!("ess"))
    );
    let given = json!([32768, 128, 2, 1.7, 0.31]);
    assert_eq!(
        json!([entry["context"], entry["batch"], entry["mtp"], entry["accept"], entry["ratio"]]),
        given
    );
    let (step_ms, throughput) = (number(entry, "step_ms"), number(entry, "throughput"));
    assert!((throughput / (8.0 * 128.0 * 1.7 / step_ms * 1e3) - 1.0).abs() < 1e-9);
    assert!((number(entry, "otps") - 1.7 / step_ms * 1e3).abs() < 1e-9);
    let layers = entry["per_layer"].as_array().unwrap();
    let count = |order: &str| layers.iter().filter(|layer| layer["overlap"] == order).count();
    for order in ["none", "da", "dba"] {
        assert_eq!(entry["overlap"][order], count(order), "{order}");
    }
    assert_eq!(layers.len(), 61);
    let exposed: f64 = layers.iter().map(|layer| number(layer, "exposed_us")).sum::<f64>() / 1e3;
    assert!((exposed - number(entry, "exposed_ms")).abs() < 0.05 * exposed.abs() + 0.05, "{exposed}");
    let misses: f64 = layers.iter().map(|layer| number(layer, "misses")).sum::<f64>() / 61.0;
    assert!((misses - number(entry, "misses")).abs() < 1e-6 && misses > 50.0, "{misses}");
}

#[test]
fn a_host_bound_step_is_reported() {
    let of = |options: &str| simulated(&format!("{POINT} {options}"))[0]["host"].clone();
    let host = of("--overlap dba");
    assert_eq!(host["bound_by"], "device");
    let captured = number(&host, "captured_us");
    assert!(captured > 0.0 && number(&host, "uncaptured_us") > 10.0 * captured);
    // A host whose every call takes a millisecond, and a host whose step takes a second.
    for (operation_us, step_us, bound, words) in [
        (1e3, 1.0, "host-unless-captured", "Bound by the host unless captured: 1 step, the first of"),
        (1e3, 1e6, "host", "Bound by the host captured or not: 1 step, the first of"),
    ] {
        let mut setup: Value = serde_json::from_str(include_str!("../../data/setups/ess.json")).unwrap();
        setup["host"] =
            json!({"step_us": step_us, "row_us": 0.1, "operation_us": operation_us, "edge_us": 1.0});
        let path = written(&format!("{bound}.json"), &setup.to_string());
        let arguments = ["simulate", "--setup", &path, "--context", "32K", "--mtp", "2", "--batch", "128"];
        let arguments = [&arguments[..], &["--ratio", "0.31"]].concat();
        let entries: Value =
            serde_json::from_str(&succeeds(&[&arguments[..], &["--json", "-"]].concat())).unwrap();
        assert_eq!(entries[0]["host"]["bound_by"], bound);
        let printed = succeeds(&arguments).replace('\n', " ");
        assert!(printed.contains(words) && !printed.contains("No step waits"), "{printed}");
    }
}

#[test]
fn predicted_kernel_times_are_listed_by_term_and_prices_can_be_changed() {
    let entries_with = |more: &[&str]| {
        let arguments = [&["simulate", "--kernels", "--json", "-"][..], more].concat();
        serde_json::from_str::<Vec<Value>>(&succeeds(&arguments)).unwrap()
    };
    let entries = entries_with(&[]);
    let (head, figures) = entries.split_first().unwrap();
    assert_eq!((&head["kind"], &head["measured"]), (&"kernel-prices".into(), &false.into()));
    let sum = |value: &Value, end: &str| -> f64 {
        let terms = value["terms"].as_array().into_iter().flatten();
        terms.map(|term| term["count"].as_f64().unwrap() * term["us"][end].as_f64().unwrap()).sum()
    };
    let mut sums = 0;
    for figure in figures {
        assert_eq!((&figure["kind"], &figure["schema"]), (&"kernel".into(), &2.into()));
        for of in
            ["before", "now"].map(|design| &figure[design]).iter().filter(|of| of.get("terms").is_some())
        {
            sums += 1;
            for end in ["low", "high"] {
                assert!((sum(of, end) - of["value"][end].as_f64().unwrap()).abs() < 1e-9, "{figure}");
            }
        }
    }
    assert!(sums >= 16, "{sums}");
    let changed = entries_with(&["--assume", "load_us=1..2", "--assume", "node_us=0.5"]);
    let find = |of: &[Value]| {
        of.iter().find(|one| one["figure"] == "launches of R, G and S, 61 layers, captured").cloned()
    };
    let now = find(&changed).unwrap()["now"]["value"].clone();
    assert_eq!(now, json!({"low": 91.5, "high": 91.5}));
    assert_ne!(find(&entries), find(&changed));
    let text = succeeds(&["simulate", "--kernels"]);
    assert!(text.contains("Nothing here was measured") && text.contains("NVIDIA/nvbandwidth#24"), "{text}");
    let none = refuses(&["simulate", "--kernels", "--assume", "speed=1"]);
    assert!(none.contains("no price is called speed") && none.contains("round_trip_us"), "{none}");
}

#[test]
fn the_ratio_that_fits_is_found_and_at_1_no_time_is_exposed() {
    let rows =
        simulated("--context 32K --mtp 2 --accept 1.7 --batch 52,64,96,128,160 --ratio auto --cache 80GiB");
    let ratios: Vec<f64> = rows.iter().map(|row| (number(row, "ratio") * 100.0).round() / 100.0).collect();
    assert_eq!(ratios, [1.0, 0.82, 0.48, 0.31, 0.21]);
    assert_eq!(rows[0]["exposed_ms"], 0.0);
    // One of the rows that the setup is fitted to: 73.30 ms.
    assert!((number(&rows[0], "step_ms") - 73.3).abs() < 0.3, "{}", rows[0]["step_ms"]);
    let accepted = simulated("--context 32K --mtp 4 --accept 2.8,3.4 --batch 52 --ratio 1 --mtp 4");
    assert_eq!(accepted.len(), 2);
    assert_eq!(accepted[0]["step_ms"], accepted[1]["step_ms"]);
}

#[test]
fn orders_links_and_traffic_are_printed_side_by_side() {
    let rows = simulated(&format!("{POINT} --overlap none,da,dba,best"));
    let exposed: Vec<f64> = rows.iter().map(|row| number(row, "exposed_ms")).collect();
    assert_eq!(
        rows.iter().map(|row| row["order"].as_str().unwrap()).collect::<Vec<_>>(),
        ["none", "da", "dba", "best"]
    );
    assert!(exposed[3] <= exposed[1] && exposed[1] < exposed[0], "{exposed:?}");
    let rows = simulated(&format!("{POINT} --link pcie4,c2c,5GB/s"));
    let links: Vec<&str> = rows.iter().map(|row| row["link"].as_str().unwrap()).collect();
    assert_eq!(links, ["pcie4", "c2c", "5GB/s"]);
    // The rate of the setup's own link means that link.
    let own = format!("{POINT} --traffic-up 5 --link 37GB/s");
    let near = number(&simulated(&own)[0], "step_ms")
        / number(&simulated(&format!("{POINT} --traffic-up 5"))[0], "step_ms");
    assert!((near - 1.0).abs() < 0.01, "{near}");
    assert!(number(&rows[1], "step_ms") < number(&rows[0], "step_ms"));
    assert!(number(&rows[0], "step_ms") < number(&rows[2], "step_ms"));
    let quiet = number(&simulated(POINT)[0], "step_ms");
    let busy = number(&simulated(&format!("{POINT} --traffic-up 30"))[0], "step_ms");
    assert!(busy > quiet, "{busy} {quiet}");
}

#[test]
fn a_choice_is_written_as_a_table_and_read_again() {
    let table = file("orders.table");
    let begin = ["simulate", "--setup", "ess", "--write-table", table.to_str().unwrap()];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    succeeds(&arguments);
    let text = fs::read_to_string(&table).unwrap();
    let orders = Table::from_text(&text).unwrap().by_layer;
    let chosen = &simulated(POINT)[0];
    let by_layer = chosen["per_layer"].as_array().unwrap();
    assert!(orders.iter().zip(by_layer).all(|(order, layer)| layer["overlap"] == order.name()));
    let read = &simulated(&format!("{POINT} --table {}", table.display()))[0];
    assert_eq!((&read["order"], &read["step_ms"]), (&json!("table"), &chosen["step_ms"]));
    let damaged = written("damaged.table", &text.replacen("17 ", "18 ", 1));
    let begin = ["simulate", "--setup", "ess", "--table", &damaged];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    let error = refuses(&arguments);
    assert!(error.contains("damaged.table") && error.contains("layer 17"), "{error}");
}

#[test]
fn misses_come_from_a_table_a_curve_or_a_trace() {
    let rows: Vec<f64> = vec![100.0; 61];
    let table = json!({"table": {"query_rows": 2, "query_rows_power": 1, "rows": rows}});
    let table = written("table.json", &table.to_string());
    let [entry] = &simulated(&format!("{POINT} --misses {table}"))[..] else { panic!("one entry") };
    assert_eq!(entry["misses"], 100.0);
    let setup: Value = serde_json::from_str(&fs::read_to_string(data("setups/ess.json")).unwrap()).unwrap();
    let curve = written("curve.json", &setup["misses"].to_string());
    let [mut own, mut given] = [simulated(POINT), simulated(&format!("{POINT} --misses {curve}"))];
    let given_from = given[0]["provenance"].take();
    assert_ne!(own[0]["provenance"].take(), given_from);
    assert!(given_from.to_string().contains("curve.json, not the setup's"), "{given_from}");
    assert_eq!(own, given);
    let trace = data("demo.topk.zst");
    let replayed =
        simulated(&format!("--context 32K --mtp 2 --accept 1.7 --batch 128 --ratio 0.1,0.3 --trace {trace}"));
    // The counts of `forebay replay`, layer by layer: a ratio is a share of the final context, also of a trace.
    let header = forebay::trace::SelectionTrace::read(Path::new(&trace)).unwrap().header().clone();
    let end = f64::from(header.decode_start + header.steps - header.warm_steps);
    let slots = [0.1, 0.3].map(|ratio| format!("{:.0}", ratio * end)).join(",");
    let text = succeeds(&["replay", &trace, "--slots", &slots, "--mtp", "2", "--json", "-"]);
    let counted: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(counted[0]["prompt_share"].as_f64() > Some(0.1), "of the prompt it is more: {}", counted[0]);
    for (entry, counted) in replayed.iter().zip(&counted) {
        let layers = counted["per_layer"].as_array().unwrap();
        for (layer, row) in entry["per_layer"].as_array().unwrap().iter().enumerate() {
            let of = &layers[layer * layers.len() / 61];
            assert!((number(row, "misses") - number(of, "misses_per_step")).abs() < 1e-9, "layer {layer}");
        }
    }
    let begin = ["simulate", "--setup", "ess", "--trace", &trace];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    assert!(succeeds(&arguments).contains("not scaled to k 2048"));
}

#[test]
fn misses_by_step_are_run_step_by_step() {
    // Layer 3 misses much in every other step, layer 9 in the others.
    let at = |layer: usize| (0..61).map(|l| if l == layer { 1900.0 } else { 20.0 }).collect::<Vec<f64>>();
    let few = vec![5.0; 61];
    let steps = [at(3), few.clone(), vec![400.0; 61], at(9)];
    let of = |rows: &[Vec<f64>], name: &str| {
        let steps = json!({"steps": {"query_rows": 2, "query_rows_power": 1, "rows": rows}});
        written(name, &steps.to_string())
    };
    let run = |rows: &[Vec<f64>], order: &str| {
        let point = format!("{POINT} --overlap {order} --misses {}", of(rows, "steps.json"));
        simulated(&point).remove(0)
    };
    let all = run(&steps, "da");
    let alone: Vec<Value> = steps.iter().map(|step| run(std::slice::from_ref(step), "da")).collect();
    let mean = |field: &str| alone.iter().map(|one| number(one, field)).sum::<f64>() / 4.0;
    for field in ["step_ms", "exposed_ms", "misses"] {
        assert!((number(&all, field) - mean(field)).abs() < 1e-9 * mean(field).max(1.0), "{field}");
    }
    assert!((number(&all, "throughput") / (8.0 * 128.0 * 1.7e3 / mean("step_ms")) - 1.0).abs() < 1e-9);
    assert_eq!((&all["steps"]["count"], &all["steps"]["worst"]), (&json!(4), &json!(2)));
    assert_eq!(all["steps"]["worst_ms"], alone[2]["step_ms"]);
    assert!(alone[0].get("steps").is_none());
    // One order for all steps cannot be better than each step's best order.
    let best = run(&steps, "best");
    let own = steps.iter().map(|step| number(&run(std::slice::from_ref(step), "best"), "step_ms"));
    assert!(number(&best, "step_ms") >= own.sum::<f64>() / 4.0 - 1e-9);
    let file = of(&steps, "steps.json");
    let begin = ["simulate", "--setup", "ess", "--misses", &file];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    assert!(succeeds(&arguments).contains("mean of 4 steps, all in the same order by layer"));
    let page = succeeds(&[&arguments[..], &["--html", "-"]].concat());
    assert!(page.contains("the mean of 4 steps"));
    let picture = succeeds(&[&arguments[..], &["--timeline", "-"]].concat());
    assert!(picture.contains("step 2: the longest of 4"));
}

#[test]
fn trace_events_have_the_form_that_perfetto_reads() {
    let path = file("step.json");
    let arguments = [&["simulate", "--setup", "ess", "--perfetto", path.to_str().unwrap()][..]].concat();
    let arguments: Vec<&str> = arguments.into_iter().chain(POINT.split(' ')).collect();
    succeeds(&arguments);
    let trace: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let lanes: Vec<&str> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(lanes[0], "compute");
    assert!(lanes.iter().any(|lane| lane.starts_with("gather")), "{lanes:?}");
    // Events of a track may touch but must not overlap.
    let ns = |event: &Value, field: &str| (number(event, field) * 1e3).round() as i64;
    for track in 1..=lanes.len() {
        let of = events.iter().filter(|event| event["ph"] == "X" && event["tid"] == track);
        let spans: Vec<(i64, i64)> = of.map(|event| (ns(event, "ts"), ns(event, "dur"))).collect();
        assert!(!spans.is_empty() && spans.iter().all(|span| span.0 >= 0 && span.1 >= 0));
        assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "track {track}");
    }
    let layers = events
        .iter()
        .filter(|event| event["name"] == "gather")
        .filter_map(|event| event["args"]["layer"].as_u64());
    assert_eq!(layers.max(), Some(60));
}

#[test]
fn pictures_are_well_formed_and_chromium_draws_them() {
    let (timeline, page) = (file("step.svg"), file("sweep.html"));
    let begin = ["simulate", "--setup", "ess", "--timeline", timeline.to_str().unwrap(), "--layer", "17"];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    succeeds(&arguments);
    let svg = fs::read_to_string(&timeline).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("Layers 16 to 18, enlarged") && !svg.contains("NaN") && !svg.contains("inf"));
    let sweep = ["simulate", "--setup", "ess", "--context", "32K", "--batch", "64,128", "--ratio", "0.5"];
    succeeds(&[&sweep[..], &["--html", page.to_str().unwrap()]].concat());
    let one = file("one.html");
    let point = ["simulate", "--setup", "ess", "--html", one.to_str().unwrap()];
    succeeds(&point.into_iter().chain(POINT.split(' ')).collect::<Vec<_>>());
    let plan = file("plan.html");
    let planned = ["plan", "--setup", "ess", "--gpu", "80GiB", "--context", "32K", "--link", "pcie4,c2c"];
    succeeds(&[&planned[..], &["--html", plan.to_str().unwrap()]].concat());
    let Some(program) = browser::chromium() else { return };
    for picture in [&timeline, &page, &one, &plan] {
        for light in [browser::Light::Bright, browser::Light::Dark] {
            let shot = browser::shot(&program, picture, (1240, 700), light);
            let mut colours = shot.pixels.clone();
            colours.sort_unstable();
            colours.dedup();
            assert!(colours.len() > 20, "{}: {} colours", picture.display(), colours.len());
            // The corner is dark in dark mode and light in light mode.
            let corner = shot.pixels[shot.width * (shot.height - 2) + 2];
            assert_eq!(corner[0] > 128, light == browser::Light::Bright, "{}", picture.display());
        }
    }
}

#[test]
fn pictures_distinguish_settings_work_and_conditions() {
    let base = "simulate --setup ess --context 32K --mtp 2 --accept 1.7";
    let run = |options: &str| {
        let options = format!("{base} {options}");
        succeeds(&options.split(' ').collect::<Vec<_>>())
    };
    // One line each; with a single ratio axis, the ratios are the horizontal axis.
    let page = run("--batch 64,128 --ratio 0.25,0.5 --html -");
    assert!(page.contains("Throughput by batch"), "batches");
    assert!([">ratio 0.25<", ">ratio 0.5<"].iter().all(|name| page.contains(name)));
    assert_eq!(page.matches("<path class=\"line ").count(), 4);
    let page = run("--batch 128 --ratio 0.25,0.3,0.5 --link pcie4,c2c --html -");
    assert!(page.contains("Throughput by ratio") && page.contains("slots / context"));
    assert!(page.contains("mtp 2, link c2c"), "the link of the best point");
    let page = run("--batch 64,96,128 --ratio auto --cache 80GiB --html -");
    assert!(page.contains("Throughput by batch") && !page.contains("ratio auto"));
    let picture = run("--batch 128 --ratio 0.31 --fill --traffic-up 30 --timeline -");
    assert!(picture.contains("waits filled, traffic up 30 GB/s"));
    let works = ["project", "warmed", "traffic"];
    assert!(works.iter().all(|class| picture.contains(&format!("\"fill {class}\""))), "{works:?}");
    let [entry] = &simulated(&format!("{POINT} --fill --traffic-up 30"))[..] else { panic!("one entry") };
    assert_eq!((&entry["fill"], &entry["traffic_up"]), (&json!(true), &json!(30.0)));
    assert!(number(entry, "wait_ms") > 0.0 && number(entry, "wait_ms") <= number(entry, "exposed_ms"));
    assert!(succeeds(&["fit", "--help"]).contains("doctor"));
}

#[test]
fn bad_input_is_one_error_that_names_the_option_or_the_field() {
    let ess: Value = serde_json::from_str(&fs::read_to_string(data("setups/ess.json")).unwrap()).unwrap();
    let changed = |name: &str, pointer: &str, value: Value| {
        let mut setup = ess.clone();
        *setup.pointer_mut(pointer).unwrap() = value;
        written(name, &setup.to_string())
    };
    let mut unknown = ess.clone();
    unknown["nonsense"] = json!(1);
    let unknown = written("unknown.json", &unknown.to_string());
    let version = changed("version.json", "/forebay_setup", json!(99));
    let hole = changed("hole.json", "/misses/curve/mean/rows/0/0", Value::Null);
    let negative = changed("negative.json", "/gpu/kernel_us", json!(-1.0));
    let text = written("text.json", "no JSON");
    let short = json!({"table": {"query_rows": 2, "query_rows_power": 1, "rows": [1.0, 2.0]}});
    let short = written("short.json", &short.to_string());
    let cases = [
        ("--setup none ".to_owned() + POINT, "--setup none"),
        (POINT.to_owned(), "--setup is not given"),
        (format!("--setup {unknown} {POINT}"), "nonsense"),
        (format!("--setup {version} {POINT}"), "forebay_setup"),
        (format!("--setup {hole} {POINT}"), "misses.curve.mean.rows[0][0]"),
        (format!("--setup {negative} {POINT}"), "gpu.kernel_us"),
        (format!("--setup {text} {POINT}"), "text.json"),
        (format!("--setup ess --misses {short} {POINT}"), "misses.table.rows"),
        (format!("--setup ess --misses {text} {POINT}"), "text.json"),
        (format!("--setup ess --trace {text} {POINT}"), "text.json"),
        (format!("--setup ess --link pcie9 {POINT}"), "pcie9"),
        (format!("--setup ess --link 0GB/s {POINT}"), "--link 0GB/s"),
        (format!("--setup ess --traffic-up 54 {POINT}"), "--traffic-up: more than the link's 53 GB/s"),
        (format!("--setup ess --traffic-down 1000000 {POINT}"), "--traffic-down"),
        (format!("--setup ess --layer 3 --json - {POINT},0.2"), "--layer shows one step"),
        (format!("--setup ess --layer 61 --html t.svg {POINT}"), "--layer"),
        (format!("--setup ess --timeline t.svg --layer 61 {POINT}"), "--layer"),
        (format!("--setup ess --timeline t.svg {POINT},0.2"), "--timeline shows one step"),
        (format!("--setup ess --perfetto x --json x {POINT}"), "--json and --perfetto name the same file"),
        ("--setup ess --context 32K --batch 64".to_owned(), "--ratio auto without --cache"),
        ("--setup ess --context 32K --batch 9000 --cache 80GiB".to_owned(), "gpu: the cache of this batch"),
        ("--setup ess --context 200K --batch 64 --ratio 0.5".to_owned(), "context"),
        ("--setup ess --context 32K --batch 64 --ratio 0.01".to_owned(), "misses.curve.mean.ratio"),
        (
            "--setup ess --context 32K --batch 64,65 --ratio 0.5,0.01".to_owned(),
            "batch 64, mtp 1, ratio 0.01",
        ),
        ("--setup ess --context 1K --batch 64 --ratio 0.5".to_owned(), "misses.curve.mean.context"),
        ("--setup ess --context 32K --batch 0 --ratio 0.5".to_owned(), "--batch"),
        ("--setup ess --context 32K --batch 64 --ratio 0".to_owned(), "--ratio"),
        ("--setup ess --context 32K --batch 64 --ratio 0.5 --accept 1.5".to_owned(), "accept"),
        ("--setup ess --context 32K --batch 64 --ratio 0.5 --mtp 2 --accept NaN".to_owned(), "--accept"),
        (
            "--setup ess --context 32K --batch 64 --ratio 0.5 --mtp 1,2 --accept 1,1,1".to_owned(),
            "--accept needs one value",
        ),
        ("--setup ess --context 32K --batch 64 --ratio 0.5 --overlap all".to_owned(), "--overlap"),
        ("--setup ess --context 32K --ratio 0.5".to_owned(), "--batch"),
    ];
    for (options, named) in &cases {
        let arguments: Vec<&str> = std::iter::once("simulate").chain(options.split(' ')).collect();
        let error = refuses(&arguments);
        assert!(error.contains(named), "{options}: {error}");
    }
    assert!(!Path::new("t.svg").exists());
}

#[test]
fn a_fit_gives_the_built_in_setup_and_reports_the_residuals() {
    let (measurements, setup) = (data("setups/ess-measurements.json"), file("fitted.json"));
    let text = succeeds(&["fit", &measurements, "-o", setup.to_str().unwrap()]);
    assert!(text.contains("residual") && text.contains("steps[0]") && text.contains("overlap[14]"), "{text}");
    let fitted: Value = serde_json::from_str(&fs::read_to_string(&setup).unwrap()).unwrap();
    let built_in: Value =
        serde_json::from_str(&fs::read_to_string(data("setups/ess.json")).unwrap()).unwrap();
    assert_eq!(fitted["costs"], built_in["costs"]);
    let begin = ["simulate", "--json", "-", "--setup", setup.to_str().unwrap()];
    let arguments: Vec<&str> = begin.into_iter().chain(POINT.split(' ')).collect();
    let own: Vec<Value> = serde_json::from_str(&succeeds(&arguments)).unwrap();
    assert_eq!(own, simulated(POINT));
    let entries: Vec<Value> =
        serde_json::from_str(&succeeds(&["fit", &measurements, "--json", "-"])).unwrap();
    assert_eq!((&entries[0]["kind"], &entries[0]["setup"]), (&json!("fit"), &json!("ess")));
    assert!(number(&entries[0], "most_error") < 0.05);
}

#[test]
fn a_fit_accepts_measured_rates() {
    let measurements = data("setups/ess-measurements.json");
    let measured: Value = serde_json::from_str(&fs::read_to_string(&measurements).unwrap()).unwrap();
    let mut rates = measured["setup"]["link"]["rates"].clone();
    rates["copy_up"] = json!(12.5e9);
    let doctor = written("doctor.json", &json!([{"kind": "doctor"}, {"rates": rates}]).to_string());
    let alone = written("rates.json", &rates.to_string());
    for file in [&doctor, &alone] {
        let setup: Value =
            serde_json::from_str(&succeeds(&["fit", &measurements, "--rates", file, "-o", "-"])).unwrap();
        assert_eq!(setup["link"]["rates"]["copy_up"], 12.5e9);
    }
    rates["copy_up"] = json!(-1.0);
    let cases = [
        (written("none.json", "[]"), "no entry has a field rates"),
        (written("negative-rates.json", &rates.to_string()), "copy_up"),
        (written("no-rates.json", "{\"gather\": 1}"), "rates: "),
        (file("absent.json").to_str().unwrap().to_owned(), "absent.json"),
    ];
    for (file, named) in &cases {
        let error = refuses(&["fit", &measurements, "--rates", file]);
        assert!(error.contains(named), "{error}");
    }
    let mut wrong = measured.clone();
    wrong["steps"][3]["ms"] = json!(-5.0);
    let wrong = written("wrong.json", &wrong.to_string());
    assert!(refuses(&["fit", &wrong]).contains("steps[3].ms"));
    assert!(refuses(&["fit", &measurements, "-o", "x", "--json", "x"]).contains("name the same file"));
}

const SENTENCE: &str = "Computed from setup ess: 32 GPUs, fitted to a published simulation on an assumed H200; nothing \
                        here was measured.";

/// A report with its line breaks removed, because they depend on its width.
fn unbroken(text: &str) -> String {
    text.replace('\n', " ")
}

fn of_point(options: &str) -> String {
    let options = format!("simulate --setup ess {POINT} {options}");
    succeeds(&options.split_whitespace().collect::<Vec<_>>())
}

#[test]
fn every_output_names_its_inputs() {
    let text = unbroken(&of_point(""));
    assert!(text.starts_with(SENTENCE), "{text}");
    assert!(text.contains("Assumed: the study (ESS, arXiv 2512.10576v1) does not name its GPU"));
    for page in ["--html -", "--timeline -"] {
        assert!(of_point(page).contains(SENTENCE), "{page}");
    }
    let provenance = simulated(POINT)[0]["provenance"].clone();
    assert_eq!(
        json!([
            provenance["setup"],
            provenance["origin"],
            provenance["measured"],
            provenance["measured_parts"]
        ]),
        json!(["ess", "fitted to a published simulation on an assumed H200", false, []])
    );
    let deployment = json!({"gpus": 32, "node_gpus": 8, "costs_gpus": 32, "extrapolated": false});
    assert_eq!(provenance["deployment"], deployment);
    let assumptions = provenance["assumptions"].to_string();
    assert!(assumptions.contains("from the GPU's roofline: project, merge, exchange, step"), "{assumptions}");
    let linked = simulated(&format!("{POINT} --link pcie4"));
    assert!(linked[0]["provenance"]["assumptions"].to_string().contains("link: the preset pcie4"));
    let measurements = data("setups/ess-measurements.json");
    assert!(unbroken(&succeeds(&["fit", &measurements])).starts_with(SENTENCE));
    let fitted: Vec<Value> = serde_json::from_str(&succeeds(&["fit", &measurements, "--json", "-"])).unwrap();
    assert_eq!(fitted[0]["provenance"], provenance);
}

#[test]
fn other_gpus_are_priced_and_marked_extrapolated() {
    let step = |gpus: &str| {
        let entry = simulated(&format!("{POINT}{gpus}")).remove(0);
        (number(&entry, "step_ms"), entry["provenance"]["deployment"]["extrapolated"] == true)
    };
    let (own, node, two) = (step(""), step(" --gpus 8"), step(" --gpus 16"));
    assert_eq!((own, own.1), (step(" --gpus 32"), false));
    assert!(node.0 > two.0 && two.0 > own.0 && node.1 && two.1, "{own:?} {two:?} {node:?}");
    let text = unbroken(&of_point("--gpus 8"));
    assert!(text.starts_with("Computed from setup ess: 8 GPUs, extrapolated from 32 GPUs, fitted"), "{text}");
    assert!(text.contains(
        "Assumed: 8 GPUs by the model of docs/simulator.md: 32 experts a GPU and layer instead of 8"
    ));
    assert!(of_point("--gpus 8 --html -").contains("Extrapolated: 8 GPUs, from costs of 32."));
    assert!(of_point("--gpus 8 --timeline -").contains("ess on 8 GPUs, extrapolated"));
    // The setup's own field has the effect of the option.
    let mut setup: Value =
        serde_json::from_str(&fs::read_to_string(data("setups/ess.json")).unwrap()).unwrap();
    setup["deployment"]["gpus"] = json!(8);
    let setup = written("node.json", &setup.to_string());
    let options = format!("simulate --json - --setup {setup} {POINT}");
    let entries: Vec<Value> =
        serde_json::from_str(&succeeds(&options.split(' ').collect::<Vec<_>>())).unwrap();
    assert_eq!(number(&entries[0], "step_ms"), node.0);
    // Rows that fit next to the weights get a price.
    simulated("--gpus 16 --context 32K --mtp 2 --batch 64 --ratio auto --cache 60GiB");
}

#[test]
fn gpus_without_prices_are_refused_in_one_line() {
    for (options, words) in [
        (format!("--gpus 256 {POINT}"), "256 GPUs: the costs are of 32, and can be extrapolated to 8 to 128"),
        (format!("--gpus 4 {POINT}"), "4 GPUs: the costs are of 32"),
        (format!("--gpus 24 {POINT}"), "24 GPUs: 256 experts do not divide"),
        (format!("--gpus 0 {POINT}"), "--gpus"),
        (
            "--gpus 8 --context 32K --batch 64 --cache 80GiB".to_owned(),
            "--cache 80 GiB and 94.7 GiB of weights on each of 8 GPUs are more than its 131 GiB",
        ),
    ] {
        let options = format!("simulate --setup ess {options}");
        let error = refuses(&options.split(' ').collect::<Vec<_>>());
        assert!(error.contains(words), "{error}");
    }
}

/// Users exchange setup files, and their texts reach terminals and pages.
#[test]
fn texts_of_a_setup_control_neither_terminal_nor_page() {
    let mut setup: Value =
        serde_json::from_str(&fs::read_to_string(data("setups/ess.json")).unwrap()).unwrap();
    setup["name"] = json!("ess\u{1b}[2J<script>alert(1)</script>");
    setup["origin"] = json!("<img src=x onerror=alert(1)>");
    setup["assumptions"] = json!(["</p><script>alert(2)</script>"]);
    let hostile = written("hostile.json", &setup.to_string());
    let run = |more: &str| {
        let options = format!("simulate --setup {hostile} {POINT}{more}");
        succeeds(&options.split(' ').collect::<Vec<_>>())
    };
    let text = run("");
    assert!(text.contains("<img src=x") && !text.contains('\u{1b}'), "{text}");
    for page in [run(" --html -"), run(" --timeline -")] {
        assert!(!page.contains("<script") && !page.contains("<img") && !page.contains('\u{1b}'));
        assert!(page.contains("&lt;img src=x"));
    }
    for (field, text) in [("origin", "\u{1b}]0;x\u{7}"), ("origin", "a\u{202e}b"), ("origin", "a\nb")] {
        setup[field] = json!(text);
        let wrong = written("steering.json", &setup.to_string());
        let options = format!("simulate --setup {wrong} {POINT}");
        let error = refuses(&options.split(' ').collect::<Vec<_>>());
        assert!(error.contains("steering.json: origin: the character U+"), "{error}");
    }
}

#[test]
fn the_page_of_one_point_shows_its_timeline() {
    let page = of_point("--html - --layer 17");
    let of = |field: &str| number(&simulated(POINT)[0], field);
    let headline = format!("<h1 class=\"sentence\">A step of {:.0} ms, ", of("step_ms"));
    assert!(
        page.contains(&headline)
            && page.contains(" tokens a second of 8 GPUs, computed from setup ess.</h1>")
    );
    assert!(page.contains("The step by streams") && page.contains("Layers 16 to 18, enlarged"));
    assert!(page.contains("gather, micro-batch 2") && page.contains("One point: ess: 32K tokens, batch 128"));
    assert!(!page.contains("Throughput by batch") && !page.contains("NaN"));
    let sweep = of_point("--html - --overlap da,dba");
    assert!(sweep.contains("Throughput by batch") && !sweep.contains("The step by streams"));
}

/// Rates that `forebay doctor` measured on a GPU count as measured; rates of its host device or without a source do
/// not.
#[test]
fn a_fit_reports_the_measured_part_of_its_setup() {
    let measurements = data("setups/ess-measurements.json");
    let measured: Value = serde_json::from_str(&fs::read_to_string(&measurements).unwrap()).unwrap();
    let rates = measured["setup"]["link"]["rates"].clone();
    let gpu = json!([{"kind": "doctor", "device": "machine"},
                     {"kind": "doctor", "device": "cuda:0", "facts": {"name": "H200"}, "rates": rates}]);
    let host = json!([{"kind": "doctor", "device": "host", "rates": rates}]);
    let cases =
        [(gpu, json!(["link"]), "forebay doctor, H200, cuda:0"), (host, Value::Null, "no measured GPU")];
    for (of, parts, source) in cases {
        let rates = written("measured-rates.json", &of.to_string());
        let text = succeeds(&["fit", &measurements, "--rates", &rates, "-o", "-"]);
        let setup: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(setup["measured"], parts);
        assert!(setup["source"].to_string().contains(source), "{setup}");
        let text = unbroken(&succeeds(&["fit", &measurements, "--rates", &rates]));
        assert_eq!(
            text.contains("; measured: link; not measured: costs, misses."),
            parts != Value::Null,
            "{text}"
        );
    }
}

/// The fit simulates each row of measurements, overlap rows many times, so their number is limited.
#[test]
fn too_many_measurements_are_refused_with_the_limit() {
    let text = fs::read_to_string(data("setups/ess-measurements.json")).unwrap();
    for (list, most) in [("steps", 4096), ("overlap", 128)] {
        let mut measured: Value = serde_json::from_str(&text).unwrap();
        let rows = measured[list].as_array_mut().unwrap();
        *rows = rows.iter().cycle().take(most + 1).cloned().collect();
        let file = written(&format!("many-{list}.json"), &measured.to_string());
        let e = refuses(&["fit", &file]);
        assert!(e.contains(&format!("{list}: too many rows (rows {}, most {most})", most + 1)), "{e}");
    }
    let rows = vec![vec![1.0; 61]; (1 << 14) + 1];
    let steps = json!({"steps": {"query_rows": 2, "query_rows_power": 1, "rows": rows}});
    let file = written("many-steps.json", &steps.to_string());
    let begin = ["simulate", "--setup", "ess", "--misses", &file];
    let e = refuses(&begin.into_iter().chain(POINT.split(' ')).collect::<Vec<_>>());
    assert!(e.contains("(steps 16385, most 16384)"), "{e}");
}
