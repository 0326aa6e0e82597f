//! Tests of the header that runs kernels on a CPU: it finds races by the order of threads, and ends hangs with a
//! message.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../tests/support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Compiles the program of `shim/kernels.cpp` with further flags; reports a skip if there is no g++.
fn program(test: &str, flags: &[&str]) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{test}"));
    let mut compile = Command::new("g++");
    compile.args(["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror"]).args(flags);
    compile.arg("-I").arg(root.join("include")).arg(root.join("tests/shim/kernels.cpp"));
    let Ok(status) = compile.arg("-o").arg(&program).status() else {
        skip::skip("g++");
        return None;
    };
    assert!(status.success());
    Some(program)
}

fn run(program: &Path, kernel: &str, flag: u32, seed: u64, shared: u32) -> Output {
    let values = [flag.to_string(), seed.to_string(), shared.to_string()];
    Command::new(program).arg(kernel).args(values).output().unwrap()
}

/// Returns what a kernel printed.
fn printed(program: &Path, kernel: &str, flag: u32, seed: u64) -> String {
    let output = run(program, kernel, flag, seed, 0);
    assert!(output.status.success(), "{kernel}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn warp_operations_barriers_and_atomics_behave_as_documented() {
    let Some(program) = program("operations", &[]) else { return };
    for seed in 0..20 {
        assert_eq!(printed(&program, "operations", 0, seed), "right", "seed {seed}");
    }
}

/// Two blocks of 64 threads each read a word that another thread writes. With the barrier all threads see it; without,
/// under every seed some do not.
#[test]
fn a_missing_barrier_shows_and_with_the_barrier_nothing_does() {
    let Some(program) = program("race", &[]) else { return };
    for kernel in ["race", "warp_race"] {
        for seed in 0..20 {
            assert_eq!(printed(&program, kernel, 1, seed), "128", "{kernel}, seed {seed}");
            assert_ne!(printed(&program, kernel, 0, seed), "128", "{kernel}, seed {seed}");
        }
    }
}

#[test]
fn blocks_run_in_either_order() {
    let Some(program) = program("blocks", &[]) else { return };
    let last: Vec<String> = (0..20).map(|seed| printed(&program, "blocks_race", 0, seed)).collect();
    assert!(last.contains(&"0".to_owned()) && last.contains(&"1".to_owned()), "{last:?}");
}

#[test]
fn a_kernel_that_would_hang_or_fault_on_a_gpu_ends_with_a_message() {
    let Some(program) = program("hang", &[]) else { return };
    let cases = [
        ("unreached", "a barrier that not all threads of the block reach"),
        ("two_barriers", "threads of one block wait at different barriers"),
        ("absent_lane", "a warp operation whose mask names a lane that never comes"),
        ("absent_lane", "of which 00000200 never came"),
        ("foreign_lane", "mask leaves out the lane that calls it"),
        ("misaligned", "a misaligned address"),
    ];
    for (kernel, message) in cases {
        for seed in 0..5 {
            let output = run(&program, kernel, 0, seed, 0);
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && text.contains(message), "{kernel}: {text}");
            assert!(text.contains(&format!("kernel {kernel}")), "{text}");
        }
    }
    // A stack that is too short ends in the page below it, not in another thread's stack.
    assert!(!run(&program, "deep", 0, 1, 0).status.success());
}

/// The sanitizer follows the threads' stacks, and detects a write beyond dynamic shared memory.
#[test]
fn the_address_sanitizer_follows_the_threads() {
    let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let Some(program) = program("asan", &flags) else { return };
    for seed in 0..3 {
        assert_eq!(printed(&program, "operations", 0, seed), "right", "seed {seed}");
        assert!(run(&program, "beyond_shared", 0, seed, 64 * 4).status.success());
        let output = run(&program, "beyond_shared", 0, seed, 63 * 4);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("heap-buffer-overflow"), "{text}");
    }
}
