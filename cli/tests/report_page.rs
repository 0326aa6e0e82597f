//! Tests of the report of `forebay replay --html`: its sentences, its errors, and its looks in a browser.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/browser.rs"]
mod browser;
#[path = "support/command.rs"]
mod command;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use browser::{Light, chromium, complaints, open, shot};
use command::{forebay, refuses, succeeds};
use forebay::trace::SelectionTrace;
use serde_json::Value;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

/// A folder for one test only.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The demo trace's report, written once.
fn report() -> &'static str {
    static PAGE: OnceLock<String> = OnceLock::new();
    PAGE.get_or_init(|| {
        let page = folder("demo").join("report.html");
        let printed = succeeds(&["replay", demo().to_str().unwrap(), "--html", page.to_str().unwrap()]);
        assert_eq!(printed, "");
        fs::read_to_string(page).unwrap()
    })
}

#[test]
fn a_report_agrees_with_the_other_outputs() {
    let (demo, page) = (demo(), report());
    let policies = "lru,belady,decay-tokens,fifo,s3-fifo,decay";
    let json = succeeds(&[
        "replay",
        demo.to_str().unwrap(),
        "--prompt-share",
        "0.1,0.2",
        "--policy",
        policies,
        "--json",
        "-",
    ]);
    let entries: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(entries.len(), 12);
    for entry in &entries {
        let mean = entry["total"]["misses_per_step"].as_f64().unwrap() / entry["layers"].as_f64().unwrap();
        let mean = if mean < 10.0 {
            format!("{mean:.2}")
        } else if mean < 100.0 {
            format!("{mean:.1}")
        } else {
            format!("{mean:.0}")
        };
        let row =
            page.lines().find(|line| line.starts_with(&format!("<tr><td>{}</td>", entry["prompt_share"])));
        assert!(row.unwrap().contains(&format!("<td>{mean}</td>")), "{entry}: {}", row.unwrap());
    }
    let shown = entries.iter().find(|e| e["policy"] == "lru" && e["prompt_share"] == 0.2).unwrap();
    for layer in shown["per_layer"].as_array().unwrap() {
        let cells =
            [&layer["layer"], &layer["hits"], &layer["misses"]].map(|cell| format!("<td>{cell}</td>"));
        assert!(page.contains(&cells.concat()), "{layer}");
    }
}

#[test]
fn a_report_references_nothing_outside_itself() {
    let page = report();
    for word in ["://", "src=", "url(", "@import", "<script", "<link", "<iframe", "<object"] {
        assert!(!page.contains(word), "{word}");
    }
    let links = page.matches("href=").count();
    assert_eq!(links, page.matches("href=\"#").count());
    assert!(page.len() < 400_000, "{} bytes", page.len());
}

/// A trace of two layers and ten steps, k 3.
fn small(folder: &Path) -> PathBuf {
    recorded(folder, 10, 2)
}

/// A trace of two layers, k 3, decoded from position 42.
fn recorded(folder: &Path, steps: u32, warm_steps: u32) -> PathBuf {
    let header = serde_json::json!({
        "label": "small </h2><script>", "layers": 2, "layer_ids": [0, 1], "k": 3, "steps": steps,
        "warm_steps": warm_steps, "first_position": 42 - warm_steps, "decode_start": 42,
        "context": 42 + steps - warm_steps
    });
    let sets = (0..2 * steps).flat_map(|i| [i % 7, 10 + i % 5, 20 + i % 23 / 2]);
    let trace = SelectionTrace::new(serde_json::from_value(header).unwrap(), sets.collect()).unwrap();
    let path = folder.join("small.topk");
    fs::write(&path, trace.encode().unwrap()).unwrap();
    path
}

#[test]
fn one_step_without_a_prompt_has_no_similarity() {
    let folder = folder("one");
    for (warm, shown) in [(0, false), (1, true)] {
        let trace = recorded(&folder, 1 + warm, warm);
        let page = succeeds(&["replay", trace.to_str().unwrap(), "--slots", "9", "--html", "-"]);
        assert!(!page.contains("NaN"), "{warm} warm steps");
        assert_eq!(page.contains("Similarity within a layer"), shown);
    }
}

