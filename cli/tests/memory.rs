//! Tests of the peak memory of a replay: less than the trace's decoded size plus 500 MB, whatever the options.
//!
//! The kernel reports the peak, that of the largest child that has ended so far. The runs are in the order of their
//! limits, so an earlier run cannot make a later one fail. The tests share the children.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/command.rs"]
mod command;
#[path = "../../tests/support/traces.rs"]
mod traces;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use command::{forebay, refused, refuses, succeeds};
use nix::sys::resource::{UsageWho, getrusage};

/// The allowance in addition to the decoded trace.
const BESIDE: u64 = 500 * 1000 * 1000;

fn decoded(path: &Path) -> u64 {
    let mut decoder = zstd::Decoder::new(File::open(path).unwrap()).unwrap();
    std::io::copy(&mut decoder, &mut std::io::sink()).unwrap()
}

/// The peak of resident bytes over all children so far.
fn peak() -> u64 {
    let kib = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    u64::try_from(kib).unwrap() * 1024
}

#[test]
fn a_replay_stays_within_the_decoded_trace_and_500_mb() {
    let (Some(topk), Some(sessions)) = (traces::directory("topk"), traces::directory("kv-cache-tester"))
    else {
        return;
    };
    let (selections, requests) =
        (topk.join("smollm2-8k-policy-tf.topk.zst"), sessions.join("agentic_A.jsonl.zst"));
    // Pools that hold the whole prompt need the most memory and evict little; evictions take the time.
    let all = ["--policy", "lru,s3-fifo,decay-tokens,belady", "--prompt-share", "1"];
    for (trace, arguments) in [
        (&selections, &all[..]),
        (&selections, &["--curve"]),
        (&selections, &["--split", "by-layer", "--prefetch", "inter-layer", "--prompt-share", "0.9"]),
        (&requests, &["--curve"]),
        (&requests, &["--policy", "lru,s3-fifo,belady", "--capacity", "3125"]),
    ] {
        let mut replay = Command::new(env!("CARGO_BIN_EXE_forebay"));
        replay.arg("replay").arg(trace).args(arguments).args(["--json", "-"]).stdout(Stdio::null());
        assert!(replay.status().unwrap().success(), "{arguments:?}");
        let (decoded, peak) = (decoded(trace), peak());
        assert!(peak > decoded, "{arguments:?}: a peak of {peak} bytes, below the trace");
        assert!(peak <= decoded + BESIDE, "{arguments:?}: {peak} bytes, {} allowed", decoded + BESIDE);
        println!("{arguments:?}: at most {} MB so far, decoded {} MB", peak / 1_000_000, decoded / 1_000_000);
    }
}

/// Little-endian base 128.
fn varint(mut value: u32, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A trace whose layers select `k` consecutive positions, from `l * stride` on in layer l, the same in every step.
fn trace(name: &str, layers: u32, k: u16, context: u32, stride: u32) -> PathBuf {
    const STEPS: u32 = 3;
    let start = context - STEPS;
    let header = format!(
        r#"{{"layers":{layers},"k":{k},"steps":{STEPS},"warm_steps":1,"first_position":{start},
        "decode_start":{},"context":{context}}}"#,
        start + 1
    );
    let mut bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    for layer in 0..layers {
        bytes.extend([k.to_le_bytes(), [0, 0]].concat());
        varint(layer * stride, &mut bytes);
        bytes.resize(bytes.len() + usize::from(k) - 1, 0);
    }
    bytes.resize(bytes.len() + 4 * (layers * (STEPS - 1)) as usize, 0);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Runs the command with 1 GB of address space, in which memory counts that is mapped and never touched.
fn confined(arguments: &[&str]) -> std::process::Output {
    let script = "ulimit -v 1000000 || exit 9; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_forebay")]).args(arguments).output().unwrap()
}

/// The layers and the context that a small file declares do not matter: tables cover the positions in its sets.
#[test]
fn small_traces_are_replayed_in_little_memory_whatever_their_header_declares() {
    let all = "--slots 9 --policy lru,fifo,s3-fifo,decay,decay-tokens,belady --json -";
    let both = "--slots 70 --split by-layer --prefetch inter-layer --json -";
    let [replay, html, curve] = ["--json -", "--html -", "--curve --json -"];
    let at = "simulate --setup ess --context 32K --mtp 1 --batch 8 --ratio 0.1 --json - --trace";
    let plan = "plan --setup ess --gpu 80GiB --context 32K --batch 8 --ratio 0.1 --json - --trace";
    for (layers, k, context, runs) in [
        (64, 1, 1 << 24, &[replay, html, all, curve, both, at, plan][..]),
        (64, 1, 1 << 12, &[replay]),
        (2, 2000, 1 << 24, &[html, all, both]),
        (61, 64, 1 << 20, &[replay, curve]),
        (1000, 1, 1 << 24, &["--slots 9 --json -", curve]),
    ] {
        let path = trace(&format!("{layers}-{k}-{context}.topk"), layers, k, context, 7);
        for run in runs {
            let words: Vec<&str> = run.split(' ').collect();
            let name = path.to_str().unwrap();
            let arguments = match run.starts_with("--") {
                true => [&["replay", name], &words[..]].concat(),
                false => [&words[..], &[name]].concat(),
            };
            let output = confined(&arguments);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{layers} x {context}, {run}: {errors}");
        }
    }
}

