//! `forebay transfer`: a prompt's rows between two processes, with each fault, and what must not be left behind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "support/command.rs"]
mod command;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use command::{forebay, refuses, succeeds};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const LAYERS: u64 = 4;
const TOKENS: u64 = 200;
const SMALL: [&str; 6] = ["--layers", "4", "--tokens", "200", "--compute", "1ms"];

/// A folder for one test, which is the folder for temporary files of all its processes.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        // The path of a socket has at most 108 bytes.
        let path = std::env::temp_dir().join(format!("transfer-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn name(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn is_empty(&self) -> bool {
        fs::read_dir(&self.0).unwrap().next().is_none()
    }

    /// The processes that have this folder in their environment, zombies aside.
    fn processes(&self) -> Vec<i32> {
        let wanted = format!("TMPDIR={}\0", self.0.display());
        let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok());
        let own = all.filter(|entry| {
            let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&wanted)
        });
        own.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The status and the JSON of a demo, of which nothing is left.
fn demo(name: &str, more: &[&str]) -> (i32, Value) {
    let folder = Folder::new(name);
    let arguments = [&["transfer", "demo", "--json", "-"], &SMALL[..], more].concat();
    let output = forebay(&arguments).env("TMPDIR", &folder.0).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(errors, "", "{arguments:?}");
    assert!(folder.is_empty(), "{arguments:?} left files");
    assert_eq!(folder.processes(), [] as [i32; 0], "{arguments:?} left processes");
    let mut entries: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(entries.len(), 1);
    (output.status.code().unwrap(), entries.remove(0))
}

fn is_done((status, entry): &(i32, Value)) {
    assert_eq!(
        (*status, &entry["outcome"], &entry["verified"]),
        (0, &"done".into(), &true.into()),
        "{entry}"
    );
    assert_eq!(entry["bytes"], LAYERS * TOKENS * (704 + 132), "{entry}");
    // Pages of 64 tokens, of latents and of index keys.
    assert_eq!(entry["runs"], LAYERS * TOKENS.div_ceil(64) * 2, "{entry}");
}

/// Without digests a wrong byte comes through, and only the comparison finds it; with them it is told again.
#[test]
fn without_digests_rows_arrive_and_wrong_ones_do_too() {
    for fabric in ["shm", "tcp"] {
        let with = ["--fabric", fabric, "--fault", "flip:1"];
        let without = [&with[..], &["--no-digests"]].concat();
        let done = demo(&format!("without-{fabric}"), &["--fabric", fabric, "--no-digests"]);
        is_done(&done);
        assert_eq!(done.1["digests"], false);
        has_failed(&demo(&format!("wrong-{fabric}"), &without), "wrong bytes");
        let repaired = demo(&format!("repaired-{fabric}"), &with);
        is_done(&repaired);
        assert_eq!((&repaired.1["digests"], &repaired.1["resent"]), (&true.into(), &1.into()));
    }
}

fn has_failed((status, entry): &(i32, Value), reason: &str) {
    let found = (*status, &entry["outcome"], &entry["reason"], &entry["verified"]);
    assert_eq!(found, (1, &"failed".into(), &reason.into(), &false.into()), "{entry}");
    assert!(entry.get("exposed_ms").is_none(), "{entry}");
}

#[test]
fn every_byte_crosses_either_fabric_and_the_times_are_in_order() {
    for fabric in ["shm", "tcp"] {
        let done = demo(fabric, &["--fabric", fabric]);
        is_done(&done);
        let (_, entry) = done;
        assert_eq!((&entry["kind"], &entry["fabric"]), (&"transfer".into(), &fabric.into()));
        let number = |name: &str| entry[name].as_f64().unwrap_or_else(|| panic!("{name}: {entry}"));
        // Four layers of a millisecond each.
        assert!(number("compute_ms") >= 4.0 && number("alone_ms") > 0.0, "{entry}");
        let hidden = (1.0 - number("exposed_ms") / number("alone_ms")).max(0.0);
        assert!((number("hidden") - hidden).abs() < 1e-9, "{entry}");
        let rate = number("bytes") / number("alone_ms") / 1e6;
        assert!((number("gb_s") - rate).abs() < 1e-9 * rate, "{entry}");
        let timeline = entry["timeline"].as_array().unwrap();
        assert_eq!(timeline.len() as u64, LAYERS);
        let mut before = 0.0;
        for (layer, of) in timeline.iter().enumerate() {
            let time = |name: &str| of[name].as_f64().unwrap();
            assert_eq!(of["layer"], layer);
            assert!(before + 1.0 <= time("computed_ms") && time("computed_ms") <= time("told_ms"), "{entry}");
            assert!(time("told_ms") <= time("stored_ms"), "{entry}");
            before = time("computed_ms");
        }
        let last = timeline.last().unwrap();
        let exposed = last["stored_ms"].as_f64().unwrap() - last["computed_ms"].as_f64().unwrap();
        assert!(exposed <= number("exposed_ms") + 1e-6, "{entry}");
    }
}