#[test]
fn the_size_at_which_lru_misses_as_few_is_exact() {
    let trace = recorded(&folder("reached"), 60, 0);
    let trace = trace.to_str().unwrap();
    for slots in ["4", "8", "12", "20"] {
        let page = succeeds(&["replay", trace, "--slots", slots, "--html", "-"]);
        let misses = |slots: &str, policy: &str| -> u64 {
            let named = ["replay", trace, "--slots", slots, "--policy", policy, "--json", "-"];
            let entries: Vec<Value> = serde_json::from_str(&succeeds(&named)).unwrap();
            let layers = entries[0]["per_layer"].as_array().unwrap();
            layers.iter().map(|layer| layer["misses"].as_u64().unwrap()).sum()
        };
        let optimum = misses(slots, "belady");
        if misses(slots, "lru") == optimum {
            assert!(!page.contains("LRU needs prompt share"));
            continue;
        }
        let sizes = (1..=102u32).map(|size| size.to_string());
        let all: Vec<String> = sizes.collect();
        let (mut least, mut enough) = (0, all.len() - 1);
        // LRU never misses more in larger pools.
        while least < enough {
            let middle = (least + enough) / 2;
            if misses(&all[middle], "lru") <= optimum { enough = middle } else { least = middle + 1 }
        }
        assert!(
            page.contains(&format!("({} slots) to miss as little.", all[enough])),
            "{slots}: {}",
            all[enough]
        );
    }
}

#[test]
fn two_traces_have_a_section_each_and_standard_output_gets_the_page() {
    let trace = small(&folder("two"));
    let trace = trace.to_str().unwrap();
    let page = succeeds(&["replay", trace, trace, "--slots", "9", "--mtp", "2", "--html", "-"]);
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    assert_eq!(page.matches("<section id=\"trace-").count(), 2);
    assert!(page.contains("<a href=\"#trace-2\">") && page.contains("9 slots a layer"));
    assert!(page.contains("small &lt;/h2&gt;&lt;script&gt;") && !page.contains("<script"));
}

