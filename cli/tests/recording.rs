//! Tests of `forebay replay` on recordings: a recorded trace gives the counts of the original.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/traces.rs"]
mod traces;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use command::{refuses, succeeds};
use forebay::trace::requests::{Arrival, RequestWriter};
use forebay::trace::{Frames, Recording, SelectionTrace, TraceWriter};
use serde_json::Value;

/// The path of a file for one test only, which does not exist yet.
fn fresh(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recording");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    let _ = fs::remove_file(&path);
    path
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The positions of a step as a kernel writes them: in no order, -1 where a set is smaller than k.
fn emitted(trace: &SelectionTrace, step: u32, out: &mut Vec<i32>) {
    out.clear();
    for layer in 0..trace.header().layers {
        let start = out.len();
        out.extend(trace.selection(step, layer).iter().map(|p| *p as i32));
        out.resize(start + trace.header().k as usize, -1);
        // In strides, another one each step.
        let set = out[start..].to_vec();
        let stride = 2 + step as usize % 5;
        let visited: Vec<i32> =
            (0..stride).rev().flat_map(|first| set.iter().skip(first).step_by(stride).copied()).collect();
        out[start..].copy_from_slice(&visited);
    }
}

/// Records `trace` to a new file; without the end, if the recording is to be unfinished.
fn record(trace: &SelectionTrace, name: &str, finish: bool) -> PathBuf {
    let (path, header) = (fresh(name), trace.header().clone());
    let mut recording = Recording::default();
    (recording.layers, recording.layer_ids, recording.k) = (header.layers, header.layer_ids, header.k);
    (recording.first_position, recording.decode_start) = (header.first_position, header.decode_start);
    (recording.context, recording.label) = (Some(header.context), header.label);
    (recording.model, recording.arch, recording.score) = (header.model, header.arch, header.score);
    (recording.mode, recording.text) = (header.mode, header.text);
    let mut writer = TraceWriter::create(&path, &recording, Frames::default()).unwrap();
    let mut selected = Vec::new();
    for step in 0..header.steps {
        emitted(trace, step, &mut selected);
        writer.record(header.first_position + step, &selected).unwrap();
    }
    if finish {
        writer.finish().unwrap();
    }
    path
}

/// The entries of a replay, without the file's name.
fn entries(path: &Path) -> Vec<Value> {
    let json = succeeds(&["replay", text(path), "--slots", "700", "--mtp", "2", "--json", "-"]);
    let mut entries: Vec<Value> = serde_json::from_str(&json).unwrap();
    entries.iter_mut().for_each(|entry| assert!(entry.as_object_mut().unwrap().remove("trace").is_some()));
    entries
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/demo.topk.zst")
}

#[test]
fn every_trace_replays_the_same_after_another_recording() {
    let Some(directory) = traces::directory("topk") else {
        return;
    };
    let mut recorded = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let from = entry.unwrap().path();
        if !text(&from).ends_with(".topk.zst") {
            continue;
        }
        let trace = SelectionTrace::read(&from).unwrap();
        let path = record(&trace, from.file_name().unwrap().to_str().unwrap(), true);
        assert!(SelectionTrace::read(&path).unwrap() == trace, "{}: another trace", from.display());
        assert_eq!(entries(&path), entries(&from), "{}", from.display());
        let [ours, theirs] = [&path, &from].map(|path| fs::metadata(path).unwrap().len());
        println!("{}: {ours} bytes recorded, {theirs} before", from.display());
        fs::remove_file(path).unwrap();
        recorded += 1;
    }
    assert!(recorded >= 5, "only {recorded} traces");
}

