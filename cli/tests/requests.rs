//! Tests of `forebay replay` on request traces: the output and the errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// `forebay replay` with these arguments.
fn replay<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    std::iter::once("replay").chain(arguments.iter().copied()).collect()
}

fn succeeds(arguments: &[&str]) -> String {
    command::succeeds(&replay(arguments))
}

fn refuses(arguments: &[&str]) -> String {
    command::refuses(&replay(arguments))
}

/// A file for one test only.
fn file(name: &str, bytes: &[u8]) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("requests");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn request(time: u32, length: u32, ids: &str) -> String {
    format!(
        "{{\"timestamp\":{time},\"input_length\":{length},\"output_length\":1,\"hash_ids\":[{ids}],\"x\":0}}\n"
    )
}

/// By hand, 3 blocks hold: a, b, c; then a, b hit, d evicts c; then a hits, c misses.
fn tiny() -> String {
    request(0, 1100, "1,2,3") + &request(1, 1500, "1,2,4") + &request(1, 1536, "1,3,2")
}

#[test]
fn the_json_has_the_counts_of_the_replay() {
    let path = file("tiny.jsonl", tiny().as_bytes());
    let text = succeeds(&[&path, "--capacity", "3,4", "--json", "-"]);
    let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
    let of = |entry: &Value, name: &str| entry[name].as_u64().unwrap();
    let fields = ["requests", "blocks", "capacity_blocks", "hit_blocks", "evicted_blocks", "hit_tokens"];
    let counts = |entry| fields.map(|name| of(entry, name));
    assert_eq!(counts(&entries[0]), [3, 9, 3, 3, 2, 3 * 512]);
    assert_eq!(counts(&entries[1]), [3, 9, 4, 5, 0, 1024 + 1536]);
    assert_eq!(entries[0]["kind"], "requests");
    assert_eq!(entries[0]["trace"], path.as_str());
    assert_eq!(entries[0]["hit_ratio"].as_f64().unwrap(), 3.0 / 9.0);
    assert_eq!(of(&entries[0], "input_tokens"), 4136);
    for (skip, measured) in [("1", 2), ("0.5", 2), ("0.99", 1), ("0", 3)] {
        let text = succeeds(&[&path, "--capacity", "3", "--skip", skip, "--json", "-"]);
        let entries: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(of(&entries[0], "requests"), measured, "{skip}");
        assert_eq!(of(&entries[0], "skipped_requests"), 3 - measured);
    }
}

#[test]
fn the_table_ends_with_definition_and_denominator() {
    let path = file("table.jsonl", tiny().as_bytes());
    let text = succeeds(&[&path, "--capacity", "3", "--skip", "1"]);
    for words in ["3 requests (mooncake)", "Measured: the last 2, 6 block references, 3036 input tokens"] {
        assert!(text.contains(words), "{text}");
    }
    assert!(text.contains("hit blocks / all block references of the measured requests"), "{text}");
    assert!(text.contains("50.0%"), "{text}");
    assert!(succeeds(&[&path]).contains("100.0%"), "capacities are chosen where none are named");
}

fn entries(arguments: &[&str]) -> Vec<Value> {
    serde_json::from_str(&succeeds(&[arguments, &["--json", "-"]].concat())).unwrap()
}

#[test]
fn policies_are_printed_side_by_side_at_every_capacity() {
    // Three blocks. FIFO: d evicts a, so the third request hits nothing. The optimum does not admit d.
    let path = file("side-by-side.jsonl", tiny().as_bytes());
    let named = "belady,lru,fifo,s3-fifo";
    let replays = entries(&[&path, "--capacity", "3,4", "--policy", named]);
    let of = |entry: &Value| {
        let policy = entry["policy"].as_str().unwrap().to_owned();
        (policy, entry["capacity_blocks"].as_u64().unwrap(), entry["hit_blocks"].as_u64().unwrap())
    };
    let expected = [("belady", 3, 5), ("lru", 3, 3), ("fifo", 3, 2), ("s3-fifo", 3, 3)];
    let expected =
        expected.iter().chain(&[("belady", 4, 5), ("lru", 4, 5), ("fifo", 4, 5), ("s3-fifo", 4, 5)]);
    let expected: Vec<_> = expected.map(|(policy, n, hits)| ((*policy).to_owned(), *n, *hits)).collect();
    assert_eq!(replays.iter().map(of).collect::<Vec<_>>(), expected);
    let table = succeeds(&[&path, "--capacity", "3", "--policy", named]);
    for line in ["  fifo  ", "s3-fifo: ", "belady: the optimum in blocks over all requests"] {
        assert!(format!("  {table}").contains(line.trim_start()), "{table}");
    }
    assert!(!succeeds(&[&path, "--capacity", "3"]).contains("fifo"));
    for refused in ["decay", "decay-tokens", "lru,decay"] {
        let said = refuses(&[&path, "--policy", refused]);
        assert!(
            said.contains("is for selection traces") && said.contains("lru, fifo, s3-fifo and belady"),
            "{said}"
        );
    }
}