#[test]
fn an_impossible_report_is_refused_and_nothing_is_written() {
    let folder = folder("refused");
    let page = folder.join("report.html");
    let (page, demo) = (page.to_str().unwrap(), demo());
    let demo = demo.to_str().unwrap();
    let refusals: [(&[&str], &str); 7] = [
        (&["--prompt-share", "0.1,0.2"], "several are named"),
        (&["--curve"], "--curve"),
        (&["--policy", "fifo"], "--policy"),
        (&["--json", page], "the same file"),
        (&["--link-rate", "0"], "GB/s"),
        (&["--link-rate", "nan"], "GB/s"),
        (&["--prompt-share", "0.00001"], "leaves no slot"),
    ];
    for (more, words) in refusals {
        let error = refuses(&[&["replay", demo, "--html", page], more].concat());
        assert!(error.contains(words), "{more:?}: {error}");
    }
    assert!(!folder.join("report.html").exists());
    // Both outputs at once, each complete, without a table.
    let both = succeeds(&["replay", demo, "--html", page, "--json", "-", "--prompt-share", "0.1"]);
    let alone = succeeds(&["replay", demo, "--json", "-", "--prompt-share", "0.1"]);
    assert!(both == alone && fs::read_to_string(page).unwrap().ends_with("</html>\n"));
    fs::remove_file(page).unwrap();
    let error = refuses(&["replay", demo, "--link-rate", "37"]);
    assert!(error.contains("--html"), "{error}");
    // A truncated trace after a complete one.
    let bytes = fs::read(demo).unwrap();
    let cut = folder.join("cut.topk.zst");
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    refuses(&["replay", demo, cut.to_str().unwrap(), "--html", page]);
    // A folder that does not exist.
    refuses(&["replay", demo, "--html", folder.join("none/report.html").to_str().unwrap()]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
}

#[test]
fn request_traces_have_hits_by_capacity() {
    let folder = folder("requests");
    let trace = folder.join("requests.jsonl");
    let line = |ids: &[u32]| {
        let tokens = 512 * ids.len();
        format!(
            "{{\"timestamp\": 0, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n"
        )
    };
    let requests: Vec<String> = (0..60).map(|i| line(&[0, 1 + i % 5, 10 + i % 7, 20 + i])).collect();
    fs::write(&trace, requests.concat()).unwrap();
    let trace = trace.to_str().unwrap();
    let policies = "lru,fifo,s3-fifo,belady";
    let json = succeeds(&["replay", trace, "--capacity", "9,20", "--policy", policies, "--json", "-"]);
    let entries: Vec<Value> = serde_json::from_str(&json).unwrap();
    assert_eq!(entries.len(), 8);
    for capacity in entries.chunks(4) {
        let blocks = capacity[0]["capacity_blocks"].to_string();
        let page = succeeds(&["replay", trace, "--capacity", &blocks, "--html", "-"]);
        assert!(page.contains(&format!("With {blocks} blocks, LRU hits")));
        let cell =
            |entry: &Value, share: &str| format!("<td>{:.1}%</td>", 100.0 * entry[share].as_f64().unwrap());
        let by = |share: &str| capacity.iter().map(|entry| cell(entry, share)).collect::<String>();
        let cells = by("token_hit_ratio") + &by("hit_ratio");
        let row = page.lines().find(|l| l.starts_with(&format!("<tr><td>{blocks}</td>")));
        assert!(row.unwrap().contains(&cells), "{cells}: {}", row.unwrap());
    }
    let error = refuses(&["replay", trace, "--capacity", "9,20", "--html", "-"]);
    assert!(error.contains("several are named"), "{error}");
    let error = refuses(&["replay", trace, "--html", "-", "--link-rate", "30"]);
    assert!(error.contains("--link-rate is for selection traces"), "{error}");
    let error = refuses(&["replay", trace, "--html", trace]);
    assert!(error.contains("would replace the trace"), "{error}");
}

#[test]
fn a_report_writes_a_count_of_one_without_a_plural() {
    let trace = folder("single").join("requests.jsonl");
    fs::write(&trace, "{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\n")
        .unwrap();
    let page = succeeds(&["replay", trace.to_str().unwrap(), "--block-tokens", "1", "--html", "-"]);
    for words in [
        ": 1 request (mooncake)",
        ", 1 block reference, 1 input token.",
        "1 distinct block of 1 token.",
        "request measured",
    ] {
        assert!(page.contains(words), "{words}");
    }
}

#[test]
fn a_report_never_replaces_a_trace() {
    let folder = folder("target");
    let trace = folder.join("trace.topk.zst");
    fs::copy(demo(), &trace).unwrap();
    std::os::unix::fs::symlink(&trace, folder.join("alias.html")).unwrap();
    for target in [trace.clone(), folder.join("alias.html"), folder.join("./trace.topk.zst")] {
        let error = refuses(&["replay", trace.to_str().unwrap(), "--html", target.to_str().unwrap()]);
        assert!(error.contains("--html") && error.contains("would replace the trace"), "{error}");
    }
    assert_eq!(fs::read(&trace).unwrap(), fs::read(demo()).unwrap());
}

/// Between 0 (black) and 1.
fn lightness(pixel: [u8; 3]) -> f64 {
    let [r, g, b] = pixel.map(f64::from);
    (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255.0
}

#[test]
fn a_browser_shows_the_report_in_light_and_dark_mode() {
    let Some(program) = chromium() else { return };
    let folder = folder("lights");
    let (page, phone) = (folder.join("page.html"), folder.join("phone.html"));
    fs::write(&page, report()).unwrap();
    framed(report(), &phone, 500, 2600);
    let mut papers = Vec::new();
    for light in [Light::Bright, Light::Dark] {
        for (page, window) in [(&page, (1160, 2600)), (&phone, (500, 2600))] {
            let shot = shot(&program, page, window, light);
            assert_eq!((shot.width, shot.height), (window.0 as usize, window.1 as usize));
            let mut colours: HashMap<[u8; 3], usize> = HashMap::new();
            shot.pixels.iter().for_each(|pixel| *colours.entry(*pixel).or_default() += 1);
            let (card, most) = colours.iter().max_by_key(|(_, count)| **count).unwrap();
            let share = *most as f64 / shot.pixels.len() as f64;
            assert!((0.3..0.95).contains(&share), "the most frequent colour covers {share}");
            assert!(colours.len() > 200, "{} colours", colours.len());
            let mean = shot.pixels.iter().map(|p| lightness(*p)).sum::<f64>() / shot.pixels.len() as f64;
            match light {
                Light::Bright => assert!(mean > 0.8 && lightness(*card) > 0.95, "{mean} {card:?}"),
                Light::Dark => assert!(mean < 0.25 && lightness(*card) < 0.12, "{mean} {card:?}"),
            }
            papers.push(shot.pixels[0]);
        }
    }
    assert!(papers[0] == papers[1] && papers[2] == papers[3] && papers[0] != papers[2], "{papers:?}");
}

/// Asks the browser for the layout: the width of the page, and which texts leave their picture, overlap or are small.
/// The report's policy forbids this script, so the test removes the policy.
const LOOK: &str = "<script>
    const found = { wide: document.documentElement.scrollWidth, window: innerWidth, out: [], over: [], small: [] };
    for (const picture of document.querySelectorAll('svg')) {
        const frame = picture.getBoundingClientRect();
        const texts = [...picture.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
        const scale = frame.width / picture.viewBox.baseVal.width;
        const sizes = [...picture.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * scale);
        texts.forEach(([text, a], i) => {
            if (a.left < frame.left - 2 || a.right > frame.right + 2 || a.bottom > frame.bottom + 2)
                found.out.push(picture.getAttribute('aria-label') + ': ' + text);
            if (sizes[i] < 11 * Math.min(1, innerWidth / 390)) found.small.push(text + ' ' + sizes[i]);
            for (const [other, b] of texts.slice(i + 1))
                if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
                    found.over.push(picture.getAttribute('aria-label') + ': ' + text + ' | ' + other);
        });
    }
    parent.document.body.dataset.found = JSON.stringify(found).replace(/[<&]/g, '');
</script>";

/// A page that shows `page` in a frame of `width`: windows are never narrower than 500.
fn framed(page: &str, file: &Path, width: u32, height: u32) {
    let inside = page.replace('&', "&amp;").replace('"', "&quot;");
    let frame =
        format!("<iframe style=\"border:0;width:{width}px;height:{height}px\" srcdoc=\"{inside}\"></iframe>");
    let head = "<meta charset=\"utf-8\"><meta name=\"color-scheme\" content=\"light dark\">";
    let text =
        format!("<!DOCTYPE html><html><head>{head}</head><body style=\"margin:0\">{frame}</body></html>");
    fs::write(file, text).unwrap();
}

/// The result of [`LOOK`] for the page at this width.
fn looked(program: &Path, page: &str, folder: &Path, width: u32) -> Value {
    let file = folder.join("look.html");
    let policy = page.lines().find(|line| line.contains("Content-Security-Policy")).unwrap_or("<head>");
    framed(&page.replace(policy, "").replace("</body>", &format!("{LOOK}</body>")), &file, width, 900);
    let (dom, errors) = open(program, &file, (1280, 900), Light::Bright, &["--dump-dom"]);
    assert_eq!(complaints(&errors), Vec::<&str>::new());
    let text = dom.rsplit("data-found=\"").next().and_then(|rest| rest.split('"').next());
    serde_json::from_str(&text.unwrap().replace("&quot;", "\"")).unwrap_or_else(|e| panic!("{e}: {dom}"))
}

#[test]
fn no_text_overflows_on_a_phone_or_a_desktop() {
    let Some(program) = chromium() else { return };
    let folder = folder("places");
    for width in [360, 390, 700, 1160] {
        let found = looked(&program, report(), &folder, width);
        assert_eq!(found["window"], width);
        assert!(found["wide"].as_u64().unwrap() <= u64::from(width), "{width}: {}", found["wide"]);
        for kind in ["out", "over", "small"] {
            assert_eq!(found[kind].as_array().unwrap().len(), 0, "{width}: {kind}: {}", found[kind]);
        }
    }
}

#[test]
fn control_the_browser_finds_faults_of_a_page() {
    let Some(program) = chromium() else { return };
    let folder = folder("control");
    let wrong = "<!DOCTYPE html><html><head></head><body><div style=\"width:900px\">wide</div>\
                 <svg viewBox=\"0 0 100 50\" width=\"100\"><text x=\"10\" y=\"20\">over</text>\
                 <text x=\"12\" y=\"20\">lying</text><text x=\"90\" y=\"40\">outside</text></svg></body></html>";
    let found = looked(&program, wrong, &folder, 390);
    assert!(found["wide"].as_u64().unwrap() > 390, "{found}");
    assert_eq!(
        (found["over"][0].as_str(), found["out"][0].as_str()),
        (Some("null: over | lying"), Some("null: outside"))
    );
    // The page's policy blocks every fetch, and the browser reports it.
    let forbidden = folder.join("forbidden.html");
    let head = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'\">";
    fs::write(
        &forbidden,
        format!("<!DOCTYPE html><html><head>{head}</head><body><img src=\"a.png\"></body></html>"),
    )
    .unwrap();
    let (_, errors) = open(&program, &forbidden, (600, 400), Light::Bright, &["--dump-dom"]);
    assert!(!complaints(&errors).is_empty(), "{errors}");
}

#[test]
fn a_closed_pipe_is_no_error() {
    let trace = small(&folder("pipe"));
    let mut child = forebay(&["replay", trace.to_str().unwrap(), "--html", "-"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
