//! The memory that reading a file takes: about its longest line, whatever the line holds. The test reads the kernel's
//! account, in a process of its own for each case.
#![cfg(feature = "trace")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use forebay::trace::requests::{Options, each_request};

/// Gives a test's child process its role.
const CHILD: &str = "FOREBAY_TEST_CHILD";

/// Bytes of the one long line.
const LINE: usize = 60 << 20;

/// A file of one line: `start`, then `part` repeatedly, then `end`.
fn file(name: &str, start: &str, part: &str, end: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut out = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    out.write_all(start.as_bytes()).unwrap();
    (0..LINE / part.len()).for_each(|_| out.write_all(part.as_bytes()).unwrap());
    out.write_all(end.as_bytes()).unwrap();
    path
}

/// The most memory that this process ever held, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Reads the file in a child process: requests, or the error, and the memory that it took.
fn cost(test: &str, path: PathBuf) -> Option<(String, u64)> {
    if std::env::var_os(CHILD).is_some() {
        let before = peak();
        let mut requests = 0_u64;
        let read = each_request(&path, &Options::default(), |_| {
            requests += 1;
            Ok(())
        });
        let said = read.map_or_else(|e| e.to_string(), |_| format!("{requests} requests"));
        println!("\nCOST {} {said}", peak() - before);
        return None;
    }
    let exe = std::env::current_exe().unwrap();
    let run = Command::new(exe).args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8(run.stdout).unwrap();
    let line = said.lines().find_map(|line| line.strip_prefix("COST ")).unwrap();
    let (bytes, said) = line.split_once(' ').unwrap();
    std::fs::remove_file(path).unwrap();
    Some((said.to_owned(), bytes.parse().unwrap()))
}

/// A line's list doubles as it grows, and nothing else grows with it.
fn is_about_a_line(bytes: u64) -> bool {
    (LINE as u64 / 2..LINE as u64 * 5 / 2).contains(&bytes)
}

#[test]
fn a_line_of_many_fields_costs_a_line() {
    let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4,5\n2023-11-16 18:17:03";
    let path = file("commas.csv", header, ",", "\n");
    let Some((said, bytes)) = cost("a_line_of_many_fields_costs_a_line", path) else { return };
    assert!(said.contains("more than three fields (line 3, column 23)"), "{said}");
    assert!(is_about_a_line(bytes), "{bytes} bytes");
}

#[test]
fn a_session_of_many_requests_costs_a_line() {
    let start = "{\"block_size\":64,\"hash_id_scope\":\"local\",\"requests\":[{\"t\":0,\"hash_ids\":[]}";
    let path = file("session.jsonl", start, ",{\"t\":0,\"hash_ids\":[]}", "]}\n");
    let Some((said, bytes)) = cost("a_session_of_many_requests_costs_a_line", path) else { return };
    assert_eq!(said, format!("{} requests", LINE / 22 + 1));
    assert!(is_about_a_line(bytes), "{bytes} bytes");
}

#[test]
fn a_sub_agent_of_many_requests_before_its_block_size_costs_a_line() {
    let start = "{\"requests\":[{\"t\":0,\"requests\":[{\"t\":0,\"hash_ids\":[]}";
    let path = file("agent.jsonl", start, ",{\"t\":0,\"hash_ids\":[]}", "]}],\"block_size\":64}\n");
    let test = "a_sub_agent_of_many_requests_before_its_block_size_costs_a_line";
    let Some((said, bytes)) = cost(test, path) else { return };
    assert_eq!(said, "1 requests");
    assert!(is_about_a_line(bytes), "{bytes} bytes");
}