#[test]
fn every_field_is_documented() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/json.md")).unwrap();
    let (_, section) = page.split_once("## `kind` \"transfer\"").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let (_, done) = demo("fields", &["--fault", "flip:1"]);
    let (_, failed) = demo("fields", &["--fault", "abort:1"]);
    let mut fields = 0;
    for entry in [&done, &failed, &done["timeline"][0]] {
        let own = entry.as_object().unwrap().keys();
        for field in own.filter(|field| !["schema", "forebay", "kind", "layer"].contains(&field.as_str())) {
            assert!(section.contains(&format!("`{field}`")), "{field} is not on the page");
            fields += 1;
        }
    }
    assert!(fields > 30, "{fields}");
}

#[test]
fn chunks_pages_and_a_ring_that_is_full_change_no_byte() {
    let done = demo("chunks", &["--chunk", "48", "--fabric", "tcp", "--spin"]);
    assert_eq!((done.0, &done.1["verified"]), (0, &true.into()), "{}", done.1);
    // Nothing to compute: the ring of four layers is full at once.
    let arguments = ["--layers", "12", "--compute", "0us", "--page", "7", "--row-bytes", "13,3"];
    let text = succeeds(&[&["transfer", "demo", "--tokens", "100"], &arguments[..]].concat());
    assert!(text.contains("done, every byte compared"), "{text}");
    // The table, and a line for each layer.
    assert!(
        text.contains("exposed") && text.lines().any(|line| line.trim_start().starts_with("11 ")),
        "{text}"
    );
}

#[test]
fn a_picture_has_the_layers_that_were_sent() {
    let folder = Folder::new("picture");
    let picture = folder.name("layers.svg");
    let text = succeeds(&[&["transfer", "demo", "--picture", &picture], &SMALL[..]].concat());
    assert!(text.contains("hidden"), "{text}");
    let drawn = fs::read_to_string(&picture).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("200 tokens in 4 layers over shm: done"), "{drawn}");
    for layer in 0..LAYERS {
        for what in ["computes", "waits to be told", "is on its way"] {
            assert_eq!(drawn.matches(&format!("layer {layer} {what}: ")).count(), 1, "{drawn}");
        }
    }
    assert!(!drawn.contains("layer 4 "), "{drawn}");
    refuses(&["transfer", "demo", "--picture", &picture, "--json", &picture]);
}

#[test]
fn wrong_and_lost_runs_are_sent_again() {
    for fabric in ["shm", "tcp"] {
        let flipped = demo("flip", &["--fabric", fabric, "--fault", "flip:5"]);
        is_done(&flipped);
        // On a slow machine what is not answered in time is told again as well.
        assert!(flipped.1["resent"].as_u64().unwrap() >= 5, "{}", flipped.1);
        let dropped = demo("drop", &["--fabric", fabric, "--fault", "drop:2"]);
        is_done(&dropped);
        // A notice tells a layer or several of them: 8 runs each.
        assert!(dropped.1["resent"].as_u64().unwrap() >= 16, "{}", dropped.1);
    }
}

#[test]
fn a_lost_or_aborted_end_is_told_with_its_reason() {
    for fabric in ["shm", "tcp"] {
        has_failed(&demo("kill", &["--fabric", fabric, "--fault", "kill-sender:2"]), "peer lost");
        has_failed(&demo("abort", &["--fabric", fabric, "--fault", "abort:2"]), "aborted");
        let begin = Instant::now();
        let stop = ["--fabric", fabric, "--fault", "stop-receiver:1", "--timeout", "300ms"];
        has_failed(&demo("stop", &stop), "peer lost");
        assert!(begin.elapsed() >= Duration::from_millis(300), "the receiver did not stop");
    }
}