#[test]
fn an_unfinished_recording_is_replayed_and_reported() {
    let trace = SelectionTrace::read(&demo()).unwrap();
    let whole = record(&trace, "whole.topk", true);
    assert_eq!(entries(&whole), entries(&demo()));
    let cut = record(&trace, "cut.topk", false);
    assert!(entries(&cut).iter().all(|entry| entry["unfinished_bytes"] == 0));
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 1000]).unwrap();
    let entry = entries(&cut).remove(0);
    let left = entry["unfinished_bytes"].as_u64().unwrap();
    assert!(left > 0 && entry["steps"].as_u64() < entries(&whole)[0]["steps"].as_u64());
    for option in [&["--slots", "700"][..], &["--curve"]] {
        let said = succeeds(&[&["replay", text(&cut)], option].concat());
        assert!(said.contains(&format!("not finished: {left} bytes after")), "{said}");
        assert!(!succeeds(&[&["replay", text(&whole)], option].concat()).contains("not finished"));
    }
    // Damage followed by more data is not an unfinished recording.
    let mut damaged = bytes;
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x10;
    fs::write(&cut, &damaged).unwrap();
    let said = refuses(&["replay", text(&cut)]);
    assert!(said.contains("cut.topk: ") && said.contains("unpacked byte"), "{said}");
}

#[test]
fn recorded_requests_are_replayed_with_their_own_block_size() {
    let path = fresh("requests.jsonl");
    let mut writer = RequestWriter::create(&path, 64).unwrap();
    for (milliseconds, blocks) in [(0, &[1, 2, 3][..]), (5, &[1, 2, 4]), (9, &[1, 3, 2])] {
        let request = Arrival { milliseconds, input_tokens: 190, output_tokens: 1, blocks };
        writer.record(&request).unwrap();
    }
    writer.finish().unwrap();
    let json = succeeds(&["replay", text(&path), "--capacity", "3", "--json", "-"]);
    let entry = &serde_json::from_str::<Value>(&json).unwrap()[0];
    assert_eq!((entry["hit_blocks"].as_u64(), entry["hit_tokens"].as_u64()), (Some(3), Some(3 * 64)));
    assert_eq!(entry["block_tokens"], 64);
    assert!(succeeds(&["replay", text(&path), "--block-tokens", "64"]).contains("64 tokens"));
    let said = refuses(&["replay", text(&path), "--block-tokens", "16"]);
    assert!(said.contains("`block_size`") && said.contains("line 1"), "{said}");
}

/// A named pipe, and a process that writes `bytes` into it and ends.
fn pipe(name: &str, bytes: &[u8]) -> (PathBuf, Child) {
    let (path, source) = (fresh(name), fresh(&format!("{name}.bytes")));
    fs::write(&source, bytes).unwrap();
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let script = "exec cat \"$1\" > \"$2\"";
    let writer = Command::new("sh").args(["-c", script, "sh", text(&source), text(&path)]).spawn().unwrap();
    (path, writer)
}

/// A pipe is read as it comes: a selection trace to its end, a shortened one to an error. A file that must be read
/// twice is refused before it is opened.
#[test]
fn a_trace_is_read_from_a_pipe_or_refused_in_one_line() {
    let bytes = fs::read(demo()).unwrap();
    let (path, mut writer) = pipe("whole.pipe", &bytes);
    let piped = entries(&path);
    assert!(writer.wait().unwrap().success());
    let filed = entries(&demo());
    let counts = |entries: &[Value]| entries.iter().map(|e| e["total"].clone()).collect::<Vec<_>>();
    assert_eq!(counts(&piped), counts(&filed));
    let (path, mut writer) = pipe("cut.pipe", &bytes[..bytes.len() / 2]);
    let e = refuses(&["replay", text(&path)]);
    assert!(e.contains("truncated: the file ends early"), "{e}");
    writer.wait().unwrap();
    let line = br#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}"#;
    let (path, mut writer) = pipe("requests.pipe", line);
    let e = refuses(&["replay", text(&path)]);
    assert!(e.contains("request traces are read from regular files, not through a pipe"), "{e}");
    writer.wait().unwrap();
    // No process writes to this pipe: the command must not open it.
    let path = fresh("never.pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let (page, json) = (fresh("never.html"), fresh("never.json"));
    let e = refuses(&["replay", text(&path), "--html", text(&page), "--json", text(&json)]);
    assert!(e.contains("--html and --json read a trace twice"), "{e}");
    assert!(!page.exists() && !json.exists());
}
