//! `forebay simulate --prefill`: its figures, its fields, its picture, and the page that quotes it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use command::{refuses, succeeds};
use serde_json::Value;

fn arguments(options: &str) -> Vec<&str> {
    ["simulate", "--prefill"].into_iter().chain(options.split(' ')).collect()
}

fn passes(options: &str) -> Vec<Value> {
    serde_json::from_str(&succeeds(&arguments(&format!("{options} --json -")))).unwrap()
}

fn close(value: &Value, wanted: f64) {
    let value = value.as_f64().unwrap();
    assert!((value - wanted).abs() < 1e-6 * wanted.abs().max(1e-3), "{value}, not {wanted}");
}

/// Computed by hand: stages of a part of 13.7 MB at 1,000, 17, 50 and 10 GB/s.
#[test]
fn the_published_pass_hides_what_its_last_part_does_not_take() {
    let [pass] = &passes("16384")[..] else { panic!() };
    assert_eq!(
        (&pass["kind"], &pass["layers"], &pass["bytes"]),
        (&"simulate-prefill".into(), &61.into(), &(61_u64 * 16_384 * 836).into())
    );
    let ms = |gb_s: f64| 16_384.0 * 836.0 / gb_s / 1e6;
    let (stage, digest, link, store) = (ms(1000.0), ms(17.0), ms(50.0), ms(10.0));
    close(&pass["layer_ms"], 10.3);
    close(&pass["compute_ms"], 61.0 * (10.3 + stage));
    close(&pass["exposed_ms"], digest + link + store);
    // The receiver's core is the slowest stage.
    close(&pass["alone_ms"], digest + link + 61.0 * store);
    close(&pass["hidden"], 1.0 - (digest + link + store) / (digest + link + 61.0 * store));
    close(&pass["link_load"], link / (10.3 + stage));
    close(&pass["slowed"], stage / 10.3);
    assert_eq!(pass["wait_ms"], 0.0);
    let timeline = pass["timeline"].as_array().unwrap();
    assert_eq!(timeline.len(), 61);
    close(&timeline[1]["computed_ms"], 2.0 * (10.3 + stage));
    close(&timeline[1]["stored_ms"], 2.0 * (10.3 + stage) + digest + link + store);
}

#[test]
fn lists_are_swept_and_options_change_what_they_name() {
    let all = passes("4K,16K --layer-ms 2,10 --micro-batches 1,2");
    let of = |name: &str| all.iter().map(|pass| pass[name].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("tokens"), [4096.0, 4096.0, 4096.0, 4096.0, 16384.0, 16384.0, 16384.0, 16384.0]);
    assert_eq!(of("layer_ms"), [2.0, 2.0, 10.0, 10.0, 2.0, 2.0, 10.0, 10.0]);
    assert_eq!(of("micro_batches"), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
    assert_eq!(all[1]["timeline"].as_array().unwrap().len(), 122);
    // Half a part is exposed for half as long.
    close(&all[1]["exposed_ms"], all[0]["exposed_ms"].as_f64().unwrap() / 2.0);
    let [bare] =
        &passes("4096 --no-digests --layers 8 --token-bytes 100 --send-rate 1GB/s --ring-parts 1")[..]
    else {
        panic!()
    };
    assert_eq!((&bare["digests"], bare.get("digest_gb_s")), (&false.into(), None));
    assert_eq!((&bare["bytes"], &bare["link_gb_s"]), (&(8_u64 * 4096 * 100).into(), &1.0.into()));
    // With one part the GPU waits for each acknowledgement.
    let wait = 7.0 * (4096.0 * 100.0 / 1e6 + 4096.0 * 100.0 / 17e6 + 1.0);
    close(&bare["wait_ms"], wait);
    let [slow] = &passes("4096 --digest-rate 1GB/s --store-rate 2GB/s")[..] else { panic!() };
    assert_eq!((&slow["digest_gb_s"], &slow["store_gb_s"]), (&1.0.into(), &2.0.into()));
}

#[test]
fn entries_have_the_documented_fields() {
    let documented = include_str!("../../docs/json.md");
    let (_, rest) = documented.split_once("## `kind` \"simulate-prefill\"").unwrap();
    let table = rest.split_once("\n## ").unwrap().0;
    let [pass] = &passes("64 --layers 2")[..] else { panic!() };
    let inner = pass["timeline"][0].as_object().unwrap().keys();
    for field in pass.as_object().unwrap().keys().chain(inner) {
        let common = ["schema", "forebay", "kind"].contains(&field.as_str());
        assert!(common || table.contains(&format!("`{field}`")), "{field}");
    }
}

/// The page's rows are those that the command prints.
#[test]
fn the_figures_of_the_page_are_the_computed_ones() {
    let page = include_str!("../../docs/simulator.md");
    let (_, rest) = page.split_once("| command: `forebay simulate --prefill` |").unwrap();
    let lines: Vec<&str> = rest.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert_eq!(lines.len(), 7);
    for line in lines {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let options = format!("{} --wide", cells[0].trim_matches('`'));
        let report = succeeds(&arguments(&options));
        let found = report.lines().any(|row| {
            let row: Vec<&str> = row.split_whitespace().collect();
            row.len() > 8 && row[3..9] == cells[1..]
        });
        assert!(found, "{line}: {report}");
    }
}

#[test]
fn a_picture_has_a_lane_for_each_stage() {
    let picture = std::env::temp_dir().join(format!("prefill-{}.svg", std::process::id()));
    let path = picture.display().to_string();
    for (options, lanes) in [("16K", 4), ("16K --no-digests", 3)] {
        succeeds(&arguments(&format!("{options} --timeline {path}")));
        let svg = std::fs::read_to_string(&picture).unwrap();
        let names = ["GPU", "sender's core", "link", "receiver's core"];
        let shown = |name: &&&str| {
            svg.contains(&format!(">{name}</text>"))
                || svg.contains(&format!(">{}</text>", name.replace('\'', "&#39;")))
        };
        let has: Vec<_> = names.iter().filter(shown).collect();
        assert_eq!(has.len(), lanes, "{has:?}");
        assert!(
            svg.contains("hidden")
                && svg.contains("The whole pass")
                && svg.contains("Layers 59 to 60, enlarged")
        );
    }
    std::fs::remove_file(picture).unwrap();
}

#[test]
fn what_does_not_fit_together_is_refused() {
    for (options, told) in [
        ("4K,8K --timeline x.svg", "--timeline and --perfetto of several passes"),
        ("4K --layer 61 --timeline x.svg", "--layer"),
        ("4K --context 4K", "cannot be used with"),
        ("4K --no-digests --digest-rate 1GB/s", "cannot be used with"),
        ("1 --micro-batches 2", "more micro-batches than tokens"),
    ] {
        let error = refuses(&arguments(options));
        assert!(error.contains(told), "{options}: {error}");
    }
    assert!(refuses(&["simulate", "--layer-ms", "2"]).contains("--prefill"));
}