#[test]
fn a_curve_covers_every_capacity() {
    let path = file("curve.jsonl", tiny().as_bytes());
    let singles = entries(&[&path, "--capacity", "1,2,3,4,5", "--skip", "1"]);
    let curves = entries(&[&path, "--capacity", "1,2,3,4,5", "--skip", "1", "--curve"]);
    let [curve] = curves.as_slice() else { panic!("one entry") };
    assert_eq!((&curve["kind"], &curve["schema"]), (&"requests-curve".into(), &2.into()));
    assert_eq!(curve["flat_from"], 4);
    let asked = curve["asked"].as_array().unwrap();
    for (single, asked) in singles.iter().zip(asked) {
        for field in
            ["capacity_blocks", "hit_blocks", "hit_ratio", "evicted_blocks", "hit_tokens", "token_hit_ratio"]
        {
            assert_eq!(single[field], asked[field], "{field}");
        }
        for field in ["trace", "format", "policy", "requests", "blocks", "input_tokens", "skipped_requests"] {
            assert_eq!(single[field], curve[field], "{field}");
        }
    }
    let column = |name: &str| -> Vec<u64> {
        curve["curve"][name].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
    };
    let (capacities, hits, tokens) = (column("capacity_blocks"), column("hit_blocks"), column("hit_tokens"));
    assert_eq!((hits.len(), tokens.len()), (capacities.len(), capacities.len()));
    for single in &singles {
        let capacity = single["capacity_blocks"].as_u64().unwrap();
        let at = capacities.partition_point(|change| *change <= capacity).checked_sub(1);
        assert_eq!(single["hit_blocks"], at.map_or(0, |at| hits[at]), "{capacity}");
        assert_eq!(single["hit_tokens"], at.map_or(0, |at| tokens[at]), "{capacity}");
    }
    let text = succeeds(&[&path, "--curve"]);
    assert!(text.contains("More than 4 blocks gain nothing"), "{text}");
    assert!(refuses(&[&path, "--curve", "--policy", "fifo"]).contains("--curve counts lru"));
}

#[test]
fn a_trace_of_lengths_alone_is_reported_to_share_nothing() {
    let path =
        file("azure.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10");
    assert!(succeeds(&[&path]).contains("requests share nothing"));
    for option in [&["--curve"][..], &["--capacity", "1"]] {
        let text = refuses(&[&[path.as_str()], option].concat());
        assert!(text.contains("azure.csv: the trace names no blocks"), "{text}");
    }
}

#[test]
fn bad_input_is_named_with_its_line() {
    let bad = |name: &str, text: &str| refuses(&[&file(name, text.as_bytes())]);
    let text = bad("many.jsonl", &(tiny() + &request(9, 512, "1,2")));
    assert!(text.contains("many.jsonl: more block ids than the length allows (line 4, column 67"), "{text}");
    let text = bad("again.jsonl", &(tiny() + &request(9, 5120, "1,2,1")));
    assert!(text.contains("repeats inside the request (line 4, column 70"), "{text}");
    let text = bad("late.jsonl", &(tiny() + &request(0, 512, "1")));
    assert!(text.contains("earlier than the one before (line 4, column 14)"), "{text}");
    let day = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-31 00:00:00,4,5\n";
    let text = bad("day.csv", day);
    assert!(
        text.contains("the timestamp is not YYYY-MM-DD HH:MM:SS") && text.contains("(line 2, column 1)"),
        "{text}"
    );
    let text = bad("plus.csv", &day.replace("31", "28").replace(",4,", ",+4,"));
    assert!(text.contains("a length is not a whole number below 2^32 (line 2, column 21)"), "{text}");
    let text = bad("cut.jsonl", &tiny()[..200]);
    assert!(text.contains("ends in the middle of a line (line 3, column"), "{text}");
    assert!(bad("none.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n").contains("has no requests"));
    let text = refuses(&[&file("packed.jsonl.zst", &[0x1F, 0x8B, 8, 0, 0, 0, 0, 0])]);
    assert!(text.contains("the file is gzip"), "{text}");
    let long = zstd::encode_all(std::io::Read::take(std::io::repeat(b'{'), 100 << 20), 1).unwrap();
    let text = refuses(&[&file("long.jsonl.zst", &long)]);
    assert!(text.contains("the line is too long (line 1, column 67108865"), "{text}");
    let packed = zstd::encode_all(tiny().as_bytes(), 1).unwrap();
    let text = refuses(&[&file("half.jsonl.zst", &packed[..packed.len() / 2])]);
    assert!(text.contains("truncated"), "{text}");
}