#[test]
fn the_ends_go_with_a_demo_that_is_killed() {
    let folder = Folder::new("killed");
    // The receiver is stopped: it could not end by itself.
    let arguments = ["transfer", "demo", "--fault", "stop-receiver:1", "--timeout", "60s"];
    let mut demo = forebay(&[&arguments[..], &SMALL].concat())
        .env("TMPDIR", &folder.0)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("both ends", || folder.processes().len() == 3 && folder.is_empty());
    kill(Pid::from_raw(demo.id() as i32), Signal::SIGKILL).unwrap();
    demo.wait().unwrap();
    until("the end of both ends", || folder.processes().is_empty());
    assert!(folder.is_empty());
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A receiver in a terminal of its own, and where it listens.
fn receiver(more: &[&str]) -> (Child, BufReader<ChildStdout>, String) {
    let arguments = [&["transfer", "receive"], &SMALL[..], more].concat();
    let mut child = forebay(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let at = line.trim().strip_prefix("listening at ").unwrap().to_owned();
    (child, out, at)
}

/// The statuses of a receiver and a sender, and what the receiver says.
fn two(receive: &[&str], send: &[&str]) -> (Option<i32>, Option<i32>, String) {
    let (mut child, mut out, at) = receiver(receive);
    let arguments = [&["transfer", "send", "--at", &at], &SMALL[..], send].concat();
    let sent = forebay(&arguments).output().unwrap();
    let mut said = String::new();
    out.read_to_string(&mut said).unwrap();
    said.push_str(&String::from_utf8_lossy(&sent.stdout));
    (child.wait().unwrap().code(), sent.status.code(), said)
}

#[test]
fn two_terminals_compare_by_the_seed() {
    let folder = Folder::new("terminals");
    let socket = folder.name("socket");
    let token = folder.name("token");
    fs::write(&token, b"a token of the test, long enough").unwrap();
    let tcp = ["--fabric", "tcp", "--token-file", &token];
    let at = [&tcp[..], &["--at", "127.0.0.1:0"]].concat();
    for (receive, send) in [(&["--at", socket.as_str()][..], &[][..]), (&at, &tcp)] {
        let same = ["--seed", "7"];
        let (received, sent, said) = two(&[receive, &same].concat(), &[send, &same].concat());
        assert_eq!((received, sent), (Some(0), Some(0)), "{said}");
        assert!(said.contains("every byte compared"), "{said}");
        // The control: rows of another seed arrive whole, with digests that are right.
        let (received, sent, said) = two(&[receive, &same].concat(), &[send, &["--seed", "8"]].concat());
        assert_eq!((received, sent), (Some(1), Some(0)), "{said}");
        assert!(said.starts_with("failed: wrong bytes"), "{said}");
    }
}

#[test]
fn bad_arguments_are_one_line() {
    for bad in [
        &["demo", "--fault", "melt:1"][..],
        &["demo", "--fault", "flip:x"],
        &["demo", "--fault", "abort:61"],
        &["demo", "--layers", "0"],
        &["demo", "--tokens", "0"],
        &["demo", "--page", "0"],
        &["demo", "--chunk", "0"],
        &["demo", "--row-bytes", "704"],
        &["demo", "--row-bytes", "0,132"],
        &["demo", "--compute", "2"],
        &["demo", "--timeout", "1ms"],
        &["demo", "--fabric", "rdma"],
        &["demo", "--layers", "1024", "--tokens", "1000000", "--row-bytes", "1048576,1048576"],
        &["receive", "--fabric", "tcp", "--at", "nowhere"],
        &["receive", "--fabric", "tcp", "--at", "0.0.0.0:0"],
        &["receive", "--fabric", "tcp", "--at", "127.0.0.1:0", "--token-file", "/nowhere/token"],
        &["send", "--at", "/nowhere/socket", "--timeout", "100ms", "--tokens", "100"],
    ] {
        refuses(&[&["transfer"], bad].concat());
    }
    assert!(!Path::new("/nowhere").exists());
}
