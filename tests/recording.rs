//! Recorders that end abnormally: killed in the middle, or out of disk space. What they wrote remains readable.
#![cfg(feature = "trace")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay::trace::requests::{Arrival, Options, RequestTrace, RequestWriter};
use forebay::trace::{Frames, Recording, SelectionTrace, TraceWriter};

/// Gives a test's child process its role.
const CHILD: &str = "FOREBAY_TEST_CHILD";

const K: u32 = 32;
const LAYERS: u32 = 3;
const GROUP: u32 = 5;

/// A file for one test alone, which does not exist yet.
fn fresh(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recording");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    let _ = fs::remove_file(&path);
    path
}

/// This program again, for one test, as the child.
fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").stdout(Stdio::piped());
    command
}

/// The selection of position `p` in `layer`: one of each K neighbours before it.
fn selected(p: u32, layer: u32) -> Vec<i32> {
    let share = (p + 1) / K;
    (0..K).map(|i| (i * share + (p * 7 + layer + i) % share) as i32).rev().collect()
}

fn recorder(path: &Path) -> TraceWriter {
    let (mut recording, mut frames) = (Recording::default(), Frames::default());
    (recording.layers, recording.k) = (LAYERS, K);
    (recording.first_position, recording.decode_start) = (100, 103);
    frames.steps = GROUP;
    TraceWriter::create(path, &recording, frames).unwrap()
}

fn record(writer: &mut TraceWriter) -> forebay::Result<()> {
    let position = 100 + writer.steps();
    let all: Vec<i32> = (0..LAYERS).flat_map(|layer| selected(position, layer)).collect();
    writer.record(position, &all)
}

fn ids(number: u64) -> Vec<u64> {
    (0..=number % 40).map(|block| if block == 0 { 0 } else { number * 64 + block }).collect()
}

fn arrive(writer: &mut RequestWriter) {
    let number = writer.requests();
    let blocks = ids(number);
    let tokens = blocks.len() as u32 * 16;
    let request = Arrival { milliseconds: number, input_tokens: tokens, output_tokens: 1, blocks: &blocks };
    writer.record(&request).unwrap();
}

/// The steps of the trace at `path`, each checked.
fn checked(path: &Path) -> (u32, u64) {
    let trace = SelectionTrace::read(path).unwrap();
    for step in 0..trace.header().steps {
        for layer in 0..LAYERS {
            let mut wanted = selected(100 + step, layer);
            wanted.sort_unstable();
            assert!(trace.selection(step, layer).iter().map(|p| *p as i32).eq(wanted), "step {step}");
        }
    }
    assert_eq!(trace.header().steps % GROUP, 0);
    (trace.header().steps, trace.header().unfinished.expect("it was never finished"))
}

#[test]
fn the_file_of_a_killed_recorder_is_read() {
    let name = "the_file_of_a_killed_recorder_is_read";
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recording");
    let (selections, requests) = (folder.join("killed.topk"), folder.join("killed.jsonl"));
    if std::env::var_os(CHILD).is_some() {
        let mut writer = recorder(&selections);
        let mut asked = RequestWriter::create(&requests, 16).unwrap();
        loop {
            record(&mut writer).unwrap();
            (0..50).for_each(|_| arrive(&mut asked));
        }
    }
    for round in 0..4 {
        fresh("killed.topk");
        fresh("killed.jsonl");
        let mut killed = child(name).spawn().unwrap();
        let size = |path: &PathBuf| fs::metadata(path).map_or(0, |file| file.len());
        let start = Instant::now();
        while size(&selections) < 20_000 + 7777 * round || size(&requests) < 200_000 {
            assert!(killed.try_wait().unwrap().is_none(), "it records until it is killed");
            assert!(start.elapsed() < Duration::from_secs(60), "it does not record");
        }
        killed.kill().unwrap();
        killed.wait().unwrap();
        let (steps, _) = checked(&selections);
        assert!(steps > 50, "{steps}");
        // The system may cut the last write of a killed process, and with it a line.
        let text = fs::read(&requests).unwrap();
        let whole = text.iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
        let trace = RequestTrace::from_bytes(&text[..whole], &Options::default()).unwrap();
        assert_eq!(trace.block_tokens(), Some(16));
        assert!(trace.requests() > 500);
        for i in 0..trace.requests() {
            assert_eq!(trace.blocks(i).len(), ids(i as u64).len());
        }
    }
}

/// The file may not grow beyond 8 KiB: the system writes a part of a group, then refuses.
#[test]
fn a_recorder_on_a_full_disk_ends_its_file_with_a_whole_group() {
    let name = "a_recorder_on_a_full_disk_ends_its_file_with_a_whole_group";
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recording").join("full.topk");
    if std::env::var_os(CHILD).is_some() {
        let mut writer = recorder(&path);
        let e = loop {
            if let Err(e) = record(&mut writer) {
                break e;
            }
        };
        assert!(e.place().ends_with("full.topk: write: File too large"), "{e}");
        assert_eq!(e.number("whole bytes"), Some(writer.file_bytes()));
        assert_eq!(writer.sync().as_ref(), Err(&e));
        assert_eq!(writer.finish().as_ref(), Err(&e));
        return;
    }
    fresh("full.topk");
    let inner = child(name);
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$@\"", "sh"]);
    limited.arg(inner.get_program()).args(inner.get_args()).env(CHILD, "1");
    let run = limited.output().unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
    let (steps, left) = checked(&path);
    assert!(steps > 10 && left == 0, "{steps} steps, {left} bytes left");
    let size = fs::metadata(&path).unwrap().len();
    assert!(size > 6000 && size <= 8192, "{size}");
}

/// The folder of a relative path is that of the time when the file was created.
#[test]
fn a_recorder_stores_its_file_though_the_process_changed_folder() {
    let name = "a_recorder_stores_its_file_though_the_process_changed_folder";
    if std::env::var_os(CHILD).is_some() {
        let mut writer = recorder(Path::new("recording/moved.topk"));
        std::env::set_current_dir("/").unwrap();
        (0..GROUP).for_each(|_| record(&mut writer).unwrap());
        writer.sync().unwrap();
        assert_eq!(writer.finish().unwrap(), GROUP);
        return;
    }
    let path = fresh("moved.topk");
    let run = child(name).current_dir(env!("CARGO_TARGET_TMPDIR")).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    assert_eq!(SelectionTrace::read(&path).unwrap().header().steps, GROUP);
}