#[test]
fn a_file_of_another_kind_is_identified_and_the_accepted_kinds_named() {
    let array = format!("[{}]", tiny().trim_end().replace('\n', ",\n"));
    let marked = "\u{FEFF}".to_owned() + &tiny();
    for (name, text, found, hint) in [
        ("array.json", array.as_str(), "holds a JSON array", "one object a line"),
        ("array.csv", "when,tokens\n1,2\n", "holds text of no known kind", "Mooncake, kv-cache-tester"),
        ("other.jsonl", "{\"prompt\":\"x\"}\n", "neither `hash_ids` nor `requests` (line 1, column 1)", ""),
        ("columns.csv", "TIMESTAMP,Tokens\n", "the columns are not TIMESTAMP,ContextTokens", ""),
        ("zeros", "\0\0\0\0\0\0\0\0\0", "neither text nor a zstd frame", "Azure), plain or zstd"),
    ] {
        let plain = file(name, text.as_bytes());
        let packed = file(&format!("{name}.zst"), &zstd::encode_all(text.as_bytes(), 1).unwrap());
        for path in [plain, packed] {
            let said = refuses(&[&path]);
            assert!(said.contains(&path) && said.contains(found) && said.contains(hint), "{said}");
        }
    }
    // A byte order mark is ignored.
    assert!(succeeds(&[&file("marked.jsonl", marked.as_bytes())]).contains("3 requests (mooncake)"));
}

#[test]
fn a_request_trace_from_a_pipe_is_refused_and_a_file_asked_for() {
    for text in [tiny().as_str(), "TIMESTAMP,ContextTokens,GeneratedTokens\n"] {
        for bytes in [text.as_bytes().to_vec(), zstd::encode_all(text.as_bytes(), 1).unwrap()] {
            let (reader, mut writer) = std::io::pipe().unwrap();
            std::io::Write::write_all(&mut writer, &bytes).unwrap();
            drop(writer);
            let arguments = ["replay", "/dev/stdin"];
            let output = command::forebay(&arguments).stdin(reader).output().unwrap();
            let said = command::refused(output, &arguments);
            assert!(said.contains("holds a request trace") && said.contains("not through a pipe"), "{said}");
        }
    }
}