/// Layers without common positions need tables larger than the trace: the error names the limit before they are
/// allocated, and the user can raise it.
#[test]
fn memory_beyond_the_limit_is_refused_before_it_is_allocated() {
    let path = trace("apart.topk", 600, 2000, 1 << 24, 2000);
    let path = path.to_str().unwrap();
    for arguments in [&["replay", path][..], &["replay", path, "--html", "-"]] {
        let output = confined(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), errors.lines().count()), (Some(2), 1), "{errors}");
        assert!(
            errors.contains(path) && errors.contains("GiB of memory, but the limit is 491 MiB;"),
            "{errors}"
        );
        assert!(errors.contains("allow more with --memory SIZE"), "{errors}");
    }
    // The control: with a limit that large, the command allocates them, and fails at the machine's limit.
    let errors = confined(&["replay", path, "--memory", "1TB"]).stderr;
    let errors = String::from_utf8(errors).unwrap();
    assert!(errors.contains("out of memory") && !errors.contains("--memory"), "{errors}");
}

/// A file that contains only the beginning of a trace.
fn beginning(name: &str, layers: u32, k: u32, steps: u32, context: u32) -> String {
    let start = context - steps;
    let header = format!(
        r#"{{"layers":{layers},"k":{k},"steps":{steps},"warm_steps":1,"first_position":{start},
        "decode_start":{},"context":{context}}}"#,
        start + 1
    );
    let bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    written(name, &bytes)
}

/// The path of a file of these tests.
fn written(name: &str, bytes: &[u8]) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("memory");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A size as the command prints it.
fn size(bytes: u64) -> String {
    let value = bytes as f64 / 1048576.0;
    let (value, unit) = if value < 1024.0 { (value, "MiB") } else { (value / 1024.0, "GiB") };
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {unit}")
}

/// The memory of the program itself.
const PROGRAM: u64 = 48 << 20;

/// The command compares the size in a header with the limit before it reads a set: the sets do not even exist here.
#[test]
fn a_header_beyond_the_limit_is_refused_before_a_set_is_decoded() {
    // 64 layers x 1000 steps x 2048 positions, four bytes each.
    let path = beginning("promises.topk", 64, 2048, 1000, 1 << 24);
    let needs = size(PROGRAM + 4 * 64 * 1000 * 2048);
    let point = "simulate --setup ess --context 32K --mtp 1 --batch 8 --ratio 0.1";
    let plan = "plan --setup ess --gpu 80GiB --context 32K --batch 8 --ratio 0.1";
    for (call, hint) in [
        (vec!["replay", &path], "--slots"),
        (vec!["replay", &path, "--html", "-"], "--slots"),
        (vec!["replay", &path, "--curve"], "--slots"),
        ([&point.split(' ').collect::<Vec<_>>()[..], &["--trace", &path]].concat(), "--ratio,"),
        ([&plan.split(' ').collect::<Vec<_>>()[..], &["--trace", &path]].concat(), "--ratio,"),
    ] {
        let e = refuses(&[&call[..], &["--memory", "300MB"]].concat());
        let wanted = format!("{path}: needs {needs} of memory, but the limit is {};", size(300_000_000));
        assert!(e.contains(&wanted) && e.contains("--memory SIZE"), "{call:?}: {e}");
        assert!(e.contains(hint) && (hint == "--slots" || !e.contains("--slots")), "{call:?}: {e}");
        // The control: a size within the limit is read, and the sets are missing.
        assert!(refuses(&call).contains("truncated"), "{call:?}");
    }
    // Tables that follow from the header alone: two tables of words and a stack of all positions exceed 500 MB.
    let path = beginning("tables.topk", 1024, 4096, 64, 1 << 18);
    for arguments in
        [&["replay", &path][..], &["replay", &path, "--html", "-"], &["replay", &path, "--curve"]]
    {
        let e = refuses(arguments);
        let allowed = size(4 * 1024 * 4096 * 64 + BESIDE);
        assert!(e.contains(" of memory, but the limit is ") && e.contains(&allowed), "{arguments:?}: {e}");
    }
}

