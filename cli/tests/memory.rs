//! What a replay holds at its peak: less than the trace's decoded size and 500 MB, whatever is asked of it.
//!
//! The peak is the kernel's, of the largest child that has ended so far. Runs stand in the order of their limits,
//! so an earlier run cannot make a later one fail. The tests share the children.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../tests/support/traces.rs"]
mod traces;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::resource::{UsageWho, getrusage};

/// Beside the decoded trace.
const BESIDE: u64 = 500 * 1000 * 1000;

fn decoded(path: &Path) -> u64 {
    let mut decoder = zstd::Decoder::new(File::open(path).unwrap()).unwrap();
    std::io::copy(&mut decoder, &mut std::io::sink()).unwrap()
}

/// Peak resident bytes of all children so far.
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
    let all = ["--policy", "lru,fifo,s3-fifo,decay,decay-tokens,belady", "--ratio", "0.1,0.2,0.5"];
    for (trace, arguments) in [
        (&selections, &all[..]),
        (&selections, &["--curve"]),
        (&selections, &["--split", "by-layer", "--prefetch", "inter-layer"]),
        (&requests, &["--curve"]),
        (&requests, &["--policy", "lru,fifo,s3-fifo,belady", "--capacity", "3125"]),
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

/// A trace of a few bytes whose context is the longest there may be: what is held grows with it.
#[test]
fn a_long_context_is_held_by_few_threads() {
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
    // Positions 0 and 1 in every layer; nothing changes afterwards.
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