#[test]
fn options_and_traces_must_fit_each_other() {
    let path = file("fit.jsonl", tiny().as_bytes());
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst");
    let demo = demo.to_str().unwrap();
    assert!(refuses(&[&path, demo]).contains("in one call"));
    assert!(refuses(&[demo, "--capacity", "3"]).contains("--capacity is for request traces"));
    assert!(refuses(&[&path, "--slots", "3"]).contains("selection traces"));
    assert!(refuses(&[&path, "--skip", "3"]).contains("nothing to measure"));
    for arguments in [["--capacity", "0"], ["--capacity", "-1"], ["--skip", "1.5"], ["--skip", "x"]] {
        refuses(&[&path, arguments[0], arguments[1]]);
    }
    assert!(refuses(&[&path, "--subagents"]).contains("kv-cache-tester"));
    let before = fs::read(&path).unwrap();
    assert!(refuses(&[&path, "--json", &path]).contains("would replace the trace"));
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn no_option_is_ignored_and_no_file_is_mistaken_for_another_kind() {
    let trace = file("fits.jsonl", tiny().as_bytes());
    for [flag, value] in [["--mtp", "2"], ["--model", "glm-5"], ["--device", "host"], ["--warmup", "0"]] {
        let said = refuses(&[&trace, flag, value]);
        assert!(said.contains(&format!("{flag} is for selection traces")), "{said}");
    }
    let (nothing, empty) = (format!("{trace}.not-there"), file("empty.jsonl", b""));
    for arguments in [vec![&trace, &nothing], vec![&nothing, &trace]] {
        let said = refuses(&arguments.iter().map(|a| a.as_str()).collect::<Vec<_>>());
        assert!(said.contains(&nothing) && !said.contains("in one call"), "{said}");
    }
    let said = refuses(&[&nothing, "--capacity", "5"]);
    assert!(said.contains(&nothing) && !said.contains("selection traces"), "{said}");
    let said = refuses(&[&trace, &empty]);
    assert!(said.contains(&empty) && !said.contains("in one call"), "{said}");
    let said = refuses(&[&empty, "--capacity", "5"]);
    assert!(said.contains(&empty) && !said.contains("is for request traces"), "{said}");
}

#[test]
fn a_side_file_is_not_overwritten() {
    let (trace, lengths) = (file("side.jsonl", tiny().as_bytes()), file("lengths.jsonl", b"{}\n"));
    let said = refuses(&[&trace, "--block-lengths", &lengths, "--json", &lengths]);
    assert!(said.contains("would replace"), "{said}");
    assert_eq!(fs::read(&lengths).unwrap(), b"{}\n");
}

#[test]
fn a_long_value_of_a_wrong_type_is_not_repeated() {
    let long = "a at line ".repeat(10_000);
    let line =
        format!("{{\"timestamp\":0,\"input_length\":\"{long}\",\"output_length\":1,\"hash_ids\":[]}}\n");
    let said = refuses(&[&file("long.jsonl", line.as_bytes())]);
    assert!(said.len() < 500 && said.contains("column"), "{} bytes", said.len());
}

fn session(id: &str, requests: &[(f64, &str)]) -> String {
    let element = |(t, ids): &(f64, &str)| {
        let length = 64 * ids.split(',').count();
        format!("{{\"t\":{t},\"in\":{length},\"out\":1,\"hash_ids\":[{ids}]}}")
    };
    let requests: Vec<String> = requests.iter().map(element).collect();
    let requests = requests.join(",");
    format!("{{\"id\":\"{id}\",\"block_size\":64,\"hash_id_scope\":\"local\",\"requests\":[{requests}]}}\n")
}

/// Two sessions of one block and two turns, a cache of one block: one after another each second turn hits; interleaved
/// none hits.
#[test]
fn sessions_are_interleaved_by_time_as_the_headline_reports() {
    let turns = |offset: f64| [(offset, "1"), (offset + 2.0, "1")];
    let both = session("a", &turns(0.0)) + &session("b", &turns(1.0));
    let path = file("sessions.jsonl", both.as_bytes());
    let of = |path: &str, option: &[&str]| -> Value {
        let arguments = [&[path, "--capacity", "1", "--json", "-"], option].concat();
        serde_json::from_str::<Vec<Value>>(&succeeds(&arguments)).unwrap().remove(0)
    };
    let (together, in_turn) = (of(&path, &[]), of(&path, &["--one-after-another"]));
    assert_eq!((&together["hit_blocks"], &together["sessions"]), (&0.into(), &"interleaved".into()));
    assert_eq!((&in_turn["hit_blocks"], &in_turn["sessions"]), (&2.into(), &"one-after-another".into()));
    let text = succeeds(&[&path]);
    assert!(text.contains("2 sessions, interleaved by time, all beginning together"), "{text}");
    let text = succeeds(&[&path, "--one-after-another"]);
    assert!(text.contains("2 sessions, one after another, block ids"), "{text}");
    let page = succeeds(&[&path, "--html", "-"]);
    assert!(page.contains("interleaved by time"), "{page}");
    let alike = session("a", &[(0.0, "1"), (0.0, "1")]) + &session("b", &[(0.0, "1"), (0.0, "1")]);
    let alike = file("alike.jsonl", alike.as_bytes());
    assert!(succeeds(&[&alike]).contains("one after another, because all their times are equal"));
    assert_eq!(of(&alike, &[])["sessions"], "one-after-another");
    let tiny = file("tiny-order.jsonl", tiny().as_bytes());
    assert!(refuses(&[&tiny, "--one-after-another"]).contains("--one-after-another is for sessions"));
    assert!(of(&tiny, &[]).get("sessions").is_none());
}