/// A recording does not store its length, so the command checks the limit at every step.
#[test]
fn a_recording_is_refused_where_it_grows_beyond_the_limit() {
    let (k, steps) = (60_000, 100);
    let recording = r#"{"layers":1,"k":60000,"first_position":60000,"decode_start":60001}"#.as_bytes();
    let mut bytes = [b"TOPKTRC2", &(recording.len() as u32).to_le_bytes()[..], recording].concat();
    bytes.extend([&0_u32.to_le_bytes()[..], &(steps as u32).to_le_bytes()].concat());
    bytes.extend([(k as u16).to_le_bytes(), [0, 0]].concat());
    bytes.resize(bytes.len() + k as usize + 4 * (steps as usize - 1), 0);
    bytes.extend([&(steps as u32).to_le_bytes()[..], &[0; 4]].concat());
    let path = written("recording.topk", &bytes);
    // Fifty steps.
    let allowed = PROGRAM + 4 * 50 * k;
    let e =
        refuses(&["replay", &path, "--slots", "9", "--memory", &format!("{:.3}MB", allowed as f64 / 1e6)]);
    assert!(e.contains(&format!("{path}: needs {} of memory", size(allowed + 4 * k))), "{e}");
    assert!(succeeds(&["replay", &path, "--slots", "9", "--json", "-"]).contains("\"steps\": 99"));
}

/// Sessions in one scope with the same times, whose ids are large numbers: `sessions` of `requests`, each with `blocks`
/// of `distinct` ids.
fn sessions(name: &str, sessions: u64, requests: u64, blocks: u64, distinct: u64, first: u64) -> String {
    let mut text = String::new();
    for session in 0..sessions {
        text += r#"{"block_size":1,"hash_id_scope":"global","requests":["#;
        for request in 0..requests {
            let start = (session * requests + request) * blocks;
            let ids: Vec<String> =
                (start..start + blocks).map(|id| (first + id % distinct).to_string()).collect();
            let comma = if request > 0 { "," } else { "" };
            text +=
                &format!(r#"{comma}{{"t":{request},"in":{blocks},"out":1,"hash_ids":[{}]}}"#, ids.join(","));
        }
        text += "]}\n";
    }
    written(name, text.as_bytes())
}

/// Interleaving needs references and requests twice: the command checks the limit first, to the last byte.
#[test]
fn interleaving_is_checked_against_the_limit_before_it_is_allocated() {
    let (all, blocks) = (16_384, 64);
    let path = sessions("interleaved.jsonl", 2, all / 2, blocks, 1000, 0);
    let references = all * blocks;
    // Powers of two, which vectors that double hold exactly. The table of ids is freed by then.
    let trace = 4 * references + 12 * all;
    let interleaving = 4 * references + (8 + 4 + 12) * all + 4 * 1000;
    let replay = |memory: u64, more: &[&str]| {
        let memory = format!("{:.6}MB", memory as f64 / 1e6);
        forebay(&[&["replay", &path, "--json", "-", "--memory", &memory], more].concat()).output().unwrap()
    };
    let enough = PROGRAM + trace + interleaving;
    let e = refused(replay(enough - 1000, &[]), &["replay"]);
    assert!(e.contains(&format!("{path}: needs {} of memory", size(enough))), "{e}");
    assert!(e.contains("--memory SIZE") && e.contains("--one-after-another"), "{e}");
    assert!(!e.contains("--ratio") && !e.contains("layers"), "{e}");
    assert_eq!(replay(enough, &[]).status.code(), Some(0));
    assert_eq!(replay(enough - 1000, &["--one-after-another"]).status.code(), Some(0));
}

/// Within any limit, a request trace is read or refused with both numbers. With an address space a little larger than
/// the limit no allocation fails. The ids' table is many times the trace.
#[test]
fn request_traces_are_read_within_the_limit() {
    let path = sessions("ids.jsonl", 50, 20, 1000, u64::MAX, 1 << 40);
    let mut read = 0;
    for megabytes in [60, 90, 120, 180, 260] {
        let script = "ulimit -v $1 || exit 9; shift; exec \"$@\"";
        let kib = (megabytes * 1_000_000 / 1024 + (40 << 10)).to_string();
        let memory = format!("{megabytes}MB");
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", &kib, env!("CARGO_BIN_EXE_forebay"), "replay", &path]);
        let output = command.args(["--json", "-", "--capacity", "9", "--memory", &memory]).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        match output.status.code() {
            Some(0) => read += 1,
            _ => assert!(errors.contains(" of memory, but the limit is "), "{megabytes}: {errors}"),
        }
    }
    assert!((1..5).contains(&read), "{read} of 5 were read");
}

/// A trace of a few bytes with the longest possible context, on which the memory of a replay depends.
#[test]
fn few_threads_replay_a_long_context() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("long_context");
    std::fs::create_dir_all(&folder).unwrap();
    let trace = folder.join("long.topk");
    let (layers, steps, context) = (2, 3, 1 << 24);
    let header = format!(
        r#"{{"layers":{layers},"k":2,"steps":{steps},"warm_steps":0,"first_position":{0},
        "decode_start":{0},"context":{context}}}"#,
        context - steps
    );
    let mut bytes = [b"TOPKTRC1", &(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat();
    // Positions 0 and 1 in every layer, in every step.
    bytes.extend([2, 0, 0, 0, 0, 0].repeat(layers));
    bytes.extend([0; 4].repeat(layers * (steps as usize - 1)));
    std::fs::write(&trace, bytes).unwrap();
    for arguments in [&["--policy", "decay-tokens"][..], &["--curve"]] {
        let mut replay = Command::new(env!("CARGO_BIN_EXE_forebay"));
        replay.arg("replay").arg(&trace).args(["--slots", "9", "--json", "-"]).args(arguments);
        assert!(replay.stdout(Stdio::null()).status().unwrap().success(), "{arguments:?}");
        assert!(peak() <= BESIDE, "{arguments:?}: {} bytes, {BESIDE} allowed", peak());
    }
}

/// Runs the command with `kib` KiB of address space; it must fail with an error in one line, never by a signal.
fn starved(kib: u32, arguments: &[&str]) -> String {
    let script = "ulimit -v $1 || exit 9; shift; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", &kib.to_string(), env!("CARGO_BIN_EXE_forebay")]);
    let output = command.args(arguments).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), errors.lines().count()), (Some(2), 1), "{arguments:?}: {errors}");
    errors
}

/// If memory runs out while the command reads a side file, a line or a JSON text, it returns an error and does not
/// abort.
#[test]
fn running_out_of_memory_while_a_text_is_read_is_an_error() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("starved");
    std::fs::create_dir_all(&folder).unwrap();
    let written = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let line = |ids: &str| {
        format!(
            r#"{{"timestamp": "0", "input_length": 4000000, "output_length": 1, "hash_ids": {{"sys_prompt": [{ids}],
            "passages_ids": [], "history": [], "web_search": [], "user_input": []}}}}"#
        )
        .replace('\n', " ")
    };
    let small = written("small.jsonl", &line("1, 2"));
    let fits = |kib: &u32| {
        let script = "ulimit -v $1 || exit 9; shift; exec \"$@\"";
        let mut control = Command::new("sh");
        control.args(["-c", script, "sh", &kib.to_string(), env!("CARGO_BIN_EXE_forebay")]);
        control.args(["replay", &small, "--json", "-"]).output().unwrap().status.success()
    };
    // The memory of the program itself, to 4 MiB, and the same again.
    let kib = (4..64).map(|n| n << 12).find(fits).unwrap() + (4 << 10);

    let many: String =
        (0..400_000).map(|id| format!("{{\"history_id\":{id},\"token_length\":1}}\n")).collect();
    let side = written("side.jsonl", &many);
    let e = starved(kib, &["replay", &small, "--block-lengths", &side]);
    assert!(e.contains("out of memory: ") && e.contains("the pieces' lengths"), "{e}");

    let ids: Vec<String> = (0..600_000).map(|id| id.to_string()).collect();
    let long = written("long.jsonl", &line(&ids.join(",")));
    let e = starved(kib, &["replay", &long]);
    assert!(e.contains("out of memory: ") && e.contains("a line (line 1"), "{e}");

    let lists = format!(
        "{{\"steps\":{{\"query_rows\":1,\"query_rows_power\":1,\"rows\":[{}[]]}}}}",
        "[],".repeat(500_000)
    );
    let misses = written("misses.json", &lists);
    let at = "simulate --setup ess --context 32K --mtp 1 --batch 8 --ratio 0.1 --misses";
    let e = starved(kib, &[&at.split(' ').collect::<Vec<_>>()[..], &[&misses]].concat());
    assert!(e.contains("out of memory: ") && e.contains("misses.json: while parsing it (bytes"), "{e}");
    let e = starved(kib, &["fit", &misses]);
    assert!(e.contains("out of memory: "), "{e}");
}
